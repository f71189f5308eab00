//! Where the bytes of absent pages are: see `absent`.

use std::sync::Arc;

/// Where the bytes of some absent pages are.
#[derive(Clone)]
pub enum Source {
    /// This process reads them.
    Here(Arc<dyn AbsentPages>),
    /// Another process does, and sends them.
    Elsewhere(Arc<dyn ElsewherePages>),
}

/// Where the bytes of all absent pages are, while there are any.
#[derive(Clone, Default)]
pub(super) struct Sources {
    pub here: Option<Arc<dyn AbsentPages>>,
    pub elsewhere: Option<Arc<dyn ElsewherePages>>,
}

impl Sources {
    pub fn add(&mut self, source: Source) {
        match source {
            Source::Here(files) => self.here = Some(files),
            Source::Elsewhere(pages) => self.elsewhere = Some(pages),
        }
    }

    /// The one that has a page.
    pub fn of(self, page: u64) -> Option<Source> {
        match self.elsewhere.filter(|pages| pages.has(page)) {
            Some(pages) => Some(Source::Elsewhere(pages)),
            None => self.here.map(Source::Here),
        }
    }
}

/// Absent pages that come when they are asked for: [`super::SharedMemory::receive_absent`].
/// Called by many threads, confined ones too.
pub trait ElsewherePages: Send + Sync {
    /// Whether a page is one of these.
    fn has(&self, page: u64) -> bool;

    /// Asks for a page that a step needs. Never waits.
    ///
    /// # Errors
    /// There is no such page.
    fn ask(&self, page: u64) -> Result<(), String>;

    /// Asks for all pages. Never waits.
    fn ask_all(&self);

    /// Waits until all pages came once, or the machine is over.
    fn wait_for_all(&self);

    /// No page is absent any more.
    fn all_came(&self);
}

/// Files with pages. Called by many threads, confined ones too.
pub trait PageFiles: Send + Sync {
    /// Calls `take` with the number of the first and the bytes of consecutive pages, `page`
    /// among them.
    ///
    /// # Errors
    /// Why it cannot be read, with the name of the file.
    fn read(&self, page: u64, take: &mut dyn FnMut(u64, &[u8])) -> Result<(), String>;
}

/// Files with absent pages; reading gives no others.
pub trait AbsentPages: PageFiles {
    /// Reads all pages, as long as `take` returns true.
    ///
    /// # Errors
    /// As [`PageFiles::read`].
    fn read_all(&self, take: &mut dyn FnMut(u64, &[u8]) -> bool) -> Result<(), String>;
}
