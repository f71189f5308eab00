//! Guest RAM that several slices share, page by page.
//!
//! ```text
//!  vCPU ──acquire──▶ ┌───────────────┐ ◀──frame── receiver thread of a link
//!       ◀──pointer── │ SharedMemory  │ ──frame──▶ other slices
//!       ◀──demand─── │ (the shell)   │
//!                    └──────┬────────┘
//!              weft_dsm::controller::Controller ── weft_dsm::Node
//! ```
//!
//! Page `p` of the protocol is guest-physical page `p`. Every slice has the whole
//! RAM mapped, and of it those pages that the protocol says it holds; what lies
//! in the others is of no meaning.
//!
//! What a slice decides about its pages is [`weft_dsm::controller`], a pure state machine
//! with a simulator of its own. Here is its shell: `docs/memory-shell.md`.
//!
//! | file | holds |
//! | --- | --- |
//! | `shell` | the lock, guest memory, the way in |
//! | `state` | what stands under the lock, and what is done after it |
//! | `outbox` | messages on their way out, sent after the unlock |
//! | `tables` | the protocol's records |
//! | `fetch` | threads that wait for a page, users that sleep until one is mapped |
//! | `waiter` | a thread that waits |
//! | `bytes` | guest memory for callers that are not vCPUs |
//! | `called` | a thread that sleeps until there is something to do |
//! | `threads` | the thread that ticks, the one that makes room |
//! | `users` | the users of the pages, and what they are told |
//! | [`mapping`] | the guest's mapping of it in KVM, and the faults there |
//! | `counters` | how often what happened, page by page |
//! | `trace` | faults one by one, while somebody wants to know |

mod bytes;
mod called;
mod counters;
#[cfg(test)]
mod evict_tests;
mod fetch;
pub mod mapping;
mod outbox;
mod shell;
#[cfg(test)]
mod standing_tests;
mod state;
mod tables;
#[cfg(test)]
mod tests;
mod threads;
mod trace;
mod users;
mod waiter;

pub use counters::{MemoryCounters, PAGES_MAX, PageCount, SlicePages};
pub use outbox::Post;
pub use shell::{SharedMemory, SharedMemoryOptions};
pub use trace::{
    FAULTS_MAX, FaultKind, FaultPurpose, FaultRecord, READERS_PATIENCE, RING, SliceFaults,
};
pub use users::{UseError, Users};
pub use weft_dsm::controller::Budget;
