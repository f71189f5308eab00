//! vCPUs that move between the slices of a machine in one process, over real links and
//! with real threads. The vCPUs are scripted: two of them send one interrupt to and fro,
//! and each has a timer that it sets again whenever it fires. So an interrupt or a tick
//! that is lost stops them, and one that comes twice is counted.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use weft_aggregate::devices::Disk;
use weft_aggregate::{Share, SliceOptions};
use weft_guest_memory::{GuestBytes, LOCAL_APIC, memory_file};
use weft_platform::clock::{Reference, host_tsc};
use weft_vcpu::{BackEnd, Environment, Exit, Kick, Vcpu, VcpuError};
use weft_wire::halves::{self, HalvesConfig};

use super::*;
use crate::move_report::VcpuMoveReport;

mod devices;
mod disks;

use devices::Unused;

pub(super) const LEASE: Duration = Duration::from_secs(20);
const SHARE_BYTES: u64 = 64 << 20;
const TIMER_VECTOR: u8 = 0xec;
const CALL_VECTOR: u8 = 0xfb;
/// Where the steps that a vCPU executed are, and whether it has begun.
const STEPS: usize = 0;
const BEGUN: usize = 1;
/// In ticks of the TSC.
const TICK: u64 = 200_000;

/// What a vCPU did, wherever it was.
#[derive(Default)]
struct Seen {
    /// Its code runs.
    inside: AtomicBool,
    steps: AtomicU64,
    timers: AtomicU64,
    calls: AtomicU64,
}

/// All that is seen of both.
#[derive(Default)]
pub(super) struct Judge {
    vcpus: [Seen; 2],
    faults: Mutex<Vec<String>>,
    /// vCPU 0 writes to the serial port and programs the I/O APIC, and vCPU 1 takes its
    /// interrupts.
    uses_devices: bool,
    disk: Option<Disk>,
    /// Both vCPUs use it; otherwise none does.
    uses_disk: bool,
    queues: disks::Queues,
    /// Presses of the power button that the guest has seen.
    presses: AtomicU64,
    /// What the guest read from the serial port.
    typed: Mutex<Vec<u8>>,
    /// The guest is about to read more of it.
    reads: AtomicBool,
    /// Bytes that vCPU 0 wrote to the serial port.
    written: AtomicU64,
}

impl Judge {
    fn fault(&self, what: String) {
        self.faults.lock().unwrap().push(what);
    }

    fn counts(&self, of: impl Fn(&Seen) -> &AtomicU64) -> [u64; 2] {
        [0, 1].map(|vcpu| of(&self.vcpus[vcpu]).load(Ordering::SeqCst))
    }

    /// Nothing was lost or came twice so far.
    pub(super) fn check(&self) {
        let faults = self.faults.lock().unwrap();
        assert!(faults.is_empty(), "{faults:?}");
    }

    /// Waits until both have taken `more` interrupts of each kind.
    pub(super) fn wait_for(&self, more: u64) {
        let before = (
            self.counts(|seen| &seen.timers),
            self.counts(|seen| &seen.calls),
        );
        let until = Instant::now() + PATIENCE;
        loop {
            let now = (
                self.counts(|seen| &seen.timers),
                self.counts(|seen| &seen.calls),
            );
            let enough = |now: [u64; 2], before: [u64; 2]| {
                now.iter()
                    .zip(before)
                    .all(|(now, before)| *now >= before + more)
            };
            if enough(now.0, before.0) && enough(now.1, before.1) {
                return;
            }
            assert!(
                Instant::now() < until,
                "timers and calls: {before:?}, then {now:?}"
            );
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

#[derive(Default)]
struct Flag(AtomicBool);

impl Kick for Flag {
    fn kick(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct Players {
    judge: Arc<Judge>,
    /// The slice's.
    memory: Arc<dyn GuestBytes>,
}

impl BackEnd for Players {
    fn name(&self) -> &'static str {
        "players"
    }

    fn tsc_hz(&self) -> u64 {
        2_000_000_000
    }

    fn create(&self, id: u32) -> Result<Box<dyn Vcpu>, VcpuError> {
        Ok(Box::new(Player {
            id,
            state: CpuState::reset(),
            judge: self.judge.clone(),
            memory: self.memory.clone(),
            kicked: Arc::default(),
        }))
    }
}

struct Player {
    id: u32,
    state: CpuState,
    judge: Arc<Judge>,
    memory: Arc<dyn GuestBytes>,
    kicked: Arc<Flag>,
}

impl Player {
    fn seen(&self) -> &Seen {
        &self.judge.vcpus[self.id as usize]
    }

    fn command(&self, environment: &mut dyn Environment, low: u32) {
        let other = 1 - self.id;
        environment.mmio_write(LOCAL_APIC + 0x310, &(other << 24).to_le_bytes());
        environment.mmio_write(LOCAL_APIC + 0x300, &low.to_le_bytes());
    }

    fn set_timer(&self, environment: &mut dyn Environment) {
        let deadline = host_tsc()
            .wrapping_add(self.state.tsc_offset)
            .wrapping_add(TICK);
        environment.msr_write(0x6e0, deadline);
    }

    fn begin(&mut self, environment: &mut dyn Environment) {
        self.state.registers[BEGUN] = 1;
        environment.mmio_write(LOCAL_APIC + 0xf0, &0x1ff_u32.to_le_bytes());
        let timer = 1 << 18 | u32::from(TIMER_VECTOR);
        environment.mmio_write(LOCAL_APIC + 0x320, &timer.to_le_bytes());
        self.set_timer(environment);
        if self.id == 0 {
            if self.judge.uses_devices {
                devices::begin(environment);
            }
            if self.judge.uses_disk {
                disks::begin(&self.judge, environment);
            }
            // INIT and start-up; the other then throws the first ball.
            self.command(environment, 0xc500);
            self.command(environment, 0x69a);
        } else {
            self.command(environment, 0x4000 | u32::from(CALL_VECTOR));
        }
        if self.judge.uses_disk {
            disks::ask(self, environment, 0);
        }
    }

    fn take_interrupts(&mut self, environment: &mut dyn Environment) {
        while let Some(vector) = environment.interrupt_take() {
            self.state.halted = false;
            // A level is ended after its device was served.
            if vector != devices::POWER {
                environment.mmio_write(LOCAL_APIC + 0xb0, &[0; 4]);
            }
            match vector {
                TIMER_VECTOR => {
                    self.seen().timers.fetch_add(1, Ordering::SeqCst);
                    self.set_timer(environment);
                }
                CALL_VECTOR => {
                    self.seen().calls.fetch_add(1, Ordering::SeqCst);
                    if self.judge.uses_devices && self.id == 0 {
                        devices::write(&self.judge, environment);
                    }
                    self.command(environment, 0x4000 | u32::from(CALL_VECTOR));
                }
                devices::POWER if self.id == 1 => devices::see_button(&self.judge, environment),
                vector if u32::from(vector) == u32::from(disks::FIRST) + self.id => {
                    disks::take(self, environment);
                }
                devices::SERIAL if self.id == 1 => devices::read(&self.judge, environment),
                other => self.judge.fault(format!("vector {other:#x}")),
            }
        }
    }

    fn play(&mut self, environment: &mut dyn Environment) -> Exit {
        loop {
            if self.kicked.0.swap(false, Ordering::SeqCst) {
                return Exit::Kicked;
            }
            if self.state.registers[BEGUN] == 0 {
                self.begin(environment);
            }
            self.take_interrupts(environment);
            if self.state.halted {
                return Exit::Halted;
            }
            let steps = self.seen().steps.fetch_add(1, Ordering::SeqCst);
            if steps != self.state.registers[STEPS] {
                let own = self.state.registers[STEPS];
                self.judge
                    .fault(format!("vCPU {}: {own} steps of {steps}", self.id));
            }
            self.state.registers[STEPS] = steps + 1;
            self.state.halted = steps % 50 == 49;
        }
    }
}

impl Vcpu for Player {
    fn run(&mut self, environment: &mut dyn Environment) -> Result<Exit, VcpuError> {
        if self.seen().inside.swap(true, Ordering::SeqCst) {
            self.judge
                .fault(format!("two copies of vCPU {} run", self.id));
        }
        let exit = self.play(environment);
        self.seen().inside.store(false, Ordering::SeqCst);
        Ok(exit)
    }

    fn save(&self) -> Result<CpuState, VcpuError> {
        Ok(self.state.clone())
    }

    fn restore(&mut self, state: &CpuState) -> Result<(), VcpuError> {
        self.state = state.clone();
        Ok(())
    }

    fn set_tsc_offset(&mut self, offset: u64) -> Result<(), VcpuError> {
        self.state.tsc_offset = offset;
        Ok(())
    }

    fn kicker(&self) -> Arc<dyn Kick> {
        self.kicked.clone()
    }
}

type Ends = BTreeMap<(usize, usize), UnixStream>;

/// A machine of two vCPUs; `cpus`: how many are on each slice.
pub(super) struct Slices {
    pub machines: Vec<Machine>,
    /// Their memory files.
    pub memory: Vec<File>,
    pub judge: Arc<Judge>,
    /// Slice 0's.
    pub console: Kept,
}

fn sockets(count: usize) -> Ends {
    let mut ends = Ends::new();
    for one in 0..count {
        for other in one + 1..count {
            let (near, far) = UnixStream::pair().unwrap();
            ends.insert((one, other), near);
            ends.insert((other, one), far);
        }
    }
    ends
}

impl Slices {
    pub fn new(cpus: &[u32]) -> Self {
        Self::with(cpus, Judge::default(), None, &[])
    }

    pub fn with_disk(cpus: &[u32], disk: Disk) -> Self {
        let judge = Judge {
            disk: Some(disk),
            ..Judge::default()
        };
        Self::with(cpus, judge, None, &[])
    }

    /// Each frame of the slice `late` waits for up to 5 ms before it is sent.
    pub fn with_late(cpus: &[u32], late: Option<usize>) -> Self {
        Self::with(cpus, Judge::default(), late, &[])
    }

    /// Slices whose numbers are in `strange` believe that slice 0's host is not theirs, and
    /// measure its time.
    fn on_hosts(cpus: &[u32], strange: &[usize]) -> Self {
        Self::with(cpus, Judge::default(), None, strange)
    }

    fn with(cpus: &[u32], judge: Judge, late: Option<usize>, strange: &[usize]) -> Self {
        let judge = Arc::new(judge);
        let console = Kept::default();
        let mut ends = sockets(cpus.len());
        let all_links = (0..cpus.len()).map(|number| {
            let link = |other| {
                let config = HalvesConfig {
                    socket: ends.remove(&(number, other))?.into(),
                    keys: None,
                    lease: LEASE,
                    spin: Duration::ZERO,
                    name: "test".into(),
                };
                Some(halves::open(config).unwrap())
            };
            SliceLinks {
                number,
                links: (0..cpus.len()).map(link).collect(),
                lease: LEASE,
                delay_max: match late == Some(number) {
                    true => Duration::from_millis(5),
                    false => Duration::ZERO,
                },
                joins: None,
                lent: None,
                reference: match strange.contains(&number) {
                    true => Reference {
                        boot_id: "another".into(),
                        ..Reference::here()
                    },
                    false => Reference::here(),
                },
            }
        });
        let all_links: Vec<SliceLinks> = all_links.collect();
        let memory = cpus.iter().map(|_| memory_file().unwrap());
        let memory: Vec<File> = memory.collect();
        // At once: they wait for each other's devices.
        let machines = std::thread::scope(|scope| {
            let start = |links: SliceLinks| {
                let (judge, console) = (judge.clone(), &console);
                let memory = memory[links.number].try_clone().unwrap();
                scope.spawn(move || slice_of(shares(cpus), links, judge, console, memory))
            };
            let started: Vec<_> = all_links.into_iter().map(start).collect();
            let joined = started.into_iter().map(|thread| thread.join().unwrap());
            joined.collect()
        });
        let slices = Self {
            machines,
            memory,
            judge,
            console,
        };
        ask(&slices.machines[0], MachineRequest::Run);
        slices.judge.wait_for(3);
        slices
    }

    pub fn move_vcpu(&self, vcpu: u32, to: usize) -> Result<VcpuMoveReport, Refusal> {
        self.machines[0].handle().move_vcpu(vcpu, to)
    }

    pub fn locations(&self) -> Vec<usize> {
        let status = status(&self.machines[0]);
        status
            .locations
            .iter()
            .map(|location| location.slice)
            .collect()
    }

    /// Nothing was lost, nothing came twice, and it all goes on.
    pub fn check(&self) {
        self.judge.wait_for(3);
        self.judge.check();
        // One ball: either has at most one more than the other. The two are not read at
        // one moment, so that a third look bounds how far they went meanwhile.
        let before = self.judge.counts(|seen| &seen.calls);
        let after = self.judge.counts(|seen| &seen.calls);
        assert!(
            before[0] <= after[1] + 1 && before[1] <= after[0] + 1,
            "{before:?} {after:?}"
        );
    }
}

/// Slices with `cpus` vCPUs each, and 64 MiB.
pub(super) fn shares(cpus: &[u32]) -> Vec<Share> {
    let share = |cpus: &u32| Share {
        cpus: *cpus,
        memory_bytes: SHARE_BYTES,
    };
    cpus.iter().map(share).collect()
}

pub(super) fn slice_of(
    shares: Vec<Share>,
    links: SliceLinks,
    judge: Arc<Judge>,
    console: &Kept,
    memory: File,
) -> Machine {
    let number = links.number;
    let memory_bytes = shares.iter().map(|share| share.memory_bytes).sum();
    let mut configuration = Configuration::new("none".into(), memory_bytes);
    configuration.cpus = 2;
    configuration.disks.extend(judge.disk.clone());
    configuration.slices = shares;
    let ram = Ram::of_file(memory, memory_bytes).unwrap();
    let ends = super::shutdown::OwnerChannel::new();
    let ender = ends.shutdown.clone();
    let options = SliceOptions {
        placement: configuration.placement(),
        spare_bytes: None,
        exchanges: true,
    };
    let on_failure = Arc::new(move |reason| ender.end(End::Failed { reason }));
    let slice = Slice::new(options, links, &ram, on_failure);
    let memory = slice.memory().clone();
    Machine::start(Start {
        configuration: &configuration,
        io: MachineIo {
            // That of another slice is not used.
            serial: match number {
                0 => Box::new(console.clone()),
                _ => Box::new(Unused),
            },
            console: None,
            disks: OpenDisks::default(),
            switches: Default::default(),
            checkpoint: Default::default(),
            memory: Default::default(),
        },
        ram,
        chosen: Chosen {
            back_end: Box::new(Players { judge, memory }),
            kind: ThreadKind::SoftVcpu,
            observer: None,
            reason: "a double".into(),
        },
        bootstrap: (number == 0).then(CpuState::reset),
        notes: Vec::new(),
        updated: Vec::new(),
        channel: ends,
        slice: Some(slice),
    })
    .unwrap()
}

#[test]
fn vcpus_move_hundreds_of_times_while_they_play() {
    let slices = Slices::new(&[1, 1, 0]);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |bound: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % bound
    };
    let mut moves = [0; 2];
    while moves[0] + moves[1] < 300 {
        let (vcpu, to) = (below(2) as u32, below(3) as usize);
        if slices.locations()[vcpu as usize] == to {
            continue;
        }
        let report = slices.move_vcpu(vcpu, to).unwrap();
        moves[vcpu as usize] += 1;
        assert_eq!((report.to, report.moves), (to, moves[vcpu as usize]));
        assert!(report.state_bytes < 5 << 10, "{report:?}");
        let parts = report.save_ns + report.send_ns + report.resume_ns + report.install_ns;
        assert!(parts.abs_diff(report.stopped_ns) < 10, "{report:?}");
        if (moves[0] + moves[1]) % 25 == 0 {
            slices.check();
        }
    }
    slices.check();
    let counters = slices.machines[0].handle().counters().unwrap();
    // Counted wherever they were.
    assert!(counters["vcpu0.halts"] > 0 && counters["vcpu1.interrupts"] > 0);
}

/// The vCPUs are on secondaries: the ball between them passes by the primary, whose commands
/// and their replies do not wait for it.
#[test]
fn no_interrupt_between_secondaries_is_missed_by_a_pause() {
    let slices = Slices::with_late(&[1, 1, 0], Some(1));
    slices.move_vcpu(0, 2).unwrap();
    for round in 0..60 {
        slices.judge.wait_for(1);
        ask(&slices.machines[0], MachineRequest::Pause);
        let state = serde_json::to_value(save(&slices.machines[0])).unwrap();
        let apics = [0, 1].map(|vcpu| &state["vcpus"][vcpu]["apic"]["requested"]);
        let word = usize::from(CALL_VECTOR) / 32;
        let balls = apics.map(|requested| requested[word].as_u64().unwrap() >> (CALL_VECTOR % 32));
        assert_eq!(balls.map(|word| word & 1).iter().sum::<u64>(), 1, "{round}");
        ask(&slices.machines[0], MachineRequest::Resume);
    }
    slices.check();
}

#[test]
fn a_vcpu_of_a_paused_machine_moves_and_stays_paused() {
    let slices = Slices::new(&[1, 1]);
    for round in 0..20_u32 {
        ask(&slices.machines[0], MachineRequest::Pause);
        let steps = slices.judge.counts(|seen| &seen.steps);
        let vcpu = round % 2;
        let to = 1 - slices.locations()[vcpu as usize];
        slices.move_vcpu(vcpu, to).unwrap();
        let paused = status(&slices.machines[0]);
        assert_eq!(paused.stage, Stage::Paused);
        assert_eq!(
            paused.vcpus,
            [(0, VcpuStage::Paused), (1, VcpuStage::Paused)].into()
        );
        assert_eq!(slices.judge.counts(|seen| &seen.steps), steps);
        ask(&slices.machines[0], MachineRequest::Resume);
        slices.check();
    }
}

#[test]
fn what_cannot_move_is_refused_and_runs_on() {
    let slices = Slices::new(&[1, 1]);
    for (vcpu, to, words) in [
        (2, 0, "vCPU 2 does not exist: there are 0 to 1"),
        (u32::MAX, 0, "does not exist"),
        (0, 2, "node 2 does not exist: there are 0, 1"),
        (1, 1, "vCPU 1 is on node 1 already"),
        (0, 0, "vCPU 0 is on node 0 already"),
    ] {
        let refused = slices.move_vcpu(vcpu, to).unwrap_err();
        assert!(matches!(refused, Refusal::Impossible { .. }), "{refused}");
        assert!(refused.to_string().contains(words), "{refused}");
        assert_eq!(slices.locations(), [0, 1]);
    }
    // Secondaries are not asked.
    let refused = slices.machines[1].handle().move_vcpu(0, 1).unwrap_err();
    assert!(matches!(refused, Refusal::Impossible { .. }), "{refused}");
    slices.check();
    let (machine, _) = Rig::new(1).built();
    let moved = || machine.handle().move_vcpu(0, 1).unwrap_err();
    assert!(matches!(
        moved(),
        Refusal::Stage {
            stage: Stage::Built,
            ..
        }
    ));
    ask(&machine, MachineRequest::Run);
    assert!(moved().to_string().contains("one node only"), "{}", moved());
    ask(&machine, MachineRequest::Stop);
    assert!(matches!(
        moved(),
        Refusal::Stage {
            stage: Stage::Ended,
            ..
        }
    ));
}

#[test]
fn a_move_to_or_from_a_lost_node_ends_with_its_name() {
    for round in 0..10 {
        let mut slices = Slices::new(&[1, 1, 0]);
        let handle = slices.machines[0].handle();
        // It takes vCPUs to and fro until it cannot.
        let mover = std::thread::spawn(move || {
            for number in 0.. {
                let (vcpu, to) = (number / 2 % 2, [2, 0, 2, 1][number as usize % 4]);
                if let Err(refusal) = handle.move_vcpu(vcpu, to) {
                    return refusal.to_string();
                }
            }
            unreachable!()
        });
        slices.judge.wait_for(round);
        let lost = slices.machines.remove(2);
        drop(lost);
        let refusal = mover.join().unwrap();
        let end = slices.machines[0].handle().wait(PATIENCE).unwrap();
        // It says so itself, or is found to be gone.
        let told = end == End::Stopped || end.to_string().contains("node 2");
        assert!(told, "{end}: {refusal}");
        if let End::Failed { reason } = &end {
            let late = slices.machines[0].handle().move_vcpu(1, 0).unwrap_err();
            assert!(late.to_string().contains(reason), "{late}, not {reason}");
        }
    }
}

/// The guest's clock, asked of each machine between two answers of slice 0.
fn check_clocks(slices: &Slices) {
    for machine in &slices.machines[1..] {
        let before = status(&slices.machines[0]).guest_time_ns;
        let there = status(machine).guest_time_ns;
        let after = status(&slices.machines[0]).guest_time_ns;
        // What a slice on another host may be wrong by: half of a round trip on a busy host.
        let slack = 20_000_000;
        assert!(
            (before.saturating_sub(slack)..after + slack).contains(&there),
            "{before} {there} {after}"
        );
    }
}

#[test]
fn the_timekeeper_moves_while_vcpus_run_and_while_they_stand() {
    for strange in [&[][..], &[1], &[1, 2]] {
        let slices = Slices::on_hosts(&[1, 1, 0], strange);
        let owner = slices.machines[0].handle();
        let mut from = 0;
        for (round, to) in [1, 2, 0, 2, 1, 0, 1].into_iter().enumerate() {
            let paused = round % 2 == 1;
            if paused {
                ask(&slices.machines[0], MachineRequest::Pause);
            }
            let before = status(&slices.machines[0]).guest_time_ns;
            let report = owner.move_time(to).unwrap();
            assert_eq!((report.from, report.to), (from, to));
            assert_eq!(report.epoch, round as u64 + 1);
            let after = status(&slices.machines[0]);
            if paused {
                // A user's pause stays, and guest time stands.
                assert_eq!(after.stage, Stage::Paused);
                assert_eq!(after.guest_time_ns, before);
                ask(&slices.machines[0], MachineRequest::Resume);
                assert!(status(&slices.machines[0]).guest_time_ns >= before);
            }
            slices.check();
            check_clocks(&slices);
            // A vCPU follows with its timer, which is set in the guest's time.
            let at = slices.locations()[1];
            slices.move_vcpu(1, (at + 1) % 3).unwrap();
            slices.check();
            let counters = owner.counters().unwrap();
            let corrects =
                |slice: usize| counters.contains_key(&format!("slice{slice}.clock-error-ns"));
            assert!(!corrects(to), "{counters:?}");
            from = to;
        }
    }
}

#[test]
fn a_time_that_cannot_move_stays() {
    let slices = Slices::new(&[1, 1]);
    let owner = slices.machines[0].handle();
    for (to, words) in [
        (0, "node 0 keeps the time already"),
        (2, "node 2 does not exist: there are 0, 1"),
    ] {
        let refused = owner.move_time(to).unwrap_err();
        assert!(matches!(refused, Refusal::Impossible { .. }), "{refused}");
        assert!(refused.to_string().contains(words), "{refused}");
    }
    let refused = slices.machines[1].handle().move_time(0).unwrap_err();
    assert!(matches!(refused, Refusal::Impossible { .. }), "{refused}");
    slices.check();
    let (machine, _) = Rig::new(1).built();
    let moved = || machine.handle().move_time(1).unwrap_err();
    assert!(matches!(moved(), Refusal::Stage { .. }));
    ask(&machine, MachineRequest::Run);
    assert!(moved().to_string().contains("one node only"), "{}", moved());
}

#[test]
fn a_timekeeper_that_is_lost_ends_the_machine_with_its_name() {
    for round in 0..6 {
        let mut slices = Slices::on_hosts(&[1, 1, 0], &[2]);
        let handle = slices.machines[0].handle();
        // It goes to and fro until it cannot.
        let mover = std::thread::spawn(move || {
            for number in 1_usize.. {
                if let Err(refusal) = handle.move_time([0, 2, 1][number % 3]) {
                    return refusal.to_string();
                }
            }
            unreachable!()
        });
        slices.judge.wait_for(round);
        drop(slices.machines.remove(2));
        let refusal = mover.join().unwrap();
        let end = slices.machines[0].handle().wait(PATIENCE).unwrap();
        // It says so itself, or is found to be gone.
        let told = end == End::Stopped || end.to_string().contains("node 2");
        assert!(told, "{end}: {refusal}");
    }
}

/// Slice 2 ends by itself, and its links with it: slice 1 must not take it for lost before
/// the primary has heard why.
#[test]
fn a_secondary_that_ends_is_not_reported_as_lost() {
    for round in 0..40 {
        let slices = Slices::new(&[1, 1, 0]);
        slices.check();
        let ends = slices.machines[2].handle();
        let _ = ends.request(MachineRequest::Stop);
        ends.wait_for_stop();
        let end = slices.machines[0].handle().wait(PATIENCE);
        assert_eq!(end, Some(End::Stopped), "round {round}");
    }
}
