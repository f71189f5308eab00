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
//! | `state` | what it keeps under its lock |
//! | `tables` | the protocol's records, and the right to each page |
//! | `outbox` | messages on their way out, sent after the unlock |
//! | `fetch` | a thread that needs a page and waits for it |
//! | `asked` | pages that are needed by who does not wait here |
//! | `ahead` | pages that will be needed soon |
//! | `standing` | pages that are kept up to date |
//! | `bytes` | guest memory for who is no vCPU |
//! | `taker` | goes on with pages that were held back |
//! | `budget` | how many pages there may be, and who waits for room |
//! | `evict` | makes room |
//! | `users` | who uses the pages, and what they are told |
//! | [`mapping`] | the guest's mapping of it in KVM, and the faults there |
//! | `waiters` | who waits for a page, who must not lose one yet |
//! | `counters` | how often what happened, page by page |
//! | `trace` | faults one by one, while somebody wants to know |

mod ahead;
mod asked;
mod budget;
mod bytes;
mod counters;
mod evict;
#[cfg(test)]
mod evict_tests;
mod fetch;
pub mod mapping;
mod outbox;
mod shell;
mod standing;
#[cfg(test)]
mod standing_tests;
mod state;
mod tables;
mod taker;
#[cfg(test)]
mod tests;
mod trace;
mod users;
mod waiters;

pub use budget::Budget;
pub use counters::{MemoryCounters, PAGES_MAX, PageCount, SlicePages};
pub use outbox::Post;
pub use shell::{SharedMemory, SharedMemoryOptions};
pub use trace::{
    FAULTS_MAX, FaultKind, FaultPurpose, FaultRecord, READERS_PATIENCE, RING, SliceFaults,
};
pub use users::{UseError, Users};
