//! Queues of disks and networks are served by other slices: the owner's part in it, and that
//! of each slice.

use weft_aggregate::Slice;
use weft_aggregate::commands::{SliceCommand, SliceReply};
use weft_aggregate::queue_moves::{MoveQueuesError, move_queues};
use weft_aggregate::remote_devices::Servers;

use super::lifecycle::{Refusal, Stage};
use super::move_report::{MOVE_QUEUES as REQUEST, QueueMove, QueueMoveReport};
use super::owner::Owner;

impl Owner {
    /// Has other slices serve queues. Refused with all as before, a pause included, or done;
    /// otherwise the machine ends.
    pub(super) fn move_queues(&mut self, wanted: &QueueMove) -> Result<QueueMoveReport, Refusal> {
        if !matches!(self.stage, Stage::Running | Stage::Paused) {
            return Err(Refusal::Stage {
                request: REQUEST,
                stage: self.stage,
            });
        }
        let slice = self.slice.clone().filter(|slice| slice.is_primary());
        let slice = slice.ok_or_else(|| impossible("the machine runs on one node only".into()))?;
        let devices = slice.remote_devices();
        let (epoch, before) = devices.queue_servers();
        let to = match wanted {
            QueueMove::Away(node) => devices.queue_servers_without(*node),
            QueueMove::To(servers) => servers.clone(),
        };
        let pairs = before.values().flatten().zip(to.values().flatten());
        let mut report = QueueMoveReport {
            queues: pairs.filter(|(from, to)| from != to).count(),
            stopped_ns: 0,
            before,
        };
        if report.before == to {
            return Ok(report);
        }
        let (_, stood) = self.while_standing(REQUEST, |owner| {
            let went = owner.place(&slice, (epoch, &report.before), &to);
            if let Err(error @ MoveQueuesError::Broken(_)) = &went {
                return Err(owner.failed(REQUEST, error));
            }
            devices.publish_routes();
            went.map_err(|error| impossible(error.to_string()))
        })?;
        report.stopped_ns = stood.as_nanos() as u64;
        Ok(report)
    }

    /// On the taker of a home among other nodes, which stands: networks that any node may serve
    /// are served where the vCPUs are. Otherwise each frame costs the vCPU several remote faults.
    ///
    /// # Errors
    /// The machine cannot continue.
    pub(super) fn serve_at_vcpus(&mut self, slice: &Slice) -> Result<(), Refusal> {
        let Some(place) = slice.locations().of(0) else {
            return Ok(());
        };
        let servers = slice.remote_devices().queue_servers_open_at(place.slice);
        match self.move_queues(&QueueMove::To(servers)) {
            Err(refusal @ Refusal::Failed { .. }) => Err(refusal),
            Err(refusal) => {
                eprintln!("weft: node 0 serves the networks: {refusal}");
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }

    fn place(
        &self,
        slice: &Slice,
        from: (u64, &Servers),
        to: &Servers,
    ) -> Result<u64, MoveQueuesError> {
        // Devices stopped after the vCPUs did: what they sent each other is waited for as well.
        let settled = slice.command_all(&SliceCommand::Settle);
        settled.map_err(MoveQueuesError::Refused)?;
        move_queues(
            from,
            to,
            &slice.members(),
            &mut |to, command| match to == slice.number() {
                true => self.queues_command(command),
                false => slice.command(to, command),
            },
        )
    }

    /// Tells a node that joins where queues are served. It takes them to be where they were at
    /// the start.
    pub(super) fn announce_queues(&self, slice: &Slice, node: usize) -> Result<(), String> {
        let (epoch, servers) = slice.remote_devices().queue_servers();
        match epoch {
            0 => Ok(()),
            _ => slice
                .command(node, &SliceCommand::PlaceQueues { epoch, servers })
                .map(drop),
        }
    }

    /// A slice's part in it: on the primary as well.
    ///
    /// # Errors
    /// The slice cannot do it; nothing has changed.
    pub(super) fn queues_command(&self, command: &SliceCommand) -> Result<SliceReply, String> {
        let slice = self.slice.as_deref().ok_or("there are no other nodes")?;
        if !matches!(self.stage, Stage::Built | Stage::Paused) {
            return Err(format!("its machine is {}", self.stage));
        }
        let devices = slice.remote_devices();
        match command {
            SliceCommand::CheckQueues { epoch, servers } => devices.check_queues(*epoch, servers),
            SliceCommand::PlaceQueues { epoch, servers } => devices.place_queues(*epoch, servers),
            // What this slice sent is ahead of its next command.
            SliceCommand::Settle => Ok(()),
            other => Err(format!("{other:?} is not about queues")),
        }
        .map(|()| SliceReply::Done)
    }
}

fn impossible(reason: String) -> Refusal {
    Refusal::Impossible {
        request: REQUEST,
        reason,
    }
}
