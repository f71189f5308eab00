//! What a drain of a host will come to, before it begins.

use crate::work::{Placed, Work, WorkKind};
use std::time::Duration;
use weft_place::Costs;

/// What has to leave a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leaving {
    /// Names of machines with a part there that can move.
    pub moves: Vec<String>,
    /// How long their moves take, one after the other, by the scheduler's costs.
    pub takes: Duration,
    /// Names of what cannot move: it is there until it ends.
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

/// Only parts of machines move, and not the home.
fn can_leave(placed: &Placed, host: &str) -> bool {
    placed.request.kind == WorkKind::Machine && placed.request.home != host
}
