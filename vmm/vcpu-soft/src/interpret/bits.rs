//! Shifts, rotations, single bits, multiplication and division.

use std::arch::asm;

use iced_x86::{Mnemonic, OpKind};

use super::arithmetic::{self, bit, shift, wide};
use super::operand::sign_extended;
use super::select::{Operands, Shape, sized, sized_wide};
use crate::cpu::{Cpu, register, vector};
use crate::flags;
use crate::op::{Handler, Op, Outcome};

const RAX: u8 = register::RAX as u8;
const RDX: u8 = register::RDX as u8;

/// The count of a shift: an immediate, or CL.
#[inline(always)]
fn count<const BY_CL: bool>(cpu: &Cpu, op: &Op) -> u64 {
    if BY_CL {
        cpu.registers[register::RCX]
    } else {
        op.immediate
    }
}

extern "C" fn shift_register<const OPERATION: u8, const SIZE: usize, const BY_CL: bool>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let a = cpu.get::<SIZE>(op.destination);
    let count = count::<BY_CL>(cpu, op);
    let result = arithmetic::shifted::<OPERATION, SIZE>(a, count, &mut cpu.flags);
    cpu.set::<SIZE>(op.destination, result);
    Outcome::Continue
}

extern "C" fn shift_memory<const OPERATION: u8, const SIZE: usize, const BY_CL: bool>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let address = cpu.address(op);
    let count = count::<BY_CL>(cpu, op);
    attempt!(cpu, cpu.pointer::<SIZE>(address));
    let a = attempt!(cpu, cpu.load::<SIZE>(address));
    let mut flags = cpu.flags;
    let result = arithmetic::shifted::<OPERATION, SIZE>(a, count, &mut flags);
    attempt!(cpu, cpu.store::<SIZE>(address, result));
    cpu.flags = flags;
    Outcome::Continue
}

extern "C" fn double_shift_register<const RIGHT: bool, const SIZE: usize, const BY_CL: bool>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let a = cpu.get::<SIZE>(op.destination);
    let b = cpu.get::<SIZE>(op.source);
    let count = count::<BY_CL>(cpu, op);
    let result = arithmetic::double_shifted::<RIGHT, SIZE>(a, b, count, &mut cpu.flags);
    cpu.set::<SIZE>(op.destination, result);
    Outcome::Continue
}

extern "C" fn double_shift_memory<const RIGHT: bool, const SIZE: usize, const BY_CL: bool>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let address = cpu.address(op);
    let b = cpu.get::<SIZE>(op.source);
    let count = count::<BY_CL>(cpu, op);
    attempt!(cpu, cpu.pointer::<SIZE>(address));
    let a = attempt!(cpu, cpu.load::<SIZE>(address));
    let mut flags = cpu.flags;
    let result = arithmetic::double_shifted::<RIGHT, SIZE>(a, b, count, &mut flags);
    attempt!(cpu, cpu.store::<SIZE>(address, result));
    cpu.flags = flags;
    Outcome::Continue
}

/// The bit's number: a register, or an immediate.
#[inline(always)]
fn bit_number<const SIZE: usize, const IMMEDIATE: bool>(cpu: &Cpu, op: &Op) -> u64 {
    if IMMEDIATE {
        op.immediate
    } else {
        cpu.get::<SIZE>(op.source)
    }
}

extern "C" fn bit_register<const OPERATION: u8, const SIZE: usize, const IMMEDIATE: bool>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let a = cpu.get::<SIZE>(op.destination);
    let b = bit_number::<SIZE, IMMEDIATE>(cpu, op);
    let result = arithmetic::bit_register::<OPERATION, SIZE>(a, b, &mut cpu.flags);
    if OPERATION != bit::TEST {
        cpu.set::<SIZE>(op.destination, result);
    }
    Outcome::Continue
}

/// The operand's address, and the bit's number in it: with a register, the
/// number reaches over all of memory.
#[inline(always)]
fn bit_place<const SIZE: usize, const IMMEDIATE: bool>(cpu: &Cpu, op: &Op) -> (u64, u64) {
    let number = bit_number::<SIZE, IMMEDIATE>(cpu, op);
    let address = cpu.address(op);
    let bits = 8 * SIZE as u64;
    if IMMEDIATE {
        return (address, number & (bits - 1));
    }
    let signed = sign_extended::<SIZE>(number) as i64;
    let words = signed.div_euclid(bits as i64);
    let address = address.wrapping_add((words as u64).wrapping_mul(SIZE as u64));
    (cpu.wrapped(address), number & (bits - 1))
}

extern "C" fn bit_memory<
    const OPERATION: u8,
    const SIZE: usize,
    const IMMEDIATE: bool,
    const LOCK: bool,
>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let (address, number) = bit_place::<SIZE, IMMEDIATE>(cpu, op);
    if OPERATION == bit::TEST {
        let a = attempt!(cpu, cpu.load::<SIZE>(address));
        arithmetic::bit_register::<OPERATION, SIZE>(a, number, &mut cpu.flags);
        return Outcome::Continue;
    }
    // SAFETY: `modify` gives a pointer to SIZE bytes that may be written.
    let work = |pointer, flags: &mut u64| unsafe {
        arithmetic::bit_memory::<OPERATION, SIZE, LOCK>(pointer, number, flags);
    };
    attempt!(cpu, cpu.modify::<SIZE, LOCK>(address, work));
    Outcome::Continue
}

extern "C" fn scan<const REVERSE: bool, const SIZE: usize, const MEMORY: bool>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let b = if MEMORY {
        attempt!(cpu, cpu.load::<SIZE>(cpu.address(op)))
    } else {
        cpu.get::<SIZE>(op.source)
    };
    // The whole register: where no bit is set the host leaves it as it is.
    let a = cpu.register(op.destination);
    let result = arithmetic::bit_scan::<REVERSE, SIZE>(a, b, &mut cpu.flags);
    cpu.set_register(op.destination, result);
    Outcome::Continue
}

/// IMUL with two operands.
extern "C" fn multiply<const SIZE: usize, const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let b = if MEMORY {
        attempt!(cpu, cpu.load::<SIZE>(cpu.address(op)))
    } else {
        cpu.get::<SIZE>(op.source)
    };
    let a = cpu.get::<SIZE>(op.destination);
    let result = arithmetic::multiply::<SIZE>(a, b, &mut cpu.flags);
    cpu.set::<SIZE>(op.destination, result);
    Outcome::Continue
}

/// IMUL with three operands.
extern "C" fn multiply_by<const SIZE: usize, const MEMORY: bool>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let a = if MEMORY {
        attempt!(cpu, cpu.load::<SIZE>(cpu.address(op)))
    } else {
        cpu.get::<SIZE>(op.source)
    };
    let result = arithmetic::multiply::<SIZE>(a, op.immediate, &mut cpu.flags);
    cpu.set::<SIZE>(op.destination, result);
    Outcome::Continue
}

/// Whether DIV or IDIV of the accumulator pair gives a quotient that fits.
fn quotient_fits<const SIGNED: bool, const SIZE: usize>(rax: u64, rdx: u64, divisor: u64) -> bool {
    let bits = 8 * SIZE as u32;
    let (low, high) = if SIZE == 1 {
        (rax & 0xff, rax >> 8 & 0xff)
    } else {
        (
            rax & super::operand::mask::<SIZE>(),
            rdx & super::operand::mask::<SIZE>(),
        )
    };
    if divisor == 0 {
        return false;
    }
    if !SIGNED {
        return high < divisor;
    }
    let dividend = i128::from(sign_extended::<SIZE>(high) as i64) << bits | i128::from(low);
    let divisor = i128::from(sign_extended::<SIZE>(divisor) as i64);
    let Some(quotient) = dividend.checked_div(divisor) else {
        return false;
    };
    let most = 1_i128 << (bits - 1);
    -most <= quotient && quotient < most
}

/// MUL, IMUL, DIV, IDIV with one operand.
extern "C" fn accumulate<const OPERATION: u8, const SIZE: usize, const MEMORY: bool>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let operand = if MEMORY {
        attempt!(cpu, cpu.load::<SIZE>(cpu.address(op)))
    } else {
        cpu.get::<SIZE>(op.destination)
    };
    let (rax, rdx) = (cpu.registers[register::RAX], cpu.registers[register::RDX]);
    let fits = match OPERATION {
        wide::DIV => quotient_fits::<false, SIZE>(rax, rdx, operand),
        wide::IDIV => quotient_fits::<true, SIZE>(rax, rdx, operand),
        _ => true,
    };
    if !fits {
        let faulted = cpu.raise(vector::DIVIDE);
        return cpu.outcome(faulted);
    }
    // SAFETY: the quotient fits.
    let (low, high) =
        unsafe { arithmetic::accumulate::<OPERATION, SIZE>(rax, rdx, operand, &mut cpu.flags) };
    // The host worked on the whole registers, and left of them what it leaves.
    cpu.set_register(RAX, low);
    cpu.set_register(RDX, high);
    Outcome::Continue
}

fn select_shift(operands: &Operands<'_>, op: &mut Op, number: u8) -> Option<Handler> {
    let size = operands.size;
    let by_cl = operands.instruction.op1_kind() == OpKind::Register;
    macro_rules! pick {
        ($handler:ident, $by_cl:literal) => {
            match number {
                shift::ROL => sized!(size, $handler, { shift::ROL }, $by_cl),
                shift::ROR => sized!(size, $handler, { shift::ROR }, $by_cl),
                shift::RCL => sized!(size, $handler, { shift::RCL }, $by_cl),
                shift::RCR => sized!(size, $handler, { shift::RCR }, $by_cl),
                shift::SHR => sized!(size, $handler, { shift::SHR }, $by_cl),
                shift::SAR => sized!(size, $handler, { shift::SAR }, $by_cl),
                _ => sized!(size, $handler, { shift::SHL }, $by_cl),
            }
        };
    }
    if !by_cl {
        op.immediate = operands.instruction.immediate(1) & 0xff;
    }
    let memory = operands.instruction.op0_kind() == OpKind::Memory;
    Some(match (memory, by_cl) {
        (false, false) => pick!(shift_register, false),
        (false, true) => pick!(shift_register, true),
        (true, false) => pick!(shift_memory, false),
        (true, true) => pick!(shift_memory, true),
    })
}

fn select_double_shift(operands: &Operands<'_>, op: &mut Op, right: bool) -> Option<Handler> {
    let size = operands.size;
    let by_cl = operands.instruction.op2_kind() == OpKind::Register;
    if !by_cl {
        op.immediate = operands.instruction.immediate(2) & 0xff;
    }
    let memory = operands.instruction.op0_kind() == OpKind::Memory;
    macro_rules! pick {
        ($handler:ident, $by_cl:literal) => {
            if right {
                sized_wide!(size, $handler, { true }, $by_cl)
            } else {
                sized_wide!(size, $handler, { false }, $by_cl)
            }
        };
    }
    Some(match (memory, by_cl) {
        (false, false) => pick!(double_shift_register, false),
        (false, true) => pick!(double_shift_register, true),
        (true, false) => pick!(double_shift_memory, false),
        (true, true) => pick!(double_shift_memory, true),
    })
}

fn select_bit(operands: &Operands<'_>, number: u8) -> Option<Handler> {
    let size = operands.size;
    let locked = operands.instruction.has_lock_prefix();
    macro_rules! pick {
        ($handler:ident $(, $more:literal)*) => {
            match number {
                bit::TEST => sized_wide!(size, $handler, { bit::TEST } $(, $more)*),
                bit::SET => sized_wide!(size, $handler, { bit::SET } $(, $more)*),
                bit::RESET => sized_wide!(size, $handler, { bit::RESET } $(, $more)*),
                _ => sized_wide!(size, $handler, { bit::COMPLEMENT } $(, $more)*),
            }
        };
    }
    Some(match operands.shape {
        Shape::RegisterRegister => pick!(bit_register, false),
        Shape::RegisterImmediate => pick!(bit_register, true),
        Shape::MemoryRegister if locked => pick!(bit_memory, false, true),
        Shape::MemoryImmediate if locked => pick!(bit_memory, true, true),
        Shape::MemoryRegister => pick!(bit_memory, false, false),
        Shape::MemoryImmediate => pick!(bit_memory, true, false),
        _ => return None,
    })
}

fn select_scan(operands: &Operands<'_>, reverse: bool) -> Option<Handler> {
    let size = operands.size;
    Some(match (operands.shape, reverse) {
        (Shape::RegisterRegister, false) => sized_wide!(size, scan, { false }, false),
        (Shape::RegisterRegister, true) => sized_wide!(size, scan, { true }, false),
        (Shape::RegisterMemory, false) => sized_wide!(size, scan, { false }, true),
        (Shape::RegisterMemory, true) => sized_wide!(size, scan, { true }, true),
        _ => return None,
    })
}

fn select_accumulate(operands: &Operands<'_>, number: u8) -> Option<Handler> {
    let size = operands.size;
    macro_rules! pick {
        ($memory:literal) => {
            match number {
                wide::MUL => sized!(size, accumulate, { wide::MUL }, $memory),
                wide::IMUL => sized!(size, accumulate, { wide::IMUL }, $memory),
                wide::DIV => sized!(size, accumulate, { wide::DIV }, $memory),
                _ => sized!(size, accumulate, { wide::IDIV }, $memory),
            }
        };
    }
    Some(match operands.shape {
        Shape::Register => pick!(false),
        Shape::Memory => pick!(true),
        _ => return None,
    })
}

fn select_multiply(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let size = operands.size;
    let memory = operands.instruction.op1_kind() == OpKind::Memory;
    match operands.instruction.op_count() {
        1 => select_accumulate(operands, wide::IMUL),
        2 if memory => Some(sized_wide!(size, multiply, true)),
        2 => Some(sized_wide!(size, multiply, false)),
        _ => {
            op.immediate = operands.instruction.immediate(2);
            Some(if memory {
                sized_wide!(size, multiply_by, true)
            } else {
                sized_wide!(size, multiply_by, false)
            })
        }
    }
}

extern "C" fn count_ones<const SIZE: usize, const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = if MEMORY {
        attempt!(cpu, cpu.load::<SIZE>(cpu.address(op)))
    } else {
        cpu.get::<SIZE>(op.source)
    };
    cpu.set::<SIZE>(op.destination, u64::from(value.count_ones()));
    cpu.flags = if value == 0 { flags::ZF } else { 0 };
    Outcome::Continue
}

/// CRC32 of `SIZE` bytes.
extern "C" fn checksum<const SIZE: usize, const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = if MEMORY {
        attempt!(cpu, cpu.load::<SIZE>(cpu.address(op)))
    } else {
        cpu.get::<SIZE>(op.source)
    };
    let mut sum = cpu.register(op.destination);
    // SAFETY: the host has SSE4.2, or the model would not offer the instruction.
    unsafe {
        match SIZE {
            1 => {
                asm!("crc32 {0:e}, {1}", inout(reg) sum, in(reg_byte) value as u8, options(pure, nomem, nostack, preserves_flags))
            }
            2 => {
                asm!("crc32 {0:e}, {1:x}", inout(reg) sum, in(reg) value, options(pure, nomem, nostack, preserves_flags))
            }
            4 => {
                asm!("crc32 {0:e}, {1:e}", inout(reg) sum, in(reg) value, options(pure, nomem, nostack, preserves_flags))
            }
            _ => {
                asm!("crc32 {0}, {1}", inout(reg) sum, in(reg) value, options(pure, nomem, nostack, preserves_flags))
            }
        }
    }
    cpu.set_register(op.destination, sum);
    Outcome::Continue
}

fn select_count_ones(operands: &Operands<'_>) -> Option<Handler> {
    Some(match operands.shape {
        Shape::RegisterRegister => sized_wide!(operands.size, count_ones, false),
        Shape::RegisterMemory => sized_wide!(operands.size, count_ones, true),
        _ => return None,
    })
}

fn select_checksum(operands: &Operands<'_>) -> Option<Handler> {
    let instruction = operands.instruction;
    Some(match operands.shape {
        Shape::RegisterRegister => sized!(instruction.op1_register().size(), checksum, false),
        Shape::RegisterMemory => sized!(instruction.memory_size().size(), checksum, true),
        _ => return None,
    })
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    match operands.instruction.mnemonic() {
        Mnemonic::Rol => select_shift(operands, op, shift::ROL),
        Mnemonic::Ror => select_shift(operands, op, shift::ROR),
        Mnemonic::Rcl => select_shift(operands, op, shift::RCL),
        Mnemonic::Rcr => select_shift(operands, op, shift::RCR),
        Mnemonic::Shl | Mnemonic::Sal => select_shift(operands, op, shift::SHL),
        Mnemonic::Shr => select_shift(operands, op, shift::SHR),
        Mnemonic::Sar => select_shift(operands, op, shift::SAR),
        Mnemonic::Shld => select_double_shift(operands, op, false),
        Mnemonic::Shrd => select_double_shift(operands, op, true),
        Mnemonic::Bt => select_bit(operands, bit::TEST),
        Mnemonic::Bts => select_bit(operands, bit::SET),
        Mnemonic::Btr => select_bit(operands, bit::RESET),
        Mnemonic::Btc => select_bit(operands, bit::COMPLEMENT),
        Mnemonic::Bsf => select_scan(operands, false),
        Mnemonic::Bsr => select_scan(operands, true),
        Mnemonic::Mul => select_accumulate(operands, wide::MUL),
        Mnemonic::Div => select_accumulate(operands, wide::DIV),
        Mnemonic::Idiv => select_accumulate(operands, wide::IDIV),
        Mnemonic::Imul => select_multiply(operands, op),
        Mnemonic::Popcnt if operands.is_offered() => select_count_ones(operands),
        Mnemonic::Crc32 if operands.is_offered() => select_checksum(operands),
        _ => None,
    }
}
