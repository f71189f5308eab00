//! `weft vm consolidate --when-room`: waits until a host has room for all of a machine.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use weft_api::client::Client;
use weft_machine::migration::Destination;
use weft_node::host::{available_memory_bytes, total_memory_bytes};
use weft_node::launch::machine::{reservation_bytes, take_signals};
use weft_node::remote::{Connection, Identity};
use weft_node::size::format_bytes;
use weft_vcpu::PAGE_SIZE;

use super::registry::VIEW_BOUND;
use super::running::find;

/// How often the host is asked.
const INTERVAL: Duration = Duration::from_secs(1);
/// Rounds between two lines that say what is missing.
const ROUNDS: u32 = 10;
/// The part of this host's memory that a machine leaves free.
const KEPT: u64 = 20;

/// What a host has, and what the machine needs there, in bytes.
#[derive(Debug, PartialEq, Eq)]
struct Room {
    free: u64,
    needed: u64,
}

/// Whose room it is.
enum Place {
    /// Node 0's.
    Here,
    Host(String),
}

/// Waits until the machine has room at its destination, at most for `patience`.
///
/// # Errors
/// The time passed, or a signal came; the machine has ended; the destination is a node whose
/// room is what its host lent.
pub fn wait(machine: &str, destination: &Destination, patience: Duration) -> anyhow::Result<()> {
    let place = place(destination)?;
    let signals = take_signals()?;
    let begun = Instant::now();
    let mut rounds = 0;
    loop {
        let lacks = match place.look(machine)? {
            Ok(room) if room.free >= room.needed => return Ok(()),
            Ok(room) => room.missing(),
            // A host that does not answer may do so later.
            Err(error) => error,
        };
        if rounds % ROUNDS == 0 {
            eprintln!(
                "weft: vm {machine} waits for room on {}: {lacks}",
                place.name()
            );
        }
        rounds += 1;
        let left = patience.saturating_sub(begun.elapsed());
        if left.is_zero() {
            bail!(
                "vm {machine}: no room on {} within {} s: {lacks}",
                place.name(),
                patience.as_secs_f64()
            );
        }
        let step = left.min(INTERVAL).as_millis() as u16;
        let mut ready = [PollFd::new(signals.descriptor(), PollFlags::POLLIN)];
        match poll(&mut ready, PollTimeout::from(step)) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => {}
            Ok(_) => bail!("vm {machine}: given up, and nothing was changed"),
            Err(error) => return Err(error).context("cannot wait for room"),
        }
    }
}

fn place(destination: &Destination) -> anyhow::Result<Place> {
    match destination {
        Destination::Node(0) => Ok(Place::Here),
        Destination::Host {
            name,
            memory_bytes: None,
        } => Ok(Place::Host(name.clone())),
        Destination::Host { .. } => {
            bail!("--when-room waits for room for all of the machine: leave SIZE out")
        }
        Destination::Node(node) | Destination::Part { node, .. } => bail!(
            "node {node} has the room that it was given, and gets no more: name its host instead"
        ),
    }
}

impl Place {
    fn name(&self) -> &str {
        match self {
            Self::Here => "this host",
            Self::Host(name) => name,
        }
    }

    /// What there is now, or why the host does not say.
    fn look(&self, machine: &str) -> anyhow::Result<Result<Room, String>> {
        let client = find(machine)?;
        let view = client.view(VIEW_BOUND);
        let view = view.with_context(|| format!("vm {machine}"))?;
        let Self::Host(host) = self else {
            return Ok(Ok(Room {
                free: available_memory_bytes().saturating_sub(total_memory_bytes() / KEPT),
                needed: elsewhere(&client).with_context(|| format!("vm {machine}"))?,
            }));
        };
        let configuration = view.configuration;
        let identity = Identity::load(None)?;
        let status = Connection::open(&identity, host).and_then(|mut daemon| daemon.status());
        let room = status.map(|status| Room {
            free: status.memory_free_bytes,
            needed: reservation_bytes(configuration.memory_bytes, configuration.cpus),
        });
        Ok(room.map_err(|error| error.to_string()))
    }
}

impl Room {
    fn missing(&self) -> String {
        format!(
            "{} are needed, and {} are free",
            format_bytes(self.needed),
            format_bytes(self.free)
        )
    }
}

/// Guest memory that other nodes than the first hold, in bytes.
fn elsewhere(client: &Client) -> anyhow::Result<u64> {
    let counters = client.counters()?.counters;
    let held = |(name, pages): (&String, &u64)| {
        let is_other = name.starts_with("slice") && !name.starts_with("slice0.");
        (is_other && name.ends_with(".memory.held-pages")).then_some(pages * PAGE_SIZE)
    };
    Ok(counters.iter().filter_map(held).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_with_lent_memory_and_a_part_are_refused() {
        let host = |memory_bytes| Destination::Host {
            name: "alpha".into(),
            memory_bytes,
        };
        let part = Destination::Part {
            node: 0,
            memory_bytes: 1,
        };
        let refused = |destination: &Destination| place(destination).is_err();
        assert!(!refused(&Destination::Node(0)) && !refused(&host(None)));
        assert!(refused(&Destination::Node(2)) && refused(&host(Some(1))) && refused(&part));
    }

    #[test]
    fn what_is_missing_is_said() {
        let room = Room {
            free: 1 << 20,
            needed: 3 << 20,
        };
        assert_eq!(room.missing(), "3.0 MiB are needed, and 1.0 MiB are free");
    }
}
