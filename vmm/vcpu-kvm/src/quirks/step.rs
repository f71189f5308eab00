//! An instruction that KVM could not execute, and what it works on.

use iced_x86::{Instruction, Register};

use super::memory::{Fault, GuestMemory};

/// RFLAGS: CF, PF, AF, ZF, SF, OF.
pub(super) const ZERO: u64 = 1 << 6;
pub(super) const STATUS: u64 = 1 | 1 << 2 | 1 << 4 | ZERO | 1 << 7 | 1 << 11;

/// How an instruction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Done: on to the next one.
    Done,
    /// A trap: on to the next one, and this exception.
    Trap(u8),
    /// A fault, at this instruction: vector and error code.
    Raise(u8, Option<u32>),
    /// Not one of those that are known here.
    Unknown,
}

/// Exceptions that instructions here raise (Intel SDM volume 3, table 6-1).
pub(super) const BREAKPOINT: u8 = 3;
pub(super) const INVALID_OPCODE: u8 = 6;
pub(super) const DEVICE_NOT_AVAILABLE: u8 = 7;
pub(super) const GENERAL_PROTECTION: u8 = 13;
pub(super) const PAGE_FAULT: u8 = 14;
pub(super) const FLOATING_POINT: u8 = 16;

/// #GP(0).
pub(super) const REFUSED: Outcome = Outcome::Raise(GENERAL_PROTECTION, Some(0));

/// The registers that instructions here read and change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Registers {
    /// In the processor's order.
    pub(super) general: [u64; 16],
    pub(super) rip: u64,
    pub(super) rflags: u64,
    pub(super) fs_base: u64,
    pub(super) gs_base: u64,
    /// For instructions that it masks.
    pub(super) xcr0: u64,
}

impl Registers {
    /// What a register holds, zero-extended.
    pub(super) fn get(&self, register: Register) -> u64 {
        let whole = self.general[register.number() & 15];
        match register.size() {
            8 => whole,
            4 => whole & 0xffff_ffff,
            _ => whole & 0xffff,
        }
    }

    /// Writes a register of two, four or eight bytes: four clear the upper half.
    pub(super) fn set(&mut self, register: Register, value: u64) {
        let whole = &mut self.general[register.number() & 15];
        *whole = match register.size() {
            8 => value,
            4 => value & 0xffff_ffff,
            _ => *whole & !0xffff | value & 0xffff,
        };
    }
}

/// x87 and vector registers: XSAVE's standard format.
pub(super) trait ExtendedState {
    fn get(&self) -> Result<Vec<u8>, String>;
    /// Replaces them.
    fn set(&self, area: &[u8]) -> Result<(), String>;
}

/// One instruction about to be done.
pub(super) struct Step<'a> {
    pub(super) instruction: Instruction,
    pub(super) registers: &'a mut Registers,
    pub(super) memory: &'a GuestMemory<'a>,
    pub(super) extended: &'a dyn ExtendedState,
}

/// Why an instruction was not done.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The guest's memory did not allow it.
    Memory(Fault),
    /// KVM's answer about the extended state.
    Extended(String),
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self::Memory(fault)
    }
}

impl Step<'_> {
    /// Linear address of the memory operand; `None` without a memory operand.
    pub(super) fn address(&self, operand: u32) -> Option<u64> {
        if self.instruction.op_kind(operand) != iced_x86::OpKind::Memory {
            return None;
        }
        self.instruction
            .virtual_address(operand, 0, |register, _, _| match register {
                Register::FS => Some(self.registers.fs_base),
                Register::GS => Some(self.registers.gs_base),
                Register::ES | Register::CS | Register::SS | Register::DS => Some(0),
                general if general.is_gpr() => Some(self.registers.get(general)),
                _ => None,
            })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::quirks::memory::Control;
    use std::cell::RefCell;
    use weft_guest_memory::Ram;

    /// Extended state without a vCPU.
    pub(in super::super) struct Area(pub(in super::super) RefCell<Vec<u8>>);

    impl ExtendedState for Area {
        fn get(&self) -> Result<Vec<u8>, String> {
            Ok(self.0.borrow().clone())
        }
        fn set(&self, area: &[u8]) -> Result<(), String> {
            *self.0.borrow_mut() = area.to_vec();
            Ok(())
        }
    }

    /// A stopped guest for the tests of single instructions.
    pub(in super::super) struct Bench {
        pub(in super::super) ram: Ram,
        pub(in super::super) control: Control,
        pub(in super::super) registers: Registers,
        pub(in super::super) area: Area,
    }

    impl Bench {
        pub(in super::super) fn new() -> Self {
            let (ram, control) = crate::quirks::memory::tests::mapped();
            Self {
                ram,
                control,
                registers: Registers {
                    rip: 0x1_0000,
                    rflags: 2,
                    xcr0: 7,
                    ..Default::default()
                },
                area: Area(RefCell::new(vec![0; 4096])),
            }
        }

        /// Decodes `bytes` and lets `emulate` do it; RIP stays.
        pub(in super::super) fn step(
            &mut self,
            bytes: &[u8],
            emulate: impl FnOnce(&mut Step) -> Result<Outcome, Failure>,
        ) -> Result<Outcome, Failure> {
            let mut decoder = iced_x86::Decoder::with_ip(64, bytes, self.registers.rip, 0);
            let memory = GuestMemory {
                ram: &self.ram,
                control: self.control,
            };
            emulate(&mut Step {
                instruction: decoder.decode(),
                registers: &mut self.registers,
                memory: &memory,
                extended: &self.area,
            })
        }
    }

    #[test]
    fn addresses_are_computed_as_the_processor_does() {
        let mut bench = Bench::new();
        bench.registers.general[0] = 0x10;
        bench.registers.general[3] = 0x1000;
        bench.registers.gs_base = 0x10_0000;
        let mut address = |bytes: &[u8]| {
            let mut found = None;
            bench
                .step(bytes, |step| {
                    found = step.address(0);
                    Ok(Outcome::Done)
                })
                .unwrap();
            found
        };
        // xsave [rbx + rax*2 + 8]
        assert_eq!(address(&[0x0f, 0xae, 0x64, 0x43, 8]), Some(0x1028));
        // xsave gs:[rbx]
        assert_eq!(address(&[0x65, 0x0f, 0xae, 0x23]), Some(0x10_1000));
        // xsave [rip + 1]: from the end of the instruction
        assert_eq!(address(&[0x0f, 0xae, 0x25, 1, 0, 0, 0]), Some(0x1_0008));
        // int3
        assert_eq!(address(&[0xcc]), None);
    }
}
