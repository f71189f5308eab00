//! Network (5.1): a tap device of the host, a network in user space, or a switch.
//!
//! | queue | what |
//! | --- | --- |
//! | 2n, 2n + 1 | receive and transmit of pair n: one thread |
//! | 2 × pairs | control, when there is more than one pair |
//!
//! Each pair has a [`Link`]. Where a network has only one link for several pairs, or a
//! pair's network is elsewhere, the embedder gives each pair a link of its own.

mod announce;
mod control;
mod description;
mod handler;
mod link;
mod options;
mod persist;
mod stream;
mod switch;
mod tap;
mod user;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft_confine::{ThreadKind, lock};

pub use description::NetDescription;
pub use link::{Cable, Link};
pub use options::{Forward, Mac, NetBackEnd, NetOptions, User};
pub use persist::NetState;
pub use stream::Stream;
pub use switch::OpenSwitch;

use super::worker::Handler;
use super::{ConfigSpace, DeviceError, DeviceState, Kind, Ring, StateError, VirtioDevice};
use description::describe;
use handler::{Pair, SharedLink};

/// Entries of a receive or transmit queue.
pub const QUEUE_SIZE: u16 = 256;
const CONTROL_QUEUE_SIZE: u16 = 64;
/// Pairs of queues at most.
pub const PAIRS_MAX: u16 = 8;
/// Bytes of struct virtio_net_hdr_v1 (5.1.6), before every frame.
pub const HEADER: usize = 12;
/// The largest frame: 64 KiB of IP in an Ethernet frame with a VLAN tag.
pub const FRAME_MAX: usize = 65535 + 18;

/// VIRTIO_NET_F_* (5.1.3).
const FEATURE_MTU: u64 = 1 << 3;
const FEATURE_MAC: u64 = 1 << 5;
const FEATURE_MERGE: u64 = 1 << 15;
const FEATURE_STATUS: u64 = 1 << 16;
const FEATURE_CONTROL: u64 = 1 << 17;
const FEATURE_PAIRS: u64 = 1 << 22;
/// Checksums and segmentation left to the other side: what a tap can do.
/// CSUM, GUEST_CSUM, GUEST_TSO4, GUEST_TSO6, GUEST_ECN, HOST_TSO4, HOST_TSO6, HOST_ECN.
const OFFLOADS: u64 = 1 | 1 << 1 | 7 << 7 | 7 << 11;
/// Device configuration: its bytes, where the pairs and the status are, and the one
/// bit of that.
const CONFIGURATION: usize = 12;
const PAIRS: usize = 8;
const STATUS: usize = 6;
const LINK_UP: u16 = 1;

/// Why there is no network.
#[derive(Debug, Error)]
pub enum NetError {
    /// Cannot be one.
    #[error("{0:?} is not a network interface name: 1 to 15 bytes, no '/'")]
    Name(String),
    /// /dev/net/tun.
    #[error("cannot open /dev/net/tun; the kernel's tun module and access to the file are needed")]
    NoTun(#[source] std::io::Error),
    /// Not ours, and no privilege to make it.
    #[error(
        "no permission to use the tap device {0}: create it for your user (ip tuntap add {0} \
        mode tap user NAME) or run as root"
    )]
    Privilege(String),
    /// Somebody else has it.
    #[error("the tap device {0} is in use by another process, or of another kind")]
    Busy(String),
    /// Anything else.
    #[error("cannot set up the tap device {name}: {what}")]
    Tap {
        name: String,
        /// The call.
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// No passt.
    #[error("cannot run {program}, which user-mode networking needs (Debian package passt)")]
    NoProgram {
        /// What was looked for.
        program: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// It would not start.
    #[error("user-mode networking did not start: {0}")]
    Program(String),
    /// No socket pair, or the like.
    #[error("cannot connect to the user-mode network or the switch")]
    Socket(#[source] std::io::Error),
    /// Nobody listens there.
    #[error(
        "no switch answers at {}: start `weft switch` with this socket on this host first",
        path.display()
    )]
    NoSwitch {
        /// The socket.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The connection was not made before, or another card has it.
    #[error("the card has no connection to its switch")]
    NotConnected,
    /// Out of range.
    #[error("a network has 1 to {PAIRS_MAX} queue pairs, not {0}")]
    Pairs(u16),
    /// Only tap has several.
    #[error("user-mode networking, or a switch, has one queue pair")]
    OnePair,
    /// Out of range.
    #[error("an MTU of {0}: it must be 68 to 65535")]
    Mtu(u16),
}

/// What the threads of one network share.
struct Shared {
    /// By pair; none for those that are not served here.
    links: Vec<Option<SharedLink>>,
    configuration: Arc<ConfigSpace>,
    /// Pairs that the driver uses.
    active: Mutex<u16>,
    /// The features that it took.
    taken: AtomicU64,
    /// Who has the links do what the driver wants, where they do not hear of it
    /// themselves.
    user: Option<Use>,
}

/// What the driver uses of the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The features that it took.
    pub features: u64,
    /// Pairs of queues; 0: none.
    pub pairs: u16,
}

/// Is called with what the driver uses of a network. Must not wait.
pub type Use = Box<dyn Fn(Usage) + Send + Sync>;

/// The only link of a network whose pairs are served by several.
pub struct Opened {
    pub link: Box<dyn Link>,
    /// What the driver is told.
    pub description: NetDescription,
}

/// The network device.
pub struct Net {
    shared: Arc<Shared>,
    features: u64,
}

impl Net {
    /// Opens the back end that `options` name.
    pub fn open(options: &NetOptions) -> Result<Self, NetError> {
        if options.pairs == 0 || options.pairs > PAIRS_MAX {
            return Err(NetError::Pairs(options.pairs));
        }
        if options.pairs > 1 && !matches!(options.back_end, NetBackEnd::Tap { .. }) {
            return Err(NetError::OnePair);
        }
        let mac = options.mac.unwrap_or_else(|| options.default_mac());
        let links = open_links(options, options.pairs)?;
        Self::new(links, mac, options.mtu(), options.offloads())
    }

    /// Opens one link, for all the pairs that `options` ask for.
    ///
    /// # Errors
    /// It cannot be opened, or an option is out of range.
    pub fn open_one_link(options: &NetOptions) -> Result<Opened, NetError> {
        let mac = options.mac.unwrap_or_else(|| options.default_mac());
        let description = describe(options.pairs, mac, options.mtu(), options.offloads())?;
        let link = open_links(options, 1)?.pop();
        Ok(Opened {
            link: link.ok_or(NetError::Pairs(0))?,
            description,
        })
    }

    /// A network as `description` has it. `links` has one entry for each pair, empty for
    /// those that are not served here. `user` is called with what the driver uses, where
    /// the first pair is.
    pub fn with_links(
        description: &NetDescription,
        links: Vec<Option<Box<dyn Link>>>,
        user: Option<Use>,
    ) -> Self {
        Self::with(description.clone(), links, user)
    }

    /// A network of one link for each pair of queues.
    pub fn new(
        links: Vec<Box<dyn Link>>,
        mac: Mac,
        mtu: Option<u16>,
        offloads: u64,
    ) -> Result<Self, NetError> {
        let description = describe(links.len() as u16, mac, mtu, offloads)?;
        Ok(Self::with(
            description,
            links.into_iter().map(Some).collect(),
            None,
        ))
    }

    fn with(
        description: NetDescription,
        links: Vec<Option<Box<dyn Link>>>,
        user: Option<Use>,
    ) -> Self {
        let shared = |link| Arc::new(Mutex::new(link));
        let links = links.into_iter().map(|link| link.map(shared)).collect();
        Self {
            shared: Arc::new(Shared {
                links,
                configuration: Arc::new(ConfigSpace::new(description.configuration)),
                active: Mutex::new(1),
                taken: AtomicU64::new(0),
                user,
            }),
            features: description.features,
        }
    }

    /// What a network is.
    pub const KIND: Kind = Kind {
        id: 1,
        class: 0x02_00_00,
        name: "net",
    };

    /// What its driver is told.
    pub fn describe(&self) -> NetDescription {
        NetDescription {
            features: self.features,
            configuration: self.shared.configuration.bytes(),
        }
    }

    fn pairs(&self) -> usize {
        self.shared.links.len()
    }
}

/// One link for each of `count` pairs; a tap that was made for one pair has one.
fn open_links(options: &NetOptions, count: u16) -> Result<Vec<Box<dyn Link>>, NetError> {
    Ok(match &options.back_end {
        NetBackEnd::Tap { name } => {
            let taps = tap::open(name, count)?.into_iter();
            taps.map(|tap| Box::new(tap) as Box<dyn Link>).collect()
        }
        NetBackEnd::User(user) => {
            let mtu = options.mtu().unwrap_or(options::USER_MTU);
            vec![Box::new(user::start(user, mtu)?)]
        }
        NetBackEnd::Switch { path } => vec![Box::new(switch::open(path)?)],
        NetBackEnd::OpenSwitch(open) => vec![Box::new(open.take()?)],
    })
}

impl VirtioDevice for Net {
    fn kind(&self) -> Kind {
        Self::KIND
    }

    /// The user-mode network is another process, so it needs no more than tap.
    fn thread_kind(&self) -> ThreadKind {
        ThreadKind::Network
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> Vec<u16> {
        let mut sizes = vec![QUEUE_SIZE; 2 * self.pairs()];
        if self.pairs() > 1 {
            sizes.push(CONTROL_QUEUE_SIZE);
        }
        sizes
    }

    fn workers(&self) -> usize {
        self.pairs()
    }

    fn configuration(&self) -> Arc<ConfigSpace> {
        self.shared.configuration.clone()
    }

    fn activate(
        &mut self,
        features: u64,
        mut rings: Vec<Option<Ring>>,
    ) -> Result<Vec<Box<dyn Handler>>, DeviceError> {
        // Without FEATURE_PAIRS the control queue is the third (5.1.2).
        let place = if features & FEATURE_PAIRS != 0 {
            2 * self.pairs()
        } else {
            2
        };
        let mut control = if features & FEATURE_CONTROL != 0 {
            rings.get_mut(place).and_then(Option::take)
        } else {
            None
        };
        self.shared.taken.store(features, Ordering::Relaxed);
        let mut rings = rings.into_iter();
        let mut handlers: Vec<Box<dyn Handler>> = Vec::new();
        for (pair, link) in self.shared.links.iter().enumerate() {
            let (receive, transmit) = (rings.next().flatten(), rings.next().flatten());
            // A slice that has the network for all of them.
            let is_elsewhere =
                self.shared.user.is_some() && receive.is_none() && transmit.is_none();
            if let (Some(receive), Some(transmit), Some(link)) = (receive, transmit, link) {
                let shared = self.shared.clone();
                let link = (pair, link.clone());
                let pair = Pair::new(receive, transmit, control.take(), shared, link, features);
                handlers.push(Box::new(pair));
            } else if pair == 0 && is_elsewhere {
                // The slice that serves it has no network to tell.
                self.shared.use_active();
            } else if pair == 0 && link.is_some() {
                return Err(DeviceError::Driver(
                    "did not enable the first queues of the network",
                ));
            }
        }
        Ok(handlers)
    }

    /// One pair, until the driver asks for more (5.1.6.5.5).
    fn reset(&mut self) {
        *lock(&self.shared.active) = 1;
        if let Some(user) = &self.shared.user {
            user(Usage::default());
        }
    }

    fn save(&self) -> DeviceState {
        DeviceState::Net(persist::save(&self.shared))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError> {
        let DeviceState::Net(state) = state else {
            return Err(StateError("it is not the state of a network"));
        };
        persist::restore(&self.shared, state)
    }

    /// Switches learn where its address is.
    fn announce(&mut self) {
        let address = Mac(mac_of(&self.shared.configuration));
        if let Some(link) = self.shared.links.iter().flatten().next() {
            // A frame that is lost is no reason not to go on.
            let _ = lock(link).send_bytes(&announce::frame(address));
        }
    }
}

fn mac_of(configuration: &ConfigSpace) -> [u8; 6] {
    let mut address = [0; 6];
    configuration.read(0, &mut address);
    address
}

impl Shared {
    /// Lets frames into the pairs that the driver uses, and no others.
    fn use_active(&self) {
        let pairs = *lock(&self.active);
        if let Some(user) = &self.user {
            let features = self.taken.load(Ordering::Relaxed);
            return user(Usage { features, pairs });
        }
        for (index, link) in self.links.iter().enumerate() {
            if let Some(link) = link {
                lock(link).set_attached(index < usize::from(pairs));
            }
        }
    }
}

/// Shows in a network's configuration that the cable is out; whether that is news.
pub fn unplug(configuration: &ConfigSpace) -> bool {
    show_plugged(configuration, false)
}

/// Shows whether the cable is in; whether that is news.
fn show_plugged(configuration: &ConfigSpace, plugged: bool) -> bool {
    let (mut before, now) = ([0; 2], u16::from(plugged) * LINK_UP);
    configuration.read(STATUS as u64, &mut before);
    let news = before != now.to_le_bytes();
    if news {
        configuration.set(STATUS, &now.to_le_bytes());
    }
    news
}
