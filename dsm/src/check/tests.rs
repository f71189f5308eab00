//! Searches at sizes that a test run bears, and searches of mutants.

use super::*;
use crate::node::Mutant;
use crate::ranges::Ranges;
use crate::types::NodeId;

const HOME: ManagerOf = ManagerOf::Fixed(NodeId(0));

fn bounds(nodes: usize, pages: usize, faults: u8, evictions: u8) -> Bounds {
    Bounds {
        nodes,
        pages,
        manager: HOME,
        migratory: true,
        probe_every: 1,
        faults,
        ahead: false,
        update: false,
        evictions,
        home: false,
        full: false,
        discards: 0,
        hasty: false,
        hand_overs: 0,
        recalls: 0,
        change: None,
        cancels: false,
        losses: 0,
        states_max: 20_000_000,
    }
}

fn holds(name: &str, bounds: Bounds) {
    let changes = bounds.change.is_some();
    let start = std::time::Instant::now();
    match explore(&bounds) {
        Ok(explored) => {
            println!("{name}: {explored:?} in {:.1?}", start.elapsed());
            assert!(explored.complete, "{name}: too many states");
            assert_eq!(changes, explored.changed > 0, "{name}: never carried out");
        }
        Err(found) => panic!("{name}: {}\n{}", found.flaw, found.trace),
    }
}

#[test]
fn two_nodes_one_page() {
    let large = bounds(2, 1, 3, 2);
    let discard = Bounds {
        ahead: true,
        discards: 1,
        ..large
    };
    holds("2x1, discard", discard);
    let twice = Bounds {
        discards: 2,
        ..bounds(2, 1, 2, 1)
    };
    holds("2x1, two discards", twice);
    let loss = Bounds {
        ahead: true,
        losses: 1,
        ..large
    };
    holds("2x1, loss", loss);
    let plain = Bounds {
        migratory: false,
        ..large
    };
    holds("2x1, not migratory", plain);
}

/// Pages that move from reader to reader, and are not probed each time.
#[test]
fn most_stays_are_trusted() {
    let trusted = |bounds: Bounds| Bounds {
        probe_every: 2,
        ..bounds
    };
    let ahead = Bounds {
        ahead: true,
        ..bounds(2, 1, 4, 1)
    };
    holds("2x1, trusted, ahead", trusted(ahead));
    let discard = Bounds {
        discards: 1,
        ..bounds(2, 1, 4, 0)
    };
    holds("2x1, trusted, discard", trusted(discard));
    let loss = Bounds {
        losses: 1,
        ..bounds(2, 1, 3, 1)
    };
    holds("2x1, trusted, loss", trusted(loss));
    holds("3x1, trusted", trusted(bounds(3, 1, 3, 0)));
}

#[test]
fn two_nodes_two_pages() {
    holds("2x2", bounds(2, 2, 2, 1));
    let interleaved = Bounds {
        manager: ManagerOf::Interleaved,
        ..bounds(2, 2, 1, 1)
    };
    holds("2x2, interleaved", interleaved);
    let loss = Bounds {
        losses: 1,
        ..interleaved
    };
    holds("2x2, interleaved, loss", loss);
}

fn ranges(ends: &[u64]) -> ManagerOf {
    ManagerOf::Ranges(Ranges::new(ends).expect("ends that ascend"))
}

#[test]
fn managed_by_ranges() {
    let each = Bounds {
        manager: ranges(&[1, 2]),
        ..bounds(2, 2, 2, 1)
    };
    holds("2x2, ranges", each);
    let once = Bounds { faults: 1, ..each };
    let discard = Bounds {
        discards: 1,
        ..once
    };
    holds("2x2, ranges, discard", discard);
    let loss = Bounds { losses: 1, ..once };
    holds("2x2, ranges, loss", loss);
    let third = Bounds {
        manager: ranges(&[0, 1, 2]),
        ..bounds(3, 2, 1, 1)
    };
    holds("3x2, ranges, the first has none", third);
}

/// Evicted pages go home, as in the slices of an Aggregate VM.
#[test]
fn evictions_go_home() {
    let home = |bounds: Bounds| Bounds {
        home: true,
        ..bounds
    };
    let each = Bounds {
        manager: ranges(&[1, 2]),
        ..bounds(2, 2, 2, 1)
    };
    holds("2x2, ranges, home", home(each));
    let ahead = Bounds {
        ahead: true,
        ..bounds(2, 1, 3, 2)
    };
    holds("2x1, ahead, home", home(ahead));
    holds("3x1, home", home(bounds(3, 1, 2, 1)));
    let loss = Bounds {
        losses: 1,
        ..bounds(3, 1, 1, 1)
    };
    holds("3x1, loss, home", home(loss));
}

/// Pages that a node requests again after a write took them.
#[test]
fn pages_are_kept_up_to_date() {
    let update = |bounds: Bounds| Bounds {
        update: true,
        ..bounds
    };
    let ahead = Bounds {
        ahead: true,
        ..bounds(2, 1, 3, 2)
    };
    holds("2x1, update, ahead", update(ahead));
    let discard = Bounds {
        discards: 1,
        ..bounds(2, 1, 3, 1)
    };
    holds("2x1, update, discard", update(discard));
    let each = Bounds {
        manager: ranges(&[1, 2]),
        ..bounds(2, 2, 2, 1)
    };
    holds("2x2, update, ranges", update(each));
    holds("3x1, update", update(bounds(3, 1, 2, 0)));
    let elsewhere = Bounds {
        manager: ManagerOf::Fixed(NodeId(2)),
        home: true,
        ..bounds(3, 1, 1, 1)
    };
    holds(
        "3x1, update, evictions, managed by the last",
        update(elsewhere),
    );
    let loss = Bounds {
        losses: 1,
        ..bounds(3, 1, 1, 0)
    };
    holds("3x1, update, loss", update(loss));
}

#[test]
fn three_nodes_one_page() {
    holds("3x1", bounds(3, 1, 2, 1));
    let discard = Bounds {
        discards: 1,
        ..bounds(3, 1, 2, 0)
    };
    holds("3x1, discard", discard);
    let elsewhere = Bounds {
        manager: ManagerOf::Fixed(NodeId(2)),
        migratory: false,
        ..bounds(3, 1, 2, 1)
    };
    holds("3x1, managed by the last, not migratory", elsewhere);
}

#[test]
fn three_nodes_one_page_with_loss() {
    let loss = Bounds {
        losses: 1,
        ..bounds(3, 1, 1, 1)
    };
    holds("3x1, loss", loss);
    let more_faults = Bounds {
        losses: 1,
        ..bounds(3, 1, 2, 0)
    };
    holds("3x1, loss, more faults", more_faults);
}

#[test]
fn three_nodes_two_pages() {
    let ahead = Bounds {
        ahead: true,
        ..bounds(3, 2, 2, 0)
    };
    holds("3x2", ahead);
    holds("3x2, evictions", bounds(3, 2, 1, 1));
}

/// Where no other node has room, a reader becomes the owner.
#[test]
fn room_at_one_node_only() {
    let full = |bounds: Bounds| Bounds {
        full: true,
        ..bounds
    };
    holds("2x2, full", full(bounds(2, 2, 2, 1)));
    holds("3x1, full", full(bounds(3, 1, 3, 0)));
    let discard = Bounds {
        ahead: true,
        discards: 1,
        ..bounds(2, 1, 3, 1)
    };
    holds("2x1, full, discard", full(discard));
    let loss = Bounds {
        losses: 1,
        ..bounds(2, 1, 3, 1)
    };
    holds("2x1, full, loss", full(loss));
}

/// With two nodes the manager need not wait before it discards what nobody else
/// has. With three it must: a third node's push may overtake the order.
#[test]
fn a_manager_in_haste() {
    let two = Bounds {
        discards: 2,
        hasty: true,
        ..bounds(2, 1, 3, 1)
    };
    holds("2x1, in haste", two);
    // Managed by the last, so that the first, which has as much room, is chosen.
    let three = Bounds {
        manager: ManagerOf::Fixed(NodeId(2)),
        discards: 1,
        hasty: true,
        ..bounds(3, 1, 2, 1)
    };
    let found = explore(&three).err().map(|found| found.flaw);
    println!("3x1, in haste: {found:?}");
    assert!(matches!(found, Some(Flaw::Violation { .. })));
}

/// Without this, nobody would know whether the searches above can fail.
#[test]
fn every_mutant_is_found() {
    let plain = bounds(3, 1, 2, 1);
    let discard = Bounds {
        discards: 1,
        ..plain
    };
    let loss = Bounds { losses: 1, ..plain };
    let update = Bounds {
        update: true,
        ..bounds(3, 1, 2, 0)
    };
    let full = Bounds {
        full: true,
        ..bounds(3, 1, 2, 0)
    };
    let full_loss = Bounds { losses: 1, ..full };
    let handed_evicted = handed(bounds(3, 1, 1, 1));
    let handed = Bounds {
        faults: 2,
        evictions: 0,
        ..handed_evicted
    };
    let handed_loss = Bounds {
        losses: 1,
        ..handed
    };
    for (mutant, bounds) in [
        (Mutant::SkipAcks, plain),
        (Mutant::EarlyDone, plain),
        (Mutant::KeepOnWrite, plain),
        (Mutant::BlindPromotion, plain),
        (Mutant::ForgetWaiting, plain),
        (Mutant::IgnoreGeneration, discard),
        (Mutant::SkipProbe, loss),
        (Mutant::NoLostAnswer, loss),
        (Mutant::ZeroInsteadOfLost, loss),
        (Mutant::SkipAcks, update),
        (Mutant::EarlyDone, update),
        (Mutant::ForgetWaiting, update),
        (Mutant::KeepOnWrite, full),
        (Mutant::EarlyDone, full),
        (Mutant::SkipProbe, full_loss),
        (Mutant::KeepServing, handed),
        (Mutant::AskTwice, handed),
        (Mutant::HandBusy, handed),
        (Mutant::EntryEarly, handed),
        (Mutant::ForgetHeld, handed),
        (Mutant::EagerDone, handed_evicted),
        (Mutant::NoAsk, handed_loss),
        (Mutant::JoinEarly, joins(bounds(3, 1, 1, 0))),
        (Mutant::LeaveEarly, leaves(2, bounds(3, 1, 1, 1))),
        (Mutant::NotQuiet, joins(handed)),
    ] {
        let mut world = World::new(&bounds);
        for node in &mut world.nodes {
            node.mutant = Some(mutant);
        }
        match Search::new(&bounds, world).run() {
            Ok(explored) => panic!("{mutant:?} was not found in {explored:?}"),
            Err(found) => {
                println!("{mutant:?}: {}", found.flaw);
                assert!(!found.trace.is_empty());
            }
        }
    }
}

/// The manager of a page changes while requests for it are under way.
#[test]
fn managers_are_handed_over() {
    holds("2x1, handed over", handed(bounds(2, 1, 2, 1)));
    let to_and_fro = Bounds {
        hand_overs: 2,
        ..handed(bounds(2, 1, 2, 1))
    };
    holds("2x1, handed over twice", to_and_fro);
    holds("3x1, handed over", handed(bounds(3, 1, 1, 1)));
    let recalled = Bounds {
        recalls: 1,
        ..handed(bounds(3, 1, 1, 0))
    };
    holds("3x1, handed over, recalled", recalled);
    let ahead = Bounds {
        ahead: true,
        recalls: 1,
        discards: 1,
        ..handed(bounds(2, 1, 2, 1))
    };
    holds("2x1, handed over, ahead, discard", ahead);
    let update = Bounds {
        update: true,
        ..handed(bounds(3, 1, 1, 0))
    };
    holds("3x1, handed over, update", update);
}

/// A page's manager may be handed over.
fn handed(bounds: Bounds) -> Bounds {
    Bounds {
        manager: ranges(&[2]),
        hand_overs: 1,
        ..bounds
    }
}

fn joins(bounds: Bounds) -> Bounds {
    Bounds {
        manager: ranges(&[2]),
        change: Some(Change::Join(NodeId(2))),
        ..bounds
    }
}

fn leaves(node: u8, bounds: Bounds) -> Bounds {
    Bounds {
        manager: ranges(&[2]),
        change: Some(Change::Leave(NodeId(node))),
        ..bounds
    }
}

#[test]
fn a_node_joins() {
    holds("3x1, join", joins(bounds(3, 1, 1, 0)));
    let handed = Bounds {
        hand_overs: 1,
        ..joins(bounds(3, 1, 1, 0))
    };
    holds("3x1, join, handed over", handed);
    let loss = Bounds {
        losses: 1,
        ..joins(bounds(3, 1, 1, 0))
    };
    holds("3x1, join, loss", loss);
}

#[test]
fn a_node_leaves() {
    holds("3x1, a holder leaves", leaves(2, bounds(3, 1, 1, 1)));
    let manager = |bounds: Bounds| Bounds {
        hand_overs: 1,
        ..leaves(0, bounds)
    };
    holds("3x1, the manager leaves", manager(bounds(3, 1, 1, 0)));
    holds("2x1, the manager leaves", manager(bounds(2, 1, 2, 1)));
    let loss = Bounds {
        losses: 1,
        ..manager(bounds(2, 1, 1, 1))
    };
    holds("2x1, the manager leaves, loss", loss);
    let cancels = Bounds {
        cancels: true,
        ..manager(bounds(2, 1, 1, 1))
    };
    holds("2x1, the manager leaves, cancelled", cancels);
    let third = Bounds {
        losses: 1,
        ..leaves(2, bounds(3, 1, 1, 0))
    };
    holds("3x1, a holder leaves, loss", third);
}

/// A node dies while a manager is handed over.
#[test]
fn managers_are_handed_over_with_loss() {
    let handed = |bounds: Bounds| Bounds {
        losses: 1,
        ..handed(bounds)
    };
    let recalled = Bounds {
        recalls: 1,
        ..handed(bounds(2, 1, 2, 1))
    };
    holds("2x1, handed over, loss", recalled);
    holds("3x1, handed over, loss", handed(bounds(3, 1, 1, 0)));
    // Each of two frozen nodes asks the other.
    let twice = Bounds {
        hand_overs: 2,
        ..handed(bounds(3, 1, 0, 0))
    };
    holds("3x1, handed over twice, loss", twice);
}
