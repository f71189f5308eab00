//! The account of all harm that the test does, from which an end can be explained.

use std::time::{Duration, Instant};

/// What a loss may follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Harm {
    /// A daemon was killed, and its slices with it.
    Daemon(usize),
    /// All processes of a host were killed.
    Host(usize),
    /// A daemon was stopped and continued.
    Stopped(usize),
    /// A daemon was asked to end.
    Ended(usize),
    /// A process of a slice was killed.
    Slice(usize),
    /// What one place sends to another vanishes, in at least one direction.
    Cut(usize, usize),
    /// The store has no majority, or a host cannot reach it.
    Store,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) harm: Harm,
    pub(super) from: Instant,
    /// When it was put right; `None` while it lasts.
    pub(super) to: Option<Instant>,
}

/// A cut or a stop that is shorter loses nothing: the lease is [`super::work::LEASE`].
pub(super) const HARMLESS: Duration = Duration::from_secs(3);
/// Links notice their end, processes end, and messages are written within this, on a busy host.
pub(super) const AFTERMATH: Duration = Duration::from_secs(40);
/// Daemons and their leases come back, and rooms are known again.
const RECOVERY: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) entries: Vec<Entry>,
}

impl Entry {
    fn ended_before(&self, moment: Instant) -> bool {
        self.to.is_some_and(|to| to < moment)
    }

    /// Whether it may have ended what ran over its places up to `end`.
    fn may_lose(&self, end: Instant) -> bool {
        let lasted = self
            .to
            .unwrap_or(end)
            .min(end)
            .saturating_duration_since(self.from);
        let is_long = match self.harm {
            Harm::Cut(..) | Harm::Stopped(_) => lasted >= HARMLESS,
            Harm::Store => false,
            _ => true,
        };
        is_long && self.from <= end && !self.ended_before(end - AFTERMATH)
    }
}

impl Ledger {
    pub(super) fn begin(&mut self, harm: Harm) {
        self.entries.push(Entry {
            harm,
            from: Instant::now(),
            to: None,
        });
    }

    /// Something that happens at once.
    pub(super) fn note(&mut self, harm: Harm) {
        self.begin(harm);
        self.put_right(|of| of == harm);
    }

    pub(super) fn put_right(&mut self, is_over: impl Fn(Harm) -> bool) {
        let now = Instant::now();
        let open = self.entries.iter_mut().filter(|entry| entry.to.is_none());
        open.filter(|entry| is_over(entry.harm))
            .for_each(|entry| entry.to = Some(now));
    }

    /// The hosts whose loss explains the end of what was on `home` and on `others`.
    pub(super) fn losses(&self, end: Instant, home: usize, others: &[usize]) -> Vec<usize> {
        let all: Vec<usize> = others.iter().copied().chain([home]).collect();
        let mut lost = Vec::new();
        for entry in self.entries.iter().filter(|entry| entry.may_lose(end)) {
            match entry.harm {
                Harm::Daemon(at)
                | Harm::Host(at)
                | Harm::Stopped(at)
                | Harm::Slice(at)
                | Harm::Ended(at) => lost.extend(others.contains(&at).then_some(at)),
                Harm::Cut(a, b) if all.contains(&a) && all.contains(&b) => {
                    lost.extend([a, b].into_iter().filter(|at| *at != home));
                }
                Harm::Cut(..) | Harm::Store => {}
            }
        }
        lost
    }

    /// Whether a daemon that was asked to end explains it.
    pub(super) fn was_ended(&self, end: Instant, others: &[usize]) -> bool {
        let mut entries = self.entries.iter().filter(|entry| entry.may_lose(end));
        entries.any(|entry| matches!(entry.harm, Harm::Ended(at) if others.contains(&at)))
    }

    /// Hosts that were harmed, or cut off from another one, at most so long ago that what starts
    /// may still meet it.
    pub(super) fn recent(&self, end: Instant) -> Vec<usize> {
        let entries = self.entries.iter();
        let recent = entries.filter(|entry| !entry.ended_before(end - RECOVERY));
        let places = |entry: &Entry| match entry.harm {
            Harm::Daemon(at)
            | Harm::Host(at)
            | Harm::Stopped(at)
            | Harm::Slice(at)
            | Harm::Ended(at) => vec![at],
            Harm::Cut(a, b) => vec![a, b],
            Harm::Store => Vec::new(),
        };
        recent.flat_map(places).collect()
    }

    /// Whether a host may have missed the store lately.
    pub(super) fn store_failed(&self, end: Instant, host: usize) -> bool {
        let mut entries = self.entries.iter();
        entries.any(|entry| {
            let is_it = match entry.harm {
                Harm::Store => true,
                // A host that is cut off from some members may have asked these.
                Harm::Cut(a, b) => {
                    let outside = |at: usize| at >= super::site::HOSTS.len();
                    (a == host && outside(b))
                        || (b == host && outside(a))
                        || outside(a) && outside(b)
                }
                _ => false,
            };
            is_it && !entry.ended_before(end - RECOVERY)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn harm_explains_the_loss_of_what_was_there() {
        let mut ledger = Ledger::default();
        ledger.note(Harm::Daemon(3));
        ledger.begin(Harm::Cut(1, 2));
        let soon = Instant::now() + Duration::from_millis(10);
        assert_eq!(ledger.losses(soon, 0, &[3, 4]), [3]);
        assert!(
            ledger.losses(soon, 3, &[4]).is_empty(),
            "the home's part lives on"
        );
        assert!(ledger.losses(soon, 0, &[1, 2]).is_empty(), "too short");
        let later = soon + HARMLESS;
        assert_eq!(ledger.losses(later, 1, &[2]), [2]);
        assert!(
            ledger.losses(later, 1, &[4]).is_empty(),
            "it was not cut off"
        );
        assert!(
            ledger.losses(later + AFTERMATH, 0, &[3]).is_empty(),
            "long ago"
        );
    }
}
