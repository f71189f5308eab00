//! The program's signal actions.
//!
//! For each signal the table says what the program asked for. The kernel is told
//! the same for `SIG_DFL` and `SIG_IGN`, so default actions, job control and the
//! automatic reaping of children stay native; for a handler it is told the
//! runtime's own entry. SIGSYS, SIGSEGV, SIGBUS and the runtime's signal keep
//! the runtime's entry whatever the program asks for.

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::frame::SignalInfo;
use crate::lock::Lock;
use crate::memory;
use crate::own_calls::{self, Errno, Result, call};
use crate::signal::{self, entry, mask};
use crate::thread::Thread;

pub const SIGNALS: usize = 64;
/// Default action.
pub const SIG_DFL: usize = 0;
pub const SIG_IGN: usize = 1;

/// Children that stop do not raise SIGCHLD.
pub const SA_NOCLDSTOP: u64 = 1;
/// Children are reaped automatically.
pub const SA_NOCLDWAIT: u64 = 2;
/// The handler takes three arguments.
pub const SA_SIGINFO: u64 = 4;
/// A restorer is given.
pub const SA_RESTORER: u64 = 0x0400_0000;
/// Run on the alternate stack.
pub const SA_ONSTACK: u64 = 0x0800_0000;
/// Restart interrupted system calls.
pub const SA_RESTART: u64 = 0x1000_0000;
/// Do not block the signal while its handler runs.
pub const SA_NODEFER: u64 = 0x4000_0000;
/// Back to the default once delivered.
pub const SA_RESETHAND: u64 = 0x8000_0000;

/// `struct sigaction` of the kernel.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
pub struct Action {
    /// `SIG_DFL`, `SIG_IGN` or an address.
    pub handler: usize,
    /// `SA_*`.
    pub flags: u64,
    /// Where the handler returns to.
    pub restorer: usize,
    /// Blocked while it runs.
    pub mask: u64,
}

const _: () = assert!(size_of::<Action>() == 32);

impl Action {
    const DEFAULT: Action = Action {
        handler: SIG_DFL,
        flags: 0,
        restorer: 0,
        mask: 0,
    };
    /// Whether the program has a function for the signal.
    pub fn is_handler(&self) -> bool {
        self.handler > SIG_IGN
    }
}

/// Actions of one process. The lock guards them and is never held while the
/// program's memory is touched.
pub struct Table {
    actions: Lock<[Action; SIGNALS]>,
}

/// The process's table.
pub static SHARED: Table = Table::new();

impl Table {
    /// Everything default.
    pub const fn new() -> Table {
        Table {
            actions: Lock::new([Action::DEFAULT; SIGNALS]),
        }
    }
    /// What the program asked for.
    pub fn get(&self, signal: i32) -> Action {
        self.actions.lock()[signal as usize - 1]
    }
    /// What to do with a signal that is being delivered; with `SA_RESETHAND`
    /// the action becomes the default one at the same time.
    pub fn take(&self, signal: i32) -> Action {
        let mut actions = self.actions.lock();
        let action = actions[signal as usize - 1];
        if action.is_handler() && action.flags & SA_RESETHAND != 0 {
            actions[signal as usize - 1].handler = SIG_DFL;
            let _ = tell_kernel(signal, &actions[signal as usize - 1]);
        }
        action
    }
    /// Replaces an action, in the kernel too; returns the old one.
    pub fn set(&self, signal: i32, action: Action) -> Result<Action> {
        let mut actions = self.actions.lock();
        let old = actions[signal as usize - 1];
        // The table first: a signal that arrives in between is delivered by
        // what the table says, and the kernel's word only decides whether it
        // comes here at all.
        actions[signal as usize - 1] = action;
        if let Err(error) = tell_kernel(signal, &action) {
            actions[signal as usize - 1] = old;
            return Err(error);
        }
        Ok(old)
    }
    /// Makes this table a copy of `other`.
    pub fn copy_from(&self, other: &Table) {
        let actions = *other.actions.lock();
        *self.actions.lock() = actions;
    }
    /// Gives every signal that has a handler its default action.
    pub fn drop_handlers(&self) {
        for signal in 1..=SIGNALS as i32 {
            if self.get(signal).is_handler() {
                // The kernel refuses no default action of a signal that it had
                // a handler for.
                let _ = self.set(signal, Action::DEFAULT);
            }
        }
    }
    /// Learns what was ignored when the process started.
    pub fn learn_ignored(&self) {
        let mut actions = self.actions.lock();
        for signal in 1..=SIGNALS as i32 {
            let mut native = Action::DEFAULT;
            let known = call!(rt_sigaction, signal, 0, &raw mut native, 8);
            if known.is_ok() && native.handler == SIG_IGN {
                actions[signal as usize - 1].handler = SIG_IGN;
            }
        }
    }
    /// Keeps a lock over the table while `work` runs: a fork must not copy a
    /// held lock.
    pub fn while_locked<R>(&self, work: impl FnOnce() -> R) -> R {
        let _guard = self.actions.lock();
        work()
    }
}

impl Default for Table {
    fn default() -> Table {
        Table::new()
    }
}

/// The action the kernel has to know for what the program asked.
fn tell_kernel(signal: i32, action: &Action) -> Result<()> {
    if mask::NEVER_BLOCKED & mask::bit(signal) != 0 {
        return Ok(());
    }
    let native = if action.is_handler() {
        let kept = SA_RESTART | SA_NOCLDSTOP | SA_NOCLDWAIT;
        Action {
            handler: entry::signal_entry(),
            flags: SA_SIGINFO | SA_ONSTACK | SA_RESTORER | (action.flags & kept),
            restorer: entry::restorer(),
            mask: !mask::NEVER_BLOCKED,
        }
    } else {
        Action {
            restorer: entry::restorer(),
            flags: action.flags | SA_RESTORER,
            ..*action
        }
    };
    call!(rt_sigaction, signal, &raw const native, 0, 8).map(|_| ())
}

/// Installs the runtime's own handlers.
pub fn install() -> Result<()> {
    install_for(&[
        signal::SIGSYS,
        signal::SIGSEGV,
        signal::SIGBUS,
        signal::KICK,
    ])
}

/// Installs the handlers of a slice: there, every signal that an instruction can
/// raise is the runtime's, so that home can judge it.
pub fn install_for_slice() -> Result<()> {
    install()?;
    install_for(&[signal::SIGFPE, signal::SIGILL, signal::SIGTRAP])
}

fn install_for(signals: &[i32]) -> Result<()> {
    for &signal in signals {
        let native = Action {
            handler: entry::signal_entry(),
            flags: SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTORER | SA_RESTART,
            restorer: entry::restorer(),
            mask: 0,
        };
        call!(rt_sigaction, signal, &raw const native, 0, 8)?;
    }
    Ok(())
}

/// Puts the kernel's action for `signal` to the default one.
pub fn make_default(signal: i32) {
    let native = Action {
        restorer: entry::restorer(),
        flags: SA_RESTORER,
        ..Action::DEFAULT
    };
    let _ = call!(rt_sigaction, signal, &raw const native, 0, 8);
}

/// Tells the kernel what the program asked for, and nothing of the runtime.
pub fn release(table: &Table) {
    for signal in 1..=SIGNALS as i32 {
        let action = table.get(signal);
        // Of SIGKILL and SIGSTOP the kernel wants to know nothing.
        let _ = call!(rt_sigaction, signal, &raw const action, 0, 8);
    }
}

/// Before an `execve`: the kernel resets what has a handler, and the runtime's
/// signals have one even where the program said "ignore".
pub fn prepare_exec(table: &Table) {
    for signal in [
        signal::SIGSYS,
        signal::SIGSEGV,
        signal::SIGBUS,
        signal::KICK,
    ] {
        if table.get(signal).handler == SIG_IGN {
            let native = Action {
                handler: SIG_IGN,
                restorer: entry::restorer(),
                flags: SA_RESTORER,
                mask: 0,
            };
            let _ = call!(rt_sigaction, signal, &raw const native, 0, 8);
        }
    }
}

/// Sends a signal to the calling thread with the given information, natively.
pub fn requeue(thread: &Thread, info: &SignalInfo) {
    let sent = call!(
        rt_tgsigqueueinfo,
        thread.process(),
        thread.id(),
        info.signal,
        core::ptr::from_ref(info)
    );
    if sent == Err(Errno::EAGAIN) {
        let _ = call!(tgkill, thread.process(), thread.id(), info.signal);
    }
}

/// `rt_sigaction` of the program.
pub fn rt_sigaction(thread: &Thread, arguments: &[usize; 6]) -> Result<usize> {
    let [number, new, old, size, ..] = *arguments;
    if size != 8 || number == 0 || number > SIGNALS {
        return Err(Errno::EINVAL);
    }
    let signal = number as i32;
    if new != 0 && (signal == signal::SIGKILL || signal == signal::SIGSTOP) {
        return Err(Errno::EINVAL);
    }
    let table = thread.table();
    let before = if new != 0 {
        let action: Action = memory::read(new)?;
        table.set(signal, action)?
    } else {
        table.get(signal)
    };
    if old != 0 {
        memory::write(old, &before)?;
    }
    Ok(0)
}

/// Ends the process by `signal` as if the runtime were not there: its default
/// action, its core dump, its status.
pub fn die_of(signal: i32) -> ! {
    make_default(signal);
    let open = 0u64;
    let _ = call!(rt_sigprocmask, 2, &raw const open, 0, 8);
    let _ = call!(
        tgkill,
        own_calls::process_id(),
        own_calls::thread_id(),
        signal
    );
    own_calls::exit_group(128 + signal)
}
