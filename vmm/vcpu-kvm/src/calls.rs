//! Calls on a vCPU that `kvm-ioctls` does not have on x86-64 (kernel document
//! virt/kvm/api, `include/uapi/linux/kvm.h`).

use std::io;

use kvm_bindings::{KVMIO, kvm_device_attr};
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::ioctl_iow_nr;

use super::KvmError;

/// `struct kvm_interrupt`.
#[repr(C)]
struct Interrupt {
    vector: u32,
}

ioctl_iow_nr!(KVM_INTERRUPT, KVMIO, 0x86, Interrupt);
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);
const _: () = assert!(size_of::<Interrupt>() == 4 && size_of::<kvm_device_attr>() == 24);

/// `KVM_VCPU_TSC_CTRL` and its `KVM_VCPU_TSC_OFFSET` (virt/kvm/devices/vcpu).
const TSC_CONTROL: u32 = 0;
const TSC_OFFSET: u64 = 0;

/// Makes the external interrupt the next thing that happens. Only when KVM said
/// that it is ready for one.
pub(super) fn inject(vcpu: &VcpuFd, vector: u8) -> Result<(), KvmError> {
    let interrupt = Interrupt {
        vector: vector.into(),
    };
    // SAFETY: the call reads the structure of its encoded size.
    let answer = unsafe { ioctl_with_ref(vcpu, KVM_INTERRUPT(), &interrupt) };
    check("KVM_INTERRUPT", answer)
}

/// Guest TSC minus host TSC.
pub(super) fn tsc_offset(vcpu: &VcpuFd) -> Result<u64, KvmError> {
    let mut offset = 0;
    let mut attribute = tsc_attribute(&mut offset);
    // SAFETY: the attribute is one word, and `addr` is a live variable of that size.
    let answer = unsafe { ioctl_with_mut_ref(vcpu, KVM_GET_DEVICE_ATTR(), &mut attribute) };
    check("reading KVM_VCPU_TSC_OFFSET", answer)?;
    Ok(offset)
}

/// Sets it. A KVM without hardware virtualisation takes it and changes nothing.
pub(super) fn set_tsc_offset(vcpu: &VcpuFd, mut offset: u64) -> Result<(), KvmError> {
    let attribute = tsc_attribute(&mut offset);
    // SAFETY: as above; the kernel only reads.
    let answer = unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attribute) };
    check("setting KVM_VCPU_TSC_OFFSET", answer)
}

fn tsc_attribute(value: &mut u64) -> kvm_device_attr {
    kvm_device_attr {
        group: TSC_CONTROL,
        attr: TSC_OFFSET,
        addr: std::ptr::from_mut(value) as u64,
        flags: 0,
    }
}

fn check(what: &'static str, answer: libc::c_int) -> Result<(), KvmError> {
    if answer == 0 {
        Ok(())
    } else {
        Err(KvmError::Call {
            what,
            source: io::Error::last_os_error(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calls_have_the_kernels_numbers() {
        assert_eq!(KVM_INTERRUPT(), 0x4004_ae86);
        assert_eq!(KVM_SET_DEVICE_ATTR(), 0x4018_aee1);
        assert_eq!(KVM_GET_DEVICE_ATTR(), 0x4018_aee2);
    }
}
