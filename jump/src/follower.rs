//! When a vCPU asks to go to the slice that has its pages: one vCPU's part, without clocks
//! and links.
//!
//! ```text
//!            the policy says so                 it leaves
//!  Watching ───────────────────▶ Asked{to} ───────────────▶ (on the other slice: Watching)
//!     ▲                             │ no move within ANSWER_WAIT
//!     └──── time passes ──── Quiet ◀┘
//!                              ▲
//!   a command moved the vCPU ──┘
//! ```
//!
//! The policy ([`Policy`]) is the one of programs. What differs here:
//!
//! - the page of the fault is fetched in any case, because an instruction cannot wait for
//!   a move; so each instruction makes progress, wherever its pages are;
//! - a request may be refused without an answer, and then the vCPU asks later, and the more
//!   rarely the more often it was refused;
//! - a fault that moved no bytes is no reason to go: other slices only gave up copies;
//! - faults that are rare fade, because a kernel has some always.
//!
//! Invariants: at most one request is open; while one is open, or the follower is quiet,
//! nothing is learned; after a command's move nothing is asked for [`COMMAND_STANDS`].

#[cfg(test)]
mod simulation;

use core::time::Duration;

use zerocopy::IntoBytes;

use super::{Decision, JUMP_AUTO, JUMP_FIXED, Policy, PolicyError, Price};

/// Faults after which a trial is judged: most of the first ones after a move are on the
/// vCPU's stack and on what the kernel keeps for its processor.
const TRIAL_FAULTS: u32 = 64;
/// A request that was not carried out after this time was refused.
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// After a refusal the vCPU asks no more for this time, doubled with each further one.
const REFUSAL_WAIT: Duration = Duration::from_secs(1);
/// The longest of these times, as a power of two.
const REFUSAL_DOUBLINGS_MAX: u32 = 6;
/// A move by a command stands for this time.
const COMMAND_STANDS: Duration = Duration::from_secs(10);
/// What a move takes, in typical waits for a page.
const MOVE_WAITS: u64 = 4;
/// With this many times the typical wait between them, faults are rare.
const RARE_WAITS: u64 = 16;
const PAGE_BYTES: u64 = 4096;
/// Most pages of one fault that count: no single fault begins a trial and ends it.
const PAGES_MAX: u64 = TRIAL_FAULTS as u64 / 2;
/// Bytes of a policy in a message.
const POLICY_BYTES: usize = size_of::<Policy>();
/// Bytes that go along with a vCPU: whether it asked for the move, and the policy.
pub const LUGGAGE_BYTES: usize = 1 + POLICY_BYTES;

/// Whether a vCPU that left with this luggage had asked for the move.
pub fn is_own_move(luggage: &[u8]) -> bool {
    luggage.first() == Some(&1)
}

/// A remote fault of the vCPU, which is over.
#[derive(Clone, Copy, Debug)]
pub struct OwnFault {
    /// The slice whose message brought the page; `None`: not known.
    pub from: Option<usize>,
    /// Bytes of this page and of those that were fetched together with it.
    pub bytes: u64,
    /// Nanoseconds of processor time that the vCPU used since the fault before.
    pub busy_ns: u64,
    /// Nanoseconds that it waited.
    pub waited_ns: u64,
    /// When it was over, since the slice was made.
    pub now: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Watching,
    Asked { to: usize, since: Duration },
    Quiet { until: Duration },
}

/// How often a vCPU moved by itself, and why not; counts of one slice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FollowCounts {
    /// Moves to a slice with many of the vCPU's pages.
    pub jumps: u64,
    /// Moves back, after a trial that did not pay.
    pub returns: u64,
    /// Requests that were not carried out.
    pub refused: u64,
}

/// One vCPU on one slice.
#[derive(Debug)]
pub struct Follower {
    me: usize,
    slices: usize,
    policy: Policy,
    stage: Stage,
    /// Nanoseconds that a fault takes, on average over the last few.
    typical_wait_ns: u64,
    /// The open request leads back to where the policy came from.
    is_return: bool,
    refusals: u32,
    pub counts: FollowCounts,
}

impl Follower {
    /// A vCPU that starts on slice `me`, or comes there later. `count`: it asks after this
    /// many remote faults; `None`: it learns where it pays.
    pub fn new(count: Option<u32>, me: usize, slices: usize) -> Self {
        let mut policy = match count {
            Some(count) => Policy::new(JUMP_FIXED, count),
            None => Policy::new(JUMP_AUTO, 0).with_trials(TRIAL_FAULTS),
        };
        policy.stay(me);
        Self {
            me,
            slices,
            policy,
            stage: Stage::Watching,
            typical_wait_ns: 0,
            is_return: false,
            refusals: 0,
            counts: FollowCounts::default(),
        }
    }

    /// The slice to which the vCPU asks to go after this fault.
    pub fn fault(&mut self, fault: OwnFault) -> Option<usize> {
        self.pass(fault.now);
        if self.stage != Stage::Watching {
            return None;
        }
        self.policy.waited(fault.waited_ns);
        self.typical_wait_ns = match self.typical_wait_ns {
            0 => fault.waited_ns,
            typical => typical - typical / 16 + fault.waited_ns.min(3 * typical).div_ceil(16),
        };
        let price = Price {
            jump: MOVE_WAITS * self.typical_wait_ns,
            pages: 0,
        };
        let Some(from) = fault
            .from
            .filter(|from| fault.bytes > 0 && *from != self.me)
        else {
            self.policy.stray_fault(fault.busy_ns, price);
            return None;
        };
        if fault.busy_ns > RARE_WAITS * self.typical_wait_ns {
            self.policy.fade();
        }
        let base = self.policy.base();
        let pages = fault.bytes.div_ceil(PAGE_BYTES).min(PAGES_MAX) as u32;
        let (policy, busy_ns) = (&mut self.policy, fault.busy_ns);
        match policy.fault_with_others(from, pages, busy_ns, price) {
            Decision::Pull => None,
            Decision::Jump(to) => {
                self.is_return = to == base;
                let since = fault.now;
                self.stage = Stage::Asked { to, since };
                Some(to)
            }
        }
    }

    /// Whether pages of `slice` had better come to the vCPU: it does not leave, and has learned
    /// that going there does not pay.
    pub fn stays_away_from(&self, slice: usize) -> bool {
        let leaves = matches!(self.stage, Stage::Asked { .. });
        !leaves && self.policy.stays_away_from(slice)
    }

    /// Time passes: an old request was refused, a quiet time ends.
    fn pass(&mut self, now: Duration) {
        match self.stage {
            Stage::Asked { since, .. } if now.saturating_sub(since) > ANSWER_WAIT => {
                self.counts.refused += 1;
                let wait = REFUSAL_WAIT * (1 << self.refusals.min(REFUSAL_DOUBLINGS_MAX));
                self.refusals += 1;
                self.policy.stay(self.me);
                self.stage = Stage::Quiet { until: now + wait };
            }
            Stage::Quiet { until } if now >= until => {
                self.policy.stay(self.me);
                self.stage = Stage::Watching;
            }
            _ => {}
        }
    }

    /// The vCPU leaves for slice `to`. What goes along with it.
    pub fn leave(&mut self, to: usize) -> [u8; LUGGAGE_BYTES] {
        let is_own = matches!(self.stage, Stage::Asked { to: asked, .. } if asked == to);
        match (is_own, self.is_return) {
            (true, true) => self.counts.returns += 1,
            (true, false) => self.counts.jumps += 1,
            (false, _) => self.policy.stay(to),
        }
        self.refusals = 0;
        self.stage = Stage::Watching;
        let mut luggage = [0; LUGGAGE_BYTES];
        luggage[0] = is_own.into();
        luggage[1..].copy_from_slice(self.policy.as_bytes());
        luggage
    }

    /// The vCPU comes with what [`Follower::leave`] returned at its source.
    ///
    /// # Errors
    /// The bytes were not made there.
    pub fn arrive(&mut self, bytes: &[u8], now: Duration) -> Result<(), PolicyError> {
        let (is_own, policy) = match bytes.split_first() {
            Some((0, policy)) => (false, policy),
            Some((1, policy)) => (true, policy),
            _ => return Err(PolicyError::Length(bytes.len())),
        };
        self.policy.decode(policy, self.slices)?;
        if self.policy.place() != self.me {
            self.policy.stay(self.me);
        }
        self.refusals = 0;
        self.stage = match is_own {
            true => Stage::Watching,
            false => Stage::Quiet {
                until: now + COMMAND_STANDS,
            },
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT_NS: u64 = 100_000;

    const AUTO: Option<u32> = None;

    fn follower(count: Option<u32>, me: usize) -> Follower {
        Follower::new(count, me, 2)
    }

    fn fault(from: usize, now: Duration) -> OwnFault {
        OwnFault {
            from: Some(from),
            bytes: 4096,
            busy_ns: WAIT_NS / 10,
            waited_ns: WAIT_NS,
            now,
        }
    }

    /// Faults until it asks; how many there were.
    fn until_it_asks(follower: &mut Follower, now: &mut Duration, from: usize) -> u32 {
        for count in 1..1_000_000 {
            *now += Duration::from_nanos(WAIT_NS);
            if let Some(to) = follower.fault(fault(from, *now)) {
                assert_eq!(to, from);
                return count;
            }
        }
        panic!("it never asks");
    }

    #[test]
    fn a_number_is_the_number_of_faults() {
        let (mut here, mut now) = (follower(Some(32), 0), Duration::ZERO);
        assert_eq!(until_it_asks(&mut here, &mut now, 1), 32);
        assert!(here.fault(fault(1, now)).is_none(), "one request at a time");
        let mut there = follower(Some(32), 1);
        let luggage = here.leave(1);
        assert!(is_own_move(&luggage));
        there.arrive(&luggage, now).unwrap();
        assert_eq!(here.counts.jumps, 1);
        assert_eq!(until_it_asks(&mut there, &mut now, 0), 32);
    }

    #[test]
    fn nothing_comes_to_a_vcpu_that_leaves() {
        let mut now = Duration::ZERO;
        let [mut here, mut there] = [0, 1].map(|me| Follower::new(AUTO, me, 3));
        // Trials that do not pay, on both of the other slices.
        for slice in [1, 2] {
            until_it_asks(&mut here, &mut now, slice);
            assert!(!here.stays_away_from(1) && !here.stays_away_from(2));
            there.me = slice;
            there.arrive(&here.leave(slice), now).unwrap();
            until_it_asks(&mut there, &mut now, 0);
            // The policy is at its base already, and the vCPU is not.
            assert!(!there.stays_away_from(slice));
            here.arrive(&there.leave(0), now).unwrap();
            assert!(here.stays_away_from(slice));
        }
    }

    #[test]
    fn a_refusal_is_a_move_that_does_not_come_and_the_pauses_double() {
        let (mut here, mut now) = (follower(AUTO, 0), Duration::ZERO);
        until_it_asks(&mut here, &mut now, 1);
        let mut pauses = Vec::new();
        for refused in 1..=9 {
            let asked = now;
            until_it_asks(&mut here, &mut now, 1);
            assert_eq!(here.counts.refused, refused);
            pauses.push((now - asked).as_secs());
        }
        assert_eq!(pauses, [2, 3, 5, 9, 17, 33, 65, 65, 65]);
    }

    #[test]
    fn a_move_by_command_stands_for_a_while() {
        let (mut here, mut now) = (follower(AUTO, 0), Duration::ZERO);
        let mut there = follower(AUTO, 1);
        let luggage = here.leave(1);
        assert!(!is_own_move(&luggage));
        there.arrive(&luggage, now).unwrap();
        assert_eq!(here.counts, FollowCounts::default());
        until_it_asks(&mut there, &mut now, 0);
        assert!(now >= COMMAND_STANDS, "{now:?}");
    }

    #[test]
    fn a_command_to_another_slice_overrides_an_open_request() {
        let mut here = Follower::new(AUTO, 0, 3);
        let mut now = Duration::ZERO;
        until_it_asks(&mut here, &mut now, 1);
        let mut there = Follower::new(AUTO, 2, 3);
        there.arrive(&here.leave(2), now).unwrap();
        assert!(matches!(there.stage, Stage::Quiet { .. }));
        assert_eq!(there.policy.place(), 2);
    }

    #[test]
    fn upgrades_and_rare_faults_are_no_reason() {
        let (mut here, mut now) = (follower(AUTO, 0), Duration::ZERO);
        for _ in 0..10_000 {
            now += Duration::from_millis(10);
            let upgrade = OwnFault {
                bytes: 0,
                ..fault(1, now)
            };
            assert_eq!(here.fault(upgrade), None);
            let rare = OwnFault {
                busy_ns: 20 * WAIT_NS,
                ..fault(1, now)
            };
            assert_eq!(here.fault(rare), None);
        }
    }

    #[test]
    fn bytes_of_no_follower_are_refused() {
        let (mut here, mut there) = (follower(AUTO, 0), follower(AUTO, 1));
        let bytes = here.leave(1);
        for length in 0..bytes.len() {
            assert!(there.arrive(&bytes[..length], Duration::ZERO).is_err());
        }
        let fixed = follower(Some(3), 0).leave(1);
        let error = there.arrive(&fixed, Duration::ZERO).unwrap_err();
        assert_eq!(error.to_string(), "the policy is of kind 1 and not 2");
        assert!(there.arrive(&bytes, Duration::ZERO).is_ok());
    }
}
