//! Sockets and waiting for descriptors.

use super::*;
use libc::*;

/// A connected pair of UNIX sockets.
fn pair(call: &Call, kind: i32) -> [u64; 2] {
    let mut fds = [0i32; 2];
    let made = call(
        SYS_socketpair,
        &[AF_UNIX as u64, kind as u64, 0, into(&mut fds)],
    );
    assert_eq!(made, 0);
    fds.map(|fd| fd as u64)
}

fn close_all(call: &Call, fds: &[u64]) {
    for &fd in fds {
        assert_eq!(call(SYS_close, &[fd]), 0);
    }
}

#[test]
fn messages_with_descriptors() {
    same(|call| {
        let [a, b] = pair(call, SOCK_DGRAM);
        let (mut one, mut two) = (*b"hello ", *b"world");
        let mut vector = [
            iovec {
                iov_base: one.as_mut_ptr().cast(),
                iov_len: 6,
            },
            iovec {
                iov_base: two.as_mut_ptr().cast(),
                iov_len: 5,
            },
        ];
        // One descriptor: header of 16 bytes, 4 of data, 4 of padding.
        let mut control = [0u64; 3];
        control[0] = 20;
        control[1] = SOL_SOCKET as u64 | (SCM_RIGHTS as u64) << 32;
        control[2] = a;
        let mut message: msghdr = zeroed();
        message.msg_iov = vector.as_mut_ptr();
        message.msg_iovlen = 2;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = 24;
        let mut seen = vec![call(SYS_sendmsg, &[a, at(&message), 0])];

        let (mut first, mut rest) = ([0xaau8; 4], [0xaau8; 20]);
        let mut places = [
            iovec {
                iov_base: first.as_mut_ptr().cast(),
                iov_len: 4,
            },
            iovec {
                iov_base: rest.as_mut_ptr().cast(),
                iov_len: 20,
            },
        ];
        message.msg_iov = places.as_mut_ptr();
        let mut got = [0xaaaa_aaaa_aaaa_aaaau64; 6];
        message.msg_control = got.as_mut_ptr().cast();
        message.msg_controllen = 48;
        let mut name = [0xaau8; 16];
        message.msg_name = name.as_mut_ptr().cast();
        message.msg_namelen = 16;
        seen.push(call(
            SYS_recvmsg,
            &[b, into(&mut message), MSG_CMSG_CLOEXEC as u64],
        ));
        assert_eq!((&first, &rest[..8]), (b"hell", &b"o world\xaa"[..]));
        let passed = got[2] & 0xffff_ffff;
        assert_eq!(
            call(SYS_fcntl, &[passed, F_GETFD as u64]),
            i64::from(FD_CLOEXEC)
        );
        close_all(call, &[a, b, passed]);
        seen.extend([
            message.msg_controllen as i64,
            message.msg_flags.into(),
            message.msg_namelen.into(),
            got[0] as i64,
            got[1] as i64,
            got[3] as i64,
            name[0].into(),
        ]);
        seen
    });
}

#[test]
fn truncated_and_peeked_messages() {
    same(|call| {
        let [a, b] = pair(call, SOCK_DGRAM);
        let mut seen = vec![call(SYS_sendto, &[a, at(b"0123456789"), 10, 0, 0, 0])];
        let mut buffer = [0xaau8; 4];
        let flags = (MSG_PEEK | MSG_TRUNC) as u64;
        seen.push(call(SYS_recvfrom, &[b, into(&mut buffer), 4, flags, 0, 0]));
        assert_eq!(&buffer, b"0123");
        let mut vector = iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: 2,
        };
        let mut message: msghdr = zeroed();
        message.msg_iov = &mut vector;
        message.msg_iovlen = 1;
        seen.push(call(SYS_recvmsg, &[b, into(&mut message), 0]));
        seen.push(message.msg_flags.into());
        message.msg_iovlen = 1025;
        seen.push(call(
            SYS_recvmsg,
            &[b, into(&mut message), MSG_DONTWAIT as u64],
        ));
        seen.push(call(SYS_recvmsg, &[b, 0, 0]));
        close_all(call, &[a, b]);
        seen
    });
}

#[test]
fn addresses_and_options() {
    same(|call| {
        let server = call(SYS_socket, &[AF_INET as u64, SOCK_STREAM as u64, 0]) as u64;
        let mut address: sockaddr_in = zeroed();
        address.sin_family = AF_INET as u16;
        address.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
        let mut seen = vec![call(SYS_bind, &[server, at(&address), 16])];
        seen.push(call(SYS_listen, &[server, 1]));
        let mut length = 16u32;
        seen.push(call(
            SYS_getsockname,
            &[server, into(&mut address), into(&mut length)],
        ));
        assert!(address.sin_port != 0 && length == 16);
        let client = call(SYS_socket, &[AF_INET as u64, SOCK_STREAM as u64, 0]) as u64;
        seen.push(call(SYS_connect, &[client, at(&address), 16]));
        // Room for a part of the address only.
        let mut peer = [0xaau8; 16];
        let mut length = 2u32;
        let accepted = call(
            SYS_accept4,
            &[
                server,
                into(&mut peer),
                into(&mut length),
                SOCK_CLOEXEC as u64,
            ],
        );
        assert!(accepted >= 0);
        seen.extend([length, peer[0].into(), peer[2].into()].map(i64::from));
        let accepted = accepted as u64;
        let mut value = 0i32;
        let mut length = 4u32;
        let option = [
            SOL_SOCKET as u64,
            SO_TYPE as u64,
            into(&mut value),
            into(&mut length),
        ];
        seen.push(call(
            SYS_getsockopt,
            &[client, option[0], option[1], option[2], option[3]],
        ));
        seen.extend([i64::from(value), i64::from(length)]);
        let on = 1i32;
        let (level, name) = (IPPROTO_TCP as u64, TCP_NODELAY as u64);
        seen.push(call(SYS_setsockopt, &[client, level, name, at(&on), 4]));
        let mut info = [0xaau8; 400];
        let mut length = 400u32;
        let name = TCP_INFO as u64;
        seen.push(call(
            SYS_getsockopt,
            &[client, level, name, into(&mut info), into(&mut length)],
        ));
        seen.extend([length, info[0].into()].map(i64::from));
        assert_eq!(info[length as usize], 0xaa);
        seen.push(call(SYS_getpeername, &[client, into(&mut peer), 0]));
        seen.push(call(
            SYS_setsockopt,
            &[client, level, TCP_NODELAY as u64, at(&on), 2],
        ));
        seen.push(call(SYS_write, &[client, at(b"x"), 1]));
        let mut length = 16u32;
        seen.push(call(
            SYS_recvfrom,
            &[
                accepted,
                into(&mut info),
                9,
                0,
                into(&mut peer),
                into(&mut length),
            ],
        ));
        seen.push(length.into());
        seen.push(call(SYS_shutdown, &[client, SHUT_RDWR as u64]));
        close_all(call, &[server, client, accepted]);
        seen
    });
}

#[test]
fn polling() {
    same(|call| {
        let mut fds = [0i32; 2];
        assert_eq!(call(SYS_pipe2, &[into(&mut fds), O_CLOEXEC as u64]), 0);
        let [reader, writer] = fds.map(|fd| fd as u64);
        let mut polled = [
            pollfd {
                fd: fds[0],
                events: POLLIN,
                revents: 77,
            },
            pollfd {
                fd: fds[1],
                events: POLLOUT,
                revents: 77,
            },
            pollfd {
                fd: -1,
                events: POLLIN,
                revents: 77,
            },
        ];
        let mut seen = vec![call(SYS_poll, &[into(&mut polled), 3, 0])];
        seen.extend(polled.iter().map(|p| i64::from(p.revents)));
        assert_eq!(call(SYS_write, &[writer, at(b"x"), 1]), 1);
        let mut timeout = timespec {
            tv_sec: 5,
            tv_nsec: 0,
        };
        let mask = 1u64 << (SIGUSR1 - 1);
        let arguments = [into(&mut polled), 2, into(&mut timeout), at(&mask), 8];
        seen.push(call(SYS_ppoll, &arguments));
        seen.extend(polled.iter().map(|p| i64::from(p.revents)));
        assert!(
            timeout.tv_sec == 4 && timeout.tv_nsec > 0,
            "the time left is told"
        );
        seen.push(call(
            SYS_ppoll,
            &[into(&mut polled), 2, into(&mut timeout), at(&mask), 4],
        ));

        let mut set = [u64::MAX; 16];
        set[0] = 1 << reader | 1 << writer;
        assert!(writer < 64);
        let mut writable = set;
        let mut timeout = timeval {
            tv_sec: 5,
            tv_usec: 0,
        };
        let highest = writer + 1;
        let arguments = [
            highest,
            into(&mut set),
            into(&mut writable),
            0,
            into(&mut timeout),
        ];
        seen.push(call(SYS_select, &arguments));
        assert_eq!((set[0], writable[0]), (1 << reader, 1 << writer));
        assert_eq!((set[1], timeout.tv_sec), (u64::MAX, 4));
        let packed = [at(&mask), 8];
        let timeout = timespec {
            tv_sec: 0,
            tv_nsec: 1000,
        };
        set[0] = 1 << writer;
        let arguments = [highest, into(&mut set), 0, 0, at(&timeout), at(&packed)];
        seen.push(call(SYS_pselect6, &arguments));
        assert_eq!(set[0], 0);
        let none = [0u64, 8];
        seen.push(call(SYS_pselect6, &[0, 0, 0, 0, at(&timeout), at(&none)]));
        close_all(call, &[reader, writer]);
        seen
    });
}

#[test]
fn event_polling() {
    same(|call| {
        let poll = call(SYS_epoll_create1, &[0]) as u64;
        let event = call(SYS_eventfd2, &[3, 0]) as u64;
        let mut wanted = [EPOLLIN as u32, 0x1234, 0x5678];
        let mut seen = vec![call(
            SYS_epoll_ctl,
            &[poll, EPOLL_CTL_ADD as u64, event, at(&wanted)],
        )];
        let mut events = [0xaaaa_aaaau32; 12];
        seen.push(call(SYS_epoll_wait, &[poll, into(&mut events), 4, 0]));
        seen.extend(events.map(i64::from));
        let mask = 0u64;
        seen.push(call(
            SYS_epoll_pwait,
            &[poll, into(&mut events), 4, 0, at(&mask), 8],
        ));
        let timeout: timespec = zeroed();
        seen.push(call(
            SYS_epoll_pwait2,
            &[poll, into(&mut events), 4, at(&timeout), at(&mask), 8],
        ));
        wanted[0] = EPOLLOUT as u32 | EPOLLONESHOT as u32;
        seen.push(call(
            SYS_epoll_ctl,
            &[poll, EPOLL_CTL_MOD as u64, event, at(&wanted)],
        ));
        // The pointer of a removal is never looked at.
        seen.push(call(SYS_epoll_ctl, &[poll, EPOLL_CTL_DEL as u64, event, 1]));
        seen.push(call(SYS_epoll_wait, &[poll, into(&mut events), 4, 0]));
        close_all(call, &[poll, event]);
        seen
    });
}
