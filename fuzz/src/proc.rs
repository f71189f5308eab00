//! The elastic process: programs, scripts and carried system calls.

use crate::random::Random;
use weft_jump::{Policy, Price};
use weft_proc::boot::{JUMP_AUTO, JUMP_FIXED};
use weft_proc::context::{Context, HEADER_END, LEGACY_BYTES};
use weft_proc::elf::{self, Image};
use weft_proc::layout::{LIMIT, LOWEST, PAGE};
use weft_proc::marshal::{BULK_MAX, DecodedCall, Fault, Memory, Request, SPACE_MAX, gather};
use weft_proc::script;
use weft_proc::table::{Arg, CALLS, Class};
use zerocopy::IntoBytes;

/// The head of a small program: a few segments, an interpreter, a stack.
pub fn valid_program(random: &mut Random) -> Vec<u8> {
    let count = 1 + random.below(5) as u16;
    let mut head = b"\x7fELF\x02\x01\x01".to_vec();
    head.resize(64, 0);
    let fixed = random.below(2) == 0;
    head[16] = if fixed { 2 } else { 3 };
    head[18] = 62;
    head[20] = 1;
    head[24..32].copy_from_slice(&0x40_1000u64.to_le_bytes());
    head[32] = 64;
    head[54] = 56;
    head[56..58].copy_from_slice(&(count + 2).to_le_bytes());
    let mut segment = |kind: u32, words: [u64; 6]| {
        head.extend(kind.to_le_bytes());
        head.extend((random.below(8) as u32).to_le_bytes());
        head.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    };
    for index in 0..u64::from(count) {
        let address = 0x40_0000 + index * 0x1_0000;
        segment(1, [index * 0x1000, address, address, 0xe10, 0x3000, 0x1000]);
    }
    segment(3, [0x300, 0, 0, 28, 28, 1]);
    segment(0x6474_e551, [0, 0, 0, 0, 0, 16]);
    head
}

/// A program is refused, or every mapping of it is whole pages in range.
pub fn program(input: &[u8]) {
    let _ = elf::bytes_needed(input);
    let _ = elf::interpreter_path(input);
    for file_length in [input.len() as u64, 1 << 20, u64::MAX] {
        let Ok(image) = Image::parse(input, file_length) else {
            continue;
        };
        for base in [0, 0x1000_0000, LIMIT - PAGE, !(PAGE - 1)] {
            let accepted = image.check_base(base).is_ok();
            for mapping in image.plan(base) {
                assert!(mapping.length > 0 && mapping.length.is_multiple_of(PAGE));
                assert!(mapping.file_length <= mapping.length);
                assert!(mapping.zero_fill_tail < PAGE);
                if accepted {
                    assert!(mapping.address >= LOWEST && mapping.address.is_multiple_of(PAGE));
                    assert!(mapping.address + mapping.length <= LIMIT);
                }
            }
        }
    }
}

/// A script's first line.
pub fn valid_script(random: &mut Random) -> Vec<u8> {
    let mut line = b"#! /usr/bin/env -S python3 -u \n".to_vec();
    let extra = random.below(300);
    line.extend(random.bytes(extra));
    line
}

/// A script has an interpreter line, or is invalid.
pub fn script_line(input: &[u8]) {
    if let Some(Ok(script)) = script::parse(input) {
        assert!(!script.interpreter.is_empty());
        assert!(!script.interpreter.contains(&b'\n'));
        assert!(script.argument.is_none_or(|argument| !argument.is_empty()));
    }
}

/// A program's memory that holds anything.
struct Noise<'a>(&'a mut Random);

impl Memory for Noise<'_> {
    fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        match self.0.below(40) {
            0 => return Err(Fault { address }),
            // Small words: lengths and counts that are plausible.
            1..20 => {
                into.fill(0);
                for word in into.chunks_mut(8) {
                    word[0] = self.0.below(40) as u8;
                }
            }
            _ => into.fill_with(|| self.0.next() as u8),
        }
        Ok(())
    }
    fn write(&mut self, address: u64, _: &[u8]) -> Result<(), Fault> {
        match self.0.below(10) {
            0 => Err(Fault { address }),
            _ => Ok(()),
        }
    }
}

/// Any call with plausible arguments, gathered from noise.
fn gathered(random: &mut Random) -> (Request, Vec<u8>) {
    let mut buffer = vec![0; SPACE_MAX];
    loop {
        let nr = random.below(CALLS.len());
        if !matches!(CALLS[nr], Class::Plain(_)) {
            continue;
        }
        let args = core::array::from_fn(|_| match random.below(4) {
            0 => 8,
            1 => random.next(),
            _ => random.below(64) as u64,
        });
        let bulk_max = [BULK_MAX, 100][random.below(2)];
        let memory = &mut Noise(random);
        if let Ok(request) = gather(nr as u64, &args, 0, bulk_max, memory, &mut buffer) {
            buffer.truncate(request.sent());
            return (request, buffer);
        }
    }
}

/// A request as a peer sends it.
pub fn valid_request(random: &mut Random) -> Vec<u8> {
    let (_, bytes) = gathered(random);
    DecodedCall::decode(&bytes).expect("what was gathered is accepted");
    bytes
}

/// A request is refused, or its machine words stay inside its buffer.
pub fn request(input: &[u8]) {
    const BASE: u64 = 0x7000_0000_0000;
    let Ok(arrived) = DecodedCall::decode(input) else {
        return;
    };
    let mut buffer = input.to_vec();
    buffer.resize(arrived.space(), 0xee);
    let words = arrived.relocate(&mut buffer, BASE).expect("it has room");
    let end = BASE + buffer.len() as u64;
    for (index, arg) in arrived.plain().args.iter().enumerate() {
        if matches!(arg, Arg::Int | Arg::Descriptor) {
            assert_eq!(words[index], arrived.args()[index]);
        } else {
            assert!(words[index] == 0 || (BASE..=end).contains(&words[index]));
        }
        let _ = arrived.string(index as u8, &buffer);
    }
    let mut reply = vec![0; SPACE_MAX];
    for result in [i64::MIN, -4, 0, 1, 4096, i64::MAX] {
        for output in arrived.outputs(result, &buffer) {
            assert!(output.offset + output.length <= buffer.len());
        }
        arrived
            .reply(result, &buffer, &mut reply)
            .expect("it has room");
    }
}

/// The seed of a call, and a reply to it.
pub fn valid_reply(random: &mut Random) -> Vec<u8> {
    let seed = random.next();
    let (_, mut buffer) = gathered(&mut Random::new(seed));
    let arrived = DecodedCall::decode(&buffer).expect("what was gathered is accepted");
    buffer.resize(arrived.space(), 7);
    arrived.relocate(&mut buffer, 0x1000).expect("it has room");
    let mut reply = vec![0; SPACE_MAX];
    let result = random.below(100) as i64 - 5;
    let length = arrived
        .reply(result, &buffer, &mut reply)
        .expect("it has room");
    let mut input = seed.to_le_bytes().to_vec();
    input.extend(&reply[..length]);
    input
}

/// A reply is refused, or written into the program's memory.
pub fn reply(input: &[u8]) {
    let Some((seed, reply)) = input.split_first_chunk::<8>() else {
        return;
    };
    let (request, _) = gathered(&mut Random::new(u64::from_le_bytes(*seed)));
    let _ = request.scatter(reply, &mut Noise(&mut Random::new(1)));
}

/// Nodes of the aggregate in which an execution jumps, and where its payload is
/// split.
const JUMP_NODES: usize = 3;
const POLICY_BYTES: usize = size_of::<Policy>();

/// An execution as it travels: a context, then a policy that has learned.
pub fn valid_jump(random: &mut Random) -> Vec<u8> {
    let mut context = Context::initial(random.next() as usize >> 20, random.next() as usize >> 20);
    context.fs = random.next() as usize >> 20;
    context.mask = random.next();
    context.extended_bytes = [0, LEGACY_BYTES, HEADER_END, 2696][random.below(4)];
    let legacy = context.extended_bytes.min(LEGACY_BYTES);
    context.extended[..legacy].copy_from_slice(&random.bytes(legacy));
    let mut policy = Policy::new([JUMP_AUTO, JUMP_FIXED][random.below(2)], 4);
    play(&mut policy, random.below(100));
    let mut input = context.as_wire().to_vec();
    input.extend(policy.as_bytes());
    input
}

/// Faults and calls on every node.
fn play(policy: &mut Policy, faults: usize) {
    let price = Price {
        jump: 50,
        pages: 10,
    };
    for fault in 0..faults {
        let _ = policy.fault(fault % JUMP_NODES, 1 << (fault % 40), price);
        policy.waited(1 << (fault % 30));
        let _ = policy.called_home(100, price);
    }
}

/// An execution is refused, or can be looked at and go on.
pub fn jump(input: &[u8]) {
    let (head, tail) = input.split_at(input.len().saturating_sub(POLICY_BYTES));
    let mut context = Context::initial(0, 0);
    if context.decode(head).is_ok() {
        assert_eq!(context.as_wire().len(), head.len());
    }
    assert!(context.extended().len() <= head.len());
    for kind in [JUMP_AUTO, JUMP_FIXED] {
        let mut policy = Policy::new(kind, 4);
        if policy.decode(tail, JUMP_NODES).is_ok() {
            play(&mut policy, 100);
            policy.leave();
        }
    }
}
