//! Random numbers from a seed, and mutations of inputs.

/// A small generator (splitmix64): the same seed gives the same run.
pub struct Random(u64);

impl Random {
    /// A generator.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Any number.
    #[expect(
        clippy::should_implement_trait,
        reason = "it never ends, so it is no iterator"
    )]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `bound`, or 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    /// Any bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }

    /// Changes an input in one of the ways that decoders get wrong.
    pub fn mutate(&mut self, input: &mut Vec<u8>, other: &[u8]) {
        let at = self.below(input.len());
        match self.below(9) {
            0 if !input.is_empty() => input[at] ^= 1 << self.below(8),
            1 if !input.is_empty() => input[at] = self.next() as u8,
            2 => input.truncate(at),
            3 => {
                let length = 1 + self.below(64);
                let bytes = self.bytes(length);
                input.splice(at..at, bytes);
            }
            4 => {
                let end = (at + self.below(64)).min(input.len());
                input.drain(at..end);
            }
            // A number with an interesting value, of any width, anywhere.
            5 | 6 => self.plant(input, at),
            7 if !other.is_empty() => {
                let (from, to) = (self.below(other.len()), self.below(other.len()));
                let piece = &other[from.min(to)..from.max(to)];
                input.splice(at..at, piece.iter().copied());
            }
            _ => {
                let end = (at + self.below(256)).min(input.len());
                let piece = input[at..end].to_vec();
                input.splice(at..at, piece);
            }
        }
        input.truncate(1 << 16);
    }

    fn plant(&mut self, input: &mut [u8], at: usize) {
        const VALUES: [u64; 12] = [
            0,
            1,
            15,
            16,
            48,
            0x7fff_ffff,
            0xffff_ffff,
            278_528,
            278_529,
            61_456,
            1 << 63,
            u64::MAX,
        ];
        let value = VALUES[self.below(VALUES.len())].wrapping_add(self.below(3) as u64);
        let bytes = value.to_le_bytes();
        let width = [1, 2, 4, 8][self.below(4)].min(input.len() - at);
        input[at..at + width].copy_from_slice(&bytes[..width]);
    }
}
