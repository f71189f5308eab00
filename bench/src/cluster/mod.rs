//! Benchmarks of a cluster: hosts in network namespaces of this one, with daemons and an etcd.

pub mod drain;
pub mod figure_14;
mod said;
mod site;
mod standing;
