//! Page tables: rights, accessed and dirty bits, sizes, what is cached and for
//! how long, accesses that straddle pages. Needs nothing.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use iced_x86::code_asm::*;
use support::*;
use weft_vcpu::CpuState;

const TARGET: u64 = 0x50_0000;

/// One instruction on `TARGET`, whose page table entry is `rights`.
fn access(rights: u64, user: bool, change: fn(&mut CpuState), write: bool) -> Option<Frame> {
    let mut guest = Guest::new(|a| {
        a.mov(rbx, TARGET).unwrap();
        if write {
            a.mov(dword_ptr(rbx + 8), 7).unwrap();
        } else {
            a.mov(eax, dword_ptr(rbx + 8)).unwrap();
        }
        a.ud2().unwrap();
    });
    guest.protect(TARGET, rights);
    let mut state = if user {
        guest.user_mode()
    } else {
        guest.long_mode()
    };
    change(&mut state);
    guest.cpu.restore(&state);
    let frame = guest.faults();
    if frame.vector == 14 {
        assert_eq!(guest.cpu.save().cr2, TARGET + 8);
    }
    (frame.vector != 6).then_some(frame)
}

fn error_of(rights: u64, user: bool, write: bool) -> Option<u64> {
    access(rights, user, |_| (), write).map(|frame| {
        assert_eq!(frame.vector, 14);
        frame.error.unwrap()
    })
}

#[test]
fn rights_are_those_of_the_level_and_the_access() {
    let all = PRESENT | WRITABLE | USER;
    assert_eq!(error_of(all, true, true), None);
    assert_eq!(error_of(0, false, false), Some(0));
    assert_eq!(error_of(0, false, true), Some(2));
    assert_eq!(error_of(0, true, false), Some(4));
    assert_eq!(error_of(PRESENT | USER, true, false), None);
    assert_eq!(error_of(PRESENT | USER, true, true), Some(7));
    assert_eq!(error_of(PRESENT | WRITABLE, true, false), Some(5));
    assert_eq!(error_of(PRESENT | WRITABLE, false, true), None);
    // CR0.WP: the supervisor too.
    assert_eq!(error_of(PRESENT, false, true), Some(3));
    let unprotected = |state: &mut CpuState| state.cr0 &= !(1 << 16);
    assert_eq!(access(PRESENT, false, unprotected, true), None);
}

#[test]
fn reserved_bits_are_a_fault_of_their_own() {
    assert_eq!(error_of(PRESENT | 1 << 51, false, false), Some(9));
    let no_execute_off = |state: &mut CpuState| state.efer &= !(1 << 11);
    let frame = access(PRESENT | NO_EXECUTE, false, no_execute_off, false);
    assert_eq!(frame.unwrap().error, Some(9));
    assert_eq!(error_of(PRESENT | NO_EXECUTE, false, false), None);
}

fn execute(rights: u64, user: bool, change: fn(&mut CpuState)) -> Frame {
    let mut guest = Guest::new(|a| {
        a.mov(rbx, TARGET).unwrap();
        a.jmp(rbx).unwrap();
    });
    guest.memory.write(TARGET, &[0x0f, 0x0b]);
    guest.protect(TARGET, rights);
    let mut state = if user {
        guest.user_mode()
    } else {
        guest.long_mode()
    };
    change(&mut state);
    guest.cpu.restore(&state);
    guest.faults()
}

#[test]
fn pages_may_refuse_to_be_executed() {
    let frame = execute(PRESENT, false, |_| ());
    assert_eq!((frame.vector, frame.rip), (6, TARGET));
    let frame = execute(PRESENT | NO_EXECUTE, false, |_| ());
    assert_eq!(
        (frame.vector, frame.error, frame.rip),
        (14, Some(0x11), TARGET)
    );
    let frame = execute(PRESENT, true, |_| ());
    assert_eq!((frame.vector, frame.error), (14, Some(0x15)));
}

#[test]
fn smep_keeps_the_supervisor_off_user_pages() {
    let smep = |state: &mut CpuState| state.cr4 |= 1 << 20;
    let frame = execute(PRESENT | USER, false, |_| ());
    assert_eq!(frame.vector, 6);
    let mut guest = Guest::new(|a| {
        a.mov(rbx, TARGET).unwrap();
        a.jmp(rbx).unwrap();
    });
    for page in (0..TARGET).step_by(4096) {
        guest.protect(page, PRESENT | WRITABLE);
    }
    let mut state = guest.long_mode();
    smep(&mut state);
    guest.cpu.restore(&state);
    let frame = guest.faults();
    assert_eq!(
        (frame.vector, frame.error, frame.rip),
        (14, Some(0x11), TARGET)
    );
}

#[test]
fn accessed_and_dirty_are_set_by_who_does_it() {
    let mut guest = Guest::new(|a| {
        a.mov(rbx, TARGET).unwrap();
        a.mov(eax, dword_ptr(rbx)).unwrap();
        a.mov(rcx, qword_ptr(entry(TARGET))).unwrap();
        a.mov(dword_ptr(rbx), 1).unwrap();
        a.mov(rdx, qword_ptr(entry(TARGET))).unwrap();
        a.hlt().unwrap();
    });
    let state = guest.halts();
    let bits = ACCESSED | DIRTY;
    assert_eq!(state.registers[1] & bits, ACCESSED);
    assert_eq!(state.registers[2] & bits, bits);
    // The upper levels are accessed, never dirty.
    assert_eq!(guest.memory.read_u64(TABLES) & bits, ACCESSED);
}

#[test]
fn dirty_that_the_guest_clears_is_set_again() {
    let mut guest = Guest::new(|a| {
        a.mov(rbx, TARGET).unwrap();
        a.mov(dword_ptr(rbx), 1).unwrap();
        a.and(dword_ptr(entry(TARGET)), !(DIRTY as i32)).unwrap();
        a.invlpg(ptr(rbx)).unwrap();
        a.mov(eax, dword_ptr(rbx)).unwrap();
        a.mov(dword_ptr(rbx), 2).unwrap();
        a.hlt().unwrap();
    });
    guest.halts();
    assert_ne!(guest.memory.read_u64(entry(TARGET)) & DIRTY, 0);
}

#[test]
fn translations_last_until_they_are_flushed() {
    let other = 0x60_0000_u64 | PRESENT | WRITABLE;
    for flush in 0..4 {
        let mut guest = Guest::new(|a| {
            a.mov(rbx, TARGET).unwrap();
            a.mov(eax, dword_ptr(rbx)).unwrap();
            a.mov(rcx, other | if flush == 3 { GLOBAL } else { 0 })
                .unwrap();
            a.mov(qword_ptr(entry(TARGET)), rcx).unwrap();
            match flush {
                0 => {}
                1 => a.invlpg(ptr(rbx)).unwrap(),
                _ => {
                    a.mov(rdx, cr3).unwrap();
                    a.mov(cr3, rdx).unwrap();
                }
            }
            a.mov(eax, dword_ptr(rbx)).unwrap();
            a.hlt().unwrap();
        });
        guest.memory.write(TARGET, &[1]);
        guest.memory.write(0x60_0000, &[2]);
        let seen = guest.halts().registers[0];
        assert_eq!(seen, if flush == 0 { 1 } else { 2 }, "{flush}");
    }
}

#[test]
fn global_translations_survive_a_new_address_space() {
    let mut guest = Guest::new(|a| {
        a.mov(rbx, TARGET).unwrap();
        a.mov(eax, dword_ptr(rbx)).unwrap();
        a.mov(qword_ptr(entry(TARGET)), 0).unwrap();
        a.mov(rdx, cr3).unwrap();
        a.mov(cr3, rdx).unwrap();
        a.mov(eax, dword_ptr(rbx)).unwrap();
        // CR4.PGE off and on drops them too.
        a.mov(rdx, cr4).unwrap();
        a.btc(rdx, 7).unwrap();
        a.mov(cr4, rdx).unwrap();
        a.mov(eax, dword_ptr(rbx)).unwrap();
        a.hlt().unwrap();
    });
    guest.protect(TARGET, PRESENT | GLOBAL);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (14, Some(0)));
    // Not the load behind the write to CR3, but the one behind the write to CR4.
    assert!(frame.rip > CODE + 0x28, "{:#x}", frame.rip);
}

#[test]
fn large_pages_are_pages() {
    let mut guest = Guest::new(|a| {
        a.mov(rbx, TARGET + 0x1234).unwrap();
        a.mov(dword_ptr(rbx), 0x55).unwrap();
        a.mov(rcx, (5_u64 << 30) + TARGET + 0x1234).unwrap();
        a.mov(eax, dword_ptr(rcx)).unwrap();
        a.hlt().unwrap();
    });
    // 2 MiB for the first, 1 GiB for the second.
    let all = PRESENT | WRITABLE | LARGE;
    let directory = TABLES + 2 * PAGE + 8 * (TARGET >> 21);
    guest.memory.write_u64(directory, TARGET & !0x1f_ffff | all);
    guest.memory.write_u64(TABLES + PAGE + 8 * 5, all);
    assert_eq!(guest.halts().registers[0], 0x55);
    assert_eq!(guest.memory.read(TARGET + 0x1234, 1), [0x55]);
    assert_ne!(guest.memory.read_u64(directory) & DIRTY, 0);
    // Bits below a large page's size are reserved.
    let mut guest = Guest::new(|a| a.mov(eax, dword_ptr(TARGET)).unwrap());
    guest
        .memory
        .write_u64(directory, TARGET & !0x1f_ffff | 0x4000 | all);
    assert_eq!(guest.faults().error, Some(9));
}

#[test]
fn accesses_may_straddle_pages() {
    let edge = TARGET + 0x1000;
    let mut guest = Guest::new(|a| {
        a.mov(rbx, edge - 3).unwrap();
        a.mov(rax, 0x1122_3344_5566_7788_u64).unwrap();
        a.mov(qword_ptr(rbx), rax).unwrap();
        a.mov(rcx, qword_ptr(rbx)).unwrap();
        a.add(dword_ptr(rbx + 1), 0x0101_0101).unwrap();
        a.lock().xadd(qword_ptr(rbx), rax).unwrap();
        a.movups(xmm0, xmmword_ptr(rbx)).unwrap();
        a.movups(xmmword_ptr(DATA), xmm0).unwrap();
        a.hlt().unwrap();
    });
    // The two pages are not neighbours in memory.
    guest
        .memory
        .write_u64(entry(edge), 0x70_0000 | PRESENT | WRITABLE);
    let state = guest.halts();
    assert_eq!(state.registers[1], 0x1122_3344_5566_7788);
    let before_sum = 0x1122_3344_5566_7788_u64.wrapping_add(0x01_0101_0100);
    assert_eq!(state.registers[0], before_sum);
    let sum = before_sum.wrapping_add(0x1122_3344_5566_7788);
    let bytes = sum.to_le_bytes();
    assert_eq!(guest.memory.read(edge - 3, 3), bytes[..3]);
    assert_eq!(guest.memory.read(0x70_0000, 5), bytes[3..]);
    assert_eq!(guest.memory.read(DATA, 8), bytes);
}

#[test]
fn a_straddling_store_writes_nothing_when_the_second_page_is_missing() {
    let mut guest = Guest::new(|a| {
        a.mov(qword_ptr(TARGET + 0xffc), -1).unwrap();
    });
    guest.protect(TARGET + 0x1000, 0);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (14, Some(2)));
    assert_eq!(guest.cpu.save().cr2, TARGET + 0x1000);
    assert_eq!(guest.memory.read(TARGET + 0xffc, 4), [0; 4]);
}

#[test]
fn instructions_may_straddle_pages() {
    let edge = CODE + 0x1000;
    let mut guest = Guest::new(|a| a.jmp(edge - 2).unwrap());
    // mov eax, 0x12345678; hlt
    guest.memory.write(edge - 2, &[0xb8, 0x78]);
    guest.memory.write(0x70_0000, &[0x56, 0x34, 0x12, 0xf4]);
    guest.memory.write_u64(entry(edge), 0x70_0000 | PRESENT);
    assert_eq!(guest.halts().registers[0], 0x1234_5678);
    // With the second page missing the fault is there, and the instruction here.
    guest.protect(edge, 0);
    let state = guest.long_mode();
    guest.cpu.restore(&state);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.rip), (14, edge - 2));
    assert_eq!(guest.cpu.save().cr2, edge);
}

#[test]
fn faults_leave_registers_as_they_were() {
    let mut guest = Guest::new(|a| {
        a.mov(rsp, TARGET + 0x1000).unwrap();
        a.mov(ecx, 5).unwrap();
        a.add(qword_ptr(rsp - 0x10), rcx).unwrap();
        a.stc().unwrap();
        a.adc(qword_ptr(TARGET - 4), rcx).unwrap();
    });
    guest.protect(TARGET - 0x1000, PRESENT);
    guest.gate(14, HANDLERS + 14 * 32, 1, 0x8e);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (14, Some(3)));
    assert_eq!(frame.rsp, TARGET + 0x1000);
    assert_eq!(frame.rflags & 1, 1);
    assert_eq!(guest.memory.read_u64(TARGET), 0);
}

#[test]
fn tables_outside_memory_are_a_fault_of_the_guest() {
    let mut guest = Guest::new(|a| a.mov(eax, dword_ptr(TARGET)).unwrap());
    let directory = TABLES + 2 * PAGE + 8 * (TARGET >> 21);
    guest
        .memory
        .write_u64(directory, 1 << 40 | PRESENT | WRITABLE);
    assert_eq!(guest.faults().error, Some(9));
}

#[test]
fn what_is_no_memory_is_a_device() {
    let mut guest = Guest::new(|a| {
        a.mov(rbx, TARGET).unwrap();
        a.mov(dword_ptr(rbx + 4), 0x1234_5678).unwrap();
        a.mov(ax, word_ptr(rbx + 0x20)).unwrap();
        a.out(0x80, al).unwrap();
        a.hlt().unwrap();
    });
    guest
        .memory
        .write_u64(entry(TARGET), 0xfee0_0000 | PRESENT | WRITABLE);
    assert_eq!(guest.halts().registers[0], 0x2120);
    let written = (0xfee0_0004, vec![0x78, 0x56, 0x34, 0x12]);
    assert_eq!(guest.devices.registers, [written]);
    assert_eq!(guest.devices.ports, [(0x80, vec![0x20])]);
}

/// A device in front of `TARGET + 0x1000`, which is memory that is taken away,
/// and changed, whenever the device is used; `seen` is what was there then.
fn device_before_memory(write: fn(&mut CodeAssembler)) -> (Guest, Arc<AtomicU64>) {
    let mut guest = Guest::new(|a| {
        a.mov(rbx, TARGET + 0xffc).unwrap();
        a.mov(rax, 0x1122_3344_5566_7788_u64).unwrap();
        write(a);
        a.hlt().unwrap();
    });
    guest
        .memory
        .write_u64(entry(TARGET), 0xfee0_0000 | PRESENT | WRITABLE);
    guest.memory.write_u64(TARGET + 0x1000, 0xaaaa_aaaa);
    let (memory, machine) = (guest.memory.clone(), guest.machine.clone());
    let seen = Arc::new(AtomicU64::new(0));
    let first = seen.clone();
    guest.devices.on_access = Some(Box::new(move |address, _| {
        if address == 0xfee0_0ffc {
            machine
                .revoke(TARGET + 0x1000, None, Duration::from_secs(10))
                .unwrap();
            first.store(memory.read_u64(TARGET + 0x1000), Ordering::SeqCst);
            memory.write_u64(TARGET + 0x1000, 0xbbbb_bbbb);
        }
    }));
    (guest, seen)
}

#[test]
fn memory_that_a_device_has_taken_away_meanwhile_is_not_used() {
    let (mut guest, seen) = device_before_memory(|a| a.mov(qword_ptr(rbx), rax).unwrap());
    guest.halts();
    assert_eq!(seen.load(Ordering::SeqCst), 0x1122_3344);
    assert_eq!(guest.memory.read_u64(TARGET + 0x1000), 0xbbbb_bbbb);
    let (mut guest, seen) = device_before_memory(|a| a.mov(rax, qword_ptr(rbx)).unwrap());
    assert_eq!(guest.halts().registers[0], 0xaaaa_aaaa_fffe_fdfc);
    assert_eq!(seen.load(Ordering::SeqCst), 0xaaaa_aaaa);
}

#[test]
fn accesses_at_the_end_of_the_address_space_wrap_or_fault() {
    // The last page is mapped, the first is not: what crosses the end faults at 0.
    const LAST: u64 = u64::MAX - 0xfff;
    let programs: [fn(&mut CodeAssembler); 4] = [
        |a| a.mov(rax, qword_ptr(rbx)).unwrap(),
        |a| a.mov(qword_ptr(rbx), rax).unwrap(),
        |a| a.movups(xmm0, xmmword_ptr(rbx)).unwrap(),
        |a| a.lock().xadd(qword_ptr(rbx), rax).unwrap(),
    ];
    for write in programs {
        let mut guest = Guest::new(|a| {
            a.mov(rbx, LAST + 0xffc).unwrap();
            write(a);
        });
        let all = PRESENT | WRITABLE;
        for level in 0..3 {
            let table = TABLES + level * PAGE;
            let next = 0x70_0000 + level * PAGE;
            let from = if level == 0 { table } else { next - PAGE };
            guest.memory.write_u64(from + 8 * 511, next | all);
        }
        guest.memory.write_u64(0x70_2000 + 8 * 511, 0x71_0000 | all);
        guest.protect(0, 0);
        let frame = guest.faults();
        assert_eq!(frame.vector, 14);
        assert_eq!(guest.cpu.save().cr2, 0);
    }
}
