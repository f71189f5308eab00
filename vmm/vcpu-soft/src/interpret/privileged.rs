//! Control and debug registers, MSRs, CPUID, clocks, interrupt flag, HLT.

use iced_x86::{Mnemonic, Register};

use super::operand::mask;
use super::select::{Operands, Shape};
use crate::cpu::{Cpu, Faulted, cr0, cr4, register, rflags};
use crate::cpuid::{self, Extended};
use crate::debug::{dr6, dr7};
use crate::op::{Handler, Op, Outcome};
use crate::requests::request;

const RAX: usize = register::RAX;
const RBX: usize = register::RBX;
const RCX: usize = register::RCX;
const RDX: usize = register::RDX;

impl Cpu {
    /// #GP(0) but for the kernel.
    #[inline(always)]
    pub fn privileged(&mut self) -> Result<(), Faulted> {
        if self.cpl == 0 {
            Ok(())
        } else {
            Err(self.general_protection(0))
        }
    }

    /// #GP(0) where CR4.UMIP keeps an instruction from level 3.
    #[inline(always)]
    pub fn privileged_by_umip(&mut self) -> Result<(), Faulted> {
        if self.cr4 & cr4::UMIP == 0 {
            return Ok(());
        }
        self.privileged()
    }

    /// IF may have been set: an interrupt that waits is taken at the next block
    /// boundary.
    #[inline(always)]
    pub fn interrupts_may_be_on(&mut self) {
        if self.interrupt_waits && self.rflags_system & rflags::IF != 0 {
            self.requests.ask(request::LOOK);
        }
    }

    /// The end of STI and of loads of SS (`stack`), which end their block: no
    /// interrupt before the next instruction is executed.
    ///
    /// Where nothing is asked there is nothing to hold back, and the way to the
    /// outer loop is saved: the shadow is void once RIP has moved on. It seems
    /// to be there again when RIP comes back, and then an interrupt comes one
    /// instruction late; who counts instructions cannot have that.
    pub fn begin_shadow(&mut self, op: &Op, stack: bool) -> Outcome {
        self.interrupt_shadow = true;
        self.stack_shadow = stack;
        self.shadow_rip = self.wrapped(self.next_rip(op));
        if self.configuration.deterministic || self.is_wanted() {
            self.leave_after(op)
        } else {
            Outcome::Continue
        }
    }

    /// Ends the block behind `op`, for the outer loop.
    pub fn leave_after(&mut self, op: &Op) -> Outcome {
        self.rip = self.wrapped(self.next_rip(op));
        Outcome::Leave
    }

    /// On with the next instruction, or out where a breakpoint was hit.
    #[inline(always)]
    pub fn go_on_or_trap(&mut self, op: &Op) -> Outcome {
        if self.pending_debug == 0 {
            Outcome::Continue
        } else {
            self.leave_after(op)
        }
    }

    fn set_pair(&mut self, value: u64) {
        self.registers[RAX] = value & 0xffff_ffff;
        self.registers[RDX] = value >> 32;
    }

    fn may_touch_interrupts(&mut self) -> Result<(), Faulted> {
        let level = (self.rflags_system & rflags::IOPL) >> 12;
        if self.is_protected() && u64::from(self.cpl) > level {
            return Err(self.general_protection(0));
        }
        Ok(())
    }
}

extern "C" fn clear_interrupts(cpu: &mut Cpu, _: &Op) -> Outcome {
    attempt!(cpu, cpu.may_touch_interrupts());
    cpu.rflags_system &= !rflags::IF;
    Outcome::Continue
}

extern "C" fn set_interrupts(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.may_touch_interrupts());
    if cpu.rflags_system & rflags::IF == 0 {
        cpu.rflags_system |= rflags::IF;
        cpu.interrupts_may_be_on();
        return cpu.begin_shadow(op, false);
    }
    Outcome::Continue
}

extern "C" fn clear_direction(cpu: &mut Cpu, _: &Op) -> Outcome {
    cpu.rflags_system &= !rflags::DF;
    Outcome::Continue
}

extern "C" fn set_direction(cpu: &mut Cpu, _: &Op) -> Outcome {
    cpu.rflags_system |= rflags::DF;
    Outcome::Continue
}

/// STAC, or CLAC where not `OPEN`.
extern "C" fn access_user_pages<const OPEN: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    if cpu.cpl != 0 {
        return super::undefined(cpu, op);
    }
    if OPEN {
        cpu.rflags_system |= rflags::AC;
    } else if cpu.rflags_system & rflags::AC != 0 {
        cpu.rflags_system &= !rflags::AC;
        cpu.tlbs[0].close_user_pages();
    }
    Outcome::Continue
}

extern "C" fn halt(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    cpu.halted = true;
    cpu.interrupt_shadow = false;
    cpu.leave_after(op)
}

extern "C" fn identify(cpu: &mut Cpu, _: &Op) -> Outcome {
    let leaf = cpu.registers[RAX] as u32;
    let subleaf = cpu.registers[RCX] as u32;
    let extended = Extended {
        on: cpu.cr4 & cr4::OSXSAVE != 0,
        xcr0: cpu.xcr0,
    };
    let mut answer = cpuid::cpuid(&cpu.configuration, extended, leaf, subleaf);
    if cpuid::tells_of_apic(leaf) && !cpu.has_apic() {
        answer[3] &= !cpuid::APIC;
    }
    let [eax, ebx, ecx, edx] = answer;
    cpu.registers[RAX] = u64::from(eax);
    cpu.registers[RBX] = u64::from(ebx);
    cpu.registers[RCX] = u64::from(ecx);
    cpu.registers[RDX] = u64::from(edx);
    Outcome::Continue
}

extern "C" fn read_msr(cpu: &mut Cpu, _: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    let index = cpu.registers[RCX] as u32;
    let value = attempt!(cpu, cpu.read_msr(index));
    cpu.set_pair(value);
    Outcome::Continue
}

extern "C" fn write_msr(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    let index = cpu.registers[RCX] as u32;
    let value = cpu.registers[RDX] << 32 | cpu.registers[RAX] & 0xffff_ffff;
    attempt!(cpu, cpu.write_msr(index, value));
    cpu.leave_after(op)
}

/// RDTSC, and RDTSCP where `AUX`.
extern "C" fn read_clock<const AUX: bool>(cpu: &mut Cpu, _: &Op) -> Outcome {
    if cpu.cr4 & cr4::TSD != 0 {
        attempt!(cpu, cpu.privileged());
    }
    let value = cpu.tsc();
    cpu.set_pair(value);
    if AUX {
        cpu.registers[RCX] = cpu.msrs.tsc_aux & 0xffff_ffff;
    }
    Outcome::Continue
}

/// RDPMC: there are no counters.
extern "C" fn read_counter(cpu: &mut Cpu, _: &Op) -> Outcome {
    let faulted = cpu.general_protection(0);
    cpu.outcome(faulted)
}

/// MOV to a control register: `extra` is its number.
extern "C" fn write_control(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    let mut value = cpu.register(op.source);
    if !cpu.mode.is_64() {
        value &= 0xffff_ffff;
    }
    match op.extra {
        0 => attempt!(cpu, cpu.set_cr0(value)),
        2 => cpu.cr2 = value,
        3 => attempt!(cpu, cpu.set_cr3(value)),
        4 => attempt!(cpu, cpu.set_cr4(value)),
        8 => attempt!(cpu, cpu.set_cr8(value)),
        _ => return super::undefined(cpu, op),
    }
    cpu.leave_after(op)
}

/// MOV from a control register.
extern "C" fn read_control(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    let value = match op.extra {
        0 => cpu.cr0,
        2 => cpu.cr2,
        3 => cpu.cr3,
        4 => cpu.cr4,
        8 => cpu.cr8(),
        _ => return super::undefined(cpu, op),
    };
    cpu.set_register(op.destination, cpu.wrapped(value));
    Outcome::Continue
}

/// The place of a debug register in `Cpu::debug`.
fn debug_index(cpu: &Cpu, number: u8) -> Option<usize> {
    match number {
        0..=3 => Some(usize::from(number)),
        4 | 5 if cpu.cr4 & cr4::DE != 0 => None,
        4 | 6 => Some(4),
        _ => Some(5),
    }
}

/// MOV to a debug register.
extern "C" fn write_debug(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    let Some(index) = debug_index(cpu, op.extra) else {
        return super::undefined(cpu, op);
    };
    attempt!(cpu, cpu.detect_access());
    let value = cpu.register(op.source);
    if index >= 4 && value >> 32 != 0 && cpu.mode.is_64() {
        let faulted = cpu.general_protection(0);
        return cpu.outcome(faulted);
    }
    cpu.debug[index] = match index {
        4 => value & dr6::WRITABLE | dr6::ONES,
        5 => value & dr7::WRITABLE | dr7::ONES,
        _ => value,
    };
    cpu.breakpoints_changed();
    cpu.leave_after(op)
}

extern "C" fn read_debug(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    let Some(index) = debug_index(cpu, op.extra) else {
        return super::undefined(cpu, op);
    };
    attempt!(cpu, cpu.detect_access());
    cpu.set_register(op.destination, cpu.wrapped(cpu.debug[index]));
    Outcome::Continue
}

extern "C" fn clear_task_switched(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    cpu.cr0 &= !cr0::TS;
    cpu.update_mode();
    cpu.leave_after(op)
}

/// LMSW: sets PE, and the three bits behind it, never clears PE.
extern "C" fn load_status<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    let word = if MEMORY {
        attempt!(cpu, cpu.load::<2>(cpu.address(op)))
    } else {
        cpu.register(op.destination)
    };
    let low = cr0::PE | cr0::MP | cr0::EM | cr0::TS;
    let value = cpu.cr0 & !low | word & low | cpu.cr0 & cr0::PE;
    attempt!(cpu, cpu.set_cr0(value));
    cpu.leave_after(op)
}

extern "C" fn store_status<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged_by_umip());
    if MEMORY {
        attempt!(cpu, cpu.store::<2>(cpu.address(op), cpu.cr0));
        return Outcome::Continue;
    }
    match op.extra {
        2 => cpu.set::<2>(op.destination, cpu.cr0 & mask::<2>()),
        4 => cpu.set::<4>(op.destination, cpu.cr0),
        _ => cpu.set::<8>(op.destination, cpu.cr0),
    }
    Outcome::Continue
}

extern "C" fn invalidate_page(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    cpu.flush_page(cpu.address(op));
    Outcome::Continue
}

/// INVD, WBINVD: the host keeps its caches coherent.
extern "C" fn write_back(cpu: &mut Cpu, _: &Op) -> Outcome {
    attempt!(cpu, cpu.privileged());
    Outcome::Continue
}

fn control_number(register: Register) -> u8 {
    register.number() as u8
}

fn select_move(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let (to, from) = (
        operands.instruction.op0_register(),
        operands.instruction.op1_register(),
    );
    if to.is_cr() {
        op.extra = control_number(to);
        return Some(write_control);
    }
    if from.is_cr() {
        op.extra = control_number(from);
        return Some(read_control);
    }
    if to.is_dr() {
        op.extra = control_number(to);
        return Some(write_debug);
    }
    if from.is_dr() {
        op.extra = control_number(from);
        return Some(read_debug);
    }
    None
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let memory = operands.shape == Shape::Memory;
    Some(match operands.instruction.mnemonic() {
        Mnemonic::Cli => clear_interrupts,
        Mnemonic::Sti => set_interrupts,
        Mnemonic::Cld => clear_direction,
        Mnemonic::Std => set_direction,
        Mnemonic::Stac => access_user_pages::<true>,
        Mnemonic::Clac => access_user_pages::<false>,
        Mnemonic::Hlt => halt,
        Mnemonic::Cpuid => identify,
        Mnemonic::Rdmsr => read_msr,
        Mnemonic::Wrmsr => write_msr,
        Mnemonic::Rdtsc => read_clock::<false>,
        Mnemonic::Rdtscp => read_clock::<true>,
        Mnemonic::Rdpmc => read_counter,
        Mnemonic::Mov => return select_move(operands, op),
        Mnemonic::Clts => clear_task_switched,
        Mnemonic::Lmsw if memory => load_status::<true>,
        Mnemonic::Lmsw => load_status::<false>,
        Mnemonic::Smsw if memory => store_status::<true>,
        Mnemonic::Smsw => {
            op.extra = operands.size as u8;
            store_status::<false>
        }
        Mnemonic::Invlpg => invalidate_page,
        Mnemonic::Invd | Mnemonic::Wbinvd => write_back,
        _ => return None,
    })
}
