//! What becomes void when translations, code or the mode change.
//!
//! Blocks are known by physical address and survive all of this but writes to
//! their page; what is dropped are the ways that lead to them: the jump caches,
//! and links to blocks of other pages, which hold as long as their epoch does.

use crate::cpu::Cpu;

/// Pages that instructions were found on since the jump caches were cleared, as
/// a set that may say yes where it should say no.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExecutedPages([u64; 16]);

impl ExecutedPages {
    fn slot(address: u64) -> (usize, u64) {
        let page = address >> 12;
        let hash = (page ^ page >> 10) & 1023;
        ((hash >> 6) as usize, 1 << (hash & 63))
    }

    /// Instructions of `address`'s page were found.
    pub fn insert(&mut self, address: u64) {
        let (word, bit) = Self::slot(address);
        self.0[word] |= bit;
    }

    /// Whether instructions may have been found there.
    pub fn contains(&self, address: u64) -> bool {
        let (word, bit) = Self::slot(address);
        self.0[word] & bit != 0
    }
}

impl Cpu {
    /// Everything that was translated: a change of the paging mode, a write to
    /// CR4, or somebody's demand.
    pub fn flush_everything(&mut self) {
        for tlb in &mut self.tlbs {
            tlb.flush_all();
        }
        self.fetch.flush_all();
        self.void_links();
    }

    /// What is not global: a write to CR3.
    pub fn flush_local(&mut self) {
        for tlb in &mut self.tlbs {
            tlb.flush_local();
        }
        self.fetch.flush_local();
        self.jump_caches[1].clear();
        if self.supervisor_jumps_local {
            self.jump_caches[0].clear();
            self.supervisor_jumps_local = false;
        }
        self.local_epoch += 2;
    }

    /// INVLPG.
    pub fn flush_page(&mut self, address: u64) {
        for tlb in &mut self.tlbs {
            tlb.flush_page(address);
        }
        self.fetch.flush_page(address);
        if self.executed_pages.contains(address) {
            self.void_links();
        }
    }

    /// All links between pages, and both jump caches.
    pub fn void_links(&mut self) {
        for cache in &mut self.jump_caches {
            cache.clear();
        }
        self.supervisor_jumps_local = false;
        self.executed_pages = ExecutedPages::default();
        self.local_epoch += 2;
        self.global_epoch += 2;
    }

    /// Blocks with bytes on a guest-physical page die.
    pub fn drop_code(&mut self, page: u64) {
        self.code.drop_page(page);
    }

    /// All blocks die, and are freed when no block runs.
    pub fn drop_all_code(&mut self) {
        self.code.drop_all();
    }

    /// Frees all blocks. Only between blocks.
    pub fn clear_code(&mut self) {
        self.void_links();
        self.block = std::ptr::null();
        self.code.clear();
    }
}
