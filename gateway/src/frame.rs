//! What the gateway reads of a frame, and the frame with which it announces itself.

use std::net::{Ipv4Addr, SocketAddrV4};

const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const TYPE_ARP: [u8; 2] = [0x08, 0x06];
const PROTOCOL_TCP: u8 = 6;
const REQUEST: u16 = 1;
const REPLY: u16 = 2;
/// Places in a frame: of the type, and of what follows it.
const TYPE: usize = 12;
const PACKET: usize = 14;

/// Which stack a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum For {
    /// That of a connection, if there is one: TCP from there to this port.
    Port {
        /// Its sender.
        from: SocketAddrV4,
        /// Of the gateway.
        port: u16,
    },
    /// Those that are connected to this machine: it says its card's address.
    Machine(Ipv4Addr),
    /// The base stack.
    Base,
}

impl For {
    /// Looks at as much of the frame as it needs; the stack checks the frame.
    pub fn of(frame: &[u8]) -> For {
        Self::arp(frame)
            .or_else(|| Self::tcp(frame))
            .unwrap_or(For::Base)
    }

    fn arp(frame: &[u8]) -> Option<For> {
        let packet = frame.get(PACKET..)?;
        let is_reply = frame[TYPE..PACKET] == TYPE_ARP && packet.get(6..8)? == REPLY.to_be_bytes();
        let sender: &[u8; 4] = packet.get(14..18)?.first_chunk()?;
        is_reply.then(|| For::Machine(Ipv4Addr::from(*sender)))
    }

    fn tcp(frame: &[u8]) -> Option<For> {
        let packet = frame.get(PACKET..)?;
        if frame[TYPE..PACKET] != TYPE_IPV4 || *packet.get(9)? != PROTOCOL_TCP {
            return None;
        }
        let address: &[u8; 4] = packet.get(12..16)?.first_chunk()?;
        let header = usize::from(packet[0] & 0xf) * 4;
        let ports: &[u8; 4] = packet.get(header..)?.first_chunk()?;
        let [a, b, c, d] = *ports;
        let from = SocketAddrV4::new(Ipv4Addr::from(*address), u16::from_be_bytes([a, b]));
        let port = u16::from_be_bytes([c, d]);
        Some(For::Port { from, port })
    }
}

/// Says to all where the address is: a request of ARP for an address of its own (RFC 5227).
pub fn announcement(card: [u8; 6], address: Ipv4Addr) -> Vec<u8> {
    let mut frame = [[0xff; 6], card].concat();
    frame.extend(TYPE_ARP);
    // Ethernet and IPv4, with the lengths of their addresses.
    frame.extend([0, 1]);
    frame.extend(TYPE_IPV4);
    frame.extend([6, 4]);
    frame.extend(REQUEST.to_be_bytes());
    frame.extend(card);
    frame.extend(address.octets());
    frame.extend([0; 6]);
    frame.extend(address.octets());
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    const CARD: [u8; 6] = [2, 0, 0, 0, 0, 9];

    #[test]
    fn a_switch_sees_an_announcement() {
        let frame = announcement(CARD, Ipv4Addr::new(10, 77, 0, 9));
        assert_eq!(frame.len(), 42);
        assert_eq!((&frame[..6], &frame[6..12]), (&[0xff; 6][..], &CARD[..]));
        // Its sender is itself, and asks for its own address.
        assert_eq!(frame[22..28], CARD);
        assert_eq!(frame[28..32], frame[38..42]);
        assert_eq!(For::of(&frame), For::Base);
    }

    #[test]
    fn a_frame_is_for_the_stack_that_it_names() {
        let address = Ipv4Addr::new(10, 77, 0, 9);
        let mut reply = announcement(CARD, address);
        reply[21] = 2;
        assert_eq!(For::of(&reply), For::Machine(address));
        let mut tcp = [&CARD[..], &CARD, &TYPE_IPV4].concat();
        // A header of 24 bytes.
        tcp.extend([
            0x46,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            64,
            PROTOCOL_TCP,
            0,
            0,
            10,
            77,
            0,
            3,
        ]);
        tcp.extend([0; 8]);
        tcp.extend([0, 22, 0xc0, 1]);
        let from = SocketAddrV4::new(Ipv4Addr::new(10, 77, 0, 3), 22);
        assert_eq!(For::of(&tcp), For::Port { from, port: 0xc001 });
        for length in 0..tcp.len() {
            assert_eq!(For::of(&tcp[..length]), For::Base);
        }
        tcp[14 + 9] = 17;
        assert_eq!(For::of(&tcp), For::Base);
    }
}
