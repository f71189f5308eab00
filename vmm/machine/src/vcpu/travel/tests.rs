use std::sync::Arc;

use super::*;
use weft_platform::clock::TimeBase;
use weft_platform::interrupts::{LocalApic, PostedInterrupts};

fn fixed(vector: u8, level: bool) -> Message {
    Message::Fixed { vector, level }
}

fn traveller() -> Traveller {
    let posted = Arc::<PostedInterrupts>::default();
    let mut apic = LocalApic::new(7, false, posted, TimeBase::new(2_000_000_000));
    apic.write(0xf0, 0x1ff, 0);
    apic.write(0x320, 1 << 18 | 0xec, 0);
    apic.set_deadline_register(0x0123_4567_89ab_cdef);
    let mut cpu = CpuState::started_at(0x9a);
    cpu.halted = true;
    Traveller {
        state: VcpuState {
            version: Version,
            cpu,
            apic: apic.save(),
            system_time: 0x1001,
            wall_clock: 0x3000,
            waits_for_start_up: true,
        },
        pending: vec![
            Message::Init,
            Message::StartUp { vector: 0x9a },
            Message::NonMaskable,
            fixed(0x31, true),
            fixed(0xfb, false),
        ],
        identity: 0x0204,
        guest_tsc: u64::MAX - 5,
        luggage: vec![1, 2, 3],
    }
}

#[test]
fn all_of_a_vcpu_survives_the_way() {
    let mut traveller = traveller();
    assert_eq!(
        Traveller::decode(&traveller.encode()),
        Ok(traveller.clone())
    );
    traveller.pending = (0..=255)
        .map(|vector| fixed(vector, vector % 2 == 0))
        .collect();
    traveller.state.waits_for_start_up = false;
    assert_eq!(Traveller::decode(&traveller.encode()), Ok(traveller));
}

/// The vCPU's thread would wait for years for a TSC that a broken slice sent.
#[test]
fn a_tsc_far_ahead_is_refused() {
    const HZ: u64 = 2_000_000_000;
    let base = TimeBase::new(HZ);
    let mut traveller = traveller();
    for now in [0, 5, 1 << 63, u64::MAX - 5] {
        for (ahead, is_allowed) in [
            (0, true),
            (HZ / 1000, true),
            (HZ + HZ / 1000, false),
            (1 << 62, false),
            (HZ.wrapping_neg(), true),
        ] {
            traveller.guest_tsc = now.wrapping_add(ahead);
            let checked = traveller.check_time(now, base);
            assert_eq!(checked.is_ok(), is_allowed, "{now} + {ahead}: {checked:?}");
        }
    }
}

#[test]
fn no_bytes_are_more_than_refused() {
    let whole = traveller().encode();
    for length in 0..whole.len() {
        assert!(Traveller::decode(&whole[..length]).is_err());
    }
    for place in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[place] = damaged[place].wrapping_add(0x5d);
        // What it becomes is a vCPU or an error.
        let _ = Traveller::decode(&damaged);
    }
    let mut wrong = whole.clone();
    // The first pending message: an INIT with a vector.
    wrong[13] = 9;
    assert_eq!(
        Traveller::decode(&wrong),
        Err(EncodingError::Value("pending"))
    );
}

/// The timer's deadline is the guest's: at the target it fires when it would have.
#[test]
fn a_timer_fires_at_its_own_time() {
    let posted = Arc::<PostedInterrupts>::default();
    let mut apic = LocalApic::new(7, false, posted.clone(), TimeBase::new(2_000_000_000));
    // What came before the vCPU itself stays.
    posted.post(Message::NonMaskable);
    apic.arrive(traveller().state.apic);
    assert!(apic.take_non_maskable());
    let deadline = 0x0123_4567_89ab_cdef;
    assert_eq!(apic.deadline(), Some(deadline));
    apic.advance(deadline - 1);
    assert_eq!(apic.take_interrupt(), None);
    apic.advance(deadline);
    assert_eq!(apic.take_interrupt(), Some(0xec));
}
