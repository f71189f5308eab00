//! A vCPU from outside: made, run, stopped, saved and restored.

use std::ptr::null;
use std::sync::Arc;

use crate::block::{CodeCache, Mode};
use crate::cpu::{Cpu, Fault, FxArea, efer, segment};
use crate::environment::{Environment, Exit};
use crate::machine::SoftMachine;
use crate::mmu::ExecutedPages;
use crate::msr::Msrs;
use crate::requests::{Mailbox, request};
use crate::run::Configuration;
use crate::state::{CpuState, DescriptorTable, Segment};

/// Makes a vCPU come back from [`SoftCpu::run`], from any thread.
#[derive(Clone)]
pub struct Kick(Arc<Mailbox>);

impl Kick {
    /// Asks; never waits.
    pub fn kick(&self) {
        self.0.ask(request::KICK);
    }
}

/// One virtual CPU.
pub struct SoftCpu {
    cpu: Box<Cpu>,
}

impl SoftCpu {
    /// A CPU as after power-on, one of `machine`'s.
    pub fn new(machine: &Arc<SoftMachine>, configuration: Configuration) -> Self {
        let mailbox = machine.join();
        let cpu = Box::new(Cpu {
            registers: [0; 19],
            flags: 0,
            rip: 0,
            segment_bases: [0; 8],
            budget: 0,
            request: mailbox.request(),
            rflags_system: 0,
            mode: Mode::default(),
            cpl: 0,
            alone: false,
            interrupt_shadow: false,
            halted: false,
            nmi_blocked: false,
            budget_is_short: false,
            global_epoch: 2,
            local_epoch: 1,
            block: null(),
            fault: Fault::default(),
            fault_op: null(),
            instructions_limit: 0,
            fpu: FxArea([0; 512]),
            tlbs: Default::default(),
            jump_caches: Default::default(),
            supervisor_jumps_local: false,
            interrupt_waits: false,
            executed_pages: ExecutedPages::default(),
            revocations: 0,
            segments: [Segment::default(); 7],
            tr: Segment::default(),
            ldtr: Segment::default(),
            gdtr: DescriptorTable::default(),
            idtr: DescriptorTable::default(),
            cr0: 0,
            cr2: 0,
            cr3: 0,
            cr4: 0,
            debug: [0; 6],
            efer: 0,
            msrs: Msrs::default(),
            fetch: Default::default(),
            code: CodeCache::default(),
            memory: machine.memory().clone(),
            machine: machine.clone(),
            mailbox,
            environment: None,
            configuration,
            tsc_offset: 0,
        });
        let mut soft = Self { cpu };
        soft.restore(&CpuState::reset());
        soft
    }

    /// Runs the guest until something needs the vCPU's owner.
    pub fn run(&mut self, environment: &mut dyn Environment) -> Exit {
        self.cpu.run(environment)
    }

    /// What makes [`SoftCpu::run`] come back.
    pub fn kicker(&self) -> Kick {
        Kick(self.cpu.mailbox.clone())
    }

    /// The guest's time stamp counter.
    pub fn tsc(&self) -> u64 {
        self.cpu.tsc()
    }

    /// Sets the guest's time stamp counter: with the instruction clock, how time
    /// goes on while the CPU is halted.
    pub fn set_tsc(&mut self, value: u64) {
        self.cpu.set_tsc(value);
    }

    /// Instructions executed.
    pub fn instructions(&self) -> u64 {
        self.cpu.instructions()
    }

    /// All that the CPU is.
    pub fn save(&self) -> CpuState {
        let cpu = &self.cpu;
        let mut registers = [0; 16];
        registers.copy_from_slice(&cpu.registers[..16]);
        let named = |which: usize| Segment {
            base: cpu.segment_bases[which],
            ..cpu.segments[which]
        };
        CpuState {
            registers,
            rip: cpu.rip,
            rflags: cpu.rflags(),
            cs: named(segment::CS),
            ds: named(segment::DS),
            es: named(segment::ES),
            ss: named(segment::SS),
            fs: named(segment::FS),
            gs: named(segment::GS),
            tr: cpu.tr,
            ldtr: cpu.ldtr,
            gdtr: cpu.gdtr,
            idtr: cpu.idtr,
            cpl: cpu.cpl,
            cr0: cpu.cr0,
            cr2: cpu.cr2,
            cr3: cpu.cr3,
            cr4: cpu.cr4,
            efer: cpu.efer,
            debug: cpu.debug,
            fpu: cpu.fpu.0.to_vec(),
            xcr0: 1,
            msrs: cpu.msrs.save(),
            tsc_offset: cpu.tsc_offset,
            instructions: cpu.instructions(),
            interrupt_shadow: cpu.interrupt_shadow,
            halted: cpu.halted,
            nmi_blocked: cpu.nmi_blocked,
        }
    }

    /// Makes the CPU what `state` says. Bits that this CPU does not have are
    /// left out.
    pub fn restore(&mut self, state: &CpuState) {
        let cpu = &mut self.cpu;
        cpu.registers[..16].copy_from_slice(&state.registers);
        cpu.rip = state.rip;
        cpu.set_rflags(state.rflags);
        for (which, value) in [
            (segment::CS, state.cs),
            (segment::DS, state.ds),
            (segment::ES, state.es),
            (segment::SS, state.ss),
            (segment::FS, state.fs),
            (segment::GS, state.gs),
        ] {
            cpu.set_segment(which, value);
        }
        cpu.tr = state.tr;
        cpu.ldtr = state.ldtr;
        cpu.gdtr = state.gdtr;
        cpu.idtr = state.idtr;
        cpu.cpl = state.cpl & 3;
        cpu.cr0 = state.cr0 & crate::cpu::cr0::ALL;
        cpu.cr2 = state.cr2;
        cpu.cr3 = state.cr3;
        cpu.cr4 = state.cr4 & crate::cpu::cr4::ALL;
        cpu.efer = state.efer & (efer::WRITABLE | efer::LMA);
        cpu.debug = state.debug;
        let bytes = state.fpu.len().min(cpu.fpu.0.len());
        cpu.fpu.0[..bytes].copy_from_slice(&state.fpu[..bytes]);
        cpu.msrs = Msrs::restore(&state.msrs);
        cpu.tsc_offset = state.tsc_offset;
        cpu.instructions_limit = state.instructions.wrapping_add(cpu.budget as u64);
        cpu.interrupt_shadow = state.interrupt_shadow;
        cpu.halted = state.halted;
        cpu.nmi_blocked = state.nmi_blocked;
        cpu.update_mode();
        cpu.flush_everything();
        cpu.clear_code();
    }
}

impl Drop for SoftCpu {
    fn drop(&mut self) {
        self.cpu.machine.leave(&self.cpu.mailbox);
    }
}
