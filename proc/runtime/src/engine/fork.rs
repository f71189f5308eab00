//! `fork` of a stretched program.
//!
//! The child stays at home, alone, with a copy of the whole memory. What is here
//! it gets from the kernel, copy on write. What is elsewhere is read (not taken)
//! from its owners before the fork, into a buffer that the child inherits too
//! and copies into place. The engine's lock is held from before to after, so
//! that no page moves between the two.

use weft_dsm::{NodeId, PAGE_BYTES};
use weft_proc::boot::EXIT_INTERNAL;
use weft_proc::layout::{Kind, LIMIT, PAGE};
use weft_proc::message::Message;

use core::sync::atomic::{AtomicUsize, Ordering};

use super::io::{Failure, RUN_MAX};
use super::machine::{ENGINE, Engine, Incoming, STRETCHED};
use super::patience::{LOOK_NS, Patience};
use crate::descriptors;
use crate::own_calls::{self, call};

const O_RDWR: usize = 2;

/// Pages read for a child: their addresses, then their contents.
static FETCHED: AtomicUsize = AtomicUsize::new(0);
static FETCHED_PAGES: AtomicUsize = AtomicUsize::new(0);
static FETCHED_ROOM: AtomicUsize = AtomicUsize::new(0);

fn room_bytes(pages: usize) -> usize {
    (pages * (PAGE_BYTES + 8)).next_multiple_of(PAGE_BYTES)
}

/// Bytes of memory that the kernel can still give, from /proc/meminfo.
fn available_bytes() -> Option<usize> {
    let mut text = [0u8; 1024];
    let path = c"/proc/meminfo";
    let fd = descriptors::open(path.as_ptr().cast(), 0).ok()?;
    let read = own_calls::read_at(fd, &mut text, 0);
    let _ = call!(close, fd);
    let text = core::str::from_utf8(&text[..read.ok()?]).ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))?;
    let kib: usize = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// Before the fork; false: there is no memory for a copy of what is elsewhere.
/// The engine stays locked until [`after_in_parent`] or [`after_in_child`].
pub fn before() -> bool {
    let mut guard = ENGINE.lock();
    let fits = match guard.as_mut() {
        Some(engine) => engine.fetch_for_child(),
        None => true,
    };
    if fits {
        core::mem::forget(guard);
    }
    fits
}

/// The parent goes on.
pub fn after_in_parent() {
    release_buffer();
    // SAFETY: `before` left the lock held for this thread.
    unsafe { ENGINE.unlock() };
}

/// The child puts the pages into place and forgets the aggregate.
pub fn after_in_child() {
    if STRETCHED.load(Ordering::Relaxed) {
        install_fetched();
    }
    release_buffer();
    STRETCHED.store(false, Ordering::Release);
    // SAFETY: `before` left the lock held; the child has one thread. The engine
    // is the parent's: its links must not be ended from here.
    unsafe {
        ENGINE.unlock();
    }
    core::mem::forget(ENGINE.lock().take());
}

fn release_buffer() {
    let buffer = FETCHED.swap(0, Ordering::Relaxed);
    let room = FETCHED_ROOM.swap(0, Ordering::Relaxed);
    FETCHED_PAGES.store(0, Ordering::Relaxed);
    if buffer != 0 {
        // SAFETY: mapped by `fetch_for_child`; nothing refers to it any more.
        unsafe { own_calls::release(buffer as *mut u8, room) };
    }
}

/// Writes through `/proc/self/mem`, which ignores the mappings' protection.
fn install_fetched() {
    let pages = FETCHED_PAGES.load(Ordering::Relaxed);
    if pages == 0 {
        return;
    }
    let path = c"/proc/self/mem";
    let Ok(memory) = descriptors::open(path.as_ptr().cast(), O_RDWR) else {
        crate::log::fatal(EXIT_INTERNAL, "a forked child cannot open /proc/self/mem");
    };
    let buffer = FETCHED.load(Ordering::Relaxed);
    let contents = buffer + FETCHED_ROOM.load(Ordering::Relaxed) / (PAGE_BYTES + 8) * 8;
    let contents = contents.next_multiple_of(8);
    for index in 0..pages {
        // SAFETY: the buffer holds `pages` addresses in front of the contents.
        let address = unsafe { *((buffer + index * 8) as *const u64) };
        let from = contents + index * PAGE_BYTES;
        let written = call!(pwrite64, memory, from, PAGE_BYTES, address);
        if written != Ok(PAGE_BYTES) {
            crate::log::fatal(EXIT_INTERNAL, "a forked child cannot write its memory");
        }
    }
    let _ = call!(close, memory);
}

impl Engine {
    fn fetch_for_child(&mut self) -> bool {
        // What is offered may go while the others are asked.
        self.finish_offers();
        // What moves between two other nodes is at neither for a moment.
        if self.nodes > 2 {
            self.each_anonymous(0, LIMIT, Engine::finish_transfers);
        }
        let elsewhere: usize = (1..self.nodes)
            .map(|node| self.core.owned_pages(NodeId(node as u8)) as usize)
            .sum();
        if elsewhere == 0 {
            return true;
        }
        let room = room_bytes(elsewhere);
        if available_bytes().is_some_and(|available| available < 2 * room) {
            return false;
        }
        let Ok(buffer) = own_calls::allocate(room) else {
            return false;
        };
        FETCHED.store(buffer as usize, Ordering::Relaxed);
        FETCHED_ROOM.store(room, Ordering::Relaxed);
        let count = self.io.layout.regions().len();
        for index in 0..count {
            let region = self.io.layout.regions()[index];
            if region.kind == Kind::Anonymous {
                self.fetch_region(region.start / PAGE, region.end / PAGE);
            }
        }
        true
    }

    fn fetch_region(&mut self, first: u64, end: u64) {
        let mut page = first;
        while page < end {
            let owner = self.owner_elsewhere(page);
            let Some(owner) = owner else {
                page += 1;
                continue;
            };
            let mut count = 1;
            while count < RUN_MAX
                && page + count < end
                && self.owner_elsewhere(page + count) == Some(owner)
            {
                count += 1;
            }
            self.fetch_run(owner, page, count);
            page += count;
        }
    }

    /// The node that has to be asked for a page; none when it is here.
    fn owner_elsewhere(&self, page: u64) -> Option<usize> {
        if self.core.tables.look(page).present() {
            return None;
        }
        let owner = self.core.tables.look_entry(page).owner()?.index();
        (owner != self.me).then_some(owner)
    }

    fn fetch_run(&mut self, owner: usize, page: u64, count: u64) {
        self.io
            .send(owner, &Message::Peek { page, count }.header(0), &[]);
        self.settle();
        let mut patience = Patience::new(self.lease_ns());
        loop {
            match self.receive(LOOK_NS, None) {
                Incoming::Message(
                    from,
                    Message::Peeked {
                        page: first,
                        count: got,
                    },
                    payload,
                ) if from == owner && first == page && got == count => {
                    self.keep_for_child(from, page, count as usize, payload);
                    return;
                }
                Incoming::Message(from, message, _) => self.serve_aside(from, message),
                Incoming::Handled => {}
                // A part of a frame counts as a timeout too: the clock decides.
                Incoming::Timeout | Incoming::Interrupted => {
                    if !patience.lasts() {
                        self.silent_node(Some(owner), "a page for a forked child");
                    }
                    self.look_for_lost_nodes();
                }
            }
        }
    }

    fn keep_for_child(&mut self, from: usize, page: u64, count: usize, payload: &[u8]) {
        let wrong = Failure::Violation(from, "a malformed answer to a peek");
        let Some((marks, mut contents)) = payload.split_at_checked(count) else {
            self.fail(wrong);
        };
        let buffer = FETCHED.load(Ordering::Relaxed);
        let room = FETCHED_ROOM.load(Ordering::Relaxed) / (PAGE_BYTES + 8);
        let start = (buffer + room * 8).next_multiple_of(8);
        for (index, &mark) in marks.iter().enumerate() {
            if mark == 0 {
                continue;
            }
            let kept = FETCHED_PAGES.load(Ordering::Relaxed);
            let Some((bytes, rest)) = contents.split_at_checked(PAGE_BYTES) else {
                self.fail(wrong);
            };
            if kept >= room {
                self.fail(wrong);
            }
            contents = rest;
            // SAFETY: `kept < room`: both places lie in the buffer.
            unsafe {
                *((buffer + kept * 8) as *mut u64) = (page + index as u64) * PAGE_BYTES as u64;
                core::ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    (start + kept * PAGE_BYTES) as *mut u8,
                    PAGE_BYTES,
                );
            }
            FETCHED_PAGES.store(kept + 1, Ordering::Relaxed);
        }
    }

    /// A slice: answers a peek.
    pub fn peek(&mut self, page: u64, count: u64) {
        let mut marks = [0u8; RUN_MAX as usize];
        let count = count.min(RUN_MAX);
        let mut parts: [&[u8]; RUN_MAX as usize + 1] = [&[]; RUN_MAX as usize + 1];
        let mut used = 1;
        let mut length = count as usize;
        for index in 0..count {
            let local = self.core.tables.look(page + index);
            let address = (page + index) * PAGE;
            let readable = self
                .io
                .layout
                .lookup(address)
                .is_some_and(|region| region.prot & 1 != 0);
            if !local.present() || local.zero() {
                continue;
            }
            marks[index as usize] = 1;
            length += PAGE_BYTES;
            if !readable {
                let _ = call!(mprotect, address, PAGE_BYTES, 1);
            }
            // SAFETY: present here and readable, as just made sure.
            parts[used] = unsafe { core::slice::from_raw_parts(address as *const u8, PAGE_BYTES) };
            used += 1;
        }
        parts[0] = &marks[..count as usize];
        let header = Message::Peeked { page, count }.header(length);
        self.io.send(0, &header, &parts[..used]);
        for index in 0..count {
            let address = (page + index) * PAGE;
            let region = self.io.layout.lookup(address);
            if let Some(region) = region.filter(|region| region.prot & 1 == 0) {
                let _ = call!(mprotect, address, PAGE_BYTES, region.prot);
            }
        }
    }
}
