//! Pages are sent ahead and then relocated while all slices rest.

use std::ops::ControlFlow;

use super::membership::plan;
use super::rest::{each_page_is_owned_once, end_rest, rest, used, wait_until};
use super::*;
use crate::RelocationCursor;

const SOURCE: NodeId = NodeId(0);
const TARGET: NodeId = NodeId(1);
const RUNS_MAX: usize = 7;
/// Pages that all slices use and the source manages.
const OWN: std::ops::Range<u64> = 0x100..0x114;

fn send_ahead(rig: &Rig) {
    let all = 0..RAM / PAGE;
    let source = &rig.memories[SOURCE.index()];
    source.precopy(plan(all, &[TARGET.0]), |progress| {
        match progress.is_settled {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    wait_until(|| source.precopy_progress(true).is_settled);
}

/// All that the source can give away, in parts.
fn relocatable(source: &SharedMemory) -> Vec<RelocatedRun> {
    let mut targets = plan(0..0, &[TARGET.0]).targets;
    let (mut all, mut next) = (Vec::new(), Some(RelocationCursor::default()));
    while let Some(cursor) = next {
        let runs;
        (runs, next) = source.relocatable(cursor, &mut targets, RUNS_MAX);
        assert!(runs.len() <= RUNS_MAX);
        all.extend(runs);
    }
    all
}

#[test]
fn pages_change_their_owner_at_once() {
    let rig = used(vec![Budget::UNLIMITED; 3]);
    let managed = |node: NodeId| -> Vec<u64> {
        let memories = rig.memories.iter();
        memories.map(|memory| memory.managed_pages(node)).collect()
    };
    // The source alone has the pages that it manages of those that all used.
    let source = &rig.memories[SOURCE.index()];
    for address in OWN.map(|page| page * PAGE) {
        source.acquire(address, Access::Write).unwrap();
        source.unpin(address);
    }
    send_ahead(&rig);
    rest(&rig);
    let runs = relocatable(&rig.memories[SOURCE.index()]);
    let count = |has_bytes| -> u64 {
        let runs = runs.iter().filter(|run| run.has_bytes == has_bytes);
        runs.map(|run| run.count).sum()
    };
    assert_eq!(count(true), OWN.end - OWN.start);
    // Most pages were never touched.
    assert!(count(false) > 100);
    let before = managed(SOURCE)[0];
    for memory in &rig.memories {
        memory.check_relocation(SOURCE, &runs).unwrap();
    }
    for memory in &rig.memories {
        memory
            .relocate(SOURCE, &runs, Duration::from_secs(5))
            .unwrap();
    }
    each_page_is_owned_once(&rig);
    assert_eq!(managed(SOURCE), [before - count(true) - count(false); 3]);
    for page in runs.iter().flat_map(RelocatedRun::pages) {
        assert!(source.held(page * PAGE, Access::Read).is_none());
    }
    // The list is of pages that the source has no more.
    for memory in &rig.memories {
        assert!(memory.check_relocation(SOURCE, &runs).is_err());
    }
    end_rest(&rig);
    // All users find all pages, wherever they are.
    rig.all_at_once(1, |_, user| {
        for page in 0..RAM / PAGE {
            let word = user.word(page * PAGE + 8, Access::Write);
            word.fetch_add(1, Ordering::Relaxed);
            user.boundary();
        }
    });
    rest(&rig);
    let sum = rig.memories.iter().flat_map(|memory| {
        let pages = memory.walk().flat_map(|pages| memory.owned(pages));
        pages.map(|page| {
            let mut word = [0; 8];
            assert!(weft_guest_memory::GuestBytes::read(
                &**memory,
                page * PAGE + 8,
                &mut word
            ));
            u64::from_le_bytes(word)
        })
    });
    assert_eq!(sum.sum::<u64>(), 3 * (RAM / PAGE));
    end_rest(&rig);
    rig.end();
}
