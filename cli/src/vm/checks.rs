//! What `weft doctor` says of virtual machines. Each check tries the thing
//! itself; none is needed by all machines, so none fails.

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use weft_node::error::sentence;
use weft_node::host::{Check, CheckState};
use weft_vcpu_kvm::{Host, Unusable};

/// Every check.
pub fn checks() -> Vec<Check> {
    vec![kvm(), tun(), io_uring()]
}

/// KVM, and which back end `weft vm run` takes for it.
fn kvm() -> Check {
    const NAME: &str = "KVM";
    match Host::open() {
        Ok(host) if host.is_hardware() => {
            Check::ok(NAME, format!("{host}: `weft vm run` takes kvm"))
        }
        Ok(host) => Check::bad(
            NAME,
            CheckState::Warn,
            format!("{host}: `weft vm run` takes soft, which is faster here"),
            "enable hardware virtualization (VMX or SVM) in the firmware, or nested \
             virtualization where this is a virtual machine",
        ),
        Err(error) => {
            let fix = match &error {
                Unusable::Permission { group, .. } if group == "root" => {
                    "`sudo chown root:kvm /dev/kvm && sudo chmod 0660 /dev/kvm`, and be in the \
                     group kvm"
                        .to_owned()
                }
                Unusable::Permission { group, .. } => {
                    format!("`sudo usermod -aG {group} $USER`, then log in again")
                }
                Unusable::Absent(_) => {
                    "`sudo modprobe kvm_intel` or `sudo modprobe kvm_amd`".to_owned()
                }
                _ => "use a newer kernel".to_owned(),
            };
            let found = format!("{}: `weft vm run` takes soft", sentence(&error));
            Check::bad(NAME, CheckState::Warn, found, fix)
        }
    }
}

/// What `--net tap=NAME` needs.
fn tun() -> Check {
    const NAME: &str = "tap devices";
    const PATH: &str = "/dev/net/tun";
    match File::options().read(true).write(true).open(PATH) {
        Ok(_) => Check::ok(
            NAME,
            format!("{PATH} opens (making a device needs CAP_NET_ADMIN; --net user needs nothing)"),
        ),
        Err(error) => Check::bad(
            NAME,
            CheckState::Warn,
            format!("{PATH}: {error} (--net user works without)"),
            match error.kind() {
                io::ErrorKind::NotFound => "`sudo modprobe tun`",
                _ => "`sudo chmod 0666 /dev/net/tun`, as most distributions have it",
            },
        ),
    }
}

/// What disks use where they can.
fn io_uring() -> Check {
    const NAME: &str = "io_uring";
    const ENTRIES: libc::c_uint = 1;
    /// `struct io_uring_params` (`include/uapi/linux/io_uring.h`): 120 bytes.
    const PARAMETERS_BYTES: usize = 120;
    /// `IORING_SETUP_R_DISABLED` (Linux 5.10): the ring may be restricted before it
    /// is used, without which disks do not use one. Its word is the third.
    const DISABLED: u64 = 1 << 6;
    let mut parameters = [0_u64; PARAMETERS_BYTES / 8];
    parameters[1] = DISABLED;
    // SAFETY: the kernel writes one structure of the size above, which the array
    // has.
    let descriptor =
        unsafe { libc::syscall(libc::SYS_io_uring_setup, ENTRIES, parameters.as_mut_ptr()) };
    if descriptor >= 0 {
        // SAFETY: just returned by the kernel; owned by nobody else.
        drop(unsafe { OwnedFd::from_raw_fd(descriptor as i32) });
        return Check::ok(NAME, "usable: disks of virtual machines use it");
    }
    let error = io::Error::last_os_error();
    Check::bad(
        NAME,
        CheckState::Warn,
        format!("{error}: disks of virtual machines use slower calls"),
        match error.raw_os_error() {
            Some(libc::EPERM) => "`sudo sysctl kernel.io_uring_disabled=0`",
            _ => "use Linux 5.10 or newer, built with CONFIG_IO_URING",
        },
    )
}
