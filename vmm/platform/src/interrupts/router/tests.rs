use super::*;
use crate::clock::TimeBase;
use crate::interrupts::LocalApic;

struct Rig {
    router: Arc<InterruptRouter>,
    apics: Vec<LocalApic>,
}

impl Rig {
    fn new(cpus: u32) -> Self {
        let router = InterruptRouter::new(cpus);
        let time = TimeBase::new(1_000_000_000);
        let apics = (0..cpus)
            .map(|id| {
                let posted = router.posted(id).unwrap().clone();
                let mut apic = LocalApic::new(id as u8, id == 0, posted, time);
                apic.write(0xf0, 0x1ff, 0);
                apic.write(0xd0, 1 << (24 + id), 0);
                apic
            })
            .collect();
        Self { router, apics }
    }

    fn send(&self, delivery: Delivery, destination: Destination, sender: Option<u32>) {
        let interrupt = Interrupt {
            vector: 0x55,
            delivery,
            destination,
            level: false,
        };
        self.router.send(&interrupt, sender);
    }

    /// Which vCPUs have an interrupt; takes and ends it.
    fn receivers(&mut self) -> Vec<u32> {
        let mut found = Vec::new();
        for (id, apic) in self.apics.iter_mut().enumerate() {
            if apic.take_interrupt() == Some(0x55) {
                apic.write(0xb0, 0, 0);
                found.push(id as u32);
            }
        }
        found
    }
}

#[test]
fn fixed_interrupts_reach_all_that_are_named() {
    let mut rig = Rig::new(4);
    for (destination, expected) in [
        (Destination::Physical(2), vec![2]),
        (Destination::of_8_bits(0xff, false), vec![0, 1, 2, 3]),
        (Destination::Physical(0xff), vec![]),
        (Destination::Physical(9), vec![]),
        (Destination::Logical(0b1010), vec![1, 3]),
        (Destination::Oneself, vec![1]),
        (Destination::Everybody, vec![0, 1, 2, 3]),
        (Destination::Others, vec![0, 2, 3]),
    ] {
        rig.send(Delivery::Fixed, destination, Some(1));
        assert_eq!(rig.receivers(), expected, "{destination:?}");
    }
}

#[test]
fn cluster_mode_names_by_cluster() {
    let mut rig = Rig::new(4);
    for (id, apic) in rig.apics.iter_mut().enumerate() {
        apic.write(0xe0, 0x0fff_ffff, 0);
        let cluster = (id as u32 / 2) << 4;
        apic.write(0xd0, (cluster | 1 << (id % 2)) << 24, 0);
    }
    rig.send(Delivery::Fixed, Destination::Logical(0x13), None);
    assert_eq!(rig.receivers(), [2, 3]);
    rig.send(Delivery::Fixed, Destination::Logical(0x02), None);
    assert_eq!(rig.receivers(), [1]);
}

#[test]
fn lowest_priority_goes_to_the_least_busy_and_takes_turns() {
    let mut rig = Rig::new(3);
    rig.apics[0].set_task_priority(5);
    rig.apics[1].set_task_priority(2);
    rig.apics[2].set_task_priority(4);
    rig.send(Delivery::LowestPriority, Destination::Logical(0xff), None);
    assert_eq!(rig.receivers(), [1]);
    for apic in &mut rig.apics {
        apic.set_task_priority(0);
    }
    let mut seen = Vec::new();
    for _ in 0..3 {
        rig.send(Delivery::LowestPriority, Destination::Logical(0x07), None);
        seen.extend(rig.receivers());
    }
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2]);
}

#[test]
fn non_maskable_init_and_start_up_arrive_as_such() {
    let mut rig = Rig::new(2);
    rig.send(Delivery::Nmi, Destination::Others, Some(0));
    rig.send(Delivery::Init, Destination::Physical(1), Some(0));
    rig.send(Delivery::StartUp, Destination::Physical(1), Some(0));
    assert!(rig.apics[1].take_non_maskable());
    assert!(!rig.apics[0].take_non_maskable());
    assert_eq!(rig.apics[1].take_start(), (true, Some(0x55)));
    assert_eq!(rig.apics[1].take_start(), (false, None));
    rig.send(Delivery::Smi, Destination::Everybody, None);
    rig.send(Delivery::External, Destination::Everybody, None);
    assert_eq!(rig.receivers(), [0_u32; 0]);
    assert_eq!(rig.router.counters.dropped.load(Ordering::Relaxed), 2);
}

#[test]
fn a_level_line_comes_again_after_its_end_until_it_is_low() {
    let mut rig = Rig::new(1);
    let pin = rig.router.pin(9).unwrap();
    assert!(rig.router.pin(PINS).is_none());
    for (register, value) in [(0x22_u32, 0x8055_u32), (0x23, 0)] {
        BusDevice::write(&*rig.router, 0, &register.to_le_bytes());
        BusDevice::write(&*rig.router, 0x10, &value.to_le_bytes());
    }
    pin.set(true);
    for _ in 0..3 {
        let apic = &mut rig.apics[0];
        assert_eq!(apic.take_interrupt(), Some(0x55));
        assert!(!apic.interrupt_waits());
        let crate::interrupts::Outcome::EndOfInterrupt(vector) = apic.write(0xb0, 0, 0) else {
            panic!("the end of a level-triggered interrupt is told");
        };
        rig.router.end_of_interrupt(vector, 0);
    }
    pin.set(false);
    let apic = &mut rig.apics[0];
    assert_eq!(apic.take_interrupt(), Some(0x55));
    apic.write(0xb0, 0, 0);
    rig.router.end_of_interrupt(0x55, 0);
    assert!(!apic.interrupt_waits());
}

#[test]
fn a_level_that_nobody_took_comes_when_somebody_can_take_it() {
    let mut rig = Rig::new(1);
    let pin = rig.router.pin(9).unwrap();
    let program = |rig: &Rig, low: u32, high: u32| {
        for (register, value) in [(0x23_u32, high), (0x22, low)] {
            BusDevice::write(&*rig.router, 0, &register.to_le_bytes());
            BusDevice::write(&*rig.router, 0x10, &value.to_le_bytes());
        }
    };
    // No such vCPU; a logical destination that is nobody's; lowest priority too.
    for (low, high) in [
        (0x8055, 5 << 24),
        (0x8855, 0x80 << 24),
        (0x8955, 0x80 << 24),
    ] {
        program(&rig, low, high);
        pin.set(true);
        program(&rig, 0x8055, 0);
        assert_eq!(rig.apics[0].take_interrupt(), Some(0x55));
        pin.set(false);
        rig.apics[0].write(0xb0, 0, 0);
        rig.router.end_of_interrupt(0x55, 0);
    }
    // A local APIC that is disabled, by software or altogether.
    for by_base in [false, true] {
        if by_base {
            rig.apics[0].set_base(0xfee0_0100);
        } else {
            rig.apics[0].write(0xf0, 0xff, 0);
        }
        pin.set(true);
        rig.apics[0].set_base(0xfee0_0900);
        rig.apics[0].write(0xf0, 0x1ff, 0);
        assert!(!rig.apics[0].interrupt_waits());
        program(&rig, 0x8055, 0);
        assert_eq!(rig.apics[0].take_interrupt(), Some(0x55));
        pin.set(false);
        rig.apics[0].write(0xb0, 0, 0);
        rig.router.end_of_interrupt(0x55, 0);
    }
}

#[test]
fn the_window_answers_by_bytes_too_and_survives_nonsense() {
    let rig = Rig::new(1);
    BusDevice::write(&*rig.router, 0, &[1]);
    let mut data = [0; 2];
    BusDevice::read(&*rig.router, 0x12, &mut data);
    assert_eq!(data, [0x17, 0]);
    for offset in 0..0x1000 {
        BusDevice::write(&*rig.router, offset, &[0xff; 8]);
        BusDevice::read(&*rig.router, offset, &mut [0; 8]);
    }
}

#[test]
fn message_signalled_interrupts_go_through() {
    let mut rig = Rig::new(2);
    MessageSink::send(&*rig.router, 0xfee0_1000, 0x55);
    assert_eq!(rig.receivers(), [1]);
    MessageSink::send(&*rig.router, 0x1000, 0x55);
    assert_eq!(rig.receivers(), [0_u32; 0]);
}

#[test]
fn interrupts_from_many_threads_all_arrive() {
    let mut rig = Rig::new(1);
    const EACH: u64 = 20_000;
    let senders: Vec<_> = (0..2_u8)
        .map(|sender| {
            let router = rig.router.clone();
            std::thread::spawn(move || {
                for round in 0..EACH {
                    let vector = 0x30 + (sender << 6) + (round % 32) as u8;
                    router.deliver(
                        0,
                        Message::Fixed {
                            vector,
                            level: false,
                        },
                        None,
                    );
                }
            })
        })
        .collect();
    let apic = &mut rig.apics[0];
    let mut seen = std::collections::BTreeSet::new();
    let mut take = |apic: &mut LocalApic| {
        while let Some(vector) = apic.take_interrupt() {
            seen.insert(vector);
            apic.write(0xb0, 0, 0);
        }
    };
    while !senders.iter().all(|sender| sender.is_finished()) {
        take(apic);
    }
    take(apic);
    assert_eq!(seen.len(), 64);
    for sender in senders {
        sender.join().unwrap();
    }
}
