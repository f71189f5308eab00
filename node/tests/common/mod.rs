//! Running the launcher and daemons as processes of their own.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, SigSet, Signal, raise};
use weft_node::config::{self, May, Peer};
use weft_wire::keys::PublicKey;

const BOUND: Duration = Duration::from_secs(30);

/// The directory of all tests of this process; it is removed when the process ends.
fn directory() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    extern "C" fn remove() {
        if let Some(directory) = DIRECTORY.get() {
            // Nobody is left to tell.
            let _ = fs::remove_dir_all(directory);
        }
    }
    DIRECTORY.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("weft-test-{}", std::process::id()));
        // Of a process that had this number before.
        let _ = fs::remove_dir_all(&path);
        weft_node::rundir::prepare(&path).unwrap();
        // SAFETY: the function is there until the process ends, and does not unwind.
        assert_eq!(unsafe { libc::atexit(remove) }, 0);
        path
    })
}

/// A directory of this test's own.
pub fn scratch(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = directory().join(format!("{number}-{name}"));
    weft_node::rundir::prepare(&path).unwrap();
    path
}

pub fn kill(pid: i32, signal: i32) {
    // SAFETY: a process that this test started.
    unsafe { libc::kill(pid, signal) };
}

/// Whether a process exists and is not a zombie.
pub fn alive(pid: i32) -> bool {
    state(pid).is_some_and(|state| state != 'Z')
}

/// The letter that `/proc` has for what a process does.
fn state(pid: i32) -> Option<char> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit(')').next()?.trim_start().chars().next()
}

fn children(pid: i32) -> Vec<(i32, String)> {
    let mut children = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let list = fs::read_to_string(task.path().join("children")).unwrap_or_default();
        for child in list.split_whitespace() {
            let line = fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
            let name =
                String::from_utf8_lossy(line.split(|b| *b == 0).next().unwrap()).into_owned();
            children.push((child.parse().unwrap(), name));
        }
    }
    children
}

fn slices_of(pid: i32) -> Vec<i32> {
    children(pid)
        .into_iter()
        .filter(|(_, name)| name == "weft-slice")
        .map(|(pid, _)| pid)
        .collect()
}

fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().join("../examples").join(name);
    assert!(path.is_file(), "{} is missing", path.display());
    path
}

/// A process that plays `case`; see `examples/case.rs`.
fn command(case: &str, directory: &Path) -> Command {
    let mut command = Command::new(example("case"));
    command
        .env("WEFT_TEST_CASE", case)
        .env("WEFT_RUNTIME", example("fake_runtime"))
        .env("XDG_RUNTIME_DIR", directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

/// A memory cgroup with a limit, or the reason why it cannot be created.
pub struct Group(pub PathBuf);

impl Group {
    pub fn new(bytes: u64) -> Result<Group, std::io::Error> {
        let first = Path::new("/sys/fs/cgroup/memory");
        let (parent, limit) = match first.is_dir() {
            true => (first, "memory.limit_in_bytes"),
            false => (Path::new("/sys/fs/cgroup"), "memory.max"),
        };
        let path = parent.join(format!("weft-test-{}", std::process::id()));
        fs::create_dir(&path)?;
        let group = Group(path);
        // Not created: a group without the controller lacks the file.
        let file = fs::OpenOptions::new().write(true).open(group.0.join(limit));
        file?.write_all(bytes.to_string().as_bytes())?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Empty by now, or somebody looks at why it is not.
        let _ = fs::remove_dir(&self.0);
    }
}

/// One run of the launcher, to be.
pub struct Run {
    script: String,
    nodes: usize,
    hosts: Vec<String>,
    memory_bytes: u64,
    configuration: Option<PathBuf>,
    group: Option<PathBuf>,
    pending: Option<Signal>,
}

impl Run {
    pub fn new(script: &str) -> Run {
        Run {
            script: script.to_owned(),
            nodes: 2,
            hosts: Vec::new(),
            memory_bytes: 2 << 20,
            configuration: None,
            group: None,
            pending: None,
        }
    }

    /// With a signal that waits for the launcher from its first instruction on.
    pub fn pending(mut self, signal: Signal) -> Run {
        self.pending = Some(signal);
        self
    }

    /// In a cgroup.
    pub fn within(mut self, group: &Path) -> Run {
        self.group = Some(group.join("cgroup.procs"));
        self
    }

    pub fn nodes(mut self, nodes: usize) -> Run {
        self.nodes = nodes;
        self
    }

    pub fn memory(mut self, bytes: u64) -> Run {
        self.memory_bytes = bytes;
        self
    }

    pub fn configuration(mut self, directory: &Path) -> Run {
        self.configuration = Some(directory.to_owned());
        self
    }

    /// On these hosts, trusted both ways unless a configuration was given.
    pub fn on(mut self, hosts: &[Host]) -> Run {
        self.hosts = hosts.iter().map(|host| host.address.clone()).collect();
        if self.configuration.is_none() {
            let directory = scratch("launcher");
            fs::copy(
                hosts[0].launcher.join(config::KEY_FILE),
                directory.join(config::KEY_FILE),
            )
            .unwrap();
            fs::write(directory.join(config::CONFIG_FILE), "").unwrap();
            hosts.iter().for_each(|host| host.trust_in(&directory));
            self.configuration = Some(directory);
        }
        self
    }

    /// Several slices on one host, by the configuration that was given.
    pub fn twice_on(mut self, host: &Host) -> Run {
        self.hosts = vec![host.address.clone(); 2];
        self
    }

    pub fn start(self) -> Running {
        let directory = scratch("run");
        let report = directory.join("report.json");
        let mut command = command("launch", &directory);
        command
            .env("WEFT_TEST_SCRIPT", &self.script)
            .env("WEFT_TEST_NODES", self.nodes.to_string())
            .env("WEFT_TEST_ON", self.hosts.join(","))
            .env("WEFT_TEST_MEMORY", self.memory_bytes.to_string())
            .env("WEFT_TEST_REPORT", &report);
        if let Some(configuration) = &self.configuration {
            command.env("WEFT_CONFIG", configuration);
        }
        if let Some(group) = self.group {
            let group = fs::OpenOptions::new().write(true).open(group).unwrap();
            // SAFETY: writes a byte to a file that is open; nothing is allocated.
            unsafe { command.pre_exec(move || (&group).write_all(b"0")) };
        }
        if let Some(signal) = self.pending {
            let wait = move || {
                // A test that `nohup` runs would pass on that it ignores SIGHUP.
                // SAFETY: the default action is no handler.
                unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl) }?;
                SigSet::from(signal).thread_block()?;
                Ok(raise(signal)?)
            };
            // SAFETY: all calls are safe in a signal handler; nothing is allocated.
            unsafe { command.pre_exec(wait) };
        }
        Running {
            child: command.spawn().unwrap(),
            directory,
            report,
        }
    }
}

/// A launcher that runs.
pub struct Running {
    child: Child,
    directory: PathBuf,
    report: PathBuf,
}

/// How it ended.
pub struct Ran {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub stderr: String,
    pub report: serde_json::Value,
}

impl Running {
    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn run_directory(&self) -> PathBuf {
        self.directory.join("weft")
    }

    pub fn signal(&self, signal: i32) {
        kill(self.pid(), signal);
    }

    /// Waits until home runs beside `count` slices; returns these.
    pub fn wait_for_slices(&self, count: usize) -> Vec<i32> {
        let end = Instant::now() + BOUND;
        loop {
            let slices = slices_of(self.pid());
            if slices.len() == count && self.registered() {
                return slices;
            }
            self.expect_launcher();
            assert!(Instant::now() < end, "slices did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Fails with what the launcher said if it has ended.
    fn expect_launcher(&self) {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        if stat
            .rsplit(") ")
            .next()
            .is_some_and(|rest| rest.starts_with('Z'))
        {
            let stderr = self.child.stderr.as_ref().unwrap().as_fd();
            let mut said = String::new();
            let copy = stderr.try_clone_to_owned().unwrap();
            fs::File::from(copy).read_to_string(&mut said).unwrap();
            let status = stat.split_whitespace().last();
            let report = fs::read_to_string(&self.report).unwrap_or_default();
            panic!("the launcher has ended, wait status {status:?}: {said} {report}");
        }
    }

    /// Waits until the launcher is stopped.
    pub fn wait_until_stopped(&self) {
        let end = Instant::now() + BOUND;
        while state(self.pid()) != Some('T') {
            assert!(Instant::now() < end, "the launcher was not stopped");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until home says that it stretched.
    pub fn wait_for_stretch(&self) {
        let end = Instant::now() + BOUND;
        let stretched = || {
            let views = weft_node::rundir::list(&self.run_directory())
                .unwrap()
                .views;
            views.iter().any(|view| view.stretched)
        };
        while !stretched() {
            assert!(Instant::now() < end, "home did not stretch");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn registered(&self) -> bool {
        weft_node::rundir::list(&self.run_directory()).is_ok_and(|listed| !listed.views.is_empty())
    }

    pub fn wait_for_remote_slices(&self, hosts: &[Host]) -> Vec<i32> {
        let end = Instant::now() + BOUND;
        loop {
            let slices: Vec<i32> = hosts.iter().flat_map(|host| slices_of(host.pid)).collect();
            if slices.len() == hosts.len() && self.registered() {
                return slices;
            }
            self.expect_launcher();
            assert!(Instant::now() < end, "slices did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn home(&self) -> i32 {
        let home = children(self.pid())
            .into_iter()
            .find(|(_, name)| name != "weft-slice");
        home.expect("home runs").0
    }

    pub fn wait(mut self) -> Ran {
        let end = Instant::now() + BOUND;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > end {
                let _ = self.child.kill();
                panic!("the launcher hangs");
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let mut stderr = String::new();
        let mut pipe = self.child.stderr.take().unwrap();
        if status.signal() == Some(libc::SIGKILL) {
            // What a killed launcher leaves may hold the pipe open.
            // SAFETY: sets a flag of a descriptor that is open.
            unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
            let mut bytes = [0; 4096];
            let length = pipe.read(&mut bytes).unwrap_or(0);
            stderr.push_str(&String::from_utf8_lossy(&bytes[..length]));
        } else {
            pipe.read_to_string(&mut stderr).unwrap();
        }
        let report = fs::read(&self.report).ok();
        let report = report.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Ran {
            code: status.code(),
            signal: status.signal(),
            stderr,
            report: report.unwrap_or_default(),
        }
    }
}

/// A daemon on loopback, as a process of its own.
pub struct Host {
    pub address: String,
    pub key: PublicKey,
    /// Key and configuration of a launcher that it trusts.
    pub launcher: PathBuf,
    pid: i32,
    child: std::sync::Mutex<Child>,
}

/// The launcher that may borrow from all hosts of this test process.
pub fn launcher() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let directory = scratch("launcher-key");
        config::init(&directory).unwrap();
        directory
    })
}

pub fn trust(directory: &Path, key: PublicKey, address: &str) {
    let peer = Peer {
        address: Some(address.to_owned()),
        ..Peer::new(address, key, May::Lend)
    };
    config::trust(directory, &peer).unwrap();
}

/// What a host lends that is not to run out.
pub const LENT_BYTES: u64 = 1 << 30;

impl Host {
    pub fn start(name: &str, memory_bytes: u64) -> Host {
        Host::start_knowing(name, memory_bytes, &[])
    }

    /// One that can make links to these others, too.
    pub fn start_knowing(name: &str, memory_bytes: u64, others: &[&Host]) -> Host {
        let directory = scratch(name);
        config::init(&directory).unwrap();
        let launcher = config::load_keys(launcher()).unwrap().public();
        config::trust(&directory, &Peer::new("launcher", launcher, May::Borrow)).unwrap();
        others.iter().for_each(|other| other.trust_in(&directory));
        Host::start_in(&directory, memory_bytes)
    }

    /// One with the key and configuration of `directory`.
    pub fn start_in(directory: &Path, memory_bytes: u64) -> Host {
        let key = config::load_keys(directory).unwrap().public();
        let launcher = launcher().to_owned();
        let file = directory.join("address");
        let child = command("daemon", directory)
            .env("WEFT_CONFIG", directory)
            .env("WEFT_TEST_MEMORY", memory_bytes.to_string())
            .env("WEFT_TEST_ADDRESS", &file)
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let end = Instant::now() + BOUND;
        let address = loop {
            match fs::read_to_string(&file) {
                Ok(address) if address.ends_with('\n') => break address.trim().to_owned(),
                _ => assert!(Instant::now() < end, "the daemon did not start"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        Host {
            address,
            key,
            launcher,
            pid: child.id() as i32,
            child: child.into(),
        }
    }

    pub fn trust_in(&self, directory: &Path) {
        trust(directory, self.key, &self.address);
    }

    pub fn signal(&self, signal: i32) {
        kill(self.pid, signal);
    }

    pub fn wait_end(&self, bound: Duration) {
        let end = Instant::now() + bound;
        while self.child.lock().unwrap().try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "the daemon did not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn kill(&self) {
        self.signal(libc::SIGKILL);
        self.wait_end(BOUND);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let mut child = self.child.lock().unwrap();
        let _ = child.kill();
        let _ = child.wait();
    }
}
