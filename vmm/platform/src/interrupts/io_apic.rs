//! The I/O APIC (Intel 82093AA data sheet; the EOI register as in later ones).
//!
//! Invariants: a level-triggered entry whose remote IRR is set sends nothing until
//! its EOI; then it sends again at once if its pin is still high. The bit stays
//! set only if a local APIC accepted the interrupt, so that an EOI follows.

use serde::{Deserialize, Serialize};

use super::message::{Delivery, Destination, Interrupt};
use crate::part::Version;

/// Pins of the I/O APIC.
pub const PINS: usize = 24;
/// Bytes of the register window.
pub const IO_APIC_SIZE: u64 = 0x1000;

/// Version 0x20: has the EOI register.
const VERSION: u32 = 0x20 | (PINS as u32 - 1) << 16;
const REMOTE_IRR: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
const MASKED: u64 = 1 << 16;
const LOGICAL: u64 = 1 << 11;
/// Delivery status and remote IRR cannot be written.
const WRITABLE: u64 = 0xff00_0000_0001_afff;

/// The registers, and which pins are high.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IoApicState {
    version: Version<1>,
    id: u32,
    selected: u8,
    entries: [u64; PINS],
    /// Bit by pin: the pin is high.
    high: u32,
}

/// The I/O APIC. Its caller sends the interrupts that it returns, and reports those that
/// no local APIC accepted.
pub struct IoApic {
    state: IoApicState,
}

impl Default for IoApic {
    fn default() -> Self {
        Self {
            state: IoApicState {
                version: Version,
                id: 0,
                selected: 0,
                entries: [MASKED; PINS],
                high: 0,
            },
        }
    }
}

impl IoApic {
    /// The state to save.
    pub fn save(&self) -> IoApicState {
        self.state.clone()
    }

    /// Replaces the state by a saved one.
    pub fn restore(&mut self, state: IoApicState) {
        self.state = state;
    }

    /// A pin goes high or low. Pins are active-high here; the guest's polarity bit
    /// describes the wiring of a board, so it has no effect.
    pub fn set_pin(&mut self, pin: usize, high: bool) -> Option<Interrupt> {
        let entry = *self.state.entries.get(pin)?;
        let bit = 1 << pin;
        let was = self.state.high & bit != 0;
        if !high {
            self.state.high &= !bit;
            return None;
        }
        self.state.high |= bit;
        if entry & LEVEL == 0 && was {
            return None;
        }
        self.send(pin)
    }

    /// Reads a register of the window.
    pub fn read(&self, offset: u64) -> u32 {
        match offset {
            0x00 => u32::from(self.state.selected),
            0x10 => self.register(),
            _ => 0,
        }
    }

    /// Writes a register of the window; interrupts that follow go to `out`, each
    /// with its pin.
    pub fn write(&mut self, offset: u64, value: u32, out: &mut Vec<(usize, Interrupt)>) {
        match offset {
            0x00 => self.state.selected = value as u8,
            0x10 => out.extend(self.set_register(value)),
            0x40 => self.end_of_interrupt(value as u8, out),
            _ => {}
        }
    }

    /// No local APIC accepted the interrupt of a pin, so no EOI follows. A level that stays
    /// high is sent again when its device or the guest accesses the pin.
    pub fn not_taken(&mut self, pin: usize, interrupt: &Interrupt) {
        let Some(entry) = self.state.entries.get_mut(pin) else {
            return;
        };
        // Another one may be on its way since.
        if interrupt_of(*entry).as_ref() == Some(interrupt) {
            *entry &= !REMOTE_IRR;
        }
    }

    /// The level-triggered interrupt `vector` ended.
    pub fn end_of_interrupt(&mut self, vector: u8, out: &mut Vec<(usize, Interrupt)>) {
        for pin in 0..PINS {
            let entry = &mut self.state.entries[pin];
            if *entry as u8 == vector && *entry & LEVEL != 0 && *entry & REMOTE_IRR != 0 {
                *entry &= !REMOTE_IRR;
                if self.state.high & 1 << pin != 0 {
                    out.extend(self.send(pin).map(|interrupt| (pin, interrupt)));
                }
            }
        }
    }

    fn register(&self) -> u32 {
        match self.state.selected {
            0 | 2 => self.state.id,
            1 => VERSION,
            index => match self.entry(index) {
                Some((pin, true)) => (self.state.entries[pin] >> 32) as u32,
                Some((pin, false)) => self.state.entries[pin] as u32,
                None => 0,
            },
        }
    }

    fn set_register(&mut self, value: u32) -> Option<(usize, Interrupt)> {
        if self.state.selected == 0 {
            self.state.id = value & 0x0f00_0000;
            return None;
        }
        let (pin, high) = self.entry(self.state.selected)?;
        let entry = &mut self.state.entries[pin];
        let value = u64::from(value);
        let new = if high {
            *entry & 0xffff_ffff | value << 32
        } else {
            *entry & !0xffff_ffff | value
        };
        *entry = new & WRITABLE | *entry & REMOTE_IRR;
        if *entry & LEVEL == 0 {
            // Linux clears a stuck remote IRR by making the entry an edge for a moment.
            *entry &= !REMOTE_IRR;
            return None;
        }
        // A level that is high interrupts as soon as it is unmasked.
        (self.state.high & 1 << pin != 0)
            .then(|| self.send(pin))
            .flatten()
            .map(|interrupt| (pin, interrupt))
    }

    /// The redirection entry of a register index, and whether it is the upper half.
    fn entry(&self, index: u8) -> Option<(usize, bool)> {
        let index = usize::from(index).checked_sub(0x10)?;
        (index < 2 * PINS).then_some((index / 2, index % 2 == 1))
    }

    fn send(&mut self, pin: usize) -> Option<Interrupt> {
        let entry = &mut self.state.entries[pin];
        if *entry & (MASKED | REMOTE_IRR) != 0 {
            return None;
        }
        let interrupt = interrupt_of(*entry)?;
        if interrupt.level {
            *entry |= REMOTE_IRR;
        }
        Some(interrupt)
    }
}

/// The interrupt that a redirection entry sends.
fn interrupt_of(entry: u64) -> Option<Interrupt> {
    let target = (entry >> 56) as u8;
    Some(Interrupt {
        vector: entry as u8,
        delivery: Delivery::from_bits((entry >> 8) as u32)?,
        destination: Destination::of_8_bits(target, entry & LOGICAL != 0),
        level: entry & LEVEL != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(apic: &mut IoApic, pin: u32, low: u32, high: u32) -> Vec<(usize, Interrupt)> {
        let mut out = Vec::new();
        for (index, value) in [(0x11 + 2 * pin, high), (0x10 + 2 * pin, low)] {
            apic.write(0, index, &mut out);
            apic.write(0x10, value, &mut out);
        }
        out
    }

    fn read(apic: &mut IoApic, index: u32) -> u32 {
        apic.write(0, index, &mut Vec::new());
        apic.read(0x10)
    }

    #[test]
    fn an_edge_sends_once_for_each_rise() {
        let mut apic = IoApic::default();
        assert!(program(&mut apic, 4, 0x24, 3 << 24).is_empty());
        let sent = apic.set_pin(4, true).unwrap();
        assert_eq!(sent.vector, 0x24);
        assert_eq!(sent.destination, Destination::Physical(3));
        assert!(!sent.level);
        assert_eq!(apic.set_pin(4, true), None);
        assert_eq!(apic.set_pin(4, false), None);
        assert!(apic.set_pin(4, true).is_some());
    }

    #[test]
    fn a_level_is_sent_again_after_its_eoi_while_it_is_high() {
        let mut apic = IoApic::default();
        program(&mut apic, 9, 0x8931, 1 << 24);
        let sent = apic.set_pin(9, true).unwrap();
        assert!(sent.level);
        assert_eq!(sent.delivery, Delivery::LowestPriority);
        assert_eq!(sent.destination, Destination::Logical(1));
        assert_ne!(u64::from(read(&mut apic, 0x10 + 18)) & REMOTE_IRR, 0);
        assert_eq!(apic.set_pin(9, true), None);
        let mut out = Vec::new();
        apic.end_of_interrupt(0x30, &mut out);
        assert!(out.is_empty());
        apic.end_of_interrupt(0x31, &mut out);
        assert_eq!(out, [(9, sent)]);
        apic.set_pin(9, false);
        out.clear();
        // The EOI register does the same.
        apic.write(0x40, 0x31, &mut out);
        assert!(out.is_empty());
        assert_eq!(u64::from(read(&mut apic, 0x10 + 18)) & REMOTE_IRR, 0);
    }

    #[test]
    fn a_level_that_nobody_took_is_sent_again_without_an_eoi() {
        let mut apic = IoApic::default();
        program(&mut apic, 9, 0x8031, 7 << 24);
        let lost = apic.set_pin(9, true).unwrap();
        apic.not_taken(9, &lost);
        assert_eq!(apic.set_pin(9, true), Some(lost));
        // The guest sends it elsewhere before that is known.
        let sent = program(&mut apic, 9, 0x8031, 1 << 24);
        assert!(sent.is_empty());
        apic.not_taken(9, &lost);
        assert_eq!(apic.set_pin(9, true), None);
        apic.not_taken(99, &lost);
    }

    #[test]
    fn masked_pins_wait_if_level_and_are_lost_if_edge() {
        let mut apic = IoApic::default();
        program(&mut apic, 5, 0x1_8055, 0);
        program(&mut apic, 6, 0x1_0056, 0);
        assert_eq!(apic.set_pin(5, true), None);
        assert_eq!(apic.set_pin(6, true), None);
        assert_eq!(program(&mut apic, 5, 0x8055, 0).len(), 1);
        assert!(program(&mut apic, 6, 0x56, 0).is_empty());
    }

    #[test]
    fn an_entry_made_an_edge_loses_its_remote_irr() {
        let mut apic = IoApic::default();
        program(&mut apic, 7, 0x8057, 0);
        assert!(apic.set_pin(7, true).is_some());
        program(&mut apic, 7, 0x1_0057, 0);
        assert_eq!(read(&mut apic, 0x10 + 14), 0x1_0057);
    }

    #[test]
    fn identity_version_and_nonsense() {
        let mut apic = IoApic::default();
        apic.write(0, 0, &mut Vec::new());
        apic.write(0x10, 0xffff_ffff, &mut Vec::new());
        assert_eq!(read(&mut apic, 0), 0x0f00_0000);
        assert_eq!(read(&mut apic, 1), 0x0017_0020);
        assert_eq!(read(&mut apic, 0xff), 0);
        assert_eq!(apic.set_pin(99, true), None);
        // A reserved delivery mode sends nothing.
        program(&mut apic, 1, 0x342, 0);
        assert_eq!(apic.set_pin(1, true), None);
    }

    #[test]
    fn its_state_survives_as_text() {
        let mut apic = IoApic::default();
        program(&mut apic, 9, 0x8031, 1 << 24);
        apic.set_pin(9, true);
        let text = serde_json::to_string(&apic.save()).unwrap();
        let mut other = IoApic::default();
        other.restore(serde_json::from_str(&text).unwrap());
        let mut out = Vec::new();
        other.end_of_interrupt(0x31, &mut out);
        assert_eq!(out.len(), 1);
    }
}
