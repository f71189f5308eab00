//! A machine that comes here from another host for good: this process is node 0 of it from now
//! on. `docs/roles.md` has the order of the steps.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use weft_console::{Output, Port};
use weft_machine::{Handle, HomeState, MachineRequest};
use weft_node::monitor_protocol::{Control, HomeStep, MonitorMessage, TakeoverSocket};

/// Longest state of a machine, as text.
const STATE_BYTES_MAX: usize = 64 << 20;

/// What goes to the process that takes a machine, beside guest memory.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Departure {
    /// The last output of its console: a character for each byte.
    console: String,
    /// That came from the virtio console, which reads the keys.
    is_virtio: bool,
    home: HomeState,
}

impl Departure {
    pub fn new(home: HomeState, console: &Output) -> Self {
        Self {
            console: console.last().into_iter().map(char::from).collect(),
            is_virtio: console.latest() == Port::Virtio,
            home,
        }
    }
}

/// What this process has of the machine before its state comes.
pub struct Takeover {
    /// Guest memory, until the machine is built around it.
    pub memory: Option<File>,
    /// To the daemon that lent the node whose memory that is.
    socket: TakeoverSocket,
    /// Hears when the slices of other nodes are this machine's.
    launcher: Arc<Control>,
}

impl Takeover {
    pub fn new(memory: OwnedFd, socket: OwnedFd, launcher: Arc<Control>) -> Self {
        Self {
            memory: Some(memory.into()),
            socket: TakeoverSocket::new(socket),
            launcher,
        }
    }

    /// Takes the state, and has the machine go on when the daemon says so. Returns the node that
    /// is on this host besides, if other nodes stay.
    ///
    /// # Errors
    /// Why it does not go on here.
    pub fn take(&self, handle: &Handle, console: &Output) -> Result<Option<usize>, String> {
        self.socket.say(&MonitorMessage::Ready);
        let done = self.go_on(handle, console);
        if let Err(reason) = &done {
            self.socket.fail(reason);
        }
        done
    }

    fn go_on(&self, handle: &Handle, console: &Output) -> Result<Option<usize>, String> {
        let request = |request| {
            let done = handle.request(request);
            done.map_err(|refusal| refusal.to_string())
        };
        let Departure {
            console: text,
            is_virtio,
            home,
        } = self.departure(|| drop(handle.request(MachineRequest::AnnounceHome)))?;
        let port = match is_virtio {
            true => Port::Virtio,
            false => Port::Serial,
        };
        let bytes: Vec<u8> = text.chars().filter_map(|c| u8::try_from(c).ok()).collect();
        // It has room for all of them.
        let _ = console.port(port).write_all(&bytes);
        let ran = home.ran;
        let beside = home.others.as_ref().map(|others| others.beside);
        request(MachineRequest::TakeHome(Box::new(home)))?;
        self.socket.say(&MonitorMessage::HomeTaken);
        // From here on the old host goes on only if the daemon says that this process has ended:
        // a daemon that has ended says nothing.
        match self.socket.next() {
            Ok(Some(HomeStep::LetGo) | None) | Err(_) => {}
            Ok(Some(other)) => return Err(format!("{other:?} instead of leave to go on")),
        }
        // Where other nodes stay, they are this machine's from now on, and its launcher's.
        self.launcher.say(&MonitorMessage::HomeTaken);
        request(MachineRequest::SettleHome)?;
        if ran {
            request(MachineRequest::Resume)?;
        }
        self.socket.say(&MonitorMessage::HomeRuns);
        Ok(beside)
    }

    /// Waits for the state. Meanwhile the machine stops sending where it is: `announce` it.
    fn departure(&self, announce: impl Fn()) -> Result<Departure, String> {
        let mut text = String::new();
        loop {
            match self.socket.next() {
                Ok(Some(HomeStep::Announce)) => announce(),
                Ok(Some(HomeStep::State { part, is_last })) => {
                    text += &part;
                    if text.len() > STATE_BYTES_MAX {
                        return Err("the machine's state is too long".into());
                    }
                    if is_last {
                        break;
                    }
                }
                Ok(Some(other)) => return Err(format!("{other:?} instead of a state")),
                Ok(None) => return Err("the daemon has ended".into()),
                Err(error) => return Err(format!("the daemon is not understood: {error}")),
            }
        }
        serde_json::from_str(&text)
            .map_err(|error| format!("the machine's state is not understood: {error}"))
    }
}
