//! The software vCPU's page walker against tables and control registers that may
//! be anything, compared with a walker of a few lines; then accesses through the
//! TLB, of every size.

use crate::random::Random;
use crate::soft_guest::Input;
use crate::soft_memory::{PAGES, SIZE, Scattered};
use std::cell::RefCell;
use std::sync::Arc;

use weft_vcpu_soft::cpu::{Cpu, cr0, cr4, efer, rflags};
use weft_vcpu_soft::walk::{Need, PHYSICAL_BITS, Party};
use weft_vcpu_soft::{Configuration, SoftMachine};

const NEEDS: [Need; 3] = [Need::Read, Need::Write, Need::Execute];
/// Tables are on the first pages, so that they meet often.
const TABLES: u64 = 8;

/// The registers that paging depends on.
#[derive(Clone, Copy, Debug)]
struct Registers {
    cr0: u64,
    cr3: u64,
    cr4: u64,
    efer: u64,
    /// RFLAGS.AC: the supervisor's instructions may access user pages (SMAP).
    open: bool,
}

/// Page tables in a copy of memory.
struct Reference<'a> {
    memory: &'a mut [u8],
    registers: Registers,
}

/// Bits of entries.
mod bit {
    pub const PRESENT: u64 = 1;
    pub const WRITABLE: u64 = 2;
    pub const USER: u64 = 4;
    pub const ACCESSED: u64 = 0x20;
    pub const DIRTY: u64 = 0x40;
    pub const LARGE: u64 = 0x80;
    pub const GLOBAL: u64 = 0x100;
    pub const NO_EXECUTE: u64 = 1 << 63;
}

/// Bits `from` to `to` (Intel SDM's order: both belong to it).
fn bits(from: u32, to: u32) -> u64 {
    (u64::MAX >> (63 - to)) & (u64::MAX << from)
}

impl Reference<'_> {
    fn entry(&self, place: u64, size: u64) -> Option<u64> {
        let bytes = self
            .memory
            .get(place as usize..(place + size) as usize)?
            .iter()
            .rev();
        Some(bytes.fold(0, |entry, byte| entry << 8 | u64::from(*byte)))
    }

    fn mark(&mut self, place: u64, bits: u64) {
        self.memory[place as usize] |= bits as u8;
    }

    /// Reserved bits of a present entry (Intel SDM volume 3, 4.3 to 4.5).
    fn reserved(&self, levels: u32, level: u32, leaf: bool) -> u64 {
        if levels == 2 {
            return if leaf && level == 2 { 1 << 21 } else { 0 };
        }
        let no_execute = match self.registers.efer & efer::NXE {
            0 => bits(63, 63),
            _ => 0,
        };
        let upper = if levels == 3 { bits(52, 62) } else { 0 };
        let common = no_execute | upper | bits(PHYSICAL_BITS, 51);
        common
            | match (levels, level, leaf) {
                (3, 3, _) => bits(1, 2) | bits(5, 8) | bits(63, 63),
                (4, 4, _) => bits(7, 7),
                (_, 3, true) => bits(13, 29),
                (_, 2, true) => bits(13, 20),
                _ => 0,
            }
    }

    /// The page and whether it is global, or the error code's lowest four bits
    /// without those of the access.
    fn walk(&mut self, address: u64, need: Need, by: Party) -> Result<(u64, bool), u32> {
        let user = by == Party::User;
        let Registers {
            cr0,
            cr3,
            cr4,
            efer,
            open,
            ..
        } = self.registers;
        if cr0 & cr0::PG == 0 {
            return Ok((address & bits(12, 31), true));
        }
        let (levels, size, width, mut table) = match (efer & efer::LMA, cr4 & cr4::PAE) {
            (0, 0) => (2, 4, 10, cr3 & bits(12, 31)),
            (0, _) => (3, 8, 9, cr3 & bits(5, 31)),
            _ => (4, 8, 9, cr3 & bits(12, 51)),
        };
        let (mut writable, mut for_user, mut executable) = (true, true, true);
        let mut level = levels;
        loop {
            let low = 12 + width * (level - 1);
            let mut index = address >> low & ((1 << width) - 1);
            let pointers = levels == 3 && level == 3;
            if pointers {
                index &= 3;
            }
            let place = table + index * size;
            let Some(entry) = self.entry(place, size) else {
                return Err(9);
            };
            if entry & bit::PRESENT == 0 {
                return Err(0);
            }
            let may_be_large = match levels {
                2 => level == 2 && cr4 & cr4::PSE != 0,
                3 => level == 2,
                _ => level == 2 || level == 3,
            };
            let leaf = level == 1 || may_be_large && entry & bit::LARGE != 0;
            if entry & self.reserved(levels, level, leaf) != 0 {
                return Err(9);
            }
            if !pointers {
                writable &= entry & bit::WRITABLE != 0;
                for_user &= entry & bit::USER != 0;
                executable &= entry & bit::NO_EXECUTE == 0;
            }
            if !leaf {
                if !pointers {
                    self.mark(place, bit::ACCESSED);
                }
                table = entry & bits(12, 51);
                level -= 1;
                continue;
            }
            let closed = cr4 & cr4::SMAP != 0 && (by == Party::Processor || !open);
            let allowed = match need {
                _ if user && !for_user => false,
                Need::Read | Need::Write if closed && for_user && !user => false,
                Need::Read => true,
                Need::Write => writable || !user && cr0 & cr0::WP == 0,
                Need::Execute => executable && (user || !for_user || cr4 & cr4::SMEP == 0),
            };
            if !allowed {
                return Err(1);
            }
            let dirty = if need == Need::Write { bit::DIRTY } else { 0 };
            self.mark(place, bit::ACCESSED | dirty);
            let frame = match (levels, level) {
                (2, 2) => entry & bits(22, 31) | (entry & bits(13, 20)) << 19,
                _ => entry & bits(low, 51),
            };
            let global = entry & bit::GLOBAL != 0 && cr4 & cr4::PGE != 0;
            return Ok((frame | address & bits(0, low - 1) & !0xfff, global));
        }
    }
}

struct Walker {
    memory: Arc<Scattered>,
    machine: Arc<SoftMachine>,
    cpu: Box<Cpu>,
}

thread_local! {
    static WALKER: RefCell<Walker> = RefCell::new(Walker::new());
}

impl Walker {
    fn new() -> Self {
        let memory = Scattered::new();
        let machine = SoftMachine::new(memory.clone());
        let cpu = Cpu::new(&machine, Configuration::default()).expect("memory for a vCPU");
        let mut walker = Self {
            memory,
            machine,
            cpu,
        };
        walker.cpu.come_inside(None);
        walker
    }

    fn begin(&mut self, image: &[u8], registers: Registers) {
        self.memory.fill(image);
        self.machine.written(0..SIZE);
        let cpu = &mut self.cpu;
        cpu.cr0 = registers.cr0;
        cpu.cr3 = registers.cr3;
        cpu.cr4 = registers.cr4;
        cpu.efer = registers.efer;
        cpu.rflags_system = if registers.open { rflags::AC } else { 0 };
        cpu.update_mode();
        cpu.flush_everything();
    }

    fn compare(&mut self, image: &mut [u8], registers: Registers, input: &mut Input) {
        let kind = input.byte();
        let address = address(input, registers);
        let need = NEEDS[usize::from(kind & 0x3f) % 3];
        let by = match kind >> 6 {
            0 => Party::Supervisor,
            1 => Party::Processor,
            _ => Party::User,
        };
        let mut reference = Reference {
            memory: image,
            registers,
        };
        let wanted = reference.walk(address, need, by);
        let got = match self.cpu.walk(address, need, by) {
            Ok(walked) => Ok((walked.page, walked.global)),
            Err(_) => {
                let fault = self.cpu.fault;
                assert_eq!((fault.vector, fault.address), (14, address));
                assert_eq!(fault.error & 2 != 0, need == Need::Write);
                assert_eq!(fault.error & 4 != 0, by == Party::User);
                Err(fault.error & 9)
            }
        };
        assert_eq!(got, wanted, "{address:#x} {need:?} {by:?} {registers:x?}");
    }

    /// An access, which may change the tables themselves.
    fn access(&mut self, registers: Registers, input: &mut Input) {
        let kind = input.byte();
        let address = address(input, registers);
        let size = [1, 2, 4, 8][usize::from(kind & 3)];
        self.cpu.cpl = if kind & 0x80 != 0 { 3 } else { 0 };
        self.cpu.update_mode();
        match kind >> 2 & 3 {
            0 => drop(self.cpu.load_slow(address, size)),
            1 => drop(self.cpu.store_slow(address, size, input.number(2))),
            2 => drop(self.cpu.load::<4>(address)),
            _ => drop(self.cpu.store::<8>(address, input.number(2))),
        }
    }
}

/// An address of which each level's index is small, most often.
fn address(input: &mut Input, registers: Registers) -> u64 {
    let kind = input.byte();
    let address = match kind & 3 {
        0 => input.number(8),
        _ => {
            let indices = input.number(4);
            let offset = [0, 0xffc, 0xfff, 0x10][usize::from(kind >> 2 & 3)];
            let index = |level: u32| (indices >> (8 * level) & 7) << (12 + 9 * level);
            (0..4).map(index).sum::<u64>() | offset
        }
    };
    match registers.efer & efer::LMA {
        0 => address & 0xffff_ffff,
        _ => {
            (address << 16) as i64 as u64 >> 16
                | if address >> 47 & 1 != 0 {
                    bits(48, 63)
                } else {
                    0
                }
        }
    }
}

fn registers(input: &mut Input) -> Registers {
    let (kind, pages) = (input.number(2), input.number(1));
    let if_set = |bit: u32, value: u64| if kind >> bit & 1 != 0 { value } else { 0 };
    let mut registers = Registers {
        cr0: cr0::PE | cr0::PG | if_set(4, cr0::WP),
        cr3: (pages % TABLES) << 12,
        cr4: if_set(5, cr4::PSE)
            | if_set(6, cr4::PGE)
            | if_set(7, cr4::SMEP)
            | if_set(2, cr4::SMAP),
        efer: if_set(8, efer::NXE),
        open: if_set(3, 1) != 0,
    };
    match kind & 3 {
        0 => {}
        1 => registers.cr4 |= cr4::PAE,
        _ => {
            registers.cr4 |= cr4::PAE;
            registers.efer |= efer::LME | efer::LMA;
        }
    }
    if if_set(9, 1) & if_set(10, 1) != 0 {
        registers.cr3 = input.number(8);
    }
    if kind >> 11 & 0xf == 0xf {
        registers.cr0 = cr0::PE;
    }
    registers
}

/// An entry that leads to a page of memory, most often.
fn entry(input: &mut Input) -> u64 {
    let (page, flags) = (input.byte(), input.number(2));
    let anywhere = match flags >> 13 {
        0 => input.number(8),
        1 => bit::NO_EXECUTE,
        2 => input.number(4),
        _ => 0,
    };
    (u64::from(page) % (PAGES + 8)) << 12 | flags & 0x1ff | anywhere
}

/// Bytes: control registers, entries, walks, accesses.
pub fn walk(bytes: &[u8]) {
    let mut input = Input(bytes);
    let registers = registers(&mut input);
    let mut image = vec![0; SIZE as usize];
    for _ in 0..input.byte() {
        let place = (input.number(1) % TABLES) << 12 | (input.number(1) & 7) << 3;
        let entry = entry(&mut input).to_le_bytes();
        image[place as usize..][..8].copy_from_slice(&entry);
    }
    WALKER.with_borrow_mut(|walker| {
        walker.begin(&image, registers);
        for _ in 0..input.byte() & 31 {
            walker.compare(&mut image, registers, &mut input);
        }
        let bytes = walker.memory.bytes();
        let differs = (0..bytes.len()).find(|&place| bytes[place] != image[place]);
        assert_eq!(differs, None, "{registers:x?}");
        for _ in 0..input.byte() & 31 {
            walker.access(registers, &mut input);
        }
    });
}

/// An input: tables that lead somewhere, most often.
pub fn valid(random: &mut Random) -> Vec<u8> {
    let kind = random.next() & 0x3fff;
    let mut input = Vec::from((kind as u16).to_le_bytes());
    input.push(random.next() as u8);
    let entries = 20 + random.below(80);
    input.push(entries as u8);
    for _ in 0..entries {
        input.extend(random.bytes(2));
        let page = if random.below(3) == 0 {
            64
        } else {
            TABLES as usize
        };
        input.push(random.below(page) as u8);
        // Present and for everybody, most often; not large, most often.
        let mut flags = random.next() as u16 | 7 | 0x8000;
        if random.below(3) != 0 {
            flags &= !0x80;
        }
        if random.below(8) == 0 {
            flags = random.next() as u16;
        }
        input.extend(flags.to_le_bytes());
    }
    for _ in 0..2 {
        let accesses = random.below(32);
        input.push(accesses as u8);
        for _ in 0..accesses {
            input.push(random.next() as u8);
            input.push(random.next() as u8 | 1);
            input.extend(random.bytes(4));
        }
    }
    input
}
