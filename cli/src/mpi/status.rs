//! `weft mpi status` and `weft mpi list`.

use std::process::ExitCode;

use anyhow::bail;
use serde::Serialize;
use weft_mpi::launcher;
use weft_mpi::request::{self, Answer, Request, Status};
use weft_node::size::format_bytes;

use crate::table::{self, Align};

/// Sentences of what happened that are shown.
const LOG_SHOWN: usize = 8;

/// A cluster, as `weft mpi list` has it.
#[derive(Serialize)]
struct Listed {
    name: String,
    /// None if no launcher answers.
    phase: Option<String>,
    hosts: Option<usize>,
    machines: Option<usize>,
}

pub fn status_of(name: &str) -> anyhow::Result<Status> {
    match request::ask(&launcher::requests_socket(name)?, &Request::Status)? {
        Answer::Status(status) => Ok(*status),
        Answer::Done(said) | Answer::Refused(said) => bail!("{name}: {said}"),
        Answer::Output(_) => bail!("{name}: an answer to another request"),
    }
}

/// `weft mpi list`.
pub fn list(json: bool) -> anyhow::Result<ExitCode> {
    let listed = launcher::names()?.into_iter().map(|name| {
        let status = status_of(&name).ok();
        Listed {
            phase: status.as_ref().map(|status| status.phase.clone()),
            hosts: status.as_ref().map(|status| status.hosts.len()),
            machines: status.as_ref().map(|status| status.machines.len()),
            name,
        }
    });
    let listed: Vec<Listed> = listed.collect();
    if json {
        println!("{}", serde_json::to_string_pretty(&listed)?);
    } else if listed.is_empty() {
        eprintln!("weft: there is no cluster");
    } else {
        let number = |number: Option<usize>| number.map_or(String::new(), |n| n.to_string());
        let row = |listed: &Listed| {
            let phase = listed.phase.clone();
            vec![
                listed.name.clone(),
                phase.unwrap_or_else(|| "no launcher".into()),
                number(listed.hosts),
                number(listed.machines),
            ]
        };
        let headings = [
            ("cluster", Align::Left),
            ("phase", Align::Left),
            ("hosts", Align::Right),
            ("machines", Align::Right),
        ];
        let rows: Vec<Vec<String>> = listed.iter().map(row).collect();
        print!("{}", table::render(&headings, &rows));
    }
    Ok(ExitCode::SUCCESS)
}

/// `weft mpi status`.
pub fn show(name: &str, json: bool) -> anyhow::Result<ExitCode> {
    let status = status_of(name)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        print!("{}", text(&status));
    }
    Ok(ExitCode::SUCCESS)
}

fn text(status: &Status) -> String {
    let program = status.program.as_deref().unwrap_or("no program");
    let mut text = format!(
        "{}: {}, {:.0} s, {program}\n{} of {} hosts, {} asked for, {} moves\n\n",
        status.name,
        status.phase,
        status.seconds,
        status.hosts.len(),
        status.wanted,
        status.asked,
        status.moves,
    );
    let hosts = [
        ("host", Align::Left),
        ("job", Align::Left),
        ("time left", Align::Right),
        ("to leave it", Align::Right),
        ("memory", Align::Right),
        ("machines", Align::Left),
    ];
    let row = |host: &request::HostStatus| {
        let there = status.machines.iter();
        let there = there.filter(|machine| machine.is_on(&host.name));
        let machines: Vec<String> = there
            .map(|machine| match &machine.moves_to {
                Some(to) => format!("{} (to {to})", machine.name),
                None => machine.name.clone(),
            })
            .collect();
        let name = match (host.answers, host.leaves) {
            (false, _) => format!("{} (silent)", host.name),
            (true, true) => format!("{} (leaves)", host.name),
            (true, false) => host.name.clone(),
        };
        vec![
            name,
            host.job.clone(),
            host.left.map_or("?".into(), clock),
            format!("{:.1} s", host.leaving_takes),
            format_bytes(host.memory),
            machines.join(", "),
        ]
    };
    let rows: Vec<Vec<String>> = status.hosts.iter().map(row).collect();
    text += &table::render(&hosts, &rows);
    let nowhere = status
        .machines
        .iter()
        .filter(|machine| machine.host.is_none());
    let nowhere: Vec<&str> = nowhere.map(|machine| machine.name.as_str()).collect();
    if !nowhere.is_empty() {
        text += &format!("on no host: {}\n", nowhere.join(", "));
    }
    if let Some(trouble) = &status.trouble {
        text += &format!("\n{trouble}\n");
    }
    text += "\n";
    for line in status.log.iter().rev().take(LOG_SHOWN).rev() {
        text += &format!("{line}\n");
    }
    text
}

/// As `1:02:03`; below an hour as `2:03`.
pub fn clock(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_shown_as_on_a_clock() {
        assert_eq!(clock(-1.0), "0:00");
        assert_eq!(clock(61.9), "1:01");
        assert_eq!(clock(3661.0), "1:01:01");
    }
}
