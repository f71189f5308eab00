//! Large tables whose memory is used only where they are.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::sync::atomic::AtomicU32;

/// `count` words, all zero, untouched: the kernel gives memory when they are used.
pub fn zeroed_words(count: usize) -> Box<[AtomicU32]> {
    if count == 0 {
        return Box::new([]);
    }
    let Ok(layout) = Layout::array::<AtomicU32>(count) else {
        return Box::new([]);
    };
    // SAFETY: the layout is not empty.
    let pointer = unsafe { alloc_zeroed(layout) };
    if pointer.is_null() {
        handle_alloc_error(layout);
    }
    let slice = std::ptr::slice_from_raw_parts_mut(pointer.cast::<AtomicU32>(), count);
    // SAFETY: allocated just now with the layout of that slice, and zero is a
    // valid AtomicU32.
    unsafe { Box::from_raw(slice) }
}
