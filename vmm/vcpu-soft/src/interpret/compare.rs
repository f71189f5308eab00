//! A comparison and the branch that follows it, in one handler: every seventh
//! instruction or so is such a branch, and a call of a handler costs more than
//! what most of them do.
//!
//! The op is the comparison's, with the branch in it: `length` is that of both,
//! the high half of `immediate` the distance of the branch's target, the low half
//! the comparison's immediate. The branch's own op follows, for generated code.

use iced_x86::{Instruction, Mnemonic, OpKind};

use super::arithmetic::{self, operation};
use super::branch;
use super::operand::mask;
use super::select::{Operands, Shape, conditional};
use crate::cpu::Cpu;
use crate::flags;
use crate::op::{Handler, Op, Outcome};

#[inline(always)]
fn go<const CONDITION: u8>(cpu: &mut Cpu, op: &Op) -> Outcome {
    if flags::holds::<CONDITION>(cpu.flags) {
        let distance = (op.immediate as i64 >> 32) as u64;
        cpu.rip = cpu.block_rip().wrapping_add(distance);
        Outcome::Taken
    } else {
        cpu.rip = cpu.next_rip(op);
        Outcome::Fallthrough
    }
}

#[inline(always)]
fn immediate<const SIZE: usize>(op: &Op) -> u64 {
    op.immediate as i32 as u64 & mask::<SIZE>()
}

extern "C" fn registers<const CONDITION: u8, const OPERATION: u8, const SIZE: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let (a, b) = (cpu.get::<SIZE>(op.destination), cpu.get::<SIZE>(op.source));
    arithmetic::binary::<OPERATION, SIZE>(a, b, &mut cpu.flags);
    go::<CONDITION>(cpu, op)
}

extern "C" fn register_immediate<const CONDITION: u8, const OPERATION: u8, const SIZE: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let a = cpu.get::<SIZE>(op.destination);
    arithmetic::binary::<OPERATION, SIZE>(a, immediate::<SIZE>(op), &mut cpu.flags);
    go::<CONDITION>(cpu, op)
}

extern "C" fn register_memory<const CONDITION: u8, const OPERATION: u8, const SIZE: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let b = attempt!(cpu, cpu.load::<SIZE>(cpu.address(op)));
    let a = cpu.get::<SIZE>(op.destination);
    arithmetic::binary::<OPERATION, SIZE>(a, b, &mut cpu.flags);
    go::<CONDITION>(cpu, op)
}

extern "C" fn memory_register<const CONDITION: u8, const OPERATION: u8, const SIZE: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let a = attempt!(cpu, cpu.load::<SIZE>(cpu.address(op)));
    let b = cpu.get::<SIZE>(op.source);
    arithmetic::binary::<OPERATION, SIZE>(a, b, &mut cpu.flags);
    go::<CONDITION>(cpu, op)
}

extern "C" fn memory_immediate<const CONDITION: u8, const OPERATION: u8, const SIZE: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let a = attempt!(cpu, cpu.load::<SIZE>(cpu.address(op)));
    arithmetic::binary::<OPERATION, SIZE>(a, immediate::<SIZE>(op), &mut cpu.flags);
    go::<CONDITION>(cpu, op)
}

macro_rules! each {
    ($condition:expr, $test:expr, $size:expr, $handler:ident) => {
        match ($test, $size) {
            (false, 1) => conditional!($condition, $handler, { operation::CMP }, 1),
            (false, 2) => conditional!($condition, $handler, { operation::CMP }, 2),
            (false, 4) => conditional!($condition, $handler, { operation::CMP }, 4),
            (false, _) => conditional!($condition, $handler, { operation::CMP }, 8),
            (true, 1) => conditional!($condition, $handler, { operation::TEST }, 1),
            (true, 2) => conditional!($condition, $handler, { operation::TEST }, 2),
            (true, 4) => conditional!($condition, $handler, { operation::TEST }, 4),
            (true, _) => conditional!($condition, $handler, { operation::TEST }, 8),
        }
    };
}

/// Joins a comparison, `first` with its complete op, and the instruction that
/// follows it in 64-bit code with its own, where there is a handler for both.
pub fn join(first: &Operands<'_>, op: &mut Op, second: &Instruction, jump: &Op) {
    let test = match first.instruction.mnemonic() {
        Mnemonic::Cmp => false,
        Mnemonic::Test => true,
        _ => return,
    };
    let is_jump = second.is_jcc_short_or_near() && second.op0_kind() == OpKind::NearBranch64;
    let (true, Some(condition)) = (is_jump, branch::condition(second)) else {
        return;
    };
    let Ok(distance) = i32::try_from(jump.immediate as i64) else {
        return;
    };
    let size = first.size;
    let handler: Handler = match first.shape {
        Shape::RegisterRegister => each!(condition, test, size, registers),
        Shape::RegisterImmediate => each!(condition, test, size, register_immediate),
        Shape::RegisterMemory => each!(condition, test, size, register_memory),
        Shape::MemoryRegister => each!(condition, test, size, memory_register),
        Shape::MemoryImmediate => each!(condition, test, size, memory_immediate),
        _ => return,
    };
    op.handler = handler;
    op.immediate = u64::from(op.immediate as u32) | (distance as u32 as u64) << 32;
    op.length += jump.length;
}
