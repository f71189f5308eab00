//! Requests to other slices that have no reply yet, and the threads that wait for replies.

use std::collections::{HashMap, HashSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

struct Open<T> {
    /// By ticket: the slice that is asked, and its reply, once it has arrived.
    waiting: HashMap<u64, (usize, Option<T>)>,
    last_ticket: u64,
    /// Slices that no longer reply.
    lost: HashSet<usize>,
    /// No reply comes any more.
    over: bool,
}

/// Requests without a reply. Each has a ticket, which the reply carries.
pub(super) struct PendingRequests<T> {
    open: Mutex<Open<T>>,
    replied: Condvar,
}

impl<T> Default for PendingRequests<T> {
    fn default() -> Self {
        Self {
            open: Mutex::new(Open {
                waiting: HashMap::new(),
                last_ticket: 0,
                lost: HashSet::new(),
                over: false,
            }),
            replied: Condvar::new(),
        }
    }
}

impl<T> PendingRequests<T> {
    /// Calls `send` with a ticket, which sends the request to `slice`, and waits for the
    /// reply: `None` when no reply arrived within `patience`, or none can arrive.
    pub fn ask(&self, slice: usize, patience: Duration, send: impl FnOnce(u64)) -> Option<T> {
        let ticket = self.open(slice);
        send(ticket);
        self.wait(ticket, patience)
    }

    /// A ticket for a request that `slice` is about to get; [`PendingRequests::wait`]
    /// removes it.
    pub fn open(&self, slice: usize) -> u64 {
        let mut open = self.lock();
        open.last_ticket += 1;
        let ticket = open.last_ticket;
        open.waiting.insert(ticket, (slice, None));
        ticket
    }

    /// Waits for the reply: `None` when no reply arrived within `patience`, or none can
    /// arrive.
    pub fn wait(&self, ticket: u64, patience: Duration) -> Option<T> {
        let (mut open, _) =
            self.replied
                .wait_timeout_while(self.lock(), patience, |open| {
                    let waits = open.waiting.get(&ticket).is_some_and(|(slice, reply)| {
                        reply.is_none() && !open.lost.contains(slice)
                    });
                    !open.over && waits
                })
                .unwrap_or_else(PoisonError::into_inner);
        open.waiting.remove(&ticket).and_then(|(_, reply)| reply)
    }

    /// The reply, if it has arrived; otherwise the request stays open.
    pub fn take(&self, ticket: u64) -> Option<T> {
        let mut open = self.lock();
        let reply = open.waiting.get_mut(&ticket)?.1.take()?;
        open.waiting.remove(&ticket);
        Some(reply)
    }

    /// The reply arrived from slice `from`. It is dropped if no thread waits for it any more.
    ///
    /// # Errors
    /// Another slice was asked.
    pub fn complete(&self, from: usize, ticket: u64, reply: T) -> Result<(), String> {
        if let Some((asked, place)) = self.lock().waiting.get_mut(&ticket) {
            if *asked != from {
                return Err(format!("it replied to a request to node {asked}"));
            }
            *place = Some(reply);
        }
        self.replied.notify_all();
        Ok(())
    }

    /// `slice` no longer replies: threads that wait for it continue.
    pub fn peer_lost(&self, slice: usize) {
        self.lock().lost.insert(slice);
        self.replied.notify_all();
    }

    /// `slice` has left: threads that wait for it continue. Its number may be used again.
    pub fn departed(&self, slice: usize) {
        self.lock()
            .waiting
            .retain(|_, (asked, reply)| *asked != slice || reply.is_some());
        self.replied.notify_all();
    }

    /// No more replies: waiting threads continue.
    pub fn end(&self) {
        self.lock().over = true;
        self.replied.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Open<T>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    #[test]
    fn every_request_gets_its_own_reply() {
        let pending = Arc::<PendingRequests<u64>>::default();
        let (send, tickets) = channel();
        let askers: Vec<_> = (0..4)
            .map(|_| {
                let (pending, send) = (pending.clone(), send.clone());
                std::thread::spawn(move || {
                    for _ in 0..500 {
                        let mut mine = 0;
                        let reply = pending.ask(1, Duration::from_secs(20), |ticket| {
                            mine = ticket;
                            send.send(ticket).unwrap();
                        });
                        assert_eq!(reply, Some(mine * 3));
                    }
                })
            })
            .collect();
        drop(send);
        for ticket in tickets {
            pending.complete(1, ticket, ticket * 3).unwrap();
        }
        for asker in askers {
            asker.join().unwrap();
        }
    }

    #[test]
    fn a_lost_slice_is_not_waited_for() {
        let pending = Arc::<PendingRequests<u8>>::default();
        let (lost, alive) = (pending.open(1), pending.open(2));
        let waiting = {
            let pending = pending.clone();
            std::thread::spawn(move || pending.wait(lost, Duration::from_secs(100)))
        };
        pending.peer_lost(1);
        assert_eq!(waiting.join().unwrap(), None);
        assert_eq!(pending.ask(1, Duration::from_secs(100), |_| {}), None);
        pending.complete(2, alive, 7).unwrap();
        assert_eq!(pending.wait(alive, Duration::from_secs(100)), Some(7));
    }

    #[test]
    fn only_the_slice_that_was_asked_replies() {
        let pending = PendingRequests::<u8>::default();
        let ticket = pending.open(1);
        let refused = pending.complete(2, ticket, 6).unwrap_err();
        assert_eq!(refused, "it replied to a request to node 1");
        assert_eq!(pending.complete(1, ticket, 7), Ok(()));
        assert_eq!(pending.wait(ticket, Duration::ZERO), Some(7));
        // A reply that comes too late.
        assert_eq!(pending.complete(1, ticket, 8), Ok(()));
    }

    #[test]
    fn a_missing_reply_ends_the_wait_in_time() {
        let pending = PendingRequests::<u8>::default();
        assert_eq!(pending.ask(1, Duration::from_millis(5), |_| {}), None);
        pending.complete(1, 1, 1).unwrap();
        pending.end();
        assert_eq!(pending.ask(1, Duration::from_secs(100), |_| {}), None);
    }
}
