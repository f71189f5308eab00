//! Makes and extends a configuration: `weft node init`, `weft node trust`.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use weft_wire::keys::{self, PublicKey};

use super::{CONFIG_FILE, Config, ConfigError, KEY_FILE, Peer, USER_FIRST, USER_LAST};

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

# Most memory that slices may hold together: each counts with its budget, a quarter of
# that, and 64M. Default: half of what is free at start.
#memory = \"4G\"

# Memory of this host that stays free for its owner: while less is free, slices of programs
# are asked to leave. Default: none.
#keep_free = \"2G\"

# Cores that a cluster counts on. It may be more than this host has: they are shared then.
# Default: all.
#cores = 4

# Maximum number of slices at a time.
#slices = 8

# Another node, and what it may do: \"borrow\" from this host, \"lend\" to it, or \"both\".
#[[peer]]
#name = \"alpha\"
#key = \"weft-key-...\"
#address = \"alpha.example:7117\"
#may = \"borrow\"
# What runs here for it is this user's, where the daemon is root.
#user = 60100
# What virtual machines of its may open here: nothing unless it is listed.
#disks = [\"/srv/weft/root.img,ro\", \"/srv/weft/alpha/,rw\"]
#networks = [\"user\"]
#machines = true
";

/// Adds a node at the end of the configuration, comments kept; as which user its
/// slices run.
pub fn trust(directory: &Path, peer: &Peer) -> Result<u32, ConfigError> {
    let config = Config::load(directory)?;
    let path = directory.join(CONFIG_FILE);
    let value = |field: &str, why: String| ConfigError::Value {
        path: path.clone(),
        field: field.to_owned(),
        why,
    };
    if let Some(known) = config.peer(&peer.key) {
        let why = format!(
            "this key belongs to `{}` already: change `may` of that entry",
            known.name
        );
        return Err(value("peer.key", why));
    }
    if config.peers.iter().any(|known| known.name == peer.name) {
        let why = format!("`{}` is the name of another key", peer.name);
        return Err(value("peer.name", why));
    }
    let user = next_user(&config);
    let text = |text: &str| toml::Value::String(text.to_owned()).to_string();
    let mut entry = format!(
        "\n[[peer]]\nname = {}\nkey = \"{}\"\n",
        text(&peer.name),
        peer.key
    );
    if let Some(address) = &peer.address {
        entry.push_str(&format!("address = {}\n", text(address)));
    }
    entry.push_str(&format!("may = \"{}\"\nuser = {user}\n", peer.may().name()));
    let written = fs::File::options()
        .append(true)
        .open(&path)
        .and_then(|mut file| file.write_all(entry.as_bytes()));
    written.map_err(|source| ConfigError::File {
        doing: "write",
        path: path.clone(),
        source,
    })?;
    Config::load(directory).map(|_| user)
}

/// After those of all others, where there is room: a user that was somebody's may
/// still own files.
fn next_user(config: &Config) -> u32 {
    let users = || config.peers.iter().map(|known| known.user);
    let ours = USER_FIRST..=USER_LAST;
    let next = users().filter(|user| ours.contains(user)).max();
    let mut free = next.map_or(USER_FIRST, |last| last + 1)..=USER_LAST;
    let taken = |user: &u32| users().any(|other| other == *user);
    let any_free = || ours.clone().find(|user| !taken(user));
    free.next().or_else(any_free).unwrap_or(USER_LAST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{May, load_keys};

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
        let mut peer = Peer::new("a \"b\"", key, May::Lend);
        peer.address = Some("10.0.0.1:1".into());
        assert_eq!(trust(&directory, &peer).unwrap(), USER_FIRST);
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
        peer.name = "c".into();
        assert_eq!(trust(&directory, &peer).unwrap(), USER_FIRST + 1);
        fs::remove_dir_all(&directory).unwrap();
    }
}
