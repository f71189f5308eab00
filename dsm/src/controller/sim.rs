//! Seeded simulator of controllers: several nodes whose users read and write at random,
//! operations that take any time, frames that leave after the lock, links that overtake
//! each other, budgets far below what is used, subscriptions, nodes that die. The seed decides
//! everything, time included, so a seed replays a run exactly.
//!
//! The judges look at what anybody can see: what users have mapped, which bytes are in
//! memory, which threads hold a page, what is answered. They do not ask the controller.
//!
//! 1. While a node may write a page, no other may read it.
//! 2. What a node may read is what was written last; so a copy that a subscription
//!    brought is never older than what was read before.
//! 3. A page that a thread holds is not taken from it, and its memory stays.
//! 4. No page is filled, zeroed or given back under its users.
//! 5. A node fills no more memory than its budget and what it had asked for.
//! 6. A subscription brings no more than a few copies that no user looks at.
//! 7. When nothing is in flight, each request was answered, each page has exactly one
//!    owner, and each page can be read, everywhere, with its last bytes. No page is in
//!    transition, no thread has a pin, and no pre-copy is kept.
//! 8. A request ends in a report of a loss only if a node died, and, if the page's
//!    manager lives, only if no live node uses the page.
//! 9. When a node is reported empty, it has nothing, no record mentions it, and no message
//!    is under way to or from it; afterwards none is sent to, from or about it. At all
//!    times a page has one manager, or its manager died.
//! 10. While a request for a page waits at a node, and no operation or visit defers it, no
//!     more users pin the page there than had asked for it before.
//! 11. A page is prefetched only for a user that is there; few requests of prefetches are
//!     under way, and fewer while a thread waits; each prefetch ends.
//! 12. From the moment when all nodes are found to rest until the first ends its rest, no
//!     message is under way, nothing changes, and each page that was written has one owner,
//!     which has its last bytes: a checkpoint of what each owns has each page once.
//! 13. A save that began at such a moment and goes on behind the users has each page that was
//!     written by then, once, with the bytes of that moment, or it is dropped.

mod authority;
mod deaths;
mod departures;
mod host;
mod judges;
mod membership;
mod precopies;
mod prefetches;
mod relocations;
mod requests;
mod rests;
mod saved;
mod saves;
mod scenario;
mod shell;
mod turns;
mod users;
mod world;

use crate::sim::Failure;

pub use scenario::Scenario;
use world::World;

/// Events that a failure shows.
const SHOWN_MAX: usize = 60;
/// No run takes more steps than this after the users have stopped.
const DRAIN_STEPS_MAX: u32 = 200_000;
/// Threads and sleepers of a node at a time.
const USERS_MAX: usize = 4;
/// Pages beyond its budget that a node may fill: what was asked for ahead of its users.
const AHEAD_MAX: usize = 16;

/// What a run did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Events that controllers handled.
    pub events: u64,
    /// Messages that were delivered.
    pub messages: u64,
    /// Reads and writes of users.
    pub accesses: u64,
    /// Operations that were carried out outside the lock.
    pub operations: u64,
    /// Pages that were not taken because they were pinned.
    pub deferred: u64,
    /// Pages that were evicted.
    pub evicted: u64,
    /// Pages whose memory was given back.
    pub given_back: u64,
    /// Requests that waited for room.
    pub room_waits: u64,
    /// Pages that were asked for by a subscription.
    pub subscriptions: u64,
    /// Nodes that died.
    pub deaths: u64,
    /// Reports of pages that were lost with them.
    pub losses: u64,
    /// Nodes that joined.
    pub joins: u64,
    /// Nodes that left.
    pub leaves: u64,
    /// Leaves that were cancelled.
    pub cancels: u64,
    /// Pages whose manager changed.
    pub handed_over: u64,
    /// Pages that followed their users.
    pub prefetched: u64,
    /// Pages that moved after their bytes.
    pub precopied: u64,
    /// Rests of all nodes.
    pub rests: u64,
    /// Those that were given up.
    pub restless: u64,
    /// Pages that were relocated at a rest.
    pub relocated: u64,
    /// Cuts of saves.
    pub cuts: u64,
    /// Saves that were completed.
    pub saves: u64,
    /// Those that were dropped.
    pub dropped_saves: u64,
    /// Pages that were read from a file though nobody asked for them.
    pub loaded: u64,
    /// Wake-ups of threads that did not get their page.
    pub retries: u64,
    /// The most of one thread.
    pub retries_max: u64,
}

impl Outcome {
    /// Adds what another run did.
    pub fn add(&mut self, other: &Outcome) {
        self.events += other.events;
        self.messages += other.messages;
        self.accesses += other.accesses;
        self.operations += other.operations;
        self.deferred += other.deferred;
        self.evicted += other.evicted;
        self.given_back += other.given_back;
        self.room_waits += other.room_waits;
        self.subscriptions += other.subscriptions;
        self.deaths += other.deaths;
        self.losses += other.losses;
        self.joins += other.joins;
        self.leaves += other.leaves;
        self.cancels += other.cancels;
        self.handed_over += other.handed_over;
        self.prefetched += other.prefetched;
        self.precopied += other.precopied;
        self.rests += other.rests;
        self.restless += other.restless;
        self.relocated += other.relocated;
        self.cuts += other.cuts;
        self.saves += other.saves;
        self.dropped_saves += other.dropped_saves;
        self.loaded += other.loaded;
        self.retries += other.retries;
        self.retries_max = self.retries_max.max(other.retries_max);
    }
}

/// Runs a seed.
///
/// # Errors
/// What a judge found, with the seed and the last events.
pub fn run(seed: u64) -> Result<Outcome, Box<Failure>> {
    World::new(seed, &Scenario::from_seed(seed)).run()
}

/// Ways of a shell to be wrong: the judges must find them, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BadShell {
    /// Copies a page's bytes when the frame is sent.
    CopiesLate,
    /// Sends the frames of a link in any order.
    SendsInAnyOrder,
    /// Says that an operation is done before it is.
    SaysDoneEarly,
    /// Lets a thread's pin go before it used its page.
    UnpinsEarly,
    /// Users keep pages that were relocated.
    KeepsRelocated,
    /// Users do not look for their pages anew after a cut.
    KeepsCut,
}

/// Ways of the authority over the machine to be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BadAuthority {
    /// A node that joins asks for pages before all know it.
    JoinsEarly,
    /// Does not ask the others whether they know of nothing about a node that leaves.
    AsksOneNode,
    /// Does not wait until nodes are quiet.
    NotQuiet,
    /// Finds nodes at rest without the counts of messages.
    RestsUncounted,
}

#[cfg(test)]
mod tests;
