//! Where the bytes of absent pages are: see `absent`.

/// Where the bytes of absent pages are. Called by many threads, confined ones too.
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
