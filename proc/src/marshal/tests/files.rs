//! Files and descriptors.

use super::*;
use libc::*;
use std::ffi::CString;

fn file_with(content: &[u8], scenario: impl Fn(&Call, u64, &CString) -> Vec<i64>) {
    same(|call| {
        let (path, name) = scratch_file(content);
        let fd = call(
            SYS_openat,
            &[AT_FDCWD as u64, at(name.as_bytes()), O_RDWR as u64],
        );
        assert!(fd >= 0);
        let seen = scenario(call, fd as u64, &name);
        assert_eq!(call(SYS_close, &[fd as u64]), 0);
        let left = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        (seen, left)
    });
}

#[test]
fn read_and_write() {
    file_with(b"some text in a file", |call, fd, _| {
        let mut buffer = [0xaau8; 64];
        let read = call(SYS_read, &[fd, into(&mut buffer), 9]);
        assert_eq!(&buffer[..10], b"some text\xaa");
        let rest = call(SYS_read, &[fd, into(&mut buffer), 64]);
        assert_eq!(buffer[10], 0xaa, "more was written than produced");
        let written = call(SYS_write, &[fd, at(b"!!"), 2]);
        let at_end = call(SYS_read, &[fd, into(&mut buffer), 64]);
        let bad = call(SYS_read, &[u64::from(u32::MAX), into(&mut buffer), 64]);
        let nothing = call(SYS_write, &[fd, 0, 0]);
        vec![read, rest, written, at_end, bad, nothing]
    });
}

#[test]
fn positioned_and_vectored() {
    file_with(b"0123456789abcdef", |call, fd, _| {
        let (mut a, mut b, mut c) = ([0u8; 3], [0u8; 0], [0xaau8; 20]);
        let vector = [
            iovec {
                iov_base: a.as_mut_ptr().cast(),
                iov_len: 3,
            },
            iovec {
                iov_base: b.as_mut_ptr().cast(),
                iov_len: 0,
            },
            iovec {
                iov_base: c.as_mut_ptr().cast(),
                iov_len: 20,
            },
        ];
        let mut seen = vec![call(SYS_preadv, &[fd, at(&vector), 3, 5])];
        assert_eq!((&a, &c[..9]), (b"567", &b"89abcdef\xaa"[..]));
        seen.push(call(SYS_readv, &[fd, at(&vector), 1]));
        seen.push(call(SYS_preadv2, &[fd, at(&vector), 3, u64::MAX]));
        assert_eq!(a, *b"345");
        seen.push(call(SYS_pwritev, &[fd, at(&vector), 3, 30]));
        seen.push(call(SYS_writev, &[fd, at(&vector), 2]));
        seen.push(call(SYS_pwritev2, &[fd, at(&vector), 1, 2, 0, 0]));
        seen.push(call(SYS_pread64, &[fd, into(&mut c), 5, 14]));
        seen.push(call(SYS_pwrite64, &[fd, at(b"xyz"), 3, 100]));
        seen.push(call(SYS_readv, &[fd, at(&vector), 1025]));
        seen.push(call(SYS_readv, &[fd, 0, 1]));
        seen.push(call(SYS_readv, &[fd, 0, 0]));
        seen.push(call(SYS_lseek, &[fd, 0, SEEK_CUR as u64]));
        seen
    });
}

#[test]
fn what_is_known_of_a_file() {
    file_with(b"content", |call, fd, name| {
        let path = at(name.as_bytes());
        // Access times differ between runs; the rest is compared among the calls.
        let steady = |stat: &libc::stat| (stat.st_size, stat.st_mode, stat.st_nlink, stat.st_ino);
        let (mut one, mut two, mut three): (stat, stat, stat) = (zeroed(), zeroed(), zeroed());
        let mut seen = vec![
            call(SYS_stat, &[path, into(&mut one)]),
            call(SYS_fstat, &[fd, into(&mut two)]),
            call(
                SYS_newfstatat,
                &[
                    AT_FDCWD as u64,
                    path,
                    into(&mut three),
                    AT_SYMLINK_NOFOLLOW as u64,
                ],
            ),
        ];
        assert_eq!((one.st_size, steady(&one)), (7, steady(&two)));
        assert_eq!(steady(&one), steady(&three));
        let mut extended: statx = zeroed();
        let mask = u64::from(STATX_BASIC_STATS);
        seen.push(call(
            SYS_statx,
            &[AT_FDCWD as u64, path, 0, mask, into(&mut extended)],
        ));
        assert_eq!((extended.stx_size, extended.stx_ino), (7, one.st_ino));
        let mut system: statfs = zeroed();
        seen.push(call(SYS_statfs, &[path, into(&mut system)]));
        seen.extend([system.f_bsize, system.f_namelen]);
        let missing = c"/nonexistent/file";
        seen.push(call(SYS_stat, &[at(missing.to_bytes()), into(&mut one)]));
        seen.push(call(SYS_access, &[path, R_OK as u64]));
        seen.push(call(SYS_faccessat, &[AT_FDCWD as u64, path, X_OK as u64]));
        seen.push(call(SYS_ftruncate, &[fd, 3]));
        seen.push(call(SYS_truncate, &[path, 2]));
        let times: [timespec; 2] = [timespec {
            tv_sec: 1000,
            tv_nsec: 5,
        }; 2];
        seen.push(call(SYS_utimensat, &[AT_FDCWD as u64, path, at(&times), 0]));
        seen.push(call(SYS_fstat, &[fd, into(&mut two)]));
        seen.extend([two.st_mtime, two.st_mtime_nsec, two.st_size]);
        seen
    });
}

#[test]
fn names_and_directories() {
    same(|call| {
        let mut buffer = [0xaau8; 4096];
        let length = call(SYS_getcwd, &[into(&mut buffer), 4096]);
        let mut seen = buffer[..length as usize + 1].to_vec();
        seen.extend(call(SYS_getcwd, &[into(&mut buffer), 2]).to_le_bytes());
        let link = c"/proc/self/cwd";
        let length = call(
            SYS_readlink,
            &[at(link.to_bytes()), into(&mut buffer), 4096],
        );
        seen.extend(&buffer[..length as usize]);
        let length = call(
            SYS_readlinkat,
            &[AT_FDCWD as u64, at(link.to_bytes()), into(&mut buffer), 3],
        );
        assert_eq!(length, 3);
        let directory = c"/proc/self/attr";
        // The kernel leaves the padding between entries as it was.
        buffer.fill(0);
        let fd = call(
            SYS_open,
            &[at(directory.to_bytes()), (O_RDONLY | O_DIRECTORY) as u64],
        );
        loop {
            let length = call(SYS_getdents64, &[fd as u64, into(&mut buffer), 100]);
            seen.extend(length.to_le_bytes());
            if length <= 0 {
                break;
            }
            seen.extend(&buffer[..length as usize]);
        }
        assert_eq!(call(SYS_close, &[fd as u64]), 0);
        let endless = [b'x'; 5000];
        seen.extend(call(SYS_chdir, &[at(&endless)]).to_le_bytes());
        seen.extend(call(SYS_chdir, &[1]).to_le_bytes());
        seen
    });
}

#[test]
fn links_and_renames() {
    same(|call| {
        let (path, name) = scratch_file(b"x");
        let other = CString::new(format!("{}-other", path.display())).unwrap();
        let third = CString::new(format!("{}-third", path.display())).unwrap();
        let [one, two, three] = [&name, &other, &third].map(|n| at(n.as_bytes()));
        let cwd = AT_FDCWD as u64;
        [
            call(SYS_link, &[one, two]),
            call(SYS_linkat, &[cwd, one, cwd, three, 0]),
            call(SYS_rename, &[two, three]),
            call(SYS_renameat2, &[cwd, two, cwd, three, 0]),
            call(SYS_symlinkat, &[one, cwd, two]),
            call(SYS_unlinkat, &[cwd, two, 0]),
            call(SYS_unlink, &[two]),
            call(SYS_mkdir, &[two, 0o700]),
            call(SYS_rmdir, &[two]),
            call(SYS_chmod, &[one, 0o600]),
            call(SYS_unlink, &[three]),
            call(SYS_unlink, &[one]),
        ]
    });
}

#[test]
fn extended_attributes() {
    file_with(b"x", |call, fd, name| {
        let (path, attribute) = (at(name.as_bytes()), c"user.weft");
        let attribute = at(attribute.to_bytes());
        let mut buffer = [0xaau8; 64];
        let set = call(SYS_setxattr, &[path, attribute, at(b"value"), 5, 0]);
        let mut seen = vec![set];
        seen.push(call(SYS_getxattr, &[path, attribute, 0, 0]));
        seen.push(call(SYS_fgetxattr, &[fd, attribute, into(&mut buffer), 64]));
        seen.push(call(SYS_getxattr, &[path, attribute, into(&mut buffer), 2]));
        if set == 0 {
            assert_eq!(&buffer[..6], b"value\xaa");
            seen.push(call(SYS_removexattr, &[path, attribute]));
        }
        seen.push(call(SYS_flistxattr, &[fd, 0, 0]));
        seen
    });
}

#[test]
fn names_that_are_too_long_are_the_kernels_to_refuse() {
    same(|call| {
        let name = |length| CString::new(vec![b'n'; length]).unwrap();
        let mut seen = Vec::new();
        for length in [0, 249, 250, 255, 256, 300, 511, 512, 5000] {
            let name = name(length);
            let name = at(name.as_bytes_with_nul());
            let made = call(SYS_memfd_create, &[name, 0]);
            if made >= 0 {
                call(SYS_close, &[made as u64]);
            }
            seen.push(made.min(0));
            seen.push(call(SYS_getxattr, &[at(b"/\0"), name, 0, 0]));
            seen.push(call(SYS_setxattr, &[at(b"/\0"), name, at(b"v"), 1, 0]));
            seen.push(call(SYS_mq_unlink, &[name]));
        }
        seen
    });
}

#[test]
fn locks_and_descriptor_commands() {
    file_with(b"0123456789", |call, fd, _| {
        let mut lock: flock = zeroed();
        lock.l_type = F_WRLCK as i16;
        lock.l_len = 4;
        let mut seen = vec![call(SYS_fcntl, &[fd, F_OFD_SETLK as u64, at(&lock)])];
        let path = format!("/proc/self/fd/{fd}\0");
        let other = call(SYS_open, &[at(path.as_bytes()), O_RDWR as u64]) as u64;
        seen.push(call(SYS_fcntl, &[other, F_OFD_SETLK as u64, at(&lock)]));
        seen.push(call(
            SYS_fcntl,
            &[other, F_OFD_GETLK as u64, into(&mut lock)],
        ));
        seen.extend([
            lock.l_type.into(),
            lock.l_start,
            lock.l_len,
            lock.l_pid.into(),
        ]);
        lock = zeroed();
        lock.l_type = F_RDLCK as i16;
        seen.push(call(SYS_fcntl, &[fd, F_GETLK as u64, into(&mut lock)]));
        seen.push(lock.l_type.into());
        seen.push(call(SYS_close, &[other]));
        let copy = call(SYS_fcntl, &[fd, F_DUPFD_CLOEXEC as u64, 700]);
        seen.push(call(SYS_fcntl, &[copy as u64, F_GETFD as u64]));
        seen.push(call(SYS_fcntl, &[fd, F_GETFL as u64]));
        seen.push(call(SYS_close, &[copy as u64]));
        seen.push(call(SYS_flock, &[fd, LOCK_EX as u64]));
        seen
    });
}

#[test]
fn terminals() {
    same(|call| {
        let name = c"/dev/ptmx";
        let fd = call(SYS_open, &[at(name.to_bytes()), (O_RDWR | O_NOCTTY) as u64]) as u64;
        let mut state = [0xaau8; 60];
        let mut seen = vec![call(SYS_ioctl, &[fd, TCGETS, into(&mut state)])];
        assert_eq!(state[36], 0xaa, "the kernel's termios has 36 bytes");
        let mut size: winsize = winsize {
            ws_row: 30,
            ws_col: 90,
            ws_xpixel: 1,
            ws_ypixel: 2,
        };
        seen.push(call(SYS_ioctl, &[fd, TIOCSWINSZ, at(&size)]));
        size.ws_row = 0;
        seen.push(call(SYS_ioctl, &[fd, TIOCGWINSZ, into(&mut size)]));
        seen.extend([size.ws_row, size.ws_col].map(i64::from));
        let mut number = -1i32;
        seen.push(call(SYS_ioctl, &[fd, TIOCGPTN, into(&mut number)]));
        assert!(number >= 0);
        seen.push(call(SYS_ioctl, &[fd, TIOCSPTLCK, at(&0i32)]));
        seen.push(call(SYS_ioctl, &[fd, TCSETS, at(&state)]));
        seen.push(call(SYS_ioctl, &[fd, FIONREAD, into(&mut number)]));
        seen.push(call(SYS_ioctl, &[fd, FIONBIO, at(&1i32)]));
        seen.push(call(SYS_ioctl, &[fd, FIOCLEX]));
        seen.push(call(SYS_ioctl, &[fd, TCGETS, 8]));
        assert_eq!(call(SYS_close, &[fd]), 0);
        seen.extend(state[..36].iter().map(|&byte| i64::from(byte)));
        seen
    });
}

#[test]
fn copying_between_descriptors() {
    same(|call| {
        let (path, name) = scratch_file(b"0123456789");
        let (other_path, other) = scratch_file(b"");
        let from = call(SYS_open, &[at(name.as_bytes()), O_RDONLY as u64]) as u64;
        let to = call(SYS_open, &[at(other.as_bytes()), O_RDWR as u64]) as u64;
        let mut offset = 3i64;
        let mut seen = vec![
            call(SYS_sendfile, &[to, from, into(&mut offset), 4]),
            offset,
        ];
        let mut out = 8i64;
        let copied = call(
            SYS_copy_file_range,
            &[from, into(&mut offset), to, into(&mut out), 2, 0],
        );
        seen.extend([copied, offset, out]);
        for fd in [from, to] {
            assert_eq!(call(SYS_close, &[fd]), 0);
        }
        let content = std::fs::read(&other_path).unwrap();
        std::fs::remove_file(path).unwrap();
        std::fs::remove_file(other_path).unwrap();
        (seen, content)
    });
}

#[test]
fn direct_input_and_output_keep_their_alignment() {
    same(|call| {
        let (path, name) = scratch_file(&[7; 8192]);
        let fd = call(SYS_open, &[at(name.as_bytes()), (O_RDWR | O_DIRECT) as u64]);
        let mut seen = vec![];
        if fd >= 0 {
            let mut buffer = super::buffer();
            seen.push(call(
                SYS_pread64,
                &[fd as u64, into(&mut buffer.0), 4096, 4096],
            ));
            seen.push(i64::from(buffer.0[100]));
            seen.push(call(SYS_pwrite64, &[fd as u64, at(&buffer.0), 512, 0]));
            assert_eq!(call(SYS_close, &[fd as u64]), 0);
        } else {
            // A file system without O_DIRECT says so.
            seen.push(fd);
        }
        std::fs::remove_file(path).unwrap();
        seen
    });
}
