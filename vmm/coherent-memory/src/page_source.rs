//! Where the bytes of absent pages are: see `absent`.

use std::sync::Arc;

/// Where the bytes of absent pages are.
#[derive(Clone)]
pub enum Source {
    /// This process reads them.
    Here(Arc<dyn AbsentPages>),
    /// Another process does, and sends them.
    Elsewhere(Arc<dyn ElsewherePages>),
}

/// Absent pages that come when they are asked for: [`super::SharedMemory::receive_absent`].
/// Called by many threads, confined ones too.
pub trait ElsewherePages: Send + Sync {
    /// Asks for a page that a step needs. Never waits.
    ///
    /// # Errors
    /// There is no such page.
    fn ask(&self, page: u64) -> Result<(), String>;

    /// Asks for all pages, and waits until they came once, or the machine is over.
    fn ask_all(&self);

    /// No page is absent any more.
    fn all_came(&self);
}

/// Absent pages in files. Called by many threads, confined ones too.
pub trait AbsentPages: Send + Sync {
    /// Calls `take` with the number of the first and the bytes of consecutive pages, `page`
    /// among them.
    ///
    /// # Errors
    /// Why it cannot be read, with the name of the file.
    fn read(&self, page: u64, take: &mut dyn FnMut(u64, &[u8])) -> Result<(), String>;

    /// The same for all pages, as long as `take` returns true.
    ///
    /// # Errors
    /// As there.
    fn read_all(&self, take: &mut dyn FnMut(u64, &[u8]) -> bool) -> Result<(), String>;
}
