//! What a user may change when a cluster goes on from its saved machines (`weft mpi resume`).

use std::ffi::OsString;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{bail, ensure};

use super::options::{ListedHost, SiteOptions};
use super::record::Record;

/// What is different when a cluster goes on from its saved machines.
#[derive(Debug, Default)]
pub struct Changes {
    /// Hosts wanted.
    pub hosts: Option<usize>,
    /// How long each host is asked for.
    pub time: Option<Duration>,
    /// How long to wait for all hosts.
    pub wait: Option<Duration>,
    /// Arguments for `sbatch` or `qsub`, instead of those before; none: as before.
    pub batch: Vec<OsString>,
    /// Where hosts reach the launcher.
    pub address: Option<IpAddr>,
    /// The hosts of the list.
    pub list: Option<Vec<ListedHost>>,
}

impl Changes {
    /// # Errors
    /// They do not fit the cluster.
    pub(super) fn apply(self, record: &mut Record) -> anyhow::Result<()> {
        let options = &mut record.options;
        if let Some(hosts) = self.hosts {
            ensure!(
                hosts > 1 || !record.began_on_several,
                "the machine began on several hosts, and goes on on 2 or more: --hosts 2"
            );
            options.hosts = hosts;
            record.wanted = hosts;
            options.grow = None;
        }
        options.time = self.time.unwrap_or(options.time);
        options.wait = self.wait.unwrap_or(options.wait);
        options.address = self.address.or(options.address);
        if let Some(list) = self.list {
            ensure!(
                matches!(options.site, SiteOptions::Local(_)),
                "--list is for a cluster on a list of hosts"
            );
            options.site = SiteOptions::Local(list);
        }
        if !self.batch.is_empty() {
            match &mut options.site {
                SiteOptions::Slurm { options } | SiteOptions::GridEngine { options } => {
                    *options = self.batch;
                }
                SiteOptions::Local(_) => {
                    bail!("--batch is for a cluster on Slurm or Grid Engine")
                }
            }
        }
        options.check()
    }
}
