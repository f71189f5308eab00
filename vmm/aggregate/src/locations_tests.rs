//! Tables of vCPU locations between slices in one process, over real links.

use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Instant;

use weft_platform::clock::Source;
use weft_platform::interrupts::PostedInterrupts;
use weft_vcpu::PageRun;
use weft_wire::halves::{self, HalvesConfig};

use super::message::MoveStep;
use super::vcpu_moves::double::SiteDouble;
use super::vcpu_moves::working_set;
use super::*;
use crate::Share;

const LEASE: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(10);

type Failures = Arc<Mutex<Vec<String>>>;

struct Rig {
    slices: Vec<Arc<Slice>>,
    routers: Vec<Arc<InterruptRouter>>,
    sites: Vec<Arc<SiteDouble>>,
    failures: Failures,
}

/// Slices of 64 MiB with this many vCPUs each, as each of them sees them.
fn rig(tables: &[&[u32]]) -> Rig {
    let count = tables.len();
    let failures = Failures::default();
    let mut links: Vec<Vec<_>> = (0..count)
        .map(|_| (0..count).map(|_| None).collect())
        .collect();
    for one in 0..count {
        for other in one + 1..count {
            let (near, far) = UnixStream::pair().unwrap();
            for (from, to, end) in [(one, other, near), (other, one, far)] {
                let config = HalvesConfig {
                    socket: end.into(),
                    keys: None,
                    lease: LEASE,
                    spin: Duration::ZERO,
                    name: "test".into(),
                };
                links[from][to] = Some(halves::open(config).unwrap());
            }
        }
    }
    let (mut slices, mut routers, mut sites) = (Vec::new(), Vec::new(), Vec::new());
    for (number, (links, cpus)) in links.into_iter().zip(tables).enumerate() {
        let share = |cpus: &u32| Share {
            cpus: *cpus,
            memory_bytes: 64 << 20,
        };
        let placement = Placement::unchecked(cpus.iter().map(share).collect());
        let links = SliceLinks {
            number,
            links,
            lease: LEASE,
            delay_max: Duration::ZERO,
            joins: None,
            lent: None,
            reference: Reference::here(),
        };
        let told = failures.clone();
        let on_failure: OnFailure = Arc::new(move |reason| told.lock().unwrap().push(reason));
        let ram = Ram::new(placement.memory_bytes()).unwrap();
        let options = SliceOptions {
            placement,
            spare_bytes: None,
            exchanges: true,
        };
        let slice = Slice::new(options, links, &ram, on_failure.clone());
        let interrupts = InterruptRouter::of_slice(cpus.iter().sum(), Some(slice.topology()));
        let site = SiteDouble::new(interrupts.clone());
        let wiring = SliceWiring {
            vcpus: site.clone(),
            interrupts: interrupts.clone(),
            mmio: Bus::default(),
            ports: Bus::default(),
            serial: Arc::new(crate::registers::NoSerial),
            clock: Arc::new(Clock::new(Source::Host, measure_host_tsc())),
            on_failure,
            wants_move: Box::new(|_, _, _| {}),
            ended: Box::new(|_, _| {}),
        };
        drop(slice.join(wiring).unwrap());
        slices.push(slice);
        routers.push(interrupts);
        sites.push(site);
    }
    Rig {
        slices,
        routers,
        sites,
        failures,
    }
}

impl Rig {
    fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < until, "{what}: {:?}", self.failures());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn failures(&self) -> Vec<String> {
        self.failures.lock().unwrap().clone()
    }

    fn posted(&self, slice: usize, vcpu: u32) -> &Arc<PostedInterrupts> {
        self.routers[slice].posted(vcpu).unwrap()
    }

    fn end(&self) {
        for slice in &self.slices {
            slice.close();
        }
    }
}

#[test]
fn slices_whose_tables_differ_are_refused() {
    let rig = rig(&[&[1, 2], &[2, 1]]);
    rig.wait("a refusal", |rig| !rig.failures().is_empty());
    let said = rig.failures().remove(0);
    assert!(said.contains("has vCPU 1 on node"), "{said}");
    rig.end();
}

#[test]
fn interrupts_follow_a_vcpu_and_the_others_hear_of_its_move() {
    let rig = rig(&[&[2, 1, 0][..]; 3]);
    let fixed = |vector| Message::Fixed {
        vector,
        level: false,
    };
    let location = VcpuLocation { slice: 0, epoch: 1 };
    assert!(rig.routers[1].deliver(2, fixed(0x40), None));
    let moves = rig.slices[0].vcpu_moves();
    let moved = moves.start(2, 0, PATIENCE).unwrap();
    assert_eq!(
        (moved.source, moved.location, moved.state_bytes),
        (1, location, 1)
    );
    assert_eq!(moved.at_source, MoveTimes([1, 2, 3]));
    assert_eq!(moved.at_target, MoveTimes([4, 5, 6]));
    // All know, not only the two.
    for slice in &rig.slices {
        assert_eq!(slice.locations().of(2), Some(location));
    }
    assert!(rig.routers[2].deliver(2, fixed(0x41), None));
    assert!(rig.routers[2].deliver(2, fixed(0x42), None));
    assert!(rig.routers[1].deliver(2, fixed(0x43), None));
    let found = Mutex::new(Vec::new());
    rig.wait("all four", |rig| {
        let mut found = found.lock().unwrap();
        found.extend(rig.posted(0, 2).take_messages());
        found.len() >= 4
    });
    let mut found = found.into_inner().unwrap();
    found.sort_by_key(|message| format!("{message:?}"));
    assert_eq!(found, [0x40, 0x41, 0x42, 0x43].map(fixed));
    assert!(!rig.posted(1, 2).has_pending() && !rig.posted(2, 2).has_pending());
    // And away again, between slices that are not the primary.
    for (slice, epoch) in [(2, 2), (1, 3), (2, 4), (0, 5)] {
        let moved = moves.start(2, slice, PATIENCE).unwrap();
        assert_eq!(moved.location, VcpuLocation { slice, epoch });
    }
    let gone = moves.start(3, 0, PATIENCE);
    assert_eq!(gone, Err(MoveError::Kept("there is no vCPU 3".into())));
    assert_eq!(rig.slices[0].locations().at(0), [0, 1, 2]);
    assert_eq!(rig.failures(), [""; 0]);
    rig.end();
}

/// The target ends by itself and loses the thread of the vCPU that comes: it cannot report it.
/// The primary learns of the end, and neither takes the other for broken.
#[test]
fn a_move_ends_with_the_machine() {
    let rig = rig(&[&[1, 1, 1][..]; 3]);
    rig.sites[2].is_over.store(true, Ordering::SeqCst);
    rig.slices[2].end_waits();
    let moves = rig.slices[0].vcpu_moves();
    let (refused, waited) = std::thread::scope(|scope| {
        let moving = scope.spawn(|| {
            let begun = Instant::now();
            (moves.start(0, 2, 6 * PATIENCE), begun.elapsed())
        });
        // Slice 1 hears of the location when the state is on its way to slice 2.
        rig.wait("the way", |rig| {
            rig.slices[1].locations().of(0) == Some(VcpuLocation { slice: 2, epoch: 1 })
        });
        rig.slices[0].end_waits();
        moving.join().unwrap()
    });
    assert_eq!(refused, Err(MoveError::Over));
    assert!(waited < PATIENCE, "{waited:?}");
    // Of a move that is not under way any more.
    let location = VcpuLocation { slice: 2, epoch: 1 };
    rig.slices[2]
        .vcpu_moves()
        .taken_over(0, location, MoveTimes::default());
    for (from, to) in [(0, 2), (2, 0)] {
        let slice = &rig.slices[from];
        let look = |ticket| slice.peers.send(to, &SliceMessage::Look { ticket });
        assert!(slice.looks.ask(to, PATIENCE, look).is_some());
    }
    assert_eq!(rig.failures(), [""; 0]);
    rig.end();
}

#[test]
fn pages_follow_a_vcpu_to_where_it_is() {
    let rig = rig(&[&[1, 1, 1][..]; 3]);
    let moves = rig.slices[0].vcpu_moves();
    let at = |slice, epoch| VcpuLocation { slice, epoch };
    let set = |pages| {
        let access = weft_vcpu::Access::Read;
        let first = 5;
        vec![PageRun {
            first,
            count: pages,
            access,
        }]
    };
    let followed = |slice: usize| rig.sites[slice].followed.lock().unwrap().clone();
    // Before the vCPU comes, and after that.
    let sent = |from: usize, location, pages| {
        let moves = rig.slices[from].vcpu_moves();
        moves.send_working_set(1, location, &set(pages));
    };
    sent(1, at(2, 1), 7);
    rig.wait("the first pages", |_| followed(2) == [(1, 7)]);
    moves.start(1, 2, PATIENCE).unwrap();
    rig.wait("nothing is fetched for it any more", |_| {
        followed(1) == [(1, 0)]
    });
    sent(1, at(2, 1), 8);
    rig.wait("more pages", |_| followed(2) == [(1, 7), (1, 8)]);
    // After it left: they are ignored.
    moves.start(1, 0, PATIENCE).unwrap();
    sent(1, at(2, 1), 9);
    // Of a later epoch, of a slice that it does not come from, of no memory, and malformed.
    sent(1, at(2, 9), 1);
    sent(1, at(2, 3), 1);
    let wrong = [0; 9];
    let message = |pages| SliceMessage::WorkingSet {
        vcpu: 1,
        location: at(2, 2),
        pages,
    };
    rig.slices[1].peers.send(2, &message(&wrong));
    let refused = || rig.slices[2].vcpu_moves().counters()[0].1;
    rig.wait("refusals", |_| refused() == 3);
    moves.start(1, 2, PATIENCE).unwrap();
    let far = [PageRun {
        first: 1 << 40,
        ..set(1)[0]
    }];
    let far = working_set::encode(&far);
    let message = SliceMessage::WorkingSet {
        vcpu: 1,
        location: at(2, 3),
        pages: &far,
    };
    rig.slices[0].peers.send(2, &message);
    rig.wait("one more refusal", |_| refused() == 4);
    rig.wait("its end", |_| followed(2) == [(1, 7), (1, 8), (1, 0)]);
    assert_eq!(rig.failures(), [""; 0]);
    rig.end();
}

#[test]
fn who_says_what_cannot_be_true_is_broken_by_name() {
    let at = |slice, epoch| VcpuLocation { slice, epoch };
    let moved = |vcpu, location| SliceMessage::Moved { vcpu, location };
    let step = |step| SliceMessage::Move {
        step,
        vcpu: 1,
        location: at(2, 1),
        payload: &[],
    };
    let interrupt = |vcpu, epoch| SliceMessage::Interrupt {
        vcpu,
        epoch,
        message: Message::NonMaskable,
    };
    let identity = |vcpu| SliceMessage::Identity {
        vcpu,
        identity: 0,
        epoch: 0,
    };
    for (from, message, words) in [
        (1, moved(1, at(2, 1)), "which only node 0 may"),
        (
            1,
            step(MoveStep::HandOver),
            "a vCPU's move, which only node 0 may",
        ),
        (
            1,
            step(MoveStep::TakeOver),
            "a vCPU's move, which only node 0 may",
        ),
        (0, step(MoveStep::TakeOver), "a vCPU without its times"),
        (1, step(MoveStep::HandedOver), "without its times"),
        (1, step(MoveStep::Known), "a move that is not under way"),
        (0, moved(0, at(1, 2)), "a move is missing"),
        (0, moved(7, at(1, 1)), "vCPU 7, but there are 3"),
        (0, moved(0, at(9, 1)), "node 9 as the location"),
        (
            1,
            SliceMessage::WantsMove {
                vcpu: 9,
                location: at(2, 1),
            },
            "asks to move vCPU 9, which does not exist",
        ),
        (0, moved(2, at(1, 1)), "neither sent nor received its state"),
        (1, interrupt(9, 0), "vCPU 9, but there are 3"),
        (1, interrupt(0, 0), "the two tables contradict each other"),
        (1, identity(9), "vCPU 9, but there are 3"),
        (
            1,
            SliceMessage::Locations { table: vec![0; 8] },
            "1 vCPUs in its table, this node 3",
        ),
    ] {
        let rig = rig(&[&[1, 1, 1][..]; 3]);
        rig.slices[from].peers.send(2, &message);
        rig.wait(words, |rig| {
            rig.failures().iter().any(|said| said.contains(words))
        });
        let said = rig.failures().remove(0);
        assert!(said.starts_with(&format!("lost node {from} (")), "{said}");
        rig.end();
    }
}
