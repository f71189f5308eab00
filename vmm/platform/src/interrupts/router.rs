//! The interrupt router: finds the vCPUs that an interrupt is for and posts it to them.
//!
//! With several slices a vCPU may move, and messages follow it. docs/aggregate-vm.md
//! ("Where a vCPU is") has the rules and why each message arrives once. In short: a message
//! that is forwarded carries the epoch of the table entry by which it was routed. A thread
//! that posts a message reads the entry again afterwards. A vCPU that leaves first changes
//! the entry, then takes its pending events along.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::io_apic::{IoApic, IoApicState, PINS};
use super::locations::{EPOCH_MAX, LocationError, Locations, VcpuLocation};
use super::message::{Delivery, Destination, Interrupt, Message};
use super::posted::PostedInterrupts;
use super::{InterruptLine, MessageSink};
use crate::bus::BusDevice;
use crate::part::{Part, PartError, Persist};
use crate::role::RolePlace;

/// How many interrupts went through a router, by kind.
#[derive(Default)]
pub struct InterruptCounters {
    /// Commands of local APICs.
    pub commands: AtomicU64,
    /// Message-signalled interrupts.
    pub messages: AtomicU64,
    /// Sent by the I/O APIC because a pin changed.
    pub pins: AtomicU64,
    /// EOIs of level-triggered interrupts.
    pub ends: AtomicU64,
    /// Sent to vCPUs of other slices.
    pub away: AtomicU64,
    /// Forwarded to vCPUs that had left.
    pub forwarded: AtomicU64,
    /// Received before the vCPU that they are for had arrived.
    pub ahead: AtomicU64,
    /// Of kinds that this machine does not have, or without a vCPU that accepts them.
    pub dropped: AtomicU64,
}

/// Sends interrupts and EOIs to the interrupt routers of other slices. Never blocks, and
/// keeps the order of messages to one slice.
pub trait InterruptLink: Send + Sync {
    /// Sends a message to `location`'s slice, with `location`'s epoch.
    fn deliver(&self, location: VcpuLocation, vcpu: u32, message: Message);
    /// Sends an EOI to `slice`, which has the I/O APIC.
    fn end_of_interrupt(&self, slice: usize, vector: u8);
    /// Sends the level of a pin to `slice`, which has the I/O APIC.
    fn set_pin(&self, slice: usize, pin: u8, high: bool);
}

/// Where a machine's interrupt controllers are, for a machine of several slices.
pub struct InterruptTopology {
    /// The number of this slice.
    pub slice: usize,
    /// This slice's table of vCPU locations.
    pub locations: Arc<Locations>,
    /// The slice that has the I/O APIC.
    pub io_apic: Arc<RolePlace>,
    /// Sends to the other slices.
    pub link: Arc<dyn InterruptLink>,
}

/// What the interrupt controllers of a machine share: the I/O APIC, and the posted-interrupt
/// descriptors of all vCPUs.
pub struct InterruptRouter {
    /// By vCPU. For a vCPU of another slice only its identity is used.
    all_posted: Box<[Arc<PostedInterrupts>]>,
    /// `None` if the machine has one slice.
    topology: Option<InterruptTopology>,
    /// By vCPU: the route of the last INIT that this slice sent or forwarded. Locked while
    /// an INIT, a start-up, or pending events of a vCPU that left are sent, so that a start-up
    /// does not overtake its INIT, and while an entry of the location table changes.
    init_routes: Mutex<Vec<VcpuLocation>>,
    /// Locked while a register or a pin changes; the resulting interrupts are sent after.
    io_apic: Mutex<IoApic>,
    /// The vCPU that is considered first for the next lowest-priority interrupt.
    turn: AtomicU32,
    pub counters: InterruptCounters,
}

impl InterruptRouter {
    /// A router of a machine with one slice and vCPUs 0 to `cpus` - 1.
    pub fn new(cpus: u32) -> Arc<Self> {
        Self::of_slice(cpus, None)
    }

    /// A router of one slice of a machine with vCPUs 0 to `cpus` - 1.
    pub fn of_slice(cpus: u32, topology: Option<InterruptTopology>) -> Arc<Self> {
        let init_routes = topology.as_ref().map(|topology| topology.locations.all());
        Arc::new(Self {
            topology,
            init_routes: Mutex::new(init_routes.unwrap_or_default()),
            all_posted: (0..cpus).map(|_| Arc::default()).collect(),
            io_apic: Mutex::default(),
            turn: AtomicU32::new(0),
            counters: InterruptCounters::default(),
        })
    }

    /// vCPUs of the machine.
    pub fn cpus(&self) -> u32 {
        self.all_posted.len() as u32
    }

    /// A vCPU's posted-interrupt descriptor; `None` if no such vCPU exists.
    pub fn posted(&self, vcpu: u32) -> Option<&Arc<PostedInterrupts>> {
        self.all_posted.get(vcpu as usize)
    }

    /// Sends an interrupt to the vCPUs of its destination; whether one of them accepted it.
    /// `sender` is the vCPU whose thread calls, if one does: it needs no kick to see its own
    /// interrupts.
    pub fn send(&self, interrupt: &Interrupt, sender: Option<u32>) -> bool {
        let message = match interrupt.delivery {
            Delivery::Fixed | Delivery::LowestPriority => Message::Fixed {
                vector: interrupt.vector,
                level: interrupt.level,
            },
            Delivery::Nmi => Message::NonMaskable,
            Delivery::Init => Message::Init,
            Delivery::StartUp => Message::StartUp {
                vector: interrupt.vector,
            },
            Delivery::Smi | Delivery::External => {
                self.counters.dropped.fetch_add(1, Ordering::Relaxed);
                return false;
            }
        };
        // By far the most frequent destination; needs no loop over all vCPUs.
        if let Destination::Physical(id) = interrupt.destination {
            return self.deliver(id, message, sender);
        }
        if interrupt.delivery == Delivery::LowestPriority {
            // `u32::MAX` is no vCPU: the interrupt is counted as dropped.
            let vcpu = self.least_busy(interrupt.destination, sender);
            return self.deliver(vcpu.unwrap_or(u32::MAX), message, sender);
        }
        let mut taken = false;
        for vcpu in 0..self.cpus() {
            if self.names(interrupt.destination, vcpu, sender) {
                taken |= self.deliver(vcpu, message, sender);
            }
        }
        taken
    }

    /// Sends a message to one vCPU, on any slice; whether the vCPU accepted it.
    pub fn deliver(&self, vcpu: u32, message: Message, sender: Option<u32>) -> bool {
        let taken = match self.location(vcpu) {
            Some((topology, location)) => {
                self.deliver_to(topology, location, vcpu, message, sender)
            }
            None => self.post(vcpu, message, sender),
        };
        if !taken {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
        taken
    }

    /// The vCPUs of this slice, in order.
    pub fn vcpus_here(&self) -> Vec<u32> {
        match &self.topology {
            Some(topology) => topology.locations.at(topology.slice),
            None => (0..self.cpus()).collect(),
        }
    }

    /// A vCPU's location; `None` if the machine has one slice, or no such vCPU.
    fn location(&self, vcpu: u32) -> Option<(&InterruptTopology, VcpuLocation)> {
        let topology = self.topology.as_ref()?;
        Some((topology, topology.locations.of(vcpu)?))
    }

    /// Posts a message to a vCPU of this slice, and wakes it; whether it accepted it.
    fn post(&self, vcpu: u32, message: Message, sender: Option<u32>) -> bool {
        let Some(posted) = self.posted(vcpu).filter(|posted| posted.post(message)) else {
            return false;
        };
        // A vCPU finds interrupts that it sent to itself before its next instruction. For
        // INIT and start-up it must leave guest code.
        let own = sender == Some(vcpu);
        let found = matches!(message, Message::Fixed { .. } | Message::NonMaskable);
        if !(own && found) {
            posted.waker.ring();
        }
        true
    }

    fn deliver_to(
        &self,
        topology: &InterruptTopology,
        location: VcpuLocation,
        vcpu: u32,
        message: Message,
        sender: Option<u32>,
    ) -> bool {
        let mut init_routes = is_start(message).then(|| self.init_routes());
        let location = route(init_routes.as_deref_mut(), vcpu, message, location, 0);
        if location.slice == topology.slice {
            let taken = self.post(vcpu, message, sender);
            drop(init_routes);
            self.follow(topology, vcpu, location.epoch);
            return taken;
        }
        let fixed = matches!(message, Message::Fixed { .. });
        let taken = !fixed
            || self
                .posted(vcpu)
                .is_some_and(|posted| posted.accepts_fixed());
        if taken {
            self.counters.away.fetch_add(1, Ordering::Relaxed);
            topology.link.deliver(location, vcpu, message);
        }
        taken
    }

    /// Takes a message for a vCPU that another slice routed here by its entry of `epoch`.
    ///
    /// # Errors
    /// No such vCPU exists, or the tables of the two slices contradict each other.
    pub fn receive(&self, vcpu: u32, message: Message, epoch: u64) -> Result<(), LocationError> {
        let Some(topology) = &self.topology else {
            let cpus = self.cpus();
            return Err(LocationError::Vcpu { vcpu, cpus });
        };
        let entry = topology.locations.known(vcpu)?;
        if epoch > EPOCH_MAX {
            return Err(LocationError::Epochs { vcpu });
        }
        if epoch == entry.epoch && entry.slice != topology.slice {
            return Err(LocationError::Differs {
                vcpu,
                epoch,
                theirs: topology.slice,
                ours: entry.slice,
            });
        }
        // The vCPU is on its way here: slice 0's message about it has not arrived yet.
        let ahead = VcpuLocation {
            slice: topology.slice,
            epoch,
        };
        let location = if epoch > entry.epoch { ahead } else { entry };
        let mut init_routes = is_start(message).then(|| self.init_routes());
        let location = route(init_routes.as_deref_mut(), vcpu, message, location, epoch);
        if location.slice != topology.slice {
            self.counters.forwarded.fetch_add(1, Ordering::Relaxed);
            topology.link.deliver(location, vcpu, message);
            return Ok(());
        }
        if epoch > entry.epoch {
            self.counters.ahead.fetch_add(1, Ordering::Relaxed);
            if let Some(posted) = self.posted(vcpu) {
                posted.post_ahead(message);
                // The vCPU may have arrived since the entry was read.
                posted.waker.ring();
            }
        } else if !self.post(vcpu, message, None) {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
        drop(init_routes);
        self.follow(topology, vcpu, location.epoch);
        Ok(())
    }

    /// Forwards the pending events of a vCPU that was here as of `epoch` and has left since.
    /// Called after a message was posted here, so that the message is not left behind.
    fn follow(&self, topology: &InterruptTopology, vcpu: u32, epoch: u64) {
        let left =
            |location: &VcpuLocation| location.slice != topology.slice && location.epoch > epoch;
        if topology.locations.of(vcpu).filter(left).is_none() {
            return;
        }
        let mut init_routes = self.init_routes();
        let location = topology.locations.of(vcpu).filter(left);
        let (Some(location), Some(posted)) = (location, self.posted(vcpu)) else {
            return;
        };
        for message in posted.take().messages() {
            let init_route = route(Some(&mut init_routes), vcpu, message, location, epoch);
            let here = init_route.slice == topology.slice;
            self.counters.forwarded.fetch_add(1, Ordering::Relaxed);
            let location = if here { location } else { init_route };
            topology.link.deliver(location, vcpu, message);
        }
    }

    /// Records that a stopped vCPU of this slice moves to `location`, and takes its pending
    /// events, which travel with its state. The primary commands it.
    ///
    /// # Errors
    /// The vCPU is not on this slice, or `location` is impossible; nothing changed.
    pub fn hand_over(
        &self,
        vcpu: u32,
        location: VcpuLocation,
    ) -> Result<Vec<Message>, LocationError> {
        let _order = self.init_routes();
        let (topology, known) = self.known(vcpu)?;
        let follows = topology.locations.follows(vcpu, location)?;
        if !follows || known.slice != topology.slice || location.slice == topology.slice {
            return Err(without_state(topology, vcpu, known, location));
        }
        topology.locations.set(vcpu, location);
        let posted = self.posted(vcpu);
        Ok(posted.map_or_else(Vec::new, |posted| posted.take().messages()))
    }

    /// Records that a vCPU has moved to this slice as of `epoch`, with its state and its
    /// pending events `messages`. The primary commands it; before the vCPU runs.
    ///
    /// # Errors
    /// The vCPU is on this slice already, or `epoch` is impossible; nothing changed.
    pub fn take_over(
        &self,
        vcpu: u32,
        epoch: u64,
        messages: &[Message],
    ) -> Result<(), LocationError> {
        let _order = self.init_routes();
        let (topology, known) = self.known(vcpu)?;
        let slice = topology.slice;
        let location = VcpuLocation { slice, epoch };
        if !topology.locations.follows(vcpu, location)? || known.slice == slice {
            return Err(without_state(topology, vcpu, known, location));
        }
        if let Some(posted) = self.posted(vcpu) {
            posted.set_epoch(epoch);
            posted.put_back(messages);
            topology.locations.set(vcpu, location);
            posted.waker.ring();
        }
        Ok(())
    }

    /// Records the primary's message that a vCPU moved between two other slices; whether it
    /// was not known yet.
    ///
    /// # Errors
    /// The location is impossible; nothing changed.
    pub fn moved(&self, vcpu: u32, location: VcpuLocation) -> Result<bool, LocationError> {
        let _order = self.init_routes();
        let (topology, known) = self.known(vcpu)?;
        if !topology.locations.follows(vcpu, location)? {
            return Ok(false);
        }
        if known.slice == topology.slice || location.slice == topology.slice {
            return Err(without_state(topology, vcpu, known, location));
        }
        topology.locations.set(vcpu, location);
        Ok(true)
    }

    /// On a slice that joins: records where all vCPUs are, as another slice says. Before any
    /// of them is sent an interrupt from here.
    ///
    /// # Errors
    /// The table is impossible; nothing changed.
    pub fn learn_locations(&self, table: &[u8]) -> Result<(), LocationError> {
        let mut init_routes = self.init_routes();
        let Some(topology) = &self.topology else {
            return Ok(());
        };
        let locations = &topology.locations;
        let ours = locations.cpus() as usize;
        let read = locations.read(table).ok_or(LocationError::Length {
            theirs: table.len() / ours.max(1),
            ours,
        })?;
        for (vcpu, location) in (0..).zip(read) {
            let known = locations.known(vcpu)?;
            if location.epoch > EPOCH_MAX || location.slice == topology.slice {
                return Err(LocationError::Epochs { vcpu });
            }
            if location.epoch > known.epoch {
                locations.set(vcpu, location);
                if let Some(route) = init_routes.get_mut(vcpu as usize) {
                    *route = location;
                }
            }
        }
        Ok(())
    }

    /// Records the identity that a vCPU published on another slice as of `epoch`.
    ///
    /// # Errors
    /// No such vCPU exists, or the epoch is too large.
    pub fn identify(&self, vcpu: u32, identity: u16, epoch: u64) -> Result<(), LocationError> {
        let cpus = self.cpus();
        let posted = self
            .posted(vcpu)
            .ok_or(LocationError::Vcpu { vcpu, cpus })?;
        if epoch > EPOCH_MAX {
            return Err(LocationError::Epochs { vcpu });
        }
        posted.set_identity(identity, epoch);
        Ok(())
    }

    fn known(&self, vcpu: u32) -> Result<(&InterruptTopology, VcpuLocation), LocationError> {
        let cpus = self.cpus();
        self.location(vcpu)
            .ok_or(LocationError::Vcpu { vcpu, cpus })
    }

    fn init_routes(&self) -> MutexGuard<'_, Vec<VcpuLocation>> {
        self.init_routes
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    /// Sends the interrupt that a write to the ICR of `sender`'s local APIC asks for.
    pub fn command(&self, interrupt: &Interrupt, sender: u32) {
        self.counters.commands.fetch_add(1, Ordering::Relaxed);
        self.send(interrupt, Some(sender));
    }

    /// Reports that a vCPU ended a level-triggered interrupt.
    pub fn end_of_interrupt(&self, vector: u8, sender: u32) {
        self.counters.ends.fetch_add(1, Ordering::Relaxed);
        self.end_at_io_apic(vector, Some(sender));
    }

    /// Applies an EOI to the I/O APIC, or sends it on to the slice that has it. `sender` as
    /// for [`InterruptRouter::send`].
    pub fn end_at_io_apic(&self, vector: u8, sender: Option<u32>) {
        if let Some((slice, link)) = self.io_apic_elsewhere() {
            return link.end_of_interrupt(slice, vector);
        }
        let mut follow = Vec::new();
        self.io_apic().end_of_interrupt(vector, &mut follow);
        for (pin, interrupt) in &follow {
            self.send_of_pin(*pin, interrupt, sender);
        }
    }

    /// A pin of the I/O APIC; `None` if it has no such pin.
    pub fn pin(self: &Arc<Self>, pin: usize) -> Option<IoApicPin> {
        (pin < PINS).then(|| IoApicPin {
            router: self.clone(),
            pin: pin as u8,
        })
    }

    /// The other slice that has the I/O APIC, and the way there.
    fn io_apic_elsewhere(&self) -> Option<(usize, &Arc<dyn InterruptLink>)> {
        let topology = self.topology.as_ref()?;
        let holder = topology.io_apic.holder();
        (holder != topology.slice).then_some((holder, &topology.link))
    }

    /// Drives a pin of the I/O APIC, or has the slice that has it do so. Nothing happens if
    /// it has no such pin.
    pub fn set_pin(&self, pin: u8, high: bool) {
        if let Some((slice, link)) = self.io_apic_elsewhere() {
            return link.set_pin(slice, pin, high);
        }
        let pin = usize::from(pin);
        let interrupt = self.io_apic().set_pin(pin, high);
        if let Some(interrupt) = interrupt {
            self.counters.pins.fetch_add(1, Ordering::Relaxed);
            self.send_of_pin(pin, &interrupt, None);
        }
    }

    fn send_of_pin(&self, pin: usize, interrupt: &Interrupt, sender: Option<u32>) {
        if !self.send(interrupt, sender) && interrupt.level {
            self.io_apic().not_taken(pin, interrupt);
        }
    }

    fn io_apic(&self) -> MutexGuard<'_, IoApic> {
        self.io_apic
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    fn names(&self, destination: Destination, vcpu: u32, sender: Option<u32>) -> bool {
        match destination {
            Destination::Everybody => true,
            Destination::Physical(id) => id == vcpu,
            Destination::Logical(mask) => self
                .posted(vcpu)
                .is_some_and(|posted| posted.matches_logical(mask)),
            Destination::Oneself => sender == Some(vcpu),
            Destination::Others => sender != Some(vcpu),
        }
    }

    /// The vCPU of a destination that has the lowest priority; of several, each in turn.
    fn least_busy(&self, destination: Destination, sender: Option<u32>) -> Option<u32> {
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        let cpus = self.cpus();
        (0..cpus)
            .map(|step| (first.wrapping_add(step)) % cpus)
            .filter(|vcpu| self.names(destination, *vcpu, sender))
            .filter(|vcpu| {
                self.posted(*vcpu)
                    .is_some_and(|posted| posted.accepts_fixed())
            })
            .min_by_key(|vcpu| {
                self.posted(*vcpu)
                    .map_or(u32::MAX, |posted| posted.priority() >> 4)
            })
    }
}

/// Whether a message is part of an INIT and start-up sequence, whose order matters.
fn is_start(message: Message) -> bool {
    matches!(message, Message::Init | Message::StartUp { .. })
}

/// Where a message goes that was routed by `epoch` and whose vCPU is at `location`: a start-up
/// takes the route of the INIT before it. `init_routes` ([`InterruptRouter`]) is needed for
/// these two only.
fn route(
    init_routes: Option<&mut Vec<VcpuLocation>>,
    vcpu: u32,
    message: Message,
    location: VcpuLocation,
    epoch: u64,
) -> VcpuLocation {
    let Some(init_route) = init_routes.and_then(|init_routes| init_routes.get_mut(vcpu as usize))
    else {
        return location;
    };
    match message {
        Message::Init => *init_route = location,
        // A message is never sent back: its epoch grows each time it is forwarded.
        Message::StartUp { .. }
            if epoch <= init_route.epoch && init_route.epoch < location.epoch =>
        {
            return *init_route;
        }
        _ => {}
    }
    location
}

fn without_state(
    topology: &InterruptTopology,
    vcpu: u32,
    known: VcpuLocation,
    location: VcpuLocation,
) -> LocationError {
    LocationError::WithoutState {
        vcpu,
        from: known.slice,
        to: location.slice,
        here: topology.slice,
    }
}

impl MessageSink for InterruptRouter {
    fn send(&self, address: u64, data: u32) {
        self.counters.messages.fetch_add(1, Ordering::Relaxed);
        match Interrupt::from_msi(address, data) {
            Some(interrupt) => drop(InterruptRouter::send(self, &interrupt, None)),
            None => drop(self.counters.dropped.fetch_add(1, Ordering::Relaxed)),
        }
    }
}

/// The I/O APIC's registers: the first four bytes of every sixteen; the others read as zero.
impl BusDevice for InterruptRouter {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let value = self.io_apic().read(offset & !3).to_le_bytes();
        for (index, byte) in data.iter_mut().enumerate() {
            let at = (offset & 3) as usize + index;
            *byte = value.get(at).copied().unwrap_or(0);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        // A write of one or two bytes writes zeros to the rest of the register.
        let mut value = [0; 4];
        let length = data.len().min(4);
        value[..length].copy_from_slice(&data[..length]);
        let mut follow = Vec::new();
        self.io_apic()
            .write(offset, u32::from_le_bytes(value), &mut follow);
        for (pin, interrupt) in &follow {
            self.send_of_pin(*pin, interrupt, None);
        }
    }
}

impl Part for InterruptRouter {
    fn counters(&self) -> Vec<(&'static str, u64)> {
        let counters = &self.counters;
        [
            ("commands", &counters.commands),
            ("messages", &counters.messages),
            ("pins", &counters.pins),
            ("level-ends", &counters.ends),
            ("to-other-slices", &counters.away),
            ("sent-after", &counters.forwarded),
            ("came-ahead", &counters.ahead),
            ("dropped", &counters.dropped),
        ]
        .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
        .to_vec()
    }
}

/// Its state is the I/O APIC's: vCPUs save their local APICs with what is pending.
impl Persist for InterruptRouter {
    type State = IoApicState;

    fn save(&self) -> Result<IoApicState, PartError> {
        Ok(self.io_apic().save())
    }

    fn restore(&self, state: &IoApicState) -> Result<(), PartError> {
        self.io_apic().restore(state.clone());
        Ok(())
    }
}

/// A pin of the I/O APIC, which a device drives.
pub struct IoApicPin {
    router: Arc<InterruptRouter>,
    pin: u8,
}

impl InterruptLine for IoApicPin {
    fn set(&self, high: bool) {
        self.router.set_pin(self.pin, high);
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod moves;
