//! The kernel's vdso, moved to where every node can have it.
//!
//! The kernel maps the vdso's code and the variables it reads side by side at a
//! random address. They may be moved as long as their distance stays; then an
//! unstretched program keeps a `clock_gettime` that costs no system call.

use crate::own_calls::{self, Errno, Result, call};

/// Most mappings that belong to it: code, and up to four of variables.
const PARTS_MAX: usize = 8;
/// Most bytes of `/proc/self/maps` looked at.
const MAPS_BYTES: usize = 64 << 10;

#[derive(Clone, Copy, Default)]
struct Part {
    start: u64,
    end: u64,
    is_code: bool,
}

/// The vdso after its move.
#[derive(Clone, Copy, Debug)]
pub struct Vdso {
    /// First address of all its mappings.
    pub start: u64,
    /// First address after them.
    pub end: u64,
    /// Its ELF header: what AT_SYSINFO_EHDR says.
    pub header: u64,
    /// First address after its code.
    pub header_end: u64,
}

/// Moves the vdso to `to`, where nothing may be mapped. ENOENT when the kernel
/// gave none.
pub fn relocate(to: u64) -> Result<Vdso> {
    let mut parts = [Part::default(); PARTS_MAX];
    let count = find(&mut parts)?;
    let parts = &parts[..count];
    let first = parts.iter().map(|p| p.start).min().ok_or(Errno::ENOENT)?;
    let code = parts.iter().find(|p| p.is_code).ok_or(Errno::ENOENT)?;
    let place = |address: u64| to + (address - first);
    for part in parts {
        const MREMAP_MAYMOVE_FIXED: usize = 3;
        let length = part.end - part.start;
        call!(
            mremap,
            part.start,
            length,
            length,
            MREMAP_MAYMOVE_FIXED,
            place(part.start)
        )?;
    }
    let last = parts.iter().map(|p| p.end).max().unwrap_or(first);
    Ok(Vdso {
        start: to,
        end: place(last),
        header: place(code.start),
        header_end: place(code.end),
    })
}

impl Vdso {
    /// A hash (FNV-1a) of the code: nodes with the same one may share pointers
    /// into it.
    pub fn hash(&self) -> u64 {
        let length = (self.header_end - self.header) as usize;
        // SAFETY: `relocate` mapped the code there, readable.
        let code = unsafe { core::slice::from_raw_parts(self.header as *const u8, length) };
        code.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }
}

fn find(parts: &mut [Part; PARTS_MAX]) -> Result<usize> {
    let buffer = own_calls::allocate(MAPS_BYTES)?;
    // SAFETY: just allocated, of that size.
    let bytes = unsafe { core::slice::from_raw_parts_mut(buffer, MAPS_BYTES) };
    let length = read_maps(bytes);
    let mut count = 0;
    if let Ok(length) = length {
        for line in bytes[..length].split(|&b| b == b'\n') {
            let Some(part) = parse(line) else { continue };
            if count < PARTS_MAX {
                parts[count] = part;
                count += 1;
            }
        }
    }
    // SAFETY: `bytes` is not used any more.
    unsafe { own_calls::release(buffer, MAPS_BYTES) };
    length.map(|_| count)
}

fn read_maps(into: &mut [u8]) -> Result<usize> {
    let path = c"/proc/self/maps";
    const O_CLOEXEC: usize = 0o2_000_000;
    let descriptor = call!(open, path.as_ptr(), O_CLOEXEC)?;
    let mut length = 0;
    let result = loop {
        let rest = &mut into[length..];
        match call!(read, descriptor, rest.as_mut_ptr(), rest.len()) {
            Ok(0) => break Ok(length),
            Ok(count) => length += count,
            Err(error) => break Err(error),
        }
    };
    let _ = call!(close, descriptor);
    result
}

/// A line such as `7ffc…-7ffc… r-xp 00000000 00:00 0   [vdso]`.
fn parse(line: &[u8]) -> Option<Part> {
    let name_at = line.iter().position(|&b| b == b'[')?;
    let name = &line[name_at..];
    let is_code = name == b"[vdso]";
    if !is_code && !name.starts_with(b"[vvar") {
        return None;
    }
    let dash = line.iter().position(|&b| b == b'-')?;
    let space = line.iter().position(|&b| b == b' ')?;
    Some(Part {
        start: hexadecimal(&line[..dash])?,
        end: hexadecimal(line.get(dash + 1..space)?)?,
        is_code,
    })
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0u64, |value, &digit| {
        let digit = (digit as char).to_digit(16)?;
        Some(value << 4 | u64::from(digit))
    })
}
