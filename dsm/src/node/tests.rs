//! Single steps, and steps on nonsense.

use super::*;
use crate::protocol::Denial;
use crate::sim::Random;
use crate::state::MapTables;

fn home() -> Node<MapTables> {
    let config = Config::new(NodeId(0), 3, ManagerOf::Fixed(NodeId(0)));
    Node::new(&config, MapTables::default())
}

fn step(node: &mut Node<MapTables>, event: Event) -> Vec<Action> {
    let mut actions = Vec::new();
    node.step(event, &mut |action| actions.push(action));
    actions
}

fn fault(page: Page, access: Access) -> Event {
    let ahead = false;
    Event::Fault {
        page,
        access,
        ahead,
    }
}

#[test]
fn a_first_touch_at_the_manager_is_local() {
    let mut node = home();
    let page = Page(5);
    let install = |access| Action::Install {
        page,
        access,
        content: Content::Zero,
    };
    let resolved = Action::Resolved { page };
    let actions = step(&mut node, fault(page, Access::Read));
    assert_eq!(actions, [install(Access::Read), resolved]);
    let actions = step(&mut node, fault(page, Access::Write));
    assert_eq!(actions, [Action::Allow { page }, resolved]);
    assert_eq!(node.owned_pages(NodeId(0)), 1);
    assert_eq!(step(&mut node, fault(page, Access::Write)), [resolved]);
}

#[test]
fn policies_refuse_by_name() {
    let mut node = home();
    let (constant, own) = (Page(1), Page(2));
    node.tables.set_policy(constant, Policy::ReadOnly);
    node.tables.set_policy(own, Policy::Private);
    let refused = |page, reason| [Action::Refused { page, reason }];
    let evict = |page| Event::Evict { page, to: None };
    let actions = step(&mut node, fault(constant, Access::Write));
    assert_eq!(actions, refused(constant, Refusal::ReadOnly));
    assert_eq!(step(&mut node, Event::Adopt { page: constant }), []);
    let actions = step(&mut node, evict(constant));
    assert_eq!(actions, refused(constant, Refusal::ReadOnly));
    step(&mut node, fault(own, Access::Write));
    assert_eq!(step(&mut node, evict(own)), refused(own, Refusal::Private));
    let actions = step(&mut node, evict(Page(9)));
    assert_eq!(actions, refused(Page(9), Refusal::NotHere));
    assert_eq!(node.tables.pages().count(), 3);
}

#[test]
fn a_push_goes_where_most_room_is_or_says_that_there_is_none() {
    let mut node = home();
    node.set_budget_pages(NodeId(1), 1);
    node.set_budget_pages(NodeId(2), 2);
    let mut targets = Vec::new();
    for page in (0..4).map(Page) {
        step(&mut node, fault(page, Access::Write));
        match step(&mut node, Event::Evict { page, to: None })[..] {
            [Action::Give { to, .. }] => targets.push(Some(to.0)),
            [Action::NoRoom { .. }] => targets.push(None),
            ref other => panic!("{other:?}"),
        }
    }
    assert_eq!(targets, [Some(2), Some(1), Some(2), None]);
}

/// A copy would leave the owner as full as it is, and the reader with pages that it
/// cannot give up.
#[test]
fn a_reader_takes_the_page_where_nobody_else_has_room() {
    let page = Page(8);
    for (elsewhere_pages, right) in [(1, Right::Shared), (0, Right::Exclusive)] {
        let mut node = home();
        step(&mut node, fault(page, Access::Write));
        // At home there is room for another 3 pages of 100.
        node.set_budget_pages(NodeId(0), 100);
        for other in (0..96).map(|other| Page(100 + other)) {
            step(&mut node, fault(other, Access::Write));
        }
        node.set_budget_pages(NodeId(2), elsewhere_pages);
        let body = Body::Get {
            access: Access::Read,
            ahead: false,
        };
        let message = Message {
            page,
            generation: 0,
            body,
        };
        let from = NodeId(1);
        let actions = step(&mut node, Event::Message { from, message });
        let [Action::Give { message, .. }] = actions[..] else {
            panic!("{actions:?}");
        };
        let content = Content::Bytes;
        let migratory = false;
        let body = Body::Data {
            right,
            content,
            migratory,
        };
        assert_eq!(message.body, body);
        let owns = node.owned_pages(from);
        assert_eq!(owns, u32::from(right == Right::Exclusive));
    }
}

#[test]
fn a_moved_page_takes_on_the_generation_of_its_new_place() {
    let mut node = home();
    let (old, new) = (Page(1), Page(2));
    step(&mut node, fault(old, Access::Write));
    step(&mut node, Event::Discard { page: new });
    step(&mut node, Event::Discard { page: new });
    let there = *node.tables.local(new);
    let moved = node.tables.local(old).take().at(there);
    assert!(moved.writable() && moved.owner());
    assert_eq!(moved.generation(), 2);
    let left = *node.tables.local(old);
    assert!(!left.present() && left.generation() == 1);
}

#[test]
fn a_page_that_was_written_and_shared_is_not_writable() {
    let mut node = home();
    let page = Page(3);
    step(&mut node, fault(page, Access::Write));
    assert!(node.tables.local(page).writable());
    let get = Body::Get {
        access: Access::Read,
        ahead: false,
    };
    let message = Message {
        page,
        generation: 0,
        body: get,
    };
    let from = NodeId(1);
    step(&mut node, Event::Message { from, message });
    let local = *node.tables.local(page);
    assert!(local.written() && local.present() && !local.writable());
}

/// A reader gets a page that moves from reader to reader, and a copy of one that is
/// settled.
#[test]
fn a_settled_page_stays() {
    for settled in [false, true] {
        let mut node = home();
        let page = Page(3);
        node.settle(page);
        assert!(!node.tables.local(page).settled(), "it is not here yet");
        step(&mut node, fault(page, Access::Write));
        if settled {
            node.settle(page);
        }
        node.tables.local(page).make_writer(true);
        assert_eq!(node.tables.local(page).migratory(), !settled);
        let body = Body::Get {
            access: Access::Read,
            ahead: false,
        };
        let message = Message {
            page,
            generation: 0,
            body,
        };
        let from = NodeId(1);
        step(&mut node, Event::Message { from, message });
        assert_eq!(node.tables.local(page).present(), settled);
        // Until it leaves.
        assert_eq!(node.tables.local(page).settled(), settled);
    }
}

/// Of the stays of a page that moves from reader to reader the first, and one in
/// `probe_every` after it, begin write-protected; the count begins anew when the
/// page comes as another kind of page.
#[test]
fn most_stays_of_a_migratory_page_are_not_probed() {
    let mut config = Config::new(NodeId(0), 2, ManagerOf::Fixed(NodeId(0)));
    config.probe_every = 3;
    let mut node = Node::new(&config, MapTables::default());
    let page = Page(3);
    step(&mut node, fault(page, Access::Write));
    let mut is_probed = |access, migratory| {
        step(&mut node, Event::Evict { page, to: None });
        assert!(!node.tables.local(page).present());
        step(&mut node, fault(page, access));
        let body = Body::Data {
            right: Right::Exclusive,
            content: Content::Bytes,
            migratory,
        };
        let message = Message {
            page,
            generation: 0,
            body,
        };
        let from = NodeId(1);
        let actions = step(&mut node, Event::Message { from, message });
        let probed = !node.tables.local(page).written();
        let access = if probed { Access::Read } else { Access::Write };
        let content = Content::Bytes;
        let install = Action::Install {
            page,
            access,
            content,
        };
        assert!(actions.contains(&install));
        probed
    };
    let stays: Vec<bool> = (0..7).map(|_| is_probed(Access::Read, true)).collect();
    assert_eq!(stays, [true, false, false, true, false, false, true]);
    assert!(!is_probed(Access::Write, false));
    assert!(is_probed(Access::Read, true));
}

/// A manager that has a page sent to its owner would have it send to itself.
#[test]
fn no_page_is_sent_to_the_node_that_has_it() {
    let me = NodeId(0);
    let manager = NodeId(1);
    for body in [
        Body::Forward {
            access: Access::Write,
            requester: me,
            sole: true,
            held: false,
        },
        Body::Place {
            to: me,
            sole: true,
            held: false,
        },
    ] {
        let config = Config::new(me, 2, ManagerOf::Fixed(manager));
        let mut node = Node::new(&config, MapTables::default());
        let message = Message {
            page: Page(1),
            generation: 0,
            body,
        };
        let from = manager;
        let actions = step(&mut node, Event::Message { from, message });
        assert!(matches!(actions[..], [Action::Violation { .. }]));
        node.tables.local(Page(1)).make_writer(true);
        let actions = step(&mut node, Event::Message { from, message });
        assert!(matches!(actions[..], [Action::Violation { .. }]));
    }
}

/// A peer that sends anything at all may confuse the directory of its pages,
/// but it brings nobody down.
#[test]
fn nonsense_does_not_panic() {
    let mut random = Random::new(7);
    let mut violations = 0;
    for round in 0..255 {
        let manager = ManagerOf::Fixed(NodeId(round % 3));
        let mut node = Node::new(&Config::new(NodeId(0), 3, manager), MapTables::default());
        for _ in 0..1000 {
            let from = NodeId(random.below(3) as u8);
            let header = weft_wire::frame::Header {
                kind: 1 + random.below(17) as u8,
                flags: random.bits() as u8,
                count: 1,
                length: 0,
                words: [random.below(3), random.below(3) << 8, 0, 0, 0],
            };
            let Some(message) = crate::message::decode_for_tests(&header) else {
                continue;
            };
            for action in step(&mut node, Event::Message { from, message }) {
                violations += u32::from(matches!(action, Action::Violation { .. }));
            }
            let page = Page(random.below(3));
            let event = match random.below(12) {
                0..4 => fault(page, Access::Write),
                4..8 => fault(page, Access::Read),
                8 | 9 => Event::Evict { page, to: None },
                10 => Event::Discard { page },
                _ => Event::Adopt { page },
            };
            step(&mut node, event);
        }
        for page in (0..3).map(Page) {
            let dead = NodeId(1);
            step(&mut node, Event::PeerLost { node: dead, page });
        }
    }
    assert!(violations > 1000);
}

/// A node that loses a page of policy `Update` to a write is notified, and a reader gets a
/// copy, however often the page was read and then written before.
#[test]
fn a_page_that_is_kept_up_to_date() {
    let config = |me| Config::new(NodeId(me), 2, ManagerOf::Fixed(NodeId(0)));
    let mut nodes = [0, 1].map(|me| Node::new(&config(me), MapTables::default()));
    let page = Page(3);
    for node in &mut nodes {
        node.tables.set_policy(page, Policy::Update);
    }
    // One event, and the messages that it causes; what is told beside those.
    let mut told = |at: usize, access: Access, ahead: bool| {
        let event = Event::Fault {
            page,
            access,
            ahead,
        };
        let mut events = std::collections::VecDeque::from([(at, event)]);
        let mut told = Vec::new();
        while let Some((at, event)) = events.pop_front() {
            for action in step(&mut nodes[at], event) {
                if let Action::Send { to, message } | Action::Give { to, message, .. } = action {
                    let from = NodeId(at as u8);
                    events.push_back((to.index(), Event::Message { from, message }));
                }
                if !matches!(action, Action::Send { .. } | Action::Resolved { .. }) {
                    told.push((at, action));
                }
            }
        }
        told
    };
    let outdated = |at| (at, Action::Outdated { page });
    let allow = |at| (at, Action::Allow { page });
    told(0, Access::Write, false);
    for _ in 0..3 {
        let read = told(1, Access::Read, true);
        assert!(matches!(
            read[0].1,
            Action::Give {
                keep: Keep::Shared | Keep::AsIs,
                ..
            }
        ));
        let upgrade = told(0, Access::Write, false);
        assert_eq!(upgrade, [(1, Action::Drop { page }), outdated(1), allow(0)]);
    }
    // The reader becomes the writer, and still takes the page from nobody who reads.
    told(1, Access::Read, false);
    let upgrade = told(1, Access::Write, false);
    assert!(matches!(
        upgrade[0].1,
        Action::Give {
            keep: Keep::Nothing,
            ..
        }
    ));
    assert_eq!(upgrade[1..], [outdated(0), allow(1)]);
    let read = told(0, Access::Read, true);
    assert!(matches!(
        read[0].1,
        Action::Give {
            keep: Keep::Shared,
            ..
        }
    ));
    let upgrade = told(1, Access::Write, false);
    assert_eq!(upgrade, [(0, Action::Drop { page }), outdated(0), allow(1)]);
}

/// Beyond its budget, if it may; its own pages stay where they are then.
#[test]
fn the_manager_takes_what_no_other_has_room_for() {
    let mut node = home();
    let (page, own) = (Page(1), Page(2));
    step(&mut node, fault(page, Access::Write));
    step(&mut node, fault(own, Access::Write));
    let mut says = |body| {
        let message = Message {
            page,
            generation: 0,
            body,
        };
        let from = NodeId(1);
        step(&mut node, Event::Message { from, message })
    };
    says(Body::Get {
        access: Access::Write,
        ahead: false,
    });
    says(Body::Done { exclusive: true });
    node.set_budget_pages(NodeId(0), 1);
    node.set_budget_pages(NodeId(2), 0);
    let answers = [0, 1].map(|spare| {
        node.set_spare_pages(spare);
        let message = Message {
            page,
            generation: 0,
            body: Body::Offer { to: None },
        };
        let from = NodeId(1);
        match step(&mut node, Event::Message { from, message })[..] {
            [Action::Send { message, .. }] => message.body,
            ref other => panic!("{other:?}"),
        }
    });
    let denied = Body::OfferDenied {
        reason: Denial::NoRoom,
    };
    assert_eq!(answers[0], denied);
    assert!(matches!(answers[1], Body::Place { to: NodeId(0), .. }));
    node.set_budget_pages(NodeId(1), 0);
    let evict = Event::Evict {
        page: own,
        to: None,
    };
    assert_eq!(step(&mut node, evict), [Action::NoRoom { page: own }]);
}
