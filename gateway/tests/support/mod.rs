//! A switch on a thread, and a machine on its network: a card with a TCP/IP stack and servers.

mod machine;

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use weft_gateway::{Gateway, Options};
use weft_switch::shell::{Options as SwitchOptions, run};
use weft_test_support::Folder;
use weft_wire::keys;

pub use machine::{COUNT, ECHO, Machine, RESET, SOURCE};

/// The machine with this number has this address.
pub fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, number)
}

pub fn card(number: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, number]
}

/// Byte `index` of what a source sends.
pub fn pattern(index: u64) -> u8 {
    (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// It ends when it is dropped, as if it had been killed: all its connections do.
pub struct Switch {
    input: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Switch {
    pub fn start(door: &Path) -> Switch {
        let (input, its_input) = UnixStream::pair().unwrap();
        let (output, its_output) = UnixStream::pair().unwrap();
        let options = SwitchOptions {
            listen: ([127, 0, 0, 1], 0).into(),
            machines: door.to_path_buf(),
            keys: keys::generate().unwrap(),
            tap: None,
        };
        let thread = thread::spawn(move || {
            run(options, its_input.as_fd(), its_output.as_fd()).unwrap();
        });
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).unwrap();
        assert!(line.contains("listening"), "{line}");
        Switch {
            input: Some(input),
            thread: Some(thread),
        }
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.input = None;
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A switch, a gateway, and what they need.
pub struct Site {
    pub gateway: Option<Gateway>,
    pub switch: Option<Switch>,
    pub folder: Folder,
}

impl Site {
    pub fn new(name: &str) -> Site {
        let folder = Folder::new(name);
        let switch = Switch::start(&folder.path().join("switch"));
        let mut site = Site {
            gateway: None,
            switch: Some(switch),
            folder,
        };
        site.gateway = Some(Gateway::start(site.options()).unwrap());
        site
    }

    pub fn options(&self) -> Options {
        Options {
            switch: self.door(),
            mac: card(200),
            address: address(200),
            prefix: 16,
            listen: self.listen(),
        }
    }

    /// Where machines connect.
    pub fn door(&self) -> PathBuf {
        self.folder.path().join("switch")
    }

    /// Where clients connect.
    pub fn listen(&self) -> PathBuf {
        self.folder.path().join("gateway")
    }

    pub fn machine(&self, number: u8) -> Machine {
        Machine::start(self.door(), number, MTU)
    }
}

/// As the guests of a malleable cluster have it.
pub const MTU: usize = weft_gateway::MTU;

pub fn at(number: u8, port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(address(number), port)
}
