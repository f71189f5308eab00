//! A node's links, opened.

use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::Context;
use weft_aggregate::SliceLinks;
use weft_monitor::settings::SliceSettings;
use weft_node::monitor_protocol::{SliceBoot, Sockets, Terms};
use weft_wire::LinkError;
use weft_wire::halves::{self, HalvesConfig, Receiver, Sender, SessionKeys};

/// Longest busy wait of a thread that reads a link.
const SPIN: Duration = Duration::ZERO;

/// Opens a node's links; `None` for a machine whose one node cannot be joined by others.
pub fn open(
    sockets: Sockets,
    boot: &SliceBoot,
    settings: &SliceSettings,
) -> anyhow::Result<Option<SliceLinks>> {
    if settings.configuration.slices.is_empty() {
        return Ok(None);
    }
    let number = boot.number as usize;
    let lease = Duration::from_millis(boot.lease_ms.into());
    let mut links = Vec::new();
    for (peer, socket) in sockets.into_iter().enumerate() {
        let link = socket.map(|link| open_one(peer, link, lease));
        links.push(link.transpose().with_context(|| {
            format!("cannot open the link between node {number} and node {peer}")
        })?);
    }
    let reference = settings.reference.clone().context("no clock to follow")?;
    Ok(Some(SliceLinks {
        number,
        links,
        lease,
        reference,
        delay_max: settings.link_delay_max,
        joins: boot.joins,
        lent: match &boot.terms {
            Terms::Lent(loan) => Some(loan.memory_bytes),
            Terms::Own(_) => None,
        },
    }))
}

/// Opens the link to one node.
pub fn open_one(
    peer: usize,
    (socket, keys): (OwnedFd, Option<SessionKeys>),
    lease: Duration,
) -> Result<(Sender, Receiver), LinkError> {
    halves::open(HalvesConfig {
        socket,
        keys,
        lease,
        spin: SPIN,
        name: format!("node {peer}"),
    })
}
