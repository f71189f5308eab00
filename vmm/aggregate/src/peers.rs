//! The links to the other slices: one for each, with a thread that reads it.
//!
//! Every slice sends a beat several times in a lease, so that silence means death:
//! who hears nothing of a peer for a lease, or finds the link ended, calls it lost,
//! and the machine ends. Before its first word a peer has longer.
//!
//! Slices join and leave while the machine runs. A confined process makes no threads, so
//! each number that a slice may have has its two threads from the start; those of a number
//! that is free wait for a link. (One thread that polls several links would delay each page
//! by the handling of another.)
//!
//! ```text
//!          connect            admit              part            link read to its end
//!  Free ───────────▶ Joining ───────▶ Member ───────▶ Leaving ───────────────────────▶ Free
//!   ▲                   │ part, or its end
//!   └───────────────────┘
//! ```
//!
//! Only the loss of a `Member` ends the machine.
//!
//! Another process can take the place of slice 0, with a link of its own. It comes as that of a
//! slice that joins, its *heir*, and changes numbers with the old link (`docs/roles.md`):
//!
//! ```text
//!             yield_to         succeed            settle
//!  Member ──────────────▶ Yielding ─▶ Yielding, heir's ─▶ Member, heir's; the old link ends
//!    ▲                      │             │
//!    └────── take_back ─────┴─────────────┘ the heir's link ends
//! ```
//!
//! A `Yielding` slice may be lost: whether the old process or the heir goes on is decided
//! elsewhere, and daemons end a slice for which neither does.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use weft_dsm::NodeId;
use weft_wire::Header;
use weft_wire::frame::{HEADER_BYTES, KINDS_DSM};
use weft_wire::halves::{Receiver, Sender};

use super::PRIMARY;
use super::delay::DelayedSender;
use super::message::SliceMessage;
use crate::placement::SLICES_MAX;
use weft_coherent_memory::{SharedMemory, Transport};
use weft_confine::lock;

/// Beats in a lease.
const BEATS: u32 = 5;
/// Longest silence of a slice that has not spoken yet: it is being put together, and
/// its host may be busy; hosts start theirs one after the other, each within 20 s.
/// One that dies meanwhile closes its links.
const START: Duration = Duration::from_secs(25);
/// Longest wait for the thread that beats to see the end.
const LOOK: Duration = Duration::from_millis(100);
/// How often a thread without a link looks for the machine's end, of which it is told.
const IDLE: Duration = Duration::from_secs(60);

/// Handles received messages. Wakeup on the thread that reads the link from `from`; must
/// not wait for a page, a vCPU or another slice.
pub(super) trait MessageHandler: Send + Sync {
    fn handle(&self, from: usize, message: SliceMessage);
}

/// What sends to one slice. A link is delayed only for tests; which of the two it is
/// costs a send no more than whether there is a link.
#[derive(Clone)]
enum LinkSender {
    Direct(Sender),
    Delayed(Arc<DelayedSender>),
}

impl LinkSender {
    fn new(sender: Sender, delay_max: Duration) -> Self {
        match delay_max {
            Duration::ZERO => Self::Direct(sender),
            _ => Self::Delayed(Arc::new(DelayedSender::new(sender, delay_max))),
        }
    }

    fn sender(&self) -> &Sender {
        match self {
            Self::Direct(sender) => sender,
            Self::Delayed(delayed) => delayed.sender(),
        }
    }
}

/// Whether a number is in use, and how much its slice takes part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Standing {
    /// The number has no slice.
    #[default]
    Free,
    /// It is linked, but not all slices know it yet.
    Joining,
    Member,
    /// A member whose place another process is about to take, or may have taken.
    Yielding,
    /// Its links are about to end.
    Leaving,
}

impl Standing {
    /// Whether the machine goes on without the slice's link.
    fn may_be_lost(self) -> bool {
        matches!(self, Self::Joining | Self::Yielding | Self::Leaving)
    }
}

/// What is known of a number.
#[derive(Default)]
struct Seat {
    standing: Standing,
    /// For the thread that reads it.
    receiver: Option<Receiver>,
    /// How many links the number has had, for the threads that send.
    links: u64,
    /// Of them, those of slices whose join or leave is over.
    past_links: u64,
}

/// The links of one slice.
pub struct Peers {
    me: usize,
    /// By slice; none for this one and for free numbers. Locked to write only when a slice
    /// joins or has left; what is done under it never waits.
    links: [RwLock<Option<LinkSender>>; SLICES_MAX],
    /// By slice. Held for moments, and never while a link is locked.
    seats: Mutex<[Seat; SLICES_MAX]>,
    seated: Condvar,
    /// The number of the slice whose link each link's threads serve. Changed with the seats
    /// locked.
    served: [AtomicUsize; SLICES_MAX],
    /// The number under which the link came of the process that may take the place of slice 0.
    /// Locked before the seats.
    heir: Mutex<Option<usize>>,
    lease: Duration,
    delay_max: Duration,
    /// Wakeup once for the first peer that is lost, with the reason.
    on_loss: OnceLock<Box<dyn Fn(usize, String) + Send + Sync>>,
    /// Told of each slice that has left, or did not join.
    on_departure: OnceLock<Box<dyn Fn(usize) + Send + Sync>>,
    over: AtomicBool,
    /// The machine goes on elsewhere, or not: no loss of a slice ends it here.
    ignores_losses: AtomicBool,
    sent_frames: AtomicU64,
    received_frames: AtomicU64,
    /// Headers and payloads, by the slice that sent them.
    received_bytes: [AtomicU64; SLICES_MAX],
}

impl Peers {
    /// Over these links. Nothing is read yet.
    pub(super) fn new(
        me: usize,
        senders: Vec<Option<Sender>>,
        lease: Duration,
        delay_max: Duration,
    ) -> Arc<Self> {
        let mut senders = senders.into_iter();
        let links = std::array::from_fn(|_| {
            let sender = senders.next().flatten();
            RwLock::new(sender.map(|sender| LinkSender::new(sender, delay_max)))
        });
        let seat = |link: &RwLock<Option<LinkSender>>| Seat {
            standing: match &*link.read().unwrap_or_else(PoisonError::into_inner) {
                Some(_) => Standing::Member,
                None => Standing::Free,
            },
            receiver: None,
            links: 1,
            past_links: 1,
        };
        let seats = std::array::from_fn(|slice| seat(&links[slice]));
        Arc::new(Self {
            me,
            links,
            seats: Mutex::new(seats),
            seated: Condvar::new(),
            served: std::array::from_fn(AtomicUsize::new),
            heir: Mutex::default(),
            delay_max,
            lease,
            on_loss: OnceLock::new(),
            on_departure: OnceLock::new(),
            over: AtomicBool::new(false),
            ignores_losses: AtomicBool::new(false),
            sent_frames: AtomicU64::new(0),
            received_frames: AtomicU64::new(0),
            received_bytes: [const { AtomicU64::new(0) }; SLICES_MAX],
        })
    }

    /// Says who hears of a loss: on the thread that reads the link, or on one that
    /// waited for an answer, with no lock held.
    pub(super) fn when_lost(&self, on_loss: Box<dyn Fn(usize, String) + Send + Sync>) {
        // A second one is a mistake that the first survives.
        let _ = self.on_loss.set(on_loss);
    }

    /// Says who hears of slices that have left: on the thread that read the link, with no
    /// lock held.
    pub(super) fn when_departed(&self, on_departure: Box<dyn Fn(usize) + Send + Sync>) {
        // A second one is a mistake that the first survives.
        let _ = self.on_departure.set(on_departure);
    }

    /// The link to a slice.
    fn link(&self, slice: usize) -> Option<LinkSender> {
        let link = self.links.get(slice)?.read();
        link.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_link(&self, slice: usize, link: Option<LinkSender>) {
        if let Some(place) = self.links.get(slice) {
            *place.write().unwrap_or_else(PoisonError::into_inner) = link;
        }
    }

    fn all_links(&self) -> impl Iterator<Item = LinkSender> {
        (0..SLICES_MAX).filter_map(|slice| self.link(slice))
    }

    fn seats(&self) -> MutexGuard<'_, [Seat; SLICES_MAX]> {
        lock(&self.seats)
    }

    /// How much a slice takes part.
    pub(super) fn standing(&self, slice: usize) -> Standing {
        self.seats()
            .get(slice)
            .map_or(Standing::Free, |seat| seat.standing)
    }

    /// The other slices that have joined and are not about to go.
    pub(super) fn others(&self) -> Vec<usize> {
        let seats = self.seats();
        let is_member = |slice: &usize| seats[*slice].standing == Standing::Member;
        (0..SLICES_MAX).filter(is_member).collect()
    }

    /// The other slices that have a link.
    fn linked(&self) -> Vec<usize> {
        let seats = self.seats();
        let has_link = |slice: &usize| seats[*slice].standing != Standing::Free;
        (0..SLICES_MAX).filter(has_link).collect()
    }

    /// Connects a slice that joins. `first` goes ahead of all that is sent to it.
    ///
    /// # Errors
    /// Its number is in use.
    pub(super) fn connect(
        &self,
        slice: usize,
        (sender, receiver): (Sender, Receiver),
        first: &[SliceMessage],
    ) -> Result<(), String> {
        let mut seats = self.seats();
        let is_me = slice == self.me;
        let seat = seats
            .get_mut(slice)
            .filter(|seat| seat.standing == Standing::Free && !is_me);
        let seat = seat.ok_or_else(|| format!("node {slice} has a link already"))?;
        for message in first {
            let (header, payload) = message.encode();
            if sender.send(&header, &[payload]).is_err() {
                return Err(format!("the link to node {slice} has ended"));
            }
        }
        seat.standing = Standing::Joining;
        seat.receiver = Some(receiver);
        seat.links += 1;
        self.set_link(slice, Some(LinkSender::new(sender, self.delay_max)));
        drop(seats);
        self.seated.notify_all();
        Ok(())
    }

    /// Gives the thread that reads a slice's link what it reads. At the start.
    pub(super) fn seat(&self, slice: usize, receiver: Receiver) {
        if let Some(seat) = self.seats().get_mut(slice) {
            seat.receiver = Some(receiver);
        }
    }

    /// From now on a slice that joined is asked and told like all others, and its loss
    /// ends the machine.
    ///
    /// # Errors
    /// It is not linked, or was lost.
    pub(super) fn admit(&self, slice: usize) -> Result<(), String> {
        let mut seats = self.seats();
        let seat = seats
            .get_mut(slice)
            .filter(|seat| !matches!(seat.standing, Standing::Free | Standing::Leaving));
        let seat = seat.ok_or_else(|| format!("there is no link to node {slice}"))?;
        seat.standing = Standing::Member;
        Ok(())
    }

    /// From now on slice 0 may be lost, and the process at the other end of the link with the
    /// number `heir` may take its place.
    ///
    /// # Errors
    /// No such link has come within `patience`.
    pub(super) fn yield_to(&self, heir: usize, patience: Duration) -> Result<(), String> {
        // Before the heir is locked, which threads that read links do.
        self.wait_for_link(heir, patience);
        let mut expected = lock(&self.heir);
        let mut seats = self.seats();
        let has_come = seats
            .get(heir)
            .is_some_and(|seat| seat.standing == Standing::Joining);
        if expected.is_some() || !has_come || seats[PRIMARY].standing != Standing::Member {
            return Err(format!(
                "there is no link that could take node 0's place as {heir}"
            ));
        }
        seats[PRIMARY].standing = Standing::Yielding;
        *expected = Some(heir);
        Ok(())
    }

    /// The process at the other end of the link `from` takes the place of slice 0: the links
    /// change their numbers. Whether it may.
    pub(super) fn succeed(&self, from: usize) -> bool {
        let heir = lock(&self.heir);
        if *heir != Some(from) {
            return false;
        }
        self.change_numbers(from);
        true
    }

    /// The process that had the place of slice 0 goes on: it says so on the link `from`. Whether
    /// it may.
    pub(super) fn take_back(&self, from: usize) -> bool {
        let mut expected = lock(&self.heir);
        let Some(heir) = *expected else {
            // It had not yielded to this slice yet.
            return from == PRIMARY;
        };
        // After the heir has taken its place, its link has the heir's number.
        if from == heir {
            self.change_numbers(heir);
        } else if from != PRIMARY {
            return false;
        }
        *expected = None;
        self.seats()[PRIMARY].standing = Standing::Member;
        drop(expected);
        self.disconnect(heir);
        self.change_is_over(heir);
        true
    }

    /// The process that took the place of slice 0, if one did, keeps it: the old link ends.
    pub(super) fn settle(&self) -> bool {
        let Some(heir) = lock(&self.heir).take() else {
            return false;
        };
        self.seats()[PRIMARY].standing = Standing::Member;
        self.disconnect(heir);
        self.change_is_over(heir);
        true
    }

    fn change_numbers(&self, heir: usize) {
        let mut seats = self.seats();
        seats.swap(PRIMARY, heir);
        for seat in [PRIMARY, heir] {
            let standing = &mut seats[seat].standing;
            *standing = match (*standing, seat) {
                (lost @ (Standing::Free | Standing::Leaving), _) => lost,
                (_, PRIMARY) => Standing::Yielding,
                _ => Standing::Joining,
            };
        }
        let (first, second) = (self.link(PRIMARY), self.link(heir));
        self.set_link(PRIMARY, second);
        self.set_link(heir, first);
        for served in &self.served {
            match served.load(Ordering::SeqCst) {
                PRIMARY => served.store(heir, Ordering::SeqCst),
                number if number == heir => served.store(PRIMARY, Ordering::SeqCst),
                _ => {}
            }
        }
        drop(seats);
        self.seated.notify_all();
    }

    /// The number of the slice whose link the threads of this one serve now.
    fn served(&self, threads: usize) -> usize {
        self.served[threads].load(Ordering::SeqCst)
    }

    /// From now on the end of a slice's link is no loss.
    pub(super) fn part(&self, slice: usize) {
        if let Some(seat) = self.seats().get_mut(slice)
            && seat.standing != Standing::Free
        {
            seat.standing = Standing::Leaving;
        }
    }

    /// Ends the link to a slice that joins no more, or leaves.
    pub(super) fn disconnect(&self, slice: usize) {
        self.part(slice);
        if let Some(link) = self.link(slice) {
            link.sender().close();
        }
    }

    /// Waits until a slice's link was read to its end; whether that came within `patience`.
    pub(super) fn wait_until_free(&self, slice: usize, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut seats = self.seats();
        while seats[slice].standing != Standing::Free {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over() {
                return false;
            }
            let waited = self.seated.wait_timeout(seats, left.min(LOOK));
            seats = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Waits for the link of a slice that joins; whether there is one within `patience`, and it
    /// has not ended.
    pub(super) fn wait_for_joining(&self, slice: usize, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut seats = self.seats();
        while seats[slice].links == seats[slice].past_links {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over() {
                return false;
            }
            let waited = self.seated.wait_timeout(seats, left.min(LOOK));
            seats = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        seats[slice].standing != Standing::Free
    }

    /// Waits until a number that is free has a link.
    fn wait_for_link(&self, slice: usize, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut seats = self.seats();
        let is_free = |seats: &[Seat; SLICES_MAX]| {
            seats
                .get(slice)
                .is_some_and(|seat| seat.standing == Standing::Free)
        };
        while is_free(&seats) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over() {
                return;
            }
            let waited = self.seated.wait_timeout(seats, left.min(LOOK));
            seats = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The join of a slice is over, or it was given up, or it has left.
    pub(super) fn change_is_over(&self, slice: usize) {
        let seat = &mut self.seats()[slice];
        seat.past_links = seat.links;
    }

    /// Sends a message to `slice`. A link that ended is heard of where it is read: who
    /// sends may hold a lock that the hearing of a loss wants.
    pub(super) fn send(&self, slice: usize, message: &SliceMessage) {
        let (header, payload) = message.encode();
        self.send_frame(slice, &header, &[payload]);
    }

    /// Sends a message to all other slices, those that join too.
    pub(super) fn broadcast(&self, message: &SliceMessage) {
        for slice in self.linked() {
            self.send(slice, message);
        }
    }

    /// Sends a message to all other slices at once. Called before the threads exist that
    /// send delayed messages.
    pub(super) fn broadcast_first(&self, message: &SliceMessage) {
        let (header, payload) = message.encode();
        for link in self.all_links() {
            if link.sender().send(&header, &[payload]).is_err() {
                link.sender().close();
            }
        }
    }

    /// Sends a frame to `slice`; as [`Peers::send`].
    pub(super) fn send_frame(&self, slice: usize, header: &Header, parts: &[&[u8]]) {
        let link = self.links.get(slice).map(RwLock::read);
        let link = link.map(|link| link.unwrap_or_else(PoisonError::into_inner));
        let Some(link) = link.as_deref().and_then(Option::as_ref) else {
            // A slice that was about to join has gone.
            return;
        };
        self.sent_frames.fetch_add(1, Ordering::Relaxed);
        let sent = match link {
            LinkSender::Direct(sender) => sender.send(header, parts),
            LinkSender::Delayed(delayed) => delayed.send(header, parts),
        };
        if sent.is_err() {
            link.sender().close();
        }
    }

    /// Whether frames are delayed: then each link needs a thread that sends them.
    pub(super) fn is_delayed(&self) -> bool {
        !self.delay_max.is_zero()
    }

    /// Sends to a slice what was delayed, until the machine is over.
    pub(super) fn send_delayed(&self, threads: usize) {
        let mut seen = 0;
        while let Some(link) = self.next_link(threads, &mut seen) {
            if let LinkSender::Delayed(delayed) = link
                && delayed.send_until_over().is_err()
            {
                delayed.sender().close();
            }
        }
    }

    /// `slice` is gone, or broken. Wakeup with no lock held: see [`Peers::when_lost`].
    pub(super) fn lost(&self, slice: usize, reason: &str) {
        self.lose(|_| slice, reason);
    }

    /// The same of the slice whose link these threads serve.
    fn lost_link(&self, threads: usize, reason: &str) {
        self.lose(|peers| peers.served(threads), reason);
    }

    /// `slice` is called with the seats locked.
    fn lose(&self, slice: impl Fn(&Self) -> usize, reason: &str) {
        let mut seats = self.seats();
        let slice = slice(self);
        if let Some(seat) = seats.get_mut(slice)
            && seat.standing.may_be_lost()
        {
            seat.standing = Standing::Leaving;
            if let Some(link) = self.link(slice) {
                link.sender().close();
            }
            return;
        }
        drop(seats);
        if !self.over.load(Ordering::SeqCst)
            && !self.ignores_losses.load(Ordering::SeqCst)
            && let Some(on_loss) = self.on_loss.get()
        {
            on_loss(slice, reason.to_owned());
        }
    }

    /// Whether the loss of a member is not reported. One that was lost meanwhile does not answer
    /// later.
    pub(super) fn ignore_losses(&self, ignores: bool) {
        self.ignores_losses.store(ignores, Ordering::SeqCst);
    }

    pub(super) fn are_losses_ignored(&self) -> bool {
        self.ignores_losses.load(Ordering::SeqCst)
    }

    /// The machine is over: links end, threads come back.
    pub(super) fn close(&self) {
        self.over.store(true, Ordering::SeqCst);
        for link in self.all_links() {
            if let LinkSender::Delayed(delayed) = &link {
                delayed.end();
            }
            link.sender().close();
        }
        // A thread that has just found the machine not over waits already.
        drop(self.seats());
        self.seated.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Waits until a slice has had more links than were `seen`; `None` once the machine is
    /// over.
    fn next_link(&self, threads: usize, seen: &mut u64) -> Option<LinkSender> {
        let mut seats = self.seats();
        while !self.is_over() {
            let slice = self.served(threads);
            if seats[slice].links > *seen
                && let Some(link) = self.link(slice)
            {
                *seen = seats[slice].links;
                return Some(link);
            }
            let waited = self.seated.wait_timeout(seats, IDLE);
            seats = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        None
    }

    /// Waits until a slice has a link that nobody reads; `None` once the machine is over.
    fn next_receiver(&self, threads: usize) -> Option<Receiver> {
        let mut seats = self.seats();
        while !self.is_over() {
            if let Some(receiver) = seats[self.served(threads)].receiver.take() {
                return Some(receiver);
            }
            let waited = self.seated.wait_timeout(seats, IDLE);
            seats = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        None
    }

    /// Reads the links of a slice, at first that of number `threads`, one after the other,
    /// until the machine is over.
    pub(super) fn read_all(
        &self,
        threads: usize,
        memory: &SharedMemory,
        handler: &dyn MessageHandler,
    ) {
        while let Some(receiver) = self.next_receiver(threads) {
            self.read(threads, receiver, memory, handler);
            let mut seats = self.seats();
            let from = self.served(threads);
            // The loss of a member ends the machine.
            if self.is_over() || seats[from].standing == Standing::Member {
                return;
            }
            self.set_link(from, None);
            seats[from].standing = Standing::Free;
            drop(seats);
            if let Some(on_departure) = self.on_departure.get() {
                on_departure(from);
            }
            self.seated.notify_all();
        }
    }

    /// Reads a link until it ends.
    pub(super) fn read(
        &self,
        threads: usize,
        mut receiver: Receiver,
        memory: &SharedMemory,
        handler: &dyn MessageHandler,
    ) {
        let mut patience = self.lease.max(START);
        // In waits, not by the clock: a host that stood still could hear nobody.
        let (wait, mut silence) = (self.lease / BEATS, Duration::ZERO);
        while !self.is_over() {
            let received = receiver.receive(wait);
            if let Ok(Some(frame)) = &received {
                let bytes = HEADER_BYTES + frame.payload.len();
                self.received_frames.fetch_add(1, Ordering::Relaxed);
                let received = &self.received_bytes[self.served(threads)];
                received.fetch_add(bytes as u64, Ordering::Relaxed);
            }
            // One frame may change it for the next.
            let from = self.served(threads);
            let outcome = match received {
                Ok(Some(frame)) if KINDS_DSM.contains(&frame.header.kind) => memory
                    .receive(NodeId(from as u8), &frame.header, frame.payload)
                    .map_err(|error| error.to_string()),
                Ok(Some(frame)) => SliceMessage::decode(&frame.header, frame.payload)
                    .map(|message| handler.handle(from, message))
                    .map_err(|error| error.to_string()),
                Ok(None) if silence + wait < patience => {
                    silence += wait;
                    continue;
                }
                Ok(None) => Err(format!("silent for {} s", patience.as_secs_f64())),
                Err(error) => Err(error.to_string()),
            };
            if let Err(reason) = outcome {
                return self.lost_link(threads, &reason);
            }
            (patience, silence) = (self.lease, Duration::ZERO);
        }
    }

    /// Sends what the kernel did not take at once, until the machine is over.
    pub(super) fn flush(&self, threads: usize) {
        let mut seen = 0;
        while let Some(link) = self.next_link(threads, &mut seen) {
            link.sender().flush_forever();
        }
    }

    /// Tells all others, until the machine is over, that this slice lives.
    pub(super) fn beat(&self) {
        while !self.is_over() {
            self.broadcast(&SliceMessage::Beat);
            let mut left = self.lease / BEATS;
            while !left.is_zero() && !self.is_over() {
                let step = left.min(LOOK);
                std::thread::sleep(step);
                left -= step;
            }
        }
    }

    /// Frames and bytes to and from all others, and bytes from each, keyed by name.
    pub(super) fn traffic(&self) -> Vec<(String, u64)> {
        let sent = self.all_links().map(|link| link.sender().traffic()).sum();
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let received: Vec<u64> = self.received_bytes.iter().map(load).collect();
        let totals = [
            ("sent-bytes", sent),
            ("received-bytes", received.iter().sum()),
            ("sent-messages", load(&self.sent_frames)),
            ("received-messages", load(&self.received_frames)),
        ];
        let totals = totals.map(|(name, count)| (name.to_owned(), count));
        let from = received.iter().enumerate().filter(|(_, bytes)| **bytes > 0);
        let from = from.map(|(slice, bytes)| (format!("from{slice}.received-bytes"), *bytes));
        totals.into_iter().chain(from).collect()
    }
}

impl Transport for Peers {
    fn transmit(&self, to: NodeId, header: &Header, parts: &[&[u8]]) {
        self.send_frame(to.index(), header, parts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;
    use std::thread::spawn;

    use weft_dsm::{Config, ManagerOf};
    use weft_vcpu::{Access, Memory};
    use weft_wire::halves::{HalvesConfig, open};

    use weft_coherent_memory::SharedMemoryOptions;
    use weft_guest_memory::Ram;

    struct Nowhere;

    impl MessageHandler for Nowhere {
        fn handle(&self, _: usize, _: SliceMessage) {}
    }

    /// A sender may hold a lock that the handler of a loss needs.
    #[test]
    fn a_peer_that_went_is_heard_of_where_it_is_read() {
        let (near, far) = UnixStream::pair().unwrap();
        let lease = Duration::from_secs(20);
        let (sender, receiver) = open(HalvesConfig {
            socket: near.into(),
            keys: None,
            lease,
            spin: Duration::ZERO,
            name: "test".into(),
        })
        .unwrap();
        let peers = Peers::new(0, vec![None, Some(sender)], lease, Duration::ZERO);
        let memory = SharedMemory::new(SharedMemoryOptions {
            ram: Ram::new(8 << 20).unwrap(),
            config: Config::new(NodeId(0), 2, ManagerOf::Fixed(NodeId(1))),
            budget: weft_coherent_memory::Budget::UNLIMITED,
            transport: peers.clone(),
            lease,
            on_failure: Box::new(|reason| panic!("{reason}")),
        });
        let (report, lost) = channel();
        let ended = memory.clone();
        peers.when_lost(Box::new(move |slice, _| {
            ended.end_waits();
            report.send(slice).unwrap();
        }));
        drop(far);
        let vcpu = memory.clone();
        let vcpu = spawn(move || vcpu.acquire(0x4000, Access::Write).is_ok());
        // It has asked, or found the link ended, before anybody reads.
        while memory.counters.writes.load(Ordering::SeqCst) == 0 && !vcpu.is_finished() {
            std::thread::yield_now();
        }
        let reader = spawn(move || peers.read(1, receiver, &memory, &Nowhere));
        assert_eq!(lost.recv_timeout(Duration::from_secs(10)), Ok(1));
        assert!(vcpu.join().unwrap());
        reader.join().unwrap();
    }
}
