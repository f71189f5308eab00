//! Files that do not boot: each is refused with the reason and what to do.

use super::*;

fn refusal(kernel: Vec<u8>) -> ImageError {
    Machine::new(kernel).refusal()
}

#[test]
fn what_cannot_be_read_is_refused() {
    let folder = std::env::temp_dir();
    let missing = folder.join("weft-no-such-kernel");
    let error = ImageFile::open(Role::Kernel, &missing).unwrap_err();
    assert!(matches!(error, BootError::Read { .. }));
    let error = ImageFile::open(Role::Initrd, &folder).unwrap_err();
    assert!(matches!(error, BootError::NotAFile { .. }));
    let empty = folder.join(format!("weft-empty-{}", std::process::id()));
    std::fs::write(&empty, b"").unwrap();
    let error = ImageFile::open(Role::Kernel, &empty).unwrap_err();
    std::fs::remove_file(&empty).unwrap();
    assert!(matches!(error, BootError::FileSize { bytes: 0, .. }));
}

#[test]
fn files_that_change_while_the_machine_starts_are_refused() {
    let path = std::env::temp_dir().join(format!("weft-changing-{}", std::process::id()));
    let image = Elf::linux().build();
    std::fs::write(&path, &image).unwrap();
    let mut machine = Machine::new(Vec::new());
    machine.kernel = ImageFile::open(Role::Kernel, &path).unwrap();
    assert!(machine.load().is_ok());
    // As the next life of the machine would find it.
    assert!(machine.load().is_ok());
    for length in [image.len() - 1, image.len() + 1] {
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(length as u64).unwrap();
        let error = machine.load().unwrap_err();
        assert!(matches!(error, BootError::Changed { .. }), "{error}");
        assert!(error.to_string().contains("was changed"), "{error}");
    }
    // Cut between the look at its size and the reading.
    std::fs::write(&path, &image[..10]).unwrap();
    let error = machine.kernel.read(0..image.len() as u64).unwrap_err();
    assert!(
        matches!(error, BootError::Changed { now: 10, .. }),
        "{error}"
    );
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn what_is_no_kernel_is_called_what_it_is() {
    for (bytes, word) in [
        (b"070701 and so on".to_vec(), "cpio"),
        (b"\x1f\x8b\x08 and so on".to_vec(), "compressed"),
        (b"#!/bin/sh".to_vec(), "script"),
        (b"MZ and so on".to_vec(), "EFI"),
        (vec![0; 4096], "something else"),
        (Vec::new(), "something else"),
    ] {
        let error = refusal(bytes);
        assert!(matches!(error, ImageError::NotAKernel(_)));
        assert!(error.to_string().contains(word), "{error}");
    }
    let program = Elf::default().build();
    assert_eq!(refusal(program), ImageError::NoProtocol("x86-64"));
}

#[test]
fn another_architecture_is_named() {
    for (machine, is_64, name) in [
        (183, true, "arm64"),
        (243, true, "RISC-V"),
        (21, true, "POWER"),
    ] {
        let elf = Elf {
            machine,
            is_64,
            ..Elf::linux()
        };
        let error = refusal(elf.build());
        assert!(matches!(error, ImageError::Architecture(_)), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
    let mut arm_image = vec![0; 256];
    arm_image[0x38..0x3c].copy_from_slice(b"ARMd");
    assert_eq!(refusal(arm_image), ImageError::Architecture("arm64".into()));
    let mut image = BzImage::new(Vec::new());
    image.load_flags = 0;
    assert_eq!(
        refusal(image.build()),
        ImageError::Architecture("32-bit x86".into())
    );
}

#[test]
fn every_cut_off_file_is_refused() {
    let packed = pack(Compression::Gzip, &Elf::linux().build());
    for whole in [
        Elf::linux().build(),
        Elf::pvh().build(),
        BzImage::new(packed).build(),
    ] {
        assert!(Machine::new(whole.clone()).load().is_ok());
        // The last bytes may be padding, or notes that are not needed.
        for length in (0..whole.len() - 64).step_by(7) {
            refusal(whole[..length].to_vec());
        }
    }
    let elf = Elf::linux().build();
    let error = refusal(elf[..100].to_vec());
    assert!(matches!(error, ImageError::Truncated { .. }), "{error}");
    let image = BzImage::new(vec![1; 5000]).build();
    let error = refusal(image[..4000].to_vec());
    assert!(matches!(error, ImageError::Truncated { .. }), "{error}");
}

#[test]
fn an_old_bzimage_is_refused() {
    let mut image = BzImage::new(Vec::new());
    image.version = 0x208;
    assert!(matches!(refusal(image.build()), ImageError::Unsupported(_)));
}

#[test]
fn a_damaged_payload_is_refused_and_not_left_to_the_guest() {
    let elf = Elf::linux().build();
    for compression in [
        Compression::Gzip,
        Compression::Bzip2,
        Compression::Xz,
        Compression::Lz4,
    ] {
        let mut packed = pack(compression, &elf);
        let middle = packed.len() / 2;
        packed.truncate(middle);
        let error = refusal(BzImage::new(packed).build());
        assert!(
            matches!(error, ImageError::Payload(_)),
            "{compression}: {error}"
        );
    }
    let mut packed = pack(Compression::Zstd, &elf);
    *packed.last_mut().unwrap() = 1;
    assert!(matches!(
        refusal(BzImage::new(packed).build()),
        ImageError::Payload(PayloadError::TooLarge { .. })
    ));
    let mut packed = pack(Compression::Lzma, &elf);
    let size_at = packed.len() - 4;
    packed[size_at] ^= 1;
    assert!(matches!(
        refusal(BzImage::new(packed).build()),
        ImageError::Payload(PayloadError::Size { .. })
    ));
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut elf = Elf::linux();
    elf.length = MEMORY;
    assert_eq!(
        refusal(elf.build()),
        ImageError::OutsideMemory {
            start: START,
            end: START + MEMORY,
            ram_end: MEMORY
        }
    );
    elf.length = LENGTH;
    elf.physical = 0x8000;
    elf.entry = 0x8000;
    assert_eq!(refusal(elf.build()), ImageError::TooLow(0x8000));
    elf.physical = u64::MAX - 10;
    assert!(matches!(refusal(elf.build()), ImageError::Malformed { .. }));
    let mut image = BzImage::new(b"\x89LZO".to_vec());
    image.init_size = MEMORY as u32;
    assert!(matches!(
        refusal(image.build()),
        ImageError::OutsideMemory { .. }
    ));
    for pref_address in [
        u64::MAX,
        u64::MAX << 8,
        u64::MAX - u64::from(image.init_size) + 1,
    ] {
        image.pref_address = pref_address;
        assert!(matches!(
            refusal(image.build()),
            ImageError::Malformed { .. }
        ));
    }

    let mut machine = Machine::new(Elf::linux().build());
    machine.initrd = Some(file(Role::Initrd, vec![0; (MEMORY - START) as usize]));
    assert!(matches!(
        machine.load(),
        Err(BootError::InitrdTooLarge { room, .. }) if room == MEMORY - START - LENGTH
    ));
    machine.initrd = Some(file(
        Role::Initrd,
        vec![0; (MEMORY - START - LENGTH) as usize],
    ));
    assert!(machine.load().is_ok());
}

#[test]
fn all_that_is_loaded_lies_in_the_first_node() {
    let mut machine = Machine::new(Elf::linux().build());
    let half = MEMORY / 2;
    machine.limit = Some(half);
    let initrd = machine.load().unwrap().recognised.initrd.unwrap();
    assert_eq!(initrd.end.next_multiple_of(4096), half);
    machine.initrd = Some(file(Role::Initrd, vec![1; half as usize]));
    let error = machine.load().unwrap_err();
    assert!(
        matches!(error, BootError::InitrdTooLargeForNode { room, .. } if room == half - START - LENGTH)
    );
    let text = error.to_string();
    assert!(
        text.contains("of 8 MiB does not fit into the first node's 8 MiB"),
        "{text}"
    );
    machine.limit = Some(START);
    let error = machine.refusal();
    assert!(
        matches!(error, ImageError::OutsideFirstNode { .. }),
        "{error}"
    );
    // A limit beyond RAM, or above the hole, has no effect.
    machine.limit = Some(5 << 30);
    machine.initrd = Some(file(Role::Initrd, vec![1; MEMORY as usize]));
    let error = machine.load().unwrap_err();
    assert!(matches!(error, BootError::InitrdTooLarge { .. }), "{error}");
}

#[test]
fn a_command_line_that_would_be_cut_is_refused() {
    let mut machine = Machine::new(Elf::linux().build());
    machine.command_line = "a".repeat(2047);
    assert!(machine.load().is_ok());
    machine.command_line.push('a');
    assert!(matches!(
        machine.load(),
        Err(BootError::CommandLineTooLong {
            bytes: 2048,
            limit: 2047
        })
    ));
    machine.command_line = "a\0b".into();
    assert!(matches!(machine.load(), Err(BootError::CommandLineZero(1))));
    machine.kernel = file(Role::Kernel, Elf::multiboot().build());
    machine.command_line = "a".repeat(layout::COMMAND_LINE_ROOM - 1);
    assert!(machine.load().is_ok());
    machine.command_line.push('a');
    assert!(machine.load().is_err());
}

#[test]
fn an_entry_that_is_not_loaded_is_refused() {
    let elf = Elf {
        entry: 0x1234,
        ..Elf::linux()
    };
    assert!(matches!(
        refusal(elf.build()),
        ImageError::Malformed { place: "entry", .. }
    ));
    let mut elf = Elf::pvh();
    elf.notes[0].2 = vec![0; 4];
    assert!(matches!(
        refusal(elf.build()),
        ImageError::Malformed { place: "entry", .. }
    ));
}

#[test]
fn a_protocol_that_the_image_lacks_cannot_be_forced() {
    let bzimage = BzImage::new(pack(Compression::Lz4, &Elf::linux().build())).build();
    for (kernel, protocol) in [
        (Elf::linux().build(), Protocol::Pvh),
        (Elf::linux().build(), Protocol::Multiboot),
        (Elf::linux().build(), Protocol::LinuxOwnEntry),
        (Elf::multiboot().build(), Protocol::Linux),
        (flat(), Protocol::Pvh),
        (bzimage, Protocol::Multiboot),
        (BzImage::new(b"\x89LZO".to_vec()).build(), Protocol::Linux),
    ] {
        let mut machine = Machine::new(kernel);
        machine.protocol = Some(protocol);
        assert!(matches!(machine.refusal(), ImageError::Forced { .. }));
    }
}

#[test]
fn a_multiboot_kernel_that_wants_graphics_is_refused() {
    let mut elf = Elf::multiboot();
    elf.code = multiboot_header(4, &[]);
    assert!(matches!(refusal(elf.build()), ImageError::Unsupported(_)));
}
