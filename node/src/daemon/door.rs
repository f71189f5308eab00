//! The door: connections whose makers have not proven yet who they are.
//!
//! ```text
//! accepted ──▶ stranger ──proof──▶ guest (a session), or a link that was awaited
//!                 └── no proof in time, or another takes its place ──▶ gone
//! ```
//!
//! Invariants: at most [`Limits::strangers`] strangers have a place, at most
//! [`Limits::each_address`] of one address; guests have places of their own, which no
//! stranger takes, at most [`Limits::guests`] and [`GUESTS_OF_PEER_MAX`] of one key.
//!
//! Where one stranger more would be too many, the oldest goes: of its own address if
//! that has its share, else of the address that has most. An honest handshake takes
//! milliseconds, one that is meant to hold a place takes as long as it can; so the
//! oldest is hardly ever an honest one, also among many of the same address.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use weft_wire::keys::PublicKey;

/// Most sessions of one peer: one for each slice that it could have, and some that ask
/// what there is.
const GUESTS_OF_PEER_MAX: usize = 320;
/// Descriptors that a daemon wants: two for each stranger, two for each guest, and for
/// 256 slices what starting and watching each takes.
const DESCRIPTORS_WANTED: u64 = 16 << 10;
/// A stranger's socket, and another to end it with; so a session's.
const DESCRIPTORS_EACH: u64 = 2;

/// How long an arrival waits for a thread that was told to end. On a busy host such
/// threads may take their time; meanwhile connections wait in the kernel's queue.
const THREAD_WAIT: Duration = Duration::from_millis(500);

/// How many may be there at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections that have proven nothing.
    pub strangers: usize,
    /// Of these, from one address.
    pub each_address: usize,
    /// Sessions.
    pub guests: usize,
}

impl Limits {
    /// The limits of a process that may have this many descriptors: a quarter of
    /// them for strangers, a quarter for sessions, the rest for slices and their links.
    pub fn for_descriptors(descriptors: u64) -> Limits {
        let quarter = (descriptors / 4 / DESCRIPTORS_EACH) as usize;
        let strangers = quarter.clamp(16, 512);
        Limits {
            strangers,
            each_address: strangers / 2,
            guests: quarter.clamp(16, 1024),
        }
    }

    /// Raises this process's limit of descriptors as far as it is wanted and allowed.
    pub fn raised() -> Limits {
        let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
            return Limits::for_descriptors(0);
        };
        let wanted = DESCRIPTORS_WANTED.min(hard).max(soft);
        match setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) {
            Ok(()) => Limits::for_descriptors(wanted),
            Err(_) => Limits::for_descriptors(soft),
        }
    }
}

/// Where a connection comes from, as far as one can have many of it: an IPv4 address,
/// or the network (/64) of an IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Origin(IpAddr);

impl Origin {
    fn of(address: SocketAddr) -> Origin {
        Origin(match address.ip().to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) >> 64 << 64;
                Ipv6Addr::from(network).into()
            }
            address => address,
        })
    }
}

/// See the module.
pub struct Door {
    limits: Limits,
    present: Mutex<Present>,
    /// A stranger's thread ended.
    ended: Condvar,
}

#[derive(Default)]
struct Present {
    /// Strangers with a place, in the order in which they came.
    strangers: BTreeMap<u64, (Origin, TcpStream)>,
    /// How many each address has of them.
    of_address: HashMap<Origin, usize>,
    /// Strangers whose threads have not ended, with a place or without.
    threads: usize,
    arrivals: u64,
    guests: HashMap<PublicKey, usize>,
}

impl Present {
    /// Takes a stranger's place; its other descriptor, if it had one still.
    fn take(&mut self, number: u64) -> Option<TcpStream> {
        let (origin, socket) = self.strangers.remove(&number)?;
        if let Some(count) = self.of_address.get_mut(&origin) {
            *count -= 1;
            if *count == 0 {
                self.of_address.remove(&origin);
            }
        }
        Some(socket)
    }

    /// The address that has most; of several, the one whose oldest is oldest.
    fn most(&self) -> Option<Origin> {
        let most = self.of_address.values().max()?;
        let mut origins = self.strangers.values().map(|(origin, _)| *origin);
        origins.find(|origin| self.of_address.get(origin) == Some(most))
    }

    /// Ends the oldest of an address.
    fn evict(&mut self, origin: Origin) {
        let mut strangers = self.strangers.iter();
        let oldest = strangers.find(|(_, (from, _))| *from == origin);
        let Some(number) = oldest.map(|(number, _)| *number) else {
            return;
        };
        if let Some(socket) = self.take(number) {
            // Its thread, which waits for it, ends. It fails only if it is gone.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Door {
    /// A door that nobody has come to yet.
    pub fn new(limits: Limits) -> Arc<Door> {
        Arc::new(Door {
            limits,
            present: Mutex::default(),
            ended: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Present> {
        // A panic aborts the process, so the lock cannot be poisoned.
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection that was just accepted. Where too many of those that
    /// lost their places have not ended yet, it waits for one of them; `None` if none
    /// ends within [`THREAD_WAIT`].
    pub fn admit(self: &Arc<Door>, socket: TcpStream, from: SocketAddr) -> Option<Stranger> {
        let origin = Origin::of(from);
        let most = 2 * self.limits.strangers;
        let (mut present, waited) = self
            .ended
            .wait_timeout_while(self.lock(), THREAD_WAIT, |present| present.threads >= most)
            .unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return None;
        }
        let of_address = present.of_address.get(&origin).copied().unwrap_or(0);
        if of_address >= self.limits.each_address {
            present.evict(origin);
        } else if present.strangers.len() >= self.limits.strangers
            && let Some(origin) = present.most()
        {
            present.evict(origin);
        }
        let number = present.arrivals;
        present.arrivals += 1;
        present.threads += 1;
        *present.of_address.entry(origin).or_default() += 1;
        present.strangers.insert(number, (origin, socket));
        Some(Stranger {
            door: self.clone(),
            number,
        })
    }

    /// Sessions that are served now.
    pub fn guests(&self) -> usize {
        self.lock().guests.values().sum()
    }
}

/// Why a peer cannot be served now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DoorError {
    /// It took too long to prove its key.
    #[error("other connections took its place")]
    PlaceTaken,
    /// All peers together have as many sessions as there may be.
    #[error("too many connections")]
    Full,
    /// This peer has as many as one may have.
    #[error("too many connections of this peer")]
    FullOfPeer,
}

/// A connection's place before its maker has proven anything.
pub struct Stranger {
    door: Arc<Door>,
    number: u64,
}

impl Stranger {
    /// The other end proved that an awaited link is its: whether it still had its place.
    /// The connection is nobody's to end from then on.
    pub fn leave(self) -> bool {
        self.door.lock().take(self.number).is_some()
    }

    /// The other end proved that it has this key, of a peer: a guest, and the other
    /// descriptor of its connection.
    ///
    /// # Errors
    /// Why it cannot be served now.
    pub fn prove(self, key: PublicKey) -> Result<(Guest, TcpStream), DoorError> {
        let mut present = self.door.lock();
        let socket = present.take(self.number).ok_or(DoorError::PlaceTaken)?;
        let all: usize = present.guests.values().sum();
        if all >= self.door.limits.guests {
            return Err(DoorError::Full);
        }
        let own = present.guests.entry(key).or_default();
        if *own >= GUESTS_OF_PEER_MAX {
            return Err(DoorError::FullOfPeer);
        }
        *own += 1;
        drop(present);
        let door = self.door.clone();
        Ok((Guest { door, key }, socket))
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut present = self.door.lock();
        present.threads -= 1;
        present.take(self.number);
        self.door.ended.notify_one();
    }
}

/// A session's place.
pub struct Guest {
    door: Arc<Door>,
    key: PublicKey,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut present = self.door.lock();
        if let Some(count) = present.guests.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                present.guests.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;

    const LIMITS: Limits = Limits {
        strangers: 6,
        each_address: 3,
        guests: 2,
    };

    struct Street {
        door: Arc<Door>,
        listener: TcpListener,
    }

    /// One that came, as both sides see it.
    struct Came {
        stranger: Option<Stranger>,
        outside: TcpStream,
    }

    impl Came {
        /// Whether the door has ended the connection: nothing else is ever sent.
        fn was_ended(&mut self) -> bool {
            self.outside.set_nonblocking(true).unwrap();
            matches!(self.outside.read(&mut [0]), Ok(0))
        }
    }

    impl Street {
        fn new() -> Street {
            Street {
                door: Door::new(LIMITS),
                listener: TcpListener::bind("127.0.0.1:0").unwrap(),
            }
        }

        fn comes(&self, from: &str) -> Came {
            let outside = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
            let (socket, _) = self.listener.accept().unwrap();
            let from = SocketAddr::new(from.parse().unwrap(), 1);
            let stranger = self.door.admit(socket, from);
            Came { stranger, outside }
        }
    }

    #[test]
    fn many_of_one_address_take_each_others_places() {
        let street = Street::new();
        let mut honest = street.comes("10.0.0.1");
        let mut crowd: Vec<Came> = (0..8).map(|_| street.comes("10.0.0.2")).collect();
        let ended: Vec<bool> = crowd.iter_mut().map(Came::was_ended).collect();
        assert_eq!(ended, [true, true, true, true, true, false, false, false]);
        assert!(!honest.was_ended());
        assert!(honest.stranger.unwrap().prove(PublicKey([1; 32])).is_ok());
    }

    #[test]
    fn many_addresses_take_the_places_of_those_that_have_most() {
        let street = Street::new();
        let mut greedy: Vec<Came> = (0..3).map(|_| street.comes("10.0.0.2")).collect();
        let mut others: Vec<Came> = (3..8)
            .map(|host| street.comes(&format!("10.0.0.{host}")))
            .collect();
        let ended: Vec<bool> = greedy.iter_mut().map(Came::was_ended).collect();
        assert_eq!(ended, [true, true, false]);
        assert!(others.iter_mut().all(|other| !other.was_ended()));
    }

    #[test]
    fn an_address_of_ipv6_is_its_network() {
        let origin = |text: &str| Origin::of(SocketAddr::new(text.parse().unwrap(), 1));
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::ffff:1"));
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:1::1"));
        assert_eq!(origin("::ffff:10.0.0.1"), origin("10.0.0.1"));
        assert_ne!(origin("10.0.0.1"), origin("10.0.0.2"));
    }

    #[test]
    fn guests_have_places_of_their_own() {
        let street = Street::new();
        let key = PublicKey([1; 32]);
        let prove = |came: Came| came.stranger.unwrap().prove(key).map(|(guest, _)| guest);
        let first = prove(street.comes("10.0.0.1")).unwrap();
        let crowd: Vec<Came> = (0..8)
            .map(|host| street.comes(&format!("10.0.1.{host}")))
            .collect();
        let second = prove(street.comes("10.0.0.1")).unwrap();
        assert_eq!(street.door.guests(), 2);
        assert!(prove(street.comes("10.0.0.1")).is_err());
        drop((first, second));
        assert_eq!(street.door.guests(), 0);
        assert!(prove(street.comes("10.0.0.1")).is_ok());
        drop(crowd);
        let present = street.door.lock();
        assert!(present.strangers.is_empty() && present.of_address.is_empty());
        assert_eq!(present.threads, 0);
    }

    #[test]
    fn those_that_do_not_go_keep_more_from_coming() {
        let street = Street::new();
        let crowd: Vec<Came> = (0..20).map(|_| street.comes("10.0.0.2")).collect();
        let admitted = crowd.iter().filter(|came| came.stranger.is_some()).count();
        assert_eq!(admitted, 2 * LIMITS.strangers);
        let evicted = crowd.into_iter().next().unwrap();
        assert!(!evicted.stranger.unwrap().leave());
    }

    #[test]
    fn few_descriptors_leave_room_for_slices() {
        let few = Limits::for_descriptors(1024);
        assert_eq!(
            (few.strangers, few.each_address, few.guests),
            (128, 64, 128)
        );
        let many = Limits::for_descriptors(DESCRIPTORS_WANTED);
        assert_eq!(
            (many.strangers, many.each_address, many.guests),
            (512, 256, 1024)
        );
    }
}
