//! The header of a bzImage (Documentation/arch/x86/boot.rst, "The Real-Mode
//! Kernel Header").

use std::ops::Range;

use linux_loader::bootparam::{XLF_KERNEL_64, setup_header};
use vm_memory::ByteValued;

use super::ImageError;

/// Where the header starts in the file, and in the zero page.
pub const HEADER: usize = 0x1f1;
/// The header ends here at the latest: the zero page goes on with other fields.
const HEADER_END_MAX: usize = 0x290;
const BOOT_FLAG: (usize, [u8; 2]) = (0x1fe, [0x55, 0xaa]);
const MAGIC: (usize, &[u8; 4]) = (0x202, b"HdrS");
/// The byte of the jump that tells where the header ends.
const JUMP_LENGTH: usize = 0x201;
/// 2.12 (Linux 3.8): has `xloadflags`, and all that is used here.
const VERSION_MIN: u16 = 0x20c;
const SECTOR: u64 = 512;
/// Bytes before the part that runs in protected mode, at most.
pub const HEAD: u64 = 256 * SECTOR;
/// Where the 64-bit entry lies in the part that runs in protected mode.
const ENTRY_64: u64 = 0x200;
/// Longest version string that is shown.
const VERSION_MAX: usize = 256;

/// A bzImage, taken apart.
#[derive(Debug)]
pub struct BzImage {
    /// Its header, as the file has it; zero where it is older and shorter.
    pub header: setup_header,
    /// What runs in protected mode: first the kernel's own unpacker.
    pub body: Range<u64>,
    /// The compressed kernel inside.
    pub payload: Range<u64>,
    /// What it calls itself.
    pub version: Option<String>,
}

/// Whether this is a bzImage, or once was.
pub fn recognise(data: &[u8]) -> bool {
    let at = |offset: usize, bytes: &[u8]| data.get(offset..offset + bytes.len()) == Some(bytes);
    at(BOOT_FLAG.0, &BOOT_FLAG.1) && at(MAGIC.0, MAGIC.1)
}

/// Takes a file apart that was recognised: its first [`HEAD`] bytes, of `has`.
pub fn parse(data: &[u8], has: u64) -> Result<BzImage, ImageError> {
    let cut = |what, needed| ImageError::Truncated { what, needed, has };
    let header = read_header(data, has)?;
    let version = header.version;
    if version < VERSION_MIN {
        return Err(ImageError::Unsupported(format!(
            "its boot protocol is {}.{:02}, but 2.12 or later is needed",
            version >> 8,
            version & 0xff
        )));
    }
    if header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(ImageError::Architecture("32-bit x86".into()));
    }
    let sectors = match header.setup_sects {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let start = (sectors + 1) * SECTOR;
    let size = u64::from(header.syssize) * 16;
    // `syssize` is rounded up to 16 bytes.
    let needed = start + size.max(ENTRY_64 + 16).saturating_sub(15);
    if has < needed {
        return Err(cut("its protected-mode part", needed));
    }
    let end = has.min(start + size.max(ENTRY_64 + 16));
    let offset = u64::from(header.payload_offset);
    let payload = start + offset..start + offset + u64::from(header.payload_length);
    if payload.end > end {
        return Err(cut("its compressed kernel", payload.end));
    }
    Ok(BzImage {
        header,
        body: start..end,
        payload,
        version: version_string(data, header.kernel_version, start),
    })
}

fn read_header(data: &[u8], has: u64) -> Result<setup_header, ImageError> {
    let size = size_of::<setup_header>();
    let end = MAGIC.0 + usize::from(data.get(JUMP_LENGTH).copied().unwrap_or(0));
    if !(HEADER + 64..=HEADER_END_MAX).contains(&end) {
        return Err(ImageError::Malformed {
            place: "setup header",
            problem: format!("it ends at {end:#x}"),
        });
    }
    let bytes = data.get(HEADER..end).ok_or(ImageError::Truncated {
        what: "its setup header",
        needed: end as u64,
        has,
    })?;
    let mut header = setup_header::default();
    let known = bytes.len().min(size);
    header.as_mut_slice()[..known].copy_from_slice(&bytes[..known]);
    Ok(header)
}

/// The text that `kernel_version` points to, where it is text.
fn version_string(data: &[u8], pointer: u16, end: u64) -> Option<String> {
    if pointer == 0 {
        return None;
    }
    let text = data.get(usize::from(pointer) + 0x200..data.len().min(end as usize))?;
    let text = &text[..text.len().min(VERSION_MAX)];
    let text = &text[..text.iter().position(|byte| *byte == 0)?];
    let printable = text.iter().all(|byte| (b' '..=b'~').contains(byte));
    (printable && !text.is_empty()).then(|| String::from_utf8_lossy(text).into_owned())
}

impl BzImage {
    /// Where the body goes when the kernel unpacks itself, with the memory that the
    /// kernel needs there until it reads the map of memory; and where it starts.
    pub fn own_entry(&self) -> Result<(Range<u64>, u64), ImageError> {
        let start = self.header.pref_address;
        // The body, and so this, is longer than what lies before the entry.
        match start.checked_add(self.memory_needed()) {
            Some(end) => Ok((start..end, start + ENTRY_64)),
            None => Err(ImageError::Malformed {
                place: "preferred address",
                problem: format!("{start:#x}"),
            }),
        }
    }

    fn memory_needed(&self) -> u64 {
        u64::from(self.header.init_size).max(self.body.end - self.body.start)
    }
}
