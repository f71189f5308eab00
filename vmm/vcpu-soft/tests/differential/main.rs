//! Generated instruction sequences, run by the host natively, by the interpreter,
//! and translated: registers, all arithmetic flags, x87 and SSE state and memory must
//! be the same afterwards. Needs an x86-64 host that lets a process map pages at
//! low addresses.
//!
//! A failing run prints its seed; `WEFT_SEED=... cargo test --test differential` runs
//! the same sequences again. `cargo test --test differential -- --ignored` runs
//! millions.

mod generator;
mod native;
#[path = "../support/mod.rs"]
mod support;

use generator::Generator;
use iced_x86::{Decoder, DecoderOptions, Register};
use native::{Context, Native, native_memory, put};
use support::*;
use weft_test_support::seed;
use weft_vcpu::{CpuModel, CpuState, Exit};

/// Linear addresses, the same natively and in the guest.
const MEMORY_AT: u64 = 0x50_0000;
const MEMORY_SIZE: usize = 0x3000;
const STACK_TOP: u64 = MEMORY_AT + 0x3000;
const CONTEXT: u64 = 0x52_0000;
const SEQUENCES_AT: u64 = 0x60_0000;
/// Bytes of a sequence, its end included.
const SLOT: u64 = 256;
const SLOTS: usize = 256;
const STUBS_AT: u64 = SEQUENCES_AT + SLOT * SLOTS as u64;
/// Bytes at the end of a sequence: HLT in the guest, a jump natively.
const END: usize = 5;

/// Registers that sequences use for addresses, and never write.
const BASE: Register = Register::RBX;
const OTHER_BASE: Register = Register::R12;
const INDEX: Register = Register::R13;
const RESERVED: [Register; 4] = [Register::RSP, BASE, OTHER_BASE, INDEX];

/// x87's pointers to the last instruction and operand are the host's.
fn comparable(fpu: &[u8]) -> Vec<u8> {
    let mut fpu = fpu[..416].to_vec();
    fpu[6..24].fill(0);
    fpu[28..32].fill(0);
    fpu
}

fn describe(bytes: &[u8], address: u64) -> String {
    let mut text = format!("{bytes:02x?}\n");
    for instruction in Decoder::with_ip(64, bytes, address, DecoderOptions::NONE) {
        text += &format!(
            "  {:?} {}\n",
            instruction.code(),
            instruction.has_lock_prefix()
        );
    }
    text
}

fn state_of(guest: &Guest, context: &Context, address: u64) -> CpuState {
    let header = [7, 0, 0, 0, 0, 0, 0, 0];
    let fpu = [&context.fpu[..], &header, &[0; 56], &context.high].concat();
    CpuState {
        registers: context.registers,
        rip: address,
        rflags: context.flags,
        fpu,
        ..guest.with_avx()
    }
}

/// What differs between the host's and the guest's end, if anything.
fn difference(
    native: &Context,
    native_memory: &[u8],
    guest: &CpuState,
    guest_memory: &[u8],
) -> Option<String> {
    for number in 0..16 {
        let (wanted, got) = (native.registers[number], guest.registers[number]);
        if wanted != got {
            return Some(format!("register {number}: {got:#x}, not {wanted:#x}"));
        }
    }
    const ARITHMETIC: u64 = 0x8d5;
    let (wanted, got) = (native.flags & ARITHMETIC, guest.rflags & ARITHMETIC);
    if wanted != got {
        return Some(format!("flags: {got:#x}, not {wanted:#x}"));
    }
    let (wanted, got) = (comparable(&native.fpu), comparable(&guest.fpu));
    if let Some(place) = (0..wanted.len()).find(|&index| wanted[index] != got[index]) {
        return Some(format!(
            "FXSAVE area at {place}: {:#x}, not {:#x}",
            got[place], wanted[place]
        ));
    }
    let high = guest.fpu.get(576..).unwrap_or(&native.high);
    if let Some(place) = (0..256).find(|&index| native.high[index] != high[index]) {
        return Some(format!(
            "upper half of YMM{} at {}: {:#x}, not {:#x}",
            place / 16,
            place % 16,
            high[place],
            native.high[place]
        ));
    }
    let place = (0..MEMORY_SIZE).find(|&index| native_memory[index] != guest_memory[index]);
    place.map(|place| {
        let (got, wanted) = (guest_memory[place], native_memory[place]);
        format!("memory at {place:#x}: {got:#x}, not {wanted:#x}")
    })
}

/// Runs a sequence that is in place on both sides; what differs.
fn both(
    native: &Native,
    guest: &mut Guest,
    address: u64,
    bytes: &[u8],
    context: &Context,
    memory: &[u8],
) -> Result<(), String> {
    let end = native.run(address, context, memory);
    guest.memory.write(MEMORY_AT, memory);
    let state = state_of(guest, context, address);
    guest.cpu.restore(&state);
    let exit = guest.run();
    let after = guest.cpu.save();
    let what = describe(bytes, address);
    if exit != Exit::Halted || after.rip != address + bytes.len() as u64 + 1 {
        return Err(format!("{exit:?} {:?} {what}", guest.frame()));
    }
    let guest_memory = guest.memory.read(MEMORY_AT, MEMORY_SIZE);
    match difference(&end, &native_memory(), &after, &guest_memory) {
        Some(text) => Err(format!("{text}\n{what}before: {:x?}", context.registers)),
        None => Ok(()),
    }
}

/// The newest model that this host can be.
fn model() -> CpuModel {
    if has_v3() {
        return CpuModel::V3;
    }
    println!("skipped: instructions of v3, which this host lacks");
    CpuModel::V2
}

/// A guest whose code is interpreted, or translated from the first execution on.
fn guest_for(translated: bool) -> Guest {
    let mut guest = Guest::of_model(model(), |a| a.hlt().unwrap());
    if translated {
        guest.cpu.translate_after(1);
    } else {
        guest.cpu.interpret_only();
    }
    guest
}

fn compare(seed: u64, sequences: usize, translated: bool) {
    println!("WEFT_SEED={seed:#x}");
    let native = Native::new(model() >= CpuModel::V3);
    let mut guest = guest_for(translated);
    let mut generator = Generator::new(seed, model());
    generator.rotations = !translated;
    let least = [400, 600, 1200][model() as usize];
    assert!(generator.codes.len() > least, "{}", generator.codes.len());
    let mut done = 0;
    while done < sequences {
        native.writable();
        let batch: Vec<_> = (0..SLOTS as u64)
            .map(|slot| {
                let address = SEQUENCES_AT + slot * SLOT;
                let bytes = generator.sequence(address);
                let end = address + bytes.len() as u64;
                put(address, &bytes);
                put(end, &native.end(end));
                guest.memory.write(address, &bytes);
                guest.memory.write(end, &[0xf4]);
                (address, bytes)
            })
            .collect();
        native.executable();
        for (address, bytes) in batch {
            let context = generator.context();
            let memory = generator.memory_bytes();
            if let Err(text) = both(&native, &mut guest, address, &bytes, &context, &memory) {
                panic!("WEFT_SEED={seed:#x} {text}");
            }
        }
        done += SLOTS;
    }
}

#[test]
fn sequences_do_what_they_do_natively() {
    compare(seed(), 50_000, false);
}

#[test]
fn translated_sequences_do_what_they_do_natively() {
    compare(seed(), 10_000, true);
}

#[test]
#[ignore = "minutes: millions of sequences"]
fn millions_of_sequences_do_what_they_do_natively() {
    for round in 0..40 {
        compare(seed().wrapping_add(round << 32), 100_000, false);
    }
}

#[test]
#[ignore = "minutes: millions of sequences"]
fn millions_of_translated_sequences_do_what_they_do_natively() {
    for round in 0..40 {
        compare(seed().wrapping_add(round << 32), 100_000, true);
    }
}

/// Sequences that once did something else.
const REGRESSIONS: [(&str, &[u8]); 7] = [
    // Translated, the flags were those before: or edi, 1; xor edx, edx;
    // div edi; lahf; and the same with R10.
    (
        "a division's undefined flags are read",
        &[
            0x83, 0xcf, 0x01, 0x31, 0xd2, 0xf7, 0xf7, 0x9f, 0x41, 0x83, 0xca, 0x01, 0x31, 0xd2,
            0x41, 0xf7, 0xf2, 0x9f,
        ],
    ),
    // Translated, half of the immediate became code of the host.
    (
        "MOV of 64 bits with an operand-size prefix",
        &[0x66, 0x48, 0xb9, 1, 2, 3, 4, 0x99, 0x90, 0x90, 0x90],
    ),
    // C0 to C3 of the status word were taken for arithmetic flags.
    ("x87 arithmetic leaves the flags alone", &[0xde, 0xfb]),
    // Taken for an instruction without XMM registers: #UD.
    (
        "conversions from memory to a general register",
        &[0xf2, 0x41, 0x0f, 0x2d, 0x54, 0x24, 0x45],
    ),
    // Ran with the host's flags.
    ("FCMOVcc reads the flags", &[0xda, 0xdc, 0xdb, 0xc9]),
    // The size of its address was not known.
    ("XLAT", &[0xb0, 0x09, 0xd7]),
    // Compares with RAX, which it may be itself.
    (
        "CMPXCHG of RAX, of AH, of another",
        &[0x0f, 0xb1, 0xc8, 0x0f, 0xb0, 0xcc, 0x0f, 0xb1, 0xd1],
    ),
];

#[test]
fn what_was_wrong_once_is_right() {
    let native = Native::new(model() >= CpuModel::V3);
    let mut guests = [guest_for(false), guest_for(true)];
    let mut generator = Generator::new(1, model());
    for (name, bytes) in REGRESSIONS {
        native.writable();
        let end = SEQUENCES_AT + bytes.len() as u64;
        put(SEQUENCES_AT, bytes);
        put(end, &native.end(end));
        for guest in &guests {
            guest.memory.write(SEQUENCES_AT, bytes);
            guest.memory.write(end, &[0xf4]);
        }
        native.executable();
        for _ in 0..100 {
            let context = generator.context();
            let memory = generator.memory_bytes();
            for guest in &mut guests {
                let outcome = both(&native, guest, SEQUENCES_AT, bytes, &context, &memory);
                assert_eq!(outcome, Ok(()), "{name}");
            }
        }
    }
}
