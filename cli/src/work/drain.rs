//! `weft node cordon`, `drain`, `evacuate` and `uncordon`, and `weft cluster hands-off` and `policy`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use weft_cluster::{
    Cluster, ClusterState, Cordon, Leaving, MoveWish, POLICY_DEFAULT, Placed, Plan, Planner,
};
use weft_node::member::Membership;
use weft_node::said::plain;

/// How often a drain is looked at.
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

/// Has everything leave a host, and waits until nothing is there, for `patience` at most.
pub fn drain(host: Option<String>, patience: Option<Duration>) -> anyhow::Result<ExitCode> {
    let (cluster, host) = host_or_own(host)?;
    let cordon = Cordon {
        cordoned: true,
        draining: true,
    };
    cluster.cordon(&host, cordon)?;
    eprintln!(
        "weft: {host} is drained, also if you end this command: `weft node uncordon {host}` \
         calls it off"
    );
    until_left(&cluster, &host, patience)
}

/// Has everything leave a host that is expected to fail, and waits as [`drain`] does.
pub fn evacuate(
    host: Option<String>,
    why: &str,
    patience: Option<Duration>,
) -> anyhow::Result<ExitCode> {
    let (cluster, host) = host_or_own(host)?;
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
    until_left(&cluster, &host, patience)
}

/// Says what leaves a host, and waits until nothing of the cluster is there.
fn until_left(
    cluster: &Cluster,
    host: &str,
    patience: Option<Duration>,
) -> anyhow::Result<ExitCode> {
    forecast(&Leaving::of(&cluster.work()?, host), patience);
    let begun = Instant::now();
    let mut told = Vec::new();
    loop {
        let (left, said) = left_on(cluster, host)?;
        if left.is_empty() {
            eprintln!("weft: nothing of the cluster is on {host} any more");
            return Ok(ExitCode::SUCCESS);
        }
        if said != told {
            for line in &said {
                eprintln!("weft: {}", plain(line));
            }
            told = said;
        }
        if patience.is_some_and(|patience| begun.elapsed() >= patience) {
            eprintln!(
                "weft: still on {host} after {} s: {}",
                begun.elapsed().as_secs(),
                left.join(", ")
            );
            return Ok(ExitCode::FAILURE);
        }
        std::thread::sleep(patience.map_or(TURN, |patience| {
            TURN.min(patience.saturating_sub(begun.elapsed()))
        }));
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
        let takes = leaving.takes.as_secs_f64();
        let late = match patience {
            Some(patience) if patience < leaving.takes => {
                ", longer than this command waits: it goes on in the cluster"
            }
            _ => "",
        };
        eprintln!(
            "weft: leaves within about {takes:.1} s if there is room{late}: {}",
            leaving.moves.join(", ")
        );
    }
}

/// The names of the aggregates with a part on a host, and the state of their moves.
fn left_on(cluster: &Cluster, host: &str) -> anyhow::Result<(Vec<String>, Vec<String>)> {
    let state = ClusterState {
        hands_off: false,
        ..cluster.state()?
    };
    let work = &state.work;
    let here = |placed: &&Placed| placed.parts.iter().any(|part| part.host == host);
    let left: Vec<&Placed> = work.placed.values().filter(here).collect();
    let names = left.iter().map(|placed| placed.request.name.clone());
    let moves = left.iter().filter_map(|placed| placed.move_state());
    let mut said: Vec<String> = moves.collect();
    for plan in Planner::default().update(Duration::ZERO, &state) {
        if let Plan::Stuck { host: at, why } = plan
            && at == host
        {
            said.push(why);
        }
    }
    Ok((names.collect(), said))
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
