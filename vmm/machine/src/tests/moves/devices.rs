//! The platform moves while the vCPUs use it. vCPU 0 writes a sequence of bytes to the serial
//! port, vCPU 1 takes the interrupts of the port and of the power button. So a byte, a press or
//! a register that is lost or comes twice is seen.

use weft_guest_memory::IO_APIC;
use weft_platform::acpi::EVENT_LINE;

use super::*;
use crate::move_report::PlatformMoveReport;

/// Vectors of the power button, which is a level, and of the serial port, which is an edge.
pub(super) const POWER: u8 = 0x51;
pub(super) const SERIAL: u8 = 0x54;
const COM1: u16 = 0x3f8;
const EVENTS: u16 = 0x603;
const LEVEL: u32 = 1 << 15;
/// Times that the platform moves in a test.
const MOVES: usize = 60;

/// An output that the machine must not use.
pub(super) struct Unused;

impl Write for Unused {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        panic!("{bytes:?} on a slice without a console")
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn route(environment: &mut dyn Environment, pin: u32, low: u32) {
    for (index, value) in [(0x11 + 2 * pin, 1 << 24), (0x10 + 2 * pin, low)] {
        environment.mmio_write(IO_APIC, &index.to_le_bytes());
        environment.mmio_write(IO_APIC + 0x10, &value.to_le_bytes());
    }
}

/// Both interrupts go to vCPU 1, and the serial port interrupts when bytes arrive.
pub(super) fn begin(environment: &mut dyn Environment) {
    route(environment, EVENT_LINE, LEVEL | u32::from(POWER));
    route(environment, 4, SERIAL.into());
    environment.port_write(COM1 + 1, &[1]);
}

/// Writes the next byte of the sequence.
pub(super) fn write(judge: &Judge, environment: &mut dyn Environment) {
    let number = judge.written.load(Ordering::SeqCst);
    environment.port_write(COM1, &[byte(number)]);
    judge.written.fetch_add(1, Ordering::SeqCst);
}

/// No short period, so that a piece which is lost or repeated shows.
fn byte(number: u64) -> u8 {
    (number % 251) as u8
}

pub(super) fn see_button(judge: &Judge, environment: &mut dyn Environment) {
    let mut events = [0];
    environment.port_read(EVENTS, &mut events);
    if events == [1] {
        judge.presses.fetch_add(1, Ordering::SeqCst);
    } else {
        judge.fault(format!("an event without a press: {events:?}"));
    }
    environment.mmio_write(LOCAL_APIC + 0xb0, &[0; 4]);
}

pub(super) fn read(judge: &Judge, environment: &mut dyn Environment) {
    judge.reads.store(true, Ordering::SeqCst);
    loop {
        let (mut status, mut typed) = ([0], [0]);
        environment.port_read(COM1 + 5, &mut status);
        if status[0] & 1 == 0 {
            return judge.reads.store(false, Ordering::SeqCst);
        }
        environment.port_read(COM1, &mut typed);
        judge.typed.lock().unwrap().push(typed[0]);
    }
}

/// Waits until it is so.
pub(super) fn wait(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

impl Slices {
    pub(crate) fn with_devices(cpus: &[u32], late: Option<usize>) -> Self {
        let judge = Judge {
            uses_devices: true,
            ..Judge::default()
        };
        Self::with(cpus, judge, late, &[])
    }

    pub(crate) fn move_platform(&self, to: usize) -> Result<PlatformMoveReport, Refusal> {
        self.machines[0].handle().move_platform(to)
    }

    /// Presses the button, and waits until the guest has seen it.
    pub(crate) fn press(&self, presses: u64) {
        ask(&self.machines[0], MachineRequest::PressPowerButton);
        let seen = || self.judge.presses.load(Ordering::SeqCst);
        wait("the button", || seen() >= presses);
        assert_eq!(seen(), presses);
    }

    /// What was written is on the console, in order and once.
    pub(crate) fn check_console(&self) {
        let written = self.judge.written.load(Ordering::SeqCst);
        let shown = self.console.bytes();
        let right = (0..).zip(&shown).all(|(at, shown)| *shown == byte(at));
        assert!(right, "{shown:?}");
        // Those that were counted were shown before.
        assert!(shown.len() as u64 >= written);
    }
}

#[test]
fn the_platform_moves_while_the_guest_uses_it() {
    for (cpus, late) in [
        (&[1, 1][..], None),
        (&[1, 1, 0], None),
        (&[0, 1, 1], Some(1)),
    ] {
        let slices = Slices::with_devices(cpus, late);
        let handle = slices.machines[0].handle();
        let all: Vec<u8> = (0..40_000_u32).map(|number| (number % 253) as u8).collect();
        let judge = slices.judge.clone();
        let over = Arc::new(AtomicBool::new(false));
        let typist = std::thread::spawn({
            let over = over.clone();
            let all = all.clone();
            move || {
                let mut typed = 0;
                let begun = Instant::now();
                // On a host that is busy the moves may be over before the first byte is typed.
                let goes_on = |typed| match over.load(Ordering::SeqCst) {
                    false => typed < all.len(),
                    true => typed == 0 && begun.elapsed() < 3 * PATIENCE,
                };
                while goes_on(typed) {
                    // A guest that always finds more to read never comes to a boundary.
                    let has_all = judge.typed.lock().unwrap().len() >= typed;
                    if has_all && !judge.reads.load(Ordering::SeqCst) {
                        typed += handle.serial_input(&all[typed..all.len().min(typed + 20)]);
                    }
                    std::thread::sleep(Duration::from_micros(300));
                }
                // The last attempt is answered by a port that is not asked any more.
                let until = Instant::now() + PATIENCE;
                while judge.typed.lock().unwrap().len() < typed {
                    assert!(Instant::now() < until, "{typed} were typed");
                    std::thread::sleep(Duration::from_micros(300));
                }
                typed
            }
        });
        let mut from = 0;
        for round in 0..MOVES {
            let to = (from + 1 + round % (cpus.len() - 1)) % cpus.len();
            let paused = round % 3 == 2;
            if paused {
                ask(&slices.machines[0], MachineRequest::Pause);
            }
            let report = slices.move_platform(to).unwrap();
            assert_eq!((report.from, report.to), (from, to));
            assert_eq!(report.epoch, round as u64 + 1);
            assert_eq!(report.stopped_ns == 0, paused);
            if paused {
                assert_eq!(status(&slices.machines[0]).stage, Stage::Paused);
                // A save finds the platform wherever it is.
                let state = save(&slices.machines[0]);
                let parts: Vec<_> = state.parts.keys().map(String::as_str).collect();
                for part in ["clock", "cmos", "io-apic", "pci", "power", "serial"] {
                    assert!(parts.contains(&part), "{parts:?}");
                }
                ask(&slices.machines[0], MachineRequest::Resume);
            }
            slices.press(round as u64 + 1);
            if round % 10 == 0 {
                slices.check();
                slices.check_console();
                let at = slices.locations()[1];
                slices.move_vcpu(1, (at + 1) % cpus.len()).unwrap();
            }
            from = to;
        }
        slices.check();
        over.store(true, Ordering::SeqCst);
        let typed = typist.join().unwrap();
        let read = slices.judge.typed.lock().unwrap().clone();
        assert!(
            typed > 0,
            "nothing was typed, {} bytes were read; on {cpus:?}, platform at {from}, reading: {:?}",
            read.len(),
            slices.judge.reads
        );
        assert!(
            read.len() >= typed && read[..] == all[..read.len()],
            "{typed} typed"
        );
        ask(&slices.machines[0], MachineRequest::Pause);
        let written = slices.judge.written.load(Ordering::SeqCst) as usize;
        assert_eq!(slices.console.bytes().len(), written);
        slices.check_console();
    }
}

#[test]
fn a_platform_that_cannot_move_stays() {
    let slices = Slices::with_devices(&[1, 1], None);
    for (to, words) in [
        (0, "node 0 has the platform already"),
        (2, "node 2 does not exist: there are 0, 1"),
    ] {
        let refused = slices.move_platform(to).unwrap_err();
        assert!(matches!(refused, Refusal::Impossible { .. }), "{refused}");
        assert!(refused.to_string().contains(words), "{refused}");
    }
    let secondary = slices.machines[1].handle();
    let refused = secondary.move_platform(0).unwrap_err();
    assert!(matches!(refused, Refusal::Impossible { .. }), "{refused}");
    slices.press(1);
    slices.check();
    // What is saved now cannot be restored where the platform is not.
    slices.move_platform(1).unwrap();
    ask(&slices.machines[0], MachineRequest::Pause);
    let state = save(&slices.machines[0]);
    let restore = MachineRequest::Restore(Box::new(state));
    let refused = slices.machines[0].handle().request(restore).unwrap_err();
    assert!(
        refused.to_string().contains("node 1 has the platform"),
        "{refused}"
    );
    ask(&slices.machines[0], MachineRequest::Resume);
    slices.press(2);
    slices.check();
    let (machine, _) = Rig::new(1).built();
    let moved = || machine.handle().move_platform(1).unwrap_err();
    assert!(matches!(moved(), Refusal::Stage { .. }));
    ask(&machine, MachineRequest::Run);
    assert!(moved().to_string().contains("one node only"), "{}", moved());
}

#[test]
fn a_platform_that_is_lost_ends_the_machine_with_its_name() {
    for round in 0..6 {
        let mut slices = Slices::with_devices(&[1, 1, 0], None);
        let handle = slices.machines[0].handle();
        // It goes to and fro until it cannot.
        let mover = std::thread::spawn(move || {
            for number in 1_usize.. {
                if let Err(refusal) = handle.move_platform([0, 2, 1][number % 3]) {
                    return refusal.to_string();
                }
            }
            unreachable!()
        });
        slices.judge.wait_for(round);
        drop(slices.machines.remove(2));
        let refusal = mover.join().unwrap();
        let end = slices.machines[0].handle().wait(PATIENCE).unwrap();
        // It says so itself, or is found to be gone.
        let told = end == End::Stopped || end.to_string().contains("node 2");
        assert!(told, "{end}: {refusal}");
    }
}
