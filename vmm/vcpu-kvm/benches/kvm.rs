//! What KVM costs here: guest user mode against native, and an exit of each kind.
//! Needs /dev/kvm. `cargo bench -p weft-vcpu-kvm --bench kvm`
//!
//! Times are the vCPU thread's CPU time, which a busy machine does not stretch; a
//! kick's are of the clock on the wall. Kernel-mode instructions between the exits
//! are measured by the same loop without the exit, and taken off.

#[path = "../tests/support/bare.rs"]
mod bare;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use iced_x86::code_asm::{
    CodeAssembler, dword_ptr, eax, ebx, ecx, edx, qword_ptr, r8, rcx, rsi, rsp,
};
use weft_vcpu::{CpuState, Environment, Exit, Kick, Vcpu};
use weft_vcpu_kvm::{Host, KvmVcpu};

use bare::{Bare, CODE, DEVICE};

const HANDLER: u64 = 0x2_0000;
/// Where a guest says that it is done.
const DONE: u16 = 0x501;
const SPINS: u64 = 1_000_000_000;
const EXITS: u64 = 20_000;
const KICKS: u64 = 5_000;

/// Answers everything at once. An interrupt waits whenever one is `due`.
#[derive(Default)]
struct World {
    done: bool,
    interrupts: bool,
    due: bool,
    stop: Option<Arc<dyn Kick>>,
}

impl Environment for World {
    fn mmio_read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }
    fn mmio_write(&mut self, _: u64, _: &[u8]) {}
    fn port_read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0);
    }
    fn port_write(&mut self, port: u16, _: &[u8]) {
        self.due = self.interrupts;
        if port == DONE {
            self.done = true;
            self.stop.iter().for_each(|kick| kick.kick());
        }
    }
    fn msr_read(&mut self, _: u32) -> Option<u64> {
        Some(0)
    }
    fn msr_write(&mut self, _: u32, _: u64) -> bool {
        true
    }
    fn interrupt_waits(&mut self) -> bool {
        self.due
    }
    fn interrupt_take(&mut self) -> Option<u8> {
        std::mem::take(&mut self.due).then_some(0x40)
    }
    fn nmi_take(&mut self) -> bool {
        false
    }
    fn task_priority(&mut self) -> u8 {
        0
    }
    fn set_task_priority(&mut self, _: u8) {}
}

fn main() {
    let host = match Host::open() {
        Ok(host) => host,
        Err(error) => {
            println!("skipped: {error}");
            return;
        }
    };
    println!("{host}");
    user_mode(&host);
    exits(&host);
    kicks(&host);
}

/// Long mode at level `cpl`, with interrupts on, whose handler only returns.
fn state(guest: &Bare, cpl: u8) -> CpuState {
    let mut state = guest.long_mode(HANDLER);
    guest.program(HANDLER, 64, |code| code.iretq().expect("iretq"));
    state.cpl = cpl;
    for segment in [
        &mut state.cs,
        &mut state.ds,
        &mut state.es,
        &mut state.ss,
        &mut state.fs,
        &mut state.gs,
    ] {
        segment.selector |= u16::from(cpl);
        segment.rights |= u16::from(cpl) << 5;
    }
    // Interrupts on; IOPL 3, so that user mode may use ports.
    state.rflags = 0x3202;
    state
}

/// CPU time of this thread until the guest says that it is done; it is woken at
/// once after HLT.
fn time(guest: &Bare, cpl: u8, world: &mut World) -> (Duration, KvmVcpu) {
    let mut vcpu = guest.vcpu(0, &state(guest, cpl));
    world.stop = Some(vcpu.kicker());
    let start = thread_time();
    while !world.done {
        let exit = vcpu.run(world).expect("the guest runs");
        assert_ne!(exit, Exit::TripleFault);
        world.due = exit == Exit::Halted;
    }
    (thread_time() - start, vcpu)
}

/// A guest's last act: never comes back to it.
fn finish(code: &mut CodeAssembler) {
    code.mov(edx, u32::from(DONE)).expect("mov");
    code.out(iced_x86::code_asm::dx, eax).expect("out");
    code.jmp(CODE).expect("jmp");
}

fn user_mode(host: &Host) {
    let write = |guest: &Bare| {
        guest.program(CODE, 64, |code| {
            code.mov(rcx, SPINS).expect("mov");
            let mut again = code.create_label();
            code.set_label(&mut again).expect("label");
            code.dec(rcx).expect("dec");
            code.jnz(again).expect("jnz");
            finish(code);
        });
    };
    let (mut native, mut inside) = (Duration::MAX, Duration::MAX);
    for _ in 0..5 {
        native = native.min(spin());
        let guest = Bare::new(host);
        write(&guest);
        inside = inside.min(time(&guest, 3, &mut World::default()).0);
    }
    println!(
        "user mode: {SPINS} turns of a loop, best of 5: native {:.4} s, guest {:.4} s, ratio {:.3}",
        native.as_secs_f64(),
        inside.as_secs_f64(),
        native.as_secs_f64() / inside.as_secs_f64()
    );
}

/// The same loop outside.
fn spin() -> Duration {
    let start = thread_time();
    // SAFETY: counts a register down.
    unsafe {
        std::arch::asm!("2: dec {0}", "jnz 2b", inout(reg) SPINS => _, options(nomem, nostack));
    }
    thread_time() - start
}

type Body = fn(&mut CodeAssembler);

fn exits(host: &Host) {
    let kinds: [(&str, Body); 9] = [
        ("port write", |code| {
            code.out(0x80, eax).expect("out");
        }),
        ("port read", |code| {
            code.in_(eax, 0x80).expect("in");
        }),
        ("mmio write", |code| {
            code.mov(dword_ptr(rsi), ebx).expect("mov");
        }),
        ("mmio read", |code| {
            code.mov(ebx, dword_ptr(rsi)).expect("mov");
        }),
        ("msr write", |code| {
            code.wrmsr().expect("wrmsr");
        }),
        ("msr read", |code| {
            code.rdmsr().expect("rdmsr");
        }),
        ("port write, then an interrupt", |code| {
            code.out(0x81, eax).expect("out");
        }),
        ("halt, then an interrupt", |code| {
            code.hlt().expect("hlt");
        }),
        ("popcnt (a quirk)", |code| {
            code.popcnt(ebx, ebx).expect("popcnt");
        }),
    ];
    println!("exits in kernel mode, {EXITS} of each, microseconds: whole, of that in Weft");
    let base = exit_time(host, &|_| {}, false).0;
    for (name, body) in kinds {
        let (time, vcpu) = exit_time(host, &body, name.contains("then an interrupt"));
        let counters = vcpu.meter().read();
        let handling: u64 = counters.kinds.values().map(|kind| kind.handling_ns).sum();
        let exits: u64 = counters.kinds.values().map(|kind| kind.exits).sum();
        let whole = time.saturating_sub(base).as_secs_f64() * 1e6 / EXITS as f64;
        println!(
            "  {name:30} {whole:7.2} {:7.2}   ({exits} exits)",
            handling as f64 / 1e3 / EXITS as f64
        );
    }
}

/// CPU time of a loop with `body` in it, in kernel mode.
fn exit_time(
    host: &Host,
    body: &dyn Fn(&mut CodeAssembler),
    interrupts: bool,
) -> (Duration, KvmVcpu) {
    let guest = Bare::new(host);
    guest.program(CODE, 64, |code| {
        code.mov(r8, EXITS).expect("mov");
        code.mov(rsi, DEVICE).expect("mov");
        // TSC_DEADLINE, written with zero.
        code.mov(ecx, 0x6e0).expect("mov");
        code.xor(eax, eax).expect("xor");
        code.xor(edx, edx).expect("xor");
        let mut again = code.create_label();
        code.set_label(&mut again).expect("label");
        body(code);
        code.mov(qword_ptr(rsp - 8), r8).expect("mov");
        code.dec(r8).expect("dec");
        code.jnz(again).expect("jnz");
        finish(code);
    });
    let mut world = World {
        interrupts,
        ..Default::default()
    };
    time(&guest, 0, &mut world)
}

/// From a kick to the return of `run`, the guest being in user mode.
fn kicks(host: &Host) {
    let guest = Bare::new(host);
    guest.program(CODE, 64, |code| code.jmp(CODE).expect("jmp"));
    let mut vcpu = guest.vcpu(0, &state(&guest, 3));
    let kick = vcpu.kicker();
    let start = Instant::now();
    // Nanoseconds since `start` at the last kick; 0: the next one may come.
    let kicked = Arc::new(AtomicU64::new(0));
    let over = Arc::new(AtomicBool::new(false));
    let (mark, end) = (kicked.clone(), over.clone());
    let kicker = std::thread::spawn(move || {
        let mut spent = Duration::ZERO;
        while !end.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_micros(100));
            if mark.load(Ordering::Acquire) != 0 {
                continue;
            }
            let before = Instant::now();
            mark.store((before - start).as_nanos() as u64, Ordering::Release);
            kick.kick();
            spent += before.elapsed();
        }
        spent
    });
    let mut world = World::default();
    let mut waits: Vec<u64> = (0..KICKS)
        .map(|_| {
            while vcpu.run(&mut world).expect("the guest runs") != Exit::Kicked {}
            let now = start.elapsed().as_nanos() as u64;
            now.saturating_sub(kicked.swap(0, Ordering::AcqRel))
        })
        .collect();
    over.store(true, Ordering::Relaxed);
    let spent = kicker.join().expect("the kicker ends");
    waits.sort_unstable();
    println!(
        "kick: {:.2} us for the kicking thread; the vCPU's thread is back after {:.2} us \
        (median), {:.2} us (99 of 100)",
        spent.as_secs_f64() * 1e6 / KICKS as f64,
        waits[waits.len() / 2] as f64 / 1e3,
        waits[waits.len() * 99 / 100] as f64 / 1e3
    );
}

fn thread_time() -> Duration {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the place is a live variable of the right type.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
