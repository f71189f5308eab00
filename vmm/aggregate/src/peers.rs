//! The links to the other slices: one for each, with a thread that reads it.
//!
//! Every slice sends a beat several times in a lease, so that silence means death:
//! who hears nothing of a peer for a lease, or finds the link ended, calls it lost,
//! and the machine ends. Before its first word a peer has longer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use weft_dsm::NodeId;
use weft_wire::Header;
use weft_wire::frame::{HEADER_BYTES, KINDS_DSM};
use weft_wire::halves::{Receiver, Sender};

use super::delay::DelayedSender;
use super::message::SliceMessage;
use weft_coherent_memory::{SharedMemory, Transport};

/// Beats in a lease.
const BEATS: u32 = 5;
/// Longest silence of a slice that has not spoken yet: it is being put together, and
/// its host may be busy; hosts start theirs one after the other, each within 20 s.
/// One that dies meanwhile closes its links.
const START: Duration = Duration::from_secs(25);
/// Longest wait for the thread that beats to see the end.
const LOOK: Duration = Duration::from_millis(100);

/// Handles received messages. Wakeup on the thread that reads the link from `from`; must
/// not wait for a page, a vCPU or another slice.
pub(super) trait MessageHandler: Send + Sync {
    fn handle(&self, from: usize, message: SliceMessage);
}

/// What sends to one slice. A link is delayed only for tests; which of the two it is
/// costs a send no more than whether there is a link.
enum LinkSender {
    Direct(Sender),
    Delayed(Box<DelayedSender>),
}

impl LinkSender {
    fn sender(&self) -> &Sender {
        match self {
            Self::Direct(sender) => sender,
            Self::Delayed(delayed) => delayed.sender(),
        }
    }
}

/// The links of one slice.
pub struct Peers {
    me: usize,
    /// By slice; none for this one.
    links: Vec<Option<LinkSender>>,
    lease: Duration,
    /// Wakeup once for the first peer that is lost, with the reason.
    on_loss: OnceLock<Box<dyn Fn(usize, String) + Send + Sync>>,
    over: AtomicBool,
    sent_frames: AtomicU64,
    received_frames: AtomicU64,
    /// Headers and payloads.
    received_bytes: AtomicU64,
}

impl Peers {
    /// Over these links. Nothing is read yet.
    pub(super) fn new(
        me: usize,
        senders: Vec<Option<Sender>>,
        lease: Duration,
        delay_max: Duration,
    ) -> Arc<Self> {
        let link = |sender| match delay_max {
            Duration::ZERO => LinkSender::Direct(sender),
            _ => LinkSender::Delayed(Box::new(DelayedSender::new(sender, delay_max))),
        };
        let links = senders.into_iter();
        Arc::new(Self {
            me,
            links: links.map(|sender| sender.map(link)).collect(),
            lease,
            on_loss: OnceLock::new(),
            over: AtomicBool::new(false),
            sent_frames: AtomicU64::new(0),
            received_frames: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
        })
    }

    /// Says who hears of a loss: on the thread that reads the link, or on one that
    /// waited for an answer, with no lock held.
    pub(super) fn when_lost(&self, on_loss: Box<dyn Fn(usize, String) + Send + Sync>) {
        // A second one is a mistake that the first survives.
        let _ = self.on_loss.set(on_loss);
    }

    /// The other slices.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.links.len()).filter(move |slice| *slice != me)
    }

    /// Sends a message to `slice`. A link that ended is heard of where it is read: who
    /// sends may hold a lock that the hearing of a loss wants.
    pub(super) fn send(&self, slice: usize, message: &SliceMessage) {
        let (header, payload) = message.encode();
        self.send_frame(slice, &header, &[payload]);
    }

    /// Sends a message to all other slices.
    pub(super) fn broadcast(&self, message: &SliceMessage) {
        for slice in self.others() {
            self.send(slice, message);
        }
    }

    /// Sends a message to all other slices at once. Called before the threads exist that
    /// send delayed messages.
    pub(super) fn broadcast_first(&self, message: &SliceMessage) {
        let (header, payload) = message.encode();
        for link in self.links.iter().flatten() {
            if link.sender().send(&header, &[payload]).is_err() {
                link.sender().close();
            }
        }
    }

    /// Sends a frame to `slice`; as [`Peers::send`].
    pub(super) fn send_frame(&self, slice: usize, header: &Header, parts: &[&[u8]]) {
        let Some(Some(link)) = self.links.get(slice) else {
            // Messages and the protocol name slices that there are, and not this one.
            debug_assert!(false, "no link from slice {} to {slice}", self.me);
            return;
        };
        self.sent_frames.fetch_add(1, Ordering::Relaxed);
        let sent = match link {
            LinkSender::Direct(sender) => sender.send(header, parts),
            LinkSender::Delayed(delayed) => delayed.send(header, parts),
        };
        if sent.is_err() {
            link.sender().close();
        }
    }

    /// Whether frames to `slice` are delayed: then the link needs a thread that sends them.
    pub(super) fn is_delayed(&self, slice: usize) -> bool {
        matches!(self.links.get(slice), Some(Some(LinkSender::Delayed(_))))
    }

    /// Sends to `slice` what was delayed, until the link ends.
    pub(super) fn send_delayed(&self, slice: usize) {
        if let Some(Some(LinkSender::Delayed(delayed))) = self.links.get(slice)
            && delayed.send_until_over().is_err()
        {
            delayed.sender().close();
        }
    }

    /// `slice` is gone, or broken. Wakeup with no lock held: see [`Peers::when_lost`].
    pub(super) fn lost(&self, slice: usize, reason: &str) {
        if !self.over.load(Ordering::SeqCst)
            && let Some(on_loss) = self.on_loss.get()
        {
            on_loss(slice, reason.to_owned());
        }
    }

    /// The machine is over: links end, threads come back.
    pub(super) fn close(&self) {
        self.over.store(true, Ordering::SeqCst);
        for link in self.links.iter().flatten() {
            if let LinkSender::Delayed(delayed) = link {
                delayed.end();
            }
            link.sender().close();
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Reads the link from `from` until it ends.
    pub(super) fn read(
        &self,
        from: usize,
        mut receiver: Receiver,
        memory: &SharedMemory,
        handler: &dyn MessageHandler,
    ) {
        let node = NodeId(from as u8);
        let mut patience = self.lease.max(START);
        while !self.is_over() {
            let received = receiver.receive(patience);
            if let Ok(Some(frame)) = &received {
                let bytes = HEADER_BYTES + frame.payload.len();
                self.received_frames.fetch_add(1, Ordering::Relaxed);
                self.received_bytes
                    .fetch_add(bytes as u64, Ordering::Relaxed);
            }
            let outcome = match received {
                Ok(Some(frame)) if KINDS_DSM.contains(&frame.header.kind) => memory
                    .receive(node, &frame.header, frame.payload)
                    .map_err(|error| error.to_string()),
                Ok(Some(frame)) => SliceMessage::decode(&frame.header, frame.payload)
                    .map(|message| handler.handle(from, message))
                    .map_err(|error| error.to_string()),
                Ok(None) => Err(format!("silent for {} s", patience.as_secs_f64())),
                Err(error) => Err(error.to_string()),
            };
            if let Err(reason) = outcome {
                return self.lost(from, &reason);
            }
            patience = self.lease;
        }
    }

    /// Sends what the kernel did not take at once, until the link ends.
    pub(super) fn flush(&self, slice: usize) {
        if let Some(Some(link)) = self.links.get(slice) {
            link.sender().flush_forever();
        }
    }

    /// Tells all others, until the machine is over, that this slice lives.
    pub(super) fn beat(&self) {
        while !self.is_over() {
            self.broadcast(&SliceMessage::Beat);
            let mut left = self.lease / BEATS;
            while !left.is_zero() && !self.is_over() {
                let step = left.min(LOOK);
                std::thread::sleep(step);
                left -= step;
            }
        }
    }

    /// Frames and bytes to and from all others, keyed by name.
    pub(super) fn traffic(&self) -> [(&'static str, u64); 4] {
        let sent = self
            .links
            .iter()
            .flatten()
            .map(|link| link.sender().traffic())
            .sum();
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        [
            ("sent-bytes", sent),
            ("received-bytes", load(&self.received_bytes)),
            ("sent-messages", load(&self.sent_frames)),
            ("received-messages", load(&self.received_frames)),
        ]
    }
}

impl Transport for Peers {
    fn transmit(&self, to: NodeId, header: &Header, parts: &[&[u8]]) {
        self.send_frame(to.index(), header, parts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;
    use std::thread::spawn;

    use weft_dsm::{Config, ManagerOf};
    use weft_vcpu::{Access, Memory};
    use weft_wire::halves::{HalvesConfig, open};

    use weft_coherent_memory::SharedMemoryOptions;
    use weft_guest_memory::Ram;

    struct Nowhere;

    impl MessageHandler for Nowhere {
        fn handle(&self, _: usize, _: SliceMessage) {}
    }

    /// A sender may hold a lock that the handler of a loss needs.
    #[test]
    fn a_peer_that_went_is_heard_of_where_it_is_read() {
        let (near, far) = UnixStream::pair().unwrap();
        let lease = Duration::from_secs(20);
        let (sender, receiver) = open(HalvesConfig {
            socket: near.into(),
            keys: None,
            lease,
            spin: Duration::ZERO,
            name: "test".into(),
        })
        .unwrap();
        let peers = Peers::new(0, vec![None, Some(sender)], lease, Duration::ZERO);
        let memory = SharedMemory::new(SharedMemoryOptions {
            ram: Ram::new(8 << 20).unwrap(),
            config: Config::new(NodeId(0), 2, ManagerOf::Fixed(NodeId(1))),
            budget: weft_coherent_memory::Budget::UNLIMITED,
            transport: peers.clone(),
            lease,
            on_failure: Box::new(|reason| panic!("{reason}")),
        });
        let (report, lost) = channel();
        let ended = memory.clone();
        peers.when_lost(Box::new(move |slice, _| {
            ended.end_waits();
            report.send(slice).unwrap();
        }));
        drop(far);
        let vcpu = memory.clone();
        let vcpu = spawn(move || vcpu.acquire(0x4000, Access::Write).is_ok());
        // It has asked, or found the link ended, before anybody reads.
        while memory.counters.writes.load(Ordering::SeqCst) == 0 && !vcpu.is_finished() {
            std::thread::yield_now();
        }
        let reader = spawn(move || peers.read(1, receiver, &memory, &Nowhere));
        assert_eq!(lost.recv_timeout(Duration::from_secs(10)), Ok(1));
        assert!(vcpu.join().unwrap());
        reader.join().unwrap();
    }
}
