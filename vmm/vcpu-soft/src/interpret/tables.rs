//! Descriptor tables and segment registers.

use iced_x86::{Mnemonic, OpKind};
use weft_vcpu::DescriptorTable;

use super::select::{Operands, Shape};
use crate::access::is_canonical;
use crate::cpu::{Cpu, Faulted, segment};
use crate::flags;
use crate::op::{Handler, Op, Outcome};
use crate::segments::{Descriptor, rights};

/// A table register in memory: limit, then the base of `extra` bytes.
fn load_table(cpu: &mut Cpu, op: &Op) -> Result<DescriptorTable, Faulted> {
    cpu.privileged()?;
    let address = cpu.address(op);
    let limit = cpu.load::<2>(address)? as u16;
    let place = cpu.wrapped(address.wrapping_add(2));
    let base = match op.extra {
        8 => cpu.load::<8>(place)?,
        // With a 16-bit operand size only 24 bits count.
        2 => cpu.load::<4>(place)? & 0xff_ffff,
        _ => cpu.load::<4>(place)?,
    };
    if !is_canonical(base) {
        return Err(cpu.general_protection(0));
    }
    Ok(DescriptorTable { base, limit })
}

extern "C" fn load_global(cpu: &mut Cpu, op: &Op) -> Outcome {
    cpu.gdtr = attempt!(cpu, load_table(cpu, op));
    Outcome::Continue
}

extern "C" fn load_interrupt(cpu: &mut Cpu, op: &Op) -> Outcome {
    cpu.idtr = attempt!(cpu, load_table(cpu, op));
    Outcome::Continue
}

fn store_table(cpu: &mut Cpu, op: &Op, table: DescriptorTable) -> Outcome {
    attempt!(cpu, cpu.privileged_by_umip());
    let address = cpu.address(op);
    let place = cpu.wrapped(address.wrapping_add(2));
    attempt!(cpu, cpu.store::<2>(address, u64::from(table.limit)));
    if op.extra == 8 {
        attempt!(cpu, cpu.store::<8>(place, table.base));
    } else {
        attempt!(cpu, cpu.store::<4>(place, table.base));
    }
    Outcome::Continue
}

extern "C" fn store_global(cpu: &mut Cpu, op: &Op) -> Outcome {
    store_table(cpu, op, cpu.gdtr)
}

extern "C" fn store_interrupt(cpu: &mut Cpu, op: &Op) -> Outcome {
    store_table(cpu, op, cpu.idtr)
}

/// A selector operand: memory, or a register.
fn selector<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Result<u16, Faulted> {
    if MEMORY {
        Ok(cpu.load::<2>(cpu.address(op))? as u16)
    } else {
        Ok(cpu.register(op.source) as u16)
    }
}

extern "C" fn load_local<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    let value = attempt!(cpu, selector::<MEMORY>(cpu, op));
    attempt!(cpu, cpu.load_local_table(value));
    Outcome::Continue
}

extern "C" fn load_task<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    let value = attempt!(cpu, selector::<MEMORY>(cpu, op));
    attempt!(cpu, cpu.load_task(value));
    Outcome::Continue
}

fn give_selector(cpu: &mut Cpu, op: &Op, memory: bool, value: u16) -> Outcome {
    let value = u64::from(value);
    if memory {
        attempt!(cpu, cpu.store::<2>(cpu.address(op), value));
        return Outcome::Continue;
    }
    match op.extra {
        2 => cpu.set::<2>(op.destination, value),
        _ => cpu.set::<8>(op.destination, value),
    }
    Outcome::Continue
}

extern "C" fn store_local<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged_by_umip());
    give_selector(cpu, op, MEMORY, cpu.ldtr.selector)
}

extern "C" fn store_task<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged_by_umip());
    give_selector(cpu, op, MEMORY, cpu.tr.selector)
}

/// MOV from a segment register, whose number is `immediate`.
extern "C" fn read_segment<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let which = op.immediate as usize;
    give_selector(cpu, op, MEMORY, cpu.segments[which].selector)
}

/// MOV to a segment register.
extern "C" fn write_segment<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = attempt!(cpu, selector::<MEMORY>(cpu, op));
    let which = op.immediate as usize;
    attempt!(cpu, cpu.load_segment(which, value));
    if which == segment::SS {
        return cpu.begin_shadow(op, true);
    }
    Outcome::Continue
}

/// LDS, LES, LFS, LGS, LSS: an offset of `extra` bytes, then a selector.
extern "C" fn load_far_pointer(cpu: &mut Cpu, op: &Op) -> Outcome {
    let address = cpu.address(op);
    let size = u64::from(op.extra);
    let offset = match op.extra {
        2 => cpu.load::<2>(address),
        4 => cpu.load::<4>(address),
        _ => cpu.load::<8>(address),
    };
    let offset = attempt!(cpu, offset);
    let place = cpu.wrapped(address.wrapping_add(size));
    let value = attempt!(cpu, cpu.load::<2>(place)) as u16;
    attempt!(cpu, cpu.load_segment(op.immediate as usize, value));
    match op.extra {
        2 => cpu.set::<2>(op.destination, offset),
        4 => cpu.set::<4>(op.destination, offset),
        _ => cpu.set::<8>(op.destination, offset),
    }
    Outcome::Continue
}

/// Whether a program at the current level may look at a descriptor.
fn visible(cpu: &Cpu, selector: u16, descriptor: &Descriptor) -> bool {
    let conforming = descriptor.is_code() && descriptor.has(rights::DOWN_OR_CONFORMING);
    let level = cpu.cpl.max((selector & 3) as u8);
    conforming || descriptor.privilege() >= level
}

fn inspected(cpu: &mut Cpu, selector: u16) -> Result<Option<Descriptor>, Faulted> {
    if selector & !3 == 0 {
        return Ok(None);
    }
    let descriptor = cpu.find_descriptor(selector)?;
    Ok(descriptor.filter(|descriptor| visible(cpu, selector, descriptor)))
}

fn set_zero_flag(cpu: &mut Cpu, value: bool) {
    if value {
        cpu.flags |= flags::ZF;
    } else {
        cpu.flags &= !flags::ZF;
    }
}

/// VERW where `WRITE`, else VERR.
extern "C" fn verify<const MEMORY: bool, const WRITE: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = if MEMORY {
        attempt!(cpu, cpu.load::<2>(cpu.address(op))) as u16
    } else {
        cpu.register(op.destination) as u16
    };
    let found = attempt!(cpu, inspected(cpu, value));
    let fine = found.is_some_and(|descriptor| {
        let able = descriptor.has(rights::READABLE_OR_WRITABLE);
        descriptor.has(rights::ORDINARY)
            && if WRITE {
                able && !descriptor.is_code()
            } else {
                able || !descriptor.is_code()
            }
    });
    set_zero_flag(cpu, fine);
    Outcome::Continue
}

/// LSL where `LIMIT`, else LAR.
extern "C" fn inspect<const MEMORY: bool, const LIMIT: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = attempt!(cpu, selector::<MEMORY>(cpu, op));
    let found = attempt!(cpu, inspected(cpu, value));
    let found = found.filter(|descriptor| {
        let kind = descriptor.rights & rights::TYPE;
        let system = if LIMIT {
            matches!(kind, 1 | 2 | 3 | 9 | 11)
        } else {
            matches!(kind, 1..=5 | 9 | 11 | 12)
        };
        descriptor.has(rights::ORDINARY) || system
    });
    set_zero_flag(cpu, found.is_some());
    if let Some(descriptor) = found {
        let result = if LIMIT {
            u64::from(descriptor.limit)
        } else {
            u64::from(descriptor.rights) << 8
        };
        match op.extra {
            2 => cpu.set::<2>(op.destination, result),
            _ => cpu.set::<8>(op.destination, result),
        }
    }
    Outcome::Continue
}

fn segment_move(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let instruction = operands.instruction;
    let to = super::segment_index(instruction.op0_register());
    if let Some(which) = to.filter(|_| instruction.op0_kind() == OpKind::Register) {
        if usize::from(which) == segment::CS {
            return None;
        }
        op.immediate = u64::from(which);
        return Some(if instruction.op1_kind() == OpKind::Memory {
            write_segment::<true>
        } else {
            write_segment::<false>
        });
    }
    op.immediate = u64::from(super::segment_index(instruction.op1_register())?);
    op.extra = operands.size as u8;
    Some(if instruction.op0_kind() == OpKind::Memory {
        read_segment::<true>
    } else {
        read_segment::<false>
    })
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let instruction = operands.instruction;
    let memory = operands.shape == Shape::Memory;
    let second_memory = operands.shape == Shape::RegisterMemory;
    op.extra = match instruction.mnemonic() {
        Mnemonic::Lgdt | Mnemonic::Lidt | Mnemonic::Sgdt | Mnemonic::Sidt => {
            if operands.mode.is_64() {
                8
            } else {
                use iced_x86::Code::*;
                match instruction.code() {
                    Lgdt_m1632_16 | Lidt_m1632_16 => 2,
                    _ => 4,
                }
            }
        }
        _ => operands.size as u8,
    };
    if memory || operands.shape == Shape::Register {
        // One operand: a register read is the source, too.
        op.source = op.destination;
    }
    Some(match instruction.mnemonic() {
        Mnemonic::Mov => return segment_move(operands, op),
        Mnemonic::Lgdt => load_global,
        Mnemonic::Lidt => load_interrupt,
        Mnemonic::Sgdt => store_global,
        Mnemonic::Sidt => store_interrupt,
        Mnemonic::Lldt if memory => load_local::<true>,
        Mnemonic::Lldt => load_local::<false>,
        Mnemonic::Ltr if memory => load_task::<true>,
        Mnemonic::Ltr => load_task::<false>,
        Mnemonic::Sldt if memory => store_local::<true>,
        Mnemonic::Sldt => store_local::<false>,
        Mnemonic::Str if memory => store_task::<true>,
        Mnemonic::Str => store_task::<false>,
        Mnemonic::Verr if memory => verify::<true, false>,
        Mnemonic::Verr => verify::<false, false>,
        Mnemonic::Verw if memory => verify::<true, true>,
        Mnemonic::Verw => verify::<false, true>,
        Mnemonic::Lar if second_memory => inspect::<true, false>,
        Mnemonic::Lar => inspect::<false, false>,
        Mnemonic::Lsl if second_memory => inspect::<true, true>,
        Mnemonic::Lsl => inspect::<false, true>,
        Mnemonic::Lds => return far_pointer(operands, op, segment::DS),
        Mnemonic::Les => return far_pointer(operands, op, segment::ES),
        Mnemonic::Lfs => return far_pointer(operands, op, segment::FS),
        Mnemonic::Lgs => return far_pointer(operands, op, segment::GS),
        Mnemonic::Lss => return far_pointer(operands, op, segment::SS),
        _ => return None,
    })
}

fn far_pointer(operands: &Operands<'_>, op: &mut Op, which: usize) -> Option<Handler> {
    op.immediate = which as u64;
    op.extra = operands.size as u8;
    Some(load_far_pointer)
}
