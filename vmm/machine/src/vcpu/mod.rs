//! The vCPUs of a machine, on any back end.
//!
//! | file | holds |
//! | --- | --- |
//! | [`following`] | vCPUs that ask to go where their remote faults go |
//! | [`runner`] | the thread that runs one vCPU, its states, its commands |
//! | [`environment`] | what a back end calls: buses, local APIC, clocks |
//! | [`scheduler`] | decides which vCPU of a deterministic machine runs |
//! | [`state`] | all that belongs to one vCPU, as data |
//! | [`site`] | vCPUs that leave and come, as the links reach them |
//! | [`travel`] | what a vCPU takes along to another slice |
//! | [`soft`] | makes the software vCPUs of a machine |
//! | [`notifiers`] | MMU notifiers of vCPUs that use coherent memory |

pub mod environment;
mod first_pages;
pub mod following;
pub mod notifiers;
pub mod runner;
pub mod scheduler;
pub mod site;
pub mod soft;
pub mod state;
pub mod travel;
