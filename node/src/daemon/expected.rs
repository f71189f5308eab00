//! Links that a session waits for: a launcher announced them, and somebody is
//! going to dial.
//!
//! An entry lives from `announce` until it was delivered or its session dropped
//! it. A ticket serves once: the secret goes with the first connection that
//! proves to know it, and a connection that does not know it changes nothing.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard};

use weft_wire::handshake::{Keyed, Secret, Ticket};

/// All links that all sessions of a daemon wait for.
#[derive(Default)]
pub struct Expected {
    /// Guards the table alone.
    table: Mutex<HashMap<Ticket, (Secret, SyncSender<Keyed>)>>,
}

impl Expected {
    fn lock(&self) -> MutexGuard<'_, HashMap<Ticket, (Secret, SyncSender<Keyed>)>> {
        // A panic aborts the process, so the lock cannot be poisoned.
        self.table
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A link with this ticket will come; the receiver gets it.
    pub fn announce(&self, ticket: Ticket, secret: Secret) -> Receiver<Keyed> {
        let (sender, receiver) = sync_channel(1);
        self.lock().insert(ticket, (secret, sender));
        receiver
    }

    /// The secret that belongs to a ticket.
    pub fn secret(&self, ticket: &Ticket) -> Option<Secret> {
        self.lock().get(ticket).map(|(secret, _)| *secret)
    }

    /// Gives a link to whoever announced it.
    pub fn deliver(&self, ticket: &Ticket, keyed: Keyed) {
        if let Some((_, sender)) = self.lock().remove(ticket) {
            // The session may have gone meanwhile; the connection goes too.
            let _ = sender.try_send(keyed);
        }
    }

    /// The session waits no longer.
    pub fn forget(&self, ticket: &Ticket) {
        self.lock().remove(ticket);
    }
}
