//! Which CPUs and which memory belong together.

use std::ops::Range;

use weft_guest_memory::{DEVICE_HOLE, FOUR_GIB};

use super::{AcpiError, CPUS_MAX, NODES_MAX};

/// Memory moves between nodes in pages of this size at most.
const SHARE_ALIGNMENT: u64 = 2 << 20;

/// A node as the guest sees it (one per slice): any part may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Numbers of CPUs.
    pub cpus: Vec<u8>,
    /// Guest-physical addresses.
    pub memory: Vec<Range<u64>>,
}

/// `count` nodes with equal shares, as far as whole CPUs and 2 MiB allow; the
/// first ones get what is left over.
pub fn equal_shares(ram_bytes: u64, cpus: u8, count: usize) -> Vec<Node> {
    let count = count.max(1) as u64;
    // The last share takes what the alignment leaves.
    let boundary = |number: u64| match number {
        0 => 0,
        n if n == count => ram_bytes,
        n => {
            (u128::from(ram_bytes) * u128::from(n) / u128::from(count)) as u64 / SHARE_ALIGNMENT
                * SHARE_ALIGNMENT
        }
    };
    (0..count)
        .map(|number| Node {
            cpus: (0..cpus)
                .filter(|cpu| u64::from(*cpu) * count / u64::from(cpus) == number)
                .collect(),
            memory: guest_physical(boundary(number)..boundary(number + 1)),
        })
        .collect()
}

/// Where a stretch of RAM, counted without the hole, lies in the guest.
pub fn guest_physical(ram: Range<u64>) -> Vec<Range<u64>> {
    let low = ram.start.min(DEVICE_HOLE)..ram.end.min(DEVICE_HOLE);
    let above = |offset: u64| FOUR_GIB + offset.saturating_sub(DEVICE_HOLE);
    let high = above(ram.start)..above(ram.end);
    [low, high]
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect()
}

/// Refuses what the tables cannot tell.
pub fn check(nodes: &[Node]) -> Result<(), AcpiError> {
    if !(1..=NODES_MAX).contains(&nodes.len()) {
        return Err(AcpiError::Nodes(nodes.len()));
    }
    let mut cpus: Vec<u8> = nodes.iter().flat_map(|node| node.cpus.clone()).collect();
    cpus.sort_unstable();
    let complete = cpus
        .iter()
        .enumerate()
        .all(|(n, cpu)| n == usize::from(*cpu));
    if !complete || !(1..=CPUS_MAX).contains(&cpus.len()) {
        return Err(AcpiError::Cpus(cpus));
    }
    let mut memory: Vec<&Range<u64>> = nodes.iter().flat_map(|node| &node.memory).collect();
    memory.sort_unstable_by_key(|range| range.start);
    if let Some(empty) = memory.iter().find(|range| range.is_empty()) {
        return Err(AcpiError::Memory((*empty).clone()));
    }
    match memory.windows(2).find(|pair| pair[0].end > pair[1].start) {
        Some(pair) => Err(AcpiError::Memory(pair[1].clone())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once() {
        for size in [
            64 << 20,
            DEVICE_HOLE - (2 << 20),
            DEVICE_HOLE + (6 << 20),
            9 << 30,
        ] {
            for (cpus, count) in [(1, 1), (4, 2), (3, 2), (2, 3), (255, 7)] {
                let nodes = equal_shares(size, cpus, count);
                assert_eq!(nodes.len(), count);
                check(&nodes).unwrap();
                let all: u64 = nodes
                    .iter()
                    .flat_map(|node| &node.memory)
                    .map(|range| range.end - range.start)
                    .sum();
                assert_eq!(all, size);
            }
        }
        let nodes = equal_shares(6 << 30, 2, 2);
        assert_eq!(nodes[0].memory, vec![0..DEVICE_HOLE; 1]);
        assert_eq!(nodes[1].memory, vec![FOUR_GIB..FOUR_GIB + (3 << 30); 1]);
        assert_eq!(nodes[1].cpus, [1]);
    }

    #[test]
    fn what_cannot_be_told_is_refused() {
        let node = |cpus: &[u8], memory: Range<u64>| Node {
            cpus: cpus.into(),
            memory: vec![memory],
        };
        assert!(matches!(check(&[]), Err(AcpiError::Nodes(0))));
        let twice = [node(&[0], 0..9), node(&[0], 9..10)];
        assert!(matches!(check(&twice), Err(AcpiError::Cpus(_))));
        assert!(matches!(
            check(&[node(&[1], 0..9)]),
            Err(AcpiError::Cpus(_))
        ));
        let overlap = [node(&[0], 0..9), node(&[1], 8..10)];
        assert!(matches!(check(&overlap), Err(AcpiError::Memory(_))));
    }
}
