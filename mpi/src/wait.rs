//! Processes of ours: their ends, each with a bound, and what they say.

use std::io::Read;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

const LOOK: Duration = Duration::from_millis(10);

/// How it ended; `None`: not within the bound. It runs on then.
pub fn ended(child: &mut Child, bound: Duration) -> std::io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        match child.try_wait()? {
            None if begun.elapsed() < bound => thread::sleep(LOOK),
            status => return Ok(status),
        }
    }
}

/// The same; one that has not ended by then is killed.
pub fn ended_or_killed(child: &mut Child, bound: Duration) -> std::io::Result<Option<ExitStatus>> {
    let status = ended(child, bound)?;
    if status.is_none() {
        child.kill()?;
        child.wait()?;
    }
    Ok(status)
}

/// All that comes from a pipe, read in a thread of its own: a pipe that is full holds up its process.
pub fn drain(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read until an error counts.
        let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        bytes
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_that_lasts_is_killed_and_one_that_ends_is_not() {
        let start = |seconds: &str| Command::new("sleep").arg(seconds).spawn().unwrap();
        let mut short = start("0");
        let ended = ended_or_killed(&mut short, Duration::from_secs(60)).unwrap();
        assert!(ended.unwrap().success());
        let mut long = start("60");
        assert!(super::ended(&mut long, LOOK).unwrap().is_none());
        assert!(ended_or_killed(&mut long, LOOK).unwrap().is_none());
        assert!(!long.wait().unwrap().success());
    }
}
