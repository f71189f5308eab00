//! What the handlers' tables of one instruction look at.

use iced_x86::{Instruction, OpKind, Register};

use crate::block::Mode;
use crate::model::offers;

/// Where an instruction's explicit operands are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// None, or only implied ones.
    None,
    /// A general register.
    Register,
    /// A memory operand.
    Memory,
    Immediate,
    /// Two general registers.
    RegisterRegister,
    /// A general register, then memory.
    RegisterMemory,
    /// A general register, then an immediate.
    RegisterImmediate,
    /// Memory, then a general register.
    MemoryRegister,
    /// Memory, then an immediate.
    MemoryImmediate,
    /// Registers and memory of other kinds.
    Other,
}

/// One instruction on its way to a handler.
pub struct Operands<'instruction> {
    /// As decoded.
    pub instruction: &'instruction Instruction,
    /// For which mode.
    pub mode: Mode,
    /// Of its first two explicit operands.
    pub shape: Shape,
    /// Bytes of the first operand.
    pub size: usize,
}

impl<'instruction> Operands<'instruction> {
    /// Looks at `instruction`.
    pub fn of(instruction: &'instruction Instruction, mode: Mode) -> Self {
        let first = kind(instruction, 0);
        let second = kind(instruction, 1);
        let shape = match (first, second) {
            (Kind::None, _) => Shape::None,
            (Kind::Register, Kind::None) => Shape::Register,
            (Kind::Memory, Kind::None) => Shape::Memory,
            (Kind::Immediate, Kind::None) => Shape::Immediate,
            (Kind::Register, Kind::Register) => Shape::RegisterRegister,
            (Kind::Register, Kind::Memory) => Shape::RegisterMemory,
            (Kind::Register, Kind::Immediate) => Shape::RegisterImmediate,
            (Kind::Memory, Kind::Register) => Shape::MemoryRegister,
            (Kind::Memory, Kind::Immediate) => Shape::MemoryImmediate,
            _ => Shape::Other,
        };
        let size = match first {
            Kind::Register => instruction.op0_register().size(),
            _ => instruction.memory_size().size(),
        };
        Self {
            instruction,
            mode,
            shape,
            size,
        }
    }

    /// Whether the guest's CPU has an instruction that not every model has.
    pub fn is_offered(&self) -> bool {
        offers(self.mode.model(), self.instruction)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    None,
    Register,
    Memory,
    Immediate,
    Other,
}

fn kind(instruction: &Instruction, operand: u32) -> Kind {
    if operand >= instruction.op_count() {
        return Kind::None;
    }
    match instruction.op_kind(operand) {
        OpKind::Register if instruction.op_register(operand).is_gpr() => Kind::Register,
        OpKind::Memory => Kind::Memory,
        kind if is_immediate(kind) => Kind::Immediate,
        _ => Kind::Other,
    }
}

/// Whether an operand is in the instruction itself, and is no branch's target.
pub fn is_immediate(kind: OpKind) -> bool {
    matches!(
        kind,
        OpKind::Immediate8
            | OpKind::Immediate16
            | OpKind::Immediate32
            | OpKind::Immediate64
            | OpKind::Immediate8to16
            | OpKind::Immediate8to32
            | OpKind::Immediate8to64
            | OpKind::Immediate32to64
    )
}

/// The index of a general register: for byte registers the byte's offset in the
/// register file, for others the register's number.
pub fn index_of(register: Register) -> u8 {
    let number = number_of(register);
    if register.size() != 1 {
        return number;
    }
    match register {
        Register::AH | Register::CH | Register::DH | Register::BH => number * 8 + 1,
        _ => number * 8,
    }
}

/// The number of the whole register that `register` is part of.
pub fn number_of(register: Register) -> u8 {
    (register.full_register().number() & 15) as u8
}

/// The instantiation of a handler for a size; `SIZE` is its last parameter but
/// for the booleans that follow.
macro_rules! sized {
    ($size:expr, $handler:ident $(, { $first:expr })? $(, $more:literal)*) => {
        match $size {
            1 => $handler::<$({ $first },)? 1 $(, $more)*> as crate::op::Handler,
            2 => $handler::<$({ $first },)? 2 $(, $more)*>,
            4 => $handler::<$({ $first },)? 4 $(, $more)*>,
            _ => $handler::<$({ $first },)? 8 $(, $more)*>,
        }
    };
}

/// Like `sized`, for handlers without byte operands.
macro_rules! sized_wide {
    ($size:expr, $handler:ident $(, { $first:expr })? $(, $more:literal)*) => {
        match $size {
            2 => $handler::<$({ $first },)? 2 $(, $more)*> as crate::op::Handler,
            4 => $handler::<$({ $first },)? 4 $(, $more)*>,
            _ => $handler::<$({ $first },)? 8 $(, $more)*>,
        }
    };
}

/// The instantiation of a handler for a condition, which is its first parameter.
macro_rules! conditional {
    ($condition:expr, $handler:ident $(, $more:tt)*) => {
        match $condition {
            0 => $handler::<0 $(, $more)*> as crate::op::Handler,
            1 => $handler::<1 $(, $more)*>,
            2 => $handler::<2 $(, $more)*>,
            3 => $handler::<3 $(, $more)*>,
            4 => $handler::<4 $(, $more)*>,
            5 => $handler::<5 $(, $more)*>,
            6 => $handler::<6 $(, $more)*>,
            7 => $handler::<7 $(, $more)*>,
            8 => $handler::<8 $(, $more)*>,
            9 => $handler::<9 $(, $more)*>,
            10 => $handler::<10 $(, $more)*>,
            11 => $handler::<11 $(, $more)*>,
            12 => $handler::<12 $(, $more)*>,
            13 => $handler::<13 $(, $more)*>,
            14 => $handler::<14 $(, $more)*>,
            _ => $handler::<15 $(, $more)*>,
        }
    };
}

pub(crate) use {conditional, sized, sized_wide};
