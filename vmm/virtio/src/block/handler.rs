//! One queue of a disk: takes requests, has its back end execute them, answers.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::EventSet;
use weft_confine::lock;
use weft_guest_memory::{DeviceMemory, Held};
use weft_vcpu::Access;

use super::back_end::{BlockBackend, Completion};
use super::geometry::Geometry;
use super::request::{Operation, Parsed, Request, Status, answer, parse};
use crate::ring::{HELD_MAX, pages};
use crate::worker::{Cause, Handler, InlineHandler, Progress};
use crate::{DeviceError, Ring};

/// Requests begun in one call.
const BATCH: usize = 64;
/// How often a stopping queue looks whether its I/O has ended.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// A back end, which the thread of its queue locks while it works.
pub type SharedBackend = Arc<Mutex<dyn BlockBackend>>;

/// The thread's part.
pub struct BlockHandler {
    ring: Ring,
    geometry: Arc<Geometry>,
    back_end: SharedBackend,
    /// The driver cannot flush, so every change is durable when it hears of it.
    write_through: bool,
    /// A request that ended elsewhere than on the queue's thread, which could not answer
    /// it without waiting.
    unanswered: Option<Completion>,
}

impl BlockHandler {
    /// For one queue.
    pub fn new(
        ring: Ring,
        geometry: Arc<Geometry>,
        back_end: SharedBackend,
        write_through: bool,
    ) -> Self {
        Self {
            ring,
            geometry,
            back_end,
            write_through,
            unanswered: None,
        }
    }

    /// Takes requests; whether there may be more for which there is room.
    fn take(&mut self, back_end: &mut dyn BlockBackend) -> Result<Progress, DeviceError> {
        for _ in 0..BATCH {
            if !back_end.has_room() {
                return Ok(Progress::Idle);
            }
            let Some(chain) = self.ring.pop()? else {
                return Ok(Progress::Idle);
            };
            match parse(&self.ring, &self.geometry, chain)? {
                Parsed::Work(mut request) => {
                    request.durable = self.write_through;
                    if let Some(ended) = back_end.begin(self.ring.memory(), request) {
                        self.end(ended)?;
                    }
                }
                Parsed::Answered(chain, status, written) => {
                    answer(&mut self.ring, &chain, status, written)?;
                }
            }
        }
        Ok(Progress::More)
    }

    fn end(&mut self, ended: Completion) -> Result<(), DeviceError> {
        let Completion { request, status } = ended;
        let read = request.operation == Operation::Read && status == Status::Ok;
        let written = if read { request.length } else { 0 };
        answer(&mut self.ring, &request.chain, status, written)
    }

    /// Submits, and answers what has ended; whether there is more to submit.
    fn turn(&mut self, back_end: &mut dyn BlockBackend) -> Result<Progress, DeviceError> {
        let failed = |source| DeviceError::Host {
            what: "cannot submit I/O",
            source,
        };
        back_end.submit().map_err(failed)?;
        loop {
            let unanswered = self.unanswered.take();
            let Some(ended) = unanswered.or_else(|| back_end.next_completion(self.ring.memory()))
            else {
                break;
            };
            self.end(ended)?;
        }
        Ok(match back_end.submit().map_err(failed)? {
            true => Progress::Idle,
            false => Progress::More,
        })
    }

    fn serve(&mut self, back_end: &mut dyn BlockBackend) -> Result<Progress, DeviceError> {
        let full = !back_end.has_room();
        if full {
            self.turn(back_end)?;
        }
        let taken = self.take(back_end);
        let turned = self.turn(back_end)?;
        Ok(match taken? {
            Progress::Idle => turned,
            Progress::More => Progress::More,
        })
    }
}

/// On the thread that brings a completion or a request: it must not wait.
impl BlockHandler {
    /// Answers requests that ended and whose data is in guest memory.
    fn complete_inline(
        &mut self,
        back_end: &mut dyn BlockBackend,
    ) -> Result<Progress, DeviceError> {
        // Without room the driver may have more requests, which are the thread's.
        if !back_end.completes_inline() || !back_end.has_room() {
            return Ok(Progress::More);
        }
        let memory = self.ring.memory().clone();
        loop {
            let unanswered = self.unanswered.take();
            let Some(ended) = unanswered.or_else(|| back_end.next_inline_completion(&memory))
            else {
                break;
            };
            let (written, read) = self.ring.pages_of_answer(&ended.request.chain);
            let held = memory
                .hold(written, Access::Write)
                .zip(memory.hold([read], Access::Read));
            if held.is_none() {
                self.unanswered = Some(ended);
                return Ok(Progress::More);
            }
            self.end(ended)?;
            self.ring.signal();
        }
        Ok(match back_end.has_results() {
            true => Progress::More,
            false => Progress::Idle,
        })
    }

    /// Takes one request, if it is the only one: a driver that has many gains nothing.
    fn take_inline(&mut self, back_end: &mut dyn BlockBackend) -> Result<Progress, DeviceError> {
        let longest = back_end.begins_inline_max();
        if longest == 0 || back_end.in_flight() > 0 || self.unanswered.is_some() {
            return Ok(Progress::More);
        }
        let memory = self.ring.memory().clone();
        Ok(memory.without_waiting(|| self.take_one(back_end)))
    }

    /// What went wrong here is left to the queue's thread: it may be that a page was not
    /// there.
    fn take_one(&mut self, back_end: &mut dyn BlockBackend) -> Progress {
        let memory = self.ring.memory().clone();
        let before = self.ring.next_available();
        let chain = match self.ring.pop() {
            Ok(Some(chain)) => chain,
            Ok(None) => return Progress::More,
            Err(_) => {
                if self.ring.next_available() != before {
                    self.ring.unpop();
                }
                return Progress::More;
            }
        };
        let parsed = parse(&self.ring, &self.geometry, chain);
        let held = match &parsed {
            Ok(Parsed::Work(request)) => hold_short(&memory, request, back_end.begins_inline_max()),
            _ => None,
        };
        let (Ok(Parsed::Work(mut request)), Some(_held)) = (parsed, held) else {
            self.ring.unpop();
            return Progress::More;
        };
        request.durable = self.write_through;
        if let Some(ended) = back_end.begin(&memory, request) {
            self.unanswered = Some(ended);
            return Progress::More;
        }
        match self.ring.kicks_on() {
            Ok(false) => Progress::Idle,
            Ok(true) | Err(_) => Progress::More,
        }
    }
}

/// Holds the pages of a read or write of at most `longest` bytes, if none has to be
/// waited for.
fn hold_short<'a>(memory: &'a DeviceMemory, request: &Request, longest: u64) -> Option<Held<'a>> {
    let short = request.moves_data() && request.length <= longest;
    let pages = match request.operation {
        Operation::Write => pages(&request.data),
        _ => Vec::new(),
    };
    (short && pages.len() <= HELD_MAX).then(|| memory.hold(pages, Access::Read))?
}

impl Handler for BlockHandler {
    fn rings(&self) -> Vec<&Ring> {
        vec![&self.ring]
    }

    fn watched(&self) -> Vec<(RawFd, EventSet)> {
        let ended = lock(&self.back_end).descriptor();
        ended
            .into_iter()
            .map(|descriptor| (descriptor, EventSet::IN))
            .collect()
    }

    fn work(&mut self, _: Cause) -> Result<Progress, DeviceError> {
        let back_end = self.back_end.clone();
        let mut back_end = lock(&back_end);
        self.ring.kicks_off();
        let served = self.serve(&mut *back_end);
        self.ring.signal();
        if served? == Progress::More || self.ring.kicks_on()? && back_end.has_room() {
            return Ok(Progress::More);
        }
        Ok(Progress::Idle)
    }

    fn set_inline_handler(&mut self, handler: InlineHandler) {
        lock(&self.back_end).set_inline_handler(handler);
    }

    fn work_inline(&mut self, cause: Cause) -> Result<Progress, DeviceError> {
        let back_end = self.back_end.clone();
        let Ok(mut back_end) = back_end.try_lock() else {
            return Ok(Progress::More);
        };
        match cause {
            Cause::Ready(_) => self.complete_inline(&mut *back_end),
            Cause::Kick(_) => self.take_inline(&mut *back_end),
            Cause::Start | Cause::Again => Ok(Progress::More),
        }
    }

    fn quiesce(&mut self, deadline: Instant) -> bool {
        let back_end = self.back_end.clone();
        let mut back_end = lock(&back_end);
        loop {
            // An error now is no news: the device has stopped.
            let turned = self.turn(&mut *back_end);
            if back_end.in_flight() == 0 {
                self.ring.signal();
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            if turned.is_err() {
                // The answer could not be given; the next may.
                continue;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}
