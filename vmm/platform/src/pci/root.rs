//! The host bridge, and the two ways to configuration space: ECAM and the
//! ports 0xcf8 and 0xcfc.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use serde::{Deserialize, Serialize};
use weft_guest_memory::ECAM;

use super::configuration::{Configuration, Identity};
use super::{Function, PINS, PciError, Pin, SLOTS, Windows};
use crate::bus::{Bus, BusDevice};
use crate::interrupts::{InterruptLine, MessageSink};
use crate::part::{Part, PartError, Persist, Version};
use weft_confine::lock;

/// Bytes of ECAM: one bus.
const ECAM_SIZE: u64 = 1 << 20;
const PORTS: std::ops::Range<u64> = 0xcf8..0xd00;
/// Offset of the data port from the address port.
const DATA: u64 = 4;
/// Offset of the reset control register: port 0xcf9.
const RESET_CONTROL: u64 = 1;
/// Reset control: reset the processor now.
const RESET_NOW: u8 = 1 << 2;
const ADDRESS_ENABLE: u32 = 1 << 31;
/// Host bridge: the device number that QEMU's GPEX has, with Red Hat's vendor
/// number, so that guests apply no quirks of real chipsets.
const HOST_BRIDGE: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0008,
    class: 0x06_00_00,
    revision: 0,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
};

/// What the bus is attached to.
#[derive(Clone)]
pub struct RootOptions {
    /// Memory-mapped registers: ECAM and the BARs go here.
    pub mmio: Bus,
    pub ports: Bus,
    /// Inputs [`super::FIRST_PIN`] and up of the I/O APIC.
    pub lines: [Arc<dyn InterruptLine>; PINS as usize],
    /// Takes the messages.
    pub sink: Arc<dyn MessageSink>,
    /// Where BARs may be.
    pub windows: Windows,
    /// What a write to the reset control register (port 0xcf9) does.
    pub on_reset: Option<Arc<dyn Fn() + Send + Sync>>,
}

/// The bus. Keeps every function of it; give it up with [`Root::clear`].
pub struct Root {
    shared: Arc<Shared>,
}

struct Shared {
    options: RootOptions,
    pins: Vec<Arc<Pin>>,
    /// Released before a function is called.
    slots: RwLock<[Option<Arc<dyn Function>>; SLOTS as usize]>,
    /// Next slot, and next free address below 4 GiB. Never held across a call.
    free: Mutex<(u8, u64)>,
    bridge: Mutex<Configuration>,
    /// What was written to port 0xcf8.
    address: Mutex<u32>,
}

/// A place on the bus, for one function.
pub struct Slot {
    number: u8,
    shared: Arc<Shared>,
}

/// Saved state of the bus itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RootState {
    version: Version<1>,
    address: u32,
    bridge: super::configuration::ConfigurationState,
}

impl Root {
    /// An empty bus that answers at once.
    pub fn new(options: RootOptions) -> Result<Self, PciError> {
        let pins = options.lines.iter().cloned().map(Pin::new).map(Arc::new);
        let shared = Arc::new(Shared {
            pins: pins.collect(),
            slots: RwLock::default(),
            free: Mutex::new((1, options.windows.low.start)),
            bridge: Mutex::new(Configuration::new(&HOST_BRIDGE)),
            address: Mutex::new(0),
            options,
        });
        let Shared { options, .. } = &*shared;
        let ecam = Arc::new(Ecam(shared.clone()));
        options.mmio.insert(ECAM..ECAM + ECAM_SIZE, ecam)?;
        options
            .ports
            .insert(PORTS, Arc::new(Ports(shared.clone())))?;
        Ok(Self { shared })
    }

    /// The next free slot.
    pub fn reserve(&self) -> Result<Slot, PciError> {
        let mut free = lock(&self.shared.free);
        let number = free.0;
        if number >= SLOTS {
            return Err(PciError::NoSlot);
        }
        free.0 += 1;
        Ok(Slot {
            number,
            shared: self.shared.clone(),
        })
    }

    /// Lets `function` answer in the slot `number` that was reserved for it.
    pub fn insert(&self, number: u8, function: Arc<dyn Function>) -> Result<(), PciError> {
        let mut slots = self.shared.slots.write();
        let slots = slots.as_mut().unwrap_or_else(|poison| poison.get_mut());
        match slots.get_mut(usize::from(number)) {
            Some(slot @ None) => *slot = Some(function),
            _ => return Err(PciError::NoSlot),
        }
        Ok(())
    }

    /// Takes the bus's own registers away, and lets go of all functions.
    pub fn clear(&self) {
        let slots = self.shared.slots.write();
        *slots.unwrap_or_else(PoisonError::into_inner) = Default::default();
        self.shared.options.mmio.remove(ECAM);
        self.shared.options.ports.remove(PORTS.start);
    }

    /// The bus's own state; functions save theirs.
    pub fn save(&self) -> RootState {
        RootState {
            version: Version,
            address: *lock(&self.shared.address),
            bridge: lock(&self.shared.bridge).save(),
        }
    }

    /// Becomes `state`.
    pub fn restore(&self, state: &RootState) -> Result<(), PciError> {
        if !lock(&self.shared.bridge).restore(&state.bridge) {
            return Err(PciError::State("another host bridge"));
        }
        *lock(&self.shared.address) = state.address;
        Ok(())
    }
}

impl Part for Root {}

impl Persist for Root {
    type State = RootState;

    fn save(&self) -> Result<RootState, PartError> {
        Ok(Root::save(self))
    }

    fn restore(&self, state: &RootState) -> Result<(), PartError> {
        Root::restore(self, state).map_err(|error| PartError::Misfit(error.to_string()))
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Slot {
    pub fn number(&self) -> u8 {
        self.number
    }

    pub(super) fn bus(&self) -> &Bus {
        &self.shared.options.mmio
    }

    pub(super) fn windows(&self) -> &Windows {
        &self.shared.options.windows
    }

    pub(super) fn sink(&self) -> Arc<dyn MessageSink> {
        self.shared.options.sink.clone()
    }

    /// An address of its own for a window of `size` bytes.
    pub(super) fn assign(&self, size: u64) -> Result<u64, PciError> {
        let mut free = lock(&self.shared.free);
        let address = free.1.next_multiple_of(size);
        let end = address.checked_add(size).ok_or(PciError::NoAddress(size))?;
        if end > self.windows().low.end {
            return Err(PciError::NoAddress(size));
        }
        free.1 = end;
        Ok(address)
    }

    pub(super) fn set_pin(&self, high: bool) {
        let pin = usize::from(self.number) % PINS as usize;
        if let Some(pin) = self.shared.pins.get(pin) {
            pin.set(self.number, high);
        }
    }
}

impl Shared {
    fn function(&self, slot: usize) -> Option<Arc<dyn Function>> {
        let slots = self.slots.read();
        let slots = slots.unwrap_or_else(PoisonError::into_inner);
        slots.get(slot).cloned().flatten()
    }

    /// Ones where nobody is.
    fn read(&self, slot: usize, function: u32, register: u16, data: &mut [u8]) {
        match (slot, function, self.function(slot)) {
            (0, 0, _) => lock(&self.bridge).read(register, data),
            (_, 0, Some(function)) => function.read(register, data),
            _ => data.fill(0xff),
        }
    }

    fn write(&self, slot: usize, function: u32, register: u16, data: &[u8]) {
        match (slot, function, self.function(slot)) {
            (0, 0, _) => lock(&self.bridge).write(register, data),
            (_, 0, Some(function)) => function.write(register, data),
            _ => {}
        }
    }
}

/// Slot, function and register of an offset into ECAM.
fn ecam_parts(offset: u64) -> (usize, u32, u16) {
    (
        (offset >> 15) as usize & 31,
        (offset >> 12) as u32 & 7,
        offset as u16 & 0xfff,
    )
}

struct Ecam(Arc<Shared>);

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if !offset.is_multiple_of(data.len().max(1) as u64) {
            return data.fill(0xff);
        }
        for (at, part) in (offset..).step_by(4).zip(data.chunks_mut(4)) {
            let (slot, function, register) = ecam_parts(at);
            self.0.read(slot, function, register, part);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if !offset.is_multiple_of(data.len().max(1) as u64) {
            return;
        }
        for (at, part) in (offset..).step_by(4).zip(data.chunks(4)) {
            let (slot, function, register) = ecam_parts(at);
            self.0.write(slot, function, register, part);
        }
    }
}

/// Configuration mechanism #1 (PCI Local Bus 3.0, 3.2.2.3.2), and between its
/// ports the reset control register.
struct Ports(Arc<Shared>);

impl Ports {
    /// What an access at `offset` into the data port of `length` bytes means.
    fn target(&self, offset: u64, length: usize) -> Option<(usize, u32, u16)> {
        let address = *lock(&self.0.address);
        let bus = address >> 16 & 0xff;
        let within = (offset - DATA) as u16;
        let inside = usize::from(within) + length <= 4;
        (address & ADDRESS_ENABLE != 0 && bus == 0 && inside).then_some((
            (address >> 11) as usize & 31,
            address >> 8 & 7,
            (address as u16 & 0xfc) + within,
        ))
    }
}

impl BusDevice for Ports {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if offset >= DATA {
            match self.target(offset, data.len()) {
                Some((slot, function, register)) => self.0.read(slot, function, register, data),
                None => data.fill(0xff),
            }
        } else if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&lock(&self.0.address).to_le_bytes());
        } else {
            data.fill(if offset == RESET_CONTROL { 0 } else { 0xff });
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset >= DATA {
            if let Some((slot, function, register)) = self.target(offset, data.len()) {
                self.0.write(slot, function, register, data);
            }
        } else if offset == 0
            && let Ok(word) = <[u8; 4]>::try_from(data)
        {
            *lock(&self.0.address) = u32::from_le_bytes(word) & !0x7f00_0003;
        } else if let (RESET_CONTROL, [value], Some(reset)) =
            (offset, data, &self.0.options.on_reset)
            && value & RESET_NOW != 0
        {
            reset();
        }
    }
}
