//! Which KVM this host has, if any, and which back end that makes the better one.

use std::ffi::{CStr, CString};
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use kvm_bindings::KVM_API_VERSION;
use kvm_ioctls::{Cap, Kvm};
use thiserror::Error;

/// Where KVM is reached.
pub const DEVICE: &str = "/dev/kvm";

/// Why KVM cannot be used.
#[derive(Debug, Error)]
pub enum Unusable {
    /// No such file.
    #[error("there is no {0}: the kernel has no KVM, or its module is not loaded")]
    Absent(PathBuf),
    /// It is there, but not for us.
    #[error("no permission to open {device}: it belongs to the group {group}")]
    Permission {
        /// Its path.
        device: PathBuf,
        /// Whose members may.
        group: String,
    },
    /// Anything else the kernel says.
    #[error("cannot open {device}")]
    Open {
        /// Its path.
        device: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It does not answer as KVM does.
    #[error("{0} is not a KVM")]
    NotKvm(PathBuf),
    /// It is too old: what it cannot do.
    #[error("this KVM lacks {0}")]
    Lacks(String),
}

/// What runs a guest's kernel mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Virtualization {
    /// The processor: VMX or SVM, used by this module.
    Hardware(String),
    /// KVM's instruction emulator; the module's name.
    Emulated(String),
}

/// How guest addresses are translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paging {
    /// The processor, in two levels (EPT, NPT): guest page tables are plain data.
    TwoLevel,
    /// KVM keeps shadows of the guest's page tables and finds changes by write
    /// protection, so a change that another node makes goes unseen.
    Shadow,
}

/// A KVM that is there and may be used.
pub struct Host {
    /// The open device.
    pub kvm: Kvm,
    /// What runs kernel mode.
    pub virtualization: Virtualization,
    /// How addresses are translated.
    pub paging: Paging,
}

impl Host {
    /// Opens and examines [`DEVICE`].
    pub fn open() -> Result<Self, Unusable> {
        Self::open_at(Path::new(DEVICE), Path::new("/sys/module"))
    }

    fn open_at(device: &Path, modules: &Path) -> Result<Self, Unusable> {
        let name = CString::new(device.as_os_str().as_bytes())
            .map_err(|_| Unusable::Absent(device.into()))?;
        let kvm = Kvm::new_with_path(name)
            .map_err(|error| why_not_open(device, io::Error::from(error)))?;
        if u32::try_from(kvm.get_api_version()) != Ok(KVM_API_VERSION) {
            return Err(Unusable::NotKvm(device.into()));
        }
        let lacking = lacking(&kvm);
        if !lacking.is_empty() {
            return Err(Unusable::Lacks(lacking.join(", ")));
        }
        let virtualization = virtualization(modules, ProcessorFlags::read());
        let paging = paging(modules, &virtualization);
        Ok(Self {
            kvm,
            virtualization,
            paging,
        })
    }

    /// Whether the processor runs guest kernels. Without, the
    /// quirks of this room are needed.
    pub fn is_hardware(&self) -> bool {
        matches!(self.virtualization, Virtualization::Hardware(_))
    }
}

impl fmt::Display for Host {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.virtualization {
            Virtualization::Hardware(module) => write!(formatter, "hardware KVM ({module})")?,
            Virtualization::Emulated(module) => write!(
                formatter,
                "KVM without hardware virtualisation ({module}: guest kernel code is emulated)"
            )?,
        }
        match self.paging {
            Paging::TwoLevel => formatter.write_str(", two-level paging"),
            Paging::Shadow => formatter.write_str(", shadow page tables"),
        }
    }
}

/// What runs the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// This room.
    Kvm,
    /// `weft-vcpu-soft`.
    Soft,
}

/// A back end, and why it is this one.
pub struct Choice {
    /// KVM's host when it is KVM.
    pub host: Option<Host>,
    /// One sentence for the log.
    pub reason: String,
}

impl Choice {
    pub fn backend(&self) -> Backend {
        match self.host {
            Some(_) => Backend::Kvm,
            None => Backend::Soft,
        }
    }
}

impl Backend {
    /// The one that is `wanted`, or why it cannot be; with `None` hardware KVM
    /// where there is one, and the software vCPU elsewhere.
    pub fn choose(wanted: Option<Self>) -> Result<Choice, Unusable> {
        match wanted {
            Some(Self::Soft) => Ok(Choice {
                host: None,
                reason: "software vCPU, as asked".into(),
            }),
            Some(Self::Kvm) => Host::open().map(|host| Choice {
                reason: format!("{host}, as asked"),
                host: Some(host),
            }),
            None => Ok(best(Host::open())),
        }
    }
}

fn best(found: Result<Host, Unusable>) -> Choice {
    match found {
        Ok(host) if host.is_hardware() => Choice {
            reason: host.to_string(),
            host: Some(host),
        },
        Ok(host) => Choice {
            reason: format!("software vCPU, faster here than {host}"),
            host: None,
        },
        Err(unusable) => Choice {
            reason: format!("software vCPU: {unusable}"),
            host: None,
        },
    }
}

fn why_not_open(device: &Path, error: io::Error) -> Unusable {
    match error.raw_os_error() {
        Some(libc::ENOENT) => Unusable::Absent(device.into()),
        Some(libc::EACCES | libc::EPERM) => Unusable::Permission {
            device: device.into(),
            group: std::fs::metadata(device)
                .map_or_else(|_| "unknown".into(), |found| group_name(found.gid())),
        },
        _ => Unusable::Open {
            device: device.into(),
            source: error,
        },
    }
}

/// The group's name; its number if it has no name.
fn group_name(gid: u32) -> String {
    let mut buffer = [0; 4096];
    // SAFETY: an all-zero group is plain data: null pointers and a number.
    let mut group: libc::group = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are to live variables; the buffer's length is its own.
    let answer = unsafe {
        libc::getgrgid_r(
            gid,
            &mut group,
            buffer.as_mut_ptr(),
            buffer.len(),
            &mut found,
        )
    };
    if answer != 0 || found.is_null() {
        return gid.to_string();
    }
    // SAFETY: on success the name is a terminated string in `buffer`.
    let name = unsafe { CStr::from_ptr(group.gr_name) };
    name.to_string_lossy().into_owned()
}

/// What this back end rests on, by the names of the kernel's KVM document.
fn lacking(kvm: &Kvm) -> Vec<&'static str> {
    let needed = [
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
        (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
        (Cap::Debugregs, "KVM_CAP_DEBUGREGS"),
        (Cap::Xcrs, "KVM_CAP_XCRS"),
        (Cap::Xsave2, "KVM_CAP_XSAVE2"),
        (Cap::UserNmi, "KVM_CAP_USER_NMI"),
        (Cap::GetTscKhz, "KVM_CAP_GET_TSC_KHZ"),
        (Cap::X86UserSpaceMsr, "KVM_CAP_X86_USER_SPACE_MSR"),
        (Cap::X86MsrFilter, "KVM_CAP_X86_MSR_FILTER"),
    ];
    needed
        .into_iter()
        .filter(|(cap, _)| !kvm.check_extension(*cap))
        .map(|(_, name)| name)
        .collect()
}

/// Whether the processor has VMX (Intel) and SVM (AMD).
#[derive(Clone, Copy, Default)]
struct ProcessorFlags {
    vmx: bool,
    svm: bool,
}

impl ProcessorFlags {
    /// CPUID 1 ECX bit 5, and 8000_0001 ECX bit 2.
    fn read() -> Self {
        use std::arch::x86_64::__cpuid;
        Self {
            vmx: __cpuid(1).ecx & 1 << 5 != 0,
            svm: __cpuid(0x8000_0000).eax >= 0x8000_0001 && __cpuid(0x8000_0001).ecx & 1 << 2 != 0,
        }
    }
}

fn virtualization(modules: &Path, flags: ProcessorFlags) -> Virtualization {
    let names = kvm_modules(modules);
    for (module, has) in [("kvm_intel", flags.vmx), ("kvm_amd", flags.svm)] {
        if has && names.iter().any(|name| name == module) {
            return Virtualization::Hardware(module.into());
        }
    }
    match names.into_iter().next() {
        Some(name) => Virtualization::Emulated(name),
        // Built into the kernel without a trace: believe the processor.
        None if flags.vmx || flags.svm => Virtualization::Hardware("built in".into()),
        None => Virtualization::Emulated("unknown module".into()),
    }
}

fn kvm_modules(modules: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(modules) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("kvm_"))
        .collect();
    names.sort();
    names
}

fn paging(modules: &Path, virtualization: &Virtualization) -> Paging {
    let Virtualization::Hardware(module) = virtualization else {
        return Paging::Shadow;
    };
    let parameter = match module.as_str() {
        "kvm_intel" => "kvm_intel/parameters/ept",
        "kvm_amd" => "kvm_amd/parameters/npt",
        _ => return Paging::Shadow,
    };
    match std::fs::read_to_string(modules.join(parameter)) {
        Ok(value) if matches!(value.trim(), "Y" | "1") => Paging::TwoLevel,
        _ => Paging::Shadow,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A `/sys/module` with these files.
    struct Modules(PathBuf);

    impl Modules {
        fn with(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("weft-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(root)
        }
    }

    impl Drop for Modules {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const INTEL: ProcessorFlags = ProcessorFlags {
        vmx: true,
        svm: false,
    };

    #[test]
    fn hardware_is_a_module_and_the_processor_together() {
        let modules = Modules::with(
            "intel",
            &[
                ("kvm/parameters/x", ""),
                ("kvm_intel/parameters/ept", "Y\n"),
            ],
        );
        let hardware = virtualization(&modules.0, INTEL);
        assert_eq!(hardware, Virtualization::Hardware("kvm_intel".into()));
        assert_eq!(paging(&modules.0, &hardware), Paging::TwoLevel);
        assert_eq!(
            virtualization(&modules.0, ProcessorFlags::default()),
            Virtualization::Emulated("kvm_intel".into())
        );
    }

    #[test]
    fn hardware_may_still_shadow_page_tables() {
        let modules = Modules::with("shadow", &[("kvm_intel/parameters/ept", "N\n")]);
        let hardware = virtualization(&modules.0, INTEL);
        assert_eq!(paging(&modules.0, &hardware), Paging::Shadow);
    }

    #[test]
    fn another_module_is_no_hardware() {
        let modules = Modules::with("other", &[("kvm_pvm/parameters/force", "N\n")]);
        let found = virtualization(&modules.0, INTEL);
        assert_eq!(found, Virtualization::Emulated("kvm_pvm".into()));
        assert_eq!(paging(&modules.0, &found), Paging::Shadow);
    }

    #[test]
    fn what_cannot_be_opened_says_why() {
        let open = |device: &str| Host::open_at(Path::new(device), Path::new("/sys/module")).err();
        let absent = open("/nowhere/kvm").unwrap();
        assert!(matches!(absent, Unusable::Absent(_)), "{absent}");
        let other = open("/dev/null").unwrap();
        assert!(matches!(other, Unusable::NotKvm(_)), "{other}");
        let refused = why_not_open(
            Path::new("/dev/null"),
            io::Error::from_raw_os_error(libc::EACCES),
        );
        assert_eq!(
            refused.to_string(),
            "no permission to open /dev/null: it belongs to the group root"
        );
    }

    #[test]
    fn auto_never_fails() {
        let choice = best(Err(Unusable::Absent(DEVICE.into())));
        assert_eq!(choice.backend(), Backend::Soft);
        assert!(choice.reason.contains("there is no /dev/kvm"));
    }
}
