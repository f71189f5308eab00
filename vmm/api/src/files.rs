//! Open files that come with a request.
//!
//! A machine is confined and cannot open files. Its client opens them and attaches their
//! descriptors to an empty line before the request, which HTTP ignores (RFC 9112, 2.2).

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, RawFd};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
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

/// The files that came with the first byte, which stays to be read. Blocks never:
/// `WouldBlock` if nothing has come yet.
pub(super) fn peek(socket: BorrowedFd<'_>) -> io::Result<Vec<File>> {
    let mut byte = [0];
    let mut control = nix::cmsg_space!([RawFd; FILES_MAX]);
    let mut parts = [IoSliceMut::new(&mut byte)];
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
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
    fn files_come_with_the_first_byte_and_the_request_stays_whole() {
        let (mut client, mut server) = UnixStream::pair().unwrap();
        let early = peek(server.as_fd()).unwrap_err();
        assert_eq!(early.kind(), io::ErrorKind::WouldBlock);
        let (mut reader, writer) = io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        send(client.as_fd(), &[file]).unwrap();
        client.write_all(b"GET").unwrap();
        let mut files = peek(server.as_fd()).unwrap();
        assert_eq!(files.len(), 1);
        let mut request = [0; 5];
        server.read_exact(&mut request).unwrap();
        assert_eq!(&request, b"\r\nGET");
        files.remove(0).write_all(b"x").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
        client.write_all(b"more").unwrap();
        assert!(peek(server.as_fd()).unwrap().is_empty());
    }
}
