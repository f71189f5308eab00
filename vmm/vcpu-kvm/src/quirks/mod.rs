//! What a KVM without hardware virtualisation needs done for it. There user mode
//! runs natively, and kernel mode in KVM's instruction emulator, which lacks some
//! instructions that Linux uses.
//!
//! | file | does |
//! | --- | --- |
//! | `system_call` | lets SYSCALL reach kernel mode |
//! | `breakpoint` | INT3 |
//! | `wait` | FWAIT |
//! | `alignment_check` | CLAC, STAC |
//! | `popcnt`, `cmpxchg16b` | the instructions of those names |
//! | `xsave` | XSAVE, XSAVEOPT, XSAVEC, XRSTOR |
//! | `memory` | guest memory by linear address, with the processor's faults |
//! | `step` | an instruction to be done, and how it ended |
//!
//! An instruction is done as the processor would do it, exceptions included. Most
//! are rare once the kernel's command line has the words of `COMMAND_LINE`; all were seen while Linux booted.

mod alignment_check;
mod breakpoint;
mod cmpxchg16b;
mod memory;
mod popcnt;
mod step;
mod system_call;
mod wait;
mod xsave;

use std::sync::Mutex;

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic};
use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::VcpuFd;
use weft_guest_memory::Ram;
use weft_vcpu::VcpuError;

use memory::{Control, Fault, GuestMemory};
use step::{ExtendedState, Failure, Outcome, PAGE_FAULT, REFUSED, Registers, Step};

use super::shared::Shared;
use super::{failed, state, unsupported};

/// Longest instruction, in bytes.
const INSTRUCTION_MAX: usize = 15;

/// For the log.
pub(super) const NAMES: &[&str] = &[
    "syscall through the page fault's gate",
    "int3, fwait, clac, stac, popcnt, cmpxchg16b, xsave and xrstor done here",
    "cmpxchg16b and pcid hidden",
];

/// Words that a Linux kernel's command line needs. `clearcpuid` takes away what
/// this KVM cannot hide in CPUID: instructions that would be done here, at some
/// microseconds each (SMAP's two at every entry of the kernel), or string moves of
/// a microsecond a byte. `nopti`: see `system_call`. The last two save seconds of
/// patching and of page table changes at boot.
pub(super) const COMMAND_LINE: &[&str] = &[
    "clearcpuid=smap,erms,fsrm,popcnt",
    "nopti",
    "noreplace-smp",
    "rodata=off",
];

/// What is done for a machine.
pub(super) struct Quirks {
    layout: xsave::Layout,
    /// Held while the page fault's gate is changed: vCPUs write LSTAR at once.
    gate: Mutex<()>,
}

impl Quirks {
    pub(super) fn new(components: [(u32, u32, bool); 64]) -> Self {
        Self {
            layout: xsave::Layout(components),
            gate: Mutex::new(()),
        }
    }

    /// The guest wrote LSTAR.
    pub(super) fn system_call_entry(
        &self,
        vcpu: &VcpuFd,
        ram: &Ram,
        lstar: u64,
    ) -> Result<(), VcpuError> {
        let (regs, sregs) = registers(vcpu)?;
        let memory = GuestMemory {
            ram,
            control: control(&regs, &sregs),
        };
        if !memory.control.is_known() {
            return Err(unsupported("SYSCALL outside of four-level paging".into()));
        }
        let _gate = self
            .gate
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        system_call::redirect(&memory, sregs.idt.base, lstar)
            .map(drop)
            .map_err(|reason| unsupported(format!("SYSCALL: {reason}")))
    }

    /// Does the instruction at which the vCPU stopped; `false`: it is not known here.
    pub(super) fn emulate(&self, vcpu: &VcpuFd, shared: &Shared) -> Result<bool, VcpuError> {
        let (regs, sregs) = registers(vcpu)?;
        let memory = GuestMemory {
            ram: &shared.ram,
            control: control(&regs, &sregs),
        };
        if !memory.control.is_known() || sregs.cs.l == 0 {
            return Ok(false);
        }
        let Some(instruction) = decode(&memory, regs.rip) else {
            return Ok(false);
        };
        let extended = VcpuState { vcpu, shared };
        let xcrs = vcpu.get_xcrs().map_err(failed("KVM_GET_XCRS"))?;
        let mut registers = Registers {
            general: state::general(&regs),
            rip: regs.rip,
            rflags: regs.rflags,
            fs_base: sregs.fs.base,
            gs_base: sregs.gs.base,
            // The only register of its kind.
            xcr0: xcrs.xcrs[0].value,
        };
        let outcome = self.step(&mut Step {
            instruction,
            registers: &mut registers,
            memory: &memory,
            extended: &extended,
        });
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(Failure::Memory(Fault::Page { address, code })) => {
                let mut sregs = sregs;
                sregs.cr2 = address;
                vcpu.set_sregs(&sregs).map_err(failed("KVM_SET_SREGS"))?;
                Outcome::Raise(PAGE_FAULT, Some(code))
            }
            Err(Failure::Memory(Fault::Address)) => REFUSED,
            Err(Failure::Memory(Fault::NotMemory)) => return Ok(false),
            Err(Failure::Extended(reason)) => return Err(unsupported(reason)),
        };
        finish(vcpu, &registers, instruction.next_ip(), outcome)
    }

    fn step(&self, step: &mut Step) -> Result<Outcome, Failure> {
        use Mnemonic as M;
        match step.instruction.mnemonic() {
            M::Int3 => breakpoint::int3(step),
            M::Wait => wait::fwait(step),
            M::Clac | M::Stac => alignment_check::clac_stac(step),
            M::Popcnt => popcnt::popcnt(step),
            M::Cmpxchg16b => cmpxchg16b::cmpxchg16b(step),
            M::Xsave | M::Xsave64 | M::Xsaveopt | M::Xsaveopt64 | M::Xsavec | M::Xsavec64 => {
                xsave::save(step, &self.layout)
            }
            M::Xrstor | M::Xrstor64 => xsave::restore(step, &self.layout),
            _ => Ok(Outcome::Unknown),
        }
    }
}

/// Where the guest is, for a message: address and bytes of the instruction.
pub(super) fn place(vcpu: &VcpuFd, ram: &Ram) -> String {
    let Ok((regs, sregs)) = registers(vcpu) else {
        return "at an unknown place".into();
    };
    let linear = sregs.cs.base.wrapping_add(regs.rip);
    let mut text = format!("at {:#x}:{:#x}", sregs.cs.selector, regs.rip);
    for offset in 0..INSTRUCTION_MAX as u64 {
        use vm_memory::{Bytes, GuestAddress};
        let byte = vcpu
            .translate_gva(linear.wrapping_add(offset))
            .ok()
            .filter(|translation| translation.valid != 0)
            .map(|translation| GuestAddress(translation.physical_address))
            .and_then(|address| ram.guest().read_obj::<u8>(address).ok());
        let Some(byte) = byte else {
            break;
        };
        text.push_str(if offset == 0 { ", bytes " } else { " " });
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

fn registers(vcpu: &VcpuFd) -> Result<(kvm_regs, kvm_sregs), VcpuError> {
    let regs = vcpu.get_regs().map_err(failed("KVM_GET_REGS"))?;
    let sregs = vcpu.get_sregs().map_err(failed("KVM_GET_SREGS"))?;
    Ok((regs, sregs))
}

fn control(regs: &kvm_regs, sregs: &kvm_sregs) -> Control {
    Control {
        cr0: sregs.cr0,
        cr3: sregs.cr3,
        cr4: sregs.cr4,
        efer: sregs.efer,
        rflags: regs.rflags,
    }
}

/// `None` where no whole instruction can be read.
fn decode(memory: &GuestMemory, rip: u64) -> Option<Instruction> {
    let mut bytes = [0; INSTRUCTION_MAX];
    let readable = (1..=INSTRUCTION_MAX)
        .rev()
        .find(|length| memory.read(rip, &mut bytes[..*length]).is_ok())?;
    let mut decoder = Decoder::with_ip(64, &bytes[..readable], rip, DecoderOptions::NONE);
    let instruction = decoder.decode();
    (!instruction.is_invalid()).then_some(instruction)
}

/// Puts the registers back, behind the instruction or at its exception.
fn finish(
    vcpu: &VcpuFd,
    registers: &Registers,
    next: u64,
    outcome: Outcome,
) -> Result<bool, VcpuError> {
    let (rip, exception) = match outcome {
        Outcome::Unknown => return Ok(false),
        Outcome::Done => (next, None),
        Outcome::Trap(vector) => (next, Some((vector, None))),
        Outcome::Raise(vector, code) => (registers.rip, Some((vector, code))),
    };
    let regs = state::set_general(registers.general, rip, registers.rflags);
    vcpu.set_regs(&regs).map_err(failed("KVM_SET_REGS"))?;
    if let Some((vector, code)) = exception {
        let mut events = vcpu
            .get_vcpu_events()
            .map_err(failed("KVM_GET_VCPU_EVENTS"))?;
        state::set_exception(&mut events, vector, code);
        vcpu.set_vcpu_events(&events)
            .map_err(failed("KVM_SET_VCPU_EVENTS"))?;
    }
    Ok(true)
}

/// The extended state of a vCPU.
struct VcpuState<'a> {
    vcpu: &'a VcpuFd,
    shared: &'a Shared,
}

impl ExtendedState for VcpuState<'_> {
    fn get(&self) -> Result<Vec<u8>, String> {
        state::read_extended(self.vcpu, self.shared.xsave_bytes).map_err(|error| error.to_string())
    }

    fn set(&self, area: &[u8]) -> Result<(), String> {
        state::write_extended(self.vcpu, self.shared.xsave_bytes, area)
            .map_err(|error| error.to_string())
    }
}
