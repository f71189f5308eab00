//! The PCI bus and the virtio devices of a configuration.

use std::sync::Arc;

use weft_aggregate::Slice;
use weft_aggregate::remote_devices::PartitionedDevice;
use weft_guest_memory::{DEVICE_HOLE, PCI_WINDOW_END, Reclaim, WriteObserver};
use weft_platform::acpi;
use weft_platform::interrupts::InterruptLine;
use weft_platform::pci::{FIRST_PIN, PINS, Root, RootOptions, Windows};
use weft_virtio::balloon::{Balloon, BalloonHandle};
use weft_virtio::console::{Console, ConsoleHandle, ConsoleOutput};
use weft_virtio::rng::Rng;
use weft_virtio::{Attach, Transport, VirtioDevice};

use super::configuration::Configuration;
use super::lifecycle::End;
use super::machine_core::MachineCore;
use super::part::{MachinePart, NamedPart};
use super::{MachineError, OpenDisks, OpenSwitches};

/// Makes the PCI devices of a machine.
pub(super) struct PciDevices<'a> {
    pub core: &'a MachineCore,
    pub configuration: &'a Configuration,
    /// Open files of disks.
    pub opened: (&'a OpenDisks, &'a OpenSwitches),
    /// Called after devices have written to guest memory.
    pub observer: Option<Arc<dyn WriteObserver>>,
    pub parts: &'a mut Vec<NamedPart>,
    /// `None` if the machine has one slice that stays alone.
    pub slice: Option<&'a Arc<Slice>>,
    /// Devices attached so far; it is the number of the next.
    pub attached: u8,
}

/// The bus, and the outsides of devices on it.
pub(super) struct AttachedDevices {
    pub root: Arc<Root>,
    pub console: Option<ConsoleHandle>,
    pub balloon: Option<BalloonHandle>,
}

impl PciDevices<'_> {
    /// Makes the bus and all devices on it, in the order in which the guest finds
    /// them: disks, networks, console, entropy, balloon.
    pub fn attach(
        mut self,
        console: Option<Box<dyn ConsoleOutput>>,
    ) -> Result<AttachedDevices, MachineError> {
        let root = self.bus()?;
        let configuration = self.configuration;
        self.attach_partitioned(&root)?;
        let mut handle = None;
        if let Some(output) = console.filter(|_| configuration.virtio_console) {
            let (console, typed) = Console::new(output).map_err(MachineError::Console)?;
            self.put(&root, Box::new(console))?;
            handle = Some(typed);
        }
        // Its thread answers at a moment that is not repeated; a deterministic guest
        // has its randomness from the boot protocol.
        if !configuration.deterministic {
            self.put(&root, Box::new(Rng::new(None)))?;
        }
        let balloon = configuration.balloon.then(|| self.balloon(&root));
        Ok(AttachedDevices {
            root,
            console: handle,
            balloon: balloon.transpose()?,
        })
    }

    /// Attaches disks and networks, which several slices may serve.
    fn attach_partitioned(&mut self, root: &Root) -> Result<(), MachineError> {
        let devices = self.configuration.devices();
        let Some(slice) = self.slice else {
            for block in devices.open_disks(self.opened.0)? {
                self.put(root, Box::new(block))?;
            }
            for net in devices.open_networks(self.opened.1)? {
                self.put(root, Box::new(net))?;
            }
            return Ok(());
        };
        let all = devices.of_slice(slice, self.opened)?;
        for (number, (placement, device)) in (0..).zip(all) {
            let remote = slice.remote_devices().clone();
            let device = PartitionedDevice::new(device, number, placement.groups(), remote);
            self.put(root, Box::new(device.map_err(MachineError::RemoteDevices)?))?;
        }
        Ok(())
    }

    fn balloon(&mut self, root: &Root) -> Result<BalloonHandle, MachineError> {
        let memory: Arc<dyn Reclaim> = match self.slice {
            Some(slice) => slice.clone(),
            None => Arc::new(self.core.ram.clone()),
        };
        let (balloon, handle) = Balloon::new(memory).map_err(MachineError::Balloon)?;
        self.put(root, Box::new(balloon))?;
        Ok(handle)
    }

    fn bus(&mut self) -> Result<Arc<Root>, MachineError> {
        let core = self.core;
        let shutdown = core.shutdown.clone();
        let mut lines: Vec<Arc<dyn InterruptLine>> = Vec::new();
        for wire in 0..PINS {
            lines.push(Arc::new(core.pin((FIRST_PIN + wire) as usize)?));
        }
        let lines = lines
            .try_into()
            .map_err(|_| MachineError::Pin(FIRST_PIN as usize))?;
        let root = Arc::new(Root::new(RootOptions {
            mmio: core.mmio.clone(),
            ports: core.ports.clone(),
            lines,
            sink: core.interrupts.clone(),
            windows: Windows {
                low: DEVICE_HOLE..PCI_WINDOW_END,
                high: acpi::high_window(&core.ram),
            },
            on_reset: Some(Arc::new(move || shutdown.end(End::Reset))),
        })?);
        self.parts
            .push(("pci".into(), MachinePart::Pci(root.clone())));
        Ok(root)
    }

    fn put(&mut self, root: &Root, device: Box<dyn VirtioDevice>) -> Result<(), MachineError> {
        let number = self.attached;
        self.attached += 1;
        let remote = self.slice.map(|slice| slice.remote_devices());
        let attach = Attach {
            memory: self.core.memory.clone(),
            observer: self.observer.clone(),
            route_observer: remote.map(|remote| remote.route_publisher(number)),
        };
        let transport = Transport::attach(root, &attach, device)?;
        if let Some(remote) = remote {
            remote.add_transport(number, &transport);
        }
        let name = transport.name().to_owned();
        self.parts.push((name, MachinePart::Virtio(transport)));
        Ok(())
    }
}
