//! vCPUs without code, for tests: they leave and come at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use weft_platform::interrupts::{InterruptRouter, Message, VcpuLocation};
use weft_vcpu::PageRun;

use super::{MoveTimes, VcpuMoves, VcpuSite};

/// Its state is the vectors that wait.
pub struct SiteDouble {
    pub interrupts: Arc<InterruptRouter>,
    /// vCPUs, with how many pages followed each; 0: it left.
    pub followed: Mutex<Vec<(u32, u64)>>,
    /// The threads of its vCPUs have ended.
    pub is_over: AtomicBool,
}

/// Pages that are memory.
const PAGES: u64 = 1 << 14;

impl SiteDouble {
    pub fn new(interrupts: Arc<InterruptRouter>) -> Arc<Self> {
        let followed = Mutex::default();
        Arc::new(Self {
            interrupts,
            followed,
            is_over: AtomicBool::new(false),
        })
    }
}

impl VcpuSite for SiteDouble {
    fn hand_over(
        &self,
        vcpu: u32,
        location: VcpuLocation,
        moves: &Arc<VcpuMoves>,
    ) -> Result<(), String> {
        let pending = self.interrupts.hand_over(vcpu, location);
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
        if self.is_over.load(Ordering::SeqCst) {
            return Err("its thread has ended".into());
        }
        let level = false;
        let pending: Vec<Message> = state
            .iter()
            .map(|vector| Message::Fixed {
                vector: *vector,
                level,
            })
            .collect();
        let taken = self.interrupts.take_over(vcpu, location.epoch, &pending);
        taken.map_err(|error| error.to_string())?;
        moves.taken_over(vcpu, location, MoveTimes([4, 5, 6]));
        Ok(())
    }

    fn prefetch(&self, vcpu: u32, runs: &[PageRun]) -> Result<(), String> {
        if runs.iter().any(|run| run.first >= PAGES) {
            return Err("it is no memory".into());
        }
        let mut followed = self.followed.lock().unwrap();
        followed.push((vcpu, runs.iter().map(|run| run.count).sum()));
        Ok(())
    }

    fn end_prefetch(&self, vcpu: u32) {
        self.followed.lock().unwrap().push((vcpu, 0));
    }
}
