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
//! Page `p` of the protocol is guest-physical page `p`. Every slice has all of guest RAM
//! mapped. Only those pages have valid bytes that the protocol says the slice holds.
//!
//! [`weft_dsm::controller`] decides about the pages: it is a pure state machine with a
//! simulator of its own. This crate is its shell, which acts: `docs/memory-shell.md`.
//!
//! | file | holds |
//! | --- | --- |
//! | `shell` | [`SharedMemory`]: the lock, guest memory, the public functions |
//! | `state` | the state under the lock, and the work that follows the unlock |
//! | `outbox` | outgoing messages, which are sent after the unlock |
//! | `tables` | the protocol's records of pages |
//! | `faults` | blocking faults of threads, and asynchronous faults of vCPUs in KVM |
//! | `waiter` | a thread that waits for a page |
//! | `own_pins` | the pages that the calling thread has pinned |
//! | `membership` | nodes that join and leave |
//! | `relocation` | pages that get another owner and manager at once |
//! | `checkpoint` | which pages a checkpoint must hold |
//! | `rest` | no page moves for a while |
//! | `absent`, `page_source` | pages whose bytes are still in files |
//! | `save` | pages as they were at one moment, for a checkpoint, while users go on |
//! | `reclaim` | memory that the guest does not need |
//! | `bytes` | guest memory for callers that are not vCPUs |
//! | `wakeup` | a thread that sleeps until there is work for it |
//! | `threads` | the deferred-work thread and the evictor |
//! | `notifier` | [`MmuNotifier`], by which mappings of a page are revoked |
//! | `served` | remote faults of vCPUs, by the slice that served them |
//! | [`mapping`] | the guest's mapping in KVM, and its faults |
//! | `history` | which pages were used lately |
//! | `split` | looks at that, and which pages go where in a split |
//! | `exchange`, `blocks` | pages that slices exchange, block by block |
//! | `counters` | counters of the slice, and of each page |
//! | `trace` | records of single faults, while tracing is on |

mod absent;
mod blocks;
mod bytes;
mod checkpoint;
mod counters;
mod exchange;
mod faults;
mod history;
pub mod mapping;
mod membership;
mod notifier;
mod outbox;
mod own_pins;
mod page_source;
mod prefetch;
mod reclaim;
mod relocation;
mod rest;
mod save;
mod served;
mod shell;
mod signal;
mod split;
mod state;
mod tables;
#[cfg(test)]
mod tests;
mod threads;
mod trace;
mod waiter;
mod wakeup;

pub use blocks::{BLOCK_PAGES, BlockMover};
pub use counters::{MemoryCounters, PAGES_MAX, PageCount, SlicePages};
pub use history::HistoryRun;
pub use membership::MembershipError;
pub use notifier::{MmuNotifier, NotifierError};
pub use outbox::Transport;
pub use page_source::{AbsentPages, ElsewherePages, PageFiles, Source};
pub use relocation::RelocationCursor;
pub use save::SavedPages;
pub use served::{FaultObserver, ServedFault};
pub use shell::{SharedMemory, SharedMemoryOptions};
pub use trace::{
    FAULTS_MAX, FaultKind, FaultPurpose, FaultRecord, READERS_PATIENCE, RING, SliceFaults,
};
pub use weft_dsm::controller::{
    Budget, DrainPlan, DrainProgress, DrainTarget, Histogram, Holdings, ManagerRun,
    ManagerRunError, PrecopyProgress, RelocatedRun, RelocationError, Threshold, thresholds,
};
