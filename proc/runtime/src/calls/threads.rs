//! The end of a thread, and of the process.

use super::RESTART;
use crate::memory::{self, Fault};
use crate::own_calls::{self, call};
use crate::thread::{self, Thread};
use crate::{control, engine};

/// Most entries of a robust list that are looked at, as in the kernel.
const ROBUST_ENTRIES_MAX: usize = 2048;
const FUTEX_WAITERS: u32 = 0x8000_0000;
const FUTEX_OWNER_DIED: u32 = 0x4000_0000;
const FUTEX_TID_MASK: u32 = 0x3fff_ffff;
/// `FUTEX_WAKE`; robust futexes may be shared between processes.
const FUTEX_WAKE: usize = 1;

/// `exit`: ends the calling thread.
pub fn exit(thread: &Thread, code: usize) -> isize {
    if thread.borrowed.get() {
        clear_number(thread);
        own_calls::exit_thread(code as i32);
    }
    // From here on no signal of the process may choose this thread.
    let all = !crate::signal::mask::NEVER_BLOCKED;
    let _ = call!(rt_sigprocmask, 0, &raw const all, 0, 8);
    if crate::signal::interrupts(thread) {
        return RESTART;
    }
    if thread::count() == 1 {
        engine::before_exit();
    }
    if thread.robust_list.get() != 0 {
        // A list that cannot be walked is the program's loss, as in the kernel.
        let _ = release_robust_list(thread);
        let _ = call!(set_robust_list, 0, 24);
    }
    let count = thread::ended();
    engine::threads(count);
    clear_number(thread);
    own_calls::exit_thread(code as i32)
}

/// Clears the word that says that the thread, or the process that shares this
/// memory, is there.
fn clear_number(thread: &Thread) {
    if thread.clear_child_tid.get() != 0
        && memory::write(thread.clear_child_tid.get(), &0u32).is_ok()
    {
        let _ = call!(futex, thread.clear_child_tid.get(), FUTEX_WAKE, 1);
    }
}

/// `exit_group`: ends the process.
pub fn exit_group(thread: &Thread, code: usize) -> isize {
    if thread.borrowed.get() {
        clear_number(thread);
    } else if control::is_main_process() {
        engine::before_exit();
    }
    own_calls::exit_group(code as i32)
}

/// Marks the robust mutexes that the thread still holds, as the kernel would
/// when the thread ends. It has to happen before `clear_child_tid` tells others
/// that the thread's memory can be reused, and with pages that may be elsewhere.
fn release_robust_list(thread: &Thread) -> Result<(), Fault> {
    let head = thread.robust_list.get();
    let [first, offset, operation]: [usize; 3] = memory::read(head)?;
    let mut entry = first;
    for _ in 0..ROBUST_ENTRIES_MAX {
        // Bit 0 marks a mutex with priority inheritance.
        let address = entry & !1;
        if address == head {
            break;
        }
        let next: usize = memory::read(address)?;
        if entry & !1 != operation & !1 {
            release(thread, address.wrapping_add(offset))?;
        }
        entry = next;
    }
    if operation & !1 != 0 {
        release(thread, (operation & !1).wrapping_add(offset))?;
    }
    Ok(())
}

fn release(thread: &Thread, word: usize) -> Result<(), Fault> {
    let value: u32 = memory::read(word)?;
    if value & FUTEX_TID_MASK != thread.id() {
        return Ok(());
    }
    // Waiters may set their bit at any time; nobody else changes the word
    // while this thread owns it.
    memory::write(word, &((value & FUTEX_WAITERS) | FUTEX_OWNER_DIED))?;
    let _ = call!(futex, word, FUTEX_WAKE, 1);
    Ok(())
}
