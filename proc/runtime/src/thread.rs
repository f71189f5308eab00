//! The program's threads, as the runtime sees them.
//!
//! Each has a [`Block`]: 256 KiB, aligned to its size, with the thread's state
//! at its start, a guard page, and the rest as the alternate stack on which
//! every handler runs. Masking any address in the block finds the state, so no
//! thread-local storage is needed.
//!
//! Life of a block: free (`alive` = 0) → taken by its creator (`alive` = 1) →
//! running → free again when the kernel clears `alive` after the thread's last
//! instruction (`CLONE_CHILD_CLEARTID`). Blocks are never unmapped.
//!
//! Invariants: at most [`THREADS_MAX`] blocks; a block that is not free belongs
//! to exactly one thread; [`Inbox`] is the only part that a nested signal
//! handler writes.

use core::cell::{Cell, UnsafeCell};
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use weft_proc::context::Context;

use crate::engine::Buffers;
use crate::frame::{AlternateStack, SignalInfo};
use crate::lock::Lock;
use crate::own_calls::{self, Errno, Result, call};
use crate::signal::actions::{self, Table};
use crate::signal::held::Held;

/// Size and alignment of a block, bytes. Room for the nested frames of the worst
/// case (11 KiB each with AMX) beside the runtime's own calls.
pub const BLOCK_BYTES: usize = 256 << 10;
/// Most threads of one program.
pub const THREADS_MAX: usize = 4096;
/// Where the guard page lies in a block.
const GUARD_OFFSET: usize = 32 << 10;
const PAGE: usize = 4096;

/// A program signal waits in [`Inbox::info`].
pub const PENDING_SIGNAL: u32 = 1;
/// The runtime's own signal arrived while the runtime was executing.
pub const PENDING_KICK: u32 = 2;
/// A signal that the kernel never blocks waits in [`Inbox::held`], or one that
/// waited there may be delivered now.
pub const PENDING_OPEN: u32 = 4;
/// The thread's process shall run without the runtime, since it is traced.
pub const PENDING_RELEASE: u32 = 8;

/// What a handler that interrupted the runtime leaves for the way out.
///
/// Of those that the kernel can block, at most one waits here: the handler that puts it in also
/// blocks all others in the state it returns to, until the thread re-enters the
/// program. The kernel queues the rest.
#[repr(C)]
pub struct Inbox {
    /// `PENDING_*`. Tested by assembly: stays the first word of the block.
    pub pending: AtomicU32,
    /// Not 0 while the block is in use; the kernel clears it.
    pub alive: AtomicU32,
    /// 0 until the creator has finished with a new thread, which waits for it.
    pub released: AtomicU32,
    /// The waiting program signal.
    pub info: UnsafeCell<SignalInfo>,
    /// Signals that the kernel never blocks, sent to this thread.
    pub held: Held,
}

/// One thread of the program. Handlers nest, so each holds the same shared
/// reference, and every field is a cell. Only its own thread touches them, except
/// for the atomic ones and before it runs.
#[repr(C)]
pub struct Thread {
    id: AtomicU32,
    process: AtomicU32,
    /// `set_tid_address`: zeroed and woken at the thread's end. 0: none.
    pub clear_child_tid: Cell<usize>,
    /// `set_robust_list`.
    pub robust_list: Cell<usize>,
    /// The program's own alternate stack.
    pub alternate_stack: Cell<AlternateStack>,
    hidden_mask: AtomicU64,
    /// Mask of an interrupted `sigsuspend`, `ppoll`, …: in force for the handler
    /// that interrupted it, not after.
    pub temporary_mask: Cell<Option<u64>>,
    /// The program's signal actions: shared by the threads of a process.
    pub actions: Cell<Option<&'static Table>>,
    /// Private actions of a `vfork` child, which shares memory but not these.
    pub own_actions: Table,
    /// A `vfork` child: lives until it execs or exits.
    pub borrowed: Cell<bool>,
    /// Its creator sleeps in the kernel until it execs or exits.
    pub suspends_parent: Cell<bool>,
    /// The next own signal loads `start` instead of being a kick.
    pub entering: Cell<bool>,
    /// Addresses at which the new thread's number is written before it enters
    /// the program and before its creator goes on. 0: none.
    pub announce: Cell<[usize; 2]>,
    /// Where the number of its pidfd is written at the same time. 0: nowhere.
    pub announce_pidfd: Cell<usize>,
    /// Its pidfd; the kernel writes it before the thread runs.
    pub pidfd: Cell<i32>,
    /// `CLONE_CLEAR_SIGHAND`: the program's handlers are not its own.
    pub drops_handlers: Cell<bool>,
    /// What the thread enters the program with.
    pub start: Lock<Context>,
    /// The engine's buffers for system calls; none yet, or in use. They stay with
    /// the block.
    pub buffers: Cell<Option<&'static mut Buffers>>,
    inbox: &'static Inbox,
}

/// A thread's state and stack.
#[repr(C)]
pub struct Block {
    inbox: Inbox,
    thread: Thread,
}

const _: () = assert!(size_of::<Block>() <= GUARD_OFFSET);

static BLOCKS: [AtomicPtr<Block>; THREADS_MAX] =
    [const { AtomicPtr::new(ptr::null_mut()) }; THREADS_MAX];
static COUNT: AtomicUsize = AtomicUsize::new(0);

impl Thread {
    /// The thread whose block holds `address`.
    ///
    /// # Safety
    /// `address` lies in a block, which belongs to the calling thread or to one
    /// that does not run yet.
    pub unsafe fn at(address: usize) -> &'static Thread {
        let block = (address & !(BLOCK_BYTES - 1)) as *const Block;
        // SAFETY: the caller vouches for the block; blocks are never unmapped, and
        // all of a thread is cells.
        unsafe { &(*block).thread }
    }
    /// Its number in the kernel.
    pub fn id(&self) -> u32 {
        self.id.load(Ordering::Relaxed)
    }
    /// Sets [`Thread::id`].
    pub fn set_id(&self, id: u32) {
        self.id.store(id, Ordering::Relaxed);
    }
    /// Process in which it runs: another one for the child of a `vfork`.
    pub fn process(&self) -> u32 {
        self.process.load(Ordering::Relaxed)
    }
    /// Sets [`Thread::process`].
    pub fn set_process(&self, process: u32) {
        self.process.store(process, Ordering::Relaxed);
    }
    /// Which of the signals that the runtime never blocks the program believes
    /// to be blocked.
    pub fn hidden_mask(&self) -> u64 {
        self.hidden_mask.load(Ordering::Relaxed)
    }
    /// Sets [`Thread::hidden_mask`].
    pub fn set_hidden_mask(&self, mask: u64) {
        self.hidden_mask.store(mask, Ordering::Relaxed);
    }
    /// The program's signal actions.
    pub fn table(&self) -> &'static Table {
        self.actions.get().unwrap_or(&actions::SHARED)
    }
    /// What nested handlers left.
    pub fn inbox(&self) -> &'static Inbox {
        self.inbox
    }
    /// `PENDING_*` bits: whether something waits for the way out. A loop of the
    /// runtime that may last must look at it.
    pub fn pending(&self) -> u32 {
        self.inbox.pending.load(Ordering::Acquire)
    }
    fn block(&self) -> usize {
        ptr::from_ref(self) as usize & !(BLOCK_BYTES - 1)
    }
    /// First address above the alternate stack.
    pub fn stack_top(&self) -> usize {
        self.block() + BLOCK_BYTES
    }
    /// Lowest address of the alternate stack, above its guard page.
    pub fn stack_low(&self) -> usize {
        self.block() + GUARD_OFFSET + PAGE
    }
    /// Tells the kernel about the alternate stack of the calling thread.
    pub fn use_stack(&self) -> Result<()> {
        let stack = AlternateStack {
            start: self.stack_low(),
            flags: 0,
            padding: 0,
            length: self.stack_top() - self.stack_low(),
        };
        call!(sigaltstack, &raw const stack, 0).map(|_| ())
    }
    /// The word that the kernel clears when the thread is gone.
    pub fn alive_word(&self) -> *mut u32 {
        self.inbox.alive.as_ptr()
    }
    /// Writes the thread's number where `clone` was asked to.
    pub fn announce_as(&self, id: u32) {
        for address in self.announce.get() {
            if address != 0 {
                // A bad address is ignored, as by the kernel.
                let _ = crate::memory::write(address, &id);
            }
        }
        if self.announce_pidfd.get() != 0 {
            let _ = crate::memory::write(self.announce_pidfd.get(), &self.pidfd.get());
        }
    }
    /// Lets a new thread go on.
    pub fn release(&self) {
        self.inbox.released.store(1, Ordering::Release);
        own_calls::futex_wake(&self.inbox.released, 1);
    }
    /// Waits for [`Thread::release`].
    pub fn await_release(&self) {
        const LOOK_AGAIN_NS: u64 = 100_000_000;
        while self.inbox.released.load(Ordering::Acquire) == 0 {
            own_calls::futex_wait(&self.inbox.released, 0, LOOK_AGAIN_NS);
        }
    }
    /// Gives the block back when its thread was never started.
    pub fn abandon(&self) {
        self.inbox.alive.store(0, Ordering::Release);
    }
    fn prepare(&self) {
        self.set_id(0);
        self.set_process(0);
        self.clear_child_tid.set(0);
        self.robust_list.set(0);
        self.alternate_stack.set(AlternateStack::NONE);
        self.set_hidden_mask(0);
        self.temporary_mask.set(None);
        self.actions.set(None);
        self.borrowed.set(false);
        self.suspends_parent.set(false);
        self.entering.set(false);
        self.announce.set([0; 2]);
        self.announce_pidfd.set(0);
        self.drops_handlers.set(false);
        self.inbox.pending.store(0, Ordering::Relaxed);
        self.inbox.held.clear();
        self.inbox.released.store(0, Ordering::Relaxed);
    }
}

/// Takes a free block, or makes one. EAGAIN when there are too many.
pub fn allocate() -> Result<&'static Thread> {
    for slot in &BLOCKS {
        let mut block = slot.load(Ordering::Acquire);
        if block.is_null() {
            let fresh = map_block()?;
            match slot.compare_exchange(block, fresh, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => block = fresh,
                Err(other) => {
                    // SAFETY: nobody has seen the fresh block.
                    unsafe { own_calls::release(fresh.cast(), BLOCK_BYTES) };
                    block = other;
                }
            }
        }
        // SAFETY: blocks in the table are never unmapped; only the atomic word
        // is touched before it is taken.
        let alive = unsafe { &(*block).inbox.alive };
        if alive
            .compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            // SAFETY: taking the word made the block ours alone.
            let thread = unsafe { Thread::at(block as usize) };
            thread.prepare();
            return Ok(thread);
        }
    }
    Err(Errno::EAGAIN)
}

/// Maps an aligned block with its guard page.
fn map_block() -> Result<*mut Block> {
    let base = own_calls::allocate(2 * BLOCK_BYTES)? as usize;
    let start = base.next_multiple_of(BLOCK_BYTES);
    // SAFETY: the parts before and behind the block were just mapped here.
    unsafe {
        if start > base {
            own_calls::release(base as *mut u8, start - base);
        }
        let end = base + 2 * BLOCK_BYTES;
        own_calls::release((start + BLOCK_BYTES) as *mut u8, end - start - BLOCK_BYTES);
    }
    call!(mprotect, start + GUARD_OFFSET, PAGE, 0)?;
    let block = start as *mut Block;
    // SAFETY: fresh memory of the right size and alignment. Zero is a valid
    // value for every field but the reference, which is written here.
    unsafe { (&raw mut (*block).thread.inbox).write(&(*block).inbox) };
    Ok(block)
}

/// Threads of the program in this process.
pub fn count() -> usize {
    COUNT.load(Ordering::Acquire)
}

/// A thread of the program begins; returns the new count.
pub fn started() -> usize {
    COUNT.fetch_add(1, Ordering::AcqRel) + 1
}

/// A thread of the program ends; returns the new count.
pub fn ended() -> usize {
    COUNT.fetch_sub(1, Ordering::AcqRel) - 1
}

/// After `fork`, in the child: only `survivor` exists.
pub fn keep_only(survivor: &Thread) {
    for slot in &BLOCKS {
        let block = slot.load(Ordering::Acquire);
        if !block.is_null() && block as usize != survivor.block() {
            // SAFETY: blocks are never unmapped, and no other thread exists.
            unsafe { (*block).inbox.alive.store(0, Ordering::Release) };
        }
    }
    COUNT.store(1, Ordering::Release);
}

/// Whether `id` is a thread of the program in the calling process.
pub fn is_own(id: u32) -> bool {
    let process = own_calls::process_id();
    let mut found = false;
    each_live(|other| found |= other.id == id && other.process == process);
    found
}

/// What others may know of a thread.
pub struct Seen {
    /// Its number.
    pub id: u32,
    pub process: u32,
    /// [`Thread::hidden_mask`], which may be another one already.
    pub hidden_mask: u64,
}

/// Calls `each` for every live thread.
pub fn each_live(mut each: impl FnMut(Seen)) {
    for slot in &BLOCKS {
        let block = slot.load(Ordering::Acquire);
        if block.is_null() {
            continue;
        }
        // SAFETY: blocks are never unmapped, and what is read here is atomic.
        let Block { inbox, thread } = unsafe { &*block };
        let alive = inbox.alive.load(Ordering::Acquire);
        let seen = Seen {
            id: thread.id(),
            process: thread.process(),
            hidden_mask: thread.hidden_mask(),
        };
        if alive != 0 && seen.id != 0 {
            each(seen);
        }
    }
}
