//! What came of one life of a machine, from its process to the one that looks
//! after it, and what is said about it at the end.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use weft_api::BackEndView;
use weft_confine::EXIT_REFUSED;
use weft_machine::End;
use weft_monitor::outcome::Outcome;
use weft_node::spawn::Ended;

use super::error::{EXIT_FAILED, EXIT_RESET, EXIT_STOPPED, EXIT_TRIPLE_FAULT};
use crate::summary::format_seconds;

/// `--stats json`.
#[derive(Debug, Serialize)]
pub struct Report<'a> {
    /// Version of this layout.
    pub format: u32,
    /// The machine.
    pub name: &'a str,
    /// Of the process that looked after it.
    pub pid: u32,
    /// The back end of the vCPUs.
    pub back_end: &'a BackEndView,
    pub end: String,
    /// The signal that asked for its end.
    pub signal: Option<i32>,
    /// Of `weft vm run`.
    pub exit_code: u8,
    /// How often the guest restarted; the times and counters are the last life's.
    pub restarts: u32,
    /// See [`Outcome`].
    pub start_time_s: f64,
    /// See [`Outcome`].
    pub boot_time_s: Option<f64>,
    /// See [`Outcome`].
    pub run_time_s: f64,
    /// See [`Outcome`].
    pub guest_time_s: f64,
    /// The most that the machine's process had resident, guest memory included.
    pub resident_bytes_max: u64,
    /// See [`Outcome`].
    pub console_bytes_lost: u64,
    /// All numbers at the end.
    pub counters: &'a BTreeMap<String, u64>,
}

/// Whether the guest wants to start again after this end.
pub fn restarts(end: &End) -> bool {
    matches!(end, End::Reset | End::TripleFault { .. })
}

/// The exit code of `weft vm run` after a life that was the last.
pub fn exit_code(outcome: &Outcome) -> u8 {
    match (&outcome.end, outcome.signal) {
        (End::PoweredOff | End::Moved { .. }, _) => 0,
        (End::DebugExit { code }, _) => *code as u8,
        (End::Reset, _) => EXIT_RESET,
        (End::TripleFault { .. }, _) => EXIT_TRIPLE_FAULT,
        (End::Stopped, Some(signal)) => (128 + signal) as u8,
        (End::Stopped, None) => EXIT_STOPPED,
        (End::Failed { .. }, _) => EXIT_FAILED,
    }
}

/// What is said of a machine whose process ended without a word; `node` is what of
/// several nodes went with it.
pub fn killed(ended: Ended, node: Option<String>) -> (String, u8) {
    let (mut sentence, code) = killed_process(ended);
    if let Some(node) = node {
        sentence += &format!("; lost {node}");
    }
    (sentence, code)
}

fn killed_process(ended: Ended) -> (String, u8) {
    match ended {
        Ended::Signaled(signal) => (
            format!("the machine's process was ended by signal {signal}"),
            (128 + signal) as u8,
        ),
        // It has said itself which call that was.
        Ended::Exited(EXIT_REFUSED) => (
            "the machine's process was ended by its seccomp filter".into(),
            EXIT_REFUSED as u8,
        ),
        Ended::Exited(status) => (
            format!("the machine's process ended unexpectedly, with status {status}"),
            EXIT_FAILED,
        ),
    }
}

/// The closing line.
pub fn sentence(name: &str, outcome: &Outcome) -> String {
    let end = match outcome.signal {
        Some(signal) if outcome.end == End::Stopped => format!("stopped by signal {signal}"),
        _ => outcome.end.to_string(),
    };
    let mut text = format!("vm {name}: {end}; start {}", duration(outcome.start_time_s));
    if let Some(boot) = outcome.boot_time_s {
        text += &format!(", boot {}", duration(boot));
    }
    text += &format!(", run {}", duration(outcome.run_time_s));
    if outcome.end_asked && restarts(&outcome.end) {
        text += "; it does not restart, because its end was requested";
    }
    if outcome.console_bytes_lost > 0 {
        let lost = outcome.console_bytes_lost;
        text += &format!("; {lost} bytes of console output were lost, because nobody read them");
    }
    text
}

/// Whether a machine failed because this node was lost.
pub fn lost(end: &End, node: u32) -> bool {
    match end {
        End::Failed { reason } => reason.contains(&format!("lost node {node} (")),
        _ => false,
    }
}

fn duration(seconds: f64) -> String {
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if time < Duration::from_secs(1) => format!("{:.1} ms", seconds * 1e3),
        _ => format_seconds(seconds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_tells_which_node_was_lost() {
        let reason = "slice 1: lost node 12 (vCPU 3): silent for 5 s".into();
        let failed = End::Failed { reason };
        assert!(lost(&failed, 12) && !lost(&failed, 1) && !lost(&failed, 2));
        assert!(!lost(&End::PoweredOff, 12));
    }

    fn outcome(end: End) -> Outcome {
        Outcome {
            end,
            end_asked: false,
            signal: None,
            back_end: BackEndView {
                name: "soft".into(),
                reason: "asked".into(),
            },
            start_time_s: 0.0123,
            boot_time_s: Some(0.1),
            run_time_s: 2.0,
            guest_time_s: 2.0,
            shares: Vec::new(),
            console_bytes_lost: 0,
            counters: BTreeMap::new(),
            trace: None,
        }
    }

    #[test]
    fn every_end_has_its_code() {
        let code = |end| exit_code(&outcome(end));
        assert_eq!(code(End::PoweredOff), 0);
        let host = "beta".into();
        assert_eq!(code(End::Moved { host }), 0);
        assert_eq!(code(End::DebugExit { code: 3 }), 3);
        assert_eq!(code(End::Reset), EXIT_RESET);
        assert_eq!(code(End::TripleFault { cpu: 0 }), EXIT_TRIPLE_FAULT);
        assert_eq!(code(End::Stopped), EXIT_STOPPED);
        let reason = "x".into();
        assert_eq!(code(End::Failed { reason }), EXIT_FAILED);
        let by_signal = Outcome {
            signal: Some(15),
            ..outcome(End::Stopped)
        };
        assert_eq!(exit_code(&by_signal), 143);
        assert_eq!(killed(Ended::Exited(EXIT_REFUSED), None).1, 159);
        let (sentence, code) = killed(Ended::Signaled(9), Some("node 0 (vCPU 0)".into()));
        assert_eq!(code, 137);
        assert!(
            sentence.ends_with("signal 9; lost node 0 (vCPU 0)"),
            "{sentence}"
        );
    }

    #[test]
    fn the_closing_line_says_how_long_each_step_took() {
        let text = sentence("web", &outcome(End::PoweredOff));
        assert!(
            text.starts_with("vm web: powered off by the guest; start 12.3 ms"),
            "{text}"
        );
        assert!(text.contains(", boot 100.0 ms, run "), "{text}");
        let asked = Outcome {
            end_asked: true,
            ..outcome(End::Reset)
        };
        let text = sentence("web", &asked);
        assert!(text.ends_with("its end was requested"), "{text}");
    }
}
