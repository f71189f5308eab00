//! Benchmarks of a cluster: hosts in network namespaces of this one, with daemons and an etcd.

pub mod figure_14;
