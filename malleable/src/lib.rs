//! When machines move onto hosts that a batch system gives for a time, and off before those go.
//!
//! No clock, socket or thread: [`decide()`] is a function of what is known at one moment, so a
//! launcher that was started again goes on as if nothing had happened. Times are measured from
//! any one moment. See `docs/malleable.md`, and ELViC, section 4.3 (watchdog, release handlers),
//! whose release began a constant time before the end.

mod decide;
mod forecast;
mod one;
mod state;

pub use decide::{Order, decide, needed, shrink};
pub use forecast::{Forecast, SAMPLES};
pub use state::{
    Cluster, Host, HostId, MACHINES_ON_HOST_MAX, Machine, MachineId, OneMachine, Rules,
};
