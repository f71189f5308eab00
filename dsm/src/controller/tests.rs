//! Single steps of a controller.

use super::transition::{Operation, QUEUED_MAX};
use super::*;
use crate::config::ManagerOf;
use crate::protocol::{Body, Message};
use crate::state::VecTables;
use crate::types::NodeId;

/// Takes the failures of a step down, the messages, and the wake-ups, with whether each
/// gave the thread its page.
#[derive(Default)]
struct Failures(Vec<Failure>, Vec<Message>, Vec<bool>);

impl Sink<()> for Failures {
    fn act(&mut self, action: Action<()>) {
        match action {
            Action::Fail(failure) => self.0.push(failure),
            Action::Send { message, .. } => self.1.push(message),
            Action::Wake { granted, .. } => self.2.push(granted),
            _ => {}
        }
    }

    fn keep(&mut self) {}
}

/// Node 0 of two, the manager of all of its four pages.
fn manager() -> Controller<VecTables, ()> {
    node(NodeId(0))
}

/// One of two nodes with four pages, which node 0 manages.
fn node(me: NodeId) -> Controller<VecTables, ()> {
    let config = Config::new(me, 2, ManagerOf::Fixed(NodeId(0)));
    let rights = Rights::new((0..4).map(|_| 0.into()).collect());
    Controller::new(
        &config,
        VecTables::new(4),
        rights.into(),
        Pins::default().into(),
        Budget::UNLIMITED,
        std::iter::once(0..4).collect(),
    )
}

#[test]
fn a_node_cannot_fill_the_queue_of_a_page_in_transition() {
    let (mut controller, mut failures) = (manager(), Failures::default());
    controller.adopt(1).unwrap();
    assert!(controller.hold(1, Access::Write));
    let from = NodeId(1);
    let message = Message {
        page: Page(1),
        generation: 0,
        body: Body::Get {
            access: Access::Write,
            ahead: false,
        },
    };
    // The first is handled: the pin defers what it takes. The others wait.
    for _ in 0..=QUEUED_MAX {
        controller.step(
            Event::Message { from, message },
            Duration::ZERO,
            &mut failures,
        );
    }
    assert!(failures.0.is_empty());
    controller.step(
        Event::Message { from, message },
        Duration::ZERO,
        &mut failures,
    );
    let named = |failure: &Failure| matches!(failure, Failure::Violation { from, page: 1, .. } if *from == NodeId(1));
    assert!(failures.0.len() == 1 && failures.0.iter().all(named));
    assert_eq!(controller.transitions[&1].queue.len(), QUEUED_MAX);
}

#[test]
fn memory_that_goes_back_to_the_host_is_not_busy() {
    let (mut controller, mut sink) = (node(NodeId(1)), Failures::default());
    assert!(controller.start(1, Operation::GiveBack));
    assert!(controller.holdings(0..4).is_nothing());
    // A message waits for the operation.
    let message = Message {
        page: Page(1),
        generation: 0,
        body: Body::Invalidate,
    };
    let from = NodeId(0);
    controller.step(Event::Message { from, message }, Duration::ZERO, &mut sink);
    assert_eq!(controller.holdings(0..4).busy, 1);
}

/// Node 1 has read page 1, which came whole because it is migratory; its thread is awake.
/// Then node 0 wants to read it.
fn visited(controller: &mut Controller<VecTables, ()>, sink: &mut Failures) {
    let message = |body| Event::Message {
        from: NodeId(0),
        message: Message {
            page: Page(1),
            generation: 0,
            body,
        },
    };
    acquire(controller, 1, Access::Read, sink);
    let data = Body::Data {
        right: protocol::Right::Exclusive,
        content: protocol::Content::Bytes,
        migratory: true,
    };
    controller.step(message(data), Duration::ZERO, sink);
    controller.pins.remove(1);
    sink.1.clear();
    let forward = Body::Forward {
        access: Access::Read,
        requester: NodeId(0),
        sole: true,
        held: false,
    };
    controller.step(message(forward), Duration::ZERO, sink);
}

fn acquire(
    controller: &mut Controller<VecTables, ()>,
    waiter: u64,
    access: Access,
    sink: &mut Failures,
) {
    let purpose = Purpose::Data;
    let event = Event::Acquire {
        waiter,
        page: 1,
        access,
        purpose,
    };
    controller.step(event, Duration::ZERO, sink);
}

fn given(sink: &Failures) -> Option<protocol::Right> {
    sink.1.iter().find_map(|message| match message.body {
        Body::Data { right, .. } => Some(right),
        _ => None,
    })
}

#[test]
fn a_request_waits_for_the_write_of_a_visitor() {
    let (mut controller, mut sink) = (node(NodeId(1)), Failures::default());
    visited(&mut controller, &mut sink);
    assert_eq!(given(&sink), None);
    acquire(&mut controller, 2, Access::Write, &mut sink);
    controller.step(Event::Done { page: 1 }, Duration::ZERO, &mut sink);
    assert_eq!(given(&sink), None, "the writer's pin holds the page");
    controller.pins.remove(1);
    controller.step(Event::Tick, Duration::ZERO, &mut sink);
    controller.step(Event::Done { page: 1 }, Duration::ZERO, &mut sink);
    assert_eq!(given(&sink), Some(protocol::Right::Exclusive));
    assert!(sink.0.is_empty(), "{:?}", sink.0);
}

#[test]
fn a_visitor_that_does_not_write_gives_a_copy_in_time() {
    let (mut controller, mut sink) = (node(NodeId(1)), Failures::default());
    visited(&mut controller, &mut sink);
    let end = controller.deadline(Duration::ZERO).unwrap();
    controller.step(Event::Tick, end, &mut sink);
    controller.step(Event::Done { page: 1 }, end, &mut sink);
    assert_eq!(given(&sink), Some(protocol::Right::Shared));
    assert!(sink.0.is_empty(), "{:?}", sink.0);
}

/// The user that has the page pinned goes on with it; the others wait until it was away.
#[test]
fn a_page_that_waits_for_its_pins_gets_no_new_one() {
    let (mut controller, mut sink) = (manager(), Failures::default());
    controller.adopt(1).unwrap();
    assert!(controller.hold(1, Access::Read));
    let message = Message {
        page: Page(1),
        generation: 0,
        body: Body::Get {
            access: Access::Read,
            ahead: false,
        },
    };
    let from = NodeId(1);
    let event = Event::Message { from, message };
    controller.step(event, Duration::ZERO, &mut sink);
    assert!(!controller.hold(1, Access::Read));
    assert!(!controller.hold_all([1].into_iter(), Access::Read, |_| false));
    assert!(controller.hold_all([1].into_iter(), Access::Read, |_| true));
    acquire(&mut controller, 1, Access::Read, &mut sink);
    assert!(sink.2.is_empty());
    controller.pins.remove(1);
    controller.pins.remove(1);
    controller.step(Event::Tick, Duration::ZERO, &mut sink);
    controller.step(Event::Done { page: 1 }, Duration::ZERO, &mut sink);
    assert_eq!(given(&sink), Some(protocol::Right::Shared));
    assert_eq!(sink.2, [false], "the waiting thread looks again");
    let retry = Event::Retry { waiter: 1 };
    controller.step(retry, Duration::ZERO, &mut sink);
    assert_eq!(sink.2, [false, true]);
}

/// Other pins of the page do not extend a visit.
#[test]
fn readers_of_a_visited_page_keep_it_for_the_time_of_a_visit() {
    let (mut controller, mut sink) = (node(NodeId(1)), Failures::default());
    visited(&mut controller, &mut sink);
    assert!(controller.hold(1, Access::Read));
    let end = controller.deadline(Duration::ZERO).unwrap();
    controller.step(Event::Tick, end, &mut sink);
    assert!(!controller.hold(1, Access::Read));
    controller.pins.remove(1);
    controller.step(Event::Tick, end, &mut sink);
    controller.step(Event::Done { page: 1 }, end, &mut sink);
    assert_eq!(given(&sink), Some(protocol::Right::Shared));
}

/// Node 0 of two, which manages and owns page 1, and sends it ahead to node 1.
fn sending() -> Controller<VecTables, ()> {
    let ranges = crate::ranges::Ranges::new(&[4, 4]).unwrap();
    let config = Config::new(NodeId(0), 2, ManagerOf::Ranges(ranges));
    let rights = Rights::new((0..4).map(|_| 0.into()).collect());
    let mut controller = Controller::new(
        &config,
        VecTables::new(4),
        rights.into(),
        Pins::default().into(),
        Budget::UNLIMITED,
        std::iter::once(0..4).collect(),
    );
    controller.adopt(1).unwrap();
    controller.begin_precopy(DrainPlan {
        pages: std::iter::once(0..4).collect(),
        targets: vec![DrainTarget {
            node: NodeId(1),
            pages: 4,
        }],
        window_pages: 4,
    });
    controller
}

#[test]
fn a_page_that_is_written_is_sent_ahead_again() {
    let (mut controller, mut sink) = (sending(), Failures::default());
    let precopies = |sink: &Failures| {
        let bodies = sink.1.iter().map(|message| message.body);
        bodies.filter(|body| matches!(body, Body::Precopy)).count()
    };
    for sent in 1..=3 {
        let mut step = |event| controller.step(event, Duration::ZERO, &mut sink);
        step(Event::Precopy);
        // It is being protected, and then sent: nothing is settled before the answer.
        step(Event::Done { page: 1 });
        step(Event::Precopy);
        assert!(!controller.precopy_progress().is_settled);
        assert_eq!(precopies(&sink), sent);
        let message = Message {
            page: Page(1),
            generation: 0,
            body: Body::Precopied { kept: true },
        };
        let from = NodeId(1);
        let mut step = |event| controller.step(event, Duration::ZERO, &mut sink);
        step(Event::Message { from, message });
        step(Event::Precopy);
        step(Event::Precopy);
        assert!(controller.precopy_progress().is_settled);
        // A write ends that.
        controller.step(
            Event::Acquire {
                waiter: sent as u64,
                page: 1,
                access: Access::Write,
                purpose: Purpose::Data,
            },
            Duration::ZERO,
            &mut sink,
        );
        controller.pins.remove(1);
        assert!(!controller.precopy_progress().is_settled);
        let waiter = sent as u64;
        controller.step(Event::Leave { waiter }, Duration::ZERO, &mut sink);
    }
    assert!(sink.0.is_empty());
}

#[test]
fn a_page_that_is_expected_to_be_written_is_requested_once() {
    let (mut controller, mut sink) = (node(NodeId(1)), Failures::default());
    let runs = [(1, Access::Write), (2, Access::Read)];
    let runs = runs.map(|(first, access)| PrefetchRun {
        first,
        count: 1,
        access,
    });
    controller.step(Event::HoldPrefetches, Duration::ZERO, &mut sink);
    let (user, list) = (0, runs.to_vec().into());
    controller.step(Event::Prefetch { user, list }, Duration::ZERO, &mut sink);
    for page in 1..4 {
        let (waiter, access, purpose) = (page, Access::Read, Purpose::Data);
        let event = Event::Acquire {
            waiter,
            page,
            access,
            purpose,
        };
        controller.step(event, Duration::ZERO, &mut sink);
    }
    let asked = |message: &Message| match message.body {
        Body::Get { access, .. } => access,
        body => panic!("{body:?}"),
    };
    let asked: Vec<Access> = sink.1.iter().map(asked).collect();
    assert_eq!(asked, [Access::Write, Access::Read, Access::Read]);
}
