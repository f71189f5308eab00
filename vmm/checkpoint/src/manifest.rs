//! The form of the manifest: one line, then JSON.
//!
//! ```text
//! weft-checkpoint FORMAT CHECKSUM\n
//! {"identity": …, "files": …, …}
//! ```
//!
//! The checksum is the CRC-32 of the JSON, in eight hexadecimal digits. A later format
//! must keep the first two words of the line, so that this version can name it.

use serde::{Deserialize, Serialize};

use crate::disk::DiskMark;
use crate::pages::Written;
use crate::{FILES_MAX, FORMAT, FormatError, Identity};

/// Longest manifest, in bytes.
pub const MANIFEST_BYTES_MAX: usize = 1 << 20;
const MAGIC: &str = "weft-checkpoint";

/// What a set consists of, and what a machine must have to go on from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// In all files of the set.
    pub identity: Identity,
    /// Version of the Weft that wrote it.
    pub weft: String,
    /// When, in seconds since 1970.
    pub saved_at_s: u64,
    /// The files of pages, by node.
    pub pages: Vec<PageFile>,
    /// Length of the file `machine`.
    pub machine_bytes: u64,
    /// Checksum of the file `machine`.
    pub machine_checksum: u32,
    pub machine: Machine,
}

/// A file of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PageFile {
    /// Pages that are not zero.
    pub pages: u64,
    /// Length of the file.
    pub bytes: u64,
}

impl From<Written> for PageFile {
    fn from(written: Written) -> Self {
        Self {
            pages: written.pages,
            bytes: written.bytes,
        }
    }
}

/// What a machine must have to go on from the set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Name of the machine that was saved.
    pub name: String,
    /// vCPUs.
    pub cpus: u32,
    /// Guest RAM.
    pub memory_bytes: u64,
    /// No page has this number or a higher one.
    pub pages_end: u64,
    /// `kvm` or `soft`.
    pub back_end: String,
    /// CPU features that the host must have, by their names in `/proc/cpuinfo`.
    pub features: Vec<String>,
    /// Its disks, as they were.
    #[serde(default)]
    pub disks: Vec<DiskMark>,
}

impl Manifest {
    /// The file's bytes.
    pub fn encode(&self) -> Vec<u8> {
        // It is plain data: it always has a text.
        let json = serde_json::to_vec_pretty(self).unwrap_or_default();
        let checksum = crc32fast::hash(&json);
        let mut bytes = format!("{MAGIC} {FORMAT} {checksum:08x}\n").into_bytes();
        bytes.extend_from_slice(&json);
        bytes
    }

    /// The manifest in a file's bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let damaged = FormatError::Damaged;
        if bytes.len() > MANIFEST_BYTES_MAX {
            return Err(damaged("it is too long"));
        }
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let line = end.and_then(|end| std::str::from_utf8(&bytes[..end]).ok());
        let (Some(end), Some(line)) = (end, line) else {
            return Err(damaged("its first line"));
        };
        let mut words = line.split(' ');
        if words.next() != Some(MAGIC) {
            return Err(damaged("its first line"));
        }
        let format = words.next().and_then(|word| word.parse::<u32>().ok());
        match format {
            Some(FORMAT) => {}
            Some(format) if format > FORMAT => return Err(FormatError::Later(format)),
            _ => return Err(damaged("its first line")),
        }
        let json = &bytes[end + 1..];
        let expected = format!("{MAGIC} {FORMAT} {:08x}", crc32fast::hash(json));
        if line != expected {
            return Err(damaged("its checksum differs"));
        }
        let manifest: Self =
            serde_json::from_slice(json).map_err(|_| damaged("it lacks a field"))?;
        match (1..=FILES_MAX).contains(&manifest.pages.len()) {
            true => Ok(manifest),
            false => Err(damaged("its number of files")),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn manifest() -> Manifest {
        Manifest {
            identity: *b"0123456789abcdef",
            weft: "0.1.0".into(),
            saved_at_s: 1_700_000_000,
            pages: vec![PageFile { pages: 1, bytes: 2 }],
            machine_bytes: 5,
            machine_checksum: 7,
            machine: Machine {
                name: "web".into(),
                cpus: 2,
                memory_bytes: 8 << 20,
                pages_end: 2048,
                back_end: "soft".into(),
                features: vec!["sse2".into()],
                disks: vec![DiskMark {
                    path: "/srv/web.img".into(),
                    bytes: 1 << 30,
                    modified: (1_700_000_000, 7),
                }],
            },
        }
    }

    #[test]
    fn a_manifest_comes_back() {
        let bytes = manifest().encode();
        assert_eq!(Manifest::decode(&bytes).unwrap(), manifest());
    }

    #[test]
    fn every_changed_byte_and_cut_is_found() {
        let good = manifest().encode();
        for at in 0..good.len() {
            for bit in [1, 0x20, 0x80] {
                let mut bad = good.clone();
                bad[at] ^= bit;
                assert!(Manifest::decode(&bad).is_err(), "byte {at}");
            }
            assert!(Manifest::decode(&good[..at]).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn a_later_format_is_named() {
        let error = Manifest::decode(b"weft-checkpoint 2 anything\n{").unwrap_err();
        assert!(matches!(error, FormatError::Later(2)), "{error}");
    }
}
