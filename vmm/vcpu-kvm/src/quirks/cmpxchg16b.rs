//! CMPXCHG16B: the kernel's free lists, where CPUID could not be made to hide it.
//! Another vCPU may run native code on the same bytes, so it is the host's own.

use std::arch::asm;

use weft_vcpu::Access;

use super::step::{Failure, Outcome, REFUSED, Step, ZERO};

pub(super) fn cmpxchg16b(step: &mut Step) -> Result<Outcome, Failure> {
    let Some(address) = step.address(0) else {
        return Ok(Outcome::Unknown);
    };
    if !address.is_multiple_of(16) {
        return Ok(REFUSED);
    }
    if !std::arch::is_x86_feature_detected!("cmpxchg16b") {
        return Ok(Outcome::Unknown);
    }
    let [rax, rcx, rdx, rbx, ..] = step.registers.general;
    let expected = u128::from(rdx) << 64 | u128::from(rax);
    let new = u128::from(rcx) << 64 | u128::from(rbx);
    let place = step.memory.host(address, Access::Write)?;
    // SAFETY: the processor has the instruction; the place is 16 bytes of guest
    // RAM, aligned, inside one page, that are only accessed atomically from here.
    let found = unsafe { exchange(place.cast(), expected, new) };
    if found == expected {
        step.registers.rflags |= ZERO;
    } else {
        step.registers.rflags &= !ZERO;
        step.registers.general[0] = found as u64;
        step.registers.general[2] = (found >> 64) as u64;
    }
    Ok(Outcome::Done)
}

/// What was at `place`. In assembly, because the library's function becomes a call
/// to an outside routine where the build does not demand the instruction.
///
/// # Safety
///
/// The processor must have the instruction, and `place` must be valid for 16 bytes
/// and aligned to as many.
unsafe fn exchange(place: *mut u128, expected: u128, new: u128) -> u128 {
    let (mut low, mut high) = (expected as u64, (expected >> 64) as u64);
    // SAFETY: the caller's promise; RBX, which the compiler keeps for itself, is
    // put back. No operand may be in it, so each has a register of its own.
    unsafe {
        asm!(
            "xchg rbx, rsi",
            "lock cmpxchg16b [rdi]",
            "mov rbx, rsi",
            in("rdi") place,
            inout("rsi") new as u64 => _,
            in("rcx") (new >> 64) as u64,
            inout("rax") low,
            inout("rdx") high,
            options(nostack),
        );
    }
    u128::from(high) << 64 | u128::from(low)
}

#[cfg(test)]
mod tests {
    use super::super::step::tests::Bench;
    use super::*;
    use vm_memory::{Bytes, GuestAddress};

    /// cmpxchg16b [rsi]
    const BYTES: [u8; 4] = [0x48, 0x0f, 0xc7, 0x0e];

    #[test]
    fn it_exchanges_or_tells_what_is_there() {
        let mut bench = Bench::new();
        bench.registers.general[6] = 0x9010;
        // RCX:RBX is the new value, RDX:RAX (zero) the expected one.
        bench.registers.general[1] = 5;
        bench.registers.general[3] = 4;
        bench.step(&BYTES, cmpxchg16b).unwrap();
        assert_ne!(bench.registers.rflags & ZERO, 0);
        let now: [u64; 2] = bench.ram.guest().read_obj(GuestAddress(0x9010)).unwrap();
        assert_eq!(now, [4, 5]);
        bench.step(&BYTES, cmpxchg16b).unwrap();
        assert_eq!(bench.registers.rflags & ZERO, 0);
        assert_eq!(
            (bench.registers.general[0], bench.registers.general[2]),
            (4, 5)
        );
        bench.registers.general[6] = 0x9018;
        assert_eq!(bench.step(&BYTES, cmpxchg16b), Ok(REFUSED));
    }
}
