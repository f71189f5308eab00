//! Interrupts and kicks while code runs that leaves little room for them.
//! Needs nothing.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use iced_x86::code_asm::*;
use support::*;
use weft_vcpu::{CpuState, Exit, Kick};
use weft_vcpu_soft::Configuration;

const DEVICE: u64 = 0x60_0000;

fn counting(write: impl FnOnce(&mut CodeAssembler)) -> Guest {
    let configuration = Configuration {
        deterministic: true,
        tsc_frequency: 1_000_000_000,
        ..Configuration::default()
    };
    with_device(configuration, write)
}

fn with_device(configuration: Configuration, write: impl FnOnce(&mut CodeAssembler)) -> Guest {
    let guest = Guest::with(configuration, write);
    guest
        .memory
        .write_u64(entry(DEVICE), 0xfee0_0000 | PRESENT | WRITABLE);
    guest
}

/// The guest, interpreted, translated when it is hot, and translated at once.
fn three_ways(mut make: impl FnMut() -> Guest) -> [Guest; 3] {
    let mut guests = [make(), make(), make()];
    guests[0].cpu.interpret_only();
    guests[2].cpu.translate_after(1);
    guests
}

/// The frame of the interrupt that is raised after the guest ran for a while:
/// it is taken soon.
fn interrupted(guest: &mut Guest) -> Frame {
    guest.cpu.set_budget(Some(10_000));
    assert_eq!(guest.run(), Exit::Deadline);
    guest.devices.interrupts.push(0x40);
    guest.cpu.set_budget(Some(1000));
    assert_eq!(guest.run(), Exit::Halted);
    guest.frame().expect("an interrupt")
}

#[test]
fn a_loop_of_calls_that_never_return_is_kicked() {
    // A call back to where a jump forward comes from: both in one trace.
    const HEAD: u64 = CODE + 0x800;
    const BACK: u64 = CODE + 0x400;
    let mut guest = Guest::new(|a| {
        a.mov(ebx, DATA as u32).unwrap();
        a.jmp(HEAD).unwrap();
    });
    let head = assemble(64, HEAD, |a| {
        a.add(rsp, 8).unwrap();
        a.call(BACK).unwrap();
    });
    let back = assemble(64, BACK, |a| {
        a.inc(qword_ptr(rbx)).unwrap();
        a.jmp(HEAD).unwrap();
    });
    guest.memory.write(HEAD, &head);
    guest.memory.write(BACK, &back);
    let (memory, kick) = (guest.memory.clone(), guest.cpu.kicker());
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(guest.run()));
    while memory.read_u64(DATA) < 100_000 {
        thread::yield_now();
    }
    kick.kick();
    assert_eq!(
        receiver.recv_timeout(Duration::from_secs(20)),
        Ok(Exit::Kicked)
    );
}

#[test]
fn the_shadow_of_sti_outlasts_an_exit() {
    for mut guest in three_ways(|| {
        counting(|a| {
            a.sti().unwrap();
            a.hlt().unwrap();
        })
    }) {
        guest.cpu.set_budget(Some(1));
        assert_eq!(guest.run(), Exit::Deadline);
        let state = guest.cpu.save();
        assert_eq!((state.rip, state.interrupt_shadow), (CODE + 1, true));
        guest.devices.interrupts.push(0x40);
        guest.cpu.set_budget(None);
        let frame = guest.faults();
        assert_eq!((frame.vector, frame.rip), (0x40, CODE + 2));
        assert!(!guest.cpu.save().interrupt_shadow);
    }
}

#[test]
fn the_shadow_of_sti_outlasts_a_kick() {
    let program = |a: &mut CodeAssembler| {
        a.mov(ebx, DEVICE as u32).unwrap();
        a.mov(dword_ptr(rbx), eax).unwrap();
        a.sti().unwrap();
        a.hlt().unwrap();
    };
    let counting = three_ways(|| counting(program));
    let others = three_ways(|| with_device(Configuration::default(), program));
    for mut guest in counting.into_iter().chain(others) {
        let kick = guest.cpu.kicker();
        guest.devices.on_access = Some(Box::new(move |_, interrupts| {
            interrupts.push(0x40);
            kick.kick();
        }));
        assert_eq!(guest.run(), Exit::Kicked);
        assert_eq!(guest.cpu.save().rip, CODE + 8);
        let frame = guest.faults();
        assert_eq!((frame.vector, frame.rip), (0x40, CODE + 9));
    }
}

#[test]
fn the_shadow_of_sti_is_one_instruction() {
    for mut guest in three_ways(|| {
        counting(|a| {
            let mut again = a.create_label();
            a.mov(ebx, DATA as u32).unwrap();
            a.set_label(&mut again).unwrap();
            a.sti().unwrap();
            a.nop().unwrap();
            a.cli().unwrap();
            a.cmp(dword_ptr(rbx), 0).unwrap();
            a.je(again).unwrap();
        })
    }) {
        let frame = interrupted(&mut guest);
        assert_eq!((frame.vector, frame.rip), (0x40, CODE + 7));
    }
}

#[test]
fn the_shadow_of_a_stack_switch_is_one_instruction() {
    let programs: [fn(&mut CodeAssembler); 2] = [
        |a| a.mov(ss, ax).unwrap(),
        |a| a.mov(ss, word_ptr(rbx)).unwrap(),
    ];
    for write in programs {
        for mut guest in three_ways(|| {
            let guest = counting(|a| {
                let mut again = a.create_label();
                a.mov(ebx, DATA as u32).unwrap();
                a.mov(eax, u32::from(KERNEL_DATA)).unwrap();
                a.sti().unwrap();
                a.set_label(&mut again).unwrap();
                write(a);
                a.jmp(again).unwrap();
            });
            guest.memory.write_u64(DATA, u64::from(KERNEL_DATA));
            guest
        }) {
            guest.devices.interrupts.push(0x40);
            guest.cpu.set_budget(Some(1000));
            let frame = guest.faults();
            assert_eq!((frame.vector, frame.rip), (0x40, CODE + 11));
        }
    }
}

#[test]
fn an_interrupt_is_taken_behind_the_instruction_that_raised_it() {
    for mut guest in three_ways(|| {
        counting(|a| {
            let mut again = a.create_label();
            let mut behind = a.create_label();
            a.mov(ebp, 100).unwrap();
            a.set_label(&mut again).unwrap();
            a.sti().unwrap();
            a.nop().unwrap();
            a.out(0x80, al).unwrap();
            // Hot before the rest is, so that the rest is linked with it.
            a.set_label(&mut behind).unwrap();
            a.cli().unwrap();
            a.inc(ecx).unwrap();
            a.dec(ebp).unwrap();
            a.jg(behind).unwrap();
            a.jmp(again).unwrap();
        })
    }) {
        let mut calls = 0;
        guest.devices.on_access = Some(Box::new(move |_, interrupts| {
            calls += 1;
            if calls == 1000 {
                interrupts.push(0x40);
            }
        }));
        guest.cpu.set_budget(Some(10_000));
        let frame = guest.faults();
        assert_eq!((frame.vector, frame.rip), (0x40, CODE + 9));
        assert_eq!(guest.cpu.save().registers[1], 1098);
    }
}

/// A loop that has a device raise an interrupt in one round out of 64, by a
/// register in memory, and goes on over jumps forward. The handler adds up
/// where it interrupted, and when.
fn interrupting_program() -> Guest {
    let mut guest = counting(|a| {
        let mut again = a.create_label();
        let mut skip = a.create_label();
        let mut over = a.create_label();
        let mut odd = a.create_label();
        a.mov(ebx, DEVICE as u32).unwrap();
        a.mov(ecx, 20_000).unwrap();
        a.sti().unwrap();
        a.set_label(&mut again).unwrap();
        a.mov(dword_ptr(rbx), ecx).unwrap();
        a.inc(edi).unwrap();
        a.jmp(skip).unwrap();
        a.hlt().unwrap();
        a.set_label(&mut skip).unwrap();
        a.imul_3(eax, ecx, 77).unwrap();
        a.test(eax, 0x40).unwrap();
        a.jz(over).unwrap();
        a.inc(edi).unwrap();
        a.test(eax, 0x10).unwrap();
        a.jz(odd).unwrap();
        a.inc(edi).unwrap();
        a.set_label(&mut odd).unwrap();
        a.inc(edi).unwrap();
        a.set_label(&mut over).unwrap();
        a.cli().unwrap();
        a.sti().unwrap();
        a.dec(ecx).unwrap();
        a.jnz(again).unwrap();
        a.hlt().unwrap();
    });
    let handler = CODE + 0x1000;
    let code = assemble(64, handler, |a| {
        a.push(rax).unwrap();
        a.push(rdx).unwrap();
        a.add(rsi, qword_ptr(rsp + 16)).unwrap();
        a.rol(rsi, 5).unwrap();
        a.rdtsc().unwrap();
        a.add(rsi, rax).unwrap();
        a.inc(rbp).unwrap();
        a.pop(rdx).unwrap();
        a.pop(rax).unwrap();
        a.iretq().unwrap();
    });
    guest.memory.write(handler, &code);
    guest.gate(0x40, handler, 0, 0x8e);
    let mut calls = 0;
    guest.devices.on_access = Some(Box::new(move |_, interrupts| {
        calls += 1;
        if calls % 64 == 0 {
            interrupts.push(0x40);
        }
    }));
    guest
}

#[test]
fn interrupts_come_at_the_same_count_interpreted_and_translated() {
    let [interpreted, translated, at_once] = three_ways(interrupting_program).map(|mut guest| {
        guest.cpu.set_budget(None);
        let mut state = guest.halts();
        assert_eq!(state.registers[5], 20_000 / 64);
        // As after the last instruction that made them.
        state.rflags &= !0x8d5;
        state
    });
    let same = |a: &CpuState, b: &CpuState| {
        assert_eq!(a.instructions, b.instructions);
        assert_eq!(a.registers, b.registers);
    };
    same(&interpreted, &translated);
    same(&interpreted, &at_once);
}

#[test]
fn kicks_between_sti_and_hlt_lose_no_interrupt() {
    // After every exit an interrupt is raised, wherever the kick found the loop.
    for mut guest in three_ways(|| {
        Guest::new(|a| {
            let mut again = a.create_label();
            a.set_label(&mut again).unwrap();
            a.cli().unwrap();
            a.inc(ecx).unwrap();
            a.sti().unwrap();
            a.hlt().unwrap();
            a.jmp(again).unwrap();
        })
    }) {
        let handler = CODE + 0x1000;
        let code = assemble(64, handler, |a| {
            a.push(rax).unwrap();
            a.mov(rax, qword_ptr(rsp + 8)).unwrap();
            a.mov(qword_ptr(DATA), rax).unwrap();
            a.pop(rax).unwrap();
            a.iretq().unwrap();
        });
        guest.memory.write(handler, &code);
        guest.gate(0x40, handler, 0, 0x8e);
        let kick = guest.cpu.kicker();
        let done = Arc::new(AtomicBool::new(false));
        let kicker = {
            let done = done.clone();
            thread::spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    kick.kick();
                }
            })
        };
        for _ in 0..200_000 {
            guest.run();
            guest.devices.interrupts.clear();
            guest.devices.interrupts.push(0x40);
            let came = guest.memory.read_u64(DATA);
            assert_ne!(came, CODE + 4, "taken before HLT");
        }
        done.store(true, Ordering::Relaxed);
        kicker.join().unwrap();
    }
}
