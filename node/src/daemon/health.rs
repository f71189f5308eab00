//! Whether this host is expected to fail, by the errors that its kernel counts.
//!
//! | counter | file | a sign of failure |
//! | --- | --- | --- |
//! | uncorrected memory errors | `/sys/devices/system/edac/mc/mc*/ue_count` (Documentation/ABI/testing/sysfs-devices-edac) | one |
//! | corrected memory errors | `ce_count` beside it | 100 within an hour |
//! | machine check exceptions | the row `MCE` of `/proc/interrupts` (Documentation/arch/x86/x86_64/machinecheck.rst) | one |
//! | errors of a file system | `/sys/fs/ext4/*/errors_count` (Documentation/ABI/testing/sysfs-fs-ext4) | one |
//!
//! Only errors since the daemon's start count: a restart after a repair forgets the others. A
//! file that is not there counts nothing. Hosts in a virtual machine mostly have none of them.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Corrected errors within [`CORRECTED_WITHIN`] that are a sign of failure.
const CORRECTED_MAX: u64 = 100;
const CORRECTED_WITHIN: Duration = Duration::from_secs(3600);
/// How often the number of corrected errors is noted.
const NOTE_EVERY: Duration = Duration::from_secs(60);

/// What is counted in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Uncorrected,
    MachineCheck,
    FileSystem,
    Corrected,
}

/// The counters that there are, by kind and file.
type Counts = BTreeMap<(Kind, PathBuf), u64>;

fn read(root: &Path) -> Counts {
    let mut counts = Counts::new();
    let controllers = root.join("sys/devices/system/edac/mc");
    for (kind, directory, name) in [
        (Kind::Uncorrected, &controllers, "ue_count"),
        (Kind::Corrected, &controllers, "ce_count"),
        (Kind::FileSystem, &root.join("sys/fs/ext4"), "errors_count"),
    ] {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let files = entries.map(|entry| entry.path().join(name));
        counts.extend(files.filter_map(|file| {
            let text = fs::read_to_string(&file).ok()?;
            Some(((kind, file), text.trim().parse().ok()?))
        }));
    }
    let interrupts = root.join("proc/interrupts");
    let checks = machine_checks(&interrupts);
    counts.insert((Kind::MachineCheck, interrupts), checks);
    counts
}

/// Machine check exceptions of all processors.
fn machine_checks(path: &Path) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let row = text
        .lines()
        .find_map(|line| line.trim_start().strip_prefix("MCE:"));
    let counts = row.unwrap_or_default().split_whitespace();
    counts.map_while(|count| count.parse::<u64>().ok()).sum()
}

/// Watches the counters.
pub(super) struct Health {
    root: PathBuf,
    /// As each was when it was seen first: the errors of a file system are in itself, and it may
    /// be mounted later.
    first: Counts,
    /// Corrected errors of the last hour, as they were noted.
    noted: VecDeque<(Instant, u64)>,
}

impl Health {
    pub(super) fn new(root: &Path) -> Health {
        Health {
            root: root.to_owned(),
            first: read(root),
            noted: VecDeque::new(),
        }
    }

    /// Why this host is expected to fail, if it is: a phrase.
    pub(super) fn look(&mut self, now: Instant) -> Option<String> {
        let mut since: BTreeMap<Kind, u64> = BTreeMap::new();
        for ((kind, file), count) in read(&self.root) {
            let first = *self.first.entry((kind, file)).or_insert(count);
            *since.entry(kind).or_default() += count.saturating_sub(first);
        }
        let since = |kind| since.get(&kind).copied().unwrap_or(0);
        let corrected = self.corrected_lately(now, since(Kind::Corrected));
        let signs = [
            (Kind::Uncorrected, "uncorrected memory error"),
            (Kind::MachineCheck, "machine check"),
            (Kind::FileSystem, "file system error"),
        ];
        let sign = signs.into_iter().map(|(kind, what)| (since(kind), what));
        match sign.into_iter().find(|(count, _)| *count > 0) {
            Some((1, what)) => Some(format!("1 {what}")),
            Some((count, what)) => Some(format!("{count} {what}s")),
            None if corrected >= CORRECTED_MAX => Some(format!(
                "{corrected} corrected memory errors within an hour"
            )),
            None => None,
        }
    }

    fn corrected_lately(&mut self, now: Instant, corrected: u64) -> u64 {
        let is_old = |&(at, _): &(Instant, u64)| now.duration_since(at) > CORRECTED_WITHIN;
        while self.noted.front().is_some_and(is_old) {
            self.noted.pop_front();
        }
        let last = self.noted.back();
        if last.is_none_or(|&(at, _)| now.duration_since(at) >= NOTE_EVERY) {
            self.noted.push_back((now, corrected));
        }
        let earlier = self.noted.front().map_or(corrected, |&(_, count)| count);
        corrected.saturating_sub(earlier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Host(PathBuf);

    impl Host {
        fn new(name: &str) -> Host {
            let path =
                std::env::temp_dir().join(format!("weft-health-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Host(path)
        }

        fn counts(&self, file: &str, text: &str) {
            let path = self.0.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    impl Drop for Host {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const UNCORRECTED: &str = "sys/devices/system/edac/mc/mc1/ue_count";
    const CORRECTED: &str = "sys/devices/system/edac/mc/mc0/ce_count";

    #[test]
    fn only_errors_since_the_start_count() {
        let host = Host::new("since");
        assert_eq!(Health::new(&host.0).look(Instant::now()), None);
        host.counts(UNCORRECTED, "3\n");
        host.counts("sys/fs/ext4/vda1/errors_count", "7\n");
        host.counts("sys/fs/ext4/features/other", "");
        let interrupts = "           CPU0       CPU1\n  0:  1  2  IO-APIC timer\n";
        let checks = |count| format!("{interrupts}MCE: {count} 1 Machine check exceptions\n");
        host.counts("proc/interrupts", &checks(0));
        let now = Instant::now();
        let mut health = Health::new(&host.0);
        assert_eq!(health.look(now), None);
        host.counts("proc/interrupts", &checks(2));
        assert_eq!(health.look(now).unwrap(), "2 machine checks");
        host.counts(UNCORRECTED, "4\n");
        assert_eq!(health.look(now).unwrap(), "1 uncorrected memory error");
        assert_eq!(Health::new(&host.0).look(now), None);
        // One that is mounted now has errors of its past.
        host.counts("sys/fs/ext4/sdb1/errors_count", "5\n");
        host.counts(UNCORRECTED, "3\n");
        host.counts("proc/interrupts", &checks(0));
        assert_eq!(health.look(now), None);
        host.counts("sys/fs/ext4/vda1/errors_count", "8\n");
        host.counts(UNCORRECTED, "nonsense");
        host.counts("proc/interrupts", &checks(0));
        assert_eq!(health.look(now).unwrap(), "1 file system error");
    }

    #[test]
    fn many_corrected_errors_within_an_hour_are_a_sign() {
        let host = Host::new("corrected");
        host.counts(CORRECTED, "1000");
        let start = Instant::now();
        let mut health = Health::new(&host.0);
        let at = |minutes: u64| start + Duration::from_secs(60 * minutes);
        // One a minute, for hours.
        for minute in 0..180 {
            host.counts(CORRECTED, &(1000 + minute).to_string());
            assert_eq!(health.look(at(minute)), None, "{minute}");
        }
        host.counts(CORRECTED, "1280");
        let why = health.look(at(180)).unwrap();
        assert_eq!(why, "160 corrected memory errors within an hour");
        // Quiet again.
        assert_eq!(health.look(at(241)), None);
        assert!(health.noted.len() <= 62);
    }
}
