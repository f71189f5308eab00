//! The API from the other end: one request over a UNIX socket, and its answer.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use weft_machine::membership::NewNode;
use weft_machine::migration::Migration;
use weft_machine::{PlatformMoveReport, TimeMoveReport, VcpuMoveReport};

use super::view::{
    BalloonBody, BalloonView, ChangeView, Counters, ErrorBody, Faults, MoveBody, Pages,
    PlatformBody, ReleaseBody, SaveBody, SaveFilesBody, Saved, StopBody, TimekeeperBody, VmView,
};
use super::{SAVE_SECONDS_MAX, files};

/// Longest answer, in bytes: the faults of 16 slices, or the state of 255 vCPUs.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// How long a machine may take to answer, beside what it was given to stop.
const ANSWER_BOUND: Duration = Duration::from_secs(35);
/// Longest wait for a save's files on up to 15 other hosts. Their daemons are asked in turn, and
/// each has 30 s to answer.
const SAVE_FILES_BOUND: Duration = Duration::from_secs(15 * 30).saturating_add(ANSWER_BOUND);

/// Why there is no answer, or no good one.
#[derive(Debug, Error)]
pub enum ClientError {
    /// Nobody is there.
    #[error("no machine answers at {path}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Not in time.
    #[error("the machine did not answer within {0} s")]
    TimedOut(u64),
    /// The connection broke before the answer was whole: the machine has just ended.
    #[error("the machine ended, or closed the connection, before it answered: {0}")]
    BrokenOff(String),
    /// What came is not what the API says.
    #[error("the machine sent a malformed response: {0}")]
    Garbled(String),
    /// It would not.
    #[error("{message}")]
    Refused {
        /// The word for programs.
        code: String,
        /// The sentence for people.
        message: String,
    },
}

impl ClientError {
    /// Whether nobody listens: the machine has ended.
    pub fn is_gone(&self) -> bool {
        matches!(self, ClientError::Connect { source, .. } if matches!(
            source.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
        ))
    }

    /// Whether a machine that answered before has ended.
    pub fn has_ended(&self) -> bool {
        self.is_gone() || matches!(self, ClientError::BrokenOff(_))
    }
}

/// A machine's API.
#[derive(Clone)]
pub struct Client {
    path: PathBuf,
}

impl Client {
    /// The API at this socket; nothing is sent yet.
    pub fn new(path: &Path) -> Client {
        Client {
            path: path.to_owned(),
        }
    }

    /// What the machine is and does. `bound`: how long it may take to say so.
    pub fn view(&self, bound: Duration) -> Result<VmView, ClientError> {
        self.call(Method::GET, "/v1/vm", &(), bound)
    }

    /// Its numbers.
    pub fn counters(&self) -> Result<Counters, ClientError> {
        self.call(Method::GET, "/v1/vm/counters", &(), ANSWER_BOUND)
    }

    /// The pages that its slices asked each other for most often.
    pub fn pages(&self) -> Result<Pages, ClientError> {
        self.call(Method::GET, "/v1/vm/pages", &(), ANSWER_BOUND)
    }

    /// Faults one by one. `from`: by slice, the number of the first that is wanted;
    /// of slices that are not in it, those to come. They are recorded for ten
    /// seconds from now on.
    pub fn faults(&self, from: &[u64]) -> Result<Faults, ClientError> {
        let from: Vec<String> = from.iter().map(u64::to_string).collect();
        let path = format!("/v1/vm/faults?from={}", from.join(","));
        self.call(Method::GET, &path, &(), ANSWER_BOUND)
    }

    /// Lets it stand.
    pub fn pause(&self) -> Result<VmView, ClientError> {
        self.call(Method::POST, "/v1/vm/pause", &(), ANSWER_BOUND)
    }

    /// Lets it go on.
    pub fn resume(&self) -> Result<VmView, ClientError> {
        self.call(Method::POST, "/v1/vm/resume", &(), ANSWER_BOUND)
    }

    /// Moves a vCPU to another node.
    pub fn move_vcpu(&self, vcpu: u32, node: usize) -> Result<VcpuMoveReport, ClientError> {
        let body = MoveBody { vcpu, node };
        self.call(Method::PUT, "/v1/vm/vcpu-location", &body, ANSWER_BOUND)
    }

    /// Asks the guest to give `bytes` of its memory back.
    pub fn set_balloon(&self, bytes: u64) -> Result<BalloonView, ClientError> {
        let body = BalloonBody { bytes };
        self.call(Method::PUT, "/v1/vm/balloon", &body, ANSWER_BOUND)
    }

    /// Has another node keep the guest's time.
    pub fn move_time(&self, node: usize) -> Result<TimeMoveReport, ClientError> {
        let body = TimekeeperBody { node };
        self.call(Method::PUT, "/v1/vm/timekeeper", &body, ANSWER_BOUND)
    }

    /// Has another node have the I/O APIC and the small devices.
    pub fn move_platform(&self, node: usize) -> Result<PlatformMoveReport, ClientError> {
        let body = PlatformBody { node };
        self.call(Method::PUT, "/v1/vm/platform", &body, ANSWER_BOUND)
    }

    /// Begins to add a node.
    pub fn grow(&self, node: &NewNode) -> Result<ChangeView, ClientError> {
        self.call(Method::POST, "/v1/vm/grow", node, ANSWER_BOUND)
    }

    /// Begins to give a node back.
    pub fn release(&self, node: usize) -> Result<ChangeView, ClientError> {
        let body = ReleaseBody { node };
        self.call(Method::POST, "/v1/vm/release", &body, ANSWER_BOUND)
    }

    /// Begins to move the whole machine to other nodes.
    pub fn migrate(&self, migration: &Migration) -> Result<ChangeView, ClientError> {
        self.call(Method::POST, "/v1/vm/migrate", migration, ANSWER_BOUND)
    }

    /// How far that is, or what came of it.
    pub fn change(&self) -> Result<ChangeView, ClientError> {
        self.call(Method::GET, "/v1/vm/change", &(), ANSWER_BOUND)
    }

    /// Asks for its end.
    pub fn cancel(&self) -> Result<ChangeView, ClientError> {
        self.call(Method::POST, "/v1/vm/cancel", &(), ANSWER_BOUND)
    }

    /// Has it end, after `timeout_s` for the guest to power itself off.
    pub fn stop(&self, timeout_s: f64) -> Result<VmView, ClientError> {
        let bound = Duration::try_from_secs_f64(timeout_s).unwrap_or_default() + ANSWER_BOUND;
        self.call(Method::POST, "/v1/vm/stop", &StopBody { timeout_s }, bound)
    }

    /// Writes guest memory to `files`, one for each node, and saves everything else.
    pub fn save(&self, files: &[File], body: &SaveBody) -> Result<Saved, ClientError> {
        let bound = Duration::from_secs(SAVE_SECONDS_MAX) + ANSWER_BOUND;
        self.call_with(files, Method::POST, "/v1/vm/save", body, bound)
    }

    /// Has daemons keep or remove the files that they made for the last save.
    ///
    /// # Errors
    /// A daemon did not; or the machine cannot be reached.
    pub fn save_files(&self, body: &SaveFilesBody) -> Result<VmView, ClientError> {
        self.call(Method::POST, "/v1/vm/save/files", body, SAVE_FILES_BOUND)
    }

    fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        bound: Duration,
    ) -> Result<T, ClientError> {
        self.call_with(&[], method, path, body, bound)
    }

    fn call_with<T: DeserializeOwned>(
        &self,
        files: &[File],
        method: Method,
        path: &str,
        body: &impl Serialize,
        bound: Duration,
    ) -> Result<T, ClientError> {
        let garbled = |error: &dyn std::fmt::Display| ClientError::Garbled(error.to_string());
        let mut body = serde_json::to_vec(body).map_err(|error| garbled(&error))?;
        if body == b"null" {
            body.clear();
        }
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "weft")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::<Bytes>::from(body))
            .map_err(|error| garbled(&error))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|error| garbled(&error))?;
        let (good, bytes) = runtime.block_on(async {
            tokio::time::timeout(bound, self.exchange(request, files))
                .await
                .unwrap_or(Err(ClientError::TimedOut(bound.as_secs())))
        })?;
        if good {
            return serde_json::from_slice(&bytes).map_err(|error| garbled(&error));
        }
        let ErrorBody { error } =
            serde_json::from_slice(&bytes).map_err(|error| garbled(&error))?;
        Err(ClientError::Refused {
            code: error.code,
            message: error.message,
        })
    }

    async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
        files: &[File],
    ) -> Result<(bool, Bytes), ClientError> {
        let broken_off = |error: hyper::Error| ClientError::BrokenOff(error.to_string());
        let stream = tokio::net::UnixStream::connect(&self.path)
            .await
            .map_err(|source| ClientError::Connect {
                path: self.path.clone(),
                source,
            })?;
        if !files.is_empty() {
            files::send(stream.as_fd(), files)
                .map_err(|error| ClientError::BrokenOff(error.to_string()))?;
        }
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken_off)?;
        // Ends with the runtime.
        tokio::spawn(connection);
        let response = sender.send_request(request).await.map_err(broken_off)?;
        let good = response.status().is_success();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await
            .map_err(|error| match error.downcast::<hyper::Error>() {
                Ok(error) => broken_off(*error),
                Err(error) => ClientError::Garbled(error.to_string()),
            })?;
        Ok((good, body.to_bytes()))
    }
}
