//! MOV and its kin: what copies, extends and exchanges.

use iced_x86::{Mnemonic, OpKind};

use super::arithmetic;
use super::operand::sign_extended;
use super::select::{Operands, Shape, conditional, sized, sized_wide};
use crate::cpu::{Cpu, register};
use crate::flags;
use crate::op::{Handler, Op, Outcome};

extern "C" fn register_register<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = cpu.get::<SIZE>(op.source);
    cpu.set::<SIZE>(op.destination, value);
    Outcome::Continue
}

extern "C" fn register_immediate<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    cpu.set::<SIZE>(op.destination, op.immediate);
    Outcome::Continue
}

extern "C" fn register_memory<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = attempt!(cpu, cpu.load::<SIZE>(cpu.address(op)));
    cpu.set::<SIZE>(op.destination, value);
    Outcome::Continue
}

extern "C" fn memory_register<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = cpu.get::<SIZE>(op.source);
    attempt!(cpu, cpu.store::<SIZE>(cpu.address(op), value));
    Outcome::Continue
}

extern "C" fn memory_immediate<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.store::<SIZE>(cpu.address(op), op.immediate));
    Outcome::Continue
}

/// MOVZX, MOVSX, MOVSXD between registers.
extern "C" fn extend_register<const SIGNED: bool, const FROM: usize, const TO: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let value = cpu.get::<FROM>(op.source);
    let value = if SIGNED {
        sign_extended::<FROM>(value)
    } else {
        value
    };
    cpu.set::<TO>(op.destination, value);
    Outcome::Continue
}

/// MOVZX, MOVSX, MOVSXD from memory.
extern "C" fn extend_memory<const SIGNED: bool, const FROM: usize, const TO: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let value = attempt!(cpu, cpu.load::<FROM>(cpu.address(op)));
    let value = if SIGNED {
        sign_extended::<FROM>(value)
    } else {
        value
    };
    cpu.set::<TO>(op.destination, value);
    Outcome::Continue
}

extern "C" fn load_address<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    cpu.set::<SIZE>(op.destination, cpu.offset(op));
    Outcome::Continue
}

extern "C" fn exchange_registers<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let (a, b) = (cpu.get::<SIZE>(op.destination), cpu.get::<SIZE>(op.source));
    cpu.set::<SIZE>(op.source, a);
    cpu.set::<SIZE>(op.destination, b);
    Outcome::Continue
}

extern "C" fn exchange_memory<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = cpu.get::<SIZE>(op.source);
    let address = cpu.address(op);
    let old = attempt!(
        cpu,
        cpu.locked::<SIZE, _>(address, |pointer| {
            // SAFETY: `locked` gives a pointer to SIZE bytes that may be written.
            unsafe { arithmetic::exchange_memory::<SIZE>(pointer, value) }
        })
    );
    cpu.set::<SIZE>(op.source, old);
    Outcome::Continue
}

extern "C" fn swap_bytes<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = cpu.get::<SIZE>(op.destination);
    // Of 16 bits the manual leaves the result open; processors give zero.
    let swapped = match SIZE {
        2 => 0,
        4 => u64::from((value as u32).swap_bytes()),
        _ => value.swap_bytes(),
    };
    cpu.set::<SIZE>(op.destination, swapped);
    Outcome::Continue
}

extern "C" fn move_if_register<const CONDITION: u8, const SIZE: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let from = if flags::holds::<CONDITION>(cpu.flags) {
        op.source
    } else {
        op.destination
    };
    let value = cpu.get::<SIZE>(from);
    cpu.set::<SIZE>(op.destination, value);
    Outcome::Continue
}

extern "C" fn move_if_memory<const CONDITION: u8, const SIZE: usize>(
    cpu: &mut Cpu,
    op: &Op,
) -> Outcome {
    let mut value = attempt!(cpu, cpu.load::<SIZE>(cpu.address(op)));
    if !flags::holds::<CONDITION>(cpu.flags) {
        value = cpu.get::<SIZE>(op.destination);
    }
    cpu.set::<SIZE>(op.destination, value);
    Outcome::Continue
}

extern "C" fn set_register<const CONDITION: u8>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = u64::from(flags::holds::<CONDITION>(cpu.flags));
    cpu.set::<1>(op.destination, value);
    Outcome::Continue
}

extern "C" fn set_memory<const CONDITION: u8>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = u64::from(flags::holds::<CONDITION>(cpu.flags));
    attempt!(cpu, cpu.store::<1>(cpu.address(op), value));
    Outcome::Continue
}

/// CBW, CWDE, CDQE: the accumulator doubled in size, to `SIZE`.
extern "C" fn extend_accumulator<const SIZE: usize>(cpu: &mut Cpu, _: &Op) -> Outcome {
    let rax = cpu.registers[register::RAX];
    let value = match SIZE {
        2 => sign_extended::<1>(rax),
        4 => sign_extended::<2>(rax),
        _ => sign_extended::<4>(rax),
    };
    cpu.set::<SIZE>(register::RAX as u8, value);
    Outcome::Continue
}

/// CWD, CDQ, CQO: the accumulator's sign into RDX.
extern "C" fn extend_into_high<const SIZE: usize>(cpu: &mut Cpu, _: &Op) -> Outcome {
    let rax = sign_extended::<SIZE>(cpu.registers[register::RAX]);
    cpu.set::<SIZE>(register::RDX as u8, ((rax as i64) >> 63) as u64);
    Outcome::Continue
}

/// XLAT: `source` is the size of an address.
extern "C" fn translate(cpu: &mut Cpu, op: &Op) -> Outcome {
    let offset = cpu.registers[register::RBX].wrapping_add(cpu.registers[register::RAX] & 0xff);
    let mask = u64::MAX >> (64 - 8 * u32::from(op.source));
    let base = cpu.segment_bases[usize::from(op.segment)];
    let address = cpu.wrapped((offset & mask).wrapping_add(base));
    let value = attempt!(cpu, cpu.load::<1>(address));
    cpu.set::<1>(0, value);
    Outcome::Continue
}

/// What does nothing here: NOP, prefetches, fences (the host's order of
/// accesses is as strong as fences of loads and of stores ask).
pub extern "C" fn nothing(_: &mut Cpu, _: &Op) -> Outcome {
    Outcome::Continue
}

extern "C" fn full_fence(_: &mut Cpu, _: &Op) -> Outcome {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    Outcome::Continue
}

/// A spinning vCPU gives the host's processor to the one it waits for.
extern "C" fn pause(_: &mut Cpu, _: &Op) -> Outcome {
    std::thread::yield_now();
    Outcome::Continue
}

extern "C" fn flags_to_ah(cpu: &mut Cpu, _: &Op) -> Outcome {
    let value = flags::to_rflags(cpu.flags) & 0xd5 | 2;
    cpu.set::<1>(1, value);
    Outcome::Continue
}

extern "C" fn flags_from_ah(cpu: &mut Cpu, _: &Op) -> Outcome {
    let kept = flags::to_rflags(cpu.flags) & 0x800;
    cpu.flags = flags::from_rflags(cpu.get::<1>(1) & 0xd5 | kept);
    Outcome::Continue
}

extern "C" fn clear_carry(cpu: &mut Cpu, _: &Op) -> Outcome {
    cpu.flags &= !flags::CF;
    Outcome::Continue
}

extern "C" fn set_carry(cpu: &mut Cpu, _: &Op) -> Outcome {
    cpu.flags |= flags::CF;
    Outcome::Continue
}

extern "C" fn complement_carry(cpu: &mut Cpu, _: &Op) -> Outcome {
    cpu.flags ^= flags::CF;
    Outcome::Continue
}

fn extending(operands: &Operands<'_>, signed: bool) -> Option<Handler> {
    let instruction = operands.instruction;
    let memory = operands.shape == Shape::RegisterMemory;
    let from = if memory {
        instruction.memory_size().size()
    } else {
        instruction.op1_register().size()
    };
    macro_rules! pick {
        ($handler:ident) => {
            match (signed, from, operands.size) {
                (false, 1, 2) => $handler::<false, 1, 2> as Handler,
                (false, 1, 4) => $handler::<false, 1, 4>,
                (false, 1, 8) => $handler::<false, 1, 8>,
                (false, 2, 2) => $handler::<false, 2, 2>,
                (false, 2, 4) => $handler::<false, 2, 4>,
                (false, 2, 8) => $handler::<false, 2, 8>,
                (true, 1, 2) => $handler::<true, 1, 2>,
                (true, 1, 4) => $handler::<true, 1, 4>,
                (true, 1, 8) => $handler::<true, 1, 8>,
                (true, 2, 2) => $handler::<true, 2, 2>,
                (true, 2, 4) => $handler::<true, 2, 4>,
                (true, 2, 8) => $handler::<true, 2, 8>,
                (true, 4, 4) => $handler::<true, 4, 4>,
                (true, 4, 8) => $handler::<true, 4, 8>,
                _ => return None,
            }
        };
    }
    Some(if memory {
        pick!(extend_memory)
    } else {
        pick!(extend_register)
    })
}

fn select_mov(operands: &Operands<'_>) -> Option<Handler> {
    let size = operands.size;
    Some(match operands.shape {
        Shape::RegisterRegister => sized!(size, register_register),
        Shape::RegisterImmediate => sized!(size, register_immediate),
        Shape::RegisterMemory => sized!(size, register_memory),
        Shape::MemoryRegister => sized!(size, memory_register),
        Shape::MemoryImmediate => sized!(size, memory_immediate),
        _ => return None,
    })
}

fn select_exchange(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let size = operands.size;
    match operands.shape {
        Shape::RegisterRegister => Some(sized!(size, exchange_registers)),
        Shape::MemoryRegister => Some(sized!(size, exchange_memory)),
        Shape::RegisterMemory => {
            op.source = op.destination;
            Some(sized!(size, exchange_memory))
        }
        _ => None,
    }
}

/// CMOVcc and SETcc.
fn select_conditional(operands: &Operands<'_>) -> Option<Handler> {
    let instruction = operands.instruction;
    let condition = super::branch::condition(instruction)?;
    let is_memory = instruction.op0_kind() == OpKind::Memory;
    match (operands.shape, operands.size) {
        (Shape::Register | Shape::Memory, 1) if is_memory => {
            Some(conditional!(condition, set_memory))
        }
        (Shape::Register | Shape::Memory, 1) => Some(conditional!(condition, set_register)),
        (Shape::RegisterRegister, 2) => Some(conditional!(condition, move_if_register, 2)),
        (Shape::RegisterRegister, 4) => Some(conditional!(condition, move_if_register, 4)),
        (Shape::RegisterRegister, 8) => Some(conditional!(condition, move_if_register, 8)),
        (Shape::RegisterMemory, 2) => Some(conditional!(condition, move_if_memory, 2)),
        (Shape::RegisterMemory, 4) => Some(conditional!(condition, move_if_memory, 4)),
        (Shape::RegisterMemory, 8) => Some(conditional!(condition, move_if_memory, 8)),
        _ => None,
    }
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let size = operands.size;
    let shape = operands.shape;
    Some(match operands.instruction.mnemonic() {
        Mnemonic::Mov => return select_mov(operands),
        Mnemonic::Movnti => sized_wide!(size, memory_register),
        Mnemonic::Movzx => return extending(operands, false),
        Mnemonic::Movsx | Mnemonic::Movsxd => {
            // MOVSXD without a 64-bit operand size is a plain move.
            if shape == Shape::RegisterRegister
                && operands.instruction.op1_register().size() == size
            {
                sized!(size, register_register)
            } else {
                return extending(operands, true);
            }
        }
        Mnemonic::Lea => sized_wide!(size, load_address),
        Mnemonic::Xchg => return select_exchange(operands, op),
        Mnemonic::Bswap => sized_wide!(size, swap_bytes),
        Mnemonic::Cbw => extend_accumulator::<2>,
        Mnemonic::Cwde => extend_accumulator::<4>,
        Mnemonic::Cdqe => extend_accumulator::<8>,
        Mnemonic::Cwd => extend_into_high::<2>,
        Mnemonic::Cdq => extend_into_high::<4>,
        Mnemonic::Cqo => extend_into_high::<8>,
        Mnemonic::Xlatb => {
            op.source = operands.instruction.memory_base().size() as u8;
            op.segment = super::operand_segment(operands.instruction, operands.mode);
            translate
        }
        Mnemonic::Nop
        | Mnemonic::Endbr64
        | Mnemonic::Endbr32
        | Mnemonic::Prefetch
        | Mnemonic::Prefetchnta
        | Mnemonic::Prefetcht0
        | Mnemonic::Prefetcht1
        | Mnemonic::Prefetcht2
        | Mnemonic::Prefetchw
        | Mnemonic::Reservednop
        | Mnemonic::Lfence
        | Mnemonic::Sfence
        | Mnemonic::Clflush
        | Mnemonic::Clflushopt => nothing,
        Mnemonic::Mfence => full_fence,
        Mnemonic::Pause => pause,
        Mnemonic::Lahf => flags_to_ah,
        Mnemonic::Sahf => flags_from_ah,
        Mnemonic::Clc => clear_carry,
        Mnemonic::Stc => set_carry,
        Mnemonic::Cmc => complement_carry,
        _ => return select_conditional(operands),
    })
}
