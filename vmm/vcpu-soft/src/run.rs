//! The loop that runs a vCPU.
//!
//! ```text
//!            +-> look at requests, interrupts, clock --> exits
//!            |        |
//!            |   find or decode the block at RIP
//!            |        |
//!            |   run it, and its successors as long as
//!            |   nobody wants anything  ------------> fault: deliver it
//!            +--------+
//! ```

use std::hint::black_box;
use std::ptr::null;
use std::sync::atomic::Ordering;

use weft_vcpu::{CpuModel, Environment, Exit};

use crate::block::{Block, BlockKey, JumpEntry, Link, SAME_PAGE, jump_index};
use crate::cpu::{Cpu, rflags, vector};
use crate::debug::dr6;
use crate::decode::Missing;
use crate::exceptions::{Event, TripleFault};
use crate::jit::arena::ArenaFull;
use crate::jit::{Generated, Left, Translated};
use crate::op::{Op, Outcome};
use crate::requests::request;

/// Executions after which a block is translated.
pub const TRANSLATED_AFTER: u32 = 32;

/// What a vCPU is made of, apart from its state.
#[derive(Clone, Debug, Default)]
pub struct Configuration {
    /// Which instructions it has.
    pub model: CpuModel,
    /// Local APIC id.
    pub apic_id: u32,
    /// vCPUs of the package that this one is in, as CPUID tells it: the whole
    /// machine's where it has one package.
    pub cpus: u32,
    /// Guest TSC ticks in a second.
    pub tsc_frequency: u64,
    /// Time is the count of executed instructions.
    pub deterministic: bool,
}

impl Cpu {
    /// Runs until something needs the vCPU's owner.
    pub fn run(
        &mut self,
        environment: &mut dyn Environment,
        generated: &mut Option<Generated>,
    ) -> Exit {
        let pointer: *mut (dyn Environment + '_) = environment;
        // SAFETY: only the lifetime changes; the pointer is forgotten before this
        // function returns, and the borrow lasts until then.
        self.environment = Some(unsafe {
            std::mem::transmute::<*mut (dyn Environment + '_), *mut (dyn Environment + 'static)>(
                pointer,
            )
        });
        self.come_inside(None);
        self.requests.ask(request::LOOK);
        Generated::attach(self);
        let exit = self.run_inside(generated).unwrap_or(Exit::TripleFault);
        self.step_outside();
        self.environment = None;
        exit
    }

    fn run_inside(&mut self, generated: &mut Option<Generated>) -> Result<Exit, TripleFault> {
        loop {
            // Traps of an instruction come before interrupts.
            self.deliver_debug_trap()?;
            if let Some(exit) = self.attend()? {
                return Ok(exit);
            }
            if self.code_is_full {
                self.forget_code(generated);
            }
            let traps = self.rflags_system & (rflags::TF | rflags::RF) != 0;
            if traps || self.pending_debug != 0 {
                self.run_alone()?;
                continue;
            }
            // The shadow ends with the next instruction, and what was asked is
            // looked at right behind it.
            if self.interrupt_shadow && self.is_wanted() {
                self.run_alone()?;
                continue;
            }
            match self.find_block() {
                Ok(block) => self.run_blocks(block, generated)?,
                Err(missing) => self.missing(missing)?,
            }
        }
    }

    /// Between blocks: does what others asked, delivers an interrupt that waits,
    /// looks at the clock.
    fn attend(&mut self) -> Result<Option<Exit>, TripleFault> {
        self.interrupt_shadow &= self.rip == self.shadow_rip;
        let asked = self.requests.request().load(Ordering::SeqCst);
        // Not between a load of SS and the instruction after it: the saved state has one
        // shadow only, and no trap that waits behind it.
        if asked & request::KICK != 0 && !self.is_stack_changing() {
            self.requests.take(request::KICK);
            return Ok(Some(Exit::Kicked));
        }
        if asked & request::EXCLUSIVE != 0 {
            self.step_outside();
            self.machine.wait_while_excluded();
            self.come_inside(None);
        } else if asked & request::DEFERRED_WORK != 0 {
            self.step_outside();
            self.come_inside(None);
        } else if asked & request::DEMANDS != 0 {
            self.answer(None);
        }
        if asked & request::LOOK_ANEW != 0 {
            self.requests.take(request::LOOK_ANEW);
            self.flush_everything();
        }
        if asked & request::LOOK != 0 && !self.interrupt_shadow {
            self.requests.take(request::LOOK);
            self.look_at_interrupts()?;
        }
        if self.halted {
            return Ok(Some(Exit::Halted));
        }
        if self.budget <= 0 {
            return Ok(Some(Exit::Deadline));
        }
        Ok(None)
    }

    fn look_at_interrupts(&mut self) -> Result<(), TripleFault> {
        let blocked = self.nmi_blocked;
        let nmi = self.with_environment(|environment| !blocked && environment.nmi_take());
        if nmi == Some(true) {
            self.halted = false;
            self.nmi_blocked = true;
            self.requests.ask(request::LOOK);
            return self.deliver(Event::external(vector::NMI));
        }
        let on = self.rflags_system & rflags::IF != 0;
        let taken = self.with_environment(|environment| {
            let waits = environment.interrupt_waits();
            let vector = if waits && on {
                environment.interrupt_take()
            } else {
                None
            };
            (waits, vector)
        });
        let (waits, vector) = taken.unwrap_or((false, None));
        // After one was taken, another may wait: looked at when IF is set again.
        self.interrupt_waits = waits;
        if let Some(vector) = vector {
            self.halted = false;
            self.deliver(Event::external(vector))?;
        }
        Ok(())
    }

    /// There was no block.
    fn missing(&mut self, missing: Missing) -> Result<(), TripleFault> {
        match missing {
            Missing::Fault => return self.deliver_fault(),
            Missing::Later => {}
            Missing::Full => self.code_is_full = true,
            Missing::Stops => {
                self.run_alone()?;
            }
        }
        Ok(())
    }

    /// Frees all blocks and their code. Only between blocks.
    pub fn forget_code(&mut self, generated: &mut Option<Generated>) {
        self.clear_code();
        self.thunks.flush();
        self.code_is_full = false;
        if let Some(generated) = generated {
            generated.flush();
        }
    }

    /// Delivers `self.fault`.
    fn deliver_fault(&mut self) -> Result<(), TripleFault> {
        self.note_fault();
        self.interrupt_shadow = false;
        self.deliver(Event::from(self.fault))
    }

    /// The block at RIP, decoded where it is not known.
    pub fn find_block(&mut self) -> Result<*mut Block, Missing> {
        let rip = self.rip;
        let class = self.privilege_class();
        if self.mode.is_64() {
            let entry = &self.jump_caches[class].entries[jump_index(rip)];
            // SAFETY: jump caches are cleared before blocks are freed.
            if entry.rip == rip && unsafe { (*entry.block).alive } {
                return Ok(entry.block.cast_mut());
            }
        }
        self.find_block_slow(rip, class)
    }

    #[inline(never)]
    fn find_block_slow(&mut self, rip: u64, class: usize) -> Result<*mut Block, Missing> {
        let linear = self.linear_rip(rip);
        if self.breakpoints.stop_on_page(linear) {
            return Err(Missing::Stops);
        }
        let (physical, global) = self.fetch_address(linear)?;
        let key = BlockKey {
            physical,
            mode: self.mode,
        };
        let block = match self.code.find(key) {
            Some(block) if self.second_page_fits(block, linear)? => block,
            _ => {
                if self.code.is_full() {
                    return Err(Missing::Full);
                }
                let decoded = self.decode(rip, physical, crate::block::BLOCK_INSTRUCTIONS_MAX)?;
                self.code.insert(decoded)
            }
        };
        self.executed_pages.insert(linear);
        // SAFETY: found or inserted just now.
        if unsafe { (*block).second_page().is_some() } {
            self.executed_pages.insert(linear.wrapping_add(16));
        }
        if self.mode.is_64() {
            self.jump_caches[class].entries[jump_index(rip)] = JumpEntry { rip, block };
            self.supervisor_jumps_local |= class == 0 && !global;
        }
        Ok(block)
    }

    /// Whether a block that crosses pages is the one for these pages.
    fn second_page_fits(&mut self, block: *mut Block, linear: u64) -> Result<bool, Missing> {
        // SAFETY: the code cache found it just now.
        let Some(second) = (unsafe { (*block).second_page() }) else {
            return Ok(true);
        };
        let next = (linear | 0xfff).wrapping_add(1);
        let (physical, _) = self.fetch_address(self.wrapped(next))?;
        Ok(physical == second)
    }

    /// Runs a block and its successors, as long as nobody wants anything.
    fn run_blocks(
        &mut self,
        first: *mut Block,
        generated: &mut Option<Generated>,
    ) -> Result<(), TripleFault> {
        self.interrupt_shadow = false;
        let mut block = first;
        loop {
            // SAFETY: blocks are freed only by `forget_code`, which this loop does
            // not call.
            let current = unsafe { &mut *block };
            let code = match generated {
                Some(generated) => current.is_translated() || self.translate(current, generated),
                None => false,
            };
            let next = match generated {
                Some(generated) if code => self.run_generated(block, generated)?,
                _ => self.interpret(block)?,
            };
            match next {
                Some(next) => block = next,
                None => return Ok(()),
            }
        }
    }

    /// Gives a block code once it has been run often enough; whether it has.
    #[inline(always)]
    fn translate(&mut self, block: &mut Block, generated: &mut Generated) -> bool {
        block.executions = block.executions.wrapping_add(1);
        block.executions == self.translated_after && self.translate_now(block, generated)
    }

    #[inline(never)]
    fn translate_now(&mut self, block: &mut Block, generated: &mut Generated) -> bool {
        if !block.mode.is_64() || block.second_page().is_some() || !block.alive {
            return false;
        }
        match generated.translate(self, block) {
            Ok(Translated::Code(code)) => {
                block.code = code;
                true
            }
            Ok(Translated::Never) => false,
            Ok(Translated::NotNow) => {
                block.executions = block.executions.wrapping_sub(1);
                false
            }
            Err(ArenaFull) => {
                self.code.forget_generated();
                generated.flush();
                false
            }
        }
    }

    /// Runs a block's code, and what follows it; the block that comes next, if
    /// nobody wants anything.
    fn run_generated(
        &mut self,
        block: *mut Block,
        generated: &mut Generated,
    ) -> Result<Option<*mut Block>, TripleFault> {
        // SAFETY: the block is alive, and the one that RIP leads to.
        let left = unsafe { generated.run(self, &*block) };
        match left {
            Left::Handler(outcome, op) => {
                match outcome {
                    Outcome::End | Outcome::Taken | Outcome::Fallthrough => {}
                    Outcome::Continue | Outcome::Leave => return Ok(None),
                    _ => {
                        let counted = self.configuration.deterministic;
                        self.stopped(outcome, op, counted)?;
                        return Ok(None);
                    }
                }
                if self.is_wanted() {
                    return Ok(None);
                }
                Ok(self.find_block().ok())
            }
            Left::Next(link) => {
                if self.is_wanted() {
                    return Ok(None);
                }
                let epoch = self.global_epoch;
                let next = self.find_block().ok();
                if let (Some(link), Some(next)) = (link, next)
                    && epoch == self.global_epoch
                {
                    // SAFETY: found just now.
                    generated.link(link, unsafe { &*next });
                }
                Ok(next)
            }
            Left::Interpret => match self.find_block() {
                Ok(next) => self.interpret(next),
                Err(_) => Ok(None),
            },
        }
    }

    /// Whether something is asked of this vCPU.
    pub fn is_wanted(&self) -> bool {
        self.is_asked(u32::MAX)
    }

    /// Whether one of these bits of [`request`] is asked of this vCPU.
    pub fn is_asked(&self, bits: u32) -> bool {
        // SAFETY: the requests lives as long as the CPU.
        unsafe { (*self.request).load(Ordering::Relaxed) & bits != 0 }
    }

    /// Interprets a block; the one that comes next, if nobody wants anything.
    #[inline(always)]
    fn interpret(&mut self, block: *mut Block) -> Result<Option<*mut Block>, TripleFault> {
        // SAFETY: the block was found since blocks were freed the last time.
        let current = unsafe { &*block };
        let count = i64::from(current.count);
        if self.budget < count {
            self.use_up_budget()?;
            return Ok(None);
        }
        self.budget -= count;
        self.block = block;
        self.registers[usize::from(Self::BLOCK_RIP)] = self.rip;
        let mut op: *const Op = current.first;
        let outcome = loop {
            // SAFETY: ops end with one that does not continue, and the block is
            // alive or at least in memory.
            let outcome = unsafe { ((*op).handler)(self, &*op) };
            if outcome != Outcome::Continue {
                // Else the compiler makes one table of this and what follows,
                // and every instruction jumps through it.
                break black_box(outcome);
            }
            // SAFETY: an op that continues is not the last of its block.
            op = unsafe { op.add(1) };
        };
        // Comparisons, in this order: a table of jumps would be guessed wrong.
        let slot = (outcome as u32).wrapping_sub(Outcome::Taken as u32) as usize;
        if slot > 1 && outcome != Outcome::End {
            return self.left(outcome, op);
        }
        if self.is_wanted() {
            return Ok(None);
        }
        if slot > 1 {
            return Ok(self.find_block().ok());
        }
        // SAFETY: the block was just run.
        let current = unsafe { &*block };
        let link = &current.links[slot];
        let valid = link.epoch == SAME_PAGE
            || link.epoch == self.global_epoch
            || link.epoch == self.local_epoch;
        // SAFETY: links are voided before blocks are freed, and a block is
        // freed together with those on its page.
        if valid && link.rip == self.rip && unsafe { (*link.block).alive } {
            return Ok(Some(link.block.cast_mut()));
        }
        Ok(self.successor(block, slot))
    }

    /// A block that was left for another reason than its end.
    #[cold]
    #[inline(never)]
    fn left(&mut self, outcome: Outcome, op: *const Op) -> Result<Option<*mut Block>, TripleFault> {
        if outcome != Outcome::Leave {
            self.stopped(outcome, op, true)?;
        }
        Ok(None)
    }

    /// Less than a block may still be executed: one by one.
    #[cold]
    fn use_up_budget(&mut self) -> Result<(), TripleFault> {
        while self.budget > 0 {
            if !self.run_alone()? || self.is_wanted() || self.halted {
                break;
            }
        }
        Ok(())
    }

    /// The block at RIP, which is the successor of `block` from now on.
    #[inline(never)]
    fn successor(&mut self, block: *mut Block, slot: usize) -> Option<*mut Block> {
        let epoch = self.global_epoch;
        let next = self.find_block().ok()?;
        if epoch == self.global_epoch {
            self.link(block, slot, next);
        }
        Some(next)
    }

    fn link(&mut self, block: *mut Block, slot: usize, next: *mut Block) {
        // SAFETY: no block was freed since both were found.
        let (current, target) = unsafe { (&mut *block, &*next) };
        if !current.alive {
            return;
        }
        let from = self.block_rip();
        let same = (from ^ self.rip) >> 12 == 0
            && current.page() == target.page()
            && current.second_page().is_none()
            && target.second_page().is_none();
        let linear = self.linear_rip(self.rip);
        let epoch = match self.fetch.find(self.privilege_class(), linear) {
            _ if same => SAME_PAGE,
            Some((_, true)) => self.global_epoch,
            _ => self.local_epoch,
        };
        current.links[slot] = Link {
            block: next,
            rip: self.rip,
            epoch,
        };
    }

    /// A block that stopped in the middle: `op` was not executed. `counted`: the
    /// whole block has been taken off the budget.
    #[cold]
    fn stopped(
        &mut self,
        outcome: Outcome,
        op: *const Op,
        counted: bool,
    ) -> Result<(), TripleFault> {
        // SAFETY: the block is in memory.
        let (rip, index, count) = unsafe {
            let block = &*self.block;
            let index = op.offset_from(block.first) as i64;
            (self.own_rip(&*op), index, i64::from(block.count))
        };
        if counted {
            self.budget += count - index;
        }
        self.rip = self.wrapped(rip);
        match outcome {
            Outcome::Fault => self.deliver_fault(),
            Outcome::Abort => self.run_alone().map(|_| ()),
            _ => Ok(()),
        }
    }

    /// Runs the one instruction at RIP, and delivers the debug exceptions before
    /// and behind it; whether it was completed.
    fn run_alone(&mut self) -> Result<bool, TripleFault> {
        if self.deliver_instruction_breakpoint()? {
            return Ok(false);
        }
        let linear = self.linear_rip(self.rip);
        let decoded = self
            .fetch_address(linear)
            .map_err(Missing::from)
            .and_then(|(physical, _)| self.decode(self.rip, physical, 1));
        let block = match decoded {
            Ok(block) => block,
            Err(missing) => {
                self.missing(missing)?;
                return Ok(false);
            }
        };
        let pending = self.pending_debug;
        let resume = self.rflags_system & rflags::RF;
        self.rflags_system &= !rflags::RF;
        self.stepping = self.rflags_system & rflags::TF != 0;
        let op = &block.ops[0];
        let outcome = self.execute_alone(&block, op);
        let stepping = std::mem::take(&mut self.stepping);
        match outcome {
            Outcome::Fault => {
                self.budget += 1;
                self.pending_debug = pending;
                self.rip = self.wrapped(self.own_rip(op));
                self.deliver_fault()?;
                return Ok(false);
            }
            Outcome::Abort => {
                self.budget += 1;
                self.pending_debug = pending;
                self.rflags_system |= resume;
                self.rip = self.wrapped(self.own_rip(op));
                return Ok(false);
            }
            Outcome::Repeat => {
                self.budget += 1;
                self.rip = self.wrapped(self.own_rip(op));
                // Its breakpoint was passed when it began.
                self.rflags_system |= rflags::RF;
            }
            Outcome::Continue => self.rip = self.wrapped(self.next_rip(op)),
            Outcome::End | Outcome::Taken | Outcome::Fallthrough | Outcome::Leave => {}
        }
        if stepping && !self.is_stack_changing() {
            self.pending_debug |= dr6::STEP;
        }
        self.deliver_debug_trap()?;
        if !self.breakpoints.stop_instructions() {
            self.rflags_system &= !rflags::RF;
        }
        Ok(outcome != Outcome::Repeat)
    }

    /// Executes the only instruction of `block`.
    fn execute_alone(&mut self, block: &Block, op: &Op) -> Outcome {
        self.block = block;
        self.registers[usize::from(Self::BLOCK_RIP)] = self.rip;
        self.alone = true;
        self.interrupt_shadow = false;
        // As in a block, so that the instruction reads the same clock.
        self.budget -= 1;
        // SAFETY: the op was just decoded for this mode, and its block lives.
        let outcome = unsafe { (op.handler)(self, op) };
        self.alone = false;
        self.block = null();
        outcome
    }
}
