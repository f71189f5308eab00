//! Hosts of a list, without a batch system: a laptop, or a few machines of one user's own.
//!
//! A job is a process on this host, perhaps started through a command that leads to another one
//! (`ssh`, `ip netns exec`). Its end is enforced by `timeout` of the coreutils, so it comes also
//! if nobody asks any more. What runs is noted in a folder, so another process finds it again.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use nix::sys::signal::{SigSet, SigmaskHow, Signal, killpg, sigprocmask};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::{BatchError, BatchSystem, Job, JobId, Wanted};

const SYSTEM: &str = "the list of hosts";
/// Between TERM and KILL.
const GRACE: Duration = Duration::from_secs(10);

/// A host of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalHost {
    pub name: String,
    /// Leads to it: the job's command follows. Empty: this host itself.
    pub through: Vec<OsString>,
    /// The longest time for which it may be had.
    pub time_max: Option<Duration>,
}

/// A list of hosts; a host has one job at a time. One process uses a folder at a time.
#[derive(Clone, Debug)]
pub struct Local {
    hosts: Vec<LocalHost>,
    /// Has a file for each job.
    folder: PathBuf,
}

/// A job, as its file has it.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// As it was asked for.
    #[serde(default)]
    name: String,
    host: String,
    process: i32,
    /// When the kernel started that process, in its own ticks: its number may be another's later.
    started_ticks: u64,
    /// Seconds since 1970.
    until: u64,
}

impl Local {
    /// `folder` is made if it does not exist.
    pub fn new(hosts: Vec<LocalHost>, folder: &Path) -> Result<Local, BatchError> {
        fs::create_dir_all(folder).map_err(|error| of(folder, error))?;
        Ok(Local {
            hosts,
            folder: folder.to_owned(),
        })
    }

    fn path(&self, id: &JobId) -> PathBuf {
        self.folder.join(format!("{id}.job"))
    }

    fn record(&self, id: &JobId) -> Result<Option<Record>, BatchError> {
        let path = self.path(id);
        match fs::read(&path) {
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(record) => Ok(Some(record)),
                Err(error) => Err(of(&path, error.into())),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(of(&path, error)),
        }
    }

    /// The numbers of all jobs that there ever were, as far as their files are there.
    fn numbers(&self) -> Result<Vec<u64>, BatchError> {
        let entries = fs::read_dir(&self.folder).map_err(|error| of(&self.folder, error))?;
        let number = |entry: io::Result<fs::DirEntry>| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            name.strip_suffix(".job")?.parse().ok()
        };
        Ok(entries.filter_map(number).collect())
    }

    fn start(&self, host: &LocalHost, wanted: &Wanted, time: Duration) -> io::Result<i32> {
        let output = fs::File::create(&wanted.output)?;
        let mut command = Command::new("timeout");
        command
            .arg(format!("--kill-after={}", GRACE.as_secs()))
            .arg(time.as_secs().max(1).to_string())
            .args(&host.through)
            .args(&wanted.command)
            .current_dir(wanted.folder())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            // `timeout` signals its whole group at the end, and so do we.
            .process_group(0);
        // SAFETY: between fork and exec only `sigprocmask` is called, which is async-signal-safe.
        unsafe {
            // A job would inherit that its launcher blocks SIGTERM, with which `give_back` ends it.
            command.pre_exec(|| {
                let none = SigSet::empty();
                Ok(sigprocmask(SigmaskHow::SIG_SETMASK, Some(&none), None)?)
            });
        }
        let mut child = command.spawn()?;
        let process = child.id() as i32;
        // Somebody has to wait for it; if this process ends before, init does.
        std::thread::spawn(move || child.wait());
        Ok(process)
    }
}

fn of(path: &Path, error: io::Error) -> BatchError {
    BatchError::System {
        what: path.display().to_string(),
        error,
    }
}

impl Record {
    fn is_running(&self) -> bool {
        started_ticks(self.process) == Some(self.started_ticks)
    }
}

/// Field 22 of `/proc/PID/stat` (proc_pid_stat(5)); `None`: it has ended.
fn started_ticks(process: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The command's name, in brackets, may have anything in it.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18)?.parse().ok())?
}

impl BatchSystem for Local {
    fn name(&self) -> &'static str {
        "local"
    }

    fn ask(&self, wanted: &Wanted) -> Result<JobId, BatchError> {
        let numbers = self.numbers()?;
        let running = |number: &u64| {
            let id = JobId::new(&number.to_string())?;
            let record = self.record(&id).ok()??;
            record.is_running().then_some(record.host)
        };
        let taken: Vec<String> = numbers.iter().filter_map(running).collect();
        let free = self.hosts.iter().find(|host| !taken.contains(&host.name));
        let host = free.ok_or_else(|| BatchError::Refused {
            system: SYSTEM,
            said: match self.hosts.len() {
                0 => "it has no host".into(),
                all => format!("all of its {all} hosts are in use"),
            },
        })?;
        let time = host
            .time_max
            .map_or(wanted.time, |max| max.min(wanted.time));
        let number = numbers.iter().max().map_or(1, |last| last + 1);
        let started = self.start(host, wanted, time);
        let process = started.map_err(|error| BatchError::System {
            what: format!("cannot start a job on {}", host.name),
            error,
        })?;
        let until = SystemTime::now() + time;
        let since_1970 = until.duration_since(SystemTime::UNIX_EPOCH);
        let record = Record {
            name: wanted.name.clone(),
            host: host.name.clone(),
            process,
            started_ticks: started_ticks(process).unwrap_or(0),
            until: since_1970.unwrap_or_default().as_secs(),
        };
        let id = JobId::new(&number.to_string()).ok_or(BatchError::Unreadable {
            command: "timeout",
            said: number.to_string(),
        })?;
        let written = serde_json::to_vec(&record).map_err(io::Error::other);
        let path = self.path(&id);
        // Whole or not there, whenever this process ends.
        let new = path.with_extension("new");
        let write = |bytes: Vec<u8>| fs::write(&new, bytes).and_then(|()| fs::rename(&new, &path));
        if let Err(error) = written.and_then(write) {
            let _ = killpg(Pid::from_raw(process), Signal::SIGKILL);
            return Err(of(&path, error));
        }
        Ok(id)
    }

    fn jobs(&self, ids: &[JobId]) -> Result<BTreeMap<JobId, Job>, BatchError> {
        let job = |id: &JobId| {
            let job = match self.record(id)? {
                Some(record) if record.is_running() => Job::Runs {
                    until: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(record.until)),
                    host: record.host,
                },
                Some(_) => Job::Ended {
                    how: "its process has ended".into(),
                },
                None => Job::Ended {
                    how: "it is not known".into(),
                },
            };
            Ok((id.clone(), job))
        };
        ids.iter().map(job).collect()
    }

    fn names(&self) -> Result<Vec<(String, JobId)>, BatchError> {
        let mut named = Vec::new();
        for number in self.numbers()? {
            let Some(id) = JobId::new(&number.to_string()) else {
                continue;
            };
            let record = self.record(&id)?.filter(Record::is_running);
            named.extend(record.map(|record| (record.name, id)));
        }
        Ok(named)
    }

    fn extend(&self, _: &JobId, _: SystemTime) -> Result<(), BatchError> {
        Err(BatchError::NoExtension { system: SYSTEM })
    }

    fn give_back(&self, id: &JobId) -> Result<(), BatchError> {
        if let Some(record) = self.record(id)?.filter(Record::is_running) {
            // `timeout` passes it on, and KILL follows.
            let _ = killpg(Pid::from_raw(record.process), Signal::SIGTERM);
        }
        Ok(())
    }
}
