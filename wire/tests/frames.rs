//! Properties of the frame's codec and of a stream of frames.

mod common;

use common::{Kind, pair};
use proptest::prelude::*;
use weft_wire::frame::{HEADER_BYTES, MAX_PAYLOAD};
use weft_wire::{FrameError, Header};

fn header() -> impl Strategy<Value = Header> {
    (
        1u8..192,
        any::<u8>(),
        any::<u16>(),
        0..=MAX_PAYLOAD as u32,
        any::<[u64; 5]>(),
    )
        .prop_map(|(kind, flags, count, length, words)| Header {
            kind,
            flags,
            count,
            length,
            words,
        })
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(header in header()) {
        prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn decoding_is_total_and_exact(bytes in any::<[u8; HEADER_BYTES]>()) {
        match Header::decode(&bytes) {
            Ok(header) => {
                prop_assert_eq!(header.encode(), bytes);
                prop_assert!(header.length as usize <= MAX_PAYLOAD);
            }
            Err(FrameError::Kind(kind)) => prop_assert!(kind == 0 || kind > 191),
            Err(FrameError::TooLong(length)) => prop_assert!(length as usize > MAX_PAYLOAD),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Frames of any sizes, in any split into parts, sent in bursts, come out
    /// as they went in, over every kind of link.
    #[test]
    fn a_stream_of_frames_is_kept(
        sizes in prop::collection::vec(prop_oneof![Just(0usize), 1usize..100, Just(4096), 0usize..8_000], 1..12),
        cut in 1usize..5000,
        kind in prop::sample::select(Kind::ALL.to_vec()),
    ) {
        let (mut near, mut far) = pair(kind);
        for (index, size) in sizes.iter().enumerate() {
            let payload = vec![index as u8 + 1; *size];
            let parts: Vec<&[u8]> = payload.chunks(cut).collect();
            let mut header = Header::new(40);
            header.words[4] = index as u64;
            near.link.send(&header, &parts).unwrap();
        }
        for (index, size) in sizes.iter().enumerate() {
            let frame = far.link.receive(5_000_000_000).unwrap().expect("a frame");
            prop_assert_eq!(frame.header.words[4], index as u64);
            prop_assert_eq!(frame.payload.len(), *size);
            prop_assert!(frame.payload.iter().all(|byte| *byte == index as u8 + 1));
        }
    }
}
