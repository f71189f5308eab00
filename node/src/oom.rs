//! Whether the kernel killed a process because memory ran out.
//!
//! Such a kill looks like any other: SIGKILL. But the kernel counts them for each
//! memory cgroup, of both versions. The count is read when a process starts and
//! when it was killed; where it grew, that is said, and where there is no count,
//! nothing is guessed.

use crate::cgroup::Place;

/// The memory cgroup of a process, as it was when the process started, and the kills
/// that it counted.
#[derive(Debug)]
pub struct Watch(Option<(Place, u64)>);

impl Watch {
    /// Of a process that has just started.
    pub fn on(pid: u32) -> Watch {
        let place = Place::of(pid);
        Watch(place.and_then(|place| place.kills().ok().map(|kills| (place, kills))))
    }

    /// What the kernel did to the process's group since, for a sentence about a
    /// process that was killed.
    pub fn verdict(&self) -> Option<String> {
        let (place, before) = self.0.as_ref()?;
        let group = place.directory().display();
        (place.kills().ok()? > *before).then(|| {
            format!(
                "the kernel killed a process of its memory cgroup because memory ran out \
            ({group})"
            )
        })
    }
}
