//! One queue of a disk: takes requests, carries them out, answers.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::EventSet;
use weft_confine::lock;
use weft_guest_memory::{DeviceMemory, Held};
use weft_vcpu::Access;

use super::engine::{Completion, Engine};
use super::geometry::Geometry;
use super::remote::{CHUNK, RemoteBlock};
use super::request::{Operation, Parsed, Request, Status, answer, parse};
use crate::ring::{HELD_MAX, pages};
use crate::worker::{Cause, Handler, InlineHandler, Progress};
use crate::{DeviceError, Ring};

/// Requests begun in one call.
const BATCH: usize = 64;
/// How often a stopping queue looks whether its I/O has ended.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// The thread's part.
pub struct BlockHandler {
    ring: Ring,
    geometry: Arc<Geometry>,
    engine: Arc<Mutex<Engine>>,
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
        engine: Arc<Mutex<Engine>>,
        write_through: bool,
    ) -> Self {
        Self {
            ring,
            geometry,
            engine,
            write_through,
            unanswered: None,
        }
    }

    /// Takes requests; whether there may be more for which there is room.
    fn take(&mut self, engine: &mut Engine) -> Result<Progress, DeviceError> {
        for _ in 0..BATCH {
            if !engine.has_room() {
                return Ok(Progress::Idle);
            }
            let Some(chain) = self.ring.pop()? else {
                return Ok(Progress::Idle);
            };
            match parse(&self.ring, &self.geometry, chain)? {
                Parsed::Work(mut request) => {
                    request.durable = self.write_through;
                    if let Some(ended) = engine.begin(&self.ring, request) {
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
    fn turn(&mut self, engine: &mut Engine) -> Result<Progress, DeviceError> {
        let failed = |source| DeviceError::Host {
            what: "cannot submit I/O",
            source,
        };
        engine.submit().map_err(failed)?;
        loop {
            let unanswered = self.unanswered.take();
            let Some(ended) = unanswered.or_else(|| engine.next_ended(&self.ring)) else {
                break;
            };
            self.end(ended)?;
        }
        Ok(match engine.submit().map_err(failed)? {
            true => Progress::Idle,
            false => Progress::More,
        })
    }

    fn serve(&mut self, engine: &mut Engine) -> Result<Progress, DeviceError> {
        let full = !engine.has_room();
        if full {
            self.turn(engine)?;
        }
        let taken = self.take(engine);
        let turned = self.turn(engine)?;
        Ok(match taken? {
            Progress::Idle => turned,
            Progress::More => Progress::More,
        })
    }
}

/// On the thread that brings a reply or a request, if the disk is on another slice: it
/// must not wait.
impl BlockHandler {
    /// Answers requests that ended and whose data is in guest memory.
    fn complete_inline(&mut self, remote: &mut RemoteBlock) -> Result<Progress, DeviceError> {
        // Then there is more to do than to answer.
        if remote.is_asking() || !remote.has_room() {
            return Ok(Progress::More);
        }
        let memory = self.ring.shared_memory();
        loop {
            let unanswered = self.unanswered.take();
            let Some(ended) = unanswered.or_else(|| remote.next_landed(&memory)) else {
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
        Ok(match remote.is_idle() {
            true => Progress::Idle,
            false => Progress::More,
        })
    }

    /// Takes one request, if it is the only one: a driver that has many gains nothing.
    fn take_inline(&mut self, remote: &mut RemoteBlock) -> Result<Progress, DeviceError> {
        if remote.in_flight() > 0 || self.unanswered.is_some() {
            return Ok(Progress::More);
        }
        let memory = self.ring.shared_memory();
        Ok(memory.without_waiting(|| self.take_one(remote)))
    }

    /// What went wrong here is left to the queue's thread: it may be that a page was not
    /// there.
    fn take_one(&mut self, remote: &mut RemoteBlock) -> Progress {
        let memory = self.ring.shared_memory();
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
            Ok(Parsed::Work(request)) => hold_small(&memory, request),
            _ => None,
        };
        let (Ok(Parsed::Work(mut request)), Some(_held)) = (parsed, held) else {
            self.ring.unpop();
            return Progress::More;
        };
        request.durable = self.write_through;
        if let Some(ended) = remote.begin(&memory, request) {
            self.unanswered = Some(ended);
            return Progress::More;
        }
        match self.ring.kicks_on() {
            Ok(false) => Progress::Idle,
            Ok(true) | Err(_) => Progress::More,
        }
    }
}

/// The pages of a read or write of one chunk, if none has to be waited for.
fn hold_small<'a>(memory: &'a DeviceMemory, request: &Request) -> Option<Held<'a>> {
    let small = request.moves_data() && request.length <= u64::from(CHUNK);
    let pages = match request.operation {
        Operation::Write => pages(&request.data),
        _ => Vec::new(),
    };
    (small && pages.len() <= HELD_MAX).then(|| memory.hold(pages, Access::Read))?
}

impl Handler for BlockHandler {
    fn rings(&self) -> Vec<&Ring> {
        vec![&self.ring]
    }

    fn watched(&self) -> Vec<(RawFd, EventSet)> {
        let ended = lock(&self.engine).descriptor();
        ended
            .into_iter()
            .map(|descriptor| (descriptor, EventSet::IN))
            .collect()
    }

    fn work(&mut self, _: Cause) -> Result<Progress, DeviceError> {
        let engine = self.engine.clone();
        let mut engine = lock(&engine);
        self.ring.kicks_off();
        let served = self.serve(&mut engine);
        self.ring.signal();
        if served? == Progress::More || self.ring.kicks_on()? && engine.has_room() {
            return Ok(Progress::More);
        }
        Ok(Progress::Idle)
    }

    fn set_inline_handler(&mut self, handler: InlineHandler) {
        if let Engine::Remote(remote) = &*lock(&self.engine) {
            remote.set_inline_handler(handler);
        }
    }

    fn work_inline(&mut self, cause: Cause) -> Result<Progress, DeviceError> {
        let engine = self.engine.clone();
        let Ok(mut engine) = engine.try_lock() else {
            return Ok(Progress::More);
        };
        match (&mut *engine, cause) {
            (Engine::Remote(remote), Cause::Ready(_)) => self.complete_inline(remote),
            (Engine::Remote(remote), Cause::Kick(_)) => self.take_inline(remote),
            _ => Ok(Progress::More),
        }
    }

    fn quiesce(&mut self, deadline: Instant) -> bool {
        let engine = self.engine.clone();
        let mut engine = lock(&engine);
        loop {
            // A fault now is no news: the device has stopped.
            let turned = self.turn(&mut engine);
            if engine.in_flight() == 0 {
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
