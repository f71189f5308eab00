//! The form of the manifest: one line, then JSON.
//!
//! ```text
//! weft-checkpoint FORMAT CHECKSUM\n
//! {"identity": …, "files": …, …}
//! ```
//!
//! The checksum is the CRC-32 of the JSON, with the number of the format before it from format 3
//! on, in eight hexadecimal digits. A later format
//! must keep the first two words of the line, so that this version can name it. Format 1 had
//! no base and no unchanged pages, format 2 no files on other hosts; all are read as absent.

use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::disk::DiskMark;
use crate::pages::{PAGES_END_MAX, Written};
use crate::{FILES_MAX, FORMAT, FORMAT_FIRST, FormatError, Identity};

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
    /// The set that has the pages that are unchanged.
    #[serde(default)]
    pub base: Option<Base>,
    /// Length of the file `machine`.
    pub machine_bytes: u64,
    /// Checksum of the file `machine`.
    pub machine_checksum: u32,
    pub machine: Machine,
}

/// A file of pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PageFile {
    /// Pages that are not zero.
    pub pages: u64,
    /// Pages that are as in the base set.
    #[serde(default)]
    pub unchanged: u64,
    /// Length of the file.
    pub bytes: u64,
    /// Where it is; `None`: in the directory of the set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
}

/// A directory of another host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// What the host with the set calls it.
    pub host: String,
    /// Absolute.
    pub directory: PathBuf,
}

impl PageFile {
    /// Whether a file holds this.
    pub(crate) fn is(&self, written: Written) -> bool {
        (self.pages, self.unchanged, self.bytes)
            == (written.pages, written.unchanged, written.bytes)
    }
}

impl From<Written> for PageFile {
    fn from(written: Written) -> Self {
        Self {
            pages: written.pages,
            unchanged: written.unchanged,
            bytes: written.bytes,
            place: None,
        }
    }
}

/// The set that another is based on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    /// `../NAME` if the two sets are in one folder, which can be moved; otherwise absolute.
    pub directory: PathBuf,
    /// In all files of that set.
    pub identity: Identity,
}

impl Base {
    /// Of a set in `directory` with a base in `base`; both are absolute and without links.
    pub(crate) fn between(directory: &Path, base: &Path, identity: Identity) -> Self {
        let is_beside = directory.parent().is_some() && directory.parent() == base.parent();
        let beside = base.file_name().filter(|_| is_beside);
        Self {
            directory: match beside {
                Some(name) => Path::new("..").join(name),
                None => base.to_owned(),
            },
            identity,
        }
    }

    /// The directory of the base of a set in `directory`, which is absolute and without links.
    pub(crate) fn directory(&self, directory: &Path) -> PathBuf {
        match (self.directory.strip_prefix(".."), directory.parent()) {
            (Ok(name), Some(parent)) => parent.join(name),
            _ => self.directory.clone(),
        }
    }

    fn is_valid(&self) -> bool {
        let mut parts = self.directory.components();
        let relative = (parts.next(), parts.next(), parts.next());
        let is_beside = matches!(
            relative,
            (Some(Component::ParentDir), Some(Component::Normal(_)), None)
        );
        is_beside || self.directory.is_absolute()
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

impl Machine {
    /// Its amount and its end: these are the same in all sets of a chain.
    pub(crate) fn memory(&self) -> (u64, u64) {
        (self.memory_bytes, self.pages_end)
    }
}

impl Manifest {
    /// The file's bytes.
    ///
    /// # Errors
    /// If a path is not UTF-8.
    pub fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let json = serde_json::to_vec_pretty(self)?;
        let mut bytes = first_line(FORMAT, &json).into_bytes();
        bytes.push(b'\n');
        bytes.extend_from_slice(&json);
        Ok(bytes)
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
        let format = match format {
            Some(format @ FORMAT_FIRST..=FORMAT) => format,
            Some(later) if later > FORMAT => return Err(FormatError::Later(later)),
            _ => return Err(damaged("its first line")),
        };
        let json = &bytes[end + 1..];
        if line != first_line(format, json) {
            return Err(damaged("its checksum differs"));
        }
        let manifest: Self =
            serde_json::from_slice(json).map_err(|_| damaged("it lacks a field"))?;
        manifest.check()?;
        Ok(manifest)
    }

    /// What each field allows alone.
    fn check(&self) -> Result<(), FormatError> {
        let damaged = |what| Err(FormatError::Damaged(what));
        if !(1..=FILES_MAX).contains(&self.pages.len()) {
            return damaged("its number of files");
        }
        if self.machine.pages_end > PAGES_END_MAX {
            return damaged("its end of memory");
        }
        let mut places = self.pages.iter().filter_map(|file| file.place.as_ref());
        if places.any(|place| place.host.is_empty() || !place.directory.is_absolute()) {
            return damaged("the place of a file");
        }
        let has_unchanged = self.pages.iter().any(|file| file.unchanged > 0);
        match &self.base {
            Some(base) if !base.is_valid() => damaged("the directory of its base"),
            None if has_unchanged => damaged("it has unchanged pages without a base"),
            _ => Ok(()),
        }
    }
}

/// What comes before the JSON, without the end of the line.
pub fn first_line(format: u32, json: &[u8]) -> String {
    let mut hasher = crc32fast::Hasher::new();
    if format > 2 {
        hasher.update(&format.to_le_bytes());
    }
    hasher.update(json);
    format!("{MAGIC} {format} {:08x}", hasher.finalize())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn manifest() -> Manifest {
        Manifest {
            identity: *b"0123456789abcdef",
            weft: "0.1.0".into(),
            saved_at_s: 1_700_000_000,
            pages: vec![PageFile {
                pages: 1,
                unchanged: 3,
                bytes: 2,
                place: Some(Place {
                    host: "beta".into(),
                    directory: "/srv/tuesday".into(),
                }),
            }],
            base: Some(Base {
                directory: "../monday".into(),
                identity: [7; 16],
            }),
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

    fn decode(manifest: &Manifest) -> Result<Manifest, FormatError> {
        Manifest::decode(&manifest.encode().unwrap())
    }

    #[test]
    fn a_manifest_comes_back() {
        assert_eq!(decode(&manifest()).unwrap(), manifest());
    }

    #[test]
    fn every_changed_byte_and_cut_is_found() {
        let good = manifest().encode().unwrap();
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
        let error = Manifest::decode(b"weft-checkpoint 4 anything\n{").unwrap_err();
        assert!(matches!(error, FormatError::Later(4)), "{error}");
        let error = Manifest::decode(b"weft-checkpoint 0 anything\n{").unwrap_err();
        assert!(matches!(error, FormatError::Damaged(_)), "{error}");
    }

    #[test]
    fn the_first_format_is_read() {
        let mut expected = manifest();
        expected.base = None;
        expected.pages[0].place = None;
        expected.pages[0].unchanged = 0;
        let mut json = serde_json::to_value(&expected).unwrap();
        json.as_object_mut().unwrap().remove("base");
        let file = json["pages"][0].as_object_mut().unwrap();
        file.remove("unchanged");
        let json = json.to_string();
        let checksum = crc32fast::hash(json.as_bytes());
        let bytes = format!("weft-checkpoint 1 {checksum:08x}\n{json}");
        assert_eq!(Manifest::decode(bytes.as_bytes()).unwrap(), expected);
    }

    #[test]
    fn impossible_fields_are_named() {
        let refused = |change: fn(&mut Manifest)| {
            let mut bad = manifest();
            change(&mut bad);
            decode(&bad).unwrap_err().to_string()
        };
        assert_eq!(refused(|bad| bad.pages.clear()), "its number of files");
        let error = refused(|bad| bad.machine.pages_end = 1 << 52);
        assert_eq!(error, "its end of memory");
        let error = refused(|bad| bad.pages[0].place.as_mut().unwrap().directory = "a".into());
        assert_eq!(error, "the place of a file");
        let error = refused(|bad| bad.base = None);
        assert_eq!(error, "it has unchanged pages without a base");
        for directory in ["", ".", "..", "monday", "../..", "../a/b", "../../a"] {
            let mut bad = manifest();
            bad.base.as_mut().unwrap().directory = directory.into();
            let error = decode(&bad).unwrap_err().to_string();
            assert_eq!(error, "the directory of its base", "{directory}");
        }
    }

    #[test]
    fn a_base_beside_its_set_is_relative() {
        let stored = |directory: &str, base: &str| {
            let [directory, base] = [directory, base].map(Path::new);
            let link = Base::between(directory, base, [0; 16]);
            assert!(link.is_valid());
            assert_eq!(link.directory(directory), base);
            link.directory
        };
        assert_eq!(stored("/sets/two", "/sets/one"), Path::new("../one"));
        assert_eq!(stored("/two", "/one"), Path::new("../one"));
        assert_eq!(stored("/sets/two", "/old/one"), Path::new("/old/one"));
        assert_eq!(stored("/sets/two", "/sets"), Path::new("/sets"));
        assert_eq!(stored("/sets/two", "/"), Path::new("/"));
    }
}
