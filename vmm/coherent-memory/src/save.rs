//! A save of this slice's pages while its users go on. `weft_dsm::controller` has the rules,
//! and judges them.
//!
//! ```text
//!  machine stands, all rest: cut ──▶ it goes on; the writer: take_saved, again and again ──▶ end_save
//! ```

use std::ops::Range;

use weft_dsm::PAGE_BYTES;
use weft_dsm::controller::{Event, SaveProgress};

use super::shell::{PAGE_SHIFT, SharedMemory};
use super::state::State;

/// Copies of pages that may wait for the writer, in pages: 16 MiB.
const BUFFERS: u64 = 4096;
/// Pages that the writer takes at a time, under the lock.
const TAKEN_MAX: usize = 32;

/// Pages as they were at the cut.
#[derive(Default)]
pub struct SavedPages {
    numbers: Vec<u64>,
    bytes: Vec<u8>,
}

impl SavedPages {
    fn clear(&mut self) {
        self.numbers.clear();
        self.bytes.clear();
    }

    fn add(&mut self, page: u64, bytes: &[u8]) {
        self.numbers.push(page);
        self.bytes.extend_from_slice(bytes);
    }

    /// Each page's number and bytes.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let pages = self.bytes.chunks_exact(PAGE_BYTES);
        self.numbers.iter().copied().zip(pages)
    }

    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }
}

impl SharedMemory {
    /// Begins a save: each page that this slice owns now comes to [`SharedMemory::take_saved`]
    /// with the bytes that it has now. While all slices rest and no user is at work. With
    /// `unchanged`, pages that are as at the last cut whose save was kept are added there
    /// instead.
    ///
    /// # Errors
    /// A save is under way, or the kernel's answer.
    pub fn cut(&self, mut unchanged: Option<&mut Vec<Range<u64>>>) -> Result<(), String> {
        let populated = self.ram().populated();
        let populated = populated.map_err(|error| format!("cannot find pages: {error}"))?;
        // A page must come within two leases.
        let patience = self.lease / 2;
        let begun = self.locked(|state| {
            state.saved.clear();
            state.controller.begin_save(BUFFERS, patience)
        });
        if !begun {
            return Err("a save is under way".into());
        }
        // To read a page that the guest gave back would take memory for it again.
        let mut populated = populated.into_iter().peekable();
        let mut is_blank = |page: u64| {
            let address = page << PAGE_SHIFT;
            while populated.next_if(|range| range.end <= address).is_some() {}
            let has_memory = populated
                .peek()
                .is_some_and(|range| range.contains(&address));
            !has_memory && self.rights.of(page).is_some()
        };
        let mut pages = Vec::new();
        for some in self.walk() {
            let kept = unchanged.is_some().then_some(&mut pages);
            let cut = self.locked(|state| state.controller.cut(some, &mut is_blank, kept));
            if let Err((page, what)) = cut {
                self.end_save(false);
                return Err(format!("slice {}: page {page:#x}: {what}", self.slice));
            }
            if let Some(unchanged) = &mut unchanged {
                let runs = pages.chunk_by(|page, next| page + 1 == *next);
                unchanged.extend(runs.map(|run| run[0]..run[0] + run.len() as u64));
                pages.clear();
            }
        }
        // The vCPUs stand: they look for their pages anew before they execute anything.
        if let Some(notifier) = self.notifier.get() {
            notifier.look_anew();
        }
        Ok(())
    }

    /// The next pages for the writer, in place of those in `pages`: first those that users
    /// wait to change. None are left when it stays empty.
    ///
    /// # Errors
    /// Why the save ended.
    pub fn take_saved(&self, pages: &mut SavedPages) -> Result<(), String> {
        pages.clear();
        self.locked(|state| {
            match state.controller.save_progress() {
                SaveProgress::Left(_) => {}
                SaveProgress::Idle => return Err("the save was ended".into()),
                SaveProgress::Dropped => {
                    let seconds = (self.lease / 2).as_secs_f64();
                    return Err(format!(
                        "nothing was written for {seconds} s, and the guest did not wait longer"
                    ));
                }
            }
            let copies = state.saved.len().min(TAKEN_MAX);
            for (page, bytes) in state.saved.drain(..copies) {
                pages.add(page, &bytes);
            }
            if copies > 0 {
                state.controller.free_buffers(copies as u64);
                state.step(self, Event::Tick, None);
            }
            self.add_unsaved(state, pages)
        })?;
        match self.is_over() {
            true => Err("the machine has ended".into()),
            false => Ok(()),
        }
    }

    /// Pages that nobody waits to change.
    fn add_unsaved(&self, state: &mut State, pages: &mut SavedPages) -> Result<(), String> {
        while pages.numbers.len() < TAKEN_MAX {
            let Some(page) = state.controller.next_unsaved() else {
                break;
            };
            let host = self.host(page).ok_or("a page that is not memory")?;
            // SAFETY: a whole page of RAM, which lives as long as `self`. No user may write to
            // a page that is unsaved, and the caller has the lock, without which none can.
            let bytes = unsafe { std::slice::from_raw_parts(host.cast_const(), PAGE_BYTES) };
            pages.add(page, bytes);
        }
        Ok(())
    }

    /// Pages that the writer has not taken.
    pub fn unsaved(&self) -> u64 {
        self.locked(|state| match state.controller.save_progress() {
            SaveProgress::Left(left) => left + state.saved.len() as u64,
            SaveProgress::Idle | SaveProgress::Dropped => 0,
        })
    }

    /// Ends the save. `is_kept`: the next cut may call pages unchanged that are as at this one.
    pub fn end_save(&self, is_kept: bool) {
        self.locked(|state| {
            state.saved.clear();
            state.controller.end_save(is_kept);
            state.step(self, Event::Tick, None);
        });
    }
}
