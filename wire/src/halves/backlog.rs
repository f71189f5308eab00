//! Bytes that wait for the kernel, oldest first, in blocks: what is appended is
//! copied once, and what is taken out is not copied again.

use std::collections::VecDeque;

/// Most bytes that may wait for one peer: some 200 of the largest frames.
pub const BACKLOG_MAX: usize = 64 << 20;
/// Bytes of a block: about what a socket's buffer takes at once.
const BLOCK_BYTES: usize = 256 << 10;

/// See the module. Invariant: `waiting` is the sum of the blocks' lengths, and
/// of the block that was taken and not finished.
#[derive(Default)]
pub(super) struct Backlog {
    blocks: VecDeque<Vec<u8>>,
    waiting: usize,
    taken: usize,
}

impl Backlog {
    /// Whether nothing waits and nothing was taken that is not finished: only
    /// then may a frame go to the kernel directly.
    pub fn is_idle(&self) -> bool {
        self.waiting == 0
    }

    /// Bytes that wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Appends the parts, without the first `skip` bytes of them.
    pub fn append<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>, mut skip: usize) {
        for part in parts {
            let skipped = skip.min(part.len());
            skip -= skipped;
            self.append_part(&part[skipped..]);
        }
    }

    fn append_part(&mut self, mut part: &[u8]) {
        while !part.is_empty() {
            let room = |block: &Vec<u8>| BLOCK_BYTES - block.len();
            match self.blocks.back_mut().filter(|block| room(block) > 0) {
                None => self.blocks.push_back(Vec::with_capacity(BLOCK_BYTES)),
                Some(block) => {
                    let (now, later) = part.split_at(part.len().min(room(block)));
                    block.extend_from_slice(now);
                    self.waiting += now.len();
                    part = later;
                }
            }
        }
    }

    /// Takes the oldest block out; it counts as waiting until it is finished.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        debug_assert_eq!(self.taken, 0);
        let block = self.blocks.pop_front()?;
        self.taken = block.len();
        Some(block)
    }

    /// The block that was taken is with the kernel, or given up.
    pub fn finish(&mut self) {
        self.waiting -= self.taken;
        self.taken = 0;
    }

    /// Forgets what waits, but not what was taken.
    pub fn clear(&mut self) {
        self.blocks = VecDeque::new();
        self.waiting = self.taken;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_as_they_went_in() {
        let bytes: Vec<u8> = (0..3 * BLOCK_BYTES + 5)
            .map(|at| (at * 7 + (at >> 9)) as u8)
            .collect();
        let mut backlog = Backlog::default();
        for part in bytes.chunks(70_001) {
            backlog.append([b"skip".as_slice(), b"ped", part].into_iter(), 7);
        }
        assert_eq!(backlog.waiting(), bytes.len());
        let mut out = Vec::new();
        while let Some(block) = backlog.take() {
            assert!(!backlog.is_idle() && block.len() <= BLOCK_BYTES);
            out.extend(block);
            backlog.finish();
        }
        assert!(out == bytes);
        assert!(backlog.is_idle());
    }

    #[test]
    fn what_was_taken_counts_until_it_is_finished() {
        let mut backlog = Backlog::default();
        backlog.append([b"one".as_slice()].into_iter(), 0);
        let block = backlog.take();
        backlog.append([b"three".as_slice()].into_iter(), 0);
        assert_eq!((block, backlog.waiting()), (Some(b"one".to_vec()), 8));
        backlog.clear();
        assert_eq!(backlog.waiting(), 3);
        backlog.finish();
        assert!(backlog.is_idle());
    }
}
