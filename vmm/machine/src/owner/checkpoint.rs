//! The owner saves and restores machines of one slice and of several.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_aggregate::commands::{SavedWay, SliceCommand, SliceReply};
use weft_aggregate::{HostFile, PRIMARY, Slice};
use weft_checkpoint::{Identity, Written};
use weft_platform::part::Version;
use weft_vcpu::PAGE_SIZE;

use super::{COMMAND_WAIT, Owner, refused};
use crate::checkpoint::{
    CHECKPOINT_SECONDS_MAX, CheckpointProgress, FilePlaces, NewCheckpoint, REST_WAIT,
    WrittenCheckpoint, hand_out_files, receive_file,
};
use crate::lifecycle::Refusal;
use crate::page_writer::{FileOnHost, NewPages, PageWriter, PagesOutput, Writing};
use crate::platform_move::PlatformState;
use crate::restoring::SavedMemory;
use crate::sources::with_sources;
use crate::state::{MachineState, PartState};
use crate::vcpu::runner::{VcpuCommand, VcpuState};

/// How often the owner looks whether all pages are written.
const LOOK: Duration = Duration::from_millis(2);

impl Owner {
    /// Everything but RAM, of all slices. On the primary.
    pub(crate) fn save(&mut self, request: &'static str) -> Result<MachineState, Refusal> {
        let mut vcpus = Vec::new();
        for (vcpu, slice) in self.locations() {
            vcpus.push(match slice == self.number() {
                true => self.save_here(request, vcpu)?,
                false => self
                    .save_elsewhere(vcpu, slice)
                    .map_err(|reason| refused(request, reason))?,
            });
        }
        let mut parts = self.save_parts(request)?;
        let platform = self.save_platform_elsewhere();
        parts.extend(platform.map_err(|reason| refused(request, reason))?);
        Ok(MachineState {
            version: Version,
            vcpus,
            parts,
        })
    }

    /// Saves the parts that are used on this node.
    pub(crate) fn save_parts(
        &self,
        request: &'static str,
    ) -> Result<BTreeMap<String, PartState>, Refusal> {
        let mut parts = BTreeMap::new();
        let slice = self.slice.as_deref();
        for (name, part) in self.parts.iter().filter(|part| Self::is_used(part, slice)) {
            let state = part
                .save()
                .map_err(|error| refused(request, format!("{name}: {error}")))?;
            parts.insert(name.clone(), state);
        }
        Ok(parts)
    }

    /// Restores the parts that have a state in `states`.
    pub(crate) fn restore_parts(
        &self,
        request: &'static str,
        states: &BTreeMap<String, PartState>,
    ) -> Result<(), Refusal> {
        for (name, part) in &self.parts {
            let Some(saved) = states.get(name) else {
                continue;
            };
            let restored = part.restore(saved);
            restored.map_err(|error| refused(request, format!("{name}: {error}")))?;
        }
        Ok(())
    }

    /// Refuses a state of other parts before anything changes. A part that refuses its state
    /// ends the machine. On the primary.
    pub(crate) fn restore(
        &mut self,
        request: &'static str,
        state: MachineState,
    ) -> Result<(), Refusal> {
        let fits = state.vcpus.len() == self.runners.len()
            && state.parts.len() == self.parts.len()
            && self.parts.iter().all(|(name, part)| {
                let saved = state.parts.get(name);
                saved.is_some_and(|saved| part.accepts(saved))
            });
        let place = self.slice.as_ref().map(|slice| slice.platform());
        if let Some(place) = place.filter(|place| !place.is_here()) {
            let reason = format!("node {} has the platform", place.holder());
            return Err(refused(request, reason));
        }
        if !fits {
            let reason = "the state is that of a machine with other parts".to_owned();
            return Err(refused(request, reason));
        }
        let restored = self.restore_all(request, state);
        if let Err(refusal) = &restored {
            self.fail(refusal);
        }
        restored
    }

    fn restore_all(&mut self, request: &'static str, state: MachineState) -> Result<(), Refusal> {
        let saved = self.saved.take();
        if let Some(slice) = self.commanding_slice() {
            if let Some((saved, identity)) = saved {
                let (channels, writer) = (&self.channels, &self.writer);
                let served = serve_restored(slice, (channels, writer), saved, identity);
                served.map_err(|reason| refused(request, reason))?;
            }
            // A secondary replies when it has adopted its part of RAM: devices and vCPUs may
            // access any part of it from now on.
            let patience = Duration::from_secs(CHECKPOINT_SECONDS_MAX);
            let begun = slice.begin_command(&SliceCommand::Status);
            let ready = begun.and_then(|begun| slice.finish_command(begun, patience));
            ready.map_err(|reason| refused(request, reason))?;
        }
        self.restore_parts(request, &state.parts)?;
        for ((vcpu, slice), state) in self.locations().into_iter().zip(state.vcpus) {
            if slice == self.number() {
                let restore = VcpuCommand::Restore(Box::new(state));
                self.command_vcpu(request, vcpu, restore)?;
            } else {
                let restored = self.restore_elsewhere(vcpu, slice, &state);
                restored.map_err(|reason| refused(request, reason))?;
            }
        }
        Ok(())
    }

    /// Guest memory to files, and everything else. The machine is as before, however it ends.
    pub(super) fn write_checkpoint(
        &mut self,
        request: &'static str,
        checkpoint: NewCheckpoint,
    ) -> Result<WrittenCheckpoint, Refusal> {
        let writer = self.writer.clone();
        let needs_cut = [
            (checkpoint.is_live, "while it runs"),
            (checkpoint.base.is_some(), "by what changed"),
        ];
        if let Some((_, how)) = needs_cut
            .into_iter()
            .find(|(needs, _)| *needs && !writer.cuts())
        {
            let reason = format!(
                "it cannot be saved {how}: that needs software vCPUs, and a machine that can grow \
                 (--growable) or has several nodes"
            );
            return Err(Refusal::Impossible { request, reason });
        }
        let state = self.save(request)?;
        let is_live = checkpoint.is_live;
        // Hosts flush their files: the machine need not wait for that.
        let flushes = !checkpoint.on_hosts.is_empty();
        let pages = self.cut_pages(checkpoint).and_then(|()| match is_live {
            true => Ok(Vec::new()),
            false => wait_until_written(&writer, self.slice.as_deref(), flushes),
        });
        Ok(WrittenCheckpoint {
            state,
            updated: self.updated.clone(),
            pages: pages.map_err(|reason| refused(request, reason))?,
        })
    }

    /// Has all slices begin to write their pages, as they are now.
    fn cut_pages(&self, checkpoint: NewCheckpoint) -> Result<(), String> {
        // Else its end would be that of the one that is under way.
        if let Writing::Left(_) = self.writer.writing() {
            return Err("another save is under way".into());
        }
        let slice = self.slice.as_deref();
        let (identity, base) = (checkpoint.identity, checkpoint.base);
        let files = (checkpoint.files, &checkpoint.on_hosts);
        let (own, places) = hand_out_files(slice, &self.channels, identity, files)?;
        let pages = NewPages {
            identity,
            file: 0,
            base,
        };
        let Some(slice) = slice else {
            return self.writer.cut(Box::new(own), pages);
        };
        // Each slice writes the pages that it owns: none may move before it knows them.
        // The cut checks each page itself; without one, all are looked at before.
        let rest = match self.writer.cuts() {
            true => slice.rest_all_unchecked(REST_WAIT),
            false => slice.rest_all(REST_WAIT),
        };
        let cut = rest.and_then(|()| {
            let cut = self.cut_pages_at_rest(slice, own, pages, &places);
            slice.end_rest_all();
            cut
        });
        if cut.is_err() {
            end_save(&self.writer, Some(slice));
        }
        cut
    }

    fn cut_pages_at_rest(
        &self,
        slice: &Slice,
        own: File,
        pages: NewPages,
        places: &FilePlaces,
    ) -> Result<(), String> {
        let NewPages { identity, base, .. } = pages;
        let cut = |(node, file, way): &(usize, u32, SavedWay)| {
            let command = SliceCommand::CutPages {
                identity,
                file: *file,
                way: *way,
                base,
            };
            slice.begin_command_of(*node, &command)
        };
        let begun = places.iter().map(cut).collect::<Result<Vec<_>, _>>()?;
        let own = self.writer.cut(Box::new(own), pages);
        // Where there is no cut, all pages are written now.
        let patience = Duration::from_secs(CHECKPOINT_SECONDS_MAX);
        let finish = |begun| slice.finish_command(begun, patience).map(drop);
        begun.into_iter().map(finish).fold(own, Result::and)
    }

    /// On a secondary: begins to write its part of guest memory.
    pub(super) fn cut_own_pages(
        &self,
        request: &'static str,
        (pages, way): (NewPages, SavedWay),
    ) -> Result<(), Refusal> {
        let channel = self.channels.iter().flatten().next();
        let output = || -> Result<PagesOutput, String> {
            let none = "there is no way for files to this node";
            Ok(match way {
                SavedWay::Socket => Box::new(receive_file(channel.ok_or(none)?, pages.identity)?),
                SavedWay::Link => Box::new(self.slice.as_ref().ok_or(none)?.remote_file()),
                SavedWay::Host => {
                    let slice = self.slice.as_ref().ok_or(none)?;
                    let file = slice.host_files().take(HostFile::New)?;
                    Box::new(FileOnHost::new(file, slice.remote_file()))
                }
            })
        };
        output()
            .and_then(|output| self.writer.cut(output, pages))
            .map_err(|reason| refused(request, reason))
    }

    /// Sends a command to one of this slice's vCPUs and waits for the reply. A vCPU that does
    /// not carry it out ends the machine, because its state is unknown.
    pub(super) fn command_vcpu(
        &mut self,
        request: &'static str,
        vcpu: u32,
        command: VcpuCommand,
    ) -> Result<Option<Box<VcpuState>>, Refusal> {
        let is_here = self.locations().contains(&(vcpu, self.number()));
        let runner = self.runners.iter().find(|runner| runner.id() == vcpu);
        let Some(runner) = runner.filter(|_| is_here) else {
            return Err(refused(request, format!("vCPU {vcpu} is not on this node")));
        };
        let deadline = Instant::now() + COMMAND_WAIT;
        let outcome = runner
            .command(command)
            .and_then(|()| runner.reply(deadline));
        outcome.map_err(|error| {
            let refusal = refused(request, with_sources(&error));
            self.fail(&refusal);
            refusal
        })
    }

    /// All vCPUs in order, with their slices.
    fn locations(&self) -> Vec<(u32, usize)> {
        let vcpus = self.runners.iter().map(|runner| runner.id());
        match &self.slice {
            None => vcpus.map(|vcpu| (vcpu, 0)).collect(),
            Some(slice) => {
                let places = slice.locations().all();
                vcpus.zip(places.iter().map(|place| place.slice)).collect()
            }
        }
    }

    /// Of this slice.
    fn number(&self) -> usize {
        self.slice.as_ref().map_or(0, |slice| slice.number())
    }

    pub(super) fn save_here(
        &mut self,
        request: &'static str,
        vcpu: u32,
    ) -> Result<VcpuState, Refusal> {
        let state = self.command_vcpu(request, vcpu, VcpuCommand::Save)?;
        state
            .map(|state| *state)
            .ok_or_else(|| refused(request, format!("vCPU {vcpu} sent no state")))
    }

    fn save_elsewhere(&self, vcpu: u32, slice: usize) -> Result<VcpuState, String> {
        let command = SliceCommand::SaveVcpu { vcpu };
        match self.ask_slice(slice, &command)? {
            SliceReply::Vcpu(state) => serde_json::from_value(state)
                .map_err(|error| format!("slice {slice}: the state of vCPU {vcpu}: {error}")),
            other => Err(format!("slice {slice} sent {other:?}")),
        }
    }

    /// The states of the platform's parts, if another slice has it.
    fn save_platform_elsewhere(&self) -> Result<PlatformState, String> {
        let place = self.slice.as_ref().map(|slice| slice.platform());
        let Some(place) = place.filter(|place| !place.is_here()) else {
            return Ok(PlatformState::new());
        };
        match self.ask_slice(place.holder(), &SliceCommand::SavePlatform)? {
            SliceReply::Platform(state) => {
                serde_json::from_value(state).map_err(|error| error.to_string())
            }
            other => Err(format!("slice {} sent {other:?}", place.holder())),
        }
    }

    fn restore_elsewhere(&self, vcpu: u32, slice: usize, state: &VcpuState) -> Result<(), String> {
        let state = serde_json::to_value(state).map_err(|error| error.to_string())?;
        let command = SliceCommand::RestoreVcpu { vcpu, state };
        self.ask_slice(slice, &command).map(drop)
    }

    fn ask_slice(&self, slice: usize, command: &SliceCommand) -> Result<SliceReply, String> {
        match self.slice.as_deref().filter(|own| own.is_primary()) {
            Some(own) => own.command(slice, command),
            None => Err("only node 0 commands other nodes".into()),
        }
    }
}

/// How far the save is, on all slices. On the primary, from any thread.
pub(crate) fn save_progress(
    writer: &PageWriter,
    slice: Option<&Slice>,
) -> Result<CheckpointProgress, String> {
    let mut left = 0;
    let mut is_over = true;
    let mut pages = Vec::new();
    match writer.writing() {
        Writing::Left(own) => {
            left += own;
            is_over = false;
        }
        Writing::Over(written) => pages.push((0, written?)),
        Writing::Idle => return Err("nothing is being saved".into()),
    }
    let asked = slice.map(|slice| slice.command_all(&SliceCommand::SaveProgress));
    for (node, reply) in asked.transpose()?.into_iter().flatten() {
        let SliceReply::Saving(report) = reply else {
            return Err(format!("slice {node} sent {reply:?}"));
        };
        match report.written {
            None => {
                left += report.left_pages;
                is_over = false;
            }
            Some((saved, unchanged, bytes)) => {
                let written = Written {
                    pages: saved,
                    unchanged,
                    bytes,
                };
                pages.push((node, written));
            }
        }
    }
    pages.sort_unstable_by_key(|(node, _)| *node);
    let written = pages.into_iter().map(|(_, written)| written).collect();
    if !is_over {
        return Ok(CheckpointProgress::Left(left));
    }
    if let Some(slice) = slice {
        slice.close_saved();
    }
    Ok(CheckpointProgress::Written(written))
}

/// Ends a save that is not over, on all slices.
pub(crate) fn end_save(writer: &PageWriter, slice: Option<&Slice>) {
    writer.give_up();
    if let Some(slice) = slice {
        // A slice that does not answer is lost, which ends the machine.
        let _ = slice.command_all(&SliceCommand::EndSave);
        slice.close_saved();
    }
}

/// Waits until all pages are written, and the files are finished unless they are `flushed_later`:
/// then nothing is returned.
fn wait_until_written(
    writer: &PageWriter,
    slice: Option<&Slice>,
    flushed_later: bool,
) -> Result<Vec<Written>, String> {
    let deadline = Instant::now() + Duration::from_secs(CHECKPOINT_SECONDS_MAX);
    loop {
        let progress = save_progress(writer, slice);
        let left = match progress {
            Ok(CheckpointProgress::Written(pages)) => return Ok(pages),
            Ok(CheckpointProgress::Left(0)) if flushed_later => return Ok(Vec::new()),
            Ok(CheckpointProgress::Left(left)) if Instant::now() > deadline => Err(format!(
                "{left} pages were not written within {CHECKPOINT_SECONDS_MAX} s"
            )),
            Ok(CheckpointProgress::Left(_)) => Ok(()),
            Err(reason) => Err(reason),
        };
        if let Err(reason) = left {
            end_save(writer, slice);
            return Err(reason);
        }
        std::thread::sleep(LOOK);
    }
}

/// Has each slice know which of its pages are in files that it cannot read, and which slice can:
/// this one, or one on the host of the file.
fn serve_restored(
    slice: &Slice,
    (channels, writer): (&[Option<OwnedFd>], &PageWriter),
    saved: Arc<SavedMemory>,
    identity: Identity,
) -> Result<(), String> {
    // It has read the files in the directory of the set by itself.
    let reads =
        |node: usize| node == PRIMARY || channels.get(node - 1).is_some_and(Option::is_some);
    let mut readers = BTreeMap::<usize, Vec<_>>::new();
    for node in 0..slice.placement().slices() {
        let mut ranges = Vec::new();
        for part in slice.placement().memory_of(node) {
            let pages = part.start / PAGE_SIZE..part.end / PAGE_SIZE;
            ranges.extend(saved.pages_within(&pages)?);
        }
        if reads(node) {
            ranges.retain(|range| range.server != PRIMARY);
        }
        if !ranges.is_empty() {
            readers.insert(node, ranges);
        }
    }
    let readers_of = |server: usize| -> BTreeSet<usize> {
        let others = readers.iter().filter(|(node, _)| **node != server);
        let reads = others.filter(|(_, all)| all.iter().any(|range| range.server == server));
        reads.map(|(node, _)| *node).collect()
    };
    for (server, files) in saved.on_hosts()? {
        let serve = SliceCommand::ServePages {
            files: serde_json::to_value(files).map_err(|error| error.to_string())?,
            readers: readers_of(server),
        };
        slice.command(server, &serve)?;
    }
    let nodes: Vec<usize> = match saved.is_apart() {
        true => (0..slice.placement().slices()).collect(),
        false => readers.keys().copied().collect(),
    };
    slice.serve_pages(saved, readers_of(PRIMARY));
    for (node, ranges) in readers {
        slice.tell_absent(node, ranges)?;
    }
    slice.knows_pages();
    for node in nodes {
        match node == PRIMARY {
            true => writer.load(identity),
            false => drop(slice.command(node, &SliceCommand::LoadPages { identity })?),
        }
    }
    Ok(())
}
