//! TCP/IP: a stack with one connection, or with none (the base stack).
//!
//! smoltcp doubles the time before each retransmission, up to 60 s. A machine that moves, or
//! whose link broke, would be sent nothing for up to a minute after it is back. That bound is
//! smoltcp's own, but its time is ours: each stack has a clock, which leaps to the next timer
//! when something waits for [`RETRY_MAX`] to be acknowledged.
//!
//! Invariants: the clock never goes back, and leaps only while a byte, SYN or FIN is not
//! acknowledged. So TIME-WAIT lasts what it should, and round trips are measured right: a
//! measurement that a leap falls into is given up by the retransmission.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use smoltcp::iface::{
    Config, Interface, PollIngressSingleResult, PollResult, SocketHandle, SocketSet, SocketStorage,
};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::{Duration as StackDuration, Instant as StackInstant};
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr};

use crate::output::Output;
use crate::{BUFFER, MTU, RETRY_MAX};

/// Bytes of an Ethernet header.
const HEADER: usize = 14;
/// After how long a machine that says nothing is asked whether it is there.
const KEEP_ALIVE: StackDuration = StackDuration::from_secs(30);

/// What all stacks of a gateway have in common.
#[derive(Debug, Clone, Copy)]
pub struct Face {
    pub card: [u8; 6],
    pub address: Ipv4Addr,
    /// Bits of the network's part of the address.
    pub prefix: u8,
}

impl Face {
    /// Whether a machine may have this address.
    pub fn reaches(&self, to: Ipv4Addr) -> bool {
        let hosts = u32::MAX >> self.prefix;
        let (ours, to) = (self.address.to_bits(), to.to_bits());
        let host = to & hosts;
        ours & !hosts == to & !hosts && ours != to && host != 0 && host != hosts
    }

    fn interface(&self, device: &mut Wire<'_>, seed: u64) -> Interface {
        let mut config = Config::new(EthernetAddress(self.card).into());
        config.random_seed = seed;
        let mut interface = Interface::new(config, device, StackInstant::ZERO);
        let address = IpCidr::new(IpAddress::Ipv4(self.address), self.prefix);
        interface.update_ip_addrs(|addresses| {
            // It has room for two.
            let _ = addresses.push(address);
        });
        interface
    }
}

/// The stack, and its clock.
pub struct Stack {
    interface: Interface,
    sockets: SocketSet<'static>,
    /// The clock's zero.
    start: Instant,
    /// How far it has leapt.
    leapt: Duration,
    /// What would be done next, and when it is done at the latest.
    armed: Option<(StackInstant, Instant)>,
}

impl Stack {
    /// The base stack.
    pub fn base(face: &Face, now: Instant) -> Stack {
        Stack::new(face, 0, now, SocketSet::new(Vec::new()))
    }

    fn new(face: &Face, seed: u64, now: Instant, sockets: SocketSet<'static>) -> Stack {
        let mut wire = Wire {
            input: None,
            output: &mut Output::default(),
            is_reply: false,
        };
        Stack {
            interface: face.interface(&mut wire, seed),
            sockets,
            start: now,
            leapt: Duration::ZERO,
            armed: None,
        }
    }

    fn clock(&self, now: Instant) -> StackInstant {
        let time = now.saturating_duration_since(self.start) + self.leapt;
        StackInstant::from_micros(time.as_micros() as i64)
    }

    /// Takes a frame in.
    pub fn receive(&mut self, frame: &[u8], output: &mut Output, now: Instant) {
        let time = self.clock(now);
        let mut wire = Wire {
            input: Some(frame),
            output,
            is_reply: true,
        };
        let sockets = &mut self.sockets;
        while self.interface.poll_ingress_single(time, &mut wire, sockets)
            != PollIngressSingleResult::None
        {}
    }
}

/// A stack with a connection.
pub struct Tcp {
    stack: Stack,
    handle: SocketHandle,
}

impl Tcp {
    /// Begins to connect from this port of the gateway. The seed chooses the first number of
    /// the stream.
    ///
    /// # Panics
    /// A port is 0.
    pub fn connect(face: &Face, port: u16, to: SocketAddrV4, seed: u64, now: Instant) -> Tcp {
        let buffer = || SocketBuffer::new(vec![0; BUFFER]);
        let mut socket = Socket::new(buffer(), buffer());
        // Clients write what belongs together at once, and wait for answers.
        socket.set_nagle_enabled(false);
        // One acknowledgement follows all that was read at once.
        socket.set_ack_delay(None);
        socket.set_keep_alive(Some(KEEP_ALIVE));
        let mut sockets = SocketSet::new(vec![SocketStorage::EMPTY]);
        let handle = sockets.add(socket);
        let stack = Stack::new(face, seed, now, sockets);
        let mut tcp = Tcp { stack, handle };
        let socket = tcp.stack.sockets.get_mut::<Socket<'_>>(handle);
        socket
            .connect(tcp.stack.interface.context(), (*to.ip(), to.port()), port)
            .expect("it is new, and no port is 0");
        tcp
    }

    pub fn socket(&mut self) -> &mut Socket<'static> {
        self.stack.sockets.get_mut(self.handle)
    }

    pub fn state(&self) -> State {
        self.stack.sockets.get::<Socket<'_>>(self.handle).state()
    }

    /// Whether something was not acknowledged.
    pub fn owes(&self) -> bool {
        let socket = self.stack.sockets.get::<Socket<'_>>(self.handle);
        let control = matches!(
            socket.state(),
            State::SynSent | State::FinWait1 | State::Closing | State::LastAck
        );
        control || (socket.state() != State::Closed && socket.send_queue() > 0)
    }

    /// Takes a frame in.
    pub fn receive(&mut self, frame: &[u8], output: &mut Output, now: Instant) {
        self.stack.receive(frame, output, now);
    }

    /// Sends what is due, as far as there is room.
    pub fn send(&mut self, output: &mut Output, now: Instant) {
        if let Some((next, latest)) = self.stack.armed
            && latest <= now
        {
            let time = self.stack.clock(now);
            // The thread may have been late itself.
            let ahead = (next.max(time) - time).total_micros();
            self.stack.leapt += Duration::from_micros(ahead);
            self.stack.armed = None;
        }
        let time = self.stack.clock(now);
        let mut wire = Wire {
            input: None,
            output,
            is_reply: false,
        };
        let Stack {
            interface, sockets, ..
        } = &mut self.stack;
        while interface.poll_egress(time, &mut wire, sockets) != PollResult::None {}
    }

    /// When [`Tcp::send`] has something to do, if no frame comes. Asked after it.
    pub fn due(&mut self, now: Instant) -> Option<Instant> {
        let time = self.stack.clock(now);
        let owes = self.owes();
        let Stack {
            interface,
            sockets,
            armed,
            ..
        } = &mut self.stack;
        let Some(next) = interface.poll_at(time, sockets) else {
            *armed = None;
            return None;
        };
        let wait = Duration::from_micros((next - time.min(next)).total_micros());
        if !owes || wait <= RETRY_MAX {
            // What was armed stays so in its last moments: the same timer is still waited for.
            if !owes || armed.is_some_and(|(other, _)| other != next) {
                *armed = None;
            }
            return Some(armed.map_or(now + wait, |(_, latest)| latest.min(now + wait)));
        }
        match armed {
            Some((other, latest)) if *other == next => Some(*latest),
            _ => {
                *armed = Some((next, now + RETRY_MAX));
                Some(now + RETRY_MAX)
            }
        }
    }
}

/// The card as smoltcp sees it for one moment: at most one frame comes in.
struct Wire<'a> {
    input: Option<&'a [u8]>,
    output: &'a mut Output,
    /// What is sent replies to what came: it needs no room.
    is_reply: bool,
}

impl Device for Wire<'_> {
    type RxToken<'b>
        = Frame<'b>
    where
        Self: 'b;
    type TxToken<'b>
        = Place<'b>
    where
        Self: 'b;

    fn receive(&mut self, _: StackInstant) -> Option<(Frame<'_>, Place<'_>)> {
        let frame = self.input.take()?;
        Some((Frame(frame), Place(self.output)))
    }

    fn transmit(&mut self, _: StackInstant) -> Option<Place<'_>> {
        (self.is_reply || self.output.has_room()).then_some(Place(self.output))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = HEADER + MTU;
        capabilities
    }
}

struct Frame<'a>(&'a [u8]);

impl RxToken for Frame<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(self.0)
    }
}

struct Place<'a>(&'a mut Output);

impl TxToken for Place<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, fill: F) -> R {
        self.0.push(length, fill)
    }
}

#[cfg(test)]
#[path = "stack_tests.rs"]
mod tests;
