//! What only code of 16 and 32 bits has: decimal adjustment, BOUND, SALC.

use iced_x86::Mnemonic;

use super::arithmetic::{binary, operation};
use super::operand::sign_extended;
use super::select::Operands;
use crate::cpu::{Cpu, register, vector};
use crate::flags;
use crate::op::{Handler, Op, Outcome};

const RAX: usize = register::RAX;

/// SF, ZF and PF of a byte; the others stay.
fn byte_flags(cpu: &mut Cpu, value: u64) {
    let mut of_value = 0;
    binary::<{ operation::OR }, 1>(value, 0, &mut of_value);
    let replaced = flags::SF | flags::ZF | flags::PF;
    cpu.flags = cpu.flags & !replaced | of_value & replaced;
}

fn set_flag(cpu: &mut Cpu, flag: u64, value: bool) {
    if value {
        cpu.flags |= flag;
    } else {
        cpu.flags &= !flag;
    }
}

/// DAA, and DAS where `SUBTRACT`.
extern "C" fn packed<const SUBTRACT: bool>(cpu: &mut Cpu, _: &Op) -> Outcome {
    let before = cpu.get::<1>(0);
    let carry = cpu.flags & flags::CF != 0;
    let mut value = before;
    let mut carries = false;
    let adjust = |value: u64, by: u64| {
        if SUBTRACT {
            value.wrapping_sub(by)
        } else {
            value.wrapping_add(by)
        }
    };
    let low = before & 15 > 9 || cpu.flags & flags::AF != 0;
    if low {
        value = adjust(value, 6);
        carries = carry || value > 0xff;
    }
    set_flag(cpu, flags::AF, low);
    if before > 0x99 || carry {
        value = adjust(value, 0x60);
        carries = true;
    }
    set_flag(cpu, flags::CF, carries);
    byte_flags(cpu, value & 0xff);
    cpu.set::<1>(0, value);
    Outcome::Continue
}

/// AAA, and AAS where `SUBTRACT`.
extern "C" fn unpacked<const SUBTRACT: bool>(cpu: &mut Cpu, _: &Op) -> Outcome {
    let ax = cpu.registers[RAX] & 0xffff;
    let adjusted = ax & 15 > 9 || cpu.flags & flags::AF != 0;
    let ax = match (adjusted, SUBTRACT) {
        (false, _) => ax,
        (true, false) => ax.wrapping_add(0x106),
        (true, true) => ax.wrapping_sub(0x106),
    };
    set_flag(cpu, flags::AF | flags::CF, adjusted);
    cpu.set::<2>(0, ax & 0xff0f);
    Outcome::Continue
}

extern "C" fn after_multiply(cpu: &mut Cpu, op: &Op) -> Outcome {
    let base = op.immediate & 0xff;
    if base == 0 {
        let faulted = cpu.raise(vector::DIVIDE);
        return cpu.outcome(faulted);
    }
    let al = cpu.get::<1>(0);
    let (tens, units) = (al / base, al % base);
    cpu.set::<2>(0, tens << 8 | units);
    byte_flags(cpu, units);
    Outcome::Continue
}

extern "C" fn before_divide(cpu: &mut Cpu, op: &Op) -> Outcome {
    let (al, ah) = (cpu.get::<1>(0), cpu.get::<1>(1));
    let value = ah.wrapping_mul(op.immediate & 0xff).wrapping_add(al) & 0xff;
    cpu.set::<2>(0, value);
    byte_flags(cpu, value);
    Outcome::Continue
}

extern "C" fn bound<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let address = cpu.address(op);
    let upper = cpu.wrapped(address.wrapping_add(SIZE as u64));
    let low = sign_extended::<SIZE>(attempt!(cpu, cpu.load::<SIZE>(address))) as i64;
    let high = sign_extended::<SIZE>(attempt!(cpu, cpu.load::<SIZE>(upper))) as i64;
    let index = sign_extended::<SIZE>(cpu.get::<SIZE>(op.destination)) as i64;
    if index < low || index > high {
        let faulted = cpu.raise(vector::BOUND);
        return cpu.outcome(faulted);
    }
    Outcome::Continue
}

extern "C" fn carry_to_al(cpu: &mut Cpu, _: &Op) -> Outcome {
    let value = if cpu.flags & flags::CF != 0 { 0xff } else { 0 };
    cpu.set::<1>(0, value);
    Outcome::Continue
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    if operands.mode.is_64() {
        return None;
    }
    let immediate = |op: &mut Op| op.immediate = operands.instruction.immediate(0);
    Some(match operands.instruction.mnemonic() {
        Mnemonic::Daa => packed::<false>,
        Mnemonic::Das => packed::<true>,
        Mnemonic::Aaa => unpacked::<false>,
        Mnemonic::Aas => unpacked::<true>,
        Mnemonic::Aam => {
            immediate(op);
            after_multiply
        }
        Mnemonic::Aad => {
            immediate(op);
            before_divide
        }
        Mnemonic::Bound if operands.size == 2 => bound::<2>,
        Mnemonic::Bound => bound::<4>,
        Mnemonic::Salc => carry_to_al,
        _ => return None,
    })
}
