//! Invitations, and keys for the API. Each is shown once; the store has its digest.

use crate::ClusterError;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::str::FromStr;

const PREFIX: &str = "weft-join-";
const KEY_PREFIX: &str = "weft-key-";
const SECRET_BYTES: usize = 32;

/// What lets one host join, once. Whoever has it can use it, so it is shown and never
/// written down; [`fmt::Debug`] does not print it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    pub(crate) fn new() -> Token {
        Token(random_hex::<SECRET_BYTES>())
    }

    /// What the store has of it: nobody can make the token from this.
    pub(crate) fn digest(&self) -> String {
        hex(digest(&SHA256, self.0.as_bytes()).as_ref())
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}…")
    }
}

impl FromStr for Token {
    type Err = ClusterError;
    fn from_str(text: &str) -> Result<Token, ClusterError> {
        let secret = text
            .trim()
            .strip_prefix(PREFIX)
            .ok_or(ClusterError::NotAToken)?;
        let is_hex = secret
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if secret.len() != 2 * SECRET_BYTES || !is_hex {
            return Err(ClusterError::NotAToken);
        }
        Ok(Token(secret.into()))
    }
}

/// What lets a client use the API. It is shown once, when it is made.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// From 32 random bytes of the kernel.
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Secret {
        Secret(random_hex::<SECRET_BYTES>())
    }

    /// Whatever a client says: what is no secret has no role.
    pub fn from_client(text: &str) -> Secret {
        Secret(text.strip_prefix(KEY_PREFIX).unwrap_or_default().into())
    }

    /// The digests are compared: the time that it takes tells nothing of either.
    pub fn is_same(&self, other: &Secret) -> bool {
        self.digest() == other.digest()
    }

    pub(crate) fn digest(&self) -> String {
        hex(digest(&SHA256, self.0.as_bytes()).as_ref())
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{KEY_PREFIX}{}", self.0)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{KEY_PREFIX}…")
    }
}

/// Random bytes in hexadecimal digits.
pub(crate) fn random_hex<const BYTES: usize>() -> String {
    let mut bytes = [0; BYTES];
    SystemRandom::new()
        .fill(&mut bytes)
        .expect("the kernel gives random bytes");
    hex(&bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_again_and_not_shown() {
        let token = Token::new();
        assert_eq!(token.to_string().parse::<Token>().unwrap(), token);
        assert_eq!(format!("{token:?}"), "weft-join-…");
        assert_ne!(token.digest(), Token::new().digest());
        for text in ["", "weft-join-", "weft-join-xyz", &token.to_string()[..70]] {
            assert!(matches!(
                text.parse::<Token>(),
                Err(ClusterError::NotAToken)
            ));
        }
    }
}
