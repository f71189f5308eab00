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
/// Of the ratios of the last moves, for the bound.
const QUANTILE: f64 = 0.9;
/// What even a move of nothing takes, seconds.
const LEAST_S: f64 = 0.3;

/// The link between hosts, and what moves took over it.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// Bytes a second.
    link: f64,
    /// What the last moves took, as parts of what they should have, oldest first.
    ratios: VecDeque<f64>,
}

impl Forecast {
    /// `link`: bytes a second, as far as is known.
    pub fn new(link: f64) -> Forecast {
        Forecast {
            link: link.max(1.0),
            ratios: VecDeque::new(),
        }
    }

    /// From the machine and the link alone: each round of copying ahead carries what was written
    /// during the last, so all rounds are a geometric series.
    fn plain(&self, machine: &Machine) -> f64 {
        let rest = 1.0 - (machine.dirties / self.link).clamp(0.0, 1.0);
        let times = (1.0 / rest.max(f64::EPSILON)).min(TIMES_MAX);
        LEAST_S + machine.resident as f64 * times / self.link
    }

    /// What a move of the machine is expected to take.
    pub fn expected(&self, machine: &Machine) -> Duration {
        seconds(self.plain(machine) * self.ratio(0.5).unwrap_or(1.0))
    }

    /// What nine of ten moves do not exceed.
    pub fn bound(&self, machine: &Machine) -> Duration {
        seconds(self.plain(machine) * self.ratio(QUANTILE).unwrap_or(FIRST_BOUND))
    }

    /// A move of the machine, as it was when that began, took so long.
    pub fn learn(&mut self, machine: &Machine, took: Duration) {
        let ratio = took.as_secs_f64() / self.plain(machine);
        if ratio.is_finite() && ratio > 0.0 {
            self.ratios.push_back(ratio);
            if self.ratios.len() > SAMPLES {
                self.ratios.pop_front();
            }
        }
    }

    /// A quantile of the last ratios. While they are few, the largest stands for the upper ones.
    fn ratio(&self, part: f64) -> Option<f64> {
        let mut sorted: Vec<f64> = self.ratios.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let at = (part * sorted.len() as f64) as usize;
        sorted.get(at.min(sorted.len().checked_sub(1)?)).copied()
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
        assert_eq!(forecast.ratios.len(), SAMPLES);
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
}
