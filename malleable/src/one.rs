//! One machine over all hosts (`--one-machine`), instead of many that each have one.
//!
//! Its parts are the machines of [`Cluster`](crate::Cluster), the first of them where its home is.
//! It changes its hosts in one step, however many come and go: a part that leaves may go to any
//! of those that stay.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::decide::{Order, Round};
use crate::state::{HostId, MachineId, OneMachine};

impl Round<'_> {
    /// Has the machine be on all hosts that stay.
    pub(crate) fn reshape(&mut self, one: &OneMachine) {
        if !self.moving.is_empty() {
            return;
        }
        // The home's host first.
        let over: Vec<HostId> = self.goes_to.values().copied().collect();
        let Some(&home) = over.first() else {
            return;
        };
        let leaves = |host: &HostId| self.leaving.contains(host);
        let (leaving, stay): (Vec<HostId>, Vec<HostId>) = over.iter().copied().partition(leaves);
        let new_max = one.at_once_max.saturating_sub(over.len());
        let Some(mut to) = self.hosts_for(one, &stay, new_max) else {
            let mut ends_first = leaving;
            ends_first.sort_by_key(|host| (self.until(*host), *host));
            if let Some(host) = ends_first.first() {
                self.last_resort(MachineId(0), *host);
            }
            return;
        };
        if to.iter().collect::<BTreeSet<_>>() == over.iter().collect() {
            return;
        }
        // The home stays where it is, or goes where it has not to leave soon.
        to.sort_by_key(|host| (*host != home, Reverse(self.until(*host)), *host));
        let why = self.why_it_changes(&leaving, &over, &to);
        self.orders.push(Order::Reshape { to, why });
    }

    /// Those that stay, and as many others as are worth it; `None`: they have no room for it.
    fn hosts_for(&self, one: &OneMachine, stay: &[HostId], new_max: usize) -> Option<Vec<HostId>> {
        let all = self.cluster.hosts.keys().copied();
        let mut new: Vec<HostId> = all
            .filter(|host| !stay.contains(host) && !self.leaving.contains(host))
            .filter(|host| !self.is_silent(*host) && self.may_join(*host, stay.is_empty()))
            .collect();
        // Those with little room are left out first.
        new.sort_by_key(|host| (Reverse(self.room_of(*host)), *host));
        new.truncate(new_max.min(one.hosts_max.saturating_sub(stay.len())));
        let mut to = [stay, &new].concat();
        to.sort_by_key(|host| Reverse(self.room_of(*host)));
        while let Some(least) = to.last() {
            // A host that does not answer keeps its part.
            if self.is_silent(*least) || self.room_of(*least) >= one.part(to.len()) {
                return Some(to);
            }
            to.pop();
        }
        None
    }

    /// Of one that does not answer, more than any: nothing is asked of it.
    fn room_of(&self, host: HostId) -> u64 {
        match self.cluster.hosts[&host].room {
            0 => u64::MAX,
            room => room,
        }
    }

    fn is_silent(&self, host: HostId) -> bool {
        self.cluster.hosts[&host].room == 0
    }

    /// Whether a part can be there long enough: to leave again, or if the machine can do without
    /// it, to be worth that.
    fn may_join(&self, host: HostId, is_needed: bool) -> bool {
        let part = MachineId(0);
        match is_needed {
            true => {
                let bound = self.bound(part);
                let least = self.now.saturating_add(bound).saturating_add(bound);
                self.until(host) > least + self.rules.margin
            }
            false => self.is_worth(part, host),
        }
    }

    fn why_it_changes(&self, leaving: &[HostId], over: &[HostId], to: &[HostId]) -> String {
        let names = |hosts: &[HostId]| {
            let names = hosts.iter().map(|host| self.name(*host));
            names.collect::<Vec<_>>().join(", ")
        };
        let came: Vec<HostId> = to
            .iter()
            .copied()
            .filter(|host| !over.contains(host))
            .collect();
        let mut why = Vec::new();
        if !came.is_empty() {
            let verb = if came.len() == 1 { "has" } else { "have" };
            why.push(format!("{} {verb} come", names(&came)));
        }
        if !leaving.is_empty() {
            let verb = if leaving.len() == 1 { "has" } else { "have" };
            why.push(format!("{} {verb} to be left", names(leaving)));
        }
        why.join(", and ") + "."
    }
}
