//! What `weft-monitor` says to a process that cannot be its launcher or daemon.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use weft_node::monitor_protocol::{self, SliceBoot, Terms};
use weft_node::spawn::{self, Ended, Executable, Process, Role};

const MONITOR: &str = env!("CARGO_BIN_EXE_weft-monitor");
const BOUND: Duration = Duration::from_secs(30);

fn start(arguments: &[&str]) -> Process {
    let role = Role::Node {
        arguments,
        console: false,
    };
    spawn::start(&Executable::open(Path::new(MONITOR)).unwrap(), &role).unwrap()
}

fn refusal(mut process: Process) -> String {
    let why = monitor_protocol::expect_ready(&mut process).unwrap_err();
    assert_eq!(process.end_within(BOUND).unwrap(), Ended::Exited(125));
    why.to_string()
}

#[test]
fn another_version_is_refused_before_anything_is_read() {
    let process = start(&["weft-monitor", "0.0.1"]);
    let why = refusal(process);
    assert!(
        why.contains("the Weft that started it of 0.0.1: install both"),
        "{why}"
    );
}

#[test]
fn settings_that_make_no_machine_are_refused() {
    let process = start(&monitor_protocol::ARGUMENTS);
    let boot = SliceBoot {
        number: 1,
        lease_ms: 5000,
        settings: "{\"configuration\": 1}".into(),
        terms: Terms::Own(String::new()),
        links: Vec::new(),
        joins: None,
    };
    monitor_protocol::send_boot(&process.control, boot, Vec::new(), &[]).unwrap();
    let why = refusal(process);
    assert!(
        why.contains("the description of the machine is invalid"),
        "{why}"
    );
}

#[test]
fn a_process_without_a_parent_says_what_starts_it() {
    let output = Command::new(MONITOR).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("neither `weft vm run` nor"), "{said}");
}
