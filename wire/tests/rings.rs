//! The ring under stress, with and without a core to spare, and against a
//! hostile peer.

mod common;

use common::{End, open};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use weft_wire::ring::{CAPACITY_MIN, create, file_bytes};
use weft_wire::{Header, Link, LinkConfig, LinkError, LinkKind};

const PATIENCE_NS: u64 = 20_000_000_000;

fn ring_end(fd: OwnedFd, memory: &OwnedFd, side: u32, spin_ns: u64) -> End {
    let kind = LinkKind::Ring {
        bell_fd: fd.as_raw_fd(),
        memory_fd: memory.as_raw_fd(),
        side,
    };
    open(kind, fd, spin_ns, 20_000)
}

fn ring_pair(capacity: usize, spin_ns: u64) -> (End, End, OwnedFd) {
    let memory = create(capacity).unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    let near = ring_end(near.into(), &memory, 0, spin_ns);
    let far = ring_end(far.into(), &memory, 1, spin_ns);
    (near, far, memory)
}

/// Pins the calling thread to a core.
fn pin(core: usize) {
    // SAFETY: a live local of the size that the kernel is told.
    unsafe {
        let mut set: libc::cpu_set_t = core::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

/// Both directions at once through the smallest ring: every frame is larger
/// than the ring or fills it, so both sides sleep and wake all the time. A lost
/// wake-up shows as a timeout.
fn stress(one_core: bool, spin_ns: u64, rounds: u64) {
    let (near, far, _memory) = ring_pair(CAPACITY_MIN, spin_ns);
    let run = move |mut end: End| {
        move || {
            if one_core {
                pin(0);
            }
            let mut seed = 1u64;
            let mut expected = 0u64;
            for round in 0..rounds {
                seed = seed
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                let length = (seed >> 33) as usize % [10, 5000, 20_000][(seed >> 60) as usize % 3];
                let payload = vec![round as u8; length];
                let mut header = Header::new(1);
                header.words[0] = round;
                end.link.send(&header, &[&payload]).unwrap();
                if seed >> 50 & 1 == 1 {
                    while let Some(frame) = end.link.try_receive().unwrap() {
                        expected = check(expected, &frame);
                    }
                }
                if seed >> 51 & 7 == 0 && expected <= round {
                    let frame = end.link.receive(PATIENCE_NS).unwrap().expect("a wake-up");
                    expected = check(expected, &frame);
                }
            }
            while expected < rounds {
                let frame = end.link.receive(PATIENCE_NS).unwrap().expect("a wake-up");
                expected = check(expected, &frame);
            }
            end
        }
    };
    let other = std::thread::spawn(run(far));
    let ours = std::thread::spawn(run(near));
    let ends = (ours.join().unwrap(), other.join().unwrap());
    drop(ends);
}

fn check(expected: u64, frame: &weft_wire::Frame<'_>) -> u64 {
    assert_eq!(frame.header.words[0], expected);
    assert!(frame.payload.iter().all(|byte| *byte == expected as u8));
    expected + 1
}

#[test]
fn no_wake_up_is_lost_on_many_cores() {
    stress(false, 0, 20_000);
    stress(false, 5_000, 20_000);
}

#[test]
fn no_wake_up_is_lost_on_one_core() {
    stress(true, 0, 10_000);
    stress(true, 5_000, 3_000);
}

/// Strict ping-pong without spinning: every message is a sleep and a wake-up.
#[test]
fn every_round_trip_wakes() {
    let (mut near, far, _memory) = ring_pair(CAPACITY_MIN, 0);
    let echo = std::thread::spawn(move || {
        let mut far = far;
        for _ in 0..20_000 {
            let frame = far.link.receive(PATIENCE_NS).unwrap().expect("a wake-up");
            let header = frame.header;
            far.link.send(&header, &[]).unwrap();
        }
    });
    for round in 0..20_000 {
        let mut header = Header::new(1);
        header.words[0] = round;
        near.link.send(&header, &[]).unwrap();
        let frame = near.link.receive(PATIENCE_NS).unwrap().expect("a wake-up");
        assert_eq!(frame.header.words[0], round);
    }
    echo.join().unwrap();
}

fn echo_and_die(mut end: End) -> ! {
    for _ in 0..500 {
        let Ok(Some(frame)) = end.link.receive(PATIENCE_NS) else {
            // SAFETY: leaves at once.
            unsafe { libc::_exit(1) };
        };
        let (header, payload) = (frame.header, frame.payload.to_vec());
        if end.link.send(&header, &[&payload]).is_err() {
            // SAFETY: leaves at once.
            unsafe { libc::_exit(2) };
        }
    }
    // SAFETY: the child's own process; `_exit` is not reached.
    unsafe {
        libc::kill(libc::getpid(), libc::SIGKILL);
        libc::_exit(3)
    }
}

/// Between two processes; the child dies without a word and is noticed.
#[test]
fn another_process_answers_and_its_death_is_noticed() {
    let memory = create(1 << 16).unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    // SAFETY: the child only uses its link and leaves without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(near);
        echo_and_die(ring_end(far.into(), &memory, 1, 10_000));
    }
    drop(far);
    let mut end = ring_end(near.into(), &memory, 0, 10_000);
    for round in 0..500u64 {
        let payload = vec![round as u8; (round * 977 % 200_000) as usize];
        let mut header = Header::new(1);
        header.words[0] = round;
        end.link.send(&header, &[&payload]).unwrap();
        let frame = end.link.receive(PATIENCE_NS).unwrap().expect("a wake-up");
        assert_eq!(frame.header.words[0], round);
        assert!(frame.payload == payload);
    }
    let start = Instant::now();
    let closed = end.link.receive(PATIENCE_NS).map(|_| ());
    assert_eq!(closed, Err(LinkError::Closed));
    assert!(start.elapsed() < Duration::from_secs(5));
    // SAFETY: reaps the child that this test made.
    unsafe { libc::waitpid(child, core::ptr::null_mut(), 0) };
}

/// The peer writes anything into the indices: an error, never an access out of
/// bounds.
#[test]
fn impossible_indices_end_the_link() {
    // Byte offsets of side 1's tail and of side 0's head, in the memory file.
    let capacity = CAPACITY_MIN;
    let (their_tail, their_head) = (file_bytes(capacity) / 2, 128);
    for value in [u64::MAX, capacity as u64 + 1, 1 << 63, u64::MAX - 4096] {
        for offset in [their_tail, their_head] {
            let (mut near, _far, memory) = ring_pair(capacity, 0);
            let bytes = value.to_le_bytes();
            rustix::io::pwrite(&memory, &bytes, offset as u64).unwrap();
            let mut outcome = near.link.try_receive().map(|_| ());
            for _ in 0..3 {
                outcome = outcome.and_then(|()| near.link.send(&Header::new(1), &[&[1; 4000]]));
            }
            assert_eq!(
                outcome,
                Err(LinkError::RingCorrupt),
                "{value:#x} at {offset}"
            );
        }
    }
}

#[test]
fn an_index_that_goes_back_ends_the_link() {
    let (mut near, mut far, memory) = ring_pair(CAPACITY_MIN, 0);
    far.link.send(&Header::new(1), &[&[1; 100]]).unwrap();
    assert!(near.link.receive(PATIENCE_NS).unwrap().is_some());
    let their_tail = file_bytes(CAPACITY_MIN) / 2;
    rustix::io::pwrite(&memory, &10u64.to_le_bytes(), their_tail as u64).unwrap();
    let outcome = near.link.try_receive().map(|_| ());
    assert_eq!(outcome, Err(LinkError::RingCorrupt));
}

#[test]
fn a_file_that_could_shrink_is_refused() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    let memory = memfd_create("ring", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&memory, file_bytes(CAPACITY_MIN) as u64).unwrap();
    let (near, _far) = UnixStream::pair().unwrap();
    let config = LinkConfig {
        kind: LinkKind::Ring {
            bell_fd: near.as_raw_fd(),
            memory_fd: memory.as_raw_fd(),
            side: 0,
        },
        spin_ns: 0,
        lease_ms: 100,
    };
    // SAFETY: the descriptors live until the end of the test.
    let refused = unsafe { Link::open(&config) }.map(|_| ());
    assert!(matches!(refused, Err(LinkError::Configuration(_))));
    ftruncate(&memory, file_bytes(CAPACITY_MIN) as u64 + 4096).unwrap();
    // SAFETY: the descriptors live until the end of the test.
    let refused = unsafe { Link::open(&config) }.map(|_| ());
    assert!(matches!(refused, Err(LinkError::Configuration(_))));
}
