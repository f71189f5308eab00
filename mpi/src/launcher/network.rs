//! Addresses in the network of a cluster's machines. Clusters do not meet, so all have the same.

use std::net::Ipv4Addr;

pub const PREFIX: u8 = 16;
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 77, 255, 254);
/// Locally administered, as all of them.
pub const GATEWAY_MAC: [u8; 6] = [2, 0x4d, 0, 0, 255, 254];

/// Of the machine of that number, from 0.
pub fn address(machine: u32) -> Ipv4Addr {
    let [.., high, low] = (machine + 1).to_be_bytes();
    Ipv4Addr::new(10, 77, high, low)
}

/// Of its card.
pub fn mac(machine: u32) -> String {
    let [.., high, low] = (machine + 1).to_be_bytes();
    format!("02:4d:00:00:{high:02x}:{low:02x}")
}

pub fn name(machine: u32) -> String {
    format!("vm-{machine}")
}

/// The machine of that name.
pub fn machine(name: &str) -> Option<u32> {
    name.strip_prefix("vm-")?.parse().ok()
}
