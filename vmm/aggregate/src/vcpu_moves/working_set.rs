//! The pages that a vCPU used lately, on their way to the slice that has it now: a word for
//! each run of pages, the run that was used last in front.
//!
//! | bits | |
//! | --- | --- |
//! | 0 to 47 | the number of the first page |
//! | 48 to 62 | how many pages, one at least |
//! | 63 | the vCPU will write them |
//!
//! Decoding is total: it gives runs within the bounds, or a named error.

use thiserror::Error;
use weft_vcpu::{Access, PageRun};

/// Runs in one message, 128 KiB: less than half of what a frame may have.
pub const RUNS_MAX: usize = 1 << 14;
/// Pages in one message, 128 MiB: as many as a software vCPU remembers.
pub const PAGES_MAX: u64 = 1 << 15;

const COUNT_SHIFT: u32 = 48;
const FIRST_MAX: u64 = (1 << COUNT_SHIFT) - 1;
const COUNT_MAX: u64 = (1 << 15) - 1;
const WRITE: u64 = 1 << 63;

/// Why bytes are no working set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WorkingSetError {
    #[error("{0} bytes are not whole runs of pages, or more than {RUNS_MAX} runs")]
    Length(usize),
    #[error("run {0} has no pages")]
    Empty(usize),
    #[error("{0} pages are more than the allowed {PAGES_MAX}")]
    Pages(u64),
}

/// As many of the runs, from the first on, as one message may have.
pub fn encode(runs: &[PageRun]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut left = PAGES_MAX;
    for run in runs.iter().take(RUNS_MAX) {
        let count = run.count.min(COUNT_MAX).min(left);
        if count == 0 || run.first > FIRST_MAX {
            continue;
        }
        left -= count;
        let write = if run.access == Access::Write {
            WRITE
        } else {
            0
        };
        let word = run.first | count << COUNT_SHIFT | write;
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// # Errors
/// The bytes are not what [`encode`] writes.
pub fn decode(bytes: &[u8]) -> Result<Vec<PageRun>, WorkingSetError> {
    let (words, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() || words.len() > RUNS_MAX {
        return Err(WorkingSetError::Length(bytes.len()));
    }
    let runs: Vec<PageRun> = words.iter().map(|word| run(*word)).collect();
    if let Some(empty) = runs.iter().position(|run| run.count == 0) {
        return Err(WorkingSetError::Empty(empty));
    }
    match runs.iter().map(|run| run.count).sum() {
        pages if pages > PAGES_MAX => Err(WorkingSetError::Pages(pages)),
        _ => Ok(runs),
    }
}

fn run(word: [u8; 8]) -> PageRun {
    let word = u64::from_le_bytes(word);
    PageRun {
        first: word & FIRST_MAX,
        count: word >> COUNT_SHIFT & COUNT_MAX,
        access: match word & WRITE {
            0 => Access::Read,
            _ => Access::Write,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, count: u64, access: Access) -> PageRun {
        PageRun {
            first,
            count,
            access,
        }
    }

    #[test]
    fn runs_come_out_as_they_went_in() {
        let runs = [
            run(FIRST_MAX, 1, Access::Write),
            run(0, 3, Access::Read),
            run(77, COUNT_MAX - 4, Access::Write),
        ];
        assert_eq!(decode(&encode(&runs)), Ok(runs.into()));
        assert_eq!(decode(&[]), Ok(vec![]));
    }

    #[test]
    fn what_was_used_first_is_left_out() {
        let many = vec![run(1, 1, Access::Read); RUNS_MAX + 1];
        assert_eq!(decode(&encode(&many)).unwrap().len(), RUNS_MAX);
        let long = vec![run(1, COUNT_MAX - 1, Access::Read); 3];
        let sent = decode(&encode(&long)).unwrap();
        let counts: Vec<u64> = sent.iter().map(|run| run.count).collect();
        assert_eq!(counts, [COUNT_MAX - 1, PAGES_MAX - COUNT_MAX + 1]);
    }

    #[test]
    fn bytes_of_no_working_set_are_refused() {
        let whole = [run(5, 1, Access::Read), run(9, 2, Access::Write)];
        let whole = encode(&whole);
        assert_eq!(decode(&whole[..15]), Err(WorkingSetError::Length(15)));
        let many = whole.repeat(RUNS_MAX / 2 + 1);
        let length = many.len();
        assert_eq!(decode(&many), Err(WorkingSetError::Length(length)));
        let none = [&whole[..], &5u64.to_le_bytes()].concat();
        assert_eq!(decode(&none), Err(WorkingSetError::Empty(2)));
        let pages = [0xff; 16];
        let count = 2 * COUNT_MAX;
        assert_eq!(decode(&pages), Err(WorkingSetError::Pages(count)));
    }
}
