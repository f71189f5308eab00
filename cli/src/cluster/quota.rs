//! `weft cluster quota`.

use std::collections::BTreeSet;

use serde::Serialize;
use weft_cluster::{ANY_USER, Quota, Quotas, Usage, Work};
use weft_node::member::Membership;
use weft_node::said::plain;
use weft_node::size::format_bytes;

use crate::args::QuotaCommand;
use crate::table::{self, Align};

/// A line of `weft cluster quota list --json`.
#[derive(Serialize)]
struct Line {
    user: String,
    /// Null: no bound.
    cores: Option<u32>,
    memory_mib: Option<u64>,
    used: Usage,
}

/// `weft cluster quota`.
pub fn run(command: &QuotaCommand) -> anyhow::Result<()> {
    let (_, cluster) = Membership::joined()?;
    match command {
        QuotaCommand::Set { user, bounds: most } => {
            let memory_mib = most.memory.map(|bytes| bytes.div_ceil(1 << 20));
            let cores = most.cores;
            cluster.set_quota(user, Quota { cores, memory_mib })?;
            let who = match &user[..] {
                ANY_USER => "each user without a quota of its own".to_owned(),
                user => plain(user),
            };
            eprintln!(
                "weft: {who} has at most {} from now on",
                bounds(cores, memory_mib)
            );
        }
        QuotaCommand::End { user } => {
            cluster.end_quota(user)?;
            eprintln!("weft: the quota of {} has ended", plain(user));
        }
        QuotaCommand::List { json } => {
            let lines = lines(&cluster.quotas()?, &cluster.work()?);
            if *json {
                println!("{}", serde_json::to_string_pretty(&lines)?);
            } else {
                print!("{}", show(&lines));
            }
        }
    }
    Ok(())
}

fn bounds(cores: Option<u32>, memory_mib: Option<u64>) -> String {
    let cores = cores.map(|cores| match cores {
        1 => "1 core".to_owned(),
        cores => format!("{cores} cores"),
    });
    let memory = memory_mib.map(|mib| format_bytes(mib << 20));
    cores
        .into_iter()
        .chain(memory)
        .collect::<Vec<_>>()
        .join(" and ")
}

/// Users that have a quota or something that runs.
fn lines(quotas: &Quotas, work: &Work) -> Vec<Line> {
    let usage = work.usage();
    let users: BTreeSet<&String> = quotas.0.keys().chain(usage.keys()).collect();
    let line = |user: &String| {
        let quota = quotas.of(user).unwrap_or_default();
        Line {
            user: user.clone(),
            cores: quota.cores,
            memory_mib: quota.memory_mib,
            used: usage.get(user).copied().unwrap_or_default(),
        }
    };
    users.into_iter().map(line).collect()
}

fn show(lines: &[Line]) -> String {
    let row = |line: &Line| {
        let most = |bound: Option<String>| bound.unwrap_or_else(|| "-".into());
        vec![
            plain(&line.user),
            line.used.cores.to_string(),
            most(line.cores.map(|cores| cores.to_string())),
            format_bytes(line.used.memory_mib << 20),
            most(line.memory_mib.map(|mib| format_bytes(mib << 20))),
        ]
    };
    let rows: Vec<Vec<String>> = lines.iter().map(row).collect();
    let head = [
        ("USER", Align::Left),
        ("CORES", Align::Right),
        ("AT MOST", Align::Right),
        ("MEMORY", Align::Right),
        ("AT MOST", Align::Right),
    ];
    table::render(&head, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_and_use_are_beside_each_other() {
        let quotas = |user: &str, quota| Quotas([(user.to_owned(), quota)].into());
        let quota = Quota {
            cores: Some(4),
            memory_mib: None,
        };
        let text = show(&lines(&quotas("ann", quota), &Work::default()));
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(words, ["ann", "0", "4", "0", "B", "-"]);
        assert_eq!(bounds(Some(1), Some(2048)), "1 core and 2.0 GiB");
    }
}
