//! One split virtqueue (2.7), with everything checked that a driver may have
//! got wrong before a device sees it.
//!
//! A [`Chain`] that comes out has: at least one descriptor, an end, readable
//! descriptors before writable ones, no empty one, every byte in guest RAM, and
//! no byte both readable and writable. Bytes that appear twice on the same side
//! are allowed: direct I/O of a guest's program may well name a page twice.

use std::num::Wrapping;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use serde::{Deserialize, Serialize};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;
use weft_guest_memory::{DeviceMemory, Held};
use weft_vcpu::{Access, PAGE_SIZE};

use super::error::DeviceError;
use super::interrupt::Interrupt;
use weft_guest_memory::WriteObserver;

/// Descriptors in a chain, those of an indirect table included: what QEMU
/// allows, too, and no more than one vectored system call takes.
pub const CHAIN_MAX: usize = 1024;
/// VIRTQ_AVAIL_F_NO_INTERRUPT (2.7.6).
const NO_INTERRUPT: u16 = 1;
/// Pages that are held together while data is copied.
pub const HELD_MAX: usize = 16;

/// A piece of guest RAM. It was checked: all of it lies in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes; not 0.
    pub length: u32,
}

impl Segment {
    fn end(&self) -> u64 {
        self.address + u64::from(self.length)
    }
}

/// A request: what the driver hands over, and where it wants the answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// First descriptor: what is pushed back.
    pub head: u16,
    /// What the device may read.
    pub readable: Vec<Segment>,
    /// What the device may write.
    pub writable: Vec<Segment>,
}

/// Bytes in all.
pub fn total(segments: &[Segment]) -> u64 {
    segments
        .iter()
        .map(|segment| u64::from(segment.length))
        .sum()
}

/// The part of `segments` that starts `skip` bytes in and has `length` bytes at most.
pub fn part(segments: &[Segment], mut skip: u64, mut length: u64) -> Vec<Segment> {
    let mut parts = Vec::new();
    for segment in segments {
        let whole = u64::from(segment.length);
        let skipped = skip.min(whole);
        skip -= skipped;
        let taken = (whole - skipped).min(length);
        length -= taken;
        if taken > 0 {
            parts.push(Segment {
                address: segment.address + skipped,
                length: taken as u32,
            });
        }
    }
    parts
}

/// The pages of `segments`, in order.
pub fn pages(segments: &[Segment]) -> Vec<u64> {
    let of = |segment: &Segment| {
        let first = segment.address / PAGE_SIZE;
        first..(segment.end() - 1) / PAGE_SIZE + 1
    };
    let mut pages: Vec<u64> = segments
        .iter()
        .flat_map(of)
        .map(|page| page * PAGE_SIZE)
        .collect();
    pages.dedup();
    pages
}

/// The page that a byte is in.
fn page_of(address: u64) -> u64 {
    address & !(PAGE_SIZE - 1)
}

/// A piece of a copy that lies in one page: where, and which bytes of the data.
type InPage = (u64, Range<usize>);

/// The pieces of `parts` by pages, where pages may leave; else as they are.
fn by_pages(memory: &DeviceMemory, parts: &[Segment]) -> Vec<InPage> {
    let page = match memory.is_shared() {
        true => PAGE_SIZE,
        false => 1 << 32,
    };
    let mut pieces = Vec::with_capacity(parts.len());
    let mut done = 0;
    for part in parts {
        let mut at = part.address;
        while at < part.end() {
            let end = part.end().min((at | (page - 1)) + 1);
            let length = (end - at) as usize;
            pieces.push((at, done..done + length));
            done += length;
            at = end;
        }
    }
    pieces
}

/// Pins the pages of some pieces, if none of them has to be waited for.
fn hold<'a>(memory: &'a DeviceMemory, pieces: &[InPage], access: Access) -> Option<Held<'a>> {
    let pages = pieces.iter().map(|(at, _)| at & !(PAGE_SIZE - 1));
    memory.hold(pages, access)
}

/// Copies the pieces of `parts` one after the other, with `one`, which is told whether
/// the piece's page is held: how many bytes.
fn copy(
    memory: &DeviceMemory,
    parts: &[Segment],
    access: Access,
    mut one: impl FnMut(u64, Range<usize>, bool) -> bool,
) -> usize {
    let mut done = 0;
    for pieces in by_pages(memory, parts).chunks(HELD_MAX) {
        let held = hold(memory, pieces, access);
        let copied = pieces
            .iter()
            .take_while(|(at, range)| one(*at, range.clone(), held.is_some()))
            .count();
        if let Some((_, last)) = pieces[..copied].last() {
            done = last.end;
        }
        if copied < pieces.len() {
            break;
        }
    }
    done
}

/// Copies bytes out of `segments`, from `skip` bytes in: how many there were.
pub fn copy_out(memory: &DeviceMemory, segments: &[Segment], skip: u64, data: &mut [u8]) -> usize {
    let parts = part(segments, skip, data.len() as u64);
    copy(memory, &parts, Access::Read, |at, range, held| {
        let to = &mut data[range];
        match held {
            true => memory
                .within_page(at, to.len())
                .is_ok_and(|from| from.read_slice(to, 0).is_ok()),
            false => memory.visit().read_slice(to, GuestAddress(at)).is_ok(),
        }
    })
}

/// Copies bytes into `segments`, from `skip` bytes in: how many fitted.
pub fn copy_in(memory: &DeviceMemory, segments: &[Segment], skip: u64, data: &[u8]) -> usize {
    let parts = part(segments, skip, data.len() as u64);
    copy(memory, &parts, Access::Write, |at, range, held| {
        let from = &data[range];
        match held {
            true => put(memory, at, from),
            false => memory.visit().write_slice(from, GuestAddress(at)).is_ok(),
        }
    })
}

/// Copies all of `data` into `segments`, from `skip` bytes in, if no page has to be
/// waited for; else a part of it may be there. May be called by any thread.
pub fn copy_in_held(memory: &DeviceMemory, segments: &[Segment], skip: u64, data: &[u8]) -> bool {
    let parts = part(segments, skip, data.len() as u64);
    let pieces = by_pages(memory, &parts);
    total(&parts) == data.len() as u64
        && pieces.chunks(HELD_MAX).all(|pieces| {
            let held = hold(memory, pieces, Access::Write);
            held.is_some()
                && pieces
                    .iter()
                    .all(|(at, range)| put(memory, *at, &data[range.clone()]))
        })
}

fn put(memory: &DeviceMemory, address: u64, data: &[u8]) -> bool {
    memory
        .within_page(address, data.len())
        .is_ok_and(|to| to.write_slice(data, 0).is_ok())
}

/// Where a queue is and how far it got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    /// Entries.
    pub size: u16,
    /// Whether the driver enabled it.
    pub enabled: bool,
    /// Descriptor table.
    pub descriptors: u64,
    /// Available ring.
    pub driver: u64,
    /// Used ring.
    pub device: u64,
    /// Next entry of the available ring.
    pub next_available: u16,
    /// Next entry of the used ring.
    pub next_used: u16,
}

/// What a ring is part of.
#[derive(Clone)]
pub struct RingParts {
    /// Guest RAM.
    pub memory: Arc<DeviceMemory>,
    /// Hears of writes.
    pub observer: Option<Arc<dyn WriteObserver>>,
    /// To the driver.
    pub interrupt: Arc<Interrupt>,
    /// From the driver.
    pub kick: Arc<EventFd>,
    /// Chains taken, over all rings of the device.
    pub taken: Arc<AtomicU64>,
}

/// A virtqueue that the driver has enabled.
pub struct Ring {
    queue: Queue,
    index: u16,
    /// What `next_used` was when the driver was last told, or not.
    told: Wrapping<u16>,
    parts: RingParts,
}

impl Ring {
    /// The queue that the driver described, or why it is invalid.
    pub fn new(
        index: u16,
        max_size: u16,
        event_index: bool,
        state: &QueueState,
        parts: RingParts,
    ) -> Result<Self, DeviceError> {
        let error = |reason: String| DeviceError::Queue { index, reason };
        let queue = Queue::try_from(virtio_queue::QueueState {
            max_size,
            next_avail: state.next_available,
            next_used: state.next_used,
            event_idx_enabled: event_index,
            size: state.size,
            ready: state.enabled,
            desc_table: state.descriptors,
            avail_ring: state.driver,
            used_ring: state.device,
        })
        .map_err(|reason| error(reason.to_string()))?;
        if !queue.is_valid(&parts.memory.visit()) {
            return Err(error("its rings are not in RAM".into()));
        }
        Ok(Self {
            told: Wrapping(queue.next_used()),
            queue,
            index,
            parts,
        })
    }

    /// How far it got.
    pub fn state(&self) -> QueueState {
        let state = self.queue.state();
        QueueState {
            size: state.size,
            enabled: state.ready,
            descriptors: state.desc_table,
            driver: state.avail_ring,
            device: state.used_ring,
            next_available: state.next_avail,
            next_used: state.next_used,
        }
    }

    /// Continues at these places: another thread, or another slice, has served the queue
    /// up to there.
    pub fn continue_at(&mut self, next_available: u16, next_used: u16) {
        self.queue.set_next_avail(next_available);
        self.queue.set_next_used(next_used);
        self.told = Wrapping(next_used);
    }

    /// Which queue of the device.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Entries.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Guest RAM.
    pub fn memory(&self) -> &Arc<DeviceMemory> {
        &self.parts.memory
    }

    /// What the driver kicks with.
    pub fn kick(&self) -> &EventFd {
        &self.parts.kick
    }

    /// The way to the driver.
    pub fn interrupt(&self) -> &Interrupt {
        &self.parts.interrupt
    }

    /// The next request.
    pub fn pop(&mut self) -> Result<Option<Chain>, DeviceError> {
        let index = self.index;
        let visit = self.parts.memory.visit();
        let mut available = self
            .queue
            .iter(&visit)
            .map_err(|error| DeviceError::Queue {
                index,
                reason: error.to_string(),
            })?;
        let Some(descriptors) = available.next() else {
            return Ok(None);
        };
        self.parts.taken.fetch_add(1, Ordering::Relaxed);
        let head = descriptors.head_index();
        let chain = gather(head, descriptors, &self.parts.memory);
        chain.map(Some).map_err(|reason| DeviceError::Chain {
            index,
            head,
            reason,
        })
    }

    /// The last request was not used after all: it is the next one again.
    pub fn unpop(&mut self) {
        self.parts.taken.fetch_sub(1, Ordering::Relaxed);
        self.queue.go_to_previous_position();
    }

    /// Gives a request back, `written` bytes of it filled.
    pub fn push(&mut self, chain: &Chain, written: u32) -> Result<(), DeviceError> {
        self.observe(chain);
        let visit = self.parts.memory.visit();
        let pushed = self.queue.add_used(&visit, chain.head, written);
        pushed.map_err(|error| DeviceError::Queue {
            index: self.index,
            reason: error.to_string(),
        })
    }

    /// Gives several requests back so that the driver sees either none or all:
    /// the buffers of one frame (5.1.6.4).
    pub fn push_all(&mut self, chains: &[(Chain, u32)]) -> Result<(), DeviceError> {
        let Some(((last, written), others)) = chains.split_last() else {
            return Ok(());
        };
        let size = self.queue.size();
        for (chain, written) in others {
            self.observe(chain);
            let next = self.queue.next_used();
            let entry = self.queue.used_ring() + 4 + 8 * u64::from(next % size);
            let element = [u32::from(chain.head).to_le(), written.to_le()];
            // Not to be seen before the index moves, at the last one.
            let put = self
                .memory()
                .visit()
                .write_obj(element, GuestAddress(entry));
            put.map_err(|error| DeviceError::Queue {
                index: self.index,
                reason: error.to_string(),
            })?;
            self.queue.set_next_used(next.wrapping_add(1));
        }
        self.push(last, *written)
    }

    /// The device changed guest memory that no buffer of a chain to be pushed has.
    pub fn wrote(&self, address: u64, length: u64) {
        if let Some(observer) = &self.parts.observer {
            observer.written(address, length);
        }
    }

    fn observe(&self, chain: &Chain) {
        if let Some(observer) = &self.parts.observer {
            for segment in &chain.writable {
                observer.written(segment.address, u64::from(segment.length));
            }
        }
    }

    /// Pages of which [`Ring::push`] of a chain, with its status, writes the first and
    /// [`Ring::signal`] reads the last.
    pub fn pages_of_answer(&self, chain: &Chain) -> (Vec<u64>, u64) {
        let (size, used) = (u64::from(self.queue.size()), self.queue.used_ring());
        let next = u64::from(self.queue.next_used()) % size;
        let entry = used + 4 + 8 * next;
        let mut written = vec![used, entry, entry + 7];
        if let Some(last) = chain.writable.last() {
            written.push(last.end() - 1);
        }
        let written = written.into_iter().map(page_of).collect();
        (written, self.page_of_wish())
    }

    /// Pages of which [`Ring::push`] of any chains writes the first and
    /// [`Ring::signal`] reads the last.
    pub fn pages_of_answers(&self) -> (impl Iterator<Item = u64> + use<>, u64) {
        let (size, used) = (u64::from(self.queue.size()), self.queue.used_ring());
        let last = page_of(used + 4 + 8 * size - 1);
        let written = (page_of(used)..=last).step_by(PAGE_SIZE as usize);
        (written, self.page_of_wish())
    }

    /// The page where the driver says what it wants to hear of.
    fn page_of_wish(&self) -> u64 {
        let event = match self.queue.event_idx_enabled() {
            true => 4 + 2 * u64::from(self.queue.size()),
            false => 0,
        };
        page_of(self.queue.avail_ring() + event)
    }

    /// Tells the driver of what was pushed, if it wants to hear (2.7.7, 2.7.10).
    pub fn signal(&mut self) {
        let used = Wrapping(self.queue.next_used());
        let before = std::mem::replace(&mut self.told, used);
        if used == before {
            return;
        }
        // The driver sets its wish, then looks at the used index once more; we
        // the other way round.
        fence(Ordering::SeqCst);
        let ring = self.queue.avail_ring();
        let wanted = if self.queue.event_idx_enabled() {
            let event = Wrapping(self.driver_word(ring + 4 + 2 * u64::from(self.queue.size())));
            used - event - Wrapping(1) < used - before
        } else {
            self.driver_word(ring) & NO_INTERRUPT == 0
        };
        if wanted {
            self.parts.interrupt.queue(self.index);
        }
    }

    /// A word of the available ring, which was checked to be in RAM.
    fn driver_word(&self, address: u64) -> u16 {
        let visit = self.memory().visit();
        let word = visit.load(GuestAddress(address), Ordering::Relaxed);
        word.map_or(0, u16::from_le)
    }

    /// The driver need not kick for now.
    pub fn kicks_off(&mut self) {
        // Only a hint, and into checked RAM.
        let _ = self.queue.disable_notification(&self.parts.memory.visit());
    }

    /// The driver shall kick. True: there is something already.
    pub fn kicks_on(&mut self) -> Result<bool, DeviceError> {
        let more = self.queue.enable_notification(&self.parts.memory.visit());
        more.map_err(|error| DeviceError::Queue {
            index: self.index,
            reason: error.to_string(),
        })
    }

    /// How far the driver's requests were taken: the index of the next.
    pub fn next_available(&self) -> u16 {
        self.queue.next_avail()
    }

    /// The driver shall kick when it offers more than what was there up to the
    /// index `seen`, whether taken or not. True: it has already.
    pub fn kicks_on_beyond(&mut self, seen: u16) -> Result<bool, DeviceError> {
        let next = self.queue.next_avail();
        self.queue.set_next_avail(seen);
        let more = self.kicks_on();
        self.queue.set_next_avail(next);
        more
    }

    /// Copies bytes out of `segments`, from `skip` bytes in: how many there were.
    pub fn read(&self, segments: &[Segment], skip: u64, data: &mut [u8]) -> usize {
        copy_out(self.memory(), segments, skip, data)
    }

    /// Copies bytes into `segments`, from `skip` bytes in: how many fitted.
    pub fn write(&self, segments: &[Segment], skip: u64, data: &[u8]) -> usize {
        copy_in(self.memory(), segments, skip, data)
    }
}

/// Checks a chain, descriptor by descriptor.
fn gather(
    head: u16,
    descriptors: impl Iterator<Item = Descriptor>,
    memory: &DeviceMemory,
) -> Result<Chain, &'static str> {
    let mut chain = Chain {
        head,
        ..Chain::default()
    };
    let mut unfinished = true;
    for descriptor in descriptors {
        let segment = Segment {
            address: descriptor.addr().0,
            length: descriptor.len(),
        };
        if segment.length == 0 {
            return Err("an empty buffer");
        }
        if !memory.contains(segment.address, segment.length as usize) {
            return Err("a buffer outside of RAM");
        }
        if descriptor.is_write_only() {
            chain.writable.push(segment);
        } else if chain.writable.is_empty() {
            chain.readable.push(segment);
        } else {
            return Err("a readable buffer after a writable one");
        }
        if chain.readable.len() + chain.writable.len() > CHAIN_MAX {
            return Err("a chain of too many buffers");
        }
        unfinished = descriptor.has_next();
    }
    if unfinished {
        return Err("a chain that loops, or leaves its table");
    }
    if crosses(&chain) {
        return Err("buffers to read and to write that overlap");
    }
    Ok(chain)
}

/// Whether a byte is both readable and writable.
fn crosses(chain: &Chain) -> bool {
    let few = chain.readable.len() * chain.writable.len() <= 64;
    if few {
        let meets =
            |one: &Segment, other: &Segment| one.address < other.end() && other.address < one.end();
        return chain
            .readable
            .iter()
            .any(|one| chain.writable.iter().any(|other| meets(one, other)));
    }
    let side = |segments: &[Segment], writable| {
        let tag = move |segment: &Segment| (segment.address, segment.end(), writable);
        segments.iter().map(tag).collect::<Vec<_>>()
    };
    let mut all = side(&chain.readable, false);
    all.extend(side(&chain.writable, true));
    all.sort_unstable();
    // Furthest end of either side so far.
    let mut ends = [0, 0];
    all.iter().any(|(start, end, writable)| {
        let crossed = *start < ends[usize::from(!*writable)];
        let own = &mut ends[usize::from(*writable)];
        *own = (*own).max(*end);
        crossed
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicI64;

    use weft_vcpu::{Memory, Unbacked};

    use super::*;
    use crate::interrupt::FarRegisters;
    use weft_guest_memory::Ram;

    fn segment(address: u64, length: u32) -> Segment {
        Segment { address, length }
    }

    /// Counts pages that were asked for and not given up.
    struct Counted {
        ram: Ram,
        pinned: AtomicI64,
    }

    impl Memory for Counted {
        fn acquire(&self, page: u64, access: Access) -> Result<*mut u8, Unbacked> {
            let host = self.ram.acquire(page, access)?;
            self.pinned.fetch_add(1, Ordering::Relaxed);
            Ok(host)
        }

        fn unpin(&self, _: u64) {
            self.pinned.fetch_sub(1, Ordering::Relaxed);
        }

        fn end(&self) -> u64 {
            Memory::end(&self.ram)
        }
    }

    /// A driver that is told nothing.
    struct Deaf;

    impl FarRegisters for Deaf {
        fn queue(&self, _: u16) {}
        fn configuration(&self) {}
        fn fail(&self, _: &str) {}
    }

    /// A queue of 16 at 4096, 8192 and 12288 in shared memory, with the event
    /// index.
    fn ring() -> (Ring, Arc<Counted>) {
        let ram = Ram::new(4 << 20).unwrap();
        let counted = Arc::new(Counted {
            ram: ram.clone(),
            pinned: AtomicI64::new(0),
        });
        let parts = RingParts {
            memory: Arc::new(DeviceMemory::shared(&ram, counted.clone())),
            observer: None,
            interrupt: Arc::new(Interrupt::far(Arc::new(Deaf), "ring")),
            kick: Arc::new(EventFd::new(0).unwrap()),
            taken: Arc::default(),
        };
        let state = QueueState {
            size: 16,
            enabled: true,
            descriptors: 0x1000,
            driver: 0x2000,
            device: 0x3000,
            ..QueueState::default()
        };
        (Ring::new(0, 16, true, &state, parts).unwrap(), counted)
    }

    #[test]
    fn no_page_stays_pinned_whatever_the_driver_does() {
        let (mut ring, counted) = ring();
        let ram = counted.ram.clone();
        let pinned = || counted.pinned.load(Ordering::Relaxed);
        let offer = |index: u16| ram.guest().write_obj(index, GuestAddress(0x2002)).unwrap();
        assert!(ring.pop().unwrap().is_none());
        assert_eq!(pinned(), 0, "an empty queue");
        offer(500);
        assert!(matches!(ring.pop(), Err(DeviceError::Queue { .. })));
        assert_eq!(pinned(), 0, "500 requests in a queue of 16");
        offer(1);
        assert!(matches!(ring.pop(), Err(DeviceError::Chain { .. })));
        assert_eq!(pinned(), 0, "an empty buffer");
        let chain = Chain::default();
        assert!(ring.push(&Chain { head: 99, ..chain }, 0).is_err());
        assert_eq!(pinned(), 0, "an answer to no request");
        let chains = [(Chain::default(), 1), (Chain::default(), 1)];
        ring.push_all(&chains).unwrap();
        ring.signal();
        assert_eq!(pinned(), 0, "answers");
        ring.kicks_off();
        ring.kicks_on().unwrap();
        assert_eq!(pinned(), 0, "kicks");
        let mut bytes = [0; 64];
        let outside = [segment(0x4000, 8), segment(16 << 20, 8)];
        assert_eq!(ring.read(&outside, 0, &mut bytes), 8);
        assert_eq!(ring.write(&outside, 0, &bytes[..16]), 8);
        assert_eq!(pinned(), 0, "buffers that end outside of memory");
    }

    #[test]
    fn parts_of_segments() {
        let segments = [segment(100, 10), segment(500, 20)];
        assert_eq!(total(&segments), 30);
        assert_eq!(part(&segments, 0, 30), segments);
        assert_eq!(part(&segments, 4, 10), [segment(104, 6), segment(500, 4)]);
        assert_eq!(part(&segments, 12, 100), [segment(502, 18)]);
        assert!(part(&segments, 30, 1).is_empty());
    }

    #[test]
    fn crossing_is_found_whether_few_or_many() {
        for many in [1, 100] {
            let readable: Vec<_> = (0..many).map(|at| segment(at * 100, 50)).collect();
            let mut chain = Chain {
                head: 0,
                readable,
                writable: (0..many).map(|at| segment(at * 100 + 50, 50)).collect(),
            };
            assert!(!crosses(&chain));
            chain.writable.push(segment(49, 1));
            assert!(crosses(&chain));
        }
    }
}
