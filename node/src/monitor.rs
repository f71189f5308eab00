//! A slice of a machine and the daemon that starts it: what they say to each
//! other over the slice's control socket.
//!
//! ```text
//! daemon                               weft vm slice
//! SliceBoot, with the links     ──▶    opens its links, checks what it is to be
//!                               ◀──    Ready | Failed
//!                               ◀──    Said, at any time after Ready
//! ```
//!
//! One packet is one message. The process is the same binary as the daemon, so
//! that both are of one version. It needs nothing more of the daemon, which ends
//! it with a signal; and it dies with the thread that started it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft_proc::boot::{CONTROL_VARIABLE, MAX_NODES};
use weft_wire::halves::Keys;

use crate::consent::Lender;
use crate::links::Links;
use crate::spawn::Runtime;
use crate::sys;

/// Longest text of settings: a machine's configuration with its command line.
pub const SETTINGS_BYTES_MAX: usize = 48 << 10;
/// Longest packet: the settings and what the lender allows, escaped, and the keys of
/// all links.
const PACKET_BYTES_MAX: usize = 160 << 10;
/// Longest message of a slice.
const WORD_BYTES_MAX: usize = 4 << 10;
/// How long a slice may take to get ready. It opens its links and measures its clock; this is for hosts under great load.
const READY_BOUND: Duration = Duration::from_secs(20);
/// How long a started process may wait for its settings.
const BOOT_BOUND: Duration = Duration::from_secs(10);

/// What a slice's process is told.
#[derive(Debug, Serialize, Deserialize)]
pub struct SliceBoot {
    /// The slice's number in the machine, 1 to 15.
    pub number: u32,
    /// The machine's lease.
    pub lease_ms: u32,
    /// vCPUs that the slice may have.
    pub cpus: u32,
    /// Guest memory that it may come to hold: what was reserved for it, without what
    /// its vCPUs need.
    pub memory_bytes: u64,
    /// What the monitor needs to know, by the machine's launcher.
    pub settings: String,
    /// What it may open, by the daemon.
    pub lender: Lender,
    /// By slice: keys of the sealed link to it (send, receive); none where there is
    /// no link. The sockets come in the same order.
    pub keys: Vec<Option<([u8; 32], [u8; 32])>>,
}

/// What a slice says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Word {
    /// Its links are open and nothing of it is refused; nothing runs yet.
    Ready,
    /// It cannot be; the reason.
    Failed(String),
    /// For the log.
    Said(String),
}

/// One end of a link with its keys, for each slice; none for oneself.
pub type Sockets = Vec<Option<(OwnedFd, Option<Keys>)>>;

/// Sends a slice its settings, with the links and their keys. The descriptors are
/// copied; the caller drops its own.
///
/// # Errors
/// Settings that are too long, a link that is not sealed, or a process that is
/// gone.
pub fn send_boot(control: &OwnedFd, mut boot: SliceBoot, links: Links) -> io::Result<()> {
    let mut sockets = Vec::new();
    let keys = &mut boot.keys;
    for link in links {
        let Some((socket, link_keys)) = link.and_then(crate::links::Link::into_socket) else {
            keys.push(None);
            continue;
        };
        let link_keys = link_keys.ok_or_else(|| io::Error::other("a link is not sealed"))?;
        keys.push(Some((link_keys.send, link_keys.receive)));
        sockets.push(socket);
    }
    let packet = serde_json::to_vec(&boot)?;
    if boot.settings.len() > SETTINGS_BYTES_MAX || packet.len() > PACKET_BYTES_MAX {
        return Err(io::Error::from_raw_os_error(libc::E2BIG));
    }
    let descriptors: Vec<RawFd> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
    sys::send_with_descriptors(control.as_fd(), &packet, &descriptors)
}

/// Waits until a slice is ready. The error says what happened instead, as the end
/// of a sentence that starts with "the slice …".
pub fn expect_ready(slice: &mut Runtime) -> Result<(), String> {
    let deadline = Instant::now() + READY_BOUND;
    loop {
        match receive(slice.control.as_fd()) {
            Some(Ok(Word::Ready)) => return Ok(()),
            Some(Ok(Word::Failed(why))) => return Err(format!("cannot be made: {why}")),
            Some(Ok(Word::Said(_))) => continue,
            Some(Err(())) => {
                let ended = slice.end_within(Duration::from_secs(1));
                return Err(match ended {
                    Ok(ended) => format!("ended at start: it {ended}"),
                    Err(error) => format!("ended at start: {error}"),
                });
            }
            None => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let bound = READY_BOUND.as_secs();
            return Err(format!("was not ready within {bound} s"));
        }
        sys::wait_readable(&[slice.control.as_fd()], left)
            .map_err(|error| format!("cannot be waited for: {error}"))?;
    }
}

/// What a slice has said, if anything; an error once it says nothing more, or
/// nothing that can be understood.
pub fn receive(control: BorrowedFd<'_>) -> Option<Result<Word, ()>> {
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
fn plain(word: Word) -> Word {
    let text = |text: String| text.chars().filter(|c| !c.is_control()).collect();
    match word {
        Word::Ready => Word::Ready,
        Word::Failed(why) => Word::Failed(text(why)),
        Word::Said(said) => Word::Said(text(said)),
    }
}

/// The slice's end of its control socket.
pub struct Control(OwnedFd);

impl Control {
    /// The socket that the daemon left to this process.
    ///
    /// # Errors
    /// A process that no daemon started.
    pub fn inherited() -> io::Result<Control> {
        let number = std::env::var(CONTROL_VARIABLE)
            .ok()
            .and_then(|text| text.parse::<RawFd>().ok())
            .ok_or_else(|| io::Error::other("this process was not started by a daemon"))?;
        // SAFETY: the call only asks whether the number is that of a descriptor.
        if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: open, as just seen, and left to this process for this purpose: a
        // process that has just begun has nobody else who uses it.
        Ok(Control(unsafe { OwnedFd::from_raw_fd(number) }))
    }

    /// Waits for the settings of this process, and its links.
    ///
    /// # Errors
    /// Nothing came in time, or nothing that can be understood.
    pub fn boot(&self) -> io::Result<(SliceBoot, Sockets)> {
        if !sys::wait_readable(&[self.0.as_fd()], BOOT_BOUND)?[0] {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut packet = vec![0; PACKET_BYTES_MAX];
        let (length, descriptors) =
            sys::receive_with_descriptors(self.0.as_fd(), &mut packet, MAX_NODES)?;
        let mut boot: SliceBoot = serde_json::from_slice(&packet[..length])?;
        let mut descriptors = descriptors.into_iter();
        let sockets = std::mem::take(&mut boot.keys)
            .into_iter()
            .map(|keys| match keys {
                None => Ok(None),
                Some((send, receive)) => {
                    let socket = descriptors
                        .next()
                        .ok_or_else(|| io::Error::other("a link has no socket"))?;
                    Ok(Some((socket, Some(Keys { send, receive }))))
                }
            })
            .collect::<io::Result<Sockets>>()?;
        Ok((boot, sockets))
    }

    /// Says something. A daemon that is gone hears nothing.
    pub fn say(&self, word: &Word) {
        let word = match word {
            Word::Ready => Word::Ready,
            Word::Failed(why) => Word::Failed(short(why)),
            Word::Said(said) => Word::Said(short(said)),
        };
        let packet = serde_json::to_vec(&word).unwrap_or_default();
        let _ = sys::send_with_descriptors(self.0.as_fd(), &packet, &[]);
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
            cpus: 2,
            memory_bytes: 64 << 20,
            settings: settings.to_owned(),
            lender: Lender {
                peer: "alpha".into(),
                consent: Consent::default(),
            },
            keys: Vec::new(),
        }
    }

    #[test]
    fn a_slice_is_told_what_it_is_and_gets_its_links() {
        let (ours, theirs) = sys::packet_pair().unwrap();
        let links = mesh(3, Transport::TcpSealed).unwrap().swap_remove(1);
        send_boot(&ours, boot("{\"a\": 1}"), links).unwrap();
        let (told, sockets) = Control(theirs).boot().unwrap();
        assert_eq!((told.number, told.lease_ms), (1, 5000));
        assert_eq!(told.settings, "{\"a\": 1}");
        assert_eq!(told.lender, boot("").lender);
        let there: Vec<bool> = sockets.iter().map(Option::is_some).collect();
        assert_eq!(there, [true, false, true]);
    }

    #[test]
    fn links_in_the_clear_and_long_settings_are_refused() {
        let (ours, _theirs) = sys::packet_pair().unwrap();
        let clear = mesh(2, Transport::Tcp).unwrap().swap_remove(1);
        assert!(send_boot(&ours, boot(""), clear).is_err());
        let long = "x".repeat(SETTINGS_BYTES_MAX + 1);
        assert!(send_boot(&ours, boot(&long), Vec::new()).is_err());
    }

    #[test]
    fn words_arrive_without_what_steers_a_terminal() {
        let (ours, theirs) = sys::packet_pair().unwrap();
        assert_eq!(receive(ours.as_fd()), None);
        let control = Control(theirs);
        control.say(&Word::Said("\u{1b}[2J\u{1}why".into()));
        control.say(&Word::Failed("x".repeat(1 << 20)));
        drop(control);
        assert_eq!(receive(ours.as_fd()), Some(Ok(Word::Said("[2Jwhy".into()))));
        assert!(matches!(receive(ours.as_fd()), Some(Ok(Word::Failed(_)))));
        assert_eq!(receive(ours.as_fd()), Some(Err(())));
    }
}
