//! The architectural state of an x86-64 CPU, as plain data: what is saved, moved
//! and restored, whichever back end runs it.

use serde::{Deserialize, Serialize};

/// A segment register with its hidden part (Intel SDM volume 3, 3.4.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// What the program sees.
    pub selector: u16,
    /// Linear address of the segment's first byte.
    pub base: u64,
    /// Highest offset in the segment, in bytes.
    pub limit: u32,
    /// Access rights as in the second word of a descriptor, bits 8 to 23
    /// shifted down by 8: type, S, DPL, P, then AVL, L, D/B and G at bits 12 to 15.
    pub rights: u16,
}

/// GDTR or IDTR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescriptorTable {
    /// Linear address.
    pub base: u64,
    /// Highest offset, in bytes.
    pub limit: u16,
}

/// An event that the CPU was given and has not delivered yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Undelivered {
    /// From the local APIC, which has it in service; or INT n when `software`.
    Interrupt {
        vector: u8,
        /// By an instruction.
        software: bool,
    },
    /// A non-maskable interrupt.
    NonMaskable,
    /// A fault or trap.
    Exception {
        vector: u8,
        /// What it pushes, if it does.
        error_code: Option<u32>,
    },
}

/// Everything that a CPU is, apart from its local APIC.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpuState {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub registers: [u64; 16],
    /// Instruction pointer.
    pub rip: u64,
    pub rflags: u64,
    /// Code segment; its DPL bits are not the CPL: that is `cpl`.
    pub cs: Segment,
    /// Data segments.
    pub ds: Segment,
    /// See `ds`.
    pub es: Segment,
    /// See `ds`.
    pub ss: Segment,
    /// Its base is IA32_FS_BASE.
    pub fs: Segment,
    /// Its base is IA32_GS_BASE.
    pub gs: Segment,
    /// Task register.
    pub tr: Segment,
    /// Local descriptor table.
    pub ldtr: Segment,
    /// Global descriptor table.
    pub gdtr: DescriptorTable,
    /// Interrupt descriptor table.
    pub idtr: DescriptorTable,
    /// Current privilege level.
    pub cpl: u8,
    /// Control register 0.
    pub cr0: u64,
    /// Control register 2.
    pub cr2: u64,
    /// Control register 3.
    pub cr3: u64,
    /// Control register 4.
    pub cr4: u64,
    /// IA32_EFER.
    pub efer: u64,
    /// DR0 to DR3, DR6, DR7.
    pub debug: [u64; 6],
    /// x87 and SSE in FXSAVE's 64-bit format (Intel SDM volume 1, 10.5.1), then
    /// as many bytes of XSAVE's as the CPU offers; 512 bytes at least.
    pub fpu: Vec<u8>,
    pub xcr0: u64,
    /// Other model-specific registers, by number: STAR, LSTAR, CSTAR, SFMASK,
    /// KERNEL_GS_BASE, TSC_AUX, PAT, SYSENTER, MISC_ENABLE and so on.
    pub msrs: Vec<(u32, u64)>,
    /// Guest TSC minus what the host's TSC showed, modulo 2^64.
    pub tsc_offset: u64,
    /// Instructions executed, where the back end counts them.
    pub instructions: u64,
    /// After STI or a load of SS: no interrupt before the next instruction.
    pub interrupt_shadow: bool,
    /// HLT was executed and nothing woke the CPU since.
    pub halted: bool,
    /// An NMI is being handled: the next waits for IRET.
    pub nmi_blocked: bool,
    /// An NMI came meanwhile.
    #[serde(default)]
    pub nmi_waits: bool,
    /// To be delivered before the next instruction. Only a back end that does not
    /// deliver within one step (KVM) leaves one.
    #[serde(default)]
    pub undelivered: Option<Undelivered>,
}

impl CpuState {
    /// A CPU after power-on or INIT (Intel SDM volume 3, table 10-1): real mode
    /// at `f000:fff0`, caches disabled.
    pub fn reset() -> Self {
        let data = Segment {
            selector: 0,
            base: 0,
            limit: 0xffff,
            rights: 0x93,
        };
        let mut fpu = vec![0; 512];
        // FCW 37f, MXCSR 1f80: FNINIT's and the reset value.
        fpu[0..2].copy_from_slice(&0x37f_u16.to_le_bytes());
        fpu[24..28].copy_from_slice(&0x1f80_u32.to_le_bytes());
        Self {
            registers: [0; 16],
            rip: 0xfff0,
            rflags: 2,
            cs: Segment {
                selector: 0xf000,
                base: 0xffff_0000,
                limit: 0xffff,
                rights: 0x9b,
            },
            ds: data,
            es: data,
            ss: data,
            fs: data,
            gs: data,
            tr: Segment {
                selector: 0,
                base: 0,
                limit: 0xffff,
                rights: 0x8b,
            },
            ldtr: Segment {
                selector: 0,
                base: 0,
                limit: 0xffff,
                rights: 0x82,
            },
            gdtr: DescriptorTable {
                base: 0,
                limit: 0xffff,
            },
            idtr: DescriptorTable {
                base: 0,
                limit: 0xffff,
            },
            cpl: 0,
            cr0: 0x6000_0010,
            cr2: 0,
            cr3: 0,
            cr4: 0,
            efer: 0,
            debug: [0, 0, 0, 0, 0xffff_0ff0, 0x400],
            fpu,
            xcr0: 1,
            msrs: vec![(0x277, 0x0007_0406_0007_0406)],
            tsc_offset: 0,
            instructions: 0,
            interrupt_shadow: false,
            halted: false,
            nmi_blocked: false,
            nmi_waits: false,
            undelivered: None,
        }
    }

    /// A CPU after power-on, but with `code` in CS and `data` in all other segment registers
    /// of code and data: what protected mode and long mode begin with.
    pub fn with_segments(code: Segment, data: Segment) -> Self {
        Self {
            cs: code,
            ds: data,
            es: data,
            ss: data,
            fs: data,
            gs: data,
            ..Self::reset()
        }
    }

    /// An application processor that got a start-up IPI with `vector`: real mode
    /// at `vector * 4096` (Intel SDM volume 3, 9.4.4).
    pub fn started_at(vector: u8) -> Self {
        let mut state = Self::reset();
        state.cs = Segment {
            selector: u16::from(vector) << 8,
            base: u64::from(vector) << 12,
            limit: 0xffff,
            rights: 0x9b,
        };
        state.rip = 0;
        state
    }
}
