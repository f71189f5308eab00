//! Where messages for one vCPU wait until it looks: a mailbox of atomics.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::doorbell::Doorbell;
use super::message::Message;

/// Some `requested` bit may be set.
const FIXED: u32 = 1;
const NON_MASKABLE: u32 = 2;
const INIT: u32 = 4;
const START_UP: u32 = 8;
/// The start-up vector is in bits 8 to 15.
const START_UP_VECTOR: u32 = 0xff00;

/// What lay in the mailbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Letters {
    /// By vector.
    pub requested: [u32; 8],
    /// Which of those are level-triggered.
    pub level: [u32; 8],
    pub non_maskable: bool,
    pub init: bool,
    pub start_up: Option<u8>,
}

/// One for each vCPU: what others may touch of its local APIC.
///
/// Posting never waits: a vector's bit, then the summary. The vCPU's thread
/// takes the summary first, then the bits, so a bit whose summary it missed is
/// announced again.
pub struct Seat {
    requested: [AtomicU32; 8],
    level: [AtomicU32; 8],
    summary: AtomicU32,
    /// LDR's identity in bits 0 to 7; bit 8: cluster model.
    logical: AtomicU32,
    /// The arbitration priority: who has less gets a lowest-priority interrupt.
    priority: AtomicU32,
    /// The local APIC is disabled: it takes no interrupt that has a vector.
    refuses_fixed: AtomicBool,
    /// Wakes the vCPU.
    pub doorbell: Doorbell,
}

impl Default for Seat {
    fn default() -> Self {
        Self {
            requested: Default::default(),
            level: Default::default(),
            summary: AtomicU32::new(0),
            logical: AtomicU32::new(0),
            priority: AtomicU32::new(0),
            refuses_fixed: AtomicBool::new(false),
            doorbell: Doorbell::default(),
        }
    }
}

impl Seat {
    /// Leaves a message; whether it was taken. Does not ring.
    pub(crate) fn post(&self, message: Message) -> bool {
        match message {
            Message::Fixed { .. } if !self.accepts_fixed() => return false,
            Message::Fixed { vector, level } => {
                let (word, bit) = (usize::from(vector >> 5), 1 << (vector & 31));
                if level {
                    self.level[word].fetch_or(bit, Ordering::SeqCst);
                } else {
                    self.level[word].fetch_and(!bit, Ordering::SeqCst);
                }
                self.requested[word].fetch_or(bit, Ordering::SeqCst);
                self.summary.fetch_or(FIXED, Ordering::SeqCst);
            }
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

    /// Has the vCPU look, though nothing lies there. Does not ring.
    pub(super) fn announce(&self) {
        self.summary.fetch_or(FIXED, Ordering::SeqCst);
    }

    /// Whether something lies there.
    pub fn has_letters(&self) -> bool {
        self.summary.load(Ordering::SeqCst) != 0
    }

    /// Empties it. For the vCPU's thread alone.
    pub(super) fn take(&self) -> Letters {
        let summary = self.summary.swap(0, Ordering::SeqCst);
        let mut letters = Letters {
            non_maskable: summary & NON_MASKABLE != 0,
            init: summary & INIT != 0,
            start_up: (summary & START_UP != 0).then_some((summary >> 8) as u8),
            ..Letters::default()
        };
        if summary & FIXED != 0 {
            for (word, cell) in self.requested.iter().enumerate() {
                if cell.load(Ordering::Relaxed) != 0 {
                    letters.requested[word] = cell.swap(0, Ordering::SeqCst);
                    letters.level[word] =
                        self.level[word].load(Ordering::SeqCst) & letters.requested[word];
                }
            }
        }
        letters
    }

    /// The local APIC says who it is in logical mode.
    pub(super) fn publish_logical(&self, identity: u8, cluster: bool) {
        let value = u32::from(identity) | u32::from(cluster) << 8;
        self.logical.store(value, Ordering::Release);
    }

    /// The local APIC says whether it takes interrupts that have a vector.
    pub(super) fn publish_accepts_fixed(&self, accepts: bool) {
        self.refuses_fixed.store(!accepts, Ordering::SeqCst);
    }

    /// Whether it does.
    pub(super) fn accepts_fixed(&self) -> bool {
        !self.refuses_fixed.load(Ordering::SeqCst)
    }

    /// The local APIC says how busy it is.
    pub(super) fn publish_priority(&self, priority: u8) {
        self.priority.store(u32::from(priority), Ordering::Relaxed);
    }

    /// How busy it said it is.
    pub(super) fn priority(&self) -> u32 {
        self.priority.load(Ordering::Relaxed)
    }

    /// Whether a logical destination names it (Intel SDM volume 3, 11.6.2.2).
    pub(super) fn matches_logical(&self, destination: u8) -> bool {
        let logical = self.logical.load(Ordering::Acquire);
        let identity = logical as u8;
        if destination == 0xff {
            return true;
        }
        if logical & 1 << 8 == 0 {
            return identity & destination != 0;
        }
        identity >> 4 == destination >> 4 && identity & destination & 0xf != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_are_taken_once() {
        let seat = Seat::default();
        assert!(!seat.has_letters());
        seat.post(Message::Fixed {
            vector: 0x41,
            level: true,
        });
        seat.post(Message::Fixed {
            vector: 0xff,
            level: false,
        });
        seat.post(Message::NonMaskable);
        let letters = seat.take();
        assert_eq!(letters.requested, [0, 0, 2, 0, 0, 0, 0, 1 << 31]);
        assert_eq!(letters.level, [0, 0, 2, 0, 0, 0, 0, 0]);
        assert!(letters.non_maskable && !letters.init);
        assert_eq!(seat.take(), Letters::default());
    }

    #[test]
    fn the_last_trigger_mode_counts() {
        let seat = Seat::default();
        for level in [true, false] {
            seat.post(Message::Fixed { vector: 64, level });
        }
        assert_eq!(seat.take().level, [0; 8]);
    }

    #[test]
    fn an_init_voids_the_start_up_before_it_and_the_first_start_up_after_it_counts() {
        let seat = Seat::default();
        seat.post(Message::StartUp { vector: 1 });
        seat.post(Message::Init);
        seat.post(Message::StartUp { vector: 2 });
        seat.post(Message::StartUp { vector: 3 });
        let letters = seat.take();
        assert!(letters.init);
        assert_eq!(letters.start_up, Some(2));
    }

    #[test]
    fn logical_destinations_match_as_the_model_says() {
        let seat = Seat::default();
        assert!(!seat.matches_logical(0x0f));
        assert!(seat.matches_logical(0xff));
        seat.publish_logical(0x24, false);
        assert!(seat.matches_logical(0x20) && seat.matches_logical(0x04));
        assert!(!seat.matches_logical(0x10));
        seat.publish_logical(0x24, true);
        assert!(seat.matches_logical(0x24) && seat.matches_logical(0x2c));
        assert!(!seat.matches_logical(0x14) && !seat.matches_logical(0x21));
    }
}
