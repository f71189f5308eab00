//! A slice of a virtual machine, as its session starts it.
//!
//! The process is `weft-monitor`, the file that was there when the daemon started. Where
//! the daemon is root, the process is its peer's user from its first instruction: what it
//! opens on this host, a disk say, it opens with the rights of that user, and only
//! what the configuration lists for the peer ([`crate::consent`]). Its system calls
//! are filtered once everything is open.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use weft_proc::boot::MAX_NODES;

use super::reserved::Reserved;
use super::shared::Shared;
use super::slice::{Counted, LentMachine, SliceError, SliceStart};
use crate::config::Peer;
use crate::consent::Lender;
use crate::launch::machine::reservation_bytes;
use crate::links::{Link, Links};
use crate::monitor_protocol::{self, Loan, SETTINGS_BYTES_MAX, SliceBoot, Terms};
use crate::protocol::MachineStart;
use crate::rundir;
use crate::said::Spoken;
use crate::size::PAGE_BYTES;
use crate::spawn::{Confinement, Executable, Process, ProgramKind, Role, StartError};
use crate::sys;

/// vCPUs of one machine.
const CPUS_MAX: u32 = 255;

impl SliceStart for MachineStart {
    const PROGRAM: ProgramKind = ProgramKind::Monitor;

    fn check(&self, reserved: &Reserved) -> Result<(), SliceError> {
        // A machine with one slice at its start can be joined.
        let slices_min = if self.joins.is_some() { 1 } else { 2 };
        if !(slices_min..=MAX_NODES).contains(&(self.slices as usize))
            || (self.joins.is_none() && reserved.node >= self.slices)
            || self.cpus > CPUS_MAX
            || self.settings.len() > SETTINGS_BYTES_MAX
        {
            return Err(SliceError::Description);
        }
        let memory_bytes = memory_for(reserved.reservation.pages, self.cpus)?;
        match &self.joins {
            Some(join) if join.memory_bytes > memory_bytes => Err(SliceError::Description),
            _ => Ok(()),
        }
    }

    fn check_links(&self, reserved: &Reserved, links: &Links) -> Result<(), SliceError> {
        let wanted = |slice: usize| match &self.joins {
            None => slice < self.slices as usize && slice != reserved.node as usize,
            Some(join) => join.peers.contains(&(slice as u32)),
        };
        // Between hosts every link is sealed.
        let sealed = |slice: usize| links[slice].as_ref().map(Link::is_sealed);
        let whole = (0..MAX_NODES).all(|slice| sealed(slice) == wanted(slice).then_some(true));
        whole.then_some(()).ok_or(SliceError::Description)
    }

    fn executable<'a>(&self, daemon: &'a Shared) -> Result<&'a Executable, SliceError> {
        Ok(daemon.monitor.as_ref().map_err(Clone::clone)?)
    }

    fn role<'a>(
        &self,
        confinement: Option<&'a Confinement>,
        group: Option<BorrowedFd<'a>>,
    ) -> Role<'a> {
        Role::Lent {
            arguments: &monitor_protocol::ARGUMENTS,
            user: confinement.map(|confinement| confinement.user),
            group,
        }
    }

    fn boot(
        &self,
        process: &mut Process,
        (_, peer): (&Arc<Shared>, &Peer),
        reserved: &Reserved,
        links: Links,
    ) -> Result<Option<LentMachine>, SliceError> {
        let memory_bytes = memory_for(reserved.reservation.pages, self.cpus)?;
        let boot = SliceBoot {
            number: reserved.node,
            lease_ms: reserved.lease.as_millis() as u32,
            settings: self.settings.clone(),
            terms: Terms::Lent(Loan {
                cpus: self.cpus,
                memory_bytes,
                lender: Lender::of(peer),
                switches: rundir::switches(),
            }),
            links: Vec::new(),
            joins: self.joins.as_ref().map(|join| join.memory_bytes),
        };
        let memory = sys::empty_memfd(c"weft-guest-ram").map_err(SliceError::MemoryFile)?;
        monitor_protocol::send_boot(&process.control, boot, links, &[memory.as_fd()])
            .map_err(StartError::Settings)?;
        monitor_protocol::expect_ready(process)?;
        Ok(Some(LentMachine {
            memory,
            cpus: self.cpus,
            memory_bytes,
        }))
    }

    fn hear(control: BorrowedFd<'_>) -> Spoken {
        monitor_protocol::hear(control)
    }

    fn count(&self, daemon: &Arc<Shared>) -> Option<Counted> {
        Some(Counted::among(daemon))
    }
}

/// Guest memory for which a reservation has room beside what `cpus` vCPUs need.
fn memory_for(pages: u64, cpus: u32) -> Result<u64, SliceError> {
    let reserved_bytes = pages * PAGE_BYTES;
    let cpus_bytes = reservation_bytes(0, cpus);
    let memory_bytes = reserved_bytes.checked_sub(cpus_bytes);
    memory_bytes.ok_or(SliceError::Cpus {
        cpus,
        cpus_bytes,
        reserved_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_are_part_of_what_is_reserved() {
        let pages = |memory_bytes, cpus| reservation_bytes(memory_bytes, cpus) / PAGE_BYTES;
        assert_eq!(memory_for(pages(64 << 20, 3), 3).unwrap(), 64 << 20);
        assert_eq!(memory_for(pages(0, 2), 2).unwrap(), 0);
        let why = memory_for(256, 249).unwrap_err().to_string();
        assert_eq!(why, "249 vCPUs need 17.5 GiB, and 1.0 MiB were reserved");
    }
}
