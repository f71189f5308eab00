//! What CPUID shows to a guest (Intel SDM volume 2, CPUID; AMD APM volume 3,
//! appendix E): what KVM supports, less what this machine does not have, plus
//! the places of its CPUs.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;

use super::KvmError;

/// The paravirtual features that the guest may use: the clock at both pairs of
/// MSRs (bits 0 and 3), its TSC stable over CPUs (bit 24). All others need KVM's
/// own local APIC (kernel document: virt/kvm/x86/cpuid).
const PARAVIRTUAL_FEATURES: u32 = 1 << 24 | 1 << 3 | 1;

/// Bits of leaf 1 ECX.
const VMX: u32 = 1 << 5;
const PCID: u32 = 1 << 17;
const CMPXCHG16B: u32 = 1 << 13;
const X2APIC: u32 = 1 << 21;
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1 EDX: the count of logical processors is valid.
const HYPER_THREADING: u32 = 1 << 28;
/// Bits of leaf 7: SGX (it has no enclave memory here), processor trace, and what
/// has registers that are not saved: shadow stacks, SGX's launch control, indirect
/// branch tracking, architectural last-branch records.
const SGX: u32 = 1 << 2;
const PROCESSOR_TRACE: u32 = 1 << 25;
const SHADOW_STACKS: u32 = 1 << 7;
const SGX_LAUNCH_CONTROL: u32 = 1 << 30;
const LAST_BRANCH_RECORDS: u32 = 1 << 19;
const BRANCH_TRACKING: u32 = 1 << 20;
/// Leaf 7, subleaf 1, EAX: FRED, which has registers that are not saved.
const FRED: u32 = 1 << 17;
/// XSAVE components of processor trace and of control-flow enforcement.
const HIDDEN_COMPONENTS: u32 = 1 << 8 | 1 << 11 | 1 << 12;
/// Bits of leaf 8000_0001 ECX.
const COMPATIBILITY_LEGACY: u32 = 1 << 1;
const SVM: u32 = 1 << 2;
const PERFORMANCE_COUNTERS: u32 = 1 << 23;

/// Where one vCPU is among the others. One thread a core, one package.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Its local APIC's identifier.
    pub(super) apic_id: u32,
    /// vCPUs of the machine.
    pub(super) cpus: u32,
    /// Without what KVM's emulator cannot execute.
    pub(super) emulated: bool,
}

/// All that KVM can show.
pub(super) fn supported(kvm: &Kvm) -> Result<CpuId, KvmError> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|error| KvmError::call("KVM_GET_SUPPORTED_CPUID", error))
}

/// What the vCPU at `place` shows.
pub(super) fn for_vcpu(supported: &CpuId, place: Place) -> Result<CpuId, KvmError> {
    let mut entries: Vec<kvm_cpuid_entry2> = supported
        .as_slice()
        .iter()
        .filter(|entry| !is_extended_topology(entry))
        .copied()
        .map(|mut entry| {
            limit(&mut entry, place);
            entry
        })
        .collect();
    entries.extend(extended_topology(place));
    CpuId::from_entries(&entries).map_err(|_| KvmError::Cpuid(entries.len(), KVM_MAX_CPUID_ENTRIES))
}

/// Leaf 1f is left out: Linux then asks for b, which says the same.
fn is_extended_topology(entry: &kvm_cpuid_entry2) -> bool {
    matches!(entry.function, 0xb | 0x1f)
}

fn limit(entry: &mut kvm_cpuid_entry2, place: Place) {
    let others = place.cpus.saturating_sub(1);
    match entry.function {
        0x1 => limit_features(entry, place),
        0x7 => match entry.index {
            0 => {
                entry.ebx &= !(SGX | PROCESSOR_TRACE);
                entry.ecx &= !(SHADOW_STACKS | SGX_LAUNCH_CONTROL);
                entry.edx &= !(BRANCH_TRACKING | LAST_BRANCH_RECORDS);
            }
            1 => entry.eax &= !FRED,
            _ => {}
        },
        0xd => match entry.index {
            0 => {}
            1 => entry.ecx &= !HIDDEN_COMPONENTS,
            component if component < 32 && HIDDEN_COMPONENTS >> component & 1 != 0 => clear(entry),
            _ => {}
        },
        // Enclaves, processor trace.
        0x12 | 0x14 => clear(entry),
        // Caches: the last level is shared by all.
        0x4 | 0x8000_001d if entry.eax & 0x1f != 0 => {
            let last = (entry.eax >> 5) & 7 >= 3;
            let sharing = if last { others.min(0xfff) } else { 0 };
            entry.eax = entry.eax & !(0xfff << 14) | sharing << 14;
            if entry.function == 0x4 {
                entry.eax = entry.eax & !(0x3f << 26) | others.min(0x3f) << 26;
            }
        }
        // Performance counters: their interrupt needs KVM's own local APIC.
        0xa => clear(entry),
        0x4000_0001 => {
            entry.eax &= PARAVIRTUAL_FEATURES;
            entry.edx = 0;
        }
        0x8000_0001 => {
            entry.ecx &= !(SVM | PERFORMANCE_COUNTERS);
            if place.cpus > 1 {
                entry.ecx |= COMPATIBILITY_LEGACY;
            }
        }
        // Cores less one, and the bits of an APIC identifier within the package.
        0x8000_0008 => entry.ecx = others.min(0xff) | id_bits(place) << 12,
        0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (place.apic_id, place.apic_id & 0xff, 0),
        _ => {}
    }
}

fn clear(entry: &mut kvm_cpuid_entry2) {
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
}

fn limit_features(entry: &mut kvm_cpuid_entry2, place: Place) {
    entry.ebx = entry.ebx & 0xffff | place.cpus.min(0xff) << 16 | (place.apic_id & 0xff) << 24;
    entry.ecx &= !(VMX | X2APIC);
    entry.ecx |= TSC_DEADLINE | HYPERVISOR;
    if place.emulated {
        entry.ecx &= !(CMPXCHG16B | PCID);
    }
    if place.cpus > 1 {
        entry.edx |= HYPER_THREADING;
    }
}

/// Leaf b: threads in a core (level type 1), then logical processors in the
/// package (2), each with the identifier's bits below the next level.
fn extended_topology(place: Place) -> [kvm_cpuid_entry2; 3] {
    let level = |index, bits, processors, kind: u32| kvm_cpuid_entry2 {
        function: 0xb,
        index,
        flags: kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: bits,
        ebx: processors,
        ecx: index | kind << 8,
        edx: place.apic_id,
        ..Default::default()
    };
    [
        level(0, 0, 1, 1),
        level(1, id_bits(place), place.cpus, 2),
        level(2, 0, 0, 0),
    ]
}

/// Bits that number the machine's CPUs.
fn id_bits(place: Place) -> u32 {
    place.cpus.max(1).next_power_of_two().trailing_zeros()
}

/// Where each XSAVE component lies in the standard format, from leaf d: offset
/// and size by component, zero where there is none.
pub(super) fn extended_state(supported: &CpuId) -> [(u32, u32, bool); 64] {
    let mut components = [(0, 0, false); 64];
    for entry in supported.as_slice() {
        let user_component = entry.function == 0xd && entry.index >= 2 && entry.ecx & 1 == 0;
        if let (true, Some(component)) = (user_component, components.get_mut(entry.index as usize))
        {
            *component = (entry.ebx, entry.eax, entry.ecx & 2 != 0);
        }
    }
    components
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = registers;
        kvm_cpuid_entry2 {
            function,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }

    fn shown(function: u32, registers: [u32; 4], place: Place) -> kvm_cpuid_entry2 {
        let supported = CpuId::from_entries(&[leaf(function, registers)]).unwrap();
        let cpuid = for_vcpu(&supported, place).unwrap();
        cpuid.as_slice()[0]
    }

    const SECOND_OF_FOUR: Place = Place {
        apic_id: 1,
        cpus: 4,
        emulated: false,
    };

    #[test]
    fn a_cpu_knows_its_number_and_has_no_x2apic() {
        let one = shown(1, [7, 0x0304_0800, u32::MAX, 0], SECOND_OF_FOUR);
        assert_eq!(one.ebx, 0x0104_0800);
        assert_eq!(one.ecx & (X2APIC | VMX), 0);
        assert_eq!(
            one.ecx & (TSC_DEADLINE | HYPERVISOR),
            TSC_DEADLINE | HYPERVISOR
        );
        assert_ne!(one.ecx & CMPXCHG16B, 0);
        assert_ne!(one.edx & HYPER_THREADING, 0);
        let emulated = Place {
            emulated: true,
            cpus: 1,
            ..SECOND_OF_FOUR
        };
        let one = shown(1, [7, 0, u32::MAX, 0], emulated);
        assert_eq!(one.ecx & (CMPXCHG16B | PCID), 0);
        assert_eq!(one.edx, 0);
    }

    #[test]
    fn what_is_not_saved_is_not_shown() {
        let features = shown(7, [0, u32::MAX, u32::MAX, u32::MAX], SECOND_OF_FOUR);
        assert_eq!(features.ebx, !(1 << 2 | 1 << 25));
        assert_eq!(features.ecx, !(1 << 7 | 1 << 30));
        assert_eq!(features.edx, !(1 << 19 | 1 << 20));
        let subleaf = |function, index| {
            let entry = kvm_cpuid_entry2 {
                index,
                ..leaf(function, [u32::MAX; 4])
            };
            let supported = CpuId::from_entries(&[entry]).unwrap();
            for_vcpu(&supported, SECOND_OF_FOUR).unwrap().as_slice()[0]
        };
        assert_eq!(subleaf(7, 1).eax, !(1 << 17));
        assert_eq!(subleaf(0xd, 1).ecx, !(1 << 8 | 1 << 11 | 1 << 12));
        for (index, expected) in [(2, u32::MAX), (8, 0), (11, 0), (12, 0), (40, u32::MAX)] {
            assert_eq!(subleaf(0xd, index).eax, expected);
        }
        assert_eq!(subleaf(0x14, 0).ebx, 0);
    }

    #[test]
    fn the_only_paravirtual_feature_is_the_clock() {
        let features = shown(0x4000_0001, [u32::MAX, 0, 0, 1], SECOND_OF_FOUR);
        assert_eq!((features.eax, features.edx), (0x0100_0009, 0));
    }

    #[test]
    fn the_package_has_all_cpus_as_cores() {
        let supported = CpuId::from_entries(&[leaf(0xb, [1; 4])]).unwrap();
        let place = Place {
            cpus: 3,
            ..SECOND_OF_FOUR
        };
        let cpuid = for_vcpu(&supported, place).unwrap();
        let levels: Vec<_> = cpuid
            .as_slice()
            .iter()
            .map(|entry| (entry.index, entry.eax, entry.ebx, entry.ecx, entry.edx))
            .collect();
        assert_eq!(
            levels,
            [(0, 0, 1, 0x100, 1), (1, 2, 3, 0x201, 1), (2, 0, 0, 2, 1)]
        );
        assert_eq!(shown(0x8000_0008, [0; 4], place).ecx, 0x2002);
        // The third level cache is everybody's, the second one's own.
        assert_eq!(
            shown(0x8000_001d, [0xc163, 0, 0, 0], place).eax >> 14 & 0xfff,
            2
        );
        assert_eq!(
            shown(0x8000_001d, [0xc143, 0, 0, 0], place).eax >> 14 & 0xfff,
            0
        );
    }
}
