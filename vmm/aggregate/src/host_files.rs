//! Files of checkpoints on the host of a slice, which its daemon opens while the slice runs. They
//! come by another socket than the commands that need them.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use weft_confine::lock;

/// Longest wait for a file that is on its way.
const FILE_WAIT: Duration = Duration::from_secs(2);

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostFile {
    /// Empty: the slice writes its pages to it.
    New,
    /// One of those that a machine continues from.
    Saved(u32),
}

/// Files that came and are not in use.
#[derive(Default)]
pub struct HostFiles {
    files: Mutex<BTreeMap<HostFile, File>>,
    came: Condvar,
}

impl HostFiles {
    /// A file came. It replaces one that nobody took.
    pub fn put(&self, what: HostFile, file: File) {
        lock(&self.files).insert(what, file);
        self.came.notify_all();
    }

    /// # Errors
    /// It has not come.
    pub fn take(&self, what: HostFile) -> Result<File, String> {
        let is_missing = |files: &mut BTreeMap<HostFile, File>| !files.contains_key(&what);
        let waited = (self.came).wait_timeout_while(lock(&self.files), FILE_WAIT, is_missing);
        let mut files = waited.unwrap_or_else(PoisonError::into_inner).0;
        files
            .remove(&what)
            .ok_or_else(|| "the host's daemon sent no file of the checkpoint".into())
    }
}
