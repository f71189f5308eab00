//! `weft vm run` on a terminal: raw mode, the way out, and the mode afterwards.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{LocalFlags, tcgetattr};
use nix::unistd::Pid;

use super::{BOUND, Bench, Check, wait_until};

pub(super) const CHECKS: [(&str, Check); 3] = [
    ("the way out of a terminal", way_out),
    ("a terminal after a signal", after_signal),
    ("a terminal after a kill", after_kill),
];

/// A machine on a terminal of its own.
struct OnTerminal {
    child: Child,
    /// The user's end.
    keyboard: File,
    /// The machine's end, to look at its mode.
    line: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl OnTerminal {
    fn start(bench: &Bench, options: &[&str]) -> Result<OnTerminal> {
        let pair = openpty(None, None)?;
        let (keyboard, line) = (File::from(pair.master), pair.slave);
        let mut command = bench.run(options);
        command
            .stdin(Stdio::from(line.try_clone()?))
            .stdout(Stdio::from(line.try_clone()?))
            .stderr(Stdio::from(line.try_clone()?));
        // SAFETY: setsid is async-signal-safe and touches no memory of ours.
        unsafe { command.pre_exec(|| Ok(nix::unistd::setsid().map(drop)?)) };
        let child = command.spawn()?;
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (mut screen, kept) = (keyboard.try_clone()?, shown.clone());
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            // EIO when nobody has the other end any more.
            while let Ok(count @ 1..) = screen.read(&mut piece) {
                let mut kept = kept.lock().unwrap_or_else(|poison| poison.into_inner());
                kept.extend_from_slice(&piece[..count]);
            }
        });
        let terminal = OnTerminal {
            child,
            keyboard,
            line,
            shown,
        };
        terminal.wait_for("ready")?;
        Ok(terminal)
    }

    fn screen(&self) -> String {
        let shown = self
            .shown
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        String::from_utf8_lossy(&shown).into_owned()
    }

    fn wait_for(&self, text: &str) -> Result<()> {
        wait_until(text, || Ok(self.screen().contains(text)))
    }

    fn type_in(&mut self, text: &str) -> Result<()> {
        Ok(self.keyboard.write_all(text.as_bytes())?)
    }

    fn is_raw(&self) -> Result<bool> {
        let mode = tcgetattr(self.line.as_fd())?;
        Ok(!mode
            .local_flags
            .intersects(LocalFlags::ICANON | LocalFlags::ECHO))
    }

    /// The exit status, and that the terminal is as before.
    fn finish(mut self) -> Result<(i32, String)> {
        let deadline = Instant::now() + BOUND;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() > deadline {
                self.child.kill()?;
                self.child.wait()?;
                anyhow::bail!("it does not end; screen: {}", self.screen());
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let screen = self.screen();
        ensure!(
            !self.is_raw()?,
            "the terminal is still raw; screen: {screen}"
        );
        Ok((status.code().unwrap_or(-1), screen))
    }
}

fn way_out(bench: &Bench) -> Result<String> {
    let mut terminal = OnTerminal::start(bench, &[])?;
    ensure!(terminal.is_raw()?, "the terminal is not raw");
    terminal.wait_for("Ctrl-] then q")?;
    // Ctrl-C is the guest's.
    terminal.type_in("abc\x03\x1d\x1d")?;
    terminal.wait_for("abc\x03\x1d")?;
    terminal.type_in("\x1d?")?;
    wait_until("help", || {
        Ok(terminal.screen().matches("Ctrl-] then q").count() == 2)
    })?;
    terminal.type_in("dz")?;
    terminal.wait_for("dz")?;
    terminal.type_in("\x1dq")?;
    terminal.wait_for("repeat to end")?;
    terminal.type_in("\x1dq")?;
    let (code, screen) = terminal.finish()?;
    ensure!(code == 120, "exit {code}: {screen}");
    let mut obedient = OnTerminal::start(bench, &[])?;
    obedient.type_in("\x1dq")?;
    let (code, screen) = obedient.finish()?;
    ensure!(code == 0, "exit {code}: {screen}");
    Ok(String::new())
}

fn after_signal(bench: &Bench) -> Result<String> {
    let terminal = OnTerminal::start(bench, &[])?;
    kill(Pid::from_raw(terminal.child.id() as i32), Signal::SIGTERM)?;
    let (code, screen) = terminal.finish()?;
    ensure!(code == 0, "exit {code}: {screen}");
    Ok(String::new())
}

/// The machine's process is killed outright: its parent repairs the terminal.
fn after_kill(bench: &Bench) -> Result<String> {
    let terminal = OnTerminal::start(bench, &["--name", "k"])?;
    let pid = super::outside::view(bench, "k")?["machine_pid"].as_i64();
    kill(Pid::from_raw(pid.unwrap_or(-1) as i32), Signal::SIGKILL)?;
    terminal.wait_for("ended by signal 9")?;
    let (code, screen) = terminal.finish()?;
    ensure!(code == 137, "exit {code}: {screen}");
    Ok(String::new())
}
