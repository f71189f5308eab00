//! Small guests in KVM. Needs /dev/kvm and the permission to open it; without, each
//! test says that it was skipped, and why.

#[path = "support/bare.rs"]
mod bare;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use iced_x86::code_asm::{al, cr8, dx, eax, ecx, edi, edx, esi, rax, rbx, rdi, rdx, rsi, rsp};
use iced_x86::code_asm::{dword_ptr, qword_ptr};
use vm_memory::{Bytes, GuestAddress};
use weft_vcpu::{BackEnd, CpuState, Environment, Exit, Kick, Vcpu};
use weft_vcpu_kvm::Host;

use bare::{Bare, CODE, DEVICE, protected_mode};
use weft_test_support::skipped;

/// Devices that remember, and registers that the test sets.
#[derive(Default)]
struct World {
    ports: Vec<(u16, Vec<u8>)>,
    stores: Vec<(u64, Vec<u8>)>,
    input: Vec<u8>,
    /// What a load from the device gives: its address, times this.
    factor: u64,
    msrs: BTreeMap<u32, u64>,
    interrupt: Option<u8>,
    nmi: bool,
    priority: u8,
    taken: u64,
}

impl Environment for World {
    fn mmio_read(&mut self, address: u64, data: &mut [u8]) {
        let value = (address * self.factor).to_le_bytes();
        let length = data.len();
        data.copy_from_slice(&value[..length]);
    }
    fn mmio_write(&mut self, address: u64, data: &[u8]) {
        self.stores.push((address, data.to_vec()));
    }
    fn port_read(&mut self, _: u16, data: &mut [u8]) {
        for byte in data {
            *byte = if self.input.is_empty() {
                0xff
            } else {
                self.input.remove(0)
            };
        }
    }
    fn port_write(&mut self, port: u16, data: &[u8]) {
        self.ports.push((port, data.to_vec()));
    }
    fn msr_read(&mut self, index: u32) -> Option<u64> {
        self.msrs.get(&index).copied()
    }
    fn msr_write(&mut self, index: u32, value: u64) -> bool {
        self.msrs.insert(index, value);
        value != 0xbad
    }
    fn interrupt_waits(&mut self) -> bool {
        self.interrupt
            .is_some_and(|vector| vector >> 4 > self.priority)
    }
    fn interrupt_take(&mut self) -> Option<u8> {
        self.taken += 1;
        self.interrupt.take()
    }
    fn nmi_take(&mut self) -> bool {
        std::mem::take(&mut self.nmi)
    }
    fn task_priority(&mut self) -> u8 {
        self.priority
    }
    fn set_task_priority(&mut self, priority: u8) {
        self.priority = priority;
    }
}

/// `None`: no KVM here, which was said.
fn guest() -> Option<Bare> {
    match Host::open() {
        Ok(host) => Some(Bare::new(&host)),
        Err(error) => {
            skipped(&error);
            None
        }
    }
}

fn word(guest: &Bare, address: u64) -> u64 {
    guest.ram.guest().read_obj(GuestAddress(address)).unwrap()
}

fn port_bytes(world: &World) -> Vec<u8> {
    world
        .ports
        .iter()
        .flat_map(|(_, data)| data.clone())
        .collect()
}

#[test]
fn real_mode_talks_to_ports() {
    let Some(guest) = guest() else { return };
    let mut state = CpuState::started_at(0x10);
    state.ds.selector = 0x1000;
    state.ds.base = CODE;
    guest.put(
        CODE,
        &[
            0xba, 0xf8, 0x03, // mov dx, 3f8
            0xb0, 0x41, 0xee, // mov al, 'A'; out dx, al
            0xec, 0xe6, 0x10, // in al, dx; out 10, al
            0xb8, 0x34, 0x12, 0xef, // mov ax, 1234; out dx, ax
            0xbe, 0x00, 0x01, 0xb9, 0x03, 0x00, // mov si, 100; mov cx, 3
            0xfc, 0xf3, 0x6e, // cld; rep outsb
            0xf4, // hlt
        ],
    );
    guest.put(CODE + 0x100, b"xyz");
    let mut world = World {
        input: b"q".to_vec(),
        ..Default::default()
    };
    let mut vcpu = guest.vcpu(0, &state);
    assert_eq!(vcpu.run(&mut world).unwrap(), Exit::Halted);
    assert_eq!(port_bytes(&world), b"Aq\x34\x12xyz");
    assert_eq!(world.ports[2], (0x3f8, vec![0x34, 0x12]));
    let exits = vcpu.meter().read();
    assert_eq!(exits.kinds["port-read"].exits, 1);
    assert_eq!(exits.kinds["halt"].exits, 1);
    // Nothing wakes it.
    assert_eq!(vcpu.run(&mut world).unwrap(), Exit::Halted);
    assert!(vcpu.save().unwrap().halted);
}

#[test]
fn protected_mode_talks_to_a_device() {
    let Some(guest) = guest() else { return };
    guest.program(CODE, 32, |code| {
        code.mov(esi, DEVICE as u32 as i32).unwrap();
        code.mov(eax, dword_ptr(esi + 4)).unwrap();
        code.mov(dword_ptr(esi + 8), eax).unwrap();
        code.mov(edi, 0x5000).unwrap();
        code.mov(dx, 0x60).unwrap();
        code.mov(ecx, 4).unwrap();
        code.cld().unwrap();
        code.rep().insb().unwrap();
        code.hlt().unwrap();
    });
    let mut world = World {
        input: b"wxyz".to_vec(),
        factor: 1,
        ..Default::default()
    };
    let mut vcpu = guest.vcpu(0, &protected_mode());
    assert_eq!(vcpu.run(&mut world).unwrap(), Exit::Halted);
    let value = (DEVICE + 4) as u32;
    assert_eq!(world.stores, [(DEVICE + 8, value.to_le_bytes().to_vec())]);
    assert_eq!(word(&guest, 0x5000) as u32, u32::from_le_bytes(*b"wxyz"));
}

#[test]
fn long_mode_uses_devices_and_machine_registers() {
    let Some(guest) = guest() else { return };
    // A handler that tells that it ran and skips the WRMSR.
    guest.put(0x9000, &[0xb0, 0xee, 0xe6, 0x11, 0xf4]); // mov al, ee; out 11, al; hlt
    let state = guest.long_mode(0x9000);
    guest.program(CODE, 64, |code| {
        code.mov(rsi, DEVICE).unwrap();
        code.mov(rax, qword_ptr(rsi + 16)).unwrap();
        code.mov(qword_ptr(rsi + 24), rax).unwrap();
        for msr in [0x6e0_u32, 0x4b56_4d01, 0x1b, 0x3b] {
            code.mov(ecx, msr).unwrap();
            code.mov(eax, 7).unwrap();
            code.mov(edx, 1).unwrap();
            code.wrmsr().unwrap();
            code.rdmsr().unwrap();
            code.out(0x10, eax).unwrap();
        }
        // The TSC: only when it is written.
        code.mov(ecx, 0x10).unwrap();
        code.rdmsr().unwrap();
        code.wrmsr().unwrap();
        code.mov(rax, 5_u64).unwrap();
        code.mov(cr8, rax).unwrap();
        code.mov(ecx, 0x6e0).unwrap();
        code.mov(eax, 0xbad).unwrap();
        code.mov(edx, 0).unwrap();
        code.wrmsr().unwrap();
    });
    let mut world = World {
        factor: 3,
        ..Default::default()
    };
    let mut vcpu = guest.vcpu(0, &state);
    assert_eq!(vcpu.run(&mut world).unwrap(), Exit::Halted);
    let value = (DEVICE + 16) * 3;
    assert_eq!(world.stores, [(DEVICE + 24, value.to_le_bytes().to_vec())]);
    assert_eq!(world.msrs[&0x4b56_4d01], 1 << 32 | 7);
    assert!(world.msrs.contains_key(&0x10));
    assert_eq!(world.priority, 5);
    let ports: Vec<_> = world.ports.iter().map(|(port, _)| *port).collect();
    let expected = [0x10, 0x10, 0x10, 0x10, 0x11];
    assert_eq!(ports, expected, "the last one raises #GP");
}

/// Counts in RBX with interrupts on; vector 0x40 adds to the word at 0x5000.
fn counting(guest: &Bare) -> CpuState {
    guest.program(0x9000, 64, |code| {
        code.inc(qword_ptr(0x5000)).unwrap();
        code.iretq().unwrap();
    });
    guest.program(CODE, 64, |code| {
        code.sti().unwrap();
        let mut again = code.create_label();
        code.set_label(&mut again).unwrap();
        code.inc(rbx).unwrap();
        code.mov(qword_ptr(0x5008), rbx).unwrap();
        code.jmp(again).unwrap();
    });
    guest.long_mode(0x9000)
}

/// Kicks every `every` until dropped.
struct Metronome {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Metronome {
    fn start(kick: Arc<dyn Kick>, every: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                std::thread::sleep(every);
                kick.kick();
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Metronome {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

#[test]
fn every_interrupt_is_delivered_once() {
    let Some(guest) = guest() else { return };
    let mut world = World::default();
    let mut vcpu = guest.vcpu(0, &counting(&guest));
    let _kicks = Metronome::start(vcpu.kicker(), Duration::from_millis(1));
    for round in 1..=200 {
        // Before it: those that the guest does not accept yet.
        world.priority = if round % 3 == 0 { 4 } else { 0 };
        world.interrupt = Some(0x40);
        assert_eq!(vcpu.run(&mut world).unwrap(), Exit::Kicked);
        // One that is accepted may still wait: the kick can come before the end of the handler.
        let waits = world.interrupt.is_some();
        assert!(waits || round % 3 != 0, "round {round}");
        world.priority = 0;
        while word(&guest, 0x5000) < round {
            assert_eq!(vcpu.run(&mut world).unwrap(), Exit::Kicked);
        }
        assert_eq!((word(&guest, 0x5000), world.taken), (round, round));
    }
    world.nmi = true;
    while word(&guest, 0x5000) < 201 {
        vcpu.run(&mut world).unwrap();
    }
    assert_eq!(world.taken, 200);
}

#[test]
fn a_halted_cpu_wakes_for_an_interrupt_alone() {
    let Some(guest) = guest() else { return };
    let state = counting(&guest);
    guest.program(CODE, 64, |code| {
        code.sti().unwrap();
        code.hlt().unwrap();
        code.out(0x10, al).unwrap();
        code.cli().unwrap();
        code.hlt().unwrap();
        code.out(0x11, al).unwrap();
        code.hlt().unwrap();
    });
    let mut world = World::default();
    let mut vcpu = guest.vcpu(0, &state);
    assert_eq!(vcpu.run(&mut world).unwrap(), Exit::Halted);
    vcpu.kicker().kick();
    assert_eq!(vcpu.run(&mut world).unwrap(), Exit::Kicked);
    assert_eq!(vcpu.run(&mut world).unwrap(), Exit::Halted);
    // Halted is part of the state: another vCPU goes on from it.
    let state = vcpu.save().unwrap();
    let mut other = guest.vcpu(1, &state);
    assert_eq!(other.run(&mut world).unwrap(), Exit::Halted);
    world.interrupt = Some(0x40);
    assert_eq!(other.run(&mut world).unwrap(), Exit::Halted);
    assert_eq!((word(&guest, 0x5000), world.ports.len()), (1, 1));
    // With interrupts off an interrupt waits, and an NMI wakes.
    world.interrupt = Some(0x40);
    assert_eq!(other.run(&mut world).unwrap(), Exit::Halted);
    assert_eq!((world.taken, world.ports.len()), (1, 1));
    world.nmi = true;
    assert_eq!(other.run(&mut world).unwrap(), Exit::Halted);
    assert_eq!((word(&guest, 0x5000), world.ports.len()), (2, 2));
}

#[test]
fn state_goes_on_in_another_vcpu() {
    let Some(guest) = guest() else { return };
    let mut state = counting(&guest);
    state.registers[15] = 0x1234_5678_9abc_def0;
    state.debug[1] = 0x7777;
    state.msrs.push((0xc000_0081, 0x0023_0010_0000_0000));
    state.msrs.push((0xc000_0102, 0xffff_8000_0000_1000));
    // Memory types: a variable range, a fixed one.
    let memory_types = [
        (0x20e, 0x1_0000_0001),
        (0x20f, 0xff_f000_0800),
        (0x26f, 0x0505_0505_0505_0505),
    ];
    state.msrs.extend(memory_types);
    state.gs.base = 0xffff_8000_0000_2000;
    // 1.0 in ST0 (physical register 7), something in XMM3.
    state.fpu[2..4].copy_from_slice(&0x3800_u16.to_le_bytes());
    state.fpu[4] = 0x80;
    state.fpu[32..42].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0x3f]);
    state.fpu[160 + 48..160 + 64].copy_from_slice(&[0xab; 16]);
    let mut world = World::default();
    let mut vcpus = [guest.vcpu(0, &state), guest.vcpu(1, &CpuState::reset())];
    let kicks = [
        Metronome::start(vcpus[0].kicker(), Duration::from_millis(2)),
        Metronome::start(vcpus[1].kicker(), Duration::from_millis(2)),
    ];
    let mut counted = 0;
    for round in 0..100 {
        let now = round % 2;
        world.interrupt = Some(0x40);
        while vcpus[now].run(&mut world).unwrap() != Exit::Kicked {}
        let state = vcpus[now].save().unwrap();
        let text = serde_json::to_string(&state).unwrap();
        let state: CpuState = serde_json::from_str(&text).unwrap();
        assert!(state.registers[3] >= counted, "round {round}");
        counted = state.registers[3];
        vcpus[1 - now].restore(&state).unwrap();
        let again = vcpus[1 - now].save().unwrap();
        assert_eq!(state, again, "round {round}");
    }
    drop(kicks);
    let last = vcpus[0].save().unwrap();
    assert!(counted > 0);
    assert_eq!(last.registers[15], 0x1234_5678_9abc_def0);
    assert_eq!(last.debug[1], 0x7777);
    assert_eq!(last.gs.base, 0xffff_8000_0000_2000);
    assert!(last.msrs.contains(&(0xc000_0102, 0xffff_8000_0000_1000)));
    assert!(memory_types.iter().all(|msr| last.msrs.contains(msr)));
    assert_eq!(last.fpu[160 + 48..160 + 64], [0xab; 16]);
    assert_eq!(last.fpu[32..42], state.fpu[32..42]);
    let handled = word(&guest, 0x5000) + u64::from(last.undelivered.is_some());
    assert_eq!(handled, world.taken);
}

#[test]
fn a_triple_fault_is_the_end() {
    let Some(guest) = guest() else { return };
    let mut state = guest.long_mode(0x9000);
    state.idtr.limit = 0;
    guest.put(CODE, &[0x0f, 0x0b]); // ud2
    let mut vcpu = guest.vcpu(0, &state);
    assert_eq!(vcpu.run(&mut World::default()).unwrap(), Exit::TripleFault);
}

#[test]
fn a_kick_is_never_lost() {
    let Some(guest) = guest() else { return };
    let state = counting(&guest);
    let mut vcpu = guest.vcpu(0, &state);
    let kick = vcpu.kicker();
    const ROUNDS: u64 = 20_000;
    // Round by round: the other thread kicks once after each return, with delays
    // that hit before, at and after the entry.
    let turn = Arc::new(AtomicU64::new(0));
    let others_turn = turn.clone();
    let kicker = std::thread::spawn(move || {
        for round in 1..=ROUNDS {
            while others_turn.load(Ordering::Acquire) < round {
                std::hint::spin_loop();
            }
            for _ in 0..round * 7 % 512 {
                std::hint::spin_loop();
            }
            kick.kick();
        }
    });
    let mut world = World::default();
    let started = Instant::now();
    let mut slowest = Duration::ZERO;
    for round in 1..=ROUNDS {
        turn.store(round, Ordering::Release);
        let before = Instant::now();
        // A kick that was lost would leave this running for ever.
        assert_eq!(vcpu.run(&mut world).unwrap(), Exit::Kicked);
        slowest = slowest.max(before.elapsed());
    }
    kicker.join().unwrap();
    println!(
        "{ROUNDS} kicks in {:?}, slowest {slowest:?}",
        started.elapsed()
    );
    // All were noticed one by one: none is left over.
    let kick = vcpu.kicker();
    kick.kick();
    assert_eq!(vcpu.run(&mut world).unwrap(), Exit::Kicked);
    // A kick may come after the vCPU went.
    drop(vcpu);
    kick.kick();
}

#[test]
fn what_cannot_be_executed_says_where() {
    let Some(guest) = guest() else { return };
    let state = guest.long_mode(0x9000);
    // Code in a device: nothing to fetch.
    let state = CpuState {
        rip: DEVICE + 0x123,
        ..state
    };
    let mut vcpu = guest.vcpu(0, &state);
    let error = vcpu.run(&mut World::default()).unwrap_err().to_string();
    assert!(error.contains("0xd0000123"), "{error}");
}

#[test]
fn quirks_do_what_kvm_cannot() {
    let Some(guest) = guest() else { return };
    if guest.back_end.quirks().is_empty() {
        skipped(&"this KVM needs no quirks");
        return;
    }
    // INT3's handler tells so.
    guest.put(0x9000, &[0xb0, 0xcc, 0xe6, 0x11, 0x48, 0xcf]); // out 11; iretq
    let mut state = guest.long_mode(0x9000);
    state.cr4 |= 1 << 18;
    state.xcr0 = 7;
    state.registers[3] = 0xff;
    // XMM3 before; an image of SSE alone for it afterwards.
    state.fpu[208..224].fill(0xab);
    guest.put(0x20_1000 + 24, &0x1f80_u32.to_le_bytes());
    guest.put(0x20_1000 + 208, &[0xcd; 16]);
    guest.put(0x20_1000 + 512, &[2]);
    guest.program(CODE, 64, |code| {
        code.popcnt(rax, rbx).unwrap();
        code.out(0x10, al).unwrap();
        code.int3().unwrap();
        code.wait().unwrap();
        code.stac().unwrap();
        code.clac().unwrap();
        code.mov(eax, -1).unwrap();
        code.mov(edx, -1).unwrap();
        code.mov(rdi, 0x20_0000_u64).unwrap();
        code.xsavec64(qword_ptr(rdi)).unwrap();
        code.mov(rdi, 0x20_1000_u64).unwrap();
        code.xrstor64(qword_ptr(rdi)).unwrap();
        code.xor(eax, eax).unwrap();
        code.xor(rdx, rdx).unwrap();
        code.cmpxchg16b(qword_ptr(rsp - 64)).unwrap();
        code.hlt().unwrap();
    });
    let mut world = World::default();
    let mut vcpu = guest.vcpu(0, &state);
    assert_eq!(vcpu.run(&mut world).unwrap(), Exit::Halted);
    assert_eq!(port_bytes(&world), [8, 0xcc]);
    assert_eq!(word(&guest, 0x20_0000 + 208), u64::from_le_bytes([0xab; 8]));
    let state = vcpu.save().unwrap();
    assert_eq!(state.fpu[208..224], [0xcd; 16]);
    // The processor starts with zero in memory, so this one exchanged.
    assert_ne!(state.rflags & 1 << 6, 0);
    assert_eq!(vcpu.meter().read().kinds["quirk"].exits, 8);
}

#[test]
fn the_tsc_has_a_frequency() {
    let Some(guest) = guest() else { return };
    let hz = guest.back_end.tsc_hz();
    assert!((100_000_000..20_000_000_000).contains(&hz), "{hz}");
    assert_eq!(guest.back_end.name(), "kvm");
}
