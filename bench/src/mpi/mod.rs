//! Malleable clusters: what moving gains, what the machines' network has, and how long moves take
//! against their forecasts.
//!
//! Hosts are processors of this machine, as a list of hosts has them; the network's are this host
//! twice.

pub mod gain;
pub mod moves;
pub mod network;

mod cluster;
