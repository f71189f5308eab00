//! `weft vm run --restore`: what of the options is as saved, and what is refused.

use std::path::{Path, PathBuf};

use weft_checkpoint::Set;
use weft_machine::{BackEndChoice, Configuration, Network, SavedMachine, features_missing};

use super::args::{BackEndArg, VmRunArgs};
use super::error::VmError;
use super::nodes::Nodes;

/// A checkpoint that was checked.
pub struct Restored {
    directory: PathBuf,
    set: Set,
    saved: Configuration,
}

fn refused(sentence: String) -> VmError {
    VmError::Option(sentence)
}

impl Restored {
    /// Reports what is missing or damaged before anything starts; with `reads_all` also in the
    /// bytes of pages, which are otherwise checked when they are needed.
    pub fn open(directory: &Path, reads_all: bool) -> Result<Restored, VmError> {
        let directory =
            std::path::absolute(directory).map_err(VmError::system("find --restore"))?;
        let set = Set::open(&directory)?;
        match reads_all {
            true => set.verify()?,
            false => set.check_tables()?,
        }
        let machine = &set.manifest().machine;
        let missing = features_missing(&machine.features);
        if !missing.is_empty() {
            return Err(refused(format!(
                "--restore {}: its guest uses {}, which this host's CPU lacks",
                directory.display(),
                missing.join(", ")
            )));
        }
        let saved: SavedMachine = serde_json::from_slice(&set.state()?).map_err(|error| {
            refused(format!(
                "--restore {}: the machine was saved by Weft {}, whose form differs: {error}",
                directory.display(),
                set.manifest().weft
            ))
        })?;
        Ok(Restored {
            directory,
            saved: saved.configuration,
            set,
        })
    }

    /// Refuses disks that were written after the machine was saved: its guest knows what they
    /// contained, and would damage them.
    pub fn check_disks(&self) -> Result<(), VmError> {
        for disk in &self.set.manifest().machine.disks {
            let change = disk.change().map_err(|error| {
                refused(format!(
                    "--restore {}: cannot examine disk {}: {error}",
                    self.directory.display(),
                    disk.path.display()
                ))
            })?;
            if let Some(change) = change {
                return Err(refused(format!(
                    "--restore {}: disk {} is not as it was when the machine was saved: {change}; \
                     put back the disk of that time, or use --changed-disks if its contents are \
                     the same",
                    self.directory.display(),
                    disk.path.display()
                )));
            }
        }
        Ok(())
    }

    /// Refuses files on hosts where the machine has no node that could read them.
    fn check_hosts(&self, hosts: &[String]) -> Result<(), VmError> {
        let source = self.set.pages_source()?;
        let mut elsewhere = source.elsewhere();
        match elsewhere.find(|(place, _)| !hosts.contains(&place.host)) {
            None => Ok(()),
            Some((place, name)) => {
                let (host, path) = (&place.host, name.path.display());
                Err(refused(format!(
                    "--restore {}: {path} is on {host}: give the machine a node there (--on \
                     {host}), or copy the file to the directory of its set",
                    self.directory.display()
                )))
            }
        }
    }

    /// Absolute.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The options, with totals as saved where none are given, and with the saved back end.
    pub fn complete(&self, args: &VmRunArgs) -> VmRunArgs {
        let machine = &self.set.manifest().machine;
        let mut args = args.clone();
        if args.cpus.values == [0] {
            args.cpus.values = vec![machine.cpus];
        }
        if args.memory.values == [0] {
            args.memory.values = vec![machine.memory_bytes];
        }
        args.deterministic = self.saved.deterministic;
        args.backend = match machine.back_end.as_str() {
            "kvm" => BackEndArg::Kvm,
            _ => BackEndArg::Soft,
        };
        args
    }

    /// The saved machine, on the nodes that the options name.
    pub fn configuration(&self, args: &VmRunArgs, nodes: &Nodes) -> Result<Configuration, VmError> {
        let machine = &self.set.manifest().machine;
        if nodes.cpus != machine.cpus {
            return Err(refused(format!(
                "--cpus: the saved machine has {} vCPUs, not {}",
                machine.cpus, nodes.cpus
            )));
        }
        if nodes.memory_bytes != machine.memory_bytes {
            return Err(refused(format!(
                "--memory: the saved machine has {} bytes, not {}",
                machine.memory_bytes, nodes.memory_bytes
            )));
        }
        if self.saved.deterministic && nodes.count > 1 {
            return Err(refused(
                "--restore: the saved machine is deterministic and needs one node".into(),
            ));
        }
        self.check_hosts(&nodes.hosts)?;
        let mut configuration = self.saved.clone();
        configuration.slices = nodes.shares.clone();
        configuration.spare_bytes = args.spare;
        configuration.back_end = match machine.back_end.as_str() {
            "kvm" => BackEndChoice::Kvm,
            _ => BackEndChoice::Soft,
        };
        configuration.follow = nodes.follow(args.follow, configuration.back_end)?;
        configuration.exchanges = args.exchange.allows(configuration.follow);
        configuration.trace = args.trace.is_some();
        // A device of a node that the machine no longer has goes to node 0.
        let here = |slice: &mut u32| {
            if *slice as usize >= nodes.count {
                *slice = 0;
            }
        };
        for disk in &mut configuration.disks {
            here(&mut disk.slice);
        }
        for network in &mut configuration.networks {
            match network {
                Network::Tap { slice, .. }
                | Network::User { slice, .. }
                | Network::Switch { slice, .. } => here(slice),
            }
        }
        Ok(configuration)
    }
}
