//! Guest memory by linear address: the fast path through the TLB, and the slow
//! one that fills it, crosses pages and reaches devices.

use std::time::Duration;

use weft_vcpu::{Access, Asker, PAGE_SIZE, Purpose, Unbacked};

use crate::cpu::{Cpu, Fault, Faulted, segment};
use crate::debug::Touch;
use crate::host;
use crate::recent::PageUse;
use crate::requests::{Demand, request};
use crate::tlb::{TlbEntry, tlb_index};
use crate::walk::{Need, Party};

/// How long a vCPU waits for the others to come to a block boundary before it
/// looks at its own requests again.
const PATIENCE: Duration = Duration::from_millis(100);

/// Where an address leads.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// To memory: the host address of its byte.
    Memory(*mut u8),
    /// To a device: the guest-physical address.
    Device(u64),
}

impl Cpu {
    #[inline(always)]
    fn tlb_entry(&self, address: u64) -> &TlbEntry {
        let tlb = &self.tlbs[self.privilege_class()];
        // SAFETY: tlb_index is always less than the number of entries.
        unsafe { tlb.entries.get_unchecked(tlb_index(address)) }
    }

    /// Loads `SIZE` bytes, zero-extended, as the current privilege level may.
    #[inline(always)]
    pub fn load<const SIZE: usize>(&mut self, address: u64) -> Result<u64, Faulted> {
        let entry = self.tlb_entry(address);
        let offset = address.wrapping_sub(entry.read);
        if offset <= PAGE_SIZE - SIZE as u64 {
            // SAFETY: a hit: the page is mapped at `host`, and all bytes are on it.
            Ok(unsafe { host::read::<SIZE>((entry.host + offset) as *const u8) })
        } else {
            self.load_slow(address, SIZE)
        }
    }

    /// Stores the low `SIZE` bytes of `value`.
    #[inline(always)]
    pub fn store<const SIZE: usize>(&mut self, address: u64, value: u64) -> Result<(), Faulted> {
        let entry = self.tlb_entry(address);
        let offset = address.wrapping_sub(entry.write);
        if offset <= PAGE_SIZE - SIZE as u64 {
            // SAFETY: a hit: the page is mapped writable at `host`, and all bytes
            // are on it.
            unsafe { host::write::<SIZE>((entry.host + offset) as *mut u8, value) };
            Ok(())
        } else {
            self.store_slow(address, SIZE, value)
        }
    }

    /// Where `SIZE` bytes can be changed; `None` when they cross pages or belong
    /// to a device (but may be read and written).
    #[inline(always)]
    pub fn pointer<const SIZE: usize>(&mut self, address: u64) -> Result<Option<*mut u8>, Faulted> {
        let entry = self.tlb_entry(address);
        let offset = address.wrapping_sub(entry.write);
        if offset <= PAGE_SIZE - SIZE as u64 {
            Ok(Some((entry.host + offset) as *mut u8))
        } else {
            self.pointer_slow(address, SIZE, Need::Write)
        }
    }

    /// Changes `SIZE` bytes of memory, and flags; neither where it faults. With
    /// `LOCK` atomically: `work` must be one locked instruction then.
    #[inline(always)]
    pub fn modify<const SIZE: usize, const LOCK: bool>(
        &mut self,
        address: u64,
        work: impl Fn(*mut u8, &mut u64),
    ) -> Result<(), Faulted> {
        let before = self.flags;
        let with_flags = |pointer| {
            let mut flags = before;
            work(pointer, &mut flags);
            flags
        };
        self.flags = if LOCK {
            self.locked::<SIZE, _>(address, with_flags)?
        } else if let Some(pointer) = self.pointer::<SIZE>(address)? {
            with_flags(pointer)
        } else {
            self.on_copy::<SIZE, _>(address, with_flags)?
        };
        Ok(())
    }

    /// Does `work` on a copy of `SIZE` bytes that cross pages or are a device's.
    #[cold]
    pub fn on_copy<const SIZE: usize, T>(
        &mut self,
        address: u64,
        work: impl FnOnce(*mut u8) -> T,
    ) -> Result<T, Faulted> {
        let mut copy = self.load_slow(address, SIZE)?;
        let result = work((&raw mut copy).cast());
        self.store_slow(address, SIZE, copy)?;
        Ok(result)
    }

    /// [`Cpu::load`] without the fast path: fills the TLB, crosses pages,
    /// reaches devices.
    #[cold]
    #[inline(never)]
    pub fn load_slow(&mut self, address: u64, size: usize) -> Result<u64, Faulted> {
        self.load_as(address, size, self.party())
    }

    /// [`Cpu::store`] without the fast path.
    #[cold]
    #[inline(never)]
    pub fn store_slow(&mut self, address: u64, size: usize, value: u64) -> Result<(), Faulted> {
        self.store_as(address, size, value, self.party())
    }

    /// [`Cpu::pointer`] without the fast path, for reading or writing.
    #[cold]
    #[inline(never)]
    pub fn pointer_slow(
        &mut self,
        address: u64,
        size: usize,
        need: Need,
    ) -> Result<Option<*mut u8>, Faulted> {
        let by = self.party();
        self.watch(touch(need), address, size)?;
        if crosses(address, size) {
            self.places(address, size, need, by)?;
            return Ok(None);
        }
        Ok(match self.place(address, need, by)? {
            Place::Memory(pointer) => Some(pointer),
            Place::Device(_) => None,
        })
    }

    /// Loads as the supervisor, whatever the privilege level: descriptor tables
    /// and the like.
    pub fn load_system(&mut self, address: u64, size: usize) -> Result<u64, Faulted> {
        self.load_as(address, size, Party::Processor)
    }

    /// Stores as the supervisor.
    pub fn store_system(&mut self, address: u64, size: usize, value: u64) -> Result<(), Faulted> {
        self.store_as(address, size, value, Party::Processor)
    }

    /// Stores as privilege level `cpl` may.
    pub fn store_for(
        &mut self,
        cpl: u8,
        address: u64,
        size: usize,
        value: u64,
    ) -> Result<(), Faulted> {
        let by = if cpl == 3 {
            Party::User
        } else {
            Party::Supervisor
        };
        self.store_as(address, size, value, by)
    }

    fn load_as(&mut self, address: u64, size: usize, by: Party) -> Result<u64, Faulted> {
        self.watch(Touch::Read, address, size)?;
        if !crosses(address, size) {
            return Ok(match self.place(address, Need::Read, by)? {
                // SAFETY: the page is held, and all bytes are on it.
                Place::Memory(pointer) => unsafe { host::read_sized(pointer, size) },
                Place::Device(physical) => self.device_read(physical, size),
            });
        }
        let (first, second) = self.places(address, size, Need::Read, by)?;
        let places = || (0..size).map(|index| (8 * index, part(address, index, first, second)));
        let mut value = 0;
        for (shift, place) in places() {
            if let Place::Memory(pointer) = place {
                // SAFETY: the byte is on a page that is held.
                value |= unsafe { host::read::<1>(pointer) } << shift;
            }
        }
        // Last, for the vCPU is outside meanwhile and memory may be taken away.
        for (shift, place) in places() {
            if let Place::Device(physical) = place {
                value |= self.device_read(physical, 1) << shift;
            }
        }
        Ok(value)
    }

    fn store_as(
        &mut self,
        address: u64,
        size: usize,
        value: u64,
        by: Party,
    ) -> Result<(), Faulted> {
        self.watch(Touch::Write, address, size)?;
        if !crosses(address, size) {
            match self.place(address, Need::Write, by)? {
                // SAFETY: the page is held for writing, and all bytes are on it.
                Place::Memory(pointer) => unsafe { host::write_sized(pointer, size, value) },
                Place::Device(physical) => self.device_write(physical, size, value),
            }
            return Ok(());
        }
        let (first, second) = self.places(address, size, Need::Write, by)?;
        let places = || (0..size).map(|index| (8 * index, part(address, index, first, second)));
        for (shift, place) in places() {
            if let Place::Memory(pointer) = place {
                // SAFETY: the byte is on a page that is held for writing.
                unsafe { host::write::<1>(pointer, value >> shift) };
            }
        }
        // Last, for the vCPU is outside meanwhile and memory may be taken away.
        for (shift, place) in places() {
            if let Place::Device(physical) = place {
                self.device_write(physical, 1, value >> shift);
            }
        }
        Ok(())
    }

    /// Has `work` change the `SIZE` bytes (8 at most) of an access that may cross
    /// pages, in a copy: the pages are held for writing from before the bytes are
    /// read until they are written back. `None`, and nothing done, where one is a
    /// device's.
    pub fn change_across<const SIZE: usize, T>(
        &mut self,
        address: u64,
        work: impl FnOnce(*mut u8) -> T,
    ) -> Result<Option<T>, Faulted> {
        let by = self.party();
        self.watch(Touch::Write, address, SIZE)?;
        let (first, second) = self.places(address, SIZE, Need::Write, by)?;
        let mut pointers = [std::ptr::null_mut::<u8>(); SIZE];
        for (index, pointer) in pointers.iter_mut().enumerate() {
            let Place::Memory(place) = part(address, index, first, second) else {
                return Ok(None);
            };
            *pointer = place;
        }
        let mut copy = 0_u64;
        for (index, &pointer) in pointers.iter().enumerate() {
            // SAFETY: the byte is on a page that is held.
            copy |= unsafe { host::read::<1>(pointer) } << (8 * index);
        }
        let result = work((&raw mut copy).cast());
        for (index, &pointer) in pointers.iter().enumerate() {
            // SAFETY: the byte is on a page that is held for writing.
            unsafe { host::write::<1>(pointer, copy >> (8 * index)) };
        }
        Ok(Some(result))
    }

    /// Both pages of an access that crosses: its first byte's place, and that of
    /// the second page's start.
    fn places(
        &mut self,
        address: u64,
        size: usize,
        need: Need,
        by: Party,
    ) -> Result<(Place, Place), Faulted> {
        let next = self.wrapped(address.wrapping_add(size as u64 - 1)) & !(PAGE_SIZE - 1);
        loop {
            let first = self.place(address, need, by)?;
            let revocations = self.revocations;
            let second = self.place(next, need, by)?;
            // While the second page was fetched the first may have gone.
            if revocations == self.revocations {
                return Ok((first, second));
            }
        }
    }

    /// Where one byte is, held for what is needed; fills the TLB.
    fn place(&mut self, address: u64, need: Need, by: Party) -> Result<Place, Faulted> {
        self.check_canonical(address)?;
        let offset = address & (PAGE_SIZE - 1);
        let write = need == Need::Write;
        let may_open = by == Party::Supervisor && self.user_pages_are_open();
        if may_open {
            // What a system call copies, the program mostly used just before.
            let [supervisor, user] = &mut self.tlbs;
            if let Some(pointer) = supervisor.borrow_user_page(user, address, write) {
                return Ok(Place::Memory(pointer));
            }
        }
        if by == self.party()
            && let Some(pointer) = self.tlbs[by.class()].recall(address, write)
        {
            return Ok(Place::Memory(pointer));
        }
        let walked = self.walk(address, need, by)?;
        let held = match self.memory.held(walked.page, Access::Write) {
            Some(host) if write || walked.writable => Ok((host, true)),
            _ if write => self
                .acquire(walked.page, Access::Write, Purpose::Data, address)
                .map(|host| (host, true)),
            _ => self
                .acquire(walked.page, Access::Read, Purpose::Data, address)
                .map(|host| (host, false)),
        };
        let Ok((host, held_for_writing)) = held else {
            return Ok(Place::Device(walked.page + offset));
        };
        let mut may_write = walked.writable && held_for_writing;
        if may_write && self.machine.holds_code(walked.page) {
            if write {
                self.write_code_page(walked.page)?;
            } else {
                may_write = false;
            }
        }
        if !self.breakpoints.watch_page(address) {
            self.recent
                .add(walked.page, PageUse::of_access(write, may_write));
            let tlb = &mut self.tlbs[by.class()];
            tlb.fill(address, host, walked.page, walked.global, may_write);
            if may_open && walked.user {
                tlb.open_user_page(address);
            }
        }
        // SAFETY: the offset is within the page.
        Ok(Place::Memory(unsafe { host.add(offset as usize) }))
    }

    /// The privilege with which the current instruction accesses memory.
    pub fn party(&self) -> Party {
        if self.mode.is_user() {
            Party::User
        } else {
            Party::Supervisor
        }
    }

    #[inline(always)]
    fn check_canonical(&mut self, address: u64) -> Result<(), Faulted> {
        if is_canonical(address) {
            Ok(())
        } else {
            Err(self.general_protection(0))
        }
    }

    /// Linear addresses have 32 bits outside 64-bit mode.
    pub fn wrapped(&self, address: u64) -> u64 {
        if self.mode.is_64() {
            address
        } else {
            address & 0xffff_ffff
        }
    }

    /// A store to a page from which blocks were decoded.
    fn write_code_page(&mut self, page: u64) -> Result<(), Faulted> {
        // SAFETY: blocks live until the code cache is cleared, which happens only
        // between blocks, and then the pointer is cleared too.
        let own = unsafe { self.block.as_ref() }
            .is_some_and(|block| block.page() == page || block.second_page() == Some(page));
        if own && !self.alone {
            self.fault = Fault {
                abort: true,
                ..Fault::default()
            };
            return Err(Faulted);
        }
        self.code_page_written(page);
        Ok(())
    }

    /// Blocks of `page` die, here at once and elsewhere at the next boundary.
    pub fn code_page_written(&mut self, page: u64) {
        self.machine.code_written(page, Some(&self.requests));
        self.drop_code(page);
    }

    /// A page of memory, held for `access`; may wait for it, outside. `address`:
    /// the linear one that leads there.
    pub fn acquire(
        &mut self,
        page: u64,
        access: Access,
        purpose: Purpose,
        address: u64,
    ) -> Result<*mut u8, Unbacked> {
        if let Some(host) = self.memory.held(page, access) {
            return Ok(host);
        }
        let asker = self.asker(purpose, address);
        loop {
            self.step_outside();
            let held = self.memory.acquire_for(page, access, &asker);
            // Lost again before it could be used? Then once more.
            let lost = self.come_inside(held.is_ok().then_some(page));
            if !lost || held.is_err() {
                return held;
            }
        }
    }

    #[cold]
    fn asker(&self, purpose: Purpose, address: u64) -> Asker {
        let user = self.cpl == 3;
        let rip = match purpose {
            Purpose::Code => address,
            _ => self.linear_rip(self.registers[usize::from(Self::BLOCK_RIP)]),
        };
        Asker {
            vcpu: self.configuration.apic_id,
            user,
            purpose,
            address,
            rip,
            gs_base: if user {
                0
            } else {
                self.segment_bases[segment::GS]
            },
        }
    }

    /// Leaves guest code. From here on others may take what this vCPU has cached, and its
    /// thread may wait; so it first does the deferred work that others may wait for.
    pub fn step_outside(&mut self) {
        self.requests.step_outside();
        if self.is_asked(request::DEFERRED_WORK) {
            self.requests.take(request::DEFERRED_WORK);
            self.memory.do_deferred_work();
        }
    }

    /// Back from outside: does what was asked meanwhile. Whether that took
    /// `watched` away, which was just acquired.
    pub fn come_inside(&mut self, mut watched: Option<u64>) -> bool {
        let mut lost = false;
        loop {
            let asked = self.requests.step_inside();
            if asked {
                lost |= self.answer(watched);
            }
            // Inside, or about to wait for a vCPU that may itself wait for memory.
            if let Some(page) = watched.take()
                && self.memory.unpin_and_check(page)
            {
                self.requests.ask(request::DEFERRED_WORK);
            }
            let request = self.requests.request();
            let excluded = request.load(std::sync::atomic::Ordering::SeqCst) & request::EXCLUSIVE;
            if !asked || excluded == 0 {
                return lost;
            }
            lost = true;
            self.step_outside();
            self.machine.wait_while_excluded();
        }
    }

    /// Carries out all demands; whether `watched` was among them.
    pub fn answer(&mut self, watched: Option<u64>) -> bool {
        let requests = self.requests.clone();
        let (demands, number) = requests.drain();
        let mut lost = false;
        for demand in demands {
            match demand {
                Demand::Page { page, keep_read } => {
                    self.revocations += 1;
                    lost |= watched == Some(page);
                    for tlb in &mut self.tlbs {
                        tlb.revoke(page, keep_read);
                    }
                }
                Demand::Code { page } => self.drop_code(page),
                Demand::Everything => {
                    self.revocations += 1;
                    lost = true;
                    self.flush_everything();
                    self.drop_all_code();
                }
            }
        }
        requests.report(number);
        lost
    }

    /// Makes `page` one that blocks may be decoded from: nobody writes to it
    /// unnoticed. False when it has to be tried again later.
    pub fn mark_code(&mut self, page: u64) -> bool {
        for _ in 0..8 {
            let Some(marking) = self.machine.start_marking(page) else {
                return true;
            };
            for tlb in &mut self.tlbs {
                tlb.revoke(page, true);
            }
            let machine = self.machine.clone();
            let requests = self.requests.clone();
            let demand = Demand::Page {
                page,
                keep_read: true,
            };
            self.step_outside();
            let answered = machine.demand(demand, Some(&requests), PATIENCE);
            self.come_inside(None);
            if answered.is_err() {
                return false;
            }
            if machine.finish_marking(page, marking) {
                return true;
            }
        }
        false
    }

    /// Does `work` while no other vCPU runs; `None` when they did not come out
    /// in time.
    pub fn exclusively<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let machine = self.machine.clone();
        let requests = self.requests.clone();
        self.step_outside();
        let exclusion = machine.exclude(&requests, PATIENCE);
        if exclusion.is_none() {
            self.come_inside(None);
            return None;
        }
        // Nobody else may exclude meanwhile, so only demands can wait.
        if requests.step_inside() {
            self.answer(None);
        }
        Some(work(self))
    }
}

fn touch(need: Need) -> Touch {
    if need == Need::Write {
        Touch::Write
    } else {
        Touch::Read
    }
}

/// Whether an access touches two pages.
#[inline(always)]
pub fn crosses(address: u64, size: usize) -> bool {
    (address & (PAGE_SIZE - 1)) + size as u64 > PAGE_SIZE
}

/// Bytes of a cache line, of every x86-64 processor.
const LINE_SIZE: u64 = 64;

/// Whether an access touches two cache lines, and maybe two pages.
#[inline(always)]
pub fn splits_line(address: u64, size: usize) -> bool {
    (address & (LINE_SIZE - 1)) + size as u64 > LINE_SIZE
}

/// Whether bits 63 to 47 are all the same.
#[inline(always)]
pub fn is_canonical(address: u64) -> bool {
    ((address as i64) << 16 >> 16) as u64 == address
}

fn part(address: u64, index: usize, first: Place, second: Place) -> Place {
    let left = PAGE_SIZE - (address & (PAGE_SIZE - 1));
    let index = index as u64;
    let (place, offset) = if index < left {
        (first, index)
    } else {
        (second, index - left)
    };
    match place {
        // SAFETY: the offset stays on the page of the place.
        Place::Memory(pointer) => Place::Memory(unsafe { pointer.add(offset as usize) }),
        Place::Device(physical) => Place::Device(physical + offset),
    }
}
