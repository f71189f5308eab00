//! `--cluster`: the cluster finds the hosts for a program or a machine.
//!
//! This process starts an *agent* ([`agent`]), which asks for room and says where it is. The
//! agent goes on beside the launcher, and says when it has ended: its standard input closes
//! then, however the launcher ends.

pub mod agent;
mod args;
mod bell;
mod console;
mod drain;
mod elsewhere;
mod gauge;
mod mover;
mod plan;

pub use args::PlaceArgs;
pub use drain::{
    Waiting, call_off, cordon, drain, evacuate, hands_off, move_part, policy, uncordon,
};
pub use elsewhere::{Elsewhere, end_with_connection};
pub use plan::{forget, show, show_trial};

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use weft_cluster::{ClusterError, WORK_HOSTS_MAX, WorkKind, WorkPart, WorkRequest};
use weft_node::mark;
use weft_node::member::{MemberError, Membership};
use weft_node::said::plain;

/// What an agent is told.
#[derive(Serialize, Deserialize)]
struct Instructions {
    request: WorkRequest,
    /// How long it may wait; for ever if `None`.
    patience: Option<Duration>,
    /// As `weft vm list` will show it, if it is a machine.
    machine: Option<String>,
    /// The number of what is placed here already, for a command on another host.
    placed: Option<u64>,
}

impl Instructions {
    /// The member on which this is.
    fn host(&self) -> &str {
        self.request.watched_by()
    }
}

/// Where the cluster has found room.
pub enum Found {
    /// From here on this process is the launcher. The home's part comes first.
    Here(Vec<WorkPart>),
    Elsewhere(Elsewhere),
}

/// What an agent answers.
#[derive(Serialize, Deserialize)]
enum Reply {
    Placed {
        id: u64,
        parts: Vec<WorkPart>,
        /// A sentence.
        why: String,
    },
    /// A sentence, without its end.
    Failed(String),
}

/// A request of this user, on this host.
pub fn request(
    name: String,
    kind: WorkKind,
    cores: u32,
    memory_bytes: u64,
    args: &PlaceArgs,
) -> anyhow::Result<WorkRequest> {
    let membership = Membership::required()?;
    let user = nix::unistd::User::from_uid(nix::unistd::geteuid());
    let name = match &args.placed {
        Some((name, _)) => name.clone(),
        None => name,
    };
    let chosen = args.anywhere.clone().flatten();
    if let Some(chosen) = &chosen {
        let members = membership.cluster()?.members()?;
        if !members.iter().any(|member| member.record.name == *chosen) {
            bail!(
                "--anywhere={chosen}: {}",
                ClusterError::NoSuchHost(chosen.clone())
            );
        }
    }
    let home = chosen.unwrap_or_else(|| membership.host.clone());
    Ok(WorkRequest {
        name,
        kind,
        anywhere: args.anywhere == Some(None),
        caller: args.anywhere.as_ref().map(|_| membership.host),
        home,
        user: user
            .ok()
            .flatten()
            .map_or_else(|| nix::unistd::geteuid().to_string(), |user| user.name),
        cores,
        memory_mib: memory_bytes.div_ceil(1 << 20),
        hosts_max: args.hosts_max.unwrap_or(WORK_HOSTS_MAX),
        priority: args.priority,
        mark: mark::new().context("cannot tell the cluster how to find this process")?,
    })
}

/// A name for what was given none: unique, a word of URLs and keys, and no longer than `longest`
/// bytes.
pub fn name_for(what: &str, longest: usize) -> String {
    let own = weft_node::host::host_name();
    let text = format!("{what}-{}-{}", own.trim(), std::process::id());
    let small = text.to_ascii_lowercase();
    let word: String = small
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    let start = word.trim_start_matches('-');
    // The end makes it unique.
    start[start.len().saturating_sub(longest)..]
        .trim_start_matches('-')
        .into()
}

/// Has an agent ask for room, and waits for it. From now on the cluster has this process, and
/// what it forks, for the launcher, or for the command that starts it elsewhere.
pub fn place(
    request: WorkRequest,
    args: &PlaceArgs,
    machine: Option<String>,
) -> anyhow::Result<Found> {
    let shown = mark::show(&request.mark, "launcher").context("cannot make a socket")?;
    let mut agent = Command::new("/proc/self/exe")
        .args(["cluster", "agent"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // Ctrl-C is for this process; the agent sees its end.
        .process_group(0)
        .spawn()
        .context("cannot start the agent")?;
    let (mut orders, replies) = match (agent.stdin.take(), agent.stdout.take()) {
        (Some(orders), Some(replies)) => (orders, replies),
        _ => bail!("the agent has no pipes"),
    };
    let instructions = Instructions {
        request,
        patience: args.wait,
        machine,
        placed: args.placed.as_ref().map(|(_, id)| *id),
    };
    let mut line = serde_json::to_vec(&instructions)?;
    line.push(b'\n');
    orders.write_all(&line).context("the agent has ended")?;
    let mut reply = String::new();
    BufReader::new(replies)
        .read_line(&mut reply)
        .context("cannot read the agent's answer")?;
    if reply.is_empty() {
        bail!("the agent ended before it had an answer");
    }
    match serde_json::from_str(&reply).context("the agent's answer is damaged")? {
        Reply::Failed(sentence) => bail!("{}", plain(&sentence)),
        Reply::Placed { id, parts, why } => {
            if instructions.placed.is_none() {
                eprintln!("weft: {}", plain(why.trim_end_matches('.')));
            }
            // Both last as long as this process, and as a launcher that it forks.
            std::mem::forget(orders);
            std::mem::forget(shown);
            Ok(match &parts[..] {
                [home, ..] if home.host != instructions.host() => Found::Elsewhere(Elsewhere {
                    host: home.host.clone(),
                    name: instructions.request.name,
                    id,
                }),
                _ => Found::Here(parts),
            })
        }
    }
}

/// Refuses a machine of this host that the cluster placed: it counts the parts where it put
/// them, and would free the name of a machine whose home has gone to another host.
pub fn not_placed(machine: &str) -> anyhow::Result<()> {
    let membership = match Membership::required() {
        Ok(membership) => membership,
        Err(MemberError::NoMember) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let work = || Ok(membership.cluster()?.work()?);
    let work = match work() {
        Ok(work) => work,
        Err(error) if MemberError::is_silence(&error) => {
            eprintln!("weft: the cluster cannot be asked whether it placed {machine}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let placed = work.placed.get(machine);
    match placed.filter(|placed| placed.request.home == membership.host) {
        None => Ok(()),
        Some(_) => bail!(
            "vm {machine}: the cluster of {} placed it, and moves it: `weft node drain HOST` has it \
             leave a host; --by-hand moves it now, and the cluster counts its parts where they \
             were",
            membership.host
        ),
    }
}

/// A part, for tests.
#[cfg(test)]
pub fn part(host: &str, cores: u32, memory_mib: u64) -> WorkPart {
    WorkPart {
        host: host.into(),
        cores,
        memory_mib,
        reserved_mib: memory_mib,
    }
}
