//! What the launcher (or a node's daemon) hands to a runtime when it starts.
//!
//! The runtime is executed with the program's own argument vector and
//! environment, plus one variable, `WEFT_CONTROL=<fd>`, which names a UNIX
//! `SOCK_SEQPACKET` socket. No other variable means anything to the runtime. The
//! conversation on it:
//!
//! 1. runtime → launcher: [`ControlMessage`] `HELLO` (`words[0]` = generation: 0
//!    for the first image, 1 after the first `execve` of the main process, …;
//!    `words[1]` = [`VERSION`]; `words[2]` = its pid).
//! 2. launcher → runtime: one packet that is a [`Boot`], with the descriptors
//!    in `SCM_RIGHTS` (at most [`MAX_NODES`] + 2, see [`Boot`]).
//! 3. runtime → launcher, home only: `STRETCHED`, `LOST`, `NO_ROOM`, `FATAL`,
//!    `EXEC`, `KICK`; each documented at its constant.
//! 4. launcher → runtime: commands are written into [`crate::stats::Shared`] and
//!    announced with the signal [`KICK_SIGNAL`].
//!
//! A runtime whose control socket closes before `Boot` arrives exits with 125.

pub use weft_jump::{JUMP_AUTO, JUMP_FIXED, JUMP_NEVER, MAX_NODES};

/// Layout version of [`Boot`], [`ControlMessage`] and [`crate::stats::Shared`].
pub const VERSION: u32 = 1;
/// First eight bytes of a [`Boot`].
pub const MAGIC: u64 = u64::from_le_bytes(*b"weftboot");
/// The signal that tells a runtime to look at its command word, or a remote
/// slice to ask home for what waits for it. Hidden from the program.
pub const KICK_SIGNAL: i32 = 64;
/// Name of the environment variable that carries the control descriptor.
pub const CONTROL_VARIABLE: &str = "WEFT_CONTROL";

/// The aggregate failed before the program started.
pub const EXIT_SETUP: i32 = 125;
/// The program cannot be executed.
pub const EXIT_NOT_EXECUTABLE: i32 = 126;
/// The program was not found.
pub const EXIT_NOT_FOUND: i32 = 127;
/// A node was lost, and with it pages or the execution.
pub const EXIT_NODE_LOST: i32 = 122;
/// Every node's budget is full.
pub const EXIT_NO_ROOM: i32 = 123;
/// The runtime found its own state or a peer's message impossible.
pub const EXIT_INTERNAL: i32 = 124;

/// Which part of the aggregate a runtime plays.
pub const ROLE_HOME: u32 = 0;
/// A slice on another node: memory, and execution after a jump.
pub const ROLE_SLICE: u32 = 1;

/// Everything a runtime needs to know. Plain data; lives in one packet.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Boot {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION`].
    pub version: u32,
    /// [`ROLE_HOME`] or [`ROLE_SLICE`].
    pub role: u32,
    /// This node's number; home is 0.
    pub node: u32,
    /// Nodes in the aggregate, home included.
    pub nodes: u32,
    pub jump: u32,
    /// Remote faults before a jump, with [`JUMP_FIXED`].
    pub jump_threshold: u32,
    /// Silence after which a peer counts as lost, milliseconds.
    pub lease_ms: u32,
    /// Longest busy wait for a reply before the thread blocks, nanoseconds.
    pub spin_ns: u32,
    /// Most pages read ahead of a sequential fault; 0 turns reading ahead off.
    pub read_ahead_pages: u32,
    /// 1: stretch at start instead of when the budget is passed.
    pub stretch_now: u32,
    /// User to become before the program's code can run here; `u32::MAX` keeps
    /// the current one. Slices only.
    pub uid: u32,
    /// Group to become; as `uid`.
    pub gid: u32,
    /// Each node's budget for the program's pages, in pages of 4 KiB.
    pub budget_pages: [u64; MAX_NODES],
    /// How to reach each peer; `links[node]` is unused.
    pub links: [LinkSpec; MAX_NODES],
    /// Descriptor index (in the packet) of the memfd of [`crate::stats::Shared`].
    pub shared_fd: i32,
    /// Absolute path of the program, NUL-terminated. Home only.
    pub program: [u8; 4096],
}

/// One link of the mesh, as made and keyed by the launcher.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LinkSpec {
    /// `LINK_*`.
    pub kind: u32,
    /// Index in the packet's descriptors: a connected stream socket (TCP or
    /// UNIX). With [`LINK_RING`] a UNIX stream socket used as door bell.
    pub fd: i32,
    /// [`LINK_RING`]: index of the memfd that holds both rings, else -1.
    pub ring_fd: i32,
    /// [`LINK_RING`]: 0 when this side writes the first ring, 1 the second.
    pub ring_side: u32,
    /// [`LINK_SEALED`]: key for what this side sends.
    pub send_key: [u8; 32],
    /// [`LINK_SEALED`]: key for what this side receives.
    pub receive_key: [u8; 32],
}

/// No link.
pub const LINK_NONE: u32 = 0;
/// A stream socket in the clear (same host only).
pub const LINK_STREAM: u32 = 1;
/// A stream socket whose records are sealed with AES-256-GCM.
pub const LINK_SEALED: u32 = 2;
/// Two rings in shared memory (same host only).
pub const LINK_RING: u32 = 3;

impl LinkSpec {
    /// A link that does not exist.
    pub const NONE: LinkSpec = LinkSpec {
        kind: LINK_NONE,
        fd: -1,
        ring_fd: -1,
        ring_side: 0,
        send_key: [0; 32],
        receive_key: [0; 32],
    };
}

/// A packet from a runtime to its launcher.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ControlMessage {
    /// `CONTROL_*`.
    pub kind: u32,
    /// A node, where the kind has one.
    pub node: u32,
    /// As the kind says.
    pub words: [u64; 4],
    /// A UTF-8 sentence for the user, NUL-padded, where the kind has one.
    pub text: [u8; 208],
}

/// First message of every runtime.
pub const CONTROL_HELLO: u32 = 1;
/// Home: the aggregate now spans its nodes. No words.
pub const CONTROL_STRETCHED: u32 = 2;
/// Home: `node` is gone; `words[0]` pages had their only copy there, `words[1]`
/// is 1 if the program was executing there; `text` is what home knows of the
/// reason, if anything. The runtime exits with 122.
pub const CONTROL_LOST: u32 = 3;
/// Home: every budget is full. The runtime exits with 123.
pub const CONTROL_NO_ROOM: u32 = 4;
/// Any: an error described in `text`; `words[0]` is the exit code it uses. From
/// home, `node` says whose error it is.
pub const CONTROL_FATAL: u32 = 5;
/// Home: send [`KICK_SIGNAL`] to the slice on `node`.
pub const CONTROL_KICK: u32 = 6;
/// Slice: ready, confined, waiting for work.
pub const CONTROL_READY: u32 = 7;
/// Home: the main process is about to `execve`; every slice will be replaced
/// and a HELLO with the next generation follows on this same socket.
pub const CONTROL_EXEC: u32 = 8;
/// Home: an answer to a command: `words[0]` = the command's sequence number,
/// `words[1]` = 0 or an errno, `text` = why.
pub const CONTROL_DONE: u32 = 9;

impl Boot {
    /// The bytes that travel.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: `Boot` is plain `repr(C)` data without padding that matters;
        // the slice lives as long as `self`.
        unsafe { core::slice::from_raw_parts((self as *const Boot).cast(), size_of::<Boot>()) }
    }
}

impl ControlMessage {
    /// A message without words or text.
    pub fn new(kind: u32, node: u32) -> ControlMessage {
        ControlMessage {
            kind,
            node,
            words: [0; 4],
            text: [0; 208],
        }
    }
    /// The bytes that travel.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: plain `repr(C)` data without padding; lives as long as `self`.
        unsafe {
            core::slice::from_raw_parts(
                (self as *const ControlMessage).cast(),
                size_of::<ControlMessage>(),
            )
        }
    }
    /// Puts a sentence in, cut where there is no room for more.
    pub fn set_text(&mut self, text: &str) {
        let room = text.len().min(self.text.len());
        let length = (0..=room)
            .rev()
            .find(|at| text.is_char_boundary(*at))
            .unwrap_or(0);
        self.text[..length].copy_from_slice(&text.as_bytes()[..length]);
    }
    /// Reads a message from a packet; `None` when its length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<ControlMessage> {
        if bytes.len() != size_of::<ControlMessage>() {
            return None;
        }
        // SAFETY: the length was checked and every bit pattern is valid.
        Some(unsafe { bytes.as_ptr().cast::<ControlMessage>().read_unaligned() })
    }
}
