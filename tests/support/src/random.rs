//! Pseudo-random numbers, and the seed that repeats a run.

use std::time::{SystemTime, UNIX_EPOCH};

/// What `WEFT_SEED` says, decimal or with 0x, or another seed every time.
pub fn seed() -> u64 {
    let Ok(text) = std::env::var("WEFT_SEED") else {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        return (time.unwrap().as_nanos() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    };
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.expect("WEFT_SEED is a number")
}

/// A pseudo-random sequence (xorshift64*).
pub struct Random(u64);

impl Random {
    /// Equal seeds give equal sequences.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// The next 64 bits.
    #[allow(clippy::should_implement_trait, reason = "it never ends")]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 33) % bound
    }

    /// An index into something of this length.
    pub fn index(&mut self, length: usize) -> usize {
        self.below(length as u64) as usize
    }

    /// A value picked from a slice that is not empty.
    pub fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.index(values.len())]
    }

    /// An array of bytes.
    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.next() as u8)
    }

    /// Values at which arithmetic changes its mind, and others.
    pub fn value(&mut self) -> u64 {
        let bits = self.of(&[7, 8, 15, 16, 31, 32, 63]);
        let edge = 1_u64 << bits;
        match self.below(8) {
            0 => 0,
            1 => edge,
            2 => edge - 1,
            3 => edge.wrapping_neg(),
            4 => self.next() & 0xff,
            5 => u64::MAX,
            _ => self.next(),
        }
    }
}
