//! Does what the protocol decides: turns its actions into changes of memory and
//! frames on links.
//!
//! Actions come page by page; memory and frames are cheaper by the run. So equal
//! actions for consecutive pages are collected in two slots, one for memory
//! (with the frames that carry contents) and one for frames without contents,
//! and done when something else comes, or at [`Io::flush`].
//!
//! Order: within a slot nothing is reordered. Between the slots, memory goes
//! first (a `Done` follows the installation it reports), except that two frames
//! to the same node are always sent in the order in which they were decided.

use weft_dsm::message::{self, Run};
use weft_dsm::{
    Access, Action, Body, Content, Keep, Message, NodeId, PAGE_BYTES, Page, Refusal, Sink,
};
use weft_pager::space::{Mode, Space};
use weft_pager::uffd::UffdError;
use weft_proc::boot::MAX_NODES;
use weft_proc::layout::{Kind, Layout, PROT_READ};
use weft_proc::stats::{NodeStats, add};
use weft_wire::{Link, LinkError};

use super::eviction_batch::EvictionBatch;
use super::others_run;

use core::sync::atomic::Ordering;

use crate::own_calls::{self, call};

/// Most pages whose contents travel in one frame.
pub const RUN_MAX: u64 = 64;

/// Something went wrong that ends the aggregate, or its use of a node.
#[derive(Clone, Copy, Debug)]
pub enum Failure {
    /// The link to a node failed.
    Link(usize, LinkError),
    /// A page's only copy died with a node.
    Lost(Page, NodeId),
    /// The kernel refused a change of memory.
    Memory(&'static str, u64, UffdError),
    /// A peer said what no correct peer says.
    Violation(usize, &'static str),
}

#[derive(Clone, Copy, PartialEq)]
enum Change {
    Install {
        access: Access,
        content: Content,
    },
    Allow,
    Drop,
    Give {
        to: usize,
        generation: u8,
        body: Body,
        keep: Keep,
    },
}

/// Equal changes of consecutive pages.
#[derive(Clone, Copy)]
struct Changes {
    first: u64,
    count: u64,
    what: Change,
}

/// The page bytes that came with the frame being handled.
#[derive(Clone, Copy)]
pub struct ReceivedPages {
    /// First page.
    pub first: u64,
    /// Start of the bytes, valid until the next receive on that link.
    pub bytes: *const u8,
    /// Their length.
    pub length: usize,
}

impl ReceivedPages {
    /// The bytes of a run of pages; none where they are not all there.
    fn contents(&self, first: u64, pages: usize) -> Option<&[u8]> {
        let offset = first.checked_sub(self.first)? as usize * PAGE_BYTES;
        let length = pages * PAGE_BYTES;
        if offset + length > self.length {
            return None;
        }
        // SAFETY: inside the frame's payload, which stays until the next receive on its
        // link. The engine takes this value away before that, and the result with it.
        Some(unsafe { core::slice::from_raw_parts(self.bytes.add(offset), length) })
    }
}

/// Memory, links and what the protocol said last.
pub struct Io {
    /// This node.
    pub me: usize,
    /// Links by node.
    pub links: [Option<Link>; MAX_NODES],
    /// The program's memory here.
    pub space: Space,
    /// What is mapped where.
    pub layout: Layout<'static>,
    /// Counters.
    pub stats: &'static NodeStats,
    pub resident_pages: u64,
    /// The page that a fault waits for.
    pub awaited: u64,
    /// It is there, or the access should be tried again.
    pub resolved: bool,
    /// The last page that was answered with zeros, for first-touch streams.
    pub zeroed: u64,
    /// Evictions that found no room since this was last cleared.
    pub no_room: bool,
    /// Evictions refused since this was last cleared.
    pub refused: u64,
    /// Pages that left since this was last cleared.
    pub left: u64,
    /// The node that the last contents came from.
    pub source: usize,
    /// What went wrong first.
    pub failure: Option<Failure>,
    /// Page bytes of the frame being handled.
    pub arrived: Option<ReceivedPages>,
    /// Where the contents of pages that may not be read in place are put together.
    staging: &'static mut [u8],
    /// Pages that were given up, and are still here.
    evictions: EvictionBatch,
    memory: Option<Changes>,
    /// Messages without contents, and the node that they are for.
    frames: Option<(usize, Run)>,
}

// SAFETY: the pointer of `arrived` is used under the engine's lock only, while
// the frame it lies in is being handled.
unsafe impl Send for Io {}

impl Io {
    /// Memory and links without anything pending.
    pub fn new(
        me: usize,
        links: [Option<Link>; MAX_NODES],
        space: Space,
        layout: Layout<'static>,
        stats: &'static NodeStats,
    ) -> own_calls::Result<Io> {
        Ok(Io {
            me,
            links,
            space,
            layout,
            stats,
            resident_pages: 0,
            awaited: u64::MAX,
            resolved: false,
            zeroed: u64::MAX,
            no_room: false,
            refused: 0,
            left: 0,
            source: 0,
            failure: None,
            arrived: None,
            staging: own_calls::zeroes(RUN_MAX as usize * PAGE_BYTES)?,
            evictions: EvictionBatch::new(),
            memory: None,
            frames: None,
        })
    }

    /// Does everything that was collected.
    pub fn flush(&mut self) {
        self.flush_memory();
        self.flush_frames();
        self.flush_evictions();
    }

    fn fail(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
    }

    /// Counts pages that came or went.
    pub fn count_resident(&mut self, change: i64) {
        self.resident_pages = self.resident_pages.saturating_add_signed(change);
        let stats = self.stats;
        stats
            .resident_pages
            .store(self.resident_pages, Ordering::Relaxed);
        if self.resident_pages > stats.resident_pages_max.load(Ordering::Relaxed) {
            stats
                .resident_pages_max
                .store(self.resident_pages, Ordering::Relaxed);
        }
    }

    /// Sends a frame of the process's own protocol.
    pub fn send(&mut self, to: usize, header: &weft_wire::Header, parts: &[&[u8]]) {
        self.flush();
        let Some(link) = &mut self.links[to] else {
            return self.fail(Failure::Violation(
                to,
                "a message for a node without a link",
            ));
        };
        if let Err(error) = link.send(header, parts) {
            self.fail(Failure::Link(to, error));
        }
    }

    fn change(&mut self, page: u64, what: Change) {
        if let Some(run) = &mut self.memory
            && run.first + run.count == page
            && run.count < RUN_MAX
            && run.what == what
        {
            run.count += 1;
            return;
        }
        self.flush_memory();
        if let Change::Give { to, .. } = what
            && self.frames.is_some_and(|(other, _)| other == to)
        {
            self.flush_frames();
        }
        self.memory = Some(Changes {
            first: page,
            count: 1,
            what,
        });
    }

    fn frame(&mut self, to: usize, message: Message) {
        if let Some((other, run)) = &mut self.frames
            && *other == to
            && run.extend(&message)
        {
            return;
        }
        let gives = matches!(
            self.memory,
            Some(Changes { what: Change::Give { to: other, .. }, .. }) if other == to
        );
        if gives {
            self.flush_memory();
        }
        self.flush_frames();
        self.frames = Some((to, Run::one(message)));
    }

    fn flush_frames(&mut self) {
        let Some((to, run)) = self.frames.take() else {
            return;
        };
        // What a frame reports about memory has been done before it.
        self.flush_memory();
        self.transmit(to, &run, &[]);
    }

    fn transmit(&mut self, to: usize, run: &Run, parts: &[&[u8]]) {
        self.flush_evictions();
        let Some(link) = &mut self.links[to] else {
            // A node that left: nobody waits for this.
            return;
        };
        if let Err(error) = link.send(&message::encode(run), parts) {
            self.fail(Failure::Link(to, error));
        }
    }

    fn flush_memory(&mut self) {
        let Some(run) = self.memory.take() else {
            return;
        };
        let (first, count) = (run.first, run.count);
        let start = first as usize * PAGE_BYTES;
        let pages = count as usize;
        if !matches!(run.what, Change::Give { .. }) {
            self.flush_evictions();
        }
        match run.what {
            Change::Install { access, content } => self.install(first, pages, access, content),
            Change::Allow => {
                let done = self.space.allow(start, pages);
                self.check("make writable", first, done);
            }
            Change::Drop => {
                // SAFETY: the protocol gave the pages up.
                let done = unsafe { self.space.drop(start, pages) };
                self.check("drop", first, done);
                self.count_resident(-(pages as i64));
                self.left += count;
                add(&self.stats.drops, count);
            }
            Change::Give {
                to,
                generation,
                body,
                keep,
            } => {
                let page = Page(first);
                let first = Message {
                    page,
                    generation,
                    body,
                };
                let count = count as u16;
                self.give(to, &Run { first, count }, keep);
            }
        }
    }

    fn check(&mut self, what: &'static str, page: u64, done: Result<(), UffdError>) {
        if let Err(error) = done {
            self.fail(Failure::Memory(what, page, error));
        }
    }

    fn install(&mut self, first: u64, pages: usize, access: Access, content: Content) {
        let start = first as usize * PAGE_BYTES;
        let mode = match access {
            Access::Read => Mode::Protected,
            Access::Write => Mode::Open,
        };
        let done = match content {
            Content::Bytes | Content::Precopied => {
                match self.arrived.as_ref().and_then(|a| a.contents(first, pages)) {
                    Some(bytes) => self.space.install(start, pages, bytes, mode),
                    None => {
                        let violation =
                            Failure::Violation(self.source, "a page arrived without its contents");
                        return self.fail(violation);
                    }
                }
            }
            _ => self.space.zero(start, pages, mode),
        };
        self.check("install", first, done);
        self.count_resident(pages as i64);
    }

    fn give(&mut self, to: usize, run: &Run, keep: Keep) {
        let (first, body) = (run.first.page.0, run.first.body);
        let start = first as usize * PAGE_BYTES;
        let pages = usize::from(run.count);
        let region = self.layout.lookup(start as u64).copied();
        // A file's pages are mapped by the kernel: they are neither protected
        // nor dropped, only read.
        let native = self.me == 0 && region.is_none_or(|r| r.kind == Kind::FileReadOnly);
        let content = match body {
            Body::Data { content, .. } | Body::Push { content, .. } => content,
            _ => Content::Held,
        };
        // What leaves altogether is dropped before the program goes on: only
        // somebody who runs meanwhile could write to it.
        let stops_writes = keep == Keep::Shared
            || keep == Keep::Nothing && content == Content::Bytes && others_run();
        if stops_writes && !native {
            let done = self.space.protect(start, pages);
            self.check("protect", first, done);
        }
        let readable = region.is_some_and(|r| {
            r.prot & PROT_READ != 0 && r.end >= (start + pages * PAGE_BYTES) as u64
        });
        let pushed = matches!(body, Body::Push { .. });
        if pushed && content == Content::Bytes && keep == Keep::Nothing && readable && !native {
            return self.leave(to, run);
        }
        if content == Content::Bytes {
            let length = pages * PAGE_BYTES;
            if readable && !native {
                // SAFETY: the protocol says that these pages are present here;
                // the region allows reading.
                let bytes = unsafe { core::slice::from_raw_parts(start as *const u8, length) };
                self.transmit(to, run, &[bytes]);
            } else {
                let staging = core::mem::take(&mut self.staging);
                self.stage(start, &mut staging[..length]);
                self.transmit(to, run, &[&staging[..length]]);
                self.staging = staging;
            }
        } else {
            self.transmit(to, run, &[]);
        }
        if keep == Keep::Nothing {
            // SAFETY: the pages were sent, and the protocol keeps nothing here.
            let done = unsafe { self.space.drop(start, pages) };
            self.check("drop", first, done);
            self.count_resident(-(pages as i64));
            self.left += pages as u64;
        }
        if pushed {
            add(&self.stats.pushes, pages as u64);
        } else {
            add(&self.stats.gives, pages as u64);
        }
    }

    /// A run that leaves together with others.
    fn leave(&mut self, to: usize, run: &Run) {
        if !self.evictions.takes(to, run) {
            self.flush_evictions();
        }
        self.evictions.add(to, run);
    }

    /// Sends what is leaving, and drops it.
    fn flush_evictions(&mut self) {
        if self.evictions.is_empty() {
            return;
        }
        let to = self.evictions.to();
        if let Some(link) = &mut self.links[to] {
            // SAFETY: the protocol said that these pages are here, and nothing
            // was done to memory since; their regions allow reading.
            if let Err(error) = unsafe { self.evictions.send(link) } {
                self.fail(Failure::Link(to, error));
            }
        }
        while let Some(run) = self.evictions.pop() {
            let (first, count) = (run.first.page.0, u64::from(run.count));
            // SAFETY: as in `give`; nothing refers to a run that was sent.
            let done = unsafe { self.space.drop(first as usize * PAGE_BYTES, count as usize) };
            self.check("drop", first, done);
            self.count_resident(-(count as i64));
            self.left += count;
            add(&self.stats.pushes, count);
        }
    }

    /// Copies pages that cannot be sent from where they are: of a file, of a
    /// mapping that forbids reading, or of several mappings.
    fn stage(&self, start: usize, into: &mut [u8]) {
        for (index, into) in into.chunks_exact_mut(PAGE_BYTES).enumerate() {
            self.copy_page(start + index * PAGE_BYTES, into);
        }
    }

    fn copy_page(&self, address: usize, into: &mut [u8]) {
        if self.me == 0 {
            return self.space.copy_out(address, into);
        }
        // A slice has no /proc; nothing else runs in it meanwhile.
        let region = self.layout.lookup(address as u64);
        let hidden = region.filter(|r| r.prot & PROT_READ == 0).map(|r| r.prot);
        if hidden.is_some() {
            let _ = call!(mprotect, address, PAGE_BYTES, PROT_READ);
        }
        // SAFETY: the protocol says that the page is present here, and it is
        // readable now.
        let from = unsafe { core::slice::from_raw_parts(address as *const u8, PAGE_BYTES) };
        into.copy_from_slice(from);
        if let Some(protection) = hidden {
            let _ = call!(mprotect, address, PAGE_BYTES, protection);
        }
    }
}

impl Sink for Io {
    fn act(&mut self, action: Action) {
        match action {
            Action::Send { to, message } => self.frame(to.index(), message),
            Action::Give { to, message, keep } => {
                let Message {
                    page,
                    generation,
                    body,
                } = message;
                let to = to.index();
                let what = Change::Give {
                    to,
                    generation,
                    body,
                    keep,
                };
                self.change(page.0, what);
            }
            Action::Install {
                page,
                access,
                content,
            } => {
                if content == Content::Zero {
                    self.zeroed = page.0;
                }
                self.change(page.0, Change::Install { access, content });
            }
            Action::Allow { page } => self.change(page.0, Change::Allow),
            Action::Drop { page } => self.change(page.0, Change::Drop),
            Action::Resolved { page } => self.resolved |= page.0 == self.awaited,
            // No page of a process is of policy `Update`.
            Action::Outdated { .. } => {}
            // The manager of a process's pages is home, for good.
            Action::HandedOver { .. }
            | Action::TookOver { .. }
            | Action::Kept { .. }
            | Action::Quiet => {}
            Action::Lost { page, node } => self.fail(Failure::Lost(page, node)),
            Action::NoRoom { .. } => self.no_room = true,
            Action::Refused { reason, .. } => {
                self.refused += 1;
                if reason == Refusal::ReadOnly {
                    self.resolved = true;
                }
            }
            Action::Violation { from, what, .. } => {
                self.fail(Failure::Violation(from.index(), what));
            }
        }
    }
}
