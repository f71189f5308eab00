//! Sequences, registers and memory by chance.

use iced_x86::code_asm::*;
use iced_x86::{
    Code, CpuidFeature, Encoder, EncodingKind, FlowControl, Instruction, MemoryOperand, Mnemonic,
    OpCodeOperandKind as Kind, OpKind, Register,
};
use weft_vcpu::CpuModel;
use weft_vcpu_soft::model::offers;

use super::native::Context;
use super::{BASE, INDEX, MEMORY_AT, MEMORY_SIZE, OTHER_BASE, RESERVED, SLOT, STACK_TOP};
use weft_test_support::Random;

/// What a CPU of the newest model has.
const FEATURES: [CpuidFeature; 31] = [
    CpuidFeature::INTEL8086,
    CpuidFeature::INTEL8086_ONLY,
    CpuidFeature::INTEL186,
    CpuidFeature::INTEL286,
    CpuidFeature::INTEL386,
    CpuidFeature::INTEL486,
    CpuidFeature::X64,
    CpuidFeature::CMOV,
    CpuidFeature::CX8,
    CpuidFeature::CMPXCHG16B,
    CpuidFeature::SSE,
    CpuidFeature::SSE2,
    CpuidFeature::MMX,
    CpuidFeature::FPU,
    CpuidFeature::FPU287,
    CpuidFeature::FPU387,
    CpuidFeature::SSE3,
    CpuidFeature::SSSE3,
    CpuidFeature::SSE4_1,
    CpuidFeature::SSE4_2,
    CpuidFeature::POPCNT,
    CpuidFeature::AES,
    CpuidFeature::PCLMULQDQ,
    CpuidFeature::AVX,
    CpuidFeature::AVX2,
    CpuidFeature::FMA,
    CpuidFeature::F16C,
    CpuidFeature::BMI1,
    CpuidFeature::BMI2,
    CpuidFeature::LZCNT,
    CpuidFeature::MOVBE,
];

fn of_code(code: Code) -> Instruction {
    let mut instruction = Instruction::default();
    instruction.set_code(code);
    instruction
}

/// What means something else in a guest, needs an address of its own, or is
/// written by `template`.
fn is_excluded(code: Code) -> bool {
    use Mnemonic::*;
    let mnemonic = code.mnemonic();
    let instruction = of_code(code);
    if instruction.is_string_instruction() || instruction.is_privileged() {
        return true;
    }
    matches!(
        mnemonic,
        INVALID
            | Push
            | Pop
            | Pushfq
            | Popfq
            | Pushf
            | Popf
            | Enter
            | Leave
            | Div
            | Idiv
            | Lar
            | Lsl
            | Verr
            | Verw
            | Str
            | Sldt
            | Smsw
            | Sgdt
            | Sidt
            | Std
            | Cld
            | Cli
            | Sti
            | Pause
            | Maskmovq
            | Maskmovdqu
            | Xlatb
            | Fxsave
            | Fxsave64
            | Fxrstor
            | Fxrstor64
            | Ldmxcsr
            | Vldmxcsr
            | Fldenv
            | Fldcw
            | Frstor
            | Fnsave
            | Fnstenv
            | Fstenv
            | Fsave
            | Into
            | Bound
            | In
            | Out
            | Fldpi
            | Fninit
            | Emms
            | Reservednop
            | Fnop
            | Wait
            | Clflush
            | Lfence
            | Mfence
            | Sfence
            | Ud0
            | Ud1
            | Ud2
            | Lfs
            | Lgs
            | Lss
            | Lds
            | Les
            | Cpuid
            | Rdtsc
            | Fbld
            | Fbstp
    )
}

fn is_aligned_move(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Vmovaps | Vmovapd | Vmovdqa | Vmovntps | Vmovntpd | Vmovntdq | Vmovntdqa
    )
}

/// Elements at distances of all signs, chosen by what is in a register.
fn gather(a: &mut CodeAssembler, kind: usize) {
    a.vpsrad(ymm1, ymm1, 24).unwrap();
    a.vpsrlq(ymm3, ymm3, 55).unwrap();
    use Code::*;
    use Register::{
        R12, RBX, XMM0, XMM1, XMM2, XMM3, XMM5, XMM9, YMM0, YMM1, YMM2, YMM3, YMM4, YMM15,
    };
    let (code, to, base, index, scale, displacement, mask) = [
        (VEX_Vgatherdps_ymm_vm32y_ymm, YMM0, RBX, YMM1, 4, 0, YMM2),
        (VEX_Vgatherdpd_ymm_vm32x_ymm, YMM4, RBX, XMM1, 2, 9, YMM2),
        (VEX_Vpgatherdd_xmm_vm32x_xmm, XMM5, RBX, XMM1, 1, 0, XMM2),
        (VEX_Vpgatherqq_ymm_vm64y_ymm, YMM0, RBX, YMM3, 8, 0, YMM15),
        (VEX_Vpgatherqd_xmm_vm64y_xmm, XMM9, RBX, YMM3, 4, 0, XMM2),
        (VEX_Vgatherqps_xmm_vm64x_xmm, XMM0, R12, XMM3, 8, 0, XMM2),
        (VEX_Vpgatherdq_xmm_vm32x_xmm, XMM0, RBX, XMM1, 8, 0, XMM2),
        (VEX_Vgatherqpd_xmm_vm64x_xmm, XMM0, R12, XMM3, 1, 3, XMM2),
    ][kind];
    let place =
        MemoryOperand::with_base_index_scale_displ_size(base, index, scale, displacement, 1);
    let gather = Instruction::with3(code, to, place, mask).unwrap();
    a.add_instruction(gather).unwrap();
}

fn candidates(model: CpuModel) -> Vec<Code> {
    Code::values()
        .filter(|&code| {
            let info = code.op_code();
            let features = code.cpuid_features();
            info.is_instruction()
                && info.mode64()
                && matches!(code.encoding(), EncodingKind::Legacy | EncodingKind::VEX)
                && offers(model, &of_code(code))
                && code.flow_control() == FlowControl::Next
                && features.iter().all(|feature| FEATURES.contains(feature))
                && !is_excluded(code)
                && (0..info.op_count()).all(|index| {
                    !matches!(
                        info.op_kind(index),
                        Kind::seg_reg
                            | Kind::cr_reg
                            | Kind::dr_reg
                            | Kind::tr_reg
                            | Kind::mem_offs
                            | Kind::farbr2_2
                            | Kind::farbr4_2
                            | Kind::br64_1
                            | Kind::br64_4
                            | Kind::es
                            | Kind::cs
                            | Kind::ss
                            | Kind::ds
                            | Kind::fs
                            | Kind::gs
                    )
                })
        })
        .collect()
}

pub struct Generator {
    random: Random,
    pub codes: Vec<Code>,
    encoder: Encoder,
    model: CpuModel,
    /// RCL and RCR of 8 and 16 bits too.
    pub rotations: bool,
    /// OF is defined after rotations by more than one: see [`rotations_keep_overflow`].
    pub defines_overflow: bool,
}

impl Generator {
    pub fn new(seed: u64, model: CpuModel) -> Self {
        Self {
            random: Random::new(seed),
            codes: candidates(model),
            model,
            encoder: Encoder::new(64),
            rotations: true,
            defines_overflow: rotations_keep_overflow(),
        }
    }

    fn register(&mut self, size: usize, written: bool) -> Register {
        loop {
            let number = self.random.index(16) as u32;
            let register = Register::RAX + number;
            if written && RESERVED.contains(&register) {
                continue;
            }
            return match size {
                8 => register,
                4 => Register::EAX + number,
                2 => Register::AX + number,
                // AH to BH too, where no REX prefix is needed.
                _ if self.random.index(8) == 0 => {
                    self.random.of(&[Register::AH, Register::CH, Register::DH])
                }
                _ => Register::AL + if number >= 4 { number + 4 } else { number },
            };
        }
    }

    fn memory(&mut self, size: usize, aligned: bool) -> MemoryOperand {
        // The first is at no multiple of 32.
        let base = if aligned && size > 16 {
            OTHER_BASE
        } else {
            self.random.of(&[BASE, OTHER_BASE])
        };
        let mut displacement = self.random.index(160) as i64;
        if aligned {
            displacement &= -(size as i64);
        }
        let index = if aligned || self.random.index(3) != 0 {
            Register::None
        } else {
            INDEX
        };
        MemoryOperand::with_base_index_scale_displ_size(
            base,
            index,
            self.random.of(&[1, 2, 4, 8]),
            displacement,
            1,
        )
    }

    fn immediate(&mut self) -> u64 {
        self.random.value()
    }

    fn operand(&mut self, instruction: &mut Instruction, index: u32, kind: Kind) -> Option<()> {
        let set = |instruction: &mut Instruction, register: Register| {
            instruction.set_op_kind(index, OpKind::Register);
            instruction.set_op_register(index, register);
        };
        let memory_too = |this: &mut Self| this.random.index(2) == 0;
        match kind {
            Kind::r8_reg | Kind::r8_opcode => set(instruction, self.register(1, true)),
            Kind::r16_reg | Kind::r16_opcode | Kind::r16_rm | Kind::r16_reg_mem => {
                set(instruction, self.register(2, true))
            }
            Kind::r32_reg | Kind::r32_opcode | Kind::r32_rm | Kind::r32_reg_mem => {
                set(instruction, self.register(4, true))
            }
            Kind::r64_reg | Kind::r64_opcode | Kind::r64_rm | Kind::r64_reg_mem => {
                set(instruction, self.register(8, true))
            }
            Kind::al => set(instruction, Register::AL),
            Kind::cl => set(instruction, Register::CL),
            Kind::ax => set(instruction, Register::AX),
            Kind::dx => set(instruction, Register::DX),
            Kind::eax => set(instruction, Register::EAX),
            Kind::rax => set(instruction, Register::RAX),
            Kind::st0 => set(instruction, Register::ST0),
            Kind::sti_opcode => {
                let register = Register::ST0 + self.random.index(8) as u32;
                set(instruction, register);
            }
            Kind::mm_reg | Kind::mm_rm => {
                let register = Register::MM0 + self.random.index(8) as u32;
                set(instruction, register);
            }
            Kind::r32_vvvv => set(instruction, self.register(4, true)),
            Kind::r64_vvvv => set(instruction, self.register(8, true)),
            Kind::ymm_reg | Kind::ymm_rm | Kind::ymm_vvvv | Kind::ymm_is4 => {
                let register = Register::YMM0 + self.random.index(16) as u32;
                set(instruction, register);
            }
            Kind::xmm_reg | Kind::xmm_rm | Kind::xmm_vvvv | Kind::xmm_is4 => {
                let register = Register::XMM0 + self.random.index(16) as u32;
                set(instruction, register);
            }
            Kind::r8_or_mem
            | Kind::r16_or_mem
            | Kind::r32_or_mem
            | Kind::r64_or_mem
            | Kind::mm_or_mem
            | Kind::xmm_or_mem
            | Kind::ymm_or_mem => {
                if memory_too(self) {
                    self.put_memory(instruction, index);
                } else {
                    let number = self.random.index(16) as u32;
                    let register = match kind {
                        Kind::r8_or_mem => self.register(1, true),
                        Kind::r16_or_mem => self.register(2, true),
                        Kind::r32_or_mem => self.register(4, true),
                        Kind::r64_or_mem => self.register(8, true),
                        Kind::mm_or_mem => Register::MM0 + number % 8,
                        Kind::ymm_or_mem => Register::YMM0 + number,
                        _ => Register::XMM0 + number,
                    };
                    set(instruction, register);
                }
            }
            Kind::mem => self.put_memory(instruction, index),
            Kind::imm8
            | Kind::imm8sex16
            | Kind::imm8sex32
            | Kind::imm8sex64
            | Kind::imm16
            | Kind::imm32
            | Kind::imm32sex64
            | Kind::imm64 => {
                let value = self.immediate();
                match kind {
                    Kind::imm8 => instruction.set_immediate8(value as u8),
                    Kind::imm8sex16 => instruction.set_immediate8to16(value as i8 as i16),
                    Kind::imm8sex32 => instruction.set_immediate8to32(value as i8 as i32),
                    Kind::imm8sex64 => instruction.set_immediate8to64(value as i8 as i64),
                    Kind::imm16 => instruction.set_immediate16(value as u16),
                    Kind::imm32 => instruction.set_immediate32(value as u32),
                    Kind::imm32sex64 => instruction.set_immediate32to64(value as i32 as i64),
                    _ => instruction.set_immediate64(value),
                }
                instruction.set_op_kind(
                    index,
                    match kind {
                        Kind::imm8 => OpKind::Immediate8,
                        Kind::imm8sex16 => OpKind::Immediate8to16,
                        Kind::imm8sex32 => OpKind::Immediate8to32,
                        Kind::imm8sex64 => OpKind::Immediate8to64,
                        Kind::imm16 => OpKind::Immediate16,
                        Kind::imm32 => OpKind::Immediate32,
                        Kind::imm32sex64 => OpKind::Immediate32to64,
                        _ => OpKind::Immediate64,
                    },
                );
            }
            Kind::imm8_const_1 => {
                instruction.set_immediate8(1);
                instruction.set_op_kind(index, OpKind::Immediate8);
            }
            _ => return None,
        }
        Some(())
    }

    fn put_memory(&mut self, instruction: &mut Instruction, index: u32) {
        instruction.set_op_kind(index, OpKind::Memory);
        let size = instruction.memory_size().size();
        let aligned = match instruction.code().encoding() {
            EncodingKind::VEX => is_aligned_move(instruction.mnemonic()),
            _ => size == 16,
        };
        let memory = self.memory(size, aligned);
        instruction.set_memory_base(memory.base);
        instruction.set_memory_index(memory.index);
        instruction.set_memory_index_scale(memory.scale);
        instruction.set_memory_displacement64(memory.displacement as u64);
        instruction.set_memory_displ_size(memory.displ_size);
    }

    /// One instruction of a random kind.
    fn instruction(&mut self) -> Option<Instruction> {
        let code = self.random.of(&self.codes.clone());
        let info = code.op_code();
        let mut instruction = of_code(code);
        for index in 0..info.op_count() {
            self.operand(&mut instruction, index, info.op_kind(index))?;
        }
        let in_memory = info.op_count() > 0 && instruction.op0_kind() == OpKind::Memory;
        if in_memory && info.can_use_lock_prefix() && self.random.index(2) == 0 {
            instruction.set_has_lock_prefix(true);
        }
        // By a multiple of 9 or 17 these leave OF undefined, and translated code
        // does not keep it.
        let rotates = matches!(code.mnemonic(), Mnemonic::Rcl | Mnemonic::Rcr);
        if rotates && matches!(info.operand_size(), 0 | 16) && !self.rotations {
            return None;
        }
        // With a register, the bit's number reaches over all of memory.
        let reaches = matches!(
            code.mnemonic(),
            Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc
        );
        if in_memory && reaches && instruction.op1_kind() == OpKind::Register {
            let number = INDEX.number() as u32;
            let register = match instruction.op1_register().size() {
                2 => Register::AX + number,
                4 => Register::EAX + number,
                _ => Register::RAX + number,
            };
            instruction.set_op1_register(register);
        }
        Some(instruction)
    }

    /// Instructions that only make sense together.
    fn template(&mut self, a: &mut CodeAssembler) {
        let from = MEMORY_AT + self.random.index(0x1200) as u64;
        let to = MEMORY_AT + 0x200 + self.random.index(0x1800) as u64;
        let count = self.random.index(40) as u32;
        let down = self.random.index(4) == 0;
        if self.model >= CpuModel::V3 && self.random.index(4) == 0 {
            return gather(a, self.random.index(8));
        }
        match self.random.index(8) {
            0 => {
                a.push(rax).unwrap();
                a.push(rsi).unwrap();
                a.pop(rdx).unwrap();
                a.pop(cx).unwrap();
                a.push(cx).unwrap();
                a.add(rsp, 8).unwrap();
            }
            1 => {
                a.pushfq().unwrap();
                a.and(dword_ptr(rsp), 0x8d5).unwrap();
                a.pop(rdi).unwrap();
                a.push(0x46).unwrap();
                a.popfq().unwrap();
            }
            2 => {
                a.xor(edx, edx).unwrap();
                a.or(ecx, 1).unwrap();
                a.div(ecx).unwrap();
            }
            3 => {
                a.cqo().unwrap();
                a.or(rbp, 3).unwrap();
                a.and(rbp, 0x7f).unwrap();
                a.idiv(rbp).unwrap();
            }
            4 => {
                a.movzx(eax, ax).unwrap();
                a.or(cl, 0x80).unwrap();
                a.and(ah, 0x3f).unwrap();
                a.div(cl).unwrap();
            }
            5 => {
                a.mov(al, 9).unwrap();
                a.xlatb().unwrap();
            }
            kind => {
                a.mov(esi, from as u32).unwrap();
                a.mov(edi, to as u32).unwrap();
                a.mov(ecx, count).unwrap();
                if down {
                    a.std().unwrap();
                    a.add(esi, 0x200).unwrap();
                    a.add(edi, 0x200).unwrap();
                }
                match (kind, self.random.index(6)) {
                    (6, 0) => a.rep().movsb().unwrap(),
                    (6, 1) => a.rep().movsd().unwrap(),
                    (6, 2) => a.rep().movsq().unwrap(),
                    (6, 3) => a.rep().stosw().unwrap(),
                    (6, 4) => a.rep().stosq().unwrap(),
                    (6, _) => a.rep().lodsb().unwrap(),
                    (_, 0) => a.repe().cmpsb().unwrap(),
                    (_, 1) => a.repne().cmpsd().unwrap(),
                    (_, 2) => a.repe().scasw().unwrap(),
                    (_, 3) => a.repne().scasb().unwrap(),
                    (_, 4) => a.movsw().unwrap(),
                    (_, _) => a.cmpsq().unwrap(),
                }
                a.cld().unwrap();
            }
        }
    }

    pub fn sequence(&mut self, address: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let length = 1 + self.random.index(8);
        while bytes.len() < SLOT as usize - 80 {
            if bytes.len() >= length * 5 {
                break;
            }
            if self.random.index(12) == 0 {
                let at = address + bytes.len() as u64;
                let mut assembler = CodeAssembler::new(64).unwrap();
                self.template(&mut assembler);
                bytes.extend(assembler.assemble(at).unwrap());
                continue;
            }
            let Some(instruction) = self.instruction() else {
                continue;
            };
            if self.encoder.encode(&instruction, 0).is_ok() {
                bytes.extend(self.encoder.take_buffer());
                if self.defines_overflow && leaves_overflow_undefined(&instruction) {
                    // inc r8d: it defines OF and leaves CF, which rotations define.
                    bytes.extend([0x41, 0xff, 0xc0]);
                }
            } else {
                let _ = self.encoder.take_buffer();
            }
        }
        bytes
    }

    pub fn memory_bytes(&mut self) -> Vec<u8> {
        (0..MEMORY_SIZE).map(|_| self.random.next() as u8).collect()
    }

    pub fn context(&mut self) -> Context {
        let mut context = Context {
            fpu: [0; 512],
            high: [0; 256],
            registers: std::array::from_fn(|_| self.random.value()),
            flags: self.random.next() & 0x8d5 | 2,
            host_stack: 0,
            spare: [0; 6],
        };
        for byte in &mut context.fpu[160..416] {
            *byte = self.random.next() as u8;
        }
        if self.model >= CpuModel::V3 {
            context.high = std::array::from_fn(|_| self.random.next() as u8);
        }
        context.fpu[..2].copy_from_slice(&0x37f_u16.to_le_bytes());
        context.fpu[24..28].copy_from_slice(&0x1f80_u32.to_le_bytes());
        // The first base near a page's end, the other at the start of memory.
        context.registers[BASE.number()] = MEMORY_AT + 0x1000 - 80;
        context.registers[OTHER_BASE.number()] = MEMORY_AT + 0x100;
        context.registers[INDEX.number()] = self.random.index(64) as u64;
        context.registers[Register::RSP.number()] = STACK_TOP - 0x400;
        context
    }
}

/// Whether it rotates by a count that may be another than one.
fn leaves_overflow_undefined(instruction: &Instruction) -> bool {
    let rotates = matches!(
        instruction.mnemonic(),
        Mnemonic::Rol | Mnemonic::Ror | Mnemonic::Rcl | Mnemonic::Rcr
    );
    rotates && !(instruction.op1_kind() == OpKind::Immediate8 && instruction.immediate8() == 1)
}

/// Whether this host's rotations by more than one leave OF as it is. The architecture does not
/// define it (Intel SDM, volume 2, RCL/RCR/ROL/ROR); most processors compute it as for a
/// rotation by one, and so does the software vCPU.
fn rotations_keep_overflow() -> bool {
    let is_kept: u8;
    // SAFETY: changes two registers and the arithmetic flags only.
    unsafe {
        std::arch::asm!(
            "xor {word}, {word}",
            "inc {word}",
            // 0x7f + 1: OF is 1; a rotation by one of a result of 4 makes it 0.
            "mov {kept}, 0x7f",
            "inc {kept}",
            "ror {word}, 62",
            "seto {kept}",
            word = inout(reg) 0_u64 => _,
            kept = out(reg_byte) is_kept,
        );
    }
    is_kept == 1
}
