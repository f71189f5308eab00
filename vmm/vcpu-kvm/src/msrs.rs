//! Which model-specific registers are a vCPU's state, and which are the machine's.

use kvm_bindings::{KVM_MSR_EXIT_REASON_FILTER, Msrs, kvm_enable_cap, kvm_msr_entry};
use kvm_ioctls::{
    Cap, Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuFd, VmFd,
};
use weft_vcpu::VcpuError;

use super::{KvmError, failed};

/// LSTAR: where SYSCALL goes.
pub(super) const LSTAR: u32 = 0xc000_0082;

/// AMD's HWCR, and its bit that says that the TSC counts at a constant frequency
/// whatever the processor's does: Linux warns where it is clear.
const HARDWARE_CONFIGURATION: u32 = 0xc001_0015;
const TSC_FREQUENCY_SELECTED: u64 = 1 << 24;

/// Saved and restored, where KVM has them: names in the Intel SDM, volume 4. What
/// has others that are not here is hidden from the guest (`cpuid`).
const STATE: [u32; 22] = [
    0x48,        // SPEC_CTRL
    0xe1,        // UMWAIT_CONTROL
    0x122,       // TSX_CTRL
    0x140,       // MISC_FEATURES_ENABLES
    0x174,       // SYSENTER_CS
    0x175,       // SYSENTER_ESP
    0x176,       // SYSENTER_EIP
    0x17a,       // MCG_STATUS
    0x1a0,       // MISC_ENABLE
    0x1c4,       // XFD
    0x1c5,       // XFD_ERR
    0x277,       // PAT
    0xd90,       // BNDCFGS
    0xda0,       // XSS
    0xc000_0081, // STAR
    LSTAR,
    0xc000_0083, // CSTAR
    0xc000_0084, // SFMASK
    0xc000_0102, // KERNEL_GS_BASE
    0xc000_0103, // TSC_AUX
    HARDWARE_CONFIGURATION,
    0xc001_011f, // VIRT_SPEC_CTRL
];

/// Memory types, which are state too: KVM does not list them, though each has
/// them. The variable ranges, the fixed ones, the default.
const MEMORY_TYPES: [std::ops::RangeInclusive<u32>; 5] = [
    0x200..=0x20f,
    0x250..=0x250,
    0x258..=0x259,
    0x268..=0x26f,
    0x2ff..=0x2ff,
];

/// The TSC: asked of the environment when it is written, as the machine's.
const TSC: u32 = 0x10;

/// The machine's, in ranges of first and count: asked of the environment.
const MACHINE: [(u32, u32); 5] = [
    (0x11, 2),        // the paravirtual clock at its first numbers
    (0x1b, 1),        // APIC_BASE
    (0x3b, 1),        // TSC_ADJUST
    (0x6e0, 1),       // TSC_DEADLINE
    (0x4b56_4d00, 2), // the paravirtual clock
];

/// Makes accesses to the machine's registers exits; with `lstar` its writes too.
pub(super) fn set_filter(vm: &VmFd, lstar: bool) -> Result<(), KvmError> {
    let to_user_space = kvm_enable_cap {
        cap: Cap::X86UserSpaceMsr as u32,
        args: [u64::from(KVM_MSR_EXIT_REASON_FILTER), 0, 0, 0],
        ..Default::default()
    };
    vm.enable_cap(&to_user_space)
        .map_err(|error| KvmError::call("KVM_CAP_X86_USER_SPACE_MSR", error))?;
    // A clear bit is an exit.
    let none_allowed = [0; 1];
    let both = MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE;
    let mut ranges: Vec<MsrFilterRange> = MACHINE
        .iter()
        .map(|(base, msr_count)| MsrFilterRange {
            flags: both,
            base: *base,
            msr_count: *msr_count,
            bitmap: &none_allowed,
        })
        .collect();
    let written = [Some(TSC), lstar.then_some(LSTAR)];
    ranges.extend(written.into_iter().flatten().map(|base| MsrFilterRange {
        flags: MsrFilterRangeFlags::WRITE,
        base,
        msr_count: 1,
        bitmap: &none_allowed,
    }));
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &ranges)
        .map_err(|error| KvmError::call("KVM_X86_SET_MSR_FILTER", error))
}

/// Those of `STATE` that this KVM has.
pub(super) fn of_state(kvm: &Kvm) -> Result<Vec<u32>, KvmError> {
    let list = kvm
        .get_msr_index_list()
        .map_err(|error| KvmError::call("KVM_GET_MSR_INDEX_LIST", error))?;
    let known = list.as_slice();
    Ok(STATE
        .into_iter()
        .filter(|index| known.contains(index))
        .chain(MEMORY_TYPES.into_iter().flatten())
        .collect())
}

/// The values of those of `indices` that the vCPU has.
pub(super) fn read(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<(u32, u64)>, VcpuError> {
    let mut values = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let mut msrs = batch(rest.iter().map(|index| (*index, 0)))?;
        // It stops at the first that the vCPU lacks.
        let done = vcpu.get_msrs(&mut msrs).map_err(failed("KVM_GET_MSRS"))?;
        let read = msrs.as_slice().iter().take(done);
        values.extend(read.map(|entry| (entry.index, entry.data)));
        rest = rest.get(done + 1..).unwrap_or_default();
    }
    Ok(values)
}

/// Sets them; the first that the vCPU refuses to be other than zero is an error.
pub(super) fn write(vcpu: &VcpuFd, values: &[(u32, u64)]) -> Result<(), VcpuError> {
    let mut rest = values;
    while !rest.is_empty() {
        let msrs = batch(rest.iter().copied())?;
        let done = vcpu.set_msrs(&msrs).map_err(failed("KVM_SET_MSRS"))?;
        if let Some((index, value)) = rest.get(done)
            && *value != 0
        {
            return Err(super::unsupported(format!(
                "MSR {index:#x} cannot be {value:#x}"
            )));
        }
        rest = rest.get(done + 1..).unwrap_or_default();
    }
    Ok(())
}

/// What a vCPU has after reset.
pub(super) fn reset(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<(u32, u64)>, VcpuError> {
    if indices.contains(&HARDWARE_CONFIGURATION) {
        let msrs = batch([(HARDWARE_CONFIGURATION, TSC_FREQUENCY_SELECTED)].into_iter())?;
        // An older KVM does not take it: its guests see the warning.
        let _ = vcpu.set_msrs(&msrs);
    }
    read(vcpu, indices)
}

fn batch(values: impl Iterator<Item = (u32, u64)>) -> Result<Msrs, VcpuError> {
    let entries: Vec<kvm_msr_entry> = values
        .map(|(index, data)| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        })
        .collect();
    Msrs::from_entries(&entries).map_err(|error| VcpuError::Kernel {
        what: "a list of MSRs",
        source: std::io::Error::other(format!("{error:?}")),
    })
}
