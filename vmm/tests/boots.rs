//! The small kernel on whole machines with the software vCPU. Needs the images of
//! `make guest`, in `target/guest` or where `WEFT_GUEST_IMAGES` says:
//! `cargo test --release -p weft-vmm --test boots -- --ignored`.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_vmm::machine::{
    Answer, BackEndChoice, Configuration, End, Machine, MachineState, Outside, Request, Stage,
    Status,
};

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
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/guest"),
        PathBuf::from,
    );
    let path = folder.join(name);
    assert!(path.exists(), "{} is missing: `make guest`", path.display());
    path
}

/// Keeps what is written.
#[derive(Clone, Default)]
struct Console(Arc<Mutex<Vec<u8>>>);

impl Console {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    fn outside(&self) -> Outside {
        Outside {
            serial: Box::new(self.clone()),
            console: None,
        }
    }

    fn check(&self) {
        let text = self.text();
        assert!(text.contains(HELLO), "no greeting:\n{text}");
        for complaint in COMPLAINTS {
            assert!(!text.contains(complaint), "{complaint}:\n{text}");
        }
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
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

fn ask(machine: &Machine, request: Request) -> Answer {
    let name = request.name();
    machine
        .handle()
        .request(request)
        .unwrap_or_else(|refusal| panic!("{name}: {refusal}"))
}

fn status(machine: &Machine) -> Status {
    let Answer::Status(status) = ask(machine, Request::Status) else {
        panic!("no status");
    };
    status
}

/// Runs to the end; how long that took in the guest.
fn run(configuration: &Configuration, console: &Console) -> u64 {
    let machine = Machine::new(configuration, console.outside()).unwrap();
    ask(&machine, Request::Run);
    let end = machine.handle().wait(PATIENCE);
    assert_eq!(end, Some(End::PoweredOff), "{}", console.text());
    status(&machine).guest_time_ns
}

#[test]
#[ignore = "needs the images of `make guest`"]
fn the_small_kernel_boots_and_powers_off_without_complaint() {
    for cpus in [1, 2, 4] {
        let console = Console::default();
        run(&small(cpus, "tiny.cpio", ""), &console);
        console.check();
        let brought_up = format!("Brought up 1 node, {cpus} CPU");
        assert!(console.text().contains(&brought_up), "{}", console.text());
    }
}

#[test]
#[ignore = "needs the images of `make guest`"]
fn deterministic_boots_repeat_with_one_vcpu_and_with_many() {
    for cpus in [1, 3] {
        let runs: Vec<_> = (0..3)
            .map(|_| {
                let console = Console::default();
                let mut configuration = small(cpus, "tiny.cpio", "");
                configuration.deterministic = true;
                let time = run(&configuration, &console);
                console.check();
                (time, console.text())
            })
            .collect();
        assert!(runs.iter().all(|run| *run == runs[0]), "{cpus} vCPUs");
    }
}

/// Drops a machine that was saved, and lets another one go on with its memory.
fn move_on(
    machine: Machine,
    state: &MachineState,
    configuration: &Configuration,
    console: &Console,
) -> Machine {
    let text = serde_json::to_string(state).unwrap();
    let ram = machine.ram().clone();
    drop(machine);
    let next = Machine::adopt(configuration, console.outside(), ram).unwrap();
    let state: MachineState = serde_json::from_str(&text).unwrap();
    ask(&next, Request::Restore(Box::new(state)));
    ask(&next, Request::Resume);
    next
}

/// Moves a guest as often as it can be until it ends; how often that was, and what
/// it printed.
fn moved(configuration: &Configuration, every: Duration) -> (u32, String) {
    let console = Console::default();
    let mut machine = Machine::new(configuration, console.outside()).unwrap();
    ask(&machine, Request::Run);
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
        if machine.handle().request(Request::Pause).is_err() {
            continue;
        }
        match machine.handle().request(Request::Save) {
            Ok(Answer::Saved(state)) => {
                machine = move_on(machine, &state, configuration, &console);
                moves += 1;
            }
            other => assert_eq!(status(&machine).stage, Stage::Ended, "{other:?}"),
        }
    }
    console.check();
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
    let disk = std::env::temp_dir().join(format!("weft-boots-{}.img", std::process::id()));
    std::fs::File::create(&disk)
        .and_then(|file| file.set_len(64 << 20))
        .unwrap();
    let work = "weft.run=\"seq 400000 > /tmp/a; dd if=/tmp/a of=/dev/vda bs=16k conv=fsync \
                2>/dev/null; dd if=/dev/vda bs=16k count=200 2>/dev/null | head -c 2000000 | md5sum; \
                head -c 2000000 /tmp/a | md5sum\"";
    let mut configuration = small(2, "busybox.cpio", work);
    configuration.disks = vec![weft_vmm::machine::Disk {
        path: disk.clone(),
        read_only: false,
        direct: false,
    }];
    let (moves, text) = moved(&configuration, Duration::from_millis(25));
    std::fs::remove_file(&disk).unwrap();
    assert!(moves >= 5, "{moves}");
    let sums: Vec<&str> = text.lines().filter(|line| line.ends_with("  -")).collect();
    assert!(sums.len() == 2 && sums[0] == sums[1], "{text}");
}
