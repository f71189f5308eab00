//! The table itself, by subject. To add a call, find its prototype in the
//! kernel's `include/linux/syscalls.h` and describe each pointer; what cannot be
//! described stays out and goes home.

use super::Arg::*;
use super::Length::*;
use super::Next::*;
use super::{Arg, Class, NUMBERS, Plain, Split, Wait, When};
use linux_raw_sys::general::*;

/// Longest path, bytes, NUL included.
const PATH: Arg = CString(4096);
/// A name of at most 255 bytes. The kernel itself rejects a longer one, with another
/// error than for a path.
const NAME: Arg = CutString(512);

/// An output that the kernel fills whole when it succeeds.
const fn out(length: u32) -> Arg {
    Out(Constant(length), super::Produced::All, When::Success)
}
/// An output that the kernel fills whole when something was found.
const fn found(length: u32) -> Arg {
    Out(Constant(length), super::Produced::All, When::Positive)
}
/// An output of at most `args[index]` bytes; the result says how many.
const fn filled(index: u8) -> Arg {
    Out(
        Argument(index),
        super::Produced::Result(0),
        When::Success,
    )
}
/// An output of at most `args[index]` elements; the result says how many.
const fn elements(index: u8, size: u32) -> Arg {
    Out(
        Elements(index, size),
        super::Produced::Elements(size),
        When::Success,
    )
}
/// An address whose length is a value-result argument.
const fn address(index: u8) -> Arg {
    Out(
        Pointed(index),
        super::Produced::Pointed(index),
        When::Success,
    )
}
/// An input of this many bytes.
const fn read(length: u32) -> Arg {
    In(Constant(length))
}
/// Memory of this many bytes, updated when the call succeeds.
const fn update(length: u32) -> Arg {
    InOut(Constant(length), When::Success)
}

const INT: Arg = Int;
const FD: Arg = Descriptor;
const TIMESPEC: u32 = 16;
const ITIMERSPEC: u32 = 32;
const STAT: u32 = 144;
const RUSAGE: u32 = 144;
const SIGINFO: u32 = 128;
const EPOLL_EVENT: u32 = 12;
const POLLFD: u32 = 8;
/// The remaining time of an interrupted sleep.
const REMAINING: Arg = InOut(Constant(TIMESPEC), When::Interrupted);
/// The timeout that `select` and `ppoll` count down.
const TIMEOUT: Arg = InOut(Constant(TIMESPEC), When::Quietly);
const FD_SET: Arg = InOut(Bits(0), When::Success);
const SOCKET_LENGTH: Arg = update(4);

const fn plain(args: &[Arg]) -> Class {
    Class::Plain(Plain::new(args))
}
const fn waits(args: &[Arg], wait: Wait) -> Class {
    Class::Plain(Plain {
        wait,
        ..Plain::new(args)
    })
}
const fn transfer(args: &[Arg], wait: Wait, split: Split) -> Class {
    Class::Plain(Plain {
        wait,
        split: Some(split),
        ..Plain::new(args)
    })
}
const fn split(data: u8, length: Option<u8>, position: Option<u8>, next: super::Next) -> Split {
    Split {
        data,
        length,
        position,
        next,
    }
}

type Entry = (u32, Class);
use Wait::{Interrupted, Restarts};
const NEVER: Wait = Wait::Never;

/// Reading and writing descriptors.
const TRANSFERS: &[Entry] = &[
    (__NR_read, transfer(&[FD, filled(2)], Restarts, split(1, Some(2), None, RegularFile))),
    (__NR_write, transfer(&[FD, In(Argument(2))], Restarts, split(1, Some(2), None, Always))),
    (__NR_pread64, transfer(&[FD, filled(2)], Restarts, split(1, Some(2), Some(3), RegularFile))),
    (__NR_pwrite64, transfer(&[FD, In(Argument(2))], Restarts, split(1, Some(2), Some(3), Always))),
    (__NR_readv, transfer(&[FD, OutVector(2)], Restarts, split(1, None, None, RegularFile))),
    (__NR_writev, transfer(&[FD, InVector(2)], Restarts, split(1, None, None, Always))),
    (__NR_preadv, transfer(&[FD, OutVector(2)], Restarts, split(1, None, Some(3), RegularFile))),
    (__NR_pwritev, transfer(&[FD, InVector(2)], Restarts, split(1, None, Some(3), Always))),
    (__NR_preadv2, transfer(&[FD, OutVector(2)], Restarts, split(1, None, Some(3), RegularFile))),
    (__NR_pwritev2, transfer(&[FD, InVector(2)], Restarts, split(1, None, Some(3), Always))),
    (__NR_sendfile, waits(&[FD, FD, update(8)], Restarts)),
    (__NR_splice, waits(&[FD, update(8), FD, update(8)], Restarts)),
    (__NR_tee, waits(&[FD, FD], Restarts)),
    (__NR_copy_file_range, waits(&[FD, update(8), FD, update(8)], Restarts)),
    (__NR_getrandom, transfer(&[filled(1)], Restarts, split(0, Some(1), None, Always))),
    (__NR_getdents, transfer(&[FD, filled(2)], NEVER, split(1, Some(2), None, Never))),
    (__NR_getdents64, transfer(&[FD, filled(2)], NEVER, split(1, Some(2), None, Never))),
    (__NR_readahead, plain(&[FD])),
    (__NR_fadvise64, plain(&[FD])),
];

/// Descriptors: everything but transfers.
const DESCRIPTORS: &[Entry] = &[
    (__NR_open, waits(&[PATH], Restarts)),
    (__NR_openat, waits(&[FD, PATH], Restarts)),
    (__NR_openat2, waits(&[FD, PATH, In(Argument(3))], Restarts)),
    (__NR_creat, waits(&[PATH], Restarts)),
    (__NR_close, plain(&[FD])),
    (__NR_close_range, plain(&[FD, FD])),
    (__NR_lseek, plain(&[FD])),
    (__NR_dup, plain(&[FD])),
    (__NR_dup2, plain(&[FD, FD])),
    (__NR_dup3, plain(&[FD, FD])),
    (__NR_pipe, plain(&[out(8)])),
    (__NR_pipe2, plain(&[out(8)])),
    (__NR_fcntl, plain(&[FD, INT, Fcntl])),
    (__NR_ioctl, waits(&[FD, INT, Ioctl], Restarts)),
    (__NR_flock, waits(&[FD], Restarts)),
    (__NR_fsync, plain(&[FD])),
    (__NR_fdatasync, plain(&[FD])),
    (__NR_sync, plain(&[])),
    (__NR_syncfs, plain(&[FD])),
    (__NR_sync_file_range, plain(&[FD])),
    (__NR_ftruncate, plain(&[FD])),
    (__NR_fallocate, plain(&[FD])),
    (__NR_memfd_create, plain(&[NAME])),
    (__NR_eventfd, plain(&[])),
    (__NR_eventfd2, plain(&[])),
    (__NR_signalfd, plain(&[FD, SignalSet(2)])),
    (__NR_signalfd4, plain(&[FD, SignalSet(2)])),
    (__NR_inotify_init, plain(&[])),
    (__NR_inotify_init1, plain(&[])),
    (__NR_inotify_add_watch, plain(&[FD, PATH])),
    (__NR_inotify_rm_watch, plain(&[FD])),
    (__NR_pidfd_open, plain(&[])),
    (__NR_pidfd_send_signal, plain(&[FD, INT, read(SIGINFO)])),
    (__NR_pidfd_getfd, plain(&[FD, FD])),
];

/// Names in the file system and what is known about files.
const FILES: &[Entry] = &[
    (__NR_stat, plain(&[PATH, out(STAT)])),
    (__NR_lstat, plain(&[PATH, out(STAT)])),
    (__NR_fstat, plain(&[FD, out(STAT)])),
    (__NR_newfstatat, plain(&[FD, PATH, out(STAT)])),
    (__NR_statx, plain(&[FD, PATH, INT, INT, out(256)])),
    (__NR_statfs, plain(&[PATH, out(120)])),
    (__NR_fstatfs, plain(&[FD, out(120)])),
    (__NR_access, plain(&[PATH])),
    (__NR_faccessat, plain(&[FD, PATH])),
    (__NR_faccessat2, plain(&[FD, PATH])),
    (__NR_readlink, transfer(&[PATH, filled(2)], NEVER, split(1, Some(2), None, Never))),
    (__NR_readlinkat, transfer(&[FD, PATH, filled(3)], NEVER, split(2, Some(3), None, Never))),
    (__NR_getcwd, transfer(&[filled(1)], NEVER, split(0, Some(1), None, Never))),
    (__NR_chdir, plain(&[PATH])),
    (__NR_fchdir, plain(&[FD])),
    (__NR_chroot, plain(&[PATH])),
    (__NR_rename, plain(&[PATH, PATH])),
    (__NR_renameat, plain(&[FD, PATH, FD, PATH])),
    (__NR_renameat2, plain(&[FD, PATH, FD, PATH])),
    (__NR_mkdir, plain(&[PATH])),
    (__NR_mkdirat, plain(&[FD, PATH])),
    (__NR_rmdir, plain(&[PATH])),
    (__NR_mknod, plain(&[PATH])),
    (__NR_mknodat, plain(&[FD, PATH])),
    (__NR_link, plain(&[PATH, PATH])),
    (__NR_linkat, plain(&[FD, PATH, FD, PATH])),
    (__NR_symlink, plain(&[PATH, PATH])),
    (__NR_symlinkat, plain(&[PATH, FD, PATH])),
    (__NR_unlink, plain(&[PATH])),
    (__NR_unlinkat, plain(&[FD, PATH])),
    (__NR_truncate, plain(&[PATH])),
    (__NR_chmod, plain(&[PATH])),
    (__NR_fchmod, plain(&[FD])),
    (__NR_fchmodat, plain(&[FD, PATH])),
    (__NR_fchmodat2, plain(&[FD, PATH])),
    (__NR_chown, plain(&[PATH])),
    (__NR_lchown, plain(&[PATH])),
    (__NR_fchown, plain(&[FD])),
    (__NR_fchownat, plain(&[FD, PATH])),
    (__NR_umask, plain(&[])),
    (__NR_utime, plain(&[PATH, read(16)])),
    (__NR_utimes, plain(&[PATH, read(32)])),
    (__NR_futimesat, plain(&[FD, PATH, read(32)])),
    (__NR_utimensat, plain(&[FD, PATH, read(32)])),
    (__NR_setxattr, plain(&[PATH, NAME, In(Argument(3))])),
    (__NR_lsetxattr, plain(&[PATH, NAME, In(Argument(3))])),
    (__NR_fsetxattr, plain(&[FD, NAME, In(Argument(3))])),
    (__NR_getxattr, plain(&[PATH, NAME, filled(3)])),
    (__NR_lgetxattr, plain(&[PATH, NAME, filled(3)])),
    (__NR_fgetxattr, plain(&[FD, NAME, filled(3)])),
    (__NR_listxattr, plain(&[PATH, filled(2)])),
    (__NR_llistxattr, plain(&[PATH, filled(2)])),
    (__NR_flistxattr, plain(&[FD, filled(2)])),
    (__NR_removexattr, plain(&[PATH, NAME])),
    (__NR_lremovexattr, plain(&[PATH, NAME])),
    (__NR_fremovexattr, plain(&[FD, NAME])),
];

/// Waiting for several descriptors.
const POLLING: &[Entry] = &[
    (__NR_poll, waits(&[InOut(Elements(1, POLLFD), When::Success)], Interrupted)),
    (__NR_ppoll, waits(&[InOut(Elements(1, POLLFD), When::Success), INT, TIMEOUT, SignalSet(4)], Interrupted)),
    (__NR_select, waits(&[INT, FD_SET, FD_SET, FD_SET, TIMEOUT], Interrupted)),
    (__NR_pselect6, waits(&[INT, FD_SET, FD_SET, FD_SET, TIMEOUT, PackedSignalSet], Interrupted)),
    (__NR_epoll_create, plain(&[])),
    (__NR_epoll_create1, plain(&[])),
    (__NR_epoll_ctl, plain(&[FD, INT, FD, read(EPOLL_EVENT)])),
    (__NR_epoll_wait, waits(&[FD, elements(2, EPOLL_EVENT)], Interrupted)),
    (__NR_epoll_pwait, waits(&[FD, elements(2, EPOLL_EVENT), INT, INT, SignalSet(5)], Interrupted)),
    (__NR_epoll_pwait2, waits(&[FD, elements(2, EPOLL_EVENT), INT, read(TIMESPEC), SignalSet(5)], Interrupted)),
];

const SOCKETS: &[Entry] = &[
    (__NR_socket, plain(&[])),
    (__NR_socketpair, plain(&[INT, INT, INT, out(8)])),
    (__NR_bind, plain(&[FD, In(Argument(2))])),
    (__NR_listen, plain(&[FD])),
    (__NR_connect, waits(&[FD, In(Argument(2))], Restarts)),
    (__NR_accept, waits(&[FD, address(2), SOCKET_LENGTH], Restarts)),
    (__NR_accept4, waits(&[FD, address(2), SOCKET_LENGTH], Restarts)),
    (__NR_getsockname, plain(&[FD, address(2), SOCKET_LENGTH])),
    (__NR_getpeername, plain(&[FD, address(2), SOCKET_LENGTH])),
    (__NR_shutdown, plain(&[FD])),
    (__NR_setsockopt, plain(&[FD, INT, INT, In(Argument(4))])),
    (__NR_getsockopt, plain(&[FD, INT, INT, InOut(Pointed(4), When::Success), SOCKET_LENGTH])),
    (__NR_sendto, transfer(&[FD, In(Argument(2)), INT, INT, In(Argument(5))], Restarts, split(1, Some(2), None, Whole))),
    (__NR_recvfrom, transfer(&[FD, filled(2), INT, INT, address(5), SOCKET_LENGTH], Restarts, split(1, Some(2), None, Never))),
    (__NR_sendmsg, transfer(&[FD, InMessage], Restarts, split(1, None, None, Whole))),
    (__NR_recvmsg, transfer(&[FD, OutMessage], Restarts, split(1, None, None, Never))),
];

/// Clocks and timers.
const TIME: &[Entry] = &[
    (__NR_nanosleep, waits(&[read(TIMESPEC), REMAINING], Interrupted)),
    (__NR_clock_nanosleep, waits(&[INT, INT, read(TIMESPEC), REMAINING], Interrupted)),
    (__NR_clock_settime, plain(&[INT, read(TIMESPEC)])),
    (__NR_clock_adjtime, plain(&[INT, update(208)])),
    (__NR_adjtimex, plain(&[update(208)])),
    (__NR_settimeofday, plain(&[read(16), read(8)])),
    (__NR_times, plain(&[out(32)])),
    (__NR_alarm, plain(&[])),
    (__NR_getitimer, plain(&[INT, out(32)])),
    (__NR_setitimer, plain(&[INT, read(32), out(32)])),
    (__NR_timer_create, plain(&[INT, read(64), out(4)])),
    (__NR_timer_settime, plain(&[INT, INT, read(ITIMERSPEC), out(ITIMERSPEC)])),
    (__NR_timer_gettime, plain(&[INT, out(ITIMERSPEC)])),
    (__NR_timer_getoverrun, plain(&[])),
    (__NR_timer_delete, plain(&[])),
    (__NR_timerfd_create, plain(&[])),
    (__NR_timerfd_settime, plain(&[FD, INT, read(ITIMERSPEC), out(ITIMERSPEC)])),
    (__NR_timerfd_gettime, plain(&[FD, out(ITIMERSPEC)])),
];

/// Processes, users, limits and scheduling.
const PROCESSES: &[Entry] = &[
    (__NR_getpid, plain(&[])),
    (__NR_getppid, plain(&[])),
    (__NR_getpgid, plain(&[])),
    (__NR_setpgid, plain(&[])),
    (__NR_getpgrp, plain(&[])),
    (__NR_getsid, plain(&[])),
    (__NR_setsid, plain(&[])),
    (__NR_getuid, plain(&[])),
    (__NR_geteuid, plain(&[])),
    (__NR_getgid, plain(&[])),
    (__NR_getegid, plain(&[])),
    (__NR_setuid, plain(&[])),
    (__NR_setgid, plain(&[])),
    (__NR_setreuid, plain(&[])),
    (__NR_setregid, plain(&[])),
    (__NR_setresuid, plain(&[])),
    (__NR_setresgid, plain(&[])),
    (__NR_setfsuid, plain(&[])),
    (__NR_setfsgid, plain(&[])),
    (__NR_getresuid, plain(&[out(4), out(4), out(4)])),
    (__NR_getresgid, plain(&[out(4), out(4), out(4)])),
    (__NR_getgroups, plain(&[INT, elements(0, 4)])),
    (__NR_setgroups, plain(&[INT, In(Elements(0, 4))])),
    (__NR_kill, plain(&[])),
    (__NR_tkill, plain(&[])),
    (__NR_tgkill, plain(&[])),
    (__NR_rt_sigqueueinfo, plain(&[INT, INT, read(SIGINFO)])),
    (__NR_rt_tgsigqueueinfo, plain(&[INT, INT, INT, read(SIGINFO)])),
    (__NR_rt_sigtimedwait, waits(&[SignalSet(3), found(SIGINFO), read(TIMESPEC)], Interrupted)),
    (__NR_pause, waits(&[], Interrupted)),
    (__NR_wait4, waits(&[INT, found(4), INT, found(RUSAGE)], Restarts)),
    (__NR_waitid, waits(&[INT, INT, update(SIGINFO), INT, update(RUSAGE)], Restarts)),
    (__NR_getrusage, plain(&[INT, out(RUSAGE)])),
    (__NR_getrlimit, plain(&[INT, out(16)])),
    (__NR_setrlimit, plain(&[INT, read(16)])),
    (__NR_prlimit64, plain(&[INT, INT, read(16), out(16)])),
    (__NR_getpriority, plain(&[])),
    (__NR_setpriority, plain(&[])),
    (__NR_ioprio_get, plain(&[])),
    (__NR_ioprio_set, plain(&[])),
    (__NR_sched_setaffinity, plain(&[INT, INT, In(Argument(1))])),
    // A number of the processors that `sched_getaffinity` lists: home's.
    (__NR_getcpu, plain(&[out(4), out(4)])),
    (__NR_sched_getaffinity, plain(&[INT, INT, filled(1)])),
    (__NR_sched_setscheduler, plain(&[INT, INT, read(4)])),
    (__NR_sched_getscheduler, plain(&[])),
    (__NR_sched_setparam, plain(&[INT, read(4)])),
    (__NR_sched_getparam, plain(&[INT, out(4)])),
    (__NR_sched_get_priority_max, plain(&[])),
    (__NR_sched_get_priority_min, plain(&[])),
    (__NR_sched_rr_get_interval, plain(&[INT, out(TIMESPEC)])),
    (__NR_capget, plain(&[update(8), update(24)])),
    (__NR_prctl, plain(&[INT, Prctl])),
    (__NR_personality, plain(&[])),
    (__NR_membarrier, plain(&[])),
    (__NR_kcmp, plain(&[])),
];

/// The system as a whole, and System V and POSIX queues and semaphores.
const SYSTEM: &[Entry] = &[
    (__NR_uname, plain(&[out(390)])),
    (__NR_sysinfo, plain(&[out(112)])),
    (__NR_sethostname, plain(&[In(Argument(1))])),
    (__NR_setdomainname, plain(&[In(Argument(1))])),
    (__NR_shmget, plain(&[])),
    (__NR_semget, plain(&[])),
    (__NR_semop, waits(&[INT, In(Elements(2, 6))], Interrupted)),
    (__NR_semtimedop, waits(&[INT, In(Elements(2, 6)), INT, read(TIMESPEC)], Interrupted)),
    (__NR_msgget, plain(&[])),
    (__NR_msgsnd, waits(&[INT, In(ArgumentPlus(2, 8))], Interrupted)),
    (
        __NR_msgrcv,
        waits(
            &[INT, Out(ArgumentPlus(2, 8), super::Produced::Result(8), When::Success)],
            Interrupted,
        ),
    ),
    (__NR_mq_open, plain(&[PATH, INT, INT, read(64)])),
    (__NR_mq_unlink, plain(&[PATH])),
    (__NR_mq_timedsend, waits(&[FD, In(Argument(2)), INT, INT, read(TIMESPEC)], Restarts)),
    (__NR_mq_timedreceive, waits(&[FD, filled(2), INT, out(4), read(TIMESPEC)], Restarts)),
    (__NR_mq_getsetattr, plain(&[FD, read(64), out(64)])),
];

/// What the engine does to mappings.
const MEMORY: &[u32] = &[
    __NR_mmap,
    __NR_munmap,
    __NR_mprotect,
    __NR_pkey_mprotect,
    __NR_mremap,
    __NR_remap_file_pages,
    __NR_brk,
    __NR_madvise,
    __NR_msync,
    __NR_mlock,
    __NR_mlock2,
    __NR_munlock,
    __NR_mlockall,
    __NR_munlockall,
    __NR_mincore,
    __NR_shmat,
    __NR_shmdt,
];

/// What the engine does to threads, processes and signals.
const THREAD: &[u32] = &[
    __NR_clone,
    __NR_clone3,
    __NR_fork,
    __NR_vfork,
    __NR_execve,
    __NR_execveat,
    __NR_exit,
    __NR_exit_group,
    __NR_futex,
    __NR_futex_waitv,
    __NR_futex_wake,
    __NR_futex_wait,
    __NR_futex_requeue,
    __NR_set_tid_address,
    __NR_set_robust_list,
    __NR_get_robust_list,
    __NR_arch_prctl,
    __NR_gettid,
    __NR_sigaltstack,
    __NR_rt_sigaction,
    __NR_rt_sigprocmask,
    __NR_rt_sigpending,
    __NR_rt_sigreturn,
    __NR_rt_sigsuspend,
];

/// What every node answers alike.
const LOCAL: &[u32] = &[
    __NR_sched_yield,
    __NR_clock_gettime,
    __NR_clock_getres,
    __NR_gettimeofday,
    __NR_time,
];

/// The class of every number, before `ioctl`, `fcntl` and `prctl` are looked at
/// more closely; see [`super::classify`].
pub static CALLS: [Class; NUMBERS] = build();

/// Puts the lists together; a number that is in two of them stops the build.
const fn build() -> [Class; NUMBERS] {
    let mut calls = [Class::Home; NUMBERS];
    calls = place(calls, TRANSFERS);
    calls = place(calls, DESCRIPTORS);
    calls = place(calls, FILES);
    calls = place(calls, POLLING);
    calls = place(calls, SOCKETS);
    calls = place(calls, TIME);
    calls = place(calls, PROCESSES);
    calls = place(calls, SYSTEM);
    calls = place(calls, super::refused::REFUSED);
    calls = fill(calls, MEMORY, Class::Memory);
    calls = fill(calls, THREAD, Class::Thread);
    fill(calls, LOCAL, Class::Local)
}

const fn place(mut calls: [Class; NUMBERS], entries: &[Entry]) -> [Class; NUMBERS] {
    let mut index = 0;
    while index < entries.len() {
        let (nr, class) = entries[index];
        assert!(matches!(calls[nr as usize], Class::Home), "listed twice");
        calls[nr as usize] = class;
        index += 1;
    }
    calls
}

const fn fill(mut calls: [Class; NUMBERS], numbers: &[u32], class: Class) -> [Class; NUMBERS] {
    let mut index = 0;
    while index < numbers.len() {
        let nr = numbers[index] as usize;
        assert!(matches!(calls[nr], Class::Home), "listed twice");
        calls[nr] = class;
        index += 1;
    }
    calls
}
