//! How busy the agent's host is, as `/proc/loadavg` says it (proc_loadavg(5)).

use std::fs;

use nix::unistd::{SysconfVar, sysconf};

/// Of the last look among all: a mean over some 8 s.
const WEIGHT: f64 = 1.0 / 8.0;

/// The mean number of runnable threads.
#[derive(Default)]
pub struct Load {
    runnable: Option<f64>,
}

impl Load {
    /// Looks once more. Runnable threads as a percentage of the host's processors; `None` where
    /// the kernel does not say.
    pub fn look(&mut self) -> Option<u32> {
        let now = runnable(&fs::read_to_string("/proc/loadavg").ok()?)?;
        let processors = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok()??.max(1);
        let mean = self.runnable.get_or_insert(now);
        *mean += (now - *mean) * WEIGHT;
        Some((*mean * 100.0 / processors as f64) as u32)
    }
}

/// The threads that run or could, without the one that asks: the fourth field, as in
/// `0.20 0.18 0.12 3/80 11206`.
fn runnable(loadavg: &str) -> Option<f64> {
    let (runnable, _) = loadavg.split(' ').nth(3)?.split_once('/')?;
    let runnable: u32 = runnable.parse().ok()?;
    Some(f64::from(runnable.saturating_sub(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runnable_threads_are_the_fourth_field() {
        assert_eq!(runnable("43.17 23.50 11.32 41/1324 13284\n"), Some(40.0));
        assert_eq!(runnable("0.00 0.00 0.00 0/80 1"), Some(0.0));
        for malformed in ["", "1 2 3", "1 2 3 4 5", "1 2 3 x/80 5", "1 2 3 -1/80 5"] {
            assert_eq!(runnable(malformed), None, "{malformed}");
        }
    }

    #[test]
    fn this_host_says_how_busy_it_is() {
        assert!(Load::default().look().is_some());
    }
}
