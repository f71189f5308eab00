//! Benchmarks of `weft vm`: a Linux guest on Weft's software vCPU and on KVM,
//! against the same guest under QEMU's TCG, or against the host.

pub mod aggregate;
pub mod checkpoint;
pub mod devices;
pub mod downtime;
pub mod follow;
pub mod footprint;
mod groups;
pub mod guest;
pub mod home;
pub mod join;
pub mod kvm;
pub mod latency;
pub mod memcached;
pub mod migrate;
pub mod nginx;
mod pages_follow;
pub mod ping;
mod qmp;
pub mod restore;
pub mod save;
pub mod save_hosts;
pub mod smemv;
pub mod smemv_hosts;
pub mod soft;
pub mod split;
pub mod storage;
pub mod vcpu_move;
mod way;
pub mod web;
pub mod with_disks;
