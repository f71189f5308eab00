//! A switch (`weft switch`), at its UNIX socket.
//!
//! States: plugged ⇄ unplugged. The card connects once, when it is opened. Later its thread may
//! open no connection, since it is confined; so a switch that was started again opens it. For
//! that each card has a socket beside the switch's, `SOCKET.` and 16 hexadecimal digits, from
//! which it accepts while it is unplugged.

use std::collections::hash_map::RandomState;
use std::ffi::OsString;
use std::fmt::{self, Debug, Formatter};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use weft_confine::lock;
use weft_guest_memory::DeviceMemory;

use super::{Cable, Link, NetError, Stream};
use crate::ring::Segment;

/// Connections that wait for the card.
const BACKLOG: libc::c_int = 4;
/// Connections that are looked at in one call. Fewer wait, and some of them may have ended.
const ACCEPTED: usize = 8;

/// The card's end.
pub struct SwitchLink {
    /// Readable when one of the two is.
    ready: Epoll,
    stream: Option<Stream>,
    /// It is another since [`Link::cable`] was asked.
    new: bool,
    /// Without it the link stays unplugged once it is.
    door: Option<Door>,
}

/// A card's end that is connected before there is a card. The first card that is made with it
/// takes it. The default has none.
#[derive(Clone, Default)]
pub struct OpenSwitch(Arc<Mutex<Option<SwitchLink>>>);

impl OpenSwitch {
    /// Connects to the switch at a socket.
    ///
    /// # Errors
    /// No switch answers there.
    pub fn connect(path: &Path) -> Result<Self, NetError> {
        let link = open(path)?;
        Ok(Self(Arc::new(Mutex::new(Some(link)))))
    }

    pub(super) fn take(&self) -> Result<SwitchLink, NetError> {
        lock(&self.0).take().ok_or(NetError::NotConnected)
    }
}

impl Debug for OpenSwitch {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("OpenSwitch").finish_non_exhaustive()
    }
}

/// Connects to the switch.
pub fn open(path: &Path) -> Result<SwitchLink, NetError> {
    let socket = UnixStream::connect(path).map_err(|source| NetError::NoSwitch {
        path: path.to_path_buf(),
        source,
    })?;
    let ready = Epoll::new().map_err(NetError::Socket)?;
    // Its directory may not be writable for the machine's user.
    let door = Door::open(path).ok();
    if let Some(door) = &door {
        let event = EpollEvent::new(EventSet::IN, 0);
        let descriptor = door.listener.as_raw_fd();
        let added = ready.ctl(ControlOperation::Add, descriptor, event);
        added.map_err(NetError::Socket)?;
    }
    let mut link = SwitchLink {
        ready,
        stream: None,
        new: false,
        door,
    };
    link.plug(socket).map_err(NetError::Socket)?;
    Ok(link)
}

impl SwitchLink {
    fn plug(&mut self, socket: UnixStream) -> io::Result<()> {
        let stream = Stream::new(socket)?;
        let events = EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED;
        let event = EpollEvent::new(events, 1);
        self.ready
            .ctl(ControlOperation::Add, stream.descriptor(), event)?;
        self.stream = Some(stream);
        Ok(())
    }

    /// The switch's end, if there is one, also one that has just called.
    fn stream(&mut self) -> Option<&mut Stream> {
        for _ in 0..ACCEPTED {
            if self.stream.is_some() {
                break;
            }
            // What fails now is tried again with the next event.
            let (socket, _) = self.door.as_ref()?.listener.accept().ok()?;
            self.new = self.plug(socket).is_ok();
        }
        self.stream.as_mut()
    }

    /// Does it with the stream; what ends the stream unplugs the card.
    fn with<T>(
        &mut self,
        unplugged: T,
        work: impl FnOnce(&mut Stream) -> io::Result<T>,
    ) -> io::Result<T> {
        let Some(stream) = self.stream.as_mut() else {
            return Ok(unplugged);
        };
        match work(stream) {
            Err(error)
                if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                self.stream = None;
                Ok(unplugged)
            }
            done => done,
        }
    }
}

impl Link for SwitchLink {
    fn descriptor(&self) -> RawFd {
        self.ready.as_raw_fd()
    }

    fn receive(&mut self, frame: &mut [u8]) -> io::Result<Option<usize>> {
        for _ in 0..ACCEPTED {
            if self.stream().is_none() {
                return Ok(None);
            }
            let received = self.with(None, |stream| stream.receive(frame))?;
            // If it has ended, another connection may wait, for which no event comes any more.
            if self.stream.is_some() {
                return Ok(received);
            }
        }
        Ok(None)
    }

    fn read_ahead(&mut self) -> io::Result<()> {
        self.with((), Stream::read_ahead)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.with((), Stream::flush)
    }

    fn send(&mut self, memory: &DeviceMemory, frame: &[Segment]) -> io::Result<()> {
        self.with((), |stream| stream.send(memory, frame))
    }

    fn send_bytes(&mut self, frame: &[u8]) -> io::Result<()> {
        self.with((), |stream| stream.send_bytes(frame))
    }

    fn give_back(&mut self, frame: Option<&[u8]>) -> bool {
        self.stream
            .as_mut()
            .is_some_and(|stream| stream.give_back(frame))
    }

    fn waiting(&mut self) -> Vec<Vec<u8>> {
        self.stream.as_mut().map_or(Vec::new(), Stream::waiting)
    }

    fn put_first(&mut self, frames: Vec<Vec<u8>>) {
        if let Some(stream) = &mut self.stream {
            stream.put_first(frames);
        }
    }

    fn may_be_pulled(&self) -> bool {
        true
    }

    fn cable(&mut self) -> Option<Cable> {
        let new = std::mem::take(&mut self.new);
        Some(match self.stream {
            None => Cable::Out,
            Some(_) if new => Cable::New,
            Some(_) => Cable::In,
        })
    }
}

/// Where the switch calls.
struct Door {
    listener: UnixListener,
    path: PathBuf,
}

impl Door {
    fn open(switch: &Path) -> io::Result<Door> {
        let number = RandomState::new().build_hasher().finish();
        let mut path = OsString::from(switch);
        path.push(format!(".{number:016x}"));
        let path = PathBuf::from(path);
        let listener = private_listener(&path)?;
        let door = Door { listener, path };
        door.listener.set_nonblocking(true)?;
        Ok(door)
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // Where the thread may not, the next switch does.
        if !weft_confine::is_prepared() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A socket for its user only, from its first moment.
fn private_listener(path: &Path) -> io::Result<UnixListener> {
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: the address is plain numbers, for which zero is a value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if bytes.len() >= address.sun_path.len() {
        return Err(ErrorKind::InvalidFilename.into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    // SAFETY: no memory is involved.
    let made = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made for us alone; it is a socket.
    let listener = unsafe { UnixListener::from_raw_fd(made) };
    let checked = |result| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // The file gets the mode of the socket (unix_bind_bsd in the kernel's net/unix).
    // SAFETY: no memory is involved.
    checked(unsafe { libc::fchmod(made, 0o600) })?;
    let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address is whole and outlives the call.
    checked(unsafe { libc::bind(made, (&raw const address).cast(), length) })?;
    // SAFETY: no memory is involved.
    checked(unsafe { libc::listen(made, BACKLOG) })?;
    Ok(listener)
}
