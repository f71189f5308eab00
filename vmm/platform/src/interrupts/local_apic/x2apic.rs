//! The registers by MSRs: x2APIC mode (Intel SDM volume 3, 11.12).
//!
//! MSR 0x800 + n is the register at offset 16 n of xAPIC mode, but for: the identifier
//! and the logical one of 32 bits, both read-only; the command register, one of 64 bits
//! at the place of its lower half; the self IPI; and DFR, which is gone. What is
//! reserved, or cannot be read or written, is a general protection fault.

use super::super::message::{Delivery, Destination, Interrupt};
use super::super::posted::extended_logical;
use super::{ENTRY_BITS, LocalApic, Mode, Outcome, entry};

/// The first MSR, and how many belong to the local APIC, whether there or not.
const FIRST: u32 = 0x800;
const COUNT: u32 = 0x100;

/// Offsets of registers that are not as in xAPIC mode.
const IDENTIFIER: u64 = 0x20;
const END_OF_INTERRUPT: u64 = 0xb0;
const LOGICAL_DESTINATION: u64 = 0xd0;
const COMMAND: u64 = 0x300;
const SELF_COMMAND: u64 = 0x3f0;

/// Bits of the command register that are reserved. The delivery status (12), which is
/// gone, too, is let pass: it is what software writes back that has read it elsewhere.
const COMMAND_RESERVED: u64 = 0xfff3_2000;
/// Bits of a vector's entry that are the APIC's: they may be written, to no effect.
const ENTRY_STATUS: u32 = 1 << 12 | 1 << 14;

impl LocalApic {
    /// RDMSR; `None`: a general protection fault. `now` is the guest's TSC.
    pub fn read_msr(&mut self, index: u32, now: u64) -> Option<u64> {
        let offset = self.offset_of(index)?;
        Some(match offset {
            IDENTIFIER => self.state.id.into(),
            LOGICAL_DESTINATION => extended_logical(self.state.id).into(),
            COMMAND => u64::from(self.state.command_high) << 32 | u64::from(self.state.command_low),
            // Version, priorities, spurious vector, bits by vector, errors, the vectors'
            // entries, the timer.
            0x30 | 0x80 | 0xa0 | 0xf0 | 0x100..=0x280 | 0x320..=0x390 | 0x3e0 => {
                self.read(offset, now).into()
            }
            _ => return None,
        })
    }

    /// WRMSR; `None`: a general protection fault, and nothing was done.
    pub fn write_msr(&mut self, index: u32, value: u64, now: u64) -> Option<Outcome> {
        let offset = self.offset_of(index)?;
        if offset == COMMAND {
            return self.write_command(value);
        }
        let known = match offset {
            0x80 | SELF_COMMAND => 0xff,
            END_OF_INTERRUPT | 0x280 => 0,
            0xf0 => 0x1ff,
            0x320..=0x370 => ENTRY_BITS[entry(offset)?] | ENTRY_STATUS,
            0x380 => u32::MAX,
            0x3e0 => 0xb,
            _ => return None,
        };
        let low = u32::try_from(value).ok().filter(|low| low & !known == 0)?;
        if offset != SELF_COMMAND {
            return Some(self.write(offset, low, now));
        }
        Some(self.send(Interrupt {
            vector: low as u8,
            delivery: Delivery::Fixed,
            destination: Destination::Oneself,
            level: false,
        }))
    }

    /// The command register, as a whole.
    fn write_command(&mut self, value: u64) -> Option<Outcome> {
        if value & COMMAND_RESERVED != 0 {
            return None;
        }
        let high = (value >> 32) as u32;
        self.state.command_high = high;
        Some(self.command(value as u32, |logical| {
            Destination::of_32_bits(high, logical)
        }))
    }

    /// Where an MSR's register is in xAPIC mode, while it can be reached.
    fn offset_of(&self, index: u32) -> Option<u64> {
        offset(index).filter(|_| self.mode() == Mode::X2Apic)
    }
}

/// The offset in xAPIC mode of an MSR that is a local APIC's.
pub fn offset(index: u32) -> Option<u64> {
    let number = index.checked_sub(FIRST).filter(|number| *number < COUNT)?;
    Some(u64::from(number) << 4)
}

#[cfg(test)]
mod tests;
