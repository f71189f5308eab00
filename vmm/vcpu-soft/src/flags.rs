//! The six arithmetic flags, as `LAHF` and `SETO AL` leave them in AX.
//!
//! ```text
//! bit   15 14 13 12 11 10  9  8   7 .. 1  0
//!       SF ZF  0 AF  0 PF  1 CF           OF
//! ```
//!
//! `add al, 127; sahf` puts them back into the host's flags. Bits 16 and up mean
//! nothing: they are never looked at, and may be anything.

/// Carry.
pub const CF: u64 = 1 << 8;
/// Parity of the low byte.
pub const PF: u64 = 1 << 10;
/// Carry out of bit 3.
pub const AF: u64 = 1 << 12;
/// Zero.
pub const ZF: u64 = 1 << 14;
/// Sign.
pub const SF: u64 = 1 << 15;
/// Overflow.
pub const OF: u64 = 1;

/// The six flags' places in RFLAGS.
pub const RFLAGS_ARITHMETIC: u64 = 0x8d5;

/// The flags as they are in RFLAGS; all other bits are 0.
#[inline(always)]
pub const fn to_rflags(flags: u64) -> u64 {
    (flags >> 8) & 0xd5 | (flags & OF) << 11
}

/// The flags of an RFLAGS value.
#[inline(always)]
pub const fn from_rflags(rflags: u64) -> u64 {
    (rflags & 0xd5 | 2) << 8 | (rflags >> 11 & 1)
}

/// Whether the condition with number `CONDITION` (the low four bits of Jcc's
/// opcode: o no b ae e ne be a s ns p np l ge le g) holds.
#[inline(always)]
pub const fn holds<const CONDITION: u8>(flags: u64) -> bool {
    let value = match CONDITION >> 1 {
        0 => flags & OF != 0,
        1 => flags & CF != 0,
        2 => flags & ZF != 0,
        3 => flags & (CF | ZF) != 0,
        4 => flags & SF != 0,
        5 => flags & PF != 0,
        6 => (flags >> 15 ^ flags) & 1 != 0,
        _ => (flags >> 15 ^ flags) & 1 != 0 || flags & ZF != 0,
    };
    value != (CONDITION & 1 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_survives_the_round_trip() {
        for bits in 0..64_u64 {
            let rflags = bits & 1
                | (bits & 2) << 1
                | (bits & 4) << 2
                | (bits & 8) << 3
                | (bits & 16) << 3
                | (bits & 32) << 6;
            assert_eq!(to_rflags(from_rflags(rflags)), rflags);
        }
    }

    #[test]
    fn signed_conditions_compare_sign_with_overflow() {
        assert!(holds::<12>(SF));
        assert!(holds::<12>(OF));
        assert!(holds::<13>(SF | OF));
        assert!(holds::<14>(ZF));
        assert!(!holds::<15>(ZF));
        assert!(holds::<15>(0));
    }
}
