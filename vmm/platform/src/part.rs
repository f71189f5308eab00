//! What every part of a machine has in common: it stands still on request, and
//! its state is plain data.

use serde_json::Value;
use thiserror::Error;

/// A part could not do what its machine asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PartError {
    /// The state is of another kind of part, or of another version of it.
    #[error("the state does not fit: {0}")]
    Misfit(String),
    /// Work under way did not end in time.
    #[error("still busy with {0}")]
    Busy(String),
}

impl From<serde_json::Error> for PartError {
    fn from(error: serde_json::Error) -> Self {
        Self::Misfit(error.to_string())
    }
}

/// A device, an interrupt controller, a clock.
///
/// The machine calls these on its own thread while all vCPUs stand: `pause`,
/// then any number of `save` and `restore`, then `resume`.
pub trait Part: Send + Sync {
    /// Brings the part's own threads to rest: after it, none touches guest memory
    /// or raises an interrupt. Bounded; a part without threads has nothing to do.
    fn pause(&self) -> Result<(), PartError> {
        Ok(())
    }

    /// Undoes `pause`.
    fn resume(&self) -> Result<(), PartError> {
        Ok(())
    }

    /// All that the part is.
    fn save(&self) -> Result<Value, PartError>;

    /// Makes the part what `state` says.
    fn restore(&self, state: Value) -> Result<(), PartError>;

    /// Counters that only grow, keyed by name.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}
