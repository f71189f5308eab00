//! Other nodes that this one knows: what each may do, and what it may open here.

use serde::{Deserialize, Serialize};
use weft_wire::keys::{KeyError, PublicKey};

use super::{Wrong, with_port};
use crate::consent::Consent;

/// Fields of a `[[peer]]`.
pub(super) const FIELDS: [&str; 8] = [
    "name", "key", "address", "may", "user", "disks", "networks", "machines",
];

/// First user id of slices: peers whose configuration names no user get those from
/// here on.
pub const USER_FIRST: u32 = 60_100;
/// Last one that is given: from 61184 on systemd gives users away. Within the 65536
/// that a container usually has; more than [`super::PEERS_MAX`].
pub const USER_LAST: u32 = 61_183;

/// What another node may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum May {
    /// The node may borrow from this host: run programs and machines here.
    Borrow,
    /// It may lend to this host: be asked to run what is this host's.
    Lend,
    Both,
}

impl May {
    /// As `may` and `--may` spell it.
    pub fn name(self) -> &'static str {
        match self {
            May::Borrow => "borrow",
            May::Lend => "lend",
            May::Both => "both",
        }
    }

    /// Whether it may borrow from this host.
    pub fn borrow(self) -> bool {
        matches!(self, May::Borrow | May::Both)
    }

    /// Whether it may lend to this host.
    pub fn lend(self) -> bool {
        matches!(self, May::Lend | May::Both)
    }
}

/// Another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// A name for messages.
    pub name: String,
    /// Its public key.
    pub key: PublicKey,
    /// Where it listens, `HOST:PORT`, when it is known.
    pub address: Option<String>,
    /// What it may do; none where the configuration does not say.
    pub may: Option<May>,
    /// The user that its slices run as, where the daemon is root.
    pub user: u32,
    /// What its slices may open here.
    pub consent: Consent,
    /// Its machines may come here for good, and go on without it.
    pub takes_machines: bool,
}

impl Peer {
    /// A peer that may open nothing.
    pub fn new(name: impl Into<String>, key: PublicKey, may: May) -> Peer {
        Peer {
            name: name.into(),
            key,
            address: None,
            may: Some(may),
            user: USER_FIRST,
            consent: Consent::default(),
            takes_machines: false,
        }
    }

    /// What it may do. An entry without `may` was made when each of them meant both.
    pub fn may(&self) -> May {
        self.may.unwrap_or(May::Both)
    }

    /// Where it listens: its name where the configuration has no address.
    pub fn address(&self) -> String {
        let address = self.address.clone();
        address.unwrap_or_else(|| with_port(&self.name))
    }
}

/// As written.
#[derive(Deserialize)]
pub(super) struct Raw {
    name: Option<String>,
    key: String,
    address: Option<String>,
    may: Option<May>,
    user: Option<u32>,
    #[serde(default)]
    disks: Vec<String>,
    #[serde(default)]
    networks: Vec<String>,
    #[serde(default)]
    machines: bool,
}

/// Checks each, and gives a user to those that have none.
pub(super) fn validate(raw: Vec<Raw>) -> Result<Vec<Peer>, Wrong> {
    let mut peers: Vec<Peer> = Vec::new();
    let stated: Vec<u32> = raw.iter().filter_map(|peer| peer.user).collect();
    let mut free = (USER_FIRST..).filter(|user| !stated.contains(user));
    for (index, raw) in raw.into_iter().enumerate() {
        let name = raw.name.unwrap_or_else(|| format!("peer {}", index + 1));
        let key: PublicKey = raw
            .key
            .parse()
            .map_err(|error: KeyError| ("peer.key", error.to_string()))?;
        if let Some(twin) = peers.iter().find(|peer| peer.key == key) {
            let why = format!("`{}` and `{name}` have the same key", twin.name);
            return Err(("peer.key", why));
        }
        let user = match raw.user {
            Some(user) => user_of_its_own(&name, user, &stated)?,
            None => free.next().unwrap_or(u32::MAX),
        };
        peers.push(Peer {
            key,
            address: raw.address.map(|address| with_port(&address)),
            may: raw.may,
            user,
            consent: Consent::parse(&raw.disks, &raw.networks)?,
            takes_machines: raw.machines,
            name,
        });
    }
    Ok(peers)
}

/// A user that is neither root nor another peer's: what one peer's slices have, the
/// other's would reach.
fn user_of_its_own(name: &str, user: u32, stated: &[u32]) -> Result<u32, Wrong> {
    if user == 0 || user == u32::MAX {
        let why = format!("{user}: the slices of `{name}` need another user");
        return Err(("peer.user", why));
    }
    if stated.iter().filter(|other| **other == user).count() > 1 {
        let why = format!("{user} is the user of several peers: give each peer another");
        return Err(("peer.user", why));
    }
    Ok(user)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::path::Path;

    fn parse(peers: &[&str]) -> Result<Vec<Peer>, String> {
        let entry = |(index, peer): (usize, &&str)| {
            let key = format!("{index:02x}").repeat(32);
            format!("[[peer]]\nname = \"p{index}\"\nkey = \"weft-key-{key}\"\n{peer}\n")
        };
        let text: String = peers.iter().enumerate().map(entry).collect();
        let config = Config::parse(Path::new("node.toml"), &text);
        config
            .map(|config| config.peers)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn what_a_peer_may_is_said_and_without_it_both() {
        let peers = parse(&["", "may = \"borrow\"", "may = \"lend\"", "may = \"both\""]).unwrap();
        let may: Vec<_> = peers
            .iter()
            .map(|peer| (peer.may().borrow(), peer.may().lend()))
            .collect();
        assert_eq!(
            may,
            [(true, true), (true, false), (false, true), (true, true)]
        );
        assert_eq!(peers[0].may, None);
        assert!(peers.iter().all(|peer| peer.consent == Consent::default()));
        assert!(parse(&["may = \"steal\""]).unwrap_err().contains("borrow"));
    }

    #[test]
    fn no_two_peers_share_a_user() {
        let peers = parse(&["", "user = 60100", "", "user = 1234"]).unwrap();
        let users: Vec<u32> = peers.iter().map(|peer| peer.user).collect();
        assert_eq!(users, [60101, 60100, 60102, 1234]);
        let error = parse(&["user = 7000", "user = 7000"]).unwrap_err();
        assert!(error.contains("give each peer another"), "{error}");
        for root in ["user = 0", "user = 4294967295"] {
            assert!(parse(&[root]).unwrap_err().contains("`peer.user`"));
        }
        assert!(parse(&["user = -1"]).is_err());
        let twice = "[[peer]]\nkey = \"weft-key-0000000000000000000000000000000000000000000000000000000000000000\"\n";
        let error = Config::parse(Path::new("node.toml"), &twice.repeat(2)).unwrap_err();
        assert!(error.to_string().contains("same key"), "{error}");
    }
}
