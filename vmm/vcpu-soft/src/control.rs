//! Control registers and EFER: what may be written, and what it changes.

use crate::cpu::{Cpu, Faulted, cr0, cr4, efer};
use crate::segments::rights;

impl Cpu {
    /// MOV to CR0.
    pub fn set_cr0(&mut self, value: u64) -> Result<(), Faulted> {
        let value = value & cr0::ALL | cr0::ET;
        let paging_alone = value & cr0::PG != 0 && value & cr0::PE == 0;
        let wrong_cache = value & cr0::NW != 0 && value & cr0::CD == 0;
        if paging_alone || wrong_cache {
            return Err(self.general_protection(0));
        }
        let turned_on = value & !self.cr0 & cr0::PG != 0;
        let turned_off = self.cr0 & !value & cr0::PG != 0;
        if turned_on && self.efer & efer::LME != 0 {
            let long_code = self.segments[crate::cpu::segment::CS].rights & rights::LONG != 0;
            if self.cr4 & cr4::PAE == 0 || long_code {
                return Err(self.general_protection(0));
            }
            self.efer |= efer::LMA;
        }
        if turned_off {
            if self.mode.is_64() {
                return Err(self.general_protection(0));
            }
            self.efer &= !efer::LMA;
        }
        let changed = self.cr0 ^ value;
        self.cr0 = value;
        if changed & (cr0::PG | cr0::WP | cr0::PE) != 0 {
            self.flush_everything();
        }
        self.update_mode();
        Ok(())
    }

    /// MOV to CR3.
    pub fn set_cr3(&mut self, value: u64) -> Result<(), Faulted> {
        if self.is_long() && value >> crate::walk::PHYSICAL_BITS != 0 {
            return Err(self.general_protection(0));
        }
        self.cr3 = value;
        self.flush_local();
        Ok(())
    }

    /// MOV to CR4.
    pub fn set_cr4(&mut self, value: u64) -> Result<(), Faulted> {
        let leaves_long = self.is_long() && value & cr4::PAE == 0;
        if value & !self.cr4_bits() != 0 || leaves_long {
            return Err(self.general_protection(0));
        }
        let changed = self.cr4 ^ value;
        self.cr4 = value;
        if changed & (cr4::PGE | cr4::PAE | cr4::PSE | cr4::SMEP | cr4::SMAP) != 0 {
            self.flush_everything();
        }
        if changed & cr4::DE != 0 {
            self.breakpoints_changed();
        }
        self.update_mode();
        Ok(())
    }

    /// MOV from CR8.
    pub fn cr8(&mut self) -> u64 {
        let priority = self.with_environment(|environment| environment.task_priority());
        u64::from(priority.unwrap_or(0))
    }

    /// MOV to CR8.
    pub fn set_cr8(&mut self, value: u64) -> Result<(), Faulted> {
        if value > 15 {
            return Err(self.general_protection(0));
        }
        self.with_environment(|environment| environment.set_task_priority(value as u8));
        self.requests.ask(crate::requests::request::LOOK);
        Ok(())
    }

    /// WRMSR to IA32_EFER.
    pub fn set_efer(&mut self, value: u64) -> Result<(), Faulted> {
        let toggles = (self.efer ^ value) & efer::LME != 0 && self.cr0 & cr0::PG != 0;
        if value & !(efer::WRITABLE | efer::LMA) != 0 || toggles {
            return Err(self.general_protection(0));
        }
        let changed = self.efer ^ value;
        self.efer = value & efer::WRITABLE | self.efer & efer::LMA;
        if changed & efer::NXE != 0 {
            self.flush_everything();
        }
        Ok(())
    }
}
