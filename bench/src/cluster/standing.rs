//! How long a guest stood, by the lines that it writes to its console at a steady rate.

use std::time::{Duration, Instant};

use weft_tests::guest::Line;

/// From one line to the next, by the guest's clock.
pub(super) const PERIOD_MS: u32 = 10;

/// When the guest wrote.
pub(super) struct Ticks {
    at: Vec<Instant>,
}

/// A part of the time.
#[derive(Clone, Copy)]
pub(super) struct Window {
    pub(super) from: Instant,
    pub(super) until: Instant,
}

impl Ticks {
    /// `started`: when the console's clock began.
    pub(super) fn of(lines: &[Line], started: Instant) -> Ticks {
        let ticks = lines.iter().filter(|line| line.text.trim() == "t");
        Ticks {
            at: ticks.map(|line| started + line.at).collect(),
        }
    }

    /// The longest time between two lines, a part of which at least is in the window.
    pub(super) fn longest(&self, window: Window) -> Option<Duration> {
        let pairs = self.at.windows(2);
        let within = pairs.filter(|pair| pair[1] >= window.from && pair[0] <= window.until);
        within.map(|pair| pair[1] - pair[0]).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_gap_of_a_window() {
        let started = Instant::now();
        let line = |(ms, text): (u64, &str)| Line {
            at: Duration::from_millis(ms),
            text: text.to_owned(),
            is_whole: true,
        };
        let lines = [
            (0, "t"),
            (10, "t"),
            (15, "dirty: second 1: 7 writes"),
            (20, "t"),
            (120, "t"),
            (130, "t"),
            (900, "t"),
        ];
        let ticks = Ticks::of(&lines.map(line), started);
        let ms = Duration::from_millis;
        let longest = |from, until| {
            ticks.longest(Window {
                from: started + ms(from),
                until: started + ms(until),
            })
        };
        assert_eq!(longest(0, 15), Some(ms(10)));
        assert_eq!(longest(0, 60), Some(ms(100)));
        assert_eq!(longest(60, 125), Some(ms(100)));
        assert_eq!(longest(2000, 3000), None);
    }
}
