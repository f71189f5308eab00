//! Processes, signals, time, limits.

use super::*;
use libc::*;

/// A child that exits with `status` at once.
fn child(status: i32) -> u64 {
    // SAFETY: the child only leaves, which is allowed between fork and exec.
    unsafe {
        let pid = fork();
        if pid == 0 {
            _exit(status);
        }
        assert!(pid > 0);
        pid as u64
    }
}

#[test]
fn waiting_for_children() {
    same(|call| {
        let pid = child(7);
        let (mut status, mut usage): (i32, rusage) = (-1, zeroed());
        let waited = call(SYS_wait4, &[pid, into(&mut status), 0, into(&mut usage)]);
        assert_eq!(waited, pid as i64);
        assert!(usage.ru_maxrss > 0);
        let mut seen = vec![i64::from(status)];
        // Nobody is there: nothing is written.
        status = -1;
        seen.push(call(SYS_wait4, &[pid, into(&mut status), 0, 0]));
        seen.push(status.into());
        // SAFETY: the child only waits to be killed.
        let waiting = unsafe {
            match fork() {
                0 => {
                    alarm(20);
                    pause();
                    _exit(1)
                }
                pid => pid as u64,
            }
        };
        let nobody = [waiting, into(&mut status), WNOHANG as u64, into(&mut usage)];
        let before = bytes(&usage);
        seen.push(call(SYS_wait4, &nobody));
        seen.push(status.into());
        assert_eq!(bytes(&usage), before);
        assert_eq!(call(SYS_kill, &[waiting, SIGKILL as u64]), 0);
        seen.push(call(SYS_wait4, &[waiting, into(&mut status), 0, 0]) - waiting as i64);
        seen.push(status.into());
        let pid = child(9);
        let mut info = [0xaau8; 128];
        seen.push(call(
            SYS_waitid,
            &[
                P_PID as u64,
                pid,
                into(&mut info),
                WEXITED as u64,
                into(&mut usage),
            ],
        ));
        let word = |at: usize| i32::from_le_bytes(info[at..at + 4].try_into().unwrap());
        assert_eq!(
            (word(0), word(8), word(16)),
            (SIGCHLD, CLD_EXITED, pid as i32)
        );
        seen.push(word(24).into());
        seen.push(call(
            SYS_waitid,
            &[P_PID as u64, pid, into(&mut info), WEXITED as u64, 0],
        ));
        seen
    });
}

#[test]
fn sleeping() {
    same(|call| {
        let short = timespec {
            tv_sec: 0,
            tv_nsec: 1000,
        };
        let mut rest = timespec {
            tv_sec: 99,
            tv_nsec: 99,
        };
        let mut seen = vec![call(SYS_nanosleep, &[at(&short), into(&mut rest)])];
        seen.push(call(
            SYS_clock_nanosleep,
            &[CLOCK_MONOTONIC as u64, 0, at(&short), into(&mut rest)],
        ));
        let past: timespec = zeroed();
        // The time left is not looked at with an absolute time.
        let absolute = TIMER_ABSTIME as u64;
        seen.push(call(
            SYS_clock_nanosleep,
            &[CLOCK_MONOTONIC as u64, absolute, at(&past), 1],
        ));
        let wrong = timespec {
            tv_sec: 0,
            tv_nsec: -1,
        };
        seen.push(call(SYS_nanosleep, &[at(&wrong), into(&mut rest)]));
        seen.push(call(SYS_nanosleep, &[0, 0]));
        seen.extend([rest.tv_sec, rest.tv_nsec]);
        seen
    });
}

extern "C" fn ignore(_: i32) {}

#[test]
fn an_interrupted_sleep_tells_the_time_left() {
    same(|call| {
        let long = timespec {
            tv_sec: 20,
            tv_nsec: 0,
        };
        let mut rest: timespec = zeroed();
        // SAFETY: a handler that does nothing, for a signal that this test sends
        // to its own thread with a timer.
        let timer = unsafe {
            let mut action: sigaction = zeroed();
            action.sa_sigaction = ignore as *const () as usize;
            assert_eq!(sigaction(SIGUSR2, &action, std::ptr::null_mut()), 0);
            let mut event: sigevent = zeroed();
            event.sigev_notify = SIGEV_THREAD_ID;
            event.sigev_signo = SIGUSR2;
            event.sigev_notify_thread_id = gettid();
            let mut timer = 0i32;
            let made = call(
                SYS_timer_create,
                &[CLOCK_MONOTONIC as u64, at(&event), into(&mut timer)],
            );
            assert_eq!(made, 0);
            timer as u64
        };
        // Again and again: the first could come before the sleep begins.
        let mut due: itimerspec = zeroed();
        due.it_value.tv_nsec = 20_000_000;
        due.it_interval.tv_nsec = 20_000_000;
        let mut before: itimerspec = zeroed();
        assert_eq!(
            call(SYS_timer_settime, &[timer, 0, at(&due), into(&mut before)]),
            0
        );
        let mut seen = vec![call(SYS_nanosleep, &[at(&long), into(&mut rest)])];
        assert!((1..20).contains(&rest.tv_sec), "{} s left", rest.tv_sec);
        rest = zeroed();
        seen.push(call(
            SYS_clock_nanosleep,
            &[CLOCK_MONOTONIC as u64, 0, at(&long), into(&mut rest)],
        ));
        assert!((1..20).contains(&rest.tv_sec), "{} s left", rest.tv_sec);
        let mut timeout = timespec {
            tv_sec: 20,
            tv_nsec: 0,
        };
        seen.push(call(SYS_ppoll, &[0, 0, into(&mut timeout), 0, 8]));
        assert!(
            (1..20).contains(&timeout.tv_sec),
            "{} s left",
            timeout.tv_sec
        );
        let mut now: itimerspec = zeroed();
        seen.push(call(SYS_timer_gettime, &[timer, into(&mut now)]));
        seen.push(now.it_interval.tv_nsec);
        seen.push(call(SYS_timer_delete, &[timer]));
        seen
    });
}

#[test]
fn waiting_for_signals() {
    same(|call| {
        let mask = 1u64 << (SIGUSR1 - 1);
        // SAFETY: blocks a signal in this thread only.
        unsafe {
            let mut set: sigset_t = std::mem::zeroed();
            sigaddset(&mut set, SIGUSR1);
            pthread_sigmask(SIG_BLOCK, &set, std::ptr::null_mut());
        }
        let (pid, tid) = (call(SYS_getpid, &[]), native(SYS_gettid, &[]));
        let mut info = [0xaau8; 128];
        let now: timespec = zeroed();
        let mut seen = vec![call(
            SYS_rt_sigtimedwait,
            &[at(&mask), into(&mut info), at(&now), 8],
        )];
        assert_eq!(info[0], 0xaa);
        assert_eq!(
            call(SYS_tgkill, &[pid as u64, tid as u64, SIGUSR1 as u64]),
            0
        );
        seen.push(call(
            SYS_rt_sigtimedwait,
            &[at(&mask), into(&mut info), at(&now), 8],
        ));
        seen.extend(info[..12].iter().map(|&byte| i64::from(byte)));
        seen.push(info[127].into());
        seen.push(call(SYS_rt_sigtimedwait, &[at(&mask), 0, at(&now), 16]));
        let fd = call(
            SYS_signalfd4,
            &[u64::MAX, at(&mask), 8, SFD_NONBLOCK as u64],
        );
        assert!(fd >= 0);
        assert_eq!(
            call(SYS_tgkill, &[pid as u64, tid as u64, SIGUSR1 as u64]),
            0
        );
        seen.push(call(SYS_read, &[fd as u64, into(&mut info), 128]));
        seen.push(call(SYS_close, &[fd as u64]));
        seen
    });
}

#[test]
fn the_system() {
    same(|call| {
        let mut name = [0xaau8; 400];
        let mut seen = vec![call(SYS_uname, &[into(&mut name)])];
        seen.extend(name.map(i64::from));
        let mut info: sysinfo = zeroed();
        seen.push(call(SYS_sysinfo, &[into(&mut info)]));
        seen.extend([
            info.totalram as i64,
            info.totalswap as i64,
            info.mem_unit.into(),
        ]);
        seen.push(call(SYS_sysinfo, &[16]));
        seen
    });
}

#[test]
fn limits_and_identities() {
    same(|call| {
        let mut limit: rlimit = zeroed();
        let core = RLIMIT_CORE as u64;
        let mut seen = vec![call(SYS_prlimit64, &[0, core, 0, into(&mut limit)])];
        seen.extend([limit.rlim_cur as i64, limit.rlim_max as i64]);
        let mut again: rlimit = zeroed();
        seen.push(call(
            SYS_prlimit64,
            &[0, core, at(&limit), into(&mut again)],
        ));
        seen.push(call(SYS_getrlimit, &[99, into(&mut again)]));
        assert_eq!(bytes(&limit), bytes(&again));
        let mut groups = [-1i32; 64];
        let count = call(SYS_getgroups, &[64, into(&mut groups)]);
        seen.push(count);
        seen.extend(groups.map(i64::from));
        seen.push(call(SYS_getgroups, &[0, 0]));
        let mut ids = [-1i32; 3];
        let [a, b, c] = &mut ids;
        seen.push(call(SYS_getresuid, &[into(a), into(b), into(c)]));
        seen.extend(ids.map(i64::from));
        let mut cpus = [0u8; 128];
        seen.push(call(SYS_sched_getaffinity, &[0, 128, into(&mut cpus)]));
        seen.extend(cpus.map(i64::from));
        seen.push(call(SYS_sched_getaffinity, &[0, 3, into(&mut cpus)]));
        seen.push(call(SYS_sched_setaffinity, &[0, 128, at(&cpus)]));
        let mut usage: rusage = zeroed();
        seen.push(call(SYS_getrusage, &[RUSAGE_SELF as u64, into(&mut usage)]));
        assert!(usage.ru_maxrss > 0);
        let mut capability = [0x2008_0522u32, 0];
        let mut sets = [0u32; 6];
        seen.push(call(SYS_capget, &[into(&mut capability), into(&mut sets)]));
        seen.extend(sets.map(i64::from));
        seen
    });
}

#[test]
fn names_of_threads() {
    same(|call| {
        let mut name = [0xaau8; 20];
        let set =
            |text: &std::ffi::CStr| call(SYS_prctl, &[PR_SET_NAME as u64, at(text.to_bytes())]);
        let mut seen = vec![set(c"short")];
        seen.push(call(SYS_prctl, &[PR_GET_NAME as u64, into(&mut name)]));
        seen.extend(name.map(i64::from));
        seen.push(set(c"a name that is far too long for a thread"));
        seen.push(call(SYS_prctl, &[PR_GET_NAME as u64, into(&mut name)]));
        seen.extend(name.map(i64::from));
        seen.push(call(SYS_prctl, &[PR_GET_DUMPABLE as u64]));
        seen
    });
}

#[test]
fn timers_and_queues() {
    same(|call| {
        let fd = call(
            SYS_timerfd_create,
            &[CLOCK_MONOTONIC as u64, TFD_NONBLOCK as u64],
        ) as u64;
        let mut when: itimerspec = zeroed();
        when.it_value.tv_sec = 1000;
        let mut before: itimerspec = zeroed();
        let mut seen = vec![call(
            SYS_timerfd_settime,
            &[fd, 0, at(&when), into(&mut before)],
        )];
        seen.extend([before.it_value.tv_sec, before.it_value.tv_nsec]);
        seen.push(call(SYS_timerfd_gettime, &[fd, into(&mut before)]));
        assert_eq!(before.it_value.tv_sec, 999);
        let mut count = 0u64;
        seen.push(call(SYS_read, &[fd, into(&mut count), 8]));
        seen.push(call(SYS_close, &[fd]));
        let mut alarm = [0u64; 4];
        seen.push(call(
            SYS_getitimer,
            &[ITIMER_VIRTUAL as u64, into(&mut alarm)],
        ));
        seen.push(call(
            SYS_setitimer,
            &[ITIMER_VIRTUAL as u64, at(&alarm), into(&mut alarm)],
        ));
        let queue = call(SYS_msgget, &[IPC_PRIVATE as u64, 0o600]);
        if queue >= 0 {
            let message = (5i64, *b"contents");
            seen.push(call(SYS_msgsnd, &[queue as u64, at(&message), 8, 0]));
            let mut got = (0i64, [0xaau8; 16]);
            seen.push(call(SYS_msgrcv, &[queue as u64, into(&mut got), 16, 0, 0]));
            assert_eq!((got.0, &got.1[..9]), (5, &b"contents\xaa"[..]));
            native(SYS_msgctl, &[queue as u64, IPC_RMID as u64]);
        }
        let mut random = [0u8; 64];
        seen.push(call(SYS_getrandom, &[into(&mut random), 64, 0]));
        assert_ne!(random, [0; 64]);
        seen
    });
}

#[test]
fn an_output_that_cannot_be_written_is_a_fault() {
    same(|call| {
        let read_only: &'static [u8; 144] = &[0; 144];
        [
            call(SYS_fstat, &[0, at(read_only)]),
            call(SYS_fstat, &[0, 16]),
            call(SYS_uname, &[at(read_only)]),
        ]
    });
}
