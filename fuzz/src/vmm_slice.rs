//! What a slice of a machine hears from another: notes and orders.

use crate::random::Random;
use weft_vmm::machine::Placement;
use weft_vmm::slice::note::Note;
use weft_vmm::slice::orders::{Answer, Order};
use weft_wire::Header;
use weft_wire::frame::HEADER_BYTES;

/// Kinds of notes that there are, and some that there are not.
const KINDS: std::ops::Range<usize> = 128..160;

/// Headers of notes, most with fields that mean something.
pub fn valid_notes(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..1 + random.below(20) {
        let mut header = Header::new((KINDS.start + random.below(KINDS.len())) as u8);
        header.flags = random.below(5) as u8;
        header.count = random.below(10) as u16;
        header.words[0] = random.below(256) as u64;
        header.words[1] = random.next();
        bytes.extend_from_slice(&header.encode());
    }
    bytes
}

/// A note is refused, or encodes to the same frame again.
pub fn note(input: &[u8]) {
    let (headers, rest) = input.as_chunks::<HEADER_BYTES>();
    for bytes in headers {
        let Ok(header) = Header::decode(bytes) else {
            continue;
        };
        for payload in [&[][..], rest] {
            if let Ok(note) = Note::decode(&header, payload) {
                let (again, content) = note.encode();
                assert_eq!((again.kind, again.words), (header.kind, header.words));
                assert_eq!(content, payload);
            }
        }
    }
}

/// Text of orders, answers and placements.
pub fn valid_texts(random: &mut Random) -> Vec<u8> {
    let order = match random.below(4) {
        0 => serde_json::to_vec(&Order::Run {
            tsc_offset: random.next(),
            tsc_zero: random.next(),
        }),
        1 => serde_json::to_vec(&Order::Pause),
        2 => serde_json::to_vec(&Answer::Refused("no".into())),
        _ => serde_json::to_vec(&Placement::whole(3, 64 << 20)),
    };
    order.unwrap_or_default()
}

/// Orders, answers and placements are refused or mean something that can be.
pub fn text(input: &[u8]) {
    let _ = serde_json::from_slice::<Order>(input);
    let _ = serde_json::from_slice::<Answer>(input);
    if let Ok(placement) = serde_json::from_slice::<Placement>(input) {
        let cpus: u32 = (0..placement.slices())
            .map(|slice| placement.cpus_of(slice).len() as u32)
            .sum();
        assert_eq!(cpus, placement.cpus());
        assert_eq!(placement.page_ends().len(), placement.slices());
    }
}
