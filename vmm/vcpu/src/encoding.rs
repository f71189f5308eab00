//! The state of a CPU as bytes, for one message between hosts.
//!
//! Numbers are little-endian and fields come in the order of their structure, without
//! names: both ends are of one version, which the links agree on before. Reading is
//! total: any bytes give a state or an [`EncodingError`], and bytes that remain are an
//! error too.

use thiserror::Error;

use super::state::{CpuState, DescriptorTable, Segment, Undelivered};

/// Most bytes of extended state: twice what AVX-512 with all its components needs.
const EXTENDED_BYTES_MAX: usize = 16 << 10;
/// Most model-specific registers.
const MSRS_MAX: usize = 256;

/// Why bytes are no state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum EncodingError {
    #[error("it ends after {0} bytes, within a field")]
    Short(usize),
    #[error("{0} bytes follow its last field")]
    Long(usize),
    #[error("its field {0} has an invalid value")]
    Value(&'static str),
}

/// Bytes that grow by one field after the other.
#[derive(Default)]
pub struct Encoder(Vec<u8>);

impl Encoder {
    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub fn bool(&mut self, value: bool) {
        self.0.push(value.into());
    }

    pub fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// A length, then the bytes. Bounded by the reader, at less than 4 GiB.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.0.extend(bytes);
    }

    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// The same fields, taken out one after the other.
pub struct Decoder<'a> {
    rest: &'a [u8],
    length: usize,
}

impl<'a> Decoder<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self {
            rest: bytes,
            length: bytes.len(),
        }
    }

    fn take<const COUNT: usize>(&mut self) -> Result<[u8; COUNT], EncodingError> {
        let (taken, rest) = self
            .rest
            .split_first_chunk()
            .ok_or(EncodingError::Short(self.length))?;
        self.rest = rest;
        Ok(*taken)
    }

    pub fn u8(&mut self) -> Result<u8, EncodingError> {
        self.take().map(u8::from_le_bytes)
    }

    pub fn bool(&mut self, field: &'static str) -> Result<bool, EncodingError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(EncodingError::Value(field)),
        }
    }

    pub fn u16(&mut self) -> Result<u16, EncodingError> {
        self.take().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Result<u32, EncodingError> {
        self.take().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, EncodingError> {
        self.take().map(u64::from_le_bytes)
    }

    /// What [`Encoder::bytes`] wrote, `max` bytes at most.
    pub fn bytes(&mut self, field: &'static str, max: usize) -> Result<&'a [u8], EncodingError> {
        let length = self.u32()? as usize;
        if length > max {
            return Err(EncodingError::Value(field));
        }
        let (taken, rest) = self
            .rest
            .split_at_checked(length)
            .ok_or(EncodingError::Short(self.length))?;
        self.rest = rest;
        Ok(taken)
    }

    /// A count of entries of two bytes, `max` at most.
    pub fn count(&mut self, field: &'static str, max: usize) -> Result<usize, EncodingError> {
        let count = usize::from(self.u16()?);
        (count <= max)
            .then_some(count)
            .ok_or(EncodingError::Value(field))
    }

    /// # Errors
    /// Bytes remain.
    pub fn finish(self) -> Result<(), EncodingError> {
        match self.rest.len() {
            0 => Ok(()),
            more => Err(EncodingError::Long(more)),
        }
    }
}

impl Segment {
    fn encode(&self, to: &mut Encoder) {
        to.u16(self.selector);
        to.u64(self.base);
        to.u32(self.limit);
        to.u16(self.rights);
    }

    fn decode(from: &mut Decoder<'_>) -> Result<Self, EncodingError> {
        Ok(Self {
            selector: from.u16()?,
            base: from.u64()?,
            limit: from.u32()?,
            rights: from.u16()?,
        })
    }
}

impl DescriptorTable {
    fn encode(&self, to: &mut Encoder) {
        to.u64(self.base);
        to.u16(self.limit);
    }

    fn decode(from: &mut Decoder<'_>) -> Result<Self, EncodingError> {
        Ok(Self {
            base: from.u64()?,
            limit: from.u16()?,
        })
    }
}

impl Undelivered {
    fn encode(undelivered: Option<Self>, to: &mut Encoder) {
        match undelivered {
            None => to.u8(0),
            Some(Self::Interrupt { vector, software }) => {
                to.u8(if software { 2 } else { 1 });
                to.u8(vector);
            }
            Some(Self::NonMaskable) => to.u8(3),
            Some(Self::Exception { vector, error_code }) => {
                to.u8(if error_code.is_some() { 5 } else { 4 });
                to.u8(vector);
                if let Some(code) = error_code {
                    to.u32(code);
                }
            }
        }
    }

    fn decode(from: &mut Decoder<'_>) -> Result<Option<Self>, EncodingError> {
        Ok(Some(match from.u8()? {
            0 => return Ok(None),
            kind @ (1 | 2) => Self::Interrupt {
                vector: from.u8()?,
                software: kind == 2,
            },
            3 => Self::NonMaskable,
            kind @ (4 | 5) => Self::Exception {
                vector: from.u8()?,
                error_code: (kind == 5).then(|| from.u32()).transpose()?,
            },
            _ => return Err(EncodingError::Value("undelivered")),
        }))
    }
}

impl CpuState {
    pub fn encode(&self, to: &mut Encoder) {
        // Every field: one that is added must be added here.
        let Self {
            registers,
            rip,
            rflags,
            cs,
            ds,
            es,
            ss,
            fs,
            gs,
            tr,
            ldtr,
            gdtr,
            idtr,
            cpl,
            cr0,
            cr2,
            cr3,
            cr4,
            efer,
            debug,
            fpu,
            xcr0,
            msrs,
            tsc_offset,
            instructions,
            interrupt_shadow,
            halted,
            nmi_blocked,
            nmi_waits,
            undelivered,
        } = self;
        for value in registers.iter().chain([rip, rflags]) {
            to.u64(*value);
        }
        for segment in [cs, ds, es, ss, fs, gs, tr, ldtr] {
            segment.encode(to);
        }
        gdtr.encode(to);
        idtr.encode(to);
        to.u8(*cpl);
        for value in [cr0, cr2, cr3, cr4, efer].into_iter().chain(debug) {
            to.u64(*value);
        }
        // Components that were never used are zeros at its end.
        let used = fpu
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |at| at + 1);
        to.u16(fpu.len() as u16);
        to.bytes(&fpu[..used]);
        to.u64(*xcr0);
        to.u16(msrs.len() as u16);
        for (index, value) in msrs {
            to.u32(*index);
            to.u64(*value);
        }
        to.u64(*tsc_offset);
        to.u64(*instructions);
        for flag in [interrupt_shadow, halted, nmi_blocked, nmi_waits] {
            to.bool(*flag);
        }
        Undelivered::encode(*undelivered, to);
    }

    /// # Errors
    /// The bytes are not what [`CpuState::encode`] writes.
    pub fn decode(from: &mut Decoder<'_>) -> Result<Self, EncodingError> {
        Ok(Self {
            registers: array(|| from.u64())?,
            rip: from.u64()?,
            rflags: from.u64()?,
            cs: Segment::decode(from)?,
            ds: Segment::decode(from)?,
            es: Segment::decode(from)?,
            ss: Segment::decode(from)?,
            fs: Segment::decode(from)?,
            gs: Segment::decode(from)?,
            tr: Segment::decode(from)?,
            ldtr: Segment::decode(from)?,
            gdtr: DescriptorTable::decode(from)?,
            idtr: DescriptorTable::decode(from)?,
            cpl: from.u8()?,
            cr0: from.u64()?,
            cr2: from.u64()?,
            cr3: from.u64()?,
            cr4: from.u64()?,
            efer: from.u64()?,
            debug: array(|| from.u64())?,
            fpu: {
                let length = from.count("fpu", EXTENDED_BYTES_MAX)?;
                let mut image = from.bytes("fpu", length)?.to_vec();
                if length < 512 {
                    return Err(EncodingError::Value("fpu"));
                }
                image.resize(length, 0);
                image
            },
            xcr0: from.u64()?,
            msrs: (0..from.count("msrs", MSRS_MAX)?)
                .map(|_| Ok((from.u32()?, from.u64()?)))
                .collect::<Result<_, _>>()?,
            tsc_offset: from.u64()?,
            instructions: from.u64()?,
            interrupt_shadow: from.bool("interrupt_shadow")?,
            halted: from.bool("halted")?,
            nmi_blocked: from.bool("nmi_blocked")?,
            nmi_waits: from.bool("nmi_waits")?,
            undelivered: Undelivered::decode(from)?,
        })
    }
}

/// An array whose entries come one after the other.
///
/// # Errors
/// The first that an entry has.
pub fn array<T: Copy + Default, const COUNT: usize>(
    mut entry: impl FnMut() -> Result<T, EncodingError>,
) -> Result<[T; COUNT], EncodingError> {
    let mut entries = [T::default(); COUNT];
    for place in &mut entries {
        *place = entry()?;
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each field has a value that no other has.
    fn odd() -> CpuState {
        let mut next = 0x0101_0203_0405_0607_u64;
        let mut value = || {
            next = next.rotate_left(7) ^ 0x9e37_79b9_7f4a_7c15;
            next
        };
        let mut segment = || Segment {
            selector: value() as u16,
            base: value(),
            limit: value() as u32,
            rights: value() as u16,
        };
        CpuState {
            cs: segment(),
            ds: segment(),
            es: segment(),
            ss: segment(),
            fs: segment(),
            gs: segment(),
            tr: segment(),
            ldtr: segment(),
            registers: std::array::from_fn(|_| value()),
            rip: value(),
            rflags: value(),
            gdtr: DescriptorTable {
                base: value(),
                limit: value() as u16,
            },
            idtr: DescriptorTable {
                base: value(),
                limit: value() as u16,
            },
            cpl: 3,
            cr0: value(),
            cr2: value(),
            cr3: value(),
            cr4: value(),
            efer: value(),
            debug: std::array::from_fn(|_| value()),
            fpu: (0..2696).map(|_| value() as u8).collect(),
            xcr0: value(),
            msrs: (0..60).map(|_| (value() as u32, value())).collect(),
            tsc_offset: value(),
            instructions: value(),
            interrupt_shadow: true,
            halted: false,
            nmi_blocked: true,
            nmi_waits: true,
            undelivered: None,
        }
    }

    fn encoded(state: &CpuState) -> Vec<u8> {
        let mut encoder = Encoder::default();
        state.encode(&mut encoder);
        encoder.finish()
    }

    fn decoded(bytes: &[u8]) -> Result<CpuState, EncodingError> {
        let mut decoder = Decoder::new(bytes);
        let state = CpuState::decode(&mut decoder)?;
        decoder.finish().map(|()| state)
    }

    #[test]
    fn a_state_with_odd_values_in_every_field_survives() {
        let exception = |error_code| Undelivered::Exception {
            vector: 14,
            error_code,
        };
        let interrupt = |software| Undelivered::Interrupt {
            vector: 0x80,
            software,
        };
        for undelivered in [
            None,
            Some(interrupt(true)),
            Some(interrupt(false)),
            Some(Undelivered::NonMaskable),
            Some(exception(None)),
            Some(exception(Some(0x8000_0006))),
        ] {
            let mut state = odd();
            state.undelivered = undelivered;
            assert_eq!(decoded(&encoded(&state)), Ok(state.clone()));
            state.halted = true;
            state.interrupt_shadow = false;
            assert_eq!(decoded(&encoded(&state)), Ok(state));
        }
        let mut zeros = odd();
        zeros.fpu[600..].fill(0);
        let saved = encoded(&odd()).len() - encoded(&zeros).len();
        assert_eq!(saved, zeros.fpu.len() - 600);
        assert_eq!(decoded(&encoded(&zeros)), Ok(zeros));
        // The largest with some room, in one message.
        assert!(encoded(&odd()).len() < 5 << 10);
        assert_eq!(decoded(&encoded(&CpuState::reset())), Ok(CpuState::reset()));
    }

    #[test]
    fn bytes_that_are_no_state_are_refused_and_never_panic() {
        let whole = encoded(&odd());
        for length in 0..whole.len() {
            let refused = decoded(&whole[..length]);
            assert_eq!(refused, Err(EncodingError::Short(length)));
        }
        let mut long = whole.clone();
        long.push(0);
        assert_eq!(decoded(&long), Err(EncodingError::Long(1)));
        let mut wrong = whole.clone();
        *wrong.last_mut().unwrap() = 6;
        assert_eq!(decoded(&wrong), Err(EncodingError::Value("undelivered")));
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] ^= 0xff;
            // Whatever comes out is a state or an error.
            let _ = decoded(&damaged);
        }
    }
}
