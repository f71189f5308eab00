//! ADD, OR, ADC, SBB, AND, SUB, XOR, CMP, TEST; INC, DEC, NEG, NOT.

use iced_x86::Mnemonic;

use super::arithmetic::{self, operation, unary};
use super::operand::mask;
use super::select::{Operands, Shape, sized};
use crate::cpu::Cpu;
use crate::op::{Handler, Op, Outcome};

const fn writes(operation: u8) -> bool {
    operation < operation::CMP
}

extern "C" fn register_register<const OPERATION: u8, const SIZE: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let (a, b) = (cpu.get::<SIZE>(op.destination), cpu.get::<SIZE>(op.source));
    let result = arithmetic::binary::<OPERATION, SIZE>(a, b, &mut cpu.flags);
    if writes(OPERATION) {
        cpu.set::<SIZE>(op.destination, result);
    }
    Outcome::Continue
}

extern "C" fn register_immediate<const OPERATION: u8, const SIZE: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let a = cpu.get::<SIZE>(op.destination);
    let result = arithmetic::binary::<OPERATION, SIZE>(a, op.immediate, &mut cpu.flags);
    if writes(OPERATION) {
        cpu.set::<SIZE>(op.destination, result);
    }
    Outcome::Continue
}

extern "C" fn register_memory<const OPERATION: u8, const SIZE: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let b = attempt!(cpu, cpu.load::<SIZE>(cpu.address(op)));
    let a = cpu.get::<SIZE>(op.destination);
    let result = arithmetic::binary::<OPERATION, SIZE>(a, b, &mut cpu.flags);
    if writes(OPERATION) {
        cpu.set::<SIZE>(op.destination, result);
    }
    Outcome::Continue
}

/// The memory operand first; the other is a register, or `IMMEDIATE`.
extern "C" fn memory_any<
    const OPERATION: u8,
    const SIZE: usize,
    const IMMEDIATE: bool,
    const LOCK: bool,
>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let b = if IMMEDIATE {
        op.immediate
    } else {
        cpu.get::<SIZE>(op.source)
    };
    let address = cpu.address(op);
    if !writes(OPERATION) {
        let a = attempt!(cpu, cpu.load::<SIZE>(address));
        arithmetic::binary::<OPERATION, SIZE>(a, b, &mut cpu.flags);
        return Outcome::Continue;
    }
    // SAFETY: `modify` gives a pointer to SIZE bytes that may be written.
    let work = |pointer, flags: &mut u64| unsafe {
        arithmetic::binary_memory::<OPERATION, SIZE, LOCK>(pointer, b, flags);
    };
    attempt!(cpu, cpu.modify::<SIZE, LOCK>(address, work));
    Outcome::Continue
}

extern "C" fn unary_register<const OPERATION: u8, const SIZE: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let a = cpu.get::<SIZE>(op.destination);
    let result = arithmetic::unary::<OPERATION, SIZE>(a, &mut cpu.flags);
    cpu.set::<SIZE>(op.destination, result);
    Outcome::Continue
}

extern "C" fn unary_memory<const OPERATION: u8, const SIZE: usize, const LOCK: bool>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let address = cpu.address(op);
    // SAFETY: `modify` gives a pointer to SIZE bytes that may be written.
    let work = |pointer, flags: &mut u64| unsafe {
        arithmetic::unary_memory::<OPERATION, SIZE, LOCK>(pointer, flags);
    };
    attempt!(cpu, cpu.modify::<SIZE, LOCK>(address, work));
    Outcome::Continue
}

/// Every operation and size of a handler.
macro_rules! each_operation {
    ($operation:expr, $size:expr, $handler:ident $(, $more:literal)*) => {
        match $operation {
            operation::ADD => sized!($size, $handler, { operation::ADD } $(, $more)*),
            operation::OR => sized!($size, $handler, { operation::OR } $(, $more)*),
            operation::ADC => sized!($size, $handler, { operation::ADC } $(, $more)*),
            operation::SBB => sized!($size, $handler, { operation::SBB } $(, $more)*),
            operation::AND => sized!($size, $handler, { operation::AND } $(, $more)*),
            operation::SUB => sized!($size, $handler, { operation::SUB } $(, $more)*),
            operation::XOR => sized!($size, $handler, { operation::XOR } $(, $more)*),
            operation::CMP => sized!($size, $handler, { operation::CMP } $(, $more)*),
            _ => sized!($size, $handler, { operation::TEST } $(, $more)*),
        }
    };
}

macro_rules! each_unary {
    ($operation:expr, $size:expr, $handler:ident $(, $more:literal)*) => {
        match $operation {
            unary::INC => sized!($size, $handler, { unary::INC } $(, $more)*),
            unary::DEC => sized!($size, $handler, { unary::DEC } $(, $more)*),
            unary::NEG => sized!($size, $handler, { unary::NEG } $(, $more)*),
            _ => sized!($size, $handler, { unary::NOT } $(, $more)*),
        }
    };
}

fn binary_number(mnemonic: Mnemonic) -> Option<u8> {
    Some(match mnemonic {
        Mnemonic::Add => operation::ADD,
        Mnemonic::Or => operation::OR,
        Mnemonic::Adc => operation::ADC,
        Mnemonic::Sbb => operation::SBB,
        Mnemonic::And => operation::AND,
        Mnemonic::Sub => operation::SUB,
        Mnemonic::Xor => operation::XOR,
        Mnemonic::Cmp => operation::CMP,
        Mnemonic::Test => operation::TEST,
        _ => return None,
    })
}

fn unary_number(mnemonic: Mnemonic) -> Option<u8> {
    Some(match mnemonic {
        Mnemonic::Inc => unary::INC,
        Mnemonic::Dec => unary::DEC,
        Mnemonic::Neg => unary::NEG,
        Mnemonic::Not => unary::NOT,
        _ => return None,
    })
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let size = operands.size;
    let locked = operands.instruction.has_lock_prefix();
    let mnemonic = operands.instruction.mnemonic();
    if let Some(number) = unary_number(mnemonic) {
        return match operands.shape {
            Shape::Register => Some(each_unary!(number, size, unary_register)),
            Shape::Memory if locked => Some(each_unary!(number, size, unary_memory, true)),
            Shape::Memory => Some(each_unary!(number, size, unary_memory, false)),
            _ => None,
        };
    }
    let number = binary_number(mnemonic)?;
    match operands.shape {
        Shape::RegisterRegister => Some(each_operation!(number, size, register_register)),
        Shape::RegisterMemory => Some(each_operation!(number, size, register_memory)),
        Shape::RegisterImmediate => {
            op.immediate &= size_mask(size);
            Some(each_operation!(number, size, register_immediate))
        }
        Shape::MemoryRegister if locked => {
            Some(each_operation!(number, size, memory_any, false, true))
        }
        Shape::MemoryImmediate if locked => {
            op.immediate &= size_mask(size);
            Some(each_operation!(number, size, memory_any, true, true))
        }
        Shape::MemoryRegister => Some(each_operation!(number, size, memory_any, false, false)),
        Shape::MemoryImmediate => {
            op.immediate &= size_mask(size);
            Some(each_operation!(number, size, memory_any, true, false))
        }
        _ => None,
    }
}

fn size_mask(size: usize) -> u64 {
    match size {
        1 => mask::<1>(),
        2 => mask::<2>(),
        4 => mask::<4>(),
        _ => mask::<8>(),
    }
}
