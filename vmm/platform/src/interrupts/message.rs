//! Interrupts and messages between interrupt controllers.

use serde::{Deserialize, Serialize};

/// How an interrupt is delivered (Intel SDM volume 3, 11.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Delivery {
    /// The vector, to every target.
    Fixed,
    /// The vector, to the target of the lowest priority.
    LowestPriority,
    /// System management interrupt; ignored.
    Smi,
    /// Non-maskable.
    Nmi,
    /// Resets the CPU, except some registers (table 10-1).
    Init,
    /// Starts a CPU that had an INIT, at page `vector`.
    StartUp,
    /// From an 8259, which the machine does not have; ignored.
    External,
}

impl Delivery {
    /// Decodes bits 10 to 8 of the ICR, a redirection entry, an LVT entry or MSI data; `None`
    /// for a reserved value.
    pub fn from_bits(bits: u32) -> Option<Self> {
        match bits & 7 {
            0 => Some(Self::Fixed),
            1 => Some(Self::LowestPriority),
            2 => Some(Self::Smi),
            4 => Some(Self::Nmi),
            5 => Some(Self::Init),
            6 => Some(Self::StartUp),
            7 => Some(Self::External),
            _ => None,
        }
    }
}

/// The destination of an interrupt, as the guest encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The local APIC of this identifier.
    Physical(u32),
    /// Every local APIC whose logical identity matches.
    Logical(u32),
    /// The sender.
    Oneself,
    Everybody,
    /// Everybody but the sender.
    Others,
}

impl Destination {
    /// Decodes a destination of eight bits: of an xAPIC's ICR, a redirection entry or an MSI.
    pub fn of_8_bits(id: u8, logical: bool) -> Self {
        match (id, logical) {
            (0xff, _) => Self::Everybody,
            (id, true) => Self::Logical(id.into()),
            (id, false) => Self::Physical(id.into()),
        }
    }

    /// Decodes a destination of 32 bits: of an x2APIC's ICR.
    pub fn of_32_bits(id: u32, logical: bool) -> Self {
        match (id, logical) {
            (u32::MAX, _) => Self::Everybody,
            (id, true) => Self::Logical(id),
            (id, false) => Self::Physical(id),
        }
    }
}

/// An interrupt before the [`super::InterruptRouter`] has found its vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupt {
    /// 0 to 255; below 16 invalid for kinds that have a vector.
    pub vector: u8,
    pub delivery: Delivery,
    pub destination: Destination,
    /// Level-triggered: its EOI goes to the I/O APIC.
    pub level: bool,
}

impl Interrupt {
    /// Decodes a message-signalled interrupt (Intel SDM volume 3, 11.11); `None` if the address
    /// is not in the local APICs' range, or the kind is reserved.
    pub fn from_msi(address: u64, data: u32) -> Option<Self> {
        if address >> 20 != 0xfee {
            return None;
        }
        let target = (address >> 12) as u8;
        let logical = address & 4 != 0;
        let redirected = address & 8 != 0;
        let delivery = match Delivery::from_bits(data >> 8)? {
            Delivery::Fixed if redirected && logical => Delivery::LowestPriority,
            other => other,
        };
        Some(Self {
            vector: data as u8,
            delivery,
            destination: Destination::of_8_bits(target, logical),
            level: data & 1 << 15 != 0,
        })
    }

    /// Decodes a write to the ICR (Intel SDM volume 3, 11.6.1); `None` for reserved kinds and
    /// for the de-assertion of INIT, which CPUs since the Pentium 4 ignore. `target` decodes
    /// the register's destination; its argument is whether the destination is logical.
    pub fn from_command(low: u32, target: impl FnOnce(bool) -> Destination) -> Option<Self> {
        let delivery = Delivery::from_bits(low >> 8)?;
        let level = low & 1 << 15 != 0;
        let assert = low & 1 << 14 != 0;
        if delivery == Delivery::Init && level && !assert {
            return None;
        }
        let destination = match low >> 18 & 3 {
            0 => target(low & 1 << 11 != 0),
            1 => Destination::Oneself,
            2 => Destination::Everybody,
            _ => Destination::Others,
        };
        Some(Self {
            vector: low as u8,
            delivery,
            destination,
            // IPIs are edges, whatever the bit says (11.6.1, "Trigger Mode").
            level: false,
        })
    }
}

/// An interrupt for one vCPU. Plain data, which slices send to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// An interrupt for the IRR.
    Fixed {
        /// 16 to 255.
        vector: u8,
        level: bool,
    },
    /// Non-maskable interrupt.
    NonMaskable,
    Init,
    /// Start-up, at page `vector`.
    StartUp {
        /// The real-mode page of the first instruction.
        vector: u8,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_signalled_interrupts_are_decoded() {
        let physical = Interrupt::from_msi(0xfee0_3000, 0x41).unwrap();
        assert_eq!(physical.destination, Destination::Physical(3));
        assert_eq!(physical.delivery, Delivery::Fixed);
        assert_eq!((physical.vector, physical.level), (0x41, false));
        let lowest = Interrupt::from_msi(0xfee0_f00c, 0xc142).unwrap();
        assert_eq!(lowest.destination, Destination::Logical(15));
        assert_eq!(lowest.delivery, Delivery::LowestPriority);
        assert!(lowest.level);
        assert_eq!(Interrupt::from_msi(0xfed0_0000, 0x41), None);
        assert_eq!(Interrupt::from_msi(0x1_fee0_0000, 0x41), None);
        assert_eq!(Interrupt::from_msi(0xfee0_0000, 0x341), None);
    }

    #[test]
    fn commands_are_decoded() {
        let from_command = |target, low| {
            Interrupt::from_command(low, |logical| Destination::of_8_bits(target, logical))
        };
        let init = from_command(2, 0xc500).unwrap();
        assert_eq!(init.delivery, Delivery::Init);
        assert_eq!(init.destination, Destination::Physical(2));
        // Its de-assertion is nothing.
        assert_eq!(from_command(2, 0x8500), None);
        let start = from_command(1, 0x69a).unwrap();
        assert_eq!((start.delivery, start.vector), (Delivery::StartUp, 0x9a));
        for (bits, destination) in [
            (1, Destination::Oneself),
            (2, Destination::Everybody),
            (3, Destination::Others),
        ] {
            let shorthand = from_command(0, 0x40fd | bits << 18).unwrap();
            assert_eq!(shorthand.destination, destination);
        }
        let logical = from_command(5, 0x8fd).unwrap();
        assert_eq!(logical.destination, Destination::Logical(5));
        for low in [0x40fd, 0x48fd] {
            let all = from_command(0xff, low).unwrap();
            assert_eq!(all.destination, Destination::Everybody);
        }
    }
}
