//! The templates of instructions that do not branch.

use std::mem::offset_of;

use iced_x86::{Instruction, Mnemonic, OpKind, Register};
use weft_vcpu::Access;

use super::Translation;
use crate::cpu::{Cpu, segment};
use crate::jit::assembler::register::*;
use crate::jit::assembler::{Label, Memory, Opcode, Rm, condition};
use crate::jit::select::{Field, MemoryUse};
use crate::jit::select::{STACK_READ, STACK_WRITE};
use crate::jit::stubs::{self, host, register_field};

impl<'a> Translation<'a> {
    pub fn opcode(&self, index: usize) -> (Opcode, &'a [u8]) {
        match &self.items[index].encoding {
            Some(encoding) => (encoding.opcode, encoding.immediate),
            None => unreachable!("every template but Handler is selected by its encoding"),
        }
    }

    pub fn memory(&mut self, index: usize, reg: Field, operand: MemoryUse) {
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

    pub fn absolute(&mut self, index: usize, load: bool, operand: MemoryUse) {
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

    pub fn registers(&mut self, index: usize, reg: Field, rm: Field) {
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

    pub fn lea(&mut self, index: usize, register: u8) {
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

    pub fn move_constant(&mut self, index: usize, register: u8) {
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

    pub fn move_partial_constant(&mut self, index: usize, field: Field) {
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

    pub fn swap_bytes(&mut self, index: usize, register: u8) {
        let wide = self.items[index].instruction.op0_register().size() == 8;
        let to = self.value(register, R10);
        self.a
            .bytes(&[0x40 | u8::from(wide) << 3 | to >> 3, 0x0f, 0xc8 | to & 7]);
        if host(register).is_none() {
            self.a.store(register_field(register), to);
        }
    }

    pub fn exchange(&mut self, index: usize, register: u8) {
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
    pub fn divide(&mut self, index: usize, signed: bool) {
        let (opcode, _) = self.opcode(index);
        let instruction = self.items[index].instruction;
        let wide = opcode.wide;
        let (slow, divisor) = if instruction.op0_kind() == OpKind::Memory {
            let operand = MemoryUse {
                size: if wide { 8 } else { 4 },
                access: Access::Read,
                alignment: 1,
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
        // Undefined flags are what the host makes of the old ones, as in the
        // handler: the checks above have changed the host's.
        let needed = self.needed[index] != 0;
        let divisor = if needed && divisor == R11 {
            a.copy(R10, R11);
            R10
        } else {
            divisor
        };
        if needed {
            stubs::load_flags(a);
        }
        let operation = if signed { 7 } else { 6 };
        a.instruction(sized(0xf7), operation, Rm::Register(divisor));
        if needed {
            self.after(index);
        }
        self.finish_slow(index, slow);
    }

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

    pub fn push_register(&mut self, index: usize, register: u8) {
        let (slow, distance) = self.push_address(index);
        let value = self.value(register, R11);
        self.a.store(Memory::At(R10, distance), value);
        self.move_stack(-8);
        self.finish_slow(index, slow);
    }

    pub fn push_constant(&mut self, index: usize, value: i32) {
        let (slow, distance) = self.push_address(index);
        let to = Rm::Memory(Memory::At(R10, distance));
        self.a.instruction(Opcode::wide(0xc7), 0, to);
        self.a.bytes(&value.to_le_bytes());
        self.move_stack(-8);
        self.finish_slow(index, slow);
    }

    pub fn push_memory(&mut self, index: usize) {
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

    pub fn pop(&mut self, index: usize, register: u8) {
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

    pub fn leave(&mut self, index: usize) {
        let (slow, distance) = self.pop_address(index, RBP);
        self.a.address_of(R15, Memory::At(RBP, 8));
        self.a.load(RBP, Memory::At(R10, distance));
        self.finish_slow(index, slow);
    }
}

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
            | Pextrb
            | Pextrd
            | Pextrq
            | Extractps
            | Popcnt
    ) && instruction.op0_kind() == OpKind::Register
        && instruction.op0_register().is_gpr()
        && instruction.op0_register().size() >= 4
}
