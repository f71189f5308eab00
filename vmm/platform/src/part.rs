//! What every part of a machine has in common: it pauses on request, and its state is
//! plain data of a type of its own.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

/// A part could not do what its machine asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PartError {
    /// The state is of another kind of part, or has values that this part cannot have.
    #[error("the state does not fit: {0}")]
    Misfit(String),
    /// Work in flight did not end in time.
    #[error("still busy with {0}")]
    Busy(String),
}

/// A device, an interrupt controller, a clock.
///
/// The machine calls these on its own thread while all vCPUs are stopped: `pause`, then
/// any number of [`Persist::save`] and [`Persist::restore`], then `resume`.
pub trait Part: Send + Sync {
    /// Stops the part's own threads: after it, none accesses guest memory or raises an
    /// interrupt. Bounded; a part without threads has nothing to do.
    fn pause(&self) -> Result<(), PartError> {
        Ok(())
    }

    /// Undoes `pause`.
    fn resume(&self) -> Result<(), PartError> {
        Ok(())
    }

    /// Counters that only grow, keyed by name.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// A part that can continue elsewhere from its state.
pub trait Persist: Part {
    /// All that a guest can observe of the part. Its first field is a [`Version`].
    type State: Serialize + for<'de> Deserialize<'de>;

    /// The state of a paused part.
    fn save(&self) -> Result<Self::State, PartError>;

    /// Replaces the part's state. The state may come from anywhere: a part accepts no
    /// value that it could not have itself, and no more bytes than it could hold.
    fn restore(&self, state: &Self::State) -> Result<(), PartError>;
}

/// The version of a state's format, as its first field: a state of another version is
/// refused before the rest of it is decoded. Increase it when the fields, or what they
/// mean, change.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Version<const CURRENT: u32>;

impl<const CURRENT: u32> fmt::Debug for Version<CURRENT> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{CURRENT}")
    }
}

impl<const CURRENT: u32> Serialize for Version<CURRENT> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(CURRENT)
    }
}

impl<'de, const CURRENT: u32> Deserialize<'de> for Version<CURRENT> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u32::deserialize(deserializer)? {
            found if found == CURRENT => Ok(Self),
            found => Err(D::Error::custom(format_args!(
                "the state has version {found}, but this Weft reads version {CURRENT}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct State {
        version: Version<2>,
        value: u8,
    }

    #[test]
    fn another_version_is_refused_before_the_rest_is_read() {
        let state = State {
            version: Version,
            value: 7,
        };
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(text, r#"{"version":2,"value":7}"#);
        assert_eq!(serde_json::from_str::<State>(&text).unwrap(), state);
        let later = r#"{"version":3,"value":{"of another type":0}}"#;
        let refused = serde_json::from_str::<State>(later).unwrap_err();
        assert!(
            refused
                .to_string()
                .starts_with("the state has version 3, but"),
            "{refused}"
        );
        assert!(serde_json::from_str::<State>(r#"{"value":7}"#).is_err());
    }
}
