//! The configuration registers of a type 0 function, and which of their bits a guest may
//! change (PCI Local Bus 3.0, 6.1 to 6.7).

use serde::{Deserialize, Serialize};

/// Bytes of conventional configuration space; the rest up to 4096 reads zero.
pub const SIZE: usize = 256;
/// Command register.
pub const COMMAND: usize = 0x04;
/// Command: memory decoding is on.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command: INTx is disabled.
pub const COMMAND_INTX_DISABLE: u16 = 1 << 10;
/// Memory space, bus master, SERR#, interrupt disable.
const COMMAND_WRITABLE: u16 = COMMAND_MEMORY | 1 << 2 | 1 << 8 | COMMAND_INTX_DISABLE;
const STATUS: usize = 0x06;
const STATUS_INTERRUPT: u8 = 1 << 3;
const STATUS_CAPABILITIES: u8 = 1 << 4;
/// First base address register.
pub const BARS: usize = 0x10;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const INTERRUPT_PIN: usize = 0x3d;
const FIRST_CAPABILITY: usize = 0x40;

/// The identity that a function reports.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    pub vendor: u16,
    pub device: u16,
    /// Class, subclass, programming interface: 24 bits.
    pub class: u32,
    pub revision: u8,
    pub subsystem_vendor: u16,
    pub subsystem: u16,
}

/// The bytes of the registers, and a mask of the bits that a guest may change.
pub struct Configuration {
    bytes: [u8; SIZE],
    writable: [u8; SIZE],
    next_capability: usize,
    last_link: usize,
}

impl Configuration {
    /// A type 0 header without BARs and capabilities.
    pub fn new(identity: &Identity) -> Self {
        let mut this = Self {
            bytes: [0; SIZE],
            writable: [0; SIZE],
            next_capability: FIRST_CAPABILITY,
            last_link: CAPABILITIES,
        };
        this.put(0x00, &identity.vendor.to_le_bytes());
        this.put(0x02, &identity.device.to_le_bytes());
        this.put(0x08, &(identity.class << 8).to_le_bytes());
        this.put(0x08, &[identity.revision]);
        this.put(0x2c, &identity.subsystem_vendor.to_le_bytes());
        this.put(0x2e, &identity.subsystem.to_le_bytes());
        this.allow(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        // Cache line size and latency timer are scratch.
        this.allow(0x0c, &[0xff, 0xff]);
        this
    }

    /// INTA, routed to `pin` of the I/O APIC.
    pub fn set_interrupt(&mut self, pin: u32) {
        self.put(INTERRUPT_LINE, &[pin as u8]);
        self.allow(INTERRUPT_LINE, &[0xff]);
        self.put(INTERRUPT_PIN, &[1]);
    }

    /// Appends a capability whose registers after the link are `body`, with
    /// the bits of `writable` changeable. Its offset; `None` when it is full.
    pub fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> Option<u8> {
        let at = self.next_capability;
        let end = at + 2 + body.len();
        if end > SIZE || writable.len() > body.len() {
            return None;
        }
        self.put(self.last_link, &[at as u8]);
        self.put(at, &[id, 0]);
        self.put(at + 2, body);
        self.allow(at + 2, writable);
        self.bytes[STATUS] |= STATUS_CAPABILITIES;
        self.last_link = at + 1;
        self.next_capability = end.next_multiple_of(4);
        Some(at as u8)
    }

    /// Makes the BAR at `index` one of `size` bytes (a power of two), at `address`.
    pub fn set_bar(&mut self, index: u8, size: u64, wide: bool, address: u64) {
        let at = BARS + 4 * usize::from(index);
        let mask = !(size - 1) & !0xf;
        let kind = if wide { 0b100 } else { 0 };
        if wide {
            self.put(at, &(address | kind).to_le_bytes());
            self.allow(at, &mask.to_le_bytes());
        } else {
            self.put(at, &(address as u32 | kind as u32).to_le_bytes());
            self.allow(at, &(mask as u32).to_le_bytes());
        }
    }

    /// The address in the BAR at an index.
    pub fn bar(&self, index: u8, wide: bool) -> u64 {
        let at = BARS + 4 * usize::from(index);
        let low = u64::from(self.word(at)) & !0xf;
        let high = if wide { self.word(at + 4) } else { 0 };
        low | u64::from(high) << 32
    }

    /// The command register.
    pub fn command(&self) -> u16 {
        u16::from_le_bytes([self.bytes[COMMAND], self.bytes[COMMAND + 1]])
    }

    /// Sets the interrupt status bit of the status register.
    pub fn set_interrupt_status(&mut self, asked: bool) {
        self.bytes[STATUS] &= !STATUS_INTERRUPT;
        if asked {
            self.bytes[STATUS] |= STATUS_INTERRUPT;
        }
    }

    /// Reads registers; zero beyond the end.
    pub fn read(&self, register: u16, data: &mut [u8]) {
        for (at, byte) in (usize::from(register)..).zip(data) {
            *byte = self.bytes.get(at).copied().unwrap_or(0);
        }
    }

    /// Writes the changeable bits of registers.
    pub fn write(&mut self, register: u16, data: &[u8]) {
        for (at, byte) in (usize::from(register)..).zip(data) {
            if let (Some(old), Some(mask)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *old = *old & !mask | byte & mask;
            }
        }
    }

    /// All bytes.
    pub fn save(&self) -> ConfigurationState {
        ConfigurationState(self.bytes.to_vec())
    }

    /// Restores the changeable bits; `false` if the state is of another function.
    pub fn restore(&mut self, state: &ConfigurationState) -> bool {
        let same = |(at, byte): (usize, &u8)| {
            let fixed = !self.writable[at];
            let fixed = if at == STATUS {
                fixed & !STATUS_INTERRUPT
            } else {
                fixed
            };
            byte & fixed == self.bytes[at] & fixed
        };
        let fits = state.0.len() == SIZE && state.0.iter().enumerate().all(same);
        if fits {
            self.bytes.copy_from_slice(&state.0);
        }
        fits
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|byte| self.bytes[at + byte]))
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn allow(&mut self, at: usize, mask: &[u8]) {
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }
}

/// Saved registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigurationState(Vec<u8>);

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: Identity = Identity {
        vendor: 0x1af4,
        device: 0x1042,
        class: 0x01_80_00,
        revision: 1,
        subsystem_vendor: 0x1af4,
        subsystem: 0x40,
    };

    fn word(configuration: &Configuration, at: u16) -> u32 {
        let mut data = [0; 4];
        configuration.read(at, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn identity_is_fixed_and_a_bar_tells_its_size() {
        let mut configuration = Configuration::new(&IDENTITY);
        configuration.write(0, &[0; 4]);
        assert_eq!(word(&configuration, 0), 0x1042_1af4);
        assert_eq!(word(&configuration, 8), 0x0180_0001);
        configuration.set_bar(0, 0x4000, true, 0xc000_0000);
        configuration.set_bar(2, 0x1000, false, 0xc000_4000);
        for at in [0x10, 0x14, 0x18, 0x1c] {
            configuration.write(at, &[0xff; 4]);
        }
        assert_eq!(word(&configuration, 0x10), 0xffff_c004);
        assert_eq!(word(&configuration, 0x14), 0xffff_ffff);
        assert_eq!(word(&configuration, 0x18), 0xffff_f000);
        assert_eq!(word(&configuration, 0x1c), 0);
        configuration.write(0x10, &0x8000_0000_u32.to_le_bytes());
        configuration.write(0x14, &0x12_u32.to_le_bytes());
        assert_eq!(configuration.bar(0, true), 0x12_8000_0000);
    }

    #[test]
    fn capabilities_form_a_list_that_ends() {
        let mut configuration = Configuration::new(&IDENTITY);
        assert_eq!(configuration.add_capability(9, &[0; 14], &[]), Some(0x40));
        assert_eq!(
            configuration.add_capability(0x11, &[7; 3], &[0xf0]),
            Some(0x50)
        );
        assert_eq!(word(&configuration, 0x34) & 0xff, 0x40);
        assert_eq!(word(&configuration, 0x40) & 0xffff, 0x5009);
        assert_eq!(word(&configuration, 0x50) & 0xffff, 0x0011);
        configuration.write(0x52, &[0xff, 0xff]);
        assert_eq!(word(&configuration, 0x50) >> 16, 0x07f7);
        assert_eq!(configuration.add_capability(9, &[0; 200], &[]), None);
        // Reads and writes past the end are nothing.
        configuration.write(0xfff, &[1]);
        assert_eq!(word(&configuration, 0x100), 0);
    }
}
