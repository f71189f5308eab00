//! Sockets, TLS, and the bounds of connections and requests.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::sys::socket::sockopt::TcpUserTimeout;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

/// Longest request line with its headers, bytes. (8192 is the least that the library takes.)
const HEAD_BYTES_MAX: usize = 8 << 10;
/// How long a client may take to say what it wants.
pub(crate) const REQUEST_BOUND: Duration = Duration::from_secs(10);
/// How long what was sent may wait for a client that reads nothing: then its connection ends
/// (tcp(7), TCP_USER_TIMEOUT).
const READ_BOUND: Duration = Duration::from_secs(10);

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error(
        "{0} is not on the loopback: give --tls-certificate and --tls-key, or listen on 127.0.0.1"
    )]
    NoTls(SocketAddr),
    #[error(
        "{0} is not on the loopback: give --store-authority, --store-certificate and --store-key, \
         or listen on 127.0.0.1"
    )]
    NoStoreTls(SocketAddr),
    #[error("cannot listen on {0}")]
    Listen(String, #[source] io::Error),
    #[error("another `weft cluster serve` answers at {0}")]
    Served(PathBuf),
    #[error("cannot read {0}: {1}")]
    Pem(PathBuf, String),
    #[error("the certificate and the key do not work together")]
    Tls(#[source] rustls::Error),
    #[error("cannot start")]
    Start(#[source] io::Error),
}

/// A connection, with TLS or without.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}
pub(crate) type Stream = Box<dyn Duplex>;

/// Within a runtime.
pub(crate) fn listen(address: SocketAddr) -> Result<TcpListener, ServerError> {
    let of = |error| ServerError::Listen(address.to_string(), error);
    let socket = std::net::TcpListener::bind(address).map_err(of)?;
    socket.set_nonblocking(true).map_err(of)?;
    TcpListener::from_std(socket).map_err(of)
}

/// TLS with this certificate chain and key. With `authority`, clients need a certificate that it
/// has signed.
pub(crate) fn acceptor(
    (certificate, key): &(PathBuf, PathBuf),
    authority: Option<&Path>,
) -> Result<TlsAcceptor, ServerError> {
    let chain = certificates(certificate)?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| pem(key, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(ServerError::Tls)?;
    let builder = match authority {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            for root in certificates(authority)? {
                roots.add(root).map_err(ServerError::Tls)?;
            }
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
            let verifier = verifier.map_err(|error| pem(authority, &error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(chain, private)
        .map_err(ServerError::Tls)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, ServerError> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    read.map_err(|error: rustls::pki_types::pem::Error| pem(file, &error))
}

fn pem(path: &Path, error: &dyn std::fmt::Display) -> ServerError {
    ServerError::Pem(path.to_owned(), error.to_string())
}

/// Runs `serve` until `end`, or SIGINT or SIGTERM.
pub(crate) async fn until_asked(
    end: impl Future<Output = ()>,
    serve: impl Future<Output = ()>,
) -> Result<(), ServerError> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut asked = signal(SignalKind::terminate()).map_err(ServerError::Start)?;
    tokio::select! {
        () = end => {}
        _ = asked.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
        () = serve => {}
    }
    Ok(())
}

/// A place for one more connection.
pub(crate) async fn place(places: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
    // The semaphore is never closed.
    places.clone().acquire_owned().await.ok()
}

/// After an error, out of descriptors for example: not at full speed.
pub(crate) async fn pause() {
    tokio::time::sleep(Duration::from_millis(100)).await;
}

/// Has `talk` serve each connection, as many at a time as there are places.
pub(crate) async fn accept_tcp<T, F>(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    places: Arc<Semaphore>,
    talk: T,
) where
    T: Fn(Stream) -> F,
    F: Future<Output = ()> + Send + 'static,
    T: Clone + Send + 'static,
{
    loop {
        let place = place(&places).await;
        let Ok((stream, _)) = listener.accept().await else {
            pause().await;
            continue;
        };
        let bound = READ_BOUND.as_millis() as u32;
        // A socket that has ended already refuses it.
        let _ = nix::sys::socket::setsockopt(&stream, TcpUserTimeout, &bound);
        let (talk, tls) = (talk.clone(), tls.clone());
        tokio::spawn(async move {
            match tls {
                None => talk(Box::new(stream)).await,
                Some(tls) => {
                    if let Ok(Ok(stream)) = timeout(REQUEST_BOUND, tls.accept(stream)).await {
                        talk(Box::new(stream)).await;
                    }
                }
            }
            drop(place);
        });
    }
}

/// The requests of one connection, which may be idle for a time. Whatever goes wrong here is the
/// client's loss.
pub(crate) async fn serve_http<S, B>(stream: Stream, idle: Duration, service: S)
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
    B: Body<Data = Bytes> + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

/// Why a request's body was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BodyError {
    #[error("the body is longer than {0} bytes")]
    TooLarge(usize),
    #[error("the body did not arrive: {0}")]
    Broken(String),
    #[error("the body did not arrive within {} s", REQUEST_BOUND.as_secs())]
    Late,
}

pub(crate) async fn read_body(
    request: Request<Incoming>,
    bytes_max: usize,
) -> Result<Bytes, BodyError> {
    let body = Limited::new(request.into_body(), bytes_max).collect();
    match timeout(REQUEST_BOUND, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(BodyError::TooLarge(bytes_max)),
        Ok(Err(error)) => Err(BodyError::Broken(error.to_string())),
        Err(_) => Err(BodyError::Late),
    }
}

/// How long a client may take to read an event.
pub(crate) const EVENT_BOUND: Duration = Duration::from_secs(10);

/// Pieces of an answer that come as they come.
pub(crate) struct EventStream(pub mpsc::Receiver<Bytes>);

impl Body for EventStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let event = self.0.poll_recv(context);
        event.map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}
