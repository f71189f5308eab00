//! `weft-e2e`: the end-to-end suites, with a table and a closing line.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::builder::PossibleValue;
use clap::{Parser, ValueEnum};
use weft_tests::boot::Images;
use weft_tests::case::Case;
use weft_tests::context::Context;
use weft_tests::matrix::{self, Filter};
use weft_tests::report::{Report, Verdict};
use weft_tests::suite::{Plan, run_corpus};
use weft_tests::{
    aggregate, corpus, ends, lend, loss, machines, members, mpi, owner, setup, tamper, user, vm,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// Results against native runs.
    Corpus,
    /// Errors before the start.
    Setup,
    /// Causes that must be told, and nodes lost at random moments.
    Loss,
    /// Lending to a program that turns against its node.
    Lend,
    /// As an ordinary user.
    User,
    /// `weft cluster`, with a real etcd.
    Cluster,
    /// The command `weft vm`: errors before the start, console, API, ends.
    Vm,
    /// Linux guests under `weft vm run`.
    Machines,
    /// One Linux over several nodes of this host.
    Aggregate,
    /// `weft mpi`: MPI programs on machines that move between hosts.
    Mpi,
}

impl Suite {
    /// Whether it waits most of its time: for leases, bounds and moves.
    fn waits(self) -> bool {
        match self {
            Suite::Setup | Suite::Loss | Suite::Lend | Suite::User => true,
            Suite::Cluster | Suite::Mpi => true,
            Suite::Corpus | Suite::Vm | Suite::Machines | Suite::Aggregate => false,
        }
    }
}

/// Runs commands natively and under weft, and compares.
#[derive(Debug, Parser)]
#[command(name = "weft-e2e")]
struct Options {
    /// The weft under test.
    #[arg(long, default_value = "target/release/weft")]
    weft: PathBuf,
    /// The built programs.
    #[arg(long, default_value = "target/programs")]
    programs: PathBuf,
    /// Scripts and sources.
    #[arg(long, default_value = "tests/programs")]
    sources: PathBuf,
    /// What `make guest guest-debian` left.
    #[arg(long, default_value = "target/guest")]
    guest: PathBuf,
    /// Boots of each machine.
    #[arg(long, default_value_t = 1)]
    boots: usize,
    /// Boots of each machine over several nodes; as --boots when absent.
    #[arg(long)]
    node_boots: Option<usize>,
    /// Suites to run; all when none is named.
    #[arg(long, value_enum, value_delimiter = ',')]
    suite: Vec<Suite>,
    /// Rounds of the corpus; each runs every case under the next setting.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Runs every case under every setting, as often as --rounds says.
    #[arg(long)]
    full: bool,
    /// Runs at the same time.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Runs the suites that wait most of their time beside those that do not.
    #[arg(long)]
    side_by_side: bool,
    /// Seconds after which a run counts as hung; each case's own when absent.
    #[arg(long)]
    bound: Option<u64>,
    /// Numbers of nodes, separated by commas.
    #[arg(long, value_delimiter = ',')]
    nodes: Vec<usize>,
    /// Jump policies, separated by commas.
    #[arg(long, value_delimiter = ',')]
    jump: Vec<String>,
    /// Transports, separated by commas.
    #[arg(long, value_delimiter = ',')]
    transport: Vec<String>,
    /// Losses of each kind.
    #[arg(long, default_value_t = 5)]
    moments: usize,
    /// Seconds of lending to a hostile program; each way once when absent.
    #[arg(long)]
    lend_seconds: Option<u64>,
    /// Seconds of random events in a cluster, with --long.
    #[arg(long, default_value_t = 3600)]
    cluster_seconds: u64,
    /// Seconds of each round of hosts that come and go under an MPI program, with --long.
    #[arg(long, default_value_t = 1800)]
    mpi_seconds: u64,
    /// How often the MPI program of --mpi-seconds runs.
    #[arg(long, default_value_t = 1)]
    mpi_rounds: usize,
    /// Rounds of --mpi-rounds that run side by side, each with a smaller program.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=8))]
    mpi_at_once: u64,
    /// Seed of the random moments; the clock when absent.
    #[arg(long)]
    seed: Option<u64>,
    /// Runs the long cases as well.
    #[arg(long)]
    long: bool,
    /// Keeps everything that was written.
    #[arg(long)]
    keep: bool,
    /// Names the cases and ends.
    #[arg(long)]
    list: bool,
    /// Cases to run, as a name or a part of one; all if none is given.
    names: Vec<String>,
}

fn clock_seed() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(1, |since| since.as_nanos() as u64)
}

impl Options {
    fn wants(&self, suite: Suite) -> bool {
        match (self.suite.as_slice(), self.names.as_slice()) {
            ([], []) => true,
            // Naming cases narrows the corpus and leaves the rest out.
            ([], _) => suite == Suite::Corpus,
            (suites, _) => suites.contains(&suite),
        }
    }

    fn names_it(&self, name: &str) -> bool {
        let names = &self.names;
        names.is_empty() || names.iter().any(|part| name.contains(part.as_str()))
    }

    fn cases(&self) -> Vec<Case> {
        let named = |name: &str| self.names.iter().any(|part| name.contains(part.as_str()));
        corpus::cases()
            .into_iter()
            .filter(|case| match self.names.as_slice() {
                [] => self.long || !case.long,
                [only] if *only == case.name => true,
                _ => named(&case.name) && (self.long || !case.long),
            })
            .map(|mut case| {
                case.bound = self.bound.map_or(case.bound, Duration::from_secs);
                case
            })
            .collect()
    }

    fn machines(&self) -> machines::Plan {
        machines::Plan {
            images: Images {
                folder: self.guest.clone(),
            },
            rounds: self.boots,
            long: self.long,
            names: self.names.clone(),
        }
    }

    fn aggregate(&self) -> aggregate::Plan {
        aggregate::Plan {
            images: Images {
                folder: self.guest.clone(),
            },
            boots: self.node_boots.unwrap_or(self.boots),
            moments: self.moments,
            long: self.long,
            names: self.names.clone(),
        }
    }

    fn mpi(&self) -> mpi::Plan {
        mpi::Plan {
            images: self.machines().images,
            long: self.long,
            rounds: self.mpi_rounds,
            at_once: self.mpi_at_once as usize,
            seconds: self.mpi_seconds,
            moments: self.moments,
            names: self.names.clone(),
        }
    }

    fn soak(&self) -> Option<members::Soak> {
        self.long.then(|| members::Soak {
            images: self.machines().images,
            duration: Duration::from_secs(self.cluster_seconds),
        })
    }

    fn plan(&self) -> Plan {
        let settings = matrix::settings(&Filter {
            nodes: self.nodes.clone(),
            jumps: self.jump.clone(),
            transports: self.transport.clone(),
        });
        let rounds = if self.full {
            self.rounds * settings.len()
        } else {
            self.rounds
        };
        Plan {
            settings,
            rounds,
            jobs: self.jobs,
            keep: self.keep,
        }
    }
}

/// What is run, and where its verdicts go.
struct Suites<'a> {
    options: &'a Options,
    cases: Vec<Case>,
    context: &'a Context,
    report: &'a Report,
}

impl Suites<'_> {
    fn run(&self) {
        let wanted = |suite: &Suite| self.options.wants(*suite);
        let all = Suite::value_variants().iter().copied().filter(wanted);
        let (waiting, working): (Vec<Suite>, Vec<Suite>) = all.partition(|suite| suite.waits());
        if !self.options.side_by_side {
            return working
                .into_iter()
                .chain(waiting)
                .for_each(|suite| self.run_one(suite));
        }
        std::thread::scope(|scope| {
            for lane in [working, waiting] {
                scope.spawn(|| lane.into_iter().for_each(|suite| self.run_one(suite)));
            }
        });
    }

    fn run_one(&self, suite: Suite) {
        let (options, context, report) = (self.options, self.context, self.report);
        let started = Instant::now();
        match suite {
            Suite::Corpus => run_corpus(&self.cases, context, &options.plan(), report),
            Suite::Setup => {
                self.guard("set-up errors", setup::run_local(context, report));
                self.guard("set-up errors, remote", setup::run_remote(context, report));
            }
            Suite::User => self.guard("as an ordinary user", user::run_as_user(context, report)),
            Suite::Loss => {
                let wanted = |name: &str| options.names_it(name);
                ends::run_ends(context, &wanted, report);
                tamper::run_tampering(context, &wanted, report);
                loss::run_losses(context, options.moments, &wanted, report);
            }
            Suite::Lend => {
                let bound = options.lend_seconds.map(Duration::from_secs);
                lend::run_lending(context, bound, &options.names, report);
                owner::run_owners(context, &options.names, report);
            }
            Suite::Cluster => {
                let soak = options.soak();
                members::run_members(context, soak.as_ref(), &options.names, report);
            }
            Suite::Vm => {
                let images = options.machines().images;
                let of = (&options.names[..], options.long);
                self.guard("weft vm", vm::run_vm(context, &images, of, report));
            }
            Suite::Machines => machines::run_machines(context, &options.machines(), report),
            Suite::Aggregate => aggregate::run_aggregate(context, &options.aggregate(), report),
            Suite::Mpi => mpi::run_mpi(context, &options.mpi(), report),
        }
        let name = suite.to_possible_value();
        let name = name.as_ref().map_or("", PossibleValue::get_name);
        println!("{name}: {:.0} s", started.elapsed().as_secs_f64());
    }

    fn guard(&self, name: &str, result: Result<()>) {
        if let Err(error) = result {
            let verdict = Verdict::Failed(vec![format!("{error:#}")]);
            self.report.add(name, Duration::ZERO, verdict);
        }
    }
}

fn run(options: &Options) -> Result<bool> {
    let cases = options.cases();
    if options.list {
        for case in &cases {
            println!("{}: {}", case.name, case.command.join(" "));
        }
        return Ok(true);
    }
    ensure!(
        !cases.is_empty() || !options.wants(Suite::Corpus),
        "no case is called so; `weft-e2e --list` names them"
    );
    let seed = options.seed.unwrap_or_else(clock_seed);
    let context = Context::new(&options.weft, &options.programs, &options.sources, seed)?;
    println!("weft-e2e: {}, seed {seed}", context.weft.display());
    let report = Report::default();
    let started = Instant::now();
    let suites = Suites {
        options,
        cases,
        context: &context,
        report: &report,
    };
    suites.run();
    println!("\n{:.0} s in all", started.elapsed().as_secs_f64());
    let passed = report.finish();
    if passed && !options.keep {
        context.clean();
    } else {
        // Not on standard output, whose last line is the counts.
        eprintln!(
            "weft-e2e: what was written is in {}",
            context.work.display()
        );
    }
    Ok(passed)
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("weft-e2e: {error:#}");
            ExitCode::from(2)
        }
    }
}
