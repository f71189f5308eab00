//! Keeps a slice's clock at the timekeeper's: slice 0's, until [another](super::time_role)
//! takes over.
//!
//! ```text
//! same host ──▶ the offsets are the same
//! another   ──▶ measured before the vCPUs run ──▶ corrected while they do
//! ```
//!
//! Invariants: with time led from another host, the clock's offset is the timekeeper's
//! offset plus [`Lead::offset`], under one lock; the timekeeper's own clock has no lead.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use weft_platform::clock::{Clock, Reference, host_tsc, measure_host_tsc};
use weft_platform::interrupts::InterruptRouter;

use super::PRIMARY;
use super::commands::{KeptTime, SliceCommand, SliceReply};
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
    /// Which slice this is.
    pub number: usize,
    pub reference: Reference,
    pub clock: Arc<Clock>,
    pub interrupts: Arc<InterruptRouter>,
    pub peers: Arc<Peers>,
    pub looks: Arc<PendingRequests<(u64, u64)>>,
    pub counters: Arc<TimeCounters>,
    /// Longest wait for one answer.
    pub patience: Duration,
}

/// Whose time the clock follows.
struct Followed {
    keeper: usize,
    epoch: u64,
    /// The clock has the timekeeper's offset, and needs no corrections.
    is_here: bool,
    /// None before the first look, and where the clock needs no corrections.
    lead: Option<Lead>,
    /// Guest time has run here.
    began: bool,
    over: bool,
}

/// See the module.
pub struct Timekeeper {
    parts: TimekeeperParts,
    /// The boot id of this host, which a confined process cannot read.
    boot_id: String,
    followed: Mutex<Followed>,
    changed: Condvar,
}

impl Timekeeper {
    pub(super) fn new(parts: TimekeeperParts) -> Self {
        let followed = Followed {
            keeper: PRIMARY,
            epoch: 0,
            is_here: parts.number == PRIMARY || parts.reference.is_here(),
            lead: None,
            began: false,
            over: false,
        };
        Self {
            boot_id: Reference::boot_id_here(),
            parts,
            followed: Mutex::new(followed),
            changed: Condvar::new(),
        }
    }

    /// The slice whose time is followed here, and since which epoch.
    pub fn keeper(&self) -> (usize, u64) {
        let followed = self.lock();
        (followed.keeper, followed.epoch)
    }

    /// Leads the clock from `offset` on: the guest's TSC minus the timekeeper's host's,
    /// modulo 2^64; guest time was zero when the guest's TSC was `zero`. Measures
    /// first, the first time. Does nothing on the timekeeper, which chose `offset`.
    ///
    /// # Errors
    /// The timekeeper does not answer, or the clock cannot follow.
    pub fn lead(&self, offset: u64, zero: u64) -> Result<(), String> {
        let mut followed = self.lock();
        followed.began = true;
        if followed.keeper == self.parts.number {
            return Ok(());
        }
        if !followed.is_here && followed.lead.is_none() {
            let first = self.measure_first(followed.keeper)?;
            followed.lead = Some(Lead::new(first, self.parts.reference.tsc_hz));
            self.changed.notify_all();
        }
        let apart = followed.lead.as_ref().map_or(0, Lead::offset);
        let offset = offset.wrapping_add(apart);
        let led = self.parts.clock.follow(offset, zero);
        led.map_err(|error| error.to_string())?;
        if let Some(lead) = &followed.lead {
            self.show(lead);
        }
        Ok(())
    }

    /// Carries out a command about the role of the timekeeper.
    ///
    /// # Errors
    /// The clock here cannot do it; nothing changed.
    pub fn carry_out(&self, command: &SliceCommand) -> Result<SliceReply, String> {
        match command {
            SliceCommand::KeepTime { epoch } => self.keep_from(*epoch).map(SliceReply::Time),
            SliceCommand::FollowTime(kept) => self.follow(kept).map(|()| SliceReply::Done),
            SliceCommand::StartTime { tsc, tsc_zero } => {
                self.start(*tsc, *tsc_zero).map(SliceReply::Time)
            }
            SliceCommand::StandAt { tsc } => {
                self.parts.clock.stand_at(*tsc);
                Ok(SliceReply::Done)
            }
            other => Err(format!("{other:?} is not about the time")),
        }
    }

    /// Becomes the timekeeper: the clock here is not corrected any more.
    fn keep_from(&self, epoch: u64) -> Result<KeptTime, String> {
        let mut followed = self.lock();
        followed.begin(self.parts.number, epoch)?;
        followed.is_here = true;
        followed.lead = None;
        Ok(self.kept(&followed))
    }

    /// Follows another slice from now on, without a jump of the clock.
    fn follow(&self, kept: &KeptTime) -> Result<(), String> {
        let mut followed = self.lock();
        let apart = self.parts.clock.offset().wrapping_sub(kept.offset);
        let is_same_host = !self.boot_id.is_empty() && kept.host.boot_id == self.boot_id;
        let is_here = is_same_host && (apart == 0 || !followed.began);
        let lead = match is_here {
            true => None,
            false => {
                if !is_same_host {
                    let checked = kept.host.check(measure_host_tsc());
                    checked.map_err(|error| error.to_string())?;
                }
                let measured = self.measure_first(kept.keeper)?;
                let hz = self.parts.reference.tsc_hz;
                Some(match followed.began {
                    true => Lead::from(apart, measured, hz),
                    false => Lead::new(measured, hz),
                })
            }
        };
        followed.begin(kept.keeper, kept.epoch)?;
        if let Some(lead) = &lead {
            self.show(lead);
        }
        (followed.is_here, followed.lead) = (is_here, lead);
        self.changed.notify_all();
        Ok(())
    }

    /// On the timekeeper: chooses the offset with which the guest's TSC goes on.
    fn start(&self, tsc: u64, zero: u64) -> Result<KeptTime, String> {
        let mut followed = self.lock();
        if followed.keeper != self.parts.number {
            return Err(format!("slice {} keeps the time", followed.keeper));
        }
        followed.began = true;
        self.parts.clock.start_at(tsc, zero);
        Ok(self.kept(&followed))
    }

    fn kept(&self, followed: &Followed) -> KeptTime {
        let reference = &self.parts.reference;
        KeptTime {
            keeper: self.parts.number,
            epoch: followed.epoch,
            offset: self.parts.clock.offset(),
            host: Reference {
                tsc_hz: match reference.boot_id == self.boot_id {
                    true => reference.tsc_hz,
                    false => measure_host_tsc(),
                },
                boot_id: self.boot_id.clone(),
            },
        }
    }

    /// Corrects the clock until the machine is over.
    pub(super) fn keep(&self) {
        let mut pause = LATER;
        while let Some((keeper, epoch)) = self.rest(pause) {
            pause = match self.measure(keeper, LOOKS, LATER) {
                Some(measured) if self.correct(epoch, measured) => SOON,
                _ => LATER.min(pause * 2),
            };
        }
    }

    /// Nobody corrects the clock any more.
    pub(super) fn end(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }

    /// Waits until there is something to correct, and so long; whom to ask then, and the epoch
    /// of the question.
    fn rest(&self, pause: Duration) -> Option<(usize, u64)> {
        let idle = |followed: &mut Followed| !followed.over && followed.lead.is_none();
        let followed = self.changed.wait_while(self.lock(), idle);
        let followed = followed.unwrap_or_else(PoisonError::into_inner);
        let asked = (followed.keeper, followed.epoch);
        let rests = |followed: &mut Followed| !followed.over && followed.lead.is_some();
        let (followed, _) = self
            .changed
            .wait_timeout_while(followed, pause, rests)
            .unwrap_or_else(PoisonError::into_inner);
        (!followed.over).then_some(asked)
    }

    /// Whether the clock was off. What was measured before another slice took over is not
    /// used: it is about another clock.
    fn correct(&self, epoch: u64, measured: Estimate) -> bool {
        let mut followed = self.lock();
        if followed.epoch != epoch {
            return false;
        }
        let Some(lead) = &mut followed.lead else {
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

    fn measure_first(&self, keeper: usize) -> Result<Estimate, String> {
        let measured = self.measure(keeper, FIRST_LOOKS, FIRST_TIME);
        measured.ok_or_else(|| {
            let bound = self.parts.patience.as_secs_f32();
            format!("node {keeper} did not report its time within {bound} s")
        })
    }

    /// Looks so often, for so long; at least once.
    fn measure(&self, keeper: usize, looks: usize, time: Duration) -> Option<Estimate> {
        let until = Instant::now() + time;
        let mut seen = Vec::with_capacity(looks);
        while seen.len() < looks && (seen.is_empty() || Instant::now() < until) {
            seen.push(self.look(keeper)?);
        }
        best(seen)
    }

    fn look(&self, keeper: usize) -> Option<Look> {
        let mut asked = 0;
        let (looks, peers) = (&self.parts.looks, &self.parts.peers);
        let answer = looks.ask(keeper, self.parts.patience, |ticket| {
            asked = host_tsc();
            peers.send(keeper, &SliceMessage::Look { ticket });
        });
        answer.map(|(theirs, answered)| Look {
            asked,
            theirs,
            answered,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Followed> {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Followed {
    /// A take-over that is newer than the one that is known.
    fn begin(&mut self, keeper: usize, epoch: u64) -> Result<(), String> {
        if epoch <= self.epoch {
            let known = self.epoch;
            return Err(format!(
                "a take-over of epoch {epoch} after that of epoch {known}"
            ));
        }
        (self.keeper, self.epoch) = (keeper, epoch);
        Ok(())
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
            number: 1,
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
                    SliceMessage::Seen { ticket, tsc } => answered
                        .complete(PRIMARY, ticket, (tsc, host_tsc()))
                        .unwrap(),
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
        keeper.end();
        peers.close();
        thread.join().unwrap();
        here.join().unwrap();
        there.join().unwrap();
        let steps = counters.steps.load(Ordering::Relaxed);
        (wrong.unsigned_abs(), error, steps)
    }

    #[test]
    fn an_older_take_over_is_refused_and_its_measurement_not_used() {
        let clock = Arc::new(Clock::new(Source::Host, HZ));
        let keeper = Timekeeper::new(TimekeeperParts {
            number: 1,
            reference: Reference::here(),
            clock: clock.clone(),
            interrupts: InterruptRouter::new(1),
            peers: Peers::new(1, vec![None; 2], Duration::ZERO, Duration::ZERO),
            looks: Arc::default(),
            counters: Arc::default(),
            patience: Duration::ZERO,
        });
        let follow = |number, epoch| {
            SliceCommand::FollowTime(KeptTime {
                keeper: number,
                epoch,
                offset: clock.offset(),
                host: Reference::here(),
            })
        };
        assert_eq!(keeper.carry_out(&follow(2, 3)), Ok(SliceReply::Done));
        for late in [
            follow(0, 3),
            follow(0, 2),
            SliceCommand::KeepTime { epoch: 3 },
            SliceCommand::KeepTime { epoch: 0 },
        ] {
            let refused = keeper.carry_out(&late).unwrap_err();
            assert!(refused.contains("after that of epoch 3"), "{refused}");
            assert_eq!(keeper.keeper(), (2, 3));
        }
        let measured = |offset| Estimate { offset, error: 40 };
        keeper.lock().lead = Some(Lead::new(measured(0), HZ));
        let before = clock.offset();
        assert!(!keeper.correct(2, measured(1000)));
        assert_eq!(clock.offset(), before);
        assert!(keeper.correct(3, measured(1000)));
        assert_ne!(clock.offset(), before);
        let kept = keeper.carry_out(&SliceCommand::KeepTime { epoch: 4 });
        assert!(matches!(kept, Ok(SliceReply::Time(_))), "{kept:?}");
        assert_eq!(keeper.keeper(), (1, 4));
        // It corrects nothing any more.
        assert!(!keeper.correct(4, measured(2000)));
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
