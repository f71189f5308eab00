//! The six programs of ElasticOS's table 1, with data of 1.25 times one node's
//! budget: jumps against pull-only, fixed thresholds against the default.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use weft_tests::cluster::{Cluster, Wanted};
use weft_tests::context::Context;
use weft_tests::namespace::{self, Pair};

use crate::program::{BOUND, Call, Measured, Place};
use crate::results::{Goal, Table, digits, median};

/// The thresholds that are tried.
const THRESHOLDS: [&str; 5] = ["8", "32", "128", "512", "4096"];
/// A policy that takes this many times as long as pull-only is given up.
const GIVE_UP_TIMES: f64 = 4.0;
/// And what the set-up may take beside.
const SET_UP_MAX: Duration = Duration::from_secs(5);

/// A program and how much data it gets. The random ones get less: pull-only,
/// each of their accesses is a round trip.
struct Program {
    name: &'static str,
    data_mib: u64,
    /// Goals for the default: times faster than pull-only, times less traffic.
    faster: f64,
    less_traffic: Option<f64>,
}

const NO_SLOWER: f64 = 1.0 / 1.05;
const PROGRAMS: [Program; 6] = [
    Program {
        name: "linear_search",
        data_mib: 320,
        faster: 10.0,
        less_traffic: Some(5.0),
    },
    Program {
        name: "depth_first_search",
        data_mib: 80,
        faster: NO_SLOWER,
        less_traffic: None,
    },
    Program {
        name: "dijkstra",
        data_mib: 160,
        faster: NO_SLOWER,
        less_traffic: None,
    },
    Program {
        name: "block_sort",
        data_mib: 40,
        faster: NO_SLOWER,
        less_traffic: None,
    },
    Program {
        name: "heap_sort",
        data_mib: 5,
        faster: NO_SLOWER,
        less_traffic: None,
    },
    Program {
        name: "count_sort",
        data_mib: 80,
        faster: NO_SLOWER,
        less_traffic: None,
    },
];

/// How the two nodes are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// Loopback TCP on one host.
    Unshaped,
    /// Two network namespaces, each direction shaped to 1 Gbit/s, sealed.
    Gigabit,
}

/// The samples of one policy.
#[derive(Debug, Default)]
struct Policy {
    name: String,
    seconds: Vec<f64>,
    /// Bytes of the measured phase.
    bytes: Vec<f64>,
    setup_bytes: f64,
    jumps: Vec<f64>,
    pulls: Vec<f64>,
    /// It took longer than anybody would wait.
    given_up: bool,
}

impl Policy {
    fn add(&mut self, run: &Measured) -> Result<()> {
        self.seconds.push(
            run.measured_s
                .context("the program says how long it took")?,
        );
        self.bytes
            .push((run.bytes() as f64 - self.setup_bytes).max(0.0));
        self.jumps
            .push(run.counters.total(|node| node.jumps_in) as f64);
        self.pulls
            .push(run.counters.total(|node| node.pulls + node.read_ahead) as f64);
        Ok(())
    }

    fn to_json(&self) -> Value {
        json!({
            "seconds": self.seconds,
            "measured_bytes": self.bytes,
            "setup_bytes": self.setup_bytes,
            "jumps": self.jumps,
            "pages_pulled": self.pulls,
            "given_up": self.given_up,
        })
    }
}

/// A place to run them in: the call, and what must live as long.
struct Setting {
    call: Call,
    _cluster: Option<Cluster>,
    _pair: Option<Pair>,
}

fn setting(network: Network, place: &Place) -> Result<Setting> {
    if network == Network::Unshaped {
        return Ok(Setting {
            call: Call::new("--nodes 2 --transport tcp"),
            _cluster: None,
            _pair: None,
        });
    }
    let pair = Pair::new()?;
    pair.shape("1gbit")?;
    let context = Context {
        weft: place.weft.clone(),
        programs: place.programs.clone(),
        sources: place.work.clone(),
        inputs: place.work.clone(),
        work: place.work.clone(),
        seed: 0,
    };
    let wanted = Wanted {
        host: Pair::ADDRESS_B.to_string(),
        port: 7117,
        memory: "2G".to_string(),
        prefix: pair.prefix('b'),
        runtime: None,
    };
    let cluster = Cluster::start(&context, &place.work.join("cluster"), &wanted)?;
    let mut call = Call::new(&format!("--on {}", cluster.address));
    call.prefix = pair.prefix('a');
    call.environment = vec![cluster.home.environment()];
    Ok(Setting {
        call,
        _cluster: Some(cluster),
        _pair: Some(pair),
    })
}

fn measure(place: &Place, base: &Call, program: &Program, repeat: usize) -> Result<Vec<Policy>> {
    let words = format!("{} {}", program.name, program.data_mib);
    let native = place.native(&words)?;
    // Budgets are in KiB: 1.25 is kept exactly for small data, too.
    let budget_kib = program.data_mib * 1024 * 4 / 5;
    let call = base.with(&format!("--memory {budget_kib}K"));
    let names = ["never"].into_iter().chain(THRESHOLDS).chain(["auto"]);
    let mut policies: Vec<Policy> = names
        .map(|name| Policy {
            name: name.to_string(),
            ..Policy::default()
        })
        .collect();
    for policy in &mut policies {
        let call = call.with(&format!("--jump {}", policy.name));
        policy.setup_bytes = place.weft(&call.setup_only(), &words)?.bytes() as f64;
    }
    let mut bound = BOUND;
    for _ in 0..repeat {
        for policy in policies.iter_mut().filter(|policy| !policy.given_up) {
            let call = call.with(&format!("--jump {}", policy.name));
            let Some(run) = place.weft_within(&call, &words, bound)? else {
                ensure!(
                    policy.name != "auto",
                    "{words}: the default takes {bound:?}"
                );
                eprintln!("  {words}, jump {}: more than {bound:?}", policy.name);
                policy.given_up = true;
                continue;
            };
            ensure!(
                run.stdout == native.stdout,
                "{words} under --jump {}: `{}`, natively `{}`",
                policy.name,
                run.stdout.trim(),
                native.stdout.trim()
            );
            policy.add(&run)?;
            if policy.name == "never" {
                let pull_only_s = policy.seconds.first().copied().unwrap_or_default();
                bound = SET_UP_MAX + Duration::from_secs_f64(GIVE_UP_TIMES * pull_only_s);
            }
            eprintln!(
                "  {words}, jump {}: {:.3} s, {:.1} MB, {} jumps",
                policy.name,
                policy.seconds.last().unwrap_or(&0.0),
                policy.bytes.last().unwrap_or(&0.0) / 1e6,
                policy.jumps.last().unwrap_or(&0.0)
            );
        }
    }
    Ok(policies)
}

fn row(program: &Program, policies: &[Policy]) -> Vec<String> {
    let seconds = |policy: &Policy| median(&policy.seconds);
    let named = |name: &str| policies.iter().find(|policy| policy.name == name);
    let never = named("never").and_then(seconds);
    let auto = named("auto").and_then(seconds);
    let best = policies
        .iter()
        .filter(|policy| THRESHOLDS.contains(&policy.name.as_str()))
        .filter_map(|policy| Some((policy, seconds(policy)?)))
        .min_by(|a, b| a.1.total_cmp(&b.1));
    let best_s = best.map(|(_, seconds)| seconds);
    let ratio = |a: Option<f64>, b: Option<f64>| Some(a? / b?);
    let bytes = |name: &str| median(&named(name)?.bytes).map(|bytes| bytes / 1e6);
    let faster = ratio(never, auto);
    // Less than a megabyte is noise: it may be nothing at all.
    let less = ratio(bytes("never"), bytes("auto").map(|mb| mb.max(0.001)));
    let against_best = ratio(auto, best_s);
    let shown_goal = |value: Option<f64>, bound: f64| {
        Goal::AtLeast((bound * 100.0).round() / 100.0).cells(value)
    };
    let [faster_goal, faster_met] = shown_goal(faster, program.faster);
    let [less_goal, less_met] = match program.less_traffic {
        Some(bound) => shown_goal(less, bound),
        None => ["—".to_string(), "—".to_string()],
    };
    let [best_goal, best_met] = Goal::AtMost(1.2).cells(against_best);
    vec![
        program.name.replace('_', " "),
        format!("{} MiB", program.data_mib),
        digits(never),
        best.map_or("—".to_string(), |(policy, s)| {
            format!("{} ({})", digits(Some(s)), policy.name)
        }),
        digits(auto),
        format!("{} ({faster_goal}: {faster_met})", digits(faster)),
        format!("{} ({best_goal}: {best_met})", digits(against_best)),
        digits(bytes("never")),
        digits(bytes("auto")),
        if less_goal == "—" {
            digits(less)
        } else {
            format!("{} ({less_goal}: {less_met})", digits(less))
        },
        digits(named("auto").and_then(|policy| median(&policy.jumps))),
    ]
}

/// All six over one network. `Err` for a network that cannot be made here.
pub fn elastic(place: &Place, network: Network, repeat: usize, only: &[String]) -> Result<Table> {
    let (name, about) = match network {
        Network::Unshaped => ("elastic-unshaped", "over loopback TCP"),
        Network::Gigabit => (
            "elastic-gigabit",
            "over two network namespaces whose cable is shaped to 1 Gbit/s by `tc tbf`, sealed",
        ),
    };
    if network == Network::Gigabit
        && let Some(why) = namespace::missing()
    {
        anyhow::bail!("{why}");
    }
    let mut table = Table::new(
        name,
        &format!(
            "The six programs {about}; data 1.25 times one node's budget, two nodes. Seconds and \
             megabytes are those of the measured phase; policies in alternation, medians of {repeat}."
        ),
        &[
            "program",
            "data",
            "pull-only, s",
            "best fixed, s (threshold)",
            "default, s",
            "pull-only / default",
            "default / best",
            "pull-only, MB",
            "default, MB",
            "less traffic",
            "jumps",
        ],
    );
    let setting = setting(network, place)?;
    let mut all = serde_json::Map::new();
    for program in &PROGRAMS {
        if !only.is_empty() && !only.iter().any(|part| program.name.contains(part.as_str())) {
            continue;
        }
        let policies = measure(place, &setting.call, program, repeat)?;
        table.rows.push(row(program, &policies));
        let samples = policies
            .iter()
            .map(|policy| (policy.name.clone(), policy.to_json()))
            .collect();
        all.insert(program.name.to_string(), Value::Object(samples));
    }
    table.samples = Value::Object(all);
    Ok(table)
}
