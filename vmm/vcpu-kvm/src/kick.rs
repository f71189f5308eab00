//! How a vCPU is made to come back from KVM_RUN.
//!
//! A kick is three steps, in this order: `asked` is set, KVM's `immediate_exit`
//! is set, and the thread that runs the vCPU, if there is one, gets a signal.
//! The vCPU's side: the thread makes itself known, and only then looks at
//! `asked`. So at least one of the two sees the other:
//!
//! - the kick came before the look: `run` comes back without entering;
//! - the kick's `immediate_exit` came before the kernel's look at it: KVM_RUN
//!   answers EINTR at once;
//! - the kick came later still: then the thread was known, and the signal, which
//!   waits for it if need be, ends KVM_RUN.
//!
//! A signal that arrives after all that finds `asked` clear and is forgotten.
//! `immediate_exit` left set costs one KVM_RUN that does nothing.
//!
//! A kick without a signal (`request_interrupt_window` and `membarrier`) was
//! considered: it makes a guest come back only while the guest accepts
//! interrupts, so it cannot stand alone. See `docs/vmm-kvm.md` for what both cost.

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;
use weft_vcpu::Kick;

/// Bytes of the shared page of which we use one: `kvm_run` starts in it.
const RUN_PAGE: usize = 4096;
const _: () = assert!(offset_of!(kvm_run, immediate_exit) < RUN_PAGE);
const _: () = assert!(offset_of!(kvm_run, cr8) + 8 <= RUN_PAGE);
const _: () = assert!(offset_of!(kvm_run, cr8).is_multiple_of(8));

/// The requests to one vCPU, and the way to its thread.
pub(super) struct Bell {
    asked: AtomicBool,
    /// Kernel's number of the thread in `run`; 0: none.
    thread: AtomicI32,
    /// A mapping of our own of the vCPU's `kvm_run`, so that a kick may come
    /// when the vCPU is gone.
    run_page: NonNull<u8>,
}

// SAFETY: the mapping is ours until drop, and only its `immediate_exit` is
// touched, atomically.
unsafe impl Send for Bell {}
// SAFETY: as above; all else is atomic.
unsafe impl Sync for Bell {}

impl Bell {
    pub(super) fn new(vcpu: &VcpuFd) -> io::Result<Arc<Self>> {
        install_handler()?;
        Ok(Arc::new(Self {
            asked: AtomicBool::new(false),
            thread: AtomicI32::new(0),
            run_page: map_run_page(vcpu.as_raw_fd())?,
        }))
    }

    /// Makes the calling thread the one that a kick interrupts, until the guard
    /// goes.
    pub(super) fn listen(self: &Arc<Self>) -> Listening {
        // SAFETY: takes nothing, changes nothing.
        let thread = unsafe { libc::gettid() };
        self.thread.store(thread, Ordering::SeqCst);
        Listening(self.clone())
    }

    /// Whether somebody asked since the last time.
    pub(super) fn take(&self) -> bool {
        self.asked.swap(false, Ordering::SeqCst)
    }

    /// Makes the next KVM_RUN finish what is under way and come back.
    pub(super) fn set_immediate_exit(&self) {
        self.immediate_exit().store(1, Ordering::SeqCst);
    }

    /// Undoes [`Self::set_immediate_exit`], and what a kick that was noticed left.
    pub(super) fn clear_immediate_exit(&self) {
        self.immediate_exit().store(0, Ordering::SeqCst);
        // A kick between the two: its flag must not be lost.
        if self.asked.load(Ordering::SeqCst) {
            self.set_immediate_exit();
        }
    }

    /// CR8 as KVM_RUN left it, whatever else of `kvm_run` is borrowed.
    pub(super) fn task_priority(&self) -> u8 {
        // SAFETY: inside the mapping and aligned, as asserted above; the kernel
        // writes it only while KVM_RUN is under way.
        let cr8 = unsafe {
            AtomicU64::from_ptr(self.run_page.as_ptr().add(offset_of!(kvm_run, cr8)).cast())
        };
        (cr8.load(Ordering::Relaxed) & 0xf) as u8
    }

    fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: inside the mapping, which lives as long as `self`; a byte has no
        // alignment; the kernel reads it atomically too.
        unsafe {
            AtomicU8::from_ptr(
                self.run_page
                    .as_ptr()
                    .add(offset_of!(kvm_run, immediate_exit)),
            )
        }
    }
}

impl Bell {
    /// Makes the vCPU leave KVM_RUN, or not enter it, once: it goes on by itself.
    pub(super) fn interrupt(&self) {
        self.set_immediate_exit();
        let thread = self.thread.load(Ordering::SeqCst);
        if thread != 0 {
            // SAFETY: sends a signal whose handler does nothing. A thread that
            // ended meanwhile makes the call fail, which is as good.
            unsafe {
                libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, signal());
            }
        }
    }
}

impl Kick for Bell {
    fn kick(&self) {
        // An earlier kick, not yet noticed, does or did the rest.
        if !self.asked.swap(true, Ordering::SeqCst) {
            self.interrupt();
        }
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        // SAFETY: the mapping of `map_run_page`, of this size, which nobody else knows.
        unsafe {
            libc::munmap(self.run_page.as_ptr().cast(), RUN_PAGE);
        }
    }
}

/// The calling thread is in `run`.
pub(super) struct Listening(Arc<Bell>);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.thread.store(0, Ordering::SeqCst);
    }
}

fn map_run_page(vcpu: RawFd) -> io::Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address that the kernel chooses.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            RUN_PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            vcpu,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(page.cast()).ok_or_else(|| io::Error::other("kvm_run was mapped at 0"))
}

/// The first real-time signal that the C library leaves to programs.
fn signal() -> libc::c_int {
    libc::SIGRTMIN()
}

extern "C" fn nothing(_: libc::c_int) {}

/// Once a process: without a handler the signal would end it. SA_RESTART keeps
/// other calls of a vCPU's thread undisturbed; KVM_RUN is never restarted.
fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        // SAFETY: an all-zero sigaction is a valid one: no flags, an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: the handler does nothing, so it is safe in any context.
        let answer = unsafe { libc::sigaction(signal(), &action, std::ptr::null_mut()) };
        if answer == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EINVAL))
        }
    });
    installed.map_err(io::Error::from_raw_os_error)
}
