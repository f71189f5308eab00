//! Requests and replies from a peer that lies.

use super::*;
use crate::table;
use proptest::prelude::*;

/// A request for `nr` as the header has it.
fn header(nr: u32, args: [u64; 6], lengths: [u32; 8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    bytes[..4].copy_from_slice(&nr.to_le_bytes());
    for (index, word) in args.iter().enumerate() {
        bytes[8 + 8 * index..16 + 8 * index].copy_from_slice(&word.to_le_bytes());
    }
    for (index, length) in lengths.iter().enumerate() {
        bytes[56 + 4 * index..60 + 4 * index].copy_from_slice(&length.to_le_bytes());
    }
    bytes
}

/// Every pointer of an accepted request must lie, with what the kernel may touch
/// behind it, inside the buffer; the rest must be what the table calls integers.
fn check_accepted(bytes: &[u8]) {
    let Ok(arrived) = DecodedCall::decode(bytes) else {
        return;
    };
    let mut buffer = bytes.to_vec();
    buffer.resize(arrived.space(), 0xee);
    let base = 0x7000_0000_0000u64;
    let end = base + buffer.len() as u64;
    let inside =
        |address: u64, length: u64| address == 0 || (address >= base && address + length <= end);
    let words = arrived.relocate(&mut buffer, base).unwrap();
    let at = |address: u64| (address - base) as usize;
    let word = |buffer: &[u8], address: u64| {
        u64::from_le_bytes(buffer[at(address)..at(address) + 8].try_into().unwrap())
    };
    for (index, arg) in arrived.plain().args.iter().enumerate() {
        use table::Arg::*;
        let pointer = words[index];
        match arg {
            Int | Descriptor => assert_eq!(pointer, arrived.args()[index]),
            InVector(count) | OutVector(count) if pointer != 0 => {
                assert_eq!(words[usize::from(*count)], 1);
                assert!(inside(word(&buffer, pointer), word(&buffer, pointer + 8)));
            }
            InMessage | OutMessage if pointer != 0 => {
                assert!(inside(pointer, 56));
                let name_length = word(&buffer, pointer + 8) & 0xffff_ffff;
                assert!(inside(word(&buffer, pointer), name_length));
                assert_eq!(word(&buffer, pointer + 24), 1);
                let vector = word(&buffer, pointer + 16);
                assert!(inside(vector, 16));
                assert!(inside(word(&buffer, vector), word(&buffer, vector + 8)));
                assert!(inside(
                    word(&buffer, pointer + 32),
                    word(&buffer, pointer + 40)
                ));
            }
            SignalSet(size) if pointer != 0 => {
                assert_eq!(words[usize::from(*size)], 8);
                assert!(inside(pointer, 8));
            }
            PackedSignalSet if pointer != 0 => {
                assert_eq!(word(&buffer, pointer + 8), 8);
                assert!(inside(word(&buffer, pointer), 8));
            }
            CString(_) | CutString(_) if pointer != 0 => {
                assert!(inside(pointer, 1));
                assert!(buffer[at(pointer)..].contains(&0));
            }
            In(length) | Out(length, ..) | InOut(length, _) if pointer != 0 => {
                use table::Length::*;
                let bytes = match *length {
                    Constant(bytes) => bytes.into(),
                    Argument(index) => words[usize::from(index)],
                    ArgumentPlus(index, more) => words[usize::from(index)] + u64::from(more),
                    Elements(index, size) => {
                        (words[usize::from(index)] as u32 as u64) * u64::from(size)
                    }
                    Bits(index) => (words[usize::from(index)] as u32 as u64).div_ceil(64) * 8,
                    Pointed(index) => match words[usize::from(index)] {
                        0 => 0,
                        address => word(&[&buffer[..], &[0; 8]].concat(), address) & 0xffff_ffff,
                    },
                };
                assert!(
                    inside(pointer, bytes),
                    "argument {index} of {}",
                    arrived.nr()
                );
            }
            _ => {}
        }
    }
    let mut reply = vec![0; SPACE_MAX];
    for result in [i64::MIN, -4, 0, 1, i64::MAX] {
        let total: usize = arrived.outputs(result, &buffer).map(|o| o.length).sum();
        assert!(total <= buffer.len());
        arrived.reply(result, &buffer, &mut reply).unwrap();
    }
}

fn length() -> impl Strategy<Value = u32> {
    prop_oneof![
        Just(u32::MAX),
        0..40u32,
        Just(4),
        Just(8),
        Just(16),
        Just(72),
        Just(144),
        any::<u32>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        check_accepted(&bytes);
    }

    #[test]
    fn plausible_requests_stay_inside_their_buffer(
        nr in 0..480u32,
        args in proptest::array::uniform6(prop_oneof![0..9u64, Just(64), any::<u64>()]),
        lengths in proptest::array::uniform8(length()),
        data in proptest::collection::vec(any::<u8>(), 2000),
    ) {
        let mut bytes = header(nr, args, lengths);
        // As many bytes as the header implies, if it implies a number.
        if let Err(Malformed::WrongLength { expected, .. }) = DecodedCall::decode(&bytes) {
            bytes.extend(data.iter().cycle().take((expected - HEADER).min(1 << 16)));
        }
        check_accepted(&bytes);
    }

    #[test]
    fn changed_requests_stay_inside_their_buffer(
        which in 0..8usize,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let mut bytes = gathered(which);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        check_accepted(&bytes);
    }

    #[test]
    fn any_reply_is_scattered_or_refused(which in 0..8usize, reply in proptest::collection::vec(prop_oneof![0..8u8, any::<u8>()], 0..200)) {
        let mut buffer = buffer();
        let request = gather_one(which, &mut buffer.0);
        let _ = request.scatter(&reply, &mut Nowhere);
    }
}

/// Memory that reads as zeroes and cannot be written.
struct Nowhere;

impl Memory for Nowhere {
    fn read(&mut self, _: u64, into: &mut [u8]) -> Result<(), Fault> {
        into.fill(0);
        Ok(())
    }
    fn write(&mut self, address: u64, _: &[u8]) -> Result<(), Fault> {
        Err(Fault { address })
    }
}

/// Real requests to start from.
fn gather_one(which: usize, buffer: &mut [u8]) -> Request {
    let text = c"/some/path";
    let vector = [at(b"data"), 4, at(b"more"), 4];
    let mut message = [0u64; 7];
    message[0] = at(b"0123456789abcdef");
    message[1] = 16;
    message[2] = at(&vector);
    message[3] = 2;
    message[4] = at(b"0123456789abcdef");
    message[5] = 16;
    let (length, mask) = (16u32, u64::MAX);
    let packed = [at(&mask), 8];
    let sets = [1u64; 3];
    let (nr, args): (i64, [u64; 6]) = match which {
        0 => (libc::SYS_openat, [0, at(text.to_bytes()), 0, 0, 0, 0]),
        1 => (libc::SYS_writev, [1, at(&vector), 2, 0, 0, 0]),
        2 => (libc::SYS_sendmsg, [1, at(&message), 0, 0, 0, 0]),
        3 => (libc::SYS_recvmsg, [1, at(&message), 0, 0, 0, 0]),
        4 => (
            libc::SYS_getsockname,
            [1, at(&vector), at(&length), 0, 0, 0],
        ),
        5 => (
            libc::SYS_pselect6,
            [9, at(&sets), at(&sets), at(&sets), 0, at(&packed)],
        ),
        6 => (
            libc::SYS_rt_sigtimedwait,
            [at(&mask), at(&vector), 0, 8, 0, 0],
        ),
        _ => (libc::SYS_epoll_wait, [3, at(&vector), 2, 0, 0, 0]),
    };
    gather(nr as u64, &args, 0, BULK_MAX, &mut OwnMemory, buffer).unwrap()
}

fn gathered(which: usize) -> Vec<u8> {
    let mut buffer = buffer();
    let request = gather_one(which, &mut buffer.0);
    buffer.0[..request.sent()].to_vec()
}

#[test]
fn gathered_requests_are_accepted() {
    for which in 0..8 {
        let bytes = gathered(which);
        DecodedCall::decode(&bytes).unwrap();
        check_accepted(&bytes);
    }
}

#[test]
fn lies_are_named() {
    let absent = [u32::MAX; 8];
    let write = |args: [u64; 6], lengths: [u32; 8]| {
        DecodedCall::decode(&header(libc::SYS_write as u32, args, lengths)).unwrap_err()
    };
    let short = DecodedCall::decode(&[0; HEADER - 1]).unwrap_err();
    assert_eq!(short, Malformed::Short { length: HEADER - 1 });
    let mut lengths = absent;
    lengths[0] = 5;
    assert!(matches!(
        write([1, 0, 5, 0, 0, 0], lengths),
        Malformed::WrongLength { .. }
    ));
    lengths[0] = SPACE_MAX as u32;
    assert!(matches!(
        write([1, 0, 5, 0, 0, 0], lengths),
        Malformed::TooLarge { .. }
    ));
    lengths[0] = 0;
    let wrong = write([1, 0, 1 << 40, 0, 0, 0], lengths);
    assert!(matches!(wrong, Malformed::Length { argument: 1, .. }));
    for nr in [
        libc::SYS_mmap,
        libc::SYS_execve,
        libc::SYS_ptrace,
        libc::SYS_io_uring_setup,
        9999,
    ] {
        let refused = DecodedCall::decode(&header(nr as u32, [0; 6], absent)).unwrap_err();
        assert_eq!(refused, Malformed::NotPlain { nr: nr as u32 });
    }
    // An address and control data of a message that is not there.
    for part in [0, 2] {
        let mut lengths = absent;
        lengths[part] = 16;
        let message = header(libc::SYS_recvmsg as u32, [0; 6], lengths);
        let wrong = DecodedCall::decode(&message).unwrap_err();
        assert!(matches!(wrong, Malformed::Length { argument: 1, .. }));
    }
    // A path without its end, which the kernel would read past.
    lengths[0] = 3;
    let mut open = header(libc::SYS_open as u32, [0; 6], lengths);
    open.extend(b"abc");
    let unterminated = DecodedCall::decode(&open).unwrap_err();
    assert!(matches!(
        unterminated,
        Malformed::Unterminated { argument: 0, .. }
    ));
    *open.last_mut().unwrap() = 0;
    assert_eq!(
        DecodedCall::decode(&open).unwrap().string(0, &open),
        Some(&b"ab"[..])
    );
}

#[test]
fn a_reply_with_more_than_was_asked_for_is_refused() {
    let target = [0xaau8; 64];
    let mut sent = buffer();
    let args = [0, at(&target), 4, 0, 0, 0];
    let request = gather(
        libc::SYS_read as u64,
        &args,
        0,
        100,
        &mut OwnMemory,
        &mut sent.0,
    )
    .unwrap();
    let mut reply = 5i64.to_le_bytes().to_vec();
    reply.extend(1u64.to_le_bytes());
    reply.extend([0, 0, 0, 0, 5, 0, 0, 0]);
    reply.extend(b"abcde");
    let refused = request.scatter(&reply, &mut OwnMemory).unwrap_err();
    assert_eq!(
        refused,
        ScatterError::NoSuchOutput {
            piece: 0,
            length: 5
        }
    );
    assert_eq!(target, [0xaa; 64]);
    reply.truncate(10);
    assert_eq!(
        request.scatter(&reply, &mut OwnMemory),
        Err(ScatterError::Short { length: 10 })
    );
}

#[test]
fn masks_arrive_whole() {
    let mut buffer = buffer();
    let request = gather_one(5, &mut buffer.0);
    let arrived = DecodedCall::decode(&buffer.0[..request.sent()]).unwrap();
    let words = arrived.relocate(&mut buffer.0, 0).unwrap();
    let word = |at: u64| u64::from_le_bytes(buffer.0[at as usize..][..8].try_into().unwrap());
    assert_eq!(word(word(words[5])), u64::MAX);
}
