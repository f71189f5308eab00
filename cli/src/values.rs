//! Values that several commands take.

use std::path::PathBuf;
use std::time::{Duration, TryFromFloatSecsError};

/// Why a value is not what its option takes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// `--stats json=`.
    #[error("`json=` lacks the file's name")]
    NoFile,
    /// `--stats` of another kind.
    #[error("use `text`, `json` or `json=FILE`")]
    NoStats,
    /// Letters where seconds are.
    #[error("not a number of seconds")]
    NotSeconds,
    /// Negative, or more than any clock counts.
    #[error("not a number of seconds from 0 to some billions")]
    Seconds(#[from] TryFromFloatSecsError),
}

/// `--stats`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatsArg {
    /// A table on standard error.
    Text,
    /// JSON on standard error.
    Json,
    /// JSON in a file.
    JsonFile(PathBuf),
}

impl std::str::FromStr for StatsArg {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<StatsArg, ValueError> {
        match (text, text.strip_prefix("json=")) {
            ("text", _) => Ok(StatsArg::Text),
            ("json", _) => Ok(StatsArg::Json),
            (_, Some("")) => Err(ValueError::NoFile),
            (_, Some(file)) => Ok(StatsArg::JsonFile(file.into())),
            _ => Err(ValueError::NoStats),
        }
    }
}

/// A duration in seconds, as typed.
pub fn parse_seconds(text: &str) -> Result<Duration, ValueError> {
    let seconds: f64 = text.parse().map_err(|_| ValueError::NotSeconds)?;
    Ok(Duration::try_from_secs_f64(seconds)?)
}
