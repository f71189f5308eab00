//! Where the runtime's own code lies.
//!
//! Its text is the range that Syscall User Dispatch exempts, and the way to tell
//! whether a signal interrupted the program or the runtime.

use core::ops::Range;

unsafe extern "C" {
    static __executable_start: u8;
    static etext: u8;
}

/// Addresses of the runtime's text, its ELF header included.
pub fn text() -> Range<usize> {
    &raw const __executable_start as usize..&raw const etext as usize
}

/// Whether `address` is code of the runtime.
pub fn contains(address: usize) -> bool {
    text().contains(&address)
}
