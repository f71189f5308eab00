//! Messages come out as they went in, and invalid headers are refused.

use super::chunk::{Chunk, ChunkReply};
use super::*;
use weft_virtio::block::{Operation, Status};
use weft_virtio::net::Usage;

fn messages() -> Vec<SliceMessage<'static>> {
    let interrupt = |message| SliceMessage::Interrupt {
        vcpu: 254,
        epoch: 3,
        message,
    };
    let access = |space, value| SliceMessage::Access {
        ticket: u64::MAX,
        access: RegisterAccess {
            address: 0xfec0_0010,
            space,
            size: 8,
            value,
        },
    };
    vec![
        interrupt(Message::Fixed {
            vector: 255,
            level: true,
        }),
        interrupt(Message::Fixed {
            vector: 16,
            level: false,
        }),
        interrupt(Message::NonMaskable),
        interrupt(Message::Init),
        interrupt(Message::StartUp { vector: 0x9a }),
        SliceMessage::EndOfInterrupt { vector: 0x31 },
        SliceMessage::Pin {
            pin: 23,
            high: true,
        },
        SliceMessage::Pin {
            pin: 0,
            high: false,
        },
        SliceMessage::SerialOutput {
            ticket: 5,
            bytes: b"login: ",
        },
        SliceMessage::SerialInput {
            ticket: u64::MAX,
            bytes: b"",
        },
        SliceMessage::Saved {
            ticket: 6,
            bytes: b"WEFTPAGE",
        },
        SliceMessage::Absent {
            ticket: 7,
            ranges: &[1; 16],
        },
        SliceMessage::ReadPages {
            first: 1 << 40,
            count: 256,
        },
        SliceMessage::PagesRead {
            first: 0x10_0000,
            follow: 255,
            bytes: b"page",
        },
        SliceMessage::AllRead,
        SliceMessage::WantsPages {
            first: 1 << 34,
            count: 64,
        },
        SliceMessage::GavePages { pages: 63 },
        SliceMessage::Copied {
            ticket: 8,
            disk: 3,
            step: CopyStep::Write,
            offset: 1 << 40,
            bytes: b"part",
        },
        SliceMessage::Copied {
            ticket: 9,
            disk: 255,
            step: CopyStep::Close,
            offset: 0,
            bytes: b"",
        },
        SliceMessage::Identity {
            vcpu: 3,
            identity: 0x208,
            epoch: u64::MAX,
        },
        SliceMessage::Moved {
            vcpu: 3,
            location: VcpuLocation {
                slice: 15,
                epoch: 1 << 47,
            },
        },
        SliceMessage::WorkingSet {
            vcpu: 254,
            location: VcpuLocation {
                slice: 255,
                epoch: u64::MAX,
            },
            pages: &[1; 16],
        },
        SliceMessage::History { pages: &[2; 24] },
        SliceMessage::WantsMove {
            vcpu: 7,
            location: VcpuLocation { slice: 2, epoch: 9 },
        },
        SliceMessage::Move {
            step: MoveStep::TakeOver,
            vcpu: 254,
            location: VcpuLocation {
                slice: 15,
                epoch: 1 << 47,
            },
            payload: &[7; 900],
        },
        SliceMessage::Locations { table: vec![1; 24] },
        SliceMessage::Introduced { bytes: vec![1; 36] },
        access(Space::Memory, None),
        access(Space::Port, Some(u64::MAX)),
        SliceMessage::Accessed {
            ticket: 7,
            value: 9,
        },
        SliceMessage::Command {
            ticket: 1,
            json: b"{}".to_vec(),
        },
        SliceMessage::Reply {
            ticket: 1,
            json: b"[]".to_vec(),
        },
        SliceMessage::Ended { json: vec![1; 99] },
        SliceMessage::Beat,
        SliceMessage::Succeeds,
        SliceMessage::GoesOn,
        SliceMessage::Look { ticket: 3 },
        SliceMessage::Seen {
            ticket: 3,
            tsc: u64::MAX,
        },
    ]
}

fn device_messages() -> Vec<SliceMessage<'static>> {
    let chunk = Chunk {
        slot: 255,
        position: 1 << 20,
        operation: Operation::Zero { unmap: true },
        durable: true,
        offset: 1 << 40,
        length: 32 << 20,
    };
    let ticket = 9;
    let messages = [
        DeviceMessage::Described(b"{}".to_vec()),
        DeviceMessage::Doorbells {
            ticket,
            address: Some(4 << 30),
            queues: 3,
        },
        DeviceMessage::Route {
            ticket,
            message: Some((0xfee0_0000, 0x41)),
        },
        DeviceMessage::Route {
            ticket,
            message: None,
        },
        DeviceMessage::Seen { ticket },
        DeviceMessage::Activate(b"{}".to_vec()),
        DeviceMessage::Stop,
        DeviceMessage::Stopped(b"[]".to_vec()),
        DeviceMessage::Kick,
        DeviceMessage::Used,
        DeviceMessage::Broken(b"why".to_vec()),
        DeviceMessage::Ask {
            chunk,
            data: vec![7; 512].into(),
        },
        DeviceMessage::Answered(ChunkReply {
            chunk,
            status: Status::IoError,
            data: Vec::new().into(),
        }),
        DeviceMessage::Frames(vec![13; 17].into()),
        DeviceMessage::Taken { bytes: 1 << 20 },
        DeviceMessage::Use(Usage {
            features: u64::MAX,
            pairs: 8,
        }),
        DeviceMessage::Configured(vec![1; 12]),
    ];
    let address = Address::new(30, 15);
    let message = |message| SliceMessage::Device { address, message };
    messages.map(message).into()
}

#[test]
fn notes_come_out_as_they_went_in() {
    for message in messages().into_iter().chain(device_messages()) {
        let (header, payload) = message.encode();
        assert_eq!(SliceMessage::decode(&header, payload), Ok(message.clone()));
    }
}

#[test]
fn other_frames_are_refused() {
    let kind = Header::new(200);
    assert_eq!(
        SliceMessage::decode(&kind, &[]),
        Err(SliceMessageError::Kind(200))
    );
    for message in messages() {
        let (mut header, payload) = message.encode();
        header.words[4] = 1;
        let fields = Err(SliceMessageError::Fields(header.kind));
        assert_eq!(SliceMessage::decode(&header, payload), fields);
    }
    for message in device_messages() {
        let (mut header, payload) = message.encode();
        header.words[4] = 77;
        let fields = Err(SliceMessageError::Fields(header.kind));
        assert_eq!(SliceMessage::decode(&header, payload), fields);
    }
    let mut size = Header::new(ACCESS);
    size.count = 9;
    assert_eq!(
        SliceMessage::decode(&size, &[]),
        Err(SliceMessageError::Fields(ACCESS))
    );
    let mut vector = Header::new(INTERRUPT);
    vector.words[0] = 256;
    let refused = Err(SliceMessageError::Fields(INTERRUPT));
    assert_eq!(SliceMessage::decode(&vector, &[]), refused);
}
