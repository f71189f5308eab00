//! What leads a job's agent to its launcher: a file that only its user can read.
//!
//! The secret is for one agent: the first key that shows it is the only one that may show it
//! again.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use weft_wire::keys::{self, PublicKey};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Token {
    /// The launcher's.
    pub key: PublicKey,
    /// Where the launcher may be reached, `HOST:PORT`, in the order in which they are tried.
    pub addresses: Vec<String>,
    /// 64 hexadecimal digits.
    pub secret: String,
    /// Seconds from the agent's start after which it ends in any case.
    pub lasts_s: u64,
    /// The host's tap device on a bridge, by which machines reach those of other hosts.
    pub tap: Option<String>,
}

/// Random, in the form in which a token has it.
pub fn secret() -> anyhow::Result<String> {
    let bytes = keys::secret()?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl Token {
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let write = || -> std::io::Result<()> {
            let mut options = fs::OpenOptions::new();
            let mut file = options
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(path)?;
            file.write_all(&serde_json::to_vec(self)?)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    pub fn read(path: &Path) -> anyhow::Result<Token> {
        let named = || format!("cannot read the token {}", path.display());
        let file = fs::File::open(path).with_context(named)?;
        let status = file.metadata().with_context(named)?;
        ensure!(
            status.mode() & 0o077 == 0,
            "the token {} can be read by others: anybody may have it; start the cluster again",
            path.display()
        );
        serde_json::from_reader(file).with_context(named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_token_is_for_its_user() {
        let folder = std::env::temp_dir().join(format!("weft-token-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("token");
        let token = Token {
            key: PublicKey([7; 32]),
            addresses: vec!["h:1".into()],
            secret: secret().unwrap(),
            lasts_s: 60,
            tap: Some("weft0".into()),
        };
        token.write(&path).unwrap();
        assert_eq!(Token::read(&path).unwrap(), token);
        assert!(token.write(&path).is_err(), "a token is written once");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let error = Token::read(&path).unwrap_err().to_string();
        assert!(error.contains("others"), "{error}");
        fs::remove_dir_all(&folder).unwrap();
    }
}
