//! Properties of the whole process, set before its threads are made.

use std::io;

use nix::sys::resource::{Resource, setrlimit};

use super::ConfineError;

fn failed(what: &'static str) -> impl FnOnce(nix::Error) -> ConfineError {
    move |error| ConfineError::Prepare {
        what,
        source: error.into(),
    }
}

/// Marks every descriptor but the standard three closed on exec, including those that
/// the parent process left open.
pub(super) fn close_on_exec() -> Result<(), ConfineError> {
    // SAFETY: the call takes integers and changes flags of descriptors only.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3_u32,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    let error = io::Error::last_os_error();
    // Before Linux 5.11 there is no such flag. The filters forbid exec anyway.
    match (result, error.raw_os_error()) {
        (0, _) | (_, Some(libc::ENOSYS | libc::EINVAL)) => Ok(()),
        _ => Err(ConfineError::Prepare {
            what: "mark descriptors as closed on exec",
            source: error,
        }),
    }
}

/// From now on no program that this process executes has more rights than it
/// (`Documentation/userspace-api/no_new_privs.rst`).
pub(super) fn no_new_privileges() -> Result<(), ConfineError> {
    // SAFETY: integers only.
    let result = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    nix::errno::Errno::result(result)
        .map(drop)
        .map_err(failed("give up new privileges"))
}

/// Arenas of the C library's allocator. With more than one it opens files, in
/// whichever thread allocates or frees, long after that thread's filter forbade
/// it: to count the processors when all arenas are busy, and to ask how memory is
/// overcommitted before it makes one smaller. Small blocks come from each
/// thread's own cache all the same.
const ARENAS: libc::c_int = 1;

/// The allocator opens no file from now on.
pub(super) fn no_file_for_the_allocator() -> Result<(), ConfineError> {
    // SAFETY: the call changes a parameter of the allocator, which locks itself.
    match unsafe { libc::mallopt(libc::M_ARENA_MAX, ARENAS) } {
        1 => Ok(()),
        _ => Err(ConfineError::Prepare {
            what: "limit the allocator's arenas",
            source: io::Error::other("mallopt refused"),
        }),
    }
}

/// No core file, and no tracing by others of the same user: both would hold the
/// guest's memory.
pub(super) fn no_core_file() -> Result<(), ConfineError> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0).map_err(failed("forbid core files"))?;
    // SAFETY: integers only.
    let result = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    nix::errno::Errno::result(result)
        .map(drop)
        .map_err(failed("forbid tracing"))
}
