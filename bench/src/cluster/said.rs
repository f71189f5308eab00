//! What a command says, and when.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// A command that runs.
pub(super) struct Saying {
    child: Child,
    begun: Instant,
    coming: Receiver<(Duration, String)>,
    lines: Vec<(Duration, String)>,
}

/// A command that has ended.
pub(super) struct Said {
    pub(super) status: ExitStatus,
    pub(super) begun: Instant,
    pub(super) took: Duration,
    /// The lines of its standard error, with the time since its start.
    pub(super) lines: Vec<(Duration, String)>,
}

impl Saying {
    pub(super) fn start(command: &mut Command) -> Result<Saying> {
        let begun = Instant::now();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let errors = child.stderr.take().context("standard error is a pipe")?;
        let (send, coming) = mpsc::channel();
        std::thread::spawn(move || {
            // A line that is no text is none of Weft's.
            let lines = BufReader::new(errors).lines().map_while(|line| line.ok());
            for line in lines {
                if send.send((begun.elapsed(), line)).is_err() {
                    return;
                }
            }
        });
        Ok(Saying {
            child,
            begun,
            coming,
            lines: Vec::new(),
        })
    }

    /// Waits for a line that contains `text`.
    pub(super) fn wait_for(&mut self, text: &str, bound: Duration) -> Result<()> {
        loop {
            let left = bound.saturating_sub(self.begun.elapsed());
            let line = self.coming.recv_timeout(left);
            let line = line.with_context(|| format!("it never said `{text}`: {:?}", self.lines))?;
            self.lines.push(line);
            if self
                .lines
                .last()
                .is_some_and(|(_, line)| line.contains(text))
            {
                return Ok(());
            }
        }
    }

    /// Waits for its end; kills it after the bound, which is an error.
    pub(super) fn finish(mut self, bound: Duration) -> Result<Said> {
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if self.begun.elapsed() > bound {
                self.child.kill()?;
                self.child.wait()?;
                let lines = self.take_lines();
                bail!("it does not end within {bound:?}: {lines:?}");
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let took = self.begun.elapsed();
        Ok(Said {
            status,
            begun: self.begun,
            took,
            lines: self.take_lines(),
        })
    }

    fn take_lines(&mut self) -> Vec<(Duration, String)> {
        // The command has ended, and nothing more comes.
        self.lines.extend(self.coming.iter());
        std::mem::take(&mut self.lines)
    }
}

impl Drop for Saying {
    fn drop(&mut self) {
        // It has ended, or nobody waits for it any more.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Said {
    pub(super) fn text(&self) -> String {
        let lines: Vec<&str> = self.lines.iter().map(|(_, line)| &line[..]).collect();
        lines.join("\n")
    }

    /// When a line came first that contains `text`.
    pub(super) fn when(&self, text: &str) -> Option<Duration> {
        let found = self.lines.iter().find(|(_, line)| line.contains(text));
        found.map(|(at, _)| *at)
    }

    /// What it said of the time that is left: when, and how many seconds it named.
    pub(super) fn forecasts(&self) -> Vec<(Duration, f64)> {
        let lines = self.lines.iter();
        lines
            .filter_map(|(at, line)| Some((*at, seconds_left(line)?)))
            .collect()
    }
}

/// The number in "about 3.1 s".
fn seconds_left(line: &str) -> Option<f64> {
    let (_, after) = line.split_once("about ")?;
    let (number, _) = after.split_once(" s")?;
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_read() {
        let first = "weft: leaves within about 1.2 s if there is room: web";
        assert_eq!(seconds_left(first), Some(1.2));
        let later = "weft: 2 of 5 have left, about 3.1 s more";
        assert_eq!(seconds_left(later), Some(3.1));
        assert_eq!(seconds_left("weft: beta is drained"), None);
    }
}
