//! `weft doctor`: what this host has and lacks, and what fixes it.

use std::io::IsTerminal;
use std::process::ExitCode;

use weft_node::host::{self, Check, CheckState};

use crate::vm;

/// Prints every check; fails when Weft cannot work here. Virtual machines never
/// make it fail: they need nothing but memory.
pub fn run(json: bool) -> anyhow::Result<ExitCode> {
    let mut checks = host::check_all();
    checks.extend(vm::checks());
    if json {
        println!("{}", serde_json::to_string_pretty(&checks)?);
    } else {
        print!("{}", render(&checks, std::io::stdout().is_terminal()));
    }
    let works = checks.iter().all(|check| check.state != CheckState::Fail);
    Ok(if works {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn render(checks: &[Check], colour: bool) -> String {
    let wide = checks
        .iter()
        .map(|check| check.name.len())
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    for check in checks {
        let (mark, code) = match check.state {
            CheckState::Ok => ("ok  ", 32),
            CheckState::Warn => ("warn", 33),
            CheckState::Fail => ("FAIL", 31),
        };
        let mark = match colour {
            true => format!("\x1b[{code}m{mark}\x1b[0m"),
            false => mark.to_owned(),
        };
        text += &format!("{mark}  {:wide$}  {}\n", check.name, check.found);
        if let Some(fix) = &check.fix {
            text += &format!("      {:wide$}  fix: {fix}\n", "");
        }
    }
    let failed = checks
        .iter()
        .filter(|check| check.state == CheckState::Fail)
        .count();
    text += &match failed {
        0 => "\nWeft works on this host.\n".to_owned(),
        1 => "\nWeft does not work here yet: 1 check failed.\n".to_owned(),
        n => format!("\nWeft does not work here yet: {n} checks failed.\n"),
    };
    text
}
