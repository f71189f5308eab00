//! Whole devices, played through configuration space, registers and rings.

mod balloon;
mod block;
mod console;
mod hostile;
mod net;
mod rng;
mod transport;

use super::fake_driver::{Buffer, Driver, Machine};

fn to_read(machine: &Machine, bytes: &[u8]) -> Buffer {
    Buffer {
        address: machine.buffer(bytes),
        length: bytes.len() as u32,
        writable: false,
    }
}

fn to_write(machine: &Machine, length: usize) -> Buffer {
    Buffer {
        address: machine.buffer(&vec![0; length]),
        length: length as u32,
        writable: true,
    }
}

fn started(machine: &Machine, slot: u8) -> Driver<'_> {
    let mut driver = Driver::find(machine, slot);
    driver.start(u64::MAX, 64);
    driver
}
