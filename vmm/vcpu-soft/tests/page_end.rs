//! No instruction reaches further than its operand: every opcode that has one in
//! memory, with the operand at the end of the guest's memory, behind which nothing
//! is accessible. Translated, so that the host's processor executes it. Needs
//! nothing.

mod support;

use iced_x86::code_asm::*;
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, OpKind, Register};
use support::*;
use weft_vcpu::{CpuModel, Exit};
use weft_vcpu_soft::model::offers;

const FAR: u64 = 0x20_0000;
const CASE: u64 = 64;

/// All encodings with [RBX] as their operand in the legacy opcode maps.
fn encodings() -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for prefix in [&[][..], &[0x66], &[0xf2], &[0xf3]] {
        for rex in [&[][..], &[0x48]] {
            for map in [&[][..], &[0x0f], &[0x0f, 0x38], &[0x0f, 0x3a]] {
                for opcode in 0..=255_u8 {
                    for reg in 0..8 {
                        let tail = [opcode, reg << 3 | 3, 0, 0, 0, 0];
                        all.push([prefix, rex, map, &tail].concat());
                    }
                }
            }
        }
    }
    all
}

/// The same by VEX prefixes; the first source is XMM0, or there is none.
fn vex_encodings() -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for (map, kind) in (1..=3).flat_map(|map| (0..16).map(move |kind| (map, kind))) {
        // W, then L and the prefix that is part of the opcode.
        let last = kind >> 3 << 7 | 0x78 | kind & 7;
        for opcode in 0..=255_u8 {
            for reg in 0..4 {
                all.push(vec![0xc4, 0xe0 | map, last, opcode, reg << 3 | 3, 0]);
            }
        }
    }
    all
}

fn has_later(instruction: &Instruction) -> bool {
    use iced_x86::CpuidFeature::*;
    let known = [AVX, AVX2, FMA, F16C, AES, PCLMULQDQ, BMI1, BMI2];
    instruction.encoding() == iced_x86::EncodingKind::VEX
        && !(instruction.cpuid_features().iter()).all(|feature| known.contains(feature))
}

fn decode(bytes: &[u8]) -> Option<Instruction> {
    let instruction = Decoder::new(64, bytes, DecoderOptions::NONE).decode();
    let memory = (0..instruction.op_count())
        .any(|operand| instruction.op_kind(operand) == OpKind::Memory)
        && instruction.memory_base() == Register::RBX;
    // Those of AVX-512 and later by VEX prefixes, and key masks.
    let known = offers(CpuModel::V3, &instruction) && !has_later(&instruction);
    let plain =
        known && instruction.flow_control() == FlowControl::Next && !instruction.is_privileged();
    (!instruction.is_invalid() && memory && plain).then_some(instruction)
}

#[test]
fn no_access_goes_beyond_its_operand() {
    let mut guest = Guest::new(|a| a.hlt().unwrap());
    guest.cpu.translate_after(1);
    let count = run_all(&mut guest, encodings());
    assert!(count > 2000, "{count}");
}

#[test]
fn nor_by_vex_prefixes() {
    if !has_v3() {
        println!("skipped: this host lacks instructions of v3");
        return;
    }
    let mut guest = Guest::of_model(CpuModel::V3, |a| a.hlt().unwrap());
    guest.cpu.translate_after(1);
    let count = run_all(&mut guest, vex_encodings());
    assert!(count > 2000, "{count}");
}

/// How many instructions did so.
fn run_all(guest: &mut Guest, encodings: Vec<Vec<u8>>) -> usize {
    let mut at = FAR;
    let mut count = 0;
    for bytes in encodings {
        let Some(instruction) = decode(&bytes) else {
            continue;
        };
        let size = instruction.memory_size().size() as u64;
        if size == 0 {
            continue;
        }
        let loops = assemble(64, at, |a| {
            let mut again = a.create_label();
            a.mov(r15d, 3).unwrap();
            a.set_label(&mut again).unwrap();
            a.mov(rbx, MEMORY - size).unwrap();
            a.db(&bytes[..instruction.len()]).unwrap();
            a.dec(r15).unwrap();
            a.jnz(again).unwrap();
            a.hlt().unwrap();
        });
        assert!(loops.len() as u64 <= CASE && at + CASE <= MEMORY - PAGE);
        guest.memory.write(at, &loops);
        let mut state = guest.with_avx();
        state.rip = at;
        guest.cpu.restore(&state);
        assert_eq!(guest.run(), Exit::Halted, "{bytes:02x?}");
        count += 1;
        at += CASE;
    }
    count
}
