//! How much the log says of strangers, and of each peer: anybody who reaches the port
//! can make a daemon write log lines, one for each connection or request.

use std::time::{Duration, Instant};

/// Sentences about strangers in each [`PERIOD`].
pub const OF_STRANGERS: u32 = 20;
/// Sentences about one peer in each [`PERIOD`]: an honest run takes a handful.
pub const OF_PEER: u32 = 200;
/// What is not said in one is counted in the next.
const PERIOD: Duration = Duration::from_secs(10);

/// What was said in this period.
pub struct Gossip {
    /// Most sentences in a period.
    sentences: u32,
    since: Option<Instant>,
    said: u32,
    passed_over: u64,
}

impl Gossip {
    /// Allows this many sentences in each [`PERIOD`].
    pub fn new(sentences: u32) -> Gossip {
        Gossip {
            sentences,
            since: None,
            said: 0,
            passed_over: 0,
        }
    }

    /// Something happened at `now`: whether to log it, and how many events were not
    /// logged since the last count.
    pub fn heard(&mut self, now: Instant) -> (bool, u64) {
        let begins = self.since.is_none_or(|since| now >= since + PERIOD);
        let mut counted = 0;
        if begins {
            counted = std::mem::take(&mut self.passed_over);
            (self.since, self.said) = (Some(now), 0);
        }
        let speak = self.said < self.sentences;
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
        let mut gossip = Gossip::new(OF_STRANGERS);
        let start = Instant::now();
        let said = (0..1000)
            .filter(|_| gossip.heard(start) == (true, 0))
            .count();
        assert_eq!(said, OF_STRANGERS as usize);
        assert_eq!(
            gossip.heard(start + PERIOD),
            (true, 1000 - u64::from(OF_STRANGERS))
        );
        assert_eq!(gossip.heard(start + 2 * PERIOD), (true, 0));
    }
}
