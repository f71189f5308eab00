//! FWAIT: waits for x87 exceptions, which are always here already.

use super::step::{FLOATING_POINT, Failure, Outcome, Step};

/// FSW.ES: an unmasked exception waits.
const EXCEPTION: u8 = 1 << 7;

pub(super) fn fwait(step: &mut Step) -> Result<Outcome, Failure> {
    let area = step.extended.get().map_err(Failure::Extended)?;
    // The status word is the area's second.
    let waits = area.get(2).is_some_and(|status| status & EXCEPTION != 0);
    Ok(if waits {
        Outcome::Raise(FLOATING_POINT, None)
    } else {
        Outcome::Done
    })
}

#[cfg(test)]
mod tests {
    use super::super::step::tests::Bench;
    use super::*;

    #[test]
    fn only_a_waiting_exception_is_raised() {
        let mut bench = Bench::new();
        assert_eq!(bench.step(&[0x9b], fwait), Ok(Outcome::Done));
        bench.area.0.borrow_mut()[2] = 0x81;
        assert_eq!(
            bench.step(&[0x9b], fwait),
            Ok(Outcome::Raise(FLOATING_POINT, None))
        );
    }
}
