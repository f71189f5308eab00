//! A vCPU in KVM whose page tables another slice writes, thousands of times. Needs
//! /dev/kvm and to see the kernel's page faults (root, or the right to open
//! /dev/userfaultfd); without, the test says that it was skipped, and why.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use iced_x86::code_asm::{CodeAssembler, dword_ptr, eax, rcx, rdi};
use weft_coherent_memory::mapping::GuestMapping;
use weft_coherent_memory::{Budget, SharedMemory, SharedMemoryOptions, Transport};
use weft_dsm::{Config, ManagerOf, NodeId, Ranges};
use weft_guest_memory::{GuestBytes, Ram};
use weft_machine::vcpu::notifiers::KvmShadows;
use weft_pager::shared::Whose;
use weft_vcpu::{CpuState, Environment, Exit, Kick, Segment, Vcpu};
use weft_vcpu_kvm::{Host, KvmBackEnd, KvmOptions};
use weft_wire::Header;

use weft_test_support::skipped;

const RAM: u64 = 8 << 20;
const PAGE: u64 = 4096;
const CODE: u64 = 0x1_0000;
/// A page of a device's registers.
const DEVICE: u64 = 0xd000_0000;
/// What the guest reads through the entry that changes.
const WINDOW: u64 = 0x2_0000;
/// Two roots that lead to the same tables: to load one in turns flushes the TLB.
const ROOTS: [u64; 2] = [0x1000, 0x5000];
/// The lowest table.
const TABLE: u64 = 0x4000;
/// Pages that the entry leads to; each holds its number.
const DATA: u64 = 0x10_0000;
const DATA_PAGES: u64 = 7;
/// Present, writable, the user's.
const ENTRY: u64 = 7;
const ROUNDS: u64 = 5000;
/// Rounds in which the table goes away and comes back as data in between.
const REUSE_EVERY: u64 = 5;

type Frame = (NodeId, Header, Vec<u8>);

struct Channels {
    me: NodeId,
    to: Vec<Mutex<Sender<Frame>>>,
}

impl Transport for Channels {
    fn transmit(&self, to: NodeId, header: &Header, parts: &[&[u8]]) {
        let frame = (self.me, *header, parts.concat());
        // A slice that is gone needs nothing.
        let _ = self.to[to.index()].lock().unwrap().send(frame);
    }
}

/// Two slices; the first is KVM's.
struct Slices {
    memories: Vec<Arc<SharedMemory>>,
    threads: Vec<JoinHandle<()>>,
}

/// `budget`: of the first, which then has no memory of its own.
fn slices(budget: Option<Budget>) -> Slices {
    let manager = match budget {
        Some(_) => ManagerOf::Ranges(Ranges::new(&[0, RAM / PAGE]).unwrap()),
        None => ManagerOf::Interleaved,
    };
    let budgets = [budget.unwrap_or(Budget::UNLIMITED), Budget::UNLIMITED];
    let (senders, receivers): (Vec<Sender<Frame>>, Vec<Receiver<Frame>>) =
        (0..2).map(|_| channel()).unzip();
    let mut slices = Slices {
        memories: Vec::new(),
        threads: Vec::new(),
    };
    for ((node, receiver), budget) in (0..2).zip(receivers).zip(budgets) {
        let me = NodeId(node);
        let memory = SharedMemory::new(SharedMemoryOptions {
            ram: Ram::new(RAM).unwrap(),
            config: Config::new(me, 2, manager),
            budget,
            transport: Arc::new(Channels {
                me,
                to: senders.iter().cloned().map(Mutex::new).collect(),
            }),
            lease: Duration::from_secs(20),
            on_failure: Box::new(|reason| panic!("{reason}")),
        });
        let deferred = memory.clone();
        slices
            .threads
            .push(spawn(move || deferred.run_deferred_work()));
        let evictor = memory.clone();
        slices.threads.push(spawn(move || evictor.keep_to_budget()));
        let shell = memory.clone();
        slices.threads.push(spawn(move || {
            while !shell.is_over() {
                if let Ok((from, header, payload)) =
                    receiver.recv_timeout(Duration::from_millis(50))
                {
                    shell.receive(from, &header, &payload).unwrap();
                }
            }
        }));
        slices.memories.push(memory);
    }
    slices
}

/// Keeps what the guest says to the device, and has it come back.
struct World {
    said: Vec<u32>,
    kick: Arc<dyn Kick>,
}

impl Environment for World {
    fn mmio_read(&mut self, _: u64, _: &mut [u8]) {}
    fn mmio_write(&mut self, _: u64, data: &[u8]) {
        self.said.push(u32::from_le_bytes(data.try_into().unwrap()));
        self.kick.kick();
    }
    fn port_read(&mut self, _: u16, _: &mut [u8]) {}
    fn port_write(&mut self, _: u16, _: &[u8]) {}
    fn msr_read(&mut self, _: u32) -> Option<u64> {
        None
    }
    fn msr_write(&mut self, _: u32, _: u64) -> bool {
        true
    }
    fn interrupt_waits(&mut self) -> bool {
        false
    }
    fn interrupt_take(&mut self) -> Option<u8> {
        None
    }
    fn nmi_take(&mut self) -> bool {
        false
    }
    fn task_priority(&mut self) -> u8 {
        0
    }
    fn set_task_priority(&mut self, _: u8) {}
}

/// User mode in long mode.
fn user_mode() -> CpuState {
    let segment = |selector: u16, rights: u16| Segment {
        selector: selector | 3,
        base: 0,
        limit: u32::MAX,
        rights: rights | 3 << 5,
    };
    let mut state = CpuState::with_segments(segment(8, 0xa09b), segment(16, 0xc093));
    state.tr.rights = 0x8b;
    state.cr0 = 0x8000_0033;
    state.cr3 = ROOTS[0];
    state.cr4 = 0x620;
    state.efer = 0x500;
    state.rip = CODE;
    state.cpl = 3;
    state
}

fn load(memory: &SharedMemory) {
    let set = |address: u64, value: u64| {
        assert!(memory.write(address, &value.to_le_bytes()));
    };
    for root in ROOTS {
        set(root, 0x2000 | ENTRY);
    }
    set(0x2000, 0x3000 | ENTRY);
    set(0x3000, TABLE | ENTRY);
    // The device, in a page of 2 MiB.
    set(0x2000 + 3 * 8, 0x6000 | ENTRY);
    set(0x6000 + 128 * 8, DEVICE | ENTRY | 1 << 7);
    set(TABLE + CODE / PAGE * 8, CODE | ENTRY);
    for number in 0..DATA_PAGES {
        set(DATA + number * PAGE, number);
    }
    let mut code = CodeAssembler::new(64).unwrap();
    let mut again = code.create_label();
    code.mov(rcx, WINDOW).unwrap();
    code.mov(rdi, DEVICE).unwrap();
    code.set_label(&mut again).unwrap();
    code.mov(eax, dword_ptr(rcx)).unwrap();
    code.mov(dword_ptr(rdi), eax).unwrap();
    code.jmp(again).unwrap();
    assert!(memory.write(CODE, &code.assemble(CODE).unwrap()));
}

#[test]
fn tables_that_another_slice_writes_are_seen() {
    turns(ROUNDS, None);
}

/// The same, where the vCPU's tables, code and data are evicted all the time, and
/// their memory returned to the host.
#[test]
fn tables_that_had_to_go_are_seen() {
    turns(ROUNDS / 5, Some(Budget::new(0, 64)));
}

/// Pages, beyond those of the guest, that the first slice reads each round where it
/// has a budget; where they begin.
const CROWD: u64 = 24;
const CROWDED: u64 = 0x20_0000;

fn turns(rounds: u64, budget: Option<Budget>) {
    let host = match Host::open() {
        Ok(host) => host,
        Err(error) => return skipped(&error),
    };
    let slices = slices(budget);
    let [near, far] = [&slices.memories[0], &slices.memories[1]];
    let mapping = match GuestMapping::new(near.ram(), Whose::All) {
        Ok(mapping) => mapping,
        Err(error) => return skipped(&error),
    };
    let options = KvmOptions {
        model: None,
        ram: mapping.watched(),
        cpus: 1,
        package_cpus: 1,
        shared: true,
    };
    let back_end = KvmBackEnd::of(&host, &options).unwrap();
    let mapping = match back_end.gate() {
        Some(gate) => mapping.with_shadows(Arc::new(KvmShadows(gate.clone()))),
        None => mapping,
    };
    let mapping = Arc::new(mapping);
    near.register_notifier(Box::new(mapping.clone()));
    let (served, memory) = (mapping.clone(), near.clone());
    let handler = spawn(move || served.serve(&memory));

    load(far);
    let mut vcpu = back_end.vcpu(0).unwrap();
    let mut state = user_mode();
    let mut world = World {
        said: Vec::new(),
        kick: vcpu.kicker(),
    };
    let mut wrong = 0;
    for round in 0..rounds {
        let entry = TABLE + WINDOW / PAGE * 8;
        if round % REUSE_EVERY == 0 {
            // As Linux does with a table that is free: cleared, used for something
            // else, and a table again.
            assert!(far.write(entry, &[0; 8]));
        }
        let number = round % DATA_PAGES;
        let value = (DATA + number * PAGE) | ENTRY;
        assert!(far.write(entry, &value.to_le_bytes()));
        for page in (0..CROWD).filter(|_| budget.is_some()) {
            let page = (round * CROWD + page) % ((RAM - CROWDED) / PAGE);
            assert!(near.read(CROWDED + page * PAGE, &mut [0; 8]));
        }
        state.cr3 = ROOTS[(round % 2) as usize];
        state.rip = CODE;
        vcpu.restore(&state).unwrap();
        let exit = vcpu.run(&mut world).unwrap();
        if exit != Exit::Kicked {
            let now = vcpu.save().unwrap();
            panic!(
                "round {round}: {exit:?} at {:#x}, CR2 {:#x}",
                now.rip, now.cr2
            );
        }
        wrong += u64::from(world.said.pop() != Some(number as u32));
    }
    assert_eq!(wrong, 0, "of {rounds}; {:?}", mapping.counters());
    eprintln!("{:?} {:?}", mapping.counters(), near.figures());
    if budget.is_some() {
        let given_back = near.counters.given_back.load(Ordering::Relaxed);
        assert!(
            given_back > rounds * CROWD / 2,
            "{given_back} pages given back"
        );
    }
    for memory in &slices.memories {
        memory.end_waits();
    }
    handler.join().unwrap();
    for thread in slices.threads {
        thread.join().unwrap();
    }
}
