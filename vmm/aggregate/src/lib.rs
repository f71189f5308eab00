//! One slice of an Aggregate VM: the part of a machine that runs on one node.
//!
//! ```text
//!   slice 0 (primary)                      slice n (secondary)
//!   owner of the life cycle    ──commands──▶ control loop
//!   devices, I/O APIC          ◀─registers─  vCPUs
//!   vCPUs                      ◀interrupts─▶ vCPUs
//!   memory                     ◀───pages───▶ memory
//! ```
//!
//! | file | holds |
//! | --- | --- |
//! | [`placement`] | which slice gives what |
//! | [`message`] | what slices send each other beside pages |
//! | `peers` | the links, who reads them, who is lost |
//! | `delay` | links that are slow on purpose, for tests |
//! | `dispatcher` | takes a received message to its component |
//! | `registers` | devices of other slices |
//! | `serial` | the serial port and its console, on two slices |
//! | `slice_files`, `saved_files`, `unread_pages`, `pages_server`, `host_files` | checkpoints of slices on other hosts |
//! | `disk_copies` | copies of disks that go to another host with their machine |
//! | `commands` | what the primary asks of secondaries |
//! | `pending_requests` | requests that have no reply yet |
//! | [`devices`] | disks and networks, opened here or heard of |
//! | [`remote_devices`] | devices whose queues several slices serve |
//! | `time` | how far another host's TSC is from this one's |
//! | `timekeeper` | keeps a slice's clock at the timekeeper's |
//! | [`time_role`] | another slice becomes the timekeeper |
//! | [`platform_role`] | another slice gets the I/O APIC and the small devices |
//! | [`queue_moves`] | other slices serve queues of disks and networks |
//! | `vcpu_moves` | vCPUs that go from one slice to another |
//! | [`membership`] | slices that join and leave while the machine runs |
//! | `rest` | no page moves for a while, on no slice |
//! | `stop` | a secondary ends after the primary has heard why |
//!
//! Threads of a slice: for each number that a slice may have one that reads its link and one
//! that sends what the kernel did not take at once; one that beats; one for deferred
//! pages; one that moves pages to other slices; one that does what others ask of the devices here, and one for their
//! checkpoints; one that corrects the clock while the timekeeper is on another host; on a secondary one that takes
//! commands; where KVM runs the vCPUs one that handles their faults; those of queues and
//! disks.

pub mod commands;
mod delay;
pub mod devices;
mod disk_copies;
mod dispatcher;
mod host_files;
pub mod membership;
pub mod message;
pub mod page_history;
mod pages_server;
mod peers;
mod pending_requests;
mod placement;
pub mod platform_role;
pub mod queue_moves;
mod reclaim;
mod registers;
pub mod relocation;
pub mod remote_devices;
mod rest;
mod room;
mod saved_files;
mod serial;
mod settle;
mod slice_files;
mod stop;
mod time;
pub mod time_role;
mod timekeeper;
mod unread_pages;
mod vcpu_moves;
mod window;

use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use thiserror::Error;
use weft_confine::{ThreadKind, lock};
use weft_dsm::{Config, ManagerOf, NodeId, Ranges};
use weft_guest_memory::Ram;
use weft_platform::bus::{Bus, BusDevice};
use weft_platform::clock::{Clock, RatesDiffer, Reference, measure_host_tsc};
use weft_platform::interrupts::{
    InterruptLink, InterruptRouter, InterruptTopology, Locations, Message, VcpuLocation,
};
use weft_platform::role::RolePlace;
use weft_vcpu::PAGE_SIZE;
use weft_wire::halves::{Receiver, Sender};

pub use commands::BegunCommand;
use commands::{CommandReceiver, SliceReply};
pub use disk_copies::DiskCopy;
use dispatcher::Dispatcher;
pub use host_files::{HostFile, HostFiles};
use membership::Membership;
use message::device::{self, DeviceMessage};
use message::{SliceMessage, Space};
use pages_server::PagesServer;
pub use peers::Peers;
use pending_requests::PendingRequests;
pub use placement::{
    CPUS_MAX, MEMORY_STEP, PRIMARY_MEMORY_MIN, Placement, PlacementError, SLICE_MEMORY_MIN,
    SLICES_MAX, Share, deal_cpus, deal_memory,
};
pub use registers::SerialConsole;
use registers::{DeviceServer, RemoteAccess, RemoteRegisters, RoleRegisters, WAITING_MAX};
use remote_devices::RemoteDevices;
use room::Room;
pub use saved_files::RemoteFile;
use saved_files::{FileServer, SavedFiles};
use serial::Keyboard;
pub use serial::RemoteConsole;
use settle::Identities;
use stop::StopSignal;
pub use timekeeper::Timekeeper;
use timekeeper::{TimeCounters, TimekeeperParts};
pub use unread_pages::AbsentRange;
use unread_pages::UnreadPages;
pub use vcpu_moves::working_set;
pub use vcpu_moves::{MoveError, MoveTimes, MovedVcpu, VcpuMoves, VcpuSite};
use weft_coherent_memory::mapping::GuestMapping;
use weft_coherent_memory::{Budget, SharedMemory, SharedMemoryOptions};

/// The slice that loads the kernel and owns the machine's life.
pub const PRIMARY: usize = 0;
/// Commands that may wait on a secondary: its owner gives one after the other.
const COMMANDS_MAX: usize = 16;
/// Longest that a secondary may take for a command: as long as its vCPUs may.
const COMMAND_WAIT: Duration = Duration::from_secs(12);

/// Longest that a slice may take to open its devices, the first to load a kernel,
/// too.
const DESCRIPTION_WAIT: Duration = Duration::from_secs(30);

/// How a slice reaches the others.
pub struct SliceLinks {
    /// Which slice this is.
    pub number: usize,
    /// By slice; none for this one.
    pub links: Vec<Option<(Sender, Receiver)>>,
    /// Silence of this length is death.
    pub lease: Duration,
    /// The clock of the primary's host, the same for all slices.
    pub reference: Reference,
    /// For tests: frames wait for a random time below this before they are sent,
    /// each link's in order. Zero: they do not.
    pub delay_max: Duration,
    /// Of a slice that joins a running machine: bytes of guest memory that it may fill.
    pub joins: Option<u64>,
    /// Of a slice on a host that lends: bytes of guest memory that were reserved.
    pub lent: Option<u64>,
}

/// What of a machine each of its slices must know.
#[derive(Clone, Debug)]
pub struct SliceOptions {
    /// Which slice gives what.
    pub placement: Placement,
    /// Bytes that each slice may fill with pages of the others' parts of RAM; none: see
    /// [`Placement::budget_bytes`].
    pub spare_bytes: Option<u64>,
    /// Pages that vCPUs fetch from slices without vCPUs are exchanged for others.
    pub exchanges: bool,
}

/// Why a slice cannot be joined to its machine.
#[derive(Debug, Error)]
pub enum SliceError {
    /// A thread could not be started.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
}

/// Refuses a slice whose host's clock cannot follow the primary's.
pub fn check_time(links: &SliceLinks) -> Result<(), RatesDiffer> {
    match links.number == PRIMARY || links.reference.is_here() {
        true => Ok(()),
        false => links.reference.check(measure_host_tsc()),
    }
}

/// Wakeup once, with the reason, when a slice cannot continue.
pub type OnFailure = Arc<dyn Fn(String) + Send + Sync>;

/// A slice among several.
pub struct Slice {
    number: usize,
    joins: bool,
    placement: Placement,
    locations: Arc<Locations>,
    /// The slice that has the platform.
    platform: Arc<RolePlace>,
    keyboard: Keyboard,
    /// On the primary: files of a checkpoint that slices on other hosts write.
    saved_files: Arc<SavedFiles>,
    host_files: Arc<HostFiles>,
    /// The slices that still read the checkpoint that the machine continues, from files here.
    pages_server: Arc<PagesServer>,
    /// What this slice still reads of it from other slices.
    unread_pages: Arc<UnreadPages>,
    lease: Duration,
    peers: Arc<Peers>,
    memory: Arc<SharedMemory>,
    registers: Arc<PendingRequests<u64>>,
    commands: Arc<PendingRequests<SliceReply>>,
    remote_devices: Arc<RemoteDevices>,
    looks: Arc<PendingRequests<(u64, u64)>>,
    vcpu_moves: Arc<VcpuMoves>,
    membership: Arc<Membership>,
    /// What devices here are, for slices that join later.
    descriptions: Mutex<Vec<Vec<u8>>>,
    /// Orders the identities of vCPUs here, as others are told of them.
    identities: Arc<Mutex<()>>,
    interrupts: OnceLock<Arc<InterruptRouter>>,
    /// Pages that it may fill of its own part, with what it was handed, and of others';
    /// `None`: all.
    room: Mutex<Option<Room>>,
    planned: relocation::Planned,
    reference: Reference,
    stop: Arc<StopSignal>,
    time: Arc<TimeCounters>,
    /// Since [`Slice::join`].
    timekeeper: OnceLock<Arc<Timekeeper>>,
    /// Where KVM runs the vCPUs.
    mapping: OnceLock<Arc<GuestMapping>>,
    /// Until threads read them.
    receivers: Mutex<Vec<(usize, Receiver)>>,
}

/// The parts of a machine that a slice is connected to.
pub struct SliceWiring {
    /// The interrupt controllers here.
    pub interrupts: Arc<InterruptRouter>,
    /// Memory-mapped registers.
    pub mmio: Bus,
    /// Registers at ports.
    pub ports: Bus,
    /// Guest time, which a secondary's slice corrects.
    pub clock: Arc<Clock>,
    /// The serial port here and its console.
    pub serial: Arc<dyn SerialConsole>,
    /// The vCPUs, which may move.
    pub vcpus: Arc<dyn VcpuSite>,
    pub on_failure: OnFailure,
    /// A secondary's machine asked for the end of the whole.
    pub ended: Box<dyn Fn(usize, Vec<u8>) + Send + Sync>,
    /// On the primary: a slice asks for the move of a vCPU, which may not be its own. Must
    /// not block.
    pub wants_move: Box<dyn Fn(usize, u32, VcpuLocation) + Send + Sync>,
}

/// What a machine gets from its slice.
pub struct SliceHandles {
    /// On a secondary: commands of the primary.
    pub commands: CommandReceiver,
    /// What leads the clock here.
    pub timekeeper: Arc<Timekeeper>,
}

impl Slice {
    /// A slice whose links nobody reads yet.
    pub fn new(
        options: SliceOptions,
        links: SliceLinks,
        ram: &Ram,
        on_failure: OnFailure,
    ) -> Arc<Self> {
        let placement = options.placement;
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        let mut absent = u32::MAX >> (32 - SLICES_MAX);
        absent &= !(1 << links.number);
        for (slice, link) in links.links.into_iter().enumerate() {
            if link.is_some() {
                absent &= !(1 << slice);
            }
            senders.push(link.map(|(sender, receiver)| {
                receivers.push((slice, receiver));
                sender
            }));
        }
        let peers = Peers::new(links.number, senders, links.lease, links.delay_max);
        let me = NodeId(links.number as u8);
        // A slice manages its own part of RAM: what Linux allocates for a vCPU is of
        // its own node, so that most requests find their manager at home.
        let manager = match Ranges::new(&placement.page_ends()) {
            Ok(ranges) => ManagerOf::Ranges(ranges),
            Err(_) => ManagerOf::Fixed(NodeId(PRIMARY as u8)),
        };
        let share = placement.shares().get(links.number);
        let (own, bytes) = match links.joins {
            // It manages nothing, also if it has the number of a slice that has left.
            Some(bytes) => (0, bytes.min(placement.memory_bytes())),
            None => (
                share.map_or(0, |share| share.memory_bytes / PAGE_SIZE),
                placement.budget_bytes(links.number, options.spare_bytes),
            ),
        };
        let room = (bytes < placement.memory_bytes())
            .then(|| (own, (bytes / PAGE_SIZE).saturating_sub(own)));
        let others_min = placement.spare_bytes_min() / PAGE_SIZE;
        let lent = links.lent.map(|bytes| bytes / PAGE_SIZE);
        let room = room.map(|parts| Room::new(parts, others_min, lent));
        let budget = room.map_or(Budget::UNLIMITED, |room| room.budget());
        let config = Config {
            absent,
            ..Config::new(me, SLICES_MAX as u8, manager)
        };
        let memory = SharedMemory::new(SharedMemoryOptions {
            ram: ram.clone(),
            config,
            budget,
            transport: peers.clone(),
            lease: links.lease,
            on_failure: Box::new(move |reason| on_failure(reason)),
        });
        let locations = Arc::new(initial_locations(&placement));
        let membership = Membership::new(links.number, peers.clone(), locations.clone());
        if options.exchanges {
            membership.exchange(&memory);
        }
        let platform = Arc::new(RolePlace::new(links.number, PRIMARY));
        let registers = Arc::<PendingRequests<u64>>::default();
        let way = RemoteAccess {
            peers: peers.clone(),
            pending: registers.clone(),
            patience: 2 * links.lease,
        };
        Arc::new(Self {
            number: links.number,
            joins: links.joins.is_some(),
            keyboard: Keyboard::new(platform.clone(), way),
            saved_files: Arc::default(),
            host_files: Arc::default(),
            pages_server: Arc::default(),
            unread_pages: UnreadPages::new(peers.clone()),
            platform,
            vcpu_moves: VcpuMoves::new(links.number, peers.clone(), locations.clone()),
            locations,
            placement,
            lease: links.lease,
            remote_devices: RemoteDevices::new(links.number, peers.clone(), 2 * links.lease),
            membership,
            descriptions: Mutex::default(),
            identities: Arc::default(),
            interrupts: OnceLock::new(),
            room: Mutex::new(room),
            planned: relocation::Planned::default(),
            peers,
            memory,
            registers,
            commands: Arc::default(),
            looks: Arc::default(),
            reference: links.reference,
            stop: Arc::default(),
            time: Arc::default(),
            timekeeper: OnceLock::new(),
            mapping: OnceLock::new(),
            receivers: Mutex::new(receivers),
        })
    }

    /// Which one it is.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Whether it was made to join a running machine.
    pub fn joins(&self) -> bool {
        self.joins
    }

    /// Which slice gives what.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Where each vCPU is.
    pub fn locations(&self) -> &Arc<Locations> {
        &self.locations
    }

    /// Where the platform is: the I/O APIC and the small devices.
    pub fn platform(&self) -> &Arc<RolePlace> {
        &self.platform
    }

    /// The registers at `start` of a device of the platform, for the bus of this slice.
    /// `device` is the one that is here.
    pub fn platform_registers(
        &self,
        (space, start): (Space, u64),
        device: Arc<dyn BusDevice>,
    ) -> Arc<dyn BusDevice> {
        Arc::new(RoleRegisters {
            place: self.platform.clone(),
            space,
            start,
            device,
            way: self.remote_access(),
        })
    }

    /// The console as the serial port of this slice, which is not slice 0, writes to it.
    pub fn remote_console(&self) -> RemoteConsole {
        RemoteConsole(self.remote_access())
    }

    /// On slice 0: types into the serial port, which is `here` or elsewhere; returns how many
    /// bytes it took. Never waits.
    pub fn type_in(&self, bytes: &[u8], here: impl FnOnce(&[u8]) -> usize) -> usize {
        self.keyboard.type_in(bytes, here)
    }

    /// How many of these bytes a serial port elsewhere took that they were sent to; 0 also
    /// while that is not known. None: they are in no port, and on the way to none.
    pub fn typed_before(&self, bytes: &[u8]) -> Option<usize> {
        self.keyboard.typed_before(bytes)
    }

    fn remote_access(&self) -> RemoteAccess {
        RemoteAccess {
            peers: self.peers.clone(),
            pending: self.registers.clone(),
            patience: 2 * self.lease,
        }
    }

    /// Moves vCPUs from slice to slice.
    pub fn vcpu_moves(&self) -> &Arc<VcpuMoves> {
        &self.vcpu_moves
    }

    /// Its side of the guest's RAM.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// The clock that all slices follow.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Nanoseconds by which its time may be wrong, and how often it was corrected;
    /// none for the slice that all others follow.
    pub fn time_counters(&self) -> Vec<(&'static str, u64)> {
        if self.timekeeper_number() == self.number {
            return Vec::new();
        }
        let error_ns = self.time.error_ns.load(Ordering::Relaxed);
        let steps = self.time.steps.load(Ordering::Relaxed);
        vec![("clock-error-ns", error_ns), ("clock-steps", steps)]
    }

    /// The slice that keeps the guest's time, as far as this one knows.
    pub fn timekeeper_number(&self) -> usize {
        let timekeeper = self.timekeeper.get();
        timekeeper.map_or(PRIMARY, |time| time.keeper().0)
    }

    /// Whether it is the primary.
    pub fn is_primary(&self) -> bool {
        self.number == PRIMARY
    }

    /// Has the vCPUs use the memory through a watched mapping, whose faults a thread
    /// handles from [`Slice::join`] on.
    pub fn watch(&self, mapping: Arc<GuestMapping>) {
        self.memory.register_notifier(Box::new(mapping.clone()));
        // A second one is a mistake that the first survives.
        let _ = self.mapping.set(mapping);
    }

    /// Counters of the vCPUs' mapping, keyed by name.
    pub fn mapping_counters(&self) -> Vec<(&'static str, u64)> {
        self.mapping
            .get()
            .map_or_else(Vec::new, |mapping| mapping.counters())
    }

    /// Frames and bytes to and from other slices so far, and bytes from each, keyed by name.
    pub fn traffic(&self) -> Vec<(String, u64)> {
        self.peers.traffic()
    }

    /// Its part in the devices of all slices.
    pub fn remote_devices(&self) -> &Arc<RemoteDevices> {
        &self.remote_devices
    }

    /// Tells all other slices what a device of this one is. Before [`Slice::join`], and
    /// in the order of devices.
    pub fn describe(&self, json: Vec<u8>) {
        let address = device::Address::new(0, 0);
        lock(&self.descriptions).push(json.clone());
        // The others know the devices of the node 0 whose place it takes.
        if self.joins {
            return;
        }
        let message = DeviceMessage::Described(json);
        self.peers
            .broadcast_first(&SliceMessage::Device { address, message });
    }

    /// What `slice` says of its next device. Before [`Slice::join`]: nobody else
    /// reads the links then, and descriptions come first on them.
    pub fn next_description(&self, slice: usize) -> Result<Vec<u8>, String> {
        let mut receivers = self
            .receivers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let found = receivers.iter_mut().find(|(number, _)| *number == slice);
        let (_, receiver) = found.ok_or_else(|| format!("no link to slice {slice}"))?;
        let frame = receiver
            .receive(DESCRIPTION_WAIT)
            .map_err(|error| error.to_string())?
            .ok_or_else(|| format!("silent for {} s", DESCRIPTION_WAIT.as_secs()))?;
        match SliceMessage::decode(&frame.header, frame.payload) {
            Ok(SliceMessage::Device {
                message: DeviceMessage::Described(json),
                ..
            }) => Ok(json),
            Ok(_) => Err("it sent another message first".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// What the interrupt controllers need to know.
    pub fn topology(self: &Arc<Self>) -> InterruptTopology {
        InterruptTopology {
            slice: self.number,
            locations: self.locations.clone(),
            io_apic: self.platform.clone(),
            link: self.clone(),
        }
    }

    /// Joins the slice to its machine and starts its threads. What a secondary is
    /// commanded comes out of the receiver, and what leads its clock with it.
    pub fn join(self: &Arc<Self>, wiring: SliceWiring) -> Result<SliceHandles, SliceError> {
        let timekeeper = Arc::new(Timekeeper::new(TimekeeperParts {
            number: self.number,
            reference: self.reference.clone(),
            clock: wiring.clock,
            interrupts: wiring.interrupts.clone(),
            peers: self.peers.clone(),
            looks: self.looks.clone(),
            counters: self.time.clone(),
            patience: 2 * self.lease,
        }));
        // A second one is a mistake that the first survives.
        let _ = self.timekeeper.set(timekeeper.clone());
        let table = self.locations.to_bytes();
        self.peers
            .broadcast_first(&SliceMessage::Locations { table });
        let identities = Identities {
            peers: self.peers.clone(),
            looks: self.looks.clone(),
            locations: self.locations.clone(),
            order: self.identities.clone(),
            lease: self.lease,
        };
        Arc::new(identities).tell(&wiring.interrupts);
        if !self.is_primary() {
            self.remote_devices.join(&wiring.mmio);
            for (bus, space) in [(&wiring.mmio, Space::Memory), (&wiring.ports, Space::Port)] {
                bus.set_fallback(Arc::new(RemoteRegisters {
                    space,
                    slice: PRIMARY,
                    way: self.remote_access(),
                }));
            }
        }
        let (placement, locations) = (self.placement.clone(), self.locations.clone());
        let on_failure = wiring.on_failure;
        let (registers, replies) = (self.registers.clone(), self.commands.clone());
        let remote_devices = self.remote_devices.clone();
        let looks = self.looks.clone();
        let (vcpu_moves, stop) = (self.vcpu_moves.clone(), self.stop.clone());
        vcpu_moves.connect(wiring.interrupts.clone(), wiring.vcpus);
        // A second one is a mistake that the first survives.
        let _ = self.interrupts.set(wiring.interrupts.clone());
        let (asked, devices) = (self.commands.clone(), remote_devices.clone());
        let (looked, membership) = (looks.clone(), self.membership.clone());
        self.peers.when_departed(Box::new(move |slice| {
            asked.departed(slice);
            looked.departed(slice);
            devices.departed(slice);
            membership.departed(slice);
        }));
        self.peers.when_lost(Box::new(move |slice, reason| {
            // The reason before the waiters wake, so that they can report it.
            let lost = describe_now(&placement, &locations, slice);
            on_failure(format!("lost {lost}: {reason}"));
            if slice == PRIMARY {
                stop.set();
            }
            registers.peer_lost(slice);
            replies.peer_lost(slice);
            remote_devices.peer_lost(slice);
            looks.peer_lost(slice);
            vcpu_moves.peer_lost(slice);
        }));
        let (device_requests, requests) = sync_channel(WAITING_MAX);
        let (file_requests, files) = sync_channel(saved_files::WAITING_MAX);
        let (command, commands) = sync_channel(COMMANDS_MAX);
        let dispatcher = Arc::new(Dispatcher {
            interrupts: wiring.interrupts,
            first: initial_locations(&self.placement),
            peers: self.peers.clone(),
            registers: self.registers.clone(),
            remote_devices: self.remote_devices.clone(),
            replies: self.commands.clone(),
            looks: self.looks.clone(),
            vcpu_moves: self.vcpu_moves.clone(),
            membership: self.membership.clone(),
            memory: self.memory.clone(),
            unread_pages: self.unread_pages.clone(),
            device_requests,
            file_requests,
            commands: command,
            ended: wiring.ended,
            wants_move: wiring.wants_move,
        });
        let server = DeviceServer {
            peers: self.peers.clone(),
            mmio: wiring.mmio,
            ports: wiring.ports,
            serial: wiring.serial,
            requests,
        };
        start("weft-registers", ThreadKind::Device, move || server.run())?;
        let files = FileServer {
            peers: self.peers.clone(),
            memory: self.memory.clone(),
            files: self.saved_files.clone(),
            host_files: self.host_files.clone(),
            pages_server: self.pages_server.clone(),
            adopter: self.adopter(),
            requests: files,
        };
        start("weft-files", ThreadKind::Device, move || files.run())?;
        let memory = self.memory.clone();
        start("weft-deferred", ThreadKind::Device, move || {
            memory.run_deferred_work()
        })?;
        let memory = self.memory.clone();
        start("weft-evictor", ThreadKind::Device, move || {
            memory.keep_to_budget()
        })?;
        if let Some(mapping) = self.mapping.get().cloned() {
            let memory = self.memory.clone();
            start("weft-faults", ThreadKind::Device, move || {
                mapping.serve(&memory)
            })?;
        }
        let peers = self.peers.clone();
        start("weft-beat", ThreadKind::Link, move || peers.beat())?;
        for (slice, receiver) in lock(&self.receivers).drain(..) {
            self.peers.seat(slice, receiver);
        }
        for slice in (0..self.numbers()).filter(|slice| *slice != self.number) {
            let (peers, memory, dispatcher) =
                (self.peers.clone(), self.memory.clone(), dispatcher.clone());
            start(&format!("weft-link{slice}"), ThreadKind::Link, move || {
                peers.read_all(slice, &memory, &*dispatcher);
            })?;
            let peers = self.peers.clone();
            start(&format!("weft-send{slice}"), ThreadKind::Link, move || {
                peers.flush(slice);
            })?;
            if self.peers.is_delayed() {
                let peers = self.peers.clone();
                start(&format!("weft-delay{slice}"), ThreadKind::Link, move || {
                    peers.send_delayed(slice);
                })?;
            }
        }
        let (membership, memory) = (self.membership.clone(), self.memory.clone());
        start("weft-drain", ThreadKind::Device, move || {
            membership.move_pages(&memory)
        })?;
        // Confined, no thread can be started when time is measured for the first time.
        let kept = timekeeper.clone();
        start("weft-time", ThreadKind::Device, move || kept.keep())?;
        Ok(SliceHandles {
            commands,
            timekeeper,
        })
    }

    /// The machine ends: no vCPU waits for anything any more, and nobody for a vCPU's move.
    pub fn end_waits(&self) {
        self.memory.end_waits();
        self.registers.end();
        self.remote_devices.end_waits();
        self.vcpu_moves.end();
    }

    /// The machine is over: links end, and with them all threads.
    pub fn close(&self) {
        self.end_waits();
        self.commands.end();
        self.looks.end();
        if let Some(timekeeper) = self.timekeeper.get() {
            timekeeper.end();
        }
        self.stop.set();
        self.peers.close();
        self.membership.end();
        self.remote_devices.close();
    }
}

impl InterruptLink for Slice {
    fn deliver(&self, location: VcpuLocation, vcpu: u32, message: Message) {
        let epoch = location.epoch;
        let message = SliceMessage::Interrupt {
            vcpu,
            epoch,
            message,
        };
        self.peers.send(location.slice, &message);
    }

    fn end_of_interrupt(&self, slice: usize, vector: u8) {
        self.peers
            .send(slice, &SliceMessage::EndOfInterrupt { vector });
    }

    fn set_pin(&self, slice: usize, pin: u8, high: bool) {
        self.peers.send(slice, &SliceMessage::Pin { pin, high });
    }
}

/// Starts a thread that ends with the links.
fn start(
    name: &str,
    kind: ThreadKind,
    body: impl FnOnce() + Send + 'static,
) -> Result<(), SliceError> {
    weft_confine::spawn(name, kind, body)
        .map(drop)
        .map_err(SliceError::Thread)
}

/// Where the vCPUs are before any moves.
fn initial_locations(placement: &Placement) -> Locations {
    let counts = placement.shares().iter().map(|share| share.cpus);
    Locations::new(counts).with_room(membership::numbers(placement))
}

/// A slice with what it gives, for a message, before any vCPU moved.
pub fn describe(placement: &Placement, slice: usize) -> String {
    describe_now(placement, &initial_locations(placement), slice)
}

/// A slice with what it gives, for a message, and the vCPUs that it has now.
fn describe_now(placement: &Placement, locations: &Locations, slice: usize) -> String {
    // A node that joined brought neither.
    let memory_bytes = placement
        .shares()
        .get(slice)
        .map_or(0, |share| share.memory_bytes);
    let cpus = match locations.at(slice)[..] {
        [] => "no vCPU".to_owned(),
        [only] => format!("vCPU {only}"),
        [first, .., last] if (last - first + 1) as usize == locations.at(slice).len() => {
            format!("vCPUs {first} to {last}")
        }
        ref several => format!("vCPUs {several:?}"),
    };
    let mib = memory_bytes >> 20;
    format!("node {slice} ({cpus}, {mib} MiB of memory)")
}

#[cfg(test)]
mod locations_tests;
