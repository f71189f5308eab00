//! What `weft cluster store` reads: calls of other hosts, in the JSON of etcd's gateway.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use weft_store::Embedded;
use weft_web::gateway_answer;

use crate::random::Random;

const CALLS: [&str; 6] = [
    "kv/range",
    "kv/txn",
    "kv/compaction",
    "lease/grant",
    "lease/keepalive",
    "lease/revoke",
];
const KEYS: [&str; 4] = ["weft/host/a", "weft/host/b", "weft/", "weft0"];

fn key(random: &mut Random) -> String {
    STANDARD.encode(KEYS[random.below(KEYS.len())])
}

fn number(random: &mut Random) -> Value {
    match random.below(6) {
        0 => u64::MAX.into(),
        1 => i64::MAX.to_string().into(),
        2 => "-1".into(),
        _ => random.below(8).to_string().into(),
    }
}

fn operation(random: &mut Random) -> Value {
    match random.below(3) {
        0 => json!({ "request_delete_range": { "key": key(random) } }),
        1 => json!({ "request_put": { "key": key(random), "value": "" } }),
        _ => json!({
            "request_put": { "key": key(random), "value": "YQ==", "lease": number(random) }
        }),
    }
}

fn compare(random: &mut Random) -> Value {
    json!({
        "key": key(random), "target": "MOD", "result": "EQUAL", "mod_revision": number(random)
    })
}

/// Calls one after the other: lines with the call's path and its body.
pub fn valid_calls(random: &mut Random) -> Vec<u8> {
    let mut lines = String::new();
    for _ in 0..1 + random.below(6) {
        let call = CALLS[random.below(CALLS.len())];
        let body = match call {
            "kv/range" => match random.below(2) {
                0 => json!({ "key": key(random) }),
                _ => {
                    json!({ "key": key(random), "range_end": key(random), "revision": number(random) })
                }
            },
            "kv/txn" => {
                let compares: Vec<Value> = (0..random.below(3)).map(|_| compare(random)).collect();
                let changes: Vec<Value> = (0..random.below(4)).map(|_| operation(random)).collect();
                json!({ "compare": compares, "success": changes })
            }
            "kv/compaction" => json!({ "revision": number(random) }),
            "lease/grant" => json!({ "ID": "0", "TTL": number(random) }),
            _ => json!({ "ID": number(random) }),
        };
        lines += &format!("{call} {body}\n");
    }
    lines.into_bytes()
}

/// Each line is a call over one store, which must still answer afterwards.
pub fn gateway(input: &[u8]) {
    let store = Embedded::in_memory().expect("a store in memory");
    for line in input.split(|byte| *byte == b'\n') {
        let space = line.iter().position(|byte| *byte == b' ');
        let (call, body) = line.split_at(space.unwrap_or(line.len()));
        let path = format!("/v3/{}", String::from_utf8_lossy(call));
        // A refusal is an answer, too.
        let _ = gateway_answer(&path, body, &store);
    }
    let all = json!({ "key": "AA==", "range_end": "AA==" }).to_string();
    gateway_answer("/v3/kv/range", all.as_bytes(), &store).expect("the store answers");
}
