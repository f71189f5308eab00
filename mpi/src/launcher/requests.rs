//! What the user asks of a launcher, at its socket.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use weft_malleable::{HostId, needed, shrink};

use super::phases::EXIT_INTERRUPTED;
use super::site::Ask;
use super::{Event, HOSTS_MAX, Launcher, network, output};
use crate::request::{Answer, LINE_MAX, Request};

/// How long a client may take to say what it wants.
const REQUEST_MAX: Duration = Duration::from_secs(2);

/// Answers for as long as the launcher lives. The socket of an earlier launcher is removed: the
/// caller holds the cluster's lock.
pub fn serve(socket: &Path, events: Sender<Event>) -> anyhow::Result<()> {
    let named = || format!("cannot listen at {}", socket.display());
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(named);
        }
        _ => {}
    }
    // The directory is the user's alone.
    let listener = UnixListener::bind(socket).with_context(named)?;
    let accept = move || {
        for stream in listener.incoming().flatten() {
            let events = events.clone();
            let answer = move || {
                // The client may be gone.
                let _ = answer(&stream, &events);
            };
            // Otherwise the client sees that the connection is closed.
            let _ = thread::Builder::new().name("request".into()).spawn(answer);
        }
    };
    let thread = thread::Builder::new().name("requests".into());
    thread.spawn(accept).context("cannot start a thread")?;
    Ok(())
}

fn answer(stream: &UnixStream, events: &Sender<Event>) -> anyhow::Result<()> {
    stream.set_read_timeout(Some(REQUEST_MAX))?;
    stream.set_write_timeout(Some(REQUEST_MAX))?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_MAX)).read_line(&mut line)?;
    let given = match serde_json::from_str(&line) {
        Ok(request) => {
            let (answer, answers) = channel();
            events.send(Event::Request { request, answer })?;
            answers.recv()?
        }
        Err(error) => Answer::Refused(format!("the request cannot be read: {error}")),
    };
    let mut line = serde_json::to_vec(&given)?;
    line.push(b'\n');
    let mut stream = stream;
    stream.write_all(&line)?;
    Ok(())
}

impl Launcher {
    pub(super) fn request(&mut self, request: Request, answer: &Sender<Answer>) {
        let given = match request {
            Request::Status => Answer::Status(Box::new(self.status())),
            Request::Output(bytes) => Answer::Output(output::ends(&self.folder, bytes)),
            Request::Hosts(count) => self.want(count),
            Request::NewNode => self.want(self.record.wanted + 1),
            Request::Shrink(count) => self.shrink(count),
            Request::Release(name) => self.release(&name),
            Request::Exit => {
                let answer = match self.can_stay_saved() {
                    true => "its machines stay saved, and `weft mpi forget --saved` gives them up",
                    false => "the cluster ends",
                };
                // Without a program nothing was cut short.
                let code = match self.record.options.program.is_empty() {
                    true => 0,
                    false => EXIT_INTERRUPTED,
                };
                self.end(code, "the user ends the cluster");
                Answer::Done(answer.into())
            }
            Request::Extend(name, by) => match self.extend(&name, by, answer) {
                Ok(()) => return,
                Err(why) => Answer::Refused(why),
            },
            Request::Deploy(file) => {
                self.deploy(file, answer.clone());
                return;
            }
        };
        // The client may be gone.
        let _ = answer.send(given);
    }

    fn want(&mut self, count: usize) -> Answer {
        if !(1..=HOSTS_MAX).contains(&count) {
            return Answer::Refused(format!("a cluster has 1 to {HOSTS_MAX} hosts, not {count}"));
        }
        if let Err(why) = self.check_adaptive() {
            return Answer::Refused(why);
        }
        if let Err(error) = self.record.options.check_hosts(count) {
            return Answer::Refused(error.to_string());
        }
        let before = std::mem::replace(&mut self.record.wanted, count);
        let here = self.fleet.peers().len();
        self.withdraw();
        let sentence = match count.cmp(&here) {
            std::cmp::Ordering::Less => format!(
                "{count} hosts are wanted instead of {before}: the {} others go when their \
                 reservations end, or now with `weft mpi shrink`",
                here - count
            ),
            _ => format!("{count} hosts are wanted instead of {before}; {here} are there"),
        };
        self.say(&sentence);
        Answer::Done(sentence)
    }

    fn check_adaptive(&self) -> Result<(), String> {
        match self.record.options.adaptive {
            true => Ok(()),
            false => Err("the cluster was started with --static: it stays as it is".into()),
        }
    }

    /// Jobs whose hosts have not come stay for as long as they would be asked for again.
    fn withdraw(&mut self) {
        let (cluster, now) = (self.cluster(), self.epoch.elapsed());
        let stay = needed(&cluster, &self.forecast, &self.rules, now);
        let hosts = self.fleet.hosts.iter();
        let awaited = hosts.filter(|(_, host)| host.is_awaited());
        let surplus: Vec<HostId> = awaited.map(|(id, _)| *id).skip(stay).collect();
        for id in surplus {
            self.close(id);
        }
    }

    fn shrink(&mut self, count: usize) -> Answer {
        let answer = self.want(count);
        if matches!(answer, Answer::Refused(_)) {
            return answer;
        }
        let cluster = self.cluster();
        let leaving = shrink(&cluster, count);
        let names: Vec<String> = leaving.iter().map(|id| self.fleet.name(*id)).collect();
        for id in leaving {
            self.leave(id);
        }
        let sentence = match names.is_empty() {
            true => format!("no more than {count} hosts are there"),
            false => format!("to be left now: {}", names.join(", ")),
        };
        self.say(&sentence);
        Answer::Done(sentence)
    }

    fn release(&mut self, name: &str) -> Answer {
        if let Err(why) = self.check_adaptive() {
            return Answer::Refused(why);
        }
        let id = match self.named(name) {
            Ok(id) => id,
            Err(why) => return Answer::Refused(why),
        };
        self.leave(id);
        let sentence = format!("{name} goes back when its machines have left");
        self.say(&sentence);
        Answer::Done(sentence)
    }

    fn named(&self, name: &str) -> Result<HostId, String> {
        let names = || {
            let peers = self.fleet.peers().into_iter();
            peers.map(|peer| peer.name).collect::<Vec<_>>().join(", ")
        };
        let id = self.fleet.by_name(name);
        id.ok_or_else(|| format!("the cluster has no host {name}; it has {}", names()))
    }

    /// Asks the batch system, which answers the user.
    fn extend(&self, name: &str, by: Duration, answer: &Sender<Answer>) -> Result<(), String> {
        let id = self.named(name)?;
        let host = self.fleet.hosts.get(&id);
        let known = host.and_then(|host| Some((host.job.clone()?, host.until?)));
        let (job, until) =
            known.ok_or_else(|| format!("the batch system has not said when {name} ends"))?;
        let later = until.checked_add(by);
        let until = later.ok_or_else(|| format!("no clock counts {} s", by.as_secs()))?;
        let answer = answer.clone();
        let asked = self.site.send(Ask::Extend { job, until, answer });
        asked.map_err(|_| String::from("the thread of the batch system has ended"))
    }

    fn leave(&mut self, id: HostId) {
        if let Some(host) = self.fleet.hosts.get_mut(&id) {
            host.leaves = true;
        }
    }

    /// In a thread of its own: it may take a while.
    fn deploy(&self, file: std::path::PathBuf, answer: Sender<Answer>) {
        let machines: Vec<u32> = self.fleet.machines.keys().map(|id| id.0).collect();
        let shell = self.shell.clone();
        let copy = move || {
            let failed = machines.iter().find_map(|machine| {
                let error = shell.copy(*machine, &file).err()?;
                Some(format!("{}: {error:#}", network::name(*machine)))
            });
            let _ = answer.send(match failed {
                None => Answer::Done(format!(
                    "{} is in the home of {} machines",
                    file.display(),
                    machines.len()
                )),
                Some(why) => Answer::Refused(why),
            });
        };
        // If there is no thread, the client sees that nobody answers.
        let _ = thread::Builder::new().name("deploy".into()).spawn(copy);
    }
}
