//! Pages of this slice whose bytes are in files, from which they are read when a step needs
//! them, or when nobody does. `weft_dsm::controller` has the rules, and judges them.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use weft_dsm::PAGE_BYTES;
use weft_dsm::controller::Event;

use super::page_source::{AbsentPages, Source, Sources};
use super::shell::{PAGE_SHIFT, SharedMemory};

/// Pages that are filled under the lock at a time.
const FILLED_MAX: usize = 32;
/// How often a page is tried again that a thread is at work with.
const AGAIN: Duration = Duration::from_millis(1);

impl SharedMemory {
    /// Makes this slice the owner of `pages`, whose bytes `source` has, beside those of another
    /// kind of source. On the slice that manages
    /// them, before a vCPU runs and before another slice asks for one of them.
    ///
    /// # Errors
    /// They are in use.
    pub fn adopt_absent(
        &self,
        pages: impl Iterator<Item = Range<u64>>,
        source: Source,
    ) -> Result<(), String> {
        let sources = self.absent.write();
        sources.unwrap_or_else(PoisonError::into_inner).add(source);
        for some in pages {
            self.locked(|state| {
                some.into_iter().try_for_each(|page| {
                    let adopted = state.controller.adopt_absent(page);
                    adopted.map_err(|reason| format!("page {page:#x}: {reason}"))
                })
            })?;
        }
        Ok(())
    }

    /// Consecutive pages came that were asked for. Those that are not absent any more stay as
    /// they are.
    pub fn receive_absent(&self, first: u64, bytes: &[u8]) {
        let end = first.saturating_add((bytes.len() / PAGE_BYTES) as u64);
        let awaited: Vec<u64> = {
            let mut awaited = self.awaited();
            let mut later = awaited.split_off(&first);
            let mut behind = later.split_off(&end);
            awaited.append(&mut behind);
            later.into_iter().collect()
        };
        for page in &awaited {
            self.fill_in_transition(*page, first, bytes);
        }
        self.locked(|state| {
            for page in awaited {
                state.step(self, Event::Done { page }, None);
            }
        });
        self.fill_absent(first, bytes);
    }

    /// Whether a step waits for one of these pages, which come from elsewhere.
    pub fn awaits_absent(&self, pages: Range<u64>) -> bool {
        self.awaited().range(pages).next().is_some()
    }

    /// Pages that were not read yet.
    pub fn absent(&self) -> u64 {
        self.rights.absent()
    }

    /// Reads all absent pages, whether a user needs them or not. On a thread of its own; a page
    /// that cannot be read ends the machine.
    pub fn load_all(&self) {
        let sources = self.absent_sources();
        let read = self
            .load_once(&sources)
            .and_then(|()| self.load_rest(&sources));
        if let Err(reason) = read {
            return self.fail(reason);
        }
        let absent = self.absent.write();
        *absent.unwrap_or_else(PoisonError::into_inner) = Sources::default();
        if let Some(pages) = sources.elsewhere {
            pages.all_came();
        }
    }

    fn load_once(&self, sources: &Sources) -> Result<(), String> {
        if let Some(pages) = &sources.elsewhere {
            pages.ask_all();
        }
        if let Some(files) = &sources.here {
            files.read_all(&mut |first, bytes| {
                self.fill_absent(first, bytes);
                !self.is_over()
            })?;
        }
        if let Some(pages) = &sources.elsewhere {
            pages.wait_for_all();
        }
        Ok(())
    }

    /// Those that were in transition when they had been read.
    fn load_rest(&self, sources: &Sources) -> Result<(), String> {
        while let Some(page) = self.rights.any_absent().filter(|_| !self.is_over()) {
            match sources.clone().of(page) {
                Some(Source::Here(files)) => {
                    files.read(page, &mut |first, bytes| self.fill_absent(first, bytes))?;
                }
                Some(Source::Elsewhere(pages)) => pages.ask(page)?,
                None => return Ok(()),
            }
            std::thread::sleep(AGAIN);
        }
        Ok(())
    }

    /// The operation of a page in transition: reads it, and others that are read with it, or asks
    /// for them; whether it is read.
    pub(super) fn load(&self, page: u64) -> Result<bool, String> {
        let source = self.absent_sources().of(page);
        match source.ok_or_else(|| format!("page {page:#x} is nowhere"))? {
            Source::Here(files) => self.load_from(&*files, page).map(|()| true),
            Source::Elsewhere(pages) => {
                self.awaited().insert(page);
                pages.ask(page).map(|()| false)
            }
        }
    }

    fn load_from(&self, files: &dyn AbsentPages, page: u64) -> Result<(), String> {
        let mut is_read = false;
        files.read(page, &mut |first, bytes| {
            is_read |= self.fill_in_transition(page, first, bytes);
            self.fill_absent(first, bytes);
        })?;
        match is_read {
            true => Ok(()),
            false => Err(format!("page {page:#x} is in no file")),
        }
    }

    /// Fills a page in transition with its bytes among those of consecutive pages.
    fn fill_in_transition(&self, page: u64, first: u64, bytes: &[u8]) -> bool {
        let at = page.wrapping_sub(first) as usize * PAGE_BYTES;
        let (Some(host), Some(bytes)) = (self.host(page), bytes.get(at..at + PAGE_BYTES)) else {
            return false;
        };
        // SAFETY: a whole page of RAM, which `host` found, and a whole page of bytes. No user may
        // use the page before the operation that reads it is done.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), host, PAGE_BYTES) };
        true
    }

    /// Absent pages in transition whose bytes come from elsewhere.
    fn awaited(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn absent_sources(&self) -> Sources {
        let sources = self.absent.read();
        sources.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Fills those of these pages that are absent and that no thread is at work with.
    fn fill_absent(&self, first: u64, bytes: &[u8]) {
        let pages = (first..).zip(bytes.chunks_exact(PAGE_BYTES));
        let pages: Vec<(u64, &[u8])> = pages.collect();
        for some in pages.chunks(FILLED_MAX) {
            self.locked(|state| {
                for (page, bytes) in some {
                    let may_load = state.controller.may_load(*page);
                    let Some(host) = self.host_of(page << PAGE_SHIFT).filter(|_| may_load) else {
                        continue;
                    };
                    // SAFETY: a whole page of RAM and a whole page of bytes. No user may use the
                    // page before `loaded`, which needs the lock.
                    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), host, PAGE_BYTES) };
                    state.controller.loaded(*page);
                }
            });
        }
    }
}
