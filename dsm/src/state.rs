//! The two records the protocol keeps per page, and where they live.
//!
//! [`Local`] (4 bytes, on every node) says what this node has:
//!
//! ```text
//!            read copy arrives          all other copies gone
//! Invalid ------------------> Shared ------------------------> Exclusive
//!    ^                           |  <---------------------------  |
//!    |        dropped, given     |      a reader got a copy       |
//!    +---------------------------+--------------------------------+
//! ```
//!
//! * `Exclusive` implies the owner flag; an owner may be `Shared`.
//! * `Exclusive` and not `written` means: write-protected in memory, the first
//!   write is local ([`crate::Action::Allow`]).
//! * `zero` means: never written by anybody; travels without bytes.
//! * at most one request is pending;
//! * a page is *frozen* while its manager changes: nothing is sent about it
//!   until the node hears where the manager is (`handover.rs`).
//!
//! [`Entry`] (24 bytes, at the page's manager) is the directory:
//!
//! * no owner means never touched (or [`Phase::Lost`]);
//! * `copyset` never contains the owner, and contains every other node that
//!   holds a copy whenever the phase is `Idle`;
//! * a node waits for reading or for writing, not both, and not while it is the
//!   party of the transaction under way; so no set grows beyond 32 nodes.
//!
//! Zero bytes are the default state of both, so a table may be a sparse
//! zero-filled mapping indexed by page number.

use crate::types::{Access, NodeId, Page, Policy};

/// What this node has of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Nothing.
    Invalid,
    /// A read-only copy.
    Shared,
    /// The only copy.
    Exclusive,
}

const STATE: u8 = 0b11;
const OWNER: u8 = 1 << 2;
const ZERO: u8 = 1 << 3;
const WRITTEN: u8 = 1 << 4;
const MIGRATORY: u8 = 1 << 5;
const OFFERED: u8 = 1 << 6;
const SETTLED: u8 = 1 << 7;

const PENDING_READ: u8 = 1;
const PENDING_WRITE: u8 = 2;
const PENDING_AHEAD: u8 = 4;
const PENDING: u8 = PENDING_READ | PENDING_WRITE | PENDING_AHEAD;
/// In the byte of the request: the manager, as the difference (exclusive or) from the
/// one of the configuration, so that zero bytes mean that one.
const MANAGER_SHIFT: u8 = 3;
const MANAGER: u8 = !PENDING;

/// In the byte `trusted`: the manager is about to change.
const FROZEN: u8 = 1 << 7;
/// A `Done` waits until it is known who the manager is.
const OWES_DONE: u8 = 1 << 6;
/// The other end of the hand-over was asked, because one end died.
const ASKED: u8 = 1 << 5;
const HEIR: u8 = ASKED - 1;
/// Stays are counted below the marks of a frozen page.
pub(crate) const PROBE_EVERY_MAX: u8 = ASKED;

/// What one node knows of a page of its own. Zero bytes: nothing.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, zerocopy::FromZeros)]
pub struct Local {
    flags: u8,
    pending: u8,
    pub(crate) generation: u8,
    /// Stays since the last that began write-protected (see [`Local::is_probed`]); of a
    /// frozen page, marks and the node that shall be the manager.
    trusted: u8,
}

const _: () = assert!(size_of::<Local>() == 4);

impl Local {
    pub const fn state(self) -> State {
        match self.flags & STATE {
            0 => State::Invalid,
            1 => State::Shared,
            _ => State::Exclusive,
        }
    }
    /// Whether this node owns the page.
    pub const fn owner(self) -> bool {
        self.flags & OWNER != 0
    }
    /// Whether the page was never written by anybody.
    pub const fn zero(self) -> bool {
        self.flags & ZERO != 0
    }
    /// Whether the page came whole because it is migratory, and was not written since.
    pub fn is_unwritten_visit(self) -> bool {
        self.state() == State::Exclusive && self.migratory() && !self.written()
    }
    /// Whether the page was written since it came here. A page that was written and then
    /// copied to other nodes is not writable.
    pub const fn written(self) -> bool {
        self.flags & WRITTEN != 0
    }
    /// Whether a write to the page goes through without a fault.
    pub const fn writable(self) -> bool {
        self.flags & STATE == State::Exclusive as u8 && self.written()
    }
    /// Whether the page moves from reader to reader.
    pub const fn migratory(self) -> bool {
        self.flags & MIGRATORY != 0
    }
    /// Whether the page does not become one that moves from reader to reader, as
    /// long as it stays here: see [`crate::Node::settle`].
    pub const fn settled(self) -> bool {
        self.flags & SETTLED != 0
    }
    /// Whether an offer to push the page away is under way.
    pub const fn offered(self) -> bool {
        self.flags & OFFERED != 0
    }
    /// The request under way.
    pub const fn pending(self) -> Option<Access> {
        match self.pending & (PENDING_READ | PENDING_WRITE) {
            0 => None,
            PENDING_READ => Some(Access::Read),
            _ => Some(Access::Write),
        }
    }
    /// Whether the request under way is read-ahead that no fault has met yet.
    pub const fn ahead(self) -> bool {
        self.pending & PENDING_AHEAD != 0
    }
    /// How often the page was discarded, modulo 256.
    pub const fn generation(self) -> u8 {
        self.generation
    }
    /// Whether the page may be chosen for eviction.
    pub const fn evictable(self) -> bool {
        self.present() && !self.offered() && self.pending & PENDING == 0 && !self.frozen()
    }
    /// Whether nothing may be sent about the page, because its manager changes.
    pub const fn frozen(self) -> bool {
        self.trusted & FROZEN != 0
    }
    /// What is under way about the page that this node has begun, or waits for.
    pub fn under_way(self) -> Option<&'static str> {
        match () {
            () if self.pending().is_some() => Some("a request for it was not answered"),
            () if self.offered() => Some("it was offered to its manager"),
            () if self.frozen() => Some("its manager changes"),
            () => None,
        }
    }
    /// Whether nothing of the page is here and nothing about it is under way.
    pub const fn clear(self) -> bool {
        self.flags & (STATE | OWNER | OFFERED) == 0 && self.pending & PENDING == 0 && !self.frozen()
    }
    /// The page's manager, where `configured` is the one of the configuration.
    pub(crate) const fn manager(self, configured: NodeId) -> NodeId {
        NodeId(configured.0 ^ self.pending >> MANAGER_SHIFT)
    }
    pub(crate) fn set_manager(&mut self, manager: NodeId, configured: NodeId) {
        self.pending = self.pending & PENDING | (manager.0 ^ configured.0) << MANAGER_SHIFT;
    }
    /// The node that shall be the manager of a frozen page.
    pub(crate) const fn heir(self) -> NodeId {
        NodeId(self.trusted & HEIR)
    }
    pub(crate) fn freeze(&mut self, heir: NodeId) {
        self.trusted = FROZEN | heir.0 & HEIR;
    }
    /// The manager is known. Returns whether a `Done` has waited for that.
    pub(crate) fn thaw(&mut self) -> bool {
        let owes = self.trusted & OWES_DONE != 0;
        self.trusted = 0;
        owes
    }
    pub(crate) fn owe_done(&mut self) {
        self.trusted |= OWES_DONE;
    }
    /// Marks that the other end was asked; whether it was asked before.
    pub(crate) fn ask(&mut self) -> bool {
        let asked = self.trusted & ASKED != 0;
        self.trusted |= ASKED;
        asked
    }
    /// A record of an untouched page; who manages it stays known.
    pub(crate) fn reset(&mut self, generation: u8) {
        *self = Local {
            generation,
            pending: self.pending & MANAGER,
            ..Local::default()
        };
    }
    /// Whether the page is in memory here and readable.
    pub const fn present(self) -> bool {
        self.flags & STATE != 0
    }

    pub(crate) fn set_state(&mut self, state: State) {
        self.flags = self.flags & !STATE | state as u8;
    }
    fn flag(&mut self, bit: u8, on: bool) {
        if on {
            self.flags |= bit;
        } else {
            self.flags &= !bit;
        }
    }
    pub(crate) fn set_owner(&mut self, on: bool) {
        self.flag(OWNER, on);
    }
    pub(crate) fn set_zero(&mut self, on: bool) {
        self.flag(ZERO, on);
    }
    pub(crate) fn set_written(&mut self, on: bool) {
        self.flag(WRITTEN, on);
    }
    pub(crate) fn set_migratory(&mut self, on: bool) {
        self.flag(MIGRATORY, on && !self.settled());
    }
    /// A page that moves from reader to reader begins a stay. Whether it begins
    /// write-protected, to learn whether it is still written: the first stay, and
    /// one of `every` after that.
    pub(crate) fn is_probed(&mut self, every: u8) -> bool {
        let probed = self.trusted == 0;
        self.trusted = (self.trusted + 1) % every.max(1);
        probed
    }
    /// The page is not one that moves from reader to reader (any more).
    pub(crate) fn distrust(&mut self) {
        self.trusted = 0;
    }
    pub(crate) fn settle(&mut self) {
        self.flag(SETTLED, true);
        self.flag(MIGRATORY, false);
    }
    pub(crate) fn set_offered(&mut self, on: bool) {
        self.flag(OFFERED, on);
    }
    pub(crate) fn set_pending(&mut self, access: Access, ahead: bool) {
        let kind = match access {
            Access::Read => PENDING_READ,
            Access::Write => PENDING_WRITE,
        };
        let request = kind | if ahead { PENDING_AHEAD } else { 0 };
        self.pending = self.pending & MANAGER | request;
    }
    pub(crate) fn met_by_fault(&mut self) {
        self.pending &= !PENDING_AHEAD;
    }
    pub(crate) fn clear_pending(&mut self) {
        self.pending &= MANAGER;
    }
    /// The copy is gone; a request or an offer under way stays under way.
    pub(crate) fn forget(&mut self) {
        self.flags &= OFFERED;
    }
    /// The page becomes the only copy, writable and written.
    pub(crate) fn make_writer(&mut self, migratory: bool) {
        self.flags = self.flags & (OFFERED | SETTLED) | State::Exclusive as u8 | OWNER | WRITTEN;
        self.set_migratory(migratory);
    }
    /// The page moves to another address. What stays here is a record of an
    /// untouched page, one discard later.
    pub fn take(&mut self) -> Local {
        let taken = *self;
        self.reset(self.generation.wrapping_add(1));
        taken
    }
    /// The record of a page that moved to where `there` was.
    pub fn at(self, there: Local) -> Local {
        Local {
            generation: there.generation,
            pending: self.pending & PENDING | there.pending & MANAGER,
            ..self
        }
    }
    /// For state encodings outside of the core.
    pub const fn bits(self) -> u32 {
        u32::from_le_bytes([self.flags, self.pending, self.generation, self.trusted])
    }
}

impl core::fmt::Debug for Local {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?}", self.state())?;
        for (on, name) in [
            (self.owner(), " owner"),
            (self.zero(), " zero"),
            (self.written(), " written"),
            (self.migratory(), " migratory"),
            (self.offered(), " offered"),
            (self.settled(), " settled"),
            (self.ahead(), " ahead"),
            (self.frozen(), " frozen"),
        ] {
            if on {
                f.write_str(name)?;
            }
        }
        if let Some(access) = self.pending() {
            write!(f, " pending {access:?}")?;
        }
        write!(f, " generation {}", self.generation)
    }
}

/// What the manager is doing about a page.
#[repr(u8)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, zerocopy::FromZeros)]
pub enum Phase {
    /// Nothing.
    #[default]
    Idle = 0,
    /// Invalidations are out; when `acks` is empty, `party` may write.
    Acks = 1,
    /// The owner sends the page to `party`, which will say `Done`.
    Transfer = 2,
    /// `party` was made owner of the copy it holds; it will say `Done` or `NotHere`.
    Promote = 3,
    /// One end of a transfer died; `party` (or the owner) was asked what it has.
    Probe = 4,
    /// The only copy died; `owner` is the node it died with.
    Lost = 5,
    /// The directory's record goes to `party` as soon as all others are silent about
    /// the page; stays here if `party` is this node.
    Hand = 6,
}

/// The transaction is a push to make room, not a request.
pub(crate) const PLACE: u8 = 1;
/// The transaction's request is a write.
pub(crate) const WRITE: u8 = 2;
/// The promotion is an eviction by the manager, which still holds a copy.
pub(crate) const EVICTION: u8 = 4;
/// The eviction may go to `party` only.
pub(crate) const TARGETED: u8 = 8;
/// The page that is handed over is lost.
pub(crate) const LOST: u8 = 16;

/// The directory's record of a page. Zero bytes: never touched.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, zerocopy::FromZeros)]
pub struct Entry {
    /// Nodes other than the owner that may hold a copy.
    pub(crate) copyset: u32,
    /// Nodes whose answer (to `Invalidate`, `Probe` or `Freeze`) is awaited.
    pub(crate) acks: u32,
    pub(crate) wait_read: u32,
    pub(crate) wait_write: u32,
    /// Node + 1; 0 for none.
    owner: u8,
    pub(crate) phase: Phase,
    pub(crate) kind: u8,
    /// The node that gets the page.
    pub(crate) party: u8,
    /// The node served last; waiting nodes above it come first.
    pub(crate) turn: u8,
    /// The dead node that a `Probe` is about.
    pub(crate) dead: u8,
    /// The node that shall be the manager after this transaction, + 1; 0 for none.
    heir: u8,
    reserved: u8,
}

const _: () = assert!(size_of::<Entry>() == 24);

impl Entry {
    /// The owner, as far as the manager knows.
    pub const fn owner(&self) -> Option<NodeId> {
        match self.owner {
            0 => None,
            node => Some(NodeId(node - 1)),
        }
    }
    /// Nodes other than the owner that may hold a copy.
    pub const fn copyset(&self) -> u32 {
        self.copyset
    }
    /// What is under way.
    pub const fn phase(&self) -> Phase {
        self.phase
    }
    /// The nodes that wait for their turn.
    pub const fn waiting(&self) -> u32 {
        self.wait_read | self.wait_write
    }
    /// Whether nobody ever touched the page (since it was last discarded).
    pub const fn untouched(&self) -> bool {
        self.owner == 0
    }
    pub(crate) fn set_owner(&mut self, node: NodeId) {
        self.owner = node.0 + 1;
    }
    /// Whether the page's only copy died.
    pub const fn lost(&self) -> bool {
        matches!(self.phase, Phase::Lost) || self.kind & LOST != 0
    }
    /// Whether a node has a part in what the record says.
    pub const fn mentions(&self, node: NodeId) -> bool {
        let sets = self.copyset | self.acks | self.wait_read | self.wait_write;
        let party = !matches!(self.phase, Phase::Idle | Phase::Lost) && self.party == node.0;
        let owner = self.owner == node.0 + 1 && !self.lost();
        sets & node.bit() != 0 || party || owner
    }
    /// The node that shall be the manager after the transaction under way.
    pub(crate) fn heir(&self) -> Option<NodeId> {
        self.heir.checked_sub(1).map(NodeId)
    }
    pub(crate) fn set_heir(&mut self, heir: Option<NodeId>) {
        self.heir = heir.map_or(0, |node| node.0 + 1);
    }
    /// What travels to the next manager.
    pub(crate) fn record(&self) -> EntryRecord {
        EntryRecord {
            copyset: self.copyset.to_le_bytes(),
            owner: self.owner,
            lost: self.lost(),
        }
    }
    pub(crate) fn restore(record: EntryRecord) -> Entry {
        Entry {
            copyset: u32::from_le_bytes(record.copyset),
            owner: record.owner,
            phase: if record.lost {
                Phase::Lost
            } else {
                Phase::Idle
            },
            ..Entry::default()
        }
    }
    pub(crate) fn busy(&self) -> bool {
        !matches!(self.phase, Phase::Idle | Phase::Lost)
    }
    pub(crate) fn party(&self) -> NodeId {
        NodeId(self.party)
    }
    pub(crate) fn request(&self) -> Access {
        if self.kind & WRITE != 0 {
            Access::Write
        } else {
            Access::Read
        }
    }
    pub(crate) fn is(&self, kind: u8) -> bool {
        self.kind & kind != 0
    }
    pub(crate) fn wait(&mut self, node: NodeId, access: Access) {
        match access {
            Access::Read => self.wait_read |= node.bit(),
            Access::Write => self.wait_write |= node.bit(),
        }
    }
    pub(crate) fn begin(&mut self, phase: Phase, kind: u8, party: NodeId) {
        self.phase = phase;
        self.kind = kind;
        self.party = party.0;
    }
    pub(crate) fn idle(&mut self) {
        self.phase = Phase::Idle;
        self.kind = 0;
        self.party = 0;
        self.acks = 0;
        self.dead = 0;
    }
    /// Takes the next waiting node, in the order of node numbers from the one
    /// served last, round and round.
    pub(crate) fn next_waiting(&mut self) -> Option<(NodeId, Access)> {
        let waiting = self.waiting();
        if waiting == 0 {
            return None;
        }
        let start = (u32::from(self.turn) + 1) & 31;
        let node = (waiting.rotate_right(start).trailing_zeros() + start) & 31;
        let node = NodeId(node as u8);
        self.turn = node.0;
        let access = if self.wait_write & node.bit() != 0 {
            Access::Write
        } else {
            Access::Read
        };
        self.wait_read &= !node.bit();
        self.wait_write &= !node.bit();
        Some((node, access))
    }
}

/// What is left of an [`Entry`] between transactions: the form in which it travels.
/// Bytes, so that a message with it is no larger than any other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EntryRecord {
    pub(crate) copyset: [u8; 4],
    /// Node + 1; 0 for an untouched page.
    pub(crate) owner: u8,
    pub(crate) lost: bool,
}

impl EntryRecord {
    /// Whether the page has an owner that lives, as far as the manager knew.
    pub const fn owned(&self) -> bool {
        self.owner != 0 && !self.lost
    }
}

/// Where the records live. All-zero records are the default; a page that was
/// never mentioned has them.
pub trait Tables {
    /// This node's record of the page.
    fn local(&mut self, page: Page) -> &mut Local;
    /// The directory's record; asked for only at the page's manager. Where managers
    /// are handed over, each node may become the manager of each page.
    fn entry(&mut self, page: Page) -> &mut Entry;
    /// How the page is kept coherent.
    fn policy(&self, page: Page) -> Policy;
}

#[cfg(any(test, feature = "std"))]
pub use in_memory::{MapTables, VecTables};

#[cfg(any(test, feature = "std"))]
mod in_memory {
    use super::{Entry, Local, Tables};
    use crate::types::{Page, Policy};
    use std::collections::BTreeMap;

    /// Tables for pages `0..n`, in two vectors.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct VecTables {
        locals: Vec<Local>,
        entries: Vec<Entry>,
        policies: Vec<Policy>,
    }

    impl VecTables {
        /// Tables for pages `0..pages`, all write-invalidate.
        pub fn new(pages: usize) -> VecTables {
            VecTables {
                locals: vec![Local::default(); pages],
                entries: vec![Entry::default(); pages],
                policies: vec![Policy::Invalidate; pages],
            }
        }
        /// Changes a page's policy.
        pub fn set_policy(&mut self, page: Page, policy: Policy) {
            self.policies[page.0 as usize] = policy;
        }
        /// This node's record, to look at.
        pub fn look(&self, page: Page) -> Local {
            self.locals[page.0 as usize]
        }
        /// The directory's record, to look at.
        pub fn look_entry(&self, page: Page) -> &Entry {
            &self.entries[page.0 as usize]
        }
    }

    impl Tables for VecTables {
        fn local(&mut self, page: Page) -> &mut Local {
            &mut self.locals[page.0 as usize]
        }
        fn entry(&mut self, page: Page) -> &mut Entry {
            &mut self.entries[page.0 as usize]
        }
        fn policy(&self, page: Page) -> Policy {
            self.policies[page.0 as usize]
        }
    }

    /// Tables for any pages, in ordered maps.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct MapTables {
        locals: BTreeMap<u64, Local>,
        entries: BTreeMap<u64, Entry>,
        policies: BTreeMap<u64, Policy>,
    }

    impl MapTables {
        /// Changes a page's policy.
        pub fn set_policy(&mut self, page: Page, policy: Policy) {
            self.policies.insert(page.0, policy);
        }
        /// The pages that this node ever heard of, ascending.
        pub fn pages(&self) -> impl Iterator<Item = (Page, Local)> {
            self.locals
                .iter()
                .map(|(&page, &local)| (Page(page), local))
        }
    }

    impl Tables for MapTables {
        fn local(&mut self, page: Page) -> &mut Local {
            self.locals.entry(page.0).or_default()
        }
        fn entry(&mut self, page: Page) -> &mut Entry {
            self.entries.entry(page.0).or_default()
        }
        fn policy(&self, page: Page) -> Policy {
            self.policies.get(&page.0).copied().unwrap_or_default()
        }
    }
}
