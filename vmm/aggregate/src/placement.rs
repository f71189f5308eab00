//! Which slice of a machine gives what.
//!
//! Invariants of a [`Placement`] that was checked: every vCPU and every byte of
//! RAM belongs to exactly one slice, both in the order of slices; slice 0, the
//! primary, has vCPU 0 and the memory that a kernel is loaded into.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft_platform::acpi::topology::{Node, guest_physical};
use weft_vcpu::PAGE_SIZE;

/// Most vCPUs of one machine: xAPIC identifiers are 8 bits, and 255 means all.
pub const CPUS_MAX: u32 = 255;
/// Most slices of one machine: as many nodes as an elastic process may have.
pub const SLICES_MAX: usize = 16;
/// RAM begins and ends in each slice at multiples of it, in bytes, so that none
/// of a guest's large pages lies in two slices.
pub const MEMORY_STEP: u64 = 2 << 20;
/// Least memory of the primary, in bytes: kernel, initrd and tables are
/// loaded there.
pub const PRIMARY_MEMORY_MIN: u64 = 64 << 20;
/// Least memory, in bytes, of any other slice that has some: Linux leaves the RAM
/// of a smaller NUMA node unused (`NODE_MIN_SIZE`, arch/x86/include/asm/numa.h).
pub const SLICE_MEMORY_MIN: u64 = 4 << 20;

/// Least memory that a slice may use beside its part of RAM, in bytes, where nobody
/// says how much: the kernel's image and its tables, and the part of the file cache
/// that all programs share, are tens of MiB, of which each slice keeps a copy.
const SPARE_MIN: u64 = 64 << 20;
/// Where nobody says, it is this part of a slice's part of RAM.
const SPARE_PART: u64 = 4;
/// What of that a vCPU needs at least, in bytes: the pages of two instructions that
/// move data between two pages each, with four levels of tables for each, of the guest
/// and of what it does for an interrupt; several times over.
const SPARE_FOR_CPU: u64 = 256 << 10;
/// What devices, and pages on their way out, need at least.
const SPARE_FOR_ANY: u64 = 1 << 20;

/// What one slice contributes; either may be zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// vCPUs.
    pub cpus: u32,
    /// RAM, in bytes.
    pub memory_bytes: u64,
}

/// Which slice gives what: who has which vCPUs and which part of RAM. Slice 0 is
/// the primary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Share>", into = "Vec<Share>")]
pub struct Placement {
    shares: Vec<Share>,
}

/// What a placement asks for that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlacementError {
    /// None, or too many.
    #[error("{0} slices: the number must be 1 to {SLICES_MAX}")]
    Slices(usize),
    /// None, or more than an xAPIC can name.
    #[error("{0} vCPUs in all slices together: the number must be 1 to {CPUS_MAX}")]
    Cpus(u64),
    /// Nobody would execute the first instruction.
    #[error("slice 0 has no vCPU: the machine starts there, so give it at least one")]
    PrimaryCpus,
    /// No room for what is loaded.
    #[error(
        "slice 0 has {0} bytes of memory: the kernel is loaded there, so give it at least \
        {PRIMARY_MEMORY_MIN}"
    )]
    PrimaryMemory(u64),
    /// Linux would leave it unused.
    #[error(
        "slice {slice} has {bytes} bytes of memory: give it at least {SLICE_MEMORY_MIN}, or none"
    )]
    Small { slice: usize, bytes: u64 },
    /// A page, or among several slices a large page, would lie in two of them.
    #[error("slice {slice} has {bytes} bytes of memory: give it a multiple of {step}")]
    Step {
        slice: usize,
        bytes: u64,
        /// Of what it must be a multiple.
        step: u64,
    },
    /// The same, before it was dealt out.
    #[error("memory of {0} bytes is distributed in steps of {MEMORY_STEP}: give a multiple")]
    Total(u64),
    /// It would do nothing.
    #[error("slice {0} has neither a vCPU nor memory: give it some, or remove it")]
    Nothing(usize),
    /// More bytes than there are addresses.
    #[error("the memory of all slices together is more than a machine can have")]
    Sum,
}

impl From<Placement> for Vec<Share> {
    fn from(placement: Placement) -> Self {
        placement.shares
    }
}

impl TryFrom<Vec<Share>> for Placement {
    type Error = PlacementError;

    fn try_from(shares: Vec<Share>) -> Result<Self, PlacementError> {
        Self::new(shares)
    }
}

impl Placement {
    /// One slice with everything. Not checked: the machine's configuration
    /// says what a machine of one slice may have.
    pub fn whole(cpus: u32, memory_bytes: u64) -> Self {
        let all = Share { cpus, memory_bytes };
        Self { shares: vec![all] }
    }

    /// Bytes of a slice's host that guest RAM may fill there: the slice's part, and
    /// `spare` for pages of the others' parts, or a default; at most their size.
    pub fn budget_bytes(&self, slice: usize, spare: Option<u64>) -> u64 {
        let all = self.memory_bytes();
        let own = self.shares.get(slice).map_or(0, |share| share.memory_bytes);
        let spare = spare.unwrap_or((own / SPARE_PART).max(SPARE_MIN));
        own.saturating_add(spare).min(all)
    }

    /// Least that [`Self::budget_bytes`] may be given as `spare`: what the vCPUs of one
    /// slice need at once.
    pub fn spare_bytes_min(&self) -> u64 {
        let cpus = self.shares.iter().map(|share| share.cpus).max();
        SPARE_FOR_ANY + u64::from(cpus.unwrap_or(0)) * SPARE_FOR_CPU
    }

    /// `nodes` slices that share `cpus` vCPUs and `memory_bytes` of RAM: see
    /// [`deal_cpus`] and [`deal_memory`].
    pub fn deal(nodes: usize, cpus: u32, memory_bytes: u64) -> Result<Self, PlacementError> {
        if nodes == 1 {
            return Self::new(Self::whole(cpus, memory_bytes).shares);
        }
        let memory = deal_memory(nodes, memory_bytes)?;
        let shares = deal_cpus(nodes, cpus)?
            .into_iter()
            .zip(memory)
            .map(|(cpus, memory_bytes)| Share { cpus, memory_bytes })
            .collect();
        Self::new(shares)
    }

    /// These shares, if a machine can have them.
    pub fn new(shares: Vec<Share>) -> Result<Self, PlacementError> {
        check(&shares)?;
        Ok(Self { shares })
    }

    /// As [`Self::new`], of shares that the caller checks or has checked.
    pub fn unchecked(shares: Vec<Share>) -> Self {
        Self { shares }
    }

    /// What each slice gives.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// How many slices there are.
    pub fn slices(&self) -> usize {
        self.shares.len()
    }

    /// vCPUs of all slices.
    pub fn cpus(&self) -> u32 {
        self.shares.iter().map(|share| share.cpus).sum()
    }

    /// RAM of all slices, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.shares.iter().map(|share| share.memory_bytes).sum()
    }

    /// Where a vCPU is at the start.
    ///
    /// # Panics
    /// If there is no such vCPU.
    pub fn slice_of_cpu(&self, cpu: u32) -> usize {
        let slice = (0..self.slices()).find(|slice| self.cpus_of(*slice).contains(&cpu));
        slice.unwrap_or_else(|| panic!("vCPU {cpu} of {}", self.cpus()))
    }

    /// Numbers of a slice's vCPUs at the start.
    ///
    /// # Panics
    /// If there is no such slice.
    pub fn cpus_of(&self, slice: usize) -> Range<u32> {
        let start = self.shares[..slice].iter().map(|share| share.cpus).sum();
        start..start + self.shares[slice].cpus
    }

    /// vCPUs of one package as CPUID tells it: vCPU n has the bits of n, so that a
    /// package starts at a multiple of its size, and none may lie on two slices.
    /// Linux warns of NUMA nodes that share one.
    pub fn package_cpus(&self) -> u32 {
        let with_cpus = (0..self.slices()).map(|slice| self.cpus_of(slice));
        let starts = with_cpus.filter(|cpus| !cpus.is_empty() && cpus.start > 0);
        let bits = starts.map(|cpus| cpus.start.trailing_zeros()).min();
        bits.map_or(self.cpus(), |bits| 1 << bits)
    }

    /// Guest-physical addresses of a slice's RAM: two ranges when the hole for
    /// devices interrupts it, none when it has no memory.
    ///
    /// # Panics
    /// If there is no such slice.
    pub fn memory_of(&self, slice: usize) -> Vec<Range<u64>> {
        let before = &self.shares[..slice];
        let start = before.iter().map(|share| share.memory_bytes).sum();
        guest_physical(start..start + self.shares[slice].memory_bytes)
    }

    /// For each slice the guest-physical page number after its last page; that of
    /// the slice before it where it has no memory. They never fall.
    pub fn page_ends(&self) -> Vec<u64> {
        let mut end = 0;
        (0..self.slices())
            .map(|slice| {
                if let Some(last) = self.memory_of(slice).last() {
                    end = last.end / PAGE_SIZE;
                }
                end
            })
            .collect()
    }

    /// The slices as a guest is told of them: a NUMA node each. Linux counts those
    /// with vCPUs first.
    pub fn nodes(&self) -> Vec<Node> {
        // No checked placement has that many; of others `acpi::place` refuses the
        // number that comes twice.
        let number = |cpu| u8::try_from(cpu).unwrap_or(u8::MAX);
        (0..self.slices())
            .map(|slice| Node {
                cpus: self.cpus_of(slice).map(number).collect(),
                memory: self.memory_of(slice),
            })
            .collect()
    }
}

/// How many of `cpus` vCPUs each of `nodes` slices has: as many as any other, or
/// one more for the first ones.
pub fn deal_cpus(nodes: usize, cpus: u32) -> Result<Vec<u32>, PlacementError> {
    let slices = count(nodes)?;
    let has_more = |slice: u32| u32::from(slice < cpus % slices);
    Ok((0..slices)
        .map(|slice| cpus / slices + has_more(slice))
        .collect())
}

/// How much of `memory_bytes` each of `nodes` slices has, in steps of [`MEMORY_STEP`]; the
/// first one has at least what it needs, if there is that much.
pub fn deal_memory(nodes: usize, memory_bytes: u64) -> Result<Vec<u64>, PlacementError> {
    let slices = u64::from(count(nodes)?);
    if slices == 1 {
        return Ok(vec![memory_bytes]);
    }
    if !memory_bytes.is_multiple_of(MEMORY_STEP) {
        return Err(PlacementError::Total(memory_bytes));
    }
    let deal = |slices: u64, bytes: u64| {
        let steps = bytes / MEMORY_STEP;
        let has_more = move |slice| u64::from(slice < steps % slices);
        (0..slices).map(move |slice| (steps / slices + has_more(slice)) * MEMORY_STEP)
    };
    let even: Vec<u64> = deal(slices, memory_bytes).collect();
    if even[0] >= PRIMARY_MEMORY_MIN {
        return Ok(even);
    }
    let first = memory_bytes.min(PRIMARY_MEMORY_MIN);
    let others = deal(slices - 1, memory_bytes - first);
    Ok([first].into_iter().chain(others).collect())
}

fn count(nodes: usize) -> Result<u32, PlacementError> {
    match u32::try_from(nodes) {
        Ok(count) if (1..=SLICES_MAX).contains(&nodes) => Ok(count),
        _ => Err(PlacementError::Slices(nodes)),
    }
}

/// Refuses what cannot be.
fn check(shares: &[Share]) -> Result<(), PlacementError> {
    count(shares.len())?;
    let cpus: u64 = shares.iter().map(|share| u64::from(share.cpus)).sum();
    if cpus == 0 || cpus > u64::from(CPUS_MAX) {
        return Err(PlacementError::Cpus(cpus));
    }
    let add = |sum: u64, share: &Share| sum.checked_add(share.memory_bytes);
    let sum = shares.iter().try_fold(0, add);
    // The hole for devices lies among the addresses, too.
    if sum.is_none_or(|sum| sum > 1 << 62) {
        return Err(PlacementError::Sum);
    }
    let [only] = shares else {
        return check_several(shares);
    };
    // As a machine that knows nothing of slices.
    match only.memory_bytes {
        bytes if bytes < SLICE_MEMORY_MIN => Err(PlacementError::Small { slice: 0, bytes }),
        bytes if !bytes.is_multiple_of(PAGE_SIZE) => Err(PlacementError::Step {
            slice: 0,
            bytes,
            step: PAGE_SIZE,
        }),
        _ => Ok(()),
    }
}

fn check_several(shares: &[Share]) -> Result<(), PlacementError> {
    for (slice, share) in shares.iter().enumerate() {
        let bytes = share.memory_bytes;
        if slice == 0 && share.cpus == 0 {
            return Err(PlacementError::PrimaryCpus);
        }
        if slice == 0 && bytes < PRIMARY_MEMORY_MIN {
            return Err(PlacementError::PrimaryMemory(bytes));
        }
        if share.cpus == 0 && bytes == 0 {
            return Err(PlacementError::Nothing(slice));
        }
        if bytes != 0 && bytes < SLICE_MEMORY_MIN {
            return Err(PlacementError::Small { slice, bytes });
        }
        if !bytes.is_multiple_of(MEMORY_STEP) {
            let step = MEMORY_STEP;
            return Err(PlacementError::Step { slice, bytes, step });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_guest_memory::{DEVICE_HOLE, FOUR_GIB};

    const MIB: u64 = 1 << 20;

    fn placement(shares: &[(u32, u64)]) -> Result<Placement, PlacementError> {
        let share = |(cpus, mib): &(u32, u64)| Share {
            cpus: *cpus,
            memory_bytes: mib * MIB,
        };
        Placement::new(shares.iter().map(share).collect())
    }

    #[test]
    fn a_budget_is_a_part_and_something_for_the_others() {
        let share = |cpus, mib: u64| Share {
            cpus,
            memory_bytes: mib * MIB,
        };
        let placement = Placement::new(vec![share(1, 512), share(2, 64), share(1, 0)]).unwrap();
        let budget = |slice, spare: Option<u64>| {
            placement.budget_bytes(slice, spare.map(|mib| mib * MIB)) / MIB
        };
        assert_eq!([0, 1, 2].map(|slice| budget(slice, None)), [576, 128, 64]);
        assert_eq!(
            [0, 1, 2].map(|slice| budget(slice, Some(16))),
            [528, 80, 16]
        );
        assert_eq!(budget(2, Some(1 << 40)), 576);
        assert_eq!(placement.spare_bytes_min(), (1 << 20) + (512 << 10));
    }

    #[test]
    fn dealing_gives_everything_once() {
        for nodes in 1..=SLICES_MAX {
            for cpus in [1, 2, 7, 255] {
                for mib in [256, 258, 1000, 3072, 3074, 9216] {
                    let dealt = Placement::deal(nodes, cpus, mib * MIB).unwrap();
                    assert_eq!(dealt.slices(), nodes);
                    assert_eq!((dealt.cpus(), dealt.memory_bytes()), (cpus, mib * MIB));
                    let shares = dealt.shares();
                    let spread = |of: &dyn Fn(&Share) -> u64| {
                        let all = shares[1..].iter().map(of);
                        all.clone().max().unwrap_or(0) - all.min().unwrap_or(0)
                    };
                    assert!(spread(&|share| share.cpus.into()) <= 1);
                    assert!(spread(&|share| share.memory_bytes) <= MEMORY_STEP);
                    assert!(shares.is_sorted_by_key(|share| std::cmp::Reverse(share.cpus)));
                    everything_once(&dealt);
                }
            }
        }
        let few = Placement::deal(3, 2, 96 * MIB).unwrap();
        assert_eq!(few, placement(&[(1, 64), (1, 16), (0, 16)]).unwrap());
    }

    /// vCPUs, RAM and page ends agree with one another.
    fn everything_once(placement: &Placement) {
        let nodes = placement.nodes();
        weft_platform::acpi::topology::check(&nodes).unwrap();
        let mut memory_bytes = 0;
        let ends = placement.page_ends();
        let mut start = 0;
        for (slice, node) in nodes.iter().enumerate() {
            for cpu in &node.cpus {
                assert_eq!(placement.slice_of_cpu((*cpu).into()), slice);
            }
            for range in &node.memory {
                assert!(start <= range.start / PAGE_SIZE && range.end / PAGE_SIZE <= ends[slice]);
                memory_bytes += range.end - range.start;
            }
            assert!(start <= ends[slice]);
            start = ends[slice];
        }
        assert_eq!(memory_bytes, placement.memory_bytes());
    }

    #[test]
    fn a_share_may_be_of_one_kind_only() {
        let mixed = placement(&[(1, 64), (0, 64), (2, 0), (1, 4000)]).unwrap();
        everything_once(&mixed);
        assert_eq!(mixed.cpus_of(1), 1..1);
        assert_eq!(mixed.cpus_of(2), 1..3);
        assert_eq!(mixed.slice_of_cpu(3), 3);
        assert_eq!(mixed.memory_of(2), []);
        let (low, high) = (128 * MIB..DEVICE_HOLE, FOUR_GIB..FOUR_GIB + 1056 * MIB);
        assert_eq!(mixed.memory_of(3), [low, high.clone()]);
        let pages = |bytes: u64| bytes / PAGE_SIZE;
        let ends = [64 * MIB, 128 * MIB, 128 * MIB, high.end].map(pages);
        assert_eq!(mixed.page_ends(), ends);
        // A slice that ends at the hole ends there, not behind it.
        let even = placement(&[(1, 3072), (0, 64)]).unwrap();
        assert_eq!(even.page_ends()[0], DEVICE_HOLE / PAGE_SIZE);
        assert_eq!(even.memory_of(1)[0].start, FOUR_GIB);
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let refusal = |shares: &[(u32, u64)]| placement(shares).unwrap_err();
        assert_eq!(refusal(&[]), PlacementError::Slices(0));
        assert_eq!(refusal(&[(1, 64); 17]), PlacementError::Slices(17));
        assert_eq!(refusal(&[(0, 64)]), PlacementError::Cpus(0));
        assert_eq!(refusal(&[(200, 64); 2]), PlacementError::Cpus(400));
        assert_eq!(
            refusal(&[(u32::MAX, 64); 16]),
            PlacementError::Cpus(u64::from(u32::MAX) * 16)
        );
        assert_eq!(refusal(&[(0, 64), (1, 64)]), PlacementError::PrimaryCpus);
        let small = PlacementError::PrimaryMemory(62 * MIB);
        assert_eq!(refusal(&[(1, 62), (1, 64)]), small);
        assert_eq!(refusal(&[(1, 64), (0, 0)]), PlacementError::Nothing(1));
        let bytes = 2 * MIB;
        assert_eq!(
            refusal(&[(1, 64), (1, 2)]),
            PlacementError::Small { slice: 1, bytes }
        );
        let (bytes, step) = (65 * MIB, MEMORY_STEP);
        let odd = PlacementError::Step {
            slice: 0,
            bytes,
            step,
        };
        assert_eq!(refusal(&[(1, 65), (1, 64)]), odd);
        assert_eq!(refusal(&[(1, 1 << 43), (1, 1 << 43)]), PlacementError::Sum);
        // A placement of one slice is an ordinary machine.
        assert!(placement(&[(1, 5)]).is_ok());
        let odd = Placement::deal(1, 1, (5 << 20) + 1);
        assert!(matches!(
            odd,
            Err(PlacementError::Step {
                step: PAGE_SIZE,
                ..
            })
        ));
        assert_eq!(
            Placement::deal(2, 1, 129 * MIB),
            Err(PlacementError::Total(129 * MIB))
        );
        assert_eq!(
            Placement::deal(0, 1, 129 * MIB),
            Err(PlacementError::Slices(0))
        );
        let starved = Placement::deal(2, 1, 62 * MIB);
        assert_eq!(starved, Err(PlacementError::PrimaryMemory(62 * MIB)));
    }

    #[test]
    fn no_package_lies_on_two_slices() {
        let package = |cpus: &[u32]| {
            let shares: Vec<_> = cpus.iter().map(|cpus| (*cpus, 64)).collect();
            placement(&shares).unwrap().package_cpus()
        };
        assert_eq!([package(&[7]), package(&[3, 0])], [7, 3]);
        assert_eq!(
            [package(&[1, 1]), package(&[3, 1]), package(&[2, 1, 1])],
            [1; 3]
        );
        assert_eq!(
            [package(&[2, 2]), package(&[4, 0, 2, 1]), package(&[2, 4])],
            [2; 3]
        );
        assert_eq!(package(&[8, 4, 4]), 4);
    }

    #[test]
    fn it_is_a_list_of_shares_to_others() {
        let two = placement(&[(1, 64), (1, 64)]).unwrap();
        let text = serde_json::to_string(&two).unwrap();
        assert!(
            text.starts_with(r#"[{"cpus":1,"memory_bytes":67108864}"#),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<Placement>(&text).unwrap(), two);
        let error = serde_json::from_str::<Placement>("[]").unwrap_err();
        assert!(error.to_string().contains("0 slices"));
    }
}
