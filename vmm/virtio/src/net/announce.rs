//! The announcement of a card that is at another place of its network: a request of reverse ARP
//! (RFC 903) from its own address. Nobody has to reply; each switch that passes it on notes the
//! port from which it came.

use super::{HEADER, Mac};

/// Shortest Ethernet frame, without its checksum.
const FRAME: usize = 60;
const TYPE_RARP: u16 = 0x8035;
const HARDWARE_ETHERNET: u16 = 1;
const PROTOCOL_IPV4: u16 = 0x0800;
const REQUEST_REVERSE: u16 = 3;

/// The frame, behind its header.
pub(super) fn frame(Mac(address): Mac) -> Vec<u8> {
    let mut frame = vec![0; HEADER];
    frame.extend([0xff; 6]);
    frame.extend(address);
    frame.extend(TYPE_RARP.to_be_bytes());
    frame.extend(HARDWARE_ETHERNET.to_be_bytes());
    frame.extend(PROTOCOL_IPV4.to_be_bytes());
    // Lengths of both kinds of addresses.
    frame.extend([6, 4]);
    frame.extend(REQUEST_REVERSE.to_be_bytes());
    for _ in ["sender", "target"] {
        frame.extend(address);
        frame.extend([0; 4]);
    }
    frame.resize(HEADER + FRAME, 0);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_asks_for_its_own_address() {
        let address = [2, 1, 2, 3, 4, 5];
        let frame = frame(Mac(address));
        assert_eq!(frame.len(), HEADER + FRAME);
        let (header, frame) = frame.split_at(HEADER);
        assert_eq!(header, [0; HEADER]);
        assert_eq!(&frame[..6], [0xff; 6]);
        assert_eq!(&frame[6..12], address);
        assert_eq!(&frame[12..22], [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
        assert_eq!(&frame[22..28], address);
        assert_eq!(&frame[32..38], address);
        assert_eq!(&frame[38..], [0; 22]);
    }
}
