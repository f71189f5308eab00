//! The client of a console's socket: connects it to this terminal or these pipes.

use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::escape::{self, Action, Escape};
use super::terminal::{self, Raw};

/// Why an attached console ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Ctrl-] d, or the end of a terminal.
    Detached,
    /// Ctrl-] q: stop the machine.
    Quit,
    /// The machine closed the console.
    Closed,
}

/// Moves bytes between standard input and output and `stream` until the machine closes it or
/// the user leaves. The end of piped input ends only the typing.
pub fn attach(mut stream: UnixStream) -> io::Result<Left> {
    if io::stdin().is_terminal() {
        terminal::restore_when_killed()?;
    }
    let raw = Raw::enter()?;
    if raw.is_some() {
        io::stderr().write_all(escape::help(true).trim_start().as_bytes())?;
    }
    let mut escape = Escape::default();
    let mut typing = true;
    let mut buffer = [0; 16 << 10];
    loop {
        let (shown, typed) = wait(&stream, typing)?;
        if shown {
            match stream.read(&mut buffer) {
                Ok(0) => return Ok(Left::Closed),
                Ok(count) => show(buffer.get(..count).unwrap_or_default())?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Ok(Left::Closed);
                }
                Err(error) => return Err(error),
            }
        }
        if !typed {
            continue;
        }
        let input = io::stdin();
        let count = nix::unistd::read(input.as_fd(), &mut buffer)?;
        let typed = buffer.get(..count).unwrap_or_default();
        if count == 0 {
            if input.is_terminal() {
                return Ok(Left::Detached);
            }
            typing = false;
        }
        if raw.is_none() {
            stream.write_all(typed)?;
            continue;
        }
        let mut keys = Vec::new();
        let actions = escape.filter(typed, &mut keys);
        stream.write_all(&keys)?;
        for action in actions {
            match action {
                Action::Quit => return Ok(Left::Quit),
                Action::Detach => return Ok(Left::Detached),
                Action::Help => io::stderr().write_all(escape::help(true).as_bytes())?,
            }
        }
    }
}

fn show(bytes: &[u8]) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(bytes)?;
    output.flush()
}

/// Waits; whether `stream` and whether standard input can be read.
fn wait(stream: &UnixStream, typing: bool) -> io::Result<(bool, bool)> {
    let input = io::stdin();
    let mut polled = vec![PollFd::new(stream.as_fd(), PollFlags::POLLIN)];
    if typing {
        polled.push(PollFd::new(input.as_fd(), PollFlags::POLLIN));
    }
    match poll(&mut polled, PollTimeout::NONE) {
        Ok(_) => {}
        Err(nix::Error::EINTR) => return Ok((false, false)),
        Err(error) => return Err(error.into()),
    }
    let ready = |index: usize| polled.get(index).and_then(PollFd::any).unwrap_or(false);
    Ok((ready(0), ready(1)))
}
