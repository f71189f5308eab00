//! The state of x87 and SSE as a whole. Instructions on its registers run on the
//! host: see [`crate::decode`].

use iced_x86::Mnemonic;

use super::select::Operands;
use crate::cpu::{Cpu, Faulted, cr0, cr4, vector};
use crate::op::{Handler, Op, Outcome};

/// Bytes of the area that FXSAVE writes and FXRSTOR reads.
const AREA_USED: usize = 416;

/// MXCSR's bits that exist.
const MXCSR_MASK: u32 = 0xffff;

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
    Outcome::Continue
}

extern "C" fn load_mxcsr(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.check_sse());
    let value = attempt!(cpu, cpu.load::<4>(cpu.address(op))) as u32;
    if value & !MXCSR_MASK != 0 {
        let faulted = cpu.general_protection(0);
        return cpu.outcome(faulted);
    }
    cpu.set_mxcsr(value);
    Outcome::Continue
}

extern "C" fn store_mxcsr(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.check_sse());
    let value = u64::from(cpu.mxcsr());
    attempt!(cpu, cpu.store::<4>(cpu.address(op), value));
    Outcome::Continue
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, _: &mut Op) -> Option<Handler> {
    Some(match operands.instruction.mnemonic() {
        Mnemonic::Fxsave | Mnemonic::Fxsave64 => save,
        Mnemonic::Fxrstor | Mnemonic::Fxrstor64 => restore,
        Mnemonic::Ldmxcsr => load_mxcsr,
        Mnemonic::Stmxcsr => store_mxcsr,
        _ => return None,
    })
}
