//! `mremap`, and advice that changes what memory holds.

use weft_proc::layout::{FLAG_DONT_FORK, FLAG_WIPE_ON_FORK, LIMIT, LOWEST, PAGE, Region};

use super::{Space, aligned, errno};
use crate::engine;
use crate::own_calls::{Errno, Result, call};

const MREMAP_MAYMOVE: usize = 1;
const MREMAP_FIXED: usize = 2;
const MREMAP_DONTUNMAP: usize = 4;

const MADV_DONTNEED: usize = 4;
const MADV_FREE: usize = 8;
const MADV_DONTFORK: usize = 10;
const MADV_DOFORK: usize = 11;
const MADV_WIPEONFORK: usize = 18;
const MADV_KEEPONFORK: usize = 19;
const MADV_DONTNEED_LOCKED: usize = 24;
const MADV_GUARD_INSTALL: usize = 102;
const MADV_GUARD_REMOVE: usize = 103;

/// `madvise`.
pub(super) fn advise(
    space: &mut Space,
    address: usize,
    length: usize,
    advice: usize,
) -> Result<usize> {
    let start = address as u64;
    let advice = match advice {
        // Pages that the kernel may take later, or guards that it keeps in place
        // of pages, are nothing that another node could know of.
        MADV_FREE => MADV_DONTNEED,
        MADV_GUARD_INSTALL | MADV_GUARD_REMOVE => return Err(Errno::EINVAL),
        other => other,
    };
    if !start.is_multiple_of(PAGE) {
        return Err(Errno::EINVAL);
    }
    let bytes = aligned(length).map_err(|_| Errno::EINVAL);
    let end = start
        .saturating_add(if length == 0 { 0 } else { bytes? })
        .min(LIMIT);
    if start >= end {
        return call!(madvise, address, length, advice);
    }
    let mut change = engine::change();
    // First what the engine knows, then natively: while the engine waits for
    // others, they may ask for these pages. What the kernel refuses of a
    // discard (a hole) it refuses after having discarded the rest.
    let discards = matches!(advice, MADV_DONTNEED | MADV_DONTNEED_LOCKED);
    if discards {
        change.discarding(address, (end - start) as usize);
    }
    let done = call!(madvise, address, length, advice)?;
    let (set, clear) = match advice {
        MADV_DONTFORK => (FLAG_DONT_FORK, 0),
        MADV_DOFORK => (0, FLAG_DONT_FORK),
        MADV_WIPEONFORK => (FLAG_WIPE_ON_FORK, 0),
        MADV_KEEPONFORK => (0, FLAG_WIPE_ON_FORK),
        _ => return Ok(done),
    };
    // A hole was reported by the kernel already.
    let _ = space.layout.update(start, end, |region| {
        region.flags = (region.flags | set) & !clear;
    });
    Ok(done)
}

impl Space {
    /// `mremap`; the arguments are the program's.
    pub fn remap(&mut self, arguments: &[usize; 6]) -> Result<usize> {
        let [address, old_length, new_length, flags, target, _] = *arguments;
        let start = address as u64;
        if !start.is_multiple_of(PAGE)
            || new_length == 0
            || flags & !(MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP) != 0
            || flags & (MREMAP_FIXED | MREMAP_DONTUNMAP) != 0 && flags & MREMAP_MAYMOVE == 0
        {
            return Err(Errno::EINVAL);
        }
        let old = aligned(old_length)?;
        let new = aligned(new_length)?;
        if start >= LIMIT || start + old > LIMIT {
            return Err(Errno::EFAULT);
        }
        let region = self.layout.lookup(start).copied().ok_or(Errno::EFAULT)?;
        if flags & MREMAP_FIXED != 0 {
            return self.move_to(start, old, new, target as u64, flags);
        }
        if old == 0 || flags & MREMAP_DONTUNMAP != 0 {
            let place = self.room_for(new, &region)?;
            return self.move_to(start, old, new, place, flags);
        }
        if new <= old {
            if new < old {
                self.unmap((start + new) as usize, (old - new) as usize)?;
            }
            return Ok(address);
        }
        if region.end < start + old {
            return Err(Errno::EFAULT);
        }
        if region.end == start + old && self.extend(&region, start, old, new)? {
            return Ok(address);
        }
        if flags & MREMAP_MAYMOVE == 0 {
            return Err(Errno::ENOMEM);
        }
        let place = self.room_for(new, &region)?;
        self.move_to(start, old, new, place, flags)
    }

    fn room_for(&self, length: u64, region: &Region) -> Result<u64> {
        // Keeps its distance from huge-page boundaries, so that the kernel can
        // move whole page tables.
        let alignment = if length >= super::HUGE_BYTES && region.file == 0 {
            super::HUGE_BYTES
        } else {
            PAGE
        };
        self.layout
            .find_free(length, alignment, None, LOWEST, self.top)
            .map_err(errno)
    }

    /// Grows in place; false when something is in the way.
    fn extend(&mut self, region: &Region, start: u64, old: u64, new: u64) -> Result<bool> {
        let (tail, end) = (start + old, start + new);
        if end > LIMIT || !self.layout.is_free(tail, end) {
            return Ok(false);
        }
        match call!(mremap, start, old, new, 0) {
            Ok(_) => {}
            Err(Errno::ENOMEM) => return Ok(false),
            Err(error) => return Err(error),
        }
        let file_offset = if region.file == 0 {
            0
        } else {
            region.file_offset + (tail - region.start)
        };
        self.enter(Region {
            start: tail,
            end,
            file_offset,
            ..*region
        })?;
        Ok(true)
    }

    /// Moves to `place`, replacing what is there.
    fn move_to(
        &mut self,
        start: u64,
        old: u64,
        new: u64,
        place: u64,
        flags: usize,
    ) -> Result<usize> {
        if !place.is_multiple_of(PAGE) {
            return Err(Errno::EINVAL);
        }
        if place < LOWEST || place > LIMIT - new {
            return Err(Errno::ENOMEM);
        }
        let overlaps = place < start + old && start < place + new;
        if overlaps {
            return Err(Errno::EINVAL);
        }
        if flags & MREMAP_DONTUNMAP != 0 && engine::takes_calls() {
            // The kernel would leave a second view of pages that the protocol
            // knows once.
            return Err(Errno::EINVAL);
        }
        // By itself, so that everybody agrees about the place even if the
        // kernel then refuses the move.
        if !self.layout.is_free(place, place + new) {
            self.unmap(place as usize, new as usize)?;
        }
        let mut change = engine::change();
        change.moving(start as usize, old as usize);
        let native = flags | MREMAP_MAYMOVE | MREMAP_FIXED;
        if let Err(error) = call!(mremap, start, old, new, native, place) {
            change.stayed(start as usize, old as usize);
            return Err(error);
        }
        if old == 0 || flags & MREMAP_DONTUNMAP != 0 {
            change.stayed(start as usize, old as usize);
            drop(change);
            return self.duplicate(start, new, place);
        }
        self.layout
            .relocate(start, old, place, new)
            .map_err(errno)?;
        change.moved(start as usize, old as usize, place as usize, new as usize);
        Ok(place as usize)
    }

    /// The old mapping stays as well (`MREMAP_DONTUNMAP`, or a second mapping
    /// of shared memory).
    fn duplicate(&mut self, start: u64, new: u64, place: u64) -> Result<usize> {
        let region = self.layout.lookup(start).copied().ok_or(Errno::EFAULT)?;
        let file_offset = if region.file == 0 {
            0
        } else {
            region.file_offset + (start - region.start)
        };
        self.enter(Region {
            start: place,
            end: place + new,
            file_offset,
            ..region
        })?;
        Ok(place as usize)
    }
}
