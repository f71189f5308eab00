//! The pieces of a call: derived from the table, laid out by their lengths, in
//! the same way by caller and home.

use super::{HEADER, SPACE_MAX, VECTOR_MAX};
use crate::table::{Arg, Length, Plain, Produced, When};

/// Most pieces of any call: `pselect6` has six.
pub const PIECES_MAX: usize = 8;
/// The length of a piece whose pointer is NULL.
pub const ABSENT: u32 = u32::MAX;
/// Size of the kernel's signal mask, bytes.
pub const MASK: u32 = 8;
/// `struct iovec`.
pub const IOVEC: u32 = 16;
/// `struct msghdr`.
pub const MESSAGE: u32 = 56;
/// Most bytes of an address in a `struct msghdr` (`struct sockaddr_storage`).
pub const NAME_MAX: u32 = 128;

/// Which way a piece travels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// With the request.
    In,
    /// With the reply.
    Out,
    /// With both.
    InOut,
    /// With neither: home fills it in.
    Scratch,
}

/// What a piece is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Plain bytes.
    Bytes(Length),
    /// A string; whether one that is too long is cut.
    String { max: u16, cut: bool },
    /// The concatenated data of a vector; the argument that counts it.
    VectorData(u8),
    /// The vector of one that describes it.
    VectorOfOne,
    /// The address of a message.
    Name,
    /// The concatenated data of a message.
    MessageData,
    /// The control data of a message.
    Control,
    /// The `struct msghdr`, with the vector of one behind it.
    MessageHeader,
    /// A signal mask; the argument that says its size, if one does.
    Mask(Option<u8>),
    /// The pointer and size that `pselect6` wants.
    MaskHeader,
}

/// A piece without its length.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub argument: u8,
    pub role: Role,
    pub direction: Direction,
    pub produced: Produced,
    pub when: When,
}

#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub spec: Spec,
    /// From the start of the buffer.
    pub offset: u32,
    /// Bytes; [`ABSENT`] when the pointer is NULL.
    pub length: u32,
}

impl Piece {
    pub fn is_present(&self) -> bool {
        self.length != ABSENT
    }
    /// Its bytes in the buffer; empty when absent.
    pub fn range(&self) -> core::ops::Range<usize> {
        let start = self.offset as usize;
        let length = if self.is_present() { self.length } else { 0 };
        start..start + length as usize
    }
}

impl Spec {
    const fn new(argument: u8, role: Role, direction: Direction) -> Spec {
        Spec {
            argument,
            role,
            direction,
            produced: Produced::All,
            when: When::Success,
        }
    }
    /// Whether this is what a long transfer cuts.
    pub fn is_bulk(&self, plain: &Plain) -> bool {
        let of_split = plain.split.is_some_and(|s| s.data == self.argument);
        of_split
            && matches!(
                self.role,
                Role::Bytes(_) | Role::VectorData(_) | Role::MessageData
            )
    }
    /// Whether the pointer of the argument points to this piece at home.
    pub fn is_pointed_to(&self) -> bool {
        !matches!(
            self.role,
            Role::VectorData(_) | Role::Name | Role::MessageData | Role::Control
        ) && self.role != Role::Mask(None)
    }
    /// The length that the table and the arguments leave no choice about.
    pub fn fixed_length(&self, args: &[u64; 6]) -> Option<u64> {
        match self.role {
            Role::Bytes(length) => argument_length(length, args),
            Role::VectorOfOne | Role::MaskHeader => Some(IOVEC.into()),
            Role::MessageHeader => Some((MESSAGE + IOVEC).into()),
            Role::Mask(_) => Some(MASK.into()),
            _ => None,
        }
    }
}

/// A length that depends on the arguments only; `None` for a pointed one. Counts
/// are taken as unsigned, so a negative one is too long for any buffer.
fn argument_length(length: Length, args: &[u64; 6]) -> Option<u64> {
    match length {
        Length::Constant(bytes) => Some(bytes.into()),
        Length::Argument(index) => Some(args[usize::from(index)]),
        Length::ArgumentPlus(index, more) => {
            Some(args[usize::from(index)].saturating_add(more.into()))
        }
        Length::Elements(index, size) => {
            Some(u64::from(args[usize::from(index)] as u32) * u64::from(size))
        }
        Length::Bits(index) => Some(u64::from(args[usize::from(index)] as u32).div_ceil(64) * 8),
        Length::Pointed(_) => None,
    }
}

/// The pieces of a call without their lengths.
pub struct Shape {
    pub specs: [Spec; PIECES_MAX],
    pub count: usize,
}

impl Shape {
    /// The pieces of a call that the table describes as `plain`.
    pub fn of(plain: &Plain) -> Shape {
        let nothing = Spec::new(0, Role::VectorOfOne, Direction::Scratch);
        let mut shape = Shape {
            specs: [nothing; PIECES_MAX],
            count: 0,
        };
        for (index, arg) in plain.args.iter().enumerate() {
            shape.add(index as u8, *arg);
        }
        shape
    }
    fn push(&mut self, spec: Spec) {
        self.specs[self.count] = spec;
        self.count += 1;
    }
    fn add(&mut self, argument: u8, arg: Arg) {
        use Direction::{In, InOut, Out, Scratch};
        let spec = |role, direction| Spec::new(argument, role, direction);
        let result = Produced::Result(0);
        match arg {
            Arg::Int | Arg::Descriptor | Arg::Ioctl | Arg::Fcntl | Arg::Prctl => {}
            Arg::In(length) => self.push(spec(Role::Bytes(length), In)),
            Arg::Out(length, produced, when) => self.push(Spec {
                produced,
                when,
                ..spec(Role::Bytes(length), Out)
            }),
            Arg::InOut(length, when) => self.push(Spec {
                when,
                ..spec(Role::Bytes(length), InOut)
            }),
            Arg::CString(max) => self.push(spec(Role::String { max, cut: false }, In)),
            Arg::CutString(max) => self.push(spec(Role::String { max, cut: true }, In)),
            Arg::InVector(count) => {
                self.push(spec(Role::VectorData(count), In));
                self.push(spec(Role::VectorOfOne, Scratch));
            }
            Arg::OutVector(count) => {
                self.push(Spec {
                    produced: result,
                    ..spec(Role::VectorData(count), Out)
                });
                self.push(spec(Role::VectorOfOne, Scratch));
            }
            Arg::InMessage => {
                self.push(spec(Role::Name, In));
                self.push(spec(Role::MessageData, In));
                self.push(spec(Role::Control, In));
                self.push(spec(Role::MessageHeader, Scratch));
            }
            Arg::OutMessage => {
                self.push(spec(Role::Name, Out));
                self.push(Spec {
                    produced: result,
                    ..spec(Role::MessageData, Out)
                });
                self.push(spec(Role::Control, Out));
                self.push(spec(Role::MessageHeader, Out));
            }
            Arg::SignalSet(size) => self.push(spec(Role::Mask(Some(size)), In)),
            Arg::PackedSignalSet => {
                self.push(spec(Role::Mask(None), In));
                self.push(spec(Role::MaskHeader, Scratch));
            }
        }
    }
}

/// The pieces of one call, with their places.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pieces: [Piece; PIECES_MAX],
    count: usize,
    /// Bytes that travel with the request, from the start of the buffer.
    pub sent: usize,
    /// Bytes that home needs, from the start of the buffer.
    pub space: usize,
}

impl Plan {
    /// Places pieces of these lengths: first what is sent, then the rest. `None`
    /// when they need more than [`SPACE_MAX`].
    pub fn new(shape: &Shape, lengths: &[u32; PIECES_MAX]) -> Option<Plan> {
        let mut plan = Plan {
            pieces: core::array::from_fn(|index| Piece {
                spec: shape.specs[index],
                offset: 0,
                length: lengths[index],
            }),
            count: shape.count,
            sent: HEADER,
            space: HEADER,
        };
        plan.place(|d| matches!(d, Direction::In | Direction::InOut))?;
        plan.sent = plan.space;
        plan.place(|d| matches!(d, Direction::Out | Direction::Scratch))?;
        Some(plan)
    }
    fn place(&mut self, wanted: impl Fn(Direction) -> bool) -> Option<()> {
        for piece in &mut self.pieces[..self.count] {
            if !wanted(piece.spec.direction) {
                continue;
            }
            let length = if piece.is_present() {
                piece.length as usize
            } else {
                0
            };
            let offset = self.space.next_multiple_of(alignment(length));
            piece.offset = offset as u32;
            self.space = offset.checked_add(length)?;
            if self.space > SPACE_MAX {
                return None;
            }
        }
        Some(())
    }
    /// The pieces in the order of the arguments.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces[..self.count]
    }
    /// The piece that the pointer in `argument` points to.
    pub fn pointed_to(&self, argument: u8) -> Option<&Piece> {
        self.pieces()
            .iter()
            .find(|p| p.spec.argument == argument && p.spec.is_pointed_to())
    }
    /// The first piece of `argument` with this role.
    pub fn part(&self, argument: u8, role: Role) -> Option<&Piece> {
        self.pieces()
            .iter()
            .find(|p| p.spec.argument == argument && p.spec.role == role)
    }
}

/// Where a piece of this length may start. Whole sectors start at a sector's
/// size, which is what a file opened with `O_DIRECT` asks for.
fn alignment(length: usize) -> usize {
    const SECTOR: usize = 512;
    if length >= SECTOR && length.is_multiple_of(SECTOR) {
        SECTOR
    } else {
        16
    }
}

/// Reads a `u32` at `offset`, which the caller has checked.
pub fn word_u32(bytes: &[u8], offset: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[offset..offset + 4]);
    u32::from_le_bytes(word)
}

/// Reads a `u64` at `offset`, which the caller has checked.
pub fn word_u64(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_le_bytes(word)
}

const _: () = assert!(VECTOR_MAX * IOVEC as u64 <= super::SLACK as u64);
const _: () = assert!(HEADER >= 56 + 4 * PIECES_MAX);
