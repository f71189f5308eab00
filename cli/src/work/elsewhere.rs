//! `--anywhere`: a home on another host. The command runs there again, by ssh, as its user and
//! with its files; `--placed` has it take the place that the cluster has found.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::Context;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_node::launch::machine::take_signals;
use weft_node::launch::{self, SignalEvent, Signals};
use weft_node::member::Membership;
use weft_node::shell::quote;
use weft_node::spawn::{Ended, SignalState};

/// Instead of `ssh`: a command with options, divided at spaces.
const SSH: &str = "WEFT_SSH_COMMAND";
/// In the environment of ssh: the name of the host in the cluster.
const SSH_HOST: &str = "WEFT_SSH_HOST";
/// Of a command that has started nothing.
const NOT_STARTED: u8 = 125;
/// How often the end of ssh is looked for, beside the signal.
const LOOK: Duration = Duration::from_millis(500);

/// A place on another host.
pub struct Elsewhere {
    pub host: String,
    pub name: String,
    pub id: u64,
}

impl Elsewhere {
    /// Runs this command on that host, to its end. `program`: how many of its last words are the
    /// program and the program's arguments.
    pub fn run(&self, program: usize) -> anyhow::Result<ExitCode> {
        let (_, cluster) = Membership::joined()?;
        let members = cluster.members()?;
        let member = members
            .iter()
            .find(|member| member.record.name == self.host);
        let address = &member.context("it has left the cluster")?.record.address;
        let before = SignalState::save(&[]);
        let signals = take_signals()?;
        let mut command = self.ssh(host_of(address), program)?;
        let as_before = move || {
            before.restore();
            // Also without this process, which may be killed, ssh ends.
            Ok(set_pdeathsig(Some(Signal::SIGTERM))?)
        };
        // SAFETY: two calls of the kernel; nothing is allocated and no lock is taken.
        unsafe { command.pre_exec(as_before) };
        let ssh = command.get_program().display().to_string();
        let child = command
            .spawn()
            .with_context(|| format!("cannot run {ssh:?} (from {SSH}, or ssh)"))?;
        let status = finish(child, &signals)?;
        signals.give_back();
        // What ran has ended, whether the store answers or not.
        let placed = cluster.placed(&self.name, self.id).ok().flatten();
        let waits = placed.is_some_and(|placed| placed.request.caller.is_some());
        if waits && !status.success() {
            eprintln!(
                "weft: {} did not start on {}: {ssh} ended ({status}); it must log in to {} without a \
                 question, and find weft and the current directory there",
                self.name,
                self.host,
                host_of(address)
            );
            return Ok(ExitCode::from(NOT_STARTED));
        }
        match (status.code(), status.signal()) {
            (Some(code), _) => Ok(ExitCode::from(code as u8)),
            (None, Some(signal)) => launch::end_like(Ended::Signaled(signal)),
            (None, None) => Ok(ExitCode::from(NOT_STARTED)),
        }
    }

    /// The command that has a shell on `address` run this one.
    fn ssh(&self, address: &str, program: usize) -> anyhow::Result<Command> {
        let ssh = env::var(SSH).unwrap_or_else(|_| "ssh".into());
        let mut parts = ssh.split_whitespace();
        let first = parts.next().with_context(|| format!("{SSH} is empty"))?;
        let mut command = Command::new(first);
        command.args(parts).env(SSH_HOST, &self.host);
        if io::stdin().is_terminal() && io::stdout().is_terminal() {
            command.arg("-t");
        }
        let directory = env::current_dir().context("the current directory is gone")?;
        let words = self.with_place(env::args_os().skip(1).collect(), program);
        let line = remote_line(directory.as_os_str(), &words);
        command.arg(address).arg(line);
        Ok(command)
    }

    /// The words with `--placed` in the place of `--anywhere`.
    fn with_place(&self, mut words: Vec<OsString>, program: usize) -> Vec<OsString> {
        let options = words.len().saturating_sub(program);
        let is_it = |word: &OsString| {
            let word = word.as_bytes();
            word == b"--anywhere" || word.starts_with(b"--anywhere=")
        };
        let options = words.iter_mut().take(options);
        for word in options.filter(|word| is_it(word)) {
            *word = format!("--placed={}:{}", self.name, self.id).into();
        }
        words
    }
}

/// What a shell there does.
fn remote_line(directory: &OsStr, words: &[OsString]) -> OsString {
    let mut line = OsString::from("cd ");
    line.push(quote(directory));
    line.push(format!(" || exit {NOT_STARTED}; exec weft"));
    for word in words {
        line.push(" ");
        line.push(quote(word));
    }
    line
}

/// HOST of HOST:PORT; an IPv6 address without its brackets.
fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let inner = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
    inner.unwrap_or(host)
}

/// Waits for the end of a child, which gets the signals that other processes send. Those of the
/// terminal it has.
fn finish(mut child: Child, signals: &Signals) -> anyhow::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for ssh")? {
            return Ok(status);
        }
        let mut ready = [PollFd::new(signals.descriptor(), PollFlags::POLLIN)];
        let wait = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::ZERO);
        // Interrupted: it looks again.
        let _ = poll(&mut ready, wait);
        while let Some(event) = signals.next() {
            if let SignalEvent::Signal { number, by_kernel } = event
                && !by_kernel
                && let Ok(signal) = Signal::try_from(number)
            {
                // It may have ended.
                let _ = kill(Pid::from_raw(child.id() as i32), signal);
            }
        }
    }
}

/// A command that runs by ssh ends like one whose terminal has gone, when ssh has.
pub fn end_with_connection() {
    let watch = || {
        let output = io::stdout();
        loop {
            // Without events: the end alone.
            let mut gone = [PollFd::new(output.as_fd(), PollFlags::empty())];
            match poll(&mut gone, PollTimeout::NONE) {
                Err(nix::errno::Errno::EINTR) => {}
                Ok(_) if gone[0].any() == Some(true) => {
                    let _ = kill(Pid::this(), Signal::SIGHUP);
                    return;
                }
                _ => return,
            }
        }
    };
    // Without a thread, it ends when it writes.
    let _ = std::thread::Builder::new()
        .name("weft-connection".into())
        .spawn(watch);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_the_other_host_as_they_are() {
        let elsewhere = Elsewhere {
            host: "beta".into(),
            name: "sort".into(),
            id: 7,
        };
        let words = [
            "run",
            "--cluster",
            "--anywhere=beta",
            "--",
            "p",
            "--anywhere",
            "it's $HOME",
        ];
        let words = elsewhere.with_place(words.map(OsString::from).to_vec(), 3);
        let line = remote_line(OsStr::new("/a b"), &words);
        assert_eq!(
            line.to_str().unwrap(),
            "cd '/a b' || exit 125; exec weft 'run' '--cluster' '--placed=sort:7' '--' 'p' \
             '--anywhere' 'it'\\''s $HOME'"
        );
    }

    #[test]
    fn addresses_lose_their_ports() {
        assert_eq!(host_of("alpha:7077"), "alpha");
        assert_eq!(host_of("[fd00::1]:7077"), "fd00::1");
    }
}
