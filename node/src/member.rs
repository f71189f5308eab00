//! This host as a member of a cluster: which cluster, and what the other members may do here.
//!
//! `cluster.toml` beside `node.toml` says where the cluster's state is. The members are peers
//! like those of `node.toml`, without an entry for each: a host that joins is known to all
//! others by its key, and one that leaves is not. `cluster-hosts.json` has those that were
//! known last, for a time in which the store cannot be reached.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use weft_cluster::{Cluster, ClusterError, HOSTS_MAX, HostRecord};
use weft_store::{Etcd, EtcdOptions, Store, StoreError, TlsFiles};
use weft_wire::hello::Hello;

use crate::config::{self, May, Peer, USER_LAST};

/// File name, in the configuration directory.
pub const MEMBER_FILE: &str = "cluster.toml";
/// The members that were known last.
const HOSTS_FILE: &str = "cluster-hosts.json";

/// What `cluster.toml` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Membership {
    /// `etcd://HOST:PORT[,…]`.
    pub store: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_authority: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_certificate: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_key: Option<PathBuf>,
    /// The cluster's id: another cluster in the same store would not be meant.
    pub cluster: String,
    /// This host's name in it.
    pub host: String,
    /// What each other member may do.
    pub may: May,
    /// Whether machines of other members may come here for good.
    pub machines: bool,
}

/// Why something about the membership failed.
#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    #[error(
        "this host is no member of a cluster: `weft cluster join TOKEN --store STORE` makes it one"
    )]
    NoMember,
    #[error("this host is a member of a cluster already ({0}): `weft cluster leave` first")]
    Member(PathBuf),
    #[error("cannot {doing} {path}")]
    File {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{path}: {message}")]
    Syntax { path: PathBuf, message: String },
    #[error(
        "store_authority, store_certificate and store_key belong together: give all three or none"
    )]
    Certificates,
    #[error(
        "the store has another cluster than the one this host joined (id {found}, not {expected})"
    )]
    OtherCluster { found: String, expected: String },
    #[error("this daemon ends")]
    Ending,
    #[error(transparent)]
    Config(#[from] config::ConfigError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

impl MemberError {
    /// Whether the store did not answer: then nobody knows better than before.
    pub fn is_silence(&self) -> bool {
        let (MemberError::Store(error) | MemberError::Cluster(ClusterError::Store(error))) = self
        else {
            return false;
        };
        matches!(
            error,
            StoreError::Unreachable { .. } | StoreError::Unknown { .. }
        )
    }
}

/// Where a cluster's state is, as the command line says it.
#[derive(Debug, Clone, Default)]
pub struct StoreAddress {
    pub store: String,
    pub authority: Option<PathBuf>,
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

impl StoreAddress {
    /// A handle of it; no member of the store is asked yet.
    pub fn open(&self) -> Result<Arc<dyn Store>, MemberError> {
        let tls = match (&self.authority, &self.certificate, &self.key) {
            (None, None, None) => None,
            (Some(authority), Some(certificate), Some(key)) => Some(TlsFiles {
                authority: authority.clone(),
                certificate: certificate.clone(),
                key: key.clone(),
            }),
            _ => return Err(MemberError::Certificates),
        };
        Ok(Arc::new(Etcd::new(&EtcdOptions::parse(&self.store, tls)?)?))
    }
}

impl Membership {
    /// Of a host that has just joined.
    pub fn new(address: &StoreAddress, cluster: &Cluster, host: &str) -> Membership {
        Membership {
            store: address.store.clone(),
            store_authority: address.authority.clone(),
            store_certificate: address.certificate.clone(),
            store_key: address.key.clone(),
            cluster: cluster.identity().id.clone(),
            host: host.into(),
            may: May::Both,
            machines: true,
        }
    }

    /// `None` where this host is no member.
    pub fn load(directory: &Path) -> Result<Option<Membership>, MemberError> {
        let path = directory.join(MEMBER_FILE);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                return Err(MemberError::File {
                    doing: "read",
                    path,
                    source,
                });
            }
        };
        config::check_owner(directory, &path)?;
        toml::from_str(&text)
            .map(Some)
            .map_err(|error| MemberError::Syntax {
                path,
                message: error.to_string().trim_end().to_owned(),
            })
    }

    /// This host's membership; refused where it is no member.
    pub fn required() -> Result<Membership, MemberError> {
        Membership::load(&config::directory())?.ok_or(MemberError::NoMember)
    }

    /// This host's membership, and the cluster.
    pub fn joined() -> Result<(Membership, Cluster), MemberError> {
        let membership = Membership::required()?;
        let cluster = membership.cluster()?;
        Ok((membership, cluster))
    }

    /// Refused where this host is a member already.
    pub fn save(&self, directory: &Path) -> Result<(), MemberError> {
        let path = directory.join(MEMBER_FILE);
        let text = toml::to_string(self).map_err(|error| MemberError::Syntax {
            path: path.clone(),
            message: error.to_string(),
        })?;
        let comment = "# The cluster that this host is a member of. `weft cluster leave` ends \
                       that.\n# What the other members may do here: `may` and `machines` are \
                       those of a [[peer]] in node.toml.\n";
        // A link does not replace a file that is there.
        let written = write_beside(&path, (comment.to_owned() + &text).as_bytes(), |new| {
            std::fs::hard_link(new, &path)
        });
        match written {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(MemberError::Member(path))
            }
            Err(source) => Err(MemberError::File {
                doing: "write",
                path,
                source,
            }),
        }
    }

    /// This host is no member any more.
    pub fn remove(directory: &Path) -> Result<(), MemberError> {
        for name in [HOSTS_FILE, MEMBER_FILE] {
            let path = directory.join(name);
            match std::fs::remove_file(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(MemberError::File {
                        doing: "remove",
                        path,
                        source,
                    });
                }
                _ => {}
            }
        }
        Ok(())
    }

    pub fn address(&self) -> StoreAddress {
        StoreAddress {
            store: self.store.clone(),
            authority: self.store_authority.clone(),
            certificate: self.store_certificate.clone(),
            key: self.store_key.clone(),
        }
    }

    /// The cluster, which must be the one that this host joined.
    pub fn cluster(&self) -> Result<Cluster, MemberError> {
        let cluster = Cluster::open(self.address().open()?)?;
        let found = &cluster.identity().id;
        if *found != self.cluster {
            let (found, expected) = (found.clone(), self.cluster.clone());
            return Err(MemberError::OtherCluster { found, expected });
        }
        Ok(cluster)
    }

    /// The other members as peers, beside those of `node.toml`. A member with a key, a name or
    /// a user of one of those is left out: the entry there counts.
    pub fn peers(&self, hosts: &[HostRecord], configured: &[Peer]) -> Vec<Peer> {
        let others = hosts.iter().filter(|host| host.name != self.host);
        others
            .filter_map(|host| {
                let key = host.key.parse().ok()?;
                let mut peer = Peer::new(host.name.clone(), key, self.may);
                peer.address = Some(config::with_port(&host.address));
                // Counted down, and those of node.toml up from the other end.
                let number = Some(host.number).filter(|&number| number < HOSTS_MAX)?;
                peer.user = USER_LAST - number;
                peer.takes_machines = self.machines;
                Some(peer)
            })
            .filter(|peer| {
                configured.iter().all(|other| {
                    other.key != peer.key && other.name != peer.name && other.user != peer.user
                })
            })
            .collect()
    }
}

/// What this host is, for the others. Its key must exist.
pub fn describe(directory: &Path, name: &str, address: &str) -> Result<HostRecord, MemberError> {
    let key = config::load_keys(directory)?.public();
    Ok(HostRecord {
        name: name.into(),
        key: key.to_string(),
        address: config::with_port(address),
        cores: std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32),
        memory_bytes: crate::host::total_memory_bytes(),
        features: Hello::here().cpu_features,
        version: env!("CARGO_PKG_VERSION").into(),
        number: 0,
    })
}

/// Notes the members for a time in which the store cannot be reached, if they are others than
/// those that were noted. A host that cannot note them does without.
pub fn remember_new(directory: &Path, hosts: &[HostRecord]) {
    if remembered(directory) != hosts {
        let _ = remember(directory, hosts);
    }
}

fn remember(directory: &Path, hosts: &[HostRecord]) -> io::Result<()> {
    let path = directory.join(HOSTS_FILE);
    write_beside(&path, &serde_json::to_vec(hosts)?, |new| {
        std::fs::rename(new, &path)
    })
}

/// Writes a file under another name, which `publish` then makes the file of its name: nobody
/// reads half of it.
fn write_beside(
    path: &Path,
    bytes: &[u8],
    publish: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let new = path.with_extension(format!("new-{}", std::process::id()));
    // Of a process that was killed meanwhile and had this number.
    let _ = std::fs::remove_file(&new);
    let mut options = std::fs::File::options();
    let file = options.write(true).create_new(true).mode(0o600).open(&new);
    let written = file
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| publish(&new));
    // It has its other name, or is of no use.
    let _ = std::fs::remove_file(&new);
    written
}

/// The members that were known last; none where nothing was noted.
pub fn remembered(directory: &Path) -> Vec<HostRecord> {
    let text = std::fs::read(directory.join(HOSTS_FILE)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// The other members as peers: from the store, and those that were known last while it does
/// not answer. None where the store answers that this cluster is not there.
pub fn peers(directory: &Path, configured: &[Peer]) -> Result<Vec<Peer>, MemberError> {
    let Some(membership) = Membership::load(directory)? else {
        return Ok(Vec::new());
    };
    let members = membership
        .cluster()
        .and_then(|cluster| Ok(cluster.members()?));
    let hosts: Vec<HostRecord> = match members {
        Ok(members) => {
            let hosts: Vec<HostRecord> = members.into_iter().map(|member| member.record).collect();
            remember_new(directory, &hosts);
            hosts
        }
        Err(error) if error.is_silence() => remembered(directory),
        Err(_) => Vec::new(),
    };
    Ok(membership.peers(&hosts, configured))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> PathBuf {
        let folder = std::env::temp_dir().join(format!("weft-member-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        config::init(&folder).unwrap();
        folder
    }

    #[test]
    fn a_membership_is_read_again_and_not_overwritten() {
        let folder = folder();
        assert_eq!(Membership::load(&folder).unwrap(), None);
        assert_eq!(peers(&folder, &[]).unwrap(), []);
        let membership = Membership {
            store: "etcd://127.0.0.1:1".into(),
            store_authority: None,
            store_certificate: None,
            store_key: None,
            cluster: "0123".into(),
            host: "alpha".into(),
            may: May::Both,
            machines: true,
        };
        membership.save(&folder).unwrap();
        assert_eq!(Membership::load(&folder).unwrap(), Some(membership.clone()));
        assert!(matches!(
            membership.save(&folder),
            Err(MemberError::Member(_))
        ));
        // The store cannot be reached: those that were known last.
        let key = config::load_keys(&folder).unwrap().public();
        let host = |name: &str, number| HostRecord {
            name: name.into(),
            key: key.to_string(),
            address: format!("{name}.example"),
            cores: 1,
            memory_bytes: 1,
            features: Vec::new(),
            version: "1".into(),
            number,
        };
        remember(&folder, &[host("alpha", 0), host("beta", 1)]).unwrap();
        let known = peers(&folder, &[]).unwrap();
        assert_eq!(known.len(), 1, "without this host itself");
        assert_eq!((&known[0].name[..], known[0].user), ("beta", USER_LAST - 1));
        assert_eq!(known[0].address.as_deref(), Some("beta.example:7117"));
        // What node.toml says of a key, a name or a user counts.
        let configured = [Peer::new("beta", known[0].key, May::Borrow)];
        assert_eq!(peers(&folder, &configured).unwrap(), []);
        let forged = [host("root", 61_183)];
        assert_eq!(membership.peers(&forged, &[]), []);
        Membership::remove(&folder).unwrap();
        Membership::remove(&folder).unwrap();
        assert_eq!(Membership::load(&folder).unwrap(), None);
        std::fs::write(folder.join(MEMBER_FILE), "stor = 1\n").unwrap();
        let error = Membership::load(&folder).unwrap_err().to_string();
        assert!(error.contains("unknown field `stor`"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn certificates_belong_together() {
        let address = StoreAddress {
            store: "etcd://127.0.0.1:1".into(),
            authority: Some("ca".into()),
            ..StoreAddress::default()
        };
        assert!(matches!(address.open(), Err(MemberError::Certificates)));
    }
}
