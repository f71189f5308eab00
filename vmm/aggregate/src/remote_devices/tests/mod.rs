//! Two slices in one process, joined by links that may be slow; a driver on each,
//! which reaches RAM and registers as its slice does.

mod disks;
pub(super) mod networks;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use weft_guest_memory::{DeviceMemory, Ram};
use weft_platform::clock::{Clock, Reference, Source, measure_host_tsc};
use weft_platform::interrupts::{InterruptRouter, MessageSink};
use weft_test_support::Random;
use weft_virtio::fake_driver::{Buffer, Driver, DriverQueue, Machine, Messages, PATIENCE};
use weft_virtio::{Attach, VirtioDevice};
use weft_wire::halves::{self, HalvesConfig, Receiver, Sender};

use super::*;
use crate::commands::{SliceCommand, SliceReply};
use crate::queue_moves::move_queues;
use crate::vcpu_moves::double::SiteDouble;
use crate::{Placement, Slice, SliceLinks, SliceOptions, SliceWiring};

const LEASE: Duration = Duration::from_secs(20);

/// One end of a link that delays each chunk of bytes by a random time.
fn slow(end: UnixStream, seed: u64, delay: Duration) -> UnixStream {
    if delay.is_zero() {
        return end;
    }
    let (inside, outside) = UnixStream::pair().unwrap();
    for (mut from, mut to, seed) in [
        (
            end.try_clone().unwrap(),
            outside.try_clone().unwrap(),
            seed + 1,
        ),
        (outside, end, seed + 2),
    ] {
        std::thread::spawn(move || {
            let mut random = Random::new(seed);
            let mut buffer = [0; 8192];
            while let Ok(count @ 1..) = from.read(&mut buffer) {
                std::thread::sleep(delay * random.below(256) as u32 / 256);
                if to.write_all(&buffer[..count]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(std::net::Shutdown::Both);
        });
    }
    inside
}

fn open_link(end: UnixStream) -> (Sender, Receiver) {
    halves::open(HalvesConfig {
        socket: end.into(),
        keys: None,
        lease: LEASE,
        spin: Duration::ZERO,
        name: "test".into(),
    })
    .unwrap()
}

/// A device with the slices that serve it, as one slice has it.
type Placed = (QueuePlacement, Box<dyn VirtioDevice>);

struct Rig {
    slices: Vec<Arc<Slice>>,
    machines: Vec<Machine>,
    transport: Arc<Transport>,
    /// Of slice 1's interrupts.
    far: Arc<Messages>,
    failures: Arc<Mutex<Vec<String>>>,
}

/// Two slices of a vCPU each.
const CPUS: u32 = 2;

fn placement() -> Placement {
    Placement::deal(2, CPUS, 128 << 20).unwrap()
}

impl Rig {
    /// Each slice opens its part of the device of number 0, that which has it first.
    fn new(owner: usize, delay: Duration, open: &mut dyn FnMut(&Arc<Slice>) -> Placed) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let seed = NEXT.fetch_add(1, Ordering::Relaxed);
        let failures = Arc::<Mutex<Vec<String>>>::default();
        let (one, other) = UnixStream::pair().unwrap();
        let ends = [slow(one, seed.into(), delay), other];
        let made: Vec<_> = (0..2)
            .zip(ends)
            .map(|(number, end)| {
                let mut links = vec![Some(open_link(end)), None];
                links.rotate_right(1 - number);
                let ram = Ram::new(128 << 20).unwrap();
                let links = SliceLinks {
                    number,
                    links,
                    lease: LEASE,
                    delay_max: Duration::ZERO,
                    joins: None,
                    lent: None,
                    reference: Reference::here(),
                };
                let told = failures.clone();
                let on_failure: crate::OnFailure =
                    Arc::new(move |reason| told.lock().unwrap().push(reason));
                let slice = Slice::new(
                    SliceOptions {
                        placement: placement(),
                        spare_bytes: None,
                        exchanges: true,
                    },
                    links,
                    &ram,
                    on_failure.clone(),
                );
                (slice, ram, on_failure)
            })
            .collect();
        let far = Arc::new(Messages::default());
        // Who has the device describes it before the other one asks.
        let mut devices = [None, None];
        for slice in [owner, 1 - owner] {
            devices[slice] = Some(open(&made[slice].0));
        }
        let mut machines: Vec<Machine> = Vec::new();
        let mut transport = None;
        for (number, ((slice, ram, on_failure), device)) in made.iter().zip(devices).enumerate() {
            let memory = DeviceMemory::shared(ram, slice.memory().clone());
            let mmio = (number == 1).then(Bus::default);
            let apart = (number as u64) << 23;
            let machine = Machine::of_slice(ram.clone(), memory.clone(), mmio, apart);
            let (placement, device) = device.unwrap();
            let remote = slice.remote_devices().clone();
            if number == 0 {
                let route_observer = Some(remote.route_publisher(0));
                let groups = placement.groups();
                let device = PartitionedDevice::new(device, 0, groups, remote.clone()).unwrap();
                let attach = Attach {
                    memory,
                    observer: None,
                    route_observer,
                };
                let made = Transport::attach(&machine.root, &attach, Box::new(device)).unwrap();
                remote.add_transport(0, &made);
                transport = Some(made);
            } else {
                let tools = Tools {
                    memory,
                    observer: None,
                    sink: far.clone() as Arc<dyn MessageSink>,
                };
                QueueBackEnd::start(remote, tools, vec![(0, placement, device)]).unwrap();
            }
            let interrupts = InterruptRouter::of_slice(2, Some(slice.topology()));
            let wiring = SliceWiring {
                vcpus: SiteDouble::new(interrupts.clone()),
                interrupts,
                mmio: machine.mmio.clone(),
                ports: machine.ports.clone(),
                serial: Arc::new(crate::registers::NoSerial),
                clock: Arc::new(Clock::new(Source::Host, measure_host_tsc())),
                on_failure: on_failure.clone(),
                wants_move: Box::new(|_, _, _| {}),
                ended: Box::new(|_, _| {}),
            };
            drop(slice.join(wiring).unwrap());
            machines.push(machine);
        }
        Self {
            slices: made.into_iter().map(|(slice, ..)| slice).collect(),
            machines,
            transport: transport.unwrap(),
            far,
            failures,
        }
    }

    /// The device, ready, as slice 0's driver has it; and what a driver elsewhere
    /// needs to go on.
    fn started(&self) -> (Driver<'_>, Vec<DriverQueue>) {
        let mut driver = Driver::find(&self.machines[0], self.transport.slot());
        driver.start(u64::MAX, 64);
        let queues = driver.queues.clone();
        (driver, queues)
    }

    /// The driver on slice 1.
    fn other(&self, queues: Vec<DriverQueue>) -> Driver<'_> {
        let mut driver = Driver::find(&self.machines[1], self.transport.slot());
        driver.adopt(queues);
        driver
    }

    /// Queue `group` is served on slice `to` from now on. The device is paused meanwhile, and no
    /// message of slice 1 is on its way.
    fn move_queue(&self, group: usize, to: usize) {
        self.transport.pause(PATIENCE).unwrap();
        let driver = Driver::find(&self.machines[1], self.transport.slot());
        driver.device(0, &mut [0; 2]);
        let of = |slice: usize| self.slices[slice].remote_devices();
        let (epoch, from) = of(0).queue_servers();
        let mut servers = from.clone();
        servers.get_mut(&0).unwrap()[group] = to;
        let went = move_queues(
            (epoch, &from),
            &servers,
            &[0, 1].into(),
            &mut |slice, command| {
                match command {
                    SliceCommand::CheckQueues { epoch, servers } => {
                        of(slice).check_queues(*epoch, servers)?;
                    }
                    SliceCommand::PlaceQueues { epoch, servers } => {
                        of(slice).place_queues(*epoch, servers)?;
                    }
                    // The next register access of slice 1 is behind what it sent.
                    SliceCommand::Settle => driver.device(0, &mut [0; 2]),
                    other => panic!("{other:?}"),
                }
                Ok(SliceReply::Done)
            },
        );
        assert_eq!(went, Ok(epoch + 1));
        of(0).publish_routes();
        self.transport.resume();
    }

    /// What slices said of one another so far.
    fn failures(&self) -> Vec<String> {
        self.failures.lock().unwrap().clone()
    }

    fn end(self) {
        // That the links end is no failure.
        assert_eq!(self.failures(), Vec::<String>::new());
        for slice in &self.slices {
            slice.close();
        }
        drop(self.transport);
    }
}

fn buffer(machine: &Machine, bytes: &[u8], writable: bool) -> Buffer {
    Buffer {
        address: machine.buffer(bytes),
        length: bytes.len() as u32,
        writable,
    }
}
