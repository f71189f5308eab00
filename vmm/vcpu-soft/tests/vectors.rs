//! AVX and XSAVE where they are more than arithmetic: what is off, what faults
//! midway, what is saved. Needs a host with AVX2.

mod support;

use iced_x86::code_asm::*;
use iced_x86::{Code, Instruction, MemoryOperand, Register};
use support::*;
use weft_vcpu::{CpuModel, CpuState};

/// The last page before one that is not there.
const EDGE: u64 = DATA + PAGE;

/// A guest of the model V3, AVX on; `None`, and said, where the host cannot.
fn guest(write: impl FnOnce(&mut CodeAssembler)) -> Option<Guest> {
    if !has_v3() {
        println!("skipped: this host lacks instructions of v3");
        return None;
    }
    let mut guest = Guest::of_model(CpuModel::V3, write);
    guest.protect(EDGE, 0);
    let state = guest.with_avx();
    guest.cpu.restore(&state);
    Some(guest)
}

fn ymm(state: &CpuState, number: usize) -> [u32; 8] {
    let word = |at: usize| u32::from_le_bytes(state.fpu[at..at + 4].try_into().unwrap());
    std::array::from_fn(|index| match index {
        0..4 => word(160 + 16 * number + 4 * index),
        _ => word(576 + 16 * number + 4 * (index - 4)),
    })
}

fn put_ymm(state: &mut CpuState, number: usize, value: [u32; 8]) {
    for (index, word) in value.into_iter().enumerate() {
        let at = match index {
            0..4 => 160 + 16 * number + 4 * index,
            _ => 576 + 16 * number + 4 * (index - 4),
        };
        state.fpu[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
}

/// Restores `state` with these vector registers.
fn start(guest: &mut Guest, registers: &[(usize, [u32; 8])]) {
    let mut state = guest.cpu.save();
    for &(number, value) in registers {
        put_ymm(&mut state, number, value);
    }
    guest.cpu.restore(&state);
}

#[test]
fn a_gather_that_faults_goes_on_where_it_was() {
    let gather =
        MemoryOperand::with_base_index_scale_displ_size(Register::RBX, Register::YMM1, 4, 0, 0);
    let gather = Instruction::with3(
        Code::VEX_Vpgatherdd_ymm_vm32y_ymm,
        Register::YMM0,
        gather,
        Register::YMM2,
    )
    .unwrap();
    let Some(mut guest) = guest(|a| {
        a.mov(rbx, EDGE - 16).unwrap();
        a.add_instruction(gather).unwrap();
        a.hlt().unwrap();
    }) else {
        return;
    };
    let words: Vec<u8> = (1..=4_u32).flat_map(u32::to_le_bytes).collect();
    guest.memory.write(EDGE - 16, &words);
    const ON: u32 = 1 << 31;
    start(
        &mut guest,
        &[
            (0, [9; 8]),
            (1, [0, 3, 2, 5, 4, 1, 1, u32::MAX]),
            (2, [ON, 0, ON, 0, ON, ON, ON, 0]),
        ],
    );
    let frame = guest.faults();
    let state = guest.cpu.save();
    assert_eq!((frame.vector, state.cr2), (14, EDGE));
    assert_eq!(ymm(&state, 0), [1, 9, 3, 9, 9, 9, 9, 9]);
    assert_eq!(ymm(&state, 2), [0, 0, 0, 0, ON, ON, ON, 0]);
    // The page comes, and the instruction is repeated.
    guest.protect(EDGE, PRESENT | WRITABLE | USER);
    guest.memory.write(EDGE, &7_u32.to_le_bytes());
    let mut again = state;
    again.rip = frame.rip;
    again.halted = false;
    again.registers[3] = EDGE - 16;
    guest.cpu.restore(&again);
    let state = guest.halts();
    assert_eq!(ymm(&state, 0), [1, 9, 3, 9, 7, 2, 2, 9]);
    assert_eq!(ymm(&state, 2), [0; 8]);
}

#[test]
fn masked_moves_touch_what_is_chosen() {
    const ON: u32 = 1 << 31;
    let Some(mut guest) = guest(|a| {
        a.mov(rbx, EDGE - 8).unwrap();
        a.vmaskmovps(ymm0, ymm2, ymmword_ptr(rbx)).unwrap();
        a.vpmaskmovd(ymmword_ptr(rbx), ymm2, ymm1).unwrap();
        a.vpmaskmovd(ymmword_ptr(rbx), ymm3, ymm4).unwrap();
        a.hlt().unwrap();
    }) else {
        return;
    };
    guest.memory.write(EDGE - 8, &[5, 0, 0, 0, 6, 0, 0, 0]);
    start(
        &mut guest,
        &[
            (0, [9; 8]),
            (1, [21, 22, 23, 24, 25, 26, 27, 28]),
            (2, [0, ON, 0, 0, 0, 0, 0, 0]),
            (3, [ON, 0, ON, 0, 0, 0, 0, 0]),
            (4, [77; 8]),
        ],
    );
    let frame = guest.faults();
    let state = guest.cpu.save();
    assert_eq!((frame.vector, frame.error, state.cr2), (14, Some(2), EDGE));
    assert_eq!(ymm(&state, 0), [0, 6, 0, 0, 0, 0, 0, 0]);
    // The second store did nothing at all.
    assert_eq!(guest.memory.read(EDGE - 8, 8), [5, 0, 0, 0, 22, 0, 0, 0]);
}

#[test]
fn what_is_off_is_undefined_or_not_available() {
    let add = |a: &mut CodeAssembler| a.vaddps(ymm0, ymm1, ymm2).unwrap();
    for (in_cr0, in_cr4, xcr0, vector) in [(0, 0, 7, 6), (0, 1 << 18, 3, 6), (8, 1 << 18, 7, 7)] {
        for translated in [false, true] {
            let Some(mut guest) = guest(add) else { return };
            if translated {
                guest.cpu.translate_after(1);
            }
            let state = guest.long_mode();
            guest.cpu.restore(&CpuState {
                cr0: state.cr0 | in_cr0,
                cr4: state.cr4 | in_cr4,
                xcr0,
                ..state
            });
            assert_eq!(guest.faults().vector, vector, "{in_cr0} {in_cr4} {xcr0}");
        }
    }
    // BMI needs none of it.
    let Some(mut guest) = guest(|a| {
        a.mov(eax, 0b1100).unwrap();
        a.blsr(ecx, eax).unwrap();
        a.hlt().unwrap();
    }) else {
        return;
    };
    let state = guest.long_mode();
    guest.cpu.restore(&state);
    assert_eq!(guest.halts().registers[1], 0b1000);
}

#[test]
fn only_aligned_moves_need_alignment() {
    let Some(mut guest) = guest(|a| {
        a.mov(rbx, DATA + 8).unwrap();
        a.vaddps(ymm0, ymm1, ymmword_ptr(rbx)).unwrap();
        a.vmovups(ymm0, ymmword_ptr(rbx)).unwrap();
        a.add(rbx, 8).unwrap();
        a.vmovaps(xmm0, xmmword_ptr(rbx)).unwrap();
        a.vmovaps(ymm0, ymmword_ptr(rbx)).unwrap();
    }) else {
        return;
    };
    let frame = guest.faults();
    assert_eq!((frame.vector, frame.error), (13, Some(0)));
    assert_eq!(guest.cpu.save().registers[3], DATA + 16);
}

#[test]
fn xsave_keeps_and_xrstor_brings_back_what_is_asked_for() {
    let Some(mut guest) = guest(|a| {
        a.mov(rbx, DATA).unwrap();
        a.mov(eax, -1).unwrap();
        a.mov(edx, eax).unwrap();
        a.xsave64(ptr(rbx)).unwrap();
        a.vpcmpeqd(ymm1, ymm1, ymm1).unwrap();
        a.vzeroall().unwrap();
        a.vpcmpeqd(ymm3, ymm3, ymm3).unwrap();
        // Only the upper halves.
        a.mov(eax, 4).unwrap();
        a.xrstor64(ptr(rbx)).unwrap();
        a.vmovups(ymmword_ptr(rbx + 0x800), ymm1).unwrap();
        a.vmovups(ymmword_ptr(rbx + 0x820), ymm3).unwrap();
        // The area does not have them: they are as after power-on.
        a.mov(qword_ptr(rbx + 512), 3).unwrap();
        a.mov(eax, 7).unwrap();
        a.xrstor64(ptr(rbx)).unwrap();
        a.hlt().unwrap();
    }) else {
        return;
    };
    let (first, third) = ([1, 2, 3, 4, 5, 6, 7, 8], [31, 32, 33, 34, 35, 36, 37, 38]);
    start(&mut guest, &[(1, first), (3, third)]);
    let state = guest.halts();
    assert_eq!(guest.memory.read_u64(DATA + 512), 3);
    assert_eq!(guest.memory.read(DATA + 576 + 16, 16), {
        let words: Vec<u8> = (5..=8_u32).flat_map(u32::to_le_bytes).collect();
        words
    });
    let read = |at: u64| -> [u64; 4] {
        std::array::from_fn(|index| guest.memory.read_u64(DATA + at + 8 * index as u64))
    };
    assert_eq!(read(0x800), [0, 0, 5 | 6 << 32, 7 | 8 << 32]);
    assert_eq!(
        read(0x820),
        [u64::MAX, u64::MAX, 35 | 36 << 32, 37 | 38 << 32]
    );
    assert_eq!(ymm(&state, 1), [1, 2, 3, 4, 0, 0, 0, 0]);
    assert_eq!(ymm(&state, 3), [31, 32, 33, 34, 0, 0, 0, 0]);
}

#[test]
fn xsave_and_xcr0_refuse_what_cannot_be() {
    let programs: [fn(&mut CodeAssembler); 6] = [
        // At no multiple of 64; a header with a component that is not there, or in
        // the compact format.
        |a| a.xsave(ptr(rbx + 16)).unwrap(),
        |a| {
            a.mov(qword_ptr(rbx + 512), 8).unwrap();
            a.xrstor(ptr(rbx)).unwrap();
        },
        |a| {
            a.mov(dword_ptr(rbx + 524), 0x8000_0000_u32 as i32).unwrap();
            a.xrstor(ptr(rbx)).unwrap();
        },
        // No x87; AVX without SSE; another register.
        |a| {
            a.mov(eax, 6).unwrap();
            a.xsetbv().unwrap();
        },
        |a| {
            a.mov(eax, 5).unwrap();
            a.xsetbv().unwrap();
        },
        |a| {
            a.mov(ecx, 1).unwrap();
            a.xgetbv().unwrap();
        },
    ];
    for (index, program) in programs.into_iter().enumerate() {
        let Some(mut guest) = guest(|a| {
            a.mov(rbx, DATA).unwrap();
            a.mov(eax, 7).unwrap();
            a.xor(edx, edx).unwrap();
            a.xor(ecx, ecx).unwrap();
            program(a);
        }) else {
            return;
        };
        let frame = guest.faults();
        assert_eq!((frame.vector, frame.error), (13, Some(0)), "{index}");
    }
}

#[test]
fn cpuid_follows_what_the_guest_switched_on() {
    let Some(mut guest) = guest(|a| {
        a.mov(eax, 1).unwrap();
        a.cpuid().unwrap();
        a.mov(edi, ecx).unwrap();
        a.mov(eax, 0xd).unwrap();
        a.xor(ecx, ecx).unwrap();
        a.cpuid().unwrap();
        a.mov(esi, ebx).unwrap();
        a.xor(ecx, ecx).unwrap();
        a.mov(eax, 3).unwrap();
        a.xor(edx, edx).unwrap();
        a.xsetbv().unwrap();
        a.mov(eax, 0xd).unwrap();
        a.cpuid().unwrap();
        a.hlt().unwrap();
    }) else {
        return;
    };
    let state = guest.halts();
    assert_eq!(state.registers[7] >> 26 & 7, 7);
    assert_eq!(state.registers[6], 832);
    // Enabled now, at most, and which.
    assert_eq!(state.registers[3], 576);
    assert_eq!((state.registers[1], state.registers[0]), (832, 7));
    assert_eq!(state.xcr0, 3);
}

#[test]
fn watchpoints_see_what_a_vector_instruction_accesses_and_no_more() {
    type Program = fn(&mut CodeAssembler);
    // The mask in YMM1 chooses element 5 alone, the bytes from 20 on.
    let programs: [(Program, &[u64]); 4] = [
        (|a| a.vmovdqu(ymmword_ptr(rbx), ymm0).unwrap(), &[0, 20, 31]),
        (
            |a| a.vaddps(ymm0, ymm0, ymmword_ptr(rbx)).unwrap(),
            &[0, 20, 31],
        ),
        (
            |a| a.vpmaskmovd(ymmword_ptr(rbx), ymm1, ymm0).unwrap(),
            &[20, 23],
        ),
        (
            |a| a.vpmaskmovd(ymm0, ymm1, ymmword_ptr(rbx)).unwrap(),
            &[20, 23],
        ),
    ];
    for (write, hits) in programs {
        for byte in [0, 16, 19, 20, 23, 24, 31, 32] {
            let expected = hits.contains(&byte) || hits.len() == 3 && byte < 32;
            let Some(mut guest) = guest(|a| {
                write(a);
                a.hlt().unwrap();
            }) else {
                return;
            };
            start(&mut guest, &[(1, [0, 0, 0, 0, 0, 1 << 31, 0, 0])]);
            let mut state = guest.cpu.save();
            state.registers[3] = DATA;
            state.debug[0] = DATA + byte;
            // Enabled, for loads and stores of one byte.
            state.debug[5] = 1 | 3 << 16 | 0x400;
            guest.cpu.restore(&state);
            guest.cpu.translate_after(1);
            guest.halts();
            let hit = guest.frame().is_some_and(|frame| frame.vector == 1);
            assert_eq!(hit, expected, "byte {byte}");
        }
    }
}
