//! One pair of queues: frames both ways between a link and the driver.

use std::io::ErrorKind;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use vmm_sys_util::epoll::EventSet;
use weft_confine::lock;
use weft_guest_memory::DeviceMemory;
use weft_vcpu::Access;

use super::{Cable, FEATURE_MERGE, FRAME_MAX, HEADER, Link, Mac, Shared, announce, control};
use crate::ring::{CHAIN_MAX, Chain, copy_in_held, total};
use crate::worker::{Cause, Handler, InlineHandler, Progress};
use crate::{DeviceError, Ring};

/// Frames in one call, each way.
const BATCH: usize = 64;
/// Where the header says over how many buffers the frame goes.
const BUFFERS: usize = 10;

/// A link that its pair's thread uses, and the control queue's.
pub type SharedLink = Arc<Mutex<Box<dyn Link>>>;

/// The thread's part.
pub struct Pair {
    receive: Ring,
    transmit: Ring,
    control: Option<Ring>,
    shared: Arc<Shared>,
    link: SharedLink,
    index: usize,
    features: u64,
    frame: Box<[u8]>,
    /// How much of `frame` is one that waits for buffers.
    waiting: Option<usize>,
    /// Up to which index of the receive queue there were too few for it.
    seen: u16,
    /// The link takes nothing for now.
    blocked: bool,
    down: bool,
}

impl Pair {
    /// Of the link at `index`.
    pub fn new(
        receive: Ring,
        transmit: Ring,
        control: Option<Ring>,
        shared: Arc<Shared>,
        (index, link): (usize, SharedLink),
        features: u64,
    ) -> Self {
        Self {
            receive,
            transmit,
            control,
            link,
            shared,
            index,
            features,
            frame: vec![0; HEADER + FRAME_MAX].into(),
            waiting: None,
            seen: 0,
            blocked: false,
            down: false,
        }
    }

    /// Frames from the link, as long as there are buffers.
    fn bring(&mut self, link: &mut dyn Link) -> Result<Progress, DeviceError> {
        for _ in 0..BATCH {
            if self.waiting.is_none() {
                match link.receive(&mut self.frame) {
                    Ok(Some(length)) => self.waiting = Some(length),
                    Ok(None) => return Ok(Progress::Idle),
                    Err(error) => {
                        self.lost(&error);
                        return Ok(Progress::Idle);
                    }
                }
            }
            let Some(length) = self.waiting else {
                return Ok(Progress::Idle);
            };
            if !self.place(length)? {
                if let Err(error) = link.read_ahead() {
                    self.lost(&error);
                }
                return Ok(Progress::Idle);
            }
            self.waiting = None;
        }
        Ok(Progress::More)
    }

    /// Puts a frame into buffers; false when there are too few for now.
    fn place(&mut self, length: usize) -> Result<bool, DeviceError> {
        let merge = self.features & FEATURE_MERGE != 0;
        let mut chains: Vec<(Chain, u32)> = Vec::new();
        let mut placed = 0;
        while placed < length {
            let Some(chain) = self.receive.pop()? else {
                self.seen = self.receive.next_available();
                chains.iter().for_each(|_| self.receive.unpop());
                return Ok(false);
            };
            let room = total(&chain.writable);
            if !chain.readable.is_empty() || room < HEADER as u64 {
                return Err(self.wrong(&chain, "a receive buffer that is readable, or too small"));
            }
            let count = room.min((length - placed) as u64) as usize;
            placed += count;
            chains.push((chain, count as u32));
            if !merge && placed < length || chains.len() > CHAIN_MAX {
                // It does not fit: lost. The buffer is for the next one.
                chains.iter().for_each(|_| self.receive.unpop());
                return Ok(true);
            }
        }
        let buffers = chains.len() as u16;
        self.frame[BUFFERS..HEADER].copy_from_slice(&buffers.to_le_bytes());
        let mut from = 0;
        for (chain, count) in &chains {
            let to = from + *count as usize;
            self.receive
                .write(&chain.writable, 0, &self.frame[from..to]);
            from = to;
        }
        self.receive.push_all(&chains)?;
        Ok(true)
    }

    /// Frames to the link, until it is full.
    fn take(&mut self, link: &mut dyn Link) -> Result<Progress, DeviceError> {
        self.blocked = false;
        match link.flush() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.blocked = true;
                return Ok(Progress::Idle);
            }
            Err(error) => self.lost(&error),
            Ok(()) => {}
        }
        for _ in 0..BATCH {
            let Some(chain) = self.transmit.pop()? else {
                return Ok(Progress::Idle);
            };
            let length = total(&chain.readable);
            if !chain.writable.is_empty() || length < HEADER as u64 {
                return Err(self.wrong(&chain, "a frame that is writable, or without a header"));
            }
            // Longer than any frame, or of nothing: lost.
            let fits = length > HEADER as u64 && length <= (HEADER + FRAME_MAX) as u64;
            if fits && !self.down {
                match link.send(self.transmit.memory(), &chain.readable) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        self.transmit.unpop();
                        self.blocked = true;
                        return Ok(Progress::Idle);
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {
                        self.transmit.unpop();
                        return Ok(Progress::More);
                    }
                    Err(error) => self.lost(&error),
                }
            }
            self.transmit.push(&chain, 0)?;
        }
        Ok(Progress::More)
    }

    /// The other end is gone: the cable is out from now on.
    fn lost(&mut self, error: &std::io::Error) {
        self.down = true;
        if super::unplug(&self.shared.configuration) {
            let interrupt = self.receive.interrupt();
            interrupt.say(format_args!("the network failed: {error}"));
            interrupt.configuration();
        }
    }

    /// Tells the driver that the cable is out, or in again; then the switch must learn where
    /// the card is. Whether that is news: then the link may have frames for which no event
    /// comes any more.
    fn show_cable(&mut self, link: &mut dyn Link) -> bool {
        let configuration = &self.shared.configuration;
        let Some(cable) = link.cable() else {
            return false;
        };
        let plugged = cable != Cable::Out;
        if !super::show_plugged(configuration, plugged) && cable != Cable::New {
            return false;
        }
        if plugged {
            let address = Mac(super::mac_of(configuration));
            // A frame that is lost is no reason not to go on.
            let _ = link.send_bytes(&announce::frame(address));
        }
        let interrupt = self.receive.interrupt();
        let state = if plugged { "is back" } else { "is gone" };
        interrupt.say(format_args!("the network's switch {state}"));
        interrupt.configuration();
        true
    }

    fn wrong(&self, chain: &Chain, reason: &'static str) -> DeviceError {
        DeviceError::Chain {
            index: self.receive.index(),
            head: chain.head,
            reason,
        }
    }

    fn serve(&mut self, link: &mut dyn Link) -> Result<Progress, DeviceError> {
        let brought = if self.down {
            Ok(Progress::Idle)
        } else {
            self.bring(link)
        };
        self.receive.signal();
        let taken = self.take(link);
        link.finish();
        let news = self.show_cable(link);
        self.transmit.signal();
        Ok(match (brought?, taken?) {
            (Progress::Idle, Progress::Idle) if !news => Progress::Idle,
            _ => Progress::More,
        })
    }

    /// Here rather than when the driver is ready, for a vCPU's thread may not.
    fn set_up_link(&mut self) -> Result<(), DeviceError> {
        if self.index == 0 {
            self.shared.use_active();
        }
        let mut link = lock(&self.link);
        if link.may_be_pulled() {
            // On the host that the guest comes from, the cable may have been out.
            self.receive.interrupt().configuration();
        }
        let set = link.set_features(self.features);
        drop(link);
        set.map_err(|source| DeviceError::Host {
            what: "the network does not support the driver's offloads",
            source,
        })
    }

    fn serve_control(&mut self) -> Result<Progress, DeviceError> {
        let Some(ring) = &mut self.control else {
            return Ok(Progress::Idle);
        };
        let served = control::serve(ring, &self.shared);
        ring.signal();
        if served? == Progress::More || ring.kicks_on()? {
            return Ok(Progress::More);
        }
        Ok(Progress::Idle)
    }
}

/// On the thread that brings frames: it must not wait.
impl Pair {
    /// Frames from the link, as long as there are buffers whose pages are here. What is
    /// left is for the pair's own thread, and so is whatever went wrong: it may be that a
    /// page was not there.
    fn deliver_inline(&mut self, link: &mut dyn Link) -> Progress {
        let memory = self.receive.memory().clone();
        let (written, read) = self.receive.pages_of_answers();
        let held = memory
            .hold(written, Access::Write)
            .zip(memory.hold([read], Access::Read));
        if held.is_none() {
            return Progress::More;
        }
        let progress = memory.without_waiting(|| {
            for _ in 0..BATCH {
                match link.receive(&mut self.frame) {
                    Ok(Some(length)) => self.waiting = Some(length),
                    Ok(None) => return Progress::Idle,
                    Err(error) => {
                        self.lost(&error);
                        return Progress::More;
                    }
                }
                if !self.place_inline(&memory) {
                    return Progress::More;
                }
                self.waiting = None;
            }
            Progress::More
        });
        self.receive.signal();
        progress
    }

    /// Puts the frame that waits into one buffer, if it fits and its pages are here.
    fn place_inline(&mut self, memory: &DeviceMemory) -> bool {
        let Some(length) = self.waiting else {
            return false;
        };
        let before = self.receive.next_available();
        let popped = self.receive.pop();
        let Ok(Some(chain)) = popped else {
            if self.receive.next_available() != before {
                self.receive.unpop();
            }
            return false;
        };
        self.frame[BUFFERS..HEADER].copy_from_slice(&1_u16.to_le_bytes());
        let placed = chain.readable.is_empty()
            && total(&chain.writable) >= length as u64
            && copy_in_held(memory, &chain.writable, 0, &self.frame[..length]);
        if !placed {
            self.receive.unpop();
            return false;
        }
        self.receive.push(&chain, length as u32).is_ok()
    }
}

impl Handler for Pair {
    fn rings(&self) -> Vec<&Ring> {
        let mut rings = vec![&self.receive, &self.transmit];
        rings.extend(&self.control);
        rings
    }

    fn watched(&self) -> Vec<(RawFd, EventSet)> {
        let descriptor = lock(&self.link).descriptor();
        vec![(descriptor, EventSet::IN | EventSet::OUT)]
    }

    fn set_inline_handler(&mut self, handler: InlineHandler) {
        lock(&self.link).set_inline_handler(handler);
    }

    fn work_inline(&mut self, _: Cause) -> Result<Progress, DeviceError> {
        let link = self.link.clone();
        let Ok(mut link) = link.try_lock() else {
            return Ok(Progress::More);
        };
        if self.waiting.is_some() || self.down {
            return Ok(Progress::More);
        }
        Ok(self.deliver_inline(&mut **link))
    }

    fn quiesce(&mut self, _: Instant) -> bool {
        let frame = self.waiting.and_then(|length| self.frame.get(..length));
        if lock(&self.link).give_back(frame) {
            self.waiting = None;
        }
        true
    }

    fn work(&mut self, cause: Cause) -> Result<Progress, DeviceError> {
        if cause == Cause::Start {
            self.set_up_link()?;
        }
        // Before the pair's own link is taken: it attaches all of them.
        let controlled = self.serve_control()?;
        self.transmit.kicks_off();
        let link = self.link.clone();
        let served = self.serve(&mut **lock(&link))?;
        if served == Progress::More || controlled == Progress::More {
            return Ok(Progress::More);
        }
        // Both are asked, so that a kick comes for what is not there yet.
        // What was too little for a frame is no news: else a driver that offers no
        // more keeps this thread busy.
        let room = if self.waiting.is_some() && !self.down {
            self.receive.kicks_on_beyond(self.seen)?
        } else {
            self.receive.kicks_off();
            false
        };
        let frames = self.transmit.kicks_on()?;
        if room || frames && !self.blocked {
            return Ok(Progress::More);
        }
        Ok(Progress::Idle)
    }
}
