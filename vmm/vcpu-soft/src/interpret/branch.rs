//! Near branches.
//!
//! `Op::extra` is the operand size in bytes where code is not of 64 bits: it
//! cuts the target.

use iced_x86::{Code, ConditionCode, FlowControl, Instruction, Mnemonic, OpKind};

use super::select::{Operands, Shape, conditional};
use crate::cpu::{Cpu, register};
use crate::flags;
use crate::op::{Handler, Op, Outcome};

/// The low four bits of the opcode of a conditional instruction.
pub fn condition(instruction: &Instruction) -> Option<u8> {
    Some(match instruction.condition_code() {
        ConditionCode::None => return None,
        ConditionCode::o => 0,
        ConditionCode::no => 1,
        ConditionCode::b => 2,
        ConditionCode::ae => 3,
        ConditionCode::e => 4,
        ConditionCode::ne => 5,
        ConditionCode::be => 6,
        ConditionCode::a => 7,
        ConditionCode::s => 8,
        ConditionCode::ns => 9,
        ConditionCode::p => 10,
        ConditionCode::np => 11,
        ConditionCode::l => 12,
        ConditionCode::ge => 13,
        ConditionCode::le => 14,
        ConditionCode::g => 15,
    })
}

/// A target, cut to the operand size outside 64-bit code.
#[inline(always)]
fn cut<const LONG: bool>(rip: u64, op: &Op) -> u64 {
    if LONG {
        rip
    } else if op.extra == 2 {
        rip & 0xffff
    } else {
        rip & 0xffff_ffff
    }
}

#[inline(always)]
fn take<const LONG: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    cpu.rip = cut::<LONG>(cpu.block_rip().wrapping_add(op.immediate), op);
    Outcome::Taken
}

#[inline(always)]
fn fall<const LONG: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    cpu.rip = if LONG {
        cpu.next_rip(op)
    } else {
        cpu.next_rip(op) & 0xffff_ffff
    };
    Outcome::Fallthrough
}

extern "C" fn jump_if<const CONDITION: u8, const LONG: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    if flags::holds::<CONDITION>(cpu.flags) {
        take::<LONG>(cpu, op)
    } else {
        fall::<LONG>(cpu, op)
    }
}

extern "C" fn jump<const LONG: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    take::<LONG>(cpu, op)
}

extern "C" fn jump_register(cpu: &mut Cpu, op: &Op) -> Outcome {
    cpu.rip = cpu.register(op.destination);
    Outcome::End
}

extern "C" fn jump_memory(cpu: &mut Cpu, op: &Op) -> Outcome {
    cpu.rip = attempt!(cpu, cpu.load::<8>(cpu.address(op)));
    Outcome::End
}

extern "C" fn call(cpu: &mut Cpu, op: &Op) -> Outcome {
    let back = cpu.next_rip(op);
    attempt!(cpu, cpu.push_long(back));
    take::<true>(cpu, op)
}

extern "C" fn call_register(cpu: &mut Cpu, op: &Op) -> Outcome {
    let target = cpu.register(op.destination);
    let back = cpu.next_rip(op);
    attempt!(cpu, cpu.push_long(back));
    cpu.rip = target;
    Outcome::End
}

extern "C" fn call_memory(cpu: &mut Cpu, op: &Op) -> Outcome {
    let target = attempt!(cpu, cpu.load::<8>(cpu.address(op)));
    let back = cpu.next_rip(op);
    attempt!(cpu, cpu.push_long(back));
    cpu.rip = target;
    Outcome::End
}

extern "C" fn ret(cpu: &mut Cpu, op: &Op) -> Outcome {
    let sp = cpu.registers[register::RSP];
    cpu.rip = attempt!(cpu, cpu.load::<8>(sp));
    cpu.registers[register::RSP] = sp.wrapping_add(8).wrapping_add(op.immediate);
    Outcome::End
}

/// JMP through a register or memory outside 64-bit code, or with an operand
/// size that it does not have.
extern "C" fn jump_legacy<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let target = attempt!(cpu, legacy_target::<MEMORY>(cpu, op));
    cpu.rip = cut::<false>(target, op);
    Outcome::End
}

extern "C" fn call_legacy<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let target = attempt!(cpu, legacy_target::<MEMORY>(cpu, op));
    let back = cpu.next_rip(op);
    attempt!(cpu, cpu.push(usize::from(op.extra), back));
    cpu.rip = cut::<false>(target, op);
    Outcome::End
}

fn legacy_target<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Result<u64, crate::cpu::Faulted> {
    if !MEMORY {
        return Ok(cpu.register(op.destination));
    }
    let address = cpu.address(op);
    if op.extra == 2 {
        cpu.load::<2>(address)
    } else {
        cpu.load::<4>(address)
    }
}

extern "C" fn call_direct_legacy(cpu: &mut Cpu, op: &Op) -> Outcome {
    let back = cpu.next_rip(op);
    attempt!(cpu, cpu.push(usize::from(op.extra), back));
    take::<false>(cpu, op)
}

extern "C" fn ret_legacy(cpu: &mut Cpu, op: &Op) -> Outcome {
    let target = attempt!(cpu, cpu.pop(usize::from(op.extra)));
    cpu.rip = cut::<false>(target, op);
    cpu.move_stack(op.immediate);
    Outcome::End
}

/// LOOP, LOOPE, LOOPNE, JCXZ: `source` is the size of the counter, `destination`
/// which of them.
extern "C" fn counted<const LONG: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let mask = u64::MAX >> (64 - 8 * u32::from(op.source));
    let rcx = cpu.registers[register::RCX];
    let mut count = rcx & mask;
    if op.destination != LoopKind::IfZero as u8 {
        count = count.wrapping_sub(1) & mask;
        cpu.registers[register::RCX] = match op.source {
            2 => rcx & !0xffff | count,
            _ => count,
        };
    }
    let equal = flags::holds::<4>(cpu.flags);
    let taken = match op.destination {
        0 => count != 0,
        1 => count != 0 && equal,
        2 => count != 0 && !equal,
        _ => count == 0,
    };
    if taken {
        take::<LONG>(cpu, op)
    } else {
        fall::<LONG>(cpu, op)
    }
}

/// Values of `Op::destination` for `counted`.
#[derive(Clone, Copy)]
enum LoopKind {
    Always = 0,
    IfEqual = 1,
    IfNotEqual = 2,
    IfZero = 3,
}

/// The end of a block whose last instruction is no branch.
pub extern "C" fn end_of_block(cpu: &mut Cpu, op: &Op) -> Outcome {
    let rip = cpu.block_rip().wrapping_add(u64::from(op.offset));
    cpu.rip = if cpu.mode.is_64() {
        rip
    } else {
        rip & 0xffff_ffff
    };
    Outcome::Fallthrough
}

/// Whether a block ends with this instruction because control goes elsewhere.
pub fn ends_block(instruction: &Instruction) -> bool {
    !matches!(instruction.flow_control(), FlowControl::Next)
}

/// Whether the instruction's handler is one of these, which leave the block in
/// any case: no op needs to be behind it.
pub fn never_continues(instruction: &Instruction) -> bool {
    instruction.is_jcc_short_or_near()
        || instruction.is_jmp_short_or_near()
        || instruction.is_jmp_near_indirect()
        || instruction.is_call_near()
        || instruction.is_call_near_indirect()
        || instruction.mnemonic() == Mnemonic::Ret
}

fn counted_kind(mnemonic: Mnemonic) -> Option<LoopKind> {
    Some(match mnemonic {
        Mnemonic::Loop => LoopKind::Always,
        Mnemonic::Loope => LoopKind::IfEqual,
        Mnemonic::Loopne => LoopKind::IfNotEqual,
        Mnemonic::Jcxz | Mnemonic::Jecxz | Mnemonic::Jrcxz => LoopKind::IfZero,
        _ => return None,
    })
}

/// The size of the counter of LOOP and JCXZ: the address size, not the operand's.
fn counter_size(instruction: &Instruction) -> u8 {
    instruction
        .op_code()
        .address_size()
        .try_into()
        .map(|bits: u8| bits / 8)
        .unwrap_or(8)
}

fn is_direct(instruction: &Instruction) -> bool {
    matches!(
        instruction.op0_kind(),
        OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
    )
}

/// The handler of an instruction of this group; `rip` is the block's.
pub fn select(operands: &Operands<'_>, op: &mut Op, rip: u64) -> Option<Handler> {
    let instruction = operands.instruction;
    let long = operands.mode.is_64();
    if is_direct(instruction) {
        op.immediate = instruction.near_branch_target().wrapping_sub(rip);
        op.extra = match instruction.op0_kind() {
            OpKind::NearBranch16 => 2,
            OpKind::NearBranch32 => 4,
            _ => 8,
        };
        // An operand-size prefix on a branch of 64-bit code: Intel ignores it,
        // AMD cuts the target; nobody writes it.
        if long && op.extra != 8 {
            return None;
        }
    }
    if let Some(kind) = counted_kind(instruction.mnemonic()) {
        op.destination = kind as u8;
        op.source = counter_size(instruction);
        return Some(if long {
            counted::<true>
        } else {
            counted::<false>
        });
    }
    match instruction.mnemonic() {
        Mnemonic::Jmp | Mnemonic::Call if is_direct(instruction) => {
            let call_it = instruction.mnemonic() == Mnemonic::Call;
            Some(match (call_it, long) {
                (false, true) => jump::<true>,
                (false, false) => jump::<false>,
                (true, true) => call,
                (true, false) => call_direct_legacy,
            })
        }
        Mnemonic::Jmp | Mnemonic::Call => select_indirect(operands, op),
        Mnemonic::Ret => {
            op.immediate = if instruction.op_count() == 1 {
                instruction.immediate(0) & 0xffff
            } else {
                0
            };
            op.extra = match instruction.code() {
                Code::Retnw | Code::Retnw_imm16 => 2,
                Code::Retnd | Code::Retnd_imm16 => 4,
                _ => 8,
            };
            Some(if op.extra == 8 { ret } else { ret_legacy })
        }
        _ => {
            let condition = condition(instruction)?;
            if !is_direct(instruction) {
                return None;
            }
            Some(if long {
                conditional!(condition, jump_if, true)
            } else {
                conditional!(condition, jump_if, false)
            })
        }
    }
}

fn select_indirect(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let call_it = operands.instruction.mnemonic() == Mnemonic::Call;
    op.extra = operands.size as u8;
    Some(match (operands.shape, operands.size, call_it) {
        (Shape::Register, 8, false) => jump_register,
        (Shape::Register, 8, true) => call_register,
        (Shape::Memory, 8, false) if is_near(operands) => jump_memory,
        (Shape::Memory, 8, true) if is_near(operands) => call_memory,
        (Shape::Register, 2 | 4, false) => jump_legacy::<false>,
        (Shape::Register, 2 | 4, true) => call_legacy::<false>,
        (Shape::Memory, 2 | 4, false) if is_near(operands) => jump_legacy::<true>,
        (Shape::Memory, 2 | 4, true) if is_near(operands) => call_legacy::<true>,
        _ => return None,
    })
}

fn is_near(operands: &Operands<'_>) -> bool {
    operands.instruction.is_jmp_near_indirect() || operands.instruction.is_call_near_indirect()
}
