//! A save while users go on: the bytes that this node's pages had at one moment, the *cut*,
//! are saved behind the users, each page before it changes.
//!
//! ```text
//!             cut, at a rest                the writer has come to it
//!  any page ──────────────────▶ unsaved ─────────────────────────────▶ clean
//!      ▲                           │ it is about to be written, or to leave:   │
//!      │                           ▼ its bytes are copied first                │
//!      └──────────────────────── dirty ◀───────────────────────────────────────┘
//!                                            it is written, or leaves
//! ```
//!
//! No message is sent, and the protocol is not concerned: the cut takes the right to write
//! from the users, and each first store to a page asks the controller again, as one to a page
//! that was sent ahead does.
//!
//! A page that is *clean* at the next cut has the bytes that it had at the last one: an
//! incremental save leaves it out.
//!
//! Invariants:
//!
//! - While a page is unsaved or clean, this node's right to it is to read, so its bytes are
//!   those of the last cut.
//! - Each page that this node owned at the cut and that was not zero is given to the writer
//!   once, with the bytes of the cut, unless the save is dropped.
//! - At most as many copies wait for the writer as there are buffers. A step that needs one
//!   waits, for [`Saves::patience`] at most: then the save is dropped, and the step goes on.
//! - A dropped save leaves nothing: rights return with the next store.

use std::ops::Range;
use std::time::Duration;

use super::transition::Work;
use super::{Action, Controller, Count, Look, Mutant, Sink};
use crate::protocol;
use crate::state::{State, Tables};
use crate::types::{Access, Page};

/// How far a save is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveProgress {
    /// No save is under way.
    Idle,
    /// So many pages are unsaved.
    Left(u64),
    /// It was dropped, because no buffer was free for too long.
    Dropped,
}

/// One bit for each page.
#[derive(Debug, Default)]
struct Bits(Vec<u64>);

impl Bits {
    fn has(&self, page: u64) -> bool {
        let word = self.0.get((page / 64) as usize);
        word.is_some_and(|word| word & 1 << (page % 64) != 0)
    }

    /// Whether it changed.
    fn set(&mut self, page: u64, to: bool) -> bool {
        let Some(word) = self.0.get_mut((page / 64) as usize) else {
            return false;
        };
        let before = *word;
        *word = before & !(1 << (page % 64)) | u64::from(to) << (page % 64);
        *word != before
    }

    /// The first page from `from` on whose bit is set.
    fn next(&self, from: u64) -> Option<u64> {
        let first = (from / 64) as usize;
        let mut words = self.0.iter().enumerate().skip(first);
        words.find_map(|(index, word)| {
            let seen = if index == first { from % 64 } else { 0 };
            let left = word >> seen << seen;
            (left != 0).then(|| index as u64 * 64 + u64::from(left.trailing_zeros()))
        })
    }
}

/// What a node knows of its save, and of the last one.
#[derive(Debug, Default)]
pub(super) struct Saves {
    unsaved: Bits,
    clean: Bits,
    /// Pages that are unsaved.
    left: u64,
    /// No page before this one is unsaved.
    next: u64,
    /// Buffers that are free.
    buffers: u64,
    /// How long steps may wait for a buffer while none becomes free.
    patience: Duration,
    /// Since when they do.
    waits_since: Option<Duration>,
    is_under_way: bool,
    was_dropped: bool,
}

impl Saves {
    /// Whether nobody has changed the page since the cut, and it is not saved.
    pub fn is_unsaved(&self, page: u64) -> bool {
        self.unsaved.has(page)
    }

    fn is_full(&self) -> bool {
        self.buffers == 0
    }

    fn forget(&mut self, page: u64) -> bool {
        let was_unsaved = self.unsaved.set(page, false);
        self.left -= u64::from(was_unsaved);
        was_unsaved
    }
}

impl<T: Tables, B> Controller<T, B> {
    /// Begins a save, at a rest: [`Controller::cut`] for all pages follows, before the rest
    /// ends. `buffers`: copies that may wait for the writer; `patience`: how long a step may
    /// wait for one of them. False if a save is under way.
    pub fn begin_save(&mut self, buffers: u64, patience: Duration) -> bool {
        if self.saves.is_under_way {
            return false;
        }
        self.make_room_for_marks();
        let saves = &mut self.saves;
        (saves.left, saves.next, saves.buffers) = (0, 0, buffers);
        (saves.patience, saves.waits_since) = (patience, None);
        (saves.is_under_way, saves.was_dropped) = (true, false);
        true
    }

    /// The cut, for some of the pages, in ascending order. `is_blank`: the page is known to be
    /// zero, though the protocol does not know. With `unchanged` it gets those that are as at the
    /// last cut; they are not saved. The shell has the users look for their pages anew before
    /// they go on.
    ///
    /// # Errors
    /// Something is under way about this page: the nodes do not rest.
    pub fn cut(
        &mut self,
        pages: Range<u64>,
        mut is_blank: impl FnMut(u64) -> bool,
        mut unchanged: Option<&mut Vec<u64>>,
    ) -> Result<(), (u64, &'static str)> {
        for page in pages {
            let local = *self.node.tables.local(Page(page));
            if let Some(what) = local.under_way() {
                return Err((page, what));
            }
            if !local.owner() || local.zero() {
                continue;
            }
            if let (true, Some(unchanged)) = (self.saves.clean.has(page), &mut unchanged) {
                unchanged.push(page);
                continue;
            }
            self.saves.clean.set(page, false);
            if is_blank(page) {
                continue;
            }
            self.saves.left += u64::from(self.saves.unsaved.set(page, true));
            if self.rights.of(page) == Some(Access::Write) && !self.is(Mutant::SaveWritable) {
                self.rights.set(page, Some(Access::Read));
            }
        }
        Ok(())
    }

    /// The next page for the writer, which copies its bytes before anything else happens.
    /// No page may be absent.
    pub fn next_unsaved(&mut self) -> Option<u64> {
        let page = self.saves.unsaved.next(self.saves.next)?;
        self.saves.next = page + 1;
        self.saves.forget(page);
        self.saves.clean.set(page, true);
        Some(page)
    }

    /// The writer has taken copies: their buffers are free. Then [`super::Event::Tick`].
    pub fn free_buffers(&mut self, count: u64) {
        self.saves.buffers += count;
        self.saves.waits_since = None;
    }

    /// How far the save is.
    pub fn save_progress(&self) -> SaveProgress {
        match &self.saves {
            saves if saves.was_dropped => SaveProgress::Dropped,
            saves if saves.is_under_way => SaveProgress::Left(saves.left),
            _ => SaveProgress::Idle,
        }
    }

    /// Ends the save, complete or not. `is_kept`: pages that it has are clean from now on.
    /// Then [`super::Event::Tick`].
    pub fn end_save(&mut self, is_kept: bool) {
        let saves = &mut self.saves;
        saves.unsaved.0.fill(0);
        saves.left = 0;
        if !is_kept {
            saves.clean.0.fill(0);
        }
        (saves.is_under_way, saves.was_dropped, saves.waits_since) = (false, false, None);
    }

    /// Whether an action of the protocol changes a page that is unsaved, or lets it change.
    pub(super) fn spoils(&mut self, page: u64, action: &protocol::Action) -> bool {
        if !self.saves.is_unsaved(page) {
            return false;
        }
        match action {
            protocol::Action::Allow { .. } => !self.is(Mutant::SaveAfterAllow),
            protocol::Action::Resolved { .. } => {
                self.returns_right(page) && !self.is(Mutant::SaveAfterReturn)
            }
            action => self.taken_by(page, action) == Some(None) && !self.is(Mutant::SaveAfterGive),
        }
    }

    /// Whether the protocol allows users to write a page that the cut let them read only.
    pub(super) fn returns_right(&mut self, page: u64) -> bool {
        let local = *self.node.tables.local(Page(page));
        let is_lowered = local.state() == State::Exclusive && local.written();
        is_lowered && self.rights.of(page) == Some(Access::Read) && self.has_cut()
    }

    /// Rights were lowered once: they return one by one.
    fn has_cut(&self) -> bool {
        !self.saves.unsaved.0.is_empty()
    }

    /// A page is as at the last cut, which was that of the machine that this one continues.
    pub(super) fn begin_clean(&mut self, page: u64) {
        self.make_room_for_marks();
        self.saves.clean.set(page, true);
    }

    fn make_room_for_marks(&mut self) {
        let words = self.rights.pages().div_ceil(64) as usize;
        self.saves.unsaved.0.resize(words, 0);
        self.saves.clean.0.resize(words, 0);
    }

    /// A page has changed since the last cut, or is about to.
    pub(super) fn soil(&mut self, page: u64) {
        if !self.is(Mutant::SaveCleanForEver) {
            self.saves.clean.set(page, false);
        }
    }

    /// Copies a page that is about to change. False if no buffer is free: the step waits.
    pub(super) fn save_first(
        &mut self,
        page: u64,
        work: &mut Work<B>,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) -> bool {
        if self.saves.is_full() && !self.is(Mutant::SaveUnbounded) {
            let rest = std::mem::take(work);
            self.suspend(page, None, rest, sink);
            self.pins.count_deferred(true);
            self.saves.waits_since.get_or_insert(now);
            sink.act(Action::Count(Count::Deferred, 1));
            sink.act(Action::Look(Look::Tick));
            return false;
        }
        self.saves.forget(page);
        self.saves.buffers = self.saves.buffers.saturating_sub(1);
        sink.act(Action::Save { page });
        true
    }

    /// Whether a deferred step about a page waits for a buffer.
    pub(super) fn waits_for_buffer(&mut self, page: u64, now: Duration) -> bool {
        let waits = self.saves.is_under_way && self.saves.is_unsaved(page) && self.saves.is_full();
        if waits {
            self.saves.waits_since.get_or_insert(now);
        }
        waits
    }

    /// Drops the save if steps have waited too long for its writer.
    pub(super) fn look_at_save(&mut self, now: Duration) {
        let saves = &mut self.saves;
        let is_over = |since: Duration| now.saturating_sub(since) > saves.patience;
        let drops = saves.is_under_way && saves.waits_since.is_some_and(is_over);
        if drops && !self.is(Mutant::SaveNeverDropped) {
            let saves = &mut self.saves;
            saves.unsaved.0.fill(0);
            saves.clean.0.fill(0);
            (saves.left, saves.waits_since, saves.was_dropped) = (0, None, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_bit_is_found() {
        let mut bits = Bits(vec![0; 3]);
        for page in [0, 63, 64, 191] {
            assert!(bits.set(page, true) && !bits.set(page, true));
        }
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(page) = bits.next(from) {
            found.push(page);
            from = page + 1;
        }
        assert_eq!(found, [0, 63, 64, 191]);
        assert!(bits.set(64, false) && !bits.has(64) && bits.has(63));
        assert!(!bits.set(192, true) && !bits.has(192) && bits.next(192).is_none());
    }
}
