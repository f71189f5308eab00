//! The coherence protocol as a pure state machine, its directory, and what
//! decides about pages: access history and read-ahead.
#![cfg_attr(not(any(test, feature = "std")), no_std)]

#[cfg(any(test, feature = "std"))]
pub mod check;
#[cfg(any(test, feature = "std"))]
pub mod checker;
mod evict;
pub mod history;
pub mod inbox;
mod manager;
pub mod message;
mod node;
mod protocol;
pub mod read_ahead;
mod recovery;
#[cfg(any(test, feature = "std"))]
pub mod sim;
mod state;
mod types;

pub use node::Node;
pub use protocol::{Action, Body, Content, Denial, Event, Keep, Message, Refusal, Right, Sink};
pub use state::{Entry, Local, Phase, State, Tables};
#[cfg(any(test, feature = "std"))]
pub use state::{MapTables, VecTables};
pub use types::{
    Access, CHUNK_PAGES, Config, ManagerOf, NODES_MAX, NodeId, PAGE_BYTES, PAGES_MAX, Page, Policy,
};
