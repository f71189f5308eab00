//! What comes after a block on its page: whether it needs the flags.
//!
//! Only the block's own page is looked at. A write there makes all blocks of the
//! page die together, this knowledge with them; another page may be mapped, or
//! written to, without this block noticing.

use weft_vcpu::PAGE_SIZE;

use super::encoding::Encoding;
use super::liveness::{ALL, FlagUse};
use super::select::is_reachable;
use super::select::{Template, select};
use crate::block::Mode;

/// Instructions looked at on one straight way.
const INSTRUCTIONS_MAX: usize = 8;
/// Straight ways looked at in all.
const WAYS_MAX: usize = 16;

/// The instructions of a page.
pub struct Ahead<'a> {
    page: &'a [u8],
    mode: Mode,
    /// Page offsets of the ways being looked at: who comes back to one has
    /// nothing to add, because flags on the way only become fewer.
    open: Vec<i64>,
    ways: usize,
}

impl<'a> Ahead<'a> {
    /// Of a whole page.
    pub fn new(page: &'a [u8], mode: Mode) -> Self {
        Self {
            page,
            mode,
            open: Vec::new(),
            ways: 0,
        }
    }

    /// The arithmetic flags that the code at a page offset, or what follows it,
    /// may read before it overwrites them.
    pub fn flags_needed(&mut self, offset: i64) -> u32 {
        if !(0..PAGE_SIZE as i64).contains(&offset) || self.ways >= WAYS_MAX {
            return ALL;
        }
        if self.open.contains(&offset) {
            return 0;
        }
        self.ways += 1;
        self.open.push(offset);
        let needed = self.needed_on_way(offset as usize);
        self.open.pop();
        needed
    }

    fn needed_on_way(&mut self, offset: usize) -> u32 {
        let page = self.page;
        let bytes = &page[offset..];
        let mut decoder = self.mode.decoder(bytes, offset as u64);
        let (mut needed, mut passed) = (0, ALL);
        for _ in 0..INSTRUCTIONS_MAX {
            let at = decoder.position();
            let instruction = decoder.decode();
            let encoding = bytes.get(at..decoder.position()).and_then(Encoding::of);
            let Some(encoding) = encoding.filter(|_| is_reachable(&instruction)) else {
                return needed | passed;
            };
            let flags = FlagUse::of(&instruction);
            match select(&instruction, &encoding, self.mode) {
                Template::JumpIf(_) => {
                    let target = instruction.near_branch64() as i64;
                    let next = instruction.next_ip() as i64;
                    needed |= flags.read & passed;
                    let after = self.flags_needed(target) | self.flags_needed(next);
                    return needed | passed & after;
                }
                Template::Jump | Template::Call => {
                    let target = instruction.near_branch64() as i64;
                    return needed | passed & self.flags_needed(target);
                }
                template if template.is_branch() || template == Template::Handler => {
                    return needed | passed;
                }
                _ => {}
            }
            needed |= flags.read & passed;
            passed &= !flags.defined;
            if passed == 0 {
                return needed;
            }
        }
        needed | passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::RflagsBits;
    use iced_x86::code_asm::*;

    fn needed(write: impl FnOnce(&mut CodeAssembler)) -> u32 {
        let mut assembler = CodeAssembler::new(64).unwrap();
        write(&mut assembler);
        let mut page = assembler.assemble(0).unwrap();
        page.resize(4096, 0xcc);
        Ahead::new(&page, Mode(Mode::BITS_64)).flags_needed(0)
    }

    #[test]
    fn a_loop_does_not_need_what_only_it_passes_on() {
        let needed = needed(|a| {
            let mut again = a.create_label();
            a.set_label(&mut again).unwrap();
            a.dec(rcx).unwrap();
            a.jnz(again).unwrap();
            a.xor(eax, eax).unwrap();
        });
        assert_eq!(needed, 0);
    }

    #[test]
    fn both_ways_of_a_branch_count() {
        let needed = needed(|a| {
            let mut other = a.create_label();
            a.js(other).unwrap();
            a.test(rax, rax).unwrap();
            a.ret().unwrap();
            a.set_label(&mut other).unwrap();
            a.setc(al).unwrap();
            a.cmp(al, 1).unwrap();
        });
        assert_eq!(needed, RflagsBits::SF | RflagsBits::CF);
    }

    #[test]
    fn nothing_is_known_of_other_pages() {
        assert_eq!(needed(|a| a.jmp(0x2000).unwrap()), ALL);
    }
}
