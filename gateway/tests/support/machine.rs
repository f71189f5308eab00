//! A machine: a card with smoltcp, as a guest's kernel would be, and servers on a few ports.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant as StackInstant;
use smoltcp::wire::{EthernetAddress, HardwareAddress, IpAddress, IpCidr};

use super::{address, card, pattern};

/// Sends everything back; closes when the client does.
pub const ECHO: u16 = 7;
/// Reads to the end, then says how many bytes that were, and whether they were the pattern.
pub const COUNT: u16 = 9;
/// Sends [`Machine::source`] bytes of the pattern and closes; then reads to the end.
pub const SOURCE: u16 = 19;
/// Resets the connection when a byte has come.
pub const RESET: u16 = 13;
/// Connections at once, for each port.
const EACH: usize = 24;
const BUFFER: usize = 128 << 10;

#[derive(Default)]
struct Shared {
    silent: AtomicBool,
    ended: AtomicBool,
    source: AtomicU64,
    /// Bytes that sources have read after their own end.
    after: AtomicU64,
}

pub struct Machine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Machine {
    pub fn start(door: PathBuf, number: u8, mtu: usize) -> Machine {
        let shared: Arc<Shared> = Arc::default();
        let its = shared.clone();
        let thread = thread::spawn(move || Stack::new(number, mtu).run(&door, number, &its));
        Machine {
            shared,
            thread: Some(thread),
        }
    }

    /// It stands: it reads nothing and sends nothing.
    pub fn silence(&self, silent: bool) {
        self.shared.silent.store(silent, Ordering::Relaxed);
    }

    /// How many bytes a source sends.
    pub fn source(&self, bytes: u64) {
        self.shared.source.store(bytes, Ordering::Relaxed);
    }

    pub fn read_after_end(&self) -> u64 {
        self.shared.after.load(Ordering::Relaxed)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Frames in and out; it has as much memory as it needs.
struct Queues {
    mtu: usize,
    input: VecDeque<Vec<u8>>,
    output: Vec<u8>,
}

struct Service {
    handle: SocketHandle,
    port: u16,
    bytes: u64,
    right: bool,
    closed: bool,
}

struct Stack {
    queues: Queues,
    interface: Interface,
    sockets: SocketSet<'static>,
    services: Vec<Service>,
    start: Instant,
}

impl Stack {
    fn new(number: u8, mtu: usize) -> Stack {
        let mut queues = Queues {
            mtu,
            input: VecDeque::new(),
            output: Vec::new(),
        };
        let hardware = HardwareAddress::Ethernet(EthernetAddress(card(number)));
        let mut config = Config::new(hardware);
        config.random_seed = number.into();
        let mut interface = Interface::new(config, &mut queues, StackInstant::ZERO);
        interface.update_ip_addrs(|addresses| {
            let address = IpCidr::new(IpAddress::Ipv4(address(number)), 16);
            addresses.push(address).unwrap();
        });
        let mut sockets = SocketSet::new(Vec::new());
        let mut services = Vec::new();
        for port in [ECHO, COUNT, SOURCE, RESET] {
            for _ in 0..EACH {
                let buffer = || SocketBuffer::new(vec![0; BUFFER]);
                let mut socket = Socket::new(buffer(), buffer());
                socket.set_nagle_enabled(false);
                services.push(Service {
                    handle: sockets.add(socket),
                    port,
                    bytes: 0,
                    right: true,
                    closed: false,
                });
            }
        }
        Stack {
            queues,
            interface,
            sockets,
            services,
            start: Instant::now(),
        }
    }

    fn run(mut self, door: &PathBuf, number: u8, shared: &Shared) {
        while !shared.ended.load(Ordering::Relaxed) {
            let Ok(socket) = UnixStream::connect(door) else {
                thread::sleep(Duration::from_millis(20));
                continue;
            };
            socket.set_nonblocking(true).unwrap();
            self.queues.output.clear();
            self.queues.input.clear();
            // So that its switch knows it: reverse ARP.
            let mut frame = vec![0, 0, 0, 60];
            frame.extend([0xff; 6]);
            frame.extend(card(number));
            frame.extend([0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
            frame.extend(card(number));
            frame.resize(64, 0);
            self.queues.output = frame;
            self.serve(&socket, shared);
        }
    }

    /// Until the switch ends.
    fn serve(&mut self, mut socket: &UnixStream, shared: &Shared) {
        let (mut input, mut end) = (vec![0; 1 << 20], 0);
        while !shared.ended.load(Ordering::Relaxed) {
            if shared.silent.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(5));
                continue;
            }
            match socket.read(&mut input[end..]) {
                Ok(0) => return,
                Ok(count) => end += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
            let mut start = 0;
            while let Ok(Some(frame)) = weft_switch::frames::first(&input[start..end]) {
                start += 4 + frame.len();
                self.queues.input.push_back(frame.to_vec());
            }
            input.copy_within(start..end, 0);
            end -= start;
            let delay = self.work(shared);
            match socket.write(&self.queues.output) {
                Ok(count) => drop(self.queues.output.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
            let mut flags = PollFlags::POLLIN;
            flags.set(PollFlags::POLLOUT, !self.queues.output.is_empty());
            let mut polled = [PollFd::new(socket.as_fd(), flags)];
            poll(&mut polled, PollTimeout::from(delay)).unwrap();
        }
    }

    /// How many milliseconds there is nothing to do.
    fn work(&mut self, shared: &Shared) -> u16 {
        let time = StackInstant::from_micros(self.start.elapsed().as_micros() as i64);
        let sockets = &mut self.sockets;
        for _ in 0..2 {
            self.interface.poll(time, &mut self.queues, sockets);
            for service in &mut self.services {
                service.step(sockets.get_mut(service.handle), shared);
            }
        }
        self.interface.poll(time, &mut self.queues, sockets);
        let delay = self.interface.poll_delay(time, sockets);
        delay.map_or(10, |delay| delay.total_millis().min(10)) as u16
    }
}

impl Service {
    fn step(&mut self, socket: &mut Socket<'_>, shared: &Shared) {
        if socket.state() == State::Closed || socket.state() == State::TimeWait {
            (self.bytes, self.right, self.closed) = (0, true, false);
            socket.abort();
            // A reset that is due goes out first.
            let _ = socket.listen(self.port);
            return;
        }
        if matches!(socket.state(), State::Listen | State::SynReceived) {
            return;
        }
        let ended = matches!(socket.state(), State::CloseWait) && socket.recv_queue() == 0;
        match self.port {
            ECHO => {
                while socket.recv_queue() > 0 && socket.send_queue() < socket.send_capacity() {
                    let room = socket.send_capacity() - socket.send_queue();
                    let copy = |bytes: &mut [u8]| {
                        let count = bytes.len().min(room);
                        (count, bytes[..count].to_vec())
                    };
                    let bytes = socket.recv(copy).unwrap();
                    assert_eq!(socket.send_slice(&bytes), Ok(bytes.len()));
                }
                if ended {
                    socket.close();
                }
            }
            COUNT => {
                self.read(socket);
                if ended && !self.closed {
                    self.closed = true;
                    let text = format!("{} {}\n", self.bytes, self.right);
                    socket.send_slice(text.as_bytes()).unwrap();
                    socket.close();
                }
            }
            SOURCE => {
                let all = shared.source.load(Ordering::Relaxed);
                while self.bytes < all && socket.can_send() {
                    let (first, left) = (self.bytes, (all - self.bytes) as usize);
                    let fill = |room: &mut [u8]| {
                        let count = room.len().min(left);
                        let bytes = room[..count].iter_mut().zip(first..);
                        bytes.for_each(|(byte, index)| *byte = pattern(index));
                        (count, count)
                    };
                    self.bytes += socket.send(fill).unwrap() as u64;
                }
                if self.bytes == all && !self.closed {
                    self.closed = true;
                    socket.close();
                }
                let read = socket.recv(|bytes| (bytes.len(), bytes.len()));
                shared
                    .after
                    .fetch_add(read.unwrap_or(0) as u64, Ordering::Relaxed);
            }
            _ if socket.recv_queue() > 0 => socket.abort(),
            _ => {}
        }
    }

    fn read(&mut self, socket: &mut Socket<'_>) {
        while socket.recv_queue() > 0 {
            let first = self.bytes;
            let check = |bytes: &mut [u8]| {
                let right = bytes
                    .iter()
                    .zip(first..)
                    .all(|(byte, at)| *byte == pattern(at));
                (bytes.len(), (bytes.len() as u64, right))
            };
            let (count, right) = socket.recv(check).unwrap();
            self.bytes += count;
            self.right &= right;
        }
    }
}

impl Device for Queues {
    type RxToken<'a> = Frame;
    type TxToken<'a> = Place<'a>;

    fn receive(&mut self, _: StackInstant) -> Option<(Frame, Place<'_>)> {
        let frame = self.input.pop_front()?;
        Some((Frame(frame), Place(&mut self.output)))
    }

    fn transmit(&mut self, _: StackInstant) -> Option<Place<'_>> {
        (self.output.len() < 4 << 20).then_some(Place(&mut self.output))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 14 + self.mtu;
        capabilities
    }
}

pub struct Frame(Vec<u8>);

impl RxToken for Frame {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(&self.0)
    }
}

pub struct Place<'a>(&'a mut Vec<u8>);

impl TxToken for Place<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, fill: F) -> R {
        self.0.extend((length as u32).to_be_bytes());
        let start = self.0.len();
        self.0.resize(start + length, 0);
        fill(&mut self.0[start..])
    }
}
