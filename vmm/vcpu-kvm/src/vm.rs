//! The virtual machine: memory, filters, and what its vCPUs have in common.

use std::sync::Arc;

use kvm_bindings::{CpuId, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, VmFd};
use weft_guest_memory::Ram;
use weft_vcpu::{BackEnd, CpuModel, Memory, Vcpu, VcpuError};

use super::cpuid::{self, Place};
use super::detect::{Host, Paging};
use super::quirks::{self, Quirks};
use super::shadows::ShadowGate;
use super::shared::Shared;
use super::vcpu::KvmVcpu;
use super::{KvmError, calls, model, msrs};

/// Three pages for Intel's real mode, below the last megabyte of 32-bit
/// addresses and no device's; the page of its identity map is the one before.
const TASK_STATE: usize = 0xfffb_d000;
const IDENTITY_MAP: u64 = 0xfffb_c000;

/// What a machine in KVM is made of.
pub struct KvmOptions<'a> {
    /// Its memory, as vCPUs use it.
    pub ram: &'a Ram,
    /// vCPUs of the machine, wherever they are.
    pub cpus: u32,
    /// vCPUs of one package, as CPUID tells it.
    pub package_cpus: u32,
    /// What they show at most; none: all that KVM offers.
    pub model: Option<CpuModel>,
    /// Others change the memory where KVM does not see it, and say so to the
    /// [`ShadowGate`]: see there. Only of meaning where KVM keeps shadows; the memory
    /// must have marks then.
    pub shared: bool,
}

/// Makes the vCPUs of one machine in KVM.
pub struct KvmBackEnd {
    shared: Arc<Shared>,
    /// Needed on a KVM without hardware virtualisation.
    quirks: Option<Arc<Quirks>>,
    cpuid: CpuId,
    package_cpus: u32,
    tsc_hz: u64,
}

impl KvmBackEnd {
    /// A machine with this memory, for this many vCPUs.
    pub fn new(host: &Host, ram: &Ram, cpus: u32) -> Result<Self, KvmError> {
        Self::of(
            host,
            &KvmOptions {
                ram,
                cpus,
                package_cpus: cpus,
                model: None,
                shared: false,
            },
        )
    }

    /// A machine, or a slice of one.
    pub fn of(host: &Host, options: &KvmOptions<'_>) -> Result<Self, KvmError> {
        let KvmOptions { ram, cpus, .. } = *options;
        let possible = host.kvm.get_max_vcpus();
        if cpus as usize > possible {
            return Err(KvmError::Vcpus {
                wanted: cpus,
                possible,
            });
        }
        let vm = host
            .kvm
            .create_vm()
            .map_err(|error| KvmError::call("KVM_CREATE_VM", error))?;
        let mut cpuid = cpuid::supported(&host.kvm)?;
        let quirks = (!host.is_hardware()).then(|| Quirks::new(cpuid::extended_state(&cpuid)));
        vm.set_identity_map_address(IDENTITY_MAP)
            .map_err(|error| KvmError::call("KVM_SET_IDENTITY_MAP_ADDR", error))?;
        vm.set_tss_address(TASK_STATE)
            .map_err(|error| KvmError::call("KVM_SET_TSS_ADDR", error))?;
        set_memory(&vm, ram)?;
        msrs::set_filter(&vm, quirks.is_some())?;
        let (tsc_hz, fixed_tsc_offset) = tsc_properties(host)?;
        let gate = match ram.marks() {
            Some(marks) if options.shared && host.paging == Paging::Shadow => {
                Some(ShadowGate::new(&vm, marks.clone(), ram.end())?)
            }
            _ => None,
        };
        if let Some(model) = options.model {
            let entries = cpuid.as_mut_slice();
            entries
                .iter_mut()
                .for_each(|entry| model::limit(entry, model));
        }
        let shared = Shared {
            fixed_tsc_offset,
            xsave_bytes: usize::try_from(vm.check_extension_int(Cap::Xsave2)).unwrap_or(0),
            state_msrs: msrs::of_state(&host.kvm)?,
            ram: ram.clone(),
            gate,
            vm,
        };
        Self {
            tsc_hz,
            shared: Arc::new(shared),
            quirks: quirks.map(Arc::new),
            cpuid,
            package_cpus: options.package_cpus,
        }
        .check(options.model)
    }

    /// What must hear of pages that are taken, where KVM keeps shadows.
    pub fn gate(&self) -> Option<&Arc<ShadowGate>> {
        self.shared.gate.as_ref()
    }

    /// The vCPU whose local APIC identifier is `id`, in its reset state.
    pub fn vcpu(&self, id: u32) -> Result<KvmVcpu, VcpuError> {
        let cpuid = self.cpuid_of(id)?;
        KvmVcpu::new(self.shared.clone(), self.quirks.clone(), id, &cpuid)
    }

    fn cpuid_of(&self, id: u32) -> Result<CpuId, KvmError> {
        let place = Place {
            apic_id: id,
            cpus: self.package_cpus,
            emulated: self.quirks.is_some(),
        };
        cpuid::for_vcpu(&self.cpuid, place)
    }

    /// Refuses a model that its vCPUs would fall short of.
    fn check(self, model: Option<CpuModel>) -> Result<Self, KvmError> {
        let Some(model) = model else {
            return Ok(self);
        };
        if self.quirks.is_some() {
            return Err(KvmError::ModelShown(model));
        }
        match model::missing(self.cpuid_of(0)?.as_slice(), model) {
            0 => Ok(self),
            missing => Err(KvmError::Model { model, missing }),
        }
    }
}

impl BackEnd for KvmBackEnd {
    fn name(&self) -> &'static str {
        "kvm"
    }

    fn tsc_hz(&self) -> u64 {
        self.tsc_hz
    }

    fn fixed_tsc_offset(&self) -> Option<u64> {
        self.shared.fixed_tsc_offset
    }

    fn command_line(&self) -> &'static [&'static str] {
        match &self.quirks {
            Some(_) => quirks::COMMAND_LINE,
            None => &[],
        }
    }

    fn quirks(&self) -> &'static [&'static str] {
        match &self.quirks {
            Some(_) => quirks::NAMES,
            None => &[],
        }
    }

    fn create(&self, id: u32) -> Result<Box<dyn Vcpu>, VcpuError> {
        Ok(Box::new(self.vcpu(id)?))
    }
}

fn set_memory(vm: &VmFd, ram: &Ram) -> Result<(), KvmError> {
    for (slot, (start, length, host)) in ram.parts().into_iter().enumerate() {
        let region = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: start,
            memory_size: length,
            userspace_addr: host as u64,
        };
        // SAFETY: the range is a mapping of `ram`, a clone of which lives as long
        // as the virtual machine and its vCPUs (`Shared`).
        unsafe { vm.set_user_memory_region(region) }
            .map_err(|error| KvmError::call("KVM_SET_USER_MEMORY_REGION", error))?;
    }
    Ok(())
}

/// What only a vCPU knows, so one is made for the question, in a machine of its
/// own: the TSC's frequency, and its offset where that stays as it is.
fn tsc_properties(host: &Host) -> Result<(u64, Option<u64>), KvmError> {
    let vm = host
        .kvm
        .create_vm()
        .map_err(|error| KvmError::call("KVM_CREATE_VM", error))?;
    let vcpu = vm
        .create_vcpu(0)
        .map_err(|error| KvmError::call("KVM_CREATE_VCPU", error))?;
    let khz = vcpu
        .get_tsc_khz()
        .map_err(|error| KvmError::call("KVM_GET_TSC_KHZ", error))?;
    let before = calls::tsc_offset(&vcpu)?;
    let wanted = before.wrapping_add(1 << 30);
    calls::set_tsc_offset(&vcpu, wanted)?;
    let now = calls::tsc_offset(&vcpu)?;
    Ok((u64::from(khz) * 1000, (now != wanted).then_some(now)))
}
