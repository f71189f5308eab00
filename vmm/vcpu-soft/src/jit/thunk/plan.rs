//! What an instruction reads and changes, and its thunk.

use iced_x86::{
    EncodingKind, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
    RflagsBits,
};
use weft_vcpu::{Access, CpuModel};

use super::class::{Unit, is_aligned_move, needs_alignment, unit_of, waits};
use super::field::{FLAGS, FPU, at, field, register_offset};
use super::vector::{Vectors, is_written};
use super::{Needs, ThunkMemory, x87};
use crate::jit::assembler::register::*;
use crate::jit::assembler::{Assembler, Opcode};

/// The host's registers that stand for the guest's, in the order of operands.
const GENERALS: [u8; 3] = [RAX, RCX, R8];
/// The arithmetic flags as iced counts them, which counts C0 to C3 of the x87
/// status word as well.
const ARITHMETIC_FLAGS: u32 = RflagsBits::OF
    | RflagsBits::SF
    | RflagsBits::ZF
    | RflagsBits::AF
    | RflagsBits::CF
    | RflagsBits::PF;

/// A general register among its operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct General {
    /// The guest's register, and the host's in its place.
    pub(super) number: u8,
    host: u8,
    size: usize,
    read: bool,
    written: bool,
}

/// What an instruction reads and changes.
pub(super) struct Plan {
    unit: Unit,
    pub(super) replaced: Instruction,
    pub(super) memory: Option<ThunkMemory>,
    pub(super) generals: Vec<General>,
    pub(super) vectors: Vectors,
    /// The lengths of its strings are in RAX and RDX.
    lengths: bool,
    /// RCX is its result.
    index: bool,
    /// MULX: RDX is an operand that it does not name.
    factor: bool,
    flags: bool,
    /// FCMOVcc: it has no general register.
    reads_flags: bool,
    implicit_address: bool,
    pub(super) waits: bool,
}

impl Plan {
    pub(super) fn of(
        instruction: &Instruction,
        model: CpuModel,
        information: &mut InstructionInfoFactory,
    ) -> Option<Self> {
        use Mnemonic::*;
        let unit = unit_of(instruction, model)?;
        let mnemonic = instruction.mnemonic();
        let information = information.info(instruction);
        let mut plan = Self {
            unit,
            replaced: *instruction,
            memory: None,
            generals: Vec::new(),
            vectors: Vectors::of(information.used_registers(), unit, mnemonic),
            lengths: matches!(
                mnemonic,
                Pcmpestri
                    | Pcmpestri64
                    | Pcmpestrm
                    | Pcmpestrm64
                    | Vpcmpestri
                    | Vpcmpestri64
                    | Vpcmpestrm
                    | Vpcmpestrm64
            ),
            index: matches!(
                mnemonic,
                Pcmpestri | Pcmpestri64 | Pcmpistri | Vpcmpestri | Vpcmpestri64 | Vpcmpistri
            ),
            factor: mnemonic == Mulx,
            flags: instruction.rflags_modified() & ARITHMETIC_FLAGS != 0,
            // What the manual calls undefined may be what it was.
            reads_flags: instruction.rflags_read() & ARITHMETIC_FLAGS != 0 || unit == Unit::General,
            implicit_address: false,
            waits: matches!(unit, Unit::X87 | Unit::X87Control) && waits(mnemonic),
        };
        for operand in 0..instruction.op_count() {
            let access = information.op_access(operand);
            match instruction.op_kind(operand) {
                OpKind::Register => plan.register(operand, access),
                OpKind::Memory => {
                    plan.memory = Some(memory_of(instruction, access));
                    let replaced = &mut plan.replaced;
                    replaced.set_memory_base(Register::RSI);
                    replaced.set_memory_index(Register::None);
                    replaced.set_memory_index_scale(1);
                    replaced.set_memory_displacement64(0);
                    replaced.set_memory_displ_size(0);
                    replaced.set_segment_prefix(Register::None);
                }
                OpKind::MemorySegRDI | OpKind::MemorySegEDI | OpKind::MemorySegDI => {
                    plan.memory = Some(memory_of(instruction, access));
                    plan.implicit_address = true;
                    plan.replaced.set_segment_prefix(Register::None);
                    plan.replaced.set_op_kind(operand, OpKind::MemorySegRDI);
                }
                _ => {}
            }
        }
        Some(plan)
    }

    fn register(&mut self, operand: u32, access: OpAccess) {
        let register = self.replaced.op_register(operand);
        if !register.is_gpr() {
            return;
        }
        let number = register.full_register().number() as u8;
        let known = self
            .generals
            .iter()
            .position(|general| general.number == number);
        let place = known.unwrap_or_else(|| {
            self.generals.push(General {
                number,
                host: GENERALS[self.generals.len()],
                size: register.size(),
                read: false,
                written: false,
            });
            self.generals.len() - 1
        });
        let general = &mut self.generals[place];
        general.read |= access != OpAccess::Write;
        general.written |= is_written(access);
        let first = match register.size() {
            8 => Register::RAX,
            4 => Register::EAX,
            2 => Register::AX,
            _ => Register::AL,
        };
        let replacement = first + u32::from(general.host);
        self.replaced.set_op_register(operand, replacement);
    }

    pub(super) fn needs(&self, instruction: &Instruction) -> Needs {
        match self.unit {
            Unit::Sse => Needs::Sse,
            Unit::Avx => Needs::Avx,
            Unit::X87 | Unit::X87Control => Needs::X87,
            Unit::General if instruction.encoding() == EncodingKind::VEX => Needs::Protected,
            Unit::General => Needs::Nothing,
        }
    }

    /// The thunk, with `body` the instruction's encoding.
    pub(super) fn assemble(&self, a: &mut Assembler, body: &[u8], address: u64) {
        a.start(address);
        match self.unit {
            Unit::Sse | Unit::Avx => self.vectors.load(a),
            Unit::General => {}
            Unit::X87 => x87::enter(a),
            // FXRSTOR64 [rdi + FPU].
            Unit::X87Control => a.instruction(
                Opcode {
                    wide: true,
                    ..Opcode::escaped(0xae)
                },
                1,
                field(FPU),
            ),
        }
        if self.reads_flags {
            // movzx eax, word [flags]; add al, 127; sahf
            a.instruction(Opcode::escaped(0xb7), RAX, field(FLAGS));
            a.bytes(&[0x04, 0x7f, 0x9e]);
        }
        for general in self.generals.iter().filter(|g| g.read || g.size < 4) {
            a.load(general.host, at(register_offset(general.number)));
        }
        if self.lengths {
            a.load(RAX, at(register_offset(RAX)));
        }
        if self.lengths || self.factor {
            a.load(RDX, at(register_offset(RDX)));
        }
        if self.implicit_address {
            a.copy(R8, RDI);
            a.copy(RDI, RSI);
        }
        a.bytes(body);
        if self.implicit_address {
            a.copy(RDI, R8);
        }
        match self.unit {
            Unit::Sse | Unit::Avx => self.leave_sse(a),
            Unit::General => self.store_results(a),
            Unit::X87 => self.leave_x87(a),
            Unit::X87Control => {
                self.store_general(a);
                x87::save(a);
            }
        }
        // xor eax, eax; ret
        a.bytes(&[0x31, 0xc0, 0xc3]);
    }

    fn store_general(&self, a: &mut Assembler) {
        for general in self.generals.iter().filter(|general| general.written) {
            a.store(at(register_offset(general.number)), general.host);
        }
        if self.index {
            a.store(at(register_offset(RCX)), RCX);
        }
    }

    fn store_flags(&self, a: &mut Assembler) {
        if self.flags {
            // lahf; seto al
            a.bytes(&[0x9f, 0x0f, 0x90, 0xc0]);
            a.instruction(Opcode::narrow(0x89).with_prefix(0x66), RAX, field(FLAGS));
        }
    }

    fn leave_sse(&self, a: &mut Assembler) {
        if !self.vectors.rounds {
            self.store_results(a);
            return;
        }
        // Flags first: the check changes the host's.
        if self.flags {
            // lahf; seto al; mov r9, rax
            a.bytes(&[0x9f, 0x0f, 0x90, 0xc0]);
            a.copy(8 + 1, RAX);
        }
        self.vectors.check_exceptions(a);
        if self.flags {
            a.instruction(Opcode::narrow(0x89).with_prefix(0x66), 8 + 1, field(FLAGS));
        }
        self.vectors.store(a);
        self.store_general(a);
    }

    fn store_results(&self, a: &mut Assembler) {
        self.vectors.store(a);
        self.store_general(a);
        self.store_flags(a);
    }

    fn leave_x87(&self, a: &mut Assembler) {
        self.store_general(a);
        self.store_flags(a);
        x87::leave(a);
    }
}

fn memory_of(instruction: &Instruction, access: OpAccess) -> ThunkMemory {
    let size = instruction.memory_size().size() as u16;
    ThunkMemory {
        size,
        access: if is_written(access) {
            Access::Write
        } else {
            Access::Read
        },
        aligned: match instruction.encoding() {
            EncodingKind::VEX => is_aligned_move(instruction.mnemonic()),
            _ => size == 16 && needs_alignment(instruction.mnemonic()),
        },
    }
}
