//! The elastic half of the runtime: stretch, pull, push, jump.
//!
//! Everything here is inert until the aggregate is stretched; each hook says
//! what an unstretched program gets from it.

use crate::signal::Frame;
use crate::thread::Thread;
use weft_proc::boot::Boot;

/// Whether the engine wants to see system calls before they run natively.
pub fn takes_calls() -> bool {
    false
}

/// Runs one system call of the program; `None` leaves it to the native path.
pub fn call(_thread: &mut Thread, _frame: &mut Frame, _number: usize, _arguments: &[usize; 6]) -> Option<isize> {
    None
}

/// A SIGBUS or SIGSEGV of the program at `address`; true when it was a missing
/// page that is now there (or the execution has jumped): return to the program.
pub fn fault(_thread: &mut Thread, _frame: &mut Frame, _address: usize, _write: bool, _code: i32) -> bool {
    false
}

/// The runtime's own signal arrived.
pub fn kick(_thread: &mut Thread, _frame: &mut Frame) {}

/// `[start, start + length)` was mapped afresh (layout already updated).
pub fn mapped(_start: usize, _length: usize) {}

/// `[start, start + length)` is about to be unmapped.
pub fn unmapped(_start: usize, _length: usize) {}

/// Protection of a range was changed.
pub fn protected(_start: usize, _length: usize, _protection: u32) {}

/// A range was moved by mremap.
pub fn moved(_old_start: usize, _old_length: usize, _new_start: usize, _new_length: usize) {}

/// The contents of a range were thrown away (`MADV_DONTNEED`).
pub fn discarded(_start: usize, _length: usize) {}

/// The program is about to fork (not vfork); false: there is no memory for it.
pub fn before_fork(_thread: &mut Thread) -> bool {
    true
}

/// First thing in a forked child: it stays at home, alone.
pub fn after_fork_in_child() {}

/// The main process is about to replace its image.
pub fn before_exec() {}

/// The program ends with `code`.
pub fn before_exit(_code: i32) {}

/// The number of the program's threads changed.
pub fn threads(_count: usize) {}

/// Home: called once before the program is loaded.
pub fn start_home(_boot: &'static Boot) {}

/// A slice's whole life.
pub fn run_slice(_boot: &'static Boot) -> ! {
    crate::log::fatal(124, "slices are not built yet")
}
