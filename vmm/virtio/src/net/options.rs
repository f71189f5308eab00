//! What can be asked for.

use std::path::PathBuf;

use super::OpenSwitch;

/// Largest packet that passt and a switch take: fewer, larger packets cost less.
pub(super) const USER_MTU: u16 = 65520;

/// An Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

/// A TCP port of this host's loopback address that leads into the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    pub host: u16,
    pub guest: u16,
}

/// A network in user space.
#[derive(Clone, Debug)]
pub struct User {
    /// Ports that lead in.
    pub forwards: Vec<Forward>,
    /// The program, looked for as a shell would.
    pub program: PathBuf,
    /// Whether connections to the gateway end at this host's loopback address:
    /// the guest can then use everything that listens there.
    pub reaches_host: bool,
}

impl Default for User {
    fn default() -> Self {
        Self {
            forwards: Vec::new(),
            program: "passt".into(),
            reaches_host: false,
        }
    }
}

/// What the guest's frames go to.
#[derive(Clone, Debug)]
pub enum NetBackEnd {
    /// A tap device of the host; made when it is not there.
    Tap { name: String },
    /// A network in user space.
    User(User),
    /// A switch, at its socket.
    Switch { path: PathBuf },
    /// A switch to which this card is connected already.
    OpenSwitch(OpenSwitch),
}

/// A network card.
#[derive(Clone, Debug)]
pub struct NetOptions {
    /// Where frames go.
    pub back_end: NetBackEnd,
    /// The card's address; made from the back end's name when absent.
    pub mac: Option<Mac>,
    /// Largest packet that the guest shall send, in bytes.
    pub mtu: Option<u16>,
    /// Pairs of queues: as many as vCPUs, for tap. A tap device that was made for
    /// one has one.
    pub pairs: u16,
    /// Which card of its machine, so that no two have the same address.
    pub number: u16,
}

impl NetOptions {
    /// One pair of queues.
    pub fn new(back_end: NetBackEnd) -> Self {
        Self {
            back_end,
            mac: None,
            mtu: None,
            pairs: 1,
            number: 0,
        }
    }

    /// Largest packet that the guest is told of.
    pub(super) fn mtu(&self) -> Option<u16> {
        match self.back_end {
            NetBackEnd::Tap { .. } => self.mtu,
            NetBackEnd::User(_) | NetBackEnd::Switch { .. } | NetBackEnd::OpenSwitch(_) => {
                Some(self.mtu.unwrap_or(USER_MTU))
            }
        }
    }

    /// Checksums and segmentation that the back end does.
    pub(super) fn offloads(&self) -> u64 {
        match self.back_end {
            NetBackEnd::Tap { .. } => super::OFFLOADS,
            NetBackEnd::User(_) | NetBackEnd::Switch { .. } | NetBackEnd::OpenSwitch(_) => 0,
        }
    }

    /// The same for the same back end: 02, then a hash of its name (FNV-1a).
    pub(super) fn default_mac(&self) -> Mac {
        let name = match &self.back_end {
            NetBackEnd::Tap { name } => name.as_str(),
            NetBackEnd::User(_) => "user",
            // All cards of a switch have the same; so each is given another.
            NetBackEnd::Switch { .. } | NetBackEnd::OpenSwitch(_) => "switch",
        };
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in name.bytes().chain(self.number.to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
        let [_, _, _, a, b, c, d, e] = hash.to_be_bytes();
        Mac([2, a, b, c, d, e])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_back_end_has_an_address_of_its_own() {
        let tap = |name: &str| NetOptions::new(NetBackEnd::Tap { name: name.into() });
        assert_eq!(tap("a").default_mac(), tap("a").default_mac());
        assert_ne!(tap("a").default_mac(), tap("b").default_mac());
    }
}
