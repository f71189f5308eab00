//! RDFSBASE, RDGSBASE, WRFSBASE and WRGSBASE (Intel SDM volume 2; AMD64 manual
//! volume 3). `Op::extra` is the operand size.

use iced_x86::Mnemonic;

use super::select::Operands;
use crate::access::is_canonical;
use crate::cpu::{Cpu, Faulted, cr4, segment};
use crate::op::{Handler, Op, Outcome};

/// #UD unless CR4.FSGSBASE is set.
fn enabled(cpu: &mut Cpu) -> Result<(), Faulted> {
    if cpu.cr4 & cr4::FSGSBASE != 0 {
        Ok(())
    } else {
        Err(cpu.undefined())
    }
}

extern "C" fn read<const SEGMENT: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, enabled(cpu));
    let base = cpu.segment_bases[SEGMENT];
    match op.extra {
        4 => cpu.set::<4>(op.destination, base),
        _ => cpu.set::<8>(op.destination, base),
    }
    Outcome::Continue
}

extern "C" fn write<const SEGMENT: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, enabled(cpu));
    let base = match op.extra {
        4 => cpu.get::<4>(op.destination),
        _ => cpu.get::<8>(op.destination),
    };
    if !is_canonical(base) {
        let faulted = cpu.general_protection(0);
        return cpu.outcome(faulted);
    }
    cpu.set_segment_base(SEGMENT, base);
    Outcome::Continue
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    if !operands.mode.is_64() {
        return None;
    }
    op.extra = operands.size as u8;
    Some(match operands.instruction.mnemonic() {
        Mnemonic::Rdfsbase => read::<{ segment::FS }>,
        Mnemonic::Rdgsbase => read::<{ segment::GS }>,
        Mnemonic::Wrfsbase => write::<{ segment::FS }>,
        Mnemonic::Wrgsbase => write::<{ segment::GS }>,
        _ => return None,
    })
}
