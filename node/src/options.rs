//! What a run is asked to be: parsed by the command line, checked by
//! [`crate::launch`] before anything starts.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use weft_proc::boot::{JUMP_AUTO, JUMP_FIXED, JUMP_NEVER};

/// The least memory a node can lend: one workable set of pages (the code, the
/// stack and the data that one instruction and one system call touch, with room
/// to read ahead).
pub const MEMORY_BYTES_MIN: u64 = 256 * crate::size::PAGE_BYTES;
/// The shortest lease: below it a busy host looks like a dead one.
pub const LEASE_MIN: Duration = Duration::from_millis(500);
/// The longest lease.
pub const LEASE_MAX: Duration = Duration::from_secs(600);
/// Most pages read ahead of one fault: a chunk.
pub const READ_AHEAD_PAGES_MAX: u32 = 512;
/// Longest busy wait: beyond it a blocked thread is always cheaper.
pub const SPIN_MAX: Duration = Duration::from_millis(10);

/// Where the aggregate's nodes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// This many nodes, home included, all on this host, started by the launcher.
    Embedded(usize),
    /// Home here, and one slice on each of these hosts (`HOST` or `HOST:PORT`).
    Remote(Vec<String>),
}

impl Placement {
    /// Nodes in the aggregate, home included.
    pub fn nodes(&self) -> usize {
        match self {
            Placement::Embedded(nodes) => *nodes,
            Placement::Remote(hosts) => hosts.len() + 1,
        }
    }
}

/// When the execution follows its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Jump {
    /// Learned from whether the last jumps paid.
    Auto,
    /// Never: pages always come to the execution.
    Never,
    /// After this many remote faults.
    After(u32),
}

impl Jump {
    /// The policy and its threshold as a runtime is told.
    pub fn to_boot(self) -> (u32, u32) {
        match self {
            Jump::Auto => (JUMP_AUTO, 0),
            Jump::Never => (JUMP_NEVER, 0),
            Jump::After(faults) => (JUMP_FIXED, faults),
        }
    }
}

/// A text that is no jump policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("use `auto`, `never`, or a number of remote faults of 1 or more")]
pub struct NoJump;

impl std::str::FromStr for Jump {
    type Err = NoJump;
    fn from_str(text: &str) -> Result<Jump, NoJump> {
        match text {
            "auto" => Ok(Jump::Auto),
            "never" => Ok(Jump::Never),
            count => match count.parse::<u32>() {
                Ok(faults) if faults > 0 => Ok(Jump::After(faults)),
                _ => Err(NoJump),
            },
        }
    }
}

/// How nodes on one host are connected. Between hosts it is always sealed TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Rings in shared memory.
    Ring,
    /// A UNIX socket.
    Unix,
    /// TCP over loopback, unencrypted.
    Tcp,
    /// TCP over loopback, sealed as it would be between hosts.
    TcpSealed,
}

/// What a run is asked to be.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// The program, as typed: a path, or a name to look up in `PATH`.
    pub program: OsString,
    /// Its arguments, without its name.
    pub arguments: Vec<OsString>,
    /// Where the nodes are.
    pub placement: Placement,
    /// Each node's budget for the program's pages, bytes. One value holds for
    /// every node; none means half of what each host has free.
    pub memory_bytes: Vec<u64>,
    /// What stays free of this host's memory for its owner, bytes; none means what the
    /// configuration says, if nodes are on other hosts.
    pub keep_free_bytes: Option<u64>,
    /// When the execution follows its pages.
    pub jump: Jump,
    /// How embedded nodes are connected.
    pub transport: Transport,
    /// Most pages read ahead of a sequential fault.
    pub read_ahead_pages: u32,
    /// Longest busy wait for a reply.
    pub spin: Duration,
    /// Silence after which a node counts as lost.
    pub lease: Duration,
    /// Stretch at start instead of when the budget is passed.
    pub stretch_now: bool,
    /// Where keys and the list of trusted nodes are; see
    /// [`crate::config::directory`].
    pub configuration: Option<PathBuf>,
}

impl RunOptions {
    /// A run of `program` with everything else at its default.
    pub fn new(program: impl Into<OsString>) -> RunOptions {
        RunOptions {
            program: program.into(),
            arguments: Vec::new(),
            placement: Placement::Embedded(2),
            memory_bytes: Vec::new(),
            keep_free_bytes: None,
            jump: Jump::Auto,
            transport: Transport::Ring,
            read_ahead_pages: 128,
            spin: Duration::from_micros(50),
            lease: Duration::from_secs(5),
            stretch_now: false,
            configuration: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jump_is_read() {
        assert_eq!("auto".parse(), Ok(Jump::Auto));
        assert_eq!("never".parse(), Ok(Jump::Never));
        assert_eq!("32".parse(), Ok(Jump::After(32)));
        assert!("0".parse::<Jump>().is_err());
        assert!("often".parse::<Jump>().is_err());
    }

    #[test]
    fn home_counts_as_a_node() {
        assert_eq!(Placement::Embedded(3).nodes(), 3);
        assert_eq!(Placement::Remote(vec!["a".into(), "b".into()]).nodes(), 3);
    }
}
