//! What hosts offer to the cluster, and what parts take of that.

use weft_place::{Host, HostId, Inventory, Room};

use crate::host::Member;
use crate::work::{Work, WorkKind};

/// What a slice takes of what its host lends, at most, in MiB: that of a machine. A slice of a
/// program takes less. Its memory and a quarter of that for pages of others, 72 MiB for each
/// vCPU; of all of that a quarter more, and 64 MiB. A test of `weft-node` holds it against what a
/// daemon counts.
pub fn lent_mib(memory_mib: u64, cores: u32) -> u64 {
    let memory = memory_mib + (memory_mib / 4).max(64);
    let budget = memory + 72 * u64::from(cores);
    budget + budget / 4 + 64
}

/// What is counted for a core of a machine, so that [`offers`] can leave the cores out: 72 MiB
/// in the measure of guest memory.
pub(crate) const CPU_MIB: u64 = 58;

/// What is counted for the cores of a part, beside its memory.
pub(crate) fn cpus_mib(kind: WorkKind, cores: u32) -> u64 {
    match kind {
        WorkKind::Program => 0,
        WorkKind::Machine => CPU_MIB * u64::from(cores),
    }
}

/// What a host offers that lends this and has this number of slices: the inverse of [`lent_mib`],
/// with room for two more slices.
fn offers(lends_mib: u64, cores: u32, slices: u64) -> Room {
    let memory_mib = lends_mib.saturating_sub(144 * (slices + 2)) * 16 / 25;
    Room::new(cores, memory_mib)
}

/// What a host offers to the cluster: nothing where it does not live. What it lends beside the
/// cluster's work is not offered.
pub(crate) fn offered(member: &Member, work: &Work) -> Room {
    let Some(report) = &member.report else {
        return Room::NONE;
    };
    let name = &member.record.name;
    // The home is no slice.
    let slices = work.placed.values().flat_map(|placed| {
        let arriving = placed.order.iter().flat_map(|order| &order.parts[1..]);
        placed.parts[1..].iter().chain(arriving)
    });
    let here = slices.filter(|part| part.host == *name);
    let (count, ours) = here.fold((0, 0), |(count, mib), part| {
        (count + 1, mib + lent_mib(part.memory_mib, part.cores))
    });
    let others = (report.lent_bytes >> 20).saturating_sub(ours);
    let lends = (report.lends_bytes >> 20).saturating_sub(others);
    offers(lends, member.cores(), count)
}

/// What the owner of a host wants back, in the measure of [`offers`]. Nothing of a host that is
/// silent: its parts cannot move now.
pub(crate) fn wanted_back_mib(member: Option<&Member>) -> u64 {
    let report = member.and_then(|member| member.report.as_ref());
    let bytes = report.map_or(0, |report| report.wanted_back_bytes);
    (bytes.div_ceil(1 << 20) * 16).div_ceil(25)
}

/// What a host may offer some time: as much as it may lend, all of its memory where it does not
/// live.
fn possible(member: &Member) -> Room {
    let lends = member.report.as_ref();
    let lends = lends.map(|report| report.lends_bytes.max(report.may_lend_bytes));
    let bytes = lends.unwrap_or(member.record.memory_bytes);
    offers(bytes >> 20, member.cores(), 0)
}

/// The members with all that they may offer some time.
pub(crate) fn largest(members: &[Member]) -> Inventory {
    let mut all = Inventory::new();
    for member in members {
        let id = HostId(member.record.number);
        let host = Host::new(id, &member.record.name[..], possible(member));
        // Members have numbers of their own.
        let _ = all.add(host, true);
    }
    all
}
