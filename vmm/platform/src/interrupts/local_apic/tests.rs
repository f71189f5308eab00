use super::*;
use crate::interrupts::message::{Destination, Message};

fn apic() -> (LocalApic, Arc<PostedInterrupts>) {
    let posted = Arc::new(PostedInterrupts::default());
    let mut apic = LocalApic::new(0, true, posted.clone(), TimeBase::new(1_000_000_000));
    apic.write(0xf0, 0x1ff, 0);
    (apic, posted)
}

fn fixed(vector: u8, level: bool) -> Message {
    Message::Fixed { vector, level }
}

#[test]
fn after_power_on_it_is_as_the_manual_says() {
    let posted = Arc::new(PostedInterrupts::default());
    let mut apic = LocalApic::new(3, false, posted, TimeBase::new(1_000_000_000));
    assert_eq!(apic.read(0x20, 0), 3 << 24);
    assert_eq!(apic.read(0x30, 0), 0x0005_0014);
    assert_eq!(apic.read(0xf0, 0), 0xff);
    assert_eq!(apic.read(0xe0, 0), 0xffff_ffff);
    for offset in (0x320..0x380).step_by(16) {
        assert_eq!(apic.read(offset, 0), MASKED);
        // While disabled, they stay masked.
        apic.write(offset, 0x31, 0);
        assert_eq!(apic.read(offset, 0), MASKED | 0x31);
    }
    assert_eq!(apic.base(), 0xfee0_0800);
}

#[test]
fn higher_classes_interrupt_lower_ones_and_equal_ones_wait() {
    let (mut apic, posted) = apic();
    posted.post(fixed(0x45, false));
    assert_eq!(apic.take_interrupt(), Some(0x45));
    posted.post(fixed(0x4f, false));
    assert!(!apic.interrupt_waits());
    posted.post(fixed(0x50, false));
    assert_eq!(apic.take_interrupt(), Some(0x50));
    assert_eq!(apic.read(0xa0, 0), 0x50);
    assert_eq!(apic.write(0xb0, 0, 0), Outcome::Done);
    assert!(!apic.interrupt_waits());
    apic.write(0xb0, 0, 0);
    assert_eq!(apic.take_interrupt(), Some(0x4f));
    apic.write(0xb0, 0, 0);
    // One EOI too many does nothing.
    assert_eq!(apic.write(0xb0, 0, 0), Outcome::Done);
    assert_eq!(apic.read(0xa0, 0), 0);
}

#[test]
fn the_task_priority_holds_interrupts_back() {
    let (mut apic, posted) = apic();
    apic.set_task_priority(5);
    assert_eq!(apic.read(0x80, 0), 0x50);
    posted.post(fixed(0x5f, false));
    assert!(!apic.interrupt_waits());
    posted.post(fixed(0x60, false));
    assert!(apic.interrupt_waits());
    apic.write(0x80, 0x60, 0);
    assert_eq!(apic.take_interrupt(), None);
    assert_eq!(apic.read(0x210 + 0x20, 0), 1);
    apic.set_task_priority(0);
    assert_eq!(apic.take_interrupt(), Some(0x60));
    assert_eq!(apic.task_priority(), 0);
}

#[test]
fn the_end_of_a_level_is_told() {
    let (mut apic, posted) = apic();
    posted.post(fixed(0x41, true));
    assert_eq!(apic.take_interrupt(), Some(0x41));
    assert_eq!(apic.read(0x1a0, 0), 2);
    assert_eq!(apic.read(0x120, 0), 2);
    assert_eq!(apic.write(0xb0, 0, 0), Outcome::EndOfInterrupt(0x41));
    posted.post(fixed(0x41, false));
    assert_eq!(apic.take_interrupt(), Some(0x41));
    assert_eq!(apic.write(0xb0, 0, 0), Outcome::Done);
}

#[test]
fn a_disabled_apic_takes_no_interrupts_but_non_maskable_ones() {
    let (mut apic, posted) = apic();
    apic.write(0x320, 0x40, 0);
    apic.write(0xf0, 0xff, 0);
    assert_eq!(apic.read(0x320, 0), MASKED | 0x40);
    posted.post(fixed(0x41, false));
    posted.post(Message::NonMaskable);
    assert!(!apic.interrupt_waits());
    apic.write(0xf0, 0x1ff, 0);
    assert!(!apic.interrupt_waits());
    assert!(apic.wakes());
    assert!(apic.take_non_maskable());
    assert!(!apic.take_non_maskable());
}

#[test]
fn commands_become_interrupts() {
    let (mut apic, _) = apic();
    apic.write(0x310, 2 << 24, 0);
    let Outcome::Send(sent) = apic.write(0x300, 0x40fd, 0) else {
        panic!("nothing sent");
    };
    assert_eq!(sent.vector, 0xfd);
    assert_eq!(sent.destination, Destination::Physical(2));
    assert_eq!(apic.read(0x300, 0), 0x40fd);
    assert_eq!(apic.read(0x310, 0), 2 << 24);
    // Bit 12 is read-only.
    apic.write(0x300, 0x50fd, 0);
    assert_eq!(apic.read(0x300, 0) & 1 << 12, 0);
}

#[test]
fn errors_are_gathered_shown_on_write_and_interrupt() {
    let (mut apic, posted) = apic();
    apic.write(0x370, 0xfe, 0);
    assert_eq!(apic.write(0x300, 0x0005, 0), Outcome::Done);
    assert_eq!(apic.take_interrupt(), Some(0xfe));
    apic.write(0xb0, 0, 0);
    posted.post(fixed(3, false));
    assert_eq!(apic.take_interrupt(), Some(0xfe));
    assert_eq!(apic.read(0x280, 0), 0);
    apic.write(0x280, 0, 0);
    assert_eq!(
        apic.read(0x280, 0),
        ERROR_SEND_ILLEGAL | ERROR_RECEIVE_ILLEGAL
    );
    apic.write(0x280, 0, 0);
    assert_eq!(apic.read(0x280, 0), 0);
    apic.read(0x40, 0);
    apic.write(0x280, 0, 0);
    assert_eq!(apic.read(0x280, 0), ERROR_REGISTER);
}

#[test]
fn the_timer_interrupts_in_each_mode() {
    let (mut apic, _) = apic();
    apic.write(0x3e0, 0xb, 0);
    // One-shot.
    apic.write(0x320, 0xec, 0);
    apic.write(0x380, 100, 1000);
    assert_eq!(apic.deadline(), Some(1100));
    assert_eq!(apic.read(0x390, 1040), 60);
    apic.advance(1099);
    assert!(!apic.interrupt_waits());
    apic.advance(1100);
    assert_eq!(apic.take_interrupt(), Some(0xec));
    apic.write(0xb0, 0, 0);
    assert_eq!(apic.deadline(), None);
    // Periodic.
    apic.write(0x320, TIMER_PERIODIC | 0xec, 2000);
    apic.write(0x380, 100_000, 2000);
    for now in [102_000, 202_000, 302_000] {
        apic.advance(now);
        assert_eq!(apic.take_interrupt(), Some(0xec));
        apic.write(0xb0, 0, now);
    }
    // Masked: it counts, but does not interrupt.
    apic.write(0x320, TIMER_PERIODIC | MASKED | 0xec, 302_000);
    apic.advance(402_000);
    assert!(!apic.interrupt_waits());
    // Deadline: changing the mode disarms.
    apic.write(0x320, TIMER_DEADLINE | 0xec, 2400);
    assert_eq!(apic.deadline(), None);
    assert_eq!(apic.read(0x380, 2400), 0);
    apic.write(0x380, 100, 2400);
    assert_eq!(apic.deadline(), None);
    apic.set_deadline_register(5000);
    assert_eq!(apic.deadline_register(), 5000);
    apic.advance(5001);
    assert_eq!(apic.take_interrupt(), Some(0xec));
    assert_eq!(apic.deadline_register(), 0);
    // The counter's rate does not move it.
    apic.set_deadline_register(6000);
    apic.write(0x3e0, 0x3, 5500);
    assert_eq!(apic.deadline(), Some(6000));
    assert_eq!(apic.read(0x3e0, 5500), 0x3);
    // And in a counting mode the deadline register is dead.
    apic.write(0x320, 0xec, 2400);
    apic.set_deadline_register(6000);
    assert_eq!(apic.deadline(), None);
}

#[test]
fn the_base_register_disables_but_does_not_move() {
    let (mut apic, posted) = apic();
    assert!(!apic.set_base(0xfee0_0d00), "x2APIC is not offered");
    assert!(!apic.set_base(0xfed0_0900));
    assert!(!apic.set_base(0xfee0_0800), "it stays the first CPU's");
    assert!(apic.set_base(0xfee0_0100));
    assert_eq!(apic.mode(), Mode::Disabled);
    posted.post(fixed(0x41, false));
    assert!(!apic.interrupt_waits());
    assert!(apic.set_base(0xfee0_0900));
    assert_eq!(apic.read(0xf0, 0), 0xff);
}

#[test]
fn init_keeps_identity_and_mail() {
    let (mut apic, posted) = apic();
    apic.write(0xd0, 4 << 24, 0);
    posted.post(Message::Init);
    posted.post(Message::StartUp { vector: 9 });
    apic.reset();
    assert_eq!(apic.read(0xd0, 0), 0);
    assert!(!posted.matches_logical(4));
    assert_eq!(apic.take_start(), (true, Some(9)));
}

#[test]
fn what_waits_wakes_again_only_after_something_new() {
    let (mut apic, posted) = apic();
    assert!(!apic.wakes());
    for message in [fixed(0x41, false), fixed(0x30, false), Message::NonMaskable] {
        posted.post(message);
        assert!(apic.wakes());
        assert!(!apic.wakes());
    }
    // Collected on another occasion.
    posted.post(fixed(0x42, false));
    apic.interrupt_waits();
    assert!(apic.wakes());
    // The timer's, which comes without a letter.
    apic.write(0x320, TIMER_DEADLINE | 0xec, 0);
    apic.set_deadline_register(5000);
    apic.advance(5000);
    assert!(apic.wakes());
    assert!(!apic.wakes());
    // The CPU went on, and may accept now what it did not accept then.
    assert!(apic.take_non_maskable());
    assert!(apic.wakes());
    assert_eq!(apic.take_interrupt(), Some(0xec));
    assert!(!apic.wakes(), "the others have a lower priority");
    apic.write(0xb0, 0, 0);
    // Nothing stands above an INIT.
    posted.post(Message::Init);
    assert!(apic.wakes());
    assert!(apic.wakes());
}

#[test]
fn what_is_pending_shows_after_a_save_and_a_restore() {
    let messages = [
        fixed(0x41, false),
        Message::NonMaskable,
        Message::Init,
        Message::StartUp { vector: 8 },
    ];
    for message in messages {
        let (mut apic, posted) = apic();
        apic.save();
        assert!(!posted.has_pending());
        posted.post(message);
        let state = apic.save();
        assert!(posted.has_pending());
        assert_eq!(apic.save(), state);
        let posted = Arc::new(PostedInterrupts::default());
        let mut other = LocalApic::new(0, true, posted.clone(), TimeBase::new(1_000_000_000));
        other.restore(state.clone());
        assert!(posted.has_pending());
        assert_eq!(other.save(), state);
    }
}

#[test]
fn its_state_survives_as_text_with_pending_events() {
    let (mut apic, posted) = apic();
    apic.write(0x320, TIMER_DEADLINE | 0xec, 0);
    apic.set_deadline_register(5000);
    posted.post(fixed(0x61, true));
    assert_eq!(apic.take_interrupt(), Some(0x61));
    posted.post(fixed(0x71, false));
    posted.post(Message::NonMaskable);
    let text = serde_json::to_string(&apic.save()).unwrap();

    let other_seat = Arc::new(PostedInterrupts::default());
    other_seat.post(fixed(0x99, false));
    let mut other = LocalApic::new(0, true, other_seat, TimeBase::new(1_000_000_000));
    other.restore(serde_json::from_str(&text).unwrap());
    assert!(other.take_non_maskable());
    assert_eq!(other.take_interrupt(), Some(0x71));
    other.write(0xb0, 0, 0);
    assert_eq!(other.write(0xb0, 0, 0), Outcome::EndOfInterrupt(0x61));
    other.advance(5000);
    assert_eq!(other.take_interrupt(), Some(0xec));
}

#[test]
fn no_access_panics() {
    let (mut apic, _) = apic();
    for offset in (0..0x1000).chain([u64::MAX, 1 << 40]) {
        for value in [0, 1, 0x700ff, u32::MAX] {
            apic.write(offset, value, u64::MAX);
            apic.read(offset, u64::MAX);
            apic.advance(u64::MAX);
        }
    }
}
