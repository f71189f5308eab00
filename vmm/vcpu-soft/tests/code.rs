//! Code that changes under way: by itself, by another vCPU, by a device; and
//! pages that are taken away by other threads. Needs nothing.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use iced_x86::code_asm::*;
use support::*;
use weft_vcpu::{Access, Exit, Kick};
use weft_vcpu_soft::{Configuration, SoftCpu};

#[test]
fn an_instruction_may_change_the_next_one() {
    // The immediate of the second MOV is written by the first.
    let mut guest = Guest::new(|a| {
        a.mov(byte_ptr(CODE + 9), 7).unwrap();
        a.mov(eax, 1).unwrap();
        a.hlt().unwrap();
    });
    assert_eq!(guest.halts().registers[0], 7);
}

#[test]
fn a_loop_may_change_itself_every_time() {
    const BODY: u64 = CODE + 0x100;
    let mut guest = Guest::new(|a| a.jmp(BODY).unwrap());
    let body = assemble(64, BODY, |a| {
        let mut again = a.create_label();
        a.mov(ecx, 100).unwrap();
        a.set_label(&mut again).unwrap();
        a.add(eax, 0).unwrap();
        a.inc(byte_ptr(BODY + 6)).unwrap();
        a.dec(ecx).unwrap();
        a.jne(again).unwrap();
        a.hlt().unwrap();
    });
    // add eax, imm32 is 05 id.
    assert_eq!(body[5..7], [5, 0]);
    guest.memory.write(BODY, &body);
    assert_eq!(guest.halts().registers[0], (0..100).sum::<u64>());
}

#[test]
fn code_written_through_another_mapping_is_seen() {
    const FUNCTION: u64 = 0x60_0000;
    const ALIAS: u64 = 0x70_0000;
    let mut guest = Guest::new(|a| {
        a.mov(rbx, FUNCTION).unwrap();
        a.call(rbx).unwrap();
        a.mov(edx, eax).unwrap();
        a.mov(byte_ptr(ALIAS + 1), 2).unwrap();
        a.call(rbx).unwrap();
        a.hlt().unwrap();
    });
    guest.memory.write(FUNCTION, &[0xb8, 1, 0, 0, 0, 0xc3]);
    guest
        .memory
        .write_u64(entry(ALIAS), FUNCTION | PRESENT | WRITABLE);
    let state = guest.halts();
    assert_eq!((state.registers[2], state.registers[0]), (1, 2));
}

#[test]
fn what_a_device_writes_is_seen() {
    let mut guest = Guest::new(|a| {
        a.mov(eax, 1).unwrap();
        a.hlt().unwrap();
    });
    assert_eq!(guest.halts().registers[0], 1);
    guest.memory.write(CODE + 1, &[9]);
    guest.machine.written(CODE + 1..CODE + 2);
    // Without a restore, which would forget all code.
    let mut state = guest.cpu.save();
    assert_eq!(state.rip, CODE + 6);
    state.rip = CODE;
    guest.memory.write(CODE + 6, &[0xeb, 0xf8]);
    guest.machine.written(CODE + 6..CODE + 8);
    guest.devices.nmi = true;
    guest.faults();
    assert_eq!(guest.cpu.save().registers[0], 1, "not run again yet");
}

/// Another vCPU of the same machine, at `address`.
fn second(guest: &Guest, address: u64) -> SoftCpu {
    let configuration = Configuration {
        apic_id: 1,
        ..Configuration::default()
    };
    let mut cpu = SoftCpu::new(&guest.machine, configuration).unwrap();
    let mut state = guest.long_mode();
    state.rip = address;
    state.registers[4] = STACK - 0x1000;
    cpu.restore(&state);
    cpu
}

#[test]
fn code_that_another_vcpu_changes_is_seen() {
    // The second vCPU runs FUNCTION over and over, and stores what it returns.
    // The first changes what it returns, then waits until the second saw it.
    const FUNCTION: u64 = 0x60_0000;
    const SECOND: u64 = CODE + 0x1000;
    const SEEN: u64 = 0x62_0000;
    const ROUNDS: i32 = 2000;
    let mut guest = Guest::new(|a| {
        let mut round = a.create_label();
        let mut wait = a.create_label();
        a.mov(ecx, 1).unwrap();
        a.set_label(&mut round).unwrap();
        a.mov(dword_ptr(FUNCTION + 1), ecx).unwrap();
        a.set_label(&mut wait).unwrap();
        a.pause().unwrap();
        a.cmp(dword_ptr(SEEN), ecx).unwrap();
        a.jne(wait).unwrap();
        a.inc(ecx).unwrap();
        a.cmp(ecx, ROUNDS).unwrap();
        a.jne(round).unwrap();
        a.hlt().unwrap();
    });
    guest.memory.write(FUNCTION, &[0xb8, 0, 0, 0, 0, 0xc3]);
    let other = assemble(64, SECOND, |a| {
        let mut again = a.create_label();
        a.mov(rbx, FUNCTION).unwrap();
        a.set_label(&mut again).unwrap();
        a.call(rbx).unwrap();
        a.mov(dword_ptr(SEEN), eax).unwrap();
        a.jmp(again).unwrap();
    });
    guest.memory.write(SECOND, &other);
    let mut cpu = second(&guest, SECOND);
    let kick = cpu.kicker();
    let thread = thread::spawn(move || cpu.run(&mut Devices::default()));
    assert_eq!(guest.run(), Exit::Halted);
    kick.kick();
    assert_eq!(thread.join().unwrap(), Exit::Kicked);
    let last = guest.memory.read_u64(SEEN) as i32;
    assert_eq!(last, ROUNDS - 1);
}

#[test]
fn revoked_pages_are_not_used_before_they_are_asked_for_again() {
    // The guest counts at DATA without end. Once its right to write there is
    // revoked, the count may only change after the page was given again.
    const PATIENCE: Duration = Duration::from_secs(10);
    let mut guest = Guest::new(|a| {
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        a.inc(qword_ptr(DATA)).unwrap();
        a.jmp(again).unwrap();
    });
    guest.memory.strict.store(true, Ordering::SeqCst);
    let machine = guest.machine.clone();
    let memory = guest.memory.clone();
    let kick = guest.cpu.kicker();
    let thread = thread::spawn(move || guest.run());
    while memory.read_u64(DATA) == 0 {
        thread::yield_now();
    }
    let mut still = 0;
    for round in 0..2000 {
        let kept = (round % 2 == 0).then_some(Access::Read);
        machine.revoke(DATA, kept, PATIENCE).unwrap();
        let given = memory.given.load(Ordering::SeqCst);
        let before = memory.read_u64(DATA);
        let after = memory.read_u64(DATA);
        if memory.given.load(Ordering::SeqCst) == given {
            assert_eq!(before, after);
            still += 1;
        }
        machine.revoke(CODE, None, PATIENCE).unwrap();
    }
    println!("the page was at rest in {still} rounds");
    let before = memory.read_u64(DATA);
    while memory.read_u64(DATA) == before {
        thread::yield_now();
    }
    kick.kick();
    assert_eq!(thread.join().unwrap(), Exit::Kicked);
}

#[test]
fn many_threads_may_revoke_from_many_vcpus() {
    const PATIENCE: Duration = Duration::from_secs(20);
    let guest = Guest::new(|a| {
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        a.lock().inc(qword_ptr(DATA)).unwrap();
        a.lock().add(qword_ptr(DATA + 0xffc), 1).unwrap();
        a.inc(rcx).unwrap();
        a.jmp(again).unwrap();
    });
    let done = Arc::new(AtomicBool::new(false));
    let mut runners = Vec::new();
    let mut kicks = Vec::new();
    for _ in 0..3 {
        let mut cpu = second(&guest, CODE);
        kicks.push(cpu.kicker());
        runners.push(thread::spawn(move || {
            let exit = cpu.run(&mut Devices::default());
            (exit, cpu.save().registers[1])
        }));
    }
    let revokers: Vec<_> = (0..2)
        .map(|_| {
            let machine = guest.machine.clone();
            let done = done.clone();
            thread::spawn(move || {
                let mut rounds = 0;
                while !done.load(Ordering::Relaxed) {
                    machine.revoke(DATA, None, PATIENCE).unwrap();
                    machine
                        .revoke(DATA + PAGE, Some(Access::Read), PATIENCE)
                        .unwrap();
                    rounds += 1;
                }
                rounds
            })
        })
        .collect();
    thread::sleep(Duration::from_millis(300));
    for kick in &kicks {
        kick.kick();
    }
    let mut counted = 0;
    for runner in runners {
        let (exit, count) = runner.join().unwrap();
        assert_eq!(exit, Exit::Kicked);
        counted += count;
    }
    done.store(true, Ordering::Relaxed);
    for revoker in revokers {
        assert!(revoker.join().unwrap() > 0);
    }
    assert!(counted > 0);
    // A vCPU may have stopped between the first and the last instruction.
    let first = guest.memory.read_u64(DATA);
    assert!(first >= counted && first <= counted + 3);
    let straddling = guest.memory.read(DATA + 0xffc, 8);
    let second = u64::from_le_bytes(straddling.try_into().unwrap());
    assert!(
        second >= counted && second <= counted + 3,
        "{second} {counted}"
    );
}

/// A split lock stops every processor of the host, so hosts throttle it. Weft keeps
/// the other vCPUs outside instead. Therefore their plain additions, each within a
/// block, are not lost either, as they would be beside the host's own LOCK.
#[test]
fn a_lock_across_lines_is_not_the_hosts() {
    const ROUNDS: u64 = 20_000;
    const SPLIT: i32 = 0x7c;
    let counting = |locked: bool, neighbour: bool| {
        move |a: &mut CodeAssembler| {
            let mut again = a.create_label();
            a.mov(rcx, ROUNDS).unwrap();
            a.mov(rbx, DATA).unwrap();
            a.set_label(&mut again).unwrap();
            if neighbour {
                // One translation of the address does for this and the next.
                a.mov(rax, qword_ptr(rbx)).unwrap();
            }
            if locked {
                a.lock().add(qword_ptr(rbx + SPLIT), 1).unwrap();
            } else {
                a.add(qword_ptr(rbx + SPLIT), 1).unwrap();
            }
            a.dec(rcx).unwrap();
            a.jne(again).unwrap();
            a.hlt().unwrap();
        }
    };
    const PLAIN: u64 = CODE + 0x800;
    let translated: fn(&mut SoftCpu) = |cpu| cpu.translate_after(1);
    let interpreted: fn(&mut SoftCpu) = SoftCpu::interpret_only;
    for (configure, neighbour) in [
        (interpreted, false),
        (translated, false),
        (translated, true),
    ] {
        let guest = Guest::new(counting(true, neighbour));
        let plain = assemble(64, PLAIN, counting(false, false));
        guest.memory.write(PLAIN, &plain);
        let runners: Vec<_> = [CODE, PLAIN]
            .map(|start| {
                let mut cpu = second(&guest, start);
                configure(&mut cpu);
                thread::spawn(move || cpu.run(&mut Devices::default()))
            })
            .into();
        for runner in runners {
            assert_eq!(runner.join().unwrap(), Exit::Halted);
        }
        let sum = guest.memory.read(DATA + 0x7c, 8);
        let sum = u64::from_le_bytes(sum.try_into().unwrap());
        assert_eq!(sum, 2 * ROUNDS);
    }
}

/// Memory of which another node takes both pages now and then, to count up
/// `place` for itself: how often it did, in the number that is given back.
fn with_another_node(guest: &Guest, place: u64) -> Arc<AtomicU64> {
    let counted = Arc::new(AtomicU64::new(0));
    let (machine, memory, count) = (
        guest.machine.clone(),
        Arc::downgrade(&guest.memory),
        counted.clone(),
    );
    let mut calls = 0;
    let hook = move |page: u64| {
        calls += 1;
        let edge = place & !0xfff;
        if (page != edge && page != edge + PAGE) || calls % 23 != 0 {
            return;
        }
        for page in [edge, edge + PAGE] {
            machine.revoke(page, None, Duration::from_secs(10)).unwrap();
        }
        let memory = memory.upgrade().unwrap();
        let bytes = memory.read(place, 8).try_into().unwrap();
        let value = u64::from_le_bytes(bytes) + 1;
        memory.write(place, &value.to_le_bytes());
        count.fetch_add(1, Ordering::SeqCst);
    };
    guest.memory.strict.store(true, Ordering::SeqCst);
    *guest.memory.before_giving.lock().unwrap() = Some(Box::new(hook));
    counted
}

#[test]
fn deferred_work_is_done_between_blocks() {
    let configure: [fn(&mut Guest); 3] = [
        |guest| guest.cpu.interpret_only(),
        |_| {},
        |guest| guest.cpu.translate_after(1),
    ];
    for configure in configure {
        // Stores once, and then runs without end.
        let mut guest = Guest::new(|a| {
            let mut again = a.create_label();
            a.mov(qword_ptr(DATA), 7).unwrap();
            a.set_label(&mut again).unwrap();
            a.jmp(again).unwrap();
        });
        configure(&mut guest);
        let (machine, memory) = (guest.machine.clone(), Arc::downgrade(&guest.memory));
        let kick = guest.cpu.kicker();
        guest.memory.strict.store(true, Ordering::SeqCst);
        *guest.memory.deferred.lock().unwrap() = Some(DATA);
        *guest.memory.on_deferred_work.lock().unwrap() = Some(Box::new(move || {
            assert_eq!(memory.upgrade().unwrap().read_u64(DATA), 7);
            // The vCPU's own thread waits for all vCPUs here.
            machine
                .revoke(DATA, None, Duration::from_secs(10))
                .expect("the vCPU is outside");
            kick.kick();
        }));
        guest.cpu.set_budget(Some(1 << 24));
        assert_eq!(guest.run(), Exit::Kicked);
    }
}

#[test]
fn deferred_work_is_done_before_the_next_wait() {
    // One block: the second page may come only after others got the first.
    let mut guest = Guest::new(|a| {
        a.mov(qword_ptr(DATA), 7).unwrap();
        a.mov(qword_ptr(DATA + PAGE), 8).unwrap();
        a.hlt().unwrap();
    });
    let done = Arc::new(AtomicBool::new(false));
    let (work, given) = (done.clone(), done.clone());
    guest.memory.strict.store(true, Ordering::SeqCst);
    *guest.memory.deferred.lock().unwrap() = Some(DATA);
    *guest.memory.on_deferred_work.lock().unwrap() =
        Some(Box::new(move || work.store(true, Ordering::SeqCst)));
    *guest.memory.before_giving.lock().unwrap() = Some(Box::new(move |page| {
        assert!(page != DATA + PAGE || given.load(Ordering::SeqCst));
    }));
    assert_eq!(guest.run(), Exit::Halted);
    assert!(done.load(Ordering::SeqCst));
}

#[test]
fn locked_changes_across_pages_are_one_towards_other_nodes() {
    const PLACE: u64 = DATA + 0xffc;
    const ROUNDS: u32 = 300;
    let programs: [fn(&mut CodeAssembler); 2] = [
        |a| a.lock().add(qword_ptr(PLACE), 1).unwrap(),
        |a| {
            let mut again = a.create_label();
            a.nop().unwrap();
            a.set_label(&mut again).unwrap();
            a.mov(ebx, eax).unwrap();
            a.add(ebx, 1).unwrap();
            a.lock().cmpxchg8b(qword_ptr(PLACE)).unwrap();
            a.jnz(again).unwrap();
        },
    ];
    for write in programs {
        let mut guest = Guest::new(|a| {
            let mut again = a.create_label();
            a.mov(esi, ROUNDS).unwrap();
            a.set_label(&mut again).unwrap();
            write(a);
            a.dec(esi).unwrap();
            a.jnz(again).unwrap();
            a.hlt().unwrap();
        });
        let counted = with_another_node(&guest, PLACE);
        guest.halts();
        let theirs = counted.load(Ordering::SeqCst);
        assert!(theirs > u64::from(ROUNDS) / 20, "{theirs}");
        let sum = u64::from_le_bytes(guest.memory.read(PLACE, 8).try_into().unwrap());
        assert_eq!(sum, u64::from(ROUNDS) + theirs);
    }
}

#[test]
fn a_page_that_would_have_to_be_waited_for_is_translated_later() {
    const ROUNDS: u64 = 10_000;
    let run = |held_after: u64| {
        let mut guest = Guest::new(|a| {
            let mut again = a.create_label();
            a.mov(ecx, ROUNDS as u32).unwrap();
            a.set_label(&mut again).unwrap();
            a.out(0x80, al).unwrap();
            a.dec(ecx).unwrap();
            a.jnz(again).unwrap();
            a.hlt().unwrap();
        });
        let memory = guest.memory.clone();
        memory.strict_reads.store(true, Ordering::SeqCst);
        let mut calls = 0;
        guest.devices.on_access = Some(Box::new(move |_, _| {
            calls += 1;
            if calls == held_after {
                memory.strict_reads.store(false, Ordering::SeqCst);
            }
        }));
        guest.halts();
        // Of a vCPU that does not count, those that were interpreted.
        guest.cpu.instructions()
    };
    assert!(run(u64::MAX) > 3 * ROUNDS);
    let count = run(1000);
    assert!(count > 2900 && count < 4000, "{count}");
}
