//! Messages between the slices of one elastic process, beside those of the
//! coherence protocol. Kinds 32 to 63; all fit in a header's words, some have a
//! payload, which each variant describes.
//!
//! Who may send what is part of the meaning: layout comes from home only, calls
//! go to home only; a receiver treats anything else as an impossible message.

use weft_wire::frame::Header;

use crate::boot::{EXIT_INTERNAL, EXIT_NODE_LOST};

/// One message; addresses and lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// The execution moves here. Payload: a context, then a policy's state.
    Jump {
        /// Bytes of the context in the payload.
        context_length: u64,
    },
    /// The execution is here; for the sender's figures.
    Arrived,
    /// A part of a system call for home. Payload: a part of a marshalled
    /// request.
    Call {
        /// Whether the request is whole with this part.
        last: bool,
    },
    /// A part of home's answer to a call. Payload: a part of a marshalled
    /// reply; none for a [`Message::MemoryCall`].
    Reply {
        /// Result word of the call, or a negated errno.
        result: i64,
        /// Whether the reply is whole with this part.
        last: bool,
        /// A signal waits at home: the execution should go there.
        come_home: bool,
        /// The call was a transfer on a regular file.
        regular_file: bool,
    },
    /// A call that changes the layout. Payload: number and six arguments.
    MemoryCall,
    /// Home: its vdso, which lies at the same address everywhere, has this hash.
    /// A slice whose own is the same lets the program use it.
    Vdso {
        /// FNV-1a of the code.
        hash: u64,
    },
    /// Home: a range is mapped.
    Map {
        /// First address.
        start: u64,
        /// Bytes.
        length: u64,
        protection: u32,
        /// A `layout::Kind` as a number.
        kind: u32,
    },
    /// Home: a range is gone.
    Unmap {
        /// First address.
        start: u64,
        /// Bytes.
        length: u64,
    },
    /// Home: protection of a range.
    Protect {
        /// First address.
        start: u64,
        /// Bytes.
        length: u64,
        protection: u32,
    },
    /// Home: a range moved with its contents.
    Move {
        old_start: u64,
        /// How long it was.
        old_length: u64,
        new_start: u64,
        /// How long it is.
        new_length: u64,
    },
    /// Home: the contents of a range are thrown away.
    Discard {
        /// First address.
        start: u64,
        /// Bytes.
        length: u64,
    },
    /// Home: send the contents of `count` pages from `page` without giving
    /// them up (for a fork).
    Peek {
        /// First page number.
        page: u64,
        /// Pages.
        count: u64,
    },
    /// Answer to a peek. Payload: a byte per page (1: its content follows, 0:
    /// it is zero), then the contents.
    Peeked {
        /// First page number.
        page: u64,
        /// Pages.
        count: u64,
    },
    /// Home: what was sent before this has been done? Answered by
    /// [`Message::Synced`].
    Sync,
    /// Slice: yes.
    Synced,
    /// Measures a round trip; answered by [`Message::Pong`] with `length` bytes.
    Ping {
        /// Payload wanted, at most a page.
        length: u64,
    },
    /// Answer to a ping.
    Pong,
    /// Slice: the aggregate cannot go on, and this is why; home ends it. Payload:
    /// a sentence in UTF-8.
    Failed {
        /// The exit code, one of `boot::EXIT_*` for a program that runs.
        code: u32,
    },
    /// Home: its budget is another one now.
    HomeBudget { pages: u64 },
}

/// The header is no message of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Unknown kind.
    #[error("message kind {0} is unknown")]
    Kind(u8),
    /// An address range that no program can have.
    #[error("range {start:#x}+{length:#x} lies outside the managed addresses")]
    Range {
        /// First address.
        start: u64,
        /// Bytes.
        length: u64,
    },
    /// A field out of bounds.
    #[error("field {0} of message kind {1} is out of bounds")]
    Field(&'static str, u8),
}

/// Addresses of a program end here.
pub const MANAGED_END: u64 = 1 << 43;
const PAGE: u64 = 4096;
const FIRST_FAILURE: u32 = EXIT_NODE_LOST as u32;
const LAST_FAILURE: u32 = EXIT_INTERNAL as u32;

/// Pages of one [`Message::Peek`], at most.
const PEEKED_MAX: u64 = 64;

impl Message {
    /// The header that carries this message with `payload` bytes behind it.
    pub fn header(&self, payload: usize) -> Header {
        use Message::*;
        let (kind, words) = match *self {
            Jump { context_length } => (32, [context_length, 0, 0, 0, 0]),
            Arrived => (44, [0; 5]),
            Vdso { hash } => (45, [hash, 0, 0, 0, 0]),
            Call { last } => (33, [u64::from(last), 0, 0, 0, 0]),
            Reply {
                result,
                last,
                come_home,
                regular_file,
            } => (
                34,
                [
                    result as u64,
                    u64::from(last),
                    u64::from(come_home),
                    u64::from(regular_file),
                    0,
                ],
            ),
            MemoryCall => (35, [0; 5]),
            Map {
                start,
                length,
                protection,
                kind,
            } => (
                36,
                [start, length, u64::from(protection), u64::from(kind), 0],
            ),
            Unmap { start, length } => (37, [start, length, 0, 0, 0]),
            Protect {
                start,
                length,
                protection,
            } => (38, [start, length, u64::from(protection), 0, 0]),
            Move {
                old_start,
                old_length,
                new_start,
                new_length,
            } => (39, [old_start, old_length, new_start, new_length, 0]),
            Discard { start, length } => (40, [start, length, 0, 0, 0]),
            Peek { page, count } => (42, [page, count, 0, 0, 0]),
            Peeked { page, count } => (43, [page, count, 0, 0, 0]),
            Sync => (46, [0; 5]),
            Synced => (47, [0; 5]),
            Ping { length } => (48, [length, 0, 0, 0, 0]),
            Pong => (49, [0; 5]),
            Failed { code } => (50, [u64::from(code), 0, 0, 0, 0]),
            HomeBudget { pages } => (51, [pages, 0, 0, 0, 0]),
        };
        Header {
            kind,
            flags: 0,
            count: 0,
            length: payload as u32,
            words,
        }
    }

    /// Reads a message; every range is inside the managed addresses and page
    /// aligned, every count bounded.
    pub fn decode(header: &Header) -> Result<Message, MessageError> {
        use Message::*;
        let [a, b, c, d, _] = header.words;
        let small = |value: u64, name| {
            u32::try_from(value).map_err(|_| MessageError::Field(name, header.kind))
        };
        Ok(match header.kind {
            32 => Jump {
                context_length: at_most(a, u64::from(header.length), "context", header.kind)?,
            },
            33 => Call {
                last: at_most(a, 1, "last", header.kind)? == 1,
            },
            34 => Reply {
                result: a as i64,
                last: at_most(b, 1, "last", header.kind)? == 1,
                come_home: at_most(c, 1, "come_home", header.kind)? == 1,
                regular_file: at_most(d, 1, "regular_file", header.kind)? == 1,
            },
            35 => MemoryCall,
            36 => {
                range(a, b)?;
                Map {
                    start: a,
                    length: b,
                    protection: small(c, "protection")?,
                    kind: small(d, "kind")?,
                }
            }
            37 => {
                range(a, b)?;
                Unmap {
                    start: a,
                    length: b,
                }
            }
            38 => {
                range(a, b)?;
                Protect {
                    start: a,
                    length: b,
                    protection: small(c, "protection")?,
                }
            }
            39 => {
                range(a, b)?;
                range(c, d)?;
                Move {
                    old_start: a,
                    old_length: b,
                    new_start: c,
                    new_length: d,
                }
            }
            40 => {
                range(a, b)?;
                Discard {
                    start: a,
                    length: b,
                }
            }
            42 => {
                let (page, count) = pages(a, b, header.kind)?;
                Peek { page, count }
            }
            43 => {
                let (page, count) = pages(a, b, header.kind)?;
                Peeked { page, count }
            }
            44 => Arrived,
            45 => Vdso { hash: a },
            46 => Sync,
            47 => Synced,
            48 => Ping {
                length: at_most(a, PAGE, "length", header.kind)?,
            },
            49 => Pong,
            50 => match small(a, "code")? {
                code @ FIRST_FAILURE..=LAST_FAILURE => Failed { code },
                _ => return Err(MessageError::Field("code", header.kind)),
            },
            51 => HomeBudget { pages: a },
            other => return Err(MessageError::Kind(other)),
        })
    }
}

fn range(start: u64, length: u64) -> Result<(), MessageError> {
    let end = start.checked_add(length);
    let aligned = start.is_multiple_of(PAGE) && length.is_multiple_of(PAGE);
    match end {
        Some(end) if aligned && start >= PAGE && end <= MANAGED_END && length > 0 => Ok(()),
        _ => Err(MessageError::Range { start, length }),
    }
}

/// A start and a count of pages within the managed range, at most `PEEKED_MAX` pages.
fn pages(page: u64, count: u64, kind: u8) -> Result<(u64, u64), MessageError> {
    const END: u64 = MANAGED_END / PAGE;
    let page = at_most(page, END - 1, "page", kind)?;
    let count = at_most(count, PEEKED_MAX.min(END - page), "count", kind)?;
    Ok((page, count))
}

fn at_most(value: u64, limit: u64, name: &'static str, kind: u8) -> Result<u64, MessageError> {
    if value <= limit {
        Ok(value)
    } else {
        Err(MessageError::Field(name, kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The records of a slice end with the last page.
    #[test]
    fn a_peek_beyond_the_last_page_is_refused() {
        const END: u64 = MANAGED_END / PAGE;
        for (page, count, fits) in [
            (0, 64, true),
            (END - 64, 64, true),
            (END - 63, 64, false),
            (END, 0, false),
            (0, 65, false),
        ] {
            let peek = Message::Peek { page, count };
            let decoded = Message::decode(&peek.header(0));
            assert_eq!(decoded.is_ok(), fits, "{count} pages from {page:#x}");
        }
    }
}
