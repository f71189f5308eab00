//! State of the entropy device.

use serde::{Deserialize, Serialize};

use super::Source;

/// Where the bytes come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngState {
    /// How far the sequence got; nothing when the host is asked.
    pub seeded: Option<u64>,
}

pub(super) fn save(source: &Source) -> RngState {
    RngState {
        seeded: match source {
            Source::Host => None,
            Source::Seeded(state) => Some(*state),
        },
    }
}

pub(super) fn restore(state: &RngState) -> Source {
    state.seeded.map_or(Source::Host, Source::Seeded)
}
