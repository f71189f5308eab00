//! One link: frames to and from one peer, in order, over a stream socket, a
//! sealed stream socket, or two rings in shared memory.
//!
//! States: *open* → *ended*. A link ends once, with the first
//! [`LinkError`] that says so, and gives the same error from then on; frames
//! that arrived whole before that are still received first.
//!
//! Invariants:
//!
//! - A frame is sent whole or the link ends: a frame cut short is never
//!   followed by another.
//! - Two peers that send to each other at once do not deadlock: a side whose
//!   send would block reads what arrives into its receive buffer (up to 8 MiB)
//!   and so lets the other go on.
//! - Every wait is bounded: a receive by its timeout, a send by the lease.
//! - Nothing here allocates, except that [`Link::open`] maps the receive buffer.

mod buffer;
mod send;
mod spin;
mod wait;

pub use send::FRAMES_MAX;
pub use wait::{Wake, wait_any};

use crate::error::{Class, class};
use crate::frame::Header;
use crate::ring::Rings;
use crate::seal::{KEY_BYTES, LENGTH_BYTES, Opener, RECORD_MAX, Sealer};
use crate::{LinkError, sys};
use buffer::Buffer;
use spin::Spinner;

/// What a link runs over. Descriptors stay the caller's: the link neither
/// duplicates nor closes them.
#[derive(Clone, Copy)]
pub enum LinkKind {
    /// A connected stream socket, in the clear. Same host only.
    Stream {
        /// The socket.
        fd: i32,
    },
    /// A connected stream socket with sealed records.
    Sealed {
        /// The socket.
        fd: i32,
        /// Key for what this side sends.
        send_key: [u8; KEY_BYTES],
        /// Key for what this side receives.
        receive_key: [u8; KEY_BYTES],
    },
    /// Two rings in shared memory. Same host only.
    Ring {
        /// A connected UNIX stream socket that serves as door bell.
        bell_fd: i32,
        /// The memory file of both rings; not needed any more after `open`.
        memory_fd: i32,
        /// 0 when this side produces into the first ring, 1 for the second.
        side: u32,
    },
}

/// How to open a link.
#[derive(Clone, Copy)]
pub struct LinkConfig {
    /// What it runs over.
    pub kind: LinkKind,
    /// Longest busy wait before blocking, nanoseconds; 0 never spins.
    pub spin_ns: u64,
    /// Longest wait of a send for a peer that takes nothing, milliseconds.
    pub lease_ms: u32,
}

/// A frame that arrived. Borrows the link's receive buffer.
#[derive(Debug)]
pub struct Frame<'a> {
    /// The fixed part.
    pub header: Header,
    /// What followed it; `header.length` bytes. Page-aligned for the first
    /// frame of a quiet link.
    pub payload: &'a [u8],
}

/// How a masked receive ended.
#[derive(Debug)]
pub enum Received<'a> {
    /// With a frame.
    Frame(Frame<'a>),
    /// The time passed.
    Timeout,
    /// A signal was delivered while waiting.
    Interrupted,
}

/// Bytes over one link since it was opened, framing and sealing included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes handed to the kernel or the ring.
    pub sent_bytes: u64,
    /// Bytes taken from the kernel or the ring.
    pub received_bytes: u64,
}

#[expect(
    clippy::large_enum_variant,
    reason = "there is no allocator to box with"
)]
enum Transport {
    Stream {
        fd: i32,
    },
    Sealed {
        fd: i32,
        opener: Opener,
        /// None: this link only receives; another value sends.
        sealing: Option<Sealing>,
    },
    Ring {
        bell: i32,
        rings: Rings,
    },
}

/// What sealing a link's own frames takes.
struct Sealing {
    sealer: Sealer,
    record: RecordBuffer,
}

/// The place where one record is put together before it is sealed.
struct RecordBuffer {
    base: *mut u8,
}

impl RecordBuffer {
    fn new() -> Result<RecordBuffer, LinkError> {
        let base = sys::map_private(RECORD_MAX).map_err(|errno| LinkError::System {
            call: "mmap",
            errno,
        })?;
        Ok(RecordBuffer { base })
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: a private mapping of this size, zeroed by the kernel,
        // borrowed only through `self`.
        unsafe { core::slice::from_raw_parts_mut(self.base, RECORD_MAX) }
    }
}

impl Drop for RecordBuffer {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; no borrow outlives `self`.
        unsafe { sys::unmap(self.base, RECORD_MAX) };
    }
}

/// A link to one peer.
pub struct Link {
    transport: Transport,
    buffer: Buffer,
    receive_spinner: Spinner,
    send_spinner: Spinner,
    lease_ms: u32,
    ended: Option<LinkError>,
    end_of_stream: bool,
    /// The socket's receive timeout as last set here; 0: not set.
    socket_timeout_ns: u64,
    /// The receive timeout is not this link's to change.
    socket_timeout_stays: bool,
    /// The socket does not block (somebody set `O_NONBLOCK`): poll instead.
    socket_never_blocks: bool,
    traffic: Traffic,
}

// SAFETY: the mappings that the raw pointers name belong to this value alone
// (the ring's other side is another process or another value by contract).
unsafe impl Send for Link {}

impl Link {
    /// Opens a link.
    ///
    /// # Safety
    /// The descriptors are what [`LinkKind`] says, stay open as long as the
    /// link, and are used by nothing else. A ring's side is played once.
    ///
    /// # Errors
    /// No memory for the buffers, or an unusable ring file.
    pub unsafe fn open(config: &LinkConfig) -> Result<Link, LinkError> {
        let (transport, prefix) = match config.kind {
            LinkKind::Stream { fd } => (Transport::Stream { fd }, 0),
            LinkKind::Sealed {
                fd,
                send_key,
                receive_key,
            } => {
                let sealing = Sealing {
                    sealer: Sealer::new(&send_key),
                    record: RecordBuffer::new()?,
                };
                let sealed = Transport::Sealed {
                    fd,
                    opener: Opener::new(&receive_key),
                    sealing: Some(sealing),
                };
                (sealed, LENGTH_BYTES)
            }
            LinkKind::Ring {
                bell_fd,
                memory_fd,
                side,
            } => {
                // SAFETY: the caller's promise about rings.
                let rings = unsafe { Rings::open(memory_fd, side) }?;
                let bell = bell_fd;
                (Transport::Ring { bell, rings }, 0)
            }
        };
        Link::with(transport, prefix, config.spin_ns, config.lease_ms)
    }

    /// A link that only receives from a socket, sealed when there is a key. Its
    /// waits set no socket option: they block in the receive for
    /// `socket_timeout_ns` at a time, which the caller has set on the socket.
    ///
    /// # Safety
    /// As for [`Link::open`]; others may send on the descriptor.
    ///
    /// # Errors
    /// No memory for the buffer.
    #[cfg(feature = "std")]
    pub(crate) unsafe fn receiving(
        fd: i32,
        receive_key: Option<&[u8; KEY_BYTES]>,
        spin_ns: u64,
        socket_timeout_ns: u64,
    ) -> Result<Link, LinkError> {
        let (transport, prefix) = match receive_key {
            None => (Transport::Stream { fd }, 0),
            Some(key) => {
                let opener = Opener::new(key);
                let sealing = None;
                let sealed = Transport::Sealed {
                    fd,
                    opener,
                    sealing,
                };
                (sealed, LENGTH_BYTES)
            }
        };
        let mut link = Link::with(transport, prefix, spin_ns, 0)?;
        link.socket_timeout_ns = socket_timeout_ns;
        link.socket_timeout_stays = true;
        Ok(link)
    }

    fn with(
        transport: Transport,
        prefix: usize,
        spin_ns: u64,
        lease_ms: u32,
    ) -> Result<Link, LinkError> {
        let socket_never_blocks = match transport {
            Transport::Stream { fd } | Transport::Sealed { fd, .. } => sys::never_blocks(fd),
            Transport::Ring { .. } => false,
        };
        let spinner = Spinner::new(spin_ns);
        Ok(Link {
            transport,
            buffer: Buffer::new(prefix)?,
            receive_spinner: spinner,
            send_spinner: spinner,
            lease_ms,
            ended: None,
            end_of_stream: false,
            socket_timeout_ns: 0,
            socket_timeout_stays: false,
            socket_never_blocks,
            traffic: Traffic::default(),
        })
    }

    /// Bytes sent and received so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// The descriptor that becomes readable when the peer sends, rings or ends.
    pub fn fd(&self) -> i32 {
        match self.transport {
            Transport::Stream { fd } | Transport::Sealed { fd, .. } => fd,
            Transport::Ring { bell, .. } => bell,
        }
    }

    /// The next frame, if it is here. Never waits.
    ///
    /// # Errors
    /// Why the link ended.
    pub fn try_receive(&mut self) -> Result<Option<Frame<'_>>, LinkError> {
        match self.poll()? {
            None => Ok(None),
            Some(header) => Ok(Some(self.take(header))),
        }
    }

    /// The next frame; waits for it at most `timeout_ns` (twice that if signals
    /// come meanwhile, which do not end the wait).
    ///
    /// # Errors
    /// Why the link ended.
    pub fn receive(&mut self, timeout_ns: u64) -> Result<Option<Frame<'_>>, LinkError> {
        // The clock is read only after a signal: a wait that is never
        // interrupted is bounded by the kernel, and one that is lasts at most
        // twice as long.
        let mut left_ns = timeout_ns;
        let mut end_ns = None;
        loop {
            match self.await_frame(left_ns, None)? {
                Awaited::Frame(header) => return Ok(Some(self.take(header))),
                Awaited::Timeout => return Ok(None),
                Awaited::Interrupted => {
                    let now_ns = sys::now_ns();
                    let end_ns = *end_ns.get_or_insert(now_ns.saturating_add(timeout_ns));
                    left_ns = end_ns.saturating_sub(now_ns);
                }
            }
        }
    }

    /// As [`Link::receive`], but returns when a signal was delivered, and sets
    /// `mask` (bit n-1 blocks signal n) as the signal mask for the time it
    /// blocks. A caller that blocks a signal, looks at what its handler sets,
    /// and then waits with a mask that lets it through, cannot miss it. A frame
    /// that is already here is returned first.
    ///
    /// # Errors
    /// Why the link ended.
    pub fn receive_masked(
        &mut self,
        timeout_ns: u64,
        mask: Option<u64>,
    ) -> Result<Received<'_>, LinkError> {
        Ok(match self.await_frame(timeout_ns, mask)? {
            Awaited::Frame(header) => Received::Frame(self.take(header)),
            Awaited::Timeout => Received::Timeout,
            Awaited::Interrupted => Received::Interrupted,
        })
    }

    fn take(&mut self, header: Header) -> Frame<'_> {
        let payload = self.buffer.take(&header);
        Frame { header, payload }
    }

    /// The header of the next frame if the frame is here whole.
    fn poll(&mut self) -> Result<Option<Header>, LinkError> {
        if let Some(header) = self.at_hand()? {
            return Ok(Some(header));
        }
        // Each round but the last either brings bytes that make a frame whole,
        // or fills the room it was given; the buffer bounds both.
        loop {
            let filled = self.fill(sys::MSG_DONTWAIT)?;
            if let Some(header) = self.buffered()? {
                return Ok(Some(header));
            }
            match filled {
                Filled::All => {}
                _ if self.end_of_stream => return Err(self.end(LinkError::Closed)),
                _ => return Ok(None),
            }
        }
    }

    /// As [`Link::poll`], without looking at the transport.
    fn at_hand(&mut self) -> Result<Option<Header>, LinkError> {
        match (self.buffered()?, self.ended) {
            (Some(header), _) => Ok(Some(header)),
            (None, Some(error)) => Err(error),
            (None, None) => Ok(None),
        }
    }

    fn buffered(&mut self) -> Result<Option<Header>, LinkError> {
        match self.buffer.complete() {
            Ok(found) => Ok(found),
            Err(error) => Err(self.end(error)),
        }
    }

    /// Ends the link, unless it has ended already.
    fn end(&mut self, error: LinkError) -> LinkError {
        *self.ended.get_or_insert(error)
    }

    /// Takes what the transport has into the buffer, once. With `flags` 0 a
    /// socket blocks for it (within its receive timeout).
    fn fill(&mut self, flags: u32) -> Result<Filled, LinkError> {
        let (to, room) = self.buffer.room();
        if room == 0 {
            return Ok(Filled::Nothing);
        }
        let fd = match &mut self.transport {
            Transport::Stream { fd } | Transport::Sealed { fd, .. } => *fd,
            Transport::Ring { bell, rings } => {
                // SAFETY: the buffer's room is writable and free.
                let (count, wake) = match unsafe { rings.consume(to, room) } {
                    Ok(taken) => taken,
                    Err(error) => return Err(self.end(error)),
                };
                if wake {
                    let bell = *bell;
                    self.ring_bell(bell)?;
                }
                return self.arrived(count, room);
            }
        };
        // SAFETY: the buffer's room is writable and free.
        match unsafe { sys::receive(fd, to, room, flags) } {
            Ok(0) => {
                self.end_of_stream = true;
                Ok(Filled::Nothing)
            }
            Ok(count) => self.arrived(count, room),
            Err(errno) => match class(errno) {
                Class::WouldBlock => Ok(Filled::Nothing),
                Class::Interrupted => Ok(Filled::Interrupted),
                Class::Gone => {
                    self.end_of_stream = true;
                    Ok(Filled::Nothing)
                }
                Class::Fatal => Err(self.end(LinkError::from_errno("recvfrom", errno))),
            },
        }
    }

    fn arrived(&mut self, count: usize, room: usize) -> Result<Filled, LinkError> {
        if count == 0 {
            return Ok(Filled::Nothing);
        }
        self.traffic.received_bytes += count as u64;
        if matches!(self.transport, Transport::Sealed { .. }) {
            self.buffer.commit_raw(count);
            self.open_records()?;
        } else {
            self.buffer.commit_plain(count);
        }
        Ok(if count == room {
            Filled::All
        } else {
            Filled::Some
        })
    }

    /// Opens every record that is here whole.
    fn open_records(&mut self) -> Result<(), LinkError> {
        let Transport::Sealed { opener, .. } = &mut self.transport else {
            return Ok(());
        };
        loop {
            let sealed = self.buffer.sealed();
            let Some((length, rest)) = sealed.split_first_chunk_mut::<LENGTH_BYTES>() else {
                return Ok(());
            };
            let opened = Opener::announced(*length).and_then(|bytes| match rest.get_mut(..bytes) {
                None => Ok(None),
                Some(record) => opener.open(record).map(|plain| Some((bytes, plain))),
            });
            match opened {
                Ok(None) => return Ok(()),
                Ok(Some((bytes, plain))) => {
                    self.buffer
                        .opened(LENGTH_BYTES + bytes, LENGTH_BYTES, plain);
                }
                Err(error) => {
                    // Frames that were opened before are still good: the error
                    // comes when they are consumed.
                    self.ended.get_or_insert(error);
                    self.buffer.forget_sealed();
                    return Ok(());
                }
            }
        }
    }

    /// Rings the peer's door bell.
    fn ring_bell(&mut self, bell: i32) -> Result<(), LinkError> {
        let byte = 1u8;
        let part = sys::IoVec {
            base: &raw const byte,
            length: 1,
        };
        // SAFETY: one byte of a live local.
        match unsafe { sys::send_gathered(bell, &[part]) } {
            Ok(_) => Ok(()),
            Err(errno) => match class(errno) {
                // A full socket is readable, which is all a bell is for.
                Class::WouldBlock | Class::Interrupted => Ok(()),
                // What the peer left in the ring is still to be read.
                Class::Gone => {
                    self.end_of_stream = true;
                    Ok(())
                }
                Class::Fatal => Err(self.end(LinkError::from_errno("sendmsg", errno))),
            },
        }
    }
}

/// What one [`Link::fill`] did.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Filled {
    /// Took as many bytes as there was room for: there may be more.
    All,
    /// Took what there was.
    Some,
    /// There was nothing (or no room, or the end: see `end_of_stream`).
    Nothing,
    /// A signal came first.
    Interrupted,
}

/// How [`Link::await_frame`] ended.
enum Awaited {
    Frame(Header),
    Timeout,
    Interrupted,
}
