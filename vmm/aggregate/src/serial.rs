//! The serial port's bytes on their way between slice 0, which has the console, and the
//! slice that has the port.
//!
//! Output is a request that a vCPU waits for, so none is on its way while the machine
//! stands. Input is a request that the console's thread does not wait for: the bytes stay
//! with it until the reply says how many the port took. A port whose machine stands, and one
//! that is not the guest's, takes none; so a byte is typed once, wherever the port goes.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use weft_confine::lock;
use weft_platform::role::RolePlace;

use super::PRIMARY;
use super::message::SliceMessage;
use super::registers::RemoteAccess;

/// Bytes of one request: as many as the port's FIFO has.
const INPUT_MAX: usize = 64;

/// The output of a serial port that is not on slice 0.
pub struct RemoteConsole(pub(super) RemoteAccess);

impl Write for RemoteConsole {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let shown = self.0.ask(PRIMARY, |ticket| SliceMessage::SerialOutput {
            ticket,
            bytes,
        });
        match shown {
            Some(_) => Ok(bytes.len()),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes that were sent to a port, and whose reply has not been taken.
struct Attempt {
    ticket: u64,
    sent: Vec<u8>,
}

/// What is typed on slice 0.
pub(super) struct Keyboard {
    place: Arc<RolePlace>,
    way: RemoteAccess,
    attempt: Mutex<Option<Attempt>>,
}

impl Keyboard {
    pub fn new(place: Arc<RolePlace>, way: RemoteAccess) -> Self {
        Self {
            place,
            way,
            attempt: Mutex::default(),
        }
    }

    /// Types into the port, which is `here` or elsewhere; returns how many bytes it took.
    /// Never waits: a caller that has bytes left tries again, beginning with them.
    pub fn type_in(&self, bytes: &[u8], here: impl FnOnce(&[u8]) -> usize) -> usize {
        if let Some(taken) = self.typed_before(bytes) {
            return taken;
        }
        let mut attempt = lock(&self.attempt);
        if self.place.is_here() {
            return here(bytes);
        }
        let sent = &bytes[..bytes.len().min(INPUT_MAX)];
        if !sent.is_empty() {
            let holder = self.place.holder();
            let ticket = self.way.pending.open(holder);
            *attempt = Some(Attempt {
                ticket,
                sent: sent.to_vec(),
            });
            let bytes = sent;
            let message = SliceMessage::SerialInput { ticket, bytes };
            self.way.peers.send(holder, &message);
        }
        0
    }

    /// How many of these bytes a port took that they were sent to; 0 also while that is not
    /// known. None: they are in no port, and on the way to none.
    pub fn typed_before(&self, bytes: &[u8]) -> Option<usize> {
        let mut attempt = lock(&self.attempt);
        let open = attempt.as_ref()?;
        let Some(taken) = self.way.pending.take(open.ticket) else {
            return Some(0);
        };
        let taken = open.sent.len().min(taken as usize);
        // A caller that gave these bytes up has others now.
        let is_same = bytes.starts_with(&open.sent[..taken]);
        *attempt = None;
        (taken > 0).then_some(if is_same { taken } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::peers::Peers;
    use crate::pending_requests::PendingRequests;

    #[test]
    fn each_byte_is_typed_once_wherever_the_port_goes() {
        // A link that nobody reads.
        let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        let config = weft_wire::halves::HalvesConfig {
            socket: near.into(),
            keys: None,
            lease: Duration::from_secs(20),
            spin: Duration::ZERO,
            name: "test".into(),
        };
        let (sender, _receiver) = weft_wire::halves::open(config).unwrap();
        let place = Arc::new(RolePlace::new(0, 0));
        let pending = Arc::<PendingRequests<u64>>::default();
        let way = RemoteAccess {
            peers: Peers::new(0, vec![None, Some(sender)], Duration::ZERO, Duration::ZERO),
            pending: pending.clone(),
            patience: Duration::ZERO,
        };
        let keyboard = Keyboard::new(place.clone(), way);
        let elsewhere = |_: &[u8]| panic!("the port is elsewhere");
        assert_eq!(keyboard.type_in(b"abc", |bytes| bytes.len()), 3);
        place.give(1, 1).unwrap();
        // Sent once, and nothing is taken before the reply.
        assert_eq!(keyboard.type_in(b"abc", elsewhere), 0);
        assert_eq!(keyboard.type_in(b"abc", elsewhere), 0);
        pending.complete(1, 1, 2).unwrap();
        assert_eq!(keyboard.type_in(b"abc", elsewhere), 2);
        assert_eq!(keyboard.type_in(b"c", elsewhere), 0);
        // The port leaves with the byte: it is not typed again.
        place.take(2).unwrap();
        assert_eq!(keyboard.type_in(b"c", elsewhere), 0);
        pending.complete(1, 2, 1).unwrap();
        assert_eq!(keyboard.type_in(b"c", elsewhere), 1);
        // It leaves without the byte, which goes to the next port.
        place.give(1, 3).unwrap();
        assert_eq!(keyboard.type_in(b"d", elsewhere), 0);
        place.take(4).unwrap();
        pending.complete(1, 3, 0).unwrap();
        assert_eq!(keyboard.type_in(b"d", |bytes| bytes.len()), 1);
        // A caller that has other bytes now types these.
        place.give(1, 5).unwrap();
        assert_eq!(keyboard.type_in(b"xy", elsewhere), 0);
        pending.complete(1, 4, 2).unwrap();
        assert_eq!(keyboard.type_in(b"z", elsewhere), 0);
        assert_eq!(keyboard.type_in(b"z", elsewhere), 0);
        pending.complete(1, 5, 1).unwrap();
        assert_eq!(keyboard.type_in(b"z", elsewhere), 1);
    }
}
