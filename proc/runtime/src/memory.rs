//! Access to the program's memory at addresses the program gave.
//!
//! Any such address may be bad. Every access goes through one assembly copy whose
//! faults the signal handler turns into [`Fault`] (see [`fix_up`]), after the
//! engine had its chance to fetch an absent page.

use core::arch::global_asm;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::frame::Frame;
use crate::own_calls::Errno;

/// The program gave an address that cannot be accessed; EFAULT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault;

impl From<Fault> for Errno {
    fn from(_: Fault) -> Errno {
        Errno::EFAULT
    }
}

global_asm!(
    r#"
    .text
    .globl weft_copy, weft_copy_start, weft_copy_end, weft_copy_fault
    # weft_copy(to, from, length): 0, or 1 after a fault
weft_copy:
    mov rcx, rdx
weft_copy_start:
    rep movsb
weft_copy_end:
    xor eax, eax
    ret
weft_copy_fault:
    mov eax, 1
    ret
"#
);

unsafe extern "C" {
    static weft_copy_start: u8;
    static weft_copy_end: u8;
    static weft_copy_fault: u8;
    fn weft_copy(to: *mut u8, from: *const u8, length: usize) -> i32;
}

/// Lets a copy that faulted return; false when the fault was elsewhere.
pub fn fix_up(frame: &mut Frame) -> bool {
    let start = &raw const weft_copy_start as usize;
    let end = &raw const weft_copy_end as usize;
    let fault = &raw const weft_copy_fault as usize;
    let copying = (start..end).contains(&frame.registers.rip);
    if copying {
        frame.registers.rip = fault;
    }
    copying
}

/// Copies out of the program.
pub fn copy_in(address: usize, into: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: `into` holds that many bytes; the program's side may fault, which
    // the handler resolves.
    match unsafe { weft_copy(into.as_mut_ptr(), address as *const u8, into.len()) } {
        0 => Ok(()),
        _ => Err(Fault),
    }
}

/// Copies into the program.
pub fn copy_out(address: usize, from: &[u8]) -> Result<(), Fault> {
    // SAFETY: as `copy_in`, in the other direction.
    match unsafe { weft_copy(address as *mut u8, from.as_ptr(), from.len()) } {
        0 => Ok(()),
        _ => Err(Fault),
    }
}

/// Reads a plain value.
pub fn read<T: FromBytes + IntoBytes>(address: usize) -> Result<T, Fault> {
    let mut value = T::new_zeroed();
    copy_in(address, value.as_mut_bytes())?;
    Ok(value)
}

/// Writes a plain value.
pub fn write<T: IntoBytes + Immutable>(address: usize, value: &T) -> Result<(), Fault> {
    copy_out(address, value.as_bytes())
}

/// Copies a NUL-terminated string; the slice returned excludes the NUL. ENAMETOOLONG
/// when it does not fit.
pub fn read_string(address: usize, into: &mut [u8]) -> Result<&[u8], Errno> {
    let mut length = 0;
    while length < into.len() {
        // To the end of the page at most: the next may not exist.
        let at = address.wrapping_add(length);
        let step = (4096 - (at & 4095)).min(into.len() - length);
        copy_in(at, &mut into[length..length + step])?;
        if let Some(end) = into[length..length + step].iter().position(|&b| b == 0) {
            return Ok(&into[..length + end]);
        }
        length += step;
    }
    Err(Errno::ENAMETOOLONG)
}
