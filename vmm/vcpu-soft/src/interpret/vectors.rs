//! AVX instructions that are more than arithmetic: accesses of chosen elements, each
//! of which may fault, and the upper halves as a whole.

use iced_x86::{Mnemonic, OpKind};

use super::operand::sign_extended;
use super::select::Operands;
use crate::cpu::{Cpu, Faulted};
use crate::op::{Handler, Op, Outcome};

/// A YMM register.
type Vector = [u8; 32];

/// Where XMM registers are in FXSAVE's area.
const XMM_AT: usize = 160;

impl Cpu {
    fn vector(&self, number: u8) -> Vector {
        let at = 16 * usize::from(number & 15);
        let mut value = [0; 32];
        value[..16].copy_from_slice(&self.fpu.0[XMM_AT + at..XMM_AT + at + 16]);
        value[16..].copy_from_slice(&self.ymm_high.0[at..at + 16]);
        value
    }

    fn set_vector(&mut self, number: u8, value: &Vector) {
        let at = 16 * usize::from(number & 15);
        self.fpu.0[XMM_AT + at..XMM_AT + at + 16].copy_from_slice(&value[..16]);
        self.ymm_high.0[at..at + 16].copy_from_slice(&value[16..]);
    }

    /// Registers that there are in this mode.
    fn vectors(&self) -> usize {
        if self.mode.is_64() { 16 } else { 8 }
    }
}

fn is_chosen<const SIZE: usize>(mask: &Vector, element: usize) -> bool {
    mask[element * SIZE + SIZE - 1] & 0x80 != 0
}

fn element<const SIZE: usize>(vector: &Vector, element: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes[..SIZE].copy_from_slice(&vector[element * SIZE..][..SIZE]);
    u64::from_le_bytes(bytes)
}

fn set_element<const SIZE: usize>(vector: &mut Vector, element: usize, value: u64) {
    vector[element * SIZE..][..SIZE].copy_from_slice(&value.to_le_bytes()[..SIZE]);
}

/// `extra` elements from memory to `destination` where `source` chooses them, zero
/// elsewhere.
extern "C" fn masked_load<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.check_avx());
    let mask = cpu.vector(op.source);
    let mut result = [0; 32];
    let address = cpu.address(op);
    for index in 0..usize::from(op.extra) {
        if is_chosen::<SIZE>(&mask, index) {
            let place = cpu.wrapped(address.wrapping_add((index * SIZE) as u64));
            let value = attempt!(cpu, cpu.load::<SIZE>(place));
            set_element::<SIZE>(&mut result, index, value);
        }
    }
    cpu.set_vector(op.destination, &result);
    Outcome::Continue
}

/// The other way. Nothing is stored where one of the stores would fault.
extern "C" fn masked_store<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.check_avx());
    let (mask, value) = (cpu.vector(op.source), cpu.vector(op.destination));
    let address = cpu.address(op);
    for check in [true, false] {
        for index in 0..usize::from(op.extra) {
            if !is_chosen::<SIZE>(&mask, index) {
                continue;
            }
            let place = cpu.wrapped(address.wrapping_add((index * SIZE) as u64));
            if check {
                attempt!(cpu, cpu.pointer::<SIZE>(place));
            } else {
                attempt!(
                    cpu,
                    cpu.store::<SIZE>(place, element::<SIZE>(&value, index))
                );
            }
        }
    }
    Outcome::Continue
}

/// `extra` elements of `SIZE` bytes, at distances of `INDEX` bytes each, which the
/// vector register in the immediate's low byte holds; its next byte is their scale.
/// What was loaded before a fault stays, and its part of the mask is cleared.
extern "C" fn gather<const SIZE: usize, const INDEX: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.check_avx());
    let (mut mask, mut result) = (cpu.vector(op.source), cpu.vector(op.destination));
    let distances = cpu.vector(op.immediate as u8);
    let scale = op.immediate >> 8 & 3;
    let address = cpu.address(op);
    let count = usize::from(op.extra);
    let mut gathered: Result<(), Faulted> = Ok(());
    for index in 0..count {
        if !is_chosen::<SIZE>(&mask, index) {
            continue;
        }
        let distance = sign_extended::<INDEX>(element::<INDEX>(&distances, index));
        let place = cpu.wrapped(address.wrapping_add(distance << scale));
        match cpu.load::<SIZE>(place) {
            Ok(value) => {
                set_element::<SIZE>(&mut result, index, value);
                set_element::<SIZE>(&mut mask, index, 0);
            }
            Err(faulted) => {
                gathered = Err(faulted);
                break;
            }
        }
    }
    if gathered.is_ok() {
        mask = [0; 32];
        result[count * SIZE..].fill(0);
    }
    cpu.set_vector(op.source, &mask);
    cpu.set_vector(op.destination, &result);
    attempt!(cpu, gathered);
    Outcome::Continue
}

/// VZEROALL where `ALL`, else VZEROUPPER.
extern "C" fn zero<const ALL: bool>(cpu: &mut Cpu, _: &Op) -> Outcome {
    attempt!(cpu, cpu.check_avx());
    let bytes = 16 * cpu.vectors();
    cpu.ymm_high.0[..bytes].fill(0);
    if ALL {
        cpu.fpu.0[XMM_AT..XMM_AT + bytes].fill(0);
    }
    Outcome::Continue
}

fn select_masked(operands: &Operands<'_>, op: &mut Op, size: usize) -> Handler {
    let instruction = operands.instruction;
    let stores = instruction.op0_kind() == OpKind::Memory;
    let data = instruction.op_register(if stores { 2 } else { 0 });
    op.destination = data.number() as u8;
    op.source = instruction.op1_register().number() as u8;
    op.extra = (data.size() / size) as u8;
    match (size, stores) {
        (4, false) => masked_load::<4>,
        (4, true) => masked_store::<4>,
        (_, false) => masked_load::<8>,
        (_, true) => masked_store::<8>,
    }
}

fn select_gather(operands: &Operands<'_>, op: &mut Op, size: usize, index: usize) -> Handler {
    let instruction = operands.instruction;
    let distances = instruction.memory_index();
    op.destination = instruction.op0_register().number() as u8;
    op.source = instruction.op2_register().number() as u8;
    let scale = u64::from(instruction.memory_index_scale().trailing_zeros());
    op.immediate = scale << 8 | distances.number() as u64;
    let elements = (instruction.op0_register().size() / size).min(distances.size() / index);
    op.extra = elements as u8;
    match (size, index) {
        (4, 4) => gather::<4, 4>,
        (4, _) => gather::<4, 8>,
        (_, 4) => gather::<8, 4>,
        _ => gather::<8, 8>,
    }
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    use Mnemonic::*;
    let mnemonic = operands.instruction.mnemonic();
    // Those of AVX-512 have other operands.
    if operands.instruction.encoding() != iced_x86::EncodingKind::VEX || !operands.is_offered() {
        return None;
    }
    Some(match mnemonic {
        Vmaskmovps | Vpmaskmovd => select_masked(operands, op, 4),
        Vmaskmovpd | Vpmaskmovq => select_masked(operands, op, 8),
        Vgatherdps | Vpgatherdd => select_gather(operands, op, 4, 4),
        Vgatherqps | Vpgatherqd => select_gather(operands, op, 4, 8),
        Vgatherdpd | Vpgatherdq => select_gather(operands, op, 8, 4),
        Vgatherqpd | Vpgatherqq => select_gather(operands, op, 8, 8),
        Vzeroupper => zero::<false>,
        Vzeroall => zero::<true>,
        _ => return None,
    })
}
