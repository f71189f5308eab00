//! How long the answer of another node may take: one lease, of time in which it
//! could have come.
//!
//! What passes while this process is stopped does not count. On a slice only what
//! passes while home runs does, which home shows by answering a ping: a terminal
//! that stops the program stops home and the launcher and nobody else, and whether
//! a node is lost is theirs to say.

use weft_proc::message::Message;

use super::clock;
use super::machine::{Engine, Incoming};

/// How long one wait takes at most, and so the most that a look can find to have
/// passed: more, and this process did not run. Nanoseconds.
pub const LOOK_NS: u64 = 1_000_000_000;

/// What is left of a lease.
pub struct Patience {
    left_ns: u64,
    /// Ticks; the kernel's clock would cost each wait a system call.
    seen_at: u64,
}

impl Patience {
    pub fn new(lease_ns: u64) -> Patience {
        Patience {
            left_ns: lease_ns,
            seen_at: clock::now(),
        }
    }

    /// Counts the time since the last look; false when the lease is over.
    pub fn lasts(&mut self) -> bool {
        let now = clock::now();
        let passed_ns = clock::ns(now.saturating_sub(self.seen_at)).min(LOOK_NS);
        self.seen_at = now;
        self.left_ns = self.left_ns.saturating_sub(passed_ns);
        self.left_ns > 0
    }
}

impl Engine {
    /// Waits until `done`, handling what comes; for the executing node. The only
    /// messages it meets are about layout and answers.
    pub fn wait_until(&mut self, what: &'static str, done: impl Fn(&Engine) -> bool) {
        // Most faults have nothing to wait for.
        if done(self) {
            return;
        }
        let mut patience = Patience::new(self.lease_ns());
        let mut asked = false;
        while !done(self) {
            match self.receive(LOOK_NS, None) {
                Incoming::Message(0, Message::Pong, _) if asked => {
                    asked = false;
                    if !patience.lasts() {
                        self.silent(what);
                    }
                }
                Incoming::Message(from, message, _) => self.serve_aside(from, message),
                Incoming::Handled => {}
                Incoming::Timeout | Incoming::Interrupted if self.is_home() => {
                    if !patience.lasts() {
                        self.silent(what);
                    }
                    self.look_for_lost_nodes();
                }
                Incoming::Timeout | Incoming::Interrupted if asked => {}
                Incoming::Timeout | Incoming::Interrupted => {
                    asked = true;
                    let ping = Message::Ping { length: 0 };
                    self.io.send(0, &ping.header(0), &[]);
                    self.settle();
                }
            }
        }
    }
}
