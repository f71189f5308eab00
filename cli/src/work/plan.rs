//! `weft plan`, and `--dry-run`.

use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;
use weft_cluster::{Member, MoveOrder, POLICY, Placed, Plan, Planner, Work, WorkPart, WorkRequest};
use weft_node::member::Membership;
use weft_node::said::plain;
use weft_node::size::format_bytes;
use weft_place::policy_by_name;

use crate::table::{self, Align};

pub(super) fn planner() -> anyhow::Result<Planner> {
    Ok(Planner::new(policy_by_name(POLICY)?))
}

/// Prints what would become of a request, and asks for nothing.
pub fn show_trial(request: &WorkRequest) -> anyhow::Result<ExitCode> {
    let (_, cluster) = Membership::joined()?;
    let (members, work) = (cluster.members()?, cluster.work()?);
    if work.placed.contains_key(&request.name) {
        anyhow::bail!(weft_cluster::ClusterError::WorkNameTaken(
            request.name.clone()
        ));
    }
    let work = work.with_trial(request.clone());
    let plans = planner()?.update(Duration::ZERO, &members, &work, true);
    for plan in plans {
        match plan {
            Plan::Place { asked, why, .. } if asked.request == *request => {
                println!("{why}");
                return Ok(ExitCode::SUCCESS);
            }
            Plan::Answer { asked, why, .. } if asked.request == *request => {
                println!("{why}");
                return Ok(ExitCode::FAILURE);
            }
            _ => {}
        }
    }
    anyhow::bail!("the scheduler has no answer for {}", request.name)
}

#[derive(Serialize)]
struct HostLine {
    name: String,
    alive: bool,
    cordoned: bool,
    draining: bool,
    cores: u32,
    cores_free: u32,
    memory_mib: u64,
    memory_free_mib: u64,
}

#[derive(Serialize)]
struct RunLine<'a> {
    name: &'a str,
    kind: &'static str,
    user: &'a str,
    home: &'a str,
    parts: &'a [WorkPart],
    agent: bool,
    why: &'a str,
    /// Where it moves to, and why.
    moving: Option<&'a MoveOrder>,
    /// Why the last move did not come about.
    failure: Option<&'a str>,
    #[serde(skip)]
    placed: &'a Placed,
}

#[derive(Serialize)]
struct WaitLine<'a> {
    name: &'a str,
    kind: &'static str,
    user: &'a str,
    home: &'a str,
    cores: u32,
    memory_mib: u64,
    hosts_max: u32,
    priority: u8,
    why: String,
}

#[derive(Serialize)]
struct Overview<'a> {
    cluster: &'a str,
    policy: &'a str,
    hands_off: bool,
    leader: Option<String>,
    hosts: Vec<HostLine>,
    runs: Vec<RunLine<'a>>,
    waits: Vec<WaitLine<'a>>,
    damaged: &'a [String],
}

/// `weft plan`.
pub fn show(json: bool) -> anyhow::Result<ExitCode> {
    let (_, cluster) = Membership::joined()?;
    let (members, work) = (cluster.members()?, cluster.work()?);
    let mut planner = planner()?;
    // What it would answer now: what the leader said may be older.
    let plans = planner.update(Duration::ZERO, &members, &work, true);
    let overview = Overview {
        cluster: &cluster.identity().name,
        policy: POLICY,
        hands_off: cluster.hands_off()?,
        leader: cluster.leader()?.map(|leader| leader.name),
        hosts: hosts(&planner, &members),
        runs: runs(&work),
        waits: waits(&work, &plans),
        damaged: &work.damaged,
    };
    if json {
        println!("{}", serde_json::to_string_pretty(&overview)?);
    } else {
        print!("{}", render(&overview));
    }
    Ok(ExitCode::SUCCESS)
}

fn hosts(planner: &Planner, members: &[Member]) -> Vec<HostLine> {
    let inventory = planner.inventory();
    let line = |host: &weft_place::Host| {
        let free = inventory.room_for_more(host.id);
        let member = members.iter().find(|m| m.record.name == *host.name);
        HostLine {
            name: host.name.to_string(),
            alive: member.is_some_and(|member| member.report.is_some()),
            cordoned: member.is_some_and(|member| member.cordon.cordoned),
            draining: member.is_some_and(|member| member.cordon.draining),
            cores: host.capacity.cores,
            cores_free: free.cores,
            memory_mib: host.capacity.memory_mib,
            memory_free_mib: free.memory_mib,
        }
    };
    let mut lines: Vec<HostLine> = inventory.hosts().map(line).collect();
    lines.sort_by(|one, other| one.name.cmp(&other.name));
    lines
}

fn runs(work: &Work) -> Vec<RunLine<'_>> {
    let mut lines = Vec::new();
    for placed in work.placed.values() {
        let request = &placed.request;
        lines.push(RunLine {
            name: &request.name,
            kind: request.kind.name(),
            user: &request.user,
            home: &request.home,
            parts: &placed.parts,
            agent: work.agents.contains(&request.name),
            why: &placed.why,
            moving: placed.order.as_ref(),
            failure: placed.failure.as_deref(),
            placed,
        });
    }
    lines
}

fn waits<'a>(work: &'a Work, plans: &[Plan]) -> Vec<WaitLine<'a>> {
    let line = |asked: &'a weft_cluster::Asked| {
        let request = &asked.request;
        let said = work.answer(&request.name, asked.id);
        let now = plans.iter().find_map(|plan| match plan {
            Plan::Place { asked: of, why, .. } | Plan::Answer { asked: of, why, .. } => {
                (of.id == asked.id).then_some(why)
            }
            _ => None,
        });
        WaitLine {
            name: &request.name,
            kind: request.kind.name(),
            user: &request.user,
            home: &request.home,
            cores: request.cores,
            memory_mib: request.memory_mib,
            hosts_max: request.hosts_max,
            priority: request.priority,
            why: now
                .or(said.map(|said| &said.why))
                .cloned()
                .unwrap_or_default(),
        }
    };
    work.asked.iter().map(line).collect()
}

fn state(host: &HostLine) -> &'static str {
    match host {
        HostLine { alive: false, .. } => "no daemon",
        HostLine { draining: true, .. } => "drained",
        HostLine { cordoned: true, .. } => "cordoned",
        _ => "lends",
    }
}

fn mib(mib: u64) -> String {
    format_bytes(mib << 20)
}

fn render(overview: &Overview<'_>) -> String {
    use Align::{Left, Right};
    let leader = overview.leader.as_deref().map_or_else(
        || "no host decides: run `weft node start` on a member".to_owned(),
        |leader| format!("{leader} decides"),
    );
    let mut text = format!(
        "cluster {}: {leader}, by {}{}\n\n",
        overview.cluster,
        overview.policy,
        if overview.hands_off {
            ", and moves nothing by itself (`weft cluster hands-off`)"
        } else {
            ""
        }
    );
    let rows: Vec<Vec<String>> = overview
        .hosts
        .iter()
        .map(|host| {
            vec![
                host.name.clone(),
                state(host).to_owned(),
                format!("{} of {}", host.cores_free, host.cores),
                format!("{} of {}", mib(host.memory_free_mib), mib(host.memory_mib)),
            ]
        })
        .collect();
    let head = [
        ("HOST", Left),
        ("STATE", Left),
        ("FREE CORES", Right),
        ("FREE MEMORY", Right),
    ];
    text += &table::render(&head, &rows);
    if !overview.runs.is_empty() {
        let rows: Vec<Vec<String>> = overview
            .runs
            .iter()
            .map(|run| {
                let parts = run
                    .parts
                    .iter()
                    .map(|part| format!("{} {}/{}", part.host, part.cores, mib(part.memory_mib)));
                vec![
                    run.name.to_owned(),
                    run.kind.to_owned(),
                    plain(run.user),
                    match run {
                        RunLine { agent: false, .. } => "agent silent",
                        RunLine {
                            moving: Some(_), ..
                        } => "moves",
                        _ => "runs",
                    }
                    .to_owned(),
                    parts.collect::<Vec<_>>().join(", "),
                ]
            })
            .collect();
        let head = [
            ("RUNS", Left),
            ("KIND", Left),
            ("USER", Left),
            ("STATE", Left),
            ("HOSTS (CORES/MEMORY)", Left),
        ];
        text += "\n";
        text += &table::render(&head, &rows);
    }
    if !overview.waits.is_empty() {
        let rows: Vec<Vec<String>> = overview
            .waits
            .iter()
            .map(|wait| {
                vec![
                    wait.name.to_owned(),
                    wait.kind.to_owned(),
                    plain(wait.user),
                    format!("{}/{}", wait.cores, mib(wait.memory_mib)),
                    plain(&wait.why),
                ]
            })
            .collect();
        let head = [
            ("WAITS", Left),
            ("KIND", Left),
            ("USER", Left),
            ("CORES/MEMORY", Left),
            ("NEXT", Left),
        ];
        text += "\n";
        text += &table::render(&head, &rows);
    }
    for state in overview
        .runs
        .iter()
        .filter_map(|run| run.placed.move_state())
    {
        text += &format!("\n{}\n", plain(&state));
    }
    for key in overview.damaged {
        text += &format!(
            "\nThe record {key} cannot be read: `weft cluster forget` with its name removes it.\n"
        );
    }
    text
}

/// `weft cluster forget`.
pub fn forget(name: &str) -> anyhow::Result<()> {
    let (_, cluster) = Membership::joined()?;
    cluster.forget_work(name)?;
    eprintln!("weft: the cluster has forgotten {name}: its name and its room are free");
    Ok(())
}
