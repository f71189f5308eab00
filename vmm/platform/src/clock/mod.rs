//! Guest time: one time base for all vCPUs.
//!
//! Guest time is the guest's TSC. It starts at zero with the machine and is
//! either the host's TSC plus one offset for all vCPUs, or the count of executed
//! instructions ([`Source`]). Everything else (nanoseconds, APIC timers,
//! kvmclock) is arithmetic on it, so it agrees over vCPUs by construction.
//!
//! Pause stops guest time: the TSC that a guest sees goes on from where it was,
//! its timers have as long to run as before, and no watchdog in it barks. Its
//! wall clock is late by the pause until it asks its time server (or reads the
//! CMOS clock, which shows the host's time). A back end that cannot move the
//! guest's TSC says so; there guest time goes on during a pause.

mod alarms;
mod base;
mod host;
mod kvmclock;
mod reference;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

pub use alarms::Alarms;
pub use base::TimeBase;
pub use host::{
    TscMeasurement, begin_tsc_measurement, continue_tsc_measurement, host_tsc, measure_host_tsc,
    monotonic,
};
pub use kvmclock::KvmClock;
pub use reference::{DRIFT_PPM_MAX, RatesDiffer, Reference};

use crate::part::{Part, PartError, Persist, Version};

/// Ticks in a second where the instruction count is the clock.
pub const COUNTED_HZ: u64 = 1_000_000_000;
/// What the wall clock shows at the start of a deterministic run: 2026-01-01.
const COUNTED_EPOCH_SECONDS: u64 = 1_767_225_600;
/// Longest sleep on a clock that stands.
const STANDING_SLEEP: Duration = Duration::from_secs(1);

/// Where guest time comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The host's TSC plus an offset that the machine chooses.
    Host,
    /// The host's TSC plus an offset that is given and cannot be changed.
    HostFixed(u64),
    /// The instruction count.
    Counted,
}

/// Guest time at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClockState {
    version: Version<1>,
    /// The guest's TSC.
    tsc: u64,
    /// The guest's TSC when its time was zero nanoseconds.
    zero: u64,
    /// Ticks in a second.
    hz: u64,
    /// Nanoseconds since 1970 when its time was zero, where they do not come
    /// from the host.
    epoch: Option<u64>,
}

/// The clock of one machine.
pub struct Clock {
    base: TimeBase,
    source: Source,
    /// Time stands, at `stood_at`.
    stands: AtomicBool,
    stood_at: AtomicU64,
    /// Guest TSC minus the host's, modulo 2^64; of no meaning when counted.
    offset: AtomicU64,
    /// The offset is given: by another slice, or by [`Clock::start_at`].
    led: AtomicBool,
    /// The last count that a vCPU told.
    counted: AtomicU64,
    zero: AtomicU64,
}

impl Clock {
    /// A clock that stands at the start of guest time. `hz`: of the guest's TSC,
    /// which is [`COUNTED_HZ`] when counted.
    pub fn new(source: Source, hz: u64) -> Self {
        let (offset, start) = match source {
            Source::HostFixed(offset) => (offset, host_tsc().wrapping_add(offset)),
            Source::Host | Source::Counted => (0, 0),
        };
        let hz = if source == Source::Counted {
            COUNTED_HZ
        } else {
            hz
        };
        Self {
            base: TimeBase::new(hz),
            source,
            stands: AtomicBool::new(true),
            stood_at: AtomicU64::new(start),
            offset: AtomicU64::new(offset),
            led: AtomicBool::new(false),
            counted: AtomicU64::new(0),
            zero: AtomicU64::new(start),
        }
    }

    /// Ticks and nanoseconds.
    pub fn base(&self) -> TimeBase {
        self.base
    }

    /// Where time comes from.
    pub fn source(&self) -> Source {
        self.source
    }

    /// The guest's TSC.
    pub fn now(&self) -> u64 {
        if self.source == Source::Counted {
            return self.counted.load(Ordering::Relaxed);
        }
        if self.stands.load(Ordering::Acquire) {
            return self.stood_at.load(Ordering::Acquire);
        }
        host_tsc().wrapping_add(self.offset.load(Ordering::Acquire))
    }

    /// Nanoseconds of guest time.
    pub fn nanoseconds(&self) -> u64 {
        let since = self.now().saturating_sub(self.zero());
        self.base.nanoseconds(since)
    }

    /// The guest's TSC when its time was zero nanoseconds.
    pub fn zero(&self) -> u64 {
        self.zero.load(Ordering::Acquire)
    }

    /// A vCPU tells the count, before it asks for anything.
    pub fn set_counted(&self, tsc: u64) {
        self.counted.store(tsc, Ordering::Relaxed);
    }

    /// What a vCPU's TSC offset must be while time goes.
    pub fn offset(&self) -> u64 {
        self.offset.load(Ordering::Acquire)
    }

    /// Time stands still. All vCPUs stand.
    pub fn stop(&self) {
        let now = self.now();
        self.stood_at.store(now, Ordering::Release);
        self.stands.store(true, Ordering::Release);
    }

    /// Time, which stands, stands here.
    pub fn stand_at(&self, tsc: u64) {
        self.stood_at.store(tsc, Ordering::Release);
    }

    /// From the next [`Clock::go`] on the offset is this one, which the
    /// timekeeper chose: the guest's TSC minus this host's, modulo 2^64; and guest time was
    /// zero when the guest's TSC was `zero`.
    pub fn follow(&self, offset: u64, zero: u64) -> Result<(), PartError> {
        if let Source::HostFixed(fixed) = self.source
            && fixed != offset
        {
            let what = format!(
                "a TSC offset of {offset:#x}, but this back end's is always \
            {fixed:#x}"
            );
            return Err(PartError::Misfit(what));
        }
        self.offset.store(offset, Ordering::Release);
        self.zero.store(zero, Ordering::Release);
        self.led.store(true, Ordering::Release);
        Ok(())
    }

    /// Changes the offset by this many ticks while time continues: its source, another
    /// host's TSC, has drifted. Every vCPU takes it over by itself, without going
    /// backwards.
    pub fn shift(&self, ticks: i64) {
        self.offset.fetch_add(ticks as u64, Ordering::AcqRel);
    }

    /// The clock of others, which follow it: from the next [`Clock::go`] on, the guest's TSC
    /// goes on from `tsc`, as of now. Time stands.
    pub fn start_at(&self, tsc: u64, zero: u64) {
        self.stood_at.store(tsc, Ordering::Release);
        self.zero.store(zero, Ordering::Release);
        if self.source == Source::Host {
            let offset = tsc.wrapping_sub(host_tsc());
            self.offset.store(offset, Ordering::Release);
        }
        self.led.store(true, Ordering::Release);
    }

    /// Time goes on from where it stood; [`Clock::offset`] is new then, or the given one.
    pub fn go(&self) {
        if self.source == Source::Host && !self.led.load(Ordering::Acquire) {
            let offset = self
                .stood_at
                .load(Ordering::Acquire)
                .wrapping_sub(host_tsc());
            self.offset.store(offset, Ordering::Release);
        }
        self.stands.store(false, Ordering::Release);
    }

    /// When, on the host's clock, the guest's TSC will be `tsc`; never far in
    /// the future: who waits looks again.
    pub fn when(&self, tsc: u64) -> Instant {
        let wait = if self.stands.load(Ordering::Acquire) {
            STANDING_SLEEP
        } else {
            let left = self.base.nanoseconds(tsc.saturating_sub(self.now()));
            Duration::from_nanos(left).min(Duration::from_secs(3600))
        };
        Instant::now() + wait
    }

    /// The wall clock: time since 1970.
    pub fn wall(&self) -> Duration {
        if self.source == Source::Counted {
            return Duration::from_secs(COUNTED_EPOCH_SECONDS)
                + Duration::from_nanos(self.nanoseconds());
        }
        // A host before 1970 has other troubles.
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
    }

    /// The moment. Time stands.
    pub fn state(&self) -> ClockState {
        ClockState {
            version: Version,
            tsc: self.now(),
            zero: self.zero(),
            hz: self.base.hz(),
            epoch: (self.source == Source::Counted).then_some(COUNTED_EPOCH_SECONDS),
        }
    }

    /// Goes back to that moment; time stands there.
    pub fn set_state(&self, state: ClockState) -> Result<(), PartError> {
        // A tenth of a percent: timers would be wrong by more than their slack.
        if state.hz.abs_diff(self.base.hz()) > self.base.hz() / 1000 {
            let (theirs, ours) = (state.hz, self.base.hz());
            let what = format!("a TSC of {theirs} Hz on a host with {ours} Hz");
            return Err(PartError::Misfit(what));
        }
        if state.epoch.is_some() != (self.source == Source::Counted) {
            return Err(PartError::Misfit("a clock of another source".into()));
        }
        match self.source {
            // Its TSC cannot go back, but the time that it means can.
            Source::HostFixed(_) => {
                let zero = self.now().wrapping_sub(state.tsc.wrapping_sub(state.zero));
                self.zero.store(zero, Ordering::Release);
            }
            Source::Host | Source::Counted => {
                self.zero.store(state.zero, Ordering::Release);
                self.stood_at.store(state.tsc, Ordering::Release);
                self.counted.store(state.tsc, Ordering::Release);
            }
        }
        Ok(())
    }
}

impl Part for Clock {}

impl Persist for Clock {
    type State = ClockState;

    fn save(&self) -> Result<ClockState, PartError> {
        Ok(self.state())
    }

    fn restore(&self, state: &ClockState) -> Result<(), PartError> {
        self.set_state(*state)
    }
}

/// Lets the timed waits of the calling thread, and of those that it makes from now
/// on, end when they should: the kernel groups wake-ups within 50 microseconds
/// otherwise (PR_SET_TIMERSLACK in prctl(2)).
pub fn sharpen_sleep() {
    // SAFETY: a request about the calling thread that takes a number.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_usize, 0, 0, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stands_while_stopped_and_goes_on_from_there() {
        let clock = Clock::new(Source::Host, measure_host_tsc());
        assert_eq!(clock.now(), 0);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(clock.now(), 0);
        clock.go();
        std::thread::sleep(Duration::from_millis(5));
        clock.stop();
        let stood = clock.nanoseconds();
        assert!((4_000_000..4_000_000_000).contains(&stood), "{stood}");
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(clock.nanoseconds(), stood);
        // The pause of 20 ms is not in it, however long the rest takes.
        let before = std::time::Instant::now();
        clock.go();
        let after = clock.nanoseconds();
        let gone = before.elapsed().as_nanos() as u64;
        assert!(
            (stood..stood + gone + 1_000_000).contains(&after),
            "{after}"
        );
    }

    #[test]
    fn a_fixed_offset_stays_and_time_starts_at_zero() {
        let clock = Clock::new(Source::HostFixed(0), measure_host_tsc());
        clock.go();
        assert_eq!(clock.offset(), 0);
        assert!(clock.nanoseconds() < 10_000_000_000);
        assert!(clock.now().abs_diff(host_tsc()) < 10_000_000_000);
    }

    #[test]
    fn a_clock_that_follows_shows_what_the_other_shows() {
        let hz = measure_host_tsc();
        for source in [Source::Host, Source::HostFixed(0)] {
            let first = Clock::new(source, hz);
            std::thread::sleep(Duration::from_millis(5));
            let second = Clock::new(source, hz);
            first.go();
            second.follow(first.offset(), first.zero()).unwrap();
            second.go();
            let before = first.nanoseconds();
            let between = second.nanoseconds();
            assert!((before..=first.nanoseconds()).contains(&between));
        }
        assert!(Clock::new(Source::HostFixed(5), hz).follow(0, 0).is_err());
    }

    #[test]
    fn a_counted_clock_knows_only_what_it_is_told() {
        let clock = Clock::new(Source::Counted, 7);
        clock.go();
        clock.set_counted(1_500);
        assert_eq!(clock.nanoseconds(), 1_500);
        assert_eq!(clock.wall(), Duration::new(COUNTED_EPOCH_SECONDS, 1_500));
    }

    #[test]
    fn its_state_goes_elsewhere() {
        let clock = Clock::new(Source::Host, 2_000_000_000);
        clock.go();
        std::thread::sleep(Duration::from_millis(1));
        clock.stop();
        let state = Persist::save(&clock).unwrap();
        let other = Clock::new(Source::Host, 2_000_000_100);
        Persist::restore(&other, &state).unwrap();
        assert_eq!(other.now(), clock.now());
        let faster = Clock::new(Source::Host, 3_000_000_000);
        assert!(Persist::restore(&faster, &state).is_err());
        let counted = Clock::new(Source::Counted, 0);
        assert!(Persist::restore(&counted, &state).is_err());
    }

    #[test]
    fn the_future_is_where_it_should_be() {
        let clock = Clock::new(Source::Host, measure_host_tsc());
        clock.go();
        let wait = clock.base().ticks(50_000_000);
        let when = clock.when(clock.now() + wait);
        let left = when.saturating_duration_since(Instant::now());
        assert!(left <= Duration::from_millis(51), "{left:?}");
        assert!(clock.when(0) <= Instant::now() + Duration::from_millis(1));
    }
}
