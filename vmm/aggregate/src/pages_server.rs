//! Files of a checkpoint on a slice's host: for the slice itself, and for others that have no way
//! to them ([`super::unread_pages`]).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use weft_coherent_memory::{AbsentPages, PageFiles, SharedMemory, Source};
use weft_confine::lock;
use weft_dsm::PAGE_BYTES;

use super::message::SliceMessage;
use super::message::chunk::CHUNK_MAX;
use super::peers::Peers;
use super::unread_pages::{AbsentRange, REQUEST_PAGES_MAX, UnreadPages};

/// Pages of a slice that are in files on its host, among those of others.
pub(super) struct OwnPages {
    files: Arc<dyn PageFiles>,
    /// By the first page, the page after the last.
    ranges: RwLock<BTreeMap<u64, u64>>,
}

impl OwnPages {
    pub fn new(files: Arc<dyn PageFiles>) -> Self {
        Self {
            files,
            ranges: RwLock::default(),
        }
    }

    pub fn add(&self, ranges: &[AbsentRange]) {
        let mut all = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        all.extend(
            ranges
                .iter()
                .map(|range| (range.pages.start, range.pages.end)),
        );
    }

    fn find(&self, page: u64) -> Option<Range<u64>> {
        let all = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        let (first, end) = all.range(..=page).next_back()?;
        (page < *end).then_some(*first..*end)
    }
}

impl PageFiles for OwnPages {
    fn read(&self, page: u64, take: &mut dyn FnMut(u64, &[u8])) -> Result<(), String> {
        let pages = self.find(page);
        let pages = pages.ok_or_else(|| format!("page {page:#x} is in no file"))?;
        read_range(&*self.files, &pages, &mut |bytes| take(pages.start, bytes))
    }
}

impl AbsentPages for OwnPages {
    fn read_all(&self, take: &mut dyn FnMut(u64, &[u8]) -> bool) -> Result<(), String> {
        let mut next = 0;
        loop {
            let range = {
                let all = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
                let range = all.range(next..).next();
                range.map(|(first, end)| *first..*end)
            };
            let Some(pages) = range else { return Ok(()) };
            next = pages.end;
            let mut goes_on = true;
            read_range(&*self.files, &pages, &mut |bytes| {
                goes_on = take(pages.start, bytes);
            })?;
            if !goes_on {
                return Ok(());
            }
        }
    }
}

/// Reads pages that are in one run of one file.
fn read_range(
    files: &dyn PageFiles,
    pages: &Range<u64>,
    take: &mut dyn FnMut(&[u8]),
) -> Result<(), String> {
    let mut is_read = false;
    files.read(pages.start, &mut |first, bytes| {
        let offset = pages.start.wrapping_sub(first) as usize * PAGE_BYTES;
        let length = (pages.end - pages.start) as usize * PAGE_BYTES;
        if let Some(bytes) = bytes.get(offset..offset + length) {
            take(bytes);
            is_read = true;
        }
    })?;
    is_read
        .then_some(())
        .ok_or_else(|| format!("pages {pages:x?} are in no file"))
}

/// Has this slice manage pages that other slices have, or files on its host.
pub(super) struct Adopter {
    pub number: usize,
    pub memory: Arc<SharedMemory>,
    pub pages_server: Arc<PagesServer>,
    pub unread_pages: Arc<UnreadPages>,
}

impl Adopter {
    /// # Errors
    /// They are in use, or there are no files here.
    pub fn adopt(&self, ranges: Vec<AbsentRange>) -> Result<(), String> {
        let is_own = |range: &AbsentRange| range.server == self.number;
        let (own, others): (Vec<_>, Vec<_>) = ranges.into_iter().partition(is_own);
        let pages = |ranges: Vec<AbsentRange>| ranges.into_iter().map(|range| range.pages);
        if !own.is_empty() {
            let files = self.pages_server.own();
            let files = files.ok_or("it has no files of the checkpoint")?;
            files.add(&own);
            self.memory.adopt_absent(pages(own), Source::Here(files))?;
        }
        if !others.is_empty() {
            self.unread_pages.add(&others);
            let source = Source::Elsewhere(self.unread_pages.clone());
            self.memory.adopt_absent(pages(others), source)?;
        }
        Ok(())
    }
}

/// On a slice that has files: these, for the slices that still read them.
#[derive(Default)]
pub(super) struct PagesServer {
    served: Mutex<Option<Served>>,
    /// Until the slice knows which pages of its own are in the files.
    own: Mutex<Option<Arc<OwnPages>>>,
}

struct Served {
    source: Arc<dyn PageFiles>,
    readers: BTreeSet<usize>,
}

impl PagesServer {
    pub fn begin(&self, source: Arc<dyn PageFiles>, readers: BTreeSet<usize>) {
        *lock(&self.own) = Some(Arc::new(OwnPages::new(source.clone())));
        *lock(&self.served) = (!readers.is_empty()).then_some(Served { source, readers });
    }

    fn own(&self) -> Option<Arc<OwnPages>> {
        lock(&self.own).clone()
    }

    /// The slice knows which pages of its own are in the files.
    pub fn end_own(&self) {
        *lock(&self.own) = None;
    }

    /// The slices that still read.
    pub fn readers(&self) -> BTreeSet<usize> {
        let served = lock(&self.served);
        served
            .as_ref()
            .map_or_else(BTreeSet::new, |served| served.readers.clone())
    }

    /// A slice has all its pages: after the last one the files are closed.
    pub fn end(&self, reader: usize) {
        let mut served = lock(&self.served);
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
            let served = lock(&self.served);
            let served = served.as_ref();
            match served.filter(|served| served.readers.contains(&to)) {
                Some(served) => served.source.clone(),
                None => return Ok(()),
            }
        };
        let read = read_range(&*source, pages, &mut |bytes| {
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
        });
        read.map_err(ReadError::File)
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

    /// A file with one run, each page full of its number.
    struct Run(Range<u64>);

    impl PageFiles for Run {
        fn read(&self, page: u64, take: &mut dyn FnMut(u64, &[u8])) -> Result<(), String> {
            assert!(self.0.contains(&page));
            let bytes = self.0.clone().flat_map(|page| [page as u8; PAGE_BYTES]);
            take(self.0.start, &bytes.collect::<Vec<_>>());
            Ok(())
        }
    }

    #[test]
    fn own_pages_are_no_others_of_their_runs() {
        let own = OwnPages::new(Arc::new(Run(10..30)));
        let range = |pages| AbsentRange { pages, server: 1 };
        own.add(&[range(20..22)]);
        own.add(&[range(12..13), range(22..25)]);
        let read = |page| {
            let mut all = Vec::new();
            own.read(page, &mut |first, bytes| {
                let some = bytes.chunks(PAGE_BYTES).map(|page| page[0]);
                all.push((first, some.collect::<Vec<_>>()));
            })
            .map(|()| all)
        };
        assert_eq!(read(21), Ok(vec![(20, vec![20, 21])]));
        assert_eq!(read(24), Ok(vec![(22, vec![22, 23, 24])]));
        assert_eq!(read(25), Err("page 0x19 is in no file".into()));
        assert_eq!(read(11), Err("page 0xb is in no file".into()));
        let mut firsts = Vec::new();
        let mut all = |first, _: &[u8]| {
            firsts.push(first);
            firsts.len() < 2
        };
        own.read_all(&mut all).unwrap();
        assert_eq!(firsts, [12, 20]);
    }
}
