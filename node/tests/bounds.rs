//! What a daemon refuses a launcher that asks for more than it reserved, or leaves out
//! what a slice needs.

mod common;

use std::time::Duration;

use common::LENT_BYTES;

use serde_json::{Value, json};
use weft_wire::channel::Channel;
use weft_wire::hello::{self, Hello};
use weft_wire::{handshake, keys, socket};

const BOUND: Duration = Duration::from_secs(30);

/// A launcher's connection, on which anything can be said.
struct Peer(Channel);

impl Peer {
    fn of(host: &common::Host) -> Peer {
        let stream = socket::dial(&host.address, BOUND).unwrap();
        let keys = keys::load(&host.launcher.join(weft_node::config::KEY_FILE)).unwrap();
        let mut channel = handshake::dial_control(stream.into(), &keys, &host.key, BOUND).unwrap();
        hello::exchange(&mut channel, &Hello::here(), BOUND).unwrap();
        Peer(channel)
    }

    fn ask(&mut self, request: &Value) -> String {
        self.0.send(request).unwrap();
        self.0.receive::<Value>(BOUND).unwrap().to_string()
    }

    fn reserve(&mut self, pages: u64) {
        let answer = self.ask(&json!({
            "open": {"command": "test", "node": 1, "budget_pages": pages, "lease_ms": 5000}
        }));
        assert!(answer.contains("opened"), "{answer}");
    }
}

#[test]
fn a_slice_without_a_link_to_home_is_refused() {
    let host = common::Host::start("linkless", LENT_BYTES);
    let mut peer = Peer::of(&host);
    peer.reserve(256);
    let answer = peer.ask(&json!({"start": {
        "nodes": 2, "jump": 0, "jump_threshold": 0, "lease_ms": 5000, "spin_ns": 0,
        "read_ahead_pages": 0, "stretch_now": false, "budget_pages": vec![256; 16]
    }}));
    assert!(answer.contains("no link to home"), "{answer}");
}

#[test]
fn vcpus_beyond_the_reservation_are_refused() {
    let host = common::Host::start("crowded", LENT_BYTES);
    let mut peer = Peer::of(&host);
    peer.reserve(256);
    let (ticket, secret) = ([9u8; 16], [8u8; 32]);
    let answer = peer.ask(&json!({"expect": {"peer": 0, "ticket": ticket, "secret": secret}}));
    assert!(answer.contains("done"), "{answer}");
    let stream = socket::dial(&host.address, BOUND).unwrap();
    let link = handshake::dial_link(stream.into(), &ticket, &secret, BOUND).unwrap();
    let answer = peer.ask(&json!({"start_machine": {"slices": 2, "cpus": 249, "settings": "{}"}}));
    assert!(
        answer.contains("249 vCPUs need 17.5 GiB, and 1.0 MiB were reserved"),
        "{answer}"
    );
    drop(link);
}
