//! Kernel images, as the virtual machine monitor loads them.

use weft_boot::test_images::{BzImage, Elf, flat, pack};
use weft_boot::{Compression, ImageFile, Protocol, Request, Role, load};
use weft_guest_memory::Ram;

use crate::random::Random;

const MEMORY: u64 = 16 << 20;

const COMPRESSIONS: [Compression; 6] = [
    Compression::Gzip,
    Compression::Bzip2,
    Compression::Lzma,
    Compression::Xz,
    Compression::Lz4,
    Compression::Zstd,
];

/// A kernel of any format, after a byte that chooses the protocol.
pub fn valid_image(random: &mut Random) -> Vec<u8> {
    let image = match random.below(6) {
        0 => Elf::linux().build(),
        1 => Elf::pvh().build(),
        2 => Elf::multiboot().build(),
        3 => flat(),
        _ => {
            let compression = COMPRESSIONS[random.below(COMPRESSIONS.len())];
            BzImage::new(pack(compression, &Elf::linux().build())).build()
        }
    };
    let choice = random.below(2 * Protocol::NAMES.len()) as u8;
    [&[choice], &image[..]].concat()
}

/// A kernel is refused, or all of it lies in the guest's memory, above what the
/// loader keeps for itself, and starts inside.
pub fn image(input: &[u8]) {
    let Some((choice, bytes)) = input.split_first() else {
        return;
    };
    let kernel = ImageFile::from_bytes(Role::Kernel, "input", bytes.to_vec());
    let initrd = ImageFile::from_bytes(Role::Initrd, "initrd", vec![0x55; 5000]);
    let ram = Ram::new(MEMORY).expect("memory");
    let request = Request {
        kernel: &kernel,
        initrd: Some(&initrd),
        command_line: "console=ttyS0",
        linux_parameters: &[],
        protocol: Protocol::NAMES
            .get(usize::from(*choice))
            .map(|(_, protocol)| *protocol),
        acpi: None,
        seed: Some(&[7; 32]),
        limit: None,
    };
    match load(&ram, &request) {
        Ok(loaded) => {
            let (kernel, initrd) = (loaded.recognised.kernel, loaded.recognised.initrd);
            let initrd = initrd.expect("it was given");
            let may_be_low = loaded.recognised.protocol == Protocol::Multiboot;
            assert!((0x10_0000 <= kernel.start || may_be_low) && kernel.end <= initrd.start);
            assert!(initrd.end <= MEMORY);
            assert!(kernel.contains(&loaded.state.rip));
            for range in loaded.recognised.updated {
                assert!(kernel.start <= range.start && range.start < range.end);
                assert!(range.end <= kernel.end);
            }
        }
        Err(error) => {
            let mut source: Option<&dyn std::error::Error> = Some(&error);
            while let Some(error) = source {
                assert!(!error.to_string().is_empty());
                source = error.source();
            }
        }
    }
}
