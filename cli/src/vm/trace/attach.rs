//! A trace of a machine that runs.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use weft_coherent_memory::{FAULTS_MAX, SliceFaults};
use weft_monitor::trace::{FORMAT, Trace};

use crate::vm::running::find_or_only;

/// How often faults are read.
const LOOK: Duration = Duration::from_millis(100);
/// The bounds of `--for`.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(3600);

/// Reads the faults of `machine` for so long, or until it ends.
pub fn attach(machine: Option<&str>, time: Duration) -> anyhow::Result<Trace> {
    if !(SHORTEST..=LONGEST).contains(&time) {
        bail!(
            "--for {}: must be {} to {} seconds",
            time.as_secs_f64(),
            SHORTEST.as_secs_f64(),
            LONGEST.as_secs()
        );
    }
    let (client, view) = find_or_only(machine)?;
    let slices = view.configuration.slices.len();
    if slices == 0 {
        bail!(
            "vm {} stays on one node: it has no remote faults to trace",
            view.name
        );
    }
    let mut trace = Trace {
        format: FORMAT,
        name: view.name.clone(),
        kernel: view.configuration.kernel,
        seconds: 0.0,
        pages: Vec::new(),
        faults: Vec::new(),
    };
    // Without numbers: what comes from now on.
    let first = client.faults(&[]);
    trace.append(first.with_context(|| format!("vm {}", view.name))?.slices);
    let start = Instant::now();
    let mut behind = false;
    while start.elapsed() < time {
        if !behind {
            let left = time.saturating_sub(start.elapsed());
            std::thread::sleep(left.min(LOOK));
        }
        match client.faults(&trace.next(slices, u64::MAX)) {
            Ok(faults) => {
                let full = |slice: &SliceFaults| slice.faults.len() == FAULTS_MAX;
                behind = faults.slices.iter().any(full);
                trace.append(faults.slices);
            }
            Err(error) if error.has_ended() => {
                eprintln!("weft: vm {} has ended: the trace ends here", view.name);
                break;
            }
            Err(error) => {
                eprintln!("weft: vm {}: {error}: the trace ends here", view.name);
                break;
            }
        }
    }
    trace.seconds = start.elapsed().as_secs_f64();
    Ok(trace)
}
