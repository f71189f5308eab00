//! Guest memory to and from the files of a checkpoint.
//!
//! Each slice writes the pages that it owns to a file of its own. Those that it manages at the
//! start come from the files of all, when they are needed (`restoring`). At the cut the memory of all slices is at
//! rest, so every page that was touched has one owner, which has its bytes: each page is in
//! one file, and no page is sent between slices. `page_writer` writes them.
//!
//! A monitor is confined when it writes and cannot open files: the user's command opens
//! them, the primary gets them with the request, and passes each secondary its own over a
//! socket that the launcher made.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use weft_aggregate::Slice;
use weft_aggregate::commands::SavedWay;
use weft_checkpoint::{Identity, PAGE_BYTES, Set, Written};
use weft_coherent_memory::Source;
use weft_guest_memory::{DEVICE_HOLE, FOUR_GIB, Ram};

use super::MachineError;
use super::restoring::SavedMemory;
use super::state::MachineState;

/// Longest wait until no message about a page is under way. A page comes within two leases;
/// one that does not ends the machine.
pub(super) const REST_WAIT: Duration = Duration::from_secs(10);
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
    /// By its name, the slice on a host that has files of the set.
    pub servers: BTreeMap<String, usize>,
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
    /// Of the checkpoint that has the pages which did not change since.
    pub base: Option<Identity>,
    /// Open files for pages: the first ones are written, as many as the machine has nodes.
    pub files: Vec<File>,
    /// Slices whose daemons made a file on their own hosts: theirs here get the tables.
    pub on_hosts: BTreeSet<usize>,
    /// The machine goes on while they are written: [`super::Handle::save_progress`] says when
    /// they are.
    pub is_live: bool,
}

/// What a machine wrote and saved.
#[derive(Debug)]
pub struct WrittenCheckpoint {
    pub state: MachineState,
    /// See [`super::SavedMachine::updated`].
    pub updated: Vec<Range<u64>>,
    /// By slice; empty while they are being written, or the files flushed.
    pub pages: Vec<Written>,
}

/// How far a save is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointProgress {
    /// So many pages are left; none: their files are being finished.
    Left(u64),
    /// All are written, by slice.
    Written(Vec<Written>),
}

/// The guest-physical address after the last byte of so much RAM.
pub fn memory_end(memory_bytes: u64) -> u64 {
    match memory_bytes > DEVICE_HOLE {
        true => FOUR_GIB + (memory_bytes - DEVICE_HOLE),
        false => memory_bytes,
    }
}

/// Has the pages of this slice come from the files when they are needed; reads all of RAM if
/// there is one slice that stays alone, and returns nothing. Before a vCPU runs, and before
/// another slice asks for a page of this part.
pub(super) fn read_pages(
    ram: &Ram,
    slice: Option<&Slice>,
    restore: &Restore,
) -> Result<Option<Arc<SavedMemory>>, MachineError> {
    let Some(slice) = slice else {
        let source = restore.set.pages_source()?;
        source.read_all(&(0..u64::MAX), |first, bytes| {
            let put = ram.put(first * PAGE_BYTES as u64, bytes);
            put.map_err(|error| MachineError::Restore(error.to_string()))
        })?;
        return Ok(None);
    };
    let memory = slice.memory();
    let saved = Arc::new(SavedMemory::open(
        &restore.set,
        restore.servers.clone(),
        memory.first_pages(),
    )?);
    let adopted = memory.adopt_absent(saved.pages(), Source::Here(saved.clone()));
    adopted.map_err(MachineError::Restore)?;
    Ok(Some(saved))
}

/// By member, the number of its file, and how it is written: the slices on other hosts, and those
/// that joined, have no way for files.
pub(super) type FilePlaces = Vec<(usize, u32, SavedWay)>;

/// The files of a checkpoint go to the slices, in the order of their numbers; the primary's own
/// is returned. On the primary.
pub(super) fn hand_out_files(
    slice: Option<&Slice>,
    channels: &[Option<OwnedFd>],
    identity: Identity,
    (files, on_hosts): (Vec<File>, &BTreeSet<usize>),
) -> Result<(File, FilePlaces), String> {
    let members = slice.map_or(vec![0], |slice| slice.members().into_iter().collect());
    if files.len() < members.len() {
        let (count, needed) = (files.len(), members.len());
        return Err(format!("{count} files for pages came: {needed} are needed"));
    }
    let mut files = files.into_iter();
    let own = files.next().ok_or("no file for pages came")?;
    let mut places = FilePlaces::new();
    for (number, (node, file)) in (1..).zip(members.into_iter().skip(1).zip(files)) {
        let channel = channels.get(node - 1).and_then(Option::as_ref);
        // The channel of a node that left leads nowhere, also when its number is used again.
        let is_sent = || channel.is_some_and(|it| send_file(it, identity, &file).is_ok());
        let way = match on_hosts.contains(&node) {
            true => SavedWay::Host,
            false if is_sent() => SavedWay::Socket,
            false => SavedWay::Link,
        };
        if let Some(slice) = slice.filter(|_| way != SavedWay::Socket) {
            slice.receive_saved(node, file);
        }
        places.push((node, number, way));
    }
    Ok((own, places))
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
