//! Paths that name the program by way of /proc.
//!
//! `/proc/self/exe` of an elastic process names the runtime, not the program
//! that the user started. Programs read it to find their data and execute it to
//! start themselves again, so `readlink`, `open` and `execve` of such a path are
//! answered with the program's own.

/// What a path stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProcPath {
    /// The program's own file, as /proc names it.
    OwnProgram,
    /// Anything else.
    Other,
}

/// Recognises, for the process `pid`: `/proc/self/exe`, `/proc/<pid>/exe`,
/// `/proc/thread-self/exe`, and `task/<tid>/exe` below the first two for every
/// `tid` that `is_own_thread` accepts. Repeated and trailing slashes and `.` are
/// seen through, as the kernel does; `..` and symbolic links elsewhere in the
/// file system are not.
pub fn classify(path: &[u8], pid: u32, is_own_thread: impl Fn(u32) -> bool) -> ProcPath {
    if is_own_program(path, pid, is_own_thread) {
        ProcPath::OwnProgram
    } else {
        ProcPath::Other
    }
}

fn is_own_program(path: &[u8], pid: u32, is_own_thread: impl Fn(u32) -> bool) -> bool {
    // A slash or dot at the end asks for a directory, which a program is not.
    if path.first() != Some(&b'/') || path.ends_with(b"/") || path.ends_with(b"/.") {
        return false;
    }
    let mut parts = path
        .split(|&byte| byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".");
    if parts.next() != Some(b"proc") {
        return false;
    }
    let process = parts.next().unwrap_or(&[]);
    let mut last = parts.next();
    if process != b"thread-self" {
        let is_own = process == b"self" || number(process) == Some(pid);
        if !is_own {
            // A thread's directory is also found beside the processes'.
            let thread = number(process).is_some_and(&is_own_thread);
            return thread && last == Some(b"exe") && parts.next().is_none();
        }
        if last == Some(b"task") {
            let thread = number(parts.next().unwrap_or(&[]));
            if !thread.is_some_and(|tid| tid == pid || is_own_thread(tid)) {
                return false;
            }
            last = parts.next();
        }
    }
    last == Some(b"exe") && parts.next().is_none()
}

/// A number as /proc writes it: decimal, without leading zeroes.
fn number(digits: &[u8]) -> Option<u32> {
    if digits.is_empty() || digits[0] == b'0' || digits.len() > 10 {
        return None;
    }
    digits.iter().try_fold(0u32, |number, &digit| {
        let digit = digit.checked_sub(b'0').filter(|&digit| digit < 10)?;
        number.checked_mul(10)?.checked_add(digit.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn own(path: &str) -> bool {
        classify(path.as_bytes(), 42, |tid| tid == 43) == ProcPath::OwnProgram
    }

    #[test]
    fn own_paths_are_recognised() {
        for path in [
            "/proc/self/exe",
            "/proc/42/exe",
            "/proc/43/exe",
            "/proc/thread-self/exe",
            "/proc/self/task/42/exe",
            "/proc/self/task/43/exe",
            "/proc/42/task/43/exe",
            "//proc/./self///exe",
        ] {
            assert!(own(path), "{path}");
        }
    }

    #[test]
    fn other_paths_are_left_alone() {
        for path in [
            "",
            "/",
            "/proc",
            "/proc/self",
            "/proc/self/exe/",
            "/proc/self/exe/.",
            "/proc/self/exe/x",
            "/proc/self/maps",
            "/proc/1/exe",
            "/proc/042/exe",
            "/proc/4294967338/exe",
            "/proc/self/task/44/exe",
            "/proc/self/task/exe",
            "/proc/thread-self/task/42/exe",
            "/proc/43/task/42/exe",
            "proc/self/exe",
            "/home/proc/self/exe",
            "/proc/self/../1/exe",
        ] {
            assert!(!own(path), "{path}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_have_an_answer(path in proptest::collection::vec(any::<u8>(), 0..64)) {
            let own = classify(&path, 42, |_| true) == ProcPath::OwnProgram;
            prop_assert!(!own || path.ends_with(b"exe"));
        }
    }
}
