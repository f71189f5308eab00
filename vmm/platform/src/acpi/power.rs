//! The registers that the tables speak of: power off, reset, and the power
//! button (ACPI Specification 6.5, 4.8.3.7 and 4.8.3.8).
//!
//! | port | register | |
//! | --- | --- | --- |
//! | 0x600 | sleep control | writing SLP_EN and type 5 powers off |
//! | 0x601 | sleep status | WAK_STS: never set, as no sleep but the last is offered |
//! | 0x602 | reset | writing 1 resets |
//! | 0x603 | events | bit 0: the button was pressed; reading takes all |

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::bus::BusDevice;
use crate::interrupts::InterruptLine;
use crate::part::{Part, PartError, Persist, Version};

/// All of the ports.
pub const PORTS: Range<u16> = 0x600..0x604;
/// See the table above.
pub const SLEEP_CONTROL: u16 = 0x600;
/// See the table above.
pub const SLEEP_STATUS: u16 = 0x601;
/// See the table above.
pub const RESET: u16 = 0x602;
/// See the table above.
pub const EVENTS: u16 = 0x603;
/// What is written to the reset register.
pub const RESET_VALUE: u8 = 1;
/// The type of sleep that is power off: SLP_TYP in `\_S5`.
pub const SLEEP_TYPE_OFF: u8 = 5;
/// Bit of the events register.
pub const BUTTON_PRESSED: u8 = 1;

const SLEEP_ENABLE: u8 = 1 << 5;
const SLEEP_TYPE_SHIFT: u8 = 2;
const SLEEP_TYPE_MASK: u8 = 7;

/// What the guest asks of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerRequest {
    /// No power.
    Off,
    /// From the beginning.
    Reset,
}

/// Hears what the guest asks: on the thread of its vCPU, so it must not wait.
pub trait PowerListener: Send + Sync {
    /// The guest asks.
    fn request(&self, request: PowerRequest);
}

impl<F: Fn(PowerRequest) + Send + Sync> PowerListener for F {
    fn request(&self, request: PowerRequest) {
        self(request);
    }
}

/// The registers' contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PowerState {
    version: Version<1>,
    /// Events that the guest has not read: the interrupt line is high while any is.
    pub events: u8,
}

/// The device at [`PORTS`].
pub struct PowerDevice {
    /// Guards the events together with the level of the line.
    state: Mutex<PowerState>,
    line: Box<dyn InterruptLine>,
    listener: Box<dyn PowerListener>,
}

impl PowerDevice {
    /// `line` is [`EVENT_LINE`](super::EVENT_LINE) of the I/O APIC.
    pub fn new(line: Box<dyn InterruptLine>, listener: Box<dyn PowerListener>) -> Self {
        Self {
            state: Mutex::default(),
            line,
            listener,
        }
    }

    /// Asks the guest's system to shut down, as a button does.
    pub fn press_button(&self) {
        self.set_events(|events| events | BUTTON_PRESSED);
    }

    /// Returns the events before.
    fn set_events(&self, change: impl FnOnce(u8) -> u8) -> u8 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = state.events;
        state.events = change(before);
        self.line.set(state.events != 0);
        before
    }
}

impl Part for PowerDevice {}

impl Persist for PowerDevice {
    type State = PowerState;

    fn save(&self) -> Result<PowerState, PartError> {
        Ok(*self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn restore(&self, state: &PowerState) -> Result<(), PartError> {
        // The level of the line is part of the I/O APIC's state.
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = *state;
        Ok(())
    }
}

impl BusDevice for PowerDevice {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let [byte] = data
            && offset == u64::from(EVENTS - PORTS.start)
        {
            *byte = self.set_events(|_| 0);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let [value] = *data else { return };
        let offset = offset.min(u64::from(u16::MAX)) as u16;
        match PORTS.start.saturating_add(offset) {
            SLEEP_CONTROL => {
                let kind = value >> SLEEP_TYPE_SHIFT & SLEEP_TYPE_MASK;
                if value & SLEEP_ENABLE != 0 && kind == SLEEP_TYPE_OFF {
                    self.listener.request(PowerRequest::Off);
                }
            }
            RESET if value == RESET_VALUE => self.listener.request(PowerRequest::Reset),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[derive(Clone, Default)]
    struct Line(Arc<AtomicBool>);

    impl InterruptLine for Line {
        fn set(&self, high: bool) {
            self.0.store(high, Ordering::Relaxed);
        }
    }

    fn device() -> (PowerDevice, Line, Arc<Mutex<Vec<PowerRequest>>>) {
        let (line, heard) = (Line::default(), Arc::<Mutex<Vec<PowerRequest>>>::default());
        let listener = {
            let heard = heard.clone();
            move |request| heard.lock().unwrap().push(request)
        };
        let device = PowerDevice::new(Box::new(line.clone()), Box::new(listener));
        (device, line, heard)
    }

    #[test]
    fn what_linux_writes_powers_off_and_resets() {
        let (device, _, heard) = device();
        // Clears WAK_STS, writes the type, then enables too.
        device.write(1, &[0x80]);
        device.write(0, &[5 << 2]);
        assert_eq!(*heard.lock().unwrap(), []);
        device.write(0, &[5 << 2 | 1 << 5]);
        device.write(2, &[1]);
        assert_eq!(
            *heard.lock().unwrap(),
            [PowerRequest::Off, PowerRequest::Reset]
        );
        // Other sleeps, other values, other sizes and places do nothing.
        device.write(0, &[3 << 2 | 1 << 5]);
        device.write(2, &[2]);
        device.write(2, &[1, 0]);
        device.write(u64::MAX, &[1]);
        assert_eq!(heard.lock().unwrap().len(), 2);
    }

    #[test]
    fn the_button_holds_the_line_until_it_is_read() {
        let (device, line, _) = device();
        device.press_button();
        assert!(line.0.load(Ordering::Relaxed));
        let saved = device.save().unwrap();
        let mut data = [0xff];
        device.read(3, &mut data);
        assert_eq!(data, [BUTTON_PRESSED]);
        assert!(!line.0.load(Ordering::Relaxed));
        device.read(3, &mut data);
        assert_eq!(data, [0]);
        // The line is part of another state.
        device.restore(&saved).unwrap();
        assert!(!line.0.load(Ordering::Relaxed));
        assert_eq!(device.save().unwrap(), saved);
    }
}
