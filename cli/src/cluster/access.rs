//! `weft cluster access`.

use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use weft_cluster::{Role, seconds_now};
use weft_node::member::Membership;

use super::log::time_of;
use crate::args::{AccessCommand, RoleArg};
use crate::table::{self, Align};

/// A line of `weft cluster access list --json`.
#[derive(Serialize)]
struct KeyLine<'a> {
    name: &'a str,
    role: Role,
    good_until: u64,
    good: bool,
}

/// `weft cluster access`.
pub fn run(command: &AccessCommand) -> anyhow::Result<()> {
    let (_, cluster) = Membership::joined()?;
    match command {
        AccessCommand::Make { name, role, days } => {
            let role = match role {
                RoleArg::Look => Role::Look,
                RoleArg::Use => Role::Use,
                RoleArg::Run => Role::Run,
            };
            let secret = cluster.make_access(name, role, Duration::from_secs(days * 86400))?;
            eprintln!(
                "weft: this key lets a client {} for {days} days; it is shown once:",
                match role {
                    Role::Look => "look at everything",
                    Role::Use => "look at everything, and have what runs move",
                    Role::Run => "run the cluster",
                }
            );
            println!("{secret}");
        }
        AccessCommand::End { name } => {
            cluster.end_access(name)?;
            eprintln!("weft: the key {name} is of no use any more");
        }
        AccessCommand::List { json } => {
            let keys = cluster.access().context("cannot read the keys")?;
            let now = seconds_now();
            let lines = keys.list().into_iter().map(|key| KeyLine {
                name: &key.name,
                role: key.role,
                good_until: key.good_until,
                good: now < key.good_until,
            });
            let lines: Vec<KeyLine<'_>> = lines.collect();
            if *json {
                println!("{}", serde_json::to_string_pretty(&lines)?);
            } else {
                print!("{}", show_keys(&lines));
            }
        }
    }
    Ok(())
}

fn show_keys(lines: &[KeyLine<'_>]) -> String {
    let row = |line: &KeyLine<'_>| {
        let until = match line.good {
            true => time_of(line.good_until),
            false => "too old".to_owned(),
        };
        vec![line.name.to_owned(), line.role.name().to_owned(), until]
    };
    let rows: Vec<Vec<String>> = lines.iter().map(row).collect();
    let head = [
        ("KEY", Align::Left),
        ("MAY", Align::Left),
        ("UNTIL (UTC)", Align::Left),
    ];
    table::render(&head, &rows)
}
