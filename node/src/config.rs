//! Where keys and configuration are, and what the configuration says.
//!
//! Read in two steps: parsed (every field known, with the nearest known name for
//! one that is not), then validated (addresses, sizes and keys make sense).

use std::fs;
use std::io::{self, Read, Write};
use std::net::ToSocketAddrs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use weft_wire::keys::{self, Keys, PublicKey};

use crate::size::{format_bytes, parse_size};

/// The port that daemons listen on unless told otherwise.
pub const PORT: u16 = 7117;
/// File name of the configuration.
pub const CONFIG_FILE: &str = "node.toml";
/// File name of the private key.
pub const KEY_FILE: &str = "node.key";
/// Most peers that one node may trust: every handshake looks through them.
pub const PEERS_MAX: usize = 1024;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// There is none yet.
    #[error("{0} does not exist: run `weft node init` on this host first")]
    Missing(PathBuf),
    /// It exists already, and `init` does not overwrite keys.
    #[error("{0} exists already: remove it yourself if this node is to get a new identity")]
    Exists(PathBuf),
    /// Reading or writing failed.
    #[error("cannot {doing} {path}: {source}")]
    File {
        /// "read", "write".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The private key.
    #[error("{}", sentence(.0))]
    Key(#[source] weft_wire::keys::KeyError),
    /// Others can change what is believed.
    #[error("{path} {why}: what it says cannot be trusted; check it, then run `{fix}`")]
    Writable {
        /// The file or directory.
        path: PathBuf,
        /// How others come to change it.
        why: String,
        /// What stops them.
        fix: String,
    },
    /// Not TOML.
    #[error("{path} is not valid TOML: {message}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What and where.
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
        /// The field.
        field: String,
        /// What is wrong with it.
        why: String,
    },
}

/// Another node that this one trusts: it may lend to it and borrow from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// A name for messages.
    pub name: String,
    /// Its public key.
    pub key: PublicKey,
    /// Where it listens, `HOST:PORT`, when it is known.
    pub address: Option<String>,
}

/// A validated configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Address to listen on.
    pub listen: String,
    /// Most memory lent at one time, bytes; none means half of what is free at
    /// start.
    pub memory_bytes: Option<u64>,
    /// Most slices at one time.
    pub slices: u32,
    /// Trusted nodes.
    pub peers: Vec<Peer>,
}

#[derive(Deserialize)]
struct RawConfig {
    listen: Option<String>,
    memory: Option<String>,
    slices: Option<u32>,
    #[serde(default)]
    peer: Vec<RawPeer>,
}

#[derive(Deserialize)]
struct RawPeer {
    name: Option<String>,
    key: String,
    address: Option<String>,
}

const FIELDS: [&str; 4] = ["listen", "memory", "slices", "peer"];
const PEER_FIELDS: [&str; 3] = ["name", "key", "address"];

/// Most slices at one time, where the configuration does not say.
pub const SLICES_DEFAULT: u32 = 8;
/// Most slices that a configuration may allow: each has a user id of its own.
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

/// Reads this node's private key.
pub fn load_keys(directory: &Path) -> Result<Keys, ConfigError> {
    let path = directory.join(KEY_FILE);
    if !path.exists() {
        return Err(ConfigError::Missing(path));
    }
    check_owner(directory)?;
    keys::load(&path).map_err(ConfigError::Key)
}

/// Refuses a file or directory that somebody else than this user and root can
/// change: whoever can, decides who may borrow, and what.
fn check_owner(path: &Path) -> Result<(), ConfigError> {
    let status = fs::metadata(path).map_err(|source| ConfigError::File {
        doing: "read",
        path: path.to_owned(),
        source,
    })?;
    judge_owner(path, &status, nix::unistd::geteuid().as_raw())
}

fn judge_owner(path: &Path, status: &fs::Metadata, user: u32) -> Result<(), ConfigError> {
    let writable = |why: String, fix: String| {
        let path = path.to_owned();
        Err(ConfigError::Writable { path, why, fix })
    };
    let shown = path.display();
    let (owner, mode) = (status.uid(), status.mode() & 0o7777);
    if owner != user && owner != 0 {
        let why = format!("belongs to user {owner}");
        return writable(why, format!("chown {user} {shown}"));
    }
    if mode & 0o022 != 0 {
        let why = format!("has mode {mode:04o}, so others may write to it");
        return writable(why, format!("chmod go-w {shown}"));
    }
    Ok(())
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
        judge_owner(&path, &status, nix::unistd::geteuid().as_raw())?;
        check_owner(directory)?;
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
                check_fields(path, peer.keys(), &PEER_FIELDS)?;
            }
        }
        let raw: RawConfig = toml::from_str(text).map_err(syntax)?;
        validate(path, raw)
    }

    /// The peer with this public key.
    pub fn peer(&self, key: &PublicKey) -> Option<&Peer> {
        self.peers.iter().find(|peer| &peer.key == key)
    }

    /// The peer that the user calls `host`, by name or address, and where it
    /// listens.
    pub fn find(&self, host: &str) -> Option<(&Peer, String)> {
        let address = with_port(host);
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        let by_address = |peer: &&Peer| peer.address.as_deref() == Some(address.as_str());
        if let Some(peer) = self.peers.iter().find(by_address) {
            return Some((peer, address));
        }
        let peer = self
            .peers
            .iter()
            .find(|peer| peer.name == host || peer.name == name)?;
        match (&peer.address, peer.name == host) {
            (Some(known), true) => Some((peer, known.clone())),
            _ => Some((peer, address)),
        }
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
            Some(at_least(bytes).map_err(|why| value("memory", why))?)
        }
    };
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
    let mut peers = Vec::new();
    for (index, peer) in raw.peer.into_iter().enumerate() {
        let key = peer
            .key
            .parse()
            .map_err(|error: keys::KeyError| value("peer.key", error.to_string()))?;
        peers.push(Peer {
            name: peer.name.unwrap_or_else(|| format!("peer {}", index + 1)),
            key,
            address: peer.address.map(|address| with_port(&address)),
        });
    }
    Ok(Config {
        listen,
        memory_bytes,
        slices,
        peers,
    })
}

fn at_least(bytes: u64) -> Result<u64, String> {
    use crate::options::MEMORY_BYTES_MIN;
    if bytes < MEMORY_BYTES_MIN {
        return Err(format!(
            "{} is less than one workable set, {}",
            format_bytes(bytes),
            format_bytes(MEMORY_BYTES_MIN)
        ));
    }
    Ok(bytes)
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

/// An error and what caused it, in one sentence.
fn sentence(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Makes a key pair and a configuration with comments. Never overwrites either.
pub fn init(directory: &Path) -> Result<PublicKey, ConfigError> {
    let file = |doing| {
        let path = directory.to_owned();
        move |source| ConfigError::File {
            doing,
            path,
            source,
        }
    };
    let key_path = directory.join(KEY_FILE);
    let config_path = directory.join(CONFIG_FILE);
    for path in [&key_path, &config_path] {
        if path.exists() {
            return Err(ConfigError::Exists(path.clone()));
        }
    }
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(file("make"))?;
    let pair = keys::generate().map_err(ConfigError::Key)?;
    keys::save(&pair, &key_path).map_err(ConfigError::Key)?;
    // Whatever the umask: a file that others may write to is refused.
    let written = fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&config_path)
        .and_then(|mut file| file.write_all(TEMPLATE.as_bytes()));
    written.map_err(file("write a configuration in"))?;
    Ok(pair.public())
}

const TEMPLATE: &str = "\
# Configuration of this node. `weft node trust` adds peers at the end.

# Address that `weft node start` listens on.
#listen = \"0.0.0.0:7117\"

# Most memory lent at one time. Default: half of what is free at start.
#memory = \"4G\"

# Most slices at one time.
#slices = 8

# A node that this one trusts: it may borrow from this one, and this one from it.
#[[peer]]
#name = \"alpha\"
#key = \"weft-key-...\"
#address = \"alpha.example:7117\"
";

/// Adds a trusted node at the end of the configuration, comments kept.
pub fn trust(directory: &Path, peer: &Peer) -> Result<(), ConfigError> {
    let config = Config::load(directory)?;
    let path = directory.join(CONFIG_FILE);
    let value = |field: &str, why: String| ConfigError::Value {
        path: path.clone(),
        field: field.to_owned(),
        why,
    };
    if let Some(known) = config.peer(&peer.key) {
        let why = format!("this key is trusted already, as `{}`", known.name);
        return Err(value("peer.key", why));
    }
    if config.peers.iter().any(|known| known.name == peer.name) {
        let why = format!("`{}` is the name of another key", peer.name);
        return Err(value("peer.name", why));
    }
    let text = |text: &str| toml::Value::String(text.to_owned()).to_string();
    let mut entry = format!(
        "\n[[peer]]\nname = {}\nkey = \"{}\"\n",
        text(&peer.name),
        peer.key
    );
    if let Some(address) = &peer.address {
        entry.push_str(&format!("address = {}\n", text(address)));
    }
    let written = fs::File::options()
        .append(true)
        .open(&path)
        .and_then(|mut file| file.write_all(entry.as_bytes()));
    written.map_err(|source| ConfigError::File {
        doing: "write",
        path: path.clone(),
        source,
    })?;
    Config::load(directory).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("node.toml"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn a_whole_configuration_is_read() {
        let key = format!("weft-key-{}", "ab".repeat(32));
        let config = parse(&format!(
            "listen = \"127.0.0.1\"\nmemory = \"1.5G\"\nslices = 2\n\
             [[peer]]\nname = \"alpha\"\nkey = \"{key}\"\naddress = \"10.0.0.1\"\n"
        ))
        .unwrap();
        assert_eq!(config.listen, "127.0.0.1:7117");
        assert_eq!(config.memory_bytes, Some(3 << 29));
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
    fn init_and_trust_do_not_overwrite() {
        let directory = std::env::temp_dir().join(format!("weft-config-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        assert!(matches!(
            Config::load(&directory),
            Err(ConfigError::Missing(_))
        ));
        let key = init(&directory).unwrap();
        assert_eq!(load_keys(&directory).unwrap().public(), key);
        assert!(matches!(init(&directory), Err(ConfigError::Exists(_))));
        let mut peer = Peer {
            name: "a \"b\"".into(),
            key,
            address: Some("10.0.0.1:1".into()),
        };
        trust(&directory, &peer).unwrap();
        assert_eq!(Config::load(&directory).unwrap().peers, [peer.clone()]);
        assert!(
            trust(&directory, &peer)
                .unwrap_err()
                .to_string()
                .contains("already")
        );
        peer.key = PublicKey([1; 32]);
        assert!(
            trust(&directory, &peer)
                .unwrap_err()
                .to_string()
                .contains("another key")
        );
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn what_others_can_change_is_refused() {
        let directory = std::env::temp_dir().join(format!("weft-modes-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        init(&directory).unwrap();
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        let file = directory.join(CONFIG_FILE);
        let refused = || {
            let error = Config::load(&directory).unwrap_err();
            assert!(matches!(error, ConfigError::Writable { .. }), "{error}");
            error.to_string()
        };
        for open in [0o666, 0o620, 0o602] {
            mode(&file, open);
            let error = refused();
            assert!(
                error.contains("chmod go-w") && error.contains(CONFIG_FILE),
                "{error}"
            );
        }
        mode(&file, 0o644);
        Config::load(&directory).unwrap();
        for open in [0o777, 0o770, 0o1777] {
            mode(&directory, open);
            assert!(!refused().contains(CONFIG_FILE));
            assert!(matches!(
                load_keys(&directory),
                Err(ConfigError::Writable { .. })
            ));
        }
        mode(&directory, 0o755);
        load_keys(&directory).unwrap();
        // As another user sees it, who is not root.
        let status = fs::metadata(&file).unwrap();
        let other = status.uid() + 1;
        assert_eq!(
            judge_owner(&file, &status, other).is_ok(),
            status.uid() == 0
        );
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn ports_are_added() {
        assert_eq!(with_port("alpha"), "alpha:7117");
        assert_eq!(with_port("alpha:9"), "alpha:9");
        assert_eq!(with_port("::1"), "[::1]:7117");
        assert_eq!(with_port("[::1]:9"), "[::1]:9");
    }
}
