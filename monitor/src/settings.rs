//! What a machine's processes are told.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::unistd::{Gid, Uid};
use serde::{Deserialize, Serialize};
use weft_confine::Mode;
use weft_confine::privilege::Identity;
use weft_machine::Configuration;
use weft_node::consent::Lender;
use weft_platform::clock::{Reference, TscMeasurement, monotonic};

/// To all of them, on every host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SliceSettings {
    /// The machine.
    pub configuration: Configuration,
    /// The clock that its nodes follow; none on a machine of one that cannot grow.
    pub reference: Option<Reference>,
    /// For tests: frames wait for a random time below this before they are sent.
    pub link_delay_max: Duration,
}

/// To those on the launcher's host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnSettings {
    /// What the machine is called.
    pub name: String,
    /// What happens to calls that nobody has business with.
    pub confine: Confine,
    /// Whom to become.
    pub user: Option<User>,
    /// When the command, or this life, began.
    pub started: Moment,
    /// The measurement that began then.
    pub tsc: TscMeasurement,
    /// How often the guest restarted before.
    pub restarts: u32,
    /// Marks the end of boot on the console.
    pub ready: Option<String>,
    /// The checkpoint that the machine is made from, instead of its kernel.
    pub restore: Option<PathBuf>,
    /// Where the other nodes are at the start; empty if they are on this host.
    pub hosts: Vec<String>,
    /// Where the console's socket is, if it has one.
    pub console: Option<PathBuf>,
    /// Where the switches are that have a name.
    pub switches: PathBuf,
    /// What a machine that came from another host may open here.
    pub lender: Option<Lender>,
    /// It comes now: its memory file and the socket to the daemon are among the sockets.
    pub takes_home: bool,
}

/// What happens to a system call that a thread has no business with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Confine {
    /// The process ends.
    Enforce,
    /// The kernel's log names the call.
    Log,
    /// Nothing.
    Off,
}

impl From<Confine> for Mode {
    fn from(confine: Confine) -> Mode {
        match confine {
            Confine::Enforce => Mode::Enforce,
            Confine::Log => Mode::Log,
            Confine::Off => Mode::Off,
        }
    }
}

/// A user that a process is to become.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct User {
    name: String,
    user: u32,
    group: u32,
}

impl From<&Identity> for User {
    fn from(identity: &Identity) -> User {
        User {
            name: identity.name.clone(),
            user: identity.user.as_raw(),
            group: identity.group.as_raw(),
        }
    }
}

impl From<User> for Identity {
    fn from(user: User) -> Identity {
        Identity {
            name: user.name,
            user: Uid::from_raw(user.user),
            group: Gid::from_raw(user.group),
        }
    }
}

/// An [`Instant`], for another process of the same host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment(Duration);

impl From<Instant> for Moment {
    fn from(instant: Instant) -> Moment {
        Moment(monotonic().saturating_sub(instant.elapsed()))
    }
}

impl From<Moment> for Instant {
    fn from(moment: Moment) -> Instant {
        let now = Instant::now();
        let passed = monotonic().saturating_sub(moment.0);
        now.checked_sub(passed).unwrap_or(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_the_same_for_all() {
        let before = Instant::now() - Duration::from_secs(3);
        let text = serde_json::to_string(&Moment::from(before)).unwrap();
        let moment: Moment = serde_json::from_str(&text).unwrap();
        let passed = Instant::from(moment).elapsed();
        // Nobody is stopped for ever between two lines.
        assert!(passed >= Duration::from_millis(2999), "{passed:?}");
        assert!(passed <= before.elapsed() + Duration::from_millis(1));
    }

    #[test]
    fn a_user_comes_through() {
        let identity = Identity {
            name: "nobody".into(),
            user: Uid::from_raw(65534),
            group: Gid::from_raw(65533),
        };
        let text = serde_json::to_string(&User::from(&identity)).unwrap();
        let user: User = serde_json::from_str(&text).unwrap();
        assert_eq!(Identity::from(user), identity);
    }
}
