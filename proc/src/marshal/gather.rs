//! The caller's side, before: program memory into a request.

use super::plan::{
    ABSENT, IOVEC, MASK, MESSAGE, NAME_MAX, PIECES_MAX, Piece, Plan, Role, Shape, Spec,
};
use super::plan::{word_u32, word_u64};
use super::scatter::{Place, Request};
use super::{Gather, Memory, VECTOR_MAX};
use crate::table::{self, Arg, Class, Length, Next, Plain};
use linux_raw_sys::errno;

/// Most bytes that Linux transfers in one call (`MAX_RW_COUNT`).
pub(super) const TRANSFER_MAX: u64 = 0x7fff_f000;

/// Copies the inputs of a call into `buffer` and describes it.
///
/// `done` bytes of it have been transferred already (0 at first; see
/// [`super::Transfer`]); `bulk_max`, at most [`super::BULK_MAX`], limits the data
/// of this piece. A `buffer` of `bulk_max` + [`super::SLACK`] + [`super::HEADER`]
/// bytes always suffices. The first [`Request::sent`] bytes of it must be sent.
pub fn gather<M: Memory + ?Sized>(
    nr: u64,
    args: &[u64; 6],
    done: u64,
    bulk_max: usize,
    memory: &mut M,
    buffer: &mut [u8],
) -> Result<Request, Gather> {
    match table::classify(nr, args) {
        Class::Plain(plain) => gather_plain(&plain, nr, args, done, bulk_max, memory, buffer),
        Class::Home => Err(Gather::Home),
        Class::Refused(errno) => Err(Gather::Errno(errno)),
        Class::Memory | Class::Thread | Class::Local => Err(Gather::Engine),
    }
}

/// [`gather`] of a call that was classified as `plain`.
pub fn gather_plain<M: Memory + ?Sized>(
    plain: &Plain,
    nr: u64,
    args: &[u64; 6],
    done: u64,
    bulk_max: usize,
    memory: &mut M,
    buffer: &mut [u8],
) -> Result<Request, Gather> {
    let mut gathering = Gathering {
        plain,
        args: *args,
        done,
        bulk_max: bulk_max.min(super::BULK_MAX) as u64,
        clamped: false,
        bulk: 0,
        memory,
    };
    gathering.skip_done()?;
    let shape = Shape::of(plain);
    let mut lengths = [ABSENT; PIECES_MAX];
    let mut places = [Place::default(); PIECES_MAX];
    for index in 0..shape.count {
        let spec = &shape.specs[index];
        if let Some((length, place)) = gathering.measure(spec, buffer)? {
            lengths[index] = gathering.limit(spec, length)?;
            places[index] = place;
        }
    }
    let plan = Plan::new(&shape, &lengths).ok_or(Gather::Home)?;
    if plan.sent > buffer.len() {
        return Err(Gather::Home);
    }
    for (piece, place) in plan.pieces().iter().zip(&places) {
        gathering.copy(piece, place, buffer)?;
    }
    write_header(nr as u32, &gathering.args, plain, &lengths, buffer);
    Ok(Request {
        plan,
        places,
        wait: plain.wait,
        next: plain.split.map_or(Next::Never, |split| split.next),
        clamped: gathering.clamped,
        bulk: gathering.bulk,
        done,
    })
}

struct Gathering<'a, M: ?Sized> {
    plain: &'a Plain,
    args: [u64; 6],
    done: u64,
    bulk_max: u64,
    clamped: bool,
    bulk: u64,
    memory: &'a mut M,
}

impl<M: Memory + ?Sized> Gathering<'_, M> {
    /// Moves the arguments past the bytes that were transferred before.
    fn skip_done(&mut self) -> Result<(), Gather> {
        if self.done == 0 {
            return Ok(());
        }
        let Some(split) = self.plain.split else {
            return Err(Gather::Home);
        };
        if let Some(length) = split.length {
            let data = &mut self.args[usize::from(split.data)];
            *data = data.wrapping_add(self.done);
            let length = &mut self.args[usize::from(length)];
            *length = length.saturating_sub(self.done);
        }
        if let Some(position) = split.position {
            let position = &mut self.args[usize::from(position)];
            if *position != u64::MAX {
                *position = position.wrapping_add(self.done);
            }
        }
        Ok(())
    }

    /// How long a piece is and where it is in the program; `None` when its
    /// pointer is NULL. Uses the front of `scratch`, which is not filled yet.
    fn measure(&mut self, spec: &Spec, scratch: &mut [u8]) -> Result<Option<(u64, Place)>, Gather> {
        let address = self.args[usize::from(spec.argument)];
        if address == 0 {
            return Ok(None);
        }
        let here = |length| Ok(Some((length, Place { address, count: 0 })));
        if let Some(length) = spec.fixed_length(&self.args) {
            return match spec.role {
                Role::Mask(size) => self.measure_mask(address, size),
                Role::MaskHeader => match self.measure_mask(address, None)? {
                    Some(_) => here(length),
                    None => Ok(None),
                },
                _ => here(length),
            };
        }
        match spec.role {
            Role::Bytes(Length::Pointed(index)) => {
                let pointer = self.args[usize::from(index)];
                let length = if pointer == 0 {
                    0
                } else {
                    self.read_u32(pointer)?
                };
                here(length.into())
            }
            Role::Bytes(_) => Err(Gather::Home),
            Role::String { max, cut } => {
                let into = scratch.get_mut(..usize::from(max)).ok_or(Gather::Home)?;
                match self.memory.read_c_string(address, into)? {
                    Some(length) => here(length as u64),
                    None if cut => here(max.into()),
                    None => Err(Gather::Errno(errno::ENAMETOOLONG as i32)),
                }
            }
            Role::VectorData(count) => {
                let count = self.args[usize::from(count)];
                self.measure_vector(Place { address, count }, spec)
                    .map(Some)
            }
            _ => self.measure_message(address, spec),
        }
    }

    fn read_u32(&mut self, address: u64) -> Result<u32, Gather> {
        let mut word = [0; 4];
        self.memory.read(address, &mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    fn measure_mask(
        &mut self,
        address: u64,
        size: Option<u8>,
    ) -> Result<Option<(u64, Place)>, Gather> {
        let (address, size) = match size {
            Some(index) => (address, self.args[usize::from(index)]),
            None => {
                let mut header = [0; IOVEC as usize];
                self.memory.read(address, &mut header)?;
                (word_u64(&header, 0), word_u64(&header, 8))
            }
        };
        if address == 0 {
            return Ok(None);
        }
        if size != u64::from(MASK) {
            return Err(Gather::Errno(errno::EINVAL as i32));
        }
        Ok(Some((size, Place { address, count: 0 })))
    }

    fn measure_vector(&mut self, place: Place, spec: &Spec) -> Result<(u64, Place), Gather> {
        if place.count > VECTOR_MAX {
            return Err(Gather::Errno(errno::EINVAL as i32));
        }
        let is_output = spec.direction == super::plan::Direction::Out;
        let mut total = 0u64;
        let mut cut = false;
        place.each(self.memory, |memory, address, length| {
            if length > i64::MAX as u64 {
                return Err(Gather::Errno(errno::EINVAL as i32));
            }
            let usable = if is_output {
                memory.writable(address, length)
            } else {
                length
            };
            if !cut {
                total = total.saturating_add(usable);
            }
            cut |= usable < length;
            Ok(true)
        })?;
        if cut && total == 0 {
            return Err(Gather::Errno(errno::EFAULT as i32));
        }
        let left = total.min(TRANSFER_MAX).saturating_sub(self.done);
        Ok((left, place))
    }

    fn measure_message(
        &mut self,
        address: u64,
        spec: &Spec,
    ) -> Result<Option<(u64, Place)>, Gather> {
        let mut header = [0; MESSAGE as usize];
        self.memory.read(address, &mut header)?;
        let place = |offset: usize| Place {
            address: word_u64(&header, offset),
            count: 0,
        };
        let (place, length) = match spec.role {
            Role::Name => (place(0), u64::from(word_u32(&header, 8))),
            Role::Control => (place(32), word_u64(&header, 40)),
            _ => {
                let count = word_u64(&header, 24);
                if count > VECTOR_MAX {
                    return Err(Gather::Errno(errno::EMSGSIZE as i32));
                }
                let vector = Place { count, ..place(16) };
                return self.measure_vector(vector, spec).map(Some);
            }
        };
        if place.address == 0 {
            return Ok(None);
        }
        if spec.role == Role::Name {
            if length > i32::MAX as u64 {
                return Err(Gather::Errno(errno::EINVAL as i32));
            }
            return Ok(Some((length.min(NAME_MAX.into()), place)));
        }
        Ok(Some((length, place)))
    }

    /// Cuts the data of a transfer to what fits.
    fn limit(&mut self, spec: &Spec, length: u64) -> Result<u32, Gather> {
        let mut length = length;
        if spec.is_bulk(self.plain) {
            let whole = self.plain.split.is_some_and(|s| s.next == Next::Whole);
            if length > self.bulk_max {
                if whole {
                    return Err(Gather::Home);
                }
                length = self.bulk_max;
                self.clamped = true;
            }
            length = self.cut_to_writable(spec, length)?;
            if let Some(index) = self.plain.split.and_then(|s| s.length) {
                self.args[usize::from(index)] = length;
            }
            self.bulk = length;
        }
        u32::try_from(length)
            .ok()
            .filter(|&length| length != ABSENT)
            .ok_or(Gather::Home)
    }
    fn cut_to_writable(&mut self, spec: &Spec, length: u64) -> Result<u64, Gather> {
        let is_flat = matches!(spec.role, Role::Bytes(_));
        if length == 0 || !is_flat || spec.direction != super::plan::Direction::Out {
            return Ok(length);
        }
        let address = self.args[usize::from(spec.argument)];
        let usable = self.memory.writable(address, length);
        if usable == 0 {
            return Err(Gather::Errno(errno::EFAULT as i32));
        }
        // The kernel too stops where memory does, so nothing follows.
        if usable < length {
            self.clamped = false;
        }
        Ok(usable.min(length))
    }

    /// Copies an input into its place in the buffer.
    fn copy(&mut self, piece: &Piece, place: &Place, buffer: &mut [u8]) -> Result<(), Gather> {
        use super::plan::Direction::{In, InOut};
        if !piece.is_present() || !matches!(piece.spec.direction, In | InOut) {
            return Ok(());
        }
        let into = &mut buffer[piece.range()];
        match piece.spec.role {
            Role::VectorData(_) | Role::MessageData => self.copy_vector(place, into),
            Role::String { cut, .. } => {
                let found = self.memory.read_c_string(place.address, into)?;
                if found != Some(into.len()) {
                    // Cut, or changed by another thread since it was measured.
                    let Some(last) = into.last_mut() else {
                        return Err(Gather::Home);
                    };
                    if !cut && found.is_none() && *last != 0 {
                        return Err(Gather::Errno(errno::ENAMETOOLONG as i32));
                    }
                    *last = 0;
                }
                Ok(())
            }
            _ => Ok(self.memory.read(place.address, into)?),
        }
    }
    fn copy_vector(&mut self, place: &Place, into: &mut [u8]) -> Result<(), Gather> {
        let mut skip = self.done;
        let mut filled = 0;
        place.each(self.memory, |memory, address, length| {
            let skipped = skip.min(length);
            skip -= skipped;
            let part = (length - skipped).min((into.len() - filled) as u64) as usize;
            if part > 0 {
                memory.read(
                    address.wrapping_add(skipped),
                    &mut into[filled..filled + part],
                )?;
                filled += part;
            }
            Ok(filled < into.len())
        })?;
        if filled < into.len() {
            // The vector shrank under our eyes: another thread wrote to it.
            into[filled..].fill(0);
        }
        Ok(())
    }
}

impl Place {
    /// Calls `visit` with each entry of the vector until it says stop.
    pub(super) fn each<M: Memory + ?Sized>(
        &self,
        memory: &mut M,
        mut visit: impl FnMut(&mut M, u64, u64) -> Result<bool, Gather>,
    ) -> Result<(), Gather> {
        const BATCH: usize = 16;
        let mut entries = [0; BATCH * IOVEC as usize];
        let mut index = 0;
        while index < self.count {
            let batch = (self.count - index).min(BATCH as u64) as usize;
            let bytes = &mut entries[..batch * IOVEC as usize];
            let from = self.address.wrapping_add(index * u64::from(IOVEC));
            memory.read(from, bytes)?;
            for entry in bytes.chunks_exact(IOVEC as usize) {
                if !visit(memory, word_u64(entry, 0), word_u64(entry, 8))? {
                    return Ok(());
                }
            }
            index += batch as u64;
        }
        Ok(())
    }
}

/// Number, lengths and arguments; pointers are left out, a vector has one entry.
fn write_header(
    nr: u32,
    args: &[u64; 6],
    plain: &Plain,
    lengths: &[u32; PIECES_MAX],
    buffer: &mut [u8],
) {
    buffer[..super::HEADER].fill(0);
    buffer[..4].copy_from_slice(&nr.to_le_bytes());
    let mut words = *args;
    for (index, arg) in plain.args.iter().enumerate() {
        match arg {
            Arg::Int | Arg::Descriptor => {}
            Arg::InVector(count) | Arg::OutVector(count) => {
                words[index] = 0;
                if args[index] != 0 {
                    words[usize::from(*count)] = 1;
                }
            }
            _ => words[index] = 0,
        }
    }
    for (index, word) in words.iter().enumerate() {
        let at = 8 + 8 * index;
        buffer[at..at + 8].copy_from_slice(&word.to_le_bytes());
    }
    for (index, length) in lengths.iter().enumerate() {
        let at = 56 + 4 * index;
        buffer[at..at + 4].copy_from_slice(&length.to_le_bytes());
    }
}
