//! Waiting: spin for a bounded time, then block, for one link or for several.

use super::{Awaited, Filled, Link, Transport};
use crate::LinkError;
use crate::error::{Class, class};
use crate::frame::Header;
use crate::sys::{self, PollFd};

/// Links that one [`wait_any`] may watch.
pub const WAIT_MAX: usize = 64;
/// A receive timeout below this is not worth a socket option.
const SOCKET_TIMEOUT_NS_MIN: u64 = 1 << 21;

/// How a wait over several links ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// The link at this index has something: a frame, part of one, or its end.
    /// [`Link::try_receive`] says which.
    Ready(usize),
    /// A signal was delivered.
    Interrupted,
    /// The time passed.
    Timeout,
}

enum Blocked {
    Ready,
    Timeout,
    Interrupted,
}

impl Link {
    /// Waits for the next frame: looks, spins, blocks. Reads no clock before it
    /// has to wait a second time.
    pub(super) fn await_frame(
        &mut self,
        timeout_ns: u64,
        mask: Option<u64>,
    ) -> Result<Awaited, LinkError> {
        if timeout_ns == 0 && mask.is_none() {
            let found = self.poll()?;
            return Ok(found.map_or(Awaited::Timeout, Awaited::Frame));
        }
        // A blocking receive looks by itself; everything else looks first.
        let found = if self.blocks_in_receive(timeout_ns, mask) {
            self.at_hand()?
        } else {
            self.poll()?
        };
        if let Some(header) = found {
            return Ok(Awaited::Frame(header));
        }
        let mut spinner = self.receive_spinner;
        let spun = spinner.spin(timeout_ns, || self.poll().transpose());
        self.receive_spinner = spinner;
        if let Some(found) = spun {
            return found.map(Awaited::Frame);
        }
        self.block_for_frame(timeout_ns, mask)
    }

    fn block_for_frame(
        &mut self,
        timeout_ns: u64,
        mask: Option<u64>,
    ) -> Result<Awaited, LinkError> {
        let start = sys::ticks();
        let mut left_ns = timeout_ns;
        let mut end_ns = None;
        loop {
            let blocked = self.block(left_ns, mask)?;
            let found = match blocked {
                // A frame may have come just when the time passed.
                Blocked::Ready | Blocked::Timeout => self.poll_after_block()?,
                Blocked::Interrupted => self.at_hand()?,
            };
            if let Some(header) = found {
                self.receive_spinner
                    .blocked(sys::ticks().wrapping_sub(start));
                return Ok(Awaited::Frame(header));
            }
            let now_ns = sys::now_ns();
            let waited_ns = match blocked {
                Blocked::Interrupted => return Ok(Awaited::Interrupted),
                Blocked::Ready => 0,
                Blocked::Timeout => self.waited_ns(left_ns, mask),
            };
            let end_ns = *end_ns.get_or_insert(now_ns.saturating_add(timeout_ns - waited_ns));
            left_ns = end_ns.saturating_sub(now_ns);
            if left_ns == 0 {
                return Ok(Awaited::Timeout);
            }
        }
    }

    /// What the kernel waited, at least, when it says that the time passed.
    fn waited_ns(&self, asked_ns: u64, mask: Option<u64>) -> u64 {
        if self.blocks_in_receive(asked_ns, mask) {
            self.socket_timeout_ns.min(asked_ns)
        } else {
            asked_ns
        }
    }

    /// Whether [`Link::block`] waits in the receive itself.
    fn blocks_in_receive(&self, timeout_ns: u64, mask: Option<u64>) -> bool {
        mask.is_none()
            && !self.socket_never_blocks
            && timeout_ns >= self.blocking_ns_min()
            && !self.end_of_stream
            && !matches!(self.transport, Transport::Ring { .. })
    }

    /// The shortest wait that blocks in the receive, nanoseconds.
    fn blocking_ns_min(&self) -> u64 {
        if self.socket_timeout_stays {
            self.socket_timeout_ns
        } else {
            SOCKET_TIMEOUT_NS_MIN
        }
    }

    /// What blocking brought: it may have received by itself.
    fn poll_after_block(&mut self) -> Result<Option<Header>, LinkError> {
        match self.at_hand()? {
            None => self.poll(),
            found => Ok(found),
        }
    }

    /// Blocks until something arrives, a signal comes or the time passes. May
    /// return early for no reason.
    fn block(&mut self, timeout_ns: u64, mask: Option<u64>) -> Result<Blocked, LinkError> {
        if let Transport::Ring { rings, bell } = &mut self.transport {
            let bell = *bell;
            rings.asleep(false);
            let blocked = match rings.available() {
                Ok(0) => poll_one(bell, timeout_ns, mask),
                Ok(_) => Ok(Blocked::Ready),
                Err(error) => Err(error),
            };
            rings.awake();
            let blocked = blocked.map_err(|error| self.end(error))?;
            if let Blocked::Ready = blocked {
                self.silence_bell(bell)?;
            }
            return Ok(blocked);
        }
        if self.blocks_in_receive(timeout_ns, mask) {
            return self.block_in_receive(timeout_ns);
        }
        poll_one(self.fd(), timeout_ns, mask).map_err(|error| self.end(error))
    }

    /// Blocks in the receive itself: one system call less after the wake-up
    /// than polling first.
    fn block_in_receive(&mut self, timeout_ns: u64) -> Result<Blocked, LinkError> {
        // The option is set anew only when the last one would wake too late,
        // or much too early.
        let set_ns = self.socket_timeout_ns;
        let fits = set_ns <= timeout_ns && set_ns >= timeout_ns / 8;
        if !fits && !self.socket_timeout_stays {
            let fit_ns = 1u64 << timeout_ns.min(1 << 42).ilog2();
            sys::set_receive_timeout(self.fd(), fit_ns)
                .map_err(|errno| self.end(LinkError::from_errno("setsockopt", errno)))?;
            self.socket_timeout_ns = fit_ns;
        }
        match self.fill(0)? {
            Filled::Interrupted => Ok(Blocked::Interrupted),
            Filled::Nothing if !self.end_of_stream => Ok(Blocked::Timeout),
            _ => Ok(Blocked::Ready),
        }
    }

    /// Takes the bells that rang; finds the end of the peer.
    pub(super) fn silence_bell(&mut self, bell: i32) -> Result<(), LinkError> {
        let mut bells = [0u8; 64];
        // SAFETY: a live local of this size.
        match unsafe { sys::receive(bell, bells.as_mut_ptr(), bells.len(), sys::MSG_DONTWAIT) } {
            Ok(0) => self.end_of_stream = true,
            Ok(_) => {}
            Err(errno) => match class(errno) {
                Class::WouldBlock | Class::Interrupted => {}
                Class::Gone => self.end_of_stream = true,
                Class::Fatal => return Err(self.end(LinkError::from_errno("recvfrom", errno))),
            },
        }
        Ok(())
    }

    /// Whether [`Link::try_receive`] would say something, as far as can be told
    /// without a system call.
    fn is_ready(&mut self) -> bool {
        if self.ended.is_some() || self.end_of_stream {
            return true;
        }
        if let Transport::Ring { rings, .. } = &mut self.transport
            && rings.available() != Ok(0)
        {
            return true;
        }
        self.buffer.complete() != Ok(None)
    }
}

fn poll_one(fd: i32, timeout_ns: u64, mask: Option<u64>) -> Result<Blocked, LinkError> {
    let mut fds = [watch(fd)];
    match sys::ppoll(&mut fds, timeout_ns, mask) {
        Ok(0) => Ok(Blocked::Timeout),
        Ok(_) => Ok(Blocked::Ready),
        Err(errno) => match class(errno) {
            Class::Interrupted => Ok(Blocked::Interrupted),
            _ => Err(LinkError::from_errno("ppoll", errno)),
        },
    }
}

fn watch(fd: i32) -> PollFd {
    PollFd {
        fd,
        events: sys::POLLIN,
        revents: 0,
    }
}

/// Waits until one of several links has something to receive. `mask` is the
/// signal mask for the time it blocks, as in [`Link::receive_masked`]. A link
/// that already has a frame, or has ended, is reported at once and without
/// letting signals in. A caller that wants to be fair asks every link with
/// [`Link::try_receive`] after each wait; one whose link has ended takes it out
/// of the slice, or it is reported for ever.
///
/// # Errors
/// More than [`WAIT_MAX`] links, or a failure of the wait itself; never the
/// end of a link.
pub fn wait_any(
    links: &mut [Option<Link>],
    timeout_ns: u64,
    mask: Option<u64>,
) -> Result<Wake, LinkError> {
    if links.len() > WAIT_MAX {
        return Err(LinkError::Configuration("too many links in one wait"));
    }
    if let Some(index) = first_ready(links) {
        return Ok(Wake::Ready(index));
    }
    let mut fds = [watch(-1); WAIT_MAX];
    let fds = &mut fds[..links.len()];
    let spun = spin_on_all(links, fds, timeout_ns);
    if let Some(wake) = spun {
        return wake;
    }
    for (slot, link) in fds.iter_mut().zip(links.iter()) {
        slot.fd = link.as_ref().map_or(-1, Link::fd);
    }
    let start = sys::ticks();
    let wake = block_on_all(links, fds, timeout_ns, mask);
    if let Some(link) = links.iter_mut().flatten().next() {
        link.receive_spinner
            .blocked(sys::ticks().wrapping_sub(start));
    }
    wake
}

/// Looks at the rings' indices, and at the sockets with polls that do not wait.
/// One spinner learns for all: that of the first link.
fn spin_on_all(
    links: &mut [Option<Link>],
    fds: &mut [PollFd],
    timeout_ns: u64,
) -> Option<Result<Wake, LinkError>> {
    let mut sockets = 0;
    for (slot, link) in fds.iter_mut().zip(links.iter()) {
        if let Some(Transport::Stream { fd } | Transport::Sealed { fd, .. }) =
            link.as_ref().map(|link| &link.transport)
        {
            slot.fd = *fd;
            sockets += 1;
        }
    }
    let mut spinner = links.iter().flatten().next()?.receive_spinner;
    let spun = spinner.spin(timeout_ns, || {
        if let Some(index) = first_ready(links) {
            return Some(Ok(Wake::Ready(index)));
        }
        if sockets == 0 {
            return None;
        }
        match sys::ppoll(fds, 0, None) {
            Ok(0) => None,
            Ok(_) => fds
                .iter()
                .position(|slot| slot.revents != 0)
                .map(|index| Ok(Wake::Ready(index))),
            Err(errno) if class(errno) == Class::Interrupted => Some(Ok(Wake::Interrupted)),
            Err(errno) => Some(Err(LinkError::from_errno("ppoll", errno))),
        }
    });
    if let Some(link) = links.iter_mut().flatten().next() {
        link.receive_spinner = spinner;
    }
    spun
}

fn first_ready(links: &mut [Option<Link>]) -> Option<usize> {
    links
        .iter_mut()
        .position(|link| link.as_mut().is_some_and(Link::is_ready))
}

/// Waits in the kernel until something came, however often a bell rings for
/// nothing.
fn block_on_all(
    links: &mut [Option<Link>],
    fds: &mut [PollFd],
    timeout_ns: u64,
    mask: Option<u64>,
) -> Result<Wake, LinkError> {
    let end_ns = sys::now_ns().saturating_add(timeout_ns);
    let mut left_ns = timeout_ns;
    loop {
        let wake = poll_all(links, fds, left_ns, mask)?;
        left_ns = end_ns.saturating_sub(sys::now_ns());
        if wake != Wake::Timeout || left_ns == 0 {
            return Ok(wake);
        }
    }
}

/// One wait in the kernel over all links.
fn poll_all(
    links: &mut [Option<Link>],
    fds: &mut [PollFd],
    timeout_ns: u64,
    mask: Option<u64>,
) -> Result<Wake, LinkError> {
    for link in links.iter().flatten() {
        if let Transport::Ring { rings, .. } = &link.transport {
            rings.asleep(false);
        }
    }
    // The look after the announcement: see `ring`.
    let polled = match first_ready(links) {
        Some(_) => Ok(0),
        None => sys::ppoll(fds, timeout_ns, mask),
    };
    for (slot, link) in fds.iter().zip(links.iter_mut()) {
        let Some(link) = link else { continue };
        if let Transport::Ring { rings, bell } = &link.transport {
            let bell = *bell;
            rings.awake();
            if polled.is_ok_and(|count| count > 0) && slot.revents != 0 {
                link.silence_bell(bell)?;
            }
        }
    }
    match polled {
        Err(errno) if class(errno) == Class::Interrupted => return Ok(Wake::Interrupted),
        Err(errno) => return Err(LinkError::from_errno("ppoll", errno)),
        Ok(_) => {}
    }
    let ready = fds.iter().zip(links.iter_mut()).position(|(slot, link)| {
        // A bell alone is not a frame; the ring or its end says whether it is.
        link.as_mut().is_some_and(|link| {
            let socket = !matches!(link.transport, Transport::Ring { .. });
            (socket && slot.revents != 0) || link.is_ready()
        })
    });
    Ok(ready.map_or(Wake::Timeout, Wake::Ready))
}
