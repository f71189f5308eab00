//! Which chunks are here, and which is coldest.
//!
//! User space sees no accessed bits, so an access is what the engine sees: a
//! fault, or an arrival. Its history is the protocol's (`weft_dsm::history`:
//! eight bits a page, aged by epochs, OR-ed into chunks); an epoch is a fixed number
//! of accesses. A chunk is listed from its first page that arrives until a search
//! finds nothing of it here.

use weft_dsm::history::{ChunkHistory, History};
use weft_dsm::refault::{Departures, Rewritten};
use weft_dsm::{CHUNK_PAGES, PAGES_MAX, Page};

use crate::own_calls::{Errno, Result, zeroes};

const CHUNKS: usize = (PAGES_MAX / CHUNK_PAGES) as usize;
/// Accesses of an epoch: short enough that two scans of a small budget differ,
/// long enough that what is used again within one counts as hot.
const EPOCH_ACCESSES: u64 = 32;

/// The chunks with pages here.
pub struct WorkingSet {
    history: History<'static>,
    /// Place in the list, plus one; 0: not listed.
    places: &'static mut [u32],
    list: &'static mut [u32],
    count: usize,
    accesses: u64,
    /// When pages left to make room.
    pub departures: Departures<'static>,
    /// Where copies come to be written.
    pub rewritten: Rewritten<'static>,
}

impl WorkingSet {
    /// An empty set.
    pub fn new() -> Result<WorkingSet> {
        let pages = zeroes::<u8>(PAGES_MAX as usize)?;
        let chunks = zeroes::<ChunkHistory>(CHUNKS)?;
        Ok(WorkingSet {
            history: History::new(pages, chunks).map_err(|_| Errno::EINVAL)?,
            places: zeroes(CHUNKS)?,
            list: zeroes(CHUNKS)?,
            count: 0,
            accesses: 0,
            departures: Departures::new(zeroes(PAGES_MAX as usize)?),
            rewritten: Rewritten::new(zeroes(CHUNKS)?),
        })
    }

    fn epoch(&self) -> u32 {
        (self.accesses / EPOCH_ACCESSES) as u32
    }

    /// A page arrived, or was needed.
    pub fn touch(&mut self, page: u64) {
        self.accesses += 1;
        let epoch = self.epoch();
        self.history.touch(Page(page), epoch);
        let chunk = Page(page).chunk() as usize;
        if self.places[chunk] == 0 {
            self.list[self.count] = chunk as u32;
            self.count += 1;
            self.places[chunk] = self.count as u32;
        }
    }

    /// Of the chunks that `fit`, the one with the least history, then the one
    /// needed longest ago.
    pub fn coldest(&self, fit: impl Fn(u64) -> bool) -> Option<u64> {
        let listed = self.list[..self.count].iter().map(|&c| u64::from(c));
        self.history
            .coldest(listed.filter(|&c| fit(c)), self.epoch())
    }

    /// Nothing of the chunk is here any more.
    pub fn forget(&mut self, chunk: u64) {
        let place = self.places[chunk as usize] as usize;
        if place == 0 {
            return;
        }
        let last = self.list[self.count - 1];
        self.list[place - 1] = last;
        self.places[last as usize] = place as u32;
        self.places[chunk as usize] = 0;
        self.count -= 1;
    }

    /// The chunk at a place of the list, which has no order.
    pub fn chunk(&self, index: usize) -> u64 {
        u64::from(self.list[index])
    }

    /// How many chunks are listed.
    pub fn len(&self) -> usize {
        self.count
    }
}
