//! POPCNT: the kernel's `hweight`, where it was not told to do without.

use super::step::{Failure, Outcome, STATUS, Step, ZERO};

pub(super) fn popcnt(step: &mut Step) -> Result<Outcome, Failure> {
    let target = step.instruction.op0_register();
    let value = match step.address(1) {
        Some(address) => {
            let mut bytes = [0; 8];
            // Two, four or eight: the register's size is the operand's.
            step.memory
                .read(address, &mut bytes[..target.size().min(8)])?;
            u64::from_le_bytes(bytes)
        }
        None => step.registers.get(step.instruction.op1_register()),
    };
    step.registers.set(target, value.count_ones().into());
    step.registers.rflags &= !STATUS;
    if value == 0 {
        step.registers.rflags |= ZERO;
    }
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::super::memory::Fault;
    use super::super::step::tests::Bench;
    use super::*;

    #[test]
    fn bits_are_counted_in_registers_and_memory() {
        let mut bench = Bench::new();
        bench.registers.general[3] = 0xf0f0_f0f0_0000_00ff;
        bench.registers.general[0] = u64::MAX;
        // popcnt rax, rbx
        bench.step(&[0xf3, 0x48, 0x0f, 0xb8, 0xc3], popcnt).unwrap();
        assert_eq!(bench.registers.general[0], 24);
        // popcnt ax, bx: the rest of RAX stays.
        bench.registers.general[0] = u64::MAX;
        bench.step(&[0x66, 0xf3, 0x0f, 0xb8, 0xc3], popcnt).unwrap();
        assert_eq!(bench.registers.general[0], 0xffff_ffff_ffff_0008);
        // popcnt eax, ebx: the upper half is cleared.
        bench.registers.general[0] = u64::MAX;
        bench.step(&[0xf3, 0x0f, 0xb8, 0xc3], popcnt).unwrap();
        assert_eq!(bench.registers.general[0], 8);
        // popcnt eax, [rbx] where it is all zero
        bench.registers.general[3] = 0x9000;
        bench.registers.rflags |= STATUS;
        bench.step(&[0xf3, 0x0f, 0xb8, 0x03], popcnt).unwrap();
        assert_eq!(bench.registers.general[0], 0);
        assert_eq!(bench.registers.rflags, 2 | ZERO);
    }

    #[test]
    fn a_missing_page_is_the_guests_business() {
        let mut bench = Bench::new();
        bench.registers.general[3] = 0x7000;
        let fault = Fault::Page {
            address: 0x7000,
            code: 0,
        };
        assert_eq!(
            bench.step(&[0xf3, 0x0f, 0xb8, 0x03], popcnt),
            Err(Failure::Memory(fault))
        );
    }
}
