//! How long moves will take, from what the last ones took.

use std::collections::VecDeque;
use std::time::Duration;

use crate::state::Machine;

/// Moves that count.
pub const SAMPLES: usize = 20;
/// A machine that writes faster than the link is not copied ahead for ever: then the rest follows
/// the vCPUs. This is the most that its bytes go over the link.
const TIMES_MAX: f64 = 3.0;
/// Before a move was measured: the bound, as a multiple of the forecast.
const FIRST_BOUND: f64 = 2.0;
/// Runnable threads for each processor, with which a move takes no longer than on an idle host.
/// The kernel prefers threads that sleep often. With 16 the first move took 7 times as long as was
/// expected, with some 30 it took 15 times as long.
const LOAD_FREE: f64 = 2.0;
/// The largest factor by which a load lengthens the forecast.
const LOAD_TIMES_MAX: f64 = 16.0;
/// Of the ratios of the last moves, for the bound.
const QUANTILE: f64 = 0.9;
/// What even a move of nothing takes, seconds, before moves have shown it.
const LEAST_S: f64 = 0.3;
/// Moves from which it is seen how much of their time is their bytes'.
const LINE_LEAST: usize = 6;
/// Moves until which the load counts beside what they took.
const LOAD_LEAST: usize = 6;
/// How much these must differ in their bytes: standard deviation by mean.
const LINE_SPREAD: f64 = 0.1;

/// The link between hosts, and what moves took over it.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// Bytes a second.
    link: f64,
    /// Runnable threads for each processor of the busiest host.
    load: f64,
    /// The last moves, oldest first.
    moves: VecDeque<Sample>,
}

/// A move.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample {
    /// Seconds that its bytes need on the link, as far as is known.
    bytes_s: f64,
    took_s: f64,
    /// How many times as long the load was thought to make it.
    busy: f64,
}

/// Seconds of a move by the seconds that its bytes need.
#[derive(Clone, Copy)]
struct Line {
    /// Of a move of nothing.
    least: f64,
    slope: f64,
}

impl Line {
    /// Before moves have shown another.
    const PLAIN: Line = Line {
        least: LEAST_S,
        slope: 1.0,
    };

    /// By least squares, where the moves differ enough.
    fn through(moves: &VecDeque<Sample>) -> Line {
        let count = moves.len() as f64;
        let mean = |of: fn(&Sample) -> f64| moves.iter().map(of).sum::<f64>() / count;
        let (bytes, took) = (mean(|sample| sample.bytes_s), mean(|sample| sample.took_s));
        let part = |of: &dyn Fn(&Sample) -> f64| moves.iter().map(of).sum::<f64>() / count;
        let variance = part(&|sample| (sample.bytes_s - bytes).powi(2));
        if moves.len() < LINE_LEAST || variance.sqrt() < LINE_SPREAD * bytes {
            return Line::PLAIN;
        }
        let common = part(&|sample| (sample.bytes_s - bytes) * (sample.took_s - took));
        // A move of more bytes is not shorter, and one of none takes some time.
        let slope = (common / variance).clamp(0.0, took / bytes);
        Line {
            least: took - slope * bytes,
            slope,
        }
    }

    fn at(self, bytes_s: f64) -> f64 {
        self.least + self.slope * bytes_s
    }
}

impl Forecast {
    /// `link`: bytes a second, as far as is known.
    pub fn new(link: f64) -> Forecast {
        Forecast {
            link: link.max(1.0),
            load: 0.0,
            moves: VecDeque::new(),
        }
    }

    /// Each round of copying ahead carries what was written during the last, so all rounds are a
    /// geometric series.
    fn bytes_s(&self, machine: &Machine) -> f64 {
        let rest = 1.0 - (machine.dirties / self.link).clamp(0.0, 1.0);
        let times = (1.0 / rest.max(f64::EPSILON)).min(TIMES_MAX);
        machine.resident as f64 * times / self.link
    }

    /// How many runnable threads the busiest host has for each processor. Until some moves were
    /// measured that lengthens what they are thought to take; later a release, if there are more
    /// than there were.
    pub fn note_load(&mut self, load: f64) {
        self.load = load;
    }

    /// What a move of the machine is expected to take.
    pub fn expected(&self, machine: &Machine) -> Duration {
        self.quantile(machine, 0.5, self.busy())
    }

    /// What nine of ten moves do not exceed.
    pub fn bound(&self, machine: &Machine) -> Duration {
        self.quantile(machine, QUANTILE, FIRST_BOUND.max(self.busy()))
    }

    /// The same for a release, which should rather begin too early. Before a move was measured, it
    /// has a margin on a busy host, too. The first moves are often quick, since no program runs
    /// yet: while they are few, the load counts beside them, and a load that has grown counts
    /// always.
    pub fn release_bound(&self, machine: &Machine) -> Duration {
        let busy = self.busy();
        let count = self.moves.len();
        let measured = self.quantile(machine, QUANTILE, FIRST_BOUND * busy);
        if count == 0 {
            return measured;
        }
        let before = self.moves.iter().map(|sample| sample.busy).sum::<f64>() / count as f64;
        let grown = measured.mul_f64((busy / before).max(1.0));
        match count < LOAD_LEAST {
            true => grown.max(seconds(Line::PLAIN.at(self.bytes_s(machine)) * busy)),
            false => grown,
        }
    }

    /// How many times as long a move takes on a host with this load, about.
    fn busy(&self) -> f64 {
        (self.load / LOAD_FREE).clamp(1.0, LOAD_TIMES_MAX)
    }

    /// A move of the machine, as it was when that began, took so long.
    pub fn learn(&mut self, machine: &Machine, took: Duration) {
        if took.is_zero() {
            return;
        }
        self.moves.push_back(Sample {
            bytes_s: self.bytes_s(machine),
            took_s: took.as_secs_f64(),
            busy: self.busy(),
        });
        if self.moves.len() > SAMPLES {
            self.moves.pop_front();
        }
    }

    /// The line, corrected by what a part of the last moves did not exceed; `first`: before there
    /// was one. While they are few, the largest stands for the upper ones.
    fn quantile(&self, machine: &Machine, part: f64, first: f64) -> Duration {
        let line = Line::through(&self.moves);
        let ratio = |sample: &Sample| sample.took_s / line.at(sample.bytes_s);
        let mut ratios: Vec<f64> = self.moves.iter().map(ratio).collect();
        ratios.sort_by(f64::total_cmp);
        let at = (part * ratios.len() as f64) as usize;
        let ratio = ratios.get(at.min(ratios.len().saturating_sub(1)));
        seconds(line.at(self.bytes_s(machine)) * ratio.copied().unwrap_or(first))
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::HostId;

    fn machine(mib: u64, dirties_mib: f64) -> Machine {
        Machine {
            memory: mib << 20,
            resident: mib << 20,
            dirties: dirties_mib * 1048576.0,
            at: HostId(0),
            moves_to: None,
            is_being_saved: false,
        }
    }

    #[test]
    fn a_move_is_memory_over_the_link_and_what_is_written_meanwhile() {
        let forecast = Forecast::new(100.0 * 1048576.0);
        let expects = |machine: &Machine| forecast.expected(machine).as_secs_f64() - LEAST_S;
        assert!((expects(&machine(1000, 0.0)) - 10.0).abs() < 1e-9);
        assert!((expects(&machine(1000, 50.0)) - 20.0).abs() < 1e-9);
        assert!((expects(&machine(1000, 500.0)) - 30.0).abs() < 1e-9);
        assert!(forecast.bound(&machine(1000, 0.0)) > forecast.expected(&machine(1000, 0.0)));
    }

    #[test]
    fn what_moves_took_corrects_it() {
        let mut forecast = Forecast::new(100.0 * 1048576.0);
        let moved = machine(970, 0.0);
        for _ in 0..18 {
            forecast.learn(&moved, Duration::from_secs(5));
        }
        for _ in 0..3 {
            forecast.learn(&moved, Duration::from_secs(20));
        }
        assert_eq!(forecast.moves.len(), SAMPLES);
        let near =
            |duration: Duration, seconds: f64| (duration.as_secs_f64() - seconds).abs() < 1e-6;
        assert!(near(forecast.expected(&moved), 5.0));
        assert!(near(forecast.bound(&moved), 20.0));
        // A link that has become slow shows within ten moves.
        for _ in 0..11 {
            forecast.learn(&moved, Duration::from_secs(20));
        }
        assert!(near(forecast.expected(&moved), 20.0));
    }

    #[test]
    fn a_busy_host_counts_until_a_move_was_measured() {
        let mut forecast = Forecast::new(100.0 * 1048576.0);
        let moved = machine(970, 0.0);
        let idle = forecast.expected(&moved);
        for (load, times) in [(0.0, 1), (2.0, 1), (8.0, 4), (16.0, 8), (1000.0, 16)] {
            forecast.note_load(load);
            assert_eq!(forecast.release_bound(&moved), idle * times * 2, "{load}");
            assert_eq!(forecast.bound(&moved), idle * times.max(2), "{load}");
            assert_eq!(forecast.expected(&moved), idle * times, "{load}");
        }
        forecast.learn(&moved, idle);
        assert_eq!(forecast.expected(&moved), idle);
    }

    #[test]
    fn a_load_that_has_grown_makes_releases_longer() {
        let mut forecast = Forecast::new(100.0 * 1048576.0);
        let moved = machine(970, 0.0);
        let idle = forecast.expected(&moved);
        // The first moves are as quick as on an idle host, since no program runs yet.
        forecast.note_load(16.0);
        for _ in 1..LOAD_LEAST {
            forecast.learn(&moved, idle);
            assert_eq!(forecast.release_bound(&moved), idle * 8);
        }
        forecast.learn(&moved, idle);
        assert_eq!(forecast.release_bound(&moved), idle);
        forecast.note_load(32.0);
        assert_eq!(forecast.release_bound(&moved), idle * 2);
        forecast.note_load(0.0);
        assert_eq!(forecast.release_bound(&moved), idle);
        assert_eq!(forecast.expected(&moved), idle);
    }

    #[test]
    fn what_moves_of_nothing_take_is_learned() {
        let mut forecast = Forecast::new(100.0 * 1048576.0);
        for round in 0..SAMPLES as u64 {
            // The link is twice as fast as was thought, and each move begins with 2 s.
            let moved = machine(100 + 50 * (round % 7), 0.0);
            let took = 2.0 + moved.resident as f64 / (200.0 * 1048576.0);
            forecast.learn(&moved, Duration::from_secs_f64(took));
        }
        for mebibytes in [0, 100, 1000] {
            let expected = forecast.expected(&machine(mebibytes, 0.0)).as_secs_f64();
            let real = 2.0 + mebibytes as f64 / 200.0;
            assert!((expected - real).abs() < 1e-6, "{expected} for {real}");
        }
    }
}
