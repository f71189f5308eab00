//! The regions of a process: which addresses are mapped, how, and with what.
//!
//! [`Layout`] is what `/proc/<pid>/maps` would show if the process had only the
//! program's mappings. Home owns the one that counts; other nodes keep a copy.
//!
//! Invariants, checked by [`Layout::check`] and after every change in the tests:
//!
//! - regions are sorted, none is empty, none overlaps another:
//!   `regions[i].start < regions[i].end <= regions[i + 1].start`;
//! - every bound is a multiple of [`PAGE`] and at most [`LIMIT`];
//! - no two neighbours could be one region (see [`Region::continues`]);
//! - [`Layout::writable_anonymous_bytes`] is the sum over the regions that
//!   [`Region::is_writable_anonymous`];
//! - an operation that returns [`LayoutError::Full`] changed nothing.
//!
//! Nothing is allocated: the caller gives the array.

mod place;
#[cfg(test)]
mod tests;

use core::ops::Range;

/// Size of a page, bytes.
pub const PAGE: u64 = 4096;
/// First address above those that programs may use: 8 TiB.
pub const LIMIT: u64 = 1 << 43;
/// Lowest address that a program may map, as `vm.mmap_min_addr` has it.
pub const LOWEST: u64 = 0x1_0000;
/// Most regions any process may have; Linux has `vm.max_map_count` = 65530.
pub const REGIONS_MAX: usize = 65536;

/// The region can be read.
pub const PROT_READ: u32 = 1;
/// The region can be written.
pub const PROT_WRITE: u32 = 2;
/// The region can be executed.
pub const PROT_EXEC: u32 = 4;

/// The program's main stack.
pub const FLAG_STACK: u32 = 1 << 0;
/// Grows downwards on a fault below it (`MAP_GROWSDOWN`).
pub const FLAG_GROWS_DOWN: u32 = 1 << 1;
/// The heap that `brk` moves the end of.
pub const FLAG_HEAP: u32 = 1 << 2;
/// Locked in memory by `mlock`, `mlockall` or `MAP_LOCKED`.
pub const FLAG_LOCKED: u32 = 1 << 3;
/// `MAP_NORESERVE`.
pub const FLAG_NO_RESERVE: u32 = 1 << 4;
/// `MADV_DONTFORK`: a child does not get it.
pub const FLAG_DONT_FORK: u32 = 1 << 5;
/// `MADV_WIPEONFORK`: a child gets zeroes.
pub const FLAG_WIPE_ON_FORK: u32 = 1 << 6;
/// `MAP_SHARED`: a child shares it.
pub const FLAG_SHARED: u32 = 1 << 7;

/// What keeps the pages of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, zerocopy::FromZeros)]
#[repr(u8)]
pub enum Kind {
    /// Private memory, coherent through the DSM. Includes writable private
    /// mappings of files, which are copied in when they are made.
    #[default]
    Anonymous = 0,
    /// A private mapping of a file that cannot be written: mapped natively at
    /// home, copied to other nodes on demand.
    FileReadOnly = 1,
    /// Shared and device mappings: touched at home only.
    HomeOnly = 2,
}

/// One mapping: every page in it is treated alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, zerocopy::FromZeros)]
#[repr(C)]
pub struct Region {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// Offset in the file of `start`; 0 where there is no file.
    pub file_offset: u64,
    /// The caller's number for the file; 0 means none.
    pub file: u32,
    pub prot: u32,
    pub flags: u32,
    /// What keeps its pages.
    pub kind: Kind,
}

impl Region {
    /// Private memory without a file.
    pub const fn anonymous(start: u64, end: u64, prot: u32) -> Region {
        Region {
            start,
            end,
            prot,
            kind: Kind::Anonymous,
            flags: 0,
            file: 0,
            file_offset: 0,
        }
    }
    /// Length, bytes.
    pub const fn length(&self) -> u64 {
        self.end - self.start
    }
    /// Whether `address` lies in it.
    pub const fn contains(&self, address: u64) -> bool {
        self.start <= address && address < self.end
    }
    /// Whether its bytes count in [`Layout::writable_anonymous_bytes`].
    pub fn is_writable_anonymous(&self) -> bool {
        self.kind == Kind::Anonymous && self.prot & PROT_WRITE != 0
    }
    /// Whether `self` could be one region with `before`, which ends where it
    /// starts.
    pub fn continues(&self, before: &Region) -> bool {
        before.end == self.start
            && before.prot == self.prot
            && before.kind == self.kind
            && before.flags == self.flags
            && before.file == self.file
            && (self.file == 0 || before.file_offset + before.length() == self.file_offset)
    }
    /// The part of it inside `range`; the caller knows that they overlap.
    pub fn clipped(&self, range: &Range<u64>) -> Region {
        let start = self.start.max(range.start);
        let end = self.end.min(range.end);
        let file_offset = if self.file == 0 {
            self.file_offset
        } else {
            self.file_offset + (start - self.start)
        };
        Region {
            start,
            end,
            file_offset,
            ..*self
        }
    }
}

/// Why a change to a [`Layout`] was not made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutError {
    /// More regions than the array holds; ENOMEM.
    #[error("no room for another mapping: the process already has {regions}")]
    Full {
        /// How many there are.
        regions: usize,
    },
    /// Not page-aligned, empty, or wrapping around; EINVAL.
    #[error("{start:#x}..{end:#x} is not a range of whole pages")]
    Invalid {
        /// First address.
        start: u64,
        /// First address after it.
        end: u64,
    },
    /// Above [`LIMIT`]; ENOMEM.
    #[error("{start:#x}..{end:#x} is outside the addresses a program may use")]
    Outside {
        /// First address.
        start: u64,
        /// First address after it.
        end: u64,
    },
    /// Nothing is mapped at this address of the range; ENOMEM for `mprotect`,
    /// EFAULT for `mremap`.
    #[error("nothing is mapped at {address:#x}")]
    NotMapped {
        /// The first such address.
        address: u64,
    },
    /// No hole is large enough; ENOMEM.
    #[error("no room for {length} bytes in the address space")]
    NoHole {
        /// What was asked for.
        length: u64,
    },
}

impl LayoutError {
    /// What the system call returns, positive.
    pub const fn errno(&self) -> i32 {
        match self {
            LayoutError::Invalid { .. } => linux_raw_sys::errno::EINVAL as i32,
            _ => linux_raw_sys::errno::ENOMEM as i32,
        }
    }
}

/// The sorted array of a process's regions.
pub struct Layout<'a> {
    regions: &'a mut [Region],
    count: usize,
    writable_anonymous_bytes: u64,
}

impl<'a> Layout<'a> {
    /// An empty layout that keeps its regions in `storage`. Entries past
    /// [`REGIONS_MAX`] stay unused.
    pub fn new(storage: &'a mut [Region]) -> Layout<'a> {
        let usable = storage.len().min(REGIONS_MAX);
        Layout {
            regions: &mut storage[..usable],
            count: 0,
            writable_anonymous_bytes: 0,
        }
    }
    /// All regions, lowest first.
    pub fn regions(&self) -> &[Region] {
        &self.regions[..self.count]
    }
    /// Bytes that the program could fill on its own: anonymous and writable.
    pub fn writable_anonymous_bytes(&self) -> u64 {
        self.writable_anonymous_bytes
    }
    /// Bytes mapped altogether.
    pub fn mapped_bytes(&self) -> u64 {
        self.regions().iter().map(Region::length).sum()
    }
    /// Forgets every region.
    pub fn clear(&mut self) {
        self.count = 0;
        self.writable_anonymous_bytes = 0;
    }
    /// Index of the first region that ends above `address`.
    fn first_ending_above(&self, address: u64) -> usize {
        self.regions().partition_point(|r| r.end <= address)
    }
    /// Indices of the regions that overlap `range`.
    fn overlapping(&self, range: &Range<u64>) -> Range<usize> {
        let first = self.first_ending_above(range.start);
        let after = self.regions().partition_point(|r| r.start < range.end);
        first..after.max(first)
    }
    /// The region that holds `address`.
    pub fn lookup(&self, address: u64) -> Option<&Region> {
        self.regions()
            .get(self.first_ending_above(address))
            .filter(|region| region.contains(address))
    }
    /// Regions that overlap `start..end`, each clipped to it, lowest first.
    pub fn overlaps(&self, start: u64, end: u64) -> impl Iterator<Item = Region> + '_ {
        let range = start..end;
        self.regions()[self.overlapping(&range)]
            .iter()
            .map(move |region| region.clipped(&range))
    }
    /// Whether nothing is mapped in `start..end`.
    pub fn is_free(&self, start: u64, end: u64) -> bool {
        self.overlapping(&(start..end)).is_empty()
    }
    /// The first address of `start..end` where nothing is mapped.
    pub fn first_hole(&self, start: u64, end: u64) -> Option<u64> {
        let mut at = start;
        for region in self.overlaps(start, end) {
            if region.start > at {
                return Some(at);
            }
            at = region.end;
        }
        (at < end).then_some(at)
    }

    /// Maps `region`, replacing whatever it overlaps.
    pub fn insert(&mut self, region: Region) -> Result<(), LayoutError> {
        let range = checked(region.start, region.end)?;
        self.replace(range, &[region])
    }
    /// Unmaps `start..end`, splitting what crosses its bounds. Holes are fine.
    pub fn remove(&mut self, start: u64, end: u64) -> Result<(), LayoutError> {
        let range = checked(start, end)?;
        self.replace(range, &[])
    }
    /// Sets the protection of `start..end`. Like `mprotect`, changes what lies
    /// below the first hole and then reports the hole.
    pub fn protect(&mut self, start: u64, end: u64, prot: u32) -> Result<(), LayoutError> {
        self.update(start, end, |region| region.prot = prot)
    }
    /// Applies `change` to every region of `start..end`, split at its bounds and
    /// merged again where neighbours became equal. `change` must not touch the
    /// bounds. Stops at the first hole and reports it.
    pub fn update(
        &mut self,
        start: u64,
        end: u64,
        mut change: impl FnMut(&mut Region),
    ) -> Result<(), LayoutError> {
        checked(start, end)?;
        let hole = self.first_hole(start, end);
        let end = hole.unwrap_or(end);
        if start < end {
            self.room_for(2)?;
            self.split_at(start);
            self.split_at(end);
            for index in self.overlapping(&(start..end)) {
                let mut region = self.regions[index];
                self.writable_anonymous_bytes -= counted(&region);
                change(&mut region);
                assert!(
                    region.start == self.regions[index].start
                        && region.end == self.regions[index].end,
                    "update may not move a region"
                );
                self.writable_anonymous_bytes += counted(&region);
                self.regions[index] = region;
            }
            self.merge(start, end);
        }
        match hole {
            Some(address) => Err(LayoutError::NotMapped { address }),
            None => Ok(()),
        }
    }
    /// Moves `old_length` bytes of mappings from `old` to `new`, replacing what
    /// is there, as `mremap` with `MREMAP_FIXED` does. With a greater
    /// `new_length` the last region is extended, with a smaller one the rest is
    /// dropped. The two ranges must not overlap.
    pub fn relocate(
        &mut self,
        old: u64,
        old_length: u64,
        new: u64,
        new_length: u64,
    ) -> Result<(), LayoutError> {
        let from = checked(old, old.saturating_add(old_length))?;
        let to = checked(new, new.saturating_add(new_length))?;
        if from.start < to.end && to.start < from.end {
            return Err(LayoutError::Invalid {
                start: to.start,
                end: to.end,
            });
        }
        if let Some(address) = self.first_hole(from.start, from.end) {
            return Err(LayoutError::NotMapped { address });
        }
        // Two splits at each range, and every moved region is for a moment in
        // both places.
        let moved = self.overlapping(&from).len();
        self.room_for(moved + 4)?;
        self.replace(to.clone(), &[])?;
        let kept = from.start..from.end.min(from.start + new_length);
        let mut at = kept.start;
        while at < kept.end {
            let Some(part) = self.overlaps(at, kept.end).next() else {
                break;
            };
            at = part.end;
            let end = if part.end == kept.end {
                to.end
            } else {
                new + (part.end - from.start)
            };
            let target = Region {
                start: new + (part.start - from.start),
                end,
                ..part
            };
            self.replace(target.start..target.end, &[target])?;
        }
        self.replace(from, &[])
    }

    /// Fails unless `extra` more regions fit.
    fn room_for(&self, extra: usize) -> Result<(), LayoutError> {
        if self.count + extra > self.regions.len() {
            return Err(LayoutError::Full {
                regions: self.count,
            });
        }
        Ok(())
    }
    /// Puts `new` (none or one region covering the range) where `range` was.
    fn replace(&mut self, range: Range<u64>, new: &[Region]) -> Result<(), LayoutError> {
        let old = self.overlapping(&range);
        let first = self.regions()[old.clone()].first().copied();
        let last = self.regions()[old.clone()].last().copied();
        let head = first.filter(|r| r.start < range.start);
        let tail = last.filter(|r| r.end > range.end);
        let count = usize::from(head.is_some()) + new.len() + usize::from(tail.is_some());
        if count > old.len() {
            self.room_for(count - old.len())?;
        }
        for region in &self.regions[old.clone()] {
            self.writable_anonymous_bytes -= counted(region);
        }
        self.regions
            .copy_within(old.end..self.count, old.start + count);
        self.count = self.count - old.len() + count;
        let parts = [
            head.map(|r| r.clipped(&(r.start..range.start))),
            new.first().copied(),
            tail.map(|r| r.clipped(&(range.end..r.end))),
        ];
        for (index, part) in parts.into_iter().flatten().enumerate() {
            self.writable_anonymous_bytes += counted(&part);
            self.regions[old.start + index] = part;
        }
        self.merge(range.start, range.end);
        Ok(())
    }
    /// Makes `address` a bound between regions if it lies inside one. The caller
    /// has made sure that one more fits.
    fn split_at(&mut self, address: u64) {
        let index = self.first_ending_above(address);
        let Some(&region) = self.regions().get(index) else {
            return;
        };
        if region.start >= address {
            return;
        }
        self.regions.copy_within(index..self.count, index + 1);
        self.regions[index] = region.clipped(&(region.start..address));
        self.regions[index + 1] = region.clipped(&(address..region.end));
        self.count += 1;
    }
    /// Joins equal neighbours among those that touch `start..end`.
    fn merge(&mut self, start: u64, end: u64) {
        let first = self.regions().partition_point(|r| r.end < start);
        let after = self.regions().partition_point(|r| r.start <= end);
        if after <= first + 1 {
            return;
        }
        let mut kept = first;
        for index in first + 1..after {
            let region = self.regions[index];
            if region.continues(&self.regions[kept]) {
                self.regions[kept].end = region.end;
            } else {
                kept += 1;
                self.regions[kept] = region;
            }
        }
        let dropped = after - (kept + 1);
        if dropped > 0 {
            self.regions.copy_within(after..self.count, kept + 1);
            self.count -= dropped;
        }
    }
    /// Verifies every invariant; `Err` names the one that does not hold. Costs
    /// time in proportion to the number of regions.
    pub fn check(&self) -> Result<(), &'static str> {
        let mut sum = 0;
        for (index, region) in self.regions().iter().enumerate() {
            if region.start >= region.end {
                return Err("a region is empty");
            }
            if region.end > LIMIT {
                return Err("a region is outside the managed addresses");
            }
            if !(region.start | region.end).is_multiple_of(PAGE) {
                return Err("a region is not page-aligned");
            }
            if let Some(before) = index.checked_sub(1).map(|i| &self.regions[i]) {
                if before.end > region.start {
                    return Err("regions overlap or are unsorted");
                }
                if region.continues(before) {
                    return Err("two regions could be one");
                }
            }
            sum += counted(region);
        }
        if sum != self.writable_anonymous_bytes {
            return Err("writable_anonymous_bytes is not the sum");
        }
        Ok(())
    }
}

/// What a region adds to the sum that decides when to stretch.
fn counted(region: &Region) -> u64 {
    if region.is_writable_anonymous() {
        region.length()
    } else {
        0
    }
}

/// `start..end` if it is a non-empty range of whole, managed pages.
fn checked(start: u64, end: u64) -> Result<Range<u64>, LayoutError> {
    if start >= end || !(start | end).is_multiple_of(PAGE) {
        return Err(LayoutError::Invalid { start, end });
    }
    if end > LIMIT {
        return Err(LayoutError::Outside { start, end });
    }
    Ok(start..end)
}
