//! The port by which bare-metal test kernels say how they fared (QEMU's
//! `isa-debug-exit`).

use std::ops::Range;

use crate::bus::BusDevice;

/// Where it usually is.
pub const PORTS: Range<u64> = 0xf4..0xf8;

/// Writing `value` ends the machine with the exit code `(value << 1) | 1`.
pub struct DebugExit {
    on_exit: Box<dyn Fn(u32) + Send + Sync>,
}

impl DebugExit {
    /// `on_exit` hears the exit code, on the vCPU's thread.
    pub fn new(on_exit: Box<dyn Fn(u32) + Send + Sync>) -> Self {
        Self { on_exit }
    }
}

impl BusDevice for DebugExit {
    fn read(&self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset != 0 {
            return;
        }
        let mut value = [0; 4];
        let length = data.len().min(4);
        value[..length].copy_from_slice(&data[..length]);
        (self.on_exit)(u32::from_le_bytes(value) << 1 | 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn codes_are_odd() {
        let codes = Arc::new(Mutex::new(Vec::new()));
        let kept = codes.clone();
        let port = DebugExit::new(Box::new(move |code| kept.lock().unwrap().push(code)));
        port.write(0, &[0x10]);
        port.write(0, &[0, 1, 0, 0]);
        port.write(1, &[0x10]);
        port.write(0, &[0xff; 8]);
        assert_eq!(*codes.lock().unwrap(), [0x21, 0x201, 0xffff_ffff]);
    }
}
