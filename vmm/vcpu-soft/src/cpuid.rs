//! CPUID: which CPU the guest sees (Intel SDM volume 2, CPUID; AMD64 manual
//! volume 3, appendix E).
//!
//! A processor of the machine's [`CpuModel`], with CX16, NX, SYSCALL,
//! RDTSCP, SMEP, SMAP, UMIP, FSGSBASE, x2APIC. It says that it is AMD's, of a
//! family without quirks that Linux would work around, so that kernels expect
//! neither Meltdown nor MDS, which an interpreter does not have either. No PCID,
//! SYSENTER.

use weft_vcpu::CpuModel;

use crate::interpret::xsave::{AREA_BYTES, HIGH_AT, HIGH_BYTES, LEGACY_BYTES, component};
use crate::run::Configuration;
use crate::walk::PHYSICAL_BITS;

/// Leaves for hypervisors.
const HYPERVISOR: u32 = 0x4000_0000;
const EXTENDED: u32 = 0x8000_0000;

/// Highest leaves of the three ranges.
const BASIC_LAST: u32 = 0x16;
const HYPERVISOR_LAST: u32 = HYPERVISOR + 0x10;
const EXTENDED_LAST: u32 = EXTENDED + 0x21;

/// Family 20 (14h), model 2, stepping 0.
const SIGNATURE: u32 = 0x0050_0f20;

/// In EDX of leaves 1 and 8000_0001h: the local APIC, while it is enabled.
pub const APIC: u32 = 1 << 9;
/// In ECX of leaf 1: x2APIC mode can be chosen.
const X2APIC: u32 = 1 << 21;

/// Features in leaf 1, EDX.
const FEATURES: u32 = 1 << 0 // FPU
    | 1 << 2 // DE
    | 1 << 3 // PSE
    | 1 << 4 // TSC
    | 1 << 5 // MSR
    | 1 << 6 // PAE
    | 1 << 7 // MCE
    | 1 << 8 // CMPXCHG8B
    | APIC
    | 1 << 12 // MTRR
    | 1 << 13 // PGE
    | 1 << 14 // MCA
    | 1 << 15 // CMOV
    | 1 << 16 // PAT
    | 1 << 17 // PSE36
    | 1 << 19 // CLFLUSH
    | 1 << 23 // MMX
    | 1 << 24 // FXSR
    | 1 << 25 // SSE
    | 1 << 26; // SSE2
/// Several logical processors in a package.
const HTT: u32 = 1 << 28;

/// Features in leaf 1, ECX: CMPXCHG16B, x2APIC, TSC deadline timer, hypervisor.
const FEATURES_C: u32 = 1 << 13 | X2APIC | 1 << 24 | 1 << 31;

/// Features in leaf 8000_0001h, EDX: those of leaf 1 that are repeated there,
/// SYSCALL, NX, 1 GiB pages, RDTSCP, long mode.
const EXTENDED_FEATURES: u32 =
    FEATURES & 0x0183_f3ff | 1 << 11 | 1 << 20 | 1 << 26 | 1 << 27 | 1 << 29;
/// LAHF in 64-bit mode; CMP legacy where there are several cores.
const EXTENDED_FEATURES_C: u32 = 1;
const CMP_LEGACY: u32 = 1 << 1;

/// FSGSBASE, SMEP and SMAP, in leaf 7, EBX.
const STRUCTURED_FEATURES_B: u32 = 1 | 1 << 7 | 1 << 20;
/// UMIP, in leaf 7, ECX.
const STRUCTURED_FEATURES_C: u32 = 1 << 2;
/// CR4.OSXSAVE is set, in leaf 1, ECX.
const OSXSAVE: u32 = 1 << 27;
/// In leaf d, subleaf 1, EAX.
const XSAVEOPT: u32 = 1;
/// Invariant TSC, in leaf 8000_0007h, EDX.
const INVARIANT_TSC: u32 = 1 << 8;
/// FXSAVE and FXRSTOR leave no error pointers of others; no speculative store
/// bypass to be afraid of: leaf 8000_0008h, EBX.
const NO_LEAKS: u32 = 1 << 2 | 1 << 26;
/// LFENCE serializes; a null selector clears the base: leaf 8000_0021h, EAX.
const LFENCE_SERIALIZES: u32 = 1 << 2 | 1 << 6;

/// KVM's paravirtual clock, by its new MSRs, and stable: all that is offered of
/// KVM's features (Linux Documentation/virt/kvm/x86/cpuid.rst).
const KVM_FEATURES: u32 = 1 << 24 | 1 << 3 | 1;

const VENDOR: &[u8; 12] = b"AuthenticAMD";
const KVM_SIGNATURE: &[u8; 12] = b"KVMKVMKVM\0\0\0";
const BRAND: &[u8; 48] =
    b"Weft software vCPU\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

fn word(text: &[u8], index: usize) -> u32 {
    let mut bytes = [0; 4];
    for (byte, &letter) in bytes.iter_mut().zip(text.iter().skip(4 * index)) {
        *byte = letter;
    }
    u32::from_le_bytes(bytes)
}

/// Whether a leaf has [`APIC`].
pub fn tells_of_apic(leaf: u32) -> bool {
    matches!(leaf, 1 | 0x8000_0001)
}

/// What the guest made of its extended state.
#[derive(Clone, Copy, Debug)]
pub struct Extended {
    /// CR4.OSXSAVE.
    pub on: bool,
    pub xcr0: u64,
}

/// EAX, EBX, ECX and EDX for a leaf, while the local APIC is enabled.
pub fn cpuid(
    machine: &Configuration,
    extended_state: Extended,
    leaf: u32,
    subleaf: u32,
) -> [u32; 4] {
    let cpus = machine.cpus.max(1);
    let shift = u32::BITS - (cpus - 1).leading_zeros();
    match leaf {
        0 => [
            BASIC_LAST,
            word(VENDOR, 0),
            word(VENDOR, 2),
            word(VENDOR, 1),
        ],
        1 => {
            let several = if cpus > 1 { HTT } else { 0 };
            let count = cpus.min(255) << 16;
            let line = 8 << 8;
            let id = machine.apic_id << 24;
            let on = if extended_state.on { OSXSAVE } else { 0 };
            let more = machine.model.bits().leaf_1_ecx | on;
            [
                SIGNATURE,
                id | count | line,
                FEATURES_C | more,
                FEATURES | several,
            ]
        }
        7 if subleaf == 0 => {
            let features = STRUCTURED_FEATURES_B | machine.model.bits().leaf_7_ebx;
            [0, features, STRUCTURED_FEATURES_C, 0]
        }
        0xd if machine.model == CpuModel::V3 => state_sizes(extended_state.xcr0, subleaf),
        0xb => topology(machine, cpus, shift, subleaf),
        0x15 => {
            let frequency = u32::try_from(machine.tsc_frequency).unwrap_or(0);
            [1, 1, frequency, 0]
        }
        0x16 => {
            let mhz = (machine.tsc_frequency / 1_000_000) as u32 & 0xffff;
            [mhz, mhz, 0, 0]
        }
        _ if leaf >= EXTENDED => extended(machine, cpus, shift, leaf),
        _ if leaf >= HYPERVISOR => hypervisor(machine, leaf),
        _ => [0; 4],
    }
}

/// What XSAVE saves, where, and how much: leaf d.
fn state_sizes(xcr0: u64, subleaf: u32) -> [u32; 4] {
    const AVX: u32 = component::AVX.trailing_zeros();
    let size = match xcr0 & component::AVX {
        0 => LEGACY_BYTES,
        _ => AREA_BYTES,
    };
    match subleaf {
        0 => [component::ALL as u32, size as u32, AREA_BYTES as u32, 0],
        1 => [XSAVEOPT, 0, 0, 0],
        AVX => [HIGH_BYTES as u32, HIGH_AT as u32, 0, 0],
        _ => [0; 4],
    }
}

/// One thread in each core, all cores in one package.
fn topology(machine: &Configuration, cpus: u32, shift: u32, subleaf: u32) -> [u32; 4] {
    let id = machine.apic_id;
    match subleaf {
        0 => [0, 1, 1 << 8, id],
        1 => [shift, cpus, 2 << 8 | 1, id],
        _ => [0, 0, subleaf & 0xff, id],
    }
}

fn hypervisor(machine: &Configuration, leaf: u32) -> [u32; 4] {
    match leaf {
        HYPERVISOR => [
            HYPERVISOR_LAST,
            word(KVM_SIGNATURE, 0),
            word(KVM_SIGNATURE, 1),
            word(KVM_SIGNATURE, 2),
        ],
        _ if leaf == HYPERVISOR + 1 => [KVM_FEATURES, 0, 0, 0],
        _ if leaf == HYPERVISOR_LAST => {
            let khz = u32::try_from(machine.tsc_frequency / 1000).unwrap_or(0);
            // The local APIC's timer counts nanoseconds: 1 GHz.
            [khz, 1_000_000, 0, 0]
        }
        _ => [0; 4],
    }
}

fn extended(machine: &Configuration, cpus: u32, shift: u32, leaf: u32) -> [u32; 4] {
    match leaf - EXTENDED {
        0 => [
            EXTENDED_LAST,
            word(VENDOR, 0),
            word(VENDOR, 2),
            word(VENDOR, 1),
        ],
        1 => {
            let several = if cpus > 1 { CMP_LEGACY } else { 0 };
            let features = EXTENDED_FEATURES_C | machine.model.bits().extended_ecx | several;
            [SIGNATURE, 0, features, EXTENDED_FEATURES]
        }
        part @ 2..=4 => {
            let first = (part as usize - 2) * 4;
            std::array::from_fn(|index| word(BRAND, first + index))
        }
        7 => [0, 0, 0, INVARIANT_TSC],
        8 => {
            const LINEAR_BITS: u32 = 48;
            let sizes = LINEAR_BITS << 8 | PHYSICAL_BITS;
            [sizes, NO_LEAKS, shift << 12 | (cpus - 1) & 0xff, 0]
        }
        0x21 => [LFENCE_SERIALIZES, 0, 0, 0],
        _ => [0; 4],
    }
}
