//! What a disk's user is told of requests that failed on the host. The guest gets an I/O
//! error, which says nothing of a full file system or a cable.
//!
//! Once for each cause, then once a minute while it goes on: a guest that tries again
//! cannot flood a log.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use weft_confine::lock;

use super::request::Operation;

/// How long after a cause was told it is not told again.
const SILENCE: Duration = Duration::from_secs(60);
/// Causes that are told apart; of more, the first are.
const CAUSES_MAX: usize = 32;

/// What was done, and the kernel's answer: 0 where it gave none.
type Cause = (&'static str, i32);

/// When a cause was told last, and how often it was met since.
struct Told {
    at: Instant,
    since: u64,
}

/// The voice of one disk.
pub struct Troubles {
    path: PathBuf,
    told: Mutex<BTreeMap<Cause, Told>>,
}

impl Troubles {
    /// For the disk at `path`.
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            told: Mutex::default(),
        }
    }

    /// Tells the user of a request that failed: of `length` bytes at `offset`.
    pub fn report(&self, operation: Operation, offset: u64, length: u64, error: &io::Error) {
        let now = Instant::now();
        if let Some(sentence) = self.sentence(operation, offset, length, error, now) {
            eprintln!("weft: {sentence}");
        }
    }

    /// What to report at `now`, if anything is.
    fn sentence(
        &self,
        operation: Operation,
        offset: u64,
        length: u64,
        error: &io::Error,
        now: Instant,
    ) -> Option<String> {
        let verb = verb(operation);
        let others = self.others((verb, error.raw_os_error().unwrap_or(0)), now)?;
        let what = match operation {
            Operation::Flush => String::new(),
            _ => format!(" {length} bytes at {offset}"),
        };
        let path = self.path.display();
        let error = reason(error);
        let before = match others {
            0 => String::new(),
            others => format!(" (and {others} more times since the last message)"),
        };
        Some(format!(
            "disk {path}: cannot {verb}{what}: {error}; the guest gets an I/O error{before}"
        ))
    }

    /// How often a cause was met without being told; `None`: it is not told now.
    fn others(&self, cause: Cause, now: Instant) -> Option<u64> {
        let mut told = lock(&self.told);
        if let Some(known) = told.get_mut(&cause) {
            if now.duration_since(known.at) < SILENCE {
                known.since += 1;
                return None;
            }
            known.at = now;
            return Some(std::mem::take(&mut known.since));
        }
        if told.len() == CAUSES_MAX {
            return None;
        }
        told.insert(cause, Told { at: now, since: 0 });
        Some(0)
    }
}

fn verb(operation: Operation) -> &'static str {
    match operation {
        Operation::Read => "read",
        Operation::Write => "write",
        Operation::Flush => "flush",
        Operation::Discard => "discard",
        Operation::Zero { .. } => "zero",
    }
}

/// The kernel's answer, and what to do where that is plain.
fn reason(error: &io::Error) -> String {
    match (error.raw_os_error(), error.kind()) {
        (Some(libc::ENOSPC), _) => format!("{error}: free space on its file system"),
        (Some(libc::EDQUOT), _) => format!("{error}: free space within its user's quota"),
        (None, io::ErrorKind::UnexpectedEof) => {
            "the file has become shorter since the machine started".into()
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_told_once_a_minute() {
        let troubles = Troubles::new("/images/root.img".into());
        let start = Instant::now();
        let told = |operation, errno, seconds| {
            let error = io::Error::from_raw_os_error(errno);
            let now = start + Duration::from_secs(seconds);
            troubles.sentence(operation, 8192, 4096, &error, now)
        };
        let first = told(Operation::Write, libc::ENOSPC, 0).unwrap();
        assert!(
            first.starts_with(
                "disk /images/root.img: cannot write 4096 bytes at 8192: No space left on device"
            ),
            "{first}"
        );
        assert!(first.ends_with("the guest gets an I/O error"), "{first}");
        for seconds in 0..60 {
            assert_eq!(told(Operation::Write, libc::ENOSPC, seconds), None);
        }
        // Another cause is told at once, and by itself.
        let other = told(Operation::Write, libc::EIO, 1).unwrap();
        assert!(other.contains("Input/output error"), "{other}");
        let flush = told(Operation::Flush, libc::ENOSPC, 2).unwrap();
        assert!(flush.contains("cannot flush: No space"), "{flush}");
        let again = told(Operation::Write, libc::ENOSPC, 60).unwrap();
        assert!(again.contains("and 60 more times since"), "{again}");
        assert_eq!(told(Operation::Write, libc::ENOSPC, 61), None);
    }

    #[test]
    fn causes_have_a_bound() {
        let troubles = Troubles::new("disk".into());
        let now = Instant::now();
        let told = (1..200).filter(|errno| troubles.others(("read", *errno), now).is_some());
        assert_eq!(told.count(), CAUSES_MAX);
    }
}
