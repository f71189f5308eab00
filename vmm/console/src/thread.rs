//! The console thread: moves bytes between the guest's console devices and the terminal,
//! pipes or socket, and reads signals.

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

/// How often keys are offered again to a guest whose buffer is full.
const RETRY_MS: u8 = 10;
/// Most bytes of output that are moved at once.
const PIECE: usize = 16 << 10;
/// Keys that may wait for the guest; nothing more is read until it takes some.
const KEYS_MAX: usize = 4 << 10;
/// Longest time for the last output at the end.
const FINISH_BOUND: Duration = Duration::from_secs(2);

/// The guest's console devices, as the receivers of keys.
pub trait Keys: Send + Sync {
    /// Takes the bytes that fit the device's buffer; returns how many.
    fn type_in(&self, bytes: &[u8]) -> usize;
    /// Tells the devices the terminal's size.
    fn resize(&self, size: Size);
}

/// A request that reaches the process through its console thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The user typed Ctrl-] q.
    Quit,
    /// A signal that ends programs.
    Signal(i32),
}

/// What the guest's console is connected to.
pub enum ConsoleEndpoint {
    /// Standard input and output.
    Standard,
    /// A listening socket, to which root and these users may attach.
    Socket(UnixListener, Vec<Uid>),
}

/// A running console thread.
pub struct ConsoleThread {
    thread: JoinHandle<()>,
    output: Output,
    finish: Arc<AtomicBool>,
}

impl ConsoleThread {
    /// Starts the thread `console`, which reads `signals`: those of [`ConsoleThread::signals`]
    /// that every thread has blocked. `notify` is called on the thread, and must not block.
    pub fn start(
        endpoint: ConsoleEndpoint,
        output: Output,
        keys: Arc<dyn Keys>,
        notify: Box<dyn Fn(Notice) + Send>,
        signals: &SigSet,
    ) -> io::Result<ConsoleThread> {
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let endpoint = match endpoint {
            ConsoleEndpoint::Standard => Endpoint::Standard {
                to: StandardOutput::new(io::stdout().as_fd().try_clone_to_owned()?),
                raw: Raw::enter()?,
                open: true,
            },
            ConsoleEndpoint::Socket(listener, owners) => {
                Endpoint::Socket(Socket::new(listener, owners)?)
            }
        };
        let finish = Arc::new(AtomicBool::new(false));
        let work = Work {
            endpoint,
            output: output.clone(),
            keys,
            notify,
            signals: SignalFd::with_flags(signals, flags)?,
            escape: Escape::default(),
            pending: Vec::new(),
            finish: finish.clone(),
        };
        let thread = weft_confine::spawn("console", ThreadKind::Console, move || work.run())?;
        Ok(ConsoleThread {
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

    /// Moves the remaining output, restores the terminal and ends the thread, within bounds.
    pub fn finish(self) {
        self.finish.store(true, Ordering::Release);
        self.output.wake();
        // The terminal is restored even if the thread hangs in a write.
        join_until(self.thread, Instant::now() + FINISH_BOUND);
        terminal::restore();
    }
}

/// The open end point.
enum Endpoint {
    Standard {
        /// `None` if standard input is not a terminal.
        raw: Option<Raw>,
        /// Whether standard input has not ended.
        open: bool,
        to: StandardOutput,
    },
    Socket(Socket),
}

struct Work {
    endpoint: Endpoint,
    output: Output,
    keys: Arc<dyn Keys>,
    notify: Box<dyn Fn(Notice) + Send>,
    signals: SignalFd,
    escape: Escape,
    /// Keys that have not fit the guest's buffer yet.
    pending: Vec<u8>,
    finish: Arc<AtomicBool>,
}

/// What `poll` reported.
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
                && let Endpoint::Socket(socket) = &mut self.endpoint
            {
                socket.accept();
            }
            if ready.writable {
                match &mut self.endpoint {
                    Endpoint::Socket(socket) => socket.flush(),
                    Endpoint::Standard { to, .. } => to.flush(),
                }
            }
            if ready.input {
                self.read_keys();
            }
            self.offer_keys();
            let moved = self.move_output();
            if finish && moved == 0 && !self.stuck() {
                return;
            }
        }
    }

    /// Whether output waits for standard output to become writable.
    fn stuck(&self) -> bool {
        matches!(&self.endpoint, Endpoint::Standard { to, .. } if to.waits().is_some())
    }

    fn greet(&self) {
        if let Endpoint::Standard { raw: Some(_), .. } = self.endpoint {
            let _ = io::stderr().write_all(escape::help(false).trim_start().as_bytes());
        }
    }

    /// Waits for an event; does not block once the end is requested.
    fn wait(&self, finish: bool) -> Ready {
        let input_wanted = self.pending.len() < KEYS_MAX;
        let input_events = |more: PollFlags| match input_wanted {
            true => PollFlags::POLLIN | more,
            false => more,
        };
        let stdin = io::stdin();
        let none = PollFlags::empty();
        // Output is taken only when it can be written.
        let output_events = if self.stuck() {
            none
        } else {
            PollFlags::POLLIN
        };
        let mut polled = vec![
            PollFd::new(self.output.descriptor().as_fd(), output_events),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
        ];
        // Indices in `polled`.
        let (mut input, mut knock, mut writable) = (None, None, None);
        match &self.endpoint {
            Endpoint::Standard { open, to, .. } => {
                if *open && input_wanted {
                    input = Some(polled.len());
                    polled.push(PollFd::new(stdin.as_fd(), PollFlags::POLLIN));
                }
                if let Some(stdout) = to.waits() {
                    writable = Some(polled.len());
                    polled.push(PollFd::new(stdout, PollFlags::POLLOUT));
                }
            }
            Endpoint::Socket(socket) => {
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
        let writable = match &self.endpoint {
            // A broken pipe is noticed by the next write.
            Endpoint::Standard { .. } => !found(writable).is_empty(),
            Endpoint::Socket(_) => found(writable).contains(PollFlags::POLLOUT),
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
        if let Endpoint::Standard { .. } = self.endpoint
            && let Some(size) = terminal::size(io::stdout())
        {
            self.keys.resize(size);
        }
    }

    fn read_keys(&mut self) {
        let mut buffer = [0; KEYS_MAX];
        match &mut self.endpoint {
            Endpoint::Socket(socket) => {
                let count = socket.read(&mut buffer);
                self.pending.extend(buffer.iter().take(count));
            }
            Endpoint::Standard { raw, open, .. } => {
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
                        // No socket exists to attach to again.
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

    /// Moves waiting output if it can be written; returns how many bytes.
    fn move_output(&mut self) -> usize {
        if self.stuck() {
            return 0;
        }
        let mut bytes = Vec::new();
        let count = self.output.take(PIECE, &mut bytes);
        if count == 0 {
            return 0;
        }
        match &mut self.endpoint {
            Endpoint::Socket(socket) => socket.push(&bytes),
            Endpoint::Standard { to, .. } => to.push(&bytes),
        }
        count
    }
}

/// Reads without the standard library's buffer, whose contents `poll` does not see.
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

    fn console(name: &str) -> (PathBuf, Output, Arc<Typed>, ConsoleThread) {
        let path = std::env::temp_dir().join(format!("weft-con-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let endpoint =
            ConsoleEndpoint::Socket(UnixListener::bind(&path).unwrap(), vec![Uid::effective()]);
        let output = Output::new(Duration::from_secs(1)).unwrap();
        let typed = Arc::new(Typed::default());
        let quiet = Box::new(|_| ());
        let signals = ConsoleThread::signals();
        let console_thread =
            ConsoleThread::start(endpoint, output.clone(), typed.clone(), quiet, &signals).unwrap();
        (path, output, typed, console_thread)
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
        let (path, output, typed, console_thread) = console("late");
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
        console_thread.finish();
        assert_eq!(read(&mut again, 10), "last words");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_client_that_does_not_read_holds_nobody_up() {
        let (path, output, _, console_thread) = console("deaf");
        let mut client = attach(&path);
        let before = Instant::now();
        for _ in 0..64 {
            output.push(&[b'x'; 64 << 10]);
        }
        assert!(before.elapsed() < Duration::from_secs(5));
        assert_eq!(output.lost(), 0);
        console_thread.finish();
        // It was sent away, with less than everything.
        let mut got = Vec::new();
        let _ = client.read_to_end(&mut got);
        assert!(got.len() < 4 << 20);
        std::fs::remove_file(path).unwrap();
    }
}
