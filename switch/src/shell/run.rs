//! The loop.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use weft_wire::handshake::Keyed;
use weft_wire::keys::PublicKey;
use weft_wire::socket::check_peer;

use super::door::Door;
use super::handshakes::{Handshakes, Outcome};
use super::machine::Machine;
use super::orders::{Order, Orders};
use super::peer::Link;
use super::report::{Log, MachineReport, Output, PeerReport, Report};
use super::tap::Tap;
use super::{AGAIN, Options, ShellError, TICK};
use crate::core::{PortId, Switch};

/// The core's time when the process starts: what others say is older than that has a place.
const START_MS: u64 = 1 << 40;
/// How often the core forgets what is too old.
const FORGET: Duration = Duration::from_secs(1);
/// Connections that are accepted in one round.
const ACCEPTED: usize = 16;
/// How long none is accepted after that failed: out of descriptors, for example.
const REST: Duration = Duration::from_millis(200);

/// Runs a switch until `input` ends.
///
/// # Errors
/// It cannot listen, or the kernel refuses a wait.
pub fn run(
    options: Options,
    input: BorrowedFd<'_>,
    output: BorrowedFd<'_>,
) -> Result<(), ShellError> {
    let mut shell = Shell::open(options).inspect_err(|error| {
        // A line of less than PIPE_BUF bytes: the process that started the switch may read it.
        let mut said = Output::default();
        said.say(&Report::Error(error.to_string()));
        let _ = said.flush(output);
    })?;
    let mut output = Some(output);
    loop {
        let ready = shell.wait(input, output).map_err(ShellError::System)?;
        let now = Instant::now();
        if ready.iter().any(|(what, _)| *what == Source::Orders) {
            match shell.orders.read(input).map_err(ShellError::System)? {
                None => return Ok(()),
                Some(orders) => shell.obey(orders, now),
            }
        }
        for (source, flags) in ready {
            shell.serve(source, flags, now);
        }
        shell.tick(now);
        shell.flush(now);
        if let Some(lost) = shell.tap_lost.take() {
            return Err(lost);
        }
        // Nobody reads the reports any more: the switch goes on.
        if let Some(descriptor) = output
            && shell.output.flush(descriptor).is_err()
        {
            output = None;
        }
        if output.is_none() {
            shell.output = Output::default();
        }
    }
}

/// What the loop waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Orders,
    Output,
    Handshakes,
    Listener,
    Door,
    Machine(PortId),
    Peer(PublicKey),
    Tap,
}

/// Another switch.
struct Peer {
    port: PortId,
    address: String,
    detour: bool,
    state: State,
    /// Links since the start.
    links: u64,
    /// How long to wait before it is dialled again.
    again: Duration,
    /// That it cannot be reached was said.
    complained: bool,
}

enum State {
    /// Dialled at that time, where this side dials.
    Down(Instant),
    Dialling,
    Up(Box<Link>),
}

struct Shell {
    core: Switch,
    ours: PublicKey,
    start: Instant,
    machines: BTreeMap<PortId, Machine>,
    peers: BTreeMap<PublicKey, Peer>,
    tap: Option<Tap>,
    /// Why it cannot be used any more: machines of other hosts cannot be reached, and the switch
    /// ends.
    tap_lost: Option<ShellError>,
    handshakes: Handshakes,
    listener: TcpListener,
    door: Door,
    /// No connection is accepted before.
    rests_until: Instant,
    forgets_at: Instant,
    orders: Orders,
    output: Output,
    log: Log,
    strangers: u64,
}

impl Shell {
    fn open(options: Options) -> Result<Shell, ShellError> {
        let Options {
            listen: address,
            machines,
            keys,
            tap,
        } = options;
        let mut core = Switch::default();
        let tap = tap.map(|name| Tap::open(&name, &mut core)).transpose()?;
        let failed = |source| ShellError::Listen { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let door = Door::open(&machines)?;
        let callers = door.callers().map_err(ShellError::System)?;
        let (now, key) = (Instant::now(), keys.public());
        let mut output = Output::default();
        let mtu = tap.as_ref().map(|tap| tap.mtu);
        output.say(&Report::Listening { address, key, mtu });
        let mut shell = Shell {
            core,
            ours: key,
            start: now,
            machines: BTreeMap::new(),
            peers: BTreeMap::new(),
            tap,
            tap_lost: None,
            handshakes: Handshakes::new(keys).map_err(ShellError::System)?,
            listener,
            door,
            rests_until: now,
            forgets_at: now,
            orders: Orders::default(),
            output,
            log: Log::new(now),
            strangers: 0,
        };
        for socket in callers {
            shell.welcome(socket, now);
        }
        Ok(shell)
    }

    fn ms(&self, now: Instant) -> u64 {
        START_MS + now.saturating_duration_since(self.start).as_millis() as u64
    }

    /// Waits until something is ready, for a tick at most.
    fn wait(
        &self,
        input: BorrowedFd<'_>,
        output: Option<BorrowedFd<'_>>,
    ) -> io::Result<Vec<(Source, PollFlags)>> {
        let reads = PollFlags::POLLIN;
        let mut sources = vec![
            (Source::Orders, input, reads),
            (Source::Handshakes, self.handshakes.woken().as_fd(), reads),
        ];
        if Instant::now() >= self.rests_until {
            sources.push((Source::Listener, self.listener.as_fd(), reads));
            sources.push((Source::Door, self.door.descriptor(), reads));
        }
        let output = output.filter(|_| self.output.waits());
        sources.extend(output.map(|output| (Source::Output, output, PollFlags::POLLOUT)));
        let both = |blocked| match blocked {
            true => reads | PollFlags::POLLOUT,
            false => reads,
        };
        for (port, machine) in &self.machines {
            let socket = machine.socket().as_fd();
            sources.push((Source::Machine(*port), socket, both(machine.blocked)));
        }
        for (key, peer) in &self.peers {
            if let State::Up(link) = &peer.state {
                let stream = link.stream().as_fd();
                sources.push((Source::Peer(*key), stream, both(link.is_blocked())));
            }
        }
        let tap = self.tap.as_ref().map(Tap::descriptor);
        sources.extend(tap.map(|tap| (Source::Tap, tap, reads)));
        let polled = sources
            .iter()
            .map(|(_, fd, flags)| PollFd::new(*fd, *flags));
        let mut polled: Vec<PollFd<'_>> = polled.collect();
        let patience = self.patience().as_millis() as u16;
        match poll(&mut polled, PollTimeout::from(patience)) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let flags = polled.iter().map(|polled| polled.revents());
        let ready = sources.iter().zip(flags);
        let ready = ready.filter_map(|((source, ..), flags)| Some((*source, flags?)));
        Ok(ready.filter(|(_, flags)| !flags.is_empty()).collect())
    }

    /// Until the next peer is dialled, or a tick.
    fn patience(&self) -> Duration {
        let now = Instant::now();
        let dials = self
            .peers
            .iter()
            .filter_map(|(key, peer)| match peer.state {
                State::Down(at) if self.ours < *key => Some(at.saturating_duration_since(now)),
                _ => None,
            });
        dials
            .fold(TICK, Duration::min)
            .max(Duration::from_millis(1))
    }

    fn serve(&mut self, source: Source, flags: PollFlags, now: Instant) {
        let reads = flags != PollFlags::POLLOUT;
        match source {
            Source::Orders | Source::Output => {}
            Source::Handshakes => self.take_handshakes(now),
            Source::Listener => self.accept_peers(now),
            Source::Door => self.accept_machines(now),
            Source::Machine(port) => {
                if let Some(machine) = self.machines.get_mut(&port) {
                    machine.blocked = false;
                }
                if reads {
                    self.read_machine(port, now);
                }
            }
            Source::Peer(key) => {
                if flags.contains(PollFlags::POLLOUT) {
                    self.flush_peer(key, now);
                }
                if reads {
                    self.read_peer(key, now);
                }
            }
            Source::Tap => self.read_tap(now),
        }
    }
}

/// Connections come and go.
impl Shell {
    fn accept_peers(&mut self, now: Instant) {
        for _ in 0..ACCEPTED {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => return self.rest(&error, now),
            };
            // Those with larger keys are dialled from here.
            let dials = self.peers.keys().filter(|key| **key < self.ours);
            let trusted: Vec<PublicKey> = dials.copied().collect();
            if let Err(error) = self.handshakes.accept(stream, trusted) {
                self.rest(&error, now);
            }
        }
    }

    fn accept_machines(&mut self, now: Instant) {
        for _ in 0..ACCEPTED {
            match self.door.accept() {
                Ok(None) => return,
                Ok(Some(socket)) => self.welcome(socket, now),
                Err(error) => return self.rest(&error, now),
            }
        }
    }

    /// A machine of the same user gets a port.
    fn welcome(&mut self, socket: UnixStream, now: Instant) {
        let machine = check_peer(&socket)
            .map_err(|error| error.to_string())
            .and_then(|()| Machine::new(socket).map_err(|error| error.to_string()))
            .and_then(|machine| {
                let port = self.core.add_machine().map_err(|full| full.to_string())?;
                Ok((port, machine))
            });
        match machine {
            Ok((port, machine)) => drop(self.machines.insert(port, machine)),
            Err(error) => {
                self.strangers += 1;
                self.log.say(now, &format!("no machine connects: {error}"));
            }
        }
    }

    /// Accepts nothing for a moment.
    fn rest(&mut self, error: &io::Error, now: Instant) {
        self.rests_until = now + REST;
        self.log
            .say(now, &format!("cannot take a connection: {error}"));
    }

    fn take_handshakes(&mut self, now: Instant) {
        for outcome in self.handshakes.outcomes() {
            match outcome {
                Outcome::Accepted {
                    result: Ok((keyed, key)),
                    ..
                } => self.up(key, keyed, now),
                Outcome::Accepted {
                    result: Err(why), ..
                } => {
                    self.strangers += 1;
                    self.log
                        .say(now, &format!("a connection was turned away: {why}"));
                }
                Outcome::Dialled {
                    key,
                    result: Ok(keyed),
                } => self.up(key, keyed, now),
                Outcome::Dialled {
                    key,
                    result: Err(why),
                } => self.not_reached(key, &why, now),
            }
        }
    }

    fn up(&mut self, key: PublicKey, keyed: Keyed, now: Instant) {
        let Some(peer) = self.peers.get_mut(&key) else {
            // It left during the handshake.
            return;
        };
        match Link::new(keyed, now) {
            Ok(link) => {
                peer.state = State::Up(Box::new(link));
                peer.links += 1;
                peer.again = AGAIN[0];
                peer.complained = false;
                self.core.peer_up(peer.port);
                self.output.say(&Report::Up(key));
            }
            Err(error) => self.not_reached(key, &error.to_string(), now),
        }
    }

    fn not_reached(&mut self, key: PublicKey, why: &str, now: Instant) {
        let Some(peer) = self.peers.get_mut(&key) else {
            return;
        };
        if !peer.complained {
            let sentence = format!(
                "no link to {key} at {}: {why}; it is tried again",
                peer.address
            );
            self.log.say(now, &sentence);
        }
        peer.complained = true;
        if matches!(peer.state, State::Dialling) {
            peer.state = State::Down(now + peer.again);
            peer.again = (2 * peer.again).min(AGAIN[1]);
        }
    }

    fn peer_lost(&mut self, key: PublicKey, error: &io::Error, now: Instant) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.state = State::Down(now + peer.again);
            self.core.peer_down(peer.port);
            let why = error.to_string();
            self.log
                .say(now, &format!("the link to {key} ended: {why}"));
            self.output.say(&Report::Down { key, why });
        }
    }

    fn lose_tap(&mut self, error: &io::Error) {
        if let Some(tap) = self.tap.take() {
            self.core.remove_peer(tap.port);
            self.tap_lost = Some(ShellError::Tap {
                name: tap.name,
                why: format!("it is gone: {error}"),
            });
        }
    }

    fn machine_lost(&mut self, port: PortId, error: &io::Error, now: Instant) {
        self.machines.remove(&port);
        self.core.machine_gone(port, self.ms(now));
        if error.kind() == ErrorKind::InvalidData {
            self.log
                .say(now, &format!("a machine was disconnected: {error}"));
        }
    }
}

/// Frames.
impl Shell {
    fn read_machine(&mut self, port: PortId, now: Instant) {
        let ms = self.ms(now);
        let filled = match self.machines.get_mut(&port) {
            Some(machine) => machine.fill(),
            None => return,
        };
        loop {
            let Some(machine) = self.machines.get_mut(&port) else {
                return;
            };
            match machine.pass_on(port, &mut self.core, ms) {
                Ok(more) => {
                    self.flush(now);
                    if !more {
                        break;
                    }
                }
                Err(error) => return self.machine_lost(port, &error, now),
            }
        }
        if let Err(error) = filled {
            self.machine_lost(port, &error, now);
        }
    }

    fn read_peer(&mut self, key: PublicKey, now: Instant) {
        let ms = self.ms(now);
        let Some(link) = self.link(key) else {
            return;
        };
        let filled = link.fill(now);
        loop {
            let Some(Peer {
                port,
                state: State::Up(link),
                ..
            }) = self.peers.get_mut(&key)
            else {
                return;
            };
            match link.pass_on(*port, &mut self.core, ms) {
                Ok(more) => {
                    self.flush(now);
                    if !more {
                        break;
                    }
                }
                Err(error) => return self.peer_lost(key, &error, now),
            }
        }
        if let Err(error) = filled {
            self.peer_lost(key, &error, now);
        }
    }

    fn read_tap(&mut self, now: Instant) {
        let ms = self.ms(now);
        while let Some(tap) = &mut self.tap {
            match tap.pass_on(&mut self.core, ms) {
                Ok(true) => self.flush(now),
                Ok(false) => return,
                Err(error) => return self.lose_tap(&error),
            }
        }
    }

    fn link(&mut self, key: PublicKey) -> Option<&mut Link> {
        match &mut self.peers.get_mut(&key)?.state {
            State::Up(link) => Some(link),
            _ => None,
        }
    }

    /// Writes what can go without a wait.
    fn flush(&mut self, now: Instant) {
        let ms = self.ms(now);
        let mut lost = Vec::new();
        for (port, machine) in &mut self.machines {
            if !machine.blocked
                && (machine.has_rest() || self.core.has_output(*port))
                && let Err(error) = machine.flush(*port, &mut self.core, ms)
            {
                lost.push((*port, error));
            }
        }
        for (port, error) in lost {
            self.machine_lost(port, &error, now);
        }
        // Before the peers: what it may not have takes their links.
        if let Some(tap) = &mut self.tap
            && let Err(error) = tap.flush(&mut self.core, ms)
        {
            self.lose_tap(&error);
        }
        let output = self.peers.iter().filter(|(_, peer)| match &peer.state {
            State::Up(link) => {
                !link.is_blocked() && (link.has_rest() || self.core.has_output(peer.port))
            }
            _ => false,
        });
        let output: Vec<PublicKey> = output.map(|(key, _)| *key).collect();
        for key in output {
            self.flush_peer(key, now);
        }
    }

    fn flush_peer(&mut self, key: PublicKey, now: Instant) {
        let ms = self.ms(now);
        if let Some(Peer {
            port,
            state: State::Up(link),
            ..
        }) = self.peers.get_mut(&key)
            && let Err(error) = link.flush(*port, &mut self.core, (now, ms))
        {
            self.peer_lost(key, &error, now);
        }
    }
}

/// Time, and orders.
impl Shell {
    fn tick(&mut self, now: Instant) {
        if now >= self.forgets_at {
            self.forgets_at = now + FORGET;
            self.core.tick(self.ms(now));
        }
        let (mut lost, mut dial) = (Vec::new(), Vec::new());
        for (key, peer) in &mut self.peers {
            match &mut peer.state {
                State::Up(link) => lost.extend(link.tick(now).err().map(|error| (*key, error))),
                State::Down(at) if *at <= now && self.ours < *key => {
                    peer.state = State::Dialling;
                    dial.push((*key, peer.address.clone()));
                }
                State::Down(_) | State::Dialling => {}
            }
        }
        for (key, error) in lost {
            self.peer_lost(key, &error, now);
        }
        for (key, address) in dial {
            if let Err(error) = self.handshakes.dial(key, address) {
                self.not_reached(key, &error.to_string(), now);
            }
        }
    }

    fn obey(&mut self, orders: Vec<Result<Order, String>>, now: Instant) {
        for order in orders {
            let done = order.and_then(|order| match order {
                Order::Peer {
                    key,
                    address,
                    detour,
                } => self.add_peer(key, address, detour, now),
                Order::Leave(key) => self.leave(key),
                Order::Counters(wanted) => {
                    if wanted {
                        let report = self.report();
                        self.output.say(&report);
                    }
                    Ok(())
                }
            });
            if let Err(error) = done {
                self.output.say(&Report::Error(error));
            }
        }
    }

    fn add_peer(
        &mut self,
        key: PublicKey,
        address: String,
        detour: bool,
        now: Instant,
    ) -> Result<(), String> {
        if key == self.ours {
            return Err(format!(
                "{key} is this switch's own key: give the other one's"
            ));
        }
        if detour && self.tap.is_none() {
            return Err(format!(
                "{key} can be no detour: this switch has no tap device (--tap)"
            ));
        }
        if let Some(peer) = self.peers.get_mut(&key) {
            if peer.detour != detour {
                return Err(format!("{key} is a peer of another kind: let it leave"));
            }
            peer.address = address;
            return Ok(());
        }
        let port = match detour {
            true => self.core.add_detour(),
            false => self.core.add_peer(),
        };
        let port = port.map_err(|full| full.to_string())?;
        let peer = Peer {
            port,
            address,
            detour,
            state: State::Down(now),
            links: 0,
            again: AGAIN[0],
            complained: false,
        };
        self.peers.insert(key, peer);
        Ok(())
    }

    fn leave(&mut self, key: PublicKey) -> Result<(), String> {
        let peer = self.peers.remove(&key);
        let peer = peer.ok_or_else(|| format!("{key} is no peer of this switch"))?;
        self.core.remove_peer(peer.port);
        Ok(())
    }

    fn report(&self) -> Report {
        let counters = |port| self.core.counters(port).unwrap_or_default();
        let machines = self.machines.keys().map(|port| MachineReport {
            addresses: self
                .core
                .addresses(*port)
                .iter()
                .map(ToString::to_string)
                .collect(),
            waiting: self.core.waiting(*port).count(),
            counters: counters(*port),
        });
        let peers = self.peers.iter().map(|(key, peer)| PeerReport {
            key: *key,
            address: peer.address.clone(),
            detour: peer.detour,
            up: matches!(peer.state, State::Up(_)),
            links: peer.links,
            addresses: self.core.addresses(peer.port).len(),
            waiting: self.core.waiting(peer.port).count(),
            counters: counters(peer.port),
        });
        Report::Counters {
            totals: self.core.totals(),
            addresses: self.core.known(),
            waiting: self.core.frames_waiting(),
            strangers: self.strangers,
            machines: machines.collect(),
            peers: peers.collect(),
        }
    }
}
