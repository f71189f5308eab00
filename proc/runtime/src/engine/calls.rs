//! System calls of a stretched program.
//!
//! A call that the table of `weft_proc::table` can describe is *carried*: its
//! inputs are gathered from program memory (which may fault, and so brings the
//! pages here), the call runs at home on a buffer of the runtime's, and its
//! outputs are scattered back. At home both halves are in this process; the
//! kernel never touches program memory, which may be absent. Other calls:
//!
//! | class | home | elsewhere |
//! | --- | --- | --- |
//! | memory | native, announced to all nodes | asked of home |
//! | thread, signal, exit | native | go home, make it there |
//! | local | native | here, through a small buffer |
//! | unknown | native, after its pages were fetched | go home, make it there |

use syscalls::Sysno;
use weft_dsm::Access;
use weft_jump::Decision;
use weft_proc::marshal::{
    BULK_MAX, DecodedCall, Gather, Malformed, Memory, Request, SPACE_MAX, Step, Transfer,
    gather_plain,
};
use weft_proc::message::Message;
use weft_proc::stats::add;
use weft_proc::table::{Class, Plain};
use weft_wire::MAX_PAYLOAD;

use super::clock;
use super::io::Failure;
use super::machine::{ENGINE, Engine, Incoming};
use super::{jump, serve};
use crate::calls::{self, INSTRUCTION_BYTES, RESTART, RESUME, word};
use crate::frame::Frame;
use crate::memory;
use crate::own_calls::{self, Errno, call};
use crate::thread::Thread;

/// Attempts at a native call whose memory other threads push away meanwhile.
const ATTEMPTS: usize = 64;
/// Bytes behind each pointer of an unknown call that are fetched for it.
const FETCH_BYTES: usize = 8192;

/// Program memory through the fault path.
struct Program;

impl Memory for Program {
    fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), weft_proc::marshal::Fault> {
        memory::copy_in(address as usize, into).map_err(|_| weft_proc::marshal::Fault { address })
    }
    fn write(&mut self, address: u64, from: &[u8]) -> Result<(), weft_proc::marshal::Fault> {
        memory::copy_out(address as usize, from).map_err(|_| weft_proc::marshal::Fault { address })
    }
    fn writable(&mut self, address: u64, length: u64) -> u64 {
        super::writable_bytes(address, length)
    }
}

/// Room for the request and the reply of a system call that is carried.
#[derive(zerocopy::FromZeros)]
pub struct Buffers {
    pub request: [u8; SPACE_MAX],
    /// The reply, behind the memory that the call works on.
    pub reply: [u8; 2 * SPACE_MAX],
}

/// Whether a descriptor is a regular file's.
fn is_regular_file(descriptor: usize) -> bool {
    const S_IFMT: u32 = 0o170_000;
    const S_IFREG: u32 = 0o100_000;
    const MODE_WORD: usize = 6;
    let mut status = [0u32; 36];
    call!(fstat, descriptor, status.as_mut_ptr()).is_ok() && status[MODE_WORD] & S_IFMT == S_IFREG
}

/// A system call of this class at home. `None`: make it natively.
pub fn at_home(
    thread: &Thread,
    class: Class,
    number: usize,
    arguments: &[usize; 6],
) -> Option<isize> {
    match class {
        Class::Plain(plain) => {
            let words = arguments.map(|word| word as u64);
            let run = |thread: &Thread, request: &[u8], buffer: &mut [u8]| {
                buffer[..request.len()].copy_from_slice(request);
                run_request(thread, DecodedCall::decode_plain(plain, request), buffer)
            };
            carry(thread, &plain, number, &words, run)
                .or_else(|| fetched(thread, number, arguments))
        }
        Class::Refused(errno) => Some(-(errno as isize)),
        Class::Local | Class::Home => fetched(thread, number, arguments),
        // Of these, only futexes have the kernel look at the program's memory,
        // which another thread may have pushed away a moment ago. It is found
        // missing before anything was done.
        Class::Thread if is_futex(number) => {
            let result = calls::plain(thread, number, arguments);
            if result == word(Err(Errno::EFAULT)) {
                fetched(thread, number, arguments)
            } else {
                Some(result)
            }
        }
        Class::Memory => match Sysno::new(number) {
            // A page that has to stay cannot make room, nor follow the
            // execution.
            Some(Sysno::mlock | Sysno::mlock2 | Sysno::mlockall) => Some(word(Err(Errno::EAGAIN))),
            Some(Sysno::mincore | Sysno::msync) => fetched(thread, number, arguments),
            _ => None,
        },
        Class::Thread => None,
    }
}

/// Gathers, runs by `run`, scatters; piece by piece. `None`: it cannot be
/// carried.
fn carry(
    thread: &Thread,
    plain: &Plain,
    number: usize,
    words: &[u64; 6],
    run: impl FnMut(&Thread, &[u8], &mut [u8]) -> Ran,
) -> Option<isize> {
    let buffers = match thread.buffers.take() {
        Some(buffers) => buffers,
        None => own_calls::zeroed::<Buffers>().ok()?,
    };
    let result = carry_in(buffers, thread, plain, number, words, run);
    // A call of a signal handler during this one has left buffers of its own.
    if let Some(nested) = thread.buffers.replace(Some(buffers)) {
        // SAFETY: of that call, which is over; `zeroed` allocated as much.
        unsafe { own_calls::release(core::ptr::from_mut(nested).cast(), size_of::<Buffers>()) };
    }
    result
}

fn carry_in(
    Buffers { request, reply }: &mut Buffers,
    thread: &Thread,
    plain: &Plain,
    number: usize,
    words: &[u64; 6],
    mut run: impl FnMut(&Thread, &[u8], &mut [u8]) -> Ran,
) -> Option<isize> {
    let (request_bytes, reply_bytes) = (&mut request[..], &mut reply[..]);
    let mut transfer = Transfer::new();
    let mut come_home = false;
    loop {
        let gathered = gather_plain(
            plain,
            number as u64,
            words,
            transfer.done(),
            BULK_MAX,
            &mut Program,
            request_bytes,
        );
        let request = match gathered {
            Ok(request) => request,
            Err(Gather::Errno(_)) if transfer.done() > 0 => {
                return Some(transfer.done() as isize);
            }
            Err(Gather::Errno(errno)) => return Some(-(errno as isize)),
            Err(Gather::Home | Gather::Engine) => return None,
        };
        let ran = run(thread, &request_bytes[..request.sent()], reply_bytes);
        come_home |= ran.come_home;
        if ran.result == RESTART {
            return Some(if transfer.done() > 0 {
                transfer.done() as isize
            } else {
                RESTART
            });
        }
        let result = scatter(&request, &reply_bytes[..ran.length]);
        let step = transfer.advance(&request, result, || !come_home && ran.regular_file);
        match step {
            Step::More => {}
            Step::Finished(result) => return Some(result as isize),
        }
    }
}

fn scatter(request: &Request, reply: &[u8]) -> i64 {
    let malformed = -(Errno::EIO.into_raw() as i64);
    request.scatter(reply, &mut Program).unwrap_or(malformed)
}

/// How a carried call ended.
#[derive(Clone, Copy)]
struct Ran {
    result: isize,
    /// Bytes of the reply.
    length: usize,
    come_home: bool,
    /// After a transfer that filled its piece: the descriptor is a regular
    /// file's, so another piece may follow.
    regular_file: bool,
}

/// Runs the request at the start of `buffer`, which was decoded, and leaves the
/// reply there.
fn run_request(thread: &Thread, arrived: Result<DecodedCall, Malformed>, buffer: &mut [u8]) -> Ran {
    let refused = |errno: Errno| Ran {
        result: word(Err(errno)),
        length: 0,
        come_home: false,
        regular_file: false,
    };
    let Ok(arrived) = arrived else {
        return refused(Errno::EIO);
    };
    let base = buffer.as_ptr() as u64;
    let Ok(words) = arrived.relocate(&mut buffer[..arrived.space()], base) else {
        return refused(Errno::EIO);
    };
    let number = arrived.nr() as usize;
    let result = calls::plain(thread, number, &words.map(|word| word as usize));
    if result == RESTART {
        return Ran {
            result,
            length: 0,
            come_home: true,
            regular_file: false,
        };
    }
    let space = arrived.space();
    let (data, rest) = buffer.split_at_mut(space);
    match arrived.reply(result as i64, data, rest) {
        Ok(length) => {
            buffer.copy_within(space..space + length, 0);
            Ran {
                result,
                length,
                come_home: thread.pending() != 0,
                regular_file: result >= BULK_MAX as isize
                    && is_regular_file(arrived.args()[0] as usize),
            }
        }
        Err(_) => refused(Errno::EIO),
    }
}

fn is_futex(number: usize) -> bool {
    matches!(
        Sysno::new(number),
        Some(
            Sysno::futex
                | Sysno::futex_waitv
                | Sysno::futex_wait
                | Sysno::futex_wake
                | Sysno::futex_requeue
        )
    )
}

/// A native call whose pointers are unknown: what they point to is fetched
/// first, and again when another thread pushed it away meanwhile.
fn fetched(thread: &Thread, number: usize, arguments: &[usize; 6]) -> Option<isize> {
    let fault = word(Err(Errno::EFAULT));
    let mut result = fault;
    for _ in 0..ATTEMPTS {
        for &address in arguments {
            super::fetch_range(address, FETCH_BYTES, Access::Write);
        }
        fetch_listed(number, arguments);
        result = calls::plain(thread, number, arguments);
        if result != fault {
            break;
        }
    }
    Some(result)
}

/// Fetches what lies behind the pointers in the arrays of a few calls that are
/// worth it: the words of several futexes, and the registers of a traced process.
fn fetch_listed(number: usize, arguments: &[usize; 6]) {
    const FUTEXES_MAX: usize = 128;
    const PTRACE_GETREGSET: usize = 0x4204;
    const PTRACE_SETREGSET: usize = 0x4205;
    let [first, second, _, fourth, ..] = *arguments;
    match Sysno::new(number) {
        Some(Sysno::futex_waitv) => {
            for index in 0..second.min(FUTEXES_MAX) {
                fetch_futex(first, index);
            }
        }
        Some(Sysno::futex_requeue) => (0..2).for_each(|index| fetch_futex(first, index)),
        Some(Sysno::ptrace) if matches!(first, PTRACE_GETREGSET | PTRACE_SETREGSET) => {
            if let Ok([start, length]) = memory::read::<[usize; 2]>(fourth) {
                super::fetch_range(start, length.min(FETCH_BYTES), Access::Write);
            }
        }
        _ => {}
    }
}

/// Fetches the word of an entry of an array of `struct futex_waitv`.
fn fetch_futex(array: usize, index: usize) {
    // Value, address, flags and padding.
    let entry = array.saturating_add(index * size_of::<[usize; 3]>());
    if let Ok([_, address, _]) = memory::read::<[usize; 3]>(entry) {
        super::fetch_range(address, size_of::<u64>(), Access::Write);
    }
}

/// A system call of this class on a node that is not home.
pub fn elsewhere(
    thread: &Thread,
    frame: &mut Frame,
    class: Class,
    number: usize,
    arguments: &[usize; 6],
) -> isize {
    match class {
        Class::Refused(errno) => -(errno as isize),
        Class::Local => match local(number, arguments) {
            Some(result) => result,
            None => make_at_home(thread, frame),
        },
        Class::Memory => match ask_memory(number, arguments) {
            Some((result, come_home)) => {
                if come_home {
                    leave_for_home();
                }
                finish(thread, frame, result, come_home.then_some(0))
            }
            None => make_at_home(thread, frame),
        },
        Class::Plain(plain) => {
            let words = arguments.map(|word| word as u64);
            forward(thread, frame, &plain, number, &words)
        }
        Class::Thread | Class::Home => make_at_home(thread, frame),
    }
}

/// Goes home with the program counter on the call, which is then made there.
fn make_at_home(thread: &Thread, frame: &mut Frame) -> isize {
    frame.registers.rip -= INSTRUCTION_BYTES;
    leave_for_home();
    jump::jump(thread, frame, 0);
    RESUME
}

/// Tells the policy that the execution goes home for another reason than its.
pub fn leave_for_home() {
    if let Some(engine) = ENGINE.lock().as_mut() {
        engine.policy.leave();
    }
}

/// Calls whose answer is the same everywhere. A slice may not make all of them: the older
/// ones are answered from `clock_gettime`.
fn local(number: usize, arguments: &[usize; 6]) -> Option<isize> {
    const REALTIME: usize = 0;
    let [a, b, ..] = *arguments;
    let mut time = [0usize; 2];
    let result = match Sysno::new(number)? {
        Sysno::sched_yield => call!(sched_yield),
        Sysno::clock_gettime => call!(clock_gettime, a, time.as_mut_ptr())
            .and_then(|_| memory::write(b, &time).map(|()| 0).map_err(Errno::from)),
        Sysno::clock_getres => {
            call!(clock_getres, a, time.as_mut_ptr()).and_then(|_| answer(b, &time, 0))
        }
        Sysno::time => call!(clock_gettime, REALTIME, time.as_mut_ptr())
            .and_then(|_| answer(a, &time[0], time[0])),
        // The kernel's time zone is home's.
        Sysno::gettimeofday if b == 0 => call!(clock_gettime, REALTIME, time.as_mut_ptr())
            .and_then(|_| answer(a, &[time[0], time[1] / 1000], 0)),
        _ => return None,
    };
    Some(word(result))
}

/// Writes an answer to where the program wants it, if anywhere, and gives `result`.
fn answer<T: zerocopy::IntoBytes + zerocopy::Immutable>(
    to: usize,
    value: &T,
    result: usize,
) -> own_calls::Result<usize> {
    if to != 0 {
        memory::write(to, value)?;
    }
    Ok(result)
}

/// A carried call.
fn forward(
    thread: &Thread,
    frame: &mut Frame,
    plain: &Plain,
    number: usize,
    words: &[u64; 6],
) -> isize {
    let started_at = clock::now();
    let mut come_home = false;
    let result = carry(thread, plain, number, words, |_, request, reply| {
        let ran = ask(request, reply);
        come_home |= ran.come_home;
        ran
    });
    let touched_home_only = {
        let mut guard = ENGINE.lock();
        guard
            .as_mut()
            .is_some_and(|engine| core::mem::take(&mut engine.home_only_touched))
    };
    let fault = word(Err(Errno::EFAULT));
    match result {
        None => make_at_home(thread, frame),
        Some(result) if result == fault && touched_home_only => make_at_home(thread, frame),
        Some(result) => {
            let target = called(started_at);
            if come_home {
                leave_for_home();
            }
            finish(
                thread,
                frame,
                result,
                if come_home { Some(0) } else { target },
            )
        }
    }
}

/// Counts a call home. The node to which the policy sends the execution: home, or the
/// base to which a trial that failed returns.
fn called(started_at: u64) -> Option<usize> {
    let mut guard = ENGINE.lock();
    let engine = guard.as_mut()?;
    add(&engine.io.stats.forwarded_calls, 1);
    let busy = started_at.wrapping_sub(engine.left_at);
    let now = clock::now();
    engine.policy.waited(now - started_at);
    engine.left_at = now;
    let price = engine.price();
    match engine.policy.called_home(busy, price) {
        Decision::Pull => None,
        // A base may have been given back meanwhile.
        Decision::Jump(node) if engine.io.links[node].is_none() => {
            engine.policy.stay(engine.me);
            None
        }
        Decision::Jump(node) => Some(node),
    }
}

/// Leaves the result in the frame and takes the execution to the node, if there is one.
fn finish(thread: &Thread, frame: &mut Frame, result: isize, target: Option<usize>) -> isize {
    let Some(node) = target else {
        return result;
    };
    if result == RESTART {
        frame.registers.rip -= INSTRUCTION_BYTES;
    } else {
        frame.registers.rax = result as usize;
    }
    jump::jump(thread, frame, node);
    RESUME
}

/// Sends a request home and waits for the reply.
fn ask(request: &[u8], reply: &mut [u8]) -> Ran {
    let mut guard = ENGINE.lock();
    let engine = guard.as_mut().expect("a slice has an engine");
    let mut parts = request.chunks(MAX_PAYLOAD).peekable();
    while let Some(part) = parts.next() {
        let last = parts.peek().is_none();
        engine
            .io
            .send(0, &Message::Call { last }.header(part.len()), &[part]);
    }
    engine.settle();
    engine.await_reply(reply)
}

impl Engine {
    /// Home answers when the call is over, which may take for ever: there is no
    /// bound but the life of home and of the link.
    fn await_reply(&mut self, reply: &mut [u8]) -> Ran {
        let mut length = 0;
        loop {
            match self.receive(self.lease_ns(), None) {
                Incoming::Message(
                    0,
                    Message::Reply {
                        result,
                        last,
                        come_home,
                        regular_file,
                    },
                    payload,
                ) => {
                    let Some(room) = reply.get_mut(length..length + payload.len()) else {
                        self.fail(Failure::Violation(0, "a reply that is too long"));
                    };
                    room.copy_from_slice(payload);
                    length += payload.len();
                    if last {
                        self.count_traffic();
                        return Ran {
                            result: result as isize,
                            length,
                            come_home,
                            regular_file,
                        };
                    }
                }
                Incoming::Message(from, message, _) => self.serve_aside(from, message),
                Incoming::Handled | Incoming::Timeout | Incoming::Interrupted => {}
            }
        }
    }
}

/// Asks home to change the layout; `None` for calls that it has to make with
/// the execution there.
fn ask_memory(number: usize, arguments: &[usize; 6]) -> Option<(isize, bool)> {
    match Sysno::new(number)? {
        Sysno::mmap
        | Sysno::munmap
        | Sysno::mprotect
        | Sysno::mremap
        | Sysno::brk
        | Sysno::madvise => {}
        _ => return None,
    }
    let mut bytes = [0u8; 56];
    let words = core::iter::once(number).chain(*arguments);
    for (part, word) in bytes.chunks_exact_mut(8).zip(words) {
        part.copy_from_slice(&word.to_le_bytes());
    }
    let mut guard = ENGINE.lock();
    let engine = guard.as_mut()?;
    engine
        .io
        .send(0, &Message::MemoryCall.header(bytes.len()), &[&bytes]);
    engine.settle();
    let ran = engine.await_reply(&mut []);
    engine.left_at = clock::now();
    Some((ran.result, ran.come_home))
}

/// Home: a request that is being put together. One execution exists, so one
/// buffer is enough; its own, since the main thread's buffers may be in use by
/// the call during which the execution left.
pub struct Collected {
    /// Empty while the call runs.
    buffer: &'static mut [u8],
    length: usize,
}

impl Collected {
    /// Nothing; room for a request and the reply to it.
    pub fn new() -> own_calls::Result<Collected> {
        Ok(Collected {
            buffer: own_calls::zeroes(2 * SPACE_MAX)?,
            length: 0,
        })
    }
}

/// Adds a part of a request; true when it is whole.
pub fn collect(engine: &mut Engine, from: usize, part: &[u8], last: bool) -> bool {
    let Collected { buffer, length } = &mut engine.collected;
    let end = *length + part.len();
    match buffer.get_mut(*length..end) {
        Some(room) if end <= SPACE_MAX => room.copy_from_slice(part),
        _ => engine.fail(Failure::Violation(from, "a request that is too long")),
    }
    *length = end;
    last
}

/// Home: makes the call that was collected and answers.
pub fn run_call(thread: &Thread, from: usize, mask: u64) {
    let (buffer, sent) = {
        let mut guard = ENGINE.lock();
        let Some(engine) = guard.as_mut() else {
            return;
        };
        let sent = core::mem::take(&mut engine.collected.length);
        (core::mem::take(&mut engine.collected.buffer), sent)
    };
    let arrived = DecodedCall::decode(&buffer[..sent]);
    let ran = serve::with_mask(mask, || run_request(thread, arrived, buffer));
    let come_home = ran.come_home || thread.pending() != 0;
    let mut guard = ENGINE.lock();
    let Some(engine) = guard.as_mut() else {
        return;
    };
    let mut parts = buffer[..ran.length].chunks(MAX_PAYLOAD).peekable();
    loop {
        let part = parts.next().unwrap_or(&[]);
        let last = parts.peek().is_none();
        let reply = Message::Reply {
            result: ran.result as i64,
            last,
            come_home,
            regular_file: ran.regular_file,
        };
        engine.io.send(from, &reply.header(part.len()), &[part]);
        if last {
            break;
        }
    }
    engine.collected.buffer = buffer;
    engine.settle();
}

/// The number and arguments of a memory call.
pub fn memory_words(payload: &[u8]) -> [usize; 7] {
    let mut words = [0; 7];
    for (word, bytes) in words.iter_mut().zip(payload.chunks_exact(8)) {
        *word = usize::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    words
}

/// Home: changes the layout for another node and answers.
pub fn run_memory_call(thread: &Thread, from: usize, words: [usize; 7]) {
    let [number, arguments @ ..] = words;
    let result = Sysno::new(number)
        .and_then(|call| calls::memory_call(call, &arguments))
        .unwrap_or(word(Err(Errno::ENOSYS)));
    let mut guard = ENGINE.lock();
    let Some(engine) = guard.as_mut() else {
        return;
    };
    let reply = Message::Reply {
        result: result as i64,
        last: true,
        come_home: thread.pending() != 0,
        regular_file: false,
    };
    engine.io.send(from, &reply.header(0), &[]);
    engine.settle();
}
