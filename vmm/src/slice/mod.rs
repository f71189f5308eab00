//! One slice of an Aggregate VM: the part of a machine that runs on one node.

pub mod memory;
