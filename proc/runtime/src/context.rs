//! The state of the interrupted thread, saved from a signal frame and loaded into
//! one: for jumps, new threads and the very first entry.

use weft_proc::context::Context;

use crate::frame::Frame;
use crate::own_calls::call;
use crate::signal::mask;
use crate::xstate::Area;

/// First address that user space cannot have.
pub const USER_END: usize = (1 << 47) - 4096;

/// Copies the interrupted thread's state out of `frame`.
pub fn save(context: &mut Context, frame: &Frame) {
    context.registers = frame.registers;
    context.mask = frame.mask;
    context.fs = fs_base();
    context.gs = gs_base();
    context.extended_bytes = match frame.extended {
        0 => 0,
        // SAFETY: frames reach this function only from signal handlers.
        address => unsafe { Area::new(address) }.save(&mut context.extended),
    };
}

/// Makes `frame` continue with a state.
pub fn load(context: &Context, frame: &mut Frame) {
    frame.registers = frame.registers.with(&context.registers);
    frame.mask = mask::native(context.mask);
    set_fs_base(context.fs);
    set_gs_base(context.gs);
    if frame.extended != 0 {
        // SAFETY: as in `save`.
        let area = unsafe { Area::new(frame.extended) };
        area.load(context.extended());
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
