//! Guest memory that a slice may fill, while its own part changes with the managers of pages.
//!
//! Invariant: own part + pages of others ≤ what its host lent, where it is lent. So a part that
//! grows takes from what there is to spare; where less than the least would be left, it does not
//! grow.

use weft_coherent_memory::Budget;
use weft_vcpu::PAGE_SIZE;

/// In pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    own: u64,
    /// Wanted for pages of others.
    others: u64,
    /// Needed for them.
    others_min: u64,
    /// What its host lent; `None`: it is on the machine's own.
    lent: Option<u64>,
}

impl Room {
    pub fn new((own, others): (u64, u64), others_min: u64, lent: Option<u64>) -> Self {
        Self {
            own,
            others,
            others_min: others_min.min(others),
            lent,
        }
    }

    pub fn own(&self) -> u64 {
        self.own
    }

    pub fn budget(&self) -> Budget {
        let rest = self.lent.unwrap_or(u64::MAX).saturating_sub(self.own);
        Budget::new(self.own, self.others.min(rest))
    }

    /// The same for another own part.
    ///
    /// # Errors
    /// What its host lent is too little.
    pub fn with_own(self, own: u64) -> Result<Self, String> {
        let needed = own.saturating_add(self.others_min);
        match self.lent {
            Some(lent) if needed > lent => Err(format!(
                "its host lent {} MiB, and {} MiB are needed for the pages that it would manage",
                (lent * PAGE_SIZE) >> 20,
                (needed * PAGE_SIZE).div_ceil(1 << 20)
            )),
            _ => Ok(Self { own, ..self }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lent_slice_has_never_more_room_than_was_lent() {
        let room = Room::new((100, 50), 20, Some(150));
        assert_eq!(room.budget().pages(), 150);
        let more = room.with_own(130).unwrap();
        assert_eq!(more.budget(), Budget::new(130, 20));
        let why = more.with_own(131).unwrap_err();
        assert!(why.contains("its host lent 0 MiB"), "{why}");
        assert_eq!(more.with_own(100).unwrap().budget(), Budget::new(100, 50));
    }

    #[test]
    fn a_slice_of_the_machines_own_host_has_room_for_all() {
        let room = Room::new((100, 50), 20, None);
        assert_eq!(room.with_own(1000).unwrap().budget(), Budget::new(1000, 50));
    }
}
