//! The messages by which a vCPU moves from one slice to another: see docs/mobility.md.

/// A step of a vCPU's way to another slice. Its number is the message's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum MoveStep {
    /// Primary to source: stop the vCPU, and hand it over.
    HandOver = 157,
    /// Source to primary: the vCPU with its state, as in
    /// [`VcpuSite::hand_over`](crate::VcpuSite::hand_over).
    HandedOver = 158,
    /// Primary to target: the same state.
    TakeOver = 159,
    /// Target to primary: the vCPU is installed. Payload: when, as in
    /// [`MoveTimes`](crate::MoveTimes).
    TakenOver = 160,
    /// Any other slice to primary: its table has the new location.
    Known = 161,
    /// Source to primary: the vCPU stays where it is. Payload: the reason, as text.
    Kept = 162,
}

impl MoveStep {
    pub const FIRST: u8 = Self::HandOver as u8;
    pub const LAST: u8 = Self::Kept as u8;
    const ALL: [Self; 6] = [
        Self::HandOver,
        Self::HandedOver,
        Self::TakeOver,
        Self::TakenOver,
        Self::Known,
        Self::Kept,
    ];

    pub(super) fn of_kind(kind: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|step| *step as u8 == kind)
    }
}
