//! One queue of a disk: takes requests, carries them out, answers.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::EventSet;

use super::engine::{Ended, Engine};
use super::geometry::Geometry;
use super::request::{Operation, Parsed, Status, answer, parse};
use crate::pci::lock;
use crate::virtio::worker::{Cause, Handler, Progress};
use crate::virtio::{Fault, Ring};

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
        }
    }

    /// Takes requests; whether there may be more for which there is room.
    fn take(&mut self, engine: &mut Engine) -> Result<Progress, Fault> {
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

    fn end(&mut self, ended: Ended) -> Result<(), Fault> {
        let Ended { request, status } = ended;
        let read = request.operation == Operation::Read && status == Status::Ok;
        if status == Status::IoError {
            self.ring.interrupt().say(format_args!(
                "{:?} of {} bytes at {} failed on the host",
                request.operation, request.length, request.offset
            ));
        }
        let written = if read { request.length } else { 0 };
        answer(&mut self.ring, &request.chain, status, written)
    }

    /// Submits, and answers what has ended; whether there is more to submit.
    fn turn(&mut self, engine: &mut Engine) -> Result<Progress, Fault> {
        let failed = |source| Fault::Host {
            what: "cannot submit I/O",
            source,
        };
        engine.submit().map_err(failed)?;
        while let Some(ended) = engine.next_ended(&self.ring) {
            self.end(ended)?;
        }
        Ok(match engine.submit().map_err(failed)? {
            true => Progress::Idle,
            false => Progress::More,
        })
    }

    fn serve(&mut self, engine: &mut Engine) -> Result<Progress, Fault> {
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

    fn work(&mut self, _: Cause) -> Result<Progress, Fault> {
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
