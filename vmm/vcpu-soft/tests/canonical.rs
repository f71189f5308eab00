//! Addresses that are not canonical, where a register or a branch would take
//! them: descriptor tables, task state, gates, MSRs, far branches and returns.
//! Needs nothing.

mod support;

use iced_x86::code_asm::*;
use support::*;

/// The first address that is not canonical.
const HOLE: u64 = 1 << 47;

/// A selector whose descriptor a test writes.
const OWN: u16 = 0x40;

fn general_protection(mut guest: Guest, error: u64) -> Frame {
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (13, Some(error)), "{frame:x?}");
    assert_eq!(frame.rip, CODE, "nothing was done");
    frame
}

/// One instruction with RBX at `DATA`.
fn at_data(write: impl FnOnce(&mut CodeAssembler)) -> Guest {
    let mut guest = Guest::new(write);
    let mut state = guest.long_mode();
    state.registers[3] = DATA;
    guest.cpu.restore(&state);
    guest
}

#[test]
fn descriptor_tables_lie_at_canonical_addresses() {
    let programs: [fn(&mut CodeAssembler); 2] =
        [|a| a.lgdt(ptr(rbx)).unwrap(), |a| a.lidt(ptr(rbx)).unwrap()];
    for write in programs {
        let guest = at_data(write);
        guest.memory.write(DATA, &[0xff, 0]);
        guest.memory.write(DATA + 2, &HOLE.to_le_bytes());
        general_protection(guest, 0);
    }
    // The upper half is fine.
    let mut guest = at_data(|a| {
        a.lgdt(ptr(rbx)).unwrap();
        a.hlt().unwrap();
    });
    let base = 0xffff_8000_0000_0000_u64;
    guest.memory.write(DATA, &[0xff, 0]);
    guest.memory.write(DATA + 2, &base.to_le_bytes());
    assert_eq!(guest.halts().gdtr.base, base);
}

/// A system descriptor of `kind` with this base, at [`OWN`].
fn system_descriptor(guest: &Guest, kind: u64, base: u64, upper_type: u64) {
    let low = 0x67 | (base & 0xff_ffff) << 16 | (0x80 | kind) << 40 | (base >> 24 & 0xff) << 56;
    guest.memory.write_u64(GDT + u64::from(OWN), low);
    let high = base >> 32 | upper_type << 40;
    guest.memory.write_u64(GDT + u64::from(OWN) + 8, high);
}

fn load(task: bool) -> Guest {
    let mut guest = Guest::new(move |a| {
        if task {
            a.ltr(ax).unwrap();
        } else {
            a.lldt(ax).unwrap();
        }
        a.hlt().unwrap();
    });
    let mut state = guest.long_mode();
    state.registers[0] = u64::from(OWN);
    guest.cpu.restore(&state);
    guest
}

#[test]
fn task_and_local_table_lie_at_canonical_addresses() {
    for (task, kind) in [(true, 9), (false, 2)] {
        let guest = load(task);
        system_descriptor(&guest, kind, HOLE, 0);
        general_protection(guest, u64::from(OWN));
        // The descriptor's second half is no descriptor.
        let guest = load(task);
        system_descriptor(&guest, kind, 0x5000, 1);
        general_protection(guest, u64::from(OWN));
        let mut guest = load(task);
        system_descriptor(&guest, kind, 0xffff_8000_1234_5000, 0);
        let state = guest.halts();
        let loaded = if task { state.tr } else { state.ldtr };
        assert_eq!(loaded.base, 0xffff_8000_1234_5000);
    }
}

#[test]
fn msrs_with_addresses_take_canonical_ones() {
    // SYSENTER_ESP and EIP, LSTAR, CSTAR, FS, GS, KERNEL_GS.
    for index in [
        0x175_u32,
        0x176,
        0xc000_0082,
        0xc000_0083,
        0xc000_0100,
        0xc000_0101,
        0xc000_0102,
    ] {
        let mut guest = Guest::new(|a| a.wrmsr().unwrap());
        let mut state = guest.long_mode();
        state.registers[1] = u64::from(index);
        state.registers[2] = HOLE >> 32;
        guest.cpu.restore(&state);
        general_protection(guest, 0);
    }
}

#[test]
fn far_branches_lead_to_canonical_addresses() {
    let programs: [fn(&mut CodeAssembler); 2] = [
        |a| a.db(&[0x48, 0xff, 0x2b]).unwrap(),
        |a| a.db(&[0x48, 0xff, 0x1b]).unwrap(),
    ];
    for write in programs {
        let guest = at_data(write);
        guest.memory.write_u64(DATA, HOLE);
        guest.memory.write(DATA + 8, &KERNEL_CODE.to_le_bytes());
        general_protection(guest, 0);
    }
}

/// RETFQ or IRETQ, with these words on the stack.
fn return_with(words: &[u64], interrupt: bool) -> Guest {
    let mut guest = Guest::new(move |a| {
        if interrupt {
            a.iretq().unwrap();
        } else {
            a.db(&[0x48, 0xcb]).unwrap();
        }
    });
    let mut state = guest.long_mode();
    state.registers[4] = DATA;
    guest.cpu.restore(&state);
    for (index, &word) in words.iter().enumerate() {
        guest.memory.write_u64(DATA + 8 * index as u64, word);
    }
    guest
}

#[test]
fn far_returns_and_iret_lead_to_canonical_addresses() {
    let levels = [(KERNEL_CODE, KERNEL_DATA), (USER_CODE, USER_DATA)];
    for (code, data) in levels.map(|(code, data)| (u64::from(code), u64::from(data))) {
        let frame = general_protection(return_with(&[HOLE, code, STACK, data], false), 0);
        assert_eq!((frame.cs, frame.rsp), (u64::from(KERNEL_CODE), DATA));
        let words = [HOLE, code, 2, STACK, data];
        let frame = general_protection(return_with(&words, true), 0);
        assert_eq!((frame.cs, frame.rsp), (u64::from(KERNEL_CODE), DATA));
    }
    // Of 32-bit code the limit counts.
    let words = [
        1 << 32,
        u64::from(CODE_32),
        2,
        STACK,
        u64::from(KERNEL_DATA),
    ];
    general_protection(return_with(&words, true), 0);
}

#[test]
fn gates_lead_to_canonical_addresses() {
    let guest = Guest::new(|a| a.int(0x40).unwrap());
    guest.gate(0x40, HOLE, 0, 0x8e);
    general_protection(guest, 0);
}

#[test]
fn sysret_to_an_address_that_is_not_canonical_faults_at_level_3() {
    let mut guest = Guest::new(|a| a.sysretq().unwrap());
    let mut state = guest.long_mode();
    state.registers[1] = HOLE;
    state.registers[4] = 0x1234;
    state.registers[11] = 2;
    state.msrs.push((0xc000_0081, 0x0013_0008_0000_0000));
    guest.cpu.restore(&state);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (13, Some(0)));
    assert_eq!((frame.rip, frame.cs), (HOLE, u64::from(USER_CODE)));
    // On the kernel's stack, whatever the program made of its own.
    assert_eq!(frame.rsp, 0x1234);
    assert_eq!(frame.place, KERNEL_STACK - 48);
}

#[test]
fn a_system_call_at_the_end_of_the_lower_half_returns_to_a_fault() {
    const LAST: u64 = HOLE - 4096;
    const ENTRY: u64 = CODE + 0x800;
    let mut guest = Guest::new(|a| a.sysretq().unwrap());
    // The last page of the lower half is CODE's page: its tables, at the end of
    // memory.
    let tables = MEMORY - 4 * PAGE;
    let all = PRESENT | WRITABLE | USER;
    guest.memory.write_u64(TABLES + 255 * 8, tables | all);
    guest
        .memory
        .write_u64(tables + 511 * 8, (tables + PAGE) | all);
    guest
        .memory
        .write_u64(tables + PAGE + 511 * 8, (tables + 2 * PAGE) | all);
    guest
        .memory
        .write_u64(tables + 2 * PAGE + 511 * 8, CODE | all);
    guest.memory.write(CODE + 0xffe, &[0x0f, 0x05]);
    guest
        .memory
        .write(ENTRY, &assemble(64, ENTRY, |a| a.sysretq().unwrap()));
    let mut user = guest.user_mode();
    user.rip = LAST + 0xffe;
    user.msrs.push((0xc000_0081, 0x0013_0008_0000_0000));
    user.msrs.push((0xc000_0082, ENTRY));
    guest.cpu.restore(&user);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (13, Some(0)));
    assert_eq!((frame.rip, frame.cs), (HOLE, u64::from(USER_CODE)));
}
