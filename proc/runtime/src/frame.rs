//! The kernel's signal frame on x86-64, as handlers see and change it.
//!
//! Layouts follow `arch/x86/include/uapi/asm/sigcontext.h` and `ucontext.h`; the
//! sizes are checked below. What a handler leaves in a [`Frame`] is what the
//! thread continues with.

use weft_proc::context::Registers;
use zerocopy::{FromBytes, Immutable, IntoBytes};

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
pub struct AlternateStack {
    /// Lowest address.
    pub start: usize,
    /// `SS_ONSTACK`, `SS_DISABLE`, `SS_AUTODISARM`.
    pub flags: u32,
    /// Makes the padding a field, so that no stray bytes reach the program.
    pub padding: u32,
    /// Length, bytes.
    pub length: usize,
}

/// The stack is in use.
pub const SS_ONSTACK: u32 = 1;
/// There is no alternate stack.
pub const SS_DISABLE: u32 = 2;
/// Forget the alternate stack while a handler runs on it.
pub const SS_AUTODISARM: u32 = 1 << 31;

impl AlternateStack {
    pub const NONE: AlternateStack = AlternateStack {
        start: 0,
        flags: SS_DISABLE,
        padding: 0,
        length: 0,
    };
    /// Whether a stack pointer lies on it.
    pub fn holds(&self, stack_pointer: usize) -> bool {
        self.flags & SS_DISABLE == 0
            && stack_pointer > self.start
            && stack_pointer - self.start <= self.length
    }
}

/// `struct ucontext`: the state that a signal interrupted.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
pub struct Frame {
    /// `UC_FP_XSTATE` and friends.
    pub flags: u64,
    /// Always 0.
    pub link: usize,
    /// The alternate stack at the time of the signal.
    pub stack: AlternateStack,
    /// General registers.
    pub registers: Registers,
    /// Where the extended state (x87, SSE, AVX, …) is saved.
    pub extended: usize,
    /// Unused.
    pub reserved: [u64; 8],
    /// Signals that were blocked.
    pub mask: u64,
}

/// The frame holds an extended state beyond the legacy 512 bytes.
pub const UC_FP_XSTATE: u64 = 1;
/// The saved SS is meaningful.
pub const UC_SIGCONTEXT_SS: u64 = 2;
/// SS is restored exactly as saved.
pub const UC_STRICT_RESTORE_SS: u64 = 4;

/// `siginfo_t`, with the fields that the runtime looks at.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
pub struct SignalInfo {
    pub signal: i32,
    /// An errno, seldom used.
    pub error: i32,
    /// The origin of the signal; positive for the kernel.
    pub code: i32,
    /// Unused.
    pub padding: i32,
    /// The rest; for faults the first word is the address, for SIGSYS too.
    pub words: [u64; 14],
}

impl SignalInfo {
    /// All zero.
    pub const EMPTY: SignalInfo = SignalInfo {
        signal: 0,
        error: 0,
        code: 0,
        padding: 0,
        words: [0; 14],
    };
    /// What the kernel would send for a bad stack.
    pub fn from_kernel(signal: i32) -> SignalInfo {
        SignalInfo {
            signal,
            code: 0x80, // SI_KERNEL
            ..SignalInfo::EMPTY
        }
    }
}

/// What the kernel pushes, and what the runtime pushes for the program.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
pub struct PushedFrame {
    /// Return address of the handler: the restorer.
    pub restorer: usize,
    /// The interrupted state.
    pub frame: Frame,
    /// The signal.
    pub info: SignalInfo,
}

const _: () = assert!(size_of::<Registers>() == 184);
const _: () = assert!(size_of::<AlternateStack>() == 24);
const _: () = assert!(size_of::<Frame>() == 304);
const _: () = assert!(size_of::<SignalInfo>() == 128);
const _: () = assert!(size_of::<PushedFrame>() == 440);
