//! Single accesses to the host's memory.
//!
//! Guest memory is shared with other vCPUs and devices, at any alignment. Rust
//! has no name for that, the processor has: an instruction each, written as
//! such. An aligned access is one access of its size, and the order of accesses
//! is the host's, x86-TSO, which is the guest's too.

use std::arch::asm;

/// Reads `SIZE` bytes (1, 2, 4 or 8), zero-extended.
///
/// # Safety
///
/// `SIZE` bytes at `pointer` are mapped and readable.
#[inline(always)]
pub unsafe fn read<const SIZE: usize>(pointer: *const u8) -> u64 {
    let value: u64;
    // SAFETY: the caller's promise; the instruction reads those bytes only.
    unsafe {
        match SIZE {
            1 => asm!("movzx {v:e}, byte ptr [{p}]", v = lateout(reg) value, p = in(reg) pointer,
                options(nostack, preserves_flags, readonly)),
            2 => asm!("movzx {v:e}, word ptr [{p}]", v = lateout(reg) value, p = in(reg) pointer,
                options(nostack, preserves_flags, readonly)),
            4 => asm!("mov {v:e}, dword ptr [{p}]", v = lateout(reg) value, p = in(reg) pointer,
                options(nostack, preserves_flags, readonly)),
            _ => asm!("mov {v}, qword ptr [{p}]", v = lateout(reg) value, p = in(reg) pointer,
                options(nostack, preserves_flags, readonly)),
        }
    }
    value
}

/// Writes the low `SIZE` bytes (1, 2, 4 or 8) of `value`.
///
/// # Safety
///
/// `SIZE` bytes at `pointer` are mapped and writable, and belong to no Rust
/// object that is borrowed.
#[inline(always)]
pub unsafe fn write<const SIZE: usize>(pointer: *mut u8, value: u64) {
    // SAFETY: the caller's promise; the instruction writes those bytes only.
    unsafe {
        match SIZE {
            1 => asm!("mov byte ptr [{p}], {v:l}", v = in(reg) value, p = in(reg) pointer,
                options(nostack, preserves_flags)),
            2 => asm!("mov word ptr [{p}], {v:x}", v = in(reg) value, p = in(reg) pointer,
                options(nostack, preserves_flags)),
            4 => asm!("mov dword ptr [{p}], {v:e}", v = in(reg) value, p = in(reg) pointer,
                options(nostack, preserves_flags)),
            _ => asm!("mov qword ptr [{p}], {v}", v = in(reg) value, p = in(reg) pointer,
                options(nostack, preserves_flags)),
        }
    }
}

/// Like [`read`], with the size at run time.
///
/// # Safety
///
/// As for [`read`].
pub unsafe fn read_sized(pointer: *const u8, size: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        match size {
            1 => read::<1>(pointer),
            2 => read::<2>(pointer),
            4 => read::<4>(pointer),
            _ => read::<8>(pointer),
        }
    }
}

/// Like [`write()`], with the size at run time.
///
/// # Safety
///
/// As for [`write()`].
pub unsafe fn write_sized(pointer: *mut u8, size: usize, value: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        match size {
            1 => write::<1>(pointer, value),
            2 => write::<2>(pointer, value),
            4 => write::<4>(pointer, value),
            _ => write::<8>(pointer, value),
        }
    }
}

/// Copies bytes that others may be writing at the same time.
///
/// # Safety
///
/// As many bytes at `from` are mapped and readable.
pub unsafe fn copy_out(from: *const u8, to: &mut [u8]) {
    // SAFETY: the caller's promise, and the direction flag is clear in Rust code.
    unsafe {
        asm!("rep movsb", inout("rdi") to.as_mut_ptr() => _, inout("rsi") from => _,
            inout("rcx") to.len() => _, options(nostack, preserves_flags));
    }
}
