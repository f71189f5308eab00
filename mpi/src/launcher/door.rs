//! Where agents come in: a thread for each connection, which ends with it.
//!
//! Invariant: at most [`STRANGERS_MAX`] connections have shown no secret yet; a newer one takes the
//! place of the oldest. So strangers that connect and say nothing keep no agent out: its greeting
//! takes milliseconds.

use std::collections::{BTreeMap, VecDeque};
use std::io::ErrorKind;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// Connections at one time that have shown no secret.
const STRANGERS_MAX: usize = 64;

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
    /// The oldest first.
    strangers: Mutex<VecDeque<(u64, TcpStream)>>,
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
        strangers: Mutex::default(),
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
        let link = self.links.fetch_add(1, Ordering::AcqRel);
        // Out of descriptors: the stranger may come again.
        let Ok(copy) = stream.try_clone() else { return };
        let mut strangers = self.strangers();
        if strangers.len() >= STRANGERS_MAX
            && let Some((_, oldest)) = strangers.pop_front()
        {
            // It may have gone by itself.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        strangers.push_back((link, copy));
        drop(strangers);
        let door = self.clone();
        let serve = move || {
            // A stranger's failure is nobody's business: anybody may connect.
            let _ = door.serve(link, stream);
            door.no_stranger(link);
        };
        let spawned = thread::Builder::new().name("agent".into()).spawn(serve);
        if spawned.is_err() {
            self.no_stranger(link);
        }
    }

    fn strangers(&self) -> MutexGuard<'_, VecDeque<(u64, TcpStream)>> {
        self.strangers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// It has shown a secret, or has gone.
    fn no_stranger(&self, link: u64) {
        self.strangers().retain(|(other, _)| *other != link);
    }

    fn serve(&self, link: u64, stream: TcpStream) -> anyhow::Result<()> {
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
        self.no_stranger(link);
        let features: Vec<&str> = self.cpu_features.iter().map(String::as_str).collect();
        if let Err(mismatch) = hello::check_guest(&ours, &theirs, &features) {
            self.tell(reservation, AgentEvent::Unfit(mismatch.to_string()))?;
            // It believes this, since it has dialled this launcher's key.
            channel.send(&ToAgent::End)?;
            bail!("another build, or a CPU that lacks something");
        }
        match offer {
            Ok(offer) => self.listen(link, reservation, key, offer, channel),
            Err(why) => {
                self.tell(reservation, AgentEvent::Unfit(why))?;
                channel.send(&ToAgent::End)?;
                bail!("a host that cannot be used");
            }
        }
    }

    fn listen(
        &self,
        link: u64,
        reservation: u32,
        key: PublicKey,
        offer: Offer,
        channel: Channel,
    ) -> anyhow::Result<()> {
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
    use std::io::Read as _;
    use std::time::Instant;

    use super::*;

    #[test]
    fn silent_strangers_make_room_for_others() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let keys = weft_wire::keys::generate().unwrap();
        let (events, _events) = std::sync::mpsc::channel();
        open(listener, keys, Vec::new(), Arc::default(), events).unwrap();
        let begun = Instant::now();
        let connect = |_| TcpStream::connect(address).unwrap();
        let mut strangers: Vec<TcpStream> = (0..STRANGERS_MAX + 5).map(connect).collect();
        for oldest in &mut strangers[..5] {
            oldest.set_read_timeout(Some(STEP_MAX)).unwrap();
            // The end, or a reset: not a timeout.
            let said = oldest.read(&mut [0; 64]).map_err(|error| error.kind());
            assert!(!matches!(said, Err(ErrorKind::WouldBlock)), "{said:?}");
        }
        assert!(begun.elapsed() < STEP_MAX, "they ended by themselves");
    }

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
