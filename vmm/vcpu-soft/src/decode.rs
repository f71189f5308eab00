//! From bytes to blocks.
//!
//! Most memory operands are a base, a scaled index, a displacement and a
//! segment's base, all of 64 bits. The others (addresses of 16 and 32 bits,
//! segments with limits, displacements that do not fit) take a detour: a handler
//! that makes the address, checks it, and hands on to the instruction's own.

use iced_x86::{
    DecoderError, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
};
use weft_vcpu::{Access, PAGE_SIZE, Purpose};

use crate::access::is_canonical;
use crate::block::{BLOCK_INSTRUCTIONS_MAX, Block, BlockKey, Mode};
use crate::cpu::{Cpu, Faulted, register, segment, vector};
use crate::host;
use crate::interpret::select::{Operands, index_of, is_immediate, number_of};
use crate::interpret::{self, branch, compare};
use crate::jit::arena::ArenaFull;
use crate::jit::thunk::{Thunk, Thunks};
use crate::op::{Handler, Op, Outcome};
use crate::recent::PageUse;
use crate::segments::rights;
use crate::walk::Need;

/// Bytes of an instruction, at most.
const INSTRUCTION_BYTES_MAX: usize = 15;

/// Bytes of a block, at most.
const BLOCK_BYTES_MAX: usize = BLOCK_INSTRUCTIONS_MAX * INSTRUCTION_BYTES_MAX;

/// Bytes that most blocks do with.
const BLOCK_BYTES_USUAL: usize = 96;

/// Why there is no block at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The fetch faulted: `Cpu::fault`.
    Fault,
    /// Another vCPU has to come to a block boundary first: try again when
    /// requests have been looked at.
    Later,
    /// There is no room for more code: all of it has to be freed first.
    Full,
    /// Instructions of the page have breakpoints: they are run alone.
    Stops,
}

impl From<Faulted> for Missing {
    fn from(Faulted: Faulted) -> Self {
        Self::Fault
    }
}

/// What an [`Op`] has no room for; its `immediate` is the address of this.
#[derive(Clone, Debug)]
pub enum Side {
    /// An unusual memory operand.
    Detour(Box<Detour>),
    /// An SSE, MMX or x87 instruction, run on the host.
    Thunk(Box<Thunk>),
}

/// An unusual memory operand, and the instruction that works on it.
#[derive(Clone, Debug)]
pub struct Detour {
    /// With [`Cpu::ADDRESS`] as its memory operand.
    op: Op,
    base: u8,
    index: u8,
    scale: u8,
    segment: u8,
    displacement: u64,
    /// Of the offset.
    mask: u64,
    /// Bytes, for the segment's limit; 0 where no memory is accessed (LEA).
    size: u16,
    write: bool,
}

extern "C" fn detour(cpu: &mut Cpu, op: &Op) -> Outcome {
    // SAFETY: the immediate of this handler's ops is the address of a detour
    // that the block owns.
    let detour = unsafe { &*(op.immediate as *const Detour) };
    let offset = cpu
        .register(detour.base)
        .wrapping_add(cpu.register(detour.index) << detour.scale)
        .wrapping_add(detour.displacement)
        & detour.mask;
    let mut address = offset;
    if detour.size != 0 {
        if let Err(faulted) = cpu.check_limit(detour, offset) {
            return cpu.outcome(faulted);
        }
        let base = cpu.segment_bases[usize::from(detour.segment)];
        address = cpu.wrapped(offset.wrapping_add(base));
    }
    cpu.registers[usize::from(Cpu::ADDRESS)] = address;
    // SAFETY: the inner op was made for the same mode, and the block is alive.
    unsafe { (detour.op.handler)(cpu, &detour.op) }
}

impl Cpu {
    /// Limit and rights of a segment outside 64-bit code.
    fn check_limit(&mut self, detour: &Detour, offset: u64) -> Result<(), Faulted> {
        let which = usize::from(detour.segment);
        if self.mode.is_64() || which == segment::NONE {
            return Ok(());
        }
        let value = &self.segments[which];
        let code = value.rights & rights::CODE != 0;
        let able = value.rights & rights::READABLE_OR_WRITABLE != 0;
        let down = !code && value.rights & rights::DOWN_OR_CONFORMING != 0;
        let last = offset + u64::from(detour.size) - 1;
        let limit = u64::from(value.limit);
        let inside = if down {
            let top = if value.rights & rights::BIG != 0 {
                u64::from(u32::MAX)
            } else {
                0xffff
            };
            offset > limit && last <= top
        } else {
            last <= limit
        };
        let allowed = if detour.write {
            able && !code || !self.is_protected()
        } else {
            able || !code
        };
        if value.rights & rights::PRESENT != 0 && inside && allowed {
            return Ok(());
        }
        let vector = if which == segment::SS {
            vector::STACK
        } else {
            vector::GENERAL_PROTECTION
        };
        Err(self.raise_error(vector, 0))
    }

    /// The guest-physical address of instructions at linear `address`, and
    /// whether the translation is global.
    pub fn fetch_address(&mut self, address: u64) -> Result<(u64, bool), Faulted> {
        let class = self.privilege_class();
        if let Some(found) = self.fetch.find(class, address) {
            return Ok(found);
        }
        if !is_canonical(address) {
            return Err(self.general_protection(0));
        }
        let walked = self.walk(address, Need::Execute, self.party())?;
        self.recent.add(walked.page, PageUse::Read);
        // Its blocks may be known: then nothing else looks for the page.
        let _ = self.memory.held(walked.page, Access::Read);
        self.fetch.fill(class, address, walked.page, walked.global);
        Ok((walked.page + (address & (PAGE_SIZE - 1)), walked.global))
    }

    /// Linear address of an instruction.
    pub fn linear_rip(&self, rip: u64) -> u64 {
        if self.mode.is_64() {
            rip
        } else {
            rip.wrapping_add(self.segment_bases[segment::CS]) & 0xffff_ffff
        }
    }

    /// Decodes the block at `rip`, of `count` instructions at most.
    pub fn decode(&mut self, rip: u64, physical: u64, count: usize) -> Result<Block, Missing> {
        let on_page = (PAGE_SIZE - (physical & (PAGE_SIZE - 1))) as usize;
        let key = BlockKey {
            physical,
            mode: self.mode,
        };
        let mut bytes = [0; BLOCK_BYTES_MAX];
        let mut instructions = Vec::with_capacity(count.min(16));
        // Most blocks are short: the rest of the page is only read for the others.
        for most in [BLOCK_BYTES_USUAL, BLOCK_BYTES_MAX] {
            let read = on_page.min(most);
            self.read_code(self.linear_rip(rip), physical, &mut bytes[..read])?;
            instructions.clear();
            let done = decode_all(&bytes[..read], key.mode, rip, count, &mut instructions);
            if done || read == on_page {
                break;
            }
        }
        let mut second_page = None;
        if instructions.is_empty() {
            let next = self.wrapped(self.linear_rip(rip).wrapping_add(on_page as u64));
            let linear = next;
            let (next, _) = self.fetch_address(linear)?;
            let end = on_page + INSTRUCTION_BYTES_MAX;
            self.read_code(linear, next, &mut bytes[on_page..end])?;
            decode_all(&bytes[..end], key.mode, rip, 1, &mut instructions);
            second_page = Some(next);
        }
        let used: usize = instructions.iter().map(Instruction::len).sum();
        let parts = Parts {
            key,
            second_page,
            rip,
            instructions: &instructions,
            bytes: &bytes[..used.min(BLOCK_BYTES_MAX)],
        };
        parts
            .assemble(&mut self.thunks)
            .map_err(|ArenaFull| Missing::Full)
    }

    /// Reads bytes of one page, which is marked as code first.
    fn read_code(&mut self, linear: u64, physical: u64, bytes: &mut [u8]) -> Result<(), Missing> {
        let page = physical & !(PAGE_SIZE - 1);
        if !self.mark_code(page) {
            return Err(Missing::Later);
        }
        let Ok(host) = self.acquire(page, Access::Read, Purpose::Code, linear) else {
            // Nothing answers a fetch from a device.
            self.undefined();
            return Err(Missing::Fault);
        };
        let offset = (physical - page) as usize;
        let length = bytes.len().min(PAGE_SIZE as usize - offset);
        // SAFETY: the page is held, and the bytes are on it.
        unsafe { host::copy_out(host.add(offset), &mut bytes[..length]) };
        Ok(())
    }
}

/// Decodes up to `count` instructions of a block; whether its end was found.
fn decode_all(
    bytes: &[u8],
    mode: Mode,
    rip: u64,
    count: usize,
    instructions: &mut Vec<Instruction>,
) -> bool {
    let mut decoder = mode.decoder(bytes, rip);
    while instructions.len() < count {
        if !decoder.can_decode() {
            return false;
        }
        let instruction = decoder.decode();
        if decoder.last_error() == DecoderError::NoMoreBytes {
            return false;
        }
        instructions.push(instruction);
        if instruction.is_invalid() || interpret::ends_block(&instruction) {
            return true;
        }
    }
    true
}

/// What a block is made of.
struct Parts<'a> {
    key: BlockKey,
    second_page: Option<u64>,
    rip: u64,
    instructions: &'a [Instruction],
    bytes: &'a [u8],
}

impl Parts<'_> {
    /// Makes ops of the instructions.
    fn assemble(&self, thunks: &mut Thunks) -> Result<Block, ArenaFull> {
        let closed = self
            .instructions
            .last()
            .is_some_and(branch::never_continues);
        let mut ops = Vec::with_capacity(self.instructions.len() + usize::from(!closed));
        let mut side = Vec::new();
        let mut offset = 0;
        let mut before: Option<Operands<'_>> = None;
        for instruction in self.instructions {
            let operands = Operands::of(instruction, self.key.mode);
            let sides = side.len();
            let op = operation(&operands, self.rip, offset, &mut side, thunks)?;
            if let (Some(before), Some(last), true) =
                (&before, ops.last_mut(), self.key.mode.is_64())
            {
                compare::join(before, last, instruction, &op);
            }
            before = (side.len() == sides).then_some(operands);
            ops.push(op);
            offset += instruction.len() as u16;
        }
        if !closed {
            ops.push(empty(branch::end_of_block, offset, 0));
        }
        Ok(Block::new(
            self.key,
            self.second_page,
            self.instructions.len() as u32,
            ops.into_boxed_slice(),
            self.bytes.into(),
            side.into_boxed_slice(),
        ))
    }
}

fn empty(handler: Handler, offset: u16, length: u8) -> Op {
    Op {
        handler,
        immediate: 0,
        displacement: 0,
        destination: 0,
        source: 0,
        base: Cpu::NO_REGISTER,
        index: Cpu::NO_REGISTER,
        scale: 0,
        segment: segment::NONE as u8,
        length,
        extra: 0,
        offset,
    }
}

fn operation(
    operands: &Operands<'_>,
    rip: u64,
    offset: u16,
    side: &mut Vec<Side>,
    thunks: &mut Thunks,
) -> Result<Op, ArenaFull> {
    let instruction = operands.instruction;
    let undefined = empty(interpret::undefined, offset, instruction.len() as u8);
    if instruction.is_invalid() {
        return Ok(undefined);
    }
    let mut op = undefined;
    registers(instruction, &mut op);
    if let Some(handler) = interpret::select(operands, &mut op, rip) {
        op.handler = handler;
    } else if let Some(thunk) = thunks.get(instruction, operands.mode.model())? {
        op = undefined;
        op.handler = interpret::float::thunk_handler(operands.mode, &thunk);
        if is_implied(instruction) {
            op.base = register::RDI as u8;
            op.segment = interpret::operand_segment(instruction, operands.mode);
        }
        let thunk = Box::new(thunk);
        op.immediate = &raw const *thunk as u64;
        side.push(Side::Thunk(thunk));
    } else {
        return Ok(undefined);
    }
    // The memory operand of XLAT has a byte register as its index: the handler's.
    let explicit = instruction.mnemonic() != Mnemonic::Xlatb
        && (0..instruction.op_count()).any(|index| instruction.op_kind(index) == OpKind::Memory);
    if explicit {
        return Ok(memory(operands, op, rip, side));
    }
    Ok(op)
}

/// Whether memory at RDI is an operand of an instruction that is no string
/// instruction: MASKMOVQ, MASKMOVDQU.
fn is_implied(instruction: &Instruction) -> bool {
    (0..instruction.op_count()).any(|index| instruction.op_kind(index) == OpKind::MemorySegRDI)
}

/// Register numbers and immediates of the first two operands, where most
/// handlers look for them.
fn registers(instruction: &Instruction, op: &mut Op) {
    for operand in 0..instruction.op_count().min(2) {
        match instruction.op_kind(operand) {
            OpKind::Register => {
                let register = instruction.op_register(operand);
                if register.is_gpr() {
                    let index = index_of(register);
                    if operand == 0 {
                        op.destination = index;
                    } else {
                        op.source = index;
                    }
                }
            }
            kind if is_immediate(kind) => op.immediate = instruction.immediate(operand),
            _ => {}
        }
    }
}

/// The size of an address, in bytes.
fn address_size(instruction: &Instruction, mode: Mode) -> usize {
    let base = instruction.memory_base();
    let index = instruction.memory_index();
    if base != Register::None {
        base.size()
    } else if index.is_gpr() {
        index.size()
    } else if mode.is_64() {
        match instruction.memory_displ_size() {
            4 => 4,
            _ => 8,
        }
    } else {
        instruction.memory_displ_size().max(2) as usize
    }
}

/// The memory operand: in the op, or by a detour.
fn memory(operands: &Operands<'_>, mut op: Op, rip: u64, side: &mut Vec<Side>) -> Op {
    let instruction = operands.instruction;
    let mode = operands.mode;
    let relative = instruction.is_ip_rel_memory_operand();
    let (base, index) = (instruction.memory_base(), instruction.memory_index());
    let base_number = match base {
        _ if relative => Cpu::BLOCK_RIP,
        Register::None => Cpu::NO_REGISTER,
        base => number_of(base),
    };
    let index_number = match index {
        Register::None => Cpu::NO_REGISTER,
        // The handler's: there are several.
        index if index.is_vector_register() => Cpu::NO_REGISTER,
        index => number_of(index),
    };
    let scale = instruction.memory_index_scale().trailing_zeros() as u8;
    let mut displacement = instruction.memory_displacement64();
    if relative {
        displacement = instruction.ip_rel_memory_address().wrapping_sub(rip);
    }
    if interpret::stack::pops_relative_to_itself(operands) && !mode.is_64() {
        displacement = displacement.wrapping_add(operands.size as u64);
    }
    let segment = interpret::operand_segment(instruction, mode);
    let size = address_size(instruction, mode);
    let short = i32::try_from(displacement as i64);
    if let (true, 8, Ok(short)) = (mode.is_64(), size, short) {
        op.base = base_number;
        op.index = index_number;
        op.scale = scale;
        op.displacement = short;
        op.segment = segment;
        return op;
    }
    op.base = Cpu::ADDRESS;
    let outer = empty(detour, op.offset, op.length);
    let touches = instruction.mnemonic() != Mnemonic::Lea
        && instruction.mnemonic() != Mnemonic::Nop
        && instruction.mnemonic() != Mnemonic::Invlpg;
    let detour = Box::new(Detour {
        op,
        base: base_number,
        index: index_number,
        scale,
        segment,
        displacement,
        mask: u64::MAX >> (64 - 8 * size as u32),
        size: if touches {
            instruction.memory_size().size().max(1) as u16
        } else {
            0
        },
        write: writes_memory(instruction),
    });
    let outer = Op {
        immediate: &raw const *detour as u64,
        ..outer
    };
    side.push(Side::Detour(detour));
    outer
}

fn writes_memory(instruction: &Instruction) -> bool {
    let mut factory = InstructionInfoFactory::new();
    factory.info(instruction).used_memory().iter().any(|used| {
        matches!(
            used.access(),
            OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
        )
    })
}
