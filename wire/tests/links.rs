//! Links of all three kinds between two threads. Needs nothing.

mod common;

use common::{Kind, pair};
use weft_wire::{Header, LinkError};

#[test]
fn ping_pong() {
    for kind in Kind::ALL {
        let (mut near, far) = pair(kind);
        let echo = std::thread::spawn(move || {
            let mut far = far;
            for _ in 0..1000 {
                let frame = far.link.receive(5_000_000_000).unwrap().expect("a frame");
                let header = frame.header;
                let payload = frame.payload.to_vec();
                far.link.send(&header, &[&payload]).unwrap();
            }
        });
        for round in 0..1000u64 {
            let mut header = Header::new(1);
            header.words[0] = round;
            let payload = vec![round as u8; (round * 7 % 5000) as usize];
            near.link
                .send(
                    &header,
                    &[&payload[..payload.len() / 2], &payload[payload.len() / 2..]],
                )
                .unwrap();
            let frame = near.link.receive(5_000_000_000).unwrap().expect("a frame");
            assert_eq!(frame.header.words[0], round, "{kind:?}");
            assert_eq!(frame.payload, payload, "{kind:?}");
        }
        echo.join().unwrap();
        assert!(
            matches!(near.link.receive(5_000_000_000), Err(LinkError::Closed)),
            "{kind:?}"
        );
    }
}
