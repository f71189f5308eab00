//! What `clone`, `clone3`, `fork` and `vfork` are asked for, as one [`Request`].
//!
//! The runtime does a part itself: it writes the thread numbers and the pidfd,
//! whose pages may be elsewhere, gives a thread its stack and FS base, and
//! resets handlers, of which the kernel knows only the runtime's. That part is
//! taken out of what the kernel is asked for. The kernel judges the rest, by the
//! same call as the program's: what it refuses, the program sees refused.

use syscalls::Sysno;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::context;
use crate::memory;
use crate::own_calls::{Errno, Result};
use crate::signal::SIGCHLD;

pub const CLONE_VM: u64 = 0x100;
pub const CLONE_SIGHAND: u64 = 0x800;
pub const CLONE_PIDFD: u64 = 0x1000;
pub const CLONE_VFORK: u64 = 0x4000;
pub const CLONE_THREAD: u64 = 0x1_0000;
pub const CLONE_SETTLS: u64 = 0x8_0000;
pub const CLONE_PARENT_SETTID: u64 = 0x10_0000;
pub const CLONE_CHILD_CLEARTID: u64 = 0x20_0000;
pub const CLONE_CHILD_SETTID: u64 = 0x100_0000;
pub const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;

/// The flags that the runtime acts on itself.
const OWN: u64 = CLONE_PARENT_SETTID
    | CLONE_CHILD_SETTID
    | CLONE_CHILD_CLEARTID
    | CLONE_SETTLS
    | CLONE_CLEAR_SIGHAND;

/// The bits of `clone`'s flags that are a signal.
const CSIGNAL: u64 = 0xff;
/// Depth of nested PID namespaces: most numbers in `set_tid`.
const SET_TID_MAX: usize = 32;

/// `struct clone_args`.
#[repr(C)]
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable)]
pub struct Arguments {
    pub flags: u64,
    pub pidfd: u64,
    pub child_tid: u64,
    pub parent_tid: u64,
    pub exit_signal: u64,
    /// Lowest address of the stack; of `clone`: the first stack pointer.
    pub stack: u64,
    pub stack_size: u64,
    pub tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// First version of the structure, bytes.
const ARGUMENTS_BYTES_MIN: usize = 64;
const _: () = assert!(size_of::<Arguments>() == 88);

/// A new thread or process, as the program asked for it.
pub struct Request {
    pub asked: Arguments,
    /// Bytes of the structure of a `clone3`; `None` for the other calls.
    structure_bytes: Option<usize>,
    /// What `set_tid` points to.
    numbers: [i32; SET_TID_MAX],
}

/// A system call that makes a thread or process. It points into itself and into
/// the [`Request`] that it was made from.
pub struct Call {
    pub number: Sysno,
    pub arguments: [usize; 6],
}

/// What of the kernel's work is the runtime's to choose.
#[derive(Default)]
pub struct Choice {
    /// Lowest address and length of the stack; 0: the creator's.
    pub stack: [usize; 2],
    /// Where the kernel puts the pidfd, if one was asked for.
    pub pidfd: usize,
    /// The word that the kernel clears at the thread's end; 0: none.
    pub cleared_at_end: usize,
    /// Flags of [`OWN`] that the kernel shall act on after all.
    pub flags: u64,
}

impl Request {
    /// Reads a call's arguments.
    pub fn read(call: Sysno, arguments: &[usize; 6]) -> Result<Request> {
        let mut request = Request {
            asked: Arguments::default(),
            structure_bytes: None,
            numbers: [0; SET_TID_MAX],
        };
        let words = arguments.map(|word| word as u64);
        match call {
            Sysno::clone => request.read_registers(&words),
            Sysno::clone3 => request.read_structure(arguments[0], arguments[1])?,
            Sysno::vfork => request.asked.flags = CLONE_VM | CLONE_VFORK,
            _ => {}
        }
        if matches!(call, Sysno::fork | Sysno::vfork) {
            request.asked.exit_signal = SIGCHLD as u64;
        }
        request.check()?;
        Ok(request)
    }

    fn read_registers(&mut self, words: &[u64; 6]) {
        let [flags, stack, parent_tid, child_tid, tls, _] = *words;
        let flags = flags & u64::from(u32::MAX);
        self.asked = Arguments {
            flags: flags & !CSIGNAL,
            pidfd: parent_tid,
            child_tid,
            parent_tid,
            exit_signal: flags & CSIGNAL,
            stack,
            tls,
            ..Arguments::default()
        };
    }

    fn read_structure(&mut self, address: usize, bytes: usize) -> Result<()> {
        const PAGE: usize = 4096;
        if bytes > PAGE {
            return Err(Errno::E2BIG);
        }
        if bytes < ARGUMENTS_BYTES_MIN {
            return Err(Errno::EINVAL);
        }
        let known = bytes.min(size_of::<Arguments>());
        memory::copy_in(address, &mut self.asked.as_mut_bytes()[..known])?;
        let mut rest = [0u8; PAGE - size_of::<Arguments>()];
        let rest = &mut rest[..bytes - known];
        memory::copy_in(address + known, rest)?;
        if rest.iter().any(|&byte| byte != 0) {
            return Err(Errno::E2BIG);
        }
        self.structure_bytes = Some(known);
        let Arguments {
            set_tid,
            set_tid_size,
            ..
        } = self.asked;
        if set_tid != 0 && set_tid_size <= SET_TID_MAX as u64 {
            let numbers = &mut self.numbers[..set_tid_size as usize];
            memory::copy_in(set_tid as usize, numbers.as_mut_bytes())?;
        }
        Ok(())
    }

    /// What the kernel cannot find, since it is not told.
    fn check(&self) -> Result<()> {
        let asked = &self.asked;
        let both = |flags: u64| asked.flags & flags == flags;
        if both(CLONE_CLEAR_SIGHAND | CLONE_SIGHAND)
            || both(CLONE_PIDFD | CLONE_PARENT_SETTID) && asked.pidfd == asked.parent_tid
        {
            return Err(Errno::EINVAL);
        }
        if self.structure_bytes.is_some() {
            let end = asked.stack.checked_add(asked.stack_size);
            let inside = end.is_some_and(|end| end <= context::USER_END as u64);
            if (asked.stack == 0) != (asked.stack_size == 0) || !inside {
                return Err(Errno::EINVAL);
            }
        }
        if asked.flags & CLONE_SETTLS != 0 && asked.tls >= context::USER_END as u64 {
            return Err(Errno::EPERM);
        }
        if let Some(address) = self.wanted(CLONE_PIDFD, asked.pidfd) {
            // The kernel finds a bad address before there is a child.
            let before: i32 = memory::read(address)?;
            memory::write(address, &before)?;
        }
        Ok(())
    }

    /// Whether all of `flags` are asked for.
    pub fn has(&self, flags: u64) -> bool {
        self.asked.flags & flags == flags
    }

    /// An address that counts only when its flag is given.
    pub fn wanted(&self, flag: u64, address: u64) -> Option<usize> {
        self.has(flag).then_some(address as usize)
    }

    /// The first stack pointer; `None`: the creator's.
    pub fn stack_pointer(&self) -> Option<usize> {
        let top = self.asked.stack + self.asked.stack_size;
        (top != 0).then_some(top as usize)
    }

    /// The call to make, with the kernel's structure in `storage`.
    pub fn call(&self, choice: &Choice, storage: &mut Arguments) -> Call {
        let asked = &self.asked;
        let flags = (asked.flags & !OWN) | choice.flags;
        let [stack, stack_size] = choice.stack;
        let Some(bytes) = self.structure_bytes else {
            return Call {
                number: Sysno::clone,
                arguments: [
                    (flags | asked.exit_signal) as usize,
                    stack + stack_size,
                    choice.pidfd,
                    choice.cleared_at_end,
                    asked.tls as usize,
                    0,
                ],
            };
        };
        *storage = Arguments {
            flags,
            pidfd: choice.pidfd as u64,
            child_tid: choice.cleared_at_end as u64,
            parent_tid: 0,
            stack: stack as u64,
            stack_size: stack_size as u64,
            set_tid: match asked.set_tid {
                0 => 0,
                _ => self.numbers.as_ptr() as u64,
            },
            ..*asked
        };
        Call {
            number: Sysno::clone3,
            arguments: [&raw const *storage as usize, bytes, 0, 0, 0, 0],
        }
    }
}
