//! Kernel images for tests and fuzzing, made field by field by code that shares nothing with
//! the parsers.

use std::io::{Cursor, Write};

use super::Compression;

/// The guest-physical address of the kernels.
pub const START: u64 = 0x20_0000;
/// The kernels' bytes in the file.
pub const CODE: &[u8] = b"\xf4code of the kernel";
/// The kernels' length in memory, in bytes.
pub const LENGTH: u64 = 0x3000;
pub const EM_386: u16 = 3;
pub const EM_X86_64: u16 = 62;

/// An ELF file with one segment and one note segment.
#[derive(Clone)]
pub struct Elf {
    pub machine: u16,
    pub is_64: bool,
    /// Owner, type, contents.
    pub notes: Vec<(&'static str, u32, Vec<u8>)>,
    pub code: Vec<u8>,
    pub physical: u64,
    pub virtual_address: u64,
    pub length: u64,
    pub entry: u64,
}

impl Default for Elf {
    fn default() -> Self {
        Self {
            machine: EM_X86_64,
            is_64: true,
            notes: Vec::new(),
            code: CODE.into(),
            physical: START,
            virtual_address: START,
            length: LENGTH,
            entry: START + 1,
        }
    }
}

impl Elf {
    pub fn linux() -> Self {
        Self {
            notes: vec![
                ("Linux", 0x101, vec![0; 4]),
                ("Weft", 1, addresses(&[(START + 0x1000, START + 0x2000)])),
            ],
            virtual_address: 0xffff_ffff_8100_0000,
            ..Self::default()
        }
    }

    pub fn pvh() -> Self {
        let entry = (START as u32 + 2).to_le_bytes().to_vec();
        Self {
            notes: vec![("Xen", 18, entry)],
            ..Self::default()
        }
    }

    pub fn multiboot() -> Self {
        let mut code = vec![0xf4; 16];
        code.extend(multiboot_header(3, &[]));
        Self {
            machine: EM_386,
            is_64: false,
            code,
            ..Self::default()
        }
    }

    pub fn build(&self) -> Vec<u8> {
        let word = |value: u64| match self.is_64 {
            true => value.to_le_bytes().to_vec(),
            false => (value as u32).to_le_bytes().to_vec(),
        };
        let (header_bytes, program_bytes) = if self.is_64 { (64, 56) } else { (52, 32) };
        let code_offset = (header_bytes + 2 * program_bytes) as u64;
        let notes_offset = (code_offset + self.code.len() as u64).next_multiple_of(4);
        let mut notes = Vec::new();
        for (owner, kind, contents) in &self.notes {
            notes.extend((owner.len() as u32 + 1).to_le_bytes());
            notes.extend((contents.len() as u32).to_le_bytes());
            notes.extend(kind.to_le_bytes());
            notes.extend(owner.as_bytes());
            notes.push(0);
            notes.resize(notes.len().next_multiple_of(4), 0);
            notes.extend(contents);
            notes.resize(notes.len().next_multiple_of(4), 0);
        }

        let mut file = b"\x7fELF".to_vec();
        file.extend([if self.is_64 { 2 } else { 1 }, 1, 1]);
        file.resize(16, 0);
        file.extend(2_u16.to_le_bytes());
        file.extend(self.machine.to_le_bytes());
        file.extend(1_u32.to_le_bytes());
        file.extend(word(self.entry));
        file.extend(word(header_bytes as u64));
        file.extend(word(0));
        file.extend(0_u32.to_le_bytes());
        for half in [header_bytes, program_bytes, 2, 0, 0, 0] {
            file.extend((half as u16).to_le_bytes());
        }
        let load = (1, code_offset, self.virtual_address, self.physical);
        let load = (load, self.code.len() as u64, self.length);
        let note = (
            (4, notes_offset, 0, 0),
            notes.len() as u64,
            notes.len() as u64,
        );
        for ((kind, offset, virtual_address, physical), in_file, in_memory) in [load, note] {
            file.extend(u32::to_le_bytes(kind));
            if self.is_64 {
                file.extend(7_u32.to_le_bytes());
            }
            for value in [offset, virtual_address, physical, in_file, in_memory] {
                file.extend(word(value));
            }
            if !self.is_64 {
                file.extend(7_u32.to_le_bytes());
            }
            file.extend(word(4));
        }
        assert_eq!(file.len() as u64, code_offset);
        file.extend(&self.code);
        file.resize(notes_offset as usize, 0);
        file.extend(notes);
        file
    }
}

/// A note's pairs of addresses.
pub fn addresses(pairs: &[(u64, u64)]) -> Vec<u8> {
    let words = pairs.iter().flat_map(|(start, end)| [*start, *end]);
    words.flat_map(u64::to_le_bytes).collect()
}

/// A Multiboot header; the checksum is right.
pub fn multiboot_header(flags: u32, addresses: &[u32]) -> Vec<u8> {
    let magic = 0x1bad_b002_u32;
    let checksum = 0_u32.wrapping_sub(magic).wrapping_sub(flags);
    [magic, flags, checksum]
        .iter()
        .chain(addresses)
        .flat_map(|word| word.to_le_bytes())
        .collect()
}

/// A file that a Multiboot header loads by addresses: 64 bytes before the
/// header are not loaded.
pub fn flat() -> Vec<u8> {
    let load = START as u32;
    let mut file = vec![0xcc; 64];
    file.extend(vec![0xf4; 32]);
    let addresses = [load + 32, load, load + 100, load + 0x1000, load + 4];
    file.extend(multiboot_header(1 << 16, &addresses));
    file.resize(200, 0x90);
    file
}

/// Packs as the kernel's build does: all but gzip get the size behind them.
pub fn pack(compression: Compression, data: &[u8]) -> Vec<u8> {
    let mut packed = match compression {
        Compression::None | Compression::Lzo => unreachable!("no test packs these"),
        Compression::Gzip => {
            let level = flate2::Compression::default();
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), level);
            encoder.write_all(data).unwrap();
            return encoder.finish().unwrap();
        }
        Compression::Bzip2 => {
            let level = bzip2::Compression::best();
            let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), level);
            encoder.write_all(data).unwrap();
            encoder.finish().unwrap()
        }
        Compression::Lzma => {
            let options = lzma_rust2::LzmaOptions::with_preset(1);
            let mut encoder =
                lzma_rust2::LzmaWriter::new_use_header(Vec::new(), &options, None).unwrap();
            encoder.write_all(data).unwrap();
            encoder.finish().unwrap()
        }
        Compression::Xz => {
            let mut options = lzma_rust2::XzOptions::with_preset(1);
            options.prepend_pre_filter(lzma_rust2::FilterType::BcjX86, 0);
            let mut encoder = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
            encoder.write_all(data).unwrap();
            encoder.finish().unwrap()
        }
        Compression::Zstd => ruzstd::encoding::compress_to_vec(
            Cursor::new(data),
            ruzstd::encoding::CompressionLevel::Fastest,
        ),
        Compression::Lz4 => {
            let mut frame = vec![0x02, 0x21, 0x4c, 0x18];
            for block in data.chunks(8 << 20) {
                let packed = lz4_flex::block::compress(block);
                frame.extend((packed.len() as u32).to_le_bytes());
                frame.extend(packed);
            }
            frame
        }
    };
    packed.extend((data.len() as u32).to_le_bytes());
    packed
}

/// A bzImage around a payload.
#[derive(Clone)]
pub struct BzImage {
    pub version: u16,
    pub load_flags: u16,
    pub payload: Vec<u8>,
    pub pref_address: u64,
    pub init_size: u32,
}

impl BzImage {
    pub fn new(payload: Vec<u8>) -> Self {
        Self {
            version: 0x20f,
            load_flags: 1,
            payload,
            pref_address: START,
            init_size: 0x8000,
        }
    }

    pub fn build(&self) -> Vec<u8> {
        let sectors = 2;
        let start = (sectors + 1) * 512;
        let payload_offset = 0x400;
        let mut file = vec![0; start];
        let text = b"6.1.0-made here\0";
        file[0x300..0x300 + text.len()].copy_from_slice(text);
        let mut body = vec![0x90; payload_offset];
        body.extend(&self.payload);
        body.resize(body.len().next_multiple_of(16), 0);
        let mut put = |offset: usize, bytes: &[u8]| {
            file[offset..offset + bytes.len()].copy_from_slice(bytes);
        };
        put(0x1f1, &[sectors as u8]);
        put(0x1f4, &(body.len() as u32 / 16).to_le_bytes());
        put(0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]);
        put(0x202, b"HdrS");
        put(0x206, &self.version.to_le_bytes());
        put(0x20e, &0x100_u16.to_le_bytes());
        put(0x22c, &0x7fff_ffff_u32.to_le_bytes());
        put(0x236, &self.load_flags.to_le_bytes());
        put(0x238, &2047_u32.to_le_bytes());
        put(0x248, &(payload_offset as u32).to_le_bytes());
        put(0x24c, &(self.payload.len() as u32).to_le_bytes());
        put(0x258, &self.pref_address.to_le_bytes());
        put(0x260, &self.init_size.to_le_bytes());
        file.extend(body);
        file
    }
}
