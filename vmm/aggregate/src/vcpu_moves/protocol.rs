//! The primary's side of one vCPU's move, without links, clocks and threads.
//!
//! ```text
//!               HandedOver               TakenOver and all Known
//!  HandingOver ───────────▶ TakingOver ───────────────────────▶ Done
//!       │ Kept
//!       └──────▶ Kept: the vCPU never left
//! ```
//!
//! Invariants: the state goes to the target once, after the source has given it away;
//! the others hear of the new location only after that; the move is done when the target
//! runs the vCPU and every table has its location.

use std::collections::BTreeSet;

use weft_platform::interrupts::VcpuLocation;

/// How far a move is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The source was asked.
    HandingOver,
    /// The state is on its way to the target, or installed there.
    TakingOver {
        /// The target has it.
        installed: bool,
        /// Slices that have not acknowledged the location.
        unaware: BTreeSet<usize>,
    },
    Done,
    /// The source kept the vCPU, for this reason.
    Kept(String),
}

/// What slices report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    HandedOver,
    Kept(String),
    TakenOver,
    Known,
}

/// What the primary does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Sends the state, which came with the event, to the target.
    Send,
    /// Tells a slice the new location.
    Tell(usize),
}

/// One vCPU on its way.
#[derive(Clone, Debug)]
pub struct Move {
    pub vcpu: u32,
    /// The slice that has it at first.
    pub source: usize,
    /// Where it goes.
    pub location: VcpuLocation,
    /// The primary knows what it has sent.
    me: usize,
    /// All members, or all but the primary.
    slices: BTreeSet<usize>,
    pub phase: Phase,
}

/// A slice reported what cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it sent a step of a move of vCPU {vcpu} that is not its turn")]
pub struct OutOfTurn {
    pub vcpu: u32,
}

impl Move {
    /// The source is about to be asked. `me`: the primary's number.
    pub fn new(
        vcpu: u32,
        source: usize,
        location: VcpuLocation,
        me: usize,
        slices: impl IntoIterator<Item = usize>,
    ) -> Self {
        Self {
            vcpu,
            source,
            location,
            me,
            slices: slices.into_iter().collect(),
            phase: Phase::HandingOver,
        }
    }

    /// Takes what slice `from` reported of this vCPU's move to `location`, and says what
    /// to do.
    ///
    /// # Errors
    /// It is not that slice's turn, or another move; nothing changed.
    pub fn step(
        &mut self,
        from: usize,
        (vcpu, location): (u32, VcpuLocation),
        event: Event,
    ) -> Result<Vec<Action>, OutOfTurn> {
        let out_of_turn = OutOfTurn { vcpu };
        if vcpu != self.vcpu || location != self.location {
            return Err(out_of_turn);
        }
        let (source, target) = (self.source, self.location.slice);
        match (&mut self.phase, event) {
            (Phase::HandingOver, Event::HandedOver) if from == source => {
                let ends = [source, target, self.me];
                let others = self.slices.iter().filter(|slice| !ends.contains(slice));
                let unaware: BTreeSet<usize> = others.copied().collect();
                let tell = unaware.iter().map(|slice| Action::Tell(*slice));
                let actions = std::iter::once(Action::Send).chain(tell).collect();
                let installed = false;
                self.phase = Phase::TakingOver { installed, unaware };
                return Ok(actions);
            }
            (Phase::HandingOver, Event::Kept(reason)) if from == source => {
                self.phase = Phase::Kept(reason);
            }
            (Phase::TakingOver { installed, .. }, Event::TakenOver)
                if from == target && !*installed =>
            {
                *installed = true;
            }
            (Phase::TakingOver { unaware, .. }, Event::Known) if unaware.contains(&from) => {
                unaware.remove(&from);
            }
            _ => return Err(out_of_turn),
        }
        if let Phase::TakingOver { installed, unaware } = &self.phase
            && *installed
            && unaware.is_empty()
        {
            self.phase = Phase::Done;
        }
        Ok(Vec::new())
    }

    /// Whether nothing more is waited for.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Done | Phase::Kept(_))
    }

    /// Whether it needs `slice` for what is missing.
    pub fn waits_for(&self, slice: usize) -> bool {
        match &self.phase {
            Phase::HandingOver => slice == self.source || slice == self.location.slice,
            Phase::TakingOver { installed, unaware } => {
                !installed && slice == self.location.slice || unaware.contains(&slice)
            }
            Phase::Done | Phase::Kept(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCATION: VcpuLocation = VcpuLocation { slice: 2, epoch: 5 };

    fn begun() -> Move {
        Move::new(3, 1, LOCATION, 0, 0..5)
    }

    #[test]
    fn the_state_goes_once_and_all_others_are_told() {
        let mut moved = begun();
        let step = |moved: &mut Move, from, event| moved.step(from, (3, LOCATION), event);
        assert!(moved.waits_for(1) && moved.waits_for(2) && !moved.waits_for(3));
        let actions = step(&mut moved, 1, Event::HandedOver).unwrap();
        assert_eq!(actions, [Action::Send, Action::Tell(3), Action::Tell(4)]);
        let again = step(&mut moved, 1, Event::HandedOver);
        assert_eq!(again, Err(OutOfTurn { vcpu: 3 }));
        assert_eq!(step(&mut moved, 4, Event::Known), Ok(vec![]));
        assert_eq!(step(&mut moved, 2, Event::TakenOver), Ok(vec![]));
        assert!(!moved.is_over() && moved.waits_for(3) && !moved.waits_for(2));
        assert_eq!(step(&mut moved, 3, Event::Known), Ok(vec![]));
        assert_eq!(moved.phase, Phase::Done);
    }

    #[test]
    fn what_is_nobodys_turn_changes_nothing() {
        let elsewhere = VcpuLocation { slice: 2, epoch: 4 };
        for (from, named, event) in [
            (2, (3, LOCATION), Event::HandedOver),
            (1, (2, LOCATION), Event::HandedOver),
            (1, (3, elsewhere), Event::HandedOver),
            (2, (3, LOCATION), Event::TakenOver),
            (3, (3, LOCATION), Event::Known),
            (2, (3, LOCATION), Event::Kept("no".into())),
        ] {
            let mut moved = begun();
            let vcpu = named.0;
            let refused = moved.step(from, named, event);
            assert_eq!(refused, Err(OutOfTurn { vcpu }));
            assert_eq!(moved.phase, Phase::HandingOver);
        }
        let mut moved = begun();
        moved.step(1, (3, LOCATION), Event::HandedOver).unwrap();
        let kept = Event::Kept("too late".into());
        assert!(moved.step(1, (3, LOCATION), kept).is_err());
        for from in [0, 1, 2] {
            assert!(moved.step(from, (3, LOCATION), Event::Known).is_err());
        }
        assert!(moved.step(1, (3, LOCATION), Event::TakenOver).is_err());
    }
}
