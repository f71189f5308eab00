//! Options of `--cluster`.

use std::time::Duration;

use clap::Args;
use weft_cluster::{PRIORITY_MAX, WORK_HOSTS_MAX};

use crate::values::parse_seconds;

/// How a cluster places a program or a machine.
#[derive(Debug, Clone, Default, Args)]
pub struct PlaceArgs {
    /// Have this host's cluster find the hosts, this one first, and wait until there is room
    /// (`weft cluster`, `weft plan`)
    #[arg(long)]
    pub cluster: bool,
    /// With `--cluster`: how long to wait for room; 0: not at all [default: until there is some]
    #[arg(long, value_name = "SECONDS", requires = "cluster", value_parser = parse_seconds)]
    pub wait: Option<Duration>,
    /// With `--cluster`: print where it would run now, or why it would wait, and start nothing.
    /// The exit code is 1 if it would wait
    #[arg(long, requires = "cluster")]
    pub dry_run: bool,
    /// With `--cluster`: 0 to 9; those that wait with a larger one are served first
    #[arg(long, value_name = "N", requires = "cluster", default_value_t = 0,
        value_parser = clap::value_parser!(u8).range(..=i64::from(PRIORITY_MAX)))]
    pub priority: u8,
    /// With `--cluster`: the most hosts, 1 to 16 [default: 16]
    #[arg(long, value_name = "N", requires = "cluster",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(WORK_HOSTS_MAX)))]
    pub hosts_max: Option<u32>,
}
