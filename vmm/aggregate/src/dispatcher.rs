//! Takes a received slice message to the component that it is for.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, TrySendError};

use weft_coherent_memory::SharedMemory;
use weft_platform::clock::host_tsc;
use weft_platform::interrupts::{InterruptRouter, Locations, VcpuLocation};

use super::PRIMARY;
use super::commands::SliceReply;
use super::membership::Membership;
use super::message::SliceMessage;
use super::page_history;
use super::peers::{MessageHandler, Peers, Standing};
use super::pending_requests::PendingRequests;
use super::registers::{DeviceRequest, DeviceRequestSender, Wanted};
use super::remote_devices::RemoteDevices;
use super::saved_files::{Content, FileRequest, FileRequestSender};
use super::unread_pages::UnreadPages;
use super::vcpu_moves::VcpuMoves;

/// The components that messages are for. None of them waits.
pub(super) struct Dispatcher {
    pub interrupts: Arc<InterruptRouter>,
    /// Where the vCPUs are at the start.
    pub first: Locations,
    pub peers: Arc<Peers>,
    pub registers: Arc<PendingRequests<u64>>,
    pub remote_devices: Arc<RemoteDevices>,
    pub replies: Arc<PendingRequests<SliceReply>>,
    /// Readings of the primary's clock: its TSC, and this host's when the reply arrived.
    pub looks: Arc<PendingRequests<(u64, u64)>>,
    pub vcpu_moves: Arc<VcpuMoves>,
    pub membership: Arc<Membership>,
    pub memory: Arc<SharedMemory>,
    pub unread_pages: Arc<UnreadPages>,
    pub device_requests: DeviceRequestSender,
    pub file_requests: FileRequestSender,
    pub commands: SyncSender<(u64, Vec<u8>)>,
    pub ended: Box<dyn Fn(usize, Vec<u8>) + Send + Sync>,
    pub wants_move: Box<dyn Fn(usize, u32, VcpuLocation) + Send + Sync>,
}

impl Dispatcher {
    /// A peer that sends a contradiction is disconnected.
    fn validate<E: ToString>(&self, from: usize, outcome: Result<(), E>) {
        if let Err(error) = outcome {
            self.peers.lost(from, &error.to_string());
        }
    }

    fn ask_files(&self, from: usize, ticket: u64, content: Content) {
        let request = FileRequest {
            from,
            ticket,
            content,
        };
        self.queue(from, &self.file_requests, request);
    }

    fn ask_devices(&self, from: usize, ticket: u64, wanted: Wanted) {
        let request = DeviceRequest {
            from,
            ticket,
            wanted,
        };
        self.queue(from, &self.device_requests, request);
    }

    fn queue<T>(&self, from: usize, queue: &SyncSender<T>, value: T) {
        if let Err(TrySendError::Full(_)) = queue.try_send(value) {
            self.peers.lost(from, "it sends more requests than allowed");
        }
    }
}

impl MessageHandler for Dispatcher {
    fn handle(&self, from: usize, message: SliceMessage) {
        match message {
            SliceMessage::Interrupt {
                vcpu,
                epoch,
                message,
            } => self.validate(from, self.interrupts.receive(vcpu, message, epoch)),
            SliceMessage::EndOfInterrupt { vector } => self.interrupts.end_at_io_apic(vector, None),
            SliceMessage::Pin { pin, high } => self.interrupts.set_pin(pin, high),
            SliceMessage::Identity {
                vcpu,
                identity,
                epoch,
            } => self.validate(from, self.interrupts.identify(vcpu, identity, epoch)),
            // Only the primary has vCPUs moved.
            SliceMessage::Moved { vcpu, location } if from == PRIMARY => {
                match self.interrupts.moved(vcpu, location) {
                    Ok(_) => self.vcpu_moves.known(vcpu, location),
                    Err(error) => self.peers.lost(from, &error.to_string()),
                }
            }
            SliceMessage::Moved { vcpu, .. } => {
                let reason = format!("it sent the location of vCPU {vcpu}, which only node 0 may");
                self.peers.lost(from, &reason);
            }
            SliceMessage::WantsMove { vcpu, .. } if self.first.of(vcpu).is_none() => {
                let reason = format!("it asks to move vCPU {vcpu}, which does not exist");
                self.peers.lost(from, &reason);
            }
            // Its owner decides, by its own table.
            SliceMessage::WantsMove { vcpu, location } => (self.wants_move)(from, vcpu, location),
            SliceMessage::WorkingSet {
                vcpu,
                location,
                pages,
            } => self.vcpu_moves.follow(from, vcpu, location, pages),
            SliceMessage::History { pages } => {
                let learned = page_history::decode(pages);
                let learned = learned.map(|runs| self.memory.learn_history(&runs));
                self.validate(from, learned);
            }
            SliceMessage::Move {
                step,
                vcpu,
                location,
                payload,
            } => {
                let received = self
                    .vcpu_moves
                    .receive(from, step, (vcpu, location), payload);
                self.validate(from, received);
            }
            SliceMessage::Locations { table } => self.validate(from, self.first.compare(&table)),
            SliceMessage::Introduced { bytes } => {
                if let Err(reason) = self.membership.introduced(from, &bytes, &self.interrupts) {
                    self.peers.lost(from, &reason);
                }
            }
            SliceMessage::Access { ticket, access } => {
                self.ask_devices(from, ticket, Wanted::Register(access));
            }
            // Only slice 0 has the console.
            SliceMessage::SerialInput { ticket, bytes } if from == PRIMARY => {
                self.ask_devices(from, ticket, Wanted::Input(bytes.to_vec()));
            }
            SliceMessage::SerialInput { .. } => self.peers.lost(from, "it typed"),
            SliceMessage::SerialOutput { ticket, bytes } => {
                self.ask_devices(from, ticket, Wanted::Output(bytes.to_vec()));
            }
            SliceMessage::Saved { ticket, bytes } => {
                let content = Content::Saved(bytes.to_vec());
                self.ask_files(from, ticket, content);
            }
            // Only slice 0 knows which file has a page.
            SliceMessage::Absent { ticket, ranges } if from == PRIMARY => {
                let content = Content::Absent(ranges.to_vec());
                self.ask_files(from, ticket, content);
            }
            SliceMessage::PagesRead {
                first,
                follow,
                bytes,
            } => (self.unread_pages).came(&self.memory, from, (first, follow), bytes),
            SliceMessage::Absent { .. } => self.peers.lost(from, "it restores guest memory"),
            SliceMessage::ReadPages { first, count } => {
                let pages = first..first.saturating_add(count);
                self.ask_files(from, 0, Content::Wanted(pages));
            }
            SliceMessage::WantsPages { first, count } => {
                let pages = first..first.saturating_add(count);
                self.validate(from, self.membership.wanted(from, pages));
            }
            SliceMessage::GavePages { pages } => {
                let given = self.membership.given(from, pages);
                if given.is_ok() {
                    let counter = &self.memory.counters.exchanged_in;
                    counter.fetch_add(pages, Ordering::Relaxed);
                }
                self.validate(from, given);
            }
            SliceMessage::AllRead => self.ask_files(from, 0, Content::AllRead),
            SliceMessage::Copied {
                ticket,
                disk,
                step,
                offset,
                bytes,
            } if from == PRIMARY => {
                let bytes = bytes.to_vec();
                let content = Content::Copied {
                    disk,
                    step,
                    offset,
                    bytes,
                };
                self.ask_files(from, ticket, content);
            }
            SliceMessage::Copied { .. } => self.peers.lost(from, "it copies a disk"),
            SliceMessage::Accessed { ticket, value } => {
                self.validate(from, self.registers.complete(from, ticket, value));
            }
            // Only the primary gives commands.
            SliceMessage::Command { ticket, json } if from == PRIMARY => {
                self.queue(from, &self.commands, (ticket, json));
            }
            SliceMessage::Command { .. } => self.peers.lost(from, "it sent a command"),
            SliceMessage::Reply { ticket, json } => {
                let reply = serde_json::from_slice(&json).unwrap_or_else(|error| {
                    SliceReply::Refused(format!("its reply is malformed: {error}"))
                });
                self.validate(from, self.replies.complete(from, ticket, reply));
            }
            // One that is no member ends for itself.
            SliceMessage::Ended { json } if self.peers.standing(from) == Standing::Member => {
                (self.ended)(from, json);
            }
            SliceMessage::Ended { .. } => self.peers.disconnect(from),
            SliceMessage::Beat => {}
            SliceMessage::Succeeds => {
                if !self.peers.succeed(from) {
                    self.peers
                        .lost(from, "it takes node 0's place, which it may not");
                }
            }
            SliceMessage::GoesOn => {
                if !self.peers.take_back(from) {
                    self.peers
                        .lost(from, "it goes on as node 0, which it may not");
                }
            }
            SliceMessage::Device { address, message } => {
                self.validate(from, self.remote_devices.take(from, address, message));
            }
            SliceMessage::Look { ticket } => {
                let tsc = host_tsc();
                self.peers.send(from, &SliceMessage::Seen { ticket, tsc });
            }
            // The time of the answer is that of its arrival, not that at which the
            // thread that waits for it wakes up.
            SliceMessage::Seen { ticket, tsc } => {
                self.validate(from, self.looks.complete(from, ticket, (tsc, host_tsc())));
            }
        }
    }
}
