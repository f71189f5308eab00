//! From bytes to blocks.

use iced_x86::DecoderOptions;

/// As a baseline x86-64 CPU decodes: TZCNT, LZCNT and WBNOINVD are the
/// instructions that they extend.
pub const DECODER_OPTIONS: u32 =
    DecoderOptions::NO_MPFX_0FBC | DecoderOptions::NO_MPFX_0FBD | DecoderOptions::NO_WBNOINVD;

/// What an [`crate::op::Op`] has no room for.
#[derive(Clone, Debug)]
pub enum Side {}
