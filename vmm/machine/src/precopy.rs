//! Pages of a running machine are sent ahead to the nodes that will own them, until it does
//! not pay any more. `docs/membership.md` says what it saves.

use std::time::{Duration, Instant};

use weft_aggregate::Slice;
use weft_aggregate::commands::{DrainShare, PrecopyReport, SliceCommand, SliceReply};
use weft_vcpu::PAGE_SIZE;

use super::lifecycle::{MIGRATE, Refusal};
use super::membership::{Job, impossible};

/// How often the sources are asked how far they are.
const LOOK: Duration = Duration::from_millis(5);
/// Without any progress for so long, it has failed.
const STANDSTILL: Duration = Duration::from_secs(30);
/// When what is left has not shrunk for so long, the guest writes as fast as pages are sent.
const NO_GAIN: Duration = Duration::from_secs(10);
/// A round that sends so few pages is the last one: the drain sends them in a millisecond.
const FEW_PAGES: u64 = 256;

/// The pre-copies of a migration.
pub(super) struct Precopy<'a> {
    slice: &'a Slice,
    sources: Vec<Source>,
}

struct Source {
    node: usize,
    report: PrecopyReport,
    /// Pages that the round before sent.
    before: Option<u64>,
}

impl Source {
    fn took(&mut self, report: PrecopyReport) {
        if report.rounds > self.report.rounds && self.report.rounds > 0 {
            self.before = Some(self.report.round_pages);
        }
        self.report = report;
    }

    /// Another round would send as many pages again, or has next to nothing to send.
    fn has_converged(&self) -> bool {
        let pages = self.report.round_pages;
        let falls = |before| pages * 4 <= before * 3;
        self.report.rounds > 0 && (pages <= FEW_PAGES || !self.before.is_none_or(falls))
    }
}

impl<'a> Precopy<'a> {
    pub fn new(slice: &'a Slice) -> Self {
        Self {
            slice,
            sources: Vec::new(),
        }
    }

    /// Begins to send a node's pages to these.
    pub fn begin(&mut self, node: usize, shares: Vec<DrainShare>) -> Result<(), Refusal> {
        self.sources.push(Source {
            node,
            report: PrecopyReport::default(),
            before: None,
        });
        self.command(node, &SliceCommand::PrecopyPages(shares))
            .map(drop)
    }

    /// Waits until little is left, or the guest writes as fast as pages are sent.
    pub fn converge(&mut self, job: &Job) -> Result<(), Refusal> {
        self.rounds(job, |sources, _| sources.iter().all(Source::has_converged))
    }

    /// Waits until what is left can be sent within `time`.
    ///
    /// # Errors
    /// The guest writes as fast as pages are sent.
    pub fn converge_to(&mut self, time: Duration, job: &Job) -> Result<(), Refusal> {
        let begun = Instant::now();
        let mut least = (Instant::now(), u64::MAX);
        let mut gave_up = false;
        self.rounds(job, |sources, sent_pages| {
            let left: u64 = (sources.iter())
                .map(|source| source.report.left_pages)
                .sum();
            let pages_per_s = sent_pages as f64 / begun.elapsed().as_secs_f64();
            let fits = left as f64 <= pages_per_s * time.as_secs_f64();
            if left < least.1 {
                least = (Instant::now(), left);
            }
            gave_up = least.0.elapsed() > NO_GAIN;
            gave_up || fits && sources.iter().all(|source| source.report.rounds > 0)
        })?;
        match gave_up {
            false => Ok(()),
            true => Err(impossible(
                MIGRATE,
                format!(
                    "the guest writes as fast as pages are sent: after {} s without a gain {} MiB \
                     are left, which do not fit into the pause that is allowed (--downtime); \
                     --mode hybrid does not wait for them",
                    NO_GAIN.as_secs(),
                    (least.1 * PAGE_SIZE) >> 20
                ),
            )),
        }
    }

    /// Looks at the sources until `is_over`, which is told how many pages they have sent.
    fn rounds(
        &mut self,
        job: &Job,
        mut is_over: impl FnMut(&[Source], u64) -> bool,
    ) -> Result<(), Refusal> {
        let mut last = (Instant::now(), 0);
        loop {
            job.check(MIGRATE)?;
            std::thread::sleep(LOOK);
            self.look()?;
            let sum = |count: fn(&PrecopyReport) -> u64| -> u64 {
                let sources = self.sources.iter();
                sources.map(|source| count(&source.report)).sum()
            };
            let sent_pages = sum(|report| report.sent_pages);
            let left_pages = sum(|report| report.left_pages);
            job.show(|view| {
                view.bytes_sent = sent_pages * PAGE_SIZE;
                view.bytes_left = left_pages * PAGE_SIZE;
                view.seconds_left = None;
            });
            let progress = sent_pages + sum(|report| report.rounds);
            if is_over(&self.sources, sent_pages) {
                return Ok(());
            }
            check_progress(&mut last, progress)?;
        }
    }

    /// Has everything dropped that did not move. Returns how many pages were sent ahead.
    pub fn end(mut self) -> Result<u64, Refusal> {
        self.look()?;
        let sources = self.sources.iter();
        let sent_pages = sources.map(|source| source.report.sent_pages).sum();
        for source in &self.sources {
            self.command(source.node, &SliceCommand::EndPrecopy)?;
        }
        let mut last = (Instant::now(), 0);
        loop {
            self.look()?;
            let is_over = |source: &&Source| source.report.is_over;
            let over = self.sources.iter().filter(is_over).count();
            if over == self.sources.len() {
                return Ok(sent_pages);
            }
            check_progress(&mut last, over as u64)?;
            std::thread::sleep(LOOK);
        }
    }

    /// Asks all how far they are.
    fn look(&mut self) -> Result<(), Refusal> {
        for at in 0..self.sources.len() {
            let node = self.sources[at].node;
            match self.command(node, &SliceCommand::PrecopyProgress)? {
                SliceReply::Precopied(report) => self.sources[at].took(report),
                other => {
                    let reason = format!("node {node} answered {other:?}");
                    return Err(impossible(MIGRATE, reason));
                }
            }
        }
        Ok(())
    }

    fn command(&self, node: usize, command: &SliceCommand) -> Result<SliceReply, Refusal> {
        let replied = self.slice.command_drain(node, command);
        replied.map_err(|reason| impossible(MIGRATE, reason))
    }
}

/// Fails when `progress` has not changed for long.
fn check_progress(last: &mut (Instant, u64), progress: u64) -> Result<(), Refusal> {
    if progress != last.1 {
        *last = (Instant::now(), progress);
    }
    match last.0.elapsed() > STANDSTILL {
        false => Ok(()),
        true => {
            let passed = STANDSTILL.as_secs();
            let reason = format!("no page was sent ahead for {passed} s");
            Err(impossible(MIGRATE, reason))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(rounds: &[u64]) -> Source {
        let mut source = Source {
            node: 0,
            report: PrecopyReport::default(),
            before: None,
        };
        for (at, pages) in rounds.iter().enumerate() {
            source.took(PrecopyReport {
                rounds: 1 + at as u64,
                round_pages: *pages,
                ..PrecopyReport::default()
            });
        }
        source
    }

    #[test]
    fn rounds_go_on_while_they_send_fewer_pages() {
        assert!(!source(&[]).has_converged());
        assert!(!source(&[50_000]).has_converged());
        assert!(!source(&[50_000, 20_000, 15_000]).has_converged());
        assert!(source(&[50_000, 20_000, 15_001]).has_converged());
        assert!(source(&[50_000, 20_000, 256]).has_converged());
        assert!(source(&[0]).has_converged());
    }
}
