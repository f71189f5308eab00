//! A mapping of a vCPU's `kvm_run`, and the signal that ends KVM_RUN.

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;

use super::kick::{Kicker, RunControl};

/// The kicker of a vCPU in KVM.
pub(super) type KvmKicker = Kicker<RunPage>;

/// Bytes of the shared page of which we use one: `kvm_run` starts in it.
const RUN_PAGE: usize = 4096;
const _: () = assert!(offset_of!(kvm_run, immediate_exit) < RUN_PAGE);
const _: () = assert!(offset_of!(kvm_run, cr8) + 8 <= RUN_PAGE);
const _: () = assert!(offset_of!(kvm_run, cr8).is_multiple_of(8));

/// A mapping of our own of the vCPU's `kvm_run`, so that a kick may come when the vCPU is
/// gone.
pub(super) struct RunPage(NonNull<u8>);

// SAFETY: the mapping is ours until drop, and it is only accessed atomically.
unsafe impl Send for RunPage {}
// SAFETY: all accesses to the mapping through a shared reference are atomic.
unsafe impl Sync for RunPage {}

impl RunPage {
    pub(super) fn new(vcpu: &VcpuFd) -> io::Result<Self> {
        install_handler()?;
        Ok(Self(map_run_page(vcpu.as_raw_fd())?))
    }

    /// CR8 as KVM_RUN left it, whatever else of `kvm_run` is borrowed.
    pub(super) fn task_priority(&self) -> u8 {
        // SAFETY: inside the mapping and aligned, as asserted above; the kernel
        // writes it only while KVM_RUN is under way.
        let cr8 =
            unsafe { AtomicU64::from_ptr(self.0.as_ptr().add(offset_of!(kvm_run, cr8)).cast()) };
        (cr8.load(Ordering::Relaxed) & 0xf) as u8
    }
}

impl RunControl for RunPage {
    fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: inside the mapping, which lives as long as `self`; a byte has no
        // alignment; the kernel reads it atomically too.
        unsafe { AtomicU8::from_ptr(self.0.as_ptr().add(offset_of!(kvm_run, immediate_exit))) }
    }

    fn signal(&self, thread: i32) {
        // SAFETY: sends a signal whose handler does nothing. A thread that ended meanwhile
        // makes the call fail, which is as good.
        unsafe {
            libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, signal());
        }
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: the mapping of `map_run_page`, of this size, which nobody else knows.
        unsafe {
            libc::munmap(self.0.as_ptr().cast(), RUN_PAGE);
        }
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
