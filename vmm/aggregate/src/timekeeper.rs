//! Keeps a secondary's clock at the primary's.
//!
//! ```text
//! same host ──▶ the offsets are the same, for ever
//! another   ──▶ measured before the vCPUs run ──▶ corrected while they do
//! ```
//!
//! Invariant: with time led from another host, the clock's offset is the
//! primary's offset plus [`Lead::offset`], under one lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use weft_platform::clock::{Clock, Reference, host_tsc};
use weft_platform::interrupts::InterruptRouter;

use super::PRIMARY;
use super::message::SliceMessage;
use super::peers::Peers;
use super::pending_requests::PendingRequests;
use super::time::{Estimate, Lead, Look, best};

/// Looks before the vCPUs run, within their time.
const FIRST_LOOKS: usize = 64;
const FIRST_TIME: Duration = Duration::from_millis(150);
/// Looks of one later round.
const LOOKS: usize = 16;
/// The time between two rounds, while the offset is off and while it is not.
const SOON: Duration = Duration::from_millis(20);
const LATER: Duration = Duration::from_secs(1);
/// How often the end of the machine is looked for meanwhile.
const GLANCE: Duration = Duration::from_millis(100);

/// What of it is shown.
#[derive(Default)]
pub(super) struct TimeCounters {
    /// By how many nanoseconds the clock may be wrong.
    pub error_ns: AtomicU64,
    /// Corrections so far.
    pub steps: AtomicU64,
}

/// What it works with.
pub(super) struct TimekeeperParts {
    pub reference: Reference,
    pub clock: Arc<Clock>,
    pub interrupts: Arc<InterruptRouter>,
    pub peers: Arc<Peers>,
    pub looks: Arc<PendingRequests<(u64, u64)>>,
    pub counters: Arc<TimeCounters>,
    /// Longest wait for one answer.
    pub patience: Duration,
}

/// See the module.
pub struct Timekeeper {
    parts: TimekeeperParts,
    is_here: bool,
    /// None before the first look, and where the primary is on this host.
    lead: Mutex<Option<Lead>>,
}

impl Timekeeper {
    pub(super) fn new(parts: TimekeeperParts) -> Self {
        Self {
            is_here: parts.reference.is_here(),
            parts,
            lead: Mutex::default(),
        }
    }

    /// Whether the clock needs no corrections.
    pub(super) fn is_here(&self) -> bool {
        self.is_here
    }

    /// Leads the clock from `offset` on: the guest's TSC minus the primary's host's,
    /// modulo 2^64; guest time was zero when the guest's TSC was `zero`. Measures
    /// first, the first time.
    ///
    /// # Errors
    /// The primary does not answer, or the clock cannot follow.
    pub fn lead(&self, offset: u64, zero: u64) -> Result<(), String> {
        let follow = |offset: u64| {
            let followed = self.parts.clock.follow(offset, zero);
            followed.map_err(|error| error.to_string())
        };
        if self.is_here {
            return follow(offset);
        }
        let mut lead = self.lock();
        let lead = match &mut *lead {
            Some(lead) => lead,
            none => {
                let first = self.measure(FIRST_LOOKS, FIRST_TIME).ok_or_else(|| {
                    let bound = self.parts.patience.as_secs_f32();
                    format!("node 0 did not report its time within {bound} s")
                })?;
                none.insert(Lead::new(first, self.parts.reference.tsc_hz))
            }
        };
        follow(offset.wrapping_add(lead.offset()))?;
        self.show(lead);
        Ok(())
    }

    /// Corrects the clock until the machine is over.
    pub(super) fn keep(&self) {
        let mut pause = LATER;
        while !self.parts.peers.is_over() {
            self.rest(pause);
            if self.lock().is_some()
                && let Some(measured) = self.measure(LOOKS, LATER)
            {
                pause = match self.correct(measured) {
                    true => SOON,
                    false => LATER.min(pause * 2),
                };
            }
        }
    }

    fn rest(&self, pause: Duration) {
        let until = Instant::now() + pause;
        while !self.parts.peers.is_over() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(GLANCE));
        }
    }

    /// Whether the clock was off.
    fn correct(&self, measured: Estimate) -> bool {
        let mut lead = self.lock();
        let Some(lead) = &mut *lead else {
            return false;
        };
        let step = lead.correct(measured);
        self.show(lead);
        if step == 0 {
            return false;
        }
        self.parts.clock.shift(step);
        self.parts.counters.steps.fetch_add(1, Ordering::Relaxed);
        // One that does nothing but compute would not see it for long.
        for vcpu in self.parts.interrupts.vcpus_here() {
            if let Some(posted) = self.parts.interrupts.posted(vcpu) {
                posted.waker.ring();
            }
        }
        true
    }

    fn show(&self, lead: &Lead) {
        let nanoseconds = self.parts.clock.base().nanoseconds(lead.error());
        let shown = &self.parts.counters.error_ns;
        shown.store(nanoseconds, Ordering::Relaxed);
    }

    /// Looks so often, for so long; at least once.
    fn measure(&self, looks: usize, time: Duration) -> Option<Estimate> {
        let until = Instant::now() + time;
        let mut seen = Vec::with_capacity(looks);
        while seen.len() < looks && (seen.is_empty() || Instant::now() < until) {
            seen.push(self.look()?);
        }
        best(seen)
    }

    fn look(&self) -> Option<Look> {
        let mut asked = 0;
        let answer = self
            .parts
            .looks
            .ask(PRIMARY, self.parts.patience, |ticket| {
                asked = host_tsc();
                self.parts
                    .peers
                    .send(PRIMARY, &SliceMessage::Look { ticket });
            });
        answer.map(|(theirs, answered)| Look {
            asked,
            theirs,
            answered,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Lead>> {
        self.lead.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use weft_wire::halves::{HalvesConfig, Receiver, Sender, open};

    use super::*;
    use weft_platform::clock::Source;

    const HZ: u64 = 1_000_000_000;
    /// The other host's TSC when ours is zero.
    const AHEAD: u64 = 0xfedc_ba98_7654_3210;

    fn half(socket: UnixStream) -> (Sender, Receiver) {
        let config = HalvesConfig {
            socket: socket.into(),
            keys: None,
            lease: Duration::from_secs(20),
            spin: Duration::ZERO,
            name: "test".into(),
        };
        open(config).unwrap()
    }

    /// Their TSC when ours is `now`, with a drift from `start` on.
    fn theirs(now: u64, start: u64, ppm: i64) -> u64 {
        let drift = now.wrapping_sub(start) as i64 / 1_000_000 * ppm;
        now.wrapping_add(AHEAD).wrapping_add_signed(drift)
    }

    /// A secondary whose primary's host has another TSC that drifts: after
    /// `time`, by how many ticks its clock is wrong, how wrong it may be, and how
    /// often it was corrected.
    fn follow(ppm: i64, time: Duration) -> (u64, u64, u64) {
        let start = host_tsc();
        let (near, far) = UnixStream::pair().unwrap();
        let ((sender, mut receiver), (answerer, mut asked)) = (half(near), half(far));
        let bound = Duration::from_secs(20);
        let peers = Peers::new(1, vec![Some(sender), None], bound, Duration::ZERO);
        let looks = Arc::<PendingRequests<(u64, u64)>>::default();
        let clock = Arc::new(Clock::new(Source::Host, HZ));
        let counters = Arc::<TimeCounters>::default();
        let keeper = Arc::new(Timekeeper::new(TimekeeperParts {
            reference: Reference {
                tsc_hz: HZ,
                boot_id: "another".into(),
            },
            clock: clock.clone(),
            interrupts: InterruptRouter::new(2),
            peers: peers.clone(),
            looks: looks.clone(),
            counters: counters.clone(),
            patience: bound,
        }));
        let there = std::thread::spawn(move || {
            while let Ok(Some(frame)) = asked.receive(bound) {
                let message = SliceMessage::decode(&frame.header, frame.payload).unwrap();
                let SliceMessage::Look { ticket } = message else {
                    panic!("{message:?}");
                };
                let tsc = theirs(host_tsc(), start, ppm);
                let (header, _) = SliceMessage::Seen { ticket, tsc }.encode();
                if answerer.send(&header, &[]).is_err() {
                    return;
                }
            }
        });
        let answered = looks.clone();
        let here = std::thread::spawn(move || {
            while let Ok(Some(frame)) = receiver.receive(bound) {
                match SliceMessage::decode(&frame.header, frame.payload).unwrap() {
                    SliceMessage::Seen { ticket, tsc } => {
                        answered.complete(ticket, (tsc, host_tsc()))
                    }
                    message => panic!("{message:?}"),
                }
            }
        });
        keeper.lead(5, 0).unwrap();
        clock.go();
        let kept = keeper.clone();
        let thread = std::thread::spawn(move || kept.keep());
        std::thread::sleep(time);
        let now = host_tsc();
        let ours = now.wrapping_add(clock.offset());
        let wrong = ours.wrapping_sub(theirs(now, start, ppm).wrapping_add(5)) as i64;
        let error = counters.error_ns.load(Ordering::Relaxed);
        looks.end();
        peers.close();
        thread.join().unwrap();
        here.join().unwrap();
        there.join().unwrap();
        let steps = counters.steps.load(Ordering::Relaxed);
        (wrong.unsigned_abs(), error, steps)
    }

    #[test]
    fn a_clock_is_led_by_one_that_runs_alike() {
        let (wrong, error, _) = follow(0, Duration::from_millis(20));
        // Ticks are nanoseconds here.
        assert!(error > 0 && wrong <= error, "{wrong} {error}");
    }

    #[test]
    fn a_clock_follows_one_that_drifts_either_way() {
        for ppm in [190, -190] {
            let (wrong, error, steps) = follow(ppm, Duration::from_millis(2500));
            // What drifted since the last round, which a busy host holds up.
            let since = HZ * 3 / 1_000_000 * 190;
            assert!(
                steps > 0 && wrong <= error + since,
                "{wrong} {error} {steps}"
            );
        }
    }
}
