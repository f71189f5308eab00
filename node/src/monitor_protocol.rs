//! The protocol between a monitor (`weft-monitor`, the process of a machine's node) and the
//! launcher or daemon that starts it, over the process's control socket.
//!
//! ```text
//! launcher, daemon                     weft-monitor VERSION
//! SliceBoot, with the links     ──▶    opens its links, checks its settings
//!                               ◀──    Ready | Failed
//!                               ◀──    Said, at any time after Ready
//!                               ◀──    StartNode, EndNode (node 0)
//! Link, NodeReady, NodeFailed   ──▶    a node joins
//!                               ◀──    Home (node 0)          its part of the machine
//! HomeReady, HomeLost           ──▶                           goes to another host
//! ```
//!
//! One packet is one message. The version of what starts it is on its command line,
//! where a process of another version can read it without understanding a message. It
//! needs nothing more of its parent, which ends it with a signal; and it dies with the
//! thread that started it.

mod home;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft_proc::boot::{CONTROL_VARIABLE, MAX_NODES};
use weft_wire::halves::SessionKeys;

use crate::consent::Lender;
use crate::links::{Link, Links};
use crate::remote;
use crate::said::Spoken;
use crate::spawn::{Process, StartError};
use crate::sys;

pub use home::{
    FILES_BYTES_MAX, HomeOrder, HomeStep, OtherNode, ReceivedOrder, THIS_HOST, TakeoverSocket,
    receive_order, send_order, send_step,
};

/// Longest text of settings: a machine's configuration with its command line.
pub const SETTINGS_BYTES_MAX: usize = 48 << 10;
/// Longest packet: the settings and what the lender allows, escaped, and the keys of
/// all links.
const PACKET_BYTES_MAX: usize = 160 << 10;
/// Longest message of a slice: a sentence with a path in it, however it is escaped.
const WORD_BYTES_MAX: usize = 32 << 10;
/// Sockets beside those of links: of home, and one to each other node for files.
const SOCKETS_MAX: usize = 8 + MAX_NODES;
/// How long a slice may take to get ready. It opens its links and measures its clock; this is for hosts under great load.
const READY_BOUND: Duration = Duration::from_secs(20);
/// How long a started process may wait for its [`SliceBoot`], while its launcher links and
/// starts slices on other hosts. A launcher that ends takes the process along.
const BOOT_BOUND: Duration = remote::JOIN_BOUND;

/// How long a slice waits at a time for what its launcher says.
const LISTEN_ROUND: Duration = Duration::from_secs(3600);

/// What a slice's process is told.
#[derive(Debug, Serialize, Deserialize)]
pub struct SliceBoot {
    /// The slice's number in the machine: 0 for the primary, 1 to 15 for secondaries.
    pub number: u32,
    /// The machine's lease.
    pub lease_ms: u32,
    /// What the monitor needs to know, by the machine's launcher.
    pub settings: String,
    /// On whose host it is.
    pub terms: Terms,
    /// By slice: the link to it. The sockets come in the same order.
    pub links: Vec<LinkKind>,
    /// Of a slice that joins a running machine: bytes of guest memory that it may fill.
    #[serde(default)]
    pub joins: Option<u64>,
}

/// On whose host a slice is, and so what it may do there.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Terms {
    /// On its launcher's own, which tells it more.
    Own(String),
    /// On one that lends.
    Lent(Loan),
}

/// What a lender's daemon lets a slice have.
#[derive(Debug, Serialize, Deserialize)]
pub struct Loan {
    /// vCPUs.
    pub cpus: u32,
    /// Guest memory that it may come to hold: what was reserved for it, without what
    /// its vCPUs need.
    pub memory_bytes: u64,
    /// What it may open.
    pub lender: Lender,
    /// Where the switches are that have a name.
    pub switches: PathBuf,
}

/// What joins a slice to another.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkKind {
    /// Nothing.
    None,
    /// A socket in the clear.
    Clear,
    /// A socket whose records are sealed with these keys.
    Sealed {
        /// Of what it sends.
        send: [u8; 32],
        /// Of what it receives.
        receive: [u8; 32],
    },
}

impl LinkKind {
    /// Takes a link apart.
    fn of(link: Link) -> io::Result<(OwnedFd, LinkKind)> {
        let (socket, keys) = link.into_socket().ok_or_else(|| {
            io::Error::new(io::ErrorKind::Unsupported, "rings do not join machines")
        })?;
        let kind = match keys {
            None => LinkKind::Clear,
            Some(SessionKeys { send, receive }) => LinkKind::Sealed { send, receive },
        };
        Ok((socket, kind))
    }

    /// The sealed link with this socket.
    fn link(&self, socket: OwnedFd) -> Option<Link> {
        match self {
            LinkKind::Sealed { send, receive } => Some(Link::sealed(socket, *send, *receive)),
            LinkKind::None | LinkKind::Clear => None,
        }
    }
}

/// What a slice says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MonitorMessage {
    /// Its links are open and nothing of it is refused; nothing runs yet.
    Ready,
    /// It cannot be; the reason.
    Failed(String),
    /// For the log.
    Said(String),
    /// Node 0 asks for one node more, linked with all others. The launcher answers with
    /// `NodeReady` or `NodeFailed` with the number of this request. It starts no more than a machine may have, each with the
    /// settings that all have, so that a guest that took node 0 over gains nothing by it.
    StartNode {
        request: u64,
        number: u32,
        /// `None`: the launcher's own.
        host: Option<String>,
        memory_bytes: u64,
    },
    /// Node 0 says that a node did not join, or has left: its process ends.
    EndNode { number: u32 },
    /// Node 0 asks for a step of the move of its part to the host of node `number`. The launcher
    /// answers `Prepare` with `HomeReady`, the others with `NodeReady`, and all of them with
    /// `NodeFailed` or `HomeLost`. Of a state only the last part has an answer.
    Home {
        request: u64,
        number: u32,
        step: HomeStep,
    },
    /// The same for `Prepare`, where other nodes stay: the process becomes their node 0, on the
    /// host of node `beside`. `number` is free; the next steps are for it.
    HomeBeside {
        request: u64,
        number: u32,
        beside: u32,
    },
    /// A process that takes node 0's part has taken its state.
    HomeTaken,
    /// The same: its guest runs.
    HomeRuns,
}

/// Longest wait until a packet that follows others has room in a socket.
const ROOM_BOUND: Duration = Duration::from_secs(5);

fn send_when_writable(socket: BorrowedFd<'_>, packet: &[u8]) -> io::Result<()> {
    let deadline = Instant::now() + ROOM_BOUND;
    loop {
        match sys::send_with_descriptors(socket, packet, &[]) {
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_micros(200));
            }
            sent => return sent,
        }
    }
}

/// What a slice needs a file for, which its daemon opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SliceFile {
    /// The copy of a disk of node 0.
    Disk(u8),
    /// Its pages of a new checkpoint.
    NewPages,
    /// A file of the checkpoint that the machine continues.
    SavedPages(u32),
}

/// What a launcher or daemon tells a slice that runs.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LauncherMessage {
    /// A slice joins; the link's socket comes along.
    Link { number: u32, kind: LinkKind },
    /// A file on this host for the slice; it comes along.
    File { what: SliceFile },
    /// To node 0: the process of the node that it asked for runs and has its links.
    NodeReady { request: u64 },
    /// To node 0: there is no such process, for this reason.
    NodeFailed { request: u64, reason: String },
    /// To node 0: the process that can take its part is ready, on this host.
    HomeReady { request: u64, host: String },
    /// To node 0: the host that takes its part does not answer.
    HomeLost { request: u64, reason: String },
}

/// What a slice was told, with the link, or file, that came along.
pub type Told = (LauncherMessage, Option<(OwnedFd, Option<SessionKeys>)>);

/// One end of a link with its keys, for each slice; none for oneself.
pub type Sockets = Vec<Option<(OwnedFd, Option<SessionKeys>)>>;

/// What a slice's process was told.
pub struct ReceivedBoot {
    /// The packet.
    pub boot: SliceBoot,
    /// By slice, opened from the packet's descriptors.
    pub links: Sockets,
    /// What else it was given.
    pub sockets: Vec<OwnedFd>,
}

/// The command line of a monitor.
pub const ARGUMENTS: [&str; 2] = ["weft-monitor", VERSION];
/// Of launcher, daemon and monitor, which are installed together.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Hands a slice its part of the machine, with its links and further sockets. The
/// descriptors are copied; the caller drops its own.
///
/// # Errors
/// Settings that are too long, a link that is a ring, or a process that is gone.
pub fn send_boot(
    control: &OwnedFd,
    mut boot: SliceBoot,
    links: Links,
    sockets: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut ends = Vec::new();
    for link in links {
        let Some(link) = link else {
            boot.links.push(LinkKind::None);
            continue;
        };
        let (socket, kind) = LinkKind::of(link)?;
        ends.push(socket);
        boot.links.push(kind);
    }
    let packet = serde_json::to_vec(&boot)?;
    if boot.settings.len() > SETTINGS_BYTES_MAX || packet.len() > PACKET_BYTES_MAX {
        return Err(io::Error::new(
            io::ErrorKind::ArgumentListTooLong,
            "it is too long: use fewer devices, shorter paths or shorter texts",
        ));
    }
    let ends = ends.iter().map(AsRawFd::as_raw_fd);
    let others = sockets.iter().map(AsRawFd::as_raw_fd);
    let descriptors: Vec<RawFd> = ends.chain(others).collect();
    sys::send_with_descriptors(control.as_fd(), &packet, &descriptors)
}

/// Tells a slice that runs that another one joins, and hands it the link.
///
/// # Errors
/// A link that is a ring, or a process that is gone.
pub fn send_link(control: BorrowedFd<'_>, number: u32, link: Link) -> io::Result<()> {
    let (socket, kind) = LinkKind::of(link)?;
    let packet = serde_json::to_vec(&LauncherMessage::Link { number, kind })?;
    sys::send_with_descriptors(control, &packet, &[socket.as_raw_fd()])
}

/// Gives a slice that runs a file.
///
/// # Errors
/// Its process is gone.
pub fn send_file(control: BorrowedFd<'_>, what: SliceFile, file: BorrowedFd<'_>) -> io::Result<()> {
    let packet = serde_json::to_vec(&LauncherMessage::File { what })?;
    sys::send_with_descriptors(control, &packet, &[file.as_raw_fd()])
}

/// Tells a slice that runs something without a link.
///
/// # Errors
/// Its process is gone.
pub fn tell(control: BorrowedFd<'_>, message: &LauncherMessage) -> io::Result<()> {
    let packet = serde_json::to_vec(message)?;
    sys::send_with_descriptors(control, &packet, &[])
}

/// Waits until a slice is ready.
///
/// # Errors
/// What happened instead.
pub fn expect_ready(slice: &mut Process) -> Result<(), StartError> {
    let deadline = Instant::now() + READY_BOUND;
    loop {
        match receive(slice.control.as_fd()) {
            Some(Ok(MonitorMessage::Ready)) => return Ok(()),
            Some(Ok(MonitorMessage::Failed(why))) => return Err(StartError::Refused(why)),
            Some(Ok(_)) => continue,
            Some(Err(())) => return Err(StartError::of(slice)),
            None => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(StartError::Timeout(READY_BOUND));
        }
        sys::wait_readable(&[slice.control.as_fd()], left).map_err(StartError::Wait)?;
    }
}

/// The next thing that a slice said.
pub fn hear(control: BorrowedFd<'_>) -> Spoken {
    match receive(control) {
        None => Spoken::Nothing,
        Some(Err(())) => Spoken::Closed,
        Some(Ok(MonitorMessage::Ready)) => Spoken::Ready,
        Some(Ok(
            MonitorMessage::StartNode { .. }
            | MonitorMessage::EndNode { .. }
            | MonitorMessage::Home { .. }
            | MonitorMessage::HomeBeside { .. }
            | MonitorMessage::HomeTaken
            | MonitorMessage::HomeRuns,
        )) => Spoken::Other,
        Some(Ok(MonitorMessage::Said(text) | MonitorMessage::Failed(text))) => {
            Spoken::Sentence(text)
        }
    }
}

/// What a slice has said, if anything; an error once it says nothing more, or
/// nothing that can be understood.
pub fn receive(control: BorrowedFd<'_>) -> Option<Result<MonitorMessage, ()>> {
    let mut packet = vec![0; WORD_BYTES_MAX];
    match sys::receive_packet(control, &mut packet) {
        Ok(None) => None,
        Ok(Some(0)) | Err(_) => Some(Err(())),
        Ok(Some(length)) => {
            let word = serde_json::from_slice(&packet[..length]);
            Some(word.map(plain).map_err(drop))
        }
    }
}

/// Without anything that would steer a terminal: a slice runs a guest that is not
/// to be trusted with one.
fn plain(word: MonitorMessage) -> MonitorMessage {
    let text = |text: String| text.chars().filter(|c| !c.is_control()).collect();
    match word {
        MonitorMessage::Ready => MonitorMessage::Ready,
        MonitorMessage::Failed(why) => MonitorMessage::Failed(text(why)),
        MonitorMessage::Said(said) => MonitorMessage::Said(text(said)),
        MonitorMessage::StartNode {
            request,
            number,
            host,
            memory_bytes,
        } => MonitorMessage::StartNode {
            request,
            number,
            host: host.map(text),
            memory_bytes,
        },
        other @ (MonitorMessage::EndNode { .. }
        | MonitorMessage::Home { .. }
        | MonitorMessage::HomeBeside { .. }
        | MonitorMessage::HomeTaken
        | MonitorMessage::HomeRuns) => other,
    }
}

/// What started this process is of another version.
#[derive(Debug, thiserror::Error)]
#[error(
    "weft-monitor is of version {VERSION}, the Weft that started it of {0}: install both from one \
    build, and start a daemon again"
)]
pub struct OtherVersion(String);

/// The slice's end of its control socket.
pub struct Control(OwnedFd);

impl Control {
    /// The socket that was left to this process.
    ///
    /// # Errors
    /// A process that neither a launcher nor a daemon started.
    pub fn inherited() -> io::Result<Control> {
        let number = std::env::var(CONTROL_VARIABLE)
            .ok()
            .and_then(|text| text.parse::<RawFd>().ok())
            .ok_or_else(|| {
                io::Error::other("neither `weft vm run` nor `weft node start` started it")
            })?;
        // What this process executes does not get it.
        // SAFETY: sets a flag, if the number is that of a descriptor.
        if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: open, as just seen, and left to this process for this purpose: a
        // process that has just begun has nobody else who uses it.
        Ok(Control(unsafe { OwnedFd::from_raw_fd(number) }))
    }

    /// Whether what started this process is of its version.
    ///
    /// # Errors
    /// It is not.
    pub fn check_version(&self) -> Result<(), OtherVersion> {
        match std::env::args().nth(1) {
            Some(version) if version == VERSION => Ok(()),
            version => Err(OtherVersion(version.unwrap_or("another".into()))),
        }
    }

    /// Waits for the packet that says which node this process is.
    ///
    /// # Errors
    /// Nothing came in time, or nothing that can be understood.
    pub fn boot(&self) -> io::Result<ReceivedBoot> {
        if !sys::wait_readable(&[self.0.as_fd()], BOOT_BOUND)?[0] {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut packet = vec![0; PACKET_BYTES_MAX];
        let (length, descriptors) =
            sys::receive_with_descriptors(self.0.as_fd(), &mut packet, MAX_NODES + SOCKETS_MAX)?;
        let mut boot: SliceBoot = serde_json::from_slice(&packet[..length])?;
        let mut descriptors = descriptors.into_iter();
        let mut open = |kind| {
            let keys = match kind {
                LinkKind::None => return Ok(None),
                LinkKind::Clear => None,
                LinkKind::Sealed { send, receive } => Some(SessionKeys { send, receive }),
            };
            let socket = descriptors.next();
            let socket = socket.ok_or_else(|| io::Error::other("a link has no socket"))?;
            Ok(Some((socket, keys)))
        };
        let kinds = std::mem::take(&mut boot.links).into_iter();
        let links = kinds.map(&mut open).collect::<io::Result<Sockets>>()?;
        Ok(ReceivedBoot {
            boot,
            links,
            sockets: descriptors.collect(),
        })
    }

    /// Waits for the next thing that the launcher or daemon says; `None` once it says nothing
    /// more. Calls `ppoll` and `recvmsg` only.
    ///
    /// # Errors
    /// Nothing that can be understood.
    pub fn listen(&self) -> io::Result<Option<Told>> {
        while !sys::wait_readable(&[self.0.as_fd()], LISTEN_ROUND)?[0] {}
        let mut packet = vec![0; WORD_BYTES_MAX];
        let (length, descriptors) = sys::receive_with_descriptors(self.0.as_fd(), &mut packet, 1)?;
        if length == 0 {
            return Ok(None);
        }
        let message = serde_json::from_slice(&packet[..length])?;
        let link = match &message {
            LauncherMessage::Link { kind, .. } => {
                let keys = match kind {
                    LinkKind::Sealed { send, receive } => Some(SessionKeys {
                        send: *send,
                        receive: *receive,
                    }),
                    LinkKind::None | LinkKind::Clear => None,
                };
                descriptors.into_iter().next().map(|socket| (socket, keys))
            }
            LauncherMessage::File { .. } => {
                let file = descriptors.into_iter().next();
                file.map(|file| (file, None))
            }
            _ => None,
        };
        Ok(Some((message, link)))
    }

    /// Says something. A daemon that is gone hears nothing.
    pub fn say(&self, word: &MonitorMessage) {
        let word = match word {
            MonitorMessage::Ready => MonitorMessage::Ready,
            MonitorMessage::Failed(why) => MonitorMessage::Failed(short(why)),
            MonitorMessage::Said(said) => MonitorMessage::Said(short(said)),
            order => order.clone(),
        };
        let packet = serde_json::to_vec(&word).unwrap_or_default();
        let _ = send_when_writable(self.0.as_fd(), &packet);
    }
}

/// As much of a text as a packet has room for, however it is escaped.
fn short(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_control())
        .take(WORD_BYTES_MAX / 8)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consent::Consent;
    use crate::links::mesh;
    use crate::options::Transport;

    fn boot(settings: &str) -> SliceBoot {
        SliceBoot {
            number: 1,
            lease_ms: 5000,
            settings: settings.to_owned(),
            terms: Terms::Lent(Loan {
                cpus: 2,
                memory_bytes: 64 << 20,
                lender: Lender {
                    peer: "alpha".into(),
                    consent: Consent::default(),
                },
                switches: "/run/weft/switch".into(),
            }),
            links: Vec::new(),
            joins: None,
        }
    }

    #[test]
    fn a_slice_is_told_what_it_is_and_gets_its_links() {
        let (ours, theirs) = sys::packet_pair().unwrap();
        let mut links = mesh(3, Transport::TcpSealed).unwrap().swap_remove(1);
        links[2] = mesh(2, Transport::Tcp)
            .unwrap()
            .swap_remove(0)
            .swap_remove(1);
        send_boot(&ours, boot("{\"a\": 1}"), links, &[ours.as_fd()]).unwrap();
        let told = Control(theirs).boot().unwrap();
        assert_eq!((told.boot.number, told.boot.lease_ms), (1, 5000));
        assert_eq!(told.boot.settings, "{\"a\": 1}");
        assert!(matches!(told.boot.terms, Terms::Lent(Loan { cpus: 2, .. })));
        let sealed: Vec<Option<bool>> = told
            .links
            .iter()
            .map(|link| link.as_ref().map(|(_, keys)| keys.is_some()))
            .collect();
        assert_eq!(sealed, [Some(true), None, Some(false)]);
        assert_eq!(told.sockets.len(), 1);
    }

    #[test]
    fn rings_and_long_settings_are_refused() {
        let (ours, _theirs) = sys::packet_pair().unwrap();
        let ring = mesh(2, Transport::Ring).unwrap().swap_remove(1);
        assert!(send_boot(&ours, boot(""), ring, &[]).is_err());
        let long = "x".repeat(SETTINGS_BYTES_MAX + 1);
        assert!(send_boot(&ours, boot(&long), Vec::new(), &[]).is_err());
    }

    #[test]
    fn words_arrive_without_what_steers_a_terminal() {
        let (ours, theirs) = sys::packet_pair().unwrap();
        assert_eq!(receive(ours.as_fd()), None);
        let control = Control(theirs);
        control.say(&MonitorMessage::Said("\u{1b}[2J\u{1}why".into()));
        control.say(&MonitorMessage::Failed("x".repeat(1 << 20)));
        drop(control);
        assert_eq!(
            receive(ours.as_fd()),
            Some(Ok(MonitorMessage::Said("[2Jwhy".into())))
        );
        assert!(matches!(
            receive(ours.as_fd()),
            Some(Ok(MonitorMessage::Failed(_)))
        ));
        assert_eq!(receive(ours.as_fd()), Some(Err(())));
    }
}
