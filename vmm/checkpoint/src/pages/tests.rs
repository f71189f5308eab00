#![expect(
    clippy::single_range_in_vec_init,
    reason = "these are lists of ranges, some with one"
)]

use super::writer::is_zero;
use super::*;

const IDENTITY: Identity = *b"0123456789abcdef";
const NODE: u32 = 3;
const END: u64 = 2000;

fn page(number: u64) -> Vec<u8> {
    (0..PAGE_BYTES as u64)
        .map(|at| (number * 31 + at * 7 + 1) as u8)
        .collect()
}

/// Nothing is checked here.
fn write(numbers: &[u64], unchanged: &[Range<u64>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = PagesWriter::new(&mut bytes, IDENTITY, NODE).unwrap();
    for number in numbers {
        writer.page(*number, &page(*number)).unwrap();
    }
    for range in unchanged {
        writer.unchanged(range.clone());
    }
    let written = writer.finish().unwrap();
    assert_eq!(written.pages, numbers.len() as u64);
    assert_eq!(written.bytes, bytes.len() as u64);
    bytes
}

fn open(bytes: &[u8]) -> Result<PagesReader<&[u8]>, FormatError> {
    PagesReader::open(bytes, &IDENTITY, NODE, END)
}

/// The pages in the order of the file.
fn read(bytes: &[u8]) -> Result<Vec<u64>, FormatError> {
    let reader = open(bytes)?;
    let (mut found, mut buffer) = (Vec::new(), Vec::new());
    for (index, run) in reader.runs().iter().enumerate() {
        reader.read_run(index, &mut buffer)?;
        assert_eq!(buffer.len(), run.count as usize * PAGE_BYTES);
        for (number, bytes) in (run.first..).zip(buffer.chunks_exact(PAGE_BYTES)) {
            assert!(bytes == page(number), "page {number}");
            found.push(number);
        }
    }
    Ok(found)
}

fn refused(bytes: &[u8]) -> String {
    open(bytes).map(drop).unwrap_err().to_string()
}

/// Repairs the checksum of the header or the footer, which `part` is.
fn seal(part: &mut [u8]) {
    let (content, checksum) = part.split_at_mut(part.len() - CHECKSUM_BYTES);
    checksum.copy_from_slice(&crc32fast::hash(content).to_le_bytes());
}

#[test]
fn pages_come_back_in_any_order() {
    let long: Vec<u64> = (5..5 + 3 * RUN_PAGES as u64 + 1).collect();
    let backwards = long.iter().rev().copied().collect();
    for numbers in [
        vec![],
        vec![0],
        vec![END - 1],
        vec![0, 1, 2, 7, 8, 100],
        vec![8, 9, 7, 100, 0, 1, END - 1, 2],
        long,
        backwards,
    ] {
        assert_eq!(read(&write(&numbers, &[])).unwrap(), numbers);
    }
}

#[test]
fn consecutive_pages_are_one_run() {
    let runs = |numbers: &[u64]| open(&write(numbers, &[])).unwrap().runs().len();
    assert_eq!(runs(&[5, 6, 7]), 1);
    assert_eq!(runs(&[7, 6, 5]), 3);
    assert_eq!(runs(&[5, 6, 0, 7]), 3);
    assert_eq!(runs(&(0..RUN_PAGES as u64).collect::<Vec<_>>()), 1);
    assert_eq!(runs(&(0..=RUN_PAGES as u64).collect::<Vec<_>>()), 2);
}

#[test]
fn unchanged_pages_come_back() {
    let bytes = write(&[3, 12], &[4..6, 6..10, 8..8, 0..2, 20..END]);
    let reader = open(&bytes).unwrap();
    assert_eq!(reader.unchanged(), [4..10, 0..2, 20..END]);
    let unchanged = 8 + END - 20;
    assert_eq!(
        (reader.written().pages, reader.written().unchanged),
        (2, unchanged)
    );
    assert_eq!(read(&bytes).unwrap(), [3, 12]);
}

#[test]
fn zero_pages_take_no_room() {
    let mut bytes = Vec::new();
    let mut writer = PagesWriter::new(&mut bytes, IDENTITY, NODE).unwrap();
    for number in 0..100 {
        writer.page(number, &[0; PAGE_BYTES]).unwrap();
    }
    writer.page(100, &page(100)).unwrap();
    assert_eq!(writer.finish().unwrap().pages, 1);
    assert_eq!(read(&bytes).unwrap(), [100]);
    let mut last = [0; PAGE_BYTES];
    last[PAGE_BYTES - 1] = 1;
    assert!(!is_zero(&last));
}

#[test]
fn threads_share_a_reader() {
    let numbers: Vec<u64> = (0..600).step_by(2).collect();
    let bytes = write(&numbers, &[]);
    let reader = open(&bytes).unwrap();
    let reader = &reader;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let mut buffer = Vec::new();
                for index in (0..reader.runs().len()).map(|index| index ^ thread) {
                    reader.read_run(index, &mut buffer).unwrap();
                    assert!(buffer == page(reader.runs()[index].first));
                }
            });
        }
    });
}

#[test]
fn a_page_that_is_named_twice_is_found() {
    for (numbers, unchanged) in [
        (&[7, 1, 7][..], &[][..]),
        (&[1, 2, 3, 2], &[]),
        (&[5], &[3..6]),
        (&[5, 9], &[6..10]),
        (&[], &[3..6, 0..4]),
        (&[], &[3..6, 3..6]),
    ] {
        let error = refused(&write(numbers, unchanged));
        assert!(
            error.contains("a page twice"),
            "{numbers:?} {unchanged:?}: {error}"
        );
    }
}

#[test]
fn impossible_numbers_are_found_though_their_checksums_are_right() {
    let good = write(&[1, 2, 9], &[4..6]);
    let footer = good.len() - FOOTER_BYTES;
    let [first_run, second_run, range] = [3, 2, 1].map(|entry| footer - entry * ENTRY_BYTES);
    let refused = |at: usize, value: &[u8]| {
        let mut bad = good.clone();
        bad[at..at + value.len()].copy_from_slice(value);
        let checksum = crc32fast::hash(&bad[first_run..footer]);
        bad[footer + 40..footer + 44].copy_from_slice(&checksum.to_le_bytes());
        seal(&mut bad[footer..]);
        open(&bad).is_err()
    };
    assert!(!refused(first_run, &1_u64.to_le_bytes()));
    let far = [END, 1 << 32, 1 << 52, 1 << 63, u64::MAX - 1, u64::MAX];
    for value in far.into_iter().chain([0, 4, 5]) {
        for at in [8, 16, 44, 52]
            .map(|number| footer + number)
            .into_iter()
            .chain([range + 8])
        {
            assert!(refused(at, &value.to_le_bytes()), "{value} at {at}");
        }
    }
    for value in far.into_iter().chain([5]) {
        for at in [first_run, second_run, range] {
            let is_same_page = at == range && value == 5;
            assert_ne!(
                refused(at, &value.to_le_bytes()),
                is_same_page,
                "{value} at {at}"
            );
        }
    }
    for count in [0, 1, 3, RUN_PAGES as u32 + 1, u32::MAX] {
        assert!(
            refused(first_run + 8, &count.to_le_bytes()),
            "{count} pages"
        );
    }
}

#[test]
fn an_empty_range_is_impossible() {
    let good = write(&[1], &[4..6, 8..10]);
    let footer = good.len() - FOOTER_BYTES;
    let mut bad = good.clone();
    // As many pages as before.
    for (at, count) in [(footer - 2 * ENTRY_BYTES, 0), (footer - ENTRY_BYTES, 4_u64)] {
        bad[at + 8..at + 16].copy_from_slice(&count.to_le_bytes());
    }
    let checksum = crc32fast::hash(&bad[footer - 3 * ENTRY_BYTES..footer]);
    bad[footer + 40..footer + 44].copy_from_slice(&checksum.to_le_bytes());
    seal(&mut bad[footer..]);
    assert!(refused(&bad).contains("impossible pages"));
}

#[test]
fn more_pages_than_memory_has_are_refused_before_the_table_is_read() {
    let good = write(&[1, 3, 5], &[]);
    let opened = PagesReader::open(good.as_slice(), &IDENTITY, NODE, 2);
    let error = opened.map(drop).unwrap_err().to_string();
    assert!(error.contains("impossible numbers"), "{error}");
}

#[test]
fn every_changed_byte_is_found() {
    let good = write(&[9, 1, 2, 3], &[4..6, 0..1]);
    for at in 0..good.len() {
        for bit in [1, 0x80] {
            let mut bad = good.clone();
            bad[at] ^= bit;
            assert!(read(&bad).is_err(), "byte {at}");
        }
    }
}

#[test]
fn every_cut_is_found() {
    let good = write(&[9, 1, 2, 3], &[4..6]);
    for length in 0..good.len() {
        assert!(read(&good[..length]).is_err(), "{length} bytes");
    }
    let longer = [good.as_slice(), &[0]].concat();
    assert!(read(&longer).is_err());
}

#[test]
fn files_of_other_sets_nodes_and_formats_are_refused() {
    let good = write(&[1], &[]);
    let open = |bytes: &[u8], identity: &Identity, node, end| {
        let opened = PagesReader::open(bytes, identity, node, end);
        opened.map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(open(&good, &IDENTITY, NODE, END), Ok(()));
    let error = open(&good, &[0; 16], NODE, END).unwrap_err();
    assert!(error.contains("another checkpoint"), "{error}");
    let error = open(&good, &IDENTITY, 2, END).unwrap_err();
    assert!(error.contains("another node"), "{error}");
    let error = open(&good, &IDENTITY, NODE, 1).unwrap_err();
    assert!(error.contains("impossible pages"), "{error}");
    let of_format = |format: u32| {
        let mut other = good.clone();
        other[8..12].copy_from_slice(&format.to_le_bytes());
        seal(&mut other[..HEADER_BYTES]);
        open(&other, &IDENTITY, NODE, END)
    };
    assert_eq!(of_format(FORMAT_FIRST), Ok(()));
    let error = of_format(FORMAT + 1).unwrap_err();
    assert!(error.contains("later"), "{error}");
    assert!(of_format(0).is_err());
}
