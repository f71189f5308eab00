//! Memory operands of a trace that lie near each other, and so share one address
//! translation.
//!
//! A window is a range of addresses relative to a value that some register had:
//! the fields of a structure, the frame of a function. Its first access checks
//! that the whole range lies on one page which the TLB knows, and keeps the
//! host address; the others use that. Where the check fails, the rest of the
//! trace runs in a second version without windows.
//!
//! Invariants:
//!
//! - All accesses of a window are in one trace, after the first, with no handler
//!   called in between: the TLB does not change meanwhile.
//! - A window is checked for writing if any access writes.

use iced_x86::{Instruction, Mnemonic, OpKind, Register};
use weft_vcpu::Access;

use super::select::{MemoryUse, Template};
use super::select::{STACK_READ, STACK_WRITE};
use super::trace::Item;

/// Windows in a trace: each has a word in `State`.
pub const WINDOWS_MAX: usize = 16;
/// Bytes in a window: the more, the likelier it crosses a page.
const SPAN_MAX: i64 = 512;

const RAX: usize = 0;
const RCX: usize = 1;
const RDX: usize = 2;
const RSP: usize = 4;
const RBP: usize = 5;

/// What the addresses of a window are relative to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// A general register of the guest.
    Register(u8),
    /// `State::code_page`.
    CodePage,
    /// A segment's base, by its index.
    Segment(u8),
}

/// One access of a window.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Index of the window.
    pub window: usize,
    /// The register to compute the window's address from, and the distance of
    /// the window's start from it.
    pub base: Base,
    pub start: i32,
    /// Distance of the operand from the window's start.
    pub distance: i32,
    /// Of the operand, as in [`MemoryUse`].
    pub alignment: u8,
}

/// A range of addresses.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    symbol: u32,
    low: i64,
    high: i64,
    members: usize,
    write: bool,
}

impl Window {
    /// What its check is for.
    pub fn operand(&self) -> MemoryUse {
        MemoryUse {
            size: (self.high - self.low) as u16,
            access: if self.write {
                Access::Write
            } else {
                Access::Read
            },
            alignment: 1,
        }
    }
}

/// The windows of a trace.
#[derive(Debug, Default)]
pub struct Windows {
    /// By index.
    pub all: Vec<Window>,
    /// The access of each instruction that has one.
    pub members: Vec<Option<Member>>,
}

/// A value that is not known, and a distance from it.
#[derive(Clone, Copy, Debug)]
struct Value {
    symbol: u32,
    distance: i64,
}

struct Reference {
    base: Base,
    /// Of the base from its symbol.
    base_distance: i64,
    /// Of the operand.
    value: Value,
    operand: MemoryUse,
}

struct Finder {
    registers: [Value; 16],
    /// Of the bases that are no registers: code page, then segments.
    others: [u32; 9],
    next: u32,
}

impl Windows {
    /// Finds the windows of a trace.
    pub fn of(items: &[Item<'_>]) -> Self {
        let mut finder = Finder::new();
        let mut found = Self::default();
        let mut accesses = Vec::with_capacity(items.len());
        for item in items {
            let access = finder.access(item);
            accesses.push(access.and_then(|access| {
                let window = found.put(&access)?;
                Some((window, access))
            }));
            finder.step(item);
        }
        found.members = (accesses.into_iter())
            .map(|access| found.member(access?))
            .collect();
        found
    }

    /// Whether no two accesses are near each other.
    pub fn is_empty(&self) -> bool {
        self.members.iter().all(Option::is_none)
    }

    fn put(&mut self, access: &Reference) -> Option<usize> {
        let low = access.value.distance;
        let high = low + i64::from(access.operand.size);
        let write = access.operand.access == Access::Write;
        let known = (self.all.iter_mut().enumerate().rev())
            .find(|(_, window)| window.symbol == access.value.symbol);
        if let Some((index, window)) = known {
            let (low, high) = (window.low.min(low), window.high.max(high));
            if high - low <= SPAN_MAX {
                (window.low, window.high) = (low, high);
                window.members += 1;
                window.write |= write;
                return Some(index);
            }
        }
        if self.all.len() == WINDOWS_MAX {
            return None;
        }
        self.all.push(Window {
            symbol: access.value.symbol,
            low,
            high,
            members: 1,
            write,
        });
        Some(self.all.len() - 1)
    }

    fn member(&self, (index, access): (usize, Reference)) -> Option<Member> {
        let window = &self.all[index];
        if window.members < 2 {
            return None;
        }
        Some(Member {
            window: index,
            base: access.base,
            start: i32::try_from(window.low - access.base_distance).ok()?,
            distance: (access.value.distance - window.low) as i32,
            alignment: access.operand.alignment,
        })
    }
}

impl Finder {
    fn new() -> Self {
        Self {
            registers: std::array::from_fn(|register| Value {
                symbol: register as u32,
                distance: 0,
            }),
            others: std::array::from_fn(|other| 16 + other as u32),
            next: 32,
        }
    }

    fn fresh(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// The instruction's access, if it is at a constant distance from a base.
    fn access(&self, item: &Item<'_>) -> Option<Reference> {
        let stack = |distance: i64, operand| {
            let value = self.registers[RSP];
            Some(Reference {
                base: Base::Register(RSP as u8),
                base_distance: value.distance,
                value: Value {
                    distance: value.distance + distance,
                    ..value
                },
                operand,
            })
        };
        match item.template {
            Template::Memory { operand, .. } => self.operand(&item.instruction, operand),
            Template::PushRegister(_)
            | Template::PushConstant(_)
            | Template::Call
            | Template::CallRegister(_) => stack(-8, STACK_WRITE),
            Template::Pop(_) | Template::Return(_) => stack(0, STACK_READ),
            Template::Leave => Some(Reference {
                base: Base::Register(RBP as u8),
                base_distance: self.registers[RBP].distance,
                value: self.registers[RBP],
                operand: STACK_READ,
            }),
            _ => None,
        }
    }

    fn operand(&self, instruction: &Instruction, operand: MemoryUse) -> Option<Reference> {
        if instruction.memory_index() != Register::None {
            return None;
        }
        let segment = match instruction.memory_segment() {
            Register::FS => 1,
            Register::GS => 2,
            _ => 0,
        };
        let displacement = instruction.memory_displacement64() as i64;
        let (base, value) = if instruction.is_ip_rel_memory_operand() {
            (Base::CodePage, self.others[0])
        } else if segment != 0 && instruction.memory_base() == Register::None {
            (Base::Segment(segment), self.others[usize::from(segment)])
        } else {
            let base = instruction.memory_base();
            if !base.is_gpr64() || segment != 0 {
                return None;
            }
            let value = self.registers[base.number()];
            return Some(Reference {
                base: Base::Register(base.number() as u8),
                base_distance: value.distance,
                value: Value {
                    distance: value.distance + i64::from(displacement as i32),
                    ..value
                },
                operand,
            });
        };
        i32::try_from(displacement).ok()?;
        (segment == 0 || base != Base::CodePage).then_some(Reference {
            base,
            base_distance: 0,
            value: Value {
                symbol: value,
                distance: displacement,
            },
            operand,
        })
    }

    /// What registers hold after the instruction.
    fn step(&mut self, item: &Item<'_>) {
        let instruction = &item.instruction;
        match item.template {
            Template::Handler => {
                for register in 0..16 {
                    self.forget(register);
                }
                for other in 0..self.others.len() {
                    self.others[other] = self.fresh();
                }
                return;
            }
            Template::PushRegister(_)
            | Template::PushConstant(_)
            | Template::PushMemory
            | Template::Call
            | Template::CallRegister(_)
            | Template::CallMemory => return self.add(RSP, -8),
            Template::Pop(register) => {
                self.add(RSP, 8);
                return self.forget(register.into());
            }
            Template::Return(extra) => return self.add(RSP, 8 + i64::from(extra)),
            Template::Leave => {
                self.registers[RSP] = self.registers[RBP];
                self.add(RSP, 8);
                return self.forget(RBP);
            }
            _ => {}
        }
        if !self.follow(instruction) {
            self.forget_written(instruction);
        }
    }

    /// The few instructions whose result is at a known distance from something.
    fn follow(&mut self, instruction: &Instruction) -> bool {
        use Mnemonic::*;
        if instruction.op0_kind() != OpKind::Register || !instruction.op0_register().is_gpr64() {
            return false;
        }
        let to = instruction.op0_register().number();
        let constant = || {
            instruction
                .try_immediate(1)
                .ok()
                .and_then(|value| i32::try_from(value as i64).ok())
                .map(i64::from)
        };
        match (instruction.mnemonic(), instruction.op1_kind()) {
            (Inc, _) => self.add(to, 1),
            (Dec, _) => self.add(to, -1),
            (Add, kind) if kind != OpKind::Register && kind != OpKind::Memory => match constant() {
                Some(value) => self.add(to, value),
                None => return false,
            },
            (Sub, kind) if kind != OpKind::Register && kind != OpKind::Memory => match constant() {
                Some(value) => self.add(to, -value),
                None => return false,
            },
            (Mov, OpKind::Register) if instruction.op1_register().is_gpr64() => {
                self.registers[to] = self.registers[instruction.op1_register().number()];
            }
            (Lea, _) => {
                let base = instruction.memory_base();
                let plain = base.is_gpr64() && instruction.memory_index() == Register::None;
                if !plain {
                    return false;
                }
                self.registers[to] = self.registers[base.number()];
                self.add(to, i64::from(instruction.memory_displacement64() as i32));
            }
            _ => return false,
        }
        true
    }

    fn forget_written(&mut self, instruction: &Instruction) {
        use Mnemonic::*;
        for operand in 0..instruction.op_count().min(2) {
            let second = operand == 1;
            if instruction.op_kind(operand) == OpKind::Register
                && instruction.op_register(operand).is_gpr()
                && (!second || matches!(instruction.mnemonic(), Xchg | Xadd))
            {
                self.forget(instruction.op_register(operand).full_register().number());
            }
        }
        match instruction.mnemonic() {
            Mul | Imul | Div | Idiv | Cmpxchg8b | Cmpxchg16b => {
                self.forget(RAX);
                self.forget(RDX);
            }
            Cmpxchg | Cbw | Cwde | Cdqe | Lahf => self.forget(RAX),
            Cwd | Cdq | Cqo => self.forget(RDX),
            Pcmpestri | Pcmpestri64 | Pcmpistri => self.forget(RCX),
            _ => {}
        }
    }

    fn add(&mut self, register: usize, distance: i64) {
        let value = &mut self.registers[register];
        value.distance = value.distance.wrapping_add(distance);
        // So that sums of distances stay far from overflow.
        if value.distance.unsigned_abs() > 1 << 40 {
            self.forget(register);
        }
    }

    fn forget(&mut self, register: usize) {
        self.registers[register] = Value {
            symbol: self.fresh(),
            distance: 0,
        };
    }
}
