//! A slice on another host, as the launcher sees it.
//!
//! ```text
//! connect ──▶ open ──▶ links ──▶ started ──▶ closed
//!               ▲                   │ execve
//!               └───── stopped ◀────┘
//! ```
//!
//! Until `started` every request is answered within a bound, one at a time.
//! After it, requests are sent without waiting and whatever arrives is an event
//! for the owner's loop; the heartbeat is a Ping whose answer must come within
//! the lease.
//!
//! - [`connection`]: who both are, and requests with their replies
//! - [`mod@slice`]: the slice that a connection has, while it runs
//! - [`mesh`]: the links of all slices of an aggregate, and their start

mod connection;
mod mesh;
mod slice;

pub(crate) use connection::reserve;
pub use connection::{Connection, Identity};
pub(crate) use mesh::{FarEnd, JOIN_BOUND, connect, link_heir, link_joining, start};
pub(crate) use slice::STALL;
pub use slice::{HomePlace, RemoteError, RemoteEvent, RemoteSlice};
