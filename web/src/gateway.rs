//! An embedded store for several hosts: the part of etcd's JSON gateway that
//! [`weft_store::Etcd`] uses (etcd's documentation, API reference: gRPC gateway), over a file of
//! this process. So a cluster without an etcd needs no other client, and passes the same tests.
//!
//! What differs: a range is answered in one piece, and none of the past. There is one member: a
//! cluster whose store is down changes nothing until it is back. What runs goes on.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use weft_store::{Change, Committed, Condition, Entry, LeaseId, Store, StoreError, TlsFiles};

use crate::listen::{self, EventStream, ServerError, Stream};

/// Connections at one time. Each host has some: its daemon's, and those of its commands.
const CONNECTIONS_MAX: usize = 1024;
/// Longest body of a request: a commit of the largest values would be longer, and is refused.
const REQUEST_BYTES_MAX: usize = 2 << 20;
/// How long a connection may be idle: longer than a client keeps one for its next call. A change
/// that is sent just as its connection ends is of unknown outcome.
const IDLE: Duration = Duration::from_secs(60);
/// How often a watch looks whether its client is still there.
const LOOK: Duration = Duration::from_secs(1);

/// A store that listens.
pub struct Gateway {
    runtime: tokio::runtime::Runtime,
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    store: Arc<dyn Store>,
}

impl Gateway {
    /// Serves `store` at `address`. `tls`: clients need a certificate that its authority signed.
    pub fn bind(
        store: Arc<dyn Store>,
        address: SocketAddr,
        tls: Option<&TlsFiles>,
    ) -> Result<Gateway, ServerError> {
        if tls.is_none() && !address.ip().is_loopback() {
            return Err(ServerError::NoStoreTls(address));
        }
        let tls = tls.map(|files| {
            let own = (files.certificate.clone(), files.key.clone());
            listen::acceptor(&own, Some(&files.authority))
        });
        let tls = tls.transpose()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // Each watch waits on a thread.
            .max_blocking_threads(CONNECTIONS_MAX + 16)
            .build()
            .map_err(ServerError::Start)?;
        let guard = runtime.enter();
        let listener = listen::listen(address)?;
        drop(guard);
        Ok(Gateway {
            runtime,
            listener,
            tls,
            store,
        })
    }

    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `end`, or SIGINT or SIGTERM.
    pub fn run(self, end: impl Future<Output = ()>) -> Result<(), ServerError> {
        let Gateway {
            runtime,
            listener,
            tls,
            store,
        } = self;
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let serve = listen::accept_tcp(listener, tls, places, move |stream: Stream| {
            let store = store.clone();
            talk(stream, store)
        });
        runtime.block_on(listen::until_asked(end, serve))?;
        runtime.shutdown_background();
        Ok(())
    }
}

async fn talk(stream: Stream, store: Arc<dyn Store>) {
    let service = service_fn(|request| {
        let store = store.clone();
        async move { Ok::<_, Infallible>(respond(request, store).await) }
    });
    listen::serve_http(stream, IDLE, service).await;
}

type Answer = Response<Either<Full<Bytes>, EventStream>>;

/// Why a call was refused: what etcd's gateway answers then.
struct Refusal {
    status: StatusCode,
    message: String,
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Refusal {
        let (status, message) = match &error {
            StoreError::LeaseGone(_) => {
                let message = format!("etcdserver: {}", weft_store::NO_LEASE);
                (StatusCode::NOT_FOUND, message)
            }
            StoreError::TooLarge { .. } | StoreError::Options { .. } => {
                (StatusCode::BAD_REQUEST, error.to_string())
            }
            _ => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
        };
        Refusal { status, message }
    }
}

fn wrong(reason: impl std::fmt::Display) -> Refusal {
    Refusal {
        status: StatusCode::BAD_REQUEST,
        message: format!("the request is wrong: {reason}"),
    }
}

async fn respond(request: Request<Incoming>, store: Arc<dyn Store>) -> Answer {
    match serve(request, store).await {
        Ok(answer) => answer,
        Err(refusal) => {
            let body = json!({ "message": refusal.message }).to_string();
            let mut answer = Response::new(Either::Left(Full::from(body)));
            *answer.status_mut() = refusal.status;
            answer
        }
    }
}

async fn serve(request: Request<Incoming>, store: Arc<dyn Store>) -> Result<Answer, Refusal> {
    check_no_browser(&request)?;
    let call = Call::find(request.method(), request.uri().path())?;
    let body = listen::read_body(request, REQUEST_BYTES_MAX)
        .await
        .map_err(wrong)?;
    if let Call::Watch = call {
        return watch(&body, store);
    }
    let work = move || call.carry_out(&body, &*store);
    let done = tokio::task::spawn_blocking(work).await;
    let value = done.unwrap_or_else(|error| Err(wrong(error)))?;
    Ok(Response::new(Either::Left(Full::from(value.to_string()))))
}

/// What a call of this path, `/v3/kv/range` for example, is answered, without a socket and without
/// streams: the body of the answer, or the message of a refusal.
pub fn answer(path: &str, body: &[u8], store: &dyn Store) -> Result<Value, String> {
    let answered = Call::find(&Method::POST, path).and_then(|call| call.carry_out(body, store));
    answered.map_err(|refusal| refusal.message)
}

/// On the loopback there are no certificates, and a page of any site can have the user's browser
/// send requests here. Browsers name the site in such a request, or may not set this type.
fn check_no_browser(request: &Request<Incoming>) -> Result<(), Refusal> {
    let headers = request.headers();
    let content_type = headers.get(header::CONTENT_TYPE);
    if headers.contains_key(header::ORIGIN)
        || content_type.is_none_or(|value| value != "application/json")
    {
        return Err(Refusal {
            status: StatusCode::FORBIDDEN,
            message: "this store takes JSON of members, and nothing of a browser".into(),
        });
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Call {
    Range,
    Txn,
    Compaction,
    Grant,
    KeepAlive,
    Revoke,
    Watch,
}

/// `POST /v3/kv/range`.
#[derive(Deserialize)]
struct RangeRequest {
    key: String,
    range_end: Option<String>,
    revision: Option<Value>,
}

/// `POST /v3/kv/txn`.
#[derive(Deserialize)]
struct TxnRequest {
    #[serde(default)]
    compare: Vec<Compare>,
    #[serde(default)]
    success: Vec<Operation>,
}

#[derive(Deserialize)]
struct Compare {
    key: String,
    target: String,
    result: String,
    mod_revision: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Operation {
    RequestPut {
        key: String,
        value: String,
        #[serde(default)]
        lease: Value,
    },
    RequestDeleteRange {
        key: String,
    },
}

/// The bodies of the calls about leases.
#[derive(Deserialize)]
struct LeaseRequest {
    #[serde(rename = "ID", default)]
    id: Value,
    #[serde(rename = "TTL", default)]
    ttl: Value,
}

/// `POST /v3/kv/compaction`.
#[derive(Deserialize)]
struct Compaction {
    revision: Value,
}

/// `POST /v3/watch`.
#[derive(Deserialize)]
struct WatchRequest {
    create_request: WatchCreate,
}

#[derive(Deserialize)]
struct WatchCreate {
    key: String,
    range_end: String,
    start_revision: Value,
}

impl Call {
    fn find(method: &Method, path: &str) -> Result<Call, Refusal> {
        let call = match path {
            "/v3/kv/range" => Call::Range,
            "/v3/kv/txn" => Call::Txn,
            "/v3/kv/compaction" => Call::Compaction,
            "/v3/lease/grant" => Call::Grant,
            "/v3/lease/keepalive" => Call::KeepAlive,
            "/v3/lease/revoke" => Call::Revoke,
            "/v3/watch" => Call::Watch,
            other => {
                return Err(Refusal {
                    status: StatusCode::NOT_FOUND,
                    message: format!("{other} does not exist: this is a store of Weft, no etcd"),
                });
            }
        };
        match *method == Method::POST {
            true => Ok(call),
            false => Err(wrong("all calls are POST")),
        }
    }

    fn carry_out(self, body: &[u8], store: &dyn Store) -> Result<Value, Refusal> {
        match self {
            Call::Range => range(body, store),
            Call::Txn => txn(body, store),
            Call::Compaction => {
                store.forget_changes(number(&parse::<Compaction>(body)?.revision)?)?;
                Ok(json!({ "header": {} }))
            }
            Call::Grant => {
                let seconds = number(&parse::<LeaseRequest>(body)?.ttl)?;
                let lease = store.grant(Duration::from_secs(seconds))?;
                Ok(json!({ "header": {}, "ID": lease.0.to_string(), "TTL": seconds.to_string() }))
            }
            Call::KeepAlive => {
                let lease = lease(&parse::<LeaseRequest>(body)?.id)?;
                let id = lease.0.to_string();
                match store.renew(lease) {
                    Ok(time) => {
                        let seconds = time.as_secs().max(1).to_string();
                        Ok(json!({ "result": { "header": {}, "ID": id, "TTL": seconds } }))
                    }
                    Err(StoreError::LeaseGone(_)) => {
                        Ok(json!({ "result": { "header": {}, "ID": id } }))
                    }
                    Err(error) => Err(error.into()),
                }
            }
            Call::Revoke => {
                store.revoke(lease(&parse::<LeaseRequest>(body)?.id)?)?;
                Ok(json!({ "header": {} }))
            }
            Call::Watch => Err(wrong("a watch is a stream")),
        }
    }
}

fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body).map_err(wrong)
}

/// A 64-bit number, which the gateway writes as a string.
fn number(value: &Value) -> Result<u64, Refusal> {
    let parsed = match value {
        Value::String(text) => text.parse().ok(),
        other => other.as_u64(),
    };
    parsed.ok_or_else(|| wrong(format!("{value} is no number")))
}

fn lease(value: &Value) -> Result<LeaseId, Refusal> {
    let number = number(value)?;
    let number = i64::try_from(number).map_err(wrong)?;
    Ok(LeaseId(number))
}

fn bytes(text: &str) -> Result<Vec<u8>, Refusal> {
    STANDARD.decode(text).map_err(wrong)
}

fn key(text: &str) -> Result<String, Refusal> {
    String::from_utf8(bytes(text)?).map_err(wrong)
}

/// The prefix of a range, which begins at `first` and ends before `end`.
fn prefix(first: &str, end: &str) -> Result<String, Refusal> {
    let (first, end) = (key(first)?, bytes(end)?);
    let prefix = if first == "\0" { String::new() } else { first };
    match weft_store::prefix_end(&prefix) == end {
        true => Ok(prefix),
        false => Err(wrong("only the range of a prefix is served")),
    }
}

fn range(body: &[u8], store: &dyn Store) -> Result<Value, Refusal> {
    let request: RangeRequest = parse(body)?;
    if request.revision.is_some() {
        return Err(wrong("a range of the past is not served"));
    }
    let snapshot = match &request.range_end {
        Some(end) => store.read(&prefix(&request.key, end)?)?,
        None => {
            let key = key(&request.key)?;
            let mut snapshot = store.read(&key)?;
            snapshot.entries.retain(|entry| entry.key == key);
            snapshot
        }
    };
    let kvs: Vec<Value> = snapshot.entries.iter().map(key_value).collect();
    let header = json!({ "revision": snapshot.revision.to_string() });
    Ok(json!({ "header": header, "count": kvs.len().to_string(), "kvs": kvs }))
}

fn key_value(entry: &Entry) -> Value {
    json!({
        "key": STANDARD.encode(&entry.key),
        "value": STANDARD.encode(&entry.value),
        "mod_revision": entry.revision.to_string(),
        "lease": entry.lease.map_or(0, |lease| lease.0).to_string(),
    })
}

fn txn(body: &[u8], store: &dyn Store) -> Result<Value, Refusal> {
    let request: TxnRequest = parse(body)?;
    let condition = |compare: &Compare| {
        if compare.target != "MOD" || compare.result != "EQUAL" {
            return Err(wrong("only the equality of mod_revision is compared"));
        }
        let key = key(&compare.key)?;
        Ok(match number(&compare.mod_revision)? {
            0 => Condition::Absent(key),
            revision => Condition::Unchanged(key, revision),
        })
    };
    let change = |operation: &Operation| match operation {
        Operation::RequestPut {
            key: name,
            value,
            lease: under,
        } => {
            let (name, value) = (key(name)?, bytes(value)?);
            let under = match under {
                Value::Null => LeaseId(0),
                under => lease(under)?,
            };
            Ok(match under {
                LeaseId(0) => Change::put(name, value),
                under => Change::put_leased(name, value, under),
            })
        }
        Operation::RequestDeleteRange { key: name } => Ok(Change::delete(key(name)?)),
    };
    let conditions: Vec<Condition> = request
        .compare
        .iter()
        .map(condition)
        .collect::<Result<_, Refusal>>()?;
    let changes: Vec<Change> = request
        .success
        .iter()
        .map(change)
        .collect::<Result<_, Refusal>>()?;
    Ok(match store.commit(&conditions, &changes)? {
        Committed::Done(revision) => {
            json!({ "header": { "revision": revision.to_string() }, "succeeded": true })
        }
        Committed::Refused => json!({ "header": {}, "succeeded": false }),
    })
}

/// A stream of lines: that the watch is there, then what changed at first, and its end.
fn watch(body: &[u8], store: Arc<dyn Store>) -> Result<Answer, Refusal> {
    let request = parse::<WatchRequest>(body)?.create_request;
    let prefix = prefix(&request.key, &request.range_end)?;
    let after = number(&request.start_revision)?.saturating_sub(1);
    let (sender, receiver) = mpsc::channel(2);
    tokio::task::spawn_blocking(move || {
        let line = |result: Value| Bytes::from(format!("{}\n", json!({ "result": result })));
        let created = json!({ "created": true, "header": {} });
        if sender.blocking_send(line(created)).is_err() {
            return;
        }
        while !sender.is_closed() {
            let result = match store.watch(&prefix, after, LOOK) {
                Ok(updates) if updates.is_empty() => continue,
                Ok(updates) => {
                    let event = |update: &weft_store::Update| {
                        let value = update.value.as_deref().unwrap_or_default();
                        let kv = json!({
                            "key": STANDARD.encode(&update.key),
                            "value": STANDARD.encode(value),
                            "mod_revision": update.revision.to_string(),
                        });
                        match update.value {
                            Some(_) => json!({ "kv": kv }),
                            None => json!({ "type": "DELETE", "kv": kv }),
                        }
                    };
                    let events: Vec<Value> = updates.iter().map(event).collect();
                    json!({ "header": {}, "events": events })
                }
                Err(StoreError::Compacted { after }) => {
                    let revision = (after + 1).to_string();
                    json!({ "canceled": true, "compact_revision": revision })
                }
                Err(error) => json!({ "canceled": true, "cancel_reason": error.to_string() }),
            };
            let _ = sender.blocking_send(line(result));
            return;
        }
    });
    Ok(Response::new(Either::Right(EventStream(receiver))))
}
