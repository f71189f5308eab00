//! The nodes of a machine's next life, where these are not those of its start: a machine that came
//! from another host with nodes on several starts anew on the hosts that it had at its end.

use weft_machine::{Invalid, MEMORY_STEP, PRIMARY_MEMORY_MIN, Placement, SLICE_MEMORY_MIN, Share};
use weft_node::monitor_protocol::THIS_HOST;

use super::plan::Plan;

/// The plan of the next life. `hosts`: those of nodes that were not on this one; `shares`: what
/// each node had.
///
/// # Errors
/// A machine cannot be divided so.
pub fn plan(
    last: &Plan,
    hosts: &[(u32, String)],
    shares: &[(usize, Share)],
) -> Result<Plan, Invalid> {
    let mut next = last.clone();
    let configuration = &mut next.configuration;
    let whole = Share {
        cpus: configuration.cpus,
        memory_bytes: configuration.memory_bytes,
    };
    let others = by_host(hosts, shares);
    let (own, others) = divide(whole, others);
    let (hosts, others): (Vec<String>, Vec<Share>) = others.into_iter().unzip();
    configuration.slices = [vec![own], others].concat();
    let placement = Placement::unchecked(configuration.slices.clone());
    configuration.spare_bytes = spare(configuration.spare_bytes, &placement);
    configuration.validate()?;
    next.nodes.count = configuration.slices.len();
    next.nodes.shares = configuration.slices.clone();
    next.nodes.hosts = hosts;
    Ok(next)
}

/// What each node may use beside its part. A host lends no more than the least, where nobody said;
/// that of the last life is too little where a node has more vCPUs now.
fn spare(last: Option<u64>, placement: &Placement) -> Option<u64> {
    let least = placement.spare_bytes_min();
    let is_one = placement.slices() == 1;
    (!is_one).then(|| last.map_or(least, |spare| spare.max(least)))
}

/// What each other host had, in the order of nodes.
fn by_host(hosts: &[(u32, String)], shares: &[(usize, Share)]) -> Vec<(String, Share)> {
    let mut others: Vec<(String, Share)> = Vec::new();
    for (node, share) in shares {
        let host = hosts.iter().find(|(number, _)| *number as usize == *node);
        let Some((_, host)) = host.filter(|(_, host)| host != THIS_HOST) else {
            continue;
        };
        match others.iter_mut().find(|(other, _)| other == host) {
            Some((_, sum)) => {
                sum.cpus += share.cpus;
                sum.memory_bytes += share.memory_bytes;
            }
            None => others.push((host.clone(), *share)),
        }
    }
    others
}

/// What of the machine this host has, and what each other host that has any. Memory ends at
/// multiples of [`MEMORY_STEP`], and node 0 has a vCPU and memory for a kernel.
fn divide(whole: Share, mut others: Vec<(String, Share)>) -> (Share, Vec<(String, Share)>) {
    let mut own = whole;
    for (_, share) in &mut others {
        share.memory_bytes -= share.memory_bytes % MEMORY_STEP;
        if share.memory_bytes < SLICE_MEMORY_MIN {
            share.memory_bytes = 0;
        }
        share.memory_bytes = share.memory_bytes.min(own.memory_bytes);
        share.cpus = share.cpus.min(own.cpus);
        own.memory_bytes -= share.memory_bytes;
        own.cpus -= share.cpus;
    }
    let largest = others.iter_mut().max_by_key(|(_, share)| share.cpus);
    if let Some((_, share)) = largest.filter(|_| own.cpus == 0) {
        own.cpus += 1;
        share.cpus -= 1;
    }
    for (_, share) in &mut others {
        let missing = PRIMARY_MEMORY_MIN.saturating_sub(own.memory_bytes);
        let mut given = missing
            .next_multiple_of(MEMORY_STEP)
            .min(share.memory_bytes);
        if share.memory_bytes - given < SLICE_MEMORY_MIN {
            given = share.memory_bytes;
        }
        if missing > 0 {
            own.memory_bytes += given;
            share.memory_bytes -= given;
        }
    }
    others.retain(|(_, share)| share.cpus > 0 || share.memory_bytes > 0);
    (own, others)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn share(cpus: u32, mib: u64) -> Share {
        Share {
            cpus,
            memory_bytes: mib * MIB,
        }
    }

    fn divided(whole: Share, others: &[Share]) -> Vec<Share> {
        let named = others.iter().map(|share| ("other".to_owned(), *share));
        let (own, others) = divide(whole, named.collect());
        let all: Vec<Share> = [own]
            .into_iter()
            .chain(others.into_iter().map(|(_, share)| share))
            .collect();
        let placement = Placement::new(all.clone()).unwrap();
        let sum = (placement.cpus(), placement.memory_bytes());
        assert_eq!(sum, (whole.cpus, whole.memory_bytes));
        all
    }

    #[test]
    fn each_host_has_what_it_had() {
        let all = divided(share(3, 256), &[share(1, 100), share(1, 60)]);
        assert_eq!(all, [share(1, 96), share(1, 100), share(1, 60)]);
    }

    #[test]
    fn each_node_has_enough_to_spare() {
        let two = |cpus| Placement::unchecked(vec![share(cpus, 64), share(2 - cpus, 64)]);
        let (apart, together) = (two(1), two(2));
        let first = spare(None, &apart);
        assert_eq!(first, Some(apart.spare_bytes_min()));
        assert_eq!(spare(first, &together), Some(together.spare_bytes_min()));
        assert_eq!(spare(Some(MIB << 10), &apart), Some(MIB << 10));
        assert_eq!(spare(first, &Placement::whole(2, 128 * MIB)), None);
    }

    #[test]
    fn memory_ends_at_steps() {
        let mut odd = share(0, 101);
        odd.memory_bytes += 4096;
        assert_eq!(
            divided(share(2, 256), &[odd]),
            [share(2, 156), share(0, 100)]
        );
        // So little is of no use.
        assert_eq!(divided(share(2, 256), &[share(0, 3)]), [share(2, 256)]);
    }

    #[test]
    fn node_0_has_a_vcpu_and_memory_for_a_kernel() {
        let all = divided(share(2, 128), &[share(2, 128)]);
        assert_eq!(all, [share(1, 64), share(1, 64)]);
        let all = divided(share(3, 128), &[share(1, 30), share(2, 97)]);
        assert_eq!(all, [share(1, 64), share(1, 0), share(1, 64)]);
        assert_eq!(divided(share(1, 64), &[share(1, 64)]), [share(1, 64)]);
    }

    #[test]
    fn nodes_of_one_host_are_one() {
        let hosts = [
            (1, "alpha".to_owned()),
            (2, THIS_HOST.to_owned()),
            (4, "alpha".to_owned()),
        ];
        let shares = [
            (0, share(1, 64)),
            (1, share(1, 32)),
            (2, share(0, 32)),
            (4, share(0, 16)),
        ];
        let others = by_host(&hosts, &shares);
        assert_eq!(others, [("alpha".to_owned(), share(1, 48))]);
    }
}
