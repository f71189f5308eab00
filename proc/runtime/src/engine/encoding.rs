//! Page messages as frame headers.

use weft_dsm::{Access, Body, Content, Denial, Message, NodeId, Page, Right};
use weft_wire::Header;

fn content_bits(content: Content) -> u64 {
    match content {
        Content::Bytes => 0,
        Content::Zero => 1,
        Content::Held => 2,
    }
}
fn content(bits: u64) -> Option<Content> {
    Some(match bits {
        0 => Content::Bytes,
        1 => Content::Zero,
        2 => Content::Held,
        _ => return None,
    })
}
fn access_bits(access: Access) -> u64 {
    u64::from(access == Access::Write)
}
fn access(bit: u64) -> Option<Access> {
    Some(match bit {
        0 => Access::Read,
        1 => Access::Write,
        _ => return None,
    })
}
fn flag(bit: u64) -> Option<bool> {
    match bit {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}
fn node(value: u64) -> Option<NodeId> {
    (value < 32).then_some(NodeId(value as u8))
}

/// The header of a run of `count` messages that differ in the page only.
pub fn encode(message: &Message, count: u16) -> Header {
    let (kind, a, b, c) = match message.body {
        Body::Get { access, ahead } => (1, access_bits(access), u64::from(ahead), 0),
        Body::Forward {
            access,
            requester,
            sole,
            held,
        } => (
            2,
            access_bits(access),
            u64::from(requester.0),
            u64::from(sole) | u64::from(held) << 1,
        ),
        Body::Data {
            right,
            content,
            migratory,
        } => (
            3,
            u64::from(right == Right::Exclusive),
            content_bits(content),
            u64::from(migratory),
        ),
        Body::Grant { content } => (4, content_bits(content), 0, 0),
        Body::Invalidate => (5, 0, 0, 0),
        Body::InvalidateAck => (6, 0, 0, 0),
        Body::Done { exclusive } => (7, u64::from(exclusive), 0, 0),
        Body::Dropped => (8, 0, 0, 0),
        Body::Offer { to } => (9, to.map_or(0, |to| u64::from(to.0) + 1), 0, 0),
        Body::OfferDenied { reason } => (
            10,
            match reason {
                Denial::Busy => 0,
                Denial::NotOwner => 1,
                Denial::NoRoom => 2,
            },
            0,
            0,
        ),
        Body::Place { to, sole, held } => (11, u64::from(to.0), u64::from(sole), u64::from(held)),
        Body::Push {
            content,
            sole,
            migratory,
        } => (
            12,
            content_bits(content),
            u64::from(sole),
            u64::from(migratory),
        ),
        Body::NotHere => (13, 0, 0, 0),
        Body::Retry => (14, 0, 0, 0),
        Body::Lost { node } => (15, u64::from(node.0), 0, 0),
        Body::Probe { dead } => (16, u64::from(dead.0), 0, 0),
        Body::Held { dead, owner } => (17, u64::from(dead.0), u64::from(owner), 0),
    };
    Header {
        kind,
        flags: message.generation,
        count,
        length: 0,
        words: [message.page.0, a, b, c, 0],
    }
}

/// The first message of a run, and how many there are; `None` when it is none.
pub fn decode(header: &Header) -> Option<(Message, u16)> {
    let [page, a, b, c, _] = header.words;
    let end = page.checked_add(u64::from(header.count))?;
    if header.count == 0 || header.count > 512 || end > weft_dsm::PAGES_MAX {
        return None;
    }
    let body = match header.kind {
        1 => Body::Get {
            access: access(a)?,
            ahead: flag(b)?,
        },
        2 if c < 4 => Body::Forward {
            access: access(a)?,
            requester: node(b)?,
            sole: c & 1 != 0,
            held: c & 2 != 0,
        },
        3 => Body::Data {
            right: if flag(a)? {
                Right::Exclusive
            } else {
                Right::Shared
            },
            content: content(b)?,
            migratory: flag(c)?,
        },
        4 => Body::Grant {
            content: content(a)?,
        },
        5 => Body::Invalidate,
        6 => Body::InvalidateAck,
        7 => Body::Done {
            exclusive: flag(a)?,
        },
        8 => Body::Dropped,
        9 => Body::Offer {
            to: if a == 0 { None } else { Some(node(a - 1)?) },
        },
        10 => Body::OfferDenied {
            reason: match a {
                0 => Denial::Busy,
                1 => Denial::NotOwner,
                2 => Denial::NoRoom,
                _ => return None,
            },
        },
        11 => Body::Place {
            to: node(a)?,
            sole: flag(b)?,
            held: flag(c)?,
        },
        12 => Body::Push {
            content: content(a)?,
            sole: flag(b)?,
            migratory: flag(c)?,
        },
        13 => Body::NotHere,
        14 => Body::Retry,
        15 => Body::Lost { node: node(a)? },
        16 => Body::Probe { dead: node(a)? },
        17 => Body::Held {
            dead: node(a)?,
            owner: flag(b)?,
        },
        _ => return None,
    };
    let message = Message {
        page: Page(page),
        generation: header.flags,
        body,
    };
    Some((message, header.count))
}
