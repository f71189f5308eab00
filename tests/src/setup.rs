//! Errors before the start: each has its exit code and says what is wrong, and
//! nothing of the program runs.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::cluster::{Cluster, Identity, Wanted, free_port};
use crate::context::Context;
use crate::report::{Report, Verdict};
use crate::run::{End, Invocation, Outcome, run};

const EXIT_NO_ROOM: i32 = 123;
const EXIT_SETUP: i32 = 125;
const EXIT_NOT_EXECUTABLE: i32 = 126;
const EXIT_NOT_FOUND: i32 = 127;
/// An error before the start must not take longer, remote or not.
const BOUND: Duration = Duration::from_secs(20);

/// What one machine with one build cannot show.
const ELSEWHERE: [(&str, &str); 2] = [
    (
        "wrong version",
        "needs a second build of weft; the handshake's unit tests cover it",
    ),
    (
        "different CPU",
        "needs a second machine; the handshake's unit tests cover it",
    ),
];

/// A call that must be refused.
pub(crate) struct Refusal<'a> {
    pub(crate) name: &'a str,
    /// Words before `weft`.
    prefix: Vec<OsString>,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    exit: i32,
    /// Each must be in the message, in any case.
    says: &'a [&'a str],
}

fn words(text: &str) -> Vec<OsString> {
    text.split(' ')
        .filter(|word| !word.is_empty())
        .map(Into::into)
        .collect()
}

impl<'a> Refusal<'a> {
    pub(crate) fn new(
        name: &'a str,
        arguments: &str,
        exit: i32,
        says: &'a [&'a str],
    ) -> Refusal<'a> {
        Refusal {
            name,
            prefix: Vec::new(),
            arguments: words(arguments),
            environment: Vec::new(),
            exit,
            says,
        }
    }

    fn with(mut self, identity: &Identity) -> Refusal<'a> {
        self.environment.push(identity.environment());
        self
    }

    /// On a kernel that seems to lack `what`; see `tests/programs/without.c`.
    fn without(mut self, context: &Context, what: &str) -> Refusal<'a> {
        self.prefix = vec![context.programs.join("without").into(), what.into()];
        self
    }

    /// As an ordinary user.
    pub(crate) fn by_user(mut self, context: &Context) -> Refusal<'a> {
        self.prefix = crate::user::prefix(context);
        self
    }

    pub(crate) fn check(&self, context: &Context) -> Result<Verdict> {
        let directory = context.directory(&format!("setup-{}", self.name))?;
        let mut command = self.prefix.clone();
        command.push(context.weft.clone().into_os_string());
        command.extend(self.arguments.iter().cloned());
        let mut invocation = Invocation::new(&command, &directory).bounded(BOUND);
        invocation.environment = self.environment.clone();
        let outcome = run(&invocation)?;
        let reasons = self.judge(&outcome)?;
        if reasons.is_empty() {
            let said = outcome.stderr.lines().next().unwrap_or("").to_string();
            return Ok(Verdict::Passed(said));
        }
        Ok(Verdict::Failed(reasons))
    }

    fn judge(&self, outcome: &Outcome) -> Result<Vec<String>> {
        let mut reasons = Vec::new();
        if outcome.end != End::Exit(self.exit) {
            reasons.push(format!("{} instead of exit {}", outcome.end, self.exit));
        }
        let said = outcome.stderr.to_lowercase();
        for wanted in self.says {
            if !said.contains(&wanted.to_lowercase()) {
                reasons.push(format!("the message does not say `{wanted}`"));
            }
        }
        if fs::metadata(&outcome.stdout)?.len() > 0 {
            reasons.push("the program ran, or something printed to standard output".to_string());
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
}

/// An ELF header for another machine; only the header is ever looked at.
fn write_foreign_elf(path: &Path, programs: &Path) -> Result<()> {
    const MACHINE_OFFSET: usize = 18;
    const AARCH64: u16 = 183;
    let mut bytes = fs::read(programs.join("hello"))?;
    bytes[MACHINE_OFFSET..MACHINE_OFFSET + 2].copy_from_slice(&AARCH64.to_le_bytes());
    write_executable(path, &bytes)
}

fn write_executable(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

fn local_refusals(context: &Context, files: &Path) -> Result<Vec<Refusal<'static>>> {
    let path = |name: &str| files.join(name).to_string_lossy().into_owned();
    let hello = context.fill("{programs}/hello");
    write_executable(&files.join("text-file"), b"just some text\n")?;
    write_executable(&files.join("empty"), b"")?;
    let mut cut = fs::read(context.programs.join("hello"))?;
    cut.truncate(100);
    write_executable(&files.join("cut-off"), &cut)?;
    write_foreign_elf(&files.join("foreign"), &context.programs)?;
    fs::copy(context.programs.join("hello"), files.join("not-executable"))?;
    fs::set_permissions(
        files.join("not-executable"),
        fs::Permissions::from_mode(0o644),
    )?;
    let run = |program: &str| format!("run --nodes 2 --memory 64M -- {program}");
    let mut refusals = vec![
        Refusal::new(
            "not found",
            &run("no-such-program"),
            EXIT_NOT_FOUND,
            &["no-such-program", "not found"],
        ),
        Refusal::new(
            "no such file",
            &run("/no/such/file"),
            EXIT_NOT_FOUND,
            &["/no/such/file"],
        ),
        Refusal::new(
            "a directory",
            &run("/usr"),
            EXIT_NOT_EXECUTABLE,
            &["/usr", "directory"],
        ),
        Refusal::new(
            "not an ELF",
            &run(&path("text-file")),
            EXIT_NOT_EXECUTABLE,
            &["text-file", "ELF"],
        ),
        Refusal::new(
            "empty",
            &run(&path("empty")),
            EXIT_NOT_EXECUTABLE,
            &["empty"],
        ),
        Refusal::new(
            "cut off",
            &run(&path("cut-off")),
            EXIT_NOT_EXECUTABLE,
            &["cut-off"],
        ),
        Refusal::new(
            "foreign ELF",
            &run(&path("foreign")),
            EXIT_NOT_EXECUTABLE,
            &["foreign", "Arm"],
        ),
        Refusal::new(
            "not executable",
            &run(&path("not-executable")),
            EXIT_NOT_EXECUTABLE,
            &["not-executable"],
        ),
        Refusal::new(
            "memory too small",
            &format!("run --nodes 2 --memory 8K -- {hello}"),
            EXIT_SETUP,
            &["--memory", "too small"],
        ),
        Refusal::new(
            "memory of one too small",
            &format!("run --nodes 2 --memory 64M,8K -- {hello}"),
            EXIT_SETUP,
            &["--memory", "too small"],
        ),
        Refusal::new(
            "wrong number of budgets",
            &format!("run --nodes 3 --memory 64M,64M -- {hello}"),
            EXIT_SETUP,
            &["--memory", "3 nodes"],
        ),
        Refusal::new(
            "too many nodes",
            &format!("run --nodes 17 --memory 64M -- {hello}"),
            EXIT_SETUP,
            &["16"],
        ),
    ];
    for (name, what, says) in [
        ("no userfaultfd", "userfaultfd", &["userfaultfd", "doctor"]),
        (
            "no dispatch",
            "dispatch",
            &["Syscall User Dispatch", "kernel"],
        ),
    ] {
        refusals.push(Refusal::new(name, &run(&hello), EXIT_SETUP, says).without(context, what));
    }
    if context.programs.join("hello-32").exists() {
        let program = context.fill("{programs}/hello-32");
        refusals.push(Refusal::new(
            "32-bit ELF",
            &run(&program),
            EXIT_NOT_EXECUTABLE,
            &["hello-32", "32-bit"],
        ));
    }
    Ok(refusals)
}

/// Everything that needs no daemon.
pub fn run_local(context: &Context, report: &Report) -> Result<()> {
    let files = context.directory("setup-files")?;
    for (name, why) in ELSEWHERE {
        report.add(
            &format!("set-up: {name}"),
            Duration::ZERO,
            Verdict::Skipped(why.to_string()),
        );
    }
    let started = Instant::now();
    let verdict = environment_is_the_programs(context)?;
    report.add("set-up: environment", started.elapsed(), verdict);
    for refusal in local_refusals(context, &files)? {
        let started = Instant::now();
        let verdict = refusal.check(context)?;
        report.add(
            &format!("set-up: {}", refusal.name),
            started.elapsed(),
            verdict,
        );
    }
    Ok(())
}

/// What the user's environment says is the program's: no variable of it makes the
/// runtime execute something else.
fn environment_is_the_programs(context: &Context) -> Result<Verdict> {
    let directory = context.directory("setup-environment")?;
    let mut command = vec![context.weft.clone().into_os_string()];
    command.extend(words(
        "run --nodes 2 --memory 32M -- printenv WEFT_PROGRAM WEFT_GENERATION",
    ));
    let mut invocation = Invocation::new(&command, &directory).bounded(BOUND);
    for (name, value) in [
        ("WEFT_PROGRAM", "/bin/false"),
        ("WEFT_GENERATION", "7"),
        ("WEFT_CONTROL", "none:0:/bin/false"),
    ] {
        invocation.environment.push((name.into(), value.into()));
    }
    let outcome = run(&invocation)?;
    if outcome.end == End::Exit(0) && fs::read(&outcome.stdout)? == b"/bin/false\n7\n" {
        return Ok(Verdict::Passed(String::new()));
    }
    Ok(Verdict::Failed(vec![format!(
        "{}: {}",
        outcome.end,
        outcome.stderr.trim()
    )]))
}

/// Refusals between hosts: key, room, nobody there. Runs one success first, so
/// that a refusal is known to come from what was changed.
pub fn run_remote(context: &Context, report: &Report) -> Result<()> {
    let directory = context.directory("setup-remote")?;
    let wanted = Wanted {
        host: "127.0.0.1".to_string(),
        port: free_port()?,
        memory: "256M".to_string(),
        prefix: Vec::new(),
        runtime: None,
    };
    let cluster = match Cluster::start(context, &directory, &wanted) {
        Ok(cluster) => cluster,
        Err(error) => {
            let reasons = vec![format!("{error:#}")];
            report.add(
                "set-up: daemon starts",
                Duration::ZERO,
                Verdict::Failed(reasons),
            );
            return Ok(());
        }
    };
    let on = |memory: &str, host: &str| {
        context.fill(&format!(
            "run --on {host} --memory {memory} -- {{programs}}/hello"
        ))
    };
    let good = on("32M", &cluster.address);
    report.add(
        "set-up: remote works",
        Duration::ZERO,
        remote_works(context, &cluster, &good)?,
    );

    let stranger = Identity::new(context, &directory.join("stranger"))?;
    stranger.configure(
        "127.0.0.1:1",
        "1G",
        &[("node", &cluster.node.key, Some(&cluster.address))],
    )?;
    let deceived = Identity::new(context, &directory.join("deceived"))?;
    deceived.configure(
        "127.0.0.1:1",
        "1G",
        &[("node", &stranger.key, Some(&cluster.address))],
    )?;
    let exposed = Identity::new(context, &directory.join("exposed"))?;
    exposed.configure(
        "127.0.0.1:1",
        "1G",
        &[("node", &cluster.node.key, Some(&cluster.address))],
    )?;
    fs::set_permissions(
        exposed.directory.join("node.key"),
        fs::Permissions::from_mode(0o644),
    )?;
    let misspelt = Identity::new(context, &directory.join("misspelt"))?;
    fs::write(
        misspelt.directory.join("node.toml"),
        "listne = \"127.0.0.1:1\"\n",
    )?;
    let nobody = format!("127.0.0.1:{}", free_port()?);
    let lonely = Identity::new(context, &directory.join("lonely"))?;
    lonely.configure(
        "127.0.0.1:1",
        "1G",
        &[("node", &cluster.node.key, Some(&nobody))],
    )?;

    let refusals = [
        Refusal::new("key unknown to the node", &good, EXIT_SETUP, &["127.0.0.1"]).with(&stranger),
        Refusal::new("node with another key", &good, EXIT_SETUP, &["127.0.0.1"]).with(&deceived),
        Refusal::new(
            "key readable by others",
            &good,
            EXIT_SETUP,
            &["node.key", "chmod"],
        )
        .with(&exposed),
        Refusal::new("misspelt field", &good, EXIT_SETUP, &["listne", "listen"]).with(&misspelt),
        Refusal::new(
            "no room",
            &on("32M,4G", &cluster.address),
            EXIT_NO_ROOM,
            &["room"],
        )
        .with(&cluster.home),
        Refusal::new(
            "nobody there",
            &on("32M", &nobody),
            EXIT_SETUP,
            &["127.0.0.1", "reach"],
        )
        .with(&lonely),
    ];
    for refusal in refusals {
        let started = Instant::now();
        let verdict = refusal.check(context)?;
        report.add(
            &format!("set-up: {}", refusal.name),
            started.elapsed(),
            verdict,
        );
    }
    Ok(())
}

fn remote_works(context: &Context, cluster: &Cluster, arguments: &str) -> Result<Verdict> {
    let directory = context.directory("setup-works")?;
    let mut command = vec![context.weft.clone().into_os_string()];
    command.extend(words(arguments));
    let mut invocation = Invocation::new(&command, &directory).bounded(BOUND);
    invocation.environment = vec![cluster.home.environment()];
    let outcome = run(&invocation)?;
    if outcome.end == End::Exit(0) && fs::read(&outcome.stdout)? == b"hello\n" {
        return Ok(Verdict::Passed(String::new()));
    }
    Ok(Verdict::Failed(vec![format!(
        "{}: {}",
        outcome.end,
        outcome.stderr.trim()
    )]))
}
