//! A posted-interrupt descriptor (Intel SDM volume 3, posted-interrupt processing): the
//! pending interrupts of one vCPU, in atomics that other threads write without a lock.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::message::Message;
use super::waker::VcpuWaker;

/// Some `requested` bit may be set.
const FIXED: u32 = 1;
const NON_MASKABLE: u32 = 2;
const INIT: u32 = 4;
const START_UP: u32 = 8;
/// The start-up vector is in bits 8 to 15.
const START_UP_VECTOR: u32 = 0xff00;

/// Bits of an identity; above them is the epoch of the location that published it.
const IDENTITY_BITS: u32 = 16;
/// In an identity: the cluster model.
const CLUSTER: u16 = 1 << 8;
/// In an identity: x2APIC mode; bits 0 to 7 are the identifier, of which the logical
/// identity is made.
const EXTENDED: u16 = 1 << 10;
/// In an identity: the local APIC takes no interrupt that has a vector.
const REFUSES_FIXED: u16 = 1 << 9;

/// The logical identity of a local APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Logical {
    /// Any bit of LDR's upper byte.
    Flat(u8),
    /// The cluster in the upper half of that byte, and any bit of the lower half.
    Cluster(u8),
    /// x2APIC mode: derived from this identifier.
    Extended(u8),
}

/// LDR in x2APIC mode: the cluster of sixteen, and the bit in it (Intel SDM volume 3,
/// 11.12.10.2).
pub(super) fn extended_logical(id: u8) -> u32 {
    u32::from(id >> 4) << 16 | 1 << (id & 0xf)
}

/// Called with every new identity.
type Listener = Box<dyn Fn(u16) + Send + Sync>;

/// Events taken from a descriptor at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PendingEvents {
    /// Bit by vector.
    pub requested: [u32; 8],
    /// Bit by vector: the interrupt is level-triggered.
    pub level: [u32; 8],
    pub non_maskable: bool,
    pub init: bool,
    pub start_up: Option<u8>,
}

impl PendingEvents {
    /// The events as messages; an INIT comes before its start-up.
    pub fn messages(&self) -> Vec<Message> {
        let mut messages = Vec::new();
        messages.extend(self.init.then_some(Message::Init));
        let start_up = self.start_up.map(|vector| Message::StartUp { vector });
        messages.extend(start_up);
        messages.extend(self.non_maskable.then_some(Message::NonMaskable));
        let vectors = (0..=u8::MAX).filter(|vector| has(&self.requested, *vector));
        messages.extend(vectors.map(|vector| Message::Fixed {
            vector,
            level: has(&self.level, vector),
        }));
        messages
    }
}

fn has(words: &[u32; 8], vector: u8) -> bool {
    words[usize::from(vector >> 5)] & 1 << (vector & 31) != 0
}

/// One vCPU's pending events and logical identity, which every thread may use.
///
/// Posting never blocks: it sets the vector's bit, then the summary. The vCPU's thread takes
/// the summary first, then the bits. A bit that was set after the summary was taken sets the
/// summary again.
pub struct PostedInterrupts {
    requested: [AtomicU32; 8],
    level: [AtomicU32; 8],
    summary: AtomicU32,
    /// LDR's logical identity in bits 0 to 7, then [`CLUSTER`], [`REFUSES_FIXED`] and
    /// [`EXTENDED`]; above [`IDENTITY_BITS`] the epoch of the location that published it.
    identity: AtomicU64,
    /// Sends the identity to other slices, which have a copy of it.
    listener: OnceLock<Listener>,
    /// The arbitration priority: a lowest-priority interrupt goes to the lowest.
    priority: AtomicU32,
    /// Wakes the vCPU's thread after a post.
    pub waker: VcpuWaker,
}

impl Default for PostedInterrupts {
    fn default() -> Self {
        Self {
            requested: Default::default(),
            level: Default::default(),
            summary: AtomicU32::new(0),
            identity: AtomicU64::new(0),
            listener: OnceLock::new(),
            priority: AtomicU32::new(0),
            waker: VcpuWaker::default(),
        }
    }
}

impl PostedInterrupts {
    /// Posts a message; whether the local APIC accepts it. Does not wake the vCPU: a message
    /// that it must see at once goes through [`InterruptRouter::deliver`](super::InterruptRouter::deliver).
    pub fn post(&self, message: Message) -> bool {
        match message {
            Message::Fixed { .. } if !self.accepts_fixed() => return false,
            Message::Fixed { vector, level } => self.request(vector, level),
            Message::NonMaskable => {
                self.summary.fetch_or(NON_MASKABLE, Ordering::SeqCst);
            }
            Message::Init => {
                // A start-up that came before the INIT is void.
                let update = |old: u32| Some(old & !(START_UP | START_UP_VECTOR) | INIT);
                let _ = self
                    .summary
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, update);
            }
            Message::StartUp { vector } => {
                // The first of several counts: a CPU that started ignores more.
                let update = |old: u32| {
                    (old & START_UP == 0).then(|| old | START_UP | u32::from(vector) << 8)
                };
                let _ = self
                    .summary
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, update);
            }
        }
        true
    }

    fn request(&self, vector: u8, level: bool) {
        let (word, bit) = (usize::from(vector >> 5), 1 << (vector & 31));
        if level {
            self.level[word].fetch_or(bit, Ordering::SeqCst);
        } else {
            self.level[word].fetch_and(!bit, Ordering::SeqCst);
        }
        self.requested[word].fetch_or(bit, Ordering::SeqCst);
        self.summary.fetch_or(FIXED, Ordering::SeqCst);
    }

    /// Posts a message for a vCPU that is moving here. The slice that it comes from has checked
    /// that the local APIC accepts it. Does not wake the vCPU.
    pub(super) fn post_ahead(&self, message: Message) {
        match message {
            Message::Fixed { vector, level } => self.request(vector, level),
            other => drop(self.post(other)),
        }
    }

    /// Posts the pending events of a vCPU that has moved here. They are older than the
    /// events that were posted here. Does not wake the vCPU.
    pub(super) fn put_back(&self, messages: &[Message]) {
        let mut start_up = None;
        let mut init = 0;
        for message in messages {
            match *message {
                Message::Init => init = INIT,
                Message::StartUp { vector } => {
                    start_up = Some(START_UP | u32::from(vector) << 8);
                }
                other => self.post_ahead(other),
            }
        }
        // In one step: a newer INIT here voids an older start-up; an older INIT voids nothing.
        let update = |old: u32| {
            let first = start_up.filter(|_| old & INIT == 0);
            let kept = old & first.map_or(u32::MAX, |_| !START_UP_VECTOR);
            Some(kept | first.unwrap_or(0) | init)
        };
        let _ = self
            .summary
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, update);
    }

    /// Makes [`PostedInterrupts::has_pending`] true although no event is posted. Does not wake
    /// the vCPU.
    pub(super) fn announce(&self) {
        self.summary.fetch_or(FIXED, Ordering::SeqCst);
    }

    /// Whether events are pending.
    #[inline]
    pub fn has_pending(&self) -> bool {
        self.summary.load(Ordering::SeqCst) != 0
    }

    /// Takes all pending events. Only for the vCPU's thread, or while it is stopped.
    pub(super) fn take(&self) -> PendingEvents {
        let summary = self.summary.swap(0, Ordering::SeqCst);
        let mut pending = PendingEvents {
            non_maskable: summary & NON_MASKABLE != 0,
            init: summary & INIT != 0,
            start_up: (summary & START_UP != 0).then_some((summary >> 8) as u8),
            ..PendingEvents::default()
        };
        if summary & FIXED != 0 {
            for (word, cell) in self.requested.iter().enumerate() {
                if cell.load(Ordering::Relaxed) != 0 {
                    pending.requested[word] = cell.swap(0, Ordering::SeqCst);
                    pending.level[word] =
                        self.level[word].load(Ordering::SeqCst) & pending.requested[word];
                }
            }
        }
        pending
    }

    /// Takes all pending events, as messages that can be posted to another descriptor.
    pub fn take_messages(&self) -> Vec<Message> {
        self.take().messages()
    }

    /// Publishes the local APIC's logical identity, and whether it accepts interrupts that
    /// have a vector.
    pub(super) fn publish_identity(&self, logical: Logical, accepts_fixed: bool) {
        let mut identity = match logical {
            Logical::Flat(identity) => u16::from(identity),
            Logical::Cluster(identity) => u16::from(identity) | CLUSTER,
            Logical::Extended(id) => u16::from(id) | EXTENDED,
        };
        identity |= if accepts_fixed { 0 } else { REFUSES_FIXED };
        let replace = |old: u64| Some(epoch_of(old) << IDENTITY_BITS | u64::from(identity));
        let before = self
            .identity
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, replace);
        if before.is_ok_and(|before| identity_of(before) != identity)
            && let Some(listener) = self.listener.get()
        {
            listener(identity);
        }
    }

    /// What [`PostedInterrupts::set_identity`] takes: whom the local APIC answers to.
    pub fn identity(&self) -> u16 {
        identity_of(self.identity.load(Ordering::SeqCst))
    }

    /// Sets the identity that another slice published for its vCPU as of `epoch`. An identity
    /// of an older location changes nothing.
    pub fn set_identity(&self, identity: u16, epoch: u64) {
        let newer = |old: u64| {
            (epoch_of(old) <= epoch).then_some(epoch << IDENTITY_BITS | u64::from(identity))
        };
        let _ = self
            .identity
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, newer);
    }

    /// Sets the epoch of what the local APIC publishes from now on.
    pub(super) fn set_epoch(&self, epoch: u64) {
        let identity = self.identity.load(Ordering::SeqCst) as u16;
        self.set_identity(identity, epoch);
    }

    /// Sets what is called with every new identity, on the vCPU's thread. Once, before the
    /// vCPU runs.
    pub fn listen(&self, listener: Listener) {
        // Only the first listener counts.
        let _ = self.listener.set(listener);
    }

    /// Whether the local APIC accepts interrupts that have a vector.
    pub(super) fn accepts_fixed(&self) -> bool {
        identity_of(self.identity.load(Ordering::SeqCst)) & REFUSES_FIXED == 0
    }

    /// Publishes the local APIC's arbitration priority.
    pub(super) fn publish_priority(&self, priority: u8) {
        self.priority.store(u32::from(priority), Ordering::Relaxed);
    }

    /// The published arbitration priority.
    pub(super) fn priority(&self) -> u32 {
        self.priority.load(Ordering::Relaxed)
    }

    /// Whether a logical destination includes the local APIC (Intel SDM volume 3, 11.6.2.2
    /// and 11.12.10.2).
    pub(super) fn matches_logical(&self, destination: u32) -> bool {
        let whole = identity_of(self.identity.load(Ordering::SeqCst));
        let identity = whole as u8;
        if whole & EXTENDED != 0 {
            let own = extended_logical(identity);
            return own >> 16 == destination >> 16 && own & destination & 0xffff != 0;
        }
        let Ok(destination) = u8::try_from(destination) else {
            return false;
        };
        if whole & CLUSTER == 0 {
            return identity & destination != 0;
        }
        identity >> 4 == destination >> 4 && identity & destination & 0xf != 0
    }
}

fn identity_of(published: u64) -> u16 {
    published as u16
}

fn epoch_of(published: u64) -> u64 {
    published >> IDENTITY_BITS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_taken_once() {
        let posted = PostedInterrupts::default();
        assert!(!posted.has_pending());
        posted.post(Message::Fixed {
            vector: 0x41,
            level: true,
        });
        posted.post(Message::Fixed {
            vector: 0xff,
            level: false,
        });
        posted.post(Message::NonMaskable);
        let pending = posted.take();
        assert_eq!(pending.requested, [0, 0, 2, 0, 0, 0, 0, 1 << 31]);
        assert_eq!(pending.level, [0, 0, 2, 0, 0, 0, 0, 0]);
        assert!(pending.non_maskable && !pending.init);
        assert_eq!(posted.take(), PendingEvents::default());
    }

    #[test]
    fn the_last_trigger_mode_counts() {
        let posted = PostedInterrupts::default();
        for level in [true, false] {
            posted.post(Message::Fixed { vector: 64, level });
        }
        assert_eq!(posted.take().level, [0; 8]);
    }

    #[test]
    fn an_init_voids_the_start_up_before_it_and_the_first_start_up_after_it_counts() {
        let posted = PostedInterrupts::default();
        posted.post(Message::StartUp { vector: 1 });
        posted.post(Message::Init);
        posted.post(Message::StartUp { vector: 2 });
        posted.post(Message::StartUp { vector: 3 });
        let pending = posted.take();
        assert!(pending.init);
        assert_eq!(pending.start_up, Some(2));
    }

    #[test]
    fn events_become_messages_and_come_back_as_the_older_ones() {
        let messages = [
            Message::Init,
            Message::StartUp { vector: 1 },
            Message::NonMaskable,
            Message::Fixed {
                vector: 0x41,
                level: true,
            },
            Message::Fixed {
                vector: 0xff,
                level: false,
            },
        ];
        let start = |lies: &[Message], comes: &[Message]| {
            let posted = PostedInterrupts::default();
            for message in lies {
                posted.post_ahead(*message);
            }
            posted.put_back(comes);
            posted.take().messages()
        };
        assert_eq!(start(&[], &messages), messages);
        assert_eq!(start(&messages, &[]), messages);
        let (init, late) = (Message::Init, Message::StartUp { vector: 2 });
        assert_eq!(start(&[late], &[init]), [init, late]);
        assert_eq!(start(&[late], &messages[1..2]), messages[1..2]);
        assert_eq!(start(&[init, late], &messages[..2]), [init, late]);
        assert_eq!(start(&[init], &messages[1..2]), [init]);
    }

    #[test]
    fn an_identity_of_an_older_place_changes_nothing() {
        let posted = PostedInterrupts::default();
        posted.set_identity(0x01, 2);
        posted.set_identity(0x02, 1);
        assert!(posted.matches_logical(0x01) && !posted.matches_logical(0x02));
        posted.set_identity(0x02, 2);
        assert!(posted.matches_logical(0x02));
        posted.set_epoch(3);
        posted.set_identity(0x04, 2);
        assert!(posted.matches_logical(0x02));
        posted.publish_identity(Logical::Flat(0x08), false);
        posted.set_identity(0x04, 2);
        assert!(posted.matches_logical(0x08) && !posted.accepts_fixed());
    }

    #[test]
    fn logical_destinations_match_as_the_model_says() {
        let posted = PostedInterrupts::default();
        assert!(!posted.matches_logical(0x0f));
        posted.publish_identity(Logical::Flat(0x24), true);
        assert!(posted.matches_logical(0x20) && posted.matches_logical(0x04));
        assert!(!posted.matches_logical(0x10));
        assert!(!posted.matches_logical(0x124), "of 32 bits");
        posted.publish_identity(Logical::Cluster(0x24), true);
        assert!(posted.matches_logical(0x24) && posted.matches_logical(0x2c));
        assert!(!posted.matches_logical(0x14) && !posted.matches_logical(0x21));
        // Identifier 0x24: cluster 2, bit 4.
        posted.publish_identity(Logical::Extended(0x24), true);
        assert!(posted.matches_logical(0x2_0010) && posted.matches_logical(0x2_ffff));
        assert!(!posted.matches_logical(0x2_ffef) && !posted.matches_logical(0x1_0010));
    }
}
