//! Messages on the wire. Equal messages for consecutive pages travel as one
//! frame, a [`Run`]; the bytes of pages, if any, are the frame's payload in
//! ascending order of pages.
//!
//! | field of the header | meaning |
//! | --- | --- |
//! | `kind` | 1 to 26, which message |
//! | `flags` | bit 0: write, exclusive, owner, lost, kept; bit 1: read-ahead, sole; bit 2: held, migratory; bits 4, 5: content; bits 6, 7: reason |
//! | `count` | pages, 1 to 512 |
//! | `words[0]` | first page, below 2³¹ |
//! | `words[1]` | bits 0 to 7: generation; bits 8 to 15: the node named, or 255; bits 16 to 47: the copyset of an entry |
//! | other words | zero |
//!
//! Decoding is total: every header gives a run or a named error, and what is
//! decoded encodes to the same header.

use crate::protocol::{Body, Content, Denial, Message, Right};
use crate::state::EntryRecord;
use crate::types::{Access, CHUNK_PAGES, NODES_MAX, NodeId, PAGE_BYTES, PAGES_MAX, Page};
use weft_wire::frame::Header;

/// Pages with their bytes that a collected run has at most: 256 KiB, which a link at
/// 10 Gbit/s carries in 0.2 ms. A longer run would hold up what comes behind it.
pub const RUN_CONTENT_PAGES_MAX: u16 = 64;

/// Equal messages for consecutive pages. Both engines collect what a link carries with
/// [`Run::one`] and [`Run::extend`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The message for the first page.
    pub first: Message,
    /// How many pages, 1 to 512.
    pub count: u16,
}

impl Run {
    /// A run of one.
    pub const fn one(message: Message) -> Run {
        Run {
            first: message,
            count: 1,
        }
    }
    /// Takes the message in if it continues the run and the run is not full; `false` if
    /// it does not. Full is a run of 512 pages, or of [`RUN_CONTENT_PAGES_MAX`] with bytes.
    pub fn extend(&mut self, message: &Message) -> bool {
        let count_max = match message.carries_bytes() {
            true => RUN_CONTENT_PAGES_MAX,
            false => CHUNK_PAGES as u16,
        };
        let fits = self.count < count_max
            && message.page.0 == self.first.page.0 + u64::from(self.count)
            && message.generation == self.first.generation
            && message.body == self.first.body;
        self.count += u16::from(fits);
        fits
    }
    /// The messages, one per page.
    pub fn messages(&self) -> impl Iterator<Item = Message> + use<> {
        let first = self.first;
        (0..u64::from(self.count)).map(move |offset| Message {
            page: Page(first.page.0 + offset),
            ..first
        })
    }
    /// Bytes of page content that travel with the run.
    pub fn content_bytes(&self) -> usize {
        if self.first.carries_bytes() {
            usize::from(self.count) * PAGE_BYTES
        } else {
            0
        }
    }
}

impl Message {
    /// Whether 4096 bytes travel with the message.
    pub const fn carries_bytes(&self) -> bool {
        matches!(
            self.body,
            Body::Precopy
                | Body::Data {
                    content: Content::Bytes,
                    ..
                }
                | Body::Push {
                    content: Content::Bytes,
                    ..
                }
        )
    }
}

/// Why a header is not a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// No message has this kind.
    #[error("coherence message of unknown kind {0}")]
    Kind(u8),
    /// The flags do not belong to the kind.
    #[error("coherence message of kind {kind} with invalid flags {flags:#04x}")]
    Flags { kind: u8, flags: u8 },
    /// Not 1 to 512 pages.
    #[error("coherence message about {0} pages, not 1 to 512")]
    Count(u16),
    /// The run does not end below 2³¹.
    #[error("coherence message about {count} pages from {first:#x}, beyond the last page")]
    Page {
        /// The first page.
        first: u64,
        /// How many.
        count: u16,
    },
    /// Not a node, or one where none belongs.
    #[error("coherence message of kind {kind} names node {node}")]
    Node {
        kind: u8,
        /// The number.
        node: u64,
    },
    /// A word that must be zero is not.
    #[error("coherence message of kind {0} with unused bits set")]
    Stray(u8),
    /// The payload is not one page per page.
    #[error("coherence message with {found} bytes of pages instead of {expected}")]
    Length {
        /// What the header says.
        found: u32,
        /// What its content needs.
        expected: u32,
    },
}

const GET: u8 = 1;
const FORWARD: u8 = 2;
const DATA: u8 = 3;
const GRANT: u8 = 4;
const INVALIDATE: u8 = 5;
const INVALIDATE_ACK: u8 = 6;
const DONE: u8 = 7;
const DROPPED: u8 = 8;
const OFFER: u8 = 9;
const OFFER_DENIED: u8 = 10;
const PLACE: u8 = 11;
const PUSH: u8 = 12;
const NOT_HERE: u8 = 13;
const RETRY: u8 = 14;
const LOST: u8 = 15;
const PROBE: u8 = 16;
const HELD: u8 = 17;
const FREEZE: u8 = 18;
const FROZEN: u8 = 19;
const ENTRY: u8 = 20;
const MOVED: u8 = 21;
const THAW: u8 = 22;
const ASK: u8 = 23;
const PRECOPY: u8 = 24;
const PRECOPIED: u8 = 25;
const DROP_PRECOPY: u8 = 26;

const FIRST: u8 = 1;
const SECOND: u8 = 2;
const THIRD: u8 = 4;
const NO_NODE: u8 = 255;

const fn bit(on: bool, bit: u8) -> u8 {
    if on { bit } else { 0 }
}
const fn write(access: Access) -> u8 {
    bit(matches!(access, Access::Write), FIRST)
}
const fn content_flags(content: Content) -> u8 {
    (content as u8) << 4
}

/// Kind, flags and named node of a message.
fn parts(body: Body) -> (u8, u8, u8) {
    match body {
        Body::Get { access, ahead } => (GET, write(access) | bit(ahead, SECOND), NO_NODE),
        Body::Forward {
            access,
            requester,
            sole,
            held,
        } => {
            let flags = write(access) | bit(sole, SECOND) | bit(held, THIRD);
            (FORWARD, flags, requester.0)
        }
        Body::Data {
            right,
            content,
            migratory,
        } => {
            let exclusive = bit(right == Right::Exclusive, FIRST);
            let flags = exclusive | bit(migratory, THIRD) | content_flags(content);
            (DATA, flags, NO_NODE)
        }
        Body::Grant { content } => (GRANT, content_flags(content), NO_NODE),
        Body::Invalidate => (INVALIDATE, 0, NO_NODE),
        Body::InvalidateAck => (INVALIDATE_ACK, 0, NO_NODE),
        Body::Done { exclusive } => (DONE, bit(exclusive, FIRST), NO_NODE),
        Body::Dropped => (DROPPED, 0, NO_NODE),
        Body::Offer { to } => (OFFER, 0, to.map_or(NO_NODE, |node| node.0)),
        Body::OfferDenied { reason } => (OFFER_DENIED, (reason as u8) << 6, NO_NODE),
        Body::Place { to, sole, held } => (PLACE, bit(sole, SECOND) | bit(held, THIRD), to.0),
        Body::Push {
            content,
            sole,
            migratory,
        } => {
            let flags = bit(sole, SECOND) | bit(migratory, THIRD) | content_flags(content);
            (PUSH, flags, NO_NODE)
        }
        Body::NotHere => (NOT_HERE, 0, NO_NODE),
        Body::Retry => (RETRY, 0, NO_NODE),
        Body::Lost { node } => (LOST, 0, node.0),
        Body::Probe { dead } => (PROBE, 0, dead.0),
        Body::Held { dead, owner } => (HELD, bit(owner, FIRST), dead.0),
        Body::Freeze { to } => (FREEZE, 0, to.0),
        Body::Frozen => (FROZEN, 0, NO_NODE),
        // Node + 1 becomes the node, and 0, an untouched page, becomes `NO_NODE`.
        Body::Entry { record } => (ENTRY, bit(record.lost, FIRST), record.owner.wrapping_sub(1)),
        Body::Moved { to } => (MOVED, 0, to.0),
        Body::Thaw => (THAW, 0, NO_NODE),
        Body::Ask { dead } => (ASK, 0, dead.0),
        Body::Precopy => (PRECOPY, 0, NO_NODE),
        Body::Precopied { kept } => (PRECOPIED, bit(kept, FIRST), NO_NODE),
        Body::DropPrecopy => (DROP_PRECOPY, 0, NO_NODE),
    }
}

/// The header of a run, `length` included.
pub fn encode(run: &Run) -> Header {
    let (kind, flags, node) = parts(run.first.body);
    let mut header = Header::new(kind);
    header.flags = flags;
    header.count = run.count;
    header.length = run.content_bytes() as u32;
    header.words[0] = run.first.page.0;
    header.words[1] = u64::from(run.first.generation) | u64::from(node) << 8;
    if let Body::Entry { record } = run.first.body {
        header.words[1] |= u64::from(u32::from_le_bytes(record.copyset)) << 16;
    }
    header
}

/// The run that a header announces.
///
/// # Errors
/// Anything that [`encode`] does not produce; each is an error of its own.
pub fn decode(header: &Header) -> Result<Run, DecodeError> {
    let kind = header.kind;
    let count = header.count;
    if count == 0 || u64::from(count) > CHUNK_PAGES {
        return Err(DecodeError::Count(count));
    }
    let first = header.words[0];
    if first >= PAGES_MAX || first + u64::from(count) > PAGES_MAX {
        return Err(DecodeError::Page { first, count });
    }
    let beside = match kind {
        ENTRY => (header.words[1] >> 16) as u32,
        _ => 0,
    };
    let node = (header.words[1] ^ u64::from(beside) << 16) >> 8;
    let known = node < NODES_MAX as u64 || node == u64::from(NO_NODE);
    if !known {
        return Err(DecodeError::Node { kind, node });
    }
    let body = body(kind, header.flags, node as u8, beside).ok_or(match kind {
        1..=DROP_PRECOPY => DecodeError::Node { kind, node },
        _ => DecodeError::Kind(kind),
    })?;
    let run = Run {
        first: Message {
            page: Page(first),
            generation: header.words[1] as u8,
            body,
        },
        count,
    };
    let canonical = encode(&run);
    if canonical.flags != header.flags {
        let flags = header.flags;
        return Err(DecodeError::Flags { kind, flags });
    }
    if canonical.words[1] != header.words[1] {
        return Err(DecodeError::Node { kind, node });
    }
    if canonical.words != header.words {
        return Err(DecodeError::Stray(kind));
    }
    if canonical.length != header.length {
        return Err(DecodeError::Length {
            found: header.length,
            expected: canonical.length,
        });
    }
    Ok(run)
}

/// The message of a kind; `None` when the kind is unknown or needs a node.
/// Flags that mean nothing are ignored here and found by encoding again.
fn body(kind: u8, flags: u8, node: u8, copyset: u32) -> Option<Body> {
    let (first, sole, third) = (flags & FIRST != 0, flags & SECOND != 0, flags & THIRD != 0);
    let access = if first { Access::Write } else { Access::Read };
    let content = match flags >> 4 & 3 {
        0 => Content::Bytes,
        1 => Content::Zero,
        2 => Content::Held,
        _ => Content::Precopied,
    };
    let named = (node != NO_NODE).then_some(NodeId(node));
    Some(match kind {
        GET => Body::Get {
            access,
            ahead: sole,
        },
        FORWARD => Body::Forward {
            access,
            requester: named?,
            sole,
            held: third,
        },
        DATA => Body::Data {
            right: if first {
                Right::Exclusive
            } else {
                Right::Shared
            },
            content,
            migratory: third,
        },
        GRANT => Body::Grant { content },
        INVALIDATE => Body::Invalidate,
        INVALIDATE_ACK => Body::InvalidateAck,
        DONE => Body::Done { exclusive: first },
        DROPPED => Body::Dropped,
        OFFER => Body::Offer { to: named },
        OFFER_DENIED => Body::OfferDenied {
            reason: match flags >> 6 {
                0 => Denial::Busy,
                1 => Denial::NotOwner,
                _ => Denial::NoRoom,
            },
        },
        PLACE => Body::Place {
            to: named?,
            sole,
            held: third,
        },
        PUSH => Body::Push {
            content,
            sole,
            migratory: third,
        },
        NOT_HERE => Body::NotHere,
        RETRY => Body::Retry,
        LOST => Body::Lost { node: named? },
        PROBE => Body::Probe { dead: named? },
        HELD => Body::Held {
            dead: named?,
            owner: first,
        },
        FREEZE => Body::Freeze { to: named? },
        FROZEN => Body::Frozen,
        // A lost page names the node that it died with.
        ENTRY if first && named.is_none() => return None,
        ENTRY => Body::Entry {
            record: EntryRecord {
                copyset: copyset.to_le_bytes(),
                owner: node.wrapping_add(1),
                lost: first,
            },
        },
        MOVED => Body::Moved { to: named? },
        THAW => Body::Thaw,
        ASK => Body::Ask { dead: named? },
        PRECOPY => Body::Precopy,
        PRECOPIED => Body::Precopied { kept: first },
        DROP_PRECOPY => Body::DropPrecopy,
        _ => return None,
    })
}

/// The message of a header whose flags and lengths are not judged.
#[cfg(test)]
pub(crate) fn decode_for_tests(header: &Header) -> Option<Message> {
    Some(Message {
        page: Page(header.words[0]),
        generation: header.words[1] as u8,
        body: body(
            header.kind,
            header.flags,
            (header.words[1] >> 8) as u8,
            (header.words[1] >> 16) as u32,
        )?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn access() -> impl Strategy<Value = Access> {
        prop_oneof![Just(Access::Read), Just(Access::Write)]
    }
    fn content() -> impl Strategy<Value = Content> {
        prop_oneof![
            Just(Content::Bytes),
            Just(Content::Zero),
            Just(Content::Held),
            Just(Content::Precopied)
        ]
    }
    fn node() -> impl Strategy<Value = NodeId> {
        (0..NODES_MAX as u8).prop_map(NodeId)
    }
    fn denial() -> impl Strategy<Value = Denial> {
        prop_oneof![
            Just(Denial::Busy),
            Just(Denial::NotOwner),
            Just(Denial::NoRoom)
        ]
    }
    fn any_body() -> impl Strategy<Value = Body> {
        let right = prop_oneof![Just(Right::Shared), Just(Right::Exclusive)];
        prop_oneof![
            (access(), any::<bool>()).prop_map(|(access, ahead)| Body::Get { access, ahead }),
            (access(), node(), any::<bool>(), any::<bool>()).prop_map(
                |(access, requester, sole, held)| Body::Forward {
                    access,
                    requester,
                    sole,
                    held
                }
            ),
            (right, content(), any::<bool>()).prop_map(|(right, content, migratory)| {
                Body::Data {
                    right,
                    content,
                    migratory,
                }
            }),
            content().prop_map(|content| Body::Grant { content }),
            Just(Body::Invalidate),
            Just(Body::InvalidateAck),
            any::<bool>().prop_map(|exclusive| Body::Done { exclusive }),
            Just(Body::Dropped),
            proptest::option::of(node()).prop_map(|to| Body::Offer { to }),
            denial().prop_map(|reason| Body::OfferDenied { reason }),
            (node(), any::<bool>(), any::<bool>()).prop_map(|(to, sole, held)| Body::Place {
                to,
                sole,
                held
            }),
            (content(), any::<bool>(), any::<bool>()).prop_map(|(content, sole, migratory)| {
                Body::Push {
                    content,
                    sole,
                    migratory,
                }
            }),
            Just(Body::NotHere),
            Just(Body::Retry),
            node().prop_map(|node| Body::Lost { node }),
            node().prop_map(|dead| Body::Probe { dead }),
            (node(), any::<bool>()).prop_map(|(dead, owner)| Body::Held { dead, owner }),
            node().prop_map(|to| Body::Freeze { to }),
            Just(Body::Frozen),
            (any::<[u8; 4]>(), 0..=NODES_MAX as u8, any::<bool>()).prop_map(
                |(copyset, owner, lost)| Body::Entry {
                    record: EntryRecord {
                        copyset,
                        owner,
                        lost: lost && owner != 0
                    }
                }
            ),
            node().prop_map(|to| Body::Moved { to }),
            Just(Body::Thaw),
            node().prop_map(|dead| Body::Ask { dead }),
            Just(Body::Precopy),
            any::<bool>().prop_map(|kept| Body::Precopied { kept }),
            Just(Body::DropPrecopy),
        ]
    }
    fn any_run() -> impl Strategy<Value = Run> {
        (
            0..PAGES_MAX - CHUNK_PAGES,
            any::<u8>(),
            any_body(),
            1..=512u16,
        )
            .prop_map(|(page, generation, body, count)| Run {
                first: Message {
                    page: Page(page),
                    generation,
                    body,
                },
                count,
            })
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(run in any_run()) {
            prop_assert_eq!(decode(&encode(&run)), Ok(run));
        }

        #[test]
        fn garbage_gives_an_error_or_the_same_header(
            kind in 0..40u8, flags in any::<u8>(), count in 0..600u16, length in any::<u32>(),
            page in prop_oneof![any::<u64>(), 0..PAGES_MAX + 600],
            word in prop_oneof![any::<u64>(), 0..70_000u64],
            stray in prop_oneof![Just(0u64), any::<u64>()],
        ) {
            let header = Header { kind, flags, count, length, words: [page, word, stray, 0, 0] };
            if let Ok(run) = decode(&header) {
                prop_assert_eq!(encode(&run), header);
                prop_assert!(run.first.page.0 + u64::from(run.count) <= PAGES_MAX);
            }
        }

        #[test]
        fn one_wrong_bit_is_found_or_means_something_else(run in any_run(), bit in 0..320usize) {
            let mut header = encode(&run);
            header.words[bit / 64] ^= 1 << (bit % 64);
            prop_assert_ne!(decode(&header), Ok(run));
        }
    }

    #[test]
    fn runs_join_only_what_is_equal_and_next() {
        let message = |page, generation| Message {
            page: Page(page),
            generation,
            body: Body::Dropped,
        };
        let mut run = Run::one(message(7, 1));
        assert!(run.extend(&message(8, 1)));
        assert!(!run.extend(&message(8, 1)));
        assert!(!run.extend(&message(9, 2)));
        assert_eq!(run.messages().count(), 2);
        for page in 9..7 + CHUNK_PAGES {
            assert!(run.extend(&message(page, 1)));
        }
        assert!(!run.extend(&message(7 + CHUNK_PAGES, 1)));
    }

    #[test]
    fn a_run_with_bytes_is_shorter() {
        let message = |page| Message {
            page: Page(page),
            generation: 0,
            body: Body::Data {
                right: Right::Shared,
                content: Content::Bytes,
                migratory: false,
            },
        };
        let mut run = Run::one(message(0));
        let taken = (1..CHUNK_PAGES).take_while(|page| run.extend(&message(*page)));
        assert_eq!(taken.count() as u16 + 1, RUN_CONTENT_PAGES_MAX);
        assert_eq!(run.content_bytes(), 64 * PAGE_BYTES);
    }

    #[test]
    fn errors_are_named() {
        let good = encode(&Run::one(Message {
            page: Page(1),
            generation: 0,
            body: Body::Dropped,
        }));
        assert_eq!(
            decode(&Header { kind: 31, ..good }),
            Err(DecodeError::Kind(31))
        );
        assert_eq!(
            decode(&Header { count: 0, ..good }),
            Err(DecodeError::Count(0))
        );
        assert_eq!(
            decode(&Header { flags: 8, ..good }),
            Err(DecodeError::Flags {
                kind: DROPPED,
                flags: 8
            })
        );
        assert_eq!(
            decode(&Header { length: 1, ..good }),
            Err(DecodeError::Length {
                found: 1,
                expected: 0
            })
        );
    }
}
