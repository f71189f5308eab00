//! Which pair of queues a frame for the guest goes to.
//!
//! One rule, as that of Linux's tun device: to the pair on which the guest last
//! transmitted to the same peer (addresses, protocol, ports), because the program that
//! reads it is there. A new connection goes where the guest last transmitted from the
//! same
//! port, which is where its server runs. Everything else is dealt out by a hash of
//! the addresses; what is not IP goes to the first pair.
//!
//! Both tables are of hashes: what shares an entry shares a pair, which costs speed
//! at most.

use weft_virtio::net::HEADER;

/// Entries of the tables: connections, and ports of the guest.
const FLOWS: usize = 4096;
const PORTS: usize = 256;

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
/// 802.1Q, 802.1ad.
const VLAN: [u16; 2] = [0x8100, 0x88a8];
const TCP: u8 = 6;
const UDP: u8 = 17;

/// What was seen of frames that the guest transmitted.
pub struct Steering {
    /// The pair, counted from 1; 0: none yet.
    flows: Box<[u8; FLOWS]>,
    ports: [u8; PORTS],
}

/// One end of a flow: hash of its address, and its port; 0 where there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct End {
    address: u64,
    port: u16,
}

impl End {
    fn hash(self) -> u64 {
        mix(self.address ^ u64::from(self.port) << 40)
    }
}

/// Sender and receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Flow {
    from: End,
    to: End,
    protocol: u8,
}

impl Flow {
    /// The same in both directions.
    fn hash(&self) -> u64 {
        let ends = self.from.hash().wrapping_add(self.to.hash());
        mix(ends ^ u64::from(self.protocol))
    }
}

impl Steering {
    /// Nothing was seen.
    pub fn new() -> Self {
        Self {
            flows: Box::new([0; FLOWS]),
            ports: [0; PORTS],
        }
    }

    /// The guest transmitted this frame, behind a header, on pair `pair`.
    pub fn transmitted(&mut self, frame: &[u8], pair: u16) {
        let Some(flow) = frame.get(HEADER..).and_then(flow) else {
            return;
        };
        let mark = pair as u8 + 1;
        self.flows[flow.hash() as usize % FLOWS] = mark;
        if flow.from.port != 0 {
            self.ports[port_entry(flow.protocol, flow.from.port)] = mark;
        }
    }

    /// The pair, of the first `pairs`, that a frame for the guest, behind a header,
    /// goes to.
    pub fn pair(&self, frame: &[u8], pairs: u16) -> u16 {
        let Some(flow) = frame.get(HEADER..).and_then(flow) else {
            return 0;
        };
        let hash = flow.hash();
        let known = |mark: u8| {
            (1..=pairs)
                .contains(&mark.into())
                .then(|| u16::from(mark) - 1)
        };
        known(self.flows[hash as usize % FLOWS])
            .or_else(|| known(self.ports[port_entry(flow.protocol, flow.to.port)]))
            .unwrap_or(((hash >> 32) % u64::from(pairs.max(1))) as u16)
    }
}

fn port_entry(protocol: u8, port: u16) -> usize {
    mix(u64::from(port) << 8 | u64::from(protocol)) as usize % PORTS
}

/// Spreads what little differs over all bits (the finaliser of splitmix64).
fn mix(mut value: u64) -> u64 {
    value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// The flow of an Ethernet frame; none where it is not IP, or cut off.
fn flow(frame: &[u8]) -> Option<Flow> {
    let mut at = 12;
    let mut kind = word(frame, at)?;
    while VLAN.contains(&kind) {
        at += 4;
        kind = word(frame, at)?;
    }
    let packet = frame.get(at + 2..)?;
    let (from, to, protocol, rest) = match kind {
        IPV4 => {
            let whole = word(packet, 6)? & 0x3fff == 0;
            let length = usize::from(packet.first()? & 15) * 4;
            // Only the first part of a packet has ports, so none counts.
            let rest = if whole { packet.get(length..)? } else { &[] };
            (
                packet.get(12..16)?,
                packet.get(16..20)?,
                packet.get(9)?,
                rest,
            )
        }
        IPV6 => {
            let rest = packet.get(40..)?;
            (
                packet.get(8..24)?,
                packet.get(24..40)?,
                packet.get(6)?,
                rest,
            )
        }
        _ => return None,
    };
    let port = |at| match *protocol {
        TCP | UDP => word(rest, at).unwrap_or(0),
        _ => 0,
    };
    let end = |address: &[u8], port| {
        let words = address.chunks(8).map(|chunk| {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(bytes)
        });
        let address = words.fold(0, |hash, word| mix(hash ^ word));
        End { address, port }
    };
    Some(Flow {
        from: end(from, port(0)),
        to: end(to, port(2)),
        protocol: *protocol,
    })
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: [u8; 4] = [10, 0, 2, 15];
    const PEER: [u8; 4] = [10, 0, 2, 2];

    /// A header and a frame of TCP over IPv4, `tags` of VLANs before it.
    fn tcp(from: ([u8; 4], u16), to: ([u8; 4], u16), tags: usize) -> Vec<u8> {
        let mut frame = vec![0; HEADER + 12];
        for _ in 0..tags {
            frame.extend([0x81, 0, 0, 7]);
        }
        frame.extend([8, 0]);
        let mut packet = [0; 20];
        packet[0] = 0x45;
        packet[9] = TCP;
        packet[12..16].copy_from_slice(&from.0);
        packet[16..].copy_from_slice(&to.0);
        frame.extend(packet);
        frame.extend(from.1.to_be_bytes());
        frame.extend(to.1.to_be_bytes());
        frame
    }

    #[test]
    fn a_flow_comes_in_where_it_last_went_out() {
        let mut steering = Steering::new();
        for tags in [0, 1, 2] {
            for pair in [3, 0, 1] {
                for port in 2000..2008 {
                    steering.transmitted(&tcp((GUEST, port), (PEER, 80), tags), pair);
                    let answer = tcp((PEER, 80), (GUEST, port), tags);
                    assert_eq!(steering.pair(&answer, 4), pair);
                }
            }
        }
    }

    #[test]
    fn a_new_connection_goes_where_its_server_is() {
        let mut steering = Steering::new();
        for pair in [1, 0, 3] {
            steering.transmitted(&tcp((GUEST, 80), (PEER, 4000), 0), pair);
            for port in 5000..5020 {
                assert_eq!(steering.pair(&tcp((PEER, port), (GUEST, 80), 0), 4), pair);
            }
        }
    }

    #[test]
    fn what_is_not_known_is_dealt_out() {
        let steering = Steering::new();
        let pairs: Vec<u16> = (1..200)
            .map(|port| steering.pair(&tcp((PEER, port), (GUEST, 80), 0), 4))
            .collect();
        for pair in 0..4 {
            let count = pairs.iter().filter(|chosen| **chosen == pair).count();
            assert!(count > 20, "pair {pair}: {count} of 199");
        }
    }

    /// No frame makes it choose a pair that is not used.
    #[test]
    fn pairs_that_are_off_get_nothing() {
        let mut steering = Steering::new();
        let frame = tcp((GUEST, 80), (PEER, 4000), 0);
        steering.transmitted(&frame, 3);
        assert!(steering.pair(&tcp((PEER, 4000), (GUEST, 80), 0), 2) < 2);
        for length in 0..frame.len() {
            assert!(steering.pair(&frame[..length], 2) < 2);
            steering.transmitted(&frame[..length], 1);
        }
        let mut arp = vec![0; HEADER + 42];
        arp[HEADER + 12..HEADER + 14].copy_from_slice(&[8, 6]);
        assert_eq!(steering.pair(&arp, 2), 0);
    }

    #[test]
    fn parts_of_a_packet_stay_together() {
        let mut steering = Steering::new();
        let part = |mut frame: Vec<u8>| {
            frame[HEADER + 14 + 6] = 0x20;
            frame
        };
        steering.transmitted(&part(tcp((GUEST, 1), (PEER, 2), 0)), 2);
        assert_eq!(steering.pair(&part(tcp((PEER, 7), (GUEST, 8), 0)), 4), 2);
    }
}
