//! `weft node cordon`, `drain`, `evacuate` and `uncordon`, and `weft cluster hands-off` and `policy`.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::Serialize;
use weft_cluster::{
    Cluster, ClusterState, Cordon, Departure, Leaving, MoveRecord, MoveWish, POLICY_DEFAULT,
    Placed, Plan, Planner, Work,
};
use weft_node::member::Membership;
use weft_node::said::plain;

/// How often a drain is looked at if nothing changes.
const TURN: Duration = Duration::from_secs(2);

/// The host, or this one.
fn host_or_own(host: Option<String>) -> anyhow::Result<(Cluster, String)> {
    let (membership, cluster) = Membership::joined()?;
    Ok((cluster, host.unwrap_or(membership.host)))
}

/// Keeps new work away from a host.
pub fn cordon(host: Option<String>) -> anyhow::Result<ExitCode> {
    let (cluster, host) = host_or_own(host)?;
    let cordon = Cordon {
        cordoned: true,
        draining: false,
    };
    cluster.cordon(&host, cordon)?;
    eprintln!("weft: nothing new comes to {host}: `weft node uncordon {host}` ends that");
    Ok(ExitCode::SUCCESS)
}

/// Lets new work come again.
pub fn uncordon(host: Option<String>) -> anyhow::Result<ExitCode> {
    let (cluster, host) = host_or_own(host)?;
    cluster.cordon(&host, Cordon::default())?;
    let members = cluster.members()?;
    let member = members.iter().find(|member| member.record.name == host);
    match member.and_then(|member| member.trouble()) {
        None => eprintln!("weft: {host} takes new work again, and nothing has to leave it"),
        Some(why) => eprintln!(
            "weft: {host} takes nothing new: its kernel counts errors ({}); after a repair start \
             its daemon again",
            plain(why)
        ),
    }
    Ok(ExitCode::SUCCESS)
}

/// How a drain is waited for.
#[derive(Clone, Copy)]
pub struct Waiting {
    /// For so long at most.
    pub patience: Option<Duration>,
    /// Standard output gets a line for each [`Progress`].
    pub json: bool,
}

/// How far a drain has come.
#[derive(Serialize)]
struct Progress {
    host: String,
    /// Parts that have left, or ended.
    left: usize,
    of: usize,
    /// How long the rest takes by what is known now.
    about_s: f64,
    /// What can leave and has not.
    leaves: Vec<String>,
    /// What stays until it ends.
    stays: Vec<String>,
}

/// Has everything leave a host, and waits until nothing is there.
pub fn drain(host: Option<String>, waiting: Waiting) -> anyhow::Result<ExitCode> {
    let (cluster, host) = host_or_own(host)?;
    let cordon = Cordon {
        cordoned: true,
        draining: true,
    };
    let before = Before::of(&cluster)?;
    cluster.cordon(&host, cordon)?;
    eprintln!(
        "weft: {host} is drained, also if you end this command: `weft node uncordon {host}` \
         calls it off"
    );
    until_left(&cluster, &host, before, waiting)
}

/// Has everything leave a host that is expected to fail, and waits as [`drain`] does.
pub fn evacuate(host: Option<String>, why: &str, waiting: Waiting) -> anyhow::Result<ExitCode> {
    let (cluster, host) = host_or_own(host)?;
    let before = Before::of(&cluster)?;
    cluster.evacuate(&host, why)?;
    if cluster.hands_off()? {
        eprintln!(
            "weft: the cluster moves nothing by itself now: nothing new comes to {host}, and \
             nothing leaves it before `weft cluster hands-off off`, or `weft node drain {host}`"
        );
        return Ok(ExitCode::FAILURE);
    }
    eprintln!(
        "weft: {host} is left, also if you end this command: `weft node uncordon {host}` calls \
         it off"
    );
    until_left(&cluster, &host, before, waiting)
}

/// What a forecast is made from. It is read before anything begins to move: what is said at once
/// does not wait for processors that then have work.
struct Before {
    work: Work,
    costs: Option<MoveRecord>,
}

impl Before {
    fn of(cluster: &Cluster) -> anyhow::Result<Before> {
        Ok(Before {
            costs: cluster.move_costs()?,
            work: cluster.work()?,
        })
    }
}

/// Says what leaves a host, and waits until nothing of the cluster is there.
fn until_left(
    cluster: &Cluster,
    host: &str,
    before: Before,
    waiting: Waiting,
) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    let left_of = |patience: Duration| patience.saturating_sub(begun.elapsed());
    let Before { mut work, costs } = before;
    let mut departure = Departure::begin(&work, costs.as_ref(), host);
    forecast(&Leaving::of(&work, costs.as_ref(), host), waiting.patience);
    let (mut is_news, mut looked) = (true, begun);
    let mut told = BTreeSet::new();
    loop {
        let gone = departure.update(&work, begun.elapsed());
        let leaving = Leaving::of(&work, costs.as_ref(), host);
        if !gone.is_empty() {
            let patience = waiting.patience.map(left_of);
            say_progress(&departure, &gone, patience, begun.elapsed());
        }
        if is_news || !gone.is_empty() {
            report(waiting, host, &departure, &leaving, begun.elapsed());
        }
        if leaving.moves.is_empty() && leaving.stays.is_empty() {
            eprintln!("weft: nothing of the cluster is on {host} any more");
            return Ok(ExitCode::SUCCESS);
        }
        say_new(&mut told, moves(&work, host));
        let wait = waiting
            .patience
            .map_or(TURN, |patience| left_of(patience).min(TURN));
        if wait.is_zero() {
            eprintln!(
                "weft: still on {host} after {} s: {}",
                begun.elapsed().as_secs(),
                [leaving.moves, leaving.stays].concat().join(", ")
            );
            return Ok(ExitCode::FAILURE);
        }
        is_news = false;
        cluster.wait_for_work(work.revision, wait)?;
        // That takes the whole state, and what leaves at once need not be known to be stuck.
        if looked.elapsed() >= TURN {
            looked = Instant::now();
            say_new(&mut told, stuck(cluster, host)?);
        }
        work = cluster.work()?;
    }
}

/// Says each line once.
fn say_new(told: &mut BTreeSet<String>, lines: Vec<String>) {
    for line in lines {
        if !told.contains(&line) {
            eprintln!("weft: {}", plain(&line));
            told.insert(line);
        }
    }
}

/// Says at once what will be left, and what takes longer than the caller waits.
fn forecast(leaving: &Leaving, patience: Option<Duration>) {
    if !leaving.stays.is_empty() {
        eprintln!(
            "weft: cannot leave, and stays until it ends: {}",
            leaving.stays.join(", ")
        );
    }
    if !leaving.moves.is_empty() {
        eprintln!(
            "weft: leaves within about {:.1} s if there is room{}: {}",
            leaving.takes.as_secs_f64(),
            late(leaving.takes, patience),
            leaving.moves.join(", ")
        );
    }
}

/// What is said of a drain that takes longer than the caller waits.
fn late(takes: Duration, patience: Option<Duration>) -> &'static str {
    match patience {
        Some(patience) if patience < takes => {
            ", longer than this command waits: it goes on in the cluster"
        }
        _ => "",
    }
}

/// Says what has left, and how long the rest takes.
fn say_progress(departure: &Departure, gone: &[String], patience: Option<Duration>, now: Duration) {
    let (left, of) = departure.progress();
    let gone = gone.join(", ");
    let takes = departure.remaining(now);
    if left == of {
        eprintln!("weft: {gone} has left ({left} of {of})");
        return;
    }
    eprintln!(
        "weft: {gone} has left ({left} of {of}), about {:.1} s more{}",
        takes.as_secs_f64(),
        late(takes, patience)
    );
}

fn report(waiting: Waiting, host: &str, departure: &Departure, leaving: &Leaving, now: Duration) {
    if !waiting.json {
        return;
    }
    let (left, of) = departure.progress();
    let progress = Progress {
        host: host.to_owned(),
        left,
        of,
        about_s: departure.remaining(now).as_secs_f64(),
        leaves: leaving.moves.clone(),
        stays: leaving.stays.clone(),
    };
    // Plain data, and a reader that has gone reads nothing.
    if let Ok(line) = serde_json::to_string(&progress) {
        let _ = writeln!(std::io::stdout(), "{line}");
    }
}

/// The state of the moves of what has a part on a host.
fn moves(work: &Work, host: &str) -> Vec<String> {
    let placed = work.placed.values();
    let here = placed.filter(|placed| placed.parts.iter().any(|part| part.host == host));
    here.filter_map(Placed::move_state).collect()
}

/// Why some of what is on a host does not leave it.
fn stuck(cluster: &Cluster, host: &str) -> anyhow::Result<Vec<String>> {
    // What leaves a drained host leaves it with hands off, too.
    let state = ClusterState {
        hands_off: false,
        ..cluster.state()?
    };
    let plans = Planner::default().update(Duration::ZERO, &state);
    let here = plans.into_iter().filter_map(|plan| match plan {
        Plan::Stuck { host: at, why } if at == host => Some(why),
        _ => None,
    });
    Ok(here.collect())
}

/// Calls the open move of a machine off, and waits until it is over.
pub fn call_off(name: &str) -> anyhow::Result<ExitCode> {
    let (_, cluster) = Membership::joined()?;
    cluster.call_off(name)?;
    loop {
        let work = cluster.work()?;
        let Some(placed) = work.placed.get(name) else {
            anyhow::bail!("{name} has ended");
        };
        match (&placed.order, &placed.failure) {
            (None, Some(failure)) => {
                eprintln!("weft: {name} has not moved: {}", plain(failure));
                return Ok(ExitCode::SUCCESS);
            }
            (None, None) => anyhow::bail!("it was too late: {name} has moved"),
            (Some(_), _) => cluster.wait_for_work(work.revision, TURN)?,
        };
    }
}

/// Asks the leader to move a part, and waits until it has moved, or does not.
pub fn move_part(name: &str, wish: MoveWish) -> anyhow::Result<ExitCode> {
    let (_, cluster) = Membership::joined()?;
    cluster.wish(name, &wish)?;
    let mut told = String::new();
    loop {
        let work = cluster.work()?;
        let Some(placed) = work.placed.get(name) else {
            anyhow::bail!("{name} has ended");
        };
        if let Some(order) = &placed.order {
            if told != order.why {
                told.clone_from(&order.why);
                eprintln!("weft: {}", plain(&told));
            }
        } else if let Some(failure) = &placed.failure {
            anyhow::bail!("{name} does not move: {}", plain(failure));
        } else if placed.wish.is_none() {
            eprintln!("weft: {name} has moved");
            return Ok(ExitCode::SUCCESS);
        } else if cluster.leader()?.is_none() {
            anyhow::bail!(
                "no host decides in this cluster now: {name} moves when one does; `weft node \
                 start` starts a daemon"
            );
        }
        cluster.wait_for_work(work.revision, TURN)?;
    }
}

/// Whether the cluster moves nothing by itself.
pub fn hands_off(hands_off: bool) -> anyhow::Result<()> {
    let (_, cluster) = Membership::joined()?;
    cluster.set_hands_off(hands_off)?;
    match hands_off {
        true => {
            eprintln!("weft: the cluster moves nothing by itself; a drained host is still left")
        }
        false => eprintln!("weft: the cluster pulls machines together by itself again"),
    }
    Ok(())
}

/// Shows the policy by which hosts are chosen, or chooses one.
pub fn policy(name: Option<&str>) -> anyhow::Result<()> {
    let (_, cluster) = Membership::joined()?;
    match name {
        None => {
            let chosen = cluster.policy()?;
            println!("{}", chosen.as_deref().unwrap_or(POLICY_DEFAULT));
        }
        Some(name) => {
            cluster.set_policy(name)?;
            eprintln!("weft: hosts are chosen by {name} from now on");
        }
    }
    Ok(())
}
