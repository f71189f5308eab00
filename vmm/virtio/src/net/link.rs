//! What is on the other end of the cable.

use std::io;
use std::os::fd::RawFd;

use weft_guest_memory::DeviceMemory;

use crate::ring::Segment;
use crate::worker::InlineHandler;

/// A cable that is pulled and put in again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cable {
    /// Frames are lost.
    Out,
    /// As when last asked.
    In,
    /// In, and it was out since last asked.
    New,
}

/// One queue pair's way out. Nothing here blocks.
pub trait Link: Send {
    /// What becomes readable, and writable.
    fn descriptor(&self) -> RawFd;
    /// The next frame, behind a header of [`super::HEADER`] bytes, into `frame`
    /// ([`super::HEADER`] + [`super::FRAME_MAX`] bytes): how long both are.
    fn receive(&mut self, frame: &mut [u8]) -> io::Result<Option<usize>>;
    /// Takes in what is there although the driver has no buffers for it now.
    fn read_ahead(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// Sends a frame with its header; `WouldBlock` when it must be sent again later.
    fn send(&mut self, memory: &DeviceMemory, frame: &[Segment]) -> io::Result<()>;
    /// The same of bytes of our own.
    fn send_bytes(&mut self, frame: &[u8]) -> io::Result<()> {
        let _ = frame;
        Err(io::ErrorKind::Unsupported.into())
    }
    /// No more frames are sent for now: what was gathered goes.
    fn finish(&mut self) {}
    /// Sends what is left of the last frame; `WouldBlock` when something still is.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// The driver took these features.
    fn set_features(&mut self, features: u64) -> io::Result<()> {
        let _ = features;
        Ok(())
    }
    /// Whether [`Link::cable`] says something.
    fn may_be_pulled(&self) -> bool {
        false
    }
    /// How the cable is, where that changes. `None` where it is in until the link fails for
    /// good.
    fn cable(&mut self) -> Option<Cable> {
        None
    }
    /// With these, the thread that brings frames may deliver them to the pair itself.
    fn set_inline_handler(&mut self, handler: InlineHandler) {
        let _ = handler;
    }
    /// The pair stands: what it has received and not used, `frame` first, is received again,
    /// also by another that has this link; false if it must keep its frame.
    fn give_back(&mut self, frame: Option<&[u8]>) -> bool {
        let _ = frame;
        false
    }
    /// What has come and was not received, oldest first, while the pair stands: for the process
    /// that goes on with the machine. The link keeps it.
    fn waiting(&mut self) -> Vec<Vec<u8>> {
        Vec::new()
    }
    /// These came before all others.
    fn put_first(&mut self, frames: Vec<Vec<u8>>) {
        let _ = frames;
    }
    /// Whether frames shall come in here.
    fn set_attached(&mut self, attached: bool) {
        let _ = attached;
    }
}
