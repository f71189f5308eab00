//! Links that a session waits for: a launcher announced them, and somebody is
//! going to dial.
//!
//! A ticket is good from its announcement until its link was delivered or its
//! [`Announced`] is dropped, whichever is first: a start that failed, for whatever
//! reason, leaves none behind. It serves once: the secret goes with the first
//! connection that proves to know it, and a connection that does not know it
//! changes nothing.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use weft_wire::handshake::{Keyed, Secret, Ticket};

/// How long an announced link may take to come.
pub(super) const LINK_BOUND: Duration = Duration::from_secs(5);

/// All links that all sessions of a daemon wait for.
#[derive(Default, Clone)]
pub struct Expected {
    table: Arc<Table>,
}

#[derive(Default)]
struct Table {
    /// Guards the entries alone.
    entries: Mutex<HashMap<Ticket, Promise>>,
}

/// What is known of a link to come; of one that has come, that its ticket is used.
enum Promise {
    Open(Secret, Take),
    Kept,
}

/// Takes a link that has come. Must not wait.
pub type Take = Box<dyn FnOnce(Keyed) + Send>;

/// Keeps a ticket good until its link has come.
pub struct Announced {
    table: Arc<Table>,
    ticket: Ticket,
}

/// One link to come, as its session waits for it.
pub struct Awaited {
    _announced: Announced,
    link: Receiver<Keyed>,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, HashMap<Ticket, Promise>> {
        // A panic aborts the process, so the lock cannot be poisoned.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Expected {
    /// A link with this ticket will come. None for a ticket that is good already: it
    /// is another session's, or a mistake.
    pub fn announce(&self, ticket: Ticket, secret: Secret) -> Option<Awaited> {
        let (sender, link) = sync_channel(1);
        // The session may have gone meanwhile; the connection goes too.
        let take = Box::new(move |keyed| drop(sender.try_send(keyed)));
        Some(Awaited {
            _announced: self.announce_to(ticket, secret, take)?,
            link,
        })
    }

    /// The same, for a link that nobody waits for: `take` gets it.
    pub fn announce_to(&self, ticket: Ticket, secret: Secret, take: Take) -> Option<Announced> {
        match self.table.lock().entry(ticket) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(entry) => entry.insert(Promise::Open(secret, take)),
        };
        Some(Announced {
            table: self.table.clone(),
            ticket,
        })
    }

    /// The secret that belongs to a ticket.
    pub fn secret(&self, ticket: &Ticket) -> Option<Secret> {
        match self.table.lock().get(ticket) {
            Some(Promise::Open(secret, _)) => Some(*secret),
            Some(Promise::Kept) | None => None,
        }
    }

    /// Gives a link to the session that announced it.
    pub fn deliver(&self, ticket: &Ticket, keyed: Keyed) {
        // The entry stays with its `Announced`: nobody can announce the ticket meanwhile.
        let mut entries = self.table.lock();
        let promise = entries.get_mut(ticket);
        let promise = promise.map(|promise| std::mem::replace(promise, Promise::Kept));
        drop(entries);
        if let Some(Promise::Open(_, take)) = promise {
            take(keyed);
        }
    }
}

impl Awaited {
    /// The link, once it has come.
    pub fn come(&self) -> Option<Keyed> {
        self.link.try_recv().ok()
    }

    /// Waits for the link; none when it did not come in time.
    pub fn wait(self, bound: Duration) -> Option<Keyed> {
        self.link.recv_timeout(bound).ok()
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        self.table.lock().remove(&self.ticket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use weft_wire::socket::Socket;

    const TICKET: Ticket = [1; 16];
    const SECRET: Secret = [2; 32];

    fn link() -> Keyed {
        Keyed {
            socket: Socket::Unix(UnixStream::pair().unwrap().0),
            send_key: [3; 32],
            receive_key: [4; 32],
        }
    }

    #[test]
    fn a_ticket_serves_once() {
        let expected = Expected::default();
        let awaited = expected.announce(TICKET, SECRET).unwrap();
        assert_eq!(expected.secret(&TICKET), Some(SECRET));
        assert_eq!(expected.secret(&[9; 16]), None);
        expected.deliver(&TICKET, link());
        assert_eq!(expected.secret(&TICKET), None);
        expected.deliver(&TICKET, link());
        assert!(awaited.wait(Duration::ZERO).is_some());
    }

    #[test]
    fn a_ticket_of_a_start_that_failed_is_good_no_more() {
        let expected = Expected::default();
        drop(expected.announce(TICKET, SECRET).unwrap());
        assert_eq!(expected.secret(&TICKET), None);
        let late = expected.announce(TICKET, SECRET).unwrap();
        assert!(late.wait(Duration::ZERO).is_none());
        assert_eq!(expected.secret(&TICKET), None);
    }

    #[test]
    fn nobody_takes_a_ticket_of_another_session() {
        let expected = Expected::default();
        let awaited = expected.announce(TICKET, SECRET).unwrap();
        assert!(expected.announce(TICKET, [5; 32]).is_none());
        assert_eq!(expected.secret(&TICKET), Some(SECRET));
        expected.deliver(&TICKET, link());
        assert!(expected.announce(TICKET, [5; 32]).is_none());
        drop(awaited);
        assert!(expected.announce(TICKET, [5; 32]).is_some());
    }
}
