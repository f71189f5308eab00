//! vCPUs without code, for tests: they leave and come at once.

use std::sync::Arc;

use weft_platform::interrupts::{InterruptRouter, Message, VcpuLocation};

use super::{MoveTimes, VcpuMoves, VcpuSite};

/// Its state is the vectors that wait.
pub struct SiteDouble(pub Arc<InterruptRouter>);

impl VcpuSite for SiteDouble {
    fn hand_over(
        &self,
        vcpu: u32,
        location: VcpuLocation,
        moves: &Arc<VcpuMoves>,
    ) -> Result<(), String> {
        let pending = self.0.hand_over(vcpu, location);
        let vector = |message: &Message| match message {
            Message::Fixed { vector, .. } => *vector,
            other => panic!("{other:?}"),
        };
        let state: Vec<u8> = pending
            .map_err(|error| error.to_string())?
            .iter()
            .map(vector)
            .collect();
        moves.handed_over(vcpu, location, MoveTimes([1, 2, 3]), &state);
        Ok(())
    }

    fn take_over(
        &self,
        vcpu: u32,
        location: VcpuLocation,
        state: &[u8],
        moves: &Arc<VcpuMoves>,
    ) -> Result<(), String> {
        let level = false;
        let pending: Vec<Message> = state
            .iter()
            .map(|vector| Message::Fixed {
                vector: *vector,
                level,
            })
            .collect();
        let taken = self.0.take_over(vcpu, location.epoch, &pending);
        taken.map_err(|error| error.to_string())?;
        moves.taken_over(vcpu, location, MoveTimes([4, 5, 6]));
        Ok(())
    }
}
