//! Which processes belong to a test, read from `/proc`.
//!
//! A process belongs to a test when its session is the test's, when its
//! environment carries the test's tag, or when it was once seen as a descendant
//! of such a process. The last rule finds what changed its session and cleaned
//! its environment. A process is named by its number *and* its start time, so
//! that a number used again is never mistaken for it.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::sys::signal::{self, SigHandler, Signal, kill};
use nix::unistd::Pid;

/// The environment variable whose value names a test.
pub const TAG: &str = "WEFT_TEST_TAG";

/// Has a command heed the signals that this suite was started to ignore, in the background say.
pub(crate) fn heed(command: &mut Command) {
    let heed = || {
        for signal in [Signal::SIGHUP, Signal::SIGINT] {
            // SAFETY: no handler is involved.
            unsafe { signal::signal(signal, SigHandler::SigDfl)? };
        }
        Ok(())
    };
    // SAFETY: safe in a signal handler; nothing is allocated.
    unsafe { command.pre_exec(heed) };
}

/// A process, for as long as the machine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Its number.
    pub pid: i32,
    /// When it started, in clock ticks since boot.
    pub start: u64,
}

impl Identity {
    /// Sorts the children of a process by the order in which they were made. Several start in one
    /// tick; then their numbers tell, which begin anew behind the largest.
    pub(crate) fn order(&self, parent: i32) -> (u64, i32) {
        let text = fs::read_to_string("/proc/sys/kernel/pid_max").unwrap_or_default();
        let numbers = text.trim().parse().unwrap_or(i32::MAX);
        (self.start, (self.pid - parent).rem_euclid(numbers))
    }
}

/// What `/proc/PID/stat` says that matters here.
#[derive(Debug, Clone)]
pub struct Process {
    pub identity: Identity,
    /// Its parent's number.
    pub parent: i32,
    pub session: i32,
    /// Its state's letter.
    pub state: char,
    /// Its short name.
    pub name: String,
}

fn parse_stat(pid: i32, stat: &str) -> Option<Process> {
    let open = stat.find('(')?;
    // The name may hold anything, brackets included: the last one closes it.
    let close = stat.rfind(')')?;
    let fields: Vec<&str> = stat.get(close + 2..)?.split(' ').collect();
    Some(Process {
        identity: Identity {
            pid,
            start: fields.get(19)?.parse().ok()?,
        },
        parent: fields.get(1)?.parse().ok()?,
        session: fields.get(3)?.parse().ok()?,
        state: fields.first()?.chars().next()?,
        name: stat.get(open + 1..close)?.to_string(),
    })
}

/// Reads one process; `None` when it is gone.
pub fn read(pid: i32) -> Option<Process> {
    parse_stat(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// All processes that are not zombies.
pub fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(read)
        .filter(|process| process.state != 'Z')
        .collect()
}

/// The command line, its arguments joined by spaces.
pub fn command_line(pid: i32) -> String {
    fs::read(format!("/proc/{pid}/cmdline"))
        .map(|bytes| {
            let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
            text.trim_end().to_string()
        })
        .unwrap_or_default()
}

fn has_tag(pid: i32, tag: &str) -> bool {
    let wanted = format!("{TAG}={tag}");
    fs::read(format!("/proc/{pid}/environ"))
        .is_ok_and(|bytes| bytes.split(|&b| b == 0).any(|v| v == wanted.as_bytes()))
}

/// The processes of one test.
#[derive(Debug)]
pub struct Family {
    session: i32,
    /// The session's leader; `None` when it was gone before it could be read.
    leader: Option<Identity>,
    tag: String,
    seen: HashSet<Identity>,
}

impl Family {
    /// The family whose session is led by `leader`.
    pub fn new(leader: i32, tag: &str) -> Family {
        Family {
            session: leader,
            leader: read(leader).map(|process| process.identity),
            tag: tag.to_string(),
            seen: HashSet::new(),
        }
    }

    /// Looks at `/proc` and remembers; returns the members that are alive.
    pub fn members(&mut self) -> Vec<Process> {
        let everyone = all();
        let parents: HashMap<i32, i32> = everyone
            .iter()
            .map(|process| (process.identity.pid, process.parent))
            .collect();
        // Numbers are used again: a session is ours as long as nobody else has
        // its leader's number, and a parent is one that is alive and was seen.
        let mut others = everyone.iter().map(|process| process.identity);
        let reused = others
            .any(|other| other.pid == self.session && self.leader.is_some_and(|l| l != other));
        for process in &everyone {
            if !reused && process.session == self.session
                || has_tag(process.identity.pid, &self.tag)
            {
                self.seen.insert(process.identity);
            }
        }
        let roots: HashSet<i32> = everyone
            .iter()
            .filter(|process| self.seen.contains(&process.identity))
            .map(|process| process.identity.pid)
            .collect();
        let descends = |pid: i32| {
            // A process tree is never deeper than this; a loop would mean that
            // numbers were used again while we were reading.
            let mut at = pid;
            for _ in 0..64 {
                match parents.get(&at) {
                    Some(&parent) if parent > 1 => {
                        if roots.contains(&parent) {
                            return true;
                        }
                        at = parent;
                    }
                    _ => return false,
                }
            }
            false
        };
        for process in &everyone {
            if descends(process.identity.pid) {
                self.seen.insert(process.identity);
            }
        }
        everyone
            .into_iter()
            .filter(|process| self.seen.contains(&process.identity))
            .collect()
    }

    /// Kills every member; only they are touched, by number.
    pub fn kill(&mut self) {
        for process in self.members() {
            // Gone in the meantime is fine: that was the purpose.
            let _ = kill(Pid::from_raw(process.identity.pid), Signal::SIGKILL);
        }
    }
}

/// One line for a process, for a report.
pub fn describe(process: &Process) -> String {
    format!(
        "{} {} [{}] {}",
        process.identity.pid,
        process.name,
        process.state,
        command_line(process.identity.pid)
    )
}

/// Where a process waits: state, system call, kernel stack, as far as the
/// reader's rights go.
pub fn where_it_waits(process: &Process) -> String {
    let pid = process.identity.pid;
    let mut text = describe(process);
    let threads = fs::read_dir(format!("/proc/{pid}/task"))
        .map(|entries| {
            entries
                .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
                .collect::<Vec<_>>()
        })
        .unwrap_or_default();
    for thread in threads.iter().take(16) {
        let read = |name: &str| {
            fs::read_to_string(format!("/proc/{pid}/task/{thread}/{name}"))
                .unwrap_or_else(|error| format!("({error})"))
        };
        let _ = write!(
            text,
            "\n    thread {thread}: waits in {}, system call {}",
            read("wchan").trim(),
            read("syscall").trim()
        );
        for line in read("stack").lines().take(8) {
            let _ = write!(text, "\n      {line}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_in_order_where_their_numbers_begin_anew() {
        let text = fs::read_to_string("/proc/sys/kernel/pid_max").unwrap();
        let end: i32 = text.trim().parse().unwrap();
        let process = |start, pid| Identity { pid, start };
        let mut some = [(9, 302), (8, 303), (8, end - 1), (8, 301)].map(|(s, p)| process(s, p));
        some.sort_by_key(|process| process.order(end - 7));
        let numbers = some.map(|process| process.pid);
        assert_eq!(numbers, [end - 1, 301, 303, 302]);
    }

    #[test]
    fn a_name_with_brackets_is_read() {
        let mut fields = vec!["0"; 50];
        (fields[0], fields[1], fields[2], fields[3], fields[19]) = ("S", "7", "8", "9", "1234");
        let stat = format!("42 (a) b (c)) {}", fields.join(" "));
        let process = parse_stat(42, &stat).expect("a whole line");
        assert_eq!(process.name, "a) b (c)");
        assert_eq!((process.parent, process.session), (7, 9));
        assert_eq!(
            process.identity,
            Identity {
                pid: 42,
                start: 1234
            }
        );
    }

    #[test]
    fn this_process_is_found_by_its_session() {
        let own = read(std::process::id() as i32).expect("we are alive");
        let mut family = Family::new(own.session, "no such tag");
        assert!(family.members().iter().any(|p| p.identity == own.identity));
    }
}
