//! Steps of the copy of a disk.

/// What a message of a copy asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyStep {
    /// Write these bytes.
    Write,
    /// A part has zeroes only.
    Zero,
    /// Put all of it on the host's disk.
    Sync,
    /// The copy is complete: let the next process lock it.
    Close,
}

impl CopyStep {
    pub fn code(self) -> u64 {
        match self {
            Self::Write => 0,
            Self::Zero => 1,
            Self::Sync => 2,
            Self::Close => 3,
        }
    }

    pub fn from_code(code: u64) -> Option<Self> {
        let all = [Self::Write, Self::Zero, Self::Sync, Self::Close];
        all.into_iter().find(|step| step.code() == code)
    }
}
