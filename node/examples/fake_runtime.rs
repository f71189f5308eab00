//! A stand-in for `weft-runtime` in the tests of this crate: it speaks the
//! control protocol and runs no program.
//!
//! As a slice it gets ready and waits for the end of its links; at SIGUSR1 it
//! fails, at SIGUSR2 it takes more memory than anybody lends. As home it does what
//! the program's arguments say, one after the other:
//!
//! - `exit N`, `die SIGNAL`, `sleep MS`
//! - `say KIND TEXT`: sends a control message
//! - `relay NODE TEXT`: says what a slice said of its end
//! - `kick NODE`
//! - `exec`: a second HELLO, as after `execve`
//! - `commands MS`: answers commands for so long; a loss with 122
//! - `stretch`: says that it stretched
//! - `watch`: waits for the end of its link to node 1, says so at once, and exits
//! - `hang`: never answers anything
//! - `hoard`: takes more memory than anybody lends

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use weft_node::sys;
use weft_proc::boot::*;
use weft_proc::stats::{COMMAND_LOST, COMMAND_NONE, Shared};

static KICKS: AtomicU32 = AtomicU32::new(0);
static ASKED: AtomicI32 = AtomicI32::new(0);
/// How often a slice looks whether it was asked for something.
const LOOK: Duration = Duration::from_millis(10);
/// More than the daemon allows beside the budgets of these tests.
const TOO_MUCH_BYTES: usize = 256 << 20;

extern "C" fn kicked(_: i32) {
    KICKS.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn asked(signal: i32) {
    ASKED.store(signal, Ordering::Relaxed);
}

struct Runtime {
    control: OwnedFd,
    boot: Box<Boot>,
    descriptors: Vec<OwnedFd>,
}

fn main() {
    // SAFETY: the handlers only touch atomics.
    unsafe {
        libc::signal(KICK_SIGNAL, kicked as *const () as usize);
    }
    let fd: i32 = std::env::var(CONTROL_VARIABLE).unwrap().parse().unwrap();
    // SAFETY: the launcher left this descriptor to us.
    let control = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut runtime = hello(control, 0);
    match runtime.boot.role {
        ROLE_SLICE => {
            // SAFETY: the handler only touches atomics.
            unsafe {
                libc::signal(libc::SIGUSR1, asked as *const () as usize);
                libc::signal(libc::SIGUSR2, asked as *const () as usize);
            }
            runtime.serve();
        }
        _ => runtime.play(),
    }
}

fn hello(control: OwnedFd, generation: u64) -> Runtime {
    let mut message = ControlMessage::new(CONTROL_HELLO, 0);
    message.words[0] = generation;
    message.words[1] = VERSION.into();
    send(&control, &message);
    let (boot, descriptors) = receive_boot(&control);
    assert_eq!(boot.magic, MAGIC);
    Runtime {
        control,
        boot,
        descriptors,
    }
}

fn send(control: &OwnedFd, message: &ControlMessage) {
    sys::send_with_descriptors(control.as_fd(), message.as_bytes(), &[]).unwrap();
}

fn receive_boot(control: &OwnedFd) -> (Box<Boot>, Vec<OwnedFd>) {
    use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
    let mut bytes = vec![0; size_of::<Boot>()];
    let mut space = nix::cmsg_space!([i32; 40]);
    let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
    let message = recvmsg::<()>(
        control.as_raw_fd(),
        &mut parts,
        Some(&mut space),
        MsgFlags::empty(),
    );
    let message = message.unwrap();
    if message.bytes == 0 {
        std::process::exit(EXIT_SETUP);
    }
    let mut descriptors = Vec::new();
    for part in message.cmsgs().unwrap() {
        if let ControlMessageOwned::ScmRights(rights) = part {
            // SAFETY: the kernel just installed these for us.
            descriptors.extend(rights.iter().map(|fd| unsafe { OwnedFd::from_raw_fd(*fd) }));
        }
    }
    // SAFETY: a whole `Boot`, for which every bit pattern is valid.
    let boot = unsafe { bytes.as_ptr().cast::<Boot>().read_unaligned() };
    (Box::new(boot), descriptors)
}

impl Runtime {
    fn shared(&self) -> &'static Shared {
        let fd = &self.descriptors[self.boot.shared_fd as usize];
        // SAFETY: a memfd of this size, mapped until the process ends.
        unsafe {
            let address = libc::mmap(
                std::ptr::null_mut(),
                size_of::<Shared>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            );
            assert_ne!(address, libc::MAP_FAILED);
            &*address.cast::<Shared>()
        }
    }

    fn serve(&self) {
        let shared = self.shared();
        shared.stats.pulls.store(7, Ordering::Relaxed);
        send(
            &self.control,
            &ControlMessage::new(CONTROL_READY, self.boot.node),
        );
        let mut hoard = Vec::new();
        while !self.link_ended(0, LOOK) {
            shared.stats.beats.fetch_add(1, Ordering::Relaxed);
            match ASKED.swap(0, Ordering::Relaxed) {
                libc::SIGUSR1 => {
                    let mut message = ControlMessage::new(CONTROL_FATAL, 0);
                    message.set_text("it has had enough");
                    send(&self.control, &message);
                    std::process::exit(EXIT_INTERNAL);
                }
                libc::SIGUSR2 => hoard = vec![1u8; TOO_MUCH_BYTES],
                _ => {}
            }
        }
        drop(hoard);
    }

    fn link_ended(&self, peer: usize, bound: Duration) -> bool {
        let link = &self.descriptors[self.boot.links[peer].fd as usize];
        sys::wait_readable(&[link.as_fd()], bound).unwrap()[0]
    }

    fn lose(&self, node: u32, pages: u64) -> ! {
        let mut lost = ControlMessage::new(CONTROL_LOST, node);
        lost.words = [pages, 0, 0, 0];
        send(&self.control, &lost);
        std::process::exit(EXIT_NODE_LOST);
    }

    fn play(&mut self) {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let mut words = arguments.iter().map(String::as_str);
        while let Some(word) = words.next() {
            let mut number = || words.next().unwrap().parse::<u64>().unwrap();
            match word {
                "exit" => std::process::exit(number() as i32),
                // SAFETY: sends this process a signal.
                "die" => unsafe {
                    libc::raise(number() as i32);
                },
                "sleep" => std::thread::sleep(Duration::from_millis(number())),
                "kick" => {
                    let node = number() as u32;
                    send(&self.control, &ControlMessage::new(CONTROL_KICK, node));
                }
                "say" => {
                    let mut message = ControlMessage::new(number() as u32, 0);
                    message.set_text(words.next().unwrap());
                    send(&self.control, &message);
                }
                "relay" => {
                    let mut message = ControlMessage::new(CONTROL_FATAL, number() as u32);
                    message.set_text(words.next().unwrap());
                    send(&self.control, &message);
                }
                "lost" => {
                    let mut message = ControlMessage::new(CONTROL_LOST, number() as u32);
                    message.words = [12, 1, 0, 0];
                    send(&self.control, &message);
                }
                "exec" => {
                    send(&self.control, &ControlMessage::new(CONTROL_EXEC, 0));
                    let control = self.control.try_clone().unwrap();
                    *self = hello(control, 1);
                }
                "stretch" => {
                    self.shared().stats.stretched.store(1, Ordering::Relaxed);
                    send(&self.control, &ControlMessage::new(CONTROL_STRETCHED, 0));
                }
                "watch" => {
                    while !self.link_ended(1, Duration::from_secs(1)) {}
                    self.lose(1, 4);
                }
                "commands" => self.answer_commands(Duration::from_millis(number())),
                "hoard" => drop(std::hint::black_box(vec![1u8; TOO_MUCH_BYTES])),
                "hang" => std::thread::sleep(Duration::from_secs(60)),
                other => panic!("{other}"),
            }
        }
    }

    fn answer_commands(&self, bound: Duration) {
        let shared = self.shared();
        let end = Instant::now() + bound;
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
            let command = shared.command.load(Ordering::Acquire);
            if command == COMMAND_NONE || KICKS.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let node = shared.argument.load(Ordering::Relaxed);
            let mut done = ControlMessage::new(CONTROL_DONE, 0);
            done.words[0] = shared.sequence.load(Ordering::Relaxed).into();
            shared.command.store(COMMAND_NONE, Ordering::Release);
            if command == COMMAND_LOST {
                self.lose(node, 3);
            }
            send(&self.control, &done);
        }
    }
}
