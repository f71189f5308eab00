//! A machine: its parts put together, and its life.
//!
//! | file | holds |
//! | --- | --- |
//! | `configuration` | what is asked for |
//! | `placement` | which slice gives what |
//! | `back_end` | who runs the vCPUs, and why |
//! | `guest` | what is in memory at the start |
//! | `assembly` | all parts, connected |
//! | `pci_devices` | the devices among them that a configuration asks for |
//! | `lifecycle` | stages, requests, answers, ends |
//! | `owner` | the thread that takes requests |
//! | `handle` | how others ask |
//! | `ender` | how the end comes about |

mod assembly;
mod back_end;
mod configuration;
mod ender;
mod guest;
mod handle;
mod lifecycle;
mod owner;
mod pci_devices;
mod placement;
mod state;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use thiserror::Error;
use weft_soft::CpuState;

pub use configuration::{BackEndChoice, CPUS_MAX, Configuration, Disk, Forward, Invalid, Network};
pub use handle::{ANSWER_SECONDS_MAX, Handle};
pub use lifecycle::{Answer, Counters, End, Refusal, Request, Stage, Status, VcpuStage};
pub use placement::{
    BOOTSTRAP_MEMORY_MIN, MEMORY_STEP, Placement, PlacementError, SLICE_MEMORY_MIN, SLICES_MAX,
    Share, deal_cpus, deal_memory,
};
pub use state::MachineState;

use crate::confine::{self, ThreadKind};
use crate::join::join_until;
use crate::memory::Ram;
use crate::virtio::console::ConsoleOutput;
use assembly::{Assembled, Plan};
use ender::Input;

/// Longest that the end of a machine is waited for when it is dropped: its vCPUs
/// and devices have bounds of their own, which are shorter together.
const END_WAIT: Duration = Duration::from_secs(30);

/// Where a machine's output goes. Both are called on threads of the machine and
/// must not block for long.
pub struct Outside {
    /// The serial port's.
    pub serial: Box<dyn Write + Send>,
    /// The virtio console's, if there is one.
    pub console: Option<Box<dyn ConsoleOutput>>,
}

/// Why there is no machine.
#[derive(Debug, Error)]
pub enum MachineError {
    /// The configuration asks for what cannot be.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// No memory for the guest.
    #[error(transparent)]
    Memory(#[from] crate::memory::MemoryError),
    /// No kernel, or not one that can be started.
    #[error(transparent)]
    Boot(#[from] crate::boot::BootError),
    /// No tables.
    #[error(transparent)]
    Acpi(#[from] crate::acpi::AcpiError),
    /// The back end that is asked for cannot be used.
    #[error(transparent)]
    Unusable(#[from] crate::vcpu::kvm::detect::Unusable),
    /// KVM cannot run this machine.
    #[error("KVM cannot run this machine")]
    Kvm(#[source] crate::vcpu::kvm::KvmError),
    /// A vCPU could not be made.
    #[error("cannot make a vCPU")]
    Vcpu(#[from] crate::vcpu::VcpuError),
    /// A vCPU could not be started.
    #[error(transparent)]
    Runner(#[from] crate::vcpu::runner::RunnerError),
    /// Two devices want the same addresses.
    #[error(transparent)]
    Overlap(#[from] crate::bus::Overlap),
    /// The I/O APIC has no such input.
    #[error("the I/O APIC has no input {0}")]
    Pin(usize),
    /// The PCI bus could not be made.
    #[error(transparent)]
    Pci(#[from] crate::pci::PciError),
    /// A virtio device could not be made.
    #[error(transparent)]
    Virtio(#[from] crate::virtio::VirtioError),
    /// A disk cannot be had.
    #[error(transparent)]
    Disk(#[from] crate::virtio::block::BlockError),
    /// No network.
    #[error(transparent)]
    Network(#[from] crate::virtio::net::NetError),
    /// The virtio console could not be made.
    #[error("no event descriptor for the console")]
    Console(#[source] std::io::Error),
    /// A thread could not be started.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// No randomness for the guest.
    #[error("cannot read /dev/urandom")]
    Seed(#[source] std::io::Error),
}

/// A virtual machine. Dropped, it is stopped first.
pub struct Machine {
    handle: Handle,
    ram: Ram,
    back_end: &'static str,
    notes: Vec<String>,
    thread: Option<JoinHandle<()>>,
}

impl Machine {
    /// Opens everything and puts it together: all files are open and all threads
    /// started then, so that privileges may be given up. No guest instruction is
    /// executed before [`Request::Run`].
    pub fn new(configuration: &Configuration, outside: Outside) -> Result<Self, MachineError> {
        configuration.validate()?;
        let files = guest::Files::open(configuration)?;
        let ram = Ram::new(configuration.memory_bytes)?;
        let chosen = back_end::choose(configuration, &ram)?;
        let guest = files.load(configuration, &ram, chosen.back_end.command_line())?;
        drop(files);
        Self::start(
            configuration,
            outside,
            ram,
            chosen,
            guest.bootstrap,
            guest.notes,
        )
    }

    /// The same around RAM that exists, for [`Request::Restore`]: nothing is
    /// loaded into it.
    pub fn adopt(
        configuration: &Configuration,
        outside: Outside,
        ram: Ram,
    ) -> Result<Self, MachineError> {
        configuration.validate()?;
        if ram.size() != configuration.memory_bytes {
            return Err(Invalid::Memory(configuration.memory_bytes).into());
        }
        let chosen = back_end::choose(configuration, &ram)?;
        Self::start(
            configuration,
            outside,
            ram,
            chosen,
            CpuState::reset(),
            Vec::new(),
        )
    }

    fn start(
        configuration: &Configuration,
        outside: Outside,
        ram: Ram,
        chosen: back_end::Chosen,
        bootstrap: CpuState,
        mut notes: Vec<String>,
    ) -> Result<Self, MachineError> {
        crate::clock::sharpen_sleep();
        notes.splice(0..0, chosen.notes());
        let back_end = chosen.back_end.name();
        let Assembled { owner, handle } = assembly::assemble(Plan {
            configuration,
            outside,
            ram: ram.clone(),
            chosen,
            bootstrap,
        })?;
        let thread = confine::spawn("weft-machine", ThreadKind::Main, move || owner.run())
            .map_err(MachineError::Thread)?;
        Ok(Self {
            handle,
            ram,
            back_end,
            notes,
            thread: Some(thread),
        })
    }

    /// For other threads.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// The guest's memory.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// `kvm` or `soft`.
    pub fn back_end(&self) -> &'static str {
        self.back_end
    }

    /// What a log should say: the back end and why, what was booted.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Stops the machine if it runs, and waits until all its threads are over.
    /// How it ended.
    pub fn finish(mut self) -> Option<End> {
        self.take_down();
        self.handle.wait(Duration::ZERO)
    }

    fn take_down(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        // The queue is bounded and its reader never stops reading, so there is
        // room soon; a reader that is gone needs no word.
        let _ = self.handle.owner.send(Input::Quit);
        // One that does not end in time goes with the process.
        join_until(thread, Instant::now() + END_WAIT);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.take_down();
    }
}
