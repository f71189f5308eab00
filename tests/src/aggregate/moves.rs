//! vCPUs that move between the nodes of a running Linux, hundreds of times, while it
//! works: no interrupt and no tick is lost, results are right, and the kernel does not
//! notice. A node that is lost meanwhile is named, by the command too.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::work::{SUMS, judge_litmus, litmus_until_told, sums, sums_alone};
use super::{BOUND, Bench, Check, EXIT_FAILED, Shape, THREE, TWO, code};
use crate::boot::{SMALL, USER_SPACE};
use crate::guest::{Ended, Guest};
use crate::machines::{WARNINGS, check_boot};
use crate::random::Random;

pub(super) const CHECKS: [(&str, Check); 7] = [
    ("moves, 200 of vCPU 1 during litmus tests", |bench| {
        during_litmus(bench, "soft", (TWO, &[1]), 200)
    }),
    ("moves, 200 of both vCPUs over three nodes", |bench| {
        during_litmus(bench, "soft", (THREE, &[0, 1]), 200)
    }),
    ("moves, 200 during sleeps on both vCPUs", sleeps),
    ("moves, 60 during sums through pipes and files", right_sums),
    ("moves of a paused machine", paused),
    ("moves that are refused", refused),
    ("moves, nodes that are killed meanwhile", killed),
];
pub(super) const ON_KVM: &str = "moves, 40 of vCPU 1 during litmus tests, kvm";

/// The bound of a boot in a KVM without hardware virtualisation.
const KVM_BOUND: Duration = Duration::from_secs(600);
/// Bytes of the message that carries a vCPU.
const STATE_BYTES_MAX: u64 = 5 << 10;

pub(super) fn on_kvm(bench: &Bench<'_>) -> Result<String> {
    during_litmus(bench, "kvm", (TWO, &[1]), 40)
}

fn view(bench: &Bench<'_>) -> Result<Value> {
    let views: Value = serde_json::from_str(&bench.ask(&["vm", "list", "--json"])?)?;
    let mut found = views.as_array().into_iter().flatten();
    let found = found.find(|view| view["name"] == "m").cloned();
    found.with_context(|| format!("m is not in {views}"))
}

/// The node of each vCPU.
pub(super) fn locations(bench: &Bench<'_>) -> Result<Vec<u64>> {
    let view = view(bench)?;
    let locations = view["locations"].as_array().into_iter().flatten();
    let nodes = locations.map(|location| location["node"].as_u64());
    nodes.collect::<Option<_>>().context("no locations")
}

/// Moves a vCPU, checks the report, and returns how long the vCPU stood.
pub(super) fn move_vcpu(bench: &Bench<'_>, vcpu: u32, to: u64) -> Result<Duration> {
    let (number, node) = (vcpu.to_string(), to.to_string());
    let words = [
        "vm", "move", "m", "--vcpu", &number, "--to", &node, "--json",
    ];
    let moved: Value = serde_json::from_str(&bench.ask(&words)?)?;
    let field = |name: &str| {
        let value = moved[name].as_u64();
        value.with_context(|| format!("{name} of {moved}"))
    };
    ensure!(
        field("to")? == to && field("vcpu")? == u64::from(vcpu),
        "{moved}"
    );
    ensure!(field("state_bytes")? < STATE_BYTES_MAX, "{moved}");
    let parts = ["save_ns", "send_ns", "resume_ns", "install_ns"];
    let sum: u64 = parts.into_iter().map(field).sum::<Result<u64>>()?;
    let stopped = field("stopped_ns")?;
    // Each part is rounded by itself.
    ensure!(sum.abs_diff(stopped) < 10, "{moved}");
    Ok(Duration::from_nanos(stopped))
}

/// Moves some of these vCPUs to random nodes, and returns the median of their stops.
pub(super) fn wander(
    bench: &Bench<'_>,
    shape: Shape,
    vcpus: &[u32],
    count: usize,
) -> Result<Duration> {
    let mut random = Random::new(bench.context.seed ^ 0x30e5);
    let mut known = locations(bench)?;
    let mut stops = Vec::new();
    while stops.len() < count {
        let vcpu = vcpus[random.below(vcpus.len() as u64) as usize];
        let to = random.below(shape.nodes as u64);
        if known[vcpu as usize] == to {
            continue;
        }
        let moved = move_vcpu(bench, vcpu, to);
        stops.push(moved.with_context(|| format!("after {} moves", stops.len()))?);
        known[vcpu as usize] = to;
    }
    let found = locations(bench)?;
    ensure!(
        found == known,
        "the vCPUs are on {found:?}, not on {known:?}"
    );
    stops.sort_unstable();
    Ok(stops[stops.len() / 2])
}

/// A machine called `m` that says `text`; its kernel's warnings are its last words.
pub(super) fn begin(
    bench: &Bench<'_>,
    back_end: &str,
    shape: Shape,
    script: (&str, &str),
) -> Result<Guest> {
    begin_with(bench, back_end, (shape, &[]), script)
}

/// The same, with further options.
pub(super) fn begin_with(
    bench: &Bench<'_>,
    back_end: &str,
    (shape, further): (Shape, &[&str]),
    (script, text): (&str, &str),
) -> Result<Guest> {
    let mut options = shape.options.to_vec();
    options.extend(["--name", "m"]);
    options.extend(further);
    let script = format!("{script}; {WARNINGS}");
    let mut guest = Guest::start(&mut bench.machine_on(back_end, SMALL, &options, &script, "")?)?;
    let bound = if back_end == "kvm" { KVM_BOUND } else { BOUND };
    if guest.wait_for(text, bound).is_none() {
        let ended = guest.finish(Duration::ZERO)?;
        bail!("no `{text}`: {}\n{}", ended.stderr, ended.tail(20));
    }
    Ok(guest)
}

pub(super) fn finish(bench: &Bench<'_>, guest: Guest) -> Result<Ended> {
    let ended = bench.finish(guest)?;
    let reasons = check_boot(&ended, TWO.cpus);
    ensure!(reasons.is_empty(), "{}", reasons.join("; "));
    Ok(ended)
}

fn during_litmus(
    bench: &Bench<'_>,
    back_end: &str,
    (shape, vcpus): (Shape, &[u32]),
    count: usize,
) -> Result<String> {
    let script = litmus_until_told();
    let mut guest = begin(bench, back_end, shape, (&script, " rounds "))?;
    let stop = wander(bench, shape, vcpus, count)?;
    guest.tell()?;
    let tests = judge_litmus(&finish(bench, guest)?)?;
    Ok(format!("{tests}, median stop {} µs", stop.as_micros()))
}

fn sleeps(bench: &Bench<'_>) -> Result<String> {
    sleeps_during(bench, TWO, || {
        let stop = wander(bench, TWO, &[0, 1], 200)?;
        Ok(format!("median stop {} µs", stop.as_micros()))
    })
}

/// A sleep whose timer is lost does not end: these vCPUs have no tick when idle.
pub(super) fn sleeps_during(
    bench: &Bench<'_>,
    shape: Shape,
    moves: impl FnOnce() -> Result<String>,
) -> Result<String> {
    const SCRIPT: &str = "for cpu in 1 2; do taskset $cpu sh -c 'echo asleep; \
        until [ -e /tmp/told ]; do usleep 500; done; echo woke up' & done; \
        read line; touch /tmp/told; wait";
    let mut guest = begin(bench, "soft", shape, (SCRIPT, "asleep"))?;
    let note = moves()?;
    guest.tell()?;
    let ended = finish(bench, guest)?;
    let woken = ended
        .lines
        .iter()
        .filter(|line| line.text.contains("woke up"));
    ensure!(woken.count() == 2, "{}", ended.tail(20));
    Ok(note)
}

fn right_sums(bench: &Bench<'_>) -> Result<String> {
    let alone = sums_alone(bench)?;
    let twice = format!("echo at work; {SUMS}; {SUMS}");
    let guest = begin(bench, "soft", TWO, (&twice, "at work"))?;
    let stop = wander(bench, TWO, &[0, 1], 60)?;
    let moved = sums(&finish(bench, guest)?);
    ensure!(
        moved[..] == [alone, alone].concat(),
        "{moved:?}, not twice {alone:?}"
    );
    Ok(format!("median stop {} µs", stop.as_micros()))
}

fn paused(bench: &Bench<'_>) -> Result<String> {
    let mut guest = begin(bench, "soft", TWO, (&litmus_until_told(), " rounds "))?;
    for round in 0..10_u32 {
        bench.ask(&["vm", "pause", "m"])?;
        let before = view(bench)?;
        let vcpu = round % 2;
        let to = 1 - locations(bench)?[vcpu as usize];
        move_vcpu(bench, vcpu, to)?;
        let after = view(bench)?;
        ensure!(after["state"] == "paused", "{after}");
        ensure!(
            after["vcpus"] == serde_json::json!(["paused", "paused"]),
            "{after}"
        );
        ensure!(after["guest_time_s"] == before["guest_time_s"], "{after}");
        bench.ask(&["vm", "resume", "m"])?;
    }
    guest.tell()?;
    judge_litmus(&finish(bench, guest)?)
}

fn refused(bench: &Bench<'_>) -> Result<String> {
    let guest = begin(bench, "soft", TWO, ("echo idle; sleep 3", "idle"))?;
    for (vcpu, to, words) in [
        ("2", "0", "vCPU 2 does not exist: there are 0 to 1"),
        ("0", "2", "node 2 does not exist: there are 0, 1"),
        ("1", "1", "vCPU 1 is on node 1 already"),
    ] {
        let output = bench
            .weft(&["vm", "move", "m", "--vcpu", vcpu, "--to", to])
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success() && said.contains(words), "{said}");
    }
    ensure!(locations(bench)? == [0, 1], "something moved");
    finish(bench, guest)?;
    Ok(String::new())
}

/// Nodes that are killed while vCPUs go to them and come from them.
fn killed(bench: &Bench<'_>) -> Result<String> {
    let (mut told, mut others) = (0, Vec::new());
    let mut random = Random::new(bench.context.seed ^ 0xdead);
    for round in 0..6 {
        let node = 1 + round % 2;
        let script = format!("echo {USER_SPACE}; echo at work; litmus -d 100");
        let guest = begin(bench, "soft", THREE, (&script, "at work"))?;
        let mut processes = bench.processes(&guest, THREE.nodes)?;
        processes.rotate_right(1);
        let victim = Pid::from_raw(processes[node].identity.pid);
        let after = Duration::from_millis(random.below(300));
        let killer = std::thread::spawn(move || {
            std::thread::sleep(after);
            kill(victim, Signal::SIGKILL)
        });
        let until = Instant::now() + BOUND;
        let mut to = if node == 1 { 0 } else { 2 };
        let error = loop {
            ensure!(Instant::now() < until, "it moves on");
            if let Err(error) = move_vcpu(bench, 1, to) {
                break format!("{error:#}");
            }
            to = if to == 0 { node as u64 } else { 0 };
        };
        killer.join().ok().context("the killer panicked")??;
        match error.contains(&format!("lost node {node} (")) {
            true => told += 1,
            false => others.push(error),
        }
        let pid = guest.pid();
        let ended = guest.finish(BOUND)?;
        ensure!(code(&ended)? == EXIT_FAILED, "{}", ended.stderr);
        let lost = format!("lost node {node} (");
        ensure!(
            ended.stderr.contains(&lost),
            "no `{lost}`: {}",
            ended.stderr
        );
        bench.nothing_left(pid)?;
    }
    // Otherwise the machine was gone before the command asked.
    Ok(format!(
        "{told} commands named the node; others: {others:?}"
    ))
}
