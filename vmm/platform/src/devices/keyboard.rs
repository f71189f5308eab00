//! The command port of the 8042 keyboard controller, of which only the reset
//! line is left: how old software and `reboot=k` reset a PC.

use std::ops::Range;

use crate::bus::BusDevice;

/// Status when read, command when written. The data port is nobody's.
pub const PORTS: Range<u64> = 0x64..0x65;

/// Pulses output line 0, which is the CPU's reset.
const PULSE_RESET: u8 = 0xfe;

/// The port.
pub struct KeyboardController {
    on_reset: Box<dyn Fn() + Send + Sync>,
}

impl KeyboardController {
    /// `on_reset` is called on the vCPU's thread.
    pub fn new(on_reset: Box<dyn Fn() + Send + Sync>) -> Self {
        Self { on_reset }
    }
}

impl BusDevice for KeyboardController {
    fn read(&self, _: u64, data: &mut [u8]) {
        // Both buffers are empty: ready for a command, nothing typed.
        data.fill(0);
    }

    fn write(&self, _: u64, data: &[u8]) {
        if data == [PULSE_RESET] {
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
    fn only_the_pulse_resets() {
        let resets = Arc::new(AtomicU32::new(0));
        let count = resets.clone();
        let port = KeyboardController::new(Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        let mut data = [0xff];
        port.read(0, &mut data);
        assert_eq!(data, [0]);
        for value in 0..=255 {
            port.write(0, &[value]);
        }
        port.write(0, &[PULSE_RESET; 2]);
        assert_eq!(resets.load(Ordering::Relaxed), 1);
    }
}
