//! Guests for the software vCPU: memory with tables, handlers and code, and a
//! state to begin in, all from an input. Addresses: see the constants.

use weft_vcpu::{CpuState, DescriptorTable, Segment};

use crate::random::Random;
use crate::soft_memory::{PAGES, SIZE};

/// The highest of the four tables of 64-bit paging, one behind the other.
pub const TABLES: u64 = 0x1000;
const PAGE_TABLE: u64 = TABLES + 0x3000;
/// See [`guest`].
pub const GDT: u64 = 0x5000;
const TSS: u64 = 0x5800;
const TSS_32: u64 = 0x5c00;
/// See [`guest`].
pub const IDT: u64 = 0x6000;
const IDT_32: u64 = 0x7000;
/// Tables of 32-bit paging.
/// See [`guest`].
pub const LEGACY_TABLES: u64 = 0x8000;
/// Tables of PAE paging; its last level is 64-bit paging's.
const PAE_TABLES: u64 = 0xa000;
/// What gates lead to: [`Image::handler`].
pub const HANDLERS: u64 = 0xc000;
/// The end of the last one.
pub const HANDLERS_END: u64 = HANDLERS + 3 * 256 * HANDLER_SIZE;
const HANDLER_SIZE: u64 = 16;
const CODE: u64 = 0x1_0000;
const STACK: u64 = 0x2_0000;
/// Stacks of level 0 and of gates.
const OTHER_STACKS: u64 = 0x2_4000;

const DESCRIPTORS: [u64; 13] = [
    0,
    0x00af_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
    0x00cf_f300_0000_ffff,
    0x00af_fb00_0000_ffff,
    0x00cf_9b00_0000_ffff,
    0x0000_9b00_0000_ffff,
    0x67 | TSS << 16 | 0x89 << 40,
    0,
    0x00cf_fb00_0000_ffff,
    0x67 | TSS_32 << 16 | 0x89 << 40,
    // Data that grows down, and a conforming code segment.
    0x0040_9700_0000_0fff,
    0x00cf_9f00_0000_ffff,
];
const KERNEL_CODE: u16 = 0x08;
const KERNEL_DATA: u16 = 0x10;
const USER_DATA: u16 = 0x1b;
const USER_CODE: u16 = 0x23;
const CODE_32: u16 = 0x28;
const CODE_16: u16 = 0x30;
const TASK: u16 = 0x38;
const USER_CODE_32: u16 = 0x4b;
const TASK_32: u16 = 0x50;

/// Takes an input apart; behind its end are zeros.
pub struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        first
    }

    /// The next number of `bytes` bytes.
    pub fn number(&mut self, bytes: u32) -> u64 {
        (0..bytes).fold(0, |number, index| {
            number | u64::from(self.byte()) << (8 * index)
        })
    }

    /// An address or another number that instructions may like.
    pub fn value(&mut self) -> u64 {
        let kind = self.byte();
        match kind & 7 {
            0..=2 => self.number(2) * 4,
            3 => (u64::from(kind >> 3) << 12).wrapping_sub(self.number(1) & 31),
            // The same pages, with other rights: see `tables`.
            4 => u64::from(kind >> 3) << 16 | self.number(2),
            5 => self.number(1) as i8 as u64,
            6 => self.number(4) as i32 as u64,
            _ => self.number(8),
        }
    }
}

/// Guest memory while it is being made.
pub struct Image(pub Vec<u8>);

impl Image {
    /// Puts bytes at an address, as far as memory goes.
    pub fn put(&mut self, address: u64, bytes: &[u8]) {
        let from = (address as usize).min(self.0.len());
        let to = (from + bytes.len()).min(self.0.len());
        self.0[from..to].copy_from_slice(&bytes[..to - from]);
    }

    fn put_u64(&mut self, address: u64, value: u64) {
        self.put(address, &value.to_le_bytes());
    }

    fn put_u32(&mut self, address: u64, value: u64) {
        self.put(address, &(value as u32).to_le_bytes());
    }

    /// Memory is at 0 and once more read-only, the supervisor's, and not to be
    /// executed; then nothing, and a device.
    fn tables(&mut self) {
        for table in 0..3 {
            let place = TABLES + table * 0x1000;
            self.put_u64(place, (place + 0x1000) | 0x27);
            self.put_u64(place + 0xff8, (place + 0x1000) | 0x27);
        }
        // A large page of memory, and of devices behind it.
        self.put_u64(PAGE_TABLE - 0x1000 + 8, 0x87);
        self.put_u64(PAE_TABLES, (PAE_TABLES + 0x1000) | 1);
        self.put_u64(PAE_TABLES + 0x1000, PAGE_TABLE | 0x27);
        self.put_u32(LEGACY_TABLES, (LEGACY_TABLES + 0x1000) | 0x27);
        self.put_u32(LEGACY_TABLES + 4, 0x87);
        for page in 0..PAGES {
            let rights = [0x7, 0x25, 0x3, 0x7 | 1 << 63];
            for (copy, rights) in (0..).zip(rights) {
                let index = copy * PAGES + page;
                self.put_u64(PAGE_TABLE + 8 * index, page << 12 | rights);
                self.put_u32(LEGACY_TABLES + 0x1000 + 4 * index, page << 12 | rights);
            }
        }
        self.put_u64(PAGE_TABLE + 8 * 511, 0xfee0_0007);
    }

    /// A handler for 64-bit (0), 32-bit (1) or real mode (2): clears the
    /// arithmetic flags on its stack, which translated code does not keep where
    /// the guest cannot come to depend on them, and goes on in the guest's code.
    fn handler(&mut self, kind: u64, vector: u64, after: u64) -> u64 {
        let place = HANDLERS + (kind * 256 + vector) * HANDLER_SIZE;
        let error = matches!(vector, 8 | 10..=14 | 17);
        let offset = [16, 8, 4][kind as usize] + if error { [8, 4, 0][kind as usize] } else { 0 };
        let mut code = match kind {
            // and dword [rsp + offset], !ARITHMETIC
            0 | 1 => vec![0x81, 0x64, 0x24, offset, 0x2a, 0xf7, 0xff, 0xff],
            // push bp; mov bp, sp; and word [bp + 6], !ARITHMETIC; pop bp
            _ => vec![0x55, 0x89, 0xe5, 0x81, 0x66, offset + 2, 0x2a, 0xf7, 0x5d],
        };
        let distance = after.wrapping_sub(place + code.len() as u64 + 5);
        match kind {
            2 => {
                code.push(0xea);
                code.extend((8 * (vector % 32) as u16).to_le_bytes());
                code.extend(((after - 8 * (vector % 32)) >> 4).to_le_bytes()[..2].iter());
            }
            _ => {
                code.push(0xe9);
                code.extend((distance as u32).to_le_bytes());
            }
        }
        self.put(place, &code);
        place
    }

    /// Gates lead into the code, which begins at `start`.
    fn gates(&mut self, start: u64) {
        for vector in 0..256 {
            let after = start + 8 * (vector % 32);
            let [wide, narrow, real] = [0, 1, 2].map(|kind| self.handler(kind, vector, after));
            let level = if vector % 2 == 0 { 0x8e } else { 0xee };
            let stack = u64::from(vector % 8 == 0);
            let gate = |handler: u64, code: u16| {
                handler & 0xffff | handler >> 16 << 48 | level << 40 | u64::from(code) << 16
            };
            self.put_u64(IDT + 16 * vector, gate(wide, KERNEL_CODE) | stack << 32);
            self.put_u64(IDT_32 + 8 * vector, gate(narrow, CODE_32));
            self.put_u32(4 * vector, real >> 4 << 16);
        }
        self.put_u64(TSS + 4, OTHER_STACKS);
        self.put_u64(TSS + 36, OTHER_STACKS + 0x2000);
        self.put_u64(
            TSS_32 + 4,
            (OTHER_STACKS + 0x1000) | (u64::from(KERNEL_DATA) << 32),
        );
        for task in [TSS, TSS_32] {
            self.put(task + 0x66, &0x68_u16.to_le_bytes());
        }
    }
}

fn segment(selector: u16, rights: u16) -> Segment {
    Segment {
        selector,
        base: 0,
        limit: if rights & 0x8000 != 0 {
            u32::MAX
        } else {
            0xffff
        },
        rights,
    }
}

/// 64-, 32- or 16-bit code, at level 0 or 3.
fn begin(mode: u8, paging: u8) -> CpuState {
    let user = mode & 4 != 0;
    let protected = |code: Segment, data: u16| {
        let flat = segment(data, if user { 0xc0f3 } else { 0xc093 });
        CpuState {
            cs: code,
            ds: flat,
            es: flat,
            ss: flat,
            fs: segment(0, 0),
            gs: segment(0, 0),
            cpl: if user { 3 } else { 0 },
            gdtr: DescriptorTable {
                base: GDT,
                limit: 8 * DESCRIPTORS.len() as u16 - 1,
            },
            ..CpuState::reset()
        }
    };
    let data = if user { USER_DATA } else { KERNEL_DATA };
    match mode & 3 {
        0 | 1 => {
            let code = if user { USER_CODE } else { KERNEL_CODE };
            let mut state = protected(segment(code, if user { 0xa0fb } else { 0xa09b }), data);
            state.tr = Segment {
                base: TSS,
                limit: 0x67,
                ..segment(TASK, 0x8b)
            };
            state.idtr = DescriptorTable {
                base: IDT,
                limit: 0xfff,
            };
            state.cr0 = 0x8000_0033 | u64::from(paging & 1) << 16;
            state.cr3 = TABLES;
            state.cr4 = 0x6b0;
            state.efer = 0xd01;
            state
        }
        2 => {
            let code = if user { USER_CODE_32 } else { CODE_32 };
            let mut state = protected(segment(code, if user { 0xc0fb } else { 0xc09b }), data);
            if paging & 8 != 0 && !user {
                state.cs = segment(CODE_16, 0x009b);
            }
            state.tr = Segment {
                base: TSS_32,
                limit: 0x67,
                ..segment(TASK_32, 0x8b)
            };
            state.idtr = DescriptorTable {
                base: IDT_32,
                limit: 0x7ff,
            };
            state.cr0 = 0x33 | u64::from(paging & 1) << 16 | u64::from(paging >> 1 & 1) << 31;
            (state.cr3, state.cr4) = match paging & 4 {
                0 => (LEGACY_TABLES, 0x690),
                _ => (PAE_TABLES, 0x6b0),
            };
            state.efer = 0x800;
            state
        }
        _ => {
            let mut state = CpuState::started_at((CODE >> 12) as u8);
            state.idtr.limit = 0x3ff;
            state.cr4 = 0x600;
            state
        }
    }
}

/// What an input says: memory, the state to begin in, and whether anything else
/// than code was changed in memory.
pub fn guest(input: &mut Input) -> (Image, CpuState, bool) {
    let mut image = Image(vec![0; SIZE as usize]);
    let (mode, paging) = (input.byte(), input.byte());
    let start = CODE + u64::from(input.byte()) * 16;
    let mut state = begin(mode, paging);
    state.rip = start - state.cs.base;
    for register in &mut state.registers {
        *register = input.value();
    }
    if mode & 8 == 0 {
        state.registers[4] = STACK;
    }
    state.rflags = input.number(4);
    let mut random = Random::new(input.number(1));
    for byte in &mut state.fpu[32..416] {
        *byte = random.next() as u8;
    }
    if mode & 16 != 0 {
        let control = input.number(2).to_le_bytes();
        state.fpu[..2].copy_from_slice(&control[..2]);
        let control = input.number(2).to_le_bytes();
        state.fpu[24..26].copy_from_slice(&control[..2]);
    }
    image.tables();
    for (place, descriptor) in (GDT..).step_by(8).zip(DESCRIPTORS) {
        image.put_u64(place, descriptor);
    }
    image.gates(start);
    let patches = input.byte() & 7;
    for _ in 0..patches {
        let address = input.number(2) * 4;
        let length = u32::from(input.byte() & 15);
        for place in (address..).take(length as usize) {
            image.put(place, &[input.byte()]);
        }
    }
    image.put(start, input.0);
    (image, state, patches != 0)
}

/// An input: any state, and code of which much is valid.
pub fn valid(random: &mut Random) -> Vec<u8> {
    let mode = [0, 0, 0, 0, 4, 2, 6, 3][random.below(8)];
    let more = random.next() as u8 & if random.below(4) == 0 { 0xf8 } else { 0xe0 };
    let mut input = random.bytes(2);
    input.extend([mode | more, random.next() as u8 | 3]);
    input.push([0, 0, 0xff, 0xfe][random.below(4)]);
    for _ in 0..16 {
        let kind = random.below(8) as u8;
        let width = [2, 2, 2, 1, 2, 1, 4, 8][usize::from(kind)];
        input.push(kind | (random.next() as u8) << 3);
        input.extend(random.bytes(width));
    }
    // TF seldom: it keeps code from being translated.
    let flags = random.next() as u32 & !0x100 & if random.below(4) == 0 { !0 } else { 0xcd5 };
    input.extend(flags.to_le_bytes());
    input.push(random.next() as u8);
    if (mode | more) & 16 != 0 {
        input.extend((random.next() as u16 | 0x1f).to_le_bytes());
        input.extend((random.next() as u16 | 0x1f80).to_le_bytes());
    }
    let patches = random.below(12).saturating_sub(8);
    input.push(patches as u8);
    for _ in 0..patches {
        input.extend(((random.next() % 0x3000) as u16).to_le_bytes());
        let length = 1 + random.below(8);
        input.push(length as u8);
        input.extend(random.bytes(length));
    }
    for _ in 0..1 + random.below(60) {
        instruction(random, &mut input);
    }
    input
}

/// Appends bytes that are often an instruction.
fn instruction(random: &mut Random, code: &mut Vec<u8>) {
    const PREFIXES: [u8; 10] = [0x66, 0x66, 0xf2, 0xf3, 0xf0, 0x67, 0x64, 0x65, 0x2e, 0x36];
    // With operands in memory or registers, by a byte of their own.
    const COMMON: [u8; 24] = [
        0x01, 0x03, 0x09, 0x0b, 0x11, 0x13, 0x19, 0x21, 0x29, 0x2b, 0x31, 0x33, 0x39, 0x3b, 0x85,
        0x87, 0x89, 0x8b, 0x8d, 0xd1, 0xd3, 0xf7, 0xff, 0x63,
    ];
    if random.below(3) == 0 {
        code.push(PREFIXES[random.below(PREFIXES.len())]);
    }
    if random.below(3) == 0 {
        code.push(0x40 | random.next() as u8 & 15);
    }
    match random.below(12) {
        0..=3 => code.push(COMMON[random.below(COMMON.len())]),
        4..=6 => code.extend([0x0f, random.next() as u8]),
        // Short jumps, most of them back, and loops.
        7 => {
            let back = (random.next() as i8 >> 1) as u8;
            let jump = [0x70 | random.next() as u8 & 15, 0xeb, 0xe2, 0xe3][random.below(4)];
            return code.extend([jump, back]);
        }
        8 => {
            let operations = [
                0x50, 0x58, 0xa4, 0xa5, 0xaa, 0xab, 0xa6, 0xae, 0xc3, 0x9c, 0x9d,
            ];
            let operation = operations[random.below(operations.len())];
            return code.push(
                operation
                    | if operation < 0x60 {
                        random.next() as u8 & 7
                    } else {
                        0
                    },
            );
        }
        9 => {
            let immediate = random.bytes(1);
            code.extend([0x83, 0xc0 | random.next() as u8 & 0x3f]);
            return code.extend(immediate);
        }
        _ => code.push(random.next() as u8),
    }
    let operand = random.next() as u8;
    code.push(operand);
    let displacement = match operand >> 6 {
        0 if operand & 7 == 5 => 4,
        1 => 1,
        2 => 4,
        _ => 0,
    };
    if operand >> 6 != 3 && operand & 7 == 4 {
        code.push(random.next() as u8);
    }
    if displacement == 4 {
        // Small, so that memory is met.
        code.extend((random.next() as i16 as i32).to_le_bytes());
    } else {
        code.extend(random.bytes(displacement));
    }
    if random.below(4) == 0 {
        let immediate = [1, 4][random.below(2)];
        code.extend(random.bytes(immediate));
    }
}
