//! The ends of blocks: branches, and ways to the next block.

use super::{Pending, Translation};
use crate::jit::assembler::register::*;
use crate::jit::assembler::{Label, Memory, condition};
use crate::jit::select::Template;
use crate::jit::select::{STACK_READ, STACK_WRITE};
use crate::jit::stubs::{self, CODE_PAGE};
use crate::jit::trace::{Follow, Item};

impl Translation<'_> {
    /// The block's last instruction, a branch.
    pub fn branch(&mut self, index: usize) {
        let needed = self.needed[index];
        let item = &self.items[index];
        let (from, target, follow) = (item.offset, item.target(), item.follow);
        match item.template {
            Template::JumpIf(condition) => match follow {
                Follow::End => self.jump_if(index, condition),
                Follow::Next => self.leave_trace(index, condition, target),
                Follow::Taken => self.leave_trace(index, condition ^ 1, item.end()),
            },
            Template::Jump if follow == Follow::End => {
                self.save_flags_if(needed);
                self.go_to(from, target);
            }
            Template::Jump => {}
            Template::Call => {
                let slow = self.push_return_address(index);
                if follow == Follow::End {
                    self.save_flags_if(needed);
                    self.go_to(from, target);
                }
                self.finish_slow(index, slow);
            }
            Template::JumpRegister(register) => {
                self.save_flags_if(needed);
                let target = self.value(register, R10);
                if target != R10 {
                    self.a.copy(R10, target);
                }
                self.look_up();
            }
            Template::CallRegister(register) => {
                let slow = self.push_return_address(index);
                self.save_flags_if(needed);
                let target = self.value(register, R10);
                if target != R10 {
                    self.a.copy(R10, target);
                }
                self.look_up();
                self.finish_slow(index, slow);
            }
            Template::JumpMemory => {
                let slow = self.operand_address(index, STACK_READ);
                self.a.load(R10, Memory::At(R10, 0));
                self.look_up();
                self.finish_slow(index, slow);
            }
            Template::CallMemory => {
                let slow = self.operand_address(index, STACK_READ);
                self.a.load(R10, Memory::At(R10, 0));
                self.a.store(stubs::SCRATCH, R10);
                self.a.address_of(R10, Memory::At(R15, -8));
                self.probe(STACK_WRITE, slow);
                self.store_return_address(index, 0);
                self.a.load(R10, stubs::SCRATCH);
                self.look_up();
                self.finish_slow(index, slow);
            }
            Template::Return(extra) => {
                let (slow, distance) = self.pop_address(index, R15);
                self.save_flags_if(needed);
                self.a.load(R10, Memory::At(R10, distance));
                self.move_stack(8 + i32::from(extra));
                self.look_up();
                self.finish_slow(index, slow);
            }
            _ => unreachable!("only branches come here"),
        }
    }

    fn push_return_address(&mut self, index: usize) -> Label {
        let (slow, distance) = self.push_address(index);
        self.store_return_address(index, distance);
        slow
    }

    fn store_return_address(&mut self, index: usize, distance: i32) {
        let end = self.items[index].end() as i32;
        self.a.load(R11, CODE_PAGE);
        self.a.address_of(R11, Memory::At(R11, end));
        self.a.store(Memory::At(R10, distance), R11);
        self.move_stack(-8);
    }

    /// The end of the trace: two ways to go.
    fn jump_if(&mut self, index: usize, condition: u8) {
        let item = &self.items[index];
        let (from, target, next) = (item.offset, item.target(), item.end());
        self.save_flags_if(self.needed[index]);
        self.want_flags(index);
        if target > from || !is_on_page(target) {
            self.leave_trace(index, condition, target);
            self.go_to(from, next);
        } else {
            let fall_through = self.a.label();
            self.a.jump_if(condition ^ 1, fall_through);
            self.go_back_to(target);
            self.a.bind(fall_through);
            self.go_to(from, next);
        }
    }

    /// Out of the trace on a condition.
    fn leave_trace(&mut self, index: usize, condition: u8, offset: i64) {
        self.want_flags(index);
        let from = self.items[index].offset;
        let save_flags = self.needed_outside[index] != 0 && !self.memory_flags;
        let looks = self.plan.counts;
        if !save_flags && !looks && is_on_page(offset) && offset > from {
            self.link(offset, Some(condition));
        } else {
            let enter = self.a.label();
            self.a.jump_if(condition, enter);
            self.pending.push(Pending::Exit {
                enter,
                from,
                offset,
                save_flags,
            });
        }
    }

    /// From the instruction at page offset `from` to the block at `offset`. A counting
    /// vCPU checks requests between any two blocks, as the interpreter does:
    /// interrupts come at the same count.
    pub fn go_to(&mut self, from: i64, offset: i64) {
        if !is_on_page(offset) {
            self.go_far(offset);
        } else if offset <= from || self.plan.counts {
            self.go_back_to(offset);
        } else {
            self.link(offset, None);
        }
    }

    /// On behind a block that ends with a handler: what that did (a port's
    /// device, CPUID) may have made a request, or have to be followed by a look
    /// at those that are there.
    pub fn go_behind_handler(&mut self, offset: i64) {
        if is_on_page(offset) {
            self.go_back_to(offset);
        } else {
            self.go_far(offset);
        }
    }

    /// Backwards: requests are looked at first.
    fn go_back_to(&mut self, offset: i64) {
        stubs::test_request(self.a);
        self.link(offset, Some(condition::EQUAL));
        let enter = self.a.label();
        self.a.jump(enter);
        self.pending.push(Pending::Out { enter, offset });
    }

    /// The same where the trace goes on at the next item's block.
    pub fn look_at_requests(&mut self, offset: i64) {
        stubs::test_request(self.a);
        let enter = self.a.label();
        self.a.jump_if(condition::NOT_EQUAL, enter);
        self.pending.push(Pending::Out { enter, offset });
    }

    /// A jump to a block of this page, direct once that has code.
    fn link(&mut self, offset: i64, condition: Option<u8>) {
        let own = self.items.first().is_some_and(|item| item.offset == offset);
        let known = if own {
            Some(self.entry)
        } else {
            (self.plan.code_at)(offset)
        };
        match (known, condition) {
            (Some(target), Some(condition)) => self.a.jump_if_to(condition, target),
            (Some(target), None) => self.a.jump_to(target),
            (None, _) => {
                let enter = self.a.label();
                match condition {
                    Some(condition) => self.a.jump_if(condition, enter),
                    None => self.a.jump(enter),
                }
                let end = self.a.address();
                self.pending.push(Pending::Link { enter, end, offset });
            }
        }
    }

    fn go_far(&mut self, offset: i64) {
        self.a.load(R10, CODE_PAGE);
        self.a.address_of(R10, Memory::At(R10, offset as i32));
        self.look_up();
    }

    /// To the block at address R10.
    fn look_up(&mut self) {
        stubs::lookup(self.a, self.class, self.plan.stubs.lookup_miss);
    }

    /// Code out of line that has to do with branches.
    pub fn write_pending_branch(&mut self, pending: Pending) {
        match pending {
            Pending::Link { enter, end, offset } => {
                self.a.bind(enter);
                self.a.constant(R11, end);
                self.a.constant(R10, offset as u64);
                self.a.jump_to(self.plan.stubs.next);
            }
            Pending::Out { enter, offset } => {
                self.a.bind(enter);
                self.a.constant(R11, 0);
                self.a.constant(R10, offset as u64);
                self.a.jump_to(self.plan.stubs.next);
            }
            Pending::Exit {
                enter,
                from,
                offset,
                save_flags,
            } => {
                self.a.bind(enter);
                if save_flags {
                    stubs::save_flags(self.a);
                }
                self.go_to(from, offset);
            }
            Pending::Budget { enter, index } => {
                self.a.bind(enter);
                self.give_back_budget(index);
                self.a.constant(R10, self.items[index].offset as u64);
                self.a.jump_to(self.plan.stubs.interpret);
            }
            Pending::Slow { .. } | Pending::LoadXmm { .. } => {
                unreachable!("written by Translation::write_pending")
            }
        }
    }
}

/// The flags needed where an instruction leads out of its trace.
pub fn needed_outside(item: &Item<'_>, needed_at: &dyn Fn(i64) -> u32) -> u32 {
    match (item.template, item.follow) {
        (Template::JumpIf(_), Follow::End) => needed_at(item.target()) | needed_at(item.end()),
        (Template::JumpIf(_), Follow::Next) => needed_at(item.target()),
        (Template::JumpIf(_), Follow::Taken) => needed_at(item.end()),
        (Template::Jump | Template::Call, Follow::End) => needed_at(item.target()),
        (Template::Jump | Template::Call, _) => 0,
        (template, _) if template.is_branch() => crate::jit::liveness::ALL,
        _ => 0,
    }
}

/// Whether a page offset is one of this page.
fn is_on_page(offset: i64) -> bool {
    (0..4096).contains(&offset)
}
