//! The vCPU's state as the interpreter and generated code use it.
//!
//! Generated code addresses the fields by `offset_of!`; the hot ones come first.

use std::ptr::null;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use weft_vcpu::{CpuModel, DescriptorTable, Environment, Memory, Segment};

use crate::block::{Block, CodeCache, JumpCache, Mode};
use crate::debug::Breakpoints;
use crate::fetch::FetchCache;
use crate::flags;
use crate::jit::State;
use crate::jit::thunk::Thunks;
use crate::machine::SoftMachine;
use crate::mmu::ExecutedPages;
use crate::msr::Msrs;
use crate::op::Outcome;
use crate::recent::PageRecorder;
use crate::requests::VcpuRequests;
use crate::run::{Configuration, TRANSLATED_AFTER};
use crate::tlb::Tlb;

/// The processor's memory of x87 and SSE in FXSAVE's 64-bit format (Intel SDM
/// volume 1, 10.5.1): XMM register n at 160 + 16 n, MXCSR at 24.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct FxArea(pub [u8; 512]);

/// The upper halves of the YMM registers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct YmmHigh(pub [u8; 256]);

/// Why an instruction could not be executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Fault {
    /// For a page fault, what goes into CR2.
    pub address: u64,
    /// Error code, where the vector has one.
    pub error: u32,
    /// Exception number.
    pub vector: u8,
    /// Whether the vector has an error code.
    pub has_error: bool,
    /// No exception, but an instruction that would have changed the code being
    /// run: becomes [`Outcome::Abort`].
    pub abort: bool,
}

/// The instruction at hand cannot be completed: `Cpu::fault` says why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faulted;

/// Numbers of segment registers: indices of [`Cpu::segment_bases`].
pub mod segment {
    /// No segment: base 0.
    pub const NONE: usize = 0;
    pub const FS: usize = 1;
    pub const GS: usize = 2;
    pub const CS: usize = 3;
    pub const DS: usize = 4;
    pub const ES: usize = 5;
    pub const SS: usize = 6;
}

/// Numbers of general registers in [`Cpu::registers`].
pub mod register {
    pub const RAX: usize = 0;
    pub const RCX: usize = 1;
    pub const RDX: usize = 2;
    pub const RBX: usize = 3;
    pub const RSP: usize = 4;
    pub const RBP: usize = 5;
    pub const RSI: usize = 6;
    pub const RDI: usize = 7;
    pub const R11: usize = 11;
}

/// One virtual CPU. Lives on the heap and never moves while it runs.
#[repr(C, align(64))]
pub struct Cpu {
    /// RAX RCX RDX RBX RSP RBP RSI RDI R8 to R15, then 0, the RIP of the first
    /// instruction of the block being run, and the address that
    /// [`crate::decode`] had computed beforehand for an unusual memory operand.
    pub registers: [u64; 19],
    /// Arithmetic flags: see [`crate::flags`].
    pub flags: u64,
    /// The next instruction's address, between blocks. In 16- and 32-bit code
    /// relative to CS.
    pub rip: u64,
    /// Linear addresses of segments, by [`segment`]. In 64-bit code only FS and
    /// GS are ever used.
    pub segment_bases: [u64; 8],
    /// Instructions that may still be executed before the CPU has to look at
    /// its clock. A block that is entered takes its count off; one whose count
    /// is more than what is left is not entered.
    pub budget: i64,
    /// Not zero: somebody wants this vCPU to leave at the next block boundary.
    /// In [`Cpu::requests`].
    pub request: *const AtomicU32,
    /// What generated code needs besides.
    pub generated: State,
    /// The rest of RFLAGS, at their places: TF IF DF IOPL NT RF AC ID.
    pub rflags_system: u64,
    /// Which mode blocks have to be for.
    pub mode: Mode,
    /// Current privilege level.
    pub cpl: u8,
    /// One instruction is run alone, not from a block: writes to code are done.
    pub alone: bool,
    /// STI or a load of SS was the last instruction, if RIP is still
    /// `shadow_rip`: no interrupt before the next one is executed.
    pub interrupt_shadow: bool,
    /// HLT, and nothing happened since.
    pub halted: bool,
    /// An NMI is being handled.
    pub nmi_blocked: bool,
    /// There is no space for another block or thunk: all must be freed.
    pub code_is_full: bool,
    /// Rises when links to blocks of other pages become void; even.
    pub global_epoch: u64,
    /// Rises when such links become void where they lead to a page whose
    /// translation is not global; odd.
    pub local_epoch: u64,
    /// The block being run.
    pub block: *const Block,
    /// Of the last [`Outcome::Fault`].
    pub fault: Fault,
    /// Instructions executed, once `budget` has been taken off: see
    /// [`Cpu::instructions`].
    pub instructions_limit: u64,
    /// x87 and SSE.
    pub fpu: FxArea,
    /// AVX.
    pub ymm_high: YmmHigh,
    pub xcr0: u64,
    /// For supervisor (0) and user mode (1).
    pub tlbs: [Tlb; 2],
    /// For supervisor (0) and user mode (1).
    pub jump_caches: [JumpCache; 2],
    /// The supervisor's jump cache has entries whose translation is not global.
    pub supervisor_jumps_local: bool,
    /// An interrupt waits that could not be delivered when it was looked at.
    pub interrupt_waits: bool,
    /// The instruction in the shadow, while `interrupt_shadow` is set.
    pub shadow_rip: u64,
    /// Pages that the jump caches may lead to.
    pub executed_pages: ExecutedPages,
    /// Rises when a page was taken away.
    pub revocations: u64,

    /// Segment registers by [`segment`]; their bases in use are in
    /// `segment_bases`.
    pub segments: [Segment; 7],
    /// Task register.
    pub tr: Segment,
    /// Local descriptor table.
    pub ldtr: Segment,
    /// Global descriptor table.
    pub gdtr: DescriptorTable,
    /// Interrupt descriptor table.
    pub idtr: DescriptorTable,
    pub cr0: u64,
    pub cr2: u64,
    pub cr3: u64,
    pub cr4: u64,
    /// IA32_EFER.
    pub efer: u64,
    /// DR0 to DR3, DR6, DR7.
    pub debug: [u64; 6],
    /// What they enable.
    pub breakpoints: Breakpoints,
    /// Bits of DR6 for a trap behind the instruction at hand.
    pub pending_debug: u64,
    /// The instruction at hand began with RFLAGS.TF set, and traps.
    pub stepping: bool,
    /// `interrupt_shadow` is that of a load of SS, which holds back debug traps
    /// too.
    pub stack_shadow: bool,
    /// Model-specific registers.
    pub msrs: Msrs,
    /// Where instructions are, for decoding.
    pub fetch: FetchCache,
    /// Decoded blocks.
    pub code: CodeCache,
    /// SSE and x87 instructions for the interpreter.
    pub thunks: Thunks,
    /// Guest memory.
    pub memory: Arc<dyn Memory>,
    /// What the vCPUs of this slice share.
    pub machine: Arc<SoftMachine>,
    /// Pages that were filled into the TLB.
    pub recent: PageRecorder,
    /// What others want of this vCPU.
    pub requests: Arc<VcpuRequests>,
    /// Devices, during [`crate::SoftCpu::run`].
    pub environment: Option<*mut dyn Environment>,
    /// Executions after which a block is translated.
    pub translated_after: u32,
    /// Clock and CPUID.
    pub configuration: Configuration,
    /// Guest TSC minus the host's, or minus the instruction clock's.
    pub tsc_offset: u64,
}

// SAFETY: the raw pointers point to what this vCPU owns (blocks, its requests,
// which `requests` keeps alive), or are null between runs (`environment`).
unsafe impl Send for Cpu {}

impl Cpu {
    /// Index of a register that is always 0.
    pub const NO_REGISTER: u8 = 16;
    /// Index of the running block's RIP.
    pub const BLOCK_RIP: u8 = 17;
    /// Index of an address computed beforehand.
    pub const ADDRESS: u8 = 18;

    /// A CPU of `machine`, all zero: not a state that a processor is ever in.
    pub fn new(
        machine: &Arc<SoftMachine>,
        configuration: Configuration,
    ) -> std::io::Result<Box<Self>> {
        let requests = machine.join();
        Ok(Box::new(Self {
            registers: [0; 19],
            flags: 0,
            rip: 0,
            segment_bases: [0; 8],
            budget: 0,
            request: requests.request(),
            generated: State::default(),
            rflags_system: 0,
            mode: Mode::default(),
            cpl: 0,
            alone: false,
            interrupt_shadow: false,
            halted: false,
            nmi_blocked: false,
            code_is_full: false,
            global_epoch: 2,
            local_epoch: 1,
            block: null(),
            fault: Fault::default(),
            instructions_limit: 0,
            fpu: FxArea([0; 512]),
            ymm_high: YmmHigh([0; 256]),
            xcr0: 1,
            tlbs: Default::default(),
            jump_caches: Default::default(),
            supervisor_jumps_local: false,
            interrupt_waits: false,
            shadow_rip: 0,
            executed_pages: ExecutedPages::default(),
            revocations: 0,
            segments: [Segment::default(); 7],
            tr: Segment::default(),
            ldtr: Segment::default(),
            gdtr: DescriptorTable::default(),
            idtr: DescriptorTable::default(),
            cr0: 0,
            cr2: 0,
            cr3: 0,
            cr4: 0,
            efer: 0,
            debug: [0; 6],
            breakpoints: Breakpoints::default(),
            pending_debug: 0,
            stepping: false,
            stack_shadow: false,
            msrs: Msrs::default(),
            fetch: FetchCache::default(),
            code: CodeCache::default(),
            thunks: Thunks::new()?,
            memory: machine.memory().clone(),
            machine: machine.clone(),
            recent: machine.record(),
            requests,
            environment: None,
            translated_after: TRANSLATED_AFTER,
            configuration,
            tsc_offset: 0,
        }))
    }

    /// The bits of CR4 that this CPU has.
    pub fn cr4_bits(&self) -> u64 {
        match self.configuration.model {
            CpuModel::V1 | CpuModel::V2 => cr4::ALL,
            CpuModel::V3 => cr4::ALL | cr4::OSXSAVE,
        }
    }

    /// 1 for the TLB and jump cache of user mode, 0 for the supervisor's.
    #[inline(always)]
    pub fn privilege_class(&self) -> usize {
        usize::from(self.mode.is_user())
    }

    pub fn rflags(&self) -> u64 {
        self.rflags_system | flags::to_rflags(self.flags) | 2
    }

    /// Sets all of RFLAGS that this CPU has.
    pub fn set_rflags(&mut self, rflags: u64) {
        self.flags = flags::from_rflags(rflags);
        if self.rflags_system & !rflags & rflags::AC != 0 {
            self.tlbs[0].close_user_pages();
        }
        self.rflags_system = rflags & rflags::SYSTEM;
    }

    /// An exception without an error code.
    #[cold]
    pub fn raise(&mut self, vector: u8) -> Faulted {
        self.fault = Fault {
            vector,
            ..Fault::default()
        };
        Faulted
    }

    /// An exception with an error code.
    #[cold]
    pub fn raise_error(&mut self, vector: u8, error: u32) -> Faulted {
        self.fault = Fault {
            vector,
            error,
            has_error: true,
            ..Fault::default()
        };
        Faulted
    }

    /// #GP(`error`).
    #[cold]
    pub fn general_protection(&mut self, error: u32) -> Faulted {
        self.raise_error(vector::GENERAL_PROTECTION, error)
    }

    /// #UD.
    #[cold]
    pub fn undefined(&mut self) -> Faulted {
        self.raise(vector::INVALID_OPCODE)
    }

    /// What a handler returns for an instruction that could not be completed.
    #[inline(always)]
    pub fn outcome(&self, _: Faulted) -> Outcome {
        if self.fault.abort {
            Outcome::Abort
        } else {
            Outcome::Fault
        }
    }
}

/// Exception numbers (Intel SDM volume 3, table 6-1).
pub mod vector {
    /// #DE
    pub const DIVIDE: u8 = 0;
    /// #DB
    pub const DEBUG: u8 = 1;
    /// NMI
    pub const NMI: u8 = 2;
    /// #BP
    pub const BREAKPOINT: u8 = 3;
    /// #OF
    pub const OVERFLOW: u8 = 4;
    /// #BR
    pub const BOUND: u8 = 5;
    /// #UD
    pub const INVALID_OPCODE: u8 = 6;
    /// #NM
    pub const DEVICE_NOT_AVAILABLE: u8 = 7;
    /// #DF
    pub const DOUBLE_FAULT: u8 = 8;
    /// #TS
    pub const INVALID_TSS: u8 = 10;
    /// #NP
    pub const NOT_PRESENT: u8 = 11;
    /// #SS
    pub const STACK: u8 = 12;
    /// #GP
    pub const GENERAL_PROTECTION: u8 = 13;
    /// #PF
    pub const PAGE_FAULT: u8 = 14;
    /// #MF
    pub const X87: u8 = 16;
    /// #XM
    pub const SIMD: u8 = 19;
}

/// Bits of RFLAGS.
pub mod rflags {
    /// Trap flag.
    pub const TF: u64 = 1 << 8;
    /// Interrupts enabled.
    pub const IF: u64 = 1 << 9;
    /// String instructions go down.
    pub const DF: u64 = 1 << 10;
    /// I/O privilege level.
    pub const IOPL: u64 = 3 << 12;
    /// Nested task.
    pub const NT: u64 = 1 << 14;
    /// Resume.
    pub const RF: u64 = 1 << 16;
    /// Virtual-8086 mode: not offered.
    pub const VM: u64 = 1 << 17;
    /// Alignment check; the supervisor may access user pages.
    pub const AC: u64 = 1 << 18;
    /// CPUID is there.
    pub const ID: u64 = 1 << 21;
    /// All that `Cpu::rflags_system` holds.
    pub const SYSTEM: u64 = TF | IF | DF | IOPL | NT | RF | AC | ID;
}

/// Bits of CR0.
pub mod cr0 {
    /// Protected mode.
    pub const PE: u64 = 1;
    /// Monitor coprocessor.
    pub const MP: u64 = 1 << 1;
    /// No x87.
    pub const EM: u64 = 1 << 2;
    /// Task switched.
    pub const TS: u64 = 1 << 3;
    /// Always 1.
    pub const ET: u64 = 1 << 4;
    /// x87 errors raise #MF.
    pub const NE: u64 = 1 << 5;
    /// Read-only pages hold for the supervisor too.
    pub const WP: u64 = 1 << 16;
    /// Alignment mask.
    pub const AM: u64 = 1 << 18;
    /// Not write-through.
    pub const NW: u64 = 1 << 29;
    /// Cache disable.
    pub const CD: u64 = 1 << 30;
    /// Paging.
    pub const PG: u64 = 1 << 31;
    pub const ALL: u64 = PE | MP | EM | TS | ET | NE | WP | AM | NW | CD | PG;
}

/// Bits of CR4.
pub mod cr4 {
    /// Time stamps only for the supervisor.
    pub const TSD: u64 = 1 << 2;
    /// Debugging extensions.
    pub const DE: u64 = 1 << 3;
    /// 4 MiB pages without PAE.
    pub const PSE: u64 = 1 << 4;
    /// Entries of 64 bits.
    pub const PAE: u64 = 1 << 5;
    /// Machine checks.
    pub const MCE: u64 = 1 << 6;
    /// Global pages.
    pub const PGE: u64 = 1 << 7;
    /// FXSAVE and SSE.
    pub const OSFXSR: u64 = 1 << 9;
    /// #XM.
    pub const OSXMMEXCPT: u64 = 1 << 10;
    /// Only the supervisor sees where descriptor tables are.
    pub const UMIP: u64 = 1 << 11;
    /// Instructions for the bases of FS and GS.
    pub const FSGSBASE: u64 = 1 << 16;
    /// XSAVE. Of `CpuModel::V3`.
    pub const OSXSAVE: u64 = 1 << 18;
    /// The supervisor does not execute user pages.
    pub const SMEP: u64 = 1 << 20;
    /// The supervisor does not access user pages unless RFLAGS.AC is set.
    pub const SMAP: u64 = 1 << 21;
    /// All that every model offers.
    pub const ALL: u64 =
        TSD | DE | PSE | PAE | MCE | PGE | OSFXSR | OSXMMEXCPT | UMIP | FSGSBASE | SMEP | SMAP;
}

/// Bits of IA32_EFER.
pub mod efer {
    /// SYSCALL.
    pub const SCE: u64 = 1;
    /// Long mode enabled.
    pub const LME: u64 = 1 << 8;
    /// Long mode active.
    pub const LMA: u64 = 1 << 10;
    /// No-execute pages.
    pub const NXE: u64 = 1 << 11;
    /// All that a guest may write.
    pub const WRITABLE: u64 = SCE | LME | NXE;
}
