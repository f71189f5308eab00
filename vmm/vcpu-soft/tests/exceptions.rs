//! Every exception, with its error code, its stack and what comes of it when
//! another follows. Needs nothing.

mod support;

use iced_x86::code_asm::*;
use support::*;
use weft_vcpu::{CpuModel, Exit};

fn fault_of(write: impl FnOnce(&mut CodeAssembler)) -> Frame {
    Guest::new(write).faults()
}

#[test]
fn division_by_zero_and_an_overflowing_quotient_are_errors() {
    let frame = fault_of(|a| {
        a.xor(ecx, ecx).unwrap();
        a.div(ecx).unwrap();
    });
    assert_eq!((frame.vector, frame.error, frame.rip), (0, None, CODE + 2));
    let frame = fault_of(|a| {
        a.mov(rdx, 1_u64 << 63).unwrap();
        a.mov(ecx, -1).unwrap();
        a.movsxd(rcx, ecx).unwrap();
        a.idiv(rcx).unwrap();
    });
    assert_eq!(frame.vector, 0);
}

#[test]
fn a_frame_holds_what_was_interrupted() {
    let frame = fault_of(|a| {
        a.sub(rsp, 8).unwrap();
        a.stc().unwrap();
        a.ud2().unwrap();
    });
    assert_eq!(frame.vector, 6);
    assert_eq!(frame.rip, CODE + 5);
    assert_eq!(frame.cs, u64::from(KERNEL_CODE));
    assert_eq!(frame.ss, u64::from(KERNEL_DATA));
    assert_eq!(frame.rsp, STACK - 8);
    assert_eq!(frame.rflags & 1, 1);
    // Aligned to 16 before five words were pushed.
    assert_eq!(frame.place, STACK - 16 - 40);
}

#[test]
fn from_user_mode_the_stack_is_the_task_states() {
    let mut guest = Guest::new(|a| a.hlt().unwrap());
    let user = guest.user_mode();
    guest.cpu.restore(&user);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (13, Some(0)));
    assert_eq!(frame.cs, u64::from(USER_CODE));
    assert_eq!(frame.place, KERNEL_STACK - 48);
    let state = guest.cpu.save();
    assert_eq!((state.cpl, state.ss.selector), (0, 0));
}

#[test]
fn an_interrupt_stack_is_used_where_the_gate_says_so() {
    let mut guest = Guest::new(|a| a.ud2().unwrap());
    guest.gate(6, HANDLERS + 6 * 32, 1, 0x8e);
    assert_eq!(guest.faults().place, INTERRUPT_STACK - 40);
}

#[test]
fn breakpoints_return_behind_themselves() {
    let mut guest = Guest::new(|a| {
        a.nop().unwrap();
        a.int3().unwrap();
    });
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.rip), (3, CODE + 2));
    let frame = fault_of(|a| a.int(0x80).unwrap());
    assert_eq!((frame.vector, frame.rip), (0x80, CODE + 2));
}

#[test]
fn user_code_may_not_use_the_supervisors_gates() {
    let mut guest = Guest::new(|a| a.int(0x80).unwrap());
    let user = guest.user_mode();
    guest.cpu.restore(&user);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (13, Some(0x80 * 8 + 2)));
    assert_eq!(frame.rip, CODE);
    // With a gate of level 3 it may.
    let mut guest = Guest::new(|a| a.int(0x80).unwrap());
    guest.gate(0x80, HANDLERS + 0x80 * 32, 0, 0xee);
    guest.cpu.restore(&user);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.rip), (0x80, CODE + 2));
}

#[test]
fn what_is_not_offered_is_undefined() {
    // VADDPS, XGETBV, RDPID, XSAVE, SYSENTER's neighbour in 64-bit mode.
    let by_all: [&[u8]; 7] = [
        &[0xc5, 0xf0, 0x58, 0xc2],
        &[0x0f, 0x01, 0xd0],
        &[0xf3, 0x0f, 0xc7, 0xf8],
        &[0x0f, 0xae, 0x20],
        &[0x0f, 0x34],
        &[0x06],
        &[0xf0, 0x90],
    ];
    // POPCNT, CRC32, HADDPS, FISTTP, PSHUFB of MMX and XMM registers, PINSRB,
    // PCMPISTRI, AESENC, PCLMULQDQ.
    let by_v1: [&[u8]; 10] = [
        &[0xf3, 0x0f, 0xb8, 0xc1],
        &[0xf2, 0x0f, 0x38, 0xf1, 0xc1],
        &[0xf2, 0x0f, 0x7c, 0xc1],
        &[0xdb, 0x0c, 0x24],
        &[0x0f, 0x38, 0x00, 0xc1],
        &[0x66, 0x0f, 0x38, 0x00, 0xc1],
        &[0x66, 0x0f, 0x3a, 0x20, 0xc1, 1],
        &[0x66, 0x0f, 0x3a, 0x63, 0xc1, 1],
        &[0x66, 0x0f, 0x38, 0xdc, 0xc1],
        &[0x66, 0x0f, 0x3a, 0x44, 0xc1, 1],
    ];
    // ANDN, BEXTR, MULX, MOVBE, VZEROUPPER.
    let by_v2: [&[u8]; 5] = [
        &[0xc4, 0xe2, 0x78, 0xf2, 0xc1],
        &[0xc4, 0xe2, 0x78, 0xf7, 0xc1],
        &[0xc4, 0xe2, 0x7b, 0xf6, 0xc1],
        &[0x0f, 0x38, 0xf0, 0x04, 0x24],
        &[0xc5, 0xf8, 0x77],
    ];
    let cases = (CpuModel::ALL.into_iter())
        .flat_map(|model| by_all.map(|bytes| (model, bytes)))
        .chain(by_v1.map(|bytes| (CpuModel::V1, bytes)))
        .chain(by_v2.map(|bytes| (CpuModel::V1, bytes)))
        .chain(by_v2.map(|bytes| (CpuModel::V2, bytes)));
    for (model, bytes) in cases {
        for translated in [false, true] {
            let mut guest = Guest::of_model(model, |a| a.nop().unwrap());
            if translated {
                guest.cpu.translate_after(1);
            }
            guest.memory.write(CODE, bytes);
            let frame = guest.faults();
            assert_eq!((frame.vector, frame.rip), (6, CODE), "{model} {bytes:x?}");
        }
    }
    for bytes in by_v1 {
        let mut guest = Guest::of_model(CpuModel::V2, |a| a.nop().unwrap());
        guest.memory.write(CODE, bytes);
        guest.memory.write(CODE + bytes.len() as u64, &[0xf4]);
        assert_eq!(guest.run(), Exit::Halted, "{bytes:x?}");
    }
}

#[test]
fn privileged_instructions_are_the_supervisors() {
    let programs: [fn(&mut CodeAssembler); 9] = [
        |a| a.cli().unwrap(),
        |a| a.mov(rax, cr0).unwrap(),
        |a| a.mov(cr3, rax).unwrap(),
        |a| a.wrmsr().unwrap(),
        |a| a.rdmsr().unwrap(),
        |a| a.invlpg(ptr(rax)).unwrap(),
        |a| a.in_(al, 0x60).unwrap(),
        |a| a.clts().unwrap(),
        |a| a.swapgs().unwrap(),
    ];
    for write in programs {
        let mut guest = Guest::new(write);
        let user = guest.user_mode();
        guest.cpu.restore(&user);
        let frame = guest.faults();
        assert_eq!((frame.vector, frame.error, frame.rip), (13, Some(0), CODE));
    }
}

#[test]
fn addresses_that_are_not_canonical_are_refused() {
    let frame = fault_of(|a| {
        a.mov(rax, 1_u64 << 47).unwrap();
        a.mov(ecx, ptr(rax)).unwrap();
    });
    assert_eq!((frame.vector, frame.error), (13, Some(0)));
    let frame = fault_of(|a| {
        a.mov(rax, 1_u64 << 47).unwrap();
        a.jmp(rax).unwrap();
    });
    assert_eq!((frame.vector, frame.error), (13, Some(0)));
}

#[test]
fn segments_that_are_not_there_say_which() {
    let load = |selector: u16| {
        fault_of(move |a| {
            a.mov(eax, u32::from(selector)).unwrap();
            a.mov(ds, ax).unwrap();
        })
    };
    let frame = load(NOT_PRESENT);
    assert_eq!(
        (frame.vector, frame.error),
        (11, Some(u64::from(NOT_PRESENT)))
    );
    let frame = load(0x100);
    assert_eq!((frame.vector, frame.error), (13, Some(0x100)));
    let frame = load(TASK);
    assert_eq!((frame.vector, frame.error), (13, Some(u64::from(TASK))));
}

#[test]
fn a_handler_that_is_not_there_makes_a_double_fault() {
    // #GP without a present gate: #NP, and both are contributory.
    let mut guest = Guest::new(|a| {
        a.mov(rax, 1_u64 << 47).unwrap();
        a.mov(ecx, ptr(rax)).unwrap();
    });
    guest.gate(13, HANDLERS, 0, 0x0e);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (8, Some(0)));
    // #UD is benign: then it is the second fault that is delivered.
    let mut guest = Guest::new(|a| a.ud2().unwrap());
    guest.gate(6, HANDLERS, 0, 0x0e);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (11, Some(6 * 8 + 2 + 1)));
}

#[test]
fn a_page_fault_on_the_way_to_a_page_faults_handler_is_a_double_fault() {
    let mut guest = Guest::new(|a| {
        a.mov(rsp, 0x50_0000_u64).unwrap();
        a.mov(eax, ptr(0x60_0000_u64)).unwrap();
    });
    guest.protect(0x60_0000, 0);
    guest.protect(0x4f_f000, 0);
    guest.gate(8, HANDLERS + 8 * 32, 1, 0x8e);
    let frame = guest.faults();
    assert_eq!(frame.vector, 8);
    // CR2 is that of the push.
    assert_eq!(guest.cpu.save().cr2, 0x4f_fff8);
}

#[test]
fn a_fault_on_the_way_to_the_double_faults_handler_ends_the_machine() {
    let mut guest = Guest::new(|a| {
        a.mov(rsp, 0x50_0000_u64).unwrap();
        a.mov(eax, ptr(0x60_0000_u64)).unwrap();
    });
    guest.protect(0x60_0000, 0);
    guest.protect(0x4f_f000, 0);
    assert_eq!(guest.run(), Exit::TripleFault);
}

#[test]
fn an_interrupt_waits_for_sti_and_one_instruction_more() {
    let mut guest = Guest::new(|a| {
        a.cli().unwrap();
        a.nop().unwrap();
        a.sti().unwrap();
        a.inc(eax).unwrap();
        a.jmp(CODE + 5).unwrap();
    });
    guest.devices.interrupts.push(0x40);
    let frame = guest.faults();
    assert_eq!(frame.vector, 0x40);
    assert!(guest.cpu.save().registers[0] >= 1);
    assert_ne!(frame.rflags & 0x200, 0);
}

#[test]
fn sti_and_hlt_together_do_not_lose_an_interrupt() {
    let mut guest = Guest::new(|a| {
        a.sti().unwrap();
        a.hlt().unwrap();
        a.nop().unwrap();
    });
    guest.devices.interrupts.push(0x40);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.rip), (0x40, CODE + 2));
}

#[test]
fn nmis_wait_until_the_last_one_returned() {
    let mut guest = Guest::new(|a| {
        a.hlt().unwrap();
        a.hlt().unwrap();
    });
    guest.halts();
    guest.devices.nmi = true;
    assert_eq!(guest.faults().vector, 2);
    guest.devices.nmi = true;
    guest.halts();
    assert!(guest.devices.nmi, "not taken while the first is handled");
}

#[test]
fn an_nmi_that_came_during_another_follows_its_iret() {
    for translated_after in [1, u32::MAX] {
        let mut guest = Guest::new(|a| {
            a.hlt().unwrap();
            a.inc(ecx).unwrap();
            a.hlt().unwrap();
        });
        let handler = assemble(64, HANDLERS + 2 * 32, |a| {
            a.inc(ebx).unwrap();
            a.hlt().unwrap();
            a.iretq().unwrap();
        });
        guest.memory.write(HANDLERS + 2 * 32, &handler);
        guest.cpu.translate_after(translated_after);
        guest.halts();
        guest.devices.nmi = true;
        let mut state = guest.halts();
        assert_eq!((state.registers[3], state.nmi_blocked), (1, true));
        // Another, in the handler, which goes on.
        guest.devices.nmi = true;
        state.halted = false;
        guest.cpu.restore(&state);
        let mut state = guest.halts();
        assert_eq!((state.registers[3], state.registers[1]), (2, 0));
        assert!(state.nmi_blocked && !guest.devices.nmi);
        // And none after that.
        state.halted = false;
        guest.cpu.restore(&state);
        let state = guest.halts();
        assert_eq!((state.registers[3], state.registers[1]), (2, 1));
        assert!(!state.nmi_blocked);
    }
}

#[test]
fn single_steps_trap_after_each_instruction() {
    let mut guest = Guest::new(|a| {
        a.pushfq().unwrap();
        a.or(dword_ptr(rsp), 0x100).unwrap();
        a.popfq().unwrap();
        a.nop().unwrap();
        a.nop().unwrap();
    });
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (1, None));
    assert_eq!(frame.rip, CODE + 10);
    assert_ne!(guest.cpu.save().debug[4] & 1 << 14, 0);
}

#[test]
fn iret_goes_to_user_mode_and_back() {
    let mut guest = Guest::new(|a| {
        let mut user = a.create_label();
        a.push(i32::from(USER_DATA)).unwrap();
        a.push(0x2_8000).unwrap();
        a.push(0x202).unwrap();
        a.push(i32::from(USER_CODE)).unwrap();
        a.lea(rax, ptr(user)).unwrap();
        a.push(rax).unwrap();
        a.iretq().unwrap();
        a.set_label(&mut user).unwrap();
        a.mov(ecx, cs).unwrap();
        a.ud2().unwrap();
    });
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.cs), (6, u64::from(USER_CODE)));
    assert_eq!((frame.rsp, frame.ss), (0x2_8000, u64::from(USER_DATA)));
    assert_eq!(guest.cpu.save().registers[1], u64::from(USER_CODE));
}

#[test]
fn syscall_and_sysret_change_the_level() {
    const KERNEL_ENTRY: u64 = CODE + 0x800;
    let mut guest = Guest::new(|a| {
        a.syscall().unwrap();
        a.ud2().unwrap();
    });
    let entry = assemble(64, KERNEL_ENTRY, |a| {
        a.mov(rdx, rcx).unwrap();
        a.mov(rbx, cs).unwrap();
        a.sysretq().unwrap();
    });
    guest.memory.write(KERNEL_ENTRY, &entry);
    let mut user = guest.user_mode();
    user.rflags = 0x203;
    // STAR, LSTAR, SFMASK.
    user.msrs.push((0xc000_0081, 0x0013_0008_0000_0000));
    user.msrs.push((0xc000_0082, KERNEL_ENTRY));
    user.msrs.push((0xc000_0084, 0x200));
    guest.cpu.restore(&user);
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.rip), (6, CODE + 2));
    assert_eq!(
        (frame.cs, frame.ss),
        (u64::from(USER_CODE), u64::from(USER_DATA))
    );
    assert_eq!(frame.rflags & 0x201, 0x201);
    let state = guest.cpu.save();
    assert_eq!(state.registers[2], CODE + 2);
    assert_eq!(state.registers[3], u64::from(KERNEL_CODE));
}

#[test]
fn sse_exceptions_that_are_not_masked_are_raised() {
    let frame = fault_of(|a| {
        a.mov(dword_ptr(DATA), 0x1d80).unwrap();
        a.ldmxcsr(dword_ptr(DATA)).unwrap();
        a.mov(eax, 0x3f80_0000).unwrap();
        a.movd(xmm0, eax).unwrap();
        a.xorps(xmm1, xmm1).unwrap();
        a.divss(xmm0, xmm1).unwrap();
    });
    assert_eq!(frame.vector, 19);
}

#[test]
fn sse_can_be_switched_off() {
    // CR0.TS; CR0.EM; CR4.OSFXSR, which is set.
    for (on, off, vector) in [(1 << 3, 0, 7), (1 << 2, 0, 6), (0, 1 << 9, 6)] {
        for translated_after in [1, u32::MAX] {
            let mut guest = Guest::new(|a| {
                a.mov(ebx, DATA as u32).unwrap();
                a.pxor(xmm0, xmm0).unwrap();
                a.movups(xmmword_ptr(rbx), xmm0).unwrap();
                a.hlt().unwrap();
            });
            let mut state = guest.long_mode();
            state.cr0 |= on;
            state.cr4 &= !off;
            guest.cpu.restore(&state);
            guest.cpu.translate_after(translated_after);
            let frame = guest.faults();
            assert_eq!((frame.vector, frame.rip), (vector, CODE + 5));
        }
    }
}

/// An FXSAVE image with every x87 exception unmasked, a flag set, and ES clear.
fn inconsistent_image() -> [u8; 512] {
    let mut image = [0; 512];
    image[0..2].copy_from_slice(&0x340_u16.to_le_bytes());
    image[2..4].copy_from_slice(&1_u16.to_le_bytes());
    image[24..28].copy_from_slice(&0x1f80_u32.to_le_bytes());
    image
}

#[test]
fn x87_exceptions_of_a_restored_image_are_the_guests() {
    let programs: [fn(&mut CodeAssembler); 3] = [
        |a| a.fldcw(word_ptr(rbx + 0x400)).unwrap(),
        |a| a.fldenv(ptr(rbx + 0x400)).unwrap(),
        |a| a.frstor(ptr(rbx + 0x400)).unwrap(),
    ];
    for write in programs {
        let mut guest = Guest::new(|a| {
            a.mov(ebx, DATA as u32).unwrap();
            a.fxrstor64(ptr(rbx)).unwrap();
            a.fnstsw(ax).unwrap();
            write(a);
        });
        guest.memory.write(DATA, &inconsistent_image());
        assert_eq!(guest.faults().vector, 16);
        assert_eq!(guest.cpu.save().registers[0], 0x8081);
        // The same image from outside.
        let mut guest = Guest::new(|a| {
            a.mov(ebx, DATA as u32).unwrap();
            write(a);
        });
        let mut state = guest.long_mode();
        state.fpu[..512].copy_from_slice(&inconsistent_image());
        guest.cpu.restore(&state);
        assert_eq!(guest.faults().vector, 16);
    }
    // And the other way round: nothing is pending that is masked.
    let mut guest = Guest::new(|a| {
        a.mov(ebx, DATA as u32).unwrap();
        a.fxrstor64(ptr(rbx)).unwrap();
        a.fld1().unwrap();
        a.hlt().unwrap();
    });
    let mut image = inconsistent_image();
    image[0..4].copy_from_slice(&0x8081_037f_u32.to_le_bytes());
    guest.memory.write(DATA, &image);
    guest.halts();
    assert_eq!(guest.frame(), None);
}

#[test]
fn a_state_with_bits_of_mxcsr_that_do_not_exist_is_cut_down() {
    let mut guest = Guest::new(|a| {
        a.mov(eax, 1).unwrap();
        a.cvtsi2sd(xmm0, eax).unwrap();
        a.stmxcsr(dword_ptr(DATA)).unwrap();
        a.hlt().unwrap();
    });
    let mut state = guest.long_mode();
    state.fpu[24..28].copy_from_slice(&0xffff_1f80_u32.to_le_bytes());
    for translated_after in [1, u32::MAX] {
        guest.cpu.restore(&state);
        guest.cpu.translate_after(translated_after);
        guest.halts();
        assert_eq!(guest.memory.read_u64(DATA), 0x1f80);
    }
}
