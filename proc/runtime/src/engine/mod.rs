//! The elastic half of the runtime: stretch, pull, push, jump.
//!
//! Everything here is inert until the aggregate is stretched; each hook says
//! what an unstretched program gets from it.
//!
//! - [`machine`]: the engine's state and the loop that everything waits in
//! - [`mod@fault`]: one fault
//! - [`room`]: what leaves when the budget is full
//! - [`budget`]: home's budget, which follows the free memory of its host
//! - [`jump`], [`serve`]: moving the execution, and what a node does until it arrives
//! - [`calls`]: system calls of a stretched program
//! - [`layout`]: the same mappings on every node
//! - [`start`]: stretching a program; a slice's life
//! - [`mod@beat`], [`patience`]: how silence is told from a stop
//! - [`fork`], [`commands`], [`confine`], [`io`], [`eviction_batch`], [`tables`],
//!   [`working_set`], [`clock`]: what their names say
//!
//! Lock order: the address space ([`crate::space`]), then the engine. A thread
//! that holds the engine's lock touches no program memory but pages that the
//! protocol says are present.

mod beat;
mod budget;
mod calls;
mod clock;
mod commands;
mod confine;
#[cfg(feature = "damage")]
mod damage;
mod ending;
mod eviction_batch;
mod fault;
mod fork;
mod io;
mod jump;
mod layout;
mod machine;
mod patience;
mod room;
mod serve;
mod start;
mod tables;
mod working_set;

use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use weft_dsm::{Access, PAGE_BYTES};
use weft_proc::boot::{Boot, ROLE_HOME};
use weft_proc::layout::{Layout, PROT_WRITE, Region};
use weft_proc::table::{Class, classify};

use crate::frame::{Frame, SignalInfo};
use crate::lock::Guard;
use crate::signal::SIGSEGV;
use crate::thread::Thread;
use crate::{control, image, space};
pub use calls::Buffers;
use fault::Outcome;
use machine::{ENGINE, Engine, STRETCHED};

static BOOT: AtomicPtr<Boot> = AtomicPtr::new(core::ptr::null_mut());
static THREADS: AtomicUsize = AtomicUsize::new(1);
/// Whether anybody ever ran in this memory beside the main thread.
static OTHERS: AtomicBool = AtomicBool::new(false);

fn boot() -> Option<&'static Boot> {
    // SAFETY: set once, to a structure that lives as long as the process.
    unsafe { BOOT.load(Ordering::Acquire).as_ref() }
}

/// Whether the program spans its nodes. Does not change while the address space
/// is locked, but by the one who holds the lock.
pub fn is_stretched() -> bool {
    STRETCHED.load(Ordering::Acquire)
}

fn is_home() -> bool {
    boot().is_none_or(|boot| boot.role == ROLE_HOME)
}

/// Whether the engine wants to see system calls before they run natively: once
/// stretched, and as soon as there are threads (one may be inside a call, with
/// its memory, when another one stretches the program).
pub fn takes_calls() -> bool {
    is_stretched() || THREADS.load(Ordering::Relaxed) > 1 && boot().is_some()
}

/// Runs one system call of the program; `None` leaves it to the native path.
pub fn call(
    thread: &Thread,
    frame: &mut Frame,
    number: usize,
    arguments: &[usize; 6],
) -> Option<isize> {
    let class = classify(number as u64, &arguments.map(|word| word as u64));
    let takes = is_stretched()
        || match class {
            Class::Plain(plain) => plain.may_block(),
            other => other == Class::Thread,
        };
    if !takes {
        None
    } else if is_home() {
        calls::at_home(thread, class, number, arguments)
    } else {
        Some(calls::elsewhere(thread, frame, class, number, arguments))
    }
}

/// A SIGBUS or SIGSEGV at the address in `info`; true when it was a missing page
/// that is now there (or the execution has been elsewhere): try again.
pub fn fault(thread: &Thread, frame: &mut Frame, info: &SignalInfo) -> bool {
    let home = is_home();
    if !is_stretched() || home && info.signal == SIGSEGV {
        return false;
    }
    let inside = image::contains(frame.registers.rip);
    let may_jump = !inside
        && THREADS.load(Ordering::Relaxed) == 1
        && !thread.borrowed.get()
        && frame.registers.rip < space::VDSO as usize;
    let write = frame.registers.error & 2 != 0;
    let outcome = {
        let mut guard = ENGINE.lock();
        let Some(engine) = guard.as_mut() else {
            return false;
        };
        let may_jump = may_jump && !engine.has_just_arrived(frame);
        engine.fault(info.words[0] as usize, write, may_jump)
    };
    match outcome {
        Outcome::Resolved => true,
        Outcome::Jump(node) => {
            jump::jump(thread, frame, node);
            true
        }
        Outcome::GoHome if !inside => {
            go_home(thread, frame);
            true
        }
        Outcome::Native | Outcome::GoHome => false,
    }
}

/// Elsewhere: a signal that an instruction of the program raised. The
/// instruction raises it again at home, where it is judged; true then.
pub fn trap(thread: &Thread, frame: &mut Frame) -> bool {
    if is_home() {
        return false;
    }
    go_home(thread, frame);
    true
}

fn go_home(thread: &Thread, frame: &mut Frame) {
    calls::leave_for_home();
    jump::jump(thread, frame, 0);
}

/// A timer went off; false when it is none of the runtime's, which only slices have.
pub fn beat() -> bool {
    let slice = !is_home();
    if slice {
        beat::count();
    }
    slice
}

/// The runtime's own signal arrived: a command, or for a slice: come home.
pub fn kick(thread: &Thread, frame: &mut Frame) {
    if is_home() {
        commands::obey();
    } else if is_stretched() {
        go_home(thread, frame);
    }
}

/// A region was mapped natively; `layout`, which has it already, is locked.
pub fn mapped(layout: &Layout<'static>, region: &Region) {
    if is_stretched() {
        if let Some(engine) = ENGINE.lock().as_mut() {
            engine.home_mapped(region);
            engine.make_room();
        }
    } else if let Some(boot) = boot().filter(|boot| start::is_past_budget(boot, layout, 0)) {
        start::stretch(boot, layout);
    }
}

/// Whether pages that are about to be mapped and filled belong to the protocol:
/// once stretched, and when `length` bytes more would be the reason to stretch.
pub fn holds_pages(layout: &Layout<'static>, length: u64) -> bool {
    if let Some(boot) = boot().filter(|_| !is_stretched())
        && start::is_past_budget(boot, layout, length)
    {
        start::stretch(boot, layout);
    }
    is_stretched()
}

/// Some of the program's memory became writable.
pub fn grown(layout: &Layout<'static>) {
    if let Some(boot) = boot().filter(|_| !is_stretched())
        && start::is_past_budget(boot, layout, 0)
    {
        start::stretch(boot, layout);
    }
}

/// Stretches because the launcher says so.
fn stretch_now(layout: &Layout<'static>) {
    if let Some(boot) = boot().filter(|boot| boot.nodes > 1) {
        start::stretch(boot, layout);
    }
}

/// Holds the engine while the layout changes, from before the native call until
/// the engine knows: another thread must not push a page away that the kernel
/// has removed already, nor find a protection that only one of the two has. Does
/// nothing before the stretch, which the lock of the address space keeps away.
pub fn change() -> Change {
    Change(is_stretched().then(|| ENGINE.lock()))
}

/// See [`change`]. Ranges are a start and a length, in bytes.
pub struct Change(Option<Guard<'static, Option<Engine>>>);

impl Change {
    fn engine(&mut self) -> Option<&mut Engine> {
        self.0.as_mut()?.as_mut()
    }

    /// A range is about to be unmapped.
    pub fn unmapping(&mut self, start: usize, length: usize) {
        self.each_mapped(start, length, Engine::home_unmapped);
    }

    /// The contents of a range are about to be thrown away (`MADV_DONTNEED`).
    pub fn discarding(&mut self, start: usize, length: usize) {
        self.each_mapped(start, length, Engine::home_discard);
    }

    /// Calls `act` for the mapped parts of a range.
    fn each_mapped(&mut self, start: usize, length: usize, act: fn(&mut Engine, u64, u64)) {
        if let Some(engine) = self.engine() {
            let (start, end) = (start as u64, (start + length) as u64);
            engine.each_region(start, end, |engine, part| act(engine, part.start, part.end));
        }
    }

    /// Protection of a range was changed.
    pub fn protected(&mut self, start: usize, length: usize, protection: u32) {
        if let Some(engine) = self.engine() {
            engine.home_protected(start as u64, (start + length) as u64, protection);
        }
    }

    /// A range is about to be moved by mremap.
    pub fn moving(&mut self, start: usize, length: usize) {
        if let Some(engine) = self.engine() {
            engine.home_moving(start as u64, (start + length) as u64);
        }
    }

    /// The kernel refused to move a range.
    pub fn stayed(&mut self, start: usize, length: usize) {
        if let Some(engine) = self.engine() {
            engine.watch_again(start as u64, (start + length) as u64);
        }
    }

    /// A range was moved by mremap.
    pub fn moved(
        &mut self,
        old_start: usize,
        old_length: usize,
        new_start: usize,
        new_length: usize,
    ) {
        if let Some(engine) = self.engine() {
            engine.home_moved(
                old_start as u64,
                old_length as u64,
                new_start as u64,
                new_length as u64,
            );
        }
    }
}

/// The program is about to fork (not vfork); false: there is no memory for it.
/// On true, one of the next two follows.
pub fn before_fork() -> bool {
    fork::before()
}

/// After a fork, in the parent, whether it succeeded or not.
pub fn after_fork_in_parent() {
    fork::after_in_parent();
}

/// First thing in a forked child: it stays at home, alone.
pub fn after_fork_in_child() {
    fork::after_in_child();
    BOOT.store(core::ptr::null_mut(), Ordering::Release);
    THREADS.store(1, Ordering::Relaxed);
}

/// The main process is about to replace its image.
pub fn before_exec() {
    before_exit();
}

/// The program ends.
pub fn before_exit() {
    if is_stretched()
        && control::is_main_process()
        && let Some(engine) = ENGINE.lock().as_mut()
    {
        engine.count_traffic();
    }
}

/// The number of the program's threads changed.
pub fn threads(count: usize) {
    THREADS.store(count, Ordering::Release);
    if let Some(shared) = control::shared() {
        shared.stats.threads.store(count as u32, Ordering::Relaxed);
    }
}

/// From now on somebody may run in this memory at the same time as the caller: a
/// thread, or another process that shares it (but for `vfork`, which waits).
pub fn shares_memory() {
    OTHERS.store(true, Ordering::Release);
}

/// Whether somebody may be running in this memory beside the caller.
fn others_run() -> bool {
    OTHERS.load(Ordering::Acquire)
}

/// Hash of the vdso that lies at [`space::VDSO`] here; 0: none does.
static VDSO_HASH: AtomicU64 = AtomicU64::new(0);

/// The vdso of this node was moved to where every node has it.
pub fn has_vdso(hash: u64) {
    VDSO_HASH.store(hash, Ordering::Relaxed);
}

fn set_boot(boot: &'static Boot) {
    BOOT.store(core::ptr::from_ref(boot).cast_mut(), Ordering::Release);
}

/// A slice's whole life.
pub fn run_slice(boot: &'static Boot) -> ! {
    set_boot(boot);
    start::run_slice(boot)
}

/// Called once before the program is loaded.
pub fn start_home(boot: &'static Boot) {
    set_boot(boot);
    if let Some(shared) = control::shared() {
        shared.stats.executing.store(1, Ordering::Relaxed);
        shared.stats.threads.store(1, Ordering::Relaxed);
    }
}

/// Fetches the pages of a range, as far as the program may touch them.
fn fetch_range(address: usize, length: usize, access: Access) {
    if !is_stretched() {
        return;
    }
    let mut guard = ENGINE.lock();
    let Some(engine) = guard.as_mut() else {
        return;
    };
    let end = address.saturating_add(length);
    let mut at = address;
    while at < end {
        let Some(region) = engine.io.layout.lookup(at as u64).copied() else {
            return;
        };
        let write = access == Access::Write && region.prot & PROT_WRITE != 0;
        let _ = engine.fault(at, write, false);
        at = (at & !(PAGE_BYTES - 1)) + PAGE_BYTES;
    }
}

/// How many of the bytes from `address` the program may write.
fn writable_bytes(address: u64, length: u64) -> u64 {
    if !is_stretched() {
        return length;
    }
    let mut guard = ENGINE.lock();
    let Some(engine) = guard.as_mut() else {
        return length;
    };
    let end = address.saturating_add(length);
    let mut at = address;
    while at < end {
        match engine.io.layout.lookup(at) {
            Some(region) if region.prot & PROT_WRITE != 0 => at = region.end,
            _ => break,
        }
    }
    at.min(end) - address
}
