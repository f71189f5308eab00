//! Single steps of a controller.

use super::transition::QUEUED_MAX;
use super::*;
use crate::config::ManagerOf;
use crate::protocol::{Body, Message};
use crate::state::VecTables;
use crate::types::NodeId;

/// Takes the failures of a step down.
#[derive(Default)]
struct Failures(Vec<Failure>);

impl Sink<()> for Failures {
    fn act(&mut self, action: Action<()>) {
        if let Action::Fail(failure) = action {
            self.0.push(failure);
        }
    }

    fn keep(&mut self) {}
}

/// Node 0 of two, the manager of all of its four pages.
fn manager() -> Controller<VecTables, ()> {
    let config = Config::new(NodeId(0), 2, ManagerOf::Fixed(NodeId(0)));
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
