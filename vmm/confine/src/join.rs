//! The end of a thread, waited for with a bound.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two checks: an end is rare, and only the cleanup waits for it.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// Joins a thread that was told to end; whether it ended before `deadline`. One
/// that did not is left to itself.
pub fn join_until<T>(thread: JoinHandle<T>, deadline: Instant) -> bool {
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    // It does not panic: panics abort.
    thread.join().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_waited_for_and_not_for_ever() {
        let soon = || Instant::now() + Duration::from_millis(20);
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let waiting = std::thread::spawn(move || ended.recv().is_err());
        assert!(!join_until(waiting, soon()));
        drop(end);
        let done = std::thread::spawn(|| ());
        assert!(join_until(done, Instant::now() + Duration::from_secs(20)));
    }
}
