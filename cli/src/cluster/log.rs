//! `weft cluster log`.

use std::time::Duration;

use weft_cluster::LogRecord;
use weft_node::member::{MemberError, Membership};
use weft_node::said::plain;

/// How often `--follow` looks.
const FOLLOW: Duration = Duration::from_millis(500);

/// `weft cluster log`.
pub fn show(follow: bool, json: bool) -> anyhow::Result<()> {
    let (_, cluster) = Membership::joined()?;
    let (mut last, mut is_silent) = (0, false);
    loop {
        let records = cluster.log_after(last).map_err(MemberError::from);
        let records = match records {
            Err(error) if follow && error.is_silence() => {
                if !is_silent {
                    eprintln!("weft: {error}; trying again");
                }
                is_silent = true;
                Vec::new()
            }
            records => {
                is_silent = false;
                records?
            }
        };
        for record in records {
            match json {
                true => println!("{}", serde_json::to_string(&record)?),
                false => println!("{}", line(&record)),
            }
            last = record.number;
        }
        if !follow {
            return Ok(());
        }
        // A log that is empty still is read as a whole again.
        std::thread::sleep(FOLLOW);
    }
}

/// A record as `weft cluster log` prints it: the time is UTC.
pub fn line(record: &LogRecord) -> String {
    format!(
        "{}  {:<6}  {}",
        time_of(record.at),
        record.kind.name(),
        plain(&record.what)
    )
}

/// Seconds since 1970 as `2026-11-26 21:05:09`, in UTC.
pub fn time_of(seconds: u64) -> String {
    let time = jiff::Timestamp::from_second(seconds.try_into().unwrap_or(i64::MAX));
    time.map_or_else(
        |_| seconds.to_string(),
        |time| time.strftime("%F %T").to_string(),
    )
}
