//! What this host has and lacks. Each check tries the thing itself, in this
//! process, and leaves nothing behind.

use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use serde::Serialize;

use crate::cgroup::{MemoryLimit, Place};
use crate::spawn::{Executable, ProgramKind};

/// This host's name; empty where it has none.
pub fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default()
}

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckState {
    /// There, and good.
    Ok,
    /// Weft works without it, but slower or with less.
    Warn,
    /// Weft does not work without it.
    Fail,
}

/// One check and its outcome.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it came out.
    pub state: CheckState,
    pub found: String,
    /// The command (or change) that fixes it, unless it is fine.
    pub fix: Option<String>,
}

impl Check {
    /// It is fine.
    pub fn ok(name: &'static str, found: impl Into<String>) -> Check {
        Check {
            name,
            state: CheckState::Ok,
            found: found.into(),
            fix: None,
        }
    }
    /// It is not, and this fixes it.
    pub fn bad(
        name: &'static str,
        state: CheckState,
        found: impl Into<String>,
        fix: impl Into<String>,
    ) -> Check {
        Check {
            name,
            state,
            found: found.into(),
            fix: Some(fix.into()),
        }
    }
}

/// `UFFDIO_API`: `_IOWR(0xAA, 0x3F, struct uffdio_api)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// `USERFAULTFD_IOC_NEW`: `_IO(0xAA, 0x00)` on `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const FEATURE_SIGBUS: u64 = 1 << 7;

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}
const _: () = assert!(size_of::<UffdioApi>() == 24);

/// Opens a userfaultfd for faults in user mode, as an ordinary user may.
fn open_userfaultfd() -> io::Result<OwnedFd> {
    // SAFETY: the call takes one integer.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_userfaultfd,
            libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just returned by the kernel; owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// The features of userfaultfd that this kernel offers to this user.
pub fn userfaultfd_features() -> io::Result<u64> {
    use std::os::fd::AsRawFd;
    let fd = open_userfaultfd()?;
    let mut api = UffdioApi {
        api: 0xaa,
        features: 0,
        ioctls: 0,
    };
    // SAFETY: the request's structure, of the size asserted above, on a
    // userfaultfd; the kernel writes within it.
    if unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &mut api) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(api.features)
}

/// What is missing of userfaultfd.
#[derive(Debug, thiserror::Error)]
pub enum UserfaultfdError {
    /// This process may not use it, or the kernel does not have it.
    #[error("{0}")]
    Unavailable(io::Error),
    /// Linux before 5.7.
    #[error("it cannot protect pages against writing (UFFD_FEATURE_PAGEFAULT_FLAG_WP, Linux 5.7)")]
    NoWriteProtection,
    /// Linux before 4.14.
    #[error("it cannot deliver faults as signals (UFFD_FEATURE_SIGBUS, Linux 4.14)")]
    NoSignals,
}

/// Checks that userfaultfd has all that a runtime needs.
///
/// # Errors
/// What is missing.
pub fn require_userfaultfd() -> Result<(), UserfaultfdError> {
    let features = userfaultfd_features().map_err(UserfaultfdError::Unavailable)?;
    if features & FEATURE_PAGEFAULT_FLAG_WP == 0 {
        return Err(UserfaultfdError::NoWriteProtection);
    }
    if features & FEATURE_SIGBUS == 0 {
        return Err(UserfaultfdError::NoSignals);
    }
    Ok(())
}

/// Tries Syscall User Dispatch on this thread, with a range that exempts every
/// call, and turns it off again.
pub fn require_dispatch() -> io::Result<()> {
    const PR_SET_SYSCALL_USER_DISPATCH: libc::c_int = 59;
    const OFF: libc::c_ulong = 0;
    const ON: libc::c_ulong = 1;
    // SAFETY: offset 0 and the greatest length exempt all addresses, so no call
    // of this thread is dispatched; the null selector means "none".
    let result = unsafe {
        libc::prctl(
            PR_SET_SYSCALL_USER_DISPATCH,
            ON,
            0 as libc::c_ulong,
            libc::c_ulong::MAX,
            0 as libc::c_ulong,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let zero: libc::c_ulong = 0;
    // SAFETY: turns off what was turned on above; integers only.
    unsafe { libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, OFF, zero, zero, zero) };
    Ok(())
}

/// Bytes of memory that could be lent now without swapping.
pub fn available_memory_bytes() -> u64 {
    let host = field_kib("/proc/meminfo", "MemAvailable:").unwrap_or(1 << 20) * 1024;
    let left = own_memory_limits().into_iter().map(MemoryLimit::left);
    left.fold(host, u64::min)
}

/// Bytes of memory that this host, or a control group of this process, has in all.
pub fn total_memory_bytes() -> u64 {
    let host = field_kib("/proc/meminfo", "MemTotal:").unwrap_or(u64::MAX / 1024) * 1024;
    let limits = own_memory_limits().into_iter().map(|limit| limit.bytes);
    limits.fold(host, u64::min)
}

/// Of the control groups that this process is in, as a batch system's job.
fn own_memory_limits() -> Vec<MemoryLimit> {
    Place::of("self").map_or_else(Vec::new, |place| place.limits())
}

/// Bytes of this host's memory that a process holds for itself alone: without its files'. None
/// when it has ended.
pub fn private_memory_bytes(pid: i32) -> Option<u64> {
    field_kib(&format!("/proc/{pid}/status"), "RssAnon:").map(|kib| kib * 1024)
}

fn field_kib(path: &str, field: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.lines().find_map(|line| {
        line.strip_prefix(field)?
            .split_whitespace()
            .next()?
            .parse()
            .ok()
    })
}

/// Runs every check.
pub fn check_all() -> Vec<Check> {
    vec![
        kernel(),
        dispatch(),
        userfaultfd(),
        userfaultfd_feature("write protection", FEATURE_PAGEFAULT_FLAG_WP),
        userfaultfd_feature("faults as signals", FEATURE_SIGBUS),
        fsgsbase(),
        aes(),
        overcommit(),
        memory_lock(),
        open_files(),
        memory(),
        program("runtime", ProgramKind::Runtime),
        program("monitor", ProgramKind::Monitor),
    ]
}

fn kernel() -> Check {
    const NAME: &str = "kernel";
    let release = nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut next = || {
        numbers
            .next()
            .and_then(|text| text.parse().ok())
            .unwrap_or(0)
    };
    let version: (u32, u32) = (next(), next());
    if version >= (5, 11) {
        Check::ok(NAME, format!("Linux {release}"))
    } else {
        let found = format!("Linux {release}, 5.11 or later is needed");
        Check::bad(NAME, CheckState::Fail, found, "install a newer kernel")
    }
}

fn dispatch() -> Check {
    const NAME: &str = "Syscall User Dispatch";
    match require_dispatch() {
        Ok(()) => Check::ok(NAME, "works"),
        Err(error) => Check::bad(
            NAME,
            CheckState::Fail,
            error.to_string(),
            "use an x86-64 kernel of 5.11 or later; in a container, allow prctl(PR_SET_SYSCALL_USER_DISPATCH) in its seccomp profile",
        ),
    }
}

fn userfaultfd() -> Check {
    const NAME: &str = "userfaultfd";
    match open_userfaultfd() {
        Ok(_) => Check::ok(
            NAME,
            format!("works for user-mode faults; {}", other_ways()),
        ),
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Check::bad(
            NAME,
            CheckState::Fail,
            error.to_string(),
            "use a kernel built with CONFIG_USERFAULTFD=y",
        ),
        Err(error) => Check::bad(
            NAME,
            CheckState::Fail,
            format!("{error}; {}", other_ways()),
            "allow the call userfaultfd(2) in the container's seccomp profile, or run `sudo sysctl -w vm.unprivileged_userfaultfd=1`",
        ),
    }
}

/// The two other doors to userfaultfd: neither is needed.
fn other_ways() -> String {
    let sysctl = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    let sysctl = sysctl.map_or("absent".to_owned(), |text| text.trim().to_owned());
    let device = fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd");
    let device = match device.map(|device| {
        use std::os::fd::AsRawFd;
        // SAFETY: the request takes flags by value and returns a descriptor.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, libc::O_CLOEXEC) };
        // SAFETY: a non-negative result is a new descriptor that nobody else owns.
        (fd >= 0).then(|| drop(unsafe { OwnedFd::from_raw_fd(fd) }))
    }) {
        Ok(Some(())) => "usable",
        Ok(None) => "refuses",
        Err(_) => "not accessible",
    };
    format!("vm.unprivileged_userfaultfd={sysctl}, /dev/userfaultfd {device} (neither is needed)")
}

fn userfaultfd_feature(name: &'static str, feature: u64) -> Check {
    match userfaultfd_features() {
        Ok(features) if features & feature != 0 => Check::ok(name, "offered by userfaultfd"),
        Ok(_) => Check::bad(
            name,
            CheckState::Fail,
            "not offered by userfaultfd",
            "use a newer kernel (x86-64, Linux 5.7 or later)",
        ),
        Err(error) => Check::bad(
            name,
            CheckState::Fail,
            error.to_string(),
            "make userfaultfd work first",
        ),
    }
}

fn fsgsbase() -> Check {
    const NAME: &str = "FSGSBASE";
    const HWCAP2_FSGSBASE: u64 = 1 << 1;
    // SAFETY: reads the auxiliary vector; no pointer involved.
    let hwcap = unsafe { libc::getauxval(libc::AT_HWCAP2) };
    if hwcap & HWCAP2_FSGSBASE != 0 {
        Check::ok(NAME, "usable by programs")
    } else {
        Check::bad(
            NAME,
            CheckState::Fail,
            "not usable by programs",
            "boot without `nofsgsbase` on a CPU that has it (Ivy Bridge, Zen or later; Linux 5.9)",
        )
    }
}

fn aes() -> Check {
    const NAME: &str = "AES instructions";
    if is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq") {
        Check::ok(NAME, "AES-NI and PCLMULQDQ")
    } else {
        Check::bad(
            NAME,
            CheckState::Warn,
            "missing: sealed links will be slow",
            "expose the host CPU's AES to this machine (for a virtual machine: CPU model `host`)",
        )
    }
}

fn overcommit() -> Check {
    const NAME: &str = "memory overcommit";
    let mode = fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    match mode.trim() {
        "2" => Check::bad(
            NAME,
            CheckState::Warn,
            "mode 2: a program larger than this host may be refused its address space",
            "sudo sysctl -w vm.overcommit_memory=0",
        ),
        mode => Check::ok(NAME, format!("mode {mode}")),
    }
}

fn limit(resource: nix::sys::resource::Resource) -> (u64, u64) {
    nix::sys::resource::getrlimit(resource).unwrap_or((0, 0))
}

fn memory_lock() -> Check {
    let (soft, _) = limit(nix::sys::resource::Resource::RLIMIT_MEMLOCK);
    let found = match soft {
        libc::RLIM_INFINITY => "no limit".to_owned(),
        bytes => crate::size::format_bytes(bytes),
    };
    Check::ok("locked memory", format!("{found} (Weft locks none)"))
}

fn open_files() -> Check {
    const NAME: &str = "open files";
    // The runtime keeps its own descriptors from 900 up, out of the program's way.
    const NEEDED: u64 = 1024;
    let (soft, hard) = limit(nix::sys::resource::Resource::RLIMIT_NOFILE);
    if soft >= NEEDED {
        Check::ok(NAME, format!("{soft} (at most {hard})"))
    } else {
        let found = format!("{soft}, {NEEDED} are needed");
        Check::bad(NAME, CheckState::Fail, found, format!("ulimit -n {NEEDED}"))
    }
}

fn memory() -> Check {
    const NAME: &str = "free memory";
    let bytes = available_memory_bytes();
    let found = crate::size::format_bytes(bytes);
    if bytes >= 64 << 20 {
        Check::ok(NAME, found)
    } else {
        Check::bad(
            NAME,
            CheckState::Warn,
            found,
            "end something, or lower --memory",
        )
    }
}

fn program(name: &'static str, kind: ProgramKind) -> Check {
    match Executable::find(kind) {
        Ok(found) => Check::ok(name, found.path().display().to_string()),
        Err(missing) => Check::bad(
            name,
            CheckState::Fail,
            format!("not found in {}", missing.searched),
            missing.fix(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_names_its_fix() {
        for check in check_all() {
            assert!(!check.found.is_empty(), "{}", check.name);
            assert_eq!(
                check.fix.is_none(),
                check.state == CheckState::Ok,
                "{}",
                check.name
            );
        }
    }

    #[test]
    fn trying_dispatch_leaves_it_off() {
        if require_dispatch().is_ok() {
            assert!(std::fs::read("/proc/self/comm").is_ok());
        }
    }
}
