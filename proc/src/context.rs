//! The execution of the program at one instant: registers, FS and GS base, signal
//! mask, extended state. This is what a jump carries to another node.
//!
//! A peer may set every register: it executes the program anyway. What it may not
//! do is make the receiving runtime or its kernel fail. Invariant of a decoded
//! context: the kernel can load it, and nothing in it lies beyond its bytes.

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Largest extended state carried, bytes. AMX tiles need a little over 11 KiB.
pub const EXTENDED_BYTES_MAX: usize = 16 << 10;
/// The x87 and SSE part of an extended state.
pub const LEGACY_BYTES: usize = 512;
/// Legacy part and XSAVE header.
pub const HEADER_END: usize = 576;
/// Where XCOMP_BV and the reserved words of the XSAVE header start; all are zero
/// in the standard format.
const HEADER_ZEROES: usize = LEGACY_BYTES + 8;

/// RFLAGS of a fresh program: interrupts on, nothing else.
pub const INITIAL_FLAGS: usize = 0x202;
/// RFLAGS that a program can set and `rt_sigreturn` restores: CF, PF, AF, ZF, SF,
/// TF, DF, OF, RF, AC.
const PROGRAM_FLAGS: usize = 0x5_0dd5;

/// General registers, in the order of `struct sigcontext_64`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
pub struct Registers {
    pub r8: usize,
    pub r9: usize,
    pub r10: usize,
    pub r11: usize,
    pub r12: usize,
    pub r13: usize,
    pub r14: usize,
    pub r15: usize,
    pub rdi: usize,
    pub rsi: usize,
    pub rbp: usize,
    pub rbx: usize,
    pub rdx: usize,
    pub rax: usize,
    pub rcx: usize,
    pub rsp: usize,
    pub rip: usize,
    pub eflags: usize,
    /// CS, GS, FS and SS selectors, 16 bits each.
    pub selectors: u64,
    /// The page fault's error code; bit 1 says that it was a write.
    pub error: u64,
    pub trap: u64,
    pub old_mask: u64,
    pub cr2: usize,
}

impl Registers {
    /// Those that say how far the program has come: an instruction that faulted
    /// has left all of them as they were.
    pub fn general(&self) -> [usize; 17] {
        [
            self.rip, self.rsp, self.rax, self.rbx, self.rcx, self.rdx, self.rsi, self.rdi,
            self.rbp, self.r8, self.r9, self.r10, self.r11, self.r12, self.r13, self.r14, self.r15,
        ]
    }

    /// These with what a program sets of `program`. Selectors stay, since user
    /// selectors are the same everywhere, and so does what the kernel reports.
    pub fn with(&self, program: &Registers) -> Registers {
        Registers {
            selectors: self.selectors,
            error: self.error,
            trap: self.trap,
            old_mask: self.old_mask,
            cr2: self.cr2,
            ..*program
        }
    }
}

/// A thread's state. It travels as its own bytes; [`Context::as_wire`] returns the bytes
/// in use.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
pub struct Context {
    /// General registers; [`Registers::with`] says which are loaded.
    pub registers: Registers,
    /// FS base.
    pub fs: usize,
    /// GS base.
    pub gs: usize,
    /// Blocked signals.
    pub mask: u64,
    /// Bytes used in `extended`; 0 means the initial state.
    pub extended_bytes: usize,
    /// Extended state in standard XSAVE format.
    pub extended: [u8; EXTENDED_BYTES_MAX],
}

const EXTENDED_AT: usize = core::mem::offset_of!(Context, extended);

/// The bytes are no context that a processor can load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContextError {
    /// Shorter than the registers, or longer than any context.
    #[error("a context has {EXTENDED_AT} to {max} bytes, not {0}", max = size_of::<Context>())]
    Length(usize),
    /// The extended state has another length than the context says.
    #[error("the context announces {said} bytes of extended state and has {found}")]
    Extended {
        /// What the context says.
        said: usize,
        found: usize,
    },
    /// The extended state ends within its header, or its header has bits that
    /// the standard format does not.
    #[error("the extended state is not in standard XSAVE format")]
    Format,
    /// An address that no processor loads.
    #[error("{register} is {address:#x}, which is not canonical")]
    Address {
        register: &'static str,
        /// What it holds.
        address: usize,
    },
}

impl Context {
    /// A context at the start of a program: `entry` with `stack`.
    pub fn initial(entry: usize, stack: usize) -> Context {
        let registers = Registers {
            rip: entry,
            rsp: stack,
            eflags: INITIAL_FLAGS,
            ..Registers::default()
        };
        Context {
            registers,
            fs: 0,
            gs: 0,
            mask: 0,
            extended_bytes: 0,
            extended: [0; EXTENDED_BYTES_MAX],
        }
    }

    /// The extended state.
    ///
    /// # Panics
    /// When `extended_bytes` was set beyond the array; no decoded context has that.
    pub fn extended(&self) -> &[u8] {
        &self.extended[..self.extended_bytes]
    }

    /// The bytes that travel.
    ///
    /// # Panics
    /// As [`Context::extended`].
    pub fn as_wire(&self) -> &[u8] {
        &self.as_bytes()[..EXTENDED_AT + self.extended_bytes]
    }

    /// Takes over a context as a peer sent it.
    ///
    /// # Errors
    /// [`ContextError`] when it cannot be loaded; `self` is unspecified then.
    pub fn decode(&mut self, bytes: &[u8]) -> Result<(), ContextError> {
        let whole = self.as_mut_bytes();
        if !(EXTENDED_AT..=whole.len()).contains(&bytes.len()) {
            return Err(ContextError::Length(bytes.len()));
        }
        whole[..bytes.len()].copy_from_slice(bytes);
        let found = bytes.len() - EXTENDED_AT;
        if self.extended_bytes != found {
            return Err(ContextError::Extended {
                said: core::mem::replace(&mut self.extended_bytes, 0),
                found,
            });
        }
        check_extended(self.extended())?;
        for (register, address) in [
            ("RIP", self.registers.rip),
            ("the FS base", self.fs),
            ("the GS base", self.gs),
        ] {
            if !is_canonical(address) {
                return Err(ContextError::Address { register, address });
            }
        }
        self.registers.eflags = self.registers.eflags & PROGRAM_FLAGS | INITIAL_FLAGS;
        Ok(())
    }
}

fn check_extended(state: &[u8]) -> Result<(), ContextError> {
    let standard = match state.len() {
        0 | LEGACY_BYTES => true,
        HEADER_END.. => state[HEADER_ZEROES..HEADER_END]
            .iter()
            .all(|&byte| byte == 0),
        _ => false,
    };
    standard.then_some(()).ok_or(ContextError::Format)
}

/// Whether bits 47 to 63 are the same, which every processor accepts. A program on
/// one with larger addresses may have a base beyond them; it has to do without
/// other nodes.
const fn is_canonical(address: usize) -> bool {
    let top = (address as isize) >> 47;
    top == 0 || top == -1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(context: &Context) -> Result<Context, ContextError> {
        let mut arrived = Context::initial(0, 0);
        arrived.decode(context.as_wire()).map(|()| arrived)
    }

    fn sample(extended_bytes: usize) -> Context {
        let mut context = Context::initial(0x40_1000, 0x7000_0000);
        context.fs = 0x7f00_0000_1000;
        context.mask = 0x55;
        context.extended_bytes = extended_bytes;
        context.extended[..extended_bytes.min(LEGACY_BYTES)].fill(7);
        context
    }

    #[test]
    fn a_context_arrives_as_it_was() {
        for extended_bytes in [0, LEGACY_BYTES, HEADER_END, 2696, EXTENDED_BYTES_MAX] {
            let sent = sample(extended_bytes);
            let arrived = decoded(&sent).unwrap();
            assert!(arrived.as_wire() == sent.as_wire(), "{extended_bytes}");
        }
    }

    #[test]
    fn a_length_that_lies_is_refused() {
        let sent = sample(HEADER_END);
        let mut arrived = Context::initial(0, 0);
        for length in [0, EXTENDED_AT - 1] {
            let cut = &sent.as_wire()[..length];
            assert_eq!(arrived.decode(cut), Err(ContextError::Length(length)));
        }
        let mut long = sent.as_bytes().to_vec();
        long.push(0);
        let length = Err(ContextError::Length(long.len()));
        assert_eq!(arrived.decode(&long), length);
        let mut lying = sent;
        for said in [0, HEADER_END - 1, EXTENDED_BYTES_MAX + 1, usize::MAX] {
            lying.extended_bytes = said;
            let bytes = &lying.as_bytes()[..EXTENDED_AT + HEADER_END];
            let found = HEADER_END;
            let expected = Err(ContextError::Extended { said, found });
            assert_eq!(arrived.decode(bytes), expected);
            // What is left of it can still be looked at.
            assert!(arrived.as_wire().len() <= size_of::<Context>());
        }
    }

    #[test]
    fn an_extended_state_that_no_kernel_loads_is_refused() {
        for extended_bytes in [1, LEGACY_BYTES - 1, LEGACY_BYTES + 1, HEADER_END - 1] {
            let error = decoded(&sample(extended_bytes)).err();
            assert_eq!(error, Some(ContextError::Format), "{extended_bytes}");
        }
        for damaged in [HEADER_ZEROES, HEADER_ZEROES + 7, HEADER_END - 1] {
            let mut context = sample(HEADER_END);
            context.extended[damaged] = 0x80;
            assert_eq!(decoded(&context).err(), Some(ContextError::Format));
        }
    }

    #[test]
    fn an_address_that_no_processor_loads_is_refused() {
        let places: [fn(&mut Context) -> &mut usize; 3] = [
            |context| &mut context.registers.rip,
            |context| &mut context.fs,
            |context| &mut context.gs,
        ];
        for place in places {
            for address in [1 << 47, 0x8000_0000_0000_0000, 0xffff_7fff_ffff_ffff] {
                let mut context = sample(0);
                *place(&mut context) = address;
                let error = decoded(&context).err();
                assert!(
                    matches!(error, Some(ContextError::Address { address: a, .. }) if a == address)
                );
            }
            // A program may load these, and is told by a signal what they are.
            for address in [0, (1 << 47) - 1, 0xffff_8000_0000_0000, usize::MAX] {
                let mut context = sample(0);
                *place(&mut context) = address;
                assert!(decoded(&context).is_ok(), "{address:#x}");
            }
        }
    }

    #[test]
    fn flags_of_the_system_do_not_arrive() {
        let mut context = sample(0);
        context.registers.eflags = usize::MAX;
        let flags = decoded(&context).unwrap().registers.eflags;
        assert_eq!(flags, PROGRAM_FLAGS | INITIAL_FLAGS);
        // IOPL, NT, VM, VIF, VIP.
        assert_eq!(flags & 0x1a_7000, 0);
    }
}
