//! `weft node …`.

use std::process::ExitCode;

use anyhow::Context;
use serde::Serialize;
use weft_node::config::{self, Config, May, Peer};
use weft_node::daemon::{Daemon, DaemonOptions};
use weft_node::host;
use weft_node::lending::LendRequest;
use weft_node::protocol::NodeStatus;
use weft_node::remote::{Connection, Identity};
use weft_node::size::format_bytes;

use crate::args::NodeCommand;
use crate::lend;
use crate::table::{self, Align};
use crate::work::{self, Waiting};

/// Does what was asked.
pub fn run(command: NodeCommand) -> anyhow::Result<ExitCode> {
    match command {
        NodeCommand::Init => init(),
        NodeCommand::Trust {
            key,
            name,
            address,
            may,
        } => trust(&key, name, address, may.into()),
        NodeCommand::Start {
            listen,
            memory,
            cores,
            slices,
        } => start(&DaemonOptions {
            listen,
            memory_bytes: memory,
            cores,
            slices,
            ..DaemonOptions::default()
        }),
        NodeCommand::Lend {
            memory,
            keep_free,
            wait,
            json,
        } => {
            let request = LendRequest {
                memory_bytes: memory,
                keep_free_bytes: keep_free,
            };
            lend::run(&request, wait, json)
        }
        NodeCommand::Cordon { host } => work::cordon(host),
        NodeCommand::Drain { host, wait, json } => {
            let patience = wait;
            work::drain(host, Waiting { patience, json })
        }
        NodeCommand::Evacuate {
            host,
            why,
            wait,
            json,
        } => {
            let patience = wait;
            work::evacuate(host, &why, Waiting { patience, json })
        }
        NodeCommand::Uncordon { host } => work::uncordon(host),
        NodeCommand::List { hosts, json } => list(&hosts, json),
    }
}

fn init() -> anyhow::Result<ExitCode> {
    let directory = config::directory();
    let key = config::init(&directory)?;
    let host = host::host_name();
    eprintln!(
        "weft: created a key and a configuration in {}",
        directory.display()
    );
    let host = host.trim();
    eprintln!("weft: to let another host lend to this one, run there");
    println!("weft node trust --may borrow {key} {host}");
    eprintln!("weft: to let another host borrow from this one, run there");
    println!("weft node trust --may lend {key} {host}");
    Ok(ExitCode::SUCCESS)
}

fn trust(
    key: &str,
    name: Option<String>,
    address: Option<String>,
    may: May,
) -> anyhow::Result<ExitCode> {
    let directory = config::directory();
    let key = key.parse().with_context(|| format!("`{key}`"))?;
    let known = Config::load(&directory)?.peers.len();
    let name = name.unwrap_or_else(|| format!("peer-{}", known + 1));
    let peer = Peer {
        address: address.map(|address| config::with_port(&address)),
        ..Peer::new(name, key, may)
    };
    let user = config::trust(&directory, &peer)?;
    let name = &peer.name;
    eprintln!("weft: added {name} ({})", key.fingerprint());
    match may.lend() {
        true => eprintln!(
            "weft: {name} may lend to this host: its owner can read everything that runs there \
            with `--on {name}`"
        ),
        false => eprintln!("weft: {name} may not lend to this host (--may both would let it)"),
    }
    match may.borrow() {
        true => eprintln!(
            "weft: {name} may borrow from this host: its programs are confined here, run as \
            user {user} where the daemon is root, and open only the disks and networks that {} \
            lists for it",
            directory.join(config::CONFIG_FILE).display()
        ),
        false => eprintln!("weft: {name} may not borrow from this host (--may both would let it)"),
    }
    eprintln!("weft: restart the daemon on this host, if one runs, to apply this");
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
    if let Some(why) = daemon.memory_is_watched() {
        log(&format!(
            "checks the memory of slices itself, without a memory cgroup ({why})"
        ));
    }
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
    status: Option<NodeStatus>,
    error: Option<String>,
}

fn list(hosts: &[String], json: bool) -> anyhow::Result<ExitCode> {
    let identity = Identity::load(None)?;
    let hosts: Vec<String> = match hosts {
        [] => identity
            .config()
            .peers
            .iter()
            .filter(|peer| peer.may().lend())
            .map(|peer| peer.name.clone())
            .collect(),
        hosts => hosts.to_vec(),
    };
    if hosts.is_empty() {
        eprintln!(
            "weft: no node may lend to this host yet: `weft node trust --may lend KEY NAME` adds one"
        );
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
