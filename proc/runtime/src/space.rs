//! The program's address space: the layout, and every change to it.
//!
//! All of the program's mappings lie below 8 TiB, where the kernel by itself puts
//! nothing, so the layout knows every one of them and picks every address. Each
//! change is made natively, entered in the layout and announced to the engine,
//! in that order, under one lock; unmapping is announced first.
//!
//! Under the lock the program's memory is touched by no instruction of the
//! runtime but copies that may fault into the engine, which has a layout, and a
//! lock, of its own.

mod remap;

use weft_proc::layout::{
    FLAG_GROWS_DOWN, FLAG_HEAP, FLAG_LOCKED, FLAG_NO_RESERVE, FLAG_SHARED, FLAG_STACK, Kind, LIMIT,
    LOWEST, Layout, LayoutError, PAGE, PROT_READ, PROT_WRITE, REGIONS_MAX, Region,
};

use crate::lock::{Guard, Lock};
use crate::own_calls::{self, Errno, Result, call};
use crate::{descriptors, engine, memory};

const MAP_SHARED: usize = 1;
const MAP_PRIVATE: usize = 2;
const MAP_SHARED_VALIDATE: usize = 3;
/// Memory that the kernel may drop, instead of `MAP_PRIVATE`. It stays at home.
const MAP_DROPPABLE: usize = 8;
const MAP_TYPE: usize = 0xf;
const MAP_FIXED: usize = 0x10;
const MAP_ANONYMOUS: usize = 0x20;
const MAP_32BIT: usize = 0x40;
const MAP_GROWSDOWN: usize = 0x100;
const MAP_LOCKED: usize = 0x2000;
const MAP_NORESERVE: usize = 0x4000;
const MAP_HUGETLB: usize = 0x4_0000;
const MAP_FIXED_NOREPLACE: usize = 0x10_0000;

const PROT_GROWSDOWN: usize = 0x0100_0000;

/// `MAP_32BIT` means below this.
const LOW_LIMIT: u64 = 0x8000_0000;
/// Anonymous mappings from this length on are aligned to it, so that the kernel
/// can use huge pages as it does for a native program.
const HUGE_BYTES: u64 = 2 << 20;
/// Top of what [`Space::map`] chooses from: the stack and the vdso lie above.
pub const MAP_TOP: u64 = 0x7ff_0000_0000;
/// Highest end of the main stack; randomised downwards.
pub const STACK_TOP: u64 = 0x7ff_e000_0000;
/// Where the vdso goes on every node.
pub const VDSO: u64 = 0x7ff_f000_0000;

/// The address space of the program.
pub struct Space {
    /// Every region of the program.
    pub layout: Layout<'static>,
    /// Where the heap starts; 0 before the program is loaded.
    heap_start: u64,
    /// Where `brk` has moved its end.
    heap_end: u64,
    /// Upper bound for chosen addresses.
    top: u64,
    files: u32,
}

static SPACE: Lock<Option<Space>> = Lock::new(None);

/// The locked address space.
pub struct Locked {
    guard: Guard<'static, Option<Space>>,
}

impl core::ops::Deref for Locked {
    type Target = Space;
    fn deref(&self) -> &Space {
        self.guard.as_ref().expect("set up at start")
    }
}

impl core::ops::DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut Space {
        self.guard.as_mut().expect("set up at start")
    }
}

/// Waits for the address space.
pub fn lock() -> Locked {
    Locked {
        guard: SPACE.lock(),
    }
}

/// Makes the empty address space. `slack` bytes below [`MAP_TOP`] stay unused:
/// the randomised part of chosen addresses.
pub fn set_up(slack: u64) -> Result<()> {
    *SPACE.lock() = Some(Space {
        layout: Layout::new(own_calls::zeroes(REGIONS_MAX)?),
        heap_start: 0,
        heap_end: 0,
        top: MAP_TOP - (slack & !(PAGE - 1)),
        files: 0,
    });
    Ok(())
}

fn errno(error: LayoutError) -> Errno {
    Errno::new(error.errno())
}

fn aligned(length: usize) -> Result<u64> {
    (length as u64)
        .checked_next_multiple_of(PAGE)
        .filter(|&length| length <= LIMIT)
        .ok_or(Errno::ENOMEM)
}

/// What `mmap` was asked for.
#[derive(Clone, Copy)]
struct Request {
    start: u64,
    length: u64,
    prot: usize,
    flags: usize,
    descriptor: usize,
    offset: usize,
}

impl Request {
    fn end(&self) -> u64 {
        self.start + self.length
    }
    fn is_anonymous(&self) -> bool {
        self.flags & MAP_ANONYMOUS != 0
    }
    fn kind(&self) -> Kind {
        if self.flags & MAP_TYPE != MAP_PRIVATE || self.flags & MAP_HUGETLB != 0 {
            Kind::HomeOnly
        } else if self.is_anonymous() || self.prot as u32 & PROT_WRITE != 0 {
            Kind::Anonymous
        } else {
            Kind::FileReadOnly
        }
    }
    fn region_flags(&self) -> u32 {
        let pairs = [
            (MAP_GROWSDOWN, FLAG_GROWS_DOWN),
            (MAP_LOCKED, FLAG_LOCKED),
            (MAP_NORESERVE, FLAG_NO_RESERVE),
        ];
        let mut flags = 0;
        for (asked, meant) in pairs {
            if self.flags & asked != 0 {
                flags |= meant;
            }
        }
        if !matches!(self.flags & MAP_TYPE, MAP_PRIVATE | MAP_DROPPABLE) {
            flags |= FLAG_SHARED;
        }
        flags
    }
}

impl Space {
    /// Upper bound of the addresses that are chosen.
    pub fn top(&self) -> u64 {
        self.top
    }

    /// `mmap`; the arguments are the program's.
    pub fn map(&mut self, arguments: &[usize; 6]) -> Result<usize> {
        let [address, length, prot, flags, descriptor, offset] = *arguments;
        // In the kernel's order.
        if !(offset as u64).is_multiple_of(PAGE) {
            return Err(Errno::EINVAL);
        }
        if flags & MAP_ANONYMOUS == 0 {
            check_file(descriptor)?;
        }
        let sharing = flags & MAP_TYPE;
        let known = [MAP_SHARED, MAP_PRIVATE, MAP_SHARED_VALIDATE, MAP_DROPPABLE];
        if length == 0 || !known.contains(&sharing) {
            return Err(Errno::EINVAL);
        }
        let mut request = Request {
            start: address as u64,
            length: aligned(length)?,
            prot,
            flags,
            descriptor,
            offset,
        };
        if flags & (MAP_FIXED | MAP_FIXED_NOREPLACE) != 0 {
            self.check_fixed(&request)?;
        } else {
            request.start = self.choose(&request)?;
        }
        self.map_at(request)?;
        Ok(request.start as usize)
    }

    fn check_fixed(&self, request: &Request) -> Result<()> {
        if !request.start.is_multiple_of(PAGE) {
            return Err(Errno::EINVAL);
        }
        if request.start > LIMIT - request.length {
            return Err(Errno::ENOMEM);
        }
        let replaces = !self.layout.is_free(request.start, request.end());
        if request.flags & MAP_FIXED_NOREPLACE != 0 && replaces {
            return Err(Errno::EEXIST);
        }
        Ok(())
    }

    fn choose(&self, request: &Request) -> Result<u64> {
        let high = if request.flags & MAP_32BIT != 0 {
            LOW_LIMIT
        } else {
            self.top
        };
        let huge = request.is_anonymous() && request.length >= HUGE_BYTES;
        let alignment = if huge || request.flags & MAP_HUGETLB != 0 {
            HUGE_BYTES
        } else {
            PAGE
        };
        let hint = request.start & !(PAGE - 1);
        let end = hint.saturating_add(request.length);
        if hint >= LOWEST && end <= LIMIT && self.layout.is_free(hint, end) {
            return Ok(hint);
        }
        self.layout
            .find_free(request.length, alignment, None, LOWEST, high)
            .map_err(errno)
    }

    /// Maps at a decided place, replacing what is there.
    fn map_at(&mut self, request: Request) -> Result<()> {
        let replaces = !self.layout.is_free(request.start, request.end());
        if replaces {
            if !request.is_anonymous() && engine::is_stretched() {
                // What is there is lost once the engine has given it up: the
                // kernel must not refuse afterwards.
                try_elsewhere(&request)?;
            }
            engine::change().unmapping(request.start as usize, request.length as usize);
        }
        let mut kind = request.kind();
        if kind == Kind::Anonymous && !request.is_anonymous() {
            let copied = if engine::holds_pages(&self.layout, request.length) {
                match self.copy_file_by_page(&request) {
                    Ok(()) => return Ok(()),
                    Err(error) => Err(error),
                }
            } else {
                self.copy_file(&request)
            };
            match copied {
                Ok(()) => {}
                // Not a file that can be read at an offset: a device.
                Err(Errno::ESPIPE | Errno::EINVAL | Errno::ENODEV) => {
                    map_natively(&request)?;
                    kind = Kind::HomeOnly;
                }
                Err(error) => return Err(error),
            }
        } else {
            map_natively(&request)?;
        }
        let mut region = Region {
            kind,
            flags: request.region_flags(),
            ..Region::anonymous(request.start, request.end(), request.prot as u32 & 7)
        };
        if !request.is_anonymous() && kind != Kind::Anonymous {
            self.files += 1;
            region.file = self.files;
            region.file_offset = request.offset as u64;
        }
        self.enter(region)
    }

    /// Puts a mapping that exists natively into the layout.
    pub fn enter(&mut self, region: Region) -> Result<()> {
        if let Err(error) = self.layout.insert(region) {
            let _ = call!(munmap, region.start, region.length());
            let _ = self.layout.remove(region.start, region.end);
            return Err(errno(error));
        }
        engine::mapped(&self.layout, &region);
        Ok(())
    }

    /// A writable private mapping of a file: anonymous memory that holds the
    /// file's bytes. It is filled elsewhere and moved into place, so that a
    /// failure leaves what was there.
    fn copy_file(&mut self, request: &Request) -> Result<()> {
        let length = request.length as usize;
        let scratch = call!(
            mmap,
            0,
            length,
            PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
            -1isize,
            0
        )?;
        // SAFETY: just mapped, `length` bytes, used only here.
        let buffer = unsafe { core::slice::from_raw_parts_mut(scratch as *mut u8, length) };
        let read = own_calls::read_at(request.descriptor as i32, buffer, request.offset as u64);
        let done = match read {
            Ok(_) => move_into_place(scratch, request.start, length, request.prot),
            Err(error) => Err(unreadable(error)),
        };
        if done.is_err() {
            let _ = call!(munmap, scratch, length);
        }
        done
    }

    /// The same when the pages belong to the coherence protocol: through the
    /// program's own mapping, so that the budget holds while a large file comes.
    fn copy_file_by_page(&mut self, request: &Request) -> Result<()> {
        const STEP: usize = 16 << 10;
        let mut buffer = [0u8; STEP];
        let file = request.descriptor as i32;
        let offset = request.offset as u64;
        own_calls::read_at(file, &mut buffer[..1], offset).map_err(unreadable)?;
        let open = PROT_READ | PROT_WRITE;
        let native = Request {
            prot: open as usize,
            flags: MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
            descriptor: usize::MAX,
            offset: 0,
            ..*request
        };
        map_natively(&native)?;
        self.enter(Region {
            flags: request.region_flags(),
            ..Region::anonymous(request.start, request.end(), open)
        })?;
        let mut done = 0;
        while done < request.length {
            let want = STEP.min((request.length - done) as usize);
            let read = own_calls::read_at(file, &mut buffer[..want], offset + done)?;
            memory::copy_out((request.start + done) as usize, &buffer[..read])?;
            done += want as u64;
            if read < want {
                break;
            }
        }
        if request.prot as u32 & 7 != open {
            self.protect(
                request.start as usize,
                request.length as usize,
                request.prot,
                None,
            )?;
        }
        Ok(())
    }

    /// `munmap`.
    pub fn unmap(&mut self, address: usize, length: usize) -> Result<usize> {
        let start = address as u64;
        if length == 0 || !start.is_multiple_of(PAGE) {
            return Err(Errno::EINVAL);
        }
        let length = aligned(length).map_err(|_| Errno::EINVAL)?;
        if start >= LIMIT || start + length > LIMIT {
            return Err(Errno::EINVAL);
        }
        let mut change = engine::change();
        change.unmapping(address, length as usize);
        call!(munmap, start, length)?;
        self.layout.remove(start, start + length).map_err(errno)?;
        Ok(0)
    }

    /// `mprotect`, and `pkey_mprotect` when `key` is given.
    pub fn protect(
        &mut self,
        address: usize,
        length: usize,
        prot: usize,
        key: Option<usize>,
    ) -> Result<usize> {
        let mut start = address as u64;
        if !start.is_multiple_of(PAGE) {
            return Err(Errno::EINVAL);
        }
        if length == 0 {
            return Ok(0);
        }
        let end = start + aligned(length)?;
        if start >= LIMIT || end > LIMIT {
            return Err(Errno::ENOMEM);
        }
        if prot & PROT_GROWSDOWN != 0 {
            let region = self.layout.lookup(start).ok_or(Errno::ENOMEM)?;
            if region.flags & (FLAG_STACK | FLAG_GROWS_DOWN) == 0 {
                return Err(Errno::EINVAL);
            }
            start = region.start;
        }
        let prot = prot & !PROT_GROWSDOWN;
        if prot as u32 & PROT_WRITE != 0 {
            self.make_copies(start, end)?;
        }
        let mut change = engine::change();
        let native = match key {
            Some(key) => call!(pkey_mprotect, start, end - start, prot, key),
            None => call!(mprotect, start, end - start, prot),
        };
        // At a hole the kernel stops, having changed what comes before it.
        if !matches!(native, Ok(_) | Err(Errno::ENOMEM)) {
            return native;
        }
        let done = self.layout.protect(start, end, prot as u32 & 7);
        change.protected(start as usize, (end - start) as usize, prot as u32 & 7);
        drop(change);
        engine::grown(&self.layout);
        native?;
        done.map_err(errno)?;
        Ok(0)
    }

    /// Turns the read-only file mappings of a range, which are about to become
    /// writable, into anonymous memory.
    fn make_copies(&mut self, start: u64, end: u64) -> Result<()> {
        // In pieces, so that the engine can make room between them.
        const PIECE: u64 = 64 * PAGE;
        let mut at = start;
        while let Some(mut region) = self.next_file_mapping(at, end) {
            region.end = region.end.min(region.start + PIECE);
            at = region.end;
            copy_mapping(&region)?;
            let copy = Region {
                kind: Kind::Anonymous,
                file: 0,
                file_offset: 0,
                ..region
            };
            self.layout.insert(copy).map_err(errno)?;
            engine::mapped(&self.layout, &copy);
        }
        Ok(())
    }

    fn next_file_mapping(&self, start: u64, end: u64) -> Option<Region> {
        if start >= end {
            return None;
        }
        self.layout
            .overlaps(start, end)
            .find(|region| region.kind == Kind::FileReadOnly)
    }

    /// Says where the heap starts.
    pub fn set_heap(&mut self, start: u64) {
        self.heap_start = start;
        self.heap_end = start;
    }

    /// `brk`: moves the end of the heap, or says where it is.
    pub fn set_break(&mut self, wanted: usize) -> usize {
        let wanted = wanted as u64;
        if wanted < self.heap_start || wanted > LIMIT - PAGE {
            return self.heap_end as usize;
        }
        let old = self.heap_end.next_multiple_of(PAGE);
        let new = wanted.next_multiple_of(PAGE);
        let changed = if new > old {
            self.grow_heap(old, new)
        } else if new < old {
            self.unmap(new as usize, (old - new) as usize).map(|_| ())
        } else {
            Ok(())
        };
        if changed.is_ok() {
            self.heap_end = wanted;
        }
        self.heap_end as usize
    }

    fn grow_heap(&mut self, start: u64, end: u64) -> Result<()> {
        if !self.layout.is_free(start, end) {
            return Err(Errno::ENOMEM);
        }
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
        let prot = PROT_READ | PROT_WRITE;
        call!(mmap, start, end - start, prot, flags, -1isize, 0)?;
        self.enter(Region {
            flags: FLAG_HEAP,
            ..Region::anonymous(start, end, prot)
        })
    }

    /// `madvise`.
    pub fn advise(&mut self, address: usize, length: usize, advice: usize) -> Result<usize> {
        remap::advise(self, address, length, advice)
    }

    /// `shmat`: attaches at an address that the layout picks.
    pub fn attach_shared(&mut self, id: usize, address: usize, flags: usize) -> Result<usize> {
        const SHM_RDONLY: usize = 0o10_000;
        const IPC_STAT: usize = 2;
        const SEGMENT_SIZE_WORD: usize = 6;
        let mut status = [0usize; 16];
        call!(shmctl, id, IPC_STAT, status.as_mut_ptr())?;
        let length = aligned(status[SEGMENT_SIZE_WORD])?;
        let start = if address != 0 {
            address as u64
        } else {
            self.layout
                .find_free(length, PAGE, None, LOWEST, self.top)
                .map_err(errno)?
        };
        let start = call!(shmat, id, start, flags)? as u64;
        let prot = if flags & SHM_RDONLY != 0 {
            PROT_READ
        } else {
            PROT_READ | PROT_WRITE
        };
        self.files += 1;
        self.enter(Region {
            kind: Kind::HomeOnly,
            flags: FLAG_SHARED,
            file: self.files,
            ..Region::anonymous(start, start + length, prot)
        })?;
        Ok(start as usize)
    }

    /// `shmdt`.
    pub fn detach_shared(&mut self, address: usize) -> Result<usize> {
        let region = self.layout.lookup(address as u64).copied();
        let done = call!(shmdt, address)?;
        if let Some(region) = region.filter(|r| r.start == address as u64) {
            engine::change().unmapping(address, region.length() as usize);
            self.layout
                .remove(region.start, region.end)
                .map_err(errno)?;
        }
        Ok(done)
    }
}

/// EBADF unless the descriptor is one of the program's that can be mapped.
fn check_file(descriptor: usize) -> Result<()> {
    const F_GETFL: usize = 3;
    const O_PATH: usize = 0o10_000_000;
    if descriptors::is_kept(descriptor) || call!(fcntl, descriptor, F_GETFL)? & O_PATH != 0 {
        return Err(Errno::EBADF);
    }
    Ok(())
}

/// What `mmap` says of an open file that cannot be read.
fn unreadable(error: Errno) -> Errno {
    match error {
        // Open, as was seen before, but not for reading.
        Errno::EBADF => Errno::EACCES,
        Errno::EISDIR => Errno::ENODEV,
        other => other,
    }
}

/// Whether the kernel would map this, found out where nothing is.
fn try_elsewhere(request: &Request) -> Result<()> {
    let flags = request.flags & !(MAP_32BIT | MAP_FIXED_NOREPLACE | MAP_FIXED | MAP_LOCKED);
    let mapped = call!(
        mmap,
        0,
        request.length,
        request.prot,
        flags,
        request.descriptor,
        request.offset
    )?;
    call!(munmap, mapped, request.length).map(|_| ())
}

/// Maps at `request.start` with the program's own protection and flags; not
/// locked once its pages may have to leave.
fn map_natively(request: &Request) -> Result<()> {
    let mut flags = (request.flags & !(MAP_32BIT | MAP_FIXED_NOREPLACE)) | MAP_FIXED;
    if engine::is_stretched() {
        flags &= !MAP_LOCKED;
    }
    call!(
        mmap,
        request.start,
        request.length,
        request.prot,
        flags,
        request.descriptor,
        request.offset
    )
    .map(|_| ())
}

/// Moves `length` bytes of a scratch mapping over `to`, with protection `prot`.
fn move_into_place(scratch: usize, to: u64, length: usize, prot: usize) -> Result<()> {
    const MREMAP_MAYMOVE: usize = 1;
    const MREMAP_FIXED: usize = 2;
    call!(mprotect, scratch, length, prot)?;
    call!(
        mremap,
        scratch,
        length,
        length,
        MREMAP_MAYMOVE | MREMAP_FIXED,
        to
    )
    .map(|_| ())
}

/// Replaces a read-only mapping of a file by anonymous memory with its bytes.
/// The kernel copies, so a file that has become shorter raises no SIGBUS: what
/// lies beyond its end is zero.
fn copy_mapping(region: &Region) -> Result<()> {
    let length = region.length() as usize;
    if region.prot & PROT_READ == 0 {
        call!(mprotect, region.start, length, PROT_READ)?;
    }
    let scratch = own_calls::allocate(length)? as usize;
    let own = own_calls::process_id();
    let mut done = 0;
    while done < length {
        let local = [scratch + done, length - done];
        let remote = [region.start as usize + done, length - done];
        let moved = call!(
            process_vm_readv,
            own,
            local.as_ptr(),
            1,
            remote.as_ptr(),
            1,
            0
        );
        match moved {
            Ok(count) if count > 0 => done += count,
            _ => break,
        }
    }
    move_into_place(scratch, region.start, length, region.prot as usize)
}
