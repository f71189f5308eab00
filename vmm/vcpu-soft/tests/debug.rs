//! Debug registers: breakpoints on data, instructions and ports, the detection
//! of accesses to them, single steps and what they go together with. Needs
//! nothing.

mod support;

use iced_x86::code_asm::*;
use support::*;
use weft_vcpu::{CpuState, Exit, Kick};

const WRITES: u64 = 1;
const PORTS: u64 = 2;
const ACCESSES: u64 = 3;

const STEP: u64 = 1 << 14;
const DETECTED: u64 = 1 << 13;
const TRAP_FLAG: u64 = 1 << 8;
const RESUME: u64 = 1 << 16;

/// Interpreted, and translated at once.
const BOTH: [u32; 2] = [u32::MAX, 1];

/// DR7 with breakpoint `index` enabled.
fn enabled(index: u64, kind: u64, length: u64) -> u64 {
    let code = match length {
        1 => 0,
        2 => 1,
        4 => 3,
        _ => 2,
    };
    1 << (2 * index) | (code << 2 | kind) << (16 + 4 * index) | 0x400
}

/// Runs with these debug registers.
fn start(guest: &mut Guest, change: impl FnOnce(&mut CpuState)) {
    let mut state = guest.long_mode();
    state.registers[3] = DATA;
    change(&mut state);
    guest.cpu.restore(&state);
}

/// The reasons in DR6.
fn reasons(guest: &Guest) -> u64 {
    let value = guest.cpu.save().debug[4];
    assert_eq!(value & !0xe00f, 0xffff_0ff0);
    value & 0xe00f
}

#[track_caller]
fn trapped_at(guest: &mut Guest, rip: u64, why: u64) -> Frame {
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.rip), (1, rip), "{frame:x?}");
    assert_eq!(reasons(guest), why);
    frame
}

/// An instruction that stores or loads `size` bytes at RBX + `offset`.
fn access(a: &mut CodeAssembler, size: u64, offset: u64, write: bool) {
    let place = rbx + offset as i32;
    match (size, write) {
        (1, true) => a.mov(byte_ptr(place), al),
        (2, true) => a.mov(word_ptr(place), ax),
        (4, true) => a.mov(dword_ptr(place), eax),
        (8, true) => a.mov(qword_ptr(place), rax),
        (16, true) => a.movups(xmmword_ptr(place), xmm0),
        (1, false) => a.mov(al, byte_ptr(place)),
        (2, false) => a.mov(ax, word_ptr(place)),
        (4, false) => a.mov(eax, dword_ptr(place)),
        (8, false) => a.mov(rax, qword_ptr(place)),
        _ => a.movups(xmm0, xmmword_ptr(place)),
    }
    .unwrap();
}

#[test]
fn watchpoints_see_every_access_that_overlaps_and_no_other() {
    const AT: u64 = 0x20;
    for length in [1, 2, 4, 8] {
        for (size, kind, write) in [1, 2, 4, 8, 16]
            .into_iter()
            .flat_map(|size| {
                [
                    (size, WRITES, true),
                    (size, WRITES, false),
                    (size, ACCESSES, false),
                ]
            })
            .chain([(4, ACCESSES, true)])
        {
            for offset in AT - 17..AT + 10 {
                let mut guest = Guest::new(|a| {
                    access(a, size, offset, write);
                    a.hlt().unwrap();
                });
                start(&mut guest, |state| {
                    state.debug[1] = DATA + AT + (length - 1);
                    state.debug[5] = enabled(1, kind, length);
                    state.registers[0] = 0x1122_3344_5566_7788;
                });
                guest.cpu.translate_after(1);
                let end = {
                    let code = assemble(64, CODE, |a| access(a, size, offset, write));
                    CODE + code.len() as u64
                };
                let overlaps = offset < AT + length && AT < offset + size;
                let expected = overlaps && (write || kind == ACCESSES);
                let what = format!("{length} {size} {kind} {write} {offset:#x}");
                if expected {
                    let frame = guest.faults();
                    assert_eq!((frame.vector, frame.rip), (1, end), "{what}");
                    assert_eq!(reasons(&guest), 2, "{what}");
                } else {
                    assert_eq!(guest.halts().rip, end + 1, "{what}");
                    assert_eq!(guest.frame(), None, "{what}");
                }
                if write && size < 16 {
                    // A trap: it was done.
                    let stored = guest.memory.read(DATA + offset, size as usize);
                    assert_eq!(
                        stored,
                        0x1122_3344_5566_7788_u64.to_le_bytes()[..size as usize]
                    );
                }
            }
        }
    }
}

#[test]
fn watchpoints_are_seen_where_an_access_crosses_pages() {
    for at in [DATA + PAGE - 1, DATA + PAGE] {
        let mut guest = Guest::new(|a| {
            a.add(qword_ptr(rbx + (PAGE as i32 - 4)), rax).unwrap();
            a.hlt().unwrap();
        });
        start(&mut guest, |state| {
            state.debug[0] = at;
            state.debug[5] = enabled(0, WRITES, 1);
            state.registers[0] = 5;
        });
        trapped_at(&mut guest, CODE + 7, 1);
        assert_eq!(guest.memory.read(DATA + PAGE - 4, 1), [5]);
    }
}

/// A loop that the guest has run often before it sets the watchpoint itself, and
/// the same loop afterwards, which counts a word on the watched page up to the
/// watched one.
#[test]
fn code_that_is_hot_meets_a_watchpoint_that_is_set_later() {
    for translated_after in BOTH {
        let mut guest = Guest::new(|a| {
            let mut again = a.create_label();
            let mut walk = a.create_label();
            a.mov(ebp, 2).unwrap();
            a.set_label(&mut again).unwrap();
            a.xor(ecx, ecx).unwrap();
            a.set_label(&mut walk).unwrap();
            a.inc(qword_ptr(rbx + rcx * 8)).unwrap();
            a.inc(ecx).unwrap();
            a.cmp(ecx, 300).unwrap();
            a.jb(walk).unwrap();
            a.mov(dr2, rsi).unwrap();
            a.mov(dr7, rdi).unwrap();
            a.dec(ebp).unwrap();
            a.jnz(again).unwrap();
            a.hlt().unwrap();
        });
        start(&mut guest, |state| {
            state.registers[6] = DATA + 200 * 8;
            state.registers[7] = enabled(2, ACCESSES, 4);
        });
        guest.cpu.translate_after(translated_after);
        trapped_at(&mut guest, CODE + 7 + 4, 4);
        let state = guest.cpu.save();
        assert_eq!((state.registers[1], state.registers[5]), (200, 1));
        assert_eq!(guest.memory.read_u64(DATA + 200 * 8), 2);
        assert_eq!(guest.memory.read_u64(DATA + 201 * 8), 1);
    }
}

#[test]
fn a_repeated_string_instruction_traps_behind_the_element() {
    for translated_after in BOTH {
        for (bytes, kind) in [([0xf3, 0xaa], WRITES), ([0xf3, 0xa4], ACCESSES)] {
            let mut guest = Guest::new(|a| {
                a.db(&bytes).unwrap();
                a.hlt().unwrap();
            });
            start(&mut guest, |state| {
                state.registers[1] = 6000;
                state.registers[6] = DATA + 0x4000;
                state.registers[7] = DATA + 0x1000;
                state.debug[3] = DATA + 0x1000 + 5000;
                state.debug[5] = enabled(3, kind, 2);
            });
            guest.cpu.translate_after(translated_after);
            let frame = trapped_at(&mut guest, CODE, 8);
            assert_ne!(frame.rflags & RESUME, 0, "the rest follows");
            let state = guest.cpu.save();
            assert_eq!(
                (state.registers[1], state.registers[7]),
                (999, DATA + 0x1000 + 5001)
            );
        }
    }
}

#[test]
fn pushes_calls_and_frames_are_watched_too() {
    type Program = fn(&mut CodeAssembler);
    let programs: [(Program, u64); 4] = [
        (|a| a.push(rax).unwrap(), CODE + 1),
        (|a| a.call(CODE + 0x100).unwrap(), CODE + 0x100),
        (|a| a.pop(rax).unwrap(), CODE + 1),
        (|a| a.fnstenv(ptr(rsp - 16)).unwrap(), CODE + 4),
    ];
    for translated_after in BOTH {
        for (write, rip) in programs {
            let mut guest = Guest::new(write);
            // Of the trap: not the stack that is watched.
            guest.gate(1, HANDLERS + 32, 1, 0x8e);
            start(&mut guest, |state| {
                state.debug[0] = STACK - 8;
                state.debug[1] = STACK;
                state.debug[5] = enabled(0, ACCESSES, 8) | enabled(1, ACCESSES, 8);
            });
            guest.cpu.translate_after(translated_after);
            let frame = guest.faults();
            assert_eq!((frame.vector, frame.rip), (1, rip));
            assert_ne!(reasons(&guest), 0);
        }
        // A frame: the trap comes before the handler's first instruction.
        let mut guest = Guest::new(|a| a.int(0x40).unwrap());
        guest.gate(1, HANDLERS + 32, 1, 0x8e);
        start(&mut guest, |state| {
            state.debug[0] = STACK - 40;
            state.debug[5] = enabled(0, WRITES, 8);
        });
        guest.cpu.translate_after(translated_after);
        trapped_at(&mut guest, HANDLERS + 0x40 * 32, 1);
    }
}

#[test]
fn an_instruction_that_faults_hits_no_watchpoint() {
    let mut guest = Guest::new(|a| {
        a.mov(rcx, 0x50_0000_u64).unwrap();
        a.movsb().unwrap();
    });
    guest.protect(0x50_0000, 0);
    start(&mut guest, |state| {
        state.registers[6] = DATA;
        state.registers[7] = 0x50_0000;
        state.debug[0] = DATA;
        state.debug[5] = enabled(0, ACCESSES, 1);
    });
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.rip), (14, CODE + 10));
    assert_eq!(reasons(&guest), 0);
}

/// A handler of #DB that counts in R8, sets RF and returns.
fn counting_handler(guest: &Guest) {
    let handler = assemble(64, HANDLERS + 32, |a| {
        a.inc(r8).unwrap();
        a.or(dword_ptr(rsp + 16), RESUME as i32).unwrap();
        a.iretq().unwrap();
    });
    guest.memory.write(HANDLERS + 32, &handler);
}

#[test]
fn instructions_have_breakpoints_and_rf_passes_them() {
    for translated_after in BOTH {
        // Where the loop begins, in its middle, and behind it.
        for (place, times) in [(CODE + 5, 50), (CODE + 8, 50), (CODE + 12, 1)] {
            let mut guest = Guest::new(|a| {
                let mut again = a.create_label();
                a.mov(ecx, 50).unwrap();
                a.set_label(&mut again).unwrap();
                a.add(rax, rcx).unwrap();
                a.dec(ecx).unwrap();
                a.jnz(again).unwrap();
                a.hlt().unwrap();
            });
            start(&mut guest, |state| {
                state.debug[0] = place;
                state.debug[5] = enabled(0, 0, 1);
            });
            guest.cpu.translate_after(translated_after);
            // Before anything of it, and without RF.
            let frame = trapped_at(&mut guest, place, 1);
            assert_eq!(frame.rflags & RESUME, 0);
            counting_handler(&guest);
            start(&mut guest, |state| {
                state.debug[0] = place;
                state.debug[5] = enabled(0, 0, 1);
            });
            guest.cpu.translate_after(translated_after);
            let state = guest.halts();
            assert_eq!((state.registers[8], state.registers[0]), (times, 1275));
        }
    }
}

#[test]
fn code_that_is_hot_meets_a_breakpoint_that_is_set_later() {
    const FUNCTION: u64 = CODE + PAGE + 0x100;
    for translated_after in BOTH {
        let mut guest = Guest::new(|a| {
            let mut again = a.create_label();
            a.mov(ecx, 400).unwrap();
            a.set_label(&mut again).unwrap();
            a.call(FUNCTION).unwrap();
            a.cmp(ecx, 100).unwrap();
            a.mov(rax, rdi).unwrap();
            a.cmovne(rax, rsi).unwrap();
            a.mov(dr7, rax).unwrap();
            a.dec(ecx).unwrap();
            a.jnz(again).unwrap();
            a.hlt().unwrap();
        });
        guest.memory.write(
            FUNCTION,
            &assemble(64, FUNCTION, |a| {
                a.inc(edx).unwrap();
                a.inc(edx).unwrap();
                a.ret().unwrap();
            }),
        );
        counting_handler(&guest);
        start(&mut guest, |state| {
            state.debug[2] = FUNCTION + 2;
            state.registers[6] = 0x400;
            state.registers[7] = enabled(2, 0, 1);
        });
        guest.cpu.translate_after(translated_after);
        let state = guest.halts();
        // Enabled at 100, and off again after one round.
        assert_eq!((state.registers[8], state.registers[2]), (1, 800));
    }
}

#[test]
fn faults_push_rf_and_returns_take_it_only_for_breakpoints() {
    let mut guest = Guest::new(|a| a.ud2().unwrap());
    assert_ne!(guest.faults().rflags & RESUME, 0);
    // An interrupt much later does not see what IRET loaded.
    let mut guest = Guest::new(|a| {
        a.iretq().unwrap();
        a.nop().unwrap();
        a.int(0x40).unwrap();
    });
    let words = [
        CODE + 2,
        u64::from(KERNEL_CODE),
        RESUME | 2,
        STACK,
        u64::from(KERNEL_DATA),
    ];
    for (index, word) in words.into_iter().enumerate() {
        guest.memory.write_u64(DATA + 8 * index as u64, word);
    }
    start(&mut guest, |state| state.registers[4] = DATA);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.rflags & RESUME), (0x40, 0));
}

#[test]
fn ports_have_breakpoints_where_cr4_says_so() {
    for translated_after in BOTH {
        for (extensions, kind, expected) in [(true, PORTS, true), (false, PORTS, false)] {
            let mut guest = Guest::new(|a| {
                a.out(0x80, al).unwrap();
                a.in_(eax, 0x60).unwrap();
                a.hlt().unwrap();
            });
            start(&mut guest, |state| {
                state.debug[1] = 0x62;
                state.debug[5] = enabled(1, kind, 2);
                state.cr4 |= if extensions { 1 << 3 } else { 0 };
            });
            guest.cpu.translate_after(translated_after);
            if expected {
                trapped_at(&mut guest, CODE + 4, 2);
            } else {
                assert_eq!(guest.halts().rip, CODE + 5);
                assert_eq!(guest.frame(), None);
            }
        }
        // REP INSB: behind the first element.
        let mut guest = Guest::new(|a| a.db(&[0xf3, 0x6c]).unwrap());
        start(&mut guest, |state| {
            state.debug[0] = 0x60;
            state.debug[5] = enabled(0, PORTS, 1);
            state.cr4 |= 1 << 3;
            state.registers[1] = 3;
            state.registers[2] = 0x60;
            state.registers[7] = DATA;
        });
        guest.cpu.translate_after(translated_after);
        trapped_at(&mut guest, CODE, 1);
        assert_eq!(guest.cpu.save().registers[1], 2);
    }
}

#[test]
fn accesses_to_debug_registers_are_detected() {
    let programs: [fn(&mut CodeAssembler); 2] =
        [|a| a.mov(dr0, rax).unwrap(), |a| a.mov(rax, dr7).unwrap()];
    for write in programs {
        let mut guest = Guest::new(write);
        start(&mut guest, |state| state.debug[5] = 1 << 13 | 0x400);
        let frame = trapped_at(&mut guest, CODE, DETECTED);
        assert_ne!(frame.rflags & RESUME, 0);
        let state = guest.cpu.save();
        assert_eq!((state.debug[5], state.debug[0]), (0x400, 0));
    }
    // At level 3 that is nobody's.
    let mut guest = Guest::new(|a| a.mov(rax, dr7).unwrap());
    let mut user = guest.user_mode();
    user.debug[5] = 1 << 13 | 0x400;
    guest.cpu.restore(&user);
    assert_eq!(guest.faults().vector, 13);
}

#[test]
fn a_single_step_says_so_beside_breakpoints() {
    // Bits 0 to 3 are those of this exception, the others stay.
    let cases = [
        (enabled(0, WRITES, 8), STEP | 1),
        (enabled(1, WRITES, 8), STEP),
        (enabled(0, 0, 1), STEP),
        (0x400, STEP),
    ];
    for (control, why) in cases {
        let mut guest = Guest::new(|a| a.mov(qword_ptr(rbx), rax).unwrap());
        start(&mut guest, |state| {
            state.rflags |= TRAP_FLAG;
            state.debug[0] = DATA;
            state.debug[1] = DATA + 8;
            state.debug[4] |= 12;
            state.debug[5] = control;
        });
        trapped_at(&mut guest, CODE + 3, why);
    }
    for (control, why) in [(enabled(0, WRITES, 8), 1), (enabled(2, 0, 1), 4)] {
        let mut guest = Guest::new(|a| a.mov(qword_ptr(rbx), rax).unwrap());
        start(&mut guest, |state| {
            state.debug = [DATA, 0, CODE, 0, 0xffff_0ff0 | STEP | 2, control];
        });
        let rip = if why == 1 { CODE + 3 } else { CODE };
        trapped_at(&mut guest, rip, STEP | why);
    }
}

/// Handler entries of a run with TF set, by their RIPs.
fn steps(guest: &mut Guest) -> Vec<u64> {
    let handler = assemble(64, HANDLERS + 32, |a| {
        a.mov(r9, qword_ptr(rsp)).unwrap();
        a.mov(qword_ptr(r10), r9).unwrap();
        a.add(r10, 8).unwrap();
        a.iretq().unwrap();
    });
    const LIST: u64 = 0x5_0000;
    guest.memory.write(HANDLERS + 32, &handler);
    let mut state = guest.cpu.save();
    state.registers[10] = LIST;
    guest.cpu.restore(&state);
    guest.halts();
    let count = (guest.cpu.save().registers[10] - LIST) / 8;
    (0..count)
        .map(|index| guest.memory.read_u64(LIST + 8 * index))
        .collect()
}

#[test]
fn single_steps_follow_tf_as_it_was_before() {
    // POPF takes TF away, and traps; a repeated instruction traps for each
    // element; a load of SS holds the trap back.
    let mut guest = Guest::new(|a| {
        a.db(&[0xf3, 0xaa]).unwrap();
        a.mov(ss, eax).unwrap();
        a.nop().unwrap();
        a.push(2).unwrap();
        a.popfq().unwrap();
        a.nop().unwrap();
        a.hlt().unwrap();
    });
    start(&mut guest, |state| {
        state.rflags |= TRAP_FLAG;
        state.registers[0] = u64::from(KERNEL_DATA);
        state.registers[1] = 3;
        state.registers[7] = DATA;
    });
    let expected = [0, 0, 2, 5, 7, 8].map(|offset| CODE + offset);
    assert_eq!(steps(&mut guest), expected);
}

#[test]
fn what_a_load_of_ss_hits_comes_behind_the_next_instruction() {
    for translated_after in BOTH {
        let mut guest = Guest::new(|a| {
            a.mov(ss, word_ptr(rbx)).unwrap();
            a.nop().unwrap();
            a.nop().unwrap();
        });
        guest.memory.write(DATA, &KERNEL_DATA.to_le_bytes());
        start(&mut guest, |state| {
            // The breakpoint on the first NOP is passed, too.
            state.debug[0] = DATA;
            state.debug[1] = CODE + 2;
            state.debug[5] = enabled(0, ACCESSES, 2) | enabled(1, 0, 1);
        });
        guest.cpu.translate_after(translated_after);
        trapped_at(&mut guest, CODE + 3, 1);
    }
}

#[test]
fn a_halt_is_stepped_over() {
    let mut guest = Guest::new(|a| {
        a.hlt().unwrap();
        a.nop().unwrap();
    });
    start(&mut guest, |state| state.rflags |= TRAP_FLAG);
    trapped_at(&mut guest, CODE + 1, STEP);
}

#[test]
fn int1_is_a_debug_exception_that_says_nothing() {
    let mut guest = Guest::new(|a| a.db(&[0xf1]).unwrap());
    trapped_at(&mut guest, CODE + 1, 0);
}

#[test]
fn system_calls_step_by_the_flags_that_they_leave() {
    const ENTRY: u64 = CODE + 0x800;
    for translated_after in BOTH {
        for (mask, expected) in [
            // SFMASK clears TF: the kernel is not stepped, SYSRET's trap is
            // that of the SYSCALL.
            (TRAP_FLAG, vec![CODE + 2, CODE + 3, CODE + 5]),
            (0, vec![ENTRY, ENTRY + 3, CODE + 2, CODE + 3, CODE + 5]),
        ] {
            let mut guest = Guest::new(|a| {
                a.syscall().unwrap();
                a.nop().unwrap();
                a.int(0x41).unwrap();
            });
            let entry = assemble(64, ENTRY, |a| {
                a.mov(rdx, rcx).unwrap();
                a.sysretq().unwrap();
            });
            guest.memory.write(ENTRY, &entry);
            guest.gate(0x41, HANDLERS + 0x41 * 32, 0, 0xee);
            let mut user = guest.user_mode();
            user.rflags |= TRAP_FLAG;
            user.msrs.push((0xc000_0081, 0x0013_0008_0000_0000));
            user.msrs.push((0xc000_0082, ENTRY));
            user.msrs.push((0xc000_0084, mask));
            guest.cpu.restore(&user);
            guest.cpu.translate_after(translated_after);
            let mut expected = expected;
            // INT clears it, and does not trap.
            expected.pop();
            assert_eq!(steps(&mut guest), expected);
        }
    }
}

#[test]
fn breakpoints_do_not_change_the_count_of_a_deterministic_cpu() {
    let run = |debug: [u64; 6]| {
        let configuration = weft_vcpu_soft::Configuration {
            deterministic: true,
            ..Default::default()
        };
        let mut guest = Guest::with(configuration, |a| {
            let mut again = a.create_label();
            a.mov(ecx, 100).unwrap();
            a.set_label(&mut again).unwrap();
            a.mov(qword_ptr(rbx), rcx).unwrap();
            a.dec(ecx).unwrap();
            a.jnz(again).unwrap();
            a.hlt().unwrap();
        });
        counting_handler(&guest);
        start(&mut guest, |state| state.debug = debug);
        let state = guest.halts();
        state.instructions - 3 * state.registers[8]
    };
    let plain = run([0, 0, 0, 0, 0xffff_0ff0, 0x400]);
    let watched = [DATA, CODE + 8, 0, 0, 0xffff_0ff0];
    let both = enabled(0, WRITES, 8) | enabled(1, 0, 1);
    let run_watched = |control| run([watched[0], watched[1], 0, 0, watched[4], control]);
    assert_eq!(run_watched(enabled(0, WRITES, 8)), plain);
    assert_eq!(run_watched(enabled(1, 0, 1)), plain);
    assert_eq!(run_watched(both), plain);
}

#[test]
fn a_vcpu_that_is_kicked_keeps_its_breakpoints() {
    let mut guest = Guest::new(|a| {
        a.mov(qword_ptr(rbx), rax).unwrap();
        a.hlt().unwrap();
    });
    start(&mut guest, |state| {
        state.debug[0] = DATA;
        state.debug[5] = enabled(0, WRITES, 8);
    });
    guest.cpu.kicker().kick();
    assert_eq!(guest.run(), Exit::Kicked);
    trapped_at(&mut guest, CODE + 3, 1);
}
