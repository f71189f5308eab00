//! The coherence protocol as a pure state machine, its directory, and what
//! decides about pages: access history and read-ahead. Without the feature
//! `std` the crate neither allocates nor needs an operating system.
//!
//! [`Node::step`] is the protocol: an [`Event`] and the tables go in, [`Action`]s
//! and changed tables come out. It knows no socket, clock or thread. Write
//! invalidate with a fixed distributed manager (Li and Hudak's IVY): each page
//! has a manager that knows owner and copyset and runs one transaction at a time
//! per page; content goes straight from owner to requester.
//!
//! What the shell must provide:
//!
//! * **Channels** are reliable and first-in first-out per ordered pair of nodes.
//! * **Actions** are done in order, and those of one event before the next event.
//! * **Discards** reach the page's manager last, after all others have
//!   acknowledged theirs. Then no message of a later generation can meet a node
//!   that has not discarded, and a message of an earlier one is recognised and
//!   ignored. With two nodes the manager may go first if nobody else has the
//!   page; with three it may not, since a third node's push can overtake the order.
//! * **Deaths** are decided by one authority, alike for all.
//!
//! # When no `Done` is needed
//!
//! `Done` tells the manager that content sent by a third node has arrived, so
//! that it does not send the requester something about the page that overtakes
//! the content. There is nothing to overtake when the requester is the manager
//! (it knows) or when the content or the grant came from the manager (whatever
//! it sends next comes after, on the same channel). One message does not come
//! from the manager and is not asked for: a third node's `Push`. It can overtake
//! a read-only copy that the manager sent. The receiver is then the owner, and
//! stays so until the manager says otherwise, which comes after the copy: so a
//! copy that arrives where the page is present already is ignored. The model
//! check found that case, and covers it.
//!
//! See `docs/dsm.md` for the messages and the failure rules.
#![cfg_attr(not(any(test, feature = "std")), no_std)]

#[cfg(any(test, feature = "std"))]
pub mod check;
#[cfg(any(test, feature = "std"))]
pub mod checker;
mod config;
#[cfg(any(test, feature = "std"))]
pub mod controller;
mod evict;
mod handover;
pub mod history;
mod manager;
mod member;
pub mod message;
mod node;
mod protocol;
mod ranges;
pub mod read_ahead;
mod recovery;
pub mod refault;
#[cfg(any(test, feature = "std"))]
mod relocation;
#[cfg(any(test, feature = "std"))]
pub mod sim;
mod state;
mod types;

pub use config::{Config, ManagerOf};
pub use node::Node;
pub use protocol::{Action, Body, Content, Denial, Event, Keep, Message, Refusal, Right, Sink};
pub use ranges::{Ranges, RangesError};
pub use state::{Entry, EntryRecord, Local, Phase, State, Tables};
#[cfg(any(test, feature = "std"))]
pub use state::{MapTables, VecTables};
pub use types::{
    Access, CHUNK_PAGES, NODES_MAX, NodeId, PAGE_BYTES, PAGES_MAX, Page, Policy, Standing,
};
