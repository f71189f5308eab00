//! From the kernel's entry point to the program, or to a slice's service.
//!
//! Order: environment → address space, first thread, handlers → launcher →
//! program. Until the handlers are installed nothing may fault; until the
//! launcher has answered, errors go to standard error.

use core::arch::global_asm;
use core::ffi::CStr;

use weft_proc::boot::{CONTROL_VARIABLE, EXIT_SETUP, ROLE_SLICE};
use weft_proc::context::Context;

use crate::initial_stack::Initial;
use crate::own_calls::{self, call, random};
use crate::signal::{self, actions, mask};
use crate::thread::{self, Thread};
use crate::{context, control, engine, intercept, load, log, program, space};

/// Stands in the control variable for the socket of a runtime without a launcher.
pub const ALONE: &str = "none";
/// Randomised part of the addresses that are chosen, bytes.
const SLACK_BYTES: u64 = 64 << 30;

global_asm!(
    ".text",
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "mov rdi, rsp",
    "and rsp, -16",
    "call weft_start",
    "ud2",
);

/// What the control variable says: `SOCKET`, as the launcher sets it, or
/// `SOCKET:GENERATION:PROGRAM`, as a runtime does that executes another image. One
/// variable, which the launcher takes out of what its user's environment has: no
/// other can name a program.
struct Summons {
    /// None without a launcher.
    socket: Option<i32>,
    /// Which image of the main process this is.
    generation: u64,
    /// The program, where not the launcher names it.
    program: Option<&'static [u8]>,
}

impl Summons {
    fn parse(text: &'static [u8]) -> Option<Summons> {
        let mut fields = text.splitn(3, |&byte| byte == b':');
        let socket = fields.next()?;
        let generation = match fields.next() {
            None => 0,
            Some(digits) => parse_number(digits)?,
        };
        Some(Summons {
            socket: match socket == ALONE.as_bytes() {
                true => None,
                false => Some(parse_number(socket)? as i32),
            },
            generation,
            program: fields.next(),
        })
    }
}

fn parse_number(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 9 {
        return None;
    }
    text.iter().try_fold(0u64, |value, &digit| {
        let digit = digit.checked_sub(b'0').filter(|&digit| digit < 10)?;
        Some(value * 10 + u64::from(digit))
    })
}

/// Called by the entry stub.
#[unsafe(no_mangle)]
unsafe extern "C" fn weft_start(stack: *mut usize) -> ! {
    // SAFETY: the stub passes the initial stack pointer.
    let mut initial = unsafe { Initial::parse(stack) };
    const AT_HWCAP2: usize = 26;
    context::learn(initial.auxiliary_value(AT_HWCAP2).unwrap_or(0));
    let control = initial.take(CONTROL_VARIABLE.as_bytes());
    let Some(summons) = control.and_then(Summons::parse) else {
        usage();
    };
    control::set_generation(summons.generation);
    let thread = set_up();
    let Some(socket) = summons.socket else {
        let Some(path) = summons.program else {
            usage();
        };
        run(thread, path, &initial);
    };
    let boot = match control::attach(socket) {
        Ok(boot) => boot,
        Err(error) => log::fail(EXIT_SETUP, format_args!("{error}")),
    };
    if boot.role == ROLE_SLICE {
        engine::run_slice(boot);
    }
    engine::start_home(boot);
    let path = summons.program.unwrap_or_else(|| {
        CStr::from_bytes_until_nul(&boot.program)
            .unwrap_or(c"")
            .to_bytes()
    });
    run(thread, path, &initial)
}

fn usage() -> ! {
    log::line(format_args!(
        "this is the runtime inside elastic processes; start programs with `weft run PROGRAM`"
    ));
    own_calls::exit_group(EXIT_SETUP)
}

/// Everything a handler needs: address space, first thread, actions.
fn set_up() -> &'static Thread {
    match try_set_up() {
        Ok(thread) => thread,
        Err(error) => log::fail(
            EXIT_SETUP,
            format_args!("the runtime cannot prepare itself: {error}"),
        ),
    }
}

fn try_set_up() -> own_calls::Result<&'static Thread> {
    space::set_up(random() % SLACK_BYTES)?;
    let thread = thread::allocate()?;
    thread.set_id(own_calls::thread_id());
    thread.set_process(own_calls::process_id());
    control::set_main_process();
    thread.actions.set(Some(&actions::SHARED));
    thread.use_stack()?;
    call!(set_tid_address, thread.alive_word())?;
    actions::SHARED.learn_ignored();
    actions::install()?;
    let open = mask::NEVER_BLOCKED;
    let mut before = 0u64;
    const SIG_UNBLOCK: usize = 1;
    call!(
        rt_sigprocmask,
        SIG_UNBLOCK,
        &raw const open,
        &raw mut before,
        8
    )?;
    thread.start.lock().mask = before & !mask::NEVER_BLOCKED;
    Ok(thread)
}

/// Loads the program and enters it.
fn run(thread: &Thread, path: &[u8], initial: &Initial) -> ! {
    let entry = match load::load(path, initial) {
        Ok(entry) => entry,
        Err(error) => load::refuse(path, &error),
    };
    program::name_process(path);
    {
        let mut start = thread.start.lock();
        let inherited = start.mask;
        *start = Context::initial(entry.address, entry.stack);
        start.mask = inherited;
    }
    if let Err(error) = intercept::arm() {
        log::fail(
            EXIT_SETUP,
            format_args!(
                "the kernel cannot intercept system calls (Syscall User Dispatch, Linux 5.11 or newer): {error}"
            ),
        );
    }
    engine::threads(thread::started());
    signal::enter(thread);
}
