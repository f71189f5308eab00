//! The vCPUs of a slice, as its links reach them.
//!
//! Every slice has a thread for every vCPU of the machine, since confined processes make
//! no threads. Where the vCPU is not, its thread is *away*: it waits for a command. Source
//! and target each do their part on that thread, so no other thread touches a vCPU.

use std::sync::Arc;

use weft_aggregate::{VcpuMoves, VcpuSite};
use weft_platform::clock::Clock;
use weft_platform::interrupts::{InterruptRouter, LocationError, VcpuLocation};

use super::following::Followers;
use super::runner::{CommandPort, VcpuCommand};
use super::travel::{Arrival, Departure, Traveller, guest_tsc};

/// Sends commands to the vCPUs' threads.
pub struct SliceVcpus {
    /// By vCPU.
    pub ports: Vec<CommandPort>,
    pub interrupts: Arc<InterruptRouter>,
    pub clock: Arc<Clock>,
    /// `None`: vCPUs do not move by themselves.
    pub followers: Option<Arc<Followers>>,
}

impl SliceVcpus {
    fn port(&self, vcpu: u32) -> Result<&CommandPort, String> {
        let port = self.ports.get(vcpu as usize);
        port.ok_or_else(|| format!("there is no vCPU {vcpu}"))
    }
}

impl VcpuSite for SliceVcpus {
    fn hand_over(
        &self,
        vcpu: u32,
        location: VcpuLocation,
        moves: &Arc<VcpuMoves>,
    ) -> Result<(), String> {
        let (moves, followers) = (moves.clone(), self.followers.clone());
        let departure = Departure {
            location,
            asked: guest_tsc(&self.clock),
            report: Box::new(move |left| match left {
                Ok((times, mut traveller)) => {
                    if let Some(followers) = followers {
                        traveller.luggage = followers.leave(vcpu, location.slice);
                    }
                    moves.handed_over(vcpu, location, times, &traveller.encode());
                }
                Err(reason) => moves.kept(vcpu, location, &reason),
            }),
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
        if let Some(followers) = &self.followers {
            let learned = followers.arrive(vcpu, &traveller.luggage);
            learned.map_err(|error| format!("it sent vCPU {vcpu} with a wrong policy: {error}"))?;
        }
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
            .map_err(|error| error.to_string())
    }
}
