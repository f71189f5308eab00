//! Thunks: one SSE, MMX or x87 instruction of the guest, run by the host.
//!
//! A thunk loads what its instruction reads (XMM registers, the whole x87 state,
//! a general register) from the `Cpu`, runs the instruction with its memory
//! operand at a host address, and stores what it changed. The guest's MXCSR or
//! x87 control word is in force meanwhile, but with every exception masked: the
//! host must not trap. An exception that the guest has unmasked is found in the
//! status flags afterwards.
//!
//! Thunks hold no guest address and are shared by all instructions of the same
//! encoding.

use std::collections::HashMap;
use std::mem::offset_of;

use iced_x86::{
    Code, CpuidFeature, Encoder, EncodingKind, Instruction, InstructionInfo,
    InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register, RflagsBits,
};
use weft_vcpu::{Access, CpuModel};

use super::arena::{Arena, ArenaFull};
use super::assembler::register::*;
use super::assembler::{Assembler, Memory, Opcode, Rm, condition};
use crate::cpu::Cpu;
use crate::model::offers;

/// Bytes of code for thunks: some 100 each, and a Debian user land has about a
/// thousand different ones.
const ARENA_SIZE: usize = 4 << 20;

/// MXCSR with all exceptions masked, round to nearest: what Rust code expects.
pub const HOST_MXCSR: u32 = 0x1f80;
/// The exception masks in MXCSR.
const MXCSR_MASKS: i32 = 0x1f80;
/// The host's registers that stand for the guest's, in the order of operands.
const GENERALS: [u8; 3] = [RAX, RCX, R8];
/// The exception flags in MXCSR, and the masks of the x87 control word.
const EXCEPTIONS: i32 = 0x3f;

const FPU: i32 = offset_of!(Cpu, fpu) as i32;
const MXCSR: i32 = FPU + 24;
const FLAGS: i32 = offset_of!(Cpu, flags) as i32;

/// The arithmetic flags as iced counts them, which counts C0 to C3 of the x87
/// status word as well.
const ARITHMETIC_FLAGS: u32 = RflagsBits::OF
    | RflagsBits::SF
    | RflagsBits::ZF
    | RflagsBits::AF
    | RflagsBits::CF
    | RflagsBits::PF;

/// Runs the instruction; the pointer is to its memory operand.
pub type ThunkCode = unsafe extern "C" fn(*mut Cpu, *mut u8) -> u32;

/// The instruction was executed.
pub const DONE: u32 = 0;
/// Nothing was changed but the exception flags in MXCSR: raise #XM.
pub const SIMD_EXCEPTION: u32 = 1;

/// An instruction's memory operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThunkMemory {
    /// Bytes.
    pub size: u16,
    /// Whether the instruction writes it.
    pub access: Access,
    /// Whether an address that is no multiple of 16 raises #GP(0).
    pub aligned: bool,
}

/// One instruction, ready to run.
#[derive(Clone, Copy, Debug)]
pub struct Thunk {
    /// See [`ThunkCode`].
    pub code: ThunkCode,
    /// Its memory operand, if any.
    pub memory: Option<ThunkMemory>,
    /// What must be switched on.
    pub needs: Needs,
    /// A pending x87 exception (FSW.ES) raises #MF before it.
    pub waits: bool,
}

/// What an instruction needs that a guest can switch off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// x87 (MMX does): CR0.EM and CR0.TS raise #NM.
    X87,
    Sse,
    Avx,
    /// Protected mode, as VEX prefixes do.
    Protected,
    Nothing,
}

/// All thunks of a vCPU.
#[derive(Debug)]
pub struct Thunks {
    arena: Arena,
    known: HashMap<Vec<u8>, Thunk>,
    assembler: Assembler,
    information: InstructionInfoFactory,
}

impl Thunks {
    /// An empty collection.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            arena: Arena::new(ARENA_SIZE)?,
            known: HashMap::new(),
            assembler: Assembler::default(),
            information: InstructionInfoFactory::new(),
        })
    }

    /// Forgets all thunks. The caller has dropped every block first.
    pub fn flush(&mut self) {
        self.known.clear();
        self.arena.reset(0);
    }

    /// The thunk of an instruction; `None` when it is not one of `model`'s on SSE,
    /// MMX or x87 registers, or is one whose work is not arithmetic (FXSAVE, LDMXCSR).
    pub fn get(
        &mut self,
        instruction: &Instruction,
        model: CpuModel,
    ) -> Result<Option<Thunk>, ArenaFull> {
        let Some(plan) = Plan::of(instruction, model, &mut self.information) else {
            return Ok(None);
        };
        let mut encoder = Encoder::new(64);
        if encoder.encode(&plan.replaced, 0).is_err() {
            return Ok(None);
        }
        let mut key = encoder.take_buffer();
        let body = key.len();
        // The guest's registers are part of the thunk but not of the encoding.
        key.extend(plan.generals.iter().map(|general| general.number));
        key.extend(plan.loaded.to_le_bytes());
        if let Some(&thunk) = self.known.get(&key) {
            return Ok(Some(thunk));
        }
        plan.assemble(&mut self.assembler, &key[..body], self.arena.next());
        let address = self.arena.push(self.assembler.finish())?;
        super::arena::serialize();
        // SAFETY: the code at `address` was just assembled to this convention.
        let code = unsafe { std::mem::transmute::<usize, ThunkCode>(address as usize) };
        let thunk = Thunk {
            code,
            memory: plan.memory,
            needs: plan.needs(instruction),
            waits: plan.waits,
        };
        self.known.insert(key, thunk);
        Ok(Some(thunk))
    }
}

/// Which state an instruction works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// XMM registers.
    Sse,
    /// XMM and YMM registers, by VEX encodings.
    Avx,
    /// General registers, more than one.
    General,
    /// The x87 or MMX registers, perhaps XMM as well (MOVQ2DQ).
    X87,
    /// The x87 control and status words themselves: they are as the guest has
    /// them, and no exception can arise.
    X87Control,
}

#[derive(Clone, Copy, Debug)]
struct General {
    /// The guest's register, and the host's in its place.
    number: u8,
    host: u8,
    size: usize,
    read: bool,
    written: bool,
}

struct Plan {
    unit: Unit,
    replaced: Instruction,
    memory: Option<ThunkMemory>,
    generals: Vec<General>,
    /// XMM registers that are read or only partly written; that are written.
    loaded: u16,
    stored: u16,
    /// The lengths of its strings are in RAX and RDX.
    lengths: bool,
    /// RCX is its result.
    index: bool,
    /// MULX: RDX is an operand that it does not name.
    factor: bool,
    flags: bool,
    /// FCMOVcc: it has no general register.
    reads_flags: bool,
    rounds: bool,
    implicit_address: bool,
    waits: bool,
}

impl Plan {
    fn of(
        instruction: &Instruction,
        model: CpuModel,
        information: &mut InstructionInfoFactory,
    ) -> Option<Self> {
        use Mnemonic::*;
        let unit = unit_of(instruction, model)?;
        let mnemonic = instruction.mnemonic();
        let mut plan = Self {
            unit,
            replaced: *instruction,
            memory: None,
            generals: Vec::new(),
            loaded: 0,
            stored: 0,
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
            rounds: match unit {
                Unit::Sse => raises_simd_exceptions(mnemonic),
                Unit::Avx => !is_string(mnemonic),
                _ => false,
            },
            implicit_address: false,
            waits: matches!(unit, Unit::X87 | Unit::X87Control) && waits(mnemonic),
        };
        let information = information.info(instruction);
        plan.vectors(information);
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

    /// The XMM registers, also those that are not named (of BLENDVPS, PCMPESTRM).
    fn vectors(&mut self, information: &InstructionInfo) {
        let used = information.used_registers().iter();
        for used in used.filter(|used| used.register().is_vector_register()) {
            let bit = 1 << (used.register().number() & 15);
            self.loaded |= bit;
            if is_written(used.access()) {
                self.stored |= bit;
            }
        }
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

    fn needs(&self, instruction: &Instruction) -> Needs {
        match self.unit {
            Unit::Sse => Needs::Sse,
            Unit::Avx => Needs::Avx,
            Unit::X87 | Unit::X87Control => Needs::X87,
            Unit::General if instruction.encoding() == EncodingKind::VEX => Needs::Protected,
            Unit::General => Needs::Nothing,
        }
    }

    /// The thunk, with `body` the instruction's encoding.
    fn assemble(&self, a: &mut Assembler, body: &[u8], address: u64) {
        a.start(address);
        match self.unit {
            Unit::Sse | Unit::Avx => self.enter_sse(a),
            Unit::General => {}
            Unit::X87 => enter_x87(a),
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
                save_x87(a);
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

    fn enter_sse(&self, a: &mut Assembler) {
        for number in (0..16).filter(|n| self.loaded >> n & 1 != 0) {
            a.instruction(Opcode::escaped(0x28), number, field(xmm_offset(number)));
            if self.unit == Unit::Avx {
                high_half(a, INSERT, number);
            }
        }
        if self.rounds {
            // The guest's MXCSR without exception flags and with all masks.
            a.instruction(Opcode::narrow(0x8b), RCX, field(MXCSR));
            a.group1(1, false, Rm::Register(RCX), MXCSR_MASKS);
            a.group1(4, false, Rm::Register(RCX), !EXCEPTIONS);
            a.instruction(Opcode::narrow(0x89), RCX, Rm::Memory(Memory::At(RSP, -8)));
            a.instruction(Opcode::escaped(0xae), 2, Rm::Memory(Memory::At(RSP, -8)));
        }
    }

    fn leave_sse(&self, a: &mut Assembler) {
        if !self.rounds {
            self.store_results(a);
            return;
        }
        // Flags first: the checks below change the host's.
        if self.flags {
            // lahf; seto al; mov r9, rax
            a.bytes(&[0x9f, 0x0f, 0x90, 0xc0]);
            a.copy(8 + 1, RAX);
        }
        a.instruction(Opcode::escaped(0xae), 3, Rm::Memory(Memory::At(RSP, -8)));
        a.instruction(Opcode::narrow(0x8b), RDX, Rm::Memory(Memory::At(RSP, -8)));
        a.group1(4, false, Rm::Register(RDX), EXCEPTIONS);
        a.instruction(Opcode::narrow(0x8b), RCX, field(MXCSR));
        a.instruction(Opcode::narrow(0x09), RDX, field(MXCSR));
        a.instruction(Opcode::narrow(0xc7), 0, Rm::Memory(Memory::At(RSP, -8)));
        a.bytes(&HOST_MXCSR.to_le_bytes());
        a.instruction(Opcode::escaped(0xae), 2, Rm::Memory(Memory::At(RSP, -8)));
        // Raised and not masked: shr ecx, 7; not ecx; and ecx, edx; jz.
        a.bytes(&[0xc1, 0xe9, 7, 0xf7, 0xd1, 0x21, 0xd1]);
        let fine = a.label();
        a.jump_if(condition::EQUAL, fine);
        a.constant(RAX, u64::from(SIMD_EXCEPTION));
        self.clear_high_halves(a);
        a.bytes(&[0xc3]);
        a.bind(fine);
        if self.flags {
            a.instruction(Opcode::narrow(0x89).with_prefix(0x66), 8 + 1, field(FLAGS));
        }
        self.store_vectors(a);
        self.store_general(a);
    }

    fn store_vectors(&self, a: &mut Assembler) {
        for number in (0..16).filter(|n| self.stored >> n & 1 != 0) {
            a.instruction(Opcode::escaped(0x29), number, field(xmm_offset(number)));
            if self.unit == Unit::Avx {
                high_half(a, EXTRACT, number);
            }
        }
        self.clear_high_halves(a);
    }

    /// SSE instructions of the host are slow where upper halves are in use.
    fn clear_high_halves(&self, a: &mut Assembler) {
        if self.unit == Unit::Avx {
            // vzeroupper
            a.bytes(&[0xc5, 0xf8, 0x77]);
        }
    }

    fn store_results(&self, a: &mut Assembler) {
        self.store_vectors(a);
        self.store_general(a);
        self.store_flags(a);
    }

    fn leave_x87(&self, a: &mut Assembler) {
        self.store_general(a);
        self.store_flags(a);
        save_x87(a);
        // The guest's control word again, kept in R9 by `enter_x87`.
        a.instruction(Opcode::narrow(0x89).with_prefix(0x66), 8 + 1, field(FPU));
        // MXCSR again, with what flags were added.
        a.instruction(Opcode::narrow(0x8b), RCX, field(MXCSR));
        a.group1(4, false, Rm::Register(RCX), EXCEPTIONS);
        a.instruction(Opcode::narrow(0x09), R10, Rm::Register(RCX));
        a.instruction(Opcode::narrow(0x89), RCX, field(MXCSR));
        // An exception that it does not mask sets ES and B:
        // mov ecx, [status]; mov edx, r9d; not edx; and edx, ecx; and edx, 3f; jz
        a.instruction(Opcode::escaped(0xb7), RCX, field(FPU + 2));
        a.instruction(Opcode::narrow(0x89), 8 + 1, Rm::Register(RDX));
        a.bytes(&[0xf7, 0xd2, 0x21, 0xca, 0x83, 0xe2, 0x3f]);
        let none = a.label();
        a.jump_if(condition::EQUAL, none);
        a.group1(1, false, Rm::Register(RCX), 0x8080);
        a.instruction(Opcode::narrow(0x89).with_prefix(0x66), RCX, field(FPU + 2));
        a.bind(none);
    }
}

/// VINSERTF128 and VEXTRACTF128.
const INSERT: u8 = 0x18;
const EXTRACT: u8 = 0x19;

/// One of the two between the upper half of a YMM register and its place in the
/// `Cpu`.
fn high_half(a: &mut Assembler, opcode: u8, number: u8) {
    let offset = offset_of!(Cpu, ymm_high) as i32 + 16 * i32::from(number);
    // The other source of an insertion is the register itself; an extraction has none.
    let source = if opcode == INSERT { number } else { 0 };
    a.bytes(&[
        0xc4,
        (!number & 8) << 4 | 0x63,
        (!source & 15) << 3 | 0x05,
        opcode,
        0x87 | (number & 7) << 3,
    ]);
    a.bytes(&offset.to_le_bytes());
    a.bytes(&[1]);
}

/// Loads the x87 state with every exception masked and none pending.
fn enter_x87(a: &mut Assembler) {
    a.instruction(Opcode::escaped(0xb7), 8 + 1, field(FPU));
    a.instruction(Opcode::narrow(0x83).with_prefix(0x66), 1, field(FPU));
    a.bytes(&[EXCEPTIONS as u8]);
    // and word [status], 7f7f
    a.instruction(Opcode::narrow(0x81).with_prefix(0x66), 4, field(FPU + 2));
    a.bytes(&0x7f7f_u16.to_le_bytes());
    // The same for MXCSR, which the conversions between MMX and XMM use.
    a.instruction(Opcode::narrow(0x8b), R10, field(MXCSR));
    a.group1(1, false, field(MXCSR), MXCSR_MASKS);
    // fxrstor64
    let wide = Opcode {
        wide: true,
        ..Opcode::escaped(0xae)
    };
    a.instruction(wide, 1, field(FPU));
}

/// Stores the x87 state, and gives the host a clean one. The instruction and
/// data pointers would be the host's: they read as zero.
fn save_x87(a: &mut Assembler) {
    let wide = Opcode {
        wide: true,
        ..Opcode::escaped(0xae)
    };
    a.instruction(wide, 0, field(FPU));
    for pointer in [FPU + 8, FPU + 16] {
        a.instruction(Opcode::wide(0xc7), 0, field(pointer));
        a.bytes(&[0; 4]);
    }
    // fninit; then the host's MXCSR.
    a.bytes(&[0xdb, 0xe3]);
    a.instruction(Opcode::narrow(0xc7), 0, Rm::Memory(Memory::At(RSP, -8)));
    a.bytes(&HOST_MXCSR.to_le_bytes());
    a.instruction(Opcode::escaped(0xae), 2, Rm::Memory(Memory::At(RSP, -8)));
}

fn at(offset: i32) -> Memory {
    Memory::At(RDI, offset)
}

fn field(offset: i32) -> Rm {
    Rm::Memory(at(offset))
}

fn register_offset(number: u8) -> i32 {
    offset_of!(Cpu, registers) as i32 + 8 * i32::from(number)
}

/// Where an XMM register is in the `Cpu`.
pub fn xmm_offset(number: u8) -> i32 {
    FPU + 160 + 16 * i32::from(number)
}

fn is_written(access: OpAccess) -> bool {
    !matches!(access, OpAccess::Read | OpAccess::CondRead)
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

/// Whether a 16-byte operand at an address that is no multiple of 16 faults
/// (Intel SDM volume 1, 10.4.1.1).
pub fn needs_alignment(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    !matches!(
        mnemonic,
        Movups
            | Movupd
            | Movdqu
            | Lddqu
            | Maskmovdqu
            | Maskmovq
            | Pcmpestri
            | Pcmpestri64
            | Pcmpestrm
            | Pcmpestrm64
            | Pcmpistri
            | Pcmpistrm
    )
}

/// Whether a VEX-encoded instruction's operand must be at a multiple of its size
/// (Intel SDM volume 1, 14.9): all others may be anywhere.
fn is_aligned_move(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Vmovaps | Vmovapd | Vmovdqa | Vmovntps | Vmovntpd | Vmovntdq | Vmovntdqa
    )
}

/// The comparisons of strings, of which some give a general register.
fn is_string(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Vpcmpestri | Vpcmpestri64 | Vpcmpestrm | Vpcmpestrm64 | Vpcmpistri | Vpcmpistrm
    )
}

/// The unit that runs a VEX-encoded instruction, or one on general registers that
/// came with them.
fn later_unit(instruction: &Instruction) -> Option<Unit> {
    use CpuidFeature::{AES, AVX, AVX2, BMI1, BMI2, F16C, FMA, LZCNT, MOVBE, PCLMULQDQ};
    let features = instruction.cpuid_features();
    let all = |known: &[CpuidFeature]| features.iter().all(|feature| known.contains(feature));
    if all(&[BMI1, BMI2, LZCNT, MOVBE]) {
        Some(Unit::General)
    } else if all(&[AVX, AVX2, F16C, FMA, AES, PCLMULQDQ]) {
        Some(Unit::Avx)
    } else {
        None
    }
}

/// The unit that runs an instruction; `None` when no thunk can.
fn unit_of(instruction: &Instruction, model: CpuModel) -> Option<Unit> {
    use CpuidFeature::{
        AES, FPU, FPU287, FPU387, MMX, PCLMULQDQ, SSE, SSE2, SSE3, SSE4_1, SSE4_2, SSSE3,
    };
    use Mnemonic::*;
    let features = instruction.cpuid_features();
    let vex = instruction.encoding() == EncodingKind::VEX;
    if vex || matches!(instruction.mnemonic(), Tzcnt | Lzcnt | Movbe) {
        let unit = later_unit(instruction)?;
        return offers(model, instruction).then_some(unit);
    }
    let known = |feature: &CpuidFeature| {
        matches!(
            feature,
            SSE | SSE2
                | SSE3
                | SSSE3
                | SSE4_1
                | SSE4_2
                | AES
                | PCLMULQDQ
                | MMX
                | FPU
                | FPU287
                | FPU387
                | CpuidFeature::CMOV
        )
    };
    // FWAIT counts as an instruction of the 8086.
    let is_known = instruction.mnemonic() == Wait || features.iter().all(known);
    if !is_known || !offers(model, instruction) {
        return None;
    }
    let registers = (0..instruction.op_count())
        .filter(|&operand| instruction.op_kind(operand) == OpKind::Register)
        .map(|operand| instruction.op_register(operand));
    let (mut mm, mut xmm) = (false, false);
    for register in registers {
        mm |= register.is_mm();
        xmm |= register.is_xmm();
    }
    let x87 = features
        .iter()
        .any(|feature| matches!(feature, FPU | FPU287 | FPU387));
    match instruction.mnemonic() {
        // They fault, or their operands are not in the x87 or SSE state alone.
        Fxsave | Fxsave64 | Fxrstor | Fxrstor64 | Ldmxcsr | Stmxcsr => None,
        // State in formats that depend on the mode of the CPU.
        Fldenv | Fldcw | Fnstenv | Fnstcw | Fnstsw | Fnsave | Frstor | Fninit | Fnclex => {
            Some(Unit::X87Control)
        }
        // With a memory operand too, they switch the x87 state to MMX.
        Emms | Wait | Cvtpi2ps | Cvtpi2pd | Fisttp => Some(Unit::X87),
        _ if mm || x87 => Some(Unit::X87),
        _ if xmm => Some(Unit::Sse),
        // From memory to a general register.
        Cvtss2si | Cvtsd2si | Cvttss2si | Cvttsd2si => Some(Unit::Sse),
        _ => None,
    }
}

/// Whether an x87 or MMX instruction raises #MF for a pending exception
/// (Intel SDM volume 1, 8.3.12).
fn waits(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    !matches!(
        mnemonic,
        Fninit | Fnstenv | Fnsave | Fnstsw | Fnstcw | Fnclex
    )
}

/// Whether an SSE instruction may set exception flags in MXCSR or is rounded by
/// it (Intel SDM volume 1, 11.5.2).
pub fn raises_simd_exceptions(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Addps
            | Addpd
            | Addss
            | Addsd
            | Subps
            | Subpd
            | Subss
            | Subsd
            | Mulps
            | Mulpd
            | Mulss
            | Mulsd
            | Divps
            | Divpd
            | Divss
            | Divsd
            | Sqrtps
            | Sqrtpd
            | Sqrtss
            | Sqrtsd
            | Minps
            | Minpd
            | Minss
            | Minsd
            | Maxps
            | Maxpd
            | Maxss
            | Maxsd
            | Cmpps
            | Cmppd
            | Cmpss
            | Cmpsd
            | Comiss
            | Comisd
            | Ucomiss
            | Ucomisd
            | Cvtdq2ps
            | Cvtpd2dq
            | Cvtpd2ps
            | Cvtps2dq
            | Cvtps2pd
            | Cvtsd2si
            | Cvtsd2ss
            | Cvtsi2sd
            | Cvtsi2ss
            | Cvtss2sd
            | Cvtss2si
            | Cvttpd2dq
            | Cvttps2dq
            | Cvttsd2si
            | Cvttss2si
            | Addsubps
            | Addsubpd
            | Haddps
            | Haddpd
            | Hsubps
            | Hsubpd
            | Roundps
            | Roundpd
            | Roundss
            | Roundsd
            | Dpps
            | Dppd
    )
}

/// Whether one of the model's SSE instructions works on XMM and general registers and
/// memory alone, so that generated code may contain it as it is.
pub fn is_plain_sse(instruction: &Instruction, model: CpuModel) -> bool {
    // Conversions from memory to a general register name no XMM register, so they
    // would run without the guest's MXCSR.
    let named = (0..instruction.op_count()).any(|operand| {
        instruction.op_kind(operand) == OpKind::Register
            && instruction.op_register(operand).is_xmm()
    });
    named
        && unit_of(instruction, model) == Some(Unit::Sse)
        && instruction.code() != Code::Maskmovdqu_rDI_xmm_xmm
}

#[cfg(test)]
mod tests {
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    use iced_x86::code_asm::*;

    use super::*;

    /// The fields of a `Cpu` that thunks use; all others are zero.
    struct Fields(*mut Cpu);

    impl Fields {
        fn new() -> Self {
            // SAFETY: the layout has a size.
            let cpu = unsafe { alloc_zeroed(Layout::new::<Cpu>()) }.cast::<Cpu>();
            let mut fields = Self(cpu);
            fields.word(0, 0x37f);
            fields.word(24, HOST_MXCSR);
            fields
        }

        fn fpu(&mut self) -> &mut [u8; 512] {
            // SAFETY: allocated in `new`; any bytes are a valid array.
            unsafe { &mut (*self.0).fpu.0 }
        }

        fn word(&mut self, offset: usize, value: u32) {
            self.fpu()[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
        }

        fn read_word(&mut self, offset: usize) -> u32 {
            u32::from_le_bytes(self.fpu()[offset..offset + 4].try_into().unwrap())
        }

        fn xmm(&mut self, number: usize) -> &mut [u8] {
            &mut self.fpu()[160 + 16 * number..][..16]
        }

        fn general(&mut self, number: usize) -> &mut u64 {
            // SAFETY: allocated in `new`.
            unsafe { &mut (*self.0).registers[number] }
        }

        fn flags(&self) -> u64 {
            // SAFETY: allocated in `new`.
            unsafe { (*self.0).flags }
        }

        fn run(&mut self, thunks: &mut Thunks, code: Assembled, memory: &mut [u8]) -> u32 {
            let thunk = thunks.get(&code.0, CpuModel::V2).unwrap().unwrap();
            // SAFETY: the thunk uses the fields that are there and memory of
            // the size that the test gives.
            unsafe { (thunk.code)(self.0, memory.as_mut_ptr()) }
        }
    }

    impl Drop for Fields {
        fn drop(&mut self) {
            // SAFETY: allocated in `new` with this layout.
            unsafe { dealloc(self.0.cast(), Layout::new::<Cpu>()) };
        }
    }

    struct Assembled(Instruction);

    fn assembled(write: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Assembled {
        let mut assembler = CodeAssembler::new(64).unwrap();
        write(&mut assembler).unwrap();
        Assembled(assembler.instructions()[0])
    }

    use iced_x86::IcedError;

    #[test]
    fn sse_reads_and_writes_registers_memory_and_flags() {
        let (mut cpu, mut thunks) = (Fields::new(), Thunks::new().unwrap());
        let mut two = 2.0_f64.to_le_bytes();
        cpu.xmm(9)[..8].copy_from_slice(&3.0_f64.to_le_bytes());
        let code = assembled(|a| a.mulsd(xmm9, qword_ptr(rax + 64)));
        assert_eq!(cpu.run(&mut thunks, code, &mut two), DONE);
        assert_eq!(cpu.xmm(9)[..8], 6.0_f64.to_le_bytes());
        let code = assembled(|a| a.cvttsd2si(r13d, xmm9));
        *cpu.general(13) = u64::MAX;
        assert_eq!(cpu.run(&mut thunks, code, &mut []), DONE);
        assert_eq!(*cpu.general(13), 6);
        let code = assembled(|a| a.ucomisd(xmm9, xmm9));
        cpu.run(&mut thunks, code, &mut []);
        assert_eq!(cpu.flags() & 0xd501, 0x4000);
        let code = assembled(|a| a.movups(xmmword_ptr(r11 + r12 * 4), xmm9));
        let mut out = [0; 16];
        cpu.run(&mut thunks, code, &mut out);
        assert_eq!(out[..8], 6.0_f64.to_le_bytes());
    }

    #[test]
    fn an_unmasked_simd_exception_leaves_the_destination_alone() {
        let (mut cpu, mut thunks) = (Fields::new(), Thunks::new().unwrap());
        let divide = || assembled(|a| a.divss(xmm0, xmm1));
        cpu.xmm(0)[..4].copy_from_slice(&1.0_f32.to_le_bytes());
        // Divide by zero, masked: infinity, and the flag.
        assert_eq!(cpu.run(&mut thunks, divide(), &mut []), DONE);
        assert_eq!(cpu.xmm(0)[..4], f32::INFINITY.to_le_bytes());
        assert_eq!(cpu.read_word(24), 0x1f84);
        cpu.word(24, 0x1d80);
        cpu.xmm(0)[..4].copy_from_slice(&1.0_f32.to_le_bytes());
        assert_eq!(cpu.run(&mut thunks, divide(), &mut []), SIMD_EXCEPTION);
        assert_eq!(cpu.xmm(0)[..4], 1.0_f32.to_le_bytes());
        assert_eq!(cpu.read_word(24), 0x1d84);
    }

    #[test]
    fn x87_keeps_its_stack_and_reports_unmasked_exceptions() {
        let (mut cpu, mut thunks) = (Fields::new(), Thunks::new().unwrap());
        cpu.run(&mut thunks, assembled(|a| a.fld1()), &mut []);
        cpu.run(&mut thunks, assembled(|a| a.fldz()), &mut []);
        // Unmask division by zero.
        let mut control = 0x37b_u16.to_le_bytes();
        let code = assembled(|a| a.fldcw(word_ptr(rdi)));
        cpu.run(&mut thunks, code, &mut control);
        let code = assembled(|a| a.fdivp(st1, st0));
        cpu.run(&mut thunks, code, &mut []);
        let status = cpu.read_word(0) >> 16;
        assert_eq!(status & 0x8084, 0x8084);
        let mut stored = [0; 2];
        let code = assembled(|a| a.fnstcw(word_ptr(rdi)));
        cpu.run(&mut thunks, code, &mut stored);
        assert_eq!(stored, 0x37b_u16.to_le_bytes());
        // The status word in AX is the guest's, ES included.
        cpu.run(&mut thunks, assembled(|a| a.fnstsw(ax)), &mut []);
        assert_eq!(*cpu.general(0) & 0x84, 0x84);
    }

    #[test]
    fn what_is_no_thunk_is_refused() {
        let mut thunks = Thunks::new().unwrap();
        for code in [
            assembled(|a| a.add(rax, rcx)),
            assembled(|a| a.fxsave(ptr(rax))),
            assembled(|a| a.ldmxcsr(dword_ptr(rax))),
        ] {
            assert!(thunks.get(&code.0, CpuModel::V2).unwrap().is_none());
        }
        let later = assembled(|a| a.pshufb(xmm0, xmm1));
        assert!(thunks.get(&later.0, CpuModel::V1).unwrap().is_none());
        assert!(thunks.get(&later.0, CpuModel::V2).unwrap().is_some());
    }
}
