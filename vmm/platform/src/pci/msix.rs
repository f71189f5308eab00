//! MSI-X: the table of messages, and the pending bits of masked vectors (PCI Local Bus 3.0,
//! 6.8.2).
//!
//! A vector is *free* (signalled at once), or *masked* (its own bit, or the
//! whole function's): then a signal sets its pending bit, and unmasking sends it.

use std::sync::{Arc, Mutex, OnceLock};

use serde::{Deserialize, Serialize};

use crate::bus::BusDevice;
use crate::interrupts::MessageSink;
use weft_confine::lock;

/// Vectors that fit the layout below.
pub const VECTORS_MAX: u16 = 128;
/// Bytes of the BAR that holds table and pending bits.
pub const BAR_SIZE: u64 = 0x1000;
/// The offset of the pending bits in the BAR.
pub const PENDING: u32 = 0x800;
const ENTRY: usize = 16;
const CONTROL_ENABLE: u16 = 1 << 15;
const CONTROL_MASK: u16 = 1 << 14;

/// One entry of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vector {
    /// The address of the message's write.
    pub address: u64,
    /// The data of the message's write.
    pub data: u32,
    /// Whether the vector is masked.
    pub masked: bool,
}

impl Vector {
    const RESET: Self = Self {
        address: 0,
        data: 0,
        masked: true,
    };
}

/// Everything, saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MsixState {
    vectors: Vec<Vector>,
    /// One bit per vector.
    pending: u128,
    enabled: bool,
    masked: bool,
}

/// The table of one function.
pub struct Msix {
    state: Mutex<MsixState>,
    sink: Arc<dyn MessageSink>,
    /// Called after changes of the table, without a lock.
    on_change: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Msix {
    /// `count` vectors, masked, off.
    pub fn new(count: u16, sink: Arc<dyn MessageSink>) -> Self {
        Self {
            state: Mutex::new(MsixState::reset(usize::from(count.min(VECTORS_MAX)))),
            sink,
            on_change: OnceLock::new(),
        }
    }

    /// Sets what is called after each write to the table. Once.
    pub fn listen(&self, hear: Box<dyn Fn() + Send + Sync>) {
        // A second one is a mistake that the first survives.
        let _ = self.on_change.set(hear);
    }

    /// Address and data of a vector's message, if a signal would send it at once.
    pub fn message(&self, vector: u16) -> Option<(u64, u32)> {
        let state = lock(&self.state);
        let vector = state.vectors.get(usize::from(vector))?;
        let free = state.enabled && !state.masked && !vector.masked;
        free.then_some((vector.address, vector.data))
    }

    /// Whether MSI-X is enabled.
    pub fn enabled(&self) -> bool {
        lock(&self.state).enabled
    }

    /// Sends the message of `vector`, or sets its pending bit if it is masked. A vector that does
    /// not exist is ignored.
    pub fn signal(&self, vector: u16) {
        let message = lock(&self.state).signal(usize::from(vector));
        if let Some((address, data)) = message {
            self.sink.send(address, data);
        }
    }

    /// Applies a change of the message control register.
    pub fn control(&self, value: u16) {
        let waiting = {
            let mut state = lock(&self.state);
            state.enabled = value & CONTROL_ENABLE != 0;
            state.masked = value & CONTROL_MASK != 0;
            state.release()
        };
        self.send_all(waiting);
    }

    /// A copy of everything.
    pub fn save(&self) -> MsixState {
        lock(&self.state).clone()
    }

    /// Restores `saved`; `false` if it has another number of vectors.
    pub fn restore(&self, saved: &MsixState) -> bool {
        let mut state = lock(&self.state);
        let fits = saved.vectors.len() == state.vectors.len();
        if fits {
            *state = saved.clone();
        }
        fits
    }

    fn send_all(&self, messages: Vec<(u64, u32)>) {
        for (address, data) in messages {
            self.sink.send(address, data);
        }
    }
}

impl MsixState {
    fn reset(count: usize) -> Self {
        Self {
            vectors: vec![Vector::RESET; count],
            pending: 0,
            enabled: false,
            masked: false,
        }
    }

    fn signal(&mut self, index: usize) -> Option<(u64, u32)> {
        let vector = *self.vectors.get(index)?;
        if !self.enabled {
            return None;
        }
        if self.masked || vector.masked {
            self.pending |= 1 << index;
            return None;
        }
        Some((vector.address, vector.data))
    }

    /// Takes the pending messages of vectors that are unmasked now.
    fn release(&mut self) -> Vec<(u64, u32)> {
        if !self.enabled || self.masked || self.pending == 0 {
            return Vec::new();
        }
        let mut messages = Vec::new();
        for (index, vector) in self.vectors.iter().enumerate() {
            if self.pending & 1 << index != 0 && !vector.masked {
                self.pending &= !(1 << index);
                messages.push((vector.address, vector.data));
            }
        }
        messages
    }

    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset >= u64::from(PENDING) {
            let bits = self.pending.to_le_bytes();
            let from = (offset - u64::from(PENDING)) as usize;
            for (byte, at) in data.iter_mut().zip(from..) {
                *byte = bits.get(at).copied().unwrap_or(0);
            }
        } else if let Some(vector) = self.vectors.get(offset as usize / ENTRY) {
            let mut bytes = [0; ENTRY];
            bytes[..8].copy_from_slice(&vector.address.to_le_bytes());
            bytes[8..12].copy_from_slice(&vector.data.to_le_bytes());
            bytes[12] = u8::from(vector.masked);
            for (byte, at) in data.iter_mut().zip(offset as usize % ENTRY..) {
                *byte = bytes.get(at).copied().unwrap_or(0);
            }
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let Some(vector) = self.vectors.get_mut(offset as usize / ENTRY) else {
            return;
        };
        let mut words = data.as_chunks::<4>().0.iter();
        for at in (offset as usize % ENTRY..ENTRY).step_by(4) {
            let Some(word) = words.next().map(|word| u32::from_le_bytes(*word)) else {
                return;
            };
            match at {
                0 => vector.address = vector.address & !0xffff_ffff | u64::from(word & !3),
                4 => vector.address = vector.address & 0xffff_ffff | u64::from(word) << 32,
                8 => vector.data = word,
                _ => vector.masked = word & 1 != 0,
            }
        }
    }
}

impl BusDevice for Msix {
    fn read(&self, offset: u64, data: &mut [u8]) {
        lock(&self.state).read(offset, data);
    }

    /// Only whole words count (6.8.2: DWORD or QWORD accesses).
    fn write(&self, offset: u64, data: &[u8]) {
        if !offset.is_multiple_of(4) || offset >= u64::from(PENDING) {
            return;
        }
        let waiting = {
            let mut state = lock(&self.state);
            state.write(offset, data);
            state.release()
        };
        self.send_all(waiting);
        if let Some(hear) = self.on_change.get() {
            hear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Sent(Mutex<Vec<(u64, u32)>>);

    impl MessageSink for Sent {
        fn send(&self, address: u64, data: u32) {
            lock(&self.0).push((address, data));
        }
    }

    fn msix() -> (Arc<Sent>, Msix) {
        let sent = Arc::new(Sent::default());
        let msix = Msix::new(3, sent.clone());
        msix.write(16, &0xfee0_1000_u64.to_le_bytes());
        msix.write(24, &0x41_u32.to_le_bytes());
        (sent, msix)
    }

    #[test]
    fn a_masked_vector_waits_and_is_not_forgotten() {
        let (sent, msix) = msix();
        msix.signal(1);
        assert!(lock(&sent.0).is_empty(), "off");
        msix.control(CONTROL_ENABLE);
        msix.signal(1);
        let mut pending = [0; 8];
        msix.read(u64::from(PENDING), &mut pending);
        assert_eq!(u64::from_le_bytes(pending), 2);
        msix.control(CONTROL_ENABLE | CONTROL_MASK);
        msix.write(28, &[0; 4]);
        assert!(lock(&sent.0).is_empty(), "the function is masked");
        msix.control(CONTROL_ENABLE);
        assert_eq!(*lock(&sent.0), [(0xfee0_1000, 0x41)]);
        msix.signal(1);
        assert_eq!(lock(&sent.0).len(), 2);
        msix.signal(3);
        msix.signal(0xffff);
        assert_eq!(lock(&sent.0).len(), 2);
    }

    #[test]
    fn odd_accesses_are_harmless_and_state_survives() {
        let (sent, msix) = msix();
        msix.write(17, &[0xff; 4]);
        msix.write(24, &[0xff]);
        msix.write(0xff0, &[0xff; 8]);
        let mut data = [0; 8];
        msix.read(0xffc, &mut data);
        msix.read(16, &mut data);
        assert_eq!(u64::from_le_bytes(data), 0xfee0_1000);
        msix.control(CONTROL_ENABLE);
        msix.signal(1);
        let saved = serde_json::to_string(&msix.save()).unwrap();
        let other = Msix::new(3, sent.clone());
        assert!(other.restore(&serde_json::from_str(&saved).unwrap()));
        other.write(28, &[0; 4]);
        assert_eq!(*lock(&sent.0), [(0xfee0_1000, 0x41)]);
        assert!(!Msix::new(2, sent).restore(&other.save()));
    }
}
