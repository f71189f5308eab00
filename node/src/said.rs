//! What a slice, or another host's daemon, may have this process say: its lines go to
//! a log or a terminal, and it is not trusted with either.
//!
//! At first [`BURST`] lines, then one each [`PERIOD`]; what is beyond that is counted,
//! and the count is a line of its own. A line is a sentence without anything that
//! would steer a terminal.

use std::time::{Duration, Instant};

/// Lines at once.
const BURST: u32 = 16;
/// Time for another one.
const PERIOD: Duration = Duration::from_secs(1);
/// Longest line.
const CHARACTERS_MAX: usize = 1024;
/// Messages that are looked at before anything else has its turn.
pub const BATCH: usize = 64;

/// Rations the lines of one speaker.
#[derive(Debug)]
pub struct Said {
    /// Lines that may be said now.
    room: u32,
    /// When there was last one more.
    renewed: Instant,
    left_out: u64,
}

impl Said {
    /// For a speaker that has said nothing yet.
    pub fn new(now: Instant) -> Said {
        Said {
            room: BURST,
            renewed: now,
            left_out: 0,
        }
    }

    /// The line to say for `text`; none where there is no room for it.
    pub fn hear(&mut self, now: Instant, text: &str) -> Option<String> {
        if self.has_room(now) && self.left_out == 0 {
            self.room -= 1;
            return Some(plain(text));
        }
        self.left_out += 1;
        None
    }

    /// A line for what was left out, once there is room for it.
    pub fn rest(&mut self, now: Instant) -> Option<String> {
        if self.left_out == 0 || !self.has_room(now) {
            return None;
        }
        self.room -= 1;
        self.last()
    }

    /// The same for a speaker that says nothing more.
    pub fn last(&mut self) -> Option<String> {
        match std::mem::take(&mut self.left_out) {
            0 => None,
            1 => Some("1 message more was left out".to_owned()),
            count => Some(format!("{count} messages more were left out")),
        }
    }

    /// Whether it is worth listening. Who is not listened to has to wait, and takes no
    /// time of anybody.
    pub fn listens(&mut self, now: Instant) -> bool {
        self.left_out == 0 || self.has_room(now)
    }

    fn has_room(&mut self, now: Instant) -> bool {
        let periods = now.saturating_duration_since(self.renewed).as_secs() / PERIOD.as_secs();
        if periods > 0 {
            self.renewed = now;
            let more = u32::try_from(periods).unwrap_or(BURST);
            self.room = self.room.saturating_add(more).min(BURST);
        }
        self.room > 0
    }
}

/// What came from a process over its control socket.
pub enum Spoken {
    /// A text for the user.
    Sentence(String),
    /// It has begun.
    Ready,
    /// Something else.
    Other,
    /// Nothing now.
    Nothing,
    /// Nothing ever again.
    Closed,
}

/// A text of somebody else's as one line of bounded length.
pub fn plain(text: &str) -> String {
    text.chars()
        .filter(|c| weft_cluster::is_shown(*c))
        .take(CHARACTERS_MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_line_a_second() {
        let start = Instant::now();
        let mut said = Said::new(start);
        let mut lines = Vec::new();
        const SECONDS: u32 = 100;
        for millisecond in 0..SECONDS * 1000 {
            let now = start + Duration::from_millis(millisecond.into());
            lines.extend(said.rest(now));
            for _ in 0..10 {
                lines.extend(said.hear(now, "A"));
            }
        }
        let told = lines.iter().filter(|line| *line == "A").count() as u32;
        assert_eq!(told, BURST);
        assert!(lines.len() as u32 <= BURST + SECONDS, "{}", lines.len());
        lines.extend(said.last());
        let left_out: u64 = lines
            .iter()
            .filter_map(|line| line.split_once(" messages more")?.0.parse::<u64>().ok())
            .sum();
        assert_eq!(left_out, u64::from(SECONDS) * 10_000 - u64::from(BURST));
    }

    #[test]
    fn who_says_little_is_heard() {
        let start = Instant::now();
        let mut said = Said::new(start);
        for number in 0..1000_u64 {
            let now = start + PERIOD * number as u32;
            assert!(said.listens(now));
            assert_eq!(said.rest(now), None);
            assert!(said.hear(now, "word").is_some());
        }
        assert_eq!(said.last(), None);
    }

    #[test]
    fn a_line_is_short_and_steers_nothing() {
        assert_eq!(plain("\u{1b}[2Ja\nb\u{9b}c"), "[2Jabc");
        assert_eq!(plain(&"x".repeat(1 << 20)).len(), CHARACTERS_MAX);
    }
}
