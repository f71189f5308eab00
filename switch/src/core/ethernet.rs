//! What a switch reads of a frame.

use crate::frames::{Address, FRAME_MAX, FRAME_MIN};

const TYPE_VLAN: [u8; 2] = [0x81, 0x00];
const TYPE_ARP: [u8; 2] = [0x08, 0x06];
const TYPE_RARP: [u8; 2] = [0x80, 0x35];
/// Bytes of a VLAN tag, which stands before the type.
const TAG: usize = 4;
/// Places in a request of ARP or RARP for IPv4 (RFC 826): sender's and target's addresses.
const SENDER: usize = 8;
const SENDER_IP: usize = 14;
const TARGET_IP: usize = 24;
const ARP_BYTES: usize = 28;

/// The header of a frame that can be passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Where it goes.
    pub destination: Address,
    /// Where it comes from: never a group.
    pub source: Address,
    /// It says that the source is here now: RARP, or ARP for an address of its own.
    pub announces: bool,
}

impl Header {
    /// The header of a frame; `None` where it is broken.
    pub fn parse(frame: &[u8]) -> Option<Header> {
        if !(FRAME_MIN..=FRAME_MAX).contains(&frame.len()) {
            return None;
        }
        let (destination, rest) = frame.split_first_chunk::<6>()?;
        let (source, rest) = rest.split_first_chunk::<6>()?;
        let (destination, source) = (Address(*destination), Address(*source));
        if source.is_group() || source.0 == [0; 6] {
            return None;
        }
        Some(Header {
            destination,
            source,
            announces: announces(rest, source),
        })
    }
}

/// Whether what follows the addresses announces the source.
fn announces(mut rest: &[u8], source: Address) -> bool {
    if rest.starts_with(&TYPE_VLAN) {
        rest = rest.get(TAG..).unwrap_or_default();
    }
    let Some((kind, packet)) = rest.split_first_chunk::<2>() else {
        return false;
    };
    let Some(packet) = packet.get(..ARP_BYTES) else {
        return false;
    };
    let own = packet[SENDER..SENDER_IP] == source.0;
    match *kind {
        TYPE_RARP => own,
        TYPE_ARP => own && packet[SENDER_IP..SENDER_IP + 4] == packet[TARGET_IP..],
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SOURCE: [u8; 6] = [2, 0, 0, 0, 0, 7];

    fn arp(kind: [u8; 2], sender: [u8; 6], sender_ip: u8, target_ip: u8) -> Vec<u8> {
        let mut frame = [[0xff; 6], SOURCE].concat();
        frame.extend(kind);
        frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend(sender);
        frame.extend([10, 7, 0, sender_ip]);
        frame.extend([0; 6]);
        frame.extend([10, 7, 0, target_ip]);
        frame
    }

    #[test]
    fn a_card_announces_itself_and_no_other() {
        let announces = |frame: &[u8]| Header::parse(frame).unwrap().announces;
        assert!(announces(&arp(TYPE_RARP, SOURCE, 0, 0)));
        assert!(announces(&arp(TYPE_ARP, SOURCE, 3, 3)));
        assert!(!announces(&arp(TYPE_ARP, SOURCE, 3, 4)));
        assert!(!announces(&arp(TYPE_RARP, [2, 0, 0, 0, 0, 8], 0, 0)));
        assert!(!announces(&arp([8, 0], SOURCE, 3, 3)));
        assert!(!announces(&arp(TYPE_RARP, SOURCE, 0, 0)[..41]));
        let mut tagged = arp(TYPE_RARP, SOURCE, 0, 0);
        tagged.splice(12..12, [0x81, 0, 0, 5]);
        assert!(announces(&tagged));
    }

    #[test]
    fn a_broken_header_is_refused() {
        let frame = |source: [u8; 6]| [&[0xff; 6][..], &source, &[8, 0]].concat();
        assert!(Header::parse(&frame(SOURCE)).is_some());
        assert!(Header::parse(&frame(SOURCE)[..13]).is_none());
        assert!(Header::parse(&frame([0; 6])).is_none());
        assert!(Header::parse(&frame([3, 0, 0, 0, 0, 1])).is_none());
        let mut long = frame(SOURCE);
        long.resize(FRAME_MAX + 1, 0);
        assert!(Header::parse(&long).is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_have_a_header_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Some(header) = Header::parse(&bytes) {
                prop_assert!(!header.source.is_group());
                prop_assert_eq!(&bytes[..6], &header.destination.0[..]);
            }
        }
    }
}
