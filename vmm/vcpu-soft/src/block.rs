//! Blocks of decoded instructions, where they are kept, and how they are found.
//!
//! A block is position-independent: it is known by the guest-physical address
//! of its first byte and the [`Mode`] it was decoded for. At most
//! [`BLOCK_INSTRUCTIONS_MAX`] instructions, all on one page, but for a block of
//! one instruction that crosses into the next.
//!
//! Invariants:
//!
//! - A block that is alive holds what memory holds: see [`crate::machine`].
//! - A block that died (its page was written to, or taken away) stays in memory,
//!   not alive, until [`CodeCache::clear`], because links and jump caches may
//!   still point to it. They check `alive` before they follow. Its instructions
//!   are freed when the next block is inserted: no handler is at work then.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ptr::null;

use iced_x86::{Decoder, Instruction};
use weft_vcpu::{CpuModel, PAGE_SIZE};

use crate::decode::Side;
use crate::model::decoder_options;
use crate::op::Op;

/// Instructions in a block, at most.
pub const BLOCK_INSTRUCTIONS_MAX: usize = 64;

/// Decoded instructions that one vCPU keeps, at most: about 16 MiB. One more
/// block, and all are dropped.
const INSTRUCTIONS_MAX: usize = 256 << 10;

/// What a block without instructions counts, as instructions.
const BLOCK_INSTRUCTIONS: usize = size_of::<Block>().div_ceil(size_of::<Op>());

/// Blocks that are allocated at one time.
const SLAB: usize = 256;

/// Entries of a jump cache, a power of two.
pub const JUMP_ENTRIES: usize = 1024;

/// What a block's instructions were decoded for: all that changes the meaning of
/// the same bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Mode(pub u8);

impl Mode {
    /// Instructions are of 32 bits.
    pub const BITS_32: u8 = 1;
    /// Instructions are of 64 bits.
    pub const BITS_64: u8 = 2;
    /// CPL 3: memory is accessed through the user TLB.
    pub const USER: u8 = 4;
    /// x87 and SSE instructions raise #NM or #UD (CR0.EM, CR0.TS, CR4.OSFXSR).
    pub const NO_FPU: u8 = 8;
    /// The model is [`CpuModel::V2`].
    const V2: u8 = 16;
    /// The model is [`CpuModel::V3`].
    const V3: u8 = 32;

    /// The bits for a model.
    pub const fn of_model(model: CpuModel) -> u8 {
        match model {
            CpuModel::V1 => 0,
            CpuModel::V2 => Self::V2,
            CpuModel::V3 => Self::V3,
        }
    }

    /// Which instructions there are.
    pub const fn model(self) -> CpuModel {
        match self.0 & (Self::V2 | Self::V3) {
            0 => CpuModel::V1,
            Self::V2 => CpuModel::V2,
            _ => CpuModel::V3,
        }
    }

    /// A decoder for the mode.
    pub fn decoder(self, bytes: &[u8], rip: u64) -> Decoder<'_> {
        Decoder::with_ip(self.bits(), bytes, rip, decoder_options(self.model()))
    }

    /// 16, 32 or 64.
    pub const fn bits(self) -> u32 {
        match self.0 & 3 {
            0 => 16,
            1 => 32,
            _ => 64,
        }
    }

    /// Whether code runs in 64-bit mode.
    pub const fn is_64(self) -> bool {
        self.0 & Self::BITS_64 != 0
    }

    /// Whether code runs at CPL 3.
    pub const fn is_user(self) -> bool {
        self.0 & Self::USER != 0
    }

    /// Whether x87 and SSE instructions fault.
    pub const fn no_fpu(self) -> bool {
        self.0 & Self::NO_FPU != 0
    }
}

/// Where a block's successor was found the last time.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Link {
    /// Null, or the block.
    pub block: *const Block,
    pub rip: u64,
    /// `Cpu::global_epoch` or `Cpu::local_epoch` when it was found; neither any
    /// more, and the link is void. [`SAME_PAGE`] never is.
    pub epoch: u64,
}

/// In [`Link::epoch`]: both blocks lie on one page, and die together.
pub const SAME_PAGE: u64 = 0;

impl Link {
    const NONE: Link = Link {
        block: null(),
        rip: 0,
        epoch: u64::MAX,
    };
}

/// Decoded instructions that are executed one after the other.
#[repr(C)]
pub struct Block {
    /// Generated code, or null.
    pub code: *const u8,
    /// The first of `ops`.
    pub first: *const Op,
    /// Instructions.
    pub count: u32,
    /// False once the bytes may have changed.
    pub alive: bool,
    /// What it was decoded for.
    pub mode: Mode,
    /// How often the interpreter ran it.
    pub executions: u32,
    /// Successors: of a taken direct branch, and of falling through.
    pub links: [Link; 2],
    /// Guest-physical address of the first byte.
    pub physical: u64,
    /// For an instruction that crosses pages: the second page's guest-physical
    /// address; else [`NO_PAGE`].
    second_page: u64,
    /// One per instruction, and an end mark where the last is no near branch.
    pub ops: Box<[Op]>,
    /// The instructions' bytes.
    pub bytes: Box<[u8]>,
    /// Side tables that ops point to.
    side: Option<Box<Box<[Side]>>>,
}

/// No page begins there.
const NO_PAGE: u64 = u64::MAX;

impl Block {
    /// A block out of its parts; `count` instructions.
    pub fn new(
        key: BlockKey,
        second_page: Option<u64>,
        count: u32,
        ops: Box<[Op]>,
        bytes: Box<[u8]>,
        side: Box<[Side]>,
    ) -> Self {
        Self {
            code: null(),
            first: ops.as_ptr(),
            count,
            alive: true,
            mode: key.mode,
            executions: 0,
            links: [Link::NONE; 2],
            physical: key.physical,
            second_page: second_page.unwrap_or(NO_PAGE),
            ops,
            bytes,
            side: (!side.is_empty()).then(|| Box::new(side)),
        }
    }

    /// For an instruction that crosses pages: the second page's guest-physical
    /// address.
    #[inline(always)]
    pub fn second_page(&self) -> Option<u64> {
        (self.second_page != NO_PAGE).then_some(self.second_page)
    }

    /// The instructions, decoded again as if the first were at `rip`.
    pub fn instructions(&self, rip: u64) -> impl Iterator<Item = Instruction> + '_ {
        let mut decoder = self.mode.decoder(&self.bytes, rip);
        (0..self.count).map(move |_| decoder.decode())
    }

    /// Whether it has generated code.
    pub fn is_translated(&self) -> bool {
        !self.code.is_null()
    }

    /// Never to be entered again.
    fn die(&mut self) {
        self.alive = false;
        self.code = null();
    }

    /// Frees what only a block that is alive needs.
    fn empty(&mut self) {
        self.ops = Box::default();
        self.bytes = Box::default();
        self.side = None;
    }

    /// The guest-physical page of its first byte.
    pub fn page(&self) -> u64 {
        self.physical & !(PAGE_SIZE - 1)
    }
}

/// By what a block is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockKey {
    /// Guest-physical address of the first byte.
    pub physical: u64,
    pub mode: Mode,
}

impl BlockKey {
    /// As one number: physical addresses have at most 52 bits.
    fn number(self) -> u64 {
        self.physical | u64::from(self.mode.0) << 56
    }
}

/// Multiplication by a large odd number: the keys are addresses.
#[derive(Default)]
pub struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }
}

type AddressMap<K, V> = HashMap<K, V, BuildHasherDefault<AddressHasher>>;

/// All blocks of one vCPU.
#[derive(Default)]
pub struct CodeCache {
    /// By [`BlockKey::number`].
    found: AddressMap<u64, *mut Block>,
    /// Blocks with bytes on a page, by its address.
    pages: AddressMap<u64, Vec<*mut Block>>,
    /// Every block since the last clearing, dead ones too: who owns them. Each
    /// list has room for [`SLAB`] and never grows, so that pointers stay right.
    owned: Vec<Vec<Block>>,
    /// Blocks that died since the last insertion.
    dead: Vec<*mut Block>,
    /// Of the blocks that are alive, and [`BLOCK_INSTRUCTIONS`] for each that is
    /// not.
    instructions: usize,
}

impl CodeCache {
    /// The block at `key`, if it is there and alive.
    pub fn find(&self, key: BlockKey) -> Option<*mut Block> {
        self.found.get(&key.number()).copied()
    }

    /// Whether another block of full size would be too much: then
    /// [`CodeCache::clear`] has to come first.
    pub fn is_full(&self) -> bool {
        self.instructions + BLOCK_INSTRUCTIONS_MAX > INSTRUCTIONS_MAX
    }

    /// Keeps a block, in place of one with the same key.
    pub fn insert(&mut self, block: Block) -> *mut Block {
        let key = BlockKey {
            physical: block.physical,
            mode: block.mode,
        };
        let second_page = block.second_page();
        let page = block.page();
        self.bury();
        self.instructions += block.ops.len();
        let pointer = self.own(block);
        self.found.insert(key.number(), pointer);
        self.pages.entry(page).or_default().push(pointer);
        if let Some(second) = second_page {
            self.pages.entry(second).or_default().push(pointer);
        }
        pointer
    }

    fn own(&mut self, block: Block) -> *mut Block {
        if self.owned.last().is_none_or(|slab| slab.len() == SLAB) {
            self.owned.push(Vec::with_capacity(SLAB));
        }
        let slab = self.owned.len() - 1;
        let slab = &mut self.owned[slab];
        slab.push(block);
        let last = slab.len() - 1;
        // SAFETY: `last` lies within the list. (No reference to the others is
        // made: pointers to them are in use.)
        unsafe { slab.as_mut_ptr().add(last) }
    }

    /// Frees the instructions of blocks that died.
    fn bury(&mut self) {
        for pointer in self.dead.drain(..) {
            // SAFETY: `owned` holds the block until `clear`, which empties `dead`
            // as well. Blocks are inserted between blocks, when no handler is at
            // work that could hold an `Op`, and nobody enters a dead one.
            let block = unsafe { &mut *pointer };
            self.instructions += BLOCK_INSTRUCTIONS;
            self.instructions = self.instructions.saturating_sub(block.ops.len());
            block.empty();
        }
    }

    /// Lets all blocks with bytes on `page` die.
    pub fn drop_page(&mut self, page: u64) {
        for pointer in self.pages.remove(&page).unwrap_or_default() {
            // SAFETY: `owned` holds the block until `clear`, which empties
            // `pages` as well; no other reference to it is alive, because blocks
            // are only dropped between blocks or by the handler of an
            // instruction, which holds an Op, not the block.
            let block = unsafe { &mut *pointer };
            if !block.alive {
                continue;
            }
            block.die();
            self.dead.push(pointer);
            let key = BlockKey {
                physical: block.physical,
                mode: block.mode,
            };
            if self.found.get(&key.number()) == Some(&pointer) {
                self.found.remove(&key.number());
            }
        }
    }

    /// Lets all blocks die.
    pub fn drop_all(&mut self) {
        self.found.clear();
        self.pages.clear();
        for block in self.owned.iter_mut().flatten() {
            block.die();
        }
        self.instructions = INSTRUCTIONS_MAX;
    }

    /// Whether blocks of `page` are kept.
    pub fn has_page(&self, page: u64) -> bool {
        self.pages.contains_key(&page)
    }

    /// Frees all blocks. Nobody may point to one any more.
    pub fn clear(&mut self) {
        self.found.clear();
        self.pages.clear();
        self.dead.clear();
        self.owned.clear();
        self.instructions = 0;
    }

    /// Generated code is gone: all blocks are interpreted again.
    pub fn forget_generated(&mut self) {
        for block in self.owned.iter_mut().flatten() {
            block.code = null();
            block.executions = 0;
        }
    }

    /// Blocks kept, the dead included.
    pub fn len(&self) -> usize {
        self.owned.iter().map(Vec::len).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.owned.is_empty()
    }
}

/// One target of indirect branches.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct JumpEntry {
    /// Linear address of the block's first instruction, or one that this entry
    /// is never asked for.
    pub rip: u64,
    /// The block; 64-bit code only.
    pub block: *const Block,
}

/// The entry that may hold `rip`.
#[inline(always)]
pub const fn jump_index(rip: u64) -> usize {
    (rip ^ rip >> 12) as usize & (JUMP_ENTRIES - 1)
}

/// From linear address to block, for the 64-bit code of one privilege class.
#[repr(C)]
pub struct JumpCache {
    /// Indexed by [`jump_index`].
    pub entries: [JumpEntry; JUMP_ENTRIES],
}

impl Default for JumpCache {
    fn default() -> Self {
        let mut cache = Self {
            entries: [JumpEntry {
                rip: 0,
                block: null(),
            }; JUMP_ENTRIES],
        };
        cache.clear();
        cache
    }
}

impl JumpCache {
    /// Forgets everything.
    pub fn clear(&mut self) {
        for entry in &mut self.entries {
            *entry = JumpEntry {
                rip: 0,
                block: null(),
            };
        }
        // Address 0 belongs to entry 0, address 1 does not.
        self.entries[0].rip = 1;
    }
}
