//! The conversation with the launcher (see `weft_proc::boot`), and what a
//! runtime knows about itself.
//!
//! States: *alone* (standalone, or a forked child: no launcher) and *attached*
//! (a control socket exists). Attached becomes alone by [`leave`], never back.

use core::cell::UnsafeCell;
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use weft_proc::boot::{
    Boot, CONTROL_EXEC, CONTROL_FATAL, CONTROL_HELLO, ControlMessage, MAGIC, MAX_NODES, ROLE_SLICE,
    VERSION,
};
use weft_proc::stats::Shared;

use crate::descriptors;
use crate::own_calls::{self, Errno, Result, call};

/// Most descriptors in the packet of [`Boot`].
pub const DESCRIPTORS_MAX: usize = 2 * MAX_NODES + 2;
/// How long the launcher may take to answer HELLO, milliseconds.
const BOOT_WAIT_MS: usize = 30_000;

static SOCKET: AtomicI32 = AtomicI32::new(-1);
static SHARED: AtomicPtr<Shared> = AtomicPtr::new(core::ptr::null_mut());
/// The launcher's process; [`ANYONE`] at a slice; 0: there is no launcher.
static LAUNCHER: AtomicU32 = AtomicU32::new(0);
/// A slice's commands come from a launcher or a daemon, and it runs no handler
/// of the program's.
const ANYONE: u32 = u32::MAX;
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// Whether this process was started to run the program (and not forked by it).
static MAIN: AtomicBool = AtomicBool::new(true);
static MAIN_PROCESS: AtomicU32 = AtomicU32::new(0);

/// What the launcher sent. Written once, before there is a second thread.
struct Received {
    boot: UnsafeCell<Boot>,
    descriptors: UnsafeCell<[i32; DESCRIPTORS_MAX]>,
}

// SAFETY: written by `receive` only, while the process has one thread.
unsafe impl Sync for Received {}

static RECEIVED: Received = Received {
    // SAFETY: `Boot` is plain integers and byte arrays.
    boot: UnsafeCell::new(unsafe { core::mem::zeroed() }),
    descriptors: UnsafeCell::new([-1; DESCRIPTORS_MAX]),
};

/// The counters and commands shared with the launcher, when there is one.
pub fn shared() -> Option<&'static Shared> {
    // SAFETY: set once to a mapping that stays until the process ends.
    unsafe { SHARED.load(Ordering::Acquire).as_ref() }
}

/// The control socket, when there is a launcher.
pub fn socket() -> Option<i32> {
    Some(SOCKET.load(Ordering::Acquire)).filter(|&socket| socket >= 0)
}

/// Which image of the main process this is: 0, then 1 after the first exec.
pub fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// False in children that the program forked.
pub fn is_main_process() -> bool {
    MAIN.load(Ordering::Relaxed)
}

/// The process that was started to run the program: this one, or an ancestor.
pub fn main_process() -> u32 {
    MAIN_PROCESS.load(Ordering::Relaxed)
}

/// Notes that this process is that one.
pub fn set_main_process() {
    MAIN_PROCESS.store(own_calls::process_id(), Ordering::Relaxed);
}

/// A descriptor of the packet by its index in [`Boot`], already out of the
/// program's way.
pub fn descriptor(index: i32) -> Option<i32> {
    // SAFETY: not written after `receive`.
    let all = unsafe { &*RECEIVED.descriptors.get() };
    all.get(usize::try_from(index).ok()?)
        .copied()
        .filter(|&descriptor| descriptor >= 0)
}

/// Says which image of the main process this is.
pub fn set_generation(generation: u64) {
    GENERATION.store(generation, Ordering::Relaxed);
}

/// Why a runtime has no launcher to serve.
pub enum AttachError {
    Socket { socket: i32, error: Errno },
    NoProgram(Errno),
    SharedPage(Errno),
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket { socket, error } => {
                write!(f, "the control socket {socket} is not usable: {error}")
            }
            Self::NoProgram(error) => write!(f, "the launcher sent no program to run: {error}"),
            Self::SharedPage(error) => write!(
                f,
                "the page shared with the launcher cannot be mapped: {error}"
            ),
        }
    }
}

/// Greets the launcher on `socket` and waits for its answer.
pub fn attach(socket: i32) -> core::result::Result<&'static Boot, AttachError> {
    let socket =
        descriptors::keep(socket).map_err(|error| AttachError::Socket { socket, error })?;
    SOCKET.store(socket, Ordering::Release);
    // Until the launcher has said what this is, no program runs here.
    LAUNCHER.store(ANYONE, Ordering::Relaxed);
    let mut hello = ControlMessage::new(CONTROL_HELLO, 0);
    hello.words = [
        generation(),
        u64::from(VERSION),
        u64::from(own_calls::process_id()),
        0,
    ];
    let boot = send(&hello).and_then(|()| receive(socket));
    match boot {
        Ok(boot) => {
            map_shared(boot).map_err(AttachError::SharedPage)?;
            if boot.role != ROLE_SLICE {
                let parent = call!(getppid).unwrap_or(0);
                LAUNCHER.store(parent as u32, Ordering::Relaxed);
            }
            Ok(boot)
        }
        Err(error) => {
            SOCKET.store(-1, Ordering::Release);
            Err(AttachError::NoProgram(error))
        }
    }
}

/// Whether the process with this number may send the runtime's signal.
pub fn is_launcher(process: u32) -> bool {
    let launcher = LAUNCHER.load(Ordering::Relaxed);
    launcher == ANYONE || launcher != 0 && launcher == process
}

/// Sends one message to the launcher.
pub fn send(message: &ControlMessage) -> Result<()> {
    const MSG_NOSIGNAL: usize = 0x4000;
    let socket = socket().ok_or(Errno::ENOTCONN)?;
    let bytes = message.as_bytes();
    loop {
        let sent = call!(
            sendto,
            socket,
            bytes.as_ptr(),
            bytes.len(),
            MSG_NOSIGNAL,
            0,
            0
        );
        match sent {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// `struct msghdr`.
#[repr(C)]
struct MessageHeader {
    name: usize,
    name_length: u32,
    padding: u32,
    vectors: usize,
    vector_count: usize,
    control: usize,
    control_length: usize,
    flags: u32,
    padding2: u32,
}

/// Space for the descriptors: a `struct cmsghdr` and the numbers.
#[repr(C, align(8))]
struct Rights {
    length: usize,
    level: i32,
    kind: i32,
    numbers: [i32; DESCRIPTORS_MAX],
}

fn receive(socket: i32) -> Result<&'static Boot> {
    const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;
    const POLLIN: u64 = 1;
    let poll = [socket as u32 as u64 | POLLIN << 32];
    while let Err(error) = call!(poll, poll.as_ptr(), 1, BOOT_WAIT_MS).and_then(|ready| {
        if ready == 0 {
            Err(Errno::ETIMEDOUT)
        } else {
            Ok(ready)
        }
    }) {
        if error != Errno::EINTR {
            return Err(error);
        }
    }
    let vector = [RECEIVED.boot.get() as usize, size_of::<Boot>()];
    let mut rights = Rights {
        length: 0,
        level: 0,
        kind: 0,
        numbers: [-1; DESCRIPTORS_MAX],
    };
    let mut header = MessageHeader {
        name: 0,
        name_length: 0,
        padding: 0,
        vectors: vector.as_ptr() as usize,
        vector_count: 1,
        control: &raw mut rights as usize,
        control_length: size_of::<Rights>(),
        flags: 0,
        padding2: 0,
    };
    let length = call!(recvmsg, socket, &raw mut header, MSG_CMSG_CLOEXEC)?;
    // SAFETY: the only write, before any other thread or reader exists.
    let boot = unsafe { &*RECEIVED.boot.get() };
    if length != size_of::<Boot>() || boot.magic != MAGIC || boot.version != VERSION {
        return Err(Errno::EPROTO);
    }
    take_rights(&rights, header.control_length)?;
    Ok(boot)
}

/// Moves the received descriptors out of the program's way.
fn take_rights(rights: &Rights, received: usize) -> Result<()> {
    const HEADER_BYTES: usize = 16;
    if received < HEADER_BYTES {
        return Ok(());
    }
    let count = rights.length.saturating_sub(HEADER_BYTES) / size_of::<i32>();
    // SAFETY: as in `receive`: no other thread exists yet.
    let table = unsafe { &mut *RECEIVED.descriptors.get() };
    for (slot, &number) in table.iter_mut().zip(&rights.numbers[..count]) {
        *slot = descriptors::keep(number)?;
    }
    Ok(())
}

fn map_shared(boot: &Boot) -> Result<()> {
    const MAP_SHARED: usize = 1;
    let Some(memory) = descriptor(boot.shared_fd) else {
        return Ok(());
    };
    let length = size_of::<Shared>().next_multiple_of(4096);
    let address = call!(mmap, 0, length, 3, MAP_SHARED, memory, 0)?;
    SHARED.store(address as *mut Shared, Ordering::Release);
    descriptors::drop_kept(memory);
    Ok(())
}

/// Tells the launcher why the runtime ends, for a reason of `node`'s; false when
/// there is no launcher.
pub fn tell_fatal(node: u32, code: i32, text: &str) -> bool {
    let mut message = ControlMessage::new(CONTROL_FATAL, node);
    message.words[0] = code as u64;
    message.set_text(text);
    send(&message).is_ok()
}

/// Tells the launcher that another image follows.
pub fn tell_exec() {
    // Without a launcher there is nobody to tell.
    let _ = send(&ControlMessage::new(CONTROL_EXEC, 0));
}

/// In a forked child: the launcher is the parent's. Everything shared with it
/// is given up.
pub fn leave() {
    MAIN.store(false, Ordering::Relaxed);
    SOCKET.store(-1, Ordering::Release);
    LAUNCHER.store(0, Ordering::Relaxed);
    descriptors::drop_all();
    let shared = SHARED.swap(core::ptr::null_mut(), Ordering::AcqRel);
    if !shared.is_null() {
        // SAFETY: the child has one thread, and `shared()` answers `None` now.
        unsafe { own_calls::release(shared.cast(), size_of::<Shared>().next_multiple_of(4096)) };
    }
}
