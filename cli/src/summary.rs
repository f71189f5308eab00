//! The summary at the end of a run.

use std::io::IsTerminal;

use weft_node::report::{NodeState, NodeView, Report};
use weft_node::size::{format_bytes, format_pages};

use crate::table::{self, Align};

/// Whether standard error shows colours.
pub fn colour() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// The whole summary, ready to print.
pub fn render(report: &Report, colour: bool) -> String {
    let aggregate = &report.aggregate;
    let bold = |text: &str| match colour {
        true => format!("\x1b[1m{text}\x1b[0m"),
        false => text.to_owned(),
    };
    let jumps: u64 = aggregate
        .nodes
        .iter()
        .map(|node| node.counters.jumps_in)
        .sum();
    let traffic: u64 = aggregate
        .nodes
        .iter()
        .map(|node| node.counters.bytes_sent)
        .sum();
    let command = aggregate.command.first().map_or("", String::as_str);
    let headline = format!(
        "weft: {} {} in {} over {} node{}{}",
        bold(command),
        ending(report),
        format_seconds(aggregate.wall_time_s),
        aggregate.nodes.len(),
        if aggregate.nodes.len() == 1 { "" } else { "s" },
        match aggregate.stretched {
            true => format!(", {jumps} jumps, {} carried", format_bytes(traffic)),
            false => ", not stretched".to_owned(),
        },
    );
    let mut text = format!("\n{headline}\n\n");
    for line in pages(&aggregate.nodes)
        .lines()
        .chain([""])
        .chain(traffic_table(&aggregate.nodes).lines())
    {
        text += if line.is_empty() { "" } else { "  " };
        text += line;
        text.push('\n');
    }
    text
}

fn ending(report: &Report) -> String {
    match (report.exit_code, report.signal) {
        (Some(0), _) => "finished".into(),
        (Some(code), _) => format!("ended with {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".into(),
    }
}

fn name(node: &NodeView) -> String {
    match node.state {
        NodeState::Running => node.name.clone(),
        NodeState::Left => format!("{} (left)", node.name),
        NodeState::Lost => format!("{} (lost)", node.name),
    }
}

fn pages(nodes: &[NodeView]) -> String {
    use Align::{Left, Right};
    let headings = [
        ("node", Left),
        ("budget", Right),
        ("resident", Right),
        ("peak", Right),
        ("read faults", Right),
        ("write", Right),
        ("upgrade", Right),
        ("first touch", Right),
        ("pulls", Right),
        ("pushes", Right),
        ("read ahead", Right),
        ("used", Right),
    ];
    let rows: Vec<Vec<String>> = nodes
        .iter()
        .map(|node| {
            let c = &node.counters;
            vec![
                name(node),
                format_pages(node.budget_pages),
                format_pages(c.resident_pages),
                format_pages(c.resident_pages_max),
                count(c.read_faults),
                count(c.write_faults),
                count(c.upgrade_faults),
                count(c.first_touch_faults),
                count(c.pulls),
                count(c.pushes),
                count(c.read_ahead),
                share(c.read_ahead_used, c.read_ahead),
            ]
        })
        .collect();
    table::render(&headings, &rows)
}

fn traffic_table(nodes: &[NodeView]) -> String {
    use Align::{Left, Right};
    let headings = [
        ("node", Left),
        ("jumps in", Right),
        ("out", Right),
        ("sent", Right),
        ("received", Right),
        ("pull p50", Right),
        ("p99", Right),
        ("jump p50", Right),
        ("p99", Right),
        ("system calls", Right),
        ("forwarded", Right),
    ];
    let rows: Vec<Vec<String>> = nodes
        .iter()
        .map(|node| {
            let c = &node.counters;
            vec![
                name(node),
                count(c.jumps_in),
                count(c.jumps_out),
                format_bytes(c.bytes_sent),
                format_bytes(c.bytes_received),
                latency(c.pull_latency.p50_ns),
                latency(c.pull_latency.p99_ns),
                latency(c.jump_latency.p50_ns),
                latency(c.jump_latency.p99_ns),
                count(c.system_calls),
                count(c.forwarded_calls),
            ]
        })
        .collect();
    table::render(&headings, &rows)
}

/// A number with thin groups of three digits, or a dash for none.
pub fn count(number: u64) -> String {
    if number == 0 {
        return "-".into();
    }
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn share(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".into(),
        whole => format!("{} %", (part * 100 + whole / 2) / whole),
    }
}

/// A latency in the unit that suits it.
pub fn latency(ns: Option<u64>) -> String {
    match ns {
        None => "-".into(),
        Some(ns) if ns < 1_000 => format!("{ns} ns"),
        Some(ns) if ns < 1_000_000 => format!("{:.1} µs", ns as f64 / 1e3),
        Some(ns) if ns < 1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        Some(ns) => format!("{:.1} s", ns as f64 / 1e9),
    }
}

/// A duration for people.
pub fn format_seconds(seconds: f64) -> String {
    if seconds < 1.0 {
        format!("{:.0} ms", seconds * 1e3)
    } else if seconds < 120.0 {
        format!("{seconds:.2} s")
    } else {
        let whole = seconds as u64;
        format!("{} min {:02} s", whole / 60, whole % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_node::report::AggregateView;
    use weft_node::shared::Snapshot;

    #[test]
    fn numbers_read_well() {
        assert_eq!(count(0), "-");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(share(1, 3), "33 %");
        assert_eq!(latency(Some(5_900)), "5.9 µs");
        assert_eq!(format_seconds(0.0421), "42 ms");
        assert_eq!(format_seconds(125.0), "2 min 05 s");
    }

    #[test]
    fn a_summary_names_every_node() {
        let node = |node, name: &str, state| NodeView {
            node,
            name: name.into(),
            state,
            pid: None,
            budget_pages: 16384,
            owned_pages: None,
            counters: Snapshot::default(),
        };
        let report = Report {
            aggregate: AggregateView {
                format: 1,
                pid: 1,
                program_pid: 1,
                command: vec!["sort".into()],
                wall_time_s: 1.0,
                generation: 0,
                stretched: true,
                executing_node: 0,
                nodes: vec![
                    node(0, "home", NodeState::Running),
                    node(1, "alpha", NodeState::Lost),
                ],
            },
            exit_code: Some(122),
            signal: None,
        };
        let text = render(&report, false);
        assert!(
            text.contains("sort ended with 122 in 1.00 s over 2 nodes"),
            "{text}"
        );
        assert!(
            text.contains("alpha (lost)") && text.contains("64.0 MiB"),
            "{text}"
        );
        assert!(
            text.lines().all(|line| line.chars().count() <= 140),
            "{text}"
        );
    }
}
