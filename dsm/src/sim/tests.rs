//! Ten thousand seeds, and mutants that must be found.

use super::*;
use crate::node::Mutant;

#[test]
fn ten_thousand_seeds() {
    let start = std::time::Instant::now();
    let mut total = Outcome::default();
    for seed in 0..10_000 {
        let outcome = run(seed).unwrap_or_else(|failure| panic!("{failure}"));
        total.events += outcome.events;
        total.messages += outcome.messages;
        total.accesses += outcome.accesses;
        total.losses += outcome.losses;
        total.duplicates += outcome.duplicates;
        total.standing += outcome.standing;
        total.handed_over += outcome.handed_over;
    }
    println!("10000 seeds in {:?}: {total:?}", start.elapsed());
    assert!(total.losses > 0 && total.duplicates > 0 && total.messages > 1_000_000);
    assert!(total.standing > 100_000 && total.handed_over > 20_000);
}

#[test]
fn a_seed_replays() {
    for seed in [1, 77, 4242] {
        assert_eq!(run(seed).ok(), run(seed).ok());
    }
}

fn found(mutant: Mutant, seeds: std::ops::Range<u64>) -> Option<Failure> {
    seeds.into_iter().find_map(|seed| {
        let mut simulation = Simulation::new(seed, &Scenario::from_seed(seed));
        for node in &mut simulation.nodes {
            node.mutant = Some(mutant);
        }
        simulation.run().err().map(|failure| *failure)
    })
}

#[test]
fn every_mutant_is_found() {
    for mutant in [
        Mutant::SkipAcks,
        Mutant::EarlyDone,
        Mutant::KeepOnWrite,
        Mutant::IgnoreGeneration,
        Mutant::BlindPromotion,
        Mutant::SkipProbe,
        Mutant::NoLostAnswer,
        Mutant::ForgetWaiting,
        Mutant::ZeroInsteadOfLost,
        Mutant::KeepServing,
        Mutant::AskTwice,
        Mutant::HandBusy,
        Mutant::EntryEarly,
        Mutant::ForgetHeld,
        Mutant::EagerDone,
        Mutant::NoAsk,
    ] {
        let failure = found(mutant, 0..3000);
        let failure = failure.unwrap_or_else(|| panic!("{mutant:?} was not found"));
        println!("{mutant:?}: seed {}: {}", failure.seed, failure.flaw);
        assert!(!failure.events.is_empty());
    }
}
