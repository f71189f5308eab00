//! What a drain of a host will come to, before it begins.

use crate::work::{Placed, Work};
use std::time::Duration;
use weft_place::Costs;

/// What has to leave a host. Parts of machines move to other hosts; slices of programs are asked
/// to leave, and do if the program's other hosts have room.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leaving {
    /// Names of what can leave.
    pub moves: Vec<String>,
    /// How long that takes, one after the other, by the scheduler's costs.
    pub takes: Duration,
    /// Names of what cannot leave: it is there until it ends.
    pub stays: Vec<String>,
}

impl Leaving {
    pub fn of(work: &Work, host: &str) -> Leaving {
        let costs = Costs::default();
        let mut leaving = Leaving::default();
        for placed in work.placed.values() {
            let name = &placed.request.name;
            let mut parts = placed.parts.iter();
            let Some(part) = parts.find(|part| part.host == host) else {
                continue;
            };
            match can_leave(placed, host) {
                true => {
                    leaving.moves.push(name.clone());
                    leaving.takes += costs.copy_time(part.memory_mib);
                }
                false => leaving.stays.push(name.clone()),
            }
        }
        leaving
    }
}

/// All but the home.
fn can_leave(placed: &Placed, host: &str) -> bool {
    placed.request.home != host
}
