//! What came of one life of a machine.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use weft_api::BackEndView;
use weft_machine::{End, Share};

use crate::trace::Trace;

/// Home's last word to its launcher.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    /// What ended the guest: the guest itself, a request, or a failure.
    pub end: End,
    /// Whether somebody outside had asked for it.
    pub end_asked: bool,
    /// The signal that asked for its end.
    pub signal: Option<i32>,
    /// What ran the vCPUs, and why.
    pub back_end: BackEndView,
    /// From the start of the command, or of this life, to the guest's first
    /// instruction.
    pub start_time_s: f64,
    /// From then until the console showed the text of `--ready`.
    pub boot_time_s: Option<f64>,
    /// From then to the end.
    pub run_time_s: f64,
    /// Guest time at the end.
    pub guest_time_s: f64,
    /// What each of several nodes had, by its number, if the guest reset itself.
    pub shares: Vec<(usize, Share)>,
    /// Console output that nobody took in time.
    pub console_bytes_lost: u64,
    /// All numbers at the end.
    pub counters: BTreeMap<String, u64>,
    /// Where one was wanted.
    pub trace: Option<Box<Trace>>,
}
