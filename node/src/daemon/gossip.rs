//! How much the log says of strangers: anybody who reaches the port can make a daemon
//! say something, as often as he connects.

use std::time::{Duration, Instant};

/// Sentences in each [`PERIOD`].
const SENTENCES: u32 = 20;
/// What is not said in one is counted in the next.
const PERIOD: Duration = Duration::from_secs(10);

/// What was said in this period.
#[derive(Default)]
pub struct Gossip {
    since: Option<Instant>,
    said: u32,
    passed_over: u64,
}

impl Gossip {
    /// Something happened at `now`: whether it is to be said, and how many other things
    /// were not since they were last counted.
    pub fn heard(&mut self, now: Instant) -> (bool, u64) {
        let begins = self.since.is_none_or(|since| now >= since + PERIOD);
        let mut counted = 0;
        if begins {
            counted = std::mem::take(&mut self.passed_over);
            (self.since, self.said) = (Some(now), 0);
        }
        let speak = self.said < SENTENCES;
        match speak {
            true => self.said += 1,
            false => self.passed_over += 1,
        }
        (speak, counted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn much_is_counted_instead_of_said() {
        let mut gossip = Gossip::default();
        let start = Instant::now();
        let said = (0..1000)
            .filter(|_| gossip.heard(start) == (true, 0))
            .count();
        assert_eq!(said, SENTENCES as usize);
        assert_eq!(
            gossip.heard(start + PERIOD),
            (true, 1000 - u64::from(SENTENCES))
        );
        assert_eq!(gossip.heard(start + 2 * PERIOD), (true, 0));
    }
}
