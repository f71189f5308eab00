//! The vCPUs of a machine, on any back end.
//!
//! | file | holds |
//! | --- | --- |
//! | [`runner`] | the thread that runs one vCPU, its states, its commands |
//! | [`environment`] | what a back end calls: buses, local APIC, clocks |
//! | [`scheduler`] | decides which vCPU of a deterministic machine runs |
//! | [`soft`] | makes the software vCPUs of a machine |
//! | [`notifiers`] | MMU notifiers of vCPUs that use coherent memory |

pub mod environment;
pub mod notifiers;
pub mod runner;
pub mod scheduler;
pub mod soft;
