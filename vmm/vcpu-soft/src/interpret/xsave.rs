//! XSAVE, XRSTOR and XCR0 (Intel SDM volume 1, chapter 13): x87, SSE and the upper
//! halves of YMM registers, in the standard format.

use iced_x86::Mnemonic;

use super::select::Operands;
use crate::cpu::{Cpu, Faulted, cr0, cr4, register, vector};
use crate::op::{Handler, Op, Outcome};

/// Components, as bits of XCR0.
pub mod component {
    pub const X87: u64 = 1;
    /// XMM registers and MXCSR.
    pub const SSE: u64 = 1 << 1;
    /// Upper halves of YMM registers.
    pub const AVX: u64 = 1 << 2;
    pub const ALL: u64 = X87 | SSE | AVX;
}

/// Bytes of the area without and with the upper halves; where these begin.
pub const LEGACY_BYTES: usize = 512 + 64;
/// Where the upper halves are in the area.
pub const HIGH_AT: usize = LEGACY_BYTES;
/// Bytes of the upper halves.
pub const HIGH_BYTES: usize = 256;
/// Bytes of the area with all components.
pub const AREA_BYTES: usize = HIGH_AT + HIGH_BYTES;
/// Where the header is.
pub const HEADER_AT: usize = 512;
/// XSTATE_BV, XCOMP_BV and the first word that must be zero.
const HEADER_WORDS: usize = 3;

/// MXCSR and its mask, the XMM registers, what comes before both.
const MXCSR_AT: usize = 24;
const XMM_AT: usize = 160;
const XMM_END: usize = 416;
const MXCSR_MASK: u32 = 0xffff;
/// FCW after power-on.
const FCW_INITIAL: u16 = 0x37f;

impl Cpu {
    /// #UD without CR4.OSXSAVE.
    fn check_xsave(&mut self) -> Result<(), Faulted> {
        if self.cr4 & cr4::OSXSAVE == 0 {
            return Err(self.undefined());
        }
        Ok(())
    }

    /// #UD or #NM where AVX is switched off.
    pub fn check_avx(&mut self) -> Result<(), Faulted> {
        const WANTED: u64 = component::SSE | component::AVX;
        let on = self.cr4 & cr4::OSXSAVE != 0 && self.xcr0 & WANTED == WANTED;
        if !on || !self.is_protected() {
            return Err(self.undefined());
        }
        if self.cr0 & cr0::TS != 0 {
            return Err(self.raise(vector::DEVICE_NOT_AVAILABLE));
        }
        Ok(())
    }

    /// Address of an area, and the components that are asked for.
    fn area(&mut self, op: &Op) -> Result<(u64, u64), Faulted> {
        self.check_xsave()?;
        if self.cr0 & cr0::TS != 0 {
            return Err(self.raise(vector::DEVICE_NOT_AVAILABLE));
        }
        let address = self.address(op);
        if address & 63 != 0 {
            return Err(self.general_protection(0));
        }
        let asked =
            self.registers[register::RDX] << 32 | self.registers[register::RAX] & 0xffff_ffff;
        Ok((address, asked & self.xcr0))
    }

    /// The area's bytes of all components, as XSAVE would write them.
    pub fn extended_image(&self) -> [u8; AREA_BYTES] {
        let mut image = [0; AREA_BYTES];
        image[..HEADER_AT].copy_from_slice(&self.fpu.0);
        image[HEADER_AT..HEADER_AT + 8].copy_from_slice(&component::ALL.to_le_bytes());
        image[HIGH_AT..].copy_from_slice(&self.ymm_high.0);
        image
    }

    /// Stores eight bytes at a time.
    fn store_part(
        &mut self,
        address: u64,
        image: &[u8],
        part: std::ops::Range<usize>,
    ) -> Result<(), Faulted> {
        for offset in part.step_by(8) {
            let place = self.wrapped(address.wrapping_add(offset as u64));
            self.store::<8>(place, word(image, offset))?;
        }
        Ok(())
    }

    fn load_part(
        &mut self,
        address: u64,
        image: &mut [u8],
        part: std::ops::Range<usize>,
    ) -> Result<(), Faulted> {
        for offset in part.step_by(8) {
            let place = self.wrapped(address.wrapping_add(offset as u64));
            let value = self.load::<8>(place)?;
            image[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    fn save_extended(&mut self, op: &Op) -> Result<(), Faulted> {
        let (address, wanted) = self.area(op)?;
        let mut image = self.extended_image();
        image[28..32].copy_from_slice(&MXCSR_MASK.to_le_bytes());
        if wanted & component::X87 != 0 {
            self.store_part(address, &image, 0..MXCSR_AT)?;
            self.store_part(address, &image, 32..XMM_AT)?;
        }
        if wanted & (component::SSE | component::AVX) != 0 {
            self.store_part(address, &image, MXCSR_AT..32)?;
        }
        if wanted & component::SSE != 0 {
            self.store_part(address, &image, XMM_AT..XMM_END)?;
        }
        if wanted & component::AVX != 0 {
            self.store_part(address, &image, HIGH_AT..AREA_BYTES)?;
        }
        let header = self.wrapped(address.wrapping_add(HEADER_AT as u64));
        let before = self.load::<8>(header)?;
        self.store::<8>(header, before & !wanted | wanted)
    }

    fn restore_extended(&mut self, op: &Op) -> Result<(), Faulted> {
        let (address, wanted) = self.area(op)?;
        let mut image = [0; AREA_BYTES];
        let header = HEADER_AT..HEADER_AT + 8 * HEADER_WORDS;
        self.load_part(address, &mut image, header)?;
        let present = word(&image, HEADER_AT);
        let others = word(&image, HEADER_AT + 8) | word(&image, HEADER_AT + 16);
        if present & !self.xcr0 != 0 || others != 0 {
            return Err(self.general_protection(0));
        }
        let loaded = wanted & present;
        // What is not in the area is as after power-on.
        image[..2].copy_from_slice(&FCW_INITIAL.to_le_bytes());
        if loaded & component::X87 != 0 {
            self.load_part(address, &mut image, 0..MXCSR_AT)?;
            self.load_part(address, &mut image, 32..XMM_AT)?;
        }
        if wanted & (component::SSE | component::AVX) != 0 {
            self.load_part(address, &mut image, MXCSR_AT..32)?;
            let value = word(&image, MXCSR_AT) as u32;
            if value & !MXCSR_MASK != 0 {
                return Err(self.general_protection(0));
            }
        }
        if loaded & component::SSE != 0 {
            self.load_part(address, &mut image, XMM_AT..XMM_END)?;
        }
        if loaded & component::AVX != 0 {
            self.load_part(address, &mut image, HIGH_AT..AREA_BYTES)?;
        }
        self.take_extended(&image, wanted);
        Ok(())
    }

    /// Makes the components in `wanted` what the image says.
    fn take_extended(&mut self, image: &[u8; AREA_BYTES], wanted: u64) {
        let fpu = &mut self.fpu.0;
        let mut take = |part: std::ops::Range<usize>| {
            fpu[part.clone()].copy_from_slice(&image[part]);
        };
        if wanted & component::X87 != 0 {
            take(0..MXCSR_AT);
            take(32..XMM_AT);
        }
        if wanted & (component::SSE | component::AVX) != 0 {
            take(MXCSR_AT..28);
        }
        if wanted & component::SSE != 0 {
            take(XMM_AT..XMM_END);
        }
        if wanted & component::AVX != 0 {
            self.ymm_high.0.copy_from_slice(&image[HIGH_AT..]);
        }
        self.normalise_fpu();
    }

    /// Sets x87, SSE and AVX from a saved state: FXSAVE's 512 bytes, or XSAVE's area.
    pub fn restore_saved(&mut self, saved: &[u8]) {
        let bytes = saved.len().min(self.fpu.0.len());
        self.fpu.0[..bytes].copy_from_slice(&saved[..bytes]);
        let high = saved.get(HIGH_AT..AREA_BYTES);
        let present = saved.get(HEADER_AT).copied().unwrap_or(0);
        match high.filter(|_| u64::from(present) & component::AVX != 0) {
            Some(high) => self.ymm_high.0.copy_from_slice(high),
            None => self.ymm_high.0.fill(0),
        }
        self.normalise_fpu();
    }
}

fn word(image: &[u8], offset: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&image[offset..offset + 8]);
    u64::from_le_bytes(bytes)
}

extern "C" fn save(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.save_extended(op));
    Outcome::Continue
}

extern "C" fn restore(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.restore_extended(op));
    Outcome::Continue
}

extern "C" fn get(cpu: &mut Cpu, _: &Op) -> Outcome {
    attempt!(cpu, cpu.check_xsave());
    if cpu.registers[register::RCX] as u32 != 0 {
        let faulted = cpu.general_protection(0);
        return cpu.outcome(faulted);
    }
    cpu.registers[register::RAX] = cpu.xcr0 & 0xffff_ffff;
    cpu.registers[register::RDX] = cpu.xcr0 >> 32;
    Outcome::Continue
}

extern "C" fn set(cpu: &mut Cpu, _: &Op) -> Outcome {
    attempt!(cpu, cpu.check_xsave());
    attempt!(cpu, cpu.privileged());
    let value = cpu.registers[register::RDX] << 32 | cpu.registers[register::RAX] & 0xffff_ffff;
    let alone = value & component::AVX != 0 && value & component::SSE == 0;
    let possible = value & component::X87 != 0 && value & !component::ALL == 0 && !alone;
    if cpu.registers[register::RCX] as u32 != 0 || !possible {
        let faulted = cpu.general_protection(0);
        return cpu.outcome(faulted);
    }
    cpu.xcr0 = value;
    Outcome::Continue
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>) -> Option<Handler> {
    if !operands.is_offered() {
        return None;
    }
    Some(match operands.instruction.mnemonic() {
        Mnemonic::Xsave | Mnemonic::Xsave64 | Mnemonic::Xsaveopt | Mnemonic::Xsaveopt64 => save,
        Mnemonic::Xrstor | Mnemonic::Xrstor64 => restore,
        Mnemonic::Xgetbv => get,
        Mnemonic::Xsetbv => set,
        _ => return None,
    })
}
