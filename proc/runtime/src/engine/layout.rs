//! Keeping the layout alike on all nodes.
//!
//! Home changes it, natively first, and announces each change; links are in
//! order, so whatever home sends later arrives in the new layout. Pages that are
//! thrown away (`munmap`, `MADV_DONTNEED`) may have copies, owners and messages
//! elsewhere: home then waits for every node's `Synced` before it discards its
//! own records, which the protocol asks for (the manager is last). A range that
//! only home has anything of needs no wait when there are two nodes.

use weft_dsm::{Event, Page, Phase};
use weft_pager::space::Mode;
use weft_pager::uffd::UffdError;
use weft_proc::layout::{Kind, PAGE, Region};
use weft_proc::message::Message;

use super::io::Failure;
use super::machine::Engine;
use crate::own_calls::call;

const MAP_PRIVATE: usize = 2;
const MAP_FIXED: usize = 0x10;
const MAP_ANONYMOUS: usize = 0x20;
const MAP_NORESERVE: usize = 0x4000;
const ADVICE_DONT_NEED: usize = 4;

impl Engine {
    /// Sends a message to every other node.
    pub fn announce(&mut self, message: &Message) {
        for node in 1..self.nodes {
            if node != self.me && self.io.links[node].is_some() {
                self.io.send(node, &message.header(0), &[]);
            }
        }
    }

    /// Home: a region was mapped natively.
    pub fn home_mapped(&mut self, region: &Region) {
        if !self.io.layout.is_free(region.start, region.end) {
            // What is there natively is the new mapping's already.
            let (start, length) = (region.start, region.length());
            self.home_gone(start, region.end, Message::Discard { start, length });
        }
        let entered = self.io.layout.insert(*region);
        assert!(entered.is_ok(), "the space checked the layout before");
        self.set_policy(region);
        self.announce(&Message::Map {
            start: region.start,
            length: region.length(),
            protection: region.prot,
            kind: region.kind as u32,
        });
        if region.kind == Kind::Anonymous {
            self.attach(region.start, region.end);
            self.adopt_present(region.start, region.end);
        }
        self.settle();
    }

    fn set_policy(&mut self, region: &Region) {
        let policy = Engine::page_policy(region.kind);
        self.core
            .tables
            .set_policy(region.start / PAGE, region.length() / PAGE, policy);
    }

    /// Puts a range of anonymous memory under the pager.
    pub fn attach(&mut self, start: u64, end: u64) {
        let pages = ((end - start) / PAGE) as usize;
        // SAFETY: the fault handler resolves every page of the range from now
        // on: it is in the layout.
        let done = unsafe { self.io.space.register(start as usize, pages) };
        self.check("register", start, done);
    }

    fn check(&mut self, what: &'static str, start: u64, done: Result<(), UffdError>) {
        if let Err(error) = done {
            self.fail(Failure::Memory(what, start / PAGE, error));
        }
    }

    /// Home: pages that are in memory already (copied in from a file, or touched
    /// before the stretch) become home's.
    pub fn adopt_present(&mut self, start: u64, end: u64) {
        let mut found = [(0u64, 0u64); 64];
        let mut from = start;
        while from < end {
            let mut count = 0;
            let mut next = end;
            let pages = ((end - from) / PAGE) as usize;
            self.io
                .space
                .present(from as usize, pages, |address, pages| {
                    if count < found.len() {
                        found[count] = (address as u64 / PAGE, pages as u64);
                        count += 1;
                    } else if next == end {
                        next = address as u64;
                    }
                });
            for &(first, pages) in &found[..count] {
                self.adopt(first, pages);
            }
            from = next;
        }
    }

    fn adopt(&mut self, first: u64, pages: u64) {
        let mut adopted = 0;
        for page in first..first + pages {
            if self.core.tables.look_entry(page).untouched() {
                self.step(Event::Adopt { page: Page(page) });
                adopted += 1;
            }
            self.working_set.touch(page);
        }
        self.io.count_resident(adopted);
    }

    /// Home: a range is about to be unmapped.
    pub fn home_unmapped(&mut self, start: u64, end: u64) {
        self.home_gone(
            start,
            end,
            Message::Unmap {
                start,
                length: end - start,
            },
        );
        let removed = self.io.layout.remove(start, end);
        assert!(removed.is_ok(), "the space has as many regions");
        self.core.tables.set_policy(
            start / PAGE,
            (end - start) / PAGE,
            weft_dsm::Policy::Invalidate,
        );
    }

    /// Home: the contents of a range are thrown away.
    pub fn home_discard(&mut self, start: u64, end: u64) {
        self.home_gone(
            start,
            end,
            Message::Discard {
                start,
                length: end - start,
            },
        );
        self.each_anonymous(start, end, |engine, start, end| {
            let pages = ((end - start) / PAGE) as usize;
            // SAFETY: the program throws them away.
            let done = unsafe { engine.io.space.drop(start as usize, pages) };
            engine.check("discard", start, done);
        });
    }

    fn home_gone(&mut self, start: u64, end: u64, message: Message) {
        self.finish_requests(start, end);
        // With a third node even a range that only home has needs the wait:
        // another slice could touch it anew and push it to one that the discard
        // has not reached (`weft_dsm::check` finds the case).
        let wait = self.nodes > 2 || self.is_shared(start, end);
        self.announce(&message);
        if wait {
            self.synchronise();
        }
        self.discard(start, end);
    }

    /// Waits until none of this node's own requests in a range is under way.
    fn finish_requests(&mut self, start: u64, end: u64) {
        for page in start / PAGE..end / PAGE {
            if self.core.tables.look(page).pending().is_some() {
                self.wait_until("a page on its way", |engine| {
                    engine.core.tables.look(page).pending().is_none()
                });
            }
        }
    }

    /// Waits until no page of a range is moving between any nodes.
    pub fn finish_transfers(&mut self, start: u64, end: u64) {
        let idle = |engine: &Engine, page| {
            let entry = engine.core.tables.look_entry(page);
            entry.phase() == Phase::Idle && entry.waiting() == 0
        };
        for page in start / PAGE..end / PAGE {
            if !idle(self, page) {
                self.wait_until("a page on its way", |engine| idle(engine, page));
            }
        }
    }

    /// Whether another node has, or may be about to get, a page of the range.
    fn is_shared(&self, start: u64, end: u64) -> bool {
        (start / PAGE..end / PAGE).any(|page| {
            let entry = self.core.tables.look_entry(page);
            let elsewhere = entry.owner().is_some_and(|owner| owner.index() != 0);
            elsewhere
                || entry.copyset() != 0
                || entry.phase() != Phase::Idle
                || entry.waiting() != 0
        })
    }

    /// Waits until every node has done what it was told.
    pub fn synchronise(&mut self) {
        self.unsynced = 0;
        for node in 1..self.nodes {
            if self.io.links[node].is_some() {
                self.unsynced |= 1 << node;
                self.io.send(node, &Message::Sync.header(0), &[]);
            }
        }
        self.settle();
        self.wait_until("the other nodes' layout", |engine| {
            let alive = (1..engine.nodes)
                .filter(|&node| engine.io.links[node].is_some())
                .fold(0, |set, node| set | 1 << node);
            engine.unsynced & alive == 0
        });
    }

    /// A node has done what it was told.
    pub fn synced(&mut self, node: usize) {
        self.unsynced &= !(1 << node);
    }

    /// This node's records of a range become untouched.
    fn discard(&mut self, start: u64, end: u64) {
        let mut resident = 0;
        for page in start / PAGE..end / PAGE {
            let local = self.core.tables.look(page);
            resident += i64::from(local.present());
            if local.pending().is_some() {
                self.requests = self.requests.saturating_sub(1);
            }
            self.step(Event::Discard { page: Page(page) });
        }
        // Read-only files at home are resident without being counted.
        if self.is_home() {
            resident -= self.native_pages(start, end);
        }
        self.io.count_resident(-resident);
        self.settle();
    }

    fn native_pages(&self, start: u64, end: u64) -> i64 {
        let mut count = 0;
        for region in self.io.layout.overlaps(start, end) {
            if region.kind == Kind::FileReadOnly {
                let (first, last) = (region.start.max(start), region.end.min(end));
                let pages = first / PAGE..last / PAGE;
                count += pages
                    .filter(|&page| self.core.tables.look(page).present())
                    .count() as i64;
            }
        }
        count
    }

    /// Home: the protection of a range was changed natively.
    pub fn home_protected(&mut self, start: u64, end: u64, protection: u32) {
        // A hole ends the change, as in the native call.
        let _ = self.io.layout.protect(start, end, protection);
        self.announce(&Message::Protect {
            start,
            length: end - start,
            protection,
        });
        self.settle();
    }

    /// Home: before a range moves: nothing may be under way in it, between other
    /// nodes either, since messages name pages by their place. The pager lets
    /// go of it: a kernel that moves several mappings at once stops half way
    /// when it meets one that userfaultfd watches.
    pub fn home_moving(&mut self, start: u64, end: u64) {
        self.finish_requests(start, end);
        self.finish_transfers(start, end);
        if self.nodes > 2 || self.is_shared(start, end) {
            self.synchronise();
        }
        self.each_anonymous(start, end, |engine, start, end| {
            let pages = ((end - start) / PAGE) as usize;
            let done = engine.io.space.unregister(start as usize, pages);
            engine.check("unregister", start, done);
        });
    }

    /// Home: what the kernel forgets when the pager lets go of a range, or when
    /// it moves: that it is watched, and where writes signal.
    pub fn watch_again(&mut self, start: u64, end: u64) {
        self.each_anonymous(start, end, |engine, start, end| {
            engine.attach(start, end);
            engine.protect_again(start, end);
        });
        self.settle();
    }

    pub fn each_anonymous(&mut self, start: u64, end: u64, act: fn(&mut Engine, u64, u64)) {
        self.each_region(start, end, |engine, part| {
            if part.kind == Kind::Anonymous {
                act(engine, part.start, part.end);
            }
        });
    }

    /// Calls `act` for each region of a range, clipped to it.
    pub fn each_region(&mut self, start: u64, end: u64, mut act: impl FnMut(&mut Engine, &Region)) {
        let mut at = start;
        while at < end {
            let Some(part) = self.io.layout.overlaps(at, end).next() else {
                return;
            };
            at = part.end;
            act(self, &part);
        }
    }

    /// Home: a range was moved natively, with its contents.
    pub fn home_moved(&mut self, old: u64, old_length: u64, new: u64, new_length: u64) {
        let wait = self.nodes > 2 || self.is_shared(old, old + old_length);
        self.move_records(old, old_length, new, new_length);
        self.announce(&Message::Move {
            old_start: old,
            old_length,
            new_start: new,
            new_length,
        });
        if wait {
            self.synchronise();
        }
        self.watch_again(new, new + new_length);
    }

    fn move_records(&mut self, old: u64, old_length: u64, new: u64, new_length: u64) {
        let moved = old_length.min(new_length);
        if old_length > moved {
            self.discard(old + moved, old + old_length);
        }
        self.core
            .tables
            .relocate(old / PAGE, new / PAGE, moved / PAGE);
        let relocated = self.io.layout.relocate(old, old_length, new, new_length);
        assert!(relocated.is_ok(), "home's own layout allowed the move");
        for page in new / PAGE..(new + moved) / PAGE {
            if self.core.tables.look(page).present() {
                self.working_set.touch(page);
            }
        }
    }

    fn protect_again(&mut self, start: u64, end: u64) {
        for page in start / PAGE..end / PAGE {
            let local = self.core.tables.look(page);
            if local.present() && !local.writable() {
                let done = self.io.space.protect((page * PAGE) as usize, 1);
                self.check("protect", page * PAGE, done);
            }
        }
    }

    /// A slice: home changed the layout.
    pub fn change_layout(&mut self, message: &Message) {
        match *message {
            Message::Map {
                start,
                length,
                protection,
                kind,
            } => self.slice_map(start, length, protection, kind),
            Message::Vdso { hash } => {
                let own = super::VDSO_HASH.load(core::sync::atomic::Ordering::Relaxed);
                self.same_vdso = own == hash && own != 0;
            }
            Message::Unmap { start, length } => {
                self.discard(start, start + length);
                self.native("munmap", call!(munmap, start, length));
                let _ = self.io.layout.remove(start, start + length);
            }
            Message::Discard { start, length } => {
                self.discard(start, start + length);
                self.native("madvise", call!(madvise, start, length, ADVICE_DONT_NEED));
            }
            Message::Protect {
                start,
                length,
                protection,
            } => self.slice_protect(start, length, protection),
            Message::Move {
                old_start,
                old_length,
                new_start,
                new_length,
            } => self.slice_move(old_start, old_length, new_start, new_length),
            _ => self.fail(Failure::Violation(0, "a malformed layout message")),
        }
    }

    fn native(&mut self, what: &'static str, result: crate::own_calls::Result<usize>) {
        if let Err(error) = result {
            crate::log::fail(
                weft_proc::boot::EXIT_INTERNAL,
                format_args!("node {} cannot follow home's {what}: {error}", self.me),
            );
        }
    }

    fn slice_map(&mut self, start: u64, length: u64, protection: u32, kind: u32) {
        let kind = match kind {
            0 => Kind::Anonymous,
            1 => Kind::FileReadOnly,
            2 => Kind::HomeOnly,
            _ => self.fail(Failure::Violation(0, "an unknown kind of region")),
        };
        let region = Region {
            kind,
            // Neighbours that come from different mappings stay apart.
            ..Region::anonymous(start, start + length, protection & 7)
        };
        let protection = if kind == Kind::HomeOnly {
            0
        } else {
            protection & 7
        };
        let own_vdso = self.same_vdso && start == crate::space::VDSO;
        if !own_vdso {
            let flags = MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE;
            let mapped = call!(mmap, start, length, protection, flags, -1isize, 0);
            self.native("mmap", mapped);
        }
        if self.io.layout.insert(region).is_err() {
            self.fail(Failure::Violation(0, "an invalid region"));
        }
        self.set_policy(&region);
        if kind != Kind::HomeOnly {
            self.attach(start, start + length);
        }
    }

    fn slice_protect(&mut self, start: u64, length: u64, protection: u32) {
        let end = start + length;
        let mut reached = start;
        self.each_region(start, end, |engine, part| {
            // A hole ends the change, as it did at home.
            if part.start != reached {
                return;
            }
            reached = part.end;
            if part.kind != Kind::HomeOnly {
                let changed = call!(mprotect, part.start, part.length(), protection & 7);
                engine.native("mprotect", changed);
            }
        });
        let _ = self.io.layout.protect(start, end, protection & 7);
    }

    fn slice_move(&mut self, old: u64, old_length: u64, new: u64, new_length: u64) {
        // A page at a time and not by `mremap`, which wants all of it to be one
        // mapping of the kernel's: what is one at home may be several here.
        let flags = MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE;
        let mapped = call!(mmap, new, new_length, 3, flags, -1isize, 0);
        self.native("mmap", mapped);
        let kept = old_length.min(new_length);
        self.each_region(old, old + kept, |engine, part| {
            if part.kind != Kind::HomeOnly {
                let readable = call!(mprotect, part.start, part.length(), 1);
                engine.native("mprotect", readable);
            }
        });
        self.each_region(old, old + kept, |engine, part| {
            if part.kind != Kind::HomeOnly {
                let to = new + (part.start - old);
                engine.attach(to, to + part.length());
                engine.copy_pages(part.start, to, part.length());
            }
        });
        self.move_records(old, old_length, new, new_length);
        self.native("munmap", call!(munmap, old, old_length));
        self.each_region(new, new + new_length, |engine, part| {
            let mut protection = 0;
            if part.kind != Kind::HomeOnly {
                // What it grew by is watched from now on, too.
                engine.attach(part.start, part.end);
                protection = part.prot;
            }
            let protected = call!(mprotect, part.start, part.length(), protection);
            engine.native("mprotect", protected);
        });
    }

    /// Installs the pages that are here of one range in another, equal one.
    fn copy_pages(&mut self, old: u64, new: u64, length: u64) {
        for offset in (0..length).step_by(PAGE as usize) {
            let local = self.core.tables.look((old + offset) / PAGE);
            if !local.present() {
                continue;
            }
            // SAFETY: the page is present and was made readable.
            let bytes =
                unsafe { core::slice::from_raw_parts((old + offset) as *const u8, PAGE as usize) };
            let mode = if local.writable() {
                Mode::Open
            } else {
                Mode::Protected
            };
            let done = self
                .io
                .space
                .install((new + offset) as usize, 1, bytes, mode);
            self.check("move", old + offset, done);
        }
    }
}
