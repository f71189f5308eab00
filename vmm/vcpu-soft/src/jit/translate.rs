//! From a trace of decoded instructions to code: the order of things, flags,
//! handlers. Templates are in [`templates`] and [`control`].

mod addresses;
mod control;
mod templates;

use std::mem::offset_of;

use iced_x86::{OpKind, Register};

use super::assembler::register::*;
use super::assembler::{Assembler, Label, Memory, Rm, condition};
use super::liveness::{ALL, needed_after};
use super::select::Template;
use super::stubs::{self, Stubs, host};
use super::trace::Item;
use super::windows::{WINDOWS_MAX, Windows};
use crate::cpu::Cpu;
use addresses::Congruence;

/// Code out of line, written after the block's own.
pub enum Pending {
    /// The instruction's handler, where its template could not do it.
    Slow {
        enter: Label,
        back: Label,
        index: usize,
        host_flags: bool,
    },
    /// XMM registers are loaded at the block's entry.
    LoadXmm { enter: Label, back: Label },
    /// The jump that ends at `end` goes to another block of the page, once that
    /// is linked.
    Link { enter: Label, end: u64, offset: i64 },
    /// Out of the trace to a block that is not linked with a mere jump.
    Exit {
        enter: Label,
        from: i64,
        offset: i64,
        save_flags: bool,
    },
    /// Out, to the block at `offset`, because of a request.
    Out { enter: Label, offset: i64 },
    /// Left before anything of the item's block was done, because the budget is used up.
    Budget { enter: Label, index: usize },
}

/// What is asked of the translation.
pub struct Plan<'a> {
    pub stubs: &'a Stubs,
    /// Instructions are counted.
    pub counts: bool,
    /// The code of the page's block at an offset, if there is some.
    pub code_at: &'a dyn Fn(i64) -> Option<u64>,
    /// The flags needed by the code at an offset.
    pub needed_at: &'a dyn Fn(i64) -> u32,
}

/// A trace being translated.
pub struct Translation<'a> {
    pub plan: Plan<'a>,
    pub a: &'a mut Assembler,
    pub items: Vec<Item<'a>>,
    /// Flags needed after each instruction.
    pub needed: Vec<u32>,
    /// Flags needed where each instruction leads out of the trace.
    pub needed_outside: Vec<u32>,
    pub class: usize,
    /// The guest's flags are in the host's; in the `Cpu`.
    pub host_flags: bool,
    pub memory_flags: bool,
    pub pending: Vec<Pending>,
    /// The first instruction's code.
    pub entry: u64,
    /// The last instruction that has XMM registers in the host's.
    last_xmm: Option<usize>,
    /// None in the second version.
    pub windows: Windows,
    /// Whether this is the first of two versions.
    pub first_version: bool,
    /// Windows whose address is known.
    pub established: [bool; WINDOWS_MAX],
    /// What was last checked of each window's address.
    pub checked: [Congruence; WINDOWS_MAX],
    /// The window whose address is in R10.
    pub at_hand: Option<usize>,
    /// Ways into the second version.
    fallbacks: Vec<(Label, usize)>,
    /// The second version's instructions: their code, and whether flags are in
    /// the host's there.
    second: Vec<(Label, bool)>,
}

impl<'a> Translation<'a> {
    /// Of a trace, which is not empty.
    pub fn new(plan: Plan<'a>, items: Vec<Item<'a>>, a: &'a mut Assembler) -> Self {
        let last_xmm = items.iter().rposition(|item| item.template.uses_xmm());
        let user = items.first().is_some_and(|item| item.block.mode.is_user());
        Self {
            plan,
            a,
            items,
            needed: Vec::new(),
            needed_outside: Vec::new(),
            class: usize::from(user),
            host_flags: false,
            memory_flags: true,
            pending: Vec::new(),
            entry: 0,
            last_xmm,
            windows: Windows::default(),
            first_version: false,
            established: [false; WINDOWS_MAX],
            checked: [Congruence::ANY; WINDOWS_MAX],
            at_hand: None,
            fallbacks: Vec::new(),
            second: Vec::new(),
        }
    }

    /// Writes the trace's code: twice, if it has windows.
    pub fn run(&mut self) {
        self.find_needed_flags();
        self.windows = Windows::of(&self.items);
        self.first_version = !self.windows.is_empty();
        self.entry = self.a.address();
        self.enter();
        self.version();
        if self.first_version {
            self.first_version = false;
            (self.host_flags, self.memory_flags) = (false, true);
            self.version();
            self.write_fallbacks();
        }
    }

    /// One version of the whole trace.
    fn version(&mut self) {
        for index in 0..self.items.len() {
            if index > 0 && self.items[index].index == 0 && self.plan.counts {
                self.lose_flags(index);
                self.look_at_requests(self.items[index].offset);
                self.take_budget(index);
            }
            if !self.first_version {
                let here = self.a.here();
                self.second.push((here, self.host_flags));
            }
            self.instruction(index);
        }
        if let Some(last) = self.items.last()
            && !last.template.is_branch()
        {
            let (from, end) = (last.offset, last.end());
            let last_is_handler = last.template == Template::Handler;
            let needed = self.needed[self.items.len() - 1];
            self.save_flags_if(needed);
            if last_is_handler {
                self.go_behind_handler(end);
            } else {
                self.go_to(from, end);
            }
        }
        while let Some(pending) = self.pending.pop() {
            self.write_pending(pending);
        }
    }

    fn write_fallbacks(&mut self) {
        for (enter, index) in std::mem::take(&mut self.fallbacks) {
            let (version, host_flags) = self.second[index];
            self.a.bind(enter);
            if host_flags && self.needed_before(index) {
                self.a.call_to(self.plan.stubs.load_flags);
            }
            self.a.jump(version);
        }
    }

    fn find_needed_flags(&mut self) {
        let unknown = !self.items.iter().any(|item| item.flags.modifies);
        self.needed_outside = (self.items.iter())
            .map(|item| {
                if unknown {
                    ALL
                } else {
                    control::needed_outside(item, self.plan.needed_at)
                }
            })
            .collect();
        if let (Some(last), Some(needed)) = (self.items.last(), self.needed_outside.last_mut())
            && !last.template.is_branch()
            && !unknown
        {
            *needed = (self.plan.needed_at)(last.end());
        }
        let uses = self.items.iter().map(|item| item.flags);
        needed_after(uses, &self.needed_outside, &mut self.needed);
    }

    fn enter(&mut self) {
        if self.plan.counts {
            self.take_budget(0);
        }
        if self.last_xmm.is_some() {
            let enter = self.a.label();
            stubs::test_xmm_live(self.a);
            self.a.jump_if(condition::EQUAL, enter);
            let back = self.a.here();
            self.pending.push(Pending::LoadXmm { enter, back });
        }
    }

    /// Takes the count of the block that starts at `index` off the budget.
    fn take_budget(&mut self, index: usize) {
        let enter = self.a.label();
        let budget = Memory::Field(offset_of!(Cpu, budget) as i32);
        let count = self.items[index].block.count as i32;
        self.a.group1(5, true, Rm::Memory(budget), count);
        self.a.jump_if(condition::SIGN, enter);
        self.pending.push(Pending::Budget { enter, index });
    }

    fn instruction(&mut self, index: usize) {
        self.write_instruction(index);
        if uses_scratch(&self.items[index]) {
            self.at_hand = None;
        }
    }

    fn write_instruction(&mut self, index: usize) {
        match self.items[index].template {
            Template::Handler => self.handler(index),
            Template::Nothing => {}
            Template::Same => {
                self.want_flags(index);
                self.a.bytes(self.items[index].bytes);
                self.after(index);
            }
            Template::Registers { reg, rm } => self.registers(index, reg, rm),
            Template::Memory { reg, operand } => self.memory(index, reg, operand),
            Template::Absolute { load, operand } => self.absolute(index, load, operand),
            Template::Address(register) => self.lea(index, register),
            Template::Constant(register) => self.move_constant(index, register),
            Template::PartialConstant(field) => self.move_partial_constant(index, field),
            Template::SwapBytes(register) => self.swap_bytes(index, register),
            Template::ExchangeAccumulator(register) => self.exchange(index, register),
            Template::Divide { signed } => self.divide(index, signed),
            Template::PushRegister(register) => self.push_register(index, register),
            Template::PushConstant(value) => self.push_constant(index, value),
            Template::PushMemory => self.push_memory(index),
            Template::Pop(register) => self.pop(index, register),
            Template::Leave => self.leave(index),
            _ => self.branch(index),
        }
    }

    // Flags.

    /// Whether flags are needed before the instruction.
    pub fn needed_before(&self, index: usize) -> bool {
        self.items[index].flags.before(self.needed[index]) != 0
    }

    /// Saves the flags where `needed` says that there are some to be saved.
    pub fn save_flags_if(&mut self, needed: u32) {
        if needed != 0 && !self.memory_flags {
            stubs::save_flags(self.a);
            self.memory_flags = true;
        }
    }

    /// The host's flags are about to be lost.
    pub fn lose_flags(&mut self, index: usize) {
        let needed = u32::from(self.needed_before(index));
        self.save_flags_if(needed);
        self.host_flags = false;
    }

    /// Loads the host's flags where the instruction needs the old ones.
    pub fn want_flags(&mut self, index: usize) {
        let needs = self.items[index].flags.needs_old(self.needed[index]);
        if needs && !self.host_flags {
            stubs::load_flags(self.a);
            self.host_flags = true;
        }
    }

    /// The instruction was executed: the flags are where it left them.
    pub fn after(&mut self, index: usize) {
        if self.items[index].flags.modifies {
            self.host_flags = true;
            self.memory_flags = false;
        }
    }

    // Handlers.

    fn handler(&mut self, index: usize) {
        self.lose_flags(index);
        self.call_handler(index);
        self.memory_flags = true;
    }

    /// Calls the instruction's handler, and brings back the XMM registers where
    /// an instruction after it needs them.
    fn call_handler(&mut self, index: usize) {
        let item = &self.items[index];
        self.a.constant(R11, item.op() as u64);
        self.a.constant(R10, &raw const *item.block as u64);
        self.a.call_to(self.plan.stubs.handler);
        if self.last_xmm.is_some_and(|last| last > index) {
            let item = &self.items[index];
            self.load_xmm(item.end(), item.rest());
        }
    }

    /// The whole count of the block that starts at `index` back on the budget.
    pub fn give_back_budget(&mut self, index: usize) {
        let budget = Rm::Memory(Memory::Field(offset_of!(Cpu, budget) as i32));
        let count = self.items[index].block.count as i32;
        self.a.group1(0, true, budget, count);
    }

    /// Loads the XMM registers, or leaves with `rest` instructions of the block
    /// not done, of which the one at `offset` is next.
    fn load_xmm(&mut self, offset: i64, rest: i32) {
        let rest = if self.plan.counts { rest } else { 0 };
        let budget = Rm::Memory(Memory::Field(offset_of!(Cpu, budget) as i32));
        if rest != 0 {
            self.a.group1(0, true, budget, rest);
        }
        self.a.constant(R11, offset as u64);
        self.a.call_to(self.plan.stubs.load_xmm);
        if rest != 0 {
            self.a.group1(5, true, budget, rest);
        }
    }

    fn write_pending(&mut self, pending: Pending) {
        match pending {
            Pending::Slow {
                enter,
                back,
                index,
                host_flags,
            } => {
                self.a.bind(enter);
                self.call_handler(index);
                if host_flags {
                    self.a.call_to(self.plan.stubs.load_flags);
                }
                self.a.jump(back);
            }
            Pending::LoadXmm { enter, back } => {
                self.a.bind(enter);
                let item = &self.items[0];
                self.load_xmm(item.offset, item.block.count as i32);
                self.a.jump(back);
            }
            other => self.write_pending_branch(other),
        }
    }

    /// The end of a template with a slow path: that comes back here, or goes on
    /// in the second version.
    pub fn finish_slow(&mut self, index: usize, enter: Label) {
        if !self.a.is_target(enter) {
            return;
        }
        if self.first_version {
            self.fallbacks.push((enter, index));
            return;
        }
        let back = self.a.here();
        self.pending.push(Pending::Slow {
            enter,
            back,
            index,
            host_flags: self.host_flags,
        });
    }
}

/// Whether an instruction's code may change R10 although it uses no window.
fn uses_scratch(item: &Item<'_>) -> bool {
    use Template::*;
    let resident = |register: Register| {
        register.is_gpr() && host(register.full_register().number() as u8).is_none()
    };
    let instruction = &item.instruction;
    let registers = (0..instruction.op_count())
        .filter(|&operand| instruction.op_kind(operand) == OpKind::Register)
        .any(|operand| resident(instruction.op_register(operand)));
    let address = resident(instruction.memory_base()) || resident(instruction.memory_index());
    match item.template {
        Nothing | Same | JumpIf(_) | Jump => false,
        Registers { .. }
        | Constant(_)
        | PartialConstant(_)
        | SwapBytes(_)
        | ExchangeAccumulator(_) => registers,
        Address(_) => registers || address,
        // They leave their window's address there.
        Memory { .. } | PushRegister(_) | PushConstant(_) | Pop(_) | Leave | Call => false,
        _ => true,
    }
}
