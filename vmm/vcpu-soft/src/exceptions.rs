//! How exceptions and interrupts get to the guest (Intel SDM volume 3,
//! chapter 6).
//!
//! Delivery first reads all it needs and writes the frame to the new stack, and
//! changes registers only when nothing can fail any more. A fault meanwhile
//! becomes a new event: a double fault where the rules say so, and a fault while
//! a double fault is delivered ends the machine.

use thiserror::Error;
use weft_vcpu::Segment;

use crate::access::is_canonical;
use crate::cpu::{Cpu, Fault, Faulted, register, rflags, segment, vector};
use crate::segments::{Descriptor, rights, selector_error};

/// Faulted while delivering a double fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a fault while a double fault was delivered")]
pub struct TripleFault;

/// Where an event comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// An exception that an instruction raised.
    Exception,
    /// INT n, INT3, INTO.
    Software,
    /// An interrupt, or NMI.
    External,
}

/// Something to be delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its number.
    pub vector: u8,
    /// Its error code, if it has one.
    pub error: Option<u32>,
    /// From where.
    pub origin: Origin,
}

/// Exceptions by how they combine (Intel SDM volume 3, table 6-5).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Benign,
    Contributory,
    PageFault,
}

fn class(event: &Event) -> Class {
    if event.origin != Origin::Exception {
        return Class::Benign;
    }
    match event.vector {
        vector::DIVIDE
        | vector::INVALID_TSS
        | vector::NOT_PRESENT
        | vector::STACK
        | vector::GENERAL_PROTECTION => Class::Contributory,
        vector::PAGE_FAULT => Class::PageFault,
        _ => Class::Benign,
    }
}

impl From<Fault> for Event {
    fn from(fault: Fault) -> Self {
        Self {
            vector: fault.vector,
            error: fault.has_error.then_some(fault.error),
            origin: Origin::Exception,
        }
    }
}

impl Event {
    /// An interrupt.
    pub fn external(vector: u8) -> Self {
        Self {
            vector,
            error: None,
            origin: Origin::External,
        }
    }

    /// INT n.
    pub fn software(vector: u8) -> Self {
        Self {
            vector,
            error: None,
            origin: Origin::Software,
        }
    }

    /// Whether the saved RFLAGS have RF set: the instruction is not to stop at
    /// its breakpoint again.
    fn is_fault(&self) -> bool {
        self.origin == Origin::Exception
            && !matches!(
                self.vector,
                vector::DEBUG | vector::BREAKPOINT | vector::OVERFLOW | vector::DOUBLE_FAULT
            )
    }

    /// The bit of an error code that says that the program did not ask for it.
    fn external_bit(&self) -> u32 {
        u32::from(self.origin != Origin::Software)
    }
}

/// A gate of the interrupt table.
struct Gate {
    selector: u16,
    offset: u64,
    /// Number of the interrupt stack, 0 for none.
    stack: u8,
    /// Bytes of what is pushed.
    size: usize,
    /// Interrupts stay on.
    trap: bool,
}

impl Cpu {
    /// Delivers `event`, or what comes of it. `self.rip` is where the guest
    /// will return to.
    pub fn deliver(&mut self, event: Event) -> Result<(), TripleFault> {
        // No block runs any more: the frame may be written to its page.
        self.block = std::ptr::null();
        let mut event = event;
        loop {
            let Err(Faulted) = self.try_deliver(&event, self.rip) else {
                return Ok(());
            };
            let second = Event::from(self.fault);
            self.note_fault();
            let first = class(&event);
            let double = matches!(
                (first, class(&second)),
                (Class::Contributory, Class::Contributory)
                    | (Class::PageFault, Class::Contributory | Class::PageFault)
            );
            if event.vector == vector::DOUBLE_FAULT && event.origin == Origin::Exception {
                return Err(TripleFault);
            }
            event = if double {
                Event {
                    vector: vector::DOUBLE_FAULT,
                    error: Some(0),
                    origin: Origin::Exception,
                }
            } else {
                second
            };
        }
    }

    /// Sets CR2 where the last fault is a page fault.
    pub fn note_fault(&mut self) {
        if self.fault.vector == vector::PAGE_FAULT {
            self.cr2 = self.fault.address;
        }
    }

    /// Delivers `event` with `back` as the address to return to, or faults and
    /// changes nothing.
    pub fn try_deliver(&mut self, event: &Event, back: u64) -> Result<(), Faulted> {
        if !self.is_protected() {
            return self.deliver_real(event, back);
        }
        if self.is_long() {
            return self.deliver_long(event, back);
        }
        self.deliver_protected(event, back)
    }

    fn deliver_real(&mut self, event: &Event, back: u64) -> Result<(), Faulted> {
        let offset = u64::from(event.vector) * 4;
        if offset + 3 > u64::from(self.idtr.limit) {
            return Err(self.general_protection(0));
        }
        let entry = self.load_system(self.idtr.base.wrapping_add(offset), 4)?;
        let flags = self.rflags();
        let code = u64::from(self.segments[segment::CS].selector);
        let sp = self.registers[register::RSP];
        for value in [flags, code, back] {
            if let Err(faulted) = self.push(2, value) {
                self.registers[register::RSP] = sp;
                return Err(faulted);
            }
        }
        self.rflags_system &= !(rflags::IF | rflags::TF | rflags::AC | rflags::RF);
        self.load_real_code((entry >> 16) as u16);
        self.rip = entry & 0xffff;
        Ok(())
    }

    /// The gate of `event`, checked.
    fn gate(&mut self, event: &Event, long: bool) -> Result<Gate, Faulted> {
        let size = if long { 16 } else { 8 };
        let offset = u64::from(event.vector) * size;
        let error = u32::from(event.vector) * 8 + 2;
        let external = event.external_bit();
        if offset + size - 1 > u64::from(self.idtr.limit) {
            return Err(self.general_protection(error | external));
        }
        let address = self.idtr.base.wrapping_add(offset);
        let low = self.load_system(address, 8)?;
        let high = if long {
            self.load_system(address.wrapping_add(8), 4)?
        } else {
            0
        };
        let kind = low >> 40 & 31;
        let known = matches!(kind, 14 | 15) || !long && matches!(kind, 6 | 7);
        let privilege = (low >> 45 & 3) as u8;
        let refused = event.origin == Origin::Software && privilege < self.cpl;
        if !known || refused {
            return Err(self.general_protection(error | external));
        }
        if low >> 47 & 1 == 0 {
            return Err(self.raise_error(vector::NOT_PRESENT, error | external));
        }
        let offset = low & 0xffff | low >> 32 & 0xffff_0000 | high << 32;
        let wide = kind >= 14;
        Ok(Gate {
            selector: (low >> 16) as u16,
            offset: if wide { offset } else { offset & 0xffff },
            stack: if long { (low >> 32 & 7) as u8 } else { 0 },
            size: match (long, wide) {
                (true, _) => 8,
                (false, true) => 4,
                (false, false) => 2,
            },
            trap: kind & 1 != 0,
        })
    }

    /// The code segment of a gate, and the privilege level it runs at.
    fn gate_code(&mut self, gate: &Gate, external: u32) -> Result<(Descriptor, u8), Faulted> {
        if gate.selector & !3 == 0 {
            return Err(self.general_protection(external));
        }
        let error = selector_error(gate.selector) | external;
        let Some(code) = self.find_descriptor(gate.selector)? else {
            return Err(self.general_protection(error));
        };
        let wrong_size =
            self.is_long() && code.rights & (rights::LONG | rights::BIG) != rights::LONG;
        if !code.is_code() || code.privilege() > self.cpl || wrong_size {
            return Err(self.general_protection(error));
        }
        if !code.has(rights::PRESENT) {
            return Err(self.raise_error(vector::NOT_PRESENT, error));
        }
        let cpl = if code.has(rights::DOWN_OR_CONFORMING) {
            self.cpl
        } else {
            code.privilege()
        };
        Ok((code, cpl))
    }

    fn deliver_long(&mut self, event: &Event, back: u64) -> Result<(), Faulted> {
        let external = event.external_bit();
        let gate = self.gate(event, true)?;
        let (code, cpl) = self.gate_code(&gate, external)?;
        let mut sp = if gate.stack != 0 {
            self.task_stack_long(28 + 8 * u64::from(gate.stack), external)?
        } else if cpl < self.cpl {
            self.task_stack_long(4 + 8 * u64::from(cpl), external)?
        } else {
            self.registers[register::RSP]
        };
        if !is_canonical(sp) {
            return Err(self.raise_error(vector::STACK, external));
        }
        if !is_canonical(gate.offset) {
            return Err(self.general_protection(external));
        }
        sp &= !15;
        let frame = [
            u64::from(self.segments[segment::SS].selector),
            self.registers[register::RSP],
            self.saved_flags(event),
            u64::from(self.segments[segment::CS].selector),
            back,
        ];
        let error = event.error.map(u64::from);
        for value in frame.into_iter().chain(error) {
            sp = sp.wrapping_sub(8);
            self.store_for(cpl, sp, 8, value)?;
        }
        if cpl < self.cpl {
            let empty = Segment {
                selector: u16::from(cpl),
                ..Segment::default()
            };
            self.set_segment(segment::SS, empty);
        }
        self.registers[register::RSP] = sp;
        self.enter_handler(&gate, &code, cpl);
        Ok(())
    }

    fn saved_flags(&self, event: &Event) -> u64 {
        let resume = if event.is_fault() { rflags::RF } else { 0 };
        self.rflags() | resume
    }

    fn enter_handler(&mut self, gate: &Gate, code: &Descriptor, cpl: u8) {
        self.set_code_segment(gate.selector, code, cpl);
        self.rip = gate.offset;
        self.rflags_system &= !(rflags::TF | rflags::NT | rflags::RF);
        if !gate.trap {
            self.rflags_system &= !rflags::IF;
        }
    }

    /// A stack pointer of the 64-bit task state segment.
    fn task_stack_long(&mut self, offset: u64, external: u32) -> Result<u64, Faulted> {
        if offset + 7 > u64::from(self.tr.limit) {
            let error = selector_error(self.tr.selector) | external;
            return Err(self.raise_error(vector::INVALID_TSS, error));
        }
        self.load_system(self.tr.base.wrapping_add(offset), 8)
    }

    /// Stack segment and pointer of the 32-bit task state segment.
    fn task_stack_protected(&mut self, cpl: u8, external: u32) -> Result<(u16, u64), Faulted> {
        let offset = 4 + 8 * u64::from(cpl);
        if offset + 7 > u64::from(self.tr.limit) {
            let error = selector_error(self.tr.selector) | external;
            return Err(self.raise_error(vector::INVALID_TSS, error));
        }
        let place = self.tr.base.wrapping_add(offset);
        let sp = self.load_system(place, 4)?;
        let selector = self.load_system(place.wrapping_add(4), 2)? as u16;
        Ok((selector, sp))
    }

    fn deliver_protected(&mut self, event: &Event, back: u64) -> Result<(), Faulted> {
        let external = event.external_bit();
        let gate = self.gate(event, false)?;
        let (code, cpl) = self.gate_code(&gate, external)?;
        if gate.offset > u64::from(code.limit) {
            return Err(self.general_protection(external));
        }
        let mut frame = Vec::with_capacity(6);
        let (stack, mut sp) = if cpl < self.cpl {
            let (selector, sp) = self.task_stack_protected(cpl, external)?;
            let stack = self.inner_stack(selector, cpl, external)?;
            frame.push(u64::from(self.segments[segment::SS].selector));
            frame.push(self.registers[register::RSP]);
            (stack, sp)
        } else {
            (self.segments[segment::SS], self.registers[register::RSP])
        };
        frame.push(self.saved_flags(event));
        frame.push(u64::from(self.segments[segment::CS].selector));
        frame.push(back);
        frame.extend(event.error.map(u64::from));
        let mask = if stack.rights & rights::BIG != 0 {
            0xffff_ffff
        } else {
            0xffff
        };
        for value in frame {
            sp = sp.wrapping_sub(gate.size as u64) & mask;
            let address = stack.base.wrapping_add(sp) & 0xffff_ffff;
            self.store_for(cpl, address, gate.size, value)?;
        }
        self.set_segment(segment::SS, stack);
        let kept = self.registers[register::RSP] & !mask & 0xffff_ffff;
        self.registers[register::RSP] = kept | sp;
        self.enter_handler(&gate, &code, cpl);
        Ok(())
    }

    /// The stack segment of an inner level, out of the task state segment.
    fn inner_stack(&mut self, selector: u16, cpl: u8, external: u32) -> Result<Segment, Faulted> {
        let error = selector_error(selector) | external;
        let Some(descriptor) = self.find_descriptor(selector)? else {
            return Err(self.raise_error(vector::INVALID_TSS, error));
        };
        let fits = descriptor.has(rights::ORDINARY | rights::READABLE_OR_WRITABLE)
            && !descriptor.is_code()
            && (selector & 3) as u8 == cpl
            && descriptor.privilege() == cpl;
        if !fits {
            return Err(self.raise_error(vector::INVALID_TSS, error));
        }
        if !descriptor.has(rights::PRESENT) {
            return Err(self.raise_error(vector::STACK, error));
        }
        Ok(descriptor.segment(selector))
    }
}
