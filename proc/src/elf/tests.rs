//! Real programs, mutated programs, and one made by hand for each error.

use super::*;
use proptest::prelude::*;
use std::fs;

/// A program with these segments: (type, flags, offset, address, file length,
/// memory length, alignment).
fn program(file_type: u16, segments: &[(u32, u32, u64, u64, u64, u64, u64)]) -> Vec<u8> {
    let mut file = vec![0; HEADER];
    file[..4].copy_from_slice(b"\x7fELF");
    file[4..7].copy_from_slice(&[2, 1, 1]);
    file[16..18].copy_from_slice(&file_type.to_le_bytes());
    file[18..20].copy_from_slice(&abi::EM_X86_64.to_le_bytes());
    file[20] = 1;
    file[24..32].copy_from_slice(&0x40_1000u64.to_le_bytes());
    file[32..40].copy_from_slice(&64u64.to_le_bytes());
    file[52..54].copy_from_slice(&64u16.to_le_bytes());
    file[54..56].copy_from_slice(&56u16.to_le_bytes());
    file[56..58].copy_from_slice(&(segments.len() as u16).to_le_bytes());
    for &(kind, flags, offset, address, file_length, memory_length, alignment) in segments {
        file.extend(kind.to_le_bytes());
        file.extend(flags.to_le_bytes());
        for word in [
            offset,
            address,
            address,
            file_length,
            memory_length,
            alignment,
        ] {
            file.extend(word.to_le_bytes());
        }
    }
    file.resize(0x4000, 0);
    file
}

const RX: u32 = abi::PF_R | abi::PF_X;
const RW: u32 = abi::PF_R | abi::PF_W;
type Row = (u32, u32, u64, u64, u64, u64, u64);
const TEXT: Row = (abi::PT_LOAD, RX, 0, 0x40_0000, 0x1800, 0x1800, 0x1000);
const DATA: Row = (abi::PT_LOAD, RW, 0x1e10, 0x40_2e10, 0x300, 0x5000, 0x1000);

fn parse(file: &[u8]) -> Result<Image, ElfError> {
    Image::parse(file, file.len() as u64)
}

#[test]
fn a_static_program_is_mapped_as_the_kernel_maps_it() {
    let image = parse(&program(abi::ET_EXEC, &[TEXT, DATA])).unwrap();
    assert_eq!(image.kind, ImageKind::Fixed);
    assert_eq!(image.program_headers, 0x40_0040);
    assert_eq!(image.heap_start(0), 0x40_8000);
    let mappings: Vec<Mapping> = image.plan(0).collect();
    assert_eq!(
        mappings,
        [
            Mapping {
                address: 0x40_0000,
                length: 0x2000,
                file_offset: 0,
                file_length: 0x1800,
                prot: layout::PROT_READ | layout::PROT_EXEC,
                zero_fill_tail: 0,
            },
            Mapping {
                address: 0x40_2000,
                length: 0x2000,
                file_offset: 0x1000,
                file_length: 0xe10 + 0x300,
                prot: layout::PROT_READ | layout::PROT_WRITE,
                zero_fill_tail: 0x2000 - 0x1110,
            },
            Mapping {
                address: 0x40_4000,
                length: 0x4000,
                file_offset: 0,
                file_length: 0,
                prot: layout::PROT_READ | layout::PROT_WRITE,
                zero_fill_tail: 0,
            },
        ]
    );
}

#[test]
fn a_segment_of_zeroes_only_is_anonymous() {
    let zeroes = (abi::PT_LOAD, RW, 0x2e10, 0x40_4e10, 0, 0x300, 0x1000);
    let image = parse(&program(abi::ET_EXEC, &[TEXT, zeroes])).unwrap();
    let last = image.plan(0).last().unwrap();
    assert!(last.is_anonymous());
    assert_eq!((last.address, last.length), (0x40_4000, 0x2000));
}

#[test]
fn a_base_must_be_aligned_and_in_range() {
    let text = (abi::PT_LOAD, RX, 0, 0, 0x1800, 0x1800, 0x20_0000);
    let image = parse(&program(abi::ET_DYN, &[text])).unwrap();
    assert_eq!(image.alignment, 0x20_0000);
    assert!(image.check_base(0x40_0000).is_ok());
    assert!(image.check_base(0x40_1000).is_err());
    assert!(image.check_base(0).is_err());
    assert!(image.check_base(layout::LIMIT).is_err());
    assert!(image.check_base(!0x1f_ffff).is_err());
    assert_eq!(image.plan(0x40_0000).next().unwrap().address, 0x40_0000);
}

#[test]
fn each_defect_has_its_own_error() {
    let good = program(abi::ET_EXEC, &[TEXT, DATA]);
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut file = good.clone();
        change(&mut file);
        parse(&file).unwrap_err()
    };
    assert_eq!(parse(b"#!/bin/sh"), Err(ElfError::NotElf));
    assert_eq!(parse(b""), Err(ElfError::NotElf));
    assert!(matches!(
        parse(&good[..20]),
        Err(ElfError::Short { needed: 64, .. })
    ));
    assert!(matches!(
        parse(&good[..100]),
        Err(ElfError::BeyondFile { .. })
    ));
    assert!(matches!(
        Image::parse(&good[..100], 0x4000),
        Err(ElfError::Short { needed: 176, .. })
    ));
    assert_eq!(with(&|f| f[4] = 1), ElfError::ThirtyTwoBit);
    assert_eq!(with(&|f| f[18] = abi::EM_386 as u8), ElfError::ThirtyTwoBit);
    let arm = with(&|f| f[18..20].copy_from_slice(&abi::EM_AARCH64.to_le_bytes()));
    assert_eq!(
        arm,
        ElfError::ForeignMachine {
            machine: Machine(abi::EM_AARCH64)
        }
    );
    assert!(arm.to_string().contains("aarch64"), "{arm}");
    let mainframe = with(&|f| {
        f[5] = 2;
        f[18..20].copy_from_slice(&abi::EM_S390.to_be_bytes());
    });
    assert!(mainframe.to_string().contains("S/390"), "{mainframe}");
    let swapped = with(&|f| {
        f[5] = 2;
        f[18..20].copy_from_slice(&abi::EM_X86_64.to_be_bytes());
    });
    assert_eq!(swapped, ElfError::WrongByteOrder);
    assert_eq!(
        with(&|f| f[16] = 1),
        ElfError::NotExecutable { file_type: 1 }
    );
    assert_eq!(with(&|f| f[56] = 0), ElfError::NoSegments);
    assert!(matches!(
        with(&|f| f[54] = 32),
        ElfError::ProgramHeaders { size: 32, .. }
    ));
    assert!(matches!(
        with(&|f| f[57] = 1),
        ElfError::ProgramHeaders { .. }
    ));
    assert!(matches!(
        with(&|f| f[32..40].fill(0xff)),
        ElfError::WrapAround { .. }
    ));
}

#[test]
fn each_bad_segment_has_its_own_error() {
    let with = |segments: &[Row]| parse(&program(abi::ET_EXEC, segments)).unwrap_err();
    assert_eq!(
        with(&[(abi::PT_NOTE, 0, 0, 0, 0, 0, 0)]),
        ElfError::NoSegments
    );
    assert!(matches!(with(&[DATA, TEXT]), ElfError::Overlap { .. }));
    let into_data = (abi::PT_LOAD, RX, 0, 0x40_0000, 0x1800, 0x2e11, 0x1000);
    assert!(matches!(with(&[into_data, DATA]), ElfError::Overlap { .. }));
    let beyond = (abi::PT_LOAD, RX, 0, 0x40_0000, 0x4001, 0x4001, 0x1000);
    assert!(matches!(with(&[beyond]), ElfError::BeyondFile { .. }));
    let low = (abi::PT_LOAD, RX, 0, 0x1000, 0x1800, 0x1800, 0x1000);
    assert!(matches!(with(&[low]), ElfError::OutsideManaged { .. }));
    let high = (
        abi::PT_LOAD,
        RX,
        0,
        layout::LIMIT - 0x1000,
        0x1800,
        0x1800,
        0x1000,
    );
    assert!(matches!(with(&[high]), ElfError::OutsideManaged { .. }));
    let wrap = (
        abi::PT_LOAD,
        RX,
        0,
        u64::MAX - 0xfff,
        0x1800,
        0x1800,
        0x1000,
    );
    assert!(matches!(with(&[wrap]), ElfError::WrapAround { .. }));
    let shrunk = (abi::PT_LOAD, RX, 0, 0x40_0000, 0x1800, 0x17ff, 0x1000);
    assert!(matches!(
        with(&[shrunk]),
        ElfError::FileLongerThanMemory { .. }
    ));
    let crooked = (abi::PT_LOAD, RX, 0x10, 0x40_0000, 0x1800, 0x1800, 0x1000);
    assert!(matches!(with(&[crooked]), ElfError::Misaligned { .. }));
    let many: Vec<Row> = (0..33)
        .map(|index| {
            (
                abi::PT_LOAD,
                RX,
                0,
                0x40_0000 + index * 0x1000,
                0x10,
                0x10,
                0x1000,
            )
        })
        .collect();
    assert_eq!(with(&many), ElfError::TooManySegments { max: SEGMENTS_MAX });
    assert_eq!(
        with(&[TEXT, (abi::PT_INTERP, 0, 0, 0, 1, 1, 1)]),
        ElfError::Interpreter
    );
}

#[test]
fn the_stack_flag_and_interpreter_are_found() {
    let rows = [
        TEXT,
        DATA,
        (abi::PT_GNU_STACK, RW | abi::PF_X, 0, 0, 0, 0, 16),
        (abi::PT_INTERP, 0, 0x300, 0x40_0300, 28, 28, 1),
    ];
    let image = parse(&program(abi::ET_EXEC, &rows)).unwrap();
    assert!(image.executable_stack);
    let path = image.interpreter.unwrap();
    assert_eq!((path.offset, path.length), (0x300, 28));
    assert_eq!(interpreter_path(b"/lib/ld.so\0"), Ok(&b"/lib/ld.so"[..]));
    assert_eq!(interpreter_path(b"/lib/ld.so"), Err(ElfError::Interpreter));
    assert_eq!(interpreter_path(b"\0"), Err(ElfError::Interpreter));
    assert_eq!(interpreter_path(b""), Err(ElfError::Interpreter));
}

/// Programs of this machine, whichever there are; the test itself always is.
fn real_programs() -> Vec<(String, Vec<u8>)> {
    let mut paths = vec![std::env::current_exe().unwrap().display().to_string()];
    paths.extend(
        [
            "/bin/true",
            "/bin/bash",
            "/usr/bin/python3",
            "/sbin/ldconfig",
            "/lib64/ld-linux-x86-64.so.2",
        ]
        .map(String::from),
    );
    paths
        .into_iter()
        .filter_map(|path| fs::read(&path).ok().map(|file| (path, file)))
        .filter(|(_, file)| file.starts_with(b"\x7fELF"))
        .collect()
}

#[test]
fn real_programs_parse() {
    let programs = real_programs();
    assert!(!programs.is_empty());
    for (path, file) in programs {
        let needed = bytes_needed(&file[..HEADER]).unwrap();
        let image = Image::parse(&file[..needed], file.len() as u64)
            .unwrap_or_else(|error| panic!("{path}: {error}"));
        let base = match image.kind {
            ImageKind::Fixed => 0,
            ImageKind::Relocatable => 0x5555_5555 & !(image.alignment - 1),
        };
        image.check_base(base).unwrap();
        let mut end = 0;
        for mapping in image.plan(base) {
            assert!(mapping.address >= end, "{path}: mappings overlap");
            assert!((mapping.address | mapping.length | mapping.file_offset).is_multiple_of(PAGE));
            end = mapping.address + mapping.length;
        }
        assert_eq!(end, base + image.extent().end, "{path}");
        if let Some(range) = image.interpreter {
            let bytes = &file[range.offset as usize..][..range.length as usize];
            assert!(interpreter_path(bytes).unwrap().starts_with(b"/"), "{path}");
        }
    }
}

/// What must hold for any image that was accepted.
fn check_image(image: &Image) {
    let mut end = 0;
    for segment in image.segments() {
        assert!(segment.address >= end);
        assert!(segment.file_length <= segment.memory_length);
        end = segment.address + segment.memory_length;
        assert!(end <= layout::LIMIT);
    }
    for base in [0, 0x1000_0000, !(PAGE - 1)] {
        let accepted = image.check_base(base).is_ok();
        for mapping in image.plan(base) {
            assert!(mapping.length.is_multiple_of(PAGE) && mapping.length > 0);
            assert!(mapping.file_length <= mapping.length);
            assert!(mapping.zero_fill_tail < PAGE);
            if accepted {
                assert!(mapping.address >= layout::LOWEST);
                assert!(mapping.address + mapping.length <= layout::LIMIT);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_bytes_never_panic(mut head in proptest::collection::vec(any::<u8>(), 0..600), length in any::<u64>()) {
        let _ = bytes_needed(&head);
        let _ = Image::parse(&head, length);
        // Past the first checks.
        let good = program(abi::ET_DYN, &[TEXT]);
        let front = head.len().min(32);
        head[..front].copy_from_slice(&good[..front]);
        if let Ok(image) = Image::parse(&head, length) {
            check_image(&image);
        }
    }

    #[test]
    fn mutated_programs_never_panic(
        which in any::<prop::sample::Index>(),
        changes in proptest::collection::vec((0..900usize, any::<u8>()), 1..8),
        cut in 0..2000usize,
        length in prop_oneof![Just(None), any::<u64>().prop_map(Some)],
    ) {
        thread_local! {
            static PROGRAMS: Vec<(String, Vec<u8>)> = real_programs();
        }
        PROGRAMS.with(|programs| {
            let (_, file) = which.get(programs);
            let mut head = file[..2000.min(file.len())].to_vec();
            for (at, byte) in changes {
                head[at] = byte;
            }
            head.truncate(if cut < 200 { cut } else { 2000 });
            if let Ok(image) = Image::parse(&head, length.unwrap_or(file.len() as u64)) {
                check_image(&image);
            }
        });
    }
}
