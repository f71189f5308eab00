//! Pages of a checkpoint for slices on other hosts, which have no way to its files but their
//! links to slice 0. They come when a step needs them, and otherwise in the order of the files.
//!
//! ```text
//!  slice 0                                              slice on another host
//!     │ ──── Absent: which pages of its part exist ───────▶ │ adopts them
//!     │ ◀─── ReadPages: consecutive ones of them ────────── │ 2 under way for steps, or 1
//!     │ ──── PagesRead, some times ───────────────────────▶ │ of those that none needs yet
//!     │ ◀─── AllRead ───────────────────────────────────── │
//! ```
//!
//! A step that needs a page does not wait on its thread, which may be the one that reads the
//! link to slice 0: the page stays in transition until its bytes come
//! ([`SharedMemory::receive_absent`]).
//!
//! Invariant: for a page that a step needs, a request is queued or under way. The page is noted
//! before the request ([`ElsewherePages::ask`]), and a request whose pages have come is made
//! again while one of them is noted.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use weft_coherent_memory::{AbsentPages, ElsewherePages, SharedMemory};
use weft_confine::lock;
use weft_dsm::PAGE_BYTES;

use super::PRIMARY;
use super::message::SliceMessage;
use super::message::chunk::CHUNK_MAX;
use super::peers::Peers;

/// Requests of a slice that may be under way: slice 0 reads for one, and sends for the other. A
/// request for pages that no step needs begins when none is under way, so a step waits behind one
/// at most.
pub(super) const UNDER_WAY_MAX: usize = 2;
/// Pages of one request.
const REQUEST_PAGES_MAX: u64 = 256;
/// How often a thread that waits for all pages looks whether the machine is over.
const LOOK: Duration = Duration::from_millis(200);
/// Bytes of one range in `Absent`.
const RANGE_BYTES: usize = 16;
/// Ranges of one `Absent`.
pub(super) const RANGES_MAX: usize = CHUNK_MAX as usize / RANGE_BYTES;

pub(super) fn encode(ranges: &[Range<u64>]) -> Vec<u8> {
    let words = ranges
        .iter()
        .flat_map(|range| [range.start, range.end - range.start]);
    words.flat_map(u64::to_le_bytes).collect()
}

/// The ranges of a message; `None` if these are no ranges of pages that one request can name.
pub(super) fn decode(bytes: &[u8]) -> Option<Vec<Range<u64>>> {
    let (entries, rest) = bytes.as_chunks::<RANGE_BYTES>();
    let ranges = entries.iter().map(|entry| {
        let (first, count) = entry.split_first_chunk::<8>()?;
        let (first, count) = (
            u64::from_le_bytes(*first),
            u64::from_le_bytes(count.try_into().ok()?),
        );
        let end = first.checked_add(count)?;
        (1..=REQUEST_PAGES_MAX)
            .contains(&count)
            .then_some(first..end)
    });
    rest.is_empty().then(|| ranges.collect())?
}

/// On a slice on another host: what it has asked slice 0 for, and will ask for.
pub(super) struct UnreadPages {
    peers: Arc<Peers>,
    requests: Mutex<Requests>,
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

    /// Slice 0 has these pages. In the order of its files.
    pub fn add(&self, ranges: Vec<Range<u64>>) {
        let mut requests = lock(&self.requests);
        for range in ranges {
            let index = requests.ranges.len();
            requests.by_page.insert(range.start, index);
            requests.ranges.push(range);
        }
    }

    /// Some pages of a request came; `follow`: how many of it still come.
    pub fn came(&self, memory: &SharedMemory, first: u64, bytes: &[u8], follow: u64) {
        memory.receive_absent(first, bytes);
        if follow > 0 {
            return;
        }
        let mut requests = lock(&self.requests);
        let Some(index) = requests.find(first) else {
            return;
        };
        requests.under_way.remove(&index);
        requests.came.insert(index);
        if memory.awaits_absent(requests.ranges[index].clone()) {
            requests.need(index);
        }
        drop(requests);
        self.send();
        self.answered.notify_all();
    }

    fn send(&self) {
        loop {
            let begun = lock(&self.requests).begin();
            let Some(pages) = begun else { return };
            let count = pages.end - pages.start;
            let first = pages.start;
            self.peers
                .send(PRIMARY, &SliceMessage::ReadPages { first, count });
        }
    }
}

impl ElsewherePages for UnreadPages {
    fn ask(&self, page: u64) -> Result<(), String> {
        let mut requests = lock(&self.requests);
        let index = requests.find(page);
        requests.need(index.ok_or_else(|| format!("page {page:#x} is in no file"))?);
        drop(requests);
        self.send();
        Ok(())
    }

    fn ask_all(&self) {
        lock(&self.requests).next.get_or_insert(0);
        self.send();
        let mut requests = lock(&self.requests);
        while !requests.all_came() && !self.peers.is_over() {
            let waited = self.answered.wait_timeout(requests, LOOK);
            requests = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn all_came(&self) {
        *lock(&self.requests) = Requests::default();
        self.peers.send(PRIMARY, &SliceMessage::AllRead);
    }
}

/// On slice 0: the files, for the slices that still read them.
#[derive(Default)]
pub(super) struct PagesServer(Mutex<Option<Served>>);

struct Served {
    source: Arc<dyn AbsentPages>,
    readers: BTreeSet<usize>,
}

impl PagesServer {
    pub fn begin(&self, source: Arc<dyn AbsentPages>, readers: BTreeSet<usize>) {
        *lock(&self.0) = (!readers.is_empty()).then_some(Served { source, readers });
    }

    /// The slices that still read.
    pub fn readers(&self) -> BTreeSet<usize> {
        let served = lock(&self.0);
        served
            .as_ref()
            .map_or_else(BTreeSet::new, |served| served.readers.clone())
    }

    /// A slice has all its pages: after the last one the files are closed.
    pub fn end(&self, reader: usize) {
        let mut served = lock(&self.0);
        if let Some(reading) = served.as_mut() {
            reading.readers.remove(&reader);
            if reading.readers.is_empty() {
                *served = None;
            }
        }
    }

    /// Reads pages for a slice, and sends them. One that has all its pages gets no reply: its last
    /// request may follow its `AllRead`, when the pages came by another request meanwhile.
    ///
    /// # Errors
    /// Why they cannot be read.
    pub fn send(&self, peers: &Peers, to: usize, pages: &Range<u64>) -> Result<(), ReadError> {
        if pages.end - pages.start > REQUEST_PAGES_MAX {
            return Err(ReadError::Unexpected);
        }
        let source = {
            let served = lock(&self.0);
            let served = served.as_ref();
            match served.filter(|served| served.readers.contains(&to)) {
                Some(served) => served.source.clone(),
                None => return Ok(()),
            }
        };
        let mut are_sent = false;
        let read = source.read(pages.start, &mut |first, bytes| {
            let offset = pages.start.wrapping_sub(first) as usize * PAGE_BYTES;
            let length = (pages.end - pages.start) as usize * PAGE_BYTES;
            let Some(bytes) = bytes.get(offset..offset + length) else {
                return;
            };
            let mut first = pages.start;
            for chunk in bytes.chunks(CHUNK_MAX as usize) {
                let next = first + (chunk.len() / PAGE_BYTES) as u64;
                let message = SliceMessage::PagesRead {
                    first,
                    follow: pages.end - next,
                    bytes: chunk,
                };
                peers.send(to, &message);
                first = next;
            }
            are_sent = true;
        });
        read.map_err(ReadError::File)?;
        are_sent.then_some(()).ok_or(ReadError::Unexpected)
    }
}

/// Why pages of a checkpoint cannot be sent.
pub(super) enum ReadError {
    /// With the name of the file.
    File(String),
    /// The slice asks for what it was not told of.
    Unexpected,
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
        let ranges = [3..4, 0..256, 1 << 40..(1 << 40) + 9];
        assert_eq!(decode(&encode(&ranges)), Some(ranges.to_vec()));
        assert_eq!(decode(&[]), Some(vec![]));
        for bad in [0..257, 5..5] {
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
