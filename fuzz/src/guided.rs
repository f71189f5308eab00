//! The target that the environment names (`WEFT_FUZZ_TARGET`), driven by libFuzzer: it
//! mutates inputs of the corpus, and keeps those that reach new code. `.ci/fuzz` builds
//! and starts this.
//!
//! `WEFT_FUZZ_BLIND=1` ignores what was reached: every input is a valid one, mutated a
//! few times. The difference is what coverage is worth.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use weft_fuzz::random::Random;
use weft_fuzz::{Target, target};

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("WEFT_FUZZ_TARGET").unwrap_or_default();
    target(&name).unwrap_or_else(|| {
        eprintln!("WEFT_FUZZ_TARGET names no target: {name:?}");
        std::process::exit(2)
    })
});

static BLIND: LazyLock<bool> = LazyLock::new(|| std::env::var_os("WEFT_FUZZ_BLIND").is_some());

fuzz_target!(|input: &[u8]| (TARGET.run)(input));

fuzz_mutator!(|data: &mut [u8], size: usize, max: usize, seed: u32| {
    match mutated(&data[..size], seed) {
        Some(input) => {
            let length = input.len().min(max);
            data[..length].copy_from_slice(&input[..length]);
            length
        }
        None => fuzzer_mutate(data, size, max),
    }
});

/// A valid input, or a piece of one in this input; mostly neither: libFuzzer's own
/// mutations also insert what the target compared with.
fn mutated(input: &[u8], seed: u32) -> Option<Vec<u8>> {
    let mut random = Random::new(u64::from(seed));
    let mut input = match random.below(16) {
        _ if *BLIND => {
            let mut input = (TARGET.valid)(&mut random);
            for _ in 0..random.below(6) {
                let other = (TARGET.valid)(&mut random);
                random.mutate(&mut input, &other);
            }
            return Some(input);
        }
        0 => return Some((TARGET.valid)(&mut random)),
        1..4 => input.to_vec(),
        _ => return None,
    };
    let other = (TARGET.valid)(&mut random);
    random.mutate(&mut input, &other);
    Some(input)
}
