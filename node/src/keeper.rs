//! The process with which the launchers of machines end: the agent of a reservation, which nothing
//! may outlive.
//!
//! `WEFT_KEEPER=PID:STARTTICKS` names it, by its number and by when it started (field 22 of
//! `/proc/PID/stat`): another process that gets the number later is not taken for it. It is an
//! interface between processes of Weft. Whatever ends the keeper, SIGKILL included, the kernel
//! makes its pidfd readable, so no process has to live to tell.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::str::FromStr;
use std::time::Duration;

use nix::sys::signal::{SigSet, SigmaskHow};

use crate::sys;

/// The variable that names a keeper.
pub const VARIABLE: &str = "WEFT_KEEPER";
/// How long the thread waits at one time.
const WAIT: Duration = Duration::from_secs(3600);

/// A process that is told from all others, also from later ones of its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeeperId {
    pid: i32,
    /// Since the host's start.
    start_ticks: u64,
}

/// Why a launcher has no keeper although it needs one.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// The variable says something else.
    #[error(
        "{VARIABLE}={0} does not name a process: write PID:STARTTICKS, with field 22 of \
         /proc/PID/stat, or unset it"
    )]
    Malformed(String),
    /// What would be started would be left behind.
    #[error(
        "process {}, with which this machine would end ({VARIABLE}), has ended already: nothing \
         is started",
        .0.pid
    )]
    Gone(KeeperId),
    /// A kernel before 5.3, or no descriptor.
    #[error("cannot watch process {pid}, with which this machine ends ({VARIABLE})")]
    Watch {
        pid: i32,
        /// What the kernel said.
        source: io::Error,
    },
}

impl KeeperId {
    /// This process: what the variable of those that it keeps is set to.
    ///
    /// # Errors
    /// The kernel's.
    pub fn here() -> io::Result<KeeperId> {
        let pid = std::process::id() as i32;
        let start_ticks = start_ticks(pid)?;
        Ok(KeeperId { pid, start_ticks })
    }
}

impl fmt::Display for KeeperId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.pid, self.start_ticks)
    }
}

impl FromStr for KeeperId {
    type Err = KeeperError;

    fn from_str(text: &str) -> Result<KeeperId, KeeperError> {
        let is_number = |text: &&str| text.bytes().all(|byte| byte.is_ascii_digit());
        let parsed = text.split_once(':').and_then(|(pid, ticks)| {
            let pid = Some(pid).filter(is_number)?.parse().ok()?;
            let start_ticks = Some(ticks).filter(is_number)?.parse().ok()?;
            (pid > 0).then_some(KeeperId { pid, start_ticks })
        });
        parsed.ok_or_else(|| KeeperError::Malformed(text.to_owned()))
    }
}

/// A keeper that lived a moment ago.
#[derive(Debug)]
pub struct Keeper {
    id: KeeperId,
    /// Readable once it has ended.
    pidfd: OwnedFd,
}

impl Keeper {
    /// The one that the environment names.
    ///
    /// # Errors
    /// See [`KeeperError`].
    pub fn of_environment() -> Result<Option<Keeper>, KeeperError> {
        let Some(value) = std::env::var_os(VARIABLE) else {
            return Ok(None);
        };
        Keeper::find(value.to_string_lossy().parse()?).map(Some)
    }

    fn find(id: KeeperId) -> Result<Keeper, KeeperError> {
        let pid = id.pid;
        let pidfd = sys::pidfd_open(pid).map_err(|source| match source.raw_os_error() {
            Some(libc::ESRCH) => KeeperError::Gone(id),
            _ => KeeperError::Watch { pid, source },
        })?;
        // After the open: had another process the number then, it has it now.
        if start_ticks(pid).ok() != Some(id.start_ticks) {
            return Err(KeeperError::Gone(id));
        }
        let keeper = Keeper { id, pidfd };
        match keeper.has_ended_within(Duration::ZERO) {
            Ok(false) => Ok(keeper),
            Ok(true) => Err(KeeperError::Gone(id)),
            Err(source) => Err(KeeperError::Watch { pid, source }),
        }
    }

    /// Which process it is.
    pub fn pid(&self) -> i32 {
        self.id.pid
    }

    /// Waits for its end. Also one that nobody has waited for yet has ended.
    fn has_ended_within(&self, bound: Duration) -> io::Result<bool> {
        Ok(sys::wait_readable(&[self.pidfd.as_fd()], bound)?[0])
    }

    /// Has a thread call `end` once the keeper has ended. That thread gets no signals: this
    /// process may take them over later, in another thread.
    ///
    /// # Errors
    /// The kernel's: there is no thread.
    pub fn watch(self, end: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut before = SigSet::empty();
        let all = SigSet::all();
        nix::sys::signal::pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&all), Some(&mut before))?;
        let thread = std::thread::Builder::new().name("weft-keeper".into());
        let started = thread.spawn(move || {
            // A wait that fails would leave a machine without a keeper.
            while matches!(self.has_ended_within(WAIT), Ok(false)) {}
            end();
        });
        before.thread_set_mask()?;
        started.map(drop)
    }
}

/// When a process started, in ticks since the host did.
fn start_ticks(pid: i32) -> io::Result<u64> {
    // Of what follows the name, which may have brackets and spaces, it is the 20th.
    const FIELD: usize = 22 - 3;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let rest = stat.rsplit_once(')').map(|(_, rest)| rest);
    let field = rest.and_then(|rest| rest.split_whitespace().nth(FIELD)?.parse().ok());
    field.ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat is not readable")))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::sync::mpsc::channel;

    use super::*;

    const BOUND: Duration = Duration::from_secs(10);

    fn sleeper() -> Child {
        Command::new("/bin/sleep").arg("60").spawn().unwrap()
    }

    fn id_of(child: &Child) -> KeeperId {
        let pid = child.id() as i32;
        let start_ticks = start_ticks(pid).unwrap();
        KeeperId { pid, start_ticks }
    }

    #[test]
    fn a_keeper_is_written_and_read() {
        let here = KeeperId::here().unwrap();
        assert_eq!(here.to_string().parse::<KeeperId>().unwrap(), here);
        for text in [
            "", "1", ":", "1:", ":1", "-1:2", "0:2", "+1:2", "1:2:3", "1: 2", "a:b",
        ] {
            let error = text.parse::<KeeperId>().unwrap_err().to_string();
            assert!(error.contains("PID:STARTTICKS"), "{text}: {error}");
        }
    }

    #[test]
    fn the_end_of_a_keeper_is_seen_before_anybody_has_waited_for_it() {
        let mut child = sleeper();
        let id = id_of(&child);
        let (say, hear) = channel();
        let keeper = Keeper::find(id).unwrap();
        keeper.watch(move || say.send(()).unwrap()).unwrap();
        assert!(hear.recv_timeout(Duration::from_millis(50)).is_err());
        child.kill().unwrap();
        hear.recv_timeout(BOUND).unwrap();
        let gone = Keeper::find(id).unwrap_err();
        assert!(
            matches!(gone, KeeperError::Gone(found) if found == id),
            "{gone}"
        );
        child.wait().unwrap();
        let gone = Keeper::find(id).unwrap_err().to_string();
        assert!(gone.contains("has ended already"), "{gone}");
    }

    #[test]
    fn another_process_with_the_number_is_no_keeper() {
        let mut child = sleeper();
        let id = id_of(&child);
        let earlier = KeeperId {
            start_ticks: id.start_ticks - 1,
            ..id
        };
        assert!(matches!(Keeper::find(earlier), Err(KeeperError::Gone(_))));
        assert_eq!(Keeper::find(id).unwrap().pid(), id.pid);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_thread_that_watches_leaves_signals_as_they_were() {
        let mut child = sleeper();
        let mask = || SigSet::thread_get_mask().unwrap();
        let before = mask();
        Keeper::find(id_of(&child)).unwrap().watch(|| {}).unwrap();
        assert_eq!(mask(), before);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
