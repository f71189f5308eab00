//! What all connections of a daemon share.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;

use weft_cluster::Cluster;
use weft_store::LeaseId;
use weft_wire::hello::Hello;
use weft_wire::keys::{PublicKey, StaticKeys};

use super::budget::Budget;
use super::door::Door;
use super::expected::Expected;
use super::gossip::{self, Gossip};
use super::homes::Homes;
use super::limit::Limit;
use crate::cgroup::{CgroupError, Cgroups};
use crate::config::{Config, Peer};
use crate::protocol::NodeStatus;
use crate::size::PAGE_BYTES;
use crate::spawn::{self, Executable};

/// A lease of this host, and where: under it, it lives, or decides.
pub(super) struct Alive {
    pub(super) cluster: Cluster,
    pub(super) lease: LeaseId,
}

/// See the module.
pub(super) struct Shared {
    pub(super) keys: StaticKeys,
    pub(super) config: Config,
    pub(super) budget: Arc<Budget>,
    pub(super) homes: Homes,
    pub(super) limit: Limit,
    pub(super) expected: Expected,
    pub(super) runtime: Executable,
    /// What runs slices of machines, or why none can run here.
    pub(super) monitor: Result<Executable, spawn::Missing>,
    /// An empty directory for confined slices, where this process may confine.
    pub(super) empty_root: Option<PathBuf>,
    /// Where the kernel bounds the memory of slices, or why it does not.
    pub(super) cgroups: Result<Cgroups, CgroupError>,
    /// Whether its runtimes filter their system calls: one under test does not.
    pub(super) filters: bool,
    pub(super) hello: Hello,
    /// Readable (closed at the other end) once the daemon is to end.
    pub(super) ending: OwnedFd,
    /// Where this host itself reaches the daemon.
    pub(super) own_address: SocketAddr,
    pub(super) door: Arc<Door>,
    /// Guards how often strangers have been spoken of lately.
    pub(super) gossip: Mutex<Gossip>,
    /// Guards how often each peer has been spoken of lately: an entry for each `[[peer]]`
    /// at most.
    pub(super) peers: Mutex<HashMap<PublicKey, Gossip>>,
    /// The other members of this host's cluster, where it is in one.
    pub(super) members: RwLock<Vec<Peer>>,
    /// How this host says that it lives, in a cluster. Nothing is asked under this lock.
    pub(super) alive: Mutex<Option<Alive>>,
    /// Under which lease this host decides for its cluster, while it does.
    pub(super) leading: Mutex<Option<Alive>>,
    /// Slices of machines that run now.
    pub(super) machine_slices: AtomicU32,
    pub(super) log: fn(&str),
}

impl Shared {
    pub(super) fn say(&self, text: &str) {
        (self.log)(text);
    }

    /// Says something that a stranger caused, as long as not too many do.
    pub(super) fn say_of_stranger(&self, text: &str) {
        let mut gossip = self.gossip.lock().unwrap_or_else(PoisonError::into_inner);
        let (speak, passed_over) = gossip.heard(Instant::now());
        drop(gossip);
        if passed_over > 0 {
            self.say(&format!(
                "{passed_over} more connections ended before they were authenticated"
            ));
        }
        if speak {
            self.say(text);
        }
    }

    /// Says something that a peer caused, as long as not too much is: it can ask for what
    /// is logged as often as it likes, on many connections.
    pub(super) fn say_of_peer(&self, peer: &Peer, text: &str) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let gossip = peers.entry(peer.key);
        let gossip = gossip.or_insert_with(|| Gossip::new(gossip::OF_PEER));
        let (speak, passed_over) = gossip.heard(Instant::now());
        drop(peers);
        if passed_over > 0 {
            self.say(&format!(
                "{}: {passed_over} messages more were left out",
                peer.name
            ));
        }
        if speak {
            self.say(&format!("{}: {text}", peer.name));
        }
    }

    /// The peer with this public key: of the configuration, else a member of the cluster.
    pub(super) fn peer(&self, key: &PublicKey) -> Option<Peer> {
        let members = || self.members.read().unwrap_or_else(PoisonError::into_inner);
        let member = || members().iter().find(|peer| &peer.key == key).cloned();
        self.config.peer(key).cloned().or_else(member)
    }

    pub(super) fn set_members(&self, members: Vec<Peer>) {
        *self.members.write().unwrap_or_else(PoisonError::into_inner) = members;
    }

    /// Readable once the daemon is to end.
    pub(super) fn ending(&self) -> BorrowedFd<'_> {
        self.ending.as_fd()
    }

    pub(super) fn status(&self) -> NodeStatus {
        let (limit, free) = self.budget.pages();
        let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32);
        NodeStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host_name: nix::unistd::gethostname()
                .map(|name| name.to_string_lossy().into_owned())
                .unwrap_or_default(),
            cpu_name: self.hello.cpu_name.clone(),
            cpus,
            memory_bytes: limit * PAGE_BYTES,
            memory_free_bytes: free * PAGE_BYTES,
            slices: self.config.slices,
            slices_used: self.budget.slots_used(),
            machine_slices: self.machine_slices.load(Ordering::Acquire),
            confined: self.empty_root.is_some(),
        }
    }

    /// How to confine a slice of `peer`.
    pub(super) fn confinement(&self, peer: &Peer) -> Option<spawn::Confinement> {
        self.empty_root.as_ref().map(|root| spawn::Confinement {
            user: peer.user,
            root: root.clone(),
        })
    }
}
