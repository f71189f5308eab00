//! Options of `--cluster`.

use std::time::Duration;

use clap::Args;
use weft_cluster::{PRIORITY_MAX, WORK_HOSTS_MAX};

use crate::values::parse_seconds;

/// The name and the number of what a cluster has placed.
fn parse_placed(text: &str) -> Result<(String, u64), String> {
    let parts = text.split_once(':');
    let parts = parts.and_then(|(name, id)| Some((name.to_owned(), id.parse().ok()?)));
    parts.ok_or_else(|| "write NAME:NUMBER".into())
}

/// How a cluster places a program or a machine.
#[derive(Debug, Clone, Default, Args)]
pub struct PlaceArgs {
    /// Have this host's cluster find the hosts, this one first, and wait until there is room
    /// (`weft cluster`, `weft plan`)
    #[arg(long)]
    pub cluster: bool,
    /// With `--cluster`: start it on whichever host has room, or on HOST, and not here. This command
    /// runs there by ssh, in the same directory: the files must be there
    #[arg(long, value_name = "HOST", requires = "cluster", num_args = 0..=1, require_equals = true)]
    pub anywhere: Option<Option<String>>,
    /// What `--anywhere` has there
    #[arg(long, hide = true, requires = "cluster", conflicts_with_all = ["anywhere", "dry_run"],
        value_parser = parse_placed)]
    pub placed: Option<(String, u64)>,
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
