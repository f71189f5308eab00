//! Frames on their way between slices, several in one message: each with its header
//! (5.1.6), so that what was left to the other side still is, behind the length of
//! both in four bytes, least significant first.
//!
//! What is under way is counted in bytes of batches. A side has at most a *window*
//! under way; who receives says what it took once that is a quarter of it. So an
//! empty way always has room for a whole batch, and few notes say so.

use weft_virtio::net::{FRAME_MAX, HEADER};

/// Bytes of a frame's length.
const LENGTH: usize = 4;
/// Most bytes of a batch: less than a frame of the wire may carry.
pub const BATCH_MAX: usize = 96 << 10;
/// Least and most bytes that may be under way from one side of a way.
const WINDOW_MIN: usize = 128 << 10;
const WINDOW_MAX: usize = 1 << 20;
/// The same of all ways of a machine: a quarter of what a link's backlog may hold.
const WINDOWS_TOTAL: usize = 16 << 20;

const _: () = assert!(BATCH_MAX <= WINDOW_MIN - WINDOW_MIN / 4);
const _: () = assert!(cost(HEADER + FRAME_MAX) <= BATCH_MAX);

/// Bytes that may be in flight, in a machine with this many directions.
pub fn window(ways: usize) -> usize {
    (WINDOWS_TOTAL / ways.max(1)).clamp(WINDOW_MIN, WINDOW_MAX)
}

/// What a frame of `length` bytes, its header among them, takes of a batch.
pub const fn cost(length: usize) -> usize {
    LENGTH + length
}

/// Adds a frame at the end of a batch.
pub fn add(batch: &mut Vec<u8>, frame: &[u8]) {
    batch.extend((frame.len() as u32).to_le_bytes());
    batch.extend_from_slice(frame);
}

/// A batch that is filled in place, again and again.
pub struct Batch {
    bytes: Box<[u8]>,
    filled: usize,
}

impl Batch {
    /// An empty one.
    pub fn new() -> Self {
        Self {
            bytes: vec![0; BATCH_MAX].into(),
            filled: 0,
        }
    }

    /// Whether a frame of `length` bytes fits.
    pub fn fits(&self, length: usize) -> bool {
        self.filled + cost(length) <= BATCH_MAX
    }

    /// Room for a frame of `length` bytes, which must fit. Its contents are left over
    /// from earlier ones: all of it must be overwritten.
    pub fn add(&mut self, length: usize) -> &mut [u8] {
        let (head, rest) = self.bytes[self.filled..].split_at_mut(LENGTH);
        head.copy_from_slice(&(length as u32).to_le_bytes());
        self.filled += cost(length);
        &mut rest[..length]
    }

    /// What was added.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.filled]
    }

    /// Nothing was.
    pub fn clear(&mut self) {
        self.filled = 0;
    }
}

/// The first frame of what is left of a batch, which goes on behind it.
pub fn next<'a>(batch: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, rest) = batch.split_first_chunk::<LENGTH>()?;
    let (frame, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    *batch = rest;
    Some(frame)
}

/// Refuses what no slice that does as it should would send.
///
/// # Errors
/// What is wrong.
pub fn check(batch: &[u8]) -> Result<(), String> {
    if batch.is_empty() || batch.len() > BATCH_MAX {
        return Err(format!("it sent {} bytes of frames at once", batch.len()));
    }
    let mut rest = batch;
    while !rest.is_empty() {
        match next(&mut rest) {
            Some(frame) if (HEADER + 1..=HEADER + FRAME_MAX).contains(&frame.len()) => {}
            Some(frame) => return Err(format!("it sent a frame of {} bytes", frame.len())),
            None => return Err("it sent a partial frame".into()),
        }
    }
    Ok(())
}

/// What one side has under way.
#[derive(Debug)]
pub struct Credit {
    window: usize,
    under_way: usize,
}

impl Credit {
    /// Nothing yet.
    pub fn new(window: usize) -> Self {
        let under_way = 0;
        Self { window, under_way }
    }

    /// Whether `bytes` more may be under way.
    pub fn has_room(&self, bytes: usize) -> bool {
        self.under_way + bytes <= self.window
    }

    pub fn send(&mut self, bytes: usize) {
        self.under_way += bytes;
    }

    /// The other side accepted this many.
    ///
    /// # Errors
    /// More than there were.
    pub fn taken(&mut self, bytes: u64) -> Result<(), String> {
        let left = usize::try_from(bytes).ok();
        let left = left.and_then(|bytes| self.under_way.checked_sub(bytes));
        self.under_way = left.ok_or_else(|| {
            format!(
                "it acknowledged {bytes} bytes of frames \
        too many"
            )
        })?;
        Ok(())
    }
}

/// What the other side has under way.
#[derive(Debug)]
pub struct Debt {
    window: usize,
    held: usize,
    unsaid: usize,
}

impl Debt {
    /// Nothing yet.
    pub fn new(window: usize) -> Self {
        let (held, unsaid) = (0, 0);
        Self {
            window,
            held,
            unsaid,
        }
    }

    /// So many bytes came.
    ///
    /// # Errors
    /// More than might.
    pub fn receive(&mut self, bytes: usize) -> Result<(), String> {
        if self.held + bytes > self.window {
            return Err("it sends more frames than allowed".into());
        }
        self.held += bytes;
        Ok(())
    }

    /// This many of them are done with; returns how many to report to the other side now.
    pub fn take(&mut self, bytes: usize) -> Option<u64> {
        self.unsaid += bytes;
        if self.unsaid < self.window / 4 {
            return None;
        }
        let said = std::mem::take(&mut self.unsaid);
        self.held = self.held.saturating_sub(said);
        Some(said as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_come_apart_as_they_were_put_together() {
        let (mut grown, mut filled) = (Vec::new(), Batch::new());
        let lengths = [13, 72, HEADER + FRAME_MAX];
        // The second time over what is left of the first.
        for _ in 0..2 {
            grown.clear();
            filled.clear();
            for (byte, length) in (1..).zip(lengths) {
                add(&mut grown, &vec![byte; length]);
                assert!(filled.fits(length));
                filled.add(length).fill(byte);
            }
            assert!(!filled.fits(BATCH_MAX - cost(HEADER + FRAME_MAX)));
            assert!(filled.bytes() == grown);
            assert_eq!(grown.len(), lengths.map(cost).iter().sum::<usize>());
            assert_eq!(check(&grown), Ok(()));
            let mut rest = &grown[..];
            for (byte, length) in (1..).zip(lengths) {
                assert!(next(&mut rest).unwrap() == vec![byte; length]);
            }
            assert_eq!(next(&mut rest), None);
        }
    }

    #[test]
    fn batches_that_are_none_are_refused() {
        let with = |lengths: &[usize]| {
            let mut batch = Vec::new();
            for length in lengths {
                add(&mut batch, &vec![0; *length]);
            }
            check(&batch)
        };
        let refused = |lengths: &[usize], reason: &str| {
            let said = with(lengths).unwrap_err();
            assert!(said.contains(reason), "{said}");
        };
        refused(&[], "0 bytes of frames");
        refused(&[60, HEADER], "a frame of 12 bytes");
        refused(&[HEADER + FRAME_MAX + 1], "a frame of 65566 bytes");
        refused(&[60_000; 2], "120008 bytes of frames");
        assert!(check(&[9, 0, 0, 0, 1]).unwrap_err().contains("a part"));
        assert!(check(&[1, 2]).unwrap_err().contains("a part"));
    }

    /// However small the window: after all was taken, a whole batch may go.
    #[test]
    fn what_was_not_said_leaves_room_for_a_batch() {
        for ways in [0, 1, 20, 1000] {
            let window = window(ways);
            let (mut credit, mut debt) = (Credit::new(window), Debt::new(window));
            for bytes in (1..BATCH_MAX).step_by(977) {
                assert!(credit.has_room(BATCH_MAX));
                credit.send(bytes);
                debt.receive(bytes).unwrap();
                if let Some(taken) = debt.take(bytes) {
                    credit.taken(taken).unwrap();
                }
            }
            assert!(debt.receive(window + 1).is_err());
            assert!(credit.taken(1 << 40).is_err());
        }
    }
}
