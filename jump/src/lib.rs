//! When an execution jumps: of a program, or of a virtual machine's vCPU.
//!
//! A policy sees each remote fault (a fault, or a system call, that had to wait
//! for another node) and says whether the execution should go to the node that
//! has the page instead of pulling it. Its state is plain data that travels
//! with the execution, since whichever node executes decides.
//!
//! - `never`: pull only.
//! - `fixed`: the paper's rule (ElasticOS, sections 4 and 5.1): a counter of
//!   remote faults, reset by a jump; at the threshold, jump.
//! - `auto`: such a counter and a threshold for each node, which is learned.
//!   While the program runs, time is split into *busy* (its own instructions)
//!   and *wait* (remote faults). The execution has a *base*; a jump elsewhere
//!   is a *trial*, judged after [`TRIAL_FAULTS`] faults there:
//!
//!   `gain = busy_here * wait_before / busy_before - 2 * wait_here - 2 * jump_cost`
//!
//!   The ratio wait/busy just before the jump says what the busy time after it
//!   would have cost if the execution had stayed; what was pulled here may have
//!   to be pulled back, so it counts twice. With a gain the node becomes the
//!   base and its threshold the lowest. Otherwise the execution returns, before
//!   its working set follows it, and the node's threshold doubles. Once the time
//!   that passed since is many times the loss, the learned thresholds are capped,
//!   so a program that enters a new phase is not left where an earlier one taught.
//!
//! A trial cannot find a node that is better only once the working set has moved
//! there. That node is found by its room: of each fault on a page that left to make
//! room, the caller knows at which nodes the page would have stayed
//! ([`Policy::missed`]). When the waits for such pages, less a part of the time
//! between them, pass what it takes to move everything that is here, the execution
//! goes there for good, as in the ski-rental problem: at most twice as
//! much is lost as with foreknowledge. There are no trials before
//! the price has been paid again, and later only while the program waits more than
//! it works. A trial that pays goes on, judged every [`TRIAL_FAULTS`], but does not
//! make another base: eight faults weigh little against the price.
//!
//! Times are in ticks of whatever clock the caller uses (the time-stamp
//! counter); only ratios on one node matter, and differences between nodes'
//! clock rates are second order.
//!
//! A vCPU brings a kernel along: the first faults after each jump are on its stack and on
//! what the kernel keeps for its processor. Its trials are therefore longer
//! ([`Policy::with_trials`]), and all thresholds are in proportion.
#![cfg_attr(not(test), no_std)]

pub mod follower;

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Nodes that an aggregate may span.
pub const MAX_NODES: usize = 16;

/// Jump policy: never.
pub const JUMP_NEVER: u32 = 0;
/// Jump policy: after a number of remote faults.
pub const JUMP_FIXED: u32 = 1;
/// Jump policy: adaptive.
pub const JUMP_AUTO: u32 = 2;

/// Faults after which a trial is judged, if not chosen otherwise.
pub const TRIAL_FAULTS: u32 = 8;
/// Longest trial.
const TRIAL_FAULTS_MAX: u32 = 1 << 12;
/// Highest learned threshold: in effect never, yet finite.
pub const THRESHOLD_MAX: u32 = 1 << 22;
/// Losses are small below this part of the time.
const SMALL_PART: u64 = 64;
/// Most ticks that a policy from a peer may have counted: nine years at 4 GHz. No
/// sum overflows before the program has run as long again.
const TICKS_MAX: u64 = 1 << 60;
/// Most faults that a policy from a peer may have counted since its last jump.
const FAULTS_MAX: u32 = 1 << 31;
/// Waits because room is short are borne up to this part of the program's own time.
const BORNE_PART: u64 = 4;

/// What to do about a remote fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Pull the page.
    Pull,
    /// Move the execution to the node.
    Jump(usize),
}

/// What moving takes.
#[derive(Clone, Copy, Debug)]
pub struct Price {
    /// Ticks of one jump.
    pub jump: u64,
    /// Pages that are here, and have to be fetched if they are needed elsewhere.
    pub pages: u64,
}

/// The policy and what it has learned; travels with the execution.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
pub struct Policy {
    kind: u32,
    /// Where the execution is.
    here: u32,
    /// Where it returns to if the trial fails; `here` when this is no trial.
    base: u32,
    /// Remote faults since the execution arrived here; in `auto`, pages that they brought.
    faults: u32,
    /// Faults after which a trial is judged.
    trial_faults: u32,
    /// Zero.
    reserved: u32,
    /// Those on pages of each node.
    counts: [u32; MAX_NODES],
    /// How many of them send the execution there.
    thresholds: [u32; MAX_NODES],
    /// Decayed sums over the last few faults.
    recent_busy: u64,
    recent_wait: u64,
    /// The same two at the time of the last jump.
    before_busy: u64,
    before_wait: u64,
    /// Sums since the execution arrived here.
    here_busy: u64,
    here_wait: u64,
    /// What a wait takes, on average over the last few.
    typical_wait: u64,
    /// All of the time; and what failed trials have cost, with the small part of the time that
    /// they could have cost before.
    elapsed: u64,
    lost: u64,
    /// Waits that each node would have saved by its room.
    regrets: [u64; MAX_NODES],
    /// What has still to be waited before a move for room has paid.
    unpaid: u64,
    /// Whether the base was chosen for its room (0 or 1).
    roomy: u64,
}

/// The bytes are no policy of this aggregate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// Another length.
    #[error("a policy has {expected} bytes, not {0}", expected = size_of::<Policy>())]
    Length(usize),
    /// Another kind than every node was started with.
    #[error("the policy is of kind {found} and not {own}")]
    Kind {
        /// The kind here.
        own: u32,
        /// The kind of the peer's.
        found: u32,
    },
    /// A field that no policy holds.
    #[error("the policy's {0} is out of bounds")]
    Field(&'static str),
}

impl Policy {
    /// Takes over what the policy of a peer has learned. `nodes` is their number.
    ///
    /// # Errors
    /// [`PolicyError`] when it is no policy of this aggregate; `self` stays then.
    pub fn decode(&mut self, bytes: &[u8], nodes: usize) -> Result<(), PolicyError> {
        let arrived =
            Policy::read_from_bytes(bytes).map_err(|_| PolicyError::Length(bytes.len()))?;
        arrived.check(self, nodes)?;
        *self = arrived;
        Ok(())
    }

    /// What every policy holds that this code made; nothing here overflows or
    /// goes out of bounds with it.
    fn check(&self, own: &Policy, nodes: usize) -> Result<(), PolicyError> {
        let kind = own.kind;
        if self.kind != kind {
            let found = self.kind;
            return Err(PolicyError::Kind { own: kind, found });
        }
        let thresholds = match kind {
            JUMP_FIXED => 1..=u32::MAX,
            _ => threshold_min(self.trial_faults)..=THRESHOLD_MAX,
        };
        let ticks = [
            self.recent_busy,
            self.recent_wait,
            self.before_busy,
            self.before_wait,
            self.here_busy,
            self.here_wait,
            self.typical_wait,
            self.elapsed,
            self.unpaid,
        ];
        let (regrets, of_none) = self.regrets.split_at(nodes.min(MAX_NODES));
        let bounds = [
            ("place", (self.here as usize) < nodes),
            ("base", (self.base as usize) < nodes),
            ("count of faults", self.faults <= FAULTS_MAX),
            ("count", self.counts.iter().all(|&c| c <= FAULTS_MAX)),
            (
                "threshold",
                self.thresholds.iter().all(|t| thresholds.contains(t)),
            ),
            ("time", ticks.iter().all(|&t| t <= TICKS_MAX)),
            ("regret", regrets.iter().all(|&t| t <= TICKS_MAX)),
            ("regret of no node", of_none.iter().all(|&t| t == 0)),
            ("choice of a base", self.roomy <= 1),
            (
                "length of a trial",
                self.trial_faults == own.trial_faults && self.reserved == 0,
            ),
        ];
        match bounds.iter().find(|(_, holds)| !holds) {
            Some((field, _)) => Err(PolicyError::Field(field)),
            None => Ok(()),
        }
    }

    /// A policy of a kind, [`JUMP_AUTO`] for example; `threshold` counts for `fixed`.
    pub fn new(kind: u32, threshold: u32) -> Policy {
        Policy {
            kind,
            here: 0,
            base: 0,
            faults: 0,
            trial_faults: TRIAL_FAULTS,
            reserved: 0,
            counts: [0; MAX_NODES],
            thresholds: match kind {
                JUMP_FIXED => [threshold.max(1); MAX_NODES],
                _ => [threshold_start(TRIAL_FAULTS); MAX_NODES],
            },
            recent_busy: 0,
            recent_wait: 0,
            before_busy: 0,
            before_wait: 0,
            here_busy: 0,
            here_wait: 0,
            typical_wait: 0,
            elapsed: 0,
            lost: 0,
            regrets: [0; MAX_NODES],
            unpaid: 0,
            roomy: 0,
        }
    }

    /// The same with trials of `faults`, 2 to 4096, before it has learned anything.
    pub fn with_trials(mut self, faults: u32) -> Policy {
        self.trial_faults = faults.clamp(2, TRIAL_FAULTS_MAX);
        if self.kind != JUMP_FIXED {
            self.thresholds = [threshold_start(self.trial_faults); MAX_NODES];
        }
        self
    }

    /// Where the execution is, or goes.
    pub fn place(&self) -> usize {
        self.here as usize
    }

    /// Where it returns to if the trial fails.
    pub fn base(&self) -> usize {
        self.base as usize
    }

    /// Whether the execution is at its base, and trials at `node` did not pay: the first one, or
    /// three in a row after one that did. The node's pages had better come here then.
    pub fn stays_away_from(&self, node: usize) -> bool {
        self.kind == JUMP_AUTO
            && self.here == self.base
            && self.thresholds[node] > threshold_start(self.trial_faults)
    }

    /// The threshold for going to a node, in remote faults.
    #[cfg(test)]
    fn threshold(&self, node: usize) -> u32 {
        self.thresholds[node]
    }

    /// A fault on a page that `owner` (never the caller's node) has, after
    /// `busy` ticks of the program's own work.
    pub fn fault(&mut self, owner: usize, busy: u64, price: Price) -> Decision {
        self.fault_with_others(owner, 1, busy, price)
    }

    /// The same for a fault that brings `pages` at once. Without read-ahead each of them
    /// would have been a fault, so `auto` counts them all; `fixed` counts faults.
    pub fn fault_with_others(
        &mut self,
        owner: usize,
        pages: u32,
        busy: u64,
        price: Price,
    ) -> Decision {
        self.worked(busy, price);
        let weight = match self.kind {
            JUMP_AUTO => pages,
            _ => 1,
        };
        for count in [&mut self.counts[owner], &mut self.faults] {
            *count = count.saturating_add(weight).min(FAULTS_MAX);
        }
        let target = match self.kind {
            JUMP_FIXED => (self.faults >= self.thresholds[owner]).then_some(owner),
            JUMP_AUTO => self.adapt(owner, price),
            _ => None,
        };
        match target {
            None => Decision::Pull,
            Some(node) => {
                self.move_to(node);
                if self.kind == JUMP_FIXED {
                    self.base = node as u32;
                }
                Decision::Jump(node)
            }
        }
    }

    /// A fault that is no reason to go anywhere, after `busy` ticks of the program's own
    /// work: other nodes only had to give up their copies of a page.
    pub fn stray_fault(&mut self, busy: u64, price: Price) {
        self.worked(busy, price);
    }

    /// The faults so far are a weaker reason to go: time has passed since.
    pub fn fade(&mut self) {
        for count in &mut self.counts {
            *count /= 2;
        }
    }

    fn worked(&mut self, busy: u64, price: Price) {
        self.ran(busy);
        // One long stretch of work belongs to the stay that it ends and says
        // nothing about the burst of faults that begins with it.
        let counted = busy.min(self.recent_wait.max(price.jump));
        self.recent_busy = self.recent_busy - self.recent_busy / 8 + counted;
    }

    /// Where what was learned sends the execution.
    fn adapt(&mut self, owner: usize, price: Price) -> Option<usize> {
        if let Some(node) = self.worth_moving_to(price) {
            self.base = node as u32;
            self.unpaid = self.typical_wait.saturating_mul(price.pages);
            self.roomy = 1;
            self.regrets = [0; MAX_NODES];
            return (node != self.here as usize).then_some(node);
        }
        if self.here != self.base {
            if self.faults < self.trial_faults {
                return None;
            }
            if !self.has_paid(price.jump) {
                return Some(self.base as usize);
            }
            if self.roomy != 0 {
                self.begin_stay();
                return None;
            }
            self.base = self.here;
        }
        if self.unpaid > 0 || self.roomy != 0 && self.recent_wait <= self.recent_busy {
            return None;
        }
        let explores = self.lost < self.elapsed / SMALL_PART;
        let cap = match explores {
            true => threshold_start(self.trial_faults),
            false => u32::MAX,
        };
        (self.counts[owner] >= self.thresholds[owner].min(cap)).then_some(owner)
    }

    /// The node whose room would have saved most, if that is more than it takes to
    /// move there.
    fn worth_moving_to(&self, price: Price) -> Option<usize> {
        let most = (0..MAX_NODES).max_by_key(|&node| self.regrets[node])?;
        let cost = self.typical_wait.saturating_mul(price.pages);
        (self.regrets[most] > cost).then_some(most)
    }

    /// Judges the trial.
    fn has_paid(&mut self, cost: u64) -> bool {
        let saved = u128::from(self.here_busy) * u128::from(self.before_wait)
            / u128::from(self.before_busy.max(1));
        let saved = u64::try_from(saved).unwrap_or(u64::MAX);
        let spent = self.here_wait.saturating_add(cost).saturating_mul(2);
        let threshold = &mut self.thresholds[self.here as usize];
        if saved > spent {
            *threshold = threshold_min(self.trial_faults);
            self.lost = self.lost.saturating_sub(saved - spent);
        } else {
            *threshold = (*threshold * 2).min(THRESHOLD_MAX);
            // What was not lost so far is no credit: a long time without trials would pay for
            // many at once.
            let lost = self.lost.max(self.elapsed / SMALL_PART);
            self.lost = lost.saturating_add(spent - saved);
        }
        saved > spent
    }

    fn ran(&mut self, busy: u64) {
        self.here_busy += busy;
        self.elapsed += busy;
        for regret in &mut self.regrets {
            *regret = regret.saturating_sub(busy / BORNE_PART);
        }
    }

    /// The last wait was for a page that had left to make room, and would have
    /// stayed at `node`, which has more.
    pub fn missed(&mut self, node: usize, ticks: u64) {
        self.regrets[node] += ticks;
    }

    /// The time that the last remote fault, or a call sent home, took.
    pub fn waited(&mut self, ticks: u64) {
        self.elapsed += ticks;
        self.unpaid = self.unpaid.saturating_sub(ticks);
        // A stray long wait (for an eviction, or for a processor) would outweigh
        // all others of a trial.
        let counted = match self.typical_wait {
            0 => ticks,
            typical => ticks.min(typical * 3),
        };
        self.typical_wait = self.typical_wait - self.typical_wait / 16 + counted.div_ceil(16);
        self.here_wait += counted;
        self.recent_wait = self.recent_wait - self.recent_wait / 8 + counted;
    }

    /// A system call had to go home from here: as good a reason to go home as
    /// a fault on a page of home's. The decision may be another node than home: the base
    /// to which a failed trial returns.
    pub fn called_home(&mut self, busy: u64, price: Price) -> Decision {
        if self.kind == JUMP_AUTO {
            self.fault(0, busy, price)
        } else {
            self.ran(busy);
            Decision::Pull
        }
    }

    /// The execution goes home for a reason of its own (a call that only home
    /// can make): nothing is judged, but it returns to a base that was chosen for
    /// its room.
    pub fn leave(&mut self) {
        if self.roomy == 0 {
            return self.stay(0);
        }
        self.move_to(0);
    }

    /// The jump that was decided cannot be made: the execution stays at `node`,
    /// which is its base now.
    pub fn stay(&mut self, node: usize) {
        self.move_to(node);
        self.base = node as u32;
        self.roomy = 0;
        self.unpaid = 0;
    }

    fn move_to(&mut self, node: usize) {
        self.here = node as u32;
        self.before_busy = self.recent_busy;
        self.before_wait = self.recent_wait;
        self.recent_busy = 0;
        self.recent_wait = 0;
        self.begin_stay();
    }

    /// What is judged next begins here and now.
    fn begin_stay(&mut self) {
        self.faults = 0;
        self.counts = [0; MAX_NODES];
        self.here_busy = 0;
        self.here_wait = 0;
    }
}

/// Lowest learned threshold: enough faults to see a rate.
const fn threshold_min(trial_faults: u32) -> u32 {
    trial_faults / 2
}

/// Where learning starts, and the cap while losses are small.
const fn threshold_start(trial_faults: u32) -> u32 {
    trial_faults * 2
}

#[cfg(test)]
mod tests {
    use super::*;

    const THRESHOLD_MIN: u32 = threshold_min(TRIAL_FAULTS);
    const THRESHOLD_START: u32 = threshold_start(TRIAL_FAULTS);

    const COST: u64 = 50;
    const PRICE: Price = Price {
        jump: COST,
        pages: 1000,
    };
    const WAIT: u64 = 100;

    /// Two nodes; every fault is on a page of the other one.
    struct World {
        policy: Policy,
        place: usize,
        jumps: u64,
    }

    impl World {
        fn new(kind: u32, threshold: u32) -> World {
            World {
                policy: Policy::new(kind, threshold),
                place: 0,
                jumps: 0,
            }
        }

        /// One fault after so much work; true when the execution moved.
        fn fault(&mut self, busy: u64) -> bool {
            match self.policy.fault(1 - self.place, busy, PRICE) {
                Decision::Pull => {
                    self.policy.waited(WAIT);
                    false
                }
                Decision::Jump(node) => {
                    self.place = node;
                    self.jumps += 1;
                    true
                }
            }
        }

        /// Faults at the same rate wherever the execution is.
        fn scattered(&mut self, faults: usize) {
            for _ in 0..faults {
                self.fault(10);
            }
        }

        /// Faults because room is short at node 0, where the working set does not fit; at
        /// node 1, where it does, only until it has come there. Says after how many
        /// faults the execution was there for good.
        fn cramped(&mut self, busy: u64, faults: u64) -> Option<u64> {
            let mut to_come = PRICE.pages;
            let mut moved = None;
            for fault in 0..faults {
                if self.place == 0 {
                    to_come = PRICE.pages;
                    moved = None;
                    if !self.fault(busy) {
                        self.policy.missed(1, WAIT);
                    }
                } else {
                    moved.get_or_insert(fault);
                    let more = if to_come > 0 { 0 } else { 100 * WAIT };
                    to_come = to_come.saturating_sub(1);
                    self.fault(busy + more);
                }
            }
            moved
        }

        /// Long work without a fault after each jump, then a burst of faults;
        /// returns how many until the execution moves on.
        fn island(&mut self) -> u32 {
            let mut faults = 0;
            let mut busy = 100_000;
            while !self.fault(busy) {
                busy = 1;
                faults += 1;
            }
            faults
        }
    }

    #[test]
    fn a_policy_arrives_with_what_it_learned() {
        let mut world = World::new(JUMP_AUTO, 0);
        world.scattered(1000);
        let mut here = Policy::new(JUMP_AUTO, 0);
        here.decode(world.policy.as_bytes(), 2).unwrap();
        assert_eq!(here, world.policy);
    }

    #[test]
    fn a_policy_that_was_never_made_is_refused() {
        let own = Policy::new(JUMP_AUTO, 0);
        let refused = |damage: fn(&mut Policy), error: PolicyError| {
            let mut sent = own;
            damage(&mut sent);
            let mut here = own;
            assert_eq!(here.decode(sent.as_bytes(), 2), Err(error));
            assert_eq!(here, own);
        };
        refused(|p| p.here = 2, PolicyError::Field("place"));
        refused(|p| p.base = u32::MAX, PolicyError::Field("base"));
        refused(
            |p| p.faults = u32::MAX,
            PolicyError::Field("count of faults"),
        );
        refused(|p| p.counts[1] = u32::MAX, PolicyError::Field("count"));
        refused(|p| p.thresholds[0] = 0, PolicyError::Field("threshold"));
        refused(
            |p| p.thresholds[0] = u32::MAX,
            PolicyError::Field("threshold"),
        );
        refused(|p| p.typical_wait = u64::MAX, PolicyError::Field("time"));
        refused(|p| p.regrets[1] = u64::MAX, PolicyError::Field("regret"));
        let of_none = PolicyError::Field("regret of no node");
        refused(|p| p.regrets[2] = 1, of_none);
        refused(|p| p.roomy = 2, PolicyError::Field("choice of a base"));
        let trial = PolicyError::Field("length of a trial");
        refused(|p| p.trial_faults = 9, trial);
        refused(|p| p.reserved = 1, trial);
        let (own_kind, found) = (JUMP_AUTO, JUMP_FIXED);
        let kind = PolicyError::Kind {
            own: own_kind,
            found,
        };
        refused(|p| p.kind = JUMP_FIXED, kind);
        let length = own.as_bytes().len();
        for wrong in [0, length - 1] {
            let cut = &own.as_bytes()[..wrong];
            let mut here = own;
            assert_eq!(here.decode(cut, 2), Err(PolicyError::Length(wrong)));
        }
    }

    #[test]
    fn never_never_jumps() {
        let mut world = World::new(JUMP_NEVER, 0);
        world.scattered(10_000);
        assert_eq!(world.jumps, 0);
    }

    #[test]
    fn fixed_jumps_at_its_threshold() {
        let mut world = World::new(JUMP_FIXED, 32);
        world.scattered(31);
        assert_eq!(world.jumps, 0);
        world.scattered(1);
        assert_eq!(world.jumps, 1);
        world.scattered(320);
        assert_eq!(world.jumps, 11);
    }

    #[test]
    fn what_auto_loses_by_trying_is_a_small_part_of_the_time() {
        let mut world = World::new(JUMP_AUTO, 0);
        world.scattered(100_000);
        assert!(world.jumps > 20, "it goes on trying");
        assert!(world.policy.lost <= world.policy.elapsed / SMALL_PART + 10 * WAIT * 16);
        assert!(world.jumps * COST < world.policy.elapsed / 50);
    }

    #[test]
    fn a_trial_that_does_not_pay_ends_early() {
        let mut world = World::new(JUMP_AUTO, 0);
        world.scattered(THRESHOLD_START as usize);
        assert_eq!((world.place, world.jumps), (1, 1));
        world.scattered(TRIAL_FAULTS as usize);
        assert_eq!((world.place, world.jumps), (0, 2));
        assert_eq!(world.policy.threshold(1), 2 * THRESHOLD_START);
    }

    #[test]
    fn what_was_not_lost_for_long_pays_for_one_trial() {
        let mut world = World::new(JUMP_AUTO, 0);
        world.policy.waited(1 << 40);
        world.scattered(2000);
        // To and fro as the threshold doubles, and not each time that it is reached.
        assert!((6..=14).contains(&world.jumps), "{} jumps", world.jumps);
    }

    #[test]
    fn it_stays_away_from_where_a_trial_did_not_pay() {
        let mut world = World::new(JUMP_AUTO, 0);
        world.scattered(THRESHOLD_START as usize);
        assert_eq!(world.place, 1);
        assert!(!world.policy.stays_away_from(0), "a trial");
        world.scattered(TRIAL_FAULTS as usize);
        assert_eq!(world.place, 0);
        assert!(world.policy.stays_away_from(1));
        for _ in 0..8 {
            world.island();
        }
        let both = [0, 1].map(|node| world.policy.stays_away_from(node));
        assert_eq!(both, [false, false], "jumps pay now");
        let mut fixed = World::new(JUMP_FIXED, 32);
        fixed.scattered(1000);
        assert!(!fixed.policy.stays_away_from(1 - fixed.place));
    }

    #[test]
    fn auto_jumps_early_where_jumps_pay() {
        let mut world = World::new(JUMP_AUTO, 0);
        for _ in 0..4 {
            world.island();
        }
        // A node is judged when eight faults were seen on it.
        assert!(world.island() <= TRIAL_FAULTS);
        assert_eq!(world.policy.threshold(0), THRESHOLD_MIN);
        assert_eq!(world.policy.threshold(1), THRESHOLD_MIN);
    }

    #[test]
    fn auto_goes_where_the_working_set_fits() {
        let mut world = World::new(JUMP_AUTO, 0);
        let moved = world.cramped(10, 100_000).expect("it moved");
        // The waits that count are those at node 0, but for a part of the work.
        assert!(moved > PRICE.pages, "{moved}");
        assert!(moved < PRICE.pages * 3 / 2, "{moved}");
    }

    #[test]
    fn work_with_few_waits_stays_where_it_is() {
        let mut world = World::new(JUMP_AUTO, 0);
        assert_eq!(world.cramped(WAIT * BORNE_PART, 100_000), None);
    }

    #[test]
    fn the_execution_returns_to_where_the_working_set_fits() {
        let mut world = World::new(JUMP_AUTO, 0);
        world.cramped(10, 100_000);
        world.policy.leave();
        world.place = 0;
        world.scattered(TRIAL_FAULTS as usize);
        assert_eq!(world.place, 1);
    }

    #[test]
    fn a_base_with_room_is_left_only_as_long_as_it_pays() {
        let mut world = World::new(JUMP_AUTO, 0);
        world.cramped(10, 100_000);
        // Waits for nearly all of the time: a trial, which pays.
        let mut faults = 0;
        while world.place == 1 {
            world.fault(10);
            faults += 1;
        }
        assert!(faults <= 2 * THRESHOLD_START, "{faults}");
        for _ in 0..10 * TRIAL_FAULTS {
            world.fault(100 * WAIT);
        }
        assert_eq!(world.place, 0);
        assert!((0..2 * TRIAL_FAULTS).any(|_| world.fault(10) && world.place == 1));
    }

    #[test]
    fn a_stray_long_wait_decides_nothing() {
        let mut world = World::new(JUMP_AUTO, 0);
        world.scattered(THRESHOLD_START as usize - 1);
        world.policy.waited(1000 * WAIT);
        world.scattered(1 + TRIAL_FAULTS as usize);
        assert_eq!((world.place, world.jumps), (0, 2));
    }

    #[test]
    fn longer_trials_have_thresholds_in_proportion() {
        let mut world = World::new(JUMP_AUTO, 0);
        world.policy = world.policy.with_trials(64);
        world.scattered(127);
        assert_eq!(world.jumps, 0);
        world.scattered(1 + 63);
        assert_eq!((world.place, world.jumps), (1, 1));
        world.scattered(1);
        assert_eq!((world.place, world.jumps), (0, 2));
        assert_eq!(world.policy.threshold(1), 256);
    }

    #[test]
    fn strays_and_faded_faults_are_no_reason() {
        let mut world = World::new(JUMP_AUTO, 0);
        for _ in 0..1000 {
            world.policy.stray_fault(10, PRICE);
            world.policy.waited(WAIT);
        }
        world.scattered(THRESHOLD_START as usize - 1);
        world.policy.fade();
        world.scattered(THRESHOLD_START as usize / 2);
        assert_eq!(world.jumps, 0);
        world.scattered(1);
        assert_eq!(world.jumps, 1);
    }

    #[test]
    fn a_new_phase_is_found() {
        let mut world = World::new(JUMP_AUTO, 0);
        world.scattered(100_000);
        let faults: u32 = (0..8).map(|_| world.island()).sum();
        assert!(faults < 8 * 100, "{faults} faults in eight islands");
    }
}
