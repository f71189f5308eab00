//! What a daemon reads: its configuration, and the messages of a session.

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use weft_node::config::{Config, SLICES_MAX};
use weft_node::monitor_protocol::HomeStep;
use weft_node::protocol::{DaemonReply, DaemonRequest, HomeRequest, MachineJoin, MachineStart};
use weft_wire::keys::PublicKey;

use crate::random::Random;

/// A configuration with a peer or two.
pub fn valid_config(random: &mut Random) -> Vec<u8> {
    let mut text = String::new();
    if random.below(2) == 0 {
        text += "listen = \"127.0.0.1:7001\"\nmemory = \"4G\"\nslices = 4\n";
    }
    for peer in 0..random.below(3) {
        let may = ["borrow", "lend", "both"][random.below(3)];
        let key = PublicKey(core::array::from_fn(|_| random.next() as u8));
        text += &format!("[[peer]]\nname = \"n{peer}\"\nkey = \"{key}\"\nmay = \"{may}\"\n");
        if random.below(2) == 0 {
            text += "address = \"beta.example\"\ndisks = [\"/srv/disk.img\"]\n";
        }
    }
    text.into_bytes()
}

/// A configuration is refused with a reason, or what it says can be.
pub fn config(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else {
        return;
    };
    match Config::parse(Path::new("node.toml"), text) {
        Ok(config) => {
            assert!((1..=SLICES_MAX).contains(&config.slices));
            for peer in &config.peers {
                let found = config.peer(&peer.key).expect("a peer has its key");
                assert_eq!(found, peer);
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Requests and replies of every shape that has one.
pub fn valid_session(random: &mut Random) -> Vec<u8> {
    match random.below(10) {
        0 => text(&DaemonRequest::Open {
            command: "sort".into(),
            node: random.below(20) as u32,
            budget_pages: (random.below(2) == 0).then(|| random.next()),
            lease_ms: random.next() as u32,
        }),
        1 => text(&DaemonRequest::StartMachine(Box::new(MachineStart {
            slices: random.below(20) as u32,
            cpus: random.below(300) as u32,
            settings: "{}".into(),
            joins: (random.below(2) == 0).then(|| MachineJoin {
                memory_bytes: random.next(),
                peers: vec![random.below(20) as u32],
            }),
        }))),
        2 => text(&DaemonRequest::Ping),
        3 => text(&DaemonRequest::Release),
        4 => text(&DaemonReply::Opened {
            budget_pages: random.next(),
        }),
        5 => text(&DaemonReply::NoRoom {
            asked_pages: random.next(),
            free_pages: random.next(),
            why: "memory".into(),
        }),
        6 => text(&DaemonRequest::Home(Box::new(HomeRequest {
            request: random.next(),
            name: "m".into(),
            settings: "{}".into(),
            files: vec![random.next()],
            step: match random.below(8) {
                0 => HomeStep::Prepare,
                1 => HomeStep::LetGo,
                2 => HomeStep::Wait,
                3 => HomeStep::Disk {
                    number: random.next() as u8,
                    path: "/srv/disk".into(),
                    bytes: random.next(),
                },
                4 => HomeStep::NewFile {
                    path: "/srv/monday/pages.1".into(),
                },
                5 => HomeStep::KeepNewFile {
                    keep: random.below(2) == 0,
                },
                6 => HomeStep::SavedFile {
                    number: random.next() as u32,
                    path: "/srv/monday/pages.1".into(),
                },
                _ => HomeStep::State {
                    part: "{".into(),
                    is_last: random.below(2) == 0,
                },
            },
        }))),
        7 => text(&DaemonReply::HomeFailed {
            request: random.next(),
            reason: "no room".into(),
        }),
        8 => text(&DaemonReply::Started {
            pid: random.next() as u32,
        }),
        _ => text(&DaemonReply::Ended {
            why: "lease".into(),
            clean: random.below(2) == 0,
        }),
    }
}

fn text(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).expect("a message is JSON")
}

/// A message is refused, or means the same after it was sent on.
fn again<T: Serialize + DeserializeOwned>(input: &[u8]) {
    if let Ok(message) = serde_json::from_slice::<T>(input) {
        let sent = text(&message);
        let received: T = serde_json::from_slice(&sent).expect("it was accepted before");
        assert_eq!(text(&received), sent);
    }
}

/// The daemon's side, and the launcher's.
pub fn session(input: &[u8]) {
    again::<DaemonRequest>(input);
    again::<DaemonReply>(input);
}
