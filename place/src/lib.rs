//! Where aggregates go. An [`Inventory`] of hosts, [`Policy`]s that choose hosts for a
//! request and moves that make a placement better, and a [`Scheduler`] that turns events
//! into decisions.
//!
//! Pure: no clock, no socket, no thread, no randomness. Time is an argument, a
//! [`std::time::Duration`] since an epoch that the caller chooses. The same code runs in
//! a cluster's daemon and in the simulator (`weft-place-sim`). The same events in the
//! same order give the same decisions.
//!
//! The policies are FragVisor's (section 6.5): best fit in the order of arrival (BFF), and
//! FragBFF, which starts an aggregate on several hosts where no single one has room, and
//! pulls it together as room appears. `docs/placement.md` has the reasons.

mod costs;
mod decision;
mod free_index;
mod host;
mod inventory;
mod placement;
mod policy;
mod queue;
mod request;
mod room;
mod scheduler;
#[cfg(test)]
mod tests;

pub use costs::{Costs, MoveCosts, SpreadCosts};
pub use decision::{Decision, Delayed, Moved, NotMoved, Refused, Started};
pub use host::{Device, Features, Health, Host, HostId, Leave};
pub use inventory::{Aggregate, Inventory, InventoryError};
pub use placement::{Move, Part, Placement, Transfer};
pub use policy::{
    BestFit, BestFitWithMigration, FragBff, Goal, LeastLoaded, POLICY_NAMES, Policy, Start,
    UnknownPolicy, policy_by_name, whole_placement,
};
pub use request::{AggregateId, Request, RequestError};
pub use room::Room;
pub use scheduler::{Adopted, Event, Limits, MoveResult, Scheduler};
