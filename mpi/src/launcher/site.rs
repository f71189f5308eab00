//! The batch system, in a thread of its own: its commands take seconds.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use weft_batch::{BatchSystem, GridEngine, JobId, Local, LocalHost, Slurm, Wanted};

use super::Event;
use super::folder::Folder;
use super::options::SiteOptions;
use crate::request::Answer;

/// How often all jobs are looked at.
const LOOK: Duration = Duration::from_secs(2);
/// A list of hosts costs nothing to look at.
const LOOK_LOCAL: Duration = Duration::from_millis(500);

pub enum Ask {
    /// One more host, for the reservation of that number.
    Host {
        reservation: u32,
        wanted: Wanted,
    },
    /// These jobs are the cluster's.
    Watch(Vec<JobId>),
    GiveBack(JobId),
    /// A later end of a job, which a user waits for.
    Extend {
        job: JobId,
        until: SystemTime,
        answer: Sender<Answer>,
    },
    /// What the user's jobs are called.
    Names,
}

/// Why there is no host.
pub struct Refusal {
    pub why: String,
    /// Whether the same request would be refused again.
    pub is_lasting: bool,
}

/// What the batch system is, before its thread has it.
pub fn system(site: &SiteOptions, folder: &Folder) -> anyhow::Result<Box<dyn BatchSystem>> {
    Ok(match site {
        SiteOptions::Slurm { .. } => Box::new(Slurm),
        SiteOptions::GridEngine { .. } => Box::new(GridEngine),
        SiteOptions::Local(hosts) => {
            let hosts = hosts.iter().map(|host| LocalHost {
                name: host.name.clone(),
                through: host.through.clone(),
                time_max: host.time_max,
            });
            Box::new(Local::new(hosts.collect(), &folder.file("jobs"))?)
        }
    })
}

/// Asks and looks for as long as the launcher lives.
pub fn start(system: Box<dyn BatchSystem>, events: Sender<Event>) -> anyhow::Result<Sender<Ask>> {
    let (sender, asks) = channel();
    let serve = move || {
        let mut site = Site {
            look: match system.name() {
                "local" => LOOK_LOCAL,
                _ => LOOK,
            },
            system,
            jobs: Vec::new(),
            events,
        };
        while site.turn(&asks) {}
    };
    let thread = thread::Builder::new().name("batch".into());
    thread.spawn(serve).context("cannot start a thread")?;
    Ok(sender)
}

struct Site {
    system: Box<dyn BatchSystem>,
    look: Duration,
    jobs: Vec<JobId>,
    events: Sender<Event>,
}

impl Site {
    /// False when the launcher has ended.
    fn turn(&mut self, asks: &Receiver<Ask>) -> bool {
        match asks.recv_timeout(self.look) {
            Ok(Ask::Host {
                reservation,
                wanted,
            }) => {
                let result = self.system.ask(&wanted).map_err(|error| Refusal {
                    is_lasting: error.is_lasting(),
                    why: error.to_string(),
                });
                if let Ok(job) = &result {
                    self.jobs.push(job.clone());
                }
                let asked = Event::Asked {
                    reservation,
                    result,
                };
                return self.events.send(asked).is_ok();
            }
            Ok(Ask::Watch(jobs)) => {
                self.jobs = jobs;
                return true;
            }
            Ok(Ask::GiveBack(job)) => {
                // The look at all jobs shows whether it has ended; it is asked for again if not.
                let _ = self.system.give_back(&job);
            }
            Ok(Ask::Extend { job, until, answer }) => {
                let given = match self.system.extend(&job, until) {
                    Ok(()) => Answer::Done(format!("job {job} ends later")),
                    Err(error) => Answer::Refused(error.to_string()),
                };
                // The client may be gone. The look at all jobs shows the new end.
                let _ = answer.send(given);
            }
            Ok(Ask::Names) => {
                let began = Instant::now();
                let names = self.system.names().map_err(|error| error.to_string());
                return self.events.send(Event::Names { began, names }).is_ok();
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        if self.jobs.is_empty() {
            return true;
        }
        let jobs = self.system.jobs(&self.jobs);
        let jobs = jobs.map_err(|error| error.to_string());
        self.events.send(Event::Jobs(jobs)).is_ok()
    }
}
