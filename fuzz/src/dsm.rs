//! The coherence protocol: page messages from a peer that says anything.

use crate::random::Random;
use weft_dsm::message::{Run, decode, encode};
use weft_dsm::{
    Access, Action, Config, Event, ManagerOf, MapTables, Message, Node, NodeId, PAGES_MAX, Page,
};
use weft_wire::Header;
use weft_wire::frame::HEADER_BYTES;

const NODES: u8 = 3;

fn decoded(input: &[u8]) -> impl Iterator<Item = (Header, Run)> {
    input
        .as_chunks::<HEADER_BYTES>()
        .0
        .iter()
        .filter_map(|bytes| {
            let header = Header::decode(bytes).ok()?;
            Some((header, decode(&header).ok()?))
        })
}

/// Headers that mean something: they decode, about a few pages.
pub fn valid_messages(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < HEADER_BYTES * (1 + random.below(40)) {
        let count = 1 + random.below(2) as u16;
        let mut header = Header {
            kind: 1 + random.below(17) as u8,
            flags: 0,
            count,
            length: 0,
            words: core::array::from_fn(|_| 0),
        };
        header.words[0] = random.below(3) as u64;
        let node = [0, 1, 2, 255][random.below(4)];
        header.words[1] = random.below(2) as u64 | node << 8;
        header.flags = random.next() as u8;
        header.length = u32::from(count) * 4096 * random.below(2) as u32;
        if decode(&header).is_ok() {
            bytes.extend_from_slice(&header.encode());
        }
    }
    bytes
}

/// A header is refused or means exactly one run, inside the address space.
pub fn message(input: &[u8]) {
    for (header, run) in decoded(input) {
        assert_eq!(encode(&run), header);
        assert!(run.first.page.0 + u64::from(run.count) <= PAGES_MAX);
        let messages: Vec<Message> = run.messages().collect();
        assert_eq!(messages.len(), usize::from(run.count));
        assert_eq!(run.content_bytes(), header.length as usize);
    }
}

/// A node whose peers send any messages, while it faults, evicts and discards,
/// may be confused about those pages; it must not fall over, and what it sends
/// must encode.
pub fn node(input: &[u8]) {
    for manager in 0..NODES {
        let config = Config::new(NodeId(0), NODES, ManagerOf::Fixed(NodeId(manager)));
        let mut node = Node::new(&config, MapTables::default());
        let mut step = |event| {
            node.step(event, &mut |action: Action| {
                if let Action::Send { message, .. } | Action::Give { message, .. } = action {
                    assert!(decode(&encode(&Run::one(message))).is_ok());
                }
            });
        };
        for (index, (header, run)) in decoded(input).enumerate() {
            let from = NodeId(1 + header.words[0] as u8 % (NODES - 1));
            for message in run.messages().take(4) {
                step(Event::Message { from, message });
            }
            let page = Page(index as u64 % 3);
            step(match (index + usize::from(header.flags)) % 8 {
                0 => Event::Evict { page, to: None },
                1 => Event::Discard { page },
                2 => Event::Adopt { page },
                3 => fault(page, Access::Read, true),
                4 | 5 => fault(page, Access::Read, false),
                _ => fault(page, Access::Write, false),
            });
        }
        for page in (0..3).map(Page) {
            let node = NodeId(1);
            step(Event::PeerLost { node, page });
        }
    }
}

fn fault(page: Page, access: Access, ahead: bool) -> Event {
    Event::Fault {
        page,
        access,
        ahead,
    }
}
