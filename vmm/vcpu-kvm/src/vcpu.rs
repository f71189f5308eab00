//! One vCPU: into the guest, and out again for whatever it needs.

use std::sync::Arc;
use std::time::Instant;

use kvm_bindings::{CpuId, KVM_EXIT_IO_IN, kvm_run};
use kvm_ioctls::{VcpuExit, VcpuFd};
use weft_vcpu::{BackEndCounters, CpuState, Environment, Exit, Kick, Vcpu, VcpuError};

use super::counters::{ExitKind, Meter};
use super::kick::Kicker;
use super::quirks::Quirks;
use super::run_page::{KvmKicker, RunPage};
use super::shared::Shared;
use super::state::{self, Beside};
use super::{calls, failed, msrs, unsupported};

/// A virtual CPU in KVM.
pub struct KvmVcpu {
    fd: VcpuFd,
    shared: Arc<Shared>,
    quirks: Option<Arc<Quirks>>,
    kicker: Arc<KvmKicker>,
    meter: Arc<Meter>,
    /// HLT was executed and nothing woke the CPU since.
    halted: bool,
    /// CR8 at the last entry.
    priority: u8,
    /// KVM does not count; what a restored state brought is kept.
    instructions: u64,
    /// MSRs after reset.
    defaults: Vec<(u32, u64)>,
}

/// What an exit leads to.
enum Next {
    /// Into the guest again.
    Enter,
    /// Back to the owner.
    Return(Exit),
}

impl KvmVcpu {
    pub(super) fn new(
        shared: Arc<Shared>,
        quirks: Option<Arc<Quirks>>,
        id: u32,
        cpuid: &CpuId,
    ) -> Result<Self, VcpuError> {
        let fd = shared
            .vm
            .create_vcpu(id.into())
            .map_err(failed("KVM_CREATE_VCPU"))?;
        let defaults = state::defaults(&fd, &shared, cpuid)?;
        let page = RunPage::new(&fd).map_err(|source| VcpuError::Kernel {
            what: "preparing a vCPU's kicks",
            source,
        })?;
        let kicker = Kicker::new(page);
        if let Some(gate) = &shared.gate {
            gate.add(kicker.clone());
        }
        let mut vcpu = Self {
            fd,
            shared,
            quirks,
            kicker,
            meter: Arc::default(),
            halted: false,
            priority: 0,
            instructions: 0,
            defaults,
        };
        vcpu.restore(&CpuState::reset())?;
        Ok(vcpu)
    }

    /// Where its exits are counted.
    pub fn meter(&self) -> Arc<Meter> {
        self.meter.clone()
    }

    /// Whether a halted vCPU has a reason to go on.
    fn wakes(&mut self, environment: &mut dyn Environment) -> Result<bool, VcpuError> {
        if environment.nmi_take() {
            self.inject_nmi()?;
            return Ok(true);
        }
        Ok(self.fd.get_kvm_run().if_flag != 0 && environment.interrupt_waits())
    }

    fn inject_nmi(&self) -> Result<(), VcpuError> {
        self.meter.nmi();
        self.fd.nmi().map_err(failed("KVM_NMI"))
    }

    /// Gives KVM what waits: the task priority, an NMI, the interrupt of the
    /// highest priority; if it cannot take one now, it says when it can.
    fn prepare(&mut self, environment: &mut dyn Environment) -> Result<(), VcpuError> {
        if environment.nmi_take() {
            self.inject_nmi()?;
        }
        let mut waits = environment.interrupt_waits();
        let run = self.fd.get_kvm_run();
        if waits && run.ready_for_interrupt_injection != 0 && run.if_flag != 0 {
            // Stands for the state before the injection: no second one on top.
            run.ready_for_interrupt_injection = 0;
            if let Some(vector) = environment.interrupt_take() {
                calls::inject(&self.fd, vector)?;
                self.meter.interrupt();
            }
            waits = environment.interrupt_waits();
        }
        self.priority = environment.task_priority();
        let run = self.fd.get_kvm_run();
        run.request_interrupt_window = waits.into();
        run.cr8 = self.priority.into();
        Ok(())
    }

    /// Into the guest until it needs something, which is done.
    fn enter(&mut self, environment: &mut dyn Environment) -> Result<Next, VcpuError> {
        let entered = Instant::now();
        let exit = self.fd.run();
        let left = Instant::now();
        self.meter.inside(left - entered);
        // Before a device is asked: the local APIC's register is the same one.
        let priority = self.kicker.control().task_priority();
        if priority != self.priority {
            environment.set_task_priority(priority);
        }
        let (kind, next) = match exit {
            Ok(VcpuExit::IoIn(..)) => {
                port_access(self.fd.get_kvm_run(), environment);
                (ExitKind::PortRead, Next::Enter)
            }
            Ok(VcpuExit::IoOut(..)) => {
                port_access(self.fd.get_kvm_run(), environment);
                (ExitKind::PortWrite, Next::Enter)
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                note_register(&self.shared, address, data.len())?;
                load(address, data, environment);
                (ExitKind::MmioRead, Next::Enter)
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                note_register(&self.shared, address, data.len())?;
                store(address, data, environment);
                (ExitKind::MmioWrite, Next::Enter)
            }
            Ok(VcpuExit::X86Rdmsr(read)) => {
                match environment.msr_read(read.index) {
                    Some(value) => (*read.data, *read.error) = (value, 0),
                    None => *read.error = 1,
                }
                (ExitKind::MsrRead, Next::Enter)
            }
            Ok(VcpuExit::X86Wrmsr(write)) => {
                let (index, value) = (write.index, write.data);
                *write.error = 0;
                if !self.msr_write(index, value, environment)? {
                    refuse_msr(self.fd.get_kvm_run());
                }
                (ExitKind::MsrWrite, Next::Enter)
            }
            Ok(VcpuExit::Hlt) => {
                self.halted = true;
                (ExitKind::Halt, Next::Enter)
            }
            Ok(VcpuExit::IrqWindowOpen) => (ExitKind::InterruptWindow, Next::Enter),
            Ok(VcpuExit::SetTpr) => (ExitKind::TaskPriority, Next::Enter),
            Ok(VcpuExit::Intr) => (ExitKind::Interrupted, self.interrupted()),
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                (ExitKind::Interrupted, self.interrupted())
            }
            Ok(VcpuExit::Shutdown) => (ExitKind::Other, Next::Return(Exit::TripleFault)),
            Ok(VcpuExit::InternalError) => {
                self.emulate()?;
                (ExitKind::Quirk, Next::Enter)
            }
            Ok(other) => {
                let what = describe(&other);
                return Err(unsupported(format!("{what}, {}", self.place())));
            }
            Err(error) => return Err(failed("KVM_RUN")(error)),
        };
        self.meter.exit(kind, left.elapsed());
        Ok(next)
    }

    /// KVM_RUN was cut short: by a kick, or by another signal.
    fn interrupted(&self) -> Next {
        match self.kicker.was_kicked() {
            true => Next::Return(Exit::Kicked),
            false => Next::Enter,
        }
    }

    fn msr_write(
        &mut self,
        index: u32,
        value: u64,
        environment: &mut dyn Environment,
    ) -> Result<bool, VcpuError> {
        match &self.quirks {
            Some(quirks) if index == msrs::LSTAR => {
                msrs::write(&self.fd, &[(index, value)])?;
                quirks.system_call_entry(&self.fd, &self.shared.ram, value)?;
                Ok(true)
            }
            _ => Ok(environment.msr_write(index, value)),
        }
    }

    /// An instruction that KVM does not know.
    fn emulate(&mut self) -> Result<(), VcpuError> {
        let done = match &self.quirks {
            Some(quirks) => quirks.emulate(&self.fd, &self.shared)?,
            None => false,
        };
        if !done {
            return Err(unsupported(format!(
                "an instruction that it cannot emulate, {}",
                self.place()
            )));
        }
        // What KVM said was before the instruction, which may have raised an
        // exception: no interrupt beside it.
        self.fd.get_kvm_run().ready_for_interrupt_injection = 0;
        Ok(())
    }

    /// Where the guest is, for a message: address and bytes of the instruction.
    fn place(&self) -> String {
        super::quirks::place(&self.fd, &self.shared.ram)
    }

    /// Goes on only when no shadow is in use that had to go. Nothing may clear
    /// `immediate_exit` between this and KVM_RUN.
    fn pass_gate(&self) -> Result<(), VcpuError> {
        let Some(gate) = &self.shared.gate else {
            return Ok(());
        };
        while gate.is_closed() {
            gate.open(&self.shared.vm)?;
            self.kicker.clear_immediate_exit();
        }
        Ok(())
    }

    /// Lets KVM say whether it takes interrupts, which it does only on the way
    /// out of KVM_RUN.
    fn refresh(&mut self) -> Result<(), VcpuError> {
        self.kicker.set_immediate_exit();
        let answer = self.fd.run().map(drop);
        self.kicker.clear_immediate_exit();
        match answer {
            Err(error) if error.errno() == libc::EINTR => Ok(()),
            Err(error) => Err(failed("KVM_RUN")(error)),
            Ok(()) => Err(unsupported("an exit without entering".into())),
        }
    }
}

impl Vcpu for KvmVcpu {
    fn run(&mut self, environment: &mut dyn Environment) -> Result<Exit, VcpuError> {
        // SAFETY: takes nothing, changes nothing.
        let thread = unsafe { libc::gettid() };
        let Some(_listening) = self.kicker.listen(thread) else {
            return Ok(Exit::Kicked);
        };
        loop {
            if self.halted {
                if !self.wakes(environment)? {
                    return Ok(Exit::Halted);
                }
                self.halted = false;
            }
            self.prepare(environment)?;
            self.pass_gate()?;
            if let Next::Return(exit) = self.enter(environment)? {
                return Ok(exit);
            }
        }
    }

    fn save(&self) -> Result<CpuState, VcpuError> {
        let beside = Beside {
            halted: self.halted,
            instructions: self.instructions,
        };
        state::save(&self.fd, &self.shared, beside)
    }

    fn restore(&mut self, state: &CpuState) -> Result<(), VcpuError> {
        state::restore(&self.fd, &self.shared, &self.defaults, state)?;
        self.halted = state.halted;
        self.instructions = state.instructions;
        self.refresh()
    }

    fn set_tsc_offset(&mut self, offset: u64) -> Result<(), VcpuError> {
        match self.shared.fixed_tsc_offset {
            None => Ok(calls::set_tsc_offset(&self.fd, offset)?),
            Some(fixed) if fixed == offset => Ok(()),
            Some(fixed) => Err(unsupported(format!(
                "a TSC offset of {offset:#x}, but this back end's is always {fixed:#x}"
            ))),
        }
    }

    fn instructions(&self) -> u64 {
        self.instructions
    }

    fn back_end_counters(&self) -> Option<Arc<dyn BackEndCounters>> {
        Some(self.meter.clone())
    }

    fn kicker(&self) -> Arc<dyn Kick> {
        self.kicker.clone()
    }
}

/// IN and OUT, and their string forms: `count` accesses of `size` bytes.
fn port_access(run: &mut kvm_run, environment: &mut dyn Environment) {
    // SAFETY: called after an exit of this kind only; the union's member is plain data.
    let io = unsafe { run.__bindgen_anon_1.io };
    let size = usize::from(io.size).max(1);
    let start = std::ptr::from_mut(run).cast::<u8>();
    // SAFETY: KVM keeps the data at this offset from `kvm_run`, inside the mapping
    // of the size that KVM_GET_VCPU_MMAP_SIZE said, `count` times `size` bytes.
    let data = unsafe {
        std::slice::from_raw_parts_mut(start.add(io.data_offset as usize), size * io.count as usize)
    };
    for access in data.chunks_exact_mut(size) {
        if u32::from(io.direction) == KVM_EXIT_IO_IN {
            environment.port_read(io.port, access);
        } else {
            environment.port_write(io.port, access);
        }
    }
}

/// KVM may have an entry for the page of a register now.
fn note_register(shared: &Shared, address: u64, length: usize) -> Result<(), VcpuError> {
    let Some(gate) = &shared.gate else {
        return Ok(());
    };
    let last = address.saturating_add(length.saturating_sub(1) as u64);
    for place in [address, last] {
        gate.used(place).map_err(|source| VcpuError::Kernel {
            what: "stopping vCPUs that use shadow page tables",
            source,
        })?;
    }
    Ok(())
}

/// Accesses of sizes that devices know: an odd one (a part of one that crosses a
/// page) goes byte by byte.
fn access_size(length: usize) -> usize {
    match length {
        1 | 2 | 4 | 8 => length,
        _ => 1,
    }
}

fn load(address: u64, data: &mut [u8], environment: &mut dyn Environment) {
    let size = access_size(data.len());
    for (number, part) in data.chunks_mut(size).enumerate() {
        environment.mmio_read(address.wrapping_add((number * size) as u64), part);
    }
}

fn store(address: u64, data: &[u8], environment: &mut dyn Environment) {
    let size = access_size(data.len());
    for (number, part) in data.chunks(size).enumerate() {
        environment.mmio_write(address.wrapping_add((number * size) as u64), part);
    }
}

/// An exit that nobody expects.
fn describe(exit: &VcpuExit) -> String {
    match exit {
        VcpuExit::FailEntry(reason, cpu) => {
            format!("entering the guest on host CPU {cpu}: reason {reason:#x}")
        }
        VcpuExit::MemoryFault { gpa, size, .. } => {
            format!("an access to {size} bytes at guest-physical {gpa:#x}")
        }
        other => format!("exit {other:?}"),
    }
}

/// Makes the WRMSR that is under way raise #GP.
fn refuse_msr(run: &mut kvm_run) {
    run.__bindgen_anon_1.msr.error = 1;
}
