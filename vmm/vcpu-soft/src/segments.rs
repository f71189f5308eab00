//! Segment registers and descriptors (Intel SDM volume 3, chapters 3 and 5).

use weft_vcpu::Segment;

use crate::access::is_canonical;
use crate::block::Mode;
use crate::cpu::{Cpu, Faulted, cr0, cr4, efer, segment, vector};

/// Bits of [`Segment::rights`].
pub mod rights {
    /// Accessed; of the type.
    pub const ACCESSED: u16 = 1;
    /// Of a data segment: may be written; of a code segment: may be read.
    pub const READABLE_OR_WRITABLE: u16 = 1 << 1;
    /// Of a data segment: grows down; of a code segment: conforming.
    pub const DOWN_OR_CONFORMING: u16 = 1 << 2;
    /// Code, not data.
    pub const CODE: u16 = 1 << 3;
    /// Code or data, not a system descriptor.
    pub const ORDINARY: u16 = 1 << 4;
    pub const PRESENT: u16 = 1 << 7;
    /// 64-bit code.
    pub const LONG: u16 = 1 << 13;
    /// 32-bit code or stack.
    pub const BIG: u16 = 1 << 14;
    /// The type of a system descriptor.
    pub const TYPE: u16 = 15;

    /// The descriptor's privilege level.
    pub const fn privilege(rights: u16) -> u8 {
        (rights >> 5 & 3) as u8
    }
}

/// A descriptor of eight bytes, taken apart.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    /// Lowest linear address.
    pub base: u64,
    /// Highest offset.
    pub limit: u32,
    /// As in [`Segment::rights`].
    pub rights: u16,
}

impl Descriptor {
    /// Takes eight bytes apart.
    pub fn parse(raw: u64) -> Self {
        let limit = (raw & 0xffff | raw >> 32 & 0xf_0000) as u32;
        let rights = (raw >> 40 & 0xf0ff) as u16;
        Self {
            base: raw >> 16 & 0xff_ffff | raw >> 32 & 0xff00_0000,
            limit: if rights & 1 << 15 != 0 {
                limit << 12 | 0xfff
            } else {
                limit
            },
            rights,
        }
    }

    /// Whether all of `bits` are set.
    pub fn has(&self, bits: u16) -> bool {
        self.rights & bits == bits
    }

    /// Code or data, not a system descriptor.
    pub fn is_code(&self) -> bool {
        self.has(rights::ORDINARY | rights::CODE)
    }

    /// Its privilege level.
    pub fn privilege(&self) -> u8 {
        rights::privilege(self.rights)
    }

    /// The segment register that holds it.
    pub fn segment(&self, selector: u16) -> Segment {
        Segment {
            selector,
            base: self.base,
            limit: self.limit,
            rights: self.rights,
        }
    }
}

/// The error code that names a selector.
pub fn selector_error(selector: u16) -> u32 {
    u32::from(selector & !3)
}

impl Cpu {
    /// Whether CR0.PE is set.
    pub fn is_protected(&self) -> bool {
        self.cr0 & cr0::PE != 0
    }

    /// Whether IA32_EFER.LMA is set.
    pub fn is_long(&self) -> bool {
        self.efer & efer::LMA != 0
    }

    /// The linear address of a selector's descriptor, when its table is long
    /// enough for `size` bytes.
    fn descriptor_address(&self, selector: u16, size: u64) -> Option<u64> {
        let (base, limit) = if selector & 4 != 0 {
            if self.ldtr.rights & rights::PRESENT == 0 {
                return None;
            }
            (self.ldtr.base, u64::from(self.ldtr.limit))
        } else {
            (self.gdtr.base, u64::from(self.gdtr.limit))
        };
        let offset = u64::from(selector & !7);
        (offset + size - 1 <= limit).then(|| base.wrapping_add(offset))
    }

    /// A selector's eight bytes; #GP(selector) when there are none.
    pub fn read_descriptor(&mut self, selector: u16) -> Result<Descriptor, Faulted> {
        match self.find_descriptor(selector)? {
            Some(descriptor) => Ok(descriptor),
            None => Err(self.general_protection(selector_error(selector))),
        }
    }

    /// A selector's eight bytes, if its table is long enough.
    pub fn find_descriptor(&mut self, selector: u16) -> Result<Option<Descriptor>, Faulted> {
        let Some(address) = self.descriptor_address(selector, 8) else {
            return Ok(None);
        };
        let raw = self.load_system(address, 8)?;
        Ok(Some(Descriptor::parse(raw)))
    }

    /// Bits 32 to 63 of a system descriptor's base in long mode.
    fn upper_base(&mut self, selector: u16) -> Result<u64, Faulted> {
        if !self.is_long() {
            return Ok(0);
        }
        let Some(address) = self.descriptor_address(selector, 16) else {
            return Err(self.general_protection(selector_error(selector)));
        };
        let high = self.load_system(address.wrapping_add(8), 8)?;
        // The second half has a type of its own, which is 0.
        if high >> 40 & 31 != 0 {
            return Err(self.general_protection(selector_error(selector)));
        }
        Ok(high << 32)
    }

    /// Sets bits of a descriptor's type: accessed, busy.
    pub fn mark_descriptor(&mut self, selector: u16, bits: u16) -> Result<(), Faulted> {
        let Some(address) = self.descriptor_address(selector, 8) else {
            return Ok(());
        };
        let place = address.wrapping_add(5);
        let byte = self.load_system(place, 1)?;
        let marked = byte | u64::from(bits & 0xff);
        if marked != byte {
            self.store_system(place, 1, marked)?;
        }
        Ok(())
    }

    /// Loads DS, ES, FS, GS or SS.
    pub fn load_segment(&mut self, which: usize, selector: u16) -> Result<(), Faulted> {
        if !self.is_protected() {
            self.segments[which].selector = selector;
            self.set_segment_base(which, u64::from(selector) << 4);
            return Ok(());
        }
        if selector & !3 == 0 {
            return self.load_null(which, selector);
        }
        let descriptor = self.read_descriptor(selector)?;
        let error = selector_error(selector);
        let requested = (selector & 3) as u8;
        let refused = if which == segment::SS {
            !descriptor.has(rights::ORDINARY | rights::READABLE_OR_WRITABLE)
                || descriptor.is_code()
                || requested != self.cpl
                || descriptor.privilege() != self.cpl
        } else {
            let unreadable = descriptor.is_code() && !descriptor.has(rights::READABLE_OR_WRITABLE);
            let conforming = descriptor.is_code() && descriptor.has(rights::DOWN_OR_CONFORMING);
            !descriptor.has(rights::ORDINARY)
                || unreadable
                || !conforming && descriptor.privilege() < self.cpl.max(requested)
        };
        if refused {
            return Err(self.general_protection(error));
        }
        if !descriptor.has(rights::PRESENT) {
            let vector = if which == segment::SS {
                vector::STACK
            } else {
                vector::NOT_PRESENT
            };
            return Err(self.raise_error(vector, error));
        }
        self.mark_descriptor(selector, rights::ACCESSED)?;
        self.segments[which] = descriptor.segment(selector);
        self.segments[which].rights |= rights::ACCESSED;
        self.set_segment_base(which, descriptor.base);
        Ok(())
    }

    /// A null selector: the segment may not be used, but in 64-bit code.
    fn load_null(&mut self, which: usize, selector: u16) -> Result<(), Faulted> {
        let stack = which == segment::SS;
        let fine = self.mode.is_64() && self.cpl < 3 && selector & 3 == u16::from(self.cpl);
        if stack && !fine {
            return Err(self.general_protection(0));
        }
        self.segments[which] = Segment {
            selector,
            ..Segment::default()
        };
        self.set_segment_base(which, 0);
        Ok(())
    }

    /// Sets a segment's base, where it is kept and where it is used.
    pub fn set_segment_base(&mut self, which: usize, base: u64) {
        self.segments[which].base = base;
        self.segment_bases[which] = base;
    }

    /// A whole segment register, with nothing checked.
    pub fn set_segment(&mut self, which: usize, value: Segment) {
        self.segments[which] = value;
        self.segment_bases[which] = value.base;
    }

    /// CS of real mode.
    pub fn load_real_code(&mut self, selector: u16) {
        self.segments[segment::CS].selector = selector;
        self.set_segment_base(segment::CS, u64::from(selector) << 4);
    }

    /// CS, and the privilege level it is used at. The descriptor has been
    /// checked.
    pub fn set_code_segment(&mut self, selector: u16, descriptor: &Descriptor, cpl: u8) {
        let mut value = descriptor.segment(selector & !3 | u16::from(cpl));
        value.rights |= rights::ACCESSED;
        let long = self.is_long() && value.rights & rights::LONG != 0;
        if long {
            value.base = 0;
        }
        self.set_segment(segment::CS, value);
        self.cpl = cpl;
        self.update_mode();
    }

    /// What CS, the control registers and the privilege level make of the mode.
    pub fn update_mode(&mut self) {
        let code = self.segments[segment::CS].rights;
        let protected = self.is_protected();
        let mut mode = Mode::of_model(self.configuration.model);
        if protected && self.is_long() && code & rights::LONG != 0 {
            mode |= Mode::BITS_64;
        } else if code & rights::BIG != 0 {
            mode |= Mode::BITS_32;
        }
        if self.cpl == 3 {
            mode |= Mode::USER;
        }
        if self.cr0 & (cr0::EM | cr0::TS) != 0 || self.cr4 & cr4::OSFXSR == 0 {
            mode |= Mode::NO_FPU;
        }
        let before = self.mode;
        self.mode = Mode(mode);
        if (before.0 ^ mode) & !Mode::USER != 0 {
            self.void_links();
        }
    }

    /// LLDT.
    pub fn load_local_table(&mut self, selector: u16) -> Result<(), Faulted> {
        if selector & !3 == 0 {
            self.ldtr = Segment {
                selector,
                ..Segment::default()
            };
            return Ok(());
        }
        let descriptor = self.read_system_descriptor(selector, &[2])?;
        self.ldtr = descriptor.segment(selector);
        Ok(())
    }

    /// LTR.
    pub fn load_task(&mut self, selector: u16) -> Result<(), Faulted> {
        if selector & !3 == 0 {
            return Err(self.general_protection(0));
        }
        let types: &[u16] = if self.is_long() { &[9] } else { &[1, 9] };
        let descriptor = self.read_system_descriptor(selector, types)?;
        const BUSY: u16 = 2;
        self.mark_descriptor(selector, BUSY)?;
        self.tr = descriptor.segment(selector);
        self.tr.rights |= BUSY;
        Ok(())
    }

    fn read_system_descriptor(
        &mut self,
        selector: u16,
        types: &[u16],
    ) -> Result<Descriptor, Faulted> {
        let error = selector_error(selector);
        if selector & 4 != 0 {
            return Err(self.general_protection(error));
        }
        let mut descriptor = self.read_descriptor(selector)?;
        let fits = types.contains(&(descriptor.rights & rights::TYPE));
        if descriptor.has(rights::ORDINARY) || !fits {
            return Err(self.general_protection(error));
        }
        if !descriptor.has(rights::PRESENT) {
            return Err(self.raise_error(vector::NOT_PRESENT, error));
        }
        descriptor.base |= self.upper_base(selector)?;
        if !is_canonical(descriptor.base) {
            return Err(self.general_protection(error));
        }
        Ok(descriptor)
    }

    /// A code segment that control may go to by a far JMP or CALL, and the
    /// privilege level it then has.
    pub fn code_for_jump(&mut self, selector: u16) -> Result<(Descriptor, u8), Faulted> {
        let cpl = self.cpl;
        let descriptor = self.code_segment(selector, |conforming, privilege, requested| {
            if conforming {
                privilege <= cpl
            } else {
                requested <= cpl && privilege == cpl
            }
        })?;
        Ok((descriptor, cpl))
    }

    /// A code segment that a far RET or IRET may return to, and the privilege
    /// level it then has.
    pub fn code_for_return(&mut self, selector: u16) -> Result<(Descriptor, u8), Faulted> {
        let cpl = self.cpl;
        let descriptor = self.code_segment(selector, |conforming, privilege, requested| {
            let right = if conforming {
                privilege <= requested
            } else {
                privilege == requested
            };
            right && requested >= cpl
        })?;
        Ok((descriptor, (selector & 3) as u8))
    }

    /// A code segment that is there. `fits` judges whether it conforms, its
    /// privilege level, and the one that the selector requests.
    fn code_segment(
        &mut self,
        selector: u16,
        fits: impl FnOnce(bool, u8, u8) -> bool,
    ) -> Result<Descriptor, Faulted> {
        if selector & !3 == 0 {
            return Err(self.general_protection(0));
        }
        let descriptor = self.read_descriptor(selector)?;
        let error = selector_error(selector);
        let fits = fits(
            descriptor.has(rights::DOWN_OR_CONFORMING),
            descriptor.privilege(),
            (selector & 3) as u8,
        );
        let both = self.is_long() && descriptor.has(rights::LONG | rights::BIG);
        if !descriptor.is_code() || !fits || both {
            return Err(self.general_protection(error));
        }
        if !descriptor.has(rights::PRESENT) {
            return Err(self.raise_error(vector::NOT_PRESENT, error));
        }
        Ok(descriptor)
    }

    /// The stack segment that a return to an outer level loads, checked for that
    /// level.
    pub fn stack_for_return(&mut self, selector: u16, cpl: u8) -> Result<Segment, Faulted> {
        if selector & !3 == 0 {
            if self.is_long() && cpl < 3 {
                return Ok(Segment {
                    selector,
                    ..Segment::default()
                });
            }
            return Err(self.general_protection(0));
        }
        let descriptor = self.read_descriptor(selector)?;
        let error = selector_error(selector);
        let fits = descriptor.has(rights::ORDINARY | rights::READABLE_OR_WRITABLE)
            && !descriptor.is_code()
            && (selector & 3) as u8 == cpl
            && descriptor.privilege() == cpl;
        if !fits {
            return Err(self.general_protection(error));
        }
        if !descriptor.has(rights::PRESENT) {
            return Err(self.raise_error(vector::STACK, error));
        }
        Ok(descriptor.segment(selector))
    }

    /// After a return to an outer level: segments that it may not use are
    /// emptied.
    pub fn drop_inner_segments(&mut self) {
        for which in [segment::ES, segment::DS, segment::FS, segment::GS] {
            let value = self.segments[which];
            let conforming =
                value.rights & rights::CODE != 0 && value.rights & rights::DOWN_OR_CONFORMING != 0;
            if !conforming
                && value.rights & rights::PRESENT != 0
                && rights::privilege(value.rights) < self.cpl
            {
                self.segments[which] = Segment::default();
                self.segment_bases[which] = 0;
            }
        }
    }
}
