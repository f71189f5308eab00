//! The extended state (x87, SSE, AVX, …) in a signal frame.
//!
//! The kernel writes the standard XSAVE format: 512 legacy bytes, a 64-byte
//! header, then components at the offsets that CPUID gives. Bytes 464 to 511 of
//! the legacy part are software's: they say how large the area is, and belong to
//! the frame, not to the state. Invariant: no function here changes them.

use weft_proc::context::{EXTENDED_BYTES_MAX as BYTES_MAX, HEADER_END, LEGACY_BYTES};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::memory::{self, Fault};

/// Where software's bytes start.
const SOFTWARE: usize = 464;
/// `FP_XSTATE_MAGIC1`.
const MAGIC1: u32 = 0x4650_5853;
/// Bytes of the closing magic number.
const MAGIC2_BYTES: usize = 4;
/// x87 control word and MXCSR after a reset as Linux does it.
const INITIAL_CONTROL: u16 = 0x37f;
const INITIAL_MXCSR: u32 = 0x1f80;
/// Where MXCSR lies, and behind it the bits that this processor lets be set.
const MXCSR: usize = 24;
const MXCSR_MASK: usize = 28;
/// The mask of a processor that gives none.
const DEFAULT_MXCSR_MASK: u32 = 0xffbf;

/// The extended state inside a signal frame.
#[derive(Clone, Copy)]
pub struct Area {
    address: usize,
}

/// Software's bytes, `struct _fpx_sw_bytes`.
#[repr(C)]
#[derive(Clone, Copy, FromBytes)]
struct Software {
    magic1: u32,
    extended_size: u32,
    features: u64,
    size: u32,
    padding: [u32; 7],
}

const _: () = assert!(size_of::<Software>() == 48);

impl Area {
    /// The area at `address`, in a frame that the kernel pushed.
    ///
    /// # Safety
    /// `address` is the `extended` word of such a frame on a runtime stack.
    pub unsafe fn new(address: usize) -> Area {
        Area { address }
    }
    fn word<T: FromBytes>(self, offset: usize) -> T {
        assert!(offset + size_of::<T>() <= HEADER_END);
        // SAFETY: `new` promises a kernel-written area. What lies in its header
        // is asked for only where `length` says that it has one.
        unsafe { ((self.address + offset) as *const T).read_unaligned() }
    }
    fn set_word<T: IntoBytes + Immutable>(self, offset: usize, value: T) {
        assert!(offset + size_of::<T>() <= HEADER_END);
        // SAFETY: as `word`.
        unsafe { ((self.address + offset) as *mut T).write_unaligned(value) }
    }
    /// A part of the state, to be overwritten.
    fn part(&mut self, offset: usize, length: usize) -> &mut [u8] {
        assert!(offset + length <= self.length());
        // SAFETY: inside the area that the kernel wrote (asserted); the thread
        // that it belongs to waits for this handler.
        unsafe { core::slice::from_raw_parts_mut((self.address + offset) as *mut u8, length) }
    }
    fn software(self) -> Software {
        self.word(SOFTWARE)
    }
    /// Bytes of state, without the closing magic number.
    pub fn length(self) -> usize {
        let software = self.software();
        if software.magic1 == MAGIC1 {
            (software.size as usize).min(BYTES_MAX)
        } else {
            LEGACY_BYTES
        }
    }
    /// Bytes that a copy in the program's memory occupies.
    pub fn pushed_length(self) -> usize {
        let software = self.software();
        if software.magic1 == MAGIC1 {
            (software.extended_size as usize).min(BYTES_MAX + MAGIC2_BYTES)
        } else {
            LEGACY_BYTES
        }
    }
    /// The whole area as the kernel wrote it, closing magic included.
    pub fn pushed_bytes(&self) -> &[u8] {
        // SAFETY: the kernel wrote that many bytes.
        unsafe { core::slice::from_raw_parts(self.address as *const u8, self.pushed_length()) }
    }
    /// Puts every component into its initial configuration.
    pub fn reset(self) {
        self.set_word(0, INITIAL_CONTROL);
        self.set_word(MXCSR, INITIAL_MXCSR);
        if self.length() >= HEADER_END {
            self.set_word(LEGACY_BYTES, 0u64);
        } else {
            // Without a header the legacy registers are loaded as they stand.
            for offset in (32..416).step_by(8) {
                self.set_word(offset, 0u64);
            }
        }
    }
    /// Copies the state out; returns its length.
    pub fn save(self, into: &mut [u8; BYTES_MAX]) -> usize {
        let length = self.length();
        // SAFETY: the area holds `length` bytes, `into` holds `BYTES_MAX`.
        unsafe {
            core::ptr::copy_nonoverlapping(self.address as *const u8, into.as_mut_ptr(), length);
        }
        length
    }
    /// Replaces the state by one that [`Area::save`] wrote, here or on another
    /// node. An empty slice resets. MXCSR bits that this processor does not have
    /// are cleared: with them the kernel could not load the state.
    pub fn load(self, bytes: &[u8]) {
        if bytes.len() < LEGACY_BYTES {
            self.reset();
            return;
        }
        let mask = match self.word::<u32>(MXCSR_MASK) {
            0 => DEFAULT_MXCSR_MASK,
            mask => mask,
        };
        self.place(bytes.len(), |offset, into| {
            into.copy_from_slice(&bytes[offset..offset + into.len()]);
            Ok(())
        })
        .unwrap_or_default();
        self.set_word(MXCSR, self.word::<u32>(MXCSR) & mask);
        self.set_word(MXCSR_MASK, mask);
    }
    /// Replaces the state by one in the program's memory, as `rt_sigreturn`
    /// does.
    pub fn load_from_program(self, address: usize) -> Result<(), Fault> {
        let mut software = [0u8; size_of::<Software>()];
        memory::copy_in(address.wrapping_add(SOFTWARE), &mut software)?;
        let word = |at: usize| {
            u32::from_ne_bytes([
                software[at],
                software[at + 1],
                software[at + 2],
                software[at + 3],
            ])
        };
        let length = if word(0) == MAGIC1 {
            (word(16) as usize).clamp(LEGACY_BYTES, BYTES_MAX)
        } else {
            LEGACY_BYTES
        };
        self.place(length, |offset, into| {
            memory::copy_in(address.wrapping_add(offset), into)
        })
    }
    /// Copies what fits around software's bytes with `copy(offset, into)` and
    /// keeps the feature bits consistent with what was copied.
    fn place(
        mut self,
        available: usize,
        mut copy: impl FnMut(usize, &mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        copy(0, self.part(0, SOFTWARE))?;
        let length = self.length().min(available);
        if self.length() < HEADER_END {
            return Ok(());
        }
        if length < HEADER_END {
            // Legacy state only: x87 and SSE are there, the rest is initial.
            self.set_word(LEGACY_BYTES, 3u64);
            return Ok(());
        }
        copy(LEGACY_BYTES, self.part(LEGACY_BYTES, length - LEGACY_BYTES))?;
        let features: u64 = self.word(LEGACY_BYTES);
        self.set_word(LEGACY_BYTES, features & self.software().features);
        Ok(())
    }
}
