//! LOCK: instructions that are atomic towards other vCPUs.
//!
//! Within a cache line they are the host's own locked instructions on the guest's
//! memory. Across lines, and across pages, which may be anywhere in the host, all
//! other vCPUs are kept outside meanwhile, and the pages are held for writing,
//! which keeps other nodes away; devices are not. The host's own instruction would
//! do within a page, but a split lock stops all processors of the host, so kernels
//! and hypervisors throttle it to some hundred a second, or kill the process that
//! makes one (Linux, Documentation/arch/x86/buslock.rst).

use iced_x86::Mnemonic;

use super::arithmetic;
use super::select::{Operands, Shape, sized};
use crate::access::splits_line;
use crate::cpu::{Cpu, Fault, Faulted, register};
use crate::flags;
use crate::op::{Handler, Op, Outcome};
use crate::walk::Need;

impl Cpu {
    /// Does `work` on `SIZE` bytes at `address`, atomically. `work` must be one
    /// locked instruction.
    #[inline(always)]
    pub fn locked<const SIZE: usize, T>(
        &mut self,
        address: u64,
        work: impl Fn(*mut u8) -> T,
    ) -> Result<T, Faulted> {
        if splits_line(address, SIZE) {
            return self.locked_slow::<SIZE, T>(address, work);
        }
        match self.pointer::<SIZE>(address)? {
            Some(pointer) => Ok(work(pointer)),
            None => self.locked_slow::<SIZE, T>(address, work),
        }
    }

    #[cold]
    fn locked_slow<const SIZE: usize, T>(
        &mut self,
        address: u64,
        work: impl Fn(*mut u8) -> T,
    ) -> Result<T, Faulted> {
        if !splits_line(address, SIZE) {
            // A device's register.
            return self.on_copy::<SIZE, T>(address, work);
        }
        let across = |cpu: &mut Self| match cpu.change_across::<SIZE, T>(address, &work)? {
            Some(result) => Ok(result),
            None => cpu.on_copy::<SIZE, T>(address, &work),
        };
        self.exclusively(across)
            .unwrap_or_else(|| Err(self.once_more()))
    }

    /// The instruction must be repeated later.
    #[cold]
    pub fn once_more(&mut self) -> Faulted {
        self.fault = Fault {
            abort: true,
            ..Fault::default()
        };
        Faulted
    }
}

extern "C" fn compare_exchange_registers<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    // Whole registers, so that the host decides which upper halves are cleared.
    let whole = |index: u8| if SIZE == 1 { index >> 3 } else { index };
    let shift = |index: u8| {
        if SIZE == 1 {
            u32::from(index & 7) * 8
        } else {
            0
        }
    };
    let destination = cpu.register(whole(op.destination));
    let source = cpu.get::<SIZE>(op.source);
    let accumulator = cpu.registers[register::RAX];
    let rotation = shift(op.destination);
    let (result, after) = arithmetic::compare_exchange_register::<SIZE>(
        destination.rotate_right(rotation),
        source,
        accumulator,
        &mut cpu.flags,
    );
    cpu.registers[register::RAX] = after;
    // Where both are RAX, the accumulator's own change is the whole of it.
    if flags::holds::<4>(cpu.flags) || whole(op.destination) != register::RAX as u8 {
        cpu.set_register(whole(op.destination), result.rotate_left(rotation));
    }
    Outcome::Continue
}

extern "C" fn compare_exchange_memory<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let source = cpu.get::<SIZE>(op.source);
    let accumulator = cpu.registers[register::RAX];
    let address = cpu.address(op);
    let (after, flags) = attempt!(
        cpu,
        cpu.locked::<SIZE, _>(address, |pointer| {
            let mut flags = 0;
            // SAFETY: `locked` gives a pointer to SIZE bytes that may be written.
            let after = unsafe {
                arithmetic::compare_exchange_memory::<SIZE>(
                    pointer,
                    source,
                    accumulator,
                    &mut flags,
                )
            };
            (after, flags)
        })
    );
    cpu.registers[register::RAX] = after;
    cpu.flags = flags;
    Outcome::Continue
}

extern "C" fn exchange_add_registers<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let a = cpu.get::<SIZE>(op.destination);
    let mut b = cpu.get::<SIZE>(op.source);
    let sum = arithmetic::exchange_add::<SIZE>(a, &mut b, &mut cpu.flags);
    cpu.set::<SIZE>(op.source, b);
    cpu.set::<SIZE>(op.destination, sum);
    Outcome::Continue
}

extern "C" fn exchange_add_memory<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let source = cpu.get::<SIZE>(op.source);
    let address = cpu.address(op);
    let (old, flags) = attempt!(
        cpu,
        cpu.locked::<SIZE, _>(address, |pointer| {
            let mut flags = 0;
            // SAFETY: `locked` gives a pointer to SIZE bytes that may be written.
            let old =
                unsafe { arithmetic::exchange_add_memory::<SIZE>(pointer, source, &mut flags) };
            (old, flags)
        })
    );
    cpu.set::<SIZE>(op.source, old);
    cpu.flags = flags;
    Outcome::Continue
}

/// CMPXCHG16B (8B where not `WIDE`).
extern "C" fn compare_exchange_pair<const WIDE: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let size = if WIDE { 16 } else { 8 };
    let address = cpu.address(op);
    if WIDE && address & 15 != 0 {
        let faulted = cpu.general_protection(0);
        return cpu.outcome(faulted);
    }
    let part = |value: u64| if WIDE { value } else { value & 0xffff_ffff };
    let expected = (
        part(cpu.registers[register::RAX]),
        part(cpu.registers[register::RDX]),
    );
    let new = (
        part(cpu.registers[register::RBX]),
        part(cpu.registers[register::RCX]),
    );
    let pointer = if splits_line(address, size) {
        None
    } else {
        attempt!(cpu, cpu.pointer_slow(address, size, Need::Write))
    };
    let (low, high, equal) = match pointer {
        // SAFETY: the page is held for writing, all bytes are on one line of it, and
        // 16 are aligned.
        Some(pointer) => unsafe {
            arithmetic::compare_exchange_pair::<WIDE>(pointer, expected, new)
        },
        None if WIDE => attempt!(cpu, pair_of_device(cpu, address, expected, new)),
        None => attempt!(
            cpu,
            cpu.locked_slow::<8, _>(address, |pointer| {
                // SAFETY: `locked_slow` gives a pointer to 8 bytes that may be
                // written.
                unsafe { arithmetic::compare_exchange_pair::<false>(pointer, expected, new) }
            })
        ),
    };
    if equal {
        cpu.flags |= flags::ZF;
    } else {
        cpu.flags &= !flags::ZF;
        if WIDE {
            cpu.registers[register::RAX] = low;
            cpu.registers[register::RDX] = high;
        } else {
            cpu.set::<4>(register::RAX as u8, low);
            cpu.set::<4>(register::RDX as u8, high);
        }
    }
    Outcome::Continue
}

/// CMPXCHG16B of a device's register; it cannot cross pages.
#[cold]
fn pair_of_device(
    cpu: &mut Cpu,
    address: u64,
    expected: (u64, u64),
    new: (u64, u64),
) -> Result<(u64, u64, bool), Faulted> {
    let low = cpu.load_slow(address, 8)?;
    let high = cpu.load_slow(address.wrapping_add(8), 8)?;
    let equal = (low, high) == expected;
    let (store_low, store_high) = if equal { new } else { (low, high) };
    cpu.store_slow(address, 8, store_low)?;
    cpu.store_slow(address.wrapping_add(8), 8, store_high)?;
    Ok((low, high, equal))
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>) -> Option<Handler> {
    let size = operands.size;
    Some(match (operands.instruction.mnemonic(), operands.shape) {
        (Mnemonic::Cmpxchg, Shape::RegisterRegister) => {
            sized!(size, compare_exchange_registers)
        }
        (Mnemonic::Cmpxchg, Shape::MemoryRegister) => sized!(size, compare_exchange_memory),
        (Mnemonic::Xadd, Shape::RegisterRegister) => sized!(size, exchange_add_registers),
        (Mnemonic::Xadd, Shape::MemoryRegister) => sized!(size, exchange_add_memory),
        (Mnemonic::Cmpxchg8b, Shape::Memory) => compare_exchange_pair::<false>,
        (Mnemonic::Cmpxchg16b, Shape::Memory) => compare_exchange_pair::<true>,
        _ => return None,
    })
}
