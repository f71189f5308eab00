//! The configuration of a machine, and its validation.

use std::ops::Range;
use std::path::PathBuf;

use super::MachineError;
use crate::vcpu::following::Follow;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft_aggregate::devices::{DeviceList, Disk, Network, OpenDisks};
use weft_aggregate::{CPUS_MAX, Placement, PlacementError, Share};
use weft_boot::{Protocol, UPDATED_RANGES_MAX};
use weft_vcpu::{CpuModel, PAGE_SIZE};

/// The choice of a back end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackEndChoice {
    /// KVM with hardware virtualisation if the host has it, otherwise software.
    #[default]
    Auto,
    /// KVM, also without hardware virtualisation.
    Kvm,
    /// The software vCPU.
    Soft,
}

/// What a machine consists of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Configuration {
    /// vCPUs of all slices together.
    pub cpus: u32,
    /// Guest RAM of all slices together, in bytes.
    pub memory_bytes: u64,
    /// The part of each slice; empty if the machine has one slice and never gets another. One
    /// slice with everything has a controller, and others may join it.
    #[serde(default)]
    pub slices: Vec<Share>,
    /// Bytes that each slice may fill with pages of other slices' parts of RAM; `None`: the
    /// default of [`Placement::budget_bytes`].
    #[serde(default)]
    pub spare_bytes: Option<u64>,
    /// The back end of the vCPUs.
    #[serde(default)]
    pub back_end: BackEndChoice,
    /// The CPU model that the guest sees; `None`: [`CpuModel::default`] on the software vCPU,
    /// and all features that KVM offers on KVM.
    #[serde(default)]
    pub cpu_model: Option<CpuModel>,
    /// Guest time is the instruction count: a run repeats exactly. `soft` only.
    #[serde(default)]
    pub deterministic: bool,
    /// Kernel image: vmlinux, bzImage, PVH or Multiboot ELF.
    pub kernel: PathBuf,
    /// Initial RAM file system.
    #[serde(default)]
    pub initrd: Option<PathBuf>,
    /// Forces a boot protocol; `None`: the best one is chosen.
    #[serde(default)]
    pub boot_protocol: Option<Protocol>,
    /// The kernel's command line, to which Weft's parameters are appended.
    #[serde(default)]
    pub command_line: String,
    /// Disks, in the order in which the guest finds them.
    #[serde(default)]
    pub disks: Vec<Disk>,
    /// Network cards, in the same order.
    #[serde(default)]
    pub networks: Vec<Network>,
    /// Guest-physical addresses that one vCPU writes repeatedly and others read: slices that
    /// read these pages subscribe to them. The kernel's notes may list more.
    #[serde(default)]
    pub updated: Vec<Range<u64>>,
    /// Whether Linux brings up only the vCPUs of the primary, and the guest's init the others
    /// after the boot, whose pages need not be shared then. `None`: if the initrd is marked
    /// for it.
    #[serde(default)]
    pub late_cpus: Option<bool>,
    /// Whether vCPUs go by themselves where their remote faults go.
    #[serde(default)]
    pub follow: Follow,
    /// Whether pages that vCPUs fetch from nodes without vCPUs are exchanged for pages that were
    /// not used lately.
    #[serde(default = "yes")]
    pub exchanges: bool,
    /// A virtio console (hvc0) beside the serial port.
    #[serde(default)]
    pub virtio_console: bool,
    /// A balloon, by which the guest gives memory back to the host.
    #[serde(default)]
    pub balloon: bool,
    /// Whether a write to port 0xf4 ends the machine with an exit code.
    #[serde(default)]
    pub debug_exit: bool,
    /// Whether faults that need another slice are recorded from the start.
    #[serde(default)]
    pub trace: bool,
}

/// A configuration of before there were exchanges has them.
fn yes() -> bool {
    true
}

/// Why a configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Invalid {
    /// No vCPU, or more than an xAPIC can address.
    #[error("{0} vCPUs: the number must be 1 to {CPUS_MAX}")]
    Cpus(u32),
    /// A size that [`weft_guest_memory::Ram::new`] refuses.
    #[error("memory of {0} bytes: it must be a multiple of 4096, and at least 4 MiB")]
    Memory(u64),
    /// Only the software vCPU counts instructions.
    #[error("a deterministic run needs the soft back end")]
    Deterministic,
    /// Several forwards of one host port.
    #[error("host port {0} is forwarded twice")]
    Forward(u16),
    /// Too many ranges to subscribe to.
    #[error("{0} ranges of pages with updates: the maximum is {UPDATED_RANGES_MAX}")]
    Updated(usize),
    /// Invalid addresses.
    #[error("{:#x}-{:#x}: the end of a range must be above its start", .0.start, .0.end)]
    UpdatedRange(Range<u64>),
    /// An impossible placement.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The slices' parts do not add up to the machine.
    #[error(
        "the slices have {cpus} vCPUs and {memory_bytes} bytes of memory together: the machine \
        must have the same"
    )]
    Shares {
        /// vCPUs of all slices.
        cpus: u32,
        /// RAM of all slices.
        memory_bytes: u64,
    },
    /// Less spare memory than the vCPUs need at once.
    #[error(
        "each slice may keep {bytes} bytes of the others' memory, but needs at least {least} \
        for its vCPUs"
    )]
    Spare {
        /// The requested bytes.
        bytes: u64,
        /// The minimum in bytes.
        least: u64,
    },
    /// A device on a slice that does not exist.
    #[error("{device} {number} is on slice {slice}, but there are {slices}, counted from 0")]
    Slice {
        /// `disk` or `network`.
        device: &'static str,
        /// The device's number, from 0.
        number: usize,
        /// The slice of the device.
        slice: u32,
        /// Slices of the machine.
        slices: usize,
    },
}

impl Configuration {
    /// A machine with one vCPU and only a serial port.
    pub fn new(kernel: PathBuf, memory_bytes: u64) -> Self {
        Self {
            cpus: 1,
            memory_bytes,
            slices: Vec::new(),
            spare_bytes: None,
            back_end: BackEndChoice::Auto,
            cpu_model: None,
            deterministic: false,
            kernel,
            initrd: None,
            boot_protocol: None,
            command_line: String::new(),
            disks: Vec::new(),
            networks: Vec::new(),
            updated: Vec::new(),
            late_cpus: None,
            follow: Follow::Never,
            exchanges: true,
            virtio_console: false,
            balloon: false,
            debug_exit: false,
            trace: false,
        }
    }

    /// The placement of vCPUs, memory and devices, before [`Self::validate`] has checked it.
    pub fn placement(&self) -> Placement {
        if self.slices.is_empty() {
            return Placement::whole(self.cpus, self.memory_bytes);
        }
        Placement::unchecked(self.slices.clone())
    }

    /// The disks and networks.
    pub fn devices(&self) -> DeviceList<'_> {
        DeviceList {
            cpus: self.cpus,
            disks: &self.disks,
            networks: &self.networks,
        }
    }

    /// What the guest is booted from: the kernel, and the initrd, if it has one.
    pub fn boot_files(&self) -> Vec<PathBuf> {
        let kernel = [self.kernel.clone()].into_iter();
        kernel.chain(self.initrd.clone()).collect()
    }

    /// Opens the disks of a slice in the same way as its machine does, so that a disk that
    /// cannot be opened is reported before anything runs.
    ///
    /// # Errors
    /// The first disk that cannot be opened.
    pub fn try_disks(&self, slice: usize, opened: &OpenDisks) -> Result<(), MachineError> {
        Ok(self.devices().try_disks(slice, opened)?)
    }

    /// Checks the configuration, before anything is opened.
    pub fn validate(&self) -> Result<(), Invalid> {
        if self.cpus == 0 || self.cpus > CPUS_MAX {
            return Err(Invalid::Cpus(self.cpus));
        }
        if self.memory_bytes < 4 << 20 || !self.memory_bytes.is_multiple_of(PAGE_SIZE) {
            return Err(Invalid::Memory(self.memory_bytes));
        }
        if self.deterministic && self.back_end == BackEndChoice::Kvm {
            return Err(Invalid::Deterministic);
        }
        self.check_slices()?;
        self.check_updated()?;
        let mut ports = std::collections::BTreeSet::new();
        for network in &self.networks {
            let Network::User { forwards, .. } = network else {
                continue;
            };
            for forward in forwards {
                if !ports.insert(forward.host_port) {
                    return Err(Invalid::Forward(forward.host_port));
                }
            }
        }
        Ok(())
    }

    /// Checks the ranges to subscribe to.
    fn check_updated(&self) -> Result<(), Invalid> {
        if let Some(range) = self.updated.iter().find(|range| range.is_empty()) {
            return Err(Invalid::UpdatedRange(range.clone()));
        }
        let ranges = self.updated.len();
        if ranges > UPDATED_RANGES_MAX {
            return Err(Invalid::Updated(ranges));
        }
        Ok(())
    }

    /// Checks that the slices make up the machine, and that every device is on one of them.
    fn check_slices(&self) -> Result<(), Invalid> {
        if !self.slices.is_empty() {
            let placement = Placement::new(self.slices.clone())?;
            let (cpus, memory_bytes) = (placement.cpus(), placement.memory_bytes());
            if (cpus, memory_bytes) != (self.cpus, self.memory_bytes) {
                return Err(Invalid::Shares { cpus, memory_bytes });
            }
            let least = placement.spare_bytes_min();
            if let Some(bytes) = self.spare_bytes.filter(|bytes| *bytes < least) {
                return Err(Invalid::Spare { bytes, least });
            }
        }
        let slices = self.slices.len().max(1);
        let disks = self.disks.iter().map(|disk| disk.slice);
        let networks = self.networks.iter().map(Network::slice);
        let named = (disks.enumerate().map(|disk| ("disk", disk)))
            .chain(networks.enumerate().map(|network| ("network", network)));
        for (device, (number, slice)) in named {
            if slice as usize >= slices {
                return Err(Invalid::Slice {
                    device,
                    number,
                    slice,
                    slices,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use weft_aggregate::devices::{DataPath, Forward};

    use super::*;

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let good = Configuration::new("vmlinux".into(), 64 << 20);
        assert_eq!(good.validate(), Ok(()));
        let with = |change: &dyn Fn(&mut Configuration)| {
            let mut changed = good.clone();
            change(&mut changed);
            changed.validate()
        };
        assert_eq!(with(&|c| c.cpus = 0), Err(Invalid::Cpus(0)));
        assert_eq!(with(&|c| c.cpus = 256), Err(Invalid::Cpus(256)));
        assert_eq!(with(&|c| c.memory_bytes = 4097), Err(Invalid::Memory(4097)));
        let deterministic_kvm = |c: &mut Configuration| {
            c.deterministic = true;
            c.back_end = BackEndChoice::Kvm;
        };
        assert_eq!(with(&deterministic_kvm), Err(Invalid::Deterministic));
        let twice = |c: &mut Configuration| {
            let forward = Forward {
                host_port: 2222,
                guest_port: 22,
            };
            c.networks = vec![Network::User {
                forwards: vec![forward, forward],
                reaches_host: false,
                slice: 0,
                data_path: DataPath::default(),
            }];
        };
        assert_eq!(with(&twice), Err(Invalid::Forward(2222)));
        let empty = |c: &mut Configuration| c.updated = vec![5..8, 4096..4096];
        assert_eq!(with(&empty), Err(Invalid::UpdatedRange(4096..4096)));
        let many = |c: &mut Configuration| c.updated = vec![0..1; 65];
        assert_eq!(with(&many), Err(Invalid::Updated(65)));
        assert_eq!(with(&|c| c.updated.push(0..64 << 20)), Ok(()));
    }

    #[test]
    fn slices_make_up_the_machine_and_have_its_devices() {
        let mut machine = Configuration::new("vmlinux".into(), 160 << 20);
        machine.cpus = 3;
        assert_eq!(machine.placement(), Placement::whole(3, 160 << 20));
        let dealt = Placement::deal(2, 3, 160 << 20).unwrap();
        machine.slices = dealt.shares().to_vec();
        assert_eq!(machine.validate(), Ok(()));
        assert_eq!(machine.placement(), dealt);
        machine.cpus = 4;
        let (cpus, memory_bytes) = (3, 160 << 20);
        assert_eq!(
            machine.validate(),
            Err(Invalid::Shares { cpus, memory_bytes })
        );
        machine.cpus = 3;
        let least = machine.placement().spare_bytes_min();
        let bytes = least - 1;
        machine.spare_bytes = Some(bytes);
        assert_eq!(machine.validate(), Err(Invalid::Spare { bytes, least }));
        machine.spare_bytes = Some(least);
        machine.slices[0].cpus = 0;
        let no_start = Invalid::Placement(PlacementError::PrimaryCpus);
        assert_eq!(machine.validate(), Err(no_start));
        machine.spare_bytes = None;
        machine.slices = Placement::whole(3, 160 << 20).shares().to_vec();
        assert_eq!(machine.validate(), Ok(()));
        machine.slices = dealt.shares().to_vec();
        machine.networks = vec![Network::Tap {
            name: "t".into(),
            slice: 1,
            data_path: DataPath::default(),
        }];
        assert_eq!(machine.validate(), Ok(()));
        machine.slices.clear();
        let error = machine.validate().unwrap_err().to_string();
        assert_eq!(
            error,
            "network 0 is on slice 1, but there are 1, counted from 0"
        );
    }
}
