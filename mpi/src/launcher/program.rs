//! The program on the cluster's machines, by ssh through the gateway.
//!
//! It runs in the first machine apart from any connection: its output goes to files there, and is
//! fetched from where the last byte was. So a connection, and a launcher, may break and come
//! again, and no byte is lost or shown twice.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use command_fds::{CommandFdExt as _, FdMapping};
use weft_malleable::MachineId;
use weft_node::shell::quote;

use super::Event;
use super::archive::host_program;
use super::folder::Folder;
use super::network;
use crate::request::copy_max;
use crate::wait;

/// How long a machine may take to boot until its ssh server answers.
const BOOT_MAX: Duration = Duration::from_secs(600);
/// One attempt to reach a machine.
const CONNECT: Duration = Duration::from_secs(5);
/// Attempts in a row after which the launcher hears why they failed.
const FAILURES_SAID: u32 = 10;
/// Between attempts.
const AGAIN: Duration = Duration::from_millis(300);
/// How long a command by ssh may take that does one small thing.
const SHORT_MAX: Duration = Duration::from_secs(60);

/// The home of ssh, in the cluster's folder.
const HOME: &str = "home";
/// dbclient finds its connection there.
const CONNECTION: i32 = 3;
/// Longest line before a piece of output.
const LINE_MAX: u64 = 64;

/// What comes from the program.
pub enum ProgramEvent {
    /// The machine's ssh server answers.
    Ready(MachineId),
    /// It never did.
    NotReady(MachineId, String),
    Ended {
        code: u8,
        /// Why not all of its output was written to the launcher's own.
        unshown: Option<String>,
    },
    /// The machine with its output has not answered for a while; it is asked again.
    Unreachable(String),
    /// It could not be started.
    Failed(String),
}

/// How machines are reached.
#[derive(Clone, Debug)]
pub struct Shell {
    image: PathBuf,
    /// The private key.
    key: PathBuf,
    /// Has `.ssh/known_hosts`.
    home: PathBuf,
    gateway: PathBuf,
}

impl Shell {
    /// Of a cluster whose folder has the keys.
    pub fn new(image: &Path, folder: &Folder) -> Shell {
        Shell {
            image: image.to_owned(),
            key: folder.file("id"),
            home: folder.file(HOME),
            gateway: folder.gateway(),
        }
    }

    /// A command for a machine, over a connection that is made now: its standard streams are the
    /// command's there. Without a script it is a shell.
    pub fn command(&self, machine: u32, script: &str) -> anyhow::Result<Command> {
        let address = network::address(machine);
        let to = SocketAddrV4::new(address, 22);
        let stream = weft_gateway::connect(&self.gateway, to, CONNECT)?;
        let mut command = host_program(&self.image, "dbclient");
        command
            .env("HOME", &self.home)
            .arg("-i")
            .arg(&self.key)
            .args(["-J", &format!("&{CONNECTION}"), &format!("mpi@{address}")]);
        command.fd_mappings(vec![FdMapping {
            parent_fd: OwnedFd::from(stream),
            child_fd: CONNECTION,
        }])?;
        if !script.is_empty() {
            command.arg(script);
        }
        Ok(command)
    }

    /// Runs a script to its end, and gives its standard output.
    fn run(
        &self,
        machine: u32,
        script: &str,
        input: Option<File>,
        max: Duration,
    ) -> anyhow::Result<Vec<u8>> {
        let mut command = self.command(machine, script)?;
        let input = input.map_or_else(Stdio::null, Stdio::from);
        let child = command
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = child.context("cannot start dbclient of the image")?;
        let output = wait::drain(child.stdout.take());
        let errors = wait::drain(child.stderr.take());
        let Some(status) = wait::ended_or_killed(&mut child, max)? else {
            bail!("not over within {} s", max.as_secs());
        };
        let (output, errors) = (output.join(), errors.join());
        let said = String::from_utf8_lossy(&errors.unwrap_or_default()).into_owned();
        ensure!(status.success(), "{}", said.trim());
        Ok(output.unwrap_or_default())
    }

    /// Waits in a thread of its own until the machine's ssh server answers.
    pub fn await_machine(&self, machine: MachineId, events: Sender<Event>) -> anyhow::Result<()> {
        let gateway = self.gateway.clone();
        let wait = move || {
            let begun = Instant::now();
            let to = SocketAddrV4::new(network::address(machine.0), 22);
            let event = loop {
                match greeted(&gateway, to) {
                    Ok(()) => break ProgramEvent::Ready(machine),
                    Err(error) if begun.elapsed() > BOOT_MAX => {
                        break ProgramEvent::NotReady(machine, format!("{error:#}"));
                    }
                    Err(_) => thread::sleep(AGAIN),
                }
            };
            // The launcher may have ended.
            let _ = events.send(Event::Program(event));
        };
        let thread = thread::Builder::new().name("ready".into());
        thread.spawn(wait).context("cannot start a thread")?;
        Ok(())
    }

    /// A file for the home of a machine.
    pub fn copy(&self, machine: u32, file: &Path) -> anyhow::Result<()> {
        let name = file.file_name().and_then(|name| name.to_str());
        let name = name.with_context(|| format!("{} has no plain name", file.display()))?;
        let input = File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
        let metadata = input.metadata()?;
        ensure!(metadata.is_file(), "{} is no file", file.display());
        let executable = metadata.permissions().mode() & 0o111 != 0;
        let bytes = metadata.len();
        let (new, name) = (quote(format!(".{name}.new")), quote(name));
        let mode = if executable { "755" } else { "644" };
        let (new, name) = (new.display(), name.display());
        // All of it or nothing: the connection may break.
        let script = format!(
            "cat >{new} && [ $(wc -c <{new}) = {bytes} ] && chmod {mode} {new} && mv {new} {name} \
             || {{ rm -f {new}; echo 'it did not come whole: is the memory full?' >&2; exit 1; }}"
        );
        self.run(machine, &script, Some(input), copy_max(bytes))?;
        Ok(())
    }
}

/// Writes the keys of the machines where ssh looks for them.
pub fn know_machines(folder: &Folder, machines: u32) -> anyhow::Result<()> {
    let host_key = folder.file("host_key.pub");
    let public = fs::read_to_string(&host_key)
        .with_context(|| format!("cannot read {}", host_key.display()))?;
    let lines: String = (0..machines)
        .map(|number| format!("{} {}\n", network::address(number), public.trim()))
        .collect();
    let ssh = folder.file(HOME).join(".ssh");
    fs::create_dir_all(&ssh)
        .and_then(|()| fs::write(ssh.join("known_hosts"), lines))
        .with_context(|| format!("cannot write {}", ssh.display()))
}

/// Whether something greets as an ssh server does (RFC 4253, section 4.2).
fn greeted(gateway: &Path, to: SocketAddrV4) -> anyhow::Result<()> {
    let mut stream = weft_gateway::connect(gateway, to, CONNECT)?;
    stream.set_read_timeout(Some(CONNECT))?;
    let mut banner = [0; 4];
    stream.read_exact(&mut banner)?;
    ensure!(&banner == b"SSH-", "no ssh server");
    Ok(())
}

/// Starts the program unless it was started, and follows it to its end, in a thread of its own.
pub fn follow(
    shell: Shell,
    folder: Folder,
    command: String,
    events: Sender<Event>,
) -> anyhow::Result<()> {
    let work = move || {
        let event =
            match start(&shell, &command, &events).and_then(|()| fetch(&shell, &folder, &events)) {
                Ok((code, unshown)) => ProgramEvent::Ended { code, unshown },
                Err(error) => ProgramEvent::Failed(format!("{error:#}")),
            };
        // The launcher may have ended.
        let _ = events.send(Event::Program(event));
    };
    let thread = thread::Builder::new().name("program".into());
    thread.spawn(work).context("cannot start a thread")?;
    Ok(())
}

/// As long as it takes: the machine may be moving, or its host be cut off. The launcher ends this
/// with itself, and hears why it takes long.
fn persist<T>(
    events: &Sender<Event>,
    mut attempt: impl FnMut() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut failures = 0;
    loop {
        match attempt() {
            Ok(value) => return Ok(value),
            Err(error) => {
                failures += 1;
                if failures % FAILURES_SAID == 0 {
                    let why = format!("{error:#}");
                    events.send(Event::Program(ProgramEvent::Unreachable(why)))?;
                }
                thread::sleep(Duration::from_secs(1));
            }
        }
    }
}

fn start(shell: &Shell, command: &str, events: &Sender<Event>) -> anyhow::Result<()> {
    // The exit code has a place before the output may fill the memory that its file system has.
    let program = format!(
        "{command} >run/out 2>run/err </dev/null; echo $? 1<>run/code.new; \
         mv run/code.new run/code"
    );
    let script = format!(
        "mkdir -p run && if mkdir run/started 2>/dev/null; then : >run/out; : >run/err; \
         echo '   ' >run/code.new; setsid sh -c {} >/dev/null 2>&1 </dev/null & fi",
        quote(&program).display()
    );
    persist(events, || shell.run(0, &script, None, SHORT_MAX)).map(drop)
}

/// Shows the output, and keeps it in the cluster's folder, until the program has ended: its exit
/// code, and why not all was shown.
fn fetch(
    shell: &Shell,
    folder: &Folder,
    events: &Sender<Event>,
) -> anyhow::Result<(u8, Option<String>)> {
    let mut unshown = None;
    let code = persist(events, || {
        let mut sinks = Sinks {
            out: Sink::open(&folder.file("stdout"), io::stdout())?,
            err: Sink::open(&folder.file("stderr"), io::stderr())?,
        };
        let mut child = shell
            .command(0, &fetching(sinks.out.length, sinks.err.length))?
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // What ssh itself says is of no use: it is tried again.
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start dbclient of the image")?;
        let output = child.stdout.take().context("dbclient has no pipe")?;
        let result = sinks.take(BufReader::new(output));
        unshown = unshown.take().or(sinks.out.unshown).or(sinks.err.unshown);
        let _ = child.kill();
        child.wait()?;
        result
    })?;
    Ok((code, unshown))
}

/// A script that writes what is new in both files, again and again, and once more after the exit
/// code is there. Each piece has a line before it: `o` or `e`, and its bytes; at the end `c` and
/// the code.
fn fetching(out: u64, err: u64) -> String {
    let piece = |name: &str, letter: &str| {
        format!(
            "s=$(wc -c <run/{name}); n=$((s-{letter})); if [ $n -gt 0 ]; then \
             echo {letter} $n; tail -c +$(({letter}+1)) run/{name} | head -c $n; {letter}=$s; fi; "
        )
    };
    format!(
        "o={out} e={err}; while :; do l=; [ -e run/code ] && l=1; {}{}\
         [ -n \"$l\" ] && break; sleep 0.3; done; echo c $(cat run/code)",
        piece("out", "o"),
        piece("err", "e")
    )
}

struct Sinks<O, E> {
    out: Sink<O>,
    err: Sink<E>,
}

impl<O: Write, E: Write> Sinks<O, E> {
    /// Up to the program's exit code.
    fn take(&mut self, mut from: impl BufRead) -> anyhow::Result<u8> {
        loop {
            let mut line = String::new();
            from.by_ref().take(LINE_MAX).read_line(&mut line)?;
            let (letter, number) = line.trim_end().split_once(' ').context("it broke off")?;
            let number: u64 = number.parse().context("a damaged line")?;
            match letter {
                "o" => self.out.take(&mut from, number)?,
                "e" => self.err.take(&mut from, number)?,
                "c" => return Ok(u8::try_from(number)?),
                _ => bail!("a damaged line"),
            }
        }
    }
}

/// A file that has all that was shown.
struct Sink<W> {
    file: File,
    length: u64,
    shown: W,
    /// Why not all was shown, unless its reader has gone.
    unshown: Option<String>,
}

impl<W: Write> Sink<W> {
    fn open(path: &Path, shown: W) -> anyhow::Result<Sink<W>> {
        let mut options = OpenOptions::new();
        let file = options.append(true).create(true).mode(0o600).open(path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        let length = file.metadata()?.len();
        Ok(Sink {
            file,
            length,
            shown,
            unshown: None,
        })
    }

    fn take(&mut self, from: &mut impl Read, mut count: u64) -> anyhow::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        while count > 0 {
            let wanted = buffer.len().min(usize::try_from(count)?);
            let got = from.read(&mut buffer[..wanted])?;
            ensure!(got > 0, "it broke off");
            self.file.write_all(&buffer[..got])?;
            self.length += got as u64;
            count -= got as u64;
            let shown = self.shown.write_all(&buffer[..got]);
            match shown.and_then(|()| self.shown.flush()) {
                Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                    self.unshown.get_or_insert(error.to_string());
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// `mpirun` with the program, for a shell.
pub fn mpirun(processes: u32, arguments: &[String], program: &[String]) -> String {
    let mut words = vec!["mpirun".to_owned(), "-n".to_owned(), processes.to_string()];
    words.extend(arguments.iter().chain(program).cloned());
    let quoted = words.iter().map(|word| quote(word).display().to_string());
    quoted.collect::<Vec<_>>().join(" ")
}

/// Where the gateway is in the machines' network.
pub fn gateway_options(folder: &Folder) -> weft_gateway::Options {
    weft_gateway::Options {
        switch: folder.switch(),
        mac: network::GATEWAY_MAC,
        address: network::GATEWAY,
        prefix: network::PREFIX,
        listen: folder.gateway(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_goes_on_where_it_broke_off() {
        let folder = std::env::temp_dir().join(format!("weft-output-{}", std::process::id()));
        fs::create_dir_all(folder.join("run")).unwrap();
        fs::write(folder.join("run/out"), b"first\nsecond\n").unwrap();
        fs::write(folder.join("run/err"), b"oh").unwrap();
        fs::write(folder.join("run/code"), b"3\n").unwrap();
        let sinks = || Sinks {
            out: Sink::open(&folder.join("stdout"), Vec::new()).unwrap(),
            err: Sink::open(&folder.join("stderr"), Vec::new()).unwrap(),
        };
        let said = |sinks: &Sinks<Vec<u8>, Vec<u8>>| {
            let mut shell = Command::new("sh");
            let script = fetching(sinks.out.length, sinks.err.length);
            let output = shell.args(["-c", &script]).current_dir(&folder).output();
            output.unwrap().stdout
        };
        let mut broken = sinks();
        let whole = said(&broken);
        assert!(broken.take(&whole[..10]).is_err());
        assert_eq!(broken.out.shown, b"first");
        let mut rest = sinks();
        let said = said(&rest);
        assert_eq!(rest.take(&said[..]).unwrap(), 3);
        assert_eq!(rest.out.shown, b"\nsecond\n");
        assert_eq!(rest.err.shown, b"oh");
        assert_eq!(fs::read(folder.join("stdout")).unwrap(), b"first\nsecond\n");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn output_that_cannot_be_shown_is_kept_and_said() {
        let path = std::env::temp_dir().join(format!("weft-unshown-{}", std::process::id()));
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut sink = Sink::open(&path, full).unwrap();
        sink.take(&mut &b"abc"[..], 3).unwrap();
        assert!(sink.unshown.unwrap().contains("No space left"));
        assert_eq!(fs::read(&path).unwrap(), b"abc");
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let mut sink = Sink::open(&path, writer).unwrap();
        sink.take(&mut &b"def"[..], 3).unwrap();
        assert_eq!(sink.unshown, None, "its reader wanted no more");
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn words_reach_the_program_as_they_are() {
        let command = mpirun(4, &["--map-by".into()], &["a b".into(), "it's".into()]);
        assert_eq!(command, r"'mpirun' '-n' '4' '--map-by' 'a b' 'it'\''s'");
    }
}
