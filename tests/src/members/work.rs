//! Programs and machines for which the cluster finds the hosts.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::Check;
use super::site::{SOON, Site};
use crate::cluster::stop;
use crate::executable;
use crate::owner::{available_mib, ballast};
use crate::processes::{self, Process};
use crate::run::{End, Invocation, Running, start};

/// What each lends; it offers about half of it.
const LENT: &str = "1500M";
/// Longer than any check.
const BOUND: Duration = Duration::from_secs(120);

pub(super) const CHECKS: [(&str, Check); 15] = [
    ("needs a host that decides", without_leader),
    ("is planned, and nothing starts", dry_run),
    ("runs on several hosts where one is too small", spread),
    ("waits for room, and says why", waits),
    ("is a machine", machine),
    ("starts on another host that has room", elsewhere),
    ("ends with the connection that started it", connection),
    ("stays away from a cordoned host", cordoned),
    ("leaves a drained host, and is pulled together", moved),
    ("leaves a drained host as a program", program_leaves),
    ("gives memory back to the owner of a host", gives_back),
    ("goes on while the store stands still", silent_store),
    ("whose launcher is killed is over", killed_launcher),
    ("whose launcher and agent are killed is over", killed_both),
    (
        "is placed by another host when the leader is killed",
        next_leader,
    ),
];

fn plan(site: &Site<'_>, host: &str) -> Result<Value> {
    Ok(serde_json::from_str(&site.succeeds(host, "plan --json")?)?)
}

fn names(plan: &Value, list: &str) -> Vec<String> {
    let lines = plan[list].as_array().cloned().unwrap_or_default();
    let name = |line: &Value| line["name"].as_str().unwrap_or_default().to_owned();
    lines.iter().map(name).collect()
}

/// What is free of home's memory, in MiB.
pub(super) fn free_at_home(site: &Site<'_>) -> Result<u64> {
    let plan = plan(site, "home")?;
    let hosts = plan["hosts"].as_array().context("no hosts")?;
    let home = hosts.iter().find(|host| host["name"] == "home");
    home.and_then(|home| home["memory_free_mib"].as_u64())
        .context("home's memory")
}

fn until(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !holds()? {
        ensure!(begun.elapsed() < SOON, "{what}: not within {SOON:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

pub(super) fn running(site: &Site<'_>, wanted: usize) -> Result<()> {
    until(&format!("{wanted} run"), || {
        Ok(names(&plan(site, "home")?, "runs").len() == wanted)
    })
}

/// `weft` of home in the background.
fn begin(site: &Site<'_>, words: &[&str]) -> Result<Running> {
    let weft = site.context.weft.to_string_lossy();
    begin_command(site, &[&[&weft[..]], words].concat())
}

fn begin_command(site: &Site<'_>, command: &[&str]) -> Result<Running> {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let directory = site.directory.join(format!("begun-{number}"));
    fs::create_dir_all(&directory)?;
    let mut invocation = Invocation::new(command, &directory).bounded(BOUND);
    invocation.environment = site.environment("home");
    start(&invocation)
}

/// A program of home that takes so much memory of the cluster until the file is there.
pub(super) fn hold(
    site: &Site<'_>,
    memory_mib: u64,
    until: &Path,
    more: &[&str],
) -> Result<Running> {
    let memory = format!("{memory_mib}M");
    let wait = format!("while ! [ -e {} ]; do sleep 0.1; done", until.display());
    let mut words = vec!["run", "--cluster", "--memory", &memory];
    words.extend(more);
    words.extend(["--", "sh", "-c", &wait]);
    begin(site, &words)
}

pub(super) fn ended_well(running: Running) -> Result<String> {
    let outcome = running.finish()?;
    let said = outcome.stderr.trim().to_owned();
    ensure!(outcome.end == End::Exit(0), "{}: {said}", outcome.end);
    Ok(said)
}

fn without_leader(site: &mut Site<'_>) -> Result<()> {
    site.init()?;
    site.join("alpha")?;
    site.join("beta")?;
    let says = site.fails("home", "run --cluster -- true")?;
    ensure!(says.contains("needs one --memory"), "{says}");
    let says = site.fails("home", "run --dry-run -- true")?;
    ensure!(says.contains("--cluster"), "{says}");
    let shown = site.succeeds("home", "plan")?;
    ensure!(shown.contains("no host decides"), "{shown}");
    for host in ["home", "alpha", "beta"] {
        site.lend(host, LENT)?;
    }
    site.living(&["alpha", "beta", "home"])?;
    until("a host decides", || {
        Ok(plan(site, "home")?["leader"].is_string())
    })
}

fn dry_run(site: &mut Site<'_>) -> Result<()> {
    let ask = |memory: &str| format!("run --cluster --dry-run --memory {memory} -- true");
    let free = free_at_home(site)?;
    let says = site.succeeds("home", &ask("100M"))?;
    ensure!(says.contains("starts on home"), "{says}");
    let says = site.succeeds("home", &ask(&format!("{}M", free + 100)))?;
    ensure!(says.contains("home (1 core and"), "{says}");
    let outcome = site.call("home", &ask("1000G"))?;
    let says = fs::read_to_string(&outcome.stdout)?;
    ensure!(
        outcome.end == End::Exit(1) && says.contains("is refused"),
        "{}: {says}",
        outcome.end
    );
    let plan = plan(site, "alpha")?;
    ensure!(names(&plan, "runs").is_empty() && names(&plan, "waits").is_empty());
    Ok(())
}

fn spread(site: &mut Site<'_>) -> Result<()> {
    let free = free_at_home(site)?;
    let go = site.directory.join("go-spread");
    let program = hold(site, free + 200, &go, &["--stretch", "now"])?;
    running(site, 1)?;
    let shown = plan(site, "beta")?;
    let parts = shown["runs"][0]["parts"].as_array().context("no parts")?;
    ensure!(parts.len() == 2 && parts[0]["host"] == "home", "{parts:?}");
    ensure!(parts[1]["memory_mib"] == 200, "{parts:?}");
    let text = site.succeeds("home", "plan")?;
    ensure!(
        text.contains("FREE MEMORY") && text.contains("RUNS"),
        "{text}"
    );
    fs::write(&go, "")?;
    ended_well(program)?;
    running(site, 0)?;
    let memory = format!("{}M", free + 200);
    let says = site.succeeds(
        "home",
        &format!("run --cluster --memory {memory} -- echo placed"),
    )?;
    ensure!(says == "placed\n", "{says}");
    running(site, 0)
}

fn waits(site: &mut Site<'_>) -> Result<()> {
    let user = nix::unistd::User::from_uid(nix::unistd::geteuid())?;
    let user = user.context("this user has no name")?.name;
    site.succeeds("home", &format!("cluster quota set {user} --memory 100M"))?;
    let one = "run --cluster --wait 0 --memory 100M -- true";
    site.succeeds("home", one)?;
    let says = site.fails("home", &one.replace("100M", "101M"))?;
    ensure!(
        says.contains("the quota of") && says.contains("is 100 MiB"),
        "{says}"
    );
    let listed = site.succeeds("alpha", "cluster quota list")?;
    ensure!(listed.contains("100.0 MiB"), "{listed}");
    site.succeeds("home", &format!("cluster quota end {user}"))?;
    let free = free_at_home(site)?;
    let go = site.directory.join("go-waits");
    let first = hold(site, free, &go, &[])?;
    running(site, 1)?;
    let impatient = "run --cluster --wait 0 --hosts-max 1 --memory 100M -- true";
    let says = site.fails("home", impatient)?;
    ensure!(says.contains("it starts on home, which has only"), "{says}");
    let impatient = impatient.replace("--wait 0", "--wait 1.5");
    let says = site.fails("home", &impatient)?;
    ensure!(says.contains("it has waited 1 s"), "{says}");
    let says = site.fails("home", &impatient.replace("100M", "100G"))?;
    ensure!(says.contains("is refused"), "{says}");
    let second = hold(site, 100, &go, &["--hosts-max", "1"])?;
    until("it waits", || {
        let plan = plan(site, "alpha")?;
        let why = plan["waits"][0]["why"].as_str().unwrap_or_default();
        Ok(why.contains("it starts on home"))
    })?;
    let text = site.succeeds("beta", "plan")?;
    ensure!(text.contains("WAITS"), "{text}");
    // One that is called off is forgotten at once.
    let third = hold(site, 100, &go, &["--hosts-max", "1"])?;
    until("two wait", || {
        Ok(names(&plan(site, "home")?, "waits").len() == 2)
    })?;
    // Not SIGINT: a shell that runs this suite in the background has it ignored.
    kill(Pid::from_raw(third.pid()), Signal::SIGTERM)?;
    third.finish()?;
    until("one waits", || {
        Ok(names(&plan(site, "home")?, "waits").len() == 1)
    })?;
    fs::write(&go, "")?;
    ended_well(first)?;
    let says = ended_well(second)?;
    ensure!(says.contains("waits: it starts on home"), "{says}");
    running(site, 0)
}

/// `weft vm start` of home, which leaves the machine behind.
pub(super) fn start_machine(site: &Site<'_>, words: &str) -> Result<()> {
    let output = Command::new(&site.context.weft)
        .args(words.split(' '))
        // A check that failed before may have left the room taken.
        .args(["--wait", "60"])
        .envs(site.environment("home"))
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{words}: {said}");
    ensure!(said.contains("web starts on home"), "{said}");
    Ok(())
}

fn machine(site: &mut Site<'_>) -> Result<()> {
    let kernel = site.context.programs.join("typed-guest");
    let kernel = kernel.to_string_lossy();
    let memory = (free_at_home(site)? + 200) / 2 * 2;
    let start = format!(
        "vm start --cluster --name web --backend soft --kernel {kernel} --cpus 2 --memory {memory}M"
    );
    let says = site.succeeds("home", &format!("{start} --dry-run"))?;
    ensure!(says.contains("web starts on home ("), "{says}");
    let says = site.fails("home", &start.replace("--cpus 2", "--cpus 1,1"))?;
    ensure!(says.contains("give the total of each"), "{says}");
    start_machine(site, &start)?;
    let shown = plan(site, "alpha")?;
    ensure!(names(&shown, "runs") == ["web"], "{shown}");
    let parts = shown["runs"][0]["parts"].as_array().context("no parts")?;
    ensure!(parts.len() == 2, "{parts:?}");
    until("its nodes are seen", || {
        let views: Value = serde_json::from_str(&site.succeeds("home", "vm list --json")?)?;
        let slices = views[0]["configuration"]["slices"].as_array();
        Ok(slices.is_some_and(|slices| slices.len() == 2))
    })?;
    // A name is of one machine, on all hosts.
    let again = start.replace(&format!("{memory}M"), "64M");
    let says = site.fails("alpha", &again)?;
    ensure!(
        says.contains("web runs or waits in this cluster already"),
        "{says}"
    );
    site.succeeds("home", "vm stop --timeout 0 web")?;
    running(site, 0)
}

/// What stands for ssh: it runs a line as another host of the site. SIGTERM cuts the connection,
/// as the end of ssh does. A suite that runs under nohup(1) has SIGHUP ignored, a login has not.
const SSH: &str = r#"#!/bin/sh
line=$2
. "$(dirname "$0")/$WEFT_SSH_HOST.sh"
mkfifo "$PIPE"
cat "$PIPE" & reader=$!
trap 'kill $reader' TERM
cd /
env --default-signal=HUP sh -c "$line" > "$PIPE" & command=$!
while wait $command; code=$?; kill -0 $command 2> /dev/null; do :; done
wait
rm "$PIPE"
exit $code
"#;

/// Makes [`SSH`], and says by which variable it is used.
fn make_ssh(site: &Site<'_>) -> Result<String> {
    let ssh = site.directory.join("ssh");
    executable::write(&ssh, SSH.as_bytes())?;
    let weft = site.context.weft.parent().context("weft is in a folder")?;
    for host in ["home", "alpha", "beta"] {
        let pipe = site.directory.join(format!("pipe-{host}"));
        let (weft, pipe) = (weft.display(), pipe.display());
        let mut script = format!("export PATH={weft}:$PATH PIPE={pipe}.$$\n");
        for (name, value) in site.environment(host) {
            let [name, value] = [name.display(), value.display()];
            script += &format!("export {name}={value}\n");
        }
        fs::write(site.directory.join(format!("{host}.sh")), script)?;
    }
    Ok(format!("WEFT_SSH_COMMAND={}", ssh.display()))
}

/// `weft run --cluster` of home with these options, and a variable of its environment.
fn words_to_run<'w>(
    site: &'w Site<'_>,
    variable: &'w str,
    options: &[&'w str],
) -> Result<Vec<&'w str>> {
    let weft = site.context.weft.to_str().context("a plain path")?;
    Ok([&["env", variable, weft, "run", "--cluster"], options].concat())
}

/// The home is where there is room, and not where the command is.
fn elsewhere(site: &mut Site<'_>) -> Result<()> {
    let ssh = make_ssh(site)?;
    let call = |options: &[&str]| site.invoke("home", &words_to_run(site, &ssh, options)?);
    let host_of = |option: &str| -> Result<String> {
        let tells = "echo $XDG_RUNTIME_DIR; pwd; exit 7";
        let outcome = call(&[option, "--memory", "100M", "--", "sh", "-c", tells])?;
        let said = outcome.stderr.trim();
        ensure!(outcome.end == End::Exit(7), "{}: {said}", outcome.end);
        let printed = fs::read_to_string(&outcome.stdout)?;
        let (run, directory) = printed.split_once('\n').context("two lines")?;
        let here = site.directory.join("call");
        ensure!(Path::new(directory.trim()) == here, "in {directory}");
        let host = run.rsplit_once("run-").context("a host of the site")?.1;
        ensure!(said.contains(&format!("starts on {host}")), "{said}");
        Ok(host.to_owned())
    };
    let host = host_of("--anywhere=beta")?;
    ensure!(host == "beta", "it ran on {host}");
    running(site, 0)?;
    let full = site.directory.join("full");
    let program = hold(site, free_at_home(site)?, &full, &["--hosts-max", "1"])?;
    running(site, 1)?;
    let host = host_of("--anywhere")?;
    ensure!(host != "home", "home has no room");
    running(site, 1)?;
    // Whatever goes wrong, nothing is left of it.
    let at_beta = ["--anywhere=beta", "--memory=100M"];
    let words = [&at_beta[..], &["true"]].concat();
    let words = words_to_run(site, "WEFT_SSH_COMMAND=false", &words)?;
    let no_login = site.invoke("home", &words)?;
    let no_program = call(&[&at_beta[..], &["/no/program"]].concat())?;
    let no_host = call(&["--anywhere=gamma", "--memory=100M", "true"])?;
    let no_place = call(&["--placed=nothing:7", "--memory=100M", "true"])?;
    for (outcome, code, says) in [
        (
            no_login,
            125,
            "did not start on beta: false ended (exit status: 1)",
        ),
        (no_program, 127, "/no/program"),
        (no_host, 125, "gamma"),
        (no_place, 125, "nothing called nothing waits for a launcher"),
    ] {
        let said = outcome.stderr.trim();
        let is_right = outcome.end == End::Exit(code) && said.contains(says);
        ensure!(is_right, "{}, not {code} and `{says}`: {said}", outcome.end);
        running(site, 1)?;
    }
    fs::write(full, "")?;
    ended_well(program)?;
    running(site, 0)
}

/// A program elsewhere ends like one whose terminal has gone.
fn connection(site: &mut Site<'_>) -> Result<()> {
    let ssh = make_ssh(site)?;
    let began = site.directory.join("began");
    let lasts = format!("touch {}; while :; do sleep 0.1; done", began.display());
    let words = ["--anywhere=beta", "--memory=100M", "--", "sh", "-c", &lasts];
    let cut = begin_command(site, &words_to_run(site, &ssh, &words)?)?;
    until("it runs on beta", || Ok(began.exists()))?;
    running(site, 1)?;
    kill(Pid::from_raw(cut.pid()), Signal::SIGTERM)?;
    cut.finish()?;
    running(site, 0)
}

fn cordoned(site: &mut Site<'_>) -> Result<()> {
    let large = format!(
        "run --cluster --dry-run --memory {}M -- true",
        free_at_home(site)? + 100
    );
    let says = site.succeeds("alpha", "node cordon")?;
    ensure!(says.is_empty(), "{says}");
    site.succeeds("home", "node cordon beta")?;
    let text = site.succeeds("home", "plan")?;
    ensure!(text.contains("cordoned"), "{text}");
    let outcome = site.call("home", &large)?;
    ensure!(outcome.end == End::Exit(1), "{}", outcome.end);
    for host in ["alpha", "beta"] {
        site.succeeds("home", &format!("node uncordon {host}"))?;
    }
    site.succeeds("home", &large)?;
    let says = site.fails("home", "node drain nobody")?;
    ensure!(says.contains("nobody is no member"), "{says}");
    Ok(())
}

/// The hosts of the machine web.
fn hosts_of_web(site: &Site<'_>) -> Result<Vec<String>> {
    let plan = plan(site, "home")?;
    let runs = plan["runs"].as_array().context("no runs")?;
    let web = runs.iter().find(|run| run["name"] == "web");
    let parts = web.and_then(|web| web["parts"].as_array());
    let host = |part: &Value| part["host"].as_str().unwrap_or_default().to_owned();
    Ok(parts.context("web runs")?.iter().map(host).collect())
}

fn moved(site: &mut Site<'_>) -> Result<()> {
    let go = site.directory.join("go-moved");
    let first = hold(site, free_at_home(site)? - 150, &go, &[])?;
    running(site, 1)?;
    let kernel = site.context.programs.join("typed-guest");
    let kernel = kernel.to_string_lossy();
    start_machine(
        site,
        &format!(
            "vm start --cluster --name web --backend soft --kernel {kernel} --cpus 1 --memory 300M"
        ),
    )?;
    let before = hosts_of_web(site)?;
    ensure!(before.len() == 2 && before[0] == "home", "{before:?}");
    let other = ["alpha", "beta"]
        .into_iter()
        .find(|name| before[1] != *name);
    let by_hand = format!("vm migrate web {}", other.context("a third host")?);
    let says = site.fails("home", &by_hand)?;
    ensure!(says.contains("--by-hand moves it now"), "{says}");
    // What cannot move is named.
    let stuck = begin(site, &["node", "drain", "home", "--wait", "1"])?.finish()?;
    let says = &stuck.stderr;
    ensure!(
        stuck.end == End::Exit(1)
            && says.contains("stays until it ends: ")
            && says.contains("still on home"),
        "{}: {says}",
        stuck.end
    );
    site.succeeds("home", "node uncordon")?;
    let drained = begin(site, &["node", "drain", &before[1], "--wait", "60"])?;
    let says = ended_well(drained)?;
    ensure!(
        says.contains("leaves within about") && says.contains("nothing of the cluster is on"),
        "{says}"
    );
    let after = hosts_of_web(site)?;
    ensure!(
        after.len() == 2 && after[0] == "home" && after[1] != before[1],
        "{before:?} became {after:?}"
    );
    site.succeeds("home", &format!("node uncordon {}", before[1]))?;
    let evacuate = [
        "node",
        "evacuate",
        &after[1],
        "--why",
        "its fan stands still",
    ];
    let evacuated = begin(site, &[&evacuate[..], &["--wait", "60"]].concat())?;
    ended_well(evacuated)?;
    ensure!(hosts_of_web(site)? == before, "{:?}", hosts_of_web(site)?);
    let shown = plan(site, "home")?;
    let hosts = shown["hosts"].as_array().context("no hosts")?;
    let failing = hosts.iter().find(|host| host["name"] == after[1][..]);
    let failing = failing.context("the host that was left")?;
    ensure!(
        failing["state"] == "failing" && failing["trouble"] == "its fan stands still",
        "{failing}"
    );
    site.succeeds("home", &format!("node uncordon {}", after[1]))?;
    site.succeeds("home", "cluster hands-off on")?;
    ensure!(plan(site, "home")?["hands_off"] == true);
    called_off(site, &before, &after)?;
    // An operator moves it all the same.
    let says = site.fails(
        "home",
        &format!("cluster move web {} --from home", after[1]),
    )?;
    ensure!(says.contains("no such part of it can move"), "{says}");
    let wanted = begin(site, &["cluster", "move", "web", &after[1]])?;
    let says = ended_well(wanted)?;
    ensure!(says.contains("an operator wants it"), "{says}");
    ensure!(hosts_of_web(site)? == after, "{:?}", hosts_of_web(site)?);
    site.succeeds("home", "cluster hands-off off")?;
    ensure!(plan(site, "home")?["hands_off"] == false);
    fs::write(&go, "")?;
    ended_well(first)?;
    until("it is pulled together", || {
        Ok(hosts_of_web(site)? == ["home"])
    })?;
    let views = site.succeeds("home", "vm list --json")?;
    ensure!(views.contains("\"running\""), "{views}");
    site.succeeds("home", "vm stop --timeout 0 web")?;
    running(site, 0)
}

/// A move to a host that stands still is called off, and the machine stays where it is.
fn called_off(site: &Site<'_>, here: &[String], there: &[String]) -> Result<()> {
    let says = site.fails("home", "cluster move web --cancel")?;
    ensure!(says.contains("does not move now"), "{says}");
    let daemon = site.host(&there[1]).daemon.as_ref();
    let daemon = daemon.context("its daemon runs")?.pid();
    let stopped = [agent_of_web(site)?, daemon].map(Pid::from_raw);
    let [agent, daemon] = stopped;
    // The order is there before its destination stands still: that may be the host that decides.
    kill(agent, Signal::SIGSTOP)?;
    let outcome = begin(site, &["cluster", "move", "web", &there[1]]).and_then(|wanted| {
        until("it moves", || {
            let plan = plan(site, "home")?;
            let runs = plan["runs"].as_array().context("no runs")?;
            let web = runs.iter().find(|run| run["name"] == "web");
            Ok(web.is_some_and(|web| !web["moving"].is_null()))
        })?;
        kill(daemon, Signal::SIGSTOP)?;
        kill(agent, Signal::SIGCONT)?;
        // It waits for its destination.
        std::thread::sleep(Duration::from_secs(1));
        let says = ended_well(begin(site, &["cluster", "move", "web", "--cancel"])?)?;
        ensure!(says.contains("an operator called it off"), "{says}");
        wanted.finish()
    });
    for process in stopped {
        kill(process, Signal::SIGCONT)?;
    }
    let wanted = outcome?;
    let says = &wanted.stderr;
    ensure!(
        wanted.end == End::Exit(1) && says.contains("an operator called it off"),
        "{}: {says}",
        wanted.end
    );
    ensure!(hosts_of_web(site)? == here, "{:?}", hosts_of_web(site)?);
    // It may have been silent for longer than its lease.
    site.living(&["alpha", "beta", "home"])
}

/// Its slice there gives its pages to the home, and the cluster counts the room as free.
fn program_leaves(site: &mut Site<'_>) -> Result<()> {
    let go = site.directory.join("go-leave");
    let free = free_at_home(site)?;
    let program = hold(site, free + 200, &go, &["--stretch", "now"])?;
    running(site, 1)?;
    let lender = plan(site, "home")?["runs"][0]["parts"][1]["host"].clone();
    let lender = lender.as_str().context("a second host")?.to_owned();
    let drained = begin(site, &["node", "drain", &lender, "--wait", "60"])?;
    let says = ended_well(drained)?;
    ensure!(says.contains("nothing of the cluster is on"), "{says}");
    let parts = plan(site, "home")?["runs"][0]["parts"].clone();
    ensure!(
        parts.as_array().map(Vec::len) == Some(1) && parts[0]["host"] == "home",
        "{parts}"
    );
    site.succeeds("home", &format!("node uncordon {lender}"))?;
    fs::write(&go, "")?;
    let says = ended_well(program)?;
    ensure!(says.contains("asks for its memory back"), "{says}");
    running(site, 0)
}

/// A program's slice is asked to leave by its daemon, a machine's part is moved by the cluster.
fn gives_back(site: &mut Site<'_>) -> Result<()> {
    let free = free_at_home(site)?;
    let go = site.directory.join("go-back");
    let program = hold(site, free + 200, &go, &["--stretch", "now"])?;
    running(site, 1)?;
    let shown = plan(site, "home")?;
    let lender = shown["runs"][0]["parts"][1]["host"].as_str();
    let lender = lender.context("a second host")?.to_owned();
    // Its slice may still be starting.
    let lends = |site: &Site<'_>, slices: u64| -> Result<bool> {
        let state = site.succeeds(&lender, "node lend --json")?;
        Ok(serde_json::from_str::<Value>(&state)?["slices"] == slices)
    };
    until("the slice runs", || lends(site, 1))?;
    // The owner keeps all but a GiB, and then takes two.
    let available = available_mib()?;
    let has_room = available > 4096;
    let keep = if has_room { available - 1024 } else { 1 << 30 };
    site.succeeds(&lender, &format!("node lend --keep-free {keep}M --wait 0"))
        .or_else(|error| {
            if has_room {
                Err(error)
            } else {
                Ok(String::new())
            }
        })?;
    let owner = has_room.then(|| ballast(&site.directory, 2048, BOUND));
    let owner = owner.transpose()?;
    until("the slice has left", || lends(site, 0))?;
    let state = site.succeeds(&lender, "node lend")?;
    ensure!(state.contains("it would lend"), "{state}");
    owner.map_or(Ok(()), |owner| stop(owner).map(drop))?;
    site.succeeds(&lender, "node lend --keep-free 0")?;
    fs::write(&go, "")?;
    let says = ended_well(program)?;
    ensure!(says.contains("asks for its memory back"), "{says}");
    running(site, 0)?;

    let go = site.directory.join("go-back-again");
    let first = hold(site, free_at_home(site)? - 150, &go, &[])?;
    running(site, 1)?;
    let kernel = site.context.programs.join("typed-guest");
    let kernel = kernel.to_string_lossy();
    start_machine(
        site,
        &format!(
            "vm start --cluster --name web --backend soft --kernel {kernel} --cpus 1 --memory 300M"
        ),
    )?;
    let before = hosts_of_web(site)?;
    ensure!(before.len() == 2 && before[0] == "home", "{before:?}");
    site.succeeds(&before[1], "node lend --memory 150M --wait 60")?;
    // The lender knows it before the cluster does.
    until("its part is on another host", || {
        let after = hosts_of_web(site)?;
        Ok(after.len() == 2 && after[0] == "home" && after[1] != before[1])
    })?;
    site.succeeds(&before[1], &format!("node lend --memory {LENT}"))?;
    let log = site.succeeds("home", "cluster log")?;
    ensure!(log.contains("less than is used there"), "{log}");
    site.succeeds("home", "vm stop --timeout 0 web")?;
    fs::write(&go, "")?;
    ended_well(first)?;
    running(site, 0)
}

fn silent_store(site: &mut Site<'_>) -> Result<()> {
    let go = site.directory.join("go-silent");
    let first = hold(site, free_at_home(site)?, &go, &[])?;
    running(site, 1)?;
    let second = hold(site, 100, &go, &["--hosts-max", "1"])?;
    until("one waits", || {
        Ok(names(&plan(site, "home")?, "waits").len() == 1)
    })?;
    site.signal_etcd(Signal::SIGSTOP)?;
    // All leases end.
    std::thread::sleep(Duration::from_secs(12));
    site.signal_etcd(Signal::SIGCONT)?;
    until("both are known again", || {
        // The store may not answer yet.
        let Ok(plan) = plan(site, "home") else {
            return Ok(false);
        };
        let lives = plan["runs"][0]["agent"] == true && plan["leader"].is_string();
        Ok(lives && names(&plan, "waits").len() == 1)
    })?;
    ensure!(names(&plan(site, "home")?, "runs").len() == 1);
    fs::write(&go, "")?;
    ended_well(first)?;
    ended_well(second)?;
    running(site, 0)
}

/// The agent of a launcher.
fn agent_of(launcher: i32) -> Result<i32> {
    let mut agents = agents();
    let agent = agents.find(|agent| agent.parent == launcher);
    Ok(agent.context("it has an agent")?.identity.pid)
}

/// The agent of the machine: the command that started both has ended.
fn agent_of_web(site: &Site<'_>) -> Result<i32> {
    let folder = site.directory.to_string_lossy().into_owned();
    let of_web = |agent: &Process| {
        let path = format!("/proc/{}/environ", agent.identity.pid);
        let environment = fs::read(path).unwrap_or_default();
        let is_here = String::from_utf8_lossy(&environment).contains(&folder);
        is_here && !processes::command_line(agent.parent).contains("run --cluster")
    };
    let agent = agents().find(of_web);
    Ok(agent.context("the machine has an agent")?.identity.pid)
}

fn agents() -> impl Iterator<Item = Process> {
    let is_agent =
        |process: &Process| processes::command_line(process.identity.pid).contains("cluster agent");
    processes::all().into_iter().filter(is_agent)
}

fn killed_launcher(site: &mut Site<'_>) -> Result<()> {
    let never = site.directory.join("never");
    let program = hold(site, 100, &never, &[])?;
    running(site, 1)?;
    kill(Pid::from_raw(program.pid()), Signal::SIGKILL)?;
    program.finish()?;
    running(site, 0)
}

fn killed_both(site: &mut Site<'_>) -> Result<()> {
    let never = site.directory.join("never");
    let program = hold(site, 100, &never, &[])?;
    running(site, 1)?;
    // The store has it before the agent has handed it over.
    until("the launcher knows", || {
        Ok(program.stderr().contains("starts on"))
    })?;
    // While the launcher lives, it runs.
    kill(Pid::from_raw(agent_of(program.pid())?), Signal::SIGKILL)?;
    until("its agent is silent", || {
        Ok(plan(site, "home")?["runs"][0]["agent"] == false)
    })?;
    ensure!(names(&plan(site, "home")?, "runs").len() == 1);
    kill(Pid::from_raw(program.pid()), Signal::SIGKILL)?;
    program.finish()?;
    running(site, 0)?;
    let says = site.fails("home", "cluster forget nothing")?;
    ensure!(says.contains("nothing called nothing"), "{says}");
    Ok(())
}

fn next_leader(site: &mut Site<'_>) -> Result<()> {
    let never = site.directory.join("never");
    let before = hold(site, 100, &never, &[])?;
    running(site, 1)?;
    let leader = plan(site, "home")?["leader"].clone();
    let leader = leader.as_str().context("a leader")?.to_owned();
    site.kill_daemon(&leader)?;
    until("another host decides", || {
        let now = plan(site, "home")?["leader"].clone();
        Ok(now.as_str().is_some_and(|now| now != leader))
    })?;
    if leader == "home" {
        // Its programs need a home that lends.
        site.lend("home", LENT)?;
        site.living(&["alpha", "beta", "home"])?;
    }
    let free = free_at_home(site)?;
    let says = site.succeeds("home", "run --cluster --memory 100M -- echo placed")?;
    ensure!(says == "placed\n", "{says}");
    // What the leader before it placed has its room.
    let large = format!(
        "run --cluster --dry-run --hosts-max 1 --memory {}M -- true",
        free + 50
    );
    let outcome = site.call("home", &large)?;
    ensure!(outcome.end == End::Exit(1), "{}", outcome.end);
    kill(Pid::from_raw(before.pid()), Signal::SIGKILL)?;
    before.finish()?;
    running(site, 0)
}
