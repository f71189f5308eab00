//! The page's server: who may ask, answers, streams of events.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use serde::Serialize;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use weft_cluster::{Cluster, Role, Secret, seconds_now};

use crate::console;
use crate::feed::{Feed, Snapshot};
use crate::listen::{self, EVENT_BOUND, EventStream, ServerError, Stream};
use crate::metrics;
use crate::routes::{self, Change, Failure, JSON, Operation};

/// Connections at one time, over TCP and at the UNIX socket each; further clients wait in the
/// socket's queue.
pub const CONNECTIONS_MAX: usize = 128;
/// Longest body of a request, bytes.
const REQUEST_BYTES_MAX: usize = 4 << 10;
/// A stream of events has something at least this often.
const BEAT: Duration = Duration::from_secs(5);
/// Events that wait for a client. Overviews are left out meanwhile.
const EVENTS_WAITING: usize = 4;

/// Where to listen over TCP.
#[derive(Clone, Debug)]
pub struct Listen {
    pub address: SocketAddr,
    /// Certificate chain and key, PEM. Without them only on the loopback.
    pub tls: Option<(PathBuf, PathBuf)>,
}

/// A server whose sockets listen.
pub struct Server {
    runtime: tokio::runtime::Runtime,
    unix: UnixListener,
    path: PathBuf,
    tcp: TcpListener,
    tls: Option<TlsAcceptor>,
    shared: Arc<Shared>,
}

struct Shared {
    cluster: Cluster,
    feed: Feed,
    /// Of this server: good as long as it runs.
    own: Secret,
    /// Consoles that may be opened at the same time.
    consoles: Arc<Semaphore>,
}

/// Whom a connection is from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Door {
    /// The UNIX socket: the server's own user.
    Own,
    /// A key says.
    Key,
}

/// A client that may do something.
struct Client {
    role: Role,
    /// What operators call it.
    name: String,
}

impl Server {
    /// Listens at `path`, and over TCP.
    pub fn bind(cluster: Cluster, path: &Path, listen: &Listen) -> Result<Server, ServerError> {
        if listen.tls.is_none() && !listen.address.ip().is_loopback() {
            return Err(ServerError::NoTls(listen.address));
        }
        let tls = listen.tls.as_ref();
        let tls = tls.map(|files| listen::acceptor(files, None)).transpose()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(ServerError::Start)?;
        let feed = Feed::start(cluster.clone()).map_err(ServerError::Start)?;
        let guard = runtime.enter();
        let tcp = listen::listen(listen.address)?;
        let unix = bind_unix(path)?;
        drop(guard);
        Ok(Server {
            runtime,
            unix,
            path: path.to_owned(),
            tcp,
            tls,
            shared: Arc::new(Shared {
                cluster,
                feed,
                own: Secret::new(),
                consoles: Arc::new(Semaphore::new(console::OPEN_MAX)),
            }),
        })
    }

    /// Where the page is, with a key that is good as long as this server runs. Browsers do not
    /// send what is behind the #.
    pub fn link(&self) -> Result<String, ServerError> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let address = self.tcp.local_addr().map_err(ServerError::Start)?;
        Ok(format!("{scheme}://{address}/#{}", self.shared.own))
    }

    /// Serves until `end`, or SIGINT or SIGTERM.
    pub fn run(self, end: impl Future<Output = ()>) -> Result<(), ServerError> {
        let Server {
            runtime,
            unix,
            path,
            tcp,
            tls,
            shared,
        } = self;
        let at_socket = accept_unix(unix, &shared);
        let with_key = {
            let shared = shared.clone();
            move |stream| talk(stream, Door::Key, shared.clone())
        };
        let over_tcp = listen::accept_tcp(tcp, tls, places(), with_key);
        let serve = async {
            tokio::select! {
                () = at_socket => {}
                () = over_tcp => {}
            }
        };
        runtime.block_on(listen::until_asked(end, serve))?;
        // A reading under way has its own bounds; nobody needs it.
        runtime.shutdown_background();
        let _ = std::fs::remove_file(path);
        Ok(())
    }
}

/// One server of a user at a time: what an earlier one left behind is removed.
fn bind_unix(path: &Path) -> Result<UnixListener, ServerError> {
    let of = |error| ServerError::Listen(path.display().to_string(), error);
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(ServerError::Served(path.to_owned()));
    }
    use std::os::unix::fs::FileTypeExt;
    // Anything else is the user's, and in the way.
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        std::fs::remove_file(path).map_err(of)?;
    }
    UnixListener::bind(path).map_err(of)
}

/// The user's own connections have places of their own.
fn places() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(CONNECTIONS_MAX))
}

async fn accept_unix(listener: UnixListener, shared: &Arc<Shared>) {
    let places = places();
    let own = nix::unistd::geteuid().as_raw();
    loop {
        let place = listen::place(&places).await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let peer = stream.peer_cred().map(|peer| peer.uid());
                if peer.is_ok_and(|peer| peer == 0 || peer == own) {
                    let shared = shared.clone();
                    tokio::spawn(async move {
                        talk(Box::new(stream), Door::Own, shared).await;
                        drop(place);
                    });
                }
            }
            Err(_) => listen::pause().await,
        }
    }
}

async fn talk(stream: Stream, door: Door, shared: Arc<Shared>) {
    let service = service_fn(move |request| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(respond(request, door, &shared).await) }
    });
    listen::serve_http(stream, listen::REQUEST_BOUND, service).await;
}

type Answer = Response<Either<Full<Bytes>, EventStream>>;

async fn respond(request: Request<Incoming>, door: Door, shared: &Arc<Shared>) -> Answer {
    match serve(request, door, shared).await {
        Ok(answer) => answer,
        Err(failure) => {
            let mut answer = last(whole(JSON, failure.body()));
            *answer.status_mut() = failure.status();
            let extra = match &failure {
                Failure::Method(method) => Some((header::ALLOW, method.as_str())),
                Failure::NoKey => Some((header::WWW_AUTHENTICATE, "Bearer")),
                _ => None,
            };
            if let Some((name, value)) = extra
                && let Ok(value) = HeaderValue::from_str(value)
            {
                answer.headers_mut().insert(name, value);
            }
            answer
        }
    }
}

/// `GET /v1/session`.
#[derive(Serialize)]
struct Session<'a> {
    cluster: &'a str,
    version: &'a str,
    role: Role,
    key: &'a str,
}

async fn serve(
    request: Request<Incoming>,
    door: Door,
    shared: &Arc<Shared>,
) -> Result<Answer, Failure> {
    let operation = routes::find(request.method(), request.uri().path())?;
    let Some(needed) = operation.role() else {
        return match operation {
            Operation::File(content_type, text) => Ok(last(whole(content_type, text))),
            _ => Err(Failure::NoKey),
        };
    };
    let secret = secret_of(&request);
    if door == Door::Key && secret.is_none() {
        return Err(Failure::NoKey);
    }
    let is_own = door == Door::Own || secret.as_ref().is_some_and(|key| key.is_same(&shared.own));
    let looks = matches!(operation, Operation::Overview | Operation::Events);
    let snapshot = shared.feed.now(looks).await.map_err(|why| match is_own {
        true => Failure::Unreachable(why),
        // Nobody knows whether the key is one.
        false => Failure::Unreachable("its store does not answer".into()),
    })?;
    let client = client(door, secret.as_ref(), shared, &snapshot).ok_or(Failure::NoKey)?;
    if client.role < needed {
        return Err(Failure::Role);
    }
    match operation {
        Operation::File(..) => Err(Failure::NoKey),
        Operation::Session => {
            let identity = shared.cluster.identity();
            json(&Session {
                cluster: &identity.name,
                version: &identity.version,
                role: client.role,
                key: &client.name,
            })
        }
        Operation::Overview => Ok(whole(JSON, snapshot.json.to_string())),
        Operation::Log => json(&snapshot.log),
        Operation::Metrics => {
            let newest = snapshot.log.last().map_or(0, |record| record.number);
            let text = metrics::render(&snapshot.overview, newest);
            Ok(whole(metrics::CONTENT_TYPE, text))
        }
        Operation::Events => Ok(events(door, secret, shared)),
        Operation::Console(name) => console(shared, name, door, secret).await,
        Operation::Change(change) => {
            let body = listen::read_body(request, REQUEST_BYTES_MAX).await?;
            carry_out(shared, change, body, &client).await?;
            json(&serde_json::json!({}))
        }
    }
}

async fn carry_out(
    shared: &Arc<Shared>,
    change: Change,
    body: Bytes,
    client: &Client,
) -> Result<(), Failure> {
    let (cluster, name) = (shared.cluster.clone(), client.name.clone());
    // It goes on, and is noted, also if the client has gone meanwhile.
    let work = tokio::task::spawn_blocking(move || {
        let outcome = routes::change(&cluster, &change, &body);
        let how = match &outcome {
            Ok(()) => "done".to_owned(),
            Err(failure) => failure.to_string(),
        };
        // What is typed is nobody else's business, and comes key by key.
        if !matches!(change, Change::Type { .. }) || outcome.is_err() {
            eprintln!("weft: {name} asked for {change:?}: {how}");
        }
        outcome
    });
    work.await
        .unwrap_or_else(|error| Err(Failure::Unreachable(error.to_string())))
}

/// What the client says that it has.
fn secret_of(request: &Request<Incoming>) -> Option<Secret> {
    let value = request.headers().get(header::AUTHORIZATION)?;
    let text = value.to_str().ok()?.strip_prefix("Bearer ")?;
    Some(Secret::from_client(text.trim()))
}

fn client(
    door: Door,
    secret: Option<&Secret>,
    shared: &Shared,
    snapshot: &Snapshot,
) -> Option<Client> {
    let own = |name: &str| Client {
        role: Role::Run,
        name: name.into(),
    };
    if door == Door::Own {
        return Some(own("this user"));
    }
    let secret = secret?;
    if secret.is_same(&shared.own) {
        return Some(own("the link of this server"));
    }
    let access = snapshot.access.find(secret, seconds_now())?;
    Some(Client {
        role: access.role,
        name: access.name.clone(),
    })
}

fn json(value: &impl Serialize) -> Result<Answer, Failure> {
    let text = serde_json::to_string(value).map_err(|error| Failure::Body(error.to_string()))?;
    Ok(whole(JSON, text))
}

/// The page may load what is here, and nothing from anywhere else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

fn whole(content_type: &'static str, body: impl Into<Bytes>) -> Answer {
    answer(content_type, Either::Left(Full::new(body.into())))
}

/// The last one of its connection: a client without a key gets one answer, which its socket
/// holds, so one that reads nothing takes no place.
fn last(mut answer: Answer) -> Answer {
    let close = HeaderValue::from_static("close");
    answer.headers_mut().insert(header::CONNECTION, close);
    answer
}

fn answer(content_type: &'static str, body: Either<Full<Bytes>, EventStream>) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = StatusCode::OK;
    let headers: [(HeaderName, &'static str); 5] = [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    for (name, value) in headers {
        answer
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    answer
}

fn events(door: Door, secret: Option<Secret>, shared: &Arc<Shared>) -> Answer {
    let (sender, receiver) = mpsc::channel(EVENTS_WAITING);
    let shared = shared.clone();
    tokio::spawn(async move { tell(door, secret.as_ref(), &shared, &sender).await });
    answer("text/event-stream", Either::Right(EventStream(receiver)))
}

/// Opens the console of a machine.
async fn console(
    shared: &Arc<Shared>,
    name: String,
    door: Door,
    secret: Option<Secret>,
) -> Result<Answer, Failure> {
    let place = shared.consoles.clone().try_acquire_owned();
    let place = place.map_err(|_| Failure::Busy(console::OPEN_MAX))?;
    let cluster = shared.cluster.clone();
    let opened = tokio::task::spawn_blocking(move || cluster.open_console(&name)).await;
    let view = opened.map_err(|error| Failure::Unreachable(error.to_string()))??;
    let (sender, receiver) = mpsc::channel(EVENTS_WAITING);
    let shared = shared.clone();
    tokio::spawn(async move {
        let may_look = async || match shared.feed.now(false).await {
            Ok(snapshot) => client(door, secret.as_ref(), &shared, &snapshot)
                .is_some_and(|client| client.role >= Role::Use),
            // The store does not answer, and the console says so.
            Err(_) => true,
        };
        console::tell(view, may_look, sender, place).await;
    });
    let body = Either::Right(EventStream(receiver));
    Ok(answer("text/event-stream", body))
}

/// Sends what changes, until the client has gone, reads nothing, or may not look any more.
async fn tell(door: Door, secret: Option<&Secret>, shared: &Shared, sender: &mpsc::Sender<Bytes>) {
    let mut feed = shared.feed.subscribe();
    let mut told = Told::default();
    loop {
        shared.feed.ask();
        let latest = feed.borrow_and_update().clone();
        let events = match latest {
            None => String::new(),
            Some(Ok(snapshot)) => match client(door, secret, shared, &snapshot) {
                Some(_) => told.news(&snapshot),
                None => return,
            },
            Some(Err(why)) => told.trouble(why),
        };
        // A comment shows that the server lives.
        let text = if events.is_empty() {
            ":\n\n".into()
        } else {
            events
        };
        match timeout(EVENT_BOUND, sender.send(text.into())).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => return,
        }
        // Nothing new: what was read again is the same.
        let news = async {
            loop {
                if feed.changed().await.is_err() {
                    return;
                }
                let is_news = match &*feed.borrow() {
                    Some(Ok(snapshot)) => told.is_news(snapshot),
                    Some(Err(why)) => told.trouble.as_ref() != Some(why),
                    None => false,
                };
                shared.feed.ask();
                if is_news {
                    return;
                }
            }
        };
        tokio::select! {
            () = news => {}
            () = tokio::time::sleep(BEAT) => {}
            () = sender.closed() => return,
        }
    }
}

/// What a client was told last.
#[derive(Default)]
struct Told {
    overview: Option<Arc<str>>,
    /// The number of a record of the log.
    record: u64,
    trouble: Option<String>,
}

impl Told {
    fn is_news(&self, snapshot: &Snapshot) -> bool {
        let newest = snapshot.log.last().map_or(0, |record| record.number);
        self.trouble.is_some()
            || newest > self.record
            || self.overview.as_ref() != Some(&snapshot.json)
    }

    /// The events of what is new.
    fn news(&mut self, snapshot: &Snapshot) -> String {
        let mut text = String::new();
        self.trouble = None;
        if self.overview.as_ref() != Some(&snapshot.json) {
            text += &format!("event: overview\ndata: {}\n\n", snapshot.json);
            self.overview = Some(snapshot.json.clone());
        }
        let new = snapshot.log.iter().filter(|r| r.number > self.record);
        let new: Vec<_> = new.collect();
        if let Some(newest) = new.last() {
            let records = serde_json::to_string(&new).unwrap_or_default();
            text += &format!("event: log\ndata: {records}\n\n");
            self.record = newest.number;
        }
        text
    }

    fn trouble(&mut self, why: String) -> String {
        let text = serde_json::to_string(&why).unwrap_or_default();
        self.trouble = Some(why);
        // What comes after it is told again.
        self.overview = None;
        format!("event: trouble\ndata: {text}\n\n")
    }
}
