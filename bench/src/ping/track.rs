//! What came of the requests.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// A step's effect on requests may show this long after its end.
const AFTER_S: f64 = 0.1;

/// A request. Times are in seconds from the start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ping {
    pub sent_s: f64,
    /// Lost, if never.
    pub answered_s: Option<f64>,
}

/// What happened meanwhile.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    pub name: String,
    /// What its maker said at its end.
    pub note: String,
    pub from_s: f64,
    pub until_s: f64,
}

/// What was the worst of some time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Worst {
    /// Longest time between two answers.
    pub gap_s: f64,
    /// Longest time between two requests: what this host's other work did to the prober.
    pub sent_gap_s: f64,
    pub lost: usize,
    pub sent: usize,
}

/// All requests, in the order in which they were sent, and all steps.
#[derive(Debug, Clone, Default)]
pub struct Track {
    pub pings: Vec<Ping>,
    pub steps: Vec<Step>,
}

/// The longest time between two neighbours, of those that reach into the span.
fn longest_gap(times: &[f64], from_s: f64, until_s: f64) -> f64 {
    let gaps = times.windows(2);
    gaps.filter(|pair| pair[1] > from_s && pair[0] < until_s)
        .map(|pair| pair[1] - pair[0])
        .fold(0.0, f64::max)
}

impl Track {
    /// From `from_s` to a moment after `until_s`.
    pub fn worst(&self, from_s: f64, until_s: f64) -> Worst {
        let until_s = until_s + AFTER_S;
        let sent: Vec<f64> = self.pings.iter().map(|ping| ping.sent_s).collect();
        let mut answers: Vec<f64> = self.pings.iter().filter_map(|p| p.answered_s).collect();
        answers.sort_by(f64::total_cmp);
        let span = from_s..until_s;
        let within = self.pings.iter().filter(|p| span.contains(&p.sent_s));
        Worst {
            gap_s: longest_gap(&answers, from_s, until_s),
            sent_gap_s: longest_gap(&sent, from_s, until_s),
            lost: within.clone().filter(|p| p.answered_s.is_none()).count(),
            sent: within.count(),
        }
    }

    /// From the first request to the last answer.
    pub fn span_s(&self) -> (f64, f64) {
        let first = self.pings.first().map_or(0.0, |ping| ping.sent_s);
        let ends = self.pings.iter().map(|p| p.answered_s.unwrap_or(p.sent_s));
        (first, ends.fold(first, f64::max))
    }

    /// A line for each step, and one for all.
    pub fn report(&self) -> String {
        let mut text = String::new();
        let (first, last) = self.span_s();
        let whole = Step {
            name: "all of it".into(),
            note: String::new(),
            from_s: first,
            until_s: last,
        };
        for step in self.steps.iter().chain([&whole]) {
            let worst = self.worst(step.from_s, step.until_s);
            let line = format!(
                "{:<20} {:>6.2} s  longest gap {:>6.1} ms  lost {} of {:<5} {}",
                step.name,
                step.until_s - step.from_s,
                worst.gap_s * 1e3,
                worst.lost,
                worst.sent,
                step.note
            );
            text += line.trim_end();
            text.push('\n');
        }
        text
    }

    pub fn to_json(&self) -> Value {
        let pings: Vec<Value> = (self.pings.iter())
            .map(|ping| json!([ping.sent_s, ping.answered_s]))
            .collect();
        let steps: Vec<Value> = (self.steps.iter())
            .map(|step| {
                json!({
                    "name": step.name,
                    "note": step.note,
                    "from_s": step.from_s,
                    "until_s": step.until_s,
                })
            })
            .collect();
        json!({ "pings": pings, "steps": steps })
    }

    /// What [`Track::to_json`] made.
    pub fn from_json(value: &Value) -> Result<Track> {
        let list = |name: &str| value[name].as_array().context("not a record of pings");
        let mut track = Track::default();
        for ping in list("pings")? {
            track.pings.push(Ping {
                sent_s: ping[0].as_f64().context("a request without a time")?,
                answered_s: ping[1].as_f64(),
            });
        }
        for step in list("steps")? {
            let text = |name: &str| step[name].as_str().unwrap_or_default().to_owned();
            let time = |name: &str| step[name].as_f64().context("a step without a time");
            track.steps.push(Step {
                name: text("name"),
                note: text("note"),
                from_s: time("from_s")?,
                until_s: time("until_s")?,
            });
        }
        Ok(track)
    }
}

#[cfg(test)]
pub(in crate::ping) mod tests {
    use super::*;

    /// One each 10 ms for a second; those from 0.4 s to 0.5 s wait until then, and that at
    /// 0.7 s is lost.
    pub fn example() -> Track {
        let ping = |number: u32| {
            let sent_s = f64::from(number) / 100.0;
            let answer = match number {
                40..50 => 0.5,
                _ => sent_s + 0.0002,
            };
            Ping {
                sent_s,
                answered_s: (number != 70).then_some(answer),
            }
        };
        Track {
            pings: (0..100).map(ping).collect(),
            steps: vec![Step {
                name: "moves <there>".into(),
                note: "pause 100 ms".into(),
                from_s: 0.4,
                until_s: 0.5,
            }],
        }
    }

    fn is_near(value: f64, wanted: f64) {
        assert!((value - wanted).abs() < 1e-9, "{value} is not {wanted}");
    }

    #[test]
    fn a_gap_is_from_answer_to_answer() {
        let worst = example().worst(0.4, 0.5);
        is_near(worst.gap_s, 0.5 - 0.3902);
        is_near(worst.sent_gap_s, 0.01);
        assert_eq!((worst.lost, worst.sent), (0, 20));
    }

    #[test]
    fn a_gap_that_begins_before_counts_with_its_whole_length() {
        is_near(example().worst(0.45, 0.46).gap_s, 0.5 - 0.3902);
    }

    #[test]
    fn what_is_lost_is_counted_and_makes_a_gap() {
        let worst = example().worst(0.65, 0.7);
        assert_eq!(worst.lost, 1);
        is_near(worst.gap_s, 0.02);
    }

    #[test]
    fn nothing_is_no_gap() {
        let worst = Track::default().worst(0.0, 1.0);
        is_near(worst.gap_s, 0.0);
        assert_eq!((worst.lost, worst.sent), (0, 0));
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let track = example();
        let read = Track::from_json(&track.to_json()).expect("a record");
        assert_eq!(read.pings, track.pings);
        assert_eq!(read.steps, track.steps);
        assert!(Track::from_json(&json!({})).is_err());
    }

    #[test]
    fn the_report_has_a_line_for_each_step() {
        let report = example().report();
        let lines: Vec<&str> = report.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].contains("109.8 ms"), "{report}");
        assert!(lines[0].ends_with("pause 100 ms"), "{report}");
        assert!(lines[1].contains("lost 1 of 100"), "{report}");
    }
}
