//! SMAP, UMIP and FSGSBASE: what CR4 keeps from the supervisor and from programs,
//! and what it gives them. Needs nothing.

mod support;

use iced_x86::code_asm::*;
use support::*;
use weft_vcpu::CpuState;

const SMAP: u64 = 1 << 21;
const FSGSBASE: u64 = 1 << 16;
const UMIP: u64 = 1 << 11;
const OPEN: u64 = 1 << 18;

/// The user's pages; all others are the supervisor's.
const USERS: u64 = 0x50_0000;
const USERS_PAGES: u64 = 200;

/// Interpreted, and translated at once.
const BOTH: [u32; 2] = [u32::MAX, 1];

/// A supervisor with SMAP, RBX at the user's pages.
fn guarded(write: impl FnOnce(&mut CodeAssembler)) -> Guest {
    guarded_with(|_| (), write)
}

fn guarded_with(
    change: impl FnOnce(&mut CpuState),
    write: impl FnOnce(&mut CodeAssembler),
) -> Guest {
    let mut guest = Guest::new(write);
    for page in (0..MEMORY).step_by(PAGE as usize) {
        let users = (USERS..USERS + USERS_PAGES * PAGE).contains(&page);
        guest.protect(page, PRESENT | WRITABLE | if users { USER } else { 0 });
    }
    let mut state = guest.long_mode();
    state.cr4 |= SMAP;
    state.registers[3] = USERS;
    change(&mut state);
    guest.cpu.restore(&state);
    guest
}

#[track_caller]
fn refused(guest: &mut Guest, rip: u64, address: u64, error: u64) {
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (14, Some(error)), "{frame:x?}");
    assert_eq!((frame.rip, guest.cpu.save().cr2), (rip, address));
}

#[test]
fn the_supervisor_accesses_user_pages_only_when_they_are_open() {
    type Program = fn(&mut CodeAssembler);
    let programs: [(Program, u64); 6] = [
        (|a| a.mov(rax, qword_ptr(rbx)).unwrap(), 1),
        (|a| a.mov(qword_ptr(rbx), rax).unwrap(), 3),
        (|a| a.lock().inc(qword_ptr(rbx)).unwrap(), 3),
        (|a| a.movups(xmm0, xmmword_ptr(rbx)).unwrap(), 1),
        (|a| a.cmpxchg16b(xmmword_ptr(rbx)).unwrap(), 3),
        (|a| a.mov(rax, qword_ptr(rbx - 4)).unwrap(), 1),
    ];
    for translated_after in BOTH {
        for (write, error) in programs {
            let mut guest = guarded(write);
            guest.cpu.translate_after(translated_after);
            refused(&mut guest, CODE, USERS, error);
            // RFLAGS.AC from before, and by STAC.
            for open in [OPEN, 0] {
                let mut guest = guarded_with(
                    |state| state.rflags |= open,
                    |a| {
                        if open == 0 {
                            a.stac().unwrap();
                        }
                        write(a);
                        a.hlt().unwrap();
                    },
                );
                guest.cpu.translate_after(translated_after);
                assert_ne!(guest.halts().rflags & OPEN, 0);
                assert_eq!(guest.frame(), None);
            }
        }
    }
}

#[test]
fn clac_popf_iret_and_syscall_close_what_was_open() {
    const ENTRY: u64 = CODE + 0x800;
    type Program = fn(&mut CodeAssembler);
    let programs: [Program; 4] = [
        |a| a.clac().unwrap(),
        |a| {
            a.push(2).unwrap();
            a.popfq().unwrap();
        },
        |a| {
            a.mov(rax, rsp).unwrap();
            a.push(i32::from(KERNEL_DATA)).unwrap();
            a.push(rax).unwrap();
            a.push(2).unwrap();
            a.push(i32::from(KERNEL_CODE)).unwrap();
            let mut behind = a.create_label();
            a.lea(rax, ptr(behind)).unwrap();
            a.push(rax).unwrap();
            a.iretq().unwrap();
            a.set_label(&mut behind).unwrap();
        },
        |a| a.syscall().unwrap(),
    ];
    for translated_after in BOTH {
        for close in programs {
            let mut guest = guarded_with(
                |state| {
                    state.msrs.push((0xc000_0081, 0x0013_0008_0000_0000));
                    state.msrs.push((0xc000_0082, ENTRY));
                    state.msrs.push((0xc000_0084, OPEN));
                },
                |a| {
                    let mut again = a.create_label();
                    a.mov(ecx, 100).unwrap();
                    a.set_label(&mut again).unwrap();
                    a.stac().unwrap();
                    a.inc(qword_ptr(rbx)).unwrap();
                    a.mov(rdx, qword_ptr(rbx + 0x1000)).unwrap();
                    a.clac().unwrap();
                    a.dec(ecx).unwrap();
                    a.jnz(again).unwrap();
                    a.stac().unwrap();
                    a.mov(rdx, qword_ptr(rbx + 0x1000)).unwrap();
                    a.mov(qword_ptr(rbx), 7).unwrap();
                    close(a);
                    a.mov(rdx, qword_ptr(rbx)).unwrap();
                    a.hlt().unwrap();
                },
            );
            let entry = assemble(64, ENTRY, |a| a.mov(rdx, qword_ptr(rbx)).unwrap());
            guest.memory.write(ENTRY, &entry);
            guest.cpu.translate_after(translated_after);
            let frame = guest.faults();
            assert_eq!((frame.vector, frame.error), (14, Some(1)));
            assert_eq!(guest.cpu.save().cr2, USERS);
            assert_eq!(guest.memory.read_u64(USERS), 7);
        }
    }
}

#[test]
fn however_many_pages_are_open_all_are_closed() {
    for translated_after in BOTH {
        for page in [0, 1, 63, 64, 65, USERS_PAGES - 1] {
            let mut guest = guarded_with(
                |state| {
                    state.registers[1] = USERS_PAGES * PAGE / 8;
                    state.registers[7] = USERS;
                    state.registers[3] = USERS + page * PAGE;
                },
                |a| {
                    a.stac().unwrap();
                    a.rep().stosq().unwrap();
                    a.clac().unwrap();
                    a.mov(byte_ptr(rbx), al).unwrap();
                },
            );
            guest.cpu.translate_after(translated_after);
            refused(&mut guest, CODE + 9, USERS + page * PAGE, 3);
        }
    }
}

#[test]
fn what_the_user_used_is_borrowed_with_the_users_rights() {
    // The user reads a page that it may not write, and writes another; the
    // kernel copies from one to the other, and back.
    const ENTRY: u64 = CODE + 0x800;
    for (source, error) in [(USERS, None), (USERS + PAGE, Some(3))] {
        let mut guest = guarded(|a| a.nop().unwrap());
        let program = assemble(64, USERS + 2 * PAGE, |a| {
            a.mov(rax, qword_ptr(rbx)).unwrap();
            a.mov(qword_ptr(rbx + 0x1000), rcx).unwrap();
            a.syscall().unwrap();
        });
        guest.memory.write(USERS + 2 * PAGE, &program);
        let entry = assemble(64, ENTRY, |a| {
            a.stac().unwrap();
            a.mov(ecx, 8).unwrap();
            a.rep().movsb().unwrap();
            a.clac().unwrap();
            a.hlt().unwrap();
        });
        guest.memory.write(ENTRY, &entry);
        guest.memory.write_u64(USERS, 0x1234);
        guest.protect(USERS, PRESENT | USER);
        let mut state = guest.user_mode();
        state.rip = USERS + 2 * PAGE;
        state.cr4 |= SMAP;
        state.registers[3] = USERS;
        state.registers[6] = source;
        state.registers[7] = USERS + PAGE - (source - USERS);
        state.msrs.push((0xc000_0081, 0x0013_0008_0000_0000));
        state.msrs.push((0xc000_0082, ENTRY));
        guest.cpu.restore(&state);
        guest.halts();
        assert_eq!(guest.frame().and_then(|frame| frame.error), error);
        if error.is_none() {
            assert_eq!(guest.memory.read_u64(USERS + PAGE), 0x1234);
        }
    }
}

#[test]
fn tables_in_user_pages_are_refused_whatever_the_flag_says() {
    for (cpl, error) in [(0, 1), (3, 1)] {
        let mut guest = guarded(|a| {
            a.mov(ds, eax).unwrap();
            a.hlt().unwrap();
        });
        let mut state = if cpl == 3 {
            guest.user_mode()
        } else {
            guest.long_mode()
        };
        if cpl == 3 {
            guest.protect(CODE, PRESENT | USER);
        }
        // The GDT, copied to a user's page; the handlers' code does not need it.
        let table = guest.memory.read(GDT, 0x50);
        guest.memory.write(USERS, &table);
        state.cr4 |= SMAP;
        state.rflags |= OPEN;
        state.gdtr.base = USERS;
        state.registers[0] = u64::from(USER_DATA);
        // The gates' code segment is found through the same table.
        guest.cpu.restore(&state);
        assert_eq!(guest.run(), weft_vcpu::Exit::TripleFault, "{cpl} {error}");
        assert_eq!(guest.cpu.save().cr2 & !0xfff, USERS);
    }
}

#[test]
fn the_user_and_the_supervisors_code_are_not_concerned() {
    let mut guest = guarded(|a| a.nop().unwrap());
    let program = assemble(64, USERS, |a| {
        a.mov(rax, qword_ptr(rbx)).unwrap();
        a.ud2().unwrap();
    });
    guest.memory.write(USERS, &program);
    for state in [guest.user_mode(), guest.long_mode()] {
        let user = state.cpl == 3;
        let state = CpuState {
            rip: if user { USERS } else { USERS + 3 },
            cr4: state.cr4 | SMAP,
            registers: std::array::from_fn(|index| if index == 4 { STACK } else { USERS }),
            ..state
        };
        guest.cpu.restore(&state);
        let frame = guest.faults();
        assert_eq!((frame.vector, frame.rip), (6, USERS + 3));
    }
}

#[test]
fn stac_and_clac_are_the_supervisors() {
    for write in [(|a| a.stac().unwrap()) as fn(&mut CodeAssembler), |a| {
        a.clac().unwrap()
    }] {
        let mut guest = Guest::new(write);
        let user = guest.user_mode();
        guest.cpu.restore(&user);
        assert_eq!(guest.faults().vector, 6);
    }
}

#[test]
fn umip_keeps_tables_from_programs() {
    let programs: [fn(&mut CodeAssembler); 7] = [
        |a| a.sgdt(ptr(rbx)).unwrap(),
        |a| a.sidt(ptr(rbx)).unwrap(),
        |a| a.sldt(eax).unwrap(),
        |a| a.str(eax).unwrap(),
        |a| a.smsw(eax).unwrap(),
        |a| a.smsw(word_ptr(rbx)).unwrap(),
        |a| a.str(word_ptr(rbx)).unwrap(),
    ];
    for write in programs {
        for (user, bit, vector) in [(true, UMIP, 13), (true, 0, 6), (false, UMIP, 6)] {
            let mut guest = Guest::new(|a| {
                write(a);
                a.ud2().unwrap();
            });
            let state = if user {
                guest.user_mode()
            } else {
                guest.long_mode()
            };
            let mut state = CpuState {
                cr4: state.cr4 | bit,
                ..state
            };
            state.registers[3] = DATA;
            guest.cpu.restore(&state);
            let frame = guest.faults();
            assert_eq!(frame.vector, vector);
            if vector == 13 {
                assert_eq!((frame.error, frame.rip), (Some(0), CODE));
            }
        }
    }
}

#[test]
fn bases_of_fs_and_gs_are_registers_where_cr4_says_so() {
    for translated_after in BOTH {
        let write = |a: &mut CodeAssembler| {
            let mut again = a.create_label();
            a.mov(rdi, 0xffff_ffff_0000_0000_u64 | DATA).unwrap();
            a.mov(ecx, 3).unwrap();
            a.set_label(&mut again).unwrap();
            // Of 32 bits: the upper half is cleared.
            a.wrfsbase(edi).unwrap();
            a.lea(rsi, qword_ptr(rdi + 8)).unwrap();
            a.wrgsbase(rsi).unwrap();
            a.rdgsbase(rax).unwrap();
            a.rdgsbase(edx).unwrap();
            a.rdfsbase(r8).unwrap();
            a.mov(r9, qword_ptr(0).fs()).unwrap();
            a.dec(ecx).unwrap();
            a.jnz(again).unwrap();
            a.ud2().unwrap();
        };
        for user in [false, true] {
            let mut guest = Guest::new(write);
            let mut state = if user {
                guest.user_mode()
            } else {
                guest.long_mode()
            };
            state.cr4 |= FSGSBASE;
            guest.cpu.restore(&state);
            guest.cpu.translate_after(translated_after);
            guest.memory.write_u64(DATA, 0x77);
            assert_eq!(guest.faults().vector, 6);
            let state = guest.cpu.save();
            let high = 0xffff_ffff_0000_0008 + DATA;
            assert_eq!((state.fs.base, state.gs.base), (DATA, high));
            assert_eq!(state.registers[0], high);
            assert_eq!(state.registers[2], high & 0xffff_ffff);
            assert_eq!((state.registers[8], state.registers[9]), (DATA, 0x77));
        }
        let mut guest = Guest::new(|a| a.rdfsbase(rax).unwrap());
        guest.cpu.translate_after(translated_after);
        let frame = guest.faults();
        assert_eq!(
            (frame.vector, frame.rip),
            (6, CODE),
            "not without CR4's bit"
        );
        let mut guest = Guest::new(|a| a.wrgsbase(rax).unwrap());
        let mut state = guest.long_mode();
        state.cr4 |= FSGSBASE;
        state.registers[0] = 1 << 47;
        guest.cpu.restore(&state);
        let frame = guest.faults();
        assert_eq!((frame.vector, frame.error), (13, Some(0)));
    }
}

#[test]
fn cpuid_says_what_cr4_takes() {
    let mut guest = Guest::new(|a| {
        a.mov(eax, 7).unwrap();
        a.xor(ecx, ecx).unwrap();
        a.cpuid().unwrap();
        a.mov(rax, cr4).unwrap();
        a.or(rax, (SMAP | FSGSBASE | UMIP | 1 << 20) as i32)
            .unwrap();
        a.mov(cr4, rax).unwrap();
        a.hlt().unwrap();
    });
    // Code and data are the user's.
    for page in (0..MEMORY).step_by(PAGE as usize) {
        guest.protect(page, PRESENT | WRITABLE);
    }
    let state = guest.halts();
    assert_eq!(
        state.registers[3] & (1 | 1 << 7 | 1 << 20),
        1 | 1 << 7 | 1 << 20
    );
    assert_eq!(state.registers[1] & 1 << 2, 1 << 2);
    // PCID is neither said to be there nor taken.
    let mut guest = Guest::new(|a| {
        a.mov(rax, cr4).unwrap();
        a.or(rax, 1 << 17).unwrap();
        a.mov(cr4, rax).unwrap();
    });
    assert_eq!(guest.faults().vector, 13);
}
