//! Memory balloon (5.5): the driver gives pages to the device and takes them back (queues
//! 0 and 1), and reports pages that are free (queue 2).
//!
//! ```text
//!            target, BalloonHandle::set_target
//!  device ───────────────────────────────────▶ driver
//!         ◀── inflate: page numbers ──────────         the driver does not use them
//!         ◀── deflate: page numbers ──────────         it uses them again
//!         ◀── report: buffers that are free ──         until the buffer is used
//! ```
//!
//! The memory of inflated and of reported pages goes back to the host ([`Reclaim`]), and
//! comes again, as zeros, with the next access. So the device keeps no record of pages.
//!
//! Invariants: a reported buffer is used only after its memory went back, so the driver
//! never loses a byte that it wrote; no memory is taken while the driver poisons its free
//! pages with a value that is not zero.
//!
//! Queue numbers: without statistics and hints, Linux up to 6.10 gives reports the number
//! 2, because it counts only the queues that are offered. Later kernels first try the
//! specification's number 4, and then 2.

mod handler;
mod persist;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_guest_memory::Reclaim;

pub use persist::BalloonState;

use super::worker::Handler;
use super::{ConfigSpace, DeviceError, DeviceState, Kind, Ring, StateError, VirtioDevice};
use handler::BalloonHandler;

const QUEUE_SIZE: u16 = 128;
/// VIRTIO_BALLOON_F_DEFLATE_ON_OOM (5.5.3): the driver may take pages back when it needs
/// them.
const FEATURE_DEFLATE_ON_OOM: u64 = 1 << 2;
/// VIRTIO_BALLOON_F_PAGE_POISON: the driver says what its free pages are filled with.
/// Without it a driver that fills them does not report them.
const FEATURE_PAGE_POISON: u64 = 1 << 4;
/// VIRTIO_BALLOON_F_REPORTING.
const FEATURE_REPORTING: u64 = 1 << 5;

/// Offsets in the configuration (5.5.4); each field has four bytes.
const NUM_PAGES: usize = 0;
const ACTUAL: usize = 4;
const POISON: usize = 12;
const CONFIGURATION_SIZE: usize = 16;
/// A page of the balloon, whatever the driver's pages are (5.5.6).
const BALLOON_PAGE: u64 = 4096;

/// What the device, its thread and its outside share.
struct Shared {
    configuration: Arc<ConfigSpace>,
    memory: Arc<dyn Reclaim>,
    wake: EventFd,
    retargeted: AtomicBool,
    inflated: AtomicU64,
    deflated: AtomicU64,
    reported: AtomicU64,
}

impl Shared {
    fn field(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        self.configuration.read(offset as u64, &mut bytes);
        u32::from_le_bytes(bytes)
    }
}

/// The balloon device.
pub struct Balloon {
    shared: Arc<Shared>,
}

/// The outside of a balloon.
#[derive(Clone)]
pub struct BalloonHandle {
    shared: Arc<Shared>,
}

impl Balloon {
    /// An empty balloon in a guest whose unused memory goes to `memory`.
    pub fn new(memory: Arc<dyn Reclaim>) -> io::Result<(Self, BalloonHandle)> {
        let written = [ACTUAL..ACTUAL + 4, POISON..POISON + 4];
        let bytes = vec![0; CONFIGURATION_SIZE];
        let shared = Arc::new(Shared {
            configuration: Arc::new(ConfigSpace::with_writable(bytes, written)),
            memory,
            wake: EventFd::new(EFD_NONBLOCK)?,
            retargeted: AtomicBool::new(false),
            inflated: AtomicU64::new(0),
            deflated: AtomicU64::new(0),
            reported: AtomicU64::new(0),
        });
        let handle = BalloonHandle {
            shared: shared.clone(),
        };
        Ok((Self { shared }, handle))
    }
}

impl BalloonHandle {
    /// Asks the driver to have `bytes` in the balloon, rounded down to pages. It takes its
    /// time, and may find fewer.
    pub fn set_target(&self, bytes: u64) {
        let pages = u32::try_from(bytes / BALLOON_PAGE).unwrap_or(u32::MAX);
        self.shared
            .configuration
            .set(NUM_PAGES, &pages.to_le_bytes());
        self.shared.retargeted.store(true, Ordering::Release);
        // A full counter wakes as well.
        let _ = self.shared.wake.write(1);
    }

    /// The bytes that the driver was asked to have in the balloon.
    pub fn target(&self) -> u64 {
        u64::from(self.shared.field(NUM_PAGES)) * BALLOON_PAGE
    }

    /// The bytes that are in the balloon, as the driver says.
    pub fn actual(&self) -> u64 {
        u64::from(self.shared.field(ACTUAL)) * BALLOON_PAGE
    }
}

impl VirtioDevice for Balloon {
    fn kind(&self) -> Kind {
        Kind {
            id: 5,
            class: 0xff_00_00,
            name: "balloon",
        }
    }

    fn features(&self) -> u64 {
        FEATURE_DEFLATE_ON_OOM | FEATURE_PAGE_POISON | FEATURE_REPORTING
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; 3]
    }

    fn workers(&self) -> usize {
        1
    }

    fn configuration(&self) -> Arc<ConfigSpace> {
        self.shared.configuration.clone()
    }

    fn activate(
        &mut self,
        features: u64,
        rings: Vec<Option<Ring>>,
    ) -> Result<Vec<Box<dyn Handler>>, DeviceError> {
        let Ok([Some(inflate), Some(deflate), report]) = <[_; 3]>::try_from(rings) else {
            return Err(DeviceError::Driver("did not enable a queue of the balloon"));
        };
        let report = report.filter(|_| features & FEATURE_REPORTING != 0);
        let poisons = features & FEATURE_PAGE_POISON != 0;
        let rings = [inflate, deflate].into_iter().chain(report).collect();
        let handler = BalloonHandler::new(rings, poisons, self.shared.clone());
        Ok(vec![Box::new(handler)])
    }

    fn reset(&mut self) {
        for field in [ACTUAL, POISON] {
            self.shared.configuration.set(field, &[0; 4]);
        }
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let shared = &self.shared;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        vec![
            (
                "target-bytes",
                u64::from(shared.field(NUM_PAGES)) * BALLOON_PAGE,
            ),
            ("bytes", u64::from(shared.field(ACTUAL)) * BALLOON_PAGE),
            ("inflated-bytes", count(&shared.inflated)),
            ("deflated-bytes", count(&shared.deflated)),
            ("reported-bytes", count(&shared.reported)),
        ]
    }

    fn save(&self) -> DeviceState {
        DeviceState::Balloon(persist::save(&self.shared))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError> {
        let DeviceState::Balloon(state) = state else {
            return Err(StateError("it is not the state of a balloon"));
        };
        persist::restore(&self.shared, state)
    }
}
