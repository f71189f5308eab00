//! loom's atomics with SeqCst as x86-64 does it, which is all that Weft runs on.
//!
//! loom takes SeqCst accesses for acquire and release, which lets a store pass a later
//! load; but it knows fences. So a SeqCst store is an exchange, as compilers make it, and
//! what reads and writes at once has a fence on both sides, as locked instructions have. A
//! SeqCst load is an acquiring load. All else is loom's.

use crate::weak::fence;

pub use loom::sync::atomic::Ordering;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, SeqCst};

/// Whether this is SeqCst: what it is without, and the fence.
fn split(ordering: Ordering) -> (Ordering, bool) {
    match ordering {
        SeqCst => (AcqRel, true),
        other => (other, false),
    }
}

fn both_sides<T>(ordering: Ordering, access: impl FnOnce(Ordering) -> T) -> T {
    let (ordering, fenced) = split(ordering);
    if fenced {
        fence(SeqCst);
    }
    let value = access(ordering);
    if fenced {
        fence(SeqCst);
    }
    value
}

fn reading(ordering: Ordering) -> Ordering {
    match ordering {
        SeqCst => Acquire,
        other => other,
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty, { $($operation:ident)* }) => {
        #[derive(Debug, Default)]
        pub struct $name(loom::sync::atomic::$name);

        #[allow(dead_code, reason = "no file uses all of every type")]
        impl $name {
            pub fn new(value: $value) -> Self {
                Self(loom::sync::atomic::$name::new(value))
            }

            pub fn load(&self, ordering: Ordering) -> $value {
                self.0.load(reading(ordering))
            }

            pub fn store(&self, value: $value, ordering: Ordering) {
                match ordering {
                    SeqCst => drop(self.swap(value, ordering)),
                    other => self.0.store(value, other),
                }
            }

            pub fn swap(&self, value: $value, ordering: Ordering) -> $value {
                both_sides(ordering, |ordering| self.0.swap(value, ordering))
            }

            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                both_sides(success, |success| {
                    self.0.compare_exchange(current, new, success, reading(failure))
                })
            }

            pub fn fetch_update(
                &self,
                set: Ordering,
                fetch: Ordering,
                update: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                both_sides(set, |set| self.0.fetch_update(set, reading(fetch), update))
            }

            $(
                pub fn $operation(&self, value: $value, ordering: Ordering) -> $value {
                    both_sides(ordering, |ordering| self.0.$operation(value, ordering))
                }
            )*
        }
    };
}

atomic!(AtomicBool, bool, {});
atomic!(AtomicI32, i32, {});
atomic!(AtomicU8, u8, {});
atomic!(AtomicU32, u32, { fetch_add fetch_sub fetch_or fetch_and });
atomic!(AtomicU64, u64, { fetch_add });
atomic!(AtomicUsize, usize, { fetch_max });
