//! The platform, which is the I/O APIC and the small devices, goes to another slice: the
//! owner's part in it, and that of each slice.
//!
//! Each slice has all of these parts. Where the platform is not, they stand: nothing is typed
//! into the serial port, and vCPUs reach those of the slice that has it.

use std::collections::BTreeMap;

use weft_aggregate::Slice;
use weft_aggregate::commands::{SliceCommand, SliceReply};
use weft_aggregate::platform_role::{HandOverError, hand_over};

use super::lifecycle::{Refusal, Stage};
use super::move_report::{MOVE_PLATFORM as REQUEST, PlatformMoveReport};
use super::owner::Owner;
use super::part::NamedPart;
use super::state::PartState;

/// The states of the platform's parts, keyed by their names.
pub(super) type PlatformState = BTreeMap<String, PartState>;

impl Owner {
    /// Has another slice have the platform. Refused with all as before, a pause included, or
    /// done; otherwise the machine ends.
    pub(super) fn move_platform(&mut self, to: usize) -> Result<PlatformMoveReport, Refusal> {
        if !matches!(self.stage, Stage::Running | Stage::Paused) {
            return Err(Refusal::Stage {
                request: REQUEST,
                stage: self.stage,
            });
        }
        let slice = self.slice.clone().filter(|slice| slice.is_primary());
        let slice = slice.ok_or_else(|| impossible("the machine runs on one node only".into()))?;
        let (from, members) = (slice.platform().holder(), slice.members());
        slice.check_member(to).map_err(impossible)?;
        if to == from {
            return Err(impossible(format!("node {to} has the platform already")));
        }
        let epoch = slice.platform().epoch();
        let (went, stood) = self.while_standing(REQUEST, |owner| {
            let went = hand_over((from, epoch), to, &members, &mut |to, command| match to
                == slice.number()
            {
                true => owner.platform_command(command),
                false => slice.command(to, command),
            });
            went.map_err(|error| match error {
                HandOverError::Broken(..) => owner.failed(REQUEST, &error),
                refused => impossible(refused.to_string()),
            })
        })?;
        Ok(PlatformMoveReport {
            from,
            to,
            epoch: went.epoch,
            state_bytes: went.state_bytes,
            stopped_ns: stood.as_nanos() as u64,
        })
    }

    /// Tells a node that joins which one has the platform. It takes node 0 for that.
    pub(super) fn announce_platform(&self, slice: &Slice, node: usize) -> Result<(), String> {
        let place = slice.platform();
        let (holder, epoch) = (place.holder(), place.epoch());
        match epoch {
            0 => Ok(()),
            _ => slice
                .command(node, &SliceCommand::PlatformAt { holder, epoch })
                .map(drop),
        }
    }

    /// A slice's part in a hand-over, or in a save: on the primary as well.
    ///
    /// # Errors
    /// The slice cannot do it; it has the platform if it had it before.
    pub(super) fn platform_command(&self, command: &SliceCommand) -> Result<SliceReply, String> {
        let slice = self.slice.as_deref().ok_or("there are no other nodes")?;
        if !matches!(self.stage, Stage::Built | Stage::Paused) {
            return Err(format!("its machine is {}", self.stage));
        }
        let place = slice.platform();
        let changed = match command {
            SliceCommand::SavePlatform => return self.save_platform(),
            SliceCommand::GivePlatform { to, epoch } => {
                let saved = self.save_platform()?;
                let given = place.give(*to, *epoch);
                return given.map(|()| saved).map_err(|error| error.to_string());
            }
            SliceCommand::TakePlatform { epoch, state } => {
                return self.take_platform(slice, *epoch, state);
            }
            SliceCommand::PlatformAt { holder, epoch } => place.learn(*holder, *epoch),
            other => return Err(format!("{other:?} is not about the platform")),
        };
        changed
            .map(|()| SliceReply::Done)
            .map_err(|error| error.to_string())
    }

    fn save_platform(&self) -> Result<SliceReply, String> {
        let mut states = PlatformState::new();
        for (name, part) in self.platform() {
            let state = part.save().map_err(|error| format!("{name}: {error}"))?;
            states.insert(name.clone(), state);
        }
        let state = serde_json::to_value(states).map_err(|error| error.to_string())?;
        Ok(SliceReply::Platform(state))
    }

    fn take_platform(
        &self,
        slice: &Slice,
        epoch: u64,
        state: &serde_json::Value,
    ) -> Result<SliceReply, String> {
        let states: PlatformState =
            serde_json::from_value(state.clone()).map_err(|error| error.to_string())?;
        let fits =
            |(name, part): &NamedPart| states.get(name).is_some_and(|state| part.accepts(state));
        if states.len() != self.platform().count() || !self.platform().all(fits) {
            return Err("the state is that of a platform with other parts".into());
        }
        let place = slice.platform();
        if place.is_here() {
            return Err(format!("node {} has the platform already", slice.number()));
        }
        // The guest does not reach these parts, and they drive no pin when they are restored:
        // one that refuses its state leaves the slice without the platform, as it was.
        for (name, part) in self.platform() {
            let restored = states.get(name).map(|state| part.restore(state));
            restored
                .unwrap_or(Ok(()))
                .map_err(|error| format!("{name}: {error}"))?;
        }
        place
            .take(epoch)
            .map(|()| SliceReply::Done)
            .map_err(|error| error.to_string())
    }

    fn platform(&self) -> impl Iterator<Item = &NamedPart> {
        self.parts.iter().filter(|(_, part)| part.is_platform())
    }

    /// Whether a part is the one that the guest uses.
    pub(super) fn is_used((_, part): &NamedPart, slice: Option<&Slice>) -> bool {
        !part.is_platform() || slice.is_none_or(|slice| slice.platform().is_here())
    }
}

fn impossible(reason: String) -> Refusal {
    Refusal::Impossible {
        request: REQUEST,
        reason,
    }
}
