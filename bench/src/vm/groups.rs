//! Groups of processes with less of a disk or of memory than the machine has: cgroups of version 1.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use nix::sys::stat::{major, minor};
use weft_tests::run::Running;

/// One group; removed when dropped, after the end of its processes.
pub(super) struct Group(PathBuf);

impl Group {
    fn new(controller: &str, name: &str, (file, line): (&str, String)) -> Result<Group> {
        let path = Path::new("/sys/fs/cgroup").join(controller);
        let path = path.join(format!("weft-bench-{}-{name}", std::process::id()));
        fs::create_dir(&path)
            .with_context(|| format!("a cgroup v1 with the controller {controller} is needed"))?;
        let group = Group(path);
        fs::write(group.0.join(file), line).with_context(|| format!("{file} cannot be set"))?;
        Ok(group)
    }

    /// The disk that `files` is on may be written with `megabytes` in a second.
    pub fn of_a_disk(name: &str, files: &Path, megabytes: u64) -> Result<Group> {
        let device = fs::metadata(files)?.dev();
        let (major, minor) = (major(device), minor(device));
        let line = format!("{major}:{minor} {}", megabytes * 1_000_000);
        Group::new("blkio", name, ("blkio.throttle.write_bps_device", line))
    }

    /// With this much memory; what does not fit is swapped out.
    pub fn of_memory(name: &str, mib: u64) -> Result<Group> {
        let line = (mib << 20).to_string();
        Group::new("memory", name, ("memory.limit_in_bytes", line))
    }

    fn processes(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }

    /// A process and those that it starts from now on.
    pub fn add(&self, process: &Running) -> Result<()> {
        Ok(fs::write(self.processes(), process.pid().to_string())?)
    }

    /// Words before a command that runs in it.
    pub fn prefix(&self) -> Vec<OsString> {
        let file = self.processes();
        let enter = format!("echo $$ >{} && exec \"$0\" \"$@\"", file.display());
        vec!["sh".into(), "-c".into(), enter.into()]
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What is left in it when a measurement failed ends later.
        let _ = fs::remove_dir(&self.0);
    }
}

/// A file that the kernel of this machine swaps to, until it is dropped.
pub(super) struct Swap(PathBuf);

impl Swap {
    pub fn new(file: &Path, mib: u64) -> Result<Swap> {
        let size = format!("{mib}M");
        run("fallocate", &["-l".as_ref(), size.as_ref(), file])?;
        let swap = Swap(file.to_owned());
        run("chmod", &["600".as_ref(), file])?;
        run("mkswap", &[file])?;
        run("swapon", &[file])?;
        Ok(swap)
    }

    /// Pages that were swapped in since the start of the machine.
    pub fn pages_in() -> Result<f64> {
        let counters = fs::read_to_string("/proc/vmstat")?;
        let count = |line: &str| line.strip_prefix("pswpin ")?.parse().ok();
        let count = counters.lines().find_map(count);
        count.context("/proc/vmstat has no pswpin")
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // The kernel knows whether it is in use: it was not, if `swapon` failed.
        let _ = run("swapoff", &[&self.0]);
        // It may never have been made.
        let _ = fs::remove_file(&self.0);
    }
}

fn run(program: &str, arguments: &[&Path]) -> Result<()> {
    let mut command = Command::new("env");
    // For administrators only.
    command
        .arg("PATH=/usr/sbin:/usr/bin:/sbin:/bin")
        .arg(program);
    let output = command.args(arguments).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program}: {}", said.trim());
    Ok(())
}
