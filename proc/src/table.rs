//! What is known of every system call: where it can run and what its arguments
//! point to.
//!
//! The table answers one question: the program is on another node (or one of
//! its threads may race with the pager) and makes this call; can it be carried
//! home as a message? [`classify`] gives the [`Class`]; for a
//! [`Class::Plain`] call it also describes each argument, and [`crate::marshal`]
//! does the carrying from that description alone.
//!
//! Every number has a class. What the table does not list is [`Class::Home`]:
//! the execution goes home and the call runs there with its pointers as they
//! are, so that an unknown call is slow, never wrong.

// Rows of a table: a call a line.
#[rustfmt::skip]
mod calls;
mod refused;
mod requests;
#[cfg(test)]
mod tests;

pub use calls::CALLS;

/// Numbers from here on are unknown to the table.
pub const NUMBERS: usize = 512;

/// Where a system call can run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// Its arguments are integers, descriptors and described memory: it can be
    /// carried home and its results carried back.
    Plain(Plain),
    /// Changes or asks about mappings; the engine does it on every node.
    Memory,
    /// Makes, ends or steers threads, processes and signals; the engine does it.
    Thread,
    /// Gives the same answer on every node: may run where the program is.
    Local,
    /// Runs natively at home, with the execution there.
    Home,
    /// Fails at once with this (positive) error number.
    Refused(i32),
}

/// How to carry a [`Class::Plain`] call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plain {
    /// What each argument is.
    pub args: [Arg; 6],
    /// Whether it can block, and what a signal then does.
    pub wait: Wait,
    /// How a long transfer is made in pieces; `None` when it cannot be.
    pub split: Option<Split>,
}

/// One argument. Numbers inside are indices of other arguments, 0 to 5.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arg {
    /// An integer, or nothing: passed as it is.
    Int,
    /// A file descriptor (or `AT_FDCWD`), for engines that shield some of their
    /// own.
    Descriptor,
    /// Memory that the kernel reads.
    In(Length),
    /// Memory that the kernel writes.
    Out(Length, Produced, When),
    /// Memory that the kernel reads and may write; carried back whole.
    InOut(Length, When),
    /// A NUL-terminated string of at most this many bytes, NUL included.
    CString(u16),
    /// A string that the kernel cuts to one byte less than this.
    CutString(u16),
    /// `struct iovec[n]` to read from; the argument that says `n`.
    InVector(u8),
    /// `struct iovec[n]` to write into; the argument that says `n`.
    OutVector(u8),
    /// `struct msghdr` to send.
    InMessage,
    /// `struct msghdr` to receive into.
    OutMessage,
    /// A signal mask; the argument that says its size.
    SignalSet(u8),
    /// `struct { sigset_t *mask; size_t size }`, as `pselect6` takes it.
    PackedSignalSet,
    /// Depends on the `ioctl` request, argument 1.
    Ioctl,
    /// Depends on the `fcntl` command, argument 1.
    Fcntl,
    /// Depends on the `prctl` option, argument 0.
    Prctl,
}

/// How long the memory behind a pointer is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Length {
    /// This many bytes.
    Constant(u32),
    /// As many bytes as an argument says.
    Argument(u8),
    /// As many bytes as an argument says, and a constant more.
    ArgumentPlus(u8, u32),
    /// An argument's number of elements of this size, bytes.
    Elements(u8, u32),
    /// An `fd_set` for as many descriptors as an argument says.
    Bits(u8),
    /// As many bytes as the `u32` says that an argument points to.
    Pointed(u8),
}

/// How much of an output the kernel has produced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Produced {
    All,
    /// As many bytes as the result says, and a constant more.
    Result(u32),
    /// As many elements of this size as the result says.
    Elements(u32),
    /// As many bytes as the `u32` says that an argument points to.
    Pointed(u8),
}

/// With which results an output is carried back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// Not negative.
    Success,
    /// Greater than zero.
    Positive,
    /// `-EINTR`.
    Interrupted,
    /// Any; and memory that cannot be written is ignored, as the kernel does
    /// with the timeout of `select`.
    Quietly,
}

/// Whether a call can block, and what a signal handler then does to it
/// (signal(7), "Interruption of system calls").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Returns in bounded time.
    Never,
    /// Restarted after a handler with `SA_RESTART`. Socket calls are not when
    /// the socket has a timeout (`SO_RCVTIMEO`, `SO_SNDTIMEO`).
    Restarts,
    /// Fails with EINTR after every handler.
    Interrupted,
}

/// How a transfer longer than the buffer is made in pieces, see
/// [`crate::marshal::Transfer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Split {
    /// The argument that points to the data, or to its vector or message.
    pub data: u8,
    /// The argument that says its length; `None` for a vector or a message.
    pub length: Option<u8>,
    /// The argument that says the file position, if one does. A position of -1
    /// means the descriptor's own and stays.
    pub position: Option<u8>,
    /// What may follow a full piece.
    pub next: Next,
}

/// Whether a piece that was transferred whole is followed by another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Always: Linux too goes on writing until everything is written.
    Always,
    /// On regular files only: elsewhere the next piece could block although
    /// there is something to return already.
    RegularFile,
    /// Never: a short count is an ordinary answer.
    Never,
    /// The call must not be split; when it is too long it goes home.
    Whole,
}

impl Plain {
    const fn new(given: &[Arg]) -> Plain {
        let mut args = [Arg::Int; 6];
        let mut index = 0;
        while index < given.len() {
            args[index] = given[index];
            index += 1;
        }
        Plain {
            args,
            wait: Wait::Never,
            split: None,
        }
    }
    /// Whether it can block.
    pub const fn may_block(&self) -> bool {
        !matches!(self.wait, Wait::Never)
    }
}

/// The class of system call `nr` as it is called with `args`: `ioctl`, `fcntl`
/// and `prctl` are looked up by what they are asked for, so the result never
/// holds [`Arg::Ioctl`], [`Arg::Fcntl`] or [`Arg::Prctl`].
pub fn classify(nr: u64, args: &[u64; 6]) -> Class {
    let Some(&class) = usize::try_from(nr).ok().and_then(|nr| CALLS.get(nr)) else {
        return Class::Home;
    };
    let Class::Plain(mut plain) = class else {
        return class;
    };
    for index in 0..plain.args.len() {
        let found = match plain.args[index] {
            Arg::Ioctl => requests::ioctl(args[1]),
            Arg::Fcntl => requests::fcntl(args[1], &mut plain.wait),
            Arg::Prctl => requests::prctl(args[0]),
            _ => continue,
        };
        match found {
            Found::Arg(arg) => plain.args[index] = arg,
            Found::Unknown => return Class::Home,
            Found::Refused(errno) => return Class::Refused(errno),
        }
    }
    requests::refine(nr as u32, args, plain)
}

/// What a request, command or option makes of the argument it governs.
enum Found {
    Arg(Arg),
    Unknown,
    Refused(i32),
}
