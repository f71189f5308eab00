//! Puts a machine's parts together.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use weft_aggregate::remote_devices::{BackEndCounters, QueueBackEnd, Tools};
use weft_aggregate::{Slice, SliceWiring};
use weft_confine::ThreadKind;
use weft_guest_memory::{DeviceMemory, GuestBytes, IO_APIC, Ram};
use weft_platform::acpi::EVENT_LINE;
use weft_platform::acpi::power::{PORTS as POWER_PORTS, PowerDevice, PowerRequest};
use weft_platform::bus::Bus;
use weft_platform::clock::{Alarms, Clock, KvmClock, Source};
use weft_platform::devices::cmos::CmosClock;
use weft_platform::devices::debug_exit::DebugExit;
use weft_platform::devices::keyboard::KeyboardController;
use weft_platform::devices::serial::SerialPort;
use weft_platform::devices::system_control::SystemControl;
use weft_platform::devices::{cmos, debug_exit, keyboard, serial, system_control};
use weft_platform::interrupts::{IO_APIC_SIZE, InterruptRouter};
use weft_vcpu::CpuState;

use super::back_end::Chosen;
use super::configuration::Configuration;
use super::control_loop::ControlLoop;
use super::ender::{Ender, Ending, Ends};
use super::frame::Frame;
use super::handle::Handle;
use super::lifecycle::{End, Stage};
use super::owner::{Named, Owner, with_sources};
use super::pci_devices::PciDevices;
use super::seen::Seen;
use super::{MachineError, OpenDisks, Outside};
use crate::vcpu::environment::VcpuContext;
use crate::vcpu::runner::{Event, Listener, Runner, RunnerOptions};
use crate::vcpu::turns::Turns;

/// What is put together.
pub(super) struct Plan<'a> {
    pub configuration: &'a Configuration,
    pub outside: Outside,
    pub ram: Ram,
    pub chosen: Chosen,
    /// The first CPU at its first instruction, where it is.
    pub bootstrap: Option<CpuState>,
    /// What is kept up to date on all slices: on the primary.
    pub updated: Vec<Range<u64>>,
    pub ends: Ends,
    /// Of several.
    pub slice: Option<Arc<Slice>>,
}

/// A machine that nobody owns yet.
pub(super) struct Assembled {
    pub owner: Owner,
    pub handle: Handle,
}

/// Makes all parts and starts their threads; no guest instruction is executed.
pub(super) fn assemble(plan: Plan<'_>) -> Result<Assembled, MachineError> {
    let configuration = plan.configuration;
    let chosen = plan.chosen;
    let source = chosen.source(configuration.deterministic);
    let Ends {
        ender,
        flag: ending_flag,
        to_owner,
        inputs,
    } = plan.ends;
    let slice = plan.slice;
    let topology = slice.as_ref().map(|slice| slice.topology());
    let frame = Frame {
        memory: match &slice {
            Some(slice) => DeviceMemory::shared(&plan.ram, slice.memory().clone()),
            None => DeviceMemory::whole(&plan.ram),
        },
        ram: plan.ram,
        mmio: Bus::default(),
        ports: Bus::default(),
        interrupts: InterruptRouter::of_slice(configuration.cpus, topology),
        clock: Arc::new(Clock::new(source, chosen.back_end.tsc_hz())),
        ender,
    };
    let mut parts: Vec<Named> = vec![
        ("clock".into(), frame.clock.clone()),
        ("io-apic".into(), frame.interrupts.clone()),
    ];
    // The registers of all devices are on one slice.
    let mut devices = None;
    if slice.as_ref().is_none_or(|slice| slice.is_primary()) {
        let small = small_devices(&frame, configuration, plan.outside.serial, &mut parts)?;
        let pci = PciDevices {
            frame: &frame,
            configuration,
            opened: &plan.outside.disks,
            observer: chosen.observer.clone(),
            parts: &mut parts,
            slice: slice.as_ref(),
            attached: 0,
        };
        let (root, console) = pci.attach(plan.outside.console)?;
        devices = Some((small, root, console));
    } else if let Some(slice) = &slice {
        let served = serve_queues(&frame, configuration, &chosen, (slice, &plan.outside.disks))?;
        parts.push((format!("slice{}.devices", slice.number()), served));
    }

    let turns = (source == Source::Counted).then(|| Arc::new(Turns::new(frame.interrupts.clone())));
    if let Some(turns) = &turns {
        parts.push(("turns".into(), turns.clone()));
    }
    let alarms = match turns {
        Some(_) => None,
        None => Some(alarms(&frame, configuration.cpus)?),
    };
    let around = VcpuContext {
        mmio: frame.mmio.clone(),
        ports: frame.ports.clone(),
        interrupts: frame.interrupts.clone(),
        clock: frame.clock.clone(),
        kvmclock: Arc::new(KvmClock::new(
            frame.clock.clone(),
            guest_bytes(&frame.ram, slice.as_ref()),
            configuration.cpus,
        )),
        alarms: alarms.clone(),
        ending: ending_flag,
    };
    let listener = listener(&frame.ender);
    let first_instruction = Arc::<OnceLock<Instant>>::default();
    let mut bootstrap = plan.bootstrap;
    let runners = frame.interrupts.vcpus_here().into_iter();
    let runners = runners
        .map(|id| {
            let vcpu = chosen.back_end.create(id)?;
            Ok(Runner::start(RunnerOptions {
                id,
                vcpu,
                bootstrap: bootstrap.take(),
                around: around.clone(),
                turns: turns.clone(),
                listener: listener.clone(),
                kind: chosen.kind,
                first_instruction: first_instruction.clone(),
            })?)
        })
        .collect::<Result<Vec<_>, MachineError>>()?;

    let ending = Arc::<Ending>::default();
    let (mut serial, mut power, mut console) = (None, None, None);
    let mut take_down: Box<dyn FnOnce() + Send> = Box::new(|| {});
    if let Some((small, root, typed)) = devices {
        (serial, power, console) = (Some(small.serial), Some(small.power), typed);
        take_down = Box::new(move || root.clear());
    }
    let handle = Handle {
        owner: to_owner,
        ending: ending.clone(),
        serial,
        console,
        first_instruction,
    };
    if let Some(slice) = &slice {
        if configuration.trace {
            slice.memory().trace_always();
        }
        join(slice, &frame, &handle)?;
    }
    let owner = Owner {
        inputs,
        ender: frame.ender.clone(),
        ending: ending.clone(),
        runners,
        parts,
        clock: frame.clock.clone(),
        alarms,
        back_end: chosen.back_end.name(),
        memory_bytes: frame.ram.size(),
        stage: Stage::Built,
        collected: None,
        seen: Seen::new(configuration.trace),
        power,
        take_down,
        updated: plan.updated,
        slice,
    };
    Ok(Assembled { owner, handle })
}

/// A secondary's part in the devices: files that lie here, queues of its vCPUs.
fn serve_queues(
    frame: &Frame,
    configuration: &Configuration,
    chosen: &Chosen,
    (slice, opened): (&Arc<Slice>, &OpenDisks),
) -> Result<Arc<BackEndCounters>, MachineError> {
    let tools = Tools {
        memory: frame.memory.clone(),
        observer: chosen.observer.clone(),
        sink: frame.interrupts.clone(),
    };
    let devices = (0..).zip(configuration.devices().of_slice(slice, opened)?);
    let devices = devices.map(|(number, (placement, device))| (number, placement, device));
    let remote = slice.remote_devices().clone();
    let counters = QueueBackEnd::start(remote, tools, devices.collect());
    Ok(Arc::new(counters.map_err(MachineError::RemoteDevices)?))
}

/// The guest's memory as devices and clocks write it.
fn guest_bytes(ram: &Ram, slice: Option<&Arc<Slice>>) -> Arc<dyn GuestBytes> {
    match slice {
        Some(slice) => slice.memory().clone(),
        None => Arc::new(ram.clone()),
    }
}

/// Joins a slice to the machine here: its end is the others', its secondaries'
/// commands are carried out.
fn join(slice: &Arc<Slice>, frame: &Frame, handle: &Handle) -> Result<(), MachineError> {
    let told = slice.clone();
    frame.ender.listen(Box::new(move |end| {
        told.end_waits();
        if !told.is_primary() {
            // An end is plain data: it always has a text.
            told.send_end(serde_json::to_vec(end).unwrap_or_default());
        }
    }));
    let (failed, ended) = (frame.ender.clone(), frame.ender.clone());
    let joined = slice.join(SliceWiring {
        interrupts: frame.interrupts.clone(),
        mmio: frame.mmio.clone(),
        ports: frame.ports.clone(),
        clock: frame.clock.clone(),
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

/// Those of the small devices that are spoken to from outside.
struct Small {
    serial: Arc<SerialPort>,
    power: Arc<PowerDevice>,
}

fn small_devices(
    frame: &Frame,
    configuration: &Configuration,
    serial_output: Box<dyn std::io::Write + Send>,
    parts: &mut Vec<Named>,
) -> Result<Small, MachineError> {
    frame
        .mmio
        .insert(IO_APIC..IO_APIC + IO_APIC_SIZE, frame.interrupts.clone())?;
    let serial = Arc::new(SerialPort::new(
        Arc::new(frame.pin(serial::PIN)?),
        serial_output,
    ));
    frame.port(serial::PORTS, serial.clone())?;
    parts.push(("serial".into(), serial.clone()));

    let clock = Arc::new(CmosClock::new(frame.clock.clone()));
    frame.port(cmos::PORTS, clock.clone())?;
    parts.push(("cmos".into(), clock));

    let ender = frame.ender.clone();
    let power = move |request| {
        ender.end(match request {
            PowerRequest::Off => End::PoweredOff,
            PowerRequest::Reset => End::Reset,
        });
    };
    let line = frame.pin(EVENT_LINE as usize)?;
    let power = Arc::new(PowerDevice::new(Box::new(line), Box::new(power)));
    let ports = u64::from(POWER_PORTS.start)..u64::from(POWER_PORTS.end);
    frame.port(ports, power.clone())?;
    parts.push(("power".into(), power.clone()));

    let ender = frame.ender.clone();
    let keyboard = KeyboardController::new(Box::new(move || ender.end(End::Reset)));
    frame.port(keyboard::PORTS, Arc::new(keyboard))?;
    let ender = frame.ender.clone();
    let control = SystemControl::new(Box::new(move || ender.end(End::Reset)));
    frame.port(system_control::PORTS, Arc::new(control))?;
    if configuration.debug_exit {
        let ender = frame.ender.clone();
        let exit = DebugExit::new(Box::new(move |code| ender.end(End::DebugExit { code })));
        frame.port(debug_exit::PORTS, Arc::new(exit))?;
    }
    Ok(Small { serial, power })
}

fn alarms(frame: &Frame, cpus: u32) -> Result<Arc<Alarms>, MachineError> {
    let interrupts = frame.interrupts.clone();
    let ring = Box::new(move |vcpu| {
        if let Some(posted) = interrupts.posted(vcpu) {
            posted.waker.ring();
        }
    });
    let alarms = Alarms::start(frame.clock.clone(), cpus, ring).map_err(MachineError::Thread)?;
    Ok(Arc::new(alarms))
}

/// What vCPUs report by themselves ends the machine.
fn listener(ender: &Arc<Ender>) -> Listener {
    let ender = ender.clone();
    Arc::new(move |cpu, event| {
        ender.end(match event {
            Event::TripleFault => End::TripleFault { cpu },
            Event::Init => End::Reset,
            Event::Failed(error) => End::Failed {
                reason: format!("vCPU {cpu}: {}", with_sources(&error)),
            },
        });
    })
}
