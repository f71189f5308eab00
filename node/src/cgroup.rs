//! Memory cgroups: the kernel's own bound on what a process holds, all of it
//! (pages of any kind, page tables, buffers), kept without anybody looking.
//!
//! A daemon makes a group for each slice below the group that it is in itself, which
//! root may everywhere, and others where it was delegated to them (a unit with
//! `Delegate=yes`). In version 2 a group with processes of its own gives its children
//! no bounds, so the daemon first moves into a group beside those of its slices.
//!
//! `Documentation/admin-guide/cgroup-v1/memory.rst`, `.../cgroup-v2.rst`.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Of version 2: what happened to a group's own processes.
const LOCAL_EVENTS: &str = "memory.events.local";
/// What the names of a daemon's groups start with; its process number follows.
const PREFIX: &str = "weft-";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// Where a daemon makes groups.
#[derive(Debug)]
pub struct Cgroups {
    parent: Place,
    made: AtomicU32,
}

/// A group of one slice; removed when dropped, after the slice's end.
#[derive(Debug)]
pub struct Group {
    place: Place,
    /// Where a process writes 0 to enter.
    entry: File,
}

/// A group that is there, and how it is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    version: Version,
    directory: PathBuf,
}

/// What the kernel lets a group hold, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    pub bytes: u64,
    used: u64,
}

impl MemoryLimit {
    /// What it may hold beside what it holds.
    pub fn left(self) -> u64 {
        self.bytes.saturating_sub(self.used)
    }
}

/// Why this process may not bound memory.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No memory controller.
    #[error("no memory cgroup is mounted here")]
    NotMounted,
    /// The group that this process is in cannot have others.
    #[error("{}: {why}", directory.display())]
    Unusable {
        /// The group.
        directory: PathBuf,
        /// What the kernel said.
        why: io::Error,
    },
}

impl Place {
    /// The group of a process, as this one sees it. `None` where no memory controller is
    /// mounted, or the process has gone.
    pub fn of(process: impl fmt::Display) -> Option<Place> {
        let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        place_in(&groups, &mounts)
    }

    /// Where it is mounted.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Its bound on memory and those of the groups above it, where they have one.
    pub fn limits(&self) -> Vec<MemoryLimit> {
        let [bytes, used] = match self.version {
            Version::One => ["memory.limit_in_bytes", "memory.usage_in_bytes"],
            Version::Two => ["memory.max", "memory.current"],
        };
        let number = |group: &Path, file| -> Option<u64> {
            let text = fs::read_to_string(group.join(file)).ok()?;
            text.trim().parse().ok()
        };
        let groups = self.directory.ancestors();
        let limits = groups.filter_map(|group| {
            Some(MemoryLimit {
                bytes: number(group, bytes)?,
                used: number(group, used)?,
            })
        });
        limits.collect()
    }

    /// How many of its processes the kernel has killed because memory ran out.
    ///
    /// # Errors
    /// The group's file cannot be read, or does not say.
    pub fn kills(&self) -> io::Result<u64> {
        let name = match self.version {
            Version::One => "memory.oom_control",
            // That of the group itself, which newer kernels have, and else with those
            // of the groups below.
            Version::Two if self.directory.join(LOCAL_EVENTS).exists() => LOCAL_EVENTS,
            Version::Two => "memory.events",
        };
        let text = fs::read_to_string(self.directory.join(name))?;
        let count = |line: &str| line.strip_prefix("oom_kill ")?.trim().parse().ok();
        let count = text.lines().find_map(count);
        count.ok_or_else(|| io::Error::other(format!("{name} counts no kills")))
    }
}

impl Cgroups {
    /// Finds where this process may bound memory, and makes sure that it may.
    ///
    /// # Errors
    /// No memory controller, or no right to make groups here.
    pub fn find() -> Result<Cgroups, CgroupError> {
        let place = Place::of("self").ok_or(CgroupError::NotMounted)?;
        let unusable = |why| CgroupError::Unusable {
            directory: place.directory.clone(),
            why,
        };
        if place.version == Version::Two {
            delegate_memory(&place.directory).map_err(unusable)?;
        }
        remove_stale(&place.directory);
        let found = Cgroups {
            parent: place.clone(),
            made: AtomicU32::new(0),
        };
        // What works for one works for all.
        const TRIAL_BYTES: u64 = 1 << 30;
        found.make(TRIAL_BYTES).map_err(unusable)?;
        Ok(found)
    }

    /// A group without processes, which may come to hold `bytes`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn make(&self, bytes: u64) -> io::Result<Group> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{number}", std::process::id());
        let version = self.parent.version;
        let directory = self.parent.directory.join(name);
        fs::create_dir(&directory)?;
        let made = bound(version, &directory, bytes).and_then(|()| {
            OpenOptions::new()
                .write(true)
                .open(directory.join("cgroup.procs"))
        });
        match made {
            Ok(entry) => Ok(Group {
                place: Place { version, directory },
                entry,
            }),
            Err(error) => {
                let _ = fs::remove_dir(&directory);
                Err(error)
            }
        }
    }
}

impl Group {
    /// Where a process enters by writing `0`.
    pub fn entry(&self) -> BorrowedFd<'_> {
        self.entry.as_fd()
    }

    /// Whether the kernel ended a process because the group was full.
    ///
    /// # Errors
    /// The group's files cannot be read, or do not say.
    pub fn was_full(&self) -> io::Result<bool> {
        Ok(self.place.kills()? > 0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // With a process in it, it stays, and the next daemon removes it.
        let _ = fs::remove_dir(&self.place.directory);
    }
}

fn set(directory: &Path, file: &str, value: &str) -> io::Result<()> {
    // Not created: a file that the kernel does not have is an error.
    let path = directory.join(file);
    let mut file = OpenOptions::new().write(true).open(path)?;
    io::Write::write_all(&mut file, value.as_bytes())
}

/// The same, where the kernel was built with it.
fn set_if_there(directory: &Path, file: &str, value: &str) -> io::Result<bool> {
    match set(directory, file, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        result => result.map(|()| true),
    }
}

/// Bounds what is in a group, swapped out or not.
fn bound(version: Version, directory: &Path, bytes: u64) -> io::Result<()> {
    let value = bytes.to_string();
    match version {
        Version::One => {
            set(directory, "memory.limit_in_bytes", &value)?;
            // With swap, or else nothing of it is swapped out.
            if !set_if_there(directory, "memory.memsw.limit_in_bytes", &value)? {
                set(directory, "memory.swappiness", "0")?;
            }
        }
        Version::Two => {
            set(directory, "memory.max", &value)?;
            set_if_there(directory, "memory.swap.max", "0")?;
        }
    }
    Ok(())
}

/// Lets the children of a group be bounded. Does nothing where they can be.
fn delegate_memory(directory: &Path) -> io::Result<()> {
    let enabled = |file: &str| -> io::Result<bool> {
        let text = fs::read_to_string(directory.join(file))?;
        Ok(text.split_whitespace().any(|name| name == "memory"))
    };
    if enabled("cgroup.subtree_control")? {
        return Ok(());
    }
    if !enabled("cgroup.controllers")? {
        return Err(io::Error::other("it was not given the memory controller"));
    }
    let enable = || set(directory, "cgroup.subtree_control", "+memory");
    match enable() {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
        result => return result,
    }
    let own = directory.join(format!("{PREFIX}{}-daemon", std::process::id()));
    fs::create_dir(&own)?;
    let process = std::process::id().to_string();
    let moved = set(&own, "cgroup.procs", &process).and_then(|()| enable());
    if let Err(error) = moved {
        // Other processes are in it: everything as it was.
        let _ = set(directory, "cgroup.procs", &process);
        let _ = fs::remove_dir(&own);
        return Err(match error.raw_os_error() {
            Some(libc::EBUSY) => io::Error::other("other processes are in this group, too"),
            _ => error,
        });
    }
    Ok(())
}

/// Removes what daemons left that were killed.
fn remove_stale(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| {
            let (process, _) = name.strip_prefix(PREFIX)?.split_once('-')?;
            process.parse::<u32>().ok()
        });
        if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            // It fails where a process is in it.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// A process's group of the memory controller, by its `/proc/PID/cgroup` and
/// `/proc/self/mountinfo`: version 1 where the controller is in it, else version 2.
fn place_in(groups: &str, mounts: &str) -> Option<Place> {
    let path_in = |version: Version| {
        groups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (hierarchy, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let this = match version {
                Version::One => controllers.split(',').any(|name| name == "memory"),
                Version::Two => hierarchy == "0" && controllers.is_empty(),
            };
            this.then_some(path)
        })
    };
    [Version::One, Version::Two]
        .into_iter()
        .find_map(|version| {
            let path = path_in(version)?;
            let directory = mounts
                .lines()
                .find_map(|line| mounted_at(line, version, path))?;
            Some(Place { version, directory })
        })
}

/// Where group `path` is, if this line of `mountinfo` shows it: `36 35 0:30 ROOT PLACE
/// options [fields] - TYPE source options`.
fn mounted_at(line: &str, version: Version, path: &str) -> Option<PathBuf> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let (root, place) = (left.next()?, left.next()?);
    let mut right = right.split(' ');
    let (kind, options) = (right.next()?, right.nth(1)?);
    let this = match version {
        Version::One => kind == "cgroup" && options.split(',').any(|name| name == "memory"),
        Version::Two => kind == "cgroup2",
    };
    let below = Path::new(path).strip_prefix(root).ok()?;
    // Outside of what this process sees of the hierarchy.
    let outside = below.components().any(|part| part.as_os_str() == "..");
    (this && !outside).then(|| Path::new(place).join(below))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limits_of_a_job_and_of_what_is_above_count() {
        let root = std::env::temp_dir().join(format!("weft-limits-{}", std::process::id()));
        let group = |path: &str, files: [(&str, &str); 2]| {
            let directory = root.join(path);
            fs::create_dir_all(&directory).unwrap();
            for (name, text) in files {
                fs::write(directory.join(name), text).unwrap();
            }
        };
        let limit = |bytes, used| MemoryLimit { bytes, used };
        group(
            "a",
            [("memory.max", "9000\n"), ("memory.current", "4000\n")],
        );
        group(
            "a/b",
            [("memory.max", "max\n"), ("memory.current", "3000\n")],
        );
        group(
            "a/b/c",
            [("memory.max", "5000\n"), ("memory.current", "1000\n")],
        );
        let place = |path: &str, version| Place {
            version,
            directory: root.join(path),
        };
        let limits = place("a/b/c", Version::Two).limits();
        assert_eq!(limits, [limit(5000, 1000), limit(9000, 4000)]);
        assert_eq!(limits[0].left(), 4000);
        let files = [
            ("memory.limit_in_bytes", "700\n"),
            ("memory.usage_in_bytes", "900\n"),
        ];
        group("old", files);
        let limits = place("old", Version::One).limits();
        assert_eq!(limits, [limit(700, 900)]);
        assert_eq!(limits[0].left(), 0);
        fs::remove_dir_all(&root).unwrap();
    }

    const MOUNTS: &str = "\
25 21 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
36 25 0:30 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory
37 25 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";

    #[test]
    fn the_memory_controller_is_found_in_either_version() {
        let place = place_in("4:memory:/a/b\n0::/\n", MOUNTS).unwrap();
        assert_eq!(place.version, Version::One);
        assert_eq!(place.directory, Path::new("/sys/fs/cgroup/memory/a/b"));
        let place = place_in("2:cpu,cpuacct:/x\n0::/system.slice/weft.service\n", MOUNTS);
        let place = place.unwrap();
        assert_eq!(place.version, Version::Two);
        let there = "/sys/fs/cgroup/unified/system.slice/weft.service";
        assert_eq!(place.directory, Path::new(there));
        // In a container the mount shows a part.
        let part = "40 1 0:9 /box /sys/fs/cgroup rw - cgroup2 c rw,nsdelegate\n";
        let place = place_in("0::/box/inner\n", part).unwrap();
        assert_eq!(place.directory, Path::new("/sys/fs/cgroup/inner"));
        assert_eq!(place_in("0::/other\n", part), None);
        assert_eq!(place_in("0::/box/../../other\n", part), None);
        assert_eq!(place_in("", MOUNTS), None);
    }

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("weft-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        path
    }

    #[test]
    fn a_bound_includes_what_is_swapped_out() {
        let group = scratch("bound");
        let read = |name: &str| fs::read_to_string(group.join(name)).unwrap();
        fs::write(group.join("memory.limit_in_bytes"), "").unwrap();
        assert!(bound(Version::One, &group, 4096).is_err());
        fs::write(group.join("memory.swappiness"), "60").unwrap();
        bound(Version::One, &group, 4096).unwrap();
        assert_eq!(read("memory.limit_in_bytes"), "4096");
        assert!(read("memory.swappiness").starts_with('0'));
        fs::write(group.join("memory.memsw.limit_in_bytes"), "").unwrap();
        bound(Version::One, &group, 8192).unwrap();
        assert_eq!(read("memory.memsw.limit_in_bytes"), "8192");
        fs::write(group.join("memory.max"), "").unwrap();
        fs::write(group.join("memory.swap.max"), "").unwrap();
        bound(Version::Two, &group, 4096).unwrap();
        assert_eq!(
            (read("memory.max"), read("memory.swap.max")),
            ("4096".into(), "0".into())
        );
        fs::remove_dir_all(group).unwrap();
    }

    #[test]
    fn groups_of_daemons_that_ended_are_removed() {
        let parent = scratch("stale");
        let own = format!("{PREFIX}{}-0", std::process::id());
        // Above the largest process number there is.
        let gone = format!("{PREFIX}{}-3", u32::MAX);
        for name in [own.as_str(), &gone, "weft-else", "other"] {
            fs::create_dir(parent.join(name)).unwrap();
        }
        remove_stale(&parent);
        let mut left: Vec<_> = fs::read_dir(&parent)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let mut expected = vec!["other".to_owned(), own, "weft-else".to_owned()];
        expected.sort();
        assert_eq!(left, expected);
        fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn a_full_group_is_recognised() {
        let directory = scratch("full");
        let group = |text: &str| {
            fs::write(directory.join("memory.events"), text).unwrap();
            let entry = File::create(directory.join("cgroup.procs")).unwrap();
            let place = Place {
                version: Version::Two,
                directory: directory.clone(),
            };
            let group = Group { place, entry };
            group.was_full()
        };
        assert!(!group("low 0\noom 3\noom_kill 0\n").unwrap());
        assert!(group("low 0\noom_kill 1\noom_group_kill 0\n").unwrap());
        assert!(group("low 0\n").is_err());
        fs::remove_dir_all(directory).unwrap();
    }
}
