//! Which processes belong to a user's clusters, and to which job: read from `/proc`.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use serde_json::Value;

pub(crate) use crate::processes::{
    Identity, Process, TAG, all, command_line, describe, heed, read,
};

/// The variable that names an agent's folder to all that it starts.
const FOLDER: &str = "WEFT_MPI_FOLDER";
const LOOK: Duration = Duration::from_millis(100);

/// The value of a variable in a process's environment.
pub fn variable(pid: i32, name: &str) -> Option<String> {
    let bytes = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let begin = format!("{name}=");
    let mut variables = bytes.split(|byte| *byte == 0);
    let found = variables.find(|variable| variable.starts_with(begin.as_bytes()))?;
    Some(String::from_utf8_lossy(&found[begin.len()..]).into_owned())
}

/// What a variable has in a process or, if it has none, in the nearest of its ancestors.
fn inherited(processes: &HashMap<i32, Process>, pid: i32, name: &str) -> Option<String> {
    let mut at = pid;
    for _ in 0..64 {
        if let Some(value) = variable(at, name) {
            return Some(value);
        }
        at = processes.get(&at)?.parent;
    }
    None
}

/// All processes by their numbers.
fn by_number() -> HashMap<i32, Process> {
    let all = all().into_iter();
    all.map(|process| (process.identity.pid, process)).collect()
}

/// Those that have the tag, or descend from one that has.
pub fn tagged_pids(tag: &str) -> Vec<i32> {
    let processes = by_number();
    let is_tagged = |pid: &i32| inherited(&processes, *pid, TAG).as_deref() == Some(tag);
    processes.keys().copied().filter(is_tagged).collect()
}

pub fn tagged(tag: &str) -> Vec<String> {
    let pids = tagged_pids(tag).into_iter();
    pids.filter_map(|pid| Some(describe(&read(pid)?))).collect()
}

/// The agents of a user: each by its folder, with its number.
pub fn agents(tag: &str) -> BTreeMap<String, i32> {
    let pids = tagged_pids(tag).into_iter();
    let agents = pids.filter(|pid| command_line(*pid).contains(" mpi host "));
    let with_folder = |pid: i32| Some((variable(pid, FOLDER)?, pid));
    agents.filter_map(with_folder).collect()
}

/// Looks each 100 ms at what belongs to which job, and whether something outlives its job's end
/// as the list of hosts noted it.
pub struct Observer {
    stops: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone, Default)]
pub struct Seen {
    /// Jobs that had machines.
    pub jobs: BTreeMap<PathBuf, Job>,
    /// What lived when it should not.
    pub overruns: Vec<String>,
}

#[derive(Clone, Debug)]
pub struct Job {
    process: Identity,
    /// Seconds since 1970.
    until: f64,
    /// When a machine was seen there last, before the end: seconds.
    pub machines_until: Option<f64>,
    /// Whether it ended by its end's time, and not earlier.
    pub ran_out: bool,
}

impl Observer {
    /// Of all clusters of a user.
    pub fn start(tag: &str, state: &Path) -> Observer {
        let (stops, seen) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (tag, state) = (tag.to_owned(), state.to_owned());
        let thread = {
            let (stops, seen): (_, Arc<Mutex<Seen>>) = (stops.clone(), Arc::clone(&seen));
            thread::spawn(move || {
                // Whose job a process is: also when its parents have ended.
                let mut jobs_of = HashMap::new();
                while !stops.load(Ordering::Acquire) {
                    look(&tag, &state, &mut jobs_of, &seen);
                    thread::sleep(LOOK);
                }
            })
        };
        Observer {
            stops,
            seen,
            thread: Some(thread),
        }
    }

    pub fn seen(&self) -> Seen {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.clone()
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn look(tag: &str, state: &Path, jobs_of: &mut HashMap<Identity, PathBuf>, seen: &Mutex<Seen>) {
    let now = SystemTime::now();
    let now = now
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64();
    let processes = by_number();
    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    for (path, job) in records(state) {
        seen.jobs.entry(path).or_insert(job);
    }
    // The folders of agents that descend from a job's process.
    let of_process: HashMap<Identity, PathBuf> = {
        let jobs = seen.jobs.iter();
        jobs.map(|(path, job)| (job.process, path.clone()))
            .collect()
    };
    let mut folders = HashMap::new();
    let job_of = |pid: i32| {
        let mut at = pid;
        for _ in 0..64 {
            let process = processes.get(&at)?;
            if let Some(job) = of_process.get(&process.identity) {
                return Some(job.clone());
            }
            at = process.parent;
        }
        None
    };
    for pid in processes.keys() {
        if command_line(*pid).contains(" mpi host ")
            && variable(*pid, TAG).as_deref() == Some(tag)
            && let (Some(job), Some(folder)) = (job_of(*pid), variable(*pid, FOLDER))
        {
            folders.insert(folder, job);
        }
    }
    for (pid, process) in &processes {
        if !jobs_of.contains_key(&process.identity)
            && let Some(folder) = inherited(&processes, *pid, FOLDER)
            && let Some(job) = folders.get(&folder)
        {
            jobs_of.insert(process.identity, job.clone());
        }
    }
    let Seen { jobs, overruns } = &mut *seen;
    for (pid, process) in &processes {
        let job = jobs_of.get(&process.identity);
        let Some((path, job)) = job.and_then(|path| Some((path, jobs.get_mut(path)?))) else {
            continue;
        };
        let line = command_line(*pid);
        if process.name.contains("weft-monitor") || line.contains("weft-monitor") {
            job.machines_until = Some(job.until - now);
            // The agent ends what is left of machines half a second before.
            if now > job.until {
                overruns.push(format!(
                    "{:.1} s after the end of job {}: {}",
                    now - job.until,
                    path.display(),
                    describe(process)
                ));
            }
        }
        // The record is in whole seconds.
        if now > job.until + 1.0 {
            overruns.push(format!(
                "job {} has ended: {}",
                path.display(),
                describe(process)
            ));
        }
        job.ran_out |= now > job.until - 2.0;
    }
}

/// All jobs of all clusters of a user that are there now.
fn records(state: &Path) -> Vec<(PathBuf, Job)> {
    let mut found = Vec::new();
    for cluster in fs::read_dir(state).into_iter().flatten().flatten() {
        let jobs = fs::read_dir(cluster.path().join("jobs"));
        for entry in jobs.into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|extension| extension != "job") {
                continue;
            }
            let record = fs::read(&path).ok();
            let record = record.and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
            let Some(record) = record else { continue };
            let (Some(pid), Some(start), Some(until)) = (
                record["process"].as_i64(),
                record["started_ticks"].as_u64(),
                record["until"].as_f64(),
            ) else {
                continue;
            };
            let job = Job {
                // The kernel gives a process's number to another one later.
                process: Identity {
                    pid: pid as i32,
                    start,
                },
                until,
                machines_until: None,
                ran_out: false,
            };
            found.push((path, job));
        }
    }
    found
}
