//! Medians, tables, and where they are written.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use serde_json::{Value, json};

/// The middle of some samples; `None` without any.
pub fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len();
    match count {
        0 => None,
        _ if count % 2 == 1 => Some(sorted[count / 2]),
        _ => Some((sorted[count / 2 - 1] + sorted[count / 2]) / 2.0),
    }
}

/// The smallest sample with at least this part of all samples at or below it (nearest rank);
/// `None` without any.
pub fn quantile(samples: &[f64], part: f64) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// Whether a goal is met, as a table says it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    /// The value must not be greater.
    AtMost(f64),
    /// The value must not be less.
    AtLeast(f64),
    None,
}

impl Goal {
    /// The cells "goal" and "met".
    pub fn cells(self, value: Option<f64>) -> [String; 2] {
        let (text, met) = match self {
            Goal::AtMost(bound) => (format!("≤ {bound}"), value.map(|v| v <= bound)),
            Goal::AtLeast(bound) => (format!("≥ {bound}"), value.map(|v| v >= bound)),
            Goal::None => return ["—".to_string(), "—".to_string()],
        };
        let met = match met {
            Some(true) => "yes",
            Some(false) => "**no**",
            None => "not measured",
        };
        [text, met.to_string()]
    }
}

/// A number with three significant digits, or a dash.
pub fn digits(value: Option<f64>) -> String {
    match value {
        None => "—".to_string(),
        Some(0.0) => "0".to_string(),
        Some(v) => {
            let decimals = (2 - v.abs().log10().floor() as i32).clamp(0, 6) as usize;
            format!("{v:.decimals$}")
        }
    }
}

/// A table under a name.
#[derive(Debug, Clone)]
pub struct Table {
    /// Its name: a file in `bench/results`, and a marker in the page.
    pub name: String,
    /// The command that makes it again.
    pub command: String,
    /// One sentence about how it was measured.
    pub about: String,
    /// Column heads.
    pub head: Vec<String>,
    /// Cells.
    pub rows: Vec<Vec<String>>,
    /// Every sample.
    pub samples: Value,
}

impl Table {
    /// An empty table.
    pub fn new(name: &str, about: &str, head: &[&str]) -> Table {
        Table {
            name: name.to_string(),
            command: format!("make bench BENCHMARKS={name}"),
            about: about.to_string(),
            head: head.iter().map(|cell| cell.to_string()).collect(),
            rows: Vec::new(),
            samples: json!({}),
        }
    }

    /// The table as Markdown.
    pub fn to_markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let mut text = format!("{}\n\n`{}`\n\n", self.about, self.command);
        text += &line(&self.head);
        text += &line(&vec!["---".to_string(); self.head.len()]);
        for row in &self.rows {
            text += &line(row);
        }
        text
    }

    /// Writes the samples, and puts the table between its markers in the page.
    pub fn write(&self, results: &Path, page: &Path) -> Result<()> {
        fs::create_dir_all(results)?;
        let document = json!({
            "name": self.name,
            "command": self.command,
            "host": host(),
            "table": { "head": self.head, "rows": self.rows },
            "samples": self.samples,
        });
        let file = results.join(format!("{}.json", self.name));
        fs::write(&file, serde_json::to_string_pretty(&document)? + "\n")
            .with_context(|| format!("{}", file.display()))?;
        let old = fs::read_to_string(page).with_context(|| format!("{}", page.display()))?;
        fs::write(page, replace(&old, &self.name, &self.to_markdown())?)?;
        Ok(())
    }
}

/// What a reader has to know about the machine.
fn host() -> Value {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let processor = read("/proc/cpuinfo").lines().find_map(|line| {
        Some(
            line.strip_prefix("model name")?
                .split(':')
                .nth(1)?
                .trim()
                .to_string(),
        )
    });
    json!({
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "processor": processor,
        "cores": std::thread::available_parallelism().map_or(0, |cores| cores.get()),
        "load_before": read("/proc/loadavg").trim(),
    })
}

/// Replaces what is between `<!-- table: NAME -->` and `<!-- end -->`.
fn replace(page: &str, name: &str, table: &str) -> Result<String> {
    let start = format!("<!-- table: {name} -->\n");
    let from = page
        .find(&start)
        .ok_or_else(|| anyhow!("the page has no marker {}", start.trim()))?
        + start.len();
    let until = page[from..]
        .find("<!-- end -->")
        .ok_or_else(|| anyhow!("the marker {} has no end", start.trim()))?
        + from;
    Ok(format!("{}\n{table}\n{}", &page[..from], &page[until..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn quantiles_are_samples() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(quantile(&[], 0.99), None);
        assert_eq!(quantile(&[2.0], 0.99), Some(2.0));
        assert_eq!(quantile(&hundred, 0.99), Some(99.0));
        assert_eq!(quantile(&hundred, 1.0), Some(100.0));
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!(digits(Some(1234.0)), "1234");
        assert_eq!(digits(Some(1.2345)), "1.23");
        assert_eq!(digits(Some(0.012345)), "0.0123");
        assert_eq!(digits(None), "—");
    }

    #[test]
    fn a_goal_missed_is_said() {
        assert_eq!(Goal::AtMost(1.05).cells(Some(1.06))[1], "**no**");
        assert_eq!(Goal::AtLeast(10.0).cells(Some(10.0))[1], "yes");
        assert_eq!(Goal::AtMost(1.0).cells(None)[1], "not measured");
    }

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let page =
            "a\n<!-- table: x -->\nold\n<!-- end -->\nb\n<!-- table: y -->\nkept\n<!-- end -->\n";
        let new = replace(page, "x", "new").expect("there are markers");
        assert_eq!(
            new,
            "a\n<!-- table: x -->\n\nnew\n<!-- end -->\nb\n<!-- table: y -->\nkept\n<!-- end -->\n"
        );
        assert!(replace(page, "z", "new").is_err());
    }
}
