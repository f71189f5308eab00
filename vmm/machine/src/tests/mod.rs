//! The life of machines whose vCPUs are scripted: see `scripted`.

mod checkpoint;
mod handover;
mod heirs;
mod home_model;
#[path = "../../tests/support/kept.rs"]
mod kept;
mod membership;
mod moves;
mod scripted;

use std::collections::BTreeSet;
use std::sync::mpsc;
use std::time::Duration;

use super::back_end::Chosen;
use super::*;
use kept::Kept;
use scripted::{
    CALLS, CPUS, END_AT, END_PORT, END_VALUE, NEXT, STEPS, ScriptedBackEnd, Stuck, TIMERS,
};

const PATIENCE: Duration = Duration::from_secs(20);

struct Rig {
    cpus: u32,
    deterministic: bool,
    stuck: Option<Stuck>,
    end: Option<(u64, u16, u8)>,
}

impl Rig {
    fn new(cpus: u32) -> Self {
        Self {
            cpus,
            deterministic: false,
            stuck: None,
            end: None,
        }
    }

    fn machine(&self, ram: Ram) -> (Machine, Kept) {
        let mut configuration = Configuration::new("none".into(), ram.size());
        configuration.cpus = self.cpus;
        configuration.deterministic = self.deterministic;
        configuration.debug_exit = true;
        let chosen = Chosen {
            back_end: Box::new(ScriptedBackEnd {
                deterministic: self.deterministic,
                stuck: self.stuck.clone(),
            }),
            kind: ThreadKind::SoftVcpu,
            observer: None,
            reason: "scripted".into(),
        };
        let mut bootstrap = CpuState::reset();
        bootstrap.registers[CPUS] = self.cpus.into();
        bootstrap.registers[NEXT] = 1;
        bootstrap.registers[END_PORT] = 0xf4;
        if let Some((at, port, value)) = self.end {
            bootstrap.registers[END_AT] = at;
            bootstrap.registers[END_PORT] = port.into();
            bootstrap.registers[END_VALUE] = value.into();
        }
        let kept = Kept::default();
        let io = MachineIo {
            serial: Box::new(kept.clone()),
            console: None,
            disks: OpenDisks::default(),
            switches: Default::default(),
            checkpoint: Default::default(),
            memory: Default::default(),
        };
        let machine = Machine::start(Start {
            configuration: &configuration,
            io,
            ram,
            chosen,
            bootstrap: Some(bootstrap),
            notes: Vec::new(),
            updated: Vec::new(),
            channel: OwnerChannel::new(),
            slice: None,
        })
        .unwrap();
        (machine, kept)
    }

    fn built(&self) -> (Machine, Kept) {
        self.machine(Ram::new(4 << 20).unwrap())
    }
}

fn ask(machine: &Machine, request: MachineRequest) -> MachineReply {
    let name = request.name();
    machine
        .handle()
        .request(request)
        .unwrap_or_else(|refusal| panic!("{name}: {refusal}"))
}

fn save(machine: &Machine) -> MachineState {
    *machine.handle().save().unwrap()
}

fn status(machine: &Machine) -> Status {
    machine.handle().status().unwrap()
}

fn refused(machine: &Machine, request: MachineRequest) -> Refusal {
    machine.handle().request(request).unwrap_err()
}

/// Sums of a register over all vCPUs.
fn sum(state: &MachineState, register: usize) -> u64 {
    let registers = state.vcpus.iter().map(|vcpu| vcpu.cpu.registers[register]);
    registers.fold(0, u64::wrapping_add)
}

#[test]
fn requests_are_refused_in_the_wrong_stage() {
    let (machine, _) = Rig::new(1).built();
    assert_eq!(status(&machine).stage, Stage::Built);
    for request in [MachineRequest::Pause, MachineRequest::Resume] {
        let stage = Stage::Built;
        let name = request.name();
        let refusal = Refusal::Stage {
            request: name,
            stage,
        };
        assert_eq!(refused(&machine, request), refusal);
    }
    ask(&machine, MachineRequest::Run);
    assert!(matches!(
        refused(&machine, MachineRequest::Save),
        Refusal::Stage { .. }
    ));
    assert!(matches!(
        refused(&machine, MachineRequest::Run),
        Refusal::Stage { .. }
    ));
    ask(&machine, MachineRequest::Pause);
    assert_eq!(status(&machine).stage, Stage::Paused);
    assert_eq!(status(&machine).vcpus, [(0, VcpuStage::Paused)].into());
    ask(&machine, MachineRequest::Stop);
    assert_eq!(status(&machine).end, Some(End::Stopped));
    assert!(matches!(
        refused(&machine, MachineRequest::Resume),
        Refusal::Stage {
            stage: Stage::Ended,
            ..
        }
    ));
    assert!(!machine.handle().counters().unwrap().is_empty());
    let handle = machine.handle();
    assert_eq!(machine.finish(), Some(End::Stopped));
    assert_eq!(
        handle.request(MachineRequest::Status).unwrap_err(),
        Refusal::Gone { request: "status" }
    );
}

#[test]
fn a_guest_ends_the_machine_in_each_way() {
    for (port, value, end) in [
        (0xf4, 0x10, End::DebugExit { code: 0x21 }),
        (0x600, 0x34, End::PoweredOff),
        (0x602, 1, End::Reset),
        (0x64, 0xfe, End::Reset),
        (0xcf9, 6, End::Reset),
    ] {
        let mut rig = Rig::new(2);
        rig.end = Some((1000, port, value));
        let (machine, _) = rig.built();
        ask(&machine, MachineRequest::Run);
        assert_eq!(machine.handle().wait(PATIENCE), Some(end.clone()));
        let finished = [0, 1].map(|vcpu| (vcpu, VcpuStage::Finished));
        assert_eq!(status(&machine).vcpus, finished.into());
        assert_eq!(machine.finish(), Some(end));
    }
}

#[test]
fn the_power_button_raises_an_event() {
    let (machine, _) = Rig::new(1).built();
    assert!(matches!(
        refused(&machine, MachineRequest::PressPowerButton),
        Refusal::Stage { .. }
    ));
    ask(&machine, MachineRequest::Run);
    ask(&machine, MachineRequest::PressPowerButton);
    ask(&machine, MachineRequest::Pause);
    let PartState::Power(power) = save(&machine).parts["power"] else {
        panic!("not the state of the power device");
    };
    assert_eq!(power.events, 1);
}

#[test]
fn a_paused_machine_stands_and_a_resumed_one_goes_on() {
    let (machine, console) = Rig::new(3).built();
    ask(&machine, MachineRequest::Run);
    let mut last = (0, 0, 0);
    for round in 0..200 {
        std::thread::sleep(Duration::from_micros(round * 13 % 3000));
        ask(&machine, MachineRequest::Pause);
        let first = save(&machine);
        let time = status(&machine).guest_time_ns;
        let printed = console.bytes().len();
        std::thread::sleep(Duration::from_micros(300));
        assert_eq!(save(&machine), first);
        assert_eq!(status(&machine).guest_time_ns, time);
        assert_eq!(console.bytes().len(), printed);
        let now = (sum(&first, STEPS), sum(&first, TIMERS), sum(&first, CALLS));
        assert!(now.0 >= last.0 && now.1 >= last.1 && now.2 >= last.2);
        last = now;
        ask(&machine, MachineRequest::Resume);
    }
    assert!(last.0 > 1000 && last.1 > 10 && last.2 > 10, "{last:?}");
    assert_eq!(machine.finish(), Some(End::Stopped));
}

#[test]
fn a_machine_continues_in_another_one_from_its_encoded_state() {
    let rig = Rig::new(2);
    let (mut machine, _) = rig.built();
    ask(&machine, MachineRequest::Run);
    let mut steps = 0;
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(1));
        ask(&machine, MachineRequest::Pause);
        let state = save(&machine);
        assert!(sum(&state, STEPS) >= steps);
        steps = sum(&state, STEPS);
        let time = status(&machine).guest_time_ns;
        let bytes = state.encode().unwrap();
        let ram = machine.ram().clone();
        drop(machine);
        machine = rig.machine(ram).0;
        // The state would replace it.
        assert_eq!(machine.handle().serial_input(b"too early"), 0);
        let state = MachineState::decode(&bytes).unwrap();
        ask(&machine, MachineRequest::Restore(Box::new(state)));
        assert_eq!(status(&machine).stage, Stage::Paused);
        assert_eq!(status(&machine).guest_time_ns, time);
        assert_eq!(save(&machine).encode().unwrap(), bytes);
        ask(&machine, MachineRequest::Resume);
    }
    assert!(steps > 1000, "{steps}");
}

#[test]
fn states_of_other_machines_are_refused() {
    let (machine, _) = Rig::new(2).built();
    let good = save(&machine);
    let mut fewer = good.clone();
    fewer.vcpus.pop();
    let mut without = good.clone();
    without.parts.remove("serial");
    let mut of_another_kind = good.clone();
    let cmos = good.parts["cmos"].clone();
    of_another_kind.parts.insert("serial".into(), cmos);
    for state in [fewer, without, of_another_kind] {
        let refusal = refused(&machine, MachineRequest::Restore(Box::new(state)));
        assert!(matches!(refusal, Refusal::Failed { .. }), "{refusal}");
    }
    assert_eq!(status(&machine).stage, Stage::Built);
    // Of the right kind, with a value that no such part has.
    let text = String::from_utf8(good.encode().unwrap()).unwrap();
    let long = format!("\"typed\":[{}]", vec!["7"; 5000].join(","));
    let broken = MachineState::decode(text.replace("\"typed\":[]", &long).as_bytes()).unwrap();
    assert_ne!(broken, good);
    refused(&machine, MachineRequest::Restore(Box::new(broken)));
    assert!(matches!(
        machine.handle().wait(PATIENCE),
        Some(End::Failed { .. })
    ));
}

#[test]
fn requests_race_without_harm() {
    for round in 0..100 {
        let mut rig = Rig::new(1 + round % 4);
        if round % 3 == 0 {
            rig.end = Some((u64::from(round) * 37, 0x600, 0x34));
        }
        rig.deterministic = round % 5 == 0;
        let (machine, _) = rig.built();
        let threads: Vec<_> = (0..3_u32)
            .map(|thread| {
                let handle = machine.handle();
                std::thread::spawn(move || {
                    for step in 0..20 {
                        let request = match (thread + step) % 6 {
                            0 => MachineRequest::Run,
                            1 => MachineRequest::Pause,
                            2 => MachineRequest::Resume,
                            3 => MachineRequest::Save,
                            4 => MachineRequest::Counters,
                            _ if step == 19 => MachineRequest::Stop,
                            _ => MachineRequest::Status,
                        };
                        handle.serial_input(b"x");
                        match handle.request(request) {
                            Ok(_) | Err(Refusal::Stage { .. } | Refusal::Busy { .. }) => {}
                            Err(other) => panic!("{other}"),
                        }
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        let end = machine.finish().unwrap();
        assert!(matches!(end, End::Stopped | End::PoweredOff), "{end}");
    }
}

#[test]
fn machines_are_built_and_dropped_in_any_stage() {
    for round in 0..100_u64 {
        let (machine, _) = Rig::new(2).built();
        if round % 2 == 0 {
            ask(&machine, MachineRequest::Run);
            std::thread::sleep(Duration::from_micros(round * 20));
        }
        if round % 4 == 0 {
            ask(&machine, MachineRequest::Pause);
        }
        let handle = machine.handle();
        drop(machine);
        assert_eq!(handle.wait(Duration::ZERO), Some(End::Stopped));
    }
}

#[test]
fn a_vcpu_that_does_not_come_back_ends_the_machine_by_name() {
    let mut rig = Rig::new(2);
    let (entered, has_entered) = mpsc::channel();
    rig.stuck = Some(Stuck { vcpu: 0, entered });
    let (machine, _) = rig.built();
    ask(&machine, MachineRequest::Run);
    // A pause before that would find the vCPU outside the guest.
    has_entered.recv_timeout(PATIENCE).unwrap();
    let refusal = refused(&machine, MachineRequest::Pause);
    assert!(refusal.to_string().contains("vCPU 0"), "{refusal}");
    let Some(End::Failed { reason }) = machine.handle().wait(PATIENCE) else {
        panic!("it did not fail");
    };
    assert!(reason.contains("vCPU 0"), "{reason}");
}

/// What is done in the pauses of a deterministic run.
#[derive(Clone, Copy, Debug)]
enum Meanwhile {
    Nothing,
    Save,
    Restore,
}

/// What a deterministic run leaves, with this many pauses on the way: the console,
/// and the guest's time at the end.
fn deterministic_run(cpus: u32, pauses: u64, meanwhile: Meanwhile) -> (Vec<u8>, u64) {
    let mut rig = Rig::new(cpus);
    rig.deterministic = true;
    rig.end = Some((20_000, 0x600, 0x34));
    let (machine, console) = rig.built();
    ask(&machine, MachineRequest::Run);
    for pause in 0..pauses {
        std::thread::sleep(Duration::from_micros(pause * 50));
        // Refused once it ended.
        let _ = machine.handle().request(MachineRequest::Pause);
        let saved = match meanwhile {
            Meanwhile::Nothing => None,
            _ => machine.handle().request(MachineRequest::Save).ok(),
        };
        if let (Meanwhile::Restore, Some(MachineReply::Saved(state))) = (meanwhile, saved) {
            let _ = machine.handle().request(MachineRequest::Restore(state));
        }
        let _ = machine.handle().request(MachineRequest::Resume);
    }
    assert_eq!(machine.handle().wait(PATIENCE), Some(End::PoweredOff));
    let time = status(&machine).guest_time_ns;
    machine.finish();
    (console.bytes(), time)
}

#[test]
fn deterministic_runs_repeat_whatever_the_host_does() {
    for cpus in [1, 2, 4] {
        let runs: BTreeSet<_> = (0..18)
            .map(|round| {
                let meanwhile = match round % 3 {
                    0 => Meanwhile::Nothing,
                    1 => Meanwhile::Save,
                    _ => Meanwhile::Restore,
                };
                deterministic_run(cpus, round, meanwhile)
            })
            .collect();
        assert_eq!(runs.len(), 1, "{cpus} vCPUs: {runs:?}");
    }
}
