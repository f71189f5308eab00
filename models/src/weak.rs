//! loom's atomics, of which a mutant makes one ordering weaker.

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::SeqCst as AtOnce;

pub use loom::sync::atomic::Ordering;

/// What is weaker than in production.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Mutant {
    /// Nothing.
    None,
    /// Fences are left out.
    NoFence,
    /// Every store of an index is relaxed: what it publishes may be seen after it.
    RelaxedStore,
    /// Every load of an index is relaxed: what it publishes may not be seen yet.
    RelaxedLoad,
}

/// The mutant of the test that runs; [`holds`] lets one run at a time.
static MUTANT: AtomicU8 = AtomicU8::new(Mutant::None as u8);

fn is(mutant: Mutant) -> bool {
    MUTANT.load(AtOnce) == mutant as u8
}

/// Whether `model` holds in all interleavings, under `mutant`.
pub fn holds(mutant: Mutant, model: fn()) -> bool {
    holds_within(None, mutant, model)
}

/// As [`holds`], in all interleavings in which threads are interrupted at most so often: for
/// models too large for all. Errors of lock-free code need few.
pub fn holds_within(preemptions: Option<usize>, mutant: Mutant, model: fn()) -> bool {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    // A model that fails poisons it, which means nothing here.
    let _one = ONE.lock().unwrap_or_else(|poison| poison.into_inner());
    MUTANT.store(mutant as u8, AtOnce);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    std::panic::catch_unwind(|| builder.check(model)).is_ok()
}

/// As loom's, but for mutants.
pub fn fence(ordering: Ordering) {
    if !is(Mutant::NoFence) {
        loom::sync::atomic::fence(ordering);
    }
}

/// As loom's, but that stores come one after the other: loom does not know that what a
/// swap read, and what it wrote, are neighbours in the order of all stores, and lets a
/// thread load its own swap's value after it must see a later store. A relaxed swap
/// instead of a relaxed store orders nothing else.
#[derive(Default)]
pub struct AtomicU32(loom::sync::atomic::AtomicU32);

impl AtomicU32 {
    /// Loads the value.
    pub fn load(&self, ordering: Ordering) -> u32 {
        self.0.load(ordering)
    }

    /// Stores the value; relaxed only.
    pub fn store(&self, value: u32, ordering: Ordering) {
        assert_eq!(ordering, Ordering::Relaxed);
        self.0.swap(value, ordering);
    }

    /// Stores the value and gives the one before.
    pub fn swap(&self, value: u32, ordering: Ordering) -> u32 {
        self.0.swap(value, ordering)
    }
}

/// As loom's, but for mutants.
#[derive(Default)]
pub struct AtomicU64(loom::sync::atomic::AtomicU64);

impl AtomicU64 {
    /// Loads the value.
    pub fn load(&self, ordering: Ordering) -> u64 {
        self.0.load(match is(Mutant::RelaxedLoad) {
            true => Ordering::Relaxed,
            false => ordering,
        })
    }

    /// Stores the value.
    pub fn store(&self, value: u64, ordering: Ordering) {
        let ordering = match is(Mutant::RelaxedStore) {
            true => Ordering::Relaxed,
            false => ordering,
        };
        self.0.store(value, ordering);
    }
}
