//! The pages that a vCPU needed first when it came to this slice: when it comes again, it
//! will need them again. They are stacks, the kernel's data of its processor, the code of a
//! loop; what else it used last is often what it left behind.
//!
//! Invariants: at most [`PAGES_MAX`] pages are remembered; a page that is needed no longer is
//! forgotten after some arrivals, because the oldest part is forgotten at each.

use std::collections::VecDeque;

use weft_vcpu::{Access, PageRun};

/// Pages that are remembered, 1 MiB.
const PAGES_MAX: usize = 256;
/// Faults after an arrival that are recorded. Later ones are of what the vCPU came for.
const FAULTS_MAX: usize = 128;
/// This part is forgotten at each arrival. A page that is still needed is fetched by a fault,
/// and remembered as the youngest.
const FORGOTTEN_PART: usize = 8;

/// Of one vCPU on one slice.
#[derive(Debug, Default)]
pub struct FirstPages {
    /// The oldest in front.
    pages: VecDeque<(u64, Access)>,
    /// Faults that are still recorded.
    records: usize,
}

impl FirstPages {
    /// The vCPU comes: what it needed first before.
    pub fn arrive(&mut self) -> Vec<PageRun> {
        self.records = FAULTS_MAX;
        let runs = self.pages.iter().map(|(page, access)| PageRun {
            first: *page,
            count: 1,
            access: *access,
        });
        let runs = runs.collect();
        let forgotten = self.pages.len().div_ceil(FORGOTTEN_PART);
        self.pages.drain(..forgotten);
        runs
    }

    /// The vCPU waited for a page of another slice.
    pub fn fault(&mut self, page: u64, access: Access) {
        if self.records == 0 {
            return;
        }
        self.records -= 1;
        let known = self.pages.iter_mut().find(|(other, _)| *other == page);
        match known {
            Some((_, known)) if access == Access::Write => *known = access,
            Some(_) => {}
            None => {
                if self.pages.len() == PAGES_MAX {
                    self.pages.pop_front();
                }
                self.pages.push_back((page, access));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrived(pages: &mut FirstPages) -> Vec<(u64, Access)> {
        let runs = pages.arrive();
        assert!(runs.iter().all(|run| run.count == 1));
        runs.iter().map(|run| (run.first, run.access)).collect()
    }

    #[test]
    fn a_vcpu_needs_again_what_it_needed_first() {
        let mut pages = FirstPages::default();
        pages.fault(1, Access::Read);
        assert_eq!(arrived(&mut pages), [], "only after an arrival");
        pages.fault(7, Access::Read);
        pages.fault(3, Access::Write);
        pages.fault(7, Access::Write);
        pages.fault(3, Access::Read);
        let both = [(7, Access::Write), (3, Access::Write)];
        assert_eq!(arrived(&mut pages), both);
        // The oldest is forgotten; it was needed, and is the youngest now.
        pages.fault(7, Access::Read);
        assert_eq!(arrived(&mut pages), [(3, Access::Write), (7, Access::Read)]);
    }

    #[test]
    fn what_is_needed_no_longer_is_forgotten() {
        let mut pages = FirstPages::default();
        pages.arrive();
        (0..100).for_each(|page| pages.fault(page, Access::Read));
        let lengths: Vec<usize> = (0..30).map(|_| pages.arrive().len()).collect();
        assert_eq!(lengths[..4], [100, 87, 76, 66]);
        assert_eq!(lengths[29], 0);
    }

    #[test]
    fn it_is_bounded() {
        let mut pages = FirstPages::default();
        for arrival in 0..10 {
            pages.arrive();
            for page in 0..2 * FAULTS_MAX as u64 {
                pages.fault(1000 * arrival + page, Access::Read);
            }
        }
        let arrived = arrived(&mut pages);
        assert_eq!(arrived.len(), PAGES_MAX);
        let last = 9000 + FAULTS_MAX as u64 - 1;
        assert_eq!(arrived.last(), Some(&(last, Access::Read)));
    }
}
