//! A rest of the memory of all slices: no message about a page is under way anywhere, and none
//! will be until it ends. `docs/memory-shell.md` has the rules.
//!
//! ```text
//!  Rest at all ──▶ RestReport of all, until they show a rest ──▶ CheckRest at all
//!                                                                   │ at rest
//!                                                    EndRest at all ◀
//! ```
//!
//! On the primary, while all vCPUs and devices stand.

use std::time::{Duration, Instant};

use weft_dsm::NodeId;
use weft_dsm::controller::{RestReport, unrest};

use super::Slice;
use super::commands::{SliceCommand, SliceReply};

/// Between two looks at all slices.
const AGAIN: Duration = Duration::from_millis(1);

impl Slice {
    /// Has all slices begin nothing about pages, and waits until no message about a page is
    /// under way: then each page that was touched has one owner, which has its bytes, until
    /// [`Slice::end_rest_all`].
    ///
    /// # Errors
    /// They did not come to rest within `patience`, or a slice is lost. All goes on then.
    pub fn rest_all(&self, patience: Duration) -> Result<(), String> {
        self.rest_all_unchecked(patience)?;
        let checked = self.on_all_slices(&SliceCommand::CheckRest).map(drop);
        if checked.is_err() {
            self.end_rest_all();
        }
        checked
    }

    /// As [`Slice::rest_all`], without the second check, which looks at the record of each page:
    /// for callers that look at all that they use.
    ///
    /// # Errors
    /// As there.
    pub fn rest_all_unchecked(&self, patience: Duration) -> Result<(), String> {
        let rested = self.come_to_rest(patience);
        if rested.is_err() {
            self.end_rest_all();
        }
        rested
    }

    fn come_to_rest(&self, patience: Duration) -> Result<(), String> {
        let deadline = Instant::now() + patience;
        self.on_all_slices(&SliceCommand::Rest)?;
        while let Some(unrest) = unrest(&self.rest_reports()?) {
            if Instant::now() > deadline {
                let seconds = patience.as_secs_f64();
                return Err(format!(
                    "pages did not come to rest within {seconds} s: {unrest}"
                ));
            }
            std::thread::sleep(AGAIN);
        }
        Ok(())
    }

    /// Lets all slices go on.
    pub fn end_rest_all(&self) {
        // A slice that does not answer is lost, which ends the machine.
        let _ = self.on_all_slices(&SliceCommand::EndRest);
    }

    fn rest_reports(&self) -> Result<Vec<(NodeId, RestReport)>, String> {
        let replies = self.on_all_slices(&SliceCommand::RestReport)?.into_iter();
        let report = |(slice, reply)| match reply {
            SliceReply::Rest {
                work,
                sent,
                received,
            } => {
                let report = RestReport {
                    work,
                    sent,
                    received,
                };
                Ok((NodeId(slice as u8), report))
            }
            other => Err(format!("slice {slice} sent {other:?}")),
        };
        replies.map(report).collect()
    }

    fn on_all_slices(&self, command: &SliceCommand) -> Result<Vec<(usize, SliceReply)>, String> {
        self.command_members(command, |command| self.carry_out_rest(command))
    }

    /// On the slice that it is meant for: carries out a command about a rest.
    pub fn carry_out_rest(&self, command: &SliceCommand) -> SliceReply {
        match command {
            SliceCommand::Rest => self.memory.rest(),
            SliceCommand::EndRest => self.memory.end_rest(),
            SliceCommand::RestReport => {
                let RestReport {
                    work,
                    sent,
                    received,
                } = self.memory.rest_report();
                return SliceReply::Rest {
                    work,
                    sent,
                    received,
                };
            }
            SliceCommand::CheckRest => {
                if let Some((page, what)) = self.memory.restless() {
                    return SliceReply::Refused(format!("page {page:#x} is not at rest: {what}"));
                }
            }
            other => return SliceReply::Refused(format!("{other:?} is not about a rest")),
        }
        SliceReply::Done
    }
}
