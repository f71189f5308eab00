//! The role of the timekeeper, whose host's TSC guest time follows, goes to another slice:
//! see docs/roles.md.
//!
//! Invariant: at every moment each slice follows one that keeps time, which corrects
//! nothing. Therefore the taker comes first, and the old keeper last.

use thiserror::Error;

use super::commands::{KeptTime, SliceCommand, SliceReply};

/// Why a slice did not become the timekeeper.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TakeOverError {
    /// All slices follow the old keeper as before.
    #[error("{0}; node {1} still keeps the time")]
    Kept(String, usize),
    /// Slices follow different ones, or one does not reply.
    #[error("{0}, and then: {1}")]
    Broken(String, String),
}

/// Gives a slice a command and waits for its reply.
pub trait Tell: FnMut(usize, &SliceCommand) -> Result<SliceReply, String> {}
impl<T: FnMut(usize, &SliceCommand) -> Result<SliceReply, String>> Tell for T {}

/// Has slice `to` keep the time in the place of `from`, which keeps it since `epoch`; what is
/// kept from then on. If one of `slices` refuses, all follow `from` again. With `to` equal to
/// `from` those hear of it that did not know it: slices that have joined.
pub fn take_over(
    (from, epoch): (usize, u64),
    to: usize,
    slices: &[usize],
    tell: &mut impl Tell,
) -> Result<KeptTime, TakeOverError> {
    switch(from, to, epoch + 1, slices, tell).map_err(|reason| {
        match switch(to, from, epoch + 2, slices, tell) {
            Ok(_) => TakeOverError::Kept(reason, from),
            Err(second) => TakeOverError::Broken(reason, second),
        }
    })
}

fn switch(
    from: usize,
    to: usize,
    epoch: u64,
    slices: &[usize],
    tell: &mut impl Tell,
) -> Result<KeptTime, String> {
    let kept = match tell(to, &SliceCommand::KeepTime { epoch })? {
        SliceReply::Time(kept) => kept,
        other => return Err(format!("slice {to} replied {other:?}")),
    };
    let others = slices.iter().filter(|slice| ![from, to].contains(slice));
    for slice in others.copied().chain((from != to).then_some(from)) {
        tell(slice, &SliceCommand::FollowTime(kept.clone()))?;
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use weft_platform::clock::Reference;

    use super::*;

    /// What a slice does at a command.
    #[derive(Clone, Copy, PartialEq)]
    enum Mood {
        Obeys,
        Refuses,
        /// Obeys, and is lost before its reply arrives.
        IsLost,
    }

    /// The keeper and the epoch of each slice; none: it is lost.
    struct World {
        slices: Vec<Option<(usize, u64)>>,
        /// By message: the mood of the slice that gets it; later ones obey.
        moods: Vec<Mood>,
        messages: usize,
    }

    impl World {
        fn new(slices: usize, keeper: usize, moods: Vec<Mood>) -> Self {
            Self {
                slices: vec![Some((keeper, 4)); slices],
                moods,
                messages: 0,
            }
        }

        fn tell(&mut self, to: usize, command: &SliceCommand) -> Result<SliceReply, String> {
            let mood = self.moods.get(self.messages).copied();
            self.messages += 1;
            let (_, epoch) = self.slices[to].ok_or("lost")?;
            if mood == Some(Mood::Refuses) {
                return Err("no".into());
            }
            let (followed, reply) = match command {
                SliceCommand::KeepTime { epoch } => {
                    let kept = KeptTime {
                        keeper: to,
                        epoch: *epoch,
                        offset: 100 + to as u64,
                        host: Reference {
                            tsc_hz: 1,
                            boot_id: to.to_string(),
                        },
                    };
                    ((to, *epoch), SliceReply::Time(kept))
                }
                SliceCommand::FollowTime(kept) => {
                    assert_eq!(kept.offset, 100 + kept.keeper as u64);
                    ((kept.keeper, kept.epoch), SliceReply::Done)
                }
                other => panic!("{other:?}"),
            };
            assert!(followed.1 > epoch, "{followed:?} after {epoch}");
            self.slices[to] = Some(followed);
            self.check();
            if mood == Some(Mood::IsLost) {
                self.slices[to] = None;
                return Err("lost".into());
            }
            Ok(reply)
        }

        /// Each follows one that keeps.
        fn check(&self) {
            for (slice, (keeper, _)) in self.slices.iter().flatten().copied().enumerate() {
                let keeps = self.slices[keeper].is_none_or(|(its, _)| its == keeper);
                assert!(keeps, "{slice} follows {keeper}: {:?}", self.slices);
            }
        }

        fn follow(&self, keeper: usize, epoch: u64) -> bool {
            self.slices
                .iter()
                .all(|slice| *slice == Some((keeper, epoch)))
        }
    }

    fn run(world: &mut World, from: usize, to: usize) -> Result<KeptTime, TakeOverError> {
        let slices: Vec<usize> = (0..world.slices.len()).collect();
        take_over(
            (from, 4),
            to,
            &slices,
            &mut |slice: usize, command: &SliceCommand| world.tell(slice, command),
        )
    }

    #[test]
    fn all_follow_the_taker_or_all_the_old_one_whichever_message_fails() {
        let mut outcomes = [0; 3];
        for slices in 2..6 {
            for (from, to) in [(0, 1), (1, 0), (slices - 1, 0)] {
                // One message of the way there and one of the way back, each in every mood.
                for (first, second) in
                    (0..=slices).flat_map(|f| (0..=2 * slices).map(move |s| (f, s)))
                {
                    for moods in [Mood::Refuses, Mood::IsLost].into_iter().flat_map(|one| {
                        [Mood::Obeys, Mood::Refuses, Mood::IsLost].map(|two| (one, two))
                    }) {
                        let mut script = vec![Mood::Obeys; 3 * slices];
                        script[second] = moods.1;
                        script[first] = moods.0;
                        let mut world = World::new(slices, from, script);
                        match run(&mut world, from, to) {
                            Ok(kept) => {
                                assert_eq!((kept.keeper, kept.epoch), (to, 5));
                                assert!(world.follow(to, 5), "{:?}", world.slices);
                                outcomes[0] += 1;
                            }
                            Err(TakeOverError::Kept(..)) => {
                                assert!(world.follow(from, 6), "{:?}", world.slices);
                                outcomes[1] += 1;
                            }
                            Err(TakeOverError::Broken(..)) => {
                                let lost = world.slices.contains(&None);
                                assert!(lost || moods.1 == Mood::Refuses, "{:?}", world.slices);
                                outcomes[2] += 1;
                            }
                        }
                    }
                }
            }
        }
        assert!(outcomes.iter().all(|count| *count > 50), "{outcomes:?}");
    }
}
