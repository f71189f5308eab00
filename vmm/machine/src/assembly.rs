//! Puts a machine's parts together.

use std::io::Write;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use weft_aggregate::message::Space;
use weft_aggregate::remote_devices::{QueueBackEnd, ServedQueues, Tools};
use weft_aggregate::{Slice, SliceHandles, SliceWiring};
use weft_confine::ThreadKind;
use weft_guest_memory::{DeviceMemory, GuestBytes, IO_APIC, Ram};
use weft_platform::acpi::EVENT_LINE;
use weft_platform::acpi::power::{PORTS as POWER_PORTS, PowerDevice, PowerRequest};
use weft_platform::bus::{Bus, BusDevice};
use weft_platform::clock::{Alarms, Clock, KvmClock, Source};
use weft_platform::devices::cmos::CmosClock;
use weft_platform::devices::debug_exit::DebugExit;
use weft_platform::devices::keyboard::KeyboardController;
use weft_platform::devices::serial::SerialPort;
use weft_platform::devices::system_control::SystemControl;
use weft_platform::devices::{cmos, debug_exit, keyboard, serial, system_control};
use weft_platform::interrupts::{IO_APIC_SIZE, InterruptRouter, VcpuLocation};
use weft_vcpu::CpuState;

use super::back_end::Chosen;
use super::checkpoint::read_pages;
use super::configuration::Configuration;
use super::control_loop::ControlLoop;
use super::fault_reports::FaultReports;
use super::handle::Handle;
use super::lifecycle::{End, Stage};
use super::machine_core::MachineCore;
use super::owner::Owner;
use super::part::{MachinePart, NamedPart};
use super::pci_devices::PciDevices;
use super::serial_console::{SerialEnds, SerialInput, SharedOutput};
use super::shutdown::{Ending, OwnerChannel, Shutdown};
use super::sources::with_sources;
use super::wanted_moves::WantedMoves;
use super::{MachineError, MachineIo, OpenDisks, OpenSwitches};
use crate::page_writer::PageWriter;
use crate::vcpu::environment::VcpuContext;
use crate::vcpu::following::{AskToMove, FaultsOfVcpus, Followers};
use crate::vcpu::runner::{Event, Listener, Runner, RunnerOptions};
use crate::vcpu::scheduler::TurnScheduler;
use crate::vcpu::site::SliceVcpus;

/// The arguments of [`assemble`].
pub(super) struct Plan<'a> {
    pub configuration: &'a Configuration,
    pub io: MachineIo,
    pub ram: Ram,
    pub chosen: Chosen,
    /// The first vCPU's state at its first instruction, if that vCPU is here.
    pub bootstrap: Option<CpuState>,
    /// On the primary: guest-physical addresses to which all slices subscribe.
    pub updated: Vec<Range<u64>>,
    pub channel: OwnerChannel,
    /// `None` if the machine has one slice that stays alone.
    pub slice: Option<Arc<Slice>>,
}

/// An assembled machine, before its owner's thread is started.
pub(super) struct Assembled {
    pub owner: Owner,
    pub handle: Handle,
}

/// Makes a machine's parts and starts their threads. No guest instruction is executed.
pub(super) fn assemble(plan: Plan<'_>) -> Result<Assembled, MachineError> {
    let configuration = plan.configuration;
    let chosen = plan.chosen;
    let source = chosen.source(configuration.deterministic);
    let OwnerChannel {
        shutdown,
        flag: ending_flag,
        to_owner,
        inputs,
    } = plan.channel;
    let slice = plan.slice;
    let checkpoint = plan.io.checkpoint;
    let topology = slice.as_ref().map(|slice| slice.topology());
    let core = MachineCore {
        memory: match &slice {
            Some(slice) => DeviceMemory::shared(&plan.ram, slice.memory().clone()),
            None => DeviceMemory::whole(&plan.ram),
        },
        ram: plan.ram,
        mmio: Bus::default(),
        ports: Bus::default(),
        interrupts: InterruptRouter::of_slice(configuration.cpus, topology),
        clock: Arc::new(Clock::new(source, chosen.back_end.tsc_hz())),
        shutdown,
    };
    let mut parts: Vec<NamedPart> = vec![
        ("clock".into(), MachinePart::Clock(core.clock.clone())),
        (
            "io-apic".into(),
            MachinePart::IoApic(core.interrupts.clone()),
        ),
    ];
    let is_primary = slice.as_ref().is_none_or(|slice| slice.is_primary());
    let output = SharedOutput::new(plan.io.serial);
    let small = small_devices(&core, configuration, (&output, slice.as_ref()), &mut parts)?;
    let opened = (&plan.io.disks, &plan.io.switches);
    // The registers of all other devices are on the primary.
    let mut devices = None;
    if is_primary {
        let pci = PciDevices {
            core: &core,
            configuration,
            opened,
            observer: chosen.observer.clone(),
            parts: &mut parts,
            slice: slice.as_ref(),
            attached: 0,
        };
        devices = Some(pci.attach(plan.io.console)?);
    } else if let Some(slice) = &slice {
        let served = serve_queues(&core, configuration, &chosen, (slice, opened))?;
        let served = MachinePart::ServedQueues(served);
        parts.push((format!("slice{}.devices", slice.number()), served));
    }

    let scheduler =
        (source == Source::Counted).then(|| Arc::new(TurnScheduler::new(core.interrupts.clone())));
    if let Some(scheduler) = &scheduler {
        parts.push((
            "scheduler".into(),
            MachinePart::Scheduler(scheduler.clone()),
        ));
    }
    let alarms = match scheduler {
        Some(_) => None,
        None => Some(alarms(&core, configuration.cpus)?),
    };
    let context = VcpuContext {
        mmio: core.mmio.clone(),
        ports: core.ports.clone(),
        interrupts: core.interrupts.clone(),
        clock: core.clock.clone(),
        kvmclock: Arc::new(KvmClock::new(
            core.clock.clone(),
            guest_bytes(&core.ram, slice.as_ref()),
            configuration.cpus,
        )),
        alarms: alarms.clone(),
        ending: ending_flag,
    };
    let listener = listener(&core.shutdown);
    let first_instruction = Arc::<OnceLock<Instant>>::default();
    let mut bootstrap = plan.bootstrap;
    // A slice that joins has none at first, also if it has the number of one that left.
    let joins = slice.as_ref().is_some_and(|slice| slice.joins());
    let here = match joins {
        true => Vec::new(),
        false => core.interrupts.vcpus_here(),
    };
    // Those that may come later have their threads here from the start: confined, this
    // process can make no more.
    let runners = (0..configuration.cpus)
        .map(|id| {
            let vcpu = chosen.back_end.create(id)?;
            Ok(Runner::start(RunnerOptions {
                id,
                vcpu,
                bootstrap: id == 0,
                initial: bootstrap.take().filter(|_| id == 0),
                away: !here.contains(&id),
                context: context.clone(),
                scheduler: scheduler.clone(),
                listener: listener.clone(),
                kind: chosen.kind,
                first_instruction: first_instruction.clone(),
            })?)
        })
        .collect::<Result<Vec<_>, MachineError>>()?;

    let wanted_moves = Arc::new(WantedMoves::new(to_owner.clone()));
    let followers = slice.as_ref().and_then(|slice| {
        // Those that join may be where a vCPU wants to go, too.
        let scope = (configuration.cpus, slice.number(), slice.numbers());
        let ask = ask_to_move(slice, &wanted_moves);
        Followers::new(configuration.follow, scope, ask)
    });
    let ending = Arc::<Ending>::default();
    let (mut console, mut balloon) = (None, None);
    let mut take_down: Box<dyn FnOnce() + Send> = Box::new(|| {});
    if let Some(pci) = devices {
        (console, balloon) = (pci.console, pci.balloon);
        take_down = Box::new(move || pci.root.clear());
    }
    let input = SerialInput {
        port: small.serial.clone(),
        slice: slice.clone(),
    };
    let cuts = chosen.back_end.name() != "kvm";
    let writer = PageWriter::start(core.ram.clone(), slice.clone(), cuts)?;
    let handle = Handle {
        writer: writer.clone(),
        owner: to_owner,
        ending: ending.clone(),
        serial: is_primary.then_some(input),
        console,
        balloon,
        first_instruction,
        slice: slice.clone(),
    };
    let (mut timekeeper, mut saved) = (None, None);
    if let Some(slice) = &slice {
        if configuration.trace {
            slice.memory().trace_always();
        }
        if let Some(followers) = &followers {
            let observer = FaultsOfVcpus(followers.clone());
            slice.memory().observe_faults(Box::new(observer));
        }
        let vcpus = Arc::new(SliceVcpus {
            followers: followers.clone(),
            ports: runners.iter().map(|runner| runner.port().clone()).collect(),
            interrupts: core.interrupts.clone(),
            clock: core.clock.clone(),
            memory: slice.memory().clone(),
        });
        let serial = Arc::new(SerialEnds {
            port: small.serial,
            output,
        });
        let joined = join(slice, &core, vcpus, serial, wanted_moves.clone())?;
        timekeeper = Some(joined.timekeeper.clone());
        // With its links read, a slice that takes long to read its part is not lost.
        if let Some(restore) = &checkpoint.restore {
            let identity = restore.set.manifest().identity;
            let pages = read_pages(&core.ram, Some(slice), restore)?;
            // Of a set with files elsewhere node 0 says first who has them.
            if !pages.as_ref().is_some_and(|pages| pages.is_apart()) {
                writer.load(identity);
            }
            saved = pages.map(|pages| (pages, identity));
        }
        obey(slice, joined, &handle)?;
    } else if let Some(restore) = &checkpoint.restore {
        read_pages(&core.ram, None, restore)?;
    }
    let owner = Owner {
        inputs,
        shutdown: core.shutdown.clone(),
        ending: ending.clone(),
        runners,
        parts,
        clock: core.clock.clone(),
        alarms,
        back_end: chosen.back_end.name(),
        memory_bytes: core.ram.size(),
        stage: Stage::Built,
        collected: None,
        reports: FaultReports::new(configuration.trace),
        power: small.power,
        take_down,
        updated: plan.updated,
        slice,
        timekeeper,
        wanted_moves,
        followers,
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        ram: core.ram.clone(),
        channels: checkpoint.channels,
        writer,
        saved: saved.filter(|_| is_primary),
        given: None,
        unsettled: None,
    };
    Ok(Assembled { owner, handle })
}

/// Starts a secondary's part of the devices: its disks' files, and the queues that it serves.
fn serve_queues(
    core: &MachineCore,
    configuration: &Configuration,
    chosen: &Chosen,
    (slice, opened): (&Arc<Slice>, (&OpenDisks, &OpenSwitches)),
) -> Result<Arc<ServedQueues>, MachineError> {
    let tools = Tools {
        memory: core.memory.clone(),
        observer: chosen.observer.clone(),
        sink: core.interrupts.clone(),
    };
    let devices = (0..).zip(configuration.devices().of_slice(slice, opened)?);
    let devices = devices.map(|(number, (placement, device))| (number, placement, device));
    let remote = slice.remote_devices().clone();
    let counters = QueueBackEnd::start(remote, tools, devices.collect());
    Ok(Arc::new(counters.map_err(MachineError::RemoteDevices)?))
}

/// Guest memory for devices and clocks, which write it from threads that are not vCPUs.
fn guest_bytes(ram: &Ram, slice: Option<&Arc<Slice>>) -> Arc<dyn GuestBytes> {
    match slice {
        Some(slice) => slice.memory().clone(),
        None => Arc::new(ram.clone()),
    }
}

/// Connects a slice to its machine: the machine's end is sent to the other slices and theirs
/// ends it, and a secondary starts to carry out commands.
fn join(
    slice: &Arc<Slice>,
    core: &MachineCore,
    vcpus: Arc<SliceVcpus>,
    serial: Arc<SerialEnds>,
    wanted_moves: Arc<WantedMoves>,
) -> Result<SliceHandles, MachineError> {
    let told = slice.clone();
    core.shutdown.listen(Box::new(move |end| {
        told.end_waits();
        if !told.is_primary() {
            // `End` always serialises.
            told.send_end(serde_json::to_vec(end).unwrap_or_default());
        }
    }));
    let (failed, ended) = (core.shutdown.clone(), core.shutdown.clone());
    let joined = slice.join(SliceWiring {
        interrupts: core.interrupts.clone(),
        mmio: core.mmio.clone(),
        ports: core.ports.clone(),
        clock: core.clock.clone(),
        serial,
        vcpus,
        wants_move: Box::new(move |from, vcpu, location| wanted_moves.ask(from, vcpu, location)),
        on_failure: Arc::new(move |reason| failed.end(End::Failed { reason })),
        ended: Box::new(move |from, json| {
            ended.end(match serde_json::from_slice(&json) {
                Ok(End::Failed { reason }) => End::Failed {
                    reason: format!("slice {from}: {reason}"),
                },
                Ok(end) => end,
                Err(error) => End::Failed {
                    reason: format!("slice {from} ended in an unknown way: {error}"),
                },
            });
        }),
    })?;
    Ok(joined)
}

/// What a vCPU of this slice asks with: the owner is on the primary.
fn ask_to_move(slice: &Arc<Slice>, wanted_moves: &Arc<WantedMoves>) -> AskToMove {
    // The slice has the memory, which has this.
    let (slice, wanted_moves) = (Arc::downgrade(slice), wanted_moves.clone());
    Box::new(move |vcpu, to| {
        let Some(slice) = slice.upgrade() else {
            return;
        };
        let Some(known) = slice.locations().of(vcpu) else {
            return;
        };
        let location = VcpuLocation {
            slice: to,
            epoch: known.epoch + 1,
        };
        match slice.is_primary() {
            true => wanted_moves.ask(slice.number(), vcpu, location),
            false => slice.ask_to_move(vcpu, location),
        }
    })
}

/// Starts the thread of a secondary that takes the primary's commands.
fn obey(slice: &Arc<Slice>, joined: SliceHandles, handle: &Handle) -> Result<(), MachineError> {
    if !slice.is_primary() {
        let control_loop = ControlLoop {
            slice: slice.clone(),
            timekeeper: joined.timekeeper,
            handle: handle.clone(),
            commands: joined.commands,
        };
        weft_confine::spawn("weft-control", ThreadKind::Device, move || {
            control_loop.run()
        })
        .map_err(MachineError::Thread)?;
    }
    Ok(())
}

/// The small devices that the machine's handle and owner use.
struct SmallDevices {
    serial: Arc<SerialPort>,
    power: Arc<PowerDevice>,
}

/// Puts the platform's devices on the buses of a slice, which may have them or not.
struct PlatformBus<'a> {
    core: &'a MachineCore,
    /// `None` if the machine has one slice that stays alone.
    slice: Option<&'a Arc<Slice>>,
}

impl PlatformBus<'_> {
    fn insert(
        &self,
        space: Space,
        range: Range<u64>,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), MachineError> {
        let bus = match space {
            Space::Memory => &self.core.mmio,
            Space::Port => &self.core.ports,
        };
        let device = match self.slice {
            Some(slice) => slice.platform_registers((space, range.start), device),
            None => device,
        };
        Ok(bus.insert(range, device)?)
    }
}

fn small_devices(
    core: &MachineCore,
    configuration: &Configuration,
    (output, slice): (&SharedOutput, Option<&Arc<Slice>>),
    parts: &mut Vec<NamedPart>,
) -> Result<SmallDevices, MachineError> {
    let bus = PlatformBus { core, slice };
    let registers = IO_APIC..IO_APIC + IO_APIC_SIZE;
    bus.insert(Space::Memory, registers, core.interrupts.clone())?;
    let written: Box<dyn Write + Send> = match slice.filter(|slice| !slice.is_primary()) {
        Some(slice) => Box::new(slice.remote_console()),
        None => Box::new(output.clone()),
    };
    let serial = Arc::new(SerialPort::new(Arc::new(core.pin(serial::PIN)?), written));
    bus.insert(Space::Port, serial::PORTS, serial.clone())?;
    parts.push(("serial".into(), MachinePart::Serial(serial.clone())));

    let clock = Arc::new(CmosClock::new(core.clock.clone()));
    bus.insert(Space::Port, cmos::PORTS, clock.clone())?;
    parts.push(("cmos".into(), MachinePart::Cmos(clock)));

    let shutdown = core.shutdown.clone();
    let power = move |request| {
        shutdown.end(match request {
            PowerRequest::Off => End::PoweredOff,
            PowerRequest::Reset => End::Reset,
        });
    };
    let line = core.pin(EVENT_LINE as usize)?;
    let power = Arc::new(PowerDevice::new(Box::new(line), Box::new(power)));
    let ports = u64::from(POWER_PORTS.start)..u64::from(POWER_PORTS.end);
    bus.insert(Space::Port, ports, power.clone())?;
    parts.push(("power".into(), MachinePart::Power(power.clone())));

    let shutdown = core.shutdown.clone();
    let keyboard = KeyboardController::new(Box::new(move || shutdown.end(End::Reset)));
    bus.insert(Space::Port, keyboard::PORTS, Arc::new(keyboard))?;
    let shutdown = core.shutdown.clone();
    let control = SystemControl::new(Box::new(move || shutdown.end(End::Reset)));
    bus.insert(Space::Port, system_control::PORTS, Arc::new(control))?;
    if configuration.debug_exit {
        let shutdown = core.shutdown.clone();
        let exit = DebugExit::new(Box::new(move |code| shutdown.end(End::DebugExit { code })));
        bus.insert(Space::Port, debug_exit::PORTS, Arc::new(exit))?;
    }
    Ok(SmallDevices { serial, power })
}

fn alarms(core: &MachineCore, cpus: u32) -> Result<Arc<Alarms>, MachineError> {
    let interrupts = core.interrupts.clone();
    let ring = Box::new(move |vcpu| {
        if let Some(posted) = interrupts.posted(vcpu) {
            posted.waker.ring();
        }
    });
    let alarms = Alarms::start(core.clock.clone(), cpus, ring).map_err(MachineError::Thread)?;
    Ok(Arc::new(alarms))
}

/// Ends the machine at an event of a vCPU.
fn listener(shutdown: &Arc<Shutdown>) -> Listener {
    let shutdown = shutdown.clone();
    Arc::new(move |cpu, event| {
        shutdown.end(match event {
            Event::TripleFault => End::TripleFault { cpu },
            Event::Init => End::Reset,
            Event::Failed(error) => End::Failed {
                reason: format!("vCPU {cpu}: {}", with_sources(&error)),
            },
        });
    })
}
