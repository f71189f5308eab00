//! A comparison and the branch behind it are one op where they follow each other:
//! against the same two with a NOP between them. Needs nothing.

mod support;

use support::*;

const FAR: u64 = 0x60_0000;
const CASE: usize = 64;
const VALUES: [u64; 8] = [
    0,
    1,
    0x7f,
    0x80,
    0xffff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0x7fff_ffff_8000_8000,
    0x0123_4567_ffff_ff81,
];

/// CMP and TEST of RAX, RDX, [RBX] and immediates, in a size.
fn comparisons(size: usize) -> Vec<Vec<u8>> {
    let wide = u8::from(size != 1);
    let immediate = match size {
        1 => vec![0x81],
        2 => vec![0x81, 0xff],
        _ => vec![0x81, 0xff, 0xff, 0xff],
    };
    let with_immediate = |opcode: u8, modrm: u8| [vec![opcode, modrm], immediate.clone()].concat();
    let mut all = vec![
        vec![0x38 | wide, 0xd0],
        vec![0x38 | wide, 0x13],
        vec![0x3a | wide, 0x03],
        with_immediate(0x80 | wide, 0xf8),
        with_immediate(0x80 | wide, 0x3b),
        vec![0x84 | wide, 0xd0],
        vec![0x84 | wide, 0x13],
        with_immediate(0xf6 | wide, 0xc0),
        with_immediate(0xf6 | wide, 0x03),
    ];
    if size != 1 {
        all.push(vec![0x83, 0xf8, 0x80]);
        all.push(vec![0x83, 0x3b, 0x80]);
    }
    for bytes in &mut all {
        match size {
            2 => bytes.insert(0, 0x66),
            8 => bytes.insert(0, 0x48),
            _ => {}
        }
    }
    all
}

/// Whether the branch was taken to R12 and the flags to R13, joined; then the
/// same apart, to R14 and R15.
fn case(comparison: &[u8], condition: u8) -> Vec<u8> {
    let jump = [0x70 | condition, 6];
    let mut code = vec![0x41, 0xbc, 1, 0, 0, 0];
    code.extend(comparison);
    code.extend(jump);
    code.extend([0x41, 0xbc, 0, 0, 0, 0, 0x9c, 0x41, 0x5d]);
    code.extend([0x41, 0xbe, 1, 0, 0, 0]);
    code.extend(comparison);
    code.push(0x90);
    code.extend(jump);
    code.extend([0x41, 0xbe, 0, 0, 0, 0, 0x9c, 0x41, 0x5f, 0xf4]);
    assert!(code.len() <= CASE);
    code.resize(CASE, 0xf4);
    code
}

#[test]
fn every_condition_of_every_comparison_is_the_same_joined_and_apart() {
    let mut guest = Guest::new(|a| a.hlt().unwrap());
    guest.cpu.interpret_only();
    let mut code = Vec::new();
    for size in [1, 2, 4, 8] {
        for comparison in comparisons(size) {
            for condition in 0..16 {
                code.extend(case(&comparison, condition));
            }
        }
    }
    guest.memory.write(FAR, &code);
    let mut taken = 0;
    for at in (0..code.len()).step_by(CASE) {
        for a in VALUES {
            for b in VALUES {
                let mut state = guest.long_mode();
                state.rip = FAR + at as u64;
                (state.registers[0], state.registers[2], state.registers[3]) = (a, b, DATA);
                guest.memory.write_u64(DATA, b);
                guest.cpu.restore(&state);
                let after = guest.halts().registers;
                let bytes = &code[at..at + CASE];
                assert_eq!(after[12], after[14], "{bytes:x?} {a:x} {b:x}");
                assert_eq!(after[13], after[15], "{bytes:x?} {a:x} {b:x}");
                taken += after[12];
            }
        }
    }
    let runs = (code.len() / CASE * VALUES.len().pow(2)) as u64;
    assert_eq!(taken * 2, runs, "each condition and its opposite");
}

#[test]
fn a_comparison_that_faults_is_where_the_fault_is() {
    for long in [false, true] {
        let mut guest = Guest::new(|a| {
            use iced_x86::code_asm::*;
            let mut end = a.create_label();
            a.mov(eax, 5).unwrap();
            a.cmp(rax, qword_ptr(DATA)).unwrap();
            if long {
                a.nop().unwrap();
            }
            a.jne(end).unwrap();
            a.set_label(&mut end).unwrap();
            a.hlt().unwrap();
        });
        guest.protect(DATA, 0);
        let frame = guest.faults();
        assert_eq!((frame.vector, frame.rip), (14, CODE + 5));
    }
}
