//! Slices that join a running machine and slices that leave it: `docs/membership.md` has the
//! sequences and why they are so.
//!
//! | file | holds |
//! | --- | --- |
//! | `protocol` | the primary's side as a state machine |
//! | `exchange` | pages that vCPUs fetch come, and others go for them |
//! | `histories` | the access history of pages goes along with them |
//! | `steps` | what each slice does when it is told a step |
//! | `succession` | another process takes the place of slice 0 |
//!
//! The owner of the machine's life, on the primary, changes membership, one change at a time:
//! so no vCPU moves, and the machine is neither paused nor resumed, between two stages of a
//! change. Its steps travel as commands. A drain or a pre-copy takes longer: it runs on a
//! thread of the slice whose pages move, while the owner serves others. Without an order, that
//! thread exchanges pages.

mod exchange;
mod histories;
mod protocol;
#[cfg(test)]
mod simulation;
mod steps;
mod succession;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use thiserror::Error;
use weft_coherent_memory::{DrainPlan, DrainTarget, PrecopyProgress, SharedMemory};
use weft_confine::lock;
use weft_dsm::NodeId;
use weft_platform::interrupts::{InterruptRouter, Locations};
use weft_vcpu::PAGE_SIZE;

use super::commands::{DrainReport, DrainShare, PrecopyReport};
use super::peers::Peers;
use exchange::Exchanges;
pub use protocol::{Answer, Authority, Change, Progress, Step};
pub(crate) use steps::numbers;

/// Pages of a drain that may be under way at a time: 1 MiB, so that a fault's message waits
/// for at most 1 ms behind them on a link of 10 Gbit/s.
const WINDOW_PAGES: usize = 256;
/// How long a stage may take in which slices wait for pages in transition.
const SETTLE: Duration = Duration::from_secs(10);
/// Longest wait of the thread that moves pages for its bandwidth.
const PACE_WAIT: Duration = Duration::from_millis(10);
/// Between two looks for pages in transition.
const AGAIN: Duration = Duration::from_millis(1);
/// How often the thread that moves pages looks for the machine's end.
const IDLE_LOOK: Duration = Duration::from_secs(1);
/// How often a thread that waits looks for the machine's end.
const LOOK: Duration = Duration::from_millis(100);

/// Why membership did not change.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ChangeError {
    /// All is as before.
    #[error("{0}")]
    Undone(String),
    /// The machine cannot continue.
    #[error("{0}")]
    Broken(String),
}

/// What a slice tells one that joins: where all vCPUs are, and to whom its own answer.
///
/// Format: 8 bytes for each vCPU of the machine
/// ([`weft_platform::interrupts::Locations::to_bytes`]), then for each vCPU of the sender
/// 16 bytes: number (4), identity (2), zero (2), epoch (8), all little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Introduction {
    pub table: Vec<u8>,
    /// vCPU, identity, epoch.
    pub identities: Vec<(u32, u16, u64)>,
}

const IDENTITY_BYTES: usize = 16;

impl Introduction {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = self.table.clone();
        for (vcpu, identity, epoch) in &self.identities {
            bytes.extend(vcpu.to_le_bytes());
            bytes.extend(u32::from(*identity).to_le_bytes());
            bytes.extend(epoch.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8], cpus: u32) -> Option<Self> {
        let (table, rest) = bytes.split_at_checked(8 * cpus as usize)?;
        let (records, rest) = rest.as_chunks::<IDENTITY_BYTES>();
        let word = |record: &[u8; IDENTITY_BYTES], at: usize| {
            record[at..at + 4].try_into().map(u32::from_le_bytes).ok()
        };
        let identity = |record| {
            let (low, high) = (word(record, 8)?, word(record, 12)?);
            let epoch = u64::from(high) << 32 | u64::from(low);
            Some((
                word(record, 0)?,
                u16::try_from(word(record, 4)?).ok()?,
                epoch,
            ))
        };
        let identities = records.iter().map(identity).collect::<Option<_>>()?;
        let table = table.to_vec();
        rest.is_empty().then_some(Self { table, identities })
    }
}

/// What the thread does that moves pages.
enum Order {
    Drain(Vec<DrainShare>),
    Precopy(Vec<DrainShare>),
    EndPrecopy,
}

/// The work of the thread that moves pages.
#[derive(Default)]
struct PageMoves {
    /// The order that it has not taken yet.
    ordered: Option<Order>,
    is_stopped: bool,
    is_under_way: bool,
    /// Most bytes of pages in a second.
    bytes_per_s: Option<u64>,
    drained: DrainReport,
    /// Of the order that came last: `None` until it has begun, then whether it is over.
    precopy_over: Option<bool>,
    exchanges: Exchanges,
}

impl PageMoves {
    /// Whether what is under way must come to its end.
    fn is_broken(&self) -> bool {
        self.is_stopped || self.ordered.is_some()
    }
}

/// One slice's part in changes of membership.
pub struct Membership {
    number: usize,
    peers: Arc<Peers>,
    locations: Arc<Locations>,
    /// Slices that have introduced themselves to this one, which joins.
    met: Mutex<BTreeSet<usize>>,
    has_met: Condvar,
    moves: Mutex<PageMoves>,
    ordered: Condvar,
}

impl Membership {
    pub(super) fn new(number: usize, peers: Arc<Peers>, locations: Arc<Locations>) -> Arc<Self> {
        Arc::new(Self {
            number,
            peers,
            locations,
            met: Mutex::default(),
            has_met: Condvar::new(),
            moves: Mutex::default(),
            ordered: Condvar::new(),
        })
    }

    /// A slice introduced itself.
    ///
    /// # Errors
    /// What is wrong with what it says.
    pub(super) fn introduced(
        &self,
        from: usize,
        bytes: &[u8],
        interrupts: &InterruptRouter,
    ) -> Result<(), String> {
        let introduction = Introduction::decode(bytes, interrupts.cpus());
        let introduction = introduction.ok_or("its introduction is malformed")?;
        interrupts
            .learn_locations(&introduction.table)
            .map_err(|error| error.to_string())?;
        for (vcpu, identity, epoch) in introduction.identities {
            interrupts
                .identify(vcpu, identity, epoch)
                .map_err(|error| error.to_string())?;
        }
        lock(&self.met).insert(from);
        self.has_met.notify_all();
        Ok(())
    }

    /// Waits until all others have introduced themselves.
    fn meet(&self, patience: Duration) -> Result<(), String> {
        let deadline = Instant::now() + patience;
        let mut met = lock(&self.met);
        loop {
            let mut others = self.peers.others().into_iter();
            let Some(missing) = others.find(|other| !met.contains(other)) else {
                return Ok(());
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.peers.is_over() {
                return Err(format!("node {missing} has not introduced itself"));
            }
            let waited = self.has_met.wait_timeout(met, left.min(LOOK));
            met = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Has the pages here moved to these slices.
    pub(super) fn drain_to(&self, shares: Vec<DrainShare>) {
        self.order(Order::Drain(shares));
    }

    /// Has the pages here sent ahead to these slices.
    pub(super) fn precopy_to(&self, shares: Vec<DrainShare>) {
        self.order(Order::Precopy(shares));
    }

    /// Has everything dropped that was sent ahead and not moved.
    pub(super) fn end_precopy(&self) {
        self.order(Order::EndPrecopy);
    }

    fn order(&self, order: Order) {
        let mut moves = self.moves();
        match order {
            Order::Drain(_) => moves.drained = DrainReport::default(),
            Order::Precopy(_) | Order::EndPrecopy => moves.precopy_over = None,
        }
        moves.ordered = Some(order);
        moves.is_stopped = false;
        self.ordered.notify_all();
    }

    /// Sends no more than this from the next order on.
    pub(super) fn limit_moves(&self, bytes_per_s: Option<u64>) {
        self.moves().bytes_per_s = bytes_per_s;
    }

    /// Returns when no more pages are sent: it looks at least each millisecond.
    pub(super) fn stop_moves(&self) {
        let mut moves = self.moves();
        moves.ordered = None;
        moves.is_stopped = true;
        self.wait_until_idle(moves);
    }

    /// Returns when the thread that moves pages has come to the end of what it does.
    fn wait_until_idle(&self, mut moves: MutexGuard<'_, PageMoves>) {
        while moves.is_under_way && !self.peers.is_over() {
            let waited = self.ordered.wait_timeout(moves, LOOK);
            moves = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn has_vcpus(&self, slice: usize) -> bool {
        self.locations.has_any(slice)
    }

    pub(super) fn drain_report(&self) -> DrainReport {
        self.moves().drained
    }

    /// As it is now: in a paused machine what is settled stays so.
    pub(super) fn precopy_report(&self, memory: &SharedMemory) -> PrecopyReport {
        let moves = self.moves();
        let goes_on = !moves.is_broken() && moves.bytes_per_s.is_none();
        let over = moves.precopy_over;
        drop(moves);
        let Some(is_over) = over else {
            return PrecopyReport::default();
        };
        let progress = memory.precopy_progress(goes_on);
        PrecopyReport {
            sent_pages: progress.sent_pages,
            rounds: progress.rounds,
            round_pages: progress.round_pages,
            left_pages: progress.left_pages,
            is_settled: progress.is_settled,
            is_over,
        }
    }

    /// Moves pages whenever it is ordered, or exchanges some, until the machine is over.
    pub(super) fn move_pages(&self, memory: &SharedMemory) {
        let mut moves = self.moves();
        while !self.peers.is_over() {
            let order = moves.ordered.take();
            let exchange = match order {
                Some(_) => None,
                None => self.next_exchange(&mut moves.exchanges),
            };
            if order.is_none() && exchange.is_none() {
                let due = moves.exchanges.due(Instant::now());
                let waited = self.ordered.wait_timeout(moves, due.unwrap_or(IDLE_LOOK));
                moves = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            moves.is_under_way = true;
            let pace = Pace::new(moves.bytes_per_s);
            drop(moves);
            if let Some(order) = order {
                self.carry_out(memory, order, pace);
            }
            if let Some(step) = exchange {
                self.do_exchange(memory, step);
            }
            moves = self.moves();
            moves.is_under_way = false;
            self.ordered.notify_all();
        }
    }

    fn carry_out(&self, memory: &SharedMemory, order: Order, pace: Pace) {
        match order {
            Order::Drain(shares) => self.drain(memory, &shares, pace),
            Order::Precopy(shares) => memory.precopy(plan(memory, &shares), |progress| {
                pace.wait(progress.sent_pages);
                self.show_precopy(progress)
            }),
            Order::EndPrecopy => memory.end_precopy(|progress| self.show_precopy(progress)),
        }
    }

    fn drain(&self, memory: &SharedMemory, shares: &[DrainShare], pace: Pace) {
        let held = memory.holdings();
        let all = (held.owned + held.copies).max(held.entries);
        self.moves().drained.left_pages = all;
        self.tell_targets(memory, shares);
        memory.drain(plan(memory, shares), |progress| {
            pace.wait(progress.sent_pages);
            let mut moves = self.moves();
            let done = (progress.sent_pages + progress.dropped_copies).max(progress.handed_over);
            moves.drained = DrainReport {
                left_pages: match progress.is_over {
                    true => 0,
                    false => all.saturating_sub(done),
                },
                sent_pages: progress.sent_pages,
                is_over: progress.is_over,
                lacks_room: progress.lacks_target,
            };
            match moves.is_broken() || progress.lacks_target {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
    }

    fn show_precopy(&self, progress: &PrecopyProgress) -> ControlFlow<()> {
        let mut moves = self.moves();
        moves.precopy_over = Some(progress.is_over);
        match moves.is_broken() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    fn moves(&self) -> MutexGuard<'_, PageMoves> {
        lock(&self.moves)
    }

    /// The machine is over: nobody waits any more.
    pub(super) fn end(&self) {
        self.ordered.notify_all();
        self.has_met.notify_all();
    }
}

/// Keeps the thread that moves pages within a number of bytes in a second.
struct Pace {
    begun: Instant,
    bytes_per_s: Option<u64>,
}

impl Pace {
    fn new(bytes_per_s: Option<u64>) -> Self {
        Self {
            begun: Instant::now(),
            bytes_per_s,
        }
    }

    /// Waits until `sent_pages` may have been sent, but no longer than [`PACE_WAIT`]: the
    /// thread must hear of its next order.
    fn wait(&self, sent_pages: u64) {
        let early = self.early(sent_pages, self.begun.elapsed());
        if !early.is_zero() {
            std::thread::sleep(early.min(PACE_WAIT));
        }
    }

    /// How much too early these pages have been sent, after so long.
    fn early(&self, sent_pages: u64, elapsed: Duration) -> Duration {
        let Some(bytes_per_s) = self.bytes_per_s else {
            return Duration::ZERO;
        };
        let seconds = (sent_pages * PAGE_SIZE) as f64 / bytes_per_s.max(1) as f64;
        let due = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        due.saturating_sub(elapsed)
    }
}

/// All of a slice's memory, to these slices.
fn plan(memory: &SharedMemory, shares: &[DrainShare]) -> DrainPlan {
    let parts = memory.ram().parts().into_iter();
    let target = |share: &DrainShare| DrainTarget {
        node: NodeId(share.slice as u8),
        pages: share.pages,
    };
    DrainPlan {
        pages: parts
            .map(|(start, length, _)| start / PAGE_SIZE..(start + length) / PAGE_SIZE)
            .collect(),
        targets: shares.iter().map(target).collect(),
        window_pages: WINDOW_PAGES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_keep_within_a_bandwidth() {
        let pace = Pace::new(Some(1 << 20));
        let seconds = Duration::from_secs;
        assert_eq!(pace.early(256, seconds(1)), Duration::ZERO);
        assert_eq!(pace.early(512, seconds(1)), seconds(1));
        assert_eq!(
            Pace::new(None).early(u64::MAX >> 12, seconds(0)),
            Duration::ZERO
        );
    }

    #[test]
    fn an_introduction_comes_out_as_it_went_in() {
        let introduction = Introduction {
            table: (0..24).collect(),
            identities: vec![(2, 0x208, 7), (254, 1, 1 << 47)],
        };
        let bytes = introduction.encode();
        assert_eq!(Introduction::decode(&bytes, 3), Some(introduction));
        assert_eq!(Introduction::decode(&bytes, 4), None);
        assert_eq!(Introduction::decode(&bytes[1..], 3), None);
    }
}
