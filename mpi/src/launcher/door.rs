//! Where agents come in: a thread for each connection, which ends with it.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail};
use weft_wire::channel::{Channel, Writer};
use weft_wire::handshake;
use weft_wire::hello::{self, Hello};
use weft_wire::keys::{PublicKey, StaticKeys};
use weft_wire::socket;

use super::Event;
use crate::control::{FromAgent, Greeting, Offer, SILENCE_MAX, STEP_MAX, ToAgent};

/// Connections at one time, those of strangers included.
const CONNECTIONS_MAX: usize = 256;

/// What comes from agents.
pub enum AgentEvent {
    Up {
        link: u64,
        key: PublicKey,
        writer: Box<Writer>,
        offer: Offer,
    },
    Heard {
        link: u64,
        message: FromAgent,
    },
    Down {
        link: u64,
        why: String,
    },
    /// The host cannot be used.
    Unfit(String),
}

/// Who may come in: by secret, the reservation, and the key that showed the secret first.
#[derive(Default)]
pub struct Guests(Mutex<BTreeMap<String, (u32, Option<PublicKey>)>>);

impl Guests {
    pub fn expect(&self, secret: String, reservation: u32, key: Option<PublicKey>) {
        let mut guests = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        guests.insert(secret, (reservation, key));
    }

    pub fn forget(&self, reservation: u32) {
        let mut guests = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        guests.retain(|_, (other, _)| *other != reservation);
    }

    /// The reservation of the secret, if this key may show it.
    fn admit(&self, secret: &str, key: PublicKey) -> Option<u32> {
        let mut guests = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (reservation, first) = guests.get_mut(secret)?;
        (*first.get_or_insert(key) == key).then_some(*reservation)
    }
}

struct Door {
    keys: StaticKeys,
    /// What machines need of a host's CPU.
    cpu_features: Vec<String>,
    guests: Arc<Guests>,
    events: Sender<Event>,
    links: AtomicU64,
    connections: AtomicUsize,
}

/// Accepts for as long as the launcher lives.
pub fn open(
    listener: TcpListener,
    keys: StaticKeys,
    cpu_features: Vec<String>,
    guests: Arc<Guests>,
    events: Sender<Event>,
) -> anyhow::Result<()> {
    let door = Arc::new(Door {
        keys,
        cpu_features,
        guests,
        events,
        links: AtomicU64::new(1),
        connections: AtomicUsize::new(0),
    });
    let accept = move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => door.clone().admit(stream),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                // Out of descriptors: the next may fare better, but not at once.
                Err(_) => thread::sleep(Duration::from_millis(100)),
            }
        }
    };
    let thread = thread::Builder::new().name("door".into());
    thread.spawn(accept).context("cannot start a thread")?;
    Ok(())
}

impl Door {
    fn admit(self: Arc<Self>, stream: TcpStream) {
        if self.connections.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
            self.connections.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let door = self.clone();
        let serve = move || {
            // A stranger's failure is nobody's business: anybody may connect.
            let _ = door.serve(stream);
            door.connections.fetch_sub(1, Ordering::AcqRel);
        };
        let spawned = thread::Builder::new().name("agent".into()).spawn(serve);
        if spawned.is_err() {
            self.connections.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn serve(&self, stream: TcpStream) -> anyhow::Result<()> {
        socket::tune(&stream)?;
        let incoming = handshake::accept(stream.into(), STEP_MAX)?;
        let (mut channel, key) = incoming.control(&self.keys, |_| true)?;
        let ours = Hello::here();
        let theirs = hello::exchange(&mut channel, &ours, STEP_MAX)?;
        let Greeting { secret, offer } = channel.receive(STEP_MAX)?;
        let Some(reservation) = self.guests.admit(&secret, key) else {
            // An agent whose job nobody knows any more: it would hold its host until its end. It
            // believes this, since it has dialled this launcher's key.
            channel.send(&ToAgent::End)?;
            bail!("it has no secret of this cluster");
        };
        let features: Vec<&str> = self.cpu_features.iter().map(String::as_str).collect();
        if let Err(mismatch) = hello::check_guest(&ours, &theirs, &features) {
            self.tell(reservation, AgentEvent::Unfit(mismatch.to_string()))?;
            // It believes this, since it has dialled this launcher's key.
            channel.send(&ToAgent::End)?;
            bail!("another build, or a CPU that lacks something");
        }
        match offer {
            Ok(offer) => self.listen(reservation, key, offer, channel),
            Err(why) => {
                self.tell(reservation, AgentEvent::Unfit(why))?;
                channel.send(&ToAgent::End)?;
                bail!("a host that cannot be used");
            }
        }
    }

    fn listen(
        &self,
        reservation: u32,
        key: PublicKey,
        offer: Offer,
        channel: Channel,
    ) -> anyhow::Result<()> {
        let link = self.links.fetch_add(1, Ordering::AcqRel);
        let (mut reader, writer) = channel.split();
        let mut event = AgentEvent::Up {
            link,
            key,
            writer: Box::new(writer),
            offer,
        };
        loop {
            self.tell(reservation, event)?;
            event = match reader.receive(SILENCE_MAX) {
                Ok(message) => AgentEvent::Heard { link, message },
                Err(error) => {
                    let why = error.to_string();
                    return self.tell(reservation, AgentEvent::Down { link, why });
                }
            };
        }
    }

    fn tell(&self, reservation: u32, event: AgentEvent) -> anyhow::Result<()> {
        let event = Event::Agent { reservation, event };
        self.events.send(event).context("the launcher has ended")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_for_the_key_that_showed_it_first() {
        let guests = Guests::default();
        let (one, other) = (PublicKey([1; 32]), PublicKey([2; 32]));
        guests.expect("a".into(), 7, None);
        guests.expect("b".into(), 8, Some(other));
        assert_eq!(guests.admit("a", one), Some(7));
        assert_eq!(guests.admit("a", one), Some(7), "again after a cut");
        assert_eq!(guests.admit("a", other), None);
        assert_eq!(guests.admit("b", one), None);
        assert_eq!(guests.admit("c", one), None);
        guests.forget(7);
        assert_eq!(guests.admit("a", one), None);
    }
}
