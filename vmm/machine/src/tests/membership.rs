//! Slices that join a machine in this process while its vCPUs run, and leave it. The vCPUs
//! are those of [`super::moves`], which notice an interrupt or a tick that is lost or comes
//! twice.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use weft_aggregate::devices::{DataPath, Disk};
use weft_guest_memory::memory_file;
use weft_platform::clock::Reference;
use weft_vcpu::PAGE_SIZE;
use weft_wire::halves::{self, HalvesConfig, Receiver, Sender};

use super::moves::{LEASE, Slices, shares, slice_of};
use super::*;
use crate::HomeState;
use crate::membership::{Activity, HomeError, Job, NewDisk, NewNode, NodeProcesses};
use crate::migration::{Choose, Destination, Migration, Mode};

const NODE: NewNode = NewNode {
    host: None,
    memory_bytes: 32 << 20,
};

pub(super) fn half(socket: UnixStream) -> (Sender, Receiver) {
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
pub(super) enum Fate {
    Lives,
    /// It cannot be started.
    Refused,
    /// It is linked with all and then ends.
    Dies,
}

/// Makes slices in this process.
pub(super) struct Here<'a> {
    cpus: &'a [u32],
    slices: &'a Slices,
    joined: Mutex<Vec<(usize, Machine)>>,
    /// Numbers of slices of the start that left.
    gone: Mutex<BTreeSet<usize>>,
    pub fate: Mutex<Fate>,
}

impl<'a> Here<'a> {
    pub fn new(cpus: &'a [u32], slices: &'a Slices) -> Self {
        Self {
            cpus,
            slices,
            joined: Mutex::default(),
            gone: Mutex::default(),
            fate: Mutex::new(Fate::Lives),
        }
    }

    fn handles(&self) -> Vec<(usize, Handle)> {
        let gone = self.gone.lock().unwrap().clone();
        let first = self.slices.machines.iter().map(Machine::handle).enumerate();
        let first = first.filter(|(number, _)| !gone.contains(number));
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
            shares(self.cpus),
            links,
            self.slices.judge.clone(),
            &Kept::default(),
            memory_file().unwrap(),
        );
        self.joined.lock().unwrap().push((number, machine));
        Ok(())
    }

    fn end(&self, number: usize) {
        self.gone.lock().unwrap().insert(number);
        let mut joined = self.joined.lock().unwrap();
        joined.retain(|(other, _)| *other != number);
    }

    fn make_disk(&self, _: usize, _: &NewDisk) -> Result<(), String> {
        Err("all nodes are in one process".into())
    }

    fn share_memory(&self, number: usize) -> Result<(), String> {
        match *self.fate.lock().unwrap() {
            Fate::Refused => Err(format!("node {number} is on another host")),
            _ => Ok(()),
        }
    }

    fn prepare_home(&self, _: usize, _: Option<usize>) -> Result<String, String> {
        Err("all nodes are in one process".into())
    }

    fn await_home(&self, _: usize) {}

    fn announce_home(&self, _: usize) {}

    fn send_home(&self, _: usize, _: HomeState) -> Result<(), HomeError> {
        Err(HomeError::Refused("nothing was prepared".into()))
    }

    fn let_home_go(&self, _: usize) -> Result<(), String> {
        Err("nothing was prepared".into())
    }

    fn give_home_up(&self, _: usize) -> Result<(), String> {
        Ok(())
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
fn a_paused_machine_gets_nodes_and_gives_them_back() {
    let cpus = [1, 1];
    let slices = Slices::new(&cpus);
    let here = Here::new(&cpus, &slices);
    let machine = &slices.machines[0];
    let grow = || machine.handle().grow(&here, &NODE, &Job::default());
    let release = |node| machine.handle().release(&here, node, &Job::default());
    for round in 0..10 {
        ask(machine, MachineRequest::Pause);
        assert_eq!(grow().unwrap().node, 2);
        assert_eq!(status(machine).stage, Stage::Paused);
        slices.move_vcpu(round % 2, 2).unwrap();
        ask(machine, MachineRequest::Resume);
        slices.check();
        ask(machine, MachineRequest::Pause);
        // A vCPU that comes to a node which has never run, and leaves it, has not run there.
        assert_eq!(grow().unwrap().node, 3);
        slices.move_vcpu(round % 2, 3).unwrap();
        assert_eq!(release(2).unwrap().vcpus, 0);
        assert_eq!(release(3).unwrap().vcpus, 1);
        assert_eq!(status(machine).stage, Stage::Paused);
        ask(machine, MachineRequest::Resume);
        slices.check();
    }
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

/// A file for a disk of slice 0.
fn disk(data_path: DataPath) -> Disk {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // One for each machine: the threads of the last may still have its file.
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("weft-leave-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    Disk {
        path,
        read_only: false,
        direct: false,
        slice: 0,
        data_path,
    }
}

#[test]
fn the_queues_of_a_node_that_leaves_go_to_the_devices_node() {
    let cpus = [1, 1];
    for (path, queues) in [(DataPath::Bypass, 1), (DataPath::Dsm, 0)] {
        let disk = disk(path);
        let slices = Slices::with_disk(&cpus, disk.clone());
        let here = Here::new(&cpus, &slices);
        let handle = slices.machines[0].handle();
        let slice = handle.slice.clone().unwrap();
        let servers = |slice: &Slice| slice.remote_devices().queue_servers().1;
        let first = servers(&slice);
        for _ in 0..4 {
            let cancelled = Job::default();
            cancelled.cancel();
            let refused = handle.release(&here, 1, &cancelled).unwrap_err();
            assert!(refused.to_string().contains("cancelled"), "{refused}");
            // It serves what it served before.
            assert_eq!(servers(&slice), first);
            slices.check();
        }
        let released = handle.release(&here, 1, &Job::default()).unwrap();
        assert_eq!((released.vcpus, released.queues), (1, queues));
        assert_eq!(released.queues_stopped_ns > 0, queues > 0);
        assert_eq!(servers(&slice)[&0], [0, 0]);
        slices.check();
        // Another node with its number learns that it serves nothing.
        let grown = handle.grow(&here, &NODE, &Job::default()).unwrap();
        assert_eq!(grown.node, 1);
        let joined = here.handles().pop().unwrap().1.slice.unwrap();
        assert_eq!(servers(&joined)[&0], [0, 0]);
        handle.release(&here, 1, &Job::default()).unwrap();
        slices.check();
        std::fs::remove_file(&disk.path).unwrap();
    }
}

#[test]
fn a_node_with_a_disk_stays() {
    let cpus = [1, 1];
    let disk = Disk {
        slice: 1,
        ..disk(DataPath::Bypass)
    };
    let slices = Slices::with_disk(&cpus, disk.clone());
    let here = Here::new(&cpus, &slices);
    let refused = slices.machines[0]
        .handle()
        .release(&here, 1, &Job::default());
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("node 1 has disk 0"), "{refused}");
    slices.check();
    std::fs::remove_file(&disk.path).unwrap();
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

fn to_host() -> Destination {
    Destination::Host {
        name: "alpha".into(),
        memory_bytes: None,
    }
}

fn migration(to: &[Destination], spread: bool) -> Migration {
    Migration {
        mode: Mode::Hybrid,
        to: to.to_vec(),
        spread,
        downtime_ms: None,
        bytes_per_s: None,
        choose: Choose::History,
        with_disks: false,
        keep_home: false,
    }
}

/// All goes to a node that joins, and back; node 0 stays for its devices.
#[test]
fn a_machine_migrates_to_and_fro() {
    let cpus = [1, 1];
    let slices = Slices::with_devices(&cpus, None);
    let here = Here::new(&cpus, &slices);
    let handle = slices.machines[0].handle();
    let slice = handle.slice.clone().unwrap();
    let all = slice.placement().memory_bytes() / PAGE_SIZE;
    let holds_all = |node: usize| {
        assert_eq!(slices.locations(), [node, node]);
        assert_eq!(slice.platform().holder(), node);
        assert_eq!(slice.timekeeper_number(), node);
        assert_eq!(slice.managed_pages(node), all);
    };
    let mut presses = 0;
    let mut is_used = || {
        presses += 1;
        slices.press(presses);
        slices.check();
        slices.check_console();
    };
    for round in 0..12 {
        let job = Job::default();
        let mode = [Mode::Hybrid, Mode::PostCopy, Mode::PreCopy][round / 2 % 3];
        let away = Migration {
            mode,
            ..migration(&[to_host()], round % 2 == 1)
        };
        let away = handle.migrate(&here, &away, &job).unwrap();
        let node = away.nodes[0];
        holds_all(node);
        assert_eq!(away.vcpus, 2);
        assert!(away.pause_ns > 0);
        // Of these few pages none has bytes to send.
        assert!(away.ahead_bytes == 0 || mode != Mode::PostCopy);
        assert_eq!(away.stays.len(), 1);
        assert!(away.stays[0].node == 0 && away.stays[0].reason.contains("console"));
        // Node 1 leaves the first time, and does not come again.
        assert_eq!(away.left.is_empty(), round > 0);
        is_used();
        let back = Migration {
            mode,
            ..migration(&[Destination::Node(0)], false)
        };
        let back = handle.migrate(&here, &back, &Job::default()).unwrap();
        holds_all(0);
        assert_eq!((back.left, back.stays), (vec![node], vec![]));
        is_used();
    }
}

/// Pages fill one destination after the other, and vCPUs are divided if that is asked for.
#[test]
fn a_machine_is_split_over_several_nodes() {
    let cpus = [1, 1];
    let slices = Slices::new(&cpus);
    let here = Here::new(&cpus, &slices);
    let handle = slices.machines[0].handle();
    let slice = handle.slice.clone().unwrap();
    let managed = |node| slice.managed_pages(node) * PAGE_SIZE;
    let all = slice.placement().memory_bytes();
    let spare = slice.placement().spare_bytes_min();
    let first = Destination::Host {
        name: "alpha".into(),
        memory_bytes: Some(all / 4 + spare),
    };
    let split = migration(&[first, to_host()], true);
    let done = handle.migrate(&here, &split, &Job::default());
    if all / 4 + spare < all {
        let refused = done.unwrap_err().to_string();
        assert!(refused.contains("have room for"), "{refused}");
        let whole = Destination::Host {
            name: "beta".into(),
            memory_bytes: Some(all),
        };
        let split = migration(&[split.to[0].clone(), whole], true);
        let done = handle.migrate(&here, &split, &Job::default()).unwrap();
        assert_eq!(managed(done.nodes[0]), all / 4);
        assert_eq!(managed(done.nodes[1]), all - all / 4);
        assert_eq!(slices.locations(), done.nodes[..]);
    }
    slices.check();
    let merged = migration(&[Destination::Node(0)], false);
    handle.migrate(&here, &merged, &Job::default()).unwrap();
    assert_eq!(managed(0), all);
    slices.check();
}

/// By history, to nodes that the machine has, each with its size; what both nodes had goes.
#[test]
fn a_split_by_history_keeps_to_the_sizes() {
    let cpus = [1, 1];
    let slices = Slices::new(&cpus);
    let here = Here::new(&cpus, &slices);
    let handle = slices.machines[0].handle();
    let slice = handle.slice.clone().unwrap();
    let managed = |node| slice.managed_pages(node) * PAGE_SIZE;
    let all = slice.placement().memory_bytes();
    let part = |node, memory_bytes| Destination::Part { node, memory_bytes };
    for _ in 0..2 {
        handle.grow(&here, &NODE, &Job::default()).unwrap();
    }
    let to = [part(2, all / 4), part(3, all)];
    for choose in [Choose::History, Choose::Order] {
        let split = Migration {
            choose,
            ..migration(&to, false)
        };
        let done = handle.migrate(&here, &split, &Job::default()).unwrap();
        assert_eq!(done.nodes, [2, 3]);
        assert!(managed(2) <= all / 4 && managed(2) + managed(3) == all);
        assert_eq!(slices.locations(), [2, 2]);
        slices.check();
    }
    let few = migration(&[part(2, all / 4), part(3, all / 2)], false);
    let refused = handle.migrate(&here, &few, &Job::default()).unwrap_err();
    assert!(refused.to_string().contains("have room for"), "{refused}");
    let merged = migration(&[Destination::Node(0)], false);
    handle.migrate(&here, &merged, &Job::default()).unwrap();
    assert_eq!(managed(0), all);
    slices.check();
}

#[test]
fn a_migration_that_fails_or_is_cancelled_changes_nothing() {
    let cpus = [1, 1];
    let slices = Slices::with_devices(&cpus, None);
    let here = Here::new(&cpus, &slices);
    let handle = slices.machines[0].handle();
    let slice = handle.slice.clone().unwrap();
    let is_as_before = || {
        assert_eq!(slices.locations(), [0, 1]);
        assert_eq!(
            (slice.platform().holder(), slice.timekeeper_number()),
            (0, 0)
        );
        assert_eq!(slice.members().into_iter().collect::<Vec<_>>(), [0, 1]);
        slices.check();
        slices.check_console();
    };
    let node = Destination::Node;
    for (to, words) in [
        (vec![], "no destination"),
        (vec![node(7)], "node 7 does not exist"),
        (vec![node(0), node(0)], "given twice"),
    ] {
        let refused = handle.migrate(&here, &migration(&to, false), &Job::default());
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
        is_as_before();
    }
    *here.fate.lock().unwrap() = Fate::Refused;
    let refused = handle.migrate(&here, &migration(&[to_host()], false), &Job::default());
    assert!(refused.unwrap_err().to_string().contains("no room"));
    is_as_before();
    *here.fate.lock().unwrap() = Fate::Lives;
    let mut cancelled = 0;
    for round in 0..12_u64 {
        let job = Job::default();
        let done = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(round * 700));
                job.cancel();
            });
            handle.migrate(&here, &migration(&[to_host()], false), &job)
        });
        match done {
            Err(refused) => {
                assert!(refused.to_string().contains("cancelled"), "{refused}");
                is_as_before();
                cancelled += 1;
            }
            // It came too late, and node 1 has left.
            Ok(_) => break,
        }
    }
    assert!(cancelled > 0);
    slices.check();
}
