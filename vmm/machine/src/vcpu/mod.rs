//! The vCPUs of a machine, whichever back end runs them.
//!
//! | file | holds |
//! | --- | --- |
//! | [`runner`] | the thread that runs one vCPU, its states, its commands |
//! | [`environment`] | what a back end meets: buses, local APIC, clocks |
//! | [`scheduler`] | who runs when instructions are the clock |
//! | [`soft`] | makes the software vCPUs of a machine |
//! | [`users`] | vCPUs as users of the memory that slices share |

pub mod environment;
pub mod runner;
pub mod scheduler;
pub mod soft;
pub mod users;
