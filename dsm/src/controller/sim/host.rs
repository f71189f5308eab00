//! One node of the simulator: its controller, its memory, and its users.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::time::Duration;

use super::Outcome;
use super::prefetches::Prefetched;
use super::requests::Requests;
use super::saved::Copies;
use super::scenario::Kind;
use crate::checker::{Flaw, ZERO_VERSION};
use crate::config::Config;
use crate::controller::{
    Action, Budget, Bytes, Clock, Controller, Count, Event, Pins, Rights, Sink,
};
use crate::protocol::{Body, Content, Message};
use crate::state::VecTables;
use crate::types::{Access, NodeId, Page};

/// Copies in a row that a subscription may ask for and no user looks at.
const UNREAD_MAX: u32 = 5;

/// A message under way, with the version of its page's bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packet {
    pub(super) message: Message,
    pub(super) version: Option<u32>,
}

/// A thread that waits for a page, or has it pinned.
#[derive(Debug)]
pub(super) struct Thread {
    pub number: u64,
    pub page: u64,
    pub access: Access,
    pub woken: bool,
    /// It has the page pinned.
    pub holds: bool,
    /// It has used the page.
    pub works: bool,
    /// How often it was woken without its page.
    pub retries: u64,
}

impl Thread {
    pub fn new(number: u64, page: u64, access: Access) -> Self {
        Self {
            number,
            page,
            access,
            woken: false,
            holds: false,
            works: false,
            retries: 0,
        }
    }

    pub fn holding(page: u64, access: Access) -> Self {
        Self {
            holds: true,
            works: true,
            ..Self::new(0, page, access)
        }
    }
}

/// What is done outside the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Operation {
    what: What,
    first: u64,
    count: u64,
    /// Its end was told.
    said: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Revoke(Option<Access>),
    Map(Access),
    Hide,
    GiveBack,
    Watch,
    Load,
}

impl Operation {
    fn new(what: What, page: u64) -> Self {
        Self {
            what,
            first: page,
            count: 1,
            said: false,
        }
    }

    pub fn pages(&self) -> Range<u64> {
        self.first..self.first + self.count
    }

    /// What the controller is told when it is done.
    pub fn done(&self) -> Option<Event> {
        match self.what {
            What::Watch => None,
            What::GiveBack => Some(Event::GaveBack {
                first: self.first,
                count: self.count,
            }),
            _ => Some(Event::Done { page: self.first }),
        }
    }

    /// The same, once.
    pub fn say(&mut self) -> Option<Event> {
        let unsaid = !std::mem::replace(&mut self.said, true);
        self.done().filter(|_| unsaid)
    }
}

/// Takes a step's actions down.
pub(super) struct Actions {
    pub list: Vec<Action<u32>>,
    version: Option<u32>,
}

impl Actions {
    pub fn new(version: Option<u32>) -> Self {
        Self {
            list: Vec::new(),
            version,
        }
    }
}

impl Sink<u32> for Actions {
    fn act(&mut self, action: Action<u32>) {
        self.list.push(action);
    }

    fn keep(&mut self) -> u32 {
        self.version.unwrap_or(ZERO_VERSION)
    }
}

pub(super) struct Host {
    pub controller: Controller<VecTables, u32>,
    pub rights: Arc<Rights>,
    pub pins: Arc<Pins>,
    pub clock: Clock,
    pub kind: Kind,
    pub threads: Vec<Thread>,
    /// Users that sleep until they may use a page so.
    pub sleepers: Vec<(u64, Access)>,
    pub operations: Vec<Operation>,
    pub requests: Requests,
    pub prefetched: Prefetched,
    pub copies: Copies,
    /// Pages that are only there.
    pub file: BTreeMap<u64, u32>,
    /// A cut lowered rights, which return with the next store.
    pub has_cut: bool,
    config: Config,
    pub budget: Budget,
    /// Pages of its own part, and of others, that its budget is for.
    room: (u64, u64),
    /// What the users have mapped.
    mapped: BTreeMap<u64, Access>,
    versions: Vec<u32>,
    filled: BTreeSet<u64>,
    /// Copies that subscriptions asked for since a user last looked at the page.
    unread: BTreeMap<u64, u32>,
}

/// Whether a page moves whose bytes were sent ahead.
fn is_precopied(message: &Message) -> bool {
    matches!(
        message.body,
        Body::Data {
            content: Content::Precopied,
            ..
        } | Body::Push {
            content: Content::Precopied,
            ..
        }
    )
}

fn unfit(node: NodeId, page: u64, action: &'static str) -> Flaw {
    let page = Page(page);
    Flaw::Memory { page, node, action }
}

impl Host {
    pub fn new(
        config: &Config,
        tables: VecTables,
        pages: u64,
        budget: Budget,
        kind: Kind,
        others: u64,
    ) -> Self {
        let room = (budget.pages().saturating_sub(others), others);
        let rights = Arc::new(Rights::new((0..pages).map(|_| AtomicU8::new(0)).collect()));
        let pins = Arc::<Pins>::default();
        let all = 0..pages;
        let controller = Controller::new(
            config,
            tables,
            rights.clone(),
            pins.clone(),
            budget,
            vec![all],
        );
        Self {
            clock: Clock::new(controller.homes()),
            controller,
            rights,
            pins,
            kind,
            threads: Vec::new(),
            sleepers: Vec::new(),
            operations: Vec::new(),
            requests: Requests::default(),
            prefetched: Prefetched::default(),
            copies: Copies::default(),
            file: BTreeMap::new(),
            has_cut: false,
            config: *config,
            budget,
            room,
            mapped: BTreeMap::new(),
            versions: vec![ZERO_VERSION; pages as usize],
            filled: BTreeSet::new(),
            unread: BTreeMap::new(),
        }
    }

    /// The manager of a page, as far as this node knows.
    pub fn manager_of(&self, page: u64) -> usize {
        let node = &self.controller.node;
        let local = node.tables.look(Page(page));
        node.manager_by(Page(page), local).index()
    }

    /// How many pages this node manages.
    pub fn managed(&self, pages: Range<u64>) -> u64 {
        let me = self.config.me.index();
        pages.filter(|page| self.manager_of(*page) == me).count() as u64
    }

    /// Its own part is larger by some pages.
    pub fn raise_budget(&mut self, pages: u64) {
        if self.budget != Budget::UNLIMITED {
            self.lower_budget(self.room.0 + pages);
        }
    }

    /// Its own part has this many pages.
    pub fn lower_budget(&mut self, own: u64) {
        self.room.0 = own;
        self.budget = Budget::new(own, self.room.1);
        self.controller.set_budget(self.budget);
    }

    pub fn version(&self, page: u64) -> u32 {
        self.versions[page as usize]
    }

    pub fn fill(&mut self, page: u64, version: u32) {
        self.versions[page as usize] = version;
        self.filled.insert(page);
    }

    /// A user looks for a page.
    pub fn look(&mut self, page: u64) {
        self.unread.remove(&page);
    }

    /// Pages of memory that are filled.
    pub fn filled(&self) -> u64 {
        self.filled.len() as u64
    }

    /// Threads and sleepers.
    pub fn users(&self) -> usize {
        self.threads.len() + self.sleepers.len()
    }

    pub fn mapped(&self, page: u64) -> Option<Access> {
        self.mapped.get(&page).copied()
    }

    /// Users gave a page up.
    pub fn unmap(&mut self, page: u64) {
        self.mapped.remove(&page);
    }

    /// Users look for their pages anew: what they may do with them is asked again.
    pub fn look_anew(&mut self) {
        match self.kind {
            Kind::Waits => self.mapped.clear(),
            Kind::Sleeps => {
                for mapped in self.mapped.values_mut() {
                    *mapped = Access::Read;
                }
            }
        }
    }

    /// What users may do with a page, by the protocol's record: what a pre-copy or a cut took
    /// from them returns with the next store, and an absent page is read first.
    pub fn allowed(&mut self, page: u64) -> Option<Access> {
        let lowers = self.has_cut || self.controller.is_precopying();
        let absent = self.file.contains_key(&page);
        let right = self.rights.of(page).or(absent.then_some(Access::Read))?;
        let writable = self.controller.tables().look(Page(page)).writable();
        Some(match lowers && writable {
            true => Access::Write,
            false => right,
        })
    }

    pub fn map_at_least(&mut self, page: u64, access: Access) {
        let mapped = self.mapped.entry(page).or_insert(access);
        *mapped = access.max(*mapped);
    }

    /// What users may do with a page at this moment: by a mapping, or by a pin.
    pub fn used(&self, page: u64) -> Option<Access> {
        let held = self.threads.iter().filter(|thread| thread.holds);
        let held = held.filter(|thread| thread.page == page);
        held.map(|thread| Some(thread.access))
            .max()
            .flatten()
            .max(self.mapped(page))
    }

    /// Whether the hand has to move.
    pub fn evicts(&mut self) -> bool {
        self.clock.evicts(&self.budget, self.rights.resident()) && self.controller.wanted() > 0
    }

    /// Nothing is left of it but what others still see.
    pub fn die(&mut self) {
        self.threads.clear();
        self.sleepers.clear();
        self.operations.clear();
        self.mapped.clear();
    }

    /// Users of a lost page wait no longer. The numbers of the threads among them.
    pub fn give_up(&mut self, page: u64) -> Vec<u64> {
        self.sleepers.retain(|(other, _)| *other != page);
        let waits = |thread: &mut Thread| thread.page == page && !thread.holds;
        let threads = self.threads.extract_if(.., waits);
        threads.map(|thread| thread.number).collect()
    }

    /// Whether this node has nothing left to do. `is_dead`: of nodes.
    pub fn is_idle(&self, now: Duration, is_dead: impl Fn(NodeId) -> bool) -> bool {
        let (filled, users) = (self.rights.resident(), self.users() > 0);
        let due = self.controller.deadline(now).is_some() || self.controller.prefetches();
        let is_full = filled >= self.budget.pages();
        let due = due || self.controller.is_precopying();
        let works = due || self.pins.has_deferred() || !self.operations.is_empty();
        if works || users && !(is_full && self.all_wait()) {
            return false;
        }
        let lacks_room = users || self.budget.is_exceeded(filled);
        !lacks_room || self.is_stuck(is_dead)
    }

    /// Whether a death keeps this node from making room: of the pages that may leave, all
    /// belong to a dead home.
    fn is_stuck(&self, is_dead: impl Fn(NodeId) -> bool) -> bool {
        let is_here = |page: &u64| self.filled.contains(page) || self.rights.of(*page).is_some();
        let here = (0..self.versions.len() as u64).filter(is_here);
        let homes: BTreeSet<usize> = here.map(|page| self.manager_of(page)).collect();
        let mut foreign = homes.into_iter().map(|home| NodeId(home as u8));
        foreign.all(|home| home == self.config.me || is_dead(home))
    }

    fn all_wait(&self) -> bool {
        self.threads
            .iter()
            .all(|thread| !thread.holds && !thread.woken)
    }

    /// When nothing is in flight: no page is in transition, no thread
    /// has a pin, and no pre-copy is kept.
    pub fn judge_left(&self, me: NodeId, page: Page, deaths: bool) -> Result<(), Flaw> {
        let what = match () {
            // An answer that came after its manager's death is ignored, with what it stands for.
            () if !deaths && self.rights.is_precopy(page.0) => "a pre-copy is kept for ever",
            () if self.controller.is_in_transition(page.0) => "a page is in transition",
            () if self.pins.hold(page.0, Duration::MAX) => "a page is pinned",
            () => return Ok(()),
        };
        Err(Flaw::Unanswered {
            page,
            node: me,
            what,
        })
    }

    /// A page that a user waits for.
    pub fn unanswered(&self) -> Option<u64> {
        let waits = |thread: &&Thread| !thread.holds;
        let waits = self.threads.iter().find(waits).map(|thread| thread.page);
        waits.or(self.sleepers.first().map(|(page, _)| *page))
    }

    /// Users that slept on a page that is mapped now.
    pub fn wake_sleepers(&mut self, page: u64) -> Vec<(u64, Access)> {
        if self.mapped(page).is_none() {
            return Vec::new();
        }
        let slept = |(other, _): &mut (u64, Access)| *other == page;
        self.sleepers.extract_if(.., slept).collect()
    }

    /// Judge 11.
    pub fn judge_prefetch(&mut self, me: NodeId, action: &Action<u32>) -> Result<(), Flaw> {
        let waits = self.threads.iter().any(|thread| !thread.holds);
        match (self.prefetched.judge(action, waits), action) {
            (Some(what), Action::Prefetch { page }) => Err(unfit(me, *page, what)),
            (Some(what), Action::Send { message, .. }) => Err(unfit(me, message.page.0, what)),
            _ => Ok(()),
        }
    }

    /// Does what an action says under the lock; begins what it says for later. The page to
    /// judge.
    pub fn carry_out(
        &mut self,
        me: NodeId,
        action: Action<u32>,
        queue: &mut impl FnMut(NodeId, Packet),
        arrived: Option<u32>,
        outcome: &mut Outcome,
    ) -> Result<Option<u64>, Flaw> {
        match action {
            Action::Fill { page, bytes } => {
                self.unused(me, page, "a page is filled under its users")?;
                let version = match bytes {
                    Bytes::Arrived => arrived,
                    Bytes::Kept(version) => Some(version),
                };
                self.fill(page, version.unwrap_or(ZERO_VERSION));
                return Ok(Some(page));
            }
            Action::Zero { page } => {
                self.unused(me, page, "a page is zeroed under its users")?;
                self.fill(page, ZERO_VERSION);
                return Ok(Some(page));
            }
            Action::Save { page } => {
                if !self.copies.put(page, self.version(page)) {
                    return Err(unfit(me, page, "a copy without a buffer"));
                }
            }
            Action::Send { to, message } => {
                let page = message.page.0;
                let version = message.carries_bytes().then(|| self.version(page));
                outcome.precopied += u64::from(is_precopied(&message));
                queue(to, Packet { message, version });
                return Ok(Some(page));
            }
            Action::Revoke { page, kept } => {
                let held = self.threads.iter().filter(|thread| thread.holds);
                if held
                    .filter(|thread| thread.page == page)
                    .any(|thread| Some(thread.access) > kept)
                {
                    let action = "a page is taken from a thread that holds it";
                    return Err(unfit(me, page, action));
                }
                self.operations
                    .push(Operation::new(What::Revoke(kept), page));
            }
            Action::Map { page, right } => {
                self.operations.push(Operation::new(What::Map(right), page));
            }
            Action::Load { page } => self.operations.push(Operation::new(What::Load, page)),
            Action::Hide { page } => self.operations.push(Operation::new(What::Hide, page)),
            Action::Watch { page } => self.operations.push(Operation::new(What::Watch, page)),
            Action::GiveBack { first, count } => self.operations.push(Operation {
                count,
                ..Operation::new(What::GiveBack, first)
            }),
            Action::Wake { waiter, granted } => {
                let woken = |thread: &&mut Thread| thread.number == waiter && !thread.holds;
                if let Some(thread) = self.threads.iter_mut().find(woken) {
                    thread.woken = true;
                    thread.holds |= granted;
                    thread.retries += u64::from(!granted);
                    outcome.retries += u64::from(!granted);
                    outcome.retries_max = outcome.retries_max.max(thread.retries);
                    return Ok(Some(thread.page));
                }
            }
            Action::Count(count, many) => {
                let counter = match count {
                    Count::Deferred => &mut outcome.deferred,
                    Count::EvictedDropped | Count::EvictedSent => &mut outcome.evicted,
                    Count::GivenBack => &mut outcome.given_back,
                    Count::RoomWait => &mut outcome.room_waits,
                    Count::Local | Count::EvictionDenied => return Ok(None),
                };
                *counter += many;
            }
            Action::Fail(failure) => {
                return Err(Flaw::Failed {
                    node: me,
                    failure: failure.to_string(),
                });
            }
            Action::Renew { page } => {
                outcome.subscriptions += 1;
                let unread = self.unread.entry(page).or_default();
                *unread += 1;
                if *unread > UNREAD_MAX {
                    let action = "a subscription to a page that no user looks at";
                    return Err(unfit(me, page, action));
                }
            }
            Action::Prefetch { page } => {
                outcome.prefetched += 1;
                // As by a fault: what comes counts as looked at.
                self.unread.remove(&page);
            }
            Action::Look(_) | Action::Remote { .. } | Action::Waited { .. } => {}
        }
        Ok(None)
    }

    /// Carries out an operation.
    pub fn operate(&mut self, me: NodeId, operation: Operation) -> Result<(), Flaw> {
        let page = operation.first;
        match operation.what {
            What::Revoke(None) => drop(self.mapped.remove(&page)),
            What::Revoke(Some(kept)) => {
                if let Some(mapped) = self.mapped.get_mut(&page) {
                    *mapped = kept.min(*mapped);
                }
            }
            What::Map(right) => drop(self.mapped.insert(page, right)),
            What::Hide | What::Watch if self.kind == Kind::Sleeps => {
                self.mapped.remove(&page);
            }
            What::Hide | What::Watch => {}
            What::Load => self.load(me, page)?,
            What::GiveBack => {
                for page in operation.pages() {
                    self.unused(me, page, "memory is given back under its users")?;
                    self.versions[page as usize] = ZERO_VERSION;
                    self.filled.remove(&page);
                }
            }
        }
        Ok(())
    }

    /// Fills a page from its file.
    pub fn load(&mut self, me: NodeId, page: u64) -> Result<(), Flaw> {
        self.unused(me, page, "a page is read from its file under its users")?;
        match self.file.remove(&page) {
            Some(version) => {
                self.fill(page, version);
                Ok(())
            }
            None => Err(unfit(me, page, "a page is read from its file twice")),
        }
    }

    /// The page's bytes, wherever they are.
    pub fn kept_version(&self, page: u64) -> u32 {
        self.file.get(&page).copied().unwrap_or(self.version(page))
    }

    fn unused(&self, me: NodeId, page: u64, action: &'static str) -> Result<(), Flaw> {
        match self.used(page) {
            None => Ok(()),
            Some(_) => Err(unfit(me, page, action)),
        }
    }
}
