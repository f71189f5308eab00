//! What slices send each other beside pages, and how it travels.
//!
//! | kind | message | `flags` | `count` | `words` | payload |
//! | --- | --- | --- | --- | --- | --- |
//! | 128 | interrupt | 0 fixed, 1 level, 2 NMI, 3 INIT, 4 start-up | vCPU | vector, epoch | |
//! | 129 | end of interrupt | | | vector | |
//! | 130 | identity | | vCPU | identity, epoch | |
//! | 131 | register access | bit 0: write, bit 1: port | bytes, 1 to 8 | ticket, address, value | |
//! | 132 | its reply | | bytes | ticket, value | |
//! | 133 | command | | | ticket | JSON |
//! | 134 | its reply | | | ticket | JSON |
//! | 135 | ended | | | | JSON |
//! | 136 | beat | | | | |
//! | 137 to 148, 151 to 154 | about devices: see [`device`] | | | | |
//! | 149 | look at the clock | | | ticket | |
//! | 150 | its reply | | | ticket, TSC | |
//! | 155 | where a vCPU is | | vCPU | slice, epoch | |
//! | 156 | where all are | | | | the table |
//! | 157 to 162 | a vCPU moves: see [`MoveStep`] | | vCPU | slice, epoch | depends on the step |
//! | 163 | pin of the I/O APIC | bit 0: high | | pin | |
//! | 164 | serial output; its reply is a 132 | | | ticket | bytes |
//! | 165 | serial input; its reply is a 132 with the number of bytes taken | | | ticket | bytes |
//! | 166 | to a slice that joins: where all vCPUs are, and who the sender's are | | | | table and identities |
//! | 170 | a vCPU asks to move | | vCPU | slice, epoch | |
//! | 175 | the pages that a vCPU used before it left | | vCPU | slice, epoch | [runs](crate::working_set) |
//! | 176 | the access history of pages that the receiver gets, or manages | | | | [runs](crate::page_history) |
//! | 177 | the next bytes of the sender's file of a checkpoint | | | ticket | bytes |
//! | 178 | pages that a checkpoint has, which the receiver manages | | | ticket | ranges of pages |
//! | 180 | the sender takes the place of slice 0 | | | | |
//! | 181 | the sender, which had that place, goes on | | | | |
//! | 182 | wants consecutive pages of those of a 178 | | | first page, how many | |
//! | 183 | some of them | | | first page, how many follow | bytes |
//! | 184 | the sender has all pages of the checkpoint | | | | |
//! | 185 | the sender wants consecutive pages that the receiver manages | | | first page, how many | |
//! | 186 | the sender gave some of those that the receiver wanted | | | how many | |
//!
//! Fields that are not named are zero. Decoding is total: every header gives a
//! message or a named error.

pub mod chunk;
mod copy_step;
pub mod device;
#[cfg(test)]
mod tests;
mod vcpu_move;

use thiserror::Error;
use weft_platform::interrupts::{Message, VcpuLocation};
use weft_wire::Header;

pub use copy_step::CopyStep;
pub use device::{Address, DeviceMessage};
pub use vcpu_move::MoveStep;

const INTERRUPT: u8 = 128;
const END_OF_INTERRUPT: u8 = 129;
const IDENTITY: u8 = 130;
const ACCESS: u8 = 131;
const ACCESSED: u8 = 132;
const COMMAND: u8 = 133;
const REPLY: u8 = 134;
const ENDED: u8 = 135;
const BEAT: u8 = 136;
const LOOK: u8 = 149;
const SEEN: u8 = 150;
const MOVED: u8 = 155;
const LOCATIONS: u8 = 156;
const PIN: u8 = 163;
const SERIAL_OUTPUT: u8 = 164;
const SERIAL_INPUT: u8 = 165;
const INTRODUCED: u8 = 166;
const WANTS_MOVE: u8 = 170;
const WORKING_SET: u8 = 175;
const HISTORY: u8 = 176;
const SAVED: u8 = 177;
const ABSENT: u8 = 178;
const COPIED: u8 = 179;
const SUCCEEDS: u8 = 180;
const GOES_ON: u8 = 181;
const READ_PAGES: u8 = 182;
const PAGES_READ: u8 = 183;
const ALL_READ: u8 = 184;
const WANTS_PAGES: u8 = 185;
const GAVE_PAGES: u8 = 186;

const WRITE: u8 = 1;
const PORT: u8 = 2;
const HIGH: u8 = 1;

/// Where a register is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// At a guest-physical address.
    Memory,
    /// At a port.
    Port,
}

/// A register of a device, from afar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisterAccess {
    /// Address or port.
    pub address: u64,
    /// Which of the two.
    pub space: Space,
    /// Bytes, 1 to 8.
    pub size: u8,
    /// What is written, in the low bytes; none: it is read.
    pub value: Option<u64>,
}

/// What one slice sends another, other than pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SliceMessage<'a> {
    /// To a vCPU of the receiver, if it has not left.
    Interrupt {
        vcpu: u32,
        /// The epoch by which the sender routed it.
        epoch: u64,
        message: Message,
    },
    /// To the I/O APIC: a level-triggered interrupt was ended.
    EndOfInterrupt { vector: u8 },
    /// To the I/O APIC: a device drives a pin.
    Pin { pin: u8, high: bool },
    /// A vCPU of the sender answers to other names.
    Identity {
        vcpu: u32,
        /// See [`weft_platform::interrupts::PostedInterrupts::set_identity`].
        identity: u16,
        /// The epoch of the vCPU's location.
        epoch: u64,
    },
    /// A vCPU moved between two slices that are not the receiver.
    Moved {
        vcpu: u32,
        /// Where it is now.
        location: VcpuLocation,
    },
    /// To the primary: a vCPU of the sender asks to move by itself. Has no reply.
    WantsMove {
        vcpu: u32,
        /// Where it would be then.
        location: VcpuLocation,
    },
    /// To the slice to which the sender handed a vCPU over. Has no reply.
    WorkingSet {
        vcpu: u32,
        /// Where it is, or is about to come.
        location: VcpuLocation,
        /// See [`crate::working_set`].
        pages: &'a [u8],
    },
    /// To a slice that gets pages of the sender, or manages some that it has. Has no reply.
    History {
        /// See [`crate::page_history`].
        pages: &'a [u8],
    },
    /// A step of a vCPU's way to another slice.
    Move {
        step: MoveStep,
        vcpu: u32,
        /// Where it goes.
        location: VcpuLocation,
        payload: &'a [u8],
    },
    /// Where all vCPUs are at the start.
    Locations {
        /// See [`weft_platform::interrupts::Locations::to_bytes`].
        table: Vec<u8>,
    },
    /// To a slice that joins.
    Introduced {
        /// See [`crate::membership::Introduction`].
        bytes: Vec<u8>,
    },
    /// Asks for a register; answered by `Accessed` with the same ticket.
    Access {
        /// The question's number.
        ticket: u64,
        /// What is asked.
        access: RegisterAccess,
    },
    /// The reply.
    Accessed {
        /// The question's number.
        ticket: u64,
        /// What was read, in the low bytes.
        value: u64,
    },
    /// The guest wrote to the serial port; answered by `Accessed` when it was shown.
    SerialOutput { ticket: u64, bytes: &'a [u8] },
    /// A user types; answered by `Accessed` with the number of bytes that the serial port
    /// took.
    SerialInput { ticket: u64, bytes: &'a [u8] },
    /// To the primary: the next bytes of the sender's file of a checkpoint; answered by
    /// `Accessed` with an error number, or zero.
    Saved { ticket: u64, bytes: &'a [u8] },
    /// From the primary: pages that a checkpoint has, which the receiver manages; answered by
    /// `Accessed` with an error number, or zero.
    Absent {
        ticket: u64,
        /// [`super::unread_pages`] has their form.
        ranges: &'a [u8],
    },
    /// To a slice with files: read consecutive pages of one of them; answered by some `PagesRead`.
    ReadPages {
        /// The number of the first page.
        first: u64,
        /// How many.
        count: u64,
    },
    /// Some of the pages that were asked for.
    PagesRead {
        /// The number of the first page.
        first: u64,
        /// How many pages of the request follow these.
        follow: u64,
        bytes: &'a [u8],
    },
    /// To a slice with files: the sender has all pages that it reads from there.
    AllRead,
    /// To a slice that manages pages: give some consecutive ones to the sender, with their
    /// management; answered by one `GavePages`.
    WantsPages {
        /// The number of the first page.
        first: u64,
        /// How many.
        count: u64,
    },
    /// How many of the pages that the receiver wanted it manages now.
    GavePages { pages: u64 },
    /// From the primary: a step of the copy of one of its disks; answered by `Accessed` with an
    /// error number, or zero.
    Copied {
        ticket: u64,
        /// The number of the disk.
        disk: u8,
        step: CopyStep,
        /// Where on the disk, in bytes.
        offset: u64,
        bytes: &'a [u8],
    },
    /// The primary asks a secondary; answered by `Reply`.
    Command {
        /// The command's number.
        ticket: u64,
        /// [`super::commands::SliceCommand`].
        json: Vec<u8>,
    },
    Reply {
        /// The command's number.
        ticket: u64,
        /// [`super::commands::SliceReply`].
        json: Vec<u8>,
    },
    /// The sender's part of the machine asks for the end of the whole.
    Ended {
        /// `weft_machine::End`.
        json: Vec<u8>,
    },
    /// The sender lives.
    Beat,
    /// The sender takes the place of slice 0.
    Succeeds,
    /// The sender, which had that place, goes on.
    GoesOn,
    /// About a device, or one of its queues.
    Device {
        address: Address,
        message: DeviceMessage<'a>,
    },
    /// Asks for the host's TSC; answered at once by `Seen` with the same ticket.
    Look {
        /// The question's number.
        ticket: u64,
    },
    /// The reply.
    Seen {
        /// The question's number.
        ticket: u64,
        /// The sender's host's TSC, read as late as could be.
        tsc: u64,
    },
}

/// Why a frame is no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SliceMessageError {
    /// No message has this kind.
    #[error("a message of unknown kind {0}")]
    Kind(u8),
    /// A field has an invalid value, or an unused field is set.
    #[error("a message of kind {0} with invalid fields")]
    Fields(u8),
}

impl<'a> SliceMessage<'a> {
    /// The frame: its header, and what follows it.
    pub fn encode(&self) -> (Header, &[u8]) {
        let header = |kind: u8, flags: u8, count: u32, words: [u64; 3]| {
            let mut header = Header::new(kind);
            header.flags = flags;
            // vCPUs and sizes have one byte.
            header.count = count as u16;
            header.words[..3].copy_from_slice(&words);
            header
        };
        match self {
            Self::Interrupt {
                vcpu,
                epoch,
                message,
            } => {
                let (flags, vector) = match *message {
                    Message::Fixed { vector, level } => (u8::from(level), vector),
                    Message::NonMaskable => (2, 0),
                    Message::Init => (3, 0),
                    Message::StartUp { vector } => (4, vector),
                };
                let words = [vector.into(), *epoch, 0];
                (header(INTERRUPT, flags, *vcpu, words), &[])
            }
            Self::EndOfInterrupt { vector } => {
                let words = [(*vector).into(), 0, 0];
                (header(END_OF_INTERRUPT, 0, 0, words), &[])
            }
            Self::Pin { pin, high } => {
                let flags = if *high { HIGH } else { 0 };
                (header(PIN, flags, 0, [(*pin).into(), 0, 0]), &[])
            }
            Self::Identity {
                vcpu,
                identity,
                epoch,
            } => {
                let words = [(*identity).into(), *epoch, 0];
                (header(IDENTITY, 0, *vcpu, words), &[])
            }
            Self::Moved { vcpu, location } => {
                let words = [location.slice as u64, location.epoch, 0];
                (header(MOVED, 0, *vcpu, words), &[])
            }
            Self::WantsMove { vcpu, location } => {
                let words = [location.slice as u64, location.epoch, 0];
                (header(WANTS_MOVE, 0, *vcpu, words), &[])
            }
            Self::WorkingSet {
                vcpu,
                location,
                pages,
            } => {
                let words = [location.slice as u64, location.epoch, 0];
                (header(WORKING_SET, 0, *vcpu, words), pages)
            }
            Self::History { pages } => (header(HISTORY, 0, 0, [0; 3]), pages),
            Self::Move {
                step,
                vcpu,
                location,
                payload,
            } => {
                let words = [location.slice as u64, location.epoch, 0];
                (header(*step as u8, 0, *vcpu, words), payload)
            }
            Self::Locations { table } => (header(LOCATIONS, 0, 0, [0; 3]), table),
            Self::Introduced { bytes } => (header(INTRODUCED, 0, 0, [0; 3]), bytes),
            Self::Access { ticket, access } => {
                let mut flags = if access.value.is_some() { WRITE } else { 0 };
                flags |= if access.space == Space::Port { PORT } else { 0 };
                let words = [*ticket, access.address, access.value.unwrap_or(0)];
                (header(ACCESS, flags, access.size.into(), words), &[])
            }
            Self::Accessed { ticket, value } => (header(ACCESSED, 0, 0, [*ticket, *value, 0]), &[]),
            Self::SerialOutput { ticket, bytes } => {
                (header(SERIAL_OUTPUT, 0, 0, [*ticket, 0, 0]), bytes)
            }
            Self::SerialInput { ticket, bytes } => {
                (header(SERIAL_INPUT, 0, 0, [*ticket, 0, 0]), bytes)
            }
            Self::Saved { ticket, bytes } => (header(SAVED, 0, 0, [*ticket, 0, 0]), bytes),
            Self::Absent { ticket, ranges } => (header(ABSENT, 0, 0, [*ticket, 0, 0]), ranges),
            Self::ReadPages { first, count } => {
                (header(READ_PAGES, 0, 0, [*first, *count, 0]), &[])
            }
            Self::PagesRead {
                first,
                follow,
                bytes,
            } => (header(PAGES_READ, 0, 0, [*first, *follow, 0]), bytes),
            Self::AllRead => (header(ALL_READ, 0, 0, [0; 3]), &[]),
            Self::WantsPages { first, count } => {
                (header(WANTS_PAGES, 0, 0, [*first, *count, 0]), &[])
            }
            Self::GavePages { pages } => (header(GAVE_PAGES, 0, 0, [*pages, 0, 0]), &[]),
            Self::Copied {
                ticket,
                disk,
                step,
                offset,
                bytes,
            } => {
                let what = u64::from(*disk) << 8 | step.code();
                (header(COPIED, 0, 0, [*ticket, what, *offset]), bytes)
            }
            Self::Command { ticket, json } => (header(COMMAND, 0, 0, [*ticket, 0, 0]), json),
            Self::Reply { ticket, json } => (header(REPLY, 0, 0, [*ticket, 0, 0]), json),
            Self::Ended { json } => (header(ENDED, 0, 0, [0; 3]), json),
            Self::Beat => (header(BEAT, 0, 0, [0; 3]), &[]),
            Self::Succeeds => (header(SUCCEEDS, 0, 0, [0; 3]), &[]),
            Self::GoesOn => (header(GOES_ON, 0, 0, [0; 3]), &[]),
            Self::Device { address, message } => message.encode(*address),
            Self::Look { ticket } => (header(LOOK, 0, 0, [*ticket, 0, 0]), &[]),
            Self::Seen { ticket, tsc } => (header(SEEN, 0, 0, [*ticket, *tsc, 0]), &[]),
        }
    }

    /// The message that a frame is.
    pub fn decode(header: &Header, payload: &'a [u8]) -> Result<Self, SliceMessageError> {
        let kind = header.kind;
        let impossible = SliceMessageError::Fields(kind);
        let [first, second, third, ..] = header.words;
        let byte = |word: u64| u8::try_from(word).map_err(|_| impossible);
        let vcpu = u32::from(header.count);
        let message = match kind {
            INTERRUPT => Self::Interrupt {
                vcpu,
                epoch: second,
                message: match header.flags {
                    0 | 1 => Message::Fixed {
                        vector: byte(first)?,
                        level: header.flags == 1,
                    },
                    2 => Message::NonMaskable,
                    3 => Message::Init,
                    4 => Message::StartUp {
                        vector: byte(first)?,
                    },
                    _ => return Err(impossible),
                },
            },
            END_OF_INTERRUPT => Self::EndOfInterrupt {
                vector: byte(first)?,
            },
            PIN => Self::Pin {
                pin: byte(first)?,
                high: header.flags & HIGH != 0,
            },
            IDENTITY => Self::Identity {
                vcpu,
                identity: u16::try_from(first).map_err(|_| impossible)?,
                epoch: second,
            },
            MOVED => Self::Moved {
                vcpu,
                location: VcpuLocation {
                    slice: byte(first)?.into(),
                    epoch: second,
                },
            },
            WANTS_MOVE => Self::WantsMove {
                vcpu,
                location: VcpuLocation {
                    slice: byte(first)?.into(),
                    epoch: second,
                },
            },
            WORKING_SET => Self::WorkingSet {
                vcpu,
                location: VcpuLocation {
                    slice: byte(first)?.into(),
                    epoch: second,
                },
                pages: payload,
            },
            HISTORY => Self::History { pages: payload },
            MoveStep::FIRST..=MoveStep::LAST => Self::Move {
                step: MoveStep::of_kind(kind).ok_or(SliceMessageError::Kind(kind))?,
                vcpu,
                location: VcpuLocation {
                    slice: byte(first)?.into(),
                    epoch: second,
                },
                payload,
            },
            LOCATIONS => Self::Locations {
                table: payload.to_vec(),
            },
            INTRODUCED => Self::Introduced {
                bytes: payload.to_vec(),
            },
            ACCESS => Self::Access {
                ticket: first,
                access: RegisterAccess {
                    address: second,
                    space: match header.flags & PORT {
                        0 => Space::Memory,
                        _ => Space::Port,
                    },
                    size: match header.count {
                        size @ 1..=8 => size as u8,
                        _ => return Err(impossible),
                    },
                    value: (header.flags & WRITE != 0).then_some(third),
                },
            },
            ACCESSED => Self::Accessed {
                ticket: first,
                value: second,
            },
            SERIAL_OUTPUT => Self::SerialOutput {
                ticket: first,
                bytes: payload,
            },
            SERIAL_INPUT => Self::SerialInput {
                ticket: first,
                bytes: payload,
            },
            SAVED => Self::Saved {
                ticket: first,
                bytes: payload,
            },
            ABSENT => Self::Absent {
                ticket: first,
                ranges: payload,
            },
            READ_PAGES => Self::ReadPages {
                first,
                count: second,
            },
            PAGES_READ => Self::PagesRead {
                first,
                follow: second,
                bytes: payload,
            },
            ALL_READ => Self::AllRead,
            WANTS_PAGES => Self::WantsPages {
                first,
                count: second,
            },
            GAVE_PAGES => Self::GavePages { pages: first },
            COPIED => Self::Copied {
                ticket: first,
                disk: byte(second >> 8)?,
                step: CopyStep::from_code(second & 0xff).ok_or(impossible)?,
                offset: third,
                bytes: payload,
            },
            COMMAND => Self::Command {
                ticket: first,
                json: payload.to_vec(),
            },
            REPLY => Self::Reply {
                ticket: first,
                json: payload.to_vec(),
            },
            ENDED => Self::Ended {
                json: payload.to_vec(),
            },
            BEAT => Self::Beat,
            SUCCEEDS => Self::Succeeds,
            GOES_ON => Self::GoesOn,
            device::FIRST..=device::LAST | device::FIRST_OF_NETWORKS..=device::LAST_OF_NETWORKS => {
                let (address, message) = DeviceMessage::decode(header, payload)?;
                Self::Device { address, message }
            }
            LOOK => Self::Look { ticket: first },
            SEEN => Self::Seen {
                ticket: first,
                tsc: second,
            },
            _ => return Err(SliceMessageError::Kind(kind)),
        };
        // What means nothing is zero: then the same frame comes out again. A payload
        // is either all of what came or none.
        let (mut canonical, rest) = message.encode();
        canonical.length = header.length;
        if canonical != *header || rest.len() != payload.len() {
            return Err(impossible);
        }
        Ok(message)
    }
}
