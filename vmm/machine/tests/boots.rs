//! The small kernel on whole machines with the software vCPU. Needs the images of
//! `make guest`, in `target/guest` or where `WEFT_GUEST_IMAGES` says:
//! `cargo test --release -p weft-machine --test boots -- --ignored`.

#[path = "support/kept.rs"]
mod kept;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use weft_machine::{
    BackEndChoice, Configuration, End, Machine, MachineIo, MachineRequest, MachineState, OpenDisks,
    Placement, Share, Stage,
};

use kept::Kept;

const PATIENCE: Duration = Duration::from_secs(60);
const HELLO: &str = "weft-guest: hello";
/// What a kernel says when something is wrong.
const COMPLAINTS: [&str; 9] = [
    "WARNING",
    "BUG",
    "unchecked MSR",
    "Call Trace",
    "Oops",
    "stall",
    "soft lockup",
    "Unable to",
    "nobody cared",
];

fn image(name: &str) -> PathBuf {
    let folder = std::env::var_os("WEFT_GUEST_IMAGES").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/guest"),
        PathBuf::from,
    );
    let path = folder.join(name);
    assert!(path.exists(), "{} is missing: `make guest`", path.display());
    path
}

fn io(console: &Kept) -> MachineIo {
    MachineIo {
        serial: Box::new(console.clone()),
        console: None,
        disks: OpenDisks::default(),
        switches: Default::default(),
        checkpoint: Default::default(),
        memory: Default::default(),
    }
}

fn check(text: &str) {
    assert!(text.contains(HELLO), "no greeting:\n{text}");
    for complaint in COMPLAINTS {
        assert!(!text.contains(complaint), "{complaint}:\n{text}");
    }
}

fn small(cpus: u32, initrd: &str, words: &str) -> Configuration {
    let mut configuration = Configuration::new(image("vmlinux"), 128 << 20);
    configuration.initrd = Some(image(initrd));
    configuration.cpus = cpus;
    configuration.back_end = BackEndChoice::Soft;
    configuration.command_line = format!("console=ttyS0 {words}");
    configuration
}

fn ask(machine: &Machine, request: MachineRequest) {
    machine.handle().request(request).unwrap();
}

/// Drops a machine that was saved, and lets another one go on with its memory.
fn move_on(
    machine: Machine,
    state: &MachineState,
    configuration: &Configuration,
    console: &Kept,
) -> Machine {
    let text = serde_json::to_string(state).unwrap();
    let ram = machine.ram().clone();
    drop(machine);
    let next = Machine::adopt(configuration, io(console), ram).unwrap();
    let state: MachineState = serde_json::from_str(&text).unwrap();
    ask(&next, MachineRequest::Restore(Box::new(state)));
    ask(&next, MachineRequest::Resume);
    next
}

/// Moves a guest as often as it can be until it ends; how often that was, and what
/// it printed.
fn moved(configuration: &Configuration, every: Duration) -> (u32, String) {
    let console = Kept::default();
    let mut machine = Machine::new(configuration, io(&console)).unwrap();
    ask(&machine, MachineRequest::Run);
    let start = Instant::now();
    let mut moves = 0;
    loop {
        if let Some(end) = machine.handle().wait(every) {
            assert_eq!(end, End::PoweredOff, "{}", console.text());
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{}", console.text());
        // It may end between the look and the pause, or have asked for its end just
        // before it: the next look says how.
        if machine.handle().request(MachineRequest::Pause).is_err() {
            continue;
        }
        match machine.handle().save() {
            Ok(state) => {
                machine = move_on(machine, &state, configuration, &console);
                moves += 1;
            }
            Err(refusal) => {
                let stage = machine.handle().status().unwrap().stage;
                assert_eq!(stage, Stage::Ended, "{refusal}");
            }
        }
    }
    check(&console.text());
    (moves, console.text())
}

#[test]
#[ignore = "needs the images of `make guest`"]
fn a_guest_goes_on_in_another_machine_again_and_again() {
    for cpus in [1, 2, 4] {
        let (moves, _) = moved(&small(cpus, "tiny.cpio", ""), Duration::from_millis(7));
        assert!(moves >= 10, "{cpus} vCPUs: {moves}");
    }
}

#[test]
#[ignore = "needs the images of `make guest`"]
fn a_guest_with_a_disk_at_work_goes_on_in_another_machine() {
    // Where a run that fails leaves one file at most.
    let disk = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("boots.img");
    std::fs::File::create(&disk)
        .and_then(|file| file.set_len(64 << 20))
        .unwrap();
    let work = "weft.run=\"seq 400000 > /tmp/a; dd if=/tmp/a of=/dev/vda bs=16k conv=fsync \
                2>/dev/null; dd if=/dev/vda bs=16k count=200 2>/dev/null | head -c 2000000 | md5sum; \
                head -c 2000000 /tmp/a | md5sum\"";
    let mut configuration = small(2, "busybox.cpio", work);
    configuration.disks = vec![weft_machine::Disk {
        path: disk.clone(),
        read_only: false,
        direct: false,
        slice: 0,
        data_path: Default::default(),
    }];
    let (moves, text) = moved(&configuration, Duration::from_millis(25));
    std::fs::remove_file(&disk).unwrap();
    assert!(moves >= 5, "{moves}");
    let sums: Vec<&str> = text.lines().filter(|line| line.ends_with("  -")).collect();
    assert!(sums.len() == 2 && sums[0] == sums[1], "{text}");
}

/// What a guest of these slices, all in this process, finds of its NUMA nodes.
fn nodes_as_seen(shares: &[(u32, u64)]) -> String {
    let facts = "weft.run=\"cd /sys/devices/system/node; for node in node?; do echo $node cpus \
                 $(cat $node/cpulist) distance $(cat $node/distance) memory \
                 $(grep MemTotal $node/meminfo | tr -s ' ' | cut -d ' ' -f 4); done; \
                 echo has cpus $(cat has_cpu) memory $(cat has_memory)\"";
    let mut configuration = small(1, "busybox.cpio", facts);
    let share = |(cpus, mib): &(u32, u64)| Share {
        cpus: *cpus,
        memory_bytes: mib << 20,
    };
    configuration.slices = shares.iter().map(share).collect();
    let placement = Placement::new(configuration.slices.clone()).unwrap();
    configuration.cpus = placement.cpus();
    configuration.memory_bytes = placement.memory_bytes();
    let console = Kept::default();
    let machine = Machine::new(&configuration, io(&console)).unwrap();
    ask(&machine, MachineRequest::Run);
    let end = machine.handle().wait(PATIENCE);
    assert_eq!(end, Some(End::PoweredOff), "{}", console.text());
    check(&console.text());
    console.text()
}

#[test]
#[ignore = "needs the images of `make guest`"]
fn a_guest_finds_its_slices_as_nodes() {
    // Node, vCPUs, distances, and what is left of how much memory.
    let seen = |text: &str, node: usize, facts: &str, mib: u64| {
        let wanted = format!("node{node} cpus {facts} memory ");
        let line = text.lines().find_map(|line| line.strip_prefix(&wanted));
        let kib: u64 = line
            .and_then(|kib| kib.trim().parse().ok())
            .unwrap_or_else(|| {
                panic!("no `{wanted}`:\n{text}");
            });
        assert!(
            kib <= mib << 10 && kib + (48 << 10) >= mib << 10,
            "{kib}:\n{text}"
        );
    };
    let text = nodes_as_seen(&[(1, 96), (1, 64)]);
    seen(&text, 0, "0 distance 10 40", 96);
    seen(&text, 1, "1 distance 40 10", 64);
    // Linux counts nodes as it meets them in SRAT, and reads of all CPUs first: one
    // without any comes last.
    let text = nodes_as_seen(&[(2, 96), (0, 64), (1, 32)]);
    seen(&text, 0, "0-1 distance 10 40 40", 96);
    seen(&text, 1, "2 distance 40 10 40", 32);
    seen(&text, 2, "distance 40 40 10", 64);
    let text = nodes_as_seen(&[(1, 128), (1, 0)]);
    assert!(text.contains("has cpus 0-1 memory 0"), "{text}");
}
