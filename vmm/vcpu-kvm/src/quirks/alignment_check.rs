//! CLAC and STAC: whether kernel code may touch user pages under SMAP. A kernel
//! that was told to do without SMAP has neither.

use iced_x86::Mnemonic;

use super::memory::ALIGNMENT_CHECK;
use super::step::{Failure, Outcome, Step};

pub(super) fn clac_stac(step: &mut Step) -> Result<Outcome, Failure> {
    match step.instruction.mnemonic() {
        Mnemonic::Clac => step.registers.rflags &= !ALIGNMENT_CHECK,
        Mnemonic::Stac => step.registers.rflags |= ALIGNMENT_CHECK,
        _ => return Ok(Outcome::Unknown),
    }
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::super::step::tests::Bench;
    use super::*;

    #[test]
    fn ac_is_set_and_cleared() {
        let mut bench = Bench::new();
        bench.step(&[0x0f, 0x01, 0xcb], clac_stac).unwrap();
        assert_eq!(bench.registers.rflags, 2 | ALIGNMENT_CHECK);
        bench.step(&[0x0f, 0x01, 0xca], clac_stac).unwrap();
        assert_eq!(bench.registers.rflags, 2);
    }
}
