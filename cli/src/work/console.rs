//! A machine's console, shown to the cluster's pages while somebody has it open.
//!
//! Two threads of the agent, which last as long as it: one waits for calls and types, one reads
//! what the machine says while it is attached. They hold nothing of the agent up.

use std::collections::BTreeSet;
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
    /// Those for whom it was attached, or could not be.
    open: BTreeSet<LeaseId>,
    /// `None`: it could not be attached, as they were told.
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

    /// Whether somebody has the console open.
    fn answer(&mut self, calls: ConsoleCalls) -> Result<bool, ClusterError> {
        let known = self.attached.as_ref();
        // A page that opens a closed console has it tried again.
        let is_news =
            known.is_some_and(|known| known.stream.is_none() && !calls.open.is_subset(&known.open));
        if calls.open.is_empty() || is_news {
            self.detach();
        }
        if calls.open.is_empty() {
            return Ok(false);
        }
        match &mut self.attached {
            Some(attached) => {
                attached.open = calls.open;
                self.cluster.renew(attached.lease)?;
            }
            None => self.attach(calls.open)?,
        }
        if let Some(attached) = &mut self.attached
            && let Some(stream) = &mut attached.stream
            && stream.write_all(&calls.typed).is_err()
        {
            // The other thread says so.
            attached.stream = None;
        }
        Ok(true)
    }

    fn attach(&mut self, open: BTreeSet<LeaseId>) -> Result<(), ClusterError> {
        let lease = self.cluster.lease()?;
        self.shown.set(Some(lease));
        let outcome = connect(&self.spread).and_then(|stream| {
            let output = Output {
                cluster: self.cluster.clone(),
                id: self.id,
                lease,
                stream: stream.try_clone().map_err(|error| error.to_string())?,
                end: 0,
                tail: Vec::new(),
            };
            std::thread::Builder::new()
                .name("weft-output".into())
                .spawn(move || output.show())
                .map_err(|error| error.to_string())?;
            Ok(stream)
        });
        let outcome = outcome.map_err(Shown::Closed);
        if let Err(closed) = &outcome {
            self.cluster.show_console(self.id, closed, lease)?;
        }
        self.attached = Some(Attached {
            lease,
            open,
            stream: outcome.ok(),
        });
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
    /// Bytes so far.
    end: u64,
    tail: Vec<u8>,
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
            if shown != self.end && last.elapsed() >= SHOW_PERIOD {
                // A store that does not answer now may do so for what follows.
                if self.tell(&self.output()).is_ok() {
                    shown = self.end;
                }
                last = Instant::now();
            }
        };
        // "another client is attached" is output, and comes before the end.
        let _ = self.tell(&self.output());
        std::thread::sleep(2 * SHOW_PERIOD);
        let _ = self.tell(&Shown::Closed(why));
    }

    fn add(&mut self, bytes: &[u8]) {
        self.end += bytes.len() as u64;
        self.tail.extend(bytes);
        let surplus = self.tail.len().saturating_sub(CONSOLE_TAIL_MAX);
        self.tail.drain(..surplus);
    }

    fn output(&self) -> Shown {
        Shown::Output {
            end: self.end,
            tail: self.tail.clone(),
        }
    }

    /// After a detachment the lease is gone, and this changes nothing.
    fn tell(&self, shown: &Shown) -> Result<(), ClusterError> {
        self.cluster.show_console(self.id, shown, self.lease)
    }
}

fn is_temporary(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}
