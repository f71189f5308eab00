//! Far branches, INT and IRET.
//!
//! Call gates and task gates are not offered: they raise #GP.

use iced_x86::{Code, Instruction, Mnemonic, OpKind};
use weft_vcpu::Segment;

use super::select::Operands;
use crate::access::is_canonical;
use crate::cpu::{Cpu, Faulted, register, rflags, segment, vector};
use crate::exceptions::Event;
use crate::flags;
use crate::op::{Handler, Op, Outcome};
use crate::requests::request;
use crate::segments::{Descriptor, rights};

impl Cpu {
    fn far_jump(&mut self, selector: u16, offset: u64) -> Result<(), Faulted> {
        if !self.is_protected() {
            self.load_real_code(selector);
            self.rip = offset;
            return Ok(());
        }
        let (descriptor, cpl) = self.code_for_jump(selector)?;
        self.check_target(&descriptor, offset)?;
        self.mark_descriptor(selector, rights::ACCESSED)?;
        self.set_code_segment(selector, &descriptor, cpl);
        self.rip = offset;
        Ok(())
    }

    /// #GP(0) where a far branch's target lies outside its code segment.
    fn check_target(&mut self, code: &Descriptor, offset: u64) -> Result<(), Faulted> {
        let inside = if self.is_long() && code.has(rights::LONG) {
            is_canonical(offset)
        } else {
            offset <= u64::from(code.limit)
        };
        if inside {
            Ok(())
        } else {
            Err(self.general_protection(0))
        }
    }

    fn far_call(
        &mut self,
        selector: u16,
        offset: u64,
        size: usize,
        back: u64,
    ) -> Result<(), Faulted> {
        let checked = if self.is_protected() {
            let (descriptor, cpl) = self.code_for_jump(selector)?;
            self.check_target(&descriptor, offset)?;
            self.mark_descriptor(selector, rights::ACCESSED)?;
            Some((descriptor, cpl))
        } else {
            None
        };
        let sp = self.registers[register::RSP];
        let code = u64::from(self.segments[segment::CS].selector);
        let pushed = self.push(size, code).and_then(|()| self.push(size, back));
        if let Err(faulted) = pushed {
            self.registers[register::RSP] = sp;
            return Err(faulted);
        }
        match checked {
            Some((descriptor, cpl)) => self.set_code_segment(selector, &descriptor, cpl),
            None => self.load_real_code(selector),
        }
        self.rip = offset;
        Ok(())
    }

    fn far_return(&mut self, size: usize, release: u64) -> Result<(), Faulted> {
        let step = size as u64;
        let offset = self.peek(size, 0)?;
        let selector = self.peek(size, step)? as u16;
        if !self.is_protected() {
            self.move_stack(2 * step + release);
            self.load_real_code(selector);
            self.rip = offset;
            return Ok(());
        }
        let (descriptor, cpl) = self.code_for_return(selector)?;
        self.check_target(&descriptor, offset)?;
        if cpl == self.cpl {
            self.move_stack(2 * step + release);
            self.set_code_segment(selector, &descriptor, cpl);
            self.rip = offset;
            return Ok(());
        }
        let sp = self.peek(size, 2 * step + release)?;
        let stack = self.peek(size, 3 * step + release)? as u16;
        let stack = self.stack_for_return(stack, cpl)?;
        self.set_code_segment(selector, &descriptor, cpl);
        self.outer_stack(stack, sp, size);
        self.move_stack(release);
        self.rip = offset;
        Ok(())
    }

    /// The stack of the outer level that was returned to.
    fn outer_stack(&mut self, stack: Segment, sp: u64, size: usize) {
        self.set_segment(segment::SS, stack);
        if size == 2 {
            self.set::<2>(register::RSP as u8, sp);
        } else {
            self.registers[register::RSP] = sp;
        }
        self.drop_inner_segments();
    }

    fn interrupt_return(&mut self, size: usize) -> Result<(), Faulted> {
        self.return_from_handler(size)?;
        if std::mem::take(&mut self.nmi_blocked) {
            // The next one may have come meanwhile.
            self.requests.ask(request::LOOK);
        }
        Ok(())
    }

    fn return_from_handler(&mut self, size: usize) -> Result<(), Faulted> {
        let step = size as u64;
        if self.is_protected() && self.rflags_system & rflags::NT != 0 {
            // Task switches are not offered.
            return Err(self.general_protection(0));
        }
        let offset = self.peek(size, 0)?;
        let selector = self.peek(size, step)? as u16;
        let flags = self.peek(size, 2 * step)?;
        if !self.is_protected() {
            self.move_stack(3 * step);
            self.load_real_code(selector);
            self.rip = offset;
            self.return_flags(flags, size, 0);
            return Ok(());
        }
        let (descriptor, cpl) = self.code_for_return(selector)?;
        self.check_target(&descriptor, offset)?;
        let before = self.cpl;
        // In 64-bit mode the stack is always taken back.
        if cpl == before && !self.mode.is_64() {
            self.move_stack(3 * step);
            self.set_code_segment(selector, &descriptor, cpl);
        } else {
            let sp = self.peek(size, 3 * step)?;
            let stack = self.peek(size, 4 * step)? as u16;
            let stack = self.stack_for_return(stack, cpl)?;
            self.set_code_segment(selector, &descriptor, cpl);
            self.set_segment(segment::SS, stack);
            if size == 2 {
                self.set::<2>(register::RSP as u8, sp);
            } else {
                self.registers[register::RSP] = sp;
            }
            if cpl != before {
                self.drop_inner_segments();
            }
        }
        self.rip = offset;
        self.return_flags(flags, size, before);
        Ok(())
    }

    /// The flags that IRET at level `cpl` takes.
    fn return_flags(&mut self, value: u64, size: usize, cpl: u8) {
        let before = self.rflags();
        let mut writable = rflags::TF | rflags::DF | rflags::NT | rflags::AC;
        writable |= rflags::ID | rflags::RF | flags::RFLAGS_ARITHMETIC;
        if cpl == 0 {
            writable |= rflags::IOPL;
        }
        if u64::from(cpl) <= (before & rflags::IOPL) >> 12 {
            writable |= rflags::IF;
        }
        if size == 2 {
            writable &= 0xffff;
        }
        if !self.breakpoints.stop_instructions() {
            writable &= !rflags::RF;
        }
        self.set_rflags(before & !writable | value & writable);
        self.interrupts_may_be_on();
    }

    fn software_interrupt(&mut self, vector: u8, back: u64) -> Result<(), Faulted> {
        self.try_deliver(&Event::software(vector), back)?;
        // It cleared TF.
        self.stepping = false;
        Ok(())
    }
}

/// Where a far pointer of `extra` bytes and a selector comes from.
fn far_pointer<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Result<(u16, u64), Faulted> {
    let size = usize::from(op.extra);
    if !MEMORY {
        return Ok(((op.immediate >> 32) as u16, op.immediate & 0xffff_ffff));
    }
    let address = cpu.address(op);
    let offset = match size {
        2 => cpu.load::<2>(address)?,
        4 => cpu.load::<4>(address)?,
        _ => cpu.load::<8>(address)?,
    };
    let selector = cpu.load::<2>(cpu.wrapped(address.wrapping_add(size as u64)))?;
    Ok((selector as u16, offset))
}

extern "C" fn jump<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let (selector, offset) = attempt!(cpu, far_pointer::<MEMORY>(cpu, op));
    attempt!(cpu, cpu.far_jump(selector, offset));
    Outcome::Leave
}

extern "C" fn call<const MEMORY: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let (selector, offset) = attempt!(cpu, far_pointer::<MEMORY>(cpu, op));
    let back = cpu.next_rip(op);
    attempt!(
        cpu,
        cpu.far_call(selector, offset, usize::from(op.extra), back)
    );
    Outcome::Leave
}

extern "C" fn ret(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.far_return(usize::from(op.extra), op.immediate));
    Outcome::Leave
}

extern "C" fn interrupt_return(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.interrupt_return(usize::from(op.extra)));
    if cpu.rflags_system & (rflags::TF | rflags::RF) != 0 {
        return Outcome::Leave;
    }
    Outcome::End
}

extern "C" fn interrupt(cpu: &mut Cpu, op: &Op) -> Outcome {
    let back = cpu.next_rip(op);
    attempt!(cpu, cpu.software_interrupt(op.immediate as u8, back));
    Outcome::Leave
}

extern "C" fn debug_trap(cpu: &mut Cpu, op: &Op) -> Outcome {
    cpu.trap_without_reason();
    cpu.leave_after(op)
}

extern "C" fn interrupt_on_overflow(cpu: &mut Cpu, op: &Op) -> Outcome {
    let back = cpu.next_rip(op);
    if cpu.flags & flags::OF != 0 {
        attempt!(cpu, cpu.software_interrupt(vector::OVERFLOW, back));
    } else {
        cpu.rip = cpu.wrapped(back);
    }
    Outcome::Leave
}

fn pointer_size(code: Code) -> Option<u8> {
    Some(match code {
        Code::Jmp_ptr1616 | Code::Jmp_m1616 | Code::Call_ptr1616 | Code::Call_m1616 => 2,
        Code::Jmp_ptr1632 | Code::Jmp_m1632 | Code::Call_ptr1632 | Code::Call_m1632 => 4,
        Code::Jmp_m1664 | Code::Call_m1664 => 8,
        Code::Retfw | Code::Retfw_imm16 | Code::Iretw => 2,
        Code::Retfd | Code::Retfd_imm16 | Code::Iretd => 4,
        Code::Retfq | Code::Retfq_imm16 | Code::Iretq => 8,
        _ => return None,
    })
}

fn immediate_pointer(instruction: &Instruction) -> Option<u64> {
    let selector = u64::from(instruction.far_branch_selector());
    Some(match instruction.op0_kind() {
        OpKind::FarBranch16 => selector << 32 | u64::from(instruction.far_branch16()),
        OpKind::FarBranch32 => selector << 32 | u64::from(instruction.far_branch32()),
        _ => return None,
    })
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let instruction = operands.instruction;
    Some(match instruction.mnemonic() {
        Mnemonic::Int => {
            op.immediate = instruction.immediate(0) & 0xff;
            interrupt
        }
        Mnemonic::Int3 => {
            op.immediate = u64::from(vector::BREAKPOINT);
            interrupt
        }
        Mnemonic::Int1 => debug_trap,
        Mnemonic::Into => interrupt_on_overflow,
        Mnemonic::Jmp | Mnemonic::Call => {
            op.extra = pointer_size(instruction.code())?;
            let call_it = instruction.mnemonic() == Mnemonic::Call;
            match (immediate_pointer(instruction), call_it) {
                (Some(pointer), _) => {
                    op.immediate = pointer;
                    if call_it {
                        call::<false>
                    } else {
                        jump::<false>
                    }
                }
                (None, true) => call::<true>,
                (None, false) => jump::<true>,
            }
        }
        Mnemonic::Retf => {
            op.extra = pointer_size(instruction.code())?;
            op.immediate = if instruction.op_count() == 1 {
                instruction.immediate(0) & 0xffff
            } else {
                0
            };
            ret
        }
        Mnemonic::Iret | Mnemonic::Iretd | Mnemonic::Iretq => {
            op.extra = pointer_size(instruction.code())?;
            interrupt_return
        }
        _ => return None,
    })
}
