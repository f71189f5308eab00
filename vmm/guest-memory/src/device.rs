//! Guest RAM as a device reaches it: like a vCPU, page by page, where slices share
//! it; as it lies where they do not.

use std::cell::Cell;
use std::iter::FusedIterator;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::guest_memory::{Error, GuestMemorySliceIterator, Result};
use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryMmap, Permissions, VolatileSlice,
};
use weft_vcpu::{Access, Memory, PAGE_SIZE};

use super::Ram;

/// Guest RAM for one queue of a device, used by one thread at a time.
///
/// It is reached in visits ([`DeviceMemory::visit`]), one for each piece of work.
/// No thread waits for a page while it holds another: no visit is made during another;
/// pages that are all here can be held together ([`DeviceMemory::hold`]).
pub struct DeviceMemory {
    mapped: Arc<GuestMemoryMmap>,
    shared: Option<Arc<dyn Memory>>,
    /// No page is waited for.
    held_only: AtomicBool,
}

impl Clone for DeviceMemory {
    /// The same memory, for another queue.
    fn clone(&self) -> Self {
        Self {
            mapped: self.mapped.clone(),
            shared: self.shared.clone(),
            held_only: AtomicBool::new(false),
        }
    }
}

impl DeviceMemory {
    /// RAM that lies on this node alone.
    pub fn whole(ram: &Ram) -> Self {
        Self {
            mapped: ram.shared(),
            shared: None,
            held_only: AtomicBool::new(false),
        }
    }

    /// RAM that is mapped here, of which `shared` says what may be used.
    pub fn shared(ram: &Ram, shared: Arc<dyn Memory>) -> Self {
        let mut memory = Self::whole(ram);
        memory.shared = Some(shared);
        memory
    }

    /// Whether other slices have pages of it: then no system call may be given
    /// addresses in it.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// The mapping, where it is this node's alone.
    #[inline]
    pub fn mapped(&self) -> Option<&GuestMemoryMmap> {
        self.shared.is_none().then_some(&*self.mapped)
    }

    /// For one piece of work, on whatever way it ends.
    #[inline]
    pub fn visit(&self) -> Visit<'_> {
        Visit {
            memory: self,
            pinned: Cell::new(None),
        }
    }

    /// Does `work` in place of the one thread that uses this, without waiting for any
    /// page: an access fails instead.
    pub fn without_waiting<T>(&self, work: impl FnOnce() -> T) -> T {
        self.held_only.store(true, Ordering::Relaxed);
        let done = work();
        self.held_only.store(false, Ordering::Relaxed);
        done
    }

    /// Pins all of `pages` at once, if none of them has to be waited for. While they
    /// are, nothing may be waited for. May be called by any thread.
    pub fn hold(&self, pages: impl IntoIterator<Item = u64>, access: Access) -> Option<Held<'_>> {
        let Some(shared) = &self.shared else {
            return Some(Held(None));
        };
        let pages: Vec<u64> = pages.into_iter().collect();
        let held = shared.acquire_held(&pages, access);
        held.then(|| Held(Some((&**shared, pages))))
    }

    /// Bytes of RAM of one page, which is held.
    pub fn within_page(&self, address: u64, length: usize) -> Result<VolatileSlice<'_, ()>> {
        self.mapped.get_slice(GuestAddress(address), length)
    }

    /// Whether all of these bytes are RAM, and of one region.
    pub fn contains(&self, address: u64, length: usize) -> bool {
        self.mapped.get_slice(GuestAddress(address), length).is_ok()
    }
}

/// Pages that are pinned until this is dropped.
pub struct Held<'a>(Option<(&'a dyn Memory, Vec<u64>)>);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some((memory, pages)) = &self.0 {
            for page in pages {
                memory.unpin(*page);
            }
        }
    }
}

/// Guest RAM during one piece of work.
///
/// Where it is shared, a page is asked for before it is used, and pinned until the
/// next one is asked for or this is dropped.
pub struct Visit<'a> {
    memory: &'a DeviceMemory,
    pinned: Cell<Option<u64>>,
}

impl Visit<'_> {
    /// Asks for a page of `shared`, pinned, and gives up the one before.
    fn pin(&self, shared: &dyn Memory, page: u64, access: Permissions) -> Result<()> {
        self.release();
        let access = match access.has_write() {
            true => Access::Write,
            false => Access::Read,
        };
        let pinned = match self.memory.held_only.load(Ordering::Relaxed) {
            false => shared.acquire(page, access).is_ok(),
            true => shared.acquire_held(&[page], access),
        };
        if !pinned {
            return Err(Error::InvalidGuestAddress(GuestAddress(page)));
        }
        self.pinned.set(Some(page));
        Ok(())
    }

    fn release(&self) {
        if let (Some(page), Some(shared)) = (self.pinned.take(), &self.memory.shared) {
            shared.unpin(page);
        }
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

impl GuestMemory for Visit<'_> {
    type PhysicalMemory = GuestMemoryMmap;
    type Bitmap = ();

    fn check_range(&self, addr: GuestAddress, count: usize, _: Permissions) -> bool {
        GuestMemoryBackend::check_range(&*self.memory.mapped, addr, count)
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, ()>> {
        Ok(Slices {
            visit: self,
            at: addr.0,
            left: count,
            access,
        })
    }
}

/// The pieces of a range: whole regions, or pages where they are shared.
struct Slices<'a> {
    visit: &'a Visit<'a>,
    at: u64,
    left: usize,
    access: Permissions,
}

impl<'a> Slices<'a> {
    fn piece(&self) -> Result<VolatileSlice<'a, ()>> {
        let address = GuestAddress(self.at);
        let mut length = self.left;
        let memory = self.visit.memory;
        if let Some(shared) = &memory.shared {
            let page = self.at & !(PAGE_SIZE - 1);
            length = length.min((page + PAGE_SIZE - self.at) as usize);
            self.visit.pin(&**shared, page, self.access)?;
        } else if let Some((region, start)) = memory.mapped.to_region_addr(address) {
            let end = vm_memory::GuestMemoryRegion::len(region);
            length = length.min((end - vm_memory::Address::raw_value(&start)) as usize);
        }
        memory.mapped.get_slice(address, length)
    }
}

impl<'a> Iterator for Slices<'a> {
    type Item = Result<VolatileSlice<'a, ()>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let piece = self.piece();
        match &piece {
            Ok(slice) => {
                self.left -= slice.len();
                self.at = self.at.wrapping_add(slice.len() as u64);
            }
            Err(_) => self.left = 0,
        }
        Some(piece)
    }
}

impl FusedIterator for Slices<'_> {}
impl<'a> GuestMemorySliceIterator<'a, ()> for Slices<'a> {}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use vm_memory::Bytes;
    use weft_vcpu::Unbacked;

    use super::*;

    /// Writes down what is asked for.
    struct Asked {
        ram: Ram,
        log: Mutex<Vec<String>>,
    }

    impl Memory for Asked {
        fn acquire(&self, page: u64, access: Access) -> std::result::Result<*mut u8, Unbacked> {
            self.log
                .lock()
                .unwrap()
                .push(format!("{access:?} {page:#x}"));
            self.ram.acquire(page, access)
        }

        fn unpin(&self, page: u64) {
            self.log.lock().unwrap().push(format!("free {page:#x}"));
        }

        fn end(&self) -> u64 {
            Memory::end(&self.ram)
        }
    }

    #[test]
    fn pages_are_asked_for_one_after_the_other() {
        let ram = Ram::new(4 << 20).unwrap();
        let log = Mutex::default();
        let asked = Arc::new(Asked {
            ram: ram.clone(),
            log,
        });
        let memory = DeviceMemory::shared(&ram, asked.clone());
        let visit = memory.visit();
        visit.write_slice(&[7; 8], GuestAddress(0x1ffc)).unwrap();
        let mut read = [0; 4];
        visit.read_slice(&mut read, GuestAddress(0x2000)).unwrap();
        assert_eq!(read, [7; 4]);
        drop(visit);
        let visit = memory.visit();
        assert!(visit.read_slice(&mut read, GuestAddress(4 << 20)).is_err());
        let log = asked.log.lock().unwrap().join(", ");
        assert_eq!(
            log,
            "Write 0x1000, free 0x1000, Write 0x2000, free 0x2000, Read 0x2000, free 0x2000, \
             Read 0x400000"
        );
    }

    #[test]
    fn a_node_with_all_memory_asks_nobody() {
        let ram = Ram::new(super::super::DEVICE_HOLE + (4 << 20)).unwrap();
        let memory = DeviceMemory::whole(&ram);
        let address = GuestAddress(super::super::FOUR_GIB);
        let visit = memory.visit();
        visit.write_obj(9_u64, address).unwrap();
        assert_eq!(visit.read_obj::<u64>(address).unwrap(), 9);
        let hole = GuestAddress(super::super::DEVICE_HOLE - 4);
        assert!(visit.write_slice(&[0; 8], hole).is_err());
    }
}
