//! Register and memory operands.

use crate::cpu::Cpu;
use crate::op::Op;

/// All bits of an operand of `SIZE` bytes.
pub const fn mask<const SIZE: usize>() -> u64 {
    u64::MAX >> (64 - 8 * SIZE)
}

/// `value` of `SIZE` bytes, sign-extended.
#[inline(always)]
pub const fn sign_extended<const SIZE: usize>(value: u64) -> u64 {
    let shift = 64 - 8 * SIZE as u32;
    ((value << shift) as i64 >> shift) as u64
}

impl Cpu {
    /// A whole register.
    #[inline(always)]
    pub fn register(&self, index: u8) -> u64 {
        debug_assert!(usize::from(index) < self.registers.len());
        // SAFETY: the decoder makes no other indices.
        unsafe { *self.registers.get_unchecked(usize::from(index)) }
    }

    /// Sets a whole register.
    #[inline(always)]
    pub fn set_register(&mut self, index: u8, value: u64) {
        debug_assert!(usize::from(index) < 16);
        // SAFETY: the decoder makes no other indices.
        unsafe { *self.registers.get_unchecked_mut(usize::from(index)) = value }
    }

    /// A register operand of `SIZE` bytes, zero-extended; for one byte `index`
    /// is the byte's offset in the register file.
    #[inline(always)]
    pub fn get<const SIZE: usize>(&self, index: u8) -> u64 {
        match SIZE {
            1 => {
                debug_assert!(index < 128);
                // SAFETY: the decoder makes no other offsets.
                u64::from(unsafe { *self.registers.as_ptr().cast::<u8>().add(usize::from(index)) })
            }
            2 => self.register(index) & 0xffff,
            4 => self.register(index) & 0xffff_ffff,
            _ => self.register(index),
        }
    }

    /// Sets a register operand; four bytes clear the register's upper half, one
    /// or two leave the rest.
    #[inline(always)]
    pub fn set<const SIZE: usize>(&mut self, index: u8, value: u64) {
        debug_assert!(if SIZE == 1 { index < 128 } else { index < 16 });
        let registers = self.registers.as_mut_ptr();
        // SAFETY: the decoder makes no other indices and offsets.
        unsafe {
            match SIZE {
                1 => *registers.cast::<u8>().add(usize::from(index)) = value as u8,
                2 => *registers.add(usize::from(index)).cast::<u16>() = value as u16,
                4 => *registers.add(usize::from(index)) = value & 0xffff_ffff,
                _ => *registers.add(usize::from(index)) = value,
            }
        }
    }

    /// The memory operand's offset in its segment.
    #[inline(always)]
    pub fn offset(&self, op: &Op) -> u64 {
        self.register(op.base)
            .wrapping_add(self.register(op.index) << (op.scale & 3))
            .wrapping_add(i64::from(op.displacement) as u64)
    }

    /// The memory operand's linear address.
    #[inline(always)]
    pub fn address(&self, op: &Op) -> u64 {
        debug_assert!(op.segment < 8);
        // SAFETY: the decoder makes no other indices.
        let base = unsafe { *self.segment_bases.get_unchecked(usize::from(op.segment)) };
        self.offset(op).wrapping_add(base)
    }

    /// The RIP of the running block's first instruction.
    #[inline(always)]
    pub fn block_rip(&self) -> u64 {
        self.registers[usize::from(Self::BLOCK_RIP)]
    }

    /// The RIP of the instruction after `op`.
    #[inline(always)]
    pub fn next_rip(&self, op: &Op) -> u64 {
        self.block_rip().wrapping_add(op.end())
    }

    /// The RIP of `op`.
    #[inline(always)]
    pub fn own_rip(&self, op: &Op) -> u64 {
        self.block_rip().wrapping_add(u64::from(op.offset))
    }
}
