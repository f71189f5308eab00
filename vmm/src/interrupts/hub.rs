//! The hub: finds whom an interrupt is for and hands it over.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::Value;

use super::io_apic::{IoApic, PINS};
use super::message::{Delivery, Destination, Interrupt, Message};
use super::seat::Seat;
use super::{InterruptLine, MessageSink};
use crate::bus::BusDevice;
use crate::part::{Part, PartError};

/// What went through a hub.
#[derive(Default)]
pub struct HubCounters {
    /// From local APICs.
    pub commands: AtomicU64,
    /// Message-signalled.
    pub messages: AtomicU64,
    /// From lines.
    pub lines: AtomicU64,
    /// EOIs of level-triggered interrupts.
    pub ends: AtomicU64,
    /// To vCPUs of other slices.
    pub away: AtomicU64,
    /// Of kinds that this machine has no use for, or to nobody.
    pub dropped: AtomicU64,
}

/// The way to what lies on other slices. Never waits.
pub trait Elsewhere: Send + Sync {
    /// Hands a message to the slice that has the vCPU.
    fn deliver(&self, vcpu: u32, message: Message);
    /// Tells the slice that has the I/O APIC of an EOI.
    fn end_of_interrupt(&self, vector: u8);
}

/// What of a machine's interrupt controllers is not here.
pub struct Apart {
    /// The vCPUs that are here.
    pub vcpus: Range<u32>,
    /// Whether the I/O APIC is here.
    pub io_apic: bool,
    /// The way to the others.
    pub elsewhere: Arc<dyn Elsewhere>,
}

/// All of a machine's interrupt controllers, as far as they are shared.
pub struct Hub {
    /// Every vCPU's; of those elsewhere only the identity counts.
    seats: Box<[Arc<Seat>]>,
    /// None: all is here.
    apart: Option<Apart>,
    /// Held while a register or a line changes; what follows is sent after.
    io_apic: Mutex<IoApic>,
    /// Which vCPU is looked at first for a lowest-priority interrupt.
    turn: AtomicU32,
    /// See there.
    pub counters: HubCounters,
}

impl Hub {
    /// For vCPUs 0 to `cpus` - 1.
    pub fn new(cpus: u32) -> Arc<Self> {
        Self::of_slice(cpus, None)
    }

    /// For vCPUs 0 to `cpus` - 1, not all of which are here.
    pub fn of_slice(cpus: u32, apart: Option<Apart>) -> Arc<Self> {
        Arc::new(Self {
            apart,
            seats: (0..cpus).map(|_| Arc::default()).collect(),
            io_apic: Mutex::default(),
            turn: AtomicU32::new(0),
            counters: HubCounters::default(),
        })
    }

    /// How many vCPUs there are.
    pub fn cpus(&self) -> u32 {
        self.seats.len() as u32
    }

    /// Where messages for a vCPU wait.
    pub fn seat(&self, vcpu: u32) -> Option<&Arc<Seat>> {
        self.seats.get(vcpu as usize)
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
        // The commonest by far, without a walk over the seats.
        if let Destination::Physical(id) = interrupt.destination
            && id != 0xff
        {
            return self.deliver(id.into(), message, sender);
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
        if let Some(elsewhere) = self.way_to(vcpu) {
            let fixed = matches!(message, Message::Fixed { .. });
            let taken = !fixed || self.seat(vcpu).is_some_and(|seat| seat.accepts_fixed());
            if taken {
                self.counters.away.fetch_add(1, Ordering::Relaxed);
                elsewhere.deliver(vcpu, message);
            } else {
                self.counters.dropped.fetch_add(1, Ordering::Relaxed);
            }
            return taken;
        }
        let seat = self.seat(vcpu).filter(|seat| seat.post(message));
        let Some(seat) = seat else {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        };
        // Its own interrupts a vCPU finds before the next instruction, but it must
        // come out of guest code for the others.
        let own = sender == Some(vcpu);
        let found = matches!(message, Message::Fixed { .. } | Message::NonMaskable);
        if !(own && found) {
            seat.doorbell.ring();
        }
        true
    }

    /// The way to a vCPU that is not here.
    fn way_to(&self, vcpu: u32) -> Option<&dyn Elsewhere> {
        let apart = self.apart.as_ref()?;
        let away = vcpu < self.cpus() && !apart.vcpus.contains(&vcpu);
        away.then_some(&*apart.elsewhere)
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

    /// An EOI at the I/O APIC, which is here. `sender`: as for [`Hub::send`].
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
            hub: self.clone(),
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
            Destination::Physical(0xff) | Destination::Everybody => true,
            Destination::Physical(id) => u32::from(id) == vcpu,
            Destination::Logical(mask) => self
                .seat(vcpu)
                .is_some_and(|seat| seat.matches_logical(mask)),
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
            .filter(|vcpu| self.seat(*vcpu).is_some_and(|seat| seat.accepts_fixed()))
            .min_by_key(|vcpu| {
                self.seat(*vcpu)
                    .map_or(u32::MAX, |seat| seat.priority() >> 4)
            })
    }
}

impl MessageSink for Hub {
    fn send(&self, address: u64, data: u32) {
        self.counters.messages.fetch_add(1, Ordering::Relaxed);
        match Interrupt::from_msi(address, data) {
            Some(interrupt) => drop(Hub::send(self, &interrupt, None)),
            None => drop(self.counters.dropped.fetch_add(1, Ordering::Relaxed)),
        }
    }
}

/// The I/O APIC's registers. Only the first four bytes of every sixteen answer.
impl BusDevice for Hub {
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

impl Part for Hub {
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
            ("dropped", &counters.dropped),
        ]
        .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
        .to_vec()
    }
}

/// A wire into the I/O APIC.
pub struct Line {
    hub: Arc<Hub>,
    pin: usize,
}

impl InterruptLine for Line {
    fn set(&self, high: bool) {
        self.hub.set_line(self.pin, high);
    }
}

#[cfg(test)]
#[path = "hub_tests.rs"]
mod tests;
