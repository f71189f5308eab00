//! Which frame goes where.
//!
//! Every switch of a cluster has a port for each machine on its host and one for each other
//! switch (a *peer*): a full mesh. It learns from a frame's source at which port an address
//! is. What is sent to a known address goes to that port; what is sent to all, or to an
//! unknown address, goes to all machines and, if it comes from a machine, to all peers.
//!
//! Invariants:
//!
//! - A frame crosses at most two links between switches, and the second one only as *passed on*:
//!   its destination has moved, or its sender has. What is passed on teaches nothing, and never
//!   goes to a peer. So there is no loop. Nor is there one by a bridge and the detours beside it.
//! - A frame goes to a port at most once, and never to the port that it came from.
//! - Frames from one port to another leave in the order in which they came.
//! - What waits, and what is remembered, has a bound in number and in time: [`FRAMES_MAX`],
//!   [`FRAME_AGE_MS`], [`ADDRESS_AGE_MS`], [`GONE_MS`], and the shares of addresses.
//!
//! **A machine that moves** is heard at another port. From then on its frames go there, and
//! those that waited at its former port follow. What it has sent and waits for a peer is passed
//! on. An address at a machine of this switch moves to a peer only by an
//! *announcement*: other frames from there may be older than the machine's arrival here.
//!
//! **A link that broke** may have lost announcements. When it is up again, each side forgets
//! what it knew to be behind the other, and is told by it what is there and for how long. Of
//! two claims the younger one counts. A frame that arrives for an address that is at another
//! switch is passed on, and its sender is told that the address is not here.
//!
//! **A bridge** (a tap device) is one port, that of a peer: all switches on it. What is passed on
//! cannot go there, since a bridge learns where a frame's source is from each frame. It takes
//! *detours* instead: links to each switch on the bridge, which carry nothing else.
//!
//! Time is in milliseconds from any start; it never goes back.

mod ethernet;
mod port;
mod table;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use crate::frames::{Address, Message, Way};
use ethernet::Header;
use port::{Notice, Port, Waiting};
use table::{Place, Table};

pub use port::{BYTES_MAX, Counters, FRAMES_MAX, Kind, NOTICES_MAX, PortId};

/// Connected machines of a switch.
pub const MACHINES_MAX: usize = 64;
/// Machines that are gone and whose frames are kept.
pub const GONE_MAX: usize = 64;
/// Other switches.
pub const PEERS_MAX: usize = 64;
/// Addresses of a machine: its own, and those of machines and containers inside it.
pub const MACHINE_ADDRESSES_MAX: usize = 64;
/// Addresses of a peer: those of all of its machines.
pub const PEER_ADDRESSES_MAX: usize = MACHINES_MAX * MACHINE_ADDRESSES_MAX;
/// How long a frame may wait: by then its sender has sent it again, or given up.
pub const FRAME_AGE_MS: u64 = 120_000;
/// How long an address is remembered that is not heard.
pub const ADDRESS_AGE_MS: u64 = 300_000;
/// How long the place of a machine is kept that has left and was not heard elsewhere.
pub const GONE_MS: u64 = 10_000;
/// So long after a machine has announced itself at a place, only another announcement moves it.
pub const NEW_MS: u64 = 2_000;

/// There are as many ports of that kind as may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the switch has {0} {1} already, and no more are allowed")]
pub struct Full(usize, &'static str);

/// What the switch did, over all ports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Frames that went to all: their destination is all, or unknown.
    pub flooded: u64,
    /// Addresses that were heard at another port than before.
    pub moved: u64,
    /// Frames that followed an address to its new port.
    pub followed: u64,
    /// Frames back to the machine that they came from.
    pub returned: u64,
    /// Frames of machines elsewhere that went to peers.
    pub passed_on: u64,
}

/// Its ports, and what it knows of what is behind them.
#[derive(Debug, Default)]
pub struct Switch {
    ports: BTreeMap<PortId, Port>,
    table: Table,
    totals: Totals,
    bridge: Option<PortId>,
    next: u32,
}

/// What goes out next at a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outgoing {
    /// Only to peers.
    Here { address: Address, age_ms: u32 },
    /// Only to peers.
    Gone(Address),
    /// To machines and peers. The way is for peers.
    Frame(Arc<[u8]>, Way),
}

impl Outgoing {
    /// Appends what goes on the wire.
    pub fn write(&self, out: &mut Vec<u8>) {
        let message = match self {
            Outgoing::Here { address, age_ms } => Message::Here {
                address: *address,
                age_ms: *age_ms,
            },
            Outgoing::Gone(address) => Message::Gone(*address),
            Outgoing::Frame(frame, way) => {
                Message::Way(*way).write(out);
                Message::Frame(frame)
            }
        };
        message.write(out);
    }
}

/// Ports come and go.
impl Switch {
    /// A machine has connected.
    ///
    /// # Errors
    /// There are [`MACHINES_MAX`].
    pub fn add_machine(&mut self) -> Result<PortId, Full> {
        let kind = Kind::Machine { gone: None };
        self.add(kind, MACHINES_MAX, "machines", Kind::is_connected_machine)
    }

    /// There is another switch. Its port is down.
    ///
    /// # Errors
    /// There are [`PEERS_MAX`].
    pub fn add_peer(&mut self) -> Result<PortId, Full> {
        self.add_switch(Kind::Peer { up: false })
    }

    /// A bridge is attached. Its port is up.
    ///
    /// # Errors
    /// There are [`PEERS_MAX`].
    pub fn add_bridge(&mut self) -> Result<PortId, Full> {
        let id = self.add_switch(Kind::Peer { up: true })?;
        self.bridge = Some(id);
        Ok(id)
    }

    /// There is another switch on the bridge. Its port is down.
    ///
    /// # Errors
    /// There are [`PEERS_MAX`].
    pub fn add_detour(&mut self) -> Result<PortId, Full> {
        self.add_switch(Kind::Detour { up: false })
    }

    fn add_switch(&mut self, kind: Kind) -> Result<PortId, Full> {
        self.add(kind, PEERS_MAX, "peers", Kind::is_switch)
    }

    fn add(
        &mut self,
        kind: Kind,
        max: usize,
        what: &'static str,
        counts: impl Fn(Kind) -> bool,
    ) -> Result<PortId, Full> {
        if self.ports.values().filter(|port| counts(port.kind)).count() >= max {
            return Err(Full(max, what));
        }
        let id = PortId(self.next);
        self.next += 1;
        self.ports.insert(id, Port::new(kind));
        Ok(id)
    }

    /// A machine's connection has ended: it has moved, or will be back, or has ended.
    pub fn machine_gone(&mut self, id: PortId, now: u64) {
        let Some(port) = self.ports.get_mut(&id) else {
            return;
        };
        if !port.kind.is_connected_machine() {
            return;
        }
        if self.table.count(id) == 0 {
            return self.remove_machine(id);
        }
        port.kind = Kind::Machine { gone: Some(now) };
        // Others have a copy of these.
        port.drop_stale(|waiting| !waiting.known);
        let gone = |port: &Port| matches!(port.kind, Kind::Machine { gone: Some(_) });
        let all: Vec<PortId> = self.ids(gone);
        if all.len() > GONE_MAX {
            self.remove_machine(all[0]);
        }
    }

    /// A peer is no more.
    pub fn remove_peer(&mut self, id: PortId) {
        self.bridge = self.bridge.filter(|bridge| *bridge != id);
        self.table.remove_port(id);
        self.ports.remove(&id);
    }

    /// There is a new link to a peer: each side tells the other what is behind it.
    pub fn peer_up(&mut self, id: PortId) {
        if let Some(Kind::Detour { up }) = self.kind_mut(id) {
            *up = true;
        }
        if !self.is_peer(id) {
            return;
        }
        self.table.remove_port(id);
        let here = self.ids(|port| port.kind.is_connected_machine());
        let here: Vec<Address> = here.iter().flat_map(|id| self.table.at(*id)).collect();
        if let Some(port) = self.ports.get_mut(&id) {
            port.kind = Kind::Peer { up: true };
            port.notices.clear();
            here.into_iter()
                .for_each(|address| port.tell(Notice::Here(address)));
        }
    }

    /// The link to a peer is broken. Frames wait for the next one, but not those of a detour.
    pub fn peer_down(&mut self, id: PortId) {
        if let Some(Kind::Peer { up } | Kind::Detour { up }) = self.kind_mut(id) {
            *up = false;
        }
        if let Some(port) = self.ports.get_mut(&id) {
            port.notices.clear();
            if matches!(port.kind, Kind::Detour { .. }) {
                port.drop_stale(|_| true);
            }
        }
    }

    fn kind_mut(&mut self, id: PortId) -> Option<&mut Kind> {
        self.ports.get_mut(&id).map(|port| &mut port.kind)
    }

    /// Whether an address is at a machine that is connected here.
    fn is_here(&self, address: Address) -> bool {
        let place = self.table.get(address);
        let port = place.and_then(|place| self.ports.get(&place.port));
        port.is_some_and(|port| port.kind.is_connected_machine())
    }

    /// A machine that is gone is forgotten, here and by the peers.
    fn remove_machine(&mut self, id: PortId) {
        self.table.remove_port(id);
        let Some(Port { heard, .. }) = self.ports.remove(&id) else {
            return;
        };
        for port in self.ports.values_mut() {
            if port.kind == (Kind::Peer { up: true }) {
                heard
                    .iter()
                    .for_each(|address| port.tell(Notice::Gone(*address)));
            }
        }
    }

    fn ids(&self, wanted: impl Fn(&Port) -> bool) -> Vec<PortId> {
        let ports = self.ports.iter().filter(|(_, port)| wanted(port));
        ports.map(|(id, _)| *id).collect()
    }
}

/// What comes in.
impl Switch {
    /// A frame has come from a port; from a machine it is directed.
    pub fn receive(&mut self, from: PortId, frame: &[u8], way: Way, now: u64) {
        let Some(port) = self.ports.get_mut(&from) else {
            return;
        };
        port.counters.frames_in += 1;
        port.counters.bytes_in += frame.len() as u64;
        let from_switch = port.kind.is_switch();
        let way = match port.kind {
            Kind::Detour { .. } => Way::PassedOn,
            _ => way,
        };
        let Some(header) = Header::parse(frame) else {
            port.counters.broken += 1;
            return;
        };
        if way != Way::PassedOn && !self.learn(from, &header, now) {
            if let Some(port) = self.ports.get_mut(&from) {
                port.counters.refused += 1;
            }
            return;
        }
        let waiting = |known, way| Waiting {
            frame: frame.into(),
            destination: header.destination,
            source: header.source,
            since: now,
            known,
            from,
            from_switch,
            way,
        };
        let place = match header.destination {
            group if group.is_group() => None,
            one => self.table.get(one),
        };
        match place.map(|place| place.port) {
            // Not to all: the sender may be among them, at a place that is not known yet.
            None if way == Way::PassedOn && !header.destination.is_group() => {
                if let Some(port) = self.ports.get_mut(&from) {
                    port.counters.misdirected += 1;
                }
            }
            None => self.flood(from, &waiting(false, way)),
            Some(to) if to == from && !from_switch => self.totals.returned += 1,
            Some(to) if from_switch && self.is_peer(to) => {
                if let Some(port) = self.ports.get_mut(&from) {
                    port.counters.misdirected += 1;
                    if port.kind.is_peer() {
                        port.tell(Notice::Gone(header.destination));
                    }
                }
                // Not for a second time, not back, and not another copy.
                if let Some(port) = self.ports.get_mut(&to)
                    && way == Way::Directed
                    && to != from
                {
                    port.push(waiting(true, Way::PassedOn));
                }
            }
            Some(to) => {
                if let Some(port) = self.ports.get_mut(&to) {
                    port.push(waiting(true, way));
                }
            }
        }
    }

    /// A peer says that an address is behind it, for so long.
    pub fn receive_here(&mut self, from: PortId, address: Address, age_ms: u32, now: u64) {
        if address.is_group() || !self.is_peer(from) {
            return;
        }
        let since = now.saturating_sub(age_ms.into());
        let place = Place {
            port: from,
            since,
            heard: now,
            announced: None,
        };
        match self.table.get(address) {
            Some(old) if old.port == from => self.table.hear(address, now, false),
            Some(old) if old.since >= since => {}
            old => drop(self.put(address, old, place)),
        }
    }

    /// A peer says that an address is not behind it.
    pub fn receive_gone(&mut self, from: PortId, address: Address) {
        if self
            .table
            .get(address)
            .is_some_and(|place| place.port == from)
        {
            self.table.remove(address);
        }
    }

    fn is_peer(&self, id: PortId) -> bool {
        self.ports.get(&id).is_some_and(|port| port.kind.is_peer())
    }

    /// Writes down where a frame's source is; false where it may not have an address there.
    fn learn(&mut self, from: PortId, header: &Header, now: u64) -> bool {
        let old = self.table.get(header.source);
        let place = Place {
            port: from,
            since: now,
            heard: now,
            announced: header.announces.then_some(now),
        };
        match old {
            Some(old) if old.port == from => {
                self.table.hear(header.source, now, header.announces);
                true
            }
            // It was on its way when the machine left: by another way than the announcement.
            Some(old) if !header.announces && self.is_new(old, now) => true,
            Some(_) if self.is_peer(from) && !header.announces && self.is_here(header.source) => {
                true
            }
            old => self.put(header.source, old, place),
        }
    }

    /// Whether a machine has announced itself at its place of late, and is still there.
    fn is_new(&self, place: Place, now: u64) -> bool {
        let announced = place.announced.map(|at| now.saturating_sub(at));
        let port = self.ports.get(&place.port);
        let is_gone = port.is_none_or(|port| matches!(port.kind, Kind::Machine { gone: Some(_) }));
        !is_gone && announced.is_some_and(|age| age < NEW_MS)
    }

    /// Writes down a new place; what waits at the old one follows.
    fn put(&mut self, address: Address, old: Option<Place>, new: Place) -> bool {
        let share = match self.is_peer(new.port) {
            true => PEER_ADDRESSES_MAX,
            false => MACHINE_ADDRESSES_MAX,
        };
        if !self.table.put(address, new, share) {
            return false;
        }
        if let Some(port) = self.ports.get_mut(&new.port) {
            port.hear(address);
        }
        if let Some(old) = old {
            self.totals.moved += 1;
            self.follow(address, old.port, new.port);
        }
        true
    }

    fn follow(&mut self, address: Address, old: PortId, new: PortId) {
        let to_peer = self.is_peer(new);
        let Some(port) = self.ports.get_mut(&old) else {
            return;
        };
        let of_address = |waiting: &Waiting| waiting.known && waiting.destination == address;
        let all = port.extract(of_address);
        let (left, mut follow): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|waiting| match to_peer {
                true => waiting.way != Way::Directed,
                false => waiting.from == new,
            });
        if to_peer {
            let others = follow.iter_mut().filter(|waiting| waiting.from_switch);
            others.for_each(|waiting| waiting.way = Way::PassedOn);
        }
        port.counters.stale += left.len() as u64;
        let is_gone = matches!(port.kind, Kind::Machine { gone: Some(_) });
        if is_gone && self.table.count(old) == 0 {
            self.remove_machine(old);
        }
        if let Some(port) = self.ports.get_mut(&new) {
            self.totals.followed += follow.len() as u64;
            follow.into_iter().for_each(|waiting| port.push(waiting));
        }
    }

    fn flood(&mut self, from: PortId, waiting: &Waiting) {
        self.totals.flooded += 1;
        // An old frame of a machine that has come here meanwhile: not back to it.
        let own = self.table.get(waiting.source).map(|place| place.port);
        for (id, port) in &mut self.ports {
            let goes = match port.kind {
                Kind::Machine { gone } => gone.is_none(),
                Kind::Peer { .. } => !waiting.from_switch,
                Kind::Detour { .. } => false,
            };
            if goes && *id != from && Some(*id) != own {
                port.push(waiting.clone());
            }
        }
    }
}

/// What goes out.
impl Switch {
    /// Whether there is something for a port that can go.
    pub fn has_output(&self, id: PortId) -> bool {
        self.ports.get(&id).is_some_and(|port| match port.kind {
            Kind::Machine { gone: None } => !port.waiting().is_empty(),
            Kind::Peer { up: true } => !port.waiting().is_empty() || !port.notices.is_empty(),
            Kind::Detour { up: true } => !port.waiting().is_empty(),
            _ => false,
        })
    }

    /// The frames that wait for a machine, the oldest first.
    pub fn waiting(&self, id: PortId) -> impl Iterator<Item = &[u8]> {
        let port = self.ports.get(&id);
        let frames = port.into_iter().flat_map(|port| port.waiting());
        frames.map(|waiting| &*waiting.frame)
    }

    /// Takes off what goes out next at a port, if it can go.
    pub fn next(&mut self, id: PortId, now: u64) -> Option<Outgoing> {
        loop {
            if !self.has_output(id) {
                return None;
            }
            let port = self.ports.get_mut(&id)?;
            if let Some(notice) = port.notices.pop_front() {
                match self.notice(notice, now) {
                    None => continue,
                    some => return some,
                }
            }
            let waiting = port.pop()?;
            let kind = port.kind;
            // The machine that sent it may have left: the peer would take it to be here.
            let left = kind.is_switch() && !self.is_here(waiting.source);
            let way = match waiting.way == Way::PassedOn || left {
                _ if !kind.is_switch() => Way::Directed,
                true if self.bridge == Some(id) => {
                    self.detour(&waiting);
                    continue;
                }
                true => Way::PassedOn,
                false if waiting.known || waiting.destination.is_group() => Way::Directed,
                false => Way::ToAll,
            };
            if let Some(port) = self.ports.get_mut(&id) {
                port.counters.frames_out += 1;
                port.counters.bytes_out += waiting.frame.len() as u64;
            }
            self.totals.passed_on += u64::from(way == Way::PassedOn);
            return Some(Outgoing::Frame(waiting.frame, way));
        }
    }

    /// To all switches on the bridge: the one where its destination is knows. A later one must not
    /// get it: the destination may go there meanwhile, and have it already.
    fn detour(&mut self, waiting: &Waiting) {
        for port in self.ports.values_mut() {
            if port.kind == (Kind::Detour { up: true }) {
                port.push(Waiting {
                    known: false,
                    way: Way::PassedOn,
                    ..waiting.clone()
                });
            }
        }
    }

    /// What a peer is told, if it is still true.
    fn notice(&self, notice: Notice, now: u64) -> Option<Outgoing> {
        match notice {
            Notice::Here(address) => {
                let place = self.table.get(address).filter(|_| self.is_here(address))?;
                let age_ms = now
                    .saturating_sub(place.since)
                    .try_into()
                    .unwrap_or(u32::MAX);
                Some(Outgoing::Here { address, age_ms })
            }
            Notice::Gone(address) => (!self.is_here(address)).then_some(Outgoing::Gone(address)),
        }
    }

    /// Forgets what is too old. Called each second.
    pub fn tick(&mut self, now: u64) {
        for port in self.ports.values_mut() {
            port.drop_before(now.saturating_sub(FRAME_AGE_MS));
        }
        self.table.forget_before(now.saturating_sub(ADDRESS_AGE_MS));
        let old = self.ids(|port| match port.kind {
            Kind::Machine { gone: Some(since) } => now.saturating_sub(since) >= GONE_MS,
            _ => false,
        });
        old.into_iter().for_each(|id| self.remove_machine(id));
    }
}

/// What can be looked at.
impl Switch {
    /// The counters of a port.
    pub fn counters(&self, id: PortId) -> Option<Counters> {
        Some(self.ports.get(&id)?.counters)
    }

    /// The counters of the whole.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// The port at which an address is.
    pub fn port_of(&self, address: Address) -> Option<PortId> {
        self.table.get(address).map(|place| place.port)
    }

    /// The addresses at a port, in order.
    pub fn addresses(&self, id: PortId) -> Vec<Address> {
        self.table.at(id)
    }

    /// How many addresses are known.
    pub fn known(&self) -> usize {
        self.table.len()
    }

    /// How many frames wait, gone machines' included.
    pub fn frames_waiting(&self) -> usize {
        self.ports.values().map(|port| port.waiting().len()).sum()
    }

    /// Gone machines included, the oldest first.
    pub fn ports(&self) -> impl Iterator<Item = (PortId, Kind)> {
        self.ports.iter().map(|(id, port)| (*id, port.kind))
    }
}

#[cfg(test)]
mod simulation_tests;
#[cfg(test)]
mod tests;
