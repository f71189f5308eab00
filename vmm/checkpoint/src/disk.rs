//! What is remembered of a disk whose contents belong to a checkpoint but are not in it.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A disk's file when the machine was saved. Of a block device only the path says something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskMark {
    pub path: PathBuf,
    pub bytes: u64,
    /// When it was written last: seconds and nanoseconds since 1970.
    pub modified: (i64, i64),
}

/// How a disk's file differs from its mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskChange {
    /// In bytes, now.
    Length(u64),
    /// It was written at another time.
    Written,
}

impl fmt::Display for DiskChange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(bytes) => write!(formatter, "its length is now {bytes} bytes"),
            Self::Written => formatter.write_str("its time of modification differs"),
        }
    }
}

impl DiskMark {
    /// Of a file as it is now.
    ///
    /// # Errors
    /// The kernel's, for example if there is no such file.
    pub fn of(path: &Path) -> io::Result<Self> {
        let data = fs::metadata(path)?;
        let regular = data.is_file();
        Ok(Self {
            path: path.to_owned(),
            bytes: if regular { data.len() } else { 0 },
            modified: if regular {
                (data.mtime(), data.mtime_nsec())
            } else {
                (0, 0)
            },
        })
    }

    /// How the file differs now; `None` if it does not.
    ///
    /// # Errors
    /// See [`DiskMark::of`].
    pub fn change(&self) -> io::Result<Option<DiskChange>> {
        let now = Self::of(&self.path)?;
        Ok(if now.bytes != self.bytes {
            Some(DiskChange::Length(now.bytes))
        } else {
            (now.modified != self.modified).then_some(DiskChange::Written)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn a_disk_that_was_written_or_resized_is_found() {
        let name = format!("weft-disk-mark-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let file = File::create(&path).unwrap();
        let then = UNIX_EPOCH + Duration::new(1_700_000_000, 5);
        file.set_len(4096).unwrap();
        file.set_modified(then).unwrap();
        let mark = DiskMark::of(&path).unwrap();
        assert_eq!(mark.change().unwrap(), None);
        file.set_modified(then + Duration::from_nanos(1)).unwrap();
        assert_eq!(mark.change().unwrap(), Some(DiskChange::Written));
        file.set_len(8192).unwrap();
        assert_eq!(mark.change().unwrap(), Some(DiskChange::Length(8192)));
        fs::remove_file(&path).unwrap();
        assert!(mark.change().is_err());
        let device = DiskMark::of(Path::new("/dev/null")).unwrap();
        assert_eq!(device.change().unwrap(), None);
    }
}
