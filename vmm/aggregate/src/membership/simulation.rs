//! Changes of membership with answers in random order, slices that are not ready or refuse,
//! a cancel at a random moment, and a slice that is lost at a random message. The state
//! machine is the real one; the judge keeps its own books of what each slice was told.

use std::collections::{BTreeMap, BTreeSet};

use super::protocol::{Answer, Authority, Change, Progress, Step};

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// What each slice was told and has done.
#[derive(Default)]
struct Books {
    done: BTreeMap<usize, Vec<Step>>,
    lost: Option<usize>,
    cancelled: bool,
}

impl Books {
    fn did(&self, slice: usize, step: Step) -> bool {
        self.done
            .get(&slice)
            .is_some_and(|steps| steps.contains(&step))
    }

    /// What must have happened everywhere before a slice may be told a step.
    fn check(&self, change: Change, node: usize, others: &BTreeSet<usize>, step: Step) {
        let all_did = |step| others.iter().all(|other| self.did(*other, step));
        match (change, step) {
            (Change::Join, Step::Present) => {
                assert!(all_did(Step::Hold) && all_did(Step::Settle) && all_did(Step::Introduce));
                assert!(self.did(node, Step::Learn) && self.did(node, Step::Meet));
            }
            (Change::Join, Step::Meet) => assert!(all_did(Step::Introduce)),
            (Change::Leave | Change::Yield, Step::Mentions) => {
                assert!(all_did(Step::Leaving) && self.did(node, Step::Leaving));
                assert!(self.did(node, Step::Holdings));
            }
            (Change::Leave, Step::Go) => {
                assert!(all_did(Step::Part) && all_did(Step::Mentions));
                assert_eq!(self.looks(node), 2);
            }
            (Change::Leave, Step::Absent) => assert!(self.did(node, Step::Go)),
            _ => {}
        }
    }

    /// How often the node found that it has nothing.
    fn looks(&self, node: usize) -> usize {
        let steps = self.done[&node].iter();
        steps.filter(|step| **step == Step::Holdings).count()
    }

    /// The change is over.
    fn judge(&self, change: Change, node: usize, others: &BTreeSet<usize>, end: &Progress) {
        let held = |slice: &&usize| self.did(**slice, Step::Hold);
        let last = |slice: &usize| self.done[slice].last().copied();
        match end {
            // All stay as they are, for the process that takes the place.
            Progress::Done if change == Change::Yield => {
                for other in others {
                    assert_eq!(last(other), Some(Step::Mentions));
                    assert!(held(&other));
                }
                assert_eq!(self.looks(node), 2);
            }
            Progress::Done => {
                for other in others.iter().filter(held) {
                    assert_eq!(last(other), Some(Step::Resume));
                }
            }
            Progress::Undone(_) => {
                for other in others.iter().filter(held) {
                    assert_eq!(last(other), Some(Step::Resume), "node {other} is held");
                }
                match change {
                    Change::Join => assert!(
                        !self
                            .done
                            .values()
                            .flatten()
                            .any(|step| *step == Step::Present)
                    ),
                    _ => assert!(!self.did(node, Step::Go)),
                }
                // The loss of any other ends the machine.
                let is_joining = |lost| change == Change::Join && lost == node;
                assert!(self.lost.is_none_or(is_joining));
            }
            // Only a slice that is lost, or refuses too late, ends a machine.
            Progress::Broken(_) => {}
            Progress::Waiting | Progress::Tell(..) => panic!("it is not over: {end:?}"),
        }
    }
}

/// One change; whether the machine survived, and whether the change came about.
fn run(seed: u64) -> (bool, bool) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let changes = [
        Change::Join,
        Change::Drain,
        Change::Keep,
        Change::Leave,
        Change::Yield,
    ];
    let change = changes[random.below(changes.len())];
    let others: BTreeSet<usize> = (0..1 + random.below(5)).collect();
    let node = others.len() + random.below(3);
    let mut authority = Authority::new(change, node, others.iter().copied().chain([node]));
    let mut books = Books::default();
    let trouble = random.below(3);
    let mut progress = authority.begin();
    for _ in 0..10_000 {
        let Progress::Tell(step, slices) = progress.clone() else {
            break;
        };
        books.check(change, node, &others, step);
        let mut told: Vec<usize> = slices.into_iter().collect();
        while !told.is_empty() && !matches!(progress, Progress::Broken(_)) {
            let slice = told.swap_remove(random.below(told.len()));
            if trouble == 1 && !books.cancelled && random.below(20) == 0 {
                books.cancelled = true;
                assert_eq!(authority.cancel("cancelled"), Progress::Waiting);
            }
            progress = match random.below(60) {
                _ if books.lost == Some(slice) => authority.lost(slice),
                0 if trouble == 2 && books.lost.is_none() => {
                    books.lost = Some(slice);
                    authority.lost(slice)
                }
                1..4 if trouble != 0 => authority.answer(slice, Answer::Refused("no".into())),
                4..14 => authority.answer(slice, Answer::NotYet("busy".into())),
                _ => {
                    books.done.entry(slice).or_default().push(step);
                    authority.answer(slice, Answer::Done)
                }
            };
        }
    }
    books.judge(change, node, &others, &progress);
    let is_done = progress == Progress::Done;
    (!matches!(progress, Progress::Broken(_)), is_done)
}

#[test]
fn a_change_comes_about_or_leaves_nothing_behind() {
    let (mut survived, mut done, mut all) = (0, 0, 0);
    for seed in 1..20_000 {
        let (lives, came_about) = run(seed);
        survived += u32::from(lives);
        done += u32::from(came_about);
        all += 1;
    }
    // Each of the three ends is reached.
    assert!(
        0 < done && done < survived && survived < all,
        "{done} {survived} {all}"
    );
}
