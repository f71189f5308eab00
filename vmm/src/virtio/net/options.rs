//! What can be asked for, and how it is written.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::NetError;

/// An Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl FromStr for Mac {
    type Err = NetError;

    fn from_str(text: &str) -> Result<Self, NetError> {
        let wrong = || NetError::Mac(text.into());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2);
            *byte = u8::from_str_radix(part.ok_or_else(wrong)?, 16).map_err(|_| wrong())?;
        }
        let single = bytes[0] & 1 == 0 && bytes != [0; 6];
        if parts.next().is_some() || !single {
            return Err(wrong());
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(formatter, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

/// A TCP port of this host's loopback address that leads into the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// Here.
    pub host: u16,
    /// There.
    pub guest: u16,
}

impl FromStr for Forward {
    type Err = NetError;

    fn from_str(text: &str) -> Result<Self, NetError> {
        let port = |text: &str| text.parse().ok().filter(|port| *port != 0);
        text.split_once(':')
            .and_then(|(host, guest)| {
                Some(Self {
                    host: port(host)?,
                    guest: port(guest)?,
                })
            })
            .ok_or_else(|| NetError::Forward(text.into()))
    }
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
    Tap {
        /// Its name.
        name: String,
    },
    /// A network in user space.
    User(User),
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

    /// The same for the same back end: 02, then a hash of its name (FNV-1a).
    pub(super) fn default_mac(&self) -> Mac {
        let name = match &self.back_end {
            NetBackEnd::Tap { name } => name.as_str(),
            NetBackEnd::User(_) => "user",
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
    fn addresses_and_forwards() {
        let mac: Mac = "52:54:00:12:34:aB".parse().unwrap();
        assert_eq!(mac.to_string(), "52:54:00:12:34:ab");
        for wrong in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:56:78",
            "53:54:00:12:34:56",
            "0:0:0:0:0:0",
            "00:00:00:00:00:00",
        ] {
            assert!(wrong.parse::<Mac>().is_err(), "{wrong}");
        }
        let forward: Forward = "2222:22".parse().unwrap();
        assert_eq!((forward.host, forward.guest), (2222, 22));
        for wrong in ["", "22", "0:22", "1:70000", "a:b", "1:2:3"] {
            assert!(wrong.parse::<Forward>().is_err(), "{wrong}");
        }
        let tap = |name: &str| NetOptions::new(NetBackEnd::Tap { name: name.into() });
        assert_eq!(tap("a").default_mac(), tap("a").default_mac());
        assert_ne!(tap("a").default_mac(), tap("b").default_mac());
    }
}
