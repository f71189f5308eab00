//! The parts of a machine, each with its type: so has its state.

use std::sync::Arc;

use weft_aggregate::remote_devices::ServedQueues;
use weft_platform::acpi::power::PowerDevice;
use weft_platform::clock::Clock;
use weft_platform::devices::cmos::CmosClock;
use weft_platform::devices::serial::SerialPort;
use weft_platform::interrupts::InterruptRouter;
use weft_platform::part::{Part, PartError, Persist};
use weft_platform::pci::Root;
use weft_virtio::Transport;

use super::state::PartState;
use crate::vcpu::scheduler::TurnScheduler;

/// A part with its name in saved states and counters.
pub(super) type NamedPart = (String, MachinePart);

/// What a machine pauses, saves and counts beside its vCPUs.
pub(super) enum MachinePart {
    Clock(Arc<Clock>),
    IoApic(Arc<InterruptRouter>),
    Serial(Arc<SerialPort>),
    Cmos(Arc<CmosClock>),
    Power(Arc<PowerDevice>),
    Pci(Arc<Root>),
    Virtio(Arc<Transport>),
    Scheduler(Arc<TurnScheduler>),
    /// On a secondary: the queues that it serves. Their state is on the primary.
    ServedQueues(Arc<ServedQueues>),
}

impl MachinePart {
    /// Pauses, resumes and counts.
    pub fn as_part(&self) -> &dyn Part {
        match self {
            Self::Clock(part) => &**part,
            Self::IoApic(part) => &**part,
            Self::Serial(part) => &**part,
            Self::Cmos(part) => &**part,
            Self::Power(part) => &**part,
            Self::Pci(part) => &**part,
            Self::Virtio(part) => &**part,
            Self::Scheduler(part) => &**part,
            Self::ServedQueues(part) => &**part,
        }
    }

    pub fn save(&self) -> Result<PartState, PartError> {
        Ok(match self {
            Self::Clock(part) => PartState::Clock(Persist::save(&**part)?),
            Self::IoApic(part) => PartState::IoApic(Persist::save(&**part)?),
            Self::Serial(part) => PartState::Serial(Persist::save(&**part)?),
            Self::Cmos(part) => PartState::Cmos(Persist::save(&**part)?),
            Self::Power(part) => PartState::Power(Persist::save(&**part)?),
            Self::Pci(part) => PartState::Pci(Persist::save(&**part)?),
            Self::Virtio(part) => PartState::Virtio(Box::new(Persist::save(&**part)?)),
            Self::Scheduler(part) => PartState::Scheduler(Persist::save(&**part)?),
            Self::ServedQueues(_) => {
                return Err(PartError::Busy("queues of another slice's devices".into()));
            }
        })
    }

    /// Whether it is the platform's, which may be on any slice.
    pub fn is_platform(&self) -> bool {
        match self {
            Self::IoApic(_) | Self::Serial(_) | Self::Cmos(_) | Self::Power(_) => true,
            Self::Clock(_)
            | Self::Pci(_)
            | Self::Virtio(_)
            | Self::Scheduler(_)
            | Self::ServedQueues(_) => false,
        }
    }

    /// Whether `state` is of the same kind of part.
    pub fn accepts(&self, state: &PartState) -> bool {
        matches!(
            (self, state),
            (Self::Clock(_), PartState::Clock(_))
                | (Self::IoApic(_), PartState::IoApic(_))
                | (Self::Serial(_), PartState::Serial(_))
                | (Self::Cmos(_), PartState::Cmos(_))
                | (Self::Power(_), PartState::Power(_))
                | (Self::Pci(_), PartState::Pci(_))
                | (Self::Virtio(_), PartState::Virtio(_))
                | (Self::Scheduler(_), PartState::Scheduler(_))
        )
    }

    /// Replaces the part's state by one that it [accepts](Self::accepts).
    pub fn restore(&self, state: &PartState) -> Result<(), PartError> {
        match (self, state) {
            (Self::Clock(part), PartState::Clock(state)) => Persist::restore(&**part, state),
            (Self::IoApic(part), PartState::IoApic(state)) => Persist::restore(&**part, state),
            (Self::Serial(part), PartState::Serial(state)) => Persist::restore(&**part, state),
            (Self::Cmos(part), PartState::Cmos(state)) => Persist::restore(&**part, state),
            (Self::Power(part), PartState::Power(state)) => Persist::restore(&**part, state),
            (Self::Pci(part), PartState::Pci(state)) => Persist::restore(&**part, state),
            (Self::Virtio(part), PartState::Virtio(state)) => Persist::restore(&**part, state),
            (Self::Scheduler(part), PartState::Scheduler(state)) => {
                Persist::restore(&**part, state)
            }
            _ => Err(PartError::Misfit(
                "the state of another kind of part".into(),
            )),
        }
    }
}
