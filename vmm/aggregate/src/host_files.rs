//! Files on the host of a slice, which its daemon opens while the slice runs. They come by another
//! socket than the commands that need them.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use weft_confine::lock;

/// Longest wait for a file that is on its way.
const FILE_WAIT: Duration = Duration::from_secs(2);

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostFile {
    /// Empty: the copy of a disk of node 0, by its number.
    Disk(u8),
    /// Empty: the slice writes its pages to it.
    New,
    /// One of those that a machine continues from.
    Saved(u32),
}

/// Files that came and are not in use.
#[derive(Default)]
pub struct HostFiles {
    files: Mutex<BTreeMap<HostFile, Arc<File>>>,
    came: Condvar,
}

impl HostFiles {
    /// A file came. It replaces one that nobody took.
    pub fn put(&self, what: HostFile, file: File) {
        lock(&self.files).insert(what, Arc::new(file));
        self.came.notify_all();
    }

    /// # Errors
    /// It has not come.
    pub fn take(&self, what: HostFile) -> Result<File, String> {
        let file = self.wait(what).remove(&what).and_then(Arc::into_inner);
        file.ok_or_else(|| "the host's daemon sent no file of the checkpoint".into())
    }

    /// A file that stays, until it is taken; `None`: it has not come.
    pub(super) fn get(&self, what: HostFile) -> Option<Arc<File>> {
        self.wait(what).get(&what).cloned()
    }

    fn wait(&self, what: HostFile) -> MutexGuard<'_, BTreeMap<HostFile, Arc<File>>> {
        let is_missing = |files: &mut BTreeMap<HostFile, Arc<File>>| !files.contains_key(&what);
        let waited = (self.came).wait_timeout_while(lock(&self.files), FILE_WAIT, is_missing);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
