//! Signals that the program holds although the kernel never blocks them.
//!
//! SIGSYS, SIGSEGV, SIGBUS and the runtime's own number stay open in the kernel
//! (see [`mask`]). One of them that somebody *sent* goes into a store first and
//! is taken out on the way to the program; while the program blocks it, it stays
//! there, and is pending.
//!
//! What is sent to a thread is in the thread's store. What is sent to the process
//! is in the process's: any thread that does not block it may take it.
//!
//! A slot is free → being filled → full → being emptied → free. A handler that
//! interrupts its own thread's store finds a slot that is not free, never one
//! that is half of two signals.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering, fence};

use crate::frame::SignalInfo;
use crate::own_calls;
use crate::signal::{KICK, LOOK_CODE, SI_TKILL, SIGBUS, SIGSEGV, SIGSYS, mask};
use crate::thread::{self, PENDING_OPEN, Thread};

/// Signals that do not queue: at most one of each is pending, as in the kernel.
const STANDARD: [i32; 3] = [SIGBUS, SIGSEGV, SIGSYS];
/// Real-time signals queue: most that one store keeps of the runtime's number.
const QUEUED_MAX: usize = 32;

const FREE: u32 = 0;
const BUSY: u32 = 1;
const FULL: u32 = 2;

struct Slot {
    state: AtomicU32,
    /// When it came, in the store's count.
    order: AtomicU32,
    info: UnsafeCell<SignalInfo>,
}

impl Slot {
    const fn free() -> Slot {
        Slot {
            state: AtomicU32::new(FREE),
            order: AtomicU32::new(0),
            info: UnsafeCell::new(SignalInfo::EMPTY),
        }
    }

    fn claim(&self, from: u32) -> bool {
        self.state
            .compare_exchange(from, BUSY, Ordering::SeqCst, Ordering::Relaxed)
            .is_ok()
    }
    fn is_full(&self) -> bool {
        self.state.load(Ordering::SeqCst) == FULL
    }
}

/// A store. All zeroes is an empty one.
#[repr(C)]
pub struct Held {
    standard: [Slot; STANDARD.len()],
    queued: [Slot; QUEUED_MAX],
    count: AtomicU32,
}

// SAFETY: a slot's information is accessed only by the thread that moved it to `BUSY`.
unsafe impl Sync for Held {}

static PROCESS: Held = Held::new();

impl Held {
    const fn new() -> Held {
        Held {
            standard: [const { Slot::free() }; STANDARD.len()],
            queued: [const { Slot::free() }; QUEUED_MAX],
            count: AtomicU32::new(0),
        }
    }

    fn slots(&self, signal: i32) -> &[Slot] {
        match STANDARD.iter().position(|&standard| standard == signal) {
            Some(index) => &self.standard[index..=index],
            None => &self.queued,
        }
    }

    /// Keeps a signal. One without room is lost, as natively beyond the limit on
    /// pending signals.
    fn put(&self, info: &SignalInfo) {
        let order = self.count.fetch_add(1, Ordering::Relaxed);
        let free = self.slots(info.signal).iter().find(|slot| slot.claim(FREE));
        if let Some(slot) = free {
            // SAFETY: claimed.
            unsafe { *slot.info.get() = *info };
            slot.order.store(order, Ordering::Relaxed);
            slot.state.store(FULL, Ordering::SeqCst);
        }
    }

    /// Takes the first of the given signals.
    fn take(&self, signals: u64) -> Option<SignalInfo> {
        STANDARD
            .into_iter()
            .chain([KICK])
            .filter(|&signal| signals & mask::bit(signal) != 0)
            .find_map(|signal| self.take_one(signal))
    }

    fn take_one(&self, signal: i32) -> Option<SignalInfo> {
        let slots = self.slots(signal);
        let count = self.count.load(Ordering::Relaxed);
        loop {
            // The count goes round: what came first is the farthest behind it.
            let oldest = slots
                .iter()
                .filter(|slot| slot.is_full())
                .max_by_key(|slot| count.wrapping_sub(slot.order.load(Ordering::Relaxed)))?;
            if oldest.claim(FULL) {
                // SAFETY: claimed.
                let info = unsafe { *oldest.info.get() };
                oldest.state.store(FREE, Ordering::SeqCst);
                return Some(info);
            }
        }
    }

    /// The signals in it.
    fn signals(&self) -> u64 {
        STANDARD
            .into_iter()
            .chain([KICK])
            .filter(|&signal| self.slots(signal).iter().any(Slot::is_full))
            .fold(0, |signals, signal| signals | mask::bit(signal))
    }

    /// Forgets everything: a new process has no pending signals.
    pub fn clear(&self) {
        for slot in self.standard.iter().chain(&self.queued) {
            slot.state.store(FREE, Ordering::SeqCst);
        }
    }
}

/// A signal came; the way out decides about it.
pub fn arrive(thread: &Thread, info: &SignalInfo) {
    if thread.borrowed.get() || info.code == SI_TKILL {
        thread.inbox().held.put(info);
    } else {
        PROCESS.put(info);
    }
    announce(thread);
}

/// Makes the thread look into the stores on its way out.
pub fn announce(thread: &Thread) {
    thread
        .inbox()
        .pending
        .fetch_or(PENDING_OPEN, Ordering::SeqCst);
}

/// The signals that the thread could take.
pub fn signals(thread: &Thread) -> u64 {
    let shared = if thread.borrowed.get() {
        0
    } else {
        PROCESS.signals()
    };
    thread.inbox().held.signals() | shared
}

/// Whether one of them is not blocked.
pub fn is_deliverable(thread: &Thread) -> bool {
    // A mask was changed, and the store is looked at; `wake_another` changed the
    // store, and looks at masks. One of the two sees the other.
    fence(Ordering::SeqCst);
    signals(thread) & !mask::hidden(thread) != 0
}

/// Takes one of the given signals.
pub fn take(thread: &Thread, signals: u64) -> Option<SignalInfo> {
    thread.inbox().held.take(signals).or_else(|| {
        if thread.borrowed.get() {
            None
        } else {
            PROCESS.take(signals)
        }
    })
}

/// Signals of the process that this thread blocks are for a thread that does
/// not, if there is one.
pub fn wake_another(thread: &Thread) {
    if thread.borrowed.get() || thread::count() < 2 {
        return;
    }
    let waiting = PROCESS.signals() & mask::hidden(thread);
    if waiting == 0 {
        return;
    }
    fence(Ordering::SeqCst);
    let mut found = None;
    thread::each_live(|other| {
        if other.id != thread.id()
            && other.process == thread.process()
            && waiting & !other.hidden_mask != 0
        {
            found = Some(other.id);
        }
    });
    if let Some(id) = found {
        let look = SignalInfo {
            signal: KICK,
            code: LOOK_CODE,
            ..SignalInfo::EMPTY
        };
        let process = thread.process();
        let _ = own_calls::call!(rt_tgsigqueueinfo, process, id, KICK, &raw const look);
    }
}

/// In a forked child, which has no pending signals.
pub fn clear_process() {
    PROCESS.clear();
}

/// Gives everything that the thread could take back to the kernel, which has it
/// blocked now: it stays pending in the next image.
pub fn give_back(thread: &Thread) {
    while let Some(info) = take(thread, u64::MAX) {
        let sent = own_calls::call!(
            rt_tgsigqueueinfo,
            thread.process(),
            thread.id(),
            info.signal,
            &raw const info
        );
        if sent.is_err() {
            break;
        }
    }
}
