//! What a vCPU takes along to another slice.

use std::fmt;

use weft_aggregate::MoveTimes;
use weft_platform::clock::{Clock, TimeBase, host_tsc};
use weft_platform::interrupts::{LocalApicState, Message, VcpuLocation};
use weft_platform::part::Version;
use weft_vcpu::encoding::{Decoder, Encoder, EncodingError};
use weft_vcpu::{CpuState, PageRun};

use super::following::LUGGAGE_MAX;
use super::state::VcpuState;

/// Most messages in a posted-interrupt descriptor: one for each vector, an NMI, an INIT
/// and a start-up.
const PENDING_MAX: usize = 256 + 3;

/// Furthest that a vCPU's TSC may be ahead of the slice that it comes to, which waits until
/// its own has reached it. Clocks of hosts differ by microseconds.
const AHEAD_SECONDS_MAX: u64 = 1;

/// One vCPU in one message.
#[derive(Clone, Debug, PartialEq)]
pub struct Traveller {
    pub state: VcpuState,
    /// What was posted after the local APIC had last looked.
    pub pending: Vec<Message>,
    /// See [`weft_platform::interrupts::PostedInterrupts::identity`].
    pub identity: u16,
    /// The guest's TSC when the vCPU left: it never sees an earlier one.
    pub guest_tsc: u64,
    /// What its follower takes along; empty if vCPUs do not move by themselves.
    pub luggage: Vec<u8>,
}

impl Traveller {
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Encoder::default();
        to.u64(self.guest_tsc);
        to.u16(self.identity);
        to.u16(self.pending.len() as u16);
        for message in &self.pending {
            let (kind, vector) = match *message {
                Message::Fixed { vector, level } => (u8::from(level), vector),
                Message::NonMaskable => (2, 0),
                Message::Init => (3, 0),
                Message::StartUp { vector } => (4, vector),
            };
            to.u8(kind);
            to.u8(vector);
        }
        // Every field: one that is added must be added here.
        let VcpuState {
            // Of the saved form; both ends of a move are of one version.
            version: Version,
            cpu,
            apic,
            system_time,
            wall_clock,
            waits_for_start_up,
        } = &self.state;
        cpu.encode(&mut to);
        apic.encode(&mut to);
        to.u64(*system_time);
        to.u64(*wall_clock);
        to.bool(*waits_for_start_up);
        to.u16(self.luggage.len() as u16);
        self.luggage.iter().for_each(|byte| to.u8(*byte));
        to.finish()
    }

    /// # Errors
    /// The bytes are not what [`Traveller::encode`] writes.
    pub fn decode(bytes: &[u8]) -> Result<Self, EncodingError> {
        let mut from = Decoder::new(bytes);
        let traveller = Self {
            guest_tsc: from.u64()?,
            identity: from.u16()?,
            pending: (0..from.count("pending", PENDING_MAX)?)
                .map(|_| pending_message(from.u8()?, from.u8()?))
                .collect::<Result<_, _>>()?,
            state: VcpuState {
                version: Version,
                cpu: CpuState::decode(&mut from)?,
                apic: LocalApicState::decode(&mut from)?,
                system_time: from.u64()?,
                wall_clock: from.u64()?,
                waits_for_start_up: from.bool("waits_for_start_up")?,
            },
            luggage: (0..from.count("luggage", LUGGAGE_MAX)?)
                .map(|_| from.u8())
                .collect::<Result<_, _>>()?,
        };
        from.finish().map(|()| traveller)
    }

    /// Refuses a vCPU for which this slice, whose guest TSC is `now`, would have to wait.
    pub fn check_time(&self, now: u64, base: TimeBase) -> Result<(), String> {
        let ahead = self.guest_tsc.wrapping_sub(now) as i64;
        match u64::try_from(ahead) {
            Ok(ahead) if ahead > AHEAD_SECONDS_MAX * base.hz() => Err(format!(
                "its TSC is {} s ahead of this node's, more than the allowed {AHEAD_SECONDS_MAX} s",
                ahead / base.hz()
            )),
            _ => Ok(()),
        }
    }
}

fn pending_message(kind: u8, vector: u8) -> Result<Message, EncodingError> {
    match (kind, vector) {
        (0 | 1, _) => Ok(Message::Fixed {
            vector,
            level: kind == 1,
        }),
        (2, 0) => Ok(Message::NonMaskable),
        (3, 0) => Ok(Message::Init),
        (4, _) => Ok(Message::StartUp { vector }),
        _ => Err(EncodingError::Value("pending")),
    }
}

/// What the thread of a vCPU that is asked to leave reports: that it left, and then its
/// pages, or why it stays.
pub trait DepartureReport: Send {
    /// Whether its pages follow it.
    fn left(&mut self, times: MoveTimes, traveller: Traveller) -> bool;
    /// The pages that it used here, the latest first.
    fn used(&mut self, runs: Vec<PageRun>);
    fn stays(&mut self, reason: &str);
}

/// A vCPU is asked to leave.
pub struct Departure {
    pub location: VcpuLocation,
    /// The guest's TSC at the request.
    pub asked: u64,
    pub report: Box<dyn DepartureReport>,
}

/// A vCPU comes.
pub struct Arrival {
    pub traveller: Traveller,
    /// The guest's TSC when it came.
    pub arrived: u64,
    pub report: Box<dyn FnOnce(MoveTimes) + Send>,
}

impl fmt::Debug for Departure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Departure({:?})", self.location)
    }
}

impl fmt::Debug for Arrival {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Arrival({})", self.arrived)
    }
}

/// The guest's TSC, also while guest time stands: the moments of a move are compared
/// between slices.
pub fn guest_tsc(clock: &Clock) -> u64 {
    host_tsc().wrapping_add(clock.offset())
}

#[cfg(test)]
mod tests;
