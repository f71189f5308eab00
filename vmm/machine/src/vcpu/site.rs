//! The vCPUs of a slice, as its links reach them.
//!
//! Every slice has a thread for every vCPU of the machine, since confined processes make
//! no threads. Where the vCPU is not, its thread is *away*: it waits for a command. Source
//! and target each do their part on that thread, so no other thread touches a vCPU.

use std::sync::Arc;

use weft_aggregate::{MoveTimes, VcpuMoves, VcpuSite};
use weft_coherent_memory::SharedMemory;
use weft_jump::follower::is_own_move;
use weft_platform::clock::Clock;
use weft_platform::interrupts::{InterruptRouter, LocationError, VcpuLocation};
use weft_vcpu::PageRun;

use super::following::Followers;
use super::runner::{CommandPort, VcpuCommand};
use super::travel::{Arrival, Departure, DepartureReport, Traveller, guest_tsc};

/// Sends commands to the vCPUs' threads.
pub struct SliceVcpus {
    /// By vCPU.
    pub ports: Vec<CommandPort>,
    pub interrupts: Arc<InterruptRouter>,
    pub clock: Arc<Clock>,
    /// `None`: vCPUs do not move by themselves.
    pub followers: Option<Arc<Followers>>,
    pub memory: Arc<SharedMemory>,
}

impl SliceVcpus {
    fn port(&self, vcpu: u32) -> Result<&CommandPort, String> {
        let port = self.ports.get(vcpu as usize);
        port.ok_or_else(|| format!("there is no vCPU {vcpu}"))
    }
}

/// A vCPU that was asked to leave for `location`.
struct Leaving {
    vcpu: u32,
    location: VcpuLocation,
    moves: Arc<VcpuMoves>,
    followers: Option<Arc<Followers>>,
}

impl DepartureReport for Leaving {
    fn left(&mut self, times: MoveTimes, mut traveller: Traveller) -> bool {
        let (vcpu, location) = (self.vcpu, self.location);
        if let Some(followers) = &self.followers {
            traveller.luggage = followers.leave(vcpu, location.slice);
        }
        // One that moved by itself went to where its pages are.
        let follows = !is_own_move(&traveller.luggage);
        self.moves
            .handed_over(vcpu, location, times, &traveller.encode());
        follows
    }

    fn used(&mut self, runs: Vec<PageRun>) {
        self.moves.send_working_set(self.vcpu, self.location, &runs);
    }

    fn stays(&mut self, reason: &str) {
        self.moves.kept(self.vcpu, self.location, reason);
    }
}

impl VcpuSite for SliceVcpus {
    fn hand_over(
        &self,
        vcpu: u32,
        location: VcpuLocation,
        moves: &Arc<VcpuMoves>,
    ) -> Result<(), String> {
        let leaving = Leaving {
            vcpu,
            location,
            moves: moves.clone(),
            followers: self.followers.clone(),
        };
        let departure = Departure {
            location,
            asked: guest_tsc(&self.clock),
            report: Box::new(leaving),
        };
        let port = self.port(vcpu)?;
        port.command(VcpuCommand::Leave(departure))
            .map_err(|error| error.to_string())
    }

    fn take_over(
        &self,
        vcpu: u32,
        location: VcpuLocation,
        state: &[u8],
        moves: &Arc<VcpuMoves>,
    ) -> Result<(), String> {
        let arrived = guest_tsc(&self.clock);
        let malformed = |error| format!("it sent a malformed state of vCPU {vcpu}: {error}");
        let mut traveller = Traveller::decode(state).map_err(malformed)?;
        if u32::from(traveller.state.apic.id()) != vcpu {
            return Err(format!("it sent another vCPU as vCPU {vcpu}"));
        }
        traveller
            .check_time(arrived, self.clock.base())
            .map_err(|reason| format!("vCPU {vcpu}: {reason}"))?;
        let first_pages = match &self.followers {
            Some(followers) => followers
                .arrive(vcpu, &traveller.luggage)
                .map_err(|error| format!("it sent vCPU {vcpu} with a wrong policy: {error}"))?,
            None => Vec::new(),
        };
        let port = self.port(vcpu)?;
        let contradiction = |error: LocationError| error.to_string();
        // First: from the next call on interrupts are accepted here, as the vCPU would.
        self.interrupts
            .identify(vcpu, traveller.identity, location.epoch)
            .map_err(contradiction)?;
        let pending = std::mem::take(&mut traveller.pending);
        self.interrupts
            .take_over(vcpu, location.epoch, &pending)
            .map_err(contradiction)?;
        let moves = moves.clone();
        let arrival = Arrival {
            traveller,
            arrived,
            report: Box::new(move |times| moves.taken_over(vcpu, location, times)),
        };
        port.command(VcpuCommand::Arrive(Box::new(arrival)))
            .map_err(|error| error.to_string())?;
        // While its thread wakes.
        self.memory.prefetch(vcpu, &first_pages)
    }

    fn prefetch(&self, vcpu: u32, runs: &[PageRun]) -> Result<(), String> {
        self.memory.prefetch(vcpu, runs)
    }

    fn end_prefetch(&self, vcpu: u32) {
        self.memory.end_prefetch(vcpu);
    }
}
