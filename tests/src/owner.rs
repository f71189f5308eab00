//! The owner of a host takes memory while a program runs there, with its other node on another
//! host.
//!
//! The other host is a daemon on this one, which is all that the program knows. So what leaves
//! home does not come to the owner here, and home gives way to its least budget.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::cluster::{Cluster, Wanted, free_port, stop};
use crate::context::Context;
use crate::report::{Report, Verdict};
use crate::run::{End, Invocation, Outcome, Running, run, start};

/// What the program works on.
const WORK_MIB: &str = "400";
/// What the owner takes at least, and what home may take before that is felt.
const OWNER_MIB: u64 = 1024;
const SPARE_MIB: u64 = 1500;
/// What the owner lacks then.
const LACK_MIB: u64 = 500;
/// What the host has to have for the test.
const NEEDED_MIB: u64 = 5 << 10;
/// Home's least budget, in pages, and what the page that is needed next takes beside it.
const LEAST_PAGES: u64 = 4096;
const WINDOW_PAGES: u64 = 1024;
/// What home's runtime needs itself for so much work.
const RUNTIME_MIB: u64 = 64;
const SOON: Duration = Duration::from_secs(60);
const BOUND: Duration = Duration::from_secs(240);

type Check = fn(&Owner<'_>) -> Result<()>;

const CHECKS: [(&str, Check); 5] = [
    ("takes a GiB, and the program leaves", |owner| {
        takes_memory(owner, 64, "auto").map(drop)
    }),
    ("takes a GiB from a program that stays at home", takes_pages),
    (
        "has left no room, and the program starts elsewhere",
        leaves_no_room,
    ),
    ("is not helped where others have no room", is_not_helped),
    ("is not helped by a node of the same host", has_one_host),
];

struct Owner<'a> {
    context: &'a Context,
    directory: PathBuf,
    cluster: Cluster,
    native: Vec<u8>,
}

/// Runs the checks that are wanted.
pub fn run_owners(context: &Context, names: &[String], report: &Report) {
    let full = |name: &str| format!("lend: an owner {name}");
    let wanted = |name: &str| {
        let full = full(name);
        names.is_empty() || names.iter().any(|part| full.contains(part.as_str()))
    };
    let checks = CHECKS.iter().filter(|(name, _)| wanted(name));
    let mut owner = None;
    for (name, check) in checks {
        let begun = Instant::now();
        let verdict = match available_mib() {
            Ok(mib) if mib < NEEDED_MIB => {
                Verdict::Skipped(format!("{NEEDED_MIB} MiB of free memory are needed"))
            }
            _ => judge(|| {
                if owner.is_none() {
                    owner = Some(Owner::new(context)?);
                }
                owner.as_ref().map_or(Ok(()), check)
            }),
        };
        report.add(&full(name), begun.elapsed(), verdict);
    }
}

fn judge(check: impl FnOnce() -> Result<()>) -> Verdict {
    match check() {
        Ok(()) => Verdict::Passed(String::new()),
        Err(error) => Verdict::Failed(vec![format!("{error:#}")]),
    }
}

/// What this host has free, in MiB.
pub(crate) fn available_mib() -> Result<u64> {
    memory_mib("/proc/meminfo", "MemAvailable:")
}

fn memory_mib(path: &str, field: &str) -> Result<u64> {
    let text = fs::read_to_string(path)?;
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let kib: u64 = line
        .and_then(|line| line.split_whitespace().next()?.parse().ok())
        .with_context(|| format!("no {field} in {path}"))?;
    Ok(kib >> 10)
}

/// A process that takes so much memory.
pub(crate) fn ballast(directory: &Path, mib: u64, bound: Duration) -> Result<Running> {
    let take = format!("import time; taken = bytearray(b'x') * ({mib} << 20); time.sleep(1000)");
    let directory = directory.join("ballast");
    fs::create_dir_all(&directory)?;
    start(&Invocation::new(&["python3", "-c", &take], &directory).bounded(bound))
}

fn until(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !holds()? {
        ensure!(begun.elapsed() < SOON, "{what}: not within {SOON:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

impl<'a> Owner<'a> {
    fn new(context: &'a Context) -> Result<Owner<'a>> {
        let directory = context.directory("owner")?;
        let wanted = Wanted {
            host: "127.0.0.1".to_owned(),
            port: free_port()?,
            memory: "4G".to_owned(),
            prefix: Vec::new(),
            runtime: None,
        };
        let cluster = Cluster::start(context, &directory, &wanted)?;
        let mut owner = Owner {
            context,
            directory,
            cluster,
            native: Vec::new(),
        };
        fs::write(owner.go(), "")?;
        let command = owner.program(WORK_MIB);
        let directory = owner.directory.join("native");
        let outcome = run(&Invocation::new(&command, &directory).bounded(BOUND))?;
        owner.native = owner.ended_well(&outcome)?;
        Ok(owner)
    }

    /// The program goes on until there is a file of this name.
    fn go(&self) -> PathBuf {
        self.directory.join("go")
    }

    fn program(&self, mib: &str) -> Vec<OsString> {
        let program = self.context.programs.join("endures");
        vec![program.into(), mib.into(), self.go().into()]
    }

    /// Starts the program under weft; until it is let go.
    fn start(&self, options: &[&str], mib: &str) -> Result<Running> {
        let _ = fs::remove_file(self.go());
        let mut command: Vec<OsString> = vec![self.context.weft.clone().into(), "run".into()];
        command.extend(options.iter().map(OsString::from));
        command.push("--".into());
        command.extend(self.program(mib));
        let directory = self.directory.join("run");
        let mut invocation = Invocation::new(&command, &directory).bounded(BOUND);
        invocation.environment = vec![self.cluster.home.environment()];
        start(&invocation)
    }

    fn printed(&self) -> Result<String> {
        Ok(fs::read_to_string(self.directory.join("run/stdout"))?)
    }

    /// Lets the program go, and compares.
    fn finish(&self, running: Running) -> Result<String> {
        fs::write(self.go(), "")?;
        let outcome = running.finish()?;
        let printed = self.ended_well(&outcome)?;
        ensure!(printed == self.native, "it printed something else");
        Ok(outcome.stderr)
    }

    fn ended_well(&self, outcome: &Outcome) -> Result<Vec<u8>> {
        let said = outcome.stderr.trim();
        ensure!(outcome.end == End::Exit(0), "{}: {said}", outcome.end);
        ensure!(outcome.leftovers.is_empty(), "{:?}", outcome.leftovers);
        Ok(fs::read(&outcome.stdout)?)
    }

    /// What `weft list` says of it.
    fn view(&self, running: &Running) -> Result<Value> {
        let command: [OsString; 3] = [
            self.context.weft.clone().into(),
            "list".into(),
            "--json".into(),
        ];
        let outcome = run(&Invocation::new(&command, &self.directory.join("list")))?;
        let text = fs::read_to_string(&outcome.stdout)?;
        let views: Vec<Value> = serde_json::from_str(&text)?;
        let own = |view: &Value| view["pid"].as_i64() == Some(running.pid().into());
        let view = views.into_iter().find(own);
        view.with_context(|| format!("it does not run: {}", running.stderr()))
    }

    fn home(&self, running: &Running, field: &str) -> Result<u64> {
        let view = self.view(running)?;
        let number = view["nodes"][0][field].as_u64();
        number.with_context(|| format!("{field} of {view}"))
    }

    fn until_filled(&self, running: &Running) -> Result<()> {
        let filled = || Ok(self.printed()?.contains("filled"));
        until("the program has its memory", filled).with_context(|| running.stderr())
    }

    /// The option that keeps all of the host for its owner.
    fn all(&self) -> Result<String> {
        let total = memory_mib("/proc/meminfo", "MemTotal:")?;
        Ok(format!("{}M", total - 1))
    }
}

/// Home has `home_mib` at first. Returns what was said.
fn takes_memory(owner: &Owner<'_>, home_mib: u64, jump: &str) -> Result<String> {
    let keep = available_mib()?.saturating_sub(SPARE_MIB);
    let (keep_free, memory) = (format!("{keep}M"), format!("{home_mib}M,640M"));
    let on = &owner.cluster.address;
    let options = [
        "--on",
        on,
        "--memory",
        &memory,
        "--keep-free",
        &keep_free,
        "--jump",
        jump,
    ];
    let running = owner.start(&options, WORK_MIB)?;
    owner.until_filled(&running)?;
    let view = owner.view(&running)?;
    ensure!(view["stretched"] == true, "it has not stretched: {view}");
    let whole = home_mib << 8;
    let resident = owner.home(&running, "resident_pages_max")?;
    ensure!(resident <= whole + WINDOW_PAGES, "{resident} pages at home");

    let mut taken = vec![ballast(&owner.directory.join("owner-0"), OWNER_MIB, BOUND)?];
    let budget = || owner.home(&running, "budget_pages");
    let gave_way = until("home has given way", || {
        // As long as others give memory back, the owner takes it.
        let free_mib = (available_mib()? + LACK_MIB).saturating_sub(keep);
        if free_mib > LACK_MIB / 2 {
            let directory = owner.directory.join(format!("owner-{}", taken.len()));
            taken.push(ballast(&directory, free_mib, BOUND)?);
            std::thread::sleep(Duration::from_secs(2));
        }
        Ok(budget()? == LEAST_PAGES)
    });
    let found = || {
        let free_mib = available_mib().unwrap_or_default();
        let view = owner
            .view(&running)
            .map(|view| view["nodes"][0].to_string());
        format!(
            "{free_mib} MiB free, {keep} kept, {view:?}: {}",
            running.stderr()
        )
    };
    gave_way.with_context(found)?;
    let resident = owner.home(&running, "resident_pages")?;
    ensure!(resident <= LEAST_PAGES + WINDOW_PAGES, "{resident} pages");
    // By the kernel's account, too.
    let program = view["program_pid"].as_u64().context("its number")?;
    let held = memory_mib(&format!("/proc/{program}/status"), "RssAnon:")?;
    let least = (LEAST_PAGES >> 8) + RUNTIME_MIB;
    ensure!(held < least, "home holds {held} MiB");
    for ballast in taken {
        stop(ballast)?;
    }
    until("home has its memory again", || Ok(budget()? == whole)).with_context(found)?;
    owner.finish(running)
}

/// Home has most of the pages, and they have to leave.
fn takes_pages(owner: &Owner<'_>) -> Result<()> {
    let said = takes_memory(owner, 300, "never")?;
    let times = |words: &str| said.matches(words).count();
    ensure!(times("home gives way") == 1, "{said}");
    ensure!(times("home takes memory back") == 1, "{said}");
    Ok(())
}

fn leaves_no_room(owner: &Owner<'_>) -> Result<()> {
    let (on, all) = (&owner.cluster.address, owner.all()?);
    let options = ["--on", on, "--memory", "1G,640M", "--keep-free", &all];
    let running = owner.start(&options, WORK_MIB)?;
    owner.until_filled(&running)?;
    let resident = owner.home(&running, "resident_pages_max")?;
    ensure!(
        resident <= LEAST_PAGES + WINDOW_PAGES,
        "{resident} pages at home"
    );
    owner.finish(running).map(drop)
}

/// All that the budgets of the start have room for can be used.
fn is_not_helped(owner: &Owner<'_>) -> Result<()> {
    let (on, all) = (&owner.cluster.address, owner.all()?);
    let options = ["--on", on, "--memory", "400M,64M", "--keep-free", &all];
    let running = owner.start(&options, WORK_MIB)?;
    owner.until_filled(&running)?;
    until("it says that it stays", || {
        Ok(running.stderr().contains("have no room"))
    })?;
    let said = owner.finish(running)?;
    ensure!(said.matches("but the program stays").count() == 1, "{said}");
    Ok(())
}

fn has_one_host(owner: &Owner<'_>) -> Result<()> {
    let all = owner.all()?;
    let options = ["--nodes", "2", "--memory", "1G", "--keep-free", &all];
    let running = owner.start(&options, WORK_MIB)?;
    owner.until_filled(&running)?;
    until("it says that it stays", || {
        Ok(running.stderr().contains("no node on another host"))
    })?;
    let view = owner.view(&running)?;
    ensure!(view["stretched"] == false, "it has stretched for nothing");
    let said = owner.finish(running)?;
    ensure!(said.matches("but the program stays").count() == 1, "{said}");
    Ok(())
}
