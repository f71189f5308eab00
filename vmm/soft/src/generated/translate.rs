//! From a trace of decoded instructions to code: everything but branches, which
//! are in [`super::control`].

use std::mem::offset_of;

use iced_x86::{Instruction, Mnemonic, OpKind, Register};

use super::assembler::register::*;
use super::assembler::{Assembler, Label, Memory, Opcode, Rm, condition};
use super::liveness::{ALL, needed_after};
use super::select::{Field, MemoryUse, Template};
use super::stubs::{self, CODE_PAGE, Stubs, host, register_field};
use super::trace::Item;
use super::windows::{Base, Member, WINDOWS_MAX, Windows};
use crate::cpu::{Cpu, segment};
use crate::environment::Access;
use crate::tlb::{TLB_ENTRIES, Tlb, TlbEntry};

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
    /// Out before anything of the item's block was done, for want of budget.
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
    windows: Windows,
    /// Whether this is the first of two versions.
    first_version: bool,
    /// Windows whose address is known; and where operands of them are known to
    /// be at multiples of 16.
    established: [bool; WINDOWS_MAX],
    aligned: [Option<i32>; WINDOWS_MAX],
    /// The window whose address is in R10.
    at_hand: Option<usize>,
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
            aligned: [None; WINDOWS_MAX],
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
            let needed = self.needed[self.items.len() - 1];
            self.save_flags_if(needed);
            self.go_to(from, end);
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
                    super::control::needed_outside(item, self.plan.needed_at)
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
    fn needed_before(&self, index: usize) -> bool {
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
    fn after(&mut self, index: usize) {
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

    // Memory.

    /// A register's value in a register: its own, or `scratch`.
    pub fn value(&mut self, guest: u8, scratch: u8) -> u8 {
        host(guest).unwrap_or_else(|| {
            self.a.load(scratch, register_field(guest));
            scratch
        })
    }

    /// The linear address of the memory operand in R10; R11 and flags are lost.
    fn address(&mut self, instruction: &Instruction) {
        self.effective_address(instruction, R10);
        let base = match instruction.memory_segment() {
            Register::FS => segment::FS,
            Register::GS => segment::GS,
            _ => return,
        };
        let base = offset_of!(Cpu, segment_bases) + 8 * base;
        self.a.load_add(R10, Memory::Field(base as i32));
    }

    /// Base, index and displacement in `to`, which may be R10, or another
    /// register that is written by this instruction; R10 and R11 are lost.
    fn effective_address(&mut self, instruction: &Instruction, to: u8) {
        if instruction.is_ip_rel_memory_operand() {
            // Decoded as if the page were at address 0.
            let distance = instruction.ip_rel_memory_address() as i64;
            self.a.load(to, CODE_PAGE);
            self.a.address_of(to, Memory::At(to, distance as i32));
            return;
        }
        let displacement = instruction.memory_displacement64() as i32;
        let general = |register: Register| {
            (register != Register::None).then(|| register.full_register().number() as u8)
        };
        let base = general(instruction.memory_base()).map(|guest| self.value(guest, R10));
        let index = general(instruction.memory_index()).map(|guest| self.value(guest, R11));
        let scale = instruction.memory_index_scale().ilog2() as u8;
        let memory = match (base, index) {
            (None, None) => Memory::Absolute(displacement),
            (Some(base), None) => Memory::At(base, displacement),
            (base, Some(index)) => Memory::Indexed(base, index, scale, displacement),
        };
        let narrow = instruction
            .memory_base()
            .size()
            .max(instruction.memory_index().size())
            == 4
            || instruction.memory_displ_size() == 4 && base.is_none() && index.is_none() && {
                // A 32-bit address wraps to 32 bits; without registers iced
                // tells it by the value alone.
                displacement as i64 as u64 != instruction.memory_displacement64()
            };
        let opcode = Opcode {
            wide: !narrow,
            ..Opcode::narrow(0x8d)
        };
        self.a.instruction(opcode, to, Rm::Memory(memory));
    }

    /// Turns the linear address in R10 into the host's; R11 and flags are lost.
    /// `slow` is where it goes when the TLB does not know.
    pub fn probe(&mut self, operand: MemoryUse, slow: Label) {
        self.at_hand = None;
        const ENTRY: u32 = size_of::<TlbEntry>().ilog2();
        const INDEX_MASK: i32 = (TLB_ENTRIES as i32 - 1) << ENTRY;
        let tlb = offset_of!(Cpu, tlbs) + self.class * size_of::<Tlb>() + offset_of!(Tlb, entries);
        let tag = match operand.access {
            Access::Read => offset_of!(TlbEntry, read),
            Access::Write => offset_of!(TlbEntry, write),
        };
        let a = &mut *self.a;
        a.instruction(Opcode::narrow(0x89), R10, Rm::Register(R11));
        a.shift(5, false, R11, (12 - ENTRY) as u8);
        a.group1(4, false, Rm::Register(R11), INDEX_MASK);
        let tag = Memory::FieldAt(R11, (tlb + tag) as i32);
        a.instruction(Opcode::wide(0x2b), R10, Rm::Memory(tag));
        a.group1(7, true, Rm::Register(R10), 4096 - i32::from(operand.size));
        a.jump_if(condition::ABOVE, slow);
        if operand.aligned {
            // test r10b, 15
            a.bytes(&[0x41, 0xf6, 0xc2, 0x0f]);
            a.jump_if(condition::NOT_EQUAL, slow);
        }
        let host = Memory::FieldAt(R11, (tlb + offset_of!(TlbEntry, host)) as i32);
        a.load_add(R10, host);
    }

    /// The start of the instruction's window in R10, if it has one; R11 is lost.
    /// Returns the slow path, and the operand's distance from R10.
    pub fn window_address(&mut self, index: usize) -> Option<(Label, i32)> {
        if !self.first_version {
            return None;
        }
        let member = self.windows.members[index]?;
        let slow = self.a.label();
        if !self.established[member.window] {
            self.lose_flags(index);
            self.window_start(&member);
            self.probe(self.windows.all[member.window].operand(), slow);
            self.a.store(stubs::window(member.window), R10);
            self.established[member.window] = true;
        } else if self.at_hand != Some(member.window) {
            self.a.load(R10, stubs::window(member.window));
        }
        self.at_hand = Some(member.window);
        let phase = member.distance & 15;
        if member.aligned && self.aligned[member.window] != Some(phase) {
            self.lose_flags(index);
            self.a.address_of(R11, Memory::At(R10, phase));
            // test r11b, 15
            self.a.bytes(&[0x41, 0xf6, 0xc3, 0x0f]);
            self.a.jump_if(condition::NOT_EQUAL, slow);
            self.aligned[member.window] = Some(phase);
        }
        Some((slow, member.distance))
    }

    /// The linear address of a window's start in R10; R11 is lost.
    fn window_start(&mut self, member: &Member) {
        match member.base {
            Base::Register(guest) => {
                let base = self.value(guest, R10);
                self.a.address_of(R10, Memory::At(base, member.start));
            }
            Base::CodePage => {
                self.a.load(R10, CODE_PAGE);
                self.a.address_of(R10, Memory::At(R10, member.start));
            }
            Base::Segment(segment) => {
                let base = offset_of!(Cpu, segment_bases) + 8 * usize::from(segment);
                self.a.load(R10, Memory::Field(base as i32));
                self.a.address_of(R10, Memory::At(R10, member.start));
            }
        }
    }

    /// The memory operand's host address in R10, with the flags in the host's
    /// where the instruction needs them; R11 is lost. Returns the slow path.
    pub fn operand_address(&mut self, index: usize, operand: MemoryUse) -> Label {
        let slow = self.a.label();
        self.lose_flags(index);
        let instruction = self.items[index].instruction;
        self.address(&instruction);
        self.probe(operand, slow);
        self.want_flags(index);
        slow
    }

    fn opcode(&self, index: usize) -> (Opcode, &'a [u8]) {
        match &self.items[index].encoding {
            Some(encoding) => (encoding.opcode, encoding.immediate),
            None => unreachable!("every template but Handler is selected by its encoding"),
        }
    }

    fn memory(&mut self, index: usize, reg: Field, operand: MemoryUse) {
        let (slow, distance) = match self.window_address(index) {
            Some(found) => found,
            None => (self.operand_address(index, operand), 0),
        };
        self.want_flags(index);
        let (opcode, immediate) = self.opcode(index);
        let instruction = self.items[index].instruction;
        let (number, resident) = match reg {
            Field::Opcode(number) | Field::Xmm(number) | Field::HighByte(number) => (number, None),
            Field::General(guest) => match host(guest) {
                Some(register) => (register, None),
                None => (R11, Some(guest)),
            },
        };
        if let Some(guest) = resident
            && !writes_whole(&instruction)
        {
            self.a.load(R11, register_field(guest));
        }
        self.a
            .instruction(opcode, number, Rm::Memory(Memory::At(R10, distance)));
        self.a.bytes(immediate);
        let written = instruction.op0_kind() == OpKind::Register
            || matches!(instruction.mnemonic(), Mnemonic::Xchg | Mnemonic::Xadd);
        if let Some(guest) = resident
            && written
        {
            self.a.store(register_field(guest), R11);
        }
        self.after(index);
        self.finish_slow(index, slow);
    }

    fn absolute(&mut self, index: usize, load: bool, operand: MemoryUse) {
        let slow = self.a.label();
        self.lose_flags(index);
        let instruction = self.items[index].instruction;
        self.a.constant(R10, instruction.memory_displacement64());
        let base = match instruction.memory_segment() {
            Register::FS => segment::FS,
            Register::GS => segment::GS,
            _ => segment::NONE,
        };
        if base != segment::NONE {
            let base = offset_of!(Cpu, segment_bases) + 8 * base;
            self.a.load_add(R10, Memory::Field(base as i32));
        }
        self.probe(operand, slow);
        let (original, _) = self.opcode(index);
        let byte = u8::from(operand.size > 1);
        let opcode = Opcode {
            bytes: [if load { 0x8a } else { 0x88 } | byte, 0, 0],
            ..original
        };
        self.a
            .instruction(opcode, RAX, Rm::Memory(Memory::At(R10, 0)));
        self.finish_slow(index, slow);
    }

    // Registers.

    fn registers(&mut self, index: usize, reg: Field, rm: Field) {
        self.want_flags(index);
        let (mut opcode, immediate) = self.opcode(index);
        let instruction = self.items[index].instruction;
        let whole = writes_whole(&instruction);
        let first = match instruction.op0_kind() {
            OpKind::Register => instruction.op0_register(),
            _ => Register::None,
        };
        let both = matches!(instruction.mnemonic(), Mnemonic::Xchg | Mnemonic::Xadd);
        let mut resident = [None; 2];
        let mut number = |this: &mut Self, field: Field, scratch: u8| match field {
            Field::Opcode(number) | Field::Xmm(number) | Field::HighByte(number) => number,
            Field::General(guest) => host(guest).unwrap_or_else(|| {
                if let Some((_, register)) = resident[0].filter(|&(known, _)| known == guest) {
                    return register;
                }
                let written = first.is_gpr() && first.full_register().number() as u8 == guest;
                if !(written && whole) || reg == rm {
                    this.a.load(scratch, register_field(guest));
                }
                let slot = usize::from(resident[0].is_some());
                resident[slot] = Some((guest, scratch));
                scratch
            }),
        };
        let rm_number = number(self, rm, R10);
        let reg_number = number(self, reg, R11);
        let high = matches!(reg, Field::HighByte(_)) || matches!(rm, Field::HighByte(_));
        opcode.low_bytes &= !high;
        self.a
            .instruction(opcode, reg_number, Rm::Register(rm_number));
        self.a.bytes(immediate);
        for (guest, register) in resident.into_iter().flatten() {
            let written = first.is_gpr() && first.full_register().number() as u8 == guest;
            if written || both {
                self.a.store(register_field(guest), register);
            }
        }
        self.after(index);
    }

    fn lea(&mut self, index: usize, register: u8) {
        let instruction = self.items[index].instruction;
        let narrow = instruction.op0_register().size() == 4;
        let to = host(register).unwrap_or(R10);
        self.effective_address(&instruction, to);
        if narrow {
            // mov r32, r32 clears the upper half.
            self.a
                .instruction(Opcode::narrow(0x89), to, Rm::Register(to));
        }
        if host(register).is_none() {
            self.a.store(register_field(register), to);
        }
    }

    fn move_constant(&mut self, index: usize, register: u8) {
        let instruction = self.items[index].instruction;
        let value = match instruction.op1_kind() {
            OpKind::Immediate64 => instruction.immediate64(),
            _ => u64::from(instruction.immediate32()),
        };
        let to = host(register).unwrap_or(R10);
        self.a.constant(to, value);
        if host(register).is_none() {
            self.a.store(register_field(register), to);
        }
    }

    fn move_partial_constant(&mut self, index: usize, field: Field) {
        let (mut opcode, immediate) = self.opcode(index);
        opcode.bytes[0] = 0xc6 | u8::from(opcode.bytes[0] >= 0xb8);
        opcode.low_bytes = true;
        match field {
            Field::General(guest) => {
                let to = self.value(guest, R10);
                self.a.instruction(opcode, 0, Rm::Register(to));
                self.a.bytes(immediate);
                if host(guest).is_none() {
                    self.a.store(register_field(guest), to);
                }
            }
            Field::HighByte(number) | Field::Opcode(number) | Field::Xmm(number) => {
                opcode.low_bytes = false;
                self.a.instruction(opcode, 0, Rm::Register(number));
                self.a.bytes(immediate);
            }
        }
    }

    fn swap_bytes(&mut self, index: usize, register: u8) {
        let wide = self.items[index].instruction.op0_register().size() == 8;
        let to = self.value(register, R10);
        self.a
            .bytes(&[0x40 | u8::from(wide) << 3 | to >> 3, 0x0f, 0xc8 | to & 7]);
        if host(register).is_none() {
            self.a.store(register_field(register), to);
        }
    }

    fn exchange(&mut self, index: usize, register: u8) {
        let (original, _) = self.opcode(index);
        let opcode = Opcode {
            bytes: [0x87, 0, 0],
            low_bytes: false,
            ..original
        };
        let with = self.value(register, R10);
        self.a.instruction(opcode, RAX, Rm::Register(with));
        if host(register).is_none() {
            self.a.store(register_field(register), with);
        }
    }

    /// DIV and IDIV, where the quotient surely fits; the handler raises #DE.
    fn divide(&mut self, index: usize, signed: bool) {
        let (opcode, _) = self.opcode(index);
        let instruction = self.items[index].instruction;
        let wide = opcode.wide;
        let (slow, divisor) = if instruction.op0_kind() == OpKind::Memory {
            let operand = MemoryUse {
                size: if wide { 8 } else { 4 },
                access: Access::Read,
                aligned: false,
            };
            let slow = self.operand_address(index, operand);
            let load = Opcode {
                wide,
                ..Opcode::narrow(0x8b)
            };
            self.a
                .instruction(load, R11, Rm::Memory(Memory::At(R10, 0)));
            (slow, R11)
        } else {
            let slow = self.a.label();
            self.lose_flags(index);
            let guest = instruction.op0_register().full_register().number() as u8;
            (slow, self.value(guest, R11))
        };
        let sized = |byte: u8| Opcode {
            wide,
            ..Opcode::narrow(byte)
        };
        let a = &mut *self.a;
        if signed {
            // The dividend is an extended RAX, and the divisor neither 0 nor -1.
            a.instruction(sized(0x89), RAX, Rm::Register(R10));
            a.shift(7, wide, R10, if wide { 63 } else { 31 });
            a.instruction(sized(0x39), RDX, Rm::Register(R10));
            a.jump_if(condition::NOT_EQUAL, slow);
            a.instruction(sized(0x8d), R10, Rm::Memory(Memory::At(divisor, 1)));
            a.group1(7, wide, Rm::Register(R10), 1);
            a.jump_if(condition::BELOW_OR_EQUAL, slow);
        } else {
            // The upper half is below the divisor, which is not 0 then.
            a.instruction(sized(0x39), divisor, Rm::Register(RDX));
            a.jump_if(condition::ABOVE_OR_EQUAL, slow);
        }
        let operation = if signed { 7 } else { 6 };
        a.instruction(sized(0xf7), operation, Rm::Register(divisor));
        // Its flags are undefined: those in the `Cpu` will do.
        self.host_flags = false;
        self.finish_slow(index, slow);
    }

    // The stack.

    /// The host address below the stack pointer in R10, but for the distance
    /// that is returned; R11 and perhaps the flags are lost.
    pub fn push_address(&mut self, index: usize) -> (Label, i32) {
        self.window_address(index).unwrap_or_else(|| {
            let slow = self.a.label();
            self.lose_flags(index);
            self.a.address_of(R10, Memory::At(R15, -8));
            self.probe(STACK_WRITE, slow);
            (slow, 0)
        })
    }

    /// The same for what `register` points to.
    pub fn pop_address(&mut self, index: usize, register: u8) -> (Label, i32) {
        self.window_address(index).unwrap_or_else(|| {
            let slow = self.a.label();
            self.lose_flags(index);
            self.a.copy(R10, register);
            self.probe(STACK_READ, slow);
            (slow, 0)
        })
    }

    /// Moves the guest's stack pointer.
    pub fn move_stack(&mut self, bytes: i32) {
        self.a.address_of(R15, Memory::At(R15, bytes));
    }

    fn push_register(&mut self, index: usize, register: u8) {
        let (slow, distance) = self.push_address(index);
        let value = self.value(register, R11);
        self.a.store(Memory::At(R10, distance), value);
        self.move_stack(-8);
        self.finish_slow(index, slow);
    }

    fn push_constant(&mut self, index: usize, value: i32) {
        let (slow, distance) = self.push_address(index);
        let to = Rm::Memory(Memory::At(R10, distance));
        self.a.instruction(Opcode::wide(0xc7), 0, to);
        self.a.bytes(&value.to_le_bytes());
        self.move_stack(-8);
        self.finish_slow(index, slow);
    }

    fn push_memory(&mut self, index: usize) {
        let slow = self.operand_address(index, STACK_READ);
        self.host_flags = false;
        self.a.load(R10, Memory::At(R10, 0));
        self.a.store(stubs::SCRATCH, R10);
        self.a.address_of(R10, Memory::At(R15, -8));
        self.probe(STACK_WRITE, slow);
        self.a.load(R11, stubs::SCRATCH);
        self.a.store(Memory::At(R10, 0), R11);
        self.move_stack(-8);
        self.finish_slow(index, slow);
    }

    fn pop(&mut self, index: usize, register: u8) {
        let (slow, distance) = self.pop_address(index, R15);
        let to = host(register).unwrap_or(R11);
        self.a.load(to, Memory::At(R10, distance));
        if host(register).is_none() {
            self.a.store(register_field(register), to);
        }
        // POP RSP: what was popped stays.
        if to != R15 {
            self.move_stack(8);
        }
        self.finish_slow(index, slow);
    }

    fn leave(&mut self, index: usize) {
        let (slow, distance) = self.pop_address(index, RBP);
        self.a.address_of(R15, Memory::At(RBP, 8));
        self.a.load(RBP, Memory::At(R10, distance));
        self.finish_slow(index, slow);
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

/// Whether what the instruction refers to is within 2 GiB of its page's start,
/// by a 64-bit address.
pub fn is_reachable(instruction: &Instruction) -> bool {
    let near = |address: u64| i32::try_from(address as i64).is_ok();
    if instruction.is_invalid() {
        return false;
    }
    if instruction.is_ip_rel_memory_operand() {
        return instruction.memory_base() == Register::RIP
            && near(instruction.ip_rel_memory_address());
    }
    instruction.op0_kind() != OpKind::NearBranch64 || near(instruction.near_branch64())
}

/// PUSH.
pub const STACK_WRITE: MemoryUse = MemoryUse {
    size: 8,
    access: Access::Write,
    aligned: false,
};
/// POP.
pub const STACK_READ: MemoryUse = MemoryUse {
    size: 8,
    access: Access::Read,
    aligned: false,
};

/// Whether an instruction overwrites its whole destination register without
/// reading it.
fn writes_whole(instruction: &Instruction) -> bool {
    use Mnemonic::*;
    matches!(
        instruction.mnemonic(),
        Mov | Movzx
            | Movsx
            | Movsxd
            | Movd
            | Movq
            | Cvtsd2si
            | Cvttsd2si
            | Cvtss2si
            | Cvttss2si
            | Pmovmskb
            | Movmskps
            | Movmskpd
            | Pextrw
    ) && instruction.op0_kind() == OpKind::Register
        && instruction.op0_register().is_gpr()
        && instruction.op0_register().size() >= 4
}
