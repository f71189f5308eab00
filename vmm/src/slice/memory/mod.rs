//! Guest RAM that several slices share, page by page.
//!
//! ```text
//!  vCPU ──acquire──▶ ┌───────────────┐ ◀──frame── receiver thread of a link
//!       ◀──pointer── │ SharedMemory  │ ──frame──▶ other slices
//!       ◀──demand─── │ (the shell)   │
//!                    └──────┬────────┘
//!                     weft_dsm::Node
//! ```
//!
//! Page `p` of the protocol is guest-physical page `p`. Every slice has the whole
//! RAM mapped, and of it those pages that the protocol says it holds; what lies
//! in the others is of no meaning.
//!
//! | file | holds |
//! | --- | --- |
//! | `shell` | carries out what the protocol says, in order |
//! | `tables` | its records, and the right to each page |
//! | [`mapping`] | the guest's mapping of it in KVM, and the faults there |
//! | `waiters` | who waits for a page, who must not lose one yet |
//! | `counters` | how often what happened, page by page |
//! | `trace` | faults one by one, while somebody wants to know |

mod counters;
pub mod mapping;
mod shell;
mod tables;
#[cfg(test)]
mod tests;
mod trace;
mod waiters;

pub use counters::{MemoryCounters, PAGES_MAX, PageCount, SlicePages};
pub use shell::{Post, SharedMemory, SharedMemoryOptions, UseError, Users};
pub use trace::{
    FAULTS_MAX, FaultKind, FaultPurpose, FaultRecord, READERS_PATIENCE, RING, SliceFaults,
};
