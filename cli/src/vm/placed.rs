//! The nodes of a machine as a cluster places them.

use std::process::ExitCode;

use weft_cluster::{WorkKind, WorkPart};
use weft_machine::MEMORY_STEP;

use super::args::{BackEndArg, VmRunArgs};
use super::error::VmError;
use super::plan::{NAME_MAX, Plan};
use super::suboptions::ListArg;
use crate::work::{self, Found};

/// What options that were judged ask for.
pub enum Checked {
    /// The machine, on the hosts that were found.
    Runs(Box<Plan>),
    /// Nothing more: with `--dry-run` all that was asked for has been shown, with `--anywhere` the
    /// command has run on another host.
    Shown(ExitCode),
}

/// Judges the options. With `--cluster` they say afterwards which hosts the cluster found: this
/// waits until it has.
pub fn check(args: &mut VmRunArgs) -> anyhow::Result<Checked> {
    // What is wrong with the options is known before anybody waits.
    let plan = Plan::check(args)?;
    if !args.place.cluster {
        return Ok(Checked::Runs(Box::new(plan)));
    }
    if args.cpus.values.len() > 1 || args.memory.values.len() > 1 {
        return Err(VmError::Option(format!(
            "--cpus {} --memory {}: with --cluster give the total of each, the cluster divides it",
            args.cpus.text, args.memory.text
        ))
        .into());
    }
    let cpus = plan.nodes.cpus;
    let memory = plan.nodes.memory_bytes.next_multiple_of(MEMORY_STEP);
    // By this name its agent finds it.
    let name = args
        .name
        .get_or_insert_with(|| work::name_for("vm", NAME_MAX))
        .clone();
    let mut request = work::request(name.clone(), WorkKind::Machine, cpus, memory, &args.place)?;
    if args.deterministic || args.backend == BackEndArg::Kvm {
        // It stays on one node.
        request.hosts_max = 1;
    }
    if args.place.dry_run {
        return Ok(Checked::Shown(work::show_trial(&request)?));
    }
    // On its home it has the name that it was placed by.
    args.name = Some(request.name.clone());
    let machine = Some(request.name.clone());
    let parts = match work::place(request, &args.place, machine)? {
        Found::Here(parts) => parts,
        Found::Elsewhere(elsewhere) => return Ok(Checked::Shown(elsewhere.run(0)?)),
    };
    // From here on as if the command line had named them.
    args.place.cluster = false;
    put_on(args, &parts, memory);
    Ok(Checked::Runs(Box::new(Plan::check(args)?)))
}

/// The options that put a machine there. Nodes have whole steps of memory; home has what
/// remains.
fn put_on(args: &mut VmRunArgs, parts: &[WorkPart], memory_bytes: u64) {
    if parts.len() < 2 {
        return;
    }
    args.on = parts[1..].iter().map(|part| part.host.clone()).collect();
    let whole_steps = |part: &WorkPart| (part.memory_mib << 20) / MEMORY_STEP * MEMORY_STEP;
    let others: Vec<u64> = parts[1..].iter().map(whole_steps).collect();
    let home = memory_bytes - others.iter().sum::<u64>();
    let memory: Vec<u64> = [home].into_iter().chain(others).collect();
    let mib: Vec<u64> = memory.iter().map(|bytes| bytes >> 20).collect();
    args.memory = list(memory, &mib, "M");
    let cpus: Vec<u32> = parts.iter().map(|part| part.cores).collect();
    args.cpus = list(cpus.clone(), &cpus, "");
}

fn list<T, S: ToString>(values: Vec<T>, shown: &[S], unit: &str) -> ListArg<T> {
    let words = shown.iter().map(|value| value.to_string() + unit);
    let text = words.collect::<Vec<_>>().join(",");
    ListArg { text, values }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};
    use crate::vm::VmCommand;
    use crate::work::part;

    fn args(line: &str) -> Result<Box<VmRunArgs>, clap::Error> {
        let words = ["weft", "vm", "run", "--kernel", "k"];
        let words = words.into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(words)?.command {
            Command::Vm {
                command: VmCommand::Run(args),
            } => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn parts_become_nodes_of_whole_steps() {
        let mut args = args("--cluster --cpus 4 --memory 1000M").unwrap();
        let parts = [part("a", 2, 500), part("b", 1, 251), part("c", 1, 249)];
        put_on(&mut args, &parts, 1000 << 20);
        assert_eq!(args.on, ["b", "c"]);
        assert_eq!(
            (&args.cpus.text[..], &args.cpus.values[..]),
            ("2,1,1", &[2, 1, 1][..])
        );
        assert_eq!(args.memory.text, "502M,250M,248M");
        assert_eq!(args.memory.values.iter().sum::<u64>(), 1000 << 20);
    }

    #[test]
    fn the_cluster_finds_hosts_or_the_command_line_names_them() {
        for wrong in [
            "--cluster --on b",
            "--cluster --nodes 2",
            "--wait 1",
            "--dry-run",
            "--cluster --priority 10",
            "--cluster --hosts-max 17",
        ] {
            assert!(args(wrong).is_err(), "{wrong}");
        }
        assert!(args("--cluster --wait 0 --priority 9 --hosts-max 1").is_ok());
        // Before hosts are found, the machine may be larger than this one.
        let large = args("--cluster --memory 900000G --spare 64M").unwrap();
        let checked = Plan::check(&large).map(|plan| plan.nodes.memory_bytes);
        assert!(checked.is_ok(), "{checked:?}");
        let mut placed = large;
        placed.place.cluster = false;
        assert!(Plan::check(&placed).is_err());
    }
}
