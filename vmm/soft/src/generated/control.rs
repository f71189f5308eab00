//! The ends of blocks: branches, and ways to the next block.

use super::assembler::register::*;
use super::assembler::{Memory, condition};
use super::select::Template;
use super::stubs::{self, CODE_PAGE};
use super::translate::{Pending, STACK_READ, Translation};

impl Translation<'_> {
    /// The flags needed after the block's last instruction.
    pub fn needed_at_end(&self) -> u32 {
        let Some(last) = self.items.last() else {
            return 0;
        };
        let needed = |offset| {
            if is_on_page(offset) {
                (self.plan.needed_at)(offset)
            } else {
                super::liveness::ALL
            }
        };
        match last.template {
            Template::JumpIf(_) => needed(self.target()) | needed(last.end()),
            Template::Jump | Template::Call => needed(self.target()),
            template if template.is_branch() => super::liveness::ALL,
            _ => needed(last.end()),
        }
    }

    /// Page offset of the last instruction's target.
    fn target(&self) -> i64 {
        // Decoded as if the page were at address 0.
        self.items
            .last()
            .map_or(0, |item| item.instruction.near_branch64() as i64)
    }

    /// The block's last instruction, a branch.
    pub fn branch(&mut self, index: usize) {
        let needed = self.needed[index];
        match self.items[index].template {
            Template::JumpIf(condition) => self.jump_if(index, condition),
            Template::Jump => {
                self.save_flags_if(needed);
                self.go_to(self.target(), None);
            }
            Template::Call => {
                let slow = self.push_return_address(index);
                self.go_to(self.target(), None);
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
                self.push_return_address_to(index, slow);
                self.a.load(R10, stubs::SCRATCH);
                self.look_up();
                self.finish_slow(index, slow);
            }
            Template::Return(extra) => {
                let slow = self.a.label();
                self.lose_flags(index);
                self.a.copy(R10, R15);
                self.probe(STACK_READ, slow);
                self.a.load(R10, Memory::At(R10, 0));
                self.move_stack(8 + i32::from(extra));
                self.look_up();
                self.finish_slow(index, slow);
            }
            _ => unreachable!("only branches come here"),
        }
    }

    fn push_return_address(&mut self, index: usize) -> super::assembler::Label {
        let slow = self.a.label();
        self.lose_flags(index);
        self.push_return_address_to(index, slow);
        slow
    }

    fn push_return_address_to(&mut self, index: usize, slow: super::assembler::Label) {
        let end = self.items[index].end() as i32;
        self.push_address(slow);
        self.a.load(R11, CODE_PAGE);
        self.a.address_of(R11, Memory::At(R11, end));
        self.a.store(Memory::At(R10, 0), R11);
        self.move_stack(-8);
    }

    fn jump_if(&mut self, index: usize, condition: u8) {
        self.save_flags_if(self.needed[index]);
        self.want_flags(index);
        let (target, next) = (self.target(), self.items[index].end());
        if !is_on_page(target) {
            let enter = self.a.label();
            self.a.jump_if(condition, enter);
            self.pending.push(Pending::Far {
                enter,
                offset: target,
            });
            self.go_to(next, None);
        } else if target > self.items[index].offset {
            self.go_to(target, Some(condition));
            self.go_to(next, None);
        } else {
            let fall_through = self.a.label();
            self.a.jump_if(condition ^ 1, fall_through);
            self.go_back_to(target);
            self.a.bind(fall_through);
            self.go_to(next, None);
        }
    }

    /// To the block at a page offset: always, or on a condition when that is on
    /// the page and further on.
    pub fn go_to(&mut self, offset: i64, condition: Option<u8>) {
        if !is_on_page(offset) {
            self.go_far(offset);
        } else if condition.is_none() && self.items.last().is_some_and(|i| offset <= i.offset) {
            self.go_back_to(offset);
        } else {
            self.link(offset, condition);
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
            Pending::Far { enter, offset } => {
                self.a.bind(enter);
                self.go_far(offset);
            }
            Pending::Budget { enter } => {
                self.a.bind(enter);
                self.give_back_budget();
                self.a.constant(R11, 0);
                self.a.constant(R10, self.items[0].offset as u64);
                self.a.jump_to(self.plan.stubs.next);
            }
            Pending::Slow { .. } | Pending::LoadXmm { .. } => {
                unreachable!("written by Translation::write_pending")
            }
        }
    }
}

/// Whether a page offset is one of this page.
fn is_on_page(offset: i64) -> bool {
    (0..4096).contains(&offset)
}
