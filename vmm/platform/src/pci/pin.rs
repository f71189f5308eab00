//! A pin of the I/O APIC that several slots share: high while one of them asserts INTx (PCI
//! Local Bus 3.0, 2.2.6).

use std::sync::{Arc, Mutex};

use crate::interrupts::InterruptLine;
use weft_confine::lock;

/// The interrupt line, and the slots that assert it.
pub struct Pin {
    line: Arc<dyn InterruptLine>,
    /// A bit for each slot. Locked while the line is driven, so that the line's level follows
    /// the last state.
    asking: Mutex<u32>,
}

impl Pin {
    /// A pin that no slot asserts.
    pub fn new(line: Arc<dyn InterruptLine>) -> Self {
        Self {
            line,
            asking: Mutex::new(0),
        }
    }

    /// Sets whether `slot` asserts the pin.
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
