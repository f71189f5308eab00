//! Machines that came here for good, and what is lent to each.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::budget::Reservation;

/// A machine that came: what is lent to it is lent until this is dropped.
pub(super) struct Home {
    name: String,
    lent: Mutex<Vec<Arc<Reservation>>>,
}

/// All that have come and have not ended.
#[derive(Default)]
pub(super) struct Homes(Mutex<Vec<Weak<Home>>>);

impl Homes {
    /// A machine has come, for which this was reserved.
    pub fn begin(&self, name: &str, reservation: Arc<Reservation>) -> Arc<Home> {
        let home = Arc::new(Home {
            name: name.to_owned(),
            lent: Mutex::new(vec![reservation]),
        });
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&home));
        home
    }

    /// Lends this to the machine of that name, too; whether it is here.
    pub fn lend(&self, name: &str, reservation: &Arc<Reservation>) -> bool {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut homes = all.iter().rev().filter_map(Weak::upgrade);
        let home = homes.find(|home| home.name == name);
        if let Some(home) = &home {
            let mut lent = home.lent.lock().unwrap_or_else(PoisonError::into_inner);
            if !lent.iter().any(|other| Arc::ptr_eq(other, reservation)) {
                lent.push(reservation.clone());
            }
        }
        home.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::super::budget::Budget;
    use super::*;
    use crate::size::PAGE_BYTES;

    #[test]
    fn what_is_lent_to_a_machine_is_free_when_it_and_its_slice_have_ended() {
        let budget = Budget::new((8 << 30) / PAGE_BYTES, 4);
        let reserve = |mib: u64| Arc::new(budget.reserve(Some((mib << 20) / PAGE_BYTES)).unwrap());
        let homes = Homes::default();
        let slice = reserve(1024);
        assert!(!homes.lend("db", &slice));
        let home = homes.begin("db", reserve(64));
        let other = homes.begin("web", reserve(64));
        assert!(homes.lend("db", &slice) && homes.lend("db", &slice));
        drop(other);
        assert!(!homes.lend("web", &slice));
        let used = budget.used_pages();
        drop(slice);
        assert_eq!(budget.used_pages(), used);
        drop(home);
        assert_eq!(budget.used_pages(), 0);
        assert!(!homes.lend("db", &reserve(64)));
    }
}
