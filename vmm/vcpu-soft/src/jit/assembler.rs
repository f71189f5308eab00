//! Writes the few x86-64 instructions that generated code is made of, and jumps
//! between labels.
//!
//! iced's encoder writes any instruction from its description, at about a tenth
//! of a microsecond each; this one copies opcodes and fills in operands, at a
//! tenth of that. Encodings: Intel SDM volume 2, chapter 2.

/// Numbers of the host's registers as instructions encode them.
pub mod register {
    pub const RAX: u8 = 0;
    pub const RCX: u8 = 1;
    pub const RDX: u8 = 2;
    pub const RBX: u8 = 3;
    pub const RSP: u8 = 4;
    pub const RBP: u8 = 5;
    pub const RSI: u8 = 6;
    pub const RDI: u8 = 7;
    pub const R8: u8 = 8;
    pub const R10: u8 = 10;
    pub const R11: u8 = 11;
    pub const R12: u8 = 12;
    pub const R13: u8 = 13;
    pub const R14: u8 = 14;
    pub const R15: u8 = 15;
}

/// Condition codes as Jcc, SETcc and CMOVcc encode them.
pub mod condition {
    pub const ABOVE_OR_EQUAL: u8 = 3;
    pub const EQUAL: u8 = 4;
    pub const NOT_EQUAL: u8 = 5;
    pub const BELOW_OR_EQUAL: u8 = 6;
    pub const ABOVE: u8 = 7;
    pub const SIGN: u8 = 8;
}

/// A memory operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// A field of the `Cpu`, at this offset from the GS base.
    Field(i32),
    /// A register's value further into the `Cpu` than the offset.
    FieldAt(u8, i32),
    /// A base register and a displacement.
    At(u8, i32),
    /// Base, index with the binary logarithm of its scale, displacement.
    Indexed(Option<u8>, u8, u8, i32),
    /// An absolute address below 2 GiB or in the top 2 GiB.
    Absolute(i32),
}

/// What the r/m field of an instruction names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rm {
    Register(u8),
    Memory(Memory),
}

/// An opcode with everything but its operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opcode {
    /// The mandatory or operand-size prefix (66, F2, F3), 0 for none.
    pub prefix: u8,
    /// A second one: F2 or F3 before 66 (CRC32 and the like) or LOCK.
    pub lock: bool,
    /// REX.W.
    pub wide: bool,
    /// Registers 4 to 7 are SPL, BPL, SIL, DIL rather than AH, CH, DH, BH.
    pub low_bytes: bool,
    /// Escape bytes and opcode.
    pub bytes: [u8; 3],
    /// How many of `bytes`.
    pub length: u8,
}

impl Opcode {
    /// A one-byte opcode on 32-bit operands.
    pub const fn narrow(opcode: u8) -> Self {
        Self {
            prefix: 0,
            lock: false,
            wide: false,
            low_bytes: false,
            bytes: [opcode, 0, 0],
            length: 1,
        }
    }

    /// A one-byte opcode on 64-bit operands.
    pub const fn wide(opcode: u8) -> Self {
        Self {
            wide: true,
            ..Self::narrow(opcode)
        }
    }

    /// An opcode after 0F.
    pub const fn escaped(opcode: u8) -> Self {
        Self {
            bytes: [0x0f, opcode, 0],
            length: 2,
            ..Self::narrow(0)
        }
    }

    /// The same with a prefix.
    pub const fn with_prefix(self, prefix: u8) -> Self {
        Self { prefix, ..self }
    }
}

/// A place in the code that jumps lead to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label(u32);

/// Code being written.
#[derive(Debug, Default)]
pub struct Assembler {
    code: Vec<u8>,
    base: u64,
    labels: Vec<u32>,
    jumps: Vec<(u32, Label)>,
}

const UNBOUND: u32 = u32::MAX;

impl Assembler {
    /// Starts anew: the code will run at `base`.
    pub fn start(&mut self, base: u64) {
        self.code.clear();
        self.labels.clear();
        self.jumps.clear();
        self.base = base;
    }

    /// Address of the next instruction.
    pub fn address(&self) -> u64 {
        self.base + self.code.len() as u64
    }

    /// Resolves the labels and returns the code.
    ///
    /// # Panics
    ///
    /// When a label that is jumped to was not bound.
    pub fn finish(&mut self) -> &[u8] {
        for &(end, label) in &self.jumps {
            let target = self.labels[label.0 as usize];
            assert_ne!(target, UNBOUND, "a jump to nowhere");
            let displacement = target.wrapping_sub(end);
            let end = end as usize;
            self.code[end - 4..end].copy_from_slice(&displacement.to_le_bytes());
        }
        self.jumps.clear();
        &self.code
    }

    /// A label to be bound later.
    pub fn label(&mut self) -> Label {
        self.labels.push(UNBOUND);
        Label(self.labels.len() as u32 - 1)
    }

    /// A label here.
    pub fn here(&mut self) -> Label {
        let label = self.label();
        self.bind(label);
        label
    }

    /// The label is here.
    pub fn bind(&mut self, label: Label) {
        self.labels[label.0 as usize] = self.code.len() as u32;
    }

    /// Whether anything jumps to the label so far.
    pub fn is_target(&self, label: Label) -> bool {
        self.jumps.iter().rev().any(|&(_, target)| target == label)
    }

    /// Appends bytes as they are.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.code.extend_from_slice(bytes);
    }

    fn displacement(&mut self, value: i32) {
        self.code.extend_from_slice(&value.to_le_bytes());
    }

    /// An instruction with a ModRM byte.
    pub fn instruction(&mut self, opcode: Opcode, reg: u8, rm: Rm) {
        let (base, index) = match rm {
            Rm::Register(register) => (register, 0),
            Rm::Memory(Memory::FieldAt(base, _) | Memory::At(base, _)) => (base, 0),
            Rm::Memory(Memory::Indexed(base, index, ..)) => (base.unwrap_or(0), index),
            Rm::Memory(Memory::Field(_) | Memory::Absolute(_)) => (0, 0),
        };
        if matches!(rm, Rm::Memory(Memory::Field(_) | Memory::FieldAt(..))) {
            self.code.push(0x65);
        }
        if opcode.lock {
            self.code.push(0xf0);
        }
        if opcode.prefix != 0 {
            self.code.push(opcode.prefix);
        }
        let rex = u8::from(opcode.wide) << 3 | reg >> 3 << 2 | index >> 3 << 1 | base >> 3;
        if rex != 0 || opcode.low_bytes {
            self.code.push(0x40 | rex);
        }
        self.code
            .extend_from_slice(&opcode.bytes[..opcode.length as usize]);
        self.modrm(reg & 7, rm);
    }

    fn modrm(&mut self, reg: u8, rm: Rm) {
        let reg = reg << 3;
        match rm {
            Rm::Register(register) => self.code.push(0xc0 | reg | register & 7),
            Rm::Memory(Memory::Field(offset) | Memory::Absolute(offset)) => {
                self.bytes(&[reg | 4, 0x25]);
                self.displacement(offset);
            }
            Rm::Memory(Memory::FieldAt(base, offset)) => {
                self.code.push(0x80 | reg | base & 7);
                if base & 7 == 4 {
                    self.code.push(0x24);
                }
                self.displacement(offset);
            }
            Rm::Memory(Memory::At(base, offset)) => {
                let mode = displacement_mode(base, offset);
                self.code.push(mode | reg | base & 7);
                if base & 7 == 4 {
                    self.code.push(0x24);
                }
                self.displacement_of(mode, offset);
            }
            Rm::Memory(Memory::Indexed(Some(base), index, scale, offset)) => {
                let mode = displacement_mode(base, offset);
                self.bytes(&[mode | reg | 4, scale << 6 | (index & 7) << 3 | base & 7]);
                self.displacement_of(mode, offset);
            }
            Rm::Memory(Memory::Indexed(None, index, scale, offset)) => {
                self.bytes(&[reg | 4, scale << 6 | (index & 7) << 3 | 5]);
                self.displacement(offset);
            }
        }
    }

    fn displacement_of(&mut self, mode: u8, offset: i32) {
        match mode {
            0x00 => {}
            0x40 => self.code.push(offset as u8),
            _ => self.displacement(offset),
        }
    }

    /// MOV r64, r64.
    pub fn copy(&mut self, to: u8, from: u8) {
        self.instruction(Opcode::wide(0x89), from, Rm::Register(to));
    }

    /// MOV r64, m64.
    pub fn load(&mut self, to: u8, from: Memory) {
        self.instruction(Opcode::wide(0x8b), to, Rm::Memory(from));
    }

    /// MOV m64, r64.
    pub fn store(&mut self, to: Memory, from: u8) {
        self.instruction(Opcode::wide(0x89), from, Rm::Memory(to));
    }

    /// LEA r64, m.
    pub fn address_of(&mut self, to: u8, memory: Memory) {
        self.instruction(Opcode::wide(0x8d), to, Rm::Memory(memory));
    }

    /// MOV r32, imm32 or MOV r64, imm64, whichever holds the value.
    pub fn constant(&mut self, to: u8, value: u64) {
        let rex = 0x40 | to >> 3;
        if let Ok(value) = u32::try_from(value) {
            if to >= 8 {
                self.code.push(rex);
            }
            self.code.push(0xb8 | to & 7);
            self.bytes(&value.to_le_bytes());
        } else {
            self.bytes(&[rex | 8, 0xb8 | to & 7]);
            self.bytes(&value.to_le_bytes());
        }
    }

    /// One of the eight operations of group 1 (ADD 0, OR 1, AND 4, SUB 5, XOR 6,
    /// CMP 7) with an immediate operand.
    pub fn group1(&mut self, operation: u8, wide: bool, rm: Rm, value: i32) {
        let short = i8::try_from(value).is_ok();
        let opcode = Opcode {
            wide,
            ..Opcode::narrow(if short { 0x83 } else { 0x81 })
        };
        self.instruction(opcode, operation, rm);
        if short {
            self.code.push(value as u8);
        } else {
            self.displacement(value);
        }
    }

    /// NOPs up to a multiple of 16 bytes from the start.
    pub fn align(&mut self) {
        while !self.code.len().is_multiple_of(16) {
            self.code.push(0x90);
        }
    }

    /// The address after [`Assembler::align`].
    pub fn align_address(&mut self) -> u64 {
        self.align();
        self.address()
    }

    /// PUSH r64.
    pub fn push(&mut self, register: u8) {
        if register >= 8 {
            self.code.push(0x41);
        }
        self.code.push(0x50 | register & 7);
    }

    /// POP r64.
    pub fn pop(&mut self, register: u8) {
        if register >= 8 {
            self.code.push(0x41);
        }
        self.code.push(0x58 | register & 7);
    }

    /// ADD r64, m64.
    pub fn load_add(&mut self, to: u8, from: Memory) {
        self.instruction(Opcode::wide(0x03), to, Rm::Memory(from));
    }

    /// A shift (SHL 4, SHR 5, SAR 7) by a constant.
    pub fn shift(&mut self, operation: u8, wide: bool, register: u8, count: u8) {
        let opcode = Opcode {
            wide,
            ..Opcode::narrow(0xc1)
        };
        self.instruction(opcode, operation, Rm::Register(register));
        self.code.push(count);
    }

    /// JMP to a label.
    pub fn jump(&mut self, label: Label) {
        self.bytes(&[0xe9, 0, 0, 0, 0]);
        self.jumps.push((self.code.len() as u32, label));
    }

    /// Jcc to a label.
    pub fn jump_if(&mut self, condition: u8, label: Label) {
        self.bytes(&[0x0f, 0x80 | condition, 0, 0, 0, 0]);
        self.jumps.push((self.code.len() as u32, label));
    }

    /// JMP to an address within 2 GiB.
    pub fn jump_to(&mut self, target: u64) {
        self.code.push(0xe9);
        self.relative(target);
    }

    /// CALL of an address within 2 GiB.
    pub fn call_to(&mut self, target: u64) {
        self.code.push(0xe8);
        self.relative(target);
    }

    /// Jcc to an address within 2 GiB.
    pub fn jump_if_to(&mut self, condition: u8, target: u64) {
        self.bytes(&[0x0f, 0x80 | condition]);
        self.relative(target);
    }

    fn relative(&mut self, target: u64) {
        let displacement = target.wrapping_sub(self.address() + 4);
        self.displacement(displacement as i32);
    }
}

fn displacement_mode(base: u8, offset: i32) -> u8 {
    match offset {
        0 if base & 7 != 5 => 0x00,
        -128..=127 => 0x40,
        _ => 0x80,
    }
}

#[cfg(test)]
mod tests {
    use super::register::*;
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, Formatter, IntelFormatter};

    fn text(code: &[u8]) -> Vec<String> {
        let mut formatter = IntelFormatter::new();
        Decoder::with_ip(64, code, 0x1000, DecoderOptions::NONE)
            .into_iter()
            .map(|instruction| {
                let mut text = String::new();
                formatter.format(&instruction, &mut text);
                text
            })
            .collect()
    }

    #[test]
    fn writes_what_iced_reads() {
        let mut assembler = Assembler::default();
        assembler.start(0x1000);
        assembler.load(R10, Memory::Field(0x40));
        assembler.store(Memory::FieldAt(R11, 0x100), RAX);
        assembler.load(R13, Memory::At(R13, 0));
        assembler.load(RAX, Memory::At(R12, 0));
        assembler.address_of(R10, Memory::Indexed(Some(RBP), R12, 3, -4));
        assembler.address_of(R10, Memory::Indexed(None, RDI, 1, 0x1000));
        assembler.constant(R11, 7);
        assembler.constant(RSI, 1 << 40);
        assembler.group1(7, true, Rm::Register(R10), 4088);
        assembler.group1(4, false, Rm::Register(R11), 0x7fe0);
        let label = assembler.here();
        assembler.jump_if(condition::ABOVE, label);
        assert_eq!(
            text(assembler.finish()),
            [
                "mov r10,gs:[40h]",
                "mov gs:[r11+100h],rax",
                "mov r13,[r13]",
                "mov rax,[r12]",
                "lea r10,[rbp+r12*8-4]",
                "lea r10,[rdi*2+1000h]",
                "mov r11d,7",
                "mov rsi,10000000000h",
                "cmp r10,0FF8h",
                "and r11d,7FE0h",
                "ja 0000000000001044h",
            ]
        );
    }
}
