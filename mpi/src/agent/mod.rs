//! The agent of a reservation: `weft mpi host`, what the batch system's job is.
//!
//! ```text
//!  link (dials the launcher) ──▶ ┌───────┐ ──▶ tasks: `weft vm …`, a process each
//!  signals of the batch system ─▶│ agent │ ──▶ services: daemon, switch
//!  machines (looks each second) ▶└───────┘
//! ```
//!
//! One thread decides, and waits in one place; others only bring it events. Invariants: nothing
//! of the agent outlives it (machines end with their keeper, the switch with its input, the
//! daemon with the process); nothing runs longer than the reservation by the agent's own clock;
//! while no launcher answers, machines run on.

mod link;
mod load;
mod machines;
mod place;
mod services;
mod signals;
mod task;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use weft_wire::channel::Writer;

use crate::control::{FromAgent, Outcome, PULSE, Seen, ToAgent};
use crate::token::Token;
use load::Load;
use place::Place;
use services::Services;

/// The reservation's end is this much later than what runs here: the batch system's clock is
/// another one.
const EARLIER: Duration = Duration::from_millis(500);
/// Results that are kept, for a launcher that asks again.
const RESULTS_MAX: usize = 1024;

/// What happens.
enum Event {
    /// The launcher answers. Links have numbers: what comes from an older one does not count.
    Up {
        link: u64,
        writer: Box<Writer>,
    },
    Heard {
        link: u64,
        message: ToAgent,
    },
    Down {
        link: u64,
        why: String,
    },
    Done {
        id: u64,
        result: Result<Outcome, String>,
    },
    Machines(Vec<Seen>),
    /// By its name.
    Signal(&'static str),
    /// No machine here has a network any more. Those that move away have one.
    SwitchEnded,
}

/// Serves until the reservation ends, the launcher says so, or a signal comes the second time.
///
/// # Errors
/// The token cannot be read, or the host cannot run machines.
pub fn run(token: &Path) -> anyhow::Result<()> {
    let place = Place::enter()?;
    let token = Token::read(token)?;
    let end = Instant::now() + Duration::from_secs(token.lasts_s);
    let (sender, events) = channel();
    signals::watch(sender.clone()).context("cannot wait for signals")?;
    let services = Arc::new(Services::new(&place, &token, sender.clone())?);
    link::start(token, services.clone(), sender.clone())?;
    machines::watch(sender.clone())?;
    let mut agent = Agent {
        place,
        services,
        sender,
        link: 0,
        writer: None,
        orders: Vec::new(),
        machines: Vec::new(),
        load: Load::default(),
        results: VecDeque::new(),
        end,
        leaves: None,
    };
    agent.serve(&events);
    // Then nothing looks at machines any more.
    drop(events);
    agent.end();
    Ok(())
}

struct Agent {
    place: Place,
    services: Arc<Services>,
    sender: Sender<Event>,
    /// The newest link.
    link: u64,
    writer: Option<Writer>,
    /// Orders under way.
    orders: Vec<u64>,
    machines: Vec<Seen>,
    load: Load,
    /// Of orders, by their numbers. A launcher that has not heard one gives its order again.
    results: VecDeque<(u64, Result<Outcome, String>)>,
    end: Instant,
    /// Why the batch system wants the host back, if it does.
    leaves: Option<String>,
}

impl Agent {
    fn serve(&mut self, events: &Receiver<Event>) {
        let mut pulse = Instant::now();
        loop {
            let now = Instant::now();
            if now >= self.end {
                say("the reservation ends");
                return;
            }
            if now >= pulse {
                pulse = now + PULSE;
                self.tell(FromAgent::Machines(self.machines.clone()));
                if let Some(percent) = self.load.look() {
                    self.tell(FromAgent::Load(percent));
                }
            }
            let patience = pulse.min(self.end).saturating_duration_since(now);
            match events.recv_timeout(patience) {
                Ok(event) => {
                    if self.handle(event) == Goes::Ends {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn handle(&mut self, event: Event) -> Goes {
        match event {
            Event::Up { link, writer } => {
                say("the launcher answers");
                (self.link, self.writer) = (link, Some(*writer));
                self.tell(FromAgent::Machines(self.machines.clone()));
                if let Some(why) = self.leaves.clone() {
                    self.tell(FromAgent::Leaves(why));
                }
            }
            Event::Heard { link, message } if link == self.link => return self.obey(message),
            Event::Heard { .. } => {}
            Event::Down { link, why } => {
                if link == self.link && self.writer.take().is_some() {
                    say(&format!("the launcher is gone ({why}); machines run on"));
                }
            }
            Event::Done { id, result } => {
                if let Err(why) = &result {
                    say(&format!("order {id}: {why}"));
                }
                self.orders.retain(|other| *other != id);
                if self.results.len() == RESULTS_MAX {
                    self.results.pop_front();
                }
                self.results.push_back((id, result.clone()));
                self.tell(FromAgent::Done { id, result });
            }
            Event::Machines(machines) => self.machines = machines,
            Event::Signal(name) if self.leaves.is_none() => {
                self.leave(&format!("the batch system sent {name}"));
            }
            Event::SwitchEnded => self.leave("its switch has ended"),
            // A batch system warns, and later ends. Between them are seconds at least.
            Event::Signal("SIGTERM" | "SIGINT") if self.machines.is_empty() => return Goes::Ends,
            Event::Signal(_) => {}
        }
        Goes::On
    }

    /// The first reason counts.
    fn leave(&mut self, why: &str) {
        if self.leaves.is_some() {
            return;
        }
        say(&format!("{why}: this host has to be left"));
        self.leaves = Some(why.to_owned());
        self.tell(FromAgent::Leaves(why.to_owned()));
    }

    fn obey(&mut self, message: ToAgent) -> Goes {
        match message {
            ToAgent::Alive => {}
            ToAgent::End => {
                say("the launcher needs this host no more");
                return Goes::Ends;
            }
            ToAgent::EndsAfter(ms) => {
                let left = Duration::from_millis(ms).saturating_sub(EARLIER);
                self.end = Instant::now() + left;
            }
            ToAgent::Peers(peers) => {
                if let Err(error) = self.services.know(&peers) {
                    say(&format!("the other hosts are not known: {error:#}"));
                }
            }
            ToAgent::Order { id, task } => {
                // A launcher that did not hear the answer says it again.
                let known = self.results.iter().find(|(other, _)| *other == id);
                if let Some((_, result)) = known.cloned() {
                    self.tell(FromAgent::Done { id, result });
                } else if !self.orders.contains(&id) {
                    self.orders.push(id);
                    task::start(id, task, self.sender.clone());
                }
            }
        }
        Goes::On
    }

    fn tell(&mut self, message: FromAgent) {
        let sent = self.writer.as_mut().map(|writer| writer.send(&message));
        if matches!(sent, Some(Ok(()))) {
            return;
        }
        // Its thread sees that, too, and dials again.
        self.writer = None;
    }

    /// Ends machines and services, and tidies up. At the end of the reservation there is no time to
    /// ask machines to end: they end with this process.
    fn end(&mut self) {
        self.writer = None;
        if Instant::now() < self.end {
            machines::end_all();
        }
        self.services.end();
        self.place.leave();
    }
}

#[derive(PartialEq, Eq)]
enum Goes {
    On,
    Ends,
}

/// To the job's log.
fn say(sentence: &str) {
    crate::print(&format!("weft mpi host: {sentence}"));
}
