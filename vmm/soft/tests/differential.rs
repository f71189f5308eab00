//! Generated instruction sequences, run by the host natively, by the interpreter,
//! and translated: registers, all arithmetic flags, x87 and SSE state and memory must
//! be the same afterwards. Needs an x86-64 host that lets a process map pages at
//! low addresses.
//!
//! A failing run prints its seed; `SEED=... cargo test --test differential` runs
//! the same sequences again. `cargo test --test differential -- --ignored` runs
//! millions.

mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

use iced_x86::code_asm::*;
use iced_x86::{
    Code, CpuidFeature, Decoder, DecoderOptions, Encoder, EncodingKind, FlowControl, Instruction,
    MemoryOperand, Mnemonic, OpCodeOperandKind as Kind, OpKind, Register,
};
use support::*;
use weft_soft::{CpuState, Exit};

/// Linear addresses, the same natively and in the guest.
const MEMORY_AT: u64 = 0x50_0000;
const MEMORY_SIZE: usize = 0x3000;
const STACK_TOP: u64 = MEMORY_AT + 0x3000;
const CONTEXT: u64 = 0x52_0000;
const SEQUENCES_AT: u64 = 0x60_0000;
/// Bytes of a sequence, its end included.
const SLOT: u64 = 256;
const SLOTS: usize = 256;
const STUBS_AT: u64 = SEQUENCES_AT + SLOT * SLOTS as u64;
/// Bytes at the end of a sequence: HLT in the guest, a jump natively.
const END: usize = 5;

/// Registers that sequences use for addresses, and never write.
const BASE: Register = Register::RBX;
const OTHER_BASE: Register = Register::R12;
const INDEX: Register = Register::R13;
const RESERVED: [Register; 4] = [Register::RSP, BASE, OTHER_BASE, INDEX];

/// Registers, flags and the FXSAVE area, at `CONTEXT`.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Context {
    fpu: [u8; 512],
    registers: [u64; 16],
    flags: u64,
    host_stack: u64,
    spare: [u64; 6],
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        ((self.next() >> 33) % bound as u64) as usize
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// Values at which arithmetic changes its mind, and others.
    fn value(&mut self) -> u64 {
        let bits = self.of(&[7, 8, 15, 16, 31, 32, 63]);
        let edge = 1_u64 << bits;
        match self.below(8) {
            0 => 0,
            1 => edge,
            2 => edge - 1,
            3 => edge.wrapping_neg(),
            4 => self.next() & 0xff,
            5 => u64::MAX,
            _ => self.next(),
        }
    }
}

/// Pages at a fixed address.
fn map(address: u64, size: usize, protection: i32) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: nothing of this process is there, or the call fails.
    let got = unsafe { libc::mmap(address as *mut _, size, protection, flags, -1, 0) };
    assert_eq!(got as u64, address, "no pages at {address:#x}");
}

fn protect_pages(address: u64, size: usize, protection: i32) {
    // SAFETY: pages that `map` made, which hold no Rust object.
    let done = unsafe { libc::mprotect(address as *mut _, size, protection) };
    assert_eq!(done, 0);
}

fn put(address: u64, bytes: &[u8]) {
    // SAFETY: `map` made these pages, and nothing else uses them.
    unsafe { std::ptr::copy(bytes.as_ptr(), address as *mut u8, bytes.len()) };
}

fn native_memory() -> Vec<u8> {
    let mut bytes = vec![0; MEMORY_SIZE];
    // SAFETY: as in `put`.
    unsafe { std::ptr::copy(MEMORY_AT as *const u8, bytes.as_mut_ptr(), MEMORY_SIZE) };
    bytes
}

/// The native side. Its addresses are fixed: one at a time.
struct Native {
    enter: u64,
    leave: u64,
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl Drop for Native {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and used by nobody any more.
        unsafe {
            libc::munmap(MEMORY_AT as *mut _, MEMORY_SIZE);
            libc::munmap(CONTEXT as *mut _, 4096);
            libc::munmap(SEQUENCES_AT as *mut _, SLOT as usize * SLOTS + 4096);
        }
    }
}

const GENERAL: [AsmRegister64; 16] = [
    rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15,
];

fn field(offset: usize) -> u64 {
    CONTEXT + offset as u64
}

fn register_field(number: usize) -> u64 {
    field(std::mem::offset_of!(Context, registers) + 8 * number)
}

impl Native {
    fn new() -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        map(MEMORY_AT, MEMORY_SIZE, libc::PROT_READ | libc::PROT_WRITE);
        map(CONTEXT, 4096, libc::PROT_READ | libc::PROT_WRITE);
        map(
            SEQUENCES_AT,
            SLOT as usize * SLOTS + 4096,
            libc::PROT_READ | libc::PROT_WRITE,
        );
        let flags = field(std::mem::offset_of!(Context, flags));
        let host_stack = field(std::mem::offset_of!(Context, host_stack));
        let saved = [rbx, rbp, r12, r13, r14, r15];
        let enter = assemble(64, STUBS_AT, |a| {
            for register in saved {
                a.push(register).unwrap();
            }
            a.push(rdi).unwrap();
            a.mov(qword_ptr(host_stack), rsp).unwrap();
            a.fxrstor64(ptr(CONTEXT)).unwrap();
            a.push(qword_ptr(flags)).unwrap();
            a.popfq().unwrap();
            for (number, register) in GENERAL.into_iter().enumerate() {
                a.mov(register, qword_ptr(register_field(number))).unwrap();
            }
            a.jmp(qword_ptr(field(std::mem::offset_of!(Context, spare))))
                .unwrap();
        });
        let leave_at = STUBS_AT + enter.len() as u64;
        let leave = assemble(64, leave_at, |a| {
            for (number, register) in GENERAL.into_iter().enumerate() {
                a.mov(qword_ptr(register_field(number)), register).unwrap();
            }
            a.mov(rsp, qword_ptr(host_stack)).unwrap();
            a.pushfq().unwrap();
            a.pop(qword_ptr(flags)).unwrap();
            a.fxsave64(ptr(CONTEXT)).unwrap();
            a.fninit().unwrap();
            a.mov(
                dword_ptr(field(std::mem::offset_of!(Context, spare) + 8)),
                0x1f80,
            )
            .unwrap();
            a.ldmxcsr(dword_ptr(field(std::mem::offset_of!(Context, spare) + 8)))
                .unwrap();
            a.cld().unwrap();
            a.pop(rdi).unwrap();
            for register in saved.into_iter().rev() {
                a.pop(register).unwrap();
            }
            a.ret().unwrap();
        });
        put(STUBS_AT, &enter);
        put(leave_at, &leave);
        Self {
            enter: STUBS_AT,
            leave: leave_at,
            _alone: alone,
        }
    }

    fn writable(&self) {
        let size = SLOT as usize * SLOTS + 4096;
        protect_pages(SEQUENCES_AT, size, libc::PROT_READ | libc::PROT_WRITE);
    }

    fn executable(&self) {
        let size = SLOT as usize * SLOTS + 4096;
        protect_pages(SEQUENCES_AT, size, libc::PROT_READ | libc::PROT_EXEC);
    }

    fn run(&self, sequence: u64, context: &Context, memory: &[u8]) -> Context {
        let mut context = *context;
        context.spare[0] = sequence;
        put(MEMORY_AT, memory);
        // SAFETY: the context's pages are ours alone, and so aligned.
        unsafe { (CONTEXT as *mut Context).write(context) };
        // SAFETY: the stub saves what the C convention asks for; sequences use
        // memory at MEMORY_AT only.
        unsafe { std::mem::transmute::<u64, extern "C" fn()>(self.enter)() };
        // SAFETY: as above.
        unsafe { (CONTEXT as *const Context).read() }
    }

    fn end(&self, address: u64) -> [u8; END] {
        let distance = self.leave.wrapping_sub(address + END as u64) as u32;
        let [a, b, c, d] = distance.to_le_bytes();
        [0xe9, a, b, c, d]
    }
}

/// What a baseline CPU has.
const FEATURES: [CpuidFeature; 16] = [
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

fn candidates() -> Vec<Code> {
    Code::values()
        .filter(|&code| {
            let info = code.op_code();
            let features = code.cpuid_features();
            info.is_instruction()
                && info.mode64()
                && code.encoding() == EncodingKind::Legacy
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

struct Generator {
    random: Random,
    codes: Vec<Code>,
    encoder: Encoder,
    /// RCL and RCR of 8 and 16 bits too.
    rotations: bool,
}

impl Generator {
    fn new(seed: u64) -> Self {
        Self {
            random: Random(seed | 1),
            codes: candidates(),
            encoder: Encoder::new(64),
            rotations: true,
        }
    }

    fn register(&mut self, size: usize, written: bool) -> Register {
        loop {
            let number = self.random.below(16) as u32;
            let register = Register::RAX + number;
            if written && RESERVED.contains(&register) {
                continue;
            }
            return match size {
                8 => register,
                4 => Register::EAX + number,
                2 => Register::AX + number,
                // AH to BH too, where no REX prefix is needed.
                _ if self.random.below(8) == 0 => {
                    self.random.of(&[Register::AH, Register::CH, Register::DH])
                }
                _ => Register::AL + if number >= 4 { number + 4 } else { number },
            };
        }
    }

    fn memory(&mut self, size: usize) -> MemoryOperand {
        let aligned = size >= 16;
        let base = self.random.of(&[BASE, OTHER_BASE]);
        let mut displacement = self.random.below(160) as i64;
        if aligned {
            displacement &= !15;
        }
        let index = if aligned || self.random.below(3) != 0 {
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
        let memory_too = |this: &mut Self| this.random.below(2) == 0;
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
                let register = Register::ST0 + self.random.below(8) as u32;
                set(instruction, register);
            }
            Kind::mm_reg | Kind::mm_rm => {
                let register = Register::MM0 + self.random.below(8) as u32;
                set(instruction, register);
            }
            Kind::xmm_reg | Kind::xmm_rm => {
                let register = Register::XMM0 + self.random.below(16) as u32;
                set(instruction, register);
            }
            Kind::r8_or_mem
            | Kind::r16_or_mem
            | Kind::r32_or_mem
            | Kind::r64_or_mem
            | Kind::mm_or_mem
            | Kind::xmm_or_mem => {
                if memory_too(self) {
                    self.put_memory(instruction, index);
                } else {
                    let number = self.random.below(16) as u32;
                    let register = match kind {
                        Kind::r8_or_mem => self.register(1, true),
                        Kind::r16_or_mem => self.register(2, true),
                        Kind::r32_or_mem => self.register(4, true),
                        Kind::r64_or_mem => self.register(8, true),
                        Kind::mm_or_mem => Register::MM0 + number % 8,
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
        let memory = self.memory(instruction.memory_size().size());
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
        if in_memory && info.can_use_lock_prefix() && self.random.below(2) == 0 {
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
        let from = MEMORY_AT + self.random.below(0x1200) as u64;
        let to = MEMORY_AT + 0x200 + self.random.below(0x1800) as u64;
        let count = self.random.below(40) as u32;
        let down = self.random.below(4) == 0;
        match self.random.below(8) {
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
                match (kind, self.random.below(6)) {
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

    fn sequence(&mut self, address: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let length = 1 + self.random.below(8);
        while bytes.len() < SLOT as usize - 80 {
            if bytes.len() >= length * 5 {
                break;
            }
            if self.random.below(12) == 0 {
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
            } else {
                let _ = self.encoder.take_buffer();
            }
        }
        bytes
    }

    fn memory_bytes(&mut self) -> Vec<u8> {
        (0..MEMORY_SIZE).map(|_| self.random.next() as u8).collect()
    }

    fn context(&mut self) -> Context {
        let mut context = Context {
            fpu: [0; 512],
            registers: std::array::from_fn(|_| self.random.value()),
            flags: self.random.next() & 0x8d5 | 2,
            host_stack: 0,
            spare: [0; 6],
        };
        for byte in &mut context.fpu[160..416] {
            *byte = self.random.next() as u8;
        }
        context.fpu[..2].copy_from_slice(&0x37f_u16.to_le_bytes());
        context.fpu[24..28].copy_from_slice(&0x1f80_u32.to_le_bytes());
        // The first base near a page's end, the other at the start of memory.
        context.registers[BASE.number()] = MEMORY_AT + 0x1000 - 80;
        context.registers[OTHER_BASE.number()] = MEMORY_AT + 0x100;
        context.registers[INDEX.number()] = self.random.below(64) as u64;
        context.registers[Register::RSP.number()] = STACK_TOP - 0x400;
        context
    }
}

/// x87's pointers to the last instruction and operand are the host's.
fn comparable(fpu: &[u8]) -> Vec<u8> {
    let mut fpu = fpu[..416].to_vec();
    fpu[6..24].fill(0);
    fpu[28..32].fill(0);
    fpu
}

fn describe(bytes: &[u8], address: u64) -> String {
    let mut text = format!("{bytes:02x?}\n");
    for instruction in Decoder::with_ip(64, bytes, address, DecoderOptions::NONE) {
        text += &format!(
            "  {:?} {}\n",
            instruction.code(),
            instruction.has_lock_prefix()
        );
    }
    text
}

fn state_of(guest: &Guest, context: &Context, address: u64) -> CpuState {
    CpuState {
        registers: context.registers,
        rip: address,
        rflags: context.flags,
        fpu: context.fpu.to_vec(),
        ..guest.long_mode()
    }
}

/// What differs between the host's and the guest's end, if anything.
fn difference(
    native: &Context,
    native_memory: &[u8],
    guest: &CpuState,
    guest_memory: &[u8],
) -> Option<String> {
    for number in 0..16 {
        let (wanted, got) = (native.registers[number], guest.registers[number]);
        if wanted != got {
            return Some(format!("register {number}: {got:#x}, not {wanted:#x}"));
        }
    }
    const ARITHMETIC: u64 = 0x8d5;
    let (wanted, got) = (native.flags & ARITHMETIC, guest.rflags & ARITHMETIC);
    if wanted != got {
        return Some(format!("flags: {got:#x}, not {wanted:#x}"));
    }
    let (wanted, got) = (comparable(&native.fpu), comparable(&guest.fpu));
    if let Some(place) = (0..wanted.len()).find(|&index| wanted[index] != got[index]) {
        return Some(format!(
            "FXSAVE area at {place}: {:#x}, not {:#x}",
            got[place], wanted[place]
        ));
    }
    let place = (0..MEMORY_SIZE).find(|&index| native_memory[index] != guest_memory[index]);
    place.map(|place| {
        let (got, wanted) = (guest_memory[place], native_memory[place]);
        format!("memory at {place:#x}: {got:#x}, not {wanted:#x}")
    })
}

/// Runs a sequence that is in place on both sides; what differs.
fn both(
    native: &Native,
    guest: &mut Guest,
    address: u64,
    bytes: &[u8],
    context: &Context,
    memory: &[u8],
) -> Result<(), String> {
    let end = native.run(address, context, memory);
    guest.memory.write(MEMORY_AT, memory);
    let state = state_of(guest, context, address);
    guest.cpu.restore(&state);
    let exit = guest.run();
    let after = guest.cpu.save();
    let what = describe(bytes, address);
    if exit != Exit::Halted || after.rip != address + bytes.len() as u64 + 1 {
        return Err(format!("{exit:?} {:?} {what}", guest.frame()));
    }
    let guest_memory = guest.memory.read(MEMORY_AT, MEMORY_SIZE);
    match difference(&end, &native_memory(), &after, &guest_memory) {
        Some(text) => Err(format!("{text}\n{what}before: {:x?}", context.registers)),
        None => Ok(()),
    }
}

/// A guest whose code is interpreted, or translated from the first execution on.
fn guest_for(translated: bool) -> Guest {
    let mut guest = Guest::new(|a| a.hlt().unwrap());
    if translated {
        guest.cpu.translate_after(1);
    } else {
        guest.cpu.interpret_only();
    }
    guest
}

fn compare(seed: u64, sequences: usize, translated: bool) {
    println!("SEED={seed:#x}");
    let native = Native::new();
    let mut guest = guest_for(translated);
    let mut generator = Generator::new(seed);
    generator.rotations = !translated;
    assert!(generator.codes.len() > 400, "{}", generator.codes.len());
    let mut done = 0;
    while done < sequences {
        native.writable();
        let batch: Vec<_> = (0..SLOTS as u64)
            .map(|slot| {
                let address = SEQUENCES_AT + slot * SLOT;
                let bytes = generator.sequence(address);
                let end = address + bytes.len() as u64;
                put(address, &bytes);
                put(end, &native.end(end));
                guest.memory.write(address, &bytes);
                guest.memory.write(end, &[0xf4]);
                (address, bytes)
            })
            .collect();
        native.executable();
        for (address, bytes) in batch {
            let context = generator.context();
            let memory = generator.memory_bytes();
            if let Err(text) = both(&native, &mut guest, address, &bytes, &context, &memory) {
                panic!("SEED={seed:#x} {text}");
            }
        }
        done += SLOTS;
    }
}

fn seed() -> u64 {
    let given = std::env::var("SEED").ok();
    let parsed = given.and_then(|text| {
        let digits = text.trim_start_matches("0x");
        u64::from_str_radix(digits, 16).ok()
    });
    parsed.unwrap_or_else(|| weft_soft::clock::host_tsc().wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

#[test]
fn sequences_do_what_they_do_natively() {
    compare(seed(), 50_000, false);
}

#[test]
fn translated_sequences_do_what_they_do_natively() {
    compare(seed(), 10_000, true);
}

#[test]
#[ignore = "minutes: millions of sequences"]
fn millions_of_sequences_do_what_they_do_natively() {
    for round in 0..40 {
        compare(seed().wrapping_add(round << 32), 100_000, false);
    }
}

#[test]
#[ignore = "minutes: millions of sequences"]
fn millions_of_translated_sequences_do_what_they_do_natively() {
    for round in 0..40 {
        compare(seed().wrapping_add(round << 32), 100_000, true);
    }
}

/// Sequences that once did something else.
const REGRESSIONS: [(&str, &[u8]); 7] = [
    // Translated, the flags were those before: or edi, 1; xor edx, edx;
    // div edi; lahf; and the same with R10.
    (
        "a division's undefined flags are read",
        &[
            0x83, 0xcf, 0x01, 0x31, 0xd2, 0xf7, 0xf7, 0x9f, 0x41, 0x83, 0xca, 0x01, 0x31, 0xd2,
            0x41, 0xf7, 0xf2, 0x9f,
        ],
    ),
    // Translated, half of the immediate became code of the host.
    (
        "MOV of 64 bits with an operand-size prefix",
        &[0x66, 0x48, 0xb9, 1, 2, 3, 4, 0x99, 0x90, 0x90, 0x90],
    ),
    // C0 to C3 of the status word were taken for arithmetic flags.
    ("x87 arithmetic leaves the flags alone", &[0xde, 0xfb]),
    // Taken for an instruction without XMM registers: #UD.
    (
        "conversions from memory to a general register",
        &[0xf2, 0x41, 0x0f, 0x2d, 0x54, 0x24, 0x45],
    ),
    // Ran with the host's flags.
    ("FCMOVcc reads the flags", &[0xda, 0xdc, 0xdb, 0xc9]),
    // The size of its address was not known.
    ("XLAT", &[0xb0, 0x09, 0xd7]),
    // Compares with RAX, which it may be itself.
    (
        "CMPXCHG of RAX, of AH, of another",
        &[0x0f, 0xb1, 0xc8, 0x0f, 0xb0, 0xcc, 0x0f, 0xb1, 0xd1],
    ),
];

#[test]
fn what_was_wrong_once_is_right() {
    let native = Native::new();
    let mut guests = [guest_for(false), guest_for(true)];
    let mut generator = Generator::new(1);
    for (name, bytes) in REGRESSIONS {
        native.writable();
        let end = SEQUENCES_AT + bytes.len() as u64;
        put(SEQUENCES_AT, bytes);
        put(end, &native.end(end));
        for guest in &guests {
            guest.memory.write(SEQUENCES_AT, bytes);
            guest.memory.write(end, &[0xf4]);
        }
        native.executable();
        for _ in 0..100 {
            let context = generator.context();
            let memory = generator.memory_bytes();
            for guest in &mut guests {
                let outcome = both(&native, guest, SEQUENCES_AT, bytes, &context, &memory);
                assert_eq!(outcome, Ok(()), "{name}");
            }
        }
    }
}
