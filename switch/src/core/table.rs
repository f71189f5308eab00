//! At which port each address is.
//!
//! Invariant: the count of a port is the number of entries that name it, and at most the
//! share of its kind.

use std::collections::{BTreeMap, HashMap};

use super::port::PortId;
use crate::frames::Address;

/// Where an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The port behind which it is.
    pub port: PortId,
    /// When it came there, in milliseconds.
    pub since: u64,
    /// When it was heard last.
    pub heard: u64,
    /// When it announced itself there last.
    pub announced: Option<u64>,
}

/// All addresses that are known.
#[derive(Debug, Default)]
pub struct Table {
    places: HashMap<Address, Place>,
    counts: BTreeMap<PortId, usize>,
}

impl Table {
    /// Where an address is, if that is known.
    pub fn get(&self, address: Address) -> Option<Place> {
        self.places.get(&address).copied()
    }

    /// The address was heard at the port where it is known to be.
    pub fn hear(&mut self, address: Address, now: u64, announces: bool) {
        if let Some(place) = self.places.get_mut(&address) {
            place.heard = now;
            if announces {
                place.announced = Some(now);
            }
        }
    }

    /// Writes down where an address is; false where the port has its share already.
    pub fn put(&mut self, address: Address, place: Place, share: usize) -> bool {
        let count = self.count(place.port);
        let before = self.places.get(&address).map(|place| place.port);
        if before == Some(place.port) {
            self.places.insert(address, place);
            return true;
        }
        if count >= share {
            return false;
        }
        self.remove(address);
        self.places.insert(address, place);
        self.counts.insert(place.port, count + 1);
        true
    }

    /// Forgets an address.
    pub fn remove(&mut self, address: Address) {
        let Some(place) = self.places.remove(&address) else {
            return;
        };
        if let Some(count) = self.counts.get_mut(&place.port) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&place.port);
            }
        }
    }

    /// Forgets what is at a port; the addresses, in order.
    pub fn remove_port(&mut self, port: PortId) -> Vec<Address> {
        let addresses = self.at(port);
        addresses.iter().for_each(|address| self.remove(*address));
        addresses
    }

    /// The addresses at a port, in order.
    pub fn at(&self, port: PortId) -> Vec<Address> {
        if self.count(port) == 0 {
            return Vec::new();
        }
        let here = self.places.iter().filter(|(_, place)| place.port == port);
        let mut addresses: Vec<Address> = here.map(|(address, _)| *address).collect();
        addresses.sort_unstable();
        addresses
    }

    /// How many addresses are at a port.
    pub fn count(&self, port: PortId) -> usize {
        self.counts.get(&port).copied().unwrap_or(0)
    }

    /// How many addresses are known.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Forgets what was heard last before `oldest`.
    pub fn forget_before(&mut self, oldest: u64) {
        let old = self.places.iter().filter(|(_, place)| place.heard < oldest);
        let old: Vec<Address> = old.map(|(address, _)| *address).collect();
        old.into_iter().for_each(|address| self.remove(address));
    }
}
