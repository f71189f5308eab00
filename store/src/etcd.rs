//! An etcd of one or several members, through its JSON gateway (etcd's documentation, API
//! reference: gRPC gateway): requests are POSTs of JSON, keys and values in base64, 64-bit
//! numbers as strings.
//!
//! A call asks one member after the other until one answers, the one that answered last
//! first. A read may be asked again anywhere. A change is asked again only if it cannot have
//! arrived, because no connection came about; else it ends as [`StoreError::Unknown`].

mod messages;
mod options;
mod resolver;

pub use messages::{NO_LEASE, prefix_end};
pub use options::{EtcdOptions, TlsFiles};

use crate::{
    CALL_MAX, Change, Committed, Condition, Entry, LeaseId, Revision, Snapshot, Store, StoreError,
    Update, check, check_lease,
};
use messages::{KeyValue, LeaseAnswer, RangeAnswer, TxnAnswer, WatchLine, base64, first_key};
use resolver::AddressOrName;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use ureq::unversioned::transport::DefaultConnector;

/// One member may take so long to take a connection.
const CONNECT_MAX: Duration = Duration::from_secs(1);

/// A watch waits at least so long for the next piece of an answer.
const READ_MIN: Duration = Duration::from_millis(100);

/// One member may take so long to answer a call. The others are asked within [`CALL_MAX`].
const ANSWER_MAX: Duration = Duration::from_secs(3);

/// All pages of a read come within this.
const READ_MAX: Duration = CALL_MAX.saturating_mul(4);

/// Entries of one answer; more come in several.
const PAGE: u64 = 1000;

/// The longest answer, bytes: a page of the largest values would be longer, and is an error.
const ANSWER_BYTES_MAX: u64 = 256 << 20;

pub struct Etcd {
    agent: ureq::Agent,
    endpoints: Vec<String>,
    /// Which one answered last.
    preferred: AtomicUsize,
}

/// How long a request may take.
struct Bounds {
    whole: Duration,
    /// From one piece of the answer to the next.
    read: Duration,
}

/// Why a member did not do what it was asked for.
enum Silence {
    /// It said no.
    Refused(String),
    /// It cannot have got the request.
    NotSent(String),
    /// It may have got it.
    Lost(String),
}

impl Etcd {
    /// Reads the certificates. No member is asked yet.
    pub fn new(options: &EtcdOptions) -> Result<Etcd, StoreError> {
        let config = ureq::Agent::config_builder()
            .tls_config(options.tls()?)
            .http_status_as_error(false)
            .max_redirects(0)
            // A variable of the environment must not send the cluster's state elsewhere.
            .proxy(None)
            .timeout_resolve(Some(CONNECT_MAX))
            .timeout_connect(Some(CONNECT_MAX))
            .build();
        Ok(Etcd {
            agent: ureq::Agent::with_parts(
                config,
                DefaultConnector::default(),
                AddressOrName::default(),
            ),
            endpoints: options.urls(),
            preferred: AtomicUsize::new(0),
        })
    }

    /// The members, for sentences.
    fn members(&self) -> String {
        self.endpoints.join(", ")
    }

    fn post(
        &self,
        member: usize,
        path: &str,
        body: &Value,
        bounds: Bounds,
    ) -> Result<ureq::Body, Silence> {
        let url = format!("{}{path}", self.endpoints[member]);
        let request = self
            .agent
            .post(&url)
            .config()
            .timeout_global(Some(bounds.whole))
            .timeout_recv_response(Some(ANSWER_MAX))
            .timeout_per_read(Some(bounds.read))
            .build();
        let sent = request
            .header("Content-Type", "application/json")
            .send(body.to_string());
        let name = &self.endpoints[member];
        let response = sent.map_err(|error| {
            let reason = format!("{name}: {error}");
            if never_sent(&error) {
                Silence::NotSent(reason)
            } else {
                Silence::Lost(reason)
            }
        })?;
        let status = response.status();
        let mut body = response.into_body();
        if status.is_success() {
            return Ok(body);
        }
        let mut text = String::new();
        let _ = body.as_reader().take(4096).read_to_string(&mut text);
        let reason = refusal(name, status.as_u16(), &text);
        // Its own troubles (5xx) leave open what has happened.
        if status.is_client_error() {
            Err(Silence::Refused(reason))
        } else {
            Err(Silence::Lost(reason))
        }
    }

    /// One call at one member.
    fn ask<T: DeserializeOwned>(
        &self,
        member: usize,
        path: &str,
        body: &Value,
        wait: Duration,
    ) -> Result<T, Silence> {
        let bounds = Bounds {
            whole: wait,
            read: wait,
        };
        let answer = self.post(member, path, body, bounds)?;
        let name = &self.endpoints[member];
        let lost = |error: &dyn std::fmt::Display| Silence::Lost(format!("{name}: {error}"));
        let bytes = answer
            .into_with_config()
            .limit(ANSWER_BYTES_MAX)
            .read_to_vec();
        let bytes = bytes.map_err(|error| lost(&error))?;
        serde_json::from_slice(&bytes).map_err(|error| lost(&error))
    }

    /// Asks members until one answers. With `repeat` also after an answer was lost.
    fn call<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &Value,
        repeat: bool,
    ) -> Result<T, StoreError> {
        let begun = Instant::now();
        let first = self.preferred.load(Ordering::Relaxed);
        let count = self.endpoints.len();
        let mut reasons = Vec::new();
        for turn in 0..count {
            let left = CALL_MAX.saturating_sub(begun.elapsed());
            if left.is_zero() {
                break;
            }
            let member = (first + turn) % count;
            match self.ask(member, path, body, left.min(ANSWER_MAX)) {
                Ok(done) => {
                    self.preferred.store(member, Ordering::Relaxed);
                    return Ok(done);
                }
                Err(Silence::Refused(reason)) => {
                    let store = self.endpoints[member].clone();
                    return Err(StoreError::Refused { store, reason });
                }
                Err(Silence::NotSent(reason)) => reasons.push(reason),
                Err(Silence::Lost(reason)) if repeat => reasons.push(reason),
                Err(Silence::Lost(reason)) => {
                    // Another member may know more next time.
                    self.preferred
                        .store((member + 1) % count, Ordering::Relaxed);
                    return Err(StoreError::Unknown {
                        store: self.members(),
                        reason,
                    });
                }
            }
        }
        Err(StoreError::Unreachable {
            tried: self.members(),
            reason: reasons.join("; "),
        })
    }

    fn range(&self, from: &[u8], end: Option<&[u8]>) -> Result<Snapshot, StoreError> {
        let begun = Instant::now();
        let mut entries: Vec<Entry> = Vec::new();
        let mut revision = None;
        let mut next = from.to_vec();
        loop {
            let mut body = json!({ "key": base64(&next), "limit": PAGE.to_string() });
            if let Some(end) = end {
                body["range_end"] = base64(end).into();
            }
            if let Some(revision) = revision {
                body["revision"] = format!("{revision}").into();
            }
            let page: RangeAnswer = self.call("/v3/kv/range", &body, true)?;
            if page.more && (page.kvs.is_empty() || begun.elapsed() > READ_MAX) {
                let reason = "its pages do not come to an end".into();
                return Err(StoreError::Refused {
                    store: self.members(),
                    reason,
                });
            }
            // All pages are of one moment, that of the first.
            let revision = *revision.get_or_insert(page.header.revision);
            for kv in page.kvs {
                entries.push(self.entry(kv)?);
            }
            match entries.last() {
                Some(last) if page.more => {
                    next = last.key.as_bytes().to_vec();
                    next.push(0);
                }
                _ => return Ok(Snapshot { revision, entries }),
            }
        }
    }

    fn entry(&self, kv: KeyValue) -> Result<Entry, StoreError> {
        Ok(Entry {
            key: self.key(kv.key)?,
            value: kv.value.0,
            revision: kv.mod_revision,
            lease: (kv.lease != 0).then_some(LeaseId(kv.lease)),
        })
    }

    fn key(&self, key: messages::Bytes) -> Result<String, StoreError> {
        String::from_utf8(key.0).map_err(|error| StoreError::Refused {
            store: self.members(),
            reason: format!("a key is not UTF-8: {error}; somebody else uses this prefix"),
        })
    }
}

/// Whether nothing of the request can have arrived. What can also happen to a connection that
/// stands (a host that became unreachable, an alert of TLS) says nothing.
fn never_sent(error: &ureq::Error) -> bool {
    use std::io::ErrorKind::{AddrNotAvailable, ConnectionRefused};
    match error {
        ureq::Error::Timeout(which) => {
            matches!(which, ureq::Timeout::Resolve | ureq::Timeout::Connect)
        }
        ureq::Error::HostNotFound | ureq::Error::ConnectionFailed | ureq::Error::BadUri(_) => true,
        ureq::Error::Io(error) => matches!(error.kind(), ConnectionRefused | AddrNotAvailable),
        _ => false,
    }
}

/// What a member says with an HTTP status of failure.
fn refusal(name: &str, status: u16, text: &str) -> String {
    let said: Option<Value> = serde_json::from_str(text).ok();
    let message = said.as_ref().and_then(|said| said["message"].as_str());
    format!("{name}: HTTP {status}: {}", message.unwrap_or(text.trim()))
}

impl Store for Etcd {
    fn read(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        self.range(first_key(prefix), Some(&prefix_end(prefix)))
    }

    fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        Ok(self.range(key.as_bytes(), None)?.entries.pop())
    }

    fn commit(
        &self,
        conditions: &[Condition],
        changes: &[Change],
    ) -> Result<Committed, StoreError> {
        check(conditions, changes)?;
        let compare: Vec<Value> = conditions.iter().map(messages::compare).collect();
        let success: Vec<Value> = changes.iter().map(messages::operation).collect();
        let body = json!({ "compare": compare, "success": success });
        let answer: Result<TxnAnswer, StoreError> = self.call("/v3/kv/txn", &body, false);
        match answer {
            Ok(answer) if answer.succeeded => Ok(Committed::Done(answer.header.revision)),
            Ok(_) => Ok(Committed::Refused),
            Err(StoreError::Refused { reason, .. }) if reason.contains(messages::NO_LEASE) => {
                let leases = changes.iter().filter_map(|change| match change {
                    Change::Put { lease, .. } => *lease,
                    Change::Delete { .. } => None,
                });
                Err(StoreError::LeaseGone(
                    leases.into_iter().next().unwrap_or(LeaseId(0)),
                ))
            }
            Err(error) => Err(error),
        }
    }

    fn grant(&self, time: Duration) -> Result<LeaseId, StoreError> {
        check_lease(time)?;
        let seconds = time.as_secs_f64().ceil() as u64;
        // One that is granted twice, because an answer was lost, runs out unused.
        let body = json!({ "TTL": seconds.to_string() });
        let answer: LeaseAnswer = self.call("/v3/lease/grant", &body, true)?;
        Ok(LeaseId(answer.id))
    }

    fn renew(&self, lease: LeaseId) -> Result<Duration, StoreError> {
        let body = json!({ "ID": lease.0.to_string() });
        let answer: messages::Streamed<LeaseAnswer> =
            self.call("/v3/lease/keepalive", &body, true)?;
        match answer.result.ttl {
            0 => Err(StoreError::LeaseGone(lease)),
            seconds => Ok(Duration::from_secs(seconds)),
        }
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        let body = json!({ "ID": lease.0.to_string() });
        match self.call::<Value>("/v3/lease/revoke", &body, true) {
            Ok(_) => Ok(()),
            Err(StoreError::Refused { reason, .. }) if reason.contains(messages::NO_LEASE) => {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn forget_changes(&self, until: Revision) -> Result<(), StoreError> {
        let body = json!({ "revision": until.to_string() });
        match self.call::<Value>("/v3/kv/compaction", &body, true) {
            Ok(_) => Ok(()),
            // By somebody else, or by the first try of this call.
            Err(StoreError::Refused { reason, .. }) if reason.contains(messages::COMPACTED) => {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn watch(
        &self,
        prefix: &str,
        after: Revision,
        wait: Duration,
    ) -> Result<Vec<Update>, StoreError> {
        let begun = Instant::now();
        let first = self.preferred.load(Ordering::Relaxed);
        let count = self.endpoints.len();
        let mut reasons = Vec::new();
        for turn in 0..count {
            let member = (first + turn) % count;
            if begun.elapsed() > wait + CALL_MAX {
                break;
            }
            let left = wait.saturating_sub(begun.elapsed());
            match self.watch_at(member, prefix, after, left)? {
                Ok(updates) => {
                    self.preferred.store(member, Ordering::Relaxed);
                    return Ok(updates);
                }
                Err(
                    Silence::Refused(reason) | Silence::NotSent(reason) | Silence::Lost(reason),
                ) => reasons.push(reason),
            }
        }
        Err(StoreError::Unreachable {
            tried: self.members(),
            reason: reasons.join("; "),
        })
    }
}

impl Etcd {
    /// A watch at one member, which ends with the first changes.
    fn watch_at(
        &self,
        member: usize,
        prefix: &str,
        after: Revision,
        wait: Duration,
    ) -> Result<Result<Vec<Update>, Silence>, StoreError> {
        let body = json!({ "create_request": {
            "key": base64(first_key(prefix)),
            "range_end": base64(&prefix_end(prefix)),
            "start_revision": (after + 1).to_string(),
        }});
        let bounds = Bounds {
            whole: wait + ANSWER_MAX,
            read: wait.max(READ_MIN),
        };
        let answer = match self.post(member, "/v3/watch", &body, bounds) {
            Ok(answer) => answer,
            Err(silence) => return Ok(Err(silence)),
        };
        let name = &self.endpoints[member];
        let mut lines = BufReader::new(answer.into_with_config().limit(ANSWER_BYTES_MAX).reader());
        // The member says at once that the watch is there, and then what has changed.
        let mut is_there = false;
        loop {
            let mut line = Vec::new();
            match lines.read_until(b'\n', &mut line) {
                Ok(0) => return Ok(Err(Silence::Lost(format!("{name} ended the watch")))),
                Ok(_) => {}
                // Nothing changed, or too late: the next watch begins at the same revision.
                Err(error) if is_there && is_timeout(&error) => return Ok(Ok(Vec::new())),
                Err(error) => return Ok(Err(Silence::Lost(format!("{name}: {error}")))),
            }
            let line: WatchLine = match serde_json::from_slice(&line) {
                Ok(line) => line,
                Err(error) => return Ok(Err(Silence::Lost(format!("{name}: {error}")))),
            };
            let result = line.result;
            if result.compact_revision > 0 {
                return Err(StoreError::Compacted { after });
            }
            if result.canceled {
                let reason = format!("{name} cancelled the watch: {}", result.cancel_reason);
                return Ok(Err(Silence::Lost(reason)));
            }
            is_there |= result.created;
            if !result.events.is_empty() {
                let updates = result.events.into_iter().map(|event| {
                    Ok(Update {
                        key: self.key(event.kv.key)?,
                        value: (event.kind != "DELETE").then_some(event.kv.value.0),
                        revision: event.kv.mod_revision,
                    })
                });
                return updates.collect::<Result<_, StoreError>>().map(Ok);
            }
        }
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    let inner = error
        .get_ref()
        .and_then(|error| error.downcast_ref::<ureq::Error>());
    matches!(inner, Some(ureq::Error::Timeout(_)))
}
