//! The child's half of a start, between `fork` and `execve`: only calls that are safe
//! in a signal handler, on memory prepared before.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use super::{Image, Role, SLICE_CONTROL, SLICE_DESCRIPTORS_MAX};

/// Becomes what `role` says, and executes it.
pub(super) fn live(image: &Image, role: &Role<'_>, control: RawFd, report: RawFd) -> ! {
    let prepared = match role {
        Role::Home { signals, .. } => {
            signals.restore();
            // Rust ignores it in this process; the program expects the default.
            // SAFETY: no handler is involved.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
            // SAFETY: clears close-on-exec of a descriptor that is open.
            checked(unsafe { libc::fcntl(control, libc::F_SETFD, 0) })
        }
        Role::Slice {
            keeps_errors,
            group,
            ..
        } => enter_group(*group)
            .and_then(|()| become_slice(image, control, *keeps_errors))
            .and_then(|()| limit_runtime(image.user != u32::MAX)),
        Role::Node { console, .. } => become_node(image, control, *console),
        // It has threads, and files of its own: disks.
        Role::Lent { group, .. } => {
            enter_group(*group).and_then(|()| become_slice(image, control, false))
        }
    };
    let result = prepared
        .and_then(|()| die_with_parent(image.parent))
        .and_then(|()| {
            // SAFETY: the vectors end in null and point to strings owned by `image`.
            checked(unsafe {
                libc::execveat(
                    image.executable.as_raw_fd(),
                    c"".as_ptr(),
                    image.arguments.as_ptr().cast(),
                    image.environment.as_ptr().cast(),
                    libc::AT_EMPTY_PATH,
                )
            })
        });
    let errno = result.err().unwrap_or(libc::EIO).to_ne_bytes();
    // SAFETY: four bytes of this frame to a descriptor of ours; then the end.
    unsafe {
        libc::write(report, errno.as_ptr().cast(), errno.len());
        libc::_exit(weft_proc::boot::EXIT_SETUP)
    }
}

/// Result of a C call: the errno when it returned -1.
fn checked(result: libc::c_int) -> Result<(), i32> {
    if result == -1 {
        // SAFETY: errno of this thread is always readable.
        Err(unsafe { *libc::__errno_location() })
    } else {
        Ok(())
    }
}

/// Before the file system and the user go, with which it could not.
fn enter_group(group: Option<BorrowedFd<'_>>) -> Result<(), i32> {
    const MYSELF: &[u8] = b"0";
    let Some(group) = group else {
        return Ok(());
    };
    // SAFETY: bytes of the program itself, to a descriptor that is open.
    let written = unsafe { libc::write(group.as_raw_fd(), MYSELF.as_ptr().cast(), MYSELF.len()) };
    checked(written as libc::c_int)
}

fn die_with_parent(parent: i32) -> Result<(), i32> {
    // SAFETY: integers only. After the user was changed, which clears it.
    unsafe {
        checked(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
        // The parent may have ended before the call above.
        if libc::getppid() != parent {
            libc::_exit(weft_proc::boot::EXIT_SETUP);
        }
    }
    Ok(())
}

/// Keeps what the launcher has; without `console`, all but its standard input and
/// output.
fn become_node(image: &Image, control: RawFd, console: bool) -> Result<(), i32> {
    // SAFETY: integers only; descriptors that are open.
    unsafe {
        if !console {
            checked(libc::dup2(image.null.as_raw_fd(), 0))?;
            checked(libc::dup2(image.null.as_raw_fd(), 1))?;
        }
        checked(libc::fcntl(control, libc::F_SETFD, 0))
    }
}

/// Leaves everything of the launcher behind but its session: process group, directory, descriptors,
/// signals, and where possible the file system and the user.
fn become_slice(image: &Image, control: RawFd, keeps_errors: bool) -> Result<(), i32> {
    // SAFETY: integers and pointers to memory owned by `image` or this frame;
    // every call is async-signal-safe.
    unsafe {
        // Not a session: where the kernel shares processors between sessions (sched(7), autogroups),
        // what slices say to each other would wait for pages that they copy.
        checked(libc::setpgid(0, 0))?;
        let mut empty: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut empty);
        for signal in 1..32 {
            libc::signal(signal, libc::SIG_DFL);
        }
        // Standard error may be the session's terminal: with `stty tostop` this signal stops a
        // background process that writes there.
        libc::signal(libc::SIGTTOU, libc::SIG_IGN);
        checked(libc::pthread_sigmask(
            libc::SIG_SETMASK,
            &empty,
            std::ptr::null_mut(),
        ))?;
        checked(libc::dup2(image.null.as_raw_fd(), 0))?;
        checked(libc::dup2(image.null.as_raw_fd(), 1))?;
        if !keeps_errors {
            checked(libc::dup2(image.null.as_raw_fd(), 2))?;
        }
        move_control(control)?;
        checked(libc::close_range(
            SLICE_CONTROL as u32 + 1,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC as i32,
        ))?;
        if let Some(root) = &image.root {
            checked(libc::chroot(root.as_ptr()))?;
        }
        checked(libc::chdir(c"/".as_ptr()))?;
        if image.user != u32::MAX {
            checked(libc::setgroups(0, std::ptr::null()))?;
            checked(libc::setresgid(image.user, image.user, image.user))?;
            checked(libc::setresuid(image.user, image.user, image.user))?;
        }
        limit_slice()?;
        checked(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    }
}

/// Puts the control socket at [`SLICE_CONTROL`], open across `execve`.
fn move_control(control: RawFd) -> Result<(), i32> {
    // SAFETY: integers only. `dup2` onto the same number would keep the
    // close-on-exec flag, so that case clears it.
    unsafe {
        if control == SLICE_CONTROL {
            checked(libc::fcntl(control, libc::F_SETFD, 0))
        } else {
            checked(libc::dup2(control, SLICE_CONTROL))
        }
    }
}

fn limit(resource: libc::__rlimit_resource_t, value: u64) -> Result<(), i32> {
    let limit = libc::rlimit {
        rlim_cur: value,
        rlim_max: value,
    };
    // SAFETY: a valid rlimit that outlives the call.
    checked(unsafe { libc::setrlimit(resource, &limit) })
}

fn limit_slice() -> Result<(), i32> {
    limit(libc::RLIMIT_CORE, 0)?;
    // May exceed the hard limit of an unprivileged launcher, which then stays.
    let _ = limit(libc::RLIMIT_NOFILE, SLICE_DESCRIPTORS_MAX);
    Ok(())
}

/// What a runtime never needs.
fn limit_runtime(own_user: bool) -> Result<(), i32> {
    if own_user {
        // Only where the user is the slice's own: the limit counts a user's
        // processes. After the user was changed, or `execve` would fail.
        limit(libc::RLIMIT_NPROC, 0)?;
        limit(libc::RLIMIT_FSIZE, 0)?;
    }
    Ok(())
}
