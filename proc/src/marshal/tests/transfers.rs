//! Transfers longer than the buffer, made in pieces.

use super::*;
use libc::*;

/// A scenario with native calls, and carried with pieces of several sizes.
fn same_in_pieces<T: PartialEq>(scenario: impl Fn(&Call) -> T) {
    let expected = scenario(&native);
    for bulk_max in [1, 7, 64, 1000] {
        let seen = scenario(&|nr, args: &[u64]| carried_in(bulk_max, nr, args));
        assert!(seen == expected, "in pieces of {bulk_max} bytes");
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index * 7 % 251) as u8).collect()
}

#[test]
fn a_regular_file_is_read_and_written_whole() {
    same_in_pieces(|call| {
        let content = pattern(500);
        let (path, name) = scratch_file(&content);
        let fd = call(SYS_open, &[at(name.as_bytes()), O_RDWR as u64]) as u64;
        let (mut a, mut b, mut c) = ([0xaau8; 100], [0xaau8; 3], [0xaau8; 600]);
        let mut vector = [
            iovec {
                iov_base: a.as_mut_ptr().cast(),
                iov_len: 100,
            },
            iovec {
                iov_base: b.as_mut_ptr().cast(),
                iov_len: 3,
            },
            iovec {
                iov_base: c.as_mut_ptr().cast(),
                iov_len: 600,
            },
        ];
        let mut seen = vec![
            call(SYS_readv, &[fd, into(&mut vector), 3]),
            call(SYS_preadv, &[fd, at(&vector), 2, 450]),
            call(SYS_pread64, &[fd, into(&mut c), 300, 100]),
            call(SYS_writev, &[fd, at(&vector), 3]),
            call(SYS_pwritev, &[fd, at(&vector), 3, 20]),
            call(SYS_pwritev2, &[fd, at(&vector), 2, u64::MAX]),
            call(SYS_lseek, &[fd, 0, SEEK_CUR as u64]),
            call(SYS_write, &[fd, at(&content[..]), 500]),
            call(SYS_pread64, &[fd, into(&mut c), 600, 1000]),
            call(SYS_close, &[fd]),
        ];
        let left = std::fs::read(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        seen.push(left.len() as i64);
        (seen, left, a, b, c.to_vec())
    });
}

#[test]
fn a_pipe_gives_what_it_has_and_does_not_block_for_more() {
    let mut fds = [0i32; 2];
    let content = pattern(100);
    assert_eq!(native(SYS_pipe2, &[into(&mut fds), 0]), 0);
    let [reader, writer] = fds.map(|fd| fd as u64);
    let carry = |nr, args: &[u64]| carried_in(10, nr, args);
    // Writing goes on until everything is written.
    assert_eq!(carry(SYS_write, &[writer, at(&content[..]), 100]), 100);
    let mut got = [0u8; 200];
    // Reading must not: a second piece could block.
    assert_eq!(carry(SYS_read, &[reader, into(&mut got), 20]), 10);
    assert_eq!(native(SYS_read, &[reader, into(&mut got[10..]), 200]), 90);
    assert_eq!(got[..100], content[..]);
    assert_eq!(native(SYS_close, &[reader]), 0);
    assert_eq!(native(SYS_close, &[writer]), 0);
}

#[test]
fn an_error_after_progress_is_a_short_count() {
    let mut fds = [0i32; 2];
    let content = pattern(1 << 20);
    assert_eq!(native(SYS_pipe2, &[into(&mut fds), O_NONBLOCK as u64]), 0);
    let [reader, writer] = fds.map(|fd| fd as u64);
    let full = native(SYS_write, &[writer, at(&content[..]), 1 << 20]);
    assert!(full > 0);
    let carry = |nr, args: &[u64]| carried_in(4096, nr, args);
    assert_eq!(
        carry(SYS_write, &[writer, at(&content[..]), 1 << 20]),
        -i64::from(EAGAIN)
    );
    let mut drained = vec![0u8; 1 << 20];
    assert_eq!(
        native(SYS_read, &[reader, into(&mut drained[..]), 1 << 20]),
        full
    );
    assert_eq!(carry(SYS_write, &[writer, at(&content[..]), 1 << 20]), full);
    assert_eq!(native(SYS_close, &[reader]), 0);
    assert_eq!(native(SYS_close, &[writer]), 0);
}

#[test]
fn a_long_message_goes_home_whole() {
    let content = pattern(100);
    let mut buffer = buffer();
    let args = [0, at(&content[..]), 100, 0, 0, 0];
    let sent = gather(
        SYS_sendto as u64,
        &args,
        0,
        50,
        &mut OwnMemory,
        &mut buffer.0,
    );
    assert_eq!(sent.map(|r| r.sent()), Err(Gather::Home));
    let everything = (MSG_WAITALL | MSG_DONTWAIT) as u64;
    let args = [0, at(&content[..]), 100, everything, 0, 0];
    let received = gather(
        SYS_recvfrom as u64,
        &args,
        0,
        50,
        &mut OwnMemory,
        &mut buffer.0,
    );
    assert_eq!(received.map(|r| r.sent()), Err(Gather::Home));
}

/// Memory of which only the first part can be written.
struct HalfWritable(u64);

impl Memory for HalfWritable {
    fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        OwnMemory.read(address, into)
    }
    fn write(&mut self, address: u64, from: &[u8]) -> Result<(), Fault> {
        OwnMemory.write(address, from)
    }
    fn writable(&mut self, address: u64, length: u64) -> u64 {
        self.0.saturating_sub(address).min(length)
    }
}

#[test]
fn a_read_into_partly_unmapped_memory_is_cut_before_it_consumes() {
    let target = [0u8; 100];
    let mut memory = HalfWritable(at(&target) + 30);
    let mut buffer = buffer();
    let mut bulk = |args: [u64; 6], nr: i64| {
        gather(nr as u64, &args, 0, 1000, &mut memory, &mut buffer.0).map(|r| r.bulk())
    };
    assert_eq!(bulk([0, at(&target), 100, 0, 0, 0], SYS_read), Ok(30));
    assert_eq!(
        bulk([0, at(&target) + 30, 70, 0, 0, 0], SYS_read),
        Err(Gather::Errno(EFAULT))
    );
    let entry = |offset: usize, length| iovec {
        iov_base: target[offset..].as_ptr().cast_mut().cast(),
        iov_len: length,
    };
    let vector = [entry(0, 10), entry(20, 50), entry(0, 10)];
    assert_eq!(bulk([0, at(&vector), 3, 0, 0, 0], SYS_readv), Ok(20));
    let vector = [entry(50, 10)];
    assert_eq!(
        bulk([0, at(&vector), 1, 0, 0, 0], SYS_readv),
        Err(Gather::Errno(EFAULT))
    );
}
