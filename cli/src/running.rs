//! `weft list`, `weft stretch`, `weft shrink`: talking to aggregates that run.

use std::process::ExitCode;

use weft_node::report::{AggregateView, NodeState};
use weft_node::rundir::{self, AggregateReply, AggregateRequest, Listed};
use weft_node::size::format_pages;

use crate::summary::format_seconds;
use crate::table::{self, Align};

fn directory() -> anyhow::Result<std::path::PathBuf> {
    Ok(rundir::directory()?)
}

/// `weft list`.
pub fn list(json: bool) -> anyhow::Result<ExitCode> {
    let Listed { views, silent } = rundir::list(&directory()?)?;
    for pid in silent {
        eprintln!("weft: the aggregate of process {pid} runs, but does not answer");
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&views)?);
    } else if views.is_empty() {
        eprintln!("weft: no aggregate is running");
    } else {
        print!("{}", render(&views));
    }
    Ok(ExitCode::SUCCESS)
}

fn render(views: &[AggregateView]) -> String {
    use Align::{Left, Right};
    let headings = [
        ("pid", Right),
        ("time", Right),
        ("node", Left),
        ("state", Left),
        ("resident", Right),
        ("budget", Right),
        ("program", Left),
    ];
    let mut rows = Vec::new();
    for view in views {
        for node in &view.nodes {
            let first = node.node == 0;
            let executing = node.node == view.executing_node;
            rows.push(vec![
                if first {
                    view.pid.to_string()
                } else {
                    String::new()
                },
                if first {
                    format_seconds(view.wall_time_s)
                } else {
                    String::new()
                },
                format!("{} {}", node.node, node.name),
                match node.state {
                    NodeState::Running if executing => "executing",
                    NodeState::Running if view.stretched => "memory",
                    NodeState::Running => "waiting",
                    NodeState::Left => "left",
                    NodeState::Lost => "lost",
                }
                .to_owned(),
                format_pages(node.counters.resident_pages),
                format_pages(node.budget_pages),
                if first {
                    view.command.join(" ")
                } else {
                    String::new()
                },
            ]);
        }
    }
    table::render(&headings, &rows)
}

/// `weft stretch`.
pub fn stretch(pid: u32) -> anyhow::Result<ExitCode> {
    done(pid, &AggregateRequest::Stretch)
}

/// `weft shrink`.
pub fn shrink(pid: u32, node: u32) -> anyhow::Result<ExitCode> {
    done(pid, &AggregateRequest::Shrink { node })
}

fn done(pid: u32, request: &AggregateRequest) -> anyhow::Result<ExitCode> {
    match rundir::ask(&directory()?, pid, request)? {
        AggregateReply::Done => Ok(ExitCode::SUCCESS),
        AggregateReply::Refused(why) => anyhow::bail!("aggregate {pid}: {why}"),
        AggregateReply::View(_) => anyhow::bail!(
            "aggregate {pid} sent a reply that does not match the \
        request"
        ),
    }
}
