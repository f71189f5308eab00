//! The interpreter: a handler for every shape of every instruction.
//!
//! | room | holds |
//! | --- | --- |
//! | [`arithmetic`] | the host's instructions, flags included |
//! | [`operand`] | registers and addresses |
//! | [`mod@select`] | the shape of an instruction, and tables of handlers |
//! | the others | handlers, each group with a `select` that finds the right one |

/// The value, or the handler's return with the fault.
macro_rules! attempt {
    ($cpu:expr, $result:expr) => {
        match $result {
            Ok(value) => value,
            Err(faulted) => return $cpu.outcome(faulted),
        }
    };
}

mod alu;
pub mod arithmetic;
mod bases;
mod bits;
pub mod branch;
pub mod compare;
mod decimal;
mod far;
pub mod float;
mod locked;
mod moves;
pub mod operand;
mod ports;
mod privileged;
pub mod select;
pub mod stack;
mod string;
mod syscall;
mod tables;
mod vectors;
pub mod xsave;

use iced_x86::{Instruction, Mnemonic, Register};

use crate::block::Mode;
use crate::cpu::{Cpu, segment};
use crate::op::{Handler, Op, Outcome};
use select::Operands;

/// #UD.
pub extern "C" fn undefined(cpu: &mut Cpu, _: &Op) -> Outcome {
    let faulted = cpu.undefined();
    cpu.outcome(faulted)
}

/// The handler of an instruction; completes `op`. `rip` is the block's.
pub fn select(operands: &Operands<'_>, op: &mut Op, rip: u64) -> Option<Handler> {
    alu::select(operands, op)
        .or_else(|| moves::select(operands, op))
        .or_else(|| stack::select(operands, op))
        .or_else(|| branch::select(operands, op, rip))
        .or_else(|| bits::select(operands, op))
        .or_else(|| locked::select(operands))
        .or_else(|| string::select(operands, op))
        .or_else(|| syscall::select(operands, op))
        .or_else(|| bases::select(operands, op))
        .or_else(|| privileged::select(operands, op))
        .or_else(|| tables::select(operands, op))
        .or_else(|| ports::select(operands, op))
        .or_else(|| far::select(operands, op))
        .or_else(|| float::select(operands, op))
        .or_else(|| decimal::select(operands, op))
        .or_else(|| vectors::select(operands, op))
        .or_else(|| xsave::select(operands))
}

/// Whether nothing may follow the instruction in its block, though control goes
/// on behind it: it changes what following instructions mean, or when
/// interrupts are taken, or the environment sees the count of instructions.
pub fn ends_block(instruction: &Instruction) -> bool {
    use Mnemonic::*;
    if branch::ends_block(instruction) {
        return true;
    }
    match instruction.mnemonic() {
        Sti | Popf | Popfd | Popfq | Hlt | Wrmsr | Invlpg | Lmsw | Clts | Cpuid | Wbinvd | Invd
        | Rdtsc | Rdtscp | Rdmsr | In | Out | Insb | Insw | Insd | Outsb | Outsw | Outsd
        | Pause => true,
        Mov => {
            let registers = [instruction.op0_register(), instruction.op1_register()];
            registers
                .iter()
                .any(|register| register.is_cr() || register.is_dr())
                || registers[0] == Register::SS
        }
        Pop => instruction.op0_register() == Register::SS,
        _ => false,
    }
}

/// The number of a segment register.
pub fn segment_index(register: Register) -> Option<u8> {
    Some(match register {
        Register::FS => segment::FS,
        Register::GS => segment::GS,
        Register::CS => segment::CS,
        Register::DS => segment::DS,
        Register::ES => segment::ES,
        Register::SS => segment::SS,
        _ => return None,
    } as u8)
}

/// The segment of a memory operand: in 64-bit code only FS and GS count.
pub fn operand_segment(instruction: &Instruction, mode: Mode) -> u8 {
    let named = segment_index(instruction.memory_segment()).unwrap_or(0);
    if mode.is_64() && usize::from(named) > segment::GS {
        segment::NONE as u8
    } else {
        named
    }
}
