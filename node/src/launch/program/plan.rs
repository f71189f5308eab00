//! Checking a run before anything starts: every refusal is its own error.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use weft_proc::boot::MAX_NODES;
use weft_wire::hello::{self, Hello, Mismatch};

use crate::config::{self, Config};
use crate::control;
use crate::error::LaunchError;
use crate::host;
use crate::launch::nodes::node_name;
use crate::launch::workload::Workload;
use crate::links::{self, Links, ProgramSettings};
use crate::options::{
    LEASE_MAX, LEASE_MIN, MEMORY_BYTES_MIN, Placement, READ_AHEAD_PAGES_MAX, RunOptions, SPIN_MAX,
    Transport,
};
use crate::program::{self, Program};
use crate::protocol::DaemonRequest;
use crate::remote::Identity;
use crate::rundir;
use crate::said::Spoken;
use crate::shared::SharedMemory;
use crate::size::{PAGE_BYTES, format_bytes};
use crate::spawn::{Executable, Process, ProgramKind, Role, StartError};

/// The name of a local slice in a process list.
const SLICE_NAME: &str = "weft-slice";
/// Program paths longer than this do not fit into the boot packet.
const PROGRAM_PATH_BYTES_MAX: usize = 4095;

/// A run that was checked.
#[derive(Debug)]
pub struct ProgramPlan {
    /// What to load.
    pub program: Program,
    /// The runtime binary.
    pub runtime: Executable,
    /// Where running aggregates can be found.
    pub run_directory: PathBuf,
    /// What every runtime is told alike. Budgets of remote nodes are zero until
    /// their hosts have said what they have, where the user gave none.
    pub settings: ProgramSettings,
    /// What stays free of this host's memory for its owner; 0: nothing is kept.
    pub keep_free_bytes: u64,
    /// The options as given.
    pub options: RunOptions,
}

impl ProgramPlan {
    /// Checks everything that can be checked on this host.
    pub fn check(options: &RunOptions) -> Result<ProgramPlan, LaunchError> {
        check_ranges(options)?;
        let budget_pages = budgets(options)?;
        let program = program::resolve(
            &options.program,
            &options.arguments,
            std::env::var_os("PATH").as_deref(),
        )?;
        if program.path.as_os_str().len() > PROGRAM_PATH_BYTES_MAX {
            return Err(LaunchError::NotExecutable {
                path: program.path,
                why: format!("its path is longer than {PROGRAM_PATH_BYTES_MAX} bytes"),
            });
        }
        let runtime = Executable::find(ProgramKind::Runtime)?;
        host::require_dispatch().map_err(LaunchError::NoDispatch)?;
        host::require_userfaultfd().map_err(LaunchError::NoUserfaultfd)?;
        let run_directory = rundir::directory().map_err(LaunchError::RunDirectory)?;
        let (jump, jump_threshold) = options.jump.to_boot();
        Ok(ProgramPlan {
            program,
            runtime,
            run_directory,
            settings: ProgramSettings {
                nodes: options.placement.nodes() as u32,
                jump,
                jump_threshold,
                lease_ms: options.lease.as_millis() as u32,
                spin_ns: options.spin.as_nanos() as u32,
                read_ahead_pages: options.read_ahead_pages,
                stretch_now: options.stretch_now,
                budget_pages,
            },
            keep_free_bytes: keep_free_bytes(options),
            options: options.clone(),
        })
    }
}

fn check_ranges(options: &RunOptions) -> Result<(), LaunchError> {
    let nodes = options.placement.nodes();
    if !(1..=MAX_NODES).contains(&nodes) {
        return Err(LaunchError::NodeCount(nodes));
    }
    if !(LEASE_MIN..=LEASE_MAX).contains(&options.lease) {
        return Err(LaunchError::Option(format!(
            "--lease {} s is not within {} to {} s",
            options.lease.as_secs_f32(),
            LEASE_MIN.as_secs_f32(),
            LEASE_MAX.as_secs()
        )));
    }
    if options.read_ahead_pages > READ_AHEAD_PAGES_MAX {
        return Err(LaunchError::Option(format!(
            "--read-ahead {} is more than {READ_AHEAD_PAGES_MAX} pages, one chunk",
            options.read_ahead_pages
        )));
    }
    let total = host::total_memory_bytes();
    if let Some(bytes) = options.keep_free_bytes.filter(|&bytes| bytes >= total) {
        return Err(LaunchError::Option(format!(
            "--keep-free {} is all that this host has, {}",
            format_bytes(bytes),
            format_bytes(total)
        )));
    }
    if options.spin > SPIN_MAX {
        return Err(LaunchError::Option(format!(
            "--spin {} µs is more than {} µs: waiting that long is cheaper asleep",
            options.spin.as_micros(),
            SPIN_MAX.as_micros()
        )));
    }
    Ok(())
}

/// What the user says, else the configuration of this host. Nodes that are all on this host
/// have no need of it, and no configuration.
fn keep_free_bytes(options: &RunOptions) -> u64 {
    let directory = || {
        let given = options.configuration.clone();
        given.unwrap_or_else(config::directory)
    };
    match (options.keep_free_bytes, &options.placement) {
        (Some(bytes), _) => bytes,
        (None, Placement::Embedded(_)) => 0,
        // One that cannot be used is an error of its own, soon.
        (None, Placement::Remote(_)) => {
            Config::load(&directory()).map_or(0, |config| config.keep_free_bytes)
        }
    }
}

/// Each node's budget. Embedded nodes share this host's free memory where the
/// user gives no budget; remote ones are asked, so theirs stay zero here.
fn budgets(options: &RunOptions) -> Result<[u64; MAX_NODES], LaunchError> {
    let nodes = options.placement.nodes();
    let given = &options.memory_bytes;
    if given.len() > 1 && given.len() != nodes {
        return Err(LaunchError::MemoryCount {
            given: given.len(),
            nodes,
        });
    }
    let mut pages = [0; MAX_NODES];
    for (node, pages) in pages.iter_mut().enumerate().take(nodes) {
        let bytes = match (given.as_slice(), &options.placement) {
            ([], Placement::Embedded(nodes)) => host::available_memory_bytes() / 2 / *nodes as u64,
            ([], Placement::Remote(_)) if node == 0 => host::available_memory_bytes() / 2,
            ([], Placement::Remote(_)) => continue,
            ([all], _) => *all,
            (each, _) => each[node],
        };
        if bytes < MEMORY_BYTES_MIN {
            return Err(LaunchError::MemoryTooSmall {
                node: node_name(&options.placement, node),
                bytes,
            });
        }
        *pages = bytes / PAGE_BYTES;
    }
    Ok(pages)
}

impl Workload for ProgramPlan {
    type Kept = SharedMemory;
    const PROGRAM: ProgramKind = ProgramKind::Runtime;
    const BEATS: bool = true;

    fn placement(&self) -> &Placement {
        &self.options.placement
    }

    fn transport(&self) -> Transport {
        self.options.transport
    }

    fn lease(&self) -> Duration {
        self.options.lease
    }

    fn executable(&self) -> &Executable {
        &self.runtime
    }

    fn role(&self) -> Role<'_> {
        Role::Slice {
            name: SLICE_NAME,
            confinement: None,
            keeps_errors: true,
            group: None,
        }
    }

    fn keep(&self) -> Result<SharedMemory, LaunchError> {
        SharedMemory::new().map_err(LaunchError::system("make shared memory"))
    }

    fn boot(
        &self,
        process: &mut Process,
        node: u32,
        links: Links,
        shared: &SharedMemory,
    ) -> Result<(), StartError> {
        shared.reset_gauges();
        control::expect_hello(process)?;
        let settings = &self.settings;
        links::send_boot(
            &process.control,
            node,
            settings,
            &links,
            shared.descriptor(),
            &[],
        )
        .map_err(StartError::Settings)
    }

    fn await_ready(&self, process: &mut Process) -> Result<(), StartError> {
        control::expect_ready(process)
    }

    fn hear(control: BorrowedFd<'_>) -> Spoken {
        control::hear(control)
    }

    fn beats(shared: &SharedMemory) -> Option<u32> {
        Some(shared.stats.beats.load(Ordering::Relaxed))
    }

    fn identity(&self) -> Result<Identity, LaunchError> {
        Ok(Identity::load(self.options.configuration.as_deref())?)
    }

    fn fits(&self, ours: &Hello, theirs: &Hello) -> Result<(), Mismatch> {
        hello::check(ours, theirs)
    }

    fn reservation(&self, node: u32) -> DaemonRequest {
        let wanted = self.settings.budget_pages[node as usize];
        DaemonRequest::Open {
            command: self.program.path.display().to_string(),
            node,
            budget_pages: (wanted != 0).then_some(wanted),
            lease_ms: self.settings.lease_ms,
        }
    }

    fn reserved(&mut self, node: u32, budget_pages: u64) {
        self.settings.budget_pages[node as usize] = budget_pages;
    }

    fn order(&self, _node: u32) -> Result<DaemonRequest, LaunchError> {
        Ok(DaemonRequest::Start(Box::new(self.settings)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut RunOptions)) -> String {
        let mut options = RunOptions::new("/bin/true");
        change(&mut options);
        let error = ProgramPlan::check(&options).unwrap_err();
        assert_eq!(error.exit_code(), 125, "{error}");
        error.to_string()
    }

    #[test]
    fn each_option_is_checked() {
        let text = refusal(|o| o.memory_bytes = vec![1 << 20, 4096]);
        assert!(
            text.contains("local 1") && text.contains("1.0 MiB"),
            "{text}"
        );
        let text = refusal(|o| o.memory_bytes = vec![1 << 20; 3]);
        assert!(text.contains("3 budgets for 2 nodes"), "{text}");
        let text = refusal(|o| o.placement = Placement::Embedded(17));
        assert!(text.contains("1 to 16"), "{text}");
        let text = refusal(|o| o.placement = Placement::Embedded(0));
        assert!(text.contains("0 nodes"), "{text}");
        assert!(refusal(|o| o.lease = Duration::from_millis(1)).contains("--lease"));
        assert!(refusal(|o| o.spin = Duration::from_secs(1)).contains("--spin"));
        assert!(refusal(|o| o.keep_free_bytes = Some(u64::MAX)).contains("--keep-free"));
        assert!(refusal(|o| o.read_ahead_pages = 513).contains("--read-ahead"));
    }

    #[test]
    fn a_missing_program_is_127() {
        let error = ProgramPlan::check(&RunOptions::new("no-such-program")).unwrap_err();
        assert_eq!(error.exit_code(), 127);
    }

    #[test]
    fn the_configuration_says_what_stays_free() {
        let path = std::env::temp_dir().join(format!("weft-keeps-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        config::init(&path).unwrap();
        std::fs::write(path.join(config::CONFIG_FILE), "keep_free = \"2G\"\n").unwrap();
        let mut options = RunOptions::new("true");
        options.configuration = Some(path.clone());
        assert_eq!(keep_free_bytes(&options), 0);
        options.placement = Placement::Remote(vec!["alpha".into()]);
        assert_eq!(keep_free_bytes(&options), 2 << 30);
        options.keep_free_bytes = Some(0);
        assert_eq!(keep_free_bytes(&options), 0);
        options.configuration = Some("/nowhere".into());
        options.keep_free_bytes = None;
        assert_eq!(keep_free_bytes(&options), 0);
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn one_budget_holds_for_all() {
        let mut options = RunOptions::new("true");
        options.memory_bytes = vec![1 << 20];
        let pages = budgets(&options).unwrap();
        assert_eq!(&pages[..3], &[256, 256, 0]);
    }
}
