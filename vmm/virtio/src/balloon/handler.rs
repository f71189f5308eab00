//! Takes pages from the driver, a bounded part at a time.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use vmm_sys_util::epoll::EventSet;

use super::{BALLOON_PAGE, POISON, Shared};
use crate::ring::{Chain, total};
use crate::worker::{Cause, Handler, Progress};
use crate::{DeviceError, Ring};

/// Places in [`BalloonHandler::rings`].
const INFLATE: usize = 0;
const DEFLATE: usize = 1;
/// Page numbers in one request, in bytes: 256 MiB of pages.
const NUMBERS_MAX: u64 = 256 << 10;
/// Bytes whose memory goes back in one step: a machine that pauses waits for one.
const STEP_BYTES: u64 = 4 << 20;
/// Steps in one call.
const BATCH: usize = 4;

/// A request whose pages go back to the host.
struct Request {
    /// Place in [`BalloonHandler::rings`].
    queue: usize,
    chain: Chain,
    /// Guest-physical bytes that are left: whole pages.
    left: VecDeque<Range<u64>>,
}

/// The thread's part.
pub struct BalloonHandler {
    /// Inflate, deflate, and report if the driver reports.
    rings: Vec<Ring>,
    /// Whether the driver says what free pages are filled with.
    poisons: bool,
    shared: Arc<Shared>,
    current: Option<Request>,
}

impl BalloonHandler {
    /// For these rings, in the order of the queues.
    pub fn new(rings: Vec<Ring>, poisons: bool, shared: Arc<Shared>) -> Self {
        Self {
            rings,
            poisons,
            shared,
            current: None,
        }
    }

    /// Does one step; false when no request is left.
    fn step(&mut self) -> Result<bool, DeviceError> {
        if self.current.is_none() {
            self.current = self.next_request()?;
        }
        let Some(request) = &mut self.current else {
            return Ok(false);
        };
        let mut room = STEP_BYTES;
        while let Some(range) = request.left.front_mut().filter(|_| room > 0) {
            let length = (range.end - range.start).min(room);
            let start = range.start;
            self.shared
                .memory
                .reclaim(start, length)
                .map_err(|source| DeviceError::Host {
                    what: "memory cannot be given back to the host",
                    source,
                })?;
            self.rings[request.queue].wrote(start, length);
            let counter = match request.queue {
                INFLATE => &self.shared.inflated,
                _ => &self.shared.reported,
            };
            counter.fetch_add(length, Ordering::Relaxed);
            range.start += length;
            room -= length;
            if range.is_empty() {
                request.left.pop_front();
            }
        }
        if request.left.is_empty()
            && let Some(done) = self.current.take()
        {
            let ring = &mut self.rings[done.queue];
            ring.push(&done.chain, 0)?;
            ring.signal();
        }
        Ok(true)
    }

    /// The next request of any queue, with the pages whose memory may go back.
    fn next_request(&mut self) -> Result<Option<Request>, DeviceError> {
        for queue in 0..self.rings.len() {
            if let Some(chain) = self.rings[queue].pop()? {
                let left = match queue {
                    INFLATE => self.numbered(queue, &chain)?,
                    DEFLATE => {
                        let pages = self.numbered(queue, &chain)?;
                        count(&self.shared.deflated, &pages);
                        VecDeque::new()
                    }
                    _ => self.reported(queue, &chain)?,
                };
                return Ok(Some(Request { queue, chain, left }));
            }
        }
        Ok(None)
    }

    /// The pages whose numbers a request has, in order and joined.
    fn numbered(&self, queue: usize, chain: &Chain) -> Result<VecDeque<Range<u64>>, DeviceError> {
        let ring = &self.rings[queue];
        let invalid = |reason| DeviceError::Chain {
            index: ring.index(),
            head: chain.head,
            reason,
        };
        let length = total(&chain.readable);
        if !chain.writable.is_empty() || length == 0 || !length.is_multiple_of(4) {
            return Err(invalid(
                "a request of the balloon must hold page numbers of four bytes",
            ));
        }
        if length > NUMBERS_MAX {
            return Err(invalid("more page numbers than a request may hold"));
        }
        let mut bytes = vec![0; length as usize];
        ring.read(&chain.readable, 0, &mut bytes);
        let number = |bytes: &[u8; 4]| u64::from(u32::from_le_bytes(*bytes));
        let mut pages: Vec<u64> = bytes.as_chunks().0.iter().map(number).collect();
        pages.sort_unstable();
        pages.dedup();
        let runs = pages.chunk_by(|page, next| page + 1 == *next);
        let ranges: VecDeque<_> = runs
            .map(|run| run[0] * BALLOON_PAGE..(run[run.len() - 1] + 1) * BALLOON_PAGE)
            .collect();
        let is_memory = |range: &Range<u64>| {
            let mut pages = range.clone().step_by(BALLOON_PAGE as usize);
            pages.all(|page| ring.memory().contains(page, BALLOON_PAGE as usize))
        };
        match ranges.iter().all(is_memory) {
            true => Ok(ranges),
            false => Err(invalid("a page in the balloon is not memory")),
        }
    }

    /// The whole pages of a report; no page while free pages must keep their content.
    fn reported(&self, queue: usize, chain: &Chain) -> Result<VecDeque<Range<u64>>, DeviceError> {
        if !chain.readable.is_empty() {
            return Err(DeviceError::Chain {
                index: self.rings[queue].index(),
                head: chain.head,
                reason: "all buffers of a report must be writable",
            });
        }
        if self.poisons && self.shared.field(POISON) != 0 {
            return Ok(VecDeque::new());
        }
        let pages = chain.writable.iter().map(|segment| {
            let end = segment.address + u64::from(segment.length);
            segment.address.next_multiple_of(BALLOON_PAGE)..end - end % BALLOON_PAGE
        });
        Ok(pages.filter(|range| !range.is_empty()).collect())
    }
}

fn count(counter: &AtomicU64, pages: &VecDeque<Range<u64>>) {
    let bytes = pages.iter().map(|range| range.end - range.start).sum();
    counter.fetch_add(bytes, Ordering::Relaxed);
}

impl Handler for BalloonHandler {
    fn rings(&self) -> Vec<&Ring> {
        self.rings.iter().collect()
    }

    fn watched(&self) -> Vec<(RawFd, EventSet)> {
        vec![(self.shared.wake.as_raw_fd(), EventSet::IN)]
    }

    fn work(&mut self, _: Cause) -> Result<Progress, DeviceError> {
        if self.shared.retargeted.swap(false, Ordering::AcqRel) {
            self.rings[INFLATE].interrupt().configuration();
        }
        self.rings.iter_mut().for_each(Ring::kicks_off);
        for _ in 0..BATCH {
            if !self.step()? {
                let mut more = false;
                for ring in &mut self.rings {
                    more |= ring.kicks_on()?;
                }
                return Ok(match more {
                    true => Progress::More,
                    false => Progress::Idle,
                });
            }
        }
        Ok(Progress::More)
    }

    /// A request in the middle is begun again: its pages stay the device's until then.
    fn quiesce(&mut self, _: Instant) -> bool {
        if let Some(request) = self.current.take() {
            self.rings[request.queue].unpop();
        }
        true
    }
}
