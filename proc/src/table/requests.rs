//! Calls that take another call's number as an argument: `ioctl`, `fcntl`,
//! `prctl`.

use super::Arg::{self, Int};
use super::{Class, Found, Length, Next, Plain, Produced, Wait, When};
use linux_raw_sys::errno::{EINVAL, EPERM};
use linux_raw_sys::{general, ioctl as io, net, prctl as pr};

const fn read(length: u32) -> Found {
    Found::Arg(Arg::In(Length::Constant(length)))
}
const fn out(length: u32) -> Found {
    Found::Arg(Arg::Out(
        Length::Constant(length),
        Produced::All,
        When::Success,
    ))
}
const fn update(length: u32) -> Found {
    Found::Arg(Arg::InOut(Length::Constant(length), When::Success))
}
const INT: Found = Found::Arg(Int);

/// `struct termios` as the kernel has it, `termios2` and the older `termio`.
const TERMIOS: u32 = 36;
const TERMIOS2: u32 = 44;
const TERMIO: u32 = 18;
const WINSIZE: u32 = 8;

/// The third argument of `ioctl`, by request. The size in a request's number is
/// not trusted: many predate it and some hide further pointers.
pub(super) fn ioctl(request: u64) -> Found {
    // The kernel takes an `unsigned int`.
    match request as u32 {
        io::TCGETS => out(TERMIOS),
        io::TCSETS | io::TCSETSW | io::TCSETSF => read(TERMIOS),
        io::TCGETS2 => out(TERMIOS2),
        io::TCSETS2 | io::TCSETSW2 | io::TCSETSF2 => read(TERMIOS2),
        io::TCGETA => out(TERMIO),
        io::TCSETA | io::TCSETAW | io::TCSETAF => read(TERMIO),
        io::TIOCGWINSZ => out(WINSIZE),
        io::TIOCSWINSZ => read(WINSIZE),
        io::TIOCGPGRP
        | io::TIOCGSID
        | io::TIOCOUTQ
        | io::TIOCGETD
        | io::TIOCGPTN
        | io::TIOCGPTLCK
        | io::TIOCGPKT
        | io::TIOCGEXCL
        | io::TIOCMGET
        | io::TIOCGDEV
        | io::TIOCGSOFTCAR => out(4),
        // FIONREAD on sockets, pipes and terminals; also called TIOCINQ.
        io::FIONREAD => out(4),
        io::TIOCSPGRP
        | io::TIOCSETD
        | io::TIOCSPTLCK
        | io::TIOCPKT
        | io::TIOCMSET
        | io::TIOCMBIS
        | io::TIOCMBIC
        | io::TIOCSSOFTCAR
        | io::FIONBIO
        | io::FIOASYNC => read(4),
        io::TIOCSTI => read(1),
        io::FIOQSIZE => out(8),
        io::FIOCLEX
        | io::FIONCLEX
        | io::TIOCSCTTY
        | io::TIOCNOTTY
        | io::TIOCEXCL
        | io::TIOCNXCL
        | io::TCSBRK
        | io::TCSBRKP
        | io::TCXONC
        | io::TCFLSH
        | io::TIOCSBRK
        | io::TIOCCBRK
        | io::TIOCGPTPEER
        | io::TIOCVHANGUP
        | io::TIOCSIG => INT,
        // SIOCATMARK, SIOCGPGRP, SIOCSPGRP of sockets; FICLONE; FS_IOC_GETFLAGS
        // and SETFLAGS, which carry an `int` although their number says `long`;
        // BLKGETSIZE64, BLKSSZGET.
        0x8905 | 0x8904 => out(4),
        0x8902 => read(4),
        0x4004_9409 => INT,
        0x8008_6601 => out(4),
        0x4008_6602 => read(4),
        0x8008_1272 => out(8),
        0x1268 => out(4),
        _ => Found::Unknown,
    }
}

/// The third argument of `fcntl`, by command; `wait` becomes what the command
/// makes of it.
pub(super) fn fcntl(command: u64, wait: &mut Wait) -> Found {
    const FLOCK: u32 = 32;
    match command as u32 {
        general::F_SETLKW | general::F_OFD_SETLKW => {
            *wait = Wait::Restarts;
            read(FLOCK)
        }
        general::F_SETLK | general::F_OFD_SETLK => read(FLOCK),
        general::F_GETLK | general::F_OFD_GETLK => update(FLOCK),
        general::F_SETOWN_EX => read(8),
        general::F_GETOWN_EX => out(8),
        general::F_GET_RW_HINT | general::F_GET_FILE_RW_HINT => out(8),
        general::F_SET_RW_HINT | general::F_SET_FILE_RW_HINT => read(8),
        general::F_DUPFD
        | general::F_DUPFD_CLOEXEC
        | general::F_GETFD
        | general::F_SETFD
        | general::F_GETFL
        | general::F_SETFL
        | general::F_GETOWN
        | general::F_SETOWN
        | general::F_GETSIG
        | general::F_SETSIG
        | general::F_GETLEASE
        | general::F_SETLEASE
        | general::F_NOTIFY
        | general::F_SETPIPE_SZ
        | general::F_GETPIPE_SZ
        | general::F_ADD_SEALS
        | general::F_GET_SEALS => INT,
        _ => Found::Unknown,
    }
}

/// The second argument of `prctl`, by option; the others are integers in every
/// option that is listed.
pub(super) fn prctl(option: u64) -> Found {
    const COMM: u16 = 16;
    match option as u32 {
        pr::PR_SET_NAME => Found::Arg(Arg::CutString(COMM)),
        pr::PR_GET_NAME => out(COMM as u32),
        pr::PR_GET_PDEATHSIG | pr::PR_GET_CHILD_SUBREAPER | pr::PR_GET_TSC => out(4),
        pr::PR_SET_PDEATHSIG
        | pr::PR_SET_CHILD_SUBREAPER
        | pr::PR_GET_DUMPABLE
        | pr::PR_SET_DUMPABLE
        | pr::PR_GET_KEEPCAPS
        | pr::PR_SET_KEEPCAPS
        | pr::PR_GET_TIMING
        | pr::PR_SET_TIMING
        | pr::PR_GET_SECUREBITS
        | pr::PR_SET_SECUREBITS
        | pr::PR_CAPBSET_READ
        | pr::PR_CAPBSET_DROP
        | pr::PR_CAP_AMBIENT
        | pr::PR_GET_TIMERSLACK
        | pr::PR_SET_TIMERSLACK
        | pr::PR_GET_NO_NEW_PRIVS
        | pr::PR_SET_NO_NEW_PRIVS
        | pr::PR_GET_THP_DISABLE
        | pr::PR_SET_THP_DISABLE
        | pr::PR_GET_SECCOMP
        | pr::PR_SET_PTRACER => INT,
        // The dispatcher is how system calls reach the runtime; a filter would
        // judge the runtime's own calls; no time-stamp counter would stop its
        // clock, and MDWE mappings that it must make; VMA only names mappings, and
        // only on one host.
        pr::PR_SET_SYSCALL_USER_DISPATCH
        | pr::PR_SET_SECCOMP
        | pr::PR_SET_TSC
        | pr::PR_SET_MDWE
        | pr::PR_SET_VMA => Found::Refused(EINVAL as i32),
        // What an ordinary user gets. Would move the heap, stack and program
        // that the kernel believes in, which are the runtime's.
        pr::PR_SET_MM => Found::Refused(EPERM as i32),
        _ => Found::Unknown,
    }
}

/// Send without copying; the pages stay in use after the call.
const MSG_ZEROCOPY: u64 = 0x400_0000;

/// Calls whose description depends on an argument in some other way.
pub(super) fn refine(nr: u32, args: &[u64; 6], mut plain: Plain) -> Class {
    match nr {
        general::__NR_setsockopt | general::__NR_getsockopt
            if !socket_option_is_flat(args[1] as u32, args[2] as u32) =>
        {
            return Class::Home;
        }
        // Pages handed to the network would be written over by the next call.
        general::__NR_sendto if args[3] & MSG_ZEROCOPY != 0 => return Class::Home,
        general::__NR_sendmsg if args[2] & MSG_ZEROCOPY != 0 => {
            return Class::Home;
        }
        // The pointer is ignored and may be anything.
        general::__NR_epoll_ctl if args[1] as u32 == general::EPOLL_CTL_DEL => {
            plain.args[3] = Int;
        }
        general::__NR_clock_nanosleep if args[1] as u32 & general::TIMER_ABSTIME != 0 => {
            plain.args[3] = Int;
        }
        // Asked to wait for everything, a receiver must not be given a part.
        general::__NR_recvfrom if args[3] & u64::from(net::MSG_WAITALL) != 0 => whole(&mut plain),
        general::__NR_recvmsg if args[2] & u64::from(net::MSG_WAITALL) != 0 => whole(&mut plain),
        _ => {}
    }
    Class::Plain(plain)
}

fn whole(plain: &mut Plain) {
    if let Some(split) = &mut plain.split {
        split.next = Next::Whole;
    }
}

/// Whether a socket option's value is plain bytes of the length that is said.
/// Packet filters hold pointers or count in instructions; other levels are not
/// known here.
fn socket_option_is_flat(level: u32, name: u32) -> bool {
    const SOL_TCP: u32 = 6;
    const SOL_UDP: u32 = 17;
    const SOL_IPV6: u32 = 41;
    const SOL_ICMPV6: u32 = 58;
    const SOL_NETLINK: u32 = 270;
    /// `TCP_ZEROCOPY_RECEIVE`: holds addresses.
    const TCP_ZEROCOPY_RECEIVE: u32 = 35;
    /// From here on IPv4 names belong to iptables.
    const IPTABLES_FIRST: u32 = 64;
    /// Names of ip6tables in the range of IPv6.
    const IP6TABLES: [u32; 4] = [64, 65, 68, 69];
    match level {
        net::SOL_SOCKET => name != net::SO_ATTACH_FILTER && name != net::SO_ATTACH_REUSEPORT_CBPF,
        0 => name < IPTABLES_FIRST,
        SOL_TCP => name != TCP_ZEROCOPY_RECEIVE,
        SOL_UDP | SOL_ICMPV6 | SOL_NETLINK => true,
        SOL_IPV6 => !IP6TABLES.contains(&name),
        _ => false,
    }
}
