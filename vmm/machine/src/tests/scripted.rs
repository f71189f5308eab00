//! A back end that executes a small fixed program instead of a guest: counts,
//! prints, arms its timer, halts, sends interrupts round, takes and ends them.
//! All that it is lies in a `CpuState`, so it can be saved anywhere.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use weft_guest_memory::LOCAL_APIC;
use weft_platform::clock::{COUNTED_HZ, host_tsc};
use weft_vcpu::{BackEnd, CpuState, Environment, Exit, Kick, Vcpu, VcpuError};

/// What registers hold.
pub const STEPS: usize = 0;
pub const TIMERS: usize = 1;
pub const CALLS: usize = 2;
pub const CPUS: usize = 3;
pub const NEXT: usize = 4;
/// After this many steps, vCPU 0 writes the value of `END_VALUE` to `END_PORT`.
pub const END_AT: usize = 5;
pub const END_PORT: usize = 6;
pub const END_VALUE: usize = 7;

pub const TIMER_VECTOR: u8 = 0xec;
pub const CALL_VECTOR: u8 = 0xfb;

#[derive(Default)]
struct Flag(AtomicBool);

impl Kick for Flag {
    fn kick(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A vCPU that never comes back from the guest.
#[derive(Clone)]
pub struct Stuck {
    pub vcpu: u32,
    /// Gets a message when the vCPU has entered the guest.
    pub entered: Sender<()>,
}

/// Makes scripted vCPUs.
pub struct ScriptedBackEnd {
    pub deterministic: bool,
    pub stuck: Option<Stuck>,
}

impl BackEnd for ScriptedBackEnd {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn tsc_hz(&self) -> u64 {
        2 * COUNTED_HZ
    }

    fn create(&self, id: u32) -> Result<Box<dyn Vcpu>, VcpuError> {
        Ok(Box::new(Scripted {
            state: CpuState::reset(),
            kicked: Arc::default(),
            deterministic: self.deterministic,
            budget: u64::MAX,
            stuck: self.stuck.clone().filter(|stuck| stuck.vcpu == id),
        }))
    }
}

struct Scripted {
    state: CpuState,
    kicked: Arc<Flag>,
    deterministic: bool,
    budget: u64,
    stuck: Option<Stuck>,
}

impl Scripted {
    fn tsc(&self) -> u64 {
        let ticks = if self.deterministic {
            self.state.instructions
        } else {
            host_tsc()
        };
        ticks.wrapping_add(self.state.tsc_offset)
    }

    fn tell_time(&self, environment: &mut dyn Environment) {
        if self.deterministic {
            environment.set_now(self.tsc());
        }
    }

    fn write_apic(&self, environment: &mut dyn Environment, register: u64, value: u32) {
        self.tell_time(environment);
        environment.mmio_write(LOCAL_APIC + register, &value.to_le_bytes());
    }

    fn command(&self, environment: &mut dyn Environment, target: u64, low: u32) {
        self.write_apic(environment, 0x310, (target as u32) << 24);
        self.write_apic(environment, 0x300, low);
    }

    fn take_interrupts(&mut self, environment: &mut dyn Environment) {
        self.tell_time(environment);
        while let Some(vector) = environment.interrupt_take() {
            match vector {
                TIMER_VECTOR => self.state.registers[TIMERS] += 1,
                CALL_VECTOR => self.state.registers[CALLS] += 1,
                other => panic!("vector {other:#x}"),
            }
            self.state.halted = false;
            self.write_apic(environment, 0xb0, 0);
        }
    }

    fn begin(&self, environment: &mut dyn Environment) {
        self.write_apic(environment, 0xf0, 0x1ff);
        self.write_apic(environment, 0x320, 1 << 18 | u32::from(TIMER_VECTOR));
        // The first starts the others, which have no registers of their own yet.
        if self.state.registers[CPUS] > 1 && self.state.registers[END_PORT] != 0 {
            for target in 1..self.state.registers[CPUS] {
                self.command(environment, target, 0xc500);
                self.command(environment, target, 0x69a);
            }
        }
    }

    /// One step of the program; whether it halts.
    fn step(&mut self, environment: &mut dyn Environment) -> bool {
        let step = self.state.registers[STEPS];
        if step == 0 {
            self.begin(environment);
        }
        self.state.registers[STEPS] += 1;
        self.state.instructions += 1;
        self.tell_time(environment);
        let registers = &self.state.registers;
        if step % 64 == 63 {
            environment.port_write(0x3f8, b".");
        }
        if step % 97 == 96 && registers[CPUS] > 1 {
            self.command(
                environment,
                registers[NEXT],
                0x4000 | u32::from(CALL_VECTOR),
            );
        }
        if registers[END_AT] != 0 && step >= registers[END_AT] {
            let value = [registers[END_VALUE] as u8];
            environment.port_write(registers[END_PORT] as u16, &value);
        }
        if step % 200 == 199 {
            let deadline = self.tsc() + 40_000;
            environment.msr_write(0x6e0, deadline);
            self.state.halted = true;
        }
        self.state.halted
    }
}

impl Vcpu for Scripted {
    fn run(&mut self, environment: &mut dyn Environment) -> Result<Exit, VcpuError> {
        if let Some(stuck) = &self.stuck {
            // The test may have what it waited for.
            let _ = stuck.entered.send(());
            loop {
                std::thread::sleep(std::time::Duration::from_secs(1));
            }
        }
        loop {
            if self.kicked.0.swap(false, Ordering::SeqCst) {
                return Ok(Exit::Kicked);
            }
            self.take_interrupts(environment);
            if self.state.halted {
                return Ok(Exit::Halted);
            }
            if self.deterministic {
                if self.budget == 0 {
                    return Ok(Exit::Deadline);
                }
                self.budget -= 1;
            }
            self.step(environment);
        }
    }

    fn save(&self) -> Result<CpuState, VcpuError> {
        Ok(self.state.clone())
    }

    fn restore(&mut self, state: &CpuState) -> Result<(), VcpuError> {
        self.state = state.clone();
        if state.cs.selector == 0x9a00 && state.registers[CPUS] == 0 {
            // Started by the first: its partner is vCPU 0.
            self.state.registers[CPUS] = 2;
        }
        Ok(())
    }

    fn set_tsc_offset(&mut self, offset: u64) -> Result<(), VcpuError> {
        self.state.tsc_offset = offset;
        Ok(())
    }

    fn set_budget(&mut self, instructions: Option<u64>) -> Result<(), VcpuError> {
        self.budget = instructions.unwrap_or(u64::MAX);
        Ok(())
    }

    fn instructions(&self) -> u64 {
        self.state.instructions
    }

    fn kicker(&self) -> Arc<dyn Kick> {
        self.kicked.clone()
    }
}
