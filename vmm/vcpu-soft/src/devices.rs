//! The way to devices: memory-mapped registers, ports, and the registers that
//! the interrupt controller answers for.
//!
//! The vCPU is outside meanwhile: a device may wait, and others may ask for
//! pages. After a write, interrupts and the clock are looked at.

use weft_vcpu::Environment;

use crate::cpu::{Cpu, Faulted, rflags};
use crate::requests::request;

impl Cpu {
    /// Calls the environment; `None` where there is none.
    pub fn with_environment<T>(
        &mut self,
        call: impl FnOnce(&mut dyn Environment) -> T,
    ) -> Option<T> {
        let now = self.configuration.deterministic.then(|| self.tsc());
        self.step_outside();
        let result = self.environment.map(|environment| {
            // SAFETY: what `run` was given, which is borrowed until it returns;
            // nobody else uses it meanwhile.
            let environment = unsafe { &mut *environment };
            if let Some(now) = now {
                environment.set_now(now);
            }
            call(environment)
        });
        self.come_inside(None);
        result
    }

    fn after_write(&mut self) {
        self.requests.ask(request::LOOK);
    }

    /// Reads `size` bytes of a device's register.
    pub fn device_read(&mut self, physical: u64, size: usize) -> u64 {
        let mut bytes = [0xff; 8];
        self.with_environment(|environment| {
            environment.mmio_read(physical, &mut bytes[..size]);
        });
        from_bytes(&bytes, size)
    }

    /// Writes the low `size` bytes of `value` to a device's register.
    pub fn device_write(&mut self, physical: u64, size: usize, value: u64) {
        self.with_environment(|environment| {
            environment.mmio_write(physical, &value.to_le_bytes()[..size]);
        });
        self.after_write();
    }

    pub fn port_read(&mut self, port: u16, size: usize) -> u64 {
        self.watch_port(port, size);
        let mut bytes = [0xff; 8];
        self.with_environment(|environment| environment.port_read(port, &mut bytes[..size]));
        from_bytes(&bytes, size)
    }

    /// OUT.
    pub fn port_write(&mut self, port: u16, size: usize, value: u64) {
        self.watch_port(port, size);
        self.with_environment(|environment| {
            environment.port_write(port, &value.to_le_bytes()[..size]);
        });
        self.after_write();
    }

    /// RDMSR of a register that is not the vCPU's own.
    pub fn outer_msr_read(&mut self, index: u32) -> Option<u64> {
        self.with_environment(|environment| environment.msr_read(index))?
    }

    /// WRMSR of a register that is not the vCPU's own.
    pub fn outer_msr_write(&mut self, index: u32, value: u64) -> bool {
        let taken = self
            .with_environment(|environment| environment.msr_write(index, value))
            .unwrap_or(false);
        self.after_write();
        taken
    }

    /// Whether the program may use `size` ports from `port` on: by its privilege
    /// level, or the task's bit map (Intel SDM volume 1, 19.5).
    pub fn check_port(&mut self, port: u16, size: usize) -> Result<(), Faulted> {
        let privileged = u64::from(self.cpl) <= (self.rflags_system & rflags::IOPL) >> 12;
        if privileged || !self.is_protected() {
            return Ok(());
        }
        const MAP_BASE: u64 = 0x66;
        let limit = u64::from(self.tr.limit);
        if limit < MAP_BASE + 1 {
            return Err(self.general_protection(0));
        }
        let map = self.load_system(self.tr.base.wrapping_add(MAP_BASE), 2)?;
        let place = map + u64::from(port) / 8;
        if place + 1 > limit {
            return Err(self.general_protection(0));
        }
        let bits = self.load_system(self.tr.base.wrapping_add(place), 2)?;
        let wanted = ((1_u64 << size) - 1) << (port & 7);
        if bits & wanted != 0 {
            return Err(self.general_protection(0));
        }
        Ok(())
    }
}

fn from_bytes(bytes: &[u8; 8], size: usize) -> u64 {
    u64::from_le_bytes(*bytes) & (u64::MAX >> (64 - 8 * size))
}
