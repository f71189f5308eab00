//! The thread's part in a move of its vCPU to another slice, and from there.

use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use weft_aggregate::MoveTimes;
use weft_platform::clock::host_tsc;
use weft_platform::interrupts::VcpuLocation;

use super::{Activity, Thread, VcpuCommand};
use crate::vcpu::travel::{Arrival, Departure, Traveller, guest_tsc};

/// From the report that a vCPU left until its pages are looked at, which takes some
/// processor time: on one host the two nodes share processors, and the vCPU goes first.
const FOLLOW_WAIT: Duration = Duration::from_millis(1);

impl Thread {
    /// Gives the vCPU away if possible, and reports it.
    pub(super) fn leave(&mut self, mut departure: Departure) {
        let clock = self.environment.context.clock.clone();
        let stopped = guest_tsc(&clock);
        match self.give_away(departure.location) {
            Ok(traveller) => {
                let times = MoveTimes([departure.asked, stopped, guest_tsc(&clock)]);
                let follows = departure.report.left(times, traveller);
                self.departed = follows.then_some(departure.report);
            }
            Err(reason) => departure.report.stays(&reason),
        }
    }

    /// The next command for a vCPU that is away. Its pages follow it after [`FOLLOW_WAIT`],
    /// unless it comes back meanwhile. `None` if the owner is gone.
    pub(super) fn next_while_away(&mut self) -> Option<VcpuCommand> {
        let Some(mut report) = self.departed.take() else {
            return self.commands.recv().ok();
        };
        match self.commands.recv_timeout(FOLLOW_WAIT) {
            Ok(command) => {
                let comes = matches!(command, VcpuCommand::Arrive(_));
                self.departed = Some(report).filter(|_| !comes);
                Some(command)
            }
            Err(RecvTimeoutError::Timeout) => {
                report.used(self.vcpu.take_working_set());
                self.commands.recv().ok()
            }
            Err(RecvTimeoutError::Disconnected) => None,
        }
    }

    /// Everything that can fail comes before anything changes.
    fn give_away(&mut self, location: VcpuLocation) -> Result<Traveller, String> {
        let id = self.environment.id;
        if self.away {
            return Err(format!("vCPU {id} is not on this node"));
        }
        if self.environment.context.ending.load(Ordering::Relaxed) {
            return Err("the machine ends".into());
        }
        let state = self.save().map_err(|error| error.to_string())?;
        let identity = self.posted.identity();
        // From here on messages go to the other slice. Those that had come go along.
        let context = &self.environment.context;
        let pending = context
            .interrupts
            .hand_over(id, location)
            .map_err(|error| error.to_string())?;
        let left = guest_tsc(&context.clock);
        self.environment.set_alarm(false);
        self.away = true;
        self.set_activity(Activity::Away);
        Ok(Traveller {
            state,
            pending,
            identity,
            guest_tsc: left,
            luggage: Vec::new(),
        })
    }

    /// Becomes the vCPU that comes, whose location is here already.
    pub(super) fn arrive(&mut self, arrival: Arrival) {
        let clock = self.environment.context.clock.clone();
        let woken = guest_tsc(&clock);
        let Traveller {
            mut state,
            guest_tsc: left,
            ..
        } = arrival.traveller;
        self.away = false;
        self.visited.store(true, Ordering::Relaxed);
        // All slices share the guest's TSC, but not the host's.
        self.tsc_offset = clock.offset();
        state.cpu.tsc_offset = self.tsc_offset;
        let installed = self
            .vcpu
            .restore(&state.cpu)
            .and_then(|()| self.vcpu.set_tsc_offset(self.tsc_offset));
        if let Err(error) = installed {
            return self.fail(error);
        }
        self.environment.apic.arrive(state.apic);
        self.waits_for_start_up = state.waits_for_start_up;
        let kvmclock = &self.environment.context.kvmclock;
        kvmclock.arrive(self.environment.id, state.system_time, state.wall_clock);
        if self.paused {
            self.set_activity(Activity::Paused);
        } else {
            self.wait_for_tsc(left);
        }
        let running = guest_tsc(&clock);
        (arrival.report)(MoveTimes([arrival.arrived, woken, running]));
    }

    /// Waits until the guest's TSC has reached what the vCPU has seen. Corrections of the
    /// clock, and differences between hosts, are of some microseconds; of a vCPU that comes,
    /// [`Traveller::check_time`] bounds them.
    pub(super) fn wait_for_tsc(&self, seen: u64) {
        while (host_tsc().wrapping_add(self.tsc_offset).wrapping_sub(seen) as i64) < 0 {
            std::hint::spin_loop();
        }
    }
}
