//! Two stacks and a network that loses frames, in a time of their own: no thread, no socket.

use std::os::unix::net::UnixStream;

use smoltcp::wire::{IpProtocol, Ipv4Packet, TcpPacket, TcpSeqNumber};
use weft_switch::frames::{LENGTH, first};
use weft_test_support::Random;

use super::*;

const PORT: u16 = 22;
const FACE: Face = Face {
    card: [2, 0, 0, 0, 0, 200],
    address: Ipv4Addr::new(10, 77, 0, 200),
    prefix: 16,
};
const MACHINE: Face = Face {
    card: [2, 0, 0, 0, 0, 1],
    address: Ipv4Addr::new(10, 77, 0, 1),
    prefix: 16,
};

fn pattern(index: u64) -> u8 {
    (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// The frames that wait, all of them.
fn drain(output: &mut Output) -> Vec<Vec<u8>> {
    let (near, mut far) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    far.set_nonblocking(true).unwrap();
    let mut bytes = Vec::new();
    while !output.is_empty() {
        output.flush(&near).unwrap();
        // Until nothing is there.
        let _ = std::io::Read::read_to_end(&mut far, &mut bytes);
    }
    let (mut rest, mut frames) = (&bytes[..], Vec::new());
    while let Some(frame) = first(rest).unwrap() {
        frames.push(frame.to_vec());
        rest = &rest[LENGTH + frame.len()..];
    }
    assert!(rest.is_empty());
    frames
}

/// A side: a stack with a socket, what it has sent of the pattern, and what it has read.
struct Side {
    tcp: Tcp,
    output: Output,
    sent: u64,
    read: u64,
}

impl Side {
    /// Writes up to `all` bytes in pieces, reads what is there and compares it.
    fn work(&mut self, all: u64, checks: bool, random: &mut Random) {
        let socket = self.tcp.socket();
        while self.sent < all && socket.can_send() && random.below(8) > 0 {
            let left = (all - self.sent).min(1 + random.below(100_000)) as usize;
            let first = self.sent;
            let count = socket.send(|room| {
                let count = room.len().min(left);
                for (byte, index) in room[..count].iter_mut().zip(first..) {
                    *byte = pattern(index);
                }
                (count, count)
            });
            self.sent += count.unwrap() as u64;
        }
        while socket.recv_queue() > 0 && random.below(8) > 0 {
            let most = 1 + random.index(100_000);
            let first = self.read;
            let count = socket.recv(|bytes| {
                let count = bytes.len().min(most);
                for (byte, index) in bytes[..count].iter().zip(first..) {
                    assert!(!checks || *byte == pattern(index), "byte {index}");
                }
                (count, count)
            });
            self.read += count.unwrap() as u64;
        }
    }
}

fn listening(buffer: usize, now: Instant) -> Tcp {
    let buffer = || SocketBuffer::new(vec![0; buffer]);
    let mut socket = Socket::new(buffer(), buffer());
    socket.listen(PORT).unwrap();
    let mut sockets = SocketSet::new(Vec::new());
    let handle = sockets.add(socket);
    let stack = Stack::new(&MACHINE, 7, now, sockets);
    Tcp { stack, handle }
}

/// Both sides, and what is under way between them.
struct World {
    sides: [Side; 2],
    now: Instant,
    random: Random,
    /// Of 1,000 frames, those that are lost.
    loss: u64,
    /// The gateway's clock leaps, as it should.
    leaps: bool,
    /// What is read must be what was sent.
    checks: bool,
    under_way: [Vec<Vec<u8>>; 2],
}

impl World {
    fn new(seed: u64, loss: u64) -> World {
        let now = Instant::now();
        let to = SocketAddrV4::new(MACHINE.address, PORT);
        let side = |tcp| Side {
            tcp,
            output: Output::default(),
            sent: 0,
            read: 0,
        };
        let mut random = Random::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let buffer = random.of(&[20_000, 65_536, 128 << 10, 300_000]);
        World {
            sides: [
                side(Tcp::connect(&FACE, 50_000, to, seed, now)),
                side(listening(buffer, now)),
            ],
            now,
            random,
            loss,
            leaps: true,
            checks: true,
            under_way: Default::default(),
        }
    }

    /// One round: each side works and sends, frames arrive or are lost, and time passes.
    fn round(&mut self, all: [u64; 2]) {
        let mut due = self.now + Duration::from_secs(60);
        for (index, side) in self.sides.iter_mut().enumerate() {
            if side.tcp.socket().may_send() {
                side.work(all[index], self.checks, &mut self.random);
            }
            side.tcp.send(&mut side.output, self.now);
            due = due.min(side.tcp.due(self.now).unwrap_or(due));
            // A machine's kernel has one clock.
            if index == 1 || !self.leaps {
                side.tcp.stack.armed = None;
            }
            self.under_way[1 - index].extend(drain(&mut side.output));
        }
        if self.under_way.iter().all(Vec::is_empty) {
            self.now = due.max(self.now + Duration::from_millis(1));
        } else {
            self.now += Duration::from_micros(self.random.below(2000));
        }
        for (side, frames) in self.sides.iter_mut().zip(&mut self.under_way) {
            let count = self.random.index(frames.len() + 1);
            for frame in frames.drain(..count) {
                if self.random.below(1000) >= self.loss {
                    side.tcp.receive(&frame, &mut side.output, self.now);
                }
            }
        }
    }

    /// Until the machine has read that many bytes.
    fn until_read(&mut self, all: [u64; 2], count: u64) {
        let begin = self.now;
        while self.sides[1].read < count {
            self.round(all);
            assert!(self.now - begin < Duration::from_secs(1000), "it stands");
        }
    }

    /// The machine stands, and what is sent to it is lost.
    fn silence(&mut self, time: Duration) {
        self.under_way.iter_mut().for_each(Vec::clear);
        let (end, near) = (self.now + time, &mut self.sides[0]);
        while self.now < end {
            near.tcp.send(&mut near.output, self.now);
            drain(&mut near.output);
            let due = near.tcp.due(self.now).unwrap_or(end);
            if !self.leaps {
                near.tcp.stack.armed = None;
            }
            assert!(due > self.now, "it would be looked at again and again");
            self.now = due.min(end);
        }
    }
}

#[test]
fn bytes_survive_losses() {
    for seed in 0..60 {
        let outcome = std::panic::catch_unwind(|| {
            let mut world = World::new(seed, seed % 4 * 20);
            let begin = world.now;
            let all = 2_000_000;
            while world.sides.iter().any(|side| side.read < all) {
                world.round([all; 2]);
                assert!(world.now - begin < Duration::from_secs(1000), "it stands");
            }
        });
        assert!(outcome.is_ok(), "it failed with seed {seed}");
    }
}

/// How long it takes after a silence until the machine has read more.
fn after_silence(seconds: u64, leaps: bool, seed: u64) -> Duration {
    let mut world = World::new(seed, 0);
    world.leaps = leaps;
    // The machine has nothing to say by itself.
    let all = [1_000_000, 0];
    world.until_read(all, 300_000);
    // What is in its buffer is read.
    world.sides[0].work(all[0], true, &mut world.random);
    world.silence(Duration::from_millis(seconds * 1000 + seed * 67));
    let (end, read) = (world.now, world.sides[1].read);
    world.until_read(all, (read + 200_000).min(all[0]));
    let took = world.now - end;
    world.until_read(all, all[0]);
    took
}

#[test]
fn after_a_silence_it_is_sent_again_soon() {
    for seconds in [1, 5, 20, 60, 120, 600] {
        let longest = |leaps| {
            (0..20)
                .map(|seed| after_silence(seconds, leaps, seed))
                .max()
        };
        let (with, without) = (longest(true).unwrap(), longest(false).unwrap());
        eprintln!("silent for {seconds} s: {with:.1?} with leaps, {without:.1?} without");
        assert!(
            with < RETRY_MAX + Duration::from_millis(500),
            "{with:?} after {seconds} s"
        );
    }
}

#[test]
fn a_silent_machine_costs_little() {
    let mut world = World::new(1, 0);
    world.until_read([4_000_000, 0], 1_000_000);
    let (begin, mut frames, mut wakes) = (world.now, 0, 0);
    let near = &mut world.sides[0];
    while world.now - begin < Duration::from_secs(600) {
        near.tcp.send(&mut near.output, world.now);
        frames += drain(&mut near.output).len();
        wakes += 1;
        world.now = near.tcp.due(world.now).unwrap();
    }
    eprintln!("in 600 s of silence {frames} frames, {wakes} wake-ups");
    assert!(
        wakes <= 700 && frames <= 2000,
        "{frames} frames, {wakes} wake-ups"
    );
}

#[test]
fn an_idle_connection_asks_each_half_minute() {
    let mut world = World::new(1, 0);
    world.until_read([1000; 2], 1000);
    for _ in 0..100 {
        world.round([1000; 2]);
    }
    assert!(!world.sides[0].tcp.owes());
    let due = world.sides[0].tcp.due(world.now).unwrap() - world.now;
    assert!(
        due > Duration::from_secs(20) && due <= Duration::from_secs(30),
        "{due:?}"
    );
}

/// Alters fields of TCP, and sums the segment again.
fn alter(frame: &mut [u8], random: &mut Random) {
    let mut packet = Ipv4Packet::new_unchecked(&mut frame[14..]);
    if packet.next_header() != IpProtocol::Tcp || packet.total_len() as usize > 65_520 {
        return;
    }
    let (from, to) = (packet.src_addr().into(), packet.dst_addr().into());
    let mut segment = TcpPacket::new_unchecked(packet.payload_mut());
    let near = [0, 1, 2, 536, 65_535, 1 << 18, 1 << 19, 1 << 30, i32::MAX];
    let shift = |random: &mut Random| random.of(&near).wrapping_mul(random.of(&[1, -1]));
    match random.below(6) {
        0 => {
            let number = segment.seq_number().0.wrapping_add(shift(random));
            segment.set_seq_number(TcpSeqNumber(number));
        }
        1 => {
            let number = segment.ack_number().0.wrapping_add(shift(random));
            segment.set_ack_number(TcpSeqNumber(number));
        }
        2 => segment.set_window_len(random.of(&[0, 1, 100, 32_768, 65_535])),
        3 => segment.set_syn(!segment.syn()),
        4 => segment.set_fin(!segment.fin()),
        _ => {
            // Flags, or a byte of the options.
            let bytes = segment.into_inner();
            let at = random.of(&[12, 13, 20, 21, 22, 23, 24, 25, 26, 27]);
            if let Some(byte) = bytes.get_mut(at) {
                *byte = random.next() as u8;
            }
            segment = TcpPacket::new_unchecked(bytes);
        }
    }
    if segment.check_len().is_ok() {
        segment.fill_checksum(&from, &to);
    }
}

#[test]
fn altered_segments_end_no_stack() {
    let mut base = Stack::base(&FACE, Instant::now());
    for seed in 0..60 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut world = World::new(seed, 0);
            world.checks = false;
            for _ in 0..40 {
                world.round([500_000; 2]);
                let (random, side) = (&mut world.random, &mut world.sides[0]);
                for frame in &world.under_way[0] {
                    let mut altered = frame.clone();
                    alter(&mut altered, random);
                    side.tcp.receive(&altered, &mut side.output, world.now);
                    base.receive(&altered, &mut Output::default(), world.now);
                }
            }
        }));
        assert!(outcome.is_ok(), "it failed with seed {seed}");
    }
}
