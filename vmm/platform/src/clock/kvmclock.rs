//! The paravirtual clock of KVM (the kernel's Documentation/virt/kvm/x86/msr.rst):
//! the guest gives an address in its memory, and the factors by which it computes nanoseconds
//! from its TSC are written there.
//!
//! All vCPUs share one TSC, so these factors are the same for all of them, and valid for as
//! long as the machine runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use weft_guest_memory::GuestBytes;

use super::Clock;

/// MSR_KVM_WALL_CLOCK and its older number.
const WALL_CLOCK: [u32; 2] = [0x11, 0x4b56_4d00];
/// MSR_KVM_SYSTEM_TIME and its older number.
const SYSTEM_TIME: [u32; 2] = [0x12, 0x4b56_4d01];
const ENABLED: u64 = 1;
/// PVCLOCK_TSC_STABLE_BIT: time agrees over vCPUs.
const TSC_STABLE: u8 = 1;
/// An even version: the structure is complete.
const COMPLETE: u32 = 2;

/// The registers of all vCPUs.
pub struct KvmClock {
    clock: Arc<Clock>,
    memory: Arc<dyn GuestBytes>,
    wall_clock: AtomicU64,
    /// By vCPU.
    system_time: Box<[AtomicU64]>,
}

impl KvmClock {
    /// A clock that no vCPU has enabled.
    pub fn new(clock: Arc<Clock>, memory: Arc<dyn GuestBytes>, cpus: u32) -> Self {
        Self {
            clock,
            memory,
            wall_clock: AtomicU64::new(0),
            system_time: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Reads one of the clock's MSRs; `None` for another MSR.
    pub fn read(&self, vcpu: u32, index: u32) -> Option<u64> {
        if WALL_CLOCK.contains(&index) {
            return Some(self.wall_clock());
        }
        if SYSTEM_TIME.contains(&index) {
            return Some(self.system_time(vcpu));
        }
        None
    }

    /// Writes one of the clock's MSRs; `false` for another MSR, or an address that is not
    /// memory.
    pub fn write(&self, vcpu: u32, index: u32, value: u64) -> bool {
        if WALL_CLOCK.contains(&index) {
            let done = self.write_wall_clock(value);
            if done {
                self.set_wall_clock(value);
            }
            return done;
        }
        SYSTEM_TIME.contains(&index) && self.set_system_time(vcpu, value)
    }

    /// A vCPU's system time MSR.
    pub fn system_time(&self, vcpu: u32) -> u64 {
        self.system_time
            .get(vcpu as usize)
            .map_or(0, |cell| cell.load(Ordering::Relaxed))
    }

    /// Sets a vCPU's system time MSR after a restore. An invalid value changes nothing.
    pub fn set_system_time(&self, vcpu: u32, value: u64) -> bool {
        let done = value & ENABLED == 0 || self.write_system_time(value & !ENABLED);
        if let Some(cell) = self.system_time.get(vcpu as usize).filter(|_| done) {
            cell.store(value, Ordering::Relaxed);
        }
        done
    }

    /// Sets both registers of a vCPU that comes from another slice. What they name in guest
    /// memory is there already, and the same for all slices.
    pub fn arrive(&self, vcpu: u32, system_time: u64, wall_clock: u64) {
        if let Some(cell) = self.system_time.get(vcpu as usize) {
            cell.store(system_time, Ordering::Relaxed);
        }
        self.set_wall_clock(wall_clock);
    }

    /// The machine's wall clock MSR.
    pub fn wall_clock(&self) -> u64 {
        self.wall_clock.load(Ordering::Relaxed)
    }

    /// Sets the wall clock MSR after a restore, without a write to guest memory.
    pub fn set_wall_clock(&self, value: u64) {
        self.wall_clock.store(value, Ordering::Relaxed);
    }

    /// `struct pvclock_vcpu_time_info`.
    fn write_system_time(&self, address: u64) -> bool {
        let (multiplier, shift) = self.clock.base().factors();
        let mut data = [0_u8; 32];
        data[8..16].copy_from_slice(&self.clock.zero().to_le_bytes());
        // system_time, data[16..24], is zero at that TSC.
        data[24..28].copy_from_slice(&multiplier.to_le_bytes());
        data[28] = shift as u8;
        data[29] = TSC_STABLE;
        self.publish(address, &data)
    }

    /// `struct pvclock_wall_clock`: the time of day when guest time was zero.
    fn write_wall_clock(&self, address: u64) -> bool {
        let since = std::time::Duration::from_nanos(self.clock.nanoseconds());
        let start = self.clock.wall().saturating_sub(since);
        let mut data = [0_u8; 12];
        data[4..8].copy_from_slice(&(start.as_secs() as u32).to_le_bytes());
        data[8..12].copy_from_slice(&start.subsec_nanos().to_le_bytes());
        self.publish(address, &data)
    }

    /// Writes a structure that begins with a version, which is odd during the write.
    fn publish(&self, address: u64, data: &[u8]) -> bool {
        let version = |value: u32| self.memory.write(address, &value.to_le_bytes());
        version(COMPLETE - 1)
            && address
                .checked_add(4)
                .is_some_and(|body| self.memory.write(body, &data[4..]))
            && version(COMPLETE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Source, measure_host_tsc};
    use vm_memory::{Bytes, GuestAddress};
    use weft_guest_memory::Ram;

    fn rig(source: Source) -> (KvmClock, Arc<Clock>, Ram) {
        let ram = Ram::new(4 << 20).unwrap();
        let clock = Arc::new(Clock::new(source, measure_host_tsc()));
        let kvmclock = KvmClock::new(clock.clone(), Arc::new(ram.clone()), 2);
        (kvmclock, clock, ram)
    }

    /// As the guest computes it (pvclock_clocksource_read in the kernel).
    fn guest_nanoseconds(ram: &Ram, address: u64, tsc: u64) -> u64 {
        let mut data = [0; 32];
        ram.guest()
            .read_slice(&mut data, GuestAddress(address))
            .unwrap();
        let field = |range: std::ops::Range<usize>| {
            let mut bytes = [0; 8];
            bytes[..range.len()].copy_from_slice(&data[range]);
            u64::from_le_bytes(bytes)
        };
        assert_eq!(field(0..4) & 1, 0);
        let delta = tsc - field(8..16);
        let shift = data[28] as i8;
        let delta = if shift < 0 {
            delta >> -shift
        } else {
            delta << shift
        };
        field(16..24) + ((u128::from(delta) * u128::from(field(24..28))) >> 32) as u64
    }

    #[test]
    fn the_guest_computes_the_same_time_on_every_cpu() {
        for source in [Source::Host, Source::HostFixed(12345)] {
            let (kvmclock, clock, ram) = rig(source);
            clock.go();
            assert!(kvmclock.write(0, 0x4b56_4d01, 0x1001));
            std::thread::sleep(std::time::Duration::from_millis(1));
            assert!(kvmclock.write(1, 0x12, 0x2001));
            clock.stop();
            let tsc = clock.now();
            let first = guest_nanoseconds(&ram, 0x1000, tsc);
            assert_eq!(first, guest_nanoseconds(&ram, 0x2000, tsc));
            assert!(first.abs_diff(clock.nanoseconds()) <= 1);
            assert_eq!(kvmclock.read(1, 0x4b56_4d01), Some(0x2001));
        }
    }

    #[test]
    fn the_wall_clock_is_that_of_the_start() {
        let (kvmclock, clock, ram) = rig(Source::Counted);
        clock.set_counted(2_000_000_000);
        assert!(kvmclock.write(0, 0x11, 0x3000));
        let seconds: u32 = ram.guest().read_obj(GuestAddress(0x3004)).unwrap();
        assert_eq!(u64::from(seconds), super::super::COUNTED_EPOCH_SECONDS);
    }

    #[test]
    fn addresses_outside_memory_are_refused() {
        let (kvmclock, _, _) = rig(Source::Host);
        assert!(kvmclock.write(0, 0x4b56_4d01, 0x1001));
        assert!(kvmclock.write(0, 0x4b56_4d00, 0x3000));
        for address in [4 << 20, (4 << 20) - 8, u64::MAX, 0xfee0_0000] {
            assert!(!kvmclock.write(0, 0x4b56_4d01, address | 1));
            assert!(!kvmclock.write(0, 0x4b56_4d00, address & !3));
        }
        assert_eq!(kvmclock.read(0, 0x4b56_4d01), Some(0x1001));
        assert_eq!(kvmclock.read(0, 0x4b56_4d00), Some(0x3000));
        assert!(kvmclock.write(0, 0x4b56_4d01, 0));
        assert!(!kvmclock.write(0, 0x4b56_4d02, 1));
        assert_eq!(kvmclock.read(0, 0x4b56_4d02), None);
        assert!(!kvmclock.write(9, 0x4b56_4d01, u64::MAX));
    }
}
