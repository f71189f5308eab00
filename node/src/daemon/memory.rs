//! How a slice is kept within the memory that was lent to it.
//!
//! The runtime and the monitor keep to their budget by themselves, but what runs in
//! them is somebody else's code. Where this daemon may make memory cgroups, the
//! kernel bounds a slice ([`crate::cgroup`]). Where it may not, the daemon looks at
//! what the slice holds, so often that it cannot pass its bound by much between two
//! looks, and ends it when it does.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::budget::{OVERHEAD_BYTES, bound_bytes};
use crate::cgroup::{Cgroups, Group};
use crate::size::format_bytes;

/// Faster than a thread can fill memory, a second.
const GROWTH_BYTES: u64 = 10 << 30;
/// Bounds of the time between two looks.
const LOOK_MIN: Duration = Duration::from_millis(5);
pub(super) const LOOK_MAX: Duration = Duration::from_secs(1);

/// Why a slice was not started, or was ended, because of its memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// No group could be made for it.
    #[error("the slice's memory cannot be limited")]
    Limit(#[source] io::Error),
    /// Its account could not be opened.
    #[error("the slice's memory cannot be watched: {path}")]
    Watch {
        /// Its account.
        path: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// It held more than it may.
    #[error("{}", sentence(&format!("it used {}", format_bytes(*held_bytes)), *lent_bytes))]
    Used { held_bytes: u64, lent_bytes: u64 },
    /// The kernel refused it more than it may hold, and ended it.
    #[error("{}", sentence("it needed more", *lent_bytes))]
    Needed { lent_bytes: u64 },
    /// The kernel does not say what it holds.
    #[error("its slice was ended: its memory use cannot be read: {0}")]
    Unreadable(io::Error),
    /// Its account does not say what it holds.
    #[error("its slice was ended: its memory use cannot be read: no {0} in its status")]
    NoField(&'static str),
}

fn sentence(what: &str, lent_bytes: u64) -> String {
    format!(
        "its slice was ended because of its memory: {what}, but {} are allowed ({} lent, a \
        quarter of that, and {} for Weft itself)",
        format_bytes(bound_bytes(lent_bytes)),
        format_bytes(lent_bytes),
        format_bytes(OVERHEAD_BYTES),
    )
}

/// Keeps one slice within its bound.
pub(super) struct Keeper {
    lent_bytes: u64,
    group: Option<Group>,
    /// Its account in `/proc`, where no group bounds it.
    account: Option<File>,
    next_look: Instant,
}

impl Keeper {
    /// For a slice that is about to be started.
    pub fn new(cgroups: Option<&Cgroups>, lent_bytes: u64) -> Result<Keeper, MemoryError> {
        let make = |cgroups: &Cgroups| {
            cgroups
                .make(bound_bytes(lent_bytes))
                .map_err(MemoryError::Limit)
        };
        Ok(Keeper {
            lent_bytes,
            group: cgroups.map(make).transpose()?,
            account: None,
            next_look: Instant::now(),
        })
    }

    /// What the slice's process enters.
    pub fn entry(&self) -> Option<BorrowedFd<'_>> {
        self.group.as_ref().map(Group::entry)
    }

    /// The slice was started, as `pid`. Its account is opened once: the number can
    /// become another's.
    pub fn started(&mut self, pid: i32) -> Result<(), MemoryError> {
        if self.group.is_none() {
            let path = format!("/proc/{pid}/status");
            let opened = File::open(&path);
            self.account = Some(opened.map_err(|source| MemoryError::Watch { path, source })?);
        }
        Ok(())
    }

    /// How long until the next look is due.
    pub fn due(&self) -> Duration {
        match &self.account {
            None => LOOK_MAX,
            Some(_) => self.next_look.saturating_duration_since(Instant::now()),
        }
    }

    /// Looks at what the slice holds, if that is due. An error says why it has to be
    /// ended.
    pub fn look(&mut self) -> Result<(), MemoryError> {
        let Some(account) = &self.account else {
            return Ok(());
        };
        if Instant::now() < self.next_look {
            return Ok(());
        }
        let Some(held_bytes) = read_held(account)? else {
            // It has ended, which is seen elsewhere.
            self.next_look = Instant::now() + LOOK_MAX;
            return Ok(());
        };
        let bound_bytes = bound_bytes(self.lent_bytes);
        if held_bytes > bound_bytes {
            return Err(MemoryError::Used {
                held_bytes,
                lent_bytes: self.lent_bytes,
            });
        }
        self.next_look = Instant::now() + pause(bound_bytes - held_bytes);
        Ok(())
    }

    /// Why the kernel ended the slice, if it was for its memory.
    pub fn ended_by_kernel(&self) -> Option<MemoryError> {
        let full = self.group.as_ref()?.was_full().ok()?;
        full.then_some(MemoryError::Needed {
            lent_bytes: self.lent_bytes,
        })
    }
}

/// How long a slice needs at least to fill `room_bytes`.
fn pause(room_bytes: u64) -> Duration {
    let seconds = room_bytes as f64 / GROWTH_BYTES as f64;
    Duration::from_secs_f64(seconds).clamp(LOOK_MIN, LOOK_MAX)
}

fn read_held(account: &File) -> Result<Option<u64>, MemoryError> {
    const BYTES_MAX: usize = 8192;
    let mut text = [0; BYTES_MAX];
    match account.read_at(&mut text, 0) {
        Ok(length) => held_bytes(&String::from_utf8_lossy(&text[..length])),
        // Reaped already.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(MemoryError::Unreadable(error)),
    }
}

/// All memory that a process holds, by the text of its `/proc/PID/status`: resident
/// (its own, of files, shared), swapped out, page tables, and huge pages of the host's
/// pool. `None` when it has ended or is about to; an error when the text does not say.
fn held_bytes(status: &str) -> Result<Option<u64>, MemoryError> {
    let field = |name: &str| {
        status
            .lines()
            .find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
    };
    // A process that ends gives its memory up first, while it still seems to run.
    let has_memory = status.lines().any(|line| line.starts_with("Vm"));
    if field("State").is_some() && !has_memory {
        return Ok(None);
    }
    let bytes = |name: &str| {
        let number = field(name)?.strip_suffix(" kB")?.trim();
        number.parse::<u64>().ok()?.checked_mul(1024)
    };
    let mut sum = 0_u64;
    for name in ["VmRSS", "VmSwap", "VmPTE"] {
        let part = bytes(name).ok_or(MemoryError::NoField(name))?;
        sum = sum.saturating_add(part);
    }
    // Absent where the kernel has no such pool.
    Ok(Some(sum.saturating_add(bytes("HugetlbPages").unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_a_process_holds_counts() {
        let status = "Name:\tweft-slice\nState:\tR (running)\nVmRSS:\t    1000 kB\n\
             VmPTE:\t    20 kB\nVmSwap:\t    300 kB\nHugetlbPages:\t    4000 kB\n";
        assert_eq!(held_bytes(status).unwrap(), Some(5320 * 1024));
        let without_pool = status.replace("HugetlbPages", "Other");
        assert_eq!(held_bytes(&without_pool).unwrap(), Some(1320 * 1024));
    }

    #[test]
    fn an_account_that_does_not_say_is_an_error_and_no_zero() {
        assert!(held_bytes("").is_err());
        assert!(held_bytes("State:\tR (running)\nVmRSS:\t1 kB\nVmPTE:\t1 kB\n").is_err());
        assert!(held_bytes("VmRSS:\tmuch kB\nVmPTE:\t1 kB\nVmSwap:\t0 kB\n").is_err());
        assert_eq!(held_bytes("State:\tZ (zombie)\n").unwrap(), None);
        assert_eq!(
            held_bytes("State:\tR (running)\nThreads:\t1\n").unwrap(),
            None
        );
    }

    #[test]
    fn this_process_can_be_read() {
        let account = File::open("/proc/self/status").unwrap();
        let held = read_held(&account).unwrap().unwrap();
        assert!(held > 100 << 10, "{held}");
    }

    #[test]
    fn the_next_look_comes_before_the_bound() {
        assert_eq!(pause(0), LOOK_MIN);
        assert_eq!(pause(u64::MAX), LOOK_MAX);
        let room = 1 << 30;
        assert!(pause(room).as_secs_f64() * GROWTH_BYTES as f64 <= room as f64 * 1.001);
    }
}
