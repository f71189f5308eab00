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
//! [`QUEUE_MAX`] bytes, then are lost, as by any switch. Until the driver uses a pair, they stay
//! in the link: a machine that comes from another host has frames before it runs. Once it uses
//! none any more, frames for it are lost.
//!
//! One thread reads the link (`weft-netN`), and has a pair that is served here take what
//! came, as far as that needs no waiting; what a pair sends goes to the link on the
//! thread that brings it. So neither costs another thread's turn. A pair that is the only one,
//! and is served here, reads the link itself.

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
/// Frames that go to another process with the machine, at most, of those in the link.
const WAITING_MAX: usize = 4096;
/// Frames that are read before they are sent on.
const BATCH: usize = 64;
/// How often the thread looks whether the machine is over.
const LOOK_MS: i32 = 500;
const WAKE: u64 = 0;
const LINK: u64 = 1;

/// Is called with the reason when the link is gone.
pub type Gone = Box<dyn Fn(&io::Error) + Send + Sync>;

/// What reads the link.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// Nothing: the thread has not begun.
    None,
    Thread,
    /// The only pair, on its own thread.
    Pair,
}

/// The link and all that waits for it.
struct Uplink {
    link: Box<dyn Link>,
    reader: Reader,
    steering: Steering,
    /// Frames of other slices' pairs that the link did not take, and the port whose slice
    /// waits to hear that it did.
    waiting: VecDeque<(Option<u16>, Vec<u8>)>,
    /// `None`: it has used nothing yet.
    usage: Option<Usage>,
    /// The link was not told of it yet.
    news: bool,
    down: bool,
}

/// Frames for a pair that is served here.
#[derive(Default)]
struct LocalPort {
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
    /// The first of them came back from another slice.
    returned: usize,
    /// Its server has not heard of the last ones.
    news: bool,
    /// The pair waits until the link takes more.
    blocked: bool,
    inline_handler: Option<InlineHandler>,
}

/// Frames for a pair that another slice serves.
struct PeerPort {
    /// To that slice; `None`: no other serves it now, and nothing is sent.
    server: Option<Arc<dyn FrameSender>>,
    /// Batches that were not sent yet; the last may grow.
    batches: VecDeque<Vec<u8>>,
    bytes: usize,
    credit: Credit,
    debt: Debt,
}

impl PeerPort {
    fn new(window: usize, server: Option<Arc<dyn FrameSender>>) -> Self {
        Self {
            server,
            batches: VecDeque::new(),
            bytes: 0,
            credit: Credit::new(window),
            debt: Debt::new(window),
        }
    }
}

struct HerePort {
    local: Mutex<LocalPort>,
    arrived: EventFd,
    /// Of the only pair: readable with `arrived`, and with the link while the pair reads that.
    ready: Option<Epoll>,
}

struct FarPort {
    peer: Mutex<PeerPort>,
}

/// A queue pair: its queue here and the link to its queue elsewhere; one of them is used at a time.
struct Port {
    here: HerePort,
    far: FarPort,
    is_here: AtomicBool,
}

impl Port {
    fn new(server: Option<Arc<dyn FrameSender>>, window: usize, is_lone: bool) -> io::Result<Self> {
        Ok(Self {
            here: HerePort::new(is_lone)?,
            is_here: AtomicBool::new(server.is_none()),
            far: FarPort {
                peer: Mutex::new(PeerPort::new(window, server)),
            },
        })
    }

    fn is_here(&self) -> bool {
        self.is_here.load(Ordering::SeqCst)
    }

    /// The way to the slice that serves the pair, if that is another one.
    fn far(&self) -> Option<&FarPort> {
        (!self.is_here()).then_some(&self.far)
    }
}

pub struct Switch {
    uplink: Mutex<Uplink>,
    ports: Vec<Port>,
    window: usize,
    wake: EventFd,
    /// What the thread waits for.
    events: Epoll,
    /// Held while a pair changes its server, and by the thread while it has a frame that it has
    /// read and not queued: none overtakes another.
    queueing: Mutex<()>,
    over: AtomicBool,
    gone: Gone,
}

impl Switch {
    /// Over this link, with a port for each pair: with the way to the slice that serves it, if that
    /// is another. What is under way to and from another slice is at most `window` bytes.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn new(
        link: Box<dyn Link>,
        servers: Vec<Option<Arc<dyn FrameSender>>>,
        window: usize,
        gone: Gone,
    ) -> io::Result<Arc<Self>> {
        let is_lone = servers.len() == 1;
        let port = |server| Port::new(server, window, is_lone);
        Ok(Arc::new(Self {
            uplink: Mutex::new(Uplink {
                link,
                reader: Reader::None,
                steering: Steering::new(),
                waiting: VecDeque::new(),
                usage: None,
                news: false,
                down: false,
            }),
            ports: servers.into_iter().map(port).collect::<io::Result<_>>()?,
            window,
            wake: EventFd::new(EFD_NONBLOCK)?,
            events: Epoll::new()?,
            queueing: Mutex::default(),
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

    /// A pair is served by another slice from now on, or here. The pair stands, and nothing of it
    /// is on its way from where it was. What waits for it goes along.
    pub fn serve(&self, pair: u16, server: Option<Arc<dyn FrameSender>>) {
        let Some(port) = self.ports.get(usize::from(pair)) else {
            return;
        };
        let _queueing = lock(&self.queueing);
        // What the link takes of the other slice's frames later is not reported any more.
        for (owed, _) in &mut lock(&self.uplink).waiting {
            *owed = owed.filter(|owed| *owed != pair);
        }
        let mut waiting: VecDeque<Vec<u8>> = VecDeque::new();
        {
            let mut local = lock(&port.here.local);
            waiting.append(&mut local.frames);
            (local.bytes, local.returned) = (0, 0);
        }
        let is_here = server.is_none();
        let anew = PeerPort::new(self.window, server);
        let before = std::mem::replace(&mut *lock(&port.far.peer), anew);
        for batch in &before.batches {
            let mut rest = &batch[..];
            waiting.extend(std::iter::from_fn(|| frames::next(&mut rest)).map(<[u8]>::to_vec));
        }
        port.is_here.store(is_here, Ordering::SeqCst);
        for frame in waiting {
            self.queue(pair, &frame);
        }
        self.choose_reader(&mut lock(&self.uplink));
        self.wake();
    }

    /// Has the thread read the link, or the only pair if it is served here and in use.
    fn choose_reader(&self, uplink: &mut Uplink) {
        let [port] = &self.ports[..] else {
            return;
        };
        let is_used = uplink.usage.is_some_and(|usage| usage.pairs > 0);
        let wanted = match port.is_here() && is_used {
            true => Reader::Pair,
            false => Reader::Thread,
        };
        if uplink.reader == Reader::None || uplink.reader == wanted {
            return;
        }
        let Some(ready) = &port.here.ready else {
            return;
        };
        let link = uplink.link.descriptor();
        let of_thread = |events| {
            let event = EpollEvent::new(events | EventSet::EDGE_TRIGGERED, LINK);
            self.events.ctl(ControlOperation::Modify, link, event)
        };
        let of_pair = |operation| {
            let event = EpollEvent::new(EventSet::IN, LINK);
            ready.ctl(operation, link, event)
        };
        let changed = match wanted {
            Reader::Pair => of_thread(EventSet::OUT).and_then(|()| of_pair(ControlOperation::Add)),
            _ => of_pair(ControlOperation::Delete)
                .and_then(|()| of_thread(EventSet::IN | EventSet::OUT)),
        };
        match changed {
            Ok(()) => uplink.reader = wanted,
            Err(error) => self.lose(uplink, &error),
        }
    }

    /// Frames for a pair that came here from another slice, which had them and did not give
    /// them to the guest. They are older than what waits here.
    ///
    /// # Errors
    /// They are malformed.
    pub fn take_back(&self, pair: u16, batch: &[u8]) -> Result<(), String> {
        frames::check(batch)?;
        let mut rest = batch;
        let returned = std::iter::from_fn(|| frames::next(&mut rest)).map(<[u8]>::to_vec);
        let returned: Vec<Vec<u8>> = returned.collect();
        if let Some(port) = self.ports.get(usize::from(pair)) {
            port.here.queue_first(returned);
        }
        self.wake();
        Ok(())
    }

    /// The driver uses this from now on. Waits for nothing.
    pub fn use_as(&self, usage: Usage) {
        let mut uplink = lock(&self.uplink);
        uplink.usage = Some(Usage {
            pairs: usage.pairs.min(self.ports.len() as u16),
            ..usage
        });
        uplink.news = true;
        self.choose_reader(&mut uplink);
        drop(uplink);
        if usage.pairs == 0 {
            self.forget();
        }
        self.wake();
    }

    /// Drops what waits for pairs: it was for a driver that is gone.
    fn forget(&self) {
        for port in &self.ports {
            {
                let mut local = lock(&port.here.local);
                local.frames.clear();
                (local.bytes, local.returned) = (0, 0);
            }
            let mut peer = lock(&port.far.peer);
            peer.batches.clear();
            peer.bytes = 0;
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
        let Some(far) = self.far(pair) else {
            return Err(format!(
                "it sent frames of pair {pair}, which another slice serves"
            ));
        };
        lock(&far.peer).debt.receive(batch.len())?;
        let mut rest = batch;
        let mut uplink = lock(&self.uplink);
        let mut sent = 0;
        while let Some(frame) = frames::next(&mut rest) {
            uplink.steering.transmitted(frame, pair);
            if !uplink.waiting.is_empty() || !self.transmit(&mut uplink, frame) {
                uplink.waiting.push_back((Some(pair), frame.to_vec()));
                continue;
            }
            sent += cost(frame.len());
        }
        drop(uplink);
        far.done_with(sent);
        Ok(())
    }

    /// A pair's slice accepted this many bytes of frames. Waits for nothing.
    ///
    /// # Errors
    /// It never got them, or the pair is not there.
    pub fn taken(&self, pair: u16, bytes: u64) -> Result<(), String> {
        let Some(far) = self.far(pair) else {
            return Err(format!(
                "it acknowledged frames of pair {pair}, which another slice \
            serves"
            ));
        };
        lock(&far.peer).credit.taken(bytes)?;
        far.send_on();
        Ok(())
    }

    /// The way to the other slice that serves a pair.
    fn far(&self, pair: u16) -> Option<&FarPort> {
        self.ports.get(usize::from(pair)).and_then(Port::far)
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
        let add = |descriptor, events, token| {
            let event = EpollEvent::new(events | EventSet::EDGE_TRIGGERED, token);
            self.events.ctl(ControlOperation::Add, descriptor, event)
        };
        add(self.wake.as_raw_fd(), EventSet::IN, WAKE)?;
        {
            let mut uplink = lock(&self.uplink);
            let link = uplink.link.descriptor();
            add(link, EventSet::IN | EventSet::OUT, LINK)?;
            uplink.reader = Reader::Thread;
            self.choose_reader(&mut uplink);
        }
        let mut events = [EpollEvent::default(); 2];
        let mut frame = vec![0; HEADER + FRAME_MAX];
        let mut more = true;
        while !self.over.load(Ordering::SeqCst) {
            let waited = self
                .events
                .wait(if more { 0 } else { LOOK_MS }, &mut events);
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
    pub(crate) fn flush(&self) {
        let mut uplink = lock(&self.uplink);
        let uplink = &mut *uplink;
        let used = uplink.usage.filter(|usage| usage.pairs > 0);
        if let (true, Some(usage)) = (std::mem::take(&mut uplink.news), used) {
            uplink.link.set_attached(true);
            if let Err(error) = uplink.link.set_features(usage.features) {
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
            if let Some(far) = pair.and_then(|pair| self.far(pair)) {
                far.done_with(cost(frame.len()));
            }
        }
        for port in &self.ports {
            if std::mem::take(&mut lock(&port.here.local).blocked) {
                // A full counter wakes as well.
                let _ = port.here.arrived.write(1);
            }
        }
    }

    /// Reads some frames and sends them on; whether there may be more.
    pub(crate) fn bring(&self, frame: &mut [u8]) -> bool {
        let mut more = true;
        let queueing = lock(&self.queueing);
        for _ in 0..BATCH {
            let (length, pair) = {
                let mut uplink = lock(&self.uplink);
                let is_others = uplink.down || uplink.reader == Reader::Pair;
                let (false, Some(usage)) = (is_others, uplink.usage) else {
                    more = false;
                    break;
                };
                match uplink.link.receive(frame) {
                    Ok(Some(_)) if usage.pairs == 0 => continue,
                    Ok(Some(length)) => {
                        let pair = uplink.steering.pair(&frame[..length], usage.pairs);
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
        drop(queueing);
        self.pass_on();
        more
    }

    /// Has pairs take what waits for them.
    pub(crate) fn pass_on(&self) {
        for port in &self.ports {
            match port.far() {
                None => port.here.hand_over(),
                Some(far) => far.send_on(),
            }
        }
    }

    /// Puts a frame where its pair gets it from, if there is room.
    pub(crate) fn queue(&self, pair: u16, frame: &[u8]) {
        let Some(port) = self.ports.get(usize::from(pair)) else {
            return;
        };
        match port.far() {
            None => port.here.queue(frame),
            Some(far) => far.queue(frame),
        }
    }
}

impl HerePort {
    fn new(is_lone: bool) -> io::Result<Self> {
        let arrived = EventFd::new(EFD_NONBLOCK)?;
        let ready = is_lone.then(|| -> io::Result<Epoll> {
            let ready = Epoll::new()?;
            let event = EpollEvent::new(EventSet::IN, WAKE);
            ready.ctl(ControlOperation::Add, arrived.as_raw_fd(), event)?;
            Ok(ready)
        });
        Ok(Self {
            local: Mutex::default(),
            ready: ready.transpose()?,
            arrived,
        })
    }

    /// What its thread waits for.
    fn descriptor(&self) -> RawFd {
        let ready = self.ready.as_ref().map(AsRawFd::as_raw_fd);
        ready.unwrap_or_else(|| self.arrived.as_raw_fd())
    }

    /// Has a frame wait for the pair, if there is room.
    fn queue(&self, frame: &[u8]) {
        let mut local = lock(&self.local);
        if local.bytes + frame.len() > QUEUE_MAX {
            return;
        }
        local.bytes += frame.len();
        local.frames.push_back(frame.to_vec());
        local.news = true;
    }

    /// Puts frames before those that wait, if there is room.
    fn queue_first(&self, frames: Vec<Vec<u8>>) {
        let mut local = lock(&self.local);
        let bytes: usize = frames.iter().map(Vec::len).sum();
        let first = local.returned;
        if local.bytes + bytes > QUEUE_MAX || first > local.frames.len() {
            return;
        }
        local.bytes += bytes;
        local.returned += frames.len();
        for (at, frame) in (first..).zip(frames) {
            local.frames.insert(at, frame);
        }
        local.news = true;
    }

    /// The pair takes the frames on this thread, where that needs no waiting, or on its own.
    fn hand_over(&self) {
        let inline_handler = {
            let mut local = lock(&self.local);
            if !std::mem::take(&mut local.news) {
                return;
            }
            local.inline_handler.clone()
        };
        if !inline_handler.is_some_and(|handler| handler.work(Cause::Ready(0))) {
            // A full counter wakes as well.
            let _ = self.arrived.write(1);
        }
    }
}

impl FarPort {
    /// Has a frame wait for the pair, if there is room.
    fn queue(&self, frame: &[u8]) {
        let mut peer = lock(&self.peer);
        let bytes = cost(frame.len());
        if peer.server.is_none() || peer.bytes + bytes > QUEUE_MAX {
            return;
        }
        peer.bytes += bytes;
        let fits = |batch: &Vec<u8>| batch.len() + bytes <= BATCH_MAX;
        if !peer.batches.back().is_some_and(fits) {
            peer.batches.push_back(Vec::new());
        }
        if let Some(batch) = peer.batches.back_mut() {
            frames::add(batch, frame);
        }
        let several = peer.batches.len() > 1;
        drop(peer);
        if several {
            self.send_on();
        }
    }

    /// Sends batches, as many as may be under way. Under the lock, which keeps their
    /// order; it never waits for the peer.
    fn send_on(&self) {
        let mut peer = lock(&self.peer);
        let Some(server) = peer.server.clone() else {
            return;
        };
        while let Some(batch) = peer.batches.front() {
            let bytes = batch.len();
            if !peer.credit.has_room(bytes) {
                return;
            }
            if let Some(batch) = peer.batches.pop_front() {
                peer.credit.send(bytes);
                peer.bytes -= bytes;
                server.frames(&batch);
            }
        }
    }

    /// The link has sent this many bytes of the slice's frames, which makes room. It is told
    /// under the lock, so that it hears of none once it serves the pair no more.
    fn done_with(&self, bytes: usize) {
        let mut peer = lock(&self.peer);
        let owed = peer.debt.take(bytes);
        if let Some((bytes, server)) = owed.zip(peer.server.as_ref()) {
            server.taken(bytes);
        }
    }
}

/// The link of a pair that is served where the network is.
struct PortLink {
    switch: Arc<Switch>,
    pair: u16,
    frame: Box<[u8]>,
}

impl PortLink {
    /// Its side of the port.
    fn here(&self) -> Option<&HerePort> {
        let port = self.switch.ports.get(usize::from(self.pair));
        port.map(|port| &port.here)
    }

    /// The next frame of the network's own link, where this pair reads it.
    fn read(&self, frame: &mut [u8]) -> Option<usize> {
        let mut uplink = lock(&self.switch.uplink);
        while uplink.reader == Reader::Pair && !uplink.down {
            match uplink.link.receive(frame) {
                Ok(Some(length)) if length <= HEADER => {}
                Ok(received) => return received,
                Err(error) => self.switch.lose(&mut uplink, &error),
            }
        }
        None
    }

    /// Gives a frame to the network's own link.
    fn pass(&self, frame: &[u8]) -> io::Result<()> {
        let mut uplink = lock(&self.switch.uplink);
        uplink.steering.transmitted(frame, self.pair);
        if uplink.waiting.is_empty() && self.switch.transmit(&mut uplink, frame) {
            return Ok(());
        }
        // Under the uplink's lock, so that the thread which finds room sees it.
        if let Some(here) = self.here() {
            lock(&here.local).blocked = true;
        }
        Err(ErrorKind::WouldBlock.into())
    }
}

impl Link for PortLink {
    fn descriptor(&self) -> RawFd {
        self.here().map_or(-1, HerePort::descriptor)
    }

    fn receive(&mut self, frame: &mut [u8]) -> io::Result<Option<usize>> {
        let Some(here) = self.here() else {
            return Ok(None);
        };
        let mut local = lock(&here.local);
        let Some(found) = local.frames.pop_front() else {
            drop(local);
            return Ok(self.read(frame));
        };
        local.bytes -= found.len();
        local.returned = local.returned.saturating_sub(1);
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
        self.pass(&self.frame[..length])
    }

    fn send_bytes(&mut self, frame: &[u8]) -> io::Result<()> {
        self.pass(frame)
    }

    fn give_back(&mut self, frame: Option<&[u8]>) -> bool {
        if let (Some(here), Some(frame)) = (self.here(), frame) {
            let mut local = lock(&here.local);
            local.bytes += frame.len();
            local.frames.push_front(frame.to_vec());
        }
        true
    }

    fn waiting(&mut self) -> Vec<Vec<u8>> {
        let Some(here) = self.here() else {
            return Vec::new();
        };
        // Where a thread reads the network, that has gone on while the machine stands.
        let mut frame = vec![0; HEADER + FRAME_MAX];
        for _ in 0..WAITING_MAX {
            let Some(length) = self.read(&mut frame) else {
                break;
            };
            here.queue(&frame[..length]);
        }
        lock(&here.local).frames.iter().cloned().collect()
    }

    fn put_first(&mut self, frames: Vec<Vec<u8>>) {
        if let Some(here) = self.here() {
            here.queue_first(frames);
        }
    }

    fn set_inline_handler(&mut self, handler: InlineHandler) {
        if let Some(here) = self.here() {
            lock(&here.local).inline_handler = Some(handler);
        }
    }
}
