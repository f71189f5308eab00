//! The slice that has a role of a machine over several nodes, as one of the slices knows it.
//!
//! ```text
//!         give                learn
//!   here ──────▶ elsewhere ◀────────┐
//!     ▲              │ └────────────┘
//!     └──── take ────┘
//! ```
//!
//! Invariants: each change has a later epoch than the one before, so a change that is older
//! than what is known is refused; a slice that has the role only gives it away itself.

use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

/// The bits of a slice's number; the others are the epoch.
const HOLDER_BITS: u32 = 8;

/// A change of a role's place that contradicts what the slice knows. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RoleError {
    #[error("a take-over of epoch {told} after that of epoch {known}")]
    Stale { told: u64, known: u64 },
    #[error("node {0} does not have the role")]
    NotHere(usize),
    #[error("node {0} has the role itself")]
    Here(usize),
}

/// See the module.
pub struct RolePlace {
    /// Of this slice.
    number: usize,
    /// The epoch, then the holder.
    known: AtomicU64,
}

impl RolePlace {
    /// As slice `number` knows it at the start, when `holder` has the role.
    pub fn new(number: usize, holder: usize) -> Self {
        Self {
            number,
            known: AtomicU64::new(pack(holder, 0)),
        }
    }

    /// The slice that has the role.
    pub fn holder(&self) -> usize {
        self.known().0
    }

    /// Grows with each take-over.
    pub fn epoch(&self) -> u64 {
        self.known().1
    }

    pub fn is_here(&self) -> bool {
        self.holder() == self.number
    }

    /// This slice gives the role to slice `to`.
    pub fn give(&self, to: usize, epoch: u64) -> Result<(), RoleError> {
        self.change(to, epoch, |is_here| match is_here && to != self.number {
            true => Ok(()),
            false => Err(RoleError::NotHere(self.number)),
        })
    }

    /// This slice has the role from now on.
    pub fn take(&self, epoch: u64) -> Result<(), RoleError> {
        self.change(self.number, epoch, |is_here| match is_here {
            true => Err(RoleError::Here(self.number)),
            false => Ok(()),
        })
    }

    /// What a slice knows that takes the place of another, which knew it.
    pub fn begin_at(&self, holder: usize, epoch: u64) {
        self.known.store(pack(holder, epoch), Ordering::Release);
    }

    /// Another slice gave the role to slice `holder`.
    pub fn learn(&self, holder: usize, epoch: u64) -> Result<(), RoleError> {
        let is_other = holder != self.number;
        self.change(holder, epoch, |is_here| match is_here || !is_other {
            true => Err(RoleError::Here(self.number)),
            false => Ok(()),
        })
    }

    fn change(
        &self,
        holder: usize,
        epoch: u64,
        check: impl Fn(bool) -> Result<(), RoleError>,
    ) -> Result<(), RoleError> {
        let (now, known) = self.known();
        if epoch <= known {
            return Err(RoleError::Stale { told: epoch, known });
        }
        check(now == self.number)?;
        // Another change came first: it has a later epoch than `known`.
        self.known
            .compare_exchange(
                pack(now, known),
                pack(holder, epoch),
                Ordering::AcqRel,
                Ordering::Acquire,
            )
            .map(drop)
            .map_err(|_| RoleError::Stale { told: epoch, known })
    }

    fn known(&self) -> (usize, u64) {
        let known = self.known.load(Ordering::Acquire);
        let holder = known & ((1 << HOLDER_BITS) - 1);
        (holder as usize, known >> HOLDER_BITS)
    }
}

fn pack(holder: usize, epoch: u64) -> u64 {
    epoch << HOLDER_BITS | holder as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_goes_to_and_fro_and_old_news_are_refused() {
        let (first, second, third) = (
            RolePlace::new(0, 0),
            RolePlace::new(1, 0),
            RolePlace::new(2, 0),
        );
        assert_eq!(second.give(2, 1), Err(RoleError::NotHere(1)));
        assert_eq!(first.give(0, 1), Err(RoleError::NotHere(0)));
        assert_eq!(first.take(1), Err(RoleError::Here(0)));
        assert_eq!(first.learn(1, 1), Err(RoleError::Here(0)));
        assert_eq!(first.give(1, 1), Ok(()));
        assert_eq!(second.take(1), Ok(()));
        assert_eq!(third.learn(1, 1), Ok(()));
        for place in [&first, &second, &third] {
            assert_eq!((place.holder(), place.epoch()), (1, 1));
        }
        assert!(second.is_here() && !first.is_here());
        let stale = Err(RoleError::Stale { told: 1, known: 1 });
        assert_eq!(first.take(1), stale);
        assert_eq!(third.learn(0, 1), stale);
        assert_eq!(third.learn(2, 2), Err(RoleError::Here(2)));
        assert_eq!(second.give(0, 2), Ok(()));
        assert_eq!(first.take(2), Ok(()));
        assert_eq!(third.learn(0, 7), Ok(()));
        assert_eq!((third.holder(), third.epoch()), (0, 7));
    }
}
