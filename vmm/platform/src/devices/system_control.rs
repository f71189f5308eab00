//! System control port A of a PC: a reset, and the gate of address line 20, which is
//! always open here.

use std::ops::Range;
use std::sync::Mutex;

use weft_confine::lock;

use crate::bus::BusDevice;

pub const PORTS: Range<u64> = 0x92..0x93;

/// Resets when it goes from 0 to 1.
const RESET: u8 = 1;
/// Address line 20 is as the program says it.
const LINE_20: u8 = 2;

/// The port.
pub struct SystemControl {
    on_reset: Box<dyn Fn() + Send + Sync>,
    /// What was written last.
    written: Mutex<u8>,
}

impl SystemControl {
    /// `on_reset` is called on the vCPU's thread.
    pub fn new(on_reset: Box<dyn Fn() + Send + Sync>) -> Self {
        Self {
            on_reset,
            written: Mutex::new(LINE_20),
        }
    }
}

impl BusDevice for SystemControl {
    fn read(&self, _: u64, data: &mut [u8]) {
        data.fill(0);
        if let [byte] = data {
            *byte = *lock(&self.written) | LINE_20;
        }
    }

    fn write(&self, _: u64, data: &[u8]) {
        let [value] = *data else {
            return;
        };
        let before = std::mem::replace(&mut *lock(&self.written), value);
        if value & !before & RESET != 0 {
            (self.on_reset)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_rising_edge_resets_and_line_20_stays_open() {
        let resets = Arc::new(AtomicU32::new(0));
        let count = resets.clone();
        let port = SystemControl::new(Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        let read = || {
            let mut data = [0xff];
            port.read(0, &mut data);
            data[0]
        };
        assert_eq!(read(), LINE_20);
        for value in [0, LINE_20, 0x80] {
            port.write(0, &[value]);
        }
        assert_eq!((read(), resets.load(Ordering::Relaxed)), (0x82, 0));
        for value in [1, 3, 1] {
            port.write(0, &[value]);
        }
        assert_eq!(resets.load(Ordering::Relaxed), 1);
        assert_eq!(read(), 3);
    }
}
