//! A companion slice: does what the bootstrap slice says, until the links end.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use weft_aggregate::orders::{Answer, Order, OrderReceiver};
use weft_aggregate::{Slice, Timekeeper};

use super::handle::Handle;
use super::lifecycle::{Refusal, Request, Stage};

/// How often it looks whether the machine is over.
const LOOK: Duration = Duration::from_millis(500);

/// The thread that takes orders.
pub(super) struct ControlLoop {
    pub slice: Arc<Slice>,
    pub timekeeper: Arc<Timekeeper>,
    pub handle: Handle,
    pub orders: OrderReceiver,
}

impl ControlLoop {
    /// Until the machine is over.
    pub fn run(self) {
        while self.handle.wait(Duration::ZERO).is_none() {
            let (ticket, json) = match self.orders.recv_timeout(LOOK) {
                Ok(order) => order,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let answer = match serde_json::from_slice(&json) {
                Ok(Order::Stop) => {
                    // The links end with the machine: the word goes first.
                    self.slice.answer(ticket, &Answer::Done);
                    let _ = self.handle.request(Request::Stop);
                    return;
                }
                Ok(order) => self
                    .obey(&order)
                    .unwrap_or_else(|refusal| Answer::Refused(refusal.to_string())),
                Err(error) => Answer::Refused(format!("a malformed command: {error}")),
            };
            self.slice.answer(ticket, &answer);
        }
    }

    fn obey(&self, order: &Order) -> Result<Answer, Refusal> {
        match order {
            Order::Run {
                tsc_offset,
                tsc_zero,
                updated,
            } => {
                for range in updated {
                    self.slice.memory().keep_up_to_date(range);
                }
                if let Err(reason) = self.timekeeper.lead(*tsc_offset, *tsc_zero) {
                    return Ok(Answer::Refused(reason));
                }
                let built = self.handle.status()?.stage == Stage::Built;
                self.handle.request(match built {
                    true => Request::Run,
                    false => Request::Resume,
                })?;
            }
            Order::Pause => drop(self.handle.request(Request::Pause)?),
            Order::Stop => {}
            Order::Status => return Ok(Answer::Status(self.handle.status()?.vcpus)),
            Order::Counters => return Ok(Answer::Counters(self.handle.counters()?)),
            Order::Pages => return Ok(Answer::Pages(self.slice.memory().hottest())),
            Order::Faults { from } => {
                let from = from.get(self.slice.number()).copied().flatten();
                return Ok(Answer::Faults(self.slice.memory().faults(from)));
            }
        }
        Ok(Answer::Done)
    }
}
