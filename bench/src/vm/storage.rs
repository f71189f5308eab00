//! A disk of another node: FragVisor's figure 7.
//!
//! One guest of two vCPUs, of which vCPU 1 reads and writes a disk at random. Both are
//! on one node (local), or each on its own: with the disk at vCPU 1's node, which shows
//! what the guest's kernel costs there; and with the disk at vCPU 0's node, where its
//! queue is served through shared memory (DSM-backed) or where vCPU 1 is (DSM-bypass).

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use crate::program::Place;
use crate::raw::{self, Kind};
use crate::results::{Goal, Table, digits, median};
use crate::vm::way::Way;
use weft_tests::boot::{Boot, Disk, Images, Monitor};

/// More rounds than this take more than a quarter of an hour.
const ROUNDS_MAX: usize = 7;
/// Of the disk that is measured.
const DISK_BYTES: usize = 256 << 20;
/// Sizes of requests, in KiB.
const SIZES_KIB: [u32; 5] = [4, 16, 64, 256, 1024];
/// From here on a node elsewhere is to cost next to nothing; below, shared memory is
/// to cost several times as much.
const LARGE_KIB: u32 = 64;
/// Requests at once.
const DEPTHS: [u32; 2] = [1, 16];
/// Milliseconds of each job, and what goes before them uncounted.
const JOB_MS: u32 = 500;
const RAMP_MS: u32 = 100;

/// A guest whose requests go that way.
fn boot(base: &Boot, disk: &Path, way: Way) -> Boot {
    let mut boot = base.clone();
    let argument = format!("{}{}", disk.display(), way.place());
    if way != Way::Local {
        boot.options.extend(["--nodes".into(), "2".into()]);
    }
    boot.options.extend(["--disk".into(), argument]);
    boot
}

/// How fast the disk may be asked. What is behind it is a file in the host's page cache:
/// a disk that the host's own host shares among many is no measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pace {
    /// As fast as the paper's disk is.
    Paper,
    /// As fast as it can.
    Full,
}

impl Pace {
    const ALL: [Pace; 2] = [Pace::Paper, Pace::Full];

    fn name(self) -> &'static str {
        match self {
            Pace::Paper => "500 MB/s",
            Pace::Full => "none",
        }
    }

    fn option(self) -> &'static str {
        match self {
            // MiB, for reads and for writes.
            Pace::Paper => "--rate=477m,477m",
            Pace::Full => "",
        }
    }
}

/// What fio does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Job {
    writes: bool,
    depth: u32,
    size_kib: u32,
}

impl Job {
    fn all() -> Vec<Job> {
        let mut jobs = Vec::new();
        for writes in [false, true] {
            for depth in DEPTHS {
                for size_kib in SIZES_KIB {
                    jobs.push(Job {
                        writes,
                        depth,
                        size_kib,
                    });
                }
            }
        }
        jobs
    }

    fn rw(self) -> &'static str {
        match self.writes {
            false => "randread",
            true => "randwrite",
        }
    }

    fn name(self) -> String {
        format!("{}-{}k-{}", self.rw(), self.size_kib, self.depth)
    }

    fn words(self) -> String {
        format!(
            " --name={} --rw={} --bs={}k --iodepth={}",
            self.name(),
            self.rw(),
            self.size_kib,
            self.depth
        )
    }
}

/// The command that runs all jobs, one after the other, on vCPU 1: all of fio, for its
/// parts share pages.
fn fio(jobs: &[Job], pace: Pace) -> String {
    let words: String = jobs.iter().map(|job| job.words()).collect();
    format!(
        "taskset -c 1 fio --filename=/dev/vdb --direct=1 --ioengine=libaio \
         --size={DISK_BYTES} --runtime={JOB_MS}ms --ramp_time={RAMP_MS}ms --time_based \
         --stonewall --minimal {}{words}",
        pace.option()
    )
}

/// MB/s of a job, out of a line of fio's terse output (version 3).
fn parse(line: &str, jobs: &[Job]) -> Option<(Job, f64)> {
    let fields: Vec<&str> = line.split(';').collect();
    let name = fields.get(2)?;
    let job = jobs.iter().find(|job| job.name() == **name)?;
    let field = if job.writes { 47 } else { 6 };
    let rate_kib: f64 = fields.get(field)?.parse().ok()?;
    Some((*job, rate_kib * 1024.0 / 1e6))
}

type Samples = BTreeMap<(Pace, Job, Way), Vec<f64>>;

/// What one TCP connection does without anything of Weft.
#[derive(Default)]
struct Tcp {
    round_trips_ns: Vec<f64>,
    mb_per_s: Vec<f64>,
}

impl Tcp {
    fn measure(&mut self, place: &Place) -> Result<()> {
        let raw = raw::measure(Kind::Tcp, &place.work)?;
        self.round_trips_ns.push(raw.blocking_ns);
        self.mb_per_s.push(raw.warm_bytes_per_s / 1e6);
        Ok(())
    }

    /// MB/s at best of a job that, without a limit, does `local` where it needs no
    /// connection: its data cross one as fast as any; a request that is alone waits for
    /// the disk, a round trip and its data, one after the other.
    fn allows(&self, job: Job, local: f64) -> Option<f64> {
        let stream = median(&self.mb_per_s)?;
        let round_trip_us = median(&self.round_trips_ns)? / 1000.0;
        let bytes = f64::from(job.size_kib << 10);
        Some(match job.depth {
            // Bytes a microsecond are MB/s.
            1 => bytes / (bytes / local + round_trip_us + bytes / stream),
            _ => local.min(stream),
        })
    }
}

fn measure(base: &Boot, disk: &Path, pace: Pace, way: Way, samples: &mut Samples) -> Result<()> {
    let jobs = Job::all();
    let mut boot = boot(base, disk, way).running(&fio(&jobs, pace));
    boot.bound = Duration::from_secs(180);
    let run = boot.run(Monitor::Soft)?;
    let lines = run.ended.lines.iter();
    let found: Vec<_> = lines.filter_map(|line| parse(&line.text, &jobs)).collect();
    ensure!(
        found.len() == jobs.len(),
        "fio reports {} jobs of {}:\n{}",
        found.len(),
        jobs.len(),
        run.ended.tail(8)
    );
    for (job, value) in found {
        samples.entry((pace, job, way)).or_default().push(value);
    }
    Ok(())
}

/// The table `vm-nodes-disk`.
///
/// # Errors
/// No images, a guest that does not end well, or fio that does not say what it did.
pub fn storage(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let mut base = images.small(&place.weft)?;
    base.memory_mib = 512;
    base.cpus = 2;
    base.disks = vec![Disk::new(&images.file("debian/root.ext4")?).read_only()];
    base.words = "root=/dev/vda ro".to_string();
    let disk = place.work.join("storage.img");
    // Not sparse: what a host does with holes is another question.
    std::fs::write(&disk, vec![0x5a; DISK_BYTES]).context("the disk to measure")?;
    let mut samples = Samples::new();
    let mut tcp = Tcp::default();
    for _ in 0..repeat.min(ROUNDS_MAX) {
        tcp.measure(place)?;
        for pace in Pace::ALL {
            for way in Way::ALL {
                measure(&base, &disk, pace, way, &mut samples)
                    .with_context(|| format!("{}, {}", pace.name(), way.name()))?;
            }
        }
    }
    Ok(table(&samples, &tcp))
}

fn table(samples: &Samples, tcp: &Tcp) -> Table {
    let mut table = Table::new(
        "vm-nodes-disk",
        "A guest of two vCPUs (Debian's user land, the small kernel, the software vCPU), and fio on vCPU 1 (libaio, one thread, direct, random): both vCPUs on one node (local); each on a node of its own on this host (TCP), with the disk at vCPU 1's node (beside), or at vCPU 0's, the queue served where vCPU 1 is (bypass) or through shared memory (DSM); in alternation. The disk is a file in the host's page cache, asked as fast as it can, or for at most 500 MB/s: FragVisor's figure 7 has one thread on a SATA SSD of 500 MB/s. *TCP allows* is what one raw connection in the same run makes of the local figure: its stream at most, and for single requests the disk without a limit, a round trip and the data one after the other.",
        &[
            "limit",
            "what",
            "local MB/s",
            "beside MB/s",
            "bypass MB/s",
            "DSM MB/s",
            "bypass / local",
            "goal",
            "met",
            "bypass / DSM",
            "goal",
            "met",
            "TCP allows MB/s",
            "bypass / TCP",
        ],
    );
    for pace in Pace::ALL {
        for job in Job::all() {
            let of = |way| median(samples.get(&(pace, job, way))?);
            let [local, beside, bypass, dsm] = Way::ALL.map(of);
            let against =
                |other: Option<f64>| bypass.zip(other).map(|(bypass, other)| bypass / other);
            let (local_goal, dsm_goal) = match job.size_kib {
                LARGE_KIB.. => (Goal::AtLeast(0.9), Goal::None),
                _ => (Goal::None, Goal::AtLeast(5.0)),
            };
            let [of_local, of_dsm] = [against(local), against(dsm)];
            let kind = if job.writes { "writes" } else { "reads" };
            let mut row = vec![
                pace.name().to_string(),
                format!("{kind} of {} KiB, {} at once", job.size_kib, job.depth),
                digits(local),
                digits(beside),
                digits(bypass),
                digits(dsm),
                digits(of_local),
            ];
            row.extend(local_goal.cells(of_local));
            row.push(digits(of_dsm));
            row.extend(dsm_goal.cells(of_dsm));
            let full = samples.get(&(Pace::Full, job, Way::Local));
            let full = full.and_then(|full| tcp.allows(job, median(full)?));
            let allowed = full.zip(local).map(|(full, local)| full.min(local));
            row.extend([allowed, against(allowed)].map(digits));
            table.rows.push(row);
        }
    }
    let named: BTreeMap<String, &Vec<f64>> = samples
        .iter()
        .map(|((pace, job, way), values)| {
            let key = format!("{}, {}, {}", pace.name(), job.name(), way.name());
            (key, values)
        })
        .collect();
    table.samples = json!({
        "mb_per_s": named,
        "tcp_mb_per_s": tcp.mb_per_s,
        "tcp_round_trips_ns": tcp.round_trips_ns,
    });
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fio_prints_is_read() {
        let jobs = Job::all();
        let mut fields = vec!["0".to_string(); 130];
        fields[6] = "1000".into();
        fields[47] = "3000".into();
        for (name, value) in [("randread-64k-16", 1.024), ("randwrite-4k-1", 3.072)] {
            fields[2] = name.into();
            let (job, rate) = parse(&fields.join(";"), &jobs).unwrap();
            assert_eq!((job.name().as_str(), rate), (name, value));
        }
        assert_eq!(parse("weft-guest: hello", &jobs), None);
    }

    #[test]
    fn goals_are_where_they_are_set() {
        let mut samples: Samples = Way::ALL
            .into_iter()
            .zip([100.0, 190.0, 95.0, 20.0])
            .flat_map(|(way, rate)| {
                let jobs = Job::all().into_iter();
                jobs.flat_map(move |job| Pace::ALL.map(|pace| ((pace, job, way), vec![rate])))
            })
            .collect();
        let tcp = Tcp {
            round_trips_ns: vec![60_000.0],
            mb_per_s: vec![50.0],
        };
        let table = table(&samples, &tcp);
        assert_eq!(
            table.rows[0][6..],
            ["0.950", "—", "—", "4.75", "≥ 5", "**no**", "22.4", "4.24"]
        );
        assert_eq!(table.rows[2][6..9], ["0.950", "≥ 0.9", "yes"]);
        // A stream is as fast as it is, however many requests there are.
        assert_eq!(table.rows[9][12], "50.0");
        assert_eq!(table.rows.len(), 2 * Job::all().len());
        // A limit of the disk is one of any way to it.
        samples.insert((Pace::Paper, Job::all()[0], Way::Local), vec![5.0]);
        assert_eq!(super::table(&samples, &tcp).rows[0][12], "5.00");
    }
}
