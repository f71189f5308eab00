//! x87, MMX and SSE: the state as a whole, and thunks, by which instructions on
//! its registers run on the host.

use iced_x86::Mnemonic;
use weft_vcpu::{Access, PAGE_SIZE};

use super::select::Operands;
use crate::block::Mode;
use crate::cpu::{Cpu, Faulted, cr0, cr4, vector};
use crate::host;
use crate::jit::thunk::{DONE, Needs, Thunk, ThunkMemory};
use crate::op::{Handler, Op, Outcome};
use crate::tlb::tlb_index;
use crate::walk::Need;

/// Bytes of the area that FXSAVE writes and FXRSTOR reads.
const AREA_USED: usize = 416;

/// MXCSR's bits that exist.
const MXCSR_MASK: u32 = 0xffff;

/// FSW's exception flags, and their masks in FCW.
const X87_EXCEPTIONS: u16 = 0x3f;

/// FSW.ES and FSW.B: an exception that is not masked is pending.
const SUMMARY: u16 = 0x8080;

impl Cpu {
    /// #NM or #UD where x87 (MMX) instructions are switched off.
    pub fn check_x87(&mut self) -> Result<(), Faulted> {
        if self.cr0 & (cr0::EM | cr0::TS) != 0 {
            return Err(self.raise(vector::DEVICE_NOT_AVAILABLE));
        }
        Ok(())
    }

    /// #NM or #UD where SSE instructions are switched off.
    pub fn check_sse(&mut self) -> Result<(), Faulted> {
        if self.cr0 & cr0::EM != 0 || self.cr4 & cr4::OSFXSR == 0 {
            return Err(self.undefined());
        }
        if self.cr0 & cr0::TS != 0 {
            return Err(self.raise(vector::DEVICE_NOT_AVAILABLE));
        }
        Ok(())
    }

    fn fpu_word(&self, offset: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.fpu.0[offset..offset + 8]);
        u64::from_le_bytes(bytes)
    }

    /// The guest's MXCSR.
    pub fn mxcsr(&self) -> u32 {
        self.fpu_word(24) as u32
    }

    /// Makes the x87 status word's ES and B say whether an exception is pending
    /// that the control word does not mask, and leaves of MXCSR what exists: an
    /// image from elsewhere may say otherwise, and thunks load both as they are.
    pub fn normalise_fpu(&mut self) {
        let control = u16::from_le_bytes([self.fpu.0[0], self.fpu.0[1]]);
        let mut status = u16::from_le_bytes([self.fpu.0[2], self.fpu.0[3]]);
        status &= !SUMMARY;
        if status & !control & X87_EXCEPTIONS != 0 {
            status |= SUMMARY;
        }
        self.fpu.0[2..4].copy_from_slice(&status.to_le_bytes());
        self.set_mxcsr(self.mxcsr() & MXCSR_MASK);
    }

    fn set_mxcsr(&mut self, value: u32) {
        self.fpu.0[24..28].copy_from_slice(&value.to_le_bytes());
    }
}

fn area(cpu: &mut Cpu, op: &Op) -> Result<u64, Faulted> {
    cpu.check_x87()?;
    let address = cpu.address(op);
    if address & 15 != 0 {
        return Err(cpu.general_protection(0));
    }
    Ok(address)
}

extern "C" fn save(cpu: &mut Cpu, op: &Op) -> Outcome {
    let address = attempt!(cpu, area(cpu, op));
    cpu.fpu.0[28..32].copy_from_slice(&MXCSR_MASK.to_le_bytes());
    for offset in (0..AREA_USED).step_by(8) {
        let word = cpu.fpu_word(offset);
        attempt!(
            cpu,
            cpu.store::<8>(address.wrapping_add(offset as u64), word)
        );
    }
    Outcome::Continue
}

extern "C" fn restore(cpu: &mut Cpu, op: &Op) -> Outcome {
    let address = attempt!(cpu, area(cpu, op));
    let mut image = [0; AREA_USED];
    for (index, bytes) in image.chunks_exact_mut(8).enumerate() {
        let place = address.wrapping_add(8 * index as u64);
        let word = attempt!(cpu, cpu.load::<8>(place));
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let mxcsr = u32::from_le_bytes([image[24], image[25], image[26], image[27]]);
    if mxcsr & !MXCSR_MASK != 0 {
        let faulted = cpu.general_protection(0);
        return cpu.outcome(faulted);
    }
    cpu.fpu.0[..AREA_USED].copy_from_slice(&image);
    cpu.normalise_fpu();
    Outcome::Continue
}

extern "C" fn load_mxcsr<const AVX: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.check(if AVX { Needs::Avx } else { Needs::Sse }));
    let value = attempt!(cpu, cpu.load::<4>(cpu.address(op))) as u32;
    if value & !MXCSR_MASK != 0 {
        let faulted = cpu.general_protection(0);
        return cpu.outcome(faulted);
    }
    cpu.set_mxcsr(value);
    Outcome::Continue
}

extern "C" fn store_mxcsr<const AVX: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.check(if AVX { Needs::Avx } else { Needs::Sse }));
    let value = u64::from(cpu.mxcsr());
    attempt!(cpu, cpu.store::<4>(cpu.address(op), value));
    Outcome::Continue
}

/// FSW.ES: an exception that is not masked waits.
const PENDING: u8 = 0x80;

/// Bytes of the largest operand (FNSAVE's), in words.
const BUFFER_WORDS: usize = 128 / 8;

/// An operand that is on two pages, or a device's.
#[repr(align(32))]
struct Buffer([u64; BUFFER_WORDS]);

impl Cpu {
    /// #NM or #UD where a thunk's unit is switched off.
    fn check(&mut self, needs: Needs) -> Result<(), Faulted> {
        match needs {
            Needs::X87 => self.check_x87(),
            Needs::Sse => self.check_sse(),
            Needs::Avx => self.check_avx(),
            Needs::Protected if !self.is_protected() => Err(self.undefined()),
            Needs::Protected | Needs::Nothing => Ok(()),
        }
    }
}

/// Runs a thunk; where `GUARDED`, its unit may be switched off.
extern "C" fn run_thunk<const GUARDED: bool>(cpu: &mut Cpu, op: &Op) -> Outcome {
    // SAFETY: the immediate of this handler's ops is the address of a thunk that
    // the block owns.
    let thunk = unsafe { &*(op.immediate as *const Thunk) };
    if GUARDED {
        attempt!(cpu, cpu.check(thunk.needs));
    }
    if thunk.waits && cpu.fpu.0[2] & PENDING != 0 {
        let faulted = cpu.raise(vector::X87);
        return cpu.outcome(faulted);
    }
    let Some(memory) = &thunk.memory else {
        return finish(cpu, thunk, std::ptr::null_mut());
    };
    let address = cpu.address(op);
    if memory.aligned && address & (u64::from(memory.size) - 1) != 0 {
        let faulted = cpu.general_protection(0);
        return cpu.outcome(faulted);
    }
    match attempt!(cpu, operand_pointer(cpu, address, memory)) {
        Some(pointer) => finish(cpu, thunk, pointer),
        None => run_on_copy(cpu, thunk, address, memory),
    }
}

#[inline(always)]
fn operand_pointer(
    cpu: &mut Cpu,
    address: u64,
    memory: &ThunkMemory,
) -> Result<Option<*mut u8>, Faulted> {
    let class = cpu.privilege_class();
    let entry = &cpu.tlbs[class].entries[tlb_index(address)];
    let (tag, need) = match memory.access {
        Access::Read => (entry.read, Need::Read),
        Access::Write => (entry.write, Need::Write),
    };
    let offset = address.wrapping_sub(tag);
    if offset <= PAGE_SIZE - u64::from(memory.size) {
        return Ok(Some((entry.host + offset) as *mut u8));
    }
    cpu.pointer_slow(address, usize::from(memory.size), need)
}

#[inline(always)]
fn finish(cpu: &mut Cpu, thunk: &Thunk, pointer: *mut u8) -> Outcome {
    // SAFETY: the pointer is to as many bytes as the thunk's instruction uses,
    // held for what it does.
    if unsafe { (thunk.code)(cpu, pointer) } == DONE {
        return Outcome::Continue;
    }
    let faulted = if cpu.cr4 & cr4::OSXMMEXCPT != 0 {
        cpu.raise(vector::SIMD)
    } else {
        cpu.undefined()
    };
    cpu.outcome(faulted)
}

#[cold]
fn run_on_copy(cpu: &mut Cpu, thunk: &Thunk, address: u64, memory: &ThunkMemory) -> Outcome {
    let size = usize::from(memory.size);
    let mut buffer = Buffer([0; BUFFER_WORDS]);
    let bytes: *mut u8 = buffer.0.as_mut_ptr().cast();
    if size > size_of::<Buffer>() {
        let faulted = cpu.undefined();
        return cpu.outcome(faulted);
    }
    for (offset, part) in parts(size) {
        let value = attempt!(
            cpu,
            cpu.load_slow(cpu.wrapped(address.wrapping_add(offset as u64)), part)
        );
        // SAFETY: the part lies in the buffer.
        unsafe { host::write_sized(bytes.add(offset), part, value) };
    }
    let outcome = finish(cpu, thunk, bytes);
    if outcome != Outcome::Continue || memory.access == Access::Read {
        return outcome;
    }
    for (offset, part) in parts(size) {
        // SAFETY: the part lies in the buffer.
        let value = unsafe { host::read_sized(bytes.add(offset), part) };
        attempt!(
            cpu,
            cpu.store_slow(
                cpu.wrapped(address.wrapping_add(offset as u64)),
                part,
                value
            )
        );
    }
    outcome
}

/// Offsets and sizes of the accesses that `size` bytes are taken apart into.
fn parts(size: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut offset = 0;
    std::iter::from_fn(move || {
        let part = match size - offset {
            0 => return None,
            1 => 1,
            2 | 3 => 2,
            4..=7 => 4,
            _ => 8,
        };
        offset += part;
        Some((offset - part, part))
    })
}

/// The handler of ops with a thunk.
pub fn thunk_handler(mode: Mode, thunk: &Thunk) -> Handler {
    // The mode does not say whether AVX is on.
    let known = matches!(thunk.needs, Needs::X87 | Needs::Sse) && !mode.no_fpu();
    if !known {
        run_thunk::<true>
    } else {
        run_thunk::<false>
    }
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, _: &mut Op) -> Option<Handler> {
    Some(match operands.instruction.mnemonic() {
        Mnemonic::Fxsave | Mnemonic::Fxsave64 => save,
        Mnemonic::Fxrstor | Mnemonic::Fxrstor64 => restore,
        Mnemonic::Ldmxcsr => load_mxcsr::<false>,
        Mnemonic::Stmxcsr => store_mxcsr::<false>,
        Mnemonic::Vldmxcsr if operands.is_offered() => load_mxcsr::<true>,
        Mnemonic::Vstmxcsr if operands.is_offered() => store_mxcsr::<true>,
        _ => return None,
    })
}
