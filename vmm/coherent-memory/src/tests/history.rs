//! What a slice knows of the use of its pages, and what a split makes of it.

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use weft_dsm::controller::{DrainTarget, Histogram, Threshold};
use weft_dsm::{CHUNK_PAGES, ManagerOf, NodeId, Ranges};
use weft_vcpu::Access;

use super::membership::plan;
use super::{PAGE, RAM, Rig};
use crate::HistoryRun;

const PAGES: u64 = RAM / PAGE;

/// Three slices; the first one manages all pages.
fn rig() -> Rig {
    let ranges = Ranges::new(&[PAGES, PAGES, PAGES]).unwrap();
    Rig::new(3, ManagerOf::Ranges(ranges))
}

fn write(rig: &Rig, node: usize, pages: impl Iterator<Item = u64>) {
    let mut user = rig.user(node);
    user.inside();
    pages.for_each(|page| {
        user.word(page * PAGE, Access::Write)
            .store(page, Ordering::SeqCst)
    });
}

fn bins(histogram: &Histogram) -> Vec<(u8, u64)> {
    let bins = histogram.bins().iter().enumerate();
    let bins = bins.filter(|(_, pages)| **pages > 0);
    bins.map(|(bits, pages)| (bits as u8, *pages)).collect()
}

fn run(first: u64, count: u64, bits: u8) -> HistoryRun {
    HistoryRun { first, count, bits }
}

#[test]
fn chunks_that_were_used_go_to_the_first_node() {
    let rig = rig();
    let [source, first, other] = &rig.memories[..] else {
        panic!("three slices");
    };
    let all = PAGES - CHUNK_PAGES;
    assert_eq!(bins(&source.histogram()), [(0x3f, PAGES)], "all are free");
    // A page of the second chunk.
    write(&rig, 0, std::iter::once(CHUNK_PAGES + 7));
    let histogram = source.histogram();
    assert_eq!(bins(&histogram), [(0x3f, all), (0x80, CHUNK_PAGES)]);
    let threshold = histogram.threshold(CHUNK_PAGES);
    assert_eq!(histogram.first_pages(threshold), CHUNK_PAGES);
    source.split(NodeId(1), threshold);
    assert_eq!(
        source.history_for(NodeId(1)),
        [run(CHUNK_PAGES + 7, 1, 0x80)]
    );
    assert_eq!(source.history_for(NodeId(2)), []);
    let mut plan = plan(0..PAGES, &[]);
    let target = |node, pages| DrainTarget {
        node: NodeId(node),
        pages,
    };
    plan.targets = vec![target(1, CHUNK_PAGES), target(2, all)];
    source.drain(plan, |_| ControlFlow::Continue(()));
    assert_eq!(source.managed_pages(NodeId(0)), 0);
    assert_eq!(first.managed_pages(NodeId(1)), CHUNK_PAGES);
    assert_eq!(other.managed_pages(NodeId(2)), all);
    let has = |page: u64| first.homes.manages(page);
    assert!(has(CHUNK_PAGES) && has(2 * CHUNK_PAGES - 1) && !has(0) && !has(2 * CHUNK_PAGES));
    source.end_split();
    assert_eq!(source.history_for(NodeId(2)).len(), 1);
    rig.end();
}

#[test]
fn what_others_have_is_not_free() {
    let rig = rig();
    let manager = &rig.memories[0];
    write(&rig, 1, CHUNK_PAGES..2 * CHUNK_PAGES);
    let found = bins(&manager.histogram());
    // What it fetched ahead is not free, either.
    let [(0, used), (0x3f, free)] = found[..] else {
        panic!("{found:?}");
    };
    assert!(used >= CHUNK_PAGES && used + free == PAGES, "{found:?}");
    rig.end();
}

#[test]
fn pages_of_others_are_told_to_their_managers_and_learned() {
    let rig = rig();
    let [manager, user, _] = &rig.memories[..] else {
        panic!("three slices");
    };
    write(&rig, 1, (3..6).chain(9..10));
    let told = user.histogram();
    assert_eq!(bins(&told), [], "it manages nothing");
    let runs = vec![run(3, 3, 0x80), run(9, 1, 0x80)];
    assert_eq!(user.history_of_others(), [(NodeId(0), runs.clone())]);
    assert_eq!(manager.history_of_others(), []);
    assert_eq!(bins(&manager.histogram()), [(0x3f, PAGES)]);
    manager.learn_history(&runs);
    manager.learn_history(&[run(PAGES - 1, u64::MAX, 0x42), run(u64::MAX, 1, 0x42)]);
    let last = run(PAGES - 1, 1, 0x42);
    let known = manager.history_for(NodeId(1));
    assert_eq!(known, [runs, vec![last]].concat());
    let rest = PAGES - 2 * CHUNK_PAGES;
    let expected = [(0x3f, rest), (0x42, CHUNK_PAGES), (0x80, CHUNK_PAGES)];
    let histogram = manager.histogram();
    assert_eq!(bins(&histogram), expected);
    let threshold = Threshold {
        history: 0x42,
        equal_pages: CHUNK_PAGES,
    };
    assert_eq!(histogram.threshold(2 * CHUNK_PAGES + 1).history, 0x3f);
    assert_eq!(histogram.first_pages(threshold), 2 * CHUNK_PAGES);
    rig.end();
}
