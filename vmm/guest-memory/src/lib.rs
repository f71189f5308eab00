//! Guest RAM: one memfd, mapped once, below and above the hole for devices.
//!
//! ```text
//! 0 .. 3 GiB              RAM, as much as there is
//! 0xc000_0000 .. 4 GiB    devices: see the constants below
//! 4 GiB ..                the rest of the RAM, then 64-bit windows of devices
//! ```

mod device;
mod observer;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;
use vm_memory::{
    Address, Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap,
    GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};
use weft_vcpu::{Access, Memory, Unbacked};

pub use device::{DeviceMemory, Held, Visit};
pub use observer::WriteObserver;

/// First address of the hole for devices below 4 GiB.
pub const DEVICE_HOLE: u64 = 0xc000_0000;
/// 32-bit windows of PCI devices: from [`DEVICE_HOLE`] up to here.
pub const PCI_WINDOW_END: u64 = 0xe000_0000;
/// PCI Express configuration space (ECAM), one bus: 1 MiB.
pub const ECAM: u64 = 0xe000_0000;
/// I/O APIC.
pub const IO_APIC: u64 = 0xfec0_0000;
/// Local APICs: the same address for every CPU; also where MSIs are written.
pub const LOCAL_APIC: u64 = 0xfee0_0000;
/// Memory goes on here.
pub const FOUR_GIB: u64 = 1 << 32;

/// Bytes of a file that are copied at one time: they stay in the host CPU's cache.
const COPY_BYTES: u64 = 128 << 10;

/// Why a guest's memory could not be had.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// Zero, or no multiple of the page size.
    #[error("memory of {0} bytes: it must be a multiple of 4096, and at least 4 MiB")]
    Size(u64),
    /// No file for it.
    #[error("no memory file of {size} bytes")]
    File {
        /// Asked for.
        size: u64,
        /// The kernel's answer.
        source: io::Error,
    },
    /// No room to map it.
    #[error("cannot map {size} bytes of guest memory: {reason}")]
    Map {
        /// Asked for.
        size: u64,
        /// The library's words.
        reason: String,
    },
}

/// Guest RAM. Clones are the same memory.
#[derive(Clone)]
pub struct Ram {
    mapped: Arc<GuestMemoryMmap>,
    size: u64,
    marks: Option<Arc<Marks>>,
}

/// A mark for each page.
pub struct Marks(Box<[AtomicU64]>);

impl Marks {
    /// For guest-physical addresses below `end`.
    pub fn new(end: u64) -> Self {
        let words = (end / weft_vcpu::PAGE_SIZE).div_ceil(64);
        Self((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    fn place(&self, address: u64) -> Option<(&AtomicU64, u64)> {
        let page = address / weft_vcpu::PAGE_SIZE;
        let word = self.0.get((page / 64) as usize)?;
        Some((word, 1 << (page % 64)))
    }

    /// Marks the page at a guest-physical address; whether there is a mark for it.
    #[inline]
    pub fn set(&self, address: u64) -> bool {
        let place = self.place(address);
        if let Some((word, bit)) = place {
            word.fetch_or(bit, Ordering::SeqCst);
        }
        place.is_some()
    }

    /// Whether there is a mark for that page.
    #[inline]
    pub fn covers(&self, address: u64) -> bool {
        self.place(address).is_some()
    }

    /// Whether it is marked.
    #[inline]
    pub fn has(&self, address: u64) -> bool {
        self.place(address)
            .is_some_and(|(word, bit)| word.load(Ordering::SeqCst) & bit != 0)
    }

    /// Takes one away.
    pub fn unset(&self, address: u64) {
        if let Some((word, bit)) = self.place(address) {
            word.fetch_and(!bit, Ordering::SeqCst);
        }
    }

    /// Takes all marks away.
    pub fn clear(&self) {
        for word in &self.0 {
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::SeqCst);
            }
        }
    }
}

impl Ram {
    /// `size` bytes, all zero, from a memfd: nothing is used before it is touched.
    pub fn new(size: u64) -> Result<Self, MemoryError> {
        let file = memory_file().map_err(|source| MemoryError::File { size, source })?;
        Self::of_file(file, size)
    }

    /// `size` bytes in a memfd that another process has as well. An empty one gets this size,
    /// for ever; what is in another one is guest memory already.
    ///
    /// # Errors
    /// A file of another size, or one whose size could change.
    pub fn of_file(file: File, size: u64) -> Result<Self, MemoryError> {
        if size < 4 << 20 || !size.is_multiple_of(weft_vcpu::PAGE_SIZE) {
            return Err(MemoryError::Size(size));
        }
        fix_size(&file, size).map_err(|source| MemoryError::File { size, source })?;
        Self::map(Arc::new(file), size)
    }

    /// A second mapping of the same memory, at other host addresses: what one of
    /// them may not touch for a while, the other still reaches.
    pub fn second(&self) -> Result<Self, MemoryError> {
        let size = self.size;
        let file = self.mapped.iter().find_map(|region| region.file_offset());
        let file = file.ok_or_else(|| MemoryError::Map {
            size,
            reason: "it has no file".into(),
        })?;
        Self::map(file.arc().clone(), size)
    }

    fn map(file: Arc<File>, size: u64) -> Result<Self, MemoryError> {
        let low = size.min(DEVICE_HOLE);
        let mut parts = vec![(0, low, 0)];
        if size > low {
            parts.push((FOUR_GIB, size - low, low));
        }
        let map = |reason: String| MemoryError::Map { size, reason };
        let mut regions = Vec::new();
        for (start, length, offset) in parts {
            let backing = FileOffset::from_arc(file.clone(), offset);
            let mapping = MmapRegion::from_file(backing, length as usize)
                .map_err(|error| map(error.to_string()))?;
            let region = GuestRegionMmap::new(mapping, GuestAddress(start))
                .ok_or_else(|| map("the region exceeds the address space".into()))?;
            regions.push(region);
        }
        let mapped =
            GuestMemoryMmap::from_regions(regions).map_err(|error| map(error.to_string()))?;
        Ok(Self {
            mapped: Arc::new(mapped),
            size,
            marks: None,
        })
    }

    /// The same memory, whose pages are marked by [`Ram::mark`].
    pub fn with_marks(mut self) -> Self {
        self.marks = Some(Arc::new(Marks::new(self.end())));
        self
    }

    /// The marks, where there are some.
    #[inline]
    pub fn marks(&self) -> Option<&Arc<Marks>> {
        self.marks.as_ref()
    }

    /// Marks the pages of a range, if there are marks.
    #[inline]
    pub fn mark(&self, address: u64, length: usize) {
        if let Some(marks) = &self.marks {
            let last = address.saturating_add(length.saturating_sub(1) as u64);
            let page = weft_vcpu::PAGE_SIZE;
            for number in address / page..=last / page {
                marks.set(number * page);
            }
        }
    }

    /// Bytes of RAM.
    #[inline]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// For devices and loaders: checked access by guest-physical address.
    #[inline]
    pub fn guest(&self) -> &GuestMemoryMmap {
        &self.mapped
    }

    /// The same, shared: what a device's queue keeps.
    pub fn shared(&self) -> Arc<GuestMemoryMmap> {
        self.mapped.clone()
    }

    /// Copies a part of a file to guest-physical `address`: through the memory's own
    /// file, so that no page has to be mapped for it.
    pub fn fill(&self, address: u64, from: &File, part: Range<u64>) -> io::Result<()> {
        let mut buffer = vec![0; COPY_BYTES.min(part.end.saturating_sub(part.start)) as usize];
        let mut at = part.start;
        while at < part.end {
            let count = (part.end - at).min(COPY_BYTES);
            let piece = &mut buffer[..count as usize];
            from.read_exact_at(piece, at)?;
            self.put(address + (at - part.start), piece)?;
            at += count;
        }
        Ok(())
    }

    /// Writes to guest memory in the same way. For large amounts, to prepare memory
    /// that the guest has not touched.
    pub fn put(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        let mut address = address;
        while !rest.is_empty() {
            let outside = || {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "there is no guest \
            memory at this address",
                )
            };
            let region = self.mapped.find_region(GuestAddress(address));
            let region = region.ok_or_else(outside)?;
            let file = region.file_offset().ok_or_else(outside)?;
            let offset = address - region.start_addr().raw_value();
            let here = (region.len() - offset).min(rest.len() as u64);
            let (now, later) = rest.split_at(here as usize);
            file.file().write_all_at(now, file.start() + offset)?;
            rest = later;
            address += here;
        }
        Ok(())
    }

    /// Bytes of memory that the host has filled for it.
    pub fn host_bytes(&self) -> io::Result<u64> {
        let Some(file) = self.mapped.iter().find_map(|region| region.file_offset()) else {
            return Ok(0);
        };
        let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
        // The C library would make another system call, which a confined machine may not.
        // SAFETY: the descriptor is ours, and the buffer has room for the structure.
        let result =
            unsafe { libc::syscall(libc::SYS_fstat, file.file().as_raw_fd(), stat.as_mut_ptr()) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call filled it.
        let blocks = unsafe { stat.assume_init() }.st_blocks;
        Ok(blocks.cast_unsigned() * 512)
    }

    /// The guest-physical addresses that were written to, in whole pages.
    pub fn populated(&self) -> io::Result<Vec<Range<u64>>> {
        let mut found = Vec::new();
        for region in self.mapped.iter() {
            let Some(file) = region.file_offset() else {
                continue;
            };
            let base = region.start_addr().raw_value();
            let (start, end) = (file.start(), file.start() + region.len());
            let mut at = start;
            while let Some(data) =
                seek(file.file(), at, libc::SEEK_DATA)?.filter(|data| *data < end)
            {
                let hole =
                    seek(file.file(), data, libc::SEEK_HOLE)?.map_or(end, |hole| hole.min(end));
                found.push(base + (data - start)..base + (hole - start));
                at = hole;
            }
        }
        Ok(found)
    }

    /// Gives the memory of a range of whole pages back to the host: it is zero again,
    /// in every mapping, and of no size until it is touched. `address` and `length`
    /// are guest-physical bytes, within one of [`Ram::parts`].
    ///
    /// # Errors
    /// No memory there, or the kernel's answer.
    pub fn give_back(&self, address: u64, length: usize) -> io::Result<()> {
        let outside = |_| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "there is no guest \
        memory at this address",
            )
        };
        let slice = self.mapped.get_slice(GuestAddress(address), length);
        let start = slice.map_err(outside)?.ptr_guard_mut().as_ptr();
        // SAFETY: a part of a mapping of ours, whose bytes nobody relies on.
        match unsafe { libc::madvise(start.cast(), length, libc::MADV_REMOVE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// First guest-physical address after the RAM above 4 GiB (4 GiB when there
    /// is none): 64-bit windows of devices may start here.
    pub fn high_end(&self) -> u64 {
        FOUR_GIB + self.size.saturating_sub(DEVICE_HOLE)
    }

    /// Where RAM is: guest-physical start, length in bytes, host address.
    pub fn parts(&self) -> Vec<(u64, u64, *mut u8)> {
        self.mapped
            .iter()
            .map(|region| {
                (
                    region.start_addr().raw_value(),
                    region.len(),
                    region.as_ptr(),
                )
            })
            .collect()
    }
}

/// Guest memory by guest-physical address, for callers that are not vCPUs: clocks, devices.
pub trait GuestBytes: Send + Sync {
    /// Copies bytes out; whether all of them are memory.
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool;
    /// Copies bytes in; whether all of them are memory.
    fn write(&self, address: u64, bytes: &[u8]) -> bool;
}

/// Takes guest memory back whose content the guest does not need.
pub trait Reclaim: Send + Sync {
    /// The memory of these guest-physical bytes, whole pages of RAM, goes back to the host:
    /// the guest reads zeros there, and a page takes memory again when it is touched. The
    /// guest does not use the pages until this returns.
    fn reclaim(&self, address: u64, length: u64) -> io::Result<()>;
}

impl Reclaim for Ram {
    fn reclaim(&self, address: u64, length: u64) -> io::Result<()> {
        let end = address.saturating_add(length);
        for (start, size, _) in self.parts() {
            let part = address.max(start)..end.min(start + size);
            if !part.is_empty() {
                self.give_back(part.start, (part.end - part.start) as usize)?;
            }
        }
        Ok(())
    }
}

impl GuestBytes for Ram {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.mapped.read_slice(bytes, GuestAddress(address)).is_ok()
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.mapped
            .write_slice(bytes, GuestAddress(address))
            .is_ok()
    }
}

impl Memory for Ram {
    fn acquire(&self, page: u64, _: Access) -> Result<*mut u8, Unbacked> {
        self.mapped
            .get_host_address(GuestAddress(page))
            .map_err(|_| Unbacked(page))
    }

    fn held(&self, page: u64, _: Access) -> Option<*mut u8> {
        self.mapped.get_host_address(GuestAddress(page)).ok()
    }

    fn end(&self) -> u64 {
        self.mapped.last_addr().raw_value() + 1
    }
}

/// lseek(2) with `SEEK_DATA` or `SEEK_HOLE`; `None` when there is none behind.
fn seek(file: &File, from: u64, whence: i32) -> io::Result<Option<u64>> {
    // SAFETY: only the file's position changes, which nobody relies on.
    let found = unsafe { libc::lseek(file.as_raw_fd(), from as i64, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        },
    }
}

/// An empty memfd, for [`Ram::of_file`].
pub fn memory_file() -> io::Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a terminated string; the call touches nothing else of ours.
    let descriptor = unsafe { libc::memfd_create(c"weft-guest-ram".as_ptr(), flags) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: memfd_create just gave this descriptor to us alone.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// Gives an empty memory file its size. A thread that writes to disk images could make it
/// longer otherwise, by pages that are mapped nowhere and that nobody counts; and no other
/// process can make it shorter under a mapping.
fn fix_size(file: &File, size: u64) -> io::Result<()> {
    let length = file.metadata()?.len();
    let sealed = libc::F_SEAL_GROW | libc::F_SEAL_SHRINK;
    if length == 0 {
        file.set_len(size)?;
        let seals = sealed | libc::F_SEAL_SEAL;
        // SAFETY: a plain call on a descriptor that is ours.
        return match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
    }
    // SAFETY: reads the flags of a descriptor that is ours.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 {
        return Err(io::Error::last_os_error());
    }
    match length == size && seals & sealed == sealed {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "it has {length} bytes, or its size can change"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn two_processes_have_the_same_memory() {
        let file = memory_file().unwrap();
        let first = Ram::of_file(file.try_clone().unwrap(), 4 << 20).unwrap();
        first.put(0x3000, &[7; 16]).unwrap();
        let second = Ram::of_file(file.try_clone().unwrap(), 4 << 20).unwrap();
        let read: u64 = second.guest().read_obj(GuestAddress(0x3008)).unwrap();
        assert_eq!(read, u64::from_ne_bytes([7; 8]));
        let populated = second.populated().unwrap();
        assert_eq!(populated.len(), 1);
        assert_eq!(populated[0], 0x3000..0x4000);
        assert!(Ram::of_file(file, 8 << 20).is_err());
    }

    #[test]
    fn memory_whose_size_can_change_is_refused() {
        let file = memory_file().unwrap();
        file.set_len(4 << 20).unwrap();
        assert!(Ram::of_file(file, 4 << 20).is_err());
    }

    #[test]
    fn its_file_keeps_its_size() {
        let size = 4 << 20;
        let file = memory_file().unwrap();
        Ram::of_file(file.try_clone().unwrap(), size).unwrap();
        assert!(file.set_len(size + 4096).is_err());
        assert!(std::os::unix::fs::FileExt::write_at(&file, b"more", size).is_err());
        assert_eq!(file.metadata().unwrap().len(), size);
    }

    #[test]
    fn memory_skips_the_hole() {
        let ram = Ram::new(DEVICE_HOLE + (8 << 20)).unwrap();
        assert_eq!(ram.high_end(), FOUR_GIB + (8 << 20));
        assert_eq!(ram.end(), FOUR_GIB + (8 << 20));
        assert_eq!(
            ram.acquire(DEVICE_HOLE, Access::Read),
            Err(Unbacked(DEVICE_HOLE))
        );
        ram.guest()
            .write_obj(7_u32, GuestAddress(FOUR_GIB))
            .unwrap();
        let page = ram.acquire(FOUR_GIB, Access::Write).unwrap();
        // SAFETY: the page was just acquired and is 4096 bytes long.
        assert_eq!(unsafe { page.cast::<u32>().read() }, 7);
    }

    #[test]
    fn files_are_copied_to_where_they_belong() {
        let ram = Ram::new(DEVICE_HOLE + (8 << 20)).unwrap();
        let path = std::env::temp_dir().join(format!("weft-fill-{}", std::process::id()));
        let bytes: Vec<u8> = (0..300_001_u32).map(|number| number as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        for address in [0x10_0123, FOUR_GIB + 5] {
            ram.fill(address, &file, 7..300_001).unwrap();
            let mut read = vec![0; bytes.len() - 7];
            ram.guest()
                .read_slice(&mut read, GuestAddress(address))
                .unwrap();
            assert!(read == bytes[7..]);
        }
        let short = ram.fill(0, &file, 0..300_002).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
        let outside = ram.put(DEVICE_HOLE - 1, &[1, 2]).unwrap_err();
        assert_eq!(outside.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn what_is_reclaimed_takes_no_memory_and_is_zero() {
        let ram = Ram::new(DEVICE_HOLE + (8 << 20)).unwrap();
        let start = DEVICE_HOLE - 4096;
        for address in [start, FOUR_GIB, FOUR_GIB + 4096] {
            ram.put(address, &[7; 4096]).unwrap();
        }
        assert_eq!(ram.host_bytes().unwrap(), 3 * 4096);
        // Over the hole for devices.
        ram.reclaim(start, FOUR_GIB + 4096 - start).unwrap();
        assert_eq!(ram.host_bytes().unwrap(), 4096);
        let first = |address| ram.guest().read_obj::<u8>(GuestAddress(address)).unwrap();
        assert_eq!([start, FOUR_GIB, FOUR_GIB + 4096].map(first), [0, 0, 7]);
    }

    #[test]
    fn odd_sizes_are_refused() {
        assert!(matches!(Ram::new(0), Err(MemoryError::Size(0))));
        assert!(matches!(Ram::new((8 << 20) + 1), Err(MemoryError::Size(_))));
    }
}
