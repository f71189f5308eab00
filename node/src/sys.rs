//! The few kernel calls that neither the standard library nor `nix` shapes the
//! way this crate needs: sealed memfds, packets with descriptors, and waiting
//! with a bound.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg,
    sendmsg, socketpair,
};

/// A memfd of exactly `bytes`, sealed at that size: no other holder of the descriptor
/// can shrink it under this process's mapping (which would be SIGBUS).
pub fn sealed_memfd(name: &CStr, bytes: u64) -> io::Result<OwnedFd> {
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    nix::unistd::ftruncate(&fd, bytes as i64)?;
    fcntl(
        &fd,
        FcntlArg::F_ADD_SEALS(
            SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL,
        ),
    )?;
    Ok(fd)
}

/// A memfd without size or seals, for a process that gives it both.
pub fn empty_memfd(name: &CStr) -> io::Result<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    Ok(memfd_create(name, flags)?)
}

/// Two ends of a packet socket, both closed on exec.
pub fn packet_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?)
}

/// Two ends of a stream socket, both closed on exec.
pub fn stream_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(
        AddressFamily::Unix,
        SockType::Stream,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?)
}

/// Sends one packet with descriptors. Fails rather than blocks: the receiver is
/// a runtime that is waiting for it.
pub fn send_with_descriptors(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[RawFd],
) -> io::Result<()> {
    let rights = [ControlMessage::ScmRights(descriptors)];
    let control: &[ControlMessage<'_>] = if descriptors.is_empty() { &[] } else { &rights };
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    let sent = sendmsg::<()>(
        socket.as_raw_fd(),
        &[io::IoSlice::new(bytes)],
        control,
        flags,
        None,
    )?;
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(io::Error::new(
            io::ErrorKind::WriteZero,
            "a packet was cut short",
        ))
    }
}

/// One packet, which must be there, with the descriptors that came with it: at
/// most `descriptors_max`, closed on exec.
pub fn receive_with_descriptors(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    descriptors_max: usize,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let space = descriptors_max * size_of::<RawFd>();
    // SAFETY: computes a size.
    let mut control = vec![0; unsafe { libc::CMSG_SPACE(space as u32) } as usize];
    let mut parts = [io::IoSliceMut::new(buffer)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
    let mut descriptors = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = part {
            // SAFETY: the kernel has just made these descriptors for this call.
            descriptors.extend(
                numbers
                    .iter()
                    .map(|fd| unsafe { OwnedFd::from_raw_fd(*fd) }),
            );
        }
    }
    if message
        .flags
        .intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC)
    {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a packet is longer than expected",
        ));
    }
    Ok((message.bytes, descriptors))
}

/// One packet if there is one now: `Ok(None)` when nothing waits, `Ok(Some(0))`
/// when the peer closed.
pub fn receive_packet(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        return match nix::sys::socket::recv(socket.as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT) {
            Ok(length) => Ok(Some(length)),
            Err(Errno::EAGAIN) => Ok(None),
            Err(Errno::EINTR) => continue,
            // A process that died with unread packets resets the socket; for
            // the reader that is an end like any other.
            Err(Errno::ECONNRESET) => Ok(Some(0)),
            Err(errno) => Err(errno.into()),
        };
    }
}

/// Waits until one of `descriptors` is readable (or closed), at most `bound`.
/// Returns which are.
pub fn wait_readable(descriptors: &[BorrowedFd<'_>], bound: Duration) -> io::Result<Vec<bool>> {
    let deadline = Instant::now() + bound;
    let mut set: Vec<PollFd<'_>> = descriptors
        .iter()
        .map(|fd| PollFd::new(*fd, PollFlags::POLLIN))
        .collect();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up, or a remainder below a millisecond would spin.
        let left_ms = left.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32;
        let timeout = PollTimeout::try_from(left_ms).unwrap_or(PollTimeout::ZERO);
        match poll(&mut set, timeout) {
            Ok(_) => break,
            Err(Errno::EINTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(set
        .iter()
        .map(|entry| entry.revents().is_some_and(|events| !events.is_empty()))
        .collect())
}

/// A descriptor that becomes readable when process `pid` ends.
pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two integers and touches no memory of ours.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Makes sure that a filter judges the system calls of process `pid`, a child that was
/// not reaped.
pub fn has_filter(pid: u32) -> io::Result<()> {
    // `SECCOMP_MODE_FILTER`.
    const FILTERED: &str = "2";
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let mode = status
        .lines()
        .find_map(|line| line.strip_prefix("Seccomp:"));
    match mode.map(str::trim) {
        Some(FILTERED) => Ok(()),
        _ => Err(io::Error::other("no filter judges its system calls")),
    }
}

/// Sends `signal` to the process behind a pidfd: never to a stranger that got
/// the same pid later. The signal may be a real-time one.
pub fn pidfd_signal(pidfd: impl AsFd, signal: i32) -> io::Result<()> {
    // SAFETY: integers and a null pointer, which the call documents as "no info".
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_fd().as_raw_fd(),
            signal,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// From now on nothing of this process's memory goes into a core file, and no other
/// process of its user may look at it: it holds a private key. What it executes later
/// is free of this.
pub fn keep_memory_private() -> io::Result<()> {
    // SAFETY: integers only.
    match unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the kernel probe a TCP peer each second and fail the connection when it
/// was silent for the lease. The peer's kernel answers, so a peer that is merely
/// stopped does not count as gone.
pub fn watch_peer(socket: impl AsFd, lease_ms: u32) -> io::Result<()> {
    use nix::sys::socket::{setsockopt, sockopt};
    let socket = socket.as_fd();
    setsockopt(&socket, sockopt::KeepAlive, &true)?;
    setsockopt(&socket, sockopt::TcpKeepIdle, &1)?;
    setsockopt(&socket, sockopt::TcpKeepInterval, &1)?;
    setsockopt(
        &socket,
        sockopt::TcpKeepCount,
        &lease_ms.div_ceil(1000).max(1),
    )?;
    setsockopt(&socket, sockopt::TcpUserTimeout, &lease_ms)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_arrives_whole_and_an_end_is_seen() {
        let (left, right) = packet_pair().unwrap();
        let mut buffer = [0; 64];
        assert_eq!(receive_packet(right.as_fd(), &mut buffer).unwrap(), None);
        send_with_descriptors(left.as_fd(), b"hello", &[left.as_raw_fd()]).unwrap();
        assert_eq!(receive_packet(right.as_fd(), &mut buffer).unwrap(), Some(5));
        drop(left);
        // A child of another test may hold it until it executes its program.
        wait_readable(&[right.as_fd()], Duration::from_secs(5)).unwrap();
        assert_eq!(receive_packet(right.as_fd(), &mut buffer).unwrap(), Some(0));
    }

    #[test]
    fn a_process_without_a_filter_is_told_from_one_with_it() {
        let mut child = std::process::Command::new("/bin/sleep")
            .arg("60")
            .spawn()
            .unwrap();
        // The tests themselves may run under a filter, which children inherit.
        let own = has_filter(std::process::id()).is_ok();
        assert_eq!(has_filter(child.id()).is_ok(), own);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(has_filter(child.id()).is_err());
    }

    #[test]
    fn waiting_is_bounded() {
        let (left, _right) = packet_pair().unwrap();
        let start = Instant::now();
        let ready = wait_readable(&[left.as_fd()], Duration::from_millis(30)).unwrap();
        assert_eq!(ready, [false]);
        assert!(start.elapsed() >= Duration::from_millis(30));
    }

    #[test]
    fn a_sealed_memfd_keeps_its_size() {
        let fd = sealed_memfd(c"test", 8192).unwrap();
        assert!(nix::unistd::ftruncate(&fd, 4096).is_err());
    }
}
