//! The socket, the connections on it, and their bounds.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::pin::pin;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::time::timeout;
use weft_confine::{ThreadKind, lock};
use weft_machine::REPLY_SECONDS_MAX;

use super::files;
use super::routes::{self, Answer, Worker};
use super::{Control, SAVE_SECONDS_MAX};

/// Connections at one time; further clients wait in the socket's queue.
pub const CONNECTIONS_MAX: u32 = 16;
/// Longest body of a request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 16 << 10;
/// Longest request line with its headers, in bytes. (8192 is the least that the
/// library takes.)
const HEAD_BYTES_MAX: usize = 8 << 10;
/// Headers of one request.
const HEADERS_MAX: usize = 32;
/// How long a client may take to say what it wants.
const REQUEST_BOUND: Duration = Duration::from_secs(5);
/// How long a machine may take for what is asked: to be saved takes longest.
const WORK_BOUND: Duration = Duration::from_secs(SAVE_SECONDS_MAX);
const _: () = assert!(WORK_BOUND.as_secs() >= super::STOP_SECONDS_MAX as u64 + REPLY_SECONDS_MAX);
/// How long a client may take to read its answer.
const ANSWER_BOUND: Duration = Duration::from_secs(5);
/// Jobs that may wait for the machine.
const JOBS_MAX: usize = 8;
/// How long answers on their way may take when the machine has ended.
const FINISH_BOUND: Duration = Duration::from_secs(1);

/// The API's threads, from outside.
pub struct Server {
    finish: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Server {
    /// Serves `control` at `listener`, on the threads `api` and `api-work`. Beside
    /// root, only processes of `owners` are listened to.
    pub fn start(
        listener: UnixListener,
        control: Arc<dyn Control>,
        owners: Vec<u32>,
    ) -> io::Result<Server> {
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let (jobs, waiting) = sync_channel(JOBS_MAX);
        weft_confine::spawn("api-work", ThreadKind::Device, move || {
            routes::work(&waiting, &control);
        })?;
        let (finish, finished) = oneshot::channel();
        let thread = weft_confine::spawn("api", ThreadKind::Api, move || {
            runtime.block_on(serve(listener, Worker(jobs), owners, finished));
        })?;
        Ok(Server { finish, thread })
    }

    /// Lets answers on their way arrive, and ends; bounded.
    pub fn finish(self) {
        // An error: the thread has ended by itself.
        let _ = self.finish.send(());
        let _ = self.thread.join();
    }
}

async fn serve(
    listener: UnixListener,
    worker: Worker,
    owners: Vec<u32>,
    mut finished: oneshot::Receiver<()>,
) {
    let Ok(listener) = tokio::net::UnixListener::from_std(listener) else {
        return;
    };
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX as usize));
    loop {
        let accepted = async {
            // The semaphore is never closed.
            let place = places.clone().acquire_owned().await.ok();
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            _ = &mut finished => break,
            accepted = accepted => accepted,
        };
        match accepted {
            Ok((stream, _)) if is_owner(&stream, &owners) => {
                let worker = worker.clone();
                tokio::spawn(async move {
                    talk(stream, worker).await;
                    drop(place);
                });
            }
            Ok(_) => {}
            // Out of descriptors, say: not at full speed.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    let _ = timeout(FINISH_BOUND, places.acquire_many(CONNECTIONS_MAX)).await;
}

fn is_owner(stream: &UnixStream, owners: &[u32]) -> bool {
    stream
        .peer_cred()
        .is_ok_and(|peer| peer.uid() == 0 || owners.contains(&peer.uid()))
}

/// One request and its answer. Whatever goes wrong here is the client's loss.
async fn talk(stream: UnixStream, worker: Worker) {
    let Ok(Ok(files)) = timeout(REQUEST_BOUND, receive_files(&stream)).await else {
        return;
    };
    let files = Mutex::new(files);
    let answered = Notify::new();
    let service = service_fn(|request| {
        let (worker, answered, files) = (worker.clone(), &answered, &files);
        async move {
            let files = std::mem::take(&mut *lock(files));
            let response = respond(request, files, &worker).await;
            answered.notify_one();
            Ok::<_, Infallible>(response)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_BOUND)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    tokio::select! {
        _ = timeout(REQUEST_BOUND * 2 + WORK_BOUND, connection.as_mut()) => {}
        () = answered.notified() => {
            let _ = timeout(ANSWER_BOUND, connection).await;
        }
    }
}

/// The files that came with the request.
async fn receive_files(stream: &UnixStream) -> io::Result<Vec<File>> {
    loop {
        stream.readable().await?;
        match stream.try_io(Interest::READABLE, || files::receive(stream.as_fd())) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            received => return received,
        }
    }
}

async fn respond(
    request: Request<Incoming>,
    files: Vec<File>,
    worker: &Worker,
) -> Response<Full<Bytes>> {
    let query = request.uri().query().unwrap_or_default().to_owned();
    let answer = match routes::find(request.method(), request.uri().path()) {
        Ok(operation) => match read_body(request).await {
            Ok(body) => routes::answer(operation, &query, &body, files, worker).await,
            Err(answer) => answer,
        },
        Err(answer) => answer,
    };
    let mut response = Response::new(Full::from(answer.body));
    *response.status_mut() = answer.status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Some(method) = answer.allow
        && let Ok(value) = HeaderValue::from_str(method.as_str())
    {
        headers.insert(ALLOW, value);
    }
    response
}

async fn read_body(request: Request<Incoming>) -> Result<Bytes, Answer> {
    let body = Limited::new(request.into_body(), REQUEST_BYTES_MAX).collect();
    match timeout(REQUEST_BOUND, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => Err(Answer::error(
            StatusCode::PAYLOAD_TOO_LARGE,
            "too_large",
            format!("the body is longer than {REQUEST_BYTES_MAX} bytes"),
        )),
        Ok(Err(error)) => Err(Answer::error(
            StatusCode::BAD_REQUEST,
            "bad_request",
            format!("the body did not arrive: {error}"),
        )),
        Err(_) => Err(Answer::error(
            StatusCode::REQUEST_TIMEOUT,
            "timed_out",
            format!(
                "the body did not arrive within {} s",
                REQUEST_BOUND.as_secs()
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream as Socket;

    use super::*;

    async fn read_to_end(socket: &UnixStream) -> Vec<u8> {
        let (mut answer, mut bytes) = (Vec::new(), [0; 1024]);
        loop {
            socket.readable().await.unwrap();
            match socket.try_read(&mut bytes) {
                Ok(0) => return answer,
                Ok(count) => answer.extend(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// The kernel ends a read where descriptors end, also when more bytes wait, and wakes the
    /// reader once for both.
    #[test]
    fn files_and_their_request_may_come_at_one_time() {
        let (jobs, _waiting) = sync_channel(1);
        let (near, far) = Socket::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.set_nonblocking(true).unwrap();
        let mut writes = far.try_clone().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let answer = runtime.block_on(async {
            let near = UnixStream::from_std(near).unwrap();
            let far = UnixStream::from_std(far).unwrap();
            let served = tokio::spawn(talk(near, Worker(jobs)));
            // It has found nothing to read, and waits to be woken.
            tokio::time::sleep(Duration::from_millis(1)).await;
            let file = File::open("/dev/null").unwrap();
            files::send(writes.as_fd(), &[file]).unwrap();
            writes
                .write_all(b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
                .unwrap();
            drop(writes);
            let answer = read_to_end(&far).await;
            served.await.unwrap();
            answer
        });
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    }
}
