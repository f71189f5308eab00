//! A machine: its parts put together, and its life.
//!
//! | file | holds |
//! | --- | --- |
//! | `configuration` | what a machine consists of |
//! | `back_end` | selects what executes the vCPUs' instructions |
//! | `guest` | what is in guest memory at the start |
//! | `assembly` | makes a machine from its configuration |
//! | `machine_core` | RAM, buses, interrupt router and clock, to which the parts are attached |
//! | `pci_devices` | the PCI devices of a configuration |
//! | `part`, `state` | the parts, each with its type of state; the state of all |
//! | `lifecycle` | stages, requests, replies, ends |
//! | `owner` | the thread that carries out requests |
//! | `move_report` | what a vCPU's move cost |
//! | `platform_move` | another slice gets the I/O APIC and the small devices, as the owner has it done |
//! | `queue_move` | other slices serve queues of disks and networks, as the owner has it done |
//! | `serial_console` | the serial port and its console, on one slice or two |
//! | `time_move` | another slice keeps the time, as the owner has it done |
//! | `vcpu_move` | a vCPU goes to another slice, as the owner has it done |
//! | [`membership`] | nodes join and leave, as a request has it done |
//! | `checkpoint` | guest memory to and from the files of a checkpoint |
//! | `page_writer` | the thread of a slice that writes its pages, and reads them |
//! | `restoring` | pages of a checkpoint, read when they are needed |
//! | `handle` | sends requests, for other threads |
//! | `control_loop` | carries out the primary's commands on a secondary |
//! | `fault_reports` | pages and faults of all slices |
//! | `shutdown` | requests the end of a machine, and waits for it |
//! | [`vcpu`] | the vCPUs' threads, and their view of the machine |

mod assembly;
mod back_end;
mod checkpoint;
mod configuration;
mod control_loop;
mod disk_copies;
mod guest;
mod handle;
mod handover;
pub mod home_move;
mod lifecycle;
mod machine_core;
pub mod membership;
pub mod migration;
mod move_report;
mod owner;
mod page_writer;
mod part;
mod pci_devices;
mod platform_move;
mod precopy;
mod queue_move;
mod restoring;
mod serial_console;
mod shutdown;
mod sources;
mod split;

mod fault_reports;
mod kernel_parameters;
mod state;
mod switch;
mod switch_order;
#[cfg(test)]
mod tests;
mod time_move;
pub mod vcpu;
mod vcpu_move;
mod wanted_moves;

use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use thiserror::Error;
use weft_aggregate::{Slice, SliceLinks, SliceOptions};
use weft_confine::{ThreadKind, join_until};
use weft_guest_memory::Ram;
use weft_vcpu::CpuState;
use weft_virtio::console::ConsoleOutput;

pub use crate::vcpu::following::Follow;
pub use checkpoint::{
    CHECKPOINT_SECONDS_MAX, CheckpointIo, CheckpointProgress, NewCheckpoint, Restore,
    WrittenCheckpoint, memory_end,
};
pub use configuration::{BackEndChoice, Configuration, Invalid};
pub use handle::Handle;
pub use lifecycle::{
    Counters, End, MachineReply, MachineRequest, REPLY_SECONDS_MAX, Refusal, Stage, Status,
};
pub use move_report::{
    PlatformMoveReport, QueueMove, QueueMoveReport, TimeMoveReport, VcpuMoveReport,
};
pub use state::{HomeState, MachineState, OtherNodes, PartState, SavedMachine, StateError};
pub use weft_aggregate::commands::VcpuStage;
pub use weft_aggregate::devices::{
    DataPath, Disk, Forward, Network, OpenDisks, OpenSwitches, SwitchSocket,
};
pub use weft_aggregate::{
    CPUS_MAX, MEMORY_STEP, PRIMARY_MEMORY_MIN, Placement, PlacementError, SLICE_MEMORY_MIN,
    SLICES_MAX, Share, deal_cpus, deal_memory,
};
pub use weft_virtio::net::{NetError, OpenSwitch};

pub use back_end::{check_host, features_missing, features_shown};
pub use weft_vcpu::CpuModel;

use assembly::{Assembled, Plan};
use shutdown::OwnerChannel;

/// Longest wait for the end of a machine that is dropped. Its vCPUs and devices have bounds of
/// their own, whose sum is shorter.
const END_WAIT: Duration = Duration::from_secs(30);

/// The outputs and open files that a machine is given by its process. Outputs are written on
/// threads of the machine and must not block for long.
pub struct MachineIo {
    /// Receives the output of the serial port.
    pub serial: Box<dyn Write + Send>,
    /// Receives the output of the virtio console; `None`: the machine has no virtio console.
    pub console: Option<Box<dyn ConsoleOutput>>,
    /// Open files of disks.
    pub disks: OpenDisks,
    /// Connections to switches that have a name.
    pub switches: OpenSwitches,
    /// How checkpoints are written, and which one the machine is made from.
    pub checkpoint: CheckpointIo,
    /// Where guest memory is.
    pub memory: MemoryFile,
}

/// The memfd of guest memory.
#[derive(Default)]
pub enum MemoryFile {
    /// Made with the machine, for this process alone.
    #[default]
    New,
    /// An empty one, which another process has as well.
    Empty(File),
    /// One with the memory of a machine that goes on here: see [`MachineRequest::TakeHome`].
    Full(File),
}

/// Why a machine cannot be made.
#[derive(Debug, Error)]
pub enum MachineError {
    /// The configuration is invalid.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// No memory for the guest.
    #[error(transparent)]
    Memory(#[from] weft_guest_memory::MemoryError),
    /// The kernel is missing or cannot be booted.
    #[error(transparent)]
    Boot(#[from] weft_boot::BootError),
    /// The ACPI tables do not fit.
    #[error(transparent)]
    Acpi(#[from] weft_platform::acpi::AcpiError),
    /// The requested back end is not usable on this host.
    #[error(transparent)]
    Unusable(#[from] weft_vcpu_kvm::detect::Unusable),
    /// KVM cannot run this machine.
    #[error("KVM cannot run this machine")]
    Kvm(#[source] weft_vcpu_kvm::KvmError),
    /// The host's CPU lacks instructions of the guest's CPU model.
    #[error(
        "guests of --cpu {model} need {missing}, which this host's CPU lacks: choose an older --cpu"
    )]
    CpuModel {
        model: CpuModel,
        /// Names of features, as in `/proc/cpuinfo`.
        missing: String,
    },
    /// KVM vCPUs cannot share their memory here.
    #[error("a machine over several nodes cannot run in KVM here (--backend soft can): {0}")]
    SlicesOnKvm(String),
    /// The loaded memory could not become a slice's part of coherent memory.
    #[error("cannot share the loaded memory: {0}")]
    Share(String),
    /// A subscribed range is not memory.
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
    /// A disk or a network cannot be opened.
    #[error(transparent)]
    Device(#[from] weft_aggregate::devices::DeviceSetupError),
    /// The slice could not be started.
    #[error(transparent)]
    Slice(#[from] weft_aggregate::SliceError),
    /// The queue back end of remote devices could not be started.
    #[error("cannot serve the devices of several nodes")]
    RemoteDevices(#[source] std::io::Error),
    /// The virtio console could not be made.
    #[error("no event descriptor for the console")]
    Console(#[source] std::io::Error),
    /// The balloon could not be made.
    #[error("no event descriptor for the balloon")]
    Balloon(#[source] std::io::Error),
    /// A thread could not be started.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// Guest memory could not be read from a checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] weft_checkpoint::CheckpointError),
    /// The pages of a checkpoint do not fit into the guest's memory.
    #[error("cannot restore guest memory: {0}")]
    Restore(String),
    /// The guest's random seed could not be read.
    #[error("cannot read /dev/urandom")]
    Seed(#[source] std::io::Error),
}

/// A virtual machine. Dropping it stops it first.
pub struct Machine {
    handle: Handle,
    ram: Ram,
    back_end: &'static str,
    notes: Vec<String>,
    thread: Option<JoinHandle<()>>,
}

/// The arguments of [`Machine::start`].
struct Start<'a> {
    configuration: &'a Configuration,
    io: MachineIo,
    ram: Ram,
    chosen: back_end::Chosen,
    /// The first vCPU's state at its first instruction, if that vCPU is here.
    bootstrap: Option<CpuState>,
    notes: Vec<String>,
    updated: Vec<Range<u64>>,
    channel: OwnerChannel,
    slice: Option<Arc<Slice>>,
}

/// Checks that subscribed ranges are memory.
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

/// Makes the primary the owner of the pages that were loaded.
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
    /// Makes a machine. Afterwards all files are open and all threads are started, so that
    /// the process can give up its privileges. No guest instruction is executed before
    /// [`MachineRequest::Run`].
    pub fn new(configuration: &Configuration, io: MachineIo) -> Result<Self, MachineError> {
        Self::build(configuration, io, None)
    }

    /// Makes one slice of a machine over several nodes, from a configuration that is the same
    /// on all. The primary loads the kernel, has the devices' registers and owns the machine's
    /// life; the secondaries carry out its commands.
    pub fn of_slice(
        configuration: &Configuration,
        io: MachineIo,
        links: SliceLinks,
    ) -> Result<Self, MachineError> {
        Self::build(configuration, io, Some(links))
    }

    fn build(
        configuration: &Configuration,
        mut io: MachineIo,
        links: Option<SliceLinks>,
    ) -> Result<Self, MachineError> {
        configuration.validate()?;
        let bootstrap = links
            .as_ref()
            .is_none_or(|links| links.number == weft_aggregate::PRIMARY);
        if let Some(links) = &links {
            weft_aggregate::check_time(links)?;
        }
        // Of node 0 only a process joins that takes its place.
        let joins = links.as_ref().is_some_and(|links| links.joins.is_some());
        let goes_on = joins || matches!(io.memory, MemoryFile::Full(_));
        let is_restored = io.checkpoint.restore.is_some() || goes_on;
        let files = (bootstrap && !is_restored)
            .then(|| guest::Files::open(configuration))
            .transpose()?;
        let size = configuration.memory_bytes;
        let ram = match std::mem::take(&mut io.memory) {
            MemoryFile::New => Ram::new(size)?,
            MemoryFile::Empty(file) | MemoryFile::Full(file) => Ram::of_file(file, size)?,
        };
        let channel = OwnerChannel::new();
        let slice = links.map(|links| {
            let shutdown = channel.shutdown.clone();
            let broken = Arc::new(move |reason| shutdown.end(End::Failed { reason }));
            let options = SliceOptions {
                placement: configuration.placement(),
                spare_bytes: configuration.spare_bytes,
                exchanges: configuration.exchanges,
            };
            Slice::new(options, links, &ram, broken)
        });
        let chosen = back_end::choose(configuration, &ram, slice.as_deref())?;
        let mut bootstrap = (bootstrap && is_restored).then(CpuState::reset);
        let (mut notes, mut updated) = (Vec::new(), Vec::new());
        if let Some(restore) = &io.checkpoint.restore {
            notes.push(restore.note(SystemTime::now()));
            updated = restore.updated.clone();
            check_memory(&ram, &updated)?;
            if let Some(slice) = &slice {
                for range in &updated {
                    slice.memory().subscribe(range);
                }
            }
        }
        if let Some(files) = files {
            let guest = files.load(configuration, &ram, chosen.back_end.command_line())?;
            (bootstrap, notes) = (Some(guest.bootstrap), guest.notes);
            updated = guest.updated;
            check_memory(&ram, &updated)?;
            if let Some(slice) = &slice {
                share(&ram, slice)?;
                for range in &updated {
                    slice.memory().subscribe(range);
                }
            }
        }
        Self::start(Start {
            configuration,
            io,
            ram,
            chosen,
            bootstrap,
            notes,
            updated,
            channel,
            slice,
        })
    }

    /// Makes a machine around existing RAM, for [`MachineRequest::Restore`]. Nothing is loaded
    /// into it.
    pub fn adopt(
        configuration: &Configuration,
        io: MachineIo,
        ram: Ram,
    ) -> Result<Self, MachineError> {
        configuration.validate()?;
        if ram.size() != configuration.memory_bytes {
            return Err(Invalid::Memory(configuration.memory_bytes).into());
        }
        let chosen = back_end::choose(configuration, &ram, None)?;
        Self::start(Start {
            configuration,
            io,
            ram,
            chosen,
            bootstrap: Some(CpuState::reset()),
            notes: Vec::new(),
            updated: Vec::new(),
            channel: OwnerChannel::new(),
            slice: None,
        })
    }

    fn start(start: Start<'_>) -> Result<Self, MachineError> {
        weft_platform::clock::sharpen_sleep();
        let mut notes = start.notes;
        notes.splice(0..0, start.chosen.notes());
        let back_end = start.chosen.back_end.name();
        let ram = start.ram;
        let Assembled { mut owner, handle } = assembly::assemble(Plan {
            configuration: start.configuration,
            io: start.io,
            ram: ram.clone(),
            chosen: start.chosen,
            bootstrap: start.bootstrap,
            updated: start.updated,
            channel: start.channel,
            slice: start.slice,
        })?;
        // Before a caller has the handle.
        owner.stand();
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

    /// A handle for other threads.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Its slice, if it has several or may get more.
    pub fn slice(&self) -> Option<Arc<Slice>> {
        self.handle.slice.clone()
    }

    /// The guest's memory.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// `kvm` or `soft`.
    pub fn back_end(&self) -> &'static str {
        self.back_end
    }

    /// Lines for the log: the back end and why it was selected, and what was booted.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Stops the machine if it runs, and waits until all its threads have ended. Returns how
    /// it ended.
    pub fn finish(mut self) -> Option<End> {
        self.take_down();
        self.handle.wait(Duration::ZERO)
    }

    fn take_down(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        let deadline = Instant::now() + END_WAIT;
        shutdown::quit(&self.handle.owner, deadline);
        // A thread that does not end in time ends with the process.
        join_until(thread, deadline);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.take_down();
    }
}
