//! Pages of this slice whose bytes are in files, from which they are read when a step needs
//! them, or when nobody does. `weft_dsm::controller` has the rules, and judges them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::PoisonError;
use std::time::Duration;

use weft_dsm::PAGE_BYTES;

use super::page_source::AbsentPages;
use super::shell::{PAGE_SHIFT, SharedMemory};

/// Pages that are filled under the lock at a time.
const FILLED_MAX: usize = 32;
/// How often a page is tried again that a thread is at work with.
const AGAIN: Duration = Duration::from_millis(1);

impl SharedMemory {
    /// Makes this slice the owner of `pages`, whose bytes `source` has. On the slice that manages
    /// them, before a vCPU runs and before another slice asks for one of them.
    ///
    /// # Errors
    /// They are in use.
    pub fn adopt_absent(
        &self,
        pages: impl Iterator<Item = Range<u64>>,
        source: Arc<dyn AbsentPages>,
    ) -> Result<(), String> {
        *self.absent.write().unwrap_or_else(PoisonError::into_inner) = Some(source);
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

    /// Makes this slice the owner of consecutive pages with these bytes: whole pages. As
    /// [`SharedMemory::adopt`] otherwise; a confined thread may call it.
    ///
    /// # Errors
    /// They are not memory, or in use.
    pub fn adopt_bytes(&self, first: u64, bytes: &[u8]) -> Result<(), String> {
        if !bytes.len().is_multiple_of(PAGE_BYTES) {
            return Err("it has a part of a page".into());
        }
        let pages = (first..).zip(bytes.chunks_exact(PAGE_BYTES));
        self.locked(|state| {
            for (page, bytes) in pages {
                let host = self.host_of(page.saturating_mul(PAGE_BYTES as u64));
                let host = host.ok_or_else(|| format!("page {page:#x} is not memory"))?;
                let adopted = state.controller.adopt(page);
                adopted.map_err(|reason| format!("page {page:#x}: {reason}"))?;
                // SAFETY: a whole page of RAM and a whole page of bytes. No user runs yet, and
                // no other slice asks for the page before the machine runs.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), host, PAGE_BYTES) };
            }
            Ok(())
        })
    }

    /// Pages that were not read yet.
    pub fn absent(&self) -> u64 {
        self.rights.absent()
    }

    /// Reads all absent pages, whether a user needs them or not. On a thread of its own; a page
    /// that cannot be read ends the machine.
    pub fn load_all(&self) {
        let Some(source) = self.absent_source() else {
            return;
        };
        let read = source.read_all(&mut |first, bytes| {
            self.fill_absent(first, bytes);
            !self.is_over()
        });
        let read = read.and_then(|()| self.load_rest(&*source));
        match read {
            Ok(()) => *self.absent.write().unwrap_or_else(PoisonError::into_inner) = None,
            Err(reason) => self.fail(reason),
        }
    }

    /// Those that were in transition when they had been read.
    fn load_rest(&self, source: &dyn AbsentPages) -> Result<(), String> {
        while let Some(page) = self.rights.any_absent().filter(|_| !self.is_over()) {
            source.read(page, &mut |first, bytes| self.fill_absent(first, bytes))?;
            std::thread::sleep(AGAIN);
        }
        Ok(())
    }

    /// The operation of a page in transition: reads it, and others that are read with it.
    pub(super) fn load(&self, page: u64) -> Result<(), String> {
        let source = self.absent_source();
        let source = source.ok_or_else(|| format!("page {page:#x} is nowhere"))?;
        let mut is_read = false;
        source.read(page, &mut |first, bytes| {
            let at = page.wrapping_sub(first) as usize * PAGE_BYTES;
            if let (Some(host), Some(bytes)) = (self.host(page), bytes.get(at..at + PAGE_BYTES)) {
                // SAFETY: a whole page of RAM, which `host` found, and a whole page of bytes. The
                // page is in transition, and no user may use it before this operation is done.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), host, PAGE_BYTES) };
                is_read = true;
            }
            self.fill_absent(first, bytes);
        })?;
        match is_read {
            true => Ok(()),
            false => Err(format!("page {page:#x} is in no file")),
        }
    }

    fn absent_source(&self) -> Option<Arc<dyn AbsentPages>> {
        let source = self.absent.read();
        source.unwrap_or_else(PoisonError::into_inner).clone()
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
