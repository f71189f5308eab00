//! INT3: kernel self-tests, BUG-like traps, the way out in `emergency_restart`.

use super::step::{BREAKPOINT, Failure, Outcome, Step};

pub(super) fn int3(_: &mut Step) -> Result<Outcome, Failure> {
    Ok(Outcome::Trap(BREAKPOINT))
}
