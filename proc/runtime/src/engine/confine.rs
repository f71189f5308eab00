//! Confinement of a slice: what the program's code can reach on a node that
//! only lends memory and processors.
//!
//! Syscall User Dispatch keeps an honest program's calls in the runtime, but a
//! program could jump to the runtime's own `syscall` instruction. So before any
//! byte of the program arrives, the slice drops to its own user and group and
//! installs a seccomp filter that allows only what the runtime itself needs
//! from then on: bytes over descriptors that exist already, its own memory, the
//! userfaultfd, its own signals' return, time, and the end. No file can be
//! opened, no socket or process made, no other process signalled, nothing
//! executed. A call
//! outside the list ends the slice (`SECCOMP_RET_KILL_PROCESS`).
//!
//! How much memory it takes, its host bounds or watches. For that to be possible,
//! all of it has to show as the process's own: see [`MAP_FLAGS`].

use crate::own_calls::{Result, Sysno, call};

const LOAD_WORD: u16 = 0x20;
const JUMP_EQUAL: u16 = 0x15;
const AND: u16 = 0x54;
const RETURN: u16 = 0x06;
const ALLOW: u32 = 0x7fff_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
const ARCHITECTURE_X86_64: u32 = 0xc000_003e;
const X32_BIT: u32 = 0x4000_0000;
const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCHITECTURE: u32 = 4;
const fn offset_argument(index: u32) -> u32 {
    16 + 8 * index
}
const MAP_PRIVATE: u32 = 0x02;
const MAP_FIXED: u32 = 0x10;
const MAP_ANONYMOUS: u32 = 0x20;
const MAP_NORESERVE: u32 = 0x4000;
/// The flags of every mapping that the runtime makes: private memory, with or
/// without these two. Shared memory outlives the pages that a process has of it,
/// and huge pages of the host's pool are in no count.
const MAP_FLAGS: u32 = MAP_PRIVATE | MAP_ANONYMOUS;
const MAP_FLAGS_FREE: u32 = MAP_FIXED | MAP_NORESERVE;
/// The only advice that the runtime gives.
const MADV_DONTNEED: u32 = 4;
const SOL_SOCKET: u32 = 1;
const SO_RCVTIMEO: u32 = 20;

const SECCOMP_SET_MODE_FILTER: usize = 1;
const PR_SET_NO_NEW_PRIVS: usize = 38;
const PR_SET_DUMPABLE: usize = 4;

/// Allowed whatever their arguments. Each acts only on descriptors that the
/// slice was given or on its own memory.
const ALLOWED: [Sysno; 23] = [
    Sysno::read,
    Sysno::write,
    Sysno::readv,
    Sysno::writev,
    Sysno::recvfrom,
    Sysno::sendto,
    Sysno::recvmsg,
    Sysno::sendmsg,
    Sysno::poll,
    Sysno::ppoll,
    Sysno::munmap,
    Sysno::mprotect,
    Sysno::rt_sigreturn,
    Sysno::rt_sigprocmask,
    Sysno::sigaltstack,
    Sysno::arch_prctl,
    Sysno::futex,
    Sysno::clock_gettime,
    Sysno::clock_getres,
    Sysno::sched_yield,
    Sysno::getcpu,
    Sysno::exit,
    Sysno::exit_group,
];

#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u16,
    jump_true: u8,
    jump_false: u8,
    value: u32,
}

const fn instruction(code: u16, jump_true: u8, jump_false: u8, value: u32) -> Instruction {
    Instruction {
        code,
        jump_true,
        jump_false,
        value,
    }
}

#[repr(C)]
struct Program {
    length: u16,
    instructions: *const Instruction,
}

/// Calls that are allowed for some arguments only.
struct Rule {
    call: Sysno,
    conditions: &'static [Condition],
}

/// The lower half of an argument, without the bits of `free`, must be `value`. The
/// kernel reads these arguments as 32 bits; of `mmap`'s flags all are in these.
struct Condition {
    argument: u32,
    free: u32,
    value: u32,
}

const fn is(argument: u32, value: u32) -> Condition {
    Condition {
        argument,
        free: 0,
        value,
    }
}

/// What only a running slice knows.
const UFFD: u32 = u32::MAX;
const PROCESS: u32 = u32::MAX - 1;

const RULES: [Rule; 5] = [
    Rule {
        call: Sysno::mmap,
        conditions: &[Condition {
            argument: 3,
            free: MAP_FLAGS_FREE,
            value: MAP_FLAGS,
        }],
    },
    Rule {
        call: Sysno::madvise,
        conditions: &[is(2, MADV_DONTNEED)],
    },
    // How long a read may wait.
    Rule {
        call: Sysno::setsockopt,
        conditions: &[is(1, SOL_SOCKET), is(2, SO_RCVTIMEO)],
    },
    // To itself only.
    Rule {
        call: Sysno::tgkill,
        conditions: &[is(0, PROCESS)],
    },
    Rule {
        call: Sysno::ioctl,
        conditions: &[is(0, UFFD)],
    },
];

/// Instructions of a condition, and around those of a rule.
const CONDITION_LENGTH: usize = 3;
const RULE_LENGTH: usize = 3;

const fn length() -> usize {
    let mut length = 4 + 2 * ALLOWED.len() + 1;
    let mut at = 0;
    while at < RULES.len() {
        length += RULE_LENGTH + CONDITION_LENGTH * RULES[at].conditions.len();
        at += 1;
    }
    length
}

const LENGTH: usize = length();

/// Architecture first, then one compare for each allowed call, then the rules,
/// then the end.
fn filter(uffd: i32, process: u32) -> [Instruction; LENGTH] {
    let mut program = [instruction(RETURN, 0, 0, KILL_PROCESS); LENGTH];
    let mut at = 0;
    let mut put = |code, jump_true, jump_false, value| {
        program[at] = instruction(code, jump_true, jump_false, value);
        at += 1;
    };
    put(LOAD_WORD, 0, 0, OFFSET_ARCHITECTURE);
    put(JUMP_EQUAL, 1, 0, ARCHITECTURE_X86_64);
    put(RETURN, 0, 0, KILL_PROCESS);
    // A number with the x32 bit equals none of those below.
    put(LOAD_WORD, 0, 0, OFFSET_NUMBER);
    for number in ALLOWED {
        debug_assert!(number as u32 & X32_BIT == 0);
        put(JUMP_EQUAL, 0, 1, number as u32);
        put(RETURN, 0, 0, ALLOW);
    }
    for rule in &RULES {
        let conditions = rule.conditions.len() as u8;
        let mut left = CONDITION_LENGTH as u8 * conditions;
        // Past the conditions and their two ends.
        put(JUMP_EQUAL, 0, left + 2, rule.call as u32);
        for condition in rule.conditions {
            let value = match condition.value {
                UFFD => uffd as u32,
                PROCESS => process,
                value => value,
            };
            put(LOAD_WORD, 0, 0, offset_argument(condition.argument));
            put(AND, 0, 0, !condition.free);
            left -= CONDITION_LENGTH as u8;
            put(JUMP_EQUAL, 0, left + 1, value);
        }
        put(RETURN, 0, 0, ALLOW);
        put(RETURN, 0, 0, KILL_PROCESS);
    }
    put(RETURN, 0, 0, KILL_PROCESS);
    program
}

/// Becomes `uid`/`gid` (where not `u32::MAX`) without any other group.
pub fn become_user(uid: u32, gid: u32) -> Result<()> {
    if gid != u32::MAX {
        call!(setgroups, 0, 0)?;
        call!(setresgid, gid, gid, gid)?;
    }
    if uid != u32::MAX {
        call!(setresuid, uid, uid, uid)?;
    }
    Ok(())
}

/// Installs the filter; there is no way back.
pub fn confine(uffd: i32, process: u32) -> Result<()> {
    call!(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)?;
    call!(prctl, PR_SET_DUMPABLE, 0)?;
    let instructions = filter(uffd, process);
    let program = Program {
        length: LENGTH as u16,
        instructions: instructions.as_ptr(),
    };
    call!(seccomp, SECCOMP_SET_MODE_FILTER, 0, &raw const program)?;
    Ok(())
}
