//! `weft vm trace`: faults that needed another node, by vCPU and by page.
//!
//! | file | holds |
//! | --- | --- |
//! | `attach` | a trace of a machine that runs |
//! | `tables` | what it says |
//! | `render` | that as text |

mod attach;
mod render;
mod tables;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use weft_coherent_memory::PAGES_MAX;
use weft_monitor::trace::{FORMAT, Trace};

use super::args::TraceArgs;
use super::symbols::Symbols;
use tables::Tables;

/// `weft vm trace`.
pub fn run(args: &TraceArgs) -> anyhow::Result<ExitCode> {
    if !(1..=PAGES_MAX).contains(&args.top) {
        bail!("--top {}: must be 1 to {PAGES_MAX}", args.top);
    }
    // Before anybody waits for seconds.
    let named = args.system_map.as_deref().map(Symbols::read).transpose()?;
    let trace = match &args.file {
        Some(path) => read(path)?,
        None => attach::attach(args.machine.as_deref(), args.seconds)?,
    };
    let symbols = named.or_else(|| symbols(&trace));
    let tables = Tables::new(&trace, symbols.as_ref(), args.top);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&tables)?);
    } else {
        print!("{}", render::render(&tables));
    }
    Ok(ExitCode::SUCCESS)
}

fn symbols(trace: &Trace) -> Option<Symbols> {
    let found = Symbols::beside(&trace.kernel);
    if found.is_none() {
        eprintln!(
            "weft: {} has no symbols, and there is no System.map beside it: give one with \
            --system-map",
            trace.kernel.display()
        );
    }
    found.map(|(_, symbols)| symbols)
}

fn read(path: &Path) -> anyhow::Result<Trace> {
    let cannot = || format!("cannot read the trace {}", path.display());
    let file = File::open(path).with_context(cannot)?;
    let trace: Trace = serde_json::from_reader(BufReader::new(file)).with_context(cannot)?;
    if trace.format != FORMAT {
        bail!(
            "{}: trace format {} is not supported: this version of Weft reads format {FORMAT}",
            path.display(),
            trace.format
        );
    }
    Ok(trace)
}

/// At the end of `weft vm run --trace FILE`: the file, and the tables on standard
/// error.
pub fn write(trace: &Trace, file: File, path: &Path, name: &str) -> anyhow::Result<()> {
    let named = Trace {
        name: name.to_owned(),
        ..trace.clone()
    };
    let cannot = || format!("cannot write the trace to {}", path.display());
    let mut writer = BufWriter::new(file);
    serde_json::to_writer(&mut writer, &named).with_context(cannot)?;
    writer.write_all(b"\n").with_context(cannot)?;
    writer.flush().with_context(cannot)?;
    let symbols = symbols(&named);
    let tables = Tables::new(&named, symbols.as_ref(), SHOWN);
    eprint!("{}", render::render(&tables));
    Ok(())
}

/// Pages that the end of a run shows.
const SHOWN: usize = 10;
