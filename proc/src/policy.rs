//! When to jump.
//!
//! A policy sees each remote fault (a fault, or a system call, that had to wait
//! for another node) and says whether the execution should go to the node that
//! has the page instead of pulling it. Its state is plain data that travels
//! with the execution, since whichever node executes decides.
//!
//! - `never`: pull only.
//! - `fixed`: the paper's rule (ElasticOS §4.4, figure 10): a counter of remote
//!   faults, reset by a jump; at the threshold, jump.
//! - `auto`: the same counter with a threshold that is learned. While the
//!   program runs, time is split into *busy* (its own instructions) and *wait*
//!   (remote faults). The ratio wait/busy just before a jump says what the busy
//!   time after it would have cost if the execution had stayed. When the
//!   execution wants to leave again, the stay is judged:
//!
//!   `gain = busy_here * wait_before / busy_before - wait_here - 2 * jump_cost`
//!
//!   A gain lowers the threshold, a loss doubles it, so a program without
//!   locality jumps a few times and then, for practical purposes, no more; a
//!   clear gain forgets past losses.
//!
//! Times are in ticks of whatever clock the caller uses (the time-stamp
//! counter); only ratios on one node matter, and differences between nodes'
//! clock rates are second order.

use crate::boot::{JUMP_AUTO, JUMP_FIXED, MAX_NODES};

/// Lowest learned threshold: enough faults to see a rate.
pub const THRESHOLD_MIN: u32 = 4;
/// Where learning starts.
pub const THRESHOLD_START: u32 = 16;
/// Highest learned threshold: in effect never, yet finite.
pub const THRESHOLD_MAX: u32 = 1 << 22;
/// A gain of this many times the cost of the stay forgets past losses.
const CLEAR_GAIN: u64 = 4;

/// What to do about a remote fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Pull the page.
    Pull,
    /// Move the execution to the node.
    Jump(usize),
}

/// The policy and what it has learned; travels with the execution.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    kind: u32,
    threshold: u32,
    counts: [u32; MAX_NODES],
    /// Decayed sums over the last few faults.
    recent_busy: u64,
    recent_wait: u64,
    /// The same two at the time of the last jump.
    before_busy: u64,
    before_wait: u64,
    /// Sums since the execution arrived here.
    here_busy: u64,
    here_wait: u64,
    /// Jumps so far; the first stay, at home, is not judged.
    jumps: u64,
    /// 1 once this stay has been judged.
    judged: u64,
}

impl Policy {
    /// A policy of a kind of [`crate::boot`]; `threshold` counts for `fixed`.
    pub fn new(kind: u32, threshold: u32) -> Policy {
        Policy {
            kind,
            threshold: match kind {
                JUMP_FIXED => threshold.max(1),
                _ => THRESHOLD_START,
            },
            counts: [0; MAX_NODES],
            recent_busy: 0,
            recent_wait: 0,
            before_busy: 0,
            before_wait: 0,
            here_busy: 0,
            here_wait: 0,
            jumps: 0,
            judged: 0,
        }
    }

    /// The threshold in force, in remote faults.
    pub fn threshold(&self) -> u32 {
        self.threshold
    }

    /// A fault on a page that `owner` (never the caller's node) has, after
    /// `busy` ticks of the program's own work. `cost` is what one jump takes.
    pub fn fault(&mut self, owner: usize, busy: u64, cost: u64) -> Decision {
        self.here_busy += busy;
        // One long stretch of work belongs to the stay that it ends and says
        // nothing about the burst of faults that begins with it.
        let counted = busy.min(self.recent_wait.max(cost));
        self.recent_busy = self.recent_busy - self.recent_busy / 8 + counted;
        if self.kind != JUMP_FIXED && self.kind != JUMP_AUTO {
            return Decision::Pull;
        }
        self.counts[owner] += 1;
        let reached = match self.kind {
            JUMP_FIXED => self.counts.iter().sum::<u32>() >= self.threshold,
            _ => self.counts[owner] >= self.threshold,
        };
        if !reached {
            return Decision::Pull;
        }
        if self.kind == JUMP_AUTO && self.jumps > 0 && self.judged == 0 {
            self.judge(cost);
            self.judged = 1;
            if self.counts[owner] < self.threshold {
                return Decision::Pull;
            }
        }
        self.leave();
        Decision::Jump(owner)
    }

    /// The time that the last remote fault, or a call sent home, took.
    pub fn waited(&mut self, ticks: u64) {
        self.here_wait += ticks;
        self.recent_wait = self.recent_wait - self.recent_wait / 8 + ticks;
    }

    /// A system call had to go home from here: as good a reason to go home as
    /// a fault on a page of home's.
    pub fn called_home(&mut self, busy: u64, cost: u64) -> Decision {
        if self.kind == JUMP_AUTO {
            self.fault(0, busy, cost)
        } else {
            self.here_busy += busy;
            Decision::Pull
        }
    }

    /// The execution leaves for a reason of its own (a call that only home can
    /// make): the stay is not judged.
    pub fn leave(&mut self) {
        self.jumps += 1;
        self.judged = 0;
        self.counts = [0; MAX_NODES];
        self.before_busy = self.recent_busy;
        self.before_wait = self.recent_wait;
        self.recent_busy = 0;
        self.recent_wait = 0;
        self.here_busy = 0;
        self.here_wait = 0;
    }

    /// Whether coming here paid.
    fn judge(&mut self, cost: u64) {
        let saved = u128::from(self.here_busy) * u128::from(self.before_wait)
            / u128::from(self.before_busy.max(1));
        let saved = u64::try_from(saved).unwrap_or(u64::MAX);
        let spent = self.here_wait.saturating_add(2 * cost).max(1);
        self.threshold = if saved / CLEAR_GAIN > spent {
            THRESHOLD_MIN
        } else if saved > spent + spent / 4 {
            (self.threshold / 2).max(THRESHOLD_MIN)
        } else {
            (self.threshold * 2).min(THRESHOLD_MAX)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::JUMP_NEVER;

    const COST: u64 = 50;

    /// Runs `faults` remote faults with the given work before and wait after
    /// each; returns how many jumps were decided.
    fn run(policy: &mut Policy, faults: usize, busy: u64, wait: u64) -> usize {
        (0..faults)
            .filter(|_| {
                let jumps = policy.fault(1, busy, COST) != Decision::Pull;
                if !jumps {
                    policy.waited(wait);
                }
                jumps
            })
            .count()
    }

    #[test]
    fn never_never_jumps() {
        let mut policy = Policy::new(JUMP_NEVER, 0);
        assert_eq!(run(&mut policy, 10_000, 1, 100), 0);
    }

    #[test]
    fn fixed_jumps_at_its_threshold() {
        let mut policy = Policy::new(JUMP_FIXED, 32);
        assert_eq!(run(&mut policy, 31, 1, 100), 0);
        assert_eq!(run(&mut policy, 1, 1, 100), 1);
        assert_eq!(run(&mut policy, 320, 1, 100), 10);
    }

    #[test]
    fn auto_backs_off_where_jumps_do_not_pay() {
        // The rate of faults is the same wherever the execution is.
        let mut policy = Policy::new(JUMP_AUTO, 0);
        let jumps = run(&mut policy, 100_000, 10, 100);
        assert!(jumps <= 14, "{jumps} jumps");
    }

    /// Faults until the policy jumps; the first comes after `stay` ticks of work.
    fn faults_until_jump(policy: &mut Policy, stay: u64) -> u32 {
        let mut faults = 0;
        let mut busy = stay;
        while policy.fault(1, busy, COST) == Decision::Pull {
            policy.waited(100);
            busy = 1;
            faults += 1;
        }
        faults
    }

    #[test]
    fn auto_jumps_early_where_jumps_pay() {
        // Islands: after each jump long work without a fault, then a burst.
        let mut policy = Policy::new(JUMP_AUTO, 0);
        for _ in 0..4 {
            faults_until_jump(&mut policy, 100_000);
        }
        assert!(faults_until_jump(&mut policy, 100_000) < THRESHOLD_MIN);
        assert_eq!(policy.threshold(), THRESHOLD_MIN);
    }

    #[test]
    fn a_clear_gain_forgets_losses() {
        let mut policy = Policy::new(JUMP_AUTO, 0);
        run(&mut policy, 2_000, 10, 100);
        assert!(policy.threshold() > THRESHOLD_START);
        faults_until_jump(&mut policy, 1);
        faults_until_jump(&mut policy, 10_000_000);
        assert_eq!(policy.threshold(), THRESHOLD_MIN);
    }
}
