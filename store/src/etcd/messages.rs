//! The JSON of etcd's gateway.

use crate::{Change, Condition};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, de};
use serde_json::{Value, json};
use std::str::FromStr;

/// What etcd says about a lease that it does not know.
pub const NO_LEASE: &str = "requested lease not found";

/// What an etcd answers if it has forgotten so much already.
pub const COMPACTED: &str = "required revision has been compacted";

pub fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// The first key that can have this prefix. An etcd refuses an empty key.
pub fn first_key(prefix: &str) -> &[u8] {
    if prefix.is_empty() {
        &[0]
    } else {
        prefix.as_bytes()
    }
}

/// The first key behind all with this prefix: the prefix with its last byte that can grow
/// one larger. A zero byte, which stands for the end of all keys, if none can.
pub fn prefix_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return end;
        }
    }
    vec![0]
}

pub fn compare(condition: &Condition) -> Value {
    let (key, revision) = match condition {
        Condition::Absent(key) => (key, 0),
        Condition::Unchanged(key, revision) => (key, *revision),
    };
    json!({
        "key": base64(key.as_bytes()),
        "target": "MOD",
        "result": "EQUAL",
        "mod_revision": revision.to_string(),
    })
}

pub fn operation(change: &Change) -> Value {
    match change {
        Change::Put { key, value, lease } => json!({ "request_put": {
            "key": base64(key.as_bytes()),
            "value": base64(value),
            "lease": lease.map_or(0, |lease| lease.0).to_string(),
        }}),
        Change::Delete { key } => {
            json!({ "request_delete_range": { "key": base64(key.as_bytes()) } })
        }
    }
}

/// The first answer of a stream.
#[derive(Debug, Deserialize)]
pub struct Streamed<T> {
    pub result: T,
}

#[derive(Debug, Default, Deserialize)]
pub struct Header {
    #[serde(default, deserialize_with = "number")]
    pub revision: u64,
}

#[derive(Debug, Default)]
pub struct Bytes(pub Vec<u8>);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Bytes, D::Error> {
        let text = String::deserialize(from)?;
        STANDARD.decode(text).map(Bytes).map_err(de::Error::custom)
    }
}

/// A 64-bit number, which the gateway writes as a string.
fn number<'de, D: Deserializer<'de>, N: FromStr>(from: D) -> Result<N, D::Error> {
    let value = Value::deserialize(from)?;
    let text = match &value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    text.parse()
        .map_err(|_| de::Error::custom(format!("{text} is not a number of that kind")))
}

#[derive(Debug, Deserialize)]
pub struct KeyValue {
    pub key: Bytes,
    #[serde(default)]
    pub value: Bytes,
    #[serde(default, deserialize_with = "number")]
    pub mod_revision: u64,
    #[serde(default, deserialize_with = "number")]
    pub lease: i64,
}

#[derive(Debug, Deserialize)]
pub struct RangeAnswer {
    pub header: Header,
    #[serde(default)]
    pub kvs: Vec<KeyValue>,
    #[serde(default)]
    pub more: bool,
}

#[derive(Debug, Deserialize)]
pub struct TxnAnswer {
    pub header: Header,
    #[serde(default)]
    pub succeeded: bool,
}

#[derive(Debug, Deserialize)]
pub struct LeaseAnswer {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub id: i64,
    /// Absent for a lease that has run out.
    #[serde(rename = "TTL", default, deserialize_with = "number")]
    pub ttl: u64,
}

#[derive(Debug, Deserialize)]
pub struct WatchLine {
    pub result: WatchResult,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct WatchResult {
    pub created: bool,
    pub canceled: bool,
    pub cancel_reason: String,
    #[serde(deserialize_with = "number")]
    pub compact_revision: u64,
    pub events: Vec<WatchEvent>,
}

#[derive(Debug, Deserialize)]
pub struct WatchEvent {
    /// Absent for a put.
    #[serde(rename = "type", default)]
    pub kind: String,
    pub kv: KeyValue,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_end() {
        assert_eq!(prefix_end("hosts/"), b"hosts0");
        assert_eq!(prefix_end(""), [0]);
        assert_eq!(prefix_end("a\u{7f}"), b"a\x80");
    }

    #[test]
    fn answers_are_read() {
        let range = r#"{"header":{"revision":"7"},"kvs":[{"key":"Zm9v","create_revision":"2",
            "mod_revision":"5","version":"1","value":"YmFy","lease":"9"}],"count":"1"}"#;
        let range: RangeAnswer = serde_json::from_str(range).unwrap();
        assert_eq!(range.header.revision, 7);
        assert_eq!(
            (&range.kvs[0].key.0[..], range.kvs[0].lease),
            (&b"foo"[..], 9)
        );
        let gone = r#"{"result":{"header":{},"ID":"77"}}"#;
        let gone: Streamed<LeaseAnswer> = serde_json::from_str(gone).unwrap();
        assert_eq!((gone.result.id, gone.result.ttl), (77, 0));
        assert!(serde_json::from_str::<RangeAnswer>(r#"{"header":{"revision":"x"}}"#).is_err());
    }
}
