//! `weft mpi`: MPI programs on machines that move between hosts, each cluster with a user of its
//! own: their folders, and a tag in the environment of all that is started for them.
//!
//! Always: the program's standard output and exit code are the command's; nothing is left when it
//! has ended, no process, socket or folder.

mod bridge;
mod cut;
mod ends;
mod ep;
mod errors;
mod launcher;
mod local;
mod long;
mod losses;
mod one;
mod processes;
mod saves;
mod sites;
mod user;
mod users;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use self::user::User;
use crate::boot::Images;
use crate::context::Context;
use crate::random::Random;
use crate::report::{Report, Verdict};

/// All machines are ready by then, on a busy host.
const BOOT_BOUND: Duration = Duration::from_secs(60);
/// A cluster whose end was asked for has ended by then.
const END_BOUND: Duration = Duration::from_secs(30);
/// What one small thing takes: a host comes, a machine moves.
const STEP_BOUND: Duration = Duration::from_secs(60);
/// A program with its start.
const PROGRAM_BOUND: Duration = Duration::from_secs(300);

/// What is run, and how much of it.
#[derive(Debug, Clone)]
pub struct Plan {
    pub images: Images,
    /// The long checks as well.
    pub long: bool,
    /// Of the long scenario.
    pub rounds: usize,
    /// Rounds at a time.
    pub at_once: usize,
    /// Seconds of one round of it.
    pub seconds: u64,
    /// Losses of each kind.
    pub moments: usize,
    pub names: Vec<String>,
}

/// A check; an error is its failure, the text a note.
type Check = fn(&Bench<'_>) -> Result<String>;

/// What a check has.
struct Bench<'a> {
    context: &'a Context,
    plan: &'a Plan,
    random: Random,
}

/// A check cannot run here.
#[derive(Debug, thiserror::Error)]
#[error("needs {0}")]
struct Lacks(String);

/// With whether they run only with `--long`, or by their name. What runs always takes a minute and a half.
const CHECKS: [(&str, bool, Check); 35] = [
    ("mpi: grows, shrinks, releases", false, local::life),
    ("mpi: the program's exit code", false, local::exit_code),
    ("mpi: launcher killed at some moment", true, launcher::any),
    (
        "mpi: launcher killed while gathering",
        true,
        launcher::gathering,
    ),
    (
        "mpi: launcher killed while booting",
        true,
        launcher::booting,
    ),
    (
        "mpi: launcher killed while running",
        true,
        launcher::running,
    ),
    ("mpi: launcher killed in a move", true, launcher::moving),
    ("mpi: launcher killed while saving", true, launcher::saving),
    ("mpi: launchers killed at many moments", true, launcher::all),
    ("mpi: agent killed", false, losses::agent),
    (
        "mpi: a machine ends without a launcher",
        true,
        losses::alone,
    ),
    ("mpi: a move that no launcher heard", true, losses::moved),
    ("mpi: a save that no launcher heard", true, losses::saved),
    ("mpi: commands of moves killed", true, losses::commands),
    ("mpi: switches killed", true, losses::switch),
    ("mpi: saved and resumed", true, saves::resume),
    ("mpi: no room to save", true, saves::full),
    ("mpi: bad input", false, errors::all),
    ("mpi: two users", true, users::apart),
    ("mpi: a cable cut for 2 s", true, cut::short),
    ("mpi: a cable cut for 20 s", true, cut::long),
    ("mpi: over a VXLAN of the site", false, bridge::vxlan),
    ("mpi: a tap device that goes", true, bridge::lost),
    ("mpi: Slurm", true, sites::slurm),
    ("mpi: with Slurm's server killed", true, sites::slurm_more),
    (
        "mpi: Slurm, a job that no launcher knows",
        true,
        sites::slurm_stray,
    ),
    ("mpi: Grid Engine", true, sites::grid_engine),
    ("mpi: reservations that end", true, ends::all),
    (
        "mpi: one machine over hosts that come and go",
        true,
        one::life,
    ),
    ("mpi: one machine, a host killed", true, one::host_killed),
    (
        "mpi: one machine, launcher killed in a change",
        true,
        one::launcher_killed,
    ),
    ("mpi: one machine, reservations that end", true, one::ends),
    ("mpi: one machine, saved and resumed", true, one::resume),
    ("mpi: two hundred moves", true, long::moves),
    (
        "mpi: eight machines, hosts come and go",
        true,
        long::scenario,
    ),
];

/// Runs the suite.
pub fn run_mpi(context: &Context, plan: &Plan, report: &Report) {
    if let Some(inside) = sites::inside() {
        sites::run_inside(context, plan, &inside, report);
        return;
    }
    let missing = missing(plan);
    for (name, is_long, check) in CHECKS {
        let is_named = plan.names.iter().any(|part| name.contains(part.as_str()));
        let is_wanted = if plan.names.is_empty() {
            plan.long || !is_long
        } else {
            is_named
        };
        if !is_wanted {
            continue;
        }
        let verdict = |why: &str| Verdict::Skipped(why.to_owned());
        if let Some(why) = &missing {
            report.add(name, Duration::ZERO, verdict(why));
            continue;
        }
        run_check(context, plan, report, name, check);
    }
}

fn run_check(context: &Context, plan: &Plan, report: &Report, name: &str, check: Check) {
    let bench = Bench {
        context,
        plan,
        random: Random::new(context.seed),
    };
    let begun = Instant::now();
    let verdict = match check(&bench) {
        Ok(note) => Verdict::Passed(note),
        Err(error) => match error.downcast_ref::<Lacks>() {
            Some(lacks) => Verdict::Skipped(lacks.to_string()),
            None => Verdict::Failed(vec![format!("{error:#}")]),
        },
    };
    report.add(name, begun.elapsed(), verdict);
}

/// Why no cluster can run here, if so.
fn missing(plan: &Plan) -> Option<String> {
    let needed = ["vmlinux", "mpi/root.cpio", "mpi/ep", "mpi/host/dbclient"];
    let folder = &plan.images.folder;
    let lacks = needed.iter().find(|name| !folder.join(name).exists())?;
    Some(format!(
        "no {}: `make guest guest-mpi`",
        folder.join(lacks).display()
    ))
}

impl Bench<'_> {
    /// A user with this process's uid, and a home and a run directory of its own.
    fn user(&self) -> Result<User> {
        self.user_as(None)
    }

    fn user_as(&self, uid: Option<u32>) -> Result<User> {
        let image = std::fs::canonicalize(&self.plan.images.folder)?;
        User::new(&self.context.weft, &image, &self.folder()?, uid)
    }

    /// A new folder; its path is short.
    fn folder(&self) -> Result<PathBuf> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        self.context.directory(&format!("m{number}"))
    }

    fn needs_root(&self) -> Result<()> {
        if !self.context.is_root() {
            bail!(Lacks("root".into()));
        }
        Ok(())
    }
}
