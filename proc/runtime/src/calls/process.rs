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

use super::{run_for, word};
use crate::frame::Frame;
use crate::kernel::{self, Errno, call};
use crate::signal::{self, actions, entry};
use crate::thread::{self, Thread};
use crate::{control, dispatch, engine, log, memory, space};

const CLONE_VM: usize = 0x100;
const CLONE_SIGHAND: usize = 0x800;
const CLONE_PIDFD: usize = 0x1000;
const CLONE_VFORK: usize = 0x4000;
const CLONE_THREAD: usize = 0x1_0000;
const CLONE_SETTLS: usize = 0x8_0000;
const CLONE_PARENT_SETTID: usize = 0x10_0000;
const CLONE_CHILD_CLEARTID: usize = 0x20_0000;
const CLONE_CHILD_SETTID: usize = 0x100_0000;
const SIGCHLD: usize = signal::SIGCHLD as usize;
/// Room above the first stack pointer of a new block, bytes: keeps it inside.
const STACK_MARGIN: usize = 64;

/// Arguments of `clone`.
#[derive(Clone, Copy)]
struct Request {
    flags: usize,
    stack: usize,
    parent_tid: usize,
    child_tid: usize,
    tls: usize,
}

/// `clone`, `fork` and `vfork`.
pub fn clone(thread: &mut Thread, frame: &mut Frame, call: Sysno, arguments: &[usize; 6]) -> isize {
    let mut request = Request {
        flags: SIGCHLD,
        stack: 0,
        parent_tid: 0,
        child_tid: 0,
        tls: 0,
    };
    match call {
        Sysno::vfork => request.flags = CLONE_VM | CLONE_VFORK | SIGCHLD,
        Sysno::clone => {
            let [flags, stack, parent_tid, child_tid, tls, _] = *arguments;
            request = Request {
                flags,
                stack,
                parent_tid,
                child_tid,
                tls,
            };
        }
        _ => {}
    }
    if request.flags & CLONE_VM == 0 {
        fork(thread, frame, &request)
    } else {
        start(thread, frame, &request).unwrap_or_else(|error| word(Err(error)))
    }
}

/// A thread or a borrower.
fn start(
    thread: &mut Thread,
    frame: &Frame,
    request: &Request,
) -> core::result::Result<isize, Errno> {
    let shares_process = request.flags & CLONE_THREAD != 0;
    let child = thread::allocate()?;
    prepare(thread, child, frame, request);
    if shares_process {
        engine::threads(thread::started());
    }
    let announced = CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | CLONE_SETTLS;
    let flags = (request.flags & !announced) | CLONE_CHILD_CLEARTID;
    let pidfd = if request.flags & CLONE_PIDFD != 0 {
        request.parent_tid
    } else {
        0
    };
    let stack = child.stack_top() - STACK_MARGIN;
    let alive = child.alive_word() as usize;
    // SAFETY: the stack belongs to a block that nobody else uses.
    let result = unsafe { entry::clone(thread, flags, stack, pidfd, alive) };
    if result < 0 {
        child.abandon();
        if shares_process {
            engine::threads(thread::ended());
        }
    } else if request.flags & CLONE_VFORK == 0 {
        // Before the child may run: it could end, and clear the word, first.
        child.announce_as(result as u32);
        child.release();
    }
    Ok(result)
}

/// Fills in what the child needs before it exists.
fn prepare(thread: &Thread, child: &mut Thread, frame: &Frame, request: &Request) {
    let given = |flag: usize, address: usize| {
        if request.flags & flag != 0 {
            address
        } else {
            0
        }
    };
    child.start.save(frame);
    child.start.registers.rax = 0;
    if request.stack != 0 {
        child.start.registers.rsp = request.stack;
    }
    if request.flags & CLONE_SETTLS != 0 {
        child.start.fs = request.tls;
    }
    child.hidden_mask = thread.hidden_mask;
    child.process = thread.process;
    child.clear_child_tid = given(CLONE_CHILD_CLEARTID, request.child_tid);
    child.announce = [
        given(CLONE_PARENT_SETTID, request.parent_tid),
        given(CLONE_CHILD_SETTID, request.child_tid),
    ];
    child.actions = thread.actions;
    if request.flags & CLONE_THREAD == 0 {
        child.borrowed = true;
        child.suspends_parent = request.flags & CLONE_VFORK != 0;
        child.clear_child_tid = 0;
        if request.flags & CLONE_VFORK != 0 {
            child.alternate_stack = thread.alternate_stack;
        }
        if request.flags & CLONE_SIGHAND == 0 {
            // SAFETY: set when the thread started, to a table that lives on.
            child.own_actions.copy_from(unsafe { &*thread.actions });
            child.actions = &raw const child.own_actions;
        }
    }
}

/// First function of a new thread or borrower, on its block's stack.
#[unsafe(no_mangle)]
pub extern "C" fn weft_child(stack: usize) -> ! {
    // SAFETY: `stack` lies in the block that `start` prepared for this thread.
    let thread = unsafe { Thread::at(stack) };
    thread.id = kernel::thread_id();
    if thread.borrowed {
        thread.process = kernel::process_id();
    }
    if thread.use_stack().is_err() || dispatch::arm().is_err() {
        log::fatal(124, "a new thread could not intercept its system calls");
    }
    if thread.suspends_parent {
        thread.announce_as(thread.id);
    } else {
        thread.await_release();
    }
    signal::enter(thread)
}

/// A process of its own.
fn fork(thread: &mut Thread, frame: &mut Frame, request: &Request) -> isize {
    // The runtime clears the word for the child, too (see `threads::exit`), and
    // writes the thread numbers: the kernel could meet absent pages.
    let kernels = CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID | CLONE_PARENT_SETTID;
    let pidfd = if request.flags & CLONE_PIDFD != 0 {
        request.parent_tid
    } else {
        0
    };
    let arguments = [request.flags & !kernels, 0, pidfd, 0, request.tls, 0];
    let result = {
        // Held across the call, so that the child's copies are free.
        let _space = space::lock();
        if !engine::before_fork(thread) {
            return word(Err(Errno::ENOMEM));
        }
        // SAFETY: set when the thread started, to a table that lives on.
        let table = unsafe { &*thread.actions };
        let result = table.while_locked(|| run_for(thread, Sysno::clone as usize, &arguments));
        if result != 0 {
            engine::after_fork_in_parent();
        }
        result
    };
    if result == 0 {
        begin_forked(thread);
        if request.flags & CLONE_CHILD_SETTID != 0 {
            let _ = memory::write(request.child_tid, &thread.id);
        }
        if request.stack != 0 {
            frame.registers.rsp = request.stack;
        }
        if request.flags & CLONE_CHILD_CLEARTID != 0 {
            thread.clear_child_tid = request.child_tid;
        }
    } else if result > 0 && request.flags & CLONE_PARENT_SETTID != 0 {
        let _ = memory::write(request.parent_tid, &(result as u32));
    }
    result
}

/// Makes the forked child a process that needs no launcher.
fn begin_forked(thread: &mut Thread) {
    thread.id = kernel::thread_id();
    thread.process = kernel::process_id();
    thread.clear_child_tid = 0;
    thread.robust_list = 0;
    let inbox = thread.inbox();
    inbox
        .pending
        .store(0, core::sync::atomic::Ordering::Release);
    if thread.borrowed {
        // A child of a `vfork` child has memory, and actions, of its own.
        actions::SHARED.copy_from(&thread.own_actions);
        thread.actions = &raw const actions::SHARED;
        thread.borrowed = false;
    }
    thread::keep_only(thread);
    let _ = call!(set_tid_address, thread.alive_word());
    if dispatch::arm().is_err() {
        log::fatal(124, "a forked child could not intercept its system calls");
    }
    control::leave();
    engine::after_fork_in_child();
}
