use crate::bounds::{CORES_MAX, PRIORITY_MAX, WORK_HOSTS_MAX};
use std::time::Duration;
use weft_store::StoreError;

/// Why something about a cluster was not done.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("this store has no cluster: `weft cluster init` makes one")]
    None,
    #[error("this store has the cluster {0} already: join it, or give another store")]
    Exists(String),
    #[error(
        "the cluster's state has format {found}, this weft knows {known}: use the version of the other hosts"
    )]
    Format { found: u32, known: u32 },
    #[error(
        "the token is unknown, was used, or is older than its time: ask for another with `weft cluster invite`"
    )]
    NoSuchToken,
    #[error("this is no token: one begins with weft-join- and has 64 more letters and digits")]
    NotAToken,
    #[error("an invitation is good for {} s at most", .0.as_secs())]
    TokenLife(Duration),
    #[error(
        "a host called {0} is a member already: choose another name, or have the other one leave"
    )]
    NameTaken(String),
    #[error("this host's key belongs to the member {0} already")]
    KeyTaken(String),
    #[error("the cluster has as many hosts as it can have: have one leave")]
    Full,
    #[error("others change the same at once: try again")]
    Busy,
    #[error("{0} is no member of the cluster")]
    NoSuchHost(String),
    #[error(
        "{name:?} is no name for a host, a cluster or its work: use up to 63 small letters, digits and -, a letter or digit first"
    )]
    Name { name: String },
    #[error("this host has version {own}, the cluster {cluster}: all hosts need the same")]
    Version { own: String, cluster: String },
    #[error("{0} runs or waits in this cluster already: give this one another name")]
    WorkNameTaken(String),
    #[error("nothing called {0} runs or waits in this cluster: `weft plan` shows what does")]
    NoSuchWork(String),
    #[error(
        "nothing called {0} waits for a launcher on this host: --placed is for `weft run --anywhere` \
         and `weft vm start --anywhere`, which call it"
    )]
    NotElsewhere(String),
    #[error("{0} does not move now")]
    NoMove(String),
    #[error("{0} is a program: its output is where it was started")]
    NoConsole(String),
    #[error(
        "the request for {0} is out of bounds: ask for 1 to {CORES_MAX} cores, 1 MiB to 4 PiB, 1 to \
         {WORK_HOSTS_MAX} hosts, and a priority up to {PRIORITY_MAX}"
    )]
    BadRequest(String),
    #[error("the reason is empty, longer than {0} characters, or has a control character")]
    Trouble(usize),
    #[error("{0:?} is no user name: it is empty, too long, or has a space or a control character")]
    User(String),
    #[error("{0} has no quota: `weft cluster quota list` lists them")]
    NoSuchQuota(String),
    #[error(transparent)]
    Policy(#[from] weft_place::UnknownPolicy),
    #[error("an access key is good for {} days at most", .0.as_secs() / 86400)]
    AccessLife(Duration),
    #[error("an access key called {0} exists already: choose another name, or end that one")]
    AccessTaken(String),
    #[error("no access key is called {0}: `weft cluster access list` lists them")]
    NoSuchAccess(String),
    #[error("{0} is not the leader any more: another host decides")]
    NotLeader(String),
    #[error("the cluster's record {key} cannot be read: {reason}")]
    Damaged { key: String, reason: String },
    #[error(transparent)]
    Store(#[from] StoreError),
}
