//! The interrupt router: finds the vCPUs that an interrupt is for and posts it to them.
//!
//! With several slices a vCPU may move, and messages follow it. docs/aggregate-vm.md
//! ("Where a vCPU is") has the rules and why each message arrives once. In short: a message
//! that is forwarded carries the version of the table entry by which it was routed. A thread
//! that posts a message reads the entry again afterwards. A vCPU that leaves first changes
//! the entry, then takes its pending events along.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::Value;

use super::io_apic::{IoApic, PINS};
use super::locations::{LocationError, Locations, Place, VERSION_MAX};
use super::message::{Delivery, Destination, Interrupt, Message};
use super::posted::PostedInterrupts;
use super::{InterruptLine, MessageSink};
use crate::bus::BusDevice;
use crate::part::{Part, PartError};

/// What went through a router.
#[derive(Default)]
pub struct InterruptCounters {
    /// From local APICs.
    pub commands: AtomicU64,
    pub messages: AtomicU64,
    /// From lines.
    pub lines: AtomicU64,
    /// EOIs of level-triggered interrupts.
    pub ends: AtomicU64,
    /// To vCPUs of other slices.
    pub away: AtomicU64,
    /// Sent after vCPUs that had left.
    pub forwarded: AtomicU64,
    /// For vCPUs that were still on their way here.
    pub ahead: AtomicU64,
    /// Of kinds that this machine has no use for, or to nobody.
    pub dropped: AtomicU64,
}

/// The way to what lies on other slices. Never waits, and keeps the order of what it
/// is given for one slice.
pub trait InterruptLink: Send + Sync {
    /// Hands a message to the slice that has the vCPU as of the place's version, which
    /// is the message's stamp.
    fn deliver(&self, place: Place, vcpu: u32, message: Message);
    /// Tells the slice that has the I/O APIC of an EOI.
    fn end_of_interrupt(&self, vector: u8);
}

/// What of a machine's interrupt controllers is not here.
pub struct InterruptTopology {
    /// The number of the slice here.
    pub slice: usize,
    /// Where each vCPU is.
    pub locations: Arc<Locations>,
    /// Whether the I/O APIC is here.
    pub io_apic: bool,
    /// The way to the others.
    pub elsewhere: Arc<dyn InterruptLink>,
}

/// All of a machine's interrupt controllers, as far as they are shared.
pub struct InterruptRouter {
    /// Every vCPU's; of those elsewhere only the identity counts.
    all_posted: Box<[Arc<PostedInterrupts>]>,
    /// None: all is here.
    apart: Option<InterruptTopology>,
    /// By vCPU: the way that the last INIT from here went, or that came by. Held while
    /// an INIT or a start-up is sent, and what is sent after a vCPU, so that a start-up
    /// does not overtake its INIT; and while an entry changes.
    trails: Mutex<Vec<Place>>,
    /// Held while a register or a line changes; what follows is sent after.
    io_apic: Mutex<IoApic>,
    /// Which vCPU is looked at first for a lowest-priority interrupt.
    turn: AtomicU32,
    pub counters: InterruptCounters,
}

impl InterruptRouter {
    /// For vCPUs 0 to `cpus` - 1.
    pub fn new(cpus: u32) -> Arc<Self> {
        Self::of_slice(cpus, None)
    }

    /// For vCPUs 0 to `cpus` - 1, not all of which are here.
    pub fn of_slice(cpus: u32, apart: Option<InterruptTopology>) -> Arc<Self> {
        let trails = apart.as_ref().map(|apart| apart.locations.all());
        Arc::new(Self {
            apart,
            trails: Mutex::new(trails.unwrap_or_default()),
            all_posted: (0..cpus).map(|_| Arc::default()).collect(),
            io_apic: Mutex::default(),
            turn: AtomicU32::new(0),
            counters: InterruptCounters::default(),
        })
    }

    /// How many vCPUs there are.
    pub fn cpus(&self) -> u32 {
        self.all_posted.len() as u32
    }

    /// Where messages for a vCPU wait.
    pub fn posted(&self, vcpu: u32) -> Option<&Arc<PostedInterrupts>> {
        self.all_posted.get(vcpu as usize)
    }

    /// Sends an interrupt to whom it names. `sender`: the vCPU whose thread this
    /// is, if it is one's: it needs no kick to see its own interrupts.
    /// Whether somebody took it.
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
        // The commonest by far, without a walk over all vCPUs.
        if let Destination::Physical(id) = interrupt.destination {
            return self.deliver(id, message, sender);
        }
        if interrupt.delivery == Delivery::LowestPriority {
            // Nobody: one that there is not.
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

    /// Gives one vCPU a message, wherever it is. Whether it took it.
    pub fn deliver(&self, vcpu: u32, message: Message, sender: Option<u32>) -> bool {
        let taken = match self.place(vcpu) {
            Some((apart, place)) => self.deliver_apart(apart, place, vcpu, message, sender),
            None => self.post(vcpu, message, sender),
        };
        if !taken {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
        taken
    }

    /// The vCPUs that are here.
    pub fn vcpus_here(&self) -> Vec<u32> {
        match &self.apart {
            Some(apart) => apart.locations.at(apart.slice),
            None => (0..self.cpus()).collect(),
        }
    }

    /// Where a vCPU is, if there is more than one place.
    fn place(&self, vcpu: u32) -> Option<(&InterruptTopology, Place)> {
        let apart = self.apart.as_ref()?;
        Some((apart, apart.locations.of(vcpu)?))
    }

    /// Into the mailbox of a vCPU that is here.
    fn post(&self, vcpu: u32, message: Message, sender: Option<u32>) -> bool {
        let Some(posted) = self.posted(vcpu).filter(|posted| posted.post(message)) else {
            return false;
        };
        // Its own interrupts a vCPU finds before the next instruction, but it must
        // come out of guest code for the others.
        let own = sender == Some(vcpu);
        let found = matches!(message, Message::Fixed { .. } | Message::NonMaskable);
        if !(own && found) {
            posted.waker.ring();
        }
        true
    }

    fn deliver_apart(
        &self,
        apart: &InterruptTopology,
        place: Place,
        vcpu: u32,
        message: Message,
        sender: Option<u32>,
    ) -> bool {
        let mut trails = is_start(message).then(|| self.trails());
        let place = along(trails.as_deref_mut(), vcpu, message, place, 0);
        if place.slice == apart.slice {
            let taken = self.post(vcpu, message, sender);
            drop(trails);
            self.follow(apart, vcpu, place.version);
            return taken;
        }
        let fixed = matches!(message, Message::Fixed { .. });
        let taken = !fixed
            || self
                .posted(vcpu)
                .is_some_and(|posted| posted.accepts_fixed());
        if taken {
            self.counters.away.fetch_add(1, Ordering::Relaxed);
            apart.elsewhere.deliver(place, vcpu, message);
        }
        taken
    }

    /// A message for a vCPU that another slice sent here, as of version `stamp`.
    ///
    /// # Errors
    /// There is no such vCPU, or nobody has it: the tables of the two slices differ.
    pub fn receive(&self, vcpu: u32, message: Message, stamp: u64) -> Result<(), LocationError> {
        let Some(apart) = &self.apart else {
            let cpus = self.cpus();
            return Err(LocationError::Vcpu { vcpu, cpus });
        };
        let entry = apart.locations.known(vcpu)?;
        if stamp > VERSION_MAX {
            return Err(LocationError::Versions { vcpu });
        }
        if stamp == entry.version && entry.slice != apart.slice {
            return Err(LocationError::Differs {
                vcpu,
                version: stamp,
                theirs: apart.slice,
                ours: entry.slice,
            });
        }
        // Here, as of the stamp: slice 0's word is still on its way.
        let ahead = Place {
            slice: apart.slice,
            version: stamp,
        };
        let place = if stamp > entry.version { ahead } else { entry };
        let mut trails = is_start(message).then(|| self.trails());
        let place = along(trails.as_deref_mut(), vcpu, message, place, stamp);
        if place.slice != apart.slice {
            self.counters.forwarded.fetch_add(1, Ordering::Relaxed);
            apart.elsewhere.deliver(place, vcpu, message);
            return Ok(());
        }
        if stamp > entry.version {
            self.counters.ahead.fetch_add(1, Ordering::Relaxed);
            if let Some(posted) = self.posted(vcpu) {
                posted.post_ahead(message);
                // It may have come meanwhile.
                posted.waker.ring();
            }
        } else if !self.post(vcpu, message, None) {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
        drop(trails);
        self.follow(apart, vcpu, place.version);
        Ok(())
    }

    /// After a message was put into a mailbox here, where the vCPU is as of `version`:
    /// if it left meanwhile, what lies there is sent after it.
    fn follow(&self, apart: &InterruptTopology, vcpu: u32, version: u64) {
        let left = |place: &Place| place.slice != apart.slice && place.version > version;
        if apart.locations.of(vcpu).filter(left).is_none() {
            return;
        }
        let mut trails = self.trails();
        let place = apart.locations.of(vcpu).filter(left);
        let (Some(place), Some(posted)) = (place, self.posted(vcpu)) else {
            return;
        };
        for message in posted.take().messages() {
            let trail = along(Some(&mut trails), vcpu, message, place, version);
            let here = trail.slice == apart.slice;
            self.counters.forwarded.fetch_add(1, Ordering::Relaxed);
            let place = if here { place } else { trail };
            apart.elsewhere.deliver(place, vcpu, message);
        }
    }

    /// A vCPU that stood here is at `place` from now on. What lay in its mailbox comes
    /// out, and goes there with its state. On the primary's order.
    ///
    /// # Errors
    /// It is not here, or cannot be there; nothing changed.
    pub fn hand_over(&self, vcpu: u32, place: Place) -> Result<Vec<Message>, LocationError> {
        let _order = self.trails();
        let (apart, known) = self.known(vcpu)?;
        let follows = apart.locations.follows(vcpu, place)?;
        if !follows || known.slice != apart.slice || place.slice == apart.slice {
            return Err(without_state(apart, vcpu, known, place));
        }
        apart.locations.set(vcpu, place);
        let posted = self.posted(vcpu);
        Ok(posted.map_or_else(Vec::new, |posted| posted.take().messages()))
    }

    /// A vCPU came here with its state, and with what had lain in its mailbox: it is
    /// here as of `version`. On the primary's order; before it runs.
    ///
    /// # Errors
    /// It is here already, or cannot be; nothing changed.
    pub fn take_over(
        &self,
        vcpu: u32,
        version: u64,
        messages: &[Message],
    ) -> Result<(), LocationError> {
        let _order = self.trails();
        let (apart, known) = self.known(vcpu)?;
        let slice = apart.slice;
        let place = Place { slice, version };
        if !apart.locations.follows(vcpu, place)? || known.slice == slice {
            return Err(without_state(apart, vcpu, known, place));
        }
        if let Some(posted) = self.posted(vcpu) {
            posted.set_version(version);
            posted.put_back(messages);
            apart.locations.set(vcpu, place);
            posted.waker.ring();
        }
        Ok(())
    }

    /// The primary says that a vCPU moved between two other slices. Whether
    /// that was news.
    ///
    /// # Errors
    /// It cannot be true; nothing changed.
    pub fn moved(&self, vcpu: u32, place: Place) -> Result<bool, LocationError> {
        let _order = self.trails();
        let (apart, known) = self.known(vcpu)?;
        if !apart.locations.follows(vcpu, place)? {
            return Ok(false);
        }
        if known.slice == apart.slice || place.slice == apart.slice {
            return Err(without_state(apart, vcpu, known, place));
        }
        apart.locations.set(vcpu, place);
        Ok(true)
    }

    /// The identity that a vCPU of another slice published there as of `version`.
    ///
    /// # Errors
    /// There is no such vCPU, or no such version.
    pub fn identify(&self, vcpu: u32, identity: u16, version: u64) -> Result<(), LocationError> {
        let cpus = self.cpus();
        let posted = self
            .posted(vcpu)
            .ok_or(LocationError::Vcpu { vcpu, cpus })?;
        if version > VERSION_MAX {
            return Err(LocationError::Versions { vcpu });
        }
        posted.set_identity(identity, version);
        Ok(())
    }

    fn known(&self, vcpu: u32) -> Result<(&InterruptTopology, Place), LocationError> {
        let cpus = self.cpus();
        self.place(vcpu).ok_or(LocationError::Vcpu { vcpu, cpus })
    }

    fn trails(&self) -> MutexGuard<'_, Vec<Place>> {
        self.trails
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    /// A local APIC's command.
    pub fn command(&self, interrupt: &Interrupt, sender: u32) {
        self.counters.commands.fetch_add(1, Ordering::Relaxed);
        self.send(interrupt, Some(sender));
    }

    /// A vCPU ended a level-triggered interrupt.
    pub fn end_of_interrupt(&self, vector: u8, sender: u32) {
        self.counters.ends.fetch_add(1, Ordering::Relaxed);
        match &self.apart {
            Some(apart) if !apart.io_apic => apart.elsewhere.end_of_interrupt(vector),
            _ => self.end_at_io_apic(vector, Some(sender)),
        }
    }

    /// An EOI at the I/O APIC, which is here. `sender`: as for [`InterruptRouter::send`].
    pub fn end_at_io_apic(&self, vector: u8, sender: Option<u32>) {
        let mut follow = Vec::new();
        self.io_apic().end_of_interrupt(vector, &mut follow);
        for (pin, interrupt) in &follow {
            self.send_of_pin(*pin, interrupt, sender);
        }
    }

    /// A wire into the I/O APIC; `None` when there is no such pin.
    pub fn line(self: &Arc<Self>, pin: usize) -> Option<Line> {
        (pin < PINS).then(|| Line {
            router: self.clone(),
            pin,
        })
    }

    fn set_line(&self, pin: usize, high: bool) {
        let interrupt = self.io_apic().set_line(pin, high);
        if let Some(interrupt) = interrupt {
            self.counters.lines.fetch_add(1, Ordering::Relaxed);
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

    /// Of those named, one with the lowest priority, each in turn.
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

/// Whether the order of messages matters.
fn is_start(message: Message) -> bool {
    matches!(message, Message::Init | Message::StartUp { .. })
}

/// The way of a message that came with `stamp` and would go to `place`: a start-up goes
/// where the INIT before it went. `trails`: see [`InterruptRouter`]; needed for the two alone.
fn along(
    trails: Option<&mut Vec<Place>>,
    vcpu: u32,
    message: Message,
    place: Place,
    stamp: u64,
) -> Place {
    let Some(trail) = trails.and_then(|trails| trails.get_mut(vcpu as usize)) else {
        return place;
    };
    match message {
        Message::Init => *trail = place,
        // Only on: a stamp grows with each step.
        Message::StartUp { .. } if stamp <= trail.version && trail.version < place.version => {
            return *trail;
        }
        _ => {}
    }
    place
}

fn without_state(
    apart: &InterruptTopology,
    vcpu: u32,
    known: Place,
    place: Place,
) -> LocationError {
    LocationError::WithoutState {
        vcpu,
        from: known.slice,
        to: place.slice,
        here: apart.slice,
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

/// The I/O APIC's registers. Only the first four bytes of every sixteen answer.
impl BusDevice for InterruptRouter {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let value = self.io_apic().read(offset & !3).to_le_bytes();
        for (index, byte) in data.iter_mut().enumerate() {
            let at = (offset & 3) as usize + index;
            *byte = value.get(at).copied().unwrap_or(0);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        // A byte or a word is the register with zeros above.
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
    fn save(&self) -> Result<Value, PartError> {
        Ok(serde_json::to_value(self.io_apic().save())?)
    }

    fn restore(&self, state: Value) -> Result<(), PartError> {
        let state = serde_json::from_value(state)?;
        self.io_apic().restore(state);
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let counters = &self.counters;
        [
            ("commands", &counters.commands),
            ("messages", &counters.messages),
            ("lines", &counters.lines),
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

/// A wire into the I/O APIC.
pub struct Line {
    router: Arc<InterruptRouter>,
    pin: usize,
}

impl InterruptLine for Line {
    fn set(&self, high: bool) {
        self.router.set_line(self.pin, high);
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod moves;
