//! A program or a machine of the test: how it is started, and what its end must be.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::ledger::Ledger;
use super::site::{GUEST, HOSTS, Site};
use crate::fleet::{Started, words};
use crate::run::End;

/// Of each aggregate, in seconds: twice the default, since all hosts share few processors.
pub(super) const LEASE: u64 = 10;
/// An end that was asked for comes within this.
const END: Duration = Duration::from_secs(90);
/// The exit code of a program that ends by itself.
const CODE: i32 = 7;
const NOT_STARTED: i32 = 125;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Program,
    /// `weft vm run`: its console and its exit code are seen.
    Machine,
    /// `weft vm start`: its messages are.
    Detached,
}

/// What the test did to end it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Told {
    /// `weft vm stop`, or SIGTERM to the launcher.
    Stop,
    /// SIGKILL to the launcher.
    Kill,
}

pub(super) struct Wanted {
    pub(super) kind: Kind,
    pub(super) home: usize,
    pub(super) cores: u64,
    pub(super) memory_mib: u64,
    /// How long it runs by itself.
    pub(super) seconds: u64,
    pub(super) priority: u64,
    /// Unique, but where two hosts ask for one name at once.
    pub(super) token: String,
    pub(super) rival: bool,
}

pub(super) struct Aggregate {
    pub(super) wanted: Wanted,
    /// The launcher, or the command that starts it.
    pub(super) command: Started,
    pub(super) told: Option<(Instant, Told)>,
    /// When it was first seen to run.
    pub(super) ran: Option<Instant>,
    /// Where a part of it was seen, the home left out, and when last.
    pub(super) places: Vec<(usize, Instant)>,
}

/// How an aggregate has ended, in a word for the summary, or why that is wrong.
pub(super) type Judgement = Result<&'static str, String>;

impl Aggregate {
    pub(super) fn start(
        site: &Site<'_>,
        images: (&str, &str),
        wanted: Wanted,
    ) -> Result<Aggregate> {
        let token = &wanted.token;
        let (memory, cores) = (wanted.memory_mib, wanted.cores);
        let common = format!(
            "--cluster --memory {memory}M --lease {LEASE} --priority {}",
            wanted.priority
        );
        let line = match wanted.kind {
            Kind::Program => {
                let keeper = site.fleet.context.programs.join("keeper");
                // A part of the memory is the program's code and its stack.
                let filled = memory * 3 / 4;
                let seconds = wanted.seconds;
                let keeper = keeper.display();
                words(&format!(
                    "run {common} -- {keeper} {token} {filled} {seconds} {CODE}"
                ))
            }
            Kind::Machine | Kind::Detached => {
                let verb = if wanted.kind == Kind::Machine {
                    "run"
                } else {
                    "start"
                };
                let (kernel, initrd) = images;
                let mut line = words(&format!(
                    "vm {verb} {common} --name {token} --backend soft --no-reboot --cpus {cores} \
                     --kernel {kernel} --initrd {initrd} --cmdline"
                ));
                line.push(format!(
                    "console=ttyS0 quiet weft.run=\"{}\"",
                    guest_script(token, wanted.seconds)
                ));
                line
            }
        };
        let name = format!("{token}-{}", HOSTS[wanted.home]);
        Ok(Aggregate {
            command: site.fleet.begin(wanted.home, &name, &line)?,
            wanted,
            told: None,
            ran: None,
            places: Vec::new(),
        })
    }

    pub(super) fn others(&self) -> Vec<usize> {
        let recent = |at: &&(usize, Instant)| at.1.elapsed() < super::ledger::AFTERMATH;
        let mut hosts: Vec<usize> = self.places.iter().filter(recent).map(|at| at.0).collect();
        hosts.extend(placed_at(&self.command.said(), self.wanted.home));
        hosts
    }

    /// What it has said as it ran and as it ended.
    pub(super) fn said(&self, site: &Site<'_>) -> String {
        let mut said = self.command.said();
        if self.wanted.kind == Kind::Detached {
            let token = &self.wanted.token;
            let log = site.fleet.run_directory(self.wanted.home);
            let log = log.join(format!("weft/vm/{token}.log"));
            said += &std::fs::read_to_string(log).unwrap_or_default();
        }
        said
    }

    /// It should have ended long ago.
    pub(super) fn overdue(&self) -> bool {
        self.told.is_some_and(|(at, _)| at.elapsed() > END)
    }

    /// Judges an end that was seen now. `end` is `None` for what no parent waits for.
    pub(super) fn judge(&self, site: &Site<'_>, ledger: &Ledger, end: Option<End>) -> Judgement {
        let now = Instant::now();
        let (said, printed) = (self.said(site), self.command.printed());
        let last: Vec<&str> = said.lines().rev().take(6).collect();
        let shown = last.into_iter().rev().collect::<Vec<_>>().join("\n  ");
        let end_text = end.map_or("ended".to_owned(), |end| end.to_string());
        let wrong = |why: &str| {
            let Wanted { token, home, .. } = &self.wanted;
            Err(format!(
                "{token} of {}: {why}: {end_text}\n  {shown}",
                HOSTS[*home]
            ))
        };
        if said.contains("panicked") {
            return wrong("something panicked");
        }
        if printed.contains("damaged") {
            return wrong("its memory was damaged");
        }
        let starts = printed
            .matches(&format!("{} start", self.wanted.token))
            .count();
        if starts > 1 {
            return wrong("it ran twice");
        }
        let others = self.others();
        let is_detached = self.wanted.kind == Kind::Detached;
        let is_done = printed.contains(&format!("{} done", self.wanted.token))
            || is_detached && said.contains("powered off by the guest");
        let own = if self.wanted.kind == Kind::Program {
            CODE
        } else {
            0
        };
        if is_done && end.is_none_or(|end| end == End::Exit(own)) {
            return Ok("ended by itself");
        }
        match self.told {
            Some((_, Told::Kill)) if end.is_none_or(|end| end == End::Signal(9)) => {
                return Ok("its launcher was killed");
            }
            Some((_, Told::Stop)) => {
                // A guest that does not hear the power button is ended by the signal after 10 s.
                let stopped = [0, 116, 120, 143].map(End::Exit);
                let called_off = end == Some(End::Exit(NOT_STARTED)) && self.ran.is_none();
                let is_stopped = |end| stopped.contains(&end) || end == End::Signal(15);
                if end.is_none_or(is_stopped) || called_off {
                    return Ok("stopped");
                }
            }
            _ => {}
        }
        if end == Some(End::Exit(NOT_STARTED)) && starts == 0 {
            return match self.may_not_start(&said, ledger, now) {
                true => Ok("not started"),
                false => wrong("it was not started"),
            };
        }
        if ledger.was_ended(now, &others) {
            return Ok("its host's daemon ended");
        }
        let lost = ledger.losses(now, self.wanted.home, &others);
        let codes: &[i32] = match self.wanted.kind {
            Kind::Program => &[122, 123],
            _ => &[124],
        };
        let is_loss = end.is_none_or(|end| codes.iter().any(|code| end == End::Exit(*code)));
        match is_loss {
            false => wrong("it ended in a way that it must not"),
            true if lost.is_empty() => wrong("it was lost, and nothing was done to its hosts"),
            true if lost.iter().any(|host| names_host(&said, *host)) => Ok("lost"),
            true => {
                let names: Vec<&str> = lost.iter().map(|host| HOSTS[*host]).collect();
                wrong(&format!("none of {names:?} is named"))
            }
        }
    }

    /// Whether something that was done explains why it was not started.
    fn may_not_start(&self, said: &str, ledger: &Ledger, now: Instant) -> bool {
        let last = said.lines().last().unwrap_or_default();
        let hosts = ledger.recent(now).into_iter();
        let mut recent = hosts.filter(|place| *place < HOSTS.len());
        let is_rival = self.wanted.rival && last.contains("runs or waits in this cluster already");
        let is_store = last.contains("the store") && ledger.store_failed(now, self.wanted.home);
        // A host that has left starts nothing any more.
        let has_left = self.wanted.home == GUEST && last.contains("is refused");
        is_rival || is_store || has_left || recent.any(|host| last.contains(HOSTS[host]))
    }
}

/// The other hosts that the cluster chose: "… starts on home (…), beta (…)".
fn placed_at(said: &str, home: usize) -> Vec<usize> {
    let mut lines = said.lines().filter(|line| line.contains(" starts on "));
    let line = lines.next_back().unwrap_or_default();
    let all = (0..HOSTS.len()).filter(|host| *host != home);
    all.filter(|host| line.contains(HOSTS[*host])).collect()
}

/// The lines that are no news of where it runs.
fn news(said: &str) -> impl Iterator<Item = &str> {
    let place = [" starts on ", ") is on "];
    said.lines()
        .filter(move |line| !place.iter().any(|of| line.contains(of)))
}

fn names_host(said: &str, host: usize) -> bool {
    news(said).any(|line| line.contains(HOSTS[host]))
}

/// A line each two seconds, and a file that must stay as it is.
fn guest_script(token: &str, seconds: u64) -> String {
    let turns = seconds / 2;
    format!(
        "echo {token} start; dd if=/dev/urandom of=/tmp/k bs=64k count=12 2>/dev/null; \
         s=$(md5sum </tmp/k); n=0; while [ $n -lt {turns} ]; do n=$((n+1)); echo {token} $n; \
         [ \"$(md5sum </tmp/k)\" = \"$s\" ] || echo {token} damaged; sleep 2; done; \
         echo {token} done"
    )
    .replace('"', "%22")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "weft: t5x starts on alder (2 cores) and fuchsia (1 core): no host holds it\n\
        weft: vm t5x: node 1 (vCPU 2, 98 MiB of memory) is on fuchsia\n";

    #[test]
    fn where_it_starts_is_no_news_of_a_loss() {
        assert_eq!(placed_at(SAID, 0), [5]);
        assert!(!names_host(SAID, 5));
        let daemon = format!("{SAID}weft: vm t5x: node 1 (fuchsia): its daemon is lost\n");
        assert!(names_host(&daemon, 5) && !names_host(&daemon, 4));
    }
}
