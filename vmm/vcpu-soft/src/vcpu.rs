//! A vCPU from outside: made, run, stopped, saved and restored.

use std::sync::Arc;

use weft_vcpu::{CpuModel, CpuState, Environment, Exit, PageRun, Segment, Vcpu, VcpuError};

use crate::cpu::{Cpu, efer, segment};
use crate::interpret::xsave::component;
use crate::jit::Generated;
use crate::machine::SoftMachine;
use crate::msr::Msrs;
use crate::requests::{VcpuRequests, request};
use crate::run::Configuration;

/// Makes a vCPU come back from [`SoftCpu::run`], from any thread.
#[derive(Clone)]
pub struct Kick(Arc<VcpuRequests>);

impl weft_vcpu::Kick for Kick {
    fn kick(&self) {
        self.0.ask(request::KICK);
    }
}

/// One virtual CPU.
pub struct SoftCpu {
    cpu: Box<Cpu>,
    /// None: everything is interpreted.
    generated: Option<Generated>,
}

impl SoftCpu {
    /// A CPU as after power-on, one of `machine`'s.
    pub fn new(machine: &Arc<SoftMachine>, configuration: Configuration) -> std::io::Result<Self> {
        let generated = Generated::new(configuration.deterministic)?;
        let cpu = Cpu::new(machine, configuration)?;
        let mut soft = Self {
            cpu,
            generated: Some(generated),
        };
        soft.restore(&CpuState::reset());
        Ok(soft)
    }

    /// Runs the guest until something needs the vCPU's owner.
    pub fn run(&mut self, environment: &mut dyn Environment) -> Exit {
        self.cpu.run(environment, &mut self.generated)
    }

    /// From now on everything is interpreted.
    pub fn interpret_only(&mut self) {
        self.generated = None;
        self.cpu.code.forget_generated();
    }

    /// Code is translated after this many executions, the first of which is 1; for
    /// tests, which need not wait until it pays.
    pub fn translate_after(&mut self, executions: u32) {
        self.cpu.translated_after = executions.max(1);
    }

    /// What makes [`SoftCpu::run`] come back.
    pub fn kicker(&self) -> Kick {
        Kick(self.cpu.requests.clone())
    }

    /// The guest's time stamp counter.
    pub fn tsc(&self) -> u64 {
        self.cpu.tsc()
    }

    /// Makes the guest's TSC what the host's shows plus `offset`, modulo 2^64; of
    /// a deterministic CPU the count of its instructions plus `offset`.
    pub fn set_tsc_offset(&mut self, offset: u64) {
        self.cpu.tsc_offset = offset;
    }

    /// From now on at most this many instructions are executed before `run` comes
    /// back with [`Exit::Deadline`]; `None`: no limit. Of a deterministic CPU
    /// only: others do not count those that are translated.
    pub fn set_budget(&mut self, instructions: Option<u64>) {
        self.cpu.set_budget(instructions);
    }

    /// Instructions executed; of a CPU that is not deterministic only those that
    /// were interpreted.
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
            fpu: match cpu.configuration.model {
                CpuModel::V1 | CpuModel::V2 => cpu.fpu.0.to_vec(),
                CpuModel::V3 => cpu.extended_image().to_vec(),
            },
            xcr0: cpu.xcr0,
            msrs: cpu.msrs.save(),
            tsc_offset: cpu.tsc_offset,
            instructions: cpu.instructions(),
            interrupt_shadow: cpu.interrupt_shadow,
            halted: cpu.halted,
            nmi_blocked: cpu.nmi_blocked,
            nmi_waits: false,
            undelivered: None,
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
        cpu.cr4 = state.cr4 & cpu.cr4_bits();
        cpu.efer = state.efer & (efer::WRITABLE | efer::LMA);
        cpu.debug = state.debug;
        cpu.restore_saved(&state.fpu);
        cpu.xcr0 = match cpu.configuration.model {
            CpuModel::V1 | CpuModel::V2 => component::X87,
            CpuModel::V3 => state.xcr0 & component::ALL | component::X87,
        };
        cpu.msrs = Msrs::restore(&state.msrs);
        cpu.tsc_offset = state.tsc_offset;
        cpu.set_budget(None);
        cpu.set_instructions(state.instructions);
        cpu.interrupt_shadow = state.interrupt_shadow;
        cpu.shadow_rip = state.rip;
        cpu.halted = state.halted;
        cpu.nmi_blocked = state.nmi_blocked;
        cpu.stack_shadow = false;
        cpu.pending_debug = 0;
        cpu.breakpoints_changed();
        cpu.update_mode();
        cpu.flush_everything();
        cpu.forget_code(&mut self.generated);
    }
}

impl Vcpu for SoftCpu {
    fn run(&mut self, environment: &mut dyn Environment) -> Result<Exit, VcpuError> {
        Ok(self.run(environment))
    }

    fn save(&self) -> Result<CpuState, VcpuError> {
        Ok(self.save())
    }

    fn restore(&mut self, state: &CpuState) -> Result<(), VcpuError> {
        self.restore(state);
        Ok(())
    }

    fn set_tsc_offset(&mut self, offset: u64) -> Result<(), VcpuError> {
        self.set_tsc_offset(offset);
        Ok(())
    }

    fn set_budget(&mut self, instructions: Option<u64>) -> Result<(), VcpuError> {
        self.set_budget(instructions);
        Ok(())
    }

    fn instructions(&self) -> u64 {
        self.instructions()
    }

    fn take_working_set(&mut self) -> Vec<PageRun> {
        let cpu = &mut *self.cpu;
        let others = cpu.machine.recent_of_others(&cpu.recent);
        let cached = cpu.tlbs.iter().flat_map(|tlb| tlb.pages());
        cpu.recent.take(cached, others.iter().map(|other| &**other))
    }

    fn has_x2apic(&self) -> bool {
        true
    }

    fn kicker(&self) -> Arc<dyn weft_vcpu::Kick> {
        Arc::new(self.kicker())
    }
}

impl Drop for SoftCpu {
    fn drop(&mut self) {
        self.cpu.machine.leave(&self.cpu.requests);
        self.cpu.machine.forget(&self.cpu.recent);
    }
}
