//! Files of checkpoints: of pages, and the manifest. Each input is read as it is, and
//! once more with its checksums repaired: those would keep damage from the decoders.

use std::path::PathBuf;

use weft_checkpoint::manifest::{MANIFEST_BYTES_MAX, first_line};
use weft_checkpoint::{
    Base, FORMAT, Identity, Machine, Manifest, PAGE_BYTES, PageFile, PagesReader, PagesWriter,
    Place, Tables, write_tables,
};

use crate::random::Random;

const IDENTITY: Identity = *b"0123456789abcdef";
const NODE: u32 = 1;
const PAGES_END: u64 = 1 << 20;
const FOOTER_BYTES: usize = 64;
/// Of either table.
const ENTRY_BYTES: u64 = 16;

/// A small file of pages: of two at most, in any order, and some ranges of unchanged ones.
pub fn valid_pages(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    let writer = PagesWriter::new(&mut bytes, IDENTITY, NODE);
    let mut writer = writer.expect("memory takes all bytes");
    let mut numbers: Vec<u64> = Vec::new();
    let mut next = 0;
    for _ in 0..random.below(6) {
        next += [0, random.below(1000) as u64][random.below(2)];
        match random.below(3) {
            0 if numbers.len() < 2 => {
                numbers.push(next);
                next += 1;
            }
            _ => {
                let count = random.below(1000) as u64;
                writer.unchanged(next..next + count);
                next += count;
            }
        }
    }
    if random.below(2) == 0 {
        numbers.reverse();
    }
    for number in numbers {
        let page = [1 + random.below(255) as u8; PAGE_BYTES];
        let added = writer.page(number, &page);
        added.expect("memory takes all bytes");
    }
    writer.finish().expect("memory takes all bytes");
    bytes
}

/// A file of pages gives pages below the end, each once, or an error.
pub fn pages(input: &[u8]) {
    read_pages(input);
    let mut repaired = input.to_vec();
    repair_pages(&mut repaired);
    read_pages(&repaired);
    read_tables(input);
    read_tables(&repaired);
}

/// The tables of a file give what the file gives, and none of its pages.
fn read_tables(bytes: &[u8]) {
    let whole = PagesReader::open(bytes, &IDENTITY, NODE, PAGES_END);
    let mut tables = Vec::new();
    if write_tables(&bytes, bytes.len() as u64, &mut tables).is_ok() {
        let apart = Tables::open(&tables[..]).expect("it was written");
        let apart = PagesReader::open(apart, &IDENTITY, NODE, PAGES_END);
        assert_eq!(whole.is_ok(), apart.is_ok());
        if let (Ok(whole), Ok(apart)) = (whole, apart) {
            assert_eq!(whole.runs(), apart.runs());
            assert_eq!(whole.written(), apart.written());
            let runs = 0..apart.runs().len();
            let mut buffer = Vec::new();
            assert!(
                runs.into_iter()
                    .all(|run| apart.read_run(run, &mut buffer).is_err())
            );
        }
    }
    // As the tables of a longer file.
    if let Ok(apart) = Tables::open(bytes) {
        let _ = PagesReader::open(apart, &IDENTITY, NODE, PAGES_END);
    }
}

fn read_pages(bytes: &[u8]) {
    let Ok(reader) = PagesReader::open(bytes, &IDENTITY, NODE, PAGES_END) else {
        return;
    };
    let entries = reader.runs().len() + reader.unchanged().len();
    assert!(entries * ENTRY_BYTES as usize <= bytes.len());
    let runs = reader.runs().iter().map(|run| run.first..run.end());
    let mut named: Vec<_> = runs.chain(reader.unchanged().iter().cloned()).collect();
    named.sort_by_key(|pages| pages.start);
    let mut next = 0;
    for pages in &named {
        assert!(pages.start >= next && pages.end > pages.start && pages.end <= PAGES_END);
        next = pages.end;
    }
    let written = reader.written();
    let all: u64 = named.iter().map(|pages| pages.end - pages.start).sum();
    assert_eq!(all, written.pages + written.unchanged);
    assert_eq!(bytes.len() as u64, written.bytes);
    let mut buffer = Vec::new();
    for (index, run) in reader.runs().iter().enumerate() {
        // Damaged bytes are an error.
        if reader.read_run(index, &mut buffer).is_ok() {
            assert_eq!(buffer.len(), run.count as usize * PAGE_BYTES);
        }
    }
}

fn repair_pages(bytes: &mut [u8]) {
    let length = bytes.len();
    if length < PAGE_BYTES + FOOTER_BYTES {
        return;
    }
    seal(&mut bytes[..PAGE_BYTES]);
    let footer = length - FOOTER_BYTES;
    // The numbers of runs and of ranges.
    let entries = [8, 44].map(|at| {
        let number = bytes[footer + at..].first_chunk().copied();
        number.map_or(0, u64::from_le_bytes)
    });
    let tables = entries[0].checked_add(entries[1]);
    let start = tables
        .and_then(|entries| entries.checked_mul(ENTRY_BYTES))
        .and_then(|tables| footer.checked_sub(usize::try_from(tables).ok()?));
    if let Some(start) = start {
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
    let directory = ["", "../monday", "/srv/monday"][random.below(3)];
    let base = (!directory.is_empty()).then(|| Base {
        directory: PathBuf::from(directory),
        identity: IDENTITY,
    });
    let file = PageFile {
        pages: random.next(),
        unchanged: base.as_ref().map_or(0, |_| random.next()),
        bytes: random.next(),
        place: (random.below(2) == 0).then(|| Place {
            host: "beta".into(),
            directory: PathBuf::from("/srv/monday"),
        }),
    };
    let manifest = Manifest {
        identity: IDENTITY,
        weft: "0.1.0".into(),
        saved_at_s: random.next(),
        pages: vec![file; 1 + random.below(16)],
        base,
        machine_bytes: random.next(),
        machine_checksum: random.next() as u32,
        machine: Machine {
            name: "web".into(),
            cpus: random.next() as u32,
            memory_bytes: random.next(),
            pages_end: random.next() >> 12,
            back_end: "soft".into(),
            features: vec!["sse2".into()],
            disks: Vec::new(),
        },
    };
    manifest.encode().expect("all paths are UTF-8")
}

/// A manifest that is read is written as one that reads the same.
pub fn manifest(input: &[u8]) {
    read_manifest(input);
    let json = match input.iter().position(|byte| *byte == b'\n') {
        Some(end) => &input[end + 1..],
        None => input,
    };
    let line = first_line(FORMAT, json) + "\n";
    read_manifest(&[line.as_bytes(), json].concat());
}

fn read_manifest(bytes: &[u8]) {
    if let Ok(manifest) = Manifest::decode(bytes) {
        let again = manifest.encode().expect("its paths came from UTF-8");
        // Escapes and indentation may make it longer than what was read.
        if again.len() <= MANIFEST_BYTES_MAX {
            assert_eq!(Manifest::decode(&again).ok(), Some(manifest));
        }
    }
}
