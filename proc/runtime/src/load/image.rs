//! Maps an ELF image at its base.

use weft_proc::elf::{ElfError, Image, ImageKind};
use weft_proc::layout::{LOWEST, PAGE, PROT_WRITE};

use super::file::FileError;
use super::{Executable, LoadError};
use crate::own_calls::{Errno, random};
use crate::space;

/// Where position-independent programs go, before the random part.
const BASE: u64 = 0x555_5555_4000;
/// Random part of the base, bytes.
const BASE_SLACK_BYTES: u64 = 256 << 30;

const MAP_PRIVATE: usize = 2;
const MAP_FIXED: usize = 0x10;
const MAP_ANONYMOUS: usize = 0x20;

/// Picks the base of a program.
pub fn choose_base(image: &Image) -> Result<u64, LoadError> {
    let base = match image.kind {
        ImageKind::Fixed => 0,
        ImageKind::Relocatable => {
            let wanted = BASE + random() % BASE_SLACK_BYTES;
            (wanted & !(image.alignment.max(PAGE) - 1)) - (image.extent().start & !(PAGE - 1))
        }
    };
    checked(image, base)
}

/// Picks the base of a dynamic linker: among the other mappings.
pub fn choose_linker_base(image: &Image) -> Result<u64, LoadError> {
    if image.kind == ImageKind::Fixed {
        return checked(image, 0);
    }
    let extent = image.extent();
    let length = extent.end - extent.start;
    let space = space::lock();
    let start = space
        .layout
        .find_free(length, image.alignment, None, LOWEST, space.top())
        .map_err(|error| LoadError::Mapping(Errno::new(error.errno())))?;
    drop(space);
    checked(image, start - extent.start)
}

fn checked(image: &Image, base: u64) -> Result<u64, LoadError> {
    image
        .check_base(base)
        .map_err(|error: ElfError| LoadError::File(FileError::Elf(error)))?;
    Ok(base)
}

/// Makes the mappings of an image.
pub fn map(executable: &Executable, base: u64) -> Result<(), LoadError> {
    for mapping in executable.image.plan(base) {
        let (flags, descriptor) = if mapping.is_anonymous() {
            (MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS, -1)
        } else {
            (MAP_PRIVATE | MAP_FIXED, executable.descriptor)
        };
        space::lock().map(&[
            mapping.address as usize,
            mapping.length as usize,
            mapping.prot as usize,
            flags,
            descriptor as usize,
            mapping.file_offset as usize,
        ])?;
        if mapping.zero_fill_tail > 0 && mapping.prot & PROT_WRITE != 0 {
            let tail = mapping.address + mapping.length - mapping.zero_fill_tail;
            // SAFETY: just mapped as anonymous writable memory, and the program
            // does not run yet.
            unsafe {
                core::ptr::write_bytes(tail as *mut u8, 0, mapping.zero_fill_tail as usize);
            }
        }
    }
    Ok(())
}
