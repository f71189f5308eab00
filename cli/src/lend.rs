//! `weft node lend`: what this host lends, while its daemon runs.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use weft_node::config;
use weft_node::lending::{self, LendRequest, LendState};
use weft_node::size::format_bytes;

/// How often what has not left is looked at.
const TURN: Duration = Duration::from_secs(1);

/// Changes what the daemon lends, and waits until no more than that is lent, for `patience` at
/// most.
pub fn run(
    request: &LendRequest,
    patience: Option<Duration>,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let directory = config::directory();
    let mut state = lending::ask(&directory, request)?;
    if *request != LendRequest::default() {
        state = wait(&directory, state, patience)?;
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&state)?);
    } else {
        print!("{}", describe(&state));
    }
    let is_kept = *request == LendRequest::default() || state.excess_bytes == 0;
    Ok(match is_kept {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn wait(
    directory: &Path,
    mut state: LendState,
    patience: Option<Duration>,
) -> anyhow::Result<LendState> {
    let begun = Instant::now();
    let mut told = String::new();
    while state.excess_bytes > 0 {
        if told.is_empty() {
            eprintln!(
                "weft: slices of programs are asked to leave, the cluster moves parts of its \
                 machines (`weft plan` shows what waits), also if you end this command"
            );
        }
        let excess = format_bytes(state.excess_bytes);
        if told != excess {
            eprintln!("weft: {excess} too much is lent");
            told = excess;
        }
        let left = patience.map(|patience| patience.saturating_sub(begun.elapsed()));
        if left == Some(Duration::ZERO) {
            eprintln!(
                "weft: it is still lent after {} s",
                begun.elapsed().as_secs()
            );
            break;
        }
        std::thread::sleep(left.map_or(TURN, |left| TURN.min(left)));
        state = lending::ask(directory, &LendRequest::default())?;
    }
    Ok(state)
}

/// What the daemon lends, for people.
fn describe(state: &LendState) -> String {
    let slices = match state.slices {
        1 => "1 slice".to_owned(),
        slices => format!("{slices} slices"),
    };
    let excess = match state.excess_bytes {
        0 => String::new(),
        excess => format!(", {} too much", format_bytes(excess)),
    };
    let mut text = format!(
        "this host lends {} at most; {} are lent to {slices}{excess}\n",
        format_bytes(state.lends_bytes),
        format_bytes(state.lent_bytes)
    );
    if state.lends_bytes < state.memory_bytes {
        text += &format!(
            "it would lend {} if more than {} of its memory were free\n",
            format_bytes(state.memory_bytes),
            format_bytes(state.keep_free_bytes)
        );
    } else if state.keep_free_bytes > 0 {
        text += &format!(
            "it lends less while less than {} of its memory is free\n",
            format_bytes(state.keep_free_bytes)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lent_and_why_not_more_is_said() {
        let state = LendState {
            memory_bytes: 4 << 30,
            keep_free_bytes: 0,
            lends_bytes: 4 << 30,
            lent_bytes: 1 << 30,
            excess_bytes: 0,
            slices: 1,
        };
        assert_eq!(
            describe(&state),
            "this host lends 4.0 GiB at most; 1.0 GiB are lent to 1 slice\n"
        );
        let short = LendState {
            keep_free_bytes: 2 << 30,
            lends_bytes: 1 << 30,
            lent_bytes: 3 << 30,
            excess_bytes: 2 << 30,
            slices: 2,
            ..state
        };
        let text = describe(&short);
        assert!(text.contains("4.0 GiB if more than 2.0 GiB"), "{text}");
        assert!(text.contains("2 slices, 2.0 GiB too much"), "{text}");
    }
}
