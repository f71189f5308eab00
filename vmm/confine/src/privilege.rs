//! Which user a machine runs as when root started it.
//!
//! Root is needed to open `/dev/kvm`, taps and disks, and for nothing after
//! that. So the process becomes, for good, the user that `sudo` was called by,
//! else `nobody`: real, effective and saved ids, with no group but the user's primary one.

use std::ffi::OsStr;

use nix::unistd::{Gid, Uid, User};
use thiserror::Error;

/// Why the process could not become somebody else.
#[derive(Debug, Error)]
pub enum PrivilegeError {
    /// `--user` names nobody.
    #[error(
        "there is no user `{0}` on this host: give another with --user, or `--user root` to stay root"
    )]
    NoSuchUser(String),
    /// `--user` without the right to change users.
    #[error("only root can run a machine as another user (`{0}`): leave --user out")]
    NotRoot(String),
    /// The kernel or the user database refused.
    #[error("cannot {what}")]
    Refused {
        /// What was tried.
        what: &'static str,
        /// The answer.
        source: std::io::Error,
    },
}

/// A user that the process is to become.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its name, for messages.
    pub name: String,
    /// User id.
    pub user: Uid,
    /// Primary group.
    pub group: Gid,
}

impl Identity {
    fn of(user: User) -> Identity {
        Identity {
            name: user.name,
            user: user.uid,
            group: user.gid,
        }
    }
}

/// Whom to become: `None` to stay who one is. `asked` is `--user`, a name or a
/// number; `sudo_uid` is what `SUDO_UID` holds.
pub fn choose(
    asked: Option<&str>,
    sudo_uid: Option<&OsStr>,
) -> Result<Option<Identity>, PrivilegeError> {
    let root = Uid::effective().is_root();
    match (asked, root) {
        (None, false) => Ok(None),
        (None, true) => invoker(sudo_uid).or_else(|_| nobody()).map(Some),
        (Some(name), _) => {
            let identity = find(name)?;
            if identity.user == Uid::effective() {
                Ok(None)
            } else if root {
                Ok(Some(identity))
            } else {
                Err(PrivilegeError::NotRoot(name.to_owned()))
            }
        }
    }
}

/// The user who called `sudo`, unless that was root.
fn invoker(sudo_uid: Option<&OsStr>) -> Result<Identity, PrivilegeError> {
    let text = sudo_uid.and_then(OsStr::to_str).unwrap_or_default();
    match find(text)? {
        identity if identity.user.is_root() => Err(PrivilegeError::NoSuchUser(text.to_owned())),
        identity => Ok(identity),
    }
}

fn nobody() -> Result<Identity, PrivilegeError> {
    find("nobody").or_else(|_| {
        // By number where the user database is empty; 65534 is the kernel's
        // overflow user (`/proc/sys/kernel/overflowuid`).
        Ok(Identity {
            name: "nobody".to_owned(),
            user: Uid::from_raw(65534),
            group: Gid::from_raw(65534),
        })
    })
}

fn find(name: &str) -> Result<Identity, PrivilegeError> {
    let lookup = |error: nix::Error| PrivilegeError::Refused {
        what: "read the user database",
        source: error.into(),
    };
    let found = match name.parse() {
        Ok(number) => User::from_uid(Uid::from_raw(number)).map_err(lookup)?,
        Err(_) if name.is_empty() => None,
        Err(_) => User::from_name(name).map_err(lookup)?,
    };
    found
        .map(Identity::of)
        .ok_or_else(|| PrivilegeError::NoSuchUser(name.to_owned()))
}

/// Becomes `identity` for good, in every thread, with everything open that only
/// root may open.
pub fn become_user(identity: &Identity) -> Result<(), PrivilegeError> {
    let refused = |what| {
        move |error: nix::Error| PrivilegeError::Refused {
            what,
            source: error.into(),
        }
    };
    let (user, group) = (identity.user, identity.group);
    nix::unistd::setgroups(&[]).map_err(refused("give up groups"))?;
    nix::unistd::setresgid(group, group, group).map_err(refused("change the group"))?;
    nix::unistd::setresuid(user, user, user).map_err(refused("change the user"))?;
    let now = nix::unistd::getresuid().map_err(refused("read the user"))?;
    if [now.real, now.effective, now.saved] != [user; 3] {
        return Err(PrivilegeError::Refused {
            what: "give up root: it can be regained",
            source: std::io::ErrorKind::PermissionDenied.into(),
        });
    }
    Ok(())
}

/// Does `work` with the rights of `identity` for files, and is root again afterwards. While the
/// process has one thread.
///
/// # Errors
/// The kernel does not change the user.
pub fn as_user<T>(identity: &Identity, work: impl FnOnce() -> T) -> Result<T, PrivilegeError> {
    let refused = |what| {
        move |error: nix::Error| PrivilegeError::Refused {
            what,
            source: error.into(),
        }
    };
    let (user, group) = (nix::unistd::geteuid(), nix::unistd::getegid());
    let groups = nix::unistd::getgroups().map_err(refused("read the groups"))?;
    nix::unistd::setgroups(&[]).map_err(refused("give up groups"))?;
    nix::unistd::setegid(identity.group).map_err(refused("change the group"))?;
    nix::unistd::seteuid(identity.user).map_err(refused("change the user"))?;
    let done = work();
    nix::unistd::seteuid(user).map_err(refused("be root again"))?;
    nix::unistd::setegid(group).map_err(refused("have root's group again"))?;
    nix::unistd::setgroups(&groups).map_err(refused("have root's groups again"))?;
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name_and_number() {
        assert_eq!(find("root").unwrap().user, Uid::from_raw(0));
        assert_eq!(find("0").unwrap().name, "root");
        assert!(matches!(
            find("no-such-user-here"),
            Err(PrivilegeError::NoSuchUser(_))
        ));
    }

    #[test]
    fn root_never_stays_root_unasked() {
        for sudo_uid in [None, Some("0"), Some("x"), Some("4294967294")] {
            let sudo_uid = sudo_uid.map(OsStr::new);
            let identity = choose(None, sudo_uid).unwrap();
            match Uid::effective().is_root() {
                true => assert_eq!(identity.unwrap().name, "nobody"),
                false => assert_eq!(identity, None),
            }
        }
    }
}
