//! A slice of a program, as its session starts it: `weft-runtime`, confined before it
//! executes its first instruction.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use weft_proc::boot::MAX_NODES;

use super::reserved::Reserved;
use super::shared::Shared;
use super::slice::{Counted, LentMachine, SliceError, SliceStart};
use crate::config::Peer;
use crate::links::{self, Links, ProgramSettings};
use crate::said::Spoken;
use crate::spawn::{Confinement, Executable, Process, ProgramKind, Role, StartError};
use crate::{control, sys};

/// The name of a slice in a process list.
const SLICE_NAME: &str = "weft-slice";

impl SliceStart for ProgramSettings {
    const PROGRAM: ProgramKind = ProgramKind::Runtime;

    fn check(&self, reserved: &Reserved) -> Result<(), SliceError> {
        let node = reserved.node;
        let fits = node < self.nodes
            && self.nodes as usize <= MAX_NODES
            && self.budget_pages[node as usize] <= reserved.reservation.pages;
        fits.then_some(()).ok_or(SliceError::Settings)
    }

    fn check_links(&self, _: &Reserved, links: &Links) -> Result<(), SliceError> {
        match links[0] {
            Some(_) => Ok(()),
            None => Err(SliceError::NoHome),
        }
    }

    fn executable<'a>(&self, daemon: &'a Shared) -> Result<&'a Executable, SliceError> {
        Ok(&daemon.runtime)
    }

    fn role<'a>(
        &self,
        confinement: Option<&'a Confinement>,
        group: Option<BorrowedFd<'a>>,
    ) -> Role<'a> {
        Role::Slice {
            name: SLICE_NAME,
            confinement,
            keeps_errors: false,
            group,
        }
    }

    fn boot(
        &self,
        process: &mut Process,
        (daemon, _): (&Arc<Shared>, &Peer),
        reserved: &Reserved,
        links: Links,
    ) -> Result<Option<LentMachine>, SliceError> {
        reserved.shared.reset_gauges();
        control::expect_hello(process)?;
        let shared = reserved.shared.descriptor();
        links::send_boot(&process.control, reserved.node, self, &links, shared, &[])
            .map_err(StartError::Settings)?;
        control::expect_ready(process)?;
        if daemon.filters {
            sys::has_filter(process.pid() as u32).map_err(SliceError::Unconfined)?;
        }
        Ok(None)
    }

    fn hear(control: BorrowedFd<'_>) -> Spoken {
        control::hear(control)
    }

    fn count(&self, _: &Arc<Shared>) -> Option<Counted> {
        None
    }
}
