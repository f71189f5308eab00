//! Hot code, which is translated, in whole guests. Needs nothing.

mod support;

use iced_x86::code_asm::*;
use support::*;
use weft_vcpu::CpuState;

const FUNCTION: u64 = 0x60_0000;
const CALLS: u64 = 1000;

/// Calls a function with a loop of its own many times, and every 64 calls
/// changes the constant that it returns.
fn changing_function() -> Guest {
    let guest = Guest::new(|a| {
        let (mut again, mut same) = (a.create_label(), a.create_label());
        a.mov(ecx, CALLS as u32).unwrap();
        a.xor(esi, esi).unwrap();
        a.mov(rbx, FUNCTION).unwrap();
        a.set_label(&mut again).unwrap();
        a.call(rbx).unwrap();
        a.add(rsi, rax).unwrap();
        a.test(ecx, 63).unwrap();
        a.jnz(same).unwrap();
        a.inc(byte_ptr(rbx + 1)).unwrap();
        a.set_label(&mut same).unwrap();
        a.dec(ecx).unwrap();
        a.jnz(again).unwrap();
        a.hlt().unwrap();
    });
    let function = assemble(64, FUNCTION, |a| {
        let mut again = a.create_label();
        a.mov(eax, 1).unwrap();
        a.mov(r10d, 3).unwrap();
        a.set_label(&mut again).unwrap();
        a.push(r10).unwrap();
        a.add(rax, qword_ptr(rsp)).unwrap();
        a.pop(r10).unwrap();
        a.dec(r10d).unwrap();
        a.jnz(again).unwrap();
        a.ret().unwrap();
    });
    guest.memory.write(FUNCTION, &function);
    guest
}

fn both_ways(mut make: impl FnMut() -> Guest) -> CpuState {
    let translated = make().halts();
    let mut guest = make();
    guest.cpu.interpret_only();
    let interpreted = guest.halts();
    assert_eq!(translated.registers, interpreted.registers);
    assert_eq!(translated.rflags, interpreted.rflags);
    assert_eq!(translated.fpu, interpreted.fpu);
    translated
}

#[test]
fn linked_code_of_a_page_dies_when_the_page_is_written() {
    let (mut sum, mut constant) = (0, 1);
    for left in (1..=CALLS).rev() {
        sum += constant + 3 + 2 + 1;
        if left % 64 == 0 {
            constant += 1;
        }
    }
    assert_eq!(both_ways(changing_function).registers[6], sum);
}

#[test]
fn a_fault_in_the_middle_of_a_trace_is_exact() {
    // The page beyond the array is not there: the handler sees the registers of
    // the access that faults, in the round in which it does.
    const ARRAY: u64 = 0x50_0000;
    let make = || {
        let guest = Guest::new(|a| {
            let mut again = a.create_label();
            a.mov(rbx, ARRAY).unwrap();
            a.xor(eax, eax).unwrap();
            a.set_label(&mut again).unwrap();
            a.inc(rax).unwrap();
            a.mov(qword_ptr(rbx), rax).unwrap();
            a.add(rax, qword_ptr(rbx)).unwrap();
            a.add(rbx, 8).unwrap();
            a.jmp(again).unwrap();
        });
        guest.protect(ARRAY + 0x1000, 0);
        guest
    };
    let (mut translated, mut interpreted) = (make(), make());
    interpreted.cpu.interpret_only();
    let (ours, theirs) = (translated.faults(), interpreted.faults());
    assert_eq!(ours.rip, theirs.rip);
    let (ours, theirs) = (translated.cpu.save(), interpreted.cpu.save());
    assert_eq!(ours.registers, theirs.registers);
    assert_eq!(ours.cr2, ARRAY + 0x1000);
}

#[test]
fn sse_state_survives_handlers_in_hot_loops() {
    both_ways(|| {
        Guest::new(|a| {
            let mut again = a.create_label();
            a.mov(ecx, 300).unwrap();
            a.mov(eax, 1).unwrap();
            a.cvtsi2sd(xmm1, eax).unwrap();
            a.xorps(xmm0, xmm0).unwrap();
            a.set_label(&mut again).unwrap();
            a.addsd(xmm0, xmm1).unwrap();
            // No template: the interpreter's handler runs it.
            a.fninit().unwrap();
            a.fld1().unwrap();
            a.sqrtsd(xmm2, xmm0).unwrap();
            a.movq(rdx, xmm2).unwrap();
            a.dec(ecx).unwrap();
            a.jnz(again).unwrap();
            a.hlt().unwrap();
        })
    });
}

#[test]
fn a_move_of_16_bits_at_a_pages_end_reads_no_more() {
    // MOVSXD R16, m16 (66 63): AMD's processors read 32 bits.
    let guest = || {
        let guest = Guest::new(|a| {
            let mut again = a.create_label();
            a.mov(ecx, CALLS as u32).unwrap();
            a.mov(rbx, MEMORY - 2).unwrap();
            a.set_label(&mut again).unwrap();
            a.db(&[0x66, 0x63, 0x03]).unwrap();
            a.dec(ecx).unwrap();
            a.jnz(again).unwrap();
            a.hlt().unwrap();
        });
        guest.memory.write(MEMORY - 2, &[0x34, 0x92]);
        guest
    };
    assert_eq!(both_ways(guest).registers[0], 0x9234);
}
