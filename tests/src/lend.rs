//! Lending to a program that turns against its node (`tests/programs/hostile.c`), and
//! borrowing from a node that turns against home (a runtime with the feature `damage`).
//!
//! What must hold after each attempt, under a daemon that is root and under one that is
//! not: the attempt did not get what it wanted, the daemon says why it ended the slice
//! and not much more, nothing of the slice is left, all memory is given back, and the
//! next honest run is served.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::unistd::User;

use crate::cluster::{self, Identity, Wanted, free_port};
use crate::context::Context;
use crate::report::{Report, Verdict};
use crate::run::{End, Invocation, Outcome, Running, run};
use crate::user;

/// The exit code for a lost node.
const EXIT_NODE_LOST: i32 = 122;
/// The exit code for a message that no node sends.
const EXIT_INTERNAL: i32 = 124;
/// A runtime with the feature `damage`, beside the programs.
const DAMAGING_RUNTIME: &str = "../damage/release/weft-runtime";
/// What the daemon lends in all, and to one run. Home gets so little that the execution
/// leaves at once.
const LENT: &str = "512M";
const BUDGETS: &str = "2M,64M";
/// Most that one run may have a daemon, and a launcher, write.
const SAID_BYTES_MAX: u64 = 32 << 10;
/// How long a daemon may take to notice that a launcher has gone.
const GIVEN_BACK: Duration = Duration::from_secs(10);

/// One thing that the program tries, and what has to come of it.
struct Attempt {
    words: &'static str,
    /// What the program prints, where it is served to the end.
    gets: Option<&'static str>,
    /// How the run ends.
    code: i32,
    /// What the daemon's log has to say.
    log: &'static str,
    /// What the borrower has to be told.
    told: &'static str,
}

const fn served(words: &'static str, prints: &'static str) -> Attempt {
    Attempt {
        words,
        gets: Some(prints),
        code: 0,
        log: SERVED,
        told: "",
    }
}

const fn ended(words: &'static str, log: &'static str) -> Attempt {
    Attempt {
        words,
        gets: None,
        code: EXIT_NODE_LOST,
        log,
        told: log,
    }
}

/// What the node sends home is damaged, and home says what is wrong with it.
const fn damaged(words: &'static str, told: &'static str) -> Attempt {
    Attempt {
        words,
        gets: None,
        code: EXIT_INTERNAL,
        // Many attempts in a row use up what the daemon may log about one peer; that
        // home names node 1 shows as well that node 1 served.
        log: "",
        told,
    }
}

const SERVED: &str = "runs as node 1";

const MEMORY: &str = "ended because of its memory";
const REFUSED: &str = "SIGSYS";

/// Numbers of system calls are those of x86-64.
const ATTEMPTS: [Attempt; 20] = [
    served("where", "there"),
    served("deaf 1", "was away"),
    // Within the bound.
    served("private 40", "held 40 MiB"),
    ended("private 1500", MEMORY),
    ended("tables 1000", MEMORY),
    ended("shared 500", REFUSED),
    ended("huge 1500", REFUSED),
    // mmap: shared, of a file, the host's huge pages, populated, growing downwards.
    ended("call 9 0 4096 3 0x21 -1 0", REFUSED),
    ended("call 9 0 4096 3 0x02 900 0", REFUSED),
    ended("call 9 0 2097152 3 0x40022 -1 0", REFUSED),
    ended("call 9 0 4096 3 0x8022 -1 0", REFUSED),
    ended("call 9 0 4096 3 0x122 -1 0", REFUSED),
    // mremap, mlock, memfd_create, shmget.
    ended("call 25 0 4096 8192 1", REFUSED),
    ended("call 149 0 4096", REFUSED),
    ended("call 319 0 0", REFUSED),
    ended("call 29 0 4096 0x3ff", REFUSED),
    // setsockopt: the number of a receive time-out, but of TCP.
    ended("call 54 900 6 20 0 0", REFUSED),
    // socket; kill of everybody.
    ended("call 41 2 1 0", REFUSED),
    ended("call 62 -1 9", REFUSED),
    Attempt {
        words: "flood 2",
        gets: Some("said "),
        code: 0,
        log: "messages more were left out",
        told: "",
    },
];

/// Numbers are those of `proc/runtime/src/engine/damage.rs`.
const DAMAGES: [Attempt; 11] = [
    Attempt {
        log: "",
        ..served("damage 0", "was there and back")
    },
    damaged("damage 1", "RIP is 0x8000000000000000"),
    damaged("damage 2", "the FS base is 0x8000000000000000"),
    damaged("damage 3", "the GS base is 0x8000000000000000"),
    damaged("damage 4", "inside the runtime"),
    damaged("damage 5", "not in standard XSAVE format"),
    damaged("damage 6", "policy's place is out of bounds"),
    damaged("damage 7", "policy's base is out of bounds"),
    damaged("damage 8", "policy is of kind 77"),
    damaged("damage 9", "policy's threshold is out of bounds"),
    Attempt {
        log: "",
        ..served("damage 10", "was there and back")
    },
];

/// A daemon that lends, and whom it trusts.
struct Lender {
    kind: &'static str,
    context: Context,
    directory: PathBuf,
    home: Identity,
    address: String,
    daemon: Running,
}

/// Lends to every attempt once, or for as long as `bound` says again and again.
pub fn run_lending(context: &Context, bound: Option<Duration>, names: &[String], report: &Report) {
    type Start = fn(&Context) -> Result<Lender>;
    let kinds: [(&str, Start, Option<String>, &[Attempt]); 3] = [
        ("own user", Lender::start, None, &ATTEMPTS),
        (
            "nobody",
            Lender::start_as_nobody,
            cannot_be_nobody(context),
            &ATTEMPTS,
        ),
        (
            "hostile node",
            Lender::start_damaging,
            cannot_damage(context),
            &DAMAGES,
        ),
    ];
    let bound = bound.map(|bound| bound / kinds.len() as u32);
    for (kind, start, missing, attempts) in kinds {
        let name = format!("lend as {kind}");
        let wanted = |attempt: &&Attempt| {
            let full = format!("{name}: {}", attempt.words);
            names.is_empty() || names.iter().any(|part| full.contains(part.as_str()))
        };
        let attempts: Vec<&Attempt> = attempts.iter().filter(wanted).collect();
        if attempts.is_empty() {
            continue;
        }
        if let Some(why) = missing {
            report.add(&name, Duration::ZERO, Verdict::Skipped(why));
            continue;
        }
        match start(context) {
            Ok(mut lender) => lender.try_all(&attempts, bound, report),
            Err(error) => {
                let reasons = vec![format!("{error:#}")];
                report.add(&name, Duration::ZERO, Verdict::Failed(reasons));
            }
        }
    }
}

fn cannot_be_nobody(context: &Context) -> Option<String> {
    match context.is_root() {
        true => user::cannot_change(),
        false => Some("changing the user needs root".to_owned()),
    }
}

fn cannot_damage(context: &Context) -> Option<String> {
    let built = context.programs.join(DAMAGING_RUNTIME).exists();
    (!built).then(|| "`make damage` has not built its runtime".to_owned())
}

/// Two identities that trust each other, the lender's at the end.
fn identities(context: &Context, directory: &Path, address: &str) -> Result<[Identity; 2]> {
    let home = Identity::new(context, &directory.join("home"))?;
    let node = Identity::new(context, &directory.join("node"))?;
    home.configure("127.0.0.1:1", "1G", &[("node", &node.key, Some(address))])?;
    node.configure(address, LENT, &[("home", &home.key, None)])?;
    Ok([home, node])
}

impl Lender {
    fn start(context: &Context) -> Result<Lender> {
        Lender::start_with("own user", context.clone(), Vec::new(), None, |_| Ok(()))
    }

    /// A daemon whose slices damage what they send home.
    fn start_damaging(context: &Context) -> Result<Lender> {
        let runtime = fs::canonicalize(context.programs.join(DAMAGING_RUNTIME))?;
        let context = context.clone();
        Lender::start_with("hostile node", context, Vec::new(), Some(runtime), |_| {
            Ok(())
        })
    }

    /// A daemon that may make no users and no groups.
    fn start_as_nobody(context: &Context) -> Result<Lender> {
        let open = user::open_context(context)?;
        let prefix = user::prefix(&open);
        Lender::start_with("nobody", open, prefix, None, |directory| {
            let nobody = User::from_name("nobody")?.context("there is no user nobody")?;
            let own = |path: &Path| chown(path, Some(nobody.uid.as_raw()), None);
            own(directory)?;
            for entry in fs::read_dir(directory)? {
                own(&entry?.path())?;
            }
            Ok(())
        })
    }

    fn start_with(
        kind: &'static str,
        context: Context,
        prefix: Vec<OsString>,
        runtime: Option<PathBuf>,
        give: fn(&Path) -> Result<()>,
    ) -> Result<Lender> {
        let directory = context.directory(&format!("lend-{}", kind.replace(' ', "-")))?;
        let port = free_port()?;
        let address = format!("127.0.0.1:{port}");
        let [home, node] = identities(&context, &directory, &address)?;
        give(&node.directory)?;
        for path in [&directory, &directory.join("node")] {
            user::make_open(path)?;
        }
        let wanted = Wanted {
            host: "127.0.0.1".to_owned(),
            port,
            memory: LENT.to_owned(),
            prefix,
            runtime,
        };
        let daemon = cluster::start_daemon(&context, &node, &directory, &wanted)?;
        Ok(Lender {
            kind,
            context,
            directory,
            home,
            address,
            daemon,
        })
    }

    fn try_all(&mut self, attempts: &[&Attempt], bound: Option<Duration>, report: &Report) {
        let started = Instant::now();
        let mut round = 0;
        loop {
            for attempt in attempts {
                let at = Instant::now();
                let verdict = match self.attempt(attempt) {
                    Ok(reasons) if reasons.is_empty() => Verdict::Passed(String::new()),
                    Ok(reasons) => Verdict::Failed(reasons),
                    Err(error) => Verdict::Failed(vec![format!("{error:#}")]),
                };
                let name = format!("lend as {}: {} ({round})", self.kind, attempt.words);
                report.add(&name, at.elapsed(), verdict);
            }
            round += 1;
            if bound.is_none_or(|bound| started.elapsed() > bound) {
                return;
            }
        }
    }

    fn log_path(&self) -> PathBuf {
        self.directory.join("daemon").join("stderr")
    }

    fn run(&self, words: &str) -> Result<Outcome> {
        let mut command: Vec<OsString> = vec![self.context.weft.clone().into()];
        let options = [
            "run",
            "--on",
            &self.address,
            "--memory",
            BUDGETS,
            "--jump",
            "8",
        ];
        command.extend(options.map(OsString::from));
        command.push("--".into());
        command.push(self.context.programs.join("hostile").into());
        command.extend(words.split(' ').map(OsString::from));
        let mut invocation = Invocation::new(&command, &self.directory.join("run"));
        invocation.environment = vec![self.home.environment()];
        run(&invocation)
    }

    fn attempt(&mut self, attempt: &Attempt) -> Result<Vec<String>> {
        let before = fs::metadata(self.log_path())?.len();
        let outcome = self.run(attempt.words)?;
        self.wait_until_given_back()?;
        let log = fs::read(self.log_path())?;
        let log = String::from_utf8_lossy(&log[before as usize..]).into_owned();
        let printed = fs::read_to_string(&outcome.stdout)?;
        let mut reasons = Vec::new();
        let got = attempt.gets.is_none_or(|text| printed.contains(text));
        if outcome.end != End::Exit(attempt.code) || !got {
            reasons.push(format!("{}, printed `{}`", outcome.end, printed.trim()));
        }
        if !log.contains(attempt.log) {
            reasons.push(format!("the daemon does not say `{}`: {log}", attempt.log));
        }
        if !outcome.stderr.contains(attempt.told) {
            reasons.push(format!("the borrower is not told `{}`", attempt.told));
        }
        let said_bytes = log.len().max(outcome.stderr.len()) as u64;
        if said_bytes > SAID_BYTES_MAX {
            reasons.push(format!("{said_bytes} bytes were said"));
        }
        reasons.extend(
            outcome
                .leftovers
                .iter()
                .map(|left| format!("left behind: {left}")),
        );
        if !reasons.is_empty() {
            reasons.push(format!("stderr: {}", outcome.stderr.trim()));
        }
        Ok(reasons)
    }

    /// Waits until the daemon has no slice any more and lends all of its memory again.
    fn wait_until_given_back(&mut self) -> Result<()> {
        let deadline = Instant::now() + GIVEN_BACK;
        loop {
            let command: Vec<OsString> = vec![
                self.context.weft.clone().into(),
                "node".into(),
                "list".into(),
                "--json".into(),
                self.address.clone().into(),
            ];
            let mut invocation = Invocation::new(&command, &self.directory.join("list"));
            invocation.environment = vec![self.home.environment()];
            let outcome = run(&invocation)?;
            let text = fs::read_to_string(&outcome.stdout)?;
            let nodes: serde_json::Value = serde_json::from_str(&text)
                .with_context(|| format!("weft node list: {text} {}", outcome.stderr))?;
            let node = &nodes[0];
            let free = node["memory_free_bytes"].as_u64();
            if node["slices_used"] == 0 && free.is_some() && free == node["memory_bytes"].as_u64() {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "not given back: {text}");
        }
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        // Its process is killed; what `finish` would say of it nobody waits for.
        let pid = nix::unistd::Pid::from_raw(self.daemon.pid());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    }
}
