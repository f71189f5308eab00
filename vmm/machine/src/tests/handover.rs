//! The home of a machine goes to another machine in this process, around the memory file of the
//! slice that has all else, while its vCPUs play: those of [`super::moves`], which notice an
//! interrupt or a tick that is lost or comes twice.

use weft_platform::clock::Reference;

use super::moves::{LEASE, Slices, shares, slice_of};
use super::*;

/// The machine around the memory of slice 1.
fn taker(slices: &Slices) -> Machine {
    let mut whole = shares(&[2]);
    whole[0].memory_bytes *= slices.memory.len() as u64;
    let links = SliceLinks {
        number: 0,
        links: (0..16).map(|_| None).collect(),
        lease: LEASE,
        delay_max: Duration::ZERO,
        reference: Reference::here(),
        joins: None,
        lent: None,
    };
    let memory = slices.memory[1].try_clone().unwrap();
    slice_of(whole, links, slices.judge.clone(), &slices.console, memory)
}

/// Two slices, all vCPUs on the second one.
fn all_there() -> Slices {
    let slices = Slices::new(&[1, 1]);
    slices.move_vcpu(0, 1).unwrap();
    slices.judge.wait_for(3);
    slices
}

fn give(slices: &Slices) -> Result<Box<HomeState>, Refusal> {
    slices.machines[0].handle().give_home((1, None), false)
}

#[test]
fn a_home_goes_and_the_machine_plays_on() {
    for runs in [true, false] {
        let mut slices = all_there();
        if !runs {
            ask(&slices.machines[0], MachineRequest::Pause);
        }
        let home = give(&slices).unwrap();
        assert_eq!(home.ran, runs);
        let text = serde_json::to_string(&home).unwrap();
        let home: HomeState = serde_json::from_str(&text).unwrap();
        let machine = taker(&slices);
        ask(&machine, MachineRequest::TakeHome(Box::new(home)));
        assert_eq!(status(&machine).stage, Stage::Paused);
        let host = "beta".to_owned();
        let end = End::Moved { host };
        ask(&slices.machines[0], MachineRequest::EndGiven(end.clone()));
        assert_eq!(slices.machines[0].handle().wait(PATIENCE), Some(end));
        // The slice that had the memory ends before anything goes on.
        slices.machines.clear();
        ask(&machine, MachineRequest::Resume);
        slices.judge.wait_for(20);
        slices.judge.check();
        assert_eq!(status(&machine).stage, Stage::Running);
    }
}

#[test]
fn a_home_that_is_taken_back_is_as_before() {
    let slices = all_there();
    for round in 0..20 {
        let runs = round % 2 == 0;
        if !runs {
            ask(&slices.machines[0], MachineRequest::Pause);
        }
        give(&slices).unwrap();
        // It carries out nothing meanwhile.
        let refusal = refused(&slices.machines[0], MachineRequest::Resume);
        assert!(matches!(refusal, Refusal::Impossible { .. }), "{refusal}");
        ask(&slices.machines[0], MachineRequest::TakeHomeBack);
        if !runs {
            assert_eq!(status(&slices.machines[0]).stage, Stage::Paused);
            ask(&slices.machines[0], MachineRequest::Resume);
        }
        slices.check();
        // Pages and vCPUs go to and fro as before.
        slices.move_vcpu(round % 2, 0).unwrap();
        slices.check();
        slices.move_vcpu(round % 2, 1).unwrap();
    }
}

#[test]
fn a_home_is_not_given_while_a_part_is_elsewhere() {
    let slices = Slices::new(&[1, 1]);
    let refusal = give(&slices).unwrap_err();
    assert!(refusal.to_string().contains("a vCPU is not on node 1"));
    let end = MachineRequest::EndGiven(End::Stopped);
    for request in [MachineRequest::TakeHomeBack, end] {
        let refusal = refused(&slices.machines[0], request);
        assert!(matches!(refusal, Refusal::Impossible { .. }), "{refusal}");
    }
    let three = Slices::new(&[0, 2, 0]);
    let refusal = give(&three).unwrap_err();
    assert!(refusal.to_string().contains("on more than one node"));
    slices.check();
    three.check();
}
