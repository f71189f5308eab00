//! The owner saves and restores machines of one slice and of several.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use weft_aggregate::commands::{SliceCommand, SliceReply};
use weft_checkpoint::{Identity, Written};
use weft_platform::part::Version;

use super::{COMMAND_WAIT, Owner, refused, with_sources};
use crate::checkpoint::{
    CHECKPOINT_SECONDS_MAX, NewCheckpoint, WrittenCheckpoint, receive_file, write_all, write_pages,
};
use crate::lifecycle::Refusal;
use crate::platform_move::PlatformState;
use crate::state::MachineState;
use crate::vcpu::runner::{VcpuCommand, VcpuState};

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
        let mut parts = BTreeMap::new();
        let slice = self.slice.as_deref();
        for (name, part) in self.parts.iter().filter(|part| Self::is_used(part, slice)) {
            let state = part
                .save()
                .map_err(|error| refused(request, format!("{name}: {error}")))?;
            parts.insert(name.clone(), state);
        }
        let platform = self.save_platform_elsewhere();
        parts.extend(platform.map_err(|reason| refused(request, reason))?);
        Ok(MachineState {
            version: Version,
            vcpus,
            parts,
        })
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
        if let Some(slice) = self.commanding_slice() {
            // A secondary replies when it has read its part of RAM: devices and vCPUs may
            // access any part of it from now on.
            let patience = Duration::from_secs(CHECKPOINT_SECONDS_MAX);
            let begun = slice.begin_command(&SliceCommand::Status);
            let ready = begun.and_then(|begun| slice.finish_command(begun, patience));
            ready.map_err(|reason| refused(request, reason))?;
        }
        for (name, part) in &self.parts {
            let Some(saved) = state.parts.get(name) else {
                continue;
            };
            let restored = part.restore(saved);
            restored.map_err(|error| refused(request, format!("{name}: {error}")))?;
        }
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
        let state = self.save(request)?;
        let slice = self.slice.as_deref();
        let pages = write_all(&self.ram, slice, &self.channels, checkpoint);
        Ok(WrittenCheckpoint {
            state,
            updated: self.updated.clone(),
            pages: pages.map_err(|reason| refused(request, reason))?,
        })
    }

    /// On a secondary: writes its part of guest memory.
    pub(super) fn write_own_pages(
        &self,
        request: &'static str,
        identity: Identity,
    ) -> Result<Written, Refusal> {
        let channel = self.channels.iter().flatten().next();
        let file = match channel {
            Some(channel) => receive_file(channel, identity),
            None => Err("there is no way for files to this node".into()),
        };
        let slice = self.slice.as_deref();
        file.and_then(|file| write_pages(&self.ram, slice, file, identity))
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
