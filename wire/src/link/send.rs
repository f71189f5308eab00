//! Sending: gathered, whole, bounded, and never deadlocked with a peer that is
//! itself sending.

use super::{Filled, Link, Sealing, Transport};
use crate::LinkError;
use crate::error::{Class, class};
use crate::frame::{HEADER_BYTES, Header, MAX_PAYLOAD};
use crate::seal::{LENGTH_BYTES, RECORD_PLAIN_MAX};
use crate::sys::{self, IoVec, PollFd};

/// Parts that one system call gathers: a header, 64 pages and a few more.
const GATHER_MAX: usize = 72;
/// Frames that go out together: as many as one system call gathers with their
/// payloads.
pub const FRAMES_MAX: usize = GATHER_MAX / 2;
/// Bytes put into a ring before the peer is shown them, so that it can start.
const PUBLISH_BYTES: usize = 64 << 10;

impl Link {
    /// Sends a frame whose payload is `parts`, one after the other. The
    /// header's `length` is filled in. Returns when the kernel or the ring has
    /// all of it.
    ///
    /// # Errors
    /// [`LinkError::TooLong`] and the link goes on; all others end it. A frame
    /// that the peer sent before it closed can still be received after
    /// [`LinkError::Closed`].
    pub fn send(&mut self, header: &Header, parts: &[&[u8]]) -> Result<(), LinkError> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if length > MAX_PAYLOAD {
            return Err(LinkError::TooLong { length });
        }
        let head = encode(header, length);
        self.send_parts(core::iter::once(&head[..]).chain(parts.iter().copied()))
    }

    /// As [`Link::send`] for several frames, each with its payload, in order: one
    /// system call or one look of the peer serves for all, as far as it goes.
    ///
    /// # Errors
    /// As [`Link::send`]. None has been sent when a payload is too long, or when
    /// there are more than [`FRAMES_MAX`].
    pub fn send_frames(&mut self, frames: &[(Header, &[u8])]) -> Result<(), LinkError> {
        let longest = frames.iter().map(|(_, payload)| payload.len()).max();
        if let Some(length) = longest.filter(|&length| length > MAX_PAYLOAD) {
            return Err(LinkError::TooLong { length });
        }
        let mut heads = [[0; HEADER_BYTES]; FRAMES_MAX];
        let Some(heads) = heads.get_mut(..frames.len()) else {
            return Err(LinkError::Configuration("too many frames at once"));
        };
        for (head, (header, payload)) in heads.iter_mut().zip(frames) {
            *head = encode(header, payload.len());
        }
        let parts = heads.iter().zip(frames);
        self.send_parts(parts.flat_map(|(head, (_, payload))| [&head[..], payload]))
    }

    fn send_parts<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) -> Result<(), LinkError> {
        if let Some(error) = self.ended {
            return Err(error);
        }
        if self.end_of_stream {
            return Err(LinkError::Closed);
        }
        let sent = match self.transport {
            Transport::Stream { fd } => self.send_clear(fd, parts),
            Transport::Sealed { fd, .. } => self.send_sealed(fd, parts),
            Transport::Ring { .. } => self.send_ring(parts),
        };
        match sent {
            // What the peer sent before it went is still to be received, so
            // the end is left to be found there.
            Err(LinkError::Closed) => {
                self.end_of_stream = true;
                Err(LinkError::Closed)
            }
            Err(error) => Err(self.end(error)),
            Ok(()) => Ok(()),
        }
    }

    fn send_clear<'a>(
        &mut self,
        fd: i32,
        parts: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), LinkError> {
        let mut rest = parts.filter(|part| !part.is_empty()).map(|part| IoVec {
            base: part.as_ptr(),
            length: part.len(),
        });
        let mut gathered = [IoVec {
            base: core::ptr::null(),
            length: 0,
        }; GATHER_MAX];
        let mut patience = Patience::new(self.lease_ms);
        loop {
            let mut count = 0;
            for (slot, part) in gathered.iter_mut().zip(&mut rest) {
                *slot = part;
                count += 1;
            }
            if count == 0 {
                return Ok(());
            }
            // SAFETY: the parts are borrowed for the whole call of `send`.
            unsafe { self.write_all(fd, &mut gathered[..count], &mut patience) }?;
        }
    }

    fn send_sealed<'a>(
        &mut self,
        fd: i32,
        parts: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), LinkError> {
        let mut patience = Patience::new(self.lease_ms);
        let mut filled = 0;
        for mut part in parts {
            while !part.is_empty() {
                let count = part.len().min(RECORD_PLAIN_MAX - filled);
                let at = LENGTH_BYTES + filled;
                self.sealing()?.record.bytes()[at..at + count].copy_from_slice(&part[..count]);
                part = &part[count..];
                filled += count;
                if filled == RECORD_PLAIN_MAX {
                    self.send_record(fd, filled, &mut patience)?;
                    filled = 0;
                }
            }
        }
        if filled > 0 {
            self.send_record(fd, filled, &mut patience)?;
        }
        Ok(())
    }

    fn sealing(&mut self) -> Result<&mut Sealing, LinkError> {
        match &mut self.transport {
            Transport::Sealed {
                sealing: Some(sealing),
                ..
            } => Ok(sealing),
            _ => Err(LinkError::Configuration("it has no key to send with")),
        }
    }

    fn send_record(
        &mut self,
        fd: i32,
        plain: usize,
        patience: &mut Patience,
    ) -> Result<(), LinkError> {
        let Sealing { sealer, record } = self.sealing()?;
        let length = sealer.seal(record.bytes(), plain)?;
        let mut parts = [IoVec {
            base: record.base,
            length,
        }];
        // SAFETY: the record buffer is not written until the next record.
        unsafe { self.write_all(fd, &mut parts, patience) }
    }

    /// # Safety
    /// Every part points to readable memory.
    unsafe fn write_all(
        &mut self,
        fd: i32,
        mut parts: &mut [IoVec],
        patience: &mut Patience,
    ) -> Result<(), LinkError> {
        while !parts.is_empty() {
            // SAFETY: the caller's promise.
            match unsafe { sys::send_gathered(fd, parts) } {
                Ok(count) => {
                    self.traffic.sent_bytes += count as u64;
                    parts = advance(parts, count);
                }
                Err(errno) => match class(errno) {
                    Class::Interrupted => {}
                    Class::WouldBlock => self.make_way(patience)?,
                    Class::Gone | Class::Fatal => {
                        return Err(LinkError::from_errno("sendmsg", errno));
                    }
                },
            }
        }
        Ok(())
    }

    fn send_ring<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) -> Result<(), LinkError> {
        let mut patience = Patience::new(self.lease_ms);
        let mut unpublished = 0;
        for mut part in parts {
            while !part.is_empty() {
                let Transport::Ring { rings, .. } = &mut self.transport else {
                    return Ok(());
                };
                let count = rings.produce(&part[..part.len().min(PUBLISH_BYTES)])?;
                part = &part[count..];
                unpublished += count;
                if count == 0 || unpublished >= PUBLISH_BYTES {
                    self.publish()?;
                    unpublished = 0;
                }
                if count == 0 {
                    self.make_way(&mut patience)?;
                }
                self.traffic.sent_bytes += count as u64;
            }
        }
        self.publish()
    }

    fn publish(&mut self) -> Result<(), LinkError> {
        let Transport::Ring { rings, bell } = &self.transport else {
            return Ok(());
        };
        let bell = *bell;
        if rings.publish() {
            self.ring_bell(bell)?;
        }
        if self.end_of_stream {
            return Err(LinkError::Closed);
        }
        Ok(())
    }

    /// The send would block: lets the peer go on by taking what it sends, and
    /// waits until there is room or something more to take.
    fn make_way(&mut self, patience: &mut Patience) -> Result<(), LinkError> {
        let left_ns = patience.left_ns()?;
        let took = self.fill(sys::MSG_DONTWAIT)?;
        if let Some(error) = self.ended {
            return Err(error);
        }
        if self.end_of_stream {
            return Err(LinkError::Closed);
        }
        if matches!(took, Filled::All | Filled::Some) {
            return Ok(());
        }
        let roomy = self.buffer.room().1 > 0;
        match &mut self.transport {
            Transport::Stream { fd } | Transport::Sealed { fd, .. } => {
                let events = sys::POLLOUT | if roomy { sys::POLLIN } else { 0 };
                wait_for(*fd, events, left_ns)
            }
            Transport::Ring { .. } => self.make_way_ring(roomy, left_ns),
        }
    }

    fn make_way_ring(&mut self, roomy: bool, left_ns: u64) -> Result<(), LinkError> {
        let Transport::Ring { rings, bell } = &mut self.transport else {
            return Ok(());
        };
        let bell = *bell;
        let look = |rings: &mut crate::ring::Rings| -> Result<bool, LinkError> {
            Ok(rings.room()? > 0 || (roomy && rings.available()? > 0))
        };
        let spun = self.send_spinner.spin(left_ns, || match look(rings) {
            Ok(false) => None,
            other => Some(other),
        });
        if let Some(outcome) = spun {
            return outcome.map(|_| ());
        }
        rings.asleep(true);
        let slept_at = sys::ticks();
        let waited = match look(rings) {
            Ok(true) => Ok(()),
            Ok(false) => wait_for(bell, sys::POLLIN, left_ns),
            Err(error) => Err(error),
        };
        rings.awake();
        waited?;
        self.send_spinner
            .blocked(sys::ticks().wrapping_sub(slept_at));
        self.silence_bell(bell)?;
        Ok(())
    }
}

fn encode(header: &Header, length: usize) -> [u8; HEADER_BYTES] {
    let length = length as u32;
    Header { length, ..*header }.encode()
}

/// Drops the first `count` bytes of the parts.
fn advance(parts: &mut [IoVec], mut count: usize) -> &mut [IoVec] {
    let mut whole = 0;
    while whole < parts.len() && count >= parts[whole].length {
        count -= parts[whole].length;
        whole += 1;
    }
    let parts = &mut parts[whole..];
    if let Some(first) = parts.first_mut() {
        // SAFETY: `count` is less than the part's length.
        first.base = unsafe { first.base.add(count) };
        first.length -= count;
    }
    parts
}

fn wait_for(fd: i32, events: i16, timeout_ns: u64) -> Result<(), LinkError> {
    let mut fds = [PollFd {
        fd,
        events,
        revents: 0,
    }];
    match sys::ppoll(&mut fds, timeout_ns, None) {
        Ok(_) => Ok(()),
        Err(errno) if class(errno) == Class::Interrupted => Ok(()),
        Err(errno) => Err(LinkError::from_errno("ppoll", errno)),
    }
}

/// The longest single wait of a send, nanoseconds: more than this between two looks
/// at the clock means that this process was stopped.
const LOOK_NS: u64 = 1_000_000_000;

/// The time that one send may wait in all, while this process runs. The clock is
/// read only once a send has to wait.
struct Patience {
    lease_ms: u32,
    left_ns: u64,
    seen_ns: Option<u64>,
}

impl Patience {
    fn new(lease_ms: u32) -> Patience {
        Patience {
            lease_ms,
            left_ns: u64::from(lease_ms) * 1_000_000,
            seen_ns: None,
        }
    }

    fn left_ns(&mut self) -> Result<u64, LinkError> {
        let now_ns = sys::now_ns();
        let passed_ns = now_ns - self.seen_ns.replace(now_ns).unwrap_or(now_ns);
        self.left_ns = self.left_ns.saturating_sub(passed_ns.min(LOOK_NS));
        match self.left_ns {
            0 => Err(LinkError::Stalled {
                lease_ms: self.lease_ms,
            }),
            left_ns => Ok(left_ns.min(LOOK_NS)),
        }
    }
}
