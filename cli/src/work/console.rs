//! A machine's console, shown to the cluster's pages while somebody has it open.
//!
//! Two threads of the agent: one waits for calls and types, as long as the agent lives; one reads
//! what the machine says while the console is attached. They hold nothing of the agent up.

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use weft_api::ConsoleView;
use weft_cluster::{ALIVE_LEASE, CONSOLE_TAIL_MAX, Cluster, ClusterError, ConsoleCalls, Shown};
use weft_node::rundir;
use weft_store::LeaseId;

use super::mover::Spread;

/// A watch for calls lasts this long while nobody has the console open.
const IDLE_WATCH: Duration = ALIVE_LEASE;
/// And this long while somebody has: the lease is renewed after each.
const OPEN_WATCH: Duration = ALIVE_LEASE.checked_div(5).expect("not by zero");
/// After a store that did not answer.
const PAUSE: Duration = Duration::from_secs(2);
/// How often output is shown at most.
const SHOW_PERIOD: Duration = Duration::from_millis(150);
/// How long a machine may take to say where its console is, and to take what is typed.
const BOUND: Duration = Duration::from_secs(5);

/// The lease under which a console is shown now.
#[derive(Clone, Default)]
pub struct ShownLease(Arc<Mutex<Option<LeaseId>>>);

impl ShownLease {
    fn set(&self, lease: Option<LeaseId>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = lease;
    }

    pub fn get(&self) -> Option<LeaseId> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves the console of a machine that is placed as request `id`, from now on.
pub fn serve(cluster: Cluster, id: u64, spread: Spread) -> io::Result<ShownLease> {
    let shown = ShownLease::default();
    let desk = Desk {
        cluster,
        id,
        spread,
        attached: None,
        shown: shown.clone(),
    };
    std::thread::Builder::new()
        .name("weft-console".into())
        .spawn(move || desk.serve())?;
    Ok(shown)
}

struct Desk {
    cluster: Cluster,
    id: u64,
    spread: Spread,
    attached: Option<Attached>,
    shown: ShownLease,
}

/// A machine's console while somebody has it open.
struct Attached {
    lease: LeaseId,
    /// `None`: it could not be attached, as the pages were told.
    stream: Option<UnixStream>,
}

impl Desk {
    fn serve(mut self) {
        loop {
            let waited = self.cluster.take_console_calls(self.id).and_then(|calls| {
                let after = calls.revision;
                let watch = match self.answer(calls)? {
                    true => OPEN_WATCH,
                    false => IDLE_WATCH,
                };
                self.cluster.wait_for_console_calls(self.id, after, watch)
            });
            if waited.is_err() {
                // The lease may have ended; pages ask again.
                self.detach();
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Whether somebody has the console open. A page that was told that it is closed closes it,
    /// so the next one has it tried again.
    fn answer(&mut self, calls: ConsoleCalls) -> Result<bool, ClusterError> {
        if calls.open == 0 {
            self.detach();
            return Ok(false);
        }
        match &self.attached {
            Some(attached) => self.cluster.renew(attached.lease)?,
            None => self.attach()?,
        }
        let stream = self.attached.as_mut().and_then(|it| it.stream.as_mut());
        if let Some(stream) = stream
            && stream.write_all(&calls.typed).is_err()
        {
            // The other thread sees the end, and says so.
            let _ = stream.shutdown(Shutdown::Both);
        }
        Ok(true)
    }

    fn attach(&mut self) -> Result<(), ClusterError> {
        let lease = self.cluster.lease()?;
        self.shown.set(Some(lease));
        let outcome = connect(&self.spread).and_then(|stream| {
            let output = Output {
                cluster: self.cluster.clone(),
                id: self.id,
                lease,
                stream: stream.try_clone().map_err(|error| error.to_string())?,
                said: Shown::default(),
            };
            std::thread::Builder::new()
                .name("weft-output".into())
                .spawn(move || output.show())
                .map_err(|error| error.to_string())?;
            Ok(stream)
        });
        let (stream, closed) = match outcome {
            Ok(stream) => (Some(stream), None),
            Err(why) => (None, Some(why)),
        };
        self.attached = Some(Attached { lease, stream });
        if closed.is_some() {
            let shown = Shown {
                closed,
                ..Shown::default()
            };
            self.cluster.show_console(self.id, &shown, lease)?;
        }
        Ok(())
    }

    fn detach(&mut self) {
        if let Some(attached) = self.attached.take() {
            if let Some(stream) = attached.stream {
                let _ = stream.shutdown(Shutdown::Both);
            }
            // Else it ends by itself.
            let _ = self.cluster.end_lease(attached.lease);
            self.shown.set(None);
        }
    }
}

/// Attaches to a machine's console. The error is a phrase.
fn connect(spread: &Spread) -> Result<UnixStream, String> {
    let client = spread.client().map_err(|error| error.to_string())?;
    let view = client.view(BOUND).map_err(|error| error.to_string())?;
    let ConsoleView::Socket { path } = view.console else {
        return Err(
            "this machine's console is where `weft vm run` was called: one that was started with \
             `weft vm start`, or with --console socket, can be shown here"
                .into(),
        );
    };
    let stream = rundir::connect(&path).map_err(|error| error.to_string())?;
    let bounds = stream
        .set_read_timeout(Some(SHOW_PERIOD))
        .and_then(|()| stream.set_write_timeout(Some(BOUND)));
    bounds.map_err(|error| error.to_string())?;
    Ok(stream)
}

/// What a console says, for the store.
struct Output {
    cluster: Cluster,
    id: u64,
    lease: LeaseId,
    stream: UnixStream,
    said: Shown,
}

impl Output {
    /// Until the machine closes the console, or nobody has it open any more.
    fn show(mut self) {
        let mut buffer = vec![0; CONSOLE_TAIL_MAX];
        let (mut shown, mut last) = (0, Instant::now());
        let why = loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => break "the console was closed".to_owned(),
                Ok(count) => self.add(buffer.get(..count).unwrap_or_default()),
                Err(error) if is_temporary(&error) => {}
                Err(error) => break error.to_string(),
            }
            if shown != self.said.end && last.elapsed() >= SHOW_PERIOD {
                // A store that does not answer now may do so for what follows.
                if self.tell().is_ok() {
                    shown = self.said.end;
                }
                last = Instant::now();
            }
        };
        self.said.closed = Some(why);
        // After a detachment the lease is gone, and nobody waits for this.
        let _ = self.tell();
    }

    fn add(&mut self, bytes: &[u8]) {
        let Shown { end, tail, .. } = &mut self.said;
        *end += bytes.len() as u64;
        tail.extend(bytes);
        let surplus = tail.len().saturating_sub(CONSOLE_TAIL_MAX);
        tail.drain(..surplus);
    }

    fn tell(&self) -> Result<(), ClusterError> {
        self.cluster.show_console(self.id, &self.said, self.lease)
    }
}

fn is_temporary(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}
