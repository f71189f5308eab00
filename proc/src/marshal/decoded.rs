//! Home's side: bytes from a peer into machine words for the kernel, and what
//! the kernel produced into a reply.

use super::HEADER;
use super::plan::{
    ABSENT, Direction, MASK, MESSAGE, NAME_MAX, PIECES_MAX, Piece, Plan, Role, Shape, Spec,
    word_u32, word_u64,
};
use super::scatter::{OUTPUT_HEADER, REPLY_HEADER};
use crate::table::{self, Arg, Class, Length, Plain, Produced, When};
use linux_raw_sys::errno;

/// A request that came from a peer, checked.
#[derive(Clone, Copy, Debug)]
pub struct DecodedCall {
    nr: u32,
    args: [u64; 6],
    plain: Plain,
    plan: Plan,
}

/// Why bytes are no request. The peer is broken or hostile.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Malformed {
    /// Shorter than the header.
    #[error("a system call's request of {length} bytes has no whole header")]
    Short {
        /// Bytes that came.
        length: usize,
    },
    /// A call that is not carried.
    #[error("system call {nr} may not be requested by another node")]
    NotPlain {
        /// Its number.
        nr: u32,
    },
    /// A length that contradicts the table or the arguments.
    #[error("system call {nr} has an invalid length for argument {argument}")]
    Length {
        /// The call's number.
        nr: u32,
        /// The argument, 0 to 5.
        argument: u8,
    },
    /// A string without an end.
    #[error("system call {nr} came with an unterminated string as argument {argument}")]
    Unterminated {
        /// The call's number.
        nr: u32,
        /// The argument, 0 to 5.
        argument: u8,
    },
    /// Larger than any request may be.
    #[error("system call {nr} needs more room than any call may")]
    TooLarge {
        /// The call's number.
        nr: u32,
    },
    /// Not as many bytes as its header implies.
    #[error("system call {nr} came with {length} bytes instead of {expected}")]
    WrongLength {
        /// The call's number.
        nr: u32,
        /// Bytes that came.
        length: usize,
        /// Bytes that the header implies.
        expected: usize,
    },
    /// The buffer given to [`DecodedCall::relocate`] or [`DecodedCall::reply`] is too
    /// small: the caller's mistake, not the peer's.
    #[error("a buffer of {length} bytes was given where {needed} are needed")]
    Buffer {
        /// What was given.
        length: usize,
        needed: usize,
    },
}

/// A part of the buffer that goes back with the reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Output {
    /// The piece's number.
    pub piece: u32,
    /// Where it is in the buffer, bytes from the start.
    pub offset: usize,
    /// Bytes that were produced.
    pub length: usize,
}

impl DecodedCall {
    /// Checks a request; `bytes` is all of it.
    pub fn decode(bytes: &[u8]) -> Result<DecodedCall, Malformed> {
        let (nr, args) = DecodedCall::call(bytes)?;
        match table::classify(nr.into(), &args) {
            Class::Plain(plain) => DecodedCall::decode_plain(plain, bytes),
            _ => Err(Malformed::NotPlain { nr }),
        }
    }

    /// The number and the arguments of a request.
    fn call(bytes: &[u8]) -> Result<(u32, [u64; 6]), Malformed> {
        let header = bytes.get(..HEADER).ok_or(Malformed::Short {
            length: bytes.len(),
        })?;
        let args = core::array::from_fn(|index| word_u64(header, 8 + 8 * index));
        Ok((word_u32(header, 0), args))
    }

    /// [`DecodedCall::decode`] of a request that this process gathered from a call of
    /// this class.
    pub fn decode_plain(plain: Plain, bytes: &[u8]) -> Result<DecodedCall, Malformed> {
        let (nr, args) = DecodedCall::call(bytes)?;
        let lengths: [u32; PIECES_MAX] =
            core::array::from_fn(|index| word_u32(bytes, 56 + 4 * index));
        let shape = Shape::of(&plain);
        let plan = Plan::new(&shape, &lengths).ok_or(Malformed::TooLarge { nr })?;
        if plan.sent != bytes.len() {
            return Err(Malformed::WrongLength {
                nr,
                length: bytes.len(),
                expected: plan.sent,
            });
        }
        let arrived = DecodedCall {
            nr,
            args,
            plain,
            plan,
        };
        for piece in arrived.plan.pieces() {
            arrived.check(piece, bytes)?;
        }
        Ok(arrived)
    }
    /// The system call's number.
    pub fn nr(&self) -> u32 {
        self.nr
    }
    /// How it is carried: whether it may block, which arguments are descriptors.
    pub fn plain(&self) -> &Plain {
        &self.plain
    }
    /// The arguments as they came. Those that are pointers are meaningless.
    pub fn args(&self) -> &[u64; 6] {
        &self.args
    }
    /// Bytes of buffer that [`DecodedCall::relocate`] needs.
    pub fn space(&self) -> usize {
        self.plan.space
    }
    /// A string argument, without its NUL; `None` when it is NULL or no string.
    /// `buffer` is the request.
    pub fn string<'a>(&self, argument: u8, buffer: &'a [u8]) -> Option<&'a [u8]> {
        let piece = self.plan.pointed_to(argument)?;
        if !piece.is_present() || !matches!(piece.spec.role, Role::String { .. }) {
            return None;
        }
        buffer.get(piece.range())?.split(|&byte| byte == 0).next()
    }

    /// Checks that the kernel will stay inside the piece.
    fn check(&self, piece: &Piece, bytes: &[u8]) -> Result<(), Malformed> {
        let Spec { argument, role, .. } = piece.spec;
        let wrong = Err(Malformed::Length {
            nr: self.nr,
            argument,
        });
        let fixed = piece.spec.fixed_length(&self.args);
        if piece.is_present() && fixed.is_some_and(|fixed| fixed != u64::from(piece.length)) {
            return wrong;
        }
        let together = |other| {
            let other = self.plan.part(argument, other);
            other.is_some_and(|other| other.is_present() == piece.is_present())
        };
        match role {
            Role::String { max, .. } if piece.is_present() => {
                if piece.length == 0 || piece.length > max.into() {
                    return wrong;
                }
                if bytes[piece.range()].last() != Some(&0) {
                    return Err(Malformed::Unterminated {
                        nr: self.nr,
                        argument,
                    });
                }
            }
            Role::VectorData(count)
                if !together(Role::VectorOfOne)
                    || piece.is_present() && self.args[usize::from(count)] != 1 =>
            {
                return wrong;
            }
            Role::MessageData if !together(Role::MessageHeader) => return wrong,
            Role::Name | Role::Control if piece.is_present() => {
                let header = self.plan.part(argument, Role::MessageHeader);
                let too_long = role == Role::Name && piece.length > NAME_MAX;
                if too_long || !header.is_some_and(Piece::is_present) {
                    return wrong;
                }
            }
            Role::Mask(None) if !together(Role::MaskHeader) => return wrong,
            Role::Mask(Some(size))
                if piece.is_present() && self.args[usize::from(size)] != u64::from(MASK) =>
            {
                return wrong;
            }
            _ => {}
        }
        Ok(())
    }

    /// Prepares `buffer`, which begins with the request and will be at address
    /// `base` (a multiple of a page for files opened with `O_DIRECT`), and gives
    /// the arguments for the system call.
    pub fn relocate(&self, buffer: &mut [u8], base: u64) -> Result<[u64; 6], Malformed> {
        self.fits(buffer)?;
        for piece in self.plan.pieces().iter().filter(|p| p.is_present()) {
            self.fill(piece, buffer, base);
        }
        let mut words = self.args;
        for (index, arg) in self.plain.args.iter().enumerate() {
            if matches!(arg, Arg::Int | Arg::Descriptor) {
                continue;
            }
            let piece = self.plan.pointed_to(index as u8);
            words[index] = piece
                .filter(|p| p.is_present())
                .map_or(0, |p| base.wrapping_add(p.offset.into()));
        }
        Ok(words)
    }
    fn fits(&self, buffer: &[u8]) -> Result<(), Malformed> {
        if buffer.len() < self.plan.space {
            return Err(Malformed::Buffer {
                length: buffer.len(),
                needed: self.plan.space,
            });
        }
        Ok(())
    }
    /// Brings one piece into the form in which the kernel wants it.
    fn fill(&self, piece: &Piece, buffer: &mut [u8], base: u64) {
        /// Outputs up to this size start as zeroes; larger ones are data, of
        /// which only what was produced goes back.
        const CLEARED_MAX: u32 = 4096;
        let argument = piece.spec.argument;
        let at = piece.offset as usize;
        if piece.spec.direction == Direction::Out && piece.length <= CLEARED_MAX {
            buffer[piece.range()].fill(0);
        }
        match piece.spec.role {
            Role::MaskHeader => {
                put(buffer, at, self.address(argument, Role::Mask(None), base));
                put(buffer, at + 8, MASK.into());
            }
            Role::VectorOfOne => {
                let data = self.plan.pieces().iter().find(|p| {
                    p.spec.argument == argument && matches!(p.spec.role, Role::VectorData(_))
                });
                if let Some(data) = data {
                    put(buffer, at, base.wrapping_add(data.offset.into()));
                    put(buffer, at + 8, data.length.into());
                }
            }
            Role::MessageHeader => self.fill_message(argument, at, buffer, base),
            // The kernel believes the length in memory, so it must not exceed
            // the room there is.
            Role::Bytes(Length::Pointed(index)) => {
                if let Some(length) = self.plan.pointed_to(index).filter(|p| p.is_present()) {
                    let at = length.offset as usize;
                    let claimed = word_u32(buffer, at).min(piece.length);
                    buffer[at..at + 4].copy_from_slice(&claimed.to_le_bytes());
                }
            }
            _ => {}
        }
    }
    fn fill_message(&self, argument: u8, at: usize, buffer: &mut [u8], base: u64) {
        let length = |role| {
            let piece = self.plan.part(argument, role).filter(|p| p.is_present());
            piece.map_or(0, |p| u64::from(p.length))
        };
        let vector = at + MESSAGE as usize;
        buffer[at..vector].fill(0);
        put(buffer, at, self.address(argument, Role::Name, base));
        put(buffer, at + 8, length(Role::Name));
        put(buffer, at + 16, base.wrapping_add(vector as u64));
        put(buffer, at + 24, 1);
        put(buffer, at + 32, self.address(argument, Role::Control, base));
        put(buffer, at + 40, length(Role::Control));
        put(
            buffer,
            vector,
            self.address(argument, Role::MessageData, base),
        );
        put(buffer, vector + 8, length(Role::MessageData));
    }
    /// Where a part of an argument will be; 0 when it is absent.
    fn address(&self, argument: u8, role: Role, base: u64) -> u64 {
        let piece = self.plan.part(argument, role).filter(|p| p.is_present());
        piece.map_or(0, |p| base.wrapping_add(p.offset.into()))
    }

    /// The parts of `buffer` that go back after the call returned `result`.
    pub fn outputs<'a>(
        &'a self,
        result: i64,
        buffer: &'a [u8],
    ) -> impl Iterator<Item = Output> + 'a {
        let pieces = self.plan.pieces().iter().enumerate();
        pieces.filter_map(move |(index, piece)| {
            let length = self.produced(piece, result, buffer);
            (length > 0).then_some(Output {
                piece: index as u32,
                offset: piece.offset as usize,
                length,
            })
        })
    }
    fn produced(&self, piece: &Piece, result: i64, buffer: &[u8]) -> usize {
        let wanted = match piece.spec.when {
            When::Success => result >= 0,
            When::Positive => result > 0,
            When::Interrupted => result == -(errno::EINTR as i64),
            When::Quietly => true,
        };
        let goes_back = matches!(piece.spec.direction, Direction::Out | Direction::InOut);
        if !wanted || !goes_back || !piece.is_present() || buffer.len() < self.plan.space {
            return 0;
        }
        let result = u64::try_from(result).unwrap_or(0);
        let argument = piece.spec.argument;
        let header = || {
            let header = self.plan.part(argument, Role::MessageHeader);
            header.filter(|header| header.is_present())
        };
        let produced = match piece.spec.role {
            Role::Name => header().map_or(0, |h| word_u32(buffer, h.offset as usize + 8).into()),
            Role::Control => header().map_or(0, |h| word_u64(buffer, h.offset as usize + 40)),
            Role::MessageHeader => MESSAGE.into(),
            _ => match piece.spec.produced {
                Produced::All => piece.length.into(),
                Produced::Result(more) => result.saturating_add(more.into()),
                Produced::Elements(size) => result.saturating_mul(size.into()),
                Produced::Pointed(index) => self
                    .plan
                    .pointed_to(index)
                    .filter(|p| p.is_present())
                    .map_or(0, |p| word_u32(buffer, p.offset as usize).into()),
            },
        };
        produced.min(piece.length.into()) as usize
    }
    /// Writes the reply for `result` into `into`; how many bytes it has.
    pub fn reply(&self, result: i64, buffer: &[u8], into: &mut [u8]) -> Result<usize, Malformed> {
        self.fits(buffer)?;
        let (mut count, mut needed) = (0u32, REPLY_HEADER);
        for output in self.outputs(result, buffer) {
            count += 1;
            needed += OUTPUT_HEADER + output.length;
        }
        if into.len() < needed {
            return Err(Malformed::Buffer {
                length: into.len(),
                needed,
            });
        }
        put(into, 0, result as u64);
        put(into, 8, count.into());
        let mut at = REPLY_HEADER;
        for output in self.outputs(result, buffer) {
            into[at..at + 4].copy_from_slice(&output.piece.to_le_bytes());
            into[at + 4..at + 8].copy_from_slice(&(output.length as u32).to_le_bytes());
            at += OUTPUT_HEADER;
            into[at..at + output.length]
                .copy_from_slice(&buffer[output.offset..output.offset + output.length]);
            at += output.length;
        }
        Ok(needed)
    }
}

/// Writes a word at an offset that the plan has checked.
fn put(buffer: &mut [u8], at: usize, word: u64) {
    buffer[at..at + 8].copy_from_slice(&word.to_le_bytes());
}

const _: () = assert!(ABSENT > super::SPACE_MAX as u32);
