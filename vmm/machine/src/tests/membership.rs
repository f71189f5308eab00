//! Slices that join a machine in this process while its vCPUs run, and leave it. The vCPUs
//! are those of [`super::moves`], which notice an interrupt or a tick that is lost or comes
//! twice.

use std::os::unix::net::UnixStream;
use std::sync::Mutex;

use weft_aggregate::devices::{DataPath, Disk};
use weft_platform::clock::Reference;
use weft_wire::halves::{self, HalvesConfig, Receiver, Sender};

use super::moves::{LEASE, Slices, slice_of};
use super::*;
use crate::membership::{Activity, Job, NewNode, NodeProcesses};

const NODE: NewNode = NewNode {
    host: None,
    memory_bytes: 32 << 20,
};

fn half(socket: UnixStream) -> (Sender, Receiver) {
    let config = HalvesConfig {
        socket: socket.into(),
        keys: None,
        lease: LEASE,
        spin: Duration::ZERO,
        name: "test".into(),
    };
    halves::open(config).unwrap()
}

/// What becomes of the next slice that is started.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Lives,
    /// It cannot be started.
    Refused,
    /// It is linked with all and then ends.
    Dies,
}

/// Makes slices in this process.
struct Here<'a> {
    cpus: &'a [u32],
    slices: &'a Slices,
    joined: Mutex<Vec<(usize, Machine)>>,
    fate: Mutex<Fate>,
}

impl<'a> Here<'a> {
    fn new(cpus: &'a [u32], slices: &'a Slices) -> Self {
        Self {
            cpus,
            slices,
            joined: Mutex::default(),
            fate: Mutex::new(Fate::Lives),
        }
    }

    fn handles(&self) -> Vec<(usize, Handle)> {
        let first = self.slices.machines.iter().map(Machine::handle).enumerate();
        let joined = self.joined.lock().unwrap();
        let later = joined
            .iter()
            .map(|(number, machine)| (*number, machine.handle()));
        first.chain(later).collect()
    }
}

impl NodeProcesses for Here<'_> {
    fn start(&self, number: usize, node: &NewNode, _: &Job) -> Result<(), String> {
        let fate = *self.fate.lock().unwrap();
        if fate == Fate::Refused {
            return Err("no room".into());
        }
        let mut links: Vec<_> = (0..16).map(|_| None).collect();
        let mut far = Vec::new();
        for (peer, handle) in self.handles() {
            let slice = handle.slice.clone().unwrap();
            if !slice.members().contains(&peer) {
                continue;
            }
            let (ours, theirs) = UnixStream::pair().unwrap();
            links[peer] = Some(half(theirs));
            far.push((slice, ours));
        }
        for (slice, ours) in far {
            slice.connect(number, half(ours)).unwrap();
        }
        if fate == Fate::Dies {
            return Ok(());
        }
        let links = SliceLinks {
            number,
            links,
            lease: LEASE,
            delay_max: Duration::ZERO,
            reference: Reference::here(),
            joins: Some(node.memory_bytes),
            lent: None,
        };
        let machine = slice_of(
            self.cpus,
            links,
            self.slices.judge.clone(),
            &Kept::default(),
        );
        self.joined.lock().unwrap().push((number, machine));
        Ok(())
    }

    fn end(&self, number: usize) {
        let mut joined = self.joined.lock().unwrap();
        joined.retain(|(other, _)| *other != number);
    }
}

#[test]
fn a_node_joins_serves_vcpus_and_leaves_many_times() {
    let cpus = [1, 1];
    let slices = Slices::new(&cpus);
    let here = Here::new(&cpus, &slices);
    let handle = slices.machines[0].handle();
    for round in 0..10_u32 {
        let grown = handle.grow(&here, &NODE, &Job::default()).unwrap();
        assert_eq!((grown.node, grown.memory_bytes), (2, 32 << 20));
        let vcpu = round % 2;
        slices.move_vcpu(vcpu, 2).unwrap();
        assert_eq!(slices.locations()[vcpu as usize], 2);
        slices.check();
        let job = Job::default();
        let released = handle.release(&here, 2, &job).unwrap();
        assert_eq!((released.node, released.vcpus), (2, 1));
        assert_eq!(job.view().activity, Activity::Leaving);
        assert!(!slices.locations().contains(&2));
        slices.check();
        let gone = slices.move_vcpu(0, 2).unwrap_err().to_string();
        assert!(gone.contains("node 2 does not exist"), "{gone}");
    }
}

#[test]
fn several_nodes_join_and_leave_in_any_order() {
    let cpus = [1, 1];
    let slices = Slices::new(&cpus);
    let here = Here::new(&cpus, &slices);
    let handle = slices.machines[0].handle();
    let grow = || handle.grow(&here, &NODE, &Job::default()).unwrap().node;
    assert_eq!([grow(), grow(), grow()], [2, 3, 4]);
    slices.move_vcpu(0, 4).unwrap();
    slices.move_vcpu(1, 3).unwrap();
    slices.check();
    for node in [3, 2] {
        handle.release(&here, node, &Job::default()).unwrap();
        slices.check();
    }
    assert_eq!(grow(), 2);
    slices.move_vcpu(1, 2).unwrap();
    slices.check();
    for node in [2, 4] {
        handle.release(&here, node, &Job::default()).unwrap();
    }
    slices.check();
}

/// A node that joins learns where the platform is, and one that leaves gives it to node 0.
#[test]
fn the_platform_goes_to_nodes_that_join_and_from_those_that_leave() {
    let cpus = [1, 1];
    let slices = Slices::with_devices(&cpus, None);
    let here = Here::new(&cpus, &slices);
    let handle = slices.machines[0].handle();
    let grow = || handle.grow(&here, &NODE, &Job::default()).unwrap().node;
    let holder = || handle.slice.as_ref().unwrap().platform().holder();
    let mut presses = 0;
    let mut is_used = || {
        presses += 1;
        slices.press(presses);
        slices.check();
        slices.check_console();
    };
    for _ in 0..8 {
        assert_eq!(grow(), 2);
        slices.move_platform(2).unwrap();
        is_used();
        assert_eq!(grow(), 3);
        // It is told where the platform is: its vCPU uses it from there.
        slices.move_vcpu(1, 3).unwrap();
        is_used();
        slices.move_platform(3).unwrap();
        is_used();
        handle.release(&here, 2, &Job::default()).unwrap();
        assert_eq!(holder(), 3);
        is_used();
        handle.release(&here, 3, &Job::default()).unwrap();
        assert_eq!(holder(), 0);
        is_used();
        slices.move_platform(1).unwrap();
        is_used();
    }
}

#[test]
fn a_paused_machine_gives_nodes_back_and_gets_none() {
    let cpus = [1, 1];
    let slices = Slices::new(&cpus);
    let here = Here::new(&cpus, &slices);
    let handle = slices.machines[0].handle();
    ask(&slices.machines[0], MachineRequest::Pause);
    let refused = handle.grow(&here, &NODE, &Job::default()).unwrap_err();
    assert!(refused.to_string().contains("paused"), "{refused}");
    assert_eq!(status(&slices.machines[0]).stage, Stage::Paused);
    ask(&slices.machines[0], MachineRequest::Resume);
    handle.grow(&here, &NODE, &Job::default()).unwrap();
    slices.move_vcpu(1, 2).unwrap();
    slices.check();
    ask(&slices.machines[0], MachineRequest::Pause);
    handle.release(&here, 2, &Job::default()).unwrap();
    ask(&slices.machines[0], MachineRequest::Resume);
    slices.check();
}

#[test]
fn what_does_not_join_changes_nothing() {
    let cpus = [1, 1];
    let slices = Slices::new(&cpus);
    let here = Here::new(&cpus, &slices);
    let handle = slices.machines[0].handle();
    for fate in [Fate::Refused, Fate::Dies, Fate::Dies, Fate::Refused] {
        *here.fate.lock().unwrap() = fate;
        let refused = handle.grow(&here, &NODE, &Job::default()).unwrap_err();
        assert!(matches!(refused, Refusal::Impossible { .. }), "{refused}");
        slices.check();
    }
    *here.fate.lock().unwrap() = Fate::Lives;
    let cancelled = Job::default();
    cancelled.cancel();
    let refused = handle.grow(&here, &NODE, &cancelled).unwrap_err();
    assert!(refused.to_string().contains("cancelled"), "{refused}");
    for handle in here.handles() {
        // Its link was read to the end, so that the number is free again.
        let slice = handle.1.slice.unwrap();
        let until = Instant::now() + PATIENCE;
        while slice.free_number() != Some(2) {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
    }
    assert_eq!(handle.grow(&here, &NODE, &Job::default()).unwrap().node, 2);
    // A release that is cancelled keeps the node.
    slices.move_vcpu(1, 2).unwrap();
    let refused = handle.release(&here, 2, &cancelled).unwrap_err();
    assert!(refused.to_string().contains("cancelled"), "{refused}");
    assert_eq!(slices.locations()[1], 2);
    slices.check();
    for (node, words) in [
        (0, "console"),
        (3, "node 3 does not exist: there are 0, 1, 2"),
    ] {
        let refused = handle.release(&here, node, &Job::default()).unwrap_err();
        assert!(refused.to_string().contains(words), "{refused}");
    }
    handle.release(&here, 2, &Job::default()).unwrap();
    slices.check();
}

#[test]
fn a_node_that_serves_a_queue_stays_and_says_how_it_could_leave() {
    let cpus = [1, 1];
    let released = |data_path| {
        // One for each machine: the threads of the last may still have its file.
        let name = format!("weft-leave-{}-{data_path:?}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let disk = Disk {
            path: path.clone(),
            read_only: false,
            direct: false,
            slice: 0,
            data_path,
        };
        let slices = Slices::with_disk(&cpus, disk);
        let here = Here::new(&cpus, &slices);
        let handle = slices.machines[0].handle();
        let released = handle.release(&here, 1, &Job::default());
        slices.check();
        std::fs::remove_file(&path).unwrap();
        released
    };
    let refused = released(DataPath::Bypass).unwrap_err().to_string();
    assert!(
        refused.contains("node 1 serves a queue of disk 0 of node 0")
            && refused.contains("starts with path=dsm for disk 0"),
        "{refused}"
    );
    assert_eq!(released(DataPath::Dsm).unwrap().vcpus, 1);
}

#[test]
fn a_node_of_the_first_hour_leaves_with_its_part_of_memory() {
    let cpus = [1, 1];
    let slices = Slices::new(&cpus);
    let here = Here::new(&cpus, &slices);
    let handle = slices.machines[0].handle();
    handle.release(&here, 1, &Job::default()).unwrap();
    assert_eq!(slices.locations(), [0, 0]);
    slices.check();
}

/// The others get equal parts of what the node that leaves manages.
#[test]
fn pages_of_a_node_that_leaves_are_divided() {
    let cpus = [1, 1];
    let slices = Slices::new(&cpus);
    let here = Here::new(&cpus, &slices);
    let handle = slices.machines[0].handle();
    let managed = |node| handle.slice.as_ref().unwrap().managed_pages(node);
    assert_eq!(handle.grow(&here, &NODE, &Job::default()).unwrap().node, 2);
    let [own, leaving] = [managed(0), managed(1)];
    assert!(leaving > 1 && managed(2) == 0);
    handle.release(&here, 1, &Job::default()).unwrap();
    slices.check();
    assert_eq!(managed(1), 0);
    assert_eq!(managed(0) + managed(2), own + leaving);
    assert!(managed(2).abs_diff(leaving / 2) <= 1);
}
