//! Static keys of launchers and daemons (Curve25519, as Noise uses them), their
//! files and their text form.
//!
//! Text: a public key is `weft-key-` and 64 hexadecimal digits; a private key
//! file holds `weft-secret-`, 64 digits and a newline, mode 0600, owned by the user
//! who loads it. Nothing else is accepted.

use serde::{Deserialize, Serialize};
use snow::params::DHChoice;
use snow::resolvers::{CryptoResolver, DefaultResolver};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use zeroize::Zeroizing;

const PUBLIC_PREFIX: &str = "weft-key-";
const SECRET_PREFIX: &str = "weft-secret-";
/// Longer files are not key files.
const FILE_BYTES_MAX: u64 = 256;

/// Why a key or its file is unusable.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read or written.
    #[error("key file {path}: {action} failed")]
    File {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// Others can read the file.
    #[error(
        "key file {path} has mode {mode:04o}: others may read it; make a new key, or `chmod 600 {path}` if nobody did"
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file belongs to somebody else.
    #[error("key file {path} belongs to user {owner}: make a key of your own")]
    Foreign {
        /// The file.
        path: PathBuf,
        owner: u32,
    },
    /// The file is not a key file.
    #[error("{path} is not a key file of Weft")]
    NotAKey {
        /// The file.
        path: PathBuf,
    },
    /// The text is not a public key.
    #[error("not a public key: expected weft-key- and 64 hexadecimal digits")]
    Text,
    /// The kernel gave no random bytes.
    #[error("no random bytes from the kernel")]
    Random,
}

/// A public key: the identity of a launcher or daemon.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PublicKey(pub [u8; 32]);

impl PublicKey {
    /// The first half of the key in groups of four digits, for people to
    /// compare. Finding another key with the same half is out of reach.
    pub fn fingerprint(&self) -> String {
        let digits = hex(&self.0[..16]);
        let groups: Vec<&str> = (0..8).map(|n| &digits[n * 4..n * 4 + 4]).collect();
        groups.join(":")
    }
}

impl std::fmt::Display for PublicKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{PUBLIC_PREFIX}{}", hex(&self.0))
    }
}

impl std::fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl FromStr for PublicKey {
    type Err = KeyError;
    fn from_str(text: &str) -> Result<PublicKey, KeyError> {
        text.strip_prefix(PUBLIC_PREFIX)
            .and_then(unhex)
            .map(PublicKey)
            .ok_or(KeyError::Text)
    }
}

impl TryFrom<String> for PublicKey {
    type Error = KeyError;
    fn try_from(text: String) -> Result<PublicKey, KeyError> {
        text.parse()
    }
}

impl From<PublicKey> for String {
    fn from(key: PublicKey) -> String {
        key.to_string()
    }
}

/// A pair of static keys. The private half is wiped when dropped and never
/// printed.
#[derive(Clone)]
pub struct StaticKeys {
    private: Zeroizing<[u8; 32]>,
    public: PublicKey,
}

impl StaticKeys {
    /// The public half.
    pub fn public(&self) -> PublicKey {
        self.public
    }

    pub(crate) fn private(&self) -> &[u8; 32] {
        &self.private
    }

    fn from_private(private: Zeroizing<[u8; 32]>) -> Option<StaticKeys> {
        let mut exchange = DefaultResolver.resolve_dh(&DHChoice::Curve25519)?;
        exchange.set(&*private);
        let public = PublicKey(exchange.pubkey().try_into().ok()?);
        Some(StaticKeys { private, public })
    }
}

impl std::fmt::Debug for StaticKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StaticKeys({})", self.public)
    }
}

/// Makes a new pair.
///
/// # Errors
/// [`KeyError::Random`].
pub fn generate() -> Result<StaticKeys, KeyError> {
    let mut private = Zeroizing::new([0; 32]);
    fill_random(&mut *private)?;
    StaticKeys::from_private(private).ok_or(KeyError::Random)
}

/// 32 bytes from the kernel's generator, for a pre-shared secret.
///
/// # Errors
/// [`KeyError::Random`].
pub fn secret() -> Result<[u8; 32], KeyError> {
    let mut secret = [0; 32];
    fill_random(&mut secret)?;
    Ok(secret)
}

pub(crate) fn fill_random(bytes: &mut [u8]) -> Result<(), KeyError> {
    let mut rng = DefaultResolver.resolve_rng().ok_or(KeyError::Random)?;
    rng.try_fill_bytes(bytes).map_err(|_| KeyError::Random)
}

/// Writes the private key to a new file, readable by its owner only.
///
/// # Errors
/// The file exists already (a key is never overwritten) or cannot be written.
pub fn save(keys: &StaticKeys, path: &Path) -> Result<(), KeyError> {
    let failed = |action| {
        move |source| KeyError::File {
            path: path.to_path_buf(),
            action,
            source,
        }
    };
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(failed("creating"))?;
    let digits = Zeroizing::new(hex(&*keys.private));
    let text = Zeroizing::new(format!("{SECRET_PREFIX}{}\n", *digits));
    file.write_all(text.as_bytes()).map_err(failed("writing"))?;
    file.sync_all().map_err(failed("writing"))
}

/// Reads a private key.
///
/// # Errors
/// The file cannot be read, is not a key, belongs to somebody else, or others
/// may read it.
pub fn load(path: &Path) -> Result<StaticKeys, KeyError> {
    let failed = |source| KeyError::File {
        path: path.to_path_buf(),
        action: "reading",
        source,
    };
    let file = File::open(path).map_err(failed)?;
    let status = file.metadata().map_err(failed)?;
    let not_a_key = || KeyError::NotAKey {
        path: path.to_path_buf(),
    };
    if !status.is_file() {
        return Err(not_a_key());
    }
    let mode = status.mode() & 0o7777;
    if mode & 0o077 != 0 {
        let path = path.to_path_buf();
        return Err(KeyError::Exposed { path, mode });
    }
    let owner = status.uid();
    if owner != rustix::process::geteuid().as_raw() {
        let path = path.to_path_buf();
        return Err(KeyError::Foreign { path, owner });
    }
    let mut text = Zeroizing::new(String::new());
    match file.take(FILE_BYTES_MAX).read_to_string(&mut text) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => return Err(not_a_key()),
        Err(error) => return Err(failed(error)),
    }
    text.trim_end()
        .strip_prefix(SECRET_PREFIX)
        .and_then(unhex)
        .and_then(|private| StaticKeys::from_private(Zeroizing::new(private)))
        .ok_or_else(not_a_key)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(digits: &str) -> Option<[u8; 32]> {
    if digits.len() != 64 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; 32];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[index * 2..index * 2 + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("weft-keys-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_key_survives_its_file_and_is_never_overwritten() {
        let folder = scratch("round");
        let path = folder.join("node.key");
        let keys = generate().unwrap();
        save(&keys, &path).unwrap();
        let loaded = load(&path).unwrap();
        assert_eq!(loaded.public(), keys.public());
        assert_eq!(loaded.private(), keys.private());
        let again = save(&keys, &path);
        assert!(matches!(
            again,
            Err(KeyError::File {
                action: "creating",
                ..
            })
        ));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn an_exposed_or_foreign_file_is_refused() {
        let folder = scratch("exposed");
        let path = folder.join("node.key");
        save(&generate().unwrap(), &path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(
            load(&path),
            Err(KeyError::Exposed { mode: 0o644, .. })
        ));
        std::fs::write(&path, "weft-secret-12\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(matches!(load(&path), Err(KeyError::NotAKey { .. })));
        std::fs::write(&path, [0xff; 80]).unwrap();
        assert!(matches!(load(&path), Err(KeyError::NotAKey { .. })));
        assert!(matches!(load(&folder), Err(KeyError::NotAKey { .. })));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn text_round_trips_and_refuses() {
        let key = generate().unwrap().public();
        assert_eq!(key.to_string().parse::<PublicKey>().unwrap(), key);
        for bad in [
            "",
            "weft-key-",
            "weft-key-zz",
            &key.to_string()[1..],
            &format!("{key}0"),
        ] {
            assert!(bad.parse::<PublicKey>().is_err(), "{bad}");
        }
        assert_eq!(key.fingerprint().len(), 8 * 4 + 7);
    }
}
