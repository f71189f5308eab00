//! What the senders' lock guards: the sealing, the backlog, and why the link
//! ended.

use super::backlog::{BACKLOG_MAX, Backlog};
use crate::LinkError;
use crate::error::{Class, class};
use crate::seal::{KEY_BYTES, LENGTH_BYTES, RECORD_PLAIN_MAX, Sealer, TAG_BYTES};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::io::IoSlice;
use std::os::fd::OwnedFd;

/// Parts that one system call gathers: a header, 64 pages and a few more.
const GATHER_MAX: usize = 72;

/// See the module.
pub(super) struct Outgoing {
    sealing: Option<Sealing>,
    pub backlog: Backlog,
    /// Set once: why the link ended.
    pub ended: Option<LinkError>,
    /// Somebody runs the flusher.
    pub flusher: bool,
}

impl Outgoing {
    pub fn new(send_key: Option<&[u8; KEY_BYTES]>) -> Outgoing {
        Outgoing {
            sealing: send_key.map(|key| Sealing {
                sealer: Sealer::new(key),
                records: Vec::new(),
            }),
            backlog: Backlog::default(),
            ended: None,
            flusher: false,
        }
    }

    /// Hands a frame to the kernel, and what it does not take to the backlog;
    /// gives the bytes that the kernel took.
    pub fn put(
        &mut self,
        socket: &OwnedFd,
        head: &[u8],
        parts: &[&[u8]],
    ) -> Result<usize, LinkError> {
        let Outgoing {
            sealing, backlog, ..
        } = self;
        match sealing {
            None => {
                let parts = std::iter::once(head).chain(parts.iter().copied());
                put_bytes(backlog, socket, parts)
            }
            Some(sealing) => {
                let records = sealing.seal(head, parts)?;
                put_bytes(backlog, socket, std::iter::once(records))
            }
        }
    }
}

fn put_bytes<'a>(
    backlog: &mut Backlog,
    socket: &OwnedFd,
    parts: impl Iterator<Item = &'a [u8]> + Clone,
) -> Result<usize, LinkError> {
    let total: usize = parts.clone().map(<[u8]>::len).sum();
    let taken = if backlog.is_idle() {
        send_now(socket, parts.clone())?
    } else {
        0
    };
    if taken < total {
        let bytes = backlog.waiting() + total - taken;
        if bytes > BACKLOG_MAX {
            return Err(LinkError::Backlog { bytes });
        }
        backlog.append(parts, taken);
    }
    Ok(taken)
}

/// Sends what fits now; gives the number of bytes.
pub(super) fn send_now<'a>(
    socket: &OwnedFd,
    parts: impl Iterator<Item = &'a [u8]>,
) -> Result<usize, LinkError> {
    let mut parts = parts.filter(|part| !part.is_empty());
    let mut taken = 0;
    loop {
        let mut gathered = [IoSlice::new(&[]); GATHER_MAX];
        let (mut count, mut bytes) = (0, 0);
        for (slot, part) in gathered.iter_mut().zip(&mut parts) {
            *slot = IoSlice::new(part);
            count += 1;
            bytes += part.len();
        }
        if count == 0 {
            return Ok(taken);
        }
        let sent = send_once(socket, &gathered[..count])?;
        taken += sent;
        if sent < bytes {
            return Ok(taken);
        }
    }
}

fn send_once(socket: &OwnedFd, parts: &[IoSlice<'_>]) -> Result<usize, LinkError> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        let sent = sendmsg(socket, parts, &mut SendAncillaryBuffer::default(), flags);
        let errno = match sent {
            Ok(count) => return Ok(count),
            Err(errno) => errno.raw_os_error(),
        };
        match class(errno) {
            // A call that does not wait cannot be interrupted for ever.
            Class::Interrupted => {}
            Class::WouldBlock => return Ok(0),
            Class::Gone | Class::Fatal => return Err(LinkError::from_errno("sendmsg", errno)),
        }
    }
}

struct Sealing {
    sealer: Sealer,
    /// Where the records of one frame are put together; kept, never shrunk, as
    /// long as the longest frame so far.
    records: Vec<u8>,
}

impl Sealing {
    /// The records of a frame.
    fn seal(&mut self, head: &[u8], parts: &[&[u8]]) -> Result<&[u8], LinkError> {
        let plain = head.len() + parts.iter().map(|part| part.len()).sum::<usize>();
        let records = plain.div_ceil(RECORD_PLAIN_MAX);
        let total = plain + records * (LENGTH_BYTES + TAG_BYTES);
        if self.records.len() < total {
            self.records.resize(total, 0);
        }
        let (mut start, mut filled) = (0, 0);
        for mut part in std::iter::once(head).chain(parts.iter().copied()) {
            while !part.is_empty() {
                let (now, later) = part.split_at(part.len().min(RECORD_PLAIN_MAX - filled));
                let at = start + LENGTH_BYTES + filled;
                self.records[at..at + now.len()].copy_from_slice(now);
                part = later;
                filled += now.len();
                if filled == RECORD_PLAIN_MAX {
                    start += self.sealer.seal(&mut self.records[start..], filled)?;
                    filled = 0;
                }
            }
        }
        if filled > 0 {
            start += self.sealer.seal(&mut self.records[start..], filled)?;
        }
        debug_assert_eq!(start, total);
        Ok(&self.records[..start])
    }
}
