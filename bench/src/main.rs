//! `weft-bench`: measures, and renews the tables of `bench/RESULTS.md`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use weft_bench::cluster::drain::drain;
use weft_bench::cluster::figure_14::figure_14;
use weft_bench::elastic::{Network, elastic};
use weft_bench::memcached;
use weft_bench::micro;
use weft_bench::mpi;
use weft_bench::ping;
use weft_bench::placement::placement;
use weft_bench::program::Place;
use weft_bench::raw::{self, Kind};
use weft_bench::results::Table;
use weft_bench::vm::aggregate;
use weft_bench::vm::checkpoint::checkpoint;
use weft_bench::vm::devices::devices;
use weft_bench::vm::downtime::downtime;
use weft_bench::vm::follow::{follow, follow_gigabit};
use weft_bench::vm::footprint::footprint;
use weft_bench::vm::guest::guest;
use weft_bench::vm::home::home;
use weft_bench::vm::join::join;
use weft_bench::vm::kvm::kvm;
use weft_bench::vm::latency::latency;
use weft_bench::vm::memcached::memcached as vm_memcached;
use weft_bench::vm::migrate::migrate;
use weft_bench::vm::nginx::nginx;
use weft_bench::vm::ping::ping as vm_ping;
use weft_bench::vm::restore::restore;
use weft_bench::vm::save::{save_live, save_since};
use weft_bench::vm::save_hosts::save_hosts;
use weft_bench::vm::smemv::smemv;
use weft_bench::vm::smemv_hosts::smemv_hosts;
use weft_bench::vm::soft::soft;
use weft_bench::vm::split::split;
use weft_bench::vm::storage::storage;
use weft_bench::vm::vcpu_move::vcpu_move;
use weft_bench::vm::web::web;
use weft_bench::vm::with_disks::with_disks;
use weft_bench::working_set::{oversubscribed, working_set};
use weft_tests::boot::Images;

const BENCHMARKS: [&str; 44] = [
    "latency",
    "unstretched",
    "throughput",
    "working-set",
    "oversubscribed",
    "elastic-unshaped",
    "elastic-gigabit",
    "vm-soft",
    "vm-kvm",
    "vm-devices",
    "vm-start",
    "vm-nodes-boot",
    "vm-nodes-cpu",
    "vm-nodes-guest",
    "vm-nodes-kvm",
    "vm-nodes-latency",
    "vm-nodes-sharing",
    "vm-nodes-disk",
    "vm-nodes-net",
    "vm-nodes-nginx",
    "vm-vcpu-move",
    "vm-follow",
    "vm-follow-gigabit",
    "vm-checkpoint",
    "vm-save-live",
    "vm-save-since",
    "vm-restore",
    "vm-migrate",
    "vm-downtime",
    "vm-join",
    "vm-split",
    "vm-smemv",
    "vm-smemv-hosts",
    "vm-memcached",
    "vm-ping",
    "vm-home",
    "vm-save-hosts",
    "vm-with-disks",
    "cluster-drain",
    "mpi-gain",
    "mpi-network",
    "mpi-moves",
    "placement",
    "cluster-figure-14",
];

/// Measures weft against native runs and raw sockets.
#[derive(Debug, Parser)]
#[command(name = "weft-bench")]
struct Options {
    /// The weft that is measured.
    #[arg(long, default_value = "target/release/weft")]
    weft: PathBuf,
    /// The built programs.
    #[arg(long, default_value = "target/programs")]
    programs: PathBuf,
    /// What `make guest guest-debian` left.
    #[arg(long, default_value = "target/guest")]
    guest: PathBuf,
    /// Where the samples go.
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
    /// The page whose tables are renewed.
    #[arg(long, default_value = "bench/RESULTS.md")]
    page: PathBuf,
    /// Repetitions of each measurement.
    #[arg(long, default_value_t = 5)]
    repeat: usize,
    /// Of the six programs only those whose name contains this.
    #[arg(long, value_delimiter = ',')]
    program: Vec<String>,
    /// Prints the tables, writes nothing.
    #[arg(long)]
    dry: bool,
    /// Benchmarks to run; all when none is named.
    #[arg(value_parser = BENCHMARKS)]
    names: Vec<String>,
    #[command(subcommand)]
    part: Option<Part>,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// The other side of a raw connection; started by the benchmark itself.
    #[command(hide = true)]
    RawServer {
        /// Kind of socket.
        kind: String,
        /// Where the client listens.
        address: String,
    },
    /// Asks a machine for echoes until standard input ends, and draws what came back.
    ///
    /// Lines `step NAME` and `done NOTE` on standard input say what happens to the machine.
    Ping(ping::Options),
    /// Asks a machine's memcached until standard input ends, and counts; lines as for `ping`.
    Memcached(memcached::Options),
}

impl Options {
    fn images(&self) -> Images {
        Images {
            folder: self.guest.clone(),
        }
    }
}

fn run_one(name: &str, options: &Options, place: &Place) -> Result<Vec<Table>> {
    let repeat = options.repeat.max(1);
    let table = match name {
        "latency" => micro::latency(place, repeat),
        "unstretched" => micro::unstretched(place, repeat),
        "throughput" => micro::throughput(place, repeat),
        "working-set" => working_set(place, repeat),
        "oversubscribed" => oversubscribed(place, repeat),
        "vm-start" => footprint(&place.weft, &options.images(), &place.work, repeat),
        "vm-soft" => soft(place, &options.images(), repeat),
        "vm-kvm" => kvm(place, &options.images(), repeat),
        "vm-nodes-boot" => aggregate::boots(place, &options.images(), repeat),
        "vm-nodes-cpu" => aggregate::cpu(place, &options.images(), repeat),
        "vm-nodes-guest" => guest(place, &options.images(), repeat),
        "vm-nodes-kvm" => aggregate::cpu_on_kvm(place, &options.images(), repeat),
        "vm-nodes-latency" => latency(place, &options.images(), repeat),
        "vm-nodes-sharing" => aggregate::sharing(place, &options.images(), repeat),
        "vm-nodes-disk" => storage(place, &options.images(), repeat),
        "vm-nodes-net" => web(place, &options.images(), repeat),
        "vm-nodes-nginx" => nginx(place, &options.images(), repeat),
        "vm-vcpu-move" => return vcpu_move(place, &options.images(), repeat),
        "cluster-drain" => drain(place, &options.images(), repeat),
        "mpi-gain" => mpi::gain::gain(place, &options.images(), repeat),
        "mpi-network" => mpi::network::network(place, &options.images(), repeat),
        "mpi-moves" => mpi::moves::moves(place, &options.images(), repeat),
        "placement" => return placement(place, repeat),
        "cluster-figure-14" => figure_14(place, &options.images(), repeat),
        "vm-follow" => follow(place, &options.images(), repeat),
        "vm-follow-gigabit" => follow_gigabit(place, &options.images(), repeat),
        "vm-checkpoint" => checkpoint(place, &options.images(), repeat),
        "vm-save-live" => save_live(place, &options.images(), repeat),
        "vm-save-since" => save_since(place, &options.images(), repeat),
        "vm-restore" => restore(place, &options.images(), repeat),
        "vm-migrate" => migrate(place, &options.images(), repeat),
        "vm-downtime" => downtime(place, &options.images(), repeat),
        "vm-split" => split(place, &options.images(), repeat),
        "vm-smemv" => smemv(place, &options.images(), repeat),
        "vm-join" => join(place, &options.images(), repeat),
        "vm-smemv-hosts" => smemv_hosts(place, &options.images(), repeat),
        "vm-memcached" => vm_memcached(place, &options.images(), repeat),
        "vm-ping" => vm_ping(place, &options.images(), repeat),
        "vm-home" => home(place, &options.images(), repeat),
        "vm-save-hosts" => save_hosts(place, &options.images(), repeat),
        "vm-with-disks" => with_disks(place, &options.images(), repeat),
        "vm-devices" => devices(place, &options.images(), repeat),
        "elastic-gigabit" => elastic(place, Network::Gigabit, repeat, &options.program),
        _ => elastic(place, Network::Unshaped, repeat, &options.program),
    };
    Ok(vec![table?])
}

fn run(options: &Options) -> Result<bool> {
    match &options.part {
        Some(Part::RawServer { kind, address }) => {
            raw::serve(Kind::from_name(kind)?, address)?;
            return Ok(true);
        }
        Some(Part::Ping(options)) => {
            ping::run(options)?;
            return Ok(true);
        }
        Some(Part::Memcached(options)) => {
            memcached::run(options)?;
            return Ok(true);
        }
        None => {}
    }
    let work = std::env::temp_dir().join(format!("weft-bench-{}", std::process::id()));
    std::fs::create_dir_all(&work)?;
    let absolute = |path: &PathBuf| {
        std::fs::canonicalize(path)
            .with_context(|| format!("{} is missing: `make build programs`", path.display()))
    };
    let place = Place {
        weft: absolute(&options.weft)?,
        programs: absolute(&options.programs)?,
        work: work.clone(),
    };
    let names: Vec<&str> = match options.names.as_slice() {
        [] => BENCHMARKS.to_vec(),
        names => names.iter().map(String::as_str).collect(),
    };
    let mut whole = true;
    for name in names {
        eprintln!("{name}:");
        match run_one(name, options, &place) {
            Ok(tables) => {
                for table in tables {
                    println!("\n## {}\n\n{}", table.name, table.to_markdown());
                    if !options.dry {
                        table.write(&options.results, &options.page)?;
                    }
                }
            }
            Err(error) => {
                eprintln!("{name}: not measured: {error:#}");
                whole = false;
            }
        }
    }
    std::fs::remove_dir_all(&work)?;
    Ok(whole)
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("weft-bench: {error:#}");
            ExitCode::from(2)
        }
    }
}
