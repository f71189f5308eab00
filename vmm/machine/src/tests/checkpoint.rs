//! The moment of a save: no page moves on any slice of a paused machine, and each slice writes
//! the pages that it owns, from its own memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use weft_aggregate::Slice;
use weft_guest_memory::GuestBytes;
use weft_vcpu::{Access, Memory, PAGE_SIZE};

use super::moves::Slices;
use super::*;

/// Pages that no vCPU uses.
const FIRST: u64 = 0x800;
const PAGES: u64 = 24;

fn address(page: u64) -> u64 {
    (FIRST + page) * PAGE_SIZE
}

fn all(slices: &Slices) -> Vec<Arc<Slice>> {
    let machines = slices.machines.iter();
    let slice = |machine: &Machine| machine.handle().slice.clone();
    machines.filter_map(slice).collect()
}

/// Each slice writes `round` into a word of its own on each page, all at the same time, as
/// devices do.
fn write(all: &[Arc<Slice>], round: u64) {
    std::thread::scope(|scope| {
        for slice in all {
            scope.spawn(move || {
                for turn in 0..PAGES {
                    let word = address((turn * 7) % PAGES) + 8 * slice.number() as u64;
                    assert!(slice.memory().write(word, &round.to_le_bytes()));
                }
            });
        }
    });
}

/// The pages of a save, by number, each with its first words.
fn saved(all: &[Arc<Slice>]) -> BTreeMap<u64, Vec<u64>> {
    let mut saved = BTreeMap::new();
    for slice in all {
        let memory = slice.memory();
        let received = || {
            memory
                .figures()
                .into_iter()
                .find(|(name, _)| *name == "pages-received")
        };
        let before = received().expect("a counter");
        for page in memory.owned(FIRST..FIRST + PAGES) {
            let words = (0..all.len() as u64).map(|word| {
                let mut bytes = [0; 8];
                assert!(memory.read(page * PAGE_SIZE + 8 * word, &mut bytes));
                u64::from_le_bytes(bytes)
            });
            let twice = saved.insert(page, words.collect());
            assert!(twice.is_none(), "page {page:#x} has two owners");
        }
        assert_eq!(received(), Some(before), "a page was fetched");
    }
    saved
}

#[test]
fn each_page_is_saved_by_its_owner_and_the_machine_goes_on() {
    let slices = Slices::with_late(&[1, 1, 1], Some(1));
    let all = all(&slices);
    for round in 1..6 {
        ask(&slices.machines[0], MachineRequest::Pause);
        write(&all, round);
        all[0].rest_all(PATIENCE).unwrap();
        let pages = saved(&all);
        all[0].end_rest_all();
        let expected = (FIRST..FIRST + PAGES).map(|page| (page, vec![round; 3]));
        assert_eq!(pages, expected.collect());
        ask(&slices.machines[0], MachineRequest::Resume);
        slices.check();
    }
}

#[test]
fn a_machine_that_does_not_come_to_rest_says_why_and_goes_on() {
    let slices = Slices::new(&[1, 1]);
    let all = all(&slices);
    write(&all, 1);
    ask(&slices.machines[0], MachineRequest::Pause);
    let memory = all[1].memory();
    memory.acquire(address(3), Access::Read).unwrap();
    let refused = all[0].rest_all(Duration::from_millis(20)).unwrap_err();
    assert!(
        refused.contains("node 1 is at work: page 0x803 is pinned"),
        "{refused}"
    );
    // Requests are served again.
    assert!(all[0].memory().write(address(5), &[7]));
    memory.unpin(address(3));
    all[0].rest_all(PATIENCE).unwrap();
    all[0].end_rest_all();
    ask(&slices.machines[0], MachineRequest::Resume);
    slices.check();
}
