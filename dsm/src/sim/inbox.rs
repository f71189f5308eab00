//! Numbers on a channel of the simulator, whose transport may send the tail of its
//! stream again after a reconnect. The transports of `weft-wire` do not.
//!
//! Invariant: what [`Inbox::accept`] delivers is exactly 0, 1, 2, … in order.

/// The sender's side: numbers messages from 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outbox {
    next: u64,
}

impl Outbox {
    /// The number of the next message.
    pub fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }
}

/// The receiver's side.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Inbox {
    next: u64,
}

/// What to do with a message that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// It is the next one: deliver it.
    Deliver,
    /// It was delivered before: throw it away.
    Duplicate,
}

/// Messages are missing before this one: the transport resumed too late.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("message {expected} was expected but {found} came; resend from {expected}")]
pub struct Gap {
    /// The next in order.
    pub expected: u64,
    /// What came.
    pub found: u64,
}

impl Inbox {
    /// Judges a message by its number.
    ///
    /// # Errors
    /// [`Gap`] if one before it has not come.
    pub fn accept(&mut self, number: u64) -> Result<Arrival, Gap> {
        if number < self.next {
            return Ok(Arrival::Duplicate);
        }
        if number > self.next {
            return Err(Gap {
                expected: self.next,
                found: number,
            });
        }
        self.next += 1;
        Ok(Arrival::Deliver)
    }
    /// The number that should come next: what a resend must start at or before.
    pub fn expected(&self) -> u64 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resent_tail_is_dropped_and_a_gap_is_named() {
        let mut outbox = Outbox::default();
        let mut inbox = Inbox::default();
        for _ in 0..3 {
            assert_eq!(inbox.accept(outbox.number()), Ok(Arrival::Deliver));
        }
        assert_eq!(inbox.accept(1), Ok(Arrival::Duplicate));
        assert_eq!(inbox.accept(2), Ok(Arrival::Duplicate));
        assert_eq!(
            inbox.accept(4),
            Err(Gap {
                expected: 3,
                found: 4
            })
        );
        assert_eq!(inbox.accept(3), Ok(Arrival::Deliver));
        assert_eq!(inbox.expected(), 4);
    }
}
