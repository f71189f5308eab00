//! SYSCALL, SYSRET and SWAPGS (AMD64 manual volume 2, 6.1). SYSENTER is not
//! offered.

use iced_x86::{Code, Mnemonic};
use weft_vcpu::Segment;

use super::select::Operands;
use crate::cpu::{Cpu, efer, register, rflags, segment};
use crate::op::{Handler, Op, Outcome};
use crate::segments::rights;

/// A flat segment that SYSCALL and SYSRET load without looking at a table.
fn flat(selector: u16, rights: u16) -> Segment {
    Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        rights,
    }
}

/// Present, 4 KiB units, accessed; read and execute, or read and write.
const GRANULAR: u16 = 1 << 15;
const CODE: u16 = GRANULAR | rights::PRESENT | rights::ORDINARY | rights::CODE | 3;
const DATA: u16 = GRANULAR | rights::BIG | rights::PRESENT | rights::ORDINARY | 3;
const USER_LEVEL: u16 = 3 << 5;

extern "C" fn syscall(cpu: &mut Cpu, op: &Op) -> Outcome {
    if cpu.efer & efer::SCE == 0 || !cpu.is_long() {
        return super::undefined(cpu, op);
    }
    let selector = (cpu.msrs.star >> 32) as u16 & !3;
    cpu.registers[register::RCX] = cpu.next_rip(op);
    cpu.registers[register::R11] = cpu.rflags() & !rflags::RF;
    cpu.rip = if cpu.mode.is_64() {
        cpu.msrs.lstar
    } else {
        cpu.msrs.cstar
    };
    let flags = cpu.rflags() & !cpu.msrs.sfmask & !rflags::RF;
    cpu.set_rflags(flags);
    cpu.set_segment(segment::CS, flat(selector, CODE | rights::LONG));
    cpu.set_segment(segment::SS, flat(selector.wrapping_add(8), DATA));
    cpu.cpl = 0;
    cpu.update_mode();
    end_of_call(cpu)
}

/// They trap by the TF that they leave: SYSCALL does not where SFMASK clears it,
/// SYSRET does before the program's next instruction.
fn end_of_call(cpu: &mut Cpu) -> Outcome {
    cpu.step_by_new_flags();
    if cpu.pending_debug == 0 {
        Outcome::End
    } else {
        Outcome::Leave
    }
}

/// SYSRET to 64-bit code, or to compatibility mode where not `LONG`.
extern "C" fn sysret<const LONG: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    if cpu.efer & efer::SCE == 0 || !cpu.is_long() {
        return super::undefined(cpu, op);
    }
    // One that is not canonical faults where it leads to, at level 3, as on AMD's
    // processors: Intel's fault here, on a stack that the program chose.
    let target = cpu.registers[register::RCX];
    if cpu.cpl != 0 {
        let faulted = cpu.general_protection(0);
        return cpu.outcome(faulted);
    }
    let base = (cpu.msrs.star >> 48) as u16 | 3;
    let (selector, kind) = if LONG {
        (base.wrapping_add(16), rights::LONG)
    } else {
        (base, rights::BIG)
    };
    cpu.rip = if LONG { target } else { target & 0xffff_ffff };
    let flags = cpu.registers[register::R11] & !(rflags::RF | rflags::VM);
    cpu.set_rflags(flags);
    cpu.set_segment(segment::CS, flat(selector, CODE | USER_LEVEL | kind));
    let stack = flat(base.wrapping_add(8), DATA | USER_LEVEL);
    cpu.set_segment(segment::SS, stack);
    cpu.cpl = 3;
    cpu.update_mode();
    cpu.interrupts_may_be_on();
    end_of_call(cpu)
}

extern "C" fn swap_gs(cpu: &mut Cpu, _: &Op) -> Outcome {
    if cpu.cpl != 0 {
        let faulted = cpu.general_protection(0);
        return cpu.outcome(faulted);
    }
    let user = cpu.segment_bases[segment::GS];
    let kernel = std::mem::replace(&mut cpu.msrs.kernel_gs_base, user);
    cpu.set_segment_base(segment::GS, kernel);
    Outcome::Continue
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, _: &mut Op) -> Option<Handler> {
    Some(match operands.instruction.mnemonic() {
        Mnemonic::Syscall => syscall,
        Mnemonic::Sysret | Mnemonic::Sysretq => {
            if operands.instruction.code() == Code::Sysretq {
                sysret::<true>
            } else {
                sysret::<false>
            }
        }
        Mnemonic::Swapgs if operands.mode.is_64() => swap_gs,
        _ => return None,
    })
}
