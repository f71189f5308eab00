//! Stands in, on the primary, for the handler of a group that another slice
//! serves: to the transport it is a handler like any other.
//!
//! ```text
//! Idle ──start──> Serving ──quiesce──> Stopping ──stopped──> Idle
//!                             start while Stopping: served again once it stopped
//! ```

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_confine::lock;
use weft_virtio::ring::QueueState;
use weft_virtio::worker::{Cause, Progress};
use weft_virtio::{DeviceError, Handler, Ring};

use super::{Activation, RemoteDevices, Stopped};
use crate::message::device::{Address, DeviceMessage};

/// Where the word arrives that a group has stopped.
pub(super) struct StopCompletion {
    stopped: Mutex<Option<Stopped>>,
    changed: Condvar,
    arrived: EventFd,
}

impl StopCompletion {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            stopped: Mutex::default(),
            changed: Condvar::new(),
            arrived: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// The word came, from the slice that serves the group.
    pub fn put(&self, stopped: Stopped) {
        *lock(&self.stopped) = Some(stopped);
        self.changed.notify_all();
        // A full counter wakes as well.
        let _ = self.arrived.write(1);
    }

    /// Waits for it until `deadline`.
    fn wait(&self, deadline: Instant) -> Option<Stopped> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.stopped), left, |word| word.is_none());
        let (mut word, _) = waited.unwrap_or_else(|poison| poison.into_inner());
        word.take()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Idle,
    Serving,
    Stopping { again: bool },
}

/// The stand-in.
pub(super) struct QueueProxy {
    group: Address,
    slice: usize,
    features: u64,
    remote: Arc<RemoteDevices>,
    completion: Arc<StopCompletion>,
    /// For kicks and faults; their memory is not touched here.
    rings: Vec<Ring>,
    states: Vec<(u16, QueueState)>,
    stage: Stage,
}

impl QueueProxy {
    pub fn new(
        remote: Arc<RemoteDevices>,
        completion: Arc<StopCompletion>,
        (group, slice): (Address, usize),
        features: u64,
        rings: Vec<Ring>,
    ) -> Self {
        let states = rings.iter().map(|ring| (ring.index(), ring.state()));
        Self {
            group,
            slice,
            features,
            remote,
            completion,
            states: states.collect(),
            rings,
            stage: Stage::Idle,
        }
    }

    fn activate(&mut self) {
        let activation = Activation {
            features: self.features,
            queues: self.states.clone(),
        };
        // It is plain data: it always has a text.
        let json = serde_json::to_vec(&activation).unwrap_or_default();
        let message = DeviceMessage::Activate(json);
        self.remote.send(self.slice, self.group, message);
        self.stage = Stage::Serving;
    }

    fn has_stopped(&mut self, stopped: Stopped) {
        for (index, state) in &mut self.states {
            if let Some((_, end)) = stopped.0.iter().find(|(queue, _)| queue == index) {
                state.next_available = end.next_available;
                state.next_used = end.next_used;
            }
        }
        // A device that is saved reads its rings.
        for ring in &mut self.rings {
            if let Some((_, end)) = stopped.0.iter().find(|(queue, _)| *queue == ring.index()) {
                ring.continue_at(end.next_available, end.next_used);
            }
        }
        let again = self.stage == Stage::Stopping { again: true };
        self.stage = Stage::Idle;
        if again {
            self.activate();
        }
    }
}

impl Handler for QueueProxy {
    fn rings(&self) -> Vec<&Ring> {
        self.rings.iter().collect()
    }

    fn watched(&self) -> Vec<(RawFd, EventSet)> {
        vec![(self.completion.arrived.as_raw_fd(), EventSet::IN)]
    }

    fn work(&mut self, cause: Cause) -> Result<Progress, DeviceError> {
        match (cause, self.stage) {
            (Cause::Start, Stage::Idle) => self.activate(),
            (Cause::Start, Stage::Stopping { .. }) => {
                self.stage = Stage::Stopping { again: true };
            }
            (Cause::Kick(place), Stage::Serving) => {
                if let Some(ring) = self.rings.get(place) {
                    let queue = Address::new(self.group.device, ring.index());
                    self.remote.send(self.slice, queue, DeviceMessage::Kick);
                }
            }
            _ => {}
        }
        if matches!(self.stage, Stage::Stopping { .. })
            && let Some(stopped) = self.completion.wait(Instant::now())
        {
            self.has_stopped(stopped);
        }
        Ok(Progress::Idle)
    }

    fn quiesce(&mut self, deadline: Instant) -> bool {
        match self.stage {
            Stage::Idle => return true,
            Stage::Serving => {
                self.remote
                    .send(self.slice, self.group, DeviceMessage::Stop);
            }
            Stage::Stopping { .. } => {}
        }
        self.stage = Stage::Stopping { again: false };
        // Once the machine has ended, no `Stopped` arrives.
        if self.remote.peers.is_over() {
            return true;
        }
        match self.completion.wait(deadline) {
            Some(stopped) => self.has_stopped(stopped),
            None => return self.remote.peers.is_over(),
        }
        true
    }
}
