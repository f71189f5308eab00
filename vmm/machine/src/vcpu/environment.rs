//! A vCPU's view of its machine: what its back end calls on the vCPU's thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use weft_guest_memory::LOCAL_APIC;
use weft_platform::bus::Bus;
use weft_platform::clock::{Alarms, Clock, KvmClock};
use weft_platform::interrupts::{
    InterruptRouter, LOCAL_APIC_SIZE, LocalApic, Mode, Outcome, x2apic,
};
use weft_vcpu::Environment;

use weft_vcpu::Kick;

const IA32_TIME_STAMP_COUNTER: u32 = 0x10;
const IA32_APIC_BASE: u32 = 0x1b;
const IA32_TSC_ADJUST: u32 = 0x3b;
const IA32_TSC_DEADLINE: u32 = 0x6e0;
/// Registers of the local APIC that move its timer.
const APIC_TIMER_REGISTERS: [u64; 3] = [0x320, 0x380, 0x3e0];

/// What all vCPUs of a machine share.
#[derive(Clone)]
pub struct VcpuContext {
    /// Memory-mapped registers.
    pub mmio: Bus,
    pub ports: Bus,
    /// Interrupt controllers.
    pub interrupts: Arc<InterruptRouter>,
    /// Time.
    pub clock: Arc<Clock>,
    /// The paravirtual clock.
    pub kvmclock: Arc<KvmClock>,
    /// Timers of running vCPUs; `None` if instructions are the clock.
    pub alarms: Option<Arc<Alarms>>,
    /// Set when the machine is about to end: no more guest code is executed.
    pub ending: Arc<AtomicBool>,
}

/// How often a vCPU's back end called each function of its environment.
#[derive(Default)]
pub struct VcpuCounters {
    pub(super) mmio: AtomicU64,
    pub(super) apic: AtomicU64,
    pub(super) ports: AtomicU64,
    pub(super) msrs: AtomicU64,
    pub(super) interrupts: AtomicU64,
    pub(super) timer_changes: AtomicU64,
    pub(super) halts: AtomicU64,
    pub(super) kicks: AtomicU64,
    pub(super) deadlines: AtomicU64,
    /// Instructions executed, if instructions are the clock.
    pub(super) instructions: AtomicU64,
}

impl VcpuCounters {
    /// The counters with their names.
    pub fn list(&self) -> Vec<(&'static str, u64)> {
        [
            ("mmio", &self.mmio),
            ("apic", &self.apic),
            ("ports", &self.ports),
            ("msrs", &self.msrs),
            ("interrupts", &self.interrupts),
            ("timer-changes", &self.timer_changes),
            ("halts", &self.halts),
            ("kicks", &self.kicks),
            ("deadlines", &self.deadlines),
            ("instructions", &self.instructions),
        ]
        .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
        .to_vec()
    }
}

/// Adds one. Only the vCPU's thread counts, so no locked instruction is needed.
pub(super) fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

/// The environment of one vCPU.
pub(super) struct CpuEnvironment {
    pub id: u32,
    pub context: VcpuContext,
    pub apic: LocalApic,
    pub counters: Arc<VcpuCounters>,
    pub kick: Arc<dyn Kick>,
}

impl CpuEnvironment {
    pub fn new(
        id: u32,
        context: VcpuContext,
        apic: LocalApic,
        counters: Arc<VcpuCounters>,
        kick: Arc<dyn Kick>,
    ) -> Self {
        Self {
            id,
            context,
            apic,
            counters,
            kick,
        }
    }

    /// Requests the timer's interrupt if it is due.
    pub fn advance_timer(&mut self) {
        if self.apic.deadline().is_some() {
            self.apic.advance(self.context.clock.now());
        }
    }

    /// Arranges that the vCPU is woken when its timer is due. If it is not `running`, its
    /// thread waits for the timer itself.
    pub fn set_alarm(&mut self, running: bool) {
        if let Some(alarms) = &self.context.alarms {
            let wanted = self.apic.deadline().filter(|_| running);
            alarms.set(self.id, wanted);
        }
    }

    fn timer_changed(&mut self) {
        count(&self.counters.timer_changes);
        // A deadline in the past interrupts at once.
        self.advance_timer();
        if self.context.alarms.is_some() {
            self.set_alarm(true);
        } else {
            // The budget of instructions was for the old deadline.
            self.kick.kick();
        }
    }

    fn apic_read(&mut self, offset: u64, data: &mut [u8]) {
        count(&self.counters.apic);
        let now = self.context.clock.now();
        let value = self.apic.read(offset & !0xf, now).to_le_bytes();
        // Only the first four bytes of every sixteen are a register.
        for (index, byte) in data.iter_mut().enumerate() {
            let at = (offset & 0xf) as usize + index;
            *byte = value.get(at).copied().unwrap_or(0);
        }
    }

    fn apic_write(&mut self, offset: u64, data: &[u8]) {
        count(&self.counters.apic);
        let Some(value) = data.first_chunk().filter(|_| offset & 0xf == 0) else {
            return;
        };
        let now = self.context.clock.now();
        let outcome = self.apic.write(offset, u32::from_le_bytes(*value), now);
        self.apic_written(offset, outcome);
    }

    /// A register of the local APIC, by its MSR.
    fn apic_msr_write(&mut self, index: u32, value: u64) -> bool {
        count(&self.counters.apic);
        let now = self.context.clock.now();
        let outcome = self.apic.write_msr(index, value, now);
        let written = outcome.zip(x2apic::offset(index));
        if let Some((outcome, offset)) = written {
            self.apic_written(offset, outcome);
        }
        written.is_some()
    }

    /// Carries out the effect of a write to a register of the local APIC.
    fn apic_written(&mut self, offset: u64, outcome: Outcome) {
        match outcome {
            Outcome::Done => {}
            Outcome::Send(interrupt) => self.context.interrupts.command(&interrupt, self.id),
            Outcome::EndOfInterrupt(vector) => {
                self.context.interrupts.end_of_interrupt(vector, self.id)
            }
        }
        if APIC_TIMER_REGISTERS.contains(&offset) {
            self.timer_changed();
        }
    }

    fn apic_offset(&self, address: u64) -> Option<u64> {
        let offset = address.wrapping_sub(LOCAL_APIC);
        let is_there = self.apic.mode() == Mode::XApic;
        (offset < LOCAL_APIC_SIZE && is_there).then_some(offset)
    }

    /// When the machine is about to end, memory of other slices may be invalid, and nothing
    /// that is computed from it may leave the vCPU.
    fn may_reach_devices(&self) -> bool {
        !self.context.ending.load(Ordering::Relaxed)
    }

    /// Kicks this vCPU if the device that it just accessed has ended the machine.
    fn look_for_end(&self) {
        if self.context.ending.load(Ordering::Relaxed) {
            self.kick.kick();
        }
    }
}

impl Environment for CpuEnvironment {
    fn set_now(&mut self, tsc: u64) {
        self.context.clock.set_counted(tsc);
    }

    fn mmio_read(&mut self, address: u64, data: &mut [u8]) {
        if let Some(offset) = self.apic_offset(address) {
            self.apic_read(offset, data);
            return;
        }
        count(&self.counters.mmio);
        self.context.mmio.read(address, data);
    }

    fn mmio_write(&mut self, address: u64, data: &[u8]) {
        if let Some(offset) = self.apic_offset(address) {
            self.apic_write(offset, data);
            return;
        }
        count(&self.counters.mmio);
        if self.may_reach_devices() {
            self.context.mmio.write(address, data);
        }
        self.look_for_end();
    }

    fn port_read(&mut self, port: u16, data: &mut [u8]) {
        count(&self.counters.ports);
        self.context.ports.read(port.into(), data);
    }

    fn port_write(&mut self, port: u16, data: &[u8]) {
        count(&self.counters.ports);
        if self.may_reach_devices() {
            self.context.ports.write(port.into(), data);
        }
        self.look_for_end();
    }

    fn msr_read(&mut self, index: u32) -> Option<u64> {
        count(&self.counters.msrs);
        match index {
            IA32_TIME_STAMP_COUNTER => Some(self.context.clock.now()),
            IA32_TSC_ADJUST => Some(0),
            IA32_APIC_BASE => Some(self.apic.base()),
            IA32_TSC_DEADLINE => Some(self.apic.deadline_register()),
            _ if x2apic::offset(index).is_some() => {
                count(&self.counters.apic);
                let now = self.context.clock.now();
                self.apic.read_msr(index, now)
            }
            _ => self.context.kvmclock.read(self.id, index),
        }
    }

    fn msr_write(&mut self, index: u32, value: u64) -> bool {
        count(&self.counters.msrs);
        match index {
            // All vCPUs' timers and clocks follow from the one TSC that they share.
            IA32_TIME_STAMP_COUNTER | IA32_TSC_ADJUST => true,
            IA32_APIC_BASE => {
                let taken = self.apic.set_base(value);
                self.timer_changed();
                taken
            }
            IA32_TSC_DEADLINE => {
                self.apic.set_deadline_register(value);
                self.timer_changed();
                true
            }
            _ if x2apic::offset(index).is_some() => self.apic_msr_write(index, value),
            _ => self.context.kvmclock.write(self.id, index, value),
        }
    }

    fn interrupt_waits(&mut self) -> bool {
        self.apic.interrupt_waits()
    }

    fn interrupt_take(&mut self) -> Option<u8> {
        let vector = self.apic.take_interrupt();
        if vector.is_some() {
            count(&self.counters.interrupts);
        }
        vector
    }

    fn nmi_take(&mut self) -> bool {
        self.apic.take_non_maskable()
    }

    fn task_priority(&mut self) -> u8 {
        self.apic.task_priority()
    }

    fn set_task_priority(&mut self, priority: u8) {
        self.apic.set_task_priority(priority);
    }
}
