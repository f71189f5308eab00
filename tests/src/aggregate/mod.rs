//! One Linux over several nodes of this host: boots, the guest's own checks, nodes
//! that are lost, life, slow links, little memory, vCPUs that move,
//! nodes that join and leave.
//!
//! Every test has a run directory and a tag of its own. When its machine has ended,
//! no process with the tag and nothing in the directory may be left.

mod boots;
mod budget;
mod disks;
mod errors;
mod follow;
mod followed;
mod growth;
mod life;
mod loaded;
mod loss;
mod moves;
mod networks;
mod oom;
mod queues;
mod roles;
mod updated;
mod work;

pub(crate) use queues::Copies;
pub(crate) use work::{judge_litmus, litmus_until_told};

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::boot::{Images, SMALL, USER_SPACE};
use crate::context::{Context, kvm_nodes_missing};
use crate::guest::{Ended, Guest, code, ended_with, leftovers};
use crate::processes::{Family, Process, TAG, describe, heed};
use crate::report::{Report, Verdict};

/// The bound of everything that a guest does.
const BOUND: Duration = Duration::from_secs(120);
/// How long processes may outlive the command.
const LINGER: Duration = Duration::from_secs(1);

/// How the suite is run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What `make guest` left.
    pub images: Images,
    /// Boots of each machine.
    pub boots: usize,
    /// Losses of each kind.
    pub moments: usize,
    /// The long tests as well.
    pub long: bool,
    /// Only tests whose name contains one of these; all when empty.
    pub names: Vec<String>,
}

impl Plan {
    fn wants(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|part| name.contains(part.as_str()))
    }
}

/// A machine's nodes, as its options say them.
#[derive(Debug, Clone, Copy)]
struct Shape {
    /// With which it is named.
    name: &'static str,
    options: &'static [&'static str],
    nodes: usize,
    cpus: usize,
}

/// Two nodes with a vCPU each.
const TWO: Shape = Shape {
    name: "2 nodes of 1 vCPU",
    options: &["--nodes", "2", "--cpus", "2", "--memory", "256M"],
    nodes: 2,
    cpus: 2,
};

/// Two vCPUs, and a node with memory only.
const THREE: Shape = Shape {
    name: "3 nodes",
    options: &[
        "--lease",
        "1",
        "--cpus",
        "1,1,0",
        "--memory",
        "128M,128M,64M",
    ],
    nodes: 3,
    cpus: 2,
};

/// The exit code of a machine that failed.
const EXIT_FAILED: i32 = 124;

/// A test; an error is its failure, the text a note.
type Check = fn(&Bench<'_>) -> Result<String>;

/// What a test has.
struct Bench<'a> {
    context: &'a Context,
    plan: &'a Plan,
    /// Where machines are found, apart from all others'.
    run_directory: PathBuf,
    tag: String,
}

/// Runs all tests, or those named.
pub fn run_aggregate(context: &Context, plan: &Plan, report: &Report) {
    if let Some(why) = plan.images.missing(&SMALL) {
        report.add("aggregate", Duration::ZERO, Verdict::Skipped(why));
        return;
    }
    let run = |name: &str, check: &dyn Fn(&Bench<'_>) -> Result<String>| {
        let name = format!("aggregate: {name}");
        if !plan.wants(&name) {
            return;
        }
        let started = Instant::now();
        let verdict = match Bench::new(context, plan, &name).and_then(|bench| check(&bench)) {
            Ok(note) => Verdict::Passed(note),
            Err(error) => Verdict::Failed(vec![format!("{error:#}")]),
        };
        report.add(&name, started.elapsed(), verdict);
    };
    let skip = |name: &str, why: &str| {
        let name = format!("aggregate: {name}");
        if plan.wants(&name) {
            report.add(&name, Duration::ZERO, Verdict::Skipped(why.to_owned()));
        }
    };
    boots::run(plan, &run);
    for (name, check) in work::CHECKS
        .iter()
        .chain(&life::CHECKS)
        .chain(&budget::CHECKS)
        .chain(&errors::CHECKS)
        .chain(&disks::CHECKS)
        .chain(&updated::CHECKS)
        .chain(&moves::CHECKS)
        .chain(&followed::CHECKS)
        .chain(&roles::CHECKS)
        .chain(&follow::CHECKS)
        .chain(&growth::CHECKS)
        .chain(&queues::CHECKS)
    {
        run(name, check);
    }
    let networks_missing = networks::missing();
    for (name, check) in networks::CHECKS.iter().chain(&queues::NETWORK_CHECKS) {
        match networks_missing {
            None => run(name, check),
            Some(why) => skip(name, why),
        }
    }
    match networks_missing {
        None => run(loaded::NAME, &loaded::run),
        Some(why) => skip(loaded::NAME, why),
    }
    match oom::missing() {
        None => run(oom::NAME, &oom::said),
        Some(why) => skip(oom::NAME, &why),
    }
    if plan.long {
        boots::run_slow(&run);
        match kvm_nodes_missing() {
            None => {
                boots::run_on_kvm(plan, &run);
                run(updated::ON_KVM, &updated::on_kvm);
                run(moves::ON_KVM, &moves::on_kvm);
            }
            Some(why) => {
                skip("boots, kvm", &why);
                skip(updated::ON_KVM, &why);
                skip(moves::ON_KVM, &why);
            }
        }
        for (name, check) in &work::LONG {
            run(name, check);
        }
    }
    loss::run(context.seed, plan.moments, &run);
}

/// Runs one test by its name, if it is wanted.
type Run<'a> = dyn Fn(&str, &dyn Fn(&Bench<'_>) -> Result<String>) + 'a;

impl<'a> Bench<'a> {
    fn new(context: &'a Context, plan: &'a Plan, name: &str) -> Result<Bench<'a>> {
        /// Of this process's tests.
        static TESTS: AtomicUsize = AtomicUsize::new(0);
        let number = TESTS.fetch_add(1, Ordering::Relaxed);
        let run_directory = context.directory(&name.replace(':', ""))?.join("run");
        std::fs::create_dir_all(&run_directory)?;
        Ok(Bench {
            context,
            plan,
            run_directory,
            tag: format!("aggregate-{}-{number}", std::process::id()),
        })
    }

    /// `weft`, with machines of this test only.
    fn weft(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.context.weft);
        command
            .args(words)
            .env("XDG_RUNTIME_DIR", &self.run_directory)
            .env(TAG, &self.tag);
        heed(&mut command);
        command
    }

    /// A machine whose shell runs `script`; `words` are the kernel's.
    fn machine(&self, options: &[&str], script: &str, words: &str) -> Result<Command> {
        self.machine_of(SMALL, options, script, words)
    }

    /// The same of another kernel and initrd, by their names.
    fn machine_of(
        &self,
        image: [&str; 2],
        options: &[&str],
        script: &str,
        words: &str,
    ) -> Result<Command> {
        self.machine_on("soft", image, options, script, words)
    }

    /// The same, by a back end.
    fn machine_on(
        &self,
        back_end: &str,
        [kernel, initrd]: [&str; 2],
        options: &[&str],
        script: &str,
        words: &str,
    ) -> Result<Command> {
        let mut command = self.weft(&["vm", "run", "--backend", back_end]);
        command.arg("--kernel").arg(self.plan.images.file(kernel)?);
        command.arg("--initrd").arg(self.plan.images.file(initrd)?);
        command.args(options);
        let script = script.replace('"', "%22");
        command.args([
            "--cmdline",
            &format!("console=ttyS0 quiet {words} weft.run=\"{script}\""),
        ]);
        Ok(command)
    }

    /// Starts a machine of this shape.
    fn start(&self, shape: Shape, options: &[&str], script: &str) -> Result<Guest> {
        let mut all = shape.options.to_vec();
        all.extend(options);
        Guest::start(&mut self.machine(&all, script, "")?)
    }

    /// The same, once it says `text`.
    fn start_until(
        &self,
        shape: Shape,
        options: &[&str],
        script: &str,
        text: &str,
    ) -> Result<Guest> {
        let mut guest = self.start(shape, options, script)?;
        if guest.wait_for(text, BOUND).is_none() {
            let ended = guest.finish(Duration::ZERO)?;
            bail!("no `{text}`: {}\n{}", ended.stderr, ended.tail(20));
        }
        Ok(guest)
    }

    /// Waits until the guest has powered off, its script having done well, and
    /// nothing is left.
    fn finish(&self, guest: Guest) -> Result<Ended> {
        let pid = guest.pid();
        let ended = guest.finish(BOUND)?;
        ensure!(
            ended.ended_well() && ended.line(USER_SPACE).is_some(),
            "{} after {:.1} s: {}\n{}",
            ended
                .status
                .map_or("no end".to_string(), |status| status.to_string()),
            ended.took.as_secs_f64(),
            ended.stderr.trim(),
            ended.tail(20),
        );
        ensure!(
            ended.line("weft-guest: exit 0").is_some(),
            "the guest's command failed:\n{}",
            ended.tail(20)
        );
        self.nothing_left(pid)?;
        Ok(ended)
    }

    /// Runs a script to its end.
    fn run(&self, shape: Shape, options: &[&str], script: &str) -> Result<Ended> {
        self.finish(self.start(shape, options, script)?)
    }

    /// What `weft` says on standard output; an error with what it says on
    /// standard error when it fails.
    fn ask(&self, words: &[&str]) -> Result<String> {
        let output = self.weft(words).output()?;
        ensure!(
            output.status.success(),
            "weft {}: {}",
            words.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    /// The processes of a machine's nodes, node 0's last, once all are there.
    fn processes(&self, guest: &Guest, nodes: usize) -> Result<Vec<Process>> {
        let deadline = Instant::now() + BOUND;
        let parent = guest.pid() as i32;
        loop {
            let mut found = crate::processes::all();
            found.retain(|process| process.parent == parent);
            // Node 0's is made last.
            found.sort_by_key(|process| process.identity.order(parent));
            if found.len() == nodes {
                return Ok(found);
            }
            ensure!(
                Instant::now() < deadline && crate::processes::read(parent).is_some(),
                "{} of {nodes} nodes have processes",
                found.len()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Fails when processes or files of a machine are left; `pid`: the command's.
    fn nothing_left(&self, pid: u32) -> Result<()> {
        self.no_process_left(pid)?;
        let names = leftovers(&self.run_directory)?;
        ensure!(names.is_empty(), "left in the run directory: {names:?}");
        Ok(())
    }

    fn no_process_left(&self, pid: u32) -> Result<()> {
        let deadline = Instant::now() + LINGER;
        let mut family = Family::new(pid as i32, &self.tag);
        loop {
            let left = family.members();
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                let lines: Vec<String> = left.iter().map(describe).collect();
                family.kill();
                bail!("left processes: {}", lines.join("; "));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
