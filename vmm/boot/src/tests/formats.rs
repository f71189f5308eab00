//! What each protocol tells the kernel, read back by the documents' offsets.

use super::super::processor::{RAX, RBX, RSI};
use super::*;

#[test]
fn linux_finds_everything_from_its_zero_page() {
    let machine = Machine::new(Elf::linux().build());
    let loaded = machine.load().unwrap();
    assert_eq!(loaded.recognised.protocol, Protocol::Linux);
    let state = loaded.state;
    // The entry is physical although the segment has a virtual address.
    assert_eq!(state.rip, START + 1);
    assert_eq!(state.cr0 & (1 << 31 | 1), 1 << 31 | 1);
    assert_eq!((state.cs.selector, state.ds.selector), (0x10, 0x18));
    assert_eq!(state.rflags & 1 << 9, 0, "interrupts are off");
    let zero_page = state.registers[RSI];
    assert_eq!(machine.number(zero_page + 0x1fe, 2), 0xaa55);
    assert_eq!(machine.bytes(zero_page + 0x202, 4), b"HdrS");
    assert_eq!(machine.number(zero_page + 0x210, 1), 0xff);
    assert_eq!(machine.number(zero_page + 0x70, 8), 0xe_0000);
    let command_line = machine.number(zero_page + 0x228, 4);
    assert_eq!(machine.text(command_line), "console=ttyS0");
    let initrd = machine.number(zero_page + 0x218, 4);
    assert_eq!(initrd, MEMORY - 4096);
    assert_eq!(machine.number(zero_page + 0x21c, 4), 9);
    assert_eq!(machine.bytes(initrd, 9), b"an initrd");
    let setup_data = machine.number(zero_page + 0x250, 8);
    assert_eq!(machine.number(setup_data, 8), 0);
    assert_eq!(machine.number(setup_data + 8, 8), 32 << 32 | 9);
    assert_eq!(machine.bytes(setup_data + 16, 32), [7; 32]);

    let lines: Vec<(u64, u64, u64)> = (0..machine.number(zero_page + 0x1e8, 1))
        .map(|line| zero_page + 0x2d0 + line * 20)
        .map(|at| {
            let number = |offset, length| machine.number(at + offset, length);
            (number(0, 8), number(8, 8), number(16, 4))
        })
        .collect();
    assert_eq!(
        lines,
        [
            (0, 0x9_fc00, 1),
            (0x9_fc00, 0x400, 2),
            (0xe_0000, 0x2000, 3),
            (0xe_2000, 0x1_e000, 2),
            (0x10_0000, MEMORY - 0x10_0000, 1),
            (0xe000_0000, 0x10_0000, 2),
        ]
    );
    assert_eq!(machine.bytes(START, CODE.len()), CODE);
}

#[test]
fn what_is_not_given_is_zero() {
    let mut machine = Machine::new(Elf::linux().build());
    machine.initrd = None;
    machine.acpi = None;
    machine.seed = None;
    let zero_page = machine.load().unwrap().state.registers[RSI];
    for (offset, length) in [(0x70, 8), (0x218, 4), (0x21c, 4), (0x250, 8)] {
        assert_eq!(machine.number(zero_page + offset, length), 0);
    }
}

#[test]
fn memory_used_before_is_cleared_where_the_kernel_says() {
    let machine = Machine::new(Elf::linux().build());
    let guest = machine.ram.guest();
    guest
        .write_slice(&[0xff; 0x4000], GuestAddress(START))
        .unwrap();
    machine.load().unwrap();
    let bss = machine.bytes(START + CODE.len() as u64, LENGTH as usize - CODE.len());
    assert!(bss.iter().all(|byte| *byte == 0));
    assert_eq!(machine.number(START + LENGTH, 1), 0xff);
}

#[test]
fn old_linux_is_known_by_its_banner() {
    let mut elf = Elf::linux();
    elf.notes.clear();
    elf.code = b"\0Linux version 3.16.0 (root@here)\0".into();
    let loaded = Machine::new(elf.build()).load().unwrap();
    assert_eq!(loaded.recognised.protocol, Protocol::Linux);
}

#[test]
fn every_compression_is_unpacked() {
    let elf = Elf::linux().build();
    for compression in [
        Compression::Gzip,
        Compression::Bzip2,
        Compression::Lzma,
        Compression::Xz,
        Compression::Lz4,
        Compression::Zstd,
    ] {
        let image = BzImage::new(pack(compression, &elf)).build();
        let machine = Machine::new(image);
        let loaded = machine.load().unwrap();
        let recognised = loaded.recognised;
        assert_eq!(recognised.compression, Some(compression));
        assert_eq!(recognised.protocol, Protocol::Linux);
        assert_eq!(recognised.entry, START + 1);
        assert_eq!(recognised.version.as_deref(), Some("6.1.0-made here"));
        assert_eq!(machine.bytes(START, CODE.len()), CODE);
        // The header is the image's own.
        let zero_page = loaded.state.registers[RSI];
        assert_eq!(machine.number(zero_page + 0x258, 8), START);
    }
}

#[test]
fn a_kernel_that_cannot_be_unpacked_unpacks_itself() {
    let lzo = BzImage::new(b"\x89LZO\0\x0d\x0a\x1a\x0a and so on".to_vec());
    let mut machine = Machine::new(lzo.build());
    let loaded = machine.load().unwrap();
    assert_eq!(loaded.recognised.protocol, Protocol::LinuxOwnEntry);
    assert_eq!(loaded.state.rip, START + 0x200);
    assert_eq!(
        loaded.recognised.not_unpacked,
        Some(PayloadError::NoDecoder(Compression::Lzo))
    );
    // The memory that it needs to do so is kept free.
    assert_eq!(loaded.recognised.kernel, START..START + 0x8000);
    assert_eq!(machine.bytes(START, 4), [0x90; 4]);

    machine.kernel = file(
        Role::Kernel,
        BzImage::new(pack(Compression::Gzip, &Elf::linux().build())).build(),
    );
    machine.protocol = Some(Protocol::LinuxOwnEntry);
    let loaded = machine.load().unwrap();
    assert_eq!(loaded.recognised.not_unpacked, None);
    assert_eq!(loaded.state.rip, START + 0x200);
}

#[test]
fn pvh_finds_everything_from_its_start_information() {
    let machine = Machine::new(Elf::pvh().build());
    let loaded = machine.load().unwrap();
    assert_eq!(loaded.recognised.protocol, Protocol::Pvh);
    let state = loaded.state;
    assert_eq!(state.rip, START + 2);
    // Protected mode without paging, flat 32-bit segments.
    assert_eq!((state.cr0, state.cr4, state.efer), (0x11, 0, 0));
    assert_eq!((state.cs.limit, state.cs.rights), (u32::MAX, 0xc09b));
    assert_eq!(state.tr.limit, 0x67);
    let information = state.registers[RBX];
    assert_eq!(machine.number(information, 8), 1 << 32 | 0x336e_c578);
    let module = machine.number(information + 16, 8);
    assert_eq!(machine.number(information + 12, 4), 1);
    assert_eq!(machine.number(module + 8, 8), 9);
    let initrd = machine.number(module, 8);
    assert_eq!(machine.bytes(initrd, 9), b"an initrd");
    let command_line = machine.number(information + 24, 8);
    assert_eq!(machine.text(command_line), "console=ttyS0");
    assert_eq!(machine.number(information + 32, 8), 0xe_0000);
    let map = machine.number(information + 40, 8);
    let lines = machine.number(information + 48, 4);
    assert_eq!(lines, 6);
    assert_eq!(machine.number(map + 4 * 24, 8), 0x10_0000);
    assert_eq!(machine.number(map + 4 * 24 + 16, 4), 1);
}

#[test]
fn a_kernel_names_what_is_to_be_kept_up_to_date() {
    let updated = |notes: &[(&'static str, u32, Vec<u8>)]| {
        let mut elf = Elf::linux();
        elf.notes.truncate(1);
        elf.notes.extend_from_slice(notes);
        Machine::new(elf.build()).load().unwrap().recognised.updated
    };
    let machine = Machine::new(Elf::linux().build());
    let one = |range: Range<u64>| vec![range; 1];
    let named = one(START + 0x1000..START + 0x2000);
    assert_eq!(machine.load().unwrap().recognised.updated, named);
    let packed = BzImage::new(pack(Compression::Gzip, &Elf::linux().build())).build();
    let packed = Machine::new(packed).load().unwrap();
    assert_eq!(packed.recognised.updated, named);
    // Several ranges, in several notes; what is not the kernel's is left out.
    let (start, end) = (START, START + LENGTH);
    let some = addresses(&[
        (start, start + 8),
        (start - 1, start + 1),
        (end - 8, end),
        (end - 8, end + 1),
        (start + 8, start + 8),
        (start + 9, start + 8),
        (0, u64::MAX),
        (u64::MAX, 0),
    ]);
    let all = updated(&[("Weft", 1, some), ("Weft", 1, addresses(&[(start, end)]))]);
    assert_eq!(all, [start..start + 8, end - 8..end, start..end]);
    // Another owner, another kind, half a pair, a byte too many, nothing.
    let pair = addresses(&[(start, end)]);
    let half = pair[..8].to_vec();
    let odd = [&pair[..], &[0]].concat();
    assert_eq!(updated(&[("Weft", 2, pair.clone()), ("Xen", 1, pair)]), []);
    assert_eq!(
        updated(&[("Weft", 1, half), ("Weft", 1, odd), ("Weft", 1, vec![])]),
        []
    );
    // No more than there may be.
    let many = addresses(&[(start, start + 8); 100]);
    let many = updated(&[("Weft", 1, many.clone()), ("Weft", 1, many)]);
    assert_eq!(many.len(), UPDATED_RANGES_MAX);
    let mut large = Elf {
        length: 0x50_0000,
        ..Elf::linux()
    };
    let pages = [(start, start + 0x40_0001), (start, start + 0x40_0000)];
    large.notes[1].2 = addresses(&pages);
    let large = Machine::new(large.build()).load().unwrap();
    assert_eq!(large.recognised.updated, one(start..start + 0x40_0000));
}

#[test]
fn a_32_bit_pvh_kernel_is_one_too() {
    let elf = Elf {
        machine: EM_386,
        is_64: false,
        ..Elf::pvh()
    };
    let loaded = Machine::new(elf.build()).load().unwrap();
    assert_eq!(loaded.recognised.protocol, Protocol::Pvh);
}

fn check_multiboot(machine: &Machine, state: &CpuState) {
    assert_eq!(state.registers[RAX], 0x2bad_b002);
    assert_eq!((state.cr0, state.efer), (0x11, 0));
    let information = state.registers[RBX];
    assert_eq!(machine.number(information, 4), 0b10_0100_1101);
    assert_eq!(machine.number(information + 4, 4), 639);
    assert_eq!(machine.number(information + 8, 4), 15 * 1024);
    let command_line = machine.number(information + 16, 4);
    assert_eq!(machine.text(command_line), "console=ttyS0");
    assert_eq!(machine.number(information + 20, 4), 1);
    let module = machine.number(information + 24, 4);
    let initrd = machine.number(module, 4);
    assert_eq!(machine.number(module + 4, 4) - initrd, 9);
    assert_eq!(machine.bytes(initrd, 9), b"an initrd");
    let map_bytes = machine.number(information + 44, 4);
    assert_eq!(map_bytes, 6 * 24);
    let map = machine.number(information + 48, 4);
    assert_eq!(machine.number(map, 4), 20);
    assert_eq!(machine.number(map + 12, 8), 0x9_fc00);
    assert_eq!(machine.text(machine.number(information + 64, 4)), "weft");
}

#[test]
fn multiboot_finds_everything_from_its_table() {
    let machine = Machine::new(Elf::multiboot().build());
    let loaded = machine.load().unwrap();
    assert_eq!(loaded.recognised.protocol, Protocol::Multiboot);
    assert_eq!(loaded.state.rip, START + 1);
    check_multiboot(&machine, &loaded.state);
}

/// A Multiboot kernel linked for `start`, of `length` bytes in memory.
fn low_multiboot(start: u64, length: u64) -> Machine {
    let elf = Elf {
        physical: start,
        virtual_address: start,
        entry: start + 1,
        length,
        ..Elf::multiboot()
    };
    Machine::new(elf.build())
}

#[test]
fn a_multiboot_kernel_may_lie_below_1_mib() {
    // Beside all that it is told; where the descriptor table is; over all of it.
    for (start, length) in [(0x1_0000, 0x8000), (0x500, 0x1000), (0x500, 0x9_0000)] {
        let machine = low_multiboot(start, length);
        let loaded = machine.load().unwrap();
        let kernel = start..start + length;
        assert_eq!(loaded.recognised.kernel, kernel);
        check_multiboot(&machine, &loaded.state);
        let code = Elf::multiboot().code;
        assert_eq!(machine.bytes(start, code.len()), code);
        let rest = machine.bytes(start + code.len() as u64, length as usize - code.len());
        assert!(rest.iter().all(|byte| *byte == 0), "something lies in it");
        let told = [loaded.state.registers[RBX], loaded.state.gdtr.base];
        assert!(told.iter().all(|at| !kernel.contains(at) && *at < 0x9_fc00));
    }
}

#[test]
fn a_multiboot_kernel_lies_in_ram_and_leaves_room() {
    let (start, end) = (0x9_f000, 0x10_1000);
    let over = low_multiboot(start, end - start).refusal();
    assert_eq!(over, ImageError::InFirmware { start, end });
    let whole = low_multiboot(0, 0x9_fc00).refusal();
    assert_eq!(whole, ImageError::NoRoomBelow { bytes: 48 });
}

#[test]
fn a_flat_multiboot_image_lies_where_its_header_says() {
    let machine = Machine::new(flat());
    let loaded = machine.load().unwrap();
    assert_eq!(loaded.recognised.format, Format::Flat);
    assert_eq!(loaded.state.rip, START + 4);
    assert_eq!(loaded.recognised.kernel, START..START + 0x1000);
    assert_eq!(machine.bytes(START, 4), [0xf4; 4]);
    assert_eq!(machine.bytes(START + 99, 2), [0x90, 0]);
    check_multiboot(&machine, &loaded.state);
}

#[test]
fn linux_wins_over_pvh_and_pvh_over_multiboot_unless_forced() {
    let mut elf = Elf::pvh();
    elf.code = Elf::multiboot().code;
    let mut machine = Machine::new(elf.build());
    let protocol = |machine: &Machine| machine.load().unwrap().recognised.protocol;
    assert_eq!(protocol(&machine), Protocol::Pvh);
    machine.protocol = Some(Protocol::Multiboot);
    assert_eq!(protocol(&machine), Protocol::Multiboot);
    elf.notes.extend(Elf::linux().notes);
    machine.kernel = file(Role::Kernel, elf.build());
    machine.protocol = None;
    assert_eq!(protocol(&machine), Protocol::Linux);
    machine.protocol = Some(Protocol::Pvh);
    assert_eq!(protocol(&machine), Protocol::Pvh);
    for (name, protocol) in Protocol::NAMES {
        assert_eq!(name.parse(), Ok(protocol));
        assert_eq!(protocol.to_string(), name);
    }
    assert!("grub".parse::<Protocol>().is_err());
}

#[test]
fn only_linux_is_given_words_for_linux() {
    for (kernel, line) in [
        (Elf::linux().build(), "console=ttyS0 one two"),
        (Elf::pvh().build(), "console=ttyS0"),
        (Elf::multiboot().build(), "console=ttyS0"),
        (flat(), "console=ttyS0"),
    ] {
        let mut machine = Machine::new(kernel);
        machine.linux_parameters = vec!["one", "two"];
        let recognised = machine.load().unwrap().recognised;
        assert_eq!(machine.text(layout::COMMAND_LINE), line, "{recognised}");
    }
}
