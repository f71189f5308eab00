//! The same things are asked of each batch system: Slurm and Grid Engine as they are, each with
//! hosts in network namespaces that the test makes, and a list of hosts.
//!
//! Needs `unshare` with user namespaces and Slurm (Debian: slurm-wlm), or root and Grid Engine
//! (gridengine-master, -exec, -client); what is not there is skipped, and says so.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use nix::sys::signal::{SigSet, Signal};
use weft_batch::{
    BatchError, BatchSystem, GridEngine, Job, JobId, Local, LocalHost, Slurm, Wanted,
};
use weft_test_support::{Folder, skipped};

/// In a site, a test runs once more, as a child of the script that has made the site.
const INSIDE: &str = "WEFT_BATCH_SITE";
/// Longer than any of the systems takes for one step.
const BOUND: Duration = Duration::from_secs(60);
/// For this time hosts are asked for.
const TIME: Duration = Duration::from_secs(120);

/// Slurm rounds a time up to minutes.
const UNIT_MAX: Duration = Duration::from_secs(60);
/// Slurm looks at limits every 30 s (`src/slurmctld/controller.c`).
const COARSENESS: Duration = Duration::from_secs(60);

/// A job that says which signals it gets, and ends with TERM and USR2.
const JOB: &str = "trap 'echo got USR1' USR1; trap 'echo got USR2; exit' USR2; \
                   trap 'echo got TERM; exit' TERM; echo began in $(pwd); \
                   while :; do sleep 0.05; done";

struct Site<'a> {
    system: &'a dyn BatchSystem,
    folder: PathBuf,
    options: Vec<OsString>,
    hosts: usize,
}

impl Site<'_> {
    fn wanted(&self, name: &str, script: &str) -> Wanted {
        Wanted {
            name: name.into(),
            time: TIME,
            warning: Duration::from_secs(30),
            command: ["/bin/sh", "-c", script].map(OsString::from).into(),
            output: self.folder.join(name),
            options: self.options.clone(),
        }
    }

    fn ask(&self, name: &str, script: &str) -> JobId {
        self.system.ask(&self.wanted(name, script)).unwrap()
    }

    fn job(&self, id: &JobId) -> Job {
        let mut jobs = self.system.jobs(std::slice::from_ref(id)).unwrap();
        jobs.remove(id).expect("each job is in the answer")
    }

    /// Jobs whose names begin so.
    fn named(&self, name: &str) -> Vec<(String, JobId)> {
        let mut named = self.system.names().unwrap();
        named.retain(|(its, _)| its.starts_with(name));
        named
    }

    /// Waits until `wanted` has a value for the job.
    fn until<T>(&self, id: &JobId, what: &str, wanted: impl Fn(&Job) -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            let job = self.job(id);
            if let Some(value) = wanted(&job) {
                return value;
            }
            assert!(begun.elapsed() < BOUND, "job {id} {what}: {job:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn runs(&self, id: &JobId) -> (String, SystemTime) {
        self.until(id, "runs", |job| match job {
            Job::Runs { host, until } => Some((host.clone(), (*until)?)),
            _ => None,
        })
    }

    fn ends(&self, id: &JobId) -> String {
        self.until(id, "ends", |job| match job {
            Job::Ended { how } => Some(how.clone()),
            _ => None,
        })
    }

    fn says(&self, name: &str, text: &str) {
        let begun = Instant::now();
        loop {
            let said = fs::read_to_string(self.folder.join(name)).unwrap_or_default();
            if said.contains(text) {
                return;
            }
            assert!(begun.elapsed() < BOUND, "{name}: no {text:?} in {said:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn contract(site: &Site<'_>) {
    // A job that ends by itself.
    let short = site.ask("short", "echo it\\'s $((6 * 7))");
    site.ends(&short);
    site.says("short", "it's 42");

    // One host each, and an end that is not later than what was asked for, rounded up.
    let asked = SystemTime::now();
    let ids: Vec<JobId> = (0..site.hosts)
        .map(|n| site.ask(&format!("job{n}"), JOB))
        .collect();
    let mut hosts = BTreeSet::new();
    for (id, name) in ids.iter().zip(["job0", "job1", "job2", "job3"]) {
        let (host, until) = site.runs(id);
        assert!(hosts.insert(host.clone()), "{host} is of two jobs");
        let time = until.duration_since(asked).unwrap();
        let longest = TIME + UNIT_MAX + BOUND;
        assert!(time > TIME / 2 && time < longest, "{name}: {time:?}");
        site.says(name, &format!("began in {}", site.folder.display()));
    }
    let all = site.system.jobs(&ids).unwrap();
    assert_eq!(all.len(), site.hosts);
    // By its whole name, while it is there.
    let named = site.named("job");
    assert_eq!(named.len(), site.hosts, "{named:?}");
    assert!(
        named.contains(&("job0".into(), ids[0].clone())),
        "{named:?}"
    );
    assert_eq!(site.named("short"), [], "it has ended");
    assert!(
        all.values().all(|job| matches!(job, Job::Runs { .. })),
        "{all:?}"
    );

    // No host is left: it waits, or is refused.
    match site.system.ask(&site.wanted("more", JOB)) {
        Ok(more) => {
            site.until(&more, "waits", |job| {
                matches!(job, Job::Waits { .. }).then_some(())
            });
            assert_eq!(site.named("more"), [("more".into(), more.clone())]);
            site.system.give_back(&more).unwrap();
            site.ends(&more);
        }
        Err(BatchError::Refused { .. }) => {}
        Err(error) => panic!("{error}"),
    }

    // What is given back gets a signal, and its host is free again.
    site.system.give_back(&ids[0]).unwrap();
    site.ends(&ids[0]);
    site.says("job0", "got ");
    site.system.give_back(&ids[0]).unwrap();
    let again = site.ask("again", JOB);
    let (host, _) = site.runs(&again);
    assert!(hosts.contains(&host));
    for id in ids.iter().chain([&again]) {
        site.system.give_back(id).unwrap();
    }
    for id in ids.iter().chain([&again]) {
        site.ends(id);
    }

    // A job that there never was has ended.
    let strange = JobId::new("999999").unwrap();
    assert!(matches!(site.job(&strange), Job::Ended { .. }));
    site.system.give_back(&strange).unwrap();
}

/// Runs this test once more, in a site that `script` makes. `false`: this is the run inside.
fn in_site(test: &str, script: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return false;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(script);
    let folder = Folder::new("batch");
    // The site's user may not get to where this program is.
    let program = folder.path().join("contract");
    // Another process writes what is executed: a child that another thread forks just now has a
    // copy of what this one has open, and Linux executes no file that is open for writing.
    let mut cp = Command::new("cp");
    let copied = cp.arg(std::env::current_exe().unwrap()).arg(&program);
    assert!(copied.status().unwrap().success());
    let outcome = Command::new(script)
        .arg(folder.path().join("site"))
        .arg(&program)
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env(INSIDE, folder.path().join("site"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&outcome.stdout);
    let error = String::from_utf8_lossy(&outcome.stderr);
    assert!(outcome.status.success(), "{said}\n{error}");
    assert!(said.contains("1 passed"), "{said}");
    true
}

fn site_folder() -> PathBuf {
    std::env::var_os(INSIDE).unwrap().into()
}

fn has(command: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/usr/lib/gridengine"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(more)
        .any(|folder| folder.join(command).exists())
}

/// In a site of Slurm's; `None`: this host cannot make one, or the test has run in one.
fn slurm(test: &str) -> Option<Site<'static>> {
    if !has("slurmctld") || !has("slurmd") {
        skipped(&"slurmctld is not installed");
        return None;
    }
    let can = Command::new("unshare")
        .args(["-Urnmp", "--fork", "true"])
        .status();
    if !can.is_ok_and(|status| status.success()) {
        skipped(&"no user namespaces here");
        return None;
    }
    let is_inside = !in_site(test, "slurm-site");
    is_inside.then(|| Site {
        system: &Slurm,
        folder: site_folder().join("run"),
        options: Vec::new(),
        hosts: 4,
    })
}

#[test]
#[ignore = "half a minute: Slurm looks at limits every 30 s"]
fn slurm_warns_before_the_end() {
    let Some(site) = slurm("slurm_warns_before_the_end") else {
        return;
    };
    let id = site.ask("warned", JOB);
    site.runs(&id);
    let sooner = SystemTime::now() + Duration::from_secs(50);
    Slurm.extend(&id, sooner).unwrap();
    // Asked for 30 s before the end, and up to a minute earlier.
    site.says("warned", "got USR1");
    assert!(matches!(site.job(&id), Job::Runs { .. }));
    site.says("warned", "got TERM");
    site.ends(&id);
    let late = SystemTime::now().duration_since(sooner).unwrap_or_default();
    assert!(late < COARSENESS, "{late:?}");
}

#[test]
fn slurm_gives_hosts_for_a_time() {
    let Some(site) = slurm("slurm_gives_hosts_for_a_time") else {
        return;
    };
    // The user has other jobs, too: an array that waits has a name that no job of ours has.
    let array = ["--array=1-3", "--hold", "--wrap=true"];
    assert!(
        Command::new("sbatch")
            .args(array)
            .status()
            .unwrap()
            .success()
    );
    contract(&site);

    // The end is a fact that changes.
    let id = site.ask("sooner", JOB);
    let (_, first) = site.runs(&id);
    let sooner = SystemTime::now() + Duration::from_secs(50);
    Slurm.extend(&id, sooner).unwrap();
    let (_, until) = site.runs(&id);
    assert!(until < first, "{until:?} {first:?}");
    let off = until
        .duration_since(sooner)
        .unwrap_or_else(|early| early.duration());
    assert!(off < Duration::from_secs(2), "{off:?}");

    // Bad requests say why.
    let mut strange = site.wanted("strange", JOB);
    strange.options = vec!["--partition=nowhere".into()];
    let refused = Slurm.ask(&strange).unwrap_err().to_string();
    assert!(refused.contains("invalid partition"), "{refused}");

    // The server is down: what runs goes on, and is known again afterwards.
    let pid = fs::read_to_string(site_folder().join("slurmctld.pid")).unwrap();
    assert!(
        Command::new("kill")
            .arg(pid.trim())
            .status()
            .unwrap()
            .success()
    );
    let begun = Instant::now();
    let silent = loop {
        match Slurm.jobs(std::slice::from_ref(&id)) {
            Err(error) => break error,
            Ok(_) => assert!(begun.elapsed() < BOUND),
        }
    };
    assert!(matches!(silent, BatchError::Silent { .. }), "{silent}");
    assert!(Command::new("slurmctld").status().unwrap().success());
    let begun = Instant::now();
    while Slurm.jobs(std::slice::from_ref(&id)).is_err() {
        assert!(begun.elapsed() < BOUND);
    }
    assert!(
        matches!(site.job(&id), Job::Runs { .. }),
        "{:?}",
        site.job(&id)
    );
    Slurm.give_back(&id).unwrap();
    site.ends(&id);
}

#[test]
fn grid_engine_gives_hosts_for_a_time() {
    if !has("sge_qmaster") || !has("sge_execd") {
        skipped(&"sge_qmaster is not installed");
        return;
    }
    let is_inside = std::env::var_os(INSIDE).is_some();
    if !is_inside && !nix::unistd::geteuid().is_root() {
        skipped(&"it needs root");
        return;
    }
    if in_site("grid_engine_gives_hosts_for_a_time", "gridengine-site") {
        return;
    }
    let site = Site {
        system: &GridEngine,
        folder: site_folder().join("jobs"),
        options: ["-pe", "weft", "2"].map(OsString::from).into(),
        hosts: 3,
    };
    contract(&site);
    let mut strange = site.wanted("strange", JOB);
    strange.options = ["-pe", "nowhere", "2"].map(OsString::from).into();
    let refused = GridEngine.ask(&strange).unwrap_err();
    assert!(matches!(refused, BatchError::Refused { .. }), "{refused}");
    assert!(refused.to_string().contains("nowhere"), "{refused}");
}

#[test]
fn a_list_gives_hosts_for_a_time() {
    // As a launcher's threads do.
    let mut held = SigSet::empty();
    held.add(Signal::SIGTERM);
    held.thread_block().unwrap();
    let folder = Folder::new("batch");
    let host = |name: &str, time_max| LocalHost {
        name: name.into(),
        through: ["env", "X=1"].map(OsString::from).into(),
        time_max,
    };
    let hosts = vec![host("a", None), host("b", None)];
    let jobs = folder.path().join("jobs");
    let local = Local::new(hosts, &jobs).unwrap();
    let site = Site {
        system: &local,
        folder: folder.path().to_owned(),
        options: Vec::new(),
        hosts: 2,
    };
    contract(&site);

    // An end comes by itself, and another process finds what runs.
    let local = Local::new(vec![host("c", Some(Duration::from_secs(2)))], &jobs).unwrap();
    let site = Site {
        system: &local,
        ..site
    };
    let id = site.ask("ends", JOB);
    let (_, until) = site.runs(&id);
    let again = Local::new(Vec::new(), &jobs).unwrap();
    assert!(matches!(
        again.jobs(std::slice::from_ref(&id)).unwrap()[&id],
        Job::Runs { .. }
    ));
    site.ends(&id);
    let late = SystemTime::now().duration_since(until).unwrap_or_default();
    assert!(late < Duration::from_secs(20), "{late:?}");
    site.says("ends", "got TERM");
    let refused = again
        .ask(&site.wanted("none", JOB))
        .unwrap_err()
        .to_string();
    assert_eq!(refused, "the list of hosts refuses: it has no host");
}
