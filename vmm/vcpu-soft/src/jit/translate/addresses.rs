//! Templates' memory operands: from the guest's addresses to the host's.

use std::mem::offset_of;

use iced_x86::{Instruction, Register};
use weft_vcpu::Access;

use super::Translation;
use crate::cpu::{Cpu, segment};
use crate::jit::assembler::register::*;
use crate::jit::assembler::{Label, Memory, Opcode, Rm, condition};
use crate::jit::select::MemoryUse;
use crate::jit::stubs::{self, CODE_PAGE, host, register_field};
use crate::jit::windows::{Base, Member};
use crate::tlb::{TLB_ENTRIES, Tlb, TlbEntry};

/// What is known of a window's address: with this distance it is a multiple of the
/// alignment.
#[derive(Clone, Copy)]
pub struct Congruence {
    /// Less than the alignment.
    distance: u8,
    alignment: u8,
}

impl Congruence {
    /// Holds of each address.
    pub const ANY: Self = Self {
        distance: 0,
        alignment: 1,
    };

    fn of(member: &Member) -> Self {
        let alignment = member.alignment;
        Self {
            distance: member.distance as u8 & (alignment - 1),
            alignment,
        }
    }

    fn implies(self, other: Self) -> bool {
        self.alignment >= other.alignment && self.distance & (other.alignment - 1) == other.distance
    }
}

impl Translation<'_> {
    /// A register's value in a register: its own, or `scratch`.
    pub fn value(&mut self, guest: u8, scratch: u8) -> u8 {
        host(guest).unwrap_or_else(|| {
            self.a.load(scratch, register_field(guest));
            scratch
        })
    }

    /// The linear address of the memory operand in R10; R11 and flags are lost.
    pub fn address(&mut self, instruction: &Instruction) {
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
    pub fn effective_address(&mut self, instruction: &Instruction, to: u8) {
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
        if operand.alignment > 1 {
            // test r10b, alignment - 1
            a.bytes(&[0x41, 0xf6, 0xc2, operand.alignment - 1]);
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
        let wanted = Congruence::of(&member);
        if !self.checked[member.window].implies(wanted) {
            self.lose_flags(index);
            self.a
                .address_of(R11, Memory::At(R10, i32::from(wanted.distance)));
            // test r11b, alignment - 1
            self.a.bytes(&[0x41, 0xf6, 0xc3, wanted.alignment - 1]);
            self.a.jump_if(condition::NOT_EQUAL, slow);
            self.checked[member.window] = wanted;
        }
        Some((slow, member.distance))
    }

    /// The linear address of a window's start in R10; R11 is lost.
    pub fn window_start(&mut self, member: &Member) {
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
}
