//! A local APIC's registers as bytes, for a vCPU that goes to another host. Its timer's
//! deadline is a value of the guest's TSC, which all hosts share.

use weft_vcpu::encoding::{Decoder, Encoder, EncodingError, array};

use super::{LocalApicState, TimerState};

impl LocalApicState {
    pub fn encode(&self, to: &mut Encoder) {
        // Every field: one that is added must be added here.
        let Self {
            id,
            base,
            task_priority,
            logical_destination,
            destination_format,
            spurious,
            in_service,
            level,
            requested,
            error_status,
            errors,
            command_low,
            command_high,
            vectors,
            timer,
            non_maskable,
            init,
            start_up,
        } = self;
        to.u8(*id);
        to.u64(*base);
        to.u8(*task_priority);
        let registers = [logical_destination, destination_format, spurious].into_iter();
        let words = in_service.iter().chain(level).chain(requested);
        let more = [error_status, errors, command_low, command_high].into_iter();
        for word in registers.chain(words).chain(more).chain(vectors) {
            to.u32(*word);
        }
        timer.encode(to);
        to.bool(*non_maskable);
        to.bool(*init);
        to.bool(start_up.is_some());
        to.u8(start_up.unwrap_or(0));
    }

    /// # Errors
    /// The bytes are not what [`LocalApicState::encode`] writes.
    pub fn decode(from: &mut Decoder<'_>) -> Result<Self, EncodingError> {
        Ok(Self {
            id: from.u8()?,
            base: from.u64()?,
            task_priority: from.u8()?,
            logical_destination: from.u32()?,
            destination_format: from.u32()?,
            spurious: from.u32()?,
            in_service: array(|| from.u32())?,
            level: array(|| from.u32())?,
            requested: array(|| from.u32())?,
            error_status: from.u32()?,
            errors: from.u32()?,
            command_low: from.u32()?,
            command_high: from.u32()?,
            vectors: array(|| from.u32())?,
            timer: TimerState::decode(from)?,
            non_maskable: from.bool("non_maskable")?,
            init: from.bool("init")?,
            start_up: match (from.bool("start_up")?, from.u8()?) {
                (is_there, vector) if is_there || vector == 0 => is_there.then_some(vector),
                _ => return Err(EncodingError::Value("start_up")),
            },
        })
    }

    /// The local APIC identifier, which is the vCPU's number.
    pub fn id(&self) -> u8 {
        self.id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each field has a value that no other has.
    fn odd() -> LocalApicState {
        let mut next = 0x0bad_cafe_u32;
        let mut word = || {
            next = next.rotate_left(5) ^ 0x9e37_79b9;
            next
        };
        let mut timer = TimerState::default();
        timer.keep_divide(0xb);
        timer.set_deadline(0x0123_4567_89ab_cdef);
        LocalApicState {
            id: 254,
            base: 0xfee0_0c00,
            task_priority: 0x73,
            logical_destination: word(),
            destination_format: word(),
            spurious: word(),
            in_service: std::array::from_fn(|_| word()),
            level: std::array::from_fn(|_| word()),
            requested: std::array::from_fn(|_| word()),
            error_status: word(),
            errors: word(),
            command_low: word(),
            command_high: word(),
            vectors: std::array::from_fn(|_| word()),
            timer,
            non_maskable: true,
            init: false,
            start_up: Some(0x9a),
        }
    }

    fn round_trip(state: &LocalApicState) -> Result<LocalApicState, EncodingError> {
        let mut encoder = Encoder::default();
        state.encode(&mut encoder);
        let bytes = encoder.finish();
        for length in 0..bytes.len() {
            let short = LocalApicState::decode(&mut Decoder::new(&bytes[..length]));
            assert_eq!(short, Err(EncodingError::Short(length)));
        }
        let mut decoder = Decoder::new(&bytes);
        let state = LocalApicState::decode(&mut decoder)?;
        decoder.finish().map(|()| state)
    }

    #[test]
    fn registers_with_odd_values_survive() {
        let mut state = odd();
        assert_eq!(round_trip(&state), Ok(state.clone()));
        (state.init, state.non_maskable, state.start_up) = (true, false, None);
        state.timer = TimerState::default();
        assert_eq!(round_trip(&state), Ok(state));
    }
}
