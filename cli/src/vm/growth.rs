//! `weft vm grow`, `release`, `migrate` and `consolidate`: ask for a change of nodes, show how
//! far it is, and have it undone when the user wants the command to end.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use weft_api::ChangeView;
use weft_api::client::{Client, ClientError};
use weft_machine::membership::{Activity, NewNode};
use weft_machine::migration::Migration;
use weft_node::launch::SignalEvent;
use weft_node::launch::machine::take_signals;
use weft_node::size::format_bytes;

use super::running::find_or_only;
use crate::summary::format_seconds;

/// How often the machine is asked how far it is.
const INTERVAL_MS: u16 = 100;
/// Rounds between two lines of progress.
const ROUNDS: u32 = 10;

/// Guest memory that a node may fill where nothing else is said.
const MEMORY_BYTES: u64 = 1 << 30;

/// What `--on` and `--memory` of `weft vm grow` ask for.
pub fn new_node(on: Option<(String, Option<u64>)>, memory: Option<u64>) -> anyhow::Result<NewNode> {
    let (host, there) = match on {
        Some((host, there)) => (Some(host), there),
        None => (None, None),
    };
    if there.is_some() && memory.is_some() {
        bail!("--on HOST=SIZE and --memory SIZE say the same: leave one out");
    }
    Ok(NewNode {
        host,
        memory_bytes: there.or(memory).unwrap_or(MEMORY_BYTES),
    })
}

/// A machine whose nodes are to change.
pub struct Machine {
    client: Client,
    /// As the caller calls it.
    name: String,
}

impl Machine {
    /// Refused if a cluster placed it, unless `by_hand`.
    pub fn find(name: &str, by_hand: bool) -> anyhow::Result<Machine> {
        let (client, view) = find_or_only(Some(name))?;
        if !by_hand {
            crate::work::not_placed(&view.name)?;
        }
        let name = name.to_owned();
        Ok(Machine { client, name })
    }
}

/// `weft vm grow`.
pub fn grow(machine: &Machine, node: NewNode, json: bool) -> anyhow::Result<ExitCode> {
    change(machine, None, json, |client| client.grow(&node))
}

/// `weft vm release`.
pub fn release(machine: &Machine, node: usize, json: bool) -> anyhow::Result<ExitCode> {
    change(machine, None, json, |client| client.release(node))
}

/// `weft vm migrate` and `weft vm consolidate`.
pub fn migrate(
    machine: &Machine,
    migration: &Migration,
    timeout: Option<Duration>,
    json: bool,
) -> anyhow::Result<ExitCode> {
    change(machine, timeout, json, |client| client.migrate(migration))
}

fn change(
    Machine {
        client,
        name: machine,
    }: &Machine,
    timeout: Option<Duration>,
    json: bool,
    begin: impl FnOnce(&Client) -> Result<ChangeView, ClientError>,
) -> anyhow::Result<ExitCode> {
    let named = || format!("vm {machine}");
    let signals = take_signals()?;
    let begun = Instant::now();
    let mut view = begin(client).with_context(named)?;
    let (mut rounds, mut is_late) = (0, false);
    while !view.is_over() {
        let mut ready = [PollFd::new(signals.descriptor(), PollFlags::POLLIN)];
        match poll(&mut ready, PollTimeout::from(INTERVAL_MS)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error).context("cannot wait for the machine"),
        }
        while let Some(event) = signals.next() {
            if let SignalEvent::Signal { .. } = event {
                eprintln!("weft: cancelling");
                // It may be over meanwhile.
                let _ = client.cancel();
            }
        }
        if !is_late && timeout.is_some_and(|timeout| begun.elapsed() > timeout) {
            is_late = true;
            let _ = client.cancel();
        }
        view = client.change().with_context(named)?;
        rounds += 1;
        if rounds % ROUNDS == 0 && !view.is_over() {
            eprintln!("weft: vm {machine}: {}", progress(&view));
        }
    }
    if let Some(reason) = &view.failed {
        let late = match timeout.filter(|_| is_late) {
            Some(timeout) => format!("not over within {} s: ", timeout.as_secs_f64()),
            None => String::new(),
        };
        bail!("vm {machine}: {late}{reason}");
    }
    match json {
        true => println!("{}", serde_json::to_string_pretty(&view)?),
        false => eprint!("{}", outcome(machine, &view)),
    }
    Ok(ExitCode::SUCCESS)
}

/// What came of it, in lines for the user.
fn outcome(machine: &str, view: &ChangeView) -> String {
    let mut text = String::new();
    if let Some(grown) = &view.grown {
        text += &format!(
            "weft: vm {machine} has node {} now, which may fill {} ({:.1} ms, of which it joined \
             in {:.1} ms): `weft vm move {machine} --vcpu N --to {}` brings vCPUs there\n",
            grown.node,
            format_bytes(grown.memory_bytes),
            grown.total_s * 1e3,
            grown.join_s * 1e3,
            grown.node,
        );
    }
    if let Some(released) = view
        .released
        .as_ref()
        .filter(|released| released.queues > 0)
    {
        text += &format!(
            "weft: {} queues of disks and networks went to the nodes that have these; the guest \
             stood for {:.2} ms\n",
            released.queues,
            released.queues_stopped_ns as f64 / 1e6,
        );
    }
    if let Some(released) = &view.released {
        text += &format!(
            "weft: vm {machine} gave node {} back: {} vCPUs and {} of pages went elsewhere in \
             {:.1} ms\n",
            released.node,
            released.vcpus,
            format_bytes(released.bytes),
            released.total_s * 1e3,
        );
        if released.vcpus > 0 {
            text += &format!(
                "weft: vm {machine}: none of these vCPUs stood for more than {:.2} ms\n",
                released.pause_ns as f64 / 1e6,
            );
        }
    }
    if let Some(migrated) = &view.migrated {
        text += &format!(
            "weft: vm {machine} is on {} now: {} vCPUs and {} of pages moved in {:.1} ms, and no \
             vCPU stood for more than {:.2} ms\n",
            // The numbers of one node say less than its host.
            (migrated.home.as_ref())
                .filter(|_| migrated.nodes.len() == 1)
                .map_or_else(|| nodes(&migrated.nodes), |home| home.host.clone()),
            migrated.vcpus,
            format_bytes(migrated.bytes + migrated.switched_bytes),
            migrated.total_s * 1e3,
            migrated.pause_ns as f64 / 1e6,
        );
        if let Some(home) = &migrated.home {
            text += &format!(
                "weft: vm {machine} belongs to {host} now, with its console and API, after it stood \
                 for {:.1} ms more: `weft vm list` on {host} shows it\n",
                home.stopped_ns as f64 / 1e6,
                host = home.host,
            );
            if let [first, _, ..] = migrated.nodes[..] {
                text += &format!(
                    "weft: vm {machine}: node 0 takes over the vCPUs and pages of node {first}, \
                     which is on the same host and then leaves\n"
                );
            }
        } else if !migrated.left.is_empty() {
            text += &format!("weft: vm {machine} gave {} back\n", nodes(&migrated.left));
        }
        for stay in &migrated.stays {
            text += &format!(
                "weft: vm {machine} keeps node {} without vCPUs and memory: {}\n",
                stay.node, stay.reason
            );
        }
    }
    text
}

fn nodes(numbers: &[usize]) -> String {
    let word = match numbers.len() {
        1 => "node",
        _ => "nodes",
    };
    let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
    format!("{word} {}", numbers.join(", "))
}

fn progress(view: &ChangeView) -> String {
    let progress = &view.progress;
    match progress.activity {
        Activity::Starting => "the node's process starts".into(),
        Activity::Joining => "the node joins".into(),
        Activity::SendingAhead => format!(
            "{} of pages sent ahead, about {} left",
            format_bytes(progress.bytes_sent),
            format_bytes(progress.bytes_left)
        ),
        Activity::MovingVcpus => format!("{} vCPUs left", progress.vcpus_left),
        Activity::MovingPages => {
            let left = format_bytes(progress.bytes_left);
            let node = match progress.from {
                Some(node) => format!(" on node {node}"),
                None => String::new(),
            };
            match progress.seconds_left {
                None => format!("{left} of pages left{node}"),
                Some(seconds) => format!("{left} of pages left{node}, {}", format_seconds(seconds)),
            }
        }
        Activity::CopyingDisks => {
            format!(
                "{} of disks left to copy",
                format_bytes(progress.bytes_left)
            )
        }
        Activity::MovingHome => "the machine goes on in a process of the new host".into(),
        Activity::Leaving => "the other nodes check that nothing is left".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_machine::membership::JobView;

    #[test]
    fn a_size_is_said_once() {
        let on = |size| Some(("alpha".to_owned(), size));
        let size = |on, memory| new_node(on, memory).map(|node| node.memory_bytes).ok();
        assert_eq!(size(None, None), Some(MEMORY_BYTES));
        assert_eq!(size(on(None), Some(5)), Some(5));
        assert_eq!(size(on(Some(7)), None), Some(7));
        assert_eq!(size(on(Some(7)), Some(5)), None);
    }

    #[test]
    fn progress_says_what_is_left() {
        let view = |activity, seconds_left| ChangeView {
            progress: JobView {
                activity,
                from: Some(1),
                vcpus_left: 2,
                bytes_left: 8 << 20,
                bytes_sent: 0,
                seconds_left,
            },
            ..ChangeView::default()
        };
        assert_eq!(progress(&view(Activity::MovingVcpus, None)), "2 vCPUs left");
        let pages = progress(&view(Activity::MovingPages, Some(3.0)));
        assert!(pages.starts_with("8") && pages.contains('3'), "{pages}");
    }
}
