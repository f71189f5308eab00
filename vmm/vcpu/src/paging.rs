//! Page-table entries and page faults as x86 defines them (Intel SDM volume 3, 4.5 and
//! 4.7), for those who walk a guest's tables and those who make some.

/// The entry is in use.
pub const PRESENT: u64 = 1;
/// Stores are allowed.
pub const WRITABLE: u64 = 1 << 1;
/// Accesses at level 3 are allowed.
pub const USER: u64 = 1 << 2;
/// The processor has used it.
pub const ACCESSED: u64 = 1 << 5;
/// The processor has stored to its page.
pub const DIRTY: u64 = 1 << 6;
/// It maps a page although it is not of the lowest level.
pub const LARGE: u64 = 1 << 7;
/// It holds in every address space.
pub const GLOBAL: u64 = 1 << 8;
/// Instructions are not fetched there.
pub const NO_EXECUTE: u64 = 1 << 63;
/// The physical address of the page or of the next table: that of any processor.
pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Bits of the error code of a page fault.
pub mod fault {
    /// The page is present, and the access was not allowed.
    pub const PROTECTION: u32 = 1;
    /// It was a store.
    pub const WRITE: u32 = 2;
    /// It was made at level 3.
    pub const USER: u32 = 4;
    /// An entry has a reserved bit.
    pub const RESERVED: u32 = 8;
    /// An instruction was fetched.
    pub const FETCH: u32 = 16;
}
