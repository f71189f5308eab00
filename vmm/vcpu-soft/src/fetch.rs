//! Where instructions are: from linear to guest-physical pages, for decoding.

use weft_vcpu::PAGE_SIZE;

const ENTRIES: usize = 64;

/// No page's linear address.
const INVALID: u64 = 1;

#[derive(Clone, Copy)]
struct Entry {
    page: u64,
    physical: u64,
    global: bool,
}

const EMPTY: Entry = Entry {
    page: INVALID,
    physical: 0,
    global: false,
};

/// Pages that may be executed, for supervisor (0) and user mode (1).
pub struct FetchCache {
    entries: [[Entry; ENTRIES]; 2],
}

impl Default for FetchCache {
    fn default() -> Self {
        Self {
            entries: [[EMPTY; ENTRIES]; 2],
        }
    }
}

fn index(page: u64) -> usize {
    (page >> 12) as usize % ENTRIES
}

impl FetchCache {
    /// The guest-physical address of linear `address`, and whether the
    /// translation is global.
    pub fn find(&self, class: usize, address: u64) -> Option<(u64, bool)> {
        let page = address & !(PAGE_SIZE - 1);
        let entry = &self.entries[class & 1][index(page)];
        (entry.page == page).then(|| (entry.physical + (address - page), entry.global))
    }

    /// Keeps a translation.
    pub fn fill(&mut self, class: usize, address: u64, physical: u64, global: bool) {
        let page = address & !(PAGE_SIZE - 1);
        self.entries[class & 1][index(page)] = Entry {
            page,
            physical: physical & !(PAGE_SIZE - 1),
            global,
        };
    }

    /// Forgets everything.
    pub fn flush_all(&mut self) {
        self.entries = [[EMPTY; ENTRIES]; 2];
    }

    /// Forgets what is not global.
    pub fn flush_local(&mut self) {
        for entry in self.entries.iter_mut().flatten() {
            if !entry.global {
                *entry = EMPTY;
            }
        }
    }

    /// Forgets the page of linear `address`.
    pub fn flush_page(&mut self, address: u64) {
        let page = address & !(PAGE_SIZE - 1);
        for class in &mut self.entries {
            let entry = &mut class[index(page)];
            if entry.page == page {
                *entry = EMPTY;
            }
        }
    }
}
