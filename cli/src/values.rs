//! Values that several commands take.

use std::path::PathBuf;
use std::time::Duration;

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
    type Err = String;
    fn from_str(text: &str) -> Result<StatsArg, String> {
        match (text, text.strip_prefix("json=")) {
            ("text", _) => Ok(StatsArg::Text),
            ("json", _) => Ok(StatsArg::Json),
            (_, Some("")) => Err("`json=` lacks the file's name".into()),
            (_, Some(file)) => Ok(StatsArg::JsonFile(file.into())),
            _ => Err("use `text`, `json` or `json=FILE`".into()),
        }
    }
}

/// A duration in seconds, as typed.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds")?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}
