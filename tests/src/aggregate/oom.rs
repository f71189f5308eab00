//! A machine whose memory cgroup is full: the kernel kills one of its processes, and
//! the host's user is told that memory ran out.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use super::{BOUND, Bench, TWO};
use crate::guest::Guest;

pub(super) const NAME: &str = "a machine that its memory cgroup has no room for";

/// Less than what the guest fills, and enough for its boot. The group gets it then: a machine
/// that is larger than its group does not start.
const LIMIT: u64 = 160 << 20;
const READY: &str = "fills-its-memory";
/// Why there can be no such machine here.
pub(super) fn missing() -> Option<String> {
    Group::new("trial")
        .err()
        .map(|why| format!("no memory cgroup can be made: {why}"))
}

pub(super) fn said(bench: &Bench<'_>) -> Result<String> {
    let group = Group::new("oom")?;
    // 200 MiB in two lots, on whichever node they lie.
    let script = format!(
        "mkdir -p /m; mount -t tmpfs tmpfs /m; echo {READY}; read told; \
         dd if=/dev/zero of=/m/x bs=1M count=100; taskset 2 dd if=/dev/zero of=/m/y bs=1M count=100"
    );
    let machine = bench.machine(TWO.options, &script, "")?;
    let mut within = Command::new("sh");
    within.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]);
    within
        .arg(group.path.join("cgroup.procs"))
        .arg(machine.get_program());
    within.args(machine.get_args());
    for (name, value) in machine.get_envs() {
        within.env(name, value.unwrap_or_default());
    }
    let mut guest = Guest::start(&mut within)?;
    ensure!(guest.wait_for(READY, BOUND).is_some(), "it did not boot");
    group.limit(LIMIT)?;
    guest.tell()?;
    let ended = guest.finish(BOUND)?;
    let said = "the kernel killed a process of its memory cgroup because memory ran out";
    ensure!(
        ended.stderr.contains(said),
        "{}\n{}",
        ended.stderr,
        ended.tail(10)
    );
    ensure!(!ended.ended_well(), "it ended well");
    Ok(String::new())
}

/// A memory cgroup of version 1, or one of version 2 below the root.
struct Group {
    path: PathBuf,
    limit: PathBuf,
}

impl Group {
    fn new(name: &str) -> io::Result<Group> {
        let first = Path::new("/sys/fs/cgroup/memory");
        let (parent, limit) = match first.is_dir() {
            true => (first, "memory.limit_in_bytes"),
            false => (Path::new("/sys/fs/cgroup"), "memory.max"),
        };
        let path = parent.join(format!("weft-e2e-{}-{name}", std::process::id()));
        fs::create_dir(&path)?;
        let limit = path.join(limit);
        let group = Group { path, limit };
        // A group without the controller lacks the file.
        fs::metadata(&group.limit)?;
        Ok(group)
    }

    fn limit(&self, bytes: u64) -> io::Result<()> {
        fs::write(&self.limit, bytes.to_string())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // It is empty once the machine has ended.
        let _ = fs::remove_dir(&self.path);
    }
}
