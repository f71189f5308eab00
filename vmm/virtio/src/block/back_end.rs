//! What executes the requests of one queue of a disk.
//!
//! ```text
//! begin ──▶ in flight ──▶ completion
//!   └──────────────────────▲  where the back end need not wait
//! ```
//!
//! A disk here has a `LocalBlock` for each queue. The handler of
//! a queue knows its back end only by this trait, so that the back end can also be
//! elsewhere. It calls the back end a few times for each request, through one pointer,
//! never for each byte or segment: next to a system call or a message, which every
//! request needs, that costs nothing, whereas a type parameter would compile the
//! handler once for each back end.
//!
//! *Inline* means: on a thread that is not the queue's, which must not wait (see
//! [`InlineHandler`]). A back end whose completions are brought by a thread of this
//! process may offer it; the methods that inline completion needs do nothing by
//! default.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use weft_guest_memory::DeviceMemory;

use super::request::{Request, Status};
use crate::worker::InlineHandler;

/// The result of a request.
pub struct Completion {
    pub request: Request,
    pub status: Status,
}

/// Executes the requests of one queue. Only one thread uses it at a time.
pub trait BlockBackend: Send {
    /// Becomes readable when requests complete. The handler never reads it, so it must
    /// be waited on for edges. None: [`BlockBackend::begin`] completes every request.
    fn descriptor(&self) -> Option<RawFd>;

    /// Requests that have begun and have no completion yet.
    fn in_flight(&self) -> usize;

    /// Whether another request can begin.
    fn has_room(&self) -> bool;

    /// Begins a request whose data is in `memory`. Returns its completion if it is
    /// complete already, or if there is no room.
    fn begin(&mut self, memory: &Arc<DeviceMemory>, request: Request) -> Option<Completion>;

    /// Makes requests that have begun visible to whatever executes them. False: call it
    /// again, because not all were taken.
    ///
    /// # Errors
    /// The kernel refuses.
    fn submit(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    /// The next completion. Requests that were executed in part continue, and need
    /// another [`BlockBackend::submit`].
    fn next_completion(&mut self, memory: &DeviceMemory) -> Option<Completion>;

    /// Gives the back end the means to run the queue's handler inline.
    fn set_inline_handler(&mut self, handler: InlineHandler) {
        let _ = handler;
    }

    /// The longest read or write, in bytes, that can begin inline. 0: none can.
    fn begins_inline_max(&self) -> u64 {
        0
    }

    /// Whether completions can be taken inline now: no further step, which may wait for
    /// pages, has to follow them.
    fn completes_inline(&self) -> bool {
        false
    }

    /// The next completion, if taking it needs no page of the guest.
    fn next_inline_completion(&mut self, memory: &DeviceMemory) -> Option<Completion> {
        let _ = memory;
        None
    }

    /// Whether results have arrived of which no completion was taken yet.
    fn has_results(&self) -> bool {
        false
    }
}
