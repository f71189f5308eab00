//! A pin of the I/O APIC that several slots share: high while any of them
//! asks (PCI Local Bus 3.0, 2.2.6).

use std::sync::{Arc, Mutex};

use crate::interrupts::InterruptLine;
use weft_confine::lock;

/// The wire, and who pulls it.
pub struct Pin {
    line: Arc<dyn InterruptLine>,
    /// One bit per slot. Held while the line is set, so that the last word
    /// that the line hears is about the last state.
    asking: Mutex<u32>,
}

impl Pin {
    /// Nobody asks.
    pub fn new(line: Arc<dyn InterruptLine>) -> Self {
        Self {
            line,
            asking: Mutex::new(0),
        }
    }

    /// What `slot` wants.
    pub fn set(&self, slot: u8, high: bool) {
        let mut asking = lock(&self.asking);
        let before = *asking;
        if high {
            *asking |= 1 << slot;
        } else {
            *asking &= !(1 << slot);
        }
        if (before == 0) != (*asking == 0) {
            self.line.set(*asking != 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Heard(Mutex<Vec<bool>>);

    impl InterruptLine for Heard {
        fn set(&self, high: bool) {
            lock(&self.0).push(high);
        }
    }

    #[test]
    fn high_until_the_last_one_lets_go() {
        let heard = Arc::new(Heard(Mutex::default()));
        let pin = Pin::new(heard.clone());
        pin.set(3, true);
        pin.set(11, true);
        pin.set(3, false);
        assert_eq!(*lock(&heard.0), [true]);
        pin.set(11, false);
        pin.set(11, false);
        assert_eq!(*lock(&heard.0), [true, false]);
    }
}
