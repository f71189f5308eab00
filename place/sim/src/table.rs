//! The figures of all policies beside each other, as a table in Markdown.

use crate::outcome::Outcome;

/// One row of the table: its heading, and a policy's cell.
type Row = (&'static str, fn(&Outcome) -> String);

const ROWS: [Row; 19] = [
    ("placed at once, %", |o| format!("{:.2}", o.at_once_percent)),
    ("delayed", |o| o.delayed.to_string()),
    ("still waiting at the end", |o| o.never_placed.to_string()),
    ("refused", |o| o.refused.to_string()),
    ("wait, mean s", |o| format!("{:.1}", o.wait_mean_s)),
    ("wait, median s", |o| format!("{:.1}", o.wait_p50_s)),
    ("wait, p99 s", |o| format!("{:.1}", o.wait_p99_s)),
    ("waited core-hours", |o| {
        format!("{:.0}", o.waited_core_hours)
    }),
    ("packing at the first delay, %", |o| {
        percent(o.packing_at_first_delay_percent)
    }),
    ("used after it, mean %", |o| percent(o.used_after_percent)),
    ("started on several hosts", |o| {
        o.spread_aggregates.to_string()
    }),
    ("hosts of these at the start", |o| {
        format!("{:.2}", o.hosts_of_spread_mean)
    }),
    ("time on several hosts, mean s", |o| {
        format!("{:.0}", o.spread_life_mean_s)
    }),
    ("made whole by moves", |o| o.made_whole.to_string()),
    ("moves an hour", |o| format!("{:.1}", o.moves_an_hour)),
    ("moved, GiB", |o| format!("{:.0}", o.moved_gib)),
    ("work lost to it, %", |o| format!("{:.3}", o.lost_percent)),
    ("work done, core-hours", |o| {
        format!("{:.0}", o.done_core_hours)
    }),
    ("decisions/s (p99 µs)", |o| {
        format!("{:.0} ({:.0})", o.decisions_a_second, o.decision_p99_us)
    }),
];

fn percent(value: Option<f64>) -> String {
    value.map_or("—".into(), |value| format!("{value:.2}"))
}

pub fn render(outcomes: &[Outcome]) -> String {
    let mut text = String::from("| |");
    for outcome in outcomes {
        text += &format!(" {} |", outcome.policy);
    }
    text += "\n| --- |";
    text += &" ---: |".repeat(outcomes.len());
    text.push('\n');
    for (heading, cell) in ROWS {
        text += &format!("| {heading} |");
        for outcome in outcomes {
            text += &format!(" {} |", cell(outcome));
        }
        text.push('\n');
    }
    text
}
