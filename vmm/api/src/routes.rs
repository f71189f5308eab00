//! Which request does what. No sockets here: a request's parts come in, an
//! answer goes out.

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;

use hyper::{Method, StatusCode};
use serde::Serialize;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use weft_checkpoint::Identity;
use weft_machine::membership::NewNode;

use super::view::{
    BalloonBody, ChangeView, ErrorBody, ErrorView, MoveBody, PlatformBody, ReleaseBody,
    STOP_SECONDS_MAX, SaveBody, SaveFilesBody, State, StopBody, TimekeeperBody,
};
use super::{Control, Failure, OPENAPI};
use serde::de::DeserializeOwned;

/// How often a stopping machine is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// How often it looks whether a live save is over.
const SAVE_LOOK: Duration = Duration::from_millis(10);

/// What can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    View,
    Counters,
    Pages,
    Faults,
    Pause,
    Resume,
    Save,
    SaveFiles,
    Stop,
    MoveVcpu,
    MoveTime,
    MovePlatform,
    SetBalloon,
    Grow,
    Release,
    Migrate,
    Change,
    Cancel,
    Description,
}

/// Every route.
pub(super) const ROUTES: [(Method, &str, Operation); 19] = [
    (Method::GET, "/v1/vm", Operation::View),
    (Method::GET, "/v1/vm/counters", Operation::Counters),
    (Method::GET, "/v1/vm/pages", Operation::Pages),
    (Method::GET, "/v1/vm/faults", Operation::Faults),
    (Method::POST, "/v1/vm/pause", Operation::Pause),
    (Method::POST, "/v1/vm/resume", Operation::Resume),
    (Method::POST, "/v1/vm/save", Operation::Save),
    (Method::POST, "/v1/vm/save/files", Operation::SaveFiles),
    (Method::POST, "/v1/vm/stop", Operation::Stop),
    (Method::PUT, "/v1/vm/vcpu-location", Operation::MoveVcpu),
    (Method::PUT, "/v1/vm/timekeeper", Operation::MoveTime),
    (Method::PUT, "/v1/vm/platform", Operation::MovePlatform),
    (Method::PUT, "/v1/vm/balloon", Operation::SetBalloon),
    (Method::POST, "/v1/vm/grow", Operation::Grow),
    (Method::POST, "/v1/vm/release", Operation::Release),
    (Method::POST, "/v1/vm/migrate", Operation::Migrate),
    (Method::GET, "/v1/vm/change", Operation::Change),
    (Method::POST, "/v1/vm/cancel", Operation::Cancel),
    (Method::GET, "/v1/openapi.json", Operation::Description),
];

/// Something to be done on the thread that may wait for the machine.
pub(super) type Job = Box<dyn FnOnce(&dyn Control) + Send>;

/// The way there. Clones lead to the same thread.
#[derive(Clone)]
pub(super) struct Worker(pub(super) SyncSender<Job>);

impl Worker {
    /// Has `job` done there.
    async fn ask<T: Send + 'static>(
        &self,
        job: impl FnOnce(&dyn Control) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |control| drop(answer.send(job(control))));
        match self.0.try_send(job) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                return Err(Failure::Busy("too many requests wait: try again".into()));
            }
            Err(TrySendError::Disconnected(_)) => return Err(gone()),
        }
        answered.await.unwrap_or_else(|_| Err(gone()))
    }
}

fn gone() -> Failure {
    Failure::Conflict("the machine has ended".into())
}

/// An answer: its status and its JSON.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub status: StatusCode,
    pub body: String,
    /// For the `Allow` header.
    pub allow: Option<Method>,
}

impl Answer {
    fn new(status: StatusCode, value: &impl Serialize) -> Answer {
        match serde_json::to_string(value) {
            Ok(body) => Answer {
                status,
                body,
                allow: None,
            },
            Err(error) => Answer::error(
                StatusCode::INTERNAL_SERVER_ERROR,
                "internal",
                error.to_string(),
            ),
        }
    }

    /// An answer that is no success.
    pub(super) fn error(status: StatusCode, code: &str, message: String) -> Answer {
        let error = ErrorView {
            code: code.to_owned(),
            message,
        };
        // A structure of two strings cannot fail to become JSON.
        let body = serde_json::to_string(&ErrorBody { error }).unwrap_or_default();
        Answer {
            status,
            body,
            allow: None,
        }
    }

    fn from_failure(failure: &Failure) -> Answer {
        let (status, code) = match failure {
            Failure::Conflict(_) => (StatusCode::CONFLICT, "conflict"),
            Failure::Busy(_) => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
            Failure::TimedOut(_) => (StatusCode::GATEWAY_TIMEOUT, "timed_out"),
            Failure::Failed(_) => (StatusCode::INTERNAL_SERVER_ERROR, "failed"),
        };
        Answer::error(status, code, failure.to_string())
    }
}

/// The operation of a method and a path, or the answer that there is none.
pub(super) fn find(method: &Method, path: &str) -> Result<Operation, Answer> {
    let mut allowed = None;
    for (known, known_path, operation) in &ROUTES {
        if *known_path == path {
            if known == method {
                return Ok(*operation);
            }
            allowed = Some(known.clone());
        }
    }
    Err(match allowed {
        Some(known) => Answer {
            allow: Some(known.clone()),
            ..Answer::error(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                format!("{path} supports {known}"),
            )
        },
        None => Answer::error(
            StatusCode::NOT_FOUND,
            "not_found",
            format!("{path} does not exist: /v1/openapi.json describes the API"),
        ),
    })
}

/// Carries out an operation. `query`: what follows the path's question mark.
pub(super) async fn answer(
    operation: Operation,
    query: &str,
    body: &[u8],
    files: Vec<File>,
    worker: &Worker,
) -> Answer {
    let done = match operation {
        Operation::Description => {
            return Answer {
                status: StatusCode::OK,
                body: OPENAPI.to_owned(),
                allow: None,
            };
        }
        Operation::Counters => worker
            .ask(|control| control.counters())
            .await
            .map(|counters| Answer::new(StatusCode::OK, &counters)),
        Operation::Pages => worker
            .ask(|control| control.pages())
            .await
            .map(|pages| Answer::new(StatusCode::OK, &pages)),
        Operation::Faults => match from_query(query) {
            Ok(from) => worker
                .ask(|control| control.faults(from))
                .await
                .map(|faults| Answer::new(StatusCode::OK, &faults)),
            Err(answer) => return answer,
        },
        Operation::View => view_after(worker, |_| Ok(())).await,
        Operation::Pause => view_after(worker, |control| control.pause()).await,
        Operation::Resume => view_after(worker, |control| control.resume()).await,
        Operation::MoveVcpu => match move_body(body) {
            Ok(MoveBody { vcpu, node }) => worker
                .ask(move |control| control.move_vcpu(vcpu, node))
                .await
                .map(|moved| Answer::new(StatusCode::OK, &moved)),
            Err(answer) => return answer,
        },
        Operation::SetBalloon => match serde_json::from_slice::<BalloonBody>(body) {
            Ok(BalloonBody { bytes }) => worker
                .ask(move |control| control.set_balloon(bytes))
                .await
                .map(|balloon| Answer::new(StatusCode::OK, &balloon)),
            Err(error) => return refused(format!("the body is not valid for a balloon: {error}")),
        },
        Operation::MoveTime => match move_body(body) {
            Ok(TimekeeperBody { node }) => worker
                .ask(move |control| control.move_time(node))
                .await
                .map(|moved| Answer::new(StatusCode::OK, &moved)),
            Err(answer) => return answer,
        },
        Operation::MovePlatform => match move_body(body) {
            Ok(PlatformBody { node }) => worker
                .ask(move |control| control.move_platform(node))
                .await
                .map(|moved| Answer::new(StatusCode::OK, &moved)),
            Err(answer) => return answer,
        },
        Operation::Grow => match serde_json::from_slice::<NewNode>(body) {
            Ok(node) => changed(worker, move |control| control.grow(node)).await,
            Err(error) => return refused(format!("the body is not valid for grow: {error}")),
        },
        Operation::Release => match serde_json::from_slice(body) {
            Ok(ReleaseBody { node }) => changed(worker, move |control| control.release(node)).await,
            Err(error) => return refused(format!("the body is not valid for release: {error}")),
        },
        Operation::Migrate => match serde_json::from_slice(body) {
            Ok(migration) => changed(worker, move |control| control.migrate(migration)).await,
            Err(error) => return refused(format!("the body is not valid for migrate: {error}")),
        },
        Operation::Change => changed(worker, |control| control.change()).await,
        Operation::Cancel => changed(worker, |control| control.cancel()).await,
        Operation::Save => match serde_json::from_slice::<SaveBody>(body) {
            Ok(body) if body.live && body.leave_paused => {
                return refused("a live save leaves no machine paused".into());
            }
            Ok(body) => save(worker, files, body).await,
            Err(error) => return refused(format!("the body is not valid for save: {error}")),
        },
        Operation::SaveFiles => match serde_json::from_slice::<SaveFilesBody>(body) {
            Ok(body) => view_after(worker, move |control| control.save_files(&body)).await,
            Err(error) => return refused(format!("the body is not valid for its files: {error}")),
        },
        Operation::Stop => match stop_body(body) {
            Ok(body) => stop(worker, body).await,
            Err(answer) => return answer,
        },
    };
    done.unwrap_or_else(|failure| Answer::from_failure(&failure))
}

async fn view_after(
    worker: &Worker,
    act: impl FnOnce(&dyn Control) -> Result<(), Failure> + Send + 'static,
) -> Result<Answer, Failure> {
    let view = worker.ask(|control| act(control).and_then(|()| control.view()));
    Ok(Answer::new(StatusCode::OK, &view.await?))
}

async fn changed(
    worker: &Worker,
    act: impl FnOnce(&dyn Control) -> Result<ChangeView, Failure> + Send + 'static,
) -> Result<Answer, Failure> {
    let change = worker.ask(act).await?;
    Ok(Answer::new(StatusCode::OK, &change))
}

fn refused(message: String) -> Answer {
    Answer::error(StatusCode::BAD_REQUEST, "bad_request", message)
}

/// Where to begin, by slice: `from=12,40`. A slice without a number: with what
/// comes.
fn from_query(query: &str) -> Result<Vec<Option<u64>>, Answer> {
    let Some(list) = query.strip_prefix("from=") else {
        return match query {
            "" => Ok(Vec::new()),
            other => Err(refused(format!(
                "faults has the parameter from=N,N,…, a number for each slice, and not {other}"
            ))),
        };
    };
    let number = |text: &str| match text {
        "" => Ok(None),
        text => text
            .parse()
            .map(Some)
            .map_err(|_| refused(format!("from: {text} is not a number"))),
    };
    list.split(',').map(number).collect()
}

fn move_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, Answer> {
    serde_json::from_slice(body)
        .map_err(|error| refused(format!("the body is not valid for a move: {error}")))
}

fn stop_body(body: &[u8]) -> Result<StopBody, Answer> {
    if body.is_empty() {
        return Ok(StopBody::default());
    }
    let body: StopBody = serde_json::from_slice(body)
        .map_err(|error| refused(format!("the body is not valid for stop: {error}")))?;
    if !(0.0..=STOP_SECONDS_MAX).contains(&body.timeout_s) {
        return Err(refused(format!(
            "timeout_s is {}: it must be 0 to {STOP_SECONDS_MAX}",
            body.timeout_s
        )));
    }
    Ok(body)
}

/// Asks the guest to power itself off, waits, and ends the machine. A guest that
/// stands still cannot be asked, and its machine is ended at once.
async fn stop(worker: &Worker, body: StopBody) -> Result<Answer, Failure> {
    let deadline = Instant::now() + Duration::from_secs_f64(body.timeout_s);
    let asked = body.timeout_s > 0.0
        && match worker.ask(|control| control.power_button()).await {
            Err(Failure::Conflict(_)) => false,
            answer => answer?,
        };
    while asked && Instant::now() < deadline {
        let view = worker.ask(|control| control.view()).await?;
        if view.state == State::Ended {
            return Ok(Answer::new(StatusCode::OK, &view));
        }
        sleep(LOOK).await;
    }
    view_after(worker, |control| control.stop()).await
}

/// Saves the machine, once it has read all of the checkpoint that it continues. A live save is
/// over when all pages are written, one with files on other hosts when these are on disk; if the
/// client goes away before that, nobody waits for the answer, and the save is given up.
async fn save(worker: &Worker, files: Vec<File>, body: SaveBody) -> Result<Answer, Failure> {
    while worker.ask(|control| control.unread_pages()).await? > 0 {
        sleep(LOOK).await;
    }
    if !body.live && body.each_host.is_none() {
        let saved = worker.ask(move |control| control.save(files, &body));
        return Ok(Answer::new(StatusCode::OK, &saved.await?));
    }
    let identity = body.identity;
    let mut pending = PendingSave {
        worker: worker.clone(),
        identity,
        is_over: false,
    };
    let saved = worker.ask(move |control| control.save(files, &body)).await;
    // One that was not begun leaves nothing to be ended.
    pending.is_over = saved.is_err();
    let mut saved = saved?;
    while saved.pages.is_empty() {
        if let Some(pages) = worker
            .ask(move |control| control.save_progress(identity))
            .await?
        {
            saved.pages = pages;
        } else {
            sleep(SAVE_LOOK).await;
        }
    }
    pending.is_over = true;
    Ok(Answer::new(StatusCode::OK, &saved))
}

/// Gives the save up when it is dropped before it is over.
struct PendingSave {
    worker: Worker,
    identity: Identity,
    is_over: bool,
}

impl Drop for PendingSave {
    fn drop(&mut self) {
        if !self.is_over {
            let identity = self.identity;
            let end: Job = Box::new(move |control| control.end_save(identity));
            // With too many jobs it goes on until all is written, to files that nobody reads.
            let _ = self.worker.0.try_send(end);
        }
    }
}

/// The thread `api-work`: does the jobs, one after the other.
pub(super) fn work(jobs: &std::sync::mpsc::Receiver<Job>, control: &Arc<dyn Control>) {
    while let Ok(job) = jobs.recv() {
        job(control.as_ref());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_says_where_to_begin() {
        assert_eq!(from_query(""), Ok(vec![]));
        assert_eq!(from_query("from="), Ok(vec![None]));
        assert_eq!(from_query("from=12,,3"), Ok(vec![Some(12), None, Some(3)]));
        assert!(from_query("from=x").unwrap_err().body.contains("x is not"));
        assert!(
            from_query("to=1")
                .unwrap_err()
                .body
                .contains("has the parameter from=")
        );
    }

    #[test]
    fn the_document_has_every_route_and_no_other() {
        let document: serde_json::Value = serde_json::from_str(OPENAPI).unwrap();
        let mut described = Vec::new();
        for (path, operations) in document["paths"].as_object().unwrap() {
            for method in operations.as_object().unwrap().keys() {
                described.push(format!("{} {path}", method.to_uppercase()));
            }
        }
        let mut routes: Vec<String> = ROUTES
            .iter()
            .map(|(method, path, _)| format!("{method} {path}"))
            .collect();
        described.sort();
        routes.sort();
        assert_eq!(described, routes);
    }
}
