//! New threads and new processes.
//!
//! Three kinds, by what `clone` is asked for:
//!
//! - *thread* (`CLONE_VM`, `CLONE_THREAD`): a kernel thread on a block of its
//!   own, which enters the program by a signal to itself with its parent's
//!   context;
//! - *borrower* (`CLONE_VM` only: `vfork`, `posix_spawn`): the same, but another
//!   process with signal actions of its own, until it execs or exits;
//! - *fork*: the kernel copies this very stack, and the child leaves through its
//!   copy of the frame. It stays at home and is no part of the aggregate.

use syscalls::Sysno;

use super::clone::{
    Arguments, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID, CLONE_CLEAR_SIGHAND, CLONE_PARENT_SETTID,
    CLONE_PIDFD, CLONE_SETTLS, CLONE_SIGHAND, CLONE_THREAD, CLONE_VFORK, CLONE_VM, Choice, Request,
};
use super::{run_for, word};
use crate::context;
use crate::frame::Frame;
use crate::own_calls::{self, Errno, Result, call};
use crate::signal::{self, actions, entry};
use crate::thread::{self, Thread};
use crate::{control, engine, intercept, log, memory, space};
use weft_proc::boot::EXIT_INTERNAL;

/// Room above the first stack pointer of a new block, bytes: keeps it inside.
const STACK_MARGIN: usize = 64;

/// `clone`, `clone3`, `fork` and `vfork`.
pub fn clone(thread: &Thread, frame: &mut Frame, call: Sysno, arguments: &[usize; 6]) -> isize {
    let made = Request::read(call, arguments).and_then(|request| {
        if request.has(CLONE_VM) {
            start(thread, frame, &request)
        } else {
            Ok(fork(thread, frame, &request))
        }
    });
    made.unwrap_or_else(|error| word(Err(error)))
}

/// A thread or a borrower.
fn start(thread: &Thread, frame: &Frame, request: &Request) -> Result<isize> {
    let shares_process = request.has(CLONE_THREAD);
    let child = thread::allocate()?;
    prepare(thread, child, frame, request);
    if shares_process {
        engine::threads(thread::started());
    }
    if !request.has(CLONE_VFORK) {
        engine::shares_memory();
    }
    let low = child.stack_low();
    let choice = Choice {
        stack: [low, child.stack_top() - STACK_MARGIN - low],
        pidfd: child.pidfd.as_ptr() as usize,
        cleared_at_end: child.alive_word() as usize,
        flags: CLONE_CHILD_CLEARTID,
    };
    let mut storage = Arguments::default();
    let call = request.call(&choice, &mut storage);
    // SAFETY: the stack belongs to a block that nobody else uses.
    let result = unsafe { entry::clone(thread, call.number as usize, &call.arguments) };
    if result < 0 {
        child.abandon();
        if shares_process {
            engine::threads(thread::ended());
        }
    } else if !request.has(CLONE_VFORK) {
        // Before the child may run: it could end, and clear the word, first.
        child.announce_as(result as u32);
        child.release();
    }
    Ok(result)
}

/// Fills in what the child needs before it exists.
fn prepare(thread: &Thread, child: &'static Thread, frame: &Frame, request: &Request) {
    let asked = &request.asked;
    let given = |flag: u64, address: u64| request.wanted(flag, address).unwrap_or(0);
    {
        let mut start = child.start.lock();
        context::save(&mut start, frame);
        start.registers.rax = 0;
        if let Some(top) = request.stack_pointer() {
            start.registers.rsp = top;
        }
        if request.has(CLONE_SETTLS) {
            start.fs = asked.tls as usize;
        }
    }
    child.set_hidden_mask(thread.hidden_mask());
    child.set_process(thread.process());
    child
        .clear_child_tid
        .set(given(CLONE_CHILD_CLEARTID, asked.child_tid));
    child.announce.set([
        given(CLONE_PARENT_SETTID, asked.parent_tid),
        given(CLONE_CHILD_SETTID, asked.child_tid),
    ]);
    child.announce_pidfd.set(given(CLONE_PIDFD, asked.pidfd));
    child.actions.set(Some(thread.table()));
    if !request.has(CLONE_THREAD) {
        child.borrowed.set(true);
        child.suspends_parent.set(request.has(CLONE_VFORK));
        if request.has(CLONE_VFORK) {
            child.alternate_stack.set(thread.alternate_stack.get());
        }
        if !request.has(CLONE_SIGHAND) {
            child.own_actions.copy_from(thread.table());
            child.actions.set(Some(&child.own_actions));
        }
        child.drops_handlers.set(request.has(CLONE_CLEAR_SIGHAND));
    }
}

/// First function of a new thread or borrower, on its block's stack.
#[unsafe(no_mangle)]
pub extern "C" fn weft_child(stack: usize) -> ! {
    // SAFETY: `stack` lies in the block that `start` prepared for this thread.
    let thread = unsafe { Thread::at(stack) };
    thread.set_id(own_calls::thread_id());
    if thread.borrowed.get() {
        thread.set_process(own_calls::process_id());
    }
    if thread.use_stack().is_err() || intercept::arm().is_err() {
        log::fatal(
            EXIT_INTERNAL,
            "a new thread could not intercept its system calls",
        );
    }
    if thread.drops_handlers.get() {
        thread.table().drop_handlers();
    }
    if thread.suspends_parent.get() {
        thread.announce_as(thread.id());
    } else {
        thread.await_release();
    }
    signal::enter(thread)
}

/// A process of its own.
fn fork(thread: &Thread, frame: &mut Frame, request: &Request) -> isize {
    let asked = &request.asked;
    let mut pidfd = -1i32;
    let choice = Choice {
        pidfd: &raw mut pidfd as usize,
        flags: asked.flags & CLONE_SETTLS,
        ..Choice::default()
    };
    let mut storage = Arguments::default();
    let call = request.call(&choice, &mut storage);
    let result = {
        // Held across the call, so that the child's copies are free.
        let _space = space::lock();
        if !engine::before_fork() {
            return word(Err(Errno::ENOMEM));
        }
        let table = thread.table();
        let result = table.while_locked(|| run_for(thread, call.number as usize, &call.arguments));
        if result != 0 {
            engine::after_fork_in_parent();
        }
        result
    };
    if result == 0 {
        begin_forked(thread);
        if request.has(CLONE_CLEAR_SIGHAND) {
            actions::SHARED.drop_handlers();
        }
        if let Some(address) = request.wanted(CLONE_CHILD_SETTID, asked.child_tid) {
            let _ = memory::write(address, &thread.id());
        }
        if let Some(top) = request.stack_pointer() {
            frame.registers.rsp = top;
        }
        thread.clear_child_tid.set(
            request
                .wanted(CLONE_CHILD_CLEARTID, asked.child_tid)
                .unwrap_or(0),
        );
    } else if result > 0 {
        if let Some(address) = request.wanted(CLONE_PIDFD, asked.pidfd) {
            let _ = memory::write(address, &pidfd);
        }
        if let Some(address) = request.wanted(CLONE_PARENT_SETTID, asked.parent_tid) {
            let _ = memory::write(address, &(result as u32));
        }
    }
    result
}

/// Makes the forked child a process that needs no launcher.
fn begin_forked(thread: &Thread) {
    thread.set_id(own_calls::thread_id());
    thread.set_process(own_calls::process_id());
    thread.robust_list.set(0);
    let inbox = thread.inbox();
    inbox
        .pending
        .store(0, core::sync::atomic::Ordering::Release);
    inbox.held.clear();
    signal::held::clear_process();
    if thread.borrowed.get() {
        // A child of a `vfork` child has memory, and actions, of its own.
        actions::SHARED.copy_from(&thread.own_actions);
        thread.actions.set(Some(&actions::SHARED));
        thread.borrowed.set(false);
    }
    thread::keep_only(thread);
    let _ = call!(set_tid_address, thread.alive_word());
    if intercept::arm().is_err() {
        log::fatal(
            EXIT_INTERNAL,
            "a forked child could not intercept its system calls",
        );
    }
    control::leave();
    engine::after_fork_in_child();
}
