//! What the slices of one peer may open: judged by all of its entries.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Consent;
use super::grant::{NetworkGrant, plain};
use super::permitted::Permitted;
use crate::config::Peer;

/// What the slice of a peer is told of its lender.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lender {
    /// What the lender's configuration calls the peer.
    pub peer: String,
    /// What it may open.
    pub consent: Consent,
}

/// The lender's configuration does not allow it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the lender does not allow this {device}{hint}; to allow it, write `{field} = [\"{entry}\"]` into the [[peer]] `{peer}` of the lender's node.toml, and start its daemon again"
)]
pub struct Refused {
    device: &'static str,
    peer: String,
    field: &'static str,
    entry: String,
    hint: &'static str,
}

impl Lender {
    /// What the configuration says of a peer.
    pub fn of(peer: &Peer) -> Lender {
        Lender {
            peer: peer.name.clone(),
            consent: peer.consent.clone(),
        }
    }

    /// Where a disk is that the peer wants, if it may have it.
    ///
    /// # Errors
    /// It may not.
    pub fn disk(&self, wanted: &Path, write: bool) -> Result<Permitted, Refused> {
        let places = plain(wanted).into_iter().flat_map(|wanted| {
            let disks = self.consent.disks.iter();
            disks.filter_map(move |disk| Some((disk.place(&wanted)?, disk.write)))
        });
        let (mut permitted, mut reads) = (None, false);
        for (place, may_write) in places {
            reads = true;
            if may_write || !write {
                permitted.get_or_insert(place);
            }
        }
        let way = if write { "rw" } else { "ro" };
        permitted.ok_or_else(|| Refused {
            device: "disk",
            peer: self.peer.clone(),
            field: "disks",
            entry: format!("{},{way}", wanted.display()),
            hint: match reads {
                true => " for writing (the option `ro` opens it for reading)",
                false => "",
            },
        })
    }

    /// Whether the peer may use a tap device.
    ///
    /// # Errors
    /// It may not.
    pub fn tap(&self, name: &str) -> Result<(), Refused> {
        let is_it = |grant: &NetworkGrant| matches!(grant, NetworkGrant::Tap(tap) if tap == name);
        match self.consent.networks.iter().any(is_it) {
            true => Ok(()),
            false => Err(self.no_network(format!("tap={name}"))),
        }
    }

    /// Whether the peer may connect to the switch at a socket.
    ///
    /// # Errors
    /// It may not.
    pub fn switch(&self, socket: &Path) -> Result<(), Refused> {
        let wanted = plain(socket);
        let is_it = |grant: &NetworkGrant| matches!(grant, NetworkGrant::Switch(path) if Some(path) == wanted.as_ref());
        match self.consent.networks.iter().any(is_it) {
            true => Ok(()),
            false => Err(self.no_network(format!("switch={}", socket.display()))),
        }
    }

    /// Whether the peer may connect to the switch that has a name here.
    ///
    /// # Errors
    /// It may not.
    pub fn named_switch(&self, name: &str) -> Result<(), Refused> {
        let is_it = |grant: &NetworkGrant| matches!(grant, NetworkGrant::NamedSwitch(allowed) if allowed == name);
        match self.consent.networks.iter().any(is_it) {
            true => Ok(()),
            false => Err(self.no_network(format!("switch={name}"))),
        }
    }

    /// Whether the peer may have a network in user space that reaches the lender's
    /// loopback, if `loopback`, and is reached by these of its ports. One entry has to
    /// allow all of it.
    ///
    /// # Errors
    /// It may not.
    pub fn user_network(&self, loopback: bool, ports: &[u16]) -> Result<(), Refused> {
        let covers = |grant: &NetworkGrant| match grant {
            NetworkGrant::Tap(_) | NetworkGrant::Switch(_) | NetworkGrant::NamedSwitch(_) => false,
            NetworkGrant::User {
                loopback: may_loopback,
                forwards,
            } => {
                let open = |port| forwards.iter().any(|range| range.contains(port));
                (*may_loopback || !loopback) && ports.iter().all(open)
            }
        };
        if self.consent.networks.iter().any(covers) {
            return Ok(());
        }
        let mut entry = "user".to_owned();
        if loopback {
            entry.push_str(",loopback");
        }
        for port in ports {
            entry.push_str(&format!(",forward={port}"));
        }
        Err(self.no_network(entry))
    }

    fn no_network(&self, entry: String) -> Refused {
        Refused {
            device: "network",
            peer: self.peer.clone(),
            field: "networks",
            entry,
            hint: "",
        }
    }
}
