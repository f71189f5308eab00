//! What of KVM's CPUID a guest of a [`CpuModel`] is shown (Intel SDM volume 2, CPUID;
//! AMD APM volume 3, appendix E): the model's own instructions, and what only kernels
//! use.

use kvm_bindings::kvm_cpuid_entry2;
use weft_vcpu::CpuModel;

/// Leaf 1, ECX: CMPXCHG16B, PCID, TSC deadline timer, hypervisor.
const LEAF_1_ECX: u32 = CMPXCHG16B | 1 << 17 | 1 << 24 | 1 << 31;
const CMPXCHG16B: u32 = 1 << 13;
const XSAVE: u32 = 1 << 26;
/// Leaf 7, EBX: FSGSBASE, TSC_ADJUST, SMEP, ERMS, INVPCID, SMAP.
const LEAF_7_EBX: u32 = 1 | 1 << 1 | 1 << 7 | 1 << 9 | 1 << 10 | 1 << 20;
/// Leaf 7, ECX: UMIP.
const LEAF_7_ECX: u32 = 1 << 2;
/// Leaf 7, EDX: fast short REP MOVSB, and what mitigations of speculation need.
const LEAF_7_EDX: u32 = 1 << 4 | 1 << 10 | 1 << 26 | 1 << 27 | 1 << 28 | 1 << 29 | 1 << 31;
/// Leaf 8000_0001, ECX, that not every model has: LZCNT, SSE4A, misaligned SSE, XOP, FMA4,
/// TBM, MONITORX.
const EXTENSIONS: u32 = 1 << 5 | 1 << 6 | 1 << 7 | 1 << 11 | 1 << 16 | 1 << 21 | 1 << 29;

/// Takes away what the model does not have.
pub(super) fn limit(entry: &mut kvm_cpuid_entry2, model: CpuModel) {
    match (entry.function, entry.index) {
        (0x1, _) => entry.ecx &= LEAF_1_ECX | model.bits().leaf_1_ecx,
        (0xd, 0..=2) if has_xsave(model) => limit_xsave(entry),
        (0x7, 0) => {
            entry.eax = 0;
            entry.ebx &= LEAF_7_EBX | model.bits().leaf_7_ebx;
            entry.ecx &= LEAF_7_ECX;
            entry.edx &= LEAF_7_EDX;
        }
        // More of leaf 7, XSAVE, key locker, AMX, AVX10.
        (0x7 | 0xd | 0x19 | 0x1d | 0x1e | 0x24, _) => {
            (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
        }
        (0x8000_0001, _) => entry.ecx &= !EXTENSIONS | model.bits().extended_ecx,
        _ => {}
    }
}

fn has_xsave(model: CpuModel) -> bool {
    model.bits().leaf_1_ecx & XSAVE != 0
}

/// Leaf d: x87, SSE and AVX in the standard format. What is enabled KVM fills in.
fn limit_xsave(entry: &mut kvm_cpuid_entry2) {
    const COMPONENTS: u32 = 7;
    const AREA_BYTES: u32 = 832;
    /// XSAVEOPT, XSAVEC, XGETBV of what is in use; not XSAVES.
    const WAYS: u32 = 7;
    match entry.index {
        0 => (entry.eax, entry.ecx, entry.edx) = (entry.eax & COMPONENTS, AREA_BYTES, 0),
        1 => (entry.eax, entry.ecx, entry.edx) = (entry.eax & WAYS, 0, 0),
        _ => {}
    }
}

/// The bits of leaf 1, ECX, that the model needs and a vCPU would not have.
pub(super) fn missing(shown: &[kvm_cpuid_entry2], model: CpuModel) -> u32 {
    let needed = model.bits().leaf_1_ecx | CMPXCHG16B;
    let leaf = shown.iter().find(|entry| entry.function == 1);
    needed & !leaf.map_or(0, |entry| entry.ecx)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            index,
            eax: u32::MAX,
            ebx: u32::MAX,
            ecx: u32::MAX,
            edx: u32::MAX,
            ..Default::default()
        }
    }

    #[test]
    fn a_model_has_its_own_instructions_and_no_others() {
        for model in CpuModel::ALL {
            let mut one = all(1, 0);
            limit(&mut one, model);
            assert_eq!(missing(&[one], model), 0);
            // FMA, MOVBE, XSAVE, AVX, F16C; RDRAND.
            let later = 1 << 12 | 1 << 22 | 1 << 26 | 1 << 28 | 1 << 29;
            let has_later = if model >= CpuModel::V3 { later } else { 0 };
            assert_eq!(one.ecx & (later | 1 << 30), has_later, "{model}");
            assert_eq!(one.ecx >> 20 & 1 != 0, model >= CpuModel::V2);
            let mut state = all(0xd, 0);
            limit(&mut state, model);
            let components = if model >= CpuModel::V3 { 7 } else { 0 };
            assert_eq!((state.eax, state.edx), (components, 0), "{model}");
            for (function, index) in [(7, 1), (0xd, 5), (0xd, 9), (0x1d, 0)] {
                let mut more = all(function, index);
                limit(&mut more, model);
                assert_eq!((more.eax, more.ebx, more.ecx, more.edx), (0, 0, 0, 0));
            }
            let mut extended = all(0x8000_0001, 0);
            limit(&mut extended, model);
            let counts = u32::from(model >= CpuModel::V3);
            assert_eq!(extended.ecx & (1 << 5 | 1), counts << 5 | 1);
        }
    }

    #[test]
    fn what_kvm_lacks_is_found() {
        let mut one = all(1, 0);
        one.ecx &= !(1 << 20 | 1 << 13);
        assert_eq!(missing(&[one], CpuModel::V2), 1 << 20 | 1 << 13);
        assert_eq!(missing(&[one], CpuModel::V1), 1 << 13);
        assert_eq!(missing(&[], CpuModel::V1), 1 << 13);
    }
}
