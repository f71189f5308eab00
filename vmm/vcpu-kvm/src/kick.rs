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
//! `immediate_exit` left set costs one KVM_RUN that does nothing. A signal that arrives
//! before KVM_RUN does nothing; so the flag is set before the signal is sent.
//!
//! `models/src/kicks.rs` tries the interleavings of both sides.
//!
//! A kick without a signal (`request_interrupt_window` and `membarrier`) was
//! considered: it makes a guest come back only while the guest accepts
//! interrupts, so it cannot stand alone. See `docs/vmm-kvm.md` for what both cost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};

use weft_vcpu::Kick;

/// KVM_RUN, as a kick reaches it.
pub(super) trait RunControl {
    /// While it is not 0, KVM_RUN answers EINTR at once.
    fn immediate_exit(&self) -> &AtomicU8;
    /// Sends the signal that ends KVM_RUN to a thread of this process.
    fn signal(&self, thread: i32);
}

/// The requests to one vCPU, and the way to its thread.
pub(super) struct Kicker<H> {
    asked: AtomicBool,
    /// Kernel's number of the thread in `run`; 0: none.
    thread: AtomicI32,
    control: H,
}

impl<H: RunControl> Kicker<H> {
    pub(super) fn new(control: H) -> Arc<Self> {
        Arc::new(Self {
            asked: AtomicBool::new(false),
            thread: AtomicI32::new(0),
            control,
        })
    }

    pub(super) fn control(&self) -> &H {
        &self.control
    }

    /// Makes the calling thread, which has this number, the one that a kick interrupts,
    /// until the guard goes. `None`: a kick came before.
    pub(super) fn listen(self: &Arc<Self>, thread: i32) -> Option<Listening<H>> {
        self.thread.store(thread, Ordering::SeqCst);
        let listening = Listening(self.clone());
        if self.take() {
            self.clear_immediate_exit();
            return None;
        }
        Some(listening)
    }

    /// KVM_RUN was cut short: whether by a kick, and not by another signal.
    pub(super) fn was_kicked(&self) -> bool {
        let asked = self.take();
        self.clear_immediate_exit();
        asked
    }

    /// Makes the next KVM_RUN finish what is under way and come back.
    pub(super) fn set_immediate_exit(&self) {
        self.control.immediate_exit().store(1, Ordering::SeqCst);
    }

    /// Undoes [`Self::set_immediate_exit`], and what a kick that was noticed left.
    pub(super) fn clear_immediate_exit(&self) {
        self.control.immediate_exit().store(0, Ordering::SeqCst);
        // A kick between the two: its flag must not be lost.
        if self.asked.load(Ordering::SeqCst) {
            self.set_immediate_exit();
        }
    }

    /// Makes the vCPU leave KVM_RUN, or not enter it, once: it goes on by itself.
    pub(super) fn interrupt(&self) {
        self.set_immediate_exit();
        let thread = self.thread.load(Ordering::SeqCst);
        if thread != 0 {
            self.control.signal(thread);
        }
    }

    /// Whether a kick came since the last time.
    fn take(&self) -> bool {
        self.asked.swap(false, Ordering::SeqCst)
    }
}

impl<H: RunControl + Send + Sync> Kick for Kicker<H> {
    fn kick(&self) {
        // An earlier kick, not yet noticed, does or did the rest.
        if !self.asked.swap(true, Ordering::SeqCst) {
            self.interrupt();
        }
    }
}

/// The calling thread is in `run`.
pub(super) struct Listening<H>(Arc<Kicker<H>>);

impl<H> Drop for Listening<H> {
    fn drop(&mut self) {
        self.0.thread.store(0, Ordering::SeqCst);
    }
}
