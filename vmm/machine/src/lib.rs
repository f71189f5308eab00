//! A machine: its parts put together, and its life.
//!
//! | file | holds |
//! | --- | --- |
//! | `configuration` | what is asked for |
//! | `back_end` | who runs the vCPUs, and why |
//! | `guest` | what is in memory at the start |
//! | `assembly` | all parts, connected |
//! | `frame` | what the parts are attached to |
//! | `pci_devices` | the devices among them that a configuration asks for |
//! | `lifecycle` | stages, requests, answers, ends |
//! | `owner` | the thread that takes requests |
//! | `handle` | how others ask |
//! | `control_loop` | how a secondary does what the primary says |
//! | `seen` | pages and faults of all slices |
//! | `ender` | how the end comes about |
//! | [`vcpu`] | the vCPUs' threads, and what they meet |

mod assembly;
mod back_end;
mod configuration;
mod control_loop;
mod ender;
mod frame;
mod guest;
mod handle;
mod lifecycle;
mod owner;
mod pci_devices;

mod kernel_parameters;
mod seen;
mod state;
#[cfg(test)]
mod tests;
pub mod vcpu;

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use thiserror::Error;
use weft_aggregate::{Slice, SliceLinks, SliceOptions};
use weft_confine::{ThreadKind, join_until};
use weft_guest_memory::Ram;
use weft_vcpu::CpuState;
use weft_virtio::console::ConsoleOutput;

pub use configuration::{BackEndChoice, Configuration, Invalid};
pub use handle::{ANSWER_SECONDS_MAX, Handle};
pub use lifecycle::{Answer, Counters, End, Refusal, Request, Stage, Status};
pub use state::MachineState;
pub use weft_aggregate::commands::VcpuStage;
pub use weft_aggregate::devices::{DataPath, Disk, Forward, Network, OpenDisks};
pub use weft_aggregate::{
    CPUS_MAX, MEMORY_STEP, PRIMARY_MEMORY_MIN, Placement, PlacementError, SLICE_MEMORY_MIN,
    SLICES_MAX, Share, deal_cpus, deal_memory,
};

pub use back_end::check_host;
pub use weft_vcpu::CpuModel;

use assembly::{Assembled, Plan};
use ender::{Ends, Input};

/// Longest that the end of a machine is waited for when it is dropped: its vCPUs
/// and devices have bounds of their own, which are shorter together.
const END_WAIT: Duration = Duration::from_secs(30);

/// What a machine is given from outside: where its output goes, which is called on
/// threads of the machine and must not block for long, and what is open already.
pub struct Outside {
    /// The serial port's.
    pub serial: Box<dyn Write + Send>,
    /// The virtio console's, if there is one.
    pub console: Option<Box<dyn ConsoleOutput>>,
    /// Files of disks that are open already.
    pub disks: OpenDisks,
}

/// Why there is no machine.
#[derive(Debug, Error)]
pub enum MachineError {
    /// The configuration asks for what cannot be.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// No memory for the guest.
    #[error(transparent)]
    Memory(#[from] weft_guest_memory::MemoryError),
    /// No kernel, or not one that can be started.
    #[error(transparent)]
    Boot(#[from] weft_boot::BootError),
    /// No tables.
    #[error(transparent)]
    Acpi(#[from] weft_platform::acpi::AcpiError),
    /// The back end that is asked for cannot be used.
    #[error(transparent)]
    Unusable(#[from] weft_vcpu_kvm::detect::Unusable),
    /// KVM cannot run this machine.
    #[error("KVM cannot run this machine")]
    Kvm(#[source] weft_vcpu_kvm::KvmError),
    /// The host's CPU is of an older level.
    #[error(
        "guests of --cpu {model} need {missing}, which this host's CPU lacks: choose an older --cpu"
    )]
    CpuModel {
        /// What was asked for, or is the default.
        model: CpuModel,
        /// Names of features, as in `/proc/cpuinfo`.
        missing: String,
    },
    /// KVM vCPUs cannot share their memory here.
    #[error("a machine over several nodes cannot run in KVM here (--backend soft can): {0}")]
    SlicesOnKvm(String),
    /// A slice's memory could not be made of what was loaded.
    #[error("cannot share the loaded memory: {0}")]
    Share(String),
    /// A range to keep up to date is not memory.
    #[error("{:#x}-{:#x} must be kept up to date on all nodes, but is not memory", .0.start, .0.end)]
    Updated(Range<u64>),
    /// A vCPU could not be made.
    #[error("cannot create a vCPU")]
    Vcpu(#[from] weft_vcpu::VcpuError),
    /// A vCPU could not be started.
    #[error(transparent)]
    Runner(#[from] crate::vcpu::runner::RunnerError),
    /// This host's clock cannot follow the primary's.
    #[error(transparent)]
    Rates(#[from] weft_platform::clock::RatesDiffer),
    /// Two devices want the same addresses.
    #[error(transparent)]
    Overlap(#[from] weft_platform::bus::Overlap),
    /// The I/O APIC has no such input.
    #[error("the I/O APIC has no input {0}")]
    Pin(usize),
    /// The PCI bus could not be made.
    #[error(transparent)]
    Pci(#[from] weft_platform::pci::PciError),
    /// A virtio device could not be made.
    #[error(transparent)]
    Virtio(#[from] weft_virtio::VirtioError),
    /// A disk or a network cannot be had.
    #[error(transparent)]
    Device(#[from] weft_aggregate::devices::DeviceSetupError),
    /// The slice could not be joined.
    #[error(transparent)]
    Slice(#[from] weft_aggregate::SliceError),
    /// What serves the devices of several slices could not be made.
    #[error("cannot serve the devices of several nodes")]
    RemoteDevices(#[source] std::io::Error),
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

/// What a machine is started from.
struct Start<'a> {
    configuration: &'a Configuration,
    outside: Outside,
    ram: Ram,
    chosen: back_end::Chosen,
    /// The first CPU at its first instruction, where it is.
    bootstrap: Option<CpuState>,
    notes: Vec<String>,
    updated: Vec<Range<u64>>,
    ends: Ends,
    slice: Option<Arc<Slice>>,
}

/// What is kept up to date lies in memory.
fn check_memory(ram: &Ram, updated: &[Range<u64>]) -> Result<(), MachineError> {
    let parts = ram.parts();
    let is_none = |range: &&Range<u64>| {
        let holds = |(start, length, _): &(u64, u64, _)| {
            *start <= range.start && range.end <= start.saturating_add(*length)
        };
        !parts.iter().any(holds)
    };
    match updated.iter().find(is_none) {
        Some(range) => Err(MachineError::Updated(range.clone())),
        None => Ok(()),
    }
}

/// What was loaded becomes the primary's own.
fn share(ram: &Ram, slice: &Slice) -> Result<(), MachineError> {
    let populated = ram
        .populated()
        .map_err(|error| MachineError::Share(error.to_string()))?;
    for range in populated {
        slice.memory().adopt(range).map_err(MachineError::Share)?;
    }
    Ok(())
}

impl Machine {
    /// Opens everything and puts it together: all files are open and all threads
    /// started then, so that privileges may be given up. No guest instruction is
    /// executed before [`Request::Run`].
    pub fn new(configuration: &Configuration, outside: Outside) -> Result<Self, MachineError> {
        Self::build(configuration, outside, None)
    }

    /// One slice of a machine over several nodes. The primary opens the
    /// kernel and owns the machine's life; the others run when it says so, and
    /// have no devices of their own. All are given the same configuration.
    pub fn of_slice(
        configuration: &Configuration,
        outside: Outside,
        links: SliceLinks,
    ) -> Result<Self, MachineError> {
        Self::build(configuration, outside, Some(links))
    }

    fn build(
        configuration: &Configuration,
        outside: Outside,
        links: Option<SliceLinks>,
    ) -> Result<Self, MachineError> {
        configuration.validate()?;
        let bootstrap = links
            .as_ref()
            .is_none_or(|links| links.number == weft_aggregate::PRIMARY);
        if let Some(links) = &links {
            weft_aggregate::check_time(links)?;
        }
        let files = bootstrap
            .then(|| guest::Files::open(configuration))
            .transpose()?;
        let ram = Ram::new(configuration.memory_bytes)?;
        let ends = Ends::new();
        let slice = links.map(|links| {
            let ender = ends.ender.clone();
            let broken = Arc::new(move |reason| ender.end(End::Failed { reason }));
            let options = SliceOptions {
                placement: configuration.placement(),
                spare_bytes: configuration.spare_bytes,
            };
            Slice::new(options, links, &ram, broken)
        });
        let chosen = back_end::choose(configuration, &ram, slice.as_deref())?;
        let mut bootstrap = None;
        let (mut notes, mut updated) = (Vec::new(), Vec::new());
        if let Some(files) = files {
            let guest = files.load(configuration, &ram, chosen.back_end.command_line())?;
            (bootstrap, notes) = (Some(guest.bootstrap), guest.notes);
            updated = guest.updated;
            check_memory(&ram, &updated)?;
            if let Some(slice) = &slice {
                share(&ram, slice)?;
                for range in &updated {
                    slice.memory().keep_up_to_date(range);
                }
            }
        }
        Self::start(Start {
            configuration,
            outside,
            ram,
            chosen,
            bootstrap,
            notes,
            updated,
            ends,
            slice,
        })
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
        let chosen = back_end::choose(configuration, &ram, None)?;
        Self::start(Start {
            configuration,
            outside,
            ram,
            chosen,
            bootstrap: Some(CpuState::reset()),
            notes: Vec::new(),
            updated: Vec::new(),
            ends: Ends::new(),
            slice: None,
        })
    }

    fn start(start: Start<'_>) -> Result<Self, MachineError> {
        weft_platform::clock::sharpen_sleep();
        let mut notes = start.notes;
        notes.splice(0..0, start.chosen.notes());
        let back_end = start.chosen.back_end.name();
        let ram = start.ram;
        let Assembled { owner, handle } = assembly::assemble(Plan {
            configuration: start.configuration,
            outside: start.outside,
            ram: ram.clone(),
            chosen: start.chosen,
            bootstrap: start.bootstrap,
            updated: start.updated,
            ends: start.ends,
            slice: start.slice,
        })?;
        let thread = weft_confine::spawn("weft-machine", ThreadKind::Main, move || owner.run())
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
