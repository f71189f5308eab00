//! How hosts are chosen.
//!
//! A policy is asked three questions and changes nothing: where does a request start; what
//! should move now that a host has got room; what would have to move so that a request
//! finds room. The scheduler owns queue, limits and forced moves, which are the same for
//! all policies.

mod best_fit;
mod consolidation;
mod frag_bff;
mod make_room;
mod spread;

pub use best_fit::{BestFit, LeastLoaded, whole_placement};
pub use frag_bff::{FragBff, Goal};
pub use make_room::BestFitWithMigration;
pub use spread::Start;

use crate::costs::Costs;
use crate::decision::Moved;
use crate::host::HostId;
use crate::inventory::{Aggregate, Inventory};
use crate::placement::{Move, Placement};
use crate::request::Request;

/// There is no policy of that name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no policy {0:?}: choose one of {names}", names = POLICY_NAMES.join(", "))]
pub struct UnknownPolicy(pub Box<str>);

pub const POLICY_NAMES: [&str; 7] = [
    "bff",
    "bff-migration",
    "least-loaded",
    "fragbff-fewest-fragmentation",
    "fragbff-fewest-hosts",
    "fragbff-most-fragmentation",
    "fragbff-most-hosts",
];

/// The policy that users call `name`.
pub fn policy_by_name(name: &str) -> Result<Box<dyn Policy>, UnknownPolicy> {
    let (fewest, most) = (Start::FewestHosts, Start::MostHosts);
    let (fragmentation, hosts) = (Goal::LeastFragmentation, Goal::FewestHosts);
    Ok(match name {
        "bff" => Box::new(BestFit),
        "bff-migration" => Box::new(BestFitWithMigration),
        "least-loaded" => Box::new(LeastLoaded),
        "fragbff-fewest-fragmentation" => Box::new(FragBff {
            start: fewest,
            goal: fragmentation,
        }),
        "fragbff-fewest-hosts" => Box::new(FragBff {
            start: fewest,
            goal: hosts,
        }),
        "fragbff-most-fragmentation" => Box::new(FragBff {
            start: most,
            goal: fragmentation,
        }),
        "fragbff-most-hosts" => Box::new(FragBff {
            start: most,
            goal: hosts,
        }),
        other => return Err(UnknownPolicy(other.into())),
    })
}

/// A move that a policy wants, and why.
pub type Wanted = (Move, Moved);

pub trait Policy: Send {
    /// The name by which users choose it.
    fn name(&self) -> String;

    /// Whether it starts an aggregate on several hosts.
    fn spreads(&self) -> bool {
        false
    }

    /// Where `request` would start now. `None`: nowhere, it has to wait.
    fn start(&self, cluster: &Inventory, request: &Request) -> Option<Placement>;

    /// The best move now that `host` has got room, of the aggregates that `may_move`.
    fn improve(
        &self,
        _cluster: &Inventory,
        _costs: &Costs,
        _host: HostId,
        _may_move: &dyn Fn(&Aggregate) -> bool,
    ) -> Option<Wanted> {
        None
    }

    /// Moves after which `request` would start whole. Empty: no such moves were found.
    fn make_room(
        &self,
        _cluster: &Inventory,
        _request: &Request,
        _may_move: &dyn Fn(&Aggregate) -> bool,
    ) -> Vec<Wanted> {
        Vec::new()
    }
}
