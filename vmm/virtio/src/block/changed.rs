//! Which parts of a disk a copy of it does not have yet.
//!
//! ```text
//! begin: all ──take──▶ fewer and fewer ──end──▶ nothing is noted
//!          ▲── a write that is complete ──┘
//! ```
//!
//! A write is noted when it is complete, before its driver hears of that. The thread that copies
//! takes a note before it reads. So what it reads is either the write's bytes, or the note comes after
//! it and the part is copied again.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a part.
pub const PART: u64 = 64 << 10;

/// See the module.
#[derive(Default)]
pub struct ChangedParts {
    is_noted: AtomicBool,
    /// A bit for each part; made when a copy begins for the first time.
    notes: OnceLock<Box<[AtomicU64]>>,
}

impl ChangedParts {
    /// From now on changes are noted, and at first all of a disk of `bytes` bytes.
    pub fn begin(&self, bytes: u64) {
        let parts = bytes.div_ceil(PART);
        let words = || (0..parts.div_ceil(64)).map(|_| AtomicU64::new(0));
        let notes = self.notes.get_or_init(|| words().collect());
        self.is_noted.store(true, Ordering::SeqCst);
        for (word, bits) in notes.iter().enumerate() {
            let left = parts - 64 * word as u64;
            let all = u64::MAX >> (64 - left.min(64));
            bits.store(all, Ordering::SeqCst);
        }
    }

    /// Changes are noted no longer.
    pub fn end(&self) {
        self.is_noted.store(false, Ordering::SeqCst);
        for bits in self.notes.get().into_iter().flat_map(|notes| notes.iter()) {
            bits.store(0, Ordering::SeqCst);
        }
    }

    /// Notes a change that is complete.
    pub fn note(&self, offset: u64, length: u64) {
        if !self.is_noted.load(Ordering::SeqCst) || length == 0 {
            return;
        }
        let Some(notes) = self.notes.get() else {
            return;
        };
        for part in offset / PART..=(offset + length - 1) / PART {
            if let Some(bits) = notes.get(part as usize / 64) {
                bits.fetch_or(1 << (part % 64), Ordering::SeqCst);
            }
        }
    }

    /// Takes the note of the first changed part at or behind this one: its number.
    pub fn take(&self, from: u64) -> Option<u64> {
        let notes = self.notes.get()?;
        let mut from_bit = from % 64;
        for word in from as usize / 64..notes.len() {
            let bits = notes[word].load(Ordering::SeqCst) & (u64::MAX << from_bit);
            if bits != 0 {
                let bit = bits.trailing_zeros();
                notes[word].fetch_and(!(1 << bit), Ordering::SeqCst);
                return Some(64 * word as u64 + u64::from(bit));
            }
            from_bit = 0;
        }
        None
    }

    /// Parts that a copy lacks.
    pub fn count(&self) -> u64 {
        let notes = self.notes.get().into_iter().flat_map(|notes| notes.iter());
        notes
            .map(|bits| u64::from(bits.load(Ordering::SeqCst).count_ones()))
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(changed: &ChangedParts) -> Vec<u64> {
        std::iter::successors(changed.take(0), |part| changed.take(part + 1)).collect()
    }

    #[test]
    fn all_parts_are_taken_once() {
        for parts in [1, 63, 64, 65, 200] {
            let changed = ChangedParts::default();
            changed.begin(parts * PART - 512);
            assert_eq!(changed.count(), parts);
            assert_eq!(taken(&changed), (0..parts).collect::<Vec<u64>>());
            assert_eq!((changed.count(), changed.take(0)), (0, None));
        }
    }

    #[test]
    fn a_change_is_noted_in_each_part_that_it_touches() {
        let changed = ChangedParts::default();
        // Nobody copies.
        changed.note(0, PART);
        assert_eq!(changed.count(), 0);
        changed.begin(100 * PART);
        taken(&changed);
        changed.note(PART - 1, 2);
        changed.note(64 * PART, PART);
        changed.note(70 * PART + 512, 512);
        changed.note(5 * PART, 0);
        // Beyond the end: a geometry that no driver may use.
        changed.note(1000 * PART, 512);
        assert_eq!(taken(&changed), [0, 1, 64, 70]);
        changed.note(3 * PART, 1);
        changed.end();
        assert_eq!(changed.count(), 0);
        changed.note(3 * PART, 1);
        assert_eq!(changed.take(0), None);
    }

    /// A thread changes parts of a model, and another one copies them.
    #[test]
    fn a_copy_gets_the_last_of_each_part() {
        const PARTS: usize = 130;
        const WRITES: u64 = 200_000;
        let disk: Vec<AtomicU64> = (0..PARTS).map(|_| AtomicU64::new(0)).collect();
        let changed = ChangedParts::default();
        changed.begin(PARTS as u64 * PART);
        let is_over = AtomicBool::new(false);
        let copy = std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=WRITES {
                    let part = number * 7919 % PARTS as u64;
                    disk[part as usize].store(number, Ordering::SeqCst);
                    changed.note(part * PART, PART);
                }
                is_over.store(true, Ordering::SeqCst);
            });
            let copier = scope.spawn(|| {
                let mut copy = vec![0; PARTS];
                loop {
                    let is_last = is_over.load(Ordering::SeqCst);
                    let mut from = 0;
                    while let Some(part) = changed.take(from) {
                        copy[part as usize] = disk[part as usize].load(Ordering::SeqCst);
                        from = part + 1;
                    }
                    if is_last {
                        return copy;
                    }
                }
            });
            copier.join().unwrap()
        });
        let disk: Vec<u64> = disk
            .iter()
            .map(|part| part.load(Ordering::SeqCst))
            .collect();
        assert_eq!(copy, disk);
    }
}
