//! What a page of another node costs, part by part.

use anyhow::{Context as _, Result};
use serde_json::json;

use super::aggregate::{Counted, Samples, Where, number_after};
use crate::program::Place;
use crate::raw::{self, Kind};
use crate::results::{Table, digits, median};
use weft_tests::boot::{Images, Monitor};

/// The back end, and how many pages: so many that those of the boot do not count.
const BACK_ENDS: [(Monitor, usize); 2] = [(Monitor::Soft, 20_000), (Monitor::Kvm, 10_000)];
/// What the guest does with the pages.
const MODES: [&str; 2] = ["read", "write"];
/// The parts of what the guest sees, in order.
const PARTS: [&str; 5] = ["guest", "trap", "asking", "wait", "installing"];

/// The table `vm-nodes-latency`: a remote fault from the guest's view, and where its
/// time goes.
pub fn latency(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let small = images.small(&place.weft)?;
    let mut samples = Samples::new();
    let mut raw_us = Vec::new();
    for _ in 0..repeat {
        for (monitor, pages) in BACK_ENDS {
            for mode in MODES {
                let script = format!("fetch -n {pages} {mode}");
                let mut boot = Where::TwoNodes.boot(&small).running(&script);
                boot.memory_mib = 512;
                boot.bound = std::time::Duration::from_secs(300);
                let parts = parts(&Counted::of(&boot, monitor, place)?, mode)?;
                for (part, us) in PARTS.iter().zip(parts) {
                    let key = format!("{} {mode} {part}", monitor.name());
                    samples.entry(key).or_default().push(us);
                }
            }
        }
        raw_us.push(raw::measure(Kind::Tcp, &place.work)?.blocking_ns / 1000.0);
    }
    let mut table = Table::new(
        "vm-nodes-latency",
        "vCPU 0 uses pages that vCPU 1 on another node of this host (TCP) wrote last, one after the other without neighbours; means of all faults of a run, medians of the runs. *Trap*: what the guest sees beyond what the memory's shell counts, that is getting out of guest code and back in. *Asking*: until the request has left. *Wait*: until the page is here, with what the other node does. *Installing*: until its user can go on. The raw round trip is a request of 8 bytes answered with 4096 over one TCP connection between two processes, in the same run.",
        &[
            "what",
            "the guest sees",
            "trap",
            "asking",
            "wait",
            "installing",
            "raw round trip",
            "against raw",
        ],
    );
    let raw = median(&raw_us);
    for (monitor, _) in BACK_ENDS {
        for mode in MODES {
            let parts = PARTS.map(|part| {
                let key = format!("{} {mode} {part}", monitor.name());
                median(samples.get(&key).map_or(&[][..], Vec::as_slice))
            });
            let us = |value: Option<f64>| format!("{} µs", digits(value));
            let mut row = vec![format!("{}, to {mode}", monitor.name())];
            row.extend(parts.map(us));
            row.push(us(raw));
            row.push(digits(parts[0].zip(raw).map(|(guest, raw)| guest / raw)));
            table.rows.push(row);
        }
    }
    table.samples = json!({"us": samples, "raw_us": raw_us});
    Ok(table)
}

/// Microseconds of a fault, by [`PARTS`].
fn parts(counted: &Counted, mode: &str) -> Result<[f64; 5]> {
    let line = counted.run.ended.line(&format!("fetch {mode}"));
    let guest = line
        .and_then(|line| number_after(&line.text, "mean"))
        .context("fetch said nothing")?;
    let of = |name: &str| counted.value(&format!("slice0.memory.{name}"));
    let faults = ["read-faults", "write-faults", "upgrade-faults"]
        .iter()
        .fold(0.0, |sum, name| sum + of(name));
    let mean_us = |name: &str| of(name) / faults / 1000.0;
    let (waited, asking) = (mean_us("waited-ns"), mean_us("asking-ns"));
    let installing = mean_us("installing-ns");
    let wait = waited - asking - installing;
    Ok([guest, guest - waited, asking, wait, installing])
}
