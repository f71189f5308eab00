//! What leaves for other slices: messages that were put together under the shell's
//! lock, and the way they go.

use weft_dsm::message::{self, Run};
use weft_dsm::{Message, NodeId, PAGE_BYTES};
use weft_wire::Header;

use super::counters::MemoryCounters;
use super::shell::SharedMemory;
use super::state::State;

/// Pages with their bytes in one frame, at most.
const PARCEL_PAGES: u16 = 64;

/// The way to the other slices. Never waits.
pub trait Post: Send + Sync {
    /// Sends a frame to `to`, in order with all others to it. An error has been
    /// told to whoever looks after the links.
    fn post(&self, to: NodeId, header: &Header, parts: &[&[u8]]);
}

/// Equal messages about consecutive pages, for one slice.
pub(super) struct Parcel {
    pub to: NodeId,
    pub run: Run,
}

impl State {
    /// Has a message leave with those that are about to, when the lock is given up.
    pub(super) fn post(&mut self, to: NodeId, message: Message) {
        let mut parcels = self.parcels.iter_mut().rev();
        if let Some(last) = parcels.find(|parcel| parcel.to == to) {
            let room = !message.carries_bytes() || last.run.count < PARCEL_PAGES;
            if room && last.run.extend(&message) {
                return;
            }
        }
        let run = Run::one(message);
        self.parcels.push(Parcel { to, run });
    }
}

impl SharedMemory {
    /// Sends what was put together under the lock, which is still held.
    pub(super) fn send_parcels(&self, state: &mut State) {
        for Parcel { to, run } in state.parcels.drain(..) {
            let header = message::encode(&run);
            if !run.first.carries_bytes() {
                self.post.post(to, &header, &[]);
                continue;
            }
            MemoryCounters::add(&self.counters.pages_sent, run.count.into());
            let pages: Vec<&[u8]> = run
                .messages()
                .map(|message| {
                    // SAFETY: the page was taken from all who could write to it, and
                    // nobody gets it again before the lock is given up.
                    unsafe { std::slice::from_raw_parts(self.host(message.page.0), PAGE_BYTES) }
                })
                .collect();
            self.post.post(to, &header, &pages);
        }
    }
}
