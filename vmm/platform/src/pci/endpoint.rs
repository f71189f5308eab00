//! The endpoint that every PCI function has: configuration registers, memory windows on the
//! bus, MSI-X and an INTx pin.

use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use super::PciError;
use super::configuration::{
    COMMAND, COMMAND_INTX_DISABLE, COMMAND_MEMORY, Configuration, ConfigurationState, Identity,
};
use super::msix::{self, Msix, MsixState};
use super::root::Slot;
use crate::bus::BusDevice;
use weft_confine::lock;

/// MSI-X capability (PCI Local Bus 3.0, 6.8.2).
const CAPABILITY_MSIX: u8 = 0x11;
const COMMAND_AT_START: u16 = COMMAND_MEMORY | 1 << 2;

/// A memory window: a BAR.
#[derive(Clone, Copy, Debug)]
pub struct Bar {
    /// The index of its base address register; a 64-bit one takes the next, too.
    pub index: u8,
    /// Bytes: a power of two, 4096 at least.
    pub size: u64,
    /// Whether its address has 64 bits.
    pub wide: bool,
}

/// The arguments of [`Endpoint::new`].
#[derive(Clone, Debug)]
pub struct EndpointOptions {
    pub identity: Identity,
    /// The function's windows, without that of MSI-X.
    pub bars: Vec<Bar>,
    /// MSI-X vectors.
    pub vectors: u16,
    /// The 32-bit BAR of the MSI-X table.
    pub msix_bar: u8,
}

/// A window, and its place on the bus.
struct Window {
    bar: Bar,
    device: Option<Arc<dyn BusDevice>>,
    /// The address at which it is on the bus now.
    mapped: Option<u64>,
}

struct Registers {
    configuration: Configuration,
    windows: Vec<Window>,
    msix_control: u16,
    /// Whether the device asserts INTx.
    intx: bool,
}

/// Registers, windows and interrupts of one function.
pub struct Endpoint {
    slot: Slot,
    msix: Arc<Msix>,
    /// Never locked while a device is called.
    registers: Mutex<Registers>,
}

/// Everything, saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointState {
    configuration: ConfigurationState,
    msix: MsixState,
    intx: bool,
}

impl Endpoint {
    /// The endpoint of a function in `slot`, with addresses assigned to its windows.
    pub fn new(slot: Slot, options: &EndpointOptions) -> Result<Self, PciError> {
        let mut configuration = Configuration::new(&options.identity);
        configuration.set_interrupt(super::pin_of_slot(slot.number()));
        let vectors = options.vectors.clamp(1, msix::VECTORS_MAX);
        let msix = Arc::new(Msix::new(vectors, slot.sink()));
        let mut bars = options.bars.clone();
        bars.push(Bar {
            index: options.msix_bar,
            size: msix::BAR_SIZE,
            wide: false,
        });
        let mut windows = Vec::new();
        for bar in bars {
            let assigned = slot.assign(bar.size)?;
            configuration.set_bar(bar.index, bar.size, bar.wide, assigned);
            windows.push(Window {
                bar,
                device: (bar.index == options.msix_bar).then(|| msix.clone() as Arc<_>),
                mapped: None,
            });
        }
        let mut body = [0; 10];
        body[..2].copy_from_slice(&(vectors - 1).to_le_bytes());
        body[2..6].copy_from_slice(&u32::from(options.msix_bar).to_le_bytes());
        let pending = msix::PENDING | u32::from(options.msix_bar);
        body[6..].copy_from_slice(&pending.to_le_bytes());
        let capability = configuration
            .add_capability(CAPABILITY_MSIX, &body, &[0, 0xc0])
            .ok_or(PciError::State("no room for a capability"))?;
        configuration.write(COMMAND as u16, &COMMAND_AT_START.to_le_bytes());
        Ok(Self {
            slot,
            msix,
            registers: Mutex::new(Registers {
                configuration,
                windows,
                msix_control: u16::from(capability) + 2,
                intx: false,
            }),
        })
    }

    /// Sets the device in the window of the BAR at `index`, and puts it on the bus.
    pub fn connect(&self, index: u8, device: Arc<dyn BusDevice>) {
        let mut registers = lock(&self.registers);
        for window in &mut registers.windows {
            if window.bar.index == index {
                window.device = Some(device.clone());
            }
        }
        self.place(&mut registers);
    }

    /// Removes all windows from the bus, permanently.
    pub fn disconnect(&self) {
        let mut registers = lock(&self.registers);
        for window in &mut registers.windows {
            self.take_off(window);
            window.device = None;
        }
        registers.intx = false;
        self.pull(&mut registers);
    }

    /// Appends a capability; returns its offset.
    pub fn add_capability(&self, id: u8, body: &[u8], writable: &[u8]) -> Result<u8, PciError> {
        lock(&self.registers)
            .configuration
            .add_capability(id, body, writable)
            .ok_or(PciError::State("no room for a capability"))
    }

    /// Reads registers.
    pub fn read(&self, register: u16, data: &mut [u8]) {
        lock(&self.registers).configuration.read(register, data);
    }

    /// Writes registers, and applies the effects.
    pub fn write(&self, register: u16, data: &[u8]) {
        let mut registers = lock(&self.registers);
        registers.configuration.write(register, data);
        self.place(&mut registers);
        self.pull(&mut registers);
        // Under the lock: what the table hears last is what the register says.
        self.msix.control(registers.msix_control());
    }

    /// Whether MSI-X is enabled, so that INTx is not used.
    pub fn messages(&self) -> bool {
        self.msix.enabled()
    }

    /// Sends the message of a vector.
    pub fn signal(&self, vector: u16) {
        self.msix.signal(vector);
    }

    /// Address and data of a vector's message, if a signal would send it at once.
    pub fn message(&self, vector: u16) -> Option<(u64, u32)> {
        self.msix.message(vector)
    }

    /// Sets what is called after each write to the MSI-X table, without a lock. Once.
    pub fn on_message_change(&self, hear: Box<dyn Fn() + Send + Sync>) {
        self.msix.listen(hear);
    }

    /// The address of the BAR at `index`, if it is on the bus.
    pub fn place_of(&self, index: u8) -> Option<u64> {
        let registers = lock(&self.registers);
        let mut windows = registers.windows.iter();
        windows
            .find(|window| window.bar.index == index)
            .and_then(|window| window.mapped)
    }

    /// Asserts or de-asserts INTx.
    pub fn set_intx(&self, asked: bool) {
        let mut registers = lock(&self.registers);
        registers.intx = asked;
        self.pull(&mut registers);
    }

    /// A copy of everything.
    pub fn save(&self) -> EndpointState {
        let registers = lock(&self.registers);
        EndpointState {
            configuration: registers.configuration.save(),
            msix: self.msix.save(),
            intx: registers.intx,
        }
    }

    /// Restores a saved state.
    pub fn restore(&self, state: &EndpointState) -> Result<(), PciError> {
        let mut registers = lock(&self.registers);
        if !registers.configuration.restore(&state.configuration) {
            return Err(PciError::State("another function was in this slot"));
        }
        if !self.msix.restore(&state.msix) {
            return Err(PciError::State("another number of MSI-X vectors"));
        }
        registers.intx = state.intx;
        self.place(&mut registers);
        self.pull(&mut registers);
        Ok(())
    }

    /// Moves windows on the bus to the addresses in the registers. A window outside the host
    /// bridge's windows, or over another, is not on the bus until its function's registers are
    /// written again.
    fn place(&self, registers: &mut Registers) {
        let on = registers.configuration.command() & COMMAND_MEMORY != 0;
        let configuration = &registers.configuration;
        let wanted = |bar: &Bar| {
            let address = configuration.bar(bar.index, bar.wide);
            let range = address..address.saturating_add(bar.size);
            (on && self.slot.windows().holds(&range)).then_some(range)
        };
        // All go before any comes: they may change places.
        for window in &mut registers.windows {
            if window.mapped != wanted(&window.bar).map(|range| range.start) {
                self.take_off(window);
            }
        }
        for window in &mut registers.windows {
            if let (None, Some(range), Some(device)) =
                (window.mapped, wanted(&window.bar), &window.device)
            {
                let start = range.start;
                let inserted = self.slot.bus().insert(range, device.clone());
                window.mapped = inserted.is_ok().then_some(start);
            }
        }
    }

    fn take_off(&self, window: &mut Window) {
        if let Some(address) = window.mapped.take() {
            self.slot.bus().remove(address);
        }
    }

    fn pull(&self, registers: &mut Registers) {
        let asked = registers.intx;
        registers.configuration.set_interrupt_status(asked);
        let disabled = registers.configuration.command() & COMMAND_INTX_DISABLE != 0;
        self.slot.set_pin(asked && !disabled);
    }
}

impl Registers {
    fn msix_control(&self) -> u16 {
        let mut control = [0; 2];
        self.configuration.read(self.msix_control, &mut control);
        u16::from_le_bytes(control)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use weft_guest_memory::FOUR_GIB;

    use super::*;
    use crate::bus::Bus;
    use crate::interrupts::{InterruptLine, MessageSink};
    use crate::pci::{Root, RootOptions, Windows};

    /// Nobody hears.
    struct Deaf;

    impl InterruptLine for Deaf {
        fn set(&self, _: bool) {}
    }

    impl MessageSink for Deaf {
        fn send(&self, _: u64, _: u32) {}
    }

    /// An empty bus.
    fn root() -> Root {
        Root::new(RootOptions {
            mmio: Bus::default(),
            ports: Bus::default(),
            lines: std::array::from_fn(|_| Arc::new(Deaf) as Arc<dyn InterruptLine>),
            sink: Arc::new(Deaf),
            windows: Windows::new(FOUR_GIB..FOUR_GIB + (16 << 30)),
            on_reset: None,
        })
        .unwrap()
    }

    #[test]
    fn messages_are_on_exactly_when_the_register_says_so() {
        let options = EndpointOptions {
            identity: Identity {
                vendor: 0x1af4,
                device: 0x1041,
                class: 0x02_00_00,
                revision: 1,
                subsystem_vendor: 0x1af4,
                subsystem: 0x40,
            },
            bars: Vec::new(),
            vectors: 1,
            msix_bar: 2,
        };
        let root = root();
        let endpoint = Endpoint::new(root.reserve().unwrap(), &options).unwrap();
        let control = lock(&endpoint.registers).msix_control;
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (done, endpoint) = (&done, &endpoint);
            for value in [0_u16, 0x8000] {
                scope.spawn(move || {
                    while !done.load(Ordering::Relaxed) {
                        endpoint.write(control, &value.to_le_bytes());
                    }
                });
            }
            let end = Instant::now() + Duration::from_millis(200);
            let mut apart = false;
            while !apart && Instant::now() < end {
                let registers = lock(&endpoint.registers);
                apart = endpoint.messages() != (registers.msix_control() & 0x8000 != 0);
            }
            done.store(true, Ordering::Relaxed);
            assert!(!apart);
        });
    }
}
