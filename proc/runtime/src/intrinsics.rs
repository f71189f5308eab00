//! The memory functions that compiled code calls, and the personality
//! symbol that precompiled `core` names. Nothing else of a C library exists here.
//!
//! They are written with string instructions: a plain loop would be recognised
//! by the compiler and turned into a call to itself.

use core::arch::asm;

/// Copies `length` bytes; the areas do not overlap.
///
/// # Safety
/// As C's `memcpy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    // SAFETY: the caller guarantees both areas; the direction flag is clear by
    // the calling convention, and the kernel clears it on handler entry.
    unsafe {
        asm!("rep movsb", inout("rcx") length => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
    to
}

/// Copies `length` bytes; the areas may overlap.
///
/// # Safety
/// As C's `memmove`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= length {
        // SAFETY: copying upwards never reads a byte that was already written.
        return unsafe { memcpy(to, from, length) };
    }
    let last = length.wrapping_sub(1);
    // SAFETY: as `memcpy`, from the last byte down; the flag is cleared again.
    unsafe {
        asm!("std", "rep movsb", "cld",
            inout("rcx") length => _,
            inout("rdi") to.wrapping_add(last) => _,
            inout("rsi") from.wrapping_add(last) => _,
            options(nostack));
    }
    to
}

/// Fills `length` bytes.
///
/// # Safety
/// As C's `memset`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memset(to: *mut u8, value: i32, length: usize) -> *mut u8 {
    // SAFETY: the caller guarantees the area.
    unsafe {
        asm!("rep stosb", inout("rcx") length => _, inout("rdi") to => _, in("al") value as u8,
            options(nostack, preserves_flags));
    }
    to
}

/// Compares `length` bytes.
///
/// # Safety
/// As C's `memcmp`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, length: usize) -> i32 {
    for index in 0..length {
        // SAFETY: the caller guarantees both areas. Volatile keeps the compiler
        // from recognising the loop as a `memcmp`.
        let (x, y) = unsafe { (a.add(index).read_volatile(), b.add(index).read_volatile()) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
    }
    0
}

/// Tells whether `length` bytes differ.
///
/// # Safety
/// As C's `memcmp`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, length: usize) -> i32 {
    // SAFETY: passed on unchanged.
    unsafe { memcmp(a, b, length) }
}

/// Length of a NUL-terminated string.
///
/// # Safety
/// As C's `strlen`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strlen(text: *const u8) -> usize {
    let mut length = 0;
    // SAFETY: the caller guarantees a NUL; volatile as in `memcmp`.
    while unsafe { text.add(length).read_volatile() } != 0 {
        length += 1;
    }
    length
}

/// Named by the precompiled `core`; never called, because panics abort.
#[unsafe(no_mangle)]
pub extern "C" fn rust_eh_personality() {}

/// There is no heap. A dependency links `alloc` for parts of it that the
/// runtime does not use; an attempt to allocate after all ends the process.
struct NoHeap;

// SAFETY: no allocation ever succeeds, so there is nothing to keep valid.
unsafe impl core::alloc::GlobalAlloc for NoHeap {
    unsafe fn alloc(&self, _layout: core::alloc::Layout) -> *mut u8 {
        core::ptr::null_mut()
    }
    unsafe fn dealloc(&self, _memory: *mut u8, _layout: core::alloc::Layout) {}
}

#[global_allocator]
static NO_HEAP: NoHeap = NoHeap;
