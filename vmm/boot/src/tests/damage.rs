//! Images with bytes changed anywhere: loaded or refused, never a panic, never
//! a byte outside of what the answer says.

use proptest::prelude::*;

use super::*;

/// Values that are likely to hurt.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0_u32..64).prop_map(|shift| 1 << shift),
        (0_u32..64).prop_map(|shift| u64::MAX >> shift),
        (0_u64..64).prop_map(|small| MEMORY - 32 + small),
        0_u64..512,
    ]
}

fn image() -> impl Strategy<Value = Vec<u8>> {
    let packed = |compression| BzImage::new(pack(compression, &Elf::linux().build())).build();
    prop_oneof![
        Just(Elf::linux().build()),
        Just(Elf::pvh().build()),
        Just(Elf::multiboot().build()),
        Just(flat()),
        Just(packed(Compression::Gzip)),
        Just(packed(Compression::Bzip2)),
        Just(packed(Compression::Lzma)),
        Just(packed(Compression::Xz)),
        Just(packed(Compression::Lz4)),
        Just(packed(Compression::Zstd)),
        Just(BzImage::new(b"\x89LZO".to_vec()).build()),
    ]
}

/// Where, how many bytes, what.
fn changes() -> impl Strategy<Value = Vec<(prop::sample::Index, usize, u64)>> {
    prop::collection::vec((any::<prop::sample::Index>(), 1_usize..9, value()), 0..6)
}

fn check(kernel: Vec<u8>, protocol: Option<Protocol>) {
    let mut machine = Machine::new(kernel);
    machine.protocol = protocol;
    // Between the kernel and the initrd nothing may be written.
    let untouched = MEMORY - 8192;
    let guest = machine.ram.guest();
    guest.write_obj(0x55_u8, GuestAddress(untouched)).unwrap();
    match machine.load() {
        Ok(loaded) => {
            let kernel = loaded.recognised.kernel;
            let may_be_low = loaded.recognised.protocol == Protocol::Multiboot;
            assert!(kernel.start >= 0x10_0000 || may_be_low);
            assert!(kernel.end <= MEMORY - 4096);
            assert!(kernel.contains(&loaded.state.rip));
            for range in loaded.recognised.updated {
                assert!(kernel.start <= range.start && range.start < range.end);
                assert!(range.end <= kernel.end);
            }
            // A kernel may limit how high the initrd lies, so it may lie there too.
            let initrd = loaded.recognised.initrd.unwrap_or_default();
            assert!(initrd.is_empty() || initrd.end <= kernel.start || kernel.end <= initrd.start);
            if !kernel.contains(&untouched) && !initrd.contains(&untouched) {
                assert_eq!(machine.number(untouched, 1), 0x55);
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn damaged_images_are_loaded_or_refused(
        mut kernel in image(),
        changes in changes(),
        // Most in the headers, where it matters.
        in_headers in any::<bool>(),
        forced in prop::option::of(0_usize..4),
    ) {
        for (place, length, value) in changes {
            let range = if in_headers { kernel.len().min(0x280) } else { kernel.len() };
            let at = place.index(range);
            let length = length.min(kernel.len() - at).min(8);
            kernel[at..at + length].copy_from_slice(&value.to_le_bytes()[..length]);
        }
        check(kernel, forced.map(|number| Protocol::NAMES[number].1));
    }

    #[test]
    fn any_bytes_are_refused(kernel in prop::collection::vec(any::<u8>(), 0..2000)) {
        check(kernel, None);
    }
}
