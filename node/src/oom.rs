//! Whether the kernel killed a process for want of memory.
//!
//! Such a kill looks like any other: SIGKILL. But the kernel counts them for each
//! memory cgroup, of both versions. The count is read when a process starts and
//! when it was killed; where it grew, that is said, and where there is no count,
//! nothing is guessed.

use std::fs;
use std::path::{Path, PathBuf};

/// What version 1 and version 2 call the file with the count.
const COUNTERS_1: [&str; 1] = ["memory.oom_control"];
const COUNTERS_2: [&str; 2] = ["memory.events.local", "memory.events"];

/// The memory cgroup of a process, as it was when the process started.
#[derive(Debug)]
pub struct Watch {
    counter: Option<(PathBuf, u64)>,
}

impl Watch {
    /// Of a process that has just started.
    pub fn on(pid: i32) -> Watch {
        let read = |path: String| fs::read_to_string(path).unwrap_or_default();
        let groups = read(format!("/proc/{pid}/cgroup"));
        let mounts = read("/proc/self/mountinfo".into());
        let files = candidates(&groups, &mounts);
        let counter = files.into_iter().find_map(|file| {
            let kills = kills(&file)?;
            Some((file, kills))
        });
        Watch { counter }
    }

    /// What the kernel did to the process's group since, for a sentence about a
    /// process that was killed.
    pub fn verdict(&self) -> Option<String> {
        let (file, before) = self.counter.as_ref()?;
        let group = file.parent().unwrap_or(file).display();
        (kills(file)? > *before).then(|| {
            format!("the kernel ended a process of its memory cgroup for want of memory ({group})")
        })
    }
}

/// Kills that a file counts.
fn kills(file: &Path) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let count = |line: &str| line.strip_prefix("oom_kill ")?.trim().parse().ok();
    text.lines().find_map(count)
}

/// Files that may count the kills of a process's group, by the texts of
/// `/proc/PID/cgroup` and `/proc/self/mountinfo`; version 1 first, which has the
/// controller where both are mounted.
fn candidates(groups: &str, mounts: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for (kind, names) in [("cgroup", &COUNTERS_1[..]), ("cgroup2", &COUNTERS_2[..])] {
        let directory = own_path(groups, kind == "cgroup")
            .and_then(|path| mounts.lines().find_map(|line| below(line, kind, path)));
        files.extend(directory.iter().flat_map(|directory| {
            let files = names.iter().map(|name| directory.join(name));
            files.collect::<Vec<_>>()
        }));
    }
    files
}

/// The path of the process's group: of the memory controller of version 1, or of
/// version 2.
fn own_path(groups: &str, first: bool) -> Option<&str> {
    groups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let fits = match first {
            true => controllers.split(',').any(|name| name == "memory"),
            false => controllers.is_empty(),
        };
        fits.then_some(path)
    })
}

/// Where the group `path` is, when this line of mountinfo mounts its hierarchy.
fn below(line: &str, kind: &str, path: &str) -> Option<PathBuf> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut file_system = file_system.split(' ');
    let fits = file_system.next()? == kind
        && (kind == "cgroup2" || file_system.nth(1)?.split(',').any(|name| name == "memory"));
    let mut mount = mount.split(' ').skip(3);
    let (root, point) = (mount.next()?, mount.next()?);
    let inside = Path::new(path).strip_prefix(root).ok()?;
    fits.then(|| Path::new(point).join(inside))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str =
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";
    const SECOND: &str =
        "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn the_group_of_either_version_is_found() {
        let groups = "4:memory:/a/b\n3:cpuset:/\n0::/\n";
        let files = candidates(groups, FIRST);
        let wanted = Path::new("/sys/fs/cgroup/memory/a/b/memory.oom_control");
        assert_eq!(files, [wanted]);
        let files = candidates("0::/user.slice/x.scope\n", SECOND);
        let wanted = Path::new("/sys/fs/cgroup/user.slice/x.scope/memory.events.local");
        assert_eq!(files[0], wanted);
        assert!(candidates("0::/\n", FIRST).is_empty());
        assert!(candidates("", "").is_empty());
    }

    #[test]
    fn a_group_below_what_is_mounted_is_found() {
        let mounts = FIRST.replace(" / /sys", " /container /sys");
        let files = candidates("4:memory:/container/a\n", &mounts);
        let wanted = Path::new("/sys/fs/cgroup/memory/a/memory.oom_control");
        assert_eq!(files, [wanted]);
        assert!(candidates("4:memory:/elsewhere\n", &mounts).is_empty());
    }

    #[test]
    fn a_verdict_needs_a_count_that_grew() {
        let directory = std::env::temp_dir().join(format!("weft-oom-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let file = directory.join("memory.events.local");
        fs::write(&file, "low 0\noom 3\noom_kill 2\noom_group_kill 0\n").unwrap();
        let watch = Watch {
            counter: Some((file.clone(), kills(&file).unwrap())),
        };
        assert_eq!(watch.verdict(), None);
        fs::write(&file, "oom_kill 3\n").unwrap();
        assert!(watch.verdict().unwrap().contains("for want of memory"));
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(watch.verdict(), None);
    }
}
