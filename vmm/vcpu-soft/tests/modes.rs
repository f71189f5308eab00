//! 32-bit paging, and exceptions of 32-bit code. From real mode to long mode, as an application processor of Linux goes; string
//! instructions; state that is saved and restored. Needs nothing.

mod support;

use iced_x86::code_asm::*;
use support::*;
use weft_vcpu::{CpuState, Exit, Kick};
use weft_vcpu_soft::Configuration;

/// Code of several modes, one behind the other.
struct Pieces {
    bytes: Vec<u8>,
    at: u64,
}

impl Pieces {
    fn add(&mut self, bits: u32, write: impl FnOnce(&mut CodeAssembler)) {
        let code = assemble(bits, self.at, write);
        self.at += code.len() as u64;
        self.bytes.extend(code);
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.at += bytes.len() as u64;
        self.bytes.extend(bytes);
    }
}

#[test]
fn a_processor_starts_in_real_mode_and_gets_to_long_mode() {
    const START: u64 = 0x6000;
    let mut guest = Guest::new(|a| a.hlt().unwrap());
    let mut pieces = Pieces {
        bytes: Vec::new(),
        at: 0,
    };
    // Real mode, CS = 0600h: everything by offsets in the segment.
    pieces.add(16, |a| {
        a.cli().unwrap();
        a.mov(ax, cs).unwrap();
        a.mov(ds, ax).unwrap();
        a.mov(sp, 0x800).unwrap();
        a.mov(ss, ax).unwrap();
        a.push(ax).unwrap();
        a.pop(bx).unwrap();
        a.mov(word_ptr(0x700), 0x1234).unwrap();
        a.mov(si, word_ptr(0x700)).unwrap();
    });
    // lgdtl cs:[0x600]; mov eax, cr0; or al, 1; mov cr0, eax
    pieces.raw(&[0x66, 0x2e, 0x0f, 0x01, 0x16, 0x00, 0x06]);
    pieces.raw(&[0x0f, 0x20, 0xc0, 0x0c, 0x01, 0x0f, 0x22, 0xc0]);
    // ljmpl CODE_32:(START + here)
    let after = START + pieces.at + 8;
    pieces.raw(&[0x66, 0xea]);
    pieces.raw(&(after as u32).to_le_bytes());
    pieces.raw(&CODE_32.to_le_bytes());
    let mut wide = Pieces {
        bytes: Vec::new(),
        at: after,
    };
    wide.add(32, |a| {
        a.mov(eax, u32::from(KERNEL_DATA)).unwrap();
        a.mov(ds, ax).unwrap();
        a.mov(ss, ax).unwrap();
        a.mov(esp, 0x3_0000).unwrap();
        a.call(after + 0x40).unwrap();
        a.mov(eax, cr4).unwrap();
        a.or(eax, 0x20).unwrap();
        a.mov(cr4, eax).unwrap();
        a.mov(eax, TABLES as u32).unwrap();
        a.mov(cr3, eax).unwrap();
        a.jmp(after + 0x50).unwrap();
    });
    let mut enter = Pieces {
        bytes: Vec::new(),
        at: after + 0x50,
    };
    enter.add(32, |a| {
        a.mov(ecx, 0xc000_0080_u32).unwrap();
        a.rdmsr().unwrap();
        a.or(eax, 0x100).unwrap();
        a.wrmsr().unwrap();
        a.mov(eax, cr0).unwrap();
        a.or(eax, 0x8000_0000_u32 as i32).unwrap();
        a.mov(cr0, eax).unwrap();
    });
    enter.raw(&[0xea]);
    enter.raw(&(CODE as u32).to_le_bytes());
    enter.raw(&KERNEL_CODE.to_le_bytes());
    guest.memory.write(START, &pieces.bytes);
    guest.memory.write(after, &wide.bytes);
    // A function of 32-bit code: mov edi, [esp]; ret.
    guest.memory.write(after + 0x40, &[0x8b, 0x3c, 0x24, 0xc3]);
    guest.memory.write(after + 0x50, &enter.bytes);
    guest.memory.write(START + 0x600, &[0x4f, 0]);
    guest
        .memory
        .write(START + 0x602, &(GDT as u32).to_le_bytes());
    guest
        .cpu
        .restore(&CpuState::started_at((START >> 12) as u8));
    let state = guest.halts();
    assert_eq!(state.efer & 0x500, 0x500);
    assert_eq!(state.cs.selector, KERNEL_CODE);
    assert_eq!(state.rip, CODE + 1);
    assert_eq!(state.registers[3] & 0xffff, START >> 4);
    assert_eq!(state.registers[6] & 0xffff, 0x1234);
    assert!((after..after + 0x40).contains(&state.registers[7]));
}

#[test]
fn the_time_stamp_counter_cannot_be_set() {
    let mut guest = Guest::new(|a| {
        a.mov(ecx, 0x10_u32).unwrap();
        a.mov(eax, 0x1234_u32).unwrap();
        a.mov(edx, 0x5678_u32).unwrap();
        a.wrmsr().unwrap();
    });
    let before = guest.cpu.save().tsc_offset;
    assert_eq!(guest.halts().tsc_offset, before);
}

#[test]
fn real_mode_has_interrupts_of_its_own() {
    let mut guest = Guest::new(|a| a.hlt().unwrap());
    // int 0x21; hlt. The handler: mov bx, 0x55; iret.
    guest.memory.write(0x6000, &[0xcd, 0x21, 0xf4]);
    guest.memory.write(0x6800, &[0xbb, 0x55, 0x00, 0xcf]);
    guest.memory.write(0x21 * 4, &[0x00, 0x08, 0x00, 0x06]);
    let mut state = CpuState::started_at(6);
    state.registers[4] = 0x7000;
    state.idtr.limit = 0x3ff;
    guest.cpu.restore(&state);
    let state = guest.halts();
    assert_eq!((state.registers[3], state.rip), (0x55, 3));
    assert_eq!(state.registers[4], 0x7000);
}

#[test]
fn segments_of_16_bits_have_limits() {
    let mut guest = Guest::new(|a| a.hlt().unwrap());
    // mov ax, [0xffff] reaches behind the segment: #GP, which real mode delivers
    // through vector 13.
    guest.memory.write(0x6000, &[0xa1, 0xff, 0xff, 0xf4]);
    guest.memory.write(0x6800, &[0xf4]);
    guest.memory.write(13 * 4, &[0x00, 0x08, 0x00, 0x06]);
    let mut state = CpuState::started_at(6);
    state.registers[4] = 0x7000;
    state.idtr.limit = 0x3ff;
    guest.cpu.restore(&state);
    assert_eq!(guest.halts().rip, 0x801);
}

#[test]
fn repeated_instructions_go_on_where_they_faulted() {
    const FROM: u64 = 0x50_0000;
    const TO: u64 = 0x60_0000;
    let mut guest = Guest::new(|a| {
        a.mov(rsi, FROM).unwrap();
        a.mov(rdi, TO + 0x800).unwrap();
        a.mov(ecx, 0x2000).unwrap();
        a.rep().movsb().unwrap();
        a.hlt().unwrap();
    });
    let bytes: Vec<u8> = (0..0x2000_u32).map(|index| (index * 7) as u8).collect();
    guest.memory.write(FROM, &bytes);
    guest.protect(TO + 0x1000, 0);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (14, Some(2)));
    let state = guest.cpu.save();
    assert_eq!(state.cr2, TO + 0x1000);
    assert_eq!(state.registers[1], 0x2000 - 0x800);
    assert_eq!(state.registers[6], FROM + 0x800);
    assert_eq!(state.registers[7], TO + 0x1000);
    // The handler's part: the page is there now, and the instruction goes on.
    guest.protect(TO + 0x1000, PRESENT | WRITABLE);
    let mut again = guest.long_mode();
    again.rip = frame.rip;
    again.registers = state.registers;
    guest.cpu.restore(&again);
    let state = guest.halts();
    assert_eq!(state.registers[1], 0);
    assert_eq!(guest.memory.read(TO + 0x800, 0x2000), bytes);
}

#[test]
fn repeated_moves_that_overlap_spread_what_is_there() {
    let mut guest = Guest::new(|a| {
        a.mov(rsi, DATA).unwrap();
        a.mov(rdi, DATA + 2).unwrap();
        a.mov(ecx, 100).unwrap();
        a.rep().movsw().unwrap();
        // And down: nothing is lost.
        a.std().unwrap();
        a.mov(rsi, DATA + 0x1ff).unwrap();
        a.mov(rdi, DATA + 0x20f).unwrap();
        a.mov(ecx, 0x100).unwrap();
        a.rep().movsb().unwrap();
        a.hlt().unwrap();
    });
    guest.memory.write(DATA, &[0xab, 0xcd]);
    let bytes: Vec<u8> = (0..=255).collect();
    guest.memory.write(DATA + 0x100, &bytes);
    guest.halts();
    assert_eq!(guest.memory.read(DATA, 202), [0xab, 0xcd].repeat(101));
    assert_eq!(guest.memory.read(DATA + 0x110, 256), bytes);
}

#[test]
fn comparisons_stop_where_they_should() {
    let mut guest = Guest::new(|a| {
        a.mov(rsi, DATA).unwrap();
        a.mov(rdi, DATA + 0x100).unwrap();
        a.mov(ecx, 50).unwrap();
        a.repe().cmpsb().unwrap();
        a.mov(rdx, rcx).unwrap();
        a.mov(rdi, DATA).unwrap();
        a.mov(rcx, -1_i64 as u64).unwrap();
        a.xor(eax, eax).unwrap();
        a.repne().scasb().unwrap();
        a.not(rcx).unwrap();
        a.hlt().unwrap();
    });
    guest.memory.write(DATA, b"the same and then not\0");
    guest.memory.write(DATA + 0x100, b"the same and then so");
    let state = guest.halts();
    assert_eq!(state.registers[2], 50 - 19);
    assert_eq!(state.registers[1], 22);
}

#[test]
fn a_long_repetition_can_be_interrupted() {
    let mut guest = Guest::new(|a| {
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        a.mov(rdi, DATA).unwrap();
        a.mov(ecx, 0x60_0000).unwrap();
        a.cld().unwrap();
        a.mov(rdx, rdi).unwrap();
        a.repne().scasb().unwrap();
        a.jmp(again).unwrap();
    });
    guest.memory.write(DATA, &[1]);
    let kick = guest.cpu.kicker();
    kick.kick();
    assert_eq!(guest.run(), Exit::Kicked);
    let thread = std::thread::spawn(move || {
        let exit = guest.run();
        (exit, guest.cpu.save().rip)
    });
    std::thread::sleep(std::time::Duration::from_millis(50));
    kick.kick();
    let (exit, rip) = thread.join().unwrap();
    assert_eq!(exit, Exit::Kicked);
    assert!((CODE..CODE + 0x40).contains(&rip));
}

#[test]
fn what_is_saved_goes_on_elsewhere() {
    let program = |a: &mut CodeAssembler| {
        let mut again = a.create_label();
        a.mov(ecx, 1000).unwrap();
        a.set_label(&mut again).unwrap();
        a.add(rax, rcx).unwrap();
        a.cvtsi2sd(xmm3, rax).unwrap();
        a.rol(rax, 3).unwrap();
        a.dec(ecx).unwrap();
        a.jne(again).unwrap();
        a.cvttsd2si(rdx, xmm3).unwrap();
        a.hlt().unwrap();
    };
    let counted = Configuration {
        deterministic: true,
        tsc_frequency: 1_000_000_000,
        ..Configuration::default()
    };
    let mut whole = Guest::with(counted.clone(), program);
    whole.cpu.set_budget(None);
    let expected = whole.halts();
    // In pieces of 37 instructions, each on a vCPU of its own.
    let mut guest = Guest::with(counted.clone(), program);
    let mut state = guest.cpu.save();
    let mut pieces = 0;
    loop {
        let text = state.clone();
        guest = {
            let memory = guest.memory.clone();
            let mut next = Guest::with(counted.clone(), program);
            next.memory = memory;
            next
        };
        guest.cpu.restore(&text);
        let before = guest.cpu.instructions();
        guest.cpu.set_budget(Some(37));
        let exit = guest.run();
        state = guest.cpu.save();
        pieces += 1;
        if exit == Exit::Halted {
            break;
        }
        assert_eq!(exit, Exit::Deadline);
        assert_eq!(guest.cpu.instructions() - before, 37);
    }
    assert!(pieces > 100);
    assert_eq!(state.registers, expected.registers);
    assert_eq!(state.fpu, expected.fpu);
    assert_eq!(state.instructions, expected.instructions);
    assert_eq!(state.rflags, expected.rflags);
}

#[test]
fn the_count_of_instructions_is_the_same_interpreted_and_translated() {
    let program = |a: &mut CodeAssembler| {
        let mut again = a.create_label();
        let mut skip = a.create_label();
        a.mov(ecx, 100_000).unwrap();
        a.set_label(&mut again).unwrap();
        a.imul_3(eax, ecx, 77).unwrap();
        a.test(eax, 0x40).unwrap();
        a.je(skip).unwrap();
        a.add(qword_ptr(DATA), rax).unwrap();
        a.push(rax).unwrap();
        a.pop(rbx).unwrap();
        a.set_label(&mut skip).unwrap();
        a.dec(ecx).unwrap();
        a.jne(again).unwrap();
        a.rdtsc().unwrap();
        a.hlt().unwrap();
    };
    let counted = Configuration {
        deterministic: true,
        tsc_frequency: 1_000_000_000,
        ..Configuration::default()
    };
    let mut translated = Guest::with(counted.clone(), program);
    let mut interpreted = Guest::with(counted, program);
    interpreted.cpu.interpret_only();
    for guest in [&mut translated, &mut interpreted] {
        guest.cpu.set_budget(None);
        guest.halts();
    }
    assert_eq!(translated.cpu.save(), interpreted.cpu.save());
}

/// Tables of 32-bit code, where `Guest` has nothing.
const TABLES_32: u64 = 0x4_2000;
const IDT_32: u64 = 0x4_6000;
const TSS_32: u64 = 0x4_7000;
const LINEAR: u32 = 0x0080_0000;

/// 32-bit code at level 0 without paging.
fn protected_mode(guest: &Guest) -> CpuState {
    let long = guest.long_mode();
    let mut state = CpuState {
        cr0: 0x33,
        cr4: 0,
        efer: 0,
        ..long
    };
    state.cs.selector = CODE_32;
    state.cs.rights = 0xc09b;
    state
}

fn write_u32(guest: &Guest, address: u64, value: u64) {
    guest.memory.write(address, &(value as u32).to_le_bytes());
}

#[test]
fn paging_of_32_bits_has_two_levels_and_large_pages() {
    let mut guest = Guest::new(|_| {});
    let code = assemble(32, CODE, |a| {
        a.mov(eax, dword_ptr(LINEAR + 8)).unwrap();
        a.mov(dword_ptr(LINEAR + 12), eax).unwrap();
        a.mov(ebx, dword_ptr(0x0100_0000 + DATA as u32)).unwrap();
        a.hlt().unwrap();
    });
    guest.memory.write(CODE, &code);
    write_u32(&guest, TABLES_32, 0x83);
    write_u32(&guest, TABLES_32 + 2 * 4, (TABLES_32 + 0x1000) | 3);
    write_u32(&guest, TABLES_32 + 4 * 4, 0x83);
    write_u32(&guest, TABLES_32 + 0x1000, DATA | 3);
    write_u32(&guest, DATA + 8, 0x1234_5678);
    write_u32(&guest, DATA, 0x55);
    let mut state = protected_mode(&guest);
    (state.cr0, state.cr3, state.cr4) = (0x8001_0033, TABLES_32, 0x10);
    guest.cpu.restore(&state);
    let state = guest.halts();
    assert_eq!(
        (state.registers[0], state.registers[3]),
        (0x1234_5678, 0x55)
    );
    assert_eq!(guest.memory.read(DATA + 12, 4), [0x78, 0x56, 0x34, 0x12]);
    // Accessed in the directory, dirty as well in the table.
    assert_eq!(guest.memory.read(TABLES_32 + 8, 1), [0x23]);
    assert_eq!(guest.memory.read(TABLES_32 + 0x1000, 1), [0x63]);
}

/// Loads from `LINEAR` by PAE paging; what the load got, or the page fault's
/// error code.
fn load_by_pae(pointers: u64, entry: u64) -> Result<u64, u64> {
    let mut guest = Guest::new(|_| {});
    let code = assemble(32, CODE, |a| {
        a.mov(eax, dword_ptr(LINEAR)).unwrap();
        a.hlt().unwrap();
    });
    guest.memory.write(CODE, &code);
    // The handler: pop eax; hlt.
    guest.memory.write(CODE + 0x100, &[0x58, 0xf4]);
    let gate = (CODE + 0x100) & 0xffff | u64::from(CODE_32) << 16 | 0x8e << 40 | 1 << 48;
    guest.memory.write_u64(IDT_32 + 14 * 8, gate);
    guest
        .memory
        .write_u64(TABLES_32, (TABLES_32 + 0x1000) | pointers);
    guest.memory.write_u64(TABLES_32 + 0x1000, 0x83);
    let table = TABLES_32 + 0x2000;
    guest
        .memory
        .write_u64(TABLES_32 + 0x1000 + 4 * 8, table | 3);
    guest.memory.write_u64(table, entry);
    write_u32(&guest, DATA, 0x77);
    let mut state = protected_mode(&guest);
    (state.cr0, state.cr3, state.cr4, state.efer) = (0x8001_0033, TABLES_32, 0x20, 0x800);
    state.idtr.base = IDT_32;
    guest.cpu.restore(&state);
    let exit = guest.run();
    let state = guest.cpu.save();
    match exit {
        Exit::Halted if state.rip == CODE + 0x102 => Err(state.registers[0]),
        Exit::Halted => Ok(state.registers[0]),
        // Not even code can be fetched.
        _ => Err(u64::MAX),
    }
}

#[test]
fn pae_paging_has_three_levels_and_wide_entries() {
    assert_eq!(load_by_pae(1, DATA | 3), Ok(0x77));
    assert_eq!(load_by_pae(1, DATA | 3 | NO_EXECUTE), Ok(0x77));
    assert_eq!(load_by_pae(1, 0), Err(0));
    assert_eq!(load_by_pae(1, DATA | 3 | 1 << 60), Err(9));
    // The top level's entries have neither rights nor NX.
    assert_eq!(load_by_pae(3, DATA | 3), Err(u64::MAX));
    assert_eq!(load_by_pae(1 | NO_EXECUTE, DATA | 3), Err(u64::MAX));
}

#[test]
fn an_exception_of_32_bit_user_code_changes_the_stack() {
    const USER_CODE_32: u16 = 0x53;
    const USER_STACK: u64 = 0x3_8000;
    let mut guest = Guest::new(|_| {});
    guest.memory.write_u64(GDT + 0x50, 0x00cf_fb00_0000_ffff);
    // hlt, which is the supervisor's; the handler takes the frame apart.
    guest.memory.write(CODE, &[0x90, 0xf4]);
    let handler = assemble(32, CODE + 0x100, |a| {
        a.mov(ebp, esp).unwrap();
        a.pop(eax).unwrap();
        a.pop(ebx).unwrap();
        a.pop(ecx).unwrap();
        a.pop(edx).unwrap();
        a.pop(esi).unwrap();
        a.pop(edi).unwrap();
        a.hlt().unwrap();
    });
    guest.memory.write(CODE + 0x100, &handler);
    let gate = (CODE + 0x100) & 0xffff | u64::from(CODE_32) << 16 | 0x8e << 40 | 1 << 48;
    guest.memory.write_u64(IDT_32 + 13 * 8, gate);
    write_u32(&guest, TSS_32 + 4, KERNEL_STACK);
    write_u32(&guest, TSS_32 + 8, u64::from(KERNEL_DATA));
    let mut state = protected_mode(&guest);
    let user = guest.user_mode();
    (state.ss, state.ds, state.es) = (user.ss, user.ds, user.es);
    state.cs.selector = USER_CODE_32;
    state.cs.rights = 0xc0fb;
    state.cpl = 3;
    state.registers[4] = USER_STACK;
    // A fault's frame has RF set besides.
    state.rflags = 0x203;
    state.gdtr.limit = 0x57;
    state.tr.base = TSS_32;
    state.idtr.base = IDT_32;
    guest.cpu.restore(&state);
    let state = guest.halts();
    assert_eq!((state.cpl, state.ss.selector), (0, KERNEL_DATA));
    let [error, from, code, left, flags] =
        [0, 3, 1, 4, 2].map(|index: usize| state.registers[index]);
    assert_eq!((error, from, code), (0, CODE + 1, u64::from(USER_CODE_32)));
    assert_eq!((flags, state.rflags & 0x200), (0x1_0203, 0));
    assert_eq!(left, KERNEL_STACK);
    assert_eq!(state.registers[5], KERNEL_STACK - 24);
    let stack = (state.registers[6], state.registers[7]);
    assert_eq!(stack, (USER_STACK, u64::from(USER_DATA)));
}
