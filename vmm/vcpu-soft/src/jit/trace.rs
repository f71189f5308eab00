//! What is translated at once: a block and the blocks that most likely follow it
//! on its page, with ways out where a branch goes elsewhere.

use iced_x86::Instruction;
use weft_vcpu::PAGE_SIZE;

use super::encoding::Encoding;
use super::liveness::FlagUse;
use super::select::is_reachable;
use super::select::{Template, select};
use crate::block::Block;
use crate::op::Op;

/// Instructions in a trace; the block that exceeds it is the last.
const INSTRUCTIONS_MAX: usize = 96;
/// Blocks in a trace.
const BLOCKS_MAX: usize = 12;

/// Where a trace goes on after a block's last instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follow {
    /// Nowhere: the trace ends here, or this is not a block's last instruction.
    End,
    /// At the next instruction in memory.
    Next,
    /// At the branch's target.
    Taken,
}

/// One instruction of the trace.
pub struct Item<'a> {
    pub instruction: Instruction,
    pub bytes: &'a [u8],
    pub encoding: Option<Encoding<'a>>,
    pub template: Template,
    pub flags: FlagUse,
    /// Page offset of its first byte.
    pub offset: i64,
    pub block: &'a Block,
    /// Index in its block.
    pub index: usize,
    pub follow: Follow,
}

impl Item<'_> {
    /// Page offset of the next instruction.
    pub fn end(&self) -> i64 {
        self.offset + self.bytes.len() as i64
    }

    /// Page offset of a direct branch's target.
    pub fn target(&self) -> i64 {
        // Decoded as if the page were at address 0.
        self.instruction.near_branch64() as i64
    }

    /// What the interpreter would execute.
    pub fn op(&self) -> *const Op {
        &raw const self.block.ops[self.index]
    }

    /// Instructions of its block after it.
    pub fn rest(&self) -> i32 {
        self.block.count as i32 - 1 - self.index as i32
    }
}

/// The trace that starts with `head`; `None` when that cannot be translated.
/// `find` knows the page's other blocks by their offset.
pub fn collect<'a>(
    head: &'a Block,
    find: &dyn Fn(i64) -> Option<&'a Block>,
) -> Option<Vec<Item<'a>>> {
    let mut items = Vec::new();
    let mut starts = vec![offset_of(head)];
    push_block(&mut items, head)?;
    while items.len() < INSTRUCTIONS_MAX && starts.len() < BLOCKS_MAX {
        let Some((follow, block)) = successor(items.last()?, find) else {
            break;
        };
        let start = offset_of(block);
        let length = items.len();
        if starts.contains(&start) || push_block(&mut items, block).is_none() {
            items.truncate(length);
            break;
        }
        items[length - 1].follow = follow;
        starts.push(start);
    }
    Some(items)
}

fn offset_of(block: &Block) -> i64 {
    (block.physical & (PAGE_SIZE - 1)) as i64
}

fn push_block<'a>(items: &mut Vec<Item<'a>>, block: &'a Block) -> Option<()> {
    if !block.mode.is_64() || block.second_page().is_some() || block.count == 0 {
        return None;
    }
    let start = offset_of(block);
    let mut at = 0;
    for (index, instruction) in block.instructions(start as u64).enumerate() {
        let bytes = block.bytes.get(at..at + instruction.len())?;
        let encoding = Encoding::of(bytes);
        let template = match &encoding {
            Some(encoding) if is_reachable(&instruction) => {
                select(&instruction, encoding, block.mode)
            }
            _ => Template::Handler,
        };
        // Where SSE is switched off, the handler raises the exception.
        let template = match template {
            template if template.uses_xmm() && block.mode.no_fpu() => Template::Handler,
            template => template,
        };
        let flags = match template {
            Template::Handler => FlagUse::OPAQUE,
            _ => FlagUse::of(&instruction),
        };
        items.push(Item {
            instruction,
            bytes,
            encoding,
            template,
            flags,
            offset: start + at as i64,
            block,
            index,
            follow: Follow::End,
        });
        at += instruction.len();
    }
    Some(())
}

/// Where control most likely goes after a block's last instruction, if that is
/// further on.
fn successor<'a>(
    last: &Item<'a>,
    find: &dyn Fn(i64) -> Option<&'a Block>,
) -> Option<(Follow, &'a Block)> {
    match last.template {
        Template::JumpIf(_) => {
            // A loop's end stays a block's end: its jump back is direct.
            let taken = (last.target() > last.offset).then(|| find(last.target()))?;
            match (taken, find(last.end())) {
                (Some(taken), Some(next)) if taken.executions > next.executions => {
                    Some((Follow::Taken, taken))
                }
                (_, Some(next)) => Some((Follow::Next, next)),
                (Some(taken), None) => Some((Follow::Taken, taken)),
                (None, None) => None,
            }
        }
        // What goes back looks at requests, which the middle of a trace does not.
        Template::Call | Template::Jump if last.target() > last.offset => {
            Some((Follow::Taken, find(last.target())?))
        }
        template if template.is_branch() || template == Template::Handler => None,
        _ => Some((Follow::Next, find(last.end())?)),
    }
}
