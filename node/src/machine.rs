//! Slices of a virtual machine on other hosts, as the machine's launcher sees
//! them: from the first connection to the last word.
//!
//! All hosts are asked, in order, before anything is started: who they are, what
//! they can, and whether they have room. Then links, then slices.

use std::path::Path;
use std::time::Duration;

use weft_wire::hello::{self, Hello, Mismatch};

use crate::error::LaunchError;
use crate::links::Links;
use crate::protocol::{MachineStart, Request};
use crate::remote::{self, Connection, Identity, RemoteSlice};
use crate::size::PAGE_BYTES;

/// What a vCPU uses of its host beside the guest's memory: generated code (64 MiB at
/// most) and its tables.
const CPU_BYTES: u64 = 72 << 20;

/// What a host has to lend for a slice: guest memory that it may come to hold, and what
/// its vCPUs need.
pub(crate) fn reservation_bytes(memory_bytes: u64, cpus: u32) -> u64 {
    memory_bytes.saturating_add(u64::from(cpus) * CPU_BYTES)
}

/// What is asked of other hosts.
#[derive(Debug, Clone)]
pub struct MachinePlan<'a> {
    /// The hosts, `HOST` or `HOST:PORT`: slice 1 is on the first.
    pub hosts: &'a [String],
    /// What the machine is called, for the hosts' logs.
    pub name: &'a str,
    /// By slice, slice 0 included: guest memory that it may come to hold, in bytes.
    pub memory_bytes: &'a [u64],
    /// Silence after which a node counts as lost.
    pub lease: Duration,
    /// CPU features that every host needs, by their names in `/proc/cpuinfo`.
    pub features: &'a [&'a str],
    /// By slice, slice 0 included: its vCPUs.
    pub cpus: &'a [u32],
    /// What every slice's monitor needs to know.
    pub settings: &'a str,
}

impl MachinePlan<'_> {
    fn cpus_of(&self, node: u32) -> u32 {
        self.cpus.get(node as usize).copied().unwrap_or(0)
    }
}

/// Connects to all hosts, reserves, links the mesh and starts the slices; the
/// slices, from 1 on, and slice 0's ends of the links. `configuration`: where keys
/// are, if not in the usual place.
///
/// # Errors
/// The first host that cannot be reached, is not trusted or does not trust this
/// one, is of another build, lacks a CPU feature, has no room or cannot start its
/// slice. Nothing is left on the others.
pub fn start(
    plan: &MachinePlan<'_>,
    configuration: Option<&Path>,
) -> Result<(Vec<RemoteSlice>, Links), LaunchError> {
    let identity = Identity::load(configuration)?;
    let lease_ms = plan.lease.as_millis() as u32;
    let check = |ours: &Hello, theirs: &Hello| -> Result<(), Mismatch> {
        hello::check_guest(ours, theirs, plan.features)
    };
    let mut slices = Vec::new();
    for host in plan.hosts {
        let connection = Connection::open_for(&identity, host, check)?;
        slices.push(RemoteSlice::new(connection));
    }
    let mut numbered: Vec<(u32, &mut RemoteSlice)> = (1..).zip(slices.iter_mut()).collect();
    for (node, slice) in &mut numbered {
        let memory_bytes = plan.memory_bytes.get(*node as usize).copied().unwrap_or(0);
        let cpus = plan.cpus_of(*node);
        let request = Request::Open {
            command: format!("vm {}", plan.name),
            node: *node,
            budget_pages: Some(reservation_bytes(memory_bytes, cpus).div_ceil(PAGE_BYTES)),
            lease_ms,
        };
        remote::reserve(&mut slice.connection, &request)?;
    }
    let nodes = plan.hosts.len() as u32 + 1;
    let links = remote::connect(nodes, lease_ms, &mut numbered)?;
    remote::start(&mut numbered, |node| {
        Request::StartMachine(Box::new(MachineStart {
            slices: nodes,
            cpus: plan.cpus_of(node),
            settings: plan.settings.to_owned(),
        }))
    })?;
    Ok((slices, links))
}
