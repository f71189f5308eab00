//! SYSCALL: this KVM does all of it but the change to kernel mode, so the guest
//! takes a page fault at LSTAR with its user code segment.
//!
//! The way around: a few bytes of padding in the kernel's text become the page
//! fault handler. They ask whether the fault was at LSTAR; if so they drop the
//! fault's frame and go on there, now in kernel mode (a fault changes it); else
//! they go to the real handler. No exit for a system call.
//!
//! ```text
//! cmp  qword [rsp+8], LSTAR     ; the frame: error code, RIP, CS, RFLAGS, RSP, SS
//! jne  handler
//! mov  rsp, [rsp+32]
//! jmp  LSTAR
//! ```
//!
//! It needs LSTAR written after the page fault's gate (Linux does), kernel page
//! tables in force in user mode (no page table isolation), and no FRED.

use iced_x86::code_asm::{CodeAssembler, qword_ptr, rsp};

use super::memory::GuestMemory;

/// A gate has 16 bytes; the page fault's is the 15th.
const PAGE_FAULT_GATE: u64 = 14 * 16;
/// What compilers and linkers fill gaps with: INT3.
const PADDING: u8 = 0xcc;
/// A gap must be this long. Longer than what is put there, so that none is taken
/// for one that is a few traps on purpose.
const GAP_MIN: usize = 64;
/// Bytes kept free at either end of it.
const GAP_MARGIN: usize = 16;
/// How far around LSTAR is searched.
const SEARCH: u64 = 4 << 20;
const PAGE: u64 = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Redirection {
    /// The gate leads through these bytes now.
    Placed,
    /// It did before: another vCPU was here.
    AlreadyThere,
}

/// Makes `lstar` reachable; `idt` is the linear address of the descriptor table.
pub(super) fn redirect(memory: &GuestMemory, idt: u64, lstar: u64) -> Result<Redirection, String> {
    let gate_address = idt.wrapping_add(PAGE_FAULT_GATE);
    let mut gate = [0; 16];
    memory
        .read(gate_address, &mut gate)
        .map_err(|fault| format!("the page fault's gate at {gate_address:#x}: {fault:?}"))?;
    let handler = target(&gate);
    if is_ours(memory, handler, lstar) {
        return Ok(Redirection::AlreadyThere);
    }
    let place = find_gap(memory, lstar)
        .ok_or_else(|| format!("no padding in kernel text around {lstar:#x}"))?;
    let code = assemble(place, lstar, handler)?;
    debug_assert!(code.len() <= GAP_MIN - 2 * GAP_MARGIN);
    set_target(&mut gate, place);
    // Kernel text and the table are read-only to the guest itself.
    let mut privileged = memory.control;
    privileged.cr0 = 0;
    let memory = GuestMemory {
        ram: memory.ram,
        control: privileged,
    };
    memory
        .write(place, &code)
        .and_then(|()| memory.write(gate_address, &gate))
        .map_err(|fault| format!("writing at {place:#x} and {gate_address:#x}: {fault:?}"))?;
    Ok(Redirection::Placed)
}

/// Offset in a gate: bits 0-15, 16-31 and 32-63 at 0, 6 and 8 (Intel SDM volume
/// 3, figure 6-8).
fn target(gate: &[u8; 16]) -> u64 {
    let [b0, b1, _, _, _, _, b6, b7, b8, b9, b10, b11, ..] = *gate;
    u64::from_le_bytes([b0, b1, b6, b7, b8, b9, b10, b11])
}

fn set_target(gate: &mut [u8; 16], target: u64) {
    let bytes = target.to_le_bytes();
    gate[0..2].copy_from_slice(&bytes[0..2]);
    gate[6..12].copy_from_slice(&bytes[2..8]);
}

/// Whether the handler is the code above, for this LSTAR: the first instruction
/// says so.
fn is_ours(memory: &GuestMemory, handler: u64, lstar: u64) -> bool {
    let Ok(wanted) = assemble(handler, lstar, handler) else {
        return false;
    };
    let mut found = [0; COMPARE_BYTES];
    memory.read(handler, &mut found).is_ok() && wanted.starts_with(&found)
}

/// Bytes of the comparison.
const COMPARE_BYTES: usize = 9;

fn assemble(place: u64, lstar: u64, handler: u64) -> Result<Vec<u8>, String> {
    let low = i32::try_from(lstar as i64)
        .map_err(|_| format!("LSTAR {lstar:#x} is not in the upper 2 GiB"))?;
    let write = || {
        let mut code = CodeAssembler::new(64)?;
        code.cmp(qword_ptr(rsp + 8), low)?;
        code.jne(handler)?;
        code.mov(rsp, qword_ptr(rsp + 32))?;
        code.jmp(lstar)?;
        code.assemble(place)
    };
    write().map_err(|error: iced_x86::IcedError| error.to_string())
}

/// The nearest pages first, below LSTAR and above in turn.
fn find_gap(memory: &GuestMemory, lstar: u64) -> Option<u64> {
    let middle = lstar & !(PAGE - 1);
    let distances = (0..SEARCH / PAGE).map(|page| page * PAGE);
    let pages = distances.flat_map(|distance| {
        [
            middle.wrapping_sub(distance),
            middle.wrapping_add(distance + PAGE),
        ]
    });
    for page in pages {
        let mut bytes = [0; PAGE as usize];
        if memory.read(page, &mut bytes).is_err() {
            continue;
        }
        let mut run = 0;
        for (offset, byte) in bytes.iter().enumerate() {
            run = if *byte == PADDING { run + 1 } else { 0 };
            if run == GAP_MIN {
                let start = offset + 1 - GAP_MIN + GAP_MARGIN;
                return Some(page + start as u64);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::memory::tests::mapped;
    use super::*;
    use vm_memory::{Bytes, GuestAddress};

    #[test]
    fn a_gates_target_is_in_three_places() {
        let mut gate = [0; 16];
        gate[2] = 0x10;
        gate[5] = 0x8e;
        set_target(&mut gate, 0xffff_ffff_8160_0b00);
        assert_eq!(target(&gate), 0xffff_ffff_8160_0b00);
        assert_eq!((gate[2], gate[5], gate[12]), (0x10, 0x8e, 0));
    }

    #[test]
    fn the_code_is_what_the_comment_says() {
        let lstar = 0xffff_ffff_8160_0040;
        let place = 0xffff_ffff_8140_f069;
        let code = assemble(place, lstar, 0xffff_ffff_8160_0b00).unwrap();
        assert_eq!(code[..9], [0x48, 0x81, 0x7c, 0x24, 8, 0x40, 0, 0x60, 0x81]);
        assert_eq!(code[9..11], [0x0f, 0x85]);
        assert_eq!(code[15..20], [0x48, 0x8b, 0x64, 0x24, 0x20]);
        assert_eq!(code[20], 0xe9);
        assert_eq!(code.len(), 25);
        assert!(assemble(place, 0x1_0000_0000, place).is_err());
    }

    #[test]
    fn the_gate_is_redirected_once() {
        let (ram, control) = mapped();
        let guest = ram.guest();
        // "Kernel text" at 0x1_0000: LSTAR, then a handler, then a gap.
        guest
            .write_slice(&[PADDING; 20], GuestAddress(0x1_0100))
            .unwrap();
        guest
            .write_slice(&[PADDING; 80], GuestAddress(0x1_1200))
            .unwrap();
        let mut gate = [0; 16];
        set_target(&mut gate, 0x1_0080);
        let gate_at = GuestAddress(0xa000 + PAGE_FAULT_GATE);
        guest.write_slice(&gate, gate_at).unwrap();
        let memory = GuestMemory { ram: &ram, control };
        let redirect = || redirect(&memory, 0xa000, 0x1_0000);
        assert_eq!(redirect(), Ok(Redirection::Placed));
        guest.read_slice(&mut gate, gate_at).unwrap();
        assert_eq!(target(&gate), 0x1_1210);
        let code: [u8; 4] = guest.read_obj(GuestAddress(0x1_1210)).unwrap();
        assert_eq!(code, [0x48, 0x81, 0x7c, 0x24]);
        assert_eq!(redirect(), Ok(Redirection::AlreadyThere));
    }

    #[test]
    fn without_padding_it_says_so() {
        let (ram, control) = mapped();
        let memory = GuestMemory { ram: &ram, control };
        let error = redirect(&memory, 0xa000, 0x1_0000).unwrap_err();
        assert!(error.contains("no padding"), "{error}");
    }
}
