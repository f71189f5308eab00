//! Everything that makes up a thread of the program at one instant: registers,
//! FS and GS base, signal mask, extended state. Saved from a signal frame and
//! loaded into one, for jumps, new threads and the very first entry.

use crate::frame::{Frame, Registers};
use crate::kernel::call;
use crate::xstate::{self, Area};

/// RFLAGS of a fresh program: interrupts on, nothing else.
pub const INITIAL_FLAGS: usize = 0x202;

/// First address that user space cannot have.
pub const USER_END: usize = (1 << 47) - 4096;

/// A thread's state. Plain data: it travels between nodes as bytes, of which
/// only the first [`Context::wire_bytes`] matter.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Context {
    /// General registers. The selectors are not loaded: user selectors are the
    /// same everywhere.
    pub registers: Registers,
    /// FS base.
    pub fs: usize,
    /// GS base.
    pub gs: usize,
    /// Blocked signals.
    pub mask: u64,
    /// Bytes used in `extended`; 0 means the initial state.
    pub extended_bytes: usize,
    /// Extended state in standard XSAVE format.
    pub extended: [u8; xstate::BYTES_MAX],
}

impl Context {
    /// A context at the start of a program: `entry` with `stack`.
    pub const fn initial(entry: usize, stack: usize) -> Context {
        let mut context = Context {
            // SAFETY: `Registers` is plain integers.
            registers: unsafe { core::mem::zeroed() },
            fs: 0,
            gs: 0,
            mask: 0,
            extended_bytes: 0,
            extended: [0; xstate::BYTES_MAX],
        };
        context.registers.rip = entry;
        context.registers.rsp = stack;
        context.registers.eflags = INITIAL_FLAGS;
        context
    }
    /// How much of it has to travel.
    pub fn wire_bytes(&self) -> usize {
        core::mem::offset_of!(Context, extended) + self.extended_bytes
    }
    /// Copies the interrupted thread's state out of `frame`.
    pub fn save(&mut self, frame: &Frame) {
        self.registers = frame.registers;
        self.mask = frame.mask;
        self.fs = fs_base();
        self.gs = gs_base();
        // SAFETY: frames reach this function only from signal handlers.
        let area = unsafe { Area::new(frame.extended) };
        self.extended_bytes = if frame.extended == 0 {
            0
        } else {
            area.save(&mut self.extended)
        };
    }
    /// Makes `frame` continue with this state.
    pub fn load(&self, frame: &mut Frame) {
        let own = frame.registers;
        frame.registers = Registers {
            selectors: own.selectors,
            error: own.error,
            trap: own.trap,
            old_mask: own.old_mask,
            cr2: own.cr2,
            ..self.registers
        };
        frame.mask = self.mask;
        set_fs_base(self.fs);
        set_gs_base(self.gs);
        if frame.extended != 0 {
            // SAFETY: frames reach this function only from signal handlers.
            let area = unsafe { Area::new(frame.extended) };
            area.load(&self.extended[..self.extended_bytes.min(xstate::BYTES_MAX)]);
        }
    }
}

/// `arch_prctl` codes.
const ARCH_SET_GS: usize = 0x1001;
const ARCH_SET_FS: usize = 0x1002;
const ARCH_GET_FS: usize = 0x1003;
const ARCH_GET_GS: usize = 0x1004;

/// `AT_HWCAP2` bit: user space may use the FSGSBASE instructions.
const HWCAP2_FSGSBASE: usize = 1 << 1;

/// Whether the instructions may be used; set once from the auxiliary vector.
static FSGSBASE: core::sync::atomic::AtomicBool = core::sync::atomic::AtomicBool::new(false);

/// Remembers what the kernel says about FSGSBASE in `AT_HWCAP2`.
pub fn learn(hwcap2: usize) {
    let usable = hwcap2 & HWCAP2_FSGSBASE != 0;
    FSGSBASE.store(usable, core::sync::atomic::Ordering::Relaxed);
}

fn fsgsbase() -> bool {
    FSGSBASE.load(core::sync::atomic::Ordering::Relaxed)
}

/// The program's FS base.
pub fn fs_base() -> usize {
    let mut base = 0usize;
    if fsgsbase() {
        // SAFETY: `learn` saw that the kernel allows the instruction.
        unsafe { core::arch::asm!("rdfsbase {}", out(reg) base, options(nomem, nostack)) };
    } else {
        let _ = call!(arch_prctl, ARCH_GET_FS, &raw mut base);
    }
    base
}

/// The program's GS base.
pub fn gs_base() -> usize {
    let mut base = 0usize;
    if fsgsbase() {
        // SAFETY: as `fs_base`.
        unsafe { core::arch::asm!("rdgsbase {}", out(reg) base, options(nomem, nostack)) };
    } else {
        let _ = call!(arch_prctl, ARCH_GET_GS, &raw mut base);
    }
    base
}

/// Sets the program's FS base, which must be canonical.
pub fn set_fs_base(base: usize) {
    if fsgsbase() {
        // SAFETY: the runtime itself uses nothing relative to FS.
        unsafe { core::arch::asm!("wrfsbase {}", in(reg) base, options(nomem, nostack)) };
    } else {
        let _ = call!(arch_prctl, ARCH_SET_FS, base);
    }
}

/// Sets the program's GS base, which must be canonical.
pub fn set_gs_base(base: usize) {
    if fsgsbase() {
        // SAFETY: the runtime itself uses nothing relative to GS.
        unsafe { core::arch::asm!("wrgsbase {}", in(reg) base, options(nomem, nostack)) };
    } else {
        let _ = call!(arch_prctl, ARCH_SET_GS, base);
    }
}
