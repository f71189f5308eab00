//! Which template writes an instruction.

use iced_x86::{Code, Instruction, Mnemonic, OpKind, Register};
use weft_vcpu::Access;

use super::assembler::register::{R10, R11, RAX};
use super::assembler::{Assembler, Memory, Rm};
use super::encoding::Encoding;
use super::stubs::host;
use super::thunk;
use crate::block::Mode;
use crate::model::offers;

/// What a field of the ModRM byte names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// A part of the opcode.
    Opcode(u8),
    /// A general register of the guest.
    General(u8),
    /// AH, CH, DH or BH, by the number that encodes it.
    HighByte(u8),
    /// An XMM register.
    Xmm(u8),
}

/// How an instruction becomes code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Template {
    /// By a call of the interpreter's handler.
    Handler,
    Nothing,
    /// Its bytes as they are: operands are implied and the host has the same.
    Same,
    /// On registers.
    Registers {
        reg: Field,
        rm: Field,
    },
    /// With a memory operand at a host address.
    Memory {
        reg: Field,
        operand: MemoryUse,
    },
    /// MOV between the accumulator and an absolute 64-bit address; true: a load.
    Absolute {
        load: bool,
        operand: MemoryUse,
    },
    /// LEA into a general register.
    Address(u8),
    /// MOV of a constant into a 32- or 64-bit register.
    Constant(u8),
    /// MOV of a constant into a byte or 16-bit register.
    PartialConstant(Field),
    /// BSWAP.
    SwapBytes(u8),
    /// XCHG of the accumulator.
    ExchangeAccumulator(u8),
    /// DIV or IDIV of 32 or 64 bits.
    Divide {
        signed: bool,
    },
    /// PUSH of 64 bits: a register, a constant, memory.
    PushRegister(u8),
    PushConstant(i32),
    PushMemory,
    /// POP of 64 bits into a register.
    Pop(u8),
    Leave,
    /// Jcc, with the condition's number.
    JumpIf(u8),
    /// JMP, CALL to a constant distance.
    Jump,
    Call,
    /// JMP, CALL to where a register or memory says.
    JumpRegister(u8),
    CallRegister(u8),
    JumpMemory,
    CallMemory,
    /// RET, with the bytes to take off the stack besides.
    Return(u16),
}

/// What an instruction does with its memory operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    pub size: u16,
    pub access: Access,
    /// Only addresses that are a multiple of this, a power of two, do; the handler
    /// does the others.
    pub alignment: u8,
}

impl Template {
    /// Whether the instruction's XMM registers have to be in the host's.
    pub fn uses_xmm(self) -> bool {
        match self {
            Self::Registers { reg, rm } => {
                matches!(reg, Field::Xmm(_)) || matches!(rm, Field::Xmm(_))
            }
            Self::Memory { reg, .. } => matches!(reg, Field::Xmm(_)),
            _ => false,
        }
    }

    /// Whether the block ends with it.
    pub fn is_branch(self) -> bool {
        matches!(
            self,
            Self::JumpIf(_)
                | Self::Jump
                | Self::Call
                | Self::JumpRegister(_)
                | Self::CallRegister(_)
                | Self::JumpMemory
                | Self::CallMemory
                | Self::Return(_)
        )
    }
}

/// The template for an instruction of 64-bit code.
pub fn select(instruction: &Instruction, encoding: &Encoding<'_>, mode: Mode) -> Template {
    branch(instruction)
        .or_else(|| stack(instruction))
        .or_else(|| lea(instruction))
        .or_else(|| without_modrm(instruction, encoding))
        .or_else(|| with_modrm(instruction, encoding, mode))
        .filter(|template| is_same_when_written(instruction, encoding, template, mode))
        .unwrap_or(Template::Handler)
}

/// Whether what the template writes is one instruction of the same kind, of the
/// guest's ModRM byte and constant: else a part of a constant would be run as
/// code of the host.
///
/// Only instructions with prefixes can be misunderstood so; without, there is
/// nothing that changes a constant's length.
fn is_same_when_written(
    instruction: &Instruction,
    encoding: &Encoding<'_>,
    template: &Template,
    mode: Mode,
) -> bool {
    let number = |field: Field| match field {
        Field::Opcode(number) | Field::HighByte(number) | Field::Xmm(number) => number,
        Field::General(guest) => host(guest).unwrap_or(R11),
    };
    let (mut opcode, reg, rm) = (encoding.opcode, Field::Opcode(0), Rm::Register(RAX));
    let (reg, rm) = match *template {
        Template::Registers { reg, rm } => {
            let high = matches!(reg, Field::HighByte(_)) || matches!(rm, Field::HighByte(_));
            opcode.low_bytes &= !high;
            (reg, Rm::Register(number(rm)))
        }
        Template::Memory { reg, .. } => (reg, Rm::Memory(Memory::At(R10, 0))),
        Template::PartialConstant(_) => {
            opcode.bytes[0] = 0xc6 | u8::from(opcode.bytes[0] >= 0xb8);
            (reg, rm)
        }
        _ => return true,
    };
    if !encoding.prefixed {
        return true;
    }
    let mut assembler = Assembler::default();
    assembler.start(0);
    assembler.instruction(opcode, number(reg), rm);
    assembler.bytes(encoding.immediate);
    let code = assembler.finish();
    let written = mode.decoder(code, 0).decode();
    let same = match template {
        Template::PartialConstant(_) => written.mnemonic() == instruction.mnemonic(),
        _ => written.code() == instruction.code(),
    };
    same && written.len() == code.len()
}

fn general(register: Register) -> Option<u8> {
    register.is_gpr64().then(|| register.number() as u8)
}

fn branch(instruction: &Instruction) -> Option<Template> {
    use iced_x86::Code::*;
    if instruction.is_jcc_short_or_near() {
        let near = instruction.op0_kind() == OpKind::NearBranch64;
        return near.then(|| Template::JumpIf(condition(instruction)));
    }
    Some(match instruction.code() {
        Jmp_rel8_64 | Jmp_rel32_64 => Template::Jump,
        Call_rel32_64 => Template::Call,
        Jmp_rm64 => match instruction.op0_kind() {
            OpKind::Register => Template::JumpRegister(general(instruction.op0_register())?),
            _ => Template::JumpMemory,
        },
        Call_rm64 => match instruction.op0_kind() {
            // The push would come before the register is read.
            OpKind::Register if instruction.op0_register() == Register::RSP => Template::Handler,
            OpKind::Register => Template::CallRegister(general(instruction.op0_register())?),
            _ => Template::CallMemory,
        },
        Retnq => Template::Return(0),
        Retnq_imm16 => Template::Return(instruction.immediate16()),
        _ => return None,
    })
}

/// The condition's number, as the opcode has it.
fn condition(instruction: &Instruction) -> u8 {
    (instruction.op_code().op_code() & 15) as u8
}

fn stack(instruction: &Instruction) -> Option<Template> {
    use iced_x86::Code::*;
    Some(match instruction.code() {
        Push_r64 => Template::PushRegister(general(instruction.op0_register())?),
        Pushq_imm8 => Template::PushConstant(i32::from(instruction.immediate8to64() as i8)),
        Pushq_imm32 => Template::PushConstant(instruction.immediate32to64() as i32),
        Push_rm64 if instruction.op0_kind() == OpKind::Register => {
            Template::PushRegister(general(instruction.op0_register())?)
        }
        Push_rm64 => Template::PushMemory,
        Pop_r64 => Template::Pop(general(instruction.op0_register())?),
        Pop_rm64 if instruction.op0_kind() == OpKind::Register => {
            Template::Pop(general(instruction.op0_register())?)
        }
        Leaveq => Template::Leave,
        _ => return None,
    })
}

fn lea(instruction: &Instruction) -> Option<Template> {
    use iced_x86::Code::*;
    match instruction.code() {
        Lea_r32_m | Lea_r64_m => {
            let register = instruction.op0_register().full_register();
            Some(Template::Address(general(register)?))
        }
        _ => None,
    }
}

fn without_modrm(instruction: &Instruction, encoding: &Encoding<'_>) -> Option<Template> {
    use Mnemonic::*;
    if encoding.modrm.is_some() {
        let nothing = matches!(
            instruction.mnemonic(),
            Nop | Endbr64 | Prefetchnta | Prefetcht0 | Prefetcht1 | Prefetcht2 | Prefetchw
        );
        return nothing.then_some(Template::Nothing);
    }
    let opcode = encoding.opcode.bytes[0];
    let register = opcode & 7 | encoding.opcode_register;
    match instruction.mnemonic() {
        Nop => Some(Template::Nothing),
        Cbw | Cwde | Cdqe | Cwd | Cdq | Cqo | Lahf | Sahf | Cmc | Clc | Stc => Some(Template::Same),
        Add | Or | Adc | Sbb | And | Sub | Xor | Cmp | Test => Some(Template::Same),
        Mov if (0xa0..=0xa3).contains(&opcode) => {
            let load = opcode < 0xa2;
            let operand = MemoryUse {
                size: instruction.memory_size().size() as u16,
                access: if load { Access::Read } else { Access::Write },
                alignment: 1,
            };
            // A 32-bit address is a form that nobody uses.
            let absolute = instruction.memory_displ_size() == 8;
            absolute.then_some(Template::Absolute { load, operand })
        }
        Mov if opcode >= 0xb8 && encoding.opcode.prefix == 0 => Some(Template::Constant(register)),
        Mov if opcode >= 0xb0 => {
            let byte = opcode < 0xb8;
            let high = byte && !encoding.opcode.low_bytes && register >= 4;
            Some(Template::PartialConstant(if high {
                Field::HighByte(register)
            } else {
                Field::General(register)
            }))
        }
        Bswap if instruction.op0_register().size() >= 4 => {
            let register = encoding.opcode.bytes[1] & 7 | encoding.opcode_register;
            Some(Template::SwapBytes(register))
        }
        Xchg => Some(Template::ExchangeAccumulator(register)),
        _ => None,
    }
}

fn with_modrm(instruction: &Instruction, encoding: &Encoding<'_>, mode: Mode) -> Option<Template> {
    use Mnemonic::*;
    let sse = thunk::is_plain_sse(instruction, mode.model()) || instruction.mnemonic() == Movnti;
    if matches!(instruction.mnemonic(), Lfence | Sfence | Mfence) {
        return Some(Template::Same);
    }
    let integer = is_plain_integer(instruction) && offers(mode.model(), instruction);
    if !sse && !integer {
        return None;
    }
    let (reg, rm) = fields(encoding, sse)?;
    if matches!(instruction.mnemonic(), Div | Idiv) {
        let wide_enough = matches!(encoding.opcode.bytes[0], 0xf7) && encoding.opcode.prefix == 0;
        let signed = instruction.mnemonic() == Idiv;
        return wide_enough.then_some(Template::Divide { signed });
    }
    let high = |field: &Field| matches!(field, Field::HighByte(_));
    let Some(rm) = rm else {
        let bit_string = matches!(instruction.mnemonic(), Bt | Bts | Btr | Btc)
            && instruction.op1_kind() == OpKind::Register;
        // The host address is in a register that needs a REX prefix.
        if high(&reg) || bit_string {
            return None;
        }
        let operand = memory_use(instruction, sse)?;
        return Some(Template::Memory { reg, operand });
    };
    let rex = |field: &Field| match *field {
        Field::General(guest) => host(guest).is_none_or(|register| register >= 8),
        _ => false,
    };
    if (high(&reg) || high(&rm)) && (rex(&reg) || rex(&rm)) {
        return None;
    }
    Some(Template::Registers { reg, rm })
}

/// Integer instructions on general registers and memory whose operands can be
/// replaced.
fn is_plain_integer(instruction: &Instruction) -> bool {
    use Mnemonic::*;
    let mnemonic = instruction.mnemonic();
    let known = matches!(
        mnemonic,
        Add | Or
            | Adc
            | Sbb
            | And
            | Sub
            | Xor
            | Cmp
            | Test
            | Mov
            | Movzx
            | Movsx
            | Movsxd
            | Inc
            | Dec
            | Neg
            | Not
            | Shl
            | Sal
            | Shr
            | Sar
            | Rol
            | Ror
            | Rcl
            | Rcr
            | Shld
            | Shrd
            | Imul
            | Mul
            | Div
            | Idiv
            | Bt
            | Bts
            | Btr
            | Btc
            | Bsf
            | Bsr
            | Popcnt
            | Crc32
            | Xchg
            | Xadd
            | Cmpxchg
            | Cmpxchg8b
            | Cmpxchg16b
            | Seto
            | Setno
            | Setb
            | Setae
            | Sete
            | Setne
            | Setbe
            | Seta
            | Sets
            | Setns
            | Setp
            | Setnp
            | Setl
            | Setge
            | Setle
            | Setg
            | Cmovo
            | Cmovno
            | Cmovb
            | Cmovae
            | Cmove
            | Cmovne
            | Cmovbe
            | Cmova
            | Cmovs
            | Cmovns
            | Cmovp
            | Cmovnp
            | Cmovl
            | Cmovge
            | Cmovle
            | Cmovg
    );
    // Not segment, control and debug registers.
    let registers = || {
        (0..instruction.op_count())
            .filter(|&operand| instruction.op_kind(operand) == OpKind::Register)
            .all(|operand| instruction.op_register(operand).is_gpr())
    };
    // Of memory, Intel's manual says, this reads 16 bits; AMD's processors read 32,
    // which may lie beyond the page.
    let reads_more = instruction.code() == Code::Movsxd_r16_rm16;
    known && !reads_more && registers()
}

/// Whether the instruction faults at other addresses, or may be a split lock of the
/// host there: atomic across two cache lines.
fn must_be_aligned(instruction: &Instruction, sse: bool) -> bool {
    use Mnemonic::*;
    let mnemonic = instruction.mnemonic();
    // XCHG with memory locks without the prefix.
    let locked = instruction.has_lock_prefix() || mnemonic == Xchg;
    let faults = mnemonic == Cmpxchg16b || sse && thunk::needs_alignment(mnemonic);
    locked || faults && instruction.memory_size().size() == 16
}

fn memory_use(instruction: &Instruction, sse: bool) -> Option<MemoryUse> {
    use Mnemonic::*;
    let mnemonic = instruction.mnemonic();
    let size = instruction.memory_size().size();
    let reads = instruction.op0_kind() != OpKind::Memory
        || matches!(mnemonic, Cmp | Test | Bt | Mul | Imul);
    // XCHG names the register first in iced's view of some forms.
    let both = matches!(mnemonic, Xchg | Xadd | Cmpxchg);
    (1..=16).contains(&size).then(|| MemoryUse {
        size: size as u16,
        access: if reads && !both {
            Access::Read
        } else {
            Access::Write
        },
        alignment: if must_be_aligned(instruction, sse) {
            size as u8
        } else {
            1
        },
    })
}

/// What the two fields of the ModRM byte name; the second is `None` for memory.
fn fields(encoding: &Encoding<'_>, sse: bool) -> Option<(Field, Option<Field>)> {
    let modrm = encoding.modrm?;
    let (code, length) = (encoding.opcode.bytes, encoding.opcode.length);
    let (reg_byte, rm_byte) = byte_fields(code, length);
    let general = |number: u8, byte: bool| {
        if byte && !encoding.opcode.low_bytes && (4..8).contains(&number) {
            Field::HighByte(number)
        } else {
            Field::General(number)
        }
    };
    let reg = if is_extended(code, length) {
        Field::Opcode(modrm.reg & 7)
    } else if sse && (length == 3 || !matches!(code[1], 0x2c | 0x2d | 0x50 | 0xc3 | 0xc5 | 0xd7)) {
        Field::Xmm(modrm.reg)
    } else {
        general(modrm.reg, reg_byte)
    };
    let rm_is_general = match code[1] {
        // PEXTRB to EXTRACTPS, PINSRB, PINSRD.
        0x3a => !sse || matches!(code[2], 0x14..=0x17 | 0x20 | 0x22),
        0x6e | 0x2a | 0xc4 => true,
        0x7e => encoding.opcode.prefix == 0x66,
        _ => !sse,
    };
    let rm = modrm.register.map(|register| {
        if rm_is_general {
            general(register, rm_byte)
        } else {
            Field::Xmm(register)
        }
    });
    Some((reg, rm))
}

/// Whether the reg field is a part of the opcode (Intel SDM volume 2, table A-6).
fn is_extended(code: [u8; 3], length: u8) -> bool {
    match length {
        1 => matches!(
            code[0],
            0x80..=0x83 | 0x8f | 0xc0 | 0xc1 | 0xc6 | 0xc7 | 0xd0..=0xd3 | 0xf6 | 0xf7 | 0xfe | 0xff
        ),
        2 => matches!(code[1], 0x71..=0x73 | 0xae | 0xba | 0xc7 | 0x90..=0x9f),
        _ => false,
    }
}

/// Which of the ModRM fields name byte registers.
fn byte_fields(code: [u8; 3], length: u8) -> (bool, bool) {
    match (length, code[0], code[1]) {
        (1, 0x00..=0x3f, _) => (code[0] & 1 == 0, code[0] & 1 == 0),
        (1, 0x80 | 0x84 | 0x86 | 0x88 | 0x8a | 0xc0 | 0xc6 | 0xd0 | 0xd2 | 0xf6 | 0xfe, _) => {
            (true, true)
        }
        (2, _, 0x90..=0x9f | 0xb6 | 0xbe) => (false, true),
        (2, _, 0xb0 | 0xc0) => (true, true),
        // CRC32 of a byte, of all that get here.
        (3, _, 0x38) => (false, code[2] == 0xf0),
        _ => (false, false),
    }
}

/// PUSH.
pub const STACK_WRITE: MemoryUse = MemoryUse {
    size: 8,
    access: Access::Write,
    alignment: 1,
};
/// POP.
pub const STACK_READ: MemoryUse = MemoryUse {
    size: 8,
    access: Access::Read,
    alignment: 1,
};

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

#[cfg(test)]
mod tests {
    use super::*;

    const MODE: Mode = Mode(Mode::BITS_64);

    fn decoded(bytes: &[u8]) -> Instruction {
        MODE.decoder(bytes, 0).decode()
    }

    #[test]
    fn a_misunderstood_constant_is_the_handlers() {
        // mov rcx, imm64 with an operand-size prefix, which counts for nothing.
        let bytes = [0x66, 0x48, 0xb9, 1, 2, 3, 4, 5, 6, 7, 8];
        let encoding = Encoding::of(&bytes).unwrap();
        let template = select(&decoded(&bytes), &encoding, MODE);
        assert_eq!(template, Template::Constant(1));
        let mut wrong = encoding;
        wrong.opcode.prefix = 0x66;
        let template = select(&decoded(&bytes), &wrong, MODE);
        assert_eq!(template, Template::Handler);
        // add word ptr [rax], 0x201 with too short a constant, or too long.
        let bytes = [0x66, 0x81, 0x00, 1, 2, 3];
        for length in 3..=6 {
            let mut wrong = Encoding::of(&bytes).unwrap();
            wrong.immediate = &bytes[3..length];
            let template = select(&decoded(&bytes), &wrong, MODE);
            assert_eq!(template == Template::Handler, length != 5, "{length}");
        }
    }

    #[test]
    fn what_locks_does_so_at_multiples_of_its_size() {
        // lock add [rax], ecx; xchg [rax], rcx; lock cmpxchg [rax], cl; lock dec word
        // [rax]; lock cmpxchg16b [rax]; add [rax], ecx; movaps xmm0, [rax].
        for (bytes, alignment) in [
            (&[0xf0, 0x01, 0x08][..], 4),
            (&[0x48, 0x87, 0x08], 8),
            (&[0xf0, 0x0f, 0xb0, 0x08], 1),
            (&[0x66, 0xf0, 0xff, 0x08], 2),
            (&[0xf0, 0x48, 0x0f, 0xc7, 0x08], 16),
            (&[0x01, 0x08], 1),
            (&[0x0f, 0x28, 0x00], 16),
        ] {
            let encoding = Encoding::of(bytes).unwrap();
            match select(&decoded(bytes), &encoding, MODE) {
                Template::Memory { operand, .. } => assert_eq!(operand.alignment, alignment),
                other => panic!("{bytes:x?}: {other:?}"),
            }
        }
    }

    #[test]
    fn prefixes_do_not_keep_instructions_from_templates() {
        for bytes in [
            // lock xadd [rdi], eax; mov ax, [rip + 0]; movsd xmm1, [rsp]
            &[0xf0, 0x0f, 0xc1, 0x07][..],
            &[0x66, 0x8b, 0x05, 0, 0, 0, 0],
            &[0xf2, 0x0f, 0x10, 0x0c, 0x24],
            // mov rax, gs:[0x28]; movq xmm2, r9; mov cx, 5; mov [eax], cl
            &[0x65, 0x48, 0x8b, 0x04, 0x25, 0x28, 0, 0, 0],
            &[0x66, 0x49, 0x0f, 0x6e, 0xd1],
            &[0x66, 0xb9, 5, 0],
            &[0x67, 0x88, 0x08],
            // rep bsf eax, ecx; add ah, cl with an empty prefix
            &[0xf3, 0x0f, 0xbc, 0xc1],
            &[0x3e, 0x00, 0xcc],
        ] {
            let encoding = Encoding::of(bytes).unwrap();
            let template = select(&decoded(bytes), &encoding, MODE);
            assert_ne!(template, Template::Handler, "{bytes:x?}");
        }
    }
}
