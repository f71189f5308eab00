//! `weft plan`, and `--dry-run`.

use std::process::ExitCode;
use std::time::Duration;

use weft_cluster::{Overview, Plan, Planner, WorkRequest};
use weft_node::member::Membership;
use weft_node::said::plain;
use weft_node::size::format_bytes;

use crate::table::{self, Align};

/// Prints what would become of a request, and asks for nothing.
pub fn show_trial(request: &WorkRequest) -> anyhow::Result<ExitCode> {
    let (_, cluster) = Membership::joined()?;
    let mut state = cluster.state()?;
    if state.work.placed.contains_key(&request.name) {
        anyhow::bail!(weft_cluster::ClusterError::WorkNameTaken(
            request.name.clone()
        ));
    }
    state.work = state.work.with_trial(request.clone());
    state.hands_off = true;
    let plans = Planner::default().update(Duration::ZERO, &state);
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

/// `weft plan`.
pub fn show(json: bool) -> anyhow::Result<ExitCode> {
    let (_, cluster) = Membership::joined()?;
    let overview = cluster.overview()?;
    if json {
        println!("{}", serde_json::to_string_pretty(&overview)?);
    } else {
        print!("{}", render(&overview));
    }
    Ok(ExitCode::SUCCESS)
}

fn mib(mib: u64) -> String {
    format_bytes(mib << 20)
}

fn render(overview: &Overview) -> String {
    use Align::{Left, Right};
    let leader = overview.leader.as_deref().map_or_else(
        || "no host decides: run `weft node start` on a member".to_owned(),
        |leader| format!("{} decides", plain(leader)),
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
                host.state.name().to_owned(),
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
    for host in &overview.hosts {
        if let Some(why) = &host.trouble {
            text += &format!("\n{} is expected to fail: {}.\n", host.name, plain(why));
        }
    }
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
                    run.name.clone(),
                    run.kind.name().to_owned(),
                    plain(&run.user),
                    run.state().to_owned(),
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
                    wait.name.clone(),
                    wait.kind.name().to_owned(),
                    plain(&wait.user),
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
        .filter_map(|run| run.move_state.as_ref())
    {
        text += &format!("\n{}\n", plain(state));
    }
    for next in &overview.next_moves {
        text += &format!("\nNext: {}\n", plain(&next.why));
    }
    for key in &overview.damaged {
        text += &format!(
            "\nThe record {} cannot be read: `weft cluster forget` with its name removes it.\n",
            plain(key)
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
