//! Where keys and configuration are, and what the configuration says.
//!
//! Read in two steps: parsed (every field known, with the nearest known name for
//! one that is not), then validated (addresses, sizes and keys make sense).

mod edit;
mod owner;
mod peer;

use std::fs;
use std::io::{self, Read};
use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use weft_wire::keys::{self, PublicKey, StaticKeys};

pub use edit::{init, trust};
pub use owner::check_owner;
pub use peer::{May, Peer, USER_FIRST, USER_LAST};

use crate::options::MEMORY_BYTES_MIN;
use crate::size::{format_bytes, parse_size};

/// The port that daemons listen on unless told otherwise.
pub const PORT: u16 = 7117;
/// File name of the configuration.
pub const CONFIG_FILE: &str = "node.toml";
/// File name of the private key.
pub const KEY_FILE: &str = "node.key";
/// Most peers that one node may trust: every handshake looks through them.
pub const PEERS_MAX: usize = 1024;

/// The field of a peer, and what is wrong with it.
pub type Wrong = (&'static str, String);

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file does not exist yet.
    #[error("{0} does not exist: run `weft node init` on this host first")]
    Missing(PathBuf),
    /// It exists already, and `init` does not overwrite keys.
    #[error("{0} exists already: remove it if this node needs a new identity")]
    Exists(PathBuf),
    /// Reading or writing failed.
    #[error("cannot {doing} {path}")]
    File {
        /// "read", "write".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The private key.
    #[error(transparent)]
    Key(weft_wire::keys::KeyError),
    /// Others can change what is believed.
    #[error("{path} {why}: its contents cannot be trusted; check it, then run `{fix}`")]
    Writable {
        /// The file or directory.
        path: PathBuf,
        /// How others come to change it.
        why: String,
        /// What stops them.
        fix: String,
    },
    /// The kernel's refusal.
    #[error("cannot exclude the private key's memory from core files")]
    Private(#[source] io::Error),
    /// Not TOML.
    #[error("{path} is not valid TOML: {message}")]
    Syntax {
        /// The file.
        path: PathBuf,
        message: String,
    },
    /// A field that does not exist.
    #[error("{path}: unknown field `{field}`{}", nearest.as_ref().map(|n| format!("; did you mean `{n}`?")).unwrap_or_default())]
    UnknownField {
        /// The file.
        path: PathBuf,
        /// The field as written.
        field: String,
        /// The known field that it resembles most.
        nearest: Option<String>,
    },
    /// A field whose value makes no sense.
    #[error("{path}: `{field}`: {why}")]
    Value {
        /// The file.
        path: PathBuf,
        field: String,
        /// What is wrong with it.
        why: String,
    },
}

/// A validated configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Address to listen on.
    pub listen: String,
    /// Most memory that slices may hold together, bytes; none means half of what is
    /// free at start.
    pub memory_bytes: Option<u64>,
    /// Memory of this host that stays free for its owner; 0: none is kept.
    pub keep_free_bytes: u64,
    /// Cores that the cluster may count on; none means all.
    pub cores: Option<u32>,
    /// Maximum number of slices at a time.
    pub slices: u32,
    /// Other nodes.
    pub peers: Vec<Peer>,
}

#[derive(Deserialize)]
struct RawConfig {
    listen: Option<String>,
    memory: Option<String>,
    keep_free: Option<String>,
    cores: Option<u32>,
    slices: Option<u32>,
    #[serde(default)]
    peer: Vec<peer::Raw>,
}

const FIELDS: [&str; 6] = ["listen", "memory", "keep_free", "cores", "slices", "peer"];

/// Most cores that a host may lend.
const CORES_MAX: u32 = weft_cluster::CORES_MAX;
/// Maximum number of slices at a time, where the configuration does not say.
pub const SLICES_DEFAULT: u32 = 8;
/// Most slices that a configuration may allow.
pub const SLICES_MAX: u32 = 256;

/// The directory that holds the key and the configuration: `$WEFT_CONFIG`, else
/// `$XDG_CONFIG_HOME/weft`, else `~/.config/weft`, else `/etc/weft`.
pub fn directory() -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(directory) = variable("WEFT_CONFIG") {
        return directory.into();
    }
    if let Some(base) = variable("XDG_CONFIG_HOME") {
        return Path::new(&base).join("weft");
    }
    match variable("HOME") {
        Some(home) => Path::new(&home).join(".config/weft"),
        None => "/etc/weft".into(),
    }
}

/// Reads this node's private key, and keeps this process's memory from others from now
/// on.
pub fn load_keys(directory: &Path) -> Result<StaticKeys, ConfigError> {
    let path = directory.join(KEY_FILE);
    if !path.exists() {
        return Err(ConfigError::Missing(path));
    }
    owner::check(directory)?;
    crate::sys::keep_memory_private().map_err(ConfigError::Private)?;
    keys::load(&path).map_err(ConfigError::Key)
}

impl Config {
    /// Reads and validates the configuration in `directory`.
    pub fn load(directory: &Path) -> Result<Config, ConfigError> {
        let path = directory.join(CONFIG_FILE);
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => ConfigError::Missing(path.clone()),
            _ => ConfigError::File {
                doing: "read",
                path: path.clone(),
                source,
            },
        };
        let mut file = fs::File::open(&path).map_err(failed)?;
        // What was opened is judged, not what has the name by then.
        let status = file.metadata().map_err(failed)?;
        owner::judge(&path, &status)?;
        owner::check(directory)?;
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(failed)?;
        Config::parse(&path, &text)
    }

    /// Parses, then validates; `path` is for messages.
    pub fn parse(path: &Path, text: &str) -> Result<Config, ConfigError> {
        let syntax = |error: toml::de::Error| ConfigError::Syntax {
            path: path.to_owned(),
            message: error.to_string().trim_end().to_owned(),
        };
        let table: toml::Table = text.parse().map_err(syntax)?;
        check_fields(path, table.keys(), &FIELDS)?;
        for peer in table
            .get("peer")
            .and_then(|value| value.as_array())
            .into_iter()
            .flatten()
        {
            if let Some(peer) = peer.as_table() {
                check_fields(path, peer.keys(), &peer::FIELDS)?;
            }
        }
        let raw: RawConfig = toml::from_str(text).map_err(syntax)?;
        validate(path, raw)
    }

    /// The peer with this public key.
    pub fn peer(&self, key: &PublicKey) -> Option<&Peer> {
        self.peers.iter().find(|peer| &peer.key == key)
    }

    /// The peer that the user calls `host`, a name or an address, and where it
    /// listens.
    pub fn find(&self, host: &str) -> Option<(&Peer, String)> {
        let address = with_port(host);
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        // A name first: another peer's address may be what this one is called.
        if let Some(peer) = self.peers.iter().find(|peer| peer.name == host) {
            return Some((peer, peer.address()));
        }
        let by_address = |peer: &&Peer| peer.address.as_deref() == Some(address.as_str());
        let by_name = |peer: &&Peer| peer.name == name;
        let mut peers = self.peers.iter();
        let found = peers
            .clone()
            .find(by_address)
            .or_else(|| peers.find(by_name));
        found.map(|peer| (peer, address))
    }
}

fn check_fields<'a>(
    path: &Path,
    fields: impl Iterator<Item = &'a String>,
    known: &[&str],
) -> Result<(), ConfigError> {
    for field in fields {
        if !known.contains(&field.as_str()) {
            let nearest = known
                .iter()
                .map(|name| (strsim::damerau_levenshtein(field, name), *name))
                .min()
                .map(|(_, name)| name.to_owned());
            return Err(ConfigError::UnknownField {
                path: path.to_owned(),
                field: field.clone(),
                nearest,
            });
        }
    }
    Ok(())
}

fn validate(path: &Path, raw: RawConfig) -> Result<Config, ConfigError> {
    let value = |field: &str, why: String| ConfigError::Value {
        path: path.to_owned(),
        field: field.to_owned(),
        why,
    };
    let listen = raw.listen.unwrap_or_else(|| format!("0.0.0.0:{PORT}"));
    let listen = with_port(&listen);
    listen
        .to_socket_addrs()
        .map_err(|error| value("listen", format!("`{listen}` is not an address: {error}")))?;
    let memory_bytes = match raw.memory {
        None => None,
        Some(text) => {
            let bytes = parse_size(&text).map_err(|error| value("memory", error.to_string()))?;
            if bytes < MEMORY_BYTES_MIN {
                let (least, given) = (format_bytes(MEMORY_BYTES_MIN), format_bytes(bytes));
                let why = format!("{given} is less than one workable set, {least}");
                return Err(value("memory", why));
            }
            Some(bytes)
        }
    };
    let keep_free_bytes = match raw.keep_free {
        None => 0,
        Some(text) => parse_size(&text).map_err(|error| value("keep_free", error.to_string()))?,
    };
    if let Some(cores) = raw.cores.filter(|&cores| cores > CORES_MAX) {
        return Err(value("cores", format!("{cores} is more than {CORES_MAX}")));
    }
    let slices = raw.slices.unwrap_or(SLICES_DEFAULT);
    if !(1..=SLICES_MAX).contains(&slices) {
        return Err(value(
            "slices",
            format!("{slices} is not within 1 to {SLICES_MAX}"),
        ));
    }
    if raw.peer.len() > PEERS_MAX {
        return Err(value("peer", format!("more than {PEERS_MAX} peers")));
    }
    let peers = peer::validate(raw.peer).map_err(|(field, why)| value(field, why))?;
    Ok(Config {
        listen,
        memory_bytes,
        keep_free_bytes,
        cores: raw.cores,
        slices,
        peers,
    })
}

/// Adds the usual port to a host that names none.
pub fn with_port(host: &str) -> String {
    let has_port = match host.rsplit_once(':') {
        // An IPv6 address has colons of its own; with a port it is in brackets.
        Some((before, port)) => {
            port.parse::<u16>().is_ok() && (!before.contains(':') || before.ends_with(']'))
        }
        None => false,
    };
    if has_port {
        host.to_owned()
    } else if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{PORT}")
    } else {
        format!("{host}:{PORT}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("node.toml"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn a_whole_configuration_is_read() {
        let key = format!("weft-key-{}", "ab".repeat(32));
        let config = parse(&format!(
            "listen = \"127.0.0.1\"\nmemory = \"1.5G\"\nkeep_free = \"512M\"\nslices = 2\n\
             [[peer]]\nname = \"alpha\"\nkey = \"{key}\"\naddress = \"10.0.0.1\"\n"
        ))
        .unwrap();
        assert_eq!(config.listen, "127.0.0.1:7117");
        assert_eq!(config.memory_bytes, Some(3 << 29));
        assert_eq!(config.keep_free_bytes, 512 << 20);
        assert_eq!(config.peers[0].key, PublicKey([0xab; 32]));
        assert_eq!(config.peers[0].address.as_deref(), Some("10.0.0.1:7117"));
        assert_eq!(config.find("alpha").unwrap().1, "10.0.0.1:7117");
        assert_eq!(config.find("alpha:9").unwrap().1, "alpha:9");
        assert!(config.find("10.0.0.1").is_some() && config.find("beta").is_none());
    }

    #[test]
    fn an_unknown_field_names_the_nearest() {
        let error = parse("memroy = \"1G\"").unwrap_err();
        assert!(
            error.contains("`memroy`") && error.contains("`memory`"),
            "{error}"
        );
        let error = parse("[[peer]]\nkye = \"\"").unwrap_err();
        assert!(error.contains("did you mean `key`?"), "{error}");
    }

    #[test]
    fn values_are_checked() {
        assert!(
            parse("memory = \"12\"")
                .unwrap_err()
                .contains("workable set")
        );
        assert!(parse("memory = \"x\"").unwrap_err().contains("`memory`"));
        assert!(parse("slices = 0").unwrap_err().contains("1 to 256"));
        assert!(
            parse("listen = \"300.1.1.1.x:99999\"")
                .unwrap_err()
                .contains("listen")
        );
        assert!(
            parse("[[peer]]\nkey = \"zz\"")
                .unwrap_err()
                .contains("hexadecimal")
        );
        assert!(parse("slices = ").unwrap_err().contains("TOML"));
    }

    #[test]
    fn ports_are_added() {
        assert_eq!(with_port("alpha"), "alpha:7117");
        assert_eq!(with_port("alpha:9"), "alpha:9");
        assert_eq!(with_port("::1"), "[::1]:7117");
        assert_eq!(with_port("[::1]:9"), "[::1]:9");
    }
}
