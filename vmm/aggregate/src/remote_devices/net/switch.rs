//! The network on the slice that has it, as the pairs of queues on all slices use it:
//! one link, and a port for each pair.
//!
//! ```text
//!            ┌────── Switch ──────┐
//!  link ◀──▶ │ steering ── port 0 │ ◀── PortLink ── pair 0, here
//!            │             port 1 │ ◀── messages ── pair 1, on another slice
//!            └────────────────────┘
//! ```
//!
//! Invariants: frames of a port go to the link in the order in which they came, and
//! none of them is lost: what the link does not take waits, and who sends is told,
//! or finds out, that there is no room. Frames for the guest wait for a port up to
//! [`QUEUE_MAX`] bytes, then are lost, as by any switch. While the driver uses no
//! pair, frames for it are lost.
//!
//! One thread reads the link (`weft-netN`), and has a pair that is served here take what
//! came, as far as that needs no waiting; what a pair sends goes to the link on the
//! thread that brings it. So neither costs another thread's turn.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_confine::lock;
use weft_guest_memory::DeviceMemory;
use weft_virtio::net::{FRAME_MAX, HEADER, Link, Usage};
use weft_virtio::ring::{Segment, copy_out, total};
use weft_virtio::worker::{Cause, InlineHandler};

use super::frames::{self, BATCH_MAX, Credit, Debt, cost};
use super::port::FrameSender;
use super::steering::Steering;

/// Bytes of frames that may wait for a port: as much as Linux lets a TCP window grow,
/// so that one connection loses nothing.
const QUEUE_MAX: usize = 6 << 20;
/// Frames that are read before they are sent on.
const BATCH: usize = 64;
/// How often the thread looks whether the machine is over.
const LOOK_MS: i32 = 500;
const WAKE: u64 = 0;
const LINK: u64 = 1;

/// Where a pair is served.
pub enum PortKind {
    /// On this slice.
    Local,
    /// On another slice.
    Remote(Arc<dyn FrameSender>),
}

/// Is called with the reason when the link is gone.
pub type Gone = Box<dyn Fn(&io::Error) + Send + Sync>;

/// The link and all that waits for it.
struct Uplink {
    link: Box<dyn Link>,
    steering: Steering,
    /// Frames of other slices' pairs that the link did not take, by port.
    waiting: VecDeque<(u16, Vec<u8>)>,
    usage: Usage,
    /// The link was not told of it yet.
    news: bool,
    down: bool,
}

/// Frames for a pair that is served here.
#[derive(Default)]
struct LocalPort {
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Its server has not heard of the last ones.
    news: bool,
    /// The pair waits until the link takes more.
    blocked: bool,
    inline_handler: Option<InlineHandler>,
}

/// Frames for a pair that another slice serves.
struct PeerPort {
    /// Batches that were not sent yet; the last may grow.
    batches: VecDeque<Vec<u8>>,
    bytes: usize,
    credit: Credit,
    debt: Debt,
}

enum Port {
    Local {
        local: Mutex<LocalPort>,
        arrived: EventFd,
    },
    Remote {
        peer: Mutex<PeerPort>,
        sender: Arc<dyn FrameSender>,
    },
}

pub struct Switch {
    uplink: Mutex<Uplink>,
    ports: Vec<Port>,
    wake: EventFd,
    over: AtomicBool,
    gone: Gone,
}

impl Switch {
    /// Over this link, with a port for each pair; what is under way to and from
    /// another slice is at most `window` bytes.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn new(
        link: Box<dyn Link>,
        kinds: Vec<PortKind>,
        window: usize,
        gone: Gone,
    ) -> io::Result<Arc<Self>> {
        let port = |place| {
            Ok(match place {
                PortKind::Local => Port::Local {
                    local: Mutex::default(),
                    arrived: EventFd::new(EFD_NONBLOCK)?,
                },
                PortKind::Remote(sender) => Port::Remote {
                    peer: Mutex::new(PeerPort {
                        batches: VecDeque::new(),
                        bytes: 0,
                        credit: Credit::new(window),
                        debt: Debt::new(window),
                    }),
                    sender,
                },
            })
        };
        Ok(Arc::new(Self {
            uplink: Mutex::new(Uplink {
                link,
                steering: Steering::new(),
                waiting: VecDeque::new(),
                usage: Usage::default(),
                news: false,
                down: false,
            }),
            ports: kinds.into_iter().map(port).collect::<io::Result<_>>()?,
            wake: EventFd::new(EFD_NONBLOCK)?,
            over: AtomicBool::new(false),
            gone,
        }))
    }

    /// What a pair that is served here has for its link.
    pub fn port(self: &Arc<Self>, pair: u16) -> Box<dyn Link> {
        Box::new(PortLink {
            switch: self.clone(),
            pair,
            frame: vec![0; HEADER + FRAME_MAX].into(),
        })
    }

    /// The driver uses this from now on. Waits for nothing.
    pub fn use_as(&self, usage: Usage) {
        let mut uplink = lock(&self.uplink);
        uplink.usage = Usage {
            pairs: usage.pairs.min(self.ports.len() as u16),
            ..usage
        };
        uplink.news = true;
        drop(uplink);
        if usage.pairs == 0 {
            self.forget();
        }
        self.wake();
    }

    /// Drops what waits for pairs: it was for a driver that is gone.
    fn forget(&self) {
        for port in &self.ports {
            match port {
                Port::Local { local, .. } => {
                    let mut local = lock(local);
                    local.frames.clear();
                    local.bytes = 0;
                }
                Port::Remote { peer, .. } => {
                    let mut peer = lock(peer);
                    peer.batches.clear();
                    peer.bytes = 0;
                }
            }
        }
    }

    /// The machine is over: the thread ends.
    pub fn close(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        // A full counter wakes as well.
        let _ = self.wake.write(1);
    }

    /// Frames that the driver transmitted on a pair of another slice. Waits for
    /// nothing.
    ///
    /// # Errors
    /// They are malformed, or too many, or of an unknown pair.
    pub fn put(&self, pair: u16, batch: &[u8]) -> Result<(), String> {
        frames::check(batch)?;
        let Some(Port::Remote { peer, sender }) = self.ports.get(usize::from(pair)) else {
            return Err(format!(
                "it sent frames of pair {pair}, which another slice serves"
            ));
        };
        lock(peer).debt.receive(batch.len())?;
        let mut rest = batch;
        let mut uplink = lock(&self.uplink);
        let mut sent = 0;
        while let Some(frame) = frames::next(&mut rest) {
            uplink.steering.transmitted(frame, pair);
            if !uplink.waiting.is_empty() || !self.transmit(&mut uplink, frame) {
                uplink.waiting.push_back((pair, frame.to_vec()));
                continue;
            }
            sent += cost(frame.len());
        }
        drop(uplink);
        done_with(peer, sender, sent);
        Ok(())
    }

    /// A pair's slice accepted this many bytes of frames. Waits for nothing.
    ///
    /// # Errors
    /// It never got them, or the pair is not there.
    pub fn taken(&self, pair: u16, bytes: u64) -> Result<(), String> {
        let Some(Port::Remote { peer, sender }) = self.ports.get(usize::from(pair)) else {
            return Err(format!(
                "it acknowledged frames of pair {pair}, which another slice \
            serves"
            ));
        };
        lock(peer).credit.taken(bytes)?;
        send_on(peer, sender);
        Ok(())
    }

    /// Gives a frame to the link; false when it takes none for now.
    fn transmit(&self, uplink: &mut Uplink, frame: &[u8]) -> bool {
        // As from a cable that is out: nobody hears it.
        if uplink.down {
            return true;
        }
        loop {
            match uplink.link.send_bytes(frame) {
                Ok(()) => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                Err(error) => {
                    self.lose(uplink, &error);
                    return true;
                }
            }
        }
    }

    /// The other end is gone: the cable is out from now on.
    fn lose(&self, uplink: &mut Uplink, error: &io::Error) {
        if !std::mem::replace(&mut uplink.down, true) {
            (self.gone)(error);
        }
    }

    /// Reads the link until the machine is over.
    pub fn run(&self) {
        if let Err(error) = self.run_until_over() {
            self.lose(&mut lock(&self.uplink), &error);
        }
    }

    fn run_until_over(&self) -> io::Result<()> {
        let epoll = Epoll::new()?;
        let add = |descriptor, events, token| {
            let event = EpollEvent::new(events | EventSet::EDGE_TRIGGERED, token);
            epoll.ctl(ControlOperation::Add, descriptor, event)
        };
        add(self.wake.as_raw_fd(), EventSet::IN, WAKE)?;
        let link = lock(&self.uplink).link.descriptor();
        add(link, EventSet::IN | EventSet::OUT, LINK)?;
        let mut events = [EpollEvent::default(); 2];
        let mut frame = vec![0; HEADER + FRAME_MAX];
        let mut more = true;
        while !self.over.load(Ordering::SeqCst) {
            let waited = epoll.wait(if more { 0 } else { LOOK_MS }, &mut events);
            match waited {
                Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
            self.flush();
            more = self.bring(&mut frame);
        }
        Ok(())
    }

    /// Tells the link what the driver uses, and gives it what waits.
    fn flush(&self) {
        let mut uplink = lock(&self.uplink);
        let uplink = &mut *uplink;
        if std::mem::take(&mut uplink.news) && uplink.usage.pairs > 0 {
            uplink.link.set_attached(true);
            if let Err(error) = uplink.link.set_features(uplink.usage.features) {
                self.lose(uplink, &error);
            }
        }
        match uplink.link.flush() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(error) => self.lose(uplink, &error),
            Ok(()) => {}
        }
        while let Some((pair, frame)) = uplink.waiting.pop_front() {
            if !self.transmit(uplink, &frame) {
                uplink.waiting.push_front((pair, frame));
                return;
            }
            if let Some(Port::Remote { peer, sender }) = self.ports.get(usize::from(pair)) {
                done_with(peer, sender, cost(frame.len()));
            }
        }
        for port in &self.ports {
            if let Port::Local { local, arrived } = port
                && std::mem::take(&mut lock(local).blocked)
            {
                // A full counter wakes as well.
                let _ = arrived.write(1);
            }
        }
    }

    /// Reads some frames and sends them on; whether there may be more.
    fn bring(&self, frame: &mut [u8]) -> bool {
        let mut more = true;
        for _ in 0..BATCH {
            let (length, pair) = {
                let mut uplink = lock(&self.uplink);
                if uplink.down {
                    more = false;
                    break;
                }
                match uplink.link.receive(frame) {
                    Ok(Some(_)) if uplink.usage.pairs == 0 => continue,
                    Ok(Some(length)) => {
                        let pair = uplink.steering.pair(&frame[..length], uplink.usage.pairs);
                        (length, pair)
                    }
                    Ok(None) => {
                        more = false;
                        break;
                    }
                    Err(error) => {
                        self.lose(&mut uplink, &error);
                        continue;
                    }
                }
            };
            if length > HEADER {
                self.queue(pair, &frame[..length]);
            }
        }
        for port in &self.ports {
            match port {
                Port::Local { local, arrived } => hand_over(local, arrived),
                Port::Remote { peer, sender } => send_on(peer, sender),
            }
        }
        more
    }

    /// Puts a frame where its pair gets it from, if there is room.
    fn queue(&self, pair: u16, frame: &[u8]) {
        match self.ports.get(usize::from(pair)) {
            None => {}
            Some(Port::Local { local, .. }) => {
                let mut local = lock(local);
                if local.bytes + frame.len() > QUEUE_MAX {
                    return;
                }
                local.bytes += frame.len();
                local.frames.push_back(frame.to_vec());
                local.news = true;
            }
            Some(Port::Remote { peer, sender }) => {
                let mut state = lock(peer);
                let bytes = cost(frame.len());
                if state.bytes + bytes > QUEUE_MAX {
                    return;
                }
                state.bytes += bytes;
                let fits = |batch: &Vec<u8>| batch.len() + bytes <= BATCH_MAX;
                if !state.batches.back().is_some_and(fits) {
                    state.batches.push_back(Vec::new());
                }
                if let Some(batch) = state.batches.back_mut() {
                    frames::add(batch, frame);
                }
                let several = state.batches.len() > 1;
                drop(state);
                if several {
                    send_on(peer, sender);
                }
            }
        }
    }
}

/// The pair takes the frames on this thread, where that needs no waiting, or on its own.
fn hand_over(local: &Mutex<LocalPort>, arrived: &EventFd) {
    let inline_handler = {
        let mut local = lock(local);
        if !std::mem::take(&mut local.news) {
            return;
        }
        local.inline_handler.clone()
    };
    if !inline_handler.is_some_and(|handler| handler.work(Cause::Ready(0))) {
        // A full counter wakes as well.
        let _ = arrived.write(1);
    }
}

/// Sends batches, as many as may be under way. Under the lock, which keeps their
/// order; it never waits for the peer.
fn send_on(peer: &Mutex<PeerPort>, sender: &Arc<dyn FrameSender>) {
    let mut peer = lock(peer);
    while let Some(batch) = peer.batches.front() {
        let bytes = batch.len();
        if !peer.credit.has_room(bytes) {
            return;
        }
        if let Some(batch) = peer.batches.pop_front() {
            peer.credit.send(bytes);
            peer.bytes -= bytes;
            sender.frames(&batch);
        }
    }
}

/// The link has sent this many bytes of a slice's frames, which makes room.
fn done_with(peer: &Mutex<PeerPort>, sender: &Arc<dyn FrameSender>, bytes: usize) {
    let taken = lock(peer).debt.take(bytes);
    if let Some(bytes) = taken {
        sender.taken(bytes);
    }
}

/// The link of a pair that is served where the network is.
struct PortLink {
    switch: Arc<Switch>,
    pair: u16,
    frame: Box<[u8]>,
}

impl PortLink {
    /// Its side of the port: none where the pair is served elsewhere.
    fn local(&self) -> Option<(&Mutex<LocalPort>, &EventFd)> {
        match self.switch.ports.get(usize::from(self.pair)) {
            Some(Port::Local { local, arrived }) => Some((local, arrived)),
            _ => None,
        }
    }
}

impl Link for PortLink {
    fn descriptor(&self) -> RawFd {
        self.local().map_or(-1, |(_, arrived)| arrived.as_raw_fd())
    }

    fn receive(&mut self, frame: &mut [u8]) -> io::Result<Option<usize>> {
        let Some((local, _)) = self.local() else {
            return Ok(None);
        };
        let mut local = lock(local);
        let Some(found) = local.frames.pop_front() else {
            return Ok(None);
        };
        local.bytes -= found.len();
        drop(local);
        if let Some(room) = frame.get_mut(..found.len()) {
            room.copy_from_slice(&found);
        }
        Ok(Some(found.len()))
    }

    fn send(&mut self, memory: &DeviceMemory, frame: &[Segment]) -> io::Result<()> {
        let length = (total(frame) as usize).min(self.frame.len());
        let copied = copy_out(memory, frame, 0, &mut self.frame[..length]);
        // Nothing of an earlier frame goes with one whose pages did not come.
        self.frame[copied..length].fill(0);
        let bytes = &self.frame[..length];
        let mut uplink = lock(&self.switch.uplink);
        uplink.steering.transmitted(bytes, self.pair);
        if uplink.waiting.is_empty() && self.switch.transmit(&mut uplink, bytes) {
            return Ok(());
        }
        // Under the uplink's lock, so that the thread which finds room sees it.
        if let Some((local, _)) = self.local() {
            lock(local).blocked = true;
        }
        Err(ErrorKind::WouldBlock.into())
    }

    fn set_inline_handler(&mut self, handler: InlineHandler) {
        if let Some((local, _)) = self.local() {
            lock(local).inline_handler = Some(handler);
        }
    }
}
