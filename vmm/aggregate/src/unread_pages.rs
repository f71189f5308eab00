//! Pages of a checkpoint for slices that have no way to a file of it but their link to a slice
//! that has: slice 0 for the files in the directory of the set, and a slice on another host for
//! those that are there. They come when a step needs them, and otherwise in the order of the
//! files.
//!
//! ```text
//!  slice 0                                              slice on another host
//!     │ ──── Absent: which pages of its part exist ───────▶ │ adopts them
//!     │ ◀─── ReadPages: consecutive ones of them ────────── │ 2 under way for steps, or 1
//!     │ ──── PagesRead, some times ───────────────────────▶ │ of those that none needs yet
//!     │ ◀─── AllRead ───────────────────────────────────── │
//! ```
//!
//! `Absent` names the slice that has each page; the other messages go to and from that one.
//!
//! A step that needs such a page does not wait on its thread, which may be the one that reads the
//! link to that slice: the page stays in transition until its bytes come
//! ([`SharedMemory::receive_absent`]).
//!
//! Invariant: for a page that a step needs, a request is queued or under way. The page is noted
//! before the request ([`ElsewherePages::ask`]), and a request whose pages have come is made
//! again while one of them is noted.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use weft_coherent_memory::{ElsewherePages, SharedMemory};
use weft_confine::lock;
use weft_dsm::PAGE_BYTES;

use super::message::SliceMessage;
use super::message::chunk::CHUNK_MAX;
use super::peers::Peers;
use super::placement::SLICES_MAX;

/// Requests of a slice that may be under way to another one, which reads for one, and sends for
/// the other. A request for pages that no step needs begins when none is under way, so a step
/// waits behind one at most.
pub(super) const UNDER_WAY_MAX: usize = 2;
/// Pages of one request.
pub(super) const REQUEST_PAGES_MAX: u64 = 256;
/// How often a thread that waits for all pages looks whether the machine is over.
const LOOK: Duration = Duration::from_millis(200);
/// Bytes of one range in `Absent`.
const RANGE_BYTES: usize = 16;
/// Ranges of one `Absent`.
pub(super) const RANGES_MAX: usize = CHUNK_MAX as usize / RANGE_BYTES;

/// Consecutive pages of one file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbsentRange {
    pub pages: Range<u64>,
    /// The slice that has the file.
    pub server: usize,
}

pub(super) fn encode(ranges: &[AbsentRange]) -> Vec<u8> {
    let words = ranges.iter().flat_map(|AbsentRange { pages, server }| {
        let count = pages.end - pages.start;
        [pages.start, count | (*server as u64) << 32]
    });
    words.flat_map(u64::to_le_bytes).collect()
}

/// The ranges of a message; `None` if these are no ranges of pages that one request can name.
pub(super) fn decode(bytes: &[u8]) -> Option<Vec<AbsentRange>> {
    let (entries, rest) = bytes.as_chunks::<RANGE_BYTES>();
    let ranges = entries.iter().map(|entry| {
        let (first, count) = entry.split_first_chunk::<8>()?;
        let (first, second) = (
            u64::from_le_bytes(*first),
            u64::from_le_bytes(count.try_into().ok()?),
        );
        let (count, server) = (second & u64::from(u32::MAX), (second >> 32) as usize);
        let pages = first..first.checked_add(count)?;
        let is_possible = (1..=REQUEST_PAGES_MAX).contains(&count) && server < SLICES_MAX;
        is_possible.then_some(AbsentRange { pages, server })
    });
    rest.is_empty().then(|| ranges.collect())?
}

/// What this slice has asked others for, and will ask for.
pub(super) struct UnreadPages {
    peers: Arc<Peers>,
    /// By the slice that has the pages.
    requests: Mutex<BTreeMap<usize, Requests>>,
    /// A request was answered.
    answered: Condvar,
}

#[derive(Default)]
struct Requests {
    /// In the order of the files.
    ranges: Vec<Range<u64>>,
    /// By its first page, the index of each range.
    by_page: BTreeMap<u64, usize>,
    /// Those that a step needs.
    urgent: VecDeque<usize>,
    under_way: BTreeSet<usize>,
    /// Those that came at least once.
    came: BTreeSet<usize>,
    /// All ranges before this one came; `None`: only those that a step needs are asked for so
    /// far.
    next: Option<usize>,
}

impl Requests {
    fn find(&self, page: u64) -> Option<usize> {
        let (_, index) = self.by_page.range(..=page).next_back()?;
        self.ranges[*index].contains(&page).then_some(*index)
    }

    /// The next range to ask for, if a request may begin.
    fn begin(&mut self) -> Option<Range<u64>> {
        if self.under_way.len() == UNDER_WAY_MAX {
            return None;
        }
        let index = match self.urgent.pop_front() {
            Some(index) => index,
            None if self.under_way.is_empty() => self.next_unasked()?,
            None => return None,
        };
        self.under_way.insert(index);
        Some(self.ranges[index].clone())
    }

    /// The next range that did not come for a step.
    fn next_unasked(&mut self) -> Option<usize> {
        let next = self.next.as_mut()?;
        while self.came.contains(next) {
            *next += 1;
        }
        let index = *next;
        (index < self.ranges.len()).then_some(index)
    }

    fn need(&mut self, index: usize) {
        if !self.under_way.contains(&index) && !self.urgent.contains(&index) {
            self.urgent.push_back(index);
        }
    }

    fn all_came(&self) -> bool {
        self.came.len() == self.ranges.len()
    }
}

impl UnreadPages {
    pub fn new(peers: Arc<Peers>) -> Arc<Self> {
        Arc::new(Self {
            peers,
            requests: Mutex::default(),
            answered: Condvar::new(),
        })
    }

    /// Other slices have these pages. In the order of the files of each.
    pub fn add(&self, ranges: &[AbsentRange]) {
        let mut all = lock(&self.requests);
        for AbsentRange { pages, server } in ranges {
            let requests = all.entry(*server).or_default();
            let index = requests.ranges.len();
            requests.by_page.insert(pages.start, index);
            requests.ranges.push(pages.clone());
        }
    }

    /// Some pages of a request came; `follow`: how many of it still come. Others than it was
    /// asked for, or that came all by other requests meanwhile, have no effect.
    pub fn came(
        &self,
        memory: &SharedMemory,
        from: usize,
        (first, follow): (u64, u64),
        bytes: &[u8],
    ) {
        let end = first.saturating_add((bytes.len() / PAGE_BYTES) as u64);
        let asked = |requests: &Requests| {
            let index = requests.find(first)?;
            (end <= requests.ranges[index].end).then_some(index)
        };
        let index = lock(&self.requests).get(&from).and_then(asked);
        let Some(index) = index else { return };
        memory.receive_absent(first, bytes);
        if follow > 0 {
            return;
        }
        let mut all = lock(&self.requests);
        // All of them may have come now.
        let requests = all.get_mut(&from);
        let Some(requests) = requests.filter(|requests| index < requests.ranges.len()) else {
            return;
        };
        requests.under_way.remove(&index);
        requests.came.insert(index);
        if memory.awaits_absent(requests.ranges[index].clone()) {
            requests.need(index);
        }
        drop(all);
        self.send();
        self.answered.notify_all();
    }

    fn send(&self) {
        loop {
            let begun = lock(&self.requests)
                .iter_mut()
                .find_map(|(server, requests)| Some((*server, requests.begin()?)));
            let Some((server, pages)) = begun else { return };
            let (first, count) = (pages.start, pages.end - pages.start);
            self.peers
                .send(server, &SliceMessage::ReadPages { first, count });
        }
    }
}

impl ElsewherePages for UnreadPages {
    fn has(&self, page: u64) -> bool {
        let all = lock(&self.requests);
        all.values().any(|requests| requests.find(page).is_some())
    }

    fn ask(&self, page: u64) -> Result<(), String> {
        let mut all = lock(&self.requests);
        let found = all
            .values_mut()
            .find_map(|requests| Some((requests.find(page)?, requests)));
        let (index, requests) = found.ok_or_else(|| format!("page {page:#x} is in no file"))?;
        requests.need(index);
        drop(all);
        self.send();
        Ok(())
    }

    fn ask_all(&self) {
        for requests in lock(&self.requests).values_mut() {
            requests.next.get_or_insert(0);
        }
        self.send();
    }

    fn wait_for_all(&self) {
        let mut all = lock(&self.requests);
        while !all.values().all(Requests::all_came) && !self.peers.is_over() {
            let waited = self.answered.wait_timeout(all, LOOK);
            all = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn all_came(&self) {
        let servers = std::mem::take(&mut *lock(&self.requests)).into_keys();
        for server in servers {
            self.peers.send(server, &SliceMessage::AllRead);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(ranges: &[Range<u64>]) -> Requests {
        let by_page = ranges.iter().zip(0..);
        Requests {
            by_page: by_page.map(|(range, index)| (range.start, index)).collect(),
            ranges: ranges.to_vec(),
            ..Requests::default()
        }
    }

    #[test]
    fn ranges_survive_and_impossible_ones_do_not() {
        let range = |pages, server| AbsentRange { pages, server };
        let ranges = [
            range(3..4, 0),
            range(0..256, 15),
            range(1 << 40..(1 << 40) + 9, 2),
        ];
        assert_eq!(decode(&encode(&ranges)), Some(ranges.to_vec()));
        assert_eq!(decode(&[]), Some(vec![]));
        for bad in [range(0..257, 0), range(5..5, 0), range(3..4, SLICES_MAX)] {
            assert_eq!(decode(&encode(&[bad])), None);
        }
        assert_eq!(decode(&[0; 15]), None);
        assert_eq!(decode(&[0xff; 16]), None);
    }

    #[test]
    fn what_a_step_needs_goes_first_and_two_requests_are_under_way() {
        let mut requests = requests(&[40..50, 0..8, 8..16, 20..30]);
        let end = |requests: &mut Requests, index| {
            requests.under_way.remove(&index);
            requests.came.insert(index);
        };
        assert_eq!(requests.begin(), None);
        requests.next = Some(0);
        // One that no step needs, and one that a step does.
        assert_eq!(requests.begin(), Some(40..50));
        requests.need(0);
        assert_eq!(requests.begin(), None);
        requests.need(requests.find(9).unwrap());
        requests.need(requests.find(8).unwrap());
        requests.need(requests.find(21).unwrap());
        assert_eq!(requests.begin(), Some(8..16));
        assert_eq!(requests.begin(), None);
        end(&mut requests, 0);
        assert_eq!(requests.begin(), Some(20..30));
        end(&mut requests, 3);
        end(&mut requests, 2);
        assert_eq!(requests.begin(), Some(0..8));
        assert!(!requests.all_came());
        requests.need(0);
        assert_eq!(requests.begin(), Some(40..50));
        end(&mut requests, 1);
        end(&mut requests, 0);
        // What came for a step is not asked for again, unless a step needs it.
        assert_eq!(requests.begin(), None);
        assert!(requests.all_came());
        assert_eq!(requests.find(16), None);
    }
}
