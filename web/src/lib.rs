//! A cluster's HTTP API, its events, metrics and page.
//!
//! A process of its own (`weft cluster serve`) on any member: it has no right of a daemon, and
//! what runs needs it as little as it needs a leader. Everything it shows is in the store, and
//! everything it does is a change there, which the leader acts on.
//!
//! | file | holds |
//! | --- | --- |
//! | `feed` | what the cluster is like, read while somebody looks |
//! | `routes` | which request does what: no sockets |
//! | `metrics` | the same for Prometheus |
//! | `server` | who may ask, answers, streams of events |
//! | `listen` | sockets, TLS, and the bounds of connections and requests |
//! | `gateway` | an embedded store for several hosts: another server, of `weft cluster store` |
//! | `page/` | the page, and `openapi.json` |
//!
//! Who may ask: at a UNIX socket processes of the same user and root; over TCP a client with a key,
//! whose role is looked up for each request. Without a key the server gives out the page, which
//! knows nothing, and the description of the API.

mod console;
mod feed;
mod gateway;
mod listen;
mod metrics;
mod routes;
mod server;

pub use gateway::{Gateway, answer as gateway_answer};
pub use listen::ServerError;
pub use server::{CONNECTIONS_MAX, Listen, Server};

/// The description of the API, in OpenAPI 3.0.
pub const OPENAPI: &str = include_str!("page/openapi.json");
