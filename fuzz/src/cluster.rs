//! What a host reads of its cluster: records that other members wrote, and tokens.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use weft_cluster::{Cluster, HostRecord, LogKind, Plan, Planner, Token};
use weft_place::POLICY_NAMES;
use weft_store::{Change, Embedded, Store};

use crate::random::Random;

const HOSTS: [&str; 4] = ["alpha", "beta", "gamma", "delta"];
/// Values that are more interesting than others.
const NUMBERS: [u64; 10] = [
    0,
    1,
    2,
    4,
    63,
    1 << 16,
    1 << 32,
    u32::MAX as u64,
    i64::MAX as u64,
    u64::MAX,
];

fn number(random: &mut Random, usual: u64) -> u64 {
    match random.below(8) {
        0 => NUMBERS[random.below(NUMBERS.len())],
        _ => 1 + random.below(usual as usize) as u64,
    }
}

fn host(random: &mut Random, n: usize) -> [Value; 2] {
    let record = json!({
        "name": HOSTS[n], "key": format!("weft-key-{n}"), "address": "a:1",
        "cores": number(random, 8), "memory_bytes": number(random, 1 << 34),
        "features": [], "version": "1", "number": n,
    });
    let trouble = [Value::Null, "1 machine check".into()][random.below(2)].clone();
    let report = json!({
        "lends_bytes": number(random, 1 << 34), "lent_bytes": number(random, 1 << 30),
        "wanted_back_bytes": number(random, 1 << 30), "trouble": trouble,
        "cores": number(random, 64), "slices": 1, "free_bytes": 1, "load": 0.5,
    });
    [
        json!([format!("weft/host/{}", HOSTS[n]), record]),
        json!([format!("weft/alive/{}", HOSTS[n]), report]),
    ]
}

fn request(random: &mut Random, name: &str) -> Value {
    let kind = ["program", "machine"][random.below(2)];
    json!({
        "name": name, "kind": kind,
        "home": HOSTS[random.below(4)], "user": "u", "cores": number(random, 6),
        "memory_mib": number(random, 4096), "hosts_max": number(random, 6),
        "priority": random.below(4),
        "mark": {"boot": "b", "namespace": "n", "nonce": name},
    })
}

fn parts(random: &mut Random) -> Value {
    let part = |random: &mut Random, n: usize| {
        json!({
            "host": HOSTS[n], "cores": number(random, 4), "memory_mib": number(random, 2048),
            "reserved_mib": number(random, 2048),
        })
    };
    let first = random.below(4);
    let all: Vec<Value> = (0..1 + random.below(3))
        .map(|n| part(random, (first + n) % 4))
        .collect();
    Value::from(all)
}

/// A request that fits the parts, but for some.
fn placed(random: &mut Random, name: &str) -> Value {
    let mut request = request(random, name);
    let parts = parts(random);
    let sum = |field: &str| -> u64 {
        let all = parts.as_array().expect("an array").iter();
        let all = all.map(|part| part[field].as_u64().unwrap_or(0));
        all.fold(0, u64::wrapping_add)
    };
    request["cores"] = sum("cores").into();
    request["memory_mib"] = sum("memory_mib").into();
    request["home"] = parts[0]["host"].clone();
    let order = match random.below(3) {
        0 => json!({"parts": parts, "why": "w"}),
        _ => Value::Null,
    };
    json!({
        "id": 1 + random.below(40), "request": request, "parts": parts, "why": "w",
        "order": order, "orders": random.below(3),
    })
}

/// Records as a cluster has them: an array of pairs of a key and a value.
pub fn valid_state(random: &mut Random) -> Vec<u8> {
    let mut all: Vec<Value> = (0..4).flat_map(|n| host(random, n)).collect();
    for n in 0..random.below(4) {
        let name = format!("w{n}");
        let (kind, value) = match random.below(3) {
            0 => ("placed", placed(random, &name)),
            _ => ("asked", request(random, &name)),
        };
        all.push(json!([format!("weft/work/{kind}/{name}"), value]));
        all.push(json!([format!("weft/work/agent/{name}"), ""]));
    }
    if random.below(3) == 0 {
        let quota = json!({"cores": random.below(9), "memory_mib": Value::Null});
        let user = ["*", "ann", "nobody"][random.below(3)];
        all.push(json!([format!("weft/quota/{user}"), quota]));
    }
    if random.below(3) == 0 {
        let host = HOSTS[random.below(4)];
        all.push(json!([
            format!("weft/trouble/{host}"),
            "its fan stands still"
        ]));
    }
    if random.below(3) == 0 {
        let cordon = json!({"cordoned": true, "draining": random.below(2) == 0});
        let host = HOSTS[random.below(4)];
        all.push(json!([format!("weft/cordon/{host}"), cordon]));
    }
    serde_json::to_vec(&all).expect("plain data")
}

/// No record of a member ends a leader, or has it write what it would not read.
pub fn state(input: &[u8]) {
    let Ok(records) = serde_json::from_slice::<Vec<(String, Value)>>(input) else {
        return;
    };
    let store = Arc::new(Embedded::in_memory().expect("memory"));
    let first = HostRecord {
        name: "first".into(),
        key: "weft-key-first".into(),
        address: "a:1".into(),
        cores: 2,
        memory_bytes: 1 << 32,
        features: Vec::new(),
        version: "1".into(),
        number: 0,
    };
    let cluster = Cluster::init(store.clone(), "fuzz", &first).expect("an empty store");
    for (key, value) in records {
        let value = serde_json::to_vec(&value).expect("it was read");
        // Too long, or an identity that cannot be read.
        if key != "weft/cluster" {
            let _ = store.commit(&[], &[Change::put(key, value)]);
        }
    }
    let Ok(lease) = cluster.lease_to_lead() else {
        return;
    };
    let Ok(Some(term)) = cluster.campaign("first", lease) else {
        return;
    };
    let policy = POLICY_NAMES[input.len() % POLICY_NAMES.len()];
    let mut planner = Planner::default();
    for turn in 0..4_u64 {
        let Ok(mut state) = cluster.state() else {
            return;
        };
        state.policy = Some(policy.into());
        state.hands_off = input.len().is_multiple_of(2);
        let damaged = state.work.damaged.len();
        let now = Duration::from_secs(20 * turn);
        for plan in planner.update(now, &state) {
            let _ = match plan {
                Plan::Place { asked, parts, why } => term.place(&asked, parts, why),
                Plan::Answer {
                    asked,
                    why,
                    refused,
                    is_first,
                } => term.answer(&asked, why, refused, is_first),
                Plan::Move { placed, order } => term.order(&placed, order),
                Plan::CancelMove { placed } => term.cancel_order(&placed),
                Plan::Failing { host, why } => term.failing(&host, &why),
                Plan::RefuseWish { placed, why } => term.refuse_wish(&placed, &why),
                Plan::Stuck { why, .. } => term.note(LogKind::Fail, why),
                Plan::Learned { record } => term.learned(&record),
                Plan::Note { kind, what } => term.note(kind, what),
            };
        }
        let after = cluster.work().expect("a store in memory");
        assert!(after.damaged.len() <= damaged, "{:?}", after.damaged);
        // Agents carry their orders out.
        for placed in after
            .placed
            .values()
            .filter(|placed| placed.order.is_some())
        {
            let _ = cluster.order_ended(placed, Ok(None));
        }
    }
}

/// A token as `weft cluster invite` prints it.
pub fn valid_token(random: &mut Random) -> Vec<u8> {
    let digits = (0..64).map(|_| char::from_digit(random.below(16) as u32, 16).expect("a digit"));
    format!("weft-join-{}", digits.collect::<String>()).into_bytes()
}

/// What is read as a token is printed as it was.
pub fn token(input: &[u8]) {
    if let Ok(text) = std::str::from_utf8(input)
        && let Ok(token) = text.parse::<Token>()
    {
        assert_eq!(token.to_string(), text.trim());
    }
}
