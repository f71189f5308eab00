//! A slice that turns against home: it damages the executions that it sends
//! away. For `weft-e2e --suite lend`; compiled with the feature `damage` only.
//!
//! The program chooses the damage by its GS base, which it sets before it leaves
//! home: the position in [`DAMAGES`] plus one. Any other base is left alone.

use weft_jump::Policy;
use weft_proc::context::Context;
use zerocopy::IntoBytes;

use super::machine::Engine;

const NOT_CANONICAL: usize = 1 << 63;
/// An address of the runtime's text.
const RUNTIME: usize = 0x6000_0000_1000;
/// Where words of the policy lie; its fields are its own.
const KIND: usize = 0;
const HERE: usize = 4;
const BASE: usize = 8;
const THRESHOLDS: usize = 88;
/// Where words of the extended state lie.
const MXCSR: usize = 24;
const XCOMP_BV: usize = 520;

const DAMAGES: [fn(&mut Context, &mut [u8]); 10] = [
    |context, _| context.registers.rip = NOT_CANONICAL,
    |context, _| context.fs = NOT_CANONICAL,
    |context, _| context.gs = NOT_CANONICAL,
    |context, _| context.registers.rip = RUNTIME,
    |context, _| set(&mut context.extended, XCOMP_BV, u32::MAX),
    |_, policy| set(policy, HERE, u32::MAX),
    |_, policy| set(policy, BASE, u32::MAX),
    |_, policy| set(policy, KIND, 77),
    |_, policy| set(policy, THRESHOLDS, 0),
    // Home goes on with these: what the runtime needs of them is its own.
    |context, _| {
        context.mask = u64::MAX;
        context.registers.selectors = u64::MAX;
        context.registers.eflags |= 0x1a_7000;
        set(&mut context.extended, MXCSR, u32::MAX);
    },
];

fn set(bytes: &mut [u8], at: usize, word: u32) {
    bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
}

impl Engine {
    /// Does what the program chose to the execution that is about to leave.
    pub fn damage(&mut self) {
        let chosen = self.travelling.gs.wrapping_sub(1);
        if let Some(damage) = DAMAGES.get(chosen).filter(|_| !self.is_home()) {
            damage(self.travelling, Policy::as_mut_bytes(&mut self.policy));
        }
    }
}
