//! The signals of batch systems: all of them mean that the host has to be left.

use std::sync::mpsc::Sender;
use std::thread;

use nix::sys::signal::{SigSet, Signal};

use super::Event;

const SIGNALS: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// Before any other thread is made: they all leave the signals to this one.
pub fn watch(events: Sender<Event>) -> std::io::Result<()> {
    let mut set = SigSet::empty();
    for signal in SIGNALS {
        set.add(signal);
    }
    set.thread_block()?;
    let wait = move || {
        while let Ok(signal) = set.wait() {
            if events.send(Event::Signal(signal.as_str())).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait)?;
    Ok(())
}
