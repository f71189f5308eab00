//! An entry of a peer's `disks` or `networks`, and what it allows.

use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::permitted::Permitted;
use crate::rundir::is_switch_name;

/// A disk, or a directory of disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DiskGrant {
    /// As written, without what follows.
    pub(super) path: PathBuf,
    /// The same without symbolic links.
    pub(super) real: PathBuf,
    directory: bool,
    pub(super) write: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum NetworkGrant {
    Tap(String),
    /// The socket of a switch.
    Switch(PathBuf),
    /// The name of a switch.
    NamedSwitch(String),
    User {
        loopback: bool,
        /// Ports of the lender's loopback that may lead into the guest.
        forwards: Vec<RangeInclusive<u16>>,
    },
}

/// What is wrong with an entry of `disks` or `networks`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum GrantError {
    #[error("give the access: FILE,ro or FILE,rw")]
    NoAccess,
    #[error("give an absolute path without `..`")]
    Path,
    #[error(
        "neither the name of a switch (1 to 32 letters, digits, `-` and `_`), nor an absolute path \
         without `..`"
    )]
    Switch,
    #[error("not tap=NAME, switch=NAME, switch=PATH or user[,loopback][,forward=PORT[-PORT]]…")]
    Network,
    #[error("`{0}` is not loopback or forward=PORT[-PORT]")]
    NetworkOption(String),
    #[error("`{0}` is not a port or a range of ports")]
    Ports(String),
}

impl DiskGrant {
    pub(super) fn parse(text: &str) -> Result<DiskGrant, GrantError> {
        let (path, write) = match text.rsplit_once(',') {
            Some((path, "ro")) => (path, false),
            Some((path, "rw")) => (path, true),
            _ => return Err(GrantError::NoAccess),
        };
        let directory = path.ends_with('/');
        let path = plain(Path::new(path)).ok_or(GrantError::Path)?;
        Ok(DiskGrant {
            real: path.clone(),
            path,
            directory,
            write,
        })
    }

    /// Where `wanted` is, if this speaks of it.
    pub(super) fn place(&self, wanted: &Path) -> Option<Permitted> {
        if !self.directory {
            return (wanted == self.path).then(|| Permitted {
                path: self.real.clone(),
                beneath: false,
            });
        }
        let below = wanted.strip_prefix(&self.path).ok()?;
        (below != Path::new("")).then(|| Permitted {
            path: self.real.join(below),
            beneath: true,
        })
    }
}

/// An absolute path without double `/` and `.` components; `None` for a relative path
/// and for one with `..`.
pub(super) fn plain(path: &Path) -> Option<PathBuf> {
    let plain: PathBuf = path.components().collect();
    let goes_down = |part| matches!(part, Component::RootDir | Component::Normal(_));
    (path.is_absolute() && plain.components().all(goes_down)).then_some(plain)
}

impl NetworkGrant {
    pub(super) fn parse(text: &str) -> Result<NetworkGrant, GrantError> {
        let mut words = text.split(',');
        match words.next() {
            Some("user") => {}
            Some(tap) if tap.len() > 4 && tap.starts_with("tap=") && tap == text => {
                return Ok(NetworkGrant::Tap(tap[4..].to_owned()));
            }
            Some(switch) if switch.starts_with("switch=") => {
                // A path may have commas.
                let wanted = &text["switch=".len()..];
                if is_switch_name(wanted) {
                    return Ok(NetworkGrant::NamedSwitch(wanted.to_owned()));
                }
                let path = plain(Path::new(wanted));
                return path.map(NetworkGrant::Switch).ok_or(GrantError::Switch);
            }
            _ => return Err(GrantError::Network),
        }
        let (mut loopback, mut forwards) = (false, Vec::new());
        for word in words {
            match word.split_once('=') {
                None if word == "loopback" => loopback = true,
                Some(("forward", ports)) => forwards.push(parse_ports(ports)?),
                _ => return Err(GrantError::NetworkOption(word.to_owned())),
            }
        }
        Ok(NetworkGrant::User { loopback, forwards })
    }
}

fn parse_ports(text: &str) -> Result<RangeInclusive<u16>, GrantError> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(first..=last),
        _ => Err(GrantError::Ports(text.to_owned())),
    }
}
