//! `weft vm top`: what vCPUs and nodes do, every second.
//!
//! | file | holds |
//! | --- | --- |
//! | `sample` | rates, from one reading of the counters to the next |
//! | `render` | those as text |

mod render;
mod sample;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use weft_api::State;
use weft_api::client::{Client, ClientError};

use super::args::TopArgs;
use super::registry::VIEW_BOUND;
use super::running::find_or_only;
use sample::{Reading, Sample};

/// How often is looked.
const PERIOD: Duration = Duration::from_secs(1);
/// Moves to the first row and clears all below.
const CLEAR: &str = "\x1b[H\x1b[J";

/// `weft vm top`.
pub fn run(args: &TopArgs) -> anyhow::Result<ExitCode> {
    let (client, view) = find_or_only(args.machine.as_deref())?;
    let name = view.name;
    let clear = !args.json && !args.once && io::stdout().is_terminal();
    let mut before = read(&client).with_context(|| format!("vm {name}"))?;
    loop {
        let due = Instant::now() + PERIOD;
        std::thread::sleep(PERIOD);
        let now = match read(&client) {
            Ok(reading) if reading.view.state != State::Ended => reading,
            // Its socket goes with it.
            Ok(_) | Err(ClientError::Connect { .. } | ClientError::BrokenOff(_)) => {
                eprintln!("weft: vm {name} has ended");
                return Ok(ExitCode::SUCCESS);
            }
            Err(error) => return Err(error).with_context(|| format!("vm {name}")),
        };
        let sample = Sample::between(&before, &now);
        if show(&sample, args.json, clear).is_err() || args.once {
            // Nobody reads any more, or has what was asked for.
            return Ok(ExitCode::SUCCESS);
        }
        before = now;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
}

fn read(client: &Client) -> Result<Reading, ClientError> {
    Ok(Reading {
        view: client.view(VIEW_BOUND)?,
        counters: client.counters()?,
    })
}

fn show(sample: &Sample, json: bool, clear: bool) -> io::Result<()> {
    let mut output = io::stdout().lock();
    if json {
        serde_json::to_writer(&mut output, sample)?;
        output.write_all(b"\n")?;
    } else {
        let start = if clear { CLEAR } else { "" };
        write!(output, "{start}{}", render::render(sample))?;
    }
    output.flush()
}
