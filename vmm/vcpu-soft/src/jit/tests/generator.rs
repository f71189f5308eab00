//! Instructions and registers by chance.

use iced_x86::{
    Encoder, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
};

use super::super::encoding::Encoding;
use super::super::select::{Template, select};
use super::super::thunk;
use super::native::Context;
use super::{DATA, MIDDLE, MODE, Machine, STACK};
use weft_test_support::Random;

/// Draws instructions that have a template and stay within the data page.
pub struct Generator {
    pub random: Random,
    information: InstructionInfoFactory,
    /// Holds the address of the data page.
    base: Register,
    /// Holds a number below 64.
    index: Register,
}

const GENERAL: [Register; 14] = [
    Register::RAX,
    Register::RCX,
    Register::RDX,
    Register::RBX,
    Register::RBP,
    Register::RSI,
    Register::RDI,
    Register::R8,
    Register::R9,
    Register::R10,
    Register::R11,
    Register::R12,
    Register::R13,
    Register::R15,
];

/// Counts the rounds of loops.
const COUNTER: Register = Register::R14;

impl Generator {
    pub fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            information: InstructionInfoFactory::new(),
            base: Register::RBX,
            index: Register::RCX,
        }
    }

    pub fn choose_registers(&mut self) {
        let base = self.random.below(GENERAL.len() as u64) as usize;
        let other = 1 + self.random.below(GENERAL.len() as u64 - 1) as usize;
        self.base = GENERAL[base];
        self.index = GENERAL[(base + other) % GENERAL.len()];
    }

    pub fn sequence(&mut self, length: usize) -> Vec<Instruction> {
        self.choose_registers();
        let mut sequence = Vec::new();
        while sequence.len() < length {
            sequence.extend(self.instruction());
        }
        sequence
    }

    pub fn instruction(&mut self) -> Option<Instruction> {
        let mut bytes: [u8; 16] = self.random.bytes();
        let mut at = 0;
        // Prefixes and maps more often than chance would have them.
        if self.random.below(4) == 0 {
            bytes[at] = [0x66, 0xf2, 0xf3, 0xf0][self.random.below(4) as usize];
            at += 1;
        }
        if self.random.below(2) == 0 {
            bytes[at] = 0x40 | self.random.below(16) as u8;
            at += 1;
        }
        if self.random.below(2) == 0 {
            bytes[at] = 0x0f;
        }
        let mut decoder = MODE.decoder(&bytes, 0);
        let mut instruction = decoder.decode();
        if instruction.is_invalid() || instruction.is_ip_rel_memory_operand() {
            return None;
        }
        let encoding = Encoding::of(&bytes[..instruction.len()])?;
        let template = select(&instruction, &encoding, MODE);
        let unwanted = matches!(
            template,
            Template::Handler | Template::Divide { .. } | Template::Leave
        ) || template.is_branch()
            || matches!(template, Template::Pop(4))
            || matches!(template, Template::Absolute { .. });
        // The host would execute TZCNT and LZCNT.
        let extended = matches!(instruction.mnemonic(), Mnemonic::Bsf | Mnemonic::Bsr)
            && (instruction.has_rep_prefix() || instruction.has_repne_prefix());
        if unwanted
            || extended
            || rotates_by_nothing(&instruction)
            || instruction.memory_segment() == Register::GS && has_memory(&instruction)
        {
            return None;
        }
        if has_memory(&instruction) {
            self.place_operand(&mut instruction);
            let mut encoder = Encoder::new(64);
            encoder.encode(&instruction, 0).ok()?;
            let bytes = encoder.take_buffer();
            if select(&instruction, &Encoding::of(&bytes)?, MODE) == Template::Handler {
                return None;
            }
        }
        let written = self
            .information
            .info(&instruction)
            .used_registers()
            .iter()
            .any(|used| {
                let register = used.register().full_register();
                let kept = [self.base, self.index, COUNTER].contains(&register);
                let stack = register == Register::RSP && instruction.stack_pointer_increment() == 0;
                let read = matches!(used.access(), OpAccess::Read | OpAccess::CondRead);
                (kept || stack) && !read
            });
        (!written).then_some(instruction)
    }

    fn place_operand(&mut self, instruction: &mut Instruction) {
        let size = instruction.memory_size().size().max(1) as u64;
        let locked = instruction.has_lock_prefix() || instruction.mnemonic() == Mnemonic::Xchg;
        let alignment = if size == 16 || locked { size } else { 1 };
        let scale = [1, 2, 4, 8][self.random.below(4) as usize].max(alignment);
        let indexed = self.random.below(3) == 0 && size != 16;
        // Many near the border between the two pages, none across it.
        let mut address = match self.random.below(3) {
            0 => self.random.below(2 * 4096 - 16),
            _ => 4096 - 150 + self.random.below(300),
        };
        if indexed {
            address = (address & 4096) | (address % (4096 - 64 * 8 - 16));
        } else if address < 4096 && address + size > 4096 {
            address = 4096;
        }
        address &= !(alignment - 1);
        instruction.set_segment_prefix(Register::None);
        instruction.set_memory_base(self.base);
        instruction.set_memory_index(if indexed { self.index } else { Register::None });
        instruction.set_memory_index_scale(if indexed { scale as u32 } else { 1 });
        instruction.set_memory_displ_size(8);
        instruction.set_memory_displacement64(address.wrapping_sub(MIDDLE));
    }

    pub fn context(&mut self, machine: &Machine) -> Context {
        let mut context = Context::EMPTY;
        for byte in &mut context.fpu[160..416] {
            *byte = self.random.next() as u8;
        }
        context.fpu[24..28].copy_from_slice(&thunk::HOST_MXCSR.to_le_bytes());
        for register in &mut context.registers {
            *register = match self.random.below(4) {
                0 => self.random.below(256),
                1 => !self.random.below(256),
                _ => self.random.next(),
            };
        }
        context.registers[self.base.number()] = machine.linear(DATA) + MIDDLE;
        context.registers[self.index.number()] = self.random.below(64);
        context.registers[4] = machine.linear(STACK) + 2048;
        context.flags = self.random.next() & 0xd501 | 0x200;
        context
    }
}

/// RCL and RCR of 8 and 16 bits by a multiple of 9 or 17: OF is undefined, and
/// not even a function of what the program can see on some processors.
fn rotates_by_nothing(instruction: &Instruction) -> bool {
    matches!(instruction.mnemonic(), Mnemonic::Rcl | Mnemonic::Rcr)
        && matches!(instruction.op_code().operand_size(), 0 | 16)
}

fn has_memory(instruction: &Instruction) -> bool {
    (0..instruction.op_count()).any(|operand| instruction.op_kind(operand) == OpKind::Memory)
}
