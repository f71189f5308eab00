//! What slices send each other about devices, and how it travels.
//!
//! | kind | message | `flags` | `words` | payload |
//! | --- | --- | --- | --- | --- |
//! | 137 | described | | | JSON |
//! | 138 | doorbells | bit 0: there are some | ticket, address, queues | |
//! | 139 | route | bit 0: there is one | ticket, address, data | |
//! | 140 | seen | | ticket | |
//! | 141 | activate | | | JSON |
//! | 142 | stop | | | |
//! | 143 | stopped | | | JSON |
//! | 144 | kick | | | |
//! | 145 | used | | | |
//! | 146 | broken | | | text |
//! | 147 | ask | operation, bit 7: durable | slot, position, offset, length | data of a write |
//! | 148 | answered | the same | the same, status | data of a read |
//! | 151 | frames | | | a batch of a network's frames |
//! | 152 | taken | | bytes of batches | |
//! | 153 | use | | features, pairs | |
//! | 154 | configured | | | all of the device's configuration |
//!
//! `count` has the device in its upper byte, and a queue or queue group in its lower one.

use std::borrow::Cow;

use weft_virtio::block::{Operation, Status};
use weft_virtio::net::Usage;
use weft_wire::Header;

use super::SliceMessageError;
use super::chunk::{Chunk, ChunkReply};

/// The kinds, first and last of each row.
pub(super) const FIRST: u8 = DESCRIBED;
pub(super) const LAST: u8 = ANSWERED;
pub(super) const FIRST_OF_NETWORKS: u8 = FRAMES;
pub(super) const LAST_OF_NETWORKS: u8 = CONFIGURED;
const DESCRIBED: u8 = 137;
const DOORBELLS: u8 = 138;
const ROUTE: u8 = 139;
const SEEN: u8 = 140;
const ACTIVATE: u8 = 141;
const STOP: u8 = 142;
const STOPPED: u8 = 143;
const KICK: u8 = 144;
const USED: u8 = 145;
const BROKEN: u8 = 146;
const ASK: u8 = 147;
const ANSWERED: u8 = 148;
const FRAMES: u8 = 151;
const TAKEN: u8 = 152;
const USE: u8 = 153;
const CONFIGURED: u8 = 154;

const DURABLE: u8 = 1 << 7;

/// A queue or a queue group of a device, or the device itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// Devices are numbered in the order in which the guest finds them.
    pub device: u8,
    /// Zero where the device itself is meant.
    pub index: u8,
}

impl Address {
    /// Of a queue or queue group.
    pub fn new(device: u8, index: u16) -> Self {
        // No device here has more than 33.
        let index = index as u8;
        Self { device, index }
    }

    /// The queue or queue group.
    pub fn index(self) -> u16 {
        self.index.into()
    }

    fn count(self) -> u16 {
        u16::from(self.device) << 8 | u16::from(self.index)
    }
}

/// What one slice sends another about a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceMessage<'a> {
    /// What the sender's device is; before everything else on a link.
    Described(Vec<u8>),
    /// Where vCPUs notify the device; answered by `Seen`.
    Doorbells {
        /// The reply's.
        ticket: u64,
        /// Guest-physical; none: nowhere.
        address: Option<u64>,
        /// How many there are.
        queues: u64,
    },
    /// The message of a queue's interrupt, while it may be sent; answered by `Seen`.
    Route {
        /// The reply's.
        ticket: u64,
        /// Address and data.
        message: Option<(u64, u32)>,
    },
    /// The reply to both.
    Seen {
        /// What was seen.
        ticket: u64,
    },
    /// Serve this queue group: [`Activation`](crate::remote_devices::Activation).
    Activate(Vec<u8>),
    /// Stop it; answered by `Stopped`.
    Stop,
    /// It stopped: [`Stopped`](crate::remote_devices::Stopped).
    Stopped(Vec<u8>),
    /// The driver notified the queue.
    Kick,
    /// The queue's buffers were used, and the driver must be notified.
    Used,
    /// The device cannot go on, for this reason.
    Broken(Vec<u8>),
    /// A chunk of a disk request, with the data of a write.
    Ask {
        chunk: Chunk,
        /// The bytes to write.
        data: Cow<'a, [u8]>,
    },
    Answered(ChunkReply<'a>),
    /// Frames of a pair, to its network or from it, as
    /// [`weft_virtio::net`] puts them together.
    Frames(Cow<'a, [u8]>),
    /// Frames that were sent are done with.
    Taken {
        /// Bytes of their batches.
        bytes: u64,
    },
    /// The driver of a network uses this now.
    Use(Usage),
    /// What the driver reads as the device's configuration is this now.
    Configured(Vec<u8>),
}

/// The frame of a batch of a network's frames, which follows.
pub(crate) fn frames(pair: Address) -> Header {
    let mut header = Header::new(FRAMES);
    header.count = pair.count();
    header
}

/// The frame of a chunk of a disk request; the data of a write follow.
pub(crate) fn ask(address: Address, chunk: &Chunk) -> Header {
    chunk_header(ASK, address, chunk)
}

/// The frame of its reply; the data of a read follow.
pub(crate) fn answered(address: Address, chunk: &Chunk, status: Status) -> Header {
    let mut header = chunk_header(ANSWERED, address, chunk);
    header.words[4] = status as u64;
    header
}

fn chunk_header(kind: u8, address: Address, chunk: &Chunk) -> Header {
    let mut header = Header::new(kind);
    let operation = match chunk.operation {
        Operation::Read => 0,
        Operation::Write => 1,
        Operation::Flush => 2,
        Operation::Discard => 3,
        Operation::Zero { unmap: false } => 4,
        Operation::Zero { unmap: true } => 5,
    };
    header.flags = operation | if chunk.durable { DURABLE } else { 0 };
    header.count = address.count();
    header.words = [
        chunk.slot.into(),
        chunk.position,
        chunk.offset,
        chunk.length.into(),
        0,
    ];
    header
}

fn chunk_of(header: &Header) -> Result<Chunk, SliceMessageError> {
    let impossible = SliceMessageError::Fields(header.kind);
    let number = |word: u64| u32::try_from(word).map_err(|_| impossible);
    let [slot, position, offset, length, _] = header.words;
    Ok(Chunk {
        slot: number(slot)?,
        position,
        operation: match header.flags & !DURABLE {
            0 => Operation::Read,
            1 => Operation::Write,
            2 => Operation::Flush,
            3 => Operation::Discard,
            4 => Operation::Zero { unmap: false },
            5 => Operation::Zero { unmap: true },
            _ => return Err(impossible),
        },
        durable: header.flags & DURABLE != 0,
        offset,
        length: number(length)?,
    })
}

impl<'a> DeviceMessage<'a> {
    /// The frame: its header, and what follows it.
    pub fn encode(&self, address: Address) -> (Header, &[u8]) {
        let plain = |kind: u8, flag: bool, words: [u64; 3]| {
            let mut header = Header::new(kind);
            header.flags = flag.into();
            header.count = address.count();
            header.words[..3].copy_from_slice(&words);
            header
        };
        let bare = |kind| plain(kind, false, [0; 3]);
        match self {
            Self::Described(json) => (bare(DESCRIBED), json),
            Self::Doorbells {
                ticket,
                address: place,
                queues,
            } => {
                let words = [*ticket, place.unwrap_or(0), *queues];
                (plain(DOORBELLS, place.is_some(), words), &[])
            }
            Self::Route { ticket, message } => {
                let (place, data) = message.unwrap_or((0, 0));
                let words = [*ticket, place, data.into()];
                (plain(ROUTE, message.is_some(), words), &[])
            }
            Self::Seen { ticket } => (plain(SEEN, false, [*ticket, 0, 0]), &[]),
            Self::Activate(json) => (bare(ACTIVATE), json),
            Self::Stop => (bare(STOP), &[]),
            Self::Stopped(json) => (bare(STOPPED), json),
            Self::Kick => (bare(KICK), &[]),
            Self::Used => (bare(USED), &[]),
            Self::Broken(text) => (bare(BROKEN), text),
            Self::Ask { chunk, data } => (ask(address, chunk), data),
            Self::Answered(reply) => {
                let ChunkReply {
                    chunk,
                    status,
                    data,
                } = reply;
                (answered(address, chunk, *status), data)
            }
            Self::Frames(batch) => (frames(address), batch),
            Self::Taken { bytes } => (plain(TAKEN, false, [*bytes, 0, 0]), &[]),
            Self::Use(Usage { features, pairs }) => {
                (plain(USE, false, [*features, (*pairs).into(), 0]), &[])
            }
            Self::Configured(bytes) => (bare(CONFIGURED), bytes),
        }
    }

    /// The message that a frame of one of these kinds is. What means nothing is looked
    /// at by the caller.
    pub fn decode(
        header: &Header,
        payload: &'a [u8],
    ) -> Result<(Address, Self), SliceMessageError> {
        let impossible = SliceMessageError::Fields(header.kind);
        let [first, second, third, _, fifth] = header.words;
        let there = header.flags & 1 != 0;
        let address = Address {
            device: (header.count >> 8) as u8,
            index: header.count as u8,
        };
        let message = match header.kind {
            DESCRIBED => Self::Described(payload.to_vec()),
            DOORBELLS => Self::Doorbells {
                ticket: first,
                address: there.then_some(second),
                queues: third,
            },
            ROUTE => {
                let data = u32::try_from(third).map_err(|_| impossible)?;
                Self::Route {
                    ticket: first,
                    message: there.then_some((second, data)),
                }
            }
            SEEN => Self::Seen { ticket: first },
            ACTIVATE => Self::Activate(payload.to_vec()),
            STOP => Self::Stop,
            STOPPED => Self::Stopped(payload.to_vec()),
            KICK => Self::Kick,
            USED => Self::Used,
            BROKEN => Self::Broken(payload.to_vec()),
            ASK => Self::Ask {
                chunk: chunk_of(header)?,
                data: payload.into(),
            },
            ANSWERED => Self::Answered(ChunkReply {
                chunk: chunk_of(header)?,
                status: match fifth {
                    0 => Status::Ok,
                    1 => Status::IoError,
                    2 => Status::Unsupported,
                    _ => return Err(impossible),
                },
                data: payload.into(),
            }),
            FRAMES => Self::Frames(payload.into()),
            TAKEN => Self::Taken { bytes: first },
            USE => Self::Use(Usage {
                features: first,
                pairs: u16::try_from(second).map_err(|_| impossible)?,
            }),
            CONFIGURED => Self::Configured(payload.to_vec()),
            kind => return Err(SliceMessageError::Kind(kind)),
        };
        Ok((address, message))
    }
}
