//! How soon the kernel runs a thread that wakes while others want its processor.
//!
//! The scheduler runs the thread with the earliest virtual deadline, which is its time slice
//! divided by its weight from now (`Documentation/scheduler/sched-eevdf.rst`). A process in a
//! control group, or in a session of its own (`sched_autogroup`), shares one weight, and where
//! it runs little the kernel gives it little of that: a thread that only says that the process
//! lives then waits for a second and more on a busy host. A thread may ask for a shorter slice
//! (sched_setattr(2), `sched_runtime`, since Linux 6.12) without any right, and is run sooner for
//! it, not longer.

/// The shortest that the kernel takes, nanoseconds.
const SHORTEST_NS: u64 = 100_000;

/// Asks for the shortest slice for the calling thread. An older kernel, and one that refuses,
/// leaves it as it is.
pub fn shorten() {
    // SAFETY: sched_attr is plain numbers, for which zero is a value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: the structure outlives the call, which fills at most `size` bytes of it.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    // Who has another policy has it on purpose.
    if got != 0 || attributes.sched_policy != libc::SCHED_OTHER as u32 {
        return;
    }
    attributes.sched_runtime = SHORTEST_NS;
    // SAFETY: the structure outlives the call, which reads it.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_and_niceness_stay() {
        let look = || {
            // SAFETY: sched_attr is plain numbers, for which zero is a value.
            let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
            let size = size_of::<libc::sched_attr>() as u32;
            let call = libc::SYS_sched_getattr;
            // SAFETY: the structure outlives the call, which fills it.
            let got = unsafe { libc::syscall(call, 0, &raw mut attributes, size, 0) };
            assert_eq!(got, 0);
            attributes
        };
        std::thread::spawn(move || {
            let before = look();
            shorten();
            let after = look();
            assert_eq!(after.sched_policy, before.sched_policy);
            assert_eq!(after.sched_nice, before.sched_nice);
            // A kernel before 6.12 shows no slice.
            assert!(after.sched_runtime == 0 || after.sched_runtime == SHORTEST_NS);
        })
        .join()
        .unwrap();
    }
}
