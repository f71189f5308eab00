//! Moves bytes both ways.

use std::io::ErrorKind;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vmm_sys_util::epoll::EventSet;
use weft_confine::lock;

use super::{Output, Shared};
use crate::ring::{Chain, total};
use crate::worker::{Cause, Handler, Progress};
use crate::{DeviceError, Ring};

/// Requests in one call, each way.
const BATCH: usize = 32;
/// Bytes moved at once.
const PIECE: usize = 4096;

/// The thread's part.
pub struct ConsoleHandler {
    receive: Ring,
    transmit: Ring,
    shared: Arc<Shared>,
    /// The output takes nothing for now.
    blocked: bool,
}

impl ConsoleHandler {
    /// For both queues.
    pub fn new(receive: Ring, transmit: Ring, shared: Arc<Shared>) -> Self {
        Self {
            receive,
            transmit,
            shared,
            blocked: false,
        }
    }

    /// Input into the driver's buffers, as long as there are both.
    fn bring_input(&mut self) -> Result<Progress, DeviceError> {
        for _ in 0..BATCH {
            if lock(&self.shared.input).is_empty() {
                return Ok(Progress::Idle);
            }
            let Some(chain) = self.receive.pop()? else {
                return Ok(Progress::Idle);
            };
            if !chain.readable.is_empty() {
                return Err(wrong_way(&self.receive, &chain));
            }
            let room = total(&chain.writable).min(PIECE as u64) as usize;
            let bytes: Vec<u8> = {
                let mut input = lock(&self.shared.input);
                let count = room.min(input.len());
                input.drain(..count).collect()
            };
            let written = self.receive.write(&chain.writable, 0, &bytes);
            self.receive.push(&chain, written as u32)?;
        }
        Ok(Progress::More)
    }

    /// The driver's output to ours, until that is full.
    fn take_output(&mut self) -> Result<Progress, DeviceError> {
        let mut output = lock(&self.shared.output);
        self.blocked = false;
        for _ in 0..BATCH {
            let Some(chain) = self.transmit.pop()? else {
                return Ok(Progress::Idle);
            };
            if !chain.writable.is_empty() {
                return Err(wrong_way(&self.transmit, &chain));
            }
            match send(&self.transmit, &chain, &mut output) {
                Sent::All => self.transmit.push(&chain, 0)?,
                Sent::Part => {
                    self.transmit.unpop();
                    return Ok(Progress::More);
                }
                Sent::Blocked => {
                    self.transmit.unpop();
                    self.blocked = true;
                    return Ok(Progress::Idle);
                }
            }
        }
        Ok(Progress::More)
    }
}

fn wrong_way(ring: &Ring, chain: &Chain) -> DeviceError {
    DeviceError::Chain {
        index: ring.index(),
        head: chain.head,
        reason: "a console buffer of the wrong direction",
    }
}

/// How far a request got.
enum Sent {
    All,
    Part,
    Blocked,
}

/// Sends a piece of a request, from where it was left.
fn send(ring: &Ring, chain: &Chain, output: &mut Output) -> Sent {
    let mut piece = [0; PIECE];
    let length = ring.read(&chain.readable, output.skip, &mut piece);
    let sent = match output.to.write(&piece[..length]) {
        Ok(sent) => sent.min(length),
        Err(error) if error.kind() == ErrorKind::Interrupted => 0,
        Err(error) if error.kind() == ErrorKind::WouldBlock && output.to.descriptor().is_some() => {
            return Sent::Blocked;
        }
        // Nobody listens any more: the guest must not wait for that.
        Err(_) => length,
    };
    output.skip += sent as u64;
    if output.skip >= total(&chain.readable) {
        output.skip = 0;
        return Sent::All;
    }
    Sent::Part
}

impl Handler for ConsoleHandler {
    fn rings(&self) -> Vec<&Ring> {
        vec![&self.receive, &self.transmit]
    }

    fn watched(&self) -> Vec<(RawFd, EventSet)> {
        let mut watched = vec![(self.shared.wake.as_raw_fd(), EventSet::IN)];
        let output = lock(&self.shared.output).to.descriptor();
        watched.extend(output.map(|descriptor| (descriptor, EventSet::OUT)));
        watched
    }

    fn work(&mut self, _: Cause) -> Result<Progress, DeviceError> {
        if self.shared.resized.swap(false, Ordering::AcqRel) {
            self.receive.interrupt().configuration();
        }
        let brought = self.bring_input();
        self.receive.signal();
        let taken = self.take_output();
        self.transmit.signal();
        if brought? == Progress::More || taken? == Progress::More {
            return Ok(Progress::More);
        }
        // Both are asked, so that a kick comes for what is not there yet.
        let room = self.receive.kicks_on()?;
        let output = self.transmit.kicks_on()?;
        if room && !lock(&self.shared.input).is_empty() || output && !self.blocked {
            return Ok(Progress::More);
        }
        Ok(Progress::Idle)
    }
}
