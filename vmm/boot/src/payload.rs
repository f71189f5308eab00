//! Unpacks the compressed kernel inside a bzImage.
//!
//! Unpacking here instead of in the guest saves a slow CPU the work: a software
//! vCPU is many times slower at it than the host.

use std::fmt;
use std::io::Read;
use std::sync::Mutex;

use thiserror::Error;

/// How a payload is compressed (Linux: CONFIG_KERNEL_GZIP and so on).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// An ELF file as it is.
    None,
    /// RFC 1952.
    Gzip,
    Bzip2,
    /// The older `.lzma` format.
    Lzma,
    /// `.xz`, with its filter for x86 code.
    Xz,
    /// lzop: no well-kept decoder in Rust is known.
    Lzo,
    /// LZ4's legacy frame format.
    Lz4,
    Zstd,
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "not compressed",
            Self::Gzip => "gzip",
            Self::Bzip2 => "bzip2",
            Self::Lzma => "lzma",
            Self::Xz => "xz",
            Self::Lzo => "lzo",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        })
    }
}

/// Why a payload was not unpacked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PayloadError {
    /// None of the formats that kernels come in.
    #[error("its compression is unknown: it begins with {0:02x?}")]
    Unknown(Vec<u8>),
    /// A known format without a decoder here.
    #[error("there is no decoder for {0} here")]
    NoDecoder(Compression),
    /// The decoder found it damaged.
    #[error(
        "its {compression} data is damaged ({reason}): copy the file again, or, if it is \
        complete, choose the linux-own-entry protocol, with which the kernel unpacks itself"
    )]
    Damaged {
        /// Format.
        compression: Compression,
        /// The decoder's words.
        reason: String,
    },
    /// It unpacks to something else than it says.
    #[error("it unpacks to {found} bytes, but states {stated}: copy the file again")]
    Size {
        /// Bytes that came out.
        found: u64,
        /// Bytes that should.
        stated: u64,
    },
    /// It unpacks to more than the guest has memory.
    #[error("it unpacks to more than {limit} bytes, all the guest has: give the guest more memory")]
    TooLarge {
        /// The most allowed.
        limit: u64,
    },
}

impl PayloadError {
    /// The image may be whole: it is only that this code cannot unpack it.
    pub fn is_ours(&self) -> bool {
        matches!(self, Self::Unknown(_) | Self::NoDecoder(_))
    }
}

/// First bytes of each format (Linux: lib/decompress.c).
const MAGICS: &[(&[u8], Compression)] = &[
    (b"\x7fELF", Compression::None),
    (&[0x1f, 0x8b], Compression::Gzip),
    (b"BZh", Compression::Bzip2),
    (&[0x5d, 0x00, 0x00], Compression::Lzma),
    (b"\xfd7zXZ\0", Compression::Xz),
    (&[0x89, b'L', b'Z', b'O'], Compression::Lzo),
    (&LZ4_LEGACY_MAGIC, Compression::Lz4),
    (&[0x28, 0xb5, 0x2f, 0xfd], Compression::Zstd),
];

const LZ4_LEGACY_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
/// Most that one block of the legacy format unpacks to.
const LZ4_BLOCK_MAX: usize = 8 << 20;
/// Most threads that unpack one kernel, which has some 50 MiB.
const UNPACKERS_MAX: usize = 8;
/// A dictionary or window larger than this is refused: Linux uses 128 MiB at most.
const WINDOW_MAX_KIB: u32 = 192 << 10;

/// Recognises a format by its first bytes.
pub fn recognise(data: &[u8]) -> Option<Compression> {
    MAGICS
        .iter()
        .find(|(magic, _)| data.starts_with(magic))
        .map(|(_, compression)| *compression)
}

/// Unpacks to at most `limit` bytes.
///
/// All formats but gzip are followed by the unpacked size in four bytes, which
/// gzip holds itself (Linux: scripts/Makefile.lib, `size_append`).
pub fn unpack(payload: &[u8], limit: u64) -> Result<Vec<u8>, PayloadError> {
    let Some(compression) = recognise(payload) else {
        let start = &payload[..payload.len().min(4)];
        return Err(PayloadError::Unknown(start.to_vec()));
    };
    let damaged = |reason: String| PayloadError::Damaged {
        compression,
        reason,
    };
    match compression {
        Compression::None => return Ok(payload.to_vec()),
        Compression::Lzo => return Err(PayloadError::NoDecoder(compression)),
        _ => {}
    }
    let (packed, size) = payload
        .split_last_chunk::<4>()
        .ok_or_else(|| damaged("it has no size at its end".into()))?;
    let stated = u64::from(u32::from_le_bytes(*size));
    if stated > limit {
        return Err(PayloadError::TooLarge { limit });
    }
    let mut unpacked = Vec::new();
    let mut read = |decoder: &mut dyn Read| {
        decoder
            .take(limit + 1)
            .read_to_end(&mut unpacked)
            .map(drop)
            .map_err(|error| error.to_string())
    };
    let result = match compression {
        Compression::None | Compression::Lzo => Ok(()),
        Compression::Gzip => read(&mut flate2::read::GzDecoder::new(payload)),
        Compression::Bzip2 => read(&mut bzip2::read::BzDecoder::new(packed)),
        Compression::Lzma => {
            match lzma_rust2::LzmaReader::new_mem_limit(packed, WINDOW_MAX_KIB, None) {
                Ok(mut decoder) => read(&mut decoder),
                Err(error) => Err(error.to_string()),
            }
        }
        Compression::Xz => read(&mut lzma_rust2::XzReader::new_mem_limit(
            packed,
            false,
            WINDOW_MAX_KIB,
        )),
        Compression::Zstd => match ruzstd::decoding::StreamingDecoder::new(packed) {
            Ok(mut decoder) => read(&mut decoder),
            Err(error) => Err(error.to_string()),
        },
        Compression::Lz4 => unpack_lz4(packed, stated as usize, &mut unpacked),
    };
    result.map_err(damaged)?;
    let found = unpacked.len() as u64;
    if found > limit {
        return Err(PayloadError::TooLarge { limit });
    }
    if found != stated {
        return Err(PayloadError::Size { found, stated });
    }
    Ok(unpacked)
}

/// The legacy frame: blocks, each after its packed length; no end mark. They do
/// not depend on each other, so all CPUs unpack.
fn unpack_lz4(packed: &[u8], size: usize, unpacked: &mut Vec<u8>) -> Result<(), String> {
    let blocks = lz4_blocks(packed)?;
    *unpacked = vec![0; size];
    // All but the last of a frame unpack to as much as a block can hold; where
    // frames were strung together, one within may have less.
    let rooms = unpacked.chunks_mut(LZ4_BLOCK_MAX);
    if rooms.len() == blocks.len() && unpack_side_by_side(&blocks, rooms.collect()) {
        return Ok(());
    }
    let mut filled = 0;
    for block in blocks {
        let room = &mut unpacked[filled..];
        let room_length = room.len().min(LZ4_BLOCK_MAX);
        filled += lz4_flex::block::decompress_into(block, &mut room[..room_length])
            .map_err(|error| error.to_string())?;
    }
    unpacked.truncate(filled);
    Ok(())
}

fn lz4_blocks(packed: &[u8]) -> Result<Vec<&[u8]>, String> {
    let mut blocks = Vec::new();
    let mut rest = packed;
    while let Some((word, after)) = rest.split_first_chunk::<4>() {
        rest = after;
        // Frames may be strung together: each begins with the magic again.
        if *word == LZ4_LEGACY_MAGIC {
            continue;
        }
        let length = u32::from_le_bytes(*word) as usize;
        let Some((block, after)) = rest.split_at_checked(length) else {
            return Err(format!("a block of {length} bytes, {} left", rest.len()));
        };
        rest = after;
        blocks.push(block);
    }
    match rest.len() {
        0 => Ok(blocks),
        left => Err(format!("{left} bytes after the last block")),
    }
}

/// Whether every block fills its room.
fn unpack_side_by_side(blocks: &[&[u8]], rooms: Vec<&mut [u8]>) -> bool {
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    let threads = threads.min(blocks.len()).min(UNPACKERS_MAX);
    let work = Mutex::new(blocks.iter().zip(rooms));
    let unpack = || {
        loop {
            let next = work.lock().map_or(None, |mut work| work.next());
            let Some((block, room)) = next else {
                return true;
            };
            let unpacked = lz4_flex::block::decompress_into(block, room);
            if unpacked.is_ok_and(|bytes| bytes == room.len()) {
                continue;
            }
            return false;
        }
    };
    std::thread::scope(|scope| {
        let start = |number| {
            std::thread::Builder::new()
                .name(format!("weft-unpack{number}"))
                .spawn_scoped(scope, unpack)
        };
        // One that does not start leaves its work to the others.
        let others: Vec<_> = (1..threads)
            .filter_map(|number| start(number).ok())
            .collect();
        let own = unpack();
        let others = others.into_iter().map(|thread| thread.join());
        others.fold(own, |all, other| all && other.is_ok_and(|filled| filled))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames of blocks, and the size of it all.
    fn pack(data: &[u8], frames: &[usize]) -> Vec<u8> {
        let mut packed = Vec::new();
        let mut rest = data;
        for length in frames {
            let (frame, after) = rest.split_at(*length);
            rest = after;
            packed.extend(LZ4_LEGACY_MAGIC);
            for block in frame.chunks(LZ4_BLOCK_MAX) {
                let block = lz4_flex::block::compress(block);
                packed.extend((block.len() as u32).to_le_bytes());
                packed.extend(block);
            }
        }
        packed.extend((data.len() as u32).to_le_bytes());
        packed
    }

    #[test]
    fn blocks_go_where_they_belong() {
        let size = 2 * LZ4_BLOCK_MAX + 4321;
        let data: Vec<u8> = (0..size as u32).map(|n| (n / 251 + n) as u8).collect();
        for frames in [
            &[size][..],
            &[5, size - 5],
            &[LZ4_BLOCK_MAX, size - LZ4_BLOCK_MAX],
        ] {
            let packed = pack(&data, frames);
            assert!(unpack(&packed, size as u64).unwrap() == data, "{frames:?}");
            let mut damaged = packed.clone();
            damaged[9] ^= 0xff;
            assert!(
                unpack(&damaged, size as u64).is_ok_and(|found| found != data)
                    || unpack(&damaged, size as u64).is_err()
            );
        }
        let mut longer = pack(&data, &[size]);
        let last = longer.len() - 4;
        longer[last..].copy_from_slice(&(size as u32 + 1).to_le_bytes());
        let error = unpack(&longer, 1 << 30).unwrap_err();
        assert!(matches!(error, PayloadError::Size { .. }), "{error}");
    }
}
