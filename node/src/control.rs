//! The control socket's conversation with a runtime, from this side: see
//! [`weft_proc::boot`].
//!
//! HELLO, then BOOT, then (slices) READY. Every step has a bound, and a runtime
//! that ends in the middle is seen at once through its pidfd.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use weft_proc::boot::{CONTROL_FATAL, CONTROL_HELLO, CONTROL_READY, ControlMessage, VERSION};

use crate::said::Spoken;
use crate::spawn::{Process, StartError};
use crate::sys;

/// How long a runtime may take to say HELLO, or READY after that. It only has
/// to map its own memory; this is for hosts under great load.
pub const START_BOUND: Duration = Duration::from_secs(10);

/// What arrived on a control socket.
pub enum Arrival {
    Message(Box<ControlMessage>),
    /// Nothing now.
    Nothing,
    /// The runtime closed it, or sent what is no message.
    Closed,
}

/// The next message, if there is one now.
pub fn receive(control: BorrowedFd<'_>) -> Arrival {
    let mut packet = [0; size_of::<ControlMessage>() + 1];
    match sys::receive_packet(control, &mut packet) {
        Ok(Some(0)) | Err(_) => Arrival::Closed,
        Ok(Some(length)) => match ControlMessage::from_bytes(&packet[..length]) {
            Some(message) => Arrival::Message(Box::new(message)),
            None => Arrival::Closed,
        },
        Ok(None) => Arrival::Nothing,
    }
}

/// The sentence in a message, without its padding and without anything that
/// would steer a terminal: a slice is not to be trusted with one.
pub fn text(message: &ControlMessage) -> String {
    let end = message.text.iter().position(|byte| *byte == 0);
    let bytes = &message.text[..end.unwrap_or(message.text.len())];
    let text = String::from_utf8_lossy(bytes);
    text.chars().filter(|c| !c.is_control()).collect()
}

/// The next thing that a runtime said.
pub fn hear(control: BorrowedFd<'_>) -> Spoken {
    match receive(control) {
        Arrival::Message(message) if message.kind == CONTROL_FATAL => {
            Spoken::Sentence(text(&message))
        }
        Arrival::Message(_) => Spoken::Other,
        Arrival::Nothing => Spoken::Nothing,
        Arrival::Closed => Spoken::Closed,
    }
}

/// Waits for a message of `kind`.
///
/// # Errors
/// What happened instead.
pub fn expect(
    runtime: &mut Process,
    kind: u32,
    bound: Duration,
) -> Result<ControlMessage, StartError> {
    let deadline = Instant::now() + bound;
    loop {
        match receive(runtime.control.as_fd()) {
            Arrival::Message(message) if message.kind == kind => return Ok(*message),
            Arrival::Message(message) if message.kind == CONTROL_FATAL => {
                return Err(StartError::Failed(text(&message)));
            }
            Arrival::Message(message) => return Err(StartError::Unexpected(message.kind)),
            Arrival::Closed => return Err(StartError::of(runtime)),
            Arrival::Nothing => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(StartError::Timeout(bound));
        }
        sys::wait_readable(&[runtime.control.as_fd()], left).map_err(StartError::Wait)?;
    }
}

/// Waits for HELLO and checks its version; returns the generation.
///
/// # Errors
/// What happened instead, or the version of what said it.
pub fn expect_hello(runtime: &mut Process) -> Result<u64, StartError> {
    let hello = expect(runtime, CONTROL_HELLO, START_BOUND)?;
    check_hello(&hello)
}

/// Checks the version of a HELLO; returns the generation.
///
/// # Errors
/// It is another.
pub fn check_hello(hello: &ControlMessage) -> Result<u64, StartError> {
    let (generation, theirs) = (hello.words[0], hello.words[1]);
    match theirs == u64::from(VERSION) {
        true => Ok(generation),
        false => Err(StartError::Version {
            theirs,
            ours: VERSION,
        }),
    }
}

/// Waits for READY.
///
/// # Errors
/// What happened instead.
pub fn expect_ready(runtime: &mut Process) -> Result<(), StartError> {
    expect(runtime, CONTROL_READY, START_BOUND).map(drop)
}
