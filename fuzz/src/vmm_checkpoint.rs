//! Files of checkpoints: of pages, and the manifest. Each input is read as it is, and
//! once more with its checksums repaired: those would keep damage from the decoders.

use std::io::Cursor;

use weft_checkpoint::manifest::MANIFEST_BYTES_MAX;
use weft_checkpoint::{
    FormatError, Identity, Machine, Manifest, PAGE_BYTES, PageFile, PagesReader, PagesWriter,
};

use crate::random::Random;

const IDENTITY: Identity = *b"0123456789abcdef";
const NODE: u32 = 1;
const PAGES_END: u64 = 1 << 20;
const FOOTER_BYTES: usize = 64;
const RUN_BYTES: u64 = 16;

/// A small file of pages.
pub fn valid_pages(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    let writer = PagesWriter::new(&mut bytes, IDENTITY, NODE);
    let mut writer = writer.expect("memory takes all bytes");
    let mut number = 0;
    for _ in 0..random.below(6) {
        number += 1 + [0, random.below(1000) as u64][random.below(2)];
        let page = [random.next() as u8; PAGE_BYTES];
        let added = writer.page(number, &page);
        added.expect("memory takes all bytes");
    }
    writer.finish().expect("memory takes all bytes");
    bytes
}

/// A file of pages gives pages below the end, in ascending order, or an error.
pub fn pages(input: &[u8]) {
    read_pages(input);
    let mut repaired = input.to_vec();
    repair_pages(&mut repaired);
    read_pages(&repaired);
}

fn read_pages(bytes: &[u8]) {
    let Ok(mut reader) = PagesReader::open(Cursor::new(bytes), &IDENTITY, NODE, PAGES_END) else {
        return;
    };
    let mut next = 0;
    let read = reader.read(&(0..PAGES_END), |first, bytes| {
        assert!(first >= next && bytes.len() % PAGE_BYTES == 0);
        next = first + (bytes.len() / PAGE_BYTES) as u64;
        assert!(next <= PAGES_END);
        Ok::<_, FormatError>(())
    });
    // Damaged bytes are an error, too.
    drop(read);
}

fn repair_pages(bytes: &mut [u8]) {
    let length = bytes.len();
    if length < PAGE_BYTES + FOOTER_BYTES {
        return;
    }
    seal(&mut bytes[..PAGE_BYTES]);
    let footer = length - FOOTER_BYTES;
    let runs = bytes[footer + 8..].first_chunk().copied();
    let runs = runs.map_or(0, u64::from_le_bytes);
    let table = runs
        .checked_mul(RUN_BYTES)
        .and_then(|table| footer.checked_sub(usize::try_from(table).ok()?));
    if let Some(start) = table {
        let checksum = crc32fast::hash(&bytes[start..footer]);
        bytes[footer + 40..footer + 44].copy_from_slice(&checksum.to_le_bytes());
    }
    seal(&mut bytes[footer..]);
}

/// Ends a part with the checksum of the rest of it.
fn seal(part: &mut [u8]) {
    let (content, checksum) = part.split_at_mut(part.len() - 4);
    checksum.copy_from_slice(&crc32fast::hash(content).to_le_bytes());
}

/// A manifest with random numbers in it.
pub fn valid_manifest(random: &mut Random) -> Vec<u8> {
    let file = PageFile {
        pages: random.next(),
        bytes: random.next(),
    };
    let manifest = Manifest {
        identity: IDENTITY,
        weft: "0.1.0".into(),
        saved_at_s: random.next(),
        pages: vec![file; 1 + random.below(16)],
        machine_bytes: random.next(),
        machine_checksum: random.next() as u32,
        machine: Machine {
            name: "web".into(),
            cpus: random.next() as u32,
            memory_bytes: random.next(),
            pages_end: random.next(),
            back_end: "soft".into(),
            features: vec!["sse2".into()],
            disks: Vec::new(),
        },
    };
    manifest.encode()
}

/// A manifest that is read is written as one that reads the same.
pub fn manifest(input: &[u8]) {
    read_manifest(input);
    let json = match input.iter().position(|byte| *byte == b'\n') {
        Some(end) => &input[end + 1..],
        None => input,
    };
    let line = format!("weft-checkpoint 1 {:08x}\n", crc32fast::hash(json));
    read_manifest(&[line.as_bytes(), json].concat());
}

fn read_manifest(bytes: &[u8]) {
    if let Ok(manifest) = Manifest::decode(bytes) {
        let again = manifest.encode();
        // Escapes and indentation may make it longer than what was read.
        if again.len() <= MANIFEST_BYTES_MAX {
            assert_eq!(Manifest::decode(&again).ok(), Some(manifest));
        }
    }
}
