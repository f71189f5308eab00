//! `weft node …`.

use std::process::ExitCode;

use anyhow::Context;
use serde::Serialize;
use weft_node::config::{self, Config, Peer};
use weft_node::daemon::{Daemon, DaemonOptions};
use weft_node::protocol::Status;
use weft_node::remote::{Connection, Identity};
use weft_node::size::format_bytes;

use crate::args::NodeCommand;
use crate::table::{self, Align};

/// Does what was asked.
pub fn run(command: NodeCommand) -> anyhow::Result<ExitCode> {
    match command {
        NodeCommand::Init => init(),
        NodeCommand::Trust { key, name, address } => trust(&key, name, address),
        NodeCommand::Start {
            listen,
            memory,
            slices,
        } => start(&DaemonOptions {
            listen,
            memory_bytes: memory,
            slices,
            ..DaemonOptions::default()
        }),
        NodeCommand::List { hosts, json } => list(&hosts, json),
    }
}

fn init() -> anyhow::Result<ExitCode> {
    let directory = config::directory();
    let key = config::init(&directory)?;
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    eprintln!(
        "weft: made a key and a configuration in {}",
        directory.display()
    );
    eprintln!("weft: on every host that is to lend to this one, or borrow from it, run");
    println!("weft node trust {key} {}", host.trim());
    Ok(ExitCode::SUCCESS)
}

fn trust(key: &str, name: Option<String>, address: Option<String>) -> anyhow::Result<ExitCode> {
    let directory = config::directory();
    let key = key.parse().with_context(|| format!("`{key}`"))?;
    let known = Config::load(&directory)?.peers.len();
    let peer = Peer {
        name: name.unwrap_or_else(|| format!("peer-{}", known + 1)),
        key,
        address: address.map(|address| config::with_port(&address)),
    };
    config::trust(&directory, &peer)?;
    eprintln!("weft: trusts {} ({})", peer.name, key.fingerprint());
    eprintln!("weft: a daemon that runs here learns it when it is started again");
    Ok(ExitCode::SUCCESS)
}

fn start(options: &DaemonOptions) -> anyhow::Result<ExitCode> {
    let daemon = Daemon::listen(options, log)?;
    let status = daemon.status();
    log(&format!(
        "listening on {}, lending {} in at most {} slices{}",
        daemon.address().context("cannot find out the address")?,
        format_bytes(status.memory_bytes),
        status.slices,
        match status.confined {
            true => "",
            false => "; not root, so slices run as this user (confined by seccomp alone)",
        }
    ));
    daemon.serve()?;
    Ok(ExitCode::SUCCESS)
}

/// One line of the daemon's log. The service manager adds the time.
fn log(text: &str) {
    eprintln!("weft: {text}");
}

/// What one node answered.
#[derive(Serialize)]
struct Answer {
    host: String,
    reachable: bool,
    #[serde(flatten)]
    status: Option<Status>,
    error: Option<String>,
}

fn list(hosts: &[String], json: bool) -> anyhow::Result<ExitCode> {
    let identity = Identity::load(None)?;
    let hosts: Vec<String> = match hosts {
        [] => identity
            .config()
            .peers
            .iter()
            .map(|peer| peer.name.clone())
            .collect(),
        hosts => hosts.to_vec(),
    };
    if hosts.is_empty() {
        eprintln!("weft: no node is trusted yet: `weft node trust KEY NAME` adds one");
    }
    // Side by side: an unreachable host must not hold up the others.
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let asking: Vec<_> = hosts
            .iter()
            .map(|host| scope.spawn(|| ask(&identity, host)))
            .collect();
        asking
            .into_iter()
            .filter_map(|thread| thread.join().ok())
            .collect()
    });
    if json {
        println!("{}", serde_json::to_string_pretty(&answers)?);
    } else if !answers.is_empty() {
        print!("{}", render(&answers));
    }
    let all = answers.iter().all(|answer| answer.reachable);
    Ok(if all {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn ask(identity: &Identity, host: &str) -> Answer {
    let status = Connection::open(identity, host).and_then(|mut node| node.status());
    let (status, error) = match status {
        Ok(status) => (Some(status), None),
        Err(error) => (None, Some(error.to_string())),
    };
    Answer {
        host: host.to_owned(),
        reachable: status.is_some(),
        status,
        error,
    }
}

fn render(answers: &[Answer]) -> String {
    use Align::{Left, Right};
    let headings = [
        ("node", Left),
        ("version", Left),
        ("free", Right),
        ("lends", Right),
        ("slices", Right),
        ("of VMs", Right),
        ("CPUs", Right),
        ("", Left),
    ];
    let rows: Vec<Vec<String>> = answers
        .iter()
        .map(|answer| match (&answer.status, &answer.error) {
            (Some(status), _) => vec![
                answer.host.clone(),
                status.version.clone(),
                format_bytes(status.memory_free_bytes),
                format_bytes(status.memory_bytes),
                format!("{}/{}", status.slices_used, status.slices),
                status.machine_slices.to_string(),
                status.cpus.to_string(),
                status.cpu_name.clone(),
            ],
            (None, error) => {
                let mut row = vec![answer.host.clone()];
                row.extend(["-"; 6].map(str::to_owned));
                row.push(error.clone().unwrap_or_default());
                row
            }
        })
        .collect();
    table::render(&headings, &rows)
}
