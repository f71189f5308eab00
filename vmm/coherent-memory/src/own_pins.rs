//! The pages that the calling thread has pinned.
//!
//! The controller gives no new pin of a page that waits for its pins to go. A thread that has
//! such a page pinned gets another pin of it: otherwise it would wait for itself.

use std::cell::RefCell;

use super::shell::SharedMemory;

std::thread_local! {
    /// One entry for each pin: the address of its memory, and the page.
    static PINS: RefCell<Vec<(usize, u64)>> = const { RefCell::new(Vec::new()) };
}

impl SharedMemory {
    /// The calling thread was given a pin.
    pub(super) fn add_own_pin(&self, page: u64) {
        PINS.with_borrow_mut(|pins| pins.push(self.pin_of(page)));
    }

    /// The calling thread gives a pin back.
    pub(super) fn remove_own_pin(&self, page: u64) {
        let pin = self.pin_of(page);
        PINS.with_borrow_mut(|pins| {
            if let Some(index) = pins.iter().rposition(|own| *own == pin) {
                pins.swap_remove(index);
            }
        });
    }

    /// Whether the calling thread has a page pinned.
    pub(super) fn is_pinned_here(&self, page: u64) -> bool {
        PINS.with_borrow(|pins| pins.contains(&self.pin_of(page)))
    }

    fn pin_of(&self, page: u64) -> (usize, u64) {
        (std::ptr::from_ref(self).addr(), page)
    }
}
