//! Carries out the orders of a cluster to move a machine: parts by `weft vm migrate`, single vCPUs
//! by the machine's API.

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use weft_api::ChangeView;
use weft_api::client::Client;
use weft_cluster::{MoveOrder, WorkPart};
use weft_machine::MEMORY_STEP;
use weft_machine::migration::Migrated;
use weft_node::rundir::RunDirError;

use crate::machines;

/// A migration that takes longer is put back.
const BOUND: Duration = Duration::from_secs(600);
/// How long a migration may take to put everything back, or to end after its last step.
const GRACE: Duration = Duration::from_secs(120);
/// How long a machine may take to say where its vCPUs are.
const VIEW_BOUND: Duration = Duration::from_secs(10);
/// How often a migration that runs is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Where a machine is.
pub struct Spread {
    /// As `weft vm list` shows it.
    pub machine: String,
    /// By the numbers of their nodes.
    pub hosts: BTreeMap<usize, String>,
}

impl Spread {
    /// The machine's API, with the bounds of its client.
    pub fn client(&self) -> Result<Client, RunDirError> {
        Ok(Client::new(&machines::api_path(
            &machines::directory()?,
            &self.machine,
        )))
    }
}

/// One machine, and where its nodes are.
pub struct Mover {
    /// As `weft vm list` shows it.
    machine: String,
    nodes: BTreeMap<String, usize>,
}

impl Mover {
    /// Of a machine that has just started: its nodes have the numbers of its parts.
    pub fn new(machine: String, parts: &[WorkPart]) -> Mover {
        let hosts = parts.iter().map(|part| part.host.clone());
        Mover {
            machine,
            nodes: hosts.zip(0..).collect(),
        }
    }

    pub fn spread(&self) -> Spread {
        let nodes = self.nodes.iter();
        Spread {
            machine: self.machine.clone(),
            hosts: nodes.map(|(host, node)| (*node, host.clone())).collect(),
        }
    }

    /// Moves one whole part to another host, or some vCPUs of one, as the order says. `meanwhile`
    /// is called again and again. No vCPU stood longer than the answer says. The error is a phrase.
    pub fn carry_out(
        &mut self,
        before: &[WorkPart],
        order: &MoveOrder,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Duration, String> {
        if let Some((from, to, count)) = single_cores(before, &order.parts) {
            return self.move_vcpus(from, to, count);
        }
        let (from, to) = whole_part(before, &order.parts)?;
        self.move_part(from, to, order, meanwhile)
    }

    /// Moves `count` vCPUs; all or none.
    fn move_vcpus(&self, from: &str, to: &str, count: u32) -> Result<Duration, String> {
        let node = |host: &str| {
            let node = self.nodes.get(host).copied();
            node.ok_or_else(|| not_there(host))
        };
        let (source, destination) = (node(from)?, node(to)?);
        let client = self.spread().client().map_err(|error| error.to_string())?;
        let view = client.view(VIEW_BOUND).map_err(|error| error.to_string())?;
        let locations = (0..).zip(&view.locations);
        let there = locations.filter(|(_, location)| location.node == source);
        // The first vCPU has the most of what a kernel does by itself.
        let chosen: Vec<u32> = there.map(|(vcpu, _)| vcpu).collect();
        let chosen = chosen.into_iter().rev().take(count as usize);
        let (mut moved, mut longest_ns) = (Vec::new(), 0);
        for vcpu in chosen {
            match client.move_vcpu(vcpu, destination) {
                Ok(report) => longest_ns = report.stopped_ns.max(longest_ns),
                Err(error) => {
                    for vcpu in moved {
                        // What cannot go back stays: the machine runs there, too.
                        let _ = client.move_vcpu(vcpu, source);
                    }
                    return Err(error.to_string());
                }
            }
            moved.push(vcpu);
        }
        match moved.len() == count as usize {
            true => Ok(Duration::from_nanos(longest_ns)),
            false => Err(format!("its node on {from} has {} vCPUs", moved.len())),
        }
    }

    fn move_part(
        &mut self,
        from: &WorkPart,
        to: &WorkPart,
        order: &MoveOrder,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Duration, String> {
        let source = *self
            .nodes
            .get(&from.host)
            .ok_or_else(|| not_there(&from.host))?;
        let merges = self.nodes.get(&to.host).is_some_and(|node| *node > 0);
        let report = match self.migrate(&order.parts, to, !merges, meanwhile) {
            // What a host lends to a node does not grow, and both parts may need more.
            Err(why) if merges => self
                .migrate(&order.parts, to, true, meanwhile)
                .map_err(|second| format!("{why}; to a new node there: {second}"))?,
            outcome => outcome?,
        };
        let report: ChangeView = serde_json::from_str(&report)
            .map_err(|error| format!("the migration's report cannot be read: {error}"))?;
        let Some(Migrated {
            nodes,
            stays,
            pause_ns,
            ..
        }) = report.migrated
        else {
            return Err("the migration's report has no destinations".into());
        };
        let node = nodes.first().ok_or("the migration has no destination")?;
        self.nodes.insert(to.host.clone(), *node);
        if let Some(stay) = stays.iter().find(|stay| stay.node == source) {
            return Err(format!("its node stays on {}: {}", from.host, stay.reason));
        }
        self.nodes.remove(&from.host);
        // They went to the destination with the vCPUs, away from the devices. Where one of them
        // stays is a matter of speed only.
        for role in ["--platform", "--time"] {
            let _ = self.weft(&["move", &self.machine, role, "--to", "0"], meanwhile);
        }
        Ok(Duration::from_nanos(pause_ns))
    }

    fn migrate(
        &self,
        after: &[WorkPart],
        to: &WorkPart,
        joins: bool,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<String, String> {
        let destinations = self.destinations(after, to, joins)?;
        let machine = &self.machine;
        let words = ["migrate", machine, &destinations, "--by-hand", "--json"];
        self.weft(&words, meanwhile)
    }

    /// The destination first, then the nodes that the machine keeps. `joins`: the destination
    /// gets a new node, in place of the one that it may have.
    fn destinations(
        &self,
        after: &[WorkPart],
        to: &WorkPart,
        joins: bool,
    ) -> Result<String, String> {
        let first = match self.nodes.get(&to.host) {
            Some(node) if !joins || *node == 0 => {
                format!("{node}={}M", whole_steps(to.memory_mib))
            }
            // A node that joins needs room for pages of others besides.
            _ => format!("{}={}M", to.host, whole_steps(with_spare(to.memory_mib))),
        };
        let mut all = vec![first];
        for part in after.iter().filter(|part| part.host != to.host) {
            let node = self
                .nodes
                .get(&part.host)
                .ok_or_else(|| not_there(&part.host))?;
            all.push(format!("{node}={}M", whole_steps(part.memory_mib)));
        }
        Ok(all.join(","))
    }

    fn weft(&self, words: &[&str], meanwhile: &mut dyn FnMut()) -> Result<String, String> {
        let bound = BOUND.as_secs().to_string();
        let mut command = Command::new("/proc/self/exe");
        command.arg("vm").args(words);
        if words[0] == "migrate" {
            command.args(["--timeout", &bound]);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start `weft vm {}`: {error}", words[0]))?;
        finish(child, meanwhile)
    }
}

/// Waits for a command that prints less than a pipe holds.
fn finish(mut child: Child, meanwhile: &mut dyn FnMut()) -> Result<String, String> {
    let begun = Instant::now();
    while child
        .try_wait()
        .map_err(|error| error.to_string())?
        .is_none()
    {
        if begun.elapsed() > BOUND + GRACE {
            let _ = child.kill();
        }
        std::thread::sleep(LOOK);
        meanwhile();
    }
    let output = child
        .wait_with_output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or("it said nothing");
    Err(last.trim_start_matches("weft: ").to_owned())
}

fn not_there(host: &str) -> String {
    format!("the machine has no node on {host}")
}

/// The cores that go from one part to another, if both stay.
fn single_cores<'a>(
    before: &'a [WorkPart],
    after: &'a [WorkPart],
) -> Option<(&'a str, &'a str, u32)> {
    let was = |host: &str| before.iter().find(|part| part.host == host);
    let is_same = before.len() == after.len() && after.iter().all(|p| was(&p.host).is_some());
    let changes = after.iter().filter_map(|part| {
        let change = i64::from(part.cores) - i64::from(was(&part.host)?.cores);
        (change != 0).then_some((&part.host[..], change))
    });
    match changes.collect::<Vec<_>>()[..] {
        [(one, gets), (other, gives)] if is_same && gets == -gives => {
            let (from, to) = if gets > 0 { (other, one) } else { (one, other) };
            Some((from, to, gets.unsigned_abs() as u32))
        }
        _ => None,
    }
}

/// The part that leaves, and what is then on the host that it goes to.
fn whole_part<'a>(
    before: &'a [WorkPart],
    after: &'a [WorkPart],
) -> Result<(&'a WorkPart, &'a WorkPart), String> {
    let of = |parts: &'a [WorkPart], host: &str| parts.iter().find(|part| part.host == host);
    let leaves: Vec<&WorkPart> = before
        .iter()
        .filter(|part| of(after, &part.host).is_none())
        .collect();
    let grows: Vec<&WorkPart> = after
        .iter()
        .filter(|part| of(before, &part.host) != Some(part))
        .collect();
    match (&leaves[..], &grows[..]) {
        ([from], [to]) => Ok((from, to)),
        _ => Err("only a whole part can move, and to one host".into()),
    }
}

/// Memory of nodes is given in steps.
fn whole_steps(mib: u64) -> u64 {
    mib.next_multiple_of(MEMORY_STEP >> 20)
}

fn with_spare(mib: u64) -> u64 {
    mib + (mib / 4).max(64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::part;

    #[test]
    fn an_order_becomes_destinations() {
        let before = [part("a", 2, 512), part("b", 1, 255), part("c", 1, 256)];
        let mover = Mover::new("web".into(), &before);
        let joined = [part("a", 2, 512), part("c", 1, 256), part("d", 1, 255)];
        let (from, to) = whole_part(&before, &joined).unwrap();
        assert_eq!((&from.host[..], &to.host[..]), ("b", "d"));
        let destinations = mover.destinations(&joined, to, true);
        assert_eq!(destinations.unwrap(), "d=320M,0=512M,2=256M");
        let merged = [part("a", 2, 512), part("b", 2, 511)];
        let (from, to) = whole_part(&before, &merged).unwrap();
        assert_eq!((&from.host[..], &to.host[..]), ("c", "b"));
        let destinations = |joins| mover.destinations(&merged, to, joins).unwrap();
        assert_eq!(destinations(false), "1=512M,0=512M");
        assert_eq!(destinations(true), "b=638M,0=512M");
        let split = [part("a", 3, 600), part("c", 1, 423)];
        assert!(whole_part(&before, &split).is_err());
        assert_eq!(single_cores(&before, &split), None);
    }

    #[test]
    fn cores_go_alone_between_parts_that_stay() {
        let before = [part("a", 2, 512), part("b", 2, 255), part("c", 0, 256)];
        let home = [part("a", 3, 512), part("b", 1, 255), part("c", 0, 256)];
        assert_eq!(single_cores(&before, &home), Some(("b", "a", 1)));
        let back = [part("a", 0, 512), part("b", 2, 255), part("c", 2, 256)];
        assert_eq!(single_cores(&before, &back), Some(("a", "c", 2)));
        let three = [part("a", 1, 512), part("b", 1, 255), part("c", 2, 256)];
        assert_eq!(single_cores(&before, &three), None);
        assert_eq!(single_cores(&before, &before), None);
        assert_eq!(single_cores(&before, &before[..2]), None);
    }
}
