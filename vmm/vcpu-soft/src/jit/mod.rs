//! Generated code: what the host's own processor runs for the guest.
//!
//! - [`arena`]: memory for code, never writable and executable at one address;
//! - [`assembler`] and [`encoding`]: instructions written, and taken apart;
//! - [`thunk`]: one SSE, MMX or x87 instruction, for the interpreter;
//! - [`trace`], [`select`], [`liveness`], [`ahead`], [`windows`], [`translate`]:
//!   blocks to code;
//! - [`stubs`]: the code that all blocks share.
//!
//! Guest and host are the same instruction set. So most instructions are written
//! as they are, with guest registers in the host registers of the same name
//! ([`stubs::host`]) and with memory operands translated by the software TLB.
//! What has no template, and what the TLB does not know, the interpreter's
//! handlers do.
//!
//! Invariants:
//!
//! - Code of a block is run only while the block is alive and no request waits
//!   at a backward or indirect branch.
//! - Direct jumps lead to blocks of the same guest-physical page only: they die
//!   together. All others go through the jump cache.
//! - Between blocks the guest's flags are in `Cpu::flags`, unless all blocks
//!   that may follow overwrite them before they read them.

mod ahead;
pub mod arena;
mod assembler;
mod encoding;
mod liveness;
mod select;
mod stubs;
#[cfg(test)]
mod tests;
pub mod thunk;
mod trace;
mod translate;
mod windows;

use std::ptr::null;

use weft_vcpu::{Access, PAGE_SIZE};

use self::ahead::Ahead;
use self::arena::{Arena, ArenaFull};
use self::assembler::Assembler;
use self::stubs::Stubs;
use self::translate::{Plan, Translation};
use crate::block::{Block, BlockKey};
use crate::cpu::Cpu;
use crate::host;
use crate::op::{Op, Outcome};

/// Bytes of address space for generated code. Full, and all of it is forgotten.
const ARENA_SIZE: usize = 64 << 20;

/// What generated code keeps in the [`Cpu`], apart from the guest's state.
#[derive(Debug)]
#[repr(C)]
pub struct State {
    /// The `Cpu` itself.
    cpu: *mut Cpu,
    /// RIP of the running block's page: its RIP minus its offset in the
    /// guest-physical page.
    code_page: u64,
    /// The XMM registers and MXCSR are the guest's.
    xmm_live: u32,
    /// MXCSR of Rust code.
    host_mxcsr: u32,
    /// The end of the jump that was not linked, or 0.
    link: u64,
    /// The instruction whose handler was called last.
    op: *const Op,
    /// See [`stubs::SCRATCH`].
    scratch: u64,
    /// Host addresses of the running trace's windows.
    windows: [u64; windows::WINDOWS_MAX],
}

impl Default for State {
    fn default() -> Self {
        Self {
            cpu: std::ptr::null_mut(),
            code_page: 0,
            xmm_live: 0,
            host_mxcsr: thunk::HOST_MXCSR,
            link: 0,
            op: null(),
            scratch: 0,
            windows: [0; windows::WINDOWS_MAX],
        }
    }
}

/// A direct jump that was not linked when it was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Address after the jump.
    end: u64,
    /// Guest-physical page of the block it ends.
    page: u64,
}

/// Why generated code was left.
#[derive(Clone, Copy, Debug)]
pub enum Left {
    /// A handler said something other than `Continue`. `Cpu::block` is its
    /// block, and this its instruction.
    Handler(Outcome, *const Op),
    /// The block at `Cpu::rip` is next. With a link, and if that block has code:
    /// [`Generated::link`].
    Next(Option<Link>),
    /// The block at `Cpu::rip` has to be interpreted this time.
    Interpret,
}

/// What became of a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Translated {
    /// The block's code.
    Code(*const u8),
    /// The block is of a kind that is only interpreted.
    Never,
    /// Its page would have to be waited for.
    NotNow,
}

/// The translator of one vCPU and its code.
#[derive(Debug)]
pub struct Generated {
    arena: Arena,
    assembler: Assembler,
    stubs: Stubs,
    /// Bytes of the arena that are shared code.
    shared: usize,
    /// Where each block's code starts, in rising order, and the guest-physical
    /// page of the block.
    pages: Vec<(u64, u64)>,
    counts: bool,
}

impl Generated {
    /// An empty translator. With `counts`, instructions are taken off
    /// `Cpu::budget`, block by block.
    pub fn new(counts: bool) -> std::io::Result<Self> {
        let mut arena = Arena::new(ARENA_SIZE)?;
        let mut assembler = Assembler::default();
        let stubs = stubs::write(&mut assembler, &mut arena).map_err(std::io::Error::other)?;
        arena::serialize();
        let shared = arena.used();
        Ok(Self {
            arena,
            assembler,
            stubs,
            shared,
            pages: Vec::new(),
            counts,
        })
    }

    /// Forgets all code. The caller sets `code` of every block to null first.
    pub fn flush(&mut self) {
        self.arena.reset(self.shared);
        self.pages.clear();
    }

    /// Bytes of code.
    pub fn used(&self) -> usize {
        self.arena.used() - self.shared
    }

    /// Code for a block. Nothing is waited for: the vCPU is inside.
    pub fn translate(&mut self, cpu: &Cpu, block: &Block) -> Result<Translated, ArenaFull> {
        let page = block.page();
        let Some(bytes) = cpu.memory.held(page, Access::Read) else {
            return Ok(Translated::NotNow);
        };
        let mode = block.mode;
        let find = |offset: i64| {
            if !(0..PAGE_SIZE as i64).contains(&offset) {
                return None;
            }
            let physical = page | offset as u64;
            let block = cpu.code.find(BlockKey { physical, mode })?;
            // SAFETY: the cache only finds blocks that are alive, and nobody
            // changes one during the translation.
            Some(unsafe { &*block })
        };
        let Some(items) = trace::collect(block, &find) else {
            return Ok(Translated::Never);
        };
        let code_at = |offset: i64| {
            let code = find(offset)?.code;
            (!code.is_null()).then_some(code as u64)
        };
        let mut copy = [0; PAGE_SIZE as usize];
        // SAFETY: the page is held for reading, and mapped. A write to it meanwhile
        // drops this block, because the page holds decoded code.
        unsafe { host::copy_out(bytes, &mut copy) };
        let needed_at = |offset: i64| Ahead::new(&copy, mode).flags_needed(offset);
        self.assembler.start(self.arena.next());
        let plan = Plan {
            stubs: &self.stubs,
            counts: self.counts,
            code_at: &code_at,
            needed_at: &needed_at,
        };
        Translation::new(plan, items, &mut self.assembler).run();
        let code = self.arena.push(self.assembler.finish())?;
        self.pages.push((code, page));
        arena::serialize();
        Ok(Translated::Code(code as *const u8))
    }

    /// Makes a jump that was taken go to a block's code directly from now on.
    /// The block must be the one that [`Generated::run`] said was next, found
    /// before anything else was run, translated or dropped.
    pub fn link(&mut self, link: Link, block: &Block) {
        if block.page() == link.page && !block.code.is_null() && self.arena.contains(link.end - 1) {
            self.arena.patch_jump(link.end, block.code as u64);
            arena::serialize();
        }
    }

    /// Binds the calling thread to a vCPU: call before [`Generated::run`] whenever
    /// the thread may have run another one.
    pub fn attach(cpu: &mut Cpu) {
        let address = &raw mut *cpu;
        cpu.generated.cpu = address;
        set_gs_base(address as u64);
    }

    /// Runs a block's code and whatever follows it. `Cpu::rip` is the block's
    /// first instruction.
    ///
    /// # Safety
    ///
    /// The block is alive, has code of this translator, and is the one that the
    /// CPU's mode and RIP lead to; the thread is attached to the CPU.
    pub unsafe fn run(&self, cpu: &mut Cpu, block: &Block) -> Left {
        cpu.generated.code_page = cpu.rip.wrapping_sub(block.physical & (PAGE_SIZE - 1));
        // SAFETY: the address is that of the shared code's entry, which has this
        // signature.
        let enter: extern "C" fn(*const u8, *mut Cpu) -> u32 =
            unsafe { std::mem::transmute(self.stubs.enter as usize) };
        // The pointer is passed although GS has it: without, the compiler might
        // take it that the call leaves `cpu` as it is.
        let exit = enter(block.code, &raw mut *cpu);
        match exit {
            stubs::EXIT_NEXT => Left::Next(self.take_link(cpu)),
            stubs::EXIT_INTERPRET => Left::Interpret,
            outcome => {
                debug_assert!(outcome <= stubs::EXIT_HANDLER_MAX);
                // SAFETY: a handler returned it.
                let outcome = unsafe { std::mem::transmute::<u32, Outcome>(outcome) };
                Left::Handler(outcome, cpu.generated.op)
            }
        }
    }

    fn take_link(&self, cpu: &mut Cpu) -> Option<Link> {
        let end = std::mem::take(&mut cpu.generated.link);
        let index = self.pages.partition_point(|&(start, _)| start < end);
        let &(_, page) = self.pages.get(index.checked_sub(1)?)?;
        (end != 0).then_some(Link { end, page })
    }
}

/// The GS segment's base of this thread, which Rust and the C library leave
/// alone.
fn set_gs_base(address: u64) {
    const HWCAP2_FSGSBASE: u64 = 2;
    const ARCH_SET_GS: i32 = 0x1001;
    // SAFETY: a plain query.
    let capabilities = unsafe { libc::getauxval(libc::AT_HWCAP2) };
    if capabilities & HWCAP2_FSGSBASE != 0 {
        // SAFETY: the kernel lets user code execute it, and nothing else of this
        // process uses GS.
        unsafe { std::arch::asm!("wrgsbase {}", in(reg) address, options(nostack, nomem)) };
    } else {
        // SAFETY: as above, by way of the kernel.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, address) };
    }
}
