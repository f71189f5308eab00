//! A switch with its thread, and one pair that is served here and by another slice in turns.

use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use weft_confine::lock;
use weft_virtio::net::{HEADER, Usage};

use super::super::tests::networks::Cable;
use super::frames;
use super::port::FrameSender;
use super::{Switch, window};

const PATIENCE: Duration = Duration::from_secs(20);
const ROUNDS: usize = 400;
/// Frames of a round.
const FRAMES: u32 = 5;

/// The numbers of the frames that another slice got.
#[derive(Default)]
struct OtherSlice(Mutex<Vec<u32>>);

impl FrameSender for OtherSlice {
    fn frames(&self, batch: &[u8]) {
        let mut rest = batch;
        let all = std::iter::from_fn(|| frames::next(&mut rest));
        lock(&self.0).extend(all.map(number_of));
    }

    fn taken(&self, _: u64) {}
}

fn frame(number: u32) -> Vec<u8> {
    let mut frame = vec![0; HEADER + 60];
    frame[HEADER..HEADER + 4].copy_from_slice(&number.to_le_bytes());
    frame
}

fn number_of(frame: &[u8]) -> u32 {
    let bytes = frame[HEADER..HEADER + 4].try_into();
    u32::from_le_bytes(bytes.unwrap())
}

#[test]
fn a_lone_pair_gets_each_frame_once_wherever_it_is_served() {
    let (near, far) = UnixDatagram::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    let gone = Box::new(|error: &std::io::Error| panic!("{error}"));
    let switch = Switch::new(Box::new(Cable(near)), vec![None], window(20), gone).unwrap();
    let mut port = switch.port(0);
    // As the pair's thread watches it.
    let events = Epoll::new().unwrap();
    let event = EpollEvent::new(EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED, 0);
    events
        .ctl(ControlOperation::Add, port.descriptor(), event)
        .unwrap();
    let reads = thread::spawn({
        let switch = switch.clone();
        move || switch.run()
    });
    switch.use_as(Usage {
        features: 0,
        pairs: 1,
    });
    let other = Arc::new(OtherSlice::default());
    let mut here = Vec::new();
    let mut sent = 0..;
    let mut took = vec![0; 1 << 17];
    for round in 0..ROUNDS {
        for number in sent.by_ref().take(FRAMES as usize) {
            far.send(&frame(number)).unwrap();
        }
        // Some rounds end before all has come.
        let wanted = FRAMES as usize * (round + 1) - round % 4;
        let deadline = Instant::now() + PATIENCE;
        while here.len() + lock(&other.0).len() < wanted {
            let come = here.len();
            assert!(
                Instant::now() < deadline,
                "{come} of {wanted} in round {round}"
            );
            if round % 2 == 1 {
                thread::yield_now();
                continue;
            }
            events.wait(1000, &mut [EpollEvent::default()]).unwrap();
            while let Some(length) = port.receive(&mut took).unwrap() {
                here.push(number_of(&took[..length]));
            }
        }
        let is_next_here = round % 2 == 1;
        let server = (!is_next_here).then(|| other.clone() as Arc<dyn FrameSender>);
        switch.serve(0, server);
    }
    switch.serve(0, None);
    let deadline = Instant::now() + PATIENCE;
    while here.len() + lock(&other.0).len() < FRAMES as usize * ROUNDS {
        assert!(Instant::now() < deadline);
        if let Some(length) = port.receive(&mut took).unwrap() {
            here.push(number_of(&took[..length]));
        }
    }
    let there = std::mem::take(&mut *lock(&other.0));
    assert!(here.len() > ROUNDS && there.len() > ROUNDS);
    assert!(
        here.is_sorted() && there.is_sorted(),
        "a frame overtook another"
    );
    let mut all = [here, there].concat();
    all.sort_unstable();
    assert!(
        (0..).zip(&all).all(|(number, found)| number == *found),
        "{all:?}"
    );
    switch.close();
    reads.join().unwrap();
}
