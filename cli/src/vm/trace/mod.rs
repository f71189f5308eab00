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
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use weft_coherent_memory::{FaultRecord, PAGES_MAX, SliceFaults, SlicePages};
use weft_machine::{Configuration, Handle};

use super::args::TraceArgs;
use super::symbols::Symbols;
use tables::Tables;

/// Version of the file's layout.
const FORMAT: u32 = 1;

/// What was seen of a machine's faults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// Version of this layout.
    pub format: u32,
    /// The machine; empty where its process does not know.
    pub name: String,
    pub kernel: PathBuf,
    /// Over how long.
    pub seconds: f64,
    /// The counts of the whole run by page; none where only some seconds were
    /// looked at: then the faults are all there is.
    pub pages: Vec<SlicePages>,
    /// Faults one by one.
    pub faults: Vec<SliceFaults>,
}

impl Trace {
    /// Of a machine that ended, with what it kept.
    pub fn kept(handle: &Handle, configuration: &Configuration, seconds: f64) -> Trace {
        let mut trace = Trace {
            format: FORMAT,
            name: String::new(),
            kernel: configuration.kernel.clone(),
            seconds,
            // A machine that failed may have nothing more to say.
            pages: handle.pages().unwrap_or_default(),
            faults: Vec::new(),
        };
        let slices = configuration.slices.len();
        // As often as there is something: what was kept has an end.
        while let Ok(more) = handle.faults(trace.next(slices, 0).into_iter().map(Some).collect()) {
            if !trace.append(more) {
                break;
            }
        }
        trace
    }

    /// By slice: the number of the next fault.
    fn next(&self, slices: usize, first: u64) -> Vec<u64> {
        let mut next = vec![first; slices];
        for slice in &self.faults {
            if let Some(next) = next.get_mut(slice.slice) {
                *next = slice.next;
            }
        }
        next
    }

    /// Adds what was read; whether there was any.
    fn append(&mut self, more: Vec<SliceFaults>) -> bool {
        let mut any = false;
        for more in more {
            any |= !more.faults.is_empty();
            match self.faults.iter_mut().find(|own| own.slice == more.slice) {
                None => self.faults.push(more),
                Some(own) => {
                    own.next = more.next;
                    own.missed += more.missed;
                    own.faults.extend(more.faults);
                }
            }
        }
        any
    }

    fn records(&self) -> impl Iterator<Item = &FaultRecord> {
        self.faults.iter().flat_map(|slice| &slice.faults)
    }

    fn missed(&self) -> u64 {
        self.faults.iter().map(|slice| slice.missed).sum()
    }

    fn more_faults(&self) -> u64 {
        self.pages.iter().map(|slice| slice.more_faults).sum()
    }

    fn more_pages(&self) -> u64 {
        self.pages.iter().map(|slice| slice.more_pages).sum()
    }
}

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
