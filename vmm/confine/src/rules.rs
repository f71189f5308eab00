//! Which system calls each kind of thread may make.
//!
//! Nobody may open a file, execute a program, make a process, map memory that
//! is executable or shared, or send a signal to another process. What is listed is what
//! the thread's own work does, and what Rust, the C library and io_uring do
//! under it; a comment says which where it is not plain.

use std::collections::BTreeMap;

use seccompiler::{BackendError, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

use super::ThreadKind;

/// The rules of one filter: a call with no rule is allowed whatever its
/// arguments; with several, one must hold.
pub(super) type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Any arguments.
const EVERY_THREAD: [i64; 40] = [
    // What is open.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    // A page of the checkpoint that the machine continues, which any thread may have to read.
    libc::SYS_pread64,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_create1,
    libc::SYS_timerfd_settime,
    // Frames to other slices, which any thread may have to send; the end of a link.
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    // Memory; what maps or protects it is below.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    // Where a page is taken, processors leave guest mode (see `vcpu::kvm::shadows`).
    libc::SYS_membarrier,
    // Waiting and time.
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_sched_yield,
    libc::SYS_restart_syscall,
    // Signals of this thread, and its end.
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sigaltstack,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // The C library: its allocator counts processors, a hash map wants a seed.
    libc::SYS_sched_getaffinity,
    libc::SYS_getrandom,
    // Root is given up in every thread at once; what was given up stays so.
    libc::SYS_setgroups,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    // A thread's start.
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
];

/// A block device: positioned transfers, flush, discard, io_uring.
const BLOCK: [i64; 12] = [
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_io_uring_enter,
];

/// Transfers over a connection that is there.
const CONNECTION: [i64; 7] = [
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_accept4,
    libc::SYS_getsockopt,
];

/// The highest bit of a KVM request's number: set in those to a vCPU
/// (`Documentation/virt/kvm/api.rst`, "KVM_RUN" is 0x80), clear in those to a
/// machine or to `/dev/kvm`. With the type, 0xae.
const VCPU_REQUEST_MASK: u64 = 0xff80;
const VCPU_REQUEST: u64 = 0xae80;
/// `KVM_SET_USER_MEMORY_REGION`: a slot is moved (see `vcpu::kvm::shadows`).
const SET_MEMORY_REGION: u64 = 0x4020_ae46;
/// The threads of coherent memory map and unmap pages of a registered mapping:
/// `UFFDIO_CONTINUE`, `UFFDIO_WRITEPROTECT`, `UFFDIO_WAKE`,
/// `UFFDIO_UNREGISTER` (`include/uapi/linux/userfaultfd.h`).
const WATCHED_PAGES: [u64; 4] = [0xc020_aa07, 0xc018_aa06, 0x8010_aa02, 0x8010_aa01];
/// `TUNSETOFFLOAD`, `TUNSETVNETHDRSZ`: what a driver negotiates after start
/// (`include/uapi/linux/if_tun.h`).
const TUN_SET_OFFLOAD: u64 = 0x4004_54d0;
const TUN_SET_HEADER_SIZE: u64 = 0x4004_54d8;
/// What a link's socket is set to when it is opened.
const LINK_OPTIONS: [(i32, i32); 2] = [
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
];
/// `TUNSETQUEUE`: which of several queues are in use.
const TUN_SET_QUEUE: u64 = 0x4004_54d9;

/// The rules of a kind.
pub(super) fn rules(kind: ThreadKind) -> Result<Rules, BackendError> {
    let mut rules = common()?;
    match kind {
        ThreadKind::SoftVcpu => {}
        // A copy of a disk that comes here with its machine; for a split, the parts of the memory
        // file that have any.
        ThreadKind::Device => allow(
            &mut rules,
            &[
                libc::SYS_pwrite64,
                libc::SYS_fallocate,
                libc::SYS_fdatasync,
                libc::SYS_lseek,
            ],
        ),
        // The last word, to the process that looks after this one; a checkpoint: the file
        // that its pages go to, and the parts of the memory file that have any; how much
        // memory that file takes.
        ThreadKind::Main => allow(
            &mut rules,
            &[
                libc::SYS_sendto,
                libc::SYS_recvmsg,
                libc::SYS_lseek,
                libc::SYS_fstat,
            ],
        ),
        ThreadKind::KvmVcpu => {
            let vcpu = argument(1, SeccompCmpOp::MaskedEq(VCPU_REQUEST_MASK), VCPU_REQUEST)?;
            when(&mut rules, libc::SYS_ioctl, vec![vcpu])?;
            let slot = argument(1, SeccompCmpOp::Eq, SET_MEMORY_REGION)?;
            when(&mut rules, libc::SYS_ioctl, vec![slot])?;
        }
        // What another slice asks of a disk is read at once where that needs no wait.
        ThreadKind::Link => allow(&mut rules, &[libc::SYS_recvfrom, libc::SYS_preadv2]),
        ThreadKind::Block => allow(&mut rules, &BLOCK),
        ThreadKind::Network => {
            tap(&mut rules)?;
            connection(&mut rules)?;
        }
        ThreadKind::Api => connection(&mut rules)?,
        ThreadKind::Admission => {
            allow(
                &mut rules,
                &[
                    libc::SYS_recvmsg,
                    libc::SYS_getsockopt,
                    libc::SYS_getpeername,
                ],
            );
            // Whether the socket of a link waits.
            let flags = argument(1, SeccompCmpOp::Eq, libc::F_GETFL as u64)?;
            when(&mut rules, libc::SYS_fcntl, vec![flags])?;
            for (level, option) in LINK_OPTIONS {
                let level = argument(1, SeccompCmpOp::Eq, level as u64)?;
                let option = argument(2, SeccompCmpOp::Eq, option as u64)?;
                when(&mut rules, libc::SYS_setsockopt, vec![level, option])?;
            }
        }
        ThreadKind::Console => {
            connection(&mut rules)?;
            terminal_size(&mut rules)?;
        }
    }
    Ok(rules)
}

/// Transfers, and sockets that do not wait.
fn connection(rules: &mut Rules) -> Result<(), BackendError> {
    allow(rules, &CONNECTION);
    let request = argument(1, SeccompCmpOp::Eq, libc::FIONBIO)?;
    when(rules, libc::SYS_ioctl, vec![request])
}

fn tap(rules: &mut Rules) -> Result<(), BackendError> {
    for request in [TUN_SET_OFFLOAD, TUN_SET_HEADER_SIZE, TUN_SET_QUEUE] {
        let request = argument(1, SeccompCmpOp::Eq, request)?;
        when(rules, libc::SYS_ioctl, vec![request])?;
    }
    Ok(())
}

/// What every thread may do.
fn common() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    allow(&mut rules, &EVERY_THREAD);
    // No memory becomes executable any more. What is mapped is the process's own, so
    // that a host that lends sees it: shared memory stays when its pages are let go,
    // and the host's pool of huge pages is in no count.
    let not_executable = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
    let protection = argument(2, not_executable.clone(), 0)?;
    when(&mut rules, libc::SYS_mprotect, vec![protection])?;
    let kind = (libc::MAP_TYPE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB) as u64;
    let own = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    when(
        &mut rules,
        libc::SYS_mmap,
        vec![
            argument(2, not_executable, 0)?,
            argument(3, SeccompCmpOp::MaskedEq(kind), own)?,
        ],
    )?;
    // Signals to this process only: a kick of a vCPU, an abort.
    let own = argument(0, SeccompCmpOp::Eq, u64::from(std::process::id()))?;
    when(&mut rules, libc::SYS_tgkill, vec![own])?;
    // Of fcntl as little as there is need for: with F_SETOWN, F_SETSIG and O_ASYNC (by
    // F_SETFL, or by an ioctl) a descriptor sends any signal to any process of the user.
    //
    // The standard library looks at a descriptor before it closes it, where it is
    // built with assertions.
    let flags = argument(1, SeccompCmpOp::Eq, libc::F_GETFD as u64)?;
    when(&mut rules, libc::SYS_fcntl, vec![flags])?;
    // A disk's lock is given up where its last user ends, and taken by the host that it goes to;
    // a disk that is only read looks for writers first.
    for command in [libc::F_OFD_SETLK, libc::F_OFD_GETLK] {
        let lock = argument(1, SeccompCmpOp::Eq, command as u64)?;
        when(&mut rules, libc::SYS_fcntl, vec![lock])?;
    }
    for request in WATCHED_PAGES {
        let request = argument(1, SeccompCmpOp::Eq, request)?;
        when(&mut rules, libc::SYS_ioctl, vec![request])?;
    }
    // A thread's name.
    let name = argument(0, SeccompCmpOp::Eq, libc::PR_SET_NAME as u64)?;
    when(&mut rules, libc::SYS_prctl, vec![name])?;
    // The terminal's former mode, however the process ends. (TIOCSTI, which
    // types at the terminal, stays forbidden.)
    for request in [libc::TCSETS, libc::TCSETSW, libc::TCSETSF] {
        let request = argument(1, SeccompCmpOp::Eq, request)?;
        when(&mut rules, libc::SYS_ioctl, vec![request])?;
    }
    Ok(rules)
}

fn terminal_size(rules: &mut Rules) -> Result<(), BackendError> {
    for request in [libc::TIOCGWINSZ, libc::TCGETS] {
        let request = argument(1, SeccompCmpOp::Eq, request)?;
        when(rules, libc::SYS_ioctl, vec![request])?;
    }
    Ok(())
}

fn allow(rules: &mut Rules, calls: &[i64]) {
    for call in calls {
        rules.insert(*call, Vec::new());
    }
}

fn when(
    rules: &mut Rules,
    call: i64,
    conditions: Vec<SeccompCondition>,
) -> Result<(), BackendError> {
    let rule = SeccompRule::new(conditions)?;
    rules.entry(call).or_default().push(rule);
    Ok(())
}

/// The kernel reads these arguments as 32 bits, whatever the upper half holds.
fn argument(
    index: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value)
}
