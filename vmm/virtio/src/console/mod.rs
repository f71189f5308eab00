//! Console (5.3): one port with a size. Queue 0 brings input to the driver,
//! queue 1 takes its output.

mod handler;
mod output;
mod persist;

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_confine::lock;

pub use output::ConsoleOutput;
pub use persist::ConsoleState;

use super::worker::Handler;
use super::{ConfigSpace, DeviceError, DeviceState, Kind, Ring, StateError, VirtioDevice};
use handler::ConsoleHandler;

const QUEUE_SIZE: u16 = 128;
/// VIRTIO_CONSOLE_F_SIZE (5.3.3).
const FEATURE_SIZE: u64 = 1;
/// Input that waits for the driver, in bytes: more than anybody types ahead.
pub const INPUT_MAX: usize = 64 << 10;

/// What the device, its thread and its outside share.
struct Shared {
    /// Never held across a call of the output.
    input: Mutex<VecDeque<u8>>,
    wake: EventFd,
    resized: AtomicBool,
    configuration: Arc<ConfigSpace>,
    /// Held while bytes go out: only the device's thread takes it, and, when that
    /// is stopped, `save`, `restore` and `reset`.
    output: Mutex<Output>,
}

struct Output {
    to: Box<dyn ConsoleOutput>,
    /// Bytes of the next request that went out already.
    skip: u64,
}

/// The console device.
pub struct Console {
    shared: Arc<Shared>,
}

/// The outside of a console.
#[derive(Clone)]
pub struct ConsoleHandle {
    shared: Arc<Shared>,
}

impl Console {
    /// A console of 80 by 25 characters that writes to `output`.
    pub fn new(output: Box<dyn ConsoleOutput>) -> io::Result<(Self, ConsoleHandle)> {
        let mut bytes = size(80, 25).to_vec();
        // max_nr_ports and emerg_wr, whose features are not offered.
        bytes.extend([0; 8]);
        let shared = Arc::new(Shared {
            input: Mutex::default(),
            wake: EventFd::new(EFD_NONBLOCK)?,
            resized: AtomicBool::new(false),
            configuration: Arc::new(ConfigSpace::new(bytes)),
            output: Mutex::new(Output {
                to: output,
                skip: 0,
            }),
        });
        let handle = ConsoleHandle {
            shared: shared.clone(),
        };
        Ok((Self { shared }, handle))
    }
}

fn size(columns: u16, rows: u16) -> [u8; 4] {
    let [first, second] = columns.to_le_bytes();
    let [third, fourth] = rows.to_le_bytes();
    [first, second, third, fourth]
}

impl ConsoleHandle {
    /// Gives input to the guest: how many bytes were taken. The rest must be
    /// offered again later; the guest reads slowly.
    pub fn input(&self, bytes: &[u8]) -> usize {
        let taken = {
            let mut input = lock(&self.shared.input);
            let taken = bytes.len().min(INPUT_MAX.saturating_sub(input.len()));
            input.extend(&bytes[..taken]);
            taken
        };
        // A full counter wakes as well.
        let _ = self.shared.wake.write(1);
        taken
    }

    /// The window has another size now.
    pub fn resize(&self, columns: u16, rows: u16) {
        self.shared.configuration.set(0, &size(columns, rows));
        self.shared.resized.store(true, Ordering::Release);
        let _ = self.shared.wake.write(1);
    }
}

impl VirtioDevice for Console {
    fn kind(&self) -> Kind {
        Kind {
            id: 3,
            class: 0x07_80_00,
            name: "console",
        }
    }

    fn features(&self) -> u64 {
        FEATURE_SIZE
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; 2]
    }

    fn workers(&self) -> usize {
        1
    }

    fn configuration(&self) -> Arc<ConfigSpace> {
        self.shared.configuration.clone()
    }

    fn activate(
        &mut self,
        _: u64,
        rings: Vec<Option<Ring>>,
    ) -> Result<Vec<Box<dyn Handler>>, DeviceError> {
        let Ok([Some(receive), Some(transmit)]) = <[_; 2]>::try_from(rings) else {
            return Err(DeviceError::Driver("did not enable a queue of the console"));
        };
        let handler = ConsoleHandler::new(receive, transmit, self.shared.clone());
        Ok(vec![Box::new(handler)])
    }

    fn reset(&mut self) {
        lock(&self.shared.output).skip = 0;
    }

    fn save(&self) -> DeviceState {
        DeviceState::Console(persist::save(&self.shared))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError> {
        let DeviceState::Console(state) = state else {
            return Err(StateError("it is not the state of a console"));
        };
        persist::restore(&self.shared, state)
    }
}
