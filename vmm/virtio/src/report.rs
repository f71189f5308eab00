//! Messages about what a guest did wrong: a few, then silence for a while.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use weft_confine::lock;

/// Messages that one device may write in a row,
const BURST: u32 = 4;
/// before it is silent for the rest of this time.
const INTERVAL: Duration = Duration::from_secs(10);

/// One device's voice.
#[derive(Debug)]
pub struct Report {
    device: String,
    /// Start of the interval, and messages in it.
    said: Mutex<(Instant, u32)>,
}

impl Report {
    /// For the device of this name.
    pub fn new(device: &str) -> Self {
        Self {
            device: device.into(),
            said: Mutex::new((Instant::now(), 0)),
        }
    }

    /// Writes a line, unless there were too many lately.
    pub fn say(&self, message: impl std::fmt::Display) {
        if self.may_speak() {
            eprintln!("weft: {}: {message}", self.device);
        }
    }

    fn may_speak(&self) -> bool {
        let mut said = lock(&self.said);
        if said.0.elapsed() >= INTERVAL {
            *said = (Instant::now(), 0);
        }
        said.1 = said.1.saturating_add(1);
        said.1 <= BURST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_cannot_flood_the_log() {
        let report = Report::new("test");
        let spoken = (0..1000).filter(|_| report.may_speak()).count();
        assert_eq!(spoken, BURST as usize);
    }
}
