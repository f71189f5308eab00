//! Open files that come with a request.
//!
//! A machine is confined and cannot open files. Its client opens them and attaches their
//! descriptors to an empty line before the request, which HTTP ignores (RFC 9112, 2.2).

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, RawFd};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recv, recvmsg, sendmsg};
use weft_checkpoint::FILES_MAX;

const EMPTY_LINE: &[u8] = b"\r\n";

/// Sends the files that belong to the next request.
pub(super) fn send(socket: BorrowedFd<'_>, files: &[File]) -> io::Result<()> {
    let descriptors: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    let line = [IoSlice::new(EMPTY_LINE)];
    match sendmsg::<()>(socket.as_raw_fd(), &line, &rights, flags, None)? {
        sent if sent == EMPTY_LINE.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// The files that came with the empty line before a request, which is taken out; none if the
/// request has no such line. Blocks never: `WouldBlock` if nothing has come yet.
///
/// The line is not left for HTTP to ignore: the kernel ends a read where descriptors end, and
/// tokio takes a short read for an empty socket. A request that had come by then would wait
/// for more bytes, and none come.
pub(super) fn receive(socket: BorrowedFd<'_>) -> io::Result<Vec<File>> {
    let mut bytes = [0; EMPTY_LINE.len()];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK;
    let seen = recv(socket.as_raw_fd(), &mut bytes, flags)?;
    if bytes[..seen] != *EMPTY_LINE {
        return Ok(Vec::new());
    }
    let mut control = nix::cmsg_space!([RawFd; FILES_MAX]);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
    let mut files = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(descriptors) = part {
            // SAFETY: the kernel has just made these descriptors for this call.
            let own = |fd: &RawFd| unsafe { File::from_raw_fd(*fd) };
            files.extend(descriptors.iter().map(own));
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn files_come_with_an_empty_line_and_the_request_stays_whole() {
        let (mut client, mut server) = UnixStream::pair().unwrap();
        let early = receive(server.as_fd()).unwrap_err();
        assert_eq!(early.kind(), io::ErrorKind::WouldBlock);
        let (mut reader, writer) = io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        send(client.as_fd(), &[file]).unwrap();
        client.write_all(b"GET").unwrap();
        let mut files = receive(server.as_fd()).unwrap();
        assert_eq!(files.len(), 1);
        assert!(receive(server.as_fd()).unwrap().is_empty());
        let mut request = [0; 3];
        server.read_exact(&mut request).unwrap();
        assert_eq!(&request, b"GET");
        files.remove(0).write_all(b"x").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }
}
