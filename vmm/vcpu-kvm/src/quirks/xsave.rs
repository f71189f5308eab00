//! XSAVE, XSAVEOPT, XSAVEC and XRSTOR (Intel SDM volume 1, chapter 13): switching
//! the extended state between programs. Hiding XSAVE from the kernel instead would
//! leak: user code sees AVX whatever CPUID says to the kernel, and two programs
//! would share the upper halves of their registers.
//!
//! KVM keeps the state in the standard format, components that are not in use in
//! their initial state.

use iced_x86::Mnemonic;

use super::step::{
    DEVICE_NOT_AVAILABLE, Failure, INVALID_OPCODE, Outcome, REFUSED, Registers, Step,
};

/// XSAVE's legacy region: x87 without MXCSR in two parts, MXCSR and its mask, XMM.
const X87_CONTROL: std::ops::Range<usize> = 0..24;
const MXCSR: std::ops::Range<usize> = 24..32;
const X87_REGISTERS: std::ops::Range<usize> = 32..160;
const XMM: std::ops::Range<usize> = 160..416;
/// The header: XSTATE_BV, XCOMP_BV, then zeroes.
const HEADER: u64 = 512;
const HEADER_BYTES: usize = 64;
const FIRST_EXTENDED: usize = 576;

const X87: u64 = 1;
const SSE: u64 = 1 << 1;
const AVX: u64 = 1 << 2;
/// XCOMP_BV: the compacted format.
const COMPACTED: u64 = 1 << 63;
/// Value of MXCSR after reset; the bits that exist.
const MXCSR_INITIAL: u32 = 0x1f80;
const MXCSR_BITS: u32 = 0xffff;
/// FCW after reset.
const FCW_INITIAL: u16 = 0x37f;
/// CR0.TS, CR4.OSXSAVE.
const TASK_SWITCHED: u64 = 1 << 3;
const OSXSAVE: u64 = 1 << 18;

/// Where components are in the standard format, and which are aligned in the
/// compacted one: offset, size, alignment; by number. Size 0: there is none.
#[derive(Clone)]
pub(super) struct Layout(pub(super) [(u32, u32, bool); 64]);

/// One component, or part of one: in KVM's area, in the guest's, in bytes.
struct Piece {
    component: u64,
    area: usize,
    guest: u64,
    bytes: usize,
}

impl Layout {
    /// Components above SSE that `mask` names; the guest's area has the compacted
    /// format of `compacted`, or the standard one.
    fn extended(&self, mask: u64, compacted: Option<u64>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut next = FIRST_EXTENDED as u64;
        for (number, (offset, size, aligned)) in self.0.iter().enumerate().skip(2) {
            let component = 1_u64.wrapping_shl(number as u32);
            let in_format = compacted.is_none_or(|format| format & component != 0);
            if *size == 0 || number == 63 || !in_format {
                continue;
            }
            let guest = match compacted {
                None => u64::from(*offset),
                Some(_) => {
                    let start = if *aligned {
                        next.next_multiple_of(64)
                    } else {
                        next
                    };
                    next = start + u64::from(*size);
                    start
                }
            };
            if mask & component != 0 {
                pieces.push(Piece {
                    component,
                    area: *offset as usize,
                    guest,
                    bytes: *size as usize,
                });
            }
        }
        pieces
    }

    fn known(&self, mask: u64) -> bool {
        (2..63).all(|number| mask >> number & 1 == 0 || self.0[number].1 != 0)
    }
}

/// What all of them check first; else the mask of components asked for.
fn requested(step: &Step, address: u64, layout: &Layout) -> Result<u64, Outcome> {
    let control = &step.memory.control;
    if control.cr4 & OSXSAVE == 0 {
        return Err(Outcome::Raise(INVALID_OPCODE, None));
    }
    if control.cr0 & TASK_SWITCHED != 0 {
        return Err(Outcome::Raise(DEVICE_NOT_AVAILABLE, None));
    }
    if !address.is_multiple_of(64) {
        return Err(REFUSED);
    }
    let [rax, _, rdx, ..] = step.registers.general;
    let mask = (rdx << 32 | rax & 0xffff_ffff) & step.registers.xcr0;
    if layout.known(mask) {
        Ok(mask)
    } else {
        Err(Outcome::Unknown)
    }
}

/// XSAVE, XSAVEOPT, XSAVEC.
pub(super) fn save(step: &mut Step, layout: &Layout) -> Result<Outcome, Failure> {
    let Some(address) = step.address(0) else {
        return Ok(Outcome::Unknown);
    };
    let mask = match requested(step, address, layout) {
        Ok(mask) => mask,
        Err(outcome) => return Ok(outcome),
    };
    let area = step.extended.get().map_err(Failure::Extended)?;
    let compact = is(step, [Mnemonic::Xsavec, Mnemonic::Xsavec64]);
    let optimized = compact || is(step, [Mnemonic::Xsaveopt, Mnemonic::Xsaveopt64]);
    let in_use = in_use(&area) & mask;
    // The optimised forms leave out what is in its initial state.
    let written = if optimized { in_use } else { mask };
    let memory = step.memory;
    let put = |offset: u64, from: &[u8]| memory.write(address.wrapping_add(offset), from);
    if written & X87 != 0 {
        put(0, bytes(&area, X87_CONTROL)?)?;
        put(X87_REGISTERS.start as u64, bytes(&area, X87_REGISTERS)?)?;
    }
    let mxcsr = if compact {
        written & SSE
    } else {
        mask & (SSE | AVX)
    };
    if mxcsr != 0 {
        put(MXCSR.start as u64, bytes(&area, MXCSR)?)?;
    }
    if written & SSE != 0 {
        put(XMM.start as u64, bytes(&area, XMM)?)?;
    }
    for piece in layout.extended(written, compact.then_some(mask)) {
        let from = bytes(&area, piece.area..piece.area + piece.bytes)?;
        put(piece.guest, from)?;
    }
    let before = if compact {
        0
    } else {
        memory.read_word(address.wrapping_add(HEADER))? & !mask
    };
    put(HEADER, &(before | in_use).to_le_bytes())?;
    if compact {
        put(HEADER + 8, &(mask | COMPACTED).to_le_bytes())?;
    }
    Ok(Outcome::Done)
}

/// XRSTOR.
pub(super) fn restore(step: &mut Step, layout: &Layout) -> Result<Outcome, Failure> {
    let Some(address) = step.address(0) else {
        return Ok(Outcome::Unknown);
    };
    let mask = match requested(step, address, layout) {
        Ok(mask) => mask,
        Err(outcome) => return Ok(outcome),
    };
    let Some(header) = Header::read(step, address)? else {
        return Ok(REFUSED);
    };
    let mut area = step.extended.get().map_err(Failure::Extended)?;
    let load = mask & header.present;
    let clear = mask & !header.present;
    reset(&mut area, clear, layout)?;
    let get = |area: &mut Vec<u8>, offset: u64, to: std::ops::Range<usize>| {
        let place = area.get_mut(to).ok_or_else(too_small)?;
        step.memory
            .read(address.wrapping_add(offset), place)
            .map_err(Failure::from)
    };
    if load & X87 != 0 {
        get(&mut area, 0, X87_CONTROL)?;
        get(&mut area, X87_REGISTERS.start as u64, X87_REGISTERS)?;
    }
    let mxcsr = match header.compacted {
        Some(_) => load & SSE,
        None => mask & (SSE | AVX),
    };
    if mxcsr != 0 {
        // The mask beside it is not loaded.
        get(&mut area, MXCSR.start as u64, MXCSR.start..MXCSR.start + 4)?;
        if mxcsr_of(&area) & !MXCSR_BITS != 0 {
            return Ok(REFUSED);
        }
    }
    if load & SSE != 0 {
        get(&mut area, XMM.start as u64, XMM)?;
    }
    for piece in layout.extended(load, header.compacted) {
        get(&mut area, piece.guest, piece.area..piece.area + piece.bytes)?;
    }
    let mut used = word(header_word(&area)) & !mask | load;
    // Its components share one register; KVM looks for it under SSE.
    if mxcsr_of(&area) != MXCSR_INITIAL {
        used |= SSE;
    }
    area[HEADER as usize..HEADER as usize + 8].copy_from_slice(&used.to_le_bytes());
    step.extended.set(&area).map_err(Failure::Extended)?;
    Ok(Outcome::Done)
}

fn is(step: &Step, mnemonics: [Mnemonic; 2]) -> bool {
    mnemonics.contains(&step.instruction.mnemonic())
}

/// What XRSTOR's image says about itself.
struct Header {
    present: u64,
    compacted: Option<u64>,
}

impl Header {
    /// `None` where XRSTOR raises #GP (volume 1, 13.8.1 and 13.8.2).
    fn read(step: &Step, address: u64) -> Result<Option<Self>, Failure> {
        let mut bytes = [0; HEADER_BYTES];
        step.memory.read(address.wrapping_add(HEADER), &mut bytes)?;
        let field = |index: usize| {
            let mut field = [0; 8];
            field.copy_from_slice(&bytes[index * 8..index * 8 + 8]);
            word(field)
        };
        let (present, format) = (field(0), field(1));
        let Registers { xcr0, .. } = *step.registers;
        let compacted = (format & COMPACTED != 0).then_some(format & !COMPACTED);
        let refused = match compacted {
            None => present & !xcr0 != 0 || format != 0 || field(2) != 0,
            Some(components) => {
                components & !xcr0 != 0
                    || present & !components != 0
                    || (2..8).any(|index| field(index) != 0)
            }
        };
        Ok((!refused).then_some(Self { present, compacted }))
    }
}

/// Puts components into their initial state.
fn reset(area: &mut [u8], clear: u64, layout: &Layout) -> Result<(), Failure> {
    let mut zero = |range: std::ops::Range<usize>| {
        area.get_mut(range)
            .map(|part| part.fill(0))
            .ok_or_else(too_small)
    };
    if clear & X87 != 0 {
        zero(X87_CONTROL)?;
        zero(X87_REGISTERS)?;
    }
    if clear & SSE != 0 {
        zero(XMM)?;
    }
    for piece in layout.extended(clear, None) {
        debug_assert!(clear & piece.component != 0);
        zero(piece.area..piece.area + piece.bytes)?;
    }
    if clear & X87 != 0 {
        area[..2].copy_from_slice(&FCW_INITIAL.to_le_bytes());
    }
    if clear & SSE != 0 {
        area[MXCSR.start..MXCSR.start + 4].copy_from_slice(&MXCSR_INITIAL.to_le_bytes());
    }
    Ok(())
}

/// Components that are not in their initial state. SSE is in use, too, when only
/// MXCSR is.
fn in_use(area: &[u8]) -> u64 {
    let used = word(header_word(area));
    if mxcsr_of(area) == MXCSR_INITIAL {
        used
    } else {
        used | SSE
    }
}

fn header_word(area: &[u8]) -> [u8; 8] {
    let mut bytes = [0; 8];
    if let Some(header) = area.get(HEADER as usize..HEADER as usize + 8) {
        bytes.copy_from_slice(header);
    }
    bytes
}

fn mxcsr_of(area: &[u8]) -> u32 {
    let mut bytes = [0; 4];
    if let Some(mxcsr) = area.get(MXCSR.start..MXCSR.start + 4) {
        bytes.copy_from_slice(mxcsr);
    }
    u32::from_le_bytes(bytes)
}

fn word(bytes: [u8; 8]) -> u64 {
    u64::from_le_bytes(bytes)
}

fn bytes(area: &[u8], range: std::ops::Range<usize>) -> Result<&[u8], Failure> {
    area.get(range).ok_or_else(too_small)
}

fn too_small() -> Failure {
    Failure::Extended("KVM's XSAVE area is too small for a component".into())
}

#[cfg(test)]
mod tests {
    use super::super::step::tests::Bench;
    use super::*;
    use vm_memory::{Bytes, GuestAddress};

    const AT: u64 = 0x9000;
    /// xsave [rbx], xsavec [rbx], xrstor [rbx], each with REX.W.
    const XSAVE: [u8; 4] = [0x48, 0x0f, 0xae, 0x23];
    const XSAVEC: [u8; 4] = [0x48, 0x0f, 0xc7, 0x23];
    const XRSTOR: [u8; 4] = [0x48, 0x0f, 0xae, 0x2b];

    fn layout() -> Layout {
        let mut components = [(0, 0, false); 64];
        components[2] = (576, 256, false);
        components[5] = (832, 64, true);
        components[6] = (896, 512, false);
        Layout(components)
    }

    /// In use: XMM0, the upper half of YMM1, an x87 register; not component 6.
    fn bench() -> Bench {
        let mut bench = Bench::new();
        bench.registers.general = [u64::MAX; 16];
        bench.registers.general[3] = AT;
        bench.registers.xcr0 = 0x67;
        bench.control.cr4 |= OSXSAVE;
        let mut area = vec![0; 4096];
        area[..2].copy_from_slice(&FCW_INITIAL.to_le_bytes());
        area[24..28].copy_from_slice(&MXCSR_INITIAL.to_le_bytes());
        area[32] = 0x32;
        area[160] = 0x60;
        area[592] = 0x92;
        area[512] = 7;
        *bench.area.0.borrow_mut() = area;
        bench
    }

    fn byte(bench: &Bench, offset: u64) -> u8 {
        bench
            .ram
            .guest()
            .read_obj(GuestAddress(AT + offset))
            .unwrap()
    }

    #[test]
    fn what_is_saved_comes_back_in_both_formats() {
        for (instruction, format) in [(XSAVE, 0), (XSAVEC, 0x67 | COMPACTED)] {
            let mut bench = bench();
            let all = bench.area.0.borrow().clone();
            let saved = bench.step(&instruction, |step| save(step, &layout()));
            assert_eq!(saved, Ok(Outcome::Done));
            let header: [u64; 2] = bench.ram.guest().read_obj(GuestAddress(AT + 512)).unwrap();
            assert_eq!(header, [7, format]);
            assert_eq!((byte(&bench, 160), byte(&bench, 592)), (0x60, 0x92));
            // Others used the registers meanwhile.
            bench.area.0.borrow_mut()[160..3000].fill(0xee);
            bench.area.0.borrow_mut()[512..520].copy_from_slice(&0x67_u64.to_le_bytes());
            let restored = bench.step(&XRSTOR, |step| restore(step, &layout()));
            assert_eq!(restored, Ok(Outcome::Done));
            let now = bench.area.0.borrow();
            assert_eq!(now[..416], all[..416]);
            assert_eq!(now[512..520], all[512..520]);
            assert_eq!(now[576..1408], all[576..1408]);
        }
    }

    #[test]
    fn the_compacted_format_has_no_gaps_but_for_alignment() {
        let layout = layout();
        let places = |format| -> Vec<u64> {
            let pieces = layout.extended(u64::MAX, Some(format));
            pieces.iter().map(|piece| piece.guest).collect()
        };
        assert_eq!(places(0x67), [576, 832, 896]);
        assert_eq!(places(0x63), [576, 640]);
        assert_eq!(places(0x43), [576]);
    }

    #[test]
    fn only_what_is_asked_for_changes() {
        let mut bench = bench();
        bench.step(&XSAVE, |step| save(step, &layout())).unwrap();
        bench.area.0.borrow_mut()[160] = 0x11;
        bench.area.0.borrow_mut()[592] = 0x22;
        // AVX alone.
        (bench.registers.general[0], bench.registers.general[2]) = (4, 0);
        bench
            .step(&XRSTOR, |step| restore(step, &layout()))
            .unwrap();
        let area = bench.area.0.borrow();
        assert_eq!((area[160], area[592]), (0x11, 0x92));
    }

    #[test]
    fn addresses_wrap_around() {
        let mut bench = bench();
        bench.registers.general[3] = 0_u64.wrapping_sub(64);
        for instruction in [XSAVE, XSAVEC] {
            assert!(
                bench
                    .step(&instruction, |step| save(step, &layout()))
                    .is_err()
            );
        }
        assert!(
            bench
                .step(&XRSTOR, |step| restore(step, &layout()))
                .is_err()
        );
    }

    #[test]
    fn a_bad_image_or_address_is_refused() {
        let mut bench = bench();
        let set = |bench: &Bench, offset: u64, value: u64| {
            let at = GuestAddress(AT + HEADER + offset);
            bench.ram.guest().write_obj(value, at).unwrap();
        };
        let try_it = |bench: &mut Bench| bench.step(&XRSTOR, |step| restore(step, &layout()));
        set(&bench, 0, 1 << 9);
        assert_eq!(try_it(&mut bench), Ok(REFUSED));
        set(&bench, 0, 7);
        set(&bench, 8, 3 | COMPACTED);
        assert_eq!(try_it(&mut bench), Ok(REFUSED));
        set(&bench, 8, 7 | COMPACTED);
        set(&bench, 16, 1);
        assert_eq!(try_it(&mut bench), Ok(REFUSED));
        set(&bench, 16, 0);
        let mxcsr = GuestAddress(AT + 24);
        bench.ram.guest().write_obj(0x1_0000_u32, mxcsr).unwrap();
        assert_eq!(try_it(&mut bench), Ok(REFUSED));
        bench.registers.general[3] = AT + 8;
        assert_eq!(try_it(&mut bench), Ok(REFUSED));
        bench.registers.general[3] = AT;
        bench.control.cr4 &= !OSXSAVE;
        assert_eq!(try_it(&mut bench), Ok(Outcome::Raise(INVALID_OPCODE, None)));
    }
}
