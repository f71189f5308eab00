//! Stopping with the program, so that a shell notices.
//!
//! A stopped launcher can notice nothing: were somebody to let the program alone go
//! on, or to kill it, the launcher would stay stopped, and the program a zombie. So
//! a child, the *watcher*, looks at the program while the launcher is stopped, and
//! lets it go on when the program is not stopped. It has a session of its own, ends
//! with the launcher, and is ended when the launcher goes on.

use std::ffi::CString;
use std::time::Duration;

/// How often the watcher looks.
const LOOK: Duration = Duration::from_millis(50);

/// Stops this process until somebody lets it go on, or the program, its child
/// `program`, is no longer stopped. True when the program is still stopped then.
pub fn stop_with(program: i32) -> bool {
    let Ok(stat) = CString::new(format!("/proc/{program}/stat")) else {
        return true;
    };
    // SAFETY: the child only makes calls that are safe in a signal handler, on
    // memory made before, and never returns.
    let watcher = unsafe { libc::fork() };
    if watcher == 0 {
        watch(&stat);
    }
    // Without a watcher it would be stopped for good, perhaps.
    if watcher > 0 {
        // SAFETY: stops this process, which goes on from here; then ends and reaps
        // its own child.
        unsafe {
            libc::raise(libc::SIGSTOP);
            libc::kill(watcher, libc::SIGKILL);
            while libc::waitpid(watcher, std::ptr::null_mut(), 0) < 0
                && *libc::__errno_location() == libc::EINTR
            {}
        }
    }
    is_stopped(&stat)
}

/// The watcher's life.
fn watch(stat: &CString) -> ! {
    let pause = libc::timespec {
        tv_sec: 0,
        tv_nsec: LOOK.as_nanos() as i64,
    };
    // SAFETY: integers, and memory of this frame. Nobody but the launcher has this
    // process as a child, so its parent is the launcher or the launcher has ended.
    unsafe {
        libc::setsid();
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        let launcher = libc::getppid();
        // What the launcher has open is not kept open by this.
        libc::close_range(0, u32::MAX, 0);
        // Again and again: it may be seen going on before the launcher has stopped.
        loop {
            libc::nanosleep(&pause, std::ptr::null_mut());
            if libc::getppid() != launcher {
                libc::_exit(0);
            }
            if !is_stopped(stat) {
                libc::kill(launcher, libc::SIGCONT);
            }
        }
    }
}

/// Whether the process whose `stat` file this is, is stopped. Safe in a signal
/// handler.
fn is_stopped(stat: &CString) -> bool {
    let mut text = [0u8; 512];
    // SAFETY: a string that ends in NUL, and memory of this frame.
    let length = unsafe {
        let file = libc::open(stat.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        let length = libc::read(file, text.as_mut_ptr().cast(), text.len());
        libc::close(file);
        length.max(0) as usize
    };
    // The name before it may hold anything, a bracket too.
    let state = text[..length].rsplitn(2, |&byte| byte == b')').next();
    matches!(state, Some([b' ', b'T' | b't', ..]))
}
