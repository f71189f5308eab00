//! The access history of pages that move, on its way to the slice that keeps them then: a word
//! for each run of pages with the same history, in ascending order.
//!
//! | bits | |
//! | --- | --- |
//! | 0 to 39 | the number of the first page |
//! | 40 to 55 | how many pages, less one |
//! | 56 to 63 | their history, not zero |
//!
//! Decoding is total: it gives runs within the bounds, or a named error. Nothing depends on a
//! history but where pages go in a later split.

use thiserror::Error;
use weft_coherent_memory::HistoryRun;

/// Words in one message, 128 KiB: less than half of what a frame may have.
pub const RUNS_MAX: usize = 1 << 14;
/// Pages in one message, 4 GiB.
pub const PAGES_MAX: u64 = 1 << 20;

const COUNT_SHIFT: u32 = 40;
const BITS_SHIFT: u32 = 56;
const FIRST_MAX: u64 = (1 << COUNT_SHIFT) - 1;
const COUNT_MAX: u64 = 1 << (BITS_SHIFT - COUNT_SHIFT);

/// Why bytes are no history of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PageHistoryError {
    #[error("{0} bytes are not whole runs of pages, or more than {RUNS_MAX} runs")]
    Length(usize),
    #[error("run {0} has no history")]
    Empty(usize),
    #[error("{0} pages are more than the allowed {PAGES_MAX}")]
    Pages(u64),
}

/// The runs as one message, or several. Pages beyond 4 PiB are left out.
pub fn encode(runs: &[HistoryRun]) -> Vec<Vec<u8>> {
    let mut messages: Vec<Vec<u8>> = Vec::new();
    let (mut words, mut pages) = (RUNS_MAX, 0);
    for run in runs {
        let end = (run.first + run.count).min(FIRST_MAX + 1);
        let mut first = run.first;
        while first < end && run.bits != 0 {
            let count = (end - first).min(COUNT_MAX);
            if words == RUNS_MAX || pages + count > PAGES_MAX {
                messages.push(Vec::new());
                (words, pages) = (0, 0);
            }
            let word = first | (count - 1) << COUNT_SHIFT | u64::from(run.bits) << BITS_SHIFT;
            if let Some(message) = messages.last_mut() {
                message.extend_from_slice(&word.to_le_bytes());
            }
            (words, pages, first) = (words + 1, pages + count, first + count);
        }
    }
    messages
}

/// # Errors
/// The bytes are not a message of [`encode`].
pub fn decode(bytes: &[u8]) -> Result<Vec<HistoryRun>, PageHistoryError> {
    let (words, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() || words.len() > RUNS_MAX {
        return Err(PageHistoryError::Length(bytes.len()));
    }
    let run = |word: &[u8; 8]| {
        let word = u64::from_le_bytes(*word);
        HistoryRun {
            first: word & FIRST_MAX,
            count: (word >> COUNT_SHIFT & (COUNT_MAX - 1)) + 1,
            bits: (word >> BITS_SHIFT) as u8,
        }
    };
    let runs: Vec<HistoryRun> = words.iter().map(run).collect();
    if let Some(empty) = runs.iter().position(|run| run.bits == 0) {
        return Err(PageHistoryError::Empty(empty));
    }
    match runs.iter().map(|run| run.count).sum() {
        pages if pages > PAGES_MAX => Err(PageHistoryError::Pages(pages)),
        _ => Ok(runs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, count: u64, bits: u8) -> HistoryRun {
        HistoryRun { first, count, bits }
    }

    fn decoded(messages: &[Vec<u8>]) -> Vec<HistoryRun> {
        let runs = messages.iter().flat_map(|bytes| decode(bytes).unwrap());
        runs.collect()
    }

    #[test]
    fn runs_come_out_as_they_went_in() {
        let runs = [
            run(0, 1, 0x80),
            run(7, COUNT_MAX, 1),
            run(FIRST_MAX, 1, 255),
        ];
        let messages = encode(&runs);
        assert_eq!((messages.len(), decoded(&messages)), (1, runs.to_vec()));
        assert_eq!(encode(&[]), Vec::<Vec<u8>>::new());
        assert_eq!(encode(&[run(5, 6, 0)]), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn what_is_too_much_for_one_message_goes_in_several() {
        let many: Vec<HistoryRun> = (0..RUNS_MAX as u64 + 1)
            .map(|at| run(2 * at, 1, 3))
            .collect();
        let messages = encode(&many);
        assert_eq!((messages.len(), decoded(&messages)), (2, many));
        let long = [run(9, 2 * PAGES_MAX + 1, 0x40)];
        let messages = encode(&long);
        assert_eq!(messages.len(), 3);
        let pages: u64 = decoded(&messages).iter().map(|run| run.count).sum();
        assert_eq!(pages, 2 * PAGES_MAX + 1);
        let beyond = [run(FIRST_MAX, 2, 1)];
        assert_eq!(decoded(&encode(&beyond)), [run(FIRST_MAX, 1, 1)]);
    }

    #[test]
    fn bytes_of_no_history_are_refused() {
        let whole = encode(&[run(1, 2, 3), run(4, 5, 6)]).concat();
        assert_eq!(decode(&whole[..15]), Err(PageHistoryError::Length(15)));
        let length = 8 * (RUNS_MAX + 1);
        let many = vec![0xff; length];
        assert_eq!(decode(&many), Err(PageHistoryError::Length(length)));
        let empty = [&whole[..8], &[0; 8]].concat();
        assert_eq!(decode(&empty), Err(PageHistoryError::Empty(1)));
        let full = encode(&[run(0, PAGES_MAX, 1)]).concat();
        let more = [&full[..], &whole[..8]].concat();
        assert_eq!(decode(&more), Err(PageHistoryError::Pages(PAGES_MAX + 2)));
    }
}
