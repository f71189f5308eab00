//! A slice of a virtual machine, as its session starts and hears it.
//!
//! The process is `weft-monitor`, the file that was there when the daemon started. Where
//! the daemon is root, the process is its peer's user from its first instruction: what it
//! opens on this host, a disk say, it opens with the rights of that user, and only
//! what the configuration lists for the peer ([`crate::consent`]). Its system calls
//! are filtered once everything is open.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use weft_proc::boot::MAX_NODES;

use super::Shared;
use super::memory::Keeper;
use super::reserved::Reserved;
use crate::config::Peer;
use crate::consent::Lender;
use crate::launch::machine::reservation_bytes;
use crate::links::{Link, Links};
use crate::monitor::{self, Loan, SETTINGS_BYTES_MAX, SliceBoot, Terms, Word};
use crate::protocol::MachineStart;
use crate::said::BATCH;
use crate::size::{PAGE_BYTES, format_bytes};
use crate::spawn::{self, Missing, Process, Role};

/// vCPUs of one machine.
const CPUS_MAX: u32 = 255;

/// What a session knows of a machine's slice that runs. It counts among the
/// daemon's until it is dropped.
pub(super) struct MachineSlice {
    daemon: Arc<Shared>,
}

impl MachineSlice {
    /// Starts the process on a reservation whose links have come, and waits until
    /// it is ready. With the end of this call the slice alone holds its links.
    pub fn start(
        daemon: &Arc<Shared>,
        peer: &Peer,
        reserved: &Reserved,
        mut links: Links,
        start: &MachineStart,
        keeper: &mut Keeper,
    ) -> Result<(Process, MachineSlice), String> {
        let slices = start.slices as usize;
        let wanted = |slice: usize| slice < slices && slice != reserved.node as usize;
        // Between hosts every link is sealed.
        let sealed = |slice: usize| links[slice].as_ref().map(Link::is_sealed);
        let whole = (0..MAX_NODES).all(|slice| sealed(slice) == wanted(slice).then_some(true));
        if !(2..=MAX_NODES).contains(&slices)
            || reserved.node >= start.slices
            || start.cpus > CPUS_MAX
            || start.settings.len() > SETTINGS_BYTES_MAX
            || !whole
        {
            return Err("the machine's description does not match its links".into());
        }
        let memory_bytes = memory_for(reserved.reservation.pages, start.cpus)?;
        let role = Role::Lent {
            arguments: &monitor::ARGUMENTS,
            user: daemon.confinement(peer).map(|confinement| confinement.user),
            group: keeper.entry(),
        };
        let executable = daemon.monitor.as_ref().map_err(Missing::to_string)?;
        let mut slice = spawn::start(executable, &role)
            .map_err(|error| format!("the slice cannot be started: {error}"))?;
        keeper.started(slice.pid())?;
        let lease_ms = reserved.lease.as_millis() as u32;
        links.truncate(slices);
        let boot = SliceBoot {
            number: reserved.node,
            lease_ms,
            settings: start.settings.clone(),
            terms: Terms::Lent(Loan {
                cpus: start.cpus,
                memory_bytes,
                lender: Lender {
                    peer: peer.name.clone(),
                    consent: peer.consent.clone(),
                },
            }),
            links: Vec::new(),
        };
        monitor::send_boot(&slice.control, boot, links, &[])
            .map_err(|error| format!("did not take its settings: {error}"))
            .and_then(|()| monitor::expect_ready(&mut slice))
            .map_err(|why| keeper.why_it_ended(&why))?;
        daemon.machine_slices.fetch_add(1, Ordering::AcqRel);
        let machine = MachineSlice {
            daemon: daemon.clone(),
        };
        Ok((slice, machine))
    }

    /// Collects what it has said, a batch at most; whether more may come.
    pub fn hear(slice: &Process, said: &mut Vec<String>) -> bool {
        for _ in 0..BATCH {
            match monitor::receive(slice.control.as_fd()) {
                None => return true,
                Some(Err(())) => return false,
                Some(Ok(Word::Said(text) | Word::Failed(text))) => said.push(text),
                Some(Ok(Word::Ready)) => {}
            }
        }
        true
    }
}

/// Guest memory for which a reservation has room beside what `cpus` vCPUs need.
fn memory_for(pages: u64, cpus: u32) -> Result<u64, String> {
    let lent_bytes = pages * PAGE_BYTES;
    let cpus_bytes = reservation_bytes(0, cpus);
    lent_bytes.checked_sub(cpus_bytes).ok_or_else(|| {
        format!(
            "{cpus} vCPUs need {}, and {} were reserved",
            format_bytes(cpus_bytes),
            format_bytes(lent_bytes)
        )
    })
}

impl Drop for MachineSlice {
    fn drop(&mut self) {
        self.daemon.machine_slices.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_are_part_of_what_is_reserved() {
        let pages = |memory_bytes, cpus| reservation_bytes(memory_bytes, cpus) / PAGE_BYTES;
        assert_eq!(memory_for(pages(64 << 20, 3), 3), Ok(64 << 20));
        assert_eq!(memory_for(pages(0, 2), 2), Ok(0));
        let why = memory_for(256, 249).unwrap_err();
        assert_eq!(why, "249 vCPUs need 17.5 GiB, and 1.0 MiB were reserved");
    }
}
