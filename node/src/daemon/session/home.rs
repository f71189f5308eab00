//! A machine of the peer that comes here for good: what its launcher asks for, and what the
//! process says that takes it.

use super::{Session, SessionError};
use crate::daemon::takeover::{Progress, Takeover, TakeoverError};
use crate::error::sentence;
use crate::monitor_protocol::HomeStep;
use crate::protocol::{DaemonReply, HomeRequest};

impl Session<'_> {
    /// Carries a step out. The reply, if there is one now.
    pub(super) fn move_home(&mut self, home: &HomeRequest) -> Option<DaemonReply> {
        let request = home.request;
        let done = match &home.step {
            HomeStep::Prepare => self.prepare_home(home).map(|()| None),
            HomeStep::File { .. } | HomeStep::Announce | HomeStep::State { .. } => {
                let takeover = self.takeover.as_mut().ok_or(TakeoverError::NotPrepared);
                let taken = takeover.and_then(|takeover| takeover.take(request, &home.step));
                taken.map(|()| None)
            }
            HomeStep::LetGo => {
                let gone = self.let_home_go();
                gone.map(|()| Some(DaemonReply::HomeRuns { request }))
            }
            HomeStep::GiveUp => Err(TakeoverError::GivenUp),
        };
        done.unwrap_or_else(|error| Some(self.home_failed(request, &error)))
    }

    fn prepare_home(&mut self, home: &HomeRequest) -> Result<(), TakeoverError> {
        // One that was prepared before is not needed any more.
        self.takeover = None;
        let lent = self.reserved.as_ref().zip(self.slice.as_ref());
        let lent = lent.ok_or(TakeoverError::NoSlice)?;
        self.takeover = Some(Takeover::prepare(self.daemon, self.peer, lent, home)?);
        Ok(())
    }

    /// The slice ends first: no vCPU runs twice.
    fn let_home_go(&mut self) -> Result<(), TakeoverError> {
        let takeover = self.takeover.take().filter(Takeover::is_taken);
        let takeover = takeover.ok_or(TakeoverError::NotPrepared)?;
        self.end_slice();
        let reserved = self.reserved.take().ok_or(TakeoverError::NoSlice)?;
        takeover.let_go(self.daemon, reserved.reservation)?;
        self.say("its machine goes on here, and is this host's now");
        Ok(())
    }

    /// The process has ended, or ends with this.
    fn home_failed(&mut self, request: u64, error: &TakeoverError) -> DaemonReply {
        self.takeover = None;
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
            Ok(true) => self.let_home_go(),
            Err(error) => Err(error),
        };
        self.takeover = None;
        if let Err(error) = settled {
            let reason = sentence(&error);
            self.say(&format!("its machine does not come here: {reason}"));
        }
    }
}
