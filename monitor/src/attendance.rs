//! The wait for a machine's end, which signals and the terminal can bring about.
//!
//! ```text
//! waiting ──notice──▶ powering off ──notice, POWER_OFF_BOUND──▶ stopping ──▶ ended
//!                                                                │  ▲
//!                                                                └──┘ notice, STOP_BOUND
//! ```
//!
//! Invariant: a machine that carries out no request is given up after [`STOPS_MAX`]
//! attempts to stop it.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use weft_console::Notice;
use weft_machine::{End, REPLY_SECONDS_MAX};

/// How long the guest has to power itself off once its end is asked for.
const POWER_OFF_BOUND: Duration = Duration::from_secs(10);
/// How long the machine may take to end after a request to stop.
const STOP_BOUND: Duration = Duration::from_secs(REPLY_SECONDS_MAX);
/// Limit of requests to stop. Each request waits for its reply. The first one stays in the
/// machine's queue; after it, only the machine's end is waited for.
const STOPS_MAX: u32 = 2;
/// How long one wait is where nothing is due.
const WAIT: Duration = Duration::from_secs(3600);

/// What wakes the thread that waits.
pub enum Event {
    /// The machine ended.
    Ended(End),
    /// Somebody wants it to.
    Notice(Notice),
}

/// A machine that can be asked to end.
pub trait Endable {
    /// Whether the guest was asked to power itself off.
    fn power_off(&self) -> bool;
    /// Stops it; why not, as a sentence.
    fn stop(&self) -> Result<(), String>;
    /// How it ended, if it has.
    fn end(&self) -> Option<End>;
    /// A sentence for the terminal.
    fn say(&self, sentence: &str);
}

/// Waits for the end, and brings it about when asked to: the guest is asked to power
/// itself off; a second wish, or its time running out, stops it. The signal that asked for
/// it comes with it.
pub fn attend(events: &Receiver<Event>, machine: &impl Endable) -> (End, Option<i32>) {
    let mut signal = None;
    let mut deadline: Option<Instant> = None;
    let mut stops = 0;
    loop {
        let bound = deadline.map_or(WAIT, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        });
        match events.recv_timeout(bound) {
            Ok(Event::Ended(end)) => return (end, signal),
            Ok(Event::Notice(notice)) => {
                if let Notice::Signal(number) = notice {
                    signal.get_or_insert(number);
                }
                if deadline.is_none() && machine.power_off() {
                    deadline = Some(Instant::now() + POWER_OFF_BOUND);
                    machine.say("asking the guest to power off; repeat to end it at once");
                    continue;
                }
            }
            Err(RecvTimeoutError::Timeout) if deadline.is_none() => continue,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let reason = "the launcher is gone".into();
                return (End::Failed { reason }, signal);
            }
        }
        let reason = match machine.stop() {
            Ok(()) => "it was stopped, but did not end".to_owned(),
            Err(why) => {
                machine.say(&why);
                why
            }
        };
        stops += 1;
        if stops == STOPS_MAX {
            // It may have ended while it was asked.
            let end = machine.end();
            return (end.unwrap_or(End::Failed { reason }), signal);
        }
        deadline = Some(Instant::now() + STOP_BOUND);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// A machine whose requests have given results.
    struct Scripted {
        events: Sender<Event>,
        powers_off: bool,
        /// Ends when it is stopped; otherwise it carries out nothing.
        obeys: bool,
        ended: Option<End>,
        stops: Cell<u32>,
        said: RefCell<Vec<String>>,
    }

    impl Endable for Scripted {
        fn power_off(&self) -> bool {
            self.powers_off
        }

        fn stop(&self) -> Result<(), String> {
            self.stops.set(self.stops.get() + 1);
            if !self.obeys {
                return Err("no answer to stop within 30 s".into());
            }
            self.events.send(Event::Ended(End::Stopped)).unwrap();
            Ok(())
        }

        fn end(&self) -> Option<End> {
            self.ended.clone()
        }

        fn say(&self, sentence: &str) {
            self.said.borrow_mut().push(sentence.to_owned());
        }
    }

    fn machine(powers_off: bool, obeys: bool) -> (Scripted, Receiver<Event>) {
        let (events, received) = channel();
        let machine = Scripted {
            events,
            powers_off,
            obeys,
            ended: None,
            stops: Cell::default(),
            said: RefCell::default(),
        };
        (machine, received)
    }

    fn notices(machine: &Scripted, signals: &[i32]) {
        for signal in signals {
            let notice = Notice::Signal(*signal);
            machine.events.send(Event::Notice(notice)).unwrap();
        }
    }

    #[test]
    fn a_second_wish_stops_the_machine() {
        let (machine, events) = machine(true, true);
        notices(&machine, &[15, 2]);
        assert_eq!(attend(&events, &machine), (End::Stopped, Some(15)));
        assert_eq!(machine.stops.get(), 1);
        assert_eq!(machine.said.borrow().len(), 1);
    }

    #[test]
    fn a_machine_that_does_not_answer_is_given_up() {
        let (machine, events) = machine(false, false);
        notices(&machine, &[15; 20]);
        let (end, signal) = attend(&events, &machine);
        let reason = "no answer to stop within 30 s".to_owned();
        assert_eq!((end, signal), (End::Failed { reason }, Some(15)));
        assert_eq!(machine.stops.get(), STOPS_MAX);
    }

    #[test]
    fn a_machine_that_ended_meanwhile_ended_as_it_did() {
        let (mut machine, events) = machine(false, false);
        machine.ended = Some(End::PoweredOff);
        notices(&machine, &[15, 15]);
        assert_eq!(attend(&events, &machine), (End::PoweredOff, Some(15)));
    }
}
