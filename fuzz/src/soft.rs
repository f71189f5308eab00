//! The software vCPU against guests that may be anything: its code, its
//! registers, its page tables.
//!
//! Guests run interpreted, and translated from the first execution on. Counted by
//! instructions, both must end in the same state, with the same memory, after
//! the same calls of devices.

use crate::random::Random;
use crate::soft_guest::{GDT, HANDLERS, HANDLERS_END, IDT, Input, LEGACY_TABLES, TABLES, guest};
use crate::soft_memory::{SIZE, Scattered};
use std::cell::RefCell;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use weft_vcpu::{CpuState, Environment, Exit, Kick as _};
use weft_vcpu_soft::{Configuration, Kick, SoftCpu, SoftMachine};

pub use crate::soft_guest::valid as valid_code;
pub use crate::soft_walk::{valid as valid_tables, walk};

/// Arithmetic flags in RFLAGS.
const ARITHMETIC: u64 = 0x8d5;
/// Accessed and dirty in an entry's first byte.
const ACCESSED_DIRTY: u8 = 0x60;
/// Instructions that a guest may execute.
const BUDGET: u64 = 600;
/// How long it may take before it is kicked, and before it is taken for hung.
const PATIENCE: Duration = Duration::from_millis(20);
const HUNG: Duration = Duration::from_secs(10);

/// The running vCPU, and since when.
static RUNNING: LazyLock<Mutex<Option<(Instant, Kick)>>> = LazyLock::new(|| {
    std::thread::spawn(watch);
    Mutex::new(None)
});

/// Kicks what runs for too long: a repeated instruction, or faults without end.
fn watch() {
    loop {
        std::thread::sleep(PATIENCE / 4);
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((since, kick)) = &*running else {
            continue;
        };
        if since.elapsed() > HUNG {
            eprintln!("the vCPU does not answer a kick");
            std::process::abort();
        }
        if since.elapsed() > PATIENCE {
            kick.kick();
        }
    }
}

/// Devices whose answers depend on what was asked before; with `interrupts`, one
/// after each write to one of every four ports. Not where runs are compared:
/// translated code looks for interrupts less often.
#[derive(Clone, Debug, Default, PartialEq)]
struct Devices {
    seen: u64,
    now: u64,
    interrupts: bool,
    interrupt: Option<u8>,
    priority: u8,
}

impl Devices {
    fn see(&mut self, what: u64) -> u64 {
        let mut random = Random::new(self.seen ^ what);
        self.seen = random.next() ^ self.now;
        self.seen
    }

    fn see_bytes(&mut self, what: u64, data: &[u8]) {
        self.see(what);
        for byte in data {
            self.see(u64::from(*byte));
        }
    }

    fn answer(&mut self, what: u64, data: &mut [u8]) {
        for byte in data {
            *byte = self.see(what) as u8;
        }
    }
}

impl Environment for Devices {
    fn set_now(&mut self, tsc: u64) {
        self.now = tsc;
    }

    fn mmio_read(&mut self, address: u64, data: &mut [u8]) {
        self.answer(address, data);
    }

    fn mmio_write(&mut self, address: u64, data: &[u8]) {
        // Not the bytes: a stack may be here, and translated code's flags on it.
        self.see(address ^ (data.len() as u64) << 56);
    }

    fn port_read(&mut self, port: u16, data: &mut [u8]) {
        self.answer(u64::from(port), data);
    }

    fn port_write(&mut self, port: u16, data: &[u8]) {
        self.see_bytes(u64::from(port), data);
        if self.interrupts && port.is_multiple_of(4) {
            self.interrupt = Some(0x20 | port as u8);
        }
    }

    fn msr_read(&mut self, index: u32) -> Option<u64> {
        (index == 0x1b).then_some(0xfee0_0900)
    }

    fn msr_write(&mut self, index: u32, value: u64) -> bool {
        self.see(value);
        index == 0x1b
    }

    fn interrupt_waits(&mut self) -> bool {
        self.interrupt.is_some()
    }

    fn interrupt_take(&mut self) -> Option<u8> {
        self.interrupt.take()
    }

    fn nmi_take(&mut self) -> bool {
        false
    }

    fn task_priority(&mut self) -> u8 {
        self.priority
    }

    fn set_task_priority(&mut self, priority: u8) {
        self.priority = priority;
    }
}

struct Side {
    memory: Arc<Scattered>,
    machine: Arc<SoftMachine>,
    cpu: SoftCpu,
    devices: Devices,
}

impl Side {
    fn new(deterministic: bool) -> Self {
        let memory = Scattered::new();
        let machine = SoftMachine::new(memory.clone());
        let configuration = Configuration {
            cpus: 1,
            tsc_frequency: 1_000_000_000,
            deterministic,
            ..Configuration::default()
        };
        let mut cpu = SoftCpu::new(&machine, configuration).expect("memory for a vCPU");
        cpu.translate_after(1);
        Self {
            memory,
            machine,
            cpu,
            devices: Devices::default(),
        }
    }

    fn run(&mut self, image: &[u8], state: &CpuState, budget: Option<u64>) -> Exit {
        self.memory.fill(image);
        self.machine.written(0..SIZE);
        self.cpu.restore(state);
        self.cpu.set_budget(budget);
        self.devices = Devices {
            interrupts: budget.is_none(),
            ..Devices::default()
        };
        let running = (Instant::now(), self.cpu.kicker());
        let set = |value| *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) = value;
        set(Some(running));
        let exit = self.cpu.run(&mut self.devices);
        set(None);
        exit
    }
}

/// The same guest three times: interpreted, translated, and translated without
/// instructions being counted.
struct Sides {
    interpreted: Side,
    translated: Side,
    free: Side,
}

thread_local! {
    static SIDES: RefCell<Sides> = RefCell::new(Sides::new());
}

impl Sides {
    fn new() -> Self {
        let mut interpreted = Side::new(true);
        interpreted.cpu.interpret_only();
        Self {
            interpreted,
            translated: Side::new(true),
            free: Side::new(false),
        }
    }

    fn run(&mut self, image: &[u8], state: &CpuState, budget: u64, patched: bool) {
        let (ours, theirs) = (&mut self.translated, &mut self.interpreted);
        let wanted = theirs.run(image, state, Some(budget));
        let got = ours.run(image, state, Some(budget));
        if patched || wanted == Exit::Kicked || got == Exit::Kicked {
            return;
        }
        let (ours_end, theirs_end) = (ours.end(), theirs.end());
        if !theirs_end.keeps_handlers(image, state) || !ours_end.keeps_handlers(image, state) {
            return;
        }
        assert_eq!(got, wanted);
        assert_eq!(ours_end.state, theirs_end.state);
        assert_eq!(ours.devices.seen, theirs.devices.seen);
        let (ours, theirs) = (ours_end.memory, theirs_end.memory);
        let differs = (0..ours.len()).find(|&place| ours[place] != theirs[place]);
        assert_eq!(differs, None, "memory differs");
    }
}

/// How a run ended.
struct End {
    state: CpuState,
    memory: Vec<u8>,
}

impl Side {
    /// Without arithmetic flags: translated code leaves out those that are
    /// overwritten before the guest reads them.
    fn end(&self) -> End {
        let mut state = self.cpu.save();
        state.rflags &= !ARITHMETIC;
        let memory = self.memory.bytes();
        End { state, memory }
    }
}

impl End {
    /// Whether exceptions went through the handlers that keep such flags from
    /// the guest, from the beginning to the end.
    fn keeps_handlers(&self, image: &[u8], began: &CpuState) -> bool {
        let same = |from: u64, to: u64, ignored: u8| {
            (from as usize..to as usize)
                .all(|place| (self.memory[place] ^ image[place]) & !ignored == 0)
        };
        let registers = |state: &CpuState| (state.cr0 >> 16, state.cr3, state.cr4, state.efer);
        registers(&self.state) == registers(began)
            && self.state.idtr == began.idtr
            && same(0, TABLES, 0)
            && same(TABLES, GDT, ACCESSED_DIRTY)
            && same(IDT, LEGACY_TABLES, 0)
            && same(LEGACY_TABLES, HANDLERS, ACCESSED_DIRTY)
            && same(HANDLERS, HANDLERS_END, 0)
    }
}

/// Any code in any state: bytes of [`crate::soft_guest::guest`].
pub fn code(bytes: &[u8]) {
    let mut input = Input(bytes);
    let free = input.byte() % 16 == 0;
    let budget = 1 + u64::from(input.byte()) * BUDGET / 256;
    let (image, state, patched) = guest(&mut input);
    SIDES.with_borrow_mut(|sides| {
        if free {
            sides.free.run(&image.0, &state, None);
        } else {
            sides.run(&image.0, &state, budget, patched);
        }
    });
}
