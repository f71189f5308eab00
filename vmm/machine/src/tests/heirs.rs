//! Another machine in this process takes the place of node 0 among two other nodes, which stay,
//! while their vCPUs play: those of [`super::moves`], which notice an interrupt or a tick that is
//! lost or comes twice.

use std::os::unix::net::UnixStream;

use weft_guest_memory::memory_file;
use weft_platform::clock::Reference;

use super::membership::{Fate, Here, half};
use super::moves::{LEASE, Slices, shares, slice_of};
use super::*;
use crate::membership::Job;

const CPUS: [u32; 3] = [0, 1, 1];
/// Of the heir's links.
const HEIR: usize = 3;

/// All but the home is on nodes 1 and 2.
fn all_there() -> Slices {
    let slices = Slices::with_devices(&CPUS, None);
    slices.move_platform(1).unwrap();
    slices.machines[0].handle().move_time(1).unwrap();
    slices.check();
    slices
}

/// A machine that can take the place of node 0.
fn heir(slices: &Slices) -> Machine {
    let mut links: Vec<_> = (0..16).map(|_| None).collect();
    let mut far = Vec::new();
    for number in [1, 2] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        links[number] = Some(half(theirs));
        far.push((number, ours));
    }
    for (number, ours) in far {
        let slice = slices.machines[number].slice().unwrap();
        slice.connect(HEIR, half(ours)).unwrap();
    }
    let links = SliceLinks {
        number: 0,
        links,
        lease: LEASE,
        delay_max: Duration::ZERO,
        reference: Reference::here(),
        joins: Some(16 << 20),
        lent: None,
    };
    let judge = slices.judge.clone();
    let memory = memory_file().unwrap();
    slice_of(shares(&CPUS), links, judge, &slices.console, memory)
}

fn give(slices: &Slices) -> Result<HomeState, Refusal> {
    let home = slices.machines[0]
        .handle()
        .give_home((1, Some(HEIR)), false)?;
    let text = serde_json::to_string(&home).unwrap();
    Ok(serde_json::from_str(&text).unwrap())
}

/// Gives the home to an heir, which goes on with it.
fn go(slices: &mut Slices) {
    let heir = heir(slices);
    let home = give(slices).unwrap();
    let ran = home.ran;
    ask(&heir, MachineRequest::TakeHome(Box::new(home)));
    let host = "beta".to_owned();
    let end = End::Moved { host };
    ask(&slices.machines[0], MachineRequest::EndGiven(end.clone()));
    assert_eq!(slices.machines[0].handle().wait(PATIENCE), Some(end));
    ask(&heir, MachineRequest::SettleHome);
    slices.machines[0] = heir;
    assert_eq!(status(&slices.machines[0]).stage, Stage::Paused);
    if ran {
        ask(&slices.machines[0], MachineRequest::Resume);
    }
}

#[test]
fn another_node_0_takes_over_again_and_again() {
    let mut slices = all_there();
    let mut presses = 0;
    for round in 0..20 {
        let runs = round % 2 == 0;
        if !runs {
            ask(&slices.machines[0], MachineRequest::Pause);
        }
        go(&mut slices);
        if !runs {
            ask(&slices.machines[0], MachineRequest::Resume);
        }
        slices.check();
        presses += 1;
        slices.press(presses);
        slices.check_console();
        // What node 0 does is done by the new one.
        slices.move_vcpu(round % 2, 0).unwrap();
        slices.check();
        slices.machines[0].handle().move_time(0).unwrap();
        slices.move_platform(0).unwrap();
        slices.check();
        slices.move_vcpu(round % 2, 1 + round as usize % 2).unwrap();
        slices.machines[0].handle().move_time(2).unwrap();
        slices.move_platform(1 + round as usize / 2 % 2).unwrap();
        slices.check();
    }
}

#[test]
fn a_node_0_whose_heir_ends_goes_on() {
    let slices = all_there();
    for round in 0..24 {
        let runs = round % 2 == 0;
        if !runs {
            ask(&slices.machines[0], MachineRequest::Pause);
        }
        let heir = heir(&slices);
        let home = give(&slices).unwrap();
        match round % 3 {
            // It never heard of the state.
            0 => drop(home),
            // It has taken its place at both nodes.
            1 => drop(ask(&heir, MachineRequest::TakeHome(Box::new(home)))),
            // It ends meanwhile, and is then heard of no more.
            _ => {
                ask(&heir, MachineRequest::TakeHome(Box::new(home)));
                heir.finish();
                ask(&slices.machines[0], MachineRequest::TakeHomeBack);
                if !runs {
                    ask(&slices.machines[0], MachineRequest::Resume);
                }
                slices.check();
                continue;
            }
        }
        drop(heir);
        ask(&slices.machines[0], MachineRequest::TakeHomeBack);
        if !runs {
            assert_eq!(status(&slices.machines[0]).stage, Stage::Paused);
            ask(&slices.machines[0], MachineRequest::Resume);
        }
        slices.check();
        slices.move_vcpu(round % 2, 0).unwrap();
        slices.check();
        slices.move_vcpu(round % 2, 1 + round as usize % 2).unwrap();
    }
}

#[test]
fn a_home_stays_where_the_heir_has_no_links_or_a_vcpu_is_left() {
    let slices = all_there();
    let refusal = give(&slices).unwrap_err();
    assert!(refusal.to_string().contains("no link"), "{refusal}");
    slices.check();
    slices.move_vcpu(0, 0).unwrap();
    let _heir = heir(&slices);
    let refusal = give(&slices).unwrap_err();
    assert!(
        refusal.to_string().contains("a vCPU is on node 0"),
        "{refusal}"
    );
    slices.check();
}

#[test]
fn what_is_beside_a_new_node_0_comes_to_it() {
    for round in 0..6 {
        let mut slices = all_there();
        go(&mut slices);
        let handle = slices.machines[0].handle();
        let here = Here::new(&CPUS, &slices);
        let unite = |job: &Job| handle.unite(&here, 1, job);
        if round % 2 == 1 {
            ask(&slices.machines[0], MachineRequest::Pause);
        }
        *here.fate.lock().unwrap() = Fate::Refused;
        let refused = unite(&Job::default()).unwrap_err().to_string();
        assert!(refused.contains("node 1 is on another host"), "{refused}");
        *here.fate.lock().unwrap() = Fate::Lives;
        let cancelled = Job::default();
        cancelled.cancel();
        unite(&cancelled).unwrap_err();
        assert_eq!(slices.locations(), [1, 2]);
        let united = unite(&Job::default()).unwrap();
        assert_eq!((united.nodes, united.left), (vec![0], vec![1]));
        assert_eq!((united.vcpus, united.stays), (1, vec![]));
        if round % 2 == 1 {
            ask(&slices.machines[0], MachineRequest::Resume);
        }
        assert_eq!(slices.locations(), [0, 2]);
        let slice = handle.slice.as_ref().unwrap();
        assert_eq!(slice.members(), BTreeSet::from([0, 2]));
        assert_eq!(slice.managed_pages(1), 0);
        assert!(slice.managed_pages(0) > 0 && slice.managed_pages(2) > 0);
        assert_eq!(
            (slice.platform().holder(), slice.timekeeper_number()),
            (0, 0)
        );
        slices.check();
        slices.press(1);
        slices.check_console();
        slices.move_vcpu(1, 0).unwrap();
        slices.check();
    }
}
