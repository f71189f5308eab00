//! A folder of a test's own.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// An empty folder, which is removed with all that is in it when this is dropped.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Makes one with `name` in its name, where the system has temporary files.
    pub fn new(name: &str) -> Folder {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("weft-{name}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a folder can be made");
        Folder(path)
    }

    /// Absolute, unless the system names its temporary folder otherwise.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left there harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
