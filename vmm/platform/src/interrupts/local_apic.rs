//! A local APIC: xAPIC registers, priorities, the timer's interrupt (Intel SDM
//! volume 3, chapter 11). Belongs to its vCPU's thread.
//!
//! Invariants: an interrupt goes requested → in service → (EOI) gone; one is
//! handed to the CPU only when its class (bits 7 to 4) is above the processor
//! priority; vectors below 16 are never requested; while the APIC is disabled by
//! software every LVT entry is masked and no fixed interrupt is accepted.

mod encoding;
pub mod x2apic;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use weft_guest_memory::LOCAL_APIC;

use super::message::{Delivery, Destination, Interrupt};
use super::posted::{Logical, PostedInterrupts};
use super::timer::TimerState;
use crate::clock::TimeBase;

/// Bytes of the register window.
pub const LOCAL_APIC_SIZE: u64 = 0x1000;

/// Version 0x14 (integrated), six LVT entries, no suppression of EOI broadcasts.
const VERSION: u32 = 0x0005_0014;
const MASKED: u32 = 1 << 16;
const SOFTWARE_ENABLED: u32 = 1 << 8;
const SPURIOUS_RESET: u32 = 0xff;
const FORMAT_FLAT: u32 = 0xffff_ffff;

const BASE_BOOTSTRAP: u64 = 1 << 8;
const BASE_EXTENDED: u64 = 1 << 10;
const BASE_ENABLED: u64 = 1 << 11;

const ERROR_SEND_ILLEGAL: u32 = 1 << 5;
const ERROR_RECEIVE_ILLEGAL: u32 = 1 << 6;
const ERROR_REGISTER: u32 = 1 << 7;

const TIMER_PERIODIC: u32 = 1 << 17;
const TIMER_DEADLINE: u32 = 1 << 18;
const TIMER_MODES: u32 = TIMER_PERIODIC | TIMER_DEADLINE;

/// Entries of the local vector table, in the order of their registers.
const TIMER: usize = 0;
const ERROR: usize = 5;
const ENTRIES: usize = 6;
/// Bits that can be written: timer, thermal, performance, LINT0, LINT1, error.
const ENTRY_BITS: [u32; ENTRIES] = [0x700ff, 0x107ff, 0x107ff, 0x1a7ff, 0x1a7ff, 0x100ff];

/// The registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalApicState {
    /// Identifier: the vCPU's number; software cannot change it.
    id: u8,
    /// IA32_APIC_BASE.
    base: u64,
    task_priority: u8,
    logical_destination: u32,
    destination_format: u32,
    spurious: u32,
    in_service: [u32; 8],
    level: [u32; 8],
    requested: [u32; 8],
    /// As it reads since the last write to it.
    error_status: u32,
    /// Gathered since.
    errors: u32,
    command_low: u32,
    command_high: u32,
    vectors: [u32; ENTRIES],
    timer: TimerState,
    non_maskable: bool,
    init: bool,
    start_up: Option<u8>,
}

/// What a write to a register asks of the rest of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing.
    Done,
    /// An interrupt to send.
    Send(Interrupt),
    /// A level-triggered interrupt ended: tell the I/O APIC.
    EndOfInterrupt(u8),
}

/// How the registers are reached (IA32_APIC_BASE, Intel SDM volume 3, 11.12.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Not at all.
    Disabled,
    /// At addresses of memory.
    XApic,
    /// By MSRs.
    X2Apic,
}

impl Mode {
    /// What a value of IA32_APIC_BASE asks for; `None`: a combination that is invalid.
    fn of(base: u64) -> Option<Self> {
        match (base & BASE_ENABLED != 0, base & BASE_EXTENDED != 0) {
            (false, false) => Some(Self::Disabled),
            (true, false) => Some(Self::XApic),
            (true, true) => Some(Self::X2Apic),
            (false, true) => None,
        }
    }

    /// Whether software may go from one to the other (11.12.5): out of x2APIC mode by
    /// way of Disabled alone, and into it from xAPIC mode alone.
    fn may_become(self, other: Self) -> bool {
        !matches!(
            (self, other),
            (Self::Disabled, Self::X2Apic) | (Self::X2Apic, Self::XApic)
        )
    }
}

pub struct LocalApic {
    state: LocalApicState,
    posted: Arc<PostedInterrupts>,
    time: TimeBase,
    /// x2APIC mode can be chosen.
    extends: bool,
    /// Something arrived or was accepted since [`LocalApic::wakes`] was asked.
    changed: bool,
}

impl LocalApic {
    /// As after power-on. `bootstrap`: of the CPU that starts the others.
    pub fn new(id: u8, bootstrap: bool, posted: Arc<PostedInterrupts>, time: TimeBase) -> Self {
        let base = LOCAL_APIC | BASE_ENABLED | if bootstrap { BASE_BOOTSTRAP } else { 0 };
        let apic = Self {
            state: LocalApicState::reset(id, base),
            posted,
            time,
            extends: false,
            changed: true,
        };
        apic.publish();
        apic
    }

    /// Lets the guest choose x2APIC mode.
    pub fn offer_x2apic(&mut self) {
        self.extends = true;
    }

    /// Back to the state after INIT: identifier and base stay, as do messages
    /// that arrived since (11.4.7.3).
    pub fn reset(&mut self) {
        let LocalApicState {
            id,
            base,
            non_maskable,
            init,
            start_up,
            ..
        } = self.state;
        self.state = LocalApicState {
            non_maskable,
            init,
            start_up,
            ..LocalApicState::reset(id, base)
        };
        self.publish();
    }

    /// All registers, with everything that arrived.
    pub fn save(&mut self) -> LocalApicState {
        self.collect();
        self.announce();
        self.state.clone()
    }

    /// Sets all registers; pending events are dropped.
    pub fn restore(&mut self, state: LocalApicState) {
        let _ = self.posted.take();
        self.state = state;
        self.publish();
        self.announce();
    }

    /// Sets all registers of a vCPU that comes from another slice. What is in the posted
    /// descriptor came after them and stays. The others know the identity already.
    pub fn arrive(&mut self, state: LocalApicState) {
        self.state = state;
        // The CPU looks at what waits as if it had just arrived.
        self.changed = true;
        self.publish();
        self.announce();
    }

    /// The check whether the vCPU has a reason to run reads only the descriptor, so an
    /// interrupt that was taken from it and is pending in the registers is announced there.
    fn announce(&mut self) {
        let state = &self.state;
        let requested = state.requested.iter().any(|word| *word != 0);
        if requested || state.non_maskable || state.init || state.start_up.is_some() {
            self.changed = true;
            self.posted.announce();
        }
    }

    /// A 32-bit register. `now` is the guest's TSC.
    pub fn read(&mut self, offset: u64, now: u64) -> u32 {
        self.collect();
        let state = &self.state;
        match offset {
            0x20 => u32::from(state.id) << 24,
            0x30 => VERSION,
            0x80 => u32::from(state.task_priority),
            // Arbitration priority and remote read: gone since the Pentium 4.
            0x90 | 0xb0 | 0xc0 => 0,
            0xa0 => u32::from(state.processor_priority()),
            0xd0 => state.logical_destination,
            0xe0 => state.destination_format,
            0xf0 => state.spurious,
            0x100..0x180 => word(&state.in_service, offset),
            0x180..0x200 => word(&state.level, offset),
            0x200..0x280 => word(&state.requested, offset),
            0x280 => state.error_status,
            0x300 => state.command_low,
            0x310 => state.command_high,
            0x320..0x380 => entry(offset).map_or(0, |entry| state.vectors[entry]),
            0x380 if state.counts() => state.timer.initial_count(),
            0x390 if state.counts() => state.timer.current_count(now, &self.time),
            0x380 | 0x390 => 0,
            0x3e0 => state.timer.divide(),
            _ => {
                self.error(ERROR_REGISTER);
                0
            }
        }
    }

    /// Writes a 32-bit register.
    pub fn write(&mut self, offset: u64, value: u32, now: u64) -> Outcome {
        self.collect();
        let state = &mut self.state;
        match offset {
            // Read-only, for all that software does with them.
            0x20 | 0x30 | 0x90 | 0xa0 | 0xc0 | 0x100..0x280 | 0x390 => {}
            0x80 => self.set_task_priority_register(value as u8),
            0xb0 => return self.end_of_interrupt(),
            0xd0 => {
                state.logical_destination = value & 0xff00_0000;
                self.publish();
            }
            0xe0 => {
                state.destination_format = value | 0x0fff_ffff;
                self.publish();
            }
            0xf0 => self.set_spurious(value),
            0x280 => state.error_status = std::mem::take(&mut state.errors),
            0x300 => {
                let high = (self.state.command_high >> 24) as u8;
                return self.command(value, |logical| Destination::of_8_bits(high, logical));
            }
            0x310 => state.command_high = value & 0xff00_0000,
            0x320..0x380 => {
                if let Some(entry) = entry(offset) {
                    self.set_entry(entry, value);
                }
            }
            0x380 if state.counts() => state.timer.start(value, now, &self.time),
            0x380 => {}
            0x3e0 if state.counts() => state.timer.set_divide(value, now, &self.time),
            // The deadline is none of the counter's.
            0x3e0 => state.timer.keep_divide(value),
            _ => self.error(ERROR_REGISTER),
        }
        Outcome::Done
    }

    /// Whether an interrupt above the processor priority waits.
    pub fn interrupt_waits(&mut self) -> bool {
        self.collect();
        self.state.deliverable().is_some()
    }

    /// Takes the waiting interrupt of the highest priority into service.
    pub fn take_interrupt(&mut self) -> Option<u8> {
        self.collect();
        let vector = self.state.deliverable()?;
        self.changed = true;
        clear(&mut self.state.requested, vector);
        set(&mut self.state.in_service, vector);
        self.publish_priority();
        Some(vector)
    }

    /// Whether a CPU that halted has a reason to run: an INIT waits, or an
    /// interrupt does and something arrived or was accepted since this was asked
    /// last. Else the CPU saw what waits and does not accept it.
    pub fn wakes(&mut self) -> bool {
        // Once: what would be collected after a look would not be seen.
        self.collect();
        let changed = std::mem::take(&mut self.changed);
        let state = &self.state;
        let waits = state.non_maskable || state.deliverable().is_some();
        state.init || waits && changed
    }

    /// Takes the non-maskable interrupt.
    pub fn take_non_maskable(&mut self) -> bool {
        self.collect();
        let taken = std::mem::take(&mut self.state.non_maskable);
        self.changed |= taken;
        taken
    }

    /// Takes the INIT, and the vector of a start-up that came after it. Both at
    /// once: a start-up must not be seen without the INIT before it.
    pub fn take_start(&mut self) -> (bool, Option<u8>) {
        self.collect();
        let init = std::mem::take(&mut self.state.init);
        (init, self.state.start_up.take())
    }

    /// CR8.
    pub fn task_priority(&self) -> u8 {
        self.state.task_priority >> 4
    }

    /// Sets CR8.
    pub fn set_task_priority(&mut self, priority: u8) {
        self.set_task_priority_register((priority & 0xf) << 4);
    }

    /// IA32_APIC_BASE.
    pub fn base(&self) -> u64 {
        self.state.base
    }

    /// Sets IA32_APIC_BASE. Refused: a mode that is not offered or may not follow the
    /// one before, and another address, which no system asks for.
    pub fn set_base(&mut self, value: u64) -> bool {
        const MODES: u64 = BASE_ENABLED | BASE_EXTENDED;
        let Some(mode) = Mode::of(value) else {
            return false;
        };
        if value & !MODES != self.state.base & !MODES
            || !self.mode().may_become(mode)
            || mode == Mode::X2Apic && !self.extends
        {
            return false;
        }
        match mode {
            Mode::Disabled => self.reset(),
            Mode::XApic => {}
            // Its upper half is no register of its own any more (11.12.5.1).
            Mode::X2Apic if self.mode() != mode => self.state.command_high = 0,
            Mode::X2Apic => {}
        }
        self.state.base = value;
        self.publish();
        true
    }

    /// How the registers are reached.
    pub fn mode(&self) -> Mode {
        Mode::of(self.state.base).unwrap_or(Mode::Disabled)
    }

    /// IA32_TSC_DEADLINE: zero when not armed, or in another mode.
    pub fn deadline_register(&self) -> u64 {
        if self.state.counts() {
            return 0;
        }
        self.state.timer.deadline().unwrap_or(0)
    }

    /// Sets IA32_TSC_DEADLINE; ignored in another mode (11.5.4.1).
    pub fn set_deadline_register(&mut self, value: u64) {
        if !self.state.counts() {
            self.state.timer.set_deadline(value);
        }
    }

    /// Guest TSC at which the timer fires next.
    pub fn deadline(&self) -> Option<u64> {
        self.state.timer.deadline()
    }

    /// Requests the timer's interrupt when its time has come.
    pub fn advance(&mut self, now: u64) {
        let entry = self.state.vectors[TIMER];
        let periodic = entry & TIMER_MODES == TIMER_PERIODIC;
        if self.state.timer.expire(now, periodic, &self.time) {
            self.fire(TIMER);
        }
    }

    /// Takes the pending events into the registers.
    fn collect(&mut self) {
        if !self.posted.has_pending() {
            return;
        }
        let mut pending = self.posted.take();
        self.changed = true;
        let state = &mut self.state;
        state.non_maskable |= pending.non_maskable;
        if pending.init {
            state.init = true;
            state.start_up = None;
        }
        state.start_up = state.start_up.or(pending.start_up);
        if !self.accepts_fixed() {
            return;
        }
        let illegal = pending.requested[0] & 0xffff;
        pending.requested[0] &= !0xffff;
        for word in 0..8 {
            let (requested, level) = (pending.requested[word], pending.level[word]);
            self.state.requested[word] |= requested;
            self.state.level[word] = self.state.level[word] & !requested | level & requested;
        }
        if illegal != 0 {
            self.error(ERROR_RECEIVE_ILLEGAL);
        }
    }

    fn set_task_priority_register(&mut self, value: u8) {
        self.state.task_priority = value;
        self.publish_priority();
    }

    fn end_of_interrupt(&mut self) -> Outcome {
        let Some(vector) = highest(&self.state.in_service) else {
            return Outcome::Done;
        };
        clear(&mut self.state.in_service, vector);
        self.publish_priority();
        if is_set(&self.state.level, vector) {
            Outcome::EndOfInterrupt(vector)
        } else {
            Outcome::Done
        }
    }

    fn set_spurious(&mut self, value: u32) {
        self.state.spurious = value & 0x1ff;
        self.publish();
        if value & SOFTWARE_ENABLED == 0 {
            for entry in &mut self.state.vectors {
                *entry |= MASKED;
            }
        }
    }

    fn set_entry(&mut self, entry: usize, value: u32) {
        let state = &mut self.state;
        let mut value = value & ENTRY_BITS[entry];
        if state.spurious & SOFTWARE_ENABLED == 0 {
            value |= MASKED;
        }
        if entry == TIMER && (value ^ state.vectors[TIMER]) & TIMER_DEADLINE != 0 {
            state.timer.disarm();
        }
        state.vectors[entry] = value;
    }

    /// A write to the lower half of the command register; `target`: what its upper half
    /// says, told whether it is a logical destination.
    fn command(&mut self, value: u32, target: impl FnOnce(bool) -> Destination) -> Outcome {
        // The delivery status (bit 12) reads as idle: a message leaves at once.
        self.state.command_low = value & 0x000c_cfff;
        match Interrupt::from_command(value, target) {
            Some(interrupt) => self.send(interrupt),
            None => Outcome::Done,
        }
    }

    fn send(&mut self, interrupt: Interrupt) -> Outcome {
        let has_vector = matches!(
            interrupt.delivery,
            Delivery::Fixed | Delivery::LowestPriority
        );
        if has_vector && interrupt.vector < 16 {
            self.error(ERROR_SEND_ILLEGAL);
            return Outcome::Done;
        }
        Outcome::Send(interrupt)
    }

    /// Requests what an LVT entry says, unless it is masked.
    fn fire(&mut self, entry: usize) {
        let value = self.state.vectors[entry];
        if value & MASKED != 0 {
            return;
        }
        if value & 0xff < 16 {
            self.state.errors |= ERROR_RECEIVE_ILLEGAL;
            return;
        }
        self.changed = true;
        set(&mut self.state.requested, value as u8);
        clear(&mut self.state.level, value as u8);
    }

    /// Notes an error; the first of its kind since the last look interrupts.
    fn error(&mut self, bit: u32) {
        if self.state.errors & bit == 0 {
            self.state.errors |= bit;
            self.fire(ERROR);
        }
    }

    fn publish(&self) {
        let identity = (self.state.logical_destination >> 24) as u8;
        let logical = match self.mode() {
            Mode::X2Apic => Logical::Extended(self.state.id),
            _ if self.state.destination_format >> 28 == 0 => Logical::Cluster(identity),
            _ => Logical::Flat(identity),
        };
        self.posted.publish_identity(logical, self.accepts_fixed());
        self.publish_priority();
    }

    fn accepts_fixed(&self) -> bool {
        self.state.spurious & SOFTWARE_ENABLED != 0 && self.mode() != Mode::Disabled
    }

    fn publish_priority(&self) {
        self.posted
            .publish_priority(self.state.processor_priority());
    }
}

impl LocalApicState {
    fn reset(id: u8, base: u64) -> Self {
        Self {
            id,
            base,
            task_priority: 0,
            logical_destination: 0,
            destination_format: FORMAT_FLAT,
            spurious: SPURIOUS_RESET,
            in_service: [0; 8],
            level: [0; 8],
            requested: [0; 8],
            error_status: 0,
            errors: 0,
            command_low: 0,
            command_high: 0,
            vectors: [MASKED; ENTRIES],
            timer: TimerState::default(),
            non_maskable: false,
            init: false,
            start_up: None,
        }
    }

    /// The timer is in one of the two modes that count down.
    fn counts(&self) -> bool {
        self.vectors[TIMER] & TIMER_DEADLINE == 0
    }

    /// PPR (11.8.3.1).
    fn processor_priority(&self) -> u8 {
        let in_service = highest(&self.in_service).unwrap_or(0);
        if self.task_priority >> 4 >= in_service >> 4 {
            self.task_priority
        } else {
            in_service & 0xf0
        }
    }

    fn deliverable(&self) -> Option<u8> {
        let vector = highest(&self.requested)?;
        (vector >> 4 > self.processor_priority() >> 4).then_some(vector)
    }
}

fn entry(offset: u64) -> Option<usize> {
    (0x320..0x380)
        .contains(&offset)
        .then(|| ((offset - 0x320) >> 4) as usize)
}

fn word(words: &[u32; 8], offset: u64) -> u32 {
    words[(offset >> 4 & 7) as usize]
}

fn highest(words: &[u32; 8]) -> Option<u8> {
    let word = words.iter().rposition(|word| *word != 0)?;
    Some((word as u8) << 5 | (31 - words[word].leading_zeros()) as u8)
}

fn set(words: &mut [u32; 8], vector: u8) {
    words[usize::from(vector >> 5)] |= 1 << (vector & 31);
}

fn clear(words: &mut [u32; 8], vector: u8) {
    words[usize::from(vector >> 5)] &= !(1 << (vector & 31));
}

fn is_set(words: &[u32; 8], vector: u8) -> bool {
    words[usize::from(vector >> 5)] & 1 << (vector & 31) != 0
}

#[cfg(test)]
mod tests;
