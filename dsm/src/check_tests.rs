//! Searches at sizes that a test run bears, and searches of broken cores.

use super::*;
use crate::node::Broken;

const HOME: ManagerOf = ManagerOf::Fixed(NodeId(0));

fn bounds(nodes: usize, pages: usize, faults: u8, evictions: u8) -> Bounds {
    Bounds {
        nodes,
        pages,
        manager: HOME,
        migratory: true,
        faults,
        ahead: false,
        evictions,
        discards: 0,
        losses: 0,
        states_max: 200_000_000,
    }
}

fn holds(name: &str, bounds: Bounds) {
    let start = std::time::Instant::now();
    match explore(&bounds) {
        Ok(explored) => {
            println!("{name}: {explored:?} in {:?}", start.elapsed());
            assert!(explored.complete, "{name}: too many states");
        }
        Err(found) => panic!("{name}: {}\n{}", found.flaw, found.trace),
    }
}

#[test]
fn two_nodes_one_page() {
    holds(
        "2x1",
        Bounds {
            ahead: true,
            discards: 1,
            ..bounds(2, 1, 3, 2)
        },
    );
}

#[test]
fn two_nodes_one_page_with_loss() {
    holds(
        "2x1 loss",
        Bounds {
            ahead: true,
            losses: 1,
            ..bounds(2, 1, 3, 2)
        },
    );
}

#[test]
fn three_nodes_one_page() {
    holds("3x1", bounds(3, 1, 2, 1));
}

#[test]
fn three_nodes_one_page_with_loss() {
    holds(
        "3x1 loss",
        Bounds {
            losses: 1,
            ..bounds(3, 1, 2, 1)
        },
    );
}

#[test]
fn three_nodes_one_page_with_discard() {
    holds(
        "3x1 discard",
        Bounds {
            discards: 1,
            ..bounds(3, 1, 2, 0)
        },
    );
}
