//! The move of node 0's part to another host, as far as hosts are concerned: home says what the
//! next step is, the daemon of the host of its last node carries it out.
//!
//! ```text
//! home ── Home(step) ──▶ launcher ── Home(step) ──▶ daemon
//!      ◀─ HomeReady, NodeReady, NodeFailed ── as the daemon answers
//!      ◀─ HomeLost ── the daemon cannot be reached
//! ```

use std::fs::File;
use std::io;
use std::path::PathBuf;

use super::joining::Joining;
use super::owner::{Awaited, Machine};
use super::plan::HEIR_BYTES;
use crate::error::sentence;
use crate::launch::nodes::{Body, NodeEvent};
use crate::monitor_protocol::{FILES_BYTES_MAX, HomeStep, LauncherMessage, THIS_HOST};
use crate::protocol::HomeRequest;
use crate::remote::{FarEnd, HomePlace, RemoteSlice};
use crate::report::NodeState;

/// What a guest restarts from, with the sizes that the other host is told.
#[derive(Default)]
struct BootFiles(Vec<(File, u64)>);

impl BootFiles {
    /// None where one of them cannot be read, or all are too large to go along: then the
    /// machine ends on the other host when its guest restarts.
    fn open(paths: &[PathBuf]) -> BootFiles {
        let open = |path| {
            let file = File::open(path).ok()?;
            let bytes = file.metadata().ok()?.len();
            Some((file, bytes))
        };
        let files: Option<Vec<_>> = paths.iter().map(open).collect();
        let files = files.unwrap_or_default();
        match files.iter().map(|(_, bytes)| bytes).sum::<u64>() > FILES_BYTES_MAX {
            true => BootFiles::default(),
            false => BootFiles(files),
        }
    }

    fn sizes(&self) -> Vec<u64> {
        self.0.iter().map(|(_, bytes)| *bytes).collect()
    }

    fn send(self, request: u64, slice: &mut RemoteSlice) -> Result<(), String> {
        for (file, bytes) in self.0 {
            HomeStep::file_parts(file, bytes, |step| {
                let part = HomeRequest {
                    request,
                    name: String::new(),
                    settings: String::new(),
                    files: Vec::new(),
                    step,
                };
                let sent = slice.move_home(part);
                sent.map_err(|error| io::Error::other(sentence(&error)))
            })
            .map_err(|error| sentence(&error))?;
        }
        Ok(())
    }
}

impl Machine<'_> {
    /// Home asks for a process that takes its place among the other nodes, on the host of one
    /// of them. `HomeStep::Prepare` follows once that has its links, under a number that is free.
    pub(super) fn prepare_heir(&mut self, request: u64, number: u32, beside: u32) {
        let announced = self.announce_heir(request, number, beside);
        let done = announced.and_then(|joining| {
            self.joining = Some(joining);
            self.link_once_expected()
        });
        self.fail_if(request, done);
    }

    fn announce_heir(&mut self, request: u64, number: u32, beside: u32) -> Result<Joining, String> {
        let mut host = None;
        let mut daemons = Vec::new();
        for node in &mut self.aggregate.nodes {
            match &mut node.body {
                _ if node.state != NodeState::Running => {
                    return Err(format!("node {} has ended", node.number));
                }
                Body::Local(_) => return Err(format!("node {} stays on this host", node.number)),
                Body::Remote(slice) => {
                    host = host.or((node.number == beside).then(|| slice.host().to_owned()));
                    let end = FarEnd::announce_heir(slice).map_err(|error| sentence(&error))?;
                    daemons.push((node.number, end));
                }
            }
        }
        let host = host.ok_or_else(|| format!("there is no node {beside}"))?;
        let joining = self.announce(request, (number, Some(host), HEIR_BYTES))?;
        Ok(Joining {
            daemons: Some(daemons),
            ..joining
        })
    }

    /// Home asks for a step.
    pub(super) fn move_home(&mut self, request: u64, number: u32, step: HomeStep) {
        let is_first = step == HomeStep::Prepare;
        self.is_let_go |= step == HomeStep::LetGo;
        let plan = &self.aggregate.workload.plan;
        let files = match is_first {
            true => BootFiles::open(&plan.boot_files),
            false => BootFiles::default(),
        };
        let home = HomeRequest {
            request,
            name: plan.name.clone(),
            settings: match is_first {
                true => self.aggregate.workload.settings.machine.clone(),
                false => String::new(),
            },
            files: files.sizes(),
            step,
        };
        let node = self.aggregate.node(number);
        let node = node.filter(|node| node.state == NodeState::Running);
        let is_here = node.as_ref().is_some_and(|node| match &node.body {
            Body::Local(_) => true,
            Body::Remote(slice) => slice.host() == THIS_HOST,
        });
        // Files here are the command's that saves.
        if is_here && matches!(home.step, HomeStep::NewFile { .. }) {
            self.tell_home(&LauncherMessage::NodeReady { request });
            return;
        }
        let Some(Body::Remote(slice)) = node.map(|node| &mut node.body) else {
            self.tell_home(&match home.step {
                HomeStep::Prepare => LauncherMessage::NodeFailed {
                    request,
                    reason: format!("node {number} is on this host"),
                },
                // A host that was asked before may go on with the machine.
                _ => LauncherMessage::HomeLost {
                    request,
                    reason: format!("node {number} has ended"),
                },
            });
            return;
        };
        let sent = slice.move_home(home);
        let sent = sent.map_err(|error| sentence(&error));
        let sent = sent.and_then(|()| files.send(request, slice));
        self.home_step = Some(Awaited { request, number });
        if let Err(why) = sent {
            self.lose_home(number, why);
        }
    }

    /// Whether an event of the node at `index` is about the move only.
    pub(super) fn moved_home(&mut self, index: usize, event: &NodeEvent) -> bool {
        let node = &self.aggregate.nodes[index];
        let (number, host) = (node.number, node.name.clone());
        match event {
            NodeEvent::Home { request, outcome } => {
                let is_awaited = |awaited: &mut Awaited| awaited.request == *request;
                if let Some(Awaited { request, .. }) = self.home_step.take_if(is_awaited) {
                    let message = match outcome.clone() {
                        Ok(HomePlace::Ready) => LauncherMessage::HomeReady { request, host },
                        Ok(HomePlace::Taken | HomePlace::Runs) => {
                            LauncherMessage::NodeReady { request }
                        }
                        Err(reason) => LauncherMessage::NodeFailed {
                            request,
                            reason: format!("{host}: {reason}"),
                        },
                    };
                    self.tell_home(&message);
                }
                true
            }
            NodeEvent::Unreachable(why) => {
                self.lose_home(number, why.clone());
                false
            }
            _ => false,
        }
    }

    fn lose_home(&mut self, number: u32, why: String) {
        let is_awaited = |awaited: &mut Awaited| awaited.number == number;
        if let Some(Awaited { request, .. }) = self.home_step.take_if(is_awaited) {
            let reason = format!("{} does not answer: {why}", self.aggregate.name(number));
            self.tell_home(&LauncherMessage::HomeLost { request, reason });
        }
    }
}
