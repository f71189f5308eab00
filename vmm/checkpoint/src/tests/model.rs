//! Chains of random sets against a memory that is kept beside them.

use super::*;
use crate::Extent;

const SETS: usize = 10;
const PAGES: u64 = 700;
const NODES: u64 = 3;

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % bound
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// The byte that each page is full of.
type Memory = [u8; PAGES as usize];

/// Some ranges of pages are written, some with zeros.
fn change(random: &mut Random, memory: &mut Memory) {
    for _ in 0..random.below(12) {
        let first = random.below(PAGES);
        let end = (first + 1 + random.below(40)).min(PAGES);
        let byte = [0, 1 + random.below(255) as u8][random.below(2) as usize];
        memory[first as usize..end as usize].fill(byte);
    }
}

/// Each page has one owner, which writes it if it differs or is not sure; pages that stay zero
/// are named as unchanged, or not.
fn nodes(random: &mut Random, before: Option<&Memory>, memory: &Memory) -> Vec<Node> {
    let mut nodes = vec![Node::default(); NODES as usize];
    let mut owner = 0;
    for page in 0..PAGES {
        if random.below(8) == 0 {
            owner = random.below(NODES) as usize;
        }
        let byte = memory[page as usize];
        let is_same = before.is_some_and(|before| before[page as usize] == byte);
        let is_left_out = byte == 0 && random.below(2) == 0;
        match is_same && random.below(16) > 0 {
            true if is_left_out => {}
            true => nodes[owner].unchanged.push(page..page + 1),
            false => nodes[owner].pages.push((page, byte)),
        }
    }
    for node in &mut nodes {
        // In parts, as a live save does: most pages in order, some when the guest writes them.
        let mut parts: Vec<_> = node.pages.chunks(20).map(<[_]>::to_vec).collect();
        random.shuffle(&mut parts);
        node.pages = parts.concat();
    }
    nodes
}

/// Ascending, none empty, none twice, each within its run, adjacent ones of the same run
/// joined.
fn check_extents(extents: &[Extent]) {
    for extent in extents {
        assert!(extent.count > 0 && extent.end() <= PAGES);
        assert!(extent.offset + extent.count <= 256);
    }
    for pair in extents.windows(2) {
        assert!(pair[0].end() <= pair[1].first, "{pair:?}");
    }
}

/// Every page by itself.
fn by_page(directory: &Path) -> Memory {
    let set = Set::open(directory).unwrap();
    let source = set.pages_source().unwrap();
    assert_eq!(set.extents().unwrap(), source.extents());
    check_extents(source.extents());
    let mut found = [0; PAGES as usize];
    let mut buffer = Vec::new();
    for page in 0..PAGES {
        let Some(index) = source.find(page) else {
            continue;
        };
        let extent = source.extents()[index];
        assert!((extent.first..extent.end()).contains(&page));
        let bytes = source.read(index, &mut buffer).unwrap();
        assert_eq!(bytes.len(), extent.count as usize * PAGE_BYTES);
        found[page as usize] = bytes[(page - extent.first) as usize * PAGE_BYTES];
    }
    for page in [PAGES, 2047, u64::MAX] {
        assert_eq!(source.find(page), None);
    }
    found
}

/// The pages of several readers that share the memory, each of which gets its own only.
fn by_part(directory: &Path) -> Memory {
    let source = Set::open(directory).unwrap().pages_source().unwrap();
    let mut found = [0; PAGES as usize];
    for own in [0..1, 1..300, 300..300, 300..555, 555..u64::MAX] {
        let read = source.read_all(&own, |first, bytes| {
            assert!(!bytes.is_empty());
            for (page, bytes) in (first..).zip(bytes.chunks_exact(PAGE_BYTES)) {
                assert!(own.contains(&page) && found[page as usize] == 0);
                found[page as usize] = bytes[PAGE_BYTES - 1];
            }
            Ok::<_, CheckpointError>(())
        });
        read.unwrap();
    }
    found
}

#[test]
fn a_chain_of_ten_is_the_memory_of_each_moment() {
    for seed in 0..6 {
        let scratch = Scratch::new(&format!("model-{seed}"));
        let mut random = Random(seed);
        let mut memory: Memory = [0; PAGES as usize];
        let mut moments: Vec<(PathBuf, Memory)> = Vec::new();
        for number in 0..SETS {
            change(&mut random, &mut memory);
            let directory = scratch.join(&number.to_string());
            let base = moments.last();
            let before = base.map(|(_, before)| before);
            let written = nodes(&mut random, before, &memory);
            save(&directory, base.map(|(path, _)| path.as_path()), &written);
            moments.push((directory, memory));
        }
        for (directory, expected) in &moments {
            check(directory).unwrap();
            assert!(
                by_page(directory) == *expected,
                "seed {seed}: {directory:?}"
            );
            assert!(
                by_part(directory) == *expected,
                "seed {seed}: {directory:?}"
            );
        }
    }
}
