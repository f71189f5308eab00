//! A machine of the peer that comes here for good: what its launcher asks for, and what the
//! process says that takes it.

use std::os::fd::AsFd;
use std::path::Path;

use super::{Session, SessionError};
use crate::consent::{Lender, NewFile};
use crate::daemon::slice::LentSlice;
use crate::daemon::takeover::{HomePart, Progress, Takeover, TakeoverError};
use crate::error::sentence;
use crate::monitor_protocol::{HomeStep, SliceFile};
use crate::protocol::{DaemonReply, HomeRequest};

impl Session<'_> {
    /// Carries a step out. The reply, if there is one now.
    pub(super) fn move_home(&mut self, home: &HomeRequest) -> Option<DaemonReply> {
        let request = home.request;
        let done = match &home.step {
            HomeStep::Disk {
                number,
                path,
                bytes,
            } => {
                let made = self.make_disk(*number, path, *bytes);
                made.map(|()| Some(DaemonReply::HomeReady { request }))
            }
            HomeStep::NewFile { path } => {
                let made = self.make_pages_file(path);
                made.map(|()| Some(DaemonReply::HomeReady { request }))
            }
            HomeStep::KeepNewFile { keep } => {
                let kept = self.keep_pages_file(*keep);
                kept.map(|()| Some(DaemonReply::HomeReady { request }))
            }
            HomeStep::SavedFile { number, path } => {
                let opened = self.open_pages_file(*number, path);
                opened.map(|()| Some(DaemonReply::HomeReady { request }))
            }
            HomeStep::Share => {
                let shared = self.share_with_home(&home.name);
                shared.map(|()| Some(DaemonReply::HomeReady { request }))
            }
            HomeStep::Prepare => self.prepare_home(home).map(|()| None),
            HomeStep::Wait => {
                if let Some(takeover) = &mut self.takeover {
                    takeover.renew();
                }
                Ok(None)
            }
            HomeStep::File { .. } | HomeStep::Announce | HomeStep::State { .. } => {
                let takeover = self.takeover.as_mut().ok_or(TakeoverError::NotPrepared);
                let taken = takeover.and_then(|takeover| takeover.take(request, &home.step));
                taken.map(|()| None)
            }
            HomeStep::LetGo => self.let_home_go(Some(request)).map(|()| None),
            HomeStep::GiveUp => Err(TakeoverError::GivenUp),
        };
        done.unwrap_or_else(|error| match home.step {
            // The machine does not move.
            HomeStep::NewFile { .. }
            | HomeStep::KeepNewFile { .. }
            | HomeStep::SavedFile { .. }
            | HomeStep::Share => Some(DaemonReply::HomeFailed {
                request,
                reason: sentence(&error),
            }),
            _ => Some(self.home_failed(request, &error)),
        })
    }

    /// Makes the file for the slice's pages of a checkpoint, and gives it to the slice. One that
    /// was made before and not kept is removed.
    fn make_pages_file(&mut self, path: &Path) -> Result<(), TakeoverError> {
        self.new_file = None;
        let permitted = Lender::of(self.peer).disk(path, true)?;
        let owner = self.daemon.confinement(self.peer);
        let owner = owner.map(|confinement| confinement.user);
        let slice = self.slice.as_ref().filter(|slice| slice.is_machines());
        let slice = slice.ok_or(TakeoverError::NoSlice)?;
        let failed = |source| TakeoverError::File {
            action: "make",
            path: path.to_owned(),
            source,
        };
        let directory = permitted.make_directory(owner).map_err(failed)?;
        let (file, made) = permitted.create(0, owner).map_err(failed)?;
        self.new_file = Some(made.in_directory(directory));
        slice
            .take_file(SliceFile::NewPages, file.as_fd())
            .map_err(TakeoverError::Told)
    }

    fn keep_pages_file(&mut self, keep: bool) -> Result<(), TakeoverError> {
        let Some(file) = &mut self.new_file else {
            return Ok(());
        };
        if !keep {
            self.new_file = None;
            return Ok(());
        }
        file.keep_until_removed()
            .map_err(|source| TakeoverError::File {
                action: "keep",
                path: file.path().to_owned(),
                source,
            })
    }

    /// Opens a file of a checkpoint, and gives it to the slice.
    fn open_pages_file(&mut self, number: u32, path: &Path) -> Result<(), TakeoverError> {
        let permitted = Lender::of(self.peer).disk(path, false)?;
        let slice = self.slice.as_ref().filter(|slice| slice.is_machines());
        let slice = slice.ok_or(TakeoverError::NoSlice)?;
        let opened = permitted.open(libc::O_RDONLY);
        let file = opened.map_err(|source| TakeoverError::File {
            action: "open",
            path: path.to_owned(),
            source,
        })?;
        slice
            .take_file(SliceFile::SavedPages(number), file.as_fd())
            .map_err(TakeoverError::Told)
    }

    /// Makes the file for a copy of a disk, and gives it to the slice.
    fn make_disk(&mut self, number: u8, path: &Path, bytes: u64) -> Result<(), TakeoverError> {
        if !self.peer.takes_machines {
            return Err(TakeoverError::NotAllowed(self.peer.name.clone()));
        }
        let slice = self.slice.as_ref().filter(|slice| slice.is_machines());
        let slice = slice.ok_or(TakeoverError::NoSlice)?;
        let permitted = Lender::of(self.peer).disk(path, true)?;
        let owner = self.daemon.confinement(self.peer);
        let made = permitted.create(bytes, owner.map(|confinement| confinement.user));
        let (file, made) = made.map_err(|source| TakeoverError::Disk {
            path: path.to_owned(),
            source,
        })?;
        slice
            .take_file(SliceFile::Disk(number), file.as_fd())
            .map_err(TakeoverError::Told)?;
        self.disks.push(made);
        Ok(())
    }

    /// What was lent to the slice is lent until the machine's home here has ended, too.
    fn share_with_home(&mut self, name: &str) -> Result<(), TakeoverError> {
        let reserved = self.reserved.as_ref().filter(|_| self.was_inherited);
        let reserved = reserved.ok_or(TakeoverError::NoSlice)?;
        match self.daemon.homes.lend(name, &reserved.reservation) {
            true => Ok(()),
            false => Err(TakeoverError::NoHome),
        }
    }

    fn prepare_home(&mut self, home: &HomeRequest) -> Result<(), TakeoverError> {
        // One that was prepared before is not needed any more.
        self.takeover = None;
        let reserved = self.reserved.as_mut().ok_or(TakeoverError::NoSlice)?;
        let part = match self.slice.as_ref().map(|slice| slice.machine()) {
            Some(slice) => HomePart::of_slice(slice.ok_or(TakeoverError::NoSlice)?),
            None => HomePart::among_others(reserved),
        };
        let part = part.map_err(TakeoverError::Told)?;
        let lease = reserved.lease;
        self.takeover = Some(Takeover::prepare(
            self.daemon,
            (self.peer, lease),
            part,
            home,
        )?);
        Ok(())
    }

    /// The slice stands first: no vCPU runs twice. It ends when the machine runs again, and the
    /// launcher, if it has asked for this by a `request`, knows that: the kernel takes some
    /// milliseconds to give its mappings back.
    fn let_home_go(&mut self, request: Option<u64>) -> Result<(), TakeoverError> {
        let takeover = self.takeover.take().filter(Takeover::is_taken);
        let takeover = takeover.ok_or(TakeoverError::NotPrepared)?;
        self.disks.drain(..).for_each(NewFile::keep);
        if !self.slice.as_ref().is_some_and(LentSlice::halt) {
            self.end_slice();
        }
        let reserved = self.reserved.take().ok_or(TakeoverError::NoSlice);
        let gone = reserved.and_then(|reserved| takeover.let_go(self.daemon, reserved.reservation));
        if gone.is_ok()
            && let Some(request) = request
        {
            // A connection that has ended is seen in the next turn.
            let _ = self.send(&DaemonReply::HomeRuns { request });
        }
        self.end_slice();
        gone?;
        self.say("its machine goes on here, and is this host's now");
        Ok(())
    }

    /// The process has ended, or ends with this.
    fn home_failed(&mut self, request: u64, error: &TakeoverError) -> DaemonReply {
        self.takeover = None;
        self.disks.clear();
        let reason = sentence(error);
        self.say(&format!("its machine does not come here: {reason}"));
        DaemonReply::HomeFailed { request, reason }
    }

    /// What the process has said.
    pub(super) fn hear_takeover(&mut self) -> Result<(), SessionError> {
        let Some(takeover) = &mut self.takeover else {
            return Ok(());
        };
        let request = takeover.request();
        let reply = match takeover.look() {
            Ok(Progress::Nothing) => return Ok(()),
            Ok(Progress::Ready) => DaemonReply::HomeReady { request },
            Ok(Progress::Taken) => DaemonReply::HomeTaken { request },
            Err(error) => self.home_failed(request, &error),
        };
        self.send(&reply)
    }

    /// The launcher is not heard of any more: a process that has the whole state goes on, any
    /// other one ends.
    pub(super) fn settle_home(&mut self) {
        let Some(takeover) = &mut self.takeover else {
            return;
        };
        let settled = match takeover.await_taken() {
            Ok(false) => Err(TakeoverError::GivenUp),
            Ok(true) => self.let_home_go(None),
            Err(error) => Err(error),
        };
        self.takeover = None;
        if let Err(error) = settled {
            let reason = sentence(&error);
            self.say(&format!("its machine does not come here: {reason}"));
        }
    }
}
