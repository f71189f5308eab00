//! `execve`: another program in this process.
//!
//! A child of the program leaves Weft with its exec. The main process starts the
//! runtime again instead, on the same control socket, and says so to the
//! launcher; from that point there is no way back, so everything that the kernel
//! would refuse is found out before. Files that change the user or the group,
//! and files that cannot be read, are executed natively: the runtime could not
//! give them their rights.

use core::fmt::Write;

use syscalls::Sysno;
use weft_proc::boot::CONTROL_VARIABLE;
use weft_proc::boot::EXIT_INTERNAL;

use super::files::names_program;
use super::{RESTART, run_for, word};
use crate::frame::Frame;
use crate::load::{FileError, Scripts};
use crate::log::Line;
use crate::own_calls::{self, Errno, Result, call};
use crate::signal::{self, actions, held, mask};
use crate::start::ALONE;
use crate::thread::Thread;
use crate::{control, descriptors, engine, memory, program};

const AT_FDCWD: usize = -100isize as usize;
const AT_EMPTY_PATH: usize = 0x1000;
const SIG_SETMASK: usize = 2;
/// Longest path, NUL included.
const PATH_BYTES_MAX: usize = 4096;
/// Longest single argument, bytes, as in Linux.
const STRING_BYTES_MAX: usize = 128 << 10;
/// Bytes that the runtime's own variable may need.
const VARIABLE_BYTES: usize = PATH_BYTES_MAX + 128;

/// What the program asked for, after the differences between the two calls.
struct Request {
    directory: usize,
    path: usize,
    arguments: usize,
    environment: usize,
    flags: usize,
}

/// `execve` and `execveat`. Returns only when it failed.
pub fn call(thread: &Thread, frame: &Frame, call: Sysno, arguments: &[usize; 6]) -> isize {
    let [a, b, c, d, e, _] = *arguments;
    let mut request = match call {
        Sysno::execve => Request {
            directory: AT_FDCWD,
            path: a,
            arguments: b,
            environment: c,
            flags: 0,
        },
        _ => Request {
            directory: a,
            path: b,
            arguments: c,
            environment: d,
            flags: e,
        },
    };
    if names_program(request.path) {
        request.path = program::path().as_ptr() as usize;
    }
    if thread.borrowed.get() || !control::is_main_process() {
        return natively(thread, frame, &request);
    }
    let mut buffer = [0u8; PATH_BYTES_MAX];
    let stays = path_text(&request, &mut buffer).and_then(|path| match path {
        Some(path) => stays_inside(path, &request).map(|inside| inside.then_some(path)),
        None => Ok(None),
    });
    match stays {
        Ok(Some(path)) => again(thread, frame, &request, path),
        Ok(None) => natively(thread, frame, &request),
        Err(error) => word(Err(error)),
    }
}

/// The kernel's own exec. The kernel reads its arguments from the program's memory, and
/// pages of a stretched program may be on other nodes: they are fetched first, and
/// again if another thread pushed them away meanwhile.
fn natively(thread: &Thread, frame: &Frame, request: &Request) -> isize {
    const ATTEMPTS: usize = 16;
    let fault = word(Err(Errno::EFAULT));
    let mut result = fault;
    for _ in 0..ATTEMPTS {
        if engine::takes_calls() {
            fetch(request);
        }
        result = try_natively(thread, frame, request);
        if result != fault || !engine::takes_calls() {
            break;
        }
    }
    result
}

/// Touches everything that the kernel will read. A bad pointer is left for it
/// to find.
fn fetch(request: &Request) {
    fetch_string(request.path);
    for vector in [request.arguments, request.environment] {
        let mut at = vector;
        while let Ok(string) = memory::read::<usize>(at) {
            if string == 0 {
                break;
            }
            fetch_string(string);
            at += size_of::<usize>();
        }
    }
}

fn fetch_string(address: usize) {
    const PAGE: usize = 4096;
    let mut part = [0u8; PAGE];
    let mut at = address;
    while at - address < STRING_BYTES_MAX {
        let part = &mut part[..PAGE - at % PAGE];
        if memory::copy_in(at, part).is_err() || part.contains(&0) {
            return;
        }
        at += part.len();
    }
}

fn try_natively(thread: &Thread, frame: &Frame, request: &Request) -> isize {
    if signal::interrupts(thread) {
        return RESTART;
    }
    actions::prepare_exec(thread.table());
    inherit_mask(thread, frame);
    let arguments = [
        request.directory,
        request.path,
        request.arguments,
        request.environment,
        request.flags,
        0,
    ];
    let result = run_for(thread, Sysno::execveat as usize, &arguments);
    if actions::install().is_err() {
        crate::log::fatal(EXIT_INTERNAL, "the handlers could not be installed again");
    }
    let open = mask::NEVER_BLOCKED;
    let _ = call!(rt_sigprocmask, 1, &raw const open, 0, 8);
    result
}

/// The next image inherits the mask that the program believes in.
fn inherit_mask(thread: &Thread, frame: &Frame) {
    let believed = mask::get(thread, frame);
    let _ = call!(rt_sigprocmask, SIG_SETMASK, &raw const believed, 0, 8);
    held::give_back(thread);
}

/// The path relative to the current directory; `None` when only the kernel can
/// follow it (a descriptor that closes on exec).
fn path_text<'a>(
    request: &Request,
    buffer: &'a mut [u8; PATH_BYTES_MAX],
) -> Result<Option<&'a [u8]>> {
    const F_GETFD: usize = 1;
    let length = memory::read_string(request.path, buffer)?.len();
    let by_descriptor = length == 0 && request.flags & AT_EMPTY_PATH != 0;
    let relative = length > 0 && buffer[0] != b'/' && request.directory != AT_FDCWD;
    if length == 0 && !by_descriptor {
        return Err(Errno::ENOENT);
    }
    if request.flags & !AT_EMPTY_PATH != 0 {
        return Ok(None);
    }
    if !by_descriptor && !relative {
        return Ok(Some(&buffer[..length]));
    }
    if call!(fcntl, request.directory, F_GETFD)? != 0 {
        return Ok(None);
    }
    let mut prefix = Line::new();
    let _ = write!(prefix, "/proc/self/fd/{}", request.directory as i32);
    if relative {
        let _ = prefix.write_str("/");
    }
    let prefix = prefix.as_str().as_bytes();
    if prefix.len() + length >= PATH_BYTES_MAX {
        return Err(Errno::ENAMETOOLONG);
    }
    buffer.copy_within(..length, prefix.len());
    buffer[..prefix.len()].copy_from_slice(prefix);
    Ok(Some(&buffer[..prefix.len() + length]))
}

/// Whether the runtime can run the file itself; an error is what the kernel
/// would say.
fn stays_inside(path: &[u8], request: &Request) -> Result<bool> {
    let scripts = match Scripts::resolve(path) {
        Ok(scripts) => scripts,
        // Perhaps executable without being readable: the kernel knows.
        Err(FileError::Open(Errno::EACCES)) => return Ok(false),
        Err(error) => return Err(error.errno()),
    };
    let linker = scripts.executable().linker();
    let inside = !scripts.changes_identity;
    scripts.close();
    match linker {
        Ok(Some(linker)) => drop(call!(close, linker.descriptor)),
        Ok(None) => {}
        Err(error) => return Err(error.errno()),
    }
    check_size(request)?;
    Ok(inside)
}

/// E2BIG for what the kernel would refuse, the runtime's variables included.
fn check_size(request: &Request) -> Result<()> {
    const RLIMIT_STACK: usize = 3;
    const TOTAL_BYTES_MAX: u64 = 6 << 20;
    let mut limits = [0u64; 2];
    call!(prlimit64, 0, RLIMIT_STACK, 0, limits.as_mut_ptr())?;
    // The stack that the runtime makes is bounded, too; see `load::stack`.
    let limit = (limits[0] / 4).clamp(128 << 10, TOTAL_BYTES_MAX) as usize;
    let mut total = VARIABLE_BYTES;
    for list in [request.arguments, request.environment] {
        for index in 0.. {
            let Some(text) = entry(list, index)? else {
                break;
            };
            let length = string_length(text)?;
            total += length + 1 + 2 * size_of::<usize>();
            if length >= STRING_BYTES_MAX || total > limit {
                return Err(Errno::E2BIG);
            }
        }
    }
    Ok(())
}

/// An entry of a list of strings; `None` at its end.
fn entry(list: usize, index: usize) -> Result<Option<usize>> {
    if list == 0 {
        return Ok(None);
    }
    let text: usize = memory::read(list + index * size_of::<usize>())?;
    Ok(Some(text).filter(|&text| text != 0))
}

fn string_length(text: usize) -> Result<usize> {
    let mut buffer = [0u8; 4096];
    let mut length = 0;
    while length < STRING_BYTES_MAX {
        match memory::read_string(text + length, &mut buffer) {
            Ok(part) => return Ok(length + part.len()),
            Err(Errno::ENAMETOOLONG) => length += buffer.len(),
            Err(error) => return Err(error),
        }
    }
    Ok(STRING_BYTES_MAX)
}

/// Starts the runtime again with the new program.
fn again(thread: &Thread, frame: &Frame, request: &Request, path: &[u8]) -> isize {
    if signal::interrupts(thread) {
        return RESTART;
    }
    let environment = match Environment::build(request.environment, path) {
        Ok(environment) => environment,
        Err(error) => return word(Err(error)),
    };
    engine::before_exec();
    control::tell_exec();
    if let Some(socket) = control::socket() {
        descriptors::set_close_on_exec(socket, false);
    }
    actions::prepare_exec(thread.table());
    inherit_mask(thread, frame);
    let error = call!(
        execve,
        c"/proc/self/exe".as_ptr(),
        request.arguments,
        environment.list
    );
    crate::log::fail(
        weft_proc::boot::EXIT_INTERNAL,
        format_args!("the runtime could not start the next program: {error:?}"),
    )
}

/// The environment with the runtime's variable in front.
struct Environment {
    list: usize,
}

impl Environment {
    fn build(given: usize, path: &[u8]) -> Result<Environment> {
        let mut count = 0;
        while entry(given, count)?.is_some() {
            count += 1;
        }
        let words = count + 2;
        let bytes = words * size_of::<usize>() + VARIABLE_BYTES;
        let area = own_calls::allocate(bytes)? as usize;
        let text = area + words * size_of::<usize>();
        let mut line = Line::new();
        let _ = match control::socket() {
            Some(socket) => write!(line, "{CONTROL_VARIABLE}={socket}"),
            None => write!(line, "{CONTROL_VARIABLE}={ALONE}"),
        };
        let _ = write!(line, ":{}:", control::generation() + 1);
        let mut at = text;
        for part in [line.as_str().as_bytes(), path] {
            // SAFETY: one line and one path fit into `VARIABLE_BYTES` with the NUL,
            // which is there already: the area is fresh.
            unsafe { core::ptr::copy_nonoverlapping(part.as_ptr(), at as *mut u8, part.len()) };
            at += part.len();
        }
        let list = area as *mut usize;
        // SAFETY: the first of the words in front of the text.
        unsafe { list.write(text) };
        for index in 0..count {
            let text = entry(given, index)?.unwrap_or(0);
            // SAFETY: `count` more words were allocated, and a null behind them.
            unsafe { list.add(1 + index).write(text) };
        }
        Ok(Environment { list: area })
    }
}
