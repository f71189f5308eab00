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
//!
//! | module | holds |
//! | --- | --- |
//! | [`class`] | which unit runs an instruction, and what the manual says of it |
//! | [`plan`] | what an instruction reads and changes, and its thunk |
//! | [`vector`], [`x87`] | the state of these units, loaded and stored |
//! | [`field`] | where in the `Cpu` a thunk finds what it needs |

mod class;
mod field;
mod plan;
mod vector;
mod x87;

use std::collections::HashMap;

use iced_x86::{Encoder, Instruction, InstructionInfoFactory};
use weft_vcpu::{Access, CpuModel};

use super::arena::{Arena, ArenaFull};
use super::assembler::Assembler;
use crate::cpu::Cpu;
use plan::Plan;

pub use class::{is_plain_sse, needs_alignment};
pub use field::xmm_offset;
pub use vector::HOST_MXCSR;

/// Bytes of code for thunks: some 100 each, and a Debian user land has about a
/// thousand different ones.
const ARENA_SIZE: usize = 4 << 20;

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
        key.extend(plan.vectors.loaded.to_le_bytes());
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
