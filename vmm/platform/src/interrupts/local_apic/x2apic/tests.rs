use std::sync::Arc;

use super::super::{LocalApic, MASKED, Mode, Outcome};
use super::COUNT;
use crate::clock::TimeBase;
use crate::interrupts::message::{Delivery, Destination, Interrupt, Message};
use crate::interrupts::posted::PostedInterrupts;

const DISABLED: u64 = 0xfee0_0000;
const XAPIC: u64 = 0xfee0_0800;
const INVALID: u64 = 0xfee0_0400;
const X2APIC: u64 = 0xfee0_0c00;

/// The local APIC 0x24 in xAPIC mode, enabled by software.
fn apic() -> (LocalApic, Arc<PostedInterrupts>) {
    let posted = Arc::new(PostedInterrupts::default());
    let mut apic = LocalApic::new(0x24, false, posted.clone(), TimeBase::new(1_000_000_000));
    apic.offer_x2apic();
    apic.write(0xf0, 0x1ff, 0);
    (apic, posted)
}

fn extended() -> (LocalApic, Arc<PostedInterrupts>) {
    let (mut apic, posted) = apic();
    assert!(apic.set_base(X2APIC));
    (apic, posted)
}

/// Brings a local APIC into the mode of a base.
fn in_mode(base: u64) -> LocalApic {
    let (mut apic, _) = apic();
    assert!(apic.set_base(base));
    apic
}

#[test]
fn modes_follow_one_another_as_the_manual_says() {
    let legal = [
        (DISABLED, [true, true, false, false]),
        (XAPIC, [true, true, true, false]),
        (X2APIC, [true, false, true, false]),
    ];
    for (from, taken) in legal {
        for (to, taken) in [DISABLED, XAPIC, X2APIC, INVALID].into_iter().zip(taken) {
            let mut apic = in_mode(from);
            assert_eq!(apic.set_base(to), taken, "{from:#x} to {to:#x}");
            assert_eq!(apic.base(), if taken { to } else { from });
        }
    }
}

#[test]
fn the_registers_stay_but_for_what_the_mode_defines() {
    let (mut apic, posted) = apic();
    apic.write(0x80, 0x35, 0);
    apic.write(0x320, 0xec, 0);
    apic.write(0x310, 7 << 24, 0);
    apic.write(0xd0, 4 << 24, 0);
    assert!(posted.matches_logical(4));
    assert!(apic.set_base(X2APIC));
    assert_eq!(apic.read_msr(0x802, 0), Some(0x24));
    assert_eq!(apic.read_msr(0x808, 0), Some(0x35));
    assert_eq!(apic.read_msr(0x80d, 0), Some(0x2_0010));
    assert_eq!(apic.read_msr(0x80f, 0), Some(0x1ff));
    assert_eq!(apic.read_msr(0x830, 0), Some(0));
    assert_eq!(apic.read_msr(0x832, 0), Some(0xec));
    assert!(posted.matches_logical(0x2_0010) && !posted.matches_logical(4));
    // INIT keeps the mode; a way out is by way of Disabled, which forgets all.
    apic.reset();
    assert_eq!(apic.mode(), Mode::X2Apic);
    assert_eq!(apic.read_msr(0x80d, 0), Some(0x2_0010));
    assert!(apic.set_base(DISABLED) && apic.set_base(XAPIC));
    assert_eq!(apic.read(0x320, 0), MASKED);
    assert_eq!(apic.read(0x20, 0), 0x24 << 24);
}

#[test]
fn msrs_answer_in_their_mode_alone() {
    for base in [DISABLED, XAPIC] {
        let mut apic = in_mode(base);
        for index in 0x800..0x900 {
            assert_eq!(apic.read_msr(index, 0), None, "{index:#x}");
            assert_eq!(apic.write_msr(index, 0, 0), None, "{index:#x}");
        }
    }
}

/// Intel SDM volume 3, table 11-6.
#[test]
fn what_is_not_there_is_a_fault() {
    let (mut apic, _) = extended();
    let readable = |index| {
        matches!(index, 0x802 | 0x803 | 0x808 | 0x80a | 0x80d | 0x80f)
            || (0x810..=0x828).contains(&index)
            || matches!(index, 0x830 | 0x832..=0x839 | 0x83e)
    };
    let writable = |index| {
        matches!(index, 0x808 | 0x80b | 0x80f | 0x828 | 0x830)
            || matches!(index, 0x832..=0x838 | 0x83e | 0x83f)
    };
    for index in 0x800..0x800 + COUNT {
        let read = apic.read_msr(index, 0);
        assert_eq!(read.is_some(), readable(index), "reading {index:#x}");
        let written = apic.write_msr(index, 0, 0);
        assert_eq!(written.is_some(), writable(index), "writing {index:#x}");
        apic.write_msr(0x80f, 0x1ff, 0);
        if index != 0x830 {
            assert_eq!(apic.write_msr(index, 1 << 32, 0), None, "{index:#x}");
        }
    }
    let reserved = [
        (0x808, 0x100),
        (0x80b, 1),
        (0x80f, 1 << 12),
        (0x828, 1),
        (0x830, 1 << 13),
        (0x830, 1 << 16),
        (0x830, 1 << 20),
        (0x832, 1 << 19),
        (0x837, 1 << 17),
        (0x83e, 4),
        (0x83f, 0x100),
    ];
    for (index, value) in reserved {
        assert_eq!(apic.write_msr(index, value, 0), None, "{index:#x}");
    }
    assert_eq!(apic.write_msr(0x832, 0x400ec, 0), Some(Outcome::Done));
    assert_eq!(apic.read_msr(0x832, 0), Some(0x400ec));
}

#[test]
fn commands_have_64_bits() {
    let (mut apic, _) = extended();
    let mut send = |value| match apic.write_msr(0x830, value, 0) {
        Some(Outcome::Send(interrupt)) => interrupt,
        other => panic!("{other:?}"),
    };
    for (value, destination) in [
        (0x0000_0003_0000_4041, Destination::Physical(3)),
        // No local APIC has it, and it is nobody else's.
        (0x0000_00ff_0000_4041, Destination::Physical(0xff)),
        (0x0002_0010_0000_4841, Destination::Logical(0x2_0010)),
        (0xffff_ffff_0000_4041, Destination::Everybody),
        (0xffff_ffff_0000_4841, Destination::Everybody),
        (0x0000_0003_000c_4041, Destination::Others),
    ] {
        let sent = send(value);
        assert_eq!(sent.destination, destination);
        assert_eq!((sent.vector, sent.delivery), (0x41, Delivery::Fixed));
    }
    assert_eq!(apic.read_msr(0x830, 0), Some(0x0000_0003_000c_4041));
    let oneself = Interrupt {
        vector: 0x77,
        delivery: Delivery::Fixed,
        destination: Destination::Oneself,
        level: false,
    };
    assert_eq!(apic.write_msr(0x83f, 0x77, 0), Some(Outcome::Send(oneself)));
    // An illegal vector is noted, not sent.
    assert_eq!(apic.write_msr(0x83f, 0xf, 0), Some(Outcome::Done));
    apic.write_msr(0x828, 0, 0);
    assert_eq!(apic.read_msr(0x828, 0), Some(1 << 5));
}

#[test]
fn interrupts_are_taken_and_ended() {
    let (mut apic, posted) = extended();
    let level = true;
    posted.post(Message::Fixed {
        vector: 0x61,
        level,
    });
    assert_eq!(apic.read_msr(0x823, 0), Some(2));
    assert_eq!(apic.take_interrupt(), Some(0x61));
    assert_eq!(apic.read_msr(0x813, 0), Some(2));
    assert_eq!(apic.read_msr(0x81b, 0), Some(2));
    assert_eq!(apic.read_msr(0x80a, 0), Some(0x60));
    assert_eq!(
        apic.write_msr(0x80b, 0, 0),
        Some(Outcome::EndOfInterrupt(0x61))
    );
    assert_eq!(apic.read_msr(0x813, 0), Some(0));
}

#[test]
fn the_mode_goes_with_the_state() {
    let (mut apic, _) = extended();
    let (mut other, posted) = self::apic();
    other.restore(apic.save());
    assert_eq!(other.read_msr(0x802, 0), Some(0x24));
    assert!(posted.matches_logical(0x2_0010));
}
