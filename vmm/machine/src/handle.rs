//! A machine's handle: other threads send requests and console input with it.

use std::sync::mpsc::{RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use weft_aggregate::{Share, Slice};
use weft_coherent_memory::{SliceFaults, SlicePages};
use weft_vcpu::PAGE_SIZE;
use weft_virtio::balloon::BalloonHandle;
use weft_virtio::console::ConsoleHandle;

use super::checkpoint::{CheckpointProgress, NewCheckpoint, WrittenCheckpoint};
use super::lifecycle::{
    Counters, End, MIGRATE, MOVE_HOME, MachineReply, MachineRequest, Refusal, Status,
};
use super::move_report::{
    MOVE_PLATFORM, MOVE_QUEUES, MOVE_TIME, PlatformMoveReport, QueueMove, QueueMoveReport,
    TimeMoveReport, VcpuMoveReport,
};
use super::owner::checkpoint::{end_save, save_progress};
use super::page_writer::PageWriter;
use super::serial_console::SerialInput;
use super::shutdown::{Ending, Envelope, Input};
use super::state::{HomeState, MachineState};
use super::switch_order::{SwitchOrder, Switched};

/// A reference to a machine, for threads outside it. Clones refer to the same machine.
#[derive(Clone)]
pub struct Handle {
    pub(super) owner: SyncSender<Input>,
    pub(super) ending: Arc<Ending>,
    /// `None` on a secondary.
    pub(super) serial: Option<SerialInput>,
    pub(super) console: Option<ConsoleHandle>,
    pub(super) balloon: Option<BalloonHandle>,
    pub(super) first_instruction: Arc<OnceLock<Instant>>,
    /// `None` if the machine has one slice that stays alone.
    pub(super) slice: Option<Arc<Slice>>,
    pub(super) writer: Arc<PageWriter>,
}

impl Handle {
    /// Sends a request and waits for the reply, at most as long as the request's own bound.
    pub fn request(&self, request: MachineRequest) -> Result<MachineReply, Refusal> {
        let (name, seconds) = (request.name(), request.seconds_max());
        let (reply, replied) = sync_channel(1);
        let envelope = Envelope { request, reply };
        match self.owner.try_send(Input::Request(envelope)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(Refusal::Busy { request: name }),
            Err(TrySendError::Disconnected(_)) => return Err(Refusal::Gone { request: name }),
        }
        match replied.recv_timeout(Duration::from_secs(seconds)) {
            Ok(reply) => reply,
            Err(RecvTimeoutError::Timeout) => Err(Refusal::TimedOut {
                request: name,
                seconds,
            }),
            Err(RecvTimeoutError::Disconnected) => Err(Refusal::Gone { request: name }),
        }
    }

    /// The pages that slices requested most often from each other, slice by slice; empty if
    /// the machine has one slice.
    pub fn pages(&self) -> Result<Vec<SlicePages>, Refusal> {
        match self.request(MachineRequest::Pages)? {
            MachineReply::Pages(pages) => Ok(pages),
            other => Err(misfit("pages", &other)),
        }
    }

    /// Records of single faults: see [`MachineRequest::Faults`].
    pub fn faults(&self, from: Vec<Option<u64>>) -> Result<Vec<SliceFaults>, Refusal> {
        match self.request(MachineRequest::Faults(from))? {
            MachineReply::Faults(faults) => Ok(faults),
            other => Err(misfit("faults", &other)),
        }
    }

    /// Stage, vCPUs and times.
    pub fn status(&self) -> Result<Status, Refusal> {
        match self.request(MachineRequest::Status)? {
            MachineReply::Status(status) => Ok(status),
            other => Err(misfit("status", &other)),
        }
    }

    /// All counters of vCPUs, parts and slices.
    pub fn counters(&self) -> Result<Counters, Refusal> {
        match self.request(MachineRequest::Counters)? {
            MachineReply::Counters(counters) => Ok(counters),
            other => Err(misfit("counters", &other)),
        }
    }

    /// Moves a vCPU to another slice.
    pub fn move_vcpu(&self, vcpu: u32, to: usize) -> Result<VcpuMoveReport, Refusal> {
        match self.request(MachineRequest::MoveVcpu { vcpu, to })? {
            MachineReply::Moved(report) => Ok(report),
            other => Err(misfit("move a vCPU", &other)),
        }
    }

    /// Has another slice keep the guest's time.
    pub fn move_time(&self, to: usize) -> Result<TimeMoveReport, Refusal> {
        match self.request(MachineRequest::MoveTime { to })? {
            MachineReply::TimeMoved(report) => Ok(report),
            other => Err(misfit(MOVE_TIME, &other)),
        }
    }

    /// Has another slice have the I/O APIC and the small devices.
    pub fn move_platform(&self, to: usize) -> Result<PlatformMoveReport, Refusal> {
        match self.request(MachineRequest::MovePlatform { to })? {
            MachineReply::PlatformMoved(report) => Ok(report),
            other => Err(misfit(MOVE_PLATFORM, &other)),
        }
    }

    /// Carries out the switch of a migration.
    pub(super) fn switch(&self, order: SwitchOrder) -> Result<Switched, Refusal> {
        match self.request(MachineRequest::Switch(Box::new(order)))? {
            MachineReply::Switched(switched) => Ok(switched),
            other => Err(misfit(MIGRATE, &other)),
        }
    }

    /// Stops the machine and reports its state: see [`MachineRequest::GiveHome`].
    pub(super) fn give_home(
        &self,
        (node, heir): (usize, Option<usize>),
        ran: bool,
    ) -> Result<Box<HomeState>, Refusal> {
        match self.request(MachineRequest::GiveHome { node, heir, ran })? {
            MachineReply::HomeGiven(home) => Ok(home),
            other => Err(misfit(MOVE_HOME, &other)),
        }
    }

    /// Has other slices serve queues of disks and networks.
    pub fn move_queues(&self, wanted: QueueMove) -> Result<QueueMoveReport, Refusal> {
        match self.request(MachineRequest::MoveQueues(wanted))? {
            MachineReply::QueuesMoved(report) => Ok(report),
            other => Err(misfit(MOVE_QUEUES, &other)),
        }
    }

    /// The nodes that the machine has. On the primary.
    pub fn members(&self) -> Vec<usize> {
        let slice = self.slice.as_ref();
        slice.map_or(vec![0], |slice| slice.members().into_iter().collect())
    }

    /// What each of several nodes has: vCPUs, and the part of RAM that it manages, for which all
    /// pages are looked at. After the machine's end, too. On the primary.
    pub fn shares(&self) -> Vec<(usize, Share)> {
        let Some(slice) = &self.slice else {
            return Vec::new();
        };
        let share = |node| Share {
            cpus: slice.locations().at(node).len() as u32,
            memory_bytes: slice.managed_pages(node) * PAGE_SIZE,
        };
        match self.members() {
            members if members.len() > 1 => {
                let shares = members.into_iter().map(|node| (node, share(node)));
                shares.collect()
            }
            _ => Vec::new(),
        }
    }

    /// The state of a paused machine, without its memory.
    pub fn save(&self) -> Result<Box<MachineState>, Refusal> {
        match self.request(MachineRequest::Save)? {
            MachineReply::Saved(state) => Ok(state),
            other => Err(misfit("save", &other)),
        }
    }

    /// Writes a checkpoint of a paused machine.
    pub fn write_checkpoint(
        &self,
        checkpoint: NewCheckpoint,
    ) -> Result<Box<WrittenCheckpoint>, Refusal> {
        match self.request(MachineRequest::WriteCheckpoint(Box::new(checkpoint)))? {
            MachineReply::Checkpoint(written) => Ok(written),
            other => Err(misfit("save", &other)),
        }
    }

    /// How far a save is whose machine goes on. On the primary.
    ///
    /// # Errors
    /// Why it failed: then [`Handle::end_save`].
    pub fn save_progress(&self) -> Result<CheckpointProgress, String> {
        save_progress(&self.writer, self.slice.as_deref())
    }

    /// Gives up a save whose machine goes on. On the primary.
    pub fn end_save(&self) {
        end_save(&self.writer, self.slice.as_deref());
    }

    /// The moment before the guest's first instruction.
    pub fn first_instruction(&self) -> Option<Instant> {
        self.first_instruction.get().copied()
    }

    /// Sends bytes to the guest through the serial port; returns how many fit its buffer. The
    /// rest can be sent later.
    pub fn serial_input(&self, bytes: &[u8]) -> usize {
        let serial = self.serial.as_ref();
        serial.map_or(0, |serial| serial.type_in(bytes))
    }

    /// Sends bytes to the guest through the virtio console; returns how many fit its buffer,
    /// 0 without a virtio console.
    pub fn console_input(&self, bytes: &[u8]) -> usize {
        let serial = self.serial.as_ref();
        let before = serial.and_then(|serial| serial.typed_before(bytes));
        before.unwrap_or_else(|| {
            let console = self.console.as_ref();
            console.map_or(0, |console| console.input(bytes))
        })
    }

    /// Tells the virtio console the size of the terminal.
    pub fn console_resize(&self, columns: u16, rows: u16) {
        if let Some(console) = &self.console {
            console.resize(columns, rows);
        }
    }

    /// The guest's balloon; `None` if the machine has no balloon, and on a secondary.
    pub fn balloon(&self) -> Option<&BalloonHandle> {
        self.balloon.as_ref()
    }

    /// Waits for the end, `timeout` at most.
    pub fn wait(&self, timeout: Duration) -> Option<End> {
        self.ending.wait(timeout)
    }

    /// On a secondary that has ended: waits until the primary knows, within a bound. Its links
    /// must not end before.
    pub fn wait_for_stop(&self) {
        if let Some(slice) = &self.slice {
            slice.wait_for_stop();
        }
    }

    /// Waits for the end until `deadline`.
    pub fn wait_until(&self, deadline: Instant) -> Option<End> {
        self.wait(deadline.saturating_duration_since(Instant::now()))
    }
}

fn misfit(request: &'static str, reply: &MachineReply) -> Refusal {
    Refusal::Failed {
        request,
        reason: format!("the machine sent a reply that does not match the request: {reply:?}"),
    }
}
