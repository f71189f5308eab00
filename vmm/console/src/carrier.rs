//! The console thread.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Uid;
use weft_confine::{ThreadKind, join_until};

use super::escape::{self, Action, Escape};
use super::output::Output;
use super::socket::Socket;
use super::stdout::StandardOutput;
use super::terminal::{self, Raw, Size};

/// How often keys are offered again to a guest that does not take them.
const RETRY_MS: u8 = 10;
/// Bytes moved at one time.
const PIECE: usize = 16 << 10;
/// Keys that may wait for the guest; nothing more is read until it takes some.
const KEYS_MAX: usize = 4 << 10;
/// How long the last output may take to be carried at the end.
const FINISH_BOUND: Duration = Duration::from_secs(2);

/// Where keys go: the guest's console devices.
pub trait Keys: Send + Sync {
    /// Takes as many bytes as there is room for; says how many.
    fn type_in(&self, bytes: &[u8]) -> usize;
    /// The terminal has this size now.
    fn resize(&self, size: Size);
}

/// What the user, or the process that looks after this one, asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Ctrl-] q.
    Quit,
    /// A signal that ends programs.
    Signal(i32),
}

/// Where the console is.
pub enum Place {
    /// Standard input and output.
    Standard,
    /// A socket that listens; beside root, these users may attach.
    Socket(UnixListener, Vec<Uid>),
}

/// The console thread, from outside.
pub struct Carrier {
    thread: JoinHandle<()>,
    output: Output,
    finish: Arc<AtomicBool>,
}

impl Carrier {
    /// Starts the thread `console`, which reads `signals`: those of [`Carrier::signals`]
    /// that every thread has blocked. `notify` is called on the thread, and must not wait.
    pub fn start(
        place: Place,
        output: Output,
        keys: Arc<dyn Keys>,
        notify: Box<dyn Fn(Notice) + Send>,
        signals: &SigSet,
    ) -> io::Result<Carrier> {
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let end = match place {
            Place::Standard => End::Standard {
                to: StandardOutput::new(io::stdout().as_fd().try_clone_to_owned()?),
                raw: Raw::enter()?,
                open: true,
            },
            Place::Socket(listener, owners) => End::Socket(Socket::new(listener, owners)?),
        };
        let finish = Arc::new(AtomicBool::new(false));
        let work = Work {
            end,
            output: output.clone(),
            keys,
            notify,
            signals: SignalFd::with_flags(signals, flags)?,
            escape: Escape::default(),
            pending: Vec::new(),
            finish: finish.clone(),
        };
        let thread = weft_confine::spawn("console", ThreadKind::Console, move || work.run())?;
        Ok(Carrier {
            thread,
            output,
            finish,
        })
    }

    /// The signals that the thread can read.
    pub fn signals() -> SigSet {
        [
            Signal::SIGTERM,
            Signal::SIGINT,
            Signal::SIGHUP,
            Signal::SIGQUIT,
            Signal::SIGWINCH,
        ]
        .into_iter()
        .collect()
    }

    /// Carries what is left, restores the terminal, and ends the thread: all of
    /// it bounded.
    pub fn finish(self) {
        self.finish.store(true, Ordering::Release);
        self.output.wake();
        // The terminal is restored even where the thread hangs in a write.
        join_until(self.thread, Instant::now() + FINISH_BOUND);
        terminal::restore();
    }
}

/// Where bytes come from and go to.
enum End {
    Standard {
        /// There when standard input is a terminal.
        raw: Option<Raw>,
        /// Standard input has not ended.
        open: bool,
        to: StandardOutput,
    },
    Socket(Socket),
}

struct Work {
    end: End,
    output: Output,
    keys: Arc<dyn Keys>,
    notify: Box<dyn Fn(Notice) + Send>,
    signals: SignalFd,
    escape: Escape,
    /// Keys that the guest has not taken yet.
    pending: Vec<u8>,
    finish: Arc<AtomicBool>,
}

/// What a turn of the loop found.
#[derive(Default)]
struct Ready {
    signals: bool,
    input: bool,
    knock: bool,
    writable: bool,
}

impl Work {
    fn run(mut self) {
        self.greet();
        self.resize();
        loop {
            let finish = self.finish.load(Ordering::Acquire);
            let ready = self.wait(finish);
            if ready.signals {
                self.read_signals();
            }
            if ready.knock
                && let End::Socket(socket) = &mut self.end
            {
                socket.accept();
            }
            if ready.writable {
                match &mut self.end {
                    End::Socket(socket) => socket.flush(),
                    End::Standard { to, .. } => to.flush(),
                }
            }
            if ready.input {
                self.read_keys();
            }
            self.offer_keys();
            let carried = self.carry();
            if finish && carried == 0 && !self.stuck() {
                return;
            }
        }
    }

    /// Whether nothing more can be carried for now.
    fn stuck(&self) -> bool {
        matches!(&self.end, End::Standard { to, .. } if to.waits().is_some())
    }

    fn greet(&self) {
        if let End::Standard { raw: Some(_), .. } = self.end {
            let _ = io::stderr().write_all(escape::help(false).trim_start().as_bytes());
        }
    }

    /// Waits for something to do; not at all when the end is asked for.
    fn wait(&self, finish: bool) -> Ready {
        let input_wanted = self.pending.len() < KEYS_MAX;
        let input_events = |more: PollFlags| match input_wanted {
            true => PollFlags::POLLIN | more,
            false => more,
        };
        let stdin = io::stdin();
        let none = PollFlags::empty();
        // Taken only when it can be passed on.
        let output_events = if self.stuck() {
            none
        } else {
            PollFlags::POLLIN
        };
        let mut polled = vec![
            PollFd::new(self.output.descriptor().as_fd(), output_events),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
        ];
        // Where in `polled` they are.
        let (mut input, mut knock, mut writable) = (None, None, None);
        match &self.end {
            End::Standard { open, to, .. } => {
                if *open && input_wanted {
                    input = Some(polled.len());
                    polled.push(PollFd::new(stdin.as_fd(), PollFlags::POLLIN));
                }
                if let Some(stdout) = to.waits() {
                    writable = Some(polled.len());
                    polled.push(PollFd::new(stdout, PollFlags::POLLOUT));
                }
            }
            End::Socket(socket) => {
                knock = Some(polled.len());
                polled.push(PollFd::new(socket.listener(), PollFlags::POLLIN));
                if let Some((client, waits)) = socket.client() {
                    let more = if waits { PollFlags::POLLOUT } else { none };
                    input = Some(polled.len());
                    writable = input;
                    polled.push(PollFd::new(client, input_events(more)));
                }
            }
        }
        let timeout = match (finish && !self.stuck(), self.pending.is_empty()) {
            (true, _) => PollTimeout::ZERO,
            (false, false) => PollTimeout::from(RETRY_MS),
            (false, true) => PollTimeout::NONE,
        };
        if poll(&mut polled, timeout).is_err() {
            return Ready::default();
        }
        let found = |place: Option<usize>| {
            let descriptor = place.and_then(|place| polled.get(place));
            descriptor.and_then(PollFd::revents).unwrap_or(none)
        };
        let writable = match &self.end {
            // One that is broken shows it when it is written to.
            End::Standard { .. } => !found(writable).is_empty(),
            End::Socket(_) => found(writable).contains(PollFlags::POLLOUT),
        };
        Ready {
            signals: !found(Some(1)).is_empty(),
            input: !found(input).is_empty(),
            knock: !found(knock).is_empty(),
            writable,
        }
    }

    fn read_signals(&mut self) {
        while let Ok(Some(information)) = self.signals.read_signal() {
            match information.ssi_signo as i32 {
                libc::SIGWINCH => self.resize(),
                signal => (self.notify)(Notice::Signal(signal)),
            }
        }
    }

    fn resize(&self) {
        if let End::Standard { .. } = self.end
            && let Some(size) = terminal::size(io::stdout())
        {
            self.keys.resize(size);
        }
    }

    fn read_keys(&mut self) {
        let mut buffer = [0; KEYS_MAX];
        match &mut self.end {
            End::Socket(socket) => {
                let count = socket.read(&mut buffer);
                self.pending.extend(buffer.iter().take(count));
            }
            End::Standard { raw, open, .. } => {
                let count = match read_standard_input(&mut buffer) {
                    Ok(count) => count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => return,
                    // EIO: the terminal has gone.
                    Err(_) => 0,
                };
                *open = count > 0;
                let typed = buffer.get(..count).unwrap_or_default();
                if raw.is_none() {
                    self.pending.extend(typed);
                    return;
                }
                for action in self.escape.filter(typed, &mut self.pending) {
                    match action {
                        Action::Quit => (self.notify)(Notice::Quit),
                        // Nothing would be left to attach to.
                        Action::Detach | Action::Help => {
                            let _ = io::stderr().write_all(escape::help(false).as_bytes());
                        }
                    }
                }
            }
        }
    }

    fn offer_keys(&mut self) {
        if !self.pending.is_empty() {
            let taken = self.keys.type_in(&self.pending).min(self.pending.len());
            self.pending.drain(..taken);
        }
    }

    /// Carries what waits, if there is room for it; says how many bytes.
    fn carry(&mut self) -> usize {
        if self.stuck() {
            return 0;
        }
        let mut bytes = Vec::new();
        let count = self.output.take(PIECE, &mut bytes);
        if count == 0 {
            return 0;
        }
        match &mut self.end {
            End::Socket(socket) => socket.push(&bytes),
            End::Standard { to, .. } => to.push(&bytes),
        }
        count
    }
}

/// Reads without the standard library's buffer: what it kept would not show in
/// `poll`.
fn read_standard_input(buffer: &mut [u8]) -> io::Result<usize> {
    let input = io::stdin();
    Ok(nix::unistd::read(input.as_fd(), buffer)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;
    use std::sync::Mutex;

    /// A guest that takes three keys at a time.
    #[derive(Default)]
    struct Typed(Mutex<Vec<u8>>);

    impl Keys for Typed {
        fn type_in(&self, bytes: &[u8]) -> usize {
            let count = bytes.len().min(3);
            self.0.lock().unwrap().extend(&bytes[..count]);
            count
        }
        fn resize(&self, _: Size) {}
    }

    fn console(name: &str) -> (PathBuf, Output, Arc<Typed>, Carrier) {
        let path = std::env::temp_dir().join(format!("weft-con-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let place = Place::Socket(UnixListener::bind(&path).unwrap(), vec![Uid::effective()]);
        let output = Output::new().unwrap();
        let typed = Arc::new(Typed::default());
        let quiet = Box::new(|_| ());
        let signals = Carrier::signals();
        let carrier =
            Carrier::start(place, output.clone(), typed.clone(), quiet, &signals).unwrap();
        (path, output, typed, carrier)
    }

    fn attach(path: &PathBuf) -> UnixStream {
        let stream = UnixStream::connect(path).unwrap();
        let bound = Some(Duration::from_secs(10));
        stream.set_read_timeout(bound).unwrap();
        stream
    }

    fn read(stream: &mut UnixStream, count: usize) -> String {
        let mut bytes = vec![0; count];
        stream.read_exact(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_late_client_sees_what_it_missed_and_types() {
        let (path, output, typed, carrier) = console("late");
        output.push(b"login: ");
        let mut client = attach(&path);
        assert_eq!(read(&mut client, 7), "login: ");
        client.write_all(b"root\x1dq\r").unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while typed.0.lock().unwrap().len() < 7 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The escape is the other end's affair.
        assert_eq!(*typed.0.lock().unwrap(), b"root\x1dq\r");
        output.push(b"# ");
        assert_eq!(read(&mut client, 2), "# ");
        let mut second = attach(&path);
        let mut refused = String::new();
        second.read_to_string(&mut refused).unwrap();
        assert!(refused.contains("another client"), "{refused}");
        drop(client);
        // The place is free again, as soon as the thread has seen it.
        let mut again = attach(&path);
        let mut all = read(&mut again, 9);
        while !all.starts_with("login") && Instant::now() < deadline {
            again = attach(&path);
            all = read(&mut again, 9);
        }
        assert_eq!(all, "login: # ");
        output.push(b"last words");
        carrier.finish();
        assert_eq!(read(&mut again, 10), "last words");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_client_that_does_not_read_holds_nobody_up() {
        let (path, output, _, carrier) = console("deaf");
        let mut client = attach(&path);
        let before = Instant::now();
        for _ in 0..64 {
            output.push(&[b'x'; 64 << 10]);
        }
        assert!(before.elapsed() < Duration::from_secs(5));
        assert_eq!(output.lost(), 0);
        carrier.finish();
        // It was sent away, with less than everything.
        let mut got = Vec::new();
        let _ = client.read_to_end(&mut got);
        assert!(got.len() < 4 << 20);
        std::fs::remove_file(path).unwrap();
    }
}
