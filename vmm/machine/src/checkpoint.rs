//! Guest memory to and from the files of a checkpoint.
//!
//! Each slice writes the pages that it owns to a file of its own, and reads those that it
//! manages at the start from the files of all. While pages are written, the memory of all
//! slices is at rest, so every page that was touched has one owner, which has its bytes:
//! each page is in one file, and no page is sent between slices.
//!
//! A monitor is confined when it writes and cannot open files: the user's command opens
//! them, the primary gets them with the request, and passes each secondary its own over a
//! socket that the launcher made.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use weft_aggregate::Slice;
use weft_aggregate::commands::{SliceCommand, SliceReply};
use weft_checkpoint::{Identity, PAGE_BYTES, PagesWriter, Set, Written};
use weft_guest_memory::{DEVICE_HOLE, FOUR_GIB, GuestBytes, Ram};

use super::MachineError;
use super::state::MachineState;

/// Longest wait until no message about a page is under way. A page comes within two leases;
/// one that does not ends the machine.
const REST_WAIT: Duration = Duration::from_secs(10);
/// Longest wait for guest memory to be written, or read.
pub const CHECKPOINT_SECONDS_MAX: u64 = 600;

/// What a machine's process is given for checkpoints.
#[derive(Default)]
pub struct CheckpointIo {
    /// Packet sockets for files. On the primary: one to each secondary, in their order,
    /// `None` if it is on another host. On a secondary: the one to the primary.
    pub channels: Vec<Option<OwnedFd>>,
    /// What the machine is made from, instead of a kernel.
    pub restore: Option<Restore>,
}

/// A complete set of files.
#[derive(Debug)]
pub struct Restore {
    pub set: Set,
    /// Guest-physical addresses to which all slices subscribe.
    pub updated: Vec<Range<u64>>,
}

impl Restore {
    /// A line for the log. The guest learns of the time that passed only if it asks its CMOS
    /// clock or a time server.
    pub(super) fn note(&self, now: SystemTime) -> String {
        let saved_at = UNIX_EPOCH + Duration::from_secs(self.set.manifest().saved_at_s);
        // By a clock that was set back since, it was saved just now.
        let age = now.duration_since(saved_at).unwrap_or_default();
        format!(
            "restored from {}, saved {} ago: the guest's wall clock is late by that until it \
             is set (hwclock --hctosys)",
            self.set.directory().display(),
            rough(age)
        )
    }
}

/// A time as text, in the largest unit in which it is two or more.
fn rough(time: Duration) -> String {
    let seconds = time.as_secs();
    let units = [(86_400, "days"), (3600, "h"), (60, "min")];
    match units.iter().find(|(length, _)| seconds >= 2 * length) {
        Some((length, name)) => format!("{} {name}", seconds / length),
        None => format!("{seconds} s"),
    }
}

/// A checkpoint that a machine is to write.
#[derive(Debug)]
pub struct NewCheckpoint {
    pub identity: Identity,
    /// Open files for pages, one for each slice.
    pub files: Vec<File>,
}

/// What a machine wrote and saved.
#[derive(Debug)]
pub struct WrittenCheckpoint {
    pub state: MachineState,
    /// See [`super::SavedMachine::updated`].
    pub updated: Vec<Range<u64>>,
    /// By slice.
    pub pages: Vec<Written>,
}

/// The guest-physical address after the last byte of so much RAM.
pub fn memory_end(memory_bytes: u64) -> u64 {
    match memory_bytes > DEVICE_HOLE {
        true => FOUR_GIB + (memory_bytes - DEVICE_HOLE),
        false => memory_bytes,
    }
}

/// Writes the pages that this slice owns; all of RAM if there is one slice. All slices rest
/// meanwhile.
pub(super) fn write_pages(
    ram: &Ram,
    slice: Option<&Slice>,
    file: File,
    identity: Identity,
) -> Result<Written, String> {
    let number = slice.map_or(0, Slice::number);
    let failed = |error: io::Error| format!("cannot write pages.{number}: {error}");
    let writer = PagesWriter::new(file, identity, number as u32);
    let mut writer = writer.map_err(failed)?;
    let mut bytes = [0; PAGE_BYTES];
    let mut add = |memory: &dyn GuestBytes, page: u64| match memory
        .read(page * PAGE_BYTES as u64, &mut bytes)
    {
        true => writer.page(page, &bytes).map_err(failed),
        false => Err(format!("page {page:#x} is not memory")),
    };
    let unknown = |error: io::Error| format!("cannot find pages: {error}");
    match slice {
        None => {
            for range in ram.populated().map_err(unknown)? {
                let page = PAGE_BYTES as u64;
                for number in range.start / page..range.end / page {
                    add(ram, number)?;
                }
            }
        }
        Some(slice) => {
            let memory = slice.memory();
            // To read a page that the guest gave back would take memory for it again.
            let reclaimed = memory.reclaimed().map_err(unknown)?;
            for some in memory.walk() {
                for page in memory.owned(some) {
                    if !reclaimed.has(page * PAGE_BYTES as u64) {
                        add(&**memory, page)?;
                    }
                }
            }
            if memory.is_over() {
                return Err("the machine has ended".into());
            }
        }
    }
    writer.finish().map_err(failed)
}

/// Reads the pages that this slice manages; all of RAM if there is one slice. Before a vCPU
/// runs, and before another slice asks for a page of this part.
pub(super) fn read_pages(
    ram: &Ram,
    slice: Option<&Slice>,
    restore: &Restore,
) -> Result<(), MachineError> {
    let own = slice.map_or(0..u64::MAX, |slice| slice.memory().first_pages());
    let address = |page: u64| page * PAGE_BYTES as u64;
    for node in 0..restore.set.manifest().pages.len() {
        let mut reader = restore.set.pages(node)?;
        reader
            .read(&own, |first, bytes| {
                let end = first + (bytes.len() / PAGE_BYTES) as u64;
                let put = ram.put(address(first), bytes);
                put.map_err(|error| Reading::Memory(error.to_string()))?;
                match slice {
                    Some(slice) => {
                        let adopted = slice.memory().adopt(address(first)..address(end));
                        adopted.map_err(Reading::Memory)
                    }
                    None => Ok(()),
                }
            })
            .map_err(|error| match error {
                Reading::Memory(reason) => MachineError::Restore(reason),
                Reading::File(error) => error.of(restore.set.pages_path(node)).into(),
            })?;
    }
    Ok(())
}

/// Why pages could not be brought into memory.
enum Reading {
    File(weft_checkpoint::FormatError),
    Memory(String),
}

impl From<weft_checkpoint::FormatError> for Reading {
    fn from(error: weft_checkpoint::FormatError) -> Self {
        Self::File(error)
    }
}

/// Has all slices write their pages at the same time. On the primary.
pub(super) fn write_all(
    ram: &Ram,
    slice: Option<&Slice>,
    channels: &[Option<OwnedFd>],
    checkpoint: NewCheckpoint,
) -> Result<Vec<Written>, String> {
    let NewCheckpoint { identity, files } = checkpoint;
    let slices = slice.map_or(1, |slice| slice.placement().slices());
    if slice.is_some_and(|slice| !slice.members().into_iter().eq(0..slices)) {
        return Err(format!(
            "nodes have joined or left since the start: a machine can be saved on its {slices} \
             first nodes only"
        ));
    }
    if files.len() != slices {
        let count = files.len();
        return Err(format!("{count} files for pages came: {slices} are needed"));
    }
    let mut files = files.into_iter();
    let Some(own) = files.next() else {
        return Err("no file for pages came".into());
    };
    let Some(slice) = slice else {
        return Ok(vec![write_pages(ram, None, own, identity)?]);
    };
    for (node, file) in (1..).zip(files) {
        let Some(Some(channel)) = channels.get(node - 1) else {
            return Err(format!(
                "node {node} is on another host: a machine can be saved if all its nodes are on \
                 one host"
            ));
        };
        send_file(channel, identity, &file)
            .map_err(|error| format!("node {node} did not take its file: {error}"))?;
    }
    // Each slice writes the pages that it owns: none may move meanwhile.
    slice.rest_all(REST_WAIT)?;
    let written = write_pages_of_all(ram, slice, own, identity);
    slice.end_rest_all();
    written
}

fn write_pages_of_all(
    ram: &Ram,
    slice: &Slice,
    own: File,
    identity: Identity,
) -> Result<Vec<Written>, String> {
    let begun = slice.begin_command(&SliceCommand::WritePages { identity })?;
    let own = write_pages(ram, Some(slice), own, identity);
    let patience = Duration::from_secs(CHECKPOINT_SECONDS_MAX);
    let mut pages = vec![Written::default(); slice.placement().slices()];
    for (node, reply) in slice.finish_command(begun, patience)? {
        pages[node] = match reply {
            SliceReply::PagesWritten { pages, bytes } => Written { pages, bytes },
            other => return Err(format!("slice {node} sent {other:?}")),
        };
    }
    pages[0] = own?;
    Ok(pages)
}

fn send_file(channel: &OwnedFd, identity: Identity, file: &File) -> io::Result<()> {
    let descriptors = [file.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    let packet = [IoSlice::new(&identity)];
    sendmsg::<()>(channel.as_raw_fd(), &packet, &rights, flags, None)?;
    Ok(())
}

/// The file that came with `identity`. Files of checkpoints that failed before are closed.
pub(super) fn receive_file(channel: &OwnedFd, identity: Identity) -> Result<File, String> {
    loop {
        let mut bytes = Identity::default();
        let mut control = nix::cmsg_space!([std::os::fd::RawFd; 1]);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
        let message = recvmsg::<()>(channel.as_raw_fd(), &mut parts, Some(&mut control), flags)
            .map_err(|error| format!("no file for pages came: {error}"))?;
        let mut file = None;
        for part in message.cmsgs().map_err(|error| error.to_string())? {
            if let ControlMessageOwned::ScmRights(descriptors) = part {
                // SAFETY: the kernel has just made these descriptors for this call.
                let own = |fd: &i32| unsafe { File::from_raw_fd(*fd) };
                file = descriptors.iter().map(own).next_back();
            }
        }
        if message.bytes == 0 {
            return Err("the primary has closed the way for files".into());
        }
        match file {
            Some(file) if bytes == identity => return Ok(file),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_in_a_unit_that_fits() {
        let shown = [0, 119, 120, 7199, 7200, 172_800].map(|s| rough(Duration::from_secs(s)));
        assert_eq!(shown, ["0 s", "119 s", "2 min", "119 min", "2 h", "2 days"]);
    }
}
