//! The nodes of a machine as the options say them, judged: how many, and what
//! each gives.

use std::time::Duration;

use weft_machine::{
    BackEndChoice, CPUS_MAX, Follow, MEMORY_STEP, PRIMARY_MEMORY_MIN, Placement, PlacementError,
    SLICE_MEMORY_MIN, SLICES_MAX, Share, deal_cpus, deal_memory,
};
use weft_node::options::{LEASE_MAX, LEASE_MIN, Transport};

use super::args::VmRunArgs;
use super::error::VmError;
use super::growable;

/// The nodes of a machine.
#[derive(Debug, Clone)]
pub struct Nodes {
    /// How many: 1 to [`SLICES_MAX`].
    pub count: usize,
    /// Hosts of nodes 1 and up; empty where all nodes are on this one.
    pub hosts: Vec<String>,
    /// What connects nodes on this host.
    pub transport: Transport,
    /// Silence after which a node counts as lost.
    pub lease: Duration,
    /// Frames between nodes wait for less than this, for tests; zero: not at all.
    pub link_delay_max: Duration,
    /// vCPUs of all nodes.
    pub cpus: u32,
    /// Guest memory of all nodes, in bytes.
    pub memory_bytes: u64,
    /// What each gives; empty for a machine of one node that cannot grow.
    pub shares: Vec<Share>,
}

impl Nodes {
    /// Judges the options.
    pub fn check(args: &VmRunArgs) -> Result<Nodes, VmError> {
        let count = count(args)?;
        let lease = args.lease;
        if !(LEASE_MIN..=LEASE_MAX).contains(&lease) {
            return Err(refused(format!(
                "--lease {} s is not within {} to {} s",
                lease.as_secs_f32(),
                LEASE_MIN.as_secs_f32(),
                LEASE_MAX.as_secs()
            )));
        }
        let (cpus, memory) = (&args.cpus.values, &args.memory.values);
        let mut nodes = Nodes {
            count,
            hosts: args.on.clone(),
            transport: args.transport.into(),
            lease,
            link_delay_max: Duration::from_micros(args.link_delay.into()),
            cpus: cpus[0],
            memory_bytes: memory[0],
            shares: Vec::new(),
        };
        if count > 1 {
            let placement = place(count, cpus, memory).map_err(|error| explain(&error, args))?;
            nodes.cpus = placement.cpus();
            nodes.memory_bytes = placement.memory_bytes();
            nodes.shares = placement.into();
        }
        if growable::is_growable(args, count)? {
            // Judged with the configuration, as of any machine of one node.
            nodes.shares = vec![Share {
                cpus: nodes.cpus,
                memory_bytes: nodes.memory_bytes,
            }];
        }
        Ok(nodes)
    }
}

impl Nodes {
    /// A node with what it gives, for a message; `None` on a machine of one that cannot grow.
    pub fn describe(&self, node: usize) -> Option<String> {
        let placement = Placement::new(self.shares.clone()).ok()?;
        Some(weft_aggregate::describe(&placement, node))
    }

    /// Whether vCPUs may move by themselves as they are asked to.
    pub fn follow(&self, follow: Follow, back_end: BackEndChoice) -> Result<Follow, VmError> {
        match follow {
            Follow::Never => Ok(Follow::Never),
            _ if self.shares.is_empty() => Err(refused(
                "--follow: a machine on one node has no remote faults: add --nodes, --on or \
                 --growable yes"
                    .into(),
            )),
            _ if back_end == BackEndChoice::Kvm => Err(refused(
                "--follow: on KVM it is not known which vCPU a fault belongs to: use \
                 --backend soft"
                    .into(),
            )),
            _ => Ok(follow),
        }
    }
}

fn refused(sentence: String) -> VmError {
    VmError::Option(sentence)
}

/// As many as the options say that speak of it, which must agree.
fn count(args: &VmRunArgs) -> Result<usize, VmError> {
    let listed = |option: &str, text: &str, values: usize| {
        (values > 1).then(|| (format!("{option} {text}"), "names", values))
    };
    let on = (!args.on.is_empty()).then(|| {
        let hosts = args.on.join(",");
        (
            format!("--on {hosts} with this host"),
            "makes",
            args.on.len() + 1,
        )
    });
    let nodes = args
        .nodes
        .map(|nodes| ("--nodes".to_owned(), "says", nodes));
    let claims = [
        nodes,
        on,
        listed("--cpus", &args.cpus.text, args.cpus.values.len()),
        listed("--memory", &args.memory.text, args.memory.values.len()),
    ];
    let mut claims = claims.into_iter().flatten();
    let Some((first, says, count)) = claims.next() else {
        return Ok(1);
    };
    if !(2..=SLICES_MAX).contains(&count) {
        return Err(refused(format!(
            "{first} {says} {count}: a machine over several nodes has 2 to {SLICES_MAX}"
        )));
    }
    match claims.find(|(.., other)| *other != count) {
        Some((option, names, other)) => Err(refused(format!(
            "{option} {names} {other} nodes, {first} {says} {count}"
        ))),
        None => Ok(count),
    }
}

fn place(count: usize, cpus: &[u32], memory: &[u64]) -> Result<Placement, PlacementError> {
    let cpus = match cpus {
        [all] => deal_cpus(count, *all)?,
        each => each.to_vec(),
    };
    let memory = match memory {
        [all] => deal_memory(count, *all)?,
        each => each.to_vec(),
    };
    let shares = cpus.into_iter().zip(memory);
    let share = |(cpus, memory_bytes)| Share { cpus, memory_bytes };
    Placement::new(shares.map(share).collect())
}

/// The placement's complaint in the words of the command line.
fn explain(error: &PlacementError, args: &VmRunArgs) -> VmError {
    let (cpus, memory) = (&args.cpus.text, &args.memory.text);
    let mib = |bytes: u64| format!("{}M", bytes >> 20);
    refused(match error {
        PlacementError::Slices(count) => {
            format!("--nodes {count}: a machine over several nodes has 2 to {SLICES_MAX}")
        }
        PlacementError::Cpus(_) => {
            format!("--cpus {cpus}: a machine has 1 to {CPUS_MAX} vCPUs, all nodes together")
        }
        PlacementError::PrimaryCpus => {
            format!("--cpus {cpus}: the machine starts on node 0, which needs at least one")
        }
        PlacementError::PrimaryMemory(_) => format!(
            "--memory {memory}: the kernel is loaded into the first node's memory, which must \
            be at least {}",
            mib(PRIMARY_MEMORY_MIN)
        ),
        PlacementError::Small { slice, .. } => format!(
            "--memory {memory}: too little for node {slice}, which needs at least {}, or none \
            at all",
            mib(SLICE_MEMORY_MIN)
        ),
        PlacementError::Step { .. } | PlacementError::Total(_) => format!(
            "--memory {memory}: the memory of each node must be a multiple of {}",
            mib(MEMORY_STEP)
        ),
        PlacementError::Nothing(slice) => format!(
            "--cpus {cpus} --memory {memory}: node {slice} has neither: give it some, or remove it"
        ),
        PlacementError::Sum => {
            format!("--memory {memory} is more than a machine can have")
        }
    })
}
