//! What CPUID says of the local APIC. Needs nothing.

mod support;

use iced_x86::code_asm::*;
use support::*;

const APIC: u64 = 1 << 9;
const X2APIC: u64 = 1 << 21;

/// Writes IA32_APIC_BASE and asks leaves 1 and 8000_0001h: EDX of both, ECX of the first.
fn told(base: u32) -> [u64; 3] {
    let mut guest = Guest::new(|code| {
        let mut write = || {
            code.mov(ecx, 0x1b)?;
            code.mov(eax, base)?;
            code.xor(edx, edx)?;
            code.wrmsr()?;
            code.mov(eax, 1)?;
            code.cpuid()?;
            code.mov(r8, rdx)?;
            code.mov(r9, rcx)?;
            code.mov(eax, 0x8000_0001_u32)?;
            code.cpuid()?;
            code.mov(r10, rdx)?;
            code.hlt()
        };
        write().unwrap();
    });
    let registers = guest.halts().registers;
    [registers[8], registers[10], registers[9]]
}

#[test]
fn a_local_apic_is_told_of_while_it_is_enabled() {
    for base in [0xfee0_0900, 0xfee0_0d00] {
        let [basic, extended, others] = told(base);
        assert_ne!(basic & APIC, 0, "{base:#x}");
        assert_ne!(extended & APIC, 0, "{base:#x}");
        assert_ne!(others & X2APIC, 0, "{base:#x}");
    }
    let [basic, extended, _] = told(0xfee0_0100);
    assert_eq!((basic & APIC, extended & APIC), (0, 0));
    // Nothing else goes.
    let [whole, ..] = told(0xfee0_0900);
    assert_eq!(basic | APIC, whole);
}
