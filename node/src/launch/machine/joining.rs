//! A node that home asked for, until it has its links, and the thread that makes those between
//! hosts.
//!
//! ```text
//! announced ──all expected──▶ linking ──▶ made ──▶ admitted
//!     └── refused, failed, given up: dropped ◀┘
//! ```
//!
//! Each of the thread's calls of another host has a bound. What it made for a request that home
//! gave up is dropped: a host ends a slice whose connection ends.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;

use crate::error::{LaunchError, sentence};
use crate::links::Link;
use crate::protocol::{DaemonRequest, MachineStart};
use crate::remote::{self, Connection, FarEnd, Identity, RemoteSlice};
use weft_wire::hello;

/// See the module.
pub(super) struct Joining {
    pub request: u64,
    pub number: u32,
    pub memory_bytes: u64,
    /// `None`: the launcher's own.
    pub host: Option<String>,
    /// By node, the ends of its links at slices on other hosts.
    pub far: Vec<(u32, FarEnd)>,
    /// Of a process that takes the place of node 0: by node, the connections to the daemons of
    /// these.
    pub daemons: Option<Vec<(u32, FarEnd)>>,
    /// Those of them that are not expected yet.
    pub unexpected: BTreeSet<u32>,
    pub linking: Option<Linking>,
}

/// The thread, as the owner sees it.
pub(super) struct Linking {
    made: Receiver<Result<Made, LaunchError>>,
    /// Ends with the thread.
    ended: UnixStream,
}

/// Links that the thread makes, and the slice that it has a host start.
pub(super) struct Order {
    pub number: u32,
    pub lease_ms: u32,
    pub far: Vec<(u32, FarEnd)>,
    /// For a node on another host.
    pub there: Option<There>,
}

/// What another host is asked for.
pub(super) struct There {
    pub host: String,
    pub configuration: Option<PathBuf>,
    pub features: &'static [&'static str],
    pub reservation: DaemonRequest,
    pub what: Started,
}

/// What becomes of the reservation there.
pub(super) enum Started {
    /// A slice is started on it.
    Slice {
        start: MachineStart,
        /// Nodes of this host.
        here: Vec<u32>,
    },
    /// A process that takes the place of node 0 is prepared later. The connections of its
    /// launcher.
    Heir(Vec<(u32, FarEnd)>),
}

/// What came of an [`Order`].
pub(super) struct Made {
    /// The slice, if it is on another host.
    pub slice: Option<Box<RemoteSlice>>,
    /// This host's ends of links between hosts: of its nodes, or of the one that joins.
    pub links: Vec<(u32, Link)>,
}

impl Joining {
    /// Readable once its links were made, or could not be.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.linking.as_ref().map(|linking| linking.ended.as_fd())
    }

    /// What the thread made, once it has, or why it could not.
    pub fn made(&self) -> Option<Result<Made, String>> {
        match self.linking.as_ref()?.made.try_recv() {
            Ok(made) => Some(made.map_err(|error| sentence(&error))),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err("its links could not be made".into())),
        }
    }
}

impl Linking {
    /// Starts the thread.
    pub fn begin(order: Order) -> io::Result<Linking> {
        let (ended, ends) = UnixStream::pair()?;
        let (sender, made) = channel();
        let thread = thread::Builder::new().name("weft-join".into());
        thread.spawn(move || {
            // Nobody wants it when home gave the request up.
            let _ = sender.send(order.carry_out());
            drop(ends);
        })?;
        Ok(Linking { made, ended })
    }
}

impl Order {
    fn carry_out(self) -> Result<Made, LaunchError> {
        let Some(there) = self.there else {
            let ends = self.far.iter();
            let dialled = ends.map(|(peer, end)| Ok((*peer, end.dial(self.lease_ms)?)));
            return Ok(Made {
                slice: None,
                links: dialled.collect::<Result<_, LaunchError>>()?,
            });
        };
        let identity = Identity::load(there.configuration.as_deref())?;
        let mut connection = Connection::open_for(&identity, &there.host, |ours, theirs| {
            hello::check_guest(ours, theirs, there.features)
        })?;
        remote::reserve(&mut connection, &there.reservation)?;
        let (start, here) = match there.what {
            Started::Slice { start, here } => (start, here),
            Started::Heir(daemons) => {
                remote::link_heir(&mut connection, &self.far, &daemons)?;
                return Ok(Made {
                    slice: Some(Box::new(RemoteSlice::new(connection))),
                    links: Vec::new(),
                });
            }
        };
        let links = remote::link_joining(&mut connection, self.lease_ms, &here, &self.far)?;
        let mut slice = Box::new(RemoteSlice::new(connection));
        remote::start(&mut [(self.number, &mut *slice)], |_| {
            Ok(DaemonRequest::StartMachine(Box::new(start.clone())))
        })?;
        Ok(Made {
            slice: Some(slice),
            links,
        })
    }
}
