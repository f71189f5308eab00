//! The loop.

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::caller::{Caller, Request, refuse};
use crate::card::Card;
use crate::connection::Connection;
use crate::door::Door;
use crate::frame::{For, announcement};
use crate::stack::{Face, Stack};
use crate::{CONNECTIONS_MAX, GatewayError, Options};

/// Ports of the gateway's side: those that are for such connections (RFC 6335), one after the
/// other, so that a port is not used again soon.
const PORTS: u16 = 49_152;
/// Connections in TIME-WAIT. If there are more the oldest is forgotten.
const LATE_MAX: usize = 64;
/// The longest wait in one piece: poll(2) counts in milliseconds of an int.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// What the loop waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Life,
    Door,
    Switch,
    Caller(usize),
    Connection(usize),
}

/// All that the thread owns.
pub struct Shell {
    /// It ends when the other end does.
    life: UnixStream,
    switch: PathBuf,
    door: Door,
    card: Card,
    face: Face,
    base: Stack,
    callers: Vec<Caller>,
    connections: VecDeque<Box<Connection>>,
    /// The last port that was used.
    port: u16,
    random: RandomState,
    seeds: u64,
}

impl Shell {
    /// Opens its sockets.
    pub fn open(options: &Options, life: UnixStream) -> Result<Shell, GatewayError> {
        let now = Instant::now();
        let Options {
            switch,
            mac,
            address,
            prefix,
            listen,
        } = options;
        let failed = |source| GatewayError::NoSwitch {
            path: switch.clone(),
            source,
        };
        let announcement = announcement(*mac, *address);
        let card = Card::open(switch.clone(), announcement, now).map_err(failed)?;
        let face = Face {
            card: *mac,
            address: *address,
            prefix: *prefix,
        };
        let random = RandomState::new();
        Ok(Shell {
            life,
            switch: switch.clone(),
            door: Door::open(listen)?,
            card,
            base: Stack::base(&face, now),
            face,
            callers: Vec::new(),
            connections: VecDeque::new(),
            port: PORTS | (random.hash_one("port") as u16),
            random,
            seeds: 0,
        })
    }

    /// Serves until the other end of its life ends, or the kernel refuses a wait.
    pub fn run(mut self) {
        while let Ok(ready) = self.wait() {
            if ready.iter().any(|(source, _)| *source == Source::Life) {
                break;
            }
            let now = Instant::now();
            for (source, flags) in &ready {
                match source {
                    Source::Connection(index) => self.connections[*index].note(*flags, now),
                    Source::Switch => self.read_switch(now),
                    Source::Life | Source::Door | Source::Caller(_) => {}
                }
            }
            self.card.tick(now);
            self.hear_callers(&ready, now);
            if ready.iter().any(|(source, _)| *source == Source::Door) {
                self.accept(now);
            }
            self.advance(now);
        }
        for connection in &mut self.connections {
            connection.abort();
        }
        self.send(Instant::now());
    }

    /// Waits until a socket is ready, or something is due.
    fn wait(&mut self) -> nix::Result<Vec<(Source, PollFlags)>> {
        let now = Instant::now();
        let timeout = self.timeout(now);
        let reads = PollFlags::POLLIN;
        let mut sources = vec![(Source::Life, self.life.as_fd(), reads)];
        if self.door.rests_until.is_none_or(|until| until <= now) {
            self.door.rests_until = None;
            sources.push((Source::Door, self.door.descriptor(), reads));
        }
        if let Some(socket) = self.card.socket() {
            let flags = match self.card.output.is_empty() {
                true => reads,
                false => reads | PollFlags::POLLOUT,
            };
            sources.push((Source::Switch, socket.as_fd(), flags));
        }
        for (index, caller) in self.callers.iter().enumerate() {
            sources.push((Source::Caller(index), caller.client.as_fd(), reads));
        }
        for (index, connection) in self.connections.iter_mut().enumerate() {
            if let Some((client, flags)) = connection.polled() {
                sources.push((Source::Connection(index), client.as_fd(), flags));
            }
        }
        let polled = sources.iter();
        let polled = polled.map(|(_, descriptor, flags)| PollFd::new(*descriptor, *flags));
        let mut polled: Vec<PollFd<'_>> = polled.collect();
        match poll(&mut polled, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => return Err(error),
        }
        let ready = sources.iter().zip(&polled);
        let ready = ready.filter_map(|((source, ..), polled)| Some((*source, polled.revents()?)));
        Ok(ready.filter(|(_, flags)| !flags.is_empty()).collect())
    }

    /// Until the next thing is due; for ever if nothing is.
    fn timeout(&mut self, now: Instant) -> PollTimeout {
        let stands = self.card.socket().is_none() || !self.card.output.has_room();
        let connections = self.connections.iter_mut();
        let connections = connections.map(|connection| match stands {
            true => connection.deadline(),
            false => connection.due(now),
        });
        let due = connections
            .chain(self.callers.iter().map(|caller| caller.until))
            .chain(self.door.rests_until)
            .chain(self.card.tries_at())
            .min();
        let Some(due) = due else {
            return PollTimeout::NONE;
        };
        let wait = due.saturating_duration_since(now).min(WAIT_MAX);
        // Rounded up: a timer that is not due yet would be looked at again and again.
        PollTimeout::from(wait.as_millis() as u16 + 1)
    }

    fn read_switch(&mut self, now: Instant) {
        let Shell {
            card,
            base,
            connections,
            ..
        } = self;
        card.read(now, |frame, output| match For::of(frame) {
            For::Port { from, port } => {
                let found = connections
                    .iter_mut()
                    .find(|connection| connection.port() == port && connection.to() == from);
                match found {
                    Some(connection) => connection.receive(frame, output, now),
                    None => base.receive(frame, output, now),
                }
            }
            For::Machine(address) => connections
                .iter_mut()
                .filter(|connection| *connection.to().ip() == address)
                .for_each(|connection| connection.receive(frame, output, now)),
            For::Base => base.receive(frame, output, now),
        });
    }

    /// Moves bytes, sends frames, and forgets what has ended.
    fn advance(&mut self, now: Instant) {
        for connection in &mut self.connections {
            connection.step(now);
        }
        self.send(now);
        self.connections
            .retain(|connection| !connection.has_ended());
        let late = self.late();
        if late > LATE_MAX {
            let oldest = self.connections.iter().position(|other| other.is_late());
            oldest.and_then(|index| self.connections.remove(index));
        }
        // Each is the first in turn.
        if !self.connections.is_empty() {
            self.connections.rotate_left(1);
        }
    }

    fn late(&self) -> usize {
        let late = self.connections.iter().filter(|other| other.is_late());
        late.count()
    }

    /// While there is no switch, the stacks stand.
    fn send(&mut self, now: Instant) {
        if self.card.socket().is_none() {
            return;
        }
        for connection in &mut self.connections {
            connection.send(&mut self.card.output, now);
        }
        self.card.flush(now);
    }
}

/// Clients that come.
impl Shell {
    fn accept(&mut self, now: Instant) {
        for client in self.door.accept(now) {
            let served = self.callers.len() + self.connections.len() - self.late();
            match served < CONNECTIONS_MAX {
                true => self.callers.push(Caller::new(client, now)),
                false => refuse(
                    &client,
                    &format!("the gateway has {CONNECTIONS_MAX} connections, and no more: end one"),
                ),
            }
        }
    }

    fn hear_callers(&mut self, ready: &[(Source, PollFlags)], now: Instant) {
        let callers = std::mem::take(&mut self.callers);
        for (index, mut caller) in callers.into_iter().enumerate() {
            let is_ready = ready
                .iter()
                .any(|(source, _)| *source == Source::Caller(index));
            let heard = match is_ready {
                true => caller.read(),
                false if now >= caller.until => Err("nothing was asked in time: ask sooner".into()),
                false => Ok(None),
            };
            match heard {
                Ok(None) => self.callers.push(caller),
                Ok(Some(request)) => self.connect(caller.client, request, now),
                Err(why) => refuse(&caller.client, &why),
            }
        }
    }

    fn connect(&mut self, client: UnixStream, request: Request, now: Instant) {
        let to = request.to;
        if let Some(why) = self.objection(to) {
            return refuse(&client, &why);
        }
        let port = self.free_port(to);
        self.seeds += 1;
        let mut hasher = self.random.build_hasher();
        hasher.write_u64(self.seeds);
        let chosen = (&self.face, port, hasher.finish());
        let connection = Connection::new(client, request, chosen, now);
        self.connections.push_back(Box::new(connection));
    }

    /// Why there is no connection to this address.
    fn objection(&self, to: SocketAddrV4) -> Option<String> {
        let Face {
            address, prefix, ..
        } = self.face;
        let network = Ipv4Addr::from_bits(address.to_bits() & !(u32::MAX >> prefix));
        let switch = self.switch.display();
        if !self.face.reaches(*to.ip()) {
            Some(format!(
                "{} is no machine's address in the network {network}/{prefix}: give one of its \
                machines",
                to.ip()
            ))
        } else if to.port() == 0 {
            Some(format!("{to} has no port: give one from 1 to 65535"))
        } else if self.card.socket().is_none() {
            Some(format!(
                "the switch at {switch} does not run: start it again"
            ))
        } else {
            None
        }
    }

    /// The next port that no connection to this address has.
    fn free_port(&mut self, to: SocketAddrV4) -> u16 {
        loop {
            self.port = PORTS | self.port.wrapping_add(1);
            let port = self.port;
            let taken = self.connections.iter();
            if taken
                .clone()
                .all(|other| (other.port(), other.to()) != (port, to))
            {
                return port;
            }
        }
    }
}
