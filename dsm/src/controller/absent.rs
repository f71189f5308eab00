//! Absent pages: this node owns them, and their bytes are in a file, for example in that of a
//! checkpoint from which the machine goes on.
//!
//! ```text
//!                 a step needs the page: Load          Done
//!  adopt_absent ──────────────────────────▶ in transition ──▶ here, read only until a store
//!       │                                                      ▲
//!       └──── may_load: the shell fills it, unasked; loaded ───┘
//! ```
//!
//! The protocol is not concerned: for it the page is here. A step that allows users to use it,
//! or gives it to another node, waits for the operation that reads it.
//!
//! Invariants:
//!
//! - No user may use an absent page, and no message carries its bytes.
//! - An absent page fills its place in the budget, and its memory is not given back.
//! - A page that was read is *clean* (see `save`): it has the bytes of the file.

use super::transition::Operation;
use super::{Action, Controller, Mutant, Sink};
use crate::protocol::{self, Refusal};
use crate::state::Tables;
use crate::types::{Access, Page};

impl<T: Tables, B> Controller<T, B> {
    /// Makes a page this node's own whose bytes are in a file. Before any other node runs, at
    /// the node that manages it.
    ///
    /// # Errors
    /// Why the protocol refused.
    pub fn adopt_absent(&mut self, page: u64) -> Result<(), Refusal> {
        let mut refused = None;
        let event = protocol::Event::Adopt { page: Page(page) };
        self.node.step(event, &mut |action| {
            if let protocol::Action::Refused { reason, .. } = action {
                refused = Some(reason);
            }
        });
        match refused {
            Some(reason) => Err(reason),
            None => {
                self.rights.set_absent(page);
                self.begin_clean(page);
                Ok(())
            }
        }
    }

    /// Whether the shell may fill a page that nobody has asked for. It does so before anything
    /// else happens, and then calls [`Controller::loaded`].
    pub fn may_load(&self, page: u64) -> bool {
        self.rights.is_absent(page) && !self.is_in_transition(page)
    }

    /// The page's memory has the bytes of the file.
    pub fn loaded(&mut self, page: u64) {
        self.rights.set_loaded(page);
    }

    /// Whether a step needs a page that is absent: then it is read.
    pub(super) fn needs_load(&self, page: u64, action: &protocol::Action) -> bool {
        self.rights.is_absent(page)
            && match action {
                protocol::Action::Give { .. } => !self.is(Mutant::GiveAbsent),
                protocol::Action::Resolved { .. } => !self.is(Mutant::AllowAbsent),
                protocol::Action::Allow { .. } | protocol::Action::Drop { .. } => true,
                _ => false,
            }
    }

    pub(super) fn load_first(&mut self, page: u64, sink: &mut impl Sink<B>) -> Operation {
        sink.act(Action::Load { page });
        Operation::Load
    }

    /// The operation is done: the page is here as it is in the file, and its users may read it.
    pub(super) fn load_done(&mut self, page: u64) {
        self.rights.set_loaded(page);
        if self.is(Mutant::LoadWritable) {
            self.rights.set(page, Some(Access::Write));
        }
    }
}
