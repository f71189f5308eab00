//! Why a device stops until its driver resets it.

use thiserror::Error;

/// What a driver did wrong, or what the host could not do for it.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The rings are not in RAM, not aligned, or their indices make no sense.
    #[error("queue {index}: {reason}")]
    Queue {
        index: u16,
        /// The library's words.
        reason: String,
    },
    /// A chain of descriptors is not one.
    #[error("queue {index}, descriptor {head}: {reason}")]
    Chain {
        /// Which queue.
        index: u16,
        /// First descriptor of the chain.
        head: u16,
        /// What is wrong.
        reason: &'static str,
    },
    /// The driver left out a queue, or a step.
    #[error("the driver {0}")]
    Driver(&'static str),
    /// What serves a queue elsewhere reports it.
    #[error("{0}")]
    Reported(String),
    /// The host's side broke.
    #[error("{what}: {source}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
}
