//! `weft cluster …`.

mod access;
pub mod log;
mod quota;
mod serve;

use std::io::BufRead;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Serialize;
use weft_cluster::{Cluster, ClusterError, HostRecord, HostReport, MoveWish, Token};
use weft_node::config;
use weft_node::member::{self, MemberError, Membership, StoreAddress};
use weft_node::size::format_bytes;

use crate::args::{ClusterCommand, HostArgs, StoreArgs};
use crate::table::{self, Align};

/// Does what was asked.
pub fn run(command: ClusterCommand) -> anyhow::Result<ExitCode> {
    match command {
        ClusterCommand::Init {
            cluster,
            store,
            host,
        } => init(&cluster, &store, &host)?,
        ClusterCommand::Invite { minutes } => invite(minutes)?,
        ClusterCommand::Join { token, store, host } => join(token.as_deref(), &store, &host)?,
        ClusterCommand::Leave { host } => leave(host.as_deref())?,
        ClusterCommand::Move {
            name, host, from, ..
        } => {
            return match host {
                Some(to) => crate::work::move_part(&name, MoveWish { from, to }),
                None => crate::work::call_off(&name),
            };
        }
        ClusterCommand::Forget { name } => crate::work::forget(&name)?,
        ClusterCommand::Policy { policy } => crate::work::policy(policy.as_deref())?,
        ClusterCommand::HandsOff { hands_off } => crate::work::hands_off(hands_off)?,
        ClusterCommand::Log { follow, json } => log::show(follow, json)?,
        ClusterCommand::Store(args) => serve::store(&args)?,
        ClusterCommand::Serve(args) => serve::serve(&args)?,
        ClusterCommand::Access { command } => access::run(&command)?,
        ClusterCommand::Quota { command } => quota::run(&command)?,
        ClusterCommand::Agent => return crate::work::agent::run(),
        ClusterCommand::Status { json } => status(json)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn init(name: &str, store: &StoreArgs, host: &HostArgs) -> anyhow::Result<()> {
    let directory = config::directory();
    no_member(&directory)?;
    let record = describe(&directory, host)?;
    let address = address_of(store);
    let cluster = Cluster::init(address.open()?, name, &record)?;
    become_member(&directory, &address, &cluster, &record)?;
    eprintln!(
        "weft: made the cluster {name}; this host is {} in it",
        record.name
    );
    eprintln!("weft: `weft cluster invite` makes a token for each other host");
    Ok(())
}

fn invite(minutes: u64) -> anyhow::Result<()> {
    let (membership, cluster) = Membership::joined()?;
    let token = cluster.invite(Duration::from_secs(60 * minutes))?;
    eprintln!(
        "weft: one host can join {} with this token, within {minutes} min: on that host, \
         `weft node init`, then",
        cluster.identity().name
    );
    println!("weft cluster join {token} --store {}", membership.store);
    if membership.store_authority.is_some() {
        eprintln!("weft: it needs certificates of its own for the store (--store-authority, …)");
    }
    Ok(())
}

fn join(token: Option<&str>, store: &StoreArgs, host: &HostArgs) -> anyhow::Result<()> {
    let directory = config::directory();
    no_member(&directory)?;
    let token: Token = match token {
        Some(token) => token.parse()?,
        None => {
            let mut line = String::new();
            std::io::stdin()
                .lock()
                .read_line(&mut line)
                .context("cannot read the token")?;
            line.parse()?
        }
    };
    let record = describe(&directory, host)?;
    let address = address_of(store);
    let cluster = Cluster::open(address.open()?)?;
    cluster.join(&token, &record)?;
    become_member(&directory, &address, &cluster, &record)?;
    eprintln!(
        "weft: this host is {} in the cluster {}",
        record.name,
        cluster.identity().name
    );
    eprintln!(
        "weft: its members may borrow from this host and lend to it: {} says what else",
        directory.join(member::MEMBER_FILE).display()
    );
    eprintln!("weft: `weft node start` lends this host to them (restart it if it runs)");
    Ok(())
}

fn no_member(directory: &Path) -> anyhow::Result<()> {
    match Membership::load(directory)? {
        None => Ok(()),
        Some(_) => Err(MemberError::Member(directory.join(member::MEMBER_FILE)).into()),
    }
}

/// Notes here what the cluster has already. If that fails, the cluster forgets it.
fn become_member(
    directory: &Path,
    address: &StoreAddress,
    cluster: &Cluster,
    record: &HostRecord,
) -> anyhow::Result<()> {
    let membership = Membership::new(address, cluster, &record.name);
    if let Err(error) = membership.save(directory) {
        let undone = cluster.leave(&record.name, Some(&record.key));
        return Err(match undone {
            Ok(()) => error.into(),
            Err(kept) => anyhow::Error::new(error).context(format!(
                "{} is a member now and cannot act as one: `weft cluster leave {0}` on another \
                 host ends that ({kept})",
                record.name
            )),
        });
    }
    Ok(())
}

fn leave(host: Option<&str>) -> anyhow::Result<()> {
    let directory = config::directory();
    let membership = Membership::required()?;
    let host = host.unwrap_or(&membership.host);
    if host != membership.host {
        membership.cluster()?.leave(host, None)?;
        eprintln!("weft: {host} is no member any more: the others refuse its key within seconds");
        return Ok(());
    }
    let key = config::load_keys(&directory)?.public().to_string();
    let left = membership
        .cluster()
        .and_then(|cluster| Ok(cluster.leave(host, Some(&key))?));
    match left {
        // The store has forgotten this host, or the cluster: what is here must go, too.
        Err(
            MemberError::Cluster(ClusterError::NoSuchHost(_) | ClusterError::None)
            | MemberError::OtherCluster { .. },
        ) => {}
        outcome => outcome?,
    }
    Membership::remove(&directory)?;
    eprintln!("weft: this host has left the cluster (restart its daemon if one runs)");
    Ok(())
}

fn address_of(store: &StoreArgs) -> StoreAddress {
    // The files are read by other processes, which may run in another folder.
    let absolute = |path: &Option<std::path::PathBuf>| {
        path.as_ref()
            .map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone()))
    };
    StoreAddress {
        store: store.store.clone(),
        authority: absolute(&store.store_authority),
        certificate: absolute(&store.store_certificate),
        key: absolute(&store.store_key),
    }
}

/// What this host is. Its key must exist: `weft node init`.
fn describe(directory: &Path, host: &HostArgs) -> anyhow::Result<HostRecord> {
    let own = weft_node::host::host_name();
    let own = own.trim();
    let name = match &host.name {
        Some(name) => name.clone(),
        None => own
            .split('.')
            .next()
            .unwrap_or_default()
            .to_ascii_lowercase(),
    };
    let address = match &host.address {
        Some(address) => address.clone(),
        None if own.is_empty() => bail!(
            "this host has no name: give --name, and with --address where other hosts reach it"
        ),
        None => own.to_owned(),
    };
    Ok(member::describe(directory, &name, &address)?)
}

/// One line of `weft cluster status --json`.
#[derive(Serialize)]
struct Line<'a> {
    name: &'a str,
    address: &'a str,
    alive: bool,
    this_host: bool,
    cores: u32,
    memory_bytes: u64,
    version: &'a str,
    report: Option<&'a HostReport>,
}

#[derive(Serialize)]
struct Status<'a> {
    cluster: &'a str,
    id: &'a str,
    store: &'a str,
    hosts: Vec<Line<'a>>,
}

fn status(json: bool) -> anyhow::Result<()> {
    let (membership, cluster) = Membership::joined()?;
    let members = cluster.members()?;
    if !members
        .iter()
        .any(|member| member.record.name == membership.host)
    {
        eprintln!(
            "weft: this host ({}) is not in the cluster any more: `weft cluster leave` forgets it",
            membership.host
        );
    }
    for key in cluster.damaged()? {
        eprintln!(
            "weft: the record {key} is no member's: another one has its key or number, or it \
             cannot be read; `weft cluster leave` with its name removes it"
        );
    }
    let hosts: Vec<Line<'_>> = members
        .iter()
        .map(|member| Line {
            name: &member.record.name,
            address: &member.record.address,
            alive: member.report.is_some(),
            this_host: member.record.name == membership.host,
            cores: member.record.cores,
            memory_bytes: member.record.memory_bytes,
            version: &member.record.version,
            report: member.report.as_ref(),
        })
        .collect();
    let status = Status {
        cluster: &cluster.identity().name,
        id: &cluster.identity().id,
        store: &membership.store,
        hosts,
    };
    if json {
        println!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        print!("{}", show(&status));
    }
    Ok(())
}

fn show(status: &Status<'_>) -> String {
    let bytes = |bytes: Option<u64>| bytes.map_or("-".to_owned(), format_bytes);
    let rows: Vec<Vec<String>> = status
        .hosts
        .iter()
        .map(|host| {
            let report = host.report;
            vec![
                format!(
                    "{}{}",
                    host.name,
                    if host.this_host { " (this host)" } else { "" }
                ),
                if host.alive { "lends" } else { "no daemon" }.to_owned(),
                host.cores.to_string(),
                report.map_or("-".to_owned(), |report| format!("{:.1}", report.load)),
                format_bytes(host.memory_bytes),
                bytes(report.map(|report| report.free_bytes)),
                bytes(report.map(|report| report.lends_bytes)),
                bytes(report.map(|report| report.lent_bytes)),
                report.map_or("-".to_owned(), |report| report.slices.to_string()),
                host.address.to_owned(),
            ]
        })
        .collect();
    let head = [
        ("HOST", Align::Left),
        ("STATE", Align::Left),
        ("CORES", Align::Right),
        ("LOAD", Align::Right),
        ("MEMORY", Align::Right),
        ("FREE", Align::Right),
        ("LENDS", Align::Right),
        ("LENT", Align::Right),
        ("SLICES", Align::Right),
        ("ADDRESS", Align::Left),
    ];
    format!("cluster {} ({})\n", status.cluster, status.store) + &table::render(&head, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_line_up_and_silent_ones_have_dashes() {
        let report = HostReport {
            lends_bytes: 4 << 30,
            slices: 1,
            ..HostReport::default()
        };
        let line = |name, report| Line {
            name,
            address: "a:7117",
            alive: Option::is_some(&report),
            this_host: name == "alpha",
            cores: 2,
            memory_bytes: 8 << 30,
            version: "1",
            report,
        };
        let status = Status {
            cluster: "c",
            id: "0",
            store: "etcd://127.0.0.1:2379",
            hosts: vec![line("alpha", Some(&report)), line("beta", None)],
        };
        let text = show(&status);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[2].starts_with("alpha (this host)  lends"), "{text}");
        assert!(
            lines[3].contains("no daemon") && lines[3].contains(" - "),
            "{text}"
        );
    }
}
