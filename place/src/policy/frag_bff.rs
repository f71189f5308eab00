//! FragBFF (FragVisor 6.5): best fit, and fragments where nothing fits.

use super::spread::{Start, spread};
use super::{Policy, Wanted, consolidation, whole_placement};
use crate::costs::Costs;
use crate::host::HostId;
use crate::inventory::{Aggregate, Inventory};
use crate::placement::Placement;
use crate::request::Request;

/// What aggregates are pulled together for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// Free cores in large blocks, whatever that does for a single aggregate.
    LeastFragmentation,
    /// Each aggregate on as few hosts as possible.
    FewestHosts,
}

pub struct FragBff {
    pub start: Start,
    pub goal: Goal,
}

impl Policy for FragBff {
    fn name(&self) -> String {
        let start = match self.start {
            Start::FewestHosts => "fewest",
            Start::MostHosts => "most",
        };
        let goal = match self.goal {
            Goal::LeastFragmentation => "fragmentation",
            Goal::FewestHosts => "hosts",
        };
        format!("fragbff-{start}-{goal}")
    }

    fn spreads(&self) -> bool {
        true
    }

    fn start(&self, cluster: &Inventory, request: &Request) -> Option<Placement> {
        whole_placement(cluster, request).or_else(|| spread(cluster, request, self.start))
    }

    fn improve(
        &self,
        cluster: &Inventory,
        costs: &Costs,
        host: HostId,
        may_move: &dyn Fn(&Aggregate) -> bool,
    ) -> Option<Wanted> {
        match self.goal {
            Goal::LeastFragmentation => {
                consolidation::least_fragmentation(cluster, costs, host, may_move)
            }
            Goal::FewestHosts => consolidation::fewest_hosts(cluster, costs, host, may_move),
        }
    }
}
