//! Debug registers: breakpoints on instructions, data and ports, single steps
//! (Intel SDM volume 3, 18.2 and 18.3; AMD64 manual volume 2, 13.1).
//!
//! A guest without breakpoints pays nothing for them:
//!
//! - A page with a watchpoint has no TLB entries, so its accesses come to the
//!   slow path, which compares. One that hits inside a block is not done but
//!   repeated alone, and the trap comes right behind it.
//! - A page with a breakpoint on an instruction has no blocks that are entered:
//!   its instructions are run one by one, each compared before.
//! - Ports are compared behind their instruction, which ends its block.
//!
//! Invariants: [`Cpu::pending_debug`] is not 0 only until the next instruction
//! boundary, or the one after it where SS was just loaded; RFLAGS.RF is set only
//! while a breakpoint on an instruction is enabled.

use weft_vcpu::PAGE_SIZE;

use crate::cpu::{Cpu, Fault, Faulted, cr4, rflags, vector};
use crate::exceptions::{Event, Origin, TripleFault};
use crate::tlb::Tlb;

/// Bits of DR6.
pub mod dr6 {
    /// Breakpoints 0 to 3 were hit.
    pub const HITS: u64 = 15;
    /// A debug register was accessed while DR7.GD was set.
    pub const DETECTED: u64 = 1 << 13;
    /// A single step.
    pub const STEP: u64 = 1 << 14;
    /// What a program may write.
    pub const WRITABLE: u64 = 0xe00f;
    /// Always 1.
    pub const ONES: u64 = 0xffff_0ff0;
}

/// Bits of DR7.
pub mod dr7 {
    /// Accesses to debug registers are detected.
    pub const DETECT: u64 = 1 << 13;
    /// What a program may write.
    pub const WRITABLE: u64 = 0xffff_23ff;
    /// Always 1.
    pub const ONES: u64 = 0x400;
}

/// In [`Cpu::pending_debug`]: an exception that sets nothing in DR6 (INT1).
const NO_BIT: u64 = 1 << 63;

/// What a breakpoint waits for, as a set.
mod kind {
    pub const INSTRUCTION: u8 = 1;
    pub const WRITE: u8 = 2;
    pub const PORT: u8 = 4;
    pub const READ: u8 = 8;
}

/// What is done at an address, to be compared with breakpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// A load.
    Read,
    /// A store, or a load and a store.
    Write,
    /// IN, OUT.
    Port,
    /// An instruction is about to be executed.
    Instruction,
}

#[derive(Clone, Copy, Debug, Default)]
struct Breakpoint {
    /// The first byte.
    start: u64,
    /// Bytes.
    length: u64,
    /// Of [`kind`]; 0 where it is not enabled.
    kinds: u8,
}

/// What DR7 enables.
#[derive(Clone, Copy, Debug, Default)]
pub struct Breakpoints {
    list: [Breakpoint; 4],
    /// All their kinds.
    kinds: u8,
}

impl Breakpoints {
    /// Of DR0 to DR3 and DR7; with `ports` (CR4.DE) there are breakpoints on
    /// ports.
    fn of(debug: &[u64; 6], ports: bool) -> Self {
        let control = debug[5];
        let mut all = Self::default();
        for (index, breakpoint) in all.list.iter_mut().enumerate() {
            let enabled = control >> (2 * index) & 3 != 0;
            let settings = control >> (16 + 4 * index);
            let length = [1, 2, 8, 4][(settings >> 2 & 3) as usize];
            breakpoint.kinds = match settings & 3 {
                _ if !enabled => 0,
                0 => kind::INSTRUCTION,
                1 => kind::WRITE,
                2 if ports => kind::PORT,
                2 => 0,
                _ => kind::READ | kind::WRITE,
            };
            // The low bits of an address do not count, but of an instruction's.
            (breakpoint.start, breakpoint.length) = match breakpoint.kinds {
                kind::INSTRUCTION => (debug[index], 1),
                _ => (debug[index] & !(length - 1), length),
            };
            all.kinds |= breakpoint.kinds;
        }
        all
    }

    /// Which of them `size` bytes from `address` on hit, as in DR6.
    fn hits(&self, touch: Touch, address: u64, size: u64) -> u64 {
        let wanted = match touch {
            Touch::Read => kind::READ,
            Touch::Write => kind::WRITE,
            Touch::Port => kind::PORT,
            Touch::Instruction => kind::INSTRUCTION,
        };
        let hit = |breakpoint: &Breakpoint| {
            breakpoint.kinds & wanted != 0
                && (breakpoint.start.wrapping_sub(address) < size
                    || address.wrapping_sub(breakpoint.start) < breakpoint.length)
        };
        (self.list.iter().enumerate())
            .filter(|(_, breakpoint)| hit(breakpoint))
            .fold(0, |hits, (index, _)| hits | 1 << index)
    }

    /// Breakpoints of these kinds on the page of `address`.
    fn on_page(&self, kinds: u8, address: u64) -> bool {
        self.kinds & kinds != 0
            && self.list.iter().any(|breakpoint| {
                breakpoint.kinds & kinds != 0 && (breakpoint.start ^ address) / PAGE_SIZE == 0
            })
    }

    /// Whether data on the page of `address` is watched.
    #[inline(always)]
    pub fn watch_page(&self, address: u64) -> bool {
        self.on_page(kind::READ | kind::WRITE, address)
    }

    /// Whether an instruction on the page of `address` has a breakpoint.
    #[inline(always)]
    pub fn stop_on_page(&self, address: u64) -> bool {
        self.on_page(kind::INSTRUCTION, address)
    }

    /// Whether any instruction has one.
    pub fn stop_instructions(&self) -> bool {
        self.kinds & kind::INSTRUCTION != 0
    }
}

impl Cpu {
    /// DR0 to DR3, DR7 or CR4.DE changed: lets go of what would pass by the
    /// breakpoints that are enabled now.
    pub fn breakpoints_changed(&mut self) {
        let before = self.breakpoints;
        self.breakpoints = Breakpoints::of(&self.debug, self.cr4 & cr4::DE != 0);
        for breakpoint in self.breakpoints.list {
            if breakpoint.kinds & (kind::READ | kind::WRITE) != 0 {
                (self.tlbs.iter_mut()).for_each(|tlb: &mut Tlb| tlb.flush_page(breakpoint.start));
            }
            let stops = breakpoint.kinds & kind::INSTRUCTION != 0;
            if stops && !before.stop_on_page(breakpoint.start) {
                self.void_links();
            }
        }
        if !self.breakpoints.stop_instructions() {
            self.rflags_system &= !rflags::RF;
        }
    }

    /// Compares an access to memory with the watchpoints. One that hits has its
    /// instruction repeated alone, if it is one of a block.
    #[inline(always)]
    pub fn watch(&mut self, touch: Touch, address: u64, size: usize) -> Result<(), Faulted> {
        if self.breakpoints.kinds & (kind::READ | kind::WRITE) == 0 {
            return Ok(());
        }
        self.compare(touch, address, size)
    }

    #[cold]
    fn compare(&mut self, touch: Touch, address: u64, size: usize) -> Result<(), Faulted> {
        let hits = self.breakpoints.hits(touch, address, size as u64);
        if hits != 0 && !self.alone && !self.block.is_null() {
            self.fault = Fault {
                abort: true,
                ..Fault::default()
            };
            return Err(Faulted);
        }
        self.pending_debug |= hits;
        Ok(())
    }

    /// Compares ports that were used with the breakpoints.
    pub fn watch_port(&mut self, port: u16, size: usize) {
        if self.breakpoints.kinds & kind::PORT != 0 {
            let hits = self
                .breakpoints
                .hits(Touch::Port, u64::from(port), size as u64);
            self.pending_debug |= hits;
        }
    }

    /// Whether a repeated string instruction stops behind each element: a trap
    /// comes between any two.
    #[inline(always)]
    pub fn traps_elements(&self) -> bool {
        self.stepping || self.pending_debug != 0
    }

    /// INT1: #DB, and nothing says why.
    pub fn trap_without_reason(&mut self) {
        self.stepping = false;
        self.pending_debug |= NO_BIT;
    }

    /// The end of SYSCALL and SYSRET: they trap by the TF that they leave.
    pub fn step_by_new_flags(&mut self) {
        self.stepping = false;
        if self.rflags_system & rflags::TF != 0 {
            self.pending_debug |= dr6::STEP;
        }
    }

    /// #DB before an access to a debug register, where DR7.GD says so.
    pub fn detect_access(&mut self) -> Result<(), Faulted> {
        if self.debug[5] & dr7::DETECT == 0 {
            return Ok(());
        }
        self.note_debug(dr6::DETECTED);
        self.rflags_system |= rflags::RF;
        Err(self.raise(vector::DEBUG))
    }

    /// What DR6 and DR7 are when #DB is delivered.
    fn note_debug(&mut self, reasons: u64) {
        self.debug[4] = self.debug[4] & !dr6::HITS | reasons & !NO_BIT;
        self.debug[5] &= !dr7::DETECT;
    }

    fn deliver_debug(&mut self, reasons: u64) -> Result<(), TripleFault> {
        self.note_debug(reasons);
        self.halted = false;
        self.interrupt_shadow = false;
        self.deliver(Event {
            vector: vector::DEBUG,
            error: None,
            origin: Origin::Exception,
        })
    }

    /// Whether SS was loaded just now, so that its stack pointer can be loaded
    /// before anything is delivered on it.
    pub fn is_stack_changing(&self) -> bool {
        self.stack_shadow && self.interrupt_shadow && self.rip == self.shadow_rip
    }

    /// At an instruction's boundary: the trap that it left, if it did.
    pub fn deliver_debug_trap(&mut self) -> Result<(), TripleFault> {
        if self.is_stack_changing() {
            return Ok(());
        }
        match std::mem::take(&mut self.pending_debug) {
            0 => Ok(()),
            reasons => self.deliver_debug(reasons),
        }
    }

    /// Before the instruction at RIP: #DB if it has a breakpoint. Whether that
    /// was delivered.
    pub fn deliver_instruction_breakpoint(&mut self) -> Result<bool, TripleFault> {
        let resumes = self.rflags_system & rflags::RF != 0;
        if !self.breakpoints.stop_instructions() || resumes || self.is_stack_changing() {
            return Ok(false);
        }
        let address = self.linear_rip(self.rip);
        let hits = self.breakpoints.hits(Touch::Instruction, address, 1);
        if hits == 0 {
            return Ok(false);
        }
        self.deliver_debug(hits)?;
        Ok(true)
    }
}
