//! What the cluster is like, read again and again while somebody looks.
//!
//! One thread reads. When nobody has looked for [`IDLE`] it waits, and the store is left alone.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use weft_cluster::{AccessKeys, Cluster, ClusterError, LOG_MAX, LogRecord, Onlooker, Overview};

/// How often the cluster is read at least; it is read earlier when work changes.
const PERIOD: Duration = Duration::from_secs(1);
/// How often it is read at most.
const PERIOD_MIN: Duration = Duration::from_millis(250);
/// So long after the last request the reading goes on.
const IDLE: Duration = Duration::from_secs(10);
/// What is older is no answer.
const AGE_MAX: Duration = Duration::from_secs(3);
/// How long a request waits for a reading: each has some calls to the store, which have bounds.
const READ_BOUND: Duration = Duration::from_secs(10);

/// All that is known of the cluster at one moment.
pub(crate) struct Snapshot {
    pub overview: Overview,
    /// The same as JSON.
    pub json: Arc<str>,
    /// Oldest first.
    pub log: Vec<LogRecord>,
    pub access: AccessKeys,
    read: Instant,
}

/// What was read last, or why nothing could be.
pub(crate) type Latest = Option<Result<Arc<Snapshot>, String>>;

/// See the module.
pub(crate) struct Feed {
    latest: watch::Receiver<Latest>,
    demand: Arc<Demand>,
}

struct Demand {
    asked: Mutex<Asked>,
    again: Condvar,
}

/// When somebody asked last.
#[derive(Default)]
struct Asked {
    at: Option<Instant>,
    /// For more than metrics.
    looked: Option<Instant>,
}

impl Demand {
    fn lock(&self) -> MutexGuard<'_, Asked> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, looks: bool) {
        let now = Some(Instant::now());
        let mut asked = self.lock();
        asked.at = now;
        if looks {
            asked.looked = now;
        }
        drop(asked);
        self.again.notify_all();
    }

    /// Returns when somebody has asked lately: whether for more than metrics.
    fn wait(&self) -> bool {
        let is_old = |at: Option<Instant>| at.is_none_or(|at| at.elapsed() > IDLE);
        let asked = self.again.wait_while(self.lock(), |asked| is_old(asked.at));
        let asked = asked.unwrap_or_else(PoisonError::into_inner);
        !is_old(asked.looked)
    }
}

impl Feed {
    /// Starts reading, on a thread that lasts as long as the process.
    pub fn start(cluster: Cluster) -> std::io::Result<Feed> {
        let (sender, latest) = watch::channel(None);
        let demand = Arc::new(Demand {
            asked: Mutex::default(),
            again: Condvar::new(),
        });
        let waits = demand.clone();
        std::thread::Builder::new()
            .name("weft-feed".into())
            .spawn(move || read_on(&cluster, &waits, &sender))?;
        Ok(Feed { latest, demand })
    }

    /// What is known now. A sentence where the cluster cannot be read.
    /// `looks`: agents say what their aggregates do; for metrics they need not.
    pub async fn now(&self, looks: bool) -> Result<Arc<Snapshot>, String> {
        self.demand.ask(looks);
        let mut latest = self.latest.clone();
        let is_new = |latest: &Latest| match latest {
            Some(Ok(snapshot)) => snapshot.read.elapsed() < AGE_MAX,
            Some(Err(_)) | None => false,
        };
        let waited = tokio::time::timeout(READ_BOUND, latest.wait_for(is_new)).await;
        if let Ok(Ok(snapshot)) = &waited
            && let Some(Ok(snapshot)) = &**snapshot
        {
            return Ok(snapshot.clone());
        }
        drop(waited);
        let why = match &*self.latest.borrow() {
            Some(Err(why)) => why.clone(),
            _ => "the cluster's store does not answer".to_owned(),
        };
        Err(why)
    }

    /// Whatever comes next.
    pub fn subscribe(&self) -> watch::Receiver<Latest> {
        self.latest.clone()
    }

    /// Somebody looks still.
    pub fn ask(&self) {
        self.demand.ask(true);
    }
}

fn read_on(cluster: &Cluster, demand: &Demand, sender: &watch::Sender<Latest>) {
    let mut log = Vec::new();
    let mut onlooker = Onlooker::default();
    loop {
        let looks = demand.wait();
        let begun = Instant::now();
        if looks {
            // The reading that follows says what is wrong with the store.
            let _ = onlooker.look(cluster);
        }
        let read = read(cluster, &mut log).map(Arc::new);
        let revision = read.as_ref().ok().map(|read| read.overview.revision);
        let latest = read.map_err(|error| error.to_string());
        if sender.send(Some(latest)).is_err() {
            return;
        }
        // Changes of work come at once, those of hosts within a period.
        let waited = revision.map(|revision| cluster.wait_for_work(revision, PERIOD));
        let pause = match waited {
            Some(Ok(_)) => PERIOD_MIN,
            _ => PERIOD,
        };
        std::thread::sleep(pause.saturating_sub(begun.elapsed()));
    }
}

fn read(cluster: &Cluster, log: &mut Vec<LogRecord>) -> Result<Snapshot, ClusterError> {
    read_log(cluster, log)?;
    let overview = cluster.overview()?;
    Ok(Snapshot {
        json: serde_json::to_string(&overview).unwrap_or_default().into(),
        overview,
        log: log.clone(),
        access: cluster.access()?,
        read: Instant::now(),
    })
}

fn read_log(cluster: &Cluster, log: &mut Vec<LogRecord>) -> Result<(), ClusterError> {
    let last = log.last().map_or(0, |record| record.number);
    log.extend(cluster.log_after(last)?);
    let surplus = log.len().saturating_sub(LOG_MAX as usize);
    log.drain(..surplus);
    Ok(())
}
