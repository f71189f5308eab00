//! The launcher or the daemon as a process of its own, for the tests of this
//! crate: both take over a process's signals, and children die with the thread
//! that started them, so neither can run on a thread of the test harness. The
//! environment says what to be.

use std::fs;
use std::time::Duration;

use weft_node::daemon::{Daemon, DaemonOptions};
use weft_node::error::LaunchError;
use weft_node::launch;
use weft_node::options::{Placement, RunOptions};
use weft_node::report::LiveView;
use weft_node::spawn::Ended;

fn main() {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    match variable("WEFT_TEST_CASE").as_str() {
        "launch" => play_launch(&variable),
        "daemon" => play_daemon(&variable),
        other => panic!("no such case: `{other}`"),
    }
}

fn play_launch(variable: &dyn Fn(&str) -> String) {
    let on = variable("WEFT_TEST_ON");
    let mut options = RunOptions::new("/bin/true");
    options.arguments = variable("WEFT_TEST_SCRIPT")
        .split(' ')
        .map(Into::into)
        .collect();
    options.placement = match on.as_str() {
        "" => Placement::Embedded(variable("WEFT_TEST_NODES").parse().unwrap()),
        hosts => Placement::Remote(hosts.split(',').map(str::to_owned).collect()),
    };
    options.memory_bytes = vec![variable("WEFT_TEST_MEMORY").parse().unwrap()];
    options.lease = Duration::from_secs(2);
    // Not the harness's thread but one that lives as long as the process.
    match launch::launch(&options, &LiveView::new(), &mut |text| {
        eprintln!("weft: {text}")
    }) {
        Ok(outcome) => {
            let report = serde_json::to_vec(&outcome.report).unwrap();
            fs::write(variable("WEFT_TEST_REPORT"), report).unwrap();
            launch::end_like(outcome.ended)
        }
        Err(error) => {
            eprintln!("weft: {}", weft_node::error::sentence(&error));
            if let LaunchError::Interrupted { signal } = error {
                launch::end_like(Ended::Signaled(signal as i32));
            }
            std::process::exit(error.exit_code())
        }
    }
}

fn play_daemon(variable: &dyn Fn(&str) -> String) {
    let options = DaemonOptions {
        configuration: None,
        listen: Some("127.0.0.1:0".into()),
        memory_bytes: Some(variable("WEFT_TEST_MEMORY").parse().unwrap()),
        cores: None,
        slices: Some(4),
        // The stand-in for the runtime is not static.
        unconfined: true,
    };
    let daemon = Daemon::listen(&options, |_| {}).unwrap();
    let address = format!("{}\n", daemon.address().unwrap());
    fs::write(variable("WEFT_TEST_ADDRESS"), address).unwrap();
    daemon.serve().unwrap();
    std::process::exit(0);
}
